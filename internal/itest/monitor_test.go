package itest

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
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

// clear forgets the alerts.
func (m *mailbox) clear() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.alerts = nil
}

// deaths returns how often each dead event's id was in an alert.
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

// patiently retries soon, and has one try until an event is dead.
func patiently() outbox.RelayConfig {
	cfg := quick
	cfg.Retry.MaxRetries = 1
	cfg.Logger = slog.New(slog.DiscardHandler)
	return cfg
}

// dead lets the fixture's relay make a poison of key bad a dead event.
func (h *relayFixture) dead(t *testing.T, cfg outbox.RelayConfig) (event oracle.Event) {
	t.Helper()
	event = poison("bad", 1)
	testenv.Run(t, h.relay(t, cfg).Run)
	h.commit(t, event)
	require.Eventually(t, func() bool { return h.statuses(t)[outbox.StatusDead] == 1 }, testenv.Patience, 10*time.Millisecond)
	return event
}

func TestAlertConfig(t *testing.T) {
	t.Parallel()
	_, err := outbox.NewRelay(nil, nil, outbox.RelayConfig{Schema: "$user", Alerts: outbox.AlertConfig{
		Interval: -1, ReportInterval: -1, DeadThreshold: -1, StaleAfter: -1, StalePending: 1_000_000,
	}})
	for _, field := range []string{"db", "Schema", "Interval", "ReportInterval", "DeadThreshold", "StaleAfter", "StalePending"} {
		require.ErrorContains(t, err, field)
	}
}

// A relay alerts to a death once, however often the alerter must be called; to many dead
// events again when there are more; and when they are resolved.
func TestDeadEventsAreAlertedTo(t *testing.T) {
	t.Parallel()
	h, _ := newPoisonedFixture(t)
	box := &mailbox{fails: 2}
	cfg := patiently()
	cfg.Alerts = outbox.AlertConfig{Alerter: box, Interval: 50 * time.Millisecond, DeadThreshold: 3}
	event := h.dead(t, cfg)
	a := box.await(t, outbox.AlertDead, false)
	require.Equal(t, []any{"default", 1, int64(1)}, []any{a.Relay, a.Died, a.Status.Dead})
	require.Len(t, a.Dead, 1)
	require.Equal(t, []any{event.Key, "message_too_large"}, []any{a.Dead[0].AggregateID, a.Dead[0].Class})
	require.Equal(t, "relay default: 1 event died; 1 are dead", a.String())

	h.commit(t, poison("worse", 1), poison("worst", 1))
	a = box.await(t, outbox.AlertManyDead, false)
	require.Equal(t, []outbox.EventCount{{Relay: "default", Status: "dead", Type: "test.oracle.happened.v1", Class: "message_too_large", Events: 3, Oldest: a.Counts[0].Oldest}}, a.Counts)
	require.Equal(t, "3 dead events and deliveries wait for a decision: 3 dead test.oracle.happened.v1 message_too_large", a.String())
	h.commit(t, poison("at last", 1))
	h.awaitStatuses(t, map[string]int{outbox.StatusDead: 4})
	require.Eventually(t, func() bool {
		return box.received(outbox.AlertManyDead) == "many_dead many_dead"
	}, testenv.Patience, 5*time.Millisecond)
	// A check reads no deaths of resolved events.
	require.Eventually(t, func() bool { return len(box.deaths()) == 4 }, testenv.Patience, 5*time.Millisecond)
	_, err := h.failures(t).ResolveAll(background, outboxops.FailureFilter{}, outboxops.BulkConfig{}, kim)
	require.NoError(t, err)
	box.await(t, outbox.AlertManyDead, true)

	died := box.deaths()
	require.Len(t, died, 4)
	for id, n := range died {
		require.Equal(t, 1, n, id)
	}
}

// It does not wait for the next check.
func TestDeadEventIsAlertedToAtOnce(t *testing.T) {
	t.Parallel()
	h, _ := newPoisonedFixture(t)
	box := &mailbox{}
	cfg := patiently()
	cfg.Alerts = outbox.AlertConfig{Alerter: box, Interval: time.Hour}
	h.dead(t, cfg)
	box.await(t, outbox.AlertDead, false)
}

// Of two relays that have a leader, the first alerts to a third that has none.
func TestRelayWithoutLeader(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	led := map[string]*mailbox{"a": {}, "b": {}}
	gone := quick
	gone.Name = "gone"
	stop := testenv.Run(t, h.relay(t, gone).Run)
	require.Eventually(t, func() bool { return h.relayStatus(t, "gone").Holder != "" }, testenv.Patience, 5*time.Millisecond)
	for name, box := range led {
		cfg := quick
		cfg.Name, cfg.Alerts = name, outbox.AlertConfig{Alerter: box, Interval: 5 * time.Millisecond}
		testenv.Run(t, h.relay(t, cfg).Run)
	}
	for name := range led {
		require.Eventually(t, func() bool { return h.relayStatus(t, name).Holder != "" }, testenv.Patience, 5*time.Millisecond)
	}
	require.Empty(t, led["a"].received(outbox.AlertNoLeader))
	stop()
	require.Equal(t, "gone", led["a"].await(t, outbox.AlertNoLeader, false).Relay)
	testenv.Run(t, h.relay(t, gone).Run)
	led["a"].await(t, outbox.AlertNoLeader, true)
	require.Empty(t, led["b"].received(outbox.AlertNoLeader))
}

// incidents is an alerter that also gets the ends of what other processes may have begun.
type incidents struct{ alerts, ends mailbox }

func (i *incidents) Alert(ctx context.Context, a outbox.Alert) error   { return i.alerts.Alert(ctx, a) }
func (i *incidents) Resolve(ctx context.Context, a outbox.Alert) error { return i.ends.Alert(ctx, a) }

// A new leader, and a new monitor, end once what others may have begun and what does not hold.
func TestNewLeaderEndsOldAlerts(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	leader, watcher := &incidents{}, &incidents{}
	cfg := quick
	cfg.Alerts = outbox.AlertConfig{Alerter: leader, Interval: 5 * time.Millisecond}
	testenv.Run(t, h.relay(t, cfg).Run)
	monitor, err := outboxops.NewMonitor(h.db, outboxops.MonitorConfig{Schema: h.schema, Alerts: outbox.AlertConfig{Alerter: watcher, Interval: 5 * time.Millisecond}})
	require.NoError(t, err)
	testenv.Run(t, monitor.Run)
	kinds := []outbox.AlertKind{outbox.AlertBreaker, outbox.AlertManyDead, outbox.AlertNoLeader, outbox.AlertStale}
	for _, box := range []*incidents{leader, watcher} {
		for _, kind := range kinds {
			box.ends.await(t, kind, true)
		}
	}
	time.Sleep(50 * time.Millisecond) // ten checks
	for _, box := range []*incidents{leader, watcher} {
		for _, kind := range kinds {
			require.Equal(t, string(kind)+"!", box.ends.received(kind))
			require.Empty(t, box.alerts.received(kind))
		}
	}
}

// unreachableRelay returns a relay whose broker does not exist.
func (h *relayFixture) unreachableRelay(t *testing.T, cfg outbox.RelayConfig) *outbox.Relay {
	t.Helper()
	cfg.Schema, cfg.Logger = h.schema, slog.New(slog.DiscardHandler)
	cfg.DeliveryTimeout, cfg.Lease = time.Second, 1600*time.Millisecond
	r, err := outbox.NewRelay(h.db, []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1"), kgo.RequestRetries(0)}, cfg)
	require.NoError(t, err)
	return r
}

func TestOpenBreakerIsAlertedTo(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	h.commit(t, numbered("a", 1, 10)...)
	box := &mailbox{}
	var opens atomic.Int32
	testenv.Run(t, h.unreachableRelay(t, outbox.RelayConfig{PollInterval: 10 * time.Millisecond, Breaker: outbox.BreakerConfig{OpenFor: 50 * time.Millisecond},
		Alerts: outbox.AlertConfig{Alerter: box, Interval: 10 * time.Millisecond},
		Hooks: outbox.RelayHooks{Breaker: func(_, to outbox.BreakerState, _ float64) {
			if to == outbox.BreakerOpen {
				opens.Add(1)
			}
		}}}).Run)
	a := box.await(t, outbox.AlertBreaker, false)
	require.Regexp(t, `^relay default: the circuit breaker is (open|half-open|open, not closed since \S+|half-open, not closed since \S+): Kafka has been failing since \S+ \(unreachable\)$`, a.String())
	require.Eventually(t, func() bool { return opens.Load() >= 4 }, testenv.Patience, 10*time.Millisecond, "it opens again and again")
	require.Equal(t, "breaker_open", box.received(outbox.AlertBreaker))
}

// A report has what failed and what waits behind it, by type and class; without failures there is
// none.
func TestReports(t *testing.T) {
	t.Parallel()
	h, _ := newPoisonedFixture(t)
	box := &mailbox{}
	cfg := patiently()
	cfg.HoldDead = true
	cfg.Alerts = outbox.AlertConfig{Alerter: box, Interval: 5 * time.Millisecond, ReportInterval: 10 * time.Millisecond}
	stop := testenv.Run(t, h.relay(t, cfg).Run)
	h.commit(t, numbered("good", 1, 5)...)
	require.Eventually(t, func() bool { s := h.relayStatus(t, "default"); return s.Name != "" && s.Pending == 0 }, testenv.Patience, 5*time.Millisecond)
	require.Empty(t, box.received(outbox.AlertReport))
	h.commit(t, poison("bad", 1), poison("worse", 1))
	h.awaitStatuses(t, map[string]int{outbox.StatusDead: 2})
	h.commit(t, numbered("bad", 2, 3)...)
	require.Eventually(t, func() bool {
		a := box.await(t, outbox.AlertReport, false)
		return strings.HasPrefix(a.String(), "unresolved failures: 3 parked test.oracle.happened.v1, 2 dead test.oracle.happened.v1 message_too_large; the oldest since ")
	}, testenv.Patience, 5*time.Millisecond)
	stop()
}

// Lines of the log have what operators search for.
func TestLogAlerter(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	log := outbox.LogAlerter{Logger: slog.New(slog.NewTextHandler(&out, nil))}
	require.NoError(t, log.Alert(background, outbox.Alert{
		Kind: outbox.AlertDead, Relay: "default", Died: 1, Status: outbox.RelayStatus{Dead: 1},
		Dead: []outbox.DeadEvent{{ID: 7, FailedEvent: outbox.FailedEvent{
			EventID: "e-1", Type: "shop.order.created.v1", AggregateType: "Order", AggregateID: "42", Retries: 10, Err: errors.New("too large"),
		}}},
	}))
	for _, part := range []string{"level=ERROR", "alert=dead_events", "failed_id=7", "event_id=e-1", "type=shop.order.created.v1",
		"aggregate_type=Order", "aggregate_id=42", "retries=10", `error="too large"`, "failed_at="} {
		require.Contains(t, out.String(), part)
	}
	require.Contains(t, out.String(), " dead=1 pending=0")
	out.Reset()
	require.NoError(t, log.Alert(background, outbox.Alert{
		Kind: outbox.AlertDeadDeliveries, Group: "stats", Died: 1, Counts: []outbox.EventCount{{Events: 3, Status: outbox.StatusDead}},
		Dead: []outbox.DeadEvent{{ID: 8, Group: "stats", Action: "COUNTED", FailedEvent: outbox.FailedEvent{EventID: "e-2"}}},
	}))
	for _, part := range []string{"consumer group stats: 1 delivery given up; 3 are dead", "delivery_id=8", "group=stats", "action=COUNTED", "event_id=e-2"} {
		require.Contains(t, out.String(), part)
	}
	for _, part := range []string{" id=0", " dead=0", " pending=0"} {
		require.NotContains(t, out.String(), part)
	}
	out.Reset()
	require.NoError(t, log.Alert(background, outbox.Alert{Kind: outbox.AlertBreaker, Relay: "default", Over: true}))
	require.Contains(t, out.String(), "level=WARN")
}
