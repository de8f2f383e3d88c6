package rules

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"go/ast"
	"go/constant"
	"go/doc"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// engines are the packages that the root composes. Only the root, and they themselves, use them.
var engines = []string{"breaker", "consumer", "cursor", "delivery", "handling", "lease", "record", "relay", "retention", "worker"}

// The API is in the root: no package under internal/ imports it, and no other package of users imports an engine.
func TestInternalImports(t *testing.T) {
	t.Parallel()
	const root = "github.com/outboxgo/outbox"
	for _, dir := range packageDirs(t) {
		inside := strings.HasPrefix(dir, "internal")
		for name, file := range sources(t, dir) {
			for _, spec := range file.Imports {
				path := strings.Trim(spec.Path.Value, `"`)
				engine, internal := strings.CutPrefix(path, root+"/internal/")
				switch {
				case inside:
					require.NotEqual(t, root, path, "%s/%s imports the root", dir, name)
				case internal && dir != ".":
					require.NotContains(t, engines, engine, "%s/%s imports an engine", dir, name)
				}
			}
		}
	}
}

// Every package says what it is, and every exported name what it means.
func TestPackageDocs(t *testing.T) {
	t.Parallel()
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
		if s, ok := typ.Decl.Specs[0].(*ast.TypeSpec).Type.(*ast.StructType); ok && strings.HasPrefix(p.Name, "outbox") {
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

// A program that imports outbox links all its dependencies. Anything heavier has a module of its
// own: the OpenTelemetry API alone was 8 modules and 27 packages. The command is in this module
// because it links nothing else.
func TestDeps(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("go", "list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", ".", "./cmd/outbox", "./outboxadmin", "./outboxalert", "./outboxarchive", "./outboxdlq", "./outboxhttp", "./outboxops", "./outboxreplay", "./outboxsql", "./outboxtopics").Output()
	require.NoError(t, err)
	require.NotEmpty(t, out)
	for _, module := range strings.Fields(string(out)) {
		require.Contains(t, allowedModules, module)
	}
}

// Every statement is one that PostgreSQL understands.
func TestQueries(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(context.Background(), db, outbox.MigrateConfig{Schema: schema}))
	conn, err := db.Acquire(context.Background())
	require.NoError(t, err)
	defer conn.Release()
	queries := sqlConsts(t)
	require.GreaterOrEqual(t, len(queries), 50)
	for name, query := range queries {
		_, err := conn.Conn().Prepare(context.Background(), name, pg.InSchema(query, schema))
		require.NoError(t, err, name)
	}
}

// sqlConsts returns the constants whose names begin with sql, or with SQL where other
// packages use them, by package and name.
func sqlConsts(t *testing.T) map[string]string {
	t.Helper()
	queries := map[string]string{}
	for _, dir := range []string{".", "internal/record", "internal/lease", "internal/cursor", "internal/retention", "internal/starts", "internal/tables", "internal/watch", "internal/relay", "internal/handling", "internal/delivery", "internal/worker", "internal/consumer", "internal/pauses", "internal/verify", "outboxops"} {
		pkg, err := checkPackage(dir)
		require.NoError(t, err)
		for _, name := range pkg.Scope().Names() {
			if c, ok := pkg.Scope().Lookup(name).(*types.Const); ok && regexp.MustCompile(`^(sql|SQL|Sql)[A-Z]`).MatchString(name) {
				queries[dir+" "+name] = constant.StringVal(c.Val())
			}
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
		file, err := parseFile(token.NewFileSet(), name)
		require.NoError(t, err)
		files[filepath.Base(name)] = file
	}
	return files
}

func parseFile(fset *token.FileSet, name string) (*ast.File, error) {
	return parser.ParseFile(fset, name, nil, parser.ParseComments)
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

// The root package has the API and its composition; engines are packages under internal/.
func TestSize(t *testing.T) {
	t.Parallel()
	const mostFiles = 25
	files := sources(t, ".")
	require.LessOrEqual(t, len(files), mostFiles, "files that are not tests")
	const mostLines = 6000
	lines := 0
	for name := range files {
		lines += strings.Count(read(t, name), "\n")
	}
	t.Logf("the root package has %d files and %d lines without tests", len(files), lines)
	require.LessOrEqual(t, lines, mostLines, "lines that are not tests")
}

// checkPackage type-checks the package in a folder.
func checkPackage(dir string) (*types.Package, error) {
	all, err := listPackages("./" + dir)
	if err != nil {
		return nil, err
	}
	pkg, _, err := all.check(dir, &types.Info{})
	return pkg, err
}

// listed are packages and their dependencies by path. Their export data is in the build cache.
type listed map[string]listedPackage

type listedPackage struct {
	ImportPath, Export string
	GoFiles            []string
}

func listPackages(pattern string) (listed, error) {
	cmd := exec.Command("go", "list", "-export", "-deps", "-json=ImportPath,Export,GoFiles", pattern)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	all := listed{}
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var one listedPackage
		if err := decoder.Decode(&one); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		all[one.ImportPath] = one
	}
}

// check type-checks the package in a folder of this module, and returns its files.
func (l listed) check(dir string, info *types.Info) (*types.Package, []*ast.File, error) {
	fset := token.NewFileSet()
	var files []*ast.File
	importPath := path.Join("github.com/outboxgo/outbox", filepath.ToSlash(dir))
	for _, name := range l[importPath].GoFiles {
		file, err := parseFile(fset, filepath.Join(dir, name))
		if err != nil {
			return nil, nil, err
		}
		files = append(files, file)
	}
	config := types.Config{Importer: importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(l[path].Export) })}
	pkg, err := config.Check(importPath, fset, files, info)
	return pkg, files, err
}
