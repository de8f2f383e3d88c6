package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// quietTime is how long nothing may be printed before a line says what is running.
const quietTime = 30 * time.Second

// module is a run of one module's tests.
type module struct {
	dir      string
	patterns []string // of the packages
	args     []string
	verbose  bool // print all output at once, as go test -v does

	mu       sync.Mutex // guards the rest while the tests run
	out      io.Writer
	printed  time.Time
	packages []*testPackage // in the order in which they began
	took     time.Duration
	err      error // what no test explains
}

// testPackage is a package whose tests ran.
type testPackage struct {
	name   string
	tests  []*test // in the order in which they began
	byName map[string]*test
	lines  []string // output of no test
	result string   // pass, fail, skip, flaky; "" until it has ended
	early  bool     // its process ended before all its tests had
}

// test is a test, a subtest, an example or a fuzz test.
type test struct {
	name   string
	lines  []string // its output, dropped when it passes
	result string   // pass, fail, skip, flaky; "" until it has ended
	began  time.Time
	took   time.Duration // as go test says, without waiting for its turn
	paused bool          // waits for its turn among parallel tests
	left   bool          // all or a part of it is left for another run
}

// event is one line of go test -json.
type event struct {
	Action     string
	Package    string
	ImportPath string
	Test       string
	Output     string
	Elapsed    float64 // seconds
}

// verboseFlags make go test print what passes, too.
var verboseFlags = regexp.MustCompile(`^--?(test\.)?(v|bench|list)(=.*)?$`)

func newModule(of *selection, args []string, out io.Writer) *module {
	m := &module{
		dir: of.dir, patterns: of.packages, args: of.flags(args), out: out, printed: time.Now(),
		verbose: slices.ContainsFunc(args, verboseFlags.MatchString),
	}
	if len(m.patterns) == 0 {
		m.patterns = []string{"./..."}
	}
	return m
}

// read handles all events. A line that is none is printed as it is.
func (m *module) read(from io.Reader) error {
	lines := bufio.NewReader(from)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			m.line(line)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the output of go test: %w", err)
		}
	}
}

func (m *module) line(line string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var e event
	if json.Unmarshal([]byte(line), &e) != nil || e.Action == "" {
		m.print(line)
		return
	}
	switch {
	case e.Action == "build-output":
		m.print(e.Output)
	case e.Package == "":
	case e.Test == "":
		m.packageEvent(e)
	default:
		m.testEvent(e)
	}
}

func (m *module) print(lines ...string) {
	for _, line := range lines {
		fmt.Fprint(m.out, line)
	}
	m.printed = time.Now()
}

// printLate prints what was held back until the result was known.
func (m *module) printLate(lines []string) {
	if !m.verbose {
		m.print(lines...)
	}
}

func (m *module) packageOf(name string) *testPackage {
	for _, p := range slices.Backward(m.packages) {
		if p.name == name {
			return p
		}
	}
	p := &testPackage{name: name, byName: map[string]*test{}}
	m.packages = append(m.packages, p)
	return p
}

func (m *module) packageEvent(e event) {
	p := m.packageOf(e.Package)
	switch e.Action {
	case "output":
		if m.verbose {
			m.print(e.Output)
		}
		p.lines = append(p.lines, e.Output)
	case "pass", "skip":
		p.result = e.Action
		m.printLate(slices.DeleteFunc(p.lines, func(line string) bool { return !closing.MatchString(line) }))
	case "fail":
		p.result = e.Action
		p.early = !slices.ContainsFunc(p.lines, lastLine.MatchString)
		for _, t := range p.tests {
			if t.result == "" { // the process ended while it ran
				t.result, p.early = "fail", true
				m.printLate(t.lines)
			}
		}
		m.printLate(p.lines)
	}
}

// closing matches the last line of a package that has passed.
var closing = regexp.MustCompile(`^(ok  |\?   |    )?\t`)

// lastLine matches what a package prints when all its tests have ended.
var lastLine = regexp.MustCompile(`^(PASS|FAIL)\n`)

// chatter matches what go test prints about the progress of a test only with -v.
var chatter = regexp.MustCompile(`^=== (RUN|PAUSE|CONT|NAME)\b`)

func (m *module) testEvent(e event) {
	p := m.packageOf(e.Package)
	t := p.byName[e.Test]
	if t == nil {
		t = &test{name: e.Test, began: time.Now()}
		p.tests, p.byName[e.Test] = append(p.tests, t), t
	}
	switch e.Action {
	case "output":
		t.left = t.left || strings.Contains(e.Output, leftMessage)
		switch {
		case m.verbose:
			m.print(e.Output)
			t.lines = append(t.lines, e.Output)
		case !chatter.MatchString(e.Output):
			t.lines = append(t.lines, e.Output)
		}
	case "pause":
		t.paused = true
	case "cont":
		t.paused, t.began = false, time.Now()
	case "fail":
		m.printLate(t.lines)
		t.end(e)
	case "pass", "skip":
		t.end(e)
		if e.Action == "pass" {
			t.lines = nil
		}
	}
}

func (t *test) end(e event) {
	t.result, t.took = e.Action, time.Duration(e.Elapsed*float64(time.Second))
}

// beat prints what is running if nothing was printed for a while.
func (m *module) beat() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if time.Since(m.printed) < quietTime {
		return
	}
	var running []string
	done := 0
	for _, p := range m.packages {
		for _, t := range p.tests {
			switch {
			case t.result != "":
				done++
			case p.result == "" && !t.paused && !strings.Contains(t.name, "/"):
				running = append(running, fmt.Sprintf("%s for %.0f s", t.name, time.Since(t.began).Seconds()))
			}
		}
	}
	slices.Sort(running)
	switch {
	case len(running) == 0:
		running = []string{"building"}
	case len(running) > 3:
		running = append(running[:3], fmt.Sprintf("and %d more", len(running)-3))
	}
	m.print(fmt.Sprintf("   %d tests have ended; now: %s\n", done, strings.Join(running, ", ")))
}
