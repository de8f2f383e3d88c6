package itest

import (
	"context"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// What a process had that is gone, another one handles. What has ended its process with each attempt becomes DEAD,
// with a dead letter, and what was behind it goes on.
func TestParkedEventOfGoneProcess(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := newParkingFixture(t, 1)
	cfg := s.config(t)
	cfg.Retry.MaxRetries, cfg.Retry.RetryWait, cfg.Retry.MaxRetryWait = 3, time.Hour, time.Hour
	stop := testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", func(context.Context, pgx.Tx, sale, outbox.Metadata) error { return errPlay })).Run)
	s.send(t, s.sale("a", 1), s.sale("a", 2), s.sale("deadly", 1), s.sale("deadly", 2))
	s.awaitOffset(t, 0, 4)
	stop()
	s.awaitStatuses(t, "COUNTED", "PARKED 2 PENDING 2")
	s.exec(t, `UPDATE {s}.event_delivery SET status = 'PROCESSING', locked_by = 'gone/1', locked_until = now() - interval '1 second',
		updated_at = now() - interval '3 seconds', last_attempt_at = now() - interval '2 seconds', -- its handler had begun
		attempt_count = CASE partition_key WHEN 'a' THEN 2 ELSE 4 END WHERE status = 'PENDING'`)
	var deadly atomic.Bool
	testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		if sold(e) == "deadly 1" {
			deadly.Store(true)
		}
		return nil
	})).Run)
	h := deadLetterHeaders(s.deadLetters(t, 1)[0])
	require.Equal(t, []string{"4", "COUNTED", "2"}, []string{h["dlq_attempts"], h["dlq_action"], h["dlq_original_offset"]})
	s.awaitStatuses(t, "COUNTED", "DEAD 1 DONE 3")
	require.Equal(t, []int{1, 2}, s.journal(t, "COUNTED", "a"))
	require.Equal(t, []int{2}, s.journal(t, "COUNTED", "deadly"))
	require.False(t, deadly.Load())
}

// A stop ends within StopTimeout while parked events are handled, and gives them back.
func TestStopWhileParkedEventsAreHandled(t *testing.T) {
	t.Parallel()
	for _, form := range []string{"Handle", "HandleBatch", "HandleNoTx"} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			s := newParkingFixture(t, 1)
			cfg := s.config(t)
			cfg.StopTimeout = 4 * time.Second
			var stuck, open atomic.Int64
			c := s.groupConsumer(t, s.group, cfg, s.handler(form, "COUNTED", func(ctx context.Context, _ pgx.Tx, _ sale, m outbox.Metadata) error {
				if m.Attempt > 1 && open.Load() == 0 {
					stuck.Add(1)
					<-ctx.Done()
					return ctx.Err()
				}
				if open.Load() == 0 {
					return errPlay
				}
				return nil
			}))
			var records []*kgo.Record
			for i := range 20 {
				records = append(records, s.sale(fmt.Sprint("p-", i%10), i/10+1))
			}
			s.send(t, records...)
			stop := testenv.Run(t, c.Run)
			s.awaitOffset(t, 0, 20)
			require.Eventually(t, func() bool { return stuck.Load() >= 4 }, testenv.Patience, 10*time.Millisecond)
			began := time.Now()
			stop()
			require.Less(t, time.Since(began), cfg.StopTimeout+500*time.Millisecond)
			require.Equal(t, "PARKED 10 PENDING 10", s.statuses(t, "COUNTED"))
			require.Equal(t, 1, s.number(t, `SELECT max(attempt_count) FROM {s}.event_delivery`), "a stop is no attempt")
			open.Store(1)
			testenv.Run(t, c.Run)
			s.awaitStatuses(t, "COUNTED", "DONE 20")
			for i := range 10 {
				require.Equal(t, []int{1, 2}, s.journal(t, "COUNTED", fmt.Sprint("p-", i)))
			}
		})
	}
}

// Members come and go while many events fail, some of them until they are DEAD. In the end each event is handled
// once, or DEAD, and for each key and action in order.
func TestParkingAtRandom(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	testenv.RealBrokers(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	const partitions, products = 4, 40
	s := newParkingFixture(t, partitions)
	cfg := s.config(t)
	cfg.Retry.MaxRetries, cfg.Retry.RetryWait, cfg.Retry.MaxRetryWait = 4, 30*time.Millisecond, 200*time.Millisecond
	cfg.Retry.MaxOutage = -1
	cfg.MaxPoll = 20
	// failures returns how often an action fails on a sale; 5 is too often.
	failures := func(action string, e sale) int {
		h := fnv.New64a()
		fmt.Fprint(h, seed, action, sold(e))
		switch n := h.Sum64() % 1000; {
		case n < 5:
			return 5
		case n < 50:
			return int(n % 5)
		}
		return 0
	}
	fails := func(action string) play {
		return func(_ context.Context, _ pgx.Tx, e sale, m outbox.Metadata) error {
			if m.Attempt <= failures(action, e) {
				return errPlay
			}
			return nil
		}
	}
	forms := map[string]string{"ONE": "Handle", "MANY": "HandleBatch"}
	start := func() func() {
		var handlers []outbox.Handler
		for action, form := range forms {
			handlers = append(handlers, s.handler(form, action, fails(action)))
		}
		c, err := outbox.NewConsumer(s.db, append(testenv.KafkaOpts(s.brokers), kgo.SessionTimeout(6*time.Second), kgo.HeartbeatInterval(200*time.Millisecond)), s.events, s.group, cfg, handlers...)
		require.NoError(t, err)
		return testenv.Run(t, c.Run)
	}
	sent := make([]int, products)
	var ended sync.WaitGroup
	until := time.Now().Add(20 * time.Second)
	members := []func(){start(), start()}
	for time.Now().Before(until) {
		var records []*kgo.Record
		for range 100 {
			p := random.IntN(products)
			sent[p]++
			r := s.sale(fmt.Sprint("p-", p), sent[p])
			r.Partition = int32(p % partitions)
			records = append(records, r)
		}
		s.send(t, records...)
		time.Sleep(time.Duration(random.IntN(300)) * time.Millisecond)
		switch n := random.IntN(10); {
		case n == 0 && len(members) < 3:
			members = append(members, start())
		case n == 1 && len(members) > 1:
			ended.Go(members[0])
			members = members[1:]
		}
	}
	ended.Wait()
	dead := 0
	for p := range products {
		product := fmt.Sprint("p-", p)
		for action := range forms {
			var want []int
			for n := range sent[p] {
				if failures(action, sale{Product: product, Amount: n + 1}) < 5 {
					want = append(want, n+1)
				} else {
					dead++
				}
			}
			s.awaitProgress(t, action, product, len(want), seed)
			require.True(t, slices.Equal(want, s.journal(t, action, product)), "%s %s, seed %d: %v", action, product, seed, s.journal(t, action, product))
		}
	}
	require.Eventually(t, func() bool {
		return s.number(t, `SELECT count(*)::int FROM {s}.event_delivery WHERE status NOT IN ('DONE', 'DEAD')`) == 0
	}, testenv.Patience, 50*time.Millisecond, "seed %d", seed)
	require.Equal(t, dead, s.number(t, `SELECT count(*)::int FROM {s}.event_delivery WHERE status = 'DEAD'`), "seed %d", seed)
	t.Logf("%d events were dead, %d parked", dead, s.number(t, `SELECT count(*)::int FROM {s}.event_delivery`))
}

// awaitProgress waits until a journal has n entries. It may take long on a slow machine, as long as the members get on.
func (s *parkingFixture) awaitProgress(t *testing.T, action, product string, n int, seed uint64) {
	t.Helper()
	most, since := 0, time.Now()
	for {
		if len(s.journal(t, action, product)) >= n {
			return
		}
		if all := s.number(t, `SELECT count(*)::int FROM {s}.journal`); all > most {
			most, since = all, time.Now()
		}
		require.Less(t, time.Since(since), testenv.Patience, "%s %s, seed %d: %d events in all are handled, and no more", action, product, seed, most)
		time.Sleep(50 * time.Millisecond)
	}
}

// What the decoder passes over now, among parked events that are handled together, is done.
func TestParkedEventIsPassedOver(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	var open atomic.Bool
	cfg := s.config(t)
	cfg.Decode = func(r *kgo.Record) (*outbox.Message, error) {
		if open.Load() && r.Offset == 3 {
			return nil, nil
		}
		return outbox.DecodeCloudEvent(r)
	}
	testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		if !open.Load() && e.Amount == 1 {
			return errPlay
		}
		return nil
	})).Run)
	for n := range 6 {
		s.send(t, s.sale("k", n+1))
	}
	s.awaitOffset(t, 0, 6)
	open.Store(true)
	began := time.Now()
	s.awaitStatuses(t, "COUNTED", "DONE 6")
	require.Less(t, time.Since(began), 10*time.Second, "it does not wait until a lease expires")
	require.Equal(t, []int{1, 2, 3, 5, 6}, s.journal(t, "COUNTED", "k"))
}
