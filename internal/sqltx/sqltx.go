// Package sqltx shows a running [pgx.Tx] as a [sql.Tx], and finds the [sql.Tx] inside the
// transactions of other libraries.
package sqltx

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// errEnded is the error of whatever uses a transaction behind its end.
var errEnded = fmt.Errorf("the function that got this transaction has returned: %w", sql.ErrTxDone)

// Within calls f with a [sql.Tx] that runs inside tx, on the connection of tx: see [Begin].
func Within(ctx context.Context, tx pgx.Tx, f func(*sql.Tx) error) error {
	within, end, err := Begin(ctx, tx)
	if err != nil {
		return err
	}
	defer end() // also if f panics, or ends its goroutine
	return f(within)
}

// Begin returns a [sql.Tx] that runs inside tx, until end is called. It sends nothing. Its Commit
// and Rollback are those of tx, whose documentation describes them.
//
// End closes open rows and statements, and waits for a statement in progress. After that, no call
// of the [sql.Tx] reaches the connection, even if a caller still has it. It does not end tx.
//
// A statement whose own context cannot end, as that of Exec, ends with ctx.
func Begin(ctx context.Context, tx pgx.Tx) (within *sql.Tx, end func(), err error) {
	c := &conn{ctx: ctx, tx: tx}
	// Ctx must not end the transaction: database/sql would roll it back from a goroutine of its own.
	within, err = acquire().BeginTx(context.WithValue(context.Background(), connKey{}, c), nil)
	if err != nil {
		release()
		return nil, nil, err
	}
	return within, func() { c.end(within) }, nil
}

// end ends the use of the connection, and then lets database/sql forget the transaction.
func (c *conn) end(within *sql.Tx) {
	rowsOpen := c.detach()
	forget := func() {
		defer release()
		_ = within.Rollback() // it does not reach the connection any more
	}
	if rowsOpen {
		// Rollback waits until all rows are closed. Rows that were scanned into sql.RawBytes stay
		// open until their user goes on, which may never happen.
		go forget()
		return
	}
	forget()
}
