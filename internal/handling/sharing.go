package handling

import (
	"slices"
	"strings"
)

// handlersOf returns the handlers of tasks.
func handlersOf(tasks []Task) (handlers []*Handler) {
	for _, t := range tasks {
		if !slices.Contains(handlers, t.Handler) {
			handlers = append(handlers, t.Handler)
		}
	}
	return handlers
}

// Sharing reports whether there are several tasks and they may run in one transaction: none of their handlers changes
// settings, and no two of their events need notes of which one is found through the other.
func (p *Processor) Sharing(tasks []Task) bool {
	return len(tasks) > 1 && !haveSameID(tasks) && !slices.ContainsFunc(tasks, func(t Task) bool {
		_, separate := p.separate.Load(t.Handler)
		return separate
	})
}

// haveSameID reports whether events of two sources have the same id and type. The note of the second one is found
// through that of the first one, which a transaction takes back if the first one is not done.
func haveSameID(tasks []Task) bool {
	source := tasks[0].Meta.Source
	if !slices.ContainsFunc(tasks, func(t Task) bool { return t.Meta.Source != source || t.Meta.ByPosition }) {
		return false
	}
	sources := make(map[[2]string]string, len(tasks))
	for i := range tasks {
		e := IdentityOf(&tasks[i].Meta)
		key := [2]string{e.Type, e.ID}
		if first, known := sources[key]; known && first != e.Source {
			return true
		}
		sources[key] = e.Source
	}
	return false
}

// runSeparately notes that one of these handlers changes settings of its transaction, which other handlers must not
// see. From then on, their events and those that arrive with them are handled one by one.
func (p *Processor) runSeparately(handlers ...*Handler) {
	var actions []string
	for _, h := range handlers {
		if _, known := p.separate.LoadOrStore(h, nil); !known {
			actions = append(actions, h.Action)
		}
	}
	if len(actions) > 0 {
		const message = "outbox: a handler changes settings of its transaction; " +
			"what arrives with its events is handled one by one"
		p.Log.Warn(message, "action", strings.Join(actions, " or "))
	}
}
