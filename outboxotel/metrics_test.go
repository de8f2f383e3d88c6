package outboxotel_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxotel"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// tooLarge returns an event that is too large for the topics of a scene.
func tooLarge(id string) placed {
	e := placed{ID: id, At: time.Now(), Filler: make([]byte, 4000)}
	_, _ = rand.Read(e.Filler)
	return e
}

// The metrics of a relay and a consumer count what they do, number by number.
func TestMetrics(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	tried := false
	c := s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{RetryWait: time.Millisecond, MaxRetries: 1, MaxOutage: -1}}},
		outbox.Handle("COUNT", func(ctx context.Context, tx pgx.Tx, e placed, m outbox.Metadata) error { return nil }),
		outbox.HandleNoTx("MAIL", func(ctx context.Context, e placed, m outbox.Metadata) error {
			switch {
			case e.ID == "bad":
				return outbox.Permanent(context.DeadlineExceeded)
			case e.ID == "late" && !tried:
				tried = true
				return errors.New("try again")
			}
			return nil
		}))
	s.watch(t, c)

	require.Error(t, s.rec.Queue(t.Context(), &pgx.Batch{}, orders("")...))
	s.commit(t.Context(), t, orders("1", "bad", "late")...)
	s.commit(t.Context(), t, tooLarge("large"), placed{ID: "large", At: time.Now()})
	m := s.collect(t)
	require.Equal(t, []float64{5, 1}, []float64{m.value("outbox.recorder.events", "error.type", ""), m.value("outbox.recorder.events", "error.type", "invalid_event")})
	require.Zero(t, m.value("outbox.relay.pending"), "no relay has begun")

	testenv.Run(t, c.Run)
	again := s.relay(t, outbox.RelayConfig{Name: "again", Retry: outbox.RetryPolicy{MaxRetries: 1}, RetryInterval: 10 * time.Millisecond, HoldDead: true})
	eventually(t, func() bool { m = s.collect(t); return m.value("outbox.relay.stored", "outbox.status", "dead") == 1 }, "nothing is dead")
	again()
	topic := []string{"messaging.destination.name", s.orders}
	with := func(more ...string) []string { return append(topic[:2:2], more...) }
	eventually(t, func() bool {
		return s.collect(t).value("outbox.consumer.processed", with("outbox.action", "MAIL")...) == 3
	}, "what came first is not handled")
	s.relay(t, outbox.RelayConfig{RetryInterval: time.Hour})
	eventually(t, func() bool {
		m = s.collect(t)
		return m.value("outbox.consumer.processed", with("outbox.action", "COUNT")...) == 6 &&
			m.value("outbox.consumer.processed", with("outbox.action", "MAIL")...) == 6 &&
			m.value("outbox.relay.breaker.state", "outbox.relay.name", "default", "outbox.state", "closed") == 1 &&
			m.value("outbox.relay.stored", "outbox.relay.name", "default", "outbox.status", "parked") == 1 && m.value("outbox.consumer.lag") == 0
	}, "not all was handled: %v", &m)

	for _, tt := range []struct {
		want float64
		name string
		is   []string
	}{
		{3, "messaging.client.sent.messages", with("outbox.relay.name", "default", "error.type", "", "messaging.system", "kafka")},
		{1, "messaging.client.sent.messages", with("outbox.relay.name", "default", "error.type", "message_too_large")},
		{3, "messaging.client.sent.messages", with("outbox.relay.name", "again", "error.type", "", "messaging.operation.name", "send")},
		{1, "messaging.client.sent.messages", with("outbox.relay.name", "again", "error.type", "message_too_large", "outbox.retry", "false")},
		{1, "messaging.client.sent.messages", with("outbox.relay.name", "again", "error.type", "message_too_large", "outbox.retry", "true")},
		{3, "outbox.relay.publish.latency", with("outbox.relay.name", "default")},
		{1, "outbox.relay.rejected", with("outbox.relay.name", "again", "error.type", "message_too_large", "cloudevents.event_type", placedType)},
		{1, "outbox.relay.dead", with("outbox.relay.name", "again", "error.type", "message_too_large", "cloudevents.event_type", placedType)},
		{1, "outbox.relay.leader", []string{"outbox.relay.name", "default"}},
		{0, "outbox.relay.leader", []string{"outbox.relay.name", "again"}},
		{1, "outbox.relay.breaker.state", []string{"outbox.relay.name", "default"}},
		{1, "outbox.relay.breaker.state", []string{"outbox.relay.name", "again", "outbox.state", "unknown"}},
		{1, "outbox.relay.state", []string{"outbox.relay.name", "again"}},
		{1, "outbox.relay.state", []string{"outbox.relay.name", "again", "outbox.state", "unknown"}},
		{0, "outbox.relay.state", []string{"outbox.relay.name", "default", "outbox.state", "unknown"}},
		{0, "outbox.relay.pending", nil},
		{1, "outbox.relay.led", []string{"outbox.relay.name", "default"}},
		{0, "outbox.relay.led", []string{"outbox.relay.name", "again"}},
		{1, "outbox.relay.stored", []string{"outbox.relay.name", "default", "outbox.status", "failed"}},
		{1, "outbox.relay.keys", []string{"outbox.relay.name", "again", "outbox.state", "held"}},
		{1, "outbox.relay.keys", []string{"outbox.relay.name", "default", "outbox.state", "parked"}},
		{3, "outbox.consumer.processed", with("outbox.action", "COUNT", "outbox.result", "handled", "cloudevents.event_type", placedType)},
		{3, "outbox.consumer.processed", with("outbox.action", "COUNT", "outbox.result", "repeated")},
		{4, "outbox.consumer.processed", with("outbox.action", "MAIL", "outbox.result", "handled")},
		{1, "outbox.consumer.processed", with("outbox.action", "MAIL", "outbox.result", "dead_lettered")},
		{1, "outbox.consumer.processed", with("outbox.action", "MAIL", "outbox.result", "repeated")}, // what is dead
		{1, "outbox.consumer.failed", with("outbox.action", "MAIL", "error.type", "timeout")},
		{1, "outbox.consumer.failed", with("outbox.action", "MAIL", "error.type", "_OTHER")},
		{4, "messaging.client.consumed.messages", with("outbox.action", "MAIL", "error.type", "")},
		{1, "messaging.client.consumed.messages", with("outbox.action", "MAIL", "error.type", "_OTHER")},
		{6, "messaging.process.duration", with("outbox.action", "MAIL", "messaging.consumer.group.name", s.orders)},
		{3, "outbox.watch.up", nil},
	} {
		require.Equal(t, tt.want, m.value(tt.name, tt.is...), "%s %v\n%v", tt.name, tt.is, m[tt.name])
	}
	require.Positive(t, m.value("outbox.relay.batch.size", "outbox.relay.name", "default"))
	latency := m["outbox.relay.publish.latency"].Data.(metricdata.Histogram[float64]).DataPoints[0]
	require.Less(t, latency.Sum/float64(latency.Count), testenv.Patience.Seconds(), "in seconds")
	require.NotEmpty(t, latency.Exemplars, "of sampled events")
	require.Empty(t, unboundedAttributes(m))
}

// unboundedAttributes returns the attributes of metrics that are not in the closed list.
func unboundedAttributes(m metrics) (unknown []string) {
	known := regexp.MustCompile(`^(test|messaging\.(system|operation\.(name|type)|destination\.name|destination\.partition\.id|consumer\.group\.name)|` +
		`error\.type|cloudevents\.event_type|db\.collection\.name|outbox\.(relay\.name|retry|state|status|action|result|watched|outage))$`)
	for name, one := range m {
		for _, attr := range regexp.MustCompile(`{Key:(\S+) `).FindAllStringSubmatch(fmt.Sprintf("%+v", one.Data), -1) {
			if !known.MatchString(attr[1]) {
				unknown = append(unknown, name+" "+attr[1])
			}
		}
	}
	return unknown
}

// Only a relay that sends exactly once has the number of a transaction.
func TestTransactionOfRelay(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	s.watch(t)
	const name = "outbox.relay.transaction"
	stop := s.relay(t, outbox.RelayConfig{})
	s.commit(t.Context(), t, orders("1")...)
	eventually(t, func() bool { return s.collect(t).value("outbox.relay.led") == 1 }, "nobody leads")
	require.NotContains(t, s.collect(t), name)
	stop()
	s.relay(t, outbox.RelayConfig{ExactlyOnce: s.orders + "-cursors"})
	s.commit(t.Context(), t, orders("2")...)
	eventually(t, func() bool { return s.collect(t).value(name) > 0 }, "no transaction")
}

// Pending events are counted, and the age of the oldest grows.
func TestPending(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	s.watch(t)
	stop := s.relay(t, outbox.RelayConfig{})
	eventually(t, func() bool { return s.collect(t).value("outbox.relay.led") == 1 }, "nobody leads")
	stop()
	m := s.collect(t)
	require.Zero(t, m.value("outbox.delayed")+m.value("outbox.delayed.age"))
	s.commit(t.Context(), t, outbox.With(orders("late")[0], outbox.EventOptions{NotBefore: time.Now().Add(-time.Hour)}))
	m = s.collect(t)
	require.Equal(t, 1.0, m.value("outbox.delayed", "outbox.status", "waiting"))
	require.Greater(t, m.value("outbox.delayed.age"), time.Minute.Seconds())
	s.exec(t, `DELETE FROM {schema}.outbox_delayed`)
	require.Zero(t, m.value("outbox.relay.led"))
	require.Zero(t, m.value("outbox.relay.pending.age"))
	s.commit(t.Context(), t, orders("1", "2", "3")...)
	m = s.collect(t)
	require.Equal(t, 3.0, m.value("outbox.relay.pending"))
	first := m.value("outbox.relay.pending.age")
	require.Eventually(t, func() bool { return s.collect(t).value("outbox.relay.pending.age") > first }, testenv.Patience, time.Millisecond)
	require.Less(t, first, testenv.Patience.Seconds())

	// Once they have waited for longer than StaleAfter, they count as stale too, and no longer when they are sent.
	eventually(t, func() bool { return s.collect(t).value("outbox.stale", "outbox.relay.name", "default") == 3 }, "nothing is stale")
	require.GreaterOrEqual(t, s.collect(t).value("outbox.stale.age"), time.Second.Seconds())
	s.relay(t, outbox.RelayConfig{})
	eventually(t, func() bool { m = s.collect(t); return m.value("outbox.stale")+m.value("outbox.stale.age") == 0 }, "something is stale")
	require.Contains(t, m, "outbox.stale")
}

// Every metric of the package documentation is there, with its unit, and no other.
func TestMetricNames(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	c := s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: -1}}}, outbox.HandleNoTx("FAIL", func(ctx context.Context, e placed, m outbox.Metadata) error {
		return errors.New("no")
	}))
	s.watch(t, c)
	testenv.Run(t, c.Run)
	hooks := s.tel.Consumer("g", outbox.ConsumerConfig{}).Hooks
	hooks.Conflicted(outbox.Metadata{}, "FAIL", &pgconn.PgError{Code: "40001"})
	hooks.Lost("t", 3, 85)
	s.worker(t, outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: -1}}}, outbox.HandleNoTx("FAIL", func(ctx context.Context, e placed, m outbox.Metadata) error {
		return errors.New("no")
	}))
	s.tel.Worker("g", outbox.WorkerConfig{}).Hooks.Conflicted(outbox.Metadata{}, "FAIL", &pgconn.PgError{Code: "40001"})
	s.tel.Worker("g", outbox.WorkerConfig{}).Hooks.RowsRemoved(outbox.RetentionResult{Delivered: 7})
	s.commit(t.Context(), t, tooLarge("1"), placed{ID: "2", At: time.Now()},
		outbox.With(placed{ID: "3", At: time.Now()}, outbox.EventOptions{Expires: time.Now().Add(-time.Minute)}))
	cfg := outbox.RelayConfig{ExactlyOnce: s.orders + "-cursors", Retry: outbox.RetryPolicy{MaxRetries: 1}, RetryInterval: 10 * time.Millisecond}
	cfg.Retention.PublishedFor = time.Millisecond
	s.relay(t, cfg)
	s.member(t, "g", "a", "1 min", `{"breakers": [{"action": "FAIL", "state": "open"}], "outages": [{"what": "fetching", "class": "unreachable"}]}`)

	source, err := os.ReadFile("outboxotel.go")
	require.NoError(t, err)
	documented := map[string]bool{}
	for _, name := range regexp.MustCompile(`(?m)^//\t(\S+) `).FindAllStringSubmatch(string(source), -1) {
		documented[name[1]] = true
	}
	require.Len(t, documented, 47)
	var m metrics
	eventually(t, func() bool { m = s.collect(t); return len(m) >= len(documented) }, "%v of %v", m, documented)
	require.ElementsMatch(t, slices.Collect(maps.Keys(documented)), slices.Collect(maps.Keys(m)))
	units := map[string]string{"duration": "s", "latency": "s", "age": "s", "messages": "{message}", "lag": "{message}", "lost": "{message}", "leader": "{relay}",
		"led": "{relay}", "transaction": "{transaction}", "state": "{state}", "up": "{query}", "keys": "{key}", "removed": "{row}",
		"members": "{member}", "breakers": "{member}"}
	for name, one := range m {
		unit, ok := units[name[strings.LastIndex(name, ".")+1:]]
		if !ok {
			unit = "{event}"
		}
		require.Equal(t, unit, one.Unit, name)
		require.NotEmpty(t, one.Description, name)
	}
	require.Positive(t, m.value("outbox.relay.removed", "db.collection.name", "outbox"))
	require.Equal(t, 7.0, m.value("outbox.worker.removed", "db.collection.name", "event_delivery", "messaging.consumer.group.name", "g"))
}

// The breaker of an action has one of three states at a time: of two consumers of a group, that of the one which lets
// less through. Consumers and workers have metrics of their own.
func TestActionBreakerState(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	group := outbox.HandlerConfig{}
	consumer, another := s.tel.Consumer("g", outbox.ConsumerConfig{HandlerConfig: group}), s.tel.Consumer("g", outbox.ConsumerConfig{HandlerConfig: group})
	worker := s.tel.Worker("g", outbox.WorkerConfig{HandlerConfig: group})
	states := func(name string) (now []string) {
		m := s.collect(t)
		for _, action := range []string{"A", "B"} {
			for _, state := range []string{"closed", "half-open", "open"} {
				if m.value(name, "messaging.consumer.group.name", "g", "outbox.action", action, "outbox.state", state) == 1 {
					now = append(now, action+" "+state)
				}
			}
		}
		return now
	}
	require.Empty(t, states("outbox.consumer.breaker.state"))
	call := outbox.HandlerCall{Action: "A", Events: make([]outbox.Received[outbox.DomainEvent], 1)}
	require.NoError(t, consumer.Middleware[0](t.Context(), call, func(context.Context) error { return nil }))
	require.Equal(t, []string{"A closed"}, states("outbox.consumer.breaker.state"))
	consumer.Hooks.Breaker("B", outbox.BreakerClosed, outbox.BreakerOpen)
	another.Hooks.Breaker("A", outbox.BreakerOpen, outbox.BreakerHalfOpen)
	another.Hooks.Breaker("B", outbox.BreakerOpen, outbox.BreakerHalfOpen)
	require.Equal(t, []string{"A half-open", "B open"}, states("outbox.consumer.breaker.state"))
	require.Empty(t, states("outbox.worker.breaker.state"))
	consumer.Hooks.Breaker("B", outbox.BreakerHalfOpen, outbox.BreakerClosed)
	worker.Hooks.Breaker("B", outbox.BreakerClosed, outbox.BreakerOpen)
	require.Equal(t, []string{"A half-open", "B half-open"}, states("outbox.consumer.breaker.state"))
	require.Equal(t, []string{"B open"}, states("outbox.worker.breaker.state"))
}

// The hooks of the host are called too, and handlers get the context of both.
func TestHooksOfHost(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	type mark struct{}
	var called []string
	call := func(what string) { called = append(called, what) }

	rec := s.tel.Recorder(outbox.RecorderConfig{Hooks: outbox.RecorderHooks{
		Recording: func(ctx context.Context, _ []outbox.DomainEvent) (context.Context, func(error)) {
			return context.WithValue(ctx, mark{}, 1), func(error) { call("recorded") }
		},
	}})
	ctx, done := rec.Hooks.Recording(t.Context(), orders("1"))
	require.Equal(t, 1, ctx.Value(mark{}))
	require.NotEmpty(t, rec.TraceParent(ctx))
	done(nil)

	relay := s.tel.Relay(outbox.RelayConfig{Hooks: outbox.RelayHooks{
		Leading:     func(bool) { call("leading") },
		Sent:        func(outbox.SentBatch) { call("sent") },
		Rejected:    func(outbox.FailedEvent) { call("rejected") },
		Dead:        func(outbox.FailedEvent) { call("dead") },
		RowsRemoved: func(outbox.RetentionResult) { call("rows removed") },
		Breaker:     func(_, _ outbox.BreakerState, rate float64) { call(fmt.Sprint("breaker ", rate)) },
	}}).Hooks
	relay.Leading(true)
	relay.Sent(outbox.SentBatch{})
	relay.Rejected(outbox.FailedEvent{})
	relay.Dead(outbox.FailedEvent{})
	relay.RowsRemoved(outbox.RetentionResult{})
	relay.Breaker(outbox.BreakerClosed, outbox.BreakerOpen, 0.75)

	cfg := s.tel.Consumer("g", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Middleware: []outbox.Middleware{
		func(ctx context.Context, _ outbox.HandlerCall, next func(context.Context) error) error {
			require.True(t, trace.SpanContextFromContext(ctx).IsValid(), "it is within the span")
			return next(context.WithValue(ctx, mark{}, 2))
		},
	}, Hooks: outbox.ConsumerHooks{
		Handled:      func(outbox.Metadata, string, time.Duration) { call("handled") },
		Repeated:     func(outbox.Metadata, string) { call("repeated") },
		Conflicted:   func(outbox.Metadata, string, error) { call("conflicted") },
		Failed:       func(_ outbox.Metadata, _ string, _ error, retry bool) { call(fmt.Sprint("failed, retry ", retry)) },
		DeadLettered: func(outbox.Metadata, string, string, error) { call("dead-lettered") },
		Unknown:      func(outbox.Metadata) { call("unknown") },
		Lost:         func(string, int32, int64) { call("lost") },
		Breaker:      func(string, outbox.BreakerState, outbox.BreakerState) { call("breaker of an action") },
	}}})
	require.Len(t, cfg.Middleware, 2)
	one := outbox.HandlerCall{Action: "A", Events: make([]outbox.Received[outbox.DomainEvent], 1)}
	require.NoError(t, cfg.Middleware[0](t.Context(), one, func(ctx context.Context) error {
		return cfg.Middleware[1](ctx, one, func(ctx context.Context) error {
			require.Equal(t, 2, ctx.Value(mark{}))
			call("handling")
			return nil
		})
	}))
	consumer := cfg.Hooks
	consumer.Handled(outbox.Metadata{}, "A", 0)
	consumer.Repeated(outbox.Metadata{}, "A")
	consumer.Conflicted(outbox.Metadata{}, "A", &pgconn.PgError{Code: "40001"})
	require.Equal(t, 1.0, s.collect(t).value("outbox.consumer.conflicts", "outbox.action", "A", "error.type", "postgres_40001"))
	consumer.Failed(outbox.Metadata{}, "A", errors.New("no"), true)
	consumer.DeadLettered(outbox.Metadata{}, "A", "t.dlq", errors.New("no"))
	consumer.Unknown(outbox.Metadata{})
	consumer.Lost("t", 3, 85)
	consumer.Breaker("A", outbox.BreakerClosed, outbox.BreakerOpen)
	require.Equal(t, 85.0, s.collect(t).value("outbox.consumer.lost", "messaging.destination.name", "t", "messaging.destination.partition.id", "3"))
	require.Equal(t, []string{"recorded", "leading", "sent", "rejected", "dead", "rows removed", "breaker 0.75",
		"handling", "handled", "repeated", "conflicted", "failed, retry true", "dead-lettered", "unknown", "lost", "breaker of an action"}, called)
}

// An ErrorType that panics does not reach the handler whose error it is to name.
func TestErrorTypePanics(t *testing.T) {
	t.Parallel()
	tel, err := outboxotel.New(outboxotel.Config{ErrorType: func(error) string { panic("no such error") }})
	require.NoError(t, err)
	cfg := tel.Consumer("g", outbox.ConsumerConfig{})
	one, failed := outbox.HandlerCall{Action: "A", Events: make([]outbox.Received[outbox.DomainEvent], 1)}, errors.New("no")
	require.Equal(t, failed, cfg.Middleware[0](t.Context(), one, func(context.Context) error { return failed }))
}

// Texts that any producer can send, or write into a row, do not become series.
func TestTypesOfOthers(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	hooks := s.tel.Consumer("g", outbox.ConsumerConfig{}).Hooks
	for i := range 100 {
		m := outbox.Metadata{Kafka: &outbox.KafkaMetadata{Topic: "t", Key: []byte(fmt.Sprint(i))}, Type: fmt.Sprint("type", i), ID: fmt.Sprint(i)}
		hooks.Unknown(m)
		hooks.DeadLettered(m, "", "t.dlq", errors.New("no codec"))
	}
	m := s.collect(t)
	require.Len(t, m["outbox.consumer.processed"].Data.(metricdata.Sum[int64]).DataPoints, 2)
	require.Equal(t, 100.0, m.value("outbox.consumer.processed", "outbox.result", "unknown"))

	deadLettering := s.tel.Consumer("g", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Unknown: outbox.DeadLetterUnknown}}).Hooks
	deadLettering.Unknown(outbox.Metadata{Kafka: &outbox.KafkaMetadata{Topic: "t"}})
	require.Equal(t, 100.0, s.collect(t).value("outbox.consumer.processed", "outbox.result", "unknown"), "a dead letter is not skipped")
}

type named struct{ error }

func (named) ErrorType() string { return "own" }

var errorTypes = map[string]error{
	"own":            fmt.Errorf("wrapped: %w", named{errors.New("no")}),
	"panic":          &outbox.PanicError{Value: 1},
	"postgres_23505": fmt.Errorf("wrapped: %w", &pgconn.PgError{Code: "23505"}),
	"timeout":        context.DeadlineExceeded,
	"canceled":       context.Canceled,
	"invalid_event":  &outbox.FieldError{},
	"_OTHER":         errors.New("order 4711 is gone"),
}

// The kinds of errors are few, whatever the texts of errors are.
func TestErrorTypes(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	hooks := s.tel.Consumer("g", outbox.ConsumerConfig{}).Hooks
	for want, err := range errorTypes {
		hooks.Failed(outbox.Metadata{}, "A", err, false)
		require.Equal(t, 1.0, s.collect(t).value("outbox.consumer.failed", "error.type", want), want)
	}
}

// A wrong configuration is rejected with the names of its fields.
func TestConfig(t *testing.T) {
	t.Parallel()
	_, err := outboxotel.New(outboxotel.Config{Interval: -1, Timeout: -1, StaleAfter: -1})
	require.ErrorIs(t, err, outboxotel.ErrNegative)
	require.ErrorContains(t, err, "Interval")
	require.ErrorContains(t, err, "Timeout")
	require.ErrorContains(t, err, "StaleAfter")
	tel, err := outboxotel.New(outboxotel.Config{})
	require.NoError(t, err, "the global providers do")
	require.NoError(t, tel.Close())
}

// The latency of an event begins with its transaction, not with the commit; the duration
// of a send begins with the send. Both are in seconds.
func TestLatency(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	began := time.Now()
	require.NoError(t, pgx.BeginFunc(t.Context(), s.db, func(tx pgx.Tx) error {
		if err := s.rec.Record(t.Context(), tx, orders("1")...); err != nil {
			return err
		}
		_, err := tx.Exec(t.Context(), `SELECT pg_sleep(0.5)`)
		return err
	}))
	s.relay(t, outbox.RelayConfig{})
	eventually(t, func() bool {
		m := s.collect(t)
		return m.value("outbox.relay.publish.latency") == 1 && m.value("messaging.client.operation.duration") > 0
	}, "not sent")
	elapsed := time.Since(began).Seconds()
	m := s.collect(t)
	latency := m["outbox.relay.publish.latency"].Data.(metricdata.Histogram[float64]).DataPoints[0].Sum
	require.GreaterOrEqual(t, latency, 0.5)
	require.LessOrEqual(t, latency, elapsed)
	took := m["messaging.client.operation.duration"].Data.(metricdata.Histogram[float64]).DataPoints[0].Sum
	require.Positive(t, took)
	require.LessOrEqual(t, took, elapsed-0.5)
}
