package outboxtopics_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtopics"
)

// The cluster's default gives a topic fewer replicas than have to be in sync: it takes no records. That is a
// difference, also of a topic that was just created.
func TestEnsureTooFewReplicas(t *testing.T) {
	t.Parallel()
	address, start := testenv.LateKafka(t)
	start()
	kafka := []kgo.Opt{kgo.SeedBrokers(address)}
	cfg := outboxtopics.Config{ReplicationFactor: -1, MinInSyncReplicas: 2}
	want := []outboxtopics.Difference{{Setting: "replication.factor", Want: "2 or more (min.insync.replicas)", Have: "1"}}
	for _, created := range []bool{true, false} {
		states, err := outboxtopics.EnsureNamed(background, kafka, []string{"orders"}, cfg)
		require.NoError(t, err)
		require.Equal(t, []outboxtopics.State{{Topic: "orders", Created: created, Differences: want}, {Topic: "orders.dlq", Created: created, Differences: want}}, states)
	}
	cfg.MinInSyncReplicas = 1
	states, err := outboxtopics.EnsureNamed(background, kafka, []string{"others"}, cfg)
	require.NoError(t, err)
	require.Equal(t, []outboxtopics.State{{Topic: "others", Created: true}, {Topic: "others.dlq", Created: true}}, states)
}

// A dry run says it before the topic exists.
func TestEnsureTooFewReplicasInADryRun(t *testing.T) {
	t.Parallel()
	brokers := testenv.RealBrokers(t)
	events, topics := newRegistry(t, 1)
	states, err := outboxtopics.Ensure(background, testenv.KafkaOpts(brokers), events, outboxtopics.Config{ReplicationFactor: -1, MinInSyncReplicas: 2, DryRun: true})
	require.NoError(t, err)
	require.Equal(t, topics[0], states[0].Topic)
	require.Equal(t, []outboxtopics.Difference{{Setting: "replication.factor", Want: "2 or more (min.insync.replicas)", Have: "1"}}, states[0].Differences)
}
