package itest

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

const hookCalled = "stripe.invoice.paid.v1"

// hook returns a raw event of a type that no registry has, changed.
func hook(change func(*outbox.RawEvent)) outbox.RawEvent {
	e := outbox.RawEvent{EventType: hookCalled, AggregateType: "Invoice", AggregateID: "in_1", Payload: []byte(`{"b":1,"a":[2]}`), Time: noon}
	if change != nil {
		change(&e)
	}
	return e
}

// gateway returns a registry that takes raw events, with types of its own.
func gateway(t testing.TB, more ...outbox.Definition) *outbox.Registry {
	t.Helper()
	events, err := outbox.NewRegistry("gateway", append(more, outbox.AllowRaw(),
		outbox.Event(parcelSent, "Parcel", parcel.Number),
		outbox.Event(rawSent, "Raw", rawParcel.Number).Topic("raw").Key(rawParcel.To).Codec(rawCodec))...)
	require.NoError(t, err)
	return events
}

// A raw event is stored as it is, by each statement.
func TestRecordRaw(t *testing.T) {
	t.Parallel()
	c := newCounter(t, gateway(t))
	rec := c.recorder(t, outbox.RecorderConfig{Headers: func(_ context.Context, e outbox.DomainEvent) map[string]string {
		if raw, is := e.(outbox.RawEvent); is {
			return map[string]string{"kind": raw.EventType}
		}
		return nil
	}})
	avro := hook(func(e *outbox.RawEvent) {
		e.ContentType, e.DataSchema, e.Payload = "application/avro", "urn:schema:7", []byte{0, 1, 255}
	})
	id := uuid.New()
	own := outbox.With(&avro, outbox.EventOptions{
		ID: id, Topic: "hooks", Key: "k", Attributes: map[string]string{"schemaversion": "3"}, Headers: map[string]string{"tenant": "a"},
	})
	ctx := outbox.WithCorrelationID(background, "corr")
	many := make([]outbox.DomainEvent, 500)
	for i := range many {
		many[i] = hook(nil)
	}
	for _, add := range []func(tx pgx.Tx) error{
		func(tx pgx.Tx) error { return rec.Record(ctx, tx, hook(nil)) },
		func(tx pgx.Tx) error { return rec.Record(ctx, tx, own, good) },
		func(tx pgx.Tx) error {
			var batch pgx.Batch
			return errors.Join(rec.Queue(ctx, &batch, own), tx.SendBatch(ctx, &batch).Close())
		},
		func(tx pgx.Tx) error {
			sql, args, err := rec.Statement(ctx, own, hook(nil))
			if err == nil {
				_, err = tx.Exec(ctx, sql, args...)
			}
			return err
		},
		func(tx pgx.Tx) error { return rec.Record(ctx, tx, many...) },
	} {
		require.NoError(t, pgx.BeginFunc(ctx, c.db, add))
	}
	rows := c.rows(t)
	require.Len(t, rows, 6+len(many))
	for i, r := range rows {
		if i == 2 { // the parcel
			continue
		}
		require.Equal(t, []any{hookCalled, "gateway", "Invoice", "in_1", noon}, []any{r.EventType, r.Source, r.AggregateType, r.AggregateID, r.OccurredAt})
		if r.EventID != id {
			require.Equal(t, `{"a": [2], "b": 1}`, *r.Payload)
			require.Equal(t, "application/json", r.ContentType)
			require.Nil(t, r.Topic, "by convention")
			require.JSONEq(t, `{"correlationid": "corr", "kind": "stripe.invoice.paid.v1"}`, *r.Headers)
			continue
		}
		require.Nil(t, r.Payload)
		require.Equal(t, []byte{0, 1, 255}, r.PayloadBytes)
		require.Equal(t, []string{"application/avro", "hooks", "k"}, []string{r.ContentType, *r.Topic, *r.PartitionKey})
		require.JSONEq(t, `{"correlationid": "corr", "ce_dataschema": "urn:schema:7", "ce_schemaversion": "3", "tenant": "a", "kind": "stripe.invoice.paid.v1"}`, *r.Headers)
	}
	c.commit(t, background, rec, outbox.With(hook(nil), outbox.EventOptions{NotBefore: noon}))
	var delayed int
	require.NoError(t, c.db.QueryRow(background, c.sql(`SELECT count(*) FROM {s}.outbox_delayed WHERE event_type = $1`), hookCalled).Scan(&delayed))
	require.Equal(t, 1, delayed)
}

// What other events may not have, raw ones may not have either.
func TestRecordRefusesRaw(t *testing.T) {
	t.Parallel()
	c := newCounter(t, gateway(t))
	for _, tt := range []struct {
		name      string
		change    func(*outbox.RawEvent)
		eventType string
		field     string
		want      error
	}{
		{"no type", func(e *outbox.RawEvent) { e.EventType = "" }, "", "event_type", outbox.ErrEmpty},
		{"a type without a topic", func(e *outbox.RawEvent) { e.EventType = "INVOICE" }, "INVOICE", "event_type", outbox.ErrMalformed},
		{"a type that is too long", func(e *outbox.RawEvent) { e.EventType = strings.Repeat("x", 101) }, strings.Repeat("x", 101), "event_type", outbox.ErrTooLong},
		{"a type with NUL", func(e *outbox.RawEvent) { e.EventType = "a\x00" }, "a\x00", "event_type", outbox.ErrNUL},
		{"no aggregate type", func(e *outbox.RawEvent) { e.AggregateType = "" }, hookCalled, "aggregate_type", outbox.ErrEmpty},
		{"an aggregate type that is too long", func(e *outbox.RawEvent) { e.AggregateType = strings.Repeat("x", 101) }, hookCalled, "aggregate_type", outbox.ErrTooLong},
		{"no aggregate id", func(e *outbox.RawEvent) { e.AggregateID = "" }, hookCalled, "aggregate_id", outbox.ErrEmpty},
		{"an aggregate id that is too long", func(e *outbox.RawEvent) { e.AggregateID = strings.Repeat("x", 256) }, hookCalled, "aggregate_id", outbox.ErrTooLong},
		{"no time", func(e *outbox.RawEvent) { e.Time = time.Time{} }, hookCalled, "occurred_at", outbox.ErrTime},
		{"no payload", func(e *outbox.RawEvent) { e.Payload = nil }, hookCalled, "payload", outbox.ErrJSON},
		{"no JSON", func(e *outbox.RawEvent) { e.Payload = []byte(`{`) }, hookCalled, "payload", outbox.ErrJSON},
		{"no JSON, of another JSON type", func(e *outbox.RawEvent) { e.ContentType, e.Payload = "application/json; charset=utf-8", []byte(`{`) }, hookCalled, "payload", outbox.ErrMalformed},
		{"JSON with NUL", func(e *outbox.RawEvent) { e.Payload = []byte(`"\u0000"`) }, hookCalled, "payload", outbox.ErrNUL},
		{"a payload that is too large", func(e *outbox.RawEvent) { e.ContentType, e.Payload = "text/plain", make([]byte, 960<<10+1) }, hookCalled, "payload", outbox.ErrTooLarge},
		{"a content type that is none", func(e *outbox.RawEvent) { e.ContentType = "json" }, hookCalled, "content_type", outbox.ErrMalformed},
		{"a payload that is a CloudEvent", func(e *outbox.RawEvent) { e.ContentType = "application/cloudevents+json" }, hookCalled, "content_type", outbox.ErrMalformed},
		{"a schema that is no attribute", func(e *outbox.RawEvent) { e.DataSchema = "a\nb" }, hookCalled, "attributes", outbox.ErrMalformed},

		{"another aggregate type than the registered one", func(e *outbox.RawEvent) { e.EventType = parcelSent }, parcelSent, "aggregate_type", outbox.ErrMalformed},
		{"another content type than the registered one", func(e *outbox.RawEvent) { e.EventType, e.AggregateType, e.ContentType = parcelSent, "", "text/plain" }, parcelSent, "content_type", outbox.ErrMalformed},
		{"no key, where the registered type has one", func(e *outbox.RawEvent) { e.EventType, e.AggregateType = rawSent, "" }, rawSent, "partition_key", outbox.ErrEmpty},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c.requireRefused(t, background, c.rec, tt.want, refusal{tt.eventType, 1, tt.field}, good, hook(tt.change))
		})
	}
	err := c.rec.Record(background, c.begin(t), hook(func(e *outbox.RawEvent) { e.EventType, e.AggregateType, e.ContentType = parcelSent, "", "text/plain" }))
	require.ErrorContains(t, err, `content_type "text/plain" is malformed: the event type is registered with "application/json"`)

	closed := newCounter(t, parcels(t))
	closed.requireRefused(t, background, closed.rec, outbox.ErrUnregistered, refusal{hookCalled, 0, "event"}, hook(nil))
	require.ErrorContains(t, closed.rec.Record(background, closed.begin(t), &outbox.RawEvent{}), "the registry has no AllowRaw")
	_, err = outbox.NewRegistry("s", outbox.Event(hookCalled, "Invoice", func(e outbox.RawEvent) string { return e.AggregateID }))
	require.ErrorContains(t, err, "AllowRaw takes such events")
	_, err = outbox.NewConsumer(nil, nil, gateway(t), "g", outbox.ConsumerConfig{},
		outbox.HandleNoTx("SEEN", func(context.Context, outbox.RawEvent, outbox.Metadata) error { return nil }))
	require.ErrorIs(t, err, outbox.ErrUnregistered)
}

// A raw event goes where its registered type goes, or where the resolver or its own options say.
func TestTopicOfRaw(t *testing.T) {
	t.Parallel()
	resolve := outbox.ResolveTopics(func(eventType string) (string, error) {
		switch eventType {
		case "BAD":
			return "", errTest
		case "INVOICE":
			return "invoices", nil
		}
		return "", nil
	})
	c := newCounter(t, gateway(t, resolve))
	typed := func(name string) outbox.RawEvent { return hook(func(e *outbox.RawEvent) { e.EventType = name }) }
	known := outbox.RawEvent{EventType: rawSent, AggregateID: "1", Time: noon}
	for want, e := range map[string]outbox.DomainEvent{
		"invoice-events": hook(nil),
		"invoices":       typed("INVOICE"),
		"own":            outbox.With(typed("BAD"), outbox.EventOptions{Topic: "own"}),
		"raw":            outbox.With(known, outbox.EventOptions{Key: "to"}),
		"elsewhere":      outbox.With(known, outbox.EventOptions{Key: "to", Topic: "elsewhere"}),
	} {
		r, err := c.rec.KafkaRecord(background, e)
		require.NoError(t, err)
		require.Equal(t, want, r.Topic)
	}
	c.requireRefused(t, background, c.rec, errTest, refusal{"BAD", 0, "topic"}, typed("BAD"))
}

// Handlers of a registered type get raw events of it: from Kafka and from PostgreSQL.
func TestHandlersGetRaw(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1, outbox.AllowRaw())
	testenv.Run(t, s.relay(t, quick).Run)
	var got arrivals
	var sold []string
	h := outbox.HandleNoTx("SEEN", func(ctx context.Context, e sale, m outbox.Metadata) error {
		got.mu.Lock()
		sold = append(sold, e.Product)
		got.mu.Unlock()
		got.add(ctx, m)
		return nil
	})
	cfg := outbox.HandlerConfig{Schema: s.schema, From: outbox.FromStart}
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: cfg}, h).Run)
	w, err := outbox.NewWorker(s.db, s.events, "workers", outbox.WorkerConfig{HandlerConfig: cfg, PollInterval: 20 * time.Millisecond}, h)
	require.NoError(t, err)
	testenv.Run(t, w.Run)
	event := outbox.RawEvent{EventType: saleType, AggregateID: "p-7", Payload: []byte(`{"product": "p-7", "amount": 1}`), Time: noon}
	require.NoError(t, pgx.BeginFunc(background, s.db, func(tx pgx.Tx) error {
		return s.rec.Record(background, tx, outbox.With(event, outbox.EventOptions{Attributes: map[string]string{"via": "hook"}}))
	}))
	seen, _ := got.await(t, 2)
	require.Equal(t, []string{"p-7", "p-7"}, sold)
	for _, m := range seen {
		require.Equal(t, []string{saleType, "p-7", "p-7", "Product", "hook"}, []string{m.Type, m.Subject, m.Key(), m.Extensions["aggregatetype"], m.Extensions["via"]})
	}
}
