package itest

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// returnedSale is the event of a second topic.
type returnedSale struct{ sale }

const returnedType = "test.sale.returned.v1"

// twoTopics is a fixture with another topic, of refunds.
type twoTopics struct {
	*startFixture
	other    string
	handling chan struct{} // each refund that is handled sends to it, unless it is nil,
	goOn     chan struct{} // and then waits until this is closed
}

func newTwoTopics(t testing.TB) *twoTopics {
	t.Helper()
	s := &twoTopics{startFixture: newStartFixture(t, 1)}
	s.other = s.topic + ".refunds"
	testenv.CreateTopic(t, s.brokers, s.other, 1)
	testenv.CreateTopic(t, s.brokers, s.other+".dlq", 1)
	return s
}

// run runs a member that reads both topics.
func (s *twoTopics) run(t testing.TB, opts ...kgo.Opt) *outbox.Consumer {
	t.Helper()
	events, err := outbox.NewRegistry("shop", outbox.Event(saleType, "Product", sale.productID).Topic(s.topic),
		outbox.Event(returnedType, "Product", func(r returnedSale) string { return r.Product }).Topic(s.other))
	require.NoError(t, err)
	see := func(id string) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.seen[id]++
	}
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: slog.New(slog.NewTextHandler(s.log, nil)), From: outbox.FromStart}}
	c, err := outbox.NewConsumer(s.db, append([]kgo.Opt{kgo.SeedBrokers(s.brokers...)}, opts...), events, s.group, cfg,
		outbox.HandleNoTx("SEEN", func(_ context.Context, _ sale, m outbox.Metadata) error { see(m.ID); return nil }),
		outbox.HandleNoTx("SEEN", func(_ context.Context, _ returnedSale, m outbox.Metadata) error {
			if s.handling != nil {
				s.handling <- struct{}{}
				<-s.goOn
			}
			see(m.ID)
			return nil
		}))
	require.NoError(t, err)
	testenv.Run(t, c.Run)
	return c
}

// refunds sends n refunds and returns their ids.
func (s *twoTopics) refunds(t testing.TB, n int) (ids []string) {
	t.Helper()
	for range n {
		id := uuid.NewString()
		r := s.saleRecord(id, oneSale)
		r.Topic = s.other
		for i := range r.Headers {
			if r.Headers[i].Key == "ce_type" {
				r.Headers[i].Value = []byte(returnedType)
			}
		}
		s.send(t, r)
		ids = append(ids, id)
	}
	return ids
}

// A topic that is deleted keeps no other topic from being committed: the log names it once,
// and so does Health.
func TestCommitsBesideDeletedTopic(t *testing.T) {
	t.Parallel()
	for name, opts := range groupProtocols {
		t.Run(name, func(t *testing.T) { t.Parallel(); testCommitsBesideDeletedTopic(t, opts) })
	}
}

func testCommitsBesideDeletedTopic(t *testing.T, opts []kgo.Opt) {
	s := newTwoTopics(t)
	s.handling, s.goOn = make(chan struct{}, 10), make(chan struct{})
	c := s.run(t, opts...)
	s.requireSeen(t, s.put(t, 0, 3)...)
	refunds := s.refunds(t, 3)
	<-s.handling
	s.delete(t, s.other)
	close(s.goOn) // and their offsets cannot be committed any more
	s.requireSeen(t, append(refunds, s.put(t, 0, 3)...)...)
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 6 }, testenv.Patience, 10*time.Millisecond)
	s.requireLogged(t, "outbox: topic "+s.other+" fails, trying until it works")
	requireNoWork(t, c, "topic "+s.other+" has been failing")
	require.NotContains(t, strings.Join(c.Health().Reasons, ";"), "committing offsets")

	for range 2 { // a rebalance does not wait for the topic either
		s.run(t, opts...)
		s.requireSeen(t, s.put(t, 0, 3)...)
	}
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 12 }, testenv.Patience, 10*time.Millisecond)
	for _, line := range []string{"committing offsets fails", "finding where reading begins fails"} {
		require.NotContains(t, s.log.String(), line)
	}

	testenv.CreateTopic(t, s.brokers, s.other, 1)
	s.requireSeen(t, append(s.refunds(t, 3), s.put(t, 0, 1)...)...)
}

// PostgreSQL that does not answer says nothing, so the tries to begin with partitions are
// bounded: the log says that they fail, and reading begins once it answers.
func TestStartWithDeadPostgres(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := newStartFixture(t, 1)
	s.run(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}})
	s.requireSeen(t, s.put(t, 0, 3)...)
	lock, err := s.db.Begin(background)
	require.NoError(t, err)
	defer func() { _ = lock.Rollback(background) }()
	_, err = lock.Exec(background, s.sql(`LOCK TABLE {s}.consumer_start`))
	require.NoError(t, err)
	s.addPartitions(t, 2)
	late := s.put(t, 1, 3)
	s.run(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}})
	s.requireLogged(t, "outbox: PostgreSQL fails, trying until it works")
	s.requireLogged(t, "outbox: finding where reading begins fails, trying until it works")
	s.requireSeen(t, s.put(t, 0, 3)...)
	require.NoError(t, lock.Rollback(background))
	s.requireSeen(t, late...)
}

// A hook that does not return holds up neither the start of a partition nor what fetches for
// all of them.
func TestLostHookHangs(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := newStartFixture(t, 2)
	stop := s.run(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}})
	s.requireSeen(t, append(s.put(t, 0, 3), s.put(t, 1, 3)...)...)
	stop()
	s.put(t, 0, 10)
	s.deleteRecords(t, 13)
	hang := make(chan struct{})
	defer close(hang)
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}
	cfg.Hooks.Lost = func(string, int32, int64) { <-hang }
	s.run(t, cfg)
	s.requireSeen(t, append(s.put(t, 0, 3), s.put(t, 1, 3)...)...)
	s.requireLogged(t, "Hooks.Lost does not return")
	s.requireLogged(t, "Kafka has removed records that this group has not committed")
}
