package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// Waker tells the relays and workers of a schema that a transaction has committed events, so that they look now and
// not at their next poll. Those in this process learn it at once. The one that leads, of each relay name and each
// group of workers, is notified by PostgreSQL if it is in another process: after the commit and on a connection of
// its own, because a notification in a business transaction would have it wait for all others. While a process has
// more than 400 wake-ups a second, it notifies four times a second, and who leads looks every millisecond or two in
// between. A wake-up that is lost costs no event: it is found at the next poll.
//
// A process that runs a relay or a worker takes the waker of that, see [Relay.Waker] and [Worker.Waker]. One that only
// records makes its own with [NewWaker], and runs it. All methods are safe for concurrent use.
type Waker struct {
	db      *pgxpool.Pool
	hub     *wakeup.Hub
	log     *slog.Logger
	running atomic.Bool
}

// WakerConfig tunes a [Waker]. The zero value is ready for production.
type WakerConfig struct {
	// Schema holds the tables of outbox. Empty means public.
	Schema string
	// Logger receives WARN for notifications that cannot be sent. Nil means slog.Default().
	Logger *slog.Logger
}

// NewWaker returns a waker for a process that records events in db and runs no relay and no worker. It needs no table
// and no more rights than to connect. It does no I/O; the error names every bad field.
func NewWaker(db *pgxpool.Pool, cfg WakerConfig) (*Waker, error) {
	cfg.Schema = cmp.Or(cfg.Schema, pg.DefaultSchema)
	errs := []error{check.Schema(cfg.Schema)}
	if db == nil {
		errs = append(errs, fmt.Errorf("db %w", ErrNilArgument))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("outbox: waker config: %w", err)
	}
	return newWaker(db, cfg.Schema, short.Logger(cmp.Or(cfg.Logger, slog.Default()))), nil
}

func newWaker(db *pgxpool.Pool, schema string, log *slog.Logger) *Waker {
	return &Waker{db: db, hub: wakeup.Of(db, schema), log: log}
}

// Run sends notifications until ctx is cancelled; then it sends one that is still to be sent, which takes 1 s at
// most, and returns nil. While a relay or a worker runs in this process, Run need not be called. A second call at the
// same time returns [ErrRunning].
//
// It uses a connection of db for a moment for each notification, at most 400 times a second.
func (w *Waker) Run(ctx context.Context) error {
	if !w.running.CompareAndSwap(false, true) {
		return runError("waker", ErrRunning)
	}
	defer w.running.Store(false)
	w.hub.Serve(ctx, w.log)
	return nil
}

// Wake is to be called after the commit of a transaction that has recorded events. It never blocks. It logs one WARN if
// wake-ups have come for 5 s and neither the waker nor a relay or a worker of the schema has run.
func (w *Waker) Wake() {
	w.hub.Wake()
	if w.hub.Unused() {
		w.log.Warn("outbox: the waker does not run, other processes see events at their next poll: call Waker.Run")
	}
}

// InTx runs f in a transaction, commits it, and wakes. If f returns an error or panics, the transaction
// is rolled back. The error is that of f, or PostgreSQL's.
func (w *Waker) InTx(ctx context.Context, f func(tx pgx.Tx) error) error {
	if err := pgx.BeginFunc(ctx, w.db, f); err != nil {
		return err
	}
	w.Wake()
	return nil
}
