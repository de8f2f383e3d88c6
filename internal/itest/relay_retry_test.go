package itest

import (
	"context"
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
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

// newPoisonedFixture has a topic that takes only small records, and a reader.
func newPoisonedFixture(t *testing.T) (*relayFixture, *oracle.Reader) {
	t.Helper()
	h := newRelayFixture(t)
	return h, h.poisoned(t)
}

// poisoned makes the topic of a fixture one that rejects what is large, and follows it.
func (h *relayFixture) poisoned(t *testing.T) *oracle.Reader {
	t.Helper()
	testenv.RealBrokers(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1, "max.message.bytes", "2000")
	return h.follow(t)
}

// poison is an event that the topic of a newPoisonedFixture rejects.
func poison(key string, version int) oracle.Event {
	e := numbered(key, version, 1)[0]
	e.Filler = random(5000)
	return e
}

// statuses returns the rows of outbox_failed by status.
func (h *relayFixture) statuses(t *testing.T) map[string]int {
	t.Helper()
	rows, err := h.db.Query(background, h.sql(`SELECT status, count(*)::int FROM {s}.outbox_failed GROUP BY status`))
	require.NoError(t, err)
	defer rows.Close()
	all := map[string]int{}
	for rows.Next() {
		var status string
		var n int
		require.NoError(t, rows.Scan(&status, &n))
		all[status] = n
	}
	require.NoError(t, rows.Err())
	return all
}

func (h *relayFixture) awaitStatuses(t *testing.T, want map[string]int) {
	t.Helper()
	require.Eventually(t, func() bool {
		got := h.statuses(t)
		for status, n := range want {
			if got[status] != n {
				return false
			}
		}
		return len(got) == len(want)
	}, testenv.Patience, 10*time.Millisecond, "%v, not %v", h.statuses(t), want)
}

// A rejected event holds back the later events of its key, and of no other key. It is
// tried again until it is dead; then the later events are sent, in order.
func TestDeadEventReleasesItsKey(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	var rejected, dead atomic.Int32
	log := new(testenv.Buffer)
	cfg := quick
	cfg.Retry.MaxRetries = 2
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	cfg.Hooks.Rejected = func(outbox.FailedEvent) { rejected.Add(1) }
	cfg.Hooks.Dead = func(e outbox.FailedEvent) {
		if e.Class == "message_too_large" && e.Retries == 2 && e.Key == "bad" && e.Topic == h.topic {
			dead.Add(1)
		}
	}
	testenv.Run(t, h.relay(t, cfg).Run)

	bad := poison("bad", 1)
	same := numbered("bad", 2, 50)
	h.commit(t, append([]oracle.Event{bad}, same[:20]...)...)
	h.awaitStatuses(t, map[string]int{"failed": 1, "parked": 20})
	h.commit(t, same[20:]...)
	others := numbered("good", 1, 50)
	h.commit(t, others...)
	requireArrival(t, reader, others...)
	require.False(t, reader.Has(same[0].ID), "it overtook the event that it stands behind")

	requireArrival(t, reader, same...)
	h.awaitStatuses(t, map[string]int{"dead": 1})
	more := numbered("bad", 100, 3)
	h.commit(t, more...)
	requireArrival(t, reader, more...)

	requireInOrder(t, reader, append(same, more...))
	require.EqualValues(t, 2, rejected.Load(), "at first, and at the first retry")
	require.EqualValues(t, 1, dead.Load())
	require.Equal(t, 1, strings.Count(log.String(), "level=ERROR"))
	require.Contains(t, log.String(), "event is dead")
	require.Contains(t, log.String(), "retry failed")
}

// batches counts what a client sends.
type batches struct{ n atomic.Int32 }

func (b *batches) OnProduceBatchWritten(kgo.BrokerMetadata, string, int32, kgo.ProduceBatchMetrics) {
	b.n.Add(1)
}

// largest is the largest batch that a client has written.
type largest struct{ bytes atomic.Int64 }

func (l *largest) OnProduceBatchWritten(_ kgo.BrokerMetadata, _ string, _ int32, m kgo.ProduceBatchMetrics) {
	for n := int64(m.UncompressedBytes); ; {
		before := l.bytes.Load()
		if n <= before || l.bytes.CompareAndSwap(before, n) {
			return
		}
	}
}

// A broker rejects a batch as a whole. If it were one of many good events, the events of
// the next batch, which is smaller, would be accepted before them.
func TestBatchesFitTheirTopic(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	events := numbered("a", 1, 300)
	h.commit(t, events...)
	var log largest
	cfg := quick
	cfg.Schema, cfg.Logger = h.schema, logTo(t, slog.LevelWarn)
	var rejected atomic.Int32
	cfg.Hooks.Sent = func(b outbox.SentBatch) { rejected.Add(int32(b.Failed)) }
	r, err := outbox.NewRelay(h.db, append(testenv.KafkaOpts(h.brokers), kgo.WithHooks(&log), kgo.ProducerBatchCompression(kgo.NoCompression())), cfg)
	require.NoError(t, err)
	testenv.Run(t, r.Run)
	requireArrival(t, reader, events...)
	requireInOrder(t, reader, events)
	require.Zero(t, rejected.Load())
	require.LessOrEqual(t, log.bytes.Load(), int64(2000))
	require.Greater(t, log.bytes.Load(), int64(1000), "several go together")
}

// What may be too large is sent alone: its company need not be sent again one by
// one, and the later events of its key are not there before it.
func TestTooLargeEventIsSentAlone(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ topicLimit, clientLimit, size int }{
		"for its topic":  {400_000, 900_000, 500_000},
		"for the client": {900_000, 200_000, 300_000},
	} {
		t.Run(name, func(t *testing.T) {
			h := newRelayFixture(t)
			testenv.RealBrokers(t)
			testenv.CreateTopic(t, h.brokers, h.topic, 1, "max.message.bytes", strconv.Itoa(tt.topicLimit))
			reader := h.follow(t)
			good := numbered("good", 1, 1000)
			bad := numbered("bad", 1, 4)
			bad[0].Filler = random(tt.size)
			h.commit(t, slices.Concat(good[:500], bad, good[500:])...)

			sent := &batches{}
			cfg := quick
			cfg.Schema, cfg.Logger, cfg.Retry.MaxRetries = h.schema, slog.New(slog.DiscardHandler), 1
			opts := append(testenv.KafkaOpts(h.brokers), kgo.WithHooks(sent), kgo.ProducerBatchMaxBytes(int32(tt.clientLimit)))
			relay, err := outbox.NewRelay(h.db, opts, cfg)
			require.NoError(t, err)
			testenv.Run(t, relay.Run)
			requireArrival(t, reader, good...)
			require.Less(t, sent.n.Load(), int32(100), "sent one by one")
			requireArrival(t, reader, bad[1:]...)
			requireInOrder(t, reader, good)
			requireInOrder(t, reader, bad[1:])
			h.awaitStatuses(t, map[string]int{"dead": 1})
		})
	}
}

// The limit of a topic is one of compressed batches: what only looks too large
// gets through.
func TestCompressedEventIsNotTooLarge(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	testenv.Run(t, h.relay(t, quick).Run)
	squeezed := numbered("key", 1, 1)
	squeezed[0].Filler = strings.Repeat("x", 5000)
	h.commit(t, squeezed...)
	requireArrival(t, reader, squeezed...)
	require.Zero(t, h.count(t, "outbox_failed"))
}

// requireInOrder requires that of all arrivals these are there once, in this
// order.
func requireInOrder(t *testing.T, reader *oracle.Reader, events []oracle.Event) {
	t.Helper()
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	mine := map[string]bool{}
	for _, e := range events {
		mine[e.ID] = true
	}
	var got []oracle.Event
	for _, e := range arrived {
		if mine[e.ID] {
			got = append(got, e)
		}
	}
	require.Equal(t, events, got)
}

// With HoldDead the key waits for an operator, through restarts of the relay.
func TestDeadEventHoldsItsKey(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	cfg := quick
	cfg.Retry.MaxRetries, cfg.HoldDead = 1, true
	cfg.Logger = slog.New(slog.DiscardHandler)
	stop := testenv.Run(t, h.relay(t, cfg).Run)
	events := numbered("bad", 2, 10)
	h.commit(t, append([]oracle.Event{poison("bad", 1)}, events[:5]...)...)
	h.awaitStatuses(t, map[string]int{"dead": 1, "parked": 5})
	stop()
	testenv.Run(t, h.relay(t, cfg).Run)
	h.commit(t, events[5:]...)
	h.awaitStatuses(t, map[string]int{"dead": 1, "parked": 10})
	others := numbered("good", 1, 5)
	h.commit(t, others...)
	requireArrival(t, reader, others...)
	require.False(t, reader.Has(events[0].ID))

	_, err := h.db.Exec(background, h.sql(`UPDATE {s}.outbox_failed SET status = 'resolved', resolved_at = now() WHERE status = 'dead'`))
	require.NoError(t, err)
	requireArrival(t, reader, events...)
	h.awaitStatuses(t, map[string]int{"resolved": 1})
	requireInOrder(t, reader, events)
	more := numbered("bad", 100, 3)
	h.commit(t, more...)
	requireArrival(t, reader, more...)
	h.awaitStatuses(t, map[string]int{"resolved": 1})
}

// With PassFailedKeys the later events of a key are sent although one of them is rejected,
// which is tried again until Kafka accepts it. Events that an earlier relay has parked are
// sent, too.
func TestFailedKeysArePassed(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	cfg := quick
	cfg.Logger = slog.New(slog.DiscardHandler)
	stop := testenv.Run(t, h.relay(t, cfg).Run)
	parked := numbered("bad", 2, 5)
	bad := poison("bad", 1)
	h.commit(t, append([]oracle.Event{bad}, parked...)...)
	h.awaitStatuses(t, map[string]int{"failed": 1, "parked": 5})
	stop()

	cfg.PassFailedKeys = true
	testenv.Run(t, h.relay(t, cfg).Run)
	another, later := poison("bad", 10), numbered("bad", 11, 5)
	h.commit(t, append([]oracle.Event{another}, later...)...)
	requireArrival(t, reader, append(parked, later...)...)
	h.awaitStatuses(t, map[string]int{"failed": 2})
	h.setTopic(t, "max.message.bytes", "1000000")
	requireArrival(t, reader, bad, another)
	h.awaitStatuses(t, map[string]int{})
}

// Events that Kafka accepts after all are sent in order, and their rows are removed unless
// the relay is to keep them.
func TestRefusedEventGetsThrough(t *testing.T) {
	t.Parallel()
	for name, keep := range map[string]bool{"removed": false, "kept": true} {
		t.Run(name, func(t *testing.T) {
			h, reader := newPoisonedFixture(t)
			cfg := quick
			cfg.KeepSent = keep
			cfg.Logger = slog.New(slog.DiscardHandler)
			testenv.Run(t, h.relay(t, cfg).Run)
			events := append([]oracle.Event{poison("bad", 1)}, numbered("bad", 2, 700)...)
			h.commit(t, events...)
			h.awaitStatuses(t, map[string]int{"failed": 1, "parked": 700})
			h.setTopic(t, "max.message.bytes", "1000000")
			requireArrival(t, reader, events...)
			requireInOrder(t, reader, events)
			if keep {
				h.awaitStatuses(t, map[string]int{"resolved": 701})
			} else {
				h.awaitStatuses(t, map[string]int{})
			}
			more := numbered("bad", 1000, 3)
			h.commit(t, more...)
			requireArrival(t, reader, more...)
		})
	}
}

// What waits in outbox_failed needs no row in outbox: retention may have removed
// it, and what was sent all around.
func TestRetryOutlivesItsRow(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	cfg := quick
	cfg.Logger = slog.New(slog.DiscardHandler)
	testenv.Run(t, h.relay(t, cfg).Run)
	events := append([]oracle.Event{poison("bad", 1)}, numbered("bad", 2, 10)...)
	ctx := outbox.WithCorrelationID(background, "kept")
	require.NoError(t, pgx.BeginFunc(ctx, h.db, func(tx pgx.Tx) error { return h.record(ctx, tx, events...) }))
	good := numbered("good", 1, 10)
	h.commit(t, good...)
	h.awaitStatuses(t, map[string]int{"failed": 1, "parked": 10})
	requireArrival(t, reader, good...)
	_, err := h.db.Exec(background, h.sql(`DELETE FROM {s}.outbox`))
	require.NoError(t, err)

	h.setTopic(t, "max.message.bytes", "1000000")
	requireArrival(t, reader, events...)
	h.awaitStatuses(t, map[string]int{})
	more := append(numbered("bad", 100, 3), numbered("good", 100, 3)...)
	h.commit(t, more...)
	requireArrival(t, reader, more...)
	requireInOrder(t, reader, append(events, more[:3]...))
	requireInOrder(t, reader, append(good, more[3:]...))
	require.Equal(t, len(events), h.countHeaders(t, "ce_correlationid=kept", len(events)+len(good)+len(more)))
}

// countHeaders returns how many of the first n records have a header.
func (h *relayFixture) countHeaders(t *testing.T, header string, n int) (count int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(background, testenv.Patience)
	defer cancel()
	client, err := kgo.NewClient(kgo.SeedBrokers(h.brokers...), kgo.ConsumeTopics(h.topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	require.NoError(t, err)
	defer client.Close()
	for read := 0; read < n; {
		fetches := client.PollFetches(ctx)
		require.NoError(t, ctx.Err())
		read += fetches.NumRecords()
		fetches.EachRecord(func(r *kgo.Record) {
			if slices.ContainsFunc(r.Headers, func(one kgo.RecordHeader) bool { return one.Key+"="+string(one.Value) == header }) {
				count++
			}
		})
	}
	return count
}

// A topic that is missing holds up its own events, and nothing else. They wait as
// long as it takes, without using up a try.
func TestMissingTopicHoldsUpNothingElse(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	testenv.RealBrokers(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1, "max.message.bytes", "1000000")
	reader := h.follow(t)
	elsewhere := *h
	elsewhere.topic = "missing-" + uuid.NewString()
	registry, err := outbox.NewRegistry("test", outbox.Event("test.oracle.happened.v1", "Key", oracle.Event.Aggregate).Topic(elsewhere.topic))
	require.NoError(t, err)
	elsewhere.rec, err = outbox.NewRecorder(registry, outbox.RecorderConfig{Schema: h.schema})
	require.NoError(t, err)

	log := new(testenv.Buffer)
	cfg := quick
	cfg.Schema, cfg.Logger, cfg.Retry.MaxRetries = h.schema, slog.New(slog.NewTextHandler(log, nil)), 1
	relay, err := outbox.NewRelay(h.db, []kgo.Opt{kgo.SeedBrokers(h.brokers...), kgo.UnknownTopicRetries(1), kgo.MetadataMinAge(20 * time.Millisecond)}, cfg)
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
	lost, good := numbered("key", 1, 40), numbered("key", 1, 40)
	elsewhere.commit(t, lost[:20]...)
	h.commit(t, good[:20]...)
	requireArrival(t, reader, good[:20]...)
	h.awaitStatuses(t, map[string]int{"waiting": 1, "parked": 19})
	elsewhere.commit(t, lost[20:]...)
	h.commit(t, good[20:]...)
	requireArrival(t, reader, good[20:]...)
	h.awaitStatuses(t, map[string]int{"waiting": 1, "parked": 39})
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "topic "+elsewhere.topic+" fails") }, testenv.Patience, time.Millisecond)
	var retries int
	require.NoError(t, h.db.QueryRow(background, h.sql(`SELECT max(retry_count) FROM {s}.outbox_failed`)).Scan(&retries))
	require.Zero(t, retries)

	testenv.CreateTopic(t, elsewhere.brokers, elsewhere.topic, 1, "max.message.bytes", "1000000")
	there := elsewhere.follow(t)
	requireArrival(t, there, lost...)
	requireInOrder(t, there, lost)
	h.awaitStatuses(t, map[string]int{})
	require.Equal(t, 1, strings.Count(log.String(), "topic "+elsewhere.topic+" fails"), "once")
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "topic "+elsewhere.topic+" works again") }, testenv.Patience, time.Millisecond)
}

// A dead broker opens the breaker: nothing is tried for a while, the log and the hook
// have it, and everything arrives when the broker is back.
func TestBreakerStopsTheRelay(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1) // events of one that is still being made would wait elsewhere
	reader := h.follow(t)
	var mu sync.Mutex
	var changes []string
	log, dialer := new(testenv.Buffer), &brokenDialer{}
	dialer.broken.Store(true)
	cfg := quick
	cfg.Schema, cfg.Logger = h.schema, slog.New(slog.NewTextHandler(log, nil))
	cfg.DeliveryTimeout, cfg.Breaker.OpenFor = time.Second, 300*time.Millisecond
	var opened []float64
	cfg.Hooks.Breaker = func(from, to outbox.BreakerState, failureRate float64) {
		mu.Lock()
		defer mu.Unlock()
		changes = append(changes, from.String()+" to "+to.String())
		if from == outbox.BreakerClosed {
			opened = append(opened, failureRate)
		} else {
			assert.Zero(t, failureRate, changes)
		}
	}
	notified := func(change string) func() bool {
		return func() bool {
			mu.Lock()
			defer mu.Unlock()
			return slices.Contains(changes, change)
		}
	}
	relay, err := outbox.NewRelay(h.db, append(testenv.KafkaOpts(h.brokers), kgo.Dialer(dialer.dial)), cfg)
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
	events := numbered("key", 1, 200)
	h.commit(t, events...)
	require.Eventually(t, notified("closed to open"), testenv.Patience, time.Millisecond)
	require.Eventually(t, notified("half-open to open"), testenv.Patience, time.Millisecond)
	require.Contains(t, log.String(), "level=ERROR msg=\"outbox: too many sends fail, breaker opens\" relay=default failure_rate=100% threshold=50%")
	require.Contains(t, log.String(), "level=WARN msg=\"outbox: breaker changed\" relay=default from=closed to=open")
	mu.Lock()
	require.Equal(t, []float64{1}, opened)
	mu.Unlock()
	require.Contains(t, log.String(), "batch stops")
	dialer.broken.Store(false)
	requireArrival(t, reader, events...)
	require.Eventually(t, notified("half-open to closed"), testenv.Patience, time.Millisecond)
	requireInOrder(t, reader, events)
	require.Zero(t, h.count(t, "outbox_failed"), "an outage is not a failure")
}

// setTopic changes a setting of the fixture's topic.
func (h *relayFixture) setTopic(t *testing.T, setting, value string) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(h.brokers...))
	require.NoError(t, err)
	defer client.Close()
	request := kmsg.NewPtrIncrementalAlterConfigsRequest()
	request.Resources = []kmsg.IncrementalAlterConfigsRequestResource{{
		ResourceType: kmsg.ConfigResourceTypeTopic, ResourceName: h.topic,
		Configs: []kmsg.IncrementalAlterConfigsRequestResourceConfig{{Name: setting, Value: &value}},
	}}
	response, err := request.RequestWith(background, client)
	require.NoError(t, err)
	require.Zero(t, response.Resources[0].ErrorCode)
}

// The waits between retries are as configured: the default ones add up to more than a
// minute for seven retries.
func TestRetryWaits(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	h.impossible(t)
	cfg := quick
	cfg.Logger = slog.New(slog.DiscardHandler)
	cfg.Retry.MaxRetries, cfg.Retry.RetryWait, cfg.Retry.MaxRetryWait = 7, 5*time.Millisecond, 50*time.Millisecond
	start := time.Now()
	testenv.Run(t, h.relay(t, cfg).Run)
	h.awaitStatuses(t, map[string]int{outbox.StatusDead: 1})
	require.Less(t, time.Since(start), 20*time.Second)
}
