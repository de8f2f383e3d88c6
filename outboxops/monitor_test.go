package outboxops_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/stretchr/testify/require"
)

// mailbox is an alerter that keeps alerts, after it has failed as often as fails says.
type mailbox struct {
	mu     sync.Mutex
	alerts []outbox.Alert
	fails  int
	checks int // alerts that were tried
}

func (m *mailbox) Alert(_ context.Context, a outbox.Alert) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.checks++
	if m.fails > 0 {
		m.fails--
		return errors.New("mailbox is full")
	}
	m.alerts = append(m.alerts, a)
	return nil
}

// received returns the kinds of received alerts, with ! for the end of an alert.
func (m *mailbox) received(kinds ...outbox.AlertKind) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []string
	for _, a := range m.alerts {
		for _, kind := range kinds {
			if a.Kind == kind {
				all = append(all, string(a.Kind)+map[bool]string{true: "!"}[a.Over])
			}
		}
	}
	return strings.Join(all, " ")
}

// deaths returns, for each dead event, the number of alerts with its id.
func (m *mailbox) deaths() map[int64]int {
	m.mu.Lock()
	defer m.mu.Unlock()
	deaths := map[int64]int{}
	for _, a := range m.alerts {
		for _, e := range a.Dead {
			deaths[e.ID]++
		}
	}
	return deaths
}

// await waits until an alert of a kind has come, and returns the last one.
func (m *mailbox) await(t *testing.T, kind outbox.AlertKind, over bool) (found outbox.Alert) {
	t.Helper()
	require.Eventually(t, func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, a := range m.alerts {
			if a.Kind == kind && a.Over == over {
				found = a
			}
		}
		return found.Kind != ""
	}, testenv.Patience, 5*time.Millisecond, "no %s", kind)
	return found
}

func (h *opsFixture) monitor(t *testing.T, alerts outbox.AlertConfig) *outboxops.Monitor {
	t.Helper()
	m, err := outboxops.NewMonitor(h.db, outboxops.MonitorConfig{Schema: h.schema, Alerts: alerts, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	return m
}

func TestMonitorConfig(t *testing.T) {
	t.Parallel()
	_, err := outboxops.NewMonitor(nil, outboxops.MonitorConfig{Schema: "$user", Alerts: outbox.AlertConfig{
		Interval: -1, ReportInterval: -1, DeadThreshold: -1, StaleAfter: -1, StalePending: 1_000_000,
	}})
	require.ErrorIs(t, err, outbox.ErrNilArgument)
	for _, field := range []string{"db", "Schema", "Interval", "ReportInterval", "DeadThreshold", "StaleAfter", "StalePending"} {
		require.ErrorContains(t, err, field)
	}
}

// A monitor sends one alert for events that wait too long and for a relay that no process runs. It sends
// another message when the condition has ended.
func TestStaleEventsAreAlertedTo(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	reader := h.follow(t)
	box := &mailbox{}
	first := numbered("a", 1, 1)
	h.commit(t, first...)
	stop := testenv.Run(t, h.relay(t, quick).Run)
	requireArrival(t, reader, first...)
	stop()
	h.commit(t, numbered("a", 2, 2)...)
	testenv.Run(t, h.monitor(t, outbox.AlertConfig{Alerter: box, Interval: 5 * time.Millisecond, StaleAfter: time.Millisecond, StalePending: 3}).Run)
	a := box.await(t, outbox.AlertNoLeader, false)
	require.Equal(t, "relay default: no process runs it, 2 events wait", a.String())
	require.Empty(t, box.received(outbox.AlertStale), "not as many")
	h.commit(t, numbered("a", 4, 1)...)
	a = box.await(t, outbox.AlertStale, false)
	require.Equal(t, "default", a.Status.Name)
	require.LessOrEqual(t, a.Status.Pending, int64(3), "it is of the moment before")
	require.Contains(t, a.String(), "relay default: 3 events are not published, the oldest for ")
	h.commit(t, numbered("a", 5, 10)...) // more of the same is no news

	stop = testenv.Run(t, h.relay(t, quick).Run)
	box.await(t, outbox.AlertNoLeader, true)
	box.await(t, outbox.AlertStale, true)
	stop()
	require.Equal(t, "no_leader no_leader!", box.received(outbox.AlertNoLeader)[:len("no_leader no_leader!")])
	require.Equal(t, "stale_events stale_events!", box.received(outbox.AlertStale))
}

// Stale events are counted in outbox, in outbox_failed, as deliveries of a group, and in front of its
// workers. Younger and settled events are not counted.
func TestStaleEventsAreFoundEverywhere(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	h.exec(t, `INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT n, 0, pg_current_snapshot(), 0, system_identifier, 1 FROM pg_control_system(), unnest('{default,worker:stats,worker:gone}'::text[]) AS n`)
	h.exec(t, `INSERT INTO {schema}.event_subscription (consumer_group, state, relay) VALUES ('stats', 'active', NULL), ('gone', 'left', 'default')`)
	h.commit(t, numbered("a", 1, 5)...)
	h.exec(t, `UPDATE {schema}.outbox SET created_at = now() - interval '1 h', xid = DEFAULT WHERE id <> (SELECT max(id) FROM {schema}.outbox)`)
	for status, n := range map[string]int{"waiting": 3, "failed": 2, "parked": 4, "dead": 7, "resolved": 9} {
		h.exec(t, `INSERT INTO {schema}.outbox_failed
			(relay, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at, status, error_class)
			SELECT 'default', 1000 * length($2) + n, 'b-events/k', gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', '{}', 'application/json',
			       now(), now() - CASE WHEN n = 1 THEN '0' ELSE '2 h' END::interval, $2, CASE WHEN $2 <> 'parked' THEN 'unknown_topic' END
			  FROM generate_series(1, $1::int) AS n`, n, status)
	}
	h.deliver(t, "k", "FWKKD")
	h.deliverTo(t, "mails", "SENT", "l", "DPKK")
	h.exec(t, `UPDATE {schema}.event_delivery SET recorded_at = now() - interval '3 h' WHERE consumer_group = 'stats' OR position < 4`)
	inspector, err := outboxops.NewInspector(h.db, outboxops.InspectorConfig{Schema: h.schema})
	require.NoError(t, err)
	stale, err := inspector.Stale(background, 30*time.Minute)
	require.NoError(t, err)
	now := time.Now()
	for i := range stale {
		stale[i].Oldest = now.Add(-now.Sub(stale[i].Oldest).Round(time.Hour))
	}
	const mine, theirs, delivered = "test.oracle.happened.v1", "a.b.c.v1", "shop.order.created.v1"
	require.ElementsMatch(t, []outbox.EventCount{
		{Relay: "default", Status: "pending", Type: mine, Events: 4, Oldest: now.Add(-time.Hour)},
		{Group: "stats", Status: "pending", Type: mine, Events: 4, Oldest: now.Add(-time.Hour)},
		{Relay: "default", Status: "waiting", Type: theirs, Class: "unknown_topic", Events: 2, Oldest: now.Add(-2 * time.Hour)},
		{Relay: "default", Status: "failed", Type: theirs, Class: "unknown_topic", Events: 1, Oldest: now.Add(-2 * time.Hour)},
		{Relay: "default", Status: "parked", Type: theirs, Events: 3, Oldest: now.Add(-2 * time.Hour)},
		{Group: "stats", Action: "COUNTED", Status: "waiting", Type: delivered, Events: 1, Oldest: now.Add(-3 * time.Hour)},
		{Group: "stats", Action: "COUNTED", Status: "parked", Type: delivered, Events: 2, Oldest: now.Add(-3 * time.Hour)},
		{Group: "mails", Action: "SENT", Status: "waiting", Type: delivered, Events: 1, Oldest: now.Add(-3 * time.Hour)},
		{Group: "mails", Action: "SENT", Status: "parked", Type: delivered, Events: 1, Oldest: now.Add(-3 * time.Hour)},
	}, stale)
	none, err := inspector.Stale(background, 4*time.Hour)
	require.NoError(t, err)
	require.Empty(t, none)

	box := &mailbox{}
	testenv.Run(t, h.monitor(t, outbox.AlertConfig{Alerter: box, Interval: time.Minute, StaleAfter: 30 * time.Minute, StalePending: 7}).Run)
	require.Eventually(t, func() bool { return len(box.received(outbox.AlertStale)) > len("stale_events") }, testenv.Patience, 5*time.Millisecond)
	require.Equal(t, "stale_events stale_events", box.received(outbox.AlertStale), "of the relay and of one group")
	require.Contains(t, box.alerts[0].String(), "relay default: 10 events are not published, the oldest for 2h0m")
	require.Contains(t, box.alerts[1].String(), "consumer group stats: 7 events are not handled, the oldest for 3h0m")
}

// The statement that counts pending events and the statement that counts all of them agree, in each part of
// a window.
func TestStalePendingInAWindow(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	inspector, err := outboxops.NewInspector(h.db, outboxops.InspectorConfig{Schema: h.schema})
	require.NoError(t, err)
	h.exec(t, `INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT 0, pg_current_snapshot(), 0, system_identifier, 1 FROM pg_control_system()`)
	late, err := h.db.Begin(background) // its transaction began before the window
	require.NoError(t, err)
	defer late.Rollback(background)
	require.NoError(t, h.record(background, late, numbered("late", 1, 3)...))
	h.commit(t, numbered("a", 1, 20)...)
	h.exec(t, `UPDATE {schema}.outbox_cursor SET window_snapshot = pg_current_snapshot()`)
	h.commit(t, numbered("b", 1, 5)...)
	require.NoError(t, late.Commit(background))
	for _, processed := range []int{0, 7, 23, 28} {
		h.exec(t, `UPDATE {schema}.outbox_cursor SET last_processed_id = (SELECT min(id) - 1 + $1 FROM {schema}.outbox)`, processed)
		time.Sleep(10 * time.Millisecond)
		status := h.relayStatus(t, "default")
		stale, err := inspector.Stale(background, time.Nanosecond)
		require.NoError(t, err)
		require.Len(t, stale, 1)
		require.EqualValues(t, status.Pending, stale[0].Events, "%d", processed)
	}
}

// A monitor sends one alert for each dead delivery, and one for ten unresolved dead failures of any kind.
// It reports all of them by type.
func TestDeadDeliveriesAreAlertedTo(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	box := &mailbox{}
	h.exec(t, `INSERT INTO {schema}.outbox_failed
		(relay, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at, status, error_class)
		SELECT 'default', n, 'b-events/k', gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', '{}', 'application/json', now(), now(), 'dead', 'too_large'
		  FROM generate_series(1, 6) AS n`)
	testenv.Run(t, h.monitor(t, outbox.AlertConfig{Alerter: box, Interval: 5 * time.Millisecond, ReportInterval: 5 * time.Millisecond}).Run)
	box.await(t, outbox.AlertReport, false) // so that it watches
	ids := h.deliver(t, "a", "DDDF")
	a := box.await(t, outbox.AlertDeadDeliveries, false)
	require.Regexp(t, "^consumer group stats: [123] deliver(y|ies) given up; [123] are dead$", a.String())
	require.Contains(t, ids, a.Dead[0].ID)
	require.Equal(t, []any{"stats", "COUNTED", "order-events", "a", "timeout", 2},
		[]any{a.Dead[0].Group, a.Dead[0].Action, a.Dead[0].Topic, a.Dead[0].Key, a.Dead[0].Class, a.Dead[0].Retries})
	require.Eventually(t, func() bool {
		const all = "unresolved failures: 6 dead a.b.c.v1 too_large, 3 dead shop.order.created.v1 timeout for stats COUNTED; the oldest since "
		return strings.HasPrefix(box.await(t, outbox.AlertReport, false).String(), all)
	}, testenv.Patience, 5*time.Millisecond)
	require.Empty(t, box.received(outbox.AlertManyDead), "nine")

	h.deliverTo(t, "mails", "SENT", "b", "D")
	require.Eventually(t, func() bool { return len(box.deaths()) == 4 }, testenv.Patience, 5*time.Millisecond)
	many := box.await(t, outbox.AlertManyDead, false)
	require.Contains(t, many.String(), "10 dead events and deliveries wait for a decision: 6 dead a.b.c.v1 too_large, ")
	require.NoError(t, h.operator(t).Resolve(background, outboxops.FailureID{Kind: outboxops.KindDelivery, Number: ids[0]}, kim))
	require.Equal(t, "9 dead events and deliveries are left", box.await(t, outbox.AlertManyDead, true).String())
	box.mu.Lock()
	defer box.mu.Unlock()
	died := 0
	for _, a := range box.alerts {
		died += a.Died
	}
	require.Equal(t, 4, died, "each once")
}

// Records that retention removed before a consumer group read them are in consumer_start.
func TestLostRecordsAreAlertedTo(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	_, err := h.db.Exec(background, h.sql(`INSERT INTO {schema}.consumer_start (consumer_group, topic, topic_id, partition, start_offset, position, lost, lost_at)
		VALUES ('stats', 'orders', gen_random_uuid(), 0, 0, 10, 5, now()), ('stats', 'orders', gen_random_uuid(), 1, 0, 10, 80, now()),
		       ('mail', 'orders', gen_random_uuid(), 0, 0, 10, 0, NULL)`))
	require.NoError(t, err)
	box := &mailbox{}
	testenv.Run(t, h.monitor(t, outbox.AlertConfig{Alerter: box, Interval: time.Minute}).Run)
	a := box.await(t, outbox.AlertLost, false)
	require.Equal(t, "consumer group stats: Kafka has removed or lost 85 records of orders, which the group may lack", a.String())
	require.Equal(t, "lost_records", box.received(outbox.AlertLost))
}

// The role of a consumer group can write harmful rows. They do not suppress alerts for other groups.
func TestLostRecordsBesidePoison(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	_, err := h.db.Exec(background, h.sql(`INSERT INTO {schema}.consumer_start (consumer_group, topic, topic_id, partition, start_offset, lost, lost_at)
		SELECT 'poison', 'orders', gen_random_uuid(), n, 0, 9223372036854775807, 'infinity'::timestamptz FROM generate_series(0, 2) AS n
		 UNION ALL VALUES ('stats', 'orders', gen_random_uuid(), 0, 0, 5, now())`))
	require.NoError(t, err)
	box := &mailbox{}
	testenv.Run(t, h.monitor(t, outbox.AlertConfig{Alerter: box, Interval: time.Minute}).Run)
	require.Eventually(t, func() bool { return box.received(outbox.AlertLost) == "lost_records lost_records" }, testenv.Patience, 5*time.Millisecond)
}

// A standby needs a moment to take over: a single poll without a leader sends no alert.
func TestBriefAbsenceOfALeader(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	stop := testenv.Run(t, h.relay(t, quick).Run)
	require.Eventually(t, func() bool { return h.relayStatus(t, "default").Holder != "" }, testenv.Patience, 5*time.Millisecond)
	stop()
	h.commit(t, numbered("a", 1, 1)...)
	box := &mailbox{}
	m := h.monitor(t, outbox.AlertConfig{Alerter: box, Interval: time.Hour, StaleAfter: time.Nanosecond, StalePending: 1})
	ctx, cancel := context.WithCancel(background)
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	box.await(t, outbox.AlertStale, false)
	cancel()
	require.NoError(t, <-done)
	require.Empty(t, box.received(outbox.AlertNoLeader))
}

// A monitor waits for PostgreSQL, but not for tables.
func TestMonitorWithoutTables(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	_, err := h.db.Exec(background, h.sql(`DROP TABLE {schema}.outbox_cursor`))
	require.NoError(t, err)
	require.ErrorIs(t, h.monitor(t, outbox.AlertConfig{}).Run(background), outbox.ErrNotMigrated)
	m := h.monitor(t, outbox.AlertConfig{})
	ctx, cancel := context.WithCancel(background)
	cancel()
	require.NoError(t, m.Run(ctx))
}

// A monitor alerts to the breaker of a relay that another process leads, by the row of the leader. While the state of
// the breaker is unknown, it says nothing.
func TestMonitorKnowsBreakers(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	box := &mailbox{}
	says := func(expires, state string) {
		t.Helper()
		_, err := h.db.Exec(t.Context(), pg.InSchema(`INSERT INTO {schema}.outbox_lease (name, holder, epoch, expires_at, state, state_at, kafka_at)
			VALUES ('default', 'there/1/x', 7, now() + $1::text::interval, $2::text::jsonb, now(), now())
			ON CONFLICT ON CONSTRAINT outbox_lease_pkey DO UPDATE SET expires_at = excluded.expires_at, state = excluded.state`, h.schema), expires, state)
		require.NoError(t, err)
	}
	says("1 hour", `{"epoch": 7, "breakers": [{"state": "open", "since": "2026-11-27T12:03:00Z"}],
		"outages": [{"what": "Kafka", "class": "unreachable", "since": "2026-11-27T12:02:50Z", "error": "dial tcp"}]}`)
	monitor := h.monitor(t, outbox.AlertConfig{Alerter: box, Interval: 5 * time.Millisecond})
	testenv.Run(t, monitor.Run)
	a := box.await(t, outbox.AlertBreaker, false)
	require.Equal(t, "relay default: the circuit breaker is open, not closed since 2026-11-27T12:03:00Z: Kafka has been failing since 2026-11-27T12:02:50Z (unreachable)", a.String())
	require.Equal(t, "unreachable", a.Status.Said.Outages[0].Class)

	says("-1 s", `{"epoch": 7, "works": true}`)
	says("1 hour", `{"epoch": 6, "works": true}`)
	says("1 hour", `{"epoch": 7, "works": true}`)
	box.await(t, outbox.AlertBreaker, true)
	require.Equal(t, "breaker_open breaker_open!", box.received(outbox.AlertBreaker))
}
