package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
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
	require.Equal(t, 4, strings.Count(summary, "FAIL "), summary)
	require.Contains(t, summary, "ok   "+dirs[4])
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

func TestUsage(t *testing.T) {
	for _, args := range [][]string{nil, {"."}, {"--", "-v"}} {
		var out bytes.Buffer
		require.Equal(t, exitUsage, run(args, &out, &out))
		require.Contains(t, out.String(), "usage:")
	}
}
