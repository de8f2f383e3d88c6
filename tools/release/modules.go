package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"
)

// config says what to check. All fields but archives are required.
type config struct {
	dir              string // of the repository
	version          string // that is about to be tagged
	archives         string // folder for the archives; empty: none
	targets          []string
	programs         fs.FS // a folder for each published module
	unpublished      []string
	outsideWorkspace []string
	out              io.Writer
}

// release is a repository with modules that are released together.
type release struct {
	config
	files   []string   // slash-separated, relative to dir
	modules []goModule // the root is the first
}

// goModule is one go.mod file.
type goModule struct {
	dir  string // relative to the repository; "." is the root
	path string
	file *modfile.File
}

// newRelease finds the modules of the repository.
func newRelease(cfg config) (*release, error) {
	if !semver.IsValid(cfg.version) || semver.Canonical(cfg.version) != cfg.version {
		return nil, fmt.Errorf("%q is not a version such as v0.1.0", cfg.version)
	}
	dir, err := filepath.Abs(cfg.dir)
	if err != nil {
		return nil, err
	}
	cfg.dir = dir
	r := &release{config: cfg}
	if r.files, err = gitFiles(dir); err != nil {
		return nil, err
	}
	for _, name := range r.files {
		if path.Base(name) != "go.mod" || strings.Contains(name, "testdata/") {
			continue
		}
		m, err := r.readModule(path.Dir(name))
		if err != nil {
			return nil, err
		}
		r.modules = append(r.modules, m)
	}
	slices.SortFunc(r.modules, func(a, b goModule) int { return strings.Compare(a.dir, b.dir) })
	if len(r.modules) == 0 || r.root().dir != "." {
		return nil, fmt.Errorf("%s has no go.mod", dir)
	}
	return r, nil
}

func (r *release) readModule(dir string) (goModule, error) {
	name := r.disk(path.Join(dir, "go.mod"))
	data, err := os.ReadFile(name)
	if err != nil {
		return goModule{}, err
	}
	file, err := modfile.Parse(name, data, nil)
	if err != nil {
		return goModule{}, err
	}
	if file.Module == nil {
		return goModule{}, fmt.Errorf("%s names no module", name)
	}
	return goModule{dir: dir, path: file.Module.Mod.Path, file: file}, nil
}

// gitFiles returns the files that a commit of everything would hold: tracked ones
// and new ones that are not ignored.
func gitFiles(dir string) ([]string, error) {
	out, err := exec.Command("git", "-C", dir, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate").Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		return nil, fmt.Errorf("list the files of %s with git: %w", dir, err)
	}
	names := strings.Split(strings.TrimRight(string(out), "\x00"), "\x00")
	return slices.DeleteFunc(names, func(name string) bool {
		_, err := os.Lstat(filepath.Join(dir, filepath.FromSlash(name)))
		return errors.Is(err, fs.ErrNotExist) // deleted, and not committed yet
	}), nil
}

// disk returns where a file of the repository is.
func (r *release) disk(name string) string { return filepath.Join(r.dir, filepath.FromSlash(name)) }

func (r *release) printf(format string, args ...any) { fmt.Fprintf(r.out, format, args...) }

// own returns the module of this repository with that path.
func (r *release) own(path string) (goModule, bool) {
	i := slices.IndexFunc(r.modules, func(m goModule) bool { return m.path == path })
	if i < 0 {
		return goModule{}, false
	}
	return r.modules[i], true
}

// root returns the module that the others are in.
func (r *release) root() goModule { return r.modules[0] }

// isOwn reports whether a path belongs to this repository, whether or not there is
// such a module.
func (r *release) isOwn(path string) bool {
	return path == r.root().path || strings.HasPrefix(path, r.root().path+"/")
}

func (r *release) isPublished(m goModule) bool { return !slices.Contains(r.unpublished, m.dir) }

func (r *release) inWorkspace(m goModule) bool { return !slices.Contains(r.outsideWorkspace, m.dir) }

func (r *release) published() []goModule {
	return slices.DeleteFunc(slices.Clone(r.modules), func(m goModule) bool { return !r.isPublished(m) })
}

// program returns the name of the folder with the module's program.
func (m goModule) program() string {
	prefix, _, _ := module.SplitPathVersion(m.path)
	return path.Base(prefix)
}
