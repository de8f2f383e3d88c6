package itest

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// eventColumns are those without a default, and eventValues a row of them.
const (
	eventColumns = `event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at`
	eventValues  = `gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', '{}'::jsonb, 'application/json', now()`
)

// copied is a row as COPY sends it, with a transaction id where there is one.
func copied(xid string) string {
	row := uuid.NewString() + "\ta.b.c.v1\ts\ta\tk\t{}\tapplication/json\t2026-02-03"
	if xid != "" {
		row += "\t" + xid
	}
	return row + "\n"
}

// A row that comes with the transaction id of another transaction, or of another cluster, would be
// sent again and again, or never. It is rejected, whichever client inserts it and in whatever way.
// Every row of its own transaction is accepted.
func TestForeignTransactionIDs(t *testing.T) {
	t.Parallel()
	insert := func(columns, values string) func(context.Context, pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO outbox (`+columns+`) SELECT `+values+` FROM generate_series(1, 30)`)
			return err
		}
	}
	copyFrom := func(columns, row string) func(context.Context, pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Conn().PgConn().CopyFrom(ctx, strings.NewReader(strings.Repeat(row, 3)), `COPY outbox (`+columns+`) FROM STDIN`)
			return err
		}
	}
	inSavepoint := func(write func(context.Context, pgx.Tx) error) func(context.Context, pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error {
			return pgx.BeginFunc(ctx, tx, func(sub pgx.Tx) error {
				return pgx.BeginFunc(ctx, sub, func(sub pgx.Tx) error { return write(ctx, sub) })
			})
		}
	}
	prepared := func(write func(context.Context, pgx.Tx) error) func(context.Context, pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error {
			if err := write(ctx, tx); err != nil {
				return err
			}
			name := uuid.NewString()
			if _, err := tx.Exec(ctx, `PREPARE TRANSACTION '`+name+`'`); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `COMMIT PREPARED '`+name+`'`)
			return err
		}
	}
	keeping := func(write func(context.Context, pgx.Tx) error) func(context.Context, pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `SET LOCAL outbox.keep_xid = 'on'`); err != nil {
				return err
			}
			return write(ctx, tx)
		}
	}
	sql := func(sql string) func(context.Context, pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Exec(ctx, sql); return err }
	}
	const future, past = `, '9000000000'::xid8`, `, '3'::xid8`
	for _, rows := range []int64{0, 10} {
		db, schema := testenv.Schema(t)
		require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema, PartitionRows: rows}))
		for _, test := range []struct {
			name     string
			write    func(context.Context, pgx.Tx) error
			rejected bool
		}{
			{"its own", insert(eventColumns, eventValues), false},
			{"its own, in savepoints", inSavepoint(insert(eventColumns, eventValues)), false},
			{"its own, by COPY", copyFrom(eventColumns, copied("")), false},
			{"its own, of a prepared transaction", prepared(insert(eventColumns, eventValues)), false},
			{"its own, said aloud", insert(eventColumns+", xid", eventValues+", pg_current_xact_id()"), false},
			{"one of the future", insert(eventColumns+", xid", eventValues+future), true},
			{"one of the past", insert(eventColumns+", xid", eventValues+past), true},
			{"one of the past, in savepoints", inSavepoint(insert(eventColumns+", xid", eventValues+past)), true},
			{"one of the future, by COPY", copyFrom(eventColumns+", xid", copied("9000000000")), true},
			{"one of the past, by COPY", copyFrom(eventColumns+", xid", copied("3")), true},
			{"a row changes", sql(`UPDATE outbox SET topic = 't'`), true},
			{"a row changes, and is a new event", sql(`UPDATE outbox SET topic = 't', xid = DEFAULT`), false},
			{"a row changes, and keeps its place", keeping(sql(`UPDATE outbox SET topic = 't'`)), false},
			{"one of the past, on purpose", keeping(insert(eventColumns+", xid", eventValues+past)), false},
			{"one of the past, on purpose, by COPY", keeping(copyFrom(eventColumns+", xid", copied("3"))), false},
			{"one of the past, after a purpose", insert(eventColumns+", xid", eventValues+past), true}, // '' by now, not NULL
		} {
			t.Run(fmt.Sprintf("%s, partitions of %d", test.name, rows), func(t *testing.T) {
				conn, err := db.Acquire(background)
				require.NoError(t, err)
				defer conn.Release()
				tx, err := conn.Begin(background)
				require.NoError(t, err)
				defer tx.Rollback(background)
				_, err = tx.Exec(background, `SELECT set_config('search_path', $1, true)`, pgx.Identifier{schema}.Sanitize())
				require.NoError(t, err)
				err = test.write(background, tx)
				if !test.rejected {
					require.NoError(t, err)
					return
				}
				var rejection *pgconn.PgError
				require.ErrorAs(t, err, &rejection)
				require.Equal(t, "outbox_xid_is_of_this_transaction", rejection.ConstraintName)
			})
		}
		var unguarded int // of all partitions, those that the relay makes too
		require.NoError(t, db.QueryRow(background, `
			SELECT count(*) FROM pg_class AS c
			 WHERE c.relnamespace = quote_ident($1)::regnamespace AND c.relkind = 'r' AND (c.relispartition OR c.relname = 'outbox')
			   AND NOT EXISTS (SELECT FROM pg_constraint WHERE conrelid = c.oid AND conname = 'outbox_xid_is_of_this_transaction' AND NOT convalidated)`,
			schema).Scan(&unguarded))
		require.Zero(t, unguarded)
	}
}
