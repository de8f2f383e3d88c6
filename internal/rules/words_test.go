package rules

import (
	"fmt"
	"go/ast"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// A wordRule keeps words out of declared identifiers: words of our own invention, for
// which Go, Kafka and PostgreSQL have usual ones.
type wordRule struct {
	words   string // lower case, separated by spaces
	where   where
	instead string // what to write
}

// where says in which identifiers a rule looks for its words.
type where int

const (
	// inParts looks at each part of a camelCase name: tellSent. It is for words that no
	// name needs.
	inParts where = iota
	// inPartsButTests is inParts, except for the names of tests. Those are sentences,
	// in which these ordinary English words are right: TestStopLeavesNothing.
	inPartsButTests
	// inNames looks at whole names: act, refused. As a part of a longer name such a
	// word can be right.
	inNames
	// inFuncs looks at whole names of functions and methods: once. A field of the type
	// sync.Once may be called so, and so may the Once of an inbox: see inboxOnce.
	inFuncs
	// inTypes looks at whole names of types: Move. A function that moves something may
	// be called so.
	inTypes
	// inTableTypes looks at whole names of types, in the packages that describe tables.
	// Elsewhere a Partition is one of a topic.
	inTableTypes
)

var wordRules = []wordRule{
	{"trouble troubles ailment ailments", inParts, "outage, outages, outageLog"},
	{"fate fates", inParts, "outcome"},
	{"away", inPartsButTests, "unavailable"},
	// The end of a range may be behind it, and a consumer behind its topic.
	{"outcomebehind", inNames, "outcomeBlocked"},
	{"refused", inNames, "rejected"},
	{"undecided", inParts, "pending"},
	// deadLetter is the field's term: see fieldTerms.
	{"letter letters", inParts, "deadLetter, deadLetters"},
	{"bury buries buried", inParts, "sendToDLQ, deadLettered"},
	{"morgue till depot ward house desk", inParts, "relayFixture, consumerFixture, adminFixture"},
	{"vitals", inParts, "healthState"},
	{"tend tends", inParts, "reconcile"},
	{"judge judges judged judging", inParts, "classify, or compare in the oracle"},
	{"verdict verdicts", inParts, "retryResult, or the oracle's Result"},
	{"tell tells told complain complains", inPartsButTests, "notify for a hook, logFailure, reportOutage"},
	// leaveGroup is Kafka's term: see fieldTerms.
	{"leave leaves", inPartsButTests, "parkUnavailable, shouldParkRest, leaveGroup"},
	{"putoff", inNames, "sendAloneLater"},
	{"heir heirs crown crowned", inParts, "next_heads, promoted"},
	{"sqldied", inNames, "sqlMarkDead"},
	{"soon", inParts, "withStatementTimeout"},
	{"together", inPartsButTests, "processBatch"},
	{"once", inFuncs, "processOne"},
	{"act", inNames, "runTask, or action for one of a handler or an operator"},
	{"settle settles settled", inParts, "finishRecord"},
	{"sparing", inParts, "oncePerPartition"},
	{"standing standings", inParts, "laggingRelay"},
	{"wish wishes", inParts, "wakeRequest"},
	{"turn turns", inNames, "progress, or round in a benchmark"},
	{"partition", inTableTypes, "TablePartition"},
	{"move", inTypes, "RelayProgress"},
	{"cleaned", inTypes, "RetentionResult"},
	{"decision", inTypes, "AuditInfo"},
	{"revive revived revives", inParts, "RetryDeadAfter, retriedDead"},
	{"glance glances glancing", inParts, "probe"},
	{"rhythm", inParts, "pollSchedule"},
	{"strays", inParts, "unknownClaims, releaseUnknown"},
	{"intake", inParts, "admission"},
	{"caution cautious wary wariness", inParts, "recheck, recheckFor"},
	{"dearer", inParts, "cost"},
	{"hands", inNames, "claimedSet"},
}

// No declared identifier has a word that the project has invented.
func TestWords(t *testing.T) {
	t.Parallel()
	eachGoFile(t, func(path string, fset *token.FileSet, file *ast.File) {
		if ast.IsGenerated(file) {
			return
		}
		for _, id := range declared(file) {
			for _, rule := range wordRules {
				if word := rule.find(id, path); word != "" {
					t.Errorf("%s: %s has the word %q: write %s", fset.Position(id.Pos()), id.Name, word, rule.instead)
				}
			}
		}
	})
}

// maxCommentWidth is in columns; a tab counts as four.
const maxCommentWidth = 120

// No line of a comment is wider than maxCommentWidth. A comment behind code is not checked.
func TestCommentWidth(t *testing.T) {
	t.Parallel()
	eachGoFile(t, func(path string, fset *token.FileSet, file *ast.File) {
		source, err := os.ReadFile(path)
		require.NoError(t, err)
		lines := strings.Split(string(source), "\n")
		for _, group := range file.Comments {
			for _, comment := range group.List {
				first, last := fset.Position(comment.Pos()).Line, fset.Position(comment.End()).Line
				for n := first; n <= last; n++ {
					line := strings.ReplaceAll(lines[n-1], "\t", "    ")
					isCode := n == first && !strings.HasPrefix(strings.TrimSpace(line), comment.Text[:2])
					if width := utf8.RuneCountInString(line); !isCode && width > maxCommentWidth {
						t.Errorf("%s:%d: the comment has %d columns, at most %d are allowed", path, n, width, maxCommentWidth)
					}
				}
			}
		}
	})
}

// vagueWords are kept out of comments and documents: a sentence names who does something, or says what is not done.
var vagueWords = regexp.MustCompile(`(?i)\b(nobody|somebody|whoever)\b`)

// Comments and documents quote code, the output of programs and other texts: in a fenced block, or in a paragraph.
var (
	fencedBlock = regexp.MustCompile("(?s)```.*?```")
	quoted      = regexp.MustCompile("`[^`]*`|\"[^\"]*\"")
)

// No comment and no document has a vague word outside of quotes. Test files are not checked.
func TestVagueWords(t *testing.T) {
	t.Parallel()
	check := func(path, text string) {
		if word := vagueWords.FindString(quoted.ReplaceAllString(text, "")); word != "" {
			t.Errorf("%s has the word %q: name the role, the process or the client, or use the passive", path, word)
		}
	}
	eachGoFile(t, func(path string, fset *token.FileSet, file *ast.File) {
		if strings.HasSuffix(path, "_test.go") {
			return
		}
		for _, group := range file.Comments {
			check(fset.Position(group.Pos()).String(), group.Text())
		}
	})
	for _, path := range repository(t, ".md") {
		for i, paragraph := range strings.Split(fencedBlock.ReplaceAllString(read(t, path), ""), "\n\n") {
			check(fmt.Sprintf("%s, paragraph %d", path, i+1), paragraph)
		}
	}
}

// eachGoFile parses each Go file of all modules, and passes it to f with its path.
func eachGoFile(t *testing.T, f func(path string, fset *token.FileSet, file *ast.File)) {
	t.Helper()
	fset := token.NewFileSet()
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != "." && strings.HasPrefix(d.Name(), "."):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go"):
			return nil
		}
		file, err := parseFile(fset, path)
		if err == nil {
			f(path, fset, file)
		}
		return err
	}))
}

// A declaration is an identifier where it is declared, and what it names.
type declaration struct {
	*ast.Ident
	isFunc, isType bool
}

// declared returns what a file declares: types, functions, methods, fields, variables,
// constants, parameters, results, labels and names of imports.
func declared(file *ast.File) (all []declaration) {
	add := func(names ...*ast.Ident) {
		for _, name := range names {
			all = append(all, declaration{Ident: name})
		}
	}
	addExpr := func(exprs ...ast.Expr) {
		for _, expr := range exprs {
			if name, ok := expr.(*ast.Ident); ok {
				add(name)
			}
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			all = append(all, declaration{Ident: n.Name, isFunc: true})
		case *ast.TypeSpec:
			all = append(all, declaration{Ident: n.Name, isType: true})
		case *ast.ImportSpec:
			if n.Name != nil {
				add(n.Name)
			}
		case *ast.ValueSpec:
			add(n.Names...)
		case *ast.Field:
			_, isFunc := n.Type.(*ast.FuncType) // a method of an interface, or as good as one
			for _, name := range n.Names {
				all = append(all, declaration{Ident: name, isFunc: isFunc})
			}
		case *ast.LabeledStmt:
			add(n.Label)
		case *ast.AssignStmt:
			if n.Tok == token.DEFINE {
				addExpr(n.Lhs...)
			}
		case *ast.RangeStmt:
			if n.Tok == token.DEFINE {
				addExpr(n.Key, n.Value)
			}
		}
		return true
	})
	return all
}

// find returns the word of the rule that an identifier has, or "".
func (r wordRule) find(id declaration, path string) string {
	candidates := []string{strings.ToLower(id.Name)}
	applies := true
	switch r.where {
	case inNames: // any
	case inParts:
		candidates = wordsOf(id.Name)
	case inPartsButTests:
		candidates = wordsOf(id.Name)
		applies = !id.isFunc || !strings.HasPrefix(id.Name, "Test")
	case inFuncs:
		applies = id.isFunc && !inboxOnce(id, path)
	case inTypes:
		applies = id.isType
	case inTableTypes:
		applies = id.isType && slices.Contains([]string{".", "outboxops"}, filepath.Dir(path))
	}
	if !applies {
		return ""
	}
	for _, word := range strings.Fields(r.words) {
		if slices.Contains(candidates, word) {
			return word
		}
	}
	return ""
}

// inboxOnce reports whether an identifier is Inbox.Once, or the same for database/sql.
func inboxOnce(id declaration, path string) bool {
	return id.Name == "Once" && slices.Contains([]string{"inbox.go", "outboxsql/inbox.go"}, path)
}

// fieldTerms are terms of Kafka's with parts that are not to stand alone.
var fieldTerms = [][2]string{{"dead", "letter"}, {"dead", "letters"}, {"leave", "group"}}

// wordsOf returns the parts of a camelCase name in lower case; the terms of the field
// are one part.
func wordsOf(name string) (words []string) {
	runes := []rune(name)
	start := 0
	for i := range runes {
		last := i+1 == len(runes)
		if !last && !startsWord(runes, i+1) {
			continue
		}
		if word := strings.ToLower(strings.Trim(string(runes[start:i+1]), "_")); word != "" {
			words = append(words, word)
		}
		start = i + 1
	}
	for i := 0; i+1 < len(words); i++ {
		if slices.Contains(fieldTerms, [2]string{words[i], words[i+1]}) {
			words = slices.Replace(words, i, i+2, words[i]+" "+words[i+1])
		}
	}
	return words
}

// startsWord reports whether a part of a name begins at i: after an underscore, at a
// capital after another letter, and at the last capital of several.
func startsWord(runes []rune, i int) bool {
	switch before := runes[i-1]; {
	case before == '_':
		return true
	case !unicode.IsUpper(runes[i]):
		return false
	case !unicode.IsUpper(before):
		return true
	}
	return i+1 < len(runes) && unicode.IsLower(runes[i+1])
}

func TestWordsOf(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"tellSent": "tell sent", "sqlMarkDead": "sql mark dead", "URLOfHTTPServer": "url of http server", "next_heads": "next heads",
		"newDeadLetterTopic": "new dead letter topic", "letterOf": "letter of", "LeaveGroup": "leave group", "sendToDLQ": "send to dlq", "x": "x", "_": "",
	} {
		require.Equal(t, want, strings.Join(wordsOf(name), " "), name)
	}
	require.Contains(t, wordsOf("newDeadLetterTopic"), "dead letter")
	require.NotContains(t, wordsOf("newDeadLetterTopic"), "letter")
}
