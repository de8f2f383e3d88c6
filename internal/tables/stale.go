package tables

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
)

// EventCount counts events or deliveries that are alike. Its fields are those of
// outbox.EventCount, which describes them.
//
// Statements that count read rows up to a limit, and several counts come from the rows of one read. So a statement says
// whether a read has met its limit, for all counts that the rows behind the limit may belong to.
type EventCount struct {
	Relay, Group, Action, Topic, Status, Type, Class string
	Events                                           int
	More                                             bool
	Oldest                                           time.Time
}

// StatusPending is the status of an event that is in outbox and was not attempted.
const StatusPending = "pending"

// SQLStalePending counts the events that were recorded before $2 and that are still in front of
// the positions $1, by type. Of each position it looks at $3 rows of outbox in each order, as
// [SQLRelays] does and for its reasons: what is found in both orders counts once. It is to be run
// under pg.PlannerSettings. A group that has left for Kafka is owed nothing from outbox.
const SQLStalePending = NewestCursors + `
SELECT c.relay, p.event_type, count(*), bool_or(bool_or(p.more)) OVER (PARTITION BY c.relay), min(p.created_at)
  FROM positions AS c
 CROSS JOIN LATERAL (
       WITH by_xid AS MATERIALIZED (
              SELECT o.id, o.xid, o.event_type, o.created_at
                FROM (SELECT pg_snapshot_xmax(c.snapshot) AS bound, pg_current_snapshot() AS snapshot) AS b
               CROSS JOIN LATERAL (` + GapsAndUnreached + `) AS g
               CROSS JOIN LATERAL (SELECT id, xid, event_type, created_at FROM {schema}.outbox
                                    WHERE ` + InGap + ` ORDER BY xid, id LIMIT $3) AS o
               LIMIT $3)
       SELECT o.id, o.event_type, o.created_at, (SELECT count(*) FROM by_xid) >= $3 OR count(*) OVER (PARTITION BY x) >= $3 AS more
         FROM pg_snapshot_xip(c.snapshot) AS x
        CROSS JOIN LATERAL (SELECT id, event_type, created_at FROM {schema}.outbox
                             WHERE (xid, id) > (x, CASE WHEN pg_visible_in_snapshot(x, c.window_snapshot) THEN c.last_processed_id
                                                        ELSE -9223372036854775808 END) AND xid <= x
                             ORDER BY xid, id LIMIT $3) AS o
        WHERE ` + Ended + `
        UNION
       SELECT by_xid.id, by_xid.event_type, by_xid.created_at, (SELECT count(*) FROM by_xid) >= $3 FROM by_xid
        WHERE NOT coalesce(by_xid.id <= c.last_processed_id AND pg_visible_in_snapshot(by_xid.xid, c.window_snapshot), false)
        UNION
       SELECT by_id.id, by_id.event_type, by_id.created_at, true
         FROM (SELECT id, xid, event_type, created_at FROM {schema}.outbox
                WHERE id > c.last_processed_id AND c.window_snapshot IS NOT NULL AND (SELECT count(*) FROM by_xid) >= $3
                ORDER BY id LIMIT $3) AS by_id
        WHERE by_id.xid >= pg_snapshot_xmax(c.snapshot)) AS p
 WHERE c.relay = ANY ($1::text[]) AND p.created_at < $2
   AND NOT EXISTS (SELECT FROM {schema}.event_subscription AS s WHERE s.state = 'left' AND c.relay = '` + WorkerPrefix + `' || s.consumer_group::text)
 GROUP BY c.relay, p.event_type`

// SQLStaleFailures counts the events of the relays $1 that were recorded before $2 and wait in
// outbox_failed, by status, type and class: it looks at up to $3 rows of each kind, those first
// that failed first. It finds the kinds one after the other, as [SQLFailureCount] does. It is to
// be run under pg.PlannerSettings.
const SQLStaleFailures = failureTypes + `, chosen AS MATERIALIZED (
    SELECT * FROM types WHERE status = ANY ('{waiting,failed,parked}'::text[]) AND relay = ANY ($1::text[])
), ` + failureClasses + `
SELECT counted.* FROM (
       SELECT t.relay, t.status, t.event_type, t.error_class, c.*
         FROM classes AS t
        CROSS JOIN LATERAL (
              SELECT count(*) FILTER (WHERE created_at < $2) AS events, count(*) >= $3 AS more, min(created_at) FILTER (WHERE created_at < $2) AS oldest
                FROM (SELECT created_at FROM {schema}.outbox_failed` + ofType + ` AND error_class = t.error_class` + oldestOfType + ` LIMIT $3) AS f) AS c
        UNION ALL
       SELECT t.relay, t.status, t.event_type, '', c.*
         FROM chosen AS t
        CROSS JOIN LATERAL (
              SELECT count(*) FILTER (WHERE created_at < $2) AS events, count(*) >= $3 AS more, min(created_at) FILTER (WHERE created_at < $2) AS oldest
                FROM (SELECT created_at FROM {schema}.outbox_failed` + ofType + ` AND error_class IS NULL` + oldestOfType + ` LIMIT $3) AS f) AS c) AS counted
 WHERE events > 0`

// SQLStaleDeliveries counts deliveries of events that were recorded before $5, by group, action,
// status, type and class. It looks at up to $6 of each of [DeliveryKinds], those first that were made first, and
// at up to $7 that are with a worker. The status is that of a failure: failed once an attempt has
// failed, waiting until then, and parked behind another one.
const SQLStaleDeliveries = DeliveryKinds + `
SELECT counted.* FROM (
       SELECT r.consumer_group, r.action, r.event_type, coalesce(r.last_error_code, ''), s.status, count(*) FILTER (WHERE r.recorded_at < $5) AS events,
              bool_or(bool_or(r.more AND r.status <> 'PROCESSING')) OVER (PARTITION BY r.consumer_group, r.action, s.status = 'parked')
              OR s.status <> 'parked' AND bool_or(bool_or(r.more AND r.status = 'PROCESSING')) OVER () AS more,
              min(r.recorded_at) FILTER (WHERE r.recorded_at < $5)
         FROM (SELECT d.* FROM chosen AS k
                CROSS JOIN LATERAL (
                      SELECT d.*, count(*) OVER () >= $6 AS more
                        FROM (SELECT ` + staleColumns + ` FROM {schema}.event_delivery AS d` + OfDeliveryKind + ByDeliveryKind + ` LIMIT $6) AS d) AS d
                UNION ALL
               SELECT d.*, count(*) OVER () >= $7
                 FROM (SELECT ` + staleColumns + ` FROM {schema}.event_delivery AS d
                        WHERE d.status = 'PROCESSING' ORDER BY d.consumer_group, d.locked_until LIMIT $7) AS d) AS r
        CROSS JOIN LATERAL (SELECT CASE WHEN r.status = 'PARKED' THEN 'parked' WHEN r.last_error_code IS NULL THEN 'waiting' ELSE 'failed' END) AS s (status)
        GROUP BY r.consumer_group, r.action, r.event_type, coalesce(r.last_error_code, ''), s.status) AS counted
 WHERE events > 0`

const staleColumns = `d.consumer_group, d.action, d.status, d.event_type, d.last_error_code, d.recorded_at`

// TypeCounter counts by type the events that have failed, and those that wait for too long.
type TypeCounter struct {
	db                         *pgxpool.Pool
	pending, failed, delivered string
	failures                   FailureCounter
	owed                       DeliveryReader
}

// NewTypeCounter returns the counter of a schema.
func NewTypeCounter(db *pgxpool.Pool, schema string) TypeCounter {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return TypeCounter{
		db: db, pending: in(SQLStalePending), failed: in(SQLStaleFailures), delivered: in(SQLStaleDeliveries),
		failures: NewFailureCounter(db, schema), owed: NewDeliveryReader(db, schema),
	}
}

// FailedEvents counts the failed events of all relays with some statuses, up to [MaxCounted]
// of each kind. Oldest is when the first of them failed.
func (c TypeCounter) FailedEvents(ctx context.Context, statuses ...string) ([]EventCount, error) {
	failed, err := c.failures.Count(ctx, FailureFilter{Statuses: statuses})
	counts := make([]EventCount, len(failed))
	for i, f := range failed {
		counts[i] = EventCount{Relay: f.Relay, Status: f.Status, Type: f.Type, Class: f.Class, Events: f.Events, More: f.More, Oldest: f.Oldest}
	}
	return counts, err
}

// DeadDeliveries counts the deliveries that are DEAD and not resolved, up to [MaxCounted] of
// each group, action and stream. Oldest is when the first of them was made.
func (c TypeCounter) DeadDeliveries(ctx context.Context) ([]EventCount, error) {
	dead, err := c.owed.FailureCounts(ctx, DeliveryFilter{Statuses: []string{"DEAD"}})
	counts := make([]EventCount, len(dead))
	for i, d := range dead {
		counts[i] = EventCount{Group: d.Group, Action: d.Action, Status: "dead", Type: d.Type, Class: d.ErrorCode, Events: d.Deliveries, More: d.More, Oldest: d.Oldest}
	}
	return counts, err
}

// Owners are the relays and groups of workers whose events are looked at, as [Positions] returns
// them. Deliveries says whether those of all groups are, too.
type Owners struct {
	Relays, Groups []Relay
	Deliveries     bool
}

// Stale counts the events that were recorded before a time and have not got through, wherever
// they wait: in outbox, in outbox_failed, and as deliveries. Up to limit events of a kind are
// counted. Oldest is when the first of them was recorded.
func (c TypeCounter) Stale(ctx context.Context, before time.Time, of Owners, limit int) (counts []EventCount, err error) {
	var fallenBehind, withFailures []string
	for _, r := range of.Relays {
		if r.Pending > 0 && r.Oldest.Before(before) {
			fallenBehind = append(fallenBehind, r.Name)
		}
		if r.Waiting+r.Failed+r.Parked > 0 {
			withFailures = append(withFailures, r.Name)
		}
	}
	for _, g := range of.Groups {
		if g.Pending > 0 && g.Oldest.Before(before) {
			fallenBehind = append(fallenBehind, WorkerPrefix+g.Name)
		}
	}
	if len(fallenBehind) > 0 {
		err = c.count(ctx, &counts, scanPending, c.pending, fallenBehind, before, limit)
	}
	if err == nil && len(withFailures) > 0 {
		err = c.count(ctx, &counts, scanFailed, c.failed, withFailures, before, limit)
	}
	if err == nil && of.Deliveries {
		err = c.count(ctx, &counts, scanDelivered, c.delivered, []string{"PENDING", "PARKED"}, "", "", "", before, limit, MaxProcessing)
	}
	slices.SortFunc(counts, func(a, b EventCount) int { return b.Events - a.Events })
	return counts, err
}

func (c TypeCounter) count(ctx context.Context, counts *[]EventCount, scan pgx.RowToFunc[EventCount], sql string, args ...any) error {
	return pg.Query(ctx, c.db, pg.PlannerSettings, func(rows pgx.Rows) error {
		more, err := pgx.CollectRows(rows, scan)
		*counts = append(*counts, more...)
		return err
	}, sql, args...)
}

func scanPending(row pgx.CollectableRow) (EventCount, error) {
	c := EventCount{Status: StatusPending}
	err := row.Scan(&c.Relay, &c.Type, &c.Events, &c.More, pg.Time{At: &c.Oldest})
	if group, ok := strings.CutPrefix(c.Relay, WorkerPrefix); ok {
		c.Relay, c.Group = "", group
	}
	return c, err
}

func scanFailed(row pgx.CollectableRow) (c EventCount, err error) {
	return c, row.Scan(&c.Relay, &c.Status, &c.Type, &c.Class, &c.Events, &c.More, pg.Time{At: &c.Oldest})
}

func scanDelivered(row pgx.CollectableRow) (c EventCount, err error) {
	return c, row.Scan(&c.Group, &c.Action, &c.Type, &c.Class, &c.Status, &c.Events, &c.More, pg.Time{At: &c.Oldest})
}
