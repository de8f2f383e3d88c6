package itest

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// A leader that has lost its lock sends again as soon as a renewal has said so, however long that takes.
func TestLockIsLostWhileRenewalsAreSlow(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	h := newRelayFixture(t)
	reader := h.follow(t)
	h.exec(t, `CREATE FUNCTION {s}.slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(1.2); RETURN NEW; END'`)
	h.exec(t, `CREATE TRIGGER slow BEFORE UPDATE ON {s}.outbox_lease FOR EACH ROW EXECUTE FUNCTION {s}.slow()`)
	testenv.Run(t, h.process(t, "leader", quick).Run)
	h.awaitClaim(t)
	h.exec(t, `SELECT pg_terminate_backend($1)`, awaitListener(t, h.db, h.schema, relayLock))
	events := numbered("a", 1, 3)
	h.commit(t, events...)
	requireArrival(t, reader, events...)
}

// A claim that is refused is tried again with pauses, and the log says so.
func TestRefusedClaimMakesNoBusyLoop(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	h := newRelayFixture(t)
	h.exec(t, `CREATE TABLE {s}.renewal (n bigserial)`)
	h.exec(t, `CREATE FUNCTION {s}.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF NEW.locked_epoch IS NOT NULL THEN RAISE 'no'; END IF;
		EXECUTE format('INSERT INTO %I.renewal DEFAULT VALUES', TG_TABLE_SCHEMA);
		RETURN NEW;
	END $$`)
	h.exec(t, `CREATE TRIGGER refuse BEFORE UPDATE ON {s}.outbox_lease FOR EACH ROW EXECUTE FUNCTION {s}.refuse()`)
	cfg := quick
	log := new(testenv.Buffer)
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	began := time.Now()
	testenv.Run(t, h.relay(t, cfg).Run)
	require.Eventually(t, func() bool { return h.count(t, "renewal") >= 5 }, testenv.Patience, 10*time.Millisecond)
	const pause = 250 * time.Millisecond
	require.GreaterOrEqual(t, time.Since(began), 4*pause)
	require.Contains(t, log.String(), "the lock of the lease")
}

// awaitTakeoverWaits waits until a standby waits for the row of the lease that it takes over.
func (h *relayFixture) awaitTakeoverWaits(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		return h.countWhere(t, `SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%exclusive_at = greatest%' AND query LIKE '%`+h.schema+`%'`) > 0
	}, testenv.Patience, time.Millisecond)
}

// A standby that is told to stop while PostgreSQL gives it the lease of a process that is gone releases it.
func TestStopWhileLeaseIsTakenFromGone(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	for name, answered := range map[string]bool{"answered before Run returns": true, "answered later": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newRelayFixture(t)
			h.gone(t, time.Hour)
			proof, err := h.db.Begin(background) // as a relay that moves the cursor
			require.NoError(t, err)
			_, err = proof.Exec(background, h.sql(`SELECT FROM {s}.outbox_lease FOR SHARE`))
			require.NoError(t, err)
			stop := testenv.Run(t, h.process(t, "standby", quick).Run)
			h.awaitTakeoverWaits(t)
			if answered {
				time.AfterFunc(100*time.Millisecond, func() { _ = proof.Rollback(background) }) // Run returns when it has
				stop()
			} else {
				stop()
				require.NoError(t, proof.Rollback(background))
			}
			require.Eventually(t, func() bool { return listener(t, h.db, h.schema, relayLock) == 0 }, testenv.Patience, time.Millisecond)
			require.Zero(t, h.countWhere(t, `SELECT count(*) FROM {s}.outbox_lease WHERE holder <> 'gone' AND expires_at > now()`))
		})
	}
}

// The process that was taken for gone lives, and stops cleanly while a standby waits: that one takes over at once.
func TestReleasedWhileStandbyWaits(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	h := newRelayFixture(t)
	h.gone(t, time.Hour)
	relay := h.relay(t, quick)
	testenv.Run(t, relay.Run)
	awaitListener(t, h.db, h.schema, relayLock)
	h.exec(t, `UPDATE {s}.outbox_lease SET expires_at = '-infinity'`)
	require.Eventually(t, func() bool { return relay.Health().Leading }, testenv.Patience, time.Millisecond)
	require.Zero(t, h.countWhere(t, `SELECT count(*) FROM {s}.outbox_lease WHERE exclusive_at > now()`), "it was not taken for gone")
}

// After a clock was set back, no standby waits for longer than a lease lasts.
func TestTakeoverAfterClockWasSetBack(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	h := newRelayFixture(t)
	h.gone(t, 30*time.Second)
	h.exec(t, `UPDATE {s}.outbox_lease SET expires_at = expires_at + interval '10 h'`)
	testenv.Run(t, h.relay(t, quick).Run)
	require.Eventually(t, func() bool {
		return h.countWhere(t, `SELECT count(*) FROM {s}.outbox_lease WHERE epoch = 8 AND exclusive_at <= now() + interval '30 s'`) == 1
	}, testenv.Patience, time.Millisecond)
}

// The process that led before may still be sending an event that was resolved within the last hour,
// whatever its lease was and in whatever way the event was resolved.
func TestResolvedEventMayStillBeSent(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	for name, how := range map[string]struct{ reason, set string }{
		"five minutes ago":              {"not needed", `resolved_at = now() - interval '5 min'`},
		"with a reason of the relay's":  {"sent", `resolved_at = now()`},
		"in SQL, which left out a time": {"not needed", `resolved_at = NULL`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newRelayFixture(t)
			testenv.CreateTopic(t, h.brokers, h.topic, 1)
			reader := h.follow(t)
			resolved, other := numbered("resolved", 1, 2), numbered("other", 1, 1)
			h.fail(t, resolved[0])
			rows, err := h.failures(t).List(background, outboxops.FailureFilter{AggregateID: "resolved"}, outboxops.FailurePage{})
			require.NoError(t, err)
			require.NoError(t, h.failures(t).Resolve(background, rows[0].ID, outboxops.AuditInfo{Operator: "kim", Reason: how.reason}))
			h.exec(t, `UPDATE {s}.outbox_failed SET `+how.set)
			h.commit(t, resolved[1], other[0])
			h.gone(t, time.Hour)
			testenv.Run(t, h.relay(t, quick).Run)
			requireArrival(t, reader, other...)
			require.Eventually(t, func() bool { return h.statuses(t)["parked"] == 1 }, testenv.Patience, time.Millisecond)
		})
	}
}

// That the lease changes while a standby takes it is no outage of PostgreSQL.
func TestTakeoverInConflict(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	h := newRelayFixture(t)
	h.gone(t, time.Hour)
	other := *h
	other.db = testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
	})
	cfg := quick
	log := new(testenv.Buffer)
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	require.NoError(t, pgx.BeginFunc(background, h.db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(background, h.sql(`UPDATE {s}.outbox_lease SET expires_at = expires_at + interval '1 s'`)); err != nil {
			return err
		}
		testenv.Run(t, other.relay(t, cfg).Run)
		h.awaitTakeoverWaits(t)
		return nil
	}))
	require.Eventually(t, func() bool { return h.countWhere(t, `SELECT epoch FROM {s}.outbox_lease`) == 8 }, testenv.Patience, time.Millisecond)
	require.NotContains(t, log.String(), "PostgreSQL fails")
}

// A full queue of notifications is not taken for a pooler.
func TestFullQueueIsNoPooler(t *testing.T) {
	// Not parallel: no process is notified meanwhile.
	testenv.Direct(t)
	h := newRelayFixture(t)
	conn, err := testenv.Pool(t, nil).Acquire(background)
	require.NoError(t, err)
	deaf := conn.Hijack()
	defer func() { _ = deaf.Close(background) }()
	for _, sql := range []string{"LISTEN deaf", "BEGIN"} {
		_, err = deaf.Exec(background, sql)
		require.NoError(t, err)
	}
	h.exec(t, `SELECT count(pg_notify('deaf', n || repeat('x', 7900))) FROM generate_series(1, 12000) AS n`)
	require.Equal(t, 1, h.countWhere(t, `SELECT (pg_notification_queue_usage() >= 0.01)::int`))
	cfg := quick
	log := new(testenv.Buffer)
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	testenv.Run(t, h.process(t, "leader", cfg).Run)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "the queue of notifications fills up") }, testenv.Patience, time.Millisecond)
	require.NoError(t, deaf.Close(background))
	h.awaitClaim(t)
}
