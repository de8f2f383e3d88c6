// Package watch decides when operators are alerted. A [Watch] reads the state of
// relays and consumer groups from the database at intervals and remembers which alerts were
// delivered, so it finds out which begin, become worse and end.
//
// Alerts come from the database, not from the memory of a process. A relay alerts to its own events. Alerts about the
// whole database belong to one process: see [Config]. A group of consumers has a lease in outbox_lease for its alerts
// alone, next to the one of its workers.
//
// It serves the relay and the worker of the package outbox and the monitor of outboxops, which
// configure it and deliver its alerts.
package watch

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// The kinds of alerts, outbox.AlertKind.
const (
	Dead           = "dead_events"
	DeadDeliveries = "dead_deliveries"
	ManyDead       = "many_dead"
	Stale          = "stale_events"
	NoLeader       = "no_leader"
	Breaker        = "breaker_open"
	Report         = "report"
	Lost           = "lost_records"
)

// Alert is an outbox.Alert, which describes the fields.
type Alert struct {
	Kind   string
	Relay  string
	Over   bool
	At     time.Time
	Status tables.Relay
	Died   int
	Dead   []DeadEvent
	Counts []tables.EventCount

	Group, Topic string
	Lost         int64
	FirstAt      time.Time
}

// Config is what a [Watch] needs besides its store.
type Config struct {
	Settings // with their defaults

	// Relay is the name of the relay that leads in this process, and Group the consumer group whose
	// lease this process has. A relay alerts to its own events. One process alerts to conditions of
	// the whole database: that of the first relay that a process leads. Without a relay it is the
	// process of the first group of workers, and without workers that of the first group of
	// consumers. A watch with neither name alerts to everything.
	Relay, Group string
	// Consumes says that Group is one of consumers.
	Consumes bool
	// Takeover is for how long no process may have alerted before this process has the lease of one
	// that is gone. What died meanwhile is alerted to.
	Takeover time.Duration
	// BreakerClosed reports whether the breaker of Relay is closed. Nil means that only the row of its leader says so,
	// as for all other relays.
	BreakerClosed func() bool
	// StaleEvents gets after each check which events of Relay wait for too long; none unless
	// they are StalePending, and the clock of the database. It may be nil.
	StaleEvents func([]tables.EventCount, pg.Clock)
	// Deliver passes an alert on. An alert that it returns an error for, panics at, or
	// does not return from in time, comes again at the next check.
	Deliver func(context.Context, Alert) error
	// Resolve passes on the end of an alert that was not delivered here, but that another process may have delivered.
	// Nil means that no Alerter wants to know that.
	Resolve func(context.Context, Alert) error
	// Logger gets alerts that were not delivered.
	Logger *slog.Logger
}

// Watch compares the state of relays and groups with the alerts that were delivered. It belongs
// to one goroutine.
type Watch struct {
	cfg     Config
	store   Store
	alerter *contain.Callback

	clock    pg.Clock        // of the database, as the last check has read it
	active   conditions      // of Relay, or of all relays
	closed   map[key]bool    // no process has an open alert of these
	tried    map[key]attempt // alerts that were not delivered
	resolves int             // how many ends of what others may have begun this check may still pass on
	deaths   *deaths         // of Relay, or of all relays
	common   *common         // nil while another process has this, but until [Watch.handOver] has delivered all
	reportAt time.Time
	slow     bool // a receiver has used up its time in this check
	next     int  // which alert of the next check comes first

	epoch     int64     // of the last lease of this process
	othersLed bool      // another process may have had the lease since the last check
	newTerm   bool      // this process has the lease anew since the last check
	lookedAt  time.Time // when the last check found out which process alerts to what, or this term began
}

// conditions are the alerts that have begun, or have been tried.
type conditions map[key]condition

// condition is what the Alerter knows of an alert. It may have several receivers, so an alert that was not delivered
// may have reached some of them.
type condition struct {
	begun bool // its begin was delivered
	level int  // how bad it is, as far as that was delivered, or uncertain
}

// uncertain is the level of a condition whose end may have reached a receiver. Its next alert is delivered in any case.
const uncertain = -1

// doubt makes all conditions uncertain.
func (c conditions) doubt() {
	for k, one := range c {
		one.level = uncertain
		c[k] = one
	}
}

// attempt is an alert that was not delivered.
type attempt struct {
	over    bool
	level   int
	firstAt time.Time
}

type key struct{ kind, relay, group, topic string }

func keyOf(a Alert) key { return key{a.Kind, a.Relay, a.Group, a.Topic} }

const (
	deliverTimeout = 10 * time.Second // of one alert; an Alerter that ignores it is abandoned
	hurryTimeout   = 2 * time.Second  // of those in the same check behind one that used up its time
	sendTimeout    = 30 * time.Second // of all alerts of a check
	readTimeout    = 30 * time.Second // of the statements of a check, for those about the whole database apart
	maxResolves    = 20               // in a check, which is to have time for what holds
)

// New returns a watch that has delivered nothing. It does no I/O.
func New(store Store, cfg Config) *Watch {
	return &Watch{
		cfg: cfg, store: store, alerter: contain.NewCallback("Alerter", cfg.Logger, contain.Limits{Grace: contain.HookLimits.Grace}),
		active: conditions{}, closed: map[key]bool{}, tried: map[key]attempt{}, deaths: &deaths{}, reportAt: time.Now().Add(min(cfg.ReportInterval, defaultReports)),
	}
}

// Interval is the time between two checks.
func (w *Watch) Interval() time.Duration { return w.cfg.Interval }

// state is what one check has read.
type state struct {
	tables.Positions

	first bool             // this process alerts to what concerns the whole database
	now   time.Time        // of the database
	back  time.Duration    // for how long no process may have alerted to what this process begins to alert to
	died  []tables.Failure // read before all counts, so that these have them
	stale []tables.EventCount

	// What concerns the whole database, if PostgreSQL has answered.
	complete       bool
	diedDeliveries []tables.Delivery
	dead           []tables.EventCount
	lost           []LostRecords
	unresolved     []tables.EventCount
	reportDue      bool
}

// has reports whether there is a relay of that name.
func (l state) has(relay string) bool {
	return slices.ContainsFunc(l.Relays, func(r tables.Relay) bool { return r.Name == relay })
}

// Check reads the state of relays and groups once, and then alerts to changes, so that no receiver takes the time of
// PostgreSQL. Its error is PostgreSQL's. If that is about the whole database, what concerns a relay is alerted to.
func (w *Watch) Check(ctx context.Context) error {
	l, err := w.read(ctx)
	if err != nil {
		return err
	}
	if l.first {
		err = w.readCommon(ctx, &l)
	}
	w.send(ctx, w.alerts(l))
	if w.cfg.Group == "" && len(l.died) < maxDeadRead {
		w.deaths.forget(l.now.Add(-deadOverlap))
	}
	if l.complete && len(l.diedDeliveries) < maxDeadRead {
		w.common.deaths.forget(l.now.Add(-deadOverlap))
	}
	return err
}

// alerts returns functions that alert to what a check has found, if it has changed.
func (w *Watch) alerts(l state) (all []func(context.Context)) {
	for _, r := range l.Relays {
		if w.isOwn(r) {
			all = append(all, w.relayAlerts(l, r)...)
		}
	}
	all = append(all, func(ctx context.Context) { w.endRemoved(ctx, l, w.active) })
	switch {
	case l.first:
		all = append(all, w.commonAlerts(l)...)
	case w.common != nil:
		all = append(all, func(ctx context.Context) { w.handOver(ctx, l) })
	}
	return append(all, w.deadEvents(l)...)
}

// send calls functions that alert, for a limited time. A receiver that uses up its time leaves less to each of those
// behind it, so the next check begins behind its alert, or with the first one for which there was no time.
func (w *Watch) send(ctx context.Context, alerts []func(context.Context)) {
	ctx, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	first := w.next
	w.resolves, w.slow, w.next = maxResolves, false, 0
	for i := range alerts {
		at := (first + i) % len(alerts)
		if ctx.Err() != nil {
			w.next = at
			return
		}
		wasSlow := w.slow
		if alerts[at](ctx); w.slow && !wasSlow {
			w.next = at + 1
		}
	}
}

// read reads what every check needs, and finds out whether this process alerts to what concerns the whole database.
func (w *Watch) read(ctx context.Context) (l state, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if l.now, err = w.store.Now(ctx); err != nil {
		return l, err
	}
	w.clock = pg.ClockAt(l.now)
	if l.back = w.cfg.Interval + w.cfg.Takeover; !w.lookedAt.IsZero() {
		l.back += time.Since(w.lookedAt)
	}
	if w.newTerm {
		w.resume(l)
	}
	if w.cfg.Group == "" {
		w.deaths.begin(l.now, l.back)
		if l.died, err = w.store.Died(ctx, w.deaths.since, w.cfg.Relay, w.deaths.known(), maxDeadRead); err != nil {
			return l, err
		}
	}
	if l.Positions, err = w.store.Positions(ctx); err != nil {
		return l, err
	}
	w.lookedAt = time.Now()
	if l.first = w.isFirst(l); l.first && w.common == nil {
		w.common = &common{active: conditions{}, deaths: &deaths{}, leaderless: map[string]bool{}, lost: map[key]LostRecords{}}
		clear(w.closed)
	}
	of := tables.Owners{Relays: slices.DeleteFunc(slices.Clone(l.Relays), func(r tables.Relay) bool { return !w.isOwn(r) }), Deliveries: l.first}
	if of.Deliveries {
		of.Groups = l.Workers
	}
	l.stale, err = w.store.Stale(ctx, l.now.Add(-w.cfg.StaleAfter), of, max(w.cfg.StalePending, tables.MaxCounted))
	return l, err
}

// lead notes the epoch of a lease that this process has taken. Each process that takes the lease raises the epoch by
// one, so the next epoch after the last one of this process means that no other process has had the lease in between.
func (w *Watch) lead(epoch int64) {
	w.othersLed = w.othersLed || epoch != w.epoch+1
	w.epoch = epoch
}

// beginTerm says that this process has the lease anew.
func (w *Watch) beginTerm() { w.newTerm, w.lookedAt = true, time.Now() }

// resume begins the first check of a term. What has begun in an earlier term may be over for a receiver, so it is
// delivered again if it holds, and ended if it does not. Deaths are another process's only if that has had the lease.
func (w *Watch) resume(l state) {
	w.newTerm = false
	clear(w.closed)
	clear(w.tried)
	w.active.doubt()
	if w.othersLed {
		w.deaths.resume(l.now, l.back)
	}
	if w.common != nil {
		w.common.resume(l, w.othersLed)
	}
	w.othersLed = false
}

// isOwn reports whether the watch alerts to the events of a relay.
func (w *Watch) isOwn(r tables.Relay) bool {
	return w.cfg.Relay == r.Name || w.cfg.Relay == "" && w.cfg.Group == ""
}

// updates returns a function that calls update.
func (w *Watch) updates(active conditions, holds bool, level int, a Alert) func(context.Context) {
	return func(ctx context.Context) { w.update(ctx, active, holds, level, a) }
}

// relayAlerts alert to late events of a relay, and to a breaker that is not closed.
func (w *Watch) relayAlerts(l state, r tables.Relay) (all []func(context.Context)) {
	if w.cfg.Relay != "" && r.Holder != "" { // another process may have said that it has no leader
		all = append(all, w.updates(w.active, false, 0, Alert{Kind: NoLeader, Relay: r.Name, Status: r}))
	}
	counts, holds := w.staleOf(l, func(c tables.EventCount) bool { return c.Relay == r.Name })
	if w.cfg.StaleEvents != nil && r.Name == w.cfg.Relay {
		if !holds {
			counts = nil
		}
		w.cfg.StaleEvents(counts, w.clock)
	}
	all = append(all, w.updates(w.active, holds, 0, Alert{Kind: Stale, Relay: r.Name, Status: r, Counts: counts}))
	if open, known := w.breakerOf(r); known {
		all = append(all, w.updates(w.active, open, 0, Alert{Kind: Breaker, Relay: r.Name, Status: r}))
	}
	return all
}

// breakerOf reports whether the breaker of a relay is open or half-open. The one of this process closes when Kafka
// answers. If it was never open, its relay may just not have found out yet, so that it is closed must be known.
func (w *Watch) breakerOf(r tables.Relay) (open, known bool) {
	if w.cfg.BreakerClosed == nil {
		return saidBreaker(r)
	}
	if !w.cfg.BreakerClosed() {
		return true, true
	}
	if _, began := w.active[key{kind: Breaker, relay: r.Name}]; began {
		return false, true
	}
	open, known = saidBreaker(r)
	return false, known && !open
}

// saidBreaker reports whether a leader says that its breaker is open or half-open. That is unknown while no leader says
// so. It is also unknown while the breaker is closed only because the leader has not reached Kafka yet.
func saidBreaker(r tables.Relay) (open, known bool) {
	if r.Said == nil {
		return false, false
	}
	if state, _ := r.Said.RelayBreaker(); state != breaker.Closed {
		return true, true
	}
	kafkaFails := slices.ContainsFunc(r.Said.Outages, func(o outage.Outage) bool { return o.What == kafka })
	return false, !r.Said.KafkaAt.IsZero() && !kafkaFails
}

// kafka is the name of Kafka in the outages of a relay.
const kafka = "Kafka"

// staleOf returns how many events wait for too long, by type, and whether they are enough for an
// alert.
func (w *Watch) staleOf(l state, is func(tables.EventCount) bool) (counts []tables.EventCount, holds bool) {
	counts = slices.DeleteFunc(slices.Clone(l.stale), func(c tables.EventCount) bool { return !is(c) })
	return counts, len(counts) > 0 && total(counts) >= w.cfg.StalePending
}

func total(counts []tables.EventCount) (n int) {
	for _, c := range counts {
		n += c.Events
	}
	return n
}

// endRemoved ends what has begun of relays that are removed. It reports whether there is nothing left to deliver.
func (w *Watch) endRemoved(ctx context.Context, l state, active conditions) (done bool) {
	done = true
	for _, k := range slices.SortedFunc(maps.Keys(active), func(a, b key) int { return cmp.Or(cmp.Compare(a.relay, b.relay), cmp.Compare(a.kind, b.kind)) }) {
		if k.relay != "" && !l.has(k.relay) {
			done = w.update(ctx, active, false, 0, Alert{Kind: k.kind, Relay: k.relay}) && done
		}
	}
	return done
}

// update alerts when a condition begins to hold, when it becomes worse, also after it has become better, and when it
// ends. It reports whether there is nothing left to deliver.
func (w *Watch) update(ctx context.Context, active conditions, holds bool, level int, a Alert) bool {
	k := keyOf(a)
	c := active[k]
	a.Over = !holds
	switch {
	case !holds && !c.begun:
		if !w.resolve(ctx, a) {
			return false
		}
		delete(active, k)
		delete(w.tried, k)
		return true
	case holds && c.begun && level <= c.level:
		active[k] = condition{begun: true, level: level}
		delete(w.tried, k)
		return true
	}
	delete(w.closed, k) // also if this is not delivered: one of several receivers may have got it
	delivered := w.deliver(ctx, a, level)
	switch {
	case holds && delivered:
		active[k] = condition{begun: true, level: level}
	case holds:
		active[k] = c
	case delivered:
		delete(active, k)
		w.closed[k] = true
	default:
		active[k] = condition{begun: true, level: uncertain}
	}
	return delivered
}

// resolve passes on, once in a term, that what another process may have begun does not hold: one that led before, or
// the first one before. It reports whether there is nothing left to pass on.
func (w *Watch) resolve(ctx context.Context, a Alert) bool {
	k := keyOf(a)
	if w.cfg.Resolve == nil || w.closed[k] {
		return true
	}
	if w.resolves == 0 {
		return false
	}
	if w.resolves--; !w.pass(ctx, a, w.cfg.Resolve) {
		w.resolves = 0
		return false
	}
	w.closed[k] = true
	return true
}

// deliver reports whether an alert was delivered. One that was not keeps its FirstAt, unless it becomes worse.
func (w *Watch) deliver(ctx context.Context, a Alert, level int) bool {
	k := keyOf(a)
	t, again := w.tried[k]
	if !again || a.Over != t.over || !a.Over && level > t.level {
		t.firstAt = w.clock.Now()
	}
	a.FirstAt, t.over, t.level = t.firstAt, a.Over, level
	w.tried[k] = t
	if !w.pass(ctx, a, w.cfg.Deliver) {
		return false
	}
	delete(w.tried, k)
	return true
}

func (w *Watch) pass(ctx context.Context, a Alert, to func(context.Context, Alert) error) bool {
	a.At = w.clock.Now()
	a.FirstAt = cmp.Or(a.FirstAt, a.At)
	timeout := deliverTimeout
	if w.slow {
		timeout = hurryTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err := w.alerter.Call(ctx, func() error { return to(ctx, a) })
	if err != nil {
		w.slow = w.slow || ctx.Err() != nil
		w.cfg.Logger.Warn("outbox: alert not delivered, it comes again at the next check", "alert", a.Kind, "over", a.Over, "relay", a.Relay, "group", a.Group, "error", err)
	}
	return err == nil
}
