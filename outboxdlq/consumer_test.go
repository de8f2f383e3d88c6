package outboxdlq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
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

// sale is the event that the consumers of these tests count.
type sale struct {
	Amount int `json:"amount"`
}

func (sale) OccurredAt() time.Time { return time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC) }

const saleType = "test.sale.made.v1"

// replayFixture is a topic of sales that the consumer groups a and b count. The action FAILS of group a
// fails while failing is set. Group a cannot read any record while unreadable is set.
type replayFixture struct {
	db         *pgxpool.Pool
	schema     string
	topic, dlq string
	brokers    []string
	events     *outbox.Registry

	failing, unreadable atomic.Bool

	mu      sync.Mutex
	repeats map[string]int // by group and action
}

// newReplayFixture returns a fixture whose topic takes batches of up to maxBytes.
func newReplayFixture(t testing.TB, maxBytes int) *replayFixture {
	t.Helper()
	f := &replayFixture{topic: "sales-" + uuid.NewString(), brokers: testenv.RealBrokers(t), repeats: map[string]int{}}
	f.dlq = outbox.DeadLetterTopic(f.topic)
	testenv.CreateTopic(t, f.brokers, f.topic, 1, "max.message.bytes", strconv.Itoa(maxBytes))
	testenv.CreateTopic(t, f.brokers, f.dlq, 1)
	requireTopics(t, f.brokers, f.topic, f.dlq)
	f.db, f.schema = testenv.Migrated(t)
	_, err := f.db.Exec(background, "CREATE TABLE "+f.countsTable()+" (name text PRIMARY KEY, n int NOT NULL)")
	require.NoError(t, err)
	f.events, err = outbox.NewRegistry("shop", outbox.Event(saleType, "Product", func(sale) string { return "p" }).Topic(f.topic))
	require.NoError(t, err)
	f.start(t, "a", "FAILS", "WORKS")
	f.start(t, "b", "FAILS")
	return f
}

func (f *replayFixture) countsTable() string { return pgx.Identifier{f.schema, "counts"}.Sanitize() }

// start runs a consumer group with a handler for each action.
func (f *replayFixture) start(t testing.TB, group string, actions ...string) {
	t.Helper()
	var handlers []outbox.Handler
	for _, action := range actions {
		handlers = append(handlers, outbox.Handle(action, func(ctx context.Context, tx pgx.Tx, e sale, _ outbox.Metadata) error {
			if group == "a" && action == "FAILS" && f.failing.Load() {
				return outbox.Permanent(errors.New("failing"))
			}
			_, err := tx.Exec(ctx, "INSERT INTO "+f.countsTable()+` AS c VALUES ($1, $2)
				ON CONFLICT (name) DO UPDATE SET n = c.n + excluded.n`, group+" "+action, e.Amount)
			return err
		}))
	}
	plain := outbox.PlainRecords{Type: saleType}
	cfg := outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{
			Schema: f.schema, Logger: slog.New(slog.DiscardHandler),
			Hooks: outbox.ConsumerHooks{Repeated: func(_ outbox.Metadata, action string) {
				f.mu.Lock()
				defer f.mu.Unlock()
				f.repeats[group+" "+action]++
			}},
			From: outbox.FromStart,
		},
		Decode: func(r *kgo.Record) (*outbox.Message, error) {
			if group == "a" && f.unreadable.Load() {
				return nil, errors.New("unreadable")
			}
			return plain.Decode(r)
		},
	}
	c, err := outbox.NewConsumer(f.db, testenv.KafkaOpts(f.brokers), f.events, group+"-"+f.topic, cfg, handlers...)
	require.NoError(t, err)
	testenv.Run(t, c.Run)
}

// saleRecord returns a sale as a record in CloudEvents binary mode.
func (f *replayFixture) saleRecord(id string, value []byte) *kgo.Record {
	return &kgo.Record{Topic: f.topic, Key: []byte("p"), Value: value, Headers: []kgo.RecordHeader{
		{Key: "ce_specversion", Value: []byte("1.0")}, {Key: "ce_id", Value: []byte(id)}, {Key: "ce_source", Value: []byte("shop")},
		{Key: "ce_type", Value: []byte(saleType)}, {Key: "content-type", Value: []byte("application/json")},
	}}
}

func (f *replayFixture) send(t testing.TB, records ...*kgo.Record) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(f.brokers...), kgo.ProducerBatchMaxBytes(20<<20))
	require.NoError(t, err)
	defer client.Close()
	require.NoError(t, client.ProduceSync(background, records...).FirstErr())
}

// counts returns the counts of the actions.
func (f *replayFixture) counts(t testing.TB) map[string]int {
	t.Helper()
	counts := map[string]int{"a FAILS": 0, "a WORKS": 0, "b FAILS": 0}
	rows, err := f.db.Query(background, "SELECT name, n FROM "+f.countsTable())
	require.NoError(t, err)
	var name string
	var n int
	_, err = pgx.ForEachRow(rows, []any{&name, &n}, func() error { counts[name] = n; return nil })
	require.NoError(t, err)
	return counts
}

// deadLetters waits for n dead letters and returns them.
func (f *replayFixture) deadLetters(t testing.TB, n int) (records []*kgo.Record) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(f.brokers...), kgo.ConsumeTopics(f.dlq))
	require.NoError(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(background, testenv.Patience)
	defer cancel()
	for len(records) < n {
		fetches := client.PollFetches(ctx)
		require.NoError(t, fetches.Err0(), "%d of %d records", len(records), n)
		records = append(records, fetches.Records()...)
	}
	require.Len(t, records, n)
	return records
}

// replay sends n dead letters back.
func (f *replayFixture) replay(t testing.TB, n int, choose func(outboxdlq.DeadLetter) bool) {
	t.Helper()
	report, err := outboxdlq.Replay(background, []kgo.Opt{kgo.SeedBrokers(f.brokers...)},
		outboxdlq.ReplayConfig{Topic: f.dlq, Choose: choose})
	require.NoError(t, err)
	require.Empty(t, report.Failed)
	require.Empty(t, report.Absent)
	require.Equal(t, n, report.Sent)
}

// requireCounts waits until all actions have handled all records in the topic. Then it requires their
// counts and the repeats that they have skipped.
func (f *replayFixture) requireCounts(t testing.TB, counts, repeats map[string]int) {
	t.Helper()
	const mark = 1_000_000
	before := f.counts(t)
	f.send(t, f.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"amount": %d}`, mark)))
	require.Eventually(t, func() bool {
		now := f.counts(t)
		for _, name := range []string{"a FAILS", "a WORKS", "b FAILS"} {
			if now[name]/mark == before[name]/mark {
				return false
			}
		}
		return true
	}, testenv.Patience, 10*time.Millisecond)
	now := f.counts(t)
	for name, n := range now {
		now[name] = n % mark
	}
	require.Equal(t, counts, now)
	require.EventuallyWithT(t, func(t *assert.CollectT) { // hooks are called after the commit
		f.mu.Lock()
		defer f.mu.Unlock()
		assert.Equal(t, repeats, f.repeats)
	}, testenv.Patience, 10*time.Millisecond)
}

// When a dead letter is sent back, only the group and the action that failed handle it. They handle it only
// once, however often it is sent.
func TestReplayToConsumer(t *testing.T) {
	t.Parallel()
	f := newReplayFixture(t, 1_048_588)
	f.failing.Store(true)
	for _, amount := range []int{1, 2, 4, 8, 16} {
		f.send(t, f.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"amount": %d}`, amount)))
	}
	f.deadLetters(t, 5)
	f.failing.Store(false)
	f.requireCounts(t, map[string]int{"a FAILS": 0, "a WORKS": 31, "b FAILS": 31}, map[string]int{})
	f.replay(t, 3, func(d outboxdlq.DeadLetter) bool { return d.Action == "FAILS" && d.Record.Offset < 3 })
	f.requireCounts(t, map[string]int{"a FAILS": 7, "a WORKS": 31, "b FAILS": 31}, map[string]int{})
	f.replay(t, 5, nil)
	f.requireCounts(t, map[string]int{"a FAILS": 31, "a WORKS": 31, "b FAILS": 31}, map[string]int{"a FAILS": 3})
	f.replay(t, 5, nil)
	f.requireCounts(t, map[string]int{"a FAILS": 31, "a WORKS": 31, "b FAILS": 31}, map[string]int{"a FAILS": 8})
}

// An event that fails again gets another dead letter, which names the first position of its record. If both
// dead letters are sent back, the event is handled once.
func TestReplayFailsAgain(t *testing.T) {
	t.Parallel()
	f := newReplayFixture(t, 1_048_588)
	f.failing.Store(true)
	id := uuid.NewString()
	f.send(t, f.saleRecord(uuid.NewString(), []byte(`{"amount": 1}`)), f.saleRecord(id, []byte(`{"amount": 2}`)))
	f.deadLetters(t, 2)
	f.replay(t, 1, func(d outboxdlq.DeadLetter) bool { return d.OriginalOffset == 1 })
	again := f.deadLetters(t, 3)[2]
	d, err := outboxdlq.Decode(again)
	require.NoError(t, err)
	require.Equal(t, outboxdlq.DeadLetter{
		OriginalTopic: f.topic, OriginalOffset: 1, OriginalTimestamp: d.OriginalTimestamp,
		Group: "a-" + f.topic, Action: "FAILS", Error: "failing", Class: d.Class, Attempts: 1, FailedAt: d.FailedAt, Record: again,
	}, d)
	require.Equal(t, id, allHeaders(again)["ce_id"])
	require.NotContains(t, allHeaders(again), outbox.ReplayGroup)
	f.replay(t, 1, func(d outboxdlq.DeadLetter) bool { return d.Record.Offset == 2 })
	fourth, err := outboxdlq.Decode(f.deadLetters(t, 4)[3])
	require.NoError(t, err)
	require.Equal(t, []any{int64(1), ""}, []any{fourth.OriginalOffset, fourth.ReplayOf}, "where it was first, not last")
	f.failing.Store(false)
	f.replay(t, 4, nil)
	f.requireCounts(t, map[string]int{"a FAILS": 3, "a WORKS": 3, "b FAILS": 3}, map[string]int{"a FAILS": 2})
}

// If the group could not read a record without an id, its dead letter goes to all actions of the group. The
// group recognizes it when it comes again.
func TestReplayOfUnreadable(t *testing.T) {
	t.Parallel()
	f := newReplayFixture(t, 1_048_588)
	f.unreadable.Store(true)
	f.send(t, &kgo.Record{Topic: f.topic, Value: []byte(`{"amount": 5}`)})
	headers := allHeaders(f.deadLetters(t, 1)[0])
	require.Equal(t, "undecodable", headers[outbox.DeadLetterClass])
	f.replay(t, 1, nil)
	f.deadLetters(t, 2) // still unreadable
	f.unreadable.Store(false)
	f.replay(t, 2, nil)
	f.replay(t, 1, func(d outboxdlq.DeadLetter) bool { return d.Record.Offset == 0 })
	f.requireCounts(t, map[string]int{"a FAILS": 5, "a WORKS": 5, "b FAILS": 5}, map[string]int{"a FAILS": 2, "a WORKS": 2})
}

// A record too large for its dead-letter topic has a dead letter without a value. It is sent back with its
// value.
func TestReplayOfHugeRecord(t *testing.T) {
	t.Parallel()
	f := newReplayFixture(t, 20_000_000)
	f.failing.Store(true)
	f.send(t, f.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"amount": 6, "more": %q}`, random(3_000_000))))
	require.Empty(t, f.deadLetters(t, 1)[0].Value)
	f.failing.Store(false)
	for range 2 {
		f.replay(t, 1, nil)
	}
	f.requireCounts(t, map[string]int{"a FAILS": 6, "a WORKS": 6, "b FAILS": 6}, map[string]int{"a FAILS": 1})
}

// A large key and large headers can make a record too large for a dead-letter topic. The dead letter omits
// them and still describes its record. A replay reads the omitted parts from the original.
func TestReplayOfHugeKey(t *testing.T) {
	t.Parallel()
	f := newReplayFixture(t, 20_000_000)
	f.failing.Store(true)
	key := f.saleRecord(uuid.NewString(), []byte(`{"amount": 6}`))
	key.Key = []byte(random(3_000_000))
	headers := f.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"amount": 8, "more": %q}`, random(3_000_000)))
	headers.Headers = slices.Insert(headers.Headers, 0, kgo.RecordHeader{Key: "large", Value: []byte(random(2_000_000))}, kgo.RecordHeader{Key: "small", Value: []byte("v")})
	f.send(t, key, headers)

	dead := f.deadLetters(t, 2)
	slices.SortFunc(dead, func(a, b *kgo.Record) int { return len(a.Key) - len(b.Key) }) // keys have no order among each other
	d, err := outboxdlq.Decode(dead[0])
	require.NoError(t, err)
	require.Equal(t, []int{len(key.Value), 3_000_000, 0}, []int{d.ValueOmitted, d.KeyOmitted, d.HeadersOmitted})
	require.Empty(t, dead[0].Key)
	d, err = outboxdlq.Decode(dead[1])
	require.NoError(t, err)
	require.Equal(t, []int{len(headers.Value), 0, 1}, []int{d.ValueOmitted, d.KeyOmitted, d.HeadersOmitted})
	require.Equal(t, "p", string(dead[1].Key))
	require.Subset(t, allHeaders(dead[1]), map[string]string{"small": "v", "ce_type": saleType})

	f.failing.Store(false)
	for range 2 {
		f.replay(t, 2, nil)
	}
	f.requireCounts(t, map[string]int{"a FAILS": 14, "a WORKS": 14, "b FAILS": 14}, map[string]int{"a FAILS": 2})
}

// A client that may write to a topic can set any headers. Forged headers of a replay hide no event, because
// they count only in a copy of a dead letter.
func TestForgedReplays(t *testing.T) {
	t.Parallel()
	f := newReplayFixture(t, 1_048_588)
	f.failing.Store(true)
	f.send(t, f.saleRecord(uuid.NewString(), []byte(`{"amount": 1}`)))
	dead := f.deadLetters(t, 1)[0]
	f.failing.Store(false)
	f.replay(t, 1, nil)
	f.requireCounts(t, map[string]int{"a FAILS": 1, "a WORKS": 1, "b FAILS": 1}, map[string]int{})

	forged := func(amount int, headers ...string) *kgo.Record {
		r := f.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"amount": %d}`, amount))
		for i := 0; i < len(headers); i += 2 {
			r.Headers = append(r.Headers, kgo.RecordHeader{Key: headers[i], Value: []byte(headers[i+1])})
		}
		return r
	}
	group, from, of := "a-"+f.topic, dead.Topic+"-0-0", f.topic+"-0-0"
	f.send(t,
		forged(2, outbox.ReplayGroup, "nobody"),
		forged(4, outbox.ReplayGroup, group, outbox.ReplayAction, "FAILS", outbox.ReplayOf, of, outbox.ReplayFrom, from),                  // not the record of the dead letter
		forged(8, outbox.ReplayGroup, "nobody", outbox.ReplayFrom, dead.Topic+"-0-400"),                                                   // past the end
		forged(16, outbox.ReplayGroup, "nobody", outbox.ReplayFrom, dead.Topic+"-7-0"),                                                    // no such partition
		forged(32, outbox.ReplayGroup, "nobody", outbox.ReplayFrom, f.topic+"-0-0"),                                                       // no dead-letter topic
		forged(64, outbox.ReplayGroup, "nobody", outbox.ReplayFrom, "elsewhere"),                                                          // no position
		&kgo.Record{Topic: f.topic, Value: []byte(`{"amount": 128}`), Headers: []kgo.RecordHeader{{Key: "Replay_Of", Value: []byte(of)}}}, // a record without an id
		&kgo.Record{Topic: f.topic, Value: []byte(`{"amount": 256}`), Headers: []kgo.RecordHeader{{Key: "Replay_Of", Value: []byte(of)}}},
	)
	all := 1 + 2 + 4 + 8 + 16 + 32 + 64 + 128 + 256
	f.requireCounts(t, map[string]int{"a FAILS": all, "a WORKS": all, "b FAILS": all}, map[string]int{})

	// Only the group and the action that a copy of the dead letter names handle it.
	copied := &kgo.Record{Topic: f.topic, Key: dead.Key, Value: dead.Value, Headers: append(slices.DeleteFunc(slices.Clone(dead.Headers), func(h kgo.RecordHeader) bool {
		return strings.HasPrefix(h.Key, "dlq_")
	}), kgo.RecordHeader{Key: outbox.ReplayGroup, Value: []byte("nobody")}, kgo.RecordHeader{Key: outbox.ReplayOf, Value: []byte(of)}, kgo.RecordHeader{Key: outbox.ReplayFrom, Value: []byte(from)})}
	f.send(t, copied)
	f.requireCounts(t, map[string]int{"a FAILS": all, "a WORKS": all, "b FAILS": all}, map[string]int{"a FAILS": 1, "a WORKS": 1, "b FAILS": 1})
}
