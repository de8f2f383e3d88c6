package outboxtopics_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtopics"
)

// run runs Run until the test ends, and returns its log.
func run(t *testing.T, address string, events *outbox.Registry) (log *testenv.Buffer, stop func()) {
	t.Helper()
	log = &testenv.Buffer{}
	cfg := outboxtopics.Config{ReplicationFactor: 1, Logger: slog.New(slog.NewTextHandler(log, nil))}
	stop = testenv.Run(t, func(ctx context.Context) error {
		return outboxtopics.Run(ctx, []kgo.Opt{kgo.SeedBrokers(address)}, events, cfg)
	})
	return log, stop
}

// awaitLogged waits until a log says something, and requires that it says it once.
func awaitLogged(t *testing.T, log *testenv.Buffer, text string) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(log.String(), text) }, testenv.Patience, time.Millisecond, log)
	require.Equal(t, 1, strings.Count(log.String(), text), log)
}

// Run waits for Kafka with one line, which has the address and the reason, and makes the topics once Kafka is there.
func TestRunWithoutKafka(t *testing.T) {
	t.Parallel()
	address, start := testenv.LateKafka(t)
	events, topics := newRegistry(t, 2)
	began := time.Now()
	log, stop := run(t, address, events)
	awaitLogged(t, log, "outbox: Kafka, to make topics, fails, trying until it works")
	require.Less(t, time.Since(began), 5*time.Second)
	require.Contains(t, log.String(), "brokers=["+address+"]")
	require.Contains(t, log.String(), "connection refused")
	start()
	awaitLogged(t, log, "outbox: Kafka, to make topics, works again")
	awaitLogged(t, log, "outbox: topics created")
	for _, topic := range topics {
		for name, partitions := range map[string]int{topic: 3, topic + ".dlq": 1} {
			found, ok := askTopic(t, []string{address}, name)
			require.True(t, ok, name)
			require.Equal(t, partitions, found.partitions, name)
		}
	}
	stop()
	require.Equal(t, 2, strings.Count(log.String(), "level=WARN"), log)
}

// Run ends with its context: while Kafka does not answer, and after the topics were made.
func TestRunStops(t *testing.T) {
	t.Parallel()
	address, start := testenv.LateKafka(t)
	events, _ := newRegistry(t, 1)
	for _, text := range []string{"fails, trying", "topics created"} {
		log, stop := run(t, address, events)
		awaitLogged(t, log, text)
		began := time.Now()
		stop()
		require.Less(t, time.Since(began), 2*time.Second)
		start()
		start = func(...kfake.Opt) *kfake.Cluster { return nil }
	}
}

// A right that is missing is an outage of its own, and so is a cluster of too few brokers.
func TestRunWithoutRights(t *testing.T) {
	t.Parallel()
	address, start := testenv.LateKafka(t)
	fault := start().Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.CreateTopics}, Err: kerr.TopicAuthorizationFailed, Count: -1})
	events, topics := newRegistry(t, 1)
	log, stop := run(t, address, events)
	awaitLogged(t, log, "outbox: making topics fails, trying until it works")
	require.Contains(t, log.String(), "create topic "+topics[0]+": TOPIC_AUTHORIZATION_FAILED")
	require.NotContains(t, log.String(), "Kafka, to make topics")
	fault.Remove()
	awaitLogged(t, log, "outbox: making topics works again")
	stop()
	require.Equal(t, 2, strings.Count(log.String(), "level=WARN"), log)
}

// Run warns of an existing topic that is not as configured, and does not change it.
func TestRunDifferences(t *testing.T) {
	t.Parallel()
	address, start := testenv.LateKafka(t)
	start()
	events, topics := newRegistry(t, 1)
	createTopic(t, []string{address}, topics[0], 2, nil)
	log, stop := run(t, address, events)
	awaitLogged(t, log, "outbox: a topic is not as configured")
	require.Contains(t, log.String(), "topic="+topics[0]+` differences="[partitions is 2, want 3`)
	awaitLogged(t, log, "outbox: topics created\" topics=["+topics[0]+".dlq]")
	stop()
	found, _ := askTopic(t, []string{address}, topics[0])
	require.Equal(t, 2, found.partitions)
}

// Errors of the configuration are returned at once.
func TestRunRefusesConfig(t *testing.T) {
	t.Parallel()
	events, _ := newRegistry(t, 1)
	unreachable := []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1")}
	require.ErrorContains(t, outboxtopics.Run(background, unreachable, events, outboxtopics.Config{Partitions: -1}), "outbox: topics config: field Partitions is -1")
	require.ErrorIs(t, outboxtopics.Run(background, unreachable, nil, outboxtopics.Config{}), outbox.ErrNilArgument)
	require.ErrorContains(t, outboxtopics.Run(background, append(unreachable, kgo.ConsumerGroup("g")), events, oneBroker), "ConsumerGroup")
	require.ErrorContains(t, outboxtopics.Run(background, unreachable, events, outboxtopics.Config{DryRun: true}), "field DryRun is true: that is for Ensure")
}
