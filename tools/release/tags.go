package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/mod/module"
	"golang.org/x/mod/sumdb/dirhash"
)

// tags returns the names of the tags of a version. The go command finds a module in a folder
// by a tag that begins with the folder.
func (r *release) tags() (names []string) {
	for _, m := range r.published() {
		names = append(names, path.Join(m.dir, r.version))
	}
	return names
}

// tag makes the tags of the version at the commit that is checked out, and prints how to push them.
func (r *release) tag(ctx context.Context) error {
	if err := r.checkFiles(); err != nil {
		return err
	}
	if err := r.checkReleased(); err != nil {
		return err
	}
	changed, err := r.git(ctx, r.dir, "status", "--porcelain")
	if err != nil {
		return err
	}
	if changed != "" {
		return fmt.Errorf("not committed:\n%s", changed)
	}
	if err := r.makeTags(ctx, r.dir); err != nil {
		return err
	}
	r.printf("tagged. To publish:\n  git push --atomic origin %s\n", strings.Join(r.tags(), " "))
	return nil
}

// checkReleased checks that the chapter of the version in the changelog has a date.
func (r *release) checkReleased() error {
	data, err := os.ReadFile(r.disk("CHANGELOG.md"))
	if err == nil && bytes.Contains(data, []byte("## "+r.version+" (not released yet)")) {
		err = errors.New("CHANGELOG.md: the chapter " + r.version + " says \"not released yet\": write the date")
	}
	return err
}

// makeTags makes all tags, or none.
func (r *release) makeTags(ctx context.Context, dir string) error {
	for _, name := range r.tags() {
		if found, err := r.git(ctx, dir, "tag", "--list", name); err != nil || found != "" {
			return errors.Join(err, fmt.Errorf("there is a tag %s", name))
		}
	}
	for _, name := range r.tags() {
		if _, err := r.git(ctx, dir, "tag", "--annotate", "--message", path.Base(r.root().path)+" "+r.version, name); err != nil {
			return err
		}
	}
	return nil
}

func (r *release) git(ctx context.Context, dir string, args ...string) (string, error) {
	return output(ctx, r.out, dir, nil, "git", args...)
}

// tryTags tags a copy of the repository, downloads each published module by its tag with git, and checks
// that this is what was packed and tried. It needs a path for which the go command asks no server.
func (r *release) tryTags(ctx context.Context, temp, proxy string) error {
	repository := filepath.Join(temp, "repository")
	if err := r.copyTo(ctx, repository); err != nil {
		return err
	}
	tool := goTool{out: r.out, env: []string{
		"GOENV=off", "GOWORK=off", "GOFLAGS=-modcacherw", "GOMODCACHE=" + filepath.Join(temp, "tags"),
		"GOPRIVATE=" + r.root().path, "GOVCS=*:git", "GOPROXY=direct",
		"GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=url." + fileURL(repository) + ".insteadOf", "GIT_CONFIG_VALUE_0=https://" + r.root().path,
	}}
	for i, m := range r.published() {
		out, err := tool.run(ctx, temp, "mod", "download", "-json", m.path+"@"+r.version)
		if err != nil {
			return fmt.Errorf("tag %s: %w", r.tags()[i], err)
		}
		var got struct{ Sum string }
		if err := json.Unmarshal([]byte(out), &got); err != nil {
			return err
		}
		escaped, err := module.EscapePath(m.path)
		if err != nil {
			return err
		}
		packed, err := dirhash.HashZip(filepath.Join(proxy, filepath.FromSlash(escaped), "@v", r.version+".zip"), dirhash.Hash1)
		if err != nil {
			return err
		}
		if got.Sum != packed {
			return fmt.Errorf("tag %s: git has other files than were packed: %s, not %s", r.tags()[i], got.Sum, packed)
		}
	}
	r.printf("tags give what was packed: %s\n", strings.Join(r.tags(), " "))
	return nil
}

// copyTo commits the files of the repository to a new one, and tags it.
func (r *release) copyTo(ctx context.Context, dir string) error {
	for _, name := range r.files {
		to := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		if err := copyFile(r.disk(name), to); err != nil {
			return err
		}
	}
	for _, args := range [][]string{
		{"init", "--quiet"}, {"config", "user.name", "release"}, {"config", "user.email", "release@localhost"},
		{"add", "--all", "--force"}, {"commit", "--quiet", "--no-verify", "--message", r.version},
	} {
		if _, err := r.git(ctx, dir, args...); err != nil {
			return err
		}
	}
	return r.makeTags(ctx, dir)
}

func copyFile(from, to string) error {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close()
	info, err := source.Stat()
	if err != nil {
		return err
	}
	target, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, info.Mode().Perm())
	if err != nil {
		return err
	}
	if _, err := io.Copy(target, source); err != nil {
		return errors.Join(err, target.Close())
	}
	return target.Close()
}
