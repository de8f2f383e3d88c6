package outbox

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

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
)

// eventKind is an event type of the registry, as handlers need it.
type eventKind struct {
	name   string // the CloudEvents type
	topic  string
	goType reflect.Type
	codec  payloadCodec
}

// payloadCodec decodes the payloads of a content type.
type payloadCodec struct {
	contentType string
	decode      func(ctx context.Context, data []byte, event any) error
}

// engineUpcaster turns events of an older version into the next.
type engineUpcaster struct {
	from, to reflect.Type
	up       func(any) any
}

// routeSources is what routes are made of.
type routeSources struct {
	kinds     []eventKind
	topics    []string // to read besides those of the types
	upcasters []engineUpcaster
	handlers  []*engineHandler // nil for a nil argument
}

// routes says which handlers an event type reaches.
type routes struct {
	byName map[string]*route // by event type
	more   []string          // topics beside those of the types, to which events of any type may be sent
	topics []string          // all, sorted
}

// topicsOf returns the topics in which events of a type may be.
func (r routes) topicsOf(one *route) []string {
	own := one.kind.topic
	return append([]string{own}, slices.DeleteFunc(slices.Clone(r.more), func(topic string) bool { return topic == own })...)
}

// route is the handlers that the events of a type reach.
type route struct {
	kind     eventKind
	versions []version // from the one that is sent
}

// version is an event type as handlers take it.
type version struct {
	up       func(any) any // from the version before; nil for the first
	handlers []*engineHandler
}

// handlers are those of all versions.
func (r *route) handlers() iter.Seq[*engineHandler] {
	return func(yield func(*engineHandler) bool) {
		for _, v := range r.versions {
			for _, h := range v.handlers {
				if !yield(h) {
					return
				}
			}
		}
	}
}

// newRoutes finds the event types that reach a handler, by themselves or upcast.
// Its error names every bad handler and upcaster.
func newRoutes(of routeSources) (routes, error) {
	known := map[reflect.Type]bool{}
	for _, k := range of.kinds {
		known[k.goType] = true
	}
	byType, err := handlersByType(known, of.handlers)
	up, uerr := upcastersByType(known, of.upcasters)
	if err := errors.Join(err, uerr); err != nil {
		return routes{}, err
	}
	r := routes{byName: map[string]*route{}, more: slices.Compact(slices.Sorted(slices.Values(of.topics)))}
	topics := map[string]bool{}
	for _, topic := range r.more {
		topics[topic] = true
	}
	for _, k := range of.kinds {
		versions := versionsOf(k.goType, byType, up)
		if !slices.ContainsFunc(versions, func(v version) bool { return len(v.handlers) > 0 }) {
			continue
		}
		r.byName[k.name] = &route{kind: k, versions: versions}
		topics[k.topic] = true
	}
	r.topics = slices.Sorted(maps.Keys(topics))
	return r, nil
}

func handlersByType(known map[reflect.Type]bool, handlers []*engineHandler) (map[reflect.Type][]*engineHandler, error) {
	byType := map[reflect.Type][]*engineHandler{}
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
			bad = append(bad, fmt.Errorf("handler %s: event type %s %w", h.action, h.goType, err))
		}
		switch same := func(other *engineHandler) bool { return other.action == h.action }; {
		case !known[h.goType]:
			reject(check.ErrUnregistered)
		case slices.ContainsFunc(byType[h.goType], same):
			reject(check.ErrDuplicate)
		default:
			byType[h.goType] = append(byType[h.goType], h)
		}
	}
	return byType, errors.Join(bad...)
}

func upcastersByType(known map[reflect.Type]bool, upcasters []engineUpcaster) (map[reflect.Type]engineUpcaster, error) {
	up := map[reflect.Type]engineUpcaster{}
	var bad []error
	for _, u := range upcasters {
		reject := func(err error) { bad = append(bad, fmt.Errorf("upcaster from %v to %v: %w", u.from, u.to, err)) }
		_, again := up[u.from]
		switch {
		case u.up == nil:
			reject(check.ErrNilArgument)
		case again:
			reject(check.ErrDuplicate)
		case !known[u.from] || !known[u.to]:
			reject(check.ErrUnregistered)
		default:
			up[u.from] = u
			if circular(u.to, up) {
				delete(up, u.from)
				reject(fmt.Errorf("%w: it leads back to where it began", check.ErrMalformed))
			}
		}
	}
	return up, errors.Join(bad...)
}

// circular reports whether upcasting never ends from t on.
func circular(t reflect.Type, up map[reflect.Type]engineUpcaster) bool {
	for n := 0; ; n++ {
		u, ok := up[t]
		if !ok || n > len(up) {
			return ok
		}
		t = u.to
	}
}

// versionsOf returns an event type and those that it is upcast to.
func versionsOf(t reflect.Type, byType map[reflect.Type][]*engineHandler, up map[reflect.Type]engineUpcaster) []version {
	versions := []version{{handlers: byType[t]}}
	for u, ok := up[t]; ok; u, ok = up[u.to] {
		versions = append(versions, version{up: u.up, handlers: byType[u.to]})
	}
	return versions
}

// unknownTypes are the event types without a handler that the log has named. The zero
// value is ready, and safe for concurrent use.
type unknownTypes struct {
	mu    sync.Mutex
	named map[string]bool
}

// maxUnknownTypes bounds the memory: whoever may write to a topic chooses the types.
const maxUnknownTypes = 1000

// add reports whether a type is to be named, and whether it is the last one.
func (u *unknownTypes) add(name string) (fresh, last bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.named[name] || len(u.named) >= maxUnknownTypes {
		return false, false
	}
	if u.named == nil {
		u.named = map[string]bool{}
	}
	u.named[name] = true
	return true, len(u.named) == maxUnknownTypes
}

// logSkipped logs an event type without a handler once. It is a warning if the handlers
// have another version of the type: then an upcaster is missing, or a newer release of
// this service. Types that have nothing to do with it are normal, because topics are shared.
func (p *processor) logSkipped(m *envelope.Received) {
	fresh, last := p.input.unknown.add(m.Type)
	if !fresh {
		return
	}
	if handled, ok := p.routes.otherVersion(m.Type); ok {
		p.log.Warn("outbox: events are skipped, the handlers have another version of their type", "type", m.Type, "handled", handled, "event_id", m.ID)
	} else {
		p.log.Debug("outbox: events of a type without a handler are skipped", "type", m.Type, "event_id", m.ID)
	}
	if last {
		p.log.Warn("outbox: very many event types are skipped, no more are named", "types", maxUnknownTypes)
	}
}

var versionSuffix = regexp.MustCompile(`\.v[0-9]+$`)

// otherVersion returns an event type with handlers that is another version of name.
func (r routes) otherVersion(name string) (handled string, ok bool) {
	base := versionSuffix.ReplaceAllString(name, "")
	for _, handled := range slices.Sorted(maps.Keys(r.byName)) {
		if base != name && versionSuffix.ReplaceAllString(handled, "") == base {
			return handled, true
		}
	}
	return "", false
}
