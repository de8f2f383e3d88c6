package faults_test

import (
	"bytes"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxdlq"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// deadLetters puts n dead letters of topic into its dead-letter topic, in one batch for
// each of them.
func deadLetters(t *testing.T, opts []kgo.Opt, topic string, n int) {
	t.Helper()
	client, err := kgo.NewClient(opts...)
	require.NoError(t, err)
	defer client.Close()
	for i := range n {
		r := &kgo.Record{Topic: outbox.DeadLetterTopic(topic), Key: []byte(strconv.Itoa(i))}
		for name, value := range map[string]string{
			outbox.DeadLetterOriginalTopic: topic, outbox.DeadLetterOriginalPartition: "0",
			outbox.DeadLetterOriginalOffset: strconv.Itoa(i), outbox.DeadLetterGroup: "g",
		} {
			r.Headers = append(r.Headers, kgo.RecordHeader{Key: name, Value: []byte(value)})
		}
		require.NoError(t, client.ProduceSync(t.Context(), r).FirstErr())
	}
}

func arrived(t *testing.T, opts []kgo.Opt, topic string) (keys []string) {
	t.Helper()
	for d, err := range outboxdlq.Read(t.Context(), opts, topic, nil) {
		require.NotNil(t, d.Record, "%v", err)
		keys = append(keys, string(d.Record.Key))
	}
	return keys
}

// What is not a record's own fault ends the run, which says what was not sent and does
// not try again. A run for what is left sends just that.
func TestReplayStops(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	kafka, opts := fakeKafka(t, kfake.SeedTopics(1, "orders", "orders.dlq"))
	deadLetters(t, opts, "orders", 5)
	denied := kafka.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "orders", Err: kerr.TopicAuthorizationFailed, Count: -1})
	report, err := outboxdlq.Replay(t.Context(), opts, outboxdlq.ReplayConfig{Topic: "orders.dlq"})
	require.ErrorIs(t, err, kerr.TopicAuthorizationFailed)
	require.ErrorContains(t, err, "outbox: replay of orders.dlq: partition orders.dlq/0 at offset 0: ")
	require.Equal(t, 1, denied.Hits(), "it was tried once")
	require.Zero(t, report.Sent)
	require.Len(t, report.Failed, 5)
	for i, f := range report.Failed {
		require.Equal(t, outboxdlq.ReplayFailure{Offset: int64(i), Err: f.Err}, f)
		require.ErrorIs(t, f.Err, kerr.TopicAuthorizationFailed)
	}
	require.Equal(t, map[int32]int64{0: 5}, report.Next)
	require.Empty(t, arrived(t, opts, "orders"))

	denied.Remove()
	deadLetters(t, opts, "orders", 1) // a new one
	rest, err := outboxdlq.Replay(t.Context(), opts, outboxdlq.ReplayConfig{Topic: "orders.dlq", Choose: func(d outboxdlq.DeadLetter) bool {
		return report.Left(d) && string(d.Record.Key) != "3"
	}})
	require.NoError(t, err)
	require.Equal(t, 5, rest.Sent)
	require.Equal(t, []string{"0", "1", "2", "4", "0"}, arrived(t, opts, "orders"))
}

// A refusal condemns a whole batch. What is refused alone was to blame.
func TestReplayBlamesTheRightOnes(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	kafka, opts := fakeKafka(t, kfake.SeedTopics(1, "orders", "orders.dlq"))
	opts = append(opts, kgo.ProducerBatchCompression(kgo.NoCompression()))
	deadLetters(t, opts, "orders", 200)
	batches := kafka.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "orders", Err: kerr.InvalidRecord, Count: -1, When: func(r kmsg.Request) bool {
		return bytes.Contains(r.(*kmsg.ProduceRequest).Topics[0].Partitions[0].Records, []byte("orders-0-150"))
	}})
	report, err := outboxdlq.Replay(t.Context(), opts, outboxdlq.ReplayConfig{Topic: "orders.dlq"})
	require.NoError(t, err)
	require.Equal(t, 2, batches.Hits(), "in company and alone")
	require.Equal(t, 199, report.Sent)
	require.Len(t, report.Failed, 1)
	require.Equal(t, int64(150), report.Failed[0].Offset)
	require.ErrorIs(t, report.Failed[0].Err, kerr.InvalidRecord)
	got := arrived(t, opts, "orders")
	require.Len(t, got, 199)
	require.NotContains(t, got, "150")
	slices.Sort(got)
	require.Len(t, slices.Compact(got), 199, "each once")
}

// A leader that has moved is found; a partition that must not be read is an error.
func TestReadAfterOutage(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	kafka, opts := fakeKafka(t, kfake.SeedTopics(1, "orders", "orders.dlq"))
	deadLetters(t, opts, "orders", 3)
	moved := kafka.Fault(
		kfake.Fault{Keys: []kmsg.Key{kmsg.Fetch}, Err: kerr.NotLeaderForPartition, Count: 2},
		kfake.Fault{Keys: []kmsg.Key{kmsg.Fetch}, Err: kerr.UnknownTopicID},
	)
	require.Equal(t, []string{"0", "1", "2"}, arrived(t, opts, "orders.dlq"))
	require.Equal(t, 3, moved.Hits())

	for name, tt := range map[string]struct {
		fault kfake.Fault
		want  string
	}{
		"to read":     {kfake.Fault{Keys: []kmsg.Key{kmsg.Fetch}}, "read partition orders.dlq/0 at offset 0: TOPIC_AUTHORIZATION_FAILED"},
		"to ask":      {kfake.Fault{Keys: []kmsg.Key{kmsg.ListOffsets}}, "offsets of partition orders.dlq/0: TOPIC_AUTHORIZATION_FAILED"},
		"to describe": {kfake.Fault{Keys: []kmsg.Key{kmsg.Metadata}, Topic: "orders.dlq"}, "topic orders.dlq: TOPIC_AUTHORIZATION_FAILED"},
	} {
		t.Run(name, func(t *testing.T) {
			tt.fault.Err, tt.fault.Count = kerr.TopicAuthorizationFailed, -1
			denied := kafka.Fault(tt.fault)
			defer denied.Remove()
			began := time.Now()
			report, err := outboxdlq.Replay(t.Context(), opts, outboxdlq.ReplayConfig{Topic: "orders.dlq"})
			require.ErrorIs(t, err, kerr.TopicAuthorizationFailed)
			require.ErrorContains(t, err, tt.want)
			require.Zero(t, report.Read)
			require.Less(t, time.Since(began), 10*time.Second, "that is not waited out")
		})
	}
}

// Without the original's topic a dead letter that has no value cannot be sent, but where
// it cannot be read for now, the run ends, so that another one can.
func TestReplayOfUnreadableOriginal(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	kafka, opts := fakeKafka(t, kfake.SeedTopics(1, "orders", "orders.dlq"))
	deadLetters(t, opts, "orders", 2)
	client, err := kgo.NewClient(opts...)
	require.NoError(t, err)
	t.Cleanup(client.Close)
	r := &kgo.Record{Topic: "orders.dlq", Headers: []kgo.RecordHeader{
		{Key: outbox.DeadLetterOriginalTopic, Value: []byte("orders")}, {Key: outbox.DeadLetterOriginalPartition, Value: []byte("0")},
		{Key: outbox.DeadLetterOriginalOffset, Value: []byte("0")}, {Key: outbox.DeadLetterGroup, Value: []byte("g")},
		{Key: outbox.DeadLetterValueOmitted, Value: []byte("5")},
	}}
	require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: "orders", Value: []byte("value")}, r).FirstErr())
	denied := kafka.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Fetch}, Topic: "orders", Err: kerr.TopicAuthorizationFailed})
	report, err := outboxdlq.Replay(t.Context(), opts, outboxdlq.ReplayConfig{Topic: "orders.dlq"})
	require.ErrorIs(t, err, kerr.TopicAuthorizationFailed)
	require.ErrorContains(t, err, "original of partition orders.dlq/0 at offset 2: ")
	require.Equal(t, 1, denied.Hits())
	require.Equal(t, outboxdlq.ReplayReport{Read: 2, Sent: 2, Absent: []string{"g"}, Next: map[int32]int64{0: 2}}, report, "those before it are sent")
	report, err = outboxdlq.Replay(t.Context(), opts, outboxdlq.ReplayConfig{Topic: "orders.dlq", From: report.Next})
	require.NoError(t, err)
	require.Equal(t, outboxdlq.ReplayReport{Read: 1, Sent: 1, Absent: []string{"g"}, Next: map[int32]int64{0: 3}}, report)
	require.Equal(t, []string{"", "0", "1", ""}, arrived(t, opts, "orders"))
}
