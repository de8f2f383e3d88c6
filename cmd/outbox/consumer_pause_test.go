package main

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A group is paused and resumed by name and reason, and shown.
func TestConsumerPause(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	require.Equal(t, "No consumer group has begun to read.\n", d.ok(t, "consumers"))
	_, err := d.db.Exec(background, `INSERT INTO `+pgx.Identifier{d.schema, "consumer_start"}.Sanitize()+` (consumer_group, topic, topic_id, partition, start_offset, position, lost)
		SELECT 'stats', 'orders', '00000000-0000-0000-0000-000000000001', n, CASE WHEN n >= 0 THEN 0 END, CASE WHEN n >= 0 THEN 7 END, CASE WHEN n > 0 THEN 5 ELSE 0 END FROM generate_series(-1, 2) AS n`)
	require.NoError(t, err)
	require.Equal(t, "pause: topic orders of group stats\n", d.ok(t, "consumer", "pause", "--group", "stats", "--topic", "orders", "--reason", "the stock is counted", "--operator", "kim"))
	again := d.call(t, "consumer", "pause", "--group", "stats", "--topic", "orders", "--reason", "again")
	require.Equal(t, exitError, again.code)
	require.Contains(t, again.err, "pause group stats: topic orders: not possible in this status: it is paused already")
	require.Contains(t, d.ok(t, "consumer", "pause", "--group", "stats", "--reason", "a migration", "--operator", "lee"), "pause: all topics of group stats\n")
	text := d.ok(t, "consumers")
	require.Regexp(t, `(?m)^stats +orders +3 +- +\S+( s)? +10 +\S+( s)? +kim +the stock`, text)
	require.Regexp(t, `(?m)^stats +\(all\) +\S+( s)? +lee +a migration`, text)
	require.Contains(t, d.ok(t, "consumer", "pause", "--group", "stast", "--reason", "mistyped"), "are the names right?")

	var status struct {
		Groups      []groupJSON
		More        bool
		Deliveries  []deliveriesJSON
		Workers     []workersJSON
		States      []groupStateJSON
		DeadLetters []deadLettersJSON `json:"dead_letters"`
	}
	d.json(t, &status, exitOK, "consumers", "--group", "stats")
	require.Len(t, status.Groups, 1)
	require.Equal(t, "lee", status.Groups[0].Pause.Operator)
	require.Equal(t, "the stock is counted", status.Groups[0].Topics[0].Pause.Reason)
	require.Equal(t, 3, status.Groups[0].Topics[0].Partitions)
	require.EqualValues(t, 10, status.Groups[0].Topics[0].Lost)
	require.NotNil(t, status.Groups[0].Topics[0].SavedAt)
	require.Nil(t, status.Groups[0].Topics[0].Lag, "without Kafka nobody knows")

	require.Equal(t, "resume: all topics of group stats\nStill paused: topic orders\n", d.ok(t, "consumer", "resume", "--group", "stats", "--reason", "done"))
	var done struct {
		Action, Group, Topic string
		Begun                bool
		Paused               []string
	}
	d.json(t, &done, exitOK, "consumer", "resume", "--group", "stats", "--topic", "orders", "--reason", "done")
	require.True(t, done.Begun)
	require.Empty(t, done.Paused)
	require.Contains(t, d.call(t, "consumer", "resume", "--group", "stats", "--reason", "done").err, "it is not paused")
	for args, text := range map[string]string{
		"consumer pause --reason x":                         "--group is missing",
		"consumer pause --group g":                          "--reason",
		"consumer pause --group g --topic a/b --reason why": "a/b",
	} {
		a := d.call(t, strings.Fields(args)...)
		require.NotEqual(t, exitOK, a.code, args)
		require.Contains(t, a.err, text)
	}
}

// With Kafka the groups are shown with their lag: here a group that has committed nothing.
func TestConsumersLag(t *testing.T) {
	t.Parallel()
	d := newShop(t).withKafka(t)
	d.record(t, "a", "b", "c")
	stop := d.relay(t)
	d.requireSent(t)
	stop()
	d.exec(t, `INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset)
		VALUES ('stats', $1, '00000000-0000-0000-0000-000000000001', 0, 0), ('stats', 'nowhere', '00000000-0000-0000-0000-000000000002', 0, 0)`, d.topic)
	dlq := outbox.DeadLetterTopic(d.topic)
	testenv.CreateTopic(t, d.brokers, dlq, 1)
	client, err := kgo.NewClient(testenv.KafkaOpts(d.brokers)...)
	require.NoError(t, err)
	defer client.Close()
	require.NoError(t, client.ProduceSync(background, &kgo.Record{Topic: dlq, Value: []byte("{}")}).FirstErr())
	text := d.ok(t, "consumers")
	require.Regexp(t, `(?m)^1 +`+dlq+` +`+d.topic+`$`, text)
	require.NotContains(t, text, "nowhere.dlq", "Kafka does not have it")
	require.Regexp(t, `(?m)^stats +`+d.topic+` +1 +3 +- +0$`, text)
	require.Regexp(t, `(?m)^stats +nowhere +1 +- +- +0$`, text)
	var doc struct {
		Groups      []groupJSON
		More        bool
		Deliveries  []deliveriesJSON
		Workers     []workersJSON
		States      []groupStateJSON
		DeadLetters []deadLettersJSON `json:"dead_letters"`
	}
	d.json(t, &doc, exitOK, "consumers", "--group", "stats")
	require.Len(t, doc.Groups[0].Topics, 2)
	for _, topic := range doc.Groups[0].Topics {
		if topic.Topic == "nowhere" {
			require.Nil(t, topic.Lag, "Kafka does not know the topic")
			continue
		}
		require.EqualValues(t, 3, *topic.Lag)
	}
}
