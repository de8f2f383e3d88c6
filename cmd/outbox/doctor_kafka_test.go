package main

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/testenv"
)

// recordFor records an event for each topic, as a writer does without a Recorder.
func (d *commandFixture) recordFor(t testing.TB, topics ...string) {
	t.Helper()
	d.exec(t, `INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at)
		SELECT gen_random_uuid(), 'test.thing.happened.v1', 'test', 'Thing', '1', '{}', 'application/json', topic, now() FROM unnest($1::text[]) AS topic`, topics)
}

// withFakeKafka makes commands use a cluster of the test.
func (d *commandFixture) withFakeKafka(t testing.TB, opts ...kfake.Opt) *kfake.Cluster {
	t.Helper()
	cluster, err := kfake.NewCluster(append([]kfake.Opt{kfake.NumBrokers(1)}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	d.vars["KAFKA_BROKERS"] = strings.Join(cluster.ListenAddrs(), ",")
	return cluster
}

// A writer names a topic that the doctor may not describe. The doctor finds the topics that are missing, and says that
// it knows nothing of the others.
func TestDeniedTopicHidesNoMissingOne(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	cluster := d.withFakeKafka(t, kfake.SeedTopics(1, "orders"))
	for _, denied := range []string{"denied", "secrets"} {
		cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Metadata}, Topic: denied, Err: kerr.TopicAuthorizationFailed, Count: -1})
	}
	d.recordFor(t, "bills", "denied", "missing", "orders", "secrets")
	var missing, failed []string
	for _, f := range d.findings(t, "--only", "kafka.topic,doctor") {
		if f.ID == "kafka.topic.missing" {
			missing = append(missing, f.What)
		} else {
			failed = append(failed, f.What)
		}
	}
	require.Equal(t, []string{"topic bills is missing", "topic missing is missing"}, missing)
	require.Len(t, failed, 1)
	require.Contains(t, failed[0], "cannot look at kafka.topics: ")
	require.Contains(t, failed[0], "describe topic denied: TOPIC_AUTHORIZATION_FAILED")

	// Behind very many names that are denied, a few are not asked about.
	var many []string
	for i := range 2 * maxAlone {
		many = append(many, fmt.Sprintf("denied-%02d", i))
		cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Metadata}, Topic: many[i], Err: kerr.TopicAuthorizationFailed, Count: -1})
	}
	d.recordFor(t, many...)
	var requests atomic.Int32
	cluster.ControlKey(int16(kmsg.Metadata), func(r kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		if len(r.(*kmsg.MetadataRequest).Topics) == 1 {
			requests.Add(1)
		}
		return nil, nil, false
	})
	require.Contains(t, fmt.Sprint(d.findings(t, "--only", "kafka.topic,doctor")), "topic bills is missing")
	require.EqualValues(t, maxAlone, requests.Load())
}

// Kafka takes a name of 246 to 249 characters, and no {topic}.dlq of it. The doctor and topics say so alike.
func TestLongNameHasNoDeadLetters(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	there, missing, good := strings.Repeat("t", 246), strings.Repeat("m", 249), strings.Repeat("g", 245)
	d.withFakeKafka(t, kfake.SeedTopics(1, there, good))
	d.recordFor(t, there, missing, good)
	var topics struct {
		Topics []topicJSON `json:"topics"`
		Types  []string    `json:"types_without_topic"`
	}
	d.json(t, &topics, exitOK, "topics")
	states := map[string]string{}
	for _, topic := range topics.Topics {
		states[topic.Topic] = topic.State
	}
	require.Equal(t, map[string]string{there: stateInvalid, missing: stateInvalid, good: "there", good + ".dlq": stateMissing}, states)

	var names, gone []finding
	for _, f := range d.findings(t, "--only", "kafka.topic,events.topic,doctor") {
		switch f.ID {
		case "events.topic":
			names = append(names, f)
		case "kafka.topic.missing":
			gone = append(gone, f)
		default:
			require.Fail(t, "another finding", "%v", f)
		}
	}
	require.Len(t, names, 2)
	for i, name := range []string{missing, there} {
		require.Equal(t, severityWarning, names[i].Severity)
		require.Contains(t, names[i].What, name)
		require.Contains(t, names[i].What, "no dead-letter topic can have the name")
	}
	require.Len(t, gone, 1)
	require.Contains(t, gone[0].What, missing)
	require.NotContains(t, gone[0].Do, "outbox topics --create", "which does not create it")
}
