package itest

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/absent"
	"github.com/outboxgo/outbox/internal/testenv"
)

// While a dead-letter topic takes nothing, the retries of other topics come on time: dead letters that wait hold no
// lanes. They are sent when the topic takes them. Each one used to hold a lane for ten seconds.
func TestDeadLetterTopicHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	testenv.RealBrokers(t)
	const dead, late = 60, 3 * time.Second
	other := "other-" + uuid.NewString()
	s := &parkingFixture{group: "dead-" + other}
	s.consumerFixture = newConsumerFixtureOn(t, func(h *relayFixture) {
		testenv.CreateTopic(t, h.brokers, h.topic, 1)
		testenv.CreateTopic(t, h.brokers, other, 1)
		require.NoError(t, absent.CreateTopic(background, h.brokers, h.topic+".dlq", 1, map[string]string{"min.insync.replicas": "2"}))
	}, outbox.Event(refundType, "Product", givenBack.productID).Topic(other))
	var retried testenv.Kept[time.Duration]
	var due atomic.Int64
	refunds := outbox.Handle("REFUNDED", func(_ context.Context, _ pgx.Tx, _ givenBack, m outbox.Metadata) error {
		if m.Attempt == 1 {
			due.Store(time.Now().Add(time.Second).UnixNano())
			return outbox.RetryAfter(errPlay, time.Second)
		}
		retried.Add(time.Since(time.Unix(0, due.Load())))
		return nil
	})
	c := s.groupConsumer(t, s.group, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Logger: slog.New(slog.DiscardHandler)}}, outbox.Handle("COUNTED", s.count), refunds)
	var sales []*kgo.Record
	for i := range dead {
		r := s.saleRecord(uuid.NewString(), []byte(`{"poison":"permanent"}`))
		r.Key = fmt.Append(nil, i)
		sales = append(sales, r)
	}
	s.send(t, sales...)
	testenv.Run(t, c.Run)
	require.Eventually(t, func() bool {
		return s.number(t, `SELECT count(*) FROM {s}.event_delivery WHERE action = 'COUNTED'`) == dead
	}, testenv.Patience, 10*time.Millisecond)
	for n := 1; n <= 3; n++ {
		r := s.saleRecord(uuid.NewString(), oneSale)
		r.Topic, r.Headers[3].Value = other, []byte(refundType)
		s.send(t, r)
		require.Eventually(t, func() bool { return len(retried.All()) == n }, 2*testenv.Patience, 10*time.Millisecond)
		t.Log("a retry came too late by", retried.All()[n-1])
	}
	for _, by := range retried.All() {
		require.Less(t, by, late)
	}
	dlq := *s.relayFixture
	dlq.topic += ".dlq"
	dlq.setTopic(t, "min.insync.replicas", "1")
	s.deadLetters(t, dead)
	require.Eventually(t, func() bool {
		return s.number(t, `SELECT count(*) FROM {s}.event_delivery WHERE status = 'DEAD'`) == dead
	}, testenv.Patience, 10*time.Millisecond)
	require.Eventually(t, func() bool { return c.Health().Works }, testenv.Patience, 10*time.Millisecond, "%v", c.Health().Reasons)
}
