package outboxsql

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/sqltx"
)

// Handle is [outbox.Handle] for functions that write through database/sql. Tx runs inside the transaction of the
// consumer or worker, which commits it together with the row that says that the event is handled. All that is said
// there holds: [outbox.OncePer], [outbox.WithRetry] and the like take the handler, and middleware sees the
// transaction as pgx's.
//
// Commit and Rollback of tx return [outbox.ErrHandlerTx], and f then counts as failed, also after "defer
// tx.Rollback()": return nil or an error instead. Savepoints are SQL: SAVEPOINT, ROLLBACK TO SAVEPOINT.
//
// Libraries write through tx like this:
//
//	GORM   db := gormDB.WithContext(ctx); db.Statement.ConnPool = tx
//	ent    a client whose driver begins no transactions: see docs/transactions.md
//	Bun    bunDB.NewInsert().Conn(tx)
//	sqlx   sqlx.Tx{Tx: tx, Mapper: sqlxDB.Mapper}
//	sqlc   queries.WithTx(tx)
//
// GORM's Session without a Context shares its statement with gormDB, so ConnPool would change for all users
// of gormDB. A sqlx.Tx that is made like this does not know its driver, so named parameters need
// sqlxDB.BindNamed.
//
// Rows and statements that f leaves open are closed when it returns. A later use of tx, in a goroutine of f
// for example, fails with [sql.ErrTxDone]; only rows that were scanned into [sql.RawBytes] have to be
// closed by f itself, or they hold goroutines of database/sql for ever. A statement without a context of
// its own, or with one that cannot end, ends with ctx.
//
// Arguments and values are those of pgx/stdlib, whichever driver the service uses otherwise: pgx encodes an argument
// of any type. A prepared statement is prepared by pgx when it first runs, if the pool does that, so it works behind
// PgBouncer. A statement that was prepared on a [sql.DB] is of another database for tx.
func Handle[E outbox.DomainEvent](action string, f func(ctx context.Context, tx *sql.Tx, event E, m outbox.Metadata) error) outbox.Handler {
	if f == nil {
		return outbox.Handle[E](action, nil) // which NewConsumer and NewWorker name
	}
	return outbox.Handle(action, func(ctx context.Context, tx pgx.Tx, event E, m outbox.Metadata) error {
		return sqltx.Within(ctx, tx, func(tx *sql.Tx) error { return f(ctx, tx, event, m) })
	})
}

// HandleBatch is [outbox.HandleBatch] for functions that write through database/sql: see [Handle].
func HandleBatch[E outbox.DomainEvent](action string, f func(ctx context.Context, tx *sql.Tx, events []outbox.Received[E]) error) outbox.Handler {
	if f == nil {
		return outbox.HandleBatch[E](action, nil)
	}
	return outbox.HandleBatch(action, func(ctx context.Context, tx pgx.Tx, events []outbox.Received[E]) error {
		return sqltx.Within(ctx, tx, func(tx *sql.Tx) error { return f(ctx, tx, events) })
	})
}

// Within calls f with a transaction of database/sql that runs inside tx, as the one that [Handle] gives to its
// function: in a service that has both, or in a test of code that takes a [sql.Tx], in a transaction that
// outboxtest.Play gets afterwards. It neither commits nor rolls back. Commit and Rollback are those of tx. The error
// is that of f.
func Within(ctx context.Context, tx pgx.Tx, f func(tx *sql.Tx) error) error {
	switch {
	case check.IsNil(tx):
		return nilArgument("tx")
	case f == nil:
		return nilArgument("function")
	}
	return sqltx.Within(ctx, tx, f)
}
