package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/testenv"
)

// badNames are names that PostgreSQL takes for topics, and Kafka neither for the topic nor for its dead letters.
var badNames = []string{"a/b", "..", strings.Repeat("n", 249), "esc\x1b[2Jape"}

// A consumer writes its rows of consumer_start and consumer_gap itself, and a writer the topics of its events. A bad
// name there takes no answer about other groups and topics from operators.
func TestBadNameBlindsNobody(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.vars["KAFKA_BROKERS"] = strings.Join(d.brokers, ",")
	d.relay(t)() // a relay that runs on would make the topics
	d.ok(t, "topics", d.topic, "--create", "--replication", "1")
	client, err := kgo.NewClient(testenv.KafkaOpts(d.brokers)...)
	require.NoError(t, err)
	defer client.Close()
	require.NoError(t, client.ProduceSync(background, &kgo.Record{Topic: d.topic, Value: []byte("{}")}).FirstErr())
	const begun = `INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset) VALUES ($1, $2, gen_random_uuid(), 0, 0)`
	d.exec(t, begun, "good", d.topic)
	other := d.topic + "-other"
	for _, name := range badNames {
		d.exec(t, begun, "bad", name)
		d.exec(t, begun, "good", name)
		d.exec(t, `INSERT INTO {s}.consumer_gap (consumer_group, topic, topic_id, partition, action, event_type, from_offset)
			VALUES ('bad', $1, gen_random_uuid(), 0, 'act', 't', 0)`, name)
		d.exec(t, `INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at)
			VALUES (gen_random_uuid(), 'test.thing.happened.v1', 'test', 'Thing', '1', '{}', 'application/json', $1, now())`, name)
	}
	d.exec(t, begun, "bad", "")
	for _, name := range []string{other, other + ".dlq"} {
		d.exec(t, `INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at)
			VALUES (gen_random_uuid(), 'test.thing.happened.v1', 'test', 'Thing', '1', '{}', 'application/json', $1, now())`, name)
	}

	var groups struct {
		Groups []groupJSON       `json:"groups"`
		Dead   []deadLettersJSON `json:"dead_letters"`
	}
	a := d.call(t, "consumers", "--json")
	require.Equal(t, exitOK, a.code, a.err)
	require.NoError(t, json.Unmarshal([]byte(a.out), &groups))
	lag := map[string]int64{}
	for _, g := range groups.Groups {
		for _, topic := range g.Topics {
			if topic.Lag != nil && topic.Topic != badNames[2] { // which brokers may have made
				lag[g.Group+" "+topic.Topic] = *topic.Lag
			}
		}
	}
	require.Equal(t, map[string]int64{"good " + d.topic: 1}, lag)
	require.Len(t, groups.Dead, 1)

	var topics struct {
		Topics []topicJSON `json:"topics"`
	}
	a = d.call(t, "topics", "--create", "--replication", "1", "--json")
	require.Equal(t, exitOK, a.code, a.err)
	require.NoError(t, json.Unmarshal([]byte(a.out), &topics))
	states := map[string]string{}
	for _, topic := range topics.Topics {
		states[topic.Topic] = topic.State
	}
	require.Equal(t, "created", states[other])
	require.Equal(t, "created", states[other+".dlq"])
	for _, name := range badNames {
		require.Equal(t, "invalid", states[name], name)
	}
	require.Equal(t, exitProblems, d.call(t, "topics", "--check", "--replication", "1").code)

	found := ""
	for _, f := range d.findings(t) {
		require.False(t, strings.HasPrefix(f.ID, "doctor."), "%v", f)
		if f.ID == "events.topic" {
			isLong := strings.Contains(f.What, badNames[2]) // a topic of this name can exist
			require.Equal(t, isLong, f.Severity == severityWarning, "%v", f)
			found += f.What + "\n"
		}
	}
	require.Contains(t, found, "no dead-letter topic can have the name "+badNames[2]+".dlq")
	for _, name := range []string{`"a/b"`, `".."`, `"esc\x1b[2Jape"`} {
		require.Contains(t, found, name)
	}
}

// Errors repeat what tables, topics and arguments have. They do not reach a terminal as escape sequences.
func TestErrorsObeyNoEscape(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	for _, args := range [][]string{{"\x1b[2Jstatus"}, {"failures", "show", "\x1b]0;title\a"}, {"topics", "a\x1b[2Jb"}, {"status", "--schema", "\x1b[31m"},
		{"failures", "resolve", "event-1", "--reason", "x", "--operator", "\u009b2J"}} {
		d.vars["KAFKA_BROKERS"] = strings.Join(d.brokers, ",")
		a := d.call(t, args...)
		require.NotEqual(t, exitOK, a.code)
		require.NotContains(t, a.out+a.err, "\x1b", "%q", args)
		require.NotContains(t, a.out+a.err, "\u009b", "%q", args)
		require.NotContains(t, a.out+a.err, "\a", "%q", args)
	}
}
