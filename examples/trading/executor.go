package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
)

// executor is the group order-executor: it places orders. It calls the exchange outside of any
// transaction, and before and after that it writes down its state. So the next attempt, in another
// process and after a crash, knows what may be done.
type executor struct {
	db       *pgxpool.Pool
	bus      EventBus
	exchange exchange
	wake     func() // called after each commit of events
}

func (x executor) handlers() []outbox.Handler {
	return []outbox.Handler{outbox.HandleNoTx("ORDER_PLACED", x.createOrderAttempt)}
}

const (
	orderValid    = 1500 * time.Millisecond // for which the exchange may take an order, but not beyond the deadline of the intent
	orderOverdue  = time.Second             // after which the owner is told that the exchange has not answered
	reconcileWait = 200 * time.Millisecond  // between two questions for an order
	noteTimeout   = 5 * time.Second         // for writing down an answer

	commandRetries = 10
)

var (
	errThrottled = errors.New("the exchange wants fewer orders")
	errUnknown   = errors.New("the exchange may have the order")
	errRejected  = errors.New("the exchange does not want the order")
	errSending   = errors.New("another process is sending the attempt")
)

// unknown returns an error after which the exchange may have the order. The command comes again
// soon, and as often as needed.
func unknown(why error) error {
	return outbox.RetryAfter(fmt.Errorf("%w: %w", errUnknown, why), reconcileWait)
}

// retries says how often the command is tried again. Throttling passes, or the deadline does, and what may be at the
// exchange is asked for until that is known, however long the exchange is down. All attempts count
// together, so after many of these another error makes the command DEAD at once: what goes wrong
// while the exchange may have the order is unknown, too.
func retries(err error) int {
	if errors.Is(err, errThrottled) || errors.Is(err, errUnknown) {
		return math.MaxInt
	}
	return commandRetries
}

// createOrderAttempt places an order, or finds out what became of it. The command stays open
// until that is known, so later orders of the strategy in this market wait behind it.
func (x executor) createOrderAttempt(ctx context.Context, c CreateOrderAttempt, _ outbox.Metadata) error {
	a, err := x.prepare(ctx, c.OrderIntent)
	if err != nil {
		return err
	}
	switch a.State {
	case Prepared:
		return x.place(ctx, c.OrderIntent, a)
	case Sent, Unknown: // SENT is what a process leaves that ended before the answer came
		return x.reconcile(ctx, c.OrderIntent, a)
	case Rejected:
		return outbox.Permanent(fmt.Errorf("%w: %s", errRejected, a.Reason))
	default: // the command has come again: nothing is left to do
		return nil
	}
}

const (
	sqlLastAttempt = `
SELECT attempt_no, identifier, state, coalesce(valid_until, 'epoch'), coalesce(reason, '')
  FROM order_attempt
 WHERE order_intent_id = $1
 ORDER BY attempt_no DESC
 LIMIT 1`

	sqlPrepare = `INSERT INTO order_attempt (order_intent_id, attempt_no, identifier, state) VALUES ($1, $2, $3, $4)`
)

// prepare returns the attempt that the command is at. If two processes prepare the same attempt at
// the same time, one of them gets an error and loads it again.
func (x executor) prepare(ctx context.Context, i OrderIntent) (Attempt, error) {
	var last Attempt
	err := x.db.QueryRow(ctx, sqlLastAttempt, i.ID).Scan(&last.No, &last.Identifier, &last.State, &last.ValidUntil, &last.Reason)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return last, unknown(err)
	}
	a, isNew := i.Next(last)
	if !isNew {
		return a, nil
	}
	_, err = x.db.Exec(ctx, sqlPrepare, i.ID, a.No, a.Identifier, a.State)
	return a, err
}

// sqlSend lets one of those through that have prepared the same attempt.
const sqlSend = `UPDATE order_attempt SET state = $3, valid_until = $4, updated_at = now() WHERE identifier = $1 AND state = ANY($2)`

// place orders. Once SENT is committed, this attempt is never sent again. The event OrderOverdue is committed with it:
// unless the outcome is known by then, it comes, whatever happens to this process. A command that has begun in time
// does not expire by itself, so behind the deadline of the intent the attempt is ended here.
func (x executor) place(ctx context.Context, i OrderIntent, a Attempt) error {
	at := now()
	var ok bool
	if a.ValidUntil, ok = i.ValidUntil(at.At); !ok {
		return x.expire(ctx, a)
	}
	err := pgx.BeginFunc(ctx, x.db, func(tx pgx.Tx) error {
		sent, err := tx.Exec(ctx, sqlSend, a.Identifier, before[Sent], Sent, a.ValidUntil)
		if err != nil {
			return err
		}
		if sent.RowsAffected() == 0 {
			return unknown(errSending)
		}
		overdue := OrderOverdue{i, a.Identifier, happened{at.At.Add(orderOverdue)}}
		return x.bus.Record(ctx, tx, outbox.With(overdue, outbox.EventOptions{ID: a.overdueID(), NotBefore: overdue.At}))
	})
	if err != nil {
		return err
	}
	return x.conclude(ctx, i, a, a.Trust(x.exchange.place(ctx, i, a), time.Now()))
}

// expire ends an attempt that was not sent, unless another process has sent it meanwhile.
func (x executor) expire(ctx context.Context, a Attempt) error {
	ended, err := x.db.Exec(ctx, sqlConclude, a.Identifier, before[Expired], Expired, "", "")
	if err == nil && ended.RowsAffected() == 0 {
		return unknown(errSending)
	}
	return err
}

// reconcile asks the exchange what became of an order.
func (x executor) reconcile(ctx context.Context, i OrderIntent, a Attempt) error {
	return x.conclude(ctx, i, a, a.Trust(x.exchange.find(ctx, a), time.Now()))
}

const (
	// sqlConclude changes nothing if another process has learned more.
	sqlConclude = `
UPDATE order_attempt SET state = $3, exchange_order_id = nullif($4, ''), reason = nullif($5, ''), updated_at = now()
 WHERE identifier = $1 AND state = ANY($2)`

	sqlInTime = `UPDATE order_attempt SET answered_in_time = true WHERE identifier = $1`
)

// conclude writes down what is known of an attempt, and records what follows from it in the
// same transaction. Its error says when and whether the command is to come again.
func (x executor) conclude(ctx context.Context, i OrderIntent, a Attempt, got Answer) error {
	// The time of the handler may be up, or the process may be about to end. What the
	// exchange has said is written down all the same.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), noteTimeout)
	defer cancel()
	err := pgx.BeginFunc(ctx, x.db, func(tx pgx.Tx) error {
		changed, err := tx.Exec(ctx, sqlConclude, a.Identifier, before[got.State], got.State, got.OrderID, got.Reason)
		if err != nil || changed.RowsAffected() == 0 || got.State == Unknown {
			return err
		}
		if inTime, err := x.bus.Cancel(ctx, tx, a.overdueID()); err != nil {
			return err
		} else if inTime {
			if _, err := tx.Exec(ctx, sqlInTime, a.Identifier); err != nil {
				return err
			}
		}
		if got.State != Acked {
			return nil
		}
		return x.bus.Record(ctx, tx, OrderAccepted{i, a.Identifier, got.OrderID, now()})
	})
	if err != nil {
		return unknown(err) // the attempt is SENT or UNKNOWN, so the exchange will be asked
	}
	x.wake()
	switch got.State {
	case Throttled:
		return outbox.RetryAfter(errThrottled, got.Wait)
	case Unknown:
		return unknown(errors.New(got.Reason))
	case Rejected:
		return outbox.Permanent(fmt.Errorf("%w: %s", errRejected, got.Reason))
	default:
		return nil
	}
}
