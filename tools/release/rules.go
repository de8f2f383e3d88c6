package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"

	"golang.org/x/mod/modfile"
)

// checkFiles checks what go.mod and the changelog say. All problems are
// in the error, one a line.
func (r *release) checkFiles() error {
	var problems []error
	for _, m := range r.modules {
		problems = append(problems, r.checkModule(m)...)
	}
	problems = append(problems, r.checkPrograms()...)
	problems = append(problems, r.checkChangelog())
	return errors.Join(problems...)
}

// checkModule checks that a module can be installed by its version, and requires
// modules of this repository at the version that is about to be tagged.
func (r *release) checkModule(m goModule) (problems []error) {
	name := path.Join(m.dir, "go.mod")
	for _, replace := range m.file.Replace {
		problems = append(problems, fmt.Errorf("%s:%d: replaces %s: go install %s@%s would refuse that; go.work serves development",
			name, replace.Syntax.Start.Line, replace.Old.Path, m.path, r.version))
	}
	for _, exclude := range m.file.Exclude {
		problems = append(problems, fmt.Errorf("%s:%d: excludes %s: go install %s@%s would refuse that",
			name, exclude.Syntax.Start.Line, exclude.Mod, m.path, r.version))
	}
	for _, require := range m.file.Require {
		if err := r.checkRequire(m, require); err != nil {
			problems = append(problems, fmt.Errorf("%s:%d: %w", name, require.Syntax.Start.Line, err))
		}
	}
	return problems
}

func (r *release) checkRequire(m goModule, require *modfile.Require) error {
	want := require.Mod
	if !r.isOwn(want.Path) {
		return nil
	}
	required, ok := r.own(want.Path)
	switch {
	case !ok:
		return fmt.Errorf("requires %s, and this repository has no such module", want)
	case want.Version != r.version:
		return fmt.Errorf("requires %s, but the version to be tagged is %s, so nobody could get %s (make tidy sets it)", want, r.version, m.path)
	case r.isPublished(m) && !r.isPublished(required):
		return fmt.Errorf("requires %s, which is not published", want)
	}
	return nil
}

// checkPrograms checks that published modules have programs, and no others.
func (r *release) checkPrograms() (problems []error) {
	var names []string
	for _, m := range r.published() {
		names = append(names, m.program())
		if _, err := fs.Stat(r.programs, m.program()); err != nil {
			problems = append(problems, fmt.Errorf("%s is published and has no program that tries it (tools/release/testdata/programs), or is missing in the list of those that are not", m.path))
		}
	}
	entries, err := fs.ReadDir(r.programs, ".")
	if err != nil {
		return append(problems, err)
	}
	for _, entry := range entries {
		if !slices.Contains(names, entry.Name()) {
			problems = append(problems, fmt.Errorf("the program %s tries no published module", entry.Name()))
		}
	}
	return problems
}

// checkChangelog checks that the changelog has a chapter for the version.
func (r *release) checkChangelog() error {
	data, err := os.ReadFile(r.disk("CHANGELOG.md"))
	if err != nil {
		return err
	}
	for line := range bytes.Lines(data) {
		if fields := bytes.Fields(line); len(fields) > 1 && string(fields[0]) == "##" && string(fields[1]) == r.version {
			return nil
		}
	}
	return fmt.Errorf("CHANGELOG.md has no chapter %q", "## "+r.version)
}
