package consumer

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
)

var workerPlays = []struct {
	name         string
	handlers     map[string]string
	transactions string
	sends        string
	want         []string
	handled      int64 // the next offset
}{
	{name: "all in one transaction", want: []string{"a1 b1 c1: committed"}, handled: 3},
	{name: "one fails in the batch only, and those in front of it are handled again", handlers: map[string]string{"b": "-"},
		want: []string{"a1 b1: rolled back", "a1: committed", "b1 c1: committed"}, handled: 3},
	{name: "one fails again and is retried", handlers: map[string]string{"b": "---"},
		want: []string{"a1 b1: rolled back", "a1: committed", "b1: rolled back", "b2: rolled back", "b3: committed", "c1: committed"}, handled: 3},
	{name: "one fails too often", handlers: map[string]string{"b": "-----"},
		want: []string{"a1 b1: rolled back", "a1: committed", "b1: rolled back", "b2: rolled back", "b3: rolled back", "b4: rolled back",
			"dead letter b after 4: handler", "c1: committed"}, handled: 3},
	{name: "one fails for good", handlers: map[string]string{"b": "pp"},
		want: []string{"a1 b1: rolled back", "a1: committed", "b1: rolled back", "dead letter b after 1: permanent", "c1: committed"}, handled: 3},
	{name: "one panics", handlers: map[string]string{"c": "!!!!!"},
		want: []string{"a1 b1 c1: rolled back", "a1 b1: committed", "c1: rolled back", "c2: rolled back", "c3: rolled back", "c4: rolled back",
			"dead letter c after 4: panic"}, handled: 3},
	{name: "a deadlock repeats the batch", transactions: "d", want: []string{"a1 b1 c1: rolled back", "a1 b1 c1: committed"}, handled: 3},
	{name: "too many deadlocks end the batch, and count for no event", transactions: "dddddd",
		want: []string{"a1 b1 c1: rolled back", "a1 b1 c1: rolled back", "a1 b1 c1: rolled back", "a1 b1 c1: rolled back",
			"a1: rolled back", "a1: rolled back", "a1: committed", "b1 c1: committed"}, handled: 3},
	{name: "an outage is waited out", transactions: "ooo",
		want: []string{"no connection", "no connection", "no connection", "a1 b1 c1: committed"}, handled: 3},
	{name: "an outage in between counts for no event", handlers: map[string]string{"b": "--"}, transactions: "++oo",
		want: []string{"a1 b1: rolled back", "a1: committed", "no connection", "no connection", "b1: rolled back", "b2: committed", "c1: committed"}, handled: 3},
	{name: "a lost connection, and no other to be had, is an outage", transactions: "co",
		want: []string{"a1 b1 c1: rolled back", "no connection", "a1 b1 c1: committed"}, handled: 3},
	{name: "a lost connection is the handler's doing if there are others", transactions: "cc",
		want: []string{"a1 b1 c1: rolled back", "a1: rolled back", "a2: committed", "b1 c1: committed"}, handled: 3},
	{name: "the worker stops within the batch", handlers: map[string]string{"b": "s"}, want: []string{"a1 b1: committed"}, handled: 2},
	{name: "the topic is paused within the batch", handlers: map[string]string{"b": "z"}, want: []string{"a1 b1: committed", "resumed", "c1: committed"}, handled: 3},
	{name: "the topic is paused at the end", handlers: map[string]string{"c": "z"}, want: []string{"a1 b1 c1: committed"}, handled: 3},
	{name: "the topic is paused in the first try, which counts", handlers: map[string]string{"a": "Z"},
		want: []string{"a1: rolled back", "resumed", "a2: committed", "b1 c1: committed"}, handled: 3},
	{name: "the topic is paused between two tries", handlers: map[string]string{"a": "-Z"},
		want: []string{"a1: rolled back", "a2: rolled back", "resumed", "a3: committed", "b1 c1: committed"}, handled: 3},
	{name: "the topic is paused in a batch that fails", handlers: map[string]string{"b": "Z"},
		want: []string{"a1 b1: rolled back", "resumed", "a1: committed", "b1 c1: committed"}, handled: 3},
	{name: "the topic is paused before a deadlock", handlers: map[string]string{"a": "z"}, transactions: "d",
		want: []string{"a1: rolled back", "resumed", "a1 b1 c1: committed"}, handled: 3},
	{name: "the first fails, which counts", handlers: map[string]string{"a": "----"},
		want: []string{"a1: rolled back", "a2: rolled back", "a3: rolled back", "a4: rolled back", "dead letter a after 4: handler", "b1 c1: committed"}, handled: 3},
	{name: "one ends its goroutine", handlers: map[string]string{"b": "xxxxx"},
		want: []string{"a1 b1: rolled back", "a1: committed", "b1: rolled back", "b2: rolled back", "b3: rolled back", "b4: rolled back",
			"dead letter b after 4: goexit", "c1: committed"}, handled: 3},
	{name: "another server fails, which is no outage of ours", handlers: map[string]string{"b": "fffff"},
		want: []string{"a1 b1: rolled back", "a1: committed", "b1: rolled back", "b2: rolled back", "b3: rolled back", "b4: rolled back",
			"dead letter b after 4: postgres_53400", "c1: committed"}, handled: 3},
	{name: "nothing can be noted for a while", transactions: "nnn", want: []string{"no notes", "no notes", "no notes", "a1 b1 c1: committed"}, handled: 3},
	{name: "nothing can be noted in between", handlers: map[string]string{"b": "--"}, transactions: "++nn",
		want: []string{"a1 b1: rolled back", "a1: committed", "no notes", "no notes", "b1: rolled back", "b2: committed", "c1: committed"}, handled: 3},
	{name: "one changes settings, which others must not see", handlers: map[string]string{"b": "="},
		want: []string{"a1 b1: rolled back", "a1: committed", "b1: committed", "c1: committed"}, handled: 3},
	{name: "the last changes settings, which nobody sees", handlers: map[string]string{"c": "="}, want: []string{"a1 b1 c1: committed"}, handled: 3},
	{name: "the worker stops after a record", handlers: map[string]string{"a": "-", "b": "s"},
		want: []string{"a1: rolled back", "a2: committed", "b1: committed"}, handled: 2},
	{name: "the worker stops in a try that fails", handlers: map[string]string{"a": "-", "b": "-s"}, transactions: "+++c",
		want: []string{"a1: rolled back", "a2: committed", "b1: rolled back", "b2: rolled back"}, handled: 1},
	{name: "the worker is abandoned", handlers: map[string]string{"b": "a"}, want: []string{"a1 b1: rolled back"}, handled: 0},
	{name: "the worker is abandoned after a record", handlers: map[string]string{"b": "-a"},
		want: []string{"a1 b1: rolled back", "a1: committed", "b1: rolled back"}, handled: 1},
	{name: "a dead letter is too large", handlers: map[string]string{"a": "p"}, sends: "l",
		want: []string{"a1: rolled back", "dead letter a after 1: permanent 12", "b1 c1: committed"}, handled: 3},
	{name: "the dead-letter topic is unavailable for a while", handlers: map[string]string{"a": "p"}, sends: "uuu",
		want: []string{"a1: rolled back", "dead letter a after 1: permanent", "b1 c1: committed"}, handled: 3},
}

// Three records arrive together. What becomes of them follows from what their
// handlers, PostgreSQL and the dead-letter topic do; waits take no time here.
func TestPartitionWorkerPlays(t *testing.T) {
	t.Parallel()
	for _, tt := range workerPlays {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newPartitionFixture(t, Rules{})
				for name, play := range tt.handlers {
					s.handlers[name] = play
				}
				s.transactions, s.sends = tt.transactions, tt.sends
				s.worker.handle(s.arrive("a", "b", "c"))
				require.Equal(t, tt.want, s.log)
				next, advanced := s.worker.uncommitted()
				require.Equal(t, tt.handled, next.Offset)
				require.Equal(t, tt.handled > 0, advanced)
				require.Equal(t, tt.handled, int64(s.commits), "asked for after each record")
				require.False(t, s.worker.outages.Failing(), "an outage that has ended is reported so")
			})
		})
	}
}

// A worker whose topic is paused while it waits for a slot leaves the slot to others.
func TestPausedPartitionWorkerTakesNoSlot(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newPartitionFixture(t, Rules{})
		slots := handling.NewSlots(1)
		s.worker.limits.slots.Transactions = slots
		require.True(t, slots.Take(t.Context()))
		go s.worker.handle(s.arrive("a", "b"))
		synctest.Wait()
		s.pause()
		slots.Release()
		synctest.Wait()
		require.Empty(t, s.log)
		require.True(t, slots.Take(t.Context()), "it is free")
		slots.Release()
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		require.Equal(t, []string{"resumed", "a1 b1: committed"}, s.log)
	})
}

// While a topic is paused, what cannot be read becomes no dead letter.
func TestPausedPartitionWorkerMakesNoDeadLetters(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newPartitionFixture(t, Rules{})
		s.worker.reader.decode = func(*kgo.Record) (*envelope.Message, error) { return nil, errPlayed }
		s.pause()
		go s.worker.handle(s.arrive("a"))
		synctest.Wait()
		require.Empty(t, s.log)
		s.worker.limits.pauses.SetStored(nil) // changes nothing; what was read above was read before what is written below
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		require.Equal(t, []string{"dead letter a after 0: undecodable"}, s.log)
	})
}

// A retry waits, longer each time, and an outage does too, but less.
func TestPartitionWorkerWaits(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, handler, transactions string
		least, most                 time.Duration
	}{
		{"nothing", "", "", 0, 0},
		{"two retries: 1 s and 2 s, a fifth more or less", "--", "", 2400 * time.Millisecond, 3600 * time.Millisecond},
		{"two tries of PostgreSQL: 100 ms and 200 ms, less a half", "", "oo", 150 * time.Millisecond, 300 * time.Millisecond},
		{"deadlocks: 2 ms and 4 ms, less a half", "", "dd", 3 * time.Millisecond, 6 * time.Millisecond},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newPartitionFixture(t, Rules{})
				s.handlers["a"], s.transactions = tt.handler, tt.transactions
				began := time.Now()
				s.worker.handle(s.arrive("a"))
				took := time.Since(began)
				require.True(t, tt.least <= took && took <= tt.most, "%v", took)
			})
		})
	}
}

// A handler says when it is tried again, shorter or longer than it would be.
func TestRetryAfter(t *testing.T) {
	t.Parallel()
	conflict := &pgconn.PgError{Code: "40001"}
	for _, tt := range []struct {
		name string
		errs []error // of the handler, in turn
		want []time.Duration
		dead string // the class
	}{
		{name: "longer than any wait", errs: []error{handling.RetryAfter(errPlayed, 48*time.Hour)}, want: []time.Duration{48 * time.Hour}},
		{name: "shorter, and again", errs: []error{handling.RetryAfter(errPlayed, time.Millisecond), handling.RetryAfter(errPlayed, 2*time.Second)}, want: []time.Duration{time.Millisecond, 2 * time.Second}},
		{name: "at once", errs: []error{handling.RetryAfter(errPlayed, 0), handling.RetryAfter(errPlayed, -time.Hour)}, want: []time.Duration{0, 0}},
		{name: "within another error", errs: []error{fmt.Errorf("order: %w", handling.RetryAfter(errPlayed, time.Hour))}, want: []time.Duration{time.Hour}},
		{name: "the outermost", errs: []error{handling.RetryAfter(handling.RetryAfter(errPlayed, time.Second), time.Hour)}, want: []time.Duration{time.Hour}},
		{name: "a conflict is not repeated sooner", errs: []error{handling.RetryAfter(conflict, time.Hour)}, want: []time.Duration{time.Hour}},
		{name: "as often as any other", errs: []error{handling.RetryAfter(errPlayed, 1), handling.RetryAfter(errPlayed, 2), handling.RetryAfter(errPlayed, 3)}, want: []time.Duration{1, 2}, dead: "handler"},
		{name: "not at all", errs: []error{handling.RetryAfter(handling.Permanent(errPlayed), time.Hour)}, dead: "permanent"},
		{name: "not at all, the other way round", errs: []error{handling.Permanent(handling.RetryAfter(errPlayed, time.Hour))}, dead: "permanent"},
	} {
		for _, events := range [][]string{{"a"}, {"a", "b"}} { // alone, and in a batch
			t.Run(fmt.Sprint(tt.name, ", ", len(events)), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var waits []time.Duration
					var last time.Time
					errs := tt.errs
					s := newPartitionFixture(t, Rules{Rules: &handling.Rules{Retry: handling.RetryPolicy{MaxRetries: 2}}}, handle("LATER", func(_ context.Context, _ pgx.Tx, e played, m envelope.Received) error {
						if e.Name != "a" {
							return nil
						}
						if m.Attempt > 1 {
							waits = append(waits, time.Since(last))
						}
						last = time.Now()
						if len(errs) == 0 {
							return nil
						}
						err := errs[0]
						errs = errs[1:]
						return err
					}))
					s.worker.handle(s.arrive(events...))
					require.Equal(t, tt.want, waits)
					require.Empty(t, errs)
					next, _ := s.worker.uncommitted()
					require.EqualValues(t, len(events), next.Offset)
					if tt.dead == "" {
						require.Empty(t, s.records)
						return
					}
					require.Len(t, s.records, 1)
					require.Equal(t, tt.dead, headerOf(s.records[0], deadletter.ErrorClass))
				})
			})
		}
	}
}

// An outage of PostgreSQL that a handler without a transaction meets does not count, and the next
// try is no sooner than the handler says.
func TestRetryAfterInOutage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s *partitionFixture
		var calls []time.Duration
		began := time.Now()
		s = newPartitionFixture(t, Rules{Rules: &handling.Rules{Retry: handling.RetryPolicy{MaxRetries: -1}}}, handleNoTx("LATER", func(context.Context, played, envelope.Received) error {
			calls = append(calls, time.Since(began))
			if s.transactions = ""; len(calls) == 1 {
				s.transactions = "o"
				return handling.RetryAfter(errPlayed, time.Hour)
			}
			return nil
		}))
		s.worker.handle(s.arrive("a"))
		require.Equal(t, []time.Duration{0, time.Hour}, calls)
		require.Empty(t, s.records)
	})
}

// A stop does not wait for the next try of an event.
func TestStopBeforeRetryAfter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newPartitionFixture(t, Rules{}, handle("LATER", func(context.Context, pgx.Tx, played, envelope.Received) error {
			return handling.RetryAfter(errPlayed, 1000*time.Hour)
		}))
		began := time.Now()
		time.AfterFunc(time.Hour, s.worker.finish)
		s.worker.handle(s.arrive("a"))
		require.Equal(t, time.Hour, time.Since(began))
		require.Empty(t, s.records)
		_, advanced := s.worker.uncommitted()
		require.False(t, advanced)
	})
}

// The handler of a single event runs once for each attempt, and each failure reaches the hook.
func TestPartitionWorkerCountsAttempts(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		play      string
		retries   int
		want      []string
		wantHooks []int // attempts that have failed
	}{
		{"------", 3, []string{"a1: rolled back", "a2: rolled back", "a3: rolled back", "a4: rolled back", "dead letter a after 4: handler"}, []int{1, 2, 3, 4}},
		{"------", -1, []string{"a1: rolled back", "dead letter a after 1: handler"}, []int{1}},
		{"pppp", 3, []string{"a1: rolled back", "dead letter a after 1: permanent"}, []int{1}},
		{"-", 3, []string{"a1: rolled back", "a2: committed"}, []int{1}},
	} {
		synctest.Test(t, func(t *testing.T) {
			var failed []int
			s := newPartitionFixture(t, Rules{Rules: &handling.Rules{Retry: handling.RetryPolicy{MaxRetries: tt.retries}, Hooks: handling.Hooks{
				Failed: func(m *envelope.Received, _ string, _ error, _ bool) { failed = append(failed, m.Attempt) },
			}}})
			s.handlers["a"] = tt.play
			s.worker.handle(s.arrive("a"))
			require.Equal(t, tt.want, s.log)
			require.Equal(t, tt.wantHooks, failed)
		})
	}
}

// What PostgreSQL asks to be repeated is repeated with pauses, ten times in two seconds at most,
// and each time reaches a hook. Then it counts as any other failure.
func TestPartitionWorkerConflicts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var conflicts, failed int
		s := newPartitionFixture(t, Rules{Rules: &handling.Rules{Retry: handling.RetryPolicy{MaxRetries: 1}, Hooks: handling.Hooks{
			Conflicted: func(m *envelope.Received, _ string, _ error) { conflicts++; require.Equal(t, 1, m.Attempt) },
			Failed:     func(m *envelope.Received, _ string, _ error, _ bool) { failed++; require.Equal(t, failed, m.Attempt) },
		}}})
		s.handlers["a"] = strings.Repeat("4", 100)
		began := time.Now()
		s.worker.handle(s.arrive("a"))
		require.Equal(t, "dead letter a after 2: postgres_40001", s.log[len(s.log)-1])
		require.Len(t, s.log, 10+2+1)
		require.Equal(t, []int{10, 2}, []int{conflicts, failed})
		require.InDelta(t, 2500*time.Millisecond, time.Since(began), float64(time.Second), "and the wait before the retry")

		s.log, s.handlers["b"] = nil, "444"
		s.worker.handle(s.arrive("b"))
		require.Equal(t, []string{"b1: rolled back", "b1: rolled back", "b1: rolled back", "b1: committed"}, s.log)
	})
}

// A handler that has once changed settings shares no transaction any more.
func TestPartitionWorkerKeepsHandlersApart(t *testing.T) {
	t.Parallel()
	s := newPartitionFixture(t, Rules{})
	s.handlers["a"] = "="
	s.worker.handle(s.arrive("a", "b"))
	s.log = nil
	s.worker.handle(s.arrive("c", "d"))
	require.Equal(t, []string{"c1: committed", "d1: committed"}, s.log)
}

// A handler that takes too long is a failure of the event, even if PostgreSQL is
// unavailable by then.
func TestPartitionWorkerTimesOut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var attempts []int
		s := newPartitionFixture(t, Rules{Rules: &handling.Rules{Retry: handling.RetryPolicy{MaxRetries: 1}}}, handleNoTx("SLOW", func(ctx context.Context, _ played, m envelope.Received) error {
			attempts = append(attempts, m.Attempt)
			<-ctx.Done()
			return ctx.Err()
		}))
		s.transactions = "oooooo"
		began := time.Now()
		s.worker.handle(s.arrive("a"))
		require.Equal(t, []int{1, 2}, attempts)
		require.Equal(t, []string{"dead letter a after 2: timeout"}, s.log)
		require.InDelta(t, defaultMaxPollInterval, time.Since(began), float64(2*time.Second), "twice HandlerTimeout, and the wait in between")
	})
}

// A codec that takes too long costs its own event a dead letter, and no other event of the
// batch: each record has as long as a handler.
func TestPartitionWorkerDecodesEachInTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newPartitionFixture(t, Rules{})
		records := s.arrive("a", "b", "c", "d")
		decode := s.worker.reader.decode
		s.worker.reader.decode = func(r *kgo.Record) (*envelope.Message, error) {
			time.Sleep(defaultMaxPollInterval / 3) // a and b take longer than one may
			return decode(r)
		}
		slow := &s.worker.reader.processor.Routes.ByName[playedType].Kind
		read := slow.Codec.Decode
		slow.Codec.Decode = func(ctx context.Context, data []byte, event any) error {
			if err := read(ctx, data, event); err != nil || event.(*played).Name != "c" {
				return cmp.Or(err, ctx.Err())
			}
			<-ctx.Done()
			return ctx.Err()
		}
		s.worker.handle(records)
		require.Equal(t, []string{"a1 b1 d1: committed", "dead letter c after 0: undecodable"}, s.log)
	})
}

// A full queue pauses its partition until half of it is handled.
func TestPartitionWorkerQueue(t *testing.T) {
	t.Parallel()
	s := newPartitionFixture(t, Rules{MaxPoll: 5_000})
	take := func() int {
		records := s.worker.take()
		s.worker.drop(sizeOf(records))
		return len(records)
	}
	records := make([]*kgo.Record, queueRecords)
	for i := range records {
		records[i] = &kgo.Record{Value: []byte("v")}
	}
	s.worker.add(records)
	require.Empty(t, s.paused, "full, and not more")
	s.worker.add(records[:1])
	s.worker.add(records[:1])
	require.Equal(t, []bool{true}, s.paused)
	require.Equal(t, 5_000, take())
	require.Equal(t, 5_000, take())
	require.Equal(t, []bool{true}, s.paused)
	take()
	require.Equal(t, []bool{true, false}, s.paused)

	s.worker.add([]*kgo.Record{{Value: make([]byte, queueBytes)}})
	require.Equal(t, []bool{true, false, true}, s.paused, "bytes count, too")
	for take() > 0 {
	}
	require.Equal(t, []bool{true, false, true, false}, s.paused)
	require.Zero(t, s.worker.limits.budget.Used())
}

// The queues of all partitions have a common bound. Each partition has a share that the others
// cannot take. Partitions with more work use the room that other partitions do not need.
func TestQueuesOfAllPartitions(t *testing.T) {
	t.Parallel()
	const partitions, size = 100, 100_000
	s := newPartitionFixture(t, Rules{})
	workers := []*partitionWorker{s.worker}
	for len(workers) < partitions {
		workers = append(workers, newPartitionWorker(s.worker.partition, s.worker.reader, s, s.worker.cfg, s.worker.limits, s.worker.outages))
	}
	fill := func(w *partitionWorker) {
		for !w.isPaused() {
			w.add([]*kgo.Record{{Value: make([]byte, size)}})
		}
	}
	fill(s.worker)
	require.Greater(t, s.worker.bytes, queueBytes, "alone, it has as much as ever")
	for _, w := range workers[1:] {
		fill(w)
		if budget := s.worker.limits.budget; budget.IsOver() {
			require.Positive(t, w.bytes, "it has something, although there is too much already")
		} else {
			require.Greater(t, w.bytes, budget.Share(), "its share")
		}
	}
	require.Less(t, s.worker.limits.budget.Used(), defaultMaxQueueBytes+partitions*size, "each by at most what was added last")
	for _, w := range workers {
		for w.isPaused() {
			w.drop(sizeOf(w.take()))
		}
		require.Less(t, w.bytes, defaultMaxQueueBytes/4)
		w.close()
	}
	require.Zero(t, s.worker.limits.budget.Used())
}

// run handles what is added until it is stopped.
func TestPartitionWorkerRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newPartitionFixture(t, Rules{MaxPoll: 2})
		go s.worker.run()
		records := s.arrive("a", "b", "c")
		s.worker.add(records[:1])
		synctest.Wait()
		s.worker.add(records)
		synctest.Wait()
		s.worker.finish()
		<-s.worker.ended
		s.worker.add(records)
		require.Equal(t, []string{"a1: committed", "b1: committed", "c1: committed"}, s.log, "a is a repeat the second time")
	})
}
