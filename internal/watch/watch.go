// Package watch decides when operators are alerted. A [Watch] reads the state of
// relays from the database at intervals and remembers which alerts were delivered, so
// it finds out which begin, become worse and end.
//
// It serves the relay of the package outbox and the monitor of outboxops, which
// configure it and deliver its alerts.
package watch

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/tables"
)

// The kinds of alerts, outbox.AlertKind.
const (
	Dead     = "dead_events"
	ManyDead = "many_dead_events"
	Stale    = "stale_events"
	NoLeader = "no_leader"
	Breaker  = "breaker_open"
	Report   = "report"
	Lost     = "lost_records"
)

// Alert is an outbox.Alert, which describes the fields.
type Alert struct {
	Kind       string
	Relay      string
	Over       bool
	At         time.Time
	Status     tables.Relay
	Died       int
	Dead       []tables.Failure
	Unresolved []tables.FailureCount

	Group, Topic string
	Lost         int64
}

// Config is what a [Watch] needs besides its store.
type Config struct {
	Settings // with their defaults

	// Relay is the name of the relay whose process this is. Then alerts are about it,
	// and about relays without a leader if it is the first of those that have one.
	// Empty means that alerts are about all relays.
	Relay string
	// BreakerClosed reports whether the breaker of Relay is closed. Nil means that it
	// is not known.
	BreakerClosed func() bool
	// Deliver passes an alert on. An alert that it returns an error for, panics at, or
	// does not return from in time, comes again at the next check.
	Deliver func(context.Context, Alert) error
	// Logger gets alerts that were not delivered.
	Logger *slog.Logger
}

// Watch compares the state of relays with the alerts that were delivered. It belongs
// to one goroutine.
type Watch struct {
	cfg     Config
	store   Store
	alerter *contain.Callback

	active     map[key]tables.Relay // alerts that have begun, as they were delivered
	leaderless map[string]bool      // relays that had no leader at the last check
	reportAt   time.Time

	// Deaths that were delivered. The times are those of the database.
	reported map[int64]time.Time // rows, and when they died
	began    time.Time
	since    time.Time // there may be undelivered deaths from here on

	lost map[key]time.Time // groups and topics with lost records, and the last loss that was delivered
}

type key struct{ kind, relay string } // or a group and a topic

const (
	deliverTimeout = 10 * time.Second // of one alert; an Alerter that ignores it is abandoned
	checkTimeout   = 30 * time.Second // of all statements of a check
	maxDeadInAlert = 20
	maxDeadRead    = 10_000
	// deadOverlap is how far a check looks back behind the last one: an event's time of
	// death is the start of a transaction.
	deadOverlap = 5 * time.Minute
)

// New returns a watch that has delivered nothing. It does no I/O.
func New(store Store, cfg Config) *Watch {
	return &Watch{
		cfg: cfg, store: store, alerter: contain.NewCallback("Alerter", cfg.Logger, contain.Limits{Grace: contain.HookLimits.Grace}),
		active: map[key]tables.Relay{}, leaderless: map[string]bool{}, reported: map[int64]time.Time{}, lost: map[key]time.Time{},
		reportAt: time.Now().Add(min(cfg.ReportInterval, defaultReports)),
	}
}

// Interval is the time between two checks.
func (w *Watch) Interval() time.Duration { return w.cfg.Interval }

// Check reads the state of relays once, and alerts to what has changed. Its error is
// PostgreSQL's.
func (w *Watch) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	relays, err := w.store.Relays(ctx)
	if err != nil {
		return err
	}
	first := slices.IndexFunc(relays, func(r tables.Relay) bool { return r.Holder != "" })
	for i, r := range relays {
		if w.cfg.Relay == "" || w.cfg.Relay == r.Name {
			w.checkEvents(ctx, r)
		}
		// Of several relays that have a leader, the first watches the others.
		if w.cfg.Relay == "" || first >= 0 && relays[first].Name == w.cfg.Relay && i != first {
			w.checkLeader(ctx, r)
		}
	}
	if err := w.reportDeaths(ctx, relays); err != nil {
		return err
	}
	if w.cfg.Relay == "" || first >= 0 && relays[first].Name == w.cfg.Relay {
		if err := w.reportLost(ctx); err != nil {
			return err
		}
	}
	return w.reportUnresolved(ctx, relays)
}

// reportLost alerts to records that Kafka had removed before a consumer group read them,
// since one interval before the first check.
func (w *Watch) reportLost(ctx context.Context) error {
	lost, err := w.store.Lost(ctx, w.began)
	if err != nil {
		return err
	}
	for _, l := range lost {
		of := key{l.Group, l.Topic}
		if l.At.After(w.lost[of]) && w.deliver(ctx, Alert{Kind: Lost, Group: l.Group, Topic: l.Topic, Lost: l.Records}) {
			w.lost[of] = l.At
		}
	}
	return nil
}

func (w *Watch) checkEvents(ctx context.Context, r tables.Relay) {
	more := func(before tables.Relay) bool { return r.Dead > before.Dead }
	w.update(ctx, ManyDead, r, r.Dead >= int64(w.cfg.DeadThreshold), more)
	w.update(ctx, Stale, r, r.Pending >= int64(w.cfg.StalePending) && time.Since(r.Oldest) > w.cfg.StaleAfter, nil)
	if w.cfg.BreakerClosed != nil {
		w.update(ctx, Breaker, r, !w.cfg.BreakerClosed(), nil)
	}
}

// checkLeader alerts at the second check without a leader, because a standby needs a
// moment to take over.
func (w *Watch) checkLeader(ctx context.Context, r tables.Relay) {
	leaderless := r.Holder == "" && !r.MovedAt.IsZero()
	w.update(ctx, NoLeader, r, leaderless && w.leaderless[r.Name], nil)
	w.leaderless[r.Name] = leaderless
}

// update alerts when a condition begins to hold, when it becomes worse, and when it
// ends.
func (w *Watch) update(ctx context.Context, kind string, r tables.Relay, holds bool, isWorse func(before tables.Relay) bool) {
	before, wasActive := w.active[key{kind, r.Name}]
	worse := holds && wasActive && isWorse != nil && isWorse(before)
	if holds == wasActive && !worse {
		return
	}
	switch delivered := w.deliver(ctx, Alert{Kind: kind, Relay: r.Name, Over: !holds, Status: r}); {
	case !delivered:
	case holds:
		w.active[key{kind, r.Name}] = r
	default:
		delete(w.active, key{kind, r.Name})
	}
}

// deliver reports whether an alert was delivered.
func (w *Watch) deliver(ctx context.Context, a Alert) bool {
	a.At = time.Now()
	ctx, cancel := context.WithTimeout(ctx, deliverTimeout)
	defer cancel()
	err := w.alerter.Call(ctx, func() error { return w.cfg.Deliver(ctx, a) })
	if err != nil {
		w.cfg.Logger.Warn("outbox: alert not delivered, it comes again at the next check", "alert", a.Kind, "relay", a.Relay, "error", err)
	}
	return err == nil
}

// reportDeaths alerts to events that have died since the last check, with one alert
// for each relay. The first check begins one interval earlier, because the process
// that led until then may have stopped before its own check.
func (w *Watch) reportDeaths(ctx context.Context, relays []tables.Relay) error {
	now, err := w.store.Now(ctx)
	if err != nil {
		return err
	}
	if w.began.IsZero() {
		w.began = now.Add(-w.cfg.Interval)
		w.since = w.began
	}
	died, err := w.store.Died(ctx, w.since, w.cfg.Relay, slices.AppendSeq([]int64{}, maps.Keys(w.reported)), maxDeadRead)
	if err != nil {
		return err
	}
	for _, r := range relays {
		dead := slices.DeleteFunc(slices.Clone(died), func(f tables.Failure) bool { return f.Relay != r.Name })
		if len(dead) == 0 {
			continue
		}
		if !w.deliver(ctx, Alert{Kind: Dead, Relay: r.Name, Status: r, Died: len(dead), Dead: dead[:min(len(dead), maxDeadInAlert)]}) {
			return nil // again at the next check
		}
		for _, f := range dead {
			w.reported[f.ID] = f.NextRetryAt
		}
	}
	if len(died) < maxDeadRead {
		w.forget(now.Add(-deadOverlap))
	}
	return nil
}

// forget drops the deaths before a time, of which none is undelivered.
func (w *Watch) forget(before time.Time) {
	w.since = before
	if before.Before(w.began) {
		w.since = w.began
	}
	maps.DeleteFunc(w.reported, func(_ int64, at time.Time) bool { return at.Before(w.since) })
}

// reportUnresolved alerts at intervals to what has failed and is not resolved.
func (w *Watch) reportUnresolved(ctx context.Context, relays []tables.Relay) error {
	if w.cfg.ReportInterval == noReports || time.Now().Before(w.reportAt) {
		return nil
	}
	counts, err := w.store.Unresolved(ctx, w.cfg.Relay)
	if err != nil {
		return err
	}
	for _, r := range relays {
		unresolved := slices.DeleteFunc(slices.Clone(counts), func(c tables.FailureCount) bool { return c.Relay != r.Name })
		if len(unresolved) > 0 && !w.deliver(ctx, Alert{Kind: Report, Relay: r.Name, Status: r, Unresolved: unresolved}) {
			return nil // again at the next check
		}
	}
	w.reportAt = time.Now().Add(w.cfg.ReportInterval)
	return nil
}
