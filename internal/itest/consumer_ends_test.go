package itest

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// endUncleanly has PostgreSQL say that processes have ended at an offset of all partitions, the last one now.
func (s *consumerFixture) endUncleanly(t testing.TB, offset int64) {
	t.Helper()
	_, err := s.db.Exec(background, s.sql(`UPDATE {s}.consumer_start SET assigned_to = gen_random_uuid(), read_from = $1, unclean_ends = 2 WHERE partition >= 0`), offset)
	require.NoError(t, err)
}

// Records at whose offset processes have ended are handled one by one, as others are. What fails is parked.
func TestSuspectsAreHandledAlone(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*outbox.ConsumerConfig, *outbox.Handler){
		"as configured": func(*outbox.ConsumerConfig, *outbox.Handler) {},
		"HoldDead":      func(cfg *outbox.ConsumerConfig, _ *outbox.Handler) { cfg.HoldDead = true },
		"RetryInPlace":  func(_ *outbox.ConsumerConfig, h *outbox.Handler) { *h = outbox.RetryInPlace(*h) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newParkingFixture(t, 1)
			var failures atomic.Int32
			run := func() (stop func()) {
				cfg, failing := s.config(t), s.handler("Handle", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
					if sold(e) == "k 2" && failures.Add(1) < 3 {
						return errPlay
					}
					return nil
				})
				change(&cfg, &failing)
				return testenv.Run(t, s.groupConsumer(t, s.group, cfg, failing, s.handler("HandleBatch", "SEEN", nil)).Run)
			}
			stop := run()
			s.send(t, s.sale("k", 1))
			s.awaitOffset(t, 0, 1)
			stop()
			require.Equal(t, "0", s.text(t, `SELECT count(assigned_to)::text FROM {s}.consumer_start`), "a stop is a clean end")
			s.endUncleanly(t, 1)
			s.send(t, s.sale("k", 2), s.sale("other", 1), s.sale("k", 3), s.sale("other", 2))
			stop = run()
			for _, action := range []string{"COUNTED", "SEEN"} {
				s.awaitJournal(t, action, "k", 3)
				s.awaitJournal(t, action, "other", 2)
			}
			s.awaitOffset(t, 0, 5)
			require.Equal(t, "4 0", s.text(t, `SELECT concat_ws(' ', suspect_offset, suspect_ends) FROM {s}.consumer_start WHERE partition = 0`), "the last one")
			require.Equal(t, "0", s.text(t, `SELECT count(*)::text FROM {s}.event_delivery WHERE action = ''`))
			stop()
			run()
			s.send(t, s.sale("k", 4))
			s.awaitJournal(t, "COUNTED", "k", 4)
			require.Equal(t, "0", s.text(t, `SELECT concat_ws(' ', unclean_ends, suspect_offset) FROM {s}.consumer_start WHERE partition = 0`))
		})
	}
}

// A record at which processes have ended three times is not decoded. It is DEAD, and gets a dead letter. The actions of
// an operator's retry handle it.
func TestRecordAtWhichProcessesEnded(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	run := func() (stop func()) {
		return testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), s.handler("Handle", "COUNTED", nil), s.handler("HandleNoTx", "SEEN", nil)).Run)
	}
	stop := run()
	s.send(t, s.sale("k", 1))
	s.awaitOffset(t, 0, 1)
	stop()
	s.exec(t, `UPDATE {s}.consumer_start SET assigned_to = gen_random_uuid(), read_from = 1, unclean_ends = 5, suspect_offset = 1, suspect_ends = 2 WHERE partition = 0`)
	s.send(t, s.sale("k", 2), s.sale("other", 1), s.sale("k", 3))
	run()
	s.awaitJournal(t, "COUNTED", "other", 1)
	journal := func(action string, want ...int) {
		t.Helper()
		require.Eventually(t, func() bool { return slices.Equal(s.journal(t, action, "k"), want) }, testenv.Patience, 10*time.Millisecond, "%s: %v", action, want)
	}
	journal("COUNTED", 1, 3)
	s.awaitStatuses(t, "", "DEAD 1")
	s.deadLetters(t, 1)
	require.Contains(t, s.text(t, `SELECT last_error_message FROM {s}.event_delivery`), "3 processes have ended")
	s.retryDead(t, 1)
	for _, action := range []string{"COUNTED", "SEEN"} {
		journal(action, 1, 3, 2)
	}
}

// Processes that are stopped while a suspect is handled have not ended at it. It is handled when one has the time.
func TestStopsAtSuspectAreNoEnds(t *testing.T) {
	t.Parallel()
	for name, returns := range map[string]bool{"its handler returns when its context ends": true, "its handler does not return": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newParkingFixture(t, 1)
			var slow atomic.Bool
			began, release := make(chan struct{}, 1), make(chan struct{})
			t.Cleanup(func() { close(release) })
			run := func() (stop func()) {
				cfg := s.config(t)
				cfg.StopTimeout = time.Second
				return testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", func(ctx context.Context, _ pgx.Tx, _ sale, _ outbox.Metadata) error {
					if !slow.Load() {
						return nil
					}
					began <- struct{}{}
					if returns {
						<-ctx.Done()
						return ctx.Err()
					}
					<-release
					return errPlay
				})).Run)
			}
			stop := run()
			s.send(t, s.sale("k", 1))
			s.awaitOffset(t, 0, 1)
			stop()
			s.endUncleanly(t, 1)
			slow.Store(true)
			s.send(t, s.sale("k", 2))
			for range 3 {
				stop = run()
				select {
				case <-began:
				case <-time.After(testenv.Patience):
					require.Fail(t, "the handler is not called")
				}
				stop()
			}
			slow.Store(false)
			run()
			s.awaitJournal(t, "COUNTED", "k", 2)
			require.Equal(t, "0", s.text(t, `SELECT count(*)::text FROM {s}.event_delivery`))
		})
	}
}

// Processes that are killed while a partition has nothing to handle have not ended at a record: those that come later
// are handled, one by one at first.
func TestUncleanEndsOfIdlePartition(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	run := func() (stop func()) {
		return testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), s.handler("Handle", "COUNTED", nil)).Run)
	}
	stop := run()
	s.send(t, s.sale("k", 1))
	s.awaitOffset(t, 0, 1)
	stop()
	s.endUncleanly(t, 1)
	run()
	for n := 2; n <= 5; n++ {
		s.send(t, s.sale("k", n))
		s.awaitJournal(t, "COUNTED", "k", n)
	}
	s.awaitStatuses(t, "", "")
	s.awaitStatuses(t, "COUNTED", "")
}

// A member that loses a partition in a rebalance has ended cleanly there, also if another member ends the same way.
func TestRebalanceIsCleanEnd(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 2)
	run := func() (stop func()) {
		return testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), s.handler("Handle", "COUNTED", nil)).Run)
	}
	holders := func() string {
		return s.text(t, `SELECT count(DISTINCT assigned_to) || ' ' || coalesce(max(unclean_ends), 0) FROM {s}.consumer_start WHERE partition >= 0`)
	}
	await := func(want string) {
		t.Helper()
		require.Eventually(t, func() bool { return holders() == want }, testenv.Patience, 10*time.Millisecond)
	}
	run()
	await("1 0")
	for range 3 {
		stop := run()
		await("2 0")
		stop()
		await("1 0")
	}
}

// in returns a record for a partition.
func in(partition int32, r *kgo.Record) *kgo.Record {
	r.Partition = partition
	return r
}

// A suspect that is tried again and again keeps those of other partitions waiting for one attempt only. Its attempts
// are no ends.
func TestSuspectThatFailsKeepsNoOthersWaiting(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 2)
	var failures atomic.Int32
	run := func() (stop func()) {
		return testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), outbox.RetryInPlace(s.handler("Handle", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
			if e.Product == "away" && e.Amount > 1 {
				failures.Add(1)
				return outbox.Unavailable(errPlay)
			}
			return nil
		}))).Run)
	}
	stop := run()
	s.send(t, s.sale("away", 1), in(1, s.sale("k", 1)))
	s.awaitOffset(t, 0, 1)
	s.awaitOffset(t, 1, 1)
	stop()
	s.endUncleanly(t, 1)
	stop = run()
	s.send(t, s.sale("away", 2))
	require.Eventually(t, func() bool { return failures.Load() > 0 }, testenv.Patience, time.Millisecond)
	s.send(t, in(1, s.sale("k", 2)), in(1, s.sale("k", 3)))
	s.awaitJournal(t, "COUNTED", "k", 3)
	before := failures.Load()
	require.Eventually(t, func() bool { return failures.Load() > before+2 }, testenv.Patience, time.Millisecond)
	stop()
	require.Equal(t, "1 -1", s.text(t, `SELECT concat_ws(' ', suspect_offset, suspect_ends) FROM {s}.consumer_start WHERE partition = 0`), "none has ended there")
}

// The pause of a topic while its suspects are handled pauses no other topic.
func TestPausedSuspectsKeepNoOthersWaiting(t *testing.T) {
	t.Parallel()
	s := newPauseFixture(t)
	var c *outbox.Consumer
	var suspects atomic.Bool
	paused := make(chan error, 10)
	before := func() {
		if suspects.Load() {
			paused <- c.Pause(s.topic)
		}
	}
	c = s.member(t, before)
	stop := testenv.Run(t, c.Run)
	s.send(t, s.saleRecord(uuid.NewString(), oneSale))
	s.refund(t, 1)
	s.requireArrived(t, map[string]int{"sales/0": 1, "refunds/0": 1})
	stop()
	s.endUncleanly(t, 1)
	suspects.Store(true)
	c = s.member(t, before)
	testenv.Run(t, c.Run)
	s.send(t, s.saleRecord(uuid.NewString(), oneSale), s.saleRecord(uuid.NewString(), oneSale))
	require.NoError(t, <-paused)
	time.Sleep(200 * time.Millisecond) // the second one waits for the end of the pause
	s.refund(t, 2)
	s.requireArrived(t, map[string]int{"sales/0": 2, "refunds/0": 3})
	require.NoError(t, c.Resume(s.topic))
	s.requireArrived(t, map[string]int{"sales/0": 3, "refunds/0": 3})
}

// Health says that a partition waits until a suspect of another one is handled.
func TestHealthOfWaitingSuspect(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 2)
	cfg := s.config(t)
	cfg.SlowHandler = 100 * time.Millisecond
	began, release := make(chan struct{}), make(chan struct{})
	end := sync.OnceFunc(func() { close(release) })
	member := func() *outbox.Consumer {
		return s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
			if sold(e) == "slow 2" {
				close(began)
				<-release
			}
			return nil
		}))
	}
	stop := testenv.Run(t, member().Run)
	s.send(t, s.sale("slow", 1), in(1, s.sale("k", 1)))
	s.awaitOffset(t, 0, 1)
	s.awaitOffset(t, 1, 1)
	stop()
	s.endUncleanly(t, 1)
	c := member()
	testenv.Run(t, c.Run)
	t.Cleanup(end)
	s.send(t, s.sale("slow", 2))
	<-began
	s.send(t, in(1, s.sale("k", 2)))
	says := func() bool {
		return slices.ContainsFunc(c.Health().Reasons, func(reason string) bool {
			return strings.Contains(reason, s.topic+"/1 has waited for") && strings.Contains(reason, "alone")
		})
	}
	require.Eventually(t, says, testenv.Patience, 10*time.Millisecond, "%v", c.Health)
	require.Equal(t, []int{1}, s.journal(t, "COUNTED", "k"))
	end()
	s.awaitJournal(t, "COUNTED", "k", 2)
	require.False(t, says())
}

// While a member stops, a rebalance assigns a partition to it, with which it does not begin. That is a clean end, too.
func TestAssignedDuringStopIsCleanEnd(t *testing.T) {
	t.Parallel()
	s := newStartFixture(t, 2)
	began, finish := make(chan int32, 2), make(chan struct{})
	run := func(handle func(outbox.Metadata)) (stop func()) {
		cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{
			Schema: s.schema, Logger: slog.New(slog.NewTextHandler(s.log, nil)), StopTimeout: 40 * time.Second, From: outbox.FromStart,
		}}
		c, err := outbox.NewConsumer(s.db, []kgo.Opt{kgo.SeedBrokers(s.brokers...), kgo.HeartbeatInterval(100 * time.Millisecond)}, s.events, s.group, cfg,
			outbox.HandleNoTx("SEEN", func(_ context.Context, _ sale, m outbox.Metadata) error { handle(m); return nil }))
		require.NoError(t, err)
		return testenv.Run(t, c.Run)
	}
	rows := &parkingFixture{consumerFixture: s.consumerFixture}
	await := func(members, partitions int) {
		t.Helper()
		var got string
		require.Eventually(t, func() bool {
			got = rows.text(t, `SELECT count(DISTINCT assigned_to) || ' ' || count(assigned_to) FROM {s}.consumer_start WHERE partition >= 0`)
			return got == fmt.Sprint(members, " ", partitions)
		}, testenv.Patience, 10*time.Millisecond, &got)
	}
	stopOne := run(func(m outbox.Metadata) { began <- m.Kafka.Partition; <-finish })
	await(1, 2)
	stopOther := run(func(outbox.Metadata) {})
	await(2, 2)
	s.put(t, 0, 1)
	s.put(t, 1, 1)
	<-began
	stopped := make(chan struct{})
	go func() { defer close(stopped); stopOne() }()
	stopOther()
	await(1, 2)
	close(finish)
	<-stopped
	await(0, 0)
}
