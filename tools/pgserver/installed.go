package pgserver

import (
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// installDirs are where packages put the programs of a server, by version.
var installDirs = []string{
	"/usr/lib/postgresql/*/bin",
	"/usr/pgsql-*/bin",
	"/usr/libexec/postgresql*",
	"/opt/homebrew/opt/postgresql@*/bin",
	"/usr/local/opt/postgresql@*/bin",
	"/usr/local/pgsql/bin",
}

// Installed returns the directory of an installed server's programs: where
// pg_config says, else the highest version in the usual places, else the
// directory in PATH that has them.
func Installed() (binDir string, ok bool) {
	var dirs []string
	if out, err := exec.Command("pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	var packaged []string
	for _, pattern := range installDirs {
		found, _ := filepath.Glob(pattern) // the patterns are well formed
		packaged = append(packaged, found...)
	}
	slices.SortStableFunc(packaged, func(a, b string) int { return cmp.Compare(major(b), major(a)) })
	dirs = append(dirs, packaged...)
	dirs = append(dirs, filepath.SplitList(os.Getenv("PATH"))...)
	i := slices.IndexFunc(dirs, hasServer)
	if i < 0 {
		return "", false
	}
	return dirs[i], true
}

func hasServer(dir string) bool {
	for _, name := range []string{"initdb", "postgres"} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode()&0o111 == 0 {
			return false
		}
	}
	return filepath.IsAbs(dir)
}

var digits = regexp.MustCompile(`\d+`)

// major returns the version that a directory's name tells, or 0.
func major(dir string) int {
	n, _ := strconv.Atoi(digits.FindString(dir)) // no digits: 0
	return n
}
