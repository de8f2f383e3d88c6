package main

import (
	"fmt"
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
)

const onlyExactly = "kafka.exactly_once,doctor.kafka.exactly_once"

// oneLine undoes the wrapping of lines.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// openTransaction leaves a transaction open in a topic until the test ends. It returns its producer id.
func (d *commandFixture) openTransaction(t testing.TB, id, topic string) int64 {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(d.vars["KAFKA_BROKERS"], ",")...), kgo.TransactionalID(id), kgo.DefaultProduceTopic(topic))
	require.NoError(t, err)
	t.Cleanup(client.Close)
	require.NoError(t, client.BeginTransaction())
	require.NoError(t, client.ProduceSync(background, kgo.StringRecord("a"), kgo.StringRecord("b")).FirstErr())
	producer, _, err := client.ProducerID(background)
	require.NoError(t, err)
	return producer
}

// The doctor finds nothing wrong with a relay that sends exactly once, and names its transactional ids. A transaction
// of another producer that is open in a topic of events is named, with the partition where it holds back readers.
func TestDoctorOnExactlyOnce(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t).withKafka(t)
	testenv.CreateTopic(t, d.brokers, d.topic, 1)
	d.record(t, "a", "b")
	r, err := outbox.NewRelay(d.db, testenv.KafkaOpts(d.brokers), outbox.RelayConfig{Schema: d.schema, PollInterval: 10 * time.Millisecond,
		ExactlyOnce: d.topic + "-cursor", Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	stop := testenv.Run(t, r.Run)
	require.Eventually(t, func() bool {
		relays, err := d.inspector(t).Relays(background)
		require.NoError(t, err)
		return len(relays) == 1 && relays[0].Pending == 0 && relays[0].Transaction > 1
	}, testenv.Patience, 10*time.Millisecond)
	require.Empty(t, d.findings(t, "--only", onlyExactly))
	text := d.ok(t, "doctor", "--only", onlyExactly)
	requireNarrow(t, text)
	require.Regexp(t, `relay default: exactly once, cursor topic `+d.topic+`-cursor, transaction \d+ is confirmed `+
		`outbox\.\d+\.\w+\.`+d.schema+`\.default\.1: (Empty|CompleteCommit), producer id \d+ outbox\.\d+\.\w+\.`+d.schema+`\.default\.2: (Empty|CompleteCommit), producer id \d+ `, oneLine(text))

	stop()
	producer := d.openTransaction(t, d.topic+"-other", d.topic)
	require.Empty(t, d.findings(t, "--only", onlyExactly), "it is not open for long")
	require.Eventually(t, func() bool { return len(d.findings(t, "--only", onlyExactly, "--open-for", "1ms")) > 0 }, testenv.Patience, 10*time.Millisecond)
	f := d.requireFinding(t, "kafka.exactly_once.open", severityWarning, fmt.Sprintf("transactional id %s-other (producer id %d, Ongoing) has had a transaction open for ",
		d.topic, producer), "--only", onlyExactly, "--open-for", "1ms")
	require.Contains(t, f.What, "last stable offset of "+d.topic+"/0 is 2 behind its end")
}

// newExactlyClinic is a clinic on a fake Kafka, with a relay whose cursor topic is cursors.
func newExactlyClinic(t *testing.T, opts ...kfake.Opt) (*commandFixture, *kfake.Cluster) {
	t.Helper()
	testenv.Direct(t)
	d := newClinic(t)
	cluster := d.withFakeKafka(t, opts...)
	d.relay(t)()
	d.sendExactly(t, "cursors", 7)
	return d, cluster
}

// A cursor topic that is missing or cannot be one, and brokers without transaction.version 2.
func TestDoctorOnCursorTopic(t *testing.T) {
	t.Parallel()
	d, cluster := newExactlyClinic(t)
	d.requireFinding(t, "kafka.exactly_once.topic", severityError, "relay default: the cursor topic does not exist: cursors", "--only", onlyExactly)
	require.Empty(t, d.findings(t, "--only", "kafka.topic,kafka.gap"))

	testenv.CreateTopic(t, cluster.ListenAddrs(), "several", 2, "cleanup.policy", "compact")
	d.sendExactly(t, "several", 7)
	d.requireFinding(t, "kafka.exactly_once.topic", severityError, "several has 2 partitions", "--only", onlyExactly)
	testenv.CreateTopic(t, cluster.ListenAddrs(), "removed", 1)
	d.sendExactly(t, "removed", 7)
	d.requireFinding(t, "kafka.exactly_once.topic", severityError, "cleanup.policy of removed is delete", "--only", onlyExactly)
}

// Relays that send exactly once wait for brokers with transaction.version 2.
func TestDoctorOnTransactionVersion(t *testing.T) {
	t.Parallel()
	d, cluster := newExactlyClinic(t)
	testenv.CreateTopic(t, cluster.ListenAddrs(), "cursors", 1, "cleanup.policy", "compact")
	require.Empty(t, d.findings(t, "--only", onlyExactly))
	client, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...))
	require.NoError(t, err)
	defer client.Close()
	downgrade := kmsg.NewPtrUpdateFeaturesRequest()
	downgrade.FeatureUpdates = []kmsg.UpdateFeaturesRequestFeatureUpdate{{Feature: "transaction.version", MaxVersionLevel: 1, UpgradeType: 2}}
	answer, err := downgrade.RequestWith(background, client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(answer.ErrorCode))
	d.requireFinding(t, "kafka.exactly_once.version", severityError, "transaction.version 2", "--only", onlyExactly)
}

// A cursor topic has fewer replicas than the topics of events, or takes no records.
func TestDoctorOnCursorReplicas(t *testing.T) {
	t.Parallel()
	d, cluster := newExactlyClinic(t, kfake.NumBrokers(3))
	d.recordFor(t, "orders")
	client, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...))
	require.NoError(t, err)
	defer client.Close()
	create := func(topic string, replicas int16) {
		request := kmsg.NewPtrCreateTopicsRequest()
		one, compact := kmsg.NewCreateTopicsRequestTopic(), "compact"
		one.Topic, one.NumPartitions, one.ReplicationFactor = topic, 1, replicas
		one.Configs = []kmsg.CreateTopicsRequestTopicConfig{{Name: "cleanup.policy", Value: &compact}}
		request.Topics = append(request.Topics, one)
		answer, err := request.RequestWith(background, client)
		require.NoError(t, err)
		require.NoError(t, kerr.ErrorForCode(answer.Topics[0].ErrorCode))
	}
	create("cursors", 1)
	d.requireFinding(t, "kafka.exactly_once.replicas", severityWarning, "cursor topic cursors has 1 replica, and should have 2", "--only", onlyExactly)
	create("orders", 3)
	d.requireFinding(t, "kafka.exactly_once.replicas", severityWarning, "cursor topic cursors has 1 replica, and should have 3", "--only", onlyExactly)
	create("good", 3)
	d.sendExactly(t, "good", 7)
	require.Empty(t, d.findings(t, "--only", onlyExactly))
}

// What the doctor may not ask it does not claim to know.
func TestDoctorMayNotAskAboutTransactions(t *testing.T) {
	t.Parallel()
	d, cluster := newExactlyClinic(t)
	testenv.CreateTopic(t, cluster.ListenAddrs(), "cursors", 1, "cleanup.policy", "compact")
	testenv.CreateTopic(t, cluster.ListenAddrs(), "orders", 1)
	d.recordFor(t, "orders")
	producer := d.openTransaction(t, "hidden", "orders")
	arguments := []string{"--only", onlyExactly, "--open-for", "1ms"}
	d.requireFinding(t, "kafka.exactly_once.open", severityWarning, "transactional id hidden ", arguments...)

	cluster.ControlKey(int16(kmsg.ListTransactions), func(r kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl() // a client without Describe gets an empty list
		return r.ResponseKind(), nil, true
	})
	f := d.requireFinding(t, "kafka.exactly_once.open", severityWarning,
		fmt.Sprintf("producer id %d, whose transactional id Kafka does not tell, has a transaction open, and its newest record is as old as ", producer), arguments...)
	require.Contains(t, f.What, "last stable offset of orders/0 is 2 behind its end")

	cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.DescribeProducers}, Topic: "orders", Err: kerr.TopicAuthorizationFailed, Count: -1})
	d.requireFinding(t, "doctor.kafka.exactly_once", severityWarning,
		"last stable offset of orders/0 is 2 behind its end, and Kafka does not say for whom: TOPIC_AUTHORIZATION_FAILED", arguments...)
	cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.DescribeTransactions}, Err: kerr.TransactionalIDAuthorizationFailed, Count: -1})
	f = d.requireFinding(t, "doctor.kafka.exactly_once", severityWarning, "describe transactional id outbox.", arguments...)
	require.Contains(t, f.What, "TRANSACTIONAL_ID_AUTHORIZATION_FAILED")
	require.Contains(t, oneLine(d.call(t, append([]string{"doctor"}, arguments...)...).out), ".default.2: Kafka does not say ")
}
