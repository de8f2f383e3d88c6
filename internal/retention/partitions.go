package retention

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/lease"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
)

// Partitions of outbox are ranges of ids. The functions of 0002_partitions.sql change the
// tables with the rights of their owner; this file decides when.
//
// A partition is removed as a unit. First all its rows are reviewed, in batches and
// without a lock: each must be old, and published by every relay. Then
// outbox_drop_partition locks the partition and checks again, by a snapshot newer than
// the lock: there are no rows that the first snapshot of the review does not call
// visible, no relay is new, the server and its transaction ids are the same. An open
// transaction that has inserted rows into the partition, prepared or not, holds a lock on
// it: then the lock is not available, and the partition stays. Waiting for locks is
// limited to 50 ms, because other transactions queue up behind.
//
// With the lock on the partition its rows are removed at once (TRUNCATE). That delays no
// writer, because writers use later partitions. Dropping the empty table takes a lock
// on outbox as well, which is not available while any transaction is open that has
// recorded an event; until then the empty table stays. A transaction that drew an id long
// ago and inserts it after the partition was dropped inserts into the default partition,
// which the relay reads like the others.

// idRange is a partition, but not the default one: first <= id < end.
type idRange struct {
	name       string
	First, End int64
	Closed     bool // all its ids have been drawn
	Large      bool // its rows are removed one by one
	kept       bool // so are its rows, because one of them must stay
}

// partitions holds the statements for a partitioned table.
type partitions struct {
	sqlPartitioned, sqlPartitions, sqlKeptPartitions, sqlMakePartitions, sqlDropPartition, sqlReviewed, sqlHaveOld, sqlHolderOf string

	SQLPart, SQLPartArchived, SQLReview, SQLReviewArchived string
}

func newPartitions(schema string) partitions {
	return partitions{
		sqlPartitioned:    pg.InSchema(SQLPartitioned, schema),
		sqlPartitions:     pg.InSchema(sqlPartitions, schema),
		sqlKeptPartitions: pg.InSchema(sqlKeptPartitions, schema),
		sqlMakePartitions: pg.InSchema(SQLMakePartitions, schema),
		sqlDropPartition:  pg.InSchema(sqlDropPartition, schema),
		sqlReviewed:       pg.InSchema(sqlReviewed, schema),
		sqlHaveOld:        pg.InSchema(sqlHaveOld, schema),
		sqlHolderOf:       pg.InSchema(sqlHolderOf, schema),
		SQLPart:           pg.InSchema(sqlCleanPart, schema),
		SQLPartArchived:   pg.InSchema(sqlCleanPartArchived, schema),
		SQLReview:         pg.InSchema(sqlReview, schema),
		SQLReviewArchived: pg.InSchema(sqlReviewArchived, schema),
	}
}

// SQLPartitioned comes before all else: the relay of a plain table needs no right to
// call functions.
const SQLPartitioned = `SELECT relkind = 'p' FROM pg_class WHERE oid = {outbox}::regclass::oid`

const sqlPartitions = `SELECT name::text, first, behind, closed, large FROM {schema}.outbox_partitions() ORDER BY first`

// isPartitioned reports whether outbox has partitions.
func (r *Store) isPartitioned(ctx context.Context) (is bool, err error) {
	err = r.DB.QueryRow(ctx, r.sqlPartitioned).Scan(&is)
	return is, wrapClean("outbox", err)
}

// List returns the partitions by their ids.
func (r *Store) List(ctx context.Context) ([]idRange, error) {
	rows, err := r.DB.Query(ctx, r.sqlPartitions)
	if err != nil {
		return nil, wrapClean("outbox", err)
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (p idRange, err error) {
		err = row.Scan(&p.name, &p.First, &p.End, &p.Closed, &p.Large)
		return p, err
	})
	if err == nil {
		err = r.markKept(ctx, all)
	}
	return all, wrapClean("outbox", err)
}

// sqlKeptPartitions returns the ranges of ids that have rows which retention keeps, and whether that is the row of $3,
// with more than $4 bytes.
const sqlKeptPartitions = `
SELECT p.n - 1, large.there
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) WITH ORDINALITY AS p (first, behind, huge, n)
 CROSS JOIN LATERAL (SELECT EXISTS (SELECT FROM {schema}.outbox AS o WHERE o.id BETWEEN p.huge AND p.huge AND o.size > $4::int) AS there) AS large
 WHERE large.there OR EXISTS (
       SELECT FROM {schema}.outbox_failed AS f
        WHERE f.error_class = 'unreadable_row' AND f.status <> 'resolved' AND f.outbox_id >= p.first AND f.outbox_id < p.behind
          AND EXISTS (SELECT FROM {schema}.outbox AS o WHERE o.id BETWEEN f.outbox_id AND f.outbox_id))`

// markKept finds the partitions that cannot be dropped, because a row of theirs is kept. It forgets those whose row was
// too large for the archive and is not there any more.
func (r *Store) markKept(ctx context.Context, all []idRange) error {
	first, end, huge := make([]int64, len(all)), make([]int64, len(all)), make([]*int64, len(all))
	for i, p := range all {
		first[i], end[i] = p.First, p.End
		if id, has := r.hugeIn[p.name]; has {
			huge[i] = &id
		}
		all[i].kept = slices.ContainsFunc(r.unreadable, func(id int64) bool { return p.First <= id && id < p.End })
	}
	still := map[string]int64{}
	err := pg.Query(ctx, r.DB, SQLCleanSettings, func(rows pgx.Rows) error {
		var n int
		var large bool
		_, err := pgx.ForEachRow(rows, []any{&n, &large}, func() error {
			all[n].kept = true
			if large {
				still[all[n].name] = *huge[n]
			}
			return nil
		})
		return err
	}, r.sqlKeptPartitions, first, end, huge, r.Most)
	if err == nil {
		r.hugeIn = still
	}
	return err
}

// SQLMakePartitions makes the partitions that outbox needs next.
const SQLMakePartitions = `SELECT {schema}.outbox_make_partitions()`

// AtOnce runs a statement that takes locks, in a transaction that is sent as a whole:
// a process that stops in between must not hold them. Each query in it must see what was
// committed before it got its locks, hence READ COMMITTED; a pool may have another
// default. The functions that it calls bound their waits for locks.
func AtOnce(ctx context.Context, db *pgxpool.Pool, read func(pgx.Row) error, sql string, args ...any) error {
	var batch pgx.Batch
	batch.Queue(`BEGIN ISOLATION LEVEL READ COMMITTED`)
	batch.Queue(pg.Unbounded)
	batch.Queue(sql, args...).QueryRow(read)
	batch.Queue(`COMMIT`)
	return db.SendBatch(ctx, &batch).Close()
}

// MakePartitions makes partitions ahead of need.
func (r *Store) MakePartitions(ctx context.Context) (n int, err error) {
	err = AtOnce(ctx, r.DB, func(row pgx.Row) error { return row.Scan(&n) }, r.sqlMakePartitions)
	if pg.IsLocked(err) {
		return 0, ErrBusy
	}
	if err != nil {
		return 0, fmt.Errorf("make partitions: %w", err)
	}
	return n, nil
}

// deletePart is deletePublished for a range of ids that lies in one partition: the
// range lets PostgreSQL leave out the others.
const deletePart = deletePublished + ` AND id > $1 AND id <= (SELECT max(id) FROM scanned) RETURNING *`

const deletePartBelowCeiling = belowCeiling + publishedAmong + deletePart + countRemoved

const sqlCleanPart = publishedRows + deletePartBelowCeiling

const sqlCleanPartArchived = archivedRows + deletePartBelowCeiling + archivedColumns

// PublishedIn removes published rows of one partition, above after and below end.
func (r *Store) PublishedIn(ctx context.Context, l *Proof, after, end int64) (Step, error) {
	return r.publishedBy(ctx, l, r.SQLPart, r.SQLPartArchived, after, end)
}

// wholeBatch makes a review return all rows that it scanned at, or none.
const wholeBatch = `(SELECT count(*) FROM scanned) = (SELECT count(*) FROM published)`

const sqlReview = publishedRows + publishedAmong + `SELECT FROM published WHERE ` + wholeBatch + countRemoved

const sqlReviewArchived = archivedRows + publishedAmong + `
    SELECT * FROM {schema}.outbox WHERE id > $1 AND id <= (SELECT max(id) FROM scanned) AND ` + wholeBatch + countRemoved + archivedColumns

// Review checks all rows of a partition, which may take many runs.
type Review struct {
	idRange
	seen   string    // snapshot from before the first batch
	Server time.Time // start of the server whose snapshot it is
	relays []string

	after int64 // reviewed up to here
	Rows  int64
	Done  bool
	young bool // a row of the last batch is young
	busy  int  // how often the partition was locked when it was to go
}

// sqlReviewed returns what a review starts with, and whether the last row of the
// partition is old; NULL if there is no row.
const sqlReviewed = `
SELECT pg_current_snapshot()::text, pg_postmaster_start_time(), {schema}.outbox_relays(),
       (SELECT created_at < now() - $3::interval FROM {schema}.outbox WHERE id >= $1 AND id < $2 ORDER BY id DESC LIMIT 1)`

// BeginReview begins a review, unless the last row of the partition is too young.
func (r *Store) BeginReview(ctx context.Context, p idRange) (*Review, error) {
	v := &Review{idRange: p, after: max(p.First, 1) - 1}
	var old pgtype.Bool
	err := pg.Query(ctx, r.DB, SQLCleanSettings, func(rows pgx.Rows) error {
		_, err := pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (struct{}, error) {
			return struct{}{}, row.Scan(&v.seen, &v.Server, &v.relays, &old)
		})
		return err
	}, r.sqlReviewed, p.First, p.End, r.Cfg.PublishedFor)
	if err != nil {
		return nil, wrapClean("outbox", err)
	}
	if old.Valid && !old.Bool {
		return nil, nil
	}
	return v, nil
}

// sqlHaveOld reports whether the last row of one of the partitions is old.
const sqlHaveOld = `
SELECT EXISTS (
    SELECT FROM unnest($1::bigint[], $2::bigint[]) AS p (first, behind)
     CROSS JOIN LATERAL (SELECT created_at FROM {schema}.outbox WHERE id >= p.first AND id < p.behind ORDER BY id DESC LIMIT 1) AS o
     WHERE o.created_at < now() - $3::interval)`

// haveOld reports whether the last row of one of the partitions that are closed is old. Then a young row in front of
// them does not mean that the rows behind it are young.
func (r *Store) haveOld(ctx context.Context, partitions []idRange) (old bool, err error) {
	first, end := []int64{}, []int64{}
	for _, p := range partitions {
		if p.Closed {
			first, end = append(first, p.First), append(end, p.End)
		}
	}
	err = pg.Query(ctx, r.DB, SQLCleanSettings, func(rows pgx.Rows) (err error) {
		old, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
		return err
	}, r.sqlHaveOld, first, end, r.Cfg.PublishedFor)
	return old, wrapClean("outbox", err)
}

// ReviewBatch reviews a batch of rows. It reports whether all of them may be removed; if
// not, the next batch begins with the same row. A partition with a row that is too large for the archive is kept from
// now on.
func (r *Store) ReviewBatch(ctx context.Context, l *Proof, v *Review) (ok bool, err error) {
	s, err := r.publishedBy(ctx, l, r.SQLReview, r.SQLReviewArchived, v.after, v.End)
	if err == nil && s.huge.n > 0 {
		r.hugeIn[v.name] = s.huge.first
	}
	v.young = err == nil && s.Young > 0
	if err != nil || s.Removed < s.scanned {
		return false, err
	}
	v.after, v.Rows = max(v.after, s.Last), v.Rows+s.scanned
	v.Done = !s.full
	return true, nil
}

const sqlDropPartition = `
SELECT {schema}.outbox_drop_partition($1::text::name, $2::bool, $3::text::pg_snapshot, $4::timestamptz, $5::text[], $6::text, $7::text, $8::bigint)`

// ErrReview means that a review is not valid any more.
var ErrReview = errors.New("partition has changed")

// Drop removes the rows of a partition that was reviewed, and the table too if table is
// set and its lock is available; or it returns ErrBusy, ErrLeaseLost or ErrReview.
func (r *Store) Drop(ctx context.Context, l *Proof, v *Review, table bool) (dropped bool, err error) {
	var why string
	err = AtOnce(ctx, r.DB, func(row pgx.Row) error { return row.Scan(&why) }, r.sqlDropPartition,
		v.name, table, v.seen, v.Server, v.relays, l.Relay, l.Holder, l.Epoch)
	if err != nil {
		return false, fmt.Errorf("drop partition %s: %w", v.name, err)
	}
	switch why {
	case "dropped", "emptied":
		return why == "dropped", nil
	case "busy":
		return false, ErrBusy
	case "lease":
		return false, lease.ErrLeaseLost
	}
	return false, fmt.Errorf("%w: %s", ErrReview, why)
}

// sqlHolderOf finds the oldest transaction that has a lock on a partition. One that is prepared has no process.
const sqlHolderOf = `
SELECT coalesce(l.pid, 0), coalesce(a.usename::text, ''), coalesce(a.application_name, ''), coalesce(a.state, ''), a.xact_start, coalesce(x.gid, '')
  FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
  JOIN pg_locks AS l ON l.relation = c.oid AND l.locktype = 'relation' AND l.granted
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
  LEFT JOIN pg_locks AS own ON l.pid IS NULL AND own.pid IS NULL AND own.locktype = 'transactionid' AND own.virtualtransaction = l.virtualtransaction
  LEFT JOIN pg_prepared_xacts AS x ON x.transaction = own.transactionid
 WHERE i.inhparent = {outbox}::regclass::oid AND c.relname = $1::text::name
 ORDER BY coalesce(a.xact_start, x.prepared) LIMIT 1`

// holderOf returns who has a lock on a partition: a session, or the name of a prepared transaction.
func (r *Store) holderOf(ctx context.Context, partition string) (h pg.Holder, prepared string, err error) {
	err = r.DB.QueryRow(ctx, r.sqlHolderOf, partition).Scan(append(h.Fields(), &prepared)...)
	return h, prepared, err
}
