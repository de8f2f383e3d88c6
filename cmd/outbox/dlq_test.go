package main

import (
	"encoding/json"
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

// deadLetter returns a dead letter of a group.
func (d *commandFixture) deadLetter(group string) *kgo.Record {
	r := &kgo.Record{Topic: outbox.DeadLetterTopic(d.topic), Key: []byte("k"), Value: []byte("{}")}
	for _, h := range [][2]string{{outbox.DeadLetterOriginalTopic, d.topic}, {outbox.DeadLetterOriginalPartition, "0"}, {outbox.DeadLetterOriginalOffset, "1"},
		{outbox.DeadLetterOriginalTimestamp, "2026-02-03T04:05:06.789Z"}, {outbox.DeadLetterGroup, group}, {outbox.DeadLetterError, "e"},
		{outbox.DeadLetterClass, "handler"}, {outbox.DeadLetterAttempts, "3"}, {outbox.DeadLetterFailedAt, "2026-02-03T04:05:06.789Z"}} {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: h[0], Value: []byte(h[1])})
	}
	return r
}

// Dead letters are sent back with a reason, by an operator, after both are in outbox_audit.
func TestDLQReplayIsAudited(t *testing.T) {
	t.Parallel()
	d := newShop(t).withKafka(t)
	dlq := outbox.DeadLetterTopic(d.topic)
	for _, topic := range []string{d.topic, dlq} {
		testenv.CreateTopic(t, d.brokers, topic, 1)
	}
	client, err := kgo.NewClient(testenv.KafkaOpts(d.brokers)...)
	require.NoError(t, err)
	defer client.Close()
	for _, group := range []string{"stats", "stats", "bills"} {
		require.NoError(t, client.ProduceSync(background, d.deadLetter(group)).FirstErr())
	}
	require.Equal(t, exitUsage, d.call(t, "dlq", "replay", dlq, "--yes").code, "a reason is missing")
	require.Contains(t, d.ok(t, "dlq", "replay", dlq), "would send 3; --yes")
	require.Equal(t, "Nothing like that was done.\n", d.ok(t, "audit", "--action", "replay"), "nothing was sent")

	database := d.vars["DATABASE_URL"]
	d.vars["DATABASE_URL"] = "postgres://someone@127.0.0.1:1/nowhere?connect_timeout=2"
	require.Equal(t, exitError, d.call(t, "dlq", "replay", dlq, "--yes", "--reason", "mended").code, "there is no audit")
	d.vars["DATABASE_URL"] = database
	require.Contains(t, d.ok(t, "dlq", "list", d.topic), "No dead letters", "nothing was sent")

	require.Contains(t, d.ok(t, "dlq", "replay", dlq, "--yes", "--reason", "mended"), "sent 3")
	var audits []string
	rows, err := d.db.Query(background, `SELECT concat_ws(' ', operator, action, consumer_group, parking_key, reason) FROM "`+d.schema+`".outbox_audit ORDER BY id`)
	require.NoError(t, err)
	for rows.Next() {
		var text string
		require.NoError(t, rows.Scan(&text))
		audits = append(audits, text)
	}
	require.NoError(t, rows.Err())
	require.ElementsMatch(t, []string{"kim replay stats " + d.topic + "/ mended (dead letters of " + dlq + ")",
		"kim replay bills " + d.topic + "/ mended (dead letters of " + dlq + ")"}, audits)
}

// A replay of dead letters that Kafka stops says what it has sent, and continues before what it has not sent.
func TestDLQReplayIsStopped(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newShop(t)
	dlq := outbox.DeadLetterTopic(d.topic)
	cluster := d.withFakeKafka(t, kfake.SeedTopics(1, d.topic), kfake.SeedTopics(2, dlq))
	client, err := kgo.NewClient(append(testenv.KafkaOpts(cluster.ListenAddrs()), kgo.RecordPartitioner(kgo.ManualPartitioner()))...)
	require.NoError(t, err)
	defer client.Close()
	for n := range 4 {
		r := d.deadLetter("stats")
		if r.Partition = int32(n / 3); n == 1 { // the second one is refused in any case, and is not sent again
			r.Headers = nil
		}
		require.NoError(t, client.ProduceSync(background, r).FirstErr())
	}
	replay := []string{"dlq", "replay", dlq, "--yes", "--reason", "mended"}

	// The dry run before the replay reads only the first partition.
	fault := cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Fetch}, Topic: dlq, Partitions: []int32{1}, Err: kerr.TopicAuthorizationFailed, Count: -1})
	a := d.call(t, replay...)
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "TOPIC_AUTHORIZATION_FAILED")
	require.Empty(t, a.out, "nothing was sent")
	require.Contains(t, d.call(t, "dlq", "replay", dlq).out, "would send 2")
	fault.Remove()

	fault = cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: d.topic, Err: kerr.TopicAuthorizationFailed, Count: -1})
	started := time.Now()
	d.change = func(e *env) { // so that each call of progress writes a line
		e.now = func() time.Time { started = started.Add(time.Minute); return started }
	}
	a = d.call(t, replay...)
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.out, "read 3, sent 0, not sent 3 (next: --from 0:0,1:0)\n")
	require.NotRegexp(t, `(?m)^sent [1-9]`, a.err)
	var doc struct {
		Next map[string]int64 `json:"next"`
	}
	a = d.call(t, append(replay, "--json")...)
	require.Equal(t, exitError, a.code)
	require.NoError(t, json.Unmarshal([]byte(a.out), &doc))
	require.Equal(t, map[string]int64{"0": 0, "1": 0}, doc.Next)
	fault.Remove()

	a = d.call(t, append(replay, "--from", "0:0,1:0")...)
	require.Equal(t, exitOK, a.code, a.err)
	require.Contains(t, a.out, "read 4, sent 3, not sent 1 (next: --from 0:3,1:1)\n")
	require.Equal(t, "sent 1 of 3\nsent 2 of 3\nsent 3 of 3\n", a.err)
}
