package outboxops_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

var kim = outboxops.AuditInfo{Operator: "kim", Reason: "the topic's limit was too small"}

// operator returns the failed events of the fixture.
func (h *opsFixture) operator(t *testing.T) *outboxops.Failures {
	t.Helper()
	f, err := outboxops.NewFailures(h.db, outboxops.FailuresConfig{Schema: h.schema})
	require.NoError(t, err)
	return f
}

// only returns the single failed event with a status.
func only(t *testing.T, f *outboxops.Failures, status string) outboxops.Failure {
	t.Helper()
	rows, err := f.List(background, outboxops.FailureFilter{Statuses: []string{status}}, outboxops.FailurePage{})
	require.NoError(t, err)
	require.Len(t, rows, 1)
	return rows[0]
}

// patiently retries soon, and has one try until an event is dead.
func patiently() outbox.RelayConfig {
	cfg := quick
	cfg.Retry.MaxRetries = 1
	return cfg
}

// dead makes the fixture's relay fail on a poison event of key bad until it is dead. Followers come behind
// it.
func (h *opsFixture) dead(t *testing.T, cfg outbox.RelayConfig, followers ...oracle.Event) (event oracle.Event, stop func()) {
	t.Helper()
	event = poison("bad", 1)
	stop = testenv.Run(t, h.relay(t, cfg).Run)
	h.commit(t, append([]oracle.Event{event}, followers...)...)
	require.Eventually(t, func() bool { return h.statuses(t)[outbox.StatusDead] == 1 }, testenv.Patience, 10*time.Millisecond)
	return event, stop
}

func (h *opsFixture) actions(t *testing.T, f *outboxops.Failures, id outboxops.FailureID) (actions []string) {
	t.Helper()
	entries, err := f.Audit(background, id, outboxops.AuditPage{})
	require.NoError(t, err)
	for _, e := range slices.Backward(entries) {
		require.WithinDuration(t, time.Now(), e.At, testenv.Patience)
		require.Equal(t, "default", e.Relay)
		require.Equal(t, h.topic, e.Topic)
		actions = append(actions, e.Operator+" "+e.Action+" "+e.Key)
	}
	return actions
}

// An operator sees a dead event. After a retry it is sent, if Kafka takes it now.
func TestRetryDeadEvent(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	f := h.operator(t)
	event, _ := h.dead(t, patiently(), numbered("bad", 2, 3)...)
	row := only(t, f, outbox.StatusDead)
	for id, found := range map[int64]int{row.OutboxID: 1, 1 << 60: 0} {
		rows, err := f.List(background, outboxops.FailureFilter{OutboxID: id}, outboxops.FailurePage{})
		require.NoError(t, err)
		require.Len(t, rows, found)
	}
	require.Equal(t, []string{"default", h.topic, "bad", "test.oracle.happened.v1", "Key", "bad", "message_too_large"},
		[]string{row.Relay, row.Topic, row.Key, row.Type, row.AggregateType, row.AggregateID, row.Class})
	require.Equal(t, 1, row.Retries)
	require.ErrorContains(t, row.Err, "MESSAGE_TOO_LARGE")
	require.Nil(t, row.Payload)
	full, err := f.Get(background, row.ID)
	require.NoError(t, err)
	require.Contains(t, string(full.Payload), event.ID)
	require.Equal(t, "application/json", full.ContentType)

	h.setTopic(t, "max.message.bytes", "1000000")
	require.NoError(t, f.Retry(background, row.ID, kim))
	requireArrival(t, reader, event)
	h.awaitStatuses(t, map[string]int{})
	require.Equal(t, []string{"kim retry bad"}, h.actions(t, f, row.ID))
	require.ErrorIs(t, f.Retry(background, row.ID, kim), outboxops.ErrNotFound)
	_, err = f.Get(background, row.ID)
	require.ErrorIs(t, err, outboxops.ErrNotFound)
}

// deadEvents moves both groups to relay r, which has n dead events of a key. It returns the first one.
func (f *cutFixture) deadEvents(n int) (*outboxops.Failures, outboxops.FailureID) {
	f.t.Helper()
	ctx := f.t.Context()
	failures, err := outboxops.NewFailures(f.db, outboxops.FailuresConfig{Schema: f.schema})
	require.NoError(f.t, err)
	require.NoError(f.t, f.cuts.ToKafka(ctx, both, "r", why))
	f.depart(both...)
	require.NoError(f.t, f.cuts.Finish(ctx, nil, "r", why))
	f.do(`INSERT INTO {schema}.outbox_failed (relay, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at,
			created_at, retry_count, last_error, error_class, status)
		SELECT 'r', nextval('{schema}.outbox_id_seq'), 'k', gen_random_uuid(), 't.t.t.v1', 's', 'A', 'k', '1', 'application/json', 'orders', now(), now(), 1, 'e', 'c', 'dead' FROM generate_series(1, $1::int)`, n)
	all, err := failures.List(ctx, outboxops.FailureFilter{Statuses: []string{outbox.StatusDead}}, outboxops.FailurePage{})
	require.NoError(f.t, err)
	return failures, all[0].ID
}

// A dead event of a relay that a cut has ended is not retried, because no process would send it.
func TestRetryOfAnEndedRelay(t *testing.T) {
	t.Parallel()
	c, ctx := newCutFixture(t), t.Context()
	f, id := c.deadEvents(3)
	require.NoError(t, c.cuts.ToPostgres(ctx, both, "r", nil, why))
	ended := func(err error) {
		t.Helper()
		require.ErrorIs(t, err, outboxops.ErrStatus)
		require.ErrorContains(t, err, "relay r has ended by a cut and sends nothing")
	}
	ended(f.Retry(ctx, id, kim))
	ended(f.Edit(ctx, id, []byte(`{}`), kim))
	n, err := f.RetryAll(ctx, outboxops.FailureFilter{Relay: "r"}, outboxops.BulkConfig{}, kim)
	require.NoError(t, err)
	require.Zero(t, n)
	require.Equal(t, "dead 3", c.text(`SELECT status || ' ' || count(*) FROM {schema}.outbox_failed GROUP BY status`))

	require.NoError(t, c.cuts.Cancel(ctx, "r", why))
	require.NoError(t, f.Retry(ctx, id, kim), "the relay goes on")
	require.NoError(t, f.Resolve(ctx, id, kim))
}

// Nor is one of a relay that was removed, as the documents say, by deleting its rows.
func TestRetryOfARemovedRelay(t *testing.T) {
	t.Parallel()
	c, ctx := newCutFixture(t), t.Context()
	f, id := c.deadEvents(3)
	c.do(`DELETE FROM {schema}.outbox_cursor WHERE relay = 'r'`)
	c.do(`DELETE FROM {schema}.outbox_lease WHERE name = 'r'`)
	for name, err := range map[string]error{"retry": f.Retry(ctx, id, kim), "edit": f.Edit(ctx, id, []byte(`{}`), kim)} {
		require.ErrorIs(t, err, outboxops.ErrStatus, name)
		require.ErrorContains(t, err, "relay r has no position, it sends nothing", name)
	}
	n, err := f.RetryAll(ctx, outboxops.FailureFilter{}, outboxops.BulkConfig{}, kim)
	require.NoError(t, err)
	require.Zero(t, n)
	require.Equal(t, "dead 3", c.text(`SELECT status || ' ' || count(*) FROM {schema}.outbox_failed GROUP BY status`))
	require.NoError(t, f.Resolve(ctx, id, kim))
}

// A retry or an edit beside a cut waits for it, or the cut for them. So none parks an event at a relay that has ended.
func TestRetryBesideACut(t *testing.T) {
	t.Parallel()
	c, ctx := newCutFixture(t), t.Context()
	f, id := c.deadEvents(1)
	status := func() string { return c.text(`SELECT status FROM {schema}.outbox_failed`) }
	actions := map[string]func() error{"retry": func() error { return f.Retry(ctx, id, kim) }, "edit": func() error { return f.Edit(ctx, id, []byte(`2`), kim) }}

	for name, action := range actions {
		err := c.beside(`SELECT {schema}.outbox_cut_to_postgres('{a,b}', 'r', NULL, 'kim', 'x')`, "outbox_"+name+"_failed", action)
		require.ErrorIs(t, err, outboxops.ErrStatus, name)
		require.ErrorContains(t, err, "relay r has ended by a cut and sends nothing")
		require.Equal(t, outbox.StatusDead, status(), name)
		require.NoError(t, c.cuts.Cancel(ctx, "r", why))
	}
	for _, sql := range []string{`SELECT {schema}.outbox_retry_failed('{%d}', 'kim', 'x')`, `SELECT {schema}.outbox_edit_failed(%d, '2', 'kim', 'x')`} {
		sql = fmt.Sprintf(sql, id.Number)
		err := c.beside(sql, "outbox_cut_to_postgres", func() error { return c.cuts.ToPostgres(ctx, both, "r", nil, why) })
		c.rejects(err, "relay r has events in outbox_failed that it still has to send")
		c.do(`UPDATE {schema}.outbox_failed SET status = 'dead'`)
		_, err = c.db.Exec(ctx, pg.InSchema(`BEGIN ISOLATION LEVEL REPEATABLE READ; `+sql+`; COMMIT`, c.schema))
		require.ErrorContains(t, err, "READ COMMITTED", "it would not see the cut for which it has waited")
	}
}

// beside runs a statement in a transaction, calls action, which waits for it by another statement, and commits. It
// returns the error of action.
func (f *cutFixture) beside(sql, waiting string, action func() error) error {
	f.t.Helper()
	tx, err := f.db.Begin(background)
	require.NoError(f.t, err)
	defer func() { _ = tx.Rollback(background) }()
	_, err = tx.Exec(background, pg.InSchema(sql, f.schema))
	require.NoError(f.t, err)
	done := make(chan error, 1)
	go func() { done <- action() }()
	require.Eventually(f.t, func() bool {
		waits := f.text(`SELECT count(*)::text FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%' || $1 || '%' AND query LIKE '%' || $2 || '%'`, f.schema, waiting)
		return waits != "0" || len(done) > 0
	}, testenv.Patience, 10*time.Millisecond)
	require.NoError(f.t, tx.Commit(background))
	return <-done
}

// A dead event that is retried comes before the waiting later events of its key.
func TestRetryKeepsTheOrderOfTheKey(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	f := h.operator(t)
	second := poison("bad", 2)
	cfg := patiently()
	cfg.Retry.MaxRetries = 2
	stop := testenv.Run(t, h.relay(t, cfg).Run)
	first := poison("bad", 1)
	h.commit(t, first)
	h.awaitStatuses(t, map[string]int{outbox.StatusDead: 1})
	third := numbered("bad", 3, 30)
	h.commit(t, append([]oracle.Event{second}, third...)...)
	h.awaitStatuses(t, map[string]int{outbox.StatusDead: 1, outbox.StatusFailed: 1, outbox.StatusParked: 30})
	stop()
	row := only(t, f, outbox.StatusDead)
	require.NoError(t, f.Retry(background, row.ID, kim))
	h.setTopic(t, "max.message.bytes", "1000000")
	testenv.Run(t, h.relay(t, cfg).Run)
	all := append([]oracle.Event{first, second}, third...)
	requireArrival(t, reader, all...)
	requireInOrder(t, reader, all)
	h.awaitStatuses(t, map[string]int{})
}

// A resolved event is never sent, and the events behind it go on.
func TestResolveFailedEvent(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	f := h.operator(t)
	testenv.Run(t, h.relay(t, quick).Run)
	events := numbered("bad", 2, 20)
	h.commit(t, append([]oracle.Event{poison("bad", 1)}, events...)...)
	h.awaitStatuses(t, map[string]int{outbox.StatusFailed: 1, outbox.StatusParked: 20})
	head := only(t, f, outbox.StatusFailed)
	require.NoError(t, f.Resolve(background, head.ID, kim))
	requireArrival(t, reader, events...)
	requireInOrder(t, reader, events)
	h.awaitStatuses(t, map[string]int{outbox.StatusResolved: 1})
	row, err := f.Get(background, head.ID)
	require.NoError(t, err)
	require.Equal(t, []string{"kim", kim.Reason}, []string{row.ResolvedBy, row.Resolution})
	require.WithinDuration(t, time.Now(), row.ResolvedAt, testenv.Patience)
	for name, again := range map[string]func(context.Context, outboxops.FailureID, outboxops.AuditInfo) error{"resolve": f.Resolve, "retry": f.Retry} {
		err := again(background, head.ID, kim)
		require.ErrorIs(t, err, outboxops.ErrStatus, name)
		require.ErrorContains(t, err, "it is resolved", name)
	}
	require.Equal(t, []string{"kim resolve bad"}, h.actions(t, f, head.ID))
}

// A parked event cannot be retried, but the event in front of it can.
func TestRetryOfAParkedEvent(t *testing.T) {
	t.Parallel()
	h, _ := newPoisonedFixture(t)
	f := h.operator(t)
	testenv.Run(t, h.relay(t, quick).Run)
	h.commit(t, append([]oracle.Event{poison("bad", 1)}, numbered("bad", 2, 1)...)...)
	h.awaitStatuses(t, map[string]int{outbox.StatusFailed: 1, outbox.StatusParked: 1})
	require.ErrorIs(t, f.Retry(background, only(t, f, outbox.StatusParked).ID, kim), outboxops.ErrStatus)
	require.ErrorIs(t, f.Edit(background, only(t, f, outbox.StatusParked).ID, []byte(`{}`), kim), outboxops.ErrStatus)
	require.Empty(t, h.actions(t, f, outboxops.FailureID{}))
}

// A held key sends no events until it is released, even if Kafka would take them. Other keys go on.
func TestHoldKey(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	f := h.operator(t)
	stop := testenv.Run(t, h.relay(t, quick).Run)
	events := append([]oracle.Event{poison("bad", 1)}, numbered("bad", 2, 20)...)
	others := append([]oracle.Event{poison("other", 1)}, numbered("other", 2, 9)...)
	h.commit(t, append(events[:10:10], others...)...)
	h.awaitStatuses(t, map[string]int{outbox.StatusFailed: 2, outbox.StatusParked: 18})
	stop()
	row, err := f.List(background, outboxops.FailureFilter{Key: "bad"}, outboxops.FailurePage{Limit: 1})
	require.NoError(t, err)
	bad := row[0].ID
	require.NoError(t, f.Hold(background, bad, kim))
	h.setTopic(t, "max.message.bytes", "1000000")
	_, err = h.db.Exec(background, h.sql(`UPDATE {schema}.outbox_failed SET next_retry_at = now()`))
	require.NoError(t, err)
	testenv.Run(t, h.relay(t, quick).Run)
	h.commit(t, events[10:]...)
	requireArrival(t, reader, others...)
	h.awaitStatuses(t, map[string]int{outbox.StatusFailed: 1, outbox.StatusParked: 20})
	require.ErrorIs(t, f.Retry(background, only(t, f, outbox.StatusFailed).ID, kim), outboxops.ErrStatus)
	n, err := f.RetryAll(background, outboxops.FailureFilter{}, outboxops.BulkConfig{}, kim)
	require.NoError(t, err)
	require.Zero(t, n, "it is held")
	require.False(t, reader.Has(events[0].ID))

	require.NoError(t, f.Release(background, bad, kim))
	requireArrival(t, reader, events...)
	requireInOrder(t, reader, events)
	require.Equal(t, []string{"kim hold bad", "kim release bad"}, h.actions(t, f, outboxops.FailureID{}))
	h.awaitStatuses(t, map[string]int{}) // the rows go when the events have arrived
	require.ErrorIs(t, f.Hold(background, bad, kim), outboxops.ErrNotFound)
	require.ErrorIs(t, f.Release(background, bad, kim), outboxops.ErrNotFound)
}

// Under HoldDead a key can go on without its dead event, which stays dead.
func TestReleaseKeyOfDeadEvent(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	f := h.operator(t)
	cfg := patiently()
	cfg.HoldDead = true
	events := numbered("bad", 2, 5)
	h.dead(t, cfg, events...)
	h.awaitStatuses(t, map[string]int{outbox.StatusDead: 1, outbox.StatusParked: 5})
	row := only(t, f, outbox.StatusDead)
	require.True(t, row.Held)
	require.NoError(t, f.Release(background, row.ID, kim))
	again := f.Release(background, row.ID, kim)
	require.ErrorIs(t, again, outboxops.ErrStatus)
	require.ErrorContains(t, again, "its key is not held")
	requireArrival(t, reader, events...)
	h.awaitStatuses(t, map[string]int{outbox.StatusDead: 1})
	more := numbered("bad", 10, 5)
	h.commit(t, more...)
	requireArrival(t, reader, more...)
}

// A dead event that later events had passed can hold its key. Then later events are held too.
func TestHoldKeyOfDeadEvent(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	f := h.operator(t)
	h.dead(t, patiently())
	bad := only(t, f, outbox.StatusDead).ID
	require.NoError(t, f.Hold(background, bad, kim))
	events := numbered("bad", 2, 0)
	for i := 2; h.statuses(t)[outbox.StatusParked] == 0; i++ { // events before the next poll still pass
		events = append(events, numbered("bad", i, 1)...)
		h.commit(t, events[len(events)-1])
	}
	require.NoError(t, f.Release(background, bad, kim))
	requireArrival(t, reader, events...)
	requireInOrder(t, reader, events)
}

func TestEditDeadEvent(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	f := h.operator(t)
	event, _ := h.dead(t, patiently())
	row := only(t, f, outbox.StatusDead)
	var rejected *outbox.FieldError
	for _, bad := range []string{``, `{`, `{} {}`, `"\ud800"`, `"\u0000"`} {
		require.ErrorAs(t, f.Edit(background, row.ID, []byte(bad), kim), &rejected, bad)
		require.Equal(t, "payload", rejected.Field)
	}
	edited := event
	edited.Filler = "short"
	full, err := f.Get(background, row.ID)
	require.NoError(t, err)
	payload := strings.Replace(string(full.Payload), event.Filler, edited.Filler, 1)
	require.NoError(t, f.Edit(background, row.ID, []byte(payload), kim))
	requireArrival(t, reader, event)
	requireInOrder(t, reader, []oracle.Event{edited})
	h.awaitStatuses(t, map[string]int{})
	entries, err := f.Audit(background, row.ID, outboxops.AuditPage{})
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.Equal(t, "edit", entries[0].Action)
	require.JSONEq(t, string(full.Payload), string(entries[0].Payload), "what it was")
}

// Dead events of a class in RetryDeadAfter have all their tries again after a while, and
// an audit row.
func TestRetryDeadAfter(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	f := h.operator(t)
	cfg := patiently()
	cfg.RetryDeadAfter = map[string]time.Duration{"message_too_large": 100 * time.Millisecond}
	event, _ := h.dead(t, cfg)
	row := only(t, f, outbox.StatusDead)
	require.Eventually(t, func() bool { return len(h.actions(t, f, row.ID)) >= 2 }, testenv.Patience, 20*time.Millisecond, "it dies again, and is retried again")
	require.Equal(t, "relay default retry bad", h.actions(t, f, row.ID)[0])
	h.setTopic(t, "max.message.bytes", "1000000")
	requireArrival(t, reader, event)
}

// insertFailed adds rows of every status, of the types a.order.placed.v1 and
// a.user.joined.v1, of a relay that does not run.
func (h *opsFixture) insertFailed(t *testing.T, n int) {
	t.Helper()
	h.position(t, "default")
	_, err := h.db.Exec(background, h.sql(`
INSERT INTO {schema}.outbox_failed (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type,
            occurred_at, created_at, status, error_class, last_error, failed_at)
SELECT i, (ARRAY['order-events','user-events'])[1 + i % 2] || '/key/' || i % 10, gen_random_uuid(),
       (ARRAY['a.order.placed.v1','a.user.joined.v1'])[1 + i % 2], 's', 'A', 'id-' || i % 10, '{}', 'application/json', now(), now(),
       (ARRAY['waiting','failed','parked','dead','resolved'])[1 + i % 5], CASE WHEN i % 5 <> 2 THEN 'class-' || i % 3 END, 'bad', now() - i * interval '1 hour'
  FROM generate_series(0, $1::int - 1) AS i`), n)
	require.NoError(t, err)
}

func TestListFailedEvents(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	h.insertFailed(t, 300)
	now := time.Now()
	filters := []struct {
		name   string
		filter outboxops.FailureFilter
		want   func(i int) bool
	}{
		{"what is not resolved", outboxops.FailureFilter{}, func(i int) bool { return i%5 != 4 }},
		{"by status", outboxops.FailureFilter{Statuses: []string{"dead", "resolved"}}, func(i int) bool { return i%5 >= 3 }},
		{"by type", outboxops.FailureFilter{Type: "a.user.joined.v1"}, func(i int) bool { return i%5 != 4 && i%2 == 1 }},
		{"by topic", outboxops.FailureFilter{Topic: "order-events"}, func(i int) bool { return i%5 != 4 && i%2 == 0 }},
		{"by a part of a topic's name", outboxops.FailureFilter{Topic: "order"}, func(int) bool { return false }},
		{"by key", outboxops.FailureFilter{Key: "key/3"}, func(i int) bool { return i%5 != 4 && i%10 == 3 }},
		{"by aggregate", outboxops.FailureFilter{AggregateType: "A", AggregateID: "id-3"}, func(i int) bool { return i%5 != 4 && i%10 == 3 }},
		{"by class", outboxops.FailureFilter{Class: "class-1"}, func(i int) bool { return i%5 != 4 && i%5 != 2 && i%3 == 1 }},
		{"by relay", outboxops.FailureFilter{Relay: "other"}, func(int) bool { return false }},
		{"by time", outboxops.FailureFilter{Since: now.Add(-100*time.Hour - 30*time.Minute), Until: now.Add(-10*time.Hour - 30*time.Minute)},
			func(i int) bool { return i%5 != 4 && i > 10 && i <= 100 }},
	}
	for _, tt := range filters {
		t.Run(tt.name, func(t *testing.T) {
			var want, got []int64
			for i := 299; i >= 0; i-- {
				if tt.want(i) {
					want = append(want, int64(i))
				}
			}
			page := outboxops.FailurePage{Limit: 7}
			for {
				rows, err := f.List(background, tt.filter, page)
				require.NoError(t, err)
				if len(rows) == 0 {
					break
				}
				require.LessOrEqual(t, len(rows), 7)
				for _, row := range rows {
					got = append(got, row.OutboxID)
				}
				page = page.Next(rows)
			}
			require.Equal(t, want, got)
			counts, err := f.Count(background, tt.filter)
			require.NoError(t, err)
			total := 0
			for _, c := range counts {
				total += c.Events
			}
			require.Equal(t, len(want), total)
		})
	}
	counts, err := f.Count(background, outboxops.FailureFilter{Statuses: []string{"parked"}, Type: "a.user.joined.v1"})
	require.NoError(t, err)
	require.Len(t, counts, 1)
	require.WithinDuration(t, now.Add(-297*time.Hour), counts[0].Oldest, time.Minute)
	require.Equal(t, 30, counts[0].Events)
	newest, err := f.List(background, outboxops.FailureFilter{}, outboxops.FailurePage{Limit: 2})
	require.NoError(t, err)
	found, err := f.List(background, outboxops.FailureFilter{EventID: strings.ToUpper(newest[1].EventID)}, outboxops.FailurePage{})
	require.NoError(t, err)
	require.Equal(t, newest[1:], found)
	for _, limit := range []int{-1, 1001} {
		_, err = f.List(background, outboxops.FailureFilter{}, outboxops.FailurePage{Limit: limit})
		require.ErrorContains(t, err, "Limit")
	}
}

func TestRetryAndResolveAll(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	h.insertFailed(t, 1000)
	before := h.statuses(t)
	var progress []int
	cfg := outboxops.BulkConfig{DryRun: true, Rate: 10_000, Progress: func(done int) { progress = append(progress, done) }, Topics: map[string]int{}}
	n, err := f.RetryAll(background, outboxops.FailureFilter{Type: "a.order.placed.v1"}, cfg, kim)
	require.NoError(t, err)
	require.Equal(t, 300, n, "waiting, failed and dead")
	require.Equal(t, before, h.statuses(t))
	require.Equal(t, []int{300}, progress)
	require.Equal(t, map[string]int{"order-events": 300}, cfg.Topics)
	cfg.DryRun, cfg.Topics, progress = false, nil, nil
	n, err = f.RetryAll(background, outboxops.FailureFilter{Type: "a.order.placed.v1"}, cfg, kim)
	require.NoError(t, err)
	require.Equal(t, 300, n)
	require.Equal(t, []int{100, 200, 300}, progress)
	require.Equal(t, 100, h.statuses(t)[outbox.StatusDead])
	require.Equal(t, 300, h.statuses(t)[outbox.StatusParked])

	n, err = f.RetryAll(background, outboxops.FailureFilter{Statuses: []string{outbox.StatusParked}}, cfg, kim)
	require.NoError(t, err)
	require.Zero(t, n, "what is parked is not retried")

	n, err = f.ResolveAll(background, outboxops.FailureFilter{Class: "class-1"}, cfg, kim)
	require.NoError(t, err)
	require.Positive(t, n)
	require.Equal(t, 200+n, h.statuses(t)[outbox.StatusResolved])
	require.Equal(t, 300+n, h.count(t, "outbox_audit"))

	ctx, cancel := context.WithCancel(background)
	cfg.Progress = func(int) { cancel() }
	n, err = f.ResolveAll(ctx, outboxops.FailureFilter{}, cfg, kim)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 100, n)
}

func TestFailuresRefuse(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	_, err := outboxops.NewFailures(nil, outboxops.FailuresConfig{Schema: strings.Repeat("x", 64)})
	require.ErrorContains(t, err, "pool")
	require.ErrorContains(t, err, "Schema")
	f, err := outboxops.NewFailures(db, outboxops.FailuresConfig{Schema: schema})
	require.NoError(t, err)
	first := outboxops.FailureID{Kind: outboxops.KindEvent, Number: 1}
	for _, action := range []func(outboxops.AuditInfo) error{
		func(a outboxops.AuditInfo) error { return f.Retry(background, first, a) },
		func(a outboxops.AuditInfo) error { return f.Resolve(background, first, a) },
		func(a outboxops.AuditInfo) error { return f.Edit(background, first, nil, a) },
		func(a outboxops.AuditInfo) error { return f.Hold(background, first, a) },
		func(a outboxops.AuditInfo) error { return f.Release(background, first, a) },
		func(a outboxops.AuditInfo) error {
			_, err := f.RetryAll(background, outboxops.FailureFilter{}, outboxops.BulkConfig{Rate: -1}, a)
			require.ErrorContains(t, err, "Rate")
			return err
		},
	} {
		err := action(outboxops.AuditInfo{})
		require.ErrorContains(t, err, "Operator")
		require.ErrorContains(t, err, "Reason")
		require.ErrorIs(t, err, outbox.ErrEmpty)
		require.ErrorIs(t, action(outboxops.AuditInfo{Operator: "kim", Reason: " \n"}), outbox.ErrEmpty)
		require.ErrorIs(t, action(outboxops.AuditInfo{Operator: strings.Repeat("x", 101), Reason: "r"}), outbox.ErrTooLong)
	}
	_, err = f.List(background, outboxops.FailureFilter{}, outboxops.FailurePage{})
	var missing interface{ SQLState() string }
	require.ErrorAs(t, err, &missing)
	require.Equal(t, "42P01", missing.SQLState())
	require.NotErrorIs(t, err, pgx.ErrNoRows)
}
