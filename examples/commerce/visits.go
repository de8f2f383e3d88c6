package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"

	"golang.org/x/sync/errgroup"
)

const (
	products  = 12
	customers = 40
	// atOnce is how many customers are in the shop at the same time.
	atOnce = 8
)

// welcome lets n customers visit the shop, or fewer if open ends. A visit that has
// begun goes on as long as life.
func (s *shop) welcome(open, life context.Context, n int) error {
	g, life := errgroup.WithContext(life)
	g.SetLimit(atOnce)
	for i := 0; i < n && open.Err() == nil && life.Err() == nil; i++ {
		g.Go(func() error { return s.visit(life) })
	}
	return g.Wait()
}

// visit is what a customer does: look, like, order, and mostly pay.
func (s *shop) visit(ctx context.Context) error {
	user := 1 + rand.Int64N(customers)
	o := draw(user)
	for _, item := range o.Items {
		if err := s.view(ctx, user, item.ProductID); err != nil {
			return fmt.Errorf("view: %w", err)
		}
	}
	if err := s.like(ctx, user, 1+rand.Int64N(products)); err != nil {
		return fmt.Errorf("like: %w", err)
	}
	if err := s.place(ctx, &o); err != nil {
		return fmt.Errorf("place order: %w", err)
	}
	if rand.IntN(10) == 0 {
		return s.decline(ctx, o)
	}
	for range 1 + rand.IntN(2) { // the provider calls once or twice
		if err := s.pay(ctx, o); err != nil {
			return fmt.Errorf("pay order %d: %w", o.ID, err)
		}
	}
	return nil
}

// draw invents an order of one to three products.
func draw(user int64) Order {
	o := Order{UserID: user}
	drawn := rand.Perm(products)[:1+rand.IntN(3)]
	for _, i := range slices.Sorted(slices.Values(drawn)) {
		id := int64(i + 1)
		o.Items = append(o.Items, Item{ProductID: id, Quantity: 1 + rand.Int64N(3), Price: 500 + 250*id})
	}
	return o
}
