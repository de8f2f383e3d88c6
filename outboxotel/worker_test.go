package outboxotel_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// worker runs a worker until the test ends or stop is called.
func (s *scene) worker(t testing.TB, cfg outbox.WorkerConfig, handlers ...outbox.Handler) (w *outbox.Worker, stop func()) {
	t.Helper()
	cfg.Schema, cfg.From, cfg.PollInterval, cfg.Logger = s.schema, outbox.FromStart, 10*time.Millisecond, quiet
	w, err := outbox.NewWorker(s.db, s.events, "bus", s.tel.Worker("bus", cfg), handlers...)
	require.NoError(t, err)
	return w, testenv.Run(t, w.Run)
}

func (s *scene) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := s.db.Exec(t.Context(), pg.InSchema(sql, s.schema), args...)
	require.NoError(t, err)
}

// The metrics of a worker count what it does, and what is left to do, by stream and action.
func TestWorkerMetrics(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	s.watch(t)
	cfg := outbox.WorkerConfig{}
	cfg.Retry.RetryWait, cfg.Retry.MaxRetries, cfg.Retry.MaxOutage = time.Millisecond, 1, -1
	count := outbox.Handle("COUNT", func(ctx context.Context, tx pgx.Tx, e placed, m outbox.Metadata) error { return nil })
	w, stop := s.worker(t, cfg, count,
		outbox.HandleNoTx("MAIL", func(ctx context.Context, e placed, m outbox.Metadata) error {
			switch {
			case e.ID == "bad":
				return outbox.Permanent(context.DeadlineExceeded)
			case e.ID == "late" && m.Attempt == 1:
				return errors.New("try again")
			}
			return nil
		}))
	s.commit(t.Context(), t, orders("1", "bad", "late")...)
	group := []string{"messaging.consumer.group.name", "bus"}
	of := func(action string, more ...string) []string {
		return append([]string{"messaging.destination.name", s.orders, "outbox.action", action}, append(more, group...)...)
	}
	var m metrics
	eventually(t, func() bool {
		m = s.collect(t)
		return m.value("outbox.worker.processed", of("COUNT")...) == 3 && m.value("outbox.worker.processed", of("MAIL")...) == 4
	}, "not all was handled: %v", &m)
	m = s.collect(t) // gauges are read before counters
	for _, tt := range []struct {
		want float64
		name string
		is   []string
	}{
		{3, "outbox.worker.processed", of("COUNT", "outbox.result", "done", "cloudevents.event_type", placedType)},
		{2, "outbox.worker.processed", of("MAIL", "outbox.result", "done")},
		{1, "outbox.worker.processed", of("MAIL", "outbox.result", "retried")},
		{1, "outbox.worker.processed", of("MAIL", "outbox.result", "dead", "cloudevents.event_type", placedType)},
		{1, "outbox.worker.failed", of("MAIL", "error.type", "timeout")},
		{1, "outbox.worker.failed", of("MAIL", "error.type", "_OTHER")},
		{4, "messaging.process.duration", of("MAIL", "messaging.system", "postgresql")},
		{4, "messaging.client.consumed.messages", of("MAIL")},
		{1, "outbox.worker.dead", of("MAIL")},
		{0, "outbox.worker.dead", of("COUNT")},
		{1, "outbox.worker.breaker.state", append(group, "outbox.action", "MAIL", "outbox.state", "closed")},
		{0, "outbox.worker.breaker.state", append(group, "outbox.action", "MAIL", "outbox.state", "open")},
		{0, "outbox.worker.backlog", group},
		{1, "outbox.group.waiting", of("MAIL", "outbox.status", "dead")},
		{1, "outbox.watch.up", []string{"outbox.watched", "workers"}},
	} {
		require.Equal(t, tt.want, m.value(tt.name, tt.is...), "%s %v\n%v", tt.name, tt.is, m[tt.name])
	}
	stop()

	s.commit(t.Context(), t, orders("2", "3")...)
	m = s.collect(t)
	require.Equal(t, 2.0, m.value("outbox.worker.backlog", group...))
	require.Equal(t, 2.0, m.value("outbox.group.waiting", append(group, "outbox.status", "pending")...))
	require.Zero(t, m.value("outbox.worker.pending", group...))
	require.NoError(t, w.Pause())
	again := testenv.Run(t, w.Run)
	eventually(t, func() bool { m = s.collect(t); return m.value("outbox.worker.pending", group...) == 4 }, "no deliveries: %v", &m)
	require.Equal(t, []float64{2, 2}, []float64{m.value("outbox.worker.pending", of("COUNT")...), m.value("outbox.worker.pending", of("MAIL")...)})
	require.Positive(t, m.value("outbox.worker.pending.age", of("MAIL")...))
	require.Less(t, m.value("outbox.worker.pending.age", of("MAIL")...), testenv.Patience.Seconds())
	require.NoError(t, w.Resume())
	eventually(t, func() bool { m = s.collect(t); return m.value("outbox.worker.processed", "outbox.result", "done") == 9 }, "not resumed: %v", &m)
	again()
	m = s.collect(t)
	require.Contains(t, m, "outbox.worker.pending", "0 is reported, and not nothing")
	require.Zero(t, m.value("outbox.worker.pending", of("MAIL")...))
	require.Empty(t, unboundedAttributes(m))

	// It has the notes of what it handles once more: with a transaction that is a repeat.
	s.exec(t, `UPDATE {schema}.event_delivery SET status = 'PENDING', processed_at = NULL, next_retry_at = now() WHERE action = 'COUNT'`)
	s.worker(t, cfg, count)
	eventually(t, func() bool {
		m = s.collect(t)
		return m.value("outbox.worker.processed", of("COUNT", "outbox.result", "repeated")...) == 5
	}, "no repeats: %v", &m)
}

// Attempts of workers that are gone are counted by the one that takes their events over.
func TestWorkerMetricsOfOthers(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	s.watch(t)
	cfg := outbox.WorkerConfig{Lease: time.Second}
	handler := outbox.HandleNoTx("MAIL", func(ctx context.Context, e placed, m outbox.Metadata) error { return nil })
	w, stop := s.worker(t, cfg, handler)
	require.NoError(t, w.Pause())
	s.commit(t.Context(), t, orders("1", "2")...)
	var m metrics
	eventually(t, func() bool { m = s.collect(t); return m.value("outbox.worker.pending") == 2 }, "no deliveries: %v", &m)
	stop()
	s.exec(t, `UPDATE {schema}.event_delivery SET status = 'PROCESSING', locked_by = 'gone', locked_until = now() - interval '1 hour',
		last_attempt_at = updated_at + interval '1 s', attempt_count = CASE aggregate_id WHEN '1' THEN max_attempts ELSE 1 END`)
	s.worker(t, cfg, handler)
	eventually(t, func() bool {
		m = s.collect(t)
		return m.value("outbox.worker.processed", "outbox.result", "dead", "outbox.action", "MAIL") == 1 &&
			m.value("outbox.worker.processed", "outbox.result", "retried", "outbox.action", "MAIL") == 1 &&
			m.value("outbox.worker.processed", "outbox.result", "done") == 1
	}, "not counted: %v", &m)
	require.Equal(t, 2.0, m.value("outbox.worker.failed", "error.type", "stale", "messaging.destination.name", s.orders))
}

// Events of types that the group has no handler for are counted by stream.
func TestWorkerMetricsOfUnknownTypes(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		unknown outbox.UnknownTypes
		result  string
	}{{outbox.SkipUnknown, "unknown"}, {outbox.DeadLetterUnknown, "dead"}} {
		t.Run(tt.result, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, sdk.AlwaysSample())
			s.watch(t)
			cfg := outbox.WorkerConfig{}
			cfg.Unknown = tt.unknown
			s.worker(t, cfg, outbox.HandleNoTx("MAIL", func(ctx context.Context, e placed, m outbox.Metadata) error { return nil }))
			s.commit(t.Context(), t, orders("1")...)
			s.exec(t, `INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, topic)
				VALUES (gen_random_uuid(), 'test.order.placed.v2', 'test', 'Order', '1', '{}', 'application/json', now(), $1)`, s.orders)
			var m metrics
			eventually(t, func() bool { m = s.collect(t); return m.value("outbox.worker.processed") == 2 }, "not counted: %v", &m)
			require.Equal(t, 1.0, m.value("outbox.worker.processed", "outbox.result", tt.result, "messaging.destination.name", s.orders, "cloudevents.event_type", "", "outbox.action", ""))
		})
	}
}

// One trace goes from the caller's span to the handlers of a worker, and on with the events that
// these record. No Kafka is in it.
func TestTraceOfWorker(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	s.worker(t, outbox.WorkerConfig{},
		outbox.Handle("SHIP", func(ctx context.Context, tx pgx.Tx, e placed, m outbox.Metadata) error {
			return s.rec.Record(ctx, tx, shipped{e.ID, time.Now()})
		}),
		outbox.HandleNoTx("TRACK", func(ctx context.Context, e shipped, m outbox.Metadata) error { return nil }))
	ctx, request := s.tracers.Tracer("test").Start(t.Context(), "request")
	s.commit(ctx, t, orders("1")...)
	request.End()

	tracked := s.one(t, "process "+s.parcels)
	processed, records := s.one(t, "process "+s.orders), s.named("record")
	require.Len(t, records, 2)
	requireChild(t, records[0], s.one(t, "request"))
	requireChild(t, processed, records[0])
	requireChild(t, records[1], processed)
	requireChild(t, tracked, records[1])
	require.Equal(t, trace.SpanKindConsumer, processed.SpanKind)
	attrs := attributesOf(processed)
	require.Len(t, attrs["messaging.message.id"], 36)
	delete(attrs, "messaging.message.id")
	require.Equal(t, map[string]string{
		"test": "yes", "messaging.system": "postgresql", "messaging.operation.name": "process", "messaging.operation.type": "process",
		"messaging.destination.name": s.orders, "messaging.consumer.group.name": "bus", "cloudevents.event_type": placedType, "outbox.action": "SHIP",
	}, attrs)
}
