package delivery_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A crash of PostgreSQL can forget transactions, and assign ids again that a worker has seen. The worker
// must not use its floors of such keys.
func TestCrashGivesIDsOutAgain(t *testing.T) {
	testenv.Direct(t) // PgBouncer keeps its connections
	t.Parallel()
	f, ctx := newTable(t), t.Context()
	a, b := f.store("a", time.Minute), f.store("b", time.Minute)
	for range 5 {
		_, err := a.Finish(ctx, f.insert(a, delivery.Processing, f.record("k"), "k"))
		require.NoError(t, err)
	}
	forget := func() {
		f.exec(`DELETE FROM {schema}.event_delivery`)
		f.exec(`SELECT setval('{schema}.event_delivery_id_seq', 1)`)
	}
	forget()
	require.Len(t, f.insert(b, delivery.Processing, f.record("k"), "k"), 1)
	require.Len(t, f.insert(a, delivery.Processing, f.record("k"), "k"), 1, "without a crash it looks at no rows below")

	forget()
	require.Len(t, f.insert(b, delivery.Processing, f.record("k"), "k"), 1)
	f.db.Reset() // connections do not outlive a crash
	require.Empty(t, f.insert(a, delivery.Processing, f.record("k"), "k"), "the key is with b")
}

// A worker's leases are taken over while it renews them, so it loses only the first row of a run. The
// second row is tried first. Then the first row is promoted before the rest.
func TestRunIsLostInPart(t *testing.T) {
	t.Parallel()
	f, ctx := newTable(t), t.Context()
	a, b := f.store("a", time.Millisecond), f.store("b", time.Minute)
	run := f.insert(a, delivery.Processing, f.record("k", "k", "k"), "k", "k", "k")
	renewing, err := f.db.Begin(ctx)
	require.NoError(t, err)
	_, err = renewing.Exec(ctx, pg.InSchema(`SELECT FROM {schema}.event_delivery WHERE id > $1 FOR UPDATE`, f.schema), run[0].ID)
	require.NoError(t, err)
	expired, err := a.TakeOver(ctx, 10, false)
	require.NoError(t, err)
	require.Len(t, expired, 1)
	require.NoError(t, renewing.Rollback(ctx))
	_, err = a.Fail(ctx, delivery.Failure{Of: run[1], Code: "handler"}, run[2:])
	require.NoError(t, err)
	require.Equal(t, []string{"k PARKED 0", "k PENDING 1", "k PARKED 0"}, f.rows())

	claimed, err := b.Claim(ctx, pairs, 10, 10, false, room)
	require.NoError(t, err)
	require.Equal(t, run[1].ID, claimed[0].ID)
	_, err = b.Finish(ctx, claimed)
	require.NoError(t, err)
	require.Equal(t, []string{"k PENDING 0", "k DONE 2", "k PARKED 0"}, f.rows())
}

// A pool replaces its connections. A worker uses its floors on a new connection too, if an older connection
// was used after the floors were learned.
func TestNewConnectionsKnowKeys(t *testing.T) {
	testenv.Long(t)
	testenv.Direct(t) // it counts reads of a connection
	t.Parallel()
	f, ctx := newTable(t), t.Context()
	f.stayOpen()
	s := f.store("a", time.Minute)
	handle := func(db *pgxpool.Pool, key string) {
		on := *f
		on.db = db
		run := on.insert(s, delivery.Processing, f.record(key), key)
		require.Len(t, run, 1)
		_, err := s.Finish(ctx, run)
		require.NoError(t, err)
	}
	const rounds, most = 60, 20 // entries in a round
	old := f.single()
	for range rounds {
		young := f.single()
		require.NoError(t, young.Ping(ctx))
		handle(old, "k")
		handle(young, "l")
		young.Close()
	}
	old.Close()
	read := f.readSince(0)
	t.Logf("%d entries in %d rounds", read, rounds)
	require.Less(t, read, rounds*most)
}

// While a transaction is open anywhere, PostgreSQL removes no index entries. The number of entries that a
// worker reads does not grow with the rows that it has finished meanwhile, even if all belong to one key.
func TestTransactionStaysOpen(t *testing.T) {
	testenv.Long(t)
	testenv.Direct(t) // it counts reads of a connection
	t.Parallel()
	f, ctx := newTable(t), t.Context()
	f.stayOpen()
	const rounds, most = 30, 30 // entries of a key in a round; each store scans all entries of a key once
	keys := []string{"k", "l", "m", "n", "o"}
	read := 0
	for part := range 2 {
		db := f.single()
		s := delivery.NewStore(db, f.schema, group, "a", shortLease)
		f.insert(s, delivery.Processing, f.record("new"), "new") // opens the connection before it learns floors of keys
		for range rounds {
			run := f.insert(s, delivery.Processing, f.record(keys...), keys...)
			require.Len(t, run, len(keys))
			require.Empty(t, f.insert(s, delivery.Processing, f.record(keys...), keys...))
			_, err := s.Fail(ctx, delivery.Failure{Of: run[0], Code: "handler", Dead: true}, nil)
			require.NoError(t, err)
			_, err = s.Finish(ctx, run[1:])
			require.NoError(t, err)
			claimed, err := s.Claim(ctx, pairs, 10, 10, false, room)
			require.NoError(t, err)
			require.Len(t, claimed, len(keys))
			require.NoError(t, s.Release(ctx, claimed[:1]))
			_, err = s.Finish(ctx, claimed[1:])
			require.NoError(t, err)
			claimed, err = s.Claim(ctx, pairs, 10, 10, false, room)
			require.NoError(t, err)
			_, err = s.Finish(ctx, claimed)
			require.NoError(t, err)
		}
		db.Close()
		more := f.readSince(read)
		t.Logf("part %d: %d entries in %d rounds", part, more, rounds)
		require.Less(t, more, rounds*len(keys)*most)
		read += more
	}
}

// A consumer that asks whether a key is blocked finds an open row at its end, however many rows of the key are done
// while a transaction is open.
func TestBlockedKeyIsFoundAtItsEnd(t *testing.T) {
	testenv.Long(t)
	testenv.Direct(t) // it counts reads of a connection
	t.Parallel()
	f, ctx := newTable(t), t.Context()
	f.stayOpen()
	const rows, open, questions, most = 1000, 10, 20, 10 // entries of a question
	db := f.single()
	s := delivery.NewStore(db, f.schema, group, "a", shortLease).ForRecords()
	parked := []delivery.Received{failed("k", 0)}
	for n := range rows {
		parked = append(parked, received("k", n+1))
	}
	f.park(s, parked...)
	for done := 0; done <= rows-open; {
		claimed := f.claim(s)
		require.NotEmpty(t, claimed)
		_, err := s.Finish(ctx, claimed)
		require.NoError(t, err)
		done += len(claimed)
	}
	db.Close()
	read := f.readSince(0)
	db = f.single()
	s = delivery.NewStore(db, f.schema, group, "b", shortLease).ForRecords()
	for range questions {
		require.Len(t, f.blocked(s, received("k", 2*rows)), 1)
	}
	db.Close()
	read = f.readSince(read)
	t.Logf("%d entries for %d questions", read, questions)
	require.Less(t, read, questions*most)
}

// stayOpen opens a transaction that writes.
func (f *tableFixture) stayOpen() { f.begin(`SELECT pg_current_xact_id()`) }

// readSince returns the number of entries of open rows that closed connections have read, less before.
func (f *tableFixture) readSince(before int) int {
	f.t.Helper()
	now := 0
	require.Eventually(f.t, func() bool {
		last := now
		now = f.read("idx_event_delivery_head") + f.read("idx_event_delivery_parked")
		return now > before && now == last
	}, testenv.Patience, 200*time.Millisecond, "statistics are late")
	return now - before
}
