package tables

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
)

// Delivery is a row of event_delivery, without payload and headers. Its fields are its columns.
type Delivery struct {
	ID                                      int64
	Group, Action, Stream, Key              string
	Status                                  string
	Held                                    bool
	Attempts, MaxAttempts                   int
	NextRetryAt, LastAttemptAt              time.Time
	LockedBy                                string
	LockedUntil                             time.Time
	ErrorCode                               string
	Err                                     error
	CreatedAt, UpdatedAt, ProcessedAt       time.Time
	ResolvedBy, Note                        string
	ResolvedAt                              time.Time
	Position                                int64  // outbox.id, or the offset of the record
	Partition                               *int32 // of the record that brought the event; nil if it came from outbox
	EventID, Type, Source                   string
	AggregateType, AggregateID, ContentType string
	OccurredAt, RecordedAt                  time.Time
}

// DeliveryColumns are those of event_delivery in the order of [ScanDelivery].
const DeliveryColumns = `d.id, d.consumer_group, d.action, d.stream, coalesce(d.partition_key, d.aggregate_id), d.status, d.held,
       d.attempt_count, d.max_attempts, d.next_retry_at, d.last_attempt_at, coalesce(d.locked_by, ''), d.locked_until,
       coalesce(d.last_error_code, ''), d.last_error_message, d.created_at, d.updated_at, d.processed_at,
       coalesce(d.resolved_by, ''), coalesce(d.note, ''), d.resolved_at,
       d.position, d.record_partition, coalesce(d.record_id, d.event_id::text), d.event_type, d.source, d.aggregate_type, d.aggregate_id, d.content_type, d.occurred_at, d.recorded_at`

// ScanDelivery reads [DeliveryColumns].
func ScanDelivery(row pgx.CollectableRow) (r Delivery, err error) {
	var lastError *string
	err = row.Scan(&r.ID, &r.Group, &r.Action, &r.Stream, &r.Key, &r.Status, &r.Held,
		&r.Attempts, &r.MaxAttempts, pg.Time{At: &r.NextRetryAt}, pg.Time{At: &r.LastAttemptAt}, &r.LockedBy, pg.Time{At: &r.LockedUntil},
		&r.ErrorCode, &lastError, pg.Time{At: &r.CreatedAt}, pg.Time{At: &r.UpdatedAt}, pg.Time{At: &r.ProcessedAt},
		&r.ResolvedBy, &r.Note, pg.Time{At: &r.ResolvedAt},
		&r.Position, &r.Partition, &r.EventID, &r.Type, &r.Source, &r.AggregateType, &r.AggregateID, &r.ContentType, pg.Time{At: &r.OccurredAt}, pg.Time{At: &r.RecordedAt})
	if lastError != nil {
		r.Err = errors.New(*lastError)
	}
	return r, err
}

// Resolved is a status of a [DeliveryFilter] for deliveries that are DEAD and resolved; DEAD itself
// is for those that are not resolved.
const Resolved = "RESOLVED"

// DeliveryFilter selects rows of event_delivery. Empty fields select all, but Statuses are
// required: those of the table, and [Resolved].
type DeliveryFilter struct {
	Group, Stream, Action      string
	Statuses                   []string
	Erred                      *bool // of PENDING and PROCESSING deliveries, only those with a failed attempt, or only those without
	Type, ErrorCode, Key       string
	AggregateType, AggregateID string
	EventID                    string
	Since, Until               time.Time // when the row was made
}

// Args are the first thirteen parameters of statements with [DeliveryKinds] and [DeliveryWhere].
func (f DeliveryFilter) Args() []any {
	return []any{f.Statuses, f.Group, f.Action, f.Stream, f.Type, f.ErrorCode, f.Key, f.EventID, pg.OrNull(f.Since), pg.OrNull(f.Until),
		f.Erred, f.AggregateType, f.AggregateID}
}

// DeliveryWhere is a [DeliveryFilter] without Statuses.
const DeliveryWhere = `
   AND ($2::text = '' OR d.consumer_group = $2)
   AND ($3::text = '' OR d.action = $3)
   AND ($4::text = '' OR d.stream = $4)
   AND ($5::text = '' OR d.event_type = $5)
   AND ($6::text = '' OR d.last_error_code = $6)
   AND ($7::text = '' OR coalesce(d.partition_key, d.aggregate_id) = $7)
   AND ($8::text = '' OR d.event_id::text = lower($8) OR d.record_id = $8)
   AND d.created_at >= coalesce($9::timestamptz, '-infinity') AND coalesce(d.created_at < $10::timestamptz, true)
   AND ($11::bool IS NULL OR d.status NOT IN ('PENDING', 'PROCESSING') OR (d.last_error_code IS NOT NULL) = $11)
   AND ($12::text = '' OR d.aggregate_type = $12)
   AND ($13::text = '' OR d.aggregate_id = $13)`

// DeliveryKinds begins a statement that reads deliveries of a [DeliveryFilter] that wait, or that
// are DEAD and not resolved. The table chosen has the kinds that occur, found one after the other
// in idx_event_delivery_waiting. [OfDeliveryKind] selects the rows of kind k, in the order of their
// ids. Such statements are to be run under pg.PlannerSettings: their cost grows with the kinds, and
// not with the rows.
const DeliveryKinds = `
WITH RECURSIVE kinds AS (
   (SELECT consumer_group, action, stream, status FROM {schema}.event_delivery` + deliveriesWait + `
     ORDER BY consumer_group, action, stream, status LIMIT 1)
     UNION ALL
    SELECT next.* FROM kinds AS k
     CROSS JOIN LATERAL (SELECT consumer_group, action, stream, status FROM {schema}.event_delivery` + deliveriesWait + `
                            AND (consumer_group, action, stream, status) > (k.consumer_group, k.action, k.stream, k.status)
                          ORDER BY consumer_group, action, stream, status LIMIT 1) AS next
), chosen AS MATERIALIZED (
    SELECT * FROM kinds
     WHERE status = ANY ($1::text[]) AND ($2::text = '' OR consumer_group = $2) AND ($3::text = '' OR action = $3) AND ($4::text = '' OR stream = $4)
)`

const (
	deliveriesWait = ` WHERE status IN ('PENDING', 'PARKED', 'DEAD') AND resolved_at IS NULL`

	// OfDeliveryKind is described at [DeliveryKinds].
	OfDeliveryKind = ` WHERE d.status IN ('PENDING', 'PARKED', 'DEAD') AND d.resolved_at IS NULL
               AND d.consumer_group = k.consumer_group AND d.action = k.action AND d.stream = k.stream AND d.status = k.status`
	// ByDeliveryKind is the order of the index.
	ByDeliveryKind = ` ORDER BY d.consumer_group, d.action, d.stream, d.status, d.id`
	// NewestOfDeliveryKind is the same backward.
	NewestOfDeliveryKind = ` ORDER BY d.consumer_group DESC, d.action DESC, d.stream DESC, d.status DESC, d.id DESC`
)

// DeliveryCount counts deliveries that are alike. Its fields are those of
// outboxops.DeliveryCount, which describes them.
type DeliveryCount struct {
	Group, Stream, Action, Status string
	Deliveries                    int
	More                          bool
	Held                          int
	Oldest, Due                   time.Time
}

// The index of due rows has dueType of a row d. fromDue selects the PENDING rows of kind k.
const (
	dueType = `(CASE WHEN d.action = '' THEN '' ELSE d.event_type END)`
	fromDue = ` FROM {schema}.event_delivery AS d
                      WHERE d.status = 'PENDING' AND k.status = 'PENDING'
                        AND d.consumer_group = k.consumer_group AND d.action = k.action AND d.stream = k.stream`
)

// SQLDeliveryCount counts up to $14 deliveries of each kind, and looks at up to $15 that are
// with a worker. The first of a kind by id is the oldest one.
const SQLDeliveryCount = DeliveryKinds + `
SELECT counted.* FROM (
       SELECT k.consumer_group, k.stream, k.action, k.status, c.deliveries, c.deliveries >= $14, c.held, c.oldest, due.next_retry_at AS due
         FROM chosen AS k
        CROSS JOIN LATERAL (
              SELECT count(*) AS deliveries, count(*) FILTER (WHERE held) AS held, min(created_at) AS oldest FROM (
                     SELECT d.created_at, d.held FROM {schema}.event_delivery AS d` + OfDeliveryKind + DeliveryWhere + ByDeliveryKind + ` LIMIT $14) AS r) AS c
         LEFT JOIN LATERAL (
              WITH RECURSIVE types AS (
                 (SELECT ` + dueType + ` AS type` + fromDue + `
                   ORDER BY d.consumer_group, d.action, d.stream, ` + dueType + ` LIMIT 1)
                   UNION ALL
                  SELECT next.type FROM types AS t
                   CROSS JOIN LATERAL (SELECT ` + dueType + ` AS type` + fromDue + ` AND ` + dueType + ` > t.type
                                        ORDER BY d.consumer_group, d.action, d.stream, ` + dueType + ` LIMIT 1) AS next
              )
              SELECT min(first.next_retry_at) AS next_retry_at FROM types AS t
               CROSS JOIN (VALUES (false), (true)) AS s (stale)
               CROSS JOIN LATERAL (
                     SELECT d.next_retry_at` + fromDue + ` AND ` + dueType + ` = t.type
                        AND (coalesce(d.last_error_code, '') = 'stale') = s.stale` + DeliveryWhere + `
                      ORDER BY d.consumer_group, d.action, d.stream, ` + dueType + `, (coalesce(d.last_error_code, '') = 'stale'), d.next_retry_at, d.id LIMIT 1) AS first) AS due ON true
        UNION ALL
       SELECT consumer_group, stream, action, 'PROCESSING', count(*), sum(count(*)) OVER ()::bigint >= $15, 0, min(created_at), min(locked_until)
         FROM (SELECT d.* FROM {schema}.event_delivery AS d
                WHERE d.status = 'PROCESSING' AND 'PROCESSING' = ANY ($1)` + DeliveryWhere + `
                ORDER BY d.consumer_group, d.locked_until LIMIT $15) AS d
        GROUP BY consumer_group, stream, action) AS counted
 WHERE deliveries > 0 ORDER BY consumer_group, stream, action, status`

// SQLDeliveryFailures counts up to $14 deliveries of each kind, of each group up to $14 that are resolved, and up to
// $15 that are with a worker, by group, action, status, type and last error. A read of one topic that has met its limit
// leaves out deliveries of any type and error.
const SQLDeliveryFailures = DeliveryKinds + `, ` + deadGroups + `
SELECT consumer_group, action, status, event_type, code, sum(deliveries)::bigint,
       bool_or(bool_or(more)) OVER (PARTITION BY consumer_group, action, status), min(oldest) FROM (
       SELECT k.consumer_group, k.action, k.status, r.event_type, r.code, count(*) AS deliveries, min(r.created_at) AS oldest,
              sum(count(*)) OVER (PARTITION BY k.consumer_group, k.action, k.stream, k.status)::bigint >= $14 AS more
         FROM chosen AS k
        CROSS JOIN LATERAL (SELECT d.event_type, coalesce(d.last_error_code, '') AS code, d.created_at
                              FROM {schema}.event_delivery AS d` + OfDeliveryKind + DeliveryWhere + ByDeliveryKind + ` LIMIT $14) AS r
        GROUP BY k.consumer_group, k.action, k.stream, k.status, r.event_type, r.code
        UNION ALL
       SELECT g.consumer_group, r.action, 'RESOLVED', r.event_type, r.code, count(*), min(r.created_at),
              sum(count(*)) OVER (PARTITION BY g.consumer_group)::bigint >= $14
         FROM groups AS g
        CROSS JOIN LATERAL (SELECT d.action, d.event_type, coalesce(d.last_error_code, '') AS code, d.created_at
                              FROM {schema}.event_delivery AS d` + resolvedOfGroup + DeliveryWhere + ` ORDER BY d.consumer_group DESC, d.id DESC LIMIT $14) AS r
        WHERE 'RESOLVED' = ANY ($1)
        GROUP BY g.consumer_group, r.action, r.event_type, r.code
        UNION ALL
       SELECT d.consumer_group, d.action, 'PROCESSING', d.event_type, d.code, count(*), min(d.created_at), sum(count(*)) OVER ()::bigint >= $15
         FROM (SELECT d.consumer_group, d.action, d.event_type, coalesce(d.last_error_code, '') AS code, d.created_at FROM {schema}.event_delivery AS d
                WHERE d.status = 'PROCESSING' AND 'PROCESSING' = ANY ($1)` + DeliveryWhere + `
                ORDER BY d.consumer_group, d.locked_until LIMIT $15) AS d
        GROUP BY d.consumer_group, d.action, d.event_type, d.code) AS counted
 GROUP BY consumer_group, action, status, event_type, code
 ORDER BY consumer_group, action, status, event_type, code`

// deadGroups finds the groups that have something DEAD, one after the other, in idx_event_delivery_dead.
const (
	deadGroups = `groups AS (
   (SELECT consumer_group FROM {schema}.event_delivery WHERE status = 'DEAD' ORDER BY consumer_group, id LIMIT 1)
     UNION ALL
    SELECT (SELECT d.consumer_group FROM {schema}.event_delivery AS d WHERE d.status = 'DEAD' AND d.consumer_group > g.consumer_group
             ORDER BY d.consumer_group, d.id LIMIT 1) FROM groups AS g WHERE g.consumer_group IS NOT NULL
)`
	resolvedOfGroup = ` WHERE d.status = 'DEAD' AND d.consumer_group = g.consumer_group AND d.resolved_at IS NOT NULL`
)

// SQLDeliveryList reads up to $15 deliveries with an id below $14, or any for 0, the newest first.
// It finds resolved deliveries by group among the DEAD ones. For DONE deliveries it scans the table
// from its newest row on.
const SQLDeliveryList = DeliveryKinds + `, ` + deadGroups + `, found AS (
    SELECT r.id FROM chosen AS k
     CROSS JOIN LATERAL (SELECT d.id FROM {schema}.event_delivery AS d` + OfDeliveryKind + DeliveryWhere + `
                            AND d.id < $14` + NewestOfDeliveryKind + ` LIMIT $15) AS r
     UNION ALL
    SELECT r.id FROM groups AS g
     CROSS JOIN LATERAL (SELECT d.id FROM {schema}.event_delivery AS d` + resolvedOfGroup + DeliveryWhere + `
                            AND d.id < $14 AND 'RESOLVED' = ANY ($1) ORDER BY d.consumer_group DESC, d.id DESC LIMIT $15) AS r
     UNION ALL
    SELECT d.id FROM {schema}.event_delivery AS d
     WHERE d.status = 'PROCESSING'` + DeliveryWhere + ` AND d.id < $14 AND 'PROCESSING' = ANY ($1)
     UNION ALL
   (SELECT d.id FROM {schema}.event_delivery AS d
     WHERE d.status = 'DONE'` + DeliveryWhere + ` AND d.id < $14 AND 'DONE' = ANY ($1) ORDER BY d.id DESC LIMIT $15)
)
SELECT ` + DeliveryColumns + `
  FROM {schema}.event_delivery AS d WHERE d.id = ANY (ARRAY(SELECT id FROM found ORDER BY id DESC LIMIT $15)) ORDER BY d.id DESC`

// SQLDeliveryIDs reads up to $15 deliveries that wait or are DEAD, with an id above $14, the oldest first, and of these
// the [Unchanged] ones.
const SQLDeliveryIDs = DeliveryKinds + `, ` + deadGroups + `
SELECT r.id, k.stream, k.consumer_group, k.action FROM chosen AS k
 CROSS JOIN LATERAL (SELECT d.id FROM {schema}.event_delivery AS d` + OfDeliveryKind + DeliveryWhere + `
                        AND d.id > $14 AND ` + Unchanged + ByDeliveryKind + ` LIMIT $15) AS r
 UNION ALL
SELECT r.id, r.stream, g.consumer_group, r.action FROM groups AS g
 CROSS JOIN LATERAL (SELECT d.id, d.stream, d.action FROM {schema}.event_delivery AS d` + resolvedOfGroup + DeliveryWhere + `
                        AND d.id > $14 AND 'RESOLVED' = ANY ($1) AND ` + Unchanged + ` ORDER BY d.consumer_group, d.id LIMIT $15) AS r
 ORDER BY 1 LIMIT $15`

// SQLDeliveryDeaths reads up to $3 deliveries that have become DEAD since $1, are not resolved and not
// among $2. It is to be run under pg.PlannerSettings.
const SQLDeliveryDeaths = `
SELECT ` + DeliveryColumns + `
  FROM {schema}.event_delivery AS d
 WHERE d.status = 'DEAD' AND d.resolved_at IS NULL AND d.processed_at >= $1 AND d.id <> ALL ($2::bigint[])
 ORDER BY d.processed_at, d.id LIMIT $3`

// MaxProcessing is how many deliveries that are with workers are looked at.
const MaxProcessing = 100_000

// DeliveryReader counts and lists deliveries.
type DeliveryReader struct {
	db                         *pgxpool.Pool
	count, failures, list, ids string
}

// NewDeliveryReader returns the reader of a schema.
func NewDeliveryReader(db *pgxpool.Pool, schema string) DeliveryReader {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return DeliveryReader{db, in(SQLDeliveryCount), in(SQLDeliveryFailures), in(SQLDeliveryList), in(SQLDeliveryIDs)}
}

// Count returns how many deliveries there are by group, stream, action and status, sorted by these,
// and of each kind [MaxCounted] at most. DONE and resolved deliveries are not counted.
func (r DeliveryReader) Count(ctx context.Context, filter DeliveryFilter) (counts []DeliveryCount, err error) {
	err = pg.Query(ctx, r.db, pg.PlannerSettings, func(rows pgx.Rows) error {
		counts, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (c DeliveryCount, err error) {
			return c, row.Scan(&c.Group, &c.Stream, &c.Action, &c.Status, &c.Deliveries, &c.More, &c.Held, pg.Time{At: &c.Oldest}, pg.Time{At: &c.Due})
		})
		return err
	}, r.count, append(filter.Args(), MaxCounted, MaxProcessing)...)
	return counts, err
}

// DeliveryFailureCount counts deliveries that are alike.
type DeliveryFailureCount struct {
	Group, Action, Status, Type, ErrorCode string
	Deliveries                             int
	More                                   bool
	Oldest                                 time.Time // when the first of their rows was made
}

// FailureCounts returns how many deliveries there are by group, action, status, type and last
// error, sorted by these. It looks at [MaxCounted] at most of each group, stream, action and
// status, and counts nothing that is DONE.
func (r DeliveryReader) FailureCounts(ctx context.Context, filter DeliveryFilter) (counts []DeliveryFailureCount, err error) {
	err = pg.Query(ctx, r.db, pg.PlannerSettings, func(rows pgx.Rows) error {
		counts, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (c DeliveryFailureCount, err error) {
			return c, row.Scan(&c.Group, &c.Action, &c.Status, &c.Type, &c.ErrorCode, &c.Deliveries, &c.More, pg.Time{At: &c.Oldest})
		})
		return err
	}, r.failures, append(filter.Args(), MaxCounted, MaxProcessing)...)
	return counts, err
}

// List returns deliveries with an id below before, or any for 0, the newest first.
func (r DeliveryReader) List(ctx context.Context, filter DeliveryFilter, before int64, limit int) (all []Delivery, err error) {
	if before == 0 {
		before = math.MaxInt64
	}
	err = pg.Query(ctx, r.db, pg.PlannerSettings, func(rows pgx.Rows) error {
		all, err = pgx.CollectRows(rows, ScanDelivery)
		return err
	}, r.list, append(filter.Args(), before, limit)...)
	return all, err
}

// DeliveryID is the id of a delivery, with what it is for.
type DeliveryID struct {
	ID                    int64
	Stream, Group, Action string
}

// IDs returns deliveries that wait, or that are DEAD, with an id above after, the oldest first.
func (r DeliveryReader) IDs(ctx context.Context, filter DeliveryFilter, snapshot string, after int64, limit int) (ids []DeliveryID, err error) {
	err = pg.Query(ctx, r.db, pg.PlannerSettings, func(rows pgx.Rows) error {
		ids, err = pgx.CollectRows(rows, pgx.RowToStructByPos[DeliveryID])
		return err
	}, r.ids, append(filter.Args(), after, limit, snapshot)...)
	return ids, err
}
