package outbox_test

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// A room is a group of files of the root package that are about one thing. Files
// of a room may use each other, and files of the rooms that it names.
type room struct {
	name    string
	files   string   // patterns of [path.Match], separated by spaces; the first room that matches has the file
	uses    string   // names of rooms, separated by spaces
	forbids []string // import paths, by their beginnings
}

const (
	noPgx    = "github.com/jackc/pgx"
	noFranz  = "github.com/twmb/franz-go"
	noLogs   = "log/slog"
	noSystem = "os"
)

// rooms stand in the order in which they may use each other: a room uses only rooms
// above it, so there is no circle between rooms.
var rooms = []room{
	{"errors", "errors.go status.go", "", []string{noPgx, noFranz, noLogs, noSystem}},
	{"event", "envelope*.go codec.go resolver.go", "errors", []string{noPgx, noFranz, noLogs, noSystem}},
	{"breaker", "breaker.go", "errors", []string{noPgx, noFranz, noLogs, noSystem}},
	{"cursor", "lease.go cursor*.go failed*.go", "errors event", []string{noFranz, noLogs}},
	{"retention", "retention*.go", "errors event cursor", []string{noFranz, noLogs, noSystem}},
	{"hooks", "hooks.go", "errors event breaker retention", []string{noPgx, noFranz, noLogs, noSystem}},
	{"recorder", "outbox*.go", "errors event retention hooks", []string{noLogs, noSystem}},
	{"migrate", "migrate.go", "errors retention", []string{noFranz, noSystem}},
	{"alerts", "alert.go", "errors hooks", []string{noPgx, noFranz, noSystem}},
	{"waker", "waker.go", "errors", []string{noFranz, noSystem}},
	{"relay", "relay*.go health.go monitor.go", "errors event breaker cursor retention hooks alerts waker", []string{noSystem}},
	{"handlers", "handler*.go idempotency.go", "errors event breaker hooks", []string{noFranz, noSystem}},
	{"worker", "worker*.go", "errors event cursor hooks alerts handlers retention relay waker", []string{noFranz, noSystem}},
	{"consumer", "consumer*.go", "errors event cursor hooks alerts handlers relay worker", []string{noSystem}},
}

func roomOf(t *testing.T, file string) int {
	t.Helper()
	for i, r := range rooms {
		for _, pattern := range strings.Fields(r.files) {
			if ok, err := path.Match(pattern, file); ok {
				require.NoError(t, err)
				return i
			}
		}
	}
	require.Fail(t, "a file without a room", "%s: say in rooms what it belongs to", file)
	return -1
}

// A file uses its own room and the rooms that this one names, by what the type
// checker sees: functions, types, methods and fields.
func TestRooms(t *testing.T) {
	t.Parallel()
	for i, r := range rooms {
		for _, used := range strings.Fields(r.uses) {
			require.True(t, slices.ContainsFunc(rooms[:i], func(above room) bool { return strings.Contains(above.name, used) }), "%s uses %s, which does not stand above it", r.name, used)
		}
	}
	uses := typeCheck(t).uses
	for _, from := range slices.Sorted(maps.Keys(uses)) {
		mine := roomOf(t, from)
		for _, to := range slices.Sorted(maps.Keys(uses[from])) {
			other := roomOf(t, to)
			if mine != other && !slices.Contains(strings.Fields(rooms[mine].uses), rooms[other].name) {
				t.Errorf("%s uses %v of %s: room %s may not use room %s", from, slices.Sorted(maps.Keys(uses[from][to])), to, rooms[mine].name, rooms[other].name)
			}
		}
	}
}

// Files that use each other in a circle can only be read together.
func TestCircles(t *testing.T) {
	t.Parallel()
	const most = 13
	largest := 0
	for _, circle := range circles(typeCheck(t).uses) {
		largest = max(largest, len(circle))
		for _, file := range circle {
			require.Equal(t, rooms[roomOf(t, circle[0])].name, rooms[roomOf(t, file)].name, "a circle through several rooms: %v", circle)
		}
	}
	t.Logf("the largest circle has %d files", largest)
	require.LessOrEqual(t, largest, most)
}

// Pure rooms import neither pgx nor franz-go, and only the engines write logs.
func TestRoomImports(t *testing.T) {
	t.Parallel()
	for name, file := range sources(t, ".") {
		r := rooms[roomOf(t, name)]
		for _, spec := range file.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			require.NoError(t, err)
			for _, forbidden := range r.forbids {
				require.False(t, imported == forbidden || strings.HasPrefix(imported, forbidden+"/"), "%s imports %s", name, imported)
			}
		}
	}
}

// The root package stays one that can be looked over.
func TestSize(t *testing.T) {
	t.Parallel()
	const mostFiles, mostTypes = 68, 58
	require.LessOrEqual(t, len(sources(t, ".")), mostFiles, "files that are not tests")
	scope, exported := typeCheck(t).pkg.Scope(), 0
	for _, name := range scope.Names() {
		if _, ok := scope.Lookup(name).(*types.TypeName); ok && token.IsExported(name) {
			exported++
		}
	}
	t.Logf("the root package exports %d types", exported)
	require.LessOrEqual(t, exported, mostTypes, "exported types")
}

// checked is a package as the type checker sees it.
type checked struct {
	pkg  *types.Package
	uses map[string]map[string]map[string]bool // file → file → names
}

var checkOnce = sync.OnceValues(func() (checked, error) { return checkPackage(".") })

// checkPackage checks the package in a folder.
func checkPackage(dir string) (checked, error) {
	// The export data of dependencies is in the build cache.
	cmd := exec.Command("go", "list", "-export", "-deps", "-json=ImportPath,Export,GoFiles,Name", "./"+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return checked{}, err
	}
	exports, last := map[string]string{}, struct {
		ImportPath, Export, Name string
		GoFiles                  []string
	}{}
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; exports[last.ImportPath] = last.Export {
		if err := decoder.Decode(&last); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return checked{}, err
		}
	}
	fset := token.NewFileSet()
	var files []*ast.File
	for _, name := range last.GoFiles { // dependencies come first
		file, err := parseFile(fset, filepath.Join(dir, name))
		if err != nil {
			return checked{}, err
		}
		files = append(files, file)
	}
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}}
	config := types.Config{Importer: importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })}
	pkg, err := config.Check(last.ImportPath, fset, files, info)
	if err != nil {
		return checked{}, err
	}
	c := checked{pkg: pkg, uses: map[string]map[string]map[string]bool{}}
	for ident, object := range info.Uses {
		if object.Pkg() == pkg && isShared(object) {
			c.add(filepath.Base(fset.Position(ident.Pos()).Filename), filepath.Base(fset.Position(object.Pos()).Filename), object.Name())
		}
	}
	return c, nil
}

func typeCheck(t *testing.T) checked {
	t.Helper()
	c, err := checkOnce()
	require.NoError(t, err)
	return c
}

// isShared reports whether another file can use an object: a declaration of the
// package, a method or a field.
func isShared(object types.Object) bool {
	switch o := object.(type) {
	case *types.Var:
		return o.IsField() || o.Parent() == o.Pkg().Scope()
	case *types.Func:
		return o.Signature().Recv() != nil || o.Parent() == o.Pkg().Scope()
	}
	return object.Parent() == object.Pkg().Scope()
}

func (c checked) add(from, to, name string) {
	if from == to {
		return
	}
	if c.uses[from] == nil {
		c.uses[from] = map[string]map[string]bool{}
	}
	if c.uses[from][to] == nil {
		c.uses[from][to] = map[string]bool{}
	}
	c.uses[from][to][name] = true
}

// circles returns the groups of files of which each reaches every other one.
func circles(uses map[string]map[string]map[string]bool) (found [][]string) {
	reach := map[string]map[string]bool{}
	for from := range uses {
		reach[from] = map[string]bool{}
		for todo := []string{from}; len(todo) > 0; {
			next := todo[0]
			todo = todo[1:]
			for to := range uses[next] {
				if !reach[from][to] {
					reach[from][to] = true
					todo = append(todo, to)
				}
			}
		}
	}
	done := map[string]bool{}
	for _, from := range slices.Sorted(maps.Keys(reach)) {
		if !reach[from][from] || done[from] {
			continue
		}
		var circle []string
		for _, to := range slices.Sorted(maps.Keys(reach[from])) {
			if reach[to][from] {
				circle, done[to] = append(circle, to), true
			}
		}
		found = append(found, circle)
	}
	return found
}
