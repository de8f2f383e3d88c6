package main

import (
	"context"
	"errors"
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// shownCommand is a command line that a document or a text of the program shows.
type shownCommand struct {
	where string   // the file
	words []string // behind the word outbox
	// inProse is set if other words of a sentence may follow.
	inProse bool
}

// The command line takes each command that a document shows: it exists, as its flags do, it has its arguments, and
// the flags that it requires. A sentence may name a command or its flags without values.
func TestDocCommands(t *testing.T) {
	t.Parallel()
	var all []shownCommand
	for _, path := range filesOf(t, ".md") {
		all = append(all, commandsOfDocument(path, readFile(t, path))...)
	}
	require.Greater(t, len(all), 180)
	for _, c := range all {
		if err := c.check(); err != "" {
			t.Errorf("%s: outbox %s: %s", c.where, strings.Join(c.words, " "), err)
		}
	}
}

// A flag that a document names without its command is one of a command.
func TestDocFlags(t *testing.T) {
	t.Parallel()
	known := newFlagSet()
	(&globals{}).define(known)
	for _, c := range commands() {
		own := newFlagSet()
		c.prepare(own)
		own.VisitAll(func(f *flag.Flag) {
			if known.Lookup(f.Name) == nil {
				known.Var(f.Value, f.Name, f.Usage)
			}
		})
	}
	n := 0
	for _, path := range filesOf(t, ".md") {
		for _, name := range regexp.MustCompile("`(--[a-z-]+)").FindAllStringSubmatch(readFile(t, path), -1) {
			if name[1] != "--feature" { // of ent
				require.NotNil(t, known.Lookup(name[1][2:]), "%s: %s", path, name[1])
				n++
			}
		}
	}
	require.Greater(t, n, 20)
}

// So it does each command that the program names: in hints, in errors, in what the doctor says, in alerts, on the
// page, and in comments.
func TestCommandsOfTexts(t *testing.T) {
	t.Parallel()
	var all []shownCommand
	for _, path := range filesOf(t, ".go") {
		if !strings.HasSuffix(path, "_test.go") {
			all = append(all, commandsOfSource(t, path)...)
		}
	}
	for _, ending := range []string{".sql", ".yml", ".yaml", ".js", ".json"} {
		for _, path := range filesOf(t, ending) {
			all = append(all, commandsOfText(path, readFile(t, path))...)
		}
	}
	for _, path := range filesOf(t, ".html") {
		for _, code := range htmlCode.FindAllStringSubmatch(readFile(t, path), -1) {
			all = append(all, commandsOfText(path, code[1])...)
		}
	}
	require.Greater(t, len(all), 50)
	for _, c := range all {
		if err := c.check(); err != "" {
			t.Errorf("%s: outbox %s: %s", c.where, strings.Join(c.words, " "), err)
		}
	}
}

var (
	fencedBlock  = regexp.MustCompile("(?ms)^[ \t]*```(\\w*)\n(.*?)^[ \t]*```[ \t]*$")
	indentedLine = regexp.MustCompile(`(?m)^ {4,}(?:\$ )?(outbox .*)$`)
	codeSpan     = regexp.MustCompile("`([^`]+)`")
	manifestArgs = regexp.MustCompile(`(?m)^\s*args: \[(.*)\]`)
	htmlCode     = regexp.MustCompile(`(?s)<code>(.*?)</code>`)
	unitStart    = regexp.MustCompile(`(?m)^ExecStart=\S*/(outbox .*)$`)
)

// commandsOfDocument returns those in blocks and spans of code.
func commandsOfDocument(path, text string) (all []shownCommand) {
	prose := fencedBlock.ReplaceAllStringFunc(text, func(block string) string {
		parts := fencedBlock.FindStringSubmatch(block)
		switch parts[1] {
		case "", "sh", "bash", "console":
			all = append(all, commandsOfShell(path, parts[2])...)
		case "text":
			all = append(all, commandsOfText(path, parts[2])...)
		case "yaml", "ini":
			for _, args := range manifestArgs.FindAllStringSubmatch(parts[2], -1) {
				all = append(all, shownCommand{path, strings.Split(args[1], ", "), false})
			}
			for _, line := range unitStart.FindAllStringSubmatch(parts[2], -1) {
				all = append(all, commandsOfShell(path, line[1])...)
			}
		}
		return "\n"
	})
	for _, line := range indentedLine.FindAllStringSubmatch(prose, -1) {
		all = append(all, commandsOfShell(path, line[1])...)
	}
	for _, span := range codeSpan.FindAllStringSubmatch(prose, -1) {
		words := fields(span[1])
		switch {
		case len(words) > 1 && words[0] == "outbox":
			all = append(all, namedOrWhole(path, words[1:]))
		case isCommand(words):
			all = append(all, namedOrWhole(path, words))
		}
	}
	return all
}

// isCommand reports whether words begin with the name of a command, and go on with its flags or belong to a group.
func isCommand(words []string) bool {
	c, rest, err := find(append(words, "")[:max(len(words), 1)])
	return err == nil && (strings.Contains(c.name, " ") || len(rest) > 0 && strings.HasPrefix(rest[0], "--"))
}

// namedOrWhole returns the command of a span. One that ends with a flag without its value names both.
func namedOrWhole(path string, words []string) shownCommand {
	_, rest, err := find(words)
	last := words[len(words)-1]
	names := err == nil && len(rest) == 0 || len(words) == 1
	return shownCommand{path, words, names || err == nil && strings.HasPrefix(last, "--") && !strings.Contains(last, "=")}
}

// commandsOfShell returns the commands of lines of a shell.
func commandsOfShell(path, lines string) (all []shownCommand) {
	lines = strings.ReplaceAll(lines, "\\\n", " ")
	for line := range strings.Lines(lines) {
		line = regexp.MustCompile(`(^|\s)#.*`).ReplaceAllString(line, "")
		for _, one := range regexp.MustCompile(`;|&&|\|\|?|[<$]\(|\)`).Split(line, -1) {
			words := fields(one)
			for len(words) > 0 && regexp.MustCompile(`^(\$|export|exec|time|sudo|go|run|\w+=.*)$`).MatchString(words[0]) {
				words = words[1:]
			}
			if len(words) > 1 && slices.Contains([]string{"outbox", "bin/outbox", "./outbox", "./cmd/outbox"}, words[0]) {
				all = append(all, shownCommand{path, words[1:], false})
			}
		}
	}
	return all
}

var inText = regexp.MustCompile(`\boutbox((?: [^\s]+)+)`)

// commandsOfText returns the commands that sentences name.
func commandsOfText(path, text string) (all []shownCommand) {
	text = strings.ReplaceAll(text, "\n  --", ".\n--") // a table of flags
	text = strings.Join(strings.Fields(text), " ")
	for {
		at := inText.FindStringSubmatchIndex(text)
		if at == nil {
			return all
		}
		words := fields(text[at[2]:min(at[3], at[2]+300)])
		if slices.Contains(firstWords(), strings.TrimRight(words[0], ".,:;)'\"")) {
			all = append(all, shownCommand{path, words, true})
		}
		text = text[at[2]:]
	}
}

// commandsOfSource returns those in texts and comments of a Go file.
func commandsOfSource(t *testing.T, path string) (all []shownCommand) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
	require.NoError(t, err)
	ast.Inspect(file, func(n ast.Node) bool {
		if text, ok := n.(*ast.BasicLit); ok && text.Kind == token.STRING {
			value, err := strconv.Unquote(text.Value)
			require.NoError(t, err)
			value = regexp.MustCompile(`(\w)%s`).ReplaceAllString(value, "$1")
			all = append(all, commandsOfText(path, regexp.MustCompile(`%(\[\d+\])?[sdqv]`).ReplaceAllString(value, "NAME"))...)
		}
		return true
	})
	for _, comment := range file.Comments {
		for line := range strings.Lines(comment.Text()) {
			if strings.HasPrefix(line, "\t") {
				all = append(all, commandsOfShell(path, line)...)
			}
		}
		all = append(all, commandsOfText(path, comment.Text())...)
	}
	return all
}

// check returns why the command line refuses the command, or "".
func (c shownCommand) check() string {
	words := c.words
	if c.inProse {
		var problem string
		if words, problem = namedWords(words); words == nil {
			return problem
		}
	}
	words = withValues(words)
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // the command ends where its work would begin
	var errs strings.Builder
	vars := map[string]string{"DATABASE_URL": "postgres://nobody@127.0.0.1:1/none", "KAFKA_BROKERS": "127.0.0.1:1", "OUTBOX_LISTEN": "127.0.0.1:0"}
	e := &env{stdin: strings.NewReader(""), stdout: io.Discard, stderr: &errs, width: usualWidth, now: time.Now,
		getenv: func(name string) string { return vars[name] }, user: func() string { return "kim" }, globals: globals{timeout: defaultTimeout}}
	if code := run(ctx, words, e); code == exitUsage {
		return strings.Join(strings.Fields(errs.String()), " ")
	}
	return ""
}

// namedWords returns the words of a sentence that are a command line, or nil if they only name a command and flags.
func namedWords(words []string) (line []string, problem string) {
	word := func() string { // the next one; the command ends with a mark of punctuation
		w := words[0]
		words = words[1:]
		if bare := strings.TrimRight(w, ".,:;)'\"…"); bare != w && bare != "" {
			words = nil
			return bare
		}
		return w
	}
	first := word()
	if first == "help" {
		return nil, ""
	}
	name := []string{first}
	c, _, err := find(name)
	if err != nil { // a group
		if len(words) == 0 {
			return nil, ""
		}
		name = append(name, word())
		if c, _, err = find(name); err != nil {
			return nil, err.Error()
		}
	}
	flags := newFlagSet()
	c.prepare(flags)
	(&globals{}).define(flags)
	line = name
	given := false
	for len(words) > 0 && strings.HasPrefix(words[0], "--") {
		w := word()
		flagName, _, hasValue := strings.Cut(strings.TrimPrefix(w, "--"), "=")
		f, err := lookup(flags, flagName)
		switch {
		case errors.Is(err, flag.ErrHelp):
			return nil, ""
		case err != nil:
			return nil, err.Error()
		}
		if !hasValue && !isSwitch(f) {
			if len(words) == 0 {
				return nil, ""
			}
			line = append(line, w, word())
			given = true
			continue
		}
		line = append(line, w)
	}
	if !given {
		return nil, ""
	}
	return line, ""
}

// withValues puts values in the place of words that only stand for one.
func withValues(words []string) []string {
	words = slices.Clone(words)
	for i, w := range words {
		if w != "…" && (strings.ToUpper(w) != w || !regexp.MustCompile(`^\p{Lu}+…?$`).MatchString(w)) {
			continue
		}
		flagName := ""
		if i > 0 {
			flagName = strings.TrimPrefix(words[i-1], "--")
		}
		switch {
		case w == "ID" || w == "ID…":
			words[i] = "event-17"
		case slices.Contains([]string{"since", "until", "to"}, flagName):
			words[i] = "2026-01-02"
		case flagName == "as":
			words[i] = "reader"
		case flagName == "reason":
			words[i] = "why"
		}
	}
	return words
}

// fields splits a line as a shell does, with both kinds of quotes.
func fields(line string) (words []string) {
	for _, w := range regexp.MustCompile(`(?:[^\s'"]|'[^']*'|"[^"]*"|['"])+`).FindAllString(line, -1) {
		words = append(words, strings.NewReplacer(`'`, "", `"`, "").Replace(w))
	}
	return words
}

// filesOf returns the files of the repository with an ending.
func filesOf(t *testing.T, ending string) (paths []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != "../.." && (strings.HasPrefix(d.Name(), ".") || slices.Contains([]string{"testdata", "bin", "node_modules"}, d.Name())):
			return fs.SkipDir
		case !d.IsDir() && strings.HasSuffix(path, ending):
			paths = append(paths, path)
		}
		return nil
	}))
	return paths
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}
