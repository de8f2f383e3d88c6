package outbox

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"reflect"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/eventheader"
	"github.com/outboxgo/outbox/internal/outage"
)

// inputLog is what all that use a processor remember together about events, so that what
// may be true of each of them does not fill the log.
type inputLog struct {
	badIDs  outage.Seldom // of correlations and traces
	unknown unknownTypes
}

// item is an event and its tasks.
type item struct {
	meta  envelope.Received
	tasks []task
	class string // why no handler gets it, or ""
	err   error
}

// appendInTx appends the tasks that need a transaction.
func (it *item) appendInTx(tasks []task) []task {
	for _, t := range it.tasks {
		if t.kind != noTx {
			tasks = append(tasks, t)
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

// Why no handler gets an event.
const (
	classUndecodable   = "undecodable"
	classUnknownType   = "unknown_type"
	classUnknownAction = "unknown_action"
)

// resolve decodes a message and finds its handlers: all of them, or those of an action. It adds
// both, and what the message says of itself, to an item that knows where the message came from.
func (p *processor) resolve(ctx context.Context, it *item, m *envelope.Message, action string) {
	it.meta.Describe(m)
	route := p.routes.byName[m.Type]
	err := guard(func() (err error) {
		p.checkIDs(&it.meta)
		if route != nil {
			it.tasks, err = p.tasks(ctx, route, m, &it.meta, action)
		}
		return err
	})
	switch {
	case err != nil:
		it.tasks, it.class, it.err = nil, classUndecodable, err
	case route == nil:
		it.class, it.err = classUnknownType, unknownType(m.Type)
	case len(it.tasks) == 0:
		it.class, it.err = classUnknownAction, unknownAction(m.Type, "action", action)
	}
}

// traceHeaders are where other producers have a trace id, in lower case. The first that is there counts.
var traceHeaders = []string{eventheader.TraceID, "x-trace-id"}

// checkIDs takes over the trace id of another producer, and drops ids that a [Recorder] would
// refuse: every handler that records an event would fail for them.
func (p *processor) checkIDs(m *envelope.Received) {
	for i := 0; i < len(traceHeaders) && m.Extensions[eventheader.TraceID] == ""; i++ {
		name := traceHeaders[i]
		if id := cmp.Or(m.Extensions[name], m.Header(name)); id != "" && check.Attribute(id, envelope.MaxTraceID) == nil {
			m.SetExtension(eventheader.TraceID, id)
		}
	}
	p.checkID(m, eventheader.Correlation, envelope.MaxCorrelationID, "outbox: the correlation id of an event is dropped, because no event could be recorded with it")
	p.checkID(m, eventheader.TraceID, envelope.MaxTraceID, "outbox: the trace id of an event is dropped, because no event could be recorded with it")
}

// checkID drops an id that cannot be recorded, and says so.
func (p *processor) checkID(m *envelope.Received, name string, most int, dropped string) {
	id := m.Extensions[name]
	if id == "" {
		return
	}
	err := check.Attribute(id, most)
	if err == nil {
		return
	}
	m.SetExtension(name, "")
	if times, now := p.input.badIDs.Next(); now {
		p.log.Warn(dropped, "type", m.Type, "event_id", m.ID, "events", times, "error", err)
	}
}

// unknownType is why an event type without a handler is a dead letter.
func unknownType(name string) error {
	return &envelope.FieldError{EventType: name, Index: -1, Field: "type", Err: check.ErrUnregistered}
}

// unknownAction is why an event is a dead letter if it is for an action that no handler has. The
// field says so.
func unknownAction(eventType, field, action string) error {
	return &envelope.FieldError{EventType: eventType, Index: -1, Field: field, Err: fmt.Errorf("%.100q %w: no handler has this action, it may have been renamed", action, check.ErrUnregistered)}
}

// tasks decodes the payload, upcasts it to every version that has handlers, and returns
// a task for each of them, or for the one action that is asked for.
func (p *processor) tasks(ctx context.Context, route *route, m *envelope.Message, meta *envelope.Received, action string) ([]task, error) {
	event, err := p.decodePayload(handlerContext(ctx, meta), &route.kind, m)
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
				tasks = append(tasks, task{h, arrival{event, *meta}})
			}
		}
	}
	return tasks, nil
}

// decodePayload reads a payload with the codec of its content type.
func (p *processor) decodePayload(ctx context.Context, kind *eventKind, m *envelope.Message) (any, error) {
	codec, err := p.codecFor(kind, m.ContentType)
	if err != nil {
		return nil, envelope.Unreadable(m.Type, "content-type", err)
	}
	event := reflect.New(kind.goType)
	if err := codec.decode(ctx, m.Data, event.Interface()); err != nil {
		return nil, envelope.Unreadable(m.Type, "data", fmt.Errorf("%w: %w", check.ErrMalformed, err))
	}
	return event.Elem().Interface(), nil
}

// codecFor prefers the registered codec. Without a content type there is no other;
// and what was recorded before another one was registered is mostly JSON.
func (p *processor) codecFor(kind *eventKind, contentType string) (payloadCodec, error) {
	media := envelope.MediaType(contentType)
	if media == "" || media == envelope.MediaType(kind.codec.contentType) {
		return kind.codec, nil
	}
	for _, codec := range p.cfg.Codecs {
		if media == envelope.MediaType(codec.contentType) {
			return codec, nil
		}
	}
	if envelope.IsJSONType(contentType) {
		return p.cfg.JSON, nil
	}
	return payloadCodec{}, fmt.Errorf("%.100q %w: no codec for it", contentType, check.ErrMalformed)
}
