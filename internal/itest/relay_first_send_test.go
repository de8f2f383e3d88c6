package itest

import (
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Kafka rejects the first request for a topic while the client is learning of it. No later event of the key arrives
// before those that were rejected.
func TestRejectedFirstRequest(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, h.topic))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	h.brokers = cluster.ListenAddrs()
	rejected := false // only the goroutine of the cluster
	cluster.ControlKey(int16(kmsg.Produce), func(r kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		if rejected {
			return nil, nil, false
		}
		rejected = true
		return testenv.Rejected(r.(*kmsg.ProduceRequest), kerr.InvalidRecord), nil, true
	})
	committed := numbered("key", 1, 100)
	h.commit(t, committed...)
	cfg := quick
	cfg.Schema, cfg.Logger = h.schema, logTo(t, slog.LevelInfo)
	opts := append(testenv.KafkaOpts(h.brokers), kgo.RecordPartitioner(testenv.PausingPartitioner(h.topic)))
	relay, err := outbox.NewRelay(h.db, opts, cfg)
	require.NoError(t, err)
	reader := h.follow(t)
	testenv.Run(t, relay.Run)
	requireArrival(t, reader, committed...)
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	for i, e := range arrived {
		require.EqualValues(t, i+1, e.Version)
	}
}
