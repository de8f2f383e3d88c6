package outboxadmin

import (
	"encoding/json"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
)

// A relay of another process loses Kafka and gets it back. The page of a process without relays says so.
func TestOutageOfARelayElsewhere(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, func(c *Config) { c.Health = nil })
	h.exec(`DELETE FROM {s}.outbox_failed`)
	h.exec(`DELETE FROM {s}.outbox`)
	h.exec(`DELETE FROM {s}.outbox_lease`)
	h.exec(`DELETE FROM {s}.outbox_cursor`)
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1))
	require.NoError(t, err)
	address := cluster.ListenAddrs()[0]
	relay, err := outbox.NewRelay(h.db, []kgo.Opt{kgo.SeedBrokers(address)}, outbox.RelayConfig{Schema: h.schema, PollInterval: 50 * time.Millisecond, Lease: 6 * time.Second,
		DeliveryTimeout: 2 * time.Second})
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
	state := func() *outage.RelayForm {
		var list apiRelayList
		require.NoError(t, json.Unmarshal([]byte(h.get("/api/relays")), &list))
		if len(list.Relays) == 0 {
			return nil
		}
		return list.Relays[0].State
	}
	require.Eventually(t, func() bool { s := state(); return s != nil && s.Works && s.KafkaAt != nil }, testenv.Patience, 50*time.Millisecond)
	cluster.Close()
	h.exec(`INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at)
		VALUES ($1, 'test.thing.happened.v1', 'test', 'Thing', '1', '{}', 'application/json', 'things', now())`, uuid.New())
	require.Eventually(t, func() bool { s := state(); return s != nil && !s.Works && len(s.Outages) > 0 }, testenv.Patience, 50*time.Millisecond, "%v", state())
	outage := state().Outages[0]
	require.Equal(t, "Kafka", outage.What)
	require.Equal(t, "unreachable", outage.Class)
	require.WithinDuration(t, time.Now(), *outage.Since, 2*testenv.Patience)
	page := h.get("/")
	require.Regexp(t, `Problem</strong> <span>Relay default: Kafka has not answered since [0-9:]+ UTC \(unreachable: [^)]*\), said [^<]* by [^<]*\.</span>`, page)
	require.NotContains(t, page, "All is well")
	require.NotContains(t, page, "This process")

	_, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	n, err := strconv.Atoi(port)
	require.NoError(t, err)
	cluster, err = kfake.NewCluster(kfake.NumBrokers(1), kfake.Ports(n), kfake.SeedTopics(1, "things"))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	require.Eventually(t, func() bool { s := state(); return s != nil && s.Works && len(s.Outages) == 0 }, 2*testenv.Patience, 50*time.Millisecond)
	require.NotContains(t, strings.Join(h.notices(), ""), "Kafka has not answered")
}
