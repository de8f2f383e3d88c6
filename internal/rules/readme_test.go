package rules

import (
	"context"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// Go code in the documents is code that is compiled. A block with a package clause is a
// whole file of this repository; any other block is consecutive lines of one, indented
// or not. So a fragment is written into an example first, where it has its imports and
// variables, and then copied.
func TestDocBlocks(t *testing.T) {
	t.Parallel()
	indent := regexp.MustCompile(`(?m)^\t+`)
	var files []string
	for _, path := range repository(t, ".go") {
		source, err := os.ReadFile(path)
		require.NoError(t, err)
		files = append(files, "\n"+indent.ReplaceAllString(string(source), ""))
	}
	blocks := 0
	for _, path := range documents(t) {
		for _, block := range regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(read(t, path), -1) {
			code := "\n" + indent.ReplaceAllString(block[1], "")
			whole := regexp.MustCompile(`(?m)^package `).MatchString(code)
			require.True(t, slices.ContainsFunc(files, func(file string) bool {
				return file == code || !whole && strings.Contains(file, code)
			}), "%s: no Go file has these lines:\n%s", path, block[1])
			blocks++
		}
	}
	require.Greater(t, blocks, 10)
}

// The table of docs/transactions.md shows lines of the example that a row links to.
func TestTransactionsTable(t *testing.T) {
	t.Parallel()
	row := regexp.MustCompile(`(?m)^\| \[[^]]+\]\(\.\./(examples/transactions/[\w/]+/main\.go)\) \|(.*)\|$`)
	rows := row.FindAllStringSubmatch(read(t, "docs/transactions.md"), -1)
	require.Len(t, rows, 7, "one for each example")
	for _, row := range rows {
		lines := regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[2], -1)
		require.GreaterOrEqual(t, len(lines), 3, row[1])
		for _, line := range lines {
			for _, part := range strings.Split(line[1], "…") {
				require.Contains(t, read(t, row[1]), part, row[1])
			}
		}
	}
}

// The README can be read in five minutes.
func TestReadmeIsShort(t *testing.T) {
	t.Parallel()
	require.LessOrEqual(t, len(strings.Fields(read(t, "README.md"))), 700)
	require.LessOrEqual(t, strings.Count(read(t, "ARCHITECTURE.md"), "\n"), 200)
}

// Relative links lead to files and headings that are there.
func TestDocLinks(t *testing.T) {
	t.Parallel()
	for _, path := range documents(t) {
		prose := regexp.MustCompile("(?s)```.*?```").ReplaceAllString(read(t, path), "")
		for _, link := range regexp.MustCompile(`\]\(([^)\s]+)\)`).FindAllStringSubmatch(prose, -1) {
			target, anchor, _ := strings.Cut(link[1], "#")
			if strings.Contains(target, "://") {
				continue
			}
			file := path
			if target != "" {
				file = filepath.Join(filepath.Dir(path), target)
			}
			_, err := os.Stat(file)
			require.NoError(t, err, path)
			if anchor != "" {
				require.Contains(t, anchors(read(t, file)), anchor, "%s: %s", path, link[1])
			}
		}
	}
}

// The navigation of the site has each page of docs/ once.
func TestSiteNavigation(t *testing.T) {
	t.Parallel()
	navigation := regexp.MustCompile(`(?s)\nnav = \[\n(.*?)\n\]\n`).FindStringSubmatch(read(t, "tools/site/zensical.toml"))
	require.NotNil(t, navigation)
	var named, there []string
	for _, page := range regexp.MustCompile(`"([\w/-]+\.md)"`).FindAllStringSubmatch(navigation[1], -1) {
		named = append(named, page[1])
	}
	require.NoError(t, filepath.WalkDir("docs", func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, ".md") {
			there = append(there, strings.TrimPrefix(filepath.ToSlash(path), "docs/"))
		}
		return err
	}))
	require.ElementsMatch(t, append(there, "index.md"), named, "index.md is README.md")
}

// anchors returns what links to the headings of a document end with.
func anchors(doc string) (all []string) {
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(doc, -1) {
		text := regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(heading[1]), "")
		all = append(all, strings.ReplaceAll(text, " ", "-"))
	}
	return all
}

// Files, tests and other names of Go, SQL and the Makefile that the documents mention are there: a
// name that was changed is changed in the documents too.
func TestDocNames(t *testing.T) {
	t.Parallel()
	words := map[string]bool{"max_prepared_statements": true, "pg_upgrade": true, "pg_read_all_stats": true, "GROUP_AUTHORIZATION_FAILED": true,
		"ByteArrayDeserializer": true, "AckMode": true, "RECORD": true, "BATCH": true, "DefaultErrorHandler": true, "DeadLetterPublishingRecoverer": true,
		"CloudEventDeserializer": true, "REPLICATION": true, "InsertHeader": true, "ByteArrayConverter": true, "confirmed_flush_lsn": true, "max_replication_slots": true,
		"default_transaction_deferrable": true, "simple_protocol": true, "standard_conforming_strings": true, "enable_indexscan": true,
		"enable_indexonlyscan": true, "enable_nestloop": true} // not ours
	for _, path := range slices.Concat(repository(t, ".go"), repository(t, ".sql"), []string{"Makefile"}) {
		code := regexp.MustCompile(`(?m)(^|\s)//.*$`).ReplaceAllString(read(t, path), "") // comments may be as old as documents
		for _, word := range regexp.MustCompile(`\w+`).FindAllString(code, -1) {
			words[word] = true
		}
	}
	name := regexp.MustCompile(`^[A-Za-z]\w*(\.[A-Za-z]\w*)*$`)
	file := regexp.MustCompile(`^[\w./-]+(\.(go|sql|md)|Makefile)$`)
	for _, path := range documents(t) {
		for _, code := range regexp.MustCompile("`([^`\n]+)`").FindAllStringSubmatch(read(t, path), -1) {
			switch {
			case file.MatchString(code[1]) && !isThere(code[1]):
				t.Errorf("%s: no file is named %s", path, code[1])
			case name.MatchString(code[1]) && !file.MatchString(code[1]):
				for _, part := range strings.Split(code[1], ".") {
					if !words[part] {
						t.Errorf("%s: nothing is named %s", path, code[1])
					}
				}
			}
		}
	}
}

// A target that a document names is one of the Makefile, and the flags of an example that it runs are there.
func TestDocTargets(t *testing.T) {
	t.Parallel()
	targets := map[string]bool{}
	for _, target := range regexp.MustCompile(`(?m)^([a-z-]+):`).FindAllStringSubmatch(read(t, "Makefile"), -1) {
		targets[target[1]] = true
	}
	shown := regexp.MustCompile("(?m)(?:`|^ {4}|^|=\\S+ |<code>)make ([a-z-]+)([^`\n#]*)")
	made := 0
	for _, path := range repository(t, ".md") {
		for _, call := range shown.FindAllStringSubmatch(read(t, path), -1) {
			name := call[1]
			require.True(t, targets[name], "%s: there is no make %s", path, name)
			made++
			sources, err := filepath.Glob("examples/" + name + "/*.go")
			require.NoError(t, err)
			args := regexp.MustCompile(`ARGS="?([^"]*)`).FindStringSubmatch(call[2])
			if len(sources) == 0 || args == nil {
				continue
			}
			var code strings.Builder
			for _, source := range sources {
				code.WriteString(read(t, source))
			}
			for _, flag := range regexp.MustCompile(`(?:^|\s)-([a-z]+)`).FindAllStringSubmatch(args[1], -1) {
				defines := regexp.MustCompile(`flags\.\w+\((&[\w.]+, )?"` + flag[1] + `",`)
				require.True(t, defines.MatchString(code.String()), "%s: make %s has no flag -%s", path, name, flag[1])
			}
		}
	}
	require.Greater(t, made, 60)
}

// Workflows run targets of the Makefile and tools that are there, and test the versions that the Makefile names.
func TestWorkflows(t *testing.T) {
	t.Parallel()
	workflows, err := filepath.Glob(".github/workflows/*.yml")
	require.NoError(t, err)
	makefile, runs := read(t, "Makefile"), 0
	for _, path := range workflows {
		for _, run := range regexp.MustCompile(`run: (?:make ([a-z-]+)|.*?((?:tools/|\.ci/)[\w./]+))`).FindAllStringSubmatch(read(t, path), -1) {
			runs++
			if run[1] != "" {
				require.Contains(t, makefile, "\n"+run[1]+":", "%s: make %s", path, run[1])
			} else {
				require.FileExists(t, run[2], path)
			}
		}
	}
	require.Greater(t, runs, 5)
	versions := func(name string) []string {
		return strings.Fields(regexp.MustCompile(`(?m)^` + name + ` +\?= (.*)$`).FindStringSubmatch(makefile)[1])
	}
	lists := regexp.MustCompile(`version: \[(.*)\]`).FindAllStringSubmatch(read(t, ".github/workflows/versions.yml"), -1)
	require.Len(t, lists, 2)
	for i, name := range []string{"VERSIONS", "KAFKAS"} {
		require.Equal(t, versions(name), strings.Split(strings.ReplaceAll(lists[i][1], `"`, ""), ", "), name)
	}
}

// isThere reports whether a document may name a file so.
func isThere(file string) bool {
	return slices.ContainsFunc([]string{".", "migrations", "examples/guide"}, func(dir string) bool {
		_, err := os.Stat(filepath.Join(dir, file))
		return err == nil
	})
}

// The lines that docs/failures.md quotes are logged. What fails is a word of its own.
func TestQuotedLogLines(t *testing.T) {
	t.Parallel()
	var sources strings.Builder
	for _, path := range repository(t, ".go") {
		if !strings.HasSuffix(path, "_test.go") {
			sources.WriteString(read(t, path))
		}
	}
	for _, line := range regexp.MustCompile(`"([^"\n]+)"`).FindAllStringSubmatch(read(t, "docs/failures.md"), -1) {
		for _, part := range strings.Split(strings.TrimSuffix(line[1], " fails"), "…") {
			require.Contains(t, sources.String(), strings.TrimSpace(part), line[1])
		}
	}
}

// documents are those for users and for those who change outbox.
func documents(t *testing.T) []string {
	t.Helper()
	users, err := filepath.Glob("docs/*.md")
	require.NoError(t, err)
	developers, err := filepath.Glob("internal/doc/*.md")
	require.NoError(t, err)
	return slices.Concat([]string{"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"}, developers, users)
}

// repository returns the files with an ending, of all modules.
func repository(t *testing.T, ending string) (paths []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" || d.Name() == "bin"):
			return fs.SkipDir
		case strings.HasSuffix(path, ending):
			paths = append(paths, path)
		}
		return nil
	}))
	return paths
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

// The quickstart is short, and works when it is copied into an empty module that
// requires this one.
func TestQuickstart(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	program := read(t, "examples/quickstart/main.go")
	require.LessOrEqual(t, strings.Count(program, "\n"), 60)

	brokers := strings.Join(testenv.Brokers(t), ",")
	database := testenv.OtherDatabase(t).Config()
	here, err := os.Getwd()
	require.NoError(t, err)
	dir := t.TempDir()
	mod := fmt.Sprintf("module try\n\ngo 1.26\n\nrequire github.com/outboxgo/outbox v0.0.0\n\nreplace github.com/outboxgo/outbox => %s\n", here)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte(mod), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "main.go"), []byte(program), 0o600))
	dsn, err := url.Parse(database.ConnString())
	require.NoError(t, err)
	dsn.Path = database.ConnConfig.Database
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	for _, args := range [][]string{{"mod", "tidy"}, {"run", "."}} {
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "DATABASE_URL="+dsn.String(), "KAFKA_BROKERS="+brokers, "GOWORK=off")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "go %s: %s", args[0], out)
		if args[0] == "run" {
			require.Contains(t, string(out[:min(len(out), 1000)]), "arrived: gopher")
		}
	}
}
