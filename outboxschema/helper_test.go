package outboxschema_test

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sr"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxschema"
	"github.com/outboxgo/outbox/outboxschema/internal/shoppb"
)

var noon = time.Date(2026, 5, 4, 12, 30, 0, 250_000_000, time.UTC)

// protoOrder is an order that is a message.
type protoOrder struct{ *shoppb.OrderCreated }

func (e protoOrder) OccurredAt() time.Time { return e.GetCreatedAt().AsTime() }
func (e protoOrder) AggregateID() string   { return strconv.FormatInt(e.GetOrderId(), 10) }

// order is an order that is a struct.
type order struct {
	OrderID   int64     `avro:"order_id" json:"order_id"`
	Lines     []line    `avro:"lines" json:"lines"`
	CreatedAt time.Time `avro:"created_at,timestamp-micros" json:"created_at"`
}

type line struct {
	ProductID int64 `avro:"product_id" json:"product_id"`
	Quantity  int32 `avro:"quantity" json:"quantity"`
}

func (e order) OccurredAt() time.Time { return e.CreatedAt }
func (e order) AggregateID() string   { return strconv.FormatInt(e.OrderID, 10) }

func orderOf(id int64) order {
	return order{OrderID: id, Lines: []line{{ProductID: 8, Quantity: 2}}, CreatedAt: noon}
}

var quiet = slog.New(slog.DiscardHandler)

// gate is a way to the schema registry that can be closed.
type gate struct {
	url    string
	closed atomic.Bool
	asked  atomic.Int64
}

func newGate(t *testing.T) *gate {
	t.Helper()
	target, err := url.Parse(testenv.SchemaRegistry(t))
	require.NoError(t, err)
	g := &gate{}
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	proxy := &httputil.ReverseProxy{Transport: transport, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		g.asked.Add(1)
		if g.closed.Load() {
			panic(http.ErrAbortHandler) // the connection breaks off
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	g.url = server.URL
	return g
}

// registry returns a new client, which has seen nothing yet.
func (g *gate) registry(t *testing.T, subject outboxschema.SubjectName) *outboxschema.Registry {
	t.Helper()
	return outboxschema.New(g.client(t), subject)
}

func (g *gate) client(t *testing.T) *sr.Client {
	t.Helper()
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	client, err := sr.NewClient(sr.URLs(g.url), sr.HTTPClient(&http.Client{Transport: transport, Timeout: 5 * time.Second}))
	require.NoError(t, err)
	return client
}

// shop is a database and a topic of the test's own.
type shop struct {
	db            *pgxpool.Pool
	schema, topic string
	brokers       []string
}

func newShop(t *testing.T) *shop {
	t.Helper()
	s := &shop{topic: "test-" + uuid.NewString(), brokers: testenv.Brokers(t)}
	s.db, s.schema = testenv.Schema(t)
	require.NoError(t, outbox.Migrate(t.Context(), s.db, outbox.MigrateConfig{Schema: s.schema}))
	testenv.CreateTopic(t, s.brokers, s.topic, 2)
	return s
}

func (s *shop) recorder(t *testing.T, definitions ...outbox.Definition) *outbox.Recorder {
	t.Helper()
	rec, err := outbox.NewRecorder(registryOf(t, definitions...), outbox.RecorderConfig{Schema: s.schema})
	require.NoError(t, err)
	return rec
}

func registryOf(t *testing.T, definitions ...outbox.Definition) *outbox.Registry {
	t.Helper()
	r, err := outbox.NewRegistry("shop", definitions...)
	require.NoError(t, err)
	return r
}

func (s *shop) record(ctx context.Context, rec *outbox.Recorder, events ...outbox.DomainEvent) error {
	return pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error { return rec.Record(ctx, tx, events...) })
}

// relay sends what is recorded until the test ends.
func (s *shop) relay(t *testing.T, mode outbox.Mode) {
	t.Helper()
	relay, err := outbox.NewRelay(s.db, testenv.KafkaOpts(s.brokers), outbox.RelayConfig{Schema: s.schema, Mode: mode, Logger: quiet})
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
}

// consume handles what arrives in the topic until the test ends, or stop is called. Its group reads from the start.
func (s *shop) consume(t *testing.T, group string, events *outbox.Registry, cfg outbox.ConsumerConfig, handlers ...outbox.Handler) (stop func()) {
	t.Helper()
	cfg.Schema, cfg.From, cfg.Logger = s.schema, outbox.FromStart, quiet
	c, err := outbox.NewConsumer(s.db, testenv.KafkaOpts(s.brokers), events, s.topic+"-"+group, cfg, handlers...)
	require.NoError(t, err)
	return testenv.Run(t, c.Run)
}

// records returns the first n records of the topic.
func (s *shop) records(t *testing.T, topic string, n int) (all []*kgo.Record) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...), kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	require.NoError(t, err)
	defer client.Close()
	for len(all) < n {
		all = append(all, client.PollFetches(ctx).Records()...)
		require.NoError(t, ctx.Err(), "%d of %d records", len(all), n)
	}
	return all
}

func headerOf(r *kgo.Record, name string) string {
	for _, h := range r.Headers {
		if h.Key == name {
			return string(h.Value)
		}
	}
	return ""
}

// await returns the next event of a channel.
func await[E any](t *testing.T, arrived <-chan E) E {
	t.Helper()
	select {
	case e := <-arrived:
		return e
	case <-time.After(testenv.Patience):
		require.FailNow(t, "nothing was handled")
		panic("unreachable")
	}
}

// into returns a handler that sends what it gets.
func into[E outbox.DomainEvent](action string, arrived chan<- E) outbox.Handler {
	return outbox.Handle(action, func(_ context.Context, _ pgx.Tx, e E, _ outbox.Metadata) error {
		arrived <- e
		return nil
	})
}
