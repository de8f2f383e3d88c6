package faults

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/twmb/franz-go/pkg/kgo"
)

// marketVar makes this test's program a member of a group of the market: it holds a marketSpec as JSON.
const marketVar = "OUTBOX_FAULTS_MARKET"

// marketSpec says how a member reaches the servers and what it is.
type marketSpec struct {
	Postgres string
	Brokers  []string // nil for a worker
	Group    string
	Release  int // 1 or 2
	Topics   marketTopics
	Number   int    // of the process
	Signs    string // a folder, see the signs
	Log      string // a file
}

// Files in the folder of signs tell handlers what has happened.
const (
	signGone       = "gone-"        // and an action: what its handlers need is away
	signGoneAll    = "gone-all"     // for all actions
	signGoneTenant = "gone-tenant-" // and the number of a tenant
	signInside     = "inside-"      // and a process: it renames the file inside a handler's transaction, and waits there
	signReached    = "reached-"     // the new name
	signReady      = "ready-"       // and a process: it stops cleanly from now on
)

const (
	marketLease   = 3 * time.Second
	marketSession = 4 * time.Second
	marketCall    = 6 * time.Second // HandlerTimeout
	insidePause   = 500 * time.Millisecond

	hangs    = "hangs"         // in a sign: calls do not fail at once
	hangsFor = 3 * time.Second // then they do
)

// marketRetry has all attempts of an event within two seconds. MaxOutage is the default.
func marketRetry() outbox.RetryPolicy {
	return outbox.RetryPolicy{MaxRetries: 3, RetryWait: 200 * time.Millisecond, MaxRetryWait: time.Second}
}

// runMarket is the whole life of a member.
func runMarket(value string) error {
	var s marketSpec
	return runAsChild(marketVar, value, &s, &s.Postgres, s.run)
}

func (s *marketSpec) run(ctx context.Context, db *pgxpool.Pool) error {
	file, err := os.Create(s.Log)
	if err != nil {
		return err
	}
	defer file.Close()
	logger := slog.New(slog.NewTextHandler(file, nil))
	slog.SetDefault(logger)
	events, err := marketEvents(s.Topics, s.Release)
	if err != nil {
		return err
	}
	run, err := s.runner(db, events)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(s.Signs, fmt.Sprint(signReady, s.Number)), nil, 0o600); err != nil {
		return err
	}
	return run(ctx)
}

// runner returns Run of a consumer, or of a worker.
func (s marketSpec) runner(db *pgxpool.Pool, events *outbox.Registry) (func(context.Context) error, error) {
	cfg := outbox.HandlerConfig{
		From: outbox.FromStart, MaxPoll: 20, Retry: marketRetry(), HandlerTimeout: marketCall,
		Topics: []string{s.Topics.Prices}, // the second release also gets what the first one has recorded there
	}
	if s.Brokers == nil {
		w, err := outbox.NewWorker(db, events, s.Group, outbox.WorkerConfig{HandlerConfig: cfg, PollInterval: busPoll, Lease: marketLease}, s.handlers()...)
		if err != nil {
			return nil, err
		}
		return w.Run, nil
	}
	opts := []kgo.Opt{kgo.SeedBrokers(s.Brokers...), kgo.SessionTimeout(marketSession), kgo.HeartbeatInterval(heartbeat)}
	c, err := outbox.NewConsumer(db, opts, events, s.Group, outbox.ConsumerConfig{HandlerConfig: cfg, MaxPollInterval: 30 * time.Second}, s.handlers()...)
	if err != nil {
		return nil, err
	}
	return c.Run, nil
}

// handlers returns the handlers of the release. The second one has an action more for placed orders, and its first
// action also takes parcels.
func (s marketSpec) handlers() []outbox.Handler {
	all := []outbox.Handler{
		handleOne[orderPlaced](s, countedAction),
		handleMany[stockMoved](s, movedAction),
		handleOne[priceSet](s, pricedAction),
		handleOne[auditNoted](s, notedAction),
		handleMany[gatePassed](s, passedAction),
	}
	if s.Release > 1 {
		all = append(all, handleMany[orderPlaced](s, listedAction), handleOne[parcelSent](s, countedAction))
	}
	return all
}

// marketEvent is an event of the market.
type marketEvent interface {
	outbox.DomainEvent
	data() deal
}

func handleOne[E marketEvent](s marketSpec, action string) outbox.Handler {
	return outbox.Handle(action, func(ctx context.Context, tx pgx.Tx, e E, m outbox.Metadata) error {
		return s.handle(ctx, tx, action, e.data(), m)
	})
}

func handleMany[E marketEvent](s marketSpec, action string) outbox.Handler {
	return outbox.HandleBatch(action, func(ctx context.Context, tx pgx.Tx, events []outbox.Received[E]) error {
		for _, e := range events {
			if err := s.handle(ctx, tx, action, e.Event.data(), e.Metadata); err != nil {
				return err
			}
		}
		return nil
	})
}

// sqlMarketEffect is not idempotent. The row of deal_total is locked until the transaction ends, so that effects of a
// key are numbered in the order in which they are committed.
const sqlMarketEffect = `
WITH counted AS (
    INSERT INTO deal_total AS s (consumer_group, action, key, effects, amount) VALUES ($1, $2, $3, 1, $4)
        ON CONFLICT (consumer_group, action, key) DO UPDATE SET effects = s.effects + 1, amount = s.amount + excluded.amount
 RETURNING key
)
INSERT INTO deal_effect (consumer_group, action, key, sequence, amount, event_id, process)
SELECT $1, $2, key, $5, $4, $6::uuid, $7 FROM counted`

var (
	errBad  = errors.New("this event is bad for ever")
	errGone = errors.New("what the handler needs is away")
)

// handle has an effect, and then fails if the event is bad or what its handler needs is away.
func (s marketSpec) handle(ctx context.Context, tx pgx.Tx, action string, d deal, m outbox.Metadata) error {
	if _, err := tx.Exec(ctx, sqlMarketEffect, s.Group, action, d.Key, d.Amount, d.Sequence, m.ID, s.Number); err != nil {
		return err
	}
	switch d.Bad {
	case badAtOnce:
		return outbox.Permanent(errBad)
	case badAlways:
		return errBad
	}
	if os.Rename(s.sign(signInside, s.Number), s.sign(signReached, s.Number)) == nil {
		select {
		case <-time.After(insidePause):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	switch {
	case s.isGone(ctx, s.sign(signGoneTenant, d.Tenant)):
		return outbox.Unavailable(errGone)
	case s.isGone(ctx, s.sign(signGoneAll)), s.isGone(ctx, s.sign(signGone, action)):
		return errGone
	}
	return nil
}

// sign returns the name of a file.
func (s marketSpec) sign(name ...any) string { return filepath.Join(s.Signs, fmt.Sprint(name...)) }

// isGone reports whether a sign says that something is away. If the sign says that it hangs, the answer takes as long
// as a client waits for it, also when the outage ends meanwhile.
func (s marketSpec) isGone(ctx context.Context, name string) bool {
	how, err := os.ReadFile(name)
	if err != nil {
		return false
	}
	if string(how) == hangs {
		select {
		case <-time.After(hangsFor):
		case <-ctx.Done():
		}
	}
	return true
}
