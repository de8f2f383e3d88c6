package outboxotel_test

import (
	"context"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxotel"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/exemplar"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// placed and shipped are the events of these tests.
type placed struct {
	ID     string    `json:"id"`
	At     time.Time `json:"at"`
	Filler []byte    `json:"filler"`
}

type shipped struct {
	ID string    `json:"id"`
	At time.Time `json:"at"`
}

func (e placed) OccurredAt() time.Time  { return e.At }
func (e shipped) OccurredAt() time.Time { return e.At }
func (e placed) order() string          { return e.ID }
func (e shipped) order() string         { return e.ID }

const (
	placedType  = "test.order.placed.v1"
	shippedType = "test.parcel.shipped.v1"
)

// scene is a service with telemetry whose metrics and spans a test can read.
type scene struct {
	db              *pgxpool.Pool
	schema          string
	orders, parcels string // topics
	brokers         []string
	events          *outbox.Registry
	tel             *outboxotel.Telemetry
	rec             *outbox.Recorder
	reader          *metric.ManualReader
	spans           *tracetest.InMemoryExporter
	tracers         *trace.TracerProvider
}

// newScene returns a scene whose topics take batches of 2,000 bytes.
func newScene(t testing.TB, sampler trace.Sampler) *scene {
	t.Helper()
	db, schema := testenv.Migrated(t)
	id := uuid.NewString()
	s := &scene{
		db: db, schema: schema, orders: "orders-" + id, parcels: "parcels-" + id, brokers: testenv.Brokers(t),
		reader: metric.NewManualReader(), spans: tracetest.NewInMemoryExporter(),
	}
	for _, topic := range []string{s.orders, s.parcels, s.orders + ".dlq"} {
		testenv.CreateTopic(t, s.brokers, topic, 1, "max.message.bytes", "2000")
	}
	s.tracers = trace.NewTracerProvider(trace.WithSyncer(s.spans), trace.WithSampler(sampler))
	var err error
	s.tel, err = outboxotel.New(outboxotel.Config{
		MeterProvider:  metric.NewMeterProvider(metric.WithReader(s.reader), metric.WithExemplarFilter(exemplar.TraceBasedFilter)),
		TracerProvider: s.tracers,
		Interval:       time.Nanosecond, StaleAfter: time.Second, Attributes: []attribute.KeyValue{attribute.String("test", "yes")},
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.tel.Close()) })
	s.events, err = outbox.NewRegistry("test",
		outbox.Event(placedType, "Order", placed.order).Topic(s.orders),
		outbox.Event(shippedType, "Parcel", shipped.order).Topic(s.parcels))
	require.NoError(t, err)
	s.rec = s.recorder(t, s.tel.Recorder(outbox.RecorderConfig{}))
	return s
}

func (s *scene) recorder(t testing.TB, cfg outbox.RecorderConfig) *outbox.Recorder {
	t.Helper()
	cfg.Schema = s.schema
	rec, err := outbox.NewRecorder(s.events, cfg)
	require.NoError(t, err)
	return rec
}

// commit records events in a transaction of their own.
func (s *scene) commit(ctx context.Context, t testing.TB, events ...outbox.DomainEvent) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error { return s.rec.Record(ctx, tx, events...) }))
}

func orders(ids ...string) (all []outbox.DomainEvent) {
	for _, id := range ids {
		all = append(all, placed{ID: id, At: time.Now()})
	}
	return all
}

// quiet discards the warnings that these tests provoke.
var quiet = slog.New(slog.DiscardHandler)

// relay runs a relay until the test ends, or stop is called.
func (s *scene) relay(t testing.TB, cfg outbox.RelayConfig) (stop func()) {
	t.Helper()
	cfg.Schema, cfg.PollInterval, cfg.Logger = s.schema, 10*time.Millisecond, quiet
	relay, err := outbox.NewRelay(s.db, testenv.KafkaOpts(s.brokers), s.tel.Relay(cfg))
	require.NoError(t, err)
	return testenv.Run(t, relay.Run)
}

// consumer returns a consumer of a group of its own.
func (s *scene) consumer(t testing.TB, cfg outbox.ConsumerConfig, handlers ...outbox.Handler) *outbox.Consumer {
	t.Helper()
	cfg.Schema, cfg.From, cfg.Logger = s.schema, outbox.FromStart, quiet
	c, err := outbox.NewConsumer(s.db, testenv.KafkaOpts(s.brokers), s.events, s.orders, s.tel.Consumer(s.orders, cfg), handlers...)
	require.NoError(t, err)
	return c
}

// watch has the telemetry watch the database, and consumers.
func (s *scene) watch(t testing.TB, consumers ...*outbox.Consumer) {
	t.Helper()
	require.NoError(t, s.tel.WatchDatabase(s.db, s.schema))
	require.NoError(t, s.tel.WatchConsumers(consumers...))
}

// eventually waits for a condition.
func eventually(t testing.TB, met func() bool, msg string, args ...any) {
	t.Helper()
	require.Eventuallyf(t, met, testenv.Patience, 10*time.Millisecond, msg, args...)
}

// metrics are the metrics of one collection, by name.
type metrics map[string]metricdata.Metrics

func (s *scene) collect(t testing.TB) metrics {
	t.Helper()
	var all metricdata.ResourceMetrics
	require.NoError(t, s.reader.Collect(t.Context(), &all))
	m := metrics{}
	for _, scope := range all.ScopeMetrics {
		for _, one := range scope.Metrics {
			m[one.Name] = one
		}
	}
	return m
}

// value returns the sum of the points of a metric that have all of the attributes. For a
// histogram it is the number of values. Attributes are pairs of name and value; an empty
// value means that the point does not have the attribute.
func (m metrics) value(name string, attributes ...string) (sum float64) {
	is := func(set attribute.Set) bool {
		for pair := range slices.Chunk(attributes, 2) {
			if v, _ := set.Value(attribute.Key(pair[0])); v.String() != pair[1] {
				return false
			}
		}
		return true
	}
	add := func(set attribute.Set, v float64) {
		if is(set) {
			sum += v
		}
	}
	switch data := m[name].Data.(type) {
	case metricdata.Sum[int64]:
		for _, p := range data.DataPoints {
			add(p.Attributes, float64(p.Value))
		}
	case metricdata.Gauge[int64]:
		for _, p := range data.DataPoints {
			add(p.Attributes, float64(p.Value))
		}
	case metricdata.Gauge[float64]:
		for _, p := range data.DataPoints {
			add(p.Attributes, p.Value)
		}
	case metricdata.Histogram[int64]:
		for _, p := range data.DataPoints {
			add(p.Attributes, float64(p.Count))
		}
	case metricdata.Histogram[float64]:
		for _, p := range data.DataPoints {
			add(p.Attributes, float64(p.Count))
		}
	}
	return sum
}

// named returns the spans of a name that have ended.
func (s *scene) named(name string) (spans tracetest.SpanStubs) {
	for _, span := range s.spans.GetSpans() {
		if span.Name == name {
			spans = append(spans, span)
		}
	}
	return spans
}

// one waits for a span of a name, and requires it to be the only one.
func (s *scene) one(t testing.TB, name string) tracetest.SpanStub {
	t.Helper()
	eventually(t, func() bool { return len(s.named(name)) > 0 }, "no span %s", name)
	spans := s.named(name)
	require.Len(t, spans, 1)
	return spans[0]
}

func attributesOf(span tracetest.SpanStub) map[string]string {
	all := map[string]string{}
	for _, a := range span.Attributes {
		all[string(a.Key)] = a.Value.String()
	}
	return all
}

// nothing is an exporter that discards spans.
type nothing struct{}

func (nothing) ExportSpans(context.Context, []trace.ReadOnlySpan) error { return nil }
func (nothing) Shutdown(context.Context) error                          { return nil }
