package itest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// expiring returns events that expire at a time, with their own ids.
func expiring(at time.Time, events ...oracle.Event) (all []outbox.DomainEvent) {
	for _, e := range events {
		all = append(all, outbox.With(e, outbox.EventOptions{ID: uuid.MustParse(e.ID), Expires: at}))
	}
	return all
}

// commitAll records any events in a transaction of their own.
func (h *relayFixture) commitAll(t testing.TB, events ...outbox.DomainEvent) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(background, h.db, func(tx pgx.Tx) error { return h.rec.Record(background, tx, events...) }))
}

// Each way to record stores when an event expires, to the microsecond and not later. An event that would be worthless
// before it is due is refused.
func TestRecordExpires(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	expires := time.Date(2100, 2, 3, 4, 5, 6, 1_999, time.UTC)
	due := expires.Add(-time.Hour)
	for name, add := range c.waysToRecord() {
		for _, n := range []int{1, 7, 600} {
			for _, notBefore := range []time.Time{{}, due} {
				var events []outbox.DomainEvent
				for i := range n {
					options := outbox.EventOptions{Expires: expires}
					if i == 0 {
						options.NotBefore = notBefore
					}
					events = append(events, outbox.With(id(fmt.Sprint(i)), options))
				}
				require.NoError(t, pgx.BeginFunc(background, c.db, func(tx pgx.Tx) error { return add(tx, events) }))
				var right int
				require.NoError(t, c.db.QueryRow(background, c.sql(`SELECT count(*) FROM (SELECT expires_at FROM {s}.outbox UNION ALL SELECT expires_at FROM {s}.outbox_delayed) AS e
					WHERE expires_at = '2100-02-03 04:05:06.000001Z'`)).Scan(&right))
				require.Equal(t, n, right, "%s of %d, due %v", name, n, notBefore)
				_, err := c.db.Exec(background, c.sql(`DELETE FROM {s}.outbox; DELETE FROM {s}.outbox_delayed`), pgx.QueryExecModeSimpleProtocol)
				require.NoError(t, err)
			}
		}
	}
	for _, options := range []outbox.EventOptions{
		{Expires: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}, {Expires: time.Date(0, 12, 31, 0, 0, 0, 0, time.UTC)},
		{Expires: due, NotBefore: due}, {Expires: due.Add(time.Nanosecond), NotBefore: due}, {Expires: due.Add(-time.Second), NotBefore: due},
	} {
		c.requireRefused(t, background, c.rec, outbox.ErrTime, refusal{parcelSent, 1, "expires"}, good, outbox.With(good, options))
	}
	_, options := outbox.Unwrap(outbox.With(outbox.With(good, outbox.EventOptions{Expires: expires}), outbox.EventOptions{Key: "k"}))
	require.Equal(t, expires, options.Expires)
	_, options = outbox.Unwrap(outbox.With(outbox.With(good, outbox.EventOptions{Expires: expires}), outbox.EventOptions{Expires: due}))
	require.Equal(t, due, options.Expires)
	c.requireRefused(t, background, c.rec, outbox.ErrMalformed, refusal{parcelSent, 1, "attributes"}, good,
		outbox.With(good, outbox.EventOptions{Attributes: map[string]string{"expirytime": "2100-01-01T00:00:00Z"}}))

	// What is moved to outbox when it is due expires at the same time.
	c.commit(t, background, c.rec, outbox.With(id("moved"), outbox.EventOptions{NotBefore: noon, Expires: expires}))
	require.Equal(t, 1, c.moveDue(t))
	var at time.Time
	require.NoError(t, c.db.QueryRow(background, c.sql(`SELECT expires_at FROM {s}.outbox WHERE aggregate_id = 'moved'`)).Scan(&at))
	require.True(t, expires.Truncate(time.Microsecond).Equal(at))
}

// sumExpired returns a hook that counts the expired events.
func sumExpired(n *atomic.Int64) func(outbox.SentBatch) {
	return func(b outbox.SentBatch) { n.Add(int64(b.Expired)) }
}

// An event that has expired is not sent, and those behind it are, in their order. It has no row in outbox_failed, and
// where the others went is known, it is said to have expired. One that expires later says in its record when.
func TestRelaySkipsExpired(t *testing.T) {
	t.Parallel()
	for _, mode := range []outbox.Mode{outbox.Binary, outbox.Structured} {
		h := newRelayFixture(t)
		testenv.CreateTopic(t, h.brokers, h.topic, 1)
		events := numbered("a", 1, 30)
		later := time.Now().Add(time.Hour).UTC().Truncate(time.Microsecond)
		var all []outbox.DomainEvent
		var live []oracle.Event
		for i, e := range events {
			switch i % 3 {
			case 0:
				all = append(all, expiring(time.Now().Add(-time.Millisecond), e)...)
			case 1:
				all, live = append(all, expiring(later, e)...), append(live, e)
			default:
				all, live = append(all, outbox.With(e, outbox.EventOptions{ID: uuid.MustParse(e.ID)})), append(live, e)
			}
		}
		h.commitAll(t, all...)
		var expired atomic.Int64
		cfg := quick
		cfg.Mode = mode
		cfg.Hooks.Sent = sumExpired(&expired)
		testenv.Run(t, h.relay(t, cfg).Run)
		records := h.records(t, len(live))
		require.Len(t, records, len(live))
		for i, r := range records {
			m, err := outbox.DecodeCloudEvent(r)
			require.NoError(t, err)
			require.Equal(t, live[i].ID, m.ID, "in the order of recording")
			want := ""
			if i%2 == 0 {
				want = later.Format("2006-01-02T15:04:05.999999Z")
			}
			require.Equal(t, want, m.Extensions["expirytime"])
		}
		require.Eventually(t, func() bool { return expired.Load() == 10 }, testenv.Patience, 5*time.Millisecond)
		require.Zero(t, h.count(t, "outbox_failed"))
		inspector, err := outboxops.NewInspector(h.db, outboxops.InspectorConfig{Schema: h.schema})
		require.NoError(t, err)
		require.Eventually(t, func() bool { return h.count(t, "outbox_pending") == 0 }, testenv.Patience, 5*time.Millisecond)
		for i := range events {
			e, err := inspector.Event(background, int64(i+1))
			require.NoError(t, err)
			require.Len(t, e.Sent, 1)
			require.Equal(t, i%3 == 0, e.Sent[0].Expired)
			require.Equal(t, i%3 == 2, e.ExpiresAt.IsZero())
			require.WithinDuration(t, time.Now(), e.Sent[0].At, testenv.Patience)
		}
		// Of a batch whose events have all expired, that is known, too.
		h.commitAll(t, expiring(later.Add(-2*time.Hour), numbered("a", 31, 2)...)...)
		require.Eventually(t, func() bool { return expired.Load() == 12 && h.count(t, "outbox_pending") == 0 }, testenv.Patience, 5*time.Millisecond)
		require.Eventually(t, func() bool {
			e, err := inspector.Event(background, 32)
			return err == nil && len(e.Sent) == 1 && e.Sent[0].Expired
		}, testenv.Patience, 5*time.Millisecond)
	}
}

// After an outage of Kafka in which most events have expired, those that have not arrive at once, and no event goes
// through outbox_failed.
func TestExpiredInAnOutage(t *testing.T) {
	t.Parallel()
	testenv.Long(t)
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 3)
	dialer := &brokenDialer{}
	dialer.broken.Store(true)
	var expired atomic.Int64
	var opened atomic.Bool
	cfg := quick
	cfg.Schema, cfg.KeepSent, cfg.Logger, cfg.DeliveryTimeout = h.schema, true, logTo(t, slog.LevelWarn), time.Second
	cfg.Hooks.Sent = sumExpired(&expired)
	cfg.Hooks.Breaker = func(_, to outbox.BreakerState, _ float64) {
		if to == outbox.BreakerOpen {
			opened.Store(true)
		}
	}
	relay, err := outbox.NewRelay(h.db, append(testenv.KafkaOpts(h.brokers), kgo.Dialer(dialer.dial)), cfg)
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
	worthless := time.Now().Add(3 * time.Second)
	var live []oracle.Event
	n := 0
	for i := range 50 {
		for key := range 20 {
			e := numbered(fmt.Sprint("k", key), i+1, 1)
			if i%10 == 9 {
				live = append(live, e...)
				h.commit(t, e...)
			} else {
				h.commitAll(t, expiring(worthless, e...)...)
				n++
			}
		}
	}
	require.Eventually(t, opened.Load, testenv.Patience, time.Millisecond)
	time.Sleep(time.Until(worthless))
	reader := h.follow(t)
	began := time.Now()
	dialer.broken.Store(false)
	requireArrival(t, reader, live...)
	var arrived []oracle.Event
	require.Eventually(t, func() bool {
		arrived, err = reader.Arrived()
		return err == nil && int(expired.Load())+len(arrived) == n+len(live)
	}, testenv.Patience, 5*time.Millisecond)
	t.Logf("%d events have expired, %d have arrived after %v", expired.Load(), len(arrived), time.Since(began))
	const tried = 20 // some were given to Kafka's client a moment before they expired, to try whether Kafka works
	require.LessOrEqual(t, len(arrived), len(live)+tried)
	last := map[string]int64{}
	for _, e := range arrived {
		require.Greater(t, e.Version, last[e.Key])
		last[e.Key] = e.Version
	}
	var unresolved int
	require.NoError(t, h.db.QueryRow(background, pg.InSchema(`SELECT count(*) FROM {schema}.outbox_failed WHERE status <> 'resolved'`, h.schema)).Scan(&unresolved))
	require.Zero(t, unresolved)
}

// An event that expires while it waits for a retry is resolved as expired, and those behind it are sent. One that is
// dead stays as it is.
func TestExpiredAtARetry(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	var expired atomic.Int64
	cfg := quick
	cfg.HoldDead = true
	cfg.Retry = outbox.RetryPolicy{MaxRetries: 2, RetryWait: time.Hour, MaxRetryWait: time.Hour}
	cfg.Hooks.Sent = sumExpired(&expired)
	testenv.Run(t, h.relay(t, cfg).Run)
	later := time.Now().Add(time.Hour)
	fails, behind, parked := poison("fails", 1), numbered("fails", 2, 3), numbered("fails", 5, 1)
	h.commitAll(t, expiring(later, fails)...)
	h.commit(t, behind...)
	h.commitAll(t, expiring(later, parked...)...)
	h.awaitStatuses(t, map[string]int{"failed": 1, "parked": 4})
	require.Len(t, h.texts(t, `SELECT expires_at::text FROM {s}.outbox_failed WHERE expires_at > now() + interval '50 min'`), 2)
	h.exec(t, `UPDATE {s}.outbox_failed SET expires_at = now() WHERE expires_at IS NOT NULL`)
	h.exec(t, `UPDATE {s}.outbox_failed SET next_retry_at = now() WHERE status = 'failed'`)
	requireArrival(t, reader, behind...)
	h.awaitStatuses(t, map[string]int{"resolved": 2})
	require.Eventually(t, func() bool { return expired.Load() == 2 }, testenv.Patience, time.Millisecond)
	require.Equal(t, []string{"expired", "expired"}, h.texts(t, `SELECT resolution FROM {s}.outbox_failed WHERE resolved_by IS NULL AND sent_at IS NULL`))
	more := numbered("fails", 6, 1)
	h.commit(t, more...)
	requireArrival(t, reader, more...)
	requireInOrder(t, reader, append(behind, more...))
	inspector, err := outboxops.NewInspector(h.db, outboxops.InspectorConfig{Schema: h.schema})
	require.NoError(t, err)
	e, err := inspector.Event(background, 1)
	require.NoError(t, err)
	require.Len(t, e.Sent, 1)
	require.True(t, e.Sent[0].Expired && e.Sent[0].Retried)

	// A dead event waits for an operator, whatever the time, and its key for the event.
	dead, held := poison("dead", 1), numbered("dead", 2, 1)
	h.commitAll(t, expiring(later, dead)...)
	h.commit(t, held...)
	h.awaitStatuses(t, map[string]int{"failed": 1, "parked": 1, "resolved": 2})
	h.exec(t, `UPDATE {s}.outbox_failed SET retry_count = 1, next_retry_at = now() WHERE status = 'failed'`)
	h.awaitStatuses(t, map[string]int{"dead": 1, "parked": 1, "resolved": 2})
	h.exec(t, `UPDATE {s}.outbox_failed SET expires_at = now() WHERE status = 'dead'`)
	other := numbered("other", 1, 1)
	h.commit(t, other...)
	requireArrival(t, reader, other...)
	time.Sleep(10 * cfg.RetryInterval)
	require.Equal(t, map[string]int{"dead": 1, "parked": 1, "resolved": 2}, h.statuses(t))
	require.EqualValues(t, 2, expired.Load())
	h.exec(t, `UPDATE {s}.outbox_failed SET status = 'parked', held = false, retry_count = 0, next_retry_at = now() WHERE status = 'dead'`)
	requireArrival(t, reader, held...)
	h.awaitStatuses(t, map[string]int{"resolved": 3})
	require.False(t, reader.Has(dead.ID))
}

// texts returns the values of a statement with one column.
func (h *relayFixture) texts(t testing.TB, sql string) []string {
	t.Helper()
	rows, err := h.db.Query(background, h.sql(sql))
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// A relay that sends exactly once skips what has expired, alone and with others, at once and at a retry, and repeats
// nothing after it is killed.
func TestExactlyOnceSkipsExpired(t *testing.T) {
	t.Parallel()
	f := newExactlyFixture(t)
	reader := f.follow(t)
	var expired atomic.Int64
	f.cfg.Hooks.Sent = sumExpired(&expired)
	f.cfg.Retry.RetryWait, f.cfg.Retry.MaxRetryWait = time.Hour, time.Hour
	past := time.Now().Add(-time.Second)
	kill := f.process(t, f.cfg)
	defer func() { kill() }()
	var live []oracle.Event
	n := 0
	for i := range 40 {
		key := fmt.Sprint("k", i%4)
		gone, e := numbered(key, 2*i, 1+i%3), numbered(key, 2*i+1000, 1)
		f.commitAll(t, append(expiring(past, gone...), expiring(time.Now().Add(time.Hour), e...)...)...)
		if i%5 == 0 {
			f.commitAll(t, expiring(past, gone[0])...)
			n++
		}
		n, live = n+len(gone), append(live, e...)
		if i == 20 {
			kill()
			kill = f.process(t, f.cfg)
		}
	}
	large := numbered("large", 1, 1)[0]
	large.Filler = random(5000)
	behind := numbered("large", 2, 2)
	f.commitAll(t, expiring(time.Now().Add(time.Hour), large)...)
	f.commit(t, behind...)
	f.awaitStatuses(t, map[string]int{"failed": 1, "parked": 2})
	f.exec(t, `UPDATE {s}.outbox_failed SET expires_at = now(), next_retry_at = now() WHERE status = 'failed'`)
	live = append(live, behind...)
	requireArrival(t, reader, live...)
	require.Eventually(t, func() bool { return f.count(t, "outbox_pending") == 0 }, testenv.Patience, 5*time.Millisecond)
	f.awaitStatuses(t, map[string]int{"resolved": 1})
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	require.Len(t, arrived, len(live), "each once")
	require.GreaterOrEqual(t, expired.Load(), int64(1))
	require.False(t, reader.Has(large.ID))
}

// A handler does not get an event that has expired, in a transaction or without one, by Kafka or from outbox. Where
// there are notes it is noted as handled, so that no repeat is handled, whatever the clock says then. What is behind it
// is handled.
func TestHandlersSkipExpired(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	var mu sync.Mutex
	var got []string
	skipped := map[string]int{}
	note := func(action string, e sale) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, action+" "+e.Product)
	}
	hooks := outbox.ConsumerHooks{Repeated: func(m outbox.Metadata, action string) {
		mu.Lock()
		defer mu.Unlock()
		skipped[fmt.Sprint(action, " ", m.Expired)]++
	}}
	handlers := []outbox.Handler{
		outbox.Handle("TX", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error { note("TX", e); return nil }),
		outbox.HandleBatch("BATCH", func(_ context.Context, _ pgx.Tx, events []outbox.Received[sale]) error {
			for _, e := range events {
				note("BATCH", e.Event)
			}
			return nil
		}),
		outbox.HandleNoTx("NOTX", func(_ context.Context, e sale, _ outbox.Metadata) error { note("NOTX", e); return nil }),
	}
	expired := func(id string, at time.Time) *kgo.Record {
		r := s.saleRecord(id, oneSale)
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: "ce_expirytime", Value: []byte(at.Format(time.RFC3339Nano))})
		return r
	}
	gone := uuid.NewString()
	handled := func(n int) func() bool {
		return func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(got) == n
		}
	}
	s.send(t, expired(gone, time.Now().Add(-time.Second)), expired(uuid.NewString(), time.Now().Add(time.Hour)), s.saleRecord(uuid.NewString(), oneSale))
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Hooks: hooks}}
	testenv.Run(t, s.groupConsumer(t, "g-"+uuid.NewString(), cfg, handlers...).Run)
	require.Eventually(t, handled(6), testenv.Patience, 5*time.Millisecond)
	mu.Lock()
	require.Equal(t, map[string]int{"TX true": 1, "BATCH true": 1, "NOTX true": 1}, skipped)
	mu.Unlock()
	require.Equal(t, 6, s.relayFixture.count(t, "event_handled"), "also the expired one, and none of NOTX")

	// A repeat that does not say when it expires, as a release sends it that does not know this.
	s.send(t, s.saleRecord(gone, oneSale))
	require.Eventually(t, handled(7), testenv.Patience, 5*time.Millisecond)
	mu.Lock()
	require.Equal(t, 1, skipped["TX false"])
	require.Equal(t, 1, skipped["BATCH false"])
	got, skipped = nil, map[string]int{}
	mu.Unlock()

	// Workers.
	w := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Hooks: hooks, From: outbox.FromStart}, PollInterval: 20 * time.Millisecond}
	worker, err := outbox.NewWorker(s.db, s.events, "w", w, handlers...)
	require.NoError(t, err)
	s.commitAll(t, outbox.With(sale{Product: "gone"}, outbox.EventOptions{Expires: time.Now().Add(-time.Second)}),
		outbox.With(sale{Product: "live"}, outbox.EventOptions{Expires: time.Now().Add(time.Hour)}), sale{Product: "p"})
	testenv.Run(t, worker.Run)
	require.Eventually(t, handled(6), testenv.Patience, 5*time.Millisecond)
	require.Eventually(t, func() bool {
		return len(s.texts(t, `SELECT status FROM {s}.event_delivery WHERE status = 'DONE'`)) == 9
	}, testenv.Patience, 5*time.Millisecond)
	mu.Lock()
	require.NotContains(t, fmt.Sprint(got), "gone")
	require.Equal(t, map[string]int{"TX true": 1, "BATCH true": 1, "NOTX true": 1}, skipped)
	mu.Unlock()
	require.Len(t, s.texts(t, `SELECT action FROM {s}.event_handled WHERE consumer_group = 'w'`), 6)
}

// An event that expires between two attempts is not handled again, unless its handler works outside of PostgreSQL and
// has begun. A note of OncePer is left to a later event.
func TestExpiredBetweenAttempts(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	expires := time.Now().Add(3 * time.Second) // the first attempt begins before
	var inTx, without, once atomic.Int64
	wait := func(n *atomic.Int64) error {
		if n.Add(1) == 1 {
			time.Sleep(time.Until(expires))
			return errors.New("not now")
		}
		return nil
	}
	handlers := []outbox.Handler{
		outbox.Handle("TX", func(context.Context, pgx.Tx, sale, outbox.Metadata) error { return wait(&inTx) }),
		outbox.HandleNoTx("NOTX", func(context.Context, sale, outbox.Metadata) error { return wait(&without) }),
		outbox.OncePer(outbox.Handle("ONCE", func(context.Context, pgx.Tx, sale, outbox.Metadata) error { once.Add(1); return nil }),
			func(sale, outbox.Metadata) (string, string) { return "Shop", "this one" }),
	}
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, From: outbox.FromStart, Retry: outbox.RetryPolicy{RetryWait: 10 * time.Millisecond, MaxOutage: -1}},
		PollInterval: 20 * time.Millisecond}
	worker, err := outbox.NewWorker(s.db, s.events, "w", cfg, handlers...)
	require.NoError(t, err)
	s.commitAll(t, outbox.With(sale{Product: "p"}, outbox.EventOptions{Expires: time.Now().Add(-time.Second), Key: "x"}))
	s.commitAll(t, outbox.With(sale{Product: "p"}, outbox.EventOptions{Expires: expires}))
	testenv.Run(t, worker.Run)
	require.Eventually(t, func() bool {
		return len(s.texts(t, `SELECT status FROM {s}.event_delivery WHERE status = 'DONE'`)) == 6
	}, testenv.Patience, 5*time.Millisecond)
	require.Equal(t, []int64{1, 2, 1}, []int64{inTx.Load(), without.Load(), once.Load()})
}

// A handler without a transaction has begun, and its worker stops. The next worker calls it, although the event has
// expired meanwhile, as it would if the first one had been killed.
func TestExpiredBehindAStop(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	expires := time.Now().Add(2 * time.Second)
	began := make(chan struct{})
	var calls, other atomic.Int64
	handler := outbox.HandleNoTx("NOTX", func(ctx context.Context, e sale, _ outbox.Metadata) error {
		if e.Amount == 2 {
			other.Add(1)
			return nil
		}
		if calls.Add(1) > 1 {
			return nil
		}
		close(began)
		<-ctx.Done()
		return context.Cause(ctx)
	})
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, From: outbox.FromStart, StopTimeout: 500 * time.Millisecond}, PollInterval: 20 * time.Millisecond}
	newWorker := func() *outbox.Worker {
		worker, err := outbox.NewWorker(s.db, s.events, "w", cfg, handler)
		require.NoError(t, err)
		return worker
	}
	s.commitAll(t, outbox.With(sale{Product: "p", Amount: 1}, outbox.EventOptions{Expires: expires}), outbox.With(sale{Product: "p", Amount: 2}, outbox.EventOptions{Expires: expires}))
	stop := testenv.Run(t, newWorker().Run)
	<-began
	stop()
	require.Equal(t, []string{"NOTX 0 stale", "NOTX 0 -"}, s.texts(t, `SELECT concat_ws(' ', action, attempt_count, coalesce(last_error_code, '-')) FROM {s}.event_delivery WHERE status IN ('PENDING', 'PARKED') ORDER BY id`))
	time.Sleep(time.Until(expires))
	testenv.Run(t, newWorker().Run)
	require.Eventually(t, func() bool {
		return len(s.texts(t, `SELECT status FROM {s}.event_delivery WHERE status = 'DONE'`)) == 2
	}, testenv.Patience, 5*time.Millisecond)
	require.Equal(t, []int64{2, 0}, []int64{calls.Load(), other.Load()}, "the second event was never begun")
}

// An event that a worker has dropped as expired is noted as done before a later event of its key is handled outside of
// PostgreSQL. Otherwise the process that takes both over would handle the expired one, which may have begun, behind it.
func TestExpiredIsNotedBeforeTheNextOne(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	var mu sync.Mutex
	var open []string
	handler := outbox.HandleNoTx("NOTX", func(_ context.Context, e sale, _ outbox.Metadata) error {
		mu.Lock()
		defer mu.Unlock()
		open = append(open, fmt.Sprint(e.Amount, s.texts(t, `SELECT (payload->>'amount')::text FROM {s}.event_delivery WHERE status <> 'DONE' ORDER BY id`)))
		return nil
	})
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, From: outbox.FromStart}, PollInterval: 20 * time.Millisecond}
	worker, err := outbox.NewWorker(s.db, s.events, "w", cfg, handler)
	require.NoError(t, err)
	expired := outbox.EventOptions{Expires: time.Now().Add(-time.Second)}
	s.commitAll(t, outbox.With(sale{Product: "p", Amount: 1}, expired), outbox.With(sale{Product: "p", Amount: 2}, expired), sale{Product: "p", Amount: 3},
		outbox.With(sale{Product: "p", Amount: 4}, expired), sale{Product: "p", Amount: 5})
	testenv.Run(t, worker.Run)
	require.Eventually(t, func() bool {
		return len(s.texts(t, `SELECT status FROM {s}.event_delivery WHERE status = 'DONE'`)) == 5
	}, testenv.Patience, 5*time.Millisecond)
	mu.Lock()
	defer mu.Unlock()
	require.Equal(t, []string{"3 [3 4 5]", "5 [5]"}, open)
}

// Only the clock of the database counts. Here it is an hour ahead of that of this host, or behind: a function stands in
// front of the one of PostgreSQL.
func TestExpiryByTheClockOfTheDatabase(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	for _, ahead := range []time.Duration{time.Hour, -time.Hour} {
		s := newConsumerFixture(t, 1)
		s.exec(t, fmt.Sprintf(`CREATE FUNCTION {s}.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT pg_catalog.clock_timestamp() + interval ''%d s'''`, int(ahead.Seconds())))
		db := testenv.Pool(t, func(cfg *pgxpool.Config) {
			cfg.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{s.schema}.Sanitize() + ", pg_catalog"
		})
		// By the clock of the database "past" has expired and "future" has not; this host would say otherwise.
		past, future := time.Now().Add(ahead-30*time.Minute), time.Now().Add(ahead+30*time.Minute)
		record := func(product string, at time.Time) outbox.DomainEvent {
			return outbox.With(sale{Product: product, Amount: 1}, outbox.EventOptions{Expires: at})
		}
		s.commitAll(t, record("past", past), record("future", future), sale{Product: "end", Amount: 1})
		relay := *s.relayFixture
		relay.db = db
		testenv.Run(t, relay.relay(t, quick).Run)
		keys := func(records []*kgo.Record) (all []string) {
			for _, r := range records {
				all = append(all, string(r.Key))
			}
			return all
		}
		require.Equal(t, []string{"future", "end"}, keys(s.records(t, 2)))

		var mu sync.Mutex
		var got []string
		handler := outbox.HandleNoTx("NOTX", func(_ context.Context, e sale, _ outbox.Metadata) error {
			mu.Lock()
			defer mu.Unlock()
			got = append(got, e.Product)
			return nil
		})
		cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, From: outbox.FromStart}, PollInterval: 20 * time.Millisecond}
		worker, err := outbox.NewWorker(db, s.events, "w", cfg, outbox.Handle("COUNTED", s.count), handler)
		require.NoError(t, err)
		testenv.Run(t, worker.Run)
		require.Eventually(t, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(got) == 2 && s.counts(t)["end"] == 1 && s.counts(t)["future"] == 1
		}, testenv.Patience, 5*time.Millisecond)
		require.Zero(t, s.counts(t)["past"])
	}
}

// A row of another writer that has the column alone expires, for relays and for consumers. One that has the attribute
// among its headers alone is sent, and consumers drop it.
func TestExpiryOfOtherWriters(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	insert := func(product, headers, expires string) {
		s.exec(t, `INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at, headers, expires_at)
			VALUES (gen_random_uuid(), $1, 'shop', 'Product', $2, jsonb_build_object('product', $2::text, 'amount', 1), 'application/json', $3, now(), $4::jsonb, now() + $5::interval)`,
			saleType, product, s.topic, headers, expires)
	}
	insert("column", `{}`, "-1 s")
	insert("column beside null", `null`, "-1 s") // of a library that writes JSON for its own null
	insert("later beside null", `null`, "1 h")
	insert("later", `{"shop": "a"}`, "1 h")
	insert("header", `{"ce_expirytime": "2020-01-01T00:00:00Z"}`, "1 h") // the column counts
	insert("no object", `[]`, "1 h")
	s.exec(t, `INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at, headers)
		VALUES (gen_random_uuid(), $1, 'shop', 'Product', 'attribute', '{"product":"attribute","amount":1}', 'application/json', $2, now(), '{"ce_expirytime": "2020-01-01T00:00:00Z"}')`, saleType, s.topic)
	s.exec(t, `INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at, headers)
		VALUES (gen_random_uuid(), $1, 'shop', 'Product', 'nonsense', '{"product":"nonsense","amount":1}', 'application/json', $2, now(), '{"ce_expirytime": "soon"}')`, saleType, s.topic)
	testenv.Run(t, s.relay(t, quick).Run)
	require.Len(t, s.records(t, 5), 5)
	for _, wrong := range []string{"infinity", "-infinity", "0001-01-01 00:00:00 BC", "10000-01-01 00:00:00"} {
		_, err := s.db.Exec(background, s.sql(`INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, expires_at)
			VALUES (gen_random_uuid(), 'a.b.c', 's', 'a', 'k', '{}', 'application/json', now(), $1::text::timestamptz)`), wrong)
		require.ErrorContains(t, err, "outbox_expires", wrong)
	}
	want := map[string]int{"later": 1, "later beside null": 1, "header": 1, "nonsense": 1}
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, outbox.Handle("COUNTED", s.count)).Run)
	require.Eventually(t, func() bool { return fmt.Sprint(s.counts(t)) == fmt.Sprint(want) }, testenv.Patience, 5*time.Millisecond, "%v", s.counts(t))
	worker, err := outbox.NewWorker(s.db, s.events, "w", outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, From: outbox.FromStart}, PollInterval: 20 * time.Millisecond},
		outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	testenv.Run(t, worker.Run)
	want = map[string]int{"later": 2, "later beside null": 2, "header": 2, "nonsense": 2}
	require.Eventually(t, func() bool { return fmt.Sprint(s.counts(t)) == fmt.Sprint(want) }, testenv.Patience, 5*time.Millisecond, "%v", s.counts(t))
	dead := func() (n int) {
		require.NoError(t, s.db.QueryRow(background, pg.InSchema(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD'`, s.schema)).Scan(&n))
		return n
	}
	require.Eventually(t, func() bool { return dead() > 0 }, testenv.Patience, 5*time.Millisecond)
	require.Equal(t, 1, dead(), "the one with headers that are no object, and no other")
}
