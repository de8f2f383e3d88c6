package outboxdlq_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxdlq"
	"github.com/outboxgo/outbox/outboxtopics"
)

var background = context.Background()

// fixture is a topic, the topic of its dead letters, and a client.
type fixture struct {
	topic, dlq string
	kafka      []kgo.Opt
	client     *kgo.Client
}

func newFixture(t testing.TB, partitions int32) *fixture {
	t.Helper()
	brokers := testenv.RealBrokers(t)
	f := &fixture{topic: "dead-" + uuid.NewString(), kafka: []kgo.Opt{kgo.SeedBrokers(brokers...), kgo.MetadataMinAge(50 * time.Millisecond)}}
	f.dlq = outbox.DeadLetterTopic(f.topic)
	testenv.CreateTopic(t, brokers, f.topic, 1, "max.message.bytes", "10000")
	testenv.CreateTopic(t, brokers, f.dlq, partitions)
	requireTopics(t, brokers, f.topic, f.dlq)
	var err error
	f.client, err = kgo.NewClient(append(f.kafka, kgo.RecordPartitioner(kgo.ManualPartitioner()))...)
	require.NoError(t, err)
	t.Cleanup(f.client.Close)
	return f
}

// requireTopics waits until the broker knows topics.
func requireTopics(t testing.TB, brokers []string, topics ...string) {
	t.Helper()
	require.Eventually(t, func() bool {
		infos, err := outboxtopics.Describe(background, testenv.KafkaOpts(brokers), topics...)
		return err == nil && len(infos) == len(topics)
	}, testenv.Patience, 10*time.Millisecond)
}

// failedAt is the time in the dead letters of these tests.
var failedAt = time.Date(2026, 2, 3, 4, 5, 6, 789e6, time.UTC)

// deadLetter returns a dead letter, with the given headers after the usual ones.
func (f *fixture) deadLetter(key, value string, headers ...string) *kgo.Record {
	r := &kgo.Record{Topic: f.dlq, Key: []byte(key), Value: []byte(value)}
	add := func(name, value string) {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: name, Value: []byte(value)})
	}
	add("ce_id", "e-"+key)
	add(outbox.DeadLetterOriginalTopic, f.topic)
	add(outbox.DeadLetterOriginalPartition, "0")
	add(outbox.DeadLetterOriginalOffset, "17")
	add(outbox.DeadLetterOriginalTimestamp, "2026-02-03T04:05:06.789Z")
	add(outbox.DeadLetterGroup, "statistics")
	add(outbox.DeadLetterAction, "COUNT")
	add(outbox.DeadLetterError, "boom")
	add(outbox.DeadLetterClass, "handler")
	add(outbox.DeadLetterAttempts, "4")
	add(outbox.DeadLetterFailedAt, "2026-02-03T04:05:06.789Z")
	for i := 0; i < len(headers); i += 2 {
		add(headers[i], headers[i+1])
	}
	return r
}

func (f *fixture) produce(t testing.TB, records ...*kgo.Record) {
	t.Helper()
	require.NoError(t, f.client.ProduceSync(background, records...).FirstErr())
}

// keys returns the keys of the records of a topic.
func keys(t testing.TB, kafka []kgo.Opt, topic string, from map[int32]int64) (all []string) {
	t.Helper()
	for d, err := range outboxdlq.Read(background, kafka, topic, from) {
		if d.Record == nil {
			require.NoError(t, err)
		}
		all = append(all, string(d.Record.Key))
	}
	return all
}

// records returns all records of a topic.
func (f *fixture) records(t testing.TB, topic string) (all []*kgo.Record) {
	t.Helper()
	for d, err := range outboxdlq.Read(background, f.kafka, topic, nil) {
		require.NotNil(t, d.Record, "%v", err)
		all = append(all, d.Record)
	}
	return all
}

// allHeaders returns the headers of a record by their names.
func allHeaders(r *kgo.Record) map[string]string {
	all := map[string]string{}
	for _, h := range r.Headers {
		if _, repeated := all[h.Key]; repeated {
			all[h.Key] += ", "
		}
		all[h.Key] += string(h.Value)
	}
	return all
}

// transaction produces records in a transaction. The function end commits or aborts it.
func (f *fixture) transaction(t testing.TB, records ...*kgo.Record) (end func(kgo.TransactionEndTry)) {
	t.Helper()
	client, err := kgo.NewClient(append(f.kafka, kgo.TransactionalID(uuid.NewString()))...)
	require.NoError(t, err)
	t.Cleanup(client.Close)
	require.NoError(t, client.BeginTransaction())
	require.NoError(t, client.ProduceSync(background, records...).FirstErr())
	return func(how kgo.TransactionEndTry) { require.NoError(t, client.EndTransaction(background, how)) }
}

// awaitStable waits until the last stable offset of a topic is the given one.
func (f *fixture) awaitStable(t testing.TB, topic string, offset int64) {
	t.Helper()
	require.Eventually(t, func() bool {
		request := kmsg.NewPtrListOffsetsRequest()
		request.ReplicaID, request.IsolationLevel = -1, 1
		request.Topics = []kmsg.ListOffsetsRequestTopic{{Topic: topic, Partitions: []kmsg.ListOffsetsRequestTopicPartition{{Timestamp: -1, CurrentLeaderEpoch: -1}}}}
		response, err := request.RequestWith(background, f.client)
		require.NoError(t, err)
		return response.Topics[0].Partitions[0].Offset == offset
	}, testenv.Patience, 10*time.Millisecond)
}

// deleteBefore deletes the records of the topic up to an offset.
func (f *fixture) deleteBefore(t testing.TB, offset int64) {
	t.Helper()
	request := kmsg.NewPtrDeleteRecordsRequest()
	request.Topics = []kmsg.DeleteRecordsRequestTopic{{Topic: f.topic, Partitions: []kmsg.DeleteRecordsRequestTopicPartition{{Offset: offset}}}}
	response, err := request.RequestWith(background, f.client)
	require.NoError(t, err)
	require.Zero(t, response.Topics[0].Partitions[0].ErrorCode)
}

// requireFieldError requires an error about a header, for the wanted reason.
func requireFieldError(t testing.TB, err, want error, header string) {
	t.Helper()
	require.ErrorIs(t, err, want)
	field, ok := errors.AsType[*outbox.FieldError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, []any{"", -1, header}, []any{field.EventType, field.Index, field.Field})
}

// random returns n characters that do not compress well.
func random(n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = "0123456789abcdefghijklmnopqrstuvwxyz"[rand.IntN(36)]
	}
	return string(b)
}
