package outboxvet

import (
	"fmt"
	"go/ast"
	"go/token"
	"go/types"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/tools/go/analysis"
	"golang.org/x/tools/go/analysis/passes/inspect"
)

// Registration reports event types that are recorded and not registered.
var Registration = &analysis.Analyzer{
	Name: "outboxregistration",
	Doc: `report event types that are recorded and not registered

Record returns ErrUnregistered for an event whose type is in no outbox.Event of the
registry. An event type is reported

 - at Record, where only the package itself could register it: in package main, and
   for a type whose name is not exported;
 - else in package main, if nothing that the program imports registers the type,
   although the package that records it, or one that it imports, registers others
   that are declared with it.

Which registry a recorder has is not known: any outbox.Event[E] of the program counts,
and so does any other generic function that is called with the type. Tests do not
count. Events behind an interface or in a slice variable are not known.`,
	URL:       "https://pkg.go.dev/" + outboxPath + "/outboxvet#Registration",
	Requires:  []*analysis.Analyzer{inspect.Analyzer},
	FactTypes: []analysis.Fact{(*eventFacts)(nil)},
	Run:       runRegistration,
}

// eventFacts are what a package and those that it imports do with event types, which
// are named by package path and name.
type eventFacts struct {
	Registered []string // by outbox.Event
	Passed     []string // to other generic functions, which may register them
	Recorded   []recordedType
}

// AFact marks the facts for the analysis framework.
func (*eventFacts) AFact() {}

func (f *eventFacts) String() string { return fmt.Sprintf("registered %v", f.Registered) }

// recordedType is an event type that another package than main records.
type recordedType struct {
	Type, Where string
	Nearby      bool // types that are declared with it are registered where the package sees it
}

func runRegistration(pass *analysis.Pass) (any, error) {
	facts := imported(pass)
	collectRegistered(pass, facts)
	inMain := pass.Pkg.Name() == "main"
	if inMain {
		reportProgram(pass, facts)
	}
	for c := range root(pass).Preorder((*ast.CallExpr)(nil)) {
		r, ok := recordingOf(pass.TypesInfo, c.Node().(*ast.CallExpr))
		if !ok || isTest(pass, r.call.Pos()) {
			continue
		}
		for _, e := range r.events {
			t := eventType(pass.TypesInfo, e)
			if t == nil || facts.has(t) {
				continue
			}
			if inMain || !t.Obj().Exported() && t.Obj().Pkg() == pass.Pkg {
				pass.ReportRangef(e, "the event type %s is not registered: no outbox.Event[%[1]s] is in the program", t.Obj().Name())
				continue
			}
			at := pass.Fset.Position(r.call.Pos())
			facts.Recorded = append(facts.Recorded, recordedType{nameOf(t.Obj()),
				fmt.Sprintf("%s:%d", path.Join(importPath(pass.Pkg), filepath.Base(at.Filename)), at.Line), facts.hasNear(t.Obj().Pkg())})
		}
	}
	if len(facts.Registered)+len(facts.Passed)+len(facts.Recorded) > 0 {
		facts.compact()
		pass.ExportPackageFact(facts)
	}
	return nil, nil
}

// imported returns the facts of all imported packages. Each of them has those of the
// packages that it imports.
func imported(pass *analysis.Pass) *eventFacts {
	all := &eventFacts{}
	for _, p := range pass.Pkg.Imports() {
		var f eventFacts
		if pass.ImportPackageFact(p, &f) {
			all.Registered = append(all.Registered, f.Registered...)
			all.Passed = append(all.Passed, f.Passed...)
			all.Recorded = append(all.Recorded, f.Recorded...)
		}
	}
	all.compact()
	return all
}

func (f *eventFacts) compact() {
	for _, names := range []*[]string{&f.Registered, &f.Passed} {
		slices.Sort(*names)
		*names = slices.Compact(*names)
	}
	slices.SortFunc(f.Recorded, func(a, b recordedType) int { return strings.Compare(a.Type+" "+a.Where, b.Type+" "+b.Where) })
	f.Recorded = slices.Compact(f.Recorded)
}

func (f *eventFacts) hasName(name string) bool {
	return slices.Contains(f.Registered, name) || slices.Contains(f.Passed, name)
}

func (f *eventFacts) has(t *types.Named) bool { return f.hasName(nameOf(t.Obj())) }

// hasNear reports whether a type of the package is registered.
func (f *eventFacts) hasNear(p *types.Package) bool {
	return slices.ContainsFunc(f.Registered, func(name string) bool {
		return strings.TrimSuffix(name, path.Ext(name)) == importPath(p)
	})
}

// collectRegistered adds the types that generic functions of a package are called with.
// What only uses outbox, such as a handler, registers nothing.
func collectRegistered(pass *analysis.Pass, facts *eventFacts) {
	for id, instance := range pass.TypesInfo.Instances {
		o := pass.TypesInfo.Uses[id]
		if o == nil || o.Pkg() == nil || isTest(pass, id.Pos()) {
			continue
		}
		inOutbox := importPath(o.Pkg()) == outboxPath || strings.HasPrefix(importPath(o.Pkg()), outboxPath+"/outbox")
		for t := range instance.TypeArgs.Types() {
			named := namedType(t)
			switch {
			case named == nil:
			case inOutbox && o.Name() == "Event":
				facts.Registered = append(facts.Registered, nameOf(named.Obj()))
			case !inOutbox && isEvent(named):
				facts.Passed = append(facts.Passed, nameOf(named.Obj()))
			}
		}
	}
	facts.compact()
}

// reportProgram reports what packages of a program record and none registers.
func reportProgram(pass *analysis.Pass, facts *eventFacts) {
	for i, r := range facts.Recorded {
		if !r.Nearby || facts.hasName(r.Type) || i > 0 && facts.Recorded[i-1].Type == r.Type {
			continue
		}
		for _, file := range pass.Files {
			if !isTest(pass, file.Pos()) {
				pass.ReportRangef(file.Name, "the event type %s is not registered: %s records it, and no outbox.Event is in the program", r.Type, r.Where)
				break
			}
		}
	}
}

// eventType returns the type of an event, or nil if the source does not say it.
func eventType(info *types.Info, e ast.Expr) *types.Named {
	if call, ok := ast.Unparen(e).(*ast.CallExpr); ok && callee(info, call) == outboxPath+".With" {
		return eventType(info, call.Args[0])
	}
	named := namedType(info.TypeOf(e))
	if named == nil || types.IsInterface(named) || named.TypeArgs().Len() > 0 || isRaw(named) {
		return nil
	}
	return named
}

// isRaw reports whether a type is outbox.RawEvent, which is not registered.
func isRaw(t *types.Named) bool { return nameOf(t.Obj()) == outboxPath+".RawEvent" }

// isEvent reports whether a type has the method of outbox.DomainEvent, and is to be registered.
func isEvent(t *types.Named) bool {
	if isRaw(t) {
		return false
	}
	method, _, _ := types.LookupFieldOrMethod(t, true, t.Obj().Pkg(), "OccurredAt")
	return isFunc(method)
}

// namedType returns a named type, or what a pointer to it points to, or nil.
func namedType(t types.Type) *types.Named {
	if p, ok := types.Unalias(t).(*types.Pointer); ok {
		t = p.Elem()
	}
	named, ok := types.Unalias(t).(*types.Named)
	if !ok || named.Obj().Pkg() == nil {
		return nil
	}
	return named
}

func nameOf(o types.Object) string { return importPath(o.Pkg()) + "." + o.Name() }

// importPath returns the path of a package, which in tests is "path [path.test]".
func importPath(p *types.Package) string {
	before, _, _ := strings.Cut(p.Path(), " ")
	return before
}

func isTest(pass *analysis.Pass, at token.Pos) bool {
	return strings.HasSuffix(pass.Fset.Position(at).Filename, "_test.go")
}
