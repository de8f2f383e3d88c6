package itest

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// decodeExcept returns a decoder of CloudEvents that fails for values with a text, until fixed is true.
func decodeExcept(text string, fixed *atomic.Bool) func(*kgo.Record) (*outbox.Message, error) {
	return func(r *kgo.Record) (*outbox.Message, error) {
		if strings.Contains(string(r.Value), text) && !fixed.Load() {
			return nil, errors.New("cannot be read")
		}
		return outbox.DecodeCloudEvent(r)
	}
}

// Under HoldDead, the later events of a key wait behind an event that cannot be decoded, for all actions. Other keys
// go on.
func TestHoldDeadBehindUndecodable(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		decide func(*outboxops.Failures, outboxops.FailureID) error
		after  []int
		state  string
	}{
		"resolved": {func(f *outboxops.Failures, id outboxops.FailureID) error { return f.Resolve(background, id, operator) }, []int{2, 3}, "DEAD 1"},
		"released": {func(f *outboxops.Failures, id outboxops.FailureID) error { return f.Release(background, id, operator) }, []int{2, 3}, "DEAD 1"},
		"retried":  {func(f *outboxops.Failures, id outboxops.FailureID) error { return f.Retry(background, id, operator) }, []int{1, 2, 3}, "DONE 1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newParkingFixture(t, 1)
			fixed := new(atomic.Bool)
			cfg := s.config(t)
			cfg.HoldDead, cfg.Decode = true, decodeExcept(`"k","amount":1}`, fixed)
			testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", nil), s.handler("HandleNoTx", "SEEN", nil)).Run)
			s.send(t, s.sale("other", 1), s.sale("k", 1), s.sale("k", 2), s.sale("other", 2), s.sale("k", 3), s.sale("other", 3))
			for _, action := range []string{"COUNTED", "SEEN"} {
				s.awaitJournal(t, action, "other", 3)
			}
			s.awaitOffset(t, 0, 6)
			s.deadLetters(t, 1)
			for _, action := range []string{"COUNTED", "SEEN"} {
				require.Empty(t, s.journal(t, action, "k"), "%s: %s", action, s.rowStates(t))
			}
			s.awaitStatuses(t, "", "DEAD 1")
			for _, action := range []string{"COUNTED", "SEEN"} {
				s.awaitStatuses(t, action, "PARKED 2")
			}
			fixed.Store(true)
			f, dead := s.failure(t)
			require.NoError(t, tt.decide(f, dead.ID))
			for _, action := range []string{"COUNTED", "SEEN"} {
				s.awaitStatuses(t, action, "DONE 2")
				require.Equal(t, tt.after, s.journal(t, action, "k"))
			}
			s.send(t, s.sale("k", 4)) // directly
			for _, action := range []string{"COUNTED", "SEEN"} {
				require.Eventually(t, func() bool { return len(s.journal(t, action, "k")) == len(tt.after)+1 }, testenv.Patience, 10*time.Millisecond)
			}
			s.awaitStatuses(t, "", tt.state)
			s.deadLetters(t, 1)
		})
	}
}

// An event behind one that cannot be decoded also waits for an earlier event of its key that one action has failed.
func TestHoldDeadBehindBoth(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	cfg := s.config(t)
	cfg.HoldDead, cfg.Decode = true, decodeExcept(`"k","amount":2}`, new(atomic.Bool))
	testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "SEEN", nil), s.handler("Handle", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		if sold(e) == "k 1" {
			return outbox.Permanent(errPlay)
		}
		return nil
	})).Run)
	s.send(t, s.sale("k", 1))
	s.awaitStatuses(t, "COUNTED", "DEAD 1")
	s.send(t, s.sale("k", 2), s.sale("k", 3), s.sale("other", 1))
	s.awaitStatuses(t, "", "DEAD 1")
	s.awaitStatuses(t, "COUNTED", "DEAD 1 PARKED 1")
	s.awaitJournal(t, "COUNTED", "other", 1)
	f, err := outboxops.NewFailures(s.db, outboxops.FailuresConfig{Schema: s.schema})
	require.NoError(t, err)
	resolve := func(class string) {
		n, err := f.ResolveAll(background, outboxops.FailureFilter{Group: s.group, Statuses: []string{outbox.StatusDead}, Class: class}, bulk, operator)
		require.NoError(t, err)
		require.Equal(t, 1, n)
	}
	resolve("undecodable")
	require.Eventually(t, func() bool { // it was claimed, and waits
		return s.number(t, `SELECT count(*)::int FROM {s}.event_delivery WHERE action = 'COUNTED' AND status = 'PENDING' AND attempt_count = 0 AND last_error_code = 'blocked'`) == 1
	}, testenv.Patience, 10*time.Millisecond)
	require.Empty(t, s.journal(t, "COUNTED", "k"))
	resolve("permanent")
	s.awaitStatuses(t, "COUNTED", "DEAD 1 DONE 1")
	s.awaitStatuses(t, "SEEN", "DONE 1")
	require.Equal(t, []int{3}, s.journal(t, "COUNTED", "k"))
	require.Equal(t, []int{1, 3}, s.journal(t, "SEEN", "k"))
}

// An event that could not be decoded is retried although a later event of its key fails meanwhile, which may need it.
func TestRetryOfUndecodableBeforeFailing(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	fixed := new(atomic.Bool)
	cfg := s.config(t)
	cfg.Decode = decodeExcept(`"k","amount":1}`, fixed)
	testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		if sold(e) == "k 2" && len(s.journal(t, "COUNTED", "k")) == 0 {
			return errPlay
		}
		return nil
	})).Run)
	s.send(t, s.sale("k", 1))
	s.awaitStatuses(t, "", "DEAD 1")
	s.send(t, s.sale("k", 2))
	s.awaitStatuses(t, "COUNTED", "PENDING 1")
	fixed.Store(true)
	f, dead := s.failure(t)
	require.NoError(t, f.Retry(background, dead.ID, operator))
	s.awaitJournal(t, "COUNTED", "k", 2)
}

// A worker has a row for each action, so the row that cannot be decoded holds the key of its action.
func TestHoldDeadBehindUndecodableOfWorker(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	f.commit(step{"k", 1}, step{"other", 1})
	testenv.UpdateEvents(t, f.db, f.sql(`UPDATE {schema}.outbox SET payload = '{"account": 7}' WHERE aggregate_id = 'k'`))
	f.commit(step{"k", 2}, step{"other", 2}, step{"k", 3})
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, HoldDead: true}, PollInterval: 50 * time.Millisecond}
	f.start(cfg, f.effects("COUNTED", nil), outbox.HandleNoTx("SENT", func(context.Context, step, outbox.Metadata) error { return nil }))
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE aggregate_id = 'other' AND status = 'DONE'`, 4)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE aggregate_id = 'k' AND status = 'DEAD' AND held`, 2)
	require.Equal(t, 4, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE aggregate_id = 'k' AND status = 'PARKED'`))
	ops, err := outboxops.NewFailures(f.db, outboxops.FailuresConfig{Schema: f.schema})
	require.NoError(t, err)
	n, err := ops.ResolveAll(background, outboxops.FailureFilter{Statuses: []string{outbox.StatusDead}, Class: "undecodable"}, bulk, operator)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE aggregate_id = 'k' AND status = 'DONE'`, 4)
	require.Equal(t, "2 3", f.text(`SELECT string_agg(n::text, ' ' ORDER BY id) FROM {schema}.effect WHERE account = 'k'`))
}

// A process that has just begun, and has seen no blocked key, calls no handler behind a dead row that holds its key.
func TestHoldDeadAfterRestart(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	var calls atomic.Int64
	cfg := s.config(t)
	cfg.HoldDead, cfg.Decode = true, decodeExcept(`"k","amount":1}`, new(atomic.Bool))
	run := func() (stop func()) {
		return testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
			if sold(e) == "k 2" && calls.Add(1) <= 2 { // in a batch, and alone
				return errPlay
			}
			return nil
		})).Run)
	}
	stop := run()
	s.send(t, s.sale("k", 1))
	s.awaitStatuses(t, "", "DEAD 1")
	s.awaitOffset(t, 0, 1)
	stop()
	run()
	s.send(t, s.sale("k", 2), s.sale("k", 3), s.sale("other", 1))
	s.awaitJournal(t, "COUNTED", "other", 1)
	s.awaitStatuses(t, "COUNTED", "PARKED 2")
	require.Zero(t, calls.Load())
	f, dead := s.failure(t)
	require.NoError(t, f.Resolve(background, dead.ID, operator))
	s.awaitStatuses(t, "COUNTED", "DONE 2")
	require.Equal(t, []int{2, 3}, s.journal(t, "COUNTED", "k"))
}
