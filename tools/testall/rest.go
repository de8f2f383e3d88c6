package main

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
)

// leftMessage is what a test logs that `make test` leaves out, or makes shorter. See testenv.Long and testenv.Quick.
const leftMessage = "left for make test-all"

// writeRest writes what is left for another run: a line for each test, with its module and package, and a line for each
// module that is left as a whole.
func writeRest(file string, modules []*module, left []string) error {
	var lines strings.Builder
	for _, m := range modules {
		for _, p := range m.packages {
			for _, name := range p.leftTests() {
				fmt.Fprintln(&lines, m.dir, p.name, name)
			}
		}
	}
	for _, dir := range left {
		fmt.Fprintln(&lines, dir)
	}
	if err := os.WriteFile(file, []byte(lines.String()), 0o600); err != nil {
		return fmt.Errorf("write what is left: %w", err)
	}
	return nil
}

// leftTests returns the tests without a parent that are left, or that have subtests which are.
func (p *testPackage) leftTests() (names []string) {
	for _, t := range p.tests {
		if name, _, _ := strings.Cut(t.name, "/"); t.left && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// selection is what to test of a module.
type selection struct {
	dir      string
	packages []string // none: all
	tests    []string // their names; none: all
}

// readRest returns what [writeRest] wrote.
func readRest(file string) (all []*selection, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read what is left: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) != 1 && len(fields) != 3 {
			return nil, fmt.Errorf("read what is left: %s has the line %q", file, line)
		}
		var s *selection
		if i := slices.IndexFunc(all, func(s *selection) bool { return s.dir == fields[0] }); i >= 0 {
			s = all[i]
		} else {
			s = &selection{dir: fields[0]}
			all = append(all, s)
		}
		if len(fields) == 3 {
			if !slices.Contains(s.packages, fields[1]) {
				s.packages = append(s.packages, fields[1])
			}
			s.tests = append(s.tests, fields[2])
		}
	}
	return all, nil
}

// flags returns args with a flag that selects the tests.
func (s *selection) flags(args []string) []string {
	if len(s.tests) == 0 {
		return args
	}
	var names []string
	for _, name := range s.tests {
		names = append(names, regexp.QuoteMeta(name))
	}
	return append(slices.Clone(args), "-run=^("+strings.Join(names, "|")+")$")
}
