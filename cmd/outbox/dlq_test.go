package main

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

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
		r := &kgo.Record{Topic: dlq, Key: []byte("k"), Value: []byte("{}")}
		for _, h := range [][2]string{{outbox.DeadLetterOriginalTopic, d.topic}, {outbox.DeadLetterOriginalPartition, "0"}, {outbox.DeadLetterOriginalOffset, "1"},
			{outbox.DeadLetterOriginalTimestamp, "2026-02-03T04:05:06.789Z"}, {outbox.DeadLetterGroup, group}, {outbox.DeadLetterError, "e"},
			{outbox.DeadLetterClass, "handler"}, {outbox.DeadLetterAttempts, "3"}, {outbox.DeadLetterFailedAt, "2026-02-03T04:05:06.789Z"}} {
			r.Headers = append(r.Headers, kgo.RecordHeader{Key: h[0], Value: []byte(h[1])})
		}
		require.NoError(t, client.ProduceSync(background, r).FirstErr())
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
