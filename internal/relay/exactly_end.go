package relay

import (
	"context"
	"errors"
	"fmt"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/pg"
)

// EndExactlyOnce turns the mode off. It takes the lease, or returns [lease.ErrHeld], and sends nothing. Reading in
// Kafka how far the relay has come, it loses and repeats nothing, and ends nothing while another transaction has locked
// a row of an event that was sent. Otherwise it continues from what PostgreSQL knows
// to be confirmed, and what was sent since then is sent again.
func (r *Relay) EndExactlyOnce(ctx context.Context, readKafka bool) (err error) {
	if !r.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer r.running.Store(false)
	l, err := r.acquire(ctx)
	if err != nil {
		return fmt.Errorf("take the lease: %w", err)
	}
	defer func() { r.release(ctx, l, err) }()
	if !readKafka {
		return r.cursors.EndUnread(ctx, l)
	}
	held, lose := context.WithCancelCause(ctx)
	defer lose(nil)
	leads := lease.Leadership{Lease: l, Held: held, Lose: lose, StatementTimeout: r.rules.Lease}
	x := r.newExactly(leads, ProducerConfig{}, DeliveryParts{})
	defer x.Close()
	cfg, err := x.identity(ctx)
	if err != nil {
		return err
	}
	if err := x.tryStart(cfg, false); err != nil {
		return err
	}
	p, err := x.Load(ctx, l)
	if errors.Is(err, cursor.ErrOtherCluster) {
		return fmt.Errorf("%w: run the relay with the mode once more, which moves the cursor here", err)
	}
	if err != nil {
		return err
	}
	if len(x.locked) > 0 { // without the mode, retriers would send these events again
		return &pg.LockError{Err: fmt.Errorf("the events of the rows %v of outbox_failed were sent, and the rows cannot be removed", x.again)}
	}
	return r.cursors.End(ctx, l, p)
}
