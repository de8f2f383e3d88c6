package outboxvet

import (
	"go/ast"
	"go/token"
	"go/types"

	"golang.org/x/tools/go/analysis"
	"golang.org/x/tools/go/analysis/passes/inspect"
	"golang.org/x/tools/go/types/typeutil"
)

// Handler reports handlers with a transaction that call HTTP or produce to Kafka.
var Handler = &analysis.Analyzer{
	Name: "outboxhandler",
	Doc: `report HTTP and Kafka in handlers that have a transaction

The function of Handle and HandleBatch, and of those of outboxsql, may run more often
than its transaction commits, so what it does elsewhere may happen without the data,
and more than once. Meanwhile its transaction waits for the other server. Such effects
belong into a handler of HandleNoTx, or into an event that the transaction records.

Calls of net/http and producing calls of kgo are reported in the function itself, and
in functions and methods of its package that it calls directly.`,
	URL:      "https://pkg.go.dev/" + outboxPath + "/outboxvet#Handler",
	Requires: []*analysis.Analyzer{inspect.Analyzer},
	Run:      runHandler,
}

// handlerFuncs have a function with a transaction as their second argument.
var handlerFuncs = map[string]bool{
	outboxPath + ".Handle":                true,
	outboxPath + ".HandleBatch":           true,
	outboxPath + "/outboxsql.Handle":      true,
	outboxPath + "/outboxsql.HandleBatch": true,
}

const (
	kgoClient  = "(*github.com/twmb/franz-go/pkg/kgo.Client)."
	httpClient = "(*net/http.Client)."
)

// remoteCalls are the functions that have effects elsewhere, and how they are named.
var remoteCalls = map[string]string{
	kgoClient + "Produce":     "Produce of Kafka",
	kgoClient + "ProduceSync": "ProduceSync of Kafka",
	kgoClient + "TryProduce":  "TryProduce of Kafka",
	httpClient + "Do":         "HTTP",
	httpClient + "Get":        "HTTP",
	httpClient + "Head":       "HTTP",
	httpClient + "Post":       "HTTP",
	httpClient + "PostForm":   "HTTP",
	"net/http.Get":            "HTTP",
	"net/http.Head":           "HTTP",
	"net/http.Post":           "HTTP",
	"net/http.PostForm":       "HTTP",
}

// handlers looks for remote calls in the handlers of a package.
type handlers struct {
	pass     *analysis.Pass
	bodies   map[*types.Func]*ast.BlockStmt
	reported map[token.Pos]bool
}

func runHandler(pass *analysis.Pass) (any, error) {
	h := handlers{pass, map[*types.Func]*ast.BlockStmt{}, map[token.Pos]bool{}}
	for c := range root(pass).Preorder((*ast.FuncDecl)(nil)) {
		n := c.Node().(*ast.FuncDecl)
		if f, ok := pass.TypesInfo.Defs[n.Name].(*types.Func); ok && n.Body != nil {
			h.bodies[f] = n.Body
		}
	}
	for c := range root(pass).Preorder((*ast.CallExpr)(nil)) {
		call := c.Node().(*ast.CallExpr)
		if handlerFuncs[callee(pass.TypesInfo, call)] && len(call.Args) == 2 {
			h.check(h.body(call.Args[1]), true)
		}
	}
	return nil, nil
}

// body returns the body of a function literal, or of a function or method of the
// package by its name, or nil.
func (h *handlers) body(e ast.Expr) *ast.BlockStmt {
	switch e := ast.Unparen(e).(type) {
	case *ast.FuncLit:
		return e.Body
	case *ast.IndexExpr:
		return h.body(e.X)
	case *ast.SelectorExpr:
		return h.body(e.Sel)
	case *ast.Ident:
		if f, ok := h.pass.TypesInfo.Uses[e].(*types.Func); ok {
			return h.bodies[f.Origin()]
		}
	}
	return nil
}

// check reports remote calls in a body and, if deep, in the functions that it calls.
func (h *handlers) check(body *ast.BlockStmt, deep bool) {
	if body == nil {
		return
	}
	ast.Inspect(body, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		f, ok := typeutil.Callee(h.pass.TypesInfo, call).(*types.Func)
		if !ok {
			return true
		}
		if what := remoteCalls[f.FullName()]; what != "" && !h.reported[call.Pos()] {
			h.reported[call.Pos()] = true
			h.pass.ReportRangef(call, "%s in a handler with a transaction, which may run again: use HandleNoTx, or record an event", what)
		}
		if deep {
			h.check(h.bodies[f.Origin()], false)
		}
		return true
	})
}
