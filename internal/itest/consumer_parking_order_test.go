package itest

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/testenv"
)

// An operator retries the first event of a key. While its handler runs, the second event arrives, and the first one is
// done before the handler of the second one could end. That handler must not begin before: it would not see the effect
// of the first one.
func TestHandlersOfAKeyDoNotOverlap(t *testing.T) {
	t.Parallel()
	for _, form := range []string{"Handle", "HandleBatch"} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			s := newParkingFixture(t, 1)
			var repaired, overlapped atomic.Bool
			began, release := make(chan struct{}), make(chan struct{})
			end := sync.OnceFunc(func() { close(release) })
			run := func() (stop func()) {
				h := s.handler(form, "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
					switch sold(e) {
					case "k 1":
						if !repaired.Load() {
							return outbox.Permanent(errPlay)
						}
						close(began)
						<-release
					case "k 2":
						if len(s.journal(t, "COUNTED", "k")) == 0 {
							overlapped.Store(true)
							end()
							require.Eventually(t, func() bool { return len(s.journal(t, "COUNTED", "k")) == 1 }, testenv.Patience, 10*time.Millisecond)
						}
					}
					return nil
				})
				return testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), h).Run)
			}
			stop := run()
			s.send(t, s.sale("k", 1))
			s.awaitStatuses(t, "COUNTED", "DEAD 1")
			s.awaitOffset(t, 0, 1)
			stop()
			repaired.Store(true)
			s.retryDead(t, 1)
			run() // which has seen no key that was blocked
			<-began
			s.send(t, s.sale("k", 2), s.sale("other", 1))
			s.awaitJournal(t, "COUNTED", "other", 1)
			end()
			s.awaitJournal(t, "COUNTED", "k", 2)
			require.False(t, overlapped.Load(), "the second event was handled while the first one was not done")
		})
	}
}

// holdSecond runs a consumer. For "k 1" its handler does what first says. Its first call for "k 2" closes began, and
// ends when release is closed. Calls counts those for "k 2".
func (s *parkingFixture) holdSecond(t *testing.T, first func() error) (began, release chan struct{}, calls *atomic.Int32) {
	began, release, calls = make(chan struct{}), make(chan struct{}), new(atomic.Int32)
	h := s.handler("Handle", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		switch {
		case sold(e) == "k 1":
			return first()
		case sold(e) == "k 2" && calls.Add(1) == 1:
			close(began)
			<-release
		}
		return nil
	})
	testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), h).Run)
	return began, release, calls
}

// An operator retries the first event of a key while the handler of the second one runs, and it is done before that
// ends. The second one is handled again: its handler may not have seen the effect of the first one.
func TestRequeuedWhileALaterEventIsHandled(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"read committed", "repeatable read"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			s := newParkingFixture(t, 1)
			s.db = testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = level })
			var repaired atomic.Bool
			began, release, calls := s.holdSecond(t, func() error {
				if repaired.Load() {
					return nil
				}
				return outbox.Permanent(errPlay)
			})
			s.send(t, s.sale("k", 1))
			s.awaitStatuses(t, "COUNTED", "DEAD 1")
			s.send(t, s.sale("k", 2))
			<-began
			repaired.Store(true)
			s.retryDead(t, 1)
			s.awaitStatuses(t, "COUNTED", "DONE 1")
			close(release)
			s.awaitJournal(t, "COUNTED", "k", 2)
			require.EqualValues(t, 2, calls.Load(), "the first call was in vain")
		})
	}
}

// The transaction in which the handler runs takes so long that it ends before it has reached a third event of the key,
// which another one would handle before the second is parked.
func TestRequeuedWhileALaterEventTakesLong(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	var repaired atomic.Bool
	began, release, calls := s.holdSecond(t, func() error {
		if repaired.Load() {
			return nil
		}
		return outbox.Permanent(errPlay)
	})
	s.send(t, s.sale("k", 1))
	s.awaitStatuses(t, "COUNTED", "DEAD 1")
	s.send(t, s.sale("k", 2), s.sale("other", 1), s.sale("k", 3), s.sale("other", 2))
	<-began
	held := time.Now()
	repaired.Store(true)
	s.retryDead(t, 1)
	s.awaitStatuses(t, "COUNTED", "DONE 1")
	time.Sleep(time.Until(held.Add(handling.TransactionTime)))
	close(release)
	s.awaitJournal(t, "COUNTED", "k", 3)
	s.awaitJournal(t, "COUNTED", "other", 2)
	require.EqualValues(t, 2, calls.Load(), "the first call was in vain")
}

// The first event of a key is in another partition, as after a change of their number. It fails, is parked and done
// while the handler of the second one runs.
func TestParkedWhileALaterEventIsHandled(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 2)
	var first atomic.Int32
	began, release, calls := s.holdSecond(t, func() error {
		if first.Add(1) == 1 {
			return errPlay
		}
		return nil
	})
	behind := s.sale("k", 2)
	behind.Partition = 1
	s.send(t, behind)
	<-began
	s.send(t, s.sale("k", 1))
	s.awaitStatuses(t, "COUNTED", "DONE 1")
	close(release)
	s.awaitJournal(t, "COUNTED", "k", 2)
	require.EqualValues(t, 2, calls.Load(), "the first call was in vain")
}

// A handler without a transaction is not called for an event while an earlier one of its key is retried, also if the
// retry has begun after the records were read.
func TestNoTxWaitsForRetriedEvent(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	var repaired, retrying, overlapped atomic.Bool
	busy, release := make(chan struct{}), make(chan struct{})
	h := s.handler("HandleNoTx", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		switch sold(e) {
		case "k 1":
			if !repaired.Load() {
				return outbox.Permanent(errPlay)
			}
			retrying.Store(true)
			defer retrying.Store(false)
			<-release
		case "other 1":
			close(busy)
			for !retrying.Load() {
				time.Sleep(10 * time.Millisecond)
			}
			time.Sleep(200 * time.Millisecond) // longer than a look serves
		case "k 2":
			overlapped.Store(retrying.Load())
		}
		return nil
	})
	testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), h).Run)
	s.send(t, s.sale("k", 1))
	s.awaitStatuses(t, "COUNTED", "DEAD 1")
	s.send(t, s.sale("other", 1), s.sale("k", 2), s.sale("another", 1))
	<-busy
	repaired.Store(true)
	s.retryDead(t, 1)
	s.awaitJournal(t, "COUNTED", "another", 1)
	close(release)
	s.awaitJournal(t, "COUNTED", "k", 2)
	require.False(t, overlapped.Load(), "the second event was handled while the first one was retried")
}

// A look asks for all events that the batch still has: also for one that comes before the next look.
func TestNoTxWaitsBehindOneLook(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	var repaired, retrying, overlapped atomic.Bool
	busy, release := make(chan struct{}), make(chan struct{})
	h := s.handler("HandleNoTx", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		switch sold(e) {
		case "d 1":
			if !repaired.Load() {
				return outbox.Permanent(errPlay)
			}
			retrying.Store(true)
			defer retrying.Store(false)
			<-release
		case "b 1":
			close(busy)
			for !retrying.Load() {
				time.Sleep(10 * time.Millisecond)
			}
			time.Sleep(150 * time.Millisecond) // longer than a look serves
		case "c 1":
			time.Sleep(50 * time.Millisecond) // less
		case "d 2":
			overlapped.Store(retrying.Load())
		}
		return nil
	})
	testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), h, s.handler("Handle", "SEEN", nil)).Run)
	s.send(t, s.sale("d", 1))
	s.awaitStatuses(t, "COUNTED", "DEAD 1")
	s.send(t, s.sale("a", 1), s.sale("b", 1), s.sale("c", 1), s.sale("d", 2), s.sale("e", 1))
	<-busy
	repaired.Store(true)
	s.retryDead(t, 1)
	s.awaitJournal(t, "COUNTED", "e", 1)
	close(release)
	s.awaitJournal(t, "COUNTED", "d", 2)
	require.False(t, overlapped.Load(), "the second event was handled while the first one was retried")
	for _, product := range []string{"a", "b", "c", "d", "e"} {
		s.awaitJournal(t, "COUNTED", product, len(s.journal(t, "SEEN", product)))
	}
}

// A look does not serve for a call that waits for the end of a pause.
func TestNoTxLooksBehindPause(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	var c *outbox.Consumer
	paused := make(chan error, 1)
	h := s.handler("HandleNoTx", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		switch sold(e) {
		case "k 1":
			return outbox.Permanent(errPlay)
		case "other 1":
			paused <- c.Pause()
		}
		return nil
	})
	c = s.groupConsumer(t, s.group, s.config(t), h)
	testenv.Run(t, c.Run)
	s.send(t, s.sale("k", 1))
	s.awaitStatuses(t, "COUNTED", "DEAD 1")
	s.send(t, s.sale("other", 1), s.sale("k", 2))
	require.NoError(t, <-paused)
	s.awaitJournal(t, "COUNTED", "other", 1)
	s.exec(t, `UPDATE {s}.event_delivery SET status = 'PROCESSING', locked_by = 'another/1', locked_until = now() + interval '1 hour'`)
	time.Sleep(150 * time.Millisecond) // longer than a look serves
	require.NoError(t, c.Resume())
	s.awaitStatuses(t, "COUNTED", "PARKED 1 PROCESSING 1")
	require.Empty(t, s.journal(t, "COUNTED", "k"))
}

// An event has two handlers without a transaction. The first one is done, and then an earlier event of the key blocks
// all of them. The first one is not called again.
func TestNoTxIsDoneBeforeWholeKeyIsBlocked(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	cfg := s.config(t)
	cfg.HoldDead = true
	block := func() {
		s.exec(t, `UPDATE {s}.event_delivery SET status = 'PROCESSING', locked_by = 'another/1', locked_until = now() + interval '1 hour' WHERE action = ''`)
	}
	first := s.handler("HandleNoTx", "FIRST", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		if sold(e) == "k 2" {
			block()
			time.Sleep(150 * time.Millisecond) // longer than a look serves
		}
		return nil
	})
	stop := testenv.Run(t, s.groupConsumer(t, s.group, cfg, first, s.handler("HandleNoTx", "SECOND", nil)).Run)
	unreadable := s.sale("k", 1)
	unreadable.Value = []byte("{")
	s.send(t, unreadable)
	s.awaitStatuses(t, "", "DEAD 1")
	s.exec(t, `UPDATE {s}.event_delivery SET status = 'DONE', held = false WHERE action = ''`)
	s.send(t, s.sale("k", 2))
	s.awaitOffset(t, 0, 2)
	stop()
	require.Equal(t, "SECOND PARKED", s.text(t, `SELECT string_agg(action || ' ' || status, ', ') FROM {s}.event_delivery WHERE action <> ''`))
	require.Equal(t, []int{2}, s.journal(t, "FIRST", "k"))
}
