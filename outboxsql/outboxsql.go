// Package outboxsql is outbox for services whose transactions are those of database/sql, and so of
// GORM, ent, Bun, sqlx or sqlc: with pgx/stdlib, or with lib/pq. It links nothing that the root does not.
//
//   - [Record] stores events in a transaction, as [outbox.Recorder.Record] does in one of pgx.
//   - [Cancel] deletes a delayed event, as [outbox.Recorder.Cancel] does.
//   - [InTx] begins a transaction, commits it, and wakes the relay.
//   - [Handle] and [HandleBatch] make handlers that write through a [sql.Tx]. It runs inside the very transaction
//     that holds the row of event_handled, so what such a handler does is done once, too.
//   - [Once] handles what does not come through Kafka and may come more than once, as [outbox.Inbox] does.
//   - [Within] gives code that takes a [sql.Tx] one inside a transaction of pgx.
//
// The values of a service are kept where they are:
//
//	*sql.Tx, *sqlx.Tx, bun.Tx   outboxsql.Record(ctx, tx, rec, event)
//	*ent.Tx                     the same, with ent's feature sql/execquery
//	*gorm.DB in a transaction   outboxsql.Record(ctx, tx.Statement.ConnPool.(outboxsql.Tx), rec, event)
//
// # The pool
//
// Relays, consumers and workers need a pool of pgx, whatever the rest of the service uses. With pgx/stdlib make the
// pool first, and the [sql.DB] from it, so that both share connections and limits:
//
//	pool, err := pgxpool.New(ctx, url)
//	db := stdlib.OpenDBFromPool(pool)
//
// A service with lib/pq makes a pool of the same database, and leaves its [sql.DB] as it is. In its address lib/pq
// takes parameters of pgx, such as pool_max_conns, for settings of the server, and fails: set them in Go. A process
// that only records needs a pool for its [outbox.Waker] alone, of one or two connections.
package outboxsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/google/uuid"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/sqltx"
)

// Tx is a transaction of database/sql: [*sql.Tx], or one of a library around it. A [*sql.DB], which commits
// each statement for itself, is none.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	Commit() error
	Rollback() error
}

// Record stores events in tx, in their order, with one statement; without events it does nothing. The
// relay sees the events after tx has committed. If tx rolls back, they do not exist.
//
// The statement goes to the [*sql.Tx] that tx is or embeds, and to tx itself if there is none: Bun's transaction
// would change it.
//
// Record rejects what [outbox.Recorder.Statement] rejects, before it sends anything: the error is an
// [*outbox.FieldError], and tx remains usable. Any other error is the driver's and means that tx is aborted, or has
// ended ([sql.ErrTxDone]): roll it back. It is [outbox.ErrNotMigrated] too if the tables are not those of this
// release.
func Record(ctx context.Context, tx Tx, rec *outbox.Recorder, events ...outbox.DomainEvent) error {
	if embedded, found := sqltx.Find(tx); found {
		tx = embedded
	}
	if check.IsNil(tx) {
		return nilArgument("tx")
	}
	if rec == nil {
		return nilArgument("recorder")
	}
	if len(events) == 0 {
		return nil
	}
	query, args, err := rec.Statement(ctx, events...)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, query, args...)
	if isUndefined(err) {
		err = fmt.Errorf("%w: %w", outbox.ErrNotMigrated, err)
	}
	if err != nil {
		return fmt.Errorf("outbox: record %d events: %w", len(events), err)
	}
	return nil
}

// Cancel deletes a delayed event in tx, and reports whether it was in time, as [outbox.Recorder.Cancel] does. An error
// is the driver's, and means that tx is aborted, or has ended.
func Cancel(ctx context.Context, tx Tx, rec *outbox.Recorder, eventID uuid.UUID) (bool, error) {
	if embedded, found := sqltx.Find(tx); found {
		tx = embedded
	}
	if check.IsNil(tx) {
		return false, nilArgument("tx")
	}
	if rec == nil {
		return false, nilArgument("recorder")
	}
	query, args := rec.CancelStatement(eventID)
	result, err := tx.ExecContext(ctx, query, args...)
	if isUndefined(err) {
		err = fmt.Errorf("%w: %w", outbox.ErrNotMigrated, err)
	}
	if err != nil {
		return false, fmt.Errorf("outbox: cancel event %s: %w", eventID, err)
	}
	n, err := result.RowsAffected()
	return n > 0, err
}

// InTx runs f in a transaction of db, commits it, and wakes. If f returns an error, panics or ends
// its goroutine, the transaction is rolled back, and no relay is woken. The error is that of f, of
// ctx, or the driver's. InTx commits, so f must not: the commit would fail with [sql.ErrTxDone].
//
// The transaction has the options of the database. For others call [sql.DB.BeginTx], [Record],
// [sql.Tx.Commit] and, after that, [outbox.Waker.Wake].
func InTx(ctx context.Context, db *sql.DB, waker *outbox.Waker, f func(tx *sql.Tx) error) error {
	switch {
	case db == nil:
		return nilArgument("db")
	case waker == nil:
		return nilArgument("waker")
	case f == nil:
		return nilArgument("function")
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("outbox: begin: %w", err)
	}
	defer tx.Rollback() //nolint:errcheck // after a commit it says that there was one; otherwise the connection is discarded
	if err := f(tx); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		if errors.Is(err, sql.ErrTxDone) && ctx.Err() != nil { // which makes database/sql roll back
			err = fmt.Errorf("%w: %w", ctx.Err(), err)
		}
		return fmt.Errorf("outbox: commit: %w", err)
	}
	waker.Wake()
	return nil
}

func nilArgument(name string) error {
	return &outbox.FieldError{Index: -1, Field: name, Err: outbox.ErrNilArgument}
}

// isUndefined is [pg.IsUndefined] for the errors of all drivers.
func isUndefined(err error) bool {
	// lib/pq's error has these, as pgconn's has fields.
	failed, ok := errors.AsType[interface {
		error
		SQLState() string
	}](err)
	if !ok || pg.Code(err) != "" {
		return pg.IsUndefined(err)
	}
	const where = 'W' // of the fields of an error in the protocol
	if more, ok := failed.(interface{ Get(field byte) string }); ok && more.Get(where) != "" {
		return false
	}
	return pg.IsUndefinedCode(failed.SQLState())
}
