package itest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// sale is what the consumers of these tests count.
type sale struct {
	Product string `json:"product"`
	Amount  int    `json:"amount"`
	Poison  string `json:"poison,omitempty"` // what the handler is to do about it
}

func (sale) OccurredAt() time.Time { return time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC) }
func (s sale) productID() string   { return s.Product }

// consumerFixture is a relayFixture with sales, a topic of some partitions and a table of counts.
type consumerFixture struct {
	*relayFixture
	events *outbox.Registry
}

const saleType = "test.sale.made.v1"

func newConsumerFixture(t testing.TB, partitions int32, more ...outbox.Definition) *consumerFixture {
	t.Helper()
	return newConsumerFixtureOn(t, func(h *relayFixture) {
		testenv.CreateTopic(t, h.brokers, h.topic, partitions)
		testenv.CreateTopic(t, h.brokers, h.topic+".dlq", 1)
	}, more...)
}

func newConsumerFixtureOn(t testing.TB, createTopics func(*relayFixture), more ...outbox.Definition) *consumerFixture {
	t.Helper()
	h := newRelayFixture(t)
	s := &consumerFixture{relayFixture: h}
	var err error
	s.events, err = outbox.NewRegistry("shop", append(more, outbox.Event(saleType, "Product", sale.productID).Topic(h.topic))...)
	require.NoError(t, err)
	h.rec, err = outbox.NewRecorder(s.events, outbox.RecorderConfig{Schema: h.schema})
	require.NoError(t, err)
	createTopics(h)
	_, err = h.db.Exec(background, h.sql(`CREATE TABLE {s}.counts (product text PRIMARY KEY, n int NOT NULL)`))
	require.NoError(t, err)
	return s
}

// sell commits sales in a transaction.
func (s *consumerFixture) sell(t testing.TB, sales ...sale) {
	t.Helper()
	events := make([]outbox.DomainEvent, len(sales))
	for i := range sales {
		events[i] = sales[i]
	}
	require.NoError(t, pgx.BeginFunc(background, s.db, func(tx pgx.Tx) error { return s.rec.Record(background, tx, events...) }))
}

// count is a handler that adds the amount to the product's count, or fails as the
// sale says.
func (s *consumerFixture) count(ctx context.Context, tx pgx.Tx, e sale, _ outbox.Metadata) error {
	switch e.Poison {
	case "permanent":
		return outbox.Permanent(errors.New("cannot be counted"))
	case "error":
		return errors.New("not today")
	case "panic":
		panic("spilled")
	case "sql":
		_, err := tx.Exec(ctx, "SELECT 1/0")
		return err
	}
	_, err := tx.Exec(ctx, s.sql(`INSERT INTO {s}.counts VALUES ($1, $2)
		ON CONFLICT (product) DO UPDATE SET n = counts.n + excluded.n`), e.Product, e.Amount)
	return err
}

// parked returns action, status, attempts and code of each parked event, in the order in which they were.
func (s *consumerFixture) parked(t testing.TB) (rows string) {
	t.Helper()
	require.NoError(t, s.db.QueryRow(background, s.sql(`SELECT coalesce(string_agg(concat_ws(' ', action, status, attempt_count, last_error_code), '; ' ORDER BY id), '') FROM {s}.event_delivery`)).Scan(&rows))
	return rows
}

func (s *consumerFixture) counts(t testing.TB) map[string]int {
	t.Helper()
	rows, err := s.db.Query(background, s.sql(`SELECT product, n FROM {s}.counts`))
	require.NoError(t, err)
	counts := map[string]int{}
	var product string
	var n int
	_, err = pgx.ForEachRow(rows, []any{&product, &n}, func() error { counts[product] = n; return nil })
	require.NoError(t, err)
	return counts
}

// consumer returns a consumer of a group of its own whose times are short; cfg.Schema is set.
func (s *consumerFixture) consumer(t testing.TB, cfg outbox.ConsumerConfig, handlers ...outbox.Handler) *outbox.Consumer {
	t.Helper()
	return s.groupConsumer(t, "group-"+uuid.NewString(), cfg, handlers...)
}

// groupConsumer returns a consumer of a group whose times are short; cfg.Schema is set.
func (s *consumerFixture) groupConsumer(t testing.TB, group string, cfg outbox.ConsumerConfig, handlers ...outbox.Handler) *outbox.Consumer {
	t.Helper()
	cfg.Schema = s.schema
	if cfg.Retry.RetryWait == 0 {
		cfg.Retry.RetryWait = 5 * time.Millisecond
	}
	if cfg.Logger == nil {
		cfg.Logger = logTo(t, slog.LevelWarn)
	}
	c, err := outbox.NewConsumer(s.db, testenv.KafkaOpts(s.brokers), s.events, group, cfg, handlers...)
	require.NoError(t, err)
	return c
}

// deadLetters reads n dead letters.
func (s *consumerFixture) deadLetters(t testing.TB, n int) []*kgo.Record {
	t.Helper()
	return readAll(t, s.brokers, s.topic+".dlq", n)
}

// readAll reads the n records of a topic.
func readAll(t testing.TB, brokers []string, topic string, n int) (records []*kgo.Record) {
	t.Helper()
	return readEach(t, brokers, n, func(*kgo.Record) bool { return true }, topic)
}

// readDeadLetters returns the dead letters of n records, one of each: a dead letter that was sent while the consumer
// stopped may be sent again.
func readDeadLetters(t testing.TB, brokers []string, n int, topics ...string) (records []*kgo.Record) {
	t.Helper()
	seen := map[string]bool{}
	return readEach(t, brokers, n, func(r *kgo.Record) bool {
		h := deadLetterHeaders(r)
		place := fmt.Sprint(h[outbox.DeadLetterOriginalTopic], " ", h[outbox.DeadLetterOriginalPartition], " ", h[outbox.DeadLetterOriginalOffset])
		first := !seen[place]
		seen[place] = true
		return first
	}, topics...)
}

// readEach returns the n records of topics that are wanted.
func readEach(t testing.TB, brokers []string, n int, wanted func(*kgo.Record) bool, topics ...string) (records []*kgo.Record) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.ConsumeTopics(topics...))
	require.NoError(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(background, testenv.Patience)
	defer cancel()
	for len(records) < n {
		fetches := client.PollFetches(ctx)
		require.NoError(t, fetches.Err0(), "%d of %d records", len(records), n)
		for _, r := range fetches.Records() {
			if wanted(r) {
				records = append(records, r)
			}
		}
	}
	require.Len(t, records, n)
	return records
}

func deadLetterHeaders(r *kgo.Record) map[string]string {
	all := map[string]string{}
	for _, h := range r.Headers {
		all[h.Key] = string(h.Value)
	}
	return all
}

// Record, relay, consumer, in both modes: each sale is counted once, and the
// handler sees what was recorded.
func TestRoundTrip(t *testing.T) {
	t.Parallel()
	testenv.RealBrokers(t)
	for _, mode := range []outbox.Mode{outbox.Binary, outbox.Structured} {
		s := newConsumerFixture(t, 3)
		var mu sync.Mutex
		var seen []outbox.Metadata
		cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Hooks: outbox.ConsumerHooks{
			Repeated: func(outbox.Metadata, string) { assert.Fail(t, "handled twice") },
		}, From: outbox.FromStart}}
		testenv.Run(t, s.consumer(t, cfg, outbox.Handle("COUNTED",
			func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
				mu.Lock()
				defer mu.Unlock()
				seen = append(seen, m)
				assert.Equal(t, "corr-1", outbox.CorrelationID(ctx))
				return s.count(ctx, tx, e, m)
			})).Run)
		relayed := quick
		relayed.Mode = mode
		testenv.Run(t, s.relay(t, relayed).Run)
		want := map[string]int{}
		require.NoError(t, pgx.BeginFunc(background, s.db, func(tx pgx.Tx) error {
			for i := range 300 {
				e := sale{Product: "p-" + strconv.Itoa(i%7), Amount: i}
				want[e.Product] += i
				if err := s.rec.Record(outbox.WithCorrelationID(background, "corr-1"), tx, e); err != nil {
					return err
				}
			}
			return nil
		}))
		require.Eventually(t, func() bool { return assert.ObjectsAreEqual(want, s.counts(t)) }, testenv.Patience, 10*time.Millisecond)
		require.Equal(t, 300, s.relayFixture.count(t, "event_handled"))
		mu.Lock()
		m := seen[0]
		mu.Unlock()
		require.Equal(t, []any{saleType, "shop", "application/json", s.topic, 1, string(m.Kafka.Key)},
			[]any{m.Type, m.Source, m.ContentType, m.Kafka.Topic, m.Attempt, m.Subject})
		require.Equal(t, sale{}.OccurredAt(), m.Time)
		require.Equal(t, "Product", m.Extensions["aggregatetype"])
	}
}

// Poison in the middle of a poll: its neighbours are handled once each, it is in
// the dead-letter topic with all headers, and the offsets go on.
func TestPoison(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	testenv.Run(t, s.relay(t, quick).Run)
	poisons := []string{"permanent", "error", "panic", "sql"}
	want := map[string]int{}
	for i := range 100 {
		e := sale{Product: "p-" + strconv.Itoa(i%7), Amount: 1}
		if i%25 == 12 {
			e.Poison = poisons[i/25]
		} else {
			want[e.Product]++
		}
		s.sell(t, e)
	}
	var mu sync.Mutex
	failed, deadLettered := map[string]int{}, 0
	group := "group-" + uuid.NewString()
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Hooks: outbox.ConsumerHooks{
		Failed: func(m outbox.Metadata, _ string, err error, _ bool) {
			mu.Lock()
			defer mu.Unlock()
			failed[m.ID]++
			assert.Equal(t, failed[m.ID], m.Attempt)
		},
		DeadLettered: func(_ outbox.Metadata, action, topic string, _ error) {
			mu.Lock()
			defer mu.Unlock()
			deadLettered++
			assert.Equal(t, []string{"COUNTED", s.topic + ".dlq"}, []string{action, topic})
		},
	}, From: outbox.FromStart, Retry: outbox.RetryPolicy{MaxOutage: -1}}}
	stop := testenv.Run(t, s.groupConsumer(t, group, cfg, outbox.Handle("COUNTED", s.count)).Run)
	deadLetters := s.deadLetters(t, 4)
	require.Eventually(t, func() bool { return assert.ObjectsAreEqual(want, s.counts(t)) }, testenv.Patience, 10*time.Millisecond)
	stop()
	classes := map[string]string{"permanent": "permanent", "error": "handler", "panic": "panic", "sql": "postgres_22012"}
	attempts := map[string]string{"permanent": "1", "error": "4", "panic": "4", "sql": "4"}
	offset := func(r *kgo.Record) int {
		n, err := strconv.Atoi(deadLetterHeaders(r)["dlq_original_offset"])
		require.NoError(t, err)
		return n
	}
	slices.SortFunc(deadLetters, func(a, b *kgo.Record) int { return cmp.Compare(offset(a), offset(b)) }) // those of different keys come in any order
	for i, r := range deadLetters {
		h := deadLetterHeaders(r)
		var e sale
		require.NoError(t, json.Unmarshal(r.Value, &e))
		require.Equal(t, poisons[i], e.Poison)
		require.Equal(t, []string{s.topic, "0", group, "COUNTED", classes[e.Poison], attempts[e.Poison]},
			[]string{h["dlq_original_topic"], h["dlq_original_partition"], h["dlq_group"], h["dlq_action"], h["dlq_error_class"], h["dlq_attempts"]})
		require.Equal(t, i*25+12, offset(r))
		require.NotEmpty(t, h["dlq_error"])
		require.Equal(t, saleType, h["ce_type"])
		require.Equal(t, e.Product, string(r.Key))
		for _, name := range []string{"dlq_original_timestamp", "dlq_failed_at"} {
			at, err := time.Parse(time.RFC3339, h[name])
			require.NoError(t, err)
			require.WithinDuration(t, time.Now(), at, time.Hour)
		}
		require.Equal(t, attempts[e.Poison], strconv.Itoa(failed[h["ce_id"]]))
	}
	require.Equal(t, 4, deadLettered)

	// Another start of the group has nothing left to do.
	s.sell(t, sale{Product: "last", Amount: 1})
	want["last"] = 1
	testenv.Run(t, s.groupConsumer(t, group, cfg, outbox.Handle("COUNTED", s.count)).Run)
	require.Eventually(t, func() bool { return assert.ObjectsAreEqual(want, s.counts(t)) }, testenv.Patience, 10*time.Millisecond)
	s.deadLetters(t, 4)
}
