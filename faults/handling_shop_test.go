package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
)

// deal is what the events of the market have in common.
type deal struct {
	Key      string
	Sequence int64 // of the key, from 1
	Amount   int
	Tenant   int
	Bad      string // how handlers fail for ever, or ""
}

func (d deal) key() string           { return d.Key }
func (d deal) data() deal            { return d }
func (d deal) OccurredAt() time.Time { return shopTime }

type (
	orderPlaced struct{ deal }
	stockMoved  struct{ deal }
	priceSet    struct{ deal } // its topic has another name in the second release
	auditNoted  struct{ deal } // comes seldom
	gatePassed  struct{ deal } // all of one key
	parcelSent  struct{ deal } // only the second release has it
)

const (
	countedAction = "COUNTED"
	movedAction   = "MOVED"
	pricedAction  = "PRICED"
	notedAction   = "NOTED"
	passedAction  = "PASSED"
	listedAction  = "LISTED" // only the second release has it

	badAtOnce = "permanent"
	badAlways = "fails"

	parcelType  = "market.parcel.sent.v1"
	placedType  = "market.order.placed.v1"
	pricedType  = "market.price.set.v1"
	tenants     = 5
	marketClerk = 3
)

// marketTopics are the topics of the market. Prices is that of the first release, Tariffs that of the second one.
type marketTopics struct{ Orders, Prices, Tariffs, Audits, Gates string }

func (m marketTopics) all() []string {
	return []string{m.Orders, m.Prices, m.Tariffs, m.Audits, m.Gates}
}

// marketEvents returns the events as a release of the services has them.
func marketEvents(topics marketTopics, release int) (*outbox.Registry, error) {
	prices := topics.Prices
	if release > 1 {
		prices = topics.Tariffs
	}
	return outbox.NewRegistry("market",
		outbox.Event(placedType, "Order", orderPlaced.key).Topic(topics.Orders),
		outbox.Event("market.stock.moved.v1", "Stock", stockMoved.key).Topic(topics.Orders),
		outbox.Event(pricedType, "Price", priceSet.key).Topic(prices),
		outbox.Event("market.audit.noted.v1", "Audit", auditNoted.key).Topic(topics.Audits),
		outbox.Event("market.gate.passed.v1", "Gate", gatePassed.key).Topic(topics.Gates),
		outbox.Event(parcelType, "Parcel", parcelSent.key).Topic(topics.Orders),
	)
}

// marketKinds are the kinds of events, whose names begin their keys. Parcels are a new type of an old action, and have
// keys of their own: see TestHandlingFaults.
var marketKinds = []struct {
	name       string
	weight     int
	keys       int
	mayBeBad   bool
	newRelease bool // only the second release records it
	event      func(deal) outbox.DomainEvent
}{
	{"order", 6, 40, true, false, func(d deal) outbox.DomainEvent { return orderPlaced{d} }},
	{"stock", 4, 30, true, false, func(d deal) outbox.DomainEvent { return stockMoved{d} }},
	{"price", 2, 10, true, false, func(d deal) outbox.DomainEvent { return priceSet{d} }},
	{"tariff", 2, 10, true, true, func(d deal) outbox.DomainEvent { return priceSet{d} }},
	{"parcel", 3, 20, true, true, func(d deal) outbox.DomainEvent { return parcelSent{d} }},
	{"gate", 3, 1, false, false, func(d deal) outbox.DomainEvent { return gatePassed{d} }},
	{"audit", 0, 3, false, false, func(d deal) outbox.DomainEvent { return auditNoted{d} }},
}

// sqlMarketTables has what is committed in deal_history, and what handlers have done in deal_total and deal_effect.
// deal_owed has what each action of each group has to do. What only the second release handles must be done if it was
// committed after the first member of this release had begun.
const sqlMarketTables = `
CREATE TABLE deal_key (key text PRIMARY KEY, sequence bigint NOT NULL);
CREATE TABLE deal_history (event_id uuid PRIMARY KEY, kind text NOT NULL, key text NOT NULL, sequence bigint NOT NULL, amount int NOT NULL, bad text NOT NULL,
       owed_feed boolean NOT NULL, owed_packing boolean NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp(), UNIQUE (key, sequence));
CREATE TABLE deal_total (consumer_group text, action text, key text, effects bigint NOT NULL, amount bigint NOT NULL,
       PRIMARY KEY (consumer_group, action, key)) WITH (fillfactor = 50);
CREATE TABLE deal_effect (n bigserial PRIMARY KEY, consumer_group text NOT NULL, action text NOT NULL, key text NOT NULL, sequence bigint NOT NULL,
       amount int NOT NULL, event_id uuid NOT NULL, process int NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE INDEX ON deal_effect (event_id);
CREATE TABLE deal_letter (event_id text NOT NULL, action text NOT NULL);
CREATE VIEW deal_owed AS
SELECT g.consumer_group, a.action, h.event_id, h.key, h.sequence, h.amount, h.bad, h.at,
       NOT a.fresh OR CASE g.consumer_group WHEN '` + feedGroup + `' THEN h.owed_feed ELSE h.owed_packing END AS must
  FROM deal_history AS h
  JOIN (VALUES ('order', 'COUNTED', false), ('order', 'LISTED', true), ('parcel', 'COUNTED', true), ('stock', 'MOVED', false),
               ('price', 'PRICED', false), ('tariff', 'PRICED', true), ('audit', 'NOTED', false), ('gate', 'PASSED', false)) AS a (kind, action, fresh) USING (kind)
 CROSS JOIN (VALUES ('` + feedGroup + `'), ('` + packingGroup + `')) AS g (consumer_group)`

// marketShop records events by transactions of services of both releases.
type marketShop struct {
	db   *pgxpool.Pool
	recs []*outbox.Recorder // of the first and the second release
	seed uint64

	calm                  atomic.Bool // no more bad events
	owedFeed, owedPacking atomic.Bool // the second release has begun in the group
	events, bad           atomic.Int64
}

func newMarketShop(ctx context.Context, db *pgxpool.Pool, topics marketTopics, seed uint64) (*marketShop, error) {
	s := &marketShop{db: db, seed: seed}
	for release := 1; release <= 2; release++ {
		events, err := marketEvents(topics, release)
		if err != nil {
			return nil, err
		}
		rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
		if err != nil {
			return nil, err
		}
		s.recs = append(s.recs, rec)
	}
	_, err := db.Exec(ctx, sqlMarketTables)
	return s, err
}

// work is what a clerk does until ctx ends.
func (s *marketShop) work(ctx context.Context, clerk uint64) error {
	rng := rand.New(rand.NewPCG(s.seed, 1<<50+clerk))
	for {
		kinds := make([]int, 1+rng.IntN(4))
		for i := range kinds {
			kinds[i] = randomKind(rng)
		}
		if err := s.transact(ctx, rng, kinds); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Duration(50+rng.IntN(150)) * time.Millisecond):
		}
	}
}

// trickle records an event at a time that no other action gets.
func (s *marketShop) trickle(ctx context.Context, every time.Duration) error {
	rng := rand.New(rand.NewPCG(s.seed, 1<<51))
	for {
		if err := s.transact(ctx, rng, []int{len(marketKinds) - 1}); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(every):
		}
	}
}

func randomKind(rng *rand.Rand) int {
	sum := 0
	for _, k := range marketKinds {
		sum += k.weight
	}
	for at, i := rng.IntN(sum), 0; ; i++ {
		if at -= marketKinds[i].weight; at < 0 {
			return i
		}
	}
}

// transact records an event of each kind in one transaction, which is rolled back one time in ten.
func (s *marketShop) transact(ctx context.Context, rng *rand.Rand, kinds []int) error {
	ctx = context.WithoutCancel(ctx) // what is begun is ended
	type change struct {
		kind, number int
		key          string
	}
	changes := make([]change, len(kinds))
	for i, kind := range kinds {
		number := rng.IntN(marketKinds[kind].keys)
		changes[i] = change{kind, number, fmt.Sprint(marketKinds[kind].name, "-", number)}
	}
	slices.SortFunc(changes, func(a, b change) int { return strings.Compare(a.key, b.key) }) // keys are locked in this order
	feed, packing := s.owedFeed.Load(), s.owedPacking.Load()
	end := rng.IntN(10)
	var recorded, bad int64
	err := pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
		for _, c := range changes {
			d := deal{Key: c.key, Amount: 1 + rng.IntN(9), Tenant: c.number % tenants}
			if marketKinds[c.kind].mayBeBad && rng.IntN(80) == 0 && !s.calm.Load() {
				d.Bad = []string{badAtOnce, badAlways}[rng.IntN(2)]
				bad++
			}
			if err := s.record(ctx, tx, rng, c.kind, d, feed, packing); err != nil {
				return err
			}
			recorded++
		}
		if end == 0 {
			return errRolledBack
		}
		return nil
	})
	if errors.Is(err, errRolledBack) {
		return nil
	}
	s.events.Add(recorded)
	s.bad.Add(bad)
	return err
}

const (
	sqlNextDeal = `
INSERT INTO deal_key AS k (key, sequence) VALUES ($1, 1) ON CONFLICT (key) DO UPDATE SET sequence = k.sequence + 1 RETURNING sequence`
	sqlDealHistory = `
INSERT INTO deal_history (event_id, kind, key, sequence, amount, bad, owed_feed, owed_packing) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`
)

// record records an event. Its key is locked until the transaction ends, so that the events of a key are committed in
// the order of their sequence.
func (s *marketShop) record(ctx context.Context, tx pgx.Tx, rng *rand.Rand, kind int, d deal, feed, packing bool) error {
	k := marketKinds[kind]
	if err := tx.QueryRow(ctx, sqlNextDeal, d.Key).Scan(&d.Sequence); err != nil {
		return err
	}
	release := rng.IntN(2)
	switch k.name {
	case "price": // each topic has keys of its own, because no order holds between topics
		release = 0
	case "tariff":
		release = 1
	}
	if k.newRelease {
		release = 1
	}
	id := uuid.New()
	if _, err := tx.Exec(ctx, sqlDealHistory, id, k.name, d.Key, d.Sequence, d.Amount, d.Bad, feed, packing); err != nil {
		return err
	}
	return s.recs[release].Record(ctx, tx, outbox.With(k.event(d), outbox.EventOptions{ID: id}))
}
