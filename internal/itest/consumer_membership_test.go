package itest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// sendTo puts n sales into each partition.
func (s *consumerFixture) sendTo(t testing.TB, partitions, n int) {
	t.Helper()
	var records []*kgo.Record
	for i := range partitions * n {
		r := s.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"product":"p-%d","amount":1}`, i%partitions))
		r.Partition = int32(i % partitions)
		records = append(records, r)
	}
	s.send(t, records...)
}

// committed returns the group's offset of a partition, -1 for none. A broker that
// has just started may need a moment until it has a coordinator for the group.
func (s *consumerFixture) committed(t testing.TB, group string, number int32) int64 {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...))
	require.NoError(t, err)
	defer client.Close()
	request := kmsg.NewPtrOffsetFetchRequest()
	request.Group = group
	request.Topics = []kmsg.OffsetFetchRequestTopic{{Topic: s.topic, Partitions: []int32{number}}}
	one := kmsg.NewOffsetFetchRequestGroup()
	one.Group = group
	one.Topics = []kmsg.OffsetFetchRequestGroupTopic{{Topic: s.topic, Partitions: []int32{number}}}
	request.Groups = append(request.Groups, one)
	ctx, cancel := context.WithTimeout(background, testenv.Patience)
	defer cancel()
	for {
		response, err := request.RequestWith(ctx, client)
		var offset int64
		if err == nil {
			offset, err = fetchedOffset(response)
		}
		if errors.Is(err, kerr.GroupIDNotFound) {
			return -1
		}
		if !kerr.IsRetriable(err) {
			require.NoError(t, err)
			return offset
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// fetchedOffset returns the offset in a response for one partition.
func fetchedOffset(response *kmsg.OffsetFetchResponse) (int64, error) {
	if len(response.Groups) == 0 { // of a broker that does not know groups of requests
		if err := kerr.ErrorForCode(response.ErrorCode); err != nil {
			return 0, err
		}
		p := response.Topics[0].Partitions[0]
		return p.Offset, kerr.ErrorForCode(p.ErrorCode)
	}
	group := response.Groups[0]
	if err := kerr.ErrorForCode(group.ErrorCode); err != nil {
		return 0, err
	}
	p := group.Topics[0].Partitions[0]
	return p.Offset, kerr.ErrorForCode(p.ErrorCode)
}

// watch is a handler without a transaction that notes, for each partition, which
// member works on it, and fails the test if two do, or if one goes backwards.
type watch struct {
	mu   sync.Mutex
	busy map[int32]string
	last map[string]int64 // by member and partition
	seen atomic.Int64
}

func (w *watch) handler(t testing.TB, member string) outbox.Handler {
	return outbox.HandleNoTx("WATCHED", func(_ context.Context, _ sale, m outbox.Metadata) error {
		w.mu.Lock()
		assert.Empty(t, w.busy[m.Kafka.Partition], "partition %d is with %s too", m.Kafka.Partition, member)
		w.busy[m.Kafka.Partition] = member
		at := fmt.Sprint(member, m.Kafka.Partition)
		assert.Greater(t, m.Kafka.Offset, w.last[at]-1, "order")
		w.last[at] = m.Kafka.Offset
		w.mu.Unlock()
		time.Sleep(time.Duration(rand.N(200)) * time.Microsecond)
		w.seen.Add(1)
		w.mu.Lock()
		delete(w.busy, m.Kafka.Partition)
		w.mu.Unlock()
		return nil
	})
}

// One partition has much to do and the others nothing. Each time that it is paused
// and resumed, it would wait for as long as a broker may keep the fetch for the
// others: at the client's default of 5 s that made more than a minute of this.
func TestBusyPartitionBesideIdleOnes(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it handles many events within a minute.
	const n = 100_000
	s := newConsumerFixture(t, 3)
	records := make([]*kgo.Record, n)
	for i := range records {
		records[i] = s.saleRecord(uuid.NewString(), []byte(`{"product":"p","amount":1}`))
		records[i].Partition = 1
	}
	for some := range slices.Chunk(records, 5000) {
		s.send(t, some...)
	}
	var handled atomic.Int64
	group := "busy-" + s.topic
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: logTo(t, slog.LevelWarn), From: outbox.FromStart}}
	c, err := outbox.NewConsumer(s.db, testenv.KafkaOpts(s.brokers), s.events, group, cfg,
		outbox.HandleBatch("COUNTED", func(_ context.Context, _ pgx.Tx, sales []outbox.Received[sale]) error {
			handled.Add(int64(len(sales)))
			return nil
		}))
	require.NoError(t, err)
	testenv.Run(t, c.Run)
	require.Eventually(t, func() bool { return handled.Load() == n }, testenv.Patience, 10*time.Millisecond)
}

// Members come and go while events flow: no partition is with two of them at once,
// each sees its records in order, and every sale is counted once.
func TestRebalance(t *testing.T) {
	t.Parallel()
	for _, balancer := range []kgo.GroupBalancer{kgo.CooperativeStickyBalancer(), kgo.RangeBalancer()} {
		t.Run(balancer.ProtocolName(), func(t *testing.T) {
			const partitions, rounds, each = 6, 8, 200
			s := newConsumerFixture(t, partitions)
			w := &watch{busy: map[int32]string{}, last: map[string]int64{}}
			group := "rebalance-" + s.topic
			cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: logTo(t, slog.LevelWarn), From: outbox.FromStart}}
			start := func(member string) func() {
				c, err := outbox.NewConsumer(s.db, append(testenv.KafkaOpts(s.brokers), kgo.Balancers(balancer), kgo.SessionTimeout(6*time.Second), kgo.HeartbeatInterval(200*time.Millisecond)), s.events, group, cfg,
					outbox.Handle("COUNTED", s.count), w.handler(t, member))
				require.NoError(t, err)
				return testenv.Run(t, c.Run)
			}
			members := []func(){start("first")}
			for i := range rounds {
				s.sendTo(t, partitions, each)
				before := w.seen.Load()
				members = append(members, start(fmt.Sprint("member ", i)))
				require.Eventually(t, func() bool { return w.seen.Load() > before }, testenv.Patience, time.Millisecond)
				if len(members) > 2 {
					n := rand.IntN(len(members))
					members[n]()
					members = append(members[:n], members[n+1:]...)
				}
			}
			want := map[string]int{}
			for i := range partitions {
				want["p-"+strconv.Itoa(i)] = rounds * each
			}
			require.Eventually(t, func() bool { return assert.ObjectsAreEqual(want, s.counts(t)) }, testenv.Patience, 20*time.Millisecond)
			require.Eventually(t, func() bool { return w.seen.Load() >= partitions*rounds*each }, testenv.Patience, time.Millisecond)
			for _, stop := range members {
				stop()
			}
			for i := range int32(partitions) {
				require.EqualValues(t, rounds*each, s.committed(t, group, i))
			}
			require.EqualValues(t, partitions*rounds*each, w.seen.Load(), "clean stops repeat nothing")
		})
	}
}

// A new group skips what was there before. Its place is committed before the first
// record, so that one which dies at once leaves it behind.
func TestNewGroup(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	s.sendTo(t, 1, 7)
	group := "new-" + s.topic
	cfg := outbox.ConsumerConfig{}
	require.EqualValues(t, -1, s.committed(t, group, 0))
	stop := testenv.Run(t, s.groupConsumer(t, group, cfg, outbox.Handle("COUNTED", s.count)).Run)
	require.Eventually(t, func() bool { return s.committed(t, group, 0) == 7 }, testenv.Patience, 10*time.Millisecond)
	stop()
	s.sendTo(t, 1, 5) // while the group has no member
	testenv.Run(t, s.groupConsumer(t, group, cfg, outbox.Handle("COUNTED", s.count)).Run)
	require.Eventually(t, func() bool { return s.counts(t)["p-0"] == 5 }, testenv.Patience, 10*time.Millisecond)
	group, cfg.From = "all-"+s.topic, outbox.FromStart
	testenv.Run(t, s.groupConsumer(t, group, cfg, outbox.Handle("COUNTED", s.count)).Run)
	require.Eventually(t, func() bool { return s.counts(t)["p-0"] == 5+12 }, testenv.Patience, 10*time.Millisecond)
}

// While the dead-letter topic accepts nothing, an event without an attempt left waits with the
// later events of its key, and everything else goes on. Nothing is lost, and the log says so once.
// The event is DEAD when its dead letter is sent.
func TestDeadLetterTopicMissing(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 2)
	log := new(testenv.Buffer)
	dlq := "later-" + uuid.NewString()
	group := "dlq-" + s.topic
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Retry: outbox.RetryPolicy{RetryWait: time.Millisecond}, Logger: slog.New(slog.NewTextHandler(log, nil)), From: outbox.FromStart},
		DeadLetterTopic: func(string) string { return dlq }}
	c, err := outbox.NewConsumer(s.db, []kgo.Opt{kgo.SeedBrokers(s.brokers...), kgo.MetadataMinAge(50 * time.Millisecond), kgo.UnknownTopicRetries(1)}, s.events, group, cfg, outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	bad, behind := s.saleRecord(uuid.NewString(), []byte(`{"poison":"permanent"}`)), s.saleRecord(uuid.NewString(), []byte(`{"product":"behind","amount":1}`))
	bad.Key, behind.Key = []byte("bad"), []byte("bad")
	s.send(t, bad, behind)
	s.sendTo(t, 2, 10)
	testenv.Run(t, c.Run)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "dead-letter topic "+dlq+" fails") }, testenv.Patience, 10*time.Millisecond)
	require.False(t, c.Health().Works)
	s.sendTo(t, 2, 10)
	for _, product := range []string{"p-0", "p-1"} {
		require.Eventually(t, func() bool { return s.counts(t)[product] == 20 }, testenv.Patience, 10*time.Millisecond)
	}
	require.Eventually(t, func() bool { return s.committed(t, group, 0) == 22 }, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, "COUNTED PENDING 1 permanent; COUNTED PARKED 0", s.parked(t))
	testenv.CreateTopic(t, s.brokers, dlq, 1)
	require.Equal(t, "permanent", deadLetterHeaders(readAll(t, s.brokers, dlq, 1)[0])["dlq_error_class"])
	require.Eventually(t, func() bool { return s.parked(t) == "COUNTED DEAD 1 permanent; COUNTED DONE 1" }, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, 1, s.counts(t)["behind"])
	require.Eventually(t, func() bool { return c.Health().Works }, testenv.Patience, 10*time.Millisecond)
	for _, part := range []string{"fails, trying", "works again", "event is dead"} {
		require.Equal(t, 1, strings.Count(log.String(), part), part)
	}
}

// An event that is tried again in place holds up its own partition only, whose queue does not
// grow without bound meanwhile.
func TestSlowPartition(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it handles many events within a minute.
	s := newConsumerFixture(t, 2)
	var open atomic.Bool
	h := outbox.RetryInPlace(outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		if e.Product == "p-0" && !open.Load() {
			return errors.New("not yet")
		}
		return s.count(ctx, tx, e, m)
	}))
	s.sendTo(t, 2, 8000)
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: 1_000_000, RetryWait: 20 * time.Millisecond}, Logger: slog.New(slog.DiscardHandler), From: outbox.FromStart}}, h).Run)
	require.Eventually(t, func() bool { return s.counts(t)["p-1"] == 8000 }, testenv.Patience, 10*time.Millisecond)
	require.Zero(t, s.counts(t)["p-0"])
	open.Store(true)
	require.Eventually(t, func() bool { return s.counts(t)["p-0"] == 8000 }, testenv.Patience, 10*time.Millisecond)
}

// Run finishes the transaction in flight before it returns, and begins no other.
func TestConsumerStops(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	began, finish := make(chan struct{}), make(chan struct{})
	h := outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		began <- struct{}{}
		<-finish
		return s.count(ctx, tx, e, m)
	})
	group := "stops-" + s.topic
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, MaxPoll: 1}}
	s.sendTo(t, 1, 3)
	ctx, cancel := context.WithCancel(background)
	done := make(chan error, 1)
	c := s.groupConsumer(t, group, cfg, h)
	go func() { done <- c.Run(ctx) }()
	<-began
	cancel()
	close(finish)
	require.NoError(t, <-done)
	require.Equal(t, 1, s.counts(t)["p-0"])
	require.EqualValues(t, 1, s.committed(t, group, 0))
}

// A handler that does not finish within the session timeout is told to, and its
// transaction is rolled back.
func TestConsumerGivesUp(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	began := make(chan struct{})
	h := outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		if err := s.count(ctx, tx, e, m); err != nil {
			return err
		}
		close(began)
		<-ctx.Done()
		return ctx.Err()
	})
	group := "gives-up-" + s.topic
	s.sendTo(t, 1, 1)
	stop := testenv.Run(t, s.plainConsumer(t, new(testenv.Buffer), group, outbox.ConsumerConfig{}, h, kgo.SessionTimeout(6*time.Second)).Run)
	<-began
	stop()
	require.Empty(t, s.counts(t))
	require.EqualValues(t, 0, s.committed(t, group, 0))
}

// While PostgreSQL is away nothing is counted as a failure of the events.
func TestConsumerWithoutDatabase(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	log := new(testenv.Buffer)
	cable := &brokenDialer{}
	db := testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.DialFunc = cable.dial
		// What a handler does with a connection that broke in an outage that is over fails like anything else.
		cfg.PrepareConn = func(ctx context.Context, conn *pgx.Conn) (bool, error) { return conn.Ping(ctx) == nil, nil }
	})
	var failed atomic.Int32
	group := "away-" + s.topic
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Retry: outbox.RetryPolicy{RetryWait: time.Millisecond},
		Logger: slog.New(slog.NewTextHandler(log, nil)),
		Hooks:  outbox.ConsumerHooks{Failed: func(outbox.Metadata, string, error, bool) { failed.Add(1) }}, From: outbox.FromStart}}
	c, err := outbox.NewConsumer(db, testenv.KafkaOpts(s.brokers), s.events, group, cfg, outbox.Handle("COUNTED", s.count),
		outbox.HandleNoTx("LOOKED", func(ctx context.Context, _ sale, _ outbox.Metadata) error {
			_, err := db.Exec(ctx, "SELECT 1")
			return err
		}))
	require.NoError(t, err)
	testenv.Run(t, c.Run)
	reach := func(n int) {
		t.Helper()
		require.Eventually(t, func() bool { return s.counts(t)["p-0"] == n }, testenv.Patience, 10*time.Millisecond)
	}
	said := func(text string) (times int) { // of what handlers wait for; what handles parked events waits too
		for line := range strings.Lines(log.String()) {
			if strings.Contains(line, text) && !strings.Contains(line, `of="parked events"`) {
				times++
			}
		}
		return times
	}
	for outage := range 3 {
		s.sendTo(t, 1, 50)
		reach(100*outage + 50)
		before := said("PostgreSQL fails") // a connection of the pool that was broken may be found out later
		cable.breakAll()
		s.sendTo(t, 1, 50)
		require.Eventually(t, func() bool { return said("PostgreSQL fails") > before }, testenv.Patience, 10*time.Millisecond)
		cable.broken.Store(false)
		reach(100 * (outage + 1))
		again := func() bool { return said("PostgreSQL works again") == said("PostgreSQL fails") }
		require.Eventually(t, again, testenv.Patience, time.Millisecond, "reported after the commit")
	}
	require.Zero(t, failed.Load())
	require.NotContains(t, log.String(), "dead-letter")
}

// A commit of offsets that gets no answer is repeated when Kafka is back, also if
// nothing more arrives.
func TestConsumerWithoutKafka(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	log := new(testenv.Buffer)
	cable := &brokenDialer{}
	began, finish := make(chan struct{}), make(chan struct{})
	group := "cut-off-" + s.topic
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: slog.New(slog.NewTextHandler(log, nil)), From: outbox.FromStart}}
	c, err := outbox.NewConsumer(s.db, append(testenv.KafkaOpts(s.brokers), kgo.Dialer(cable.dial)), s.events, group, cfg, outbox.Handle("COUNTED",
		func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
			close(began)
			<-finish
			return s.count(ctx, tx, e, m)
		}))
	require.NoError(t, err)
	s.sendTo(t, 1, 1)
	testenv.Run(t, c.Run)
	<-began
	cable.breakAll()
	close(finish)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "committing offsets fails") }, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, map[string]int{"p-0": 1}, s.counts(t))
	require.EqualValues(t, 0, s.committed(t, group, 0))
	cable.broken.Store(false)
	require.Eventually(t, func() bool { return s.committed(t, group, 0) == 1 }, testenv.Patience, 10*time.Millisecond)
}

// expel takes a member out of its group, as Kafka does when its session is over.
func (s *consumerFixture) expel(t testing.TB, group, clientID string) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...))
	require.NoError(t, err)
	defer client.Close()
	describe := kmsg.NewPtrDescribeGroupsRequest()
	describe.Groups = []string{group}
	described, err := describe.RequestWith(background, client)
	require.NoError(t, err)
	for _, m := range described.Groups[0].Members {
		if m.ClientID == clientID {
			request := kmsg.NewPtrLeaveGroupRequest()
			request.Group = group
			request.Members = []kmsg.LeaveGroupRequestMember{{MemberID: m.MemberID}}
			left, err := request.RequestWith(background, client)
			require.NoError(t, err)
			require.NoError(t, kerr.ErrorForCode(left.ErrorCode))
			return
		}
	}
	require.Fail(t, "no such member", "%+v", described.Groups[0].Members)
}

// An expelled member that comes back does not set back the offset of the member that has its
// partition and has read more.
func TestExpelledMember(t *testing.T) {
	// Not parallel: the expelled member must be behind when its next heartbeat tells it.
	s := newConsumerFixture(t, 1)
	log := new(testenv.Buffer)
	start := func(name string, heartbeat time.Duration, see func(outbox.Metadata)) {
		c, err := outbox.NewConsumer(nil, append(testenv.KafkaOpts(s.brokers), kgo.ClientID(name), kgo.HeartbeatInterval(heartbeat)), s.events, "expelled-"+s.topic, outbox.ConsumerConfig{
			HandlerConfig: outbox.HandlerConfig{
				Logger: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})),
				From:   outbox.FromStart, MaxPoll: 1,
			},
		}, outbox.HandleNoTx("SEEN", func(_ context.Context, _ sale, m outbox.Metadata) error { see(m); return nil }))
		require.NoError(t, err)
		testenv.Run(t, c.Run)
	}
	stuck, goOn := make(chan struct{}), make(chan struct{})
	start("old", 20*time.Second, func(m outbox.Metadata) {
		if m.Kafka.Offset == 10 {
			close(stuck)
			<-goOn
		}
		if m.Kafka.Offset > 10 {
			time.Sleep(100 * time.Millisecond) // still far behind
		}
	})
	s.sendTo(t, 1, 100)
	<-stuck
	at := func() int64 { return s.committed(t, "expelled-"+s.topic, 0) }
	require.Eventually(t, func() bool { return at() == 10 }, testenv.Patience, time.Millisecond) // or it would soon find out
	s.expel(t, "expelled-"+s.topic, "old")
	start("new", 100*time.Millisecond, func(outbox.Metadata) {})
	require.Eventually(t, func() bool { return at() == 100 }, testenv.Patience, 10*time.Millisecond)
	close(goOn)
	require.Eventually(t, func() bool { // on a slow machine a heartbeat has told it before, and it has joined again
		return at() < 100 || strings.Contains(log.String(), "offsets of revoked partitions not committed") || strings.Contains(log.String(), "which joins it again")
	}, testenv.Patience, time.Millisecond)
	require.EqualValues(t, 100, at())
}

// A group that was away for longer than its topic keeps events goes on with the
// first one that is left, also if it did not begin at the start.
func TestConsumerBehindRetention(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	group := "behind-" + s.topic
	cfg := outbox.ConsumerConfig{}
	stop := testenv.Run(t, s.groupConsumer(t, group, cfg, outbox.Handle("COUNTED", s.count)).Run)
	require.Eventually(t, func() bool { return s.committed(t, group, 0) == 0 }, testenv.Patience, 10*time.Millisecond)
	stop()
	s.sendTo(t, 1, 10)
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...))
	require.NoError(t, err)
	defer client.Close()
	request := kmsg.NewPtrDeleteRecordsRequest()
	request.Topics = []kmsg.DeleteRecordsRequestTopic{{Topic: s.topic, Partitions: []kmsg.DeleteRecordsRequestTopicPartition{{Offset: 4}}}}
	response, err := request.RequestWith(background, client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Topics[0].Partitions[0].ErrorCode))
	testenv.Run(t, s.groupConsumer(t, group, cfg, outbox.Handle("COUNTED", s.count)).Run)
	s.sendTo(t, 1, 1)
	require.Eventually(t, func() bool { return s.committed(t, group, 0) == 11 }, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, 7, s.counts(t)["p-0"])
}
