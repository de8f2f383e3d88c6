package outboxops_test

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

func (h *opsFixture) inspector(t testing.TB) *outboxops.Inspector {
	t.Helper()
	i, err := outboxops.NewInspector(h.db, outboxops.InspectorConfig{Schema: h.schema})
	require.NoError(t, err)
	return i
}

// relayStatus returns the state of a relay, or the zero value if the relay is unknown.
func (h *opsFixture) relayStatus(t testing.TB, name string) (status outbox.RelayStatus) {
	t.Helper()
	all, err := h.inspector(t).Relays(background)
	require.NoError(t, err)
	for _, r := range all {
		if r.Name == name {
			status = r
		}
	}
	return status
}

func TestInspectorConfig(t *testing.T) {
	t.Parallel()
	_, err := outboxops.NewInspector(nil, outboxops.InspectorConfig{Schema: "$user"})
	require.ErrorIs(t, err, outbox.ErrNilArgument)
	require.ErrorContains(t, err, "Schema")
	require.ErrorContains(t, err, "db")
}

// The pending events of a relay are visible from outside. Before its first run there are none. After a
// stop, they are the events since then, whatever transactions are open.
func TestInspectRelays(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	i := h.inspector(t)
	all, err := i.Relays(background)
	require.NoError(t, err)
	require.Empty(t, all)

	reader := h.follow(t)
	first := numbered("a", 1, 3)
	h.commit(t, first...)
	stop := testenv.Run(t, h.relay(t, quick).Run)
	requireArrival(t, reader, first...)
	require.Eventually(t, func() bool { s := h.relayStatus(t, "default"); return s.Name != "" && s.Pending == 0 }, testenv.Patience, 5*time.Millisecond)
	led := h.relayStatus(t, "default")
	require.NotEmpty(t, led.Holder)
	require.True(t, led.LeaseUntil.After(time.Now()))
	require.WithinDuration(t, time.Now(), led.MovedAt, testenv.Patience)
	require.Zero(t, led.Oldest)
	stop()

	late, err := h.db.Begin(background)
	require.NoError(t, err)
	defer func() { _ = late.Rollback(background) }()
	require.NoError(t, h.record(background, late, numbered("late", 1, 2)...))
	began := time.Now()
	h.commit(t, numbered("b", 1, 4)...)
	stood := h.relayStatus(t, "default")
	require.Empty(t, stood.Holder)
	require.Zero(t, stood.LeaseUntil)
	require.EqualValues(t, 4, stood.Pending)
	require.False(t, stood.PendingMore)
	require.WithinDuration(t, began, stood.Oldest, testenv.Patience)
	require.NoError(t, late.Commit(background))
	require.EqualValues(t, 6, h.relayStatus(t, "default").Pending)
}

// In an open window, only the remaining events are pending. Rows of outbox_failed are counted by their
// status.
func TestInspectOpenWindow(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	testenv.RealBrokers(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1, "max.message.bytes", "2000")
	h.commit(t, oracle.Event{ID: uuid.NewString(), Key: "a", Version: 1, Filler: random(4000)})
	h.commit(t, numbered("a", 2, 2)...)
	h.commit(t, numbered("b", 1, 7)...)
	reader := h.follow(t)
	stop := testenv.Run(t, h.relay(t, quick).Run)
	b := numbered("b", 8, 1)
	h.commit(t, b...)
	requireArrival(t, reader, b...)
	stop()
	s := h.relayStatus(t, "default")
	require.Equal(t, []int64{0, 1, 2, 0, 1, 0}, []int64{s.Waiting, s.Failed, s.Parked, s.Dead, s.ParkedKeys, s.HeldKeys})
	require.Zero(t, s.Pending)

	h.commit(t, numbered("c", 1, 5)...)
	_, err := h.db.Exec(background, fmt.Sprintf(`
		INSERT INTO %[1]s.outbox_cursor (relay, last_processed_id, snapshot, window_snapshot, highest_id, system_identifier, epoch)
		SELECT relay, (SELECT max(id) - 2 FROM %[1]s.outbox), snapshot, pg_current_snapshot(), highest_id, system_identifier, epoch
		  FROM %[1]s.outbox_cursor ORDER BY id DESC LIMIT 1`, pgx.Identifier{h.schema}.Sanitize()))
	require.NoError(t, err)
	require.EqualValues(t, 2, h.relayStatus(t, "default").Pending)
}

func TestInspectProgress(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	i := h.inspector(t)
	since := time.Now().Add(-10 * time.Second)
	first := numbered("a", 1, 1)
	h.commit(t, first...)
	reader := h.follow(t)
	stop := testenv.Run(t, h.relay(t, quick).Run)
	requireArrival(t, reader, first...)
	var all []oracle.Event
	for n := range 5 {
		all = append(all, numbered("b", 1+10*n, 10)...)
		h.commit(t, all[10*n:]...)
	}
	requireArrival(t, reader, all...)
	stop()
	progress, err := i.Progress(background, "default", since, time.Second)
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(progress), 10)
	var events int64
	var latency time.Duration
	for n, p := range progress {
		require.True(t, n == 0 || p.At.Equal(progress[n-1].At.Add(time.Second)))
		events, latency = events+p.Events, max(latency, p.Latency)
	}
	require.EqualValues(t, 51, events)
	require.Positive(t, latency)
	require.Less(t, latency, testenv.Patience)

	_, err = i.Progress(background, "default", since, time.Millisecond)
	require.ErrorContains(t, err, "step")
	_, err = i.Progress(background, "default", time.Now().Add(-30*24*time.Hour), time.Second)
	require.ErrorContains(t, err, "steps")
}

// Progress ends now by the clock of the database, although that of this host is behind or ahead.
func TestInspectProgressByAnotherClock(t *testing.T) {
	t.Parallel()
	for _, ahead := range []time.Duration{6 * time.Minute, -6 * time.Minute} {
		_, schema := testenv.Migrated(t)
		db := testenv.OtherClock(t, ahead)
		_, err := db.Exec(background, pg.InSchema(`
			INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, window_snapshot, highest_id, system_identifier, epoch, created_at)
			SELECT 'default', n, pg_current_snapshot(), pg_current_snapshot(), n, (SELECT system_identifier FROM pg_control_system()), 7, now() - (2 - n) * interval '30 s'
			  FROM generate_series(0, 1) AS n`, schema))
		require.NoError(t, err)
		i, err := outboxops.NewInspector(db, outboxops.InspectorConfig{Schema: schema})
		require.NoError(t, err)
		now := time.Now().Add(ahead)
		progress, err := i.Progress(background, "default", now.Add(-50*time.Second), 10*time.Second)
		require.NoError(t, err)
		require.Len(t, progress, 5)
		require.WithinDuration(t, now, progress[4].At, testenv.Patience)
		var events int64
		for _, p := range progress {
			events += p.Events
		}
		require.EqualValues(t, 1, events)
	}
}

// The oldest transaction is shown with its statement, and whether events wait in it. This also holds for a
// prepared transaction.
func TestInspectTransactions(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	i := h.inspector(t)
	mine := func() (found []outboxops.OpenTransaction) {
		all, err := i.Transactions(background, 0)
		require.NoError(t, err)
		require.True(t, slices.IsSortedFunc(all, func(a, b outboxops.OpenTransaction) int { return a.Since.Compare(b.Since) }))
		return slices.DeleteFunc(all, func(o outboxops.OpenTransaction) bool { return !o.Recording })
	}
	require.Empty(t, mine())
	tx, err := h.db.Begin(background)
	require.NoError(t, err)
	require.NoError(t, h.record(background, tx, numbered("a", 1, 1)...))
	var pid int
	require.NoError(t, tx.QueryRow(background, `SELECT pg_backend_pid()`).Scan(&pid))
	found := mine()
	require.Len(t, found, 1)
	require.Equal(t, pid, found[0].PID)
	require.Equal(t, "idle in transaction", found[0].State)
	require.Contains(t, found[0].Query, "pg_backend_pid")
	require.WithinDuration(t, time.Now(), found[0].Since, testenv.Patience)
	all, err := i.Transactions(background, time.Hour)
	require.NoError(t, err)
	require.NotContains(t, all, found[0])

	name := "prepared-" + uuid.NewString()
	_, err = tx.Exec(background, fmt.Sprintf(`PREPARE TRANSACTION '%s'`, name))
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = h.db.Exec(background, fmt.Sprintf(`ROLLBACK PREPARED '%s'`, name)) }) // or the schema cannot go
	_ = tx.Rollback(background)                                                                     // of nothing
	found = mine()
	require.Len(t, found, 1)
	require.Equal(t, []any{name, "prepared", 0}, []any{found[0].Prepared, found[0].State, found[0].PID})
	_, err = h.db.Exec(background, fmt.Sprintf(`ROLLBACK PREPARED '%s'`, name))
	require.NoError(t, err)
	require.Empty(t, mine())
}

func TestInspectEvents(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	i := h.inspector(t)
	ctx := outbox.WithCorrelationID(background, "order-7")
	a, b := numbered("a", 1, 3), numbered("b", 1, 2)
	require.NoError(t, pgx.BeginFunc(ctx, h.db, func(tx pgx.Tx) error { return h.record(ctx, tx, slices.Concat(a, b)...) }))

	list := func(f outboxops.EventFilter, p outboxops.EventPage) (versions []string) {
		events, err := i.Events(background, f, p)
		require.NoError(t, err)
		for _, e := range events {
			require.Equal(t, []string{"test.oracle.happened.v1", "test", "Key", h.topic, e.AggregateID}, []string{e.Type, e.Source, e.AggregateType, e.Topic, e.Key})
			require.Positive(t, e.Size)
			require.Nil(t, e.Payload)
			versions = append(versions, e.AggregateID)
		}
		return versions
	}
	require.Equal(t, []string{"b", "b", "a", "a", "a"}, list(outboxops.EventFilter{}, outboxops.EventPage{}))
	require.Equal(t, []string{"b", "b"}, list(outboxops.EventFilter{AggregateType: "Key", AggregateID: "b"}, outboxops.EventPage{}))
	require.Empty(t, list(outboxops.EventFilter{Type: "test.oracle.other.v1"}, outboxops.EventPage{}))
	require.Empty(t, list(outboxops.EventFilter{Until: time.Now().Add(-time.Hour)}, outboxops.EventPage{}))
	require.Len(t, list(outboxops.EventFilter{Since: time.Now().Add(-time.Hour)}, outboxops.EventPage{Limit: 4}), 4)
	all, err := i.Events(background, outboxops.EventFilter{}, outboxops.EventPage{})
	require.NoError(t, err)
	require.Equal(t, []string{"a", "a", "a"}, list(outboxops.EventFilter{}, outboxops.EventPage{Before: all[1].OutboxID}))
	require.Len(t, list(outboxops.EventFilter{EventID: all[2].EventID}, outboxops.EventPage{}), 1)
	_, err = i.Events(background, outboxops.EventFilter{}, outboxops.EventPage{Limit: -1})
	require.ErrorContains(t, err, "Limit")

	reader := h.follow(t)
	stop := testenv.Run(t, h.relay(t, quick).Run)
	requireArrival(t, reader, slices.Concat(a, b)...)
	stop()
	late := numbered("c", 1, 1)
	h.commit(t, late...)
	whole, err := i.Event(background, all[0].OutboxID)
	require.NoError(t, err)
	require.JSONEq(t, fmt.Sprintf(`{"id":%q,"key":"b","version":2,"filler":""}`, b[1].ID), string(whole.Payload))
	require.Equal(t, map[string]string{"correlationid": "order-7"}, whole.Headers)
	require.Equal(t, []string{"default"}, whole.AttemptedBy)
	require.Empty(t, whole.PendingFor)
	_, err = h.db.Exec(background, fmt.Sprintf(`
		INSERT INTO %[1]s.outbox_failed (relay, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id,
		       payload, content_type, occurred_at, created_at, status)
		SELECT 'default', id, 't/k', event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at, 'dead'
		  FROM %[1]s.outbox WHERE id = $1`, pgx.Identifier{h.schema}.Sanitize()), all[1].OutboxID)
	require.NoError(t, err)
	newest, err := i.Events(background, outboxops.EventFilter{}, outboxops.EventPage{Limit: 3})
	require.NoError(t, err)
	require.Equal(t, [][]string{{"default"}, {}, {}}, [][]string{newest[0].PendingFor, newest[1].PendingFor, newest[2].PendingFor})
	require.Equal(t, [][]string{{}, {"default"}, {"default"}}, [][]string{newest[0].AttemptedBy, newest[1].AttemptedBy, newest[2].AttemptedBy})
	require.Equal(t, []outboxops.EventFailure{{ID: outboxops.FailureID{Kind: outboxops.KindEvent, Number: 1}, Relay: "default", Status: outbox.StatusDead}}, newest[2].Failures)
	require.Empty(t, newest[1].Failures)
	whole, err = i.Event(background, newest[0].OutboxID)
	require.NoError(t, err)
	require.Equal(t, []string{"default"}, whole.PendingFor)
	require.Empty(t, whole.AttemptedBy)
	_, err = i.Event(background, 1<<60)
	require.ErrorIs(t, err, outboxops.ErrNotFound)
}

// Partitions come with their ranges, without gaps; a plain table has none.
func TestInspectPartitions(t *testing.T) {
	t.Parallel()
	none, err := newFixture(t).inspector(t).Partitions(background)
	require.NoError(t, err)
	require.Empty(t, none)

	h := newFixtureOf(t, 20)
	i := h.inspector(t)
	empty, err := i.Partitions(background)
	require.NoError(t, err)
	require.False(t, slices.ContainsFunc(empty, func(p outboxops.TablePartition) bool { return p.Current }))
	h.commit(t, numbered("a", 1, 25)...)
	parts, err := i.Partitions(background)
	require.NoError(t, err)
	require.Greater(t, len(parts), 2)
	require.EqualValues(t, math.MinInt64, parts[0].First)
	require.EqualValues(t, math.MaxInt64, parts[len(parts)-1].Behind)
	newest := int64(h.count(t, "outbox"))
	for n, p := range parts {
		require.NotEmpty(t, p.Name)
		require.Positive(t, p.Bytes)
		require.Equal(t, p.First <= newest && newest < p.Behind, p.Current, p.Name)
		if n > 0 {
			require.Equal(t, parts[n-1].Behind, p.First)
		}
	}
}

// Tail returns events when they are committed, including events of transactions that commit late. It
// returns no events that were committed before it began.
func TestInspectTail(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	h.commit(t, numbered("before", 1, 3)...)
	late, err := h.db.Begin(background)
	require.NoError(t, err)
	require.NoError(t, h.record(background, late, numbered("late", 1, 1)...))
	ctx, cancel := context.WithCancel(background)
	defer cancel()
	var mu sync.Mutex
	var seen []string
	done := make(chan error, 1)
	go func() {
		for e, err := range h.inspector(t).Tail(ctx, outboxops.EventFilter{AggregateType: "Key"}) {
			if err != nil || len(e.Payload) == 0 {
				done <- fmt.Errorf("event %d has %d bytes: %w", e.OutboxID, len(e.Payload), err)
				return
			}
			mu.Lock()
			seen = append(seen, e.AggregateID)
			mu.Unlock()
		}
		done <- nil
	}()
	saw := func(key string) func() bool {
		return func() bool {
			mu.Lock()
			defer mu.Unlock()
			return slices.Contains(seen, key)
		}
	}
	for n := range 1000 {
		h.commit(t, numbered("now", n, 1)...)
		if saw("now")() {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	require.Eventually(t, saw("now"), testenv.Patience, 5*time.Millisecond)
	require.NoError(t, late.Commit(background))
	require.Eventually(t, saw("late"), testenv.Patience, 5*time.Millisecond)
	cancel()
	require.NoError(t, <-done)
	require.False(t, saw("before")())
}

// A loop that ends ends the tail, and gives its connection back.
func TestInspectTailEnds(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	done := make(chan int, 1)
	go func() {
		seen := 0
		for _, err := range h.inspector(t).Tail(background, outboxops.EventFilter{}) {
			if seen++; err != nil || seen == 2 {
				break
			}
		}
		done <- seen
	}()
	require.Eventually(t, func() bool {
		h.commit(t, numbered("end", 1, 5)...)
		select {
		case seen := <-done:
			require.Equal(t, 2, seen)
			return true
		case <-time.After(5 * time.Millisecond):
			return false
		}
	}, testenv.Patience, 5*time.Millisecond)
	require.Eventually(t, func() bool { return h.db.Stat().AcquiredConns() == 0 }, testenv.Patience, 5*time.Millisecond)
}

// An error comes without an event, and ends the tail.
func TestInspectTailFails(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	i, err := outboxops.NewInspector(db, outboxops.InspectorConfig{Schema: schema})
	require.NoError(t, err)
	var errs []error
	for e, err := range i.Tail(background, outboxops.EventFilter{}) {
		require.Zero(t, e)
		errs = append(errs, err)
	}
	require.Len(t, errs, 1)
	require.ErrorContains(t, errs[0], "tail events")
}

// Topics come from rows and from types, of recorded and of failed events.
func TestInspectTopics(t *testing.T) {
	t.Parallel()
	h, _ := newPoisonedFixture(t)
	all, err := h.inspector(t).Topics(background)
	require.NoError(t, err)
	require.Empty(t, all)
	h.commit(t, poison("bad", 1))
	h.commit(t, numbered("good", 1, 2)...)
	cfg := patiently()
	testenv.Run(t, h.relay(t, cfg).Run)
	h.awaitStatuses(t, map[string]int{outbox.StatusDead: 1})
	_, err = h.db.Exec(background, h.sql(`INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		SELECT gen_random_uuid(), kind, 's', 'a', 'i', '{}', 'application/json', now() FROM unnest($1::text[]) AS kind`),
		[]string{"test.anorder.canceled.v1", "test.anorder.created.v1", "nowhere"})
	require.NoError(t, err)
	all, err = h.inspector(t).Topics(background)
	require.NoError(t, err)
	for i := range all {
		require.WithinDuration(t, time.Now(), all[i].Newest, testenv.Patience)
		all[i].Newest = time.Time{}
	}
	require.Equal(t, []outboxops.RecordedTopic{
		{Topic: "", Types: []string{"nowhere"}, Events: 1},
		{Topic: "anorder-events", Types: []string{"test.anorder.canceled.v1", "test.anorder.created.v1"}, Events: 2},
		{Topic: h.topic, Types: []string{"test.oracle.happened.v1"}, Events: 3}, // one of them has failed
	}, all)
	_, err = h.db.Exec(background, h.sql(`DELETE FROM {schema}.outbox WHERE event_type LIKE 'test.oracle.%'`)) // as retention does
	require.NoError(t, err)
	all, err = h.inspector(t).Topics(background)
	require.NoError(t, err)
	require.Equal(t, h.topic, all[2].Topic)
	require.EqualValues(t, 1, all[2].Events, "what has failed is left")
}
