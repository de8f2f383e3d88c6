package itest

import (
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// questionCount counts the requests that a client sends to look for a dead letter.
type questionCount struct{ offsets atomic.Int64 }

func (c *questionCount) OnBrokerE2E(_ kgo.BrokerMetadata, key int16, _ kgo.BrokerE2E) {
	if key == kmsg.ListOffsets.Int16() {
		c.offsets.Add(1)
	}
}

// Who may write to a topic may send records that say they were replayed. Each of them was a few questions to Kafka, of
// which one waited behind the client's own fetch: 1,000 of them took minutes, and the partition with them.
func TestForgedReplayHeadersCostLittle(t *testing.T) {
	t.Parallel()
	const records, deadLetters = 1_000, 300
	for name, from := range map[string]func(dlq string, n int) string{
		"letters that are there":  func(dlq string, n int) string { return fmt.Sprint(dlq, "-0-", n*7919%deadLetters) },
		"letters behind the end":  func(dlq string, n int) string { return fmt.Sprint(dlq, "-0-", deadLetters+n) },
		"partitions by the dozen": func(dlq string, n int) string { return fmt.Sprint(dlq, "-", n, "-0") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newConsumerFixture(t, 1)
			for n := range deadLetters { // 60 kB each, each a batch: none is near enough to be read with another one
				s.send(t, &kgo.Record{Topic: s.topic + ".dlq", Value: []byte(random(60_000)), Headers: []kgo.RecordHeader{{Key: outbox.DeadLetterAction, Value: fmt.Append(nil, n)}}})
			}
			forged := make([]*kgo.Record, records)
			for n := range forged {
				forged[n] = s.saleRecord(uuid.NewString(), []byte(`{"product":"p","amount":1}`))
				forged[n].Headers = append(forged[n].Headers, kgo.RecordHeader{Key: outbox.ReplayGroup, Value: []byte("elsewhere")},
					kgo.RecordHeader{Key: outbox.ReplayFrom, Value: []byte(from(s.topic+".dlq", n))})
			}
			s.send(t, forged...)
			var asked questionCount
			cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, From: outbox.FromStart, Logger: logTo(t, slog.LevelWarn)}}
			c, err := outbox.NewConsumer(s.db, append(testenv.KafkaOpts(s.brokers), kgo.WithHooks(&asked)), s.events, "forged-"+uuid.NewString(), cfg, outbox.Handle("COUNTED", s.count))
			require.NoError(t, err)
			began := time.Now()
			testenv.Run(t, c.Run)
			count := 0
			for count < records && time.Since(began) < 30*time.Second {
				time.Sleep(50 * time.Millisecond)
				count = s.counts(t)["p"]
			}
			t.Logf("%d of %d handled after %v, %d questions for offsets", count, records, time.Since(began).Round(time.Millisecond), asked.offsets.Load())
			require.Equal(t, records, count, "handled like any other")
			require.Less(t, asked.offsets.Load(), int64(records/10))
		})
	}
}
