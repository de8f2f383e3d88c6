package itest

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

// fakeExactly returns a fixture with a cluster of its own, and the configuration of a relay that sends exactly once.
func fakeExactly(t *testing.T) (*relayFixture, *kfake.Cluster, outbox.RelayConfig) {
	t.Helper()
	h := newRelayFixture(t)
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, h.topic))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	h.brokers = cluster.ListenAddrs()
	cfg := quick
	cfg.Schema, cfg.ExactlyOnce, cfg.DeliveryTimeout, cfg.Logger = h.schema, "cursor", time.Second, logTo(t, slog.LevelError)
	return h, cluster, cfg
}

// The host lets a client buffer no more than a batch. The cursor record goes along with it nevertheless. An event that
// is larger than what the host allows is rejected, as without the mode.
func TestExactlyOnceWithATightBuffer(t *testing.T) {
	t.Parallel()
	const bytes = 2000
	var sizes []oracle.Event // around the limit: headers and JSON come on top
	for size := bytes - 1000; size <= bytes; size += 25 {
		e := numbered(fmt.Sprint("key-", size), 1, 1)[0]
		e.Filler = random(size)
		sizes = append(sizes, e)
	}
	for name, test := range map[string]struct {
		limit    kgo.Opt
		events   []oracle.Event
		rejected bool
	}{
		"records":    {kgo.MaxBufferedRecords(10), numbered("key", 1, 50), false},
		"one record": {kgo.MaxBufferedRecords(1), numbered("key", 1, 5), false},
		"bytes":      {kgo.MaxBufferedBytes(bytes), append(numbered("key", 1, 50), sizes...), true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h, _, cfg := fakeExactly(t)
			h.commit(t, test.events...)
			reader, log := h.follow(t), &testenv.Buffer{}
			cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
			relay, err := outbox.NewRelay(h.db, append(testenv.KafkaOpts(h.brokers), test.limit), cfg)
			require.NoError(t, err)
			testenv.Run(t, relay.Run)
			require.Eventually(t, func() bool {
				status := h.relayStatus(t, "default")
				return status.Transaction > 0 && status.Pending == 0
			}, testenv.Patience, 10*time.Millisecond)
			rejected := h.count(t, "outbox_failed")
			require.Equal(t, test.rejected, rejected > 0)
			require.Less(t, rejected, len(sizes))
			requireArrival(t, reader, test.events[:len(test.events)-rejected]...)
			require.NotContains(t, log.String(), "fails")
		})
	}
}
