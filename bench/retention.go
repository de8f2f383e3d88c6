package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/outboxgo/outbox/bench/internal/stats"
)

const (
	lockWaitLimit = 100.0                 // ms that a writer may wait for a lock
	lockLook      = 10 * time.Millisecond // between two looks at who waits
	oldPerTx      = 100_000
)

// retention compares the relay while it removes old rows with the relay that
// leaves them alone, in one schema and in turns.
func (b *bench) retention(ctx context.Context) error {
	t, err := b.newTrack(ctx, "retention")
	if err != nil {
		return err
	}
	defer t.close()
	if err := t.loadOld(ctx); err != nil {
		return err
	}
	if err := t.warmUp(ctx); err != nil {
		return err
	}
	without, during := keeper{track: t}, keeper{track: t, cfg: outbox.RetentionConfig{CursorsFor: 500 * time.Millisecond}}
	err = b.race(ctx, race{
		name: "retention", rate: openRate, measured: b.lapTime(), limit: 1.2,
		base: side{"without", without.run}, with: side{"during", during.run},
	})
	if err != nil {
		return err
	}
	b.report.Add(
		report.Measured("retention/without-longest-tx", "ms", without.longest),
		report.Measured("retention/during-longest-tx", "ms", during.longest),
		report.Measured("retention/without-lock-wait", "ms", stats.Series{slices.Max(without.waited)}),
		report.Measured("retention/during-lock-wait", "ms", stats.Series{slices.Max(during.waited)}).ValueAtMost(lockWaitLimit))
	b.report.Add(during.removal())
	return nil
}

// sqlOld records events as if they were older than they may become.
const sqlOld = `
INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at)
SELECT gen_random_uuid(), 'bench.order.placed.v1', 'bench', 'Order', 'o-' || n % 10000,
       jsonb_build_object('n', -n, 'order', 'o-' || n % 10000, 'note', md5(n::text)), 'application/json', now() - interval '8 days', now() - interval '8 days'
  FROM generate_series($1::int, $2::int) AS n`

// sqlPublished makes them published for the relay that the laps run.
const sqlPublished = `
INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch)
SELECT o.id, pg_current_snapshot(), o.id, s.system_identifier, 0
  FROM pg_control_system() AS s, (SELECT max(id) AS id FROM {schema}.outbox) AS o`

// loadOld fills outbox with published rows that may go.
func (t *track) loadOld(ctx context.Context) error {
	start := time.Now()
	for first := 1; first <= t.cfg.retained; first += oldPerTx {
		last := min(first+oldPerTx-1, t.cfg.retained)
		if _, err := t.DB.Exec(ctx, services.InSchema(sqlOld, t.schema), first, last); err != nil {
			return fmt.Errorf("record old events: %w", err)
		}
	}
	for _, sql := range []string{sqlPublished, `VACUUM (ANALYZE) {schema}.outbox`, `CHECKPOINT`} {
		if _, err := t.DB.Exec(ctx, services.InSchema(sql, t.schema)); err != nil {
			return fmt.Errorf("%s: %w", sql, err)
		}
	}
	t.say("%d old events in %.1f s", t.cfg.retained, time.Since(start).Seconds())
	return nil
}

// keeper runs laps of a relay with some retention, and notes what they saw.
type keeper struct {
	*track
	cfg outbox.RetentionConfig

	longest stats.Series // transaction of each lap, in ms
	waited  stats.Series // longest wait for a lock that was seen in each lap, in ms
	removed stats.Series // old rows a second
	left    int          // old rows
}

// run is withRelay with a check for lock waits alongside.
func (k *keeper) run(ctx context.Context, rate int, measured time.Duration) (*laps.Lap, error) {
	before, err := k.old(ctx)
	if err != nil {
		return nil, err
	}
	l := k.newLap(rate, measured)
	watched, stop := context.WithCancel(ctx)
	type look struct {
		longest float64
		err     error
	}
	looked := make(chan look, 1)
	go func() {
		longest, err := k.watchLocks(watched)
		looked <- look{longest, err}
	}()
	start := time.Now()
	err = k.relayed(ctx, l, outbox.RelayConfig{Retention: k.cfg}, orders.New)
	took := time.Since(start)
	stop()
	seen := <-looked
	if err := errors.Join(err, seen.err); err != nil {
		return nil, err
	}
	if k.left, err = k.old(ctx); err != nil {
		return nil, err
	}
	k.longest = append(k.longest, l.Longest())
	k.waited = append(k.waited, seen.longest)
	k.removed = append(k.removed, float64(before-k.left)/took.Seconds())
	k.say("removed %d rows, longest transaction %.1f ms, longest wait for a lock %.1f ms", before-k.left, l.Longest(), seen.longest)
	return l, nil
}

// removal is how fast rows went, unless they came to an end.
func (k *keeper) removal() report.Result {
	const name = "retention/removed"
	if k.left == 0 {
		return report.Failed(name, fmt.Sprintf("all of %d rows went before the last turn ended; raise -retained", k.track.cfg.retained))
	}
	return report.Measured(name, "rows/s", k.removed)
}

// sqlOldLeft needs an index only.
const sqlOldLeft = `SELECT count(*) FROM {schema}.outbox WHERE id <= $1`

// old returns how many of the old rows there still are.
func (k *keeper) old(ctx context.Context) (n int, err error) {
	if err := k.DB.QueryRow(ctx, services.InSchema(sqlOldLeft, k.schema), k.track.cfg.retained).Scan(&n); err != nil {
		return 0, fmt.Errorf("count old events: %w", err)
	}
	return n, nil
}

// sqlLockWait is the longest time that a session in this database has waited for a lock by now.
const sqlLockWait = `
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - coalesce(l.waitstart, a.query_start))), 0)::float8 * 1000
  FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
 WHERE NOT l.granted AND a.wait_event_type = 'Lock' AND a.datname = current_database()`

// watchLocks returns the longest wait that it saw until ctx ended. A wait of
// several looks is seen for all but its last one.
func (k *keeper) watchLocks(ctx context.Context) (longest float64, err error) {
	looks := time.NewTicker(lockLook)
	defer looks.Stop()
	for {
		select {
		case <-ctx.Done():
			return longest, nil
		case <-looks.C:
		}
		var waits float64
		if err := k.DB.QueryRow(context.WithoutCancel(ctx), sqlLockWait).Scan(&waits); err != nil {
			return longest, fmt.Errorf("look who waits: %w", err)
		}
		longest = max(longest, waits)
	}
}
