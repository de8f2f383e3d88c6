package outbox_test

import (
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"io/fs"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// The rules of the house, as ARCHITECTURE.md tells them.

// kind says what a file of the root package may know.
type kind int

const (
	pure         kind = iota // neither the database nor the broker
	sql                      // the database; starts no goroutine, writes no log
	orchestrator             // all of it
)

var rooms = map[string]kind{
	"breaker.go":             pure,
	"codec.go":               pure,
	"codec_text.go":          pure,
	"envelope.go":            pure,
	"envelope_read.go":       pure,
	"alert.go":               orchestrator,
	"errors.go":              pure,
	"health.go":              pure,
	"hooks.go":               pure,
	"resolver.go":            pure,
	"retention.go":           sql,
	"retention_parts.go":     sql,
	"retention_walk.go":      pure,
	"config.go":              sql,
	"consumer.go":            orchestrator,
	"consumer_deadletter.go": orchestrator,
	"consumer_decode.go":     orchestrator,
	"consumer_foreign.go":    orchestrator,
	"consumer_group.go":      orchestrator,
	"consumer_handle.go":     orchestrator,
	"consumer_handler.go":    sql,
	"consumer_lag.go":        orchestrator,
	"consumer_offsets.go":    orchestrator,
	"consumer_partition.go":  orchestrator,
	"kafka_opts.go":          orchestrator,
	"consumer_routes.go":     pure,
	"idempotency.go":         sql,
	"cursor.go":              sql,
	"cursor_rebase.go":       sql,
	"cursor_window.go":       sql,
	"failed.go":              sql,
	"failed_actions.go":      sql,
	"failed_events.go":       sql,
	"inspect.go":             sql,
	"inspect_events.go":      sql,
	"inspect_partitions.go":  sql,
	"lease.go":               sql,
	"migrate.go":             sql,
	"monitor.go":             orchestrator,
	"outbox.go":              sql,
	"outbox_record.go":       orchestrator,
	"outbox_rows.go":         sql,
	"deadletter.go":          orchestrator,
	"deadletter_read.go":     orchestrator,
	"deadletter_replay.go":   orchestrator,
	"topics.go":              orchestrator,
	"topics_admin.go":        orchestrator,
	"relay.go":               orchestrator,
	"relay_acks.go":          orchestrator,
	"relay_delivery.go":      orchestrator,
	"relay_leaders.go":       orchestrator,
	"relay_limits.go":        orchestrator,
	"relay_parking.go":       orchestrator,
	"relay_parts.go":         orchestrator,
	"relay_retention.go":     orchestrator,
	"relay_retry.go":         orchestrator,
	"relay_send.go":          orchestrator,
	"relay_session.go":       orchestrator,
	"relay_trouble.go":       orchestrator,
	"relay_watch.go":         orchestrator,
}

var forbiddenImports = map[kind][]string{
	pure: {"github.com/jackc/pgx", "github.com/twmb/franz-go", "log/slog", "os"},
	sql:  {"github.com/twmb/franz-go", "log/slog"},
}

func TestFileImports(t *testing.T) {
	files := sources(t, ".")
	for name := range rooms {
		require.Contains(t, files, name, "a room without a file")
	}
	for name, file := range files {
		kind, ok := rooms[name]
		require.True(t, ok, "%s: say in rooms what this file may know", name)
		for _, spec := range file.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			require.NoError(t, err)
			for _, forbidden := range forbiddenImports[kind] {
				require.False(t, strings.HasPrefix(path, forbidden), "%s imports %s", name, path)
			}
		}
		if kind != orchestrator {
			ast.Inspect(file, func(n ast.Node) bool {
				_, starts := n.(*ast.GoStmt)
				require.False(t, starts, "%s starts a goroutine", name)
				return true
			})
		}
	}
}

// internal serves the packages around it and knows none of them.
func TestInternalImports(t *testing.T) {
	for _, dir := range packageDirs(t) {
		if !strings.HasPrefix(dir, "internal") {
			continue
		}
		for name, file := range sources(t, dir) {
			for _, spec := range file.Imports {
				require.NotEqual(t, `"github.com/outboxgo/outbox"`, spec.Path.Value, "%s/%s imports the root", dir, name)
			}
		}
	}
}

// Every package says what it is, and every exported name what it means.
func TestPackageDocs(t *testing.T) {
	for _, dir := range packageDirs(t) {
		fset := token.NewFileSet()
		var files []*ast.File
		for name := range sources(t, dir) {
			file, err := parser.ParseFile(fset, filepath.Join(dir, name), nil, parser.ParseComments)
			require.NoError(t, err)
			files = append(files, file)
		}
		p, err := doc.NewFromFiles(fset, files, "github.com/outboxgo/outbox/"+dir)
		require.NoError(t, err)
		require.NotEmpty(t, p.Doc, "package %s has no doc", dir)
		for _, name := range undocumented(p) {
			t.Errorf("%s: %s has no doc comment", dir, name)
		}
	}
}

// undocumented returns the exported names without a comment, fields included.
func undocumented(p *doc.Package) (names []string) {
	values := func(all []*doc.Value) {
		for _, v := range all {
			if v.Doc != "" {
				continue
			}
			for _, spec := range v.Decl.Specs {
				if spec := spec.(*ast.ValueSpec); spec.Doc == nil && spec.Comment == nil {
					names = append(names, spec.Names[0].Name)
				}
			}
		}
	}
	funcs := func(of string, all []*doc.Func) {
		for _, f := range all {
			if f.Doc == "" {
				names = append(names, of+f.Name)
			}
		}
	}
	values(p.Consts)
	values(p.Vars)
	funcs("", p.Funcs)
	for _, typ := range p.Types {
		if typ.Doc == "" {
			names = append(names, typ.Name)
		}
		values(typ.Consts)
		values(typ.Vars)
		funcs("", typ.Funcs)
		funcs(typ.Name+".", typ.Methods)
		if s, ok := typ.Decl.Specs[0].(*ast.TypeSpec).Type.(*ast.StructType); ok && p.Name == "outbox" {
			for _, field := range s.Fields.List {
				if field.Doc == nil && len(field.Names) > 0 {
					names = append(names, typ.Name+"."+field.Names[0].Name)
				}
			}
		}
	}
	return slices.DeleteFunc(names, func(name string) bool { return !ast.IsExported(name) })
}

// allowedModules are what a program that imports outbox links, and why.
var allowedModules = map[string]string{
	"github.com/outboxgo/outbox":        "us",
	"github.com/jackc/pgx/v5":           "the transactions are its users'",
	"github.com/jackc/pgpassfile":       "pgx",
	"github.com/jackc/pgservicefile":    "pgx",
	"github.com/jackc/puddle/v2":        "pgx's pool",
	"golang.org/x/sync":                 "pgx's pool",
	"golang.org/x/text":                 "pgx: SCRAM",
	"github.com/twmb/franz-go":          "Kafka",
	"github.com/twmb/franz-go/pkg/kmsg": "franz-go",
	"github.com/klauspost/compress":     "franz-go",
	"github.com/pierrec/lz4/v4":         "franz-go",
	"github.com/google/uuid":            "event ids",
	"github.com/sony/gobreaker/v2":      "the state of the circuit breaker",
}

// Whoever imports outbox pays for what it links. Anything heavier has a module
// of its own: the OpenTelemetry API alone was 8 modules and 27 packages. The command
// is in this module because it links nothing else.
func TestDeps(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", ".", "./cmd/outbox", "./outboxadmin", "./outboxhttp").Output()
	require.NoError(t, err)
	require.NotEmpty(t, out)
	for _, module := range strings.Fields(string(out)) {
		require.Contains(t, allowedModules, module)
	}
}

// Every statement is one that PostgreSQL understands.
func TestQueries(t *testing.T) {
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema}))
	conn, err := db.Acquire(background)
	require.NoError(t, err)
	defer conn.Release()
	queries := sqlConsts(t)
	require.GreaterOrEqual(t, len(queries), 14)
	for name, query := range queries {
		query = strings.ReplaceAll(query, "{schema}", pgx.Identifier{schema}.Sanitize())
		_, err := conn.Conn().Prepare(background, name, query)
		require.NoError(t, err, name)
	}
}

// sqlConsts returns the constants of the root package whose names begin with sql.
func sqlConsts(t *testing.T) map[string]string {
	t.Helper()
	values := map[string]ast.Expr{}
	for _, file := range sources(t, ".") {
		ast.Inspect(file, func(n ast.Node) bool {
			if decl, ok := n.(*ast.GenDecl); ok && decl.Tok == token.CONST {
				for _, spec := range decl.Specs {
					if spec := spec.(*ast.ValueSpec); len(spec.Values) == 1 {
						values[spec.Names[0].Name] = spec.Values[0]
					}
				}
			}
			return true
		})
	}
	var text func(ast.Expr) string
	text = func(e ast.Expr) string {
		switch e := e.(type) {
		case *ast.BasicLit:
			s, err := strconv.Unquote(e.Value)
			require.NoError(t, err)
			return s
		case *ast.Ident:
			return text(values[e.Name])
		case *ast.BinaryExpr:
			return text(e.X) + text(e.Y)
		}
		t.Fatalf("constant of an unexpected form: %T", e)
		return ""
	}
	queries := map[string]string{}
	for name, value := range values {
		if regexp.MustCompile(`^sql[A-Z]`).MatchString(name) {
			queries[name] = text(value)
		}
	}
	return queries
}

// sources parses the files of a package that are not tests, by name.
func sources(t *testing.T, dir string) map[string]*ast.File {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	require.NoError(t, err)
	files := map[string]*ast.File{}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		require.NoError(t, err)
		files[filepath.Base(name)] = file
	}
	return files
}

// packageDirs returns the folders of the packages of this module.
func packageDirs(t *testing.T) (dirs []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		nested, err := filepath.Glob(filepath.Join(path, "go.mod"))
		if err != nil {
			return err
		}
		if path != "." && (len(nested) > 0 || strings.HasPrefix(d.Name(), ".")) {
			return fs.SkipDir
		}
		if len(sources(t, path)) > 0 {
			dirs = append(dirs, path)
		}
		return nil
	}))
	return dirs
}
