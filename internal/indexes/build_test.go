package indexes_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/indexes"
	"github.com/outboxgo/outbox/internal/migrator"
	"github.com/outboxgo/outbox/internal/testenv"
)

// fixture is a schema with the tables of outbox, and a log.
type fixture struct {
	db     *pgxpool.Pool
	schema string
	log    testenv.Buffer
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	db, schema := testenv.Schema(t)
	m := &migrator.Migrator{DB: db, Schema: schema, LockTimeout: 100 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)}
	require.NoError(t, m.Run(t.Context()))
	return &fixture{db: db, schema: schema}
}

// build builds the index of aggregates.
func (f *fixture) build(ctx context.Context, db *pgxpool.Pool) error {
	return indexes.Build(ctx, db, f.schema, indexes.Aggregate, slog.New(slog.NewTextHandler(&f.log, nil)))
}

func (f *fixture) sql(sql string) string {
	return strings.ReplaceAll(sql, "{s}", pgx.Identifier{f.schema}.Sanitize())
}

// open returns a transaction that has recorded an event. A build waits for it.
func (f *fixture) open(t *testing.T) pgx.Tx {
	t.Helper()
	tx, err := f.db.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	_, err = tx.Exec(t.Context(), f.sql(`
		INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		VALUES (gen_random_uuid(), 'acme.order.created.v1', 'test', 'Order', '1', '{"n": 1}', 'application/json', now())`))
	require.NoError(t, err)
	return tx
}

// isThere reports whether there is an index, finished or not.
func (f *fixture) isThere(t *testing.T) (is bool) {
	t.Helper()
	require.NoError(t, f.db.QueryRow(t.Context(), `SELECT to_regclass(format('%I.outbox_aggregate_idx', $1::text)) IS NOT NULL`, f.schema).Scan(&is))
	return is
}

// While another session has the lock of those that build indexes, the log names the session.
func TestBuildSaysWhoBuilds(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	holder := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = "frozen build" })
	other, err := holder.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = other.Rollback(context.Background()) }()
	var pid int
	require.NoError(t, other.QueryRow(t.Context(), `SELECT pg_backend_pid() FROM (SELECT pg_advisory_xact_lock(hashtextextended('outbox.indexes.' || $1, 0))) AS l`,
		pgx.QueryExecModeSimpleProtocol, f.schema).Scan(&pid))
	done := make(chan error, 1)
	go func() { done <- f.build(t.Context(), f.db) }()
	require.Eventually(t, func() bool { return strings.Contains(f.log.String(), "level=WARN") }, testenv.Patience, testenv.Patience/6000)
	for _, part := range []string{"outbox_aggregate_idx", "another session builds an index", fmt.Sprintf("session %d ", pid), "frozen build"} {
		require.Contains(t, f.log.String(), part)
	}
	require.NoError(t, other.Rollback(t.Context()))
	require.NoError(t, <-done)
	require.Equal(t, 2, strings.Count(f.log.String(), "level=WARN"), "and that it works again")
}

// PostgreSQL ends the transaction of a process that is frozen while it has the lock of those that build indexes.
func TestFrozenBuildEnds(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	tracer := new(testenv.IdleTracer)
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = tracer })
	require.NoError(t, f.build(t.Context(), db))
	require.Equal(t, []string{"30s"}, tracer.Bounds)
}

// A build that takes longer than a frozen process may have the lock keeps the lock.
func TestBuildKeepsItsLock(t *testing.T) {
	// Not parallel: it changes how long the lock outlives a process that does not go on.
	defer func(d time.Duration) { *indexes.LockIdle = d }(*indexes.LockIdle)
	*indexes.LockIdle = 600 * time.Millisecond
	f := newFixture(t)
	open := f.open(t)
	done := make(chan error, 1)
	go func() { done <- f.build(t.Context(), f.db) }()
	require.Eventually(t, func() bool { return f.isThere(t) }, testenv.Patience, 5*time.Millisecond)
	require.Never(t, func() bool {
		var held bool
		err := f.db.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory'
			AND (classid::bigint << 32) | objid::bigint = hashtextextended('outbox.indexes.' || $1, 0))`, f.schema).Scan(&held)
		return err != nil || !held
	}, 3*time.Second, 20*time.Millisecond)
	require.NoError(t, open.Commit(t.Context()))
	require.NoError(t, <-done)
}

// PostgreSQL goes on building an index when the client that has begun it is killed, or has lost the lock. The index is
// not dropped then, and is there when PostgreSQL is done.
func TestBuildOfALostClientIsAwaited(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	open := f.open(t)
	lost := make(chan error, 1)
	go func() {
		_, err := f.db.Exec(t.Context(), f.sql(`CREATE INDEX CONCURRENTLY outbox_aggregate_idx ON {s}.outbox (aggregate_type, aggregate_id, id)`))
		lost <- err
	}()
	require.Eventually(t, func() bool { return f.isThere(t) }, testenv.Patience, 5*time.Millisecond)
	oid := func() (oid uint32) {
		require.NoError(t, f.db.QueryRow(t.Context(), `SELECT to_regclass(format('%I.outbox_aggregate_idx', $1::text))::oid`, f.schema).Scan(&oid))
		return oid
	}
	began, done := oid(), make(chan error, 1)
	go func() { done <- f.build(t.Context(), f.db) }()
	require.Eventually(t, func() bool { return strings.Contains(f.log.String(), "another session builds an index: session ") }, testenv.Patience, 10*time.Millisecond)
	require.NoError(t, open.Commit(t.Context()))
	require.NoError(t, <-lost)
	require.NoError(t, <-done)
	require.Equal(t, began, oid())
	require.NotContains(t, f.log.String(), "left unfinished")
}

// poolerConn is a connection to a pooler that invents the numbers of server processes.
type poolerConn struct{ net.Conn }

// Read implements net.Conn.
func (c poolerConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if at := bytes.Index(p[:n], []byte{'K', 0, 0, 0, 12}); at >= 0 && at+9 <= n { // BackendKeyData
		p[at+8] ^= 1
	}
	return n, err
}

// Behind a pooler other clients have the session next, so a build changes no settings of it. It is bounded by the
// timeouts of the role, and the error says how to get around them.
func TestBuildBehindAPooler(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	f := newFixture(t)
	open := f.open(t)
	pooled := testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["statement_timeout"] = "500ms"
		cfg.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, network, address)
			return poolerConn{conn}, err
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	err := f.build(ctx, pooled)
	require.ErrorContains(t, err, "SQLSTATE 57014")
	require.ErrorContains(t, err, "connect to PostgreSQL directly")
	require.NoError(t, open.Commit(t.Context()))
	require.NoError(t, f.build(ctx, pooled))
	require.True(t, f.isThere(t))
}

// An index of another table with this name is an error, and no reason to wait for another process.
func TestBuildBesideAnIndexOfThisName(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	_, err := f.db.Exec(t.Context(), f.sql(`CREATE TABLE {s}.orders (id int); CREATE INDEX outbox_aggregate_idx ON {s}.orders (id)`), pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	require.ErrorContains(t, f.build(ctx, f.db), "table orders has an index of this name")
}
