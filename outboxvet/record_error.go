package outboxvet

import (
	"go/ast"

	"golang.org/x/tools/go/analysis"
	"golang.org/x/tools/go/analysis/passes/inspect"
	"golang.org/x/tools/go/ast/inspector"
)

// RecordError reports calls that record events and whose error is ignored.
var RecordError = &analysis.Analyzer{
	Name: "outboxerror",
	Doc: `report ignored errors of Record

An event that Record rejects is not stored, and the transaction stays usable: it
commits the data without the event. So the error of Record, and of Queue, Statement
and outboxsql.Record, must end the transaction. A call is reported whose results are
not used, or whose error is assigned to _.`,
	URL:      "https://pkg.go.dev/" + outboxPath + "/outboxvet#RecordError",
	Requires: []*analysis.Analyzer{inspect.Analyzer},
	Run: func(pass *analysis.Pass) (any, error) {
		for c := range root(pass).Preorder((*ast.CallExpr)(nil)) {
			call := c.Node().(*ast.CallExpr)
			if r, ok := recordingOf(pass.TypesInfo, call); ok && ignoresError(c) {
				pass.ReportRangef(call, "the error of %s is ignored: the transaction would commit without the event", r.name)
			}
		}
		return nil, nil
	},
}

// ignoresError reports whether nothing gets the last result of a call.
func ignoresError(c inspector.Cursor) bool {
	parent := c.Parent()
	for ; isParen(parent.Node()); parent = parent.Parent() {
		c = parent
	}
	switch n := parent.Node().(type) {
	case *ast.ExprStmt, *ast.GoStmt, *ast.DeferStmt:
		return true
	case *ast.AssignStmt:
		return isBlank(target(n.Lhs, n.Rhs, c.Node()))
	case *ast.ValueSpec:
		names := make([]ast.Expr, len(n.Names))
		for i, name := range n.Names {
			names[i] = name
		}
		return isBlank(target(names, n.Values, c.Node()))
	}
	return false
}

func isParen(n ast.Node) bool {
	_, ok := n.(*ast.ParenExpr)
	return ok
}

func isBlank(e ast.Expr) bool {
	id, ok := e.(*ast.Ident)
	return ok && id.Name == "_"
}

// target returns what an assignment gives the last result of a call to.
func target(left, right []ast.Expr, call ast.Node) ast.Expr {
	if len(right) == 1 {
		return left[len(left)-1]
	}
	for i, e := range right {
		if e == call {
			return left[i]
		}
	}
	return nil
}
