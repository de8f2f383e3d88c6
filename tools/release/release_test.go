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
	"go.mod":       "module github.com/example/house\n\ngo 1.26.0\n",
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
	"garden/go.mod":    "module github.com/example/house/garden\n\ngo 1.26.0\n\nrequire github.com/example/house v0.1.0\n",
	"garden/garden.go": "// Package garden is around the house.\npackage garden\n\nimport \"github.com/example/house\"\n\n// Gates is a number.\nconst Gates = house.Doors + 1\n",
	"try/go.mod":       "module github.com/example/house/try\n\ngo 1.26.0\n\nrequire github.com/example/house/garden v0.1.0\n\nrequire github.com/example/house v0.1.0 // indirect\n",
	"try/try.go":       "// Package try uses what is published.\npackage try\n\nimport _ \"github.com/example/house/garden\"\n",
	"go.work": `// make tidy writes this file.

go 1.26.0

use (
	.
	./garden
	./try
)

replace (
	github.com/example/house v0.1.0 => .
	github.com/example/house/garden v0.1.0 => ./garden
)
`,
}

var repositoryPrograms = fstest.MapFS{
	"house/main.go":         {Data: []byte("package main\n\nimport \"github.com/example/house\"\n\nfunc main() {\n\tif house.Doors != 2 {\n\t\tpanic(house.Doors)\n\t}\n}\n")},
	"garden/garden_test.go": {Data: []byte("package try\n\nimport (\n\t\"testing\"\n\n\t\"github.com/example/house/garden\"\n)\n\nfunc TestGates(t *testing.T) {\n\tif garden.Gates != 3 {\n\t\tt.Fatal(garden.Gates)\n\t}\n}\n")},
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
	require.Contains(t, out.String(), "github.com/example/house@v0.1.0 can be got: packages built: 1, commands installed: 1")
	require.Contains(t, out.String(), "github.com/example/house/garden@v0.1.0 can be got")
	require.NotContains(t, out.String(), "github.com/example/house/try@")
	require.Contains(t, out.String(), "tags give what was packed: v0.1.0 garden/v0.1.0\n")
}

// The archives have the command for each system, built as the version, and their sums.
func TestArchives(t *testing.T) {
	long.Test(t)
	cfg := newRepository(t, nil)
	cfg.archives, cfg.targets = filepath.Join(t.TempDir(), "archives"), []string{"linux/amd64", "windows/amd64"}
	require.NoError(t, mustRelease(t, cfg).check(t.Context()))
	sums, err := os.ReadFile(filepath.Join(cfg.archives, "SHA256SUMS"))
	require.NoError(t, err)
	var names []string
	for line := range strings.Lines(string(sums)) {
		names = append(names, strings.Fields(line)[1])
	}
	require.Equal(t, []string{"house_v0.1.0_linux_amd64.tar.gz", "house_v0.1.0_linux_amd64_rootfs.tar.gz", "house_v0.1.0_windows_amd64.zip"}, names)
	out, err := exec.Command("tar", "-tvzf", filepath.Join(cfg.archives, names[1])).Output()
	require.NoError(t, err)
	require.Regexp(t, `^-rwxr-xr-x .* house\n-rw-r--r-- .* etc/ssl/certs/ca-certificates.crt\n$`, string(out))
}

// Each published module gets a tag, which begins with its folder. Tags are made only of a commit, and of a version
// that has a date.
func TestTag(t *testing.T) {
	cfg := newRepository(t, nil)
	git := func(args ...string) string {
		out, err := exec.Command("git", append([]string{"-C", cfg.dir, "-c", "user.name=t", "-c", "user.email=t@localhost"}, args...)...).CombinedOutput()
		require.NoError(t, err, string(out))
		return string(out)
	}
	t.Setenv("GIT_COMMITTER_NAME", "t")
	t.Setenv("GIT_COMMITTER_EMAIL", "t@localhost")
	require.ErrorContains(t, mustRelease(t, cfg).tag(t.Context()), "not released yet")
	require.NoError(t, os.WriteFile(filepath.Join(cfg.dir, "CHANGELOG.md"), []byte("## v0.1.0 (2026-12-01)\n"), 0o600))
	require.ErrorContains(t, mustRelease(t, cfg).tag(t.Context()), "not committed:")
	git("add", "--all")
	git("commit", "-q", "-m", "all")
	require.NoError(t, mustRelease(t, cfg).tag(t.Context()))
	require.Equal(t, "garden/v0.1.0\nv0.1.0\n", git("tag"))
	require.ErrorContains(t, mustRelease(t, cfg).tag(t.Context()), "there is a tag v0.1.0")
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
	require.NoDirExists(t, filepath.Join(cache, "cache", "download", "github.com"))
}

func TestCheckFails(t *testing.T) {
	long.Test(t)
	const (
		root   = "module github.com/example/house\n\ngo 1.26.0\n\n"
		garden = "module github.com/example/house/garden\n\ngo 1.26.0\n\n"
	)
	for name, c := range map[string]struct {
		changes map[string]string
		want    string
	}{
		"require of a version that is not there": {
			map[string]string{"garden/go.mod": garden + "require github.com/example/house v0.1.1\n"},
			"garden/go.mod:5: requires github.com/example/house@v0.1.1, but the version to be tagged is v0.1.0",
		},
		"require of a module that is not there": {
			map[string]string{"garden/go.mod": garden + "require github.com/example/house/cellar v0.1.0\n"},
			"garden/go.mod:5: requires github.com/example/house/cellar@v0.1.0, and this repository has no such module",
		},
		"require of a module that is not published": {
			map[string]string{"garden/go.mod": garden + "require github.com/example/house/try v0.1.0\n"},
			"garden/go.mod:5: requires github.com/example/house/try@v0.1.0, which is not published",
		},
		"replace": {
			map[string]string{"garden/go.mod": garden + "require github.com/example/house v0.1.0\n\nreplace github.com/example/house => ../\n"},
			"garden/go.mod:7: replaces github.com/example/house: go install github.com/example/house/garden@v0.1.0 would refuse that",
		},
		"exclude": {
			map[string]string{"go.mod": root + "exclude example.com/tent v1.0.0\n"},
			"go.mod:5: excludes example.com/tent@v1.0.0: go install github.com/example/house@v0.1.0 would refuse that",
		},
		"module without a program": {
			map[string]string{"cellar/go.mod": "module github.com/example/house/cellar\n"},
			"github.com/example/house/cellar is published and has no program",
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
			map[string]string{".gitignore": "/doors/\n", "doors/doors.go": "package doors\n", "house.go": "package house\n\nimport _ \"github.com/example/house/doors\"\n\nconst Doors = 2\n"},
			"does not contain package github.com/example/house/doors",
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
		"garden/go.mod": "module github.com/example/house/garden\n\ngo 1.26.0\n\nrequire github.com/example/house v0.1.1\n",
		"go.work":       strings.Replace(repository["go.work"], "house v0.1.0", "house v0.1.1", 1),
	}))
	err := r.tryAll(t.Context(), t.TempDir())
	require.ErrorContains(t, err, "downloading github.com/example/house v0.1.1")
	require.ErrorContains(t, err, "github.com/example/house: module lookup disabled by GOPROXY=off")
}

func TestTidyForNextVersion(t *testing.T) {
	long.Test(t)
	cfg := newRepository(t, map[string]string{
		"CHANGELOG.md":  "# Changelog\n\n## v0.2.0\n",
		"garden/go.mod": "module github.com/example/house/garden\n\ngo 1.26.0\n\nreplace github.com/example/house => ../\n",
		"go.work":       "",
	})
	cfg.version = "v0.2.0"
	require.NoError(t, mustRelease(t, cfg).tidy(t.Context()))
	mod, err := os.ReadFile(filepath.Join(cfg.dir, "garden", "go.mod"))
	require.NoError(t, err)
	require.Equal(t, "module github.com/example/house/garden\n\ngo 1.26.0\n\nrequire github.com/example/house v0.2.0\n", string(mod))
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
