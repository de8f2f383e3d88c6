package outbox

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"reflect"
	"slices"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/outage"
)

// DecodeCloudEvent reads a record as the CloudEvents 1.0 Kafka protocol binding has
// them, in either mode: what a [Relay] sends. Its error is a [*FieldError]. Where
// topics hold records of other producers as well, see [PlainRecords].
func DecodeCloudEvent(r *kgo.Record) (*Message, error) {
	return decodeRecord(r.Value, func(yield func(string, []byte) bool) {
		for _, h := range r.Headers {
			if !yield(h.Key, h.Value) {
				return
			}
		}
	})
}

// inputLog is what the workers of a consumer remember together about records, so that what
// may be true of each of them does not fill the log.
type inputLog struct {
	badCorrelation outage.Seldom
	noReplay       outage.Seldom
	unknown        unknownTypes
}

// item is a record and its tasks.
type item struct {
	record *kgo.Record
	replay replay
	meta   Metadata
	tasks  []task
	class  string // why no handler gets it, or ""
	err    error
}

// replay says for whom a record was sent back from a dead-letter topic.
type replay struct{ group, action string } // "" for any

// tasksInTx returns the tasks of items that need a transaction.
func tasksInTx(items []item) []task {
	tasks := make([]task, 0, len(items))
	for i := range items {
		for _, t := range items[i].tasks {
			if t.kind != noTx {
				tasks = append(tasks, t)
			}
		}
	}
	return tasks
}

// inOrder yields the tasks with a transaction before those without.
func (it *item) inOrder() iter.Seq[task] {
	return func(yield func(task) bool) {
		for _, late := range []bool{false, true} {
			for _, t := range it.tasks {
				if (t.kind == noTx) == late && !yield(t) {
					return
				}
			}
		}
	}
}

// Why no handler gets a record.
const (
	classUndecodable   = "undecodable"
	classUnknownType   = "unknown_type"
	classUnknownAction = "unknown_action"
)

// read decodes a record and finds its handlers: all of them, or those for which it was
// sent back. It completes at, which their Metadata points to.
func (p *processor) read(ctx context.Context, r *kgo.Record, to replay, at *KafkaMetadata) item {
	at.Topic, at.Partition, at.Offset, at.Key = r.Topic, r.Partition, r.Offset, r.Key
	it := item{record: r, replay: to, meta: Metadata{Kafka: at, Attempt: 1}}
	if r.Attrs.IsControl() { // nobody's, but it has an offset
		return it
	}
	if it.replay.group != "" && it.replay.group != p.cfg.Group {
		return it
	}
	var route *route
	skipped := false
	err := guard(func() error {
		m, err := p.decode(r)
		if m == nil || err != nil {
			skipped = err == nil
			return err
		}
		it.meta.describe(m)
		p.checkCorrelationID(&it.meta)
		if route = p.routes.byName[m.Type]; route == nil {
			return nil
		}
		it.tasks, err = p.tasks(ctx, route, m, it.meta, it.replay.action)
		return err
	})
	switch {
	case err != nil:
		it.tasks, it.class, it.err = nil, classUndecodable, err
	case skipped:
	case route == nil:
		it.class, it.err = classUnknownType, unknownType(it.meta.Type)
	case len(it.tasks) == 0:
		it.class, it.err = classUnknownAction, unknownAction(it.meta.Type, it.replay.action)
	}
	return it
}

// isSkipped reports whether no handler gets an event, and nobody wants it: its type has no
// handler here, because topics are shared. A replay for this group is never skipped.
func (it *item) isSkipped(unknown UnknownTypes) bool {
	return it.class == classUnknownType && unknown == SkipUnknown && it.replay.group == ""
}

// checkCorrelationID drops a correlation id that a [Recorder] would refuse: every handler
// that records an event would fail for it.
func (p *processor) checkCorrelationID(m *Metadata) {
	id := m.Extensions[correlationAttr]
	if id == "" {
		return
	}
	err := check.Attribute(id, maxCorrelationID)
	if err == nil {
		return
	}
	m.Extensions = maps.Clone(m.Extensions) // it may be the decoder's own
	delete(m.Extensions, correlationAttr)
	if times, now := p.input.badCorrelation.Next(); now {
		p.log.Warn("outbox: the correlation id of an event is dropped, because no event could be recorded with it", "type", m.Type,
			"event_id", m.ID, "events", times, "error", err)
	}
}

// unknownType is why an event type without a handler is a dead letter.
func unknownType(name string) error {
	return &FieldError{EventType: name, Index: -1, Field: "type", Err: ErrUnregistered}
}

// unknownAction is why a replay for an action that no handler has is a dead letter again.
func unknownAction(eventType, action string) error {
	return &FieldError{EventType: eventType, Index: -1, Field: ReplayAction, Err: fmt.Errorf("%.100q %w: no handler has this action, it may have been renamed", action, ErrUnregistered)}
}

// describe takes over what a message says of itself.
func (m *Metadata) describe(msg *Message) {
	m.ID, m.Source, m.Type, m.Subject = msg.ID, msg.Source, msg.Type, msg.Subject
	m.Time, m.ContentType, m.Extensions, m.byPosition = msg.Time, msg.ContentType, msg.Extensions, msg.ByPosition
}

// tasks decodes the payload, upcasts it to every version that has handlers, and returns
// a task for each of them, or for the one action that is asked for.
func (p *processor) tasks(ctx context.Context, route *route, m *Message, meta Metadata, action string) ([]task, error) {
	event, err := p.decodePayload(handlerContext(ctx, meta), route.def, m)
	if err != nil {
		return nil, err
	}
	var tasks []task
	for _, v := range route.versions {
		if v.up != nil {
			event = v.up(event)
		}
		for _, h := range v.handlers {
			if action == "" || action == h.action {
				tasks = append(tasks, task{h, arrival{event, meta}})
			}
		}
	}
	return tasks, nil
}

// decodePayload reads a payload with the codec of its content type.
func (p *processor) decodePayload(ctx context.Context, def *definition, m *Message) (any, error) {
	codec, err := p.codecFor(def, m.ContentType)
	if err != nil {
		return nil, unreadable(m.Type, "content-type", err)
	}
	event := reflect.New(def.goType)
	if err := codec.Decode(ctx, m.Data, event.Interface()); err != nil {
		return nil, unreadable(m.Type, "data", fmt.Errorf("%w: %w", ErrMalformed, err))
	}
	return event.Elem().Interface(), nil
}

// codecFor prefers the registered codec. Without a content type there is no other;
// and what was recorded before another one was registered is mostly JSON.
func (p *processor) codecFor(def *definition, contentType string) (Codec, error) {
	media := mediaType(contentType)
	if media == "" || media == mediaType(def.codec.ContentType) {
		return def.codec, nil
	}
	for _, codec := range p.cfg.Codecs {
		if media == mediaType(codec.ContentType) {
			return codec, nil
		}
	}
	if isJSONType(contentType) {
		return JSON(), nil
	}
	return Codec{}, fmt.Errorf("%.100q %w: no codec for it", contentType, ErrMalformed)
}

// isReplay reports whether a record says that it was sent back from a dead-letter topic.
func isReplay(r *kgo.Record) bool {
	return slices.ContainsFunc(r.Headers, func(h kgo.RecordHeader) bool { return deadletter.IsReplay(h.Key) })
}

// replayOf returns for whom a record was sent back from a dead-letter topic, by its own
// word.
func replayOf(r *kgo.Record) (to replay) {
	for _, h := range r.Headers {
		switch h.Key {
		case ReplayGroup:
			to.group = string(h.Value)
		case ReplayAction:
			to.action = string(h.Value)
		}
	}
	return to
}

// withoutReplay returns a record without the headers of a replay.
func withoutReplay(r *kgo.Record) *kgo.Record {
	plain := *r
	plain.Headers = slices.DeleteFunc(slices.Clone(r.Headers), func(h kgo.RecordHeader) bool { return deadletter.IsReplay(h.Key) })
	return &plain
}
