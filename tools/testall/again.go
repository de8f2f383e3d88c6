package main

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
)

// maxAgain is how many failures are run again. More of them have a common cause.
const maxAgain = 20

// suspect is a failure that may be one of timing: a test, or a whole package.
type suspect struct {
	module *module
	pkg    *testPackage
	test   *test  // nil: the package
	output string // of its first run
}

func (s *suspect) String() string {
	name := s.module.dir + " " + s.pkg.name
	if s.test != nil {
		name += " " + s.test.name
	}
	return name
}

// unbuilt matches the last line of a package that has no test binary.
var unbuilt = regexp.MustCompile(`^FAIL\t.*\[(build|setup) failed\]\n`)

// failFast matches the flag that leaves tests out after the first failure.
var failFast = regexp.MustCompile(`^--?(test\.)?failfast(=.*)?$`)

// suspects returns what failed, without what could not be built.
func suspects(modules []*module) (all []*suspect) {
	for _, m := range modules {
		for _, p := range m.packages {
			if !p.failed() || slices.ContainsFunc(p.lines, unbuilt.MatchString) {
				continue
			}
			tests := p.failedTests()
			if p.early || len(tests) == 0 || slices.ContainsFunc(m.args, failFast.MatchString) {
				all = append(all, &suspect{module: m, pkg: p, output: p.output()})
				continue
			}
			for _, t := range tests {
				all = append(all, &suspect{module: m, pkg: p, test: t, output: p.outputOf(t)})
			}
		}
	}
	return all
}

// failedTests returns the failed tests without a parent.
func (p *testPackage) failedTests() (failed []*test) {
	for _, t := range p.tests {
		if t.failed() && !strings.Contains(t.name, "/") {
			failed = append(failed, t)
		}
	}
	return failed
}

// outputOf returns what a failed test and its failed subtests printed.
func (p *testPackage) outputOf(t *test) string {
	var lines []string
	for _, sub := range p.tests {
		if sub.failed() && strings.HasPrefix(sub.name, t.name+"/") {
			lines = append(lines, sub.lines...)
		}
	}
	return strings.Join(append(lines, t.lines...), "")
}

// output returns what the failed tests of a package, and the package itself, printed.
func (p *testPackage) output() string {
	var text strings.Builder
	for _, t := range p.failedTests() {
		text.WriteString(p.outputOf(t))
	}
	return text.String() + strings.Join(p.lines, "")
}

// runAgain runs each of all by itself and returns those that passed.
func runAgain(
	all []*suspect, signals <-chan os.Signal, stdout, stderr io.Writer,
) (flaky []*suspect, stopped syscall.Signal) {
	if len(all) > maxAgain {
		fmt.Fprintf(stdout, "\n%d tests and packages failed, which is too many to run each of them again\n", len(all))
		return nil, 0
	}
	for _, s := range all {
		fmt.Fprintf(stdout, "== again: %s\n", s)
		passed, signal := s.again(signals, stdout, stderr)
		if signal != 0 {
			return flaky, signal
		}
		if passed {
			flaky = append(flaky, s)
		}
	}
	return flaky, 0
}

// again runs s once more. If it passes, it is flaky from then on.
func (s *suspect) again(signals <-chan os.Signal, stdout, stderr io.Writer) (passed bool, stopped syscall.Signal) {
	alone := &selection{dir: s.module.dir, packages: []string{s.pkg.name}}
	if s.test != nil {
		alone.tests = []string{s.test.name}
	}
	m := newModule(alone, append(slices.Clone(s.module.args), "-count=1"), stdout)
	if stopped = m.run(signals, stderr); stopped != 0 || m.failed() || len(m.packages) != 1 {
		return false, stopped
	}
	p := m.packages[0]
	switch {
	case s.test == nil:
		p.result = "flaky"
		s.module.packages[slices.Index(s.module.packages, s.pkg)] = p
		s.pkg = p
	case p.byName[s.test.name] == nil || p.byName[s.test.name].result != "pass":
		return false, 0 // another test may have to run first
	default:
		for _, t := range s.pkg.tests {
			if t.failed() && (t == s.test || strings.HasPrefix(t.name, s.test.name+"/")) {
				t.result = "flaky"
			}
		}
		if len(s.pkg.failedTests()) == 0 {
			s.pkg.result = "flaky"
		}
	}
	return true, 0
}
