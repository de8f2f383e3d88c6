package outboxtest

import (
	"errors"
	"fmt"
	"go/types"
	"maps"
	"slices"
	"strings"

	"github.com/outboxgo/outbox"
	"golang.org/x/tools/go/packages"
)

// RequireAllRegistered requires that a registry knows every event type of some
// packages. Patterns are those of go list, such as ./..., from the folder of the
// test; files of tests do not count.
//
// An event type is one with the method OccurredAt() time.Time, exported or not.
// Interfaces, generic types, and what others embed to have the method from it, are
// none. A type whose method has a pointer receiver is one, although [outbox.Event]
// does not take it as it is.
func RequireAllRegistered(t T, events *outbox.Registry, patterns ...string) {
	t.Helper()
	if err := requireAllRegistered(events, patterns); err != nil {
		t.Fatalf("outboxtest: %v", err)
	}
}

func requireAllRegistered(events *outbox.Registry, patterns []string) error {
	found, err := eventTypes(patterns)
	if err != nil {
		return err
	}
	if len(found) == 0 {
		return fmt.Errorf("no event types in %s: nothing has a method OccurredAt() time.Time", strings.Join(patterns, " "))
	}
	for _, reg := range events.Registrations() {
		delete(found, reg.GoType.PkgPath()+"."+reg.GoType.Name())
	}
	if len(found) == 0 {
		return nil
	}
	var missing []string
	for _, name := range slices.Sorted(maps.Keys(found)) {
		if found[name] {
			name += " (its methods have to have value receivers)"
		}
		missing = append(missing, name)
	}
	return fmt.Errorf("not in the registry:\n%s", list(missing))
}

// eventTypes finds the event types of packages, by package path and name, and
// whether their methods have pointer receivers.
func eventTypes(patterns []string) (map[string]bool, error) {
	if len(patterns) == 0 {
		return nil, errors.New("no packages are named: give ./... or others")
	}
	// From the source, because compiled packages lack what is not exported.
	loaded, err := packages.Load(&packages.Config{
		Mode: packages.NeedName | packages.NeedFiles | packages.NeedCompiledGoFiles | packages.NeedImports |
			packages.NeedTypes | packages.NeedTypesSizes | packages.NeedSyntax | packages.NeedTypesInfo,
	}, patterns...)
	if err != nil {
		return nil, fmt.Errorf("load packages: %w", err)
	}
	found, bases := map[string]bool{}, map[string]bool{}
	for _, p := range loaded {
		if len(p.Errors) > 0 {
			return nil, fmt.Errorf("load package %s: %w", p.PkgPath, p.Errors[0])
		}
		for _, name := range p.Types.Scope().Names() {
			event, ok := concrete(p.Types.Scope().Lookup(name))
			if !ok {
				continue
			}
			if method, pointer := occurredAt(event); method != nil {
				found[nameOf(event)] = pointer
				for _, base := range embeddedOn(event, method.Index()) {
					bases[base] = true
				}
			}
		}
	}
	maps.DeleteFunc(found, func(name string, _ bool) bool { return bases[name] })
	return found, nil
}

// concrete returns the type that a name stands for, if values of it can be.
func concrete(o types.Object) (*types.Named, bool) {
	name, ok := o.(*types.TypeName)
	if !ok {
		return nil, false
	}
	named, ok := name.Type().(*types.Named) // not an alias of one
	return named, ok && named.TypeParams().Len() == 0 && !types.IsInterface(named)
}

// occurredAt returns the method of an event type, and whether only pointers have
// it; or nil.
func occurredAt(t *types.Named) (method *types.Selection, pointer bool) {
	method = types.NewMethodSet(t).Lookup(nil, "OccurredAt")
	if method == nil {
		method, pointer = types.NewMethodSet(types.NewPointer(t)).Lookup(nil, "OccurredAt"), true
	}
	if method == nil {
		return nil, false
	}
	f := method.Obj().(*types.Func).Signature()
	if f.Params().Len() != 0 || f.Results().Len() != 1 || types.Unalias(f.Results().At(0).Type()).String() != "time.Time" {
		return nil, false
	}
	return method, pointer
}

// embeddedOn returns the types that a struct embeds on the way to a method of
// theirs.
func embeddedOn(t types.Type, path []int) (names []string) {
	for _, field := range path[:len(path)-1] {
		t = t.Underlying().(*types.Struct).Field(field).Type()
		if p, ok := types.Unalias(t).(*types.Pointer); ok {
			t = p.Elem()
		}
		if named, ok := types.Unalias(t).(*types.Named); ok {
			names = append(names, nameOf(named))
		}
	}
	return names
}

// nameOf names a type as reflect does.
func nameOf(t *types.Named) string {
	if t.Obj().Pkg() == nil {
		return t.Obj().Name() // error
	}
	return t.Obj().Pkg().Path() + "." + t.Obj().Name()
}
