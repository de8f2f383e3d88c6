package faults

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// The host takes all connections of the pool that the relay shares, for longer
// than the lease lasts. The relay loses its lease, waits, and goes on.
func TestPoolExhausted(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := guest(t, testenv.Brokers(t), "faults-"+uuid.NewString())
	f := s.flow(t)
	release := takeAll(t, f.pool)
	f.log.awaitFailure(t, "PostgreSQL", 1)
	f.log.await(t, "outbox: lease lost, standing by", 1)
	asked := func() int64 { return f.pool.Stat().CanceledAcquireCount() }
	before := asked()
	require.Eventually(t, func() bool { return asked() > before }, testenv.Patience, 10*time.Millisecond, "it no longer tries")
	release()
	s.awaitFlow(t)
	s.requireRecovery(t, f.stop())
	f.log.requireOutages(t, "PostgreSQL", 1)
	require.Equal(t, 1, f.log.count("outbox: lease lost, standing by"))
	require.Zero(t, s.countFailed(t, "true"))
	requireSome(t, int(asked()))
}

// Statements take longer than the server lets them, for a while. One that waits
// for a lock stands for one that is slow.
func TestStatementTimeout(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := newSite(t)
	f := s.flow(t)
	lock, err := s.db.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = lock.Rollback(context.Background()) }) // it may be over
	_, err = lock.Exec(t.Context(), `LOCK TABLE outbox_cursor`)
	require.NoError(t, err)
	patient := s.poolConfig(t)
	patient.ConnConfig.RuntimeParams["statement_timeout"] = "0"
	admin := openPool(t, patient)
	alterSystem(t, admin, `SET statement_timeout = '200ms'`)
	f.log.awaitFailure(t, "PostgreSQL", 1)
	tried := f.statements.during(func() { time.Sleep(outage) })
	alterSystem(t, admin, `RESET statement_timeout`)
	require.Eventually(t, func() (over bool) {
		return s.db.QueryRow(t.Context(), `SELECT current_setting('statement_timeout') = '0'`).Scan(&over) == nil && over
	}, testenv.Patience, time.Millisecond)
	require.NoError(t, lock.Rollback(t.Context()))
	s.awaitFlow(t)
	s.requireRecovery(t, f.stop())
	f.log.requireOutages(t, "PostgreSQL", 1)
	require.NotContains(t, f.log.String(), "lease lost", "its renewals touch another table")
	requireSome(t, tried)
}

// The server takes no writes for a while, longer than the lease lasts.
func TestReadOnly(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := newSite(t)
	f := s.flow(t)
	alterSystem(t, s.db, `SET default_transaction_read_only = on`)
	f.log.awaitFailure(t, "PostgreSQL", 1)
	tried := f.statements.during(func() { time.Sleep(outage) })
	alterSystem(t, s.db, `RESET default_transaction_read_only`)
	s.awaitFlow(t)
	s.requireRecovery(t, f.stop())
	f.log.requireOutages(t, "PostgreSQL", 1)
	require.Contains(t, f.log.String(), "lease lost")
	requireSome(t, tried)
}

// The primary dies, and clients come to its standby, which is promoted later.
func TestStandbyPromotedLate(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	p := newPair(t, "any")
	p.waitForStandby(t)
	f := p.flow(t)
	require.NoError(t, p.server.Kill())
	f.log.awaitFailure(t, "PostgreSQL", 1)
	tried := f.statements.during(func() { time.Sleep(outage) })
	p.awaitStandby(t, `SELECT pg_promote()`)
	p.awaitFlow(t)
	p.requireRecovery(t, f.stop())
	f.log.requireOutages(t, "PostgreSQL", 1)
	requireSome(t, tried)
}

// Connections end again and again while no statement is running on them. The
// relay finds out by the next one, whose fate it then does not know. Nothing is
// sent twice for it.
func TestIdleConnectionsEnd(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := guest(t, testenv.Brokers(t), "faults-"+uuid.NewString())
	f := s.flow(t)
	const rounds = 30
	for range rounds {
		_, err := s.db.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'relay' AND state = 'idle'`)
		require.NoError(t, err)
		s.awaitArrivals(t, 5)
	}
	require.Zero(t, s.requireRecovery(t, f.stop()).Duplicates)
	changes := f.log.changes(t)["PostgreSQL"]
	require.Positive(t, changes.times)
	require.LessOrEqual(t, changes.times, rounds, "%s", &f.log)
	require.Zero(t, s.countFailed(t, "true"))
}

// flow is a relay that sends what a stream commits.
type flow struct {
	pool       *pgxpool.Pool
	statements tries // of the relay
	log        warnings
	stop       func() map[string]struct{} // the stream
}

// flow starts one, and returns when events arrive.
func (s *site) flow(t *testing.T) *flow {
	t.Helper()
	f := &flow{}
	cfg := s.poolConfig(t)
	cfg.MaxConns, cfg.ConnConfig.Tracer = 4, &f.statements
	cfg.ConnConfig.RuntimeParams["application_name"] = "relay"
	f.pool = openPool(t, cfg)
	run(t, f.pool, testenv.KafkaOpts(s.brokers), shortly(t, &f.log))
	f.stop = s.stream(t)
	s.awaitArrivals(t, 100)
	return f
}

// takeAll takes all connections of a pool until release is called.
func takeAll(t *testing.T, pool *pgxpool.Pool) (release func()) {
	t.Helper()
	var taken []*pgxpool.Conn
	release = sync.OnceFunc(func() {
		for _, conn := range taken {
			conn.Release()
		}
	})
	t.Cleanup(release)
	for range pool.Config().MaxConns {
		conn, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		taken = append(taken, conn)
	}
	return release
}
