package faults

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
)

// busVar makes this test's program a process with a worker of a group: it holds a busSpec as
// JSON.
const busVar = "OUTBOX_FAULTS_BUS"

// busSpec says how a worker reaches PostgreSQL and what its handlers do.
type busSpec struct {
	Postgres string
	Group    string
	// Signs is a folder. While it has a file failing, handlers fail the first attempt of some
	// events; handlers of the group that it names poisoned end their process at some events.
	Signs string
	// Ready is a file that is made before the worker runs.
	Ready string
}

const (
	busLease    = 3 * time.Second
	busPoll     = 250 * time.Millisecond
	busAttempts = 5
)

// runBus is the whole life of a process with a worker.
func runBus(value string) error {
	var s busSpec
	return runAsChild(busVar, value, &s, &s.Postgres, s.run)
}

func (s *busSpec) run(ctx context.Context, db *pgxpool.Pool) error {
	events, err := busEvents()
	if err != nil {
		return err
	}
	h := busHandlers{busSpec: *s, db: db}
	worker, err := outbox.NewWorker(db, events, s.Group, s.config(),
		outbox.Handle("SALE_COUNTED", func(ctx context.Context, tx pgx.Tx, e itemSold, m outbox.Metadata) error {
			return h.count(ctx, tx, "SALE_COUNTED", item(e), m, time.Now())
		}),
		outbox.HandleBatch("RETURN_COUNTED", func(ctx context.Context, tx pgx.Tx, events []outbox.Received[itemReturned]) error {
			began := time.Now()
			for _, e := range events {
				if err := h.count(ctx, tx, "RETURN_COUNTED", item(e.Event), e.Metadata, began); err != nil {
					return err
				}
			}
			return nil
		}),
		outbox.HandleNoTx("SALE_SEEN", func(ctx context.Context, e itemSold, m outbox.Metadata) error {
			return h.see(ctx, "SALE_SEEN", item(e), m)
		}),
		outbox.HandleNoTx("RETURN_SEEN", func(ctx context.Context, e itemReturned, m outbox.Metadata) error {
			return h.see(ctx, "RETURN_SEEN", item(e), m)
		}),
	)
	if err != nil {
		return err
	}
	if err := os.WriteFile(s.Ready, nil, 0o600); err != nil {
		return err
	}
	return worker.Run(ctx)
}

// config has short times. Batches are small, so that several of a worker are under way.
func (s busSpec) config() outbox.WorkerConfig {
	return outbox.WorkerConfig{
		HandlerConfig: outbox.HandlerConfig{
			From: outbox.FromStart, MaxPoll: 20,
			Retry: outbox.RetryPolicy{MaxRetries: busAttempts - 1, RetryWait: 20 * time.Millisecond, MaxRetryWait: 200 * time.Millisecond},
		},
		PollInterval: busPoll, Lease: busLease,
	}
}

type busHandlers struct {
	busSpec
	db *pgxpool.Pool
}

// The effects are not idempotent: what is handled twice is there twice. Shelves have items
// of many keys, so that transactions get into deadlocks.
const sqlCountItem = `
WITH effect AS (INSERT INTO effect (consumer_group, action, item, version, began) VALUES ($1, $2, $3, $4, $7))
INSERT INTO shelf AS s (consumer_group, shelf, changes, quantity) VALUES ($1, $5, 1, $6)
    ON CONFLICT (consumer_group, shelf) DO UPDATE SET changes = s.changes + 1, quantity = s.quantity + excluded.quantity`

// count is a handler with a transaction, which began to work at a time.
func (h busHandlers) count(ctx context.Context, tx pgx.Tx, action string, e item, m outbox.Metadata, began time.Time) error {
	if e.Poison && h.sign(signPoisoned+h.Group) {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL) // it cannot fail
		select {}
	}
	if err := e.take(ctx); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, sqlCountItem, h.Group, action, e.Item, e.Version, e.Item%shelves, e.Quantity, began)
	return errors.Join(err, h.fail(e, m))
}

const sqlSeeItem = `
INSERT INTO seen AS s (consumer_group, action, item, version, calls, began, attempt) VALUES ($1, $2, $3, $4, 1, $5, $6)
    ON CONFLICT (consumer_group, action, item, version) DO UPDATE SET calls = s.calls + 1`

// see is a handler without a transaction.
func (h busHandlers) see(ctx context.Context, action string, e item, m outbox.Metadata) error {
	began := time.Now()
	if err := e.take(ctx); err != nil {
		return err
	}
	if err := h.fail(e, m); err != nil {
		return err
	}
	var b pgx.Batch
	b.Queue(`SELECT set_config('synchronous_commit', 'on', true)`) // effects that a crash removes would not be written again
	b.Queue(sqlSeeItem, h.Group, action, e.Item, e.Version, began, m.Attempt)
	return h.db.SendBatch(ctx, &b).Close()
}

// take takes as long as the event says.
func (e item) take(ctx context.Context) error {
	select {
	case <-time.After(e.Pause):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

const (
	signFailing  = "failing-"  // and the group
	signPoisoned = "poisoned-" // and the group
)

func (h busHandlers) sign(name string) bool {
	_, err := os.Stat(filepath.Join(h.Signs, name))
	return err == nil
}

var errFailing = errors.New("failing for a while")

func (h busHandlers) fail(e item, m outbox.Metadata) error {
	if m.Attempt == 1 && e.Version%3 == 0 && h.sign(signFailing+h.Group) {
		return errFailing
	}
	return nil
}
