package itest

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// stopTimeout is the default of StopTimeout, with a little for a busy machine.
const stopTimeout = 5*time.Second + 500*time.Millisecond

// plainConsumer returns a consumer with franz-go's default options and the default times.
func (s *consumerFixture) plainConsumer(t testing.TB, log *testenv.Buffer, group string, cfg outbox.ConsumerConfig, handler outbox.Handler, opts ...kgo.Opt) *outbox.Consumer {
	t.Helper()
	cfg.Schema, cfg.From = s.schema, outbox.FromStart
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	c, err := outbox.NewConsumer(s.db, append([]kgo.Opt{kgo.SeedBrokers(s.brokers...)}, opts...), s.events, group, cfg, handler)
	require.NoError(t, err)
	return c
}

// stopsWithin stops a consumer and fails the test if it takes longer than StopTimeout.
func stopsWithin(t testing.TB, stop func()) {
	t.Helper()
	began := time.Now()
	stop()
	require.Less(t, time.Since(began), stopTimeout)
}

// member is another member of a group, of which a test says when it takes part in its
// rebalances: once it has polled it does not join again until it is closed.
func (s *consumerFixture) member(t testing.TB, group string, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	client, err := kgo.NewClient(append([]kgo.Opt{
		kgo.SeedBrokers(s.brokers...), kgo.ConsumerGroup(group), kgo.ConsumeTopics(s.topic), kgo.BlockRebalanceOnPoll(),
		kgo.ConsumeStartOffset(kgo.NewOffset().AtStart()), kgo.HeartbeatInterval(500 * time.Millisecond), kgo.RebalanceTimeout(2 * time.Minute),
	}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(client.CloseAllowingRebalance)
	return client
}

// members returns how many members a group has.
func (s *consumerFixture) members(t testing.TB, group string) int {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...))
	require.NoError(t, err)
	defer client.Close()
	describe := kmsg.NewPtrDescribeGroupsRequest()
	describe.Groups = []string{group}
	described, err := describe.RequestWith(background, client)
	require.NoError(t, err)
	return len(described.Groups[0].Members)
}

// A group rebalances while a member does not join again. Until Kafka expels that member, the others
// wait in their joins, and their clients wait for the joins before they leave the group. A stop
// takes no longer for it. No member waits for the session timeout of the member that has stopped,
// unless that is a static member.
func TestStopInFirstJoin(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		both   []kgo.Opt
		own    []kgo.Opt
		remain int
	}{
		{"cooperative", nil, nil, 1},
		{"eager", []kgo.Opt{kgo.Balancers(kgo.RangeBalancer())}, nil, 1},
		{"static", nil, []kgo.Opt{kgo.InstanceID("one")}, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := newConsumerFixture(t, 2)
			group := "first-join-" + s.topic
			s.sendTo(t, 2, 1)
			require.NotEmpty(t, s.member(t, group, tt.both...).PollFetches(background).Records())
			c := s.plainConsumer(t, new(testenv.Buffer), group, outbox.ConsumerConfig{},
				outbox.Handle("COUNTED", s.count), append(tt.both, tt.own...)...)
			stop := testenv.Run(t, c.Run)
			require.Eventually(t, func() bool { return s.members(t, group) == 2 }, testenv.Patience, 100*time.Millisecond)
			stopsWithin(t, stop)
			require.Eventually(t, func() bool { return s.members(t, group) == tt.remain }, time.Second, 10*time.Millisecond)
		})
	}
}

// A stop commits what is finished, although the client holds commits back while the group
// is in motion.
func TestStopInRebalance(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := newConsumerFixture(t, 2)
	group := "in-rebalance-" + s.topic
	var handled atomic.Pointer[outbox.Metadata]
	began, finish := make(chan struct{}), make(chan struct{})
	h := outbox.HandleNoTx("SEEN", func(_ context.Context, _ sale, m outbox.Metadata) error {
		close(began)
		<-finish
		handled.Store(&m)
		return nil
	})
	log := new(testenv.Buffer)
	c := s.plainConsumer(t, log, group, outbox.ConsumerConfig{}, h, kgo.HeartbeatInterval(500*time.Millisecond))
	stop := testenv.Run(t, c.Run)
	holds := func(n int) {
		t.Helper()
		require.Eventually(t, func() bool { return c.Health().Partitions == n }, testenv.Patience, 10*time.Millisecond)
	}
	holds(2)
	second := s.member(t, group)
	holds(1)
	s.sendTo(t, 2, 1)
	<-began
	require.NotEmpty(t, second.PollFetches(background).Records())
	third := s.member(t, group)
	time.Sleep(3 * time.Second) // several heartbeats, so the consumer waits in its join by now
	close(finish)
	require.Eventually(t, func() bool { return handled.Load() != nil }, testenv.Patience, time.Millisecond)
	at := handled.Load().Kafka.Partition
	require.EqualValues(t, 0, s.committed(t, group, at), "the client holds the commit back")
	stopsWithin(t, stop)
	require.EqualValues(t, 1, s.committed(t, group, at), "%s", log)
	require.Equal(t, 2, s.members(t, group), "second and third")
	second.CloseAllowingRebalance()
	third.CloseAllowingRebalance()
}

// A handler that ignores its context cannot be ended. Run returns nevertheless, says which
// handler it was and at what, gives back its connection, and what the handler does
// afterwards has no effect.
func TestStopWithStuckHandler(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	log := new(testenv.Buffer)
	began, finish, after := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	h := outbox.Handle("COUNTED", func(_ context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		if err := s.count(background, tx, e, m); err != nil {
			return err
		}
		close(began)
		<-finish
		err := s.count(background, tx, e, m)
		after <- err
		return nil
	})
	id := uuid.NewString()
	db := testenv.Pool(t, nil)
	own := *s
	relay := *s.relayFixture
	relay.db, own.relayFixture = db, &relay
	stop := testenv.Run(t, own.plainConsumer(t, log, "stuck-"+s.topic, outbox.ConsumerConfig{}, h).Run)
	s.send(t, s.saleRecord(id, []byte(`{"product":"p","amount":1}`)))
	<-began
	stopsWithin(t, stop)
	closed := make(chan struct{})
	go func() { db.Close(); close(closed) }()
	select {
	case <-closed:
	case <-time.After(time.Second):
		require.Fail(t, "the pool waits for the connection of the handler")
	}
	require.Contains(t, log.String(), "level=ERROR")
	for _, part := range []string{"action=COUNTED", "event_id=" + id, "type=" + saleType, "offset=0"} {
		require.Contains(t, log.String(), part)
	}
	close(finish)
	require.Error(t, <-after)
	require.Empty(t, s.counts(t))
	require.EqualValues(t, 0, s.committed(t, "stuck-"+s.topic, 0))
}

// A handler that ignores its context does not keep its partition from the member that it
// is assigned to next, nor the group from its rebalance.
func TestRevokedWithStuckHandler(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := newConsumerFixture(t, 2)
	log := new(testenv.Buffer)
	began, finish := make(chan struct{}, 10), make(chan struct{})
	group := "revoked-" + s.topic
	stuck := func(outbox.Metadata) bool { return true }
	start := func(stuck func(outbox.Metadata) bool) func() {
		return testenv.Run(t, s.plainConsumer(t, log, group, outbox.ConsumerConfig{}, outbox.Handle("COUNTED", func(_ context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
			if stuck(m) {
				began <- struct{}{}
				<-finish
			}
			return s.count(background, tx, e, m)
		}), kgo.SessionTimeout(6*time.Second)).Run)
	}
	s.sendTo(t, 2, 1)
	start(stuck)
	<-began
	<-began
	start(func(outbox.Metadata) bool { return false })
	require.Eventually(t, func() bool { return len(s.counts(t)) == 1 }, testenv.Patience, 50*time.Millisecond, "%s", log)
	close(finish)
}

// Under load, with handlers that take a second, a stop keeps what is finished: nothing of
// it is done again.
func TestStopUnderLoad(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	const partitions, each = 3, 8
	s := newConsumerFixture(t, partitions)
	var calls atomic.Int64
	h := outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		calls.Add(1)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return ctx.Err()
		}
		return s.count(ctx, tx, e, m)
	})
	group := "load-" + s.topic
	cfg := outbox.ConsumerConfig{}
	s.sendTo(t, partitions, each)
	log := new(testenv.Buffer)
	for range 2 { // stops within the batches
		stop := testenv.Run(t, s.plainConsumer(t, log, group, cfg, h).Run)
		before := calls.Load()
		require.Eventually(t, func() bool { return calls.Load() >= before+partitions }, testenv.Patience, time.Millisecond)
		stopsWithin(t, stop)
	}
	done := 0
	for _, n := range s.counts(t) {
		done += n
	}
	require.EqualValues(t, calls.Load(), done, "each call has its effect: %s", log)
	testenv.Run(t, s.plainConsumer(t, log, group, cfg, h).Run)
	require.Eventually(t, func() bool {
		return fmt.Sprint(s.counts(t)) == fmt.Sprint(map[string]int{"p-0": each, "p-1": each, "p-2": each})
	}, testenv.Patience, 20*time.Millisecond)
	require.EqualValues(t, partitions*each, calls.Load())
	require.False(t, strings.Contains(log.String(), "level=ERROR"), "%s", log)
}

// A handler that has not ended when its time is up at a stop is abandoned. Events of its batch that
// were finished before stay finished.
func TestStopRepeatsNothing(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	const finished = 3
	s := newConsumerFixture(t, 1)
	var calls atomic.Int64
	h := outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		takes := 1050 * time.Millisecond
		if calls.Add(1) == finished+1 {
			takes = time.Minute
		}
		select {
		case <-time.After(takes):
		case <-ctx.Done():
			return ctx.Err()
		}
		return s.count(ctx, tx, e, m)
	})
	group := "given-up-" + s.topic
	cfg := outbox.ConsumerConfig{}
	s.sendTo(t, 1, finished+1)
	log := new(testenv.Buffer)
	stop := testenv.Run(t, s.plainConsumer(t, log, group, cfg, h).Run)
	require.Eventually(t, func() bool { return calls.Load() == finished+1 }, testenv.Patience, time.Millisecond)
	stopsWithin(t, stop)
	require.Equal(t, map[string]int{"p-0": finished}, s.counts(t), "%s", log)
	require.EqualValues(t, finished, s.committed(t, group, 0))
	testenv.Run(t, s.plainConsumer(t, log, group, cfg, h).Run)
	require.Eventually(t, func() bool { return s.counts(t)["p-0"] == finished+1 }, testenv.Patience, 20*time.Millisecond)
	require.EqualValues(t, finished+2, calls.Load(), "only the handler that was given up runs again")
}
