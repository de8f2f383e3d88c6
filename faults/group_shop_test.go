package faults

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// What happens in the shop whose events the group counts.
type (
	orderPaid struct {
		Order, Product string
		Quantity       int
		Pause          time.Duration // of its handler
	}
	productViewed struct{ Product string }
	productLiked  struct {
		Product string
		By      int // -1 for one that is taken back
	}
)

const (
	paidType   = "test.order.paid.v1"
	viewedType = "test.product.viewed.v1"
	likedType  = "test.product.liked.v1"
)

var shopTime = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func (orderPaid) OccurredAt() time.Time     { return shopTime }
func (productViewed) OccurredAt() time.Time { return shopTime }
func (productLiked) OccurredAt() time.Time  { return shopTime }

func (e orderPaid) key() string     { return e.Order }
func (e productViewed) key() string { return e.Product }
func (e productLiked) key() string  { return e.Product }

func shopEvents(topic string) (*outbox.Registry, error) {
	return outbox.NewRegistry("shop",
		outbox.Event(paidType, "Order", orderPaid.key).Topic(topic),
		outbox.Event(viewedType, "Product", productViewed.key).Topic(topic),
		outbox.Event(likedType, "Product", productLiked.key).Topic(topic),
	)
}

// statistic is a row of product_statistic.
type statistic struct {
	Product             string
	Sales, Views, Likes int
}

// shop puts events on a topic and knows what must come of them.
type shop struct {
	healthy bool // no more likes happen that fail
	client  *kgo.Client
	topic   string
	number  int // of the topic, of those with its name
	pause   time.Duration
	rng     *rand.Rand

	want    map[string]*statistic // by product
	actions int                   // different ones
	dead    map[string]bool       // of these, the ids of events whose handler always fails
	events  int                   // different ones
	records int                   // repeats included
	lately  []*kgo.Record
	orders  []orderPaid
}

// incarnation is the attribute of an event that says in which of the topics with the same
// name it is.
const incarnation = "incarnation"

// sequence is the attribute that says how many events there were before, and itself.
const sequence = "sequence"

func newShop(topic string, seed uint64) *shop {
	return &shop{topic: topic, rng: rand.New(rand.NewPCG(seed, 1<<32)), want: map[string]*statistic{}, dead: map[string]bool{}}
}

// sell puts n events on the topic, and some of them twice, as a relay does that
// is killed; and some orders are paid twice.
func (s *shop) sell(t *testing.T, n int) {
	t.Helper()
	var records []*kgo.Record
	for range n {
		s.events++
		record := s.happen()
		records = append(records, s.sent(record))
		s.lately = append(s.lately, record)
		if s.rng.IntN(30) == 0 {
			old := s.lately[len(s.lately)-1-s.rng.IntN(min(len(s.lately), 2000))]
			records = append(records, s.sent(old))
		}
	}
	s.records += len(records)
	require.NoError(t, s.client.ProduceSync(context.Background(), records...).FirstErr())
}

// sent returns a record as it is sent now.
func (s *shop) sent(r *kgo.Record) *kgo.Record {
	number := kgo.RecordHeader{Key: "ce_" + incarnation, Value: []byte(fmt.Sprint(s.number))}
	return &kgo.Record{Topic: s.topic, Key: r.Key, Value: r.Value, Headers: append(slices.Clone(r.Headers), number)}
}

// happen makes an event and notes what must come of it.
func (s *shop) happen() *kgo.Record {
	product := fmt.Sprintf("product-%d", s.rng.IntN(300))
	s.actions++
	kind := s.rng.IntN(3)
	if s.healthy && failures(s.id()) > 0 {
		kind = 1 // no like
	}
	switch kind {
	case 0:
		if len(s.orders) > 0 && s.rng.IntN(30) == 0 {
			s.actions-- // paid already
			return s.record(paidType, s.orders[s.rng.IntN(len(s.orders))])
		}
		e := orderPaid{Order: fmt.Sprintf("order-%d", s.events), Product: product, Quantity: 1 + s.rng.IntN(5), Pause: s.pause}
		s.orders = append(s.orders, e)
		s.of(product).Sales += e.Quantity
		return s.record(paidType, e)
	case 1:
		s.of(product).Views++
		return s.record(viewedType, productViewed{Product: product})
	default:
		e := productLiked{Product: product, By: 1 - 2*s.rng.IntN(2)}
		if id := s.id(); failures(id) >= likeAttempts {
			s.dead[id] = true
		} else {
			s.of(product).Likes += e.By
		}
		return s.record(likedType, e)
	}
}

// of returns what the counts of a product must be. It has a row once something was counted.
func (s *shop) of(product string) *statistic {
	want := s.want[product]
	if want == nil {
		want = &statistic{Product: product}
		s.want[product] = want
	}
	return want
}

// id returns the id of the event that happens now.
func (s *shop) id() string { return eventID(s.events) }

// eventID returns the id of one of the events.
func eventID(event int) string { return uuid.NewSHA1(uuid.Nil, []byte(fmt.Sprint(event))).String() }

// record returns an event as a relay sends it.
func (s *shop) record(eventType string, e interface{ key() string }) *kgo.Record {
	value, err := json.Marshal(e)
	if err != nil {
		panic(err) // of these types there is none
	}
	return &kgo.Record{Topic: s.topic, Key: []byte(e.key()), Value: value, Headers: []kgo.RecordHeader{
		{Key: "ce_specversion", Value: []byte("1.0")},
		{Key: "ce_id", Value: []byte(s.id())},
		{Key: "ce_source", Value: []byte("shop")},
		{Key: "ce_type", Value: []byte(eventType)},
		{Key: "ce_" + sequence, Value: []byte(fmt.Sprint(s.events))},
		{Key: "ce_time", Value: []byte(shopTime.Format(time.RFC3339))},
		{Key: "content-type", Value: []byte("application/json")},
	}}
}
