package rules

import (
	"fmt"
	"go/ast"
	"go/token"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// requirementNumbers are how many numbers each chapter of the requirements has.
var requirementNumbers = []struct {
	chapter string
	last    int
}{{"A", 75}, {"B", 34}, {"C", 38}, {"D", 34}, {"E", 38}, {"T", 30}, {"X", 36}, {"F", 6}}

// internal/doc/requirements.md has one line for each number, in order. A line that is done names the tests that show
// it, any other line says why, and all tests that it names exist.
func TestRequirements(t *testing.T) {
	t.Parallel()
	tests := testNames(t)
	text := read(t, "internal/doc/requirements.md")
	var numbers, want []string
	for _, line := range regexp.MustCompile(`(?m)^\| ([A-Z]\d+) \|(.*)\|$`).FindAllStringSubmatch(text, -1) {
		number, cells := line[1], strings.Split(line[2], " |")
		numbers = append(numbers, number)
		if !assertCells(t, number, cells) {
			continue
		}
		state, why, shown := strings.TrimSpace(cells[1]), strings.TrimSpace(cells[2]), strings.TrimSpace(cells[3])
		switch state {
		case "done":
			if shown == "" {
				t.Errorf("%s is done, and no test shows it", number)
			}
		case "differs", "partial", "missing":
			if why == "" {
				t.Errorf("%s is %s, and the line does not say why", number, state)
			}
		default:
			t.Errorf("%s is %q: want done, differs, partial or missing", number, state)
		}
		for _, name := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(shown, -1) {
			if test, sub, _ := strings.Cut(name[1], "/"); !tests[test] || sub != "" && !tests[test+"/"+sub] {
				t.Errorf("%s: there is no test %s", number, name[1])
			}
		}
	}
	for _, c := range requirementNumbers {
		for n := range c.last {
			want = append(want, fmt.Sprint(c.chapter, n+1))
		}
	}
	require.Equal(t, want, numbers)
	require.NotRegexp(t, "`[\\w./-]+\\.(go|sql)`", text, "files move, and nobody looks here then")
}

// The tests that documents name exist.
func TestNamedTestsExist(t *testing.T) {
	t.Parallel()
	tests := testNames(t)
	named := 0
	for _, path := range repository(t, ".md") {
		for _, name := range regexp.MustCompile("`(Test[A-Z]\\w*)").FindAllStringSubmatch(read(t, path), -1) {
			named++
			if !tests[name[1]] {
				t.Errorf("%s names %s, which does not exist", path, name[1])
			}
		}
	}
	require.Greater(t, named, 500)
}

// The models and properties that docs/correctness.md names exist, and so do its commands.
func TestCorrectnessNamesWhatExists(t *testing.T) {
	t.Parallel()
	text, makefile := read(t, "docs/correctness.md"), read(t, "Makefile")
	models := regexp.MustCompile("((?:`[A-Z]\\w+`(?:, )?)+)(?: under fairness)?: ([A-Z]\\w+(?:, [A-Z]\\w+)*)").FindAllStringSubmatch(text, -1)
	require.Greater(t, len(models), 8)
	for _, line := range models {
		properties := ""
		for _, model := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(line[1], -1) {
			properties += read(t, "spec/"+model[1]+".tla")
		}
		for property := range strings.SplitSeq(line[2], ", ") {
			require.Regexp(t, `(?m)^`+property+` ==`, properties, "%s has no %s", line[1], property)
		}
	}
	for _, target := range regexp.MustCompile("`make ([a-z-]+)").FindAllStringSubmatch(text, -1) {
		require.Regexp(t, `(?m)^`+target[1]+`:`, makefile, "make %s", target[1])
	}
}

// assertCells reports whether a line has what, state, how and tests.
func assertCells(t *testing.T, number string, cells []string) bool {
	t.Helper()
	if len(cells) == 5 && strings.TrimSpace(cells[4]) == "" {
		cells = cells[:4]
	}
	if len(cells) != 4 {
		t.Errorf("%s has %d cells", number, len(cells))
		return false
	}
	return true
}

// testNames returns the tests, examples and fuzz tests of all modules. A subtest counts by a text in the file of
// its test: what t.Run gets, or a table that it takes its names from.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for _, path := range repository(t, "_test.go") {
		file, err := parseFile(token.NewFileSet(), path)
		require.NoError(t, err)
		var tests, texts []string
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				if n.Recv == nil && regexp.MustCompile(`^(Test|Example|Fuzz)`).MatchString(n.Name.Name) {
					tests = append(tests, n.Name.Name)
				}
			case *ast.BasicLit:
				if text, err := strconv.Unquote(n.Value); err == nil && n.Kind == token.STRING {
					texts = append(texts, text)
				}
			}
			return true
		})
		for _, test := range tests {
			names[test] = true
			for _, text := range texts {
				names[test+"/"+text] = true
			}
		}
	}
	return names
}

// A package of a published module whose tests need a real broker is among those that make test-versions tests on
// all versions of Kafka.
func TestVersionsOfKafka(t *testing.T) {
	t.Parallel()
	list := regexp.MustCompile(`(?m)^BROKERS +:= (.*)$`).FindStringSubmatch(read(t, "Makefile"))
	require.NotNil(t, list)
	packages := strings.Fields(list[1])
	others := regexp.MustCompile(`^(bench|examples|faults|interop)/|^internal/rules/`)
	for _, path := range repository(t, "_test.go") {
		if !others.MatchString(path) && strings.Contains(read(t, path), "testenv.RealBrokers(") {
			require.Contains(t, packages, "./"+filepath.Dir(path), path)
		}
	}
}
