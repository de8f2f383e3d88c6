package outboxarchive

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

const (
	// pageRows and pageBytes bound a page; a single event may be larger, up to check.MaxEventBytes.
	pageRows  = 500
	pageBytes = 16 << 20
)

// rowColumns are the columns of an event, in outbox and in outbox_archive, as they are stored: PostgreSQL may evaluate
// an expression for rows that are not in the page, too, and fail at one of them.
const rowColumns = `id, event_id, event_type, source, aggregate_type, aggregate_id, payload, payload_bytes, content_type, topic, partition_key,
           occurred_at, created_at, size, headers`

// behindPlace and atPlace choose the rows behind the event ($1, $2), and that event alone.
const (
	behindPlace = `id >= $1::bigint AND (id, event_id) > ($1::bigint, $2::uuid)`
	atPlace     = `id = $1::bigint AND event_id = $2::uuid`
)

// rowFilter chooses rows. Its casts are for pools that send arguments by their Go types.
const rowFilter = `
     WHERE ` + behindPlace + `
       AND ($4::timestamptz IS NULL OR created_at >= $4::timestamptz) AND ($5::timestamptz IS NULL OR created_at < $5::timestamptz)
       AND ($6::text[] IS NULL OR event_type = ANY ($6::text[]))
       AND ($7::text[] IS NULL OR coalesce(topic, pg_catalog.split_part(event_type, '.', 2) || '-events') = ANY ($7::text[]))
       AND ($8::text[] IS NULL OR coalesce(partition_key, aggregate_id) = ANY ($8::text[]))
       AND ($9::text = '' OR aggregate_type = $9::text) AND ($10::text = '' OR aggregate_id = $10::text)
       AND ($11::uuid[] IS NULL OR event_id = ANY ($11::uuid[]))
     ORDER BY id, event_id LIMIT $3::bigint`

const (
	sqlArchivedRows = `(
    SELECT ` + rowColumns + `, NULL::timestamptz AS expires_at, sent FROM {schema}.outbox_archive` + rowFilter + `)`

	// sqlRecordedRows has no event_id in its order, because id is the key.
	sqlRecordedRows = `(
    SELECT ` + rowColumns + `, expires_at, NULL::jsonb AS sent FROM {schema}.outbox` + rowFilter + `)`
)

// The statements of a page. Each reads one snapshot, so it finds an event that is moved to the archive
// meanwhile in one of the tables.
const (
	readPage = `
SELECT id, event_id::text, event_type, source, aggregate_type, aggregate_id,
       CASE WHEN size <= $13::bigint THEN coalesce(payload_bytes, pg_catalog.convert_to(payload::text, 'UTF8')) END, content_type,
       payload IS NOT NULL, coalesce(topic, ''), coalesce(partition_key, ''), CASE WHEN size <= $13::bigint THEN pg_catalog.convert_to((` + tables.Headers + `)::text, 'UTF8') END,
       occurred_at, created_at, size, pg_catalog.convert_to(sent::text, 'UTF8')
  FROM (SELECT *, (sum(size) OVER (ORDER BY id, event_id ROWS UNBOUNDED PRECEDING))::bigint - size AS bytes
          FROM (SELECT * FROM (%s) AS found ORDER BY id, event_id LIMIT $3::bigint) AS first) AS o
 WHERE bytes < $12::bigint ORDER BY id, event_id`

	readNext = `SELECT id, event_id::text FROM (%s) AS found WHERE $12::bigint > 0 AND $13::bigint > 0 ORDER BY id, event_id LIMIT $3::bigint`
)

// The settings of a page. The planner may underestimate the rows in a range of ids, or of times that are
// newer than its statistics. Then it would read and sort all remaining rows for each page. With these
// settings, only plans remain that read an index in the order of ids: the index on the id or, for one
// aggregate, the index of the aggregate. A filter by ids of events may use the index on them, which has
// another order. Statements are planned for their arguments each time, because most filters are empty.
const (
	pageSettings = `
SELECT set_config('plan_cache_mode', 'force_custom_plan', true), set_config('jit', 'off', true)`
	inOrder = pageSettings + `,
       set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('enable_sort', 'off', true)`
)

func (f Filter) settings() string {
	if len(f.EventIDs) > 0 {
		return pageSettings
	}
	return inOrder
}

// rowReader reads the events of one or two tables, page by page. Between pages it holds neither a
// connection nor a snapshot.
type rowReader struct {
	db              *pgxpool.Pool
	page, one, next string
}

func newRowReader(db *pgxpool.Pool, rows string) rowReader {
	return rowReader{db, fmt.Sprintf(readPage, rows), fmt.Sprintf(readPage, strings.ReplaceAll(rows, behindPlace, atPlace)),
		fmt.Sprintf(readNext, strings.ReplaceAll(rows, rowColumns, "id, event_id"))}
}

// Recorded returns the events that are in outbox, sent or not, in a schema; empty means public.
func Recorded(db *pgxpool.Pool, schema string) (Source, error) {
	schema = cmp.Or(schema, pg.DefaultSchema)
	err := check.Schema(schema)
	if db == nil {
		err = errors.Join(fmt.Errorf("db %w", outbox.ErrNilArgument), err)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: recorded events: %w", err)
	}
	return recorded{newRowReader(db, pg.InSchema(sqlRecordedRows, schema))}, nil
}

type recorded struct{ rowReader }

// Events implements [Source].
func (r recorded) Events(ctx context.Context, f Filter) iter.Seq2[outbox.ArchivedEvent, error] {
	return r.events(ctx, f)
}

// Events implements [Source]. It returns the events in the archive and the events that are still in outbox,
// each once.
func (t *Table) Events(ctx context.Context, f Filter) iter.Seq2[outbox.ArchivedEvent, error] {
	return t.reader.events(ctx, f)
}

// place identifies an event. A page begins behind it.
type place struct {
	id      int64
	eventID string
}

var lastUUID = uuid.Max.String()

func (r rowReader) events(ctx context.Context, f Filter) iter.Seq2[outbox.ArchivedEvent, error] {
	if err := f.validate(); err != nil {
		return nothing(err)
	}
	return func(yield func(outbox.ArchivedEvent, error) bool) {
		last, limit := place{f.After, lastUUID}, pageRows
		for {
			events, err := r.read(ctx, r.page, f, last, limit)
			if pg.IsUnreadable(err) && limit > 1 { // find the event that is unreadable
				limit = 1
				continue
			}
			if pg.IsUnreadable(err) {
				limit = pageRows
				events, err = r.first(ctx, f, last, err)
			}
			if err != nil {
				yield(outbox.ArchivedEvent{}, fmt.Errorf("outbox: read events: %w", orNoTable(err)))
				return
			}
			if len(events) == 0 {
				return
			}
			for _, e := range events {
				if here := (place{e.OutboxID, e.EventID}); here != last { // the same event may be in both tables
					last = here
					if !yield(e.ArchivedEvent, e.err) {
						return
					}
				}
			}
		}
	}
}

// args returns the arguments of all statements.
func (f Filter) args(after place, limit int) []any {
	orNull := func(list []string) []string {
		if len(list) == 0 {
			return nil
		}
		return list
	}
	return []any{after.id, after.eventID, limit, pg.OrNull(f.Since), pg.OrNull(f.Until), orNull(f.Types), orNull(f.Topics), orNull(f.Keys),
		f.AggregateType, f.AggregateID, orNull(f.EventIDs), int64(pageBytes), int64(check.MaxEventBytes)}
}

// rowEvent is an event, or the error of one that is not read. It has neither payload nor headers then.
type rowEvent struct {
	outbox.ArchivedEvent
	err error
}

// read returns the events of a page at or behind a place.
func (r rowReader) read(ctx context.Context, page string, f Filter, at place, limit int) (events []rowEvent, err error) {
	err = pg.Query(ctx, r.db, f.settings(), func(rows pgx.Rows) (err error) {
		events, err = pgx.CollectRows(rows, scanEvent)
		return err
	}, page, f.args(at, limit)...)
	return events, err
}

func scanEvent(row pgx.CollectableRow) (e rowEvent, err error) {
	var size int // as printed
	err = row.Scan(&e.OutboxID, &e.EventID, &e.Type, &e.Source, &e.AggregateType, &e.AggregateID, &e.Payload, &e.ContentType, &e.JSON,
		&e.Topic, &e.PartitionKey, &e.Headers, pg.Time{At: &e.OccurredAt}, pg.Time{At: &e.CreatedAt}, &size, &e.Sent)
	if size > check.MaxEventBytes {
		e.err = &ReadError{OutboxID: e.OutboxID, Err: fmt.Errorf("the event has %d bytes as printed, at most %d are read", size, check.MaxEventBytes)}
	}
	return e, err
}

// first reads the first event behind a place alone, because why, the error of a page, may be that of another event.
func (r rowReader) first(ctx context.Context, f Filter, after place, why error) ([]rowEvent, error) {
	at, err := r.behind(ctx, f, after)
	if err != nil {
		return nil, err
	}
	if at == after {
		return nil, why
	}
	events, err := r.read(ctx, r.one, f, at, 1)
	if pg.IsUnreadable(err) {
		return []rowEvent{{outbox.ArchivedEvent{OutboxID: at.id, EventID: at.eventID}, &ReadError{OutboxID: at.id, Err: err}}}, nil
	}
	if err == nil && len(events) == 0 { // it was removed meanwhile
		return r.first(ctx, f, at, why)
	}
	return events, err
}

// behind returns the place of the first event behind a place. If there is none, it returns the same place.
func (r rowReader) behind(ctx context.Context, f Filter, after place) (next place, err error) {
	next = after
	err = pg.Query(ctx, r.db, f.settings(), func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&next.id, &next.eventID}, func() error { return nil })
		return err
	}, r.next, f.args(after, 1)...)
	return next, err
}
