package itest

import (
	"context"
	"crypto/rand"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// However many partitions there are, and however large their records, a consumer whose handlers
// wait holds no more than ConsumerConfig.MaxQueueBytes says: that much, a batch of each
// partition, and what a fetch brings.
func TestMemoryOfManyPartitions(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it measures the memory of the process.
	const partitions, each, size, most, fetch = 100, 4, 200_000, 16 << 20, 8 << 20
	s := newConsumerFixture(t, partitions)
	s.sendLarge(t, partitions, each, size)
	var seen atomic.Int64
	goOn := make(chan struct{})
	group := "memory-" + s.topic
	cfg := outbox.ConsumerConfig{MaxQueueBytes: most, HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: logTo(t, 0), From: outbox.FromStart}}
	c, err := outbox.NewConsumer(s.db, []kgo.Opt{kgo.SeedBrokers(s.brokers...)}, s.events, group, cfg, outbox.HandleNoTx("SEEN", func(context.Context, sale, outbox.Metadata) error {
		<-goOn
		seen.Add(1)
		return nil
	}))
	require.NoError(t, err)
	before := heap()
	testenv.Run(t, c.Run)
	largest := before
	grow := func() bool { largest = max(largest, heap()); return largest-before > most/2 }
	require.Eventually(t, grow, testenv.Patience, 200*time.Millisecond, "a partition that has nothing gets something")
	for range 25 {
		time.Sleep(200 * time.Millisecond)
		grow()
	}
	close(goOn)
	t.Logf("%d MB more than before", (largest-before)>>20)
	require.Less(t, largest-before, uint64(most+partitions*size+2*fetch+8<<20), "8 MiB are for the rest of the process")
	require.Greater(t, partitions*each*size, most+partitions*size+2*fetch+8<<20, "there was more")
	require.Eventually(t, func() bool { return seen.Load() == partitions*each }, 2*testenv.Patience, 50*time.Millisecond)
}

// fetchCount counts fetches.
type fetchCount struct{ atomic.Int64 }

func (c *fetchCount) OnBrokerE2E(_ kgo.BrokerMetadata, key int16, _ kgo.BrokerE2E) {
	if key == kmsg.Fetch.Int16() {
		c.Add(1)
	}
}

// Where a partition's share of MaxQueueBytes is smaller than a batch of records, a fetch
// still brings batches of many partitions, and not one.
func TestFetchesOfManyPartitions(t *testing.T) {
	t.Parallel()
	const partitions, each, size = 100, 6, 200_000
	s := newConsumerFixture(t, partitions)
	s.sendLarge(t, partitions, each, size)
	var fetches fetchCount
	var seen atomic.Int64
	group := "fetches-" + s.topic
	cfg := outbox.ConsumerConfig{MaxQueueBytes: 16 << 20, HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: logTo(t, 0), From: outbox.FromStart}}
	c, err := outbox.NewConsumer(s.db, []kgo.Opt{kgo.SeedBrokers(s.brokers...), kgo.WithHooks(&fetches)}, s.events, group, cfg,
		outbox.HandleNoTx("SEEN", func(context.Context, sale, outbox.Metadata) error {
			seen.Add(1)
			return nil
		}))
	require.NoError(t, err)
	testenv.Run(t, c.Run)
	require.Eventually(t, func() bool { return seen.Load() == partitions*each }, 2*testenv.Patience, time.Millisecond)
	t.Logf("%d fetches", fetches.Load())
	require.Less(t, fetches.Load(), int64(partitions*each/2), "each partition may need one until its next batch is not larger than what is asked for")
}

// heap returns how many bytes are in use.
func heap() uint64 {
	runtime.GC()
	runtime.GC() // pools keep what they have for one
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// sendLarge sends sales with a header of so many random bytes.
func (s *consumerFixture) sendLarge(t testing.TB, partitions int32, each, size int) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	require.NoError(t, err)
	defer client.Close()
	filling := make([]byte, size)
	_, _ = rand.Read(filling)
	for range each {
		records := make([]*kgo.Record, partitions)
		for p := range partitions {
			records[p] = s.saleRecord(uuid.NewString(), oneSale)
			records[p].Partition, records[p].Key = p, []byte(fmt.Sprint(p))
			records[p].Headers = append(records[p].Headers, kgo.RecordHeader{Key: "filling", Value: filling})
		}
		require.NoError(t, client.ProduceSync(background, records...).FirstErr())
	}
}
