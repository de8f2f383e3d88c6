package faults

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// busGrace is how long a delivery may stay where it is when its lease is over: workers look after each third
// of a lease, and not until half a lease after the start of PostgreSQL; and the machine may be busy.
const busGrace = busLease/3 + busLease/2 + 5*time.Second

// busWatch looks at the deliveries all the time. It is used by one goroutine.
type busWatch struct {
	looked   time.Time
	groups   map[string]*groupWatch
	stuck    map[int64]bool // deliveries
	headless map[int64]bool // keys
	due      time.Duration  // the longest
	gap      time.Duration
}

// groupWatch is what is known of a group.
type groupWatch struct {
	attended time.Time // since then it has a worker that runs, and PostgreSQL answers; zero for not
	done     int64
	changed  time.Time // done
}

func newBusWatch() busWatch {
	w := busWatch{groups: map[string]*groupWatch{}, stuck: map[int64]bool{}, headless: map[int64]bool{}}
	for _, g := range busGroups {
		w.groups[g] = &groupWatch{}
	}
	return w
}

const sqlWatch = `
SELECT (SELECT array_agg(id) FROM event_delivery
         WHERE consumer_group = $1 AND status = 'PROCESSING' AND locked_until < clock_timestamp() - $2::interval),
       (SELECT array_agg(order_key) FROM (
               SELECT order_key FROM event_delivery
                WHERE consumer_group = $1 AND (status IN ('PENDING', 'PARKED', 'PROCESSING') OR held) AND order_key IS NOT NULL
                GROUP BY order_key HAVING bool_and(status = 'PARKED')) AS k),
       (SELECT coalesce(extract(epoch FROM clock_timestamp() - min(next_retry_at)), 0)::float8 FROM event_delivery
         WHERE consumer_group = $1 AND status = 'PENDING'),
       (` + sqlCounted + ` AND consumer_group = $1),
       (SELECT sum(version)::bigint FROM item)`

// look looks after the groups a few times a second: it replaces workers that an event has ended, and
// notes what is stuck.
func (b *bus) look(t *testing.T) {
	t.Helper()
	const often = 250 * time.Millisecond
	if time.Since(b.watch.looked) < often {
		return
	}
	b.watch.looked = time.Now()
	b.reap(t)
	for _, group := range busGroups {
		b.lookAt(t, group, b.watch.groups[group])
	}
}

func (b *bus) lookAt(t *testing.T, group string, g *groupWatch) {
	t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, 5*time.Second)
	defer cancel()
	var stuck, headless []int64
	var due float64
	var done, all int64
	rows, err := b.db.Query(ctx, sqlWatch, group, busGrace)
	if err == nil {
		_, err = pgx.ForEachRow(rows, []any{&stuck, &headless, &due, &done, &all}, func() error { return nil })
	}
	now := time.Now()
	if err != nil || !b.isAttended(group) {
		g.attended = time.Time{}
		return
	}
	if g.attended.IsZero() {
		g.attended, g.changed = now, now
	}
	if done != g.done || done >= all {
		g.done, g.changed = done, now
	}
	b.watch.gap = max(b.watch.gap, now.Sub(g.changed))
	for _, key := range headless {
		if !b.watch.headless[key] {
			t.Logf("all deliveries of key %d of %s wait", key, group)
		}
		b.watch.headless[key] = true
	}
	if now.Sub(g.attended) < busGrace {
		return
	}
	b.watch.due = max(b.watch.due, min(time.Duration(due*float64(time.Second)), now.Sub(g.attended)))
	for _, id := range stuck {
		if !b.watch.stuck[id] {
			t.Logf("delivery %d of %s is stuck", id, group)
		}
		b.watch.stuck[id] = true
	}
}

// isAttended reports whether a group has a worker that runs.
func (b *bus) isAttended(group string) bool {
	for _, w := range b.of(group) {
		if w.frozen == nil && !w.isOver() {
			return true
		}
	}
	return false
}
