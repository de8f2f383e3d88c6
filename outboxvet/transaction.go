package outboxvet

import (
	"go/ast"
	"go/constant"
	"go/token"
	"go/types"
	"regexp"
	"strings"

	"golang.org/x/tools/go/analysis"
	"golang.org/x/tools/go/analysis/passes/inspect"
)

// Transaction reports events that are recorded in another transaction than the data.
var Transaction = &analysis.Analyzer{
	Name: "outboxtx",
	Doc: `report events that are recorded in another transaction than the data

An event exists if and only if the transaction that recorded it committed. So it has
to be the transaction that writes the data. Two mistakes are reported, where both are
in one function, or in one function literal that gets a transaction:

 - Record gets a transaction that nothing else is done with, and another one writes.
 - Record gets the transaction of the function, and a pool or a sql.DB writes.

A write is Exec or Query with a constant statement that begins with INSERT, UPDATE,
DELETE or MERGE, or CopyFrom. Two parameters of a function may be one transaction, and
a savepoint is part of its transaction: neither is reported.`,
	URL:      "https://pkg.go.dev/" + outboxPath + "/outboxvet#Transaction",
	Requires: []*analysis.Analyzer{inspect.Analyzer},
	Run: func(pass *analysis.Pass) (any, error) {
		for c := range root(pass).Preorder((*ast.FuncDecl)(nil)) {
			if n := c.Node().(*ast.FuncDecl); n.Body != nil {
				t := transactions{info: pass.TypesInfo, begun: map[*types.Var]token.Pos{}, given: map[*types.Var]ast.Node{}, same: map[*types.Var]*types.Var{}, doubt: map[*types.Var]bool{}}
				t.declare(n)
				ast.Inspect(n, t.relate)
				for _, f := range t.scopes {
					t.report(pass, t.usesIn(f))
				}
			}
		}
		return nil, nil
	},
}

// transactions are those of a declared function and of the literals in it.
type transactions struct {
	info   *types.Info
	begun  map[*types.Var]token.Pos  // where local variables were begun, by Begin or BeginTx of a pool
	given  map[*types.Var]ast.Node   // parameters, by the function
	same   map[*types.Var]*types.Var // a variable that may be the same transaction, or contain it
	doubt  map[*types.Var]bool       // variables that get a transaction from elsewhere, too
	scopes []ast.Node                // the function, and literals that get a transaction as arguments of calls
}

// isTx reports whether a type is a transaction that runs statements.
func isTx(t types.Type) bool {
	for _, name := range []string{"Commit", "Rollback"} {
		if method, _, _ := types.LookupFieldOrMethod(t, true, nil, name); !isFunc(method) {
			return false
		}
	}
	exec, _, _ := types.LookupFieldOrMethod(t, true, nil, "Exec")
	execContext, _, _ := types.LookupFieldOrMethod(t, true, nil, "ExecContext")
	return isFunc(exec) || isFunc(execContext)
}

func isFunc(o types.Object) bool {
	_, ok := o.(*types.Func)
	return ok
}

// tx returns the variable of a transaction that an expression names, or nil.
func (t *transactions) tx(e ast.Expr) *types.Var {
	if v := variable(t.info, e); v != nil && !v.IsField() && isTx(v.Type()) {
		return v
	}
	return nil
}

// declare notes the function and the transactions that are its parameters.
func (t *transactions) declare(f ast.Node) {
	t.scopes = append(t.scopes, f)
	for _, v := range t.parameters(f) {
		t.given[v] = f
	}
}

func (t *transactions) parameters(f ast.Node) (txs []*types.Var) {
	var params *ast.FieldList
	switch f := f.(type) {
	case *ast.FuncDecl:
		params = f.Type.Params
	case *ast.FuncLit:
		params = f.Type.Params
	}
	for _, field := range params.List {
		for _, name := range field.Names {
			if v := t.tx(name); v != nil {
				txs = append(txs, v)
			}
		}
	}
	return txs
}

// relate notes which variables are, or may be, one transaction.
func (t *transactions) relate(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.CallExpr:
		t.relateLiterals(n)
	case *ast.AssignStmt:
		t.relateAssigned(n.Lhs, n.Rhs)
	case *ast.ValueSpec:
		var names []ast.Expr
		for _, name := range n.Names {
			names = append(names, name)
		}
		t.relateAssigned(names, n.Values)
	}
	return true
}

// relateLiterals notes literals that get a transaction: pgx.BeginFunc(ctx, db, literal).
// If the call has a transaction itself, the literal's is a savepoint of that one.
func (t *transactions) relateLiterals(call *ast.CallExpr) {
	for _, arg := range call.Args {
		f, ok := arg.(*ast.FuncLit)
		if !ok || len(t.parameters(f)) == 0 {
			continue
		}
		t.declare(f)
		for _, e := range append(call.Args, call.Fun) {
			if e != ast.Expr(f) {
				t.unite(t.parameters(f), e)
			}
		}
	}
}

func (t *transactions) relateAssigned(left, right []ast.Expr) {
	for _, e := range left {
		v := t.tx(e)
		if v == nil {
			continue
		}
		for _, from := range right {
			t.unite([]*types.Var{v}, from)
			if call, ok := from.(*ast.CallExpr); ok && poolBegins[callee(t.info, call)] {
				t.begun[v] = call.Pos()
			} else {
				t.doubt[v] = true
			}
		}
	}
}

// unite makes variables one with the transactions that an expression names.
func (t *transactions) unite(txs []*types.Var, e ast.Expr) {
	ast.Inspect(e, func(n ast.Node) bool {
		if _, ok := n.(*ast.FuncLit); ok {
			return false
		}
		if id, ok := n.(*ast.Ident); ok && t.tx(id) != nil {
			for _, v := range txs {
				if a, b := t.find(v), t.find(t.tx(id)); a != b {
					t.same[a] = b
				}
			}
		}
		return true
	})
}

func (t *transactions) find(v *types.Var) *types.Var {
	for t.same[v] != nil {
		v = t.same[v]
	}
	return v
}

const (
	pgxPool = "(*github.com/jackc/pgx/v5/pgxpool.Pool)."
	sqlDB   = "(*database/sql.DB)."
)

// poolBegins begin a transaction that has nothing in common with any other.
var poolBegins = map[string]bool{pgxPool + "Begin": true, pgxPool + "BeginTx": true, sqlDB + "Begin": true, sqlDB + "BeginTx": true}

// uses are what a function does with transactions and pools, without the literals in
// it that get transactions of their own.
type uses struct {
	scope   ast.Node
	records []recording
	writes  map[*types.Var]*ast.CallExpr // the first by each transaction
	others  map[*types.Var]bool          // transactions that are used for more than Record and their end
	commits map[*types.Var]token.Pos     // the last
	pool    []*ast.CallExpr              // writes, not in literals
}

func (t *transactions) usesIn(scope ast.Node) *uses {
	u := &uses{scope: scope, writes: map[*types.Var]*ast.CallExpr{}, others: map[*types.Var]bool{}, commits: map[*types.Var]token.Pos{}}
	known := map[*ast.Ident]bool{} // uses that are counted otherwise
	var visit func(in ast.Node, inLiteral bool)
	visit = func(in ast.Node, inLiteral bool) {
		ast.Inspect(in, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncLit:
				if len(t.parameters(n)) == 0 {
					visit(n.Body, true)
				}
				return false
			case *ast.CallExpr:
				t.use(u, n, known, inLiteral)
			case *ast.Ident:
				if v, ok := t.info.Uses[n].(*types.Var); ok && !known[n] && t.tx(n) != nil {
					u.others[v] = true
				}
			}
			return true
		})
	}
	switch f := scope.(type) {
	case *ast.FuncDecl:
		visit(f.Body, false)
	case *ast.FuncLit:
		visit(f.Body, false)
	}
	return u
}

// use notes what a call does.
func (t *transactions) use(u *uses, call *ast.CallExpr, known map[*ast.Ident]bool, inLiteral bool) {
	if r, ok := recordingOf(t.info, call); ok {
		if r.tx != nil && t.tx(r.tx) != nil {
			u.records = append(u.records, r)
			known[ast.Unparen(r.tx).(*ast.Ident)] = true
		}
		return
	}
	selector, ok := ast.Unparen(call.Fun).(*ast.SelectorExpr)
	if !ok {
		return
	}
	full := callee(t.info, call)
	if (strings.HasPrefix(full, pgxPool) || strings.HasPrefix(full, sqlDB)) && writes(t.info, selector.Sel.Name, call) && !inLiteral {
		u.pool = append(u.pool, call)
	}
	v := t.tx(selector.X)
	if v == nil {
		return
	}
	switch name := selector.Sel.Name; {
	case name == "Commit" || name == "Rollback":
		known[ast.Unparen(selector.X).(*ast.Ident)] = true
		if name == "Commit" {
			u.commits[v] = call.Pos()
		}
	case u.writes[v] == nil && writes(t.info, name, call):
		u.writes[v] = call
	}
}

var (
	statementComment = regexp.MustCompile(`(?s)^(\s+|--[^\n]*\n|/\*.*?\*/)*`)
	writeStatement   = regexp.MustCompile(`(?is)^(INSERT|UPDATE|DELETE|MERGE)\b`)
)

// writes reports whether a method with a constant statement, or CopyFrom, writes.
func writes(info *types.Info, method string, call *ast.CallExpr) bool {
	switch method {
	case "CopyFrom":
		return true
	case "Exec", "ExecContext", "Query", "QueryContext", "QueryRow", "QueryRowContext":
	default:
		return false
	}
	for _, arg := range call.Args[:min(2, len(call.Args))] {
		if value := info.Types[arg].Value; value != nil && value.Kind() == constant.String {
			sql := constant.StringVal(value)
			return writeStatement.MatchString(sql[len(statementComment.FindString(sql)):])
		}
	}
	return false
}

// report compares where a function records with where it writes.
func (t *transactions) report(pass *analysis.Pass, u *uses) {
	for _, r := range u.records {
		v := t.tx(r.tx)
		if w := t.otherWriter(u, v); w != nil {
			pass.ReportRangef(r.call, "the event is recorded in %s, but the data is written in %s: an event without its data may commit, or data without its event", v.Name(), w.Name())
		}
	}
	reported := map[*ast.CallExpr]bool{}
	for _, r := range u.records {
		v := t.tx(r.tx)
		for _, call := range u.pool {
			if !reported[call] && t.isWithin(u, call, v) {
				reported[call] = true
				pass.ReportRangef(call, "this is not written in the transaction %s, in which line %d records the event: use %s",
					v.Name(), pass.Fset.Position(r.call.Pos()).Line, v.Name())
			}
		}
	}
}

// otherWriter returns a transaction that writes and is not v, if v only records.
func (t *transactions) otherWriter(u *uses, v *types.Var) (other *types.Var) {
	if u.others[v] || !t.isKnown(v) {
		return nil
	}
	for w, call := range u.writes {
		if t.find(w) == t.find(v) || !t.isKnown(w) || !t.isOf(w, u.scope) || t.given[w] != nil && t.given[w] == t.given[v] {
			continue
		}
		if other == nil || call.Pos() < u.writes[other].Pos() {
			other = w
		}
	}
	return other
}

// isKnown reports whether the source says where a transaction comes from.
func (t *transactions) isKnown(v *types.Var) bool {
	return !t.doubt[v] && (t.given[v] != nil || t.begun[v].IsValid())
}

// isOf reports whether a function has the transaction as a parameter, or begins it.
func (t *transactions) isOf(v *types.Var, scope ast.Node) bool {
	if t.begun[v].IsValid() {
		return scope.Pos() <= t.begun[v] && t.begun[v] < scope.End()
	}
	return t.given[v] == scope
}

// isWithin reports whether a transaction of the function is open at a call.
func (t *transactions) isWithin(u *uses, call *ast.CallExpr, v *types.Var) bool {
	switch {
	case !t.isKnown(v) || !t.isOf(v, u.scope):
		return false
	case t.given[v] != nil:
		return true
	}
	return t.begun[v] < call.Pos() && call.Pos() < u.commits[v]
}
