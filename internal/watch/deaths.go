package watch

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/tables"
)

// DeadEvent is an outbox.DeadEvent, which describes the fields.
type DeadEvent struct {
	tables.Event

	ID            int64
	Group, Action string
	FailedAt      time.Time
}

func deadEvents(rows []tables.Failure) []DeadEvent {
	var dead []DeadEvent
	for _, f := range rows[:min(len(rows), maxDeadInAlert)] {
		dead = append(dead, DeadEvent{Event: f.Event, ID: f.ID, FailedAt: f.FailedAt})
	}
	return dead
}

func deadDeliveries(rows []tables.Delivery) []DeadEvent {
	var dead []DeadEvent
	for _, d := range rows[:min(len(rows), maxDeadInAlert)] {
		e := DeadEvent{ID: d.ID, Group: d.Group, Action: d.Action, FailedAt: d.ProcessedAt, Event: tables.Event{
			EventID: d.EventID, Type: d.Type, AggregateType: d.AggregateType, AggregateID: d.AggregateID,
			Topic: d.Stream, Key: d.Key, Retries: max(d.Attempts-1, 0), Class: d.ErrorCode, Err: d.Err,
		}}
		if d.Partition == nil { // from outbox
			e.OutboxID = d.Position
		}
		dead = append(dead, e)
	}
	return dead
}

// deaths remembers which deaths were delivered. The times are those of the database.
type deaths struct {
	reported map[int64]time.Time // rows, and when they died
	began    time.Time
	last     time.Time // of the last check
	since    time.Time // there may be undelivered deaths from here on
	pending  int       // alerts of the last check that are not delivered
}

const (
	maxDeadInAlert = 20
	maxDeadRead    = 10_000
	// deadOverlap is how far a check reads back before the last one: an event's time of
	// death is the start of a transaction.
	deadOverlap = 5 * time.Minute
)

// begin begins some time before the first check, an interval at least, because the process that led
// until then may have stopped before its own check. It does so again when the clock was set back: what dies from then
// on is older than what the last check has read. What died before and is forgotten comes again then.
func (d *deaths) begin(now time.Time, back time.Duration) {
	if first := now.Add(-back); d.reported == nil {
		d.reported, d.began, d.since = map[int64]time.Time{}, first, first
	} else if now.Before(d.last) {
		d.began, d.since = earlier(d.began, first), earlier(d.since, first)
	}
	d.last = now
}

// resume begins a new term after another process may have led. If the last check is longer ago than back, that process
// has alerted to the deaths between, so they are left out, unless earlier deaths are undelivered.
func (d *deaths) resume(now time.Time, back time.Duration) {
	first := now.Add(-back)
	if d.pending == 0 && d.last.Before(first) && !d.since.Before(d.last.Add(-deadOverlap)) {
		d.began, d.since = first, first
	}
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func (d *deaths) known() []int64 { return slices.AppendSeq([]int64{}, maps.Keys(d.reported)) }

// alert returns a function that delivers an alert to deaths, and remembers them. If one is not delivered, all that are
// not known come again at the next check.
func (d *deaths) alert(deliver func(context.Context) bool, died map[int64]time.Time) func(context.Context) {
	d.pending++
	return func(ctx context.Context) {
		if deliver(ctx) {
			d.pending--
			maps.Copy(d.reported, died)
		}
	}
}

// forget drops the deaths before a time, unless some of this check are undelivered.
func (d *deaths) forget(before time.Time) {
	if d.pending > 0 {
		return
	}
	d.since = before
	if before.Before(d.began) {
		d.since = d.began
	}
	maps.DeleteFunc(d.reported, func(_ int64, at time.Time) bool { return at.Before(d.since) })
}

// newest returns the second of the last death, which is the level of an alert to deaths: a later death is worse. So an
// alert to an event that was retried, and has died again, is a new alert, although an earlier one was not delivered.
func newest(died map[int64]time.Time) (second int) {
	for _, at := range died {
		second = max(second, int(at.Unix()))
	}
	return second
}

// deadEvents alert to events that have died since the last check, with one alert for each relay.
func (w *Watch) deadEvents(l state) (all []func(context.Context)) {
	w.deaths.pending = 0
	for _, r := range l.Relays {
		dead := slices.DeleteFunc(slices.Clone(l.died), func(f tables.Failure) bool { return f.Relay != r.Name })
		if len(dead) == 0 {
			continue
		}
		died := map[int64]time.Time{}
		for _, f := range dead {
			died[f.ID] = f.NextRetryAt
		}
		a := Alert{Kind: Dead, Relay: r.Name, Status: r, Died: len(dead), Dead: deadEvents(dead)}
		all = append(all, w.deaths.alert(func(ctx context.Context) bool { return w.deliver(ctx, a, newest(died)) }, died))
	}
	return all
}

// deadDeliveries alert to deliveries that died since the last check, with one alert for each
// group. Each alert counts all dead deliveries of its group.
func (w *Watch) deadDeliveries(l state) (all []func(context.Context)) {
	w.common.deaths.pending = 0
	byGroup := map[string][]tables.Delivery{}
	for _, dead := range l.diedDeliveries {
		byGroup[dead.Group] = append(byGroup[dead.Group], dead)
	}
	for _, group := range slices.Sorted(maps.Keys(byGroup)) {
		died := map[int64]time.Time{}
		for _, dead := range byGroup[group] {
			died[dead.ID] = dead.ProcessedAt
		}
		counts := slices.DeleteFunc(slices.Clone(l.dead), func(c tables.EventCount) bool { return c.Group != group })
		a := Alert{Kind: DeadDeliveries, Group: group, Died: len(died), Dead: deadDeliveries(byGroup[group]), Counts: counts}
		all = append(all, w.common.deaths.alert(func(ctx context.Context) bool { return w.deliver(ctx, a, newest(died)) }, died))
	}
	return all
}
