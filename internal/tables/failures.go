package tables

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
)

// Event is an event that failed. Its fields are those of outbox.FailedEvent, which
// describes them.
type Event struct {
	OutboxID                                  int64
	EventID, Type, AggregateType, AggregateID string
	Topic, Key                                string
	Retries                                   int
	Class                                     string
	Err                                       error
}

// Failure is a row of outbox_failed, without payload and headers. Its fields are
// those of outboxops.Failure, which describes them.
type Failure struct {
	Event

	ID                     int64
	Relay                  string
	Status                 string
	Held                   bool
	Source                 string
	ContentType            string
	OccurredAt, CreatedAt  time.Time
	FailedAt               time.Time
	NextRetryAt            time.Time
	ResolvedAt             time.Time
	ResolvedBy, Resolution string
}

// FailureColumns are those of outbox_failed in the order of [ScanFailure].
const FailureColumns = `id, relay, outbox_id, parking_key, ` + FailureTopic + `, event_id::text, event_type, source, aggregate_type, aggregate_id,
       content_type, occurred_at, created_at, retry_count, last_error, error_class, failed_at, next_retry_at, status, held,
       resolved_at, coalesce(resolved_by, ''), coalesce(resolution, '')`

// FailureTopic is where the relay sends an event: to its topic, or else to the topic of its type,
// with which its parking key begins.
const FailureTopic = `coalesce(topic, pg_catalog.split_part(parking_key, '/', 1))`

// ScanFailure reads [FailureColumns], and more columns after them.
func ScanFailure(row pgx.Row, more ...any) (Failure, error) {
	var r Failure
	var parkingKey string
	var lastError, class *string
	err := row.Scan(append([]any{&r.ID, &r.Relay, &r.OutboxID, &parkingKey, &r.Topic, &r.EventID, &r.Type, &r.Source, &r.AggregateType, &r.AggregateID,
		&r.ContentType, pg.Time{At: &r.OccurredAt}, pg.Time{At: &r.CreatedAt}, &r.Retries, &lastError, &class, pg.Time{At: &r.FailedAt}, pg.Time{At: &r.NextRetryAt},
		&r.Status, &r.Held, pg.Time{At: &r.ResolvedAt}, &r.ResolvedBy, &r.Resolution}, more...)...)
	if key, ok := strings.CutPrefix(parkingKey, r.Topic+"/"); ok { // also where a writer has put a slash into the topic
		r.Key = key
	} else {
		_, r.Key, _ = strings.Cut(parkingKey, "/")
	}
	if lastError != nil {
		r.Err = errors.New(*lastError)
	}
	if class != nil {
		r.Class = *class
	}
	return r, err
}

// CollectFailures reads all rows of [FailureColumns].
func CollectFailures(rows pgx.Rows) ([]Failure, error) {
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (Failure, error) { return ScanFailure(row) })
}

// FailureFilter selects rows of outbox_failed. Empty fields select all, but Statuses are
// required. outboxops.FailureFilter describes them.
type FailureFilter struct {
	Statuses                   []string
	Relay                      string
	Type                       string
	Topic, Key                 string
	AggregateType, AggregateID string
	OutboxID                   int64
	EventID                    string
	Class                      string
	Since, Until               time.Time
}

// Args are the first twelve parameters of statements with [FailureWhere].
func (f FailureFilter) Args() []any {
	return []any{f.Statuses, f.Relay, f.Type, f.Topic, f.Key, f.AggregateType, f.AggregateID, f.Class, pg.OrNull(f.Since), pg.OrNull(f.Until), f.OutboxID, f.EventID}
}

// FailureWhere is a [FailureFilter]. A parking key is a topic, a slash and a record key.
const FailureWhere = `
 WHERE status = ANY ($1::text[])
   AND ($2::text = '' OR relay = $2)
   AND ($3::text = '' OR event_type = $3)
   AND ($4::text = '' OR ` + FailureTopic + ` = $4)
   AND ($5::text = '' OR parking_key = (` + FailureTopic + `)::text || '/' || $5 OR substr(parking_key, strpos(parking_key, '/') + 1) = $5)
   AND ($6::text = '' OR aggregate_type = $6)
   AND ($7::text = '' OR aggregate_id = $7)
   AND ($8::text = '' OR error_class = $8)
   AND failed_at >= coalesce($9::timestamptz, '-infinity') AND coalesce(failed_at < $10::timestamptz, true)
   AND ($11::bigint = 0 OR outbox_id = $11)
   AND ($12::text = '' OR event_id::text = lower($12))`

// FailureCount counts failed events of a kind. Its fields are those of outboxops.FailureCount,
// which describes them.
type FailureCount struct {
	Relay, Status, Type, Class string
	Events                     int
	More                       bool
	Oldest                     time.Time
}

// SQLFailureCount counts up to $5 failed events of each kind. It finds the kinds one after
// the other, so its cost grows with them and not with the rows. $1 to $4 are of a
// [FailureFilter], as in [FailureWhere]. It is to be run under pg.PlannerSettings. Events
// without a class are looked up by themselves, because NULL is greater than no class.
const SQLFailureCount = failureTypes + `, chosen AS MATERIALIZED (
    SELECT * FROM types
     WHERE status = ANY ($1::text[]) AND ($2::text = '' OR relay = $2) AND ($3::text = '' OR event_type = $3)
), ` + failureClasses + `, counted AS (
    SELECT t.relay, t.status, t.event_type, t.error_class, c.*
      FROM classes AS t
     CROSS JOIN LATERAL (
           SELECT count(*) AS events, count(*) >= $5 AS more, min(failed_at) AS oldest FROM (
                  SELECT failed_at FROM {schema}.outbox_failed` + ofType + ` AND error_class = t.error_class` + oldestOfType + ` LIMIT $5) AS f) AS c
     UNION ALL
    SELECT t.relay, t.status, t.event_type, '', c.*
      FROM chosen AS t
     CROSS JOIN LATERAL (
           SELECT count(*) AS events, count(*) >= $5 AS more, min(failed_at) AS oldest FROM (
                  SELECT failed_at FROM {schema}.outbox_failed` + ofType + ` AND error_class IS NULL` + oldestOfType + ` LIMIT $5) AS f) AS c
)
SELECT * FROM counted WHERE events > 0 AND ($4::text = '' OR error_class = $4)
 ORDER BY events DESC, relay, status, event_type, error_class`

// failureTypes begins a statement that needs the types of failed events: types has what there is
// of relay, status and type. The statement chooses some of them as chosen, and failureClasses
// has the classes of these.
const (
	failureTypes = `
WITH RECURSIVE types AS (
   (SELECT relay, status, event_type FROM {schema}.outbox_failed ORDER BY relay, status, event_type LIMIT 1)
     UNION ALL
    SELECT next.* FROM types AS t
     CROSS JOIN LATERAL (SELECT relay, status, event_type FROM {schema}.outbox_failed
                          WHERE (relay, status, event_type) > (t.relay, t.status, t.event_type)
                          ORDER BY relay, status, event_type LIMIT 1) AS next
)`
	failureClasses = `classes AS (
    SELECT t.*, first.error_class FROM chosen AS t
     CROSS JOIN LATERAL (SELECT error_class FROM {schema}.outbox_failed` + ofType + ` AND error_class IS NOT NULL` + oldestOfType + ` LIMIT 1) AS first
     UNION ALL
    SELECT t.relay, t.status, t.event_type, next.error_class FROM classes AS t
     CROSS JOIN LATERAL (SELECT error_class FROM {schema}.outbox_failed` + ofType + ` AND error_class > t.error_class` + oldestOfType + ` LIMIT 1) AS next
)`
)

const (
	ofType       = ` WHERE relay = t.relay AND status = t.status AND event_type = t.event_type`
	oldestOfType = ` ORDER BY relay, status, event_type, error_class, failed_at`
)

// SQLFailureSearch counts all failed events of a [FailureFilter], whose parameters it has.
const SQLFailureSearch = `
SELECT relay, status, event_type, coalesce(error_class, ''), count(*), false, min(failed_at)
  FROM {schema}.outbox_failed` + FailureWhere + `
 GROUP BY 1, 2, 3, 4
 ORDER BY 5 DESC, 1, 2, 3, 4`

// FailureCounter counts failed events.
type FailureCounter struct {
	db            *pgxpool.Pool
	count, search string
}

// NewFailureCounter returns the counter of a schema.
func NewFailureCounter(db *pgxpool.Pool, schema string) FailureCounter {
	return FailureCounter{db, pg.InSchema(SQLFailureCount, schema), pg.InSchema(SQLFailureSearch, schema)}
}

// Count returns how many events have failed by relay, status, type and class, the largest
// number first, and of each kind [MaxCounted] at most. A filter with other fields makes it
// search all rows.
func (c FailureCounter) Count(ctx context.Context, filter FailureFilter) (counts []FailureCount, err error) {
	collect := func(rows pgx.Rows) (err error) {
		counts, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (c FailureCount, err error) {
			return c, row.Scan(&c.Relay, &c.Status, &c.Type, &c.Class, &c.Events, &c.More, pg.Time{At: &c.Oldest})
		})
		return err
	}
	kind := FailureFilter{Statuses: filter.Statuses, Relay: filter.Relay, Type: filter.Type, Class: filter.Class}
	if reflect.DeepEqual(filter, kind) {
		err = pg.Query(ctx, c.db, pg.PlannerSettings, collect, c.count, kind.Statuses, kind.Relay, kind.Type, kind.Class, MaxCounted)
		return counts, err
	}
	rows, err := c.db.Query(ctx, c.search, append([]any{pg.PlanEachTime}, filter.Args()...)...)
	if err != nil {
		return nil, err
	}
	err = collect(rows)
	return counts, err
}

// SQLDeaths reads up to $4 events that have died since $1 and are not among $3, of the relay
// $2 or of all. It is to be run under pg.PlannerSettings.
const SQLDeaths = `
SELECT ` + FailureColumns + `
  FROM {schema}.outbox_failed
 WHERE status = 'dead' AND next_retry_at >= $1 AND ($2::text = '' OR relay = $2) AND id <> ALL ($3::bigint[])
 ORDER BY next_retry_at, id LIMIT $4`
