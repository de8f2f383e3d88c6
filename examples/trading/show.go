package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/examples/trading/simulator"
	"golang.org/x/sync/errgroup"
)

// scene is what happens in a run: bots trade, processes are killed, and the kill switch is tried.
type scene struct {
	app     *app
	cfg     config
	outside *simulator.Simulator
	others  show.Processes

	kills        int  // how many processes were killed
	whileStopped int  // orders that the exchange was asked for while the kill switch was on
	waiting      int  // commands that waited then
	finished     bool // all that was decided was done before the processes were stopped
}

const (
	strategies   = 12
	backtestBars = 100
)

// scope returns that of a strategy.
func scope(n int) Scope {
	return Scope{
		OwnerID:     fmt.Sprintf("owner-%d", n%4),
		StrategyKey: []string{"momentum", "reversion", "grid"}[n%3],
		Market:      []string{"KRW-BTC", "KRW-ETH", "KRW-XRP", "KRW-SOL"}[n%4],
	}
}

// trade has each strategy decide something now and then, in an order of its own.
func (s *scene) trade(ctx context.Context) error {
	b := bot{s.app.db, s.app.bus, s.cfg.worth}
	g, ctx := errgroup.WithContext(ctx)
	for n := range strategies {
		g.Go(func() error {
			random := rand.New(rand.NewPCG(s.cfg.seed, uint64(n)))
			for id := n; id < s.cfg.orders; id += strategies {
				signal := Signal{ID: int64(id) + 1, Scope: scope(n), Side: []string{"BUY", "SELL"}[random.IntN(2)], Quantity: 1 + random.Int64N(9)}
				if err := b.decide(ctx, signal, randomUUID(random)); err != nil {
					return fmt.Errorf("decide: %w", err)
				}
				mean := strategies * time.Second / time.Duration(s.cfg.rate)
				if !show.Pause(ctx, time.Duration(random.Int64N(2*int64(mean)))) {
					return nil
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// randomUUID is the same for the same seed, so that the exchange treats an order the same way.
func randomUUID(random *rand.Rand) (id uuid.UUID) {
	binary.BigEndian.PutUint64(id[:8], random.Uint64())
	binary.BigEndian.PutUint64(id[8:], random.Uint64())
	return id
}

func (s *scene) backtests(ctx context.Context) error {
	for n := range s.cfg.backtests {
		if err := s.app.backtests().order(ctx, scope(n), backtestBars); err != nil {
			return fmt.Errorf("order a backtest: %w", err)
		}
	}
	return nil
}

// killProcesses kills processes of workers while they work, evenly over the run.
func (s *scene) killProcesses(ctx context.Context) error {
	for n := range s.cfg.kills {
		reached, err := s.awaitOrders(ctx, s.cfg.orders*(n+1)/(s.cfg.kills+2))
		if err != nil || !reached {
			return err
		}
		if err := s.others.Replace(workersName(n%s.cfg.processes), s.cfg.workerArgs()...); err != nil {
			return fmt.Errorf("kill a process: %w", err)
		}
		s.kills++
	}
	return nil
}

const sqlWaiting = `SELECT count(*) FROM order_intent WHERE id NOT IN (SELECT order_intent_id FROM order_attempt)`

// tryKillSwitch stops trading for a while, in the middle of the run. Signals go on meanwhile.
func (s *scene) tryKillSwitch(ctx context.Context) error {
	reached, err := s.awaitOrders(ctx, s.cfg.orders/2)
	if err != nil || !reached {
		return err
	}
	change := func(on bool) error {
		return killSwitch(context.WithoutCancel(ctx), s.app.db, s.app.bus, on, "the switch is tried")
	}
	if err := change(true); err != nil {
		return err
	}
	// Each process looks every two seconds. If there was no order for longer, all of them know.
	for began := time.Now(); s.ordersWithin(ctx, 3*time.Second) > 0 && time.Since(began) < s.cfg.patience; {
	}
	s.whileStopped = s.ordersWithin(ctx, time.Second)
	err = s.app.db.QueryRow(context.WithoutCancel(ctx), sqlWaiting).Scan(&s.waiting)
	return errors.Join(err, change(false))
}

// ordersWithin returns for how many orders the exchange is asked in that time.
func (s *scene) ordersWithin(ctx context.Context, d time.Duration) int {
	before, _ := s.outside.Asked()
	if !show.Pause(ctx, d) {
		return 0 // the run ends
	}
	after, _ := s.outside.Asked()
	return after - before
}

// awaitOrders waits until the exchange was asked for n orders, and reports whether it was.
func (s *scene) awaitOrders(ctx context.Context, n int) (bool, error) {
	return show.Await(ctx, s.cfg.patience, func() (int, bool, error) {
		asked, _ := s.outside.Asked()
		return asked, asked >= n, nil
	})
}

// concluded are the states of an attempt after which its intent gets no other one.
const concluded = `'ACKED', 'REJECTED', 'NOT_PLACED', 'EXPIRED'`

// hasExpired is the condition that the command of intent i was dropped: it is done, and there is no attempt.
const hasExpired = `(NOT EXISTS (SELECT FROM order_attempt WHERE order_intent_id = i.id)
               AND EXISTS (SELECT FROM event_delivery WHERE consumer_group = '` + orderExecutor + `' AND aggregate_id = i.id::text AND status = 'DONE'))`

// sqlProgress counts what is done and what is not.
const sqlProgress = `
SELECT (SELECT count(*) FROM order_attempt WHERE state NOT IN ('PREPARED', 'SENT', 'UNKNOWN'))
     + (SELECT count(*) FROM notification_log)
     + (SELECT count(*) FROM backtest WHERE result IS NOT NULL) AS done,
       (SELECT count(*) FROM order_intent AS i WHERE NOT EXISTS (
            SELECT FROM order_attempt WHERE order_intent_id = i.id AND state IN (` + concluded + `))
          AND NOT ` + hasExpired + `)
     + (SELECT count(*) FROM outbox WHERE event_type IN ('OrderAccepted.v1', 'OrderOverdue.v1')) - (SELECT count(*) FROM notification_log)
     + (SELECT count(*) FROM outbox_delayed)
     + (SELECT count(*) FROM backtest WHERE result IS NULL)
     + (SELECT count(*) FROM event_delivery WHERE status NOT IN ('DONE', 'DEAD')) AS open`

// awaitAll waits until everything that was decided is done, and reports whether it is.
func (s *scene) awaitAll(ctx context.Context) (bool, error) {
	return show.Await(ctx, s.cfg.patience, func() (done int, complete bool, err error) {
		var left int
		err = s.app.db.QueryRow(ctx, sqlProgress).Scan(&done, &left)
		return done, left == 0, err
	})
}
