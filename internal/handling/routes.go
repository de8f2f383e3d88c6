package handling

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
)

// EventType is an event type of the registry.
type EventType struct {
	Name   string // the CloudEvents type
	Topic  string
	GoType reflect.Type
	Codec  Codec
}

// Codec decodes the payloads of a content type.
type Codec struct {
	ContentType string
	Decode      func(ctx context.Context, data []byte, event any) error
}

// Upcaster turns events of a version into events of the next version.
type Upcaster struct {
	From, To reflect.Type
	Up       func(any) any
}

// Sources are the parts of which [NewRoutes] makes routes.
type Sources struct {
	Kinds     []EventType
	Topics    []string // to read, in addition to those of the types
	Upcasters []Upcaster
	Handlers  []*Handler // a nil element is an error
}

// Routes are the handlers that each event type reaches.
type Routes struct {
	ByName map[string]*Route // by event type
	extra  []string          // topics in which events of any type may be, in addition to the topics of the types
	Topics []string          // all topics, sorted
}

// TopicsOf returns the topics in which events of a type may be.
func (r Routes) TopicsOf(one *Route) []string {
	own := one.Kind.Topic
	extra := slices.DeleteFunc(slices.Clone(r.extra), func(topic string) bool { return topic == own })
	return append([]string{own}, extra...)
}

// ActionsOf returns the actions on events of a topic.
func (r Routes) ActionsOf(topic string) (actions []string) {
	for _, route := range r.ByName {
		if !slices.Contains(r.TopicsOf(route), topic) {
			continue
		}
		for h := range route.Handlers() {
			if !slices.Contains(actions, h.Action) {
				actions = append(actions, h.Action)
			}
		}
	}
	return actions
}

// Actions returns the actions on events of a type, sorted. If a type without a handler is a dead letter, its only
// action is empty.
func (p *Processor) Actions(eventType string) (actions []string) {
	if route := p.Routes.ByName[eventType]; route != nil {
		for h := range route.Handlers() {
			actions = append(actions, h.Action)
		}
	} else if p.Rules.DeadLetterUnknown {
		return []string{""}
	}
	slices.Sort(actions)
	return slices.Compact(actions)
}

// Route is an event type with its handlers.
type Route struct {
	Kind     EventType
	versions []version // from the version that is sent
}

// version is a version of an event type, with the handlers that take it.
type version struct {
	up       func(any) any // from the version before; nil for the first
	handlers []*Handler
}

// Handlers yields the handlers of all versions.
func (r *Route) Handlers() iter.Seq[*Handler] {
	return func(yield func(*Handler) bool) {
		for _, v := range r.versions {
			for _, h := range v.handlers {
				if !yield(h) {
					return
				}
			}
		}
	}
}

// NewRoutes returns the event types that reach a handler, by themselves or after upcasting. Its error names every bad
// handler and upcaster.
func NewRoutes(of Sources) (Routes, error) {
	known := map[reflect.Type]bool{}
	for _, k := range of.Kinds {
		known[k.GoType] = true
	}
	byType, err := handlersByType(known, of.Handlers)
	up, uerr := upcastersByType(known, of.Upcasters)
	if err := errors.Join(err, uerr); err != nil {
		return Routes{}, err
	}
	r := Routes{ByName: map[string]*Route{}, extra: slices.Compact(slices.Sorted(slices.Values(of.Topics)))}
	topics := map[string]bool{}
	for _, topic := range r.extra {
		topics[topic] = true
	}
	for _, k := range of.Kinds {
		versions := versionsOf(k.GoType, byType, up)
		if !slices.ContainsFunc(versions, func(v version) bool { return len(v.handlers) > 0 }) {
			continue
		}
		r.ByName[k.Name] = &Route{Kind: k, versions: versions}
		topics[k.Topic] = true
	}
	r.Topics = slices.Sorted(maps.Keys(topics))
	return r, nil
}

func handlersByType(known map[reflect.Type]bool, handlers []*Handler) (map[reflect.Type][]*Handler, error) {
	byType := map[reflect.Type][]*Handler{}
	var bad []error
	if len(handlers) == 0 {
		bad = append(bad, fmt.Errorf("handlers %w: give at least one", check.ErrEmpty))
	}
	for i, h := range handlers {
		if h == nil {
			bad = append(bad, fmt.Errorf("handler %d %w", i, check.ErrNilArgument))
			continue
		}
		if err := h.validate(); err != nil {
			bad = append(bad, err)
			continue
		}
		reject := func(err error) {
			bad = append(bad, fmt.Errorf("handler %s: event type %s %w", h.Action, h.GoType, err))
		}
		switch same := func(other *Handler) bool { return other.Action == h.Action }; {
		case !known[h.GoType]:
			reject(check.ErrUnregistered)
		case slices.ContainsFunc(byType[h.GoType], same):
			reject(check.ErrDuplicate)
		default:
			byType[h.GoType] = append(byType[h.GoType], h)
		}
	}
	return byType, errors.Join(bad...)
}

func upcastersByType(known map[reflect.Type]bool, upcasters []Upcaster) (map[reflect.Type]Upcaster, error) {
	up := map[reflect.Type]Upcaster{}
	var bad []error
	for _, u := range upcasters {
		reject := func(err error) { bad = append(bad, fmt.Errorf("upcaster from %v to %v: %w", u.From, u.To, err)) }
		_, again := up[u.From]
		switch {
		case u.Up == nil:
			reject(check.ErrNilArgument)
		case again:
			reject(check.ErrDuplicate)
		case !known[u.From] || !known[u.To]:
			reject(check.ErrUnregistered)
		default:
			up[u.From] = u
			if circular(u.To, up) {
				delete(up, u.From)
				reject(fmt.Errorf("%w: it leads back to where it began", check.ErrMalformed))
			}
		}
	}
	return up, errors.Join(bad...)
}

// circular reports whether upcasting from t never ends.
func circular(t reflect.Type, up map[reflect.Type]Upcaster) bool {
	for n := 0; ; n++ {
		u, ok := up[t]
		if !ok || n > len(up) {
			return ok
		}
		t = u.To
	}
}

// versionsOf returns the versions of an event type: its own, and those to which it is upcast.
func versionsOf(t reflect.Type, byType map[reflect.Type][]*Handler, up map[reflect.Type]Upcaster) []version {
	versions := []version{{handlers: byType[t]}}
	for u, ok := up[t]; ok; u, ok = up[u.To] {
		versions = append(versions, version{up: u.Up, handlers: byType[u.To]})
	}
	return versions
}

// skippedTypes are the event types without a handler whose events were skipped. The zero value is ready, and safe for
// concurrent use.
type skippedTypes struct {
	mu   sync.Mutex
	seen map[string]*skippedType
}

// skippedType counts the events of a type.
type skippedType struct {
	events   int64 // since the process began
	unlogged int64 // since the last line
	loggedAt time.Time
}

const (
	// maxSkippedTypes bounds the memory, because every producer of a topic can choose types.
	maxSkippedTypes = 1000
	// skippedInterval is the time between two lines about a type.
	skippedInterval = time.Hour
)

// add counts an event. It returns how many events a line is to name now, or 0 for no line, and whether the type is the
// last one that is counted.
func (s *skippedTypes) add(name string) (events int64, last bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t, known := s.seen[name]
	if !known {
		if len(s.seen) >= maxSkippedTypes {
			return 0, false
		}
		if s.seen == nil {
			s.seen = map[string]*skippedType{}
		}
		t = &skippedType{}
		s.seen[name] = t
		last = len(s.seen) == maxSkippedTypes
	}
	t.events++
	t.unlogged++
	if known && time.Since(t.loggedAt) < skippedInterval {
		return 0, false
	}
	events, t.unlogged, t.loggedAt = t.unlogged, 0, time.Now()
	return events, last
}

// counts returns how many events of each type were skipped since the process began, of up to most types.
func (s *skippedTypes) counts(most int) map[string]int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	counts := map[string]int64{}
	for _, name := range slices.Sorted(maps.Keys(s.seen)) {
		if len(counts) == most {
			break
		}
		counts[name] = s.seen[name].events
	}
	return counts
}

// Skipped returns how many events without a handler this process has skipped, by type, of up to most types.
func (p *Processor) Skipped(most int) map[string]int64 { return p.input.skipped.counts(most) }

// LogSkipped counts an event of a type without a handler. It logs each type once, and again after an hour if more of
// its events come. It warns if another version of the type has a handler: then an upcaster is missing, or a newer
// release of this service. Other types are normal, because topics are shared.
func (p *Processor) LogSkipped(m *envelope.Received) {
	events, last := p.input.skipped.add(m.Type)
	if events == 0 {
		return
	}
	if handled, ok := p.Routes.otherVersion(m.Type); ok {
		p.Log.Warn("outbox: events are skipped, the handlers have another version of their type",
			"type", m.Type, "handled", handled, "events", events, "event_id", m.ID)
	} else {
		p.Log.Info("outbox: events of a type without a handler are skipped", "type", m.Type, "events", events, "event_id", m.ID)
	}
	if last {
		p.Log.Warn("outbox: very many event types are skipped, no more are named", "types", maxSkippedTypes)
	}
}

var versionSuffix = regexp.MustCompile(`\.v[0-9]+$`)

// otherVersion returns an event type with handlers that is another version of name.
func (r Routes) otherVersion(name string) (handled string, ok bool) {
	base := versionSuffix.ReplaceAllString(name, "")
	for _, handled := range slices.Sorted(maps.Keys(r.ByName)) {
		if base != name && versionSuffix.ReplaceAllString(handled, "") == base {
			return handled, true
		}
	}
	return "", false
}
