package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// newRecord is an event as it comes out of Kafka.
func (a *app) newRecord(t *testing.T, eventType string, event outbox.DomainEvent) *kgo.Record {
	t.Helper()
	payload, err := json.Marshal(event)
	require.NoError(t, err)
	topic, err := a.events.Topic(eventType)
	require.NoError(t, err)
	r := &kgo.Record{Topic: topic, Value: payload}
	for name, value := range map[string]string{
		"content-type": "application/json", "ce_specversion": "1.0", "ce_type": eventType,
		"ce_source": a.source, "ce_id": uuid.NewString(), "ce_time": event.OccurredAt().Format(time.RFC3339Nano),
	} {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: name, Value: []byte(value)})
	}
	return r
}

// statistics returns a consumer of the group product-statistics, and a function that
// delivers records to it.
func (a *app) statistics(t *testing.T) (deliver func(...*kgo.Record)) {
	t.Helper()
	c, err := outbox.NewConsumer(a.db, a.members(), a.events, a.group(statisticsGroup), a.config(), statistics{a.db, a.log}.handlers()...)
	require.NoError(t, err)
	return func(records ...*kgo.Record) {
		t.Helper()
		for _, r := range records {
			require.NoError(t, c.Deliver(t.Context(), r))
		}
	}
}

// requireStatistic compares the row of a product.
func (a *app) requireStatistic(t *testing.T, product, likes, sales, views int64) {
	t.Helper()
	var got [3]int64
	row := a.db.QueryRow(t.Context(), `SELECT like_count, sales_count, view_count FROM product_statistic WHERE product_id = $1`, product)
	require.NoError(t, row.Scan(&got[0], &got[1], &got[2]))
	require.Equal(t, [3]int64{likes, sales, views}, got, "likes, sales and views of product %d", product)
}

// requireHandled compares what event_handled says.
func (a *app) requireHandled(t *testing.T, want ...string) {
	t.Helper()
	rows, err := a.db.Query(t.Context(), `SELECT concat_ws(' ', aggregate_type, aggregate_id, action) FROM event_handled ORDER BY id`)
	require.NoError(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.ElementsMatch(t, want, got)
}

// An order is sold once, also if another event announces it again.
func TestOrderIsCountedOnce(t *testing.T) {
	t.Parallel()
	a := newApp(t)
	deliver := a.statistics(t)
	paid := a.newRecord(t, orderPaid, OrderPaidEventV1{OrderID: 7, Items: anOrder.Items, happened: noon})
	again := a.newRecord(t, orderPaid, OrderPaidEventV1{OrderID: 7, Items: anOrder.Items, happened: noon})
	deliver(paid, paid, again)
	a.requireStatistic(t, 3, 0, 2, 0)
	a.requireStatistic(t, 5, 0, 1, 0)
	a.requireHandled(t, "Order 7 SALES_COUNT_INCREASED")

	deliver(a.newRecord(t, orderPaid, OrderPaidEventV1{OrderID: 8, Items: anOrder.Items, happened: noon}))
	a.requireStatistic(t, 3, 0, 4, 0)
}

// A customer who looks three times counts three times; an event that is repeated does not.
func TestEveryViewIsCounted(t *testing.T) {
	t.Parallel()
	a := newApp(t)
	deliver := a.statistics(t)
	var want []string
	for range 3 {
		r := a.newRecord(t, productViewed, ProductViewedEventV1{ProductID: 3, UserID: 1, happened: noon})
		deliver(r, r)
		m, err := outbox.DecodeCloudEvent(r)
		require.NoError(t, err)
		want = append(want, "ProductView 3_"+m.ID+" VIEW_COUNT_INCREASED")
	}
	a.requireStatistic(t, 3, 0, 0, 3)
	a.requireHandled(t, want...)
}

// Likes in every order in which repeats may come: +n for the beginning of like n, -n
// for its end.
var likeTests = []struct {
	name  string
	plays []int64
	want  int64
}{
	{"liked", []int64{1}, 1},
	{"liked, repeated", []int64{1, 1}, 1},
	{"liked by two", []int64{1, 2}, 2},
	{"no longer liked", []int64{1, -1}, 0},
	{"no longer liked, repeated", []int64{1, -1, -1}, 0},
	{"liked, repeated after the end", []int64{1, -1, 1}, 0},
	{"all repeated", []int64{1, -1, 1, -1}, 0},
	{"liked again", []int64{1, -1, 2}, 1},
	{"a dead deadLetter comes back after the end", []int64{-1, 1}, 0},
}

func TestLikes(t *testing.T) {
	t.Parallel()
	a := newApp(t)
	deliver := a.statistics(t)
	for i, tt := range likeTests {
		t.Run(tt.name, func(t *testing.T) {
			product := int64(i + 1)
			for _, n := range tt.plays {
				if n > 0 {
					deliver(a.newRecord(t, likeCreated, LikeCreatedEventV1{LikeID: 100*product + n, ProductID: product, happened: noon}))
				} else {
					deliver(a.newRecord(t, likeCanceled, LikeCanceledEventV1{LikeID: 100*product - n, ProductID: product, happened: noon}))
				}
			}
			a.requireStatistic(t, product, tt.want, 0, 0)
		})
	}
	a.requireHandled(t) // nothing
}

// Rows are locked in the order of products whatever the order of the events, so that
// no two transactions wait for each other in a circle.
func TestRowsAreLockedInOrder(t *testing.T) {
	t.Parallel()
	s := statistics{log: slog.New(slog.DiscardHandler)}
	received := func(products ...int64) (orders []outbox.Received[OrderPaidEventV1], views []outbox.Received[ProductViewedEventV1]) {
		for _, p := range products {
			orders = append(orders, outbox.Received[OrderPaidEventV1]{Event: OrderPaidEventV1{Items: []Item{{ProductID: p, Quantity: 1}}}})
			views = append(views, outbox.Received[ProductViewedEventV1]{Event: ProductViewedEventV1{ProductID: p}})
		}
		return orders, views
	}
	orders, views := received(5, 3, 1, 4, 2, 3)
	for name, count := range map[string]func(context.Context, pgx.Tx) error{
		"sales": func(ctx context.Context, tx pgx.Tx) error { return s.orderPaid(ctx, tx, orders) },
		"views": func(ctx context.Context, tx pgx.Tx) error { return s.productViewed(ctx, tx, views) },
	} {
		t.Run(name, func(t *testing.T) {
			a := newApp(t)
			_, err := a.db.Exec(t.Context(), `INSERT INTO product_statistic (product_id) SELECT generate_series(1, 5)`)
			require.NoError(t, err)
			holder, err := a.db.Begin(t.Context())
			require.NoError(t, err)
			defer holder.Rollback(context.Background())
			_, err = holder.Exec(t.Context(), `SELECT FROM product_statistic WHERE product_id = 3 FOR UPDATE`)
			require.NoError(t, err)

			counted := make(chan error, 1)
			waiter, err := a.db.Begin(t.Context())
			require.NoError(t, err)
			defer waiter.Rollback(context.Background())
			go func() { counted <- count(t.Context(), waiter) }()
			require.Eventually(t, func() bool {
				var waits bool
				row := a.db.QueryRow(t.Context(), `SELECT cardinality(pg_blocking_pids($1)) > 0`, waiter.Conn().PgConn().PID())
				return row.Scan(&waits) == nil && waits
			}, testenv.Patience, 5*time.Millisecond)

			rows, err := a.db.Query(t.Context(), `SELECT product_id FROM product_statistic ORDER BY product_id FOR UPDATE SKIP LOCKED`)
			require.NoError(t, err)
			free, err := pgx.CollectRows(rows, pgx.RowTo[int64])
			require.NoError(t, err)
			require.Equal(t, []int64{4, 5}, free, "it waits for 3 and holds 1 and 2")
			require.NoError(t, holder.Rollback(t.Context()))
			require.NoError(t, <-counted)
		})
	}
}

// An order that cannot be counted is a dead deadLetter, and holds up no other.
func TestOrderThatCannotBeCounted(t *testing.T) {
	t.Parallel()
	a := newApp(t)
	deadLetters := make(chan string, 1)
	cfg := a.config()
	cfg.Retry.RetryWait, cfg.Retry.MaxOutage = time.Millisecond, -1 // no other order is counted meanwhile
	cfg.Hooks.DeadLettered = func(m outbox.Metadata, action, topic string, err error) {
		deadLetters <- fmt.Sprintf("%s %s of %s to %s", action, m.Type, m.Subject, topic)
	}
	c, err := outbox.NewConsumer(a.db, a.members(), a.events, a.group(statisticsGroup), cfg, statistics{a.db, a.log}.handlers()...)
	require.NoError(t, err)
	ensureTopics(t, a.kafka, a.events)
	a.relayAnd(t, c)

	sold := func(order, quantity int64) outbox.DomainEvent {
		item := Item{ProductID: 3, Quantity: quantity}
		return OrderPaidEventV1{OrderID: order, Items: []Item{item, item}, happened: noon}
	}
	a.record(t, sold(1, 1), sold(2, math.MaxInt64), sold(3, 2)) // twice that is too much for the column
	select {
	case deadLetter := <-deadLetters:
		require.Equal(t, "SALES_COUNT_INCREASED loopers.order.paid.v1 of 2 to order-events.dlq", deadLetter)
	case <-time.After(testenv.Patience):
		t.Fatal("no dead deadLetter")
	}
	require.Eventually(t, func() bool {
		var sales int64
		err := a.db.QueryRow(t.Context(), `SELECT sales_count FROM product_statistic WHERE product_id = 3`).Scan(&sales)
		return err == nil && sales == 6
	}, testenv.Patience, 5*time.Millisecond)
	a.requireHandled(t, "Order 1 SALES_COUNT_INCREASED", "Order 3 SALES_COUNT_INCREASED")
}
