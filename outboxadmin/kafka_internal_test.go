package outboxadmin

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
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
		asked++
		return kafkaFacts{Lag: map[string]map[string]int64{"stats": {"orders": 7}}}, answers
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
