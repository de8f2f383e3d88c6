package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/outboxgo/outbox/outboxtopics"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"
)

// fixture is the program on a schema of the test's own, with three pieces of product-1 and one of
// product-2. The test delivers events to its services itself.
type fixture struct {
	*app
	orders
	rec *outbox.Recorder
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	testenv.Direct(t) // a setting of sessions
	_, schema := testenv.Schema(t)
	f := &fixture{app: &app{schema: schema, source: "shop/" + uuid.NewString(), log: slog.New(slog.DiscardHandler)}}
	f.kafka, f.decode = []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1")}, outbox.DecodeCloudEvent // no broker is there
	f.db = testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
	})
	require.NoError(t, f.wire())
	require.NoError(t, f.migrate(t.Context(), "", map[string]int64{"product-1": 3, "product-2": 1}))
	var err error
	f.rec, err = outbox.NewRecorder(f.app.events, outbox.RecorderConfig{Schema: schema})
	require.NoError(t, err)
	f.orders = orders{f.begin, f.rec}
	return f
}

func (f *fixture) begin(ctx context.Context, do func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, f.db, do)
}

// order places an order of so many pieces of the two products.
func (f *fixture) order(t *testing.T, one, two int64) uuid.UUID {
	t.Helper()
	o := NewOrder{ID: uuid.New(), CustomerID: "customer-1", Items: []Item{{"product-1", one, 10_00}, {"product-2", two, 5_50}}}
	if two == 0 {
		o.Items = o.Items[:1]
	}
	require.NoError(t, f.createOrder(t.Context(), o))
	return o.ID
}

// deliverTo returns a function that delivers an event to a group, each time as a new one.
func (f *fixture) deliverTo(t *testing.T, group string, handlers ...outbox.Handler) func(e outbox.DomainEvent) error {
	t.Helper()
	c, err := f.consumer(group, 0, nil, handlers...)
	require.NoError(t, err)
	return func(e outbox.DomainEvent) error {
		return c.Deliver(t.Context(), outboxtest.NewRecord(t.Context(), t, f.app.events, e))
	}
}

// last returns the newest recorded event of a type.
func last[E outbox.DomainEvent](t *testing.T, f *fixture) E {
	t.Helper()
	all := outboxtest.Recorded[E](t.Context(), t, outboxtest.InSchema(f.db, f.schema), f.app.events)
	require.NotEmpty(t, all)
	return all[len(all)-1]
}

// count returns what a query counts.
func (f *fixture) count(t *testing.T, sql string, args ...any) (n int) {
	t.Helper()
	require.NoError(t, f.db.QueryRow(t.Context(), sql, args...).Scan(&n))
	return n
}

// topics returns the topics and types of an order's events, in their order.
func (f *fixture) topics(t *testing.T, order uuid.UUID) (all []string) {
	t.Helper()
	events, err := history(t.Context(), f.db, f.schema, order)
	require.NoError(t, err)
	for _, e := range events {
		all = append(all, e.Topic+" "+e.Type)
	}
	return all
}

var createdTopics = []string{
	"order-events " + orderCreated, "inventory-events " + reservationRequested, "reward-events " + pointsEarned, "notification-events " + notificationRequired,
}

// An order and what it asks of three services are one transaction, to four topics. Placed twice, it is there once.
func TestCreateOrder(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	id := f.order(t, 2, 1)
	require.NoError(t, f.createOrder(t.Context(), NewOrder{id, "customer-2", []Item{{"product-2", 1, 1}}}))
	require.Equal(t, createdTopics, f.topics(t, id))
	require.Equal(t, 1, f.count(t, `SELECT count(*) FROM orders WHERE customer_id = 'customer-1' AND total = 2550`))
	require.Equal(t, 1, f.count(t, `SELECT count(DISTINCT xid) FROM outbox`))
	require.EqualValues(t, 25, last[PointsEarned](t, f).Points)
	inspector, err := outboxops.NewInspector(f.db, outboxops.InspectorConfig{Schema: f.schema})
	require.NoError(t, err)
	indexed, err := inspector.HasAggregateIndex(t.Context())
	require.NoError(t, err)
	require.True(t, indexed)
}

// failing records nothing, as a recorder whose statement fails.
type failing struct{}

var errRecord = errors.New("no")

func (failing) Record(context.Context, pgx.Tx, ...outbox.DomainEvent) error { return errRecord }

// What cannot be recorded has not happened, and what is rolled back has not been recorded.
func TestOrderAndEventsAreOne(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	good := NewOrder{uuid.New(), "customer-1", []Item{{"product-1", 1, 1}}}
	require.ErrorIs(t, orders{f.begin, failing{}}.createOrder(t.Context(), good), errRecord)
	rolledBack := orders{func(ctx context.Context, do func(pgx.Tx) error) error {
		return f.begin(ctx, func(tx pgx.Tx) error { return errors.Join(do(tx), errRecord) })
	}, f.rec}
	require.ErrorIs(t, rolledBack.createOrder(t.Context(), good), errRecord)
	require.Zero(t, f.count(t, `SELECT (SELECT count(*) FROM orders) + (SELECT count(*) FROM outbox)`))

	id := f.order(t, 1, 0)
	require.ErrorIs(t, orders{f.begin, failing{}}.cancelOrder(t.Context(), id, "because"), errRecord)
	require.ErrorIs(t, rolledBack.completeOrder(t.Context(), id), errRecord)
	require.Equal(t, 1, f.count(t, `SELECT count(*) FROM orders WHERE status = 'CREATED'`))
	require.Equal(t, createdTopics, f.topics(t, id))
}

// Without a transaction nothing is recorded: nil is refused, and so is one that has ended. A pool is no pgx.Tx, so
// it does not compile.
func TestRecordNeedsATransaction(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	event := ReleaseRequested{now(uuid.New())}
	require.ErrorIs(t, f.rec.Record(t.Context(), nil, event), outbox.ErrNilArgument)
	tx, err := f.db.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	require.ErrorIs(t, f.rec.Record(t.Context(), tx, event), pgx.ErrTxClosed)
	require.Zero(t, f.count(t, `SELECT count(*) FROM outbox`))
}

// What is no order is refused, and the error says why. Nothing is written.
func TestRefused(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	id, item := uuid.New(), Item{"product-1", 1, 1}
	for want, o := range map[string]NewOrder{
		"no id":                         {uuid.Nil, "c", []Item{item}},
		"no customer":                   {id, "", []Item{item}},
		"0 items":                       {id, "c", nil},
		"101 items":                     {id, "c", make([]Item, 101)},
		`item 0: product ""`:            {id, "c", []Item{{"", 1, 1}}},
		`item 1: product "product-1"`:   {id, "c", []Item{item, item}},
		"quantity 0":                    {id, "c", []Item{{"p", 0, 1}}},
		"quantity -9":                   {id, "c", []Item{{"p", -9, 1}}},
		"quantity 9223372036854775807":  {id, "c", []Item{{"p", 1<<63 - 1, 1}}},
		"item 0: price -1":              {id, "c", []Item{{"p", 1, -1}}},
		"price 9223372036854775807, an": {id, "c", []Item{{"p", 1, 1<<63 - 1}}},
	} {
		err := f.createOrder(t.Context(), o)
		require.ErrorIs(t, err, errOrder, want)
		require.ErrorContains(t, err, want)
	}
	require.Error(t, f.createOrder(t.Context(), NewOrder{id, "a\x00b", []Item{item}}), "PostgreSQL has no such text")
	require.ErrorIs(t, f.cancelOrder(t.Context(), id, "because"), errUnknown)
	require.ErrorIs(t, f.completeOrder(t.Context(), id), errUnknown)
	require.ErrorIs(t, f.cancelOrder(t.Context(), f.order(t, 1, 0), ""), errReason)
	require.Equal(t, 5, f.count(t, `SELECT (SELECT count(*) FROM orders) + (SELECT count(*) FROM outbox)`))
}

// An order ends once. Who asks again is heard, who wants another end is not. Of two at the same time one is first.
func TestOrderEndsOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	id := f.order(t, 1, 0)
	require.NoError(t, f.completeOrder(t.Context(), id))
	require.NoError(t, f.completeOrder(t.Context(), id))
	require.ErrorIs(t, f.cancelOrder(t.Context(), id, "too late"), errEnded)
	require.Equal(t, append(createdTopics[:4:4], "order-events "+orderCompleted, "notification-events "+notificationRequired), f.topics(t, id))

	for range 20 {
		id := f.order(t, 1, 0)
		var g errgroup.Group
		results := [4]error{}
		for i := range results {
			g.Go(func() error {
				if i%2 == 0 {
					results[i] = f.completeOrder(t.Context(), id)
				} else {
					results[i] = f.cancelOrder(t.Context(), id, "because")
				}
				return nil
			})
		}
		require.NoError(t, g.Wait())
		for i := range 2 {
			require.Equal(t, results[i], results[i+2], "who asks for the same gets the same")
		}
		require.NotEqual(t, results[0] == nil, results[1] == nil)
		require.ErrorIs(t, errors.Join(results[:]...), errEnded)
		require.Len(t, f.topics(t, id), map[bool]int{true: 4 + 2, false: 4 + 4}[results[0] == nil])
	}
}

// Stock is short: the inventory takes nothing and says so, the orders service cancels the order with the reason, and
// what the others had done is taken back. Every event comes twice, under another id the second time.
func TestCompensation(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	toInventory := f.deliverTo(t, inventoryGroup, inventory{f.rec}.handlers()...)
	toOrders := f.deliverTo(t, ordersGroup, f.handlers()...)
	toReward := f.deliverTo(t, rewardGroup, rewardHandlers()...)
	deliver := func(to func(outbox.DomainEvent) error, e outbox.DomainEvent) {
		require.NoError(t, to(e))
	}

	id := f.order(t, 2, 2) // of product-2 there is one
	deliver(toReward, last[PointsEarned](t, f))
	for range 2 {
		deliver(toInventory, last[ReservationRequested](t, f))
	}
	short := last[StockShort](t, f)
	require.Equal(t, StockShort{short.about, "product-2", 1, 2}, short)
	for range 2 {
		deliver(toOrders, short)
	}
	require.Equal(t, "1 of product-2 are left, and 2 were ordered", last[OrderCancelled](t, f).Reason)
	for range 2 {
		deliver(toInventory, last[ReleaseRequested](t, f))
	}
	deliver(toReward, last[PointsRevoked](t, f))

	require.Equal(t, append(createdTopics[:4:4], "inventory-events "+stockShort, "order-events "+orderCancelled,
		"inventory-events "+releaseRequested, "reward-events "+pointsRevoked, "notification-events "+notificationRequired), f.topics(t, id))
	require.Equal(t, 1, f.count(t, `SELECT count(*) FROM orders WHERE status = 'CANCELLED' AND reason LIKE '1 of product-2%'`))
	require.Equal(t, 1, f.count(t, `SELECT count(*) FROM reservation WHERE status = 'RELEASED'`))
	require.Zero(t, f.count(t, `SELECT count(*) FROM stock_movement`), "all items or none")
	require.Zero(t, f.count(t, `SELECT sum(points) FROM reward_entry`))
}

// What was reserved for an order that the customer cancels is given back, and the answer of the inventory that comes
// later does not complete it.
func TestReleaseOfWhatWasReserved(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	toInventory := f.deliverTo(t, inventoryGroup, inventory{f.rec}.handlers()...)
	id := f.order(t, 3, 1)
	require.NoError(t, toInventory(last[ReservationRequested](t, f)))
	require.Zero(t, f.count(t, `SELECT sum(available) FROM stock`))
	require.NoError(t, f.cancelOrder(t.Context(), id, reasonOfCustomer))
	require.NoError(t, f.deliverTo(t, ordersGroup, f.handlers()...)(last[StockReserved](t, f)))
	for range 2 {
		require.NoError(t, toInventory(last[ReleaseRequested](t, f)))
	}
	require.Equal(t, 4, f.count(t, `SELECT sum(available) FROM stock`))
	require.Equal(t, 4, f.count(t, `SELECT count(*) FROM stock_movement`))
	require.Equal(t, 1, f.count(t, `SELECT count(*) FROM orders WHERE status = 'CANCELLED'`))
}

// One topic and key keep the release behind its request. If an operator has a request handled that had failed, and the
// release is done, nothing is put aside; and points add up to nothing in whatever order they come.
func TestCompensationComesFirst(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	id := f.order(t, 1, 1)
	require.NoError(t, f.cancelOrder(t.Context(), id, reasonOfCustomer))
	toInventory := f.deliverTo(t, inventoryGroup, inventory{f.rec}.handlers()...)
	for _, e := range []outbox.DomainEvent{last[ReleaseRequested](t, f), last[ReservationRequested](t, f)} {
		require.NoError(t, toInventory(e))
	}
	require.Equal(t, 4, f.count(t, `SELECT sum(available) FROM stock`))
	outboxtest.RequireNotRecorded[StockReserved](t.Context(), t, outboxtest.InSchema(f.db, f.schema), f.app.events)

	toReward := f.deliverTo(t, rewardGroup, rewardHandlers()...)
	for _, e := range []outbox.DomainEvent{last[PointsRevoked](t, f), last[PointsEarned](t, f)} {
		require.NoError(t, toReward(e))
	}
	require.Zero(t, f.count(t, `SELECT sum(points) FROM reward_entry`))
}

// The product is unknown, so its stock is short.
func TestUnknownProductIsShort(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	require.NoError(t, f.createOrder(t.Context(), NewOrder{uuid.New(), "customer-1", []Item{{"product-1", 1, 1}, {"unicorn", 1, 1}}}))
	require.NoError(t, f.deliverTo(t, inventoryGroup, inventory{f.rec}.handlers()...)(last[ReservationRequested](t, f)))
	require.Equal(t, "unicorn", last[StockShort](t, f).ProductID)
	require.Zero(t, f.count(t, `SELECT count(*) FROM stock_movement`))
}

// Sixteen orders at a time want the same two products, named in different orders. None waits for ever, no more is
// taken than there is, and each gets an answer.
func TestInventoryUnderLoad(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	_, err := f.db.Exec(t.Context(), `UPDATE stock SET initial = 20, available = 20`)
	require.NoError(t, err)
	i := inventory{f.rec}
	var g errgroup.Group
	g.SetLimit(16)
	for n := range 48 {
		items := []Item{{"product-1", 1, 1}, {"product-2", 1, 1}}
		if n%2 == 0 {
			items[0], items[1] = items[1], items[0]
		}
		g.Go(func() error {
			return f.begin(t.Context(), func(tx pgx.Tx) error {
				return i.reserve(t.Context(), tx, ReservationRequested{now(uuid.New()), items}, outbox.Metadata{})
			})
		})
	}
	require.NoError(t, g.Wait())
	require.Zero(t, f.count(t, `SELECT sum(available) FROM stock`))
	db := outboxtest.InSchema(f.db, f.schema)
	require.Len(t, outboxtest.Recorded[StockReserved](t.Context(), t, db, f.app.events), 20)
	require.Len(t, outboxtest.Recorded[StockShort](t.Context(), t, db, f.app.events), 28)
}

// openNotifications returns the service with a mail provider, and what closes that.
func openNotifications(t *testing.T) (n notifications, provider *mailProvider, closeIt func()) {
	t.Helper()
	provider, url, closeIt, err := openMailProvider(t.Context())
	require.NoError(t, err)
	t.Cleanup(closeIt)
	client := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(client.CloseIdleConnections)
	return notifications{client, url}, provider, closeIt
}

// A customer is told once of a state, whether the record comes twice or the event has another id
// the second time. If it is not known whether the mail provider was asked, it is asked again, and
// sends nothing.
func TestNotificationOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	n, provider, _ := openNotifications(t)
	c, err := f.consumer(notificationGroup, 0, nil, n.handlers()...)
	require.NoError(t, err)
	id := f.order(t, 1, 0)
	created := last[NotificationRequired](t, f)
	require.NoError(t, f.cancelOrder(t.Context(), id, "because"))
	cancelled := last[NotificationRequired](t, f)
	for _, e := range []outbox.DomainEvent{created, cancelled, created} {
		r := outboxtest.NewRecord(t.Context(), t, f.app.events, e)
		for range 2 {
			require.NoError(t, c.Deliver(t.Context(), r))
		}
	}
	require.Equal(t, 2, f.count(t, `SELECT count(*) FROM notification`))
	sent, repeats := provider.counts()
	require.Equal(t, []int{2, 4}, []int{sent, repeats})
	require.Equal(t, mail{"customer-1", "your order is cancelled: because"}, provider.sent[id.String()+"/CANCELLED"])
}

// The provider has sent the mail, and its answer is lost: it is asked again, and there is one mail. Where it is not
// there at all the consumer is to try later; what it refuses is not tried again.
func TestAnswerOfTheMailProviderIsLost(t *testing.T) {
	t.Parallel()
	n, provider, closeIt := openNotifications(t)
	ask := func(customer string) error {
		return n.mail(t.Context(), NotificationRequired{now(uuid.New()), customer, Created, ""}, outbox.Metadata{})
	}
	for i := range everyLost {
		require.NoError(t, ask(fmt.Sprint(i)))
	}
	sent, repeats := provider.counts()
	require.Equal(t, []int{everyLost, 1}, []int{sent, repeats})

	require.ErrorContains(t, ask(""), "400", "nobody to send it to")
	closeIt()
	require.ErrorContains(t, ask("customer"), "mail provider")
}

// An order's history tells of failures and of what waits, and an order that has none is not found.
func TestHistory(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	id, other := f.order(t, 1, 0), f.order(t, 1, 0)
	events, err := history(t.Context(), f.db, f.schema, id)
	require.NoError(t, err)
	require.Len(t, events, 4)
	var out strings.Builder
	printHistory(&out, events)
	require.Regexp(t, `      order-events +shop\.order\.created\.v1 +\{"customerId":"customer-1","items":\[.*\],"total":1000\}`, out.String())
	require.NotContains(t, out.String(), other.String())

	f.kafka = testenv.KafkaOpts(testenv.Brokers(t))
	_, err = outboxtopics.Ensure(t.Context(), f.kafka, f.app.events, outboxtopics.Config{ReplicationFactor: -1})
	require.NoError(t, err)
	outboxtest.Drain(t.Context(), t, f.db, f.kafka, outbox.RelayConfig{Schema: f.schema, IDHeader: idHeader})
	got, err := f.readKafka(t.Context())
	require.NoError(t, err)
	require.Equal(t, sent{8, 8, 8}, got)
	events, err = history(t.Context(), f.db, f.schema, id)
	require.NoError(t, err)
	out.Reset()
	printHistory(&out, events)
	require.Equal(t, 4, strings.Count(out.String(), "  sent   "))

	events, err = history(t.Context(), f.db, f.schema, f.order(t, 1, 0))
	require.NoError(t, err)
	out.Reset()
	printHistory(&out, events)
	require.Equal(t, 4, strings.Count(out.String(), "  waits  "))

	events, err = history(t.Context(), f.db, f.schema, uuid.New())
	require.NoError(t, err)
	require.Empty(t, events)
}
