package itest

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxdlq"
)

// saleRecord is a sale as a relay sends it.
func (s *consumerFixture) saleRecord(id string, value []byte) *kgo.Record {
	return &kgo.Record{Topic: s.topic, Key: []byte("p"), Value: value, Timestamp: time.Now(), Headers: []kgo.RecordHeader{
		{Key: "ce_specversion", Value: []byte("1.0")}, {Key: "ce_id", Value: []byte(id)}, {Key: "ce_source", Value: []byte("shop")},
		{Key: "ce_type", Value: []byte(saleType)}, {Key: "content-type", Value: []byte("application/json")},
	}}
}

// send puts records into the topic as they are.
func (s *consumerFixture) send(t testing.TB, records ...*kgo.Record) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...), kgo.ProducerBatchMaxBytes(20<<20), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	require.NoError(t, err)
	defer client.Close()
	require.NoError(t, client.ProduceSync(background, records...).FirstErr())
}

var oneSale = []byte(`{"product":"p","amount":1}`)

// An event that arrives again is skipped, in the same poll, in a later one, and
// after a restart; another action and another group have not seen it.
func TestRepeats(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	var repeats atomic.Int32
	group := "g-" + uuid.NewString()
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Hooks: outbox.ConsumerHooks{
		Repeated: func(outbox.Metadata, string) { repeats.Add(1) },
	}, From: outbox.FromStart}}
	for _, id := range []string{uuid.NewString(), "not a uuid", strings.Repeat("long", 100)} {
		for range 3 {
			s.send(t, s.saleRecord(id, oneSale), s.saleRecord(id, oneSale))
		}
	}
	for round := range 2 {
		stop := testenv.Run(t, s.groupConsumer(t, group, cfg, outbox.Handle("COUNTED", s.count)).Run)
		s.send(t, s.saleRecord("not a uuid", oneSale), s.saleRecord("end "+uuid.NewString(), oneSale))
		require.Eventually(t, func() bool { return repeats.Load() == int32(16+round) && s.counts(t)["p"] == 4+round }, testenv.Patience, 10*time.Millisecond)
		stop()
	}
	require.Equal(t, map[string]int{"p": 5}, s.counts(t))
	require.EqualValues(t, 17, repeats.Load())
	group = "another-" + uuid.NewString()
	testenv.Run(t, s.groupConsumer(t, group, cfg, outbox.Handle("COUNTED", s.count), outbox.Handle("COUNTED_AGAIN", s.count)).Run)
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 15 }, testenv.Patience, 10*time.Millisecond)
}

// OncePer is the user's own idempotency key: here each product is counted once,
// whatever the event and its type.
func TestOncePer(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 3)
	listed := outbox.OncePer(outbox.Handle("LISTED", s.count), func(e sale, _ outbox.Metadata) (string, string) { return "Product", e.Product })
	var ends atomic.Int32
	end := outbox.HandleNoTx("END", func(_ context.Context, e sale, _ outbox.Metadata) error {
		if e.Product == "end" {
			ends.Add(1)
		}
		return nil
	})
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, listed, end).Run)
	testenv.Run(t, s.relay(t, quick).Run)
	for range 20 {
		s.sell(t, sale{Product: "a", Amount: 1}, sale{Product: "b", Amount: 1}, sale{Product: "end", Amount: 1})
	}
	require.Eventually(t, func() bool { return ends.Load() == 20 }, testenv.Patience, 10*time.Millisecond)
	require.Eventually(t, func() bool {
		return assert.ObjectsAreEqual(map[string]int{"a": 1, "b": 1, "end": 1}, s.counts(t))
	}, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, 3, s.relayFixture.count(t, "event_handled"))
}

// A key that event_handled cannot hold is the event's fault, and no try is wasted.
func TestImpossibleKey(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	h := outbox.OncePer(outbox.Handle("LISTED", s.count), func(e sale, _ outbox.Metadata) (string, string) { return "Product", e.Product })
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, h).Run)
	s.send(t, s.saleRecord(uuid.NewString(), []byte(`{"product":"a\u0000b"}`)), s.saleRecord(uuid.NewString(), []byte(`{"product":""}`)), s.saleRecord(uuid.NewString(), oneSale))
	for _, r := range s.deadLetters(t, 2) {
		h := deadLetterHeaders(r)
		require.Equal(t, []string{"permanent", "1"}, []string{h["dlq_error_class"], h["dlq_attempts"]})
		require.Contains(t, h["dlq_error"], "aggregate_id of the key of LISTED")
	}
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 1 }, testenv.Patience, 10*time.Millisecond)
}

// A batch handler gets what arrived together, without repeats; if it fails, each
// event alone.
func TestHandleBatch(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	var mu sync.Mutex
	var sizes []int
	h := outbox.HandleBatch("TOTALS", func(ctx context.Context, tx pgx.Tx, sales []outbox.Received[sale]) error {
		mu.Lock()
		sizes = append(sizes, len(sales))
		mu.Unlock()
		total := 0
		for _, r := range sales {
			if r.Event.Poison != "" {
				return outbox.Permanent(errors.New(r.Event.Poison))
			}
			total += r.Event.Amount
		}
		return s.count(ctx, tx, sale{Product: "total", Amount: total}, sales[0].Metadata)
	})
	repeated := s.saleRecord(uuid.NewString(), oneSale)
	records := []*kgo.Record{repeated}
	for range 98 {
		records = append(records, s.saleRecord(uuid.NewString(), oneSale))
	}
	s.send(t, append(records, s.saleRecord(repeated.Topic, oneSale), &kgo.Record{Topic: s.topic, Value: repeated.Value, Headers: repeated.Headers})...)
	stop := testenv.Run(t, s.groupConsumer(t, "b-"+s.topic, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, MaxPoll: 1000}}, h).Run)
	require.Eventually(t, func() bool { return s.counts(t)["total"] == 100 }, testenv.Patience, 10*time.Millisecond)
	stop()
	mu.Lock()
	require.Less(t, len(sizes), 10, "in batches: %v", sizes)
	sizes = nil
	mu.Unlock()

	s.send(t, s.saleRecord(uuid.NewString(), oneSale), s.saleRecord(uuid.NewString(), []byte(`{"poison":"bad"}`)), s.saleRecord(uuid.NewString(), oneSale))
	testenv.Run(t, s.groupConsumer(t, "b-"+s.topic, outbox.ConsumerConfig{}, h).Run)
	require.Equal(t, "bad", deadLetterHeaders(s.deadLetters(t, 1)[0])["dlq_error"])
	require.Eventually(t, func() bool { return s.counts(t)["total"] == 102 }, testenv.Patience, 10*time.Millisecond)
}

// Handlers without a transaction leave no note, run after the others have
// committed, and get retries of their own.
func TestHandleNoTx(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	var calls atomic.Int32
	h := outbox.HandleNoTx("CACHE_INVALIDATED", func(_ context.Context, e sale, m outbox.Metadata) error {
		assert.Positive(t, s.counts(t)[e.Product], "committed before")
		if calls.Add(1); m.Attempt < 3 {
			return errors.New("cache is away")
		}
		return nil
	})
	cfg := outbox.HandlerConfig{From: outbox.FromStart, Retry: outbox.RetryPolicy{MaxOutage: -1}}
	c := s.consumer(t, outbox.ConsumerConfig{HandlerConfig: cfg}, h, outbox.Handle("COUNTED", s.count))
	require.ErrorContains(t, c.Deliver(background, s.saleRecord(uuid.NewString(), []byte(`{"product":"alone","amount":1}`))), "cache is away")
	calls.Store(0)
	testenv.Run(t, c.Run)
	s.send(t, s.saleRecord(uuid.NewString(), oneSale))
	require.Eventually(t, func() bool { return calls.Load() == 3 }, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, 1, s.counts(t)["p"])
	require.Equal(t, 2, s.relayFixture.count(t, "event_handled"))
}

// A consumer whose handlers need no PostgreSQL runs without.
func TestConsumerWithoutPostgres(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	var calls atomic.Int32
	c, err := outbox.NewConsumer(nil, testenv.KafkaOpts(s.brokers), s.events, "g-"+s.topic, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}},
		outbox.HandleNoTx("SEEN", func(context.Context, sale, outbox.Metadata) error { calls.Add(1); return nil }))
	require.NoError(t, err)
	testenv.Run(t, c.Run)
	s.send(t, s.saleRecord(uuid.NewString(), oneSale))
	require.Eventually(t, func() bool { return calls.Load() == 1 }, testenv.Patience, 10*time.Millisecond)
}

// One action fails for good, the other does not notice: only the one is a dead
// deadLetter, and only the one runs when it is sent back.
func TestActionsAreApart(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	var broken atomic.Bool
	broken.Store(true)
	group := "apart-" + s.topic
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}
	fragile := outbox.Handle("FRAGILE", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		if broken.Load() {
			return outbox.Permanent(errors.New("broken"))
		}
		return s.count(ctx, tx, sale{Product: "fragile", Amount: 1}, m)
	})
	var seen atomic.Int32
	testenv.Run(t, s.groupConsumer(t, group, cfg, fragile, outbox.Handle("COUNTED", s.count),
		outbox.HandleNoTx("SEEN", func(context.Context, sale, outbox.Metadata) error { seen.Add(1); return nil })).Run)
	var others atomic.Int32
	testenv.Run(t, s.groupConsumer(t, "other-"+s.topic, cfg, outbox.HandleNoTx("SEEN", func(context.Context, sale, outbox.Metadata) error { others.Add(1); return nil })).Run)
	s.send(t, s.saleRecord(uuid.NewString(), oneSale))
	deadLetter := s.deadLetters(t, 1)[0]
	require.Equal(t, "FRAGILE", deadLetterHeaders(deadLetter)["dlq_action"])
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 1 && others.Load() == 1 }, testenv.Patience, 10*time.Millisecond)

	broken.Store(false)
	report, err := outboxdlq.Replay(background, testenv.KafkaOpts(s.brokers), outboxdlq.ReplayConfig{Topic: deadLetter.Topic})
	require.NoError(t, err)
	require.Equal(t, 1, report.Sent)
	s.send(t, s.saleRecord(uuid.NewString(), oneSale))
	require.Eventually(t, func() bool { return s.counts(t)["fragile"] == 2 && others.Load() == 2 }, testenv.Patience, 10*time.Millisecond)
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 2 && seen.Load() == 2 }, testenv.Patience, 10*time.Millisecond)
}

// Event types without a handler: passed over and counted, or dead letters.
func TestUnknownTypes(t *testing.T) {
	t.Parallel()
	for _, unknown := range []outbox.UnknownTypes{outbox.SkipUnknown, outbox.DeadLetterUnknown} {
		s := newConsumerFixture(t, 1)
		var calls atomic.Int32
		cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Unknown: unknown, Hooks: outbox.ConsumerHooks{
			Unknown: func(m outbox.Metadata) { calls.Add(1); assert.Equal(t, "someone.elses.v1", m.Type) },
		}, From: outbox.FromStart}}
		r := s.saleRecord(uuid.NewString(), oneSale)
		r.Headers[3].Value = []byte("someone.elses.v1")
		s.send(t, r, s.saleRecord(uuid.NewString(), oneSale))
		testenv.Run(t, s.consumer(t, cfg, outbox.Handle("COUNTED", s.count)).Run)
		if unknown == outbox.DeadLetterUnknown {
			h := deadLetterHeaders(s.deadLetters(t, 1)[0])
			require.Equal(t, []string{"unknown_type", "", "0"}, []string{h["dlq_error_class"], h["dlq_action"], h["dlq_attempts"]})
			require.Contains(t, h["dlq_error"], "someone.elses.v1")
		}
		require.Eventually(t, func() bool { return s.counts(t)["p"] == 1 }, testenv.Patience, 10*time.Millisecond)
		require.Eventually(t, func() bool { return calls.Load() > 0 }, testenv.Patience, time.Millisecond, "called behind the commit")
		require.EqualValues(t, 1, calls.Load())
	}
}

// A decoder may pass over records that are not for this consumer.
func TestDecodePassesOver(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	var decoded atomic.Int32
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Unknown: outbox.DeadLetterUnknown, Hooks: outbox.ConsumerHooks{DeadLettered: func(outbox.Metadata, string, string, error) { assert.Fail(t, "dead letter") }}, From: outbox.FromStart}, Decode: func(r *kgo.Record) (*outbox.Message, error) {
		decoded.Add(1)
		if m, err := outbox.DecodeCloudEvent(r); err != nil || m.Source == "shop" {
			return m, err
		}
		return nil, nil
	}}
	testenv.Run(t, s.consumer(t, cfg, outbox.Handle("COUNTED", s.count)).Run)
	other := s.saleRecord(uuid.NewString(), oneSale)
	other.Headers[2].Value = []byte("another shop")
	s.send(t, other, s.saleRecord(uuid.NewString(), oneSale))
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 1 }, testenv.Patience, 10*time.Millisecond)
	require.EqualValues(t, 2, decoded.Load())
}

type saleV2 struct {
	Product string `json:"product"`
	Cents   int    `json:"cents"`
}

type saleV3 struct {
	Product string `json:"product"`
	Cents   int    `json:"cents"`
	Note    string `json:"note"`
}

func (saleV2) OccurredAt() time.Time { return time.Unix(1, 0) }
func (saleV3) OccurredAt() time.Time { return time.Unix(1, 0) }

// A handler of version 3 gets events of all versions, one of version 1 only those.
func TestUpcast(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1,
		outbox.Event("test.sale.made.v2", "Product", func(e saleV2) string { return e.Product }),
		outbox.Event("test.sale.made.v3", "Product", func(e saleV3) string { return e.Product }))
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Upcasters: []outbox.Upcaster{
		outbox.Upcast(func(e saleV2) saleV3 { return saleV3{e.Product, e.Cents, "from v2"} }),
		outbox.Upcast(func(e sale) saleV2 { return saleV2{e.Product, e.Amount * 100} }),
	}, From: outbox.FromStart}}
	var mu sync.Mutex
	var got []any
	keep := func(e any) error { mu.Lock(); defer mu.Unlock(); got = append(got, e); return nil }
	c := s.consumer(t, cfg,
		outbox.HandleNoTx("NEW", func(_ context.Context, e saleV3, m outbox.Metadata) error { return keep([]any{e, m.Type}) }),
		outbox.HandleNoTx("OLD", func(_ context.Context, e sale, _ outbox.Metadata) error { return keep(e) }))
	require.ElementsMatch(t, []string{s.topic, "sale-events"}, c.Topics())
	v2, v3 := s.saleRecord("2", []byte(`{"product":"p","cents":7,"unknown field":[]}`)), s.saleRecord("3", []byte(`{"product":"p","cents":8,"note":"n"}`))
	v2.Headers[3].Value, v3.Headers[3].Value = []byte("test.sale.made.v2"), []byte("test.sale.made.v3")
	for _, r := range []*kgo.Record{s.saleRecord("1", oneSale), v2, v3} {
		require.NoError(t, c.Deliver(background, r))
	}
	require.Equal(t, []any{
		sale{Product: "p", Amount: 1}, []any{saleV3{"p", 100, "from v2"}, saleType},
		[]any{saleV3{"p", 7, "from v2"}, "test.sale.made.v2"},
		[]any{saleV3{"p", 8, "n"}, "test.sale.made.v3"},
	}, got)
}

// A payload is decoded by the codec of its content type.
func TestContentTypes(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	csv := outbox.Codec{ContentType: "text/csv", Encode: func(context.Context, any) ([]byte, error) { return nil, nil }, Decode: func(_ context.Context, data []byte, event any) error {
		product, amount, _ := bytes.Cut(data, []byte(","))
		n, err := strconv.Atoi(string(amount))
		*event.(*sale) = sale{Product: string(product), Amount: n}
		return err
	}}
	c := s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Codecs: []outbox.Codec{csv}}}, outbox.Handle("COUNTED", s.count))
	for _, tt := range []struct{ contentType, data, wantErr string }{
		{"application/json", `{"product":"json","amount":1}`, ""},
		{"application/json; charset=utf-8", `{"product":"json","amount":1}`, ""},
		{"application/vnd.sale+json", `{"product":"json","amount":1}`, ""},
		{"", `{"product":"none","amount":1}`, ""},
		{"text/csv", `csv,3`, ""},
		{"text/csv", `csv,three`, "data is malformed"},
		{"application/octet-stream", `x`, "content-type"},
		{"application/json", `{"product":7}`, "data is malformed"},
		{"application/json", `{"product":`, "data is malformed"},
		{"application/json", ``, "data is malformed"},
		{"application/json", `null`, "data is malformed: it is null"},
		{"application/json", `{}`, "data is malformed: it has no member of itest.sale"},
	} {
		r := s.saleRecord(uuid.NewString(), []byte(tt.data))
		r.Headers[4].Value = []byte(tt.contentType)
		err := c.Deliver(background, r)
		if tt.wantErr == "" {
			require.NoError(t, err, tt)
			continue
		}
		var field *outbox.FieldError
		require.ErrorAs(t, err, &field)
		require.ErrorContains(t, err, tt.wantErr)
	}
	require.Equal(t, map[string]int{"json": 3, "none": 1, "csv": 3}, s.counts(t))
}

// Bad input never stops a consumer: it is in the dead-letter topic, and what
// follows is handled.
func TestBadRecords(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	bare := &kgo.Record{Topic: s.topic, Value: []byte(`{"product":"p"}`)}
	structured := &kgo.Record{Topic: s.topic, Value: []byte(`{"specversion":"1.0"`), Headers: []kgo.RecordHeader{{Key: "content-type", Value: []byte("application/cloudevents+json")}}}
	records := []*kgo.Record{
		bare, structured, {Topic: s.topic}, {Topic: s.topic, Value: []byte{0xff, 0, 0xfe}, Key: []byte{0xff}},
		s.saleRecord("x", []byte(`{"amount":"one"}`)), s.saleRecord("", oneSale), s.saleRecord("a\x00b", oneSale),
	}
	s.send(t, append(records, s.saleRecord(uuid.NewString(), oneSale))...)
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, outbox.Handle("COUNTED", s.count)).Run)
	for _, r := range s.deadLetters(t, len(records)) { // in any order, because they have no key in common
		headers := deadLetterHeaders(r)
		require.Equal(t, "undecodable", headers["dlq_error_class"])
		offset, err := strconv.Atoi(headers[outbox.DeadLetterOriginalOffset])
		require.NoError(t, err)
		require.Equal(t, [][]byte{records[offset].Key, records[offset].Value}, [][]byte{r.Key, r.Value})
	}
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 1 }, testenv.Patience, 10*time.Millisecond)
}

// A record of 10 MB that the dead-letter topic does not take goes there without
// its value, rather than stop the partition.
func TestHugeRecord(t *testing.T) {
	t.Parallel()
	testenv.RealBrokers(t)
	s := newConsumerFixtureOn(t, func(h *relayFixture) {
		testenv.CreateTopic(t, h.brokers, h.topic, 1, "max.message.bytes", "20000000")
		testenv.CreateTopic(t, h.brokers, h.topic+".dlq", 1)
	})
	const size = 10_000_000
	s.send(t, s.saleRecord(uuid.NewString(), []byte(random(size))), s.saleRecord(uuid.NewString(), oneSale))
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, outbox.Handle("COUNTED", s.count)).Run)
	r := s.deadLetters(t, 1)[0]
	require.Empty(t, r.Value)
	require.Equal(t, strconv.Itoa(size), deadLetterHeaders(r)["dlq_value_omitted"])
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 1 }, testenv.Patience, 10*time.Millisecond)
}

// Deadlocks and serialization failures are repeated, and no try is counted until there have been
// many. An event whose handler always causes them is dead-lettered.
func TestDeadlocksAreRepeated(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	var conflicts, failed, calls atomic.Int32
	h := outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		n := calls.Add(1)
		if n <= 8 || e.Poison != "" {
			_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'made up' USING ERRCODE = '`+[]string{"40P01", "40001"}[n%2]+`'; END $$`)
			return err
		}
		assert.Equal(t, 1, m.Attempt)
		return s.count(ctx, tx, e, m)
	})
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Hooks: outbox.ConsumerHooks{
		Conflicted: func(outbox.Metadata, string, error) { conflicts.Add(1) },
		Failed:     func(outbox.Metadata, string, error, bool) { failed.Add(1) },
	}, From: outbox.FromStart, Retry: outbox.RetryPolicy{MaxOutage: -1}}}, h).Run)
	s.send(t, s.saleRecord(uuid.NewString(), oneSale))
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 1 }, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, []int32{8, 0}, []int32{conflicts.Load(), failed.Load()})

	s.send(t, s.saleRecord(uuid.NewString(), []byte(`{"product":"p","poison":"conflict"}`)), s.saleRecord(uuid.NewString(), oneSale))
	require.Contains(t, deadLetterHeaders(s.deadLetters(t, 1)[0])["dlq_error_class"], "postgres_40")
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 2 }, testenv.Patience, 10*time.Millisecond)
	require.EqualValues(t, 4, failed.Load())
	require.Less(t, calls.Load(), int32(65), "at most ten conflicts before each of four attempts, and not as fast as PostgreSQL answers")
}

// What cannot work is refused by the constructor, with every bad thing by name.
func TestConsumerConfig(t *testing.T) {
	t.Parallel()
	events, err := outbox.NewRegistry("shop", outbox.Event(saleType, "Product", sale.productID),
		outbox.Event("test.sale.made.v2", "Product", func(e saleV2) string { return e.Product }))
	require.NoError(t, err)
	db, err := pgxpool.New(background, "postgres://nobody@127.0.0.1:1/none")
	require.NoError(t, err)
	defer db.Close()
	nothing := func(context.Context, sale, outbox.Metadata) error { return nil }
	good := outbox.HandleNoTx("GOOD", nothing)
	count := func(context.Context, pgx.Tx, sale, outbox.Metadata) error { return nil }
	ok := outbox.ConsumerConfig{}
	for _, tt := range []struct {
		name     string
		cfg      outbox.ConsumerConfig
		kafka    []kgo.Opt
		handlers []outbox.Handler
		want     []string
	}{
		{"good", ok, nil, []outbox.Handler{good}, nil},
		{"negative numbers", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{RetryWait: -1}, Unknown: 9, Schema: "a\x00", MaxPoll: -1}}, nil, []outbox.Handler{good},
			[]string{"field MaxPoll is -1", "field RetryWait", "field Unknown is 9", "field Schema"}},
		{"times in the wrong order", outbox.ConsumerConfig{MaxPollInterval: time.Second, HandlerConfig: outbox.HandlerConfig{MaxPoll: 10_001}}, []kgo.Opt{kgo.HeartbeatInterval(30 * time.Second)}, []outbox.Handler{good},
			[]string{"HeartbeatInterval: 30s must be above 0 and shorter than SessionTimeout, 30s", "MaxPollInterval is 1s: must be longer than SessionTimeout, 30s by default", "MaxPoll is 10001: at most 10000"}},
		{"options that are not the host's", ok, []kgo.Opt{kgo.ConsumerGroup("mine"), kgo.ConsumeTopics("t"), kgo.TransactionalID("x"),
			kgo.OnPartitionsRevoked(func(context.Context, *kgo.Client, map[string][]int32) {})}, []outbox.Handler{good},
			[]string{"ConsumerGroup", "ConsumeTopics", "TransactionalID", "OnPartitionsRevoked"}},
		{"no handlers", ok, nil, nil, []string{"handlers is empty"}},
		{"bad handlers", ok, nil, []outbox.Handler{nil, outbox.HandleNoTx("", nothing), outbox.HandleNoTx[sale]("NIL", nil), good, good,
			outbox.HandleNoTx("STRANGE", func(context.Context, saleV3, outbox.Metadata) error { return nil })},
			[]string{"handler 0 must not be nil", "action is empty", "function of NIL must not be nil", "handler GOOD: event type itest.sale is registered already", "itest.saleV3 is not registered"}},
		{"bad keys", ok, nil, []outbox.Handler{outbox.OncePer(nil, func(e sale, _ outbox.Metadata) (string, string) { return "", "" }),
			outbox.OncePer[sale](good, nil), outbox.OncePer[saleV2](outbox.Handle("COUNTED", count), nil)},
			[]string{"handler 0 must not be nil", "itest.sale: OncePer of GOOD is malformed: nothing records what a handler of HandleNoTx has done",
				"itest.sale: OncePer of COUNTED is malformed: its key is of itest.saleV2"}},
		{"a key that is the event again", ok, nil, []outbox.Handler{outbox.OncePer[sale](outbox.Handle("COUNTED", count), nil)}, nil},
		{"bad upcasters", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Upcasters: []outbox.Upcaster{
			{}, outbox.Upcast(func(e sale) saleV3 { return saleV3{} }), outbox.Upcast(func(e sale) saleV2 { return saleV2{} }),
			outbox.Upcast(func(e sale) saleV2 { return saleV2{} }), outbox.Upcast(func(e saleV2) sale { return sale{} })}}}, nil, []outbox.Handler{good},
			[]string{"must not be nil", "saleV3: is not registered", "to itest.saleV2: is registered already", "leads back"}},
		{"bad codec", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Codecs: []outbox.Codec{{ContentType: "x"}}}}, nil, []outbox.Handler{good}, []string{"field Codecs"}},
	} {
		_, err := outbox.NewConsumer(db, tt.kafka, events, "g", tt.cfg, tt.handlers...)
		if tt.want == nil {
			require.NoError(t, err, tt.name)
			continue
		}
		require.Error(t, err, tt.name)
		for _, part := range tt.want {
			require.ErrorContains(t, err, part, tt.name)
		}
	}
	for _, group := range []string{"", "a\x00", strings.Repeat("g", 256)} {
		_, err := outbox.NewConsumer(db, nil, events, group, ok, good)
		require.ErrorContains(t, err, "outbox: consumer config: group ")
		_, err = outbox.NewWorker(db, events, group, outbox.WorkerConfig{}, good)
		require.ErrorContains(t, err, "outbox: worker config: group ")
	}
	_, err = outbox.NewConsumer(nil, nil, nil, "g", ok, outbox.Handle("TX", count))
	require.ErrorContains(t, err, "registry must not be nil")
	require.ErrorContains(t, err, "db must not be nil")

	look := outbox.HandleNoTx("LOOKED", func(context.Context, sale, outbox.Metadata) error { return nil })
	_, err = outbox.NewConsumer(nil, nil, events, "g", ok, look)
	require.ErrorContains(t, err, "field From: without a database it must be FromStart or FromEnd")
	for _, from := range []outbox.Start{-1, 3} {
		_, err = outbox.NewConsumer(db, nil, events, "g", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: from}}, look)
		require.ErrorContains(t, err, "field From is "+strconv.Itoa(int(from)))
		_, err = outbox.NewWorker(db, events, "g", outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: from}}, look)
		require.ErrorContains(t, err, "field From is "+strconv.Itoa(int(from)))
	}
	for _, from := range []outbox.Start{outbox.FromStart, outbox.FromEnd} {
		_, err = outbox.NewConsumer(nil, nil, events, "g", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: from}}, look)
		require.NoError(t, err)
		_, err = outbox.NewWorker(db, events, "g", outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: from}}, look)
		require.NoError(t, err)
	}
}

// Without its tables a consumer says so; a second Run at the same time too.
func TestConsumerRun(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	c := s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, outbox.Handle("COUNTED", s.count))
	stop := testenv.Run(t, c.Run)
	s.sendTo(t, 1, 1)
	require.Eventually(t, func() bool { return s.counts(t)["p-0"] == 1 }, testenv.Patience, 10*time.Millisecond, "it runs")
	require.ErrorIs(t, c.Run(cancelled()), outbox.ErrRunning)
	stop()
	require.NoError(t, c.Run(cancelled()))

	_, err := s.db.Exec(background, s.sql(`DROP TABLE {s}.event_handled`))
	require.NoError(t, err)
	require.ErrorIs(t, c.Run(background), outbox.ErrNotMigrated)
}

func cancelled() context.Context {
	ctx, cancel := context.WithCancel(background)
	cancel()
	return ctx
}

// The log of normal work is silent; a repeat is a line at DEBUG.
func TestConsumerLog(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	log := new(testenv.Buffer)
	id := uuid.NewString()
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Logger: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})), From: outbox.FromStart}}
	stop := testenv.Run(t, s.consumer(t, cfg, outbox.Handle("COUNTED", s.count)).Run)
	s.send(t, s.saleRecord(id, oneSale), s.saleRecord(id, oneSale))
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "event handled already") }, testenv.Patience, 10*time.Millisecond)
	s.send(t, s.saleRecord(uuid.NewString(), []byte(`{"poison":"permanent"}`)))
	s.deadLetters(t, 1)
	stop()
	for line := range strings.Lines(log.String()) {
		require.NotContains(t, line, "level=INFO")
		if strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR") {
			require.Contains(t, line, "event is dead, an operator has to decide")
			require.Contains(t, line, "dead_letter_topic="+s.topic+".dlq")
		}
	}
}
