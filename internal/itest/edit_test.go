package itest

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// An edited delivery is for its group and action alone: others get the event as it was recorded.
func TestEditIsForOneHandler(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	refuse := func(s step, _ outbox.Metadata) error {
		if s.N == 13 {
			return outbox.Permanent(errTest)
		}
		return nil
	}
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, HoldDead: true}}
	f.start(cfg, f.effects("COUNTED", refuse), f.effects("SUMMED", nil))
	_, stop := f.startGroup("mail", cfg, f.effects("MAILED", refuse))
	f.commit(step{"a", 1}, step{"a", 13}, step{"a", 3})
	f.await(5) // all of SUMMED, and the first one of the others
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD'`, 2)
	stop()

	failures, err := outboxops.NewFailures(f.db, outboxops.FailuresConfig{Schema: f.schema})
	require.NoError(t, err)
	dead, err := failures.List(t.Context(), outboxops.FailureFilter{Group: "bank"}, outboxops.FailurePage{})
	require.NoError(t, err)
	require.Len(t, dead, 1)
	require.NoError(t, failures.Edit(t.Context(), dead[0].ID, []byte(`{"account": "a", "n": 2}`), operator))
	f.await(7)
	n, err := failures.RetryAll(t.Context(), outboxops.FailureFilter{Group: "mail"}, bulk, operator)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	f.startGroup("mail", outbox.WorkerConfig{}, f.effects("MAILED", nil))
	f.await(9)
	require.Equal(t, "COUNTED 1,2,3 MAILED 1,13,3 SUMMED 1,13,3", f.text(`
		SELECT string_agg(action || ' ' || steps, ' ' ORDER BY action) FROM (
		    SELECT action, string_agg(n::text, ',' ORDER BY id) AS steps FROM {schema}.effect GROUP BY action) AS e`))
	require.Equal(t, 1, f.count(`SELECT count(*) FROM {schema}.outbox WHERE payload = '{"account": "a", "n": 13}'`), "outbox keeps what was recorded")
}

// The row of a consumer's dead event is handled with its new value, before the later events of its key. A replay of the
// dead letter, which has the value from before, brings nothing: the event is handled.
func TestEditOfAParkedEvent(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	cfg := s.config(t)
	cfg.HoldDead = true
	testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		if e.Amount == 13 {
			return outbox.Permanent(errPlay)
		}
		return nil
	})).Run)
	s.send(t, s.sale("k", 13), s.sale("k", 2), s.sale("other", 1))
	s.awaitJournal(t, "COUNTED", "other", 1)
	s.awaitStatuses(t, "COUNTED", "DEAD 1 PARKED 1")
	f, dead := s.failure(t)
	require.NoError(t, f.Edit(background, dead.ID, []byte(`{"product":"k","amount":1}`), operator))
	s.awaitJournal(t, "COUNTED", "k", 2)
	first := s.deadLetters(t, 1)[0]
	require.JSONEq(t, `{"product":"k","amount":13}`, string(first.Value))
	require.Equal(t, 1, s.replay(t))
	s.awaitOffset(t, 0, 4)
	s.awaitJournal(t, "COUNTED", "k", 2)
}
