package itest

import (
	"context"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// codecs are the compressions of Kafka.
var codecs = map[string]kgo.CompressionCodec{
	"gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(), "lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
}

// bombSize is the size of a value that no consumer decompresses.
const bombSize = 100 << 20

// newBombFixture returns a fixture with a topic that takes batches of 20 MB, and a function that sends a batch.
func newBombFixture(t *testing.T, codec kgo.CompressionCodec, opts ...kgo.Opt) (*consumerFixture, *kgo.Client) {
	t.Helper()
	s := newConsumerFixtureOn(t, func(h *relayFixture) {
		testenv.CreateTopic(t, h.brokers, h.topic, 1, "max.message.bytes", "20000000")
		testenv.CreateTopic(t, h.brokers, h.topic+".dlq", 1)
	})
	producer, err := kgo.NewClient(append(opts, kgo.SeedBrokers(s.brokers...), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ManualFlushing(),
		kgo.ProducerBatchCompression(codec), kgo.ProducerBatchMaxBytes(1<<30), kgo.BrokerMaxWriteBytes(1<<30), kgo.MaxBufferedRecords(100_000))...)
	require.NoError(t, err)
	t.Cleanup(producer.Close)
	return s, producer
}

// sendBatch sends records as a batch.
func sendBatch(t *testing.T, producer *kgo.Client, records ...*kgo.Record) {
	t.Helper()
	for _, r := range records {
		producer.Produce(background, r, func(_ *kgo.Record, err error) { require.NoError(t, err) })
	}
	require.NoError(t, producer.Flush(background))
}

// soldRecord returns the record of a sale of one product, with a value that is no longer than it has to be.
func (s *consumerFixture) soldRecord(product string) *kgo.Record {
	r := s.saleRecord(uuid.NewString(), []byte(`{"product":"`+product+`","amount":1}`))
	r.Key = []byte("k")
	return r
}

// bomb returns a record of zeros.
func (s *consumerFixture) bomb(size int) *kgo.Record {
	r := s.soldRecord("bomb")
	r.Value = make([]byte, size)
	return r
}

// A batch of records that is small for Kafka may be huge when it is decompressed. It stopped its partition until
// an operator moved the offset of the group. Only the record that is too long is a dead letter, without its value;
// those around it are handled, and a chain of them is read as fast as it can be decompressed.
func TestCompressedBombIsADeadLetter(t *testing.T) {
	for name, codec := range codecs { // not parallel: it measures the memory of the process
		t.Run(name, func(t *testing.T) {
			s, producer := newBombFixture(t, codec)
			sendBatch(t, producer, s.soldRecord("before"))
			sendBatch(t, producer, s.soldRecord("a"), s.bomb(bombSize), s.soldRecord("b"))
			for range 2 {
				sendBatch(t, producer, s.bomb(bombSize))
			}
			sendBatch(t, producer, s.soldRecord("behind"))
			s.requireBombs(t, []string{"a", "b", "before", "behind"}, 2, 4, 5)
		})
	}
}

// requireBombs runs a consumer and requires that it handles sales of products, and that the records at some offsets are
// dead letters without their values, with little memory.
func (s *consumerFixture) requireBombs(t *testing.T, products []string, offsets ...int) {
	t.Helper()
	before, largest, done := heap(), atomic.Uint64{}, make(chan struct{})
	go func() {
		defer close(done)
		for len(s.counts(t)) < len(products) || s.parkedDead(t) < len(offsets) {
			largest.Store(max(largest.Load(), heap()))
			time.Sleep(10 * time.Millisecond)
		}
	}()
	began := time.Now()
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, outbox.Handle("COUNTED", s.count)).Run)
	select {
	case <-done:
	case <-time.After(testenv.Patience / 2):
	}
	counted := []string{}
	for product := range s.counts(t) {
		counted = append(counted, product)
	}
	slices.Sort(counted)
	require.Equal(t, products, counted, s.parked(t))
	t.Logf("%v, %d MB more than before", time.Since(began).Round(time.Millisecond), (int64(largest.Load())-int64(before))>>20)
	require.Less(t, int64(largest.Load())-int64(before), mostOfClient(), "the client needs most of it, before it gives up")
	found := []int{}
	for _, r := range s.deadLetters(t, len(offsets)) {
		d := deadLetterHeaders(r)
		require.Equal(t, []string{strconv.Itoa(bombSize), "undecodable", ""}, []string{d[outbox.DeadLetterValueOmitted], d[outbox.DeadLetterClass], d[outbox.DeadLetterAction]})
		require.NotEmpty(t, d[outbox.DeadLetterDigest])
		require.Equal(t, "k", string(r.Key))
		require.Contains(t, d[outbox.DeadLetterError], strconv.Itoa(bombSize))
		offset, err := strconv.Atoi(d[outbox.DeadLetterOriginalOffset])
		require.NoError(t, err)
		found = append(found, offset)
	}
	slices.Sort(found)
	require.Equal(t, offsets, found)
}

// mostOfClient is how much memory a client may need, before it gives up a batch. Under the race detector it does not
// get back all of its buffers.
func mostOfClient() int64 {
	if testenv.RaceDetector {
		return 6 * 64 << 20
	}
	return 4 * 64 << 20
}

// parkedDead returns how many deliveries are DEAD.
func (s *consumerFixture) parkedDead(t *testing.T) (n int) {
	t.Helper()
	require.NoError(t, s.db.QueryRow(background, s.sql(`SELECT count(*) FROM {s}.event_delivery WHERE status = 'DEAD'`)).Scan(&n))
	return n
}

// What an aborted transaction has sent is no event, also if it is a bomb. What a committed one has sent is.
func TestBombsOfTransactions(t *testing.T) {
	s, producer := newBombFixture(t, kgo.ZstdCompression(), kgo.TransactionalID(uuid.NewString()))
	for i, try := range []kgo.TransactionEndTry{kgo.TryCommit, kgo.TryAbort, kgo.TryCommit} {
		require.NoError(t, producer.BeginTransaction())
		sendBatch(t, producer, s.soldRecord(strconv.Itoa(i)+"-a"), s.bomb(bombSize), s.soldRecord(strconv.Itoa(i)+"-b"))
		require.NoError(t, producer.EndTransaction(background, try))
	}
	s.requireBombs(t, []string{"0-a", "0-b", "2-a", "2-b"}, 1, 9)
}

// A batch of many records is large, and none of them is: all are handled, and the queue stays within its bound.
func TestBombOfManyRecords(t *testing.T) {
	const records, size = 800, 500_000
	// JSON would be read byte by byte, which takes a minute under the race detector.
	blank := outbox.Codec{ContentType: "text/blank",
		Encode: func(context.Context, any) ([]byte, error) { return nil, nil },
		Decode: func(_ context.Context, _ []byte, event any) error {
			event.(*sale).Product = "p"
			return nil
		}}
	value := make([]byte, size)
	s, producer := newBombFixture(t, kgo.Lz4Compression())
	batch := make([]*kgo.Record, records)
	for i := range batch {
		batch[i] = s.soldRecord("p")
		batch[i].Value = value
		batch[i].Headers[len(batch[i].Headers)-1].Value = []byte(blank.ContentType)
	}
	sendBatch(t, producer, batch...)
	before := heap()
	var slow atomic.Bool
	slow.Store(true)
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{MaxQueueBytes: 16 << 20,
		HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Codecs: []outbox.Codec{blank}}},
		outbox.HandleNoTx("SEEN", func(ctx context.Context, e sale, m outbox.Metadata) error {
			for slow.Load() {
				time.Sleep(time.Millisecond)
			}
			_, err := s.db.Exec(ctx, s.sql(`INSERT INTO {s}.counts VALUES ($1, 1) ON CONFLICT (product) DO UPDATE SET n = counts.n + 1`), e.Product)
			return err
		})).Run)
	largest := before
	for range 20 {
		time.Sleep(100 * time.Millisecond)
		largest = max(largest, heap())
	}
	t.Logf("%d MB more than before", (largest-before)>>20)
	require.Less(t, int64(largest)-int64(before), mostOfClient(), "of 400 MB: the client needs most of it, before it gives up")
	slow.Store(false)
	require.Eventually(t, func() bool {
		n := 0
		for _, sold := range s.counts(t) {
			n += sold
		}
		return n == records
	}, testenv.Patience, 50*time.Millisecond)
	require.Empty(t, s.parked(t))
}
