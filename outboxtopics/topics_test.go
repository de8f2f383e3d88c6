package outboxtopics_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtopics"
)

var background = context.Background()

// event is one of three event types: a registry has each Go type once.
type event struct{ ID string }

func (event) OccurredAt() time.Time { return time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC) }
func (e event) AggregateID() string { return e.ID }

type (
	otherEvent struct{ event }
	thirdEvent struct{ event }
)

// newRegistry returns a registry with one event type for each of n new topics, and the
// names of the topics in order.
func newRegistry(t testing.TB, n int) (*outbox.Registry, []string) {
	t.Helper()
	prefix := "topics-" + uuid.NewString()
	types := []func(topic string) outbox.Definition{
		func(topic string) outbox.Definition {
			return outbox.Event("test.order.created.v1", "Order", event.AggregateID).Topic(topic)
		},
		func(topic string) outbox.Definition {
			return outbox.Event("test.order.canceled.v1", "Order", otherEvent.AggregateID).Topic(topic)
		},
		func(topic string) outbox.Definition {
			return outbox.Event("test.payment.paid.v1", "Payment", thirdEvent.AggregateID).Topic(topic)
		},
	}
	var names []string
	var definitions []outbox.Definition
	for i := range n {
		names = append(names, fmt.Sprintf("%s.%d", prefix, i))
		definitions = append(definitions, types[i](names[i]))
	}
	events, err := outbox.NewRegistry("test", definitions...)
	require.NoError(t, err)
	return events, names
}

// oneBroker is a configuration for a cluster of one broker.
var oneBroker = outboxtopics.Config{ReplicationFactor: 1}

// actualTopic is what Kafka says about a topic.
type actualTopic struct {
	partitions, replicas int
	settings             map[string]string // those of the topic itself
}

func askTopic(t testing.TB, brokers []string, name string) (actualTopic, bool) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...))
	require.NoError(t, err)
	defer client.Close()
	metadata := kmsg.NewPtrMetadataRequest()
	metadata.Topics = []kmsg.MetadataRequestTopic{{Topic: &name}}
	described, err := metadata.RequestWith(background, client)
	require.NoError(t, err)
	if errors.Is(kerr.ErrorForCode(described.Topics[0].ErrorCode), kerr.UnknownTopicOrPartition) {
		return actualTopic{}, false
	}
	require.Zero(t, described.Topics[0].ErrorCode)
	topic := actualTopic{settings: map[string]string{}}
	for _, p := range described.Topics[0].Partitions {
		topic.partitions++
		topic.replicas = len(p.Replicas)
		require.GreaterOrEqual(t, p.Leader, int32(0))
	}
	configs := kmsg.NewPtrDescribeConfigsRequest()
	configs.Resources = []kmsg.DescribeConfigsRequestResource{{ResourceType: kmsg.ConfigResourceTypeTopic, ResourceName: name}}
	answer, err := configs.RequestWith(background, client)
	require.NoError(t, err)
	for _, c := range answer.Resources[0].Configs {
		if c.Source == kmsg.ConfigSourceDynamicTopicConfig {
			topic.settings[c.Name] = *c.Value
		}
	}
	return topic, true
}

// requireTopic requires a topic to exist and to be as wanted.
func requireTopic(t testing.TB, brokers []string, name string, want actualTopic) {
	t.Helper()
	got, ok := askTopic(t, brokers, name)
	require.True(t, ok, name)
	require.Equal(t, want, got, name)
}

// createTopic creates a topic as another program would, and waits until the broker
// knows it.
func createTopic(t testing.TB, brokers []string, name string, partitions int32, settings map[string]string) {
	t.Helper()
	var pairs []string
	for setting, value := range settings {
		pairs = append(pairs, setting, value)
	}
	testenv.CreateTopic(t, brokers, name, partitions, pairs...)
	require.Eventually(t, func() bool { _, ok := askTopic(t, brokers, name); return ok }, testenv.Patience, 10*time.Millisecond)
}

// The defaults of the users' document (A64 to A66), but for the replicas.
func TestEnsureTopics(t *testing.T) {
	t.Parallel()
	brokers := testenv.RealBrokers(t)
	events, topics := newRegistry(t, 2)
	states, err := outboxtopics.Ensure(background, testenv.KafkaOpts(brokers), events, oneBroker)
	require.NoError(t, err)
	require.Equal(t, []outboxtopics.State{
		{Topic: topics[0], Created: true}, {Topic: topics[0] + ".dlq", Created: true},
		{Topic: topics[1], Created: true}, {Topic: topics[1] + ".dlq", Created: true},
	}, states)
	for _, topic := range topics {
		requireTopic(t, brokers, topic, actualTopic{3, 1, map[string]string{
			"cleanup.policy": "delete", "retention.ms": "604800000", "min.insync.replicas": "1",
		}})
		requireTopic(t, brokers, topic+".dlq", actualTopic{1, 1, map[string]string{
			"cleanup.policy": "delete", "retention.ms": "2592000000", "min.insync.replicas": "1", "max.message.bytes": "1064972",
		}})
	}
	states, err = outboxtopics.Ensure(background, testenv.KafkaOpts(brokers), events, oneBroker)
	require.NoError(t, err)
	require.Equal(t, []outboxtopics.State{{Topic: topics[0]}, {Topic: topics[0] + ".dlq"}, {Topic: topics[1]}, {Topic: topics[1] + ".dlq"}}, states)
}

// Every setting can be configured, and topics may share a dead-letter topic.
func TestEnsureTopicsAsConfigured(t *testing.T) {
	t.Parallel()
	brokers := testenv.RealBrokers(t)
	events, topics := newRegistry(t, 2)
	shared := topics[0] + ".failed"
	states, err := outboxtopics.Ensure(background, testenv.KafkaOpts(brokers), events, outboxtopics.Config{
		Partitions: 2, ReplicationFactor: 1, MinInSyncReplicas: 1, Retention: time.Hour, MaxMessageBytes: 5_000_000,
		PartitionsFor: func(topic string) int {
			if topic == topics[1] {
				return 5
			}
			return 0
		},
		DeadLetterTopic:      func(string) string { return shared },
		DeadLetterPartitions: 4, DeadLetterRetention: 2 * time.Hour,
	})
	require.NoError(t, err)
	require.Equal(t, []outboxtopics.State{{Topic: topics[0], Created: true}, {Topic: shared, Created: true}, {Topic: topics[1], Created: true}}, states)
	settings := map[string]string{"cleanup.policy": "delete", "retention.ms": "3600000", "min.insync.replicas": "1", "max.message.bytes": "5000000"}
	requireTopic(t, brokers, topics[0], actualTopic{2, 1, settings})
	requireTopic(t, brokers, topics[1], actualTopic{5, 1, settings})
	requireTopic(t, brokers, shared, actualTopic{4, 1, map[string]string{
		"cleanup.policy": "delete", "retention.ms": "7200000", "min.insync.replicas": "1", "max.message.bytes": "5016384",
	}})
}

// A compacted topic really compacts: of each key the last value stays, and of a tombstone's key none.
func TestCompactedTopic(t *testing.T) {
	t.Parallel()
	testenv.Long(t)
	brokers := testenv.RealBrokers(t)
	events, topics := newRegistry(t, 2)
	kafka := testenv.KafkaOpts(brokers)
	cfg := outboxtopics.Config{
		Partitions: 1, ReplicationFactor: 1, DeleteRetention: time.Minute,
		Compacted: func(topic string) bool { return topic == topics[0] },
	}
	for _, created := range []bool{true, false} {
		states, err := outboxtopics.Ensure(background, kafka, events, cfg)
		require.NoError(t, err)
		for _, s := range states {
			require.Equal(t, created, s.Created)
			require.Empty(t, s.Differences)
		}
	}
	compacted := map[string]string{"cleanup.policy": "compact", "delete.retention.ms": "60000", "min.insync.replicas": "1"}
	requireTopic(t, brokers, topics[0], actualTopic{1, 1, compacted})
	requireTopic(t, brokers, topics[1], actualTopic{1, 1, map[string]string{"cleanup.policy": "delete", "retention.ms": "604800000", "min.insync.replicas": "1"}})
	requireTopic(t, brokers, topics[0]+".dlq", actualTopic{1, 1, map[string]string{
		"cleanup.policy": "delete", "retention.ms": "2592000000", "min.insync.replicas": "1", "max.message.bytes": "1064972",
	}})
	cfg.Compacted, cfg.DeleteRetention = func(string) bool { return true }, time.Hour
	states, err := outboxtopics.Ensure(background, kafka, events, cfg)
	require.NoError(t, err)
	require.Equal(t, []outboxtopics.Difference{{Setting: "delete.retention.ms", Want: "3600000", Have: "60000"}}, states[0].Differences)
	require.Equal(t, []outboxtopics.Difference{
		{Setting: "cleanup.policy", Want: "compact", Have: "delete"}, {Setting: "delete.retention.ms", Want: "3600000", Have: "86400000"},
	}, states[2].Differences)
	cfg.DeleteRetention = -1
	_, err = outboxtopics.Ensure(background, kafka, events, cfg)
	require.ErrorContains(t, err, "field DeleteRetention is -1ns: at least 1ms")

	client, err := kgo.NewClient(append(kafka, kgo.RecordPartitioner(kgo.ManualPartitioner()))...)
	require.NoError(t, err)
	defer client.Close()
	compactEarly(t, client, topics[0])
	send := func(key, value string) {
		r := &kgo.Record{Topic: topics[0], Key: []byte(key), Value: []byte(value)}
		if value == "" {
			r.Value = nil
		}
		require.NoError(t, client.ProduceSync(background, r).FirstErr())
	}
	for _, value := range []string{"1", "2", "3"} {
		send("kept", value)
		send("gone", value)
	}
	send("gone", "")
	require.Eventually(t, func() bool {
		send("filler", "x") // begins a new segment: the newest one is not compacted
		values := map[string][]string{}
		for _, r := range readTopic(t, brokers, topics[0]) {
			values[string(r.Key)] = append(values[string(r.Key)], string(r.Value))
		}
		return slices.Equal(values["kept"], []string{"3"}) && (len(values["gone"]) == 0 || slices.Equal(values["gone"], []string{""}))
	}, 2*testenv.Patience, 500*time.Millisecond)
}

// compactEarly has Kafka compact a topic as soon as it looks at it.
func compactEarly(t *testing.T, client *kgo.Client, topic string) {
	t.Helper()
	request := kmsg.NewPtrIncrementalAlterConfigsRequest()
	resource := kmsg.NewIncrementalAlterConfigsRequestResource()
	resource.ResourceType, resource.ResourceName = kmsg.ConfigResourceTypeTopic, topic
	for name, value := range map[string]string{"segment.ms": "100", "min.cleanable.dirty.ratio": "0.001", "max.compaction.lag.ms": "100"} {
		config := kmsg.NewIncrementalAlterConfigsRequestResourceConfig()
		config.Name, config.Value = name, &value
		resource.Configs = append(resource.Configs, config)
	}
	request.Resources = append(request.Resources, resource)
	response, err := request.RequestWith(background, client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Resources[0].ErrorCode))
}

// readTopic returns the records of the only partition of a topic, up to its present end.
func readTopic(t *testing.T, brokers []string, topic string) (records []*kgo.Record) {
	t.Helper()
	client, err := kgo.NewClient(append(testenv.KafkaOpts(brokers), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().AtStart()}}))...)
	require.NoError(t, err)
	defer client.Close()
	list := kmsg.NewPtrListOffsetsRequest()
	list.ReplicaID = -1
	of := kmsg.NewListOffsetsRequestTopic()
	of.Topic = topic
	end := kmsg.NewListOffsetsRequestTopicPartition()
	end.Timestamp = -1 // the end
	of.Partitions = append(of.Partitions, end)
	list.Topics = append(list.Topics, of)
	var last int64
	for _, shard := range client.RequestSharded(background, list) {
		require.NoError(t, shard.Err)
		for _, found := range shard.Resp.(*kmsg.ListOffsetsResponse).Topics {
			last = found.Partitions[0].Offset - 1
		}
	}
	ctx, cancel := context.WithTimeout(background, testenv.Patience)
	defer cancel()
	for len(records) == 0 || records[len(records)-1].Offset < last {
		fetches := client.PollFetches(ctx)
		require.NoError(t, fetches.Err())
		records = append(records, fetches.Records()...)
	}
	return records
}

// Replication may be left to the defaults of the cluster, and is then no difference.
func TestEnsureTopicsOfClusterDefaults(t *testing.T) {
	t.Parallel()
	brokers := testenv.RealBrokers(t)
	events, topics := newRegistry(t, 1)
	cfg := outboxtopics.Config{ReplicationFactor: -7}
	for range 2 {
		states, err := outboxtopics.Ensure(background, testenv.KafkaOpts(brokers), events, cfg)
		require.NoError(t, err)
		require.Len(t, states, 2)
		require.Empty(t, states[0].Differences)
		requireTopic(t, brokers, topics[0], actualTopic{3, 1, map[string]string{"cleanup.policy": "delete", "retention.ms": "604800000"}})
	}
	cfg.MinInSyncReplicas = 2
	states, err := outboxtopics.Ensure(background, testenv.KafkaOpts(brokers), events, cfg)
	require.NoError(t, err)
	require.Equal(t, []outboxtopics.Difference{{Setting: "min.insync.replicas", Want: "2", Have: "1"}}, states[0].Differences)
}

// Existing topics are not changed, and their differences are returned. A dead-letter
// topic has to take what its topic takes, and may take more.
func TestEnsureTopicsDifferences(t *testing.T) {
	t.Parallel()
	brokers := testenv.RealBrokers(t)
	events, topics := newRegistry(t, 3)
	kafka := testenv.KafkaOpts(brokers)
	compacted := map[string]string{"cleanup.policy": "compact", "max.message.bytes": "3000000"}
	small := map[string]string{"max.message.bytes": "3016383", "retention.ms": "2592000000", "min.insync.replicas": "1"}
	large := map[string]string{"max.message.bytes": "9000000", "retention.ms": "2592000000", "min.insync.replicas": "1"}
	createTopic(t, brokers, topics[0], 2, compacted)
	createTopic(t, brokers, topics[0]+".dlq", 1, small)
	createTopic(t, brokers, topics[1]+".dlq", 1, large)
	cfg := outboxtopics.Config{ReplicationFactor: 1, Retention: time.Hour}
	for _, dryRun := range []bool{true, false} {
		cfg.DryRun = dryRun
		states, err := outboxtopics.Ensure(background, kafka, events, cfg)
		require.NoError(t, err)
		require.Equal(t, []outboxtopics.State{
			{Topic: topics[0], Differences: []outboxtopics.Difference{
				{Setting: "partitions", Want: "3", Have: "2"},
				{Setting: "cleanup.policy", Want: "delete", Have: "compact"},
				{Setting: "retention.ms", Want: "3600000", Have: "604800000"},
			}},
			{Topic: topics[0] + ".dlq", Differences: []outboxtopics.Difference{{Setting: "max.message.bytes", Want: "3016384", Have: "3016383"}}},
			{Topic: topics[1], Created: true},
			{Topic: topics[1] + ".dlq"},
			{Topic: topics[2], Created: true},
			{Topic: topics[2] + ".dlq", Created: true},
		}, states)
		requireTopic(t, brokers, topics[0], actualTopic{2, 1, compacted})
		requireTopic(t, brokers, topics[0]+".dlq", actualTopic{1, 1, small})
		for _, name := range []string{topics[1], topics[2], topics[2] + ".dlq"} {
			_, there := askTopic(t, brokers, name)
			require.Equal(t, !dryRun, there, name)
		}
	}
	require.Equal(t, "retention.ms is 604800000, want 3600000", outboxtopics.Difference{Setting: "retention.ms", Want: "3600000", Have: "604800000"}.String())

	states, err := outboxtopics.Ensure(background, kafka, events, outboxtopics.Config{ReplicationFactor: 3, Partitions: 2, MaxMessageBytes: 4_000_000})
	require.NoError(t, err)
	require.Equal(t, []outboxtopics.Difference{
		{Setting: "replication.factor", Want: "3", Have: "1"},
		{Setting: "cleanup.policy", Want: "delete", Have: "compact"},
		{Setting: "min.insync.replicas", Want: "2", Have: "1"},
		{Setting: "max.message.bytes", Want: "4000000", Have: "3000000"},
	}, states[0].Differences)
}

// The error names the topics that Kafka refuses to create, also in a dry run.
func TestEnsureTopicsRefused(t *testing.T) {
	t.Parallel()
	brokers := testenv.RealBrokers(t)
	events, topics := newRegistry(t, 2)
	createTopic(t, brokers, topics[1], 3, nil)
	for _, dryRun := range []bool{true, false} {
		states, err := outboxtopics.Ensure(background, testenv.KafkaOpts(brokers), events, outboxtopics.Config{DryRun: dryRun})
		require.ErrorIs(t, err, kerr.InvalidReplicationFactor)
		require.ErrorContains(t, err, "outbox: topics: create topic "+topics[0]+": ")
		require.ErrorContains(t, err, "1 broker", "the message of the broker")
		require.ErrorContains(t, err, "create topic "+topics[1]+".dlq: ")
		require.NotContains(t, err.Error(), topics[0]+".dlq", "not created without the topic")
		const todo = "field ReplicationFactor is 3 by default, and the cluster has 1 broker: set it to 1, or to -1 for the cluster's default"
		require.Equal(t, 1, strings.Count(err.Error(), todo), "%v", err)
		require.Len(t, states, 1)
		require.Equal(t, topics[1], states[0].Topic)
	}
}

// Processes that start at the same time create each topic once.
func TestEnsureTopicsTogether(t *testing.T) {
	t.Parallel()
	brokers := testenv.RealBrokers(t)
	events, topics := newRegistry(t, 3)
	const processes = 8
	created := make(chan string, 100)
	var all sync.WaitGroup
	for range processes {
		all.Go(func() {
			states, err := outboxtopics.Ensure(background, testenv.KafkaOpts(brokers), events, oneBroker)
			if err != nil || len(states) != 6 {
				t.Errorf("%v %v", states, err)
			}
			for _, s := range states {
				if len(s.Differences) > 0 {
					t.Errorf("%v", s)
				}
				if s.Created {
					created <- s.Topic
				}
			}
		})
	}
	all.Wait()
	close(created)
	var names []string
	for name := range created {
		names = append(names, name)
	}
	var want []string
	for _, topic := range topics {
		want = append(want, topic, topic+".dlq")
	}
	require.ElementsMatch(t, want, names)
}

func TestEnsureTopicsWithoutKafka(t *testing.T) {
	t.Parallel()
	events, _ := newRegistry(t, 1)
	kafka := []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1"), kgo.RequestRetries(0)}
	states, err := outboxtopics.Ensure(background, kafka, events, oneBroker)
	require.ErrorContains(t, err, "outbox: topics: describe topics: ")
	require.Empty(t, states)
	empty, err := outbox.NewRegistry("test")
	require.NoError(t, err)
	states, err = outboxtopics.Ensure(background, kafka, empty, oneBroker)
	require.NoError(t, err, "nothing to do")
	require.Empty(t, states)
}

var badTopicsConfigs = []struct {
	name string
	cfg  outboxtopics.Config
	want string
}{
	{"negative partitions", outboxtopics.Config{Partitions: -1}, "field Partitions is -1: must not be negative"},
	{"too many partitions", outboxtopics.Config{Partitions: 10_001}, "field Partitions is 10001: at most 10000"},
	{"too many replicas", outboxtopics.Config{ReplicationFactor: 40_000}, "field ReplicationFactor is 40000: at most 32767"},
	{"negative replicas in sync", outboxtopics.Config{MinInSyncReplicas: -1}, "field MinInSyncReplicas is -1: must not be negative"},
	{"more in sync than there are", outboxtopics.Config{MinInSyncReplicas: 4}, "field MinInSyncReplicas is 4: must not be above ReplicationFactor, 3 by default"},
	{"fewer than are in sync", outboxtopics.Config{ReplicationFactor: 2, MinInSyncReplicas: 3}, "field MinInSyncReplicas is 3: must not be above ReplicationFactor, 2"},
	{"negative retention", outboxtopics.Config{Retention: -1}, "field Retention is -1ns: at least 1ms"},
	{"retention of nothing", outboxtopics.Config{Retention: time.Microsecond}, "field Retention is 1µs: at least 1ms"},
	{"negative limit", outboxtopics.Config{MaxMessageBytes: -1}, "field MaxMessageBytes is -1: must not be negative"},
	{"a limit that leaves no room", outboxtopics.Config{MaxMessageBytes: 1 << 31}, "field MaxMessageBytes is 2147483648: at most 2147467263"},
	{"negative dead-letter partitions", outboxtopics.Config{DeadLetterPartitions: -1}, "field DeadLetterPartitions is -1: must not be negative"},
	{"too many dead-letter partitions", outboxtopics.Config{DeadLetterPartitions: 10_001}, "field DeadLetterPartitions is 10001: at most 10000"},
	{"negative dead-letter retention", outboxtopics.Config{DeadLetterRetention: -time.Hour}, "field DeadLetterRetention is -1h0m0s: at least 1ms"},
	{"negative dead-letter limit", outboxtopics.Config{DeadLetterMaxMessageBytes: -1}, "field DeadLetterMaxMessageBytes is -1: must not be negative"},
	{"a dead-letter limit below the limit", outboxtopics.Config{MaxMessageBytes: 2000, DeadLetterMaxMessageBytes: 1999},
		"field DeadLetterMaxMessageBytes is 1999: must not be below MaxMessageBytes, 2000"},
	{"negative partitions for a topic", outboxtopics.Config{PartitionsFor: func(string) int { return -2 }}, "field PartitionsFor order-events is -2: must not be negative"},
	{"too many partitions for a topic", outboxtopics.Config{PartitionsFor: func(string) int { return 20_000 }}, "field PartitionsFor order-events is 20000: at most 10000"},
	{"a further topic of no name", outboxtopics.Config{Topics: []string{"a b"}}, `field Topics: topic "a b" is malformed`},
	{"no dead-letter topic", outboxtopics.Config{DeadLetterTopic: func(string) string { return "" }}, `field DeadLetterTopic for topic order-events: "" is malformed`},
	{"a dead-letter topic of no name", outboxtopics.Config{DeadLetterTopic: func(string) string { return "a b" }}, `field DeadLetterTopic for topic order-events: "a b" is malformed`},
	{"dead letters among the events", outboxtopics.Config{DeadLetterTopic: func(topic string) string { return topic }},
		`field DeadLetterTopic for topic order-events: "order-events": must not be a topic of events`},
}

func TestTopicsConfig(t *testing.T) {
	t.Parallel()
	events, err := outbox.NewRegistry("shop", outbox.Event("shop.order.created.v1", "Order", event.AggregateID))
	require.NoError(t, err)
	nowhere := []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1")}
	for _, tt := range badTopicsConfigs {
		t.Run(tt.name, func(t *testing.T) {
			_, err := outboxtopics.Ensure(background, nowhere, events, tt.cfg)
			require.ErrorContains(t, err, "outbox: topics config: ")
			require.ErrorContains(t, err, tt.want)
			require.Equal(t, 1, strings.Count(err.Error(), "field"), "%v", err)
		})
	}
	_, err = outboxtopics.Ensure(background, append(nowhere, kgo.ConsumerGroup("g")), nil, outboxtopics.Config{Partitions: -1, Retention: -1})
	for _, want := range []string{"field Partitions", "field Retention", "kafka option ConsumerGroup", "registry must not be nil"} {
		require.ErrorContains(t, err, want)
	}
}

// A tool without a registry creates topics by name.
func TestEnsureNamedTopics(t *testing.T) {
	t.Parallel()
	brokers := testenv.RealBrokers(t)
	topic := "named-" + uuid.NewString()
	_, err := outboxtopics.EnsureNamed(background, testenv.KafkaOpts(brokers), []string{topic, "not a name"}, oneBroker)
	require.ErrorIs(t, err, outbox.ErrMalformed)
	cfg := oneBroker
	cfg.Topics = []string{topic, topic + "-further"}
	states, err := outboxtopics.EnsureNamed(background, testenv.KafkaOpts(brokers), []string{topic, topic}, cfg)
	require.NoError(t, err)
	require.Equal(t, []outboxtopics.State{{Topic: topic, Created: true}, {Topic: topic + "-further", Created: true},
		{Topic: topic + "-further.dlq", Created: true}, {Topic: topic + ".dlq", Created: true}}, states)
}

func TestDescribeTopics(t *testing.T) {
	t.Parallel()
	brokers := testenv.RealBrokers(t)
	topic := "described-" + uuid.NewString()
	createTopic(t, brokers, topic, 2, map[string]string{"retention.ms": "1234567"})
	infos, err := outboxtopics.Describe(background, testenv.KafkaOpts(brokers), "missing-"+topic, topic)
	require.NoError(t, err)
	require.Len(t, infos, 1, "and creates none that is missing")
	require.Equal(t, "1234567", infos[0].Settings["retention.ms"])
	require.NotEmpty(t, infos[0].Settings["max.message.bytes"], "the defaults of the cluster too")
	infos[0].Settings = nil
	require.Equal(t, outboxtopics.Info{Topic: topic, Partitions: 2, Replicas: 1, InSync: 1}, infos[0])
	_, err = outboxtopics.Describe(background, testenv.KafkaOpts(brokers), "not a name")
	require.ErrorIs(t, err, kerr.InvalidTopicException)
	infos, err = outboxtopics.Describe(background, nil)
	require.NoError(t, err)
	require.Empty(t, infos)
}
