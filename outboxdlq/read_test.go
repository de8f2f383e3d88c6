package outboxdlq_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxdlq"
)

// Read returns the records up to the end at the time of the call, partition by partition.
func TestDeadLetters(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 3)
	require.Empty(t, keys(t, f.kafka, f.dlq, nil))
	var want []string
	for p := range int32(3) {
		for n := range 500 {
			r := f.deadLetter(fmt.Sprintf("%d-%d", p, n), random(3000))
			r.Partition = p
			f.client.Produce(background, r, nil)
			want = append(want, string(r.Key))
		}
	}
	require.NoError(t, f.client.Flush(background))
	require.Equal(t, want, keys(t, f.kafka, f.dlq, nil))
	require.Equal(t, slices.Concat(want[300:500], want[500:1000], want[1499:]), keys(t, f.kafka, f.dlq, map[int32]int64{0: 300, 2: 499}))
	require.Equal(t, want[1000:], keys(t, f.kafka, f.dlq, map[int32]int64{0: 500, 1: 1_000_000}), "an offset behind the end")
	old := slices.Concat(f.kafka, []kgo.Opt{kgo.MaxVersions(kversion.V2_8_0())}) // before topics had ids
	require.Equal(t, want, keys(t, old, f.dlq, nil))

	n := 0
	for _, err := range outboxdlq.Read(background, f.kafka, f.dlq, nil) {
		require.NoError(t, err)
		if n++; n == 1 {
			f.produce(t, f.deadLetter("late", "v"))
		}
	}
	require.Equal(t, 1500, n)
	for range outboxdlq.Read(background, f.kafka, f.dlq, nil) {
		n++
		break
	}
	require.Equal(t, 1501, n)
}

// A record that is no dead letter is returned with an error, and reading continues.
func TestDeadLettersAmongOthers(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1)
	f.produce(t, f.deadLetter("a", "v"), &kgo.Record{Topic: f.dlq, Key: []byte("other")}, f.deadLetter("b", "v"))
	var got []string
	for d, err := range outboxdlq.Read(background, f.kafka, f.dlq, nil) {
		got = append(got, string(d.Record.Key))
		require.Equal(t, string(d.Record.Key) == "other", err != nil, "%v", err)
		if err != nil {
			requireFieldError(t, err, outbox.ErrEmpty, outbox.DeadLetterOriginalTopic)
		}
	}
	require.Equal(t, []string{"a", "other", "b"}, got)
}

// Records of aborted and open transactions are not returned, and Read does not wait for them, at any
// position.
func TestDeadLettersOfTransactions(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1)
	transaction := func(key string) (end func(kgo.TransactionEndTry)) {
		return f.transaction(t, f.deadLetter(key, "v"), f.deadLetter(key, "v"))
	}
	requireReadable := func(want ...string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(background, testenv.Patience)
		defer cancel()
		require.Eventually(t, func() bool { // the broker writes the markers after the end of the transaction
			var got []string
			for d, err := range outboxdlq.Read(ctx, f.kafka, f.dlq, nil) {
				require.NoError(t, err)
				got = append(got, string(d.Record.Key))
			}
			return slices.Equal(want, got)
		}, testenv.Patience, 10*time.Millisecond)
	}
	transaction("aborted")(kgo.TryAbort)
	requireReadable()
	transaction("committed")(kgo.TryCommit)
	requireReadable("committed", "committed")
	// This transaction is aborted after another transaction has begun, so that an aborted record is the
	// last record below the last stable offset.
	abort := transaction("aborted")
	commit := transaction("open")
	abort(kgo.TryAbort)
	requireReadable("committed", "committed")
	f.awaitStable(t, f.dlq, 8)
	requireReadable("committed", "committed")
	commit(kgo.TryCommit)
	requireReadable("committed", "committed", "open", "open")
}

func TestDeadLettersOfNoTopic(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1)
	for name, tt := range map[string]struct {
		kafka []kgo.Opt
		topic string
		from  map[int32]int64
		want  string
	}{
		"a missing topic":     {f.kafka, f.topic + ".no", nil, "UNKNOWN_TOPIC_OR_PARTITION"},
		"a missing partition": {f.kafka, f.dlq, map[int32]int64{7: 0}, "partition " + f.dlq + "/7 to begin with: UNKNOWN_TOPIC_OR_PARTITION"},
		"a negative offset":   {f.kafka, f.dlq, map[int32]int64{0: -1}, "offset -1 of partition 0 to begin with: must not be negative"},
		"a group":             {append(f.kafka, kgo.ConsumerGroup("g")), f.dlq, nil, "kafka option ConsumerGroup"},
	} {
		t.Run(name, func(t *testing.T) {
			n := 0
			for d, err := range outboxdlq.Read(background, tt.kafka, tt.topic, tt.from) {
				n++
				require.Nil(t, d.Record)
				require.ErrorContains(t, err, tt.want)
				require.ErrorContains(t, err, "outbox: dead letters of "+tt.topic)
			}
			require.Equal(t, 1, n)
		})
	}
	ctx, cancel := context.WithCancel(background)
	cancel()
	for _, err := range outboxdlq.Read(ctx, f.kafka, f.dlq, nil) {
		require.ErrorIs(t, err, context.Canceled)
	}
}

// The host's limit for the decompressed size of a batch also bounds dead letters: reading ends at once with
// the position.
func TestReadOfHugeBatch(t *testing.T) {
	t.Parallel()
	brokers, topic := testenv.Brokers(t), "huge-"+uuid.NewString()+".dlq"
	testenv.CreateTopic(t, brokers, topic, 1)
	producer, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.ProducerBatchCompression(kgo.ZstdCompression()), kgo.ProducerBatchMaxBytes(90<<20))
	require.NoError(t, err)
	defer producer.Close()
	for _, size := range []int{2 << 20, 80 << 20} {
		require.NoError(t, producer.ProduceSync(context.Background(), &kgo.Record{Topic: topic, Value: make([]byte, size)}).FirstErr())
	}
	for _, tt := range []struct {
		name string
		opts []kgo.Opt
		at   string
	}{
		{"a limit of the host", []kgo.Opt{kgo.MaxDecompressBatchBytes(1 << 20)}, "at offset 0"},
		{"64 MiB", nil, "at offset 1"},
	} {
		began := time.Now()
		var last error
		for d, err := range outboxdlq.Read(context.Background(), append(tt.opts, kgo.SeedBrokers(brokers...)), topic, nil) {
			if last = err; d.Record == nil {
				break
			}
		}
		require.ErrorIs(t, last, kgo.ErrMaxDecompress, tt.name)
		require.ErrorContains(t, last, tt.at, tt.name)
		require.Less(t, time.Since(began), 10*time.Second, tt.name)
	}
}
