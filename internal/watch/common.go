package watch

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/tables"
)

// common is what a watch remembers about the whole database.
type common struct {
	active      conditions
	deaths      *deaths             // of deliveries
	leaderless  map[string]bool     // relays that had no leader at the last check
	lost        map[key]LostRecords // the last loss that was delivered, of each group and topic
	undelivered int                 // alerts to lost records of the last check
}

// resume begins the first check of a term, see [Watch.resume].
func (c *common) resume(l state, othersLed bool) {
	c.active.doubt()
	clear(c.leaderless)
	if !othersLed {
		return
	}
	began := c.deaths.began
	if c.deaths.resume(l.now, l.back); c.undelivered > 0 {
		c.deaths.began = began
	}
}

// first returns the first name whose lease a process has. A cutover that has the lease of a relay alerts to nothing.
func first(all []tables.Relay) (name string) {
	for _, r := range all {
		if _, ended := tables.HandedOver(r.Holder); r.Holder != "" && !ended {
			return r.Name
		}
	}
	return ""
}

// isFirst reports whether the watch alerts to what concerns the whole database.
func (w *Watch) isFirst(l state) bool {
	relay, workers := first(l.Relays), first(l.Workers)
	switch {
	case w.cfg.Relay != "":
		return relay == w.cfg.Relay
	case w.cfg.Group == "":
		return true
	case w.cfg.Consumes:
		return relay == "" && workers == "" && first(l.Consumers) == w.cfg.Group
	}
	return relay == "" && workers == w.cfg.Group
}

// readCommon reads what only concerns the whole database.
func (w *Watch) readCommon(ctx context.Context, l *state) (err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	deaths := w.common.deaths
	deaths.begin(l.now, l.back)
	if l.diedDeliveries, err = w.store.DiedDeliveries(ctx, deaths.since, deaths.known(), maxDeadRead); err != nil {
		return err
	}
	if l.dead, err = w.store.Dead(ctx); err != nil {
		return err
	}
	if l.lost, err = w.store.Lost(ctx, deaths.began); err != nil { // as far back as deaths
		return err
	}
	l.reportDue = w.cfg.ReportInterval != noReports && !time.Now().Before(w.reportAt)
	if l.reportDue {
		if l.unresolved, err = w.store.Unresolved(ctx); err != nil {
			return err
		}
	}
	l.complete = true
	return nil
}

// commonAlerts alert to what concerns the whole database.
func (w *Watch) commonAlerts(l state) (all []func(context.Context)) {
	for _, r := range l.Relays {
		if r.Name != w.cfg.Relay {
			all = append(all, w.leaderAlerts(r)...)
		}
	}
	all = append(all, func(ctx context.Context) { w.endRemoved(ctx, l, w.common.active) })
	maps.DeleteFunc(w.common.leaderless, func(relay string, _ bool) bool { return !l.has(relay) })
	all = append(all, w.groupAlerts(l)...)
	if !l.complete {
		return all
	}
	all = append(all, w.manyDead(l)...)
	all = append(all, w.deadDeliveries(l)...)
	all = append(all, w.lostRecords(l)...)
	if l.reportDue {
		all = append(all, func(ctx context.Context) { w.reportUnresolved(ctx, l.unresolved) })
	}
	return all
}

// manyDead alerts to dead events and deliveries that wait for an operator.
func (w *Watch) manyDead(l state) []func(context.Context) {
	a, active, n := Alert{Kind: ManyDead, Counts: l.dead}, w.common.active, total(l.dead)
	c, known := active[keyOf(a)]
	if holds := n >= w.cfg.DeadThreshold; holds || w.endsManyDead(l, c.begun) {
		return []func(context.Context){w.updates(active, holds, n, a)}
	}
	if known {
		c.level = min(c.level, n)
		active[keyOf(a)] = c
	}
	return nil
}

// endsManyDead reports whether the watch may say that few are dead. Workers and consumers have no right to read failed
// events of relays, so they leave the end to a leader. After a cut there is none: then they end what they have begun.
func (w *Watch) endsManyDead(l state, begun bool) bool {
	if w.cfg.Group == "" || len(l.Relays) == 0 {
		return true
	}
	mayLead := slices.ContainsFunc(l.Relays, func(r tables.Relay) bool { _, ended := tables.HandedOver(r.Holder); return !ended })
	return begun && !mayLead
}

// leaderAlerts alert at the second check without a leader, because a standby needs a
// moment to take over.
func (w *Watch) leaderAlerts(r tables.Relay) (all []func(context.Context)) {
	leaderless := r.Holder == "" && !r.MovedAt.IsZero()
	if again := w.common.leaderless[r.Name]; again || !leaderless {
		all = append(all, w.updates(w.common.active, leaderless, 0, Alert{Kind: NoLeader, Relay: r.Name, Status: r}))
	}
	w.common.leaderless[r.Name] = leaderless
	return all
}

// handOver forgets what concerns the whole database, which another process alerts to from now on. That may be the new
// leader of a relay that had none. No other process knows that an alert has said so, so its end is delivered first.
func (w *Watch) handOver(ctx context.Context, l state) {
	for _, r := range l.Relays {
		a := Alert{Kind: NoLeader, Relay: r.Name, Status: r}
		if r.Holder != "" && !w.update(ctx, w.common.active, false, 0, a) {
			return // again at the next check
		}
	}
	if w.endRemoved(ctx, l, w.common.active) {
		w.common = nil
	}
}

// groupAlerts alert to what consumer groups have not handled for too long. A group whose alert
// has begun, here or elsewhere, is checked although none of its events waits any more.
func (w *Watch) groupAlerts(l state) (all []func(context.Context)) {
	var groups []string
	for _, g := range slices.Concat(l.Workers, l.Consumers) {
		groups = append(groups, g.Name)
	}
	for _, c := range l.stale {
		groups = append(groups, c.Group)
	}
	for k := range w.common.active {
		if k.kind == Stale {
			groups = append(groups, k.group)
		}
	}
	slices.Sort(groups)
	for _, group := range slices.Compact(groups) {
		if group != "" {
			counts, holds := w.staleOf(l, func(c tables.EventCount) bool { return c.Group == group })
			all = append(all, w.updates(w.common.active, holds, 0, Alert{Kind: Stale, Group: group, Counts: counts}))
		}
	}
	return all
}

// lostRecords alert to records that Kafka had removed before a consumer group read them.
func (w *Watch) lostRecords(l state) (all []func(context.Context)) {
	w.common.undelivered = 0
	for _, lost := range l.lost {
		a := Alert{Kind: Lost, Group: lost.Group, Topic: lost.Topic, Lost: lost.Records}
		// After the clock of the database was set back, only the number says that there are more.
		if before := w.common.lost[keyOf(a)]; lost.At.After(before.At) || lost.Records > before.Records {
			w.common.undelivered++
			all = append(all, func(ctx context.Context) {
				if w.deliver(ctx, a, 0) {
					w.common.lost[keyOf(a)] = lost
					w.common.undelivered--
				}
			})
		}
	}
	return all
}

// reportUnresolved alerts at intervals to unresolved events and deliveries. While a receiver fails, the others get each
// report once.
func (w *Watch) reportUnresolved(ctx context.Context, counts []tables.EventCount) {
	a := Alert{Kind: Report, Counts: counts}
	if t, ok := w.tried[keyOf(a)]; ok && w.clock.Now().Sub(t.firstAt) >= w.cfg.ReportInterval {
		delete(w.tried, keyOf(a))
	}
	if len(counts) == 0 || w.deliver(ctx, a, 0) {
		w.reportAt = time.Now().Add(w.cfg.ReportInterval)
	}
}
