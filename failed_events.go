package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
)

// FailedEvents lets operators see and settle the events that did not reach Kafka.
// It only changes rows; the relay, which looks at them every RetryInterval, sends.
// Any process may have one. It is safe for concurrent use.
type FailedEvents struct {
	db  *pgxpool.Pool
	sql failedSQL
}

// failedSQL are the statements of [FailedEvents], in their schema.
type failedSQL struct {
	list, count, get, ids                      string
	retry, resolve, edit, hold, release, audit string
}

// FailedEventsConfig says where failed events are. It may be zero.
type FailedEventsConfig struct {
	// Schema of the tables. Empty means public.
	Schema string
}

// NewFailedEvents returns a view of the failed events in db. It does no I/O;
// closing db stays with the caller.
func NewFailedEvents(db *pgxpool.Pool, cfg FailedEventsConfig) (*FailedEvents, error) {
	if cfg.Schema == "" {
		cfg.Schema = pg.DefaultSchema
	}
	errs := []error{check.Schema(cfg.Schema)}
	if db == nil {
		errs = append(errs, fmt.Errorf("pool %w", ErrNilArgument))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("outbox: failed events config: %w", err)
	}
	in := func(sql string) string { return pg.InSchema(sql, cfg.Schema) }
	return &FailedEvents{db: db, sql: failedSQL{
		list: in(sqlFailedList), count: in(sqlFailedCount), get: in(sqlFailedGet), ids: in(sqlFailedIDs),
		retry: in(sqlFailedRetry), resolve: in(sqlFailedResolve), edit: in(sqlFailedEdit),
		hold: in(sqlFailedHold), release: in(sqlFailedRelease), audit: in(sqlFailedAudit),
	}}, nil
}

// FailedRow is a row of outbox_failed.
type FailedRow struct {
	FailedEvent

	// ID is outbox_failed.id.
	ID int64
	// Relay is the name of the relay that could not send it.
	Relay string
	// Status is one of the constants, [StatusDead] for example.
	Status string
	// Held is set while its key waits for an operator.
	Held bool
	// Source is that of the event.
	Source string
	// OccurredAt is when the event happened, CreatedAt when its transaction began.
	OccurredAt, CreatedAt time.Time
	// FailedAt is when it failed first.
	FailedAt time.Time
	// NextRetryAt is not before which it is sent again; of a dead one, when it died.
	NextRetryAt time.Time
	// ResolvedAt is when it was settled; zero until then.
	ResolvedAt time.Time
	// ResolvedBy and Resolution say who settled it, and with which note.
	ResolvedBy, Resolution string

	// ContentType is that of Payload.
	ContentType string
	// Payload is the event; nil in lists, see [FailedEvents.Get].
	Payload []byte
	// Headers are the further Kafka headers; nil in lists.
	Headers map[string]string
}

// FailedFilter picks failed events. Empty fields pick all; the zero value picks what
// is not resolved.
type FailedFilter struct {
	// Statuses are those that count. Empty means all but [StatusResolved].
	Statuses []string
	// Relay is the name of one.
	Relay string
	// Type is the CloudEvents type.
	Type string
	// Topic and Key say where the event would go.
	Topic, Key string
	// AggregateType and AggregateID say what it happened to.
	AggregateType, AggregateID string
	// OutboxID is that of one event.
	OutboxID int64
	// EventID is the CloudEvents id of one event, a UUID.
	EventID string
	// Class is the kind of the last error, message_too_large for example.
	Class string
	// Since and Until bound the time of the first failure: from Since on, before Until.
	Since, Until time.Time
}

// args are the first twelve parameters of statements with failedWhere.
func (f FailedFilter) args() []any {
	statuses := f.Statuses
	if len(statuses) == 0 {
		statuses = unresolved
	}
	return []any{statuses, f.Relay, f.Type, f.Topic, f.Key, f.AggregateType, f.AggregateID, f.Class, pg.OrNull(f.Since), pg.OrNull(f.Until), f.OutboxID, f.EventID}
}

// failedWhere is a [FailedFilter]. A parking key is a topic, a slash and a record key.
const failedWhere = `
 WHERE status = ANY ($1::text[])
   AND ($2::text = '' OR relay = $2)
   AND ($3::text = '' OR event_type = $3)
   AND ($4::text = '' OR starts_with(parking_key, $4 || '/'))
   AND ($5::text = '' OR substr(parking_key, strpos(parking_key, '/') + 1) = $5)
   AND ($6::text = '' OR aggregate_type = $6)
   AND ($7::text = '' OR aggregate_id = $7)
   AND ($8::text = '' OR error_class = $8)
   AND failed_at >= coalesce($9::timestamptz, '-infinity') AND failed_at < coalesce($10::timestamptz, 'infinity')
   AND ($11::bigint = 0 OR outbox_id = $11)
   AND ($12::text = '' OR event_id::text = lower($12))`

const (
	defaultFailedLimit = 100
	maxFailedLimit     = 1000
)

// FailedPage says which part of a list is wanted. The zero value is the first part.
type FailedPage struct {
	// After is the ID of the last row that is known. Zero means from the beginning.
	After int64
	// Limit is how many rows are returned at most, up to 1,000. Zero means 100.
	Limit int
}

func (p FailedPage) limit() (int, error) {
	if err := errors.Join(check.NotNegative("Limit", p.Limit), check.NotAbove("Limit", p.Limit, maxFailedLimit)); err != nil {
		return 0, err
	}
	if p.Limit == 0 {
		return defaultFailedLimit, nil
	}
	return p.Limit, nil
}

// failedRowColumns are those of a list, in the order of scanFailed.
const failedRowColumns = `id, relay, outbox_id, parking_key, event_id::text, event_type, source, aggregate_type, aggregate_id,
       content_type, occurred_at, created_at, retry_count, last_error, error_class, failed_at, next_retry_at, status, held,
       resolved_at, coalesce(resolved_by, ''), coalesce(resolution, '')`

const sqlFailedList = `
SELECT ` + failedRowColumns + `
  FROM {schema}.outbox_failed` + failedWhere + `
   AND ($13::bigint = 0 OR id < $13)
 ORDER BY id DESC LIMIT $14`

// List returns failed events without their payloads, those that failed last first.
// An empty slice means that there are no more.
func (f *FailedEvents) List(ctx context.Context, filter FailedFilter, page FailedPage) ([]FailedRow, error) {
	limit, err := page.limit()
	if err != nil {
		return nil, fmt.Errorf("outbox: list failed events: %w", err)
	}
	rows, err := f.db.Query(ctx, f.sql.list, append([]any{pg.PlanEachTime}, append(filter.args(), page.After, limit)...)...)
	if err == nil {
		var all []FailedRow
		if all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (FailedRow, error) { return scanFailed(row) }); err == nil {
			return all, nil
		}
	}
	return nil, fmt.Errorf("outbox: list failed events: %w", err)
}

// FailedCount is how many events have failed alike.
type FailedCount struct {
	// Relay, Status, Type and Class are what they have in common. Class is empty for
	// what is parked.
	Relay, Status, Type, Class string
	// Events is how many there are.
	Events int
	// Oldest is when the first of them failed.
	Oldest time.Time
}

const sqlFailedCount = `
SELECT relay, status, event_type, coalesce(error_class, ''), count(*), min(failed_at)
  FROM {schema}.outbox_failed` + failedWhere + `
 GROUP BY 1, 2, 3, 4
 ORDER BY 5 DESC, 1, 2, 3, 4`

// Count returns how many events have failed, by relay, status, type and class, the
// largest number first.
func (f *FailedEvents) Count(ctx context.Context, filter FailedFilter) ([]FailedCount, error) {
	rows, err := f.db.Query(ctx, f.sql.count, append([]any{pg.PlanEachTime}, filter.args()...)...)
	if err == nil {
		var counts []FailedCount
		if counts, err = pgx.CollectRows(rows, pgx.RowToStructByPos[FailedCount]); err == nil {
			return counts, nil
		}
	}
	return nil, fmt.Errorf("outbox: count failed events: %w", err)
}

const sqlFailedGet = `
SELECT ` + failedRowColumns + `, ` + wholeColumns + `
  FROM {schema}.outbox_failed WHERE id = $1`

// Get returns a failed event, with its payload. It returns [ErrNotFound] if there is
// none: it may have been sent meanwhile.
func (f *FailedEvents) Get(ctx context.Context, id int64) (FailedRow, error) {
	var payload []byte
	var headers map[string]string
	row, err := scanFailed(f.db.QueryRow(ctx, f.sql.get, id), &payload, &headers)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return row, fmt.Errorf("outbox: failed event %d: %w", id, ErrNotFound)
	case err != nil:
		return row, fmt.Errorf("outbox: read failed event %d: %w", id, err)
	}
	row.Payload, row.Headers = payload, headers
	return row, nil
}

// scanFailed reads failedRowColumns, and more behind them.
func scanFailed(row pgx.Row, more ...any) (FailedRow, error) {
	var r FailedRow
	var place string
	var lastError, class *string
	var resolvedAt *time.Time
	err := row.Scan(append([]any{&r.ID, &r.Relay, &r.OutboxID, &place, &r.EventID, &r.Type, &r.Source, &r.AggregateType, &r.AggregateID,
		&r.ContentType, &r.OccurredAt, &r.CreatedAt, &r.Retries, &lastError, &class, &r.FailedAt, &r.NextRetryAt, &r.Status, &r.Held,
		&resolvedAt, &r.ResolvedBy, &r.Resolution}, more...)...)
	r.Topic, r.Key, _ = strings.Cut(place, "/")
	if lastError != nil {
		r.Err = errors.New(*lastError)
	}
	if class != nil {
		r.Class = *class
	}
	if resolvedAt != nil {
		r.ResolvedAt = *resolvedAt
	}
	return r, err
}
