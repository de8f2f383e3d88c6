package itest

import (
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/absent"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

const relayLock = "relay:default"

// gone leaves behind the state of a leader that was killed: a lease that lasts for a while, and
// names a lock that no process has.
func (h *relayFixture) gone(t *testing.T, expiresIn time.Duration) {
	t.Helper()
	h.exec(t, `INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at, lasts, locked_epoch) VALUES ('default', 'gone', 7, clock_timestamp() + $1, $1, 7)
		ON CONFLICT (name) DO UPDATE SET holder = 'gone', epoch = outbox_lease.epoch + 7, locked_epoch = outbox_lease.epoch + 7, expires_at = excluded.expires_at, lasts = excluded.lasts`, expiresIn)
}

// awaitClaim waits until outbox_lease says that a lock goes with the lease.
func (h *relayFixture) awaitClaim(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		return h.countWhere(t, `SELECT count(*) FROM {s}.outbox_lease WHERE locked_epoch = epoch AND expires_at > now()`) == 1
	}, testenv.Patience, time.Millisecond)
}

// process is the relay of another process: one with a pool of its own.
func (h *relayFixture) process(t *testing.T, name string, cfg outbox.RelayConfig) *outbox.Relay {
	t.Helper()
	other := *h
	other.db = testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = name + " of " + h.schema })
	return other.relay(t, cfg)
}

// A process that led was killed: a standby takes over a second after it has found that out, and not when the lease
// expires.
func TestTakeover(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	h := newRelayFixture(t)
	reader := h.follow(t)
	h.gone(t, time.Hour)
	cfg := quick
	log := new(testenv.Buffer)
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	began := time.Now()
	testenv.Run(t, h.relay(t, cfg).Run)
	events := numbered("a", 1, 3)
	h.commit(t, events...)
	requireArrival(t, reader, events...)
	require.GreaterOrEqual(t, time.Since(began), time.Second, "the process that led may be alive")
	require.Contains(t, log.String(), "for=59m5")
	h.awaitClaim(t)
	require.Equal(t, 8, h.countWhere(t, `SELECT epoch FROM {s}.outbox_lease`))
	require.Equal(t, 1, h.countWhere(t, `SELECT count(*) FROM {s}.outbox_lease WHERE exclusive_at BETWEEN now() + '59 min' AND now() + '1 h'`))
}

// What says that the process which led is gone has to be sure.
func TestNoTakeover(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	for name, change := range map[string]string{
		"it never had a lock":                          `locked_epoch = NULL`,
		"one that knows no locks leads since":          `epoch = epoch + 1`,
		"the lease does not expire":                    `expires_at = 'infinity'`,
		"it renews the lease, though the lock is free": ``,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newRelayFixture(t)
			h.gone(t, time.Hour)
			if change != "" {
				h.exec(t, `UPDATE {s}.outbox_lease SET `+change)
			}
			stop := testenv.Run(t, h.relay(t, quick).Run)
			for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				if change == "" {
					h.exec(t, `UPDATE {s}.outbox_lease SET expires_at = expires_at + interval '1 ms'`)
				}
				require.Equal(t, "gone", h.relayStatus(t, "default").Holder)
			}
			stop()
			require.Eventually(t, func() bool { return listener(t, h.db, h.schema, relayLock) == 0 }, testenv.Patience, time.Millisecond)
		})
	}
}

// The connection with the lock breaks, again and again, and the process lives: no other one takes over, and nothing
// is sent twice.
func TestLeaderLosesItsLock(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	h := newRelayFixture(t)
	reader := h.follow(t)
	testenv.Run(t, h.process(t, "leader", quick).Run)
	h.awaitClaim(t)
	testenv.Run(t, h.process(t, "standby", quick).Run)
	holder := h.relayStatus(t, "default").Holder
	for n := range 5 {
		pid := awaitListener(t, h.db, h.schema, relayLock)
		events := numbered("a", 1+100*n, 100)
		h.commit(t, events...)
		h.exec(t, `SELECT pg_terminate_backend($1)`, pid)
		requireArrival(t, reader, events...)
		time.Sleep(1200 * time.Millisecond) // for as long as a standby may take to take over
		require.Equal(t, holder, h.relayStatus(t, "default").Holder)
	}
	awaitListener(t, h.db, h.schema, relayLock)
	h.awaitClaim(t)
}

// Until the lease of the process would have expired that led before, nothing that it may still send is decided about:
// what failed is not tried again, and events wait behind one that an operator has resolved, and behind one that has
// expired. See also TestSessionGivesUpNothingBeforeLeaseIsExclusive, TestNothingExpiresBeforeLeaseIsExclusive.
func TestNothingIsGivenUpBeforeLeaseIsExclusive(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	testenv.Direct(t)
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1)
	reader := h.follow(t)
	failed, resolved, other := numbered("failed", 1, 3), numbered("resolved", 1, 2), numbered("other", 1, 5)
	h.fail(t, failed[0], failed[1], resolved[0])
	rows, err := h.failures(t).List(background, outboxops.FailureFilter{AggregateID: "resolved"}, outboxops.FailurePage{})
	require.NoError(t, err)
	require.Len(t, rows, 1)
	require.NoError(t, h.failures(t).Resolve(background, rows[0].ID, outboxops.AuditInfo{Operator: "kim", Reason: "not needed"}))
	h.commit(t, failed[2], resolved[1])
	expired := numbered("expired", 1, 2)
	h.commitAll(t, expiring(time.Now(), expired[0])...)
	h.commit(t, expired[1])
	h.commit(t, other...)
	h.gone(t, 12*time.Second)
	var expires time.Time
	require.NoError(t, h.db.QueryRow(background, h.sql(`SELECT expires_at FROM {s}.outbox_lease`)).Scan(&expires))
	isOver := func() (over bool) {
		require.NoError(t, h.db.QueryRow(background, `SELECT clock_timestamp() >= $1`, expires).Scan(&over))
		return over
	}
	testenv.Run(t, h.relay(t, quick).Run)
	requireArrival(t, reader, other...)
	require.False(t, isOver(), "what did not fail is sent at once")
	require.Eventually(t, func() bool {
		return h.countWhere(t, `SELECT count(*) FROM {s}.outbox_failed WHERE status = 'parked' AND aggregate_id = 'resolved'`) == 1
	},
		testenv.Patience, time.Millisecond)
	for _, e := range []oracle.Event{failed[0], resolved[1], expired[1]} {
		requireArrival(t, reader, e)
		require.True(t, isOver(), "the process that led before may still send")
	}
	requireArrival(t, reader, failed...)
	requireInOrder(t, reader, failed)
}

// A clean stop releases the lock, and the next leader has it.
func TestStopFreesLock(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	h := newRelayFixture(t)
	for _, name := range []string{"first", "second"} {
		stop := testenv.Run(t, h.process(t, name, quick).Run)
		h.awaitClaim(t)
		stop()
		require.Zero(t, listener(t, h.db, h.schema, relayLock))
	}
}

// A relay that is started together with another one may find no lease and not get it all the same. It does not say that
// it stands by before it has seen the lease of the other one.
func TestStandbyNamesTheHolder(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	other, err := h.db.Begin(background)
	require.NoError(t, err)
	_, err = other.Exec(background, h.sql(`INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at, lasts) VALUES ('default', 'other', 1, now() + '1 hour', '1 hour')`))
	require.NoError(t, err)
	log := &workerLog{}
	cfg := quick
	cfg.Logger = log.logger()
	testenv.Run(t, h.relay(t, cfg).Run)
	require.Eventually(t, func() bool {
		return h.countWhere(t, `SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%' || replace('{s}', '"', '') || '%outbox_lease%'`) > 0
	}, testenv.Patience, time.Millisecond)
	require.NoError(t, other.Commit(background))
	require.Eventually(t, func() bool { return log.count("standing by") > 0 }, testenv.Patience, time.Millisecond)
	require.Equal(t, 1, log.count("holder=other"), log.String())
	require.Zero(t, log.count("does not expire"), log.String())
}

// A topic has partitions that accept nothing, and the process that led was killed. The good partitions of the topic,
// and other topics, do not wait until partitions are probed, when the lease of that process would have expired.
func TestGoodPartitionsGoOnBeforeLeaseIsExclusive(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	testenv.Direct(t)
	h := newRelayFixture(t)
	testenv.RealBrokers(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 6, "min.insync.replicas", "2")
	require.NoError(t, absent.Block(background, h.brokers, h.topic, []int32{1, 4}))
	other := h.elsewhere(t, "other-"+uuid.NewString())
	testenv.CreateTopic(t, h.brokers, other.topic, 6)
	reader, otherReader := h.follow(t), other.follow(t)
	stop := testenv.Run(t, h.plainRelay(t, outbox.RelayConfig{}).Run)
	keys, others := keyed("key", 60), keyed("other", 60)
	h.commit(t, keys...)
	other.commit(t, others...)
	requireArrival(t, otherReader, others...)
	sent := func() []oracle.Event {
		return slices.DeleteFunc(slices.Clone(keys), func(e oracle.Event) bool { return !reader.Has(e.ID) })
	}
	require.Eventually(t, func() bool {
		wait := h.countWhere(t, `SELECT count(*) FROM {s}.outbox_failed`)
		return wait > 0 && wait+len(sent()) == len(keys)
	}, testenv.Patience, 10*time.Millisecond)
	stop()
	h.gone(t, time.Hour)
	testenv.Run(t, h.plainRelay(t, outbox.RelayConfig{}).Run)
	for version := range 10 {
		next := numbered(fmt.Sprint("other-", version), 1, 1)
		other.commit(t, next...)
		requireArrivalWithin(t, 10*time.Second, otherReader, next...)
		next = nil
		for _, e := range sent() {
			next = append(next, numbered(e.Key, 2+version, 1)...)
		}
		h.commit(t, next...)
		requireArrivalWithin(t, 10*time.Second, reader, next...)
	}
}
