package tables

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
)

// Relay is the state of a relay. Its fields are those of outbox.RelayStatus, which
// describes them.
type Relay struct {
	Name       string
	Holder     string
	Epoch      int64
	LeaseUntil time.Time
	MovedAt    time.Time

	Pending     int64
	PendingMore bool
	Oldest      time.Time

	Waiting, Failed, Parked, Dead int64
	ParkedKeys, HeldKeys          int64
}

// MaxPending is up to where pending events are counted.
const MaxPending = 100_000

// SQLRelays takes its shape from sqlOpen, and is to be run under pg.PlannerSettings.
const SQLRelays = NewestCursors + `, known AS MATERIALIZED (
    SELECT relay AS name FROM positions UNION SELECT name FROM {schema}.outbox_lease
)
SELECT n.name, CASE WHEN l.expires_at > clock_timestamp() THEN l.holder ELSE '' END, coalesce(l.epoch, 0),
       CASE WHEN isfinite(l.expires_at) THEN l.expires_at END, c.created_at, p.events,
       (SELECT created_at FROM {schema}.outbox WHERE id = p.first),
       f.waiting, f.failed, f.parked, f.dead, f.parked_keys, f.held_keys
  FROM known AS n
  LEFT JOIN {schema}.outbox_lease AS l ON l.name = n.name
  LEFT JOIN positions AS c ON c.relay = n.name
 CROSS JOIN LATERAL (
       SELECT count(*) AS events, min(id) AS first FROM (
             (SELECT id FROM {schema}.outbox
               WHERE xid >= pg_snapshot_xmax(c.snapshot) AND xid <= '18446744073709551615'::xid8
                 AND NOT coalesce(id <= c.last_processed_id AND pg_visible_in_snapshot(xid, c.window_snapshot), false)
               ORDER BY xid, id LIMIT $1)
               UNION ALL
              SELECT late.id FROM pg_snapshot_xip(c.snapshot) AS x
               CROSS JOIN LATERAL (SELECT id FROM {schema}.outbox
                                    WHERE xid >= x AND xid <= x
                                      AND NOT coalesce(id <= c.last_processed_id AND pg_visible_in_snapshot(xid, c.window_snapshot), false)
                                    ORDER BY xid, id LIMIT $1) AS late
       ) AS w) AS p
 CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE status = 'waiting') AS waiting, count(*) FILTER (WHERE status = 'failed') AS failed,
              count(*) FILTER (WHERE status = 'parked') AS parked, count(*) FILTER (WHERE status = 'dead') AS dead,
              count(DISTINCT parking_key) FILTER (WHERE status <> 'dead' OR held) AS parked_keys,
              count(DISTINCT parking_key) FILTER (WHERE held) AS held_keys
         FROM {schema}.outbox_failed WHERE relay = n.name AND status IN ('waiting', 'failed', 'parked', 'dead')) AS f
 ORDER BY n.name`

// Relays runs [SQLRelays], completed, and returns the relays of the schema, sorted by
// name: those that have a cursor or ever took a lease.
func Relays(ctx context.Context, db *pgxpool.Pool, sql string) (all []Relay, err error) {
	err = pg.Query(ctx, db, pg.PlannerSettings, func(rows pgx.Rows) error {
		all, err = pgx.CollectRows(rows, scanRelay)
		return err
	}, sql, MaxPending+1)
	return all, err
}

func scanRelay(row pgx.CollectableRow) (r Relay, err error) {
	var until, moved, oldest pgtype.Timestamptz
	err = row.Scan(&r.Name, &r.Holder, &r.Epoch, &until, &moved, &r.Pending, &oldest,
		&r.Waiting, &r.Failed, &r.Parked, &r.Dead, &r.ParkedKeys, &r.HeldKeys)
	r.LeaseUntil, r.MovedAt, r.Oldest = until.Time, moved.Time, oldest.Time
	if r.Pending > MaxPending {
		r.Pending, r.PendingMore = MaxPending, true
	}
	return r, err
}
