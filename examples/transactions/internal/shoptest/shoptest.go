// Package shoptest tests an example on a real PostgreSQL and a real Kafka. All examples take the
// same steps.
package shoptest

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/transactions/internal/shop"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Open opens the store of an example.
type Open func(*shop.Shop) (shop.Store, error)

// Test requires that an example keeps the promises, and that its program ends well.
func Test(t *testing.T, open Open) {
	t.Run("events arrive and are handled once", func(t *testing.T) {
		t.Parallel()
		testArrival(t, open)
	})
	t.Run("a rollback takes row and event", func(t *testing.T) {
		t.Parallel()
		testRollback(t, open)
	})
	t.Run("program", func(t *testing.T) {
		t.Parallel()
		var out bytes.Buffer
		require.NoError(t, shop.Run(t.Context(), &out, config(t), open))
		require.Regexp(t, `^placed: order-\S+, shipments: 1\n$`, out.String())
	})
}

// testArrival lets the handler fail once after it has written, and sends an event again.
func testArrival(t *testing.T, open Open) {
	f := newFixture(t, config(t), open)
	f.run(t)
	require.NoError(t, f.store.Place(t.Context(), order("order-1", "tea")))
	first := f.next(t)
	require.Equal(t, "order-1", string(first.Key))
	f.awaitShipment(t, "order-1")
	require.EqualValues(t, 2, f.calls.Load(), "the handler has failed once")

	f.send(t, first)
	require.Equal(t, first.Value, f.next(t).Value, "the same event again")
	select {
	case <-f.repeated:
	case <-time.After(testenv.Patience):
		require.Fail(t, "the event was not repeated")
	}
	require.Error(t, f.store.Place(t.Context(), order("order-1", "coffee")), "there is such an order")
	require.NoError(t, f.store.Place(t.Context(), order("order-2", "tea")))
	require.Equal(t, "order-2", string(f.next(t).Key), "nothing in between")
	f.awaitShipment(t, "order-2")
	require.Equal(t, 2, f.count(t, `SELECT count(*) FROM shipments WHERE quantity = 2`), "one for each order")
	require.Equal(t, 2, f.count(t, `SELECT count(*) FROM event_handled`))
	require.EqualValues(t, 3, f.calls.Load())
}

// sqlRefuse lets a transaction with an order of unicorns fail at its commit.
const sqlRefuse = `
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'out of unicorns'; END $$;
CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED
   FOR EACH ROW WHEN (NEW.product = 'unicorn') EXECUTE FUNCTION refuse();`

func testRollback(t *testing.T, open Open) {
	cfg := config(t)
	recorded := 0
	request, end := context.WithCancel(t.Context())
	cfg.Recording.Hooks.Recording = func(ctx context.Context, events []outbox.DomainEvent) (context.Context, func(error)) {
		return ctx, func(err error) {
			if err != nil {
				return
			}
			recorded++
			if events[0].(shop.OrderPlaced).Product == "lemonade" {
				end()
			}
		}
	}
	f := newFixture(t, cfg, open)
	_, err := f.Pool.Exec(t.Context(), sqlRefuse)
	require.NoError(t, err)
	require.ErrorContains(t, f.store.Place(t.Context(), order("order-1", "unicorn")), "out of unicorns")
	require.ErrorIs(t, f.store.Place(request, order("order-1", "lemonade")), context.Canceled)
	require.Equal(t, 2, recorded, "events were recorded, and rolled back")
	require.Zero(t, f.count(t, `SELECT count(*) FROM orders`))
	require.Zero(t, f.count(t, `SELECT count(*) FROM outbox`))
	require.NoError(t, f.store.Place(t.Context(), order("order-1", "tea")), "it goes on")
	require.Equal(t, 1, f.count(t, `SELECT count(*) FROM orders JOIN outbox ON aggregate_id = orders.id`))
}

func order(id, product string) shop.OrderPlaced {
	return shop.OrderPlaced{OrderID: id, Product: product, Quantity: 2, At: time.Now()}
}

// config returns a configuration with a database and a topic of its own.
func config(t *testing.T) shop.Config {
	t.Helper()
	brokers := testenv.RealBrokers(t)
	db := testenv.OtherDatabase(t).Config()
	address, err := url.Parse(db.ConnString())
	require.NoError(t, err)
	address.Path = db.ConnConfig.Database
	topic := "transactions-" + uuid.NewString()
	testenv.CreateTopic(t, brokers, topic, 1)
	return shop.Config{DatabaseURL: address.String(), Kafka: testenv.KafkaOpts(brokers), Topic: topic}
}

// ForPQ returns an address for lib/pq: without what pgx alone knows, and with statements that go out in one message,
// as PgBouncer needs them outside of transactions.
func ForPQ(t *testing.T, address string) string {
	t.Helper()
	u, err := url.Parse(address)
	require.NoError(t, err)
	query := u.Query()
	if query.Has("default_query_exec_mode") {
		query.Del("default_query_exec_mode")
		query.Set("binary_parameters", "yes")
		query.Set("sslmode", "disable") // lib/pq requires it otherwise, and pgx does not
	}
	u.RawQuery = query.Encode()
	return u.String()
}

// fixture is a shop and its store, which do not run yet.
type fixture struct {
	*shop.Shop
	store    shop.Store
	client   *kgo.Client   // reads the topic
	calls    atomic.Int64  // of the handler
	repeated chan struct{} // gets one for each repeat
}

func newFixture(t *testing.T, cfg shop.Config, open Open) *fixture {
	t.Helper()
	s, err := shop.New(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(s.Close)
	f := &fixture{Shop: s, repeated: make(chan struct{}, 10)}
	f.store, err = open(s)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.store.Close()) })
	f.client, err = kgo.NewClient(append(cfg.Kafka, kgo.ConsumeTopics(cfg.Topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	require.NoError(t, err)
	t.Cleanup(f.client.Close)
	return f
}

// run runs the relay and the consumer until the test ends.
func (f *fixture) run(t *testing.T) {
	t.Helper()
	cfg := outbox.HandlerConfig{Retry: outbox.RetryPolicy{RetryWait: 10 * time.Millisecond}, Logger: slog.New(slog.DiscardHandler)}
	cfg.Hooks.Repeated = func(outbox.Metadata, string) { f.repeated <- struct{}{} }
	consumer, err := f.Consumer(cfg, f.ship)
	require.NoError(t, err)
	testenv.Run(t, f.Relay.Run)
	testenv.Run(t, consumer.Run)
}

// ship fails once, after the store has written.
func (f *fixture) ship(ctx context.Context, tx *sql.Tx, e shop.OrderPlaced, m outbox.Metadata) error {
	err := f.store.Ship(ctx, tx, e, m)
	if f.calls.Add(1) == 1 && err == nil {
		err = errors.New("the first call fails")
	}
	return err
}

// next returns the next record of the topic.
func (f *fixture) next(t *testing.T) *kgo.Record {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	fetches := f.client.PollRecords(ctx, 1)
	require.NoError(t, fetches.Err())
	return fetches.Records()[0]
}

// send sends a record once more.
func (f *fixture) send(t *testing.T, r *kgo.Record) {
	t.Helper()
	again := &kgo.Record{Topic: r.Topic, Key: r.Key, Value: r.Value, Headers: r.Headers}
	require.NoError(t, f.client.ProduceSync(t.Context(), again).FirstErr())
}

func (f *fixture) awaitShipment(t *testing.T, order string) {
	t.Helper()
	require.Eventually(t, func() bool {
		return f.count(t, `SELECT count(*) FROM shipments WHERE order_id = $1`, order) > 0
	}, testenv.Patience, 10*time.Millisecond)
}

func (f *fixture) count(t *testing.T, sql string, args ...any) (n int) {
	t.Helper()
	require.NoError(t, f.Pool.QueryRow(t.Context(), sql, args...).Scan(&n))
	return n
}
