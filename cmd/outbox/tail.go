package main

import (
	"context"
	"encoding/json"
	"flag"
	"time"

	"github.com/outboxgo/outbox/outboxops"
)

var tailCommand = command{
	name:    "tail",
	summary: "show events as they are recorded, until Ctrl-C",
	about: `
Shows events once their transactions commit, sent or not. With --json each event
is a line, with payload and headers.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var t tailFlags
		fs.StringVar(&t.filter.Type, "type", "", "`TYPE` of the event, shop.order.created.v1")
		fs.Var(&t.of, "aggregate", "`TYPE[/ID]` of the aggregate, Order/42")
		fs.StringVar(&t.topic, "topic", "", "`NAME` topic of the event")
		fs.StringVar(&t.key, "key", "", "`KEY` of the record")
		fs.BoolVar(&t.payload, "payload", false, "with payloads")
		fs.IntVar(&t.limit, "limit", 0, "`NUMBER` of events, then stop")
		return t.run
	},
}

type tailFlags struct {
	filter     outboxops.EventFilter
	of         aggregate
	topic, key string
	payload    bool
	limit      int
}

func (t *tailFlags) run(ctx context.Context, e *env) error {
	if t.limit < 0 {
		return usagef("--limit %d: must not be negative", t.limit)
	}
	inspector, err := e.inspector(ctx)
	if err != nil {
		return err
	}
	t.filter.AggregateType, t.filter.AggregateID = t.of.kind, t.of.id
	shown := 0
	for event, err := range inspector.Tail(ctx, t.filter) {
		if err == nil && !t.picks(event) {
			continue
		}
		if err == nil {
			err = t.show(e, event)
		}
		if shown++; err != nil || shown == t.limit {
			return err
		}
	}
	return nil
}

func (t *tailFlags) picks(event outboxops.RecordedEvent) bool {
	return (t.topic == "" || event.Topic == t.topic) && (t.key == "" || event.Key == t.key)
}

// recordedJSON is a line of tail.
type recordedJSON struct {
	OutboxID      int64             `json:"outbox_id"`
	EventID       string            `json:"event_id"`
	Type          string            `json:"type"`
	Source        string            `json:"source"`
	AggregateType string            `json:"aggregate_type"`
	AggregateID   string            `json:"aggregate_id"`
	Topic         string            `json:"topic"`
	Key           string            `json:"key"`
	OccurredAt    time.Time         `json:"occurred_at"`
	CreatedAt     time.Time         `json:"created_at"`
	ExpiresAt     *time.Time        `json:"expires_at,omitempty"`
	Size          int               `json:"size"`
	ContentType   string            `json:"content_type"`
	Payload       json.RawMessage   `json:"payload,omitempty"`
	PayloadBase64 []byte            `json:"payload_base64,omitempty"`
	PayloadError  string            `json:"payload_error,omitempty"`
	Headers       map[string]string `json:"headers,omitempty"`
}

func recordedOf(event outboxops.RecordedEvent) recordedJSON {
	line := recordedJSON{OutboxID: event.OutboxID, EventID: event.EventID, Type: event.Type, Source: event.Source,
		AggregateType: event.AggregateType, AggregateID: event.AggregateID, Topic: event.Topic, Key: event.Key,
		OccurredAt: event.OccurredAt.UTC(), CreatedAt: event.CreatedAt.UTC(), ExpiresAt: optional(event.ExpiresAt), Size: event.Size, ContentType: event.ContentType, Headers: event.Headers}
	line.Payload, line.PayloadBase64 = body(event.Payload)
	line.PayloadError = errText(event.PayloadErr)
	return line
}

func (t *tailFlags) show(e *env, event outboxops.RecordedEvent) error {
	if e.json {
		return e.writeLine(recordedOf(event))
	}
	text := event.CreatedAt.Local().Format("15:04:05.000") + "  " + count(event.OutboxID) + "  " + event.Type + "  " +
		event.AggregateType + "/" + event.AggregateID + "  " + event.Topic + "  " + count(event.Size) + " B"
	text = visible(text)
	if e.outTTY {
		text = cut(text, e.width)
	}
	e.printf("%s\n", text)
	switch {
	case t.payload && event.PayloadErr != nil:
		e.printf("%s\n", visible(event.PayloadErr.Error()))
	case t.payload:
		e.printf("%s\n", payloadText(event.ContentType, event.Payload))
	}
	return nil
}
