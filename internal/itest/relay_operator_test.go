package itest

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

// resolveOpen resolves the failed events of a key and a version in a transaction that stays open.
func (h *relayFixture) resolveOpen(t *testing.T, key string, version int64) pgx.Tx {
	t.Helper()
	tx, err := h.db.Begin(background)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(background) })
	var n int
	require.NoError(t, tx.QueryRow(background, h.sql(`SELECT {s}.outbox_resolve_failed(ARRAY(SELECT id FROM {s}.outbox_failed
		WHERE aggregate_id = $1 AND payload->>'version' = $2::bigint::text), 'kim', 'why')`), key, version).Scan(&n))
	require.Equal(t, 1, n)
	_, err = tx.Exec(background, `SET LOCAL idle_in_transaction_session_timeout = 0`) // so that it stays open on a slow machine
	require.NoError(t, err)
	return tx
}

// timesArrived returns how often each event has arrived.
func timesArrived(t *testing.T, reader *oracle.Reader) map[string]int {
	t.Helper()
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	times := map[string]int{}
	for _, e := range arrived {
		times[e.ID]++
	}
	return times
}

// An operator's transaction on one event stays open. All other failed events are retried meanwhile, and new events of
// other keys are sent. The event is not sent while it is locked, nor once it is resolved, and its key goes on.
func TestOpenOperatorStopsNoRetries(t *testing.T) {
	t.Parallel()
	for name, locked := range map[string]int{"the head": 0, "the next head": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newRelayFixture(t)
			testenv.CreateTopic(t, h.brokers, h.topic, 3)
			reader := h.follow(t)
			chosen, others := numbered("chosen", 1, 3), append(keyed("other", 100), numbered("long", 1, 20)...)
			h.fail(t, append(chosen, others...)...)
			operator := h.resolveOpen(t, "chosen", chosen[locked].Version)
			cfg := quick
			cfg.Logger = slog.New(slog.DiscardHandler)
			testenv.Run(t, h.relay(t, cfg).Run)
			requireArrival(t, reader, others...)
			fresh := append(keyed("other", 100), keyed("fresh", 10)...)
			h.commit(t, fresh...)
			requireArrival(t, reader, fresh...)
			if locked == 0 {
				require.False(t, reader.Has(chosen[0].ID), "an operator is resolving it")
			}
			require.NoError(t, operator.Commit(background))
			more := numbered("chosen", 4, 3)
			h.commit(t, more...)
			requireArrival(t, reader, more...)
			requireInOrder(t, reader, append(chosen[locked+1:], more...))
			h.awaitStatuses(t, map[string]int{"resolved": 1})
			for id, n := range timesArrived(t, reader) {
				require.Equal(t, 1, n, id)
			}
			require.False(t, locked == 0 && reader.Has(chosen[0].ID), "it is resolved")
		})
	}
}

// The relay stops soon beside an operator's open transaction. Only the event that the operator has locked may be sent
// again by the next relay, and the log names it.
func TestStopBesideOpenOperator(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 3)
	reader := h.follow(t)
	chosen, others := numbered("chosen", 1, 3), keyed("other", 50)
	h.fail(t, append(chosen, others...)...)
	operator := h.resolveOpen(t, "chosen", 2) // it is behind the head, so the relay sends it with the next ones
	var log testenv.Buffer
	cfg := quick
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	stop := testenv.Run(t, h.relay(t, cfg).Run)
	requireArrival(t, reader, append(chosen[:2], others...)...)
	stopWithin(t, 10*time.Second, stop)
	require.Equal(t, 1, strings.Count(log.String(), "will be sent again"))
	require.Contains(t, log.String(), "event_id="+h.eventID(t, "chosen", 2))

	require.NoError(t, operator.Rollback(background))
	testenv.Run(t, h.relay(t, quick).Run)
	more := append(numbered("chosen", 4, 3), keyed("other", 50)...)
	h.commit(t, more...)
	requireArrival(t, reader, append(append(chosen, others...), more...)...)
	h.awaitStatuses(t, map[string]int{})
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	var versions []int64 // of the key, each at its first arrival
	for _, e := range arrived {
		if e.Key == "chosen" && !slices.Contains(versions, e.Version) {
			versions = append(versions, e.Version)
		}
	}
	require.Equal(t, []int64{1, 2, 3, 4, 5, 6}, versions)
	for id, n := range timesArrived(t, reader) {
		if id == chosen[1].ID {
			require.LessOrEqual(t, n, 2)
		} else {
			require.Equal(t, 1, n, "%s: no other event is sent again", id)
		}
	}
}

// eventID returns the event id of a failed event.
func (h *relayFixture) eventID(t *testing.T, key string, version int64) (id string) {
	t.Helper()
	require.NoError(t, h.db.QueryRow(background, h.sql(`SELECT event_id::text FROM {s}.outbox_failed
		WHERE aggregate_id = $1 AND payload->>'version' = $2::bigint::text`), key, version).Scan(&id))
	return id
}

// Relays, workers and consumers leave out what an operator has locked, or wait for it, so a transaction that the
// operator leaves open is ended after 10 s. A shorter time stays.
func TestOperatorsAreNotLeftOpen(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	functions := []string{
		`outbox_retry_failed('{1}', 'kim', 'why')`, `outbox_resolve_failed('{1}', 'kim', 'why')`, `outbox_edit_failed(1, '{}', 'kim', 'why')`,
		`outbox_hold_key('default', 'a/b', 'kim', 'why')`, `outbox_release_key('default', 'a/b', 'kim', 'why')`,
		`outbox_requeue_deliveries('{1}', 'kim', 'why')`, `outbox_edit_delivery(1, '{}', 'kim', 'why')`, `outbox_resolve_deliveries('{1}', 'kim', 'why')`,
		`outbox_hold_deliveries('{1}', 'kim', 'why')`, `outbox_release_deliveries('{1}', 'kim', 'why')`,
		`outbox_pause_consumer('g', 't', 'kim', 'why')`, `outbox_resume_consumer('g', 't', 'kim', 'why')`,
		`outbox_rewind_consumer('g', '{}', '{}', '{}', '{}', 'kim', 'why')`,
	}
	for _, function := range functions {
		for before, want := range map[string]string{"0": "10s", "1h": "10s", "10s": "10s", "9s": "9s", "500ms": "500ms"} {
			require.NoError(t, pgx.BeginFunc(background, h.db, func(tx pgx.Tx) error {
				if _, err := tx.Exec(background, `SELECT set_config('idle_in_transaction_session_timeout', $1, true)`, before); err != nil {
					return err
				}
				if _, err := tx.Exec(background, h.sql(`SELECT {s}.`+function)); err != nil {
					return err
				}
				var after string
				if err := tx.QueryRow(background, `SELECT current_setting('idle_in_transaction_session_timeout')`).Scan(&after); err != nil {
					return err
				}
				require.Equal(t, want, after, "%s after %s", function, before)
				return nil
			}))
		}
	}
}

// PostgreSQL ends an operator's transaction that is left open, and the relay goes on with what was locked.
func TestIdleOperatorIsEnded(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1)
	reader := h.follow(t)
	events := numbered("chosen", 1, 3)
	h.fail(t, events...)
	conn, err := h.db.Acquire(background)
	require.NoError(t, err)
	operator := conn.Hijack() // it dies
	defer func() { _ = operator.Close(context.Background()) }()
	tx, err := operator.Begin(background)
	require.NoError(t, err)
	_, err = tx.Exec(background, h.sql(`SELECT {s}.outbox_resolve_failed(ARRAY(SELECT id FROM {s}.outbox_failed), 'kim', 'why')`))
	require.NoError(t, err)
	testenv.Run(t, h.relay(t, quick).Run)
	requireArrival(t, reader, events...)
	requireInOrder(t, reader, events)
}
