package outboxops

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
)

// Delayed shows the events that were recorded with outbox.EventOptions.NotBefore and are still in outbox_delayed, and
// cancels them. It is safe for concurrent use.
type Delayed struct {
	db                          *pgxpool.Pool
	status, list, rejected, end string
}

// DelayedConfig names the schema of the tables. It may be zero.
type DelayedConfig struct {
	// Schema holds the tables of outbox. Empty means public.
	Schema string
}

// NewDelayed returns the delayed events of db. It does no I/O. The caller closes db.
func NewDelayed(db *pgxpool.Pool, cfg DelayedConfig) (*Delayed, error) {
	if err := checkDB(db, &cfg.Schema); err != nil {
		return nil, fmt.Errorf("outbox: delayed config: %w", err)
	}
	in := func(sql string) string { return pg.InSchema(sql, cfg.Schema) }
	return &Delayed{db: db, status: in(sqlDelayedStatus), list: in(sqlDelayed), rejected: in(sqlDelayedRejected), end: in(sqlCancelDelayed)}, nil
}

// DelayedStatus counts delayed events.
type DelayedStatus struct {
	// Waiting is the number of events in outbox_delayed, except for rejected ones, up to [outbox.MaxCounted].
	Waiting int
	// Late is for how long the oldest of them has been due, by the clock of the database. It is zero if none is
	// due. Events that are due are moved within a second, unless no relay and no worker leads, or a transaction
	// has locked an event of their key.
	Late time.Duration
	// Rejected is the number of events that the table outbox has rejected, up to [outbox.MaxCounted]: see
	// DelayedEvent.Rejection.
	Rejected int
}

const sqlDelayedStatus = `
SELECT (SELECT count(*) FROM (SELECT FROM {schema}.outbox_delayed WHERE rejected_at IS NULL ORDER BY due_at, id LIMIT $1) AS w),
       (SELECT count(*) FROM (SELECT FROM {schema}.outbox_delayed WHERE rejected_at IS NOT NULL ORDER BY due_at, id LIMIT $1) AS r),
       coalesce((SELECT extract(epoch FROM now() - due_at)::double precision FROM {schema}.outbox_delayed
                  WHERE rejected_at IS NULL AND due_at <= now() ORDER BY due_at, id LIMIT 1), 0)`

// Status counts the delayed events.
func (d *Delayed) Status(ctx context.Context) (s DelayedStatus, err error) {
	var late float64
	err = pg.Query(ctx, d.db, pg.PlannerSettings, func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&s.Waiting, &s.Rejected, &late}, func() error { return nil })
		return err
	}, d.status, outbox.MaxCounted)
	if err != nil {
		return DelayedStatus{}, fmt.Errorf("outbox: count delayed events: %w", orNotMigrated(err))
	}
	s.Late = pg.Seconds(late)
	return s, nil
}

// DelayedEvent is a row of outbox_delayed.
type DelayedEvent struct {
	// ID is outbox_delayed.id, the order of events that are due at the same time.
	ID int64
	// EventID, Type, Source, AggregateType and AggregateID are the event's.
	EventID, Type, Source, AggregateType, AggregateID string
	// Topic and Key are the topic and the key of its record. Topic is empty if its type has no topic.
	Topic, Key string
	// ContentType is the content type of the payload, and Size the length of payload and headers in bytes.
	ContentType string
	// Size is described at ContentType.
	Size int
	// DueAt is when it is moved to outbox, OccurredAt the event's own time, and RecordedAt the start of the
	// transaction that recorded it.
	DueAt, OccurredAt, RecordedAt time.Time
	// RejectedAt is when the table outbox rejected it, for example because there is an event of this id and
	// outbox.MigrateConfig.UniqueEventIDs is set. It is zero otherwise. Rejection is the error.
	RejectedAt time.Time
	// Rejection is described at RejectedAt.
	Rejection string
}

// DelayedPage chooses a part of a list. The zero value is the events that are due next.
type DelayedPage struct {
	// After and AfterID are DueAt and ID of the last event that is known. Zero means from the first on.
	After time.Time
	// AfterID is described at After.
	AfterID int64
	// Rejected has the list contain the events that outbox has rejected, and no others.
	Rejected bool
	// Limit is the largest number of events to return, up to 1,000. Zero means 100.
	Limit int
}

// The lists of delayed events are in the order of an index each.
const (
	delayedColumns = `
SELECT id, event_id::text, event_type, source, aggregate_type, aggregate_id, topic, key, content_type, size, due_at, occurred_at, recorded_at,
       rejected_at, coalesce(rejection, '')
  FROM {schema}.outbox_delayed`
	delayedAfter = ` AND (due_at, id) > (coalesce($1::timestamptz, '-infinity'), $2::bigint) ORDER BY due_at, id LIMIT $3`

	sqlDelayed         = delayedColumns + ` WHERE rejected_at IS NULL` + delayedAfter
	sqlDelayedRejected = delayedColumns + ` WHERE rejected_at IS NOT NULL` + delayedAfter
)

// List returns delayed events without their payloads, in the order in which they are due. An empty slice means that
// there are no more.
func (d *Delayed) List(ctx context.Context, page DelayedPage) (all []DelayedEvent, err error) {
	limit, err := limitOf(page.Limit)
	if err != nil {
		return nil, fmt.Errorf("outbox: list delayed events: %w", err)
	}
	sql := d.list
	if page.Rejected {
		sql = d.rejected
	}
	err = pg.Query(ctx, d.db, pg.PlannerSettings, func(rows pgx.Rows) error {
		all, err = pgx.CollectRows(rows, scanDelayed)
		return err
	}, sql, pg.OrNull(page.After), page.AfterID, limit)
	if err != nil {
		return nil, fmt.Errorf("outbox: list delayed events: %w", orNotMigrated(err))
	}
	return all, nil
}

func scanDelayed(row pgx.CollectableRow) (e DelayedEvent, err error) {
	var topic pgtype.Text
	err = row.Scan(&e.ID, &e.EventID, &e.Type, &e.Source, &e.AggregateType, &e.AggregateID, &topic, &e.Key, &e.ContentType, &e.Size,
		pg.Time{At: &e.DueAt}, pg.Time{At: &e.OccurredAt}, pg.Time{At: &e.RecordedAt}, pg.Time{At: &e.RejectedAt}, &e.Rejection)
	e.Topic = destinationOf(e.Type, topic)
	return e, err
}

const sqlCancelDelayed = `SELECT {schema}.outbox_cancel_delayed($1::uuid[], $2::text, $3::text)`

// Cancel deletes delayed events by their EventID, at most 1,000, and returns how many it has deleted. Others are in
// outbox already, or there are none of these ids. Their payloads stay in outbox_audit.
func (d *Delayed) Cancel(ctx context.Context, eventIDs []uuid.UUID, why AuditInfo) (cancelled int, err error) {
	if err := why.check(); err != nil {
		return 0, err
	}
	if len(eventIDs) > maxLimit {
		return 0, fmt.Errorf("outbox: cancel delayed events: %w: more than %d", errTooMany, maxLimit)
	}
	if err := pg.QueryRow(ctx, d.db, d.end, eventIDs, why.Operator, why.Reason).Scan(&cancelled); err != nil {
		return 0, fmt.Errorf("outbox: cancel delayed events: %w", orNotMigrated(err))
	}
	return cancelled, nil
}

// errTooMany rejects a call with too many ids.
var errTooMany = errors.New("too many ids")
