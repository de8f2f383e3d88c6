package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
)

// item is a change of an item that a shop has.
type item struct {
	Item     int           `json:"item"`
	Version  int64         `json:"version"` // of the item, from 1
	Quantity int           `json:"quantity"`
	Pause    time.Duration `json:"pause,omitempty"` // of its handlers
	Poison   bool          `json:"poison,omitempty"`
}

type (
	itemSold     item
	itemReturned item
	itemLooked   item // which no handler takes
)

func (e itemSold) key() string     { return fmt.Sprint("item-", e.Item) }
func (e itemReturned) key() string { return fmt.Sprint("item-", e.Item) }
func (e itemLooked) key() string   { return fmt.Sprint("item-", e.Item) }

func (itemSold) OccurredAt() time.Time     { return shopTime }
func (itemReturned) OccurredAt() time.Time { return shopTime }
func (itemLooked) OccurredAt() time.Time   { return shopTime }

func busEvents() (*outbox.Registry, error) {
	return outbox.NewRegistry("shop",
		outbox.Event("test.item.sold.v1", "Item", itemSold.key).Topic("sales"),
		outbox.Event("test.item.returned.v1", "Item", itemReturned.key).Topic("returns"),
		outbox.Event("test.item.looked.v1", "Item", itemLooked.key).Topic("sales"),
	)
}

const (
	items   = 300 // rows of item; the even ones are sold, the others returned
	shelves = 40
	clerks  = 4
)

// busShop records events by transactions of all kinds. What it has committed is in the table
// item: it is part of the same transactions.
type busShop struct {
	db   *pgxpool.Pool
	rec  *outbox.Recorder
	seed uint64

	pause  atomic.Int64 // of the handlers of what is recorded
	poison atomic.Int64 // how many events that are recorded next end their process
	rounds atomic.Int64
}

const sqlBusTables = `
CREATE TABLE item (item int PRIMARY KEY, version bigint NOT NULL DEFAULT 0, quantity bigint NOT NULL DEFAULT 0);
INSERT INTO item SELECT generate_series(0, 299);
CREATE TABLE poison (item int NOT NULL, version bigint NOT NULL, PRIMARY KEY (item, version));
CREATE TABLE shelf (consumer_group text, shelf int, changes bigint NOT NULL, quantity bigint NOT NULL, PRIMARY KEY (consumer_group, shelf)) WITH (fillfactor = 50);
CREATE TABLE effect (id bigserial PRIMARY KEY, consumer_group text NOT NULL, action text NOT NULL, item int NOT NULL, version bigint NOT NULL,
       began timestamptz NOT NULL);
CREATE TABLE seen (id bigserial NOT NULL, consumer_group text, action text, item int, version bigint, calls int NOT NULL,
       began timestamptz NOT NULL, attempt int NOT NULL,
       PRIMARY KEY (consumer_group, action, item, version))`

func newBusShop(ctx context.Context, db *pgxpool.Pool, seed uint64) (*busShop, error) {
	events, err := busEvents()
	if err != nil {
		return nil, err
	}
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	if err != nil {
		return nil, err
	}
	_, err = db.Exec(ctx, sqlBusTables)
	return &busShop{db: db, rec: rec, seed: seed}, err
}

// sell commits n events at least, and goes on when PostgreSQL is away for a while.
func (s *busShop) sell(ctx context.Context, n int) error {
	var left atomic.Int64
	left.Store(int64(n))
	var all sync.WaitGroup
	failures := make([]error, clerks)
	round := uint64(s.rounds.Add(1))
	for clerk := range clerks {
		rng := rand.New(rand.NewPCG(s.seed, 1<<40+round<<8+uint64(clerk)))
		all.Go(func() { failures[clerk] = s.work(ctx, rng, &left) })
	}
	all.Wait()
	return errors.Join(failures...)
}

// work is what one clerk does.
func (s *busShop) work(ctx context.Context, rng *rand.Rand, left *atomic.Int64) error {
	for failing := (time.Time{}); left.Load() > 0; {
		n, err := s.transact(ctx, rng, int(left.Load()))
		left.Add(int64(-n))
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			failing = time.Time{}
		case failing.IsZero():
			failing = time.Now()
		case time.Since(failing) > stall:
			return err
		default:
			time.Sleep(20 * time.Millisecond) // PostgreSQL is away
		}
	}
	return nil
}

var errRolledBack = errors.New("rolled back")

// transact runs one transaction, and returns how many events it has committed.
func (s *busShop) transact(ctx context.Context, rng *rand.Rand, most int) (n int, err error) {
	size, hold := 1+rng.IntN(4), time.Duration(0)
	kind := rng.IntN(100)
	switch {
	case kind < 5:
		size = 50
	case kind < 8:
		hold = time.Duration(rng.IntN(1000)) * time.Millisecond
	}
	changed := make([]int, min(size, most))
	for i := range changed {
		changed[i] = rng.IntN(items)
	}
	slices.Sort(changed) // they are locked in this order
	durable := "on"
	if rng.IntN(2) == 0 {
		durable = "off" // a crash may take it
	}
	err = pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT set_config('synchronous_commit', $1, true)`, durable); err != nil {
			return err
		}
		for i, number := range changed {
			if i > 0 && i == len(changed)/2 {
				time.Sleep(hold)
			}
			if kind >= 20 && kind < 30 && i%2 == 1 { // rolled back to a savepoint
				if err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
					return errors.Join(s.change(ctx, tx, rng, number), errRolledBack)
				}); !errors.Is(err, errRolledBack) {
					return err
				}
				continue
			}
			if err := s.change(ctx, tx, rng, number); err != nil {
				return err
			}
			n++
		}
		if kind >= 90 {
			return errRolledBack
		}
		return nil
	})
	if errors.Is(err, errRolledBack) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return n, nil
}

// change changes an item, and records that. The item is locked until the transaction ends, so
// that its events are committed in the order of its versions.
func (s *busShop) change(ctx context.Context, tx pgx.Tx, rng *rand.Rand, number int) error {
	e := item{Item: number, Quantity: 1 + rng.IntN(5), Pause: time.Duration(s.pause.Load()), Poison: s.poison.Load() > 0 && number%2 == 0}
	if err := tx.QueryRow(ctx, `UPDATE item SET version = version + 1, quantity = quantity + $2 WHERE item = $1 RETURNING version`, e.Item, e.Quantity).Scan(&e.Version); err != nil {
		return err
	}
	if e.Poison && s.poison.Add(-1) >= 0 {
		if _, err := tx.Exec(ctx, `INSERT INTO poison VALUES ($1, $2)`, e.Item, e.Version); err != nil {
			return err
		}
	} else {
		e.Poison = false
	}
	var event outbox.DomainEvent = itemSold(e)
	if number%2 == 1 {
		event = itemReturned(e)
	}
	events := []outbox.DomainEvent{event}
	if rng.IntN(20) == 0 {
		events = []outbox.DomainEvent{itemLooked(e), event}
	}
	from, delayed := time.Now(), number%8 < 2 // of both types
	if delayed {
		from = dueTime()
	}
	for i := range events {
		if delayed {
			events[i] = delay(events[i], from)
		}
		if !e.Poison { // which must become dead
			events[i] = expire(events[i], fmt.Sprint(e.Item, "/", e.Version), from)
		}
	}
	return s.rec.Record(ctx, tx, events...)
}
