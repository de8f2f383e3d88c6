package consumer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A forged claim may name no dead letter, so that Kafka is not asked. It ends no outage that another partition sees.
func TestForgedClaimEndsNoOutage(t *testing.T) {
	t.Parallel()
	s := newPartitionFixture(t, Rules{})
	s.forged = true
	s.worker.outages.Report("reading dead letters of play-events", time.Now(), errors.New("no route"))
	items := make([]recordItem, 1)
	items[0].record = withHeaders(s.arrive("a")[0], deadletter.ReplayGroup, "g", deadletter.ReplayAction, "NONE", deadletter.ReplayFrom, "nothing")
	s.worker.admit(items)
	require.True(t, s.worker.outages.Failing())
}

// The answer to a dead letter that came too late for its own call ends the outage of that time, and no later one.
func TestLateDeadLetterEndsNoLaterOutage(t *testing.T) {
	t.Parallel()
	c := &Consumer{
		Rules:   &Rules{DeadLetterTopic: func(string) string { return "dlq" }, Rules: &handling.Rules{}},
		outages: outage.NewLogs(slog.New(slog.DiscardHandler)),
	}
	d := deadRow(1)
	d.Action, d.Record = "ACTED", parkedRecordOf(&kgo.Record{Topic: "sales", Value: []byte("{}")}, kafka.TopicID{})
	c.gates.topics = map[string]*deadLetterGate{"dlq": {sending: map[int64]bool{}, accepted: map[int64]accepted{1: {"dlq-0-7", time.Now()}}}}
	c.outages.Report(outageDeadLetters+"dlq", time.Now(), errors.New("not enough replicas"))
	_, place, err := c.sendDeadLetter(t.Context(), d, handling.Outcome{Result: handling.Dead, Err: errors.New("bad")})
	require.NoError(t, err)
	require.Equal(t, "dlq-0-7", place)
	require.True(t, c.outages.Failing())
	_, _, err = c.sendDeadLetter(t.Context(), &delivery.Delivery{Ref: delivery.Ref{ID: 2}, Action: "ACTED", Record: d.Record}, handling.Outcome{Result: handling.Dead, Err: errors.New("bad")})
	require.ErrorIs(t, err, errNoMember)
	require.True(t, c.outages.Failing())
}

// The dead letter of a row whose record cannot be read has what the columns say, and names nothing as read.
func TestDeadLetterOfAnUnreadableRow(t *testing.T) {
	t.Parallel()
	c := &Consumer{
		Rules:   &Rules{DeadLetterTopic: func(string) string { return "dlq" }, Rules: &handling.Rules{Group: "g"}},
		outages: outage.NewLogs(slog.New(slog.DiscardHandler)),
	}
	dead := handling.Outcome{Result: handling.Dead, Class: handling.ClassUndecodable, Err: errors.New("missing chunk")}
	for name, d := range map[string]delivery.Delivery{
		"damaged":   {Bare: true},
		"malformed": {Payload: []byte("{}"), Record: []byte("{")},
	} {
		t.Run(name, func(t *testing.T) {
			d.FromKafka, d.Stream, d.Partition, d.Position, d.PartitionKey = true, "sales", 3, 17, "k"
			_, _, err := c.sendDeadLetter(t.Context(), &d, dead)
			require.ErrorIs(t, err, errNoMember)

			var sent *kgo.Record
			sender := deadLetters{c.Rules, func(_ context.Context, r *kgo.Record) error { sent = r; return nil }}
			place, err := sender.send(t.Context(), deadRecordOf(&d), dead)
			require.NoError(t, err)
			require.Empty(t, place)
			require.Equal(t, []string{"dlq", "k", ""}, []string{sent.Topic, string(sent.Key), string(sent.Value)})
			got := map[string]string{}
			for _, h := range sent.Headers {
				got[h.Key] = string(h.Value)
			}
			require.Equal(t, []string{"sales", "3", "17"}, []string{got[deadletter.OriginalTopic], got[deadletter.OriginalPartition], got[deadletter.OriginalOffset]})
			require.Contains(t, got[deadletter.Unread], "event_delivery")
			require.NotContains(t, got, deadletter.OriginalTimestamp)
			require.NotContains(t, got, deadletter.OriginalDigest)
		})
	}
}

// Records that Kafka has lost with a broker count as lost, as those that it has removed.
func TestLostWithABroker(t *testing.T) {
	t.Parallel()
	type loss struct {
		at      kafka.Partition
		records int64
	}
	var lost []loss
	m := &membership{starts: starts.NewMember(starts.Config{Log: slog.New(slog.DiscardHandler), Lost: func(at kafka.Partition, records int64) { lost = append(lost, loss{at, records}) }})}
	at := kafka.Partition{Topic: "sales", Number: 3}
	err := &kgo.ErrDataLoss{Topic: at.Topic, Partition: at.Number, ConsumedTo: 100, ResetTo: 90} // 10 are lost, or read again
	m.fetchFailed(t.Context(), time.Now(), at, fmt.Errorf("fetch: %w", err))
	require.Equal(t, []loss{{at, 1}}, lost)
}

// Records and an assignment are answers of Kafka: they end an outage of Kafka at once.
func TestAnswersEndOutageOfKafka(t *testing.T) {
	t.Parallel()
	m := &membership{outages: outage.NewLogs(slog.New(slog.DiscardHandler)), contact: kafka.NewContact(nil, false, func(time.Time, error, ...any) {})}
	m.outages.Report(outageKafka, time.Now(), errors.New("no route"))
	m.answered()
	require.False(t, m.outages.Failing())
}

// A topic that may not be read any more does not work, whatever Kafka returns of others. Its log has one line when
// that begins and one when it ends. It is not fetched again at once. It works when Kafka has answered a fetch.
func TestTopicThatMayNotBeRead(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	var denied atomic.Bool
	m, w, _ := truncatedFixture(t, func(p *kmsg.FetchResponseTopicPartition) {
		if denied.Load() {
			p.ErrorCode = kerr.TopicAuthorizationFailed.Code
		}
	})
	m.outages, w.group = outage.NewLogs(slog.New(slog.NewTextHandler(&log, nil))), m
	other := newPartitionWorker(kafka.Partition{Topic: "other-events"}, w.reader, w.group, w.cfg, w.limits, w.outages)
	m.workers[other.partition] = other
	const name = outageFetchingTopic + "play-events"
	requireFails := func(fails bool, lines int) {
		t.Helper()
		require.Equal(t, fails, m.outages.Fails(name), log.String())
		require.Equal(t, lines, strings.Count(log.String(), name), log.String())
		require.Equal(t, lines, strings.Count(log.String(), "\n"), log.String())
	}
	fail := func(err error) { m.fetchFailed(t.Context(), time.Now(), w.partition, err) }
	one := []*kgo.Record{{Offset: 100, LeaderEpoch: 4}}
	denied.Store(true)
	for range 10 {
		fail(kerr.TopicAuthorizationFailed)
		m.distribute(kgo.FetchPartition{Records: one}, other)
	}
	requireFails(true, 1)
	require.Equal(t, w.partition.Only(), m.client.PauseFetchPartitions(nil))
	m.probe(t.Context(), w.partition, kerr.TopicAuthorizationFailed)
	requireFails(true, 1)
	denied.Store(false)
	end := testenv.Run(t, func(ctx context.Context) error { m.refetch(ctx); return nil })
	require.Eventually(t, func() bool { return !m.outages.Failing() }, testenv.Patience, 10*time.Millisecond)
	end()
	requireFails(false, 2)
	require.Empty(t, m.client.PauseFetchPartitions(nil))

	fail(kerr.TopicAuthorizationFailed)
	m.distribute(kgo.FetchPartition{Records: one}, w)
	requireFails(false, 4)
	damaged := errors.New("the batch is damaged")
	fail(damaged)
	m.probe(t.Context(), w.partition, damaged)
	m.distribute(kgo.FetchPartition{Records: one, Err: damaged}, w)
	requireFails(true, 5)
	m.fetchFailed(t.Context(), time.Now(), w.partition.WholeTopic(), kerr.TopicAuthorizationFailed)
	m.distribute(kgo.FetchPartition{Records: one}, w)
	requireFails(false, 6)
}

// An outage of a topic lasts until all of its partitions have been fetched again.
func TestTwoPartitionsThatMayNotBeRead(t *testing.T) {
	t.Parallel()
	m, w, _ := truncatedFixture(t, func(*kmsg.FetchResponseTopicPartition) {})
	other := newPartitionWorker(kafka.Partition{Topic: w.partition.Topic, Number: 1}, w.reader, w.group, w.cfg, w.limits, w.outages)
	m.workers[other.partition] = other
	for _, at := range []kafka.Partition{w.partition, other.partition} {
		m.fetchFailed(t.Context(), time.Now(), at, kerr.TopicAuthorizationFailed)
	}
	m.distribute(kgo.FetchPartition{Records: []*kgo.Record{{}}}, other)
	require.True(t, m.outages.Failing())
	m.remove(w.partition.Only()) // another member has it
	m.distribute(kgo.FetchPartition{Records: []*kgo.Record{{}}}, other)
	require.False(t, m.outages.Failing())
}

// Behind a session that has ended in an outage, Kafka answers that it does not know the member. That is no outage.
func TestExpelledMemberIsNoOutage(t *testing.T) {
	t.Parallel()
	m := &membership{outages: outage.NewLogs(slog.New(slog.DiscardHandler)), log: slog.New(slog.DiscardHandler)}
	m.fetchFailed(t.Context(), time.Now(), kafka.Partition{}, fmt.Errorf("unable to join group session: %w", kerr.UnknownMemberID))
	require.False(t, m.outages.Failing())
	m.fetchFailed(t.Context(), time.Now(), kafka.Partition{}, errors.New("no route"))
	require.True(t, m.outages.Failing())
}

// An outage of a topic ends with the last of its partitions whose fetches have failed: nothing would show its end. A
// failure that comes when the partition is with another member begins no outage, and pauses nothing.
func TestOutageLeavesWithThePartition(t *testing.T) {
	t.Parallel()
	client, err := kgo.NewClient(kgo.SeedBrokers("127.0.0.1:1"), kgo.ConsumeTopics("sales"), kgo.ConsumerGroup("g"))
	require.NoError(t, err)
	defer client.Close()
	var lines bytes.Buffer
	at := func(number int32) kafka.Partition { return kafka.Partition{Topic: "sales", Number: number} }
	m := &membership{client: client, outages: outage.NewLogs(slog.New(slog.NewTextHandler(&lines, nil))), workers: map[kafka.Partition]*partitionWorker{at(0): {}, at(1): {}}}
	for n := range int32(2) {
		m.fetchFails(time.Now(), at(n), kerr.TopicAuthorizationFailed)
	}
	require.Len(t, client.PauseFetchPartitions(nil)["sales"], 2)
	m.remove(map[string][]int32{"sales": {0}})
	require.Len(t, m.outages.Current(), 1)
	require.NotContains(t, lines.String(), "is not tried any more")
	m.remove(map[string][]int32{"sales": {1}})
	require.Empty(t, m.outages.Current())
	require.False(t, m.outages.Failing())
	require.Contains(t, lines.String(), "is not tried any more: this process has none of the partitions")

	client.ResumeFetchPartitions(map[string][]int32{"sales": {0, 1}})
	m.fetchFails(time.Now(), at(1), kerr.TopicAuthorizationFailed)
	require.Empty(t, m.outages.Current())
	require.Empty(t, client.PauseFetchPartitions(nil))
}
