package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/outboxhttp"
	"golang.org/x/sync/errgroup"
)

// What a process of the service prints, a line each. The process that has started it reads it.
const (
	saidAcknowledged = "acknowledged" // order and version of a change that is committed
	saidConflict     = "conflict"     // another command was faster
	saidClosed       = "closed"       // the last customer has left
)

const maxRate = 500

// service is a process of the order service, with its customers.
type service struct {
	orders *Orders
	say    func(line ...any)
}

// serve runs relay and projection, and lets customers in until the first line of the standard
// input. It ends with its standard input.
func serve(ctx context.Context, cfg config, stdin io.Reader, stdout io.Writer) error {
	a, err := open(ctx, cfg)
	if err != nil {
		return err
	}
	defer a.db.Close()
	runners, waker, err := a.background(cfg.worker)
	if err != nil {
		return err
	}
	store, err := a.store(waker)
	if err != nil {
		return err
	}
	s := &service{say: show.SayTo(stdout)}
	s.orders = &Orders{store, func() { s.say(saidConflict) }}

	ctx, stop := context.WithCancel(ctx)
	defer stop()
	shop, closeShop := context.WithCancel(ctx)
	go func() {
		defer stop()
		lines := bufio.NewReader(stdin)
		_, _ = lines.ReadString('\n')
		closeShop()
		_, _ = io.Copy(io.Discard, lines)
	}()
	g, ctx := errgroup.WithContext(ctx)
	for _, r := range runners {
		g.Go(func() error { return r(ctx) })
	}
	g.Go(func() error {
		defer s.say(saidClosed)
		return s.welcome(shop, ctx, cfg.rate)
	})
	return g.Wait()
}

// welcome lets a number of customers in each second, until open ends. Who is in, finishes.
func (s *service) welcome(open, life context.Context, rate int) error {
	g, life := errgroup.WithContext(life)
	ticks := time.NewTicker(time.Second / time.Duration(rate))
	defer ticks.Stop()
	for {
		select {
		case <-open.Done():
			return g.Wait()
		case <-life.Done():
			return g.Wait()
		case <-ticks.C:
			g.Go(func() error { return s.customer(life) })
		}
	}
}

// customer places an order, and what follows is up to chance. All of it has one correlation
// id; each command has a trace of its own.
func (s *service) customer(ctx context.Context) error {
	ctx = outbox.WithCorrelationID(ctx, outboxhttp.NewTraceID())
	n := NewOrder{UserID: 1 + rand.Int64N(1000)}
	for product := range 1 + rand.Int64N(3) {
		n.Items = append(n.Items, Item{ProductID: product + 1, Quantity: 1 + rand.Int64N(3), Price: 500})
	}
	if rand.IntN(3) == 0 {
		n.DiscountAmount, n.UsedCouponID = 100, new(rand.Int64N(100))
	}
	o, err := s.orders.CreateOrder(traced(ctx), n)
	if err = s.acknowledge(o, err); err != nil {
		return fmt.Errorf("create order: %w", err)
	}
	pay := func() error { return s.acknowledge(s.orders.ConfirmOrder(traced(ctx), o.ID, new(rand.Int64()))) }
	cancel := func() error {
		return s.acknowledge(s.orders.CancelOrder(traced(ctx), o.ID, "found it elsewhere", "customer"))
	}
	switch rand.IntN(10) {
	case 0:
		return s.acknowledge(s.orders.FailOrder(traced(ctx), o.ID, "card declined"))
	case 1, 2, 3: // paid and cancelled at the same time: one is first, and the other decides again
		var g errgroup.Group
		g.Go(pay)
		g.Go(cancel)
		return g.Wait()
	default:
		if err := pay(); err != nil {
			return err
		}
		return s.acknowledge(s.orders.CompleteOrder(traced(ctx), o.ID))
	}
}

// acknowledge is what the service answers: the order was changed, or it cannot be.
func (s *service) acknowledge(o *Order, err error) error {
	if errors.Is(err, ErrTransition) {
		return nil // it was cancelled before it was paid, for example
	}
	if err == nil {
		s.say(saidAcknowledged, o.ID, o.Version)
	}
	return err
}

// traced begins a trace, as outboxhttp.Trace does for a request.
func traced(ctx context.Context) context.Context {
	return outbox.WithTraceID(ctx, outboxhttp.NewTraceID())
}
