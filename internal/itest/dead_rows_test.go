package itest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxdlq"
	"github.com/outboxgo/outbox/outboxops"
)

// A large value that cannot be decoded is only in the dead letter. A retry without it says so, and a replay of the dead
// letter brings it back.
func TestDeadRowsAreBounded(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	fixed := new(atomic.Bool)
	cfg := s.config(t)
	cfg.Decode = decodeExcept("large", fixed)
	testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", nil)).Run)
	const n, size = 100, 500_000
	var records []*kgo.Record
	for i := range n {
		r := s.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"product":"k","amount":%d,"note":"large %s"}`, i+1, strings.Repeat("x", size)))
		r.Key = []byte("k")
		records = append(records, r)
	}
	for _, r := range append(records, s.sale("small", 1)) { // a batch of all would be too large
		s.send(t, r)
	}
	s.awaitJournal(t, "COUNTED", "small", 1)
	s.awaitStatuses(t, "", fmt.Sprint("DEAD ", n))
	for _, r := range s.deadLetters(t, n) {
		require.Greater(t, len(r.Value), size)
	}
	bytes := s.number(t, `SELECT (sum(octet_length(payload_bytes)) + sum(octet_length(record)))::int FROM {s}.event_delivery`)
	require.Less(t, bytes, 10_000_000)
	t.Log("bytes of rows:", bytes)

	fixed.Store(true)
	f := s.failures(t)
	all, err := f.List(background, s.dead(), outboxops.FailurePage{Limit: 1})
	require.NoError(t, err)
	one, err := f.Get(background, all[0].ID)
	require.NoError(t, err)
	require.ErrorIs(t, one.PayloadErr, outboxops.ErrUnreadable)
	require.ErrorContains(t, one.PayloadErr, "only the dead letter "+s.topic+".dlq-0-99 has it")
	s.retryDead(t, n)
	s.awaitStatuses(t, "", fmt.Sprint("DEAD ", n))
	require.Equal(t, n, s.number(t, `SELECT count(*)::int FROM {s}.event_delivery WHERE last_error_message LIKE '%outbox dlq replay%'`))
	s.deadLetters(t, n) // no others

	report, err := outboxdlq.Replay(background, testenv.KafkaOpts(s.brokers), outboxdlq.ReplayConfig{Topic: s.topic + ".dlq"})
	require.NoError(t, err)
	require.Equal(t, n, report.Sent)
	s.awaitStatuses(t, "", fmt.Sprint("DONE ", n))
	s.awaitJournal(t, "COUNTED", "k", n)
}

// large returns a sale with a value that a dead row does not keep.
func (s *parkingFixture) large(product string, n int) *kgo.Record {
	r := s.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"product":%q,"amount":%d,"note":"large %s"}`, product, n, strings.Repeat("x", 100_000)))
	r.Key = []byte(product)
	return r
}

// replay sends all dead letters back, and returns their number.
func (s *parkingFixture) replay(t testing.TB) (sent int) {
	t.Helper()
	report, err := outboxdlq.Replay(background, testenv.KafkaOpts(s.brokers), outboxdlq.ReplayConfig{Topic: s.topic + ".dlq"})
	require.NoError(t, err)
	return report.Sent
}

// stripped returns how many rows of an action have their value in a dead letter only.
func (s *parkingFixture) stripped(t testing.TB, action string) (n int) {
	t.Helper()
	require.NoError(t, s.db.QueryRow(background, s.sql(`SELECT count(*)::int FROM {s}.event_delivery
		WHERE action = $1 AND status = 'DEAD' AND dead_letter IS NOT NULL AND octet_length(payload_bytes) = 0`), action).Scan(&n))
	return n
}

// A parked event whose row PostgreSQL cannot read is dead, with a dead letter that says so, and the next event of its
// key is handled.
func TestDamagedRowIsDead(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	random := make([]byte, 20_000)
	_, _ = rand.NewChaCha8([32]byte{}).Read(random)
	var fixed atomic.Bool
	testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), s.handler("Handle", "COUNTED", func(context.Context, pgx.Tx, sale, outbox.Metadata) error {
		if fixed.Load() {
			return nil
		}
		return outbox.RetryAfter(errPlay, time.Hour)
	})).Run)
	for n := range 2 {
		r := s.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"product":"k","amount":%d,"note":"%x"}`, n+1, random))
		r.Key = []byte("k")
		s.send(t, r)
		s.awaitStatuses(t, "COUNTED", []string{"PENDING 1", "PARKED 1 PENDING 1"}[n])
		if n == 0 {
			testenv.Damage(t, s.db, s.schema, "event_delivery")
		}
	}
	fixed.Store(true)
	s.exec(t, `UPDATE {s}.event_delivery SET next_retry_at = now() WHERE status = 'PENDING'`)
	s.awaitStatuses(t, "COUNTED", "DEAD 1 DONE 1")
	require.Equal(t, []int{2}, s.journal(t, "COUNTED", "k"))
	dead := s.deadLetters(t, 1)[0]
	require.Equal(t, []string{"k", ""}, []string{string(dead.Key), string(dead.Value)})
	headers := deadLetterHeaders(dead)
	require.Equal(t, []string{"0", "undecodable", "COUNTED"}, []string{headers[outbox.DeadLetterOriginalOffset], headers[outbox.DeadLetterClass], headers[outbox.DeadLetterAction]})
	require.Contains(t, headers[outbox.DeadLetterError], "XX001")
	require.Contains(t, headers["dlq_unread"], "event_delivery")
}

// Under HoldDead, later events of a key wait behind a dead event without its value, also after a retry in vain, until
// the event is replayed or resolved. A second replay, or one after the resolution, changes nothing.
func TestHoldDeadBehindStrippedRow(t *testing.T) {
	t.Parallel()
	for name, replayed := range map[string]bool{"replayed": true, "resolved": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newParkingFixture(t, 1)
			fixed := new(atomic.Bool)
			cfg := s.config(t)
			cfg.HoldDead, cfg.Decode = true, decodeExcept("large", fixed)
			testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", nil)).Run)
			s.send(t, s.large("k", 1), s.sale("k", 2), s.sale("k", 3), s.sale("other", 1))
			s.awaitJournal(t, "COUNTED", "other", 1)
			s.awaitStatuses(t, "", "DEAD 1")
			s.awaitStatuses(t, "COUNTED", "PARKED 2")
			require.Equal(t, 1, s.stripped(t, ""))
			fixed.Store(true)
			f, dead := s.failure(t)
			require.NoError(t, f.Retry(background, dead.ID, operator))
			require.Eventually(t, func() bool {
				return s.number(t, `SELECT count(*)::int FROM {s}.event_delivery WHERE status = 'DEAD' AND held AND last_error_message LIKE '%outbox dlq replay%'`) == 1
			}, testenv.Patience, 10*time.Millisecond)
			s.awaitStatuses(t, "COUNTED", "PARKED 2")
			require.Empty(t, s.journal(t, "COUNTED", "k"))
			want, state := []int{1, 2, 3}, "DONE 1"
			if replayed {
				require.Equal(t, 1, s.replay(t))
			} else {
				require.NoError(t, f.Resolve(background, dead.ID, operator))
				want, state = want[1:], "DEAD 1"
			}
			s.awaitStatuses(t, "COUNTED", "DONE 2")
			s.awaitStatuses(t, "", state)
			require.Equal(t, want, s.journal(t, "COUNTED", "k"))
			end := int64(4)
			for range 2 {
				require.Equal(t, 1, s.replay(t))
				end++
			}
			if replayed {
				end++
			}
			s.awaitOffset(t, 0, end)
			s.awaitStatuses(t, "", state)
			s.deadLetters(t, 1)
			if replayed {
				require.Equal(t, want, s.journal(t, "COUNTED", "k"))
			}
		})
	}
}

// permanent is a play that fails for good until fixed is true.
func permanent(fixed *atomic.Bool) play {
	return func(context.Context, pgx.Tx, sale, outbox.Metadata) error {
		if fixed.Load() {
			return nil
		}
		return outbox.Permanent(errPlay)
	}
}

// A dead event of an action is stripped, too, and small ones keep their values. One that RetryDeadAfter retries keeps
// its value.
func TestStrippedRowOfAction(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	fixed := new(atomic.Bool)
	cfg := s.config(t)
	cfg.RetryDeadAfter = map[string]time.Duration{"undecodable": time.Hour}
	cfg.Decode = decodeExcept(`"later"`, new(atomic.Bool))
	testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", permanent(fixed)), s.handler("HandleNoTx", "SEEN", nil)).Run)
	s.send(t, s.large("k", 1), s.sale("small", 1), s.large("later", 1))
	s.awaitStatuses(t, "COUNTED", "DEAD 2")
	s.awaitStatuses(t, "", "DEAD 1")
	require.Equal(t, 1, s.stripped(t, "COUNTED"))
	require.Zero(t, s.stripped(t, ""))
	fixed.Store(true)
	s.retryDead(t, 3)
	s.awaitJournal(t, "COUNTED", "small", 1)
	require.Eventually(t, func() bool {
		return s.number(t, `SELECT count(*)::int FROM {s}.event_delivery WHERE action = 'COUNTED' AND status = 'DEAD' AND last_error_message LIKE '%outbox dlq replay%'`) == 1
	}, testenv.Patience, 10*time.Millisecond)
	require.GreaterOrEqual(t, s.replay(t), 3)
	s.awaitStatuses(t, "COUNTED", "DONE 2")
	for _, action := range []string{"COUNTED", "SEEN"} {
		for _, product := range []string{"k", "small"} {
			s.awaitJournal(t, action, product, 1)
		}
	}
}

// A stripped row may be with any process when its dead letter is replayed: it is requeued all the same.
func TestReplayOfRetriedStrippedRow(t *testing.T) {
	t.Parallel()
	for name, state := range map[string]string{
		"pending":    `status = 'PENDING'`,
		"parked":     `status = 'PARKED'`,
		"processing": `status = 'PROCESSING', locked_by = 'another', locked_until = now() + interval '1 hour'`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newParkingFixture(t, 1)
			fixed := new(atomic.Bool)
			run := func() (stop func()) {
				return testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), s.handler("Handle", "COUNTED", permanent(fixed))).Run)
			}
			stop := run()
			s.send(t, s.large("k", 1))
			s.awaitStatuses(t, "COUNTED", "DEAD 1")
			require.Equal(t, 1, s.stripped(t, "COUNTED"))
			s.awaitOffset(t, 0, 1)
			stop()
			fixed.Store(true)
			s.exec(t, `UPDATE {s}.event_delivery SET processed_at = NULL, put_back = true, attempt_count = 0, next_retry_at = now() + interval '1 hour', `+state)
			require.Equal(t, 1, s.replay(t))
			run()
			s.awaitStatuses(t, "COUNTED", "DONE 1")
			s.awaitJournal(t, "COUNTED", "k", 1)
			require.Equal(t, "1", s.text(t, `SELECT concat(position) FROM {s}.event_delivery`), "the offset of the replay")
		})
	}
}

// A worker of the group sends no dead letter for a stripped row, and owes none. A row that dies in a worker is stripped
// when a consumer has sent its dead letter.
func TestStrippedRowInAWorker(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	fixed := new(atomic.Bool)
	handler := s.handler("Handle", "COUNTED", permanent(fixed))
	consume := func(after map[string]time.Duration) (stop func()) {
		cfg := s.config(t)
		cfg.RetryDeadAfter = after
		return testenv.Run(t, s.groupConsumer(t, s.group, cfg, handler).Run)
	}
	work := func() (stop func()) {
		cfg := outbox.WorkerConfig{HandlerConfig: s.config(t).HandlerConfig, PollInterval: 50 * time.Millisecond}
		w, err := outbox.NewWorker(s.db, s.events, s.group, cfg, handler)
		require.NoError(t, err)
		return testenv.Run(t, w.Run)
	}
	retry := func() {
		f, dead := s.failure(t)
		require.NoError(t, f.Retry(background, dead.ID, operator))
	}
	stop := consume(map[string]time.Duration{"permanent": time.Hour})
	s.send(t, s.large("k", 1))
	s.awaitStatuses(t, "COUNTED", "DEAD 1")
	s.awaitOffset(t, 0, 1)
	stop()
	require.Zero(t, s.stripped(t, "COUNTED"), "RetryDeadAfter needs its value")
	s.deadLetters(t, 1)

	stop = work()
	retry()
	s.awaitStatuses(t, "COUNTED", "DEAD 1")
	stop()
	require.Equal(t, 1, s.number(t, `SELECT count(*)::int FROM {s}.event_delivery WHERE dead_letter_owed`))
	require.Zero(t, s.stripped(t, "COUNTED"))
	stop = consume(nil)
	require.Eventually(t, func() bool { return s.stripped(t, "COUNTED") == 1 }, testenv.Patience, 10*time.Millisecond)
	stop()
	s.deadLetters(t, 2)

	stop = work()
	retry()
	require.Eventually(t, func() bool {
		return s.number(t, `SELECT count(*)::int FROM {s}.event_delivery WHERE status = 'DEAD' AND NOT dead_letter_owed AND last_error_message LIKE '%outbox dlq replay%'`) == 1
	}, testenv.Patience, 10*time.Millisecond)
	stop()
	fixed.Store(true)
	consume(nil)
	s.deadLetters(t, 2)
	require.Equal(t, 2, s.replay(t))
	s.awaitStatuses(t, "COUNTED", "DONE 1")
	s.awaitJournal(t, "COUNTED", "k", 1)
}

// A row for all actions of an event loses its value again, after one of them has failed. A replay of its dead letter is
// for all actions still, not only for the failed one.
func TestReplayIsForAllActionsOfARow(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	readable, fixed := new(atomic.Bool), new(atomic.Bool)
	cfg := s.config(t)
	cfg.Decode = decodeExcept("large", readable)
	testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", permanent(fixed)), s.handler("Handle", "SEEN", nil)).Run)
	s.send(t, s.large("k", 1))
	s.awaitStatuses(t, "", "DEAD 1")
	s.deadLetters(t, 1)
	readable.Store(true)
	require.Equal(t, 1, s.replay(t))
	s.deadLetters(t, 2)
	require.Eventually(t, func() bool { return s.stripped(t, "") == 1 }, testenv.Patience, 10*time.Millisecond)
	fixed.Store(true)
	n := 0
	report, err := outboxdlq.Replay(background, testenv.KafkaOpts(s.brokers), outboxdlq.ReplayConfig{
		Topic: s.topic + ".dlq", Choose: func(outboxdlq.DeadLetter) bool { n++; return n == 2 },
	})
	require.NoError(t, err)
	require.Equal(t, 1, report.Sent)
	for _, action := range []string{"COUNTED", "SEEN"} {
		s.awaitJournal(t, action, "k", 1)
	}
}
