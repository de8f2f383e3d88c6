package handling

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

// inputLog limits the log lines about bad input. All processors of a consumer or a worker share it, so that lines that
// may apply to every event do not fill the log.
type inputLog struct {
	badIDs  outage.Seldom // bad correlation ids and trace ids
	skipped skippedTypes
}

// Item is an event and its tasks.
type Item struct {
	Meta  envelope.Received
	Tasks []Task
	Class string // why no handler gets the event, or "": a constant of this package
	Err   error
}

// AppendInTx appends the tasks that need a transaction.
func (it *Item) AppendInTx(tasks []Task) []Task {
	for _, t := range it.Tasks {
		if t.Kind != NoTx {
			tasks = append(tasks, t)
		}
	}
	return tasks
}

// InOrder yields the tasks with a transaction before those without.
func (it *Item) InOrder() iter.Seq[Task] {
	return func(yield func(Task) bool) {
		for _, late := range []bool{false, true} {
			for _, t := range it.Tasks {
				if (t.Kind == NoTx) == late && !yield(t) {
					return
				}
			}
		}
	}
}

// Why no handler gets an event.
const (
	ClassUndecodable   = "undecodable"
	ClassUnknownType   = "unknown_type"
	ClassUnknownAction = "unknown_action"
)

// Resolve decodes a message and finds its handlers: those of an action, or all if action is "". It adds the metadata of
// the message and the tasks to an item that already has the origin of the message. If no handler gets the event, it
// sets Class and Err.
func (p *Processor) Resolve(ctx context.Context, it *Item, m *envelope.Message, action string) {
	err := p.Describe(&it.Meta, m)
	route := p.Routes.ByName[m.Type]
	if err == nil && route != nil {
		err = Guard(func() (err error) {
			it.Tasks, err = p.tasks(ctx, route, m, &it.Meta, action)
			return err
		})
	}
	switch {
	case err != nil:
		it.Tasks, it.Class, it.Err = nil, ClassUndecodable, err
	case route == nil:
		it.Class, it.Err = ClassUnknownType, UnknownType(m.Type)
	case len(it.Tasks) == 0:
		it.Class, it.Err = ClassUnknownAction, UnknownAction(m.Type, "action", action)
	}
}

// Describe adds the metadata of a message to that of its event, with the ids that log lines about the event have. It
// does not decode the payload.
func (p *Processor) Describe(about *envelope.Received, m *envelope.Message) error {
	about.Describe(m)
	return Guard(func() error { p.checkIDs(about); return nil })
}

// traceHeaders are headers in which other producers send a trace id, in lower case. The first one with a value counts.
var traceHeaders = []string{eventheader.TraceID, "x-trace-id"}

// checkIDs takes the trace id from the headers of other producers. It drops ids that a recorder would reject: every
// handler that records an event would fail otherwise.
func (p *Processor) checkIDs(m *envelope.Received) {
	for i := 0; i < len(traceHeaders) && m.Extensions[eventheader.TraceID] == ""; i++ {
		name := traceHeaders[i]
		if id := cmp.Or(m.Extensions[name], m.Header(name)); id != "" && check.Attribute(id, envelope.MaxTraceID) == nil {
			m.SetExtension(eventheader.TraceID, id)
		}
	}
	p.checkID(m, eventheader.Correlation, envelope.MaxCorrelationID,
		"outbox: the correlation id of an event is dropped, because no event could be recorded with it")
	p.checkID(m, eventheader.TraceID, envelope.MaxTraceID,
		"outbox: the trace id of an event is dropped, because no event could be recorded with it")
}

// checkID drops an id that cannot be recorded, and logs dropped.
func (p *Processor) checkID(m *envelope.Received, name string, most int, dropped string) {
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
		p.Log.Warn(dropped, "type", m.Type, "event_id", m.ID, "events", times, "error", err)
	}
}

// UnknownType returns the error of an event of a type without a handler.
func UnknownType(name string) error {
	return &envelope.FieldError{EventType: name, Index: -1, Field: "type", Err: check.ErrUnregistered}
}

// UnknownAction returns the error of an event for an action without a handler. Field names the field with the action.
func UnknownAction(eventType, field, action string) error {
	err := fmt.Errorf("%.100q %w: no handler has this action, it may have been renamed", action, check.ErrUnregistered)
	return &envelope.FieldError{EventType: eventType, Index: -1, Field: field, Err: err}
}

// tasks decodes the payload, upcasts it to every version that has handlers, and returns a task for each handler, or for
// those of an action. A tombstone is a zero event of each version. If the codec says that something is away, the
// attempts on the tasks decode the payload again.
func (p *Processor) tasks(
	ctx context.Context, route *Route, m *envelope.Message, meta *envelope.Received, action string,
) ([]Task, error) {
	var event any
	var err error
	if !meta.Tombstone {
		event, err = p.decodePayload(EventContext(ctx, meta), &route.Kind, m)
	}
	if err != nil && !IsUnavailable(err) {
		return nil, err
	}
	var tasks []Task
	for i, v := range route.versions {
		if err == nil && v.up != nil && !meta.Tombstone {
			event = v.up(event)
		}
		for _, h := range v.handlers {
			if action != "" && action != h.Action {
				continue
			}
			if meta.Tombstone {
				event = reflect.Zero(h.GoType).Interface()
			}
			t := Task{Handler: h, Arrival: Arrival{event, *meta}}
			if err != nil {
				t.late = &latePayload{err: err, route: route, version: i, message: m}
			}
			tasks = append(tasks, t)
		}
	}
	return tasks, nil
}

// latePayload is a payload that could not be decoded yet, because something that its codec needs is away. Such an error
// is that of an attempt on the task, as if its handler had returned it.
type latePayload struct {
	err     error // of the first attempt, which does not decode the payload again; nil after it
	route   *Route
	version int // index of the version that the handler takes
	message *envelope.Message
}

// decodeLate decodes the payload of a task that has a late one. A payload that cannot be decoded at all ends the task.
func (p *Processor) decodeLate(ctx context.Context, t *Task) (err error) {
	if t.late == nil {
		return nil
	}
	if err, t.late.err = t.late.err, nil; err != nil {
		return err
	}
	bounded, cancel := context.WithTimeout(EventContext(ctx, &t.Meta), p.Rules.HandlerTimeout)
	defer cancel()
	p.CallHost(ctx, "decoder, codec or upcaster", t.Action, &t.Meta, func() {
		err = Guard(func() (err error) {
			t.Event, err = p.decodePayload(bounded, &t.late.route.Kind, t.late.message)
			for _, v := range t.late.route.versions[:t.late.version+1] {
				if err == nil && v.up != nil {
					t.Event = v.up(t.Event)
				}
			}
			return err
		})
	})
	if err != nil && !IsUnavailable(err) {
		return Permanent(err)
	}
	return err
}

// decodePayload reads a payload with the codec of its content type.
func (p *Processor) decodePayload(ctx context.Context, kind *EventType, m *envelope.Message) (any, error) {
	codec, err := p.codecFor(kind, m.ContentType)
	if err != nil {
		return nil, envelope.Unreadable(m.Type, "content-type", err)
	}
	event := reflect.New(kind.GoType)
	if err := codec.Decode(ctx, m.Data, event.Interface()); IsUnavailable(err) {
		return nil, fmt.Errorf("decode the event: %w", err)
	} else if err != nil {
		return nil, envelope.Unreadable(m.Type, "data", fmt.Errorf("%w: %w", check.ErrMalformed, err))
	}
	return event.Elem().Interface(), nil
}

// codecFor returns the codec for a content type: the codec of the event type, one of the additional codecs, or JSON.
// JSON comes last, for events that were recorded before their type got another codec.
func (p *Processor) codecFor(kind *EventType, contentType string) (Codec, error) {
	media := envelope.MediaType(contentType)
	if media == "" || media == envelope.MediaType(kind.Codec.ContentType) {
		return kind.Codec, nil
	}
	for _, codec := range p.Rules.Codecs {
		if media == envelope.MediaType(codec.ContentType) {
			return codec, nil
		}
	}
	if envelope.IsJSONType(contentType) {
		return p.Rules.JSON, nil
	}
	return Codec{}, fmt.Errorf("%.100q %w: no codec for it", contentType, check.ErrMalformed)
}
