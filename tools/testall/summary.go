package main

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// failed reports whether the module did not pass.
func (m *module) failed() bool {
	return m.err != nil || slices.ContainsFunc(m.packages, (*testPackage).failed)
}

func (p *testPackage) failed() bool { return failure(p.result) }
func (t *test) failed() bool        { return failure(t.result) }

func failure(result string) bool { return result != "pass" && result != "skip" && result != "flaky" }

// counts are of tests without a parent. A package that was flaky as a whole counts as one more.
type counts struct{ passed, failed, skipped, flaky int }

func (c *counts) add(other counts) {
	c.passed += other.passed
	c.failed += other.failed
	c.skipped += other.skipped
	c.flaky += other.flaky
}

func (c counts) String() string {
	s := fmt.Sprintf("%d passed, %d failed", c.passed, c.failed)
	if c.skipped > 0 {
		s += fmt.Sprintf(", %d skipped", c.skipped)
	}
	if c.flaky > 0 {
		s += fmt.Sprintf(", %d flaky", c.flaky)
	}
	return s
}

func (m *module) counts() (c counts) {
	for _, p := range m.packages {
		if p.result == "flaky" && !slices.ContainsFunc(p.tests, func(t *test) bool { return t.result == "flaky" }) {
			c.flaky++
		}
		for _, t := range p.tests {
			switch {
			case strings.Contains(t.name, "/"):
			case t.result == "pass":
				c.passed++
			case t.result == "skip":
				c.skipped++
			case t.result == "flaky":
				c.flaky++
			default:
				c.failed++
			}
		}
	}
	return c
}

// summarize prints the results of modules, the names of what failed, the slowest tests,
// why tests were skipped, and the first output of what passed the second time. notRun
// are the modules that a signal left out, left those that were not to be tested.
func summarize(w io.Writer, modules []*module, notRun []*selection, left []string, flaky []*suspect) {
	fmt.Fprintln(w, "\n== summary")
	var total counts
	for _, m := range modules {
		c, result := m.counts(), "ok"
		if m.failed() {
			result = "FAIL"
		}
		total.add(c)
		fmt.Fprintf(w, "%-4s %-20s %s (%.0f s)\n", result, m.dir, c, m.took.Seconds())
		for _, line := range m.failures() {
			fmt.Fprintf(w, "       %s\n", line)
		}
	}
	for _, of := range notRun {
		fmt.Fprintf(w, "     %-20s not run\n", of.dir)
	}
	for _, dir := range left {
		fmt.Fprintf(w, "     %-20s left for make test-all: %d tests\n", dir, countTests(dir))
	}
	printSlowest(w, modules)
	printSkipped(w, modules)
	for _, s := range flaky {
		fmt.Fprintf(w, "FLAKY %s\n", s)
		for line := range strings.Lines(s.output) {
			fmt.Fprintf(w, "      %s", line)
		}
	}
	fmt.Fprintln(w, total)
}

// testFunc matches the beginning of a test.
var testFunc = regexp.MustCompile(`(?m)^func (Test|Example|Fuzz)\w*\(`)

// countTests returns how many tests the files of a module have.
func countTests(dir string) (n int) {
	_ = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && path != dir && (entry.Name() == "testdata" || isModule(path)):
			return filepath.SkipDir
		case !strings.HasSuffix(path, "_test.go") || entry.IsDir():
			return nil
		}
		text, err := os.ReadFile(path)
		n += len(testFunc.FindAllIndex(text, -1)) - bytes.Count(text, []byte("\nfunc TestMain("))
		return err
	})
	return n
}

func isModule(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "go.mod"))
	return err == nil
}

// maxSlow is how many tests are named as the slowest, slow is what each takes at least.
const (
	maxSlow = 10
	slow    = time.Second
)

func printSlowest(w io.Writer, modules []*module) {
	type one struct {
		name string
		took time.Duration
	}
	var all []one
	for _, m := range modules {
		for _, p := range m.packages {
			for _, t := range p.tests {
				if t.took >= slow && !strings.Contains(t.name, "/") {
					all = append(all, one{m.dir + " " + p.name + " " + t.name, t.took})
				}
			}
		}
	}
	slices.SortStableFunc(all, func(a, b one) int { return cmp.Compare(b.took, a.took) })
	if len(all) > 0 {
		fmt.Fprintln(w, "slowest:")
	}
	for _, t := range all[:min(len(all), maxSlow)] {
		fmt.Fprintf(w, "     %5.1f s %s\n", t.took.Seconds(), t.name)
	}
}

// failures returns a line for each test that failed by itself, and for each package
// that failed without one.
func (m *module) failures() (lines []string) {
	if m.err != nil {
		lines = append(lines, m.err.Error())
	}
	for _, p := range m.packages {
		if !p.failed() {
			continue
		}
		named := false
		for _, t := range p.tests {
			if t.failed() && !p.failedBelow(t) {
				lines = append(lines, p.name+": "+t.name)
				named = true
			}
		}
		if !named {
			lines = append(lines, p.name)
		}
	}
	return lines
}

// failedBelow reports whether a subtest of t failed, which then explains it.
func (p *testPackage) failedBelow(t *test) bool {
	return slices.ContainsFunc(p.tests, func(sub *test) bool {
		return strings.HasPrefix(sub.name, t.name+"/") && sub.failed()
	})
}

// maxNames is how many tests are named for one reason. Above, they are counted.
const maxNames = 3

func printSkipped(w io.Writer, modules []*module) {
	byReason := map[string][]string{}
	for _, m := range modules {
		for _, p := range m.packages {
			for _, t := range p.tests {
				if t.result == "skip" {
					byReason[t.reason()] = append(byReason[t.reason()], t.name)
				}
			}
		}
	}
	if len(byReason) > 0 {
		fmt.Fprintln(w, "left out:")
	}
	for _, reason := range slices.Sorted(maps.Keys(byReason)) {
		names := byReason[reason]
		what := strings.Join(names, ", ")
		if len(names) > maxNames {
			what = fmt.Sprintf("%d tests", len(names))
		}
		fmt.Fprintf(w, "     %s: %s\n", reason, what)
	}
}

// message matches a line that a test logs.
var message = regexp.MustCompile(`^\s+\S+\.go:\d+: (.*)`)

// reason returns why a test was skipped: the last that it logged.
func (t *test) reason() string {
	for _, line := range slices.Backward(t.lines) {
		if found := message.FindStringSubmatch(line); found != nil {
			return found[1]
		}
	}
	return "no reason given"
}
