package outboxotel_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxotel"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// requireChild requires a span to be the child of another.
func requireChild(t *testing.T, child, parent tracetest.SpanStub) {
	t.Helper()
	require.Equal(t, parent.SpanContext.TraceID(), child.SpanContext.TraceID())
	require.Equal(t, parent.SpanContext.SpanID(), child.Parent.SpanID(), "%s is no child of %s", child.Name, parent.Name)
}

// One trace goes from the caller's span through outbox and Kafka to the handler, and on
// with the events that the handler records.
func TestOneTrace(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{}, outbox.Handle("SHIP", func(ctx context.Context, tx pgx.Tx, e placed, m outbox.Metadata) error {
		return s.rec.Record(ctx, tx, shipped{e.ID, time.Now()})
	})).Run)
	ctx, request := s.tracers.Tracer("test").Start(t.Context(), "request")
	s.commit(ctx, t, orders("1")...)
	request.End()
	before := time.Now()
	s.relay(t, outbox.RelayConfig{})

	sentParcel := s.one(t, "send "+s.parcels)
	records := s.named("record")
	require.Len(t, records, 2)
	caller, sent, processed := s.one(t, "request"), s.one(t, "send "+s.orders), s.one(t, "process "+s.orders)
	requireChild(t, records[0], caller)
	requireChild(t, sent, records[0])
	requireChild(t, processed, records[0])
	requireChild(t, records[1], processed)
	requireChild(t, sentParcel, records[1])

	require.Equal(t, trace.SpanKindProducer, records[0].SpanKind)
	require.Equal(t, trace.SpanKindClient, sent.SpanKind)
	require.Equal(t, trace.SpanKindConsumer, processed.SpanKind)
	require.WithinRange(t, sent.StartTime, before, time.Now())
	require.WithinRange(t, sent.EndTime, sent.StartTime, time.Now())
	require.Equal(t, map[string]string{
		"test": "yes", "messaging.system": "kafka", "messaging.operation.name": "record", "messaging.operation.type": "create",
	}, attributesOf(records[0]))
	attrs := attributesOf(sent)
	require.Len(t, attrs["messaging.message.id"], 36)
	require.Equal(t, attrs["messaging.message.id"], attributesOf(processed)["messaging.message.id"])
	delete(attrs, "messaging.message.id")
	delete(attrs, "messaging.message.body.size")
	require.Equal(t, map[string]string{
		"test": "yes", "messaging.system": "kafka", "messaging.operation.name": "send", "messaging.operation.type": "send",
		"messaging.destination.name": s.orders, "messaging.destination.partition.id": "0", "messaging.kafka.message.key": "1", "messaging.kafka.offset": "0",
		"outbox.relay.name": "default", "outbox.retry": "false",
	}, attrs)
	for _, span := range []tracetest.SpanStub{sent, processed} {
		require.Len(t, span.Links, 1, span.Name)
		require.Equal(t, records[0].SpanContext.SpanID(), span.Links[0].SpanContext.SpanID(), span.Name)
	}
	attrs = attributesOf(processed)
	delete(attrs, "messaging.message.id")
	require.Equal(t, map[string]string{
		"test": "yes", "messaging.system": "kafka", "messaging.operation.name": "process", "messaging.operation.type": "process",
		"messaging.destination.name": s.orders, "messaging.destination.partition.id": "0", "messaging.consumer.group.name": s.orders,
		"messaging.kafka.message.key": "1", "messaging.kafka.offset": "0", "cloudevents.event_type": placedType, "outbox.action": "SHIP",
	}, attrs)
}

// The send of the events of one Record has one span. A handler of several events starts
// a trace with a link to each Record.
func TestTraceOfBatch(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	s.commit(t.Context(), t, orders("1", "2")...)
	s.commit(t.Context(), t, orders("3")...)
	stop := s.relay(t, outbox.RelayConfig{})
	eventually(t, func() bool { return len(s.named("send "+s.orders)) == 2 }, "no spans of sends")
	stop()
	var linked tracetest.SpanStub
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{}, outbox.HandleBatch("COUNT", func(ctx context.Context, tx pgx.Tx, es []outbox.Received[placed]) error {
		return nil
	})).Run)
	linked = s.one(t, "process "+s.orders)

	records, sends := s.named("record"), s.named("send "+s.orders)
	require.Equal(t, "2", attributesOf(records[0])["messaging.batch.message_count"])
	require.Equal(t, "2", attributesOf(sends[0])["messaging.batch.message_count"])
	require.Empty(t, attributesOf(sends[0])["messaging.message.id"])
	require.Equal(t, "0", attributesOf(sends[0])["messaging.destination.partition.id"])
	require.Empty(t, attributesOf(sends[1])["messaging.batch.message_count"])
	requireChild(t, sends[0], records[0])
	requireChild(t, sends[1], records[1])
	require.False(t, linked.Parent.IsValid())
	require.Equal(t, "3", attributesOf(linked)["messaging.batch.message_count"])
	require.Len(t, linked.Links, 2)
	for i, link := range linked.Links {
		require.Equal(t, records[i].SpanContext.SpanID(), link.SpanContext.SpanID())
	}
	require.Empty(t, linked.Links[0].Attributes, "it is that of two events")
	of := attribute.NewSet(linked.Links[1].Attributes...)
	message, _ := of.Value("messaging.message.id")
	require.Equal(t, attributesOf(sends[1])["messaging.message.id"], message.AsString())
}

// A service that does not sample makes no spans, and its traceparent says so.
func TestUnsampledTrace(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.ParentBased(sdk.NeverSample()))
	seen := make(chan trace.SpanContext, 1)
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{}, outbox.HandleNoTx("SEE", func(ctx context.Context, e placed, m outbox.Metadata) error {
		require.Regexp(t, `-00$`, m.Extensions["traceparent"])
		seen <- trace.SpanContextFromContext(ctx)
		return nil
	})).Run)
	ctx, request := s.tracers.Tracer("test").Start(t.Context(), "request")
	s.commit(ctx, t, orders("1")...)
	s.relay(t, outbox.RelayConfig{})
	of := <-seen
	require.Equal(t, request.SpanContext().TraceID(), of.TraceID())
	require.False(t, of.IsSampled())
	require.Empty(t, s.spans.GetSpans())
}

// Spans have the errors: of an event that was rejected, of a handler.
func TestFailedSpans(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	require.Error(t, s.rec.Queue(t.Context(), &pgx.Batch{}, placed{ID: "", At: time.Now()}))
	rejected := s.one(t, "record")
	require.Equal(t, codes.Error, rejected.Status.Code)
	require.Equal(t, "invalid_event", attributesOf(rejected)["error.type"])

	s.commit(t.Context(), t, orders("1")...)
	s.relay(t, outbox.RelayConfig{})
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: -1}}}, outbox.HandleNoTx("FAIL", func(ctx context.Context, e placed, m outbox.Metadata) error {
		panic("no")
	})).Run)
	failed := s.one(t, "process "+s.orders)
	require.Equal(t, codes.Error, failed.Status.Code)
	require.Equal(t, "panic", attributesOf(failed)["error.type"])
}

// The send of an event that Kafka rejects has a span with the class of the error, in the trace of its Record.
func TestSpanOfRejectedSend(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	s.commit(t.Context(), t, tooLarge("1"))
	s.relay(t, outbox.RelayConfig{RetryInterval: time.Hour})
	sent := s.one(t, "send "+s.orders)
	requireChild(t, sent, s.one(t, "record"))
	require.Equal(t, codes.Error, sent.Status.Code)
	attrs := attributesOf(sent)
	require.Equal(t, "message_too_large", attrs["error.type"])
	require.NotContains(t, attrs, "messaging.kafka.offset")
	require.NotContains(t, attrs, "messaging.destination.partition.id")
	require.Equal(t, 1.0, s.collect(t).value("messaging.client.operation.duration", "error.type", "message_too_large"))
}

// The span of a tombstone says so.
func TestSpanOfTombstone(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	s.commit(t.Context(), t, outbox.With(orders("1")[0], outbox.EventOptions{Tombstone: true}))
	s.relay(t, outbox.RelayConfig{})
	require.Equal(t, "true", attributesOf(s.one(t, "send "+s.orders))["messaging.kafka.message.tombstone"])
}

// A consumer that runs within a span links to that. Records of other producers have keys that are null or no text, and
// tombstones.
func TestSpanOfForeignRecord(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	ctx, outside := s.tracers.Tracer("test").Start(t.Context(), "outside")
	cfg := s.tel.Consumer("g", outbox.ConsumerConfig{})
	for i, key := range [][]byte{nil, {0xff}, []byte("k")} {
		call := outbox.HandlerCall{Action: "A", Events: []outbox.Received[outbox.DomainEvent]{{Metadata: outbox.Metadata{
			ID: "1", Tombstone: i == 2, Kafka: &outbox.KafkaMetadata{Topic: "t", Key: key}, Extensions: map[string]string{"traceparent": elsewhere}}}}}
		require.NoError(t, cfg.Middleware[0](ctx, call, func(context.Context) error { return nil }))
		span := s.named("process t")[i]
		require.Equal(t, "b7ad6b7169203331", span.Parent.SpanID().String())
		require.Len(t, span.Links, 2)
		require.Equal(t, "b7ad6b7169203331", span.Links[0].SpanContext.SpanID().String())
		require.Equal(t, outside.SpanContext().SpanID(), span.Links[1].SpanContext.SpanID())
		attrs := attributesOf(span)
		if i < 2 {
			require.NotContains(t, attrs, "messaging.kafka.message.key")
			require.NotContains(t, attrs, "messaging.kafka.message.tombstone")
		} else {
			require.Equal(t, "k", attrs["messaging.kafka.message.key"])
			require.Equal(t, "true", attrs["messaging.kafka.message.tombstone"])
		}
	}
}

const elsewhere = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// A recorder continues the trace of a traceparent in the context without a span. Without
// a tracer, it passes the traceparent on as it is.
func TestTraceParentWithoutSpan(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	untraced, err := outboxotel.New(outboxotel.Config{TracerProvider: noop.NewTracerProvider()})
	require.NoError(t, err)
	ctx := outbox.WithTraceParent(t.Context(), elsewhere)
	record := func(rec *outbox.Recorder) string {
		record, err := rec.KafkaRecord(ctx, placed{ID: "1", At: time.Now()})
		require.NoError(t, err)
		for _, h := range record.Headers {
			if h.Key == "traceparent" {
				return string(h.Value)
			}
		}
		return ""
	}
	require.Equal(t, elsewhere, record(s.recorder(t, untraced.Recorder(outbox.RecorderConfig{}))))
	s.commit(ctx, t, orders("1")...)
	recorded := s.one(t, "record")
	require.Equal(t, "b7ad6b7169203331", recorded.Parent.SpanID().String())
	require.Equal(t, "0af7651916cd43dd8448eb211c80319c", recorded.SpanContext.TraceID().String())
	var stored string
	require.NoError(t, s.db.QueryRow(t.Context(), `SELECT headers->>'traceparent' FROM `+pgx.Identifier{s.schema, "outbox"}.Sanitize()).Scan(&stored))
	require.Equal(t, "00-0af7651916cd43dd8448eb211c80319c-"+recorded.SpanContext.SpanID().String()+"-01", stored)

	own := func(context.Context) string { return elsewhere }
	ctx = t.Context()
	require.Equal(t, elsewhere, record(s.recorder(t, untraced.Recorder(outbox.RecorderConfig{TraceParent: own}))))
}

// Without a tracer, a consumer does not touch the spans of others.
func TestNoTracer(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	untraced, err := outboxotel.New(outboxotel.Config{TracerProvider: noop.NewTracerProvider()})
	require.NoError(t, err)
	ctx, span := s.tracers.Tracer("test").Start(t.Context(), "mine")
	cfg := untraced.Consumer("g", outbox.ConsumerConfig{})
	call := outbox.HandlerCall{Action: "A", Events: []outbox.Received[outbox.DomainEvent]{{Metadata: outbox.Metadata{Extensions: map[string]string{"traceparent": elsewhere}}}}}
	require.EqualError(t, cfg.Middleware[0](ctx, call, func(context.Context) error { return errors.New("no") }), "no")
	require.True(t, span.IsRecording())
	require.Empty(t, s.spans.GetSpans())
}
