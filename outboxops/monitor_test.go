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

// received returns which alerts of some kinds came, with ! for one that is over.
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

// A monitor alerts once to events that wait for too long and to a relay that no process
// runs, and once more when that is over.
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
	require.EqualValues(t, 3, a.Status.Pending)
	require.Contains(t, a.String(), "relay default: 3 events are not published, the oldest for ")
	h.commit(t, numbered("a", 5, 10)...) // more of the same is no news

	stop = testenv.Run(t, h.relay(t, quick).Run)
	box.await(t, outbox.AlertNoLeader, true)
	box.await(t, outbox.AlertStale, true)
	stop()
	require.Equal(t, "no_leader no_leader!", box.received(outbox.AlertNoLeader)[:len("no_leader no_leader!")])
	require.Equal(t, "stale_events stale_events!", box.received(outbox.AlertStale))
}

// What retention removed before a consumer group read it is in consumer_start.
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
	require.Equal(t, "consumer group stats: Kafka has removed 85 records of orders before the group read them", a.String())
	require.Equal(t, "lost_records", box.received(outbox.AlertLost))
}

// Rows that the role of one consumer group can write to do harm do not keep alerts of others.
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

// A standby needs a moment to take over: one look without a leader is no alert.
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
