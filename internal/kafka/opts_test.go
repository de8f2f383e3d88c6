package kafka

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// limits are those of the topics of a host.
type limits map[string]int32

// ProducerBatchMaxBytes returns a function whose name is like that of franz-go's function.
//
//go:noinline
func (l limits) ProducerBatchMaxBytes() func(string) int32 {
	return func(topic string) int32 {
		if topic == "" {
			return 1 << 20
		}
		return max(l[topic], 2<<20)
	}
}

// The largest batch is what ProducerBatchMaxBytes says. A function may say something else for each topic.
func TestLargestBatch(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		opts []kgo.Opt
		want int32
	}{
		"default":                  {nil, 1_000_012},
		"ProducerBatchMaxBytes":    {[]kgo.Opt{kgo.ProducerBatchMaxBytes(5 << 20)}, 5 << 20},
		"ProducerBatchMaxBytesFn":  {[]kgo.Opt{kgo.ProducerBatchMaxBytesFn(func(string) int32 { return 5 << 20 })}, 100 << 20},
		"a function of that name":  {[]kgo.Opt{kgo.ProducerBatchMaxBytesFn(limits{"orders": 5 << 20}.ProducerBatchMaxBytes())}, 100 << 20},
		"a function and its limit": {[]kgo.Opt{kgo.ProducerBatchMaxBytesFn(func(string) int32 { return 5 << 20 }), kgo.BrokerMaxWriteBytes(20 << 20)}, 20 << 20},
	} {
		got, err := LargestBatch(test.opts)
		require.NoError(t, err)
		require.Equal(t, test.want, got, name)
	}
}

// acks=all, idempotence and no waiting are ours, whatever the host says; how often and how patiently the client
// tries, and how many requests are in flight, is the host's.
func TestProducerOpts(t *testing.T) {
	t.Parallel()
	host := []kgo.Opt{kgo.RecordRetries(3), kgo.RetryBackoffFn(func(int) time.Duration { return time.Second }), kgo.ProduceRequestTimeout(30 * time.Second),
		kgo.MaxProduceRequestsInflightPerBroker(1), kgo.ProducerLinger(5 * time.Millisecond), kgo.RecordDeliveryTimeout(120 * time.Second)}
	require.NoError(t, CheckProducerOpts(host))
	client, err := NewClient(ProducerOpts(host, 10*time.Second))
	require.NoError(t, err)
	defer client.Close()
	require.Equal(t, kgo.AllISRAcks(), client.OptValue(kgo.RequiredAcks))
	require.Equal(t, false, client.OptValue(kgo.DisableIdempotentWrite))
	require.Equal(t, 10*time.Second, client.OptValue(kgo.RecordDeliveryTimeout))
	require.Equal(t, time.Duration(0), client.OptValue(kgo.ProducerLinger))
	require.EqualValues(t, 3, client.OptValue(kgo.RecordRetries))
	require.Equal(t, 30*time.Second, client.OptValue(kgo.ProduceRequestTimeout))
	require.EqualValues(t, 1, client.OptValue(kgo.MaxProduceRequestsInflightPerBroker))
	require.Equal(t, time.Second, client.OptValue(kgo.RetryBackoffFn).(func(int) time.Duration)(1))
	require.Equal(t, time.Second, client.OptValue(kgo.MetadataMinAge), "franz-go waits for 5 s until it asks for a new leader")
	slow, err := NewClient(ProducerOpts([]kgo.Opt{kgo.MetadataMinAge(10 * time.Second)}, 10*time.Second))
	require.NoError(t, err)
	defer slow.Close()
	require.Equal(t, 10*time.Second, slow.OptValue(kgo.MetadataMinAge))

	require.ErrorContains(t, CheckProducerOpts([]kgo.Opt{kgo.RequiredAcks(kgo.LeaderAck())}), "idempoten", "fewer acks are not silently raised")
}
