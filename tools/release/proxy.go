package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"
)

// buildProxy writes the published modules into dir, in the layout in which the go
// command reads a proxy made of files, and prints what it packs.
func (r *release) buildProxy(dir string) error {
	for _, m := range r.published() {
		if err := r.pack(dir, m); err != nil {
			return fmt.Errorf("pack %s: %w", m.path, err)
		}
	}
	return nil
}

func (r *release) pack(dir string, m goModule) error {
	escaped, err := module.EscapePath(m.path)
	if err != nil {
		return err
	}
	versions := filepath.Join(dir, filepath.FromSlash(escaped), "@v")
	if err := os.MkdirAll(versions, 0o755); err != nil {
		return err
	}
	mod, err := os.ReadFile(r.disk(m.dir + "/go.mod"))
	if err != nil {
		return err
	}
	for name, content := range map[string][]byte{
		"list":              []byte(r.version + "\n"),
		r.version + ".info": fmt.Appendf(nil, `{"Version":%q}`, r.version),
		r.version + ".mod":  mod,
	} {
		if err := os.WriteFile(filepath.Join(versions, name), content, 0o644); err != nil {
			return err
		}
	}
	return r.writeZip(filepath.Join(versions, r.version+".zip"), m)
}

func (r *release) writeZip(name string, m goModule) error {
	out, err := os.Create(name)
	if err != nil {
		return err
	}
	defer out.Close()
	if err := zip.Create(out, module.Version{Path: m.path, Version: r.version}, r.moduleFiles(m)); err != nil {
		return err
	}
	info, err := out.Stat()
	if err != nil {
		return err
	}
	r.printf("packed %s: %d KB\n", m.path, (info.Size()+1023)/1024)
	return out.Close()
}

// moduleFiles returns the files below a module's folder. zip.Create leaves out those
// of modules inside it. A module without a licence gets that of the repository, as
// the go command does it with a tag.
func (r *release) moduleFiles(m goModule) (files []zip.File) {
	for _, name := range r.files {
		inside := name
		if m.dir != "." {
			var ok bool
			if inside, ok = strings.CutPrefix(name, m.dir+"/"); !ok {
				continue
			}
		}
		files = append(files, zipFile{inside, r.disk(name)})
	}
	isLicense := func(f zip.File) bool { return f.Path() == "LICENSE" }
	if !slices.ContainsFunc(files, isLicense) && slices.Contains(r.files, "LICENSE") {
		files = append(files, zipFile{"LICENSE", r.disk("LICENSE")})
	}
	return files
}

// zipFile is a file on disk under its name in the module.
type zipFile struct{ name, disk string }

// Path implements [zip.File].
func (f zipFile) Path() string { return f.name }

// Lstat implements [zip.File].
func (f zipFile) Lstat() (os.FileInfo, error) { return os.Lstat(f.disk) }

// Open implements [zip.File].
func (f zipFile) Open() (io.ReadCloser, error) { return os.Open(f.disk) }
