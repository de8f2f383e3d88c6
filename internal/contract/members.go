package contract

import (
	"maps"
	"reflect"
	"slices"
)

// member is a member of an object.
type member struct {
	schema   any
	required bool
}

// members returns the members of an object.
func (v view) members() map[string]member {
	properties, _ := v.keys["properties"].(map[string]any)
	required, _ := v.keys["required"].([]any)
	all := map[string]member{}
	for name, schema := range properties {
		all[name] = member{schema, false}
	}
	for _, value := range required {
		name, _ := value.(string)
		m, has := all[name]
		if !has {
			m.schema = true
			if others, is := v.others(); is {
				m.schema = others
			}
		}
		all[name] = member{m.schema, true}
	}
	return all
}

// others returns the schema of the members without names, and whether objects have such members. An object with named
// members that only says that it is open has none.
func (v view) others() (schema any, has bool) {
	schema = v.keys["additionalProperties"]
	_, is := schema.(map[string]any)
	return schema, is || schema == true && v.keys["properties"] == nil
}

// members compares the members of two objects.
func (d *differ) members(path string, a, b view) {
	was, is := a.members(), b.members()
	names := slices.Sorted(maps.Keys(was))
	for _, name := range names {
		if _, has := is[name]; has {
			d.member(path+"."+name, was[name], is[name])
		}
	}
	renamed := map[string]bool{}
	for _, name := range names {
		if _, has := is[name]; has {
			continue
		}
		if to := d.renamedTo(was[name], was, is, renamed); to != "" {
			renamed[to] = true
			d.add(before(path+"."+name)+"renamed to "+to, "readers look for the value under the other name", Readers, Writers)
			continue
		}
		d.removed(path+"."+name, was[name], b)
	}
	for _, name := range slices.Sorted(maps.Keys(is)) {
		if _, had := was[name]; !had && !renamed[name] {
			d.appeared(path+"."+name, is[name], a)
		}
	}
}

// removed adds the removal of a member. The objects of a map may still have it, with a value of the map.
func (d *differ) removed(path string, was member, after view) {
	if was.required {
		d.add(before(path)+"removed", "old readers rely on it", Readers)
	} else {
		d.add(before(path)+"removed, was optional", "")
	}
	if others, has := after.others(); has {
		d.schema(path, was.schema, others)
	}
}

// appeared adds the addition of a member. The objects of a map may have had it, with a value of the map.
func (d *differ) appeared(path string, is member, old view) {
	if is.required {
		d.add(before(path)+"added", "old events do not have it", Writers)
	} else {
		d.add(before(path)+"added, optional", "")
	}
	if others, had := old.others(); had {
		d.schema(path, others, is.schema)
	}
}

// renamedTo returns the first new member that is the same as a removed one, or "".
func (d *differ) renamedTo(removed member, was, is map[string]member, taken map[string]bool) string {
	for _, name := range slices.Sorted(maps.Keys(is)) {
		if _, had := was[name]; had || taken[name] || is[name].required != removed.required {
			continue
		}
		if reflect.DeepEqual(d.before.look(removed.schema), d.after.look(is[name].schema)) {
			return name
		}
	}
	return ""
}

// member compares a member that both objects have.
func (d *differ) member(path string, was, is member) {
	switch {
	case was.required && !is.required:
		d.add(before(path)+"optional, was always there", "old readers rely on it", Readers)
	case !was.required && is.required:
		d.add(before(path)+"always there, was optional", "old events may not have it", Writers)
	}
	d.schema(path, was.schema, is.schema)
}
