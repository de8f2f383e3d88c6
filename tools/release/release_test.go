package main

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/tools/internal/long"
)

// repository is what the tests release: a module with a command, and one in a
// folder of it that is published, too. The modules of ours are the same, only larger.
var repository = map[string]string{
	"CHANGELOG.md": "# Changelog\n\n## v0.1.0 (not released yet)\n",
	"LICENSE":      "MIT\n",
	"go.mod":       "module example.com/house\n\ngo 1.26.0\n",
	"house.go":     "// Package house is one.\npackage house\n\n// Doors is a number.\nconst Doors = 2\n",
	"cmd/house/main.go": `// House prints its version.
package main

import (
	"os"
	"runtime/debug"
)

func main() {
	info, _ := debug.ReadBuildInfo()
	os.Stdout.WriteString(os.Args[1] + " " + info.Main.Version)
}
`,
	"garden/go.mod":    "module example.com/house/garden\n\ngo 1.26.0\n\nrequire example.com/house v0.1.0\n",
	"garden/garden.go": "// Package garden is around the house.\npackage garden\n\nimport \"example.com/house\"\n\n// Gates is a number.\nconst Gates = house.Doors + 1\n",
	"try/go.mod":       "module example.com/house/try\n\ngo 1.26.0\n\nrequire example.com/house/garden v0.1.0\n\nrequire example.com/house v0.1.0 // indirect\n",
	"try/try.go":       "// Package try uses what is published.\npackage try\n\nimport _ \"example.com/house/garden\"\n",
	"go.work": `// make tidy writes this file.

go 1.26.0

use (
	.
	./garden
	./try
)

replace (
	example.com/house v0.1.0 => .
	example.com/house/garden v0.1.0 => ./garden
)
`,
}

var repositoryPrograms = fstest.MapFS{
	"house/main.go":         {Data: []byte("package main\n\nimport \"example.com/house\"\n\nfunc main() {\n\tif house.Doors != 2 {\n\t\tpanic(house.Doors)\n\t}\n}\n")},
	"garden/garden_test.go": {Data: []byte("package try\n\nimport (\n\t\"testing\"\n\n\t\"example.com/house/garden\"\n)\n\nfunc TestGates(t *testing.T) {\n\tif garden.Gates != 3 {\n\t\tt.Fatal(garden.Gates)\n\t}\n}\n")},
}

// newRepository writes the repository with changes: other content of some files, or
// none for those that are not to be there.
func newRepository(t *testing.T, changes map[string]string) config {
	t.Helper()
	t.Setenv("GOPROXY", "off") // everything is here
	dir := t.TempDir()
	out, err := exec.Command("git", "init", "-q", dir).CombinedOutput()
	require.NoError(t, err, string(out))
	for _, files := range []map[string]string{repository, changes} {
		for name, content := range files {
			name = filepath.Join(dir, name)
			require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o755))
			require.NoError(t, os.WriteFile(name, []byte(content), 0o600))
			if content == "" {
				require.NoError(t, os.Remove(name))
			}
		}
	}
	return config{dir: dir, version: "v0.1.0", programs: repositoryPrograms, unpublished: []string{"try"}, out: io.Discard}
}

func mustRelease(t *testing.T, cfg config) *release {
	t.Helper()
	r, err := newRelease(cfg)
	require.NoError(t, err)
	return r
}

func TestCheckPasses(t *testing.T) {
	long.Test(t)
	cfg := newRepository(t, nil)
	var out strings.Builder
	cfg.out = &out
	require.NoError(t, mustRelease(t, cfg).check(t.Context()))
	require.Contains(t, out.String(), "example.com/house@v0.1.0 can be got: packages built: 1, commands installed: 1")
	require.Contains(t, out.String(), "example.com/house/garden@v0.1.0 can be got")
	require.NotContains(t, out.String(), "example.com/house/try@")
}

// The user's module cache must not hold a version that is not there yet.
func TestCheckLeavesModuleCacheAlone(t *testing.T) {
	long.Test(t)
	cache := t.TempDir()
	t.Setenv("GOMODCACHE", cache)
	require.NoError(t, mustRelease(t, newRepository(t, nil)).check(t.Context()))
	found, err := filepath.Glob(filepath.Join(cache, "*", "*house*"))
	require.NoError(t, err)
	require.Empty(t, found)
	require.NoDirExists(t, filepath.Join(cache, "cache", "download", "example.com"))
}

func TestCheckFails(t *testing.T) {
	long.Test(t)
	const (
		root   = "module example.com/house\n\ngo 1.26.0\n\n"
		garden = "module example.com/house/garden\n\ngo 1.26.0\n\n"
	)
	for name, c := range map[string]struct {
		changes map[string]string
		want    string
	}{
		"require of a version that is not there": {
			map[string]string{"garden/go.mod": garden + "require example.com/house v0.1.1\n"},
			"garden/go.mod:5: requires example.com/house@v0.1.1, but the version to be tagged is v0.1.0",
		},
		"require of a module that is not there": {
			map[string]string{"garden/go.mod": garden + "require example.com/house/cellar v0.1.0\n"},
			"garden/go.mod:5: requires example.com/house/cellar@v0.1.0, and this repository has no such module",
		},
		"require of a module that is not published": {
			map[string]string{"garden/go.mod": garden + "require example.com/house/try v0.1.0\n"},
			"garden/go.mod:5: requires example.com/house/try@v0.1.0, which is not published",
		},
		"replace": {
			map[string]string{"garden/go.mod": garden + "require example.com/house v0.1.0\n\nreplace example.com/house => ../\n"},
			"garden/go.mod:7: replaces example.com/house: go install example.com/house/garden@v0.1.0 would refuse that",
		},
		"exclude": {
			map[string]string{"go.mod": root + "exclude example.com/tent v1.0.0\n"},
			"go.mod:5: excludes example.com/tent@v1.0.0: go install example.com/house@v0.1.0 would refuse that",
		},
		"module without a program": {
			map[string]string{"cellar/go.mod": "module example.com/house/cellar\n"},
			"example.com/house/cellar is published and has no program",
		},
		"program without a module": {
			map[string]string{"garden/go.mod": ""},
			"the program garden tries no published module",
		},
		"no changelog": {
			map[string]string{"CHANGELOG.md": "# Changelog\n\n## v0.0.9\n"},
			`CHANGELOG.md has no chapter "## v0.1.0"`,
		},
		"require that is missing": {
			map[string]string{"garden/go.mod": garden},
			"garden/go.mod is not tidy: run make tidy",
		},
		"no workspace": {
			map[string]string{"go.work": ""},
			"go.work is not tidy: run make tidy",
		},
		"program that fails": {
			map[string]string{"house.go": "package house\n\nconst Doors = 3\n"},
			"panic: 3",
		},
		"file that is not committed": {
			map[string]string{".gitignore": "/doors/\n", "doors/doors.go": "package doors\n", "house.go": "package house\n\nimport _ \"example.com/house/doors\"\n\nconst Doors = 2\n"},
			"does not contain package example.com/house/doors",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := mustRelease(t, newRepository(t, c.changes))
			require.ErrorContains(t, r.check(t.Context()), c.want)
		})
	}
}

// The go command itself finds what checkFiles finds, from outside.
func TestVersionThatIsNotThereCannotBeGot(t *testing.T) {
	long.Test(t)
	r := mustRelease(t, newRepository(t, map[string]string{
		"garden/go.mod": "module example.com/house/garden\n\ngo 1.26.0\n\nrequire example.com/house v0.1.1\n",
		"go.work":       strings.Replace(repository["go.work"], "house v0.1.0", "house v0.1.1", 1),
	}))
	err := r.tryAll(t.Context(), t.TempDir())
	require.ErrorContains(t, err, "downloading example.com/house v0.1.1")
	require.ErrorContains(t, err, "example.com/house: module lookup disabled by GOPROXY=off")
}

func TestTidyForNextVersion(t *testing.T) {
	long.Test(t)
	cfg := newRepository(t, map[string]string{
		"CHANGELOG.md":  "# Changelog\n\n## v0.2.0\n",
		"garden/go.mod": "module example.com/house/garden\n\ngo 1.26.0\n\nreplace example.com/house => ../\n",
		"go.work":       "",
	})
	cfg.version = "v0.2.0"
	require.NoError(t, mustRelease(t, cfg).tidy(t.Context()))
	mod, err := os.ReadFile(filepath.Join(cfg.dir, "garden", "go.mod"))
	require.NoError(t, err)
	require.Equal(t, "module example.com/house/garden\n\ngo 1.26.0\n\nrequire example.com/house v0.2.0\n", string(mod))
	work, err := os.ReadFile(filepath.Join(cfg.dir, "go.work"))
	require.NoError(t, err)
	require.Equal(t, strings.ReplaceAll(repository["go.work"], "v0.1.0", "v0.2.0"), string(work))
	require.NoError(t, mustRelease(t, cfg).check(t.Context()))
}

func TestVersionMustBeComplete(t *testing.T) {
	for _, version := range []string{"", "0.1.0", "v1", "v1.2", "v1.2.3+x"} {
		cfg := newRepository(t, nil)
		cfg.version = version
		_, err := newRelease(cfg)
		require.ErrorContains(t, err, "is not a version such as v0.1.0")
	}
}
