package rules

import (
	"fmt"
	"go/ast"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
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

// internal/doc/requirements.md has each number, in order: one line, or lines with parts from 1 on where different
// tests show what it asks for. A line that is done names the tests that show it, any other line says why, and all
// tests that it names exist.
func TestRequirements(t *testing.T) {
	t.Parallel()
	tests := testNames(t)
	text := read(t, "internal/doc/requirements.md")
	var numbers, want []string
	parts := map[string]int{}
	for _, line := range regexp.MustCompile(`(?m)^\| ([A-Z]\d+)(\.\d+)? \|(.*)\|$`).FindAllStringSubmatch(text, -1) {
		number, cells := line[1]+line[2], strings.Split(line[3], " |")
		if line[2] != "" {
			parts[line[1]]++
			require.Equal(t, fmt.Sprintf("%s.%d", line[1], parts[line[1]]), number)
		}
		if parts[line[1]] <= 1 {
			numbers = append(numbers, line[1])
		}
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
		tests.assertNamed(t, number, shown)
	}
	for _, c := range requirementNumbers {
		for n := range c.last {
			want = append(want, fmt.Sprint(c.chapter, n+1))
		}
	}
	require.Equal(t, want, numbers)
	for number, n := range parts {
		require.Greater(t, n, 1, "%s has one part", number)
	}
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
			if tests[name[1]] == nil {
				t.Errorf("%s names %s, which does not exist", path, name[1])
			}
		}
	}
	require.Greater(t, named, 500)
}

// Each promise of docs/guarantees.md links to the chapter of the same name in internal/doc/guarantees-tests.md, and
// names tests of that chapter. A row there is one situation, and names the tests that show it. All of them exist.
func TestGuarantees(t *testing.T) {
	t.Parallel()
	const page = "internal/doc/guarantees-tests.md"
	tests := testNames(t)
	var promised, shown []string
	rows := map[string]string{} // of each chapter
	situations := map[string]bool{}
	for _, c := range chapters(read(t, page)) {
		shown = append(shown, c.heading)
		for _, row := range regexp.MustCompile(`(?m)^\| (.+)$`).FindAllStringSubmatch(c.text, -1)[1:] {
			cells := strings.Split(strings.TrimSuffix(row[1], " |"), " | ")
			if len(cells) != 2 {
				t.Errorf("%s: want a situation and its tests: %s", page, row[0])
				continue
			}
			if situations[cells[0]] && !strings.HasPrefix(cells[0], "the same") {
				t.Errorf("%s: there are two rows of: %s", page, cells[0])
			}
			situations[cells[0]] = true
			require.Regexp(t, "^`[^`]+`( of [\\w./-]+)?(, `[^`]+`( of [\\w./-]+)?)*$", cells[1], "%s: nothing but tests", cells[0])
			tests.assertNamed(t, cells[0], cells[1])
			rows[c.heading] += cells[1]
		}
	}
	require.Greater(t, len(situations), 400)
	for _, c := range chapters(read(t, "docs/guarantees.md")) {
		_, proof, ok := strings.Cut(c.text, "**Proof.**")
		if !ok {
			continue
		}
		promised = append(promised, c.heading)
		require.Contains(t, proof, "(../"+page+"#"+anchors("## " + c.heading)[0]+")")
		named := regexp.MustCompile("`Test\\w+`").FindAllString(proof, -1)
		require.NotEmpty(t, named, c.heading)
		for _, name := range named {
			require.Contains(t, rows[c.heading], name, "%s: no row of %s has it", c.heading, page)
		}
	}
	require.Equal(t, promised, shown)
}

// chapter is a part of a document below a heading of the second level.
type chapter struct{ heading, text string }

func chapters(doc string) (all []chapter) {
	for _, text := range strings.Split("\n"+doc, "\n## ")[1:] {
		heading, text, _ := strings.Cut(text, "\n")
		all = append(all, chapter{heading, text})
	}
	return all
}

// The models and properties that docs/guarantees.md names exist, and so do its commands.
func TestGuaranteesNameModels(t *testing.T) {
	t.Parallel()
	text, makefile := read(t, "docs/guarantees.md"), read(t, "Makefile")
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

// testFolders has the names of tests, examples, fuzz tests and benchmarks, with the folders of the packages that have
// one of the name.
type testFolders map[string][]string

// assertNamed checks that the tests in a cell exist. A name that several packages have is followed by the folder:
// `TestReplay` of outboxdlq.
func (tests testFolders) assertNamed(t *testing.T, row, cell string) {
	t.Helper()
	for _, m := range regexp.MustCompile("`([^`]+)`(?: of ([\\w./-]+))?").FindAllStringSubmatch(cell, -1) {
		name, folder := m[1], m[2]
		test, _, _ := strings.Cut(name, "/")
		switch {
		case len(tests[name]) == 0, folder != "" && !slices.Contains(tests[name], folder):
			t.Errorf("%s: there is no test %s", row, m[0])
		case folder == "" && len(tests[test]) > 1:
			t.Errorf("%s: name one of the folders that have a %s: %s", row, name, tests[test])
		}
	}
}

// testNames returns the tests of all modules. A subtest counts by a text in the file of
// its test: what t.Run gets, or a table that it takes its names from.
func testNames(t *testing.T) testFolders {
	t.Helper()
	names := testFolders{}
	add := func(name, path string) {
		if dir := filepath.Dir(path); !slices.Contains(names[name], dir) {
			names[name] = append(names[name], dir)
		}
	}
	for _, path := range repository(t, "_test.go") {
		file, err := parseFile(token.NewFileSet(), path)
		require.NoError(t, err)
		var tests, texts []string
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				if n.Recv == nil && regexp.MustCompile(`^(Test|Example|Fuzz|Benchmark)`).MatchString(n.Name.Name) {
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
			add(test, path)
			for _, text := range texts {
				add(test+"/"+text, path)
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
