// Package pg holds what every file that talks to PostgreSQL needs: statements in a
// schema, settings of the planner, and classes of errors.
package pg

import (
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// DefaultSchema is the schema of a configuration that names none.
const DefaultSchema = "public"

// InSchema replaces {schema} in a statement by a quoted identifier, and {outbox} by a text
// with the qualified name of the table. It replaces {delivery_ids} and {cursor_ids} by texts with the names of
// the sequences of event_delivery.id and outbox_cursor.id. It is called once for each statement, in constructors.
func InSchema(sql, schema string) string {
	quoted := pgx.Identifier{schema}.Sanitize()
	text := func(name string) string { return "'" + strings.ReplaceAll(quoted, "'", "''") + "." + name + "'" }
	return strings.NewReplacer("{schema}", quoted, "{outbox}", text("outbox"), "{delivery_ids}", text("event_delivery_id_seq"),
		"{cursor_ids}", text("outbox_cursor_id_seq")).Replace(sql)
}

// SetSequence returns the statement that sets the sequence of a table's ids to one that is in use.
func SetSequence(schema, table string, id int64) string {
	name := pgx.Identifier{schema, table + "_id_seq"}.Sanitize()
	return fmt.Sprintf("SELECT setval('%s', %d)", strings.ReplaceAll(name, "'", "''"), id)
}

// PlanEachTime makes PostgreSQL plan a statement for its arguments each time, because
// most filters are empty.
const PlanEachTime = pgx.QueryExecModeCacheDescribe

// BatchSender is a pool, a connection or a transaction.
type BatchSender interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// Query runs a statement under settings, if there are any, and passes its rows to read. On a pool it runs under READ
// COMMITTED, whatever the role is configured to.
func Query(ctx context.Context, db BatchSender, settings string, read func(pgx.Rows) error, sql string, args ...any) error {
	return QueryWith(ctx, db, settings, nil, read, sql, args...)
}

// QueryWith is Query with the parameters of the settings.
func QueryWith(ctx context.Context, db BatchSender, settings string, values []any, read func(pgx.Rows) error, sql string, args ...any) error {
	var batch pgx.Batch
	if settings != "" {
		batch.Queue(settings, values...)
	}
	batch.Queue(sql, args...).Query(read)
	return send(ctx, db, false, &batch)
}

// SQLNow reads the clock of the database.
const SQLNow = `SELECT clock_timestamp()`

// QueryRow is the method of a pool, under READ COMMITTED.
func QueryRow(ctx context.Context, db BatchSender, sql string, args ...any) pgx.Row {
	return queriedRow{ctx: ctx, db: db, sql: sql, args: args}
}

// ExecRow is [Exec] of a statement that returns a row.
func ExecRow(ctx context.Context, db BatchSender, sql string, args ...any) pgx.Row {
	return queriedRow{ctx: ctx, db: db, settings: Durable, sql: sql, args: args}
}

type queriedRow struct {
	ctx           context.Context
	db            BatchSender
	settings, sql string
	args          []any
}

// Scan implements [pgx.Row].
func (r queriedRow) Scan(dst ...any) error {
	var batch pgx.Batch
	if r.settings != "" {
		batch.Queue(r.settings)
	}
	batch.Queue(r.sql, r.args...).QueryRow(func(row pgx.Row) error { return row.Scan(dst...) })
	return send(r.ctx, r.db, true, &batch)
}

// Exec is the method of a pool, under READ COMMITTED. It waits for the disk, see [Durable]: mostly, Kafka or an
// operator is told next that it is done.
func Exec(ctx context.Context, db BatchSender, sql string, args ...any) (tag pgconn.CommandTag, err error) {
	var batch pgx.Batch
	batch.Queue(Durable)
	batch.Queue(sql, args...).Exec(func(t pgconn.CommandTag) error { tag = t; return nil })
	err = send(ctx, db, true, &batch)
	return tag, err
}

// Collect returns what read makes of each row of a statement.
func Collect[T any](ctx context.Context, db BatchSender, read pgx.RowToFunc[T], sql string, args ...any) (all []T, err error) {
	err = Query(ctx, db, "", func(rows pgx.Rows) (err error) {
		all, err = pgx.CollectRows(rows, read)
		return err
	}, sql, args...)
	return all, err
}

// Seconds returns seconds of PostgreSQL, which counts them in double precision. Its times may be further apart than
// a duration can say: then it is the longest one.
func Seconds(s float64) time.Duration {
	if most := time.Duration(math.MaxInt64); math.Abs(s) >= most.Seconds() {
		return time.Duration(math.Copysign(1, s)) * most
	}
	return time.Duration(s * float64(time.Second))
}

// OrNull returns an argument that is NULL for a zero time.
func OrNull(t time.Time) pgtype.Timestamptz { return pgtype.Timestamptz{Time: t, Valid: !t.IsZero()} }
