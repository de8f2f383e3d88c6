package itest

import (
	"bytes"
	"context"
	"fmt"
	"hash/crc32"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// newStreamFixture returns a fixture with a topic of some partitions, and a function that sends a batch.
func newStreamFixture(t *testing.T, partitions int32, codec kgo.CompressionCodec) (*consumerFixture, func(...*kgo.Record)) {
	t.Helper()
	s := newConsumerFixtureOn(t, func(h *relayFixture) {
		testenv.CreateTopic(t, h.brokers, h.topic, partitions, "max.message.bytes", "30000000")
		testenv.CreateTopic(t, h.brokers, h.topic+".dlq", 1)
	})
	producer, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ManualFlushing(),
		kgo.ProducerBatchCompression(codec), kgo.ProducerBatchMaxBytes(1<<30), kgo.BrokerMaxWriteBytes(1<<30), kgo.MaxBufferedRecords(100_000))
	require.NoError(t, err)
	t.Cleanup(producer.Close)
	return s, func(records ...*kgo.Record) { sendBatch(t, producer, records...) }
}

// smallBatches is a bound that makes bombs cheap.
const smallBatches = 1 << 20

// smallConsumer returns a consumer for which a batch is large above smallBatches.
func (s *consumerFixture) smallConsumer(t *testing.T, handlers ...outbox.Handler) *outbox.Consumer {
	t.Helper()
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, From: outbox.FromStart}}
	c, err := outbox.NewConsumer(s.db, append(testenv.KafkaOpts(s.brokers), kgo.MaxDecompressBatchBytes(smallBatches)), s.events, "streams", cfg, handlers...)
	require.NoError(t, err)
	return c
}

// on puts records into a partition.
func on(partition int, records ...*kgo.Record) []*kgo.Record {
	for _, r := range records {
		r.Partition = int32(partition)
	}
	return records
}

// Large batches of a partition are read whatever the other partitions do meanwhile: the end of a stream, which
// discards what the client has fetched, and a full queue lost the client's error, and the partition stood still.
func TestLargeBatchesOfManyPartitions(t *testing.T) {
	t.Parallel()
	const partitions, rounds = 8, 10
	s, send := newStreamFixture(t, partitions, kgo.ZstdCompression())
	var want []string
	for i := range partitions {
		for range 20 { // fills the queue
			filler := s.bomb(smallBatches - 1_000)
			copy(filler.Value, bytes.Repeat([]byte(" "), len(filler.Value)))
			copy(filler.Value, `{"product":"filler","amount":1}`)
			send(on(i, filler)...)
		}
		for n := range rounds {
			product := fmt.Sprint(i, "-", n)
			want = append(want, product)
			send(on(i, s.bomb(2*smallBatches))...)
			send(on(i, s.soldRecord(product))...)
		}
	}
	testenv.Run(t, s.smallConsumer(t, outbox.Handle("COUNTED", s.count)).Run)
	require.Eventually(t, func() bool { return len(s.counts(t)) == 1+len(want) && s.parkedDead(t) == partitions*rounds }, testenv.Patience, 100*time.Millisecond)
	require.Equal(t, 20*partitions, s.counts(t)["filler"])
}

// produceRaw sends a batch to partition 0 as it is, and returns the error of Kafka.
func (s *consumerFixture) produceRaw(t *testing.T, codec kgo.CompressionCodecType, records []byte, n int32) error {
	t.Helper()
	batch := kmsg.RecordBatch{
		Magic: 2, PartitionLeaderEpoch: -1, Attributes: int16(codec), LastOffsetDelta: n - 1, NumRecords: n, ProducerID: -1, ProducerEpoch: -1, FirstSequence: -1, Records: records,
		FirstTimestamp: time.Now().UnixMilli(), MaxTimestamp: time.Now().UnixMilli(),
	}
	batch.Length = int32(len(batch.AppendTo(nil)) - 12)
	batch.CRC = int32(crc32.Checksum(batch.AppendTo(nil)[21:], crc32.MakeTable(crc32.Castagnoli)))
	part := kmsg.NewProduceRequestTopicPartition()
	part.Records = batch.AppendTo(nil)
	topic := kmsg.NewProduceRequestTopic()
	topic.Topic, topic.Partitions = s.topic, append(topic.Partitions, part)
	request := kmsg.NewPtrProduceRequest()
	request.Acks, request.TimeoutMillis, request.Topics = -1, 10_000, append(request.Topics, topic)
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...), kgo.MaxVersions(kversion.V3_8_0())) // names topics
	require.NoError(t, err)
	defer client.Close()
	response, err := client.SeedBrokers()[0].Request(background, request)
	require.NoError(t, err)
	return kerr.ErrorForCode(response.(*kmsg.ProduceResponse).Topics[0].Partitions[0].ErrorCode)
}

func zstdOf(t *testing.T, records []byte, opts ...zstd.EOption) []byte {
	t.Helper()
	out := new(bytes.Buffer)
	w, err := zstd.NewWriter(out, opts...)
	require.NoError(t, err)
	for len(records) > 0 { // a writer that knows the size has a smaller window
		n := min(len(records), 10)
		_, _ = w.Write(records[:n])
		require.NoError(t, w.Flush())
		records = records[n:]
	}
	require.NoError(t, w.Close())
	return out.Bytes()
}

// rawRecord returns a record as a batch has it.
func rawRecord(r *kgo.Record, n int) []byte {
	one := kmsg.Record{OffsetDelta: int32(n), Key: r.Key, Value: r.Value}
	for _, h := range r.Headers {
		one.Headers = append(one.Headers, kmsg.Header{Key: h.Key, Value: h.Value})
	}
	one.Length = int32(len(one.AppendTo(nil)) - 1) // behind a length of one byte
	if one.Length > 63 {
		one.Length = int32(len(one.AppendTo(nil)) - 2)
	}
	return one.AppendTo(nil)
}

// A small batch that is no sequence of records stopped its partition, and nothing said so. Kafka checks what it
// appends, so this is what a broken disk or another broker does.
func TestUnreadableBatch(t *testing.T) {
	t.Parallel()
	for name, broken := range map[string]func(a []byte) []byte{
		"no records":        func([]byte) []byte { return bytes.Repeat([]byte{0xff}, 100) },
		"a broken record":   func(a []byte) []byte { return append(a, 20, 0, 0, 2, 100, 'k', 0, 0, 0, 0, 0) },
		"a record cut off":  func(a []byte) []byte { return append(a, rawRecord(&kgo.Record{Value: []byte("value")}, 1)[:5]...) },
		"a record too much": func(a []byte) []byte { return append(bytes.Clone(append(a, rawRecord(&kgo.Record{}, 1)...)), 0xff) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, send := newStreamFixture(t, 1, kgo.NoCompression())
			send(s.soldRecord("before"))
			err := s.produceRaw(t, kgo.CodecZstd, zstdOf(t, broken(rawRecord(s.soldRecord("a"), 0)), zstd.WithWindowSize(1<<16)), 2)
			if os.Getenv(testenv.KafkaKindVar) == "kafka" {
				require.Error(t, err) // the fake accepts it
				return
			}
			require.NoError(t, err)
			send(s.soldRecord("behind"))
			c := s.smallConsumer(t, outbox.Handle("COUNTED", s.count))
			testenv.Run(t, c.Run)
			require.Eventually(t, func() bool {
				h := c.Health()
				return !h.Works && strings.Contains(fmt.Sprint(h.Reasons), "waits at offset 1")
			}, 15*time.Second, 20*time.Millisecond)
			require.NotContains(t, s.counts(t), "behind")
		})
	}
}

// A batch that says it needs a large window is read as a stream, and those behind it by the same stream: the end of a
// stream interrupts the fetches of all partitions.
func TestBatchWithLargeWindow(t *testing.T) {
	t.Parallel()
	s, send := newStreamFixture(t, 1, kgo.NoCompression())
	for _, product := range []string{"a", "b", "c"} {
		packed := zstdOf(t, rawRecord(s.soldRecord(product), 0), zstd.WithWindowSize(1<<27), zstd.WithSingleSegment(false))
		var header zstd.Header
		require.NoError(t, header.Decode(packed))
		require.Equal(t, uint64(1<<27), header.WindowSize)
		require.NoError(t, s.produceRaw(t, kgo.CodecZstd, packed, 1))
	}
	send(s.soldRecord("d"))
	log := new(testenv.Buffer)
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Logger: slog.New(slog.NewTextHandler(log, nil))}}
	testenv.Run(t, s.consumer(t, cfg, outbox.Handle("COUNTED", s.count)).Run)
	require.Eventually(t, func() bool { return len(s.counts(t)) == 4 }, testenv.Patience/2, 20*time.Millisecond)
	require.Equal(t, 1, strings.Count(log.String(), "is read as a stream"))
}

// A partition whose handler hangs, and whose queue is full, keeps no other from its large batches.
func TestLargeBatchWaitsForNoOther(t *testing.T) {
	t.Parallel()
	s, send := newStreamFixture(t, 2, kgo.ZstdCompression())
	spaces := bytes.Repeat([]byte(" "), 100_000)
	copy(spaces, `{"product":"slow","amount":1}`)
	slow := make([]*kgo.Record, 300)
	for i := range slow {
		slow[i] = s.soldRecord("slow")
		slow[i].Value = spaces
	}
	send(on(0, slow...)...)
	called, release := make(chan struct{}, 1_000), make(chan struct{})
	testenv.Run(t, s.smallConsumer(t, outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		if e.Product == "slow" {
			called <- struct{}{}
			select {
			case <-release:
			case <-ctx.Done():
			}
		}
		return s.count(ctx, tx, e, m)
	})).Run)
	<-called
	time.Sleep(2 * time.Second) // the stream of partition 0 fills the queue
	send(on(1, s.soldRecord("a"), s.bomb(2*smallBatches), s.soldRecord("b"))...)
	require.Eventually(t, func() bool { return s.counts(t)["a"]+s.counts(t)["b"] == 2 }, 20*time.Second, 50*time.Millisecond)
	close(release)
	require.Eventually(t, func() bool { return s.counts(t)["slow"] == len(slow) }, testenv.Patience, 50*time.Millisecond)
}
