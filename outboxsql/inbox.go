package outboxsql

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/sqltx"
)

// Once is [outbox.Inbox.Once] in a transaction of database/sql: it calls f unless the message was handled before, and
// returns what f has answered, now or the first time. What f does in tx, the note and the answer commit together. All
// that is said there holds. An error of PostgreSQL is the driver's.
func Once(ctx context.Context, tx Tx, inbox *outbox.Inbox, m outbox.InboxMessage, f func() (answer []byte, err error)) (answer []byte, err error) {
	if embedded, found := sqltx.Find(tx); found {
		tx = embedded
	}
	if check.IsNil(tx) {
		return nil, nilArgument("tx")
	}
	if inbox == nil {
		return nil, nilArgument("inbox")
	}
	return inbox.Once(ctx, inboxTx{tx: tx}, m, f)
}

// inboxTx is a transaction of database/sql with those methods of pgx's that [outbox.Inbox] uses.
type inboxTx struct {
	pgx.Tx // nil
	tx     Tx
}

// Conn implements [pgx.Tx].
func (inboxTx) Conn() *pgx.Conn { return nil }

// Rollback implements [pgx.Tx].
func (t inboxTx) Rollback(context.Context) error { return t.tx.Rollback() }

// Exec implements [pgx.Tx].
func (t inboxTx) Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error) {
	_, err := t.tx.ExecContext(ctx, query, args...)
	return pgconn.CommandTag{}, err
}

// QueryRow implements [pgx.Tx].
func (t inboxTx) QueryRow(ctx context.Context, query string, args ...any) pgx.Row {
	return inboxRow(func(into ...any) error {
		rows, err := t.tx.QueryContext(ctx, query, args...)
		if err != nil {
			return err
		}
		defer rows.Close() //nolint:errcheck // after Close it does nothing; otherwise there is an error already
		if !rows.Next() {
			if err = rows.Err(); err == nil {
				err = pgx.ErrNoRows
			}
			return err
		}
		return errors.Join(rows.Scan(into...), rows.Close())
	})
}

// inboxRow is the row of a query that Scan sends.
type inboxRow func(into ...any) error

// Scan implements [pgx.Row].
func (r inboxRow) Scan(into ...any) error { return r(into...) }

// SendBatch implements [pgx.Tx]: it sends the statements one by one.
func (t inboxTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	results := inboxResults{tx: t, ctx: ctx}
	for _, results.query = range b.QueuedQueries {
		if results.query.Fn != nil {
			results.err = results.query.Fn(&results)
		} else {
			_, results.err = results.Exec()
		}
		if results.err != nil {
			break
		}
	}
	if pg.Code(results.err) == "" && isUndefined(results.err) {
		results.err = fmt.Errorf("%w: %w", outbox.ErrNotMigrated, results.err)
	}
	return &results
}

// inboxResults are the results of a batch.
type inboxResults struct {
	pgx.BatchResults // nil
	tx               inboxTx
	ctx              context.Context
	query            *pgx.QueuedQuery // that is sent now
	err              error
}

// Exec implements [pgx.BatchResults].
func (r *inboxResults) Exec() (pgconn.CommandTag, error) {
	return r.tx.Exec(r.ctx, r.query.SQL, r.query.Arguments...)
}

// QueryRow implements [pgx.BatchResults].
func (r *inboxResults) QueryRow() pgx.Row {
	return r.tx.QueryRow(r.ctx, r.query.SQL, r.query.Arguments...)
}

// Close implements [pgx.BatchResults].
func (r *inboxResults) Close() error { return r.err }
