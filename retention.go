package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// Forever as a duration of [RetentionConfig] keeps the rows.
const Forever time.Duration = math.MaxInt64

// RetentionConfig says how long rows are kept, and how they are removed. The relay
// that holds the lease removes them, a batch at a time, each by an index and in a
// transaction of its own. A duration of [Forever] keeps rows; negative ones are
// errors.
type RetentionConfig struct {
	// PublishedFor is how long rows stay in outbox, counted from the start of the
	// transaction that recorded them. However old, a row goes only when every relay
	// that has a cursor in the schema has published it, so a relay that no longer
	// runs keeps them all: its name is in the log. One that could not go when its time
	// came may stay a day longer than it must. Rows of a partition go when all of them
	// may (MigrateConfig.PartitionRows). Zero means 7 days.
	PublishedFor time.Duration
	// CursorsFor is how long the history in outbox_cursor goes back; from an hour on
	// it has a row for each minute. The newest row of each relay stays. Zero means
	// 7 days.
	CursorsFor time.Duration
	// ResolvedFor is how long resolved rows stay in outbox_failed. One that was
	// resolved without a time counts from when the relay first sees it. Zero means
	// 30 days.
	ResolvedFor time.Duration
	// HandledFor is how long event_handled remembers. A record that is read again
	// later has its effect again, so it must not be shorter than the longest
	// retention of a topic that is consumed, dead-letter topics included, which
	// commonly keep 30 days. Zero means 31 days.
	HandledFor time.Duration

	// Interval is the time between two runs, and before the first. Zero means 10 min.
	Interval time.Duration
	// BatchSize is the most rows that a transaction looks at, at most 10,000. Zero
	// means 1,000.
	BatchSize int
	// Pause is the least time between two batches; it is four times as long as the
	// last batch took if that is more. While the relay has a backlog to send, no
	// batch begins. Zero means 50 ms.
	Pause time.Duration

	// Archive gets rows of outbox before they go, at most BatchSize of them, in the
	// transaction that removes them. What it writes with tx commits with that, or not
	// at all; what it writes elsewhere it may be given again, because the commit
	// may fail. An error keeps the rows, and they come again in the next run. The
	// rows of a partition come before it is dropped, in transactions of their own,
	// and again after a restart. ctx ends after RelayConfig.Lease, and SendTimeout after the relay is told to stop.
	// Nil archives nothing.
	Archive func(ctx context.Context, tx pgx.Tx, rows []ArchivedEvent) error
}

// ArchivedEvent is a row of outbox.
type ArchivedEvent struct {
	// OutboxID is outbox.id.
	OutboxID int64
	// EventID, Type, Source, AggregateType and AggregateID are the event's.
	EventID, Type, Source, AggregateType, AggregateID string
	// Payload is in the encoding that ContentType names.
	Payload []byte
	// ContentType is the media type of Payload.
	ContentType string
	// Topic and PartitionKey are empty where they follow from Type and AggregateID.
	Topic, PartitionKey string
	// Headers is a JSON object of strings, or nil.
	Headers []byte
	// OccurredAt is the event's own time, CreatedAt the start of the transaction
	// that recorded it.
	OccurredAt, CreatedAt time.Time
}

// RetentionResult is how many rows a run of retention removed.
type RetentionResult struct {
	// Published rows of outbox, Cursors of outbox_cursor, Resolved of outbox_failed,
	// Handled of event_handled.
	Published, Cursors, Resolved, Handled int64
}

func (c RetentionResult) total() int64 { return c.Published + c.Cursors + c.Resolved + c.Handled }

const (
	day               = 24 * time.Hour
	defaultPublished  = 7 * day
	defaultCursors    = 7 * day
	defaultResolved   = 30 * day
	defaultHandled    = 31 * day
	defaultCleaning   = 10 * time.Minute
	defaultCleanBatch = 1000
	maxCleanBatch     = 10_000
	defaultCleanPause = 50 * time.Millisecond
)

func (c RetentionConfig) withDefaults() RetentionConfig {
	c.PublishedFor = cmp.Or(c.PublishedFor, defaultPublished)
	c.CursorsFor = cmp.Or(c.CursorsFor, defaultCursors)
	c.ResolvedFor = cmp.Or(c.ResolvedFor, defaultResolved)
	c.HandledFor = cmp.Or(c.HandledFor, defaultHandled)
	c.Interval = cmp.Or(c.Interval, defaultCleaning)
	c.BatchSize = cmp.Or(c.BatchSize, defaultCleanBatch)
	c.Pause = cmp.Or(c.Pause, defaultCleanPause)
	return c
}

func (c RetentionConfig) validate() error {
	errs := []error{
		check.NotNegative("Retention.PublishedFor", c.PublishedFor),
		check.NotNegative("Retention.CursorsFor", c.CursorsFor),
		check.NotNegative("Retention.ResolvedFor", c.ResolvedFor),
		check.NotNegative("Retention.HandledFor", c.HandledFor),
		check.NotNegative("Retention.Interval", c.Interval),
		check.NotNegative("Retention.BatchSize", c.BatchSize),
		check.NotAbove("Retention.BatchSize", c.BatchSize, maxCleanBatch),
		check.NotNegative("Retention.Pause", c.Pause),
	}
	if c.Archive != nil && c.PublishedFor == Forever {
		errs = append(errs, errors.New("field Retention.Archive is set: nothing is archived while PublishedFor is Forever"))
	}
	return errors.Join(errs...)
}

// pauseInBatches is how many times as long as a batch the rest after it is.
const pauseInBatches = 4

// pause is how long to rest after a batch.
func (c RetentionConfig) pause(took time.Duration) time.Duration {
	return max(c.Pause, pauseInBatches*took)
}

// CleanHandledConfig tunes [CleanHandled]. The zero value is ready for production.
type CleanHandledConfig struct {
	// Schema holds the tables of outbox. Empty means public.
	Schema string
	// HandledFor, BatchSize and Pause are as in [RetentionConfig], with the same
	// defaults; there is no relay whose backlog could delay a batch.
	HandledFor time.Duration
	BatchSize  int
	Pause      time.Duration
}

// CleanHandled removes the rows of event_handled that are older than cfg.HandledFor,
// in batches, and returns how many it removed. Where a relay runs on the schema, the
// relay does this. Services that only consume call it at intervals, from any number
// of processes. The error names every bad field, or is PostgreSQL's; some rows may
// have been removed before it.
func CleanHandled(ctx context.Context, db *pgxpool.Pool, cfg CleanHandledConfig) (int64, error) {
	schema := cmp.Or(cfg.Schema, pg.DefaultSchema)
	keep := RetentionConfig{HandledFor: cfg.HandledFor, BatchSize: cfg.BatchSize, Pause: cfg.Pause}.withDefaults()
	err := errors.Join(check.Schema(schema), keep.validate())
	if db == nil {
		err = errors.Join(fmt.Errorf("db %w", ErrNilArgument), err)
	}
	if err != nil {
		return 0, fmt.Errorf("outbox: retention config: %w", err)
	}
	if keep.HandledFor == Forever {
		return 0, nil
	}
	w := walk{batch: newRetention(db, schema, keep).handled, rest: func(took time.Duration) bool {
		wait.Sleep(ctx, keep.pause(took))
		return ctx.Err() == nil
	}}
	removed, err := w.run(ctx)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil && !errors.Is(err, errBusy) {
		return removed, fmt.Errorf("outbox: %w", err)
	}
	return removed, nil
}

// retention removes rows.
type retention struct {
	db  *pgxpool.Pool
	cfg RetentionConfig

	sqlPublished, sqlArchived, sqlCursors, sqlResolved, sqlHandled, sqlProof string

	partitions
}

func newRetention(db *pgxpool.Pool, schema string, cfg RetentionConfig) *retention {
	return &retention{
		db: db, cfg: cfg,
		sqlPublished: pg.InSchema(sqlCleanPublished, schema),
		sqlArchived:  pg.InSchema(sqlCleanArchived, schema),
		sqlCursors:   pg.InSchema(sqlCleanCursors, schema),
		sqlResolved:  pg.InSchema(sqlCleanResolved, schema),
		sqlHandled:   pg.InSchema(sqlCleanHandled, schema),
		sqlProof:     pg.InSchema(sqlRebaseProof, schema),
		partitions:   newPartitions(schema),
	}
}

// sqlCleanSettings is pg.PlannerSettings for statements that wait for nobody: another relay
// of the schema may be removing the same rows.
const sqlCleanSettings = pg.PlannerSettings + `, set_config('lock_timeout', '100ms', true)`

// errBusy means that somebody else has locked rows that we would remove: they are
// his.
var errBusy = errors.New("rows are locked")

// transact runs what removes rows in a transaction, and proves the lease if there
// is one. The proof comes last, because renewing the lease must not have to wait
// for an archive.
func (r *retention) transact(ctx context.Context, l *proof, remove func(pgx.Tx) (gone int64, err error)) error {
	err := pgx.BeginTxFunc(ctx, r.db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, sqlCleanSettings); err != nil {
			return err
		}
		gone, err := remove(tx)
		if err != nil || gone == 0 || l == nil {
			return err
		}
		tag, err := tx.Exec(ctx, r.sqlProof, l.relay, l.holder, l.epoch)
		if err == nil && tag.RowsAffected() == 0 {
			err = errLeaseLost
		}
		return err
	})
	if pg.IsLocked(err) {
		return errBusy
	}
	return err
}

// proof is a lease and the relay whose it is.
type proof struct {
	*lease
	relay string
}

// publishedRows and what follows it find and remove published rows. What is published follows from
// the newest row of each relay's cursor, as in sqlRebase, and never from an age or
// an id: a transaction that was prepared long ago may commit today, and then its
// rows are old, have low ids, and nobody has seen them. Whatever is published stays
// so, which is why it does not matter what moves meanwhile; and if a crash forgets
// those rows of outbox_cursor, it forgets what was committed after them, us
// included. Where a cursor speaks of another cluster, and where there is none, no
// row is looked at.
//
// No relay has published an id above its highest_id, so nothing above the lowest of
// these is looked at either: rows that a relay holds back which stands still cost
// nothing. Names and their newest rows are found one by one; "relay = name" would
// let the planner walk the history of all of them. Rows are deleted by their place,
// because an index of an empty table is as good as any other to it.
const publishedRows = newestCursors + `, ceiling AS MATERIALIZED (
    SELECT min(s.highest_id) AS id
      FROM stands AS s, pg_control_system() AS here
    HAVING bool_and(s.system_identifier = here.system_identifier
                    AND pg_snapshot_xmax(coalesce(s.window_snapshot, s.snapshot)) <= pg_snapshot_xmax(pg_current_snapshot()))
       AND coalesce((SELECT xid FROM {schema}.outbox ORDER BY xid DESC, id DESC LIMIT 1) < pg_snapshot_xmax(pg_current_snapshot()), true)
), looked AS MATERIALIZED (
    SELECT tableoid AS part, ctid AS place, id, xid, created_at < now() - $3::interval AS old
      FROM {schema}.outbox WHERE id > $1 AND id < $4`

// belowCeiling is where statements stop that delete.
const belowCeiling = ` AND id <= (SELECT id FROM ceiling)`

const publishedAmong = ` ORDER BY id LIMIT $2
), published AS MATERIALIZED (
    SELECT o.part, o.place, o.id FROM looked AS o
     WHERE o.old AND (SELECT id FROM ceiling) IS NOT NULL AND NOT EXISTS (
           SELECT FROM stands AS s
            WHERE NOT ` + attempted + `)
), gone AS (`

const deletePublished = `
    DELETE FROM {schema}.outbox WHERE ctid = ANY (ARRAY(SELECT place FROM published))`

const countGone = `
)
SELECT ` + lookedColumns + `,
       (SELECT min(relay) FROM stands
         WHERE highest_id = (SELECT id FROM ceiling)
           AND (SELECT created_at FROM {schema}.outbox WHERE id > (SELECT id FROM ceiling) ORDER BY id LIMIT 1) < now() - $3::interval),
       (SELECT count(*) FROM gone)`

// lookedColumns are how many rows a batch looked at, the last of them, the first
// that is too young, and how many are.
const lookedColumns = `(SELECT count(*) FROM looked), (SELECT max(id) FROM looked),
       (SELECT min(id) FROM looked WHERE NOT old), (SELECT count(*) FROM looked WHERE NOT old)`

const sqlCleanPublished = publishedRows + belowCeiling + publishedAmong + deletePublished + ` RETURNING *` + countGone

const sqlCleanArchived = sqlCleanPublished + archivedColumns

// archivedColumns returns the rows as well, in the order of ids.
const archivedColumns = `, g.id, g.event_id::text, g.event_type, g.source, g.aggregate_type, g.aggregate_id,
       coalesce(g.payload_bytes, convert_to(g.payload::text, 'UTF8')), g.content_type, coalesce(g.topic, ''), coalesce(g.partition_key, ''),
       convert_to(g.headers::text, 'UTF8'), g.occurred_at, g.created_at
  FROM (VALUES (1)) AS head LEFT JOIN gone AS g ON true
 ORDER BY g.id`

// published removes rows of outbox behind an id.
func (r *retention) published(ctx context.Context, l *proof, after int64) (step, error) {
	return r.publishedBy(ctx, l, r.sqlPublished, r.sqlArchived, after, math.MaxInt64)
}

// publishedBy runs the statement that fits, over the ids between after and behind.
func (r *retention) publishedBy(ctx context.Context, l *proof, plain, archived string, after, behind int64) (step, error) {
	sql := plain
	if r.cfg.Archive != nil {
		sql = archived
	}
	var s step
	err := r.transact(ctx, l, func(tx pgx.Tx) (int64, error) {
		rows, err := tx.Query(ctx, sql, after, r.cfg.BatchSize, r.cfg.PublishedFor, behind)
		if err != nil {
			return 0, err
		}
		var standing pgtype.Text
		var events []ArchivedEvent
		s, events, err = r.readStep(rows, &standing)
		s.standing = standing.String
		if err != nil || len(events) == 0 {
			return s.gone, err
		}
		if err := r.cfg.Archive(ctx, tx, events); err != nil {
			return 0, fmt.Errorf("archive: %w", err)
		}
		return s.gone, nil
	})
	return s, wrapClean("outbox", err)
}

// readStep reads what a batch saw and did, and the rows that it removed, if it
// returns them. extra is what stands before the count of what is gone.
func (r *retention) readStep(rows pgx.Rows, extra ...any) (s step, events []ArchivedEvent, err error) {
	defer rows.Close()
	var youngs int64
	var last, young pgtype.Int8
	head := append([]any{&s.looked, &last, &young, &youngs}, extra...)
	head = append(head, &s.gone)
	for rows.Next() {
		var e ArchivedEvent
		raw, dst := rows.RawValues(), slices.Clone(head)
		switch {
		case len(raw) == len(head):
		case raw[len(head)] == nil: // nothing went
			dst = append(dst, make([]any, len(raw)-len(head))...)
		default:
			dst = append(dst, &e.OutboxID, &e.EventID, &e.Type, &e.Source, &e.AggregateType, &e.AggregateID, &e.Payload, &e.ContentType,
				&e.Topic, &e.PartitionKey, &e.Headers, &e.OccurredAt, &e.CreatedAt)
		}
		if err := rows.Scan(dst...); err != nil {
			return s, nil, err
		}
		if e.OutboxID > 0 {
			events = append(events, e)
		}
	}
	s.last, s.young = last.Int64, young.Int64
	s.more = s.looked == int64(r.cfg.BatchSize) && youngs < s.looked
	return s, events, rows.Err()
}

// thinAfter is from when on the history of cursors has a row for each minute.
const thinAfter = time.Hour

// sqlCleanCursors removes history: of each relay's minute all rows but the first,
// and what is older than $3. The newest row of a relay stays, whatever its age, and
// no statement reads another one. The walk begins at the start each time, over what
// thinning has left.
const sqlCleanCursors = `
WITH looked AS MATERIALIZED (
    SELECT ctid AS place, id, relay, created_at, created_at < now() - least($3::interval, $4::interval) AS old
      FROM {schema}.outbox_cursor WHERE id > $1 ORDER BY id LIMIT $2
), newest AS MATERIALIZED (
    SELECT n.relay, (SELECT id FROM {schema}.outbox_cursor
                      WHERE relay >= n.relay AND relay <= n.relay ORDER BY relay DESC, id DESC LIMIT 1) AS id
      FROM (SELECT DISTINCT relay FROM looked) AS n
), ripe AS MATERIALIZED (
    SELECT l.place
      FROM (SELECT *, row_number() OVER (PARTITION BY relay, date_trunc('minute', created_at) ORDER BY id) AS n FROM looked) AS l
      JOIN newest ON newest.relay = l.relay
     WHERE l.old AND l.id < newest.id AND (l.n > 1 OR l.created_at < now() - $3::interval)
), gone AS (
    DELETE FROM {schema}.outbox_cursor WHERE ctid = ANY (ARRAY(SELECT place FROM ripe)) RETURNING id
)
SELECT ` + lookedColumns + `, (SELECT count(*) FROM gone)`

// cursors removes rows of outbox_cursor behind an id.
func (r *retention) cursors(ctx context.Context, l *proof, after int64) (step, error) {
	s, err := r.step(ctx, l, r.sqlCursors, after, r.cfg.BatchSize, r.cfg.CursorsFor, thinAfter)
	return s, wrapClean("outbox_cursor", err)
}

// sqlCleanHandled removes rows of event_handled. Nothing updates them.
const sqlCleanHandled = `
WITH looked AS MATERIALIZED (
    SELECT ctid AS place, id, handled_at < now() - $3::interval AS old
      FROM {schema}.event_handled WHERE id > $1 ORDER BY id LIMIT $2
), gone AS (
    DELETE FROM {schema}.event_handled WHERE ctid = ANY (ARRAY(SELECT place FROM looked WHERE old)) RETURNING id
)
SELECT ` + lookedColumns + `, (SELECT count(*) FROM gone)`

// handled removes rows of event_handled behind an id. It needs no lease: their age
// decides, whoever looks.
func (r *retention) handled(ctx context.Context, after int64) (step, error) {
	s, err := r.step(ctx, nil, r.sqlHandled, after, r.cfg.BatchSize, r.cfg.HandledFor)
	return s, wrapClean("event_handled", err)
}

// step runs a statement that returns one row.
func (r *retention) step(ctx context.Context, l *proof, sql string, args ...any) (s step, err error) {
	err = r.transact(ctx, l, func(tx pgx.Tx) (int64, error) {
		rows, err := tx.Query(ctx, sql, args...)
		if err == nil {
			s, _, err = r.readStep(rows)
		}
		return s.gone, err
	})
	return s, err
}

// sqlCleanResolved removes resolved rows of outbox_failed, and gives those a time
// that an operator resolved without one. Rows are locked first, because one that
// is wanted again meanwhile must stay; those that somebody is at are left to him.
const sqlCleanResolved = `
WITH timeless AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_failed
     WHERE status = 'resolved' AND resolved_at IS NULL ORDER BY resolved_at LIMIT $1 FOR UPDATE SKIP LOCKED
), timed AS (
    UPDATE {schema}.outbox_failed SET resolved_at = now() WHERE id = ANY (ARRAY(SELECT id FROM timeless)) RETURNING id
), ripe AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_failed
     WHERE status = 'resolved' AND resolved_at < now() - $2::interval ORDER BY resolved_at LIMIT $1 FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {schema}.outbox_failed WHERE id = ANY (ARRAY(SELECT id FROM ripe)) RETURNING id
)
SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM timed)`

// resolved removes rows of outbox_failed.
func (r *retention) resolved(ctx context.Context, l *proof) (s step, err error) {
	var timed int64
	err = r.transact(ctx, l, func(tx pgx.Tx) (int64, error) {
		err := tx.QueryRow(ctx, r.sqlResolved, r.cfg.BatchSize, r.cfg.ResolvedFor).Scan(&s.gone, &timed)
		return s.gone + timed, err
	})
	s.more = max(s.gone, timed) == int64(r.cfg.BatchSize)
	return s, wrapClean("outbox_failed", err)
}

func wrapClean(table string, err error) error {
	if err != nil {
		return fmt.Errorf("clean %s: %w", table, err)
	}
	return nil
}
