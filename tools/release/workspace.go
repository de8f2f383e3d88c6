package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"

	"golang.org/x/mod/modfile"
)

// tidiedWorkspace returns what go.work and go.work.sum are to be. The go command
// adds to go.work.sum what it misses, so it starts with none, in a folder from
// which it sees the modules of this repository.
func (r *release) tidiedWorkspace(ctx context.Context) (fileSet, error) {
	temp, err := os.MkdirTemp("", "outbox-workspace-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(temp)
	work := filepath.Join(temp, "go.work")
	if err := os.WriteFile(work, r.workspace(r.dir), 0o644); err != nil {
		return nil, err
	}
	tool := goTool{env: []string{"GOWORK=" + work}, out: r.out}
	if _, err := tool.run(ctx, r.dir, "list", "-m", "all"); err != nil {
		return nil, err
	}
	for _, m := range r.modules {
		if !r.inWorkspace(m) {
			continue
		}
		if _, err := tool.run(ctx, r.disk(m.dir), "list", "-deps", "-test", "./..."); err != nil {
			return nil, fmt.Errorf("list what %s imports: %w", m.path, err)
		}
	}
	files, err := readFiles(temp, "go.work", "go.work.sum")
	if err != nil {
		return nil, err
	}
	files["go.work"] = r.workspace(".")
	return files, nil
}

// workspace returns what go.work says, if the repository is in dir.
//
// It replaces the modules that others require: the go command asks for the go.mod
// of the required version even if the workspace has the module.
func (r *release) workspace(dir string) []byte {
	var text bytes.Buffer
	fmt.Fprint(&text, "// make tidy writes this file.\n\n")
	if r.root().file.Go != nil {
		fmt.Fprintf(&text, "go %s\n\n", r.root().file.Go.Version)
	}
	fmt.Fprint(&text, "use (\n")
	for _, m := range r.modules {
		if r.inWorkspace(m) {
			fmt.Fprintf(&text, "\t%s\n", folder(dir, m))
		}
	}
	fmt.Fprint(&text, ")\n\nreplace (\n")
	for _, m := range r.modules {
		if r.isRequired(m) {
			fmt.Fprintf(&text, "\t%s %s => %s\n", m.path, r.version, folder(dir, m))
		}
	}
	fmt.Fprint(&text, ")\n")
	return text.Bytes()
}

// folder returns where a module is, if the repository is in dir, as go.work wants
// it: with a dot or a slash in front, and none behind.
func folder(dir string, m goModule) string {
	if dir == "." && m.dir != "." {
		return modfile.AutoQuote("./" + m.dir)
	}
	return modfile.AutoQuote(path.Join(dir, m.dir))
}

// isRequired reports whether another module of this repository requires m.
func (r *release) isRequired(m goModule) bool {
	return slices.ContainsFunc(r.modules, func(other goModule) bool {
		return slices.ContainsFunc(other.file.Require, func(require *modfile.Require) bool { return require.Mod.Path == m.path })
	})
}
