package itest

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// endUncleanly has PostgreSQL say that processes have ended at an offset of partition 0, the last one now.
func (s *parkingFixture) endUncleanly(t testing.TB, offset int64) {
	t.Helper()
	s.exec(t, `UPDATE {s}.consumer_start SET assigned_to = gen_random_uuid(), read_from = $1, unclean_ends = 2 WHERE partition = 0`, offset)
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
	retried, err := s.failures(t).RetryAll(background, s.dead(), bulk, operator)
	require.NoError(t, err)
	require.Equal(t, 1, retried)
	for _, action := range []string{"COUNTED", "SEEN"} {
		journal(action, 1, 3, 2)
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
