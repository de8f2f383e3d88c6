package outboxvet

import (
	"go/ast"
	"go/token"
	"go/types"

	"golang.org/x/tools/go/analysis"
	"golang.org/x/tools/go/analysis/passes/inspect"
	"golang.org/x/tools/go/ast/edge"
	"golang.org/x/tools/go/ast/inspector"
	"golang.org/x/tools/go/types/typeutil"
)

// RetryNil reports marks of errors that are nil.
var RetryNil = &analysis.Analyzer{
	Name: "outboxretry",
	Doc: `report RetryAfter, Permanent and Unavailable of an error that is nil

All three return nil for nil, so the handler has succeeded and the event counts as
handled: it is not tried again. A call is reported whose error is the constant nil,
or a variable that the conditions around or in front of the call say is nil. Tests are
not checked.`,
	URL:      "https://pkg.go.dev/" + outboxPath + "/outboxvet#RetryNil",
	Requires: []*analysis.Analyzer{inspect.Analyzer},
	Run: func(pass *analysis.Pass) (any, error) {
		for c := range root(pass).Preorder((*ast.CallExpr)(nil)) {
			call := c.Node().(*ast.CallExpr)
			if !marks[callee(pass.TypesInfo, call)] || isTest(pass, call.Pos()) {
				continue
			}
			name := typeutil.Callee(pass.TypesInfo, call).Name()
			if isNil(pass.TypesInfo, call.Args[0]) {
				pass.ReportRangef(call, "%s(nil) is nil: the event counts as handled", name)
			} else if v := variable(pass.TypesInfo, call.Args[0]); v != nil && isNilAt(pass.TypesInfo, c, v) {
				pass.ReportRangef(call, "%s is nil here, and so is %s of it: the event counts as handled", v.Name(), name)
			}
		}
		return nil, nil
	},
}

// marks are the functions that mark an error of a handler.
var marks = map[string]bool{outboxPath + ".RetryAfter": true, outboxPath + ".Permanent": true, outboxPath + ".Unavailable": true}

func isNil(info *types.Info, e ast.Expr) bool { return info.Types[e].IsNil() }

// isNilAt reports whether conditions around the node, or in front of it, say that a
// local variable is nil there. An assignment anywhere between is a doubt.
func isNilAt(info *types.Info, c inspector.Cursor, v *types.Var) bool {
	if v.Parent() == nil || v.Pkg() == nil || v.Parent() == v.Pkg().Scope() {
		return false
	}
	for ; ; c = c.Parent() {
		kind, index := c.ParentEdge()
		switch parent := c.Parent().Node().(type) {
		case nil, *ast.FuncLit, *ast.FuncDecl, *ast.File:
			return false
		case *ast.IfStmt:
			if isNilInBranch(info, parent, kind, v) {
				return true
			}
		case *ast.BlockStmt:
			if isNilAfter(info, parent.List, index, v) {
				return true
			}
		case *ast.CaseClause:
			if kind != edge.CaseClause_Body {
				continue
			}
			if isNilAfter(info, parent.Body, index, v) || isNilInCase(info, c.Parent(), v) {
				return true
			}
		}
	}
}

// isNilInBranch looks at the branch of an if statement in which the node is.
func isNilInBranch(info *types.Info, n *ast.IfStmt, branch edge.Kind, v *types.Var) bool {
	switch branch {
	case edge.IfStmt_Body:
		return compares(info, n.Cond, v, token.EQL, token.LAND) && !assigns(info, n.Cond, v) && !assigns(info, n.Body, v)
	case edge.IfStmt_Else:
		return compares(info, n.Cond, v, token.NEQ, token.LOR) && !assigns(info, n.Cond, v) && !assigns(info, n.Else, v)
	default: // the condition, or what runs in front of it
		return false
	}
}

// isNilInCase looks at the only expression of a case of a switch without a tag.
func isNilInCase(info *types.Info, c inspector.Cursor, v *types.Var) bool {
	clause := c.Node().(*ast.CaseClause)
	n, ok := c.Parent().Parent().Node().(*ast.SwitchStmt)
	return ok && n.Tag == nil && len(clause.List) == 1 &&
		compares(info, clause.List[0], v, token.EQL, token.LAND) && !assigns(info, clause, v)
}

// isNilAfter looks for an if statement that ends the function if v is not nil, in
// front of the statement with the index.
func isNilAfter(info *types.Info, list []ast.Stmt, index int, v *types.Var) bool {
	for i := index; i >= 0; i-- {
		if n, ok := list[i].(*ast.IfStmt); ok && i < index && n.Else == nil && ends(info, n.Body) &&
			compares(info, n.Cond, v, token.NEQ, token.LOR) {
			return !assigns(info, n.Cond, v)
		}
		if assigns(info, list[i], v) {
			return false
		}
	}
	return false
}

// ends reports whether the statement behind a block is not reached from the block.
func ends(info *types.Info, b *ast.BlockStmt) bool {
	if len(b.List) == 0 {
		return false
	}
	switch n := b.List[len(b.List)-1].(type) {
	case *ast.ReturnStmt:
		return true
	case *ast.BranchStmt:
		return n.Tok == token.BREAK || n.Tok == token.CONTINUE
	case *ast.ExprStmt:
		call, ok := n.X.(*ast.CallExpr)
		if !ok {
			return false
		}
		b, ok := typeutil.Callee(info, call).(*types.Builtin)
		return ok && b.Name() == "panic"
	}
	return false
}

// compares reports whether a condition is v op nil, or joins that to others by join.
func compares(info *types.Info, cond ast.Expr, v *types.Var, op, join token.Token) bool {
	n, ok := ast.Unparen(cond).(*ast.BinaryExpr)
	switch {
	case !ok:
		return false
	case n.Op == join:
		return compares(info, n.X, v, op, join) || compares(info, n.Y, v, op, join)
	case n.Op == op:
		return variable(info, n.X) == v && isNil(info, n.Y) || variable(info, n.Y) == v && isNil(info, n.X)
	}
	return false
}

// assigns reports whether a node assigns to v, or takes its address.
func assigns(info *types.Info, in ast.Node, v *types.Var) (found bool) {
	ast.Inspect(in, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.AssignStmt:
			for _, e := range n.Lhs {
				found = found || variable(info, e) == v
			}
		case *ast.RangeStmt:
			found = found || n.Key != nil && variable(info, n.Key) == v || n.Value != nil && variable(info, n.Value) == v
		case *ast.UnaryExpr:
			found = found || n.Op == token.AND && variable(info, n.X) == v
		}
		return !found
	})
	return found
}
