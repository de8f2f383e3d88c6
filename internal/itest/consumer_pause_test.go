package itest

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

const refundType = "test.refund.made.v1"

// givenBack goes to another topic than sale.
type givenBack struct{ sale }

// pauseFixture has consumers of two topics that note which offsets they handle. They have
// franz-go's default options.
type pauseFixture struct {
	*consumerFixture
	group, other string // other is the topic of givenBack
	log          *testenv.Buffer
	operators    *outboxops.Consumers
}

func newPauseFixture(t *testing.T) *pauseFixture {
	t.Helper()
	other := "other-" + uuid.NewString()
	s := &pauseFixture{other: other, log: new(testenv.Buffer)}
	s.consumerFixture = newConsumerFixture(t, 2, outbox.Event(refundType, "Product", givenBack.productID).Topic(other))
	testenv.CreateTopic(t, s.brokers, other, 1)
	testenv.CreateTopic(t, s.brokers, other+".dlq", 1)
	s.group = "pause-" + s.topic
	_, err := s.db.Exec(background, s.sql(`CREATE TABLE {s}.arrived (n bigserial PRIMARY KEY, topic text, partition int, "offset" bigint)`))
	require.NoError(t, err)
	s.operators, err = outboxops.NewConsumers(s.db, outboxops.ConsumersConfig{Schema: s.schema})
	require.NoError(t, err)
	return s
}

func (s *pauseFixture) arrive(ctx context.Context, tx pgx.Tx, m outbox.Metadata) error {
	_, err := tx.Exec(ctx, s.sql(`INSERT INTO {s}.arrived (topic, partition, "offset") VALUES ($1, $2, $3)`), m.Kafka.Topic, m.Kafka.Partition, m.Kafka.Offset)
	return err
}

// member returns a member of the group; before is called in front of each event.
func (s *pauseFixture) member(t *testing.T, before func()) *outbox.Consumer {
	t.Helper()
	return s.memberWith(t, outbox.ConsumerConfig{}, before)
}

func (s *pauseFixture) memberWith(t *testing.T, cfg outbox.ConsumerConfig, before func(), opts ...kgo.Opt) *outbox.Consumer {
	t.Helper()
	cfg.HandlerConfig = outbox.HandlerConfig{Schema: s.schema, Logger: slog.New(slog.NewTextHandler(s.log, nil))}
	cfg.From = outbox.FromStart
	c, err := outbox.NewConsumer(s.db, append(opts, kgo.SeedBrokers(s.brokers...)), s.events, s.group, cfg,
		outbox.Handle("SOLD", func(ctx context.Context, tx pgx.Tx, _ sale, m outbox.Metadata) error {
			before()
			return s.arrive(ctx, tx, m)
		}),
		outbox.Handle("REFUNDED", func(ctx context.Context, tx pgx.Tx, _ givenBack, m outbox.Metadata) error {
			return s.arrive(ctx, tx, m)
		}))
	require.NoError(t, err)
	return c
}

// refund sends n refunds.
func (s *pauseFixture) refund(t *testing.T, n int) {
	t.Helper()
	var records []*kgo.Record
	for range n {
		r := s.saleRecord(uuid.NewString(), oneSale)
		r.Topic, r.Headers[3].Value = s.other, []byte(refundType)
		records = append(records, r)
	}
	s.send(t, records...)
}

// arrived returns the offsets that were handled, by partition, in the order of their
// transactions' statements.
func (s *pauseFixture) arrived(t *testing.T) map[string][]int64 {
	t.Helper()
	rows, err := s.db.Query(background, s.sql(`SELECT topic, partition, array_agg("offset" ORDER BY n) FROM {s}.arrived GROUP BY 1, 2`))
	require.NoError(t, err)
	all, topic, partition, offsets := map[string][]int64{}, "", 0, []int64(nil)
	_, err = pgx.ForEachRow(rows, []any{&topic, &partition, &offsets}, func() error {
		all[fmt.Sprintf("%s/%d", cmp.Or(map[string]string{s.topic: "sales", s.other: "refunds"}[topic], topic), partition)] = slices.Clone(offsets)
		return nil
	})
	require.NoError(t, err)
	return all
}

// requireArrived waits until as many events were handled of each partition, and requires
// that each was handled once, in order.
func (s *pauseFixture) requireArrived(t *testing.T, want map[string]int) {
	t.Helper()
	require.Eventually(t, func() bool {
		arrived := s.arrived(t)
		for partition, n := range want {
			if len(arrived[partition]) < n {
				return false
			}
		}
		return true
	}, testenv.Patience, 10*time.Millisecond, "events were not handled; the log says: %s", s.log)
	all := map[string][]int64{}
	for partition, n := range want {
		for i := range int64(n) {
			all[partition] = append(all[partition], i)
		}
	}
	require.Equal(t, all, s.arrived(t))
}

// What an operator has paused is handled by no member: not before a start, in a rebalance,
// or after a restart. Other topics go on. Nothing is lost, and nothing overtakes.
func TestPauseByOperator(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := newPauseFixture(t)
	testenv.RealBrokers(t)
	require.NoError(t, s.operators.Pause(background, s.group, s.topic, kim))
	require.ErrorIs(t, s.operators.Pause(background, s.group, s.topic, kim), outboxops.ErrStatus)
	s.sendTo(t, 2, 20)
	s.refund(t, 10)
	first, second := s.member(t, func() {}), s.member(t, func() {})
	stopFirst := testenv.Run(t, first.Run)
	s.requireArrived(t, map[string]int{"refunds/0": 10})
	h := first.Health()
	require.True(t, h.Live && h.Works, h.Reasons)
	require.Contains(t, fmt.Sprint(h.Reasons), "topic "+s.topic+" is paused by kim since")

	testenv.Run(t, second.Run)
	require.Eventually(t, func() bool {
		a, b := first.Health().Partitions, second.Health().Partitions
		return a > 0 && b > 0 && a+b == 3
	}, testenv.Patience, 10*time.Millisecond, "a rebalance")
	s.sendTo(t, 2, 20)
	s.refund(t, 10)
	s.requireArrived(t, map[string]int{"refunds/0": 20})
	stopsWithin(t, stopFirst)
	stopFirst = testenv.Run(t, first.Run)
	s.refund(t, 10)
	s.requireArrived(t, map[string]int{"refunds/0": 30})

	require.NoError(t, s.operators.Pause(background, s.group, "", kim))
	require.Eventually(t, func() bool {
		return len(first.Health().Reasons) == 2 && len(second.Health().Reasons) == 2
	}, testenv.Patience, 10*time.Millisecond, "both know")
	s.refund(t, 10)
	require.NoError(t, s.operators.Resume(background, s.group, s.topic, kim))
	require.Eventually(t, func() bool {
		return len(first.Health().Reasons) == 1 && len(second.Health().Reasons) == 1
	}, testenv.Patience, 10*time.Millisecond, "the whole group is paused still")
	s.requireArrived(t, map[string]int{"refunds/0": 30})
	stopsWithin(t, stopFirst)

	require.NoError(t, s.operators.Resume(background, s.group, "", kim))
	require.ErrorIs(t, s.operators.Resume(background, s.group, "", kim), outboxops.ErrStatus)
	s.requireArrived(t, map[string]int{"sales/0": 40, "sales/1": 40, "refunds/0": 40})
	require.Empty(t, second.Health().Reasons)
	audit, err := s.failures(t).Audit(background, outboxops.FailureID{}, outboxops.AuditPage{})
	require.NoError(t, err)
	var did []string
	for _, e := range slices.Backward(audit) {
		did = append(did, e.Operator+" "+e.Action+" "+e.Group+" "+e.Topic)
	}
	require.Equal(t, []string{"kim pause " + s.group + " " + s.topic, "kim pause " + s.group + " ", "kim resume " + s.group + " " + s.topic, "kim resume " + s.group + " "}, did)
}

// A handler finishes the event that it is at, and this is committed; the others that arrived
// with it wait. They go on at once.
func TestPauseWithinBatch(t *testing.T) {
	t.Parallel()
	s := newPauseFixture(t)
	called, release := make(chan struct{}), make(chan struct{})
	once := sync.OnceFunc(func() { close(called); <-release })
	c := s.member(t, once)
	require.ErrorContains(t, c.Pause("nowhere"), `does not read topic "nowhere"`)
	require.ErrorContains(t, c.Resume(s.topic, "nowhere"), `does not read topic "nowhere"`)
	s.sendTo(t, 1, 10)
	testenv.Run(t, c.Run)
	<-called
	require.NoError(t, c.Pause())
	require.NoError(t, c.Pause(s.topic))
	close(release)
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 1 }, testenv.Patience, 10*time.Millisecond)
	s.sendTo(t, 2, 10)
	s.refund(t, 10)
	require.NoError(t, c.Resume())
	s.requireArrived(t, map[string]int{"sales/0": 1, "refunds/0": 10})
	h := c.Health()
	require.True(t, h.Live && h.Works)
	require.Equal(t, []string{"topic " + s.topic + " is paused by this process"}, h.Reasons)
	require.NoError(t, c.Resume(s.topic))
	s.requireArrived(t, map[string]int{"sales/0": 20, "sales/1": 10, "refunds/0": 10})
}

// A member that is paused for longer than a session, or than handlers may take, stays in its
// group, as Kafka sees it, and goes on where it stopped.
func TestPausedMemberStays(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := newPauseFixture(t)
	testenv.RealBrokers(t)
	const session, poll = 6 * time.Second, 7 * time.Second // Kafka accepts no shorter session
	c := s.memberWith(t, outbox.ConsumerConfig{MaxPollInterval: poll}, func() {}, kgo.SessionTimeout(session))
	s.sendTo(t, 2, 10)
	stop := testenv.Run(t, c.Run)
	s.requireArrived(t, map[string]int{"sales/0": 10, "sales/1": 10})
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...))
	require.NoError(t, err)
	defer client.Close()
	member := func() string {
		request := kmsg.NewPtrDescribeGroupsRequest()
		request.Groups = []string{s.group}
		response, err := request.RequestWith(background, client)
		require.NoError(t, err)
		require.Equal(t, "Stable", response.Groups[0].State)
		require.Len(t, response.Groups[0].Members, 1)
		return response.Groups[0].Members[0].MemberID
	}
	before := member()
	require.NoError(t, c.Pause())
	s.sendTo(t, 2, 10)
	for began := time.Now(); time.Since(began) < poll+session/2; time.Sleep(100 * time.Millisecond) {
		require.Equal(t, before, member())
		require.Equal(t, 3, c.Health().Partitions)
	}
	require.NoError(t, c.Resume())
	s.requireArrived(t, map[string]int{"sales/0": 20, "sales/1": 20})
	require.NoError(t, c.Pause())
	stopsWithin(t, stop)
	require.EqualValues(t, 20, s.committed(t, s.group, 0))
}

// While PostgreSQL does not answer, a member goes by what it has read last.
func TestPauseWithoutPostgres(t *testing.T) {
	t.Parallel()
	s := newPauseFixture(t)
	cable := &brokenDialer{}
	db := s.db
	s.db = testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.DialFunc = cable.dial })
	c := s.member(t, func() {})
	s.db = db
	require.NoError(t, s.operators.Pause(background, s.group, "", kim))
	testenv.Run(t, c.Run)
	require.Eventually(t, func() bool { return c.Health().Partitions == 3 }, testenv.Patience, 10*time.Millisecond)
	cable.breakAll()
	s.sendTo(t, 2, 10)
	requireNoWork(t, c, "reading what is paused has been failing")
	require.Contains(t, fmt.Sprint(c.Health().Reasons), "the consumer is paused by kim")
	require.NoError(t, s.operators.Resume(background, s.group, "", kim))
	require.Empty(t, s.arrived(t))
	cable.broken.Store(false)
	s.requireArrived(t, map[string]int{"sales/0": 10, "sales/1": 10})
	requireReady(t, c, 3)
}
