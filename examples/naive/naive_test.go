package naive_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/examples/naive"
	"github.com/outboxgo/outbox/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(testenv.Main(m)) }

// stage has the tables in a database of their own, and a topic with one partition.
type stage struct {
	t       *testing.T
	ctx     context.Context
	db      *pgxpool.Pool
	brokers []string
	topic   string
	reader  *kgo.Client
	arrived []string // values
}

func newStage(t *testing.T) *stage {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Patience)
	t.Cleanup(cancel)
	s := &stage{t: t, ctx: ctx, db: testenv.OtherDatabase(t), brokers: testenv.Brokers(t), topic: "naive-" + uuid.NewString()}
	_, err := s.db.Exec(ctx, naive.Tables)
	require.NoError(t, err)
	testenv.CreateTopic(t, s.brokers, s.topic, 1)
	s.reader = s.kafka(kgo.ConsumeTopics(s.topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	return s
}

func (s *stage) kafka(opts ...kgo.Opt) *kgo.Client {
	s.t.Helper()
	client, err := kgo.NewClient(append(testenv.KafkaOpts(s.brokers), opts...)...)
	require.NoError(s.t, err)
	s.t.Cleanup(client.Close)
	return client
}

func (s *stage) relay() *naive.Relay {
	s.t.Helper()
	return &naive.Relay{DB: s.db, Kafka: s.kafka(), Topic: s.topic}
}

func (s *stage) begin() pgx.Tx {
	s.t.Helper()
	tx, err := s.db.Begin(s.ctx)
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// record commits an event of its own transaction.
func (s *stage) record(value string) {
	s.t.Helper()
	tx := s.begin()
	require.NoError(s.t, naive.Record(s.ctx, tx, "key", value))
	require.NoError(s.t, tx.Commit(s.ctx))
}

// poll polls once, and waits until the answers of Kafka were handled.
func (s *stage) poll(r *naive.Relay) {
	s.t.Helper()
	require.NoError(s.t, r.Poll(s.ctx))
	require.NoError(s.t, r.Kafka.Flush(s.ctx))
}

// await waits for the values that have arrived in all.
func (s *stage) await(want ...string) {
	s.t.Helper()
	for len(s.arrived) < len(want) {
		fetches := s.reader.PollFetches(s.ctx)
		require.NoError(s.t, fetches.Err())
		fetches.EachRecord(func(r *kgo.Record) { s.arrived = append(s.arrived, string(r.Value)) })
	}
	require.Equal(s.t, want, s.arrived)
}

// lockPosition keeps relays from moving the position, as a process that dies before does. They can read it.
func (s *stage) lockPosition() pgx.Tx {
	s.t.Helper()
	tx := s.begin()
	_, err := tx.Exec(s.ctx, `SELECT FROM naive_position FOR UPDATE`)
	require.NoError(s.t, err)
	return tx
}

// 1. An id is taken at INSERT and visible at COMMIT: the position passes the event of a slow transaction.
func TestLateCommitIsLost(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	relay, slow := s.relay(), s.begin()
	require.NoError(t, naive.Record(s.ctx, slow, "key", "slow"))
	s.record("fast")
	s.poll(relay)
	require.NoError(t, slow.Commit(s.ctx))
	s.poll(relay)
	s.record("last") // which arrives after everything that was sent before
	s.poll(relay)
	s.await("fast", "last")
}

// 2. The position moves before Kafka has acknowledged the event, and the process dies.
func TestUnacknowledgedIsLost(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.record("sent")
	unreachable, err := kgo.NewClient(kgo.SeedBrokers(testenv.Nowhere(t)))
	require.NoError(t, err)
	db, err := pgxpool.NewWithConfig(s.ctx, s.db.Config())
	require.NoError(t, err)
	dies := &naive.Relay{DB: db, Kafka: unreachable, Topic: s.topic}
	require.NoError(t, dies.Poll(s.ctx))
	db.Close() // first, so that it can note nothing any more
	unreachable.Close()

	relay := s.relay()
	s.poll(relay)
	s.record("last")
	s.poll(relay)
	s.await("last")
}

// 3. The process dies between the acknowledgement and the move of the position: the next one sends the event again.
func TestCrashRepeats(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.record("paid")
	locked := s.lockPosition()
	ctx, die := context.WithCancel(s.ctx)
	dead := make(chan error)
	dies := s.relay()
	go func() { dead <- dies.Poll(ctx) }()
	s.await("paid")
	die()
	require.Error(t, <-dead)
	require.Eventually(t, func() bool { // PostgreSQL has given up its statement, too
		waiting := 0
		err := s.db.QueryRow(s.ctx, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&waiting)
		return err == nil && waiting == 0
	}, testenv.Patience, 10*time.Millisecond)
	require.NoError(t, locked.Rollback(s.ctx))

	s.poll(s.relay())
	s.await("paid", "paid")
}

// 4. Two processes read the same position, and both send the event.
func TestTwoProcessesRepeat(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.record("paid")
	locked := s.lockPosition()
	polled := make(chan error)
	for _, relay := range []*naive.Relay{s.relay(), s.relay()} {
		go func() { polled <- relay.Poll(s.ctx) }()
	}
	s.await("paid", "paid")
	require.NoError(t, locked.Rollback(s.ctx))
	require.NoError(t, <-polled)
	require.NoError(t, <-polled)
}

// 5. An event that Kafka rejects is retried, after a later event of its key was sent.
func TestRetryIsOvertaken(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	first := "created" + strings.Repeat("!", 2000)
	s.record(first)
	s.record("shipped")
	strict := &naive.Relay{DB: s.db, Kafka: s.kafka(kgo.ProducerBatchMaxBytes(1000)), Topic: s.topic}
	s.poll(strict)
	require.Eventually(t, func() bool { // the callback has noted the failure
		failed := 0
		err := s.db.QueryRow(s.ctx, `SELECT count(*) FROM naive_failed`).Scan(&failed)
		return err == nil && failed == 1
	}, testenv.Patience, 10*time.Millisecond)
	s.await("shipped")
	relay := s.relay() // after the limit was raised
	require.NoError(t, relay.Retry(s.ctx))
	s.await("shipped", first)
}
