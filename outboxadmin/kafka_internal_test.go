package outboxadmin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Who knows Kafka shows the lag of groups and the dead-letter topics, and when Kafka said so.
func TestLagAndDeadLetters(t *testing.T) {
	t.Parallel()
	brokers := testenv.RealBrokers(t)
	topic := "admin-" + uuid.NewString()
	for _, name := range []string{topic, outbox.DeadLetterTopic(topic)} {
		testenv.CreateTopic(t, brokers, name, 1)
	}
	client, err := kgo.NewClient(testenv.KafkaOpts(brokers)...)
	require.NoError(t, err)
	defer client.Close()
	for _, name := range []string{topic, topic, topic, outbox.DeadLetterTopic(topic)} {
		require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: name, Value: []byte("{}")}).FirstErr())
	}
	h := newAdminFixture(t, func(c *Config) { c.Kafka = testenv.KafkaOpts(brokers) })
	_, err = h.db.Exec(t.Context(), strings.ReplaceAll(`INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset)
		VALUES ('stats', $1, '00000000-0000-0000-0000-000000000001', 0, 0)`, "{s}", `"`+h.schema+`"`), topic)
	require.NoError(t, err)
	var list apiGroupList
	require.Eventually(t, func() bool {
		list = apiGroupList{}
		require.NoError(t, json.Unmarshal([]byte(h.get("/api/consumers")), &list))
		return list.LagAt != nil
	}, testenv.Patience, 10*time.Millisecond)
	require.EqualValues(t, 3, *list.Groups[0].Topics[0].Lag)
	require.Equal(t, []apiDeadLetters{{outbox.DeadLetterTopic(topic), topic, 1}}, list.DeadLetters)
	page := h.get("/consumers")
	require.Contains(t, page, "Lag as Kafka said <time")
	require.Contains(t, page, `data-label="Lag" class="num">3<`)
	require.Contains(t, page, outbox.DeadLetterTopic(topic))
	require.Contains(t, h.get("/"), `data-label="Lag" class="num">3<`)
}

// Only one view at a time asks Kafka, and not again at once. A missing answer does not replace an older
// answer.
func TestKafkaIsAskedSeldom(t *testing.T) {
	t.Parallel()
	groups := []outboxops.ConsumerGroup{{Group: "stats"}}
	asked, answers := 0, errors.New("no broker answers")
	k := &kafkaReader{known: kafkaView{Asked: true}}
	k.ask = func(context.Context, []outboxops.ConsumerGroup) (kafkaFacts, error) {
		if asked++; answers != nil {
			return kafkaFacts{}, answers
		}
		return kafkaFacts{Lag: map[string]map[string]int64{"stats": {"orders": 7}, "bills": {"orders": 8}}}, nil
	}
	require.Equal(t, "no broker answers", k.look(t.Context(), groups).Err)
	require.Nil(t, k.last().of("stats", "orders"))
	k.look(t.Context(), groups)
	require.Equal(t, 1, asked)
	k.tried, answers = time.Now().Add(-kafkaFresh-time.Second), nil
	v := k.look(t.Context(), groups)
	require.Equal(t, 2, asked)
	require.EqualValues(t, 7, *v.of("stats", "orders"))
	require.Empty(t, v.Err)
	k.tried, answers = time.Now().Add(-kafkaFresh-time.Second), errors.New("gone")
	again := k.look(t.Context(), groups)
	require.Equal(t, "gone", again.Err)
	require.EqualValues(t, 7, *again.of("stats", "orders"), "what was known is shown, with its time")
	require.Equal(t, v.At, again.At)
	require.Nil(t, (&kafkaReader{}).look(t.Context(), groups).of("stats", "orders"))
}

// An answer about some groups replaces all older ones, so that its time holds for each value: a group that has failed
// is not known, and neither is one that is gone. Only if Kafka has answered nothing, older answers stay.
func TestKafkaAnswersInPart(t *testing.T) {
	t.Parallel()
	old := time.Now().Add(-time.Hour)
	before := kafkaView{At: old, Asked: true, kafkaFacts: kafkaFacts{
		Lag:         map[string]map[string]int64{"stats": {"orders": 7}, "bills": {"orders": 8}, "gone": {"orders": 9}},
		DeadLetters: []outboxops.DeadLetterTopic{{Topic: "orders.dlq", Of: "orders", Records: 1}},
	}}
	denied, silent := fmt.Errorf("bills: %w", kerr.GroupAuthorizationFailed), errors.New("no broker answers")
	for name, tt := range map[string]struct {
		facts kafkaFacts
		err   error
		stays bool
		stats *int64
	}{
		"one group failed":                 {kafkaFacts{Lag: map[string]map[string]int64{"stats": {"orders": 1}, "bills": nil}}, denied, false, new(int64(1))},
		"silent after the first group":     {kafkaFacts{Lag: map[string]map[string]int64{"stats": {"orders": 1}, "bills": nil}}, silent, false, new(int64(1))},
		"each group failed":                {kafkaFacts{Lag: map[string]map[string]int64{"stats": nil, "bills": nil}}, denied, true, new(int64(7))},
		"dead letters only":                {kafkaFacts{DeadLetters: before.DeadLetters}, silent, false, nil},
		"silent":                           {kafkaFacts{Lag: map[string]map[string]int64{"stats": nil}}, silent, true, new(int64(7))},
		"silent after committed positions": {kafkaFacts{Lag: map[string]map[string]int64{"stats": {}}}, silent, true, new(int64(7))},
	} {
		t.Run(name, func(t *testing.T) {
			k := &kafkaReader{known: before, ask: func(context.Context, []outboxops.ConsumerGroup) (kafkaFacts, error) { return tt.facts, tt.err }}
			v := k.look(t.Context(), []outboxops.ConsumerGroup{{Group: "stats"}, {Group: "bills"}})
			require.Equal(t, tt.err.Error(), v.Err)
			require.True(t, v.Asked)
			require.Equal(t, !tt.stays, v.InPart)
			require.Equal(t, tt.stats, v.of("stats", "orders"))
			if tt.stays {
				require.Equal(t, before.kafkaFacts, v.kafkaFacts)
				require.Equal(t, old, v.At)
				return
			}
			require.Nil(t, v.of("bills", "orders"), "a failed group is not known")
			require.Nil(t, v.of("gone", "orders"), "nobody asked about it")
			require.Equal(t, tt.facts.DeadLetters, v.DeadLetters)
			require.WithinDuration(t, time.Now(), v.At, time.Minute)
		})
	}
}

// The page and the API say that an answer is not about all topics, and why.
func TestPageOnAnswerInPart(t *testing.T) {
	t.Parallel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Metadata}, Topic: "secrets", Err: kerr.TopicAuthorizationFailed, Count: -1})
	h := newAdminFixture(t, func(c *Config) { c.Kafka = testenv.KafkaOpts(cluster.ListenAddrs()) })
	for _, topic := range []string{"orders", "secrets"} {
		_, err = h.db.Exec(t.Context(), strings.ReplaceAll(`INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset)
			VALUES ('stats', $1, gen_random_uuid(), 0, 0)`, "{s}", `"`+h.schema+`"`), topic)
		require.NoError(t, err)
	}
	var list apiGroupList
	require.Eventually(t, func() bool {
		list = apiGroupList{}
		require.NoError(t, json.Unmarshal([]byte(h.get("/api/consumers")), &list))
		return list.LagError != ""
	}, testenv.Patience, 10*time.Millisecond)
	require.NotNil(t, list.LagAt)
	require.Contains(t, list.LagError, "topic secrets: TOPIC_AUTHORIZATION_FAILED")
	page := h.get("/consumers")
	require.Contains(t, page, "Lag as Kafka said <time")
	require.Contains(t, page, "Unknown for some groups: outbox: lag of consumer group stats")
}
