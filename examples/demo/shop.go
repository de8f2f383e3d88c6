package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"golang.org/x/sync/errgroup"
)

// products is few enough that customers meet: events of one product come from
// many transactions, and their order is worth checking.
const products = 40

// sqlShop makes the shop's own tables. The journal is what the demo believes in
// the end: its lines are written by the transactions that record the events, and
// only the lines of committed ones are there.
const sqlShop = `
CREATE TABLE orders (
    id         bigserial PRIMARY KEY,
    user_id    bigint NOT NULL,
    product_id bigint NOT NULL,
    amount     bigint NOT NULL
);
CREATE TABLE products (
    id    bigint PRIMARY KEY,
    likes bigint NOT NULL DEFAULT 0,
    views bigint NOT NULL DEFAULT 0
);
CREATE TABLE journal (
    line       bigserial PRIMARY KEY,
    order_id   bigint NOT NULL,
    event_type text   NOT NULL,
    key        text   NOT NULL,
    UNIQUE (order_id, event_type)
)`

const sqlProducts = `INSERT INTO products (id) SELECT generate_series(0, $1::bigint)`

// shop sells. It is safe for concurrent use.
type shop struct {
	db    *pgxpool.Pool
	rec   *outbox.Recorder
	runID string
	wake  func() // called after each commit

	mu        sync.Mutex
	commits   map[int64]time.Time // when Commit had returned, by order; paced orders only
	declined  int
	took      time.Duration // from the first order to the last
	heldOpen  time.Duration
	wantsRate int
}

// newShop makes the tables of a shop in the run's schema, which must exist.
func newShop(ctx context.Context, db *pgxpool.Pool, events *outbox.Registry, runID string, wake func()) (*shop, error) {
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{Schema: runID})
	if err != nil {
		return nil, err
	}
	if _, err := db.Exec(ctx, sqlShop); err != nil {
		return nil, fmt.Errorf("make tables: %w", err)
	}
	if _, err := db.Exec(ctx, sqlProducts, products); err != nil {
		return nil, fmt.Errorf("fill shelves: %w", err)
	}
	return &shop{db: db, rec: rec, runID: runID, wake: wake, commits: map[int64]time.Time{}}, nil
}

// sell lets customers order until all orders are placed or ctx ends. An order
// that has begun is finished in either case.
func (s *shop) sell(ctx context.Context, cfg config, out *console) error {
	s.wantsRate = cfg.rate
	finish := context.WithoutCancel(ctx)
	// One transaction writes now and commits when everybody else is done. A relay
	// that waits for it would deliver nothing until then.
	slow, err := s.db.Begin(finish)
	if err != nil {
		return err
	}
	defer slow.Rollback(finish) //nolint:errcheck // does nothing after Commit
	opened := time.Now()
	held := order{user: 1, product: 0, amount: 99_00, paid: true, viewed: true}
	if err := s.place(finish, slow, &held); err != nil {
		return err
	}
	out.note("order %d is recorded and its transaction stays open until the shop closes", held.id)

	if err := s.sellToAll(ctx, cfg); err != nil {
		return err
	}
	s.took = time.Since(opened)
	if err := slow.Commit(finish); err != nil {
		return fmt.Errorf("commit order %d: %w", held.id, err)
	}
	s.heldOpen = time.Since(opened)
	s.wake()
	out.note("the shop is closed; order %d commits after %.1f s", held.id, s.heldOpen.Seconds())
	return nil
}

// sellToAll issues tickets at the wanted rate and lets every shopper place one order for each
// ticket they get.
func (s *shop) sellToAll(ctx context.Context, cfg config) error {
	g, ctx := errgroup.WithContext(ctx)
	tickets := make(chan struct{})
	g.Go(func() error {
		defer close(tickets)
		handOut(ctx, tickets, cfg.orders-1, cfg.rate)
		return nil
	})
	for range cfg.shoppers {
		g.Go(func() error {
			for range tickets {
				if err := s.order(context.WithoutCancel(ctx), draw()); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// handOut sends n tickets, each at its time: who was late does not make the next
// one later.
func handOut(ctx context.Context, tickets chan<- struct{}, n, rate int) {
	start := time.Now()
	for i := range n {
		if rate > 0 {
			time.Sleep(time.Until(start.Add(time.Duration(i) * time.Second / time.Duration(rate))))
		}
		select {
		case tickets <- struct{}{}:
		case <-ctx.Done():
			return
		}
	}
}

// order is what a customer wants.
type order struct {
	id                    int64 // 0 until it is placed
	user, product, amount int64
	paid, liked, viewed   bool
	declined              bool // the card will be, after all is written
}

// draw invents an order with one to three events.
func draw() order {
	o := order{
		user:     1 + rand.Int64N(1000),
		product:  1 + rand.Int64N(products),
		amount:   5_00 + rand.Int64N(200_00),
		paid:     rand.IntN(10) < 6,
		declined: rand.IntN(20) == 0,
	}
	switch rand.IntN(4) {
	case 0:
		o.liked = true
	case 1:
		o.viewed = true
	}
	return o
}

var errDeclined = errors.New("card declined")

// order places an order in a transaction and tells the relay when it is there.
func (s *shop) order(ctx context.Context, o order) error {
	err := pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
		if err := s.place(ctx, tx, &o); err != nil {
			return err
		}
		if o.declined { // order, journal and events have never been there
			return errDeclined
		}
		return nil
	})
	now := time.Now()
	if err != nil && !errors.Is(err, errDeclined) {
		return fmt.Errorf("order %d: %w", o.id, err)
	}
	s.note(o, now)
	if !o.declined {
		s.wake()
	}
	return nil
}

// note remembers what the database cannot know: when, and what was not to be.
func (s *shop) note(o order, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o.declined {
		s.declined++
	} else if s.wantsRate > 0 {
		s.commits[o.id] = now
	}
}

const (
	sqlOrder = `INSERT INTO orders (user_id, product_id, amount) VALUES ($1, $2, $3) RETURNING id`

	// The row lock makes the transactions that touch one product go one after the
	// other; without one there would be no order to keep.
	sqlInterest = `UPDATE products SET likes = likes + $2::int, views = views + $3::int WHERE id = $1`

	sqlJournal = `INSERT INTO journal (order_id, event_type, key) SELECT $1::bigint, e.* FROM unnest($2::text[], $3::text[]) AS e`
)

// place writes an order, its lines of the journal and its events in tx.
func (s *shop) place(ctx context.Context, tx pgx.Tx, o *order) error {
	if err := tx.QueryRow(ctx, sqlOrder, o.user, o.product, o.amount).Scan(&o.id); err != nil {
		return err
	}
	if o.liked || o.viewed {
		if _, err := tx.Exec(ctx, sqlInterest, o.product, count(o.liked), count(o.viewed)); err != nil {
			return err
		}
	}
	events, types, keys := o.events(time.Now())
	if _, err := tx.Exec(ctx, sqlJournal, o.id, types, keys); err != nil {
		return err
	}
	// Other runs may use the topics as well. The correlation id tells the reader
	// which run and which order an event belongs to.
	return s.rec.Record(outbox.WithCorrelationID(ctx, correlationID(s.runID, o.id)), tx, events...)
}

// events returns what happens when o is placed, and for the journal the types
// and keys of the events, in their order.
func (o *order) events(at time.Time) (events []outbox.DomainEvent, types, keys []string) {
	when := happened{at}
	add := func(eventType string, key int64, e outbox.DomainEvent) {
		events, types, keys = append(events, e), append(types, eventType), append(keys, number(key))
	}
	add(orderCreated, o.id, OrderCreatedEventV1{OrderID: o.id, UserID: o.user, TotalAmount: o.amount, happened: when})
	if o.paid { // each order has one payment, so they share their number
		add(paymentPaid, o.id, PaymentPaidEventV1{PaymentID: o.id, OrderID: o.id, Amount: o.amount, happened: when})
	}
	if o.liked {
		add(likeCreated, o.product, LikeCreatedEventV1{UserID: o.user, ProductID: o.product, happened: when})
	}
	if o.viewed {
		add(productViewed, o.product, ProductViewedEventV1{ProductID: o.product, UserID: o.user, happened: when})
	}
	return events, types, keys
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

const sqlReadJournal = `SELECT order_id, event_type, key FROM journal ORDER BY line`

// journal reads which events have committed, those of one key in their order.
func (s *shop) journal(ctx context.Context) ([]line, error) {
	rows, err := s.db.Query(ctx, sqlReadJournal)
	if err != nil {
		return nil, fmt.Errorf("read journal: %w", err)
	}
	journal, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (l line, err error) {
		return l, row.Scan(&l.id.order, &l.id.eventType, &l.key)
	})
	if err != nil {
		return nil, fmt.Errorf("read journal: %w", err)
	}
	return journal, nil
}

// ordersCommitted asks the orders themselves.
func (s *shop) ordersCommitted(ctx context.Context) (n int, err error) {
	if err := s.db.QueryRow(ctx, `SELECT count(*) FROM orders`).Scan(&n); err != nil {
		return 0, fmt.Errorf("count orders: %w", err)
	}
	return n, nil
}
