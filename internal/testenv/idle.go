package testenv

import (
	"context"
	"strings"

	"github.com/jackc/pgx/v5"
)

// IdleTracer is a tracer of connections that reads, after each statement with an advisory lock, how long the
// transaction with the lock may be idle.
type IdleTracer struct {
	Bounds []string // one for each statement, or an error

	locks bool // the statement under way takes a lock
}

// TraceQueryStart implements [pgx.QueryTracer].
func (r *IdleTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	r.locks = strings.Contains(q.SQL, "advisory_xact_lock")
	return ctx
}

// TraceQueryEnd implements [pgx.QueryTracer]. A build of an index waits for the snapshot that another protocol than the
// simple one would leave.
func (r *IdleTracer) TraceQueryEnd(ctx context.Context, conn *pgx.Conn, _ pgx.TraceQueryEndData) {
	if !r.locks {
		return
	}
	r.locks = false
	var bound string
	if err := conn.QueryRow(ctx, `SELECT current_setting('idle_in_transaction_session_timeout')`, pgx.QueryExecModeSimpleProtocol).Scan(&bound); err != nil {
		bound = err.Error()
	}
	r.Bounds = append(r.Bounds, bound)
}
