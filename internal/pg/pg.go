// Package pg holds what every file that talks to PostgreSQL needs: statements in a
// schema, settings of the planner, and classes of errors.
package pg

import (
	"context"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// DefaultSchema is the schema of a configuration that names none.
const DefaultSchema = "public"

// InSchema replaces {schema} in a statement by a quoted identifier, and {outbox} by a text
// with the qualified name of the table. It is called once for each statement, in
// constructors.
func InSchema(sql, schema string) string {
	quoted := pgx.Identifier{schema}.Sanitize()
	return strings.NewReplacer("{schema}", quoted, "{outbox}", "'"+strings.ReplaceAll(quoted, "'", "''")+".outbox'").Replace(sql)
}

// PlannerSettings precedes a statement in the same round trip and so in the same transaction.
//
// The planner must not choose: a plan that it makes for an empty table reads all of outbox for each
// event when the table has grown, and is used until the table is analysed. With these settings only
// the plans remain that the comments at the statements describe: ORDER BY names the index, because
// nothing is sorted that an index has in order. Each connection plans a statement once.
//
// Before PostgreSQL 18 an index scan is bounded by columns that are equal to something, and by a
// range of the column behind them. A second range bounds nothing, and neither does the second
// column of a row that is compared.
const PlannerSettings = `
SELECT set_config('plan_cache_mode', 'force_generic_plan', true), set_config('enable_seqscan', 'off', true),
       set_config('enable_bitmapscan', 'off', true), set_config('enable_sort', 'off', true), set_config('jit', 'off', true)`

// Durable makes its transaction wait for the disk of its server where the role's
// synchronous_commit is off.
const Durable = `
SELECT set_config('synchronous_commit', 'local', true) WHERE current_setting('synchronous_commit') = 'off'`

// PlanEachTime makes PostgreSQL plan a statement for its arguments each time, because
// most filters are empty.
const PlanEachTime = pgx.QueryExecModeCacheDescribe

// BatchSender is a pool, a connection or a transaction.
type BatchSender interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// Query runs a statement under settings and passes its rows to read.
func Query(ctx context.Context, db BatchSender, settings string, read func(pgx.Rows) error, sql string, args ...any) error {
	var batch pgx.Batch
	batch.Queue(settings)
	batch.Queue(sql, args...).Query(read)
	return db.SendBatch(ctx, &batch).Close()
}

// RowQuerier is a pool, a connection or a transaction.
type RowQuerier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// OrNull returns an argument that is NULL for a zero time.
func OrNull(t time.Time) pgtype.Timestamptz { return pgtype.Timestamptz{Time: t, Valid: !t.IsZero()} }
