package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox/outboxhttp"
	"golang.org/x/sync/errgroup"
)

const (
	products  = 12
	customers = 40
	// room is how many customers the shop has room for. Who finds it full goes away.
	room = 64
)

// street is where customers come from. They know the shop by its address alone.
type street struct {
	shop   string // URL
	client *http.Client
	visits
}

// visits is what the customers remember.
type visits struct {
	mu      sync.Mutex
	begun   int
	cutOff  int     // visits that found the shop full, or ended when it did not answer
	views   int     // that were answered
	ordered []int64 // orders that were answered, and those that were paid
	paid    []int64
}

func newStreet(shop string) *street {
	return &street{shop: shop, client: &http.Client{
		Timeout:   10 * time.Second,
		Transport: &http.Transport{MaxIdleConnsPerHost: customers},
	}}
}

// send lets a number of customers per second visit the shop, until open ends. A visit that has
// begun goes on as long as life.
func (s *street) send(open, life context.Context, rate int) error {
	defer s.client.CloseIdleConnections()
	g, life := errgroup.WithContext(life)
	g.SetLimit(room)
	ticks := time.NewTicker(time.Second / time.Duration(rate))
	defer ticks.Stop()
	for {
		select {
		case <-open.Done():
			return g.Wait()
		case <-life.Done():
			return g.Wait()
		case <-ticks.C:
			if !g.TryGo(func() error { return s.count(s.visit(life)) }) {
				s.note(func() { s.begun, s.cutOff = s.begun+1, s.cutOff+1 })
			}
		}
	}
}

var errClosed = errors.New("the shop does not answer")

// count takes in how a visit ended. That the shop was killed is no news; anything else is.
func (s *street) count(err error) error {
	s.note(func() {
		s.begun++
		if errors.Is(err, errClosed) {
			s.cutOff++
			err = nil
		}
	})
	return err
}

func (s *street) note(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// visit is what a customer does: look, like, order, and mostly pay. All of it has one trace id.
func (s *street) visit(ctx context.Context) error {
	user := 1 + rand.Int64N(customers)
	trace := "visit-" + outboxhttp.NewTraceID()
	order := draw(user)
	for _, item := range order.Items {
		if err := s.call(ctx, http.MethodGet, fmt.Sprintf("/products/%d?user=%d", item.ProductID, user), trace, nil, nil); err != nil {
			return fmt.Errorf("view: %w", err)
		}
		s.note(func() { s.views++ })
	}
	like, liked := map[string]int64{"userId": user}, fmt.Sprintf("/products/%d/likes", 1+rand.Int64N(products))
	for range 1 + rand.IntN(4)/3 { // one of four clicks again, and likes it no longer
		if err := s.call(ctx, http.MethodPost, liked, trace, like, nil); err != nil {
			return fmt.Errorf("like: %w", err)
		}
	}
	placed, err := s.order(ctx, trace, order)
	if err != nil {
		return fmt.Errorf("place order: %w", err)
	}
	s.note(func() { s.ordered = append(s.ordered, placed.OrderID) })
	path := fmt.Sprintf("/orders/%d/", placed.OrderID)
	if rand.IntN(10) == 0 {
		return s.call(ctx, http.MethodPost, path+"decline", trace, nil, nil)
	}
	for n := range 1 + rand.IntN(2) { // the provider calls once or twice
		if err := s.call(ctx, http.MethodPost, path+"payment", trace, nil, nil); err != nil {
			return fmt.Errorf("pay order %d: %w", placed.OrderID, err)
		}
		if n == 0 {
			s.note(func() { s.paid = append(s.paid, placed.OrderID) })
		}
	}
	return nil
}

// order places an order. One of four customers clicks again, and orders no more by that.
func (s *street) order(ctx context.Context, trace string, order orderRequest) (placed orderAnswer, err error) {
	if err = s.callWithKey(ctx, trace, http.MethodPost, "/orders", trace, order, &placed); err != nil || rand.IntN(4) > 0 {
		return placed, err
	}
	var again orderAnswer
	if err = s.callWithKey(ctx, trace, http.MethodPost, "/orders", trace, order, &again); err == nil && again != placed {
		err = fmt.Errorf("the order was placed as %v, and again as %v", placed, again)
	}
	return placed, err
}

// draw invents an order of one to three products.
func draw(user int64) orderRequest {
	o := orderRequest{UserID: user}
	drawn := rand.Perm(products)[:1+rand.IntN(3)]
	for _, i := range slices.Sorted(slices.Values(drawn)) {
		o.Items = append(o.Items, orderItem{ProductID: int64(i + 1), Quantity: 1 + rand.Int64N(3)})
	}
	return o
}

// call sends a request and reads the answer, which has the trace id of the request.
func (s *street) call(ctx context.Context, method, path, trace string, body, answer any) error {
	return s.callWithKey(ctx, "", method, path, trace, body, answer)
}

// callWithKey is call with an Idempotency-Key, or without one if it is empty.
func (s *street) callWithKey(ctx context.Context, key, method, path, trace string, body, answer any) error {
	var encoded bytes.Buffer
	if body != nil {
		if err := json.NewEncoder(&encoded).Encode(body); err != nil {
			return err
		}
	}
	r, err := http.NewRequestWithContext(ctx, method, s.shop+path, &encoded)
	if err != nil {
		return err
	}
	r.Header.Set(outboxhttp.TraceHeader, trace)
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	response, err := s.client.Do(r)
	if err != nil {
		return fmt.Errorf("%w: %w", errClosed, err)
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return fmt.Errorf("%w: %w", errClosed, err)
	}
	if response.StatusCode >= http.StatusMultipleChoices {
		return fmt.Errorf("%s %s: %s: %.200s", method, path, response.Status, text)
	}
	if got := response.Header.Get(outboxhttp.TraceHeader); got != trace {
		return fmt.Errorf("%s %s: trace id %q came back as %q", method, path, trace, got)
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(text, answer)
}
