package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox/examples/internal/show"
)

// atOnce is how many customers there are at a time.
const atOnce = 8

// reasonOfCustomer is why a customer cancels.
const reasonOfCustomer = "the customer has changed their mind"

// errand is what a customer has in mind. The seed and its number say it, so it is the same in every process.
type errand struct {
	NewOrder
	cancels bool
	after   time.Duration // at once, or when the order may be completed already
}

func newErrand(cfg config, source string, n int) errand {
	random := rand.New(rand.NewPCG(cfg.seed, uint64(n)))
	e := errand{NewOrder: NewOrder{
		ID:         uuid.NewSHA1(uuid.NameSpaceURL, fmt.Appendf(nil, "%s/order/%d", source, n)),
		CustomerID: fmt.Sprintf("customer-%d", 1+random.IntN(50)),
	}}
	for _, product := range random.Perm(cfg.products)[:1+random.IntN(min(3, cfg.products))] {
		e.Items = append(e.Items, Item{productID(product), 1 + random.Int64N(3), int64(1+product) * 1_50})
	}
	e.cancels, e.after = random.IntN(6) == 0, time.Duration(random.IntN(2))*100*time.Millisecond
	return e
}

func productID(n int) string { return fmt.Sprintf("product-%d", n+1) }

// stockFor returns how much of each product is there: a share of what customers will ask for, so that some get nothing.
func stockFor(cfg config, source string) map[string]int64 {
	stock := map[string]int64{}
	for n := range cfg.products {
		stock[productID(n)] = 0
	}
	for n := range cfg.orders {
		for _, item := range newErrand(cfg, source, n).Items {
			stock[item.ProductID] += item.Quantity
		}
	}
	for product, n := range stock {
		stock[product] = n * int64(cfg.stock) / 100
	}
	return stock
}

// shop is what a customer does, and after them the next one.
func (a *app) shop(ctx context.Context, s orders, cfg config, first int) error {
	for n := first; n < cfg.orders; n += atOnce {
		due := time.UnixMilli(cfg.began).Add(time.Duration(n/atOnce*atOnce) * time.Second / time.Duration(cfg.rate))
		if !show.Pause(ctx, time.Until(due)) {
			return nil // the shop closes
		}
		if err := place(ctx, s, newErrand(cfg, a.source, n)); err != nil && ctx.Err() == nil {
			return fmt.Errorf("customer %d: %w", n, err)
		}
	}
	return nil
}

// place places an order, and cancels it if the customer wants that. It may be too late.
func place(ctx context.Context, s orders, e errand) error {
	if err := s.createOrder(ctx, e.NewOrder); err != nil || !e.cancels || !show.Pause(ctx, e.after) {
		return err
	}
	err := s.cancelOrder(ctx, e.ID, reasonOfCustomer)
	if errors.Is(err, errEnded) {
		return nil
	}
	return err
}
