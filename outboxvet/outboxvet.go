// Package outboxvet finds mistakes in programs that use outbox, while they are vetted:
//
//   - [Transaction]: an event is recorded in another transaction than the data.
//   - [Registration]: an event is recorded whose type is not registered.
//   - [Handler]: a handler with a transaction calls HTTP or produces to Kafka.
//   - [RecordError]: the error of Record is ignored.
//   - [RetryNil]: RetryAfter, Permanent or Unavailable get an error that is nil.
//
// The command outboxvet runs all of them, alone or by go vet -vettool. The package
// is for other drivers of analyzers. An analyzer reports what the source proves, and
// is silent where it cannot decide.
package outboxvet

import (
	"go/ast"
	"go/types"
	"strings"

	"golang.org/x/tools/go/analysis"
	"golang.org/x/tools/go/analysis/passes/inspect"
	"golang.org/x/tools/go/ast/inspector"
	"golang.org/x/tools/go/types/typeutil"
)

// Analyzers returns all analyzers of the package.
func Analyzers() []*analysis.Analyzer {
	return []*analysis.Analyzer{Transaction, Registration, Handler, RecordError, RetryNil}
}

const outboxPath = "github.com/outboxgo/outbox"

// recordingFuncs has the functions that record events, by their full name.
var recordingFuncs = map[string]struct {
	tx     int // the argument that is the transaction; -1 if there is none
	events int // the first argument that is an event
}{
	"(*" + outboxPath + ".Recorder).Record":    {1, 2},
	"(*" + outboxPath + ".Recorder).Queue":     {-1, 2},
	"(*" + outboxPath + ".Recorder).Statement": {-1, 1},
	outboxPath + "/outboxsql.Record":           {1, 3},
}

// recording is a call that records events.
type recording struct {
	call   *ast.CallExpr
	name   string     // of the function
	tx     ast.Expr   // or nil
	events []ast.Expr // as they are written: one may be a slice with ...
}

// recordingOf returns what a call records, if it records events.
func recordingOf(info *types.Info, call *ast.CallExpr) (recording, bool) {
	full := callee(info, call)
	f, ok := recordingFuncs[full]
	if !ok || len(call.Args) < f.events {
		return recording{}, false
	}
	r := recording{call: call, name: full[strings.LastIndex(full, ".")+1:], events: call.Args[f.events:]}
	if f.tx >= 0 {
		r.tx = call.Args[f.tx]
	}
	return r, true
}

// callee returns the full name of the function or method that is called, such as
// (*net/http.Client).Do, or "" if the source does not say which one it is.
func callee(info *types.Info, call *ast.CallExpr) string {
	f, ok := typeutil.Callee(info, call).(*types.Func)
	if !ok {
		return ""
	}
	return f.Origin().FullName()
}

// root returns the root of the syntax of a package.
func root(pass *analysis.Pass) inspector.Cursor {
	return pass.ResultOf[inspect.Analyzer].(*inspector.Inspector).Root()
}

// variable returns the variable that an expression names, or nil.
func variable(info *types.Info, e ast.Expr) *types.Var {
	id, ok := ast.Unparen(e).(*ast.Ident)
	if !ok {
		return nil
	}
	v, _ := info.ObjectOf(id).(*types.Var)
	return v
}
