package itest

import (
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/testenv"
)

// Brokers that accept connections and never answer are an outage, and no hang: the relay keeps its lease, although a
// start may take longer than all of its timeouts.
func TestExactlyOnceWithSilentBrokers(t *testing.T) {
	t.Parallel()
	testenv.Long(t)
	h, _, cfg := fakeExactly(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { silent.Close() })
	go func() {
		for {
			c, err := silent.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
		}
	}()
	h.brokers = []string{silent.Addr().String()}
	log := &testenv.Buffer{}
	cfg.Lease, cfg.Breaker.OpenFor, cfg.Logger = 2*time.Second, time.Second, slog.New(slog.NewTextHandler(log, nil))
	relay := h.relay(t, cfg)
	testenv.Run(t, relay.Run)
	require.Never(t, func() bool { return !relay.Health().Live }, 30*time.Second, 100*time.Millisecond)
	require.NotContains(t, log.String(), "the lease is given up")
	require.Contains(t, log.String(), "Kafka fails")
}

// Kafka ends every transaction, while it answers each start and accepts each record: that is one outage of Kafka, until
// a transaction is confirmed. Afterwards an idle relay works.
func TestExactlyOnceWhileEveryCommitIsDenied(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]bool{"while the relay runs": false, "when the mode is turned on": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h, cluster, cfg := fakeExactly(t)
			denied := denyCommits(cluster)
			log := &testenv.Buffer{}
			t.Cleanup(func() { t.Logf("the relay: %s", log) })
			cfg.Lease, cfg.BatchSize, cfg.Logger = 2*time.Second, 2, slog.New(slog.NewTextHandler(log, nil))
			relay := h.relay(t, cfg)
			denied.Store(first)
			testenv.Run(t, relay.Run)
			if !first {
				require.Eventually(t, func() bool { return h.relayStatus(t, "default").Transaction > 0 }, testenv.Patience, 5*time.Millisecond)
			}
			denied.Store(true)
			h.commit(t, numbered("key", 1, 10)...)
			require.Eventually(t, func() bool { return len(relay.Health().Outages) > 0 }, testenv.Patience, 5*time.Millisecond)
			require.Never(t, func() bool { return relay.Health().Works }, 5*time.Second, 5*time.Millisecond)
			require.True(t, slices.ContainsFunc(relay.Health().Reasons, func(reason string) bool { return strings.Contains(reason, "nothing has moved") }), "%v", relay.Health().Reasons)
			require.Equal(t, 1, strings.Count(log.String(), "Kafka has ended a transaction"))
			require.Equal(t, 1, strings.Count(log.String(), "Kafka fails"))
			require.NotContains(t, log.String(), "works again")
			denied.Store(false)
			require.Eventually(t, func() bool { return h.relayStatus(t, "default").Pending == 0 && relay.Health().Works }, testenv.Patience, 5*time.Millisecond)
			require.Equal(t, 1, strings.Count(log.String(), "Kafka works again"))
			require.Never(t, func() bool { return !relay.Health().Works }, 4*time.Second, 5*time.Millisecond)
		})
	}
}

// denyCommits lets a cluster end all transactions while the result is set.
func denyCommits(cluster *kfake.Cluster) *atomic.Bool {
	denied := new(atomic.Bool)
	cluster.ControlKey(int16(kmsg.EndTxn), func(r kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		answer := r.(*kmsg.EndTxnRequest).ResponseKind().(*kmsg.EndTxnResponse)
		answer.ErrorCode = kerr.InvalidProducerEpoch.Code
		return answer, nil, denied.Load()
	})
	return denied
}

// Nothing is left to send after an outage that a confirmation ends, as if Kafka had committed what it has denied. The
// relay finds out that it is over.
func TestExactlyOnceAfterDeniedCommitsIdle(t *testing.T) {
	t.Parallel()
	h, cluster, cfg := fakeExactly(t)
	denied := denyCommits(cluster)
	relay := h.relay(t, cfg)
	testenv.Run(t, relay.Run)
	require.Eventually(t, func() bool { return h.relayStatus(t, "default").Transaction > 0 }, testenv.Patience, 5*time.Millisecond)
	denied.Store(true)
	h.commit(t, numbered("key", 1, 1)...)
	require.Eventually(t, func() bool { return len(relay.Health().Outages) > 0 }, testenv.Patience, 5*time.Millisecond)
	_, err := h.db.Exec(background, h.sql(`DELETE FROM {s}.outbox`))
	require.NoError(t, err)
	denied.Store(false)
	require.Eventually(t, func() bool { return relay.Health().Works }, testenv.Patience, 5*time.Millisecond)
}
