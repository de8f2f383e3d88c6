package consumer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/testenv"
)

// appendRecord appends a record as a batch has it.
func appendRecord(to []byte, r *kgo.Record, n int) []byte {
	one := kmsg.Record{TimestampDelta64: int64(10 * n), OffsetDelta: int32(n), Key: r.Key, Value: r.Value}
	for _, h := range r.Headers {
		one.Headers = append(one.Headers, kmsg.Header{Key: h.Key, Value: h.Value})
	}
	for length := 0; ; { // the length counts what is behind it, and is in front
		body := one.AppendTo(nil)
		if size := len(body) - lengthOfVarint(one.Length); size != length {
			length, one.Length = size, int32(size)
			continue
		}
		return append(to, body...)
	}
}

func lengthOfVarint(n int32) int {
	size := 1
	for v := uint32(n)<<1 ^ uint32(n>>31); v >= 0x80; v >>= 7 {
		size++
	}
	return size
}

// randomRecords returns records whose parts are missing, empty, short or of up to size bytes.
func randomRecords(random *rand.Rand, n, size int) (records []*kgo.Record) {
	part := func() []byte {
		switch random.IntN(4) {
		case 0:
			return nil
		case 1:
			return []byte{}
		case 2:
			return []byte("short")
		}
		return bytes.Repeat([]byte{byte(random.Uint32())}, random.IntN(size))
	}
	for range n {
		r := &kgo.Record{Key: part(), Value: part()}
		if random.IntN(5) == 0 { // needs far more memory than it is long
			r.Headers = make([]kgo.RecordHeader, 100)
		}
		for range random.IntN(4) {
			name := string(part())
			if random.IntN(3) == 0 {
				name = []string{deadletter.ReplayOf, deadletter.Group}[random.IntN(2)]
			}
			r.Headers = append(r.Headers, kgo.RecordHeader{Key: name, Value: part()})
		}
		records = append(records, r)
	}
	return records
}

// A stream returns what the client would. A record that is too long has lost parts of it, and says which, with the
// digest of all of it; the records around it are whole.
func TestBatchStream(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(7, 7))
	at := kafka.Partition{Topic: "play-events", Number: 3}
	lost := 0
	for round := range 300 {
		most := []int{1 << 30, 5_000, 300}[round%3]
		sent := randomRecords(random, 20, 4_000)
		batch := &kmsg.RecordBatch{FirstOffset: 100, FirstTimestamp: 1_000, PartitionLeaderEpoch: 7, NumRecords: int32(len(sent)), ProducerID: 5}
		var body []byte
		for n, r := range sent {
			body = appendRecord(body, r, n)
		}
		s := newBatchStream(batch, at, bytes.NewReader(body), most)
		for n, want := range sent {
			got, err := s.next()
			require.NoError(t, err)
			require.Equal(t, []any{at.Topic, at.Number, int64(100 + n), time.UnixMilli(int64(1_000 + 10*n)), int32(7)}, []any{got.Topic, got.Partition, got.Offset, got.Timestamp, got.LeaderEpoch})
			missing := omissionOf(got)
			if missing == nil {
				require.Equal(t, []any{want.Key, want.Value, want.Headers}, []any{got.Key, got.Value, got.Headers})
				continue
			}
			lost++
			require.Equal(t, deadletter.Digest(want), missing.Digest)
			require.Positive(t, missing.Value+missing.Key+missing.Headers)
			if missing.Value > 0 {
				require.Nil(t, got.Value)
				require.Len(t, want.Value, missing.Value)
			} else {
				require.Equal(t, want.Value, got.Value)
			}
			require.Equal(t, want.Key, got.Key)
			require.Len(t, want.Headers, len(got.Headers)+missing.Headers)
		}
		_, err := s.next()
		require.ErrorIs(t, err, io.EOF)
		require.Equal(t, len(body), s.bytes)
	}
	require.Greater(t, lost, 500)
}

// A stream reads on over what ends a transaction, and what is of an aborted one. It ends at a batch that is not
// compressed, also if that is the first: Kafka may have removed the large batch in front of it. An answer without a
// whole batch is an error, unless the partition ends.
func TestStreamEndsAtTheClientsOwn(t *testing.T) {
	t.Parallel()
	batch := func(first int64, attributes int16, producer int64) []byte {
		b := kmsg.RecordBatch{FirstOffset: first, Attributes: attributes, Magic: 2, NumRecords: 1, ProducerID: producer, Records: []byte{12, 0, 0, 0, 1, 1, 0}}
		b.Length = int32(len(b.AppendTo(nil)) - batchHead)
		return b.AppendTo(nil)
	}
	const transactional, control = 1 << 4, 1 << 5
	plain := batch(7, 0, -1)
	aborted := slices.Concat(batch(5, transactional, 3), batch(6, transactional|control, 3))
	for name, tt := range map[string]struct {
		answer []byte
		next   int64
		more   bool
		err    error
	}{
		"a plain batch":                {plain, 5, false, nil},
		"an aborted transaction":       {aborted, 7, true, nil},
		"a plain batch behind one":     {slices.Concat(aborted, plain), 7, false, nil},
		"a committed one behind it":    {slices.Concat(aborted, batch(7, transactional, 3)), 7, false, nil},
		"a part of a batch":            {plain[:30], 5, false, errNothingRead},
		"nothing, and not at the end":  {nil, 5, false, errNothingRead},
		"a part behind what was read":  {slices.Concat(aborted, plain[:30]), 7, true, nil},
		"batches in front of the next": {slices.Concat(batch(4, 0, -1), plain), 5, false, nil},
	} {
		s := &batchReader{next: kgo.EpochOffset{Offset: 5}}
		more, err := s.readAll(t.Context(), &kmsg.FetchResponseTopicPartition{RecordBatches: tt.answer, HighWatermark: 9, LastStableOffset: 8,
			AbortedTransactions: []kmsg.FetchResponseTopicPartitionAbortedTransaction{{ProducerID: 3, FirstOffset: 5}}})
		require.Equal(t, []any{tt.more, tt.err, tt.next}, []any{more, err, s.next.Offset}, name)
	}
	s := &batchReader{next: kgo.EpochOffset{Offset: 8}}
	more, err := s.readAll(t.Context(), &kmsg.FetchResponseTopicPartition{HighWatermark: 9, LastStableOffset: 8})
	require.NoError(t, err)
	require.False(t, more)
}

// truncatedFixture is a stream of a worker that has read up to offset 100 of epoch 4, from a broker that has lost
// records before that offset. An answer changes what the broker says of the partition.
func truncatedFixture(t *testing.T, answer func(*kmsg.FetchResponseTopicPartition)) (m *membership, w *partitionWorker, asked *atomic.Pointer[kmsg.FetchRequestTopicPartition]) {
	t.Helper()
	s := newPartitionFixture(t, Rules{})
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(s.worker.partition.Number+1, s.worker.partition.Topic))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	asked = new(atomic.Pointer[kmsg.FetchRequestTopicPartition])
	cluster.ControlKey(int16(kmsg.Fetch), func(request kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		fetch := request.(*kmsg.FetchRequest)
		about := fetch.Topics[0].Partitions[0]
		asked.Store(&about)
		response := fetch.ResponseKind().(*kmsg.FetchResponse)
		one := kmsg.NewFetchResponseTopicPartition()
		one.Partition, one.HighWatermark, one.LastStableOffset, one.LogStartOffset = about.Partition, 90, 90, 0
		answer(&one)
		topic := kmsg.NewFetchResponseTopic()
		topic.Topic, topic.TopicID, topic.Partitions = fetch.Topics[0].Topic, fetch.Topics[0].TopicID, append(topic.Partitions, one)
		response.Topics = append(response.Topics, topic)
		return response, nil, true
	})
	m = &membership{
		starts: starts.NewMember(starts.Config{Log: s.worker.log, Lost: func(kafka.Partition, int64) {}}), outages: outage.NewLogs(s.worker.log), log: s.worker.log,
		contact: kafka.NewContact(nil, false, func(time.Time, error, ...any) {}), workers: map[kafka.Partition]*partitionWorker{s.worker.partition: s.worker},
	}
	m.second.opts, m.streams.slot = []kgo.Opt{kgo.SeedBrokers(cluster.ListenAddrs()...)}, make(chan struct{}, 1)
	t.Cleanup(m.second.close)
	m.client, err = m.second.get()
	require.NoError(t, err)
	s.worker.begin(starts.Beginning{EpochOffset: kgo.EpochOffset{Epoch: -1, Offset: 99}})
	m.distribute(kgo.FetchPartition{Records: []*kgo.Record{{Offset: 99, LeaderEpoch: 4}}}, s.worker)
	return m, s.worker, asked
}

// A stream behind the end of a log, or behind where the log was written anew, ends: the client finds out where the log
// has ended, with the epoch of what was read, and reports the loss. The next stream begins where the client does.
func TestStreamOfTruncatedLog(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]func(*kmsg.FetchResponseTopicPartition){
		"the end is before":     func(p *kmsg.FetchResponseTopicPartition) { p.ErrorCode = kerr.OffsetOutOfRange.Code },
		"other records precede": func(p *kmsg.FetchResponseTopicPartition) { p.DivergingEpoch.Epoch, p.DivergingEpoch.EndOffset = 4, 80 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, w, asked := truncatedFixture(t, answer)
			require.True(t, w.beginStream())
			ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
			defer cancel()
			m.stream(ctx, w)
			ended := m.streams.takeEnded()
			require.Len(t, ended, 1)
			require.Equal(t, kgo.EpochOffset{Epoch: 4, Offset: 100}, ended[0].next)
			require.EqualValues(t, 100, asked.Load().FetchOffset)
			require.EqualValues(t, 4, asked.Load().LastFetchedEpoch)
			w.endStream()
			loss := &kgo.ErrDataLoss{Topic: w.partition.Topic, Partition: w.partition.Number, ConsumedTo: 100, ConsumedToEpoch: 4, ResetTo: 80, ResetToEpoch: 4}
			m.fetchFailed(ctx, time.Now(), w.partition, loss)
			require.Equal(t, kgo.EpochOffset{Epoch: 4, Offset: 80}, w.nextRead())
		})
	}
}

// Records that are cut off, or changed, are an error or other records, and need no memory that they only claim.
func FuzzBatchStream(f *testing.F) {
	random := rand.New(rand.NewPCG(8, 8))
	for range 5 {
		var body []byte
		for n, r := range randomRecords(random, 3, 50) {
			body = appendRecord(body, r, n)
		}
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		s := newBatchStream(&kmsg.RecordBatch{NumRecords: 1 << 20}, kafka.Partition{}, bytes.NewReader(body), 100)
		for {
			r, err := s.next()
			if err != nil {
				require.True(t, errors.Is(err, errCorrupt) || errors.Is(err, io.EOF), err)
				return
			}
			require.Less(t, len(r.Value), 101)
		}
	})
}
