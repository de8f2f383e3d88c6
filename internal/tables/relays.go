package tables

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
)

// Relay is the state of a relay, see outbox.RelayStatus.
type Relay struct {
	Name       string
	Holder     string
	Epoch      int64
	LeaseUntil time.Time
	MovedAt    time.Time

	CursorTopic string
	Transaction int64

	Pending     int64
	PendingMore bool
	Oldest      time.Time

	Waiting, Failed, Parked, Dead int64
	ParkedKeys, HeldKeys          int64

	Said *Said
}

// Said is what the leader of a relay has said of itself, see outbox.RelayState.
type Said struct {
	outage.State
	At      time.Time // when it said that, by the clock of the database
	KafkaAt time.Time // when Kafka last answered it, by the same clock; zero if it did not
	Now     time.Time // the time of the database
}

// RelayBreaker returns the state of the relay's breaker, and since when it is not closed.
func (s *Said) RelayBreaker() (b breaker.State, since time.Time) {
	for _, said := range s.Breakers {
		if said.Action != "" {
			continue
		}
		if b, since = breaker.Open, said.Since; said.State == breaker.HalfOpen.String() {
			b = breaker.HalfOpen
		}
	}
	return b, since
}

// MaxPending is how many pending events are counted at most, and MaxCounted how many
// failed events or keys of a kind.
const (
	MaxPending = 100_000
	MaxCounted = 10_000
)

// SQLRelays reads the state of all relays, and of groups of workers, which have a cursor like a relay's, and of
// consumers, which have a lease. It looks at $1 rows of outbox in each order, and at $2 rows of each status, so its
// cost does not grow with the rows. It takes its shape from sqlOpen, and is to be run under pg.PlannerSettings.
//
// While a window is drained, the order of transactions may begin with rows that were sent
// (by_xid), and the order of ids, in which the relay sends, with rows that are not of the
// window (by_id). Both look, and the one that finds more counts. A transaction that was in
// progress in the snapshot is looked up by itself (late).
//
// Uncommitted rows cost nothing, see [Gaps], but for those in the order of ids (by_id), which are read only if
// there are $1 rows in the other order.
const SQLRelays = positionsOfRelays + `,
       heads.waiting, heads.failed, others.parked, others.dead, heads.keys, heads.held` + fromPositions + `
 CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE status = 'waiting') AS waiting, count(*) FILTER (WHERE status = 'failed') AS failed,
              pg_catalog.count(DISTINCT parking_key) AS keys, count(*) FILTER (WHERE status = 'held') AS held FROM (
              SELECT s AS status, o.parking_key FROM pg_catalog.unnest('{waiting,failed}'::text[]) AS s
               CROSS JOIN LATERAL (SELECT parking_key FROM {schema}.outbox_failed` + statusOfRelay + `) AS o
               UNION ALL
              SELECT 'held', held.parking_key FROM (` + heldKeys + `) AS held) AS r) AS heads
 CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE s = 'parked') AS parked, count(*) FILTER (WHERE s = 'dead') AS dead
         FROM pg_catalog.unnest('{parked,dead}'::text[]) AS s
        CROSS JOIN LATERAL (SELECT FROM {schema}.outbox_failed` + statusOfRelay + `) AS o) AS others
 ORDER BY n.name`

// SQLPositions is [SQLRelays] without failed events, which a worker has no right to read: they are
// counted as none, whatever $2 is.
const SQLPositions = positionsOfRelays + `, 0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint, least($2::bigint, 0)` + fromPositions + `
 ORDER BY n.name`

const positionsOfRelays = NewestCursors + `, known AS MATERIALIZED (
    SELECT relay AS name FROM positions UNION SELECT name FROM {schema}.outbox_lease
)
SELECT n.name, CASE WHEN l.expires_at > clock_timestamp() THEN l.holder ELSE '' END, coalesce(l.epoch, 0),
       CASE WHEN isfinite(l.expires_at) THEN l.expires_at END, c.created_at, p.events, p.more,
       (SELECT created_at FROM {schema}.outbox WHERE id = p.first),
       CASE WHEN ` + leaseHolds + ` THEN l.state END, l.state_at, l.kafka_at, clock_timestamp(),
       coalesce(c.newest_topic, ''), greatest(c.newest_batch, 0)`

// leaseHolds is the condition that a process holds the lease l, and has said something of itself since it took it.
const leaseHolds = `l.expires_at > clock_timestamp() AND l.holder NOT IN ('outbox cut', 'outbox debezium')
            AND l.state ->> 'epoch' = l.epoch::text`

const fromPositions = `
  FROM known AS n
  LEFT JOIN {schema}.outbox_lease AS l ON l.name = n.name
  LEFT JOIN positions AS c ON c.relay = n.name
 CROSS JOIN LATERAL (
       SELECT late.events + greatest(by_xid.events, by_id.events) AS events, late.events >= $1 OR by_xid.looked_at >= $1 AS more,
              least(late.first, by_xid.first, by_id.first) AS first
         FROM (SELECT count(*) AS events, min(id) AS first FROM (
                      SELECT o.id FROM pg_snapshot_xip(c.snapshot) AS x
                       CROSS JOIN LATERAL (SELECT id FROM {schema}.outbox
                                            WHERE (xid, id) > (x, CASE WHEN pg_visible_in_snapshot(x, c.window_snapshot) THEN c.last_processed_id
                                                                       ELSE -9223372036854775808 END) AND xid <= x
                                            ORDER BY xid, id LIMIT $1) AS o
                       WHERE ` + Ended + `
                       LIMIT $1) AS r) AS late
        CROSS JOIN LATERAL (
              SELECT count(*) AS looked_at, count(*) FILTER (WHERE pending) AS events, min(id) FILTER (WHERE pending) AS first FROM (
                     SELECT id, NOT coalesce(id <= c.last_processed_id AND pg_visible_in_snapshot(xid, c.window_snapshot), false) AS pending
                       FROM (SELECT pg_snapshot_xmax(c.snapshot) AS bound, pg_current_snapshot() AS snapshot) AS b
                      CROSS JOIN LATERAL (` + GapsAndUnreached + `) AS g
                      CROSS JOIN LATERAL (SELECT id, xid FROM {schema}.outbox
                                           WHERE ` + InGap + ` ORDER BY xid, id LIMIT $1) AS o
                      LIMIT $1) AS r) AS by_xid
        CROSS JOIN LATERAL (
              SELECT count(*) AS events, min(id) AS first FROM (
                     SELECT id, xid FROM {schema}.outbox
                      WHERE id > c.last_processed_id AND c.window_snapshot IS NOT NULL AND by_xid.looked_at >= $1
                      ORDER BY id LIMIT $1) AS r
               WHERE xid >= pg_snapshot_xmax(c.snapshot)) AS by_id) AS p`

// statusOfRelay selects up to $2 rows of status s.
const statusOfRelay = `
                WHERE relay = n.name AND status = s ORDER BY event_type, error_class, failed_at LIMIT $2`

// heldKeys finds one key after the other.
const heldKeys = `
              WITH RECURSIVE keys AS (
                 (SELECT parking_key` + heldOfRelay + ` ORDER BY f.parking_key, f.status LIMIT 1)
                   UNION ALL
                  SELECT (SELECT f.parking_key` + heldOfRelay + ` AND f.parking_key > keys.parking_key ORDER BY f.parking_key, f.status LIMIT 1)
                    FROM keys WHERE keys.parking_key IS NOT NULL
              )
              SELECT parking_key FROM keys WHERE parking_key IS NOT NULL LIMIT $2`

const heldOfRelay = ` FROM {schema}.outbox_failed AS f
                   WHERE f.relay = n.name AND f.held AND f.status IN ('waiting', 'failed', 'parked', 'dead')`

// What names begin with that are no relay's: those of groups of workers in outbox_cursor and
// outbox_lease, and those of groups of consumers in outbox_lease.
const (
	WorkerPrefix   = "worker:"
	ConsumerPrefix = "consumer:"
)

// HandedOver reports whether a holder is a cutover, and to what it has handed over the events of the relay.
func HandedOver(holder string) (to string, yes bool) {
	switch holder {
	case "outbox cut":
		return "workers", true
	case "outbox debezium":
		return "Debezium", true
	}
	return "", false
}

// IsGroup reports whether a name in outbox_lease belongs to a group, and not to a relay.
func IsGroup(name string) bool {
	return strings.HasPrefix(name, WorkerPrefix) || strings.HasPrefix(name, ConsumerPrefix)
}

// Relays runs [SQLRelays], completed, and returns the relays of the schema, sorted by
// name: those that have a cursor or ever took a lease.
func Relays(ctx context.Context, db *pgxpool.Pool, sql string) ([]Relay, error) {
	all, err := ReadPositions(ctx, db, sql)
	return all.Relays, err
}

// Groups runs [SQLPositions], completed, and returns the groups of workers, by name: how far they
// have come.
func Groups(ctx context.Context, db *pgxpool.Pool, sql string) (map[string]Relay, error) {
	positions, err := ReadPositions(ctx, db, sql)
	all := make(map[string]Relay, len(positions.Workers))
	for _, g := range positions.Workers {
		all[g.Name] = g
	}
	return all, err
}

// Group returns the position of a group of workers by [SQLPositions], completed. It looks at most pending events.
func Group(ctx context.Context, db *pgxpool.Pool, sql, group string, most int64) (g Relay, err error) {
	all, err := cursorsOf(ctx, db, sql, most)
	for _, r := range all {
		if r.Name == WorkerPrefix+group {
			g = r
		}
	}
	return g, err
}

// Waits reports whether events wait for a relay, by [SQLPositions], completed.
func Waits(ctx context.Context, db *pgxpool.Pool, sql, relay string) (bool, error) {
	all, err := cursorsOf(ctx, db, sql, 1)
	return slices.ContainsFunc(all, func(r Relay) bool { return r.Name == relay && r.Pending > 0 }), err
}

// Positions are the holders of a position or a lease, each sorted by name: the relays of the
// schema, the groups of workers, and the groups of consumers of which a process alerts or did so.
// Groups of consumers have their positions in Kafka.
type Positions struct{ Relays, Workers, Consumers []Relay }

// ReadPositions runs [SQLRelays] or [SQLPositions], completed.
func ReadPositions(ctx context.Context, db *pgxpool.Pool, sql string) (p Positions, err error) {
	all, err := cursorsOf(ctx, db, sql, MaxPending+1)
	for _, r := range all {
		of := &p.Relays
		if group, ok := strings.CutPrefix(r.Name, WorkerPrefix); ok {
			r.Name, of = group, &p.Workers
		} else if group, ok := strings.CutPrefix(r.Name, ConsumerPrefix); ok {
			r.Name, of = group, &p.Consumers
		}
		*of = append(*of, r)
	}
	return p, err
}

func cursorsOf(ctx context.Context, db *pgxpool.Pool, sql string, most int64) (all []Relay, err error) {
	err = pg.Query(ctx, db, pg.PlannerSettings, func(rows pgx.Rows) error {
		all, err = pgx.CollectRows(rows, scanRelay)
		return err
	}, sql, most, MaxCounted)
	return all, err
}

func scanRelay(row pgx.CollectableRow) (r Relay, err error) {
	var until, moved, oldest pgtype.Timestamptz
	var said Said
	var state *outage.State
	err = row.Scan(&r.Name, &r.Holder, &r.Epoch, &until, &moved, &r.Pending, &r.PendingMore, &oldest,
		&state, pg.Time{At: &said.At}, pg.Time{At: &said.KafkaAt}, pg.Time{At: &said.Now}, &r.CursorTopic, &r.Transaction,
		&r.Waiting, &r.Failed, &r.Parked, &r.Dead, &r.ParkedKeys, &r.HeldKeys)
	r.LeaseUntil, r.MovedAt, r.Oldest = until.Time, moved.Time, oldest.Time
	if state != nil && state.Epoch == r.Epoch { // else it cannot be read
		said.State, r.Said = state.ByClock(said.At), &said
	}
	r.Pending, r.ParkedKeys = min(r.Pending, MaxPending), min(r.ParkedKeys, MaxCounted)
	return r, err
}
