package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/tools/internal/long"
)

// buffer is an output that can be read while it is written.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// newModules makes modules of files, by path, and returns their directories.
func newModules(t *testing.T, files map[string]string) (dirs []string) {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte("package x\n"+text), 0o600))
	}
	entries, err := os.ReadDir(root)
	require.NoError(t, err)
	for _, entry := range entries {
		dir := filepath.Join(root, entry.Name())
		require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module example.com/"+entry.Name()+"\n\ngo 1.26\n"), 0o600))
		dirs = append(dirs, dir)
	}
	return dirs
}

// testAll runs the program and returns what it printed.
func testAll(t *testing.T, code int, dirs []string, flags ...string) string {
	t.Helper()
	t.Setenv("GOWORK", "off")
	var out buffer
	require.Equal(t, code, run(append(append(dirs, "--"), flags...), &out, &out), out.String())
	return out.String()
}

const passing = `import "testing"
func TestPassed(t *testing.T) { t.Run("sub", func(t *testing.T) { t.Log("quiet") }) }
func TestSkipped(t *testing.T) { t.Skip("needs a printer") }
`

func TestAllPass(t *testing.T) {
	dirs := newModules(t, map[string]string{"a/x_test.go": passing, "b/x_test.go": passing, "b/none/x.go": ""})
	out := testAll(t, 0, dirs)
	require.Equal(t, 2, strings.Count(out, "\nok  \texample.com/"), out)
	require.Contains(t, out, "?   \texample.com/b/none\t[no test files]\n")
	require.NotContains(t, out, "quiet")
	require.NotContains(t, out, "RUN")
	require.Contains(t, out, "left out:\n     needs a printer: TestSkipped, TestSkipped\n2 passed, 0 failed, 2 skipped\n")
	require.NotContains(t, out, "FAIL")

	out = testAll(t, 0, dirs, "-v", "-run", "TestPassed")
	require.Contains(t, out, "quiet")
	require.Contains(t, out, "=== RUN   TestPassed/sub")
}

// Whatever is wrong with a module, the next one is tested, and the summary names it.
func TestFailuresAreNamed(t *testing.T) {
	long.Test(t)
	dirs := newModules(t, map[string]string{
		"a/x_test.go":   `import "testing"; func TestA(t *testing.T) { t.Run("one", func(*testing.T) {}); t.Run("two", func(t *testing.T) { t.Error("oh") }) }`,
		"b/x_test.go":   `import "testing"; func TestB(t *testing.T) { var m map[int]int; m[1]++ }; func TestNever(*testing.T) {}`,
		"c/x_test.go":   `import "testing"; func TestC(t *testing.T) { missing() }`,
		"c/d/x_test.go": `import ("os"; "testing"); func TestMain(*testing.M) { println("no port"); os.Exit(3) }`,
		"e/x_test.go":   `import ("testing"; "time"); func TestSlow(t *testing.T) { time.Sleep(time.Hour) }`,
		"f/x_test.go":   passing,
	})
	out := testAll(t, exitFailed, dirs, "-timeout", "2s")
	log, summary, found := strings.Cut(out, "\n== summary\n")
	require.True(t, found, out)
	log, again, found := strings.Cut(log, "\n== again: ")
	require.True(t, found, out)
	for _, printed := range []string{": oh\n", "panic: assignment to entry in nil map", "undefined: missing", "no port\n", "panic: test timed out after 2s"} {
		require.Equal(t, 1, strings.Count(log, printed), "%q in\n%s", printed, out)
	}
	for _, named := range []string{
		"example.com/a: TestA/two\n", "example.com/b: TestB\n", "  example.com/c\n", "  example.com/c/d\n", "example.com/e: TestSlow\n",
		"\n1 passed, 3 failed, 1 skipped\n",
	} {
		require.Contains(t, summary, named)
	}
	require.NotContains(t, summary, "TestA\n")
	require.NotContains(t, summary, "FLAKY")
	again = "== again: " + again
	for _, run := range []string{
		dirs[0] + " example.com/a TestA\n", dirs[1] + " example.com/b\n",
		dirs[2] + " example.com/c/d\n", dirs[3] + " example.com/e\n",
	} {
		require.Equal(t, 1, strings.Count(again, "== again: "+run), "%q in\n%s", run, out)
	}
	require.Equal(t, 4, strings.Count(again, "== again: "), "what was not built is not run again:\n%s", out)
	require.Equal(t, 4, strings.Count(summary, "FAIL "), summary)
	require.Contains(t, summary, "ok   "+dirs[4])
}

// once is Go code for a test: it calls a function the first time that it runs in a folder.
const once = `
func once(f func()) {
	name := filepath.Join("testdata", "ran")
	if _, err := os.Stat(name); err == nil {
		return
	}
	_ = os.Mkdir("testdata", 0o755)
	_ = os.WriteFile(name, nil, 0o600)
	f()
}
`

// What fails at the first run only does not fail the whole, and is told with what it printed then.
func TestFlaky(t *testing.T) {
	dirs := newModules(t, map[string]string{
		"a/x_test.go": `import ("os"; "path/filepath"; "testing")` + once + `
			func TestLate(t *testing.T) {
				t.Run("sub", func(t *testing.T) { once(func() { t.Error("was late") }) })
				t.Log("after the sub")
			}
			func TestBeside(t *testing.T) {
				if _, err := os.Stat("again"); err == nil { t.Error("ran beside") }
				_ = os.WriteFile("again", nil, 0o600)
			}`,
		"b/x_test.go": `import ("fmt"; "os"; "path/filepath"; "testing")` + once + `
			func TestFine(*testing.T) {}
			func TestMain(m *testing.M) {
				code := m.Run()
				once(func() { fmt.Println("a goroutine is left"); code = 1 })
				os.Exit(code)
			}`,
		"c/x_test.go": `import ("os"; "path/filepath"; "testing")` + once + `
			func TestPanics(*testing.T) { once(func() { panic("no map") }) }
			func TestAfter(*testing.T) {}`,
		"d/x_test.go": passing,
	})
	out := testAll(t, 0, dirs, "-run=Test")
	_, summary, found := strings.Cut(out, "\n== summary\n")
	require.True(t, found, out)
	for _, want := range []string{
		"FLAKY " + dirs[0] + " example.com/a TestLate\n",
		"x_test.go:14: was late\n", "x_test.go:15: after the sub\n",
		"FLAKY " + dirs[1] + " example.com/b\n", "      a goroutine is left\n",
		"FLAKY " + dirs[2] + " example.com/c\n", "panic: no map",
	} {
		require.Equal(t, 1, strings.Count(summary, want), "%q in\n%s", want, out)
	}
	require.NotContains(t, summary, "FAIL "+dirs[0])
	require.Equal(t, 4, strings.Count(summary, "ok   "), out)
	require.Greater(t, strings.Index(summary, "FLAKY"), strings.Index(summary, "left out:"))
	require.True(t, strings.HasSuffix(out, "\n5 passed, 0 failed, 1 skipped, 3 flaky\n"), out)

	// A second failure, and a test that fails with others only, still fail.
	require.NoError(t, os.WriteFile(filepath.Join(dirs[3], "y_test.go"), []byte(`package x
		import "testing"
		func TestFirst(t *testing.T) { second = true }
		var second bool
		func TestSecond(t *testing.T) { if second { t.Error("comes second") } }
		func TestAlways(t *testing.T) { t.Error("always") }`), 0o600))
	out = testAll(t, exitFailed, dirs[3:])
	_, summary, _ = strings.Cut(out, "\n== summary\n")
	require.Contains(t, summary, "FAIL "+dirs[3])
	require.Contains(t, summary, "  example.com/d: TestAlways\n")
	require.NotContains(t, summary, "  example.com/d: TestSecond\n")
	require.Contains(t, summary, "FLAKY "+dirs[3]+" example.com/d TestSecond\n")
	require.True(t, strings.HasSuffix(out, "\n2 passed, 1 failed, 1 skipped, 1 flaky\n"), out)
}

// A test that is skipped the second time has not passed.
func TestSkippedAgain(t *testing.T) {
	dirs := newModules(t, map[string]string{"a/x_test.go": `import ("os"; "path/filepath"; "testing")` + once + `
		func TestOdd(t *testing.T) { once(func() { t.Fatal("odd") }); t.Skip("even") }`})
	out := testAll(t, exitFailed, dirs)
	require.Contains(t, out, "== again: ")
	require.NotContains(t, out, "FLAKY")
}

// Too many failures have a common cause, and another run of each would take as long again.
func TestManyFailures(t *testing.T) {
	var all strings.Builder
	for i := range maxAgain + 1 {
		fmt.Fprintf(&all, "func Test%d(t *testing.T) { t.Fail() }\n", i)
	}
	dirs := newModules(t, map[string]string{"a/x_test.go": "import \"testing\"\n" + all.String()})
	out := testAll(t, exitFailed, dirs)
	require.NotContains(t, out, "== again: ")
	require.Contains(t, out, fmt.Sprintf("%d tests and packages failed", maxAgain+1))
}

// The summary has the slowest tests, most time first.
func TestSlowest(t *testing.T) {
	var out strings.Builder
	p := &testPackage{name: "example.com/a", result: "pass"}
	for i, seconds := range []int{0, 3, 1, 12, 2, 4, 5, 6, 7, 8, 9, 10} {
		took := time.Duration(seconds) * time.Second
		p.tests = append(p.tests, &test{name: fmt.Sprintf("Test%d", i), result: "pass", took: took})
	}
	p.tests = append(p.tests, &test{name: "Test3/sub", result: "pass", took: 12 * time.Second})
	summarize(&out, []*module{{dir: "a", packages: []*testPackage{p}, took: time.Minute}}, nil, nil, nil)
	require.Contains(t, out.String(), "ok   a                    12 passed, 0 failed (60 s)\n")
	require.Contains(t, out.String(), "slowest:\n      12.0 s a example.com/a Test3\n      10.0 s a example.com/a Test11\n")
	require.Contains(t, out.String(), "       2.0 s a example.com/a Test4\n12 passed")
}

// What go test itself refuses is a failure, too.
func TestGoTestFails(t *testing.T) {
	dirs := newModules(t, map[string]string{"a/x_test.go": passing, "b/x_test.go": passing})
	out := testAll(t, exitFailed, dirs, "-p", "none")
	require.Contains(t, out, `invalid value "none" for flag -p`)
	require.Contains(t, out, "go test: exit status 2")
	require.NoError(t, os.WriteFile(filepath.Join(dirs[0], "go.mod"), []byte("nonsense"), 0o600))
	out = testAll(t, exitFailed, dirs)
	require.Contains(t, out, "go.mod:1: unknown directive: nonsense")
	require.Contains(t, out, "FAIL "+dirs[0])
	require.Contains(t, out, "ok   "+dirs[1])
}

// A signal ends the tests that run, and keeps the other modules from running.
func TestSignal(t *testing.T) {
	dirs := newModules(t, map[string]string{
		"a/x_test.go": `import ("testing"; "time"); func TestSlow(t *testing.T) { time.Sleep(time.Hour) }`,
		"b/x_test.go": passing,
	})
	t.Setenv("GOWORK", "off")
	var out buffer
	code := make(chan int, 1)
	go func() { code <- run(append(dirs, "--", "-v"), &out, &out) }()
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "=== RUN   TestSlow") }, time.Minute, 10*time.Millisecond)
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
	require.Equal(t, exitSignal+int(syscall.SIGTERM), <-code)
	require.Contains(t, out.String(), "example.com/a: TestSlow\n")
	require.Regexp(t, `/b +not run\n`, out.String())
}

// What is left for another command is counted: the tests of whole modules, and those that skip for that reason.
func TestLeft(t *testing.T) {
	long.Test(t)
	dirs := newModules(t, map[string]string{
		"a/x_test.go": `import ("os"; "testing")
			func long(t *testing.T) { if os.Getenv("QUICK") != "" { t.Skip("left for make test-all") } }
			func TestLong(t *testing.T) { long(t) }
			func TestLonger(*testing.T) {}`,
		"a/d/x_test.go": `import "testing"
			func TestParts(t *testing.T) { t.Log("the whole length is left for make test-all"); t.Run("sub", func(*testing.T) {}) }
			func TestSub(t *testing.T) { t.Run("long", func(t *testing.T) { t.Log("the whole length is left for make test-all") }) }
			func TestWhole(*testing.T) {}`,
		"b/x_test.go":          "import \"testing\"\nfunc TestMain(m *testing.M) {}\nfunc TestOne(*testing.T) {}\nfunc FuzzTwo(*testing.F) {}\nfunc help(*testing.T) {}\n",
		"b/c/x_test.go":        "func Example() {}\n",
		"b/testdata/x_test.go": "func TestNone() {}\n",
		"b/x.go":               "func TestNeither() {}\n",
	})
	file := filepath.Join(t.TempDir(), "rest")
	t.Setenv("QUICK", "1")
	out := testAll(t, 0, []string{dirs[0], leftFlag, dirs[1], restFlag, file})
	require.Contains(t, out, dirs[1]+" left for make test-all: 3 tests\n")
	require.Contains(t, out, "left out:\n     left for make test-all: TestLong\n")
	require.NotContains(t, out, "== "+dirs[1])
	require.True(t, strings.HasSuffix(out, "\n4 passed, 0 failed, 1 skipped\n"), out)

	t.Setenv("QUICK", "")
	out = testAll(t, 0, []string{onlyFlag, file}, "-v")
	for _, want := range []string{"--- PASS: TestLong ", "--- PASS: TestParts ", "    --- PASS: TestParts/sub ", "    --- PASS: TestSub/long ", "== " + dirs[1]} {
		require.Contains(t, out, want)
	}
	require.NotContains(t, out, "TestLonger")
	require.NotContains(t, out, "TestWhole")
}

// The race detector makes what kills processes and measures how long they take too slow to be a test of it.
func TestUnracedModules(t *testing.T) {
	a, err := parse([]string{"a", "--", "-race", "-v"})
	require.NoError(t, err)
	require.Equal(t, []string{"-race", "-v"}, a.flagsOf("a"))
	file := filepath.Join(t.TempDir(), "rest")
	require.NoError(t, os.WriteFile(file, []byte("a\nb\nc\n"), 0o600))
	a, err = parse([]string{onlyFlag, file, unracedFlag, "a", "c", "--", "-race", "-v"})
	require.NoError(t, err)
	require.Len(t, a.tested, 3)
	require.Equal(t, []string{"-v"}, a.flagsOf("a"))
	require.Equal(t, []string{"-race", "-v"}, a.flagsOf("b"))
	require.Equal(t, []string{"-v"}, a.flagsOf("c"))
	require.Equal(t, []string{"-race", "-v"}, a.flags)
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{nil, {"."}, {"--", "-v"}, {"-left", ".", "--"}, {"-only", "--"}, {".", "-rest", "--"}, {"-only", "none", "--", "-run=A"}, {"-only", "none", "-unraced", "--"}} {
		var out bytes.Buffer
		require.Equal(t, exitUsage, run(args, &out, &out))
		require.Contains(t, out.String(), "usage:")
	}
	var out bytes.Buffer
	require.Equal(t, exitUsage, run([]string{"-only", "none", "--"}, &out, &out))
	require.Contains(t, out.String(), "none: no such file")
}
