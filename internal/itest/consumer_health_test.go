package itest

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// requireReady waits until a consumer is ready and works, and holds its partitions.
func requireReady(t testing.TB, c *outbox.Consumer, partitions int) {
	t.Helper()
	require.Eventually(t, func() bool {
		h := c.Health()
		return h.Live && h.Ready && h.Works && h.Partitions == partitions && len(h.Reasons) == 0
	}, testenv.Patience, 5*time.Millisecond, "ready")
}

// requireNoWork waits until a consumer does not work for a reason, but is live.
func requireNoWork(t testing.TB, c *outbox.Consumer, reason string) {
	t.Helper()
	require.Eventually(t, func() bool {
		h := c.Health()
		return !h.Works && strings.Contains(strings.Join(h.Reasons, "; "), reason)
	}, testenv.Patience, time.Millisecond, reason)
	assert.True(t, c.Health().Live, "a restart does not help")
}

// A consumer says what keeps it from handling events, and whether a restart helps.
func TestConsumerHealth(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 2)
	cable := &brokenDialer{}
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.DialFunc = cable.dial })
	dlq := "later-" + uuid.NewString()
	opts := []kgo.Opt{kgo.SeedBrokers(s.brokers...), kgo.MetadataMinAge(50 * time.Millisecond), kgo.UnknownTopicRetries(1)}
	c, err := outbox.NewConsumer(db, opts, s.events, "health-"+s.topic, outbox.ConsumerConfig{
		HandlerConfig:   outbox.HandlerConfig{Schema: s.schema, Retry: outbox.RetryPolicy{RetryWait: time.Millisecond}, Logger: slog.New(slog.DiscardHandler), From: outbox.FromStart},
		DeadLetterTopic: func(string) string { return dlq },
	}, outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	require.Equal(t, outbox.ConsumerHealth{Group: "health-" + s.topic, Live: true, Reasons: []string{"it does not run"}}, c.Health())

	stop := testenv.Run(t, c.Run)
	requireReady(t, c, 2)
	cable.breakAll()
	s.sendTo(t, 2, 1)
	requireNoWork(t, c, "PostgreSQL has been failing")
	cable.broken.Store(false)
	requireReady(t, c, 2)
	s.send(t, s.saleRecord(uuid.NewString(), []byte(`{"poison":"permanent"}`)))
	requireNoWork(t, c, "dead-letter topic "+dlq+" has been failing")
	testenv.CreateTopic(t, s.brokers, dlq, 1)
	require.Eventually(t, func() bool { // what is dead keeps it from nothing
		h := c.Health()
		return h.Works && len(h.Reasons) == 1 && strings.Contains(h.Reasons[0], "dead")
	}, testenv.Patience, 5*time.Millisecond)
	stop()
	require.Equal(t, outbox.ConsumerHealth{Group: "health-" + s.topic, Live: true, Reasons: []string{"it does not run"}}, c.Health())

	_, err = s.db.Exec(background, s.sql(`DROP TABLE {s}.event_handled`))
	require.NoError(t, err)
	require.ErrorIs(t, c.Run(background), outbox.ErrNotMigrated)
	h := c.Health()
	require.Equal(t, []bool{false, false}, []bool{h.Live, h.Ready})
	require.Contains(t, h.Reasons[0], "Run has ended: the tables are missing or of an earlier release")
}

// While Kafka does not take offsets, the consumer does not work.
func TestConsumerHealthWithoutKafka(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	cable := &brokenDialer{}
	opts := append(testenv.KafkaOpts(s.brokers), kgo.Dialer(cable.dial))
	c, err := outbox.NewConsumer(s.db, opts, s.events, "cut-off-"+s.topic, outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: slog.New(slog.DiscardHandler), From: outbox.FromStart},
	}, outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	testenv.Run(t, c.Run)
	requireReady(t, c, 1)
	s.sendTo(t, 1, 1)
	require.Eventually(t, func() bool { return s.counts(t)["p-0"] == 1 }, testenv.Patience, time.Millisecond)
	cable.breakAll()
	requireNoWork(t, c, "has been failing for")
	cable.broken.Store(false)
	s.sendTo(t, 1, 1)
	requireReady(t, c, 1)
}

// While a consumer stops, it says that, and not that it has no partitions.
func TestHealthWhileStopping(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	began, finish := make(chan struct{}), make(chan struct{})
	group := "stops-" + s.topic
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{StopTimeout: time.Minute}}
	c := s.plainConsumer(t, new(testenv.Buffer), group, cfg, outbox.HandleNoTx("WAITS", func(context.Context, sale, outbox.Metadata) error {
		close(began)
		<-finish
		return nil
	}))
	ctx, cancel := context.WithCancel(background)
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	requireReady(t, c, 1)
	s.sendTo(t, 1, 1)
	<-began
	cancel()
	requireNoWork(t, c, "it stops")
	require.Equal(t, []string{"it stops"}, c.Health().Reasons)
	close(finish)
	require.NoError(t, <-done)
	require.Equal(t, []string{"it does not run"}, c.Health().Reasons)
}
