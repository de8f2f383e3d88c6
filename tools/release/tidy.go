package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"golang.org/x/mod/modfile"
)

// tidy rewrites what the go command reads in each module, and then the workspace,
// which depends on it.
func (r *release) tidy(ctx context.Context) error {
	for _, m := range r.modules {
		tidied, err := r.tidiedModule(ctx, m)
		if err != nil {
			return err
		}
		if err := tidied.write(r.disk(m.dir)); err != nil {
			return err
		}
		r.printf("tidied %s\n", m.path)
	}
	written, err := newRelease(r.config)
	if err != nil {
		return err
	}
	tidied, err := written.tidiedWorkspace(ctx)
	if err != nil {
		return err
	}
	return tidied.write(r.dir)
}

// checkTidy checks that tidy would change nothing in the workspace. So go.mod
// requires what is imported, and all sums are there.
func (r *release) checkTidy(ctx context.Context) error {
	var problems []error
	for _, m := range r.modules {
		if !r.inWorkspace(m) {
			continue
		}
		tidied, err := r.tidiedModule(ctx, m)
		if err != nil {
			return err
		}
		problems = append(problems, r.compare(m.dir, tidied))
	}
	tidied, err := r.tidiedWorkspace(ctx)
	if err != nil {
		return err
	}
	return errors.Join(append(problems, r.compare(".", tidied))...)
}

func (r *release) compare(dir string, tidied fileSet) error {
	var problems []error
	for name, content := range tidied {
		found, err := readOptional(r.disk(path.Join(dir, name)))
		if err == nil && !bytes.Equal(found, content) {
			err = fmt.Errorf("%s is not tidy: run make tidy", path.Join(dir, name))
		}
		problems = append(problems, err)
	}
	return errors.Join(problems...)
}

// tidiedModule returns what go mod tidy makes of a module. No server has the version that is about
// to be tagged, so the command works on a copy of go.mod that replaces the modules of this
// repository by their folders. Then go.sum has no lines for them, which is right: they change until
// they are tagged.
func (r *release) tidiedModule(ctx context.Context, m goModule) (fileSet, error) {
	temp, err := os.MkdirTemp("", "outbox-tidy-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(temp)
	files, err := readFiles(r.disk(m.dir), "go.mod", "go.sum")
	if err != nil {
		return nil, err
	}
	if files["go.mod"], err = edit(files["go.mod"], r.replaceOwn); err != nil {
		return nil, err
	}
	if err := files.write(temp); err != nil {
		return nil, err
	}
	tool := goTool{env: []string{"GOWORK=off"}, out: r.out}
	if _, err := tool.run(ctx, r.disk(m.dir), "mod", "tidy", "-modfile="+filepath.Join(temp, "go.mod")); err != nil {
		return nil, fmt.Errorf("tidy %s: %w", m.path, err)
	}
	if files, err = readFiles(temp, "go.mod", "go.sum"); err != nil {
		return nil, err
	}
	files["go.mod"], err = edit(files["go.mod"], r.requireOwn)
	return files, err
}

// replaceOwn lets a go.mod find the other modules of this repository in their
// folders.
func (r *release) replaceOwn(file *modfile.File) error {
	var problems []error
	for _, m := range r.modules {
		if m.path != file.Module.Mod.Path {
			problems = append(problems, file.AddReplace(m.path, "", r.disk(m.dir), ""))
		}
	}
	return errors.Join(problems...)
}

// requireOwn undoes replaceOwn, and requires the version that is about to be tagged.
func (r *release) requireOwn(file *modfile.File) error {
	var problems []error
	for _, m := range r.modules {
		problems = append(problems, file.DropReplace(m.path, ""))
	}
	for _, require := range file.Require {
		if _, ok := r.own(require.Mod.Path); ok {
			problems = append(problems, file.AddRequire(require.Mod.Path, r.version))
		}
	}
	return errors.Join(problems...)
}

// edit changes a go.mod.
func edit(mod []byte, change func(*modfile.File) error) ([]byte, error) {
	file, err := modfile.Parse("go.mod", mod, nil)
	if err != nil {
		return nil, err
	}
	if err := change(file); err != nil {
		return nil, err
	}
	file.Cleanup()
	return file.Format()
}

// fileSet is the content of files of one folder, by name. One without content is
// not there.
type fileSet map[string][]byte

func readFiles(dir string, names ...string) (fileSet, error) {
	files := fileSet{}
	for _, name := range names {
		content, err := readOptional(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		files[name] = content
	}
	return files, nil
}

// readOptional returns nothing for a file that is not there.
func readOptional(name string) ([]byte, error) {
	content, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return content, err
}

func (f fileSet) write(dir string) error {
	for name, content := range f {
		name = filepath.Join(dir, name)
		if len(content) > 0 {
			if err := os.WriteFile(name, content, 0o644); err != nil {
				return err
			}
		} else if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
