package delivery_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A worker plans its statements on the first day, over an empty table, and keeps its connections. Over an
// empty table, a plan that reads the whole table costs no more. With 20,000 rows, such a plan would make a
// claim take 80 ms.
func TestPlansOfTheFirstDay(t *testing.T) {
	testenv.Direct(t) // prepared statements
	t.Parallel()
	ctx := t.Context()
	f := &tableFixture{t, testenv.OtherDatabase(t), pg.DefaultSchema} // open transactions of other tests would keep removed entries
	require.NoError(t, outbox.Migrate(ctx, f.db, outbox.MigrateConfig{}))
	f.exec(`ALTER TABLE {schema}.event_delivery SET (autovacuum_enabled = false)`)
	f.exec(`ANALYZE {schema}.event_delivery`)
	s, end := f.alone("a")
	for n := range 6 { // PostgreSQL decides after five whether to keep a plan
		f.day(s, n)
	}
	const many = 60_000
	f.exec(`
		INSERT INTO {schema}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, created_at, updated_at, processed_at,
		       occurred_at, recorded_at, event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload)
		SELECT n, n, 1, 3, now(), now(), now(), now(), now(), now(), gen_random_uuid(), CASE WHEN n % 4 = 0 THEN 'PARKED' ELSE 'DONE' END,
		       $1, $2, $3, 'a.order.sent.v1', '/test', 'Order', 'old', 'application/json', '{}'
		  FROM generate_series(1, $4) AS n`, group, action, stream, many)
	f.day(s, many)
	end()

	const most = many / 40
	require.Eventually(t, func() bool { return f.read(`idx_event_delivery_due`) > 0 }, testenv.Patience, 10*time.Millisecond, "statistics are late")
	for _, index := range []string{"event_delivery_pkey", "idx_event_delivery_due", "idx_event_delivery_head", "idx_event_delivery_parked", "idx_event_delivery_put_back", "idx_event_delivery_done_again", "idx_event_delivery_locked"} {
		read := f.read(index)
		t.Logf("%s: %d", index, read)
		require.Less(t, read, most, index)
	}
	var whole int
	require.NoError(t, f.db.QueryRow(ctx, `SELECT seq_tup_read FROM pg_stat_user_tables WHERE schemaname = $1 AND relname = 'event_delivery'`, f.schema).Scan(&whole))
	require.Less(t, whole, most)
}

// shortLease expires soon, and tests poll for its end no more often.
const shortLease = 50 * time.Millisecond

// alone returns a store with its own connection. PostgreSQL counts the reads of the connection when it has
// ended.
func (f *tableFixture) alone(worker string) (s *delivery.Store, end func()) {
	db := f.single()
	return delivery.NewStore(db, f.schema, group, worker, shortLease), db.Close
}

// single returns a pool of one connection.
func (f *tableFixture) single() *pgxpool.Pool {
	cfg := f.db.Config().Copy()
	cfg.MinConns, cfg.MaxConns = 1, 1
	db, err := pgxpool.NewWithConfig(context.Background(), cfg)
	require.NoError(f.t, err)
	f.t.Cleanup(db.Close)
	return db
}

// day does each thing that can happen to deliveries once. Each day has its own key, because the removed
// index entries of a key are read again while a transaction is open anywhere.
func (f *tableFixture) day(s *delivery.Store, n int) {
	ctx, key := f.t.Context(), fmt.Sprint("k", n)
	run := f.insert(s, delivery.Processing, f.record(key, key), key, key)
	require.Len(f.t, run, 2)
	renewed, err := s.Renew(ctx, refs(run))
	require.NoError(f.t, err)
	require.Len(f.t, renewed, 2)
	_, err = s.Fail(ctx, delivery.Failure{Of: run[0], Code: "handler"}, run[1:])
	require.NoError(f.t, err)
	claimed, err := s.Claim(ctx, pairs, 10, 10, false, room)
	require.NoError(f.t, err)
	require.Len(f.t, claimed, 1)
	_, err = s.Finish(ctx, claimed)
	require.NoError(f.t, err)
	claimed, err = s.Claim(ctx, pairs, 10, 10, false, room)
	require.NoError(f.t, err)
	require.Len(f.t, claimed, 1, "promoted")
	require.Eventually(f.t, func() bool {
		expired, err := s.TakeOver(ctx, 10, false)
		require.NoError(f.t, err)
		return len(expired) == 1
	}, testenv.Patience, 2*shortLease)
	claimed, err = s.Claim(ctx, pairs, 10, 10, true, room)
	require.NoError(f.t, err)
	require.Len(f.t, claimed, 1, "suspect")
	_, err = s.Finish(ctx, claimed)
	require.NoError(f.t, err)
}

// read returns the number of entries of an index that were read.
func (f *tableFixture) read(index string) (n int) {
	require.NoError(f.t, f.db.QueryRow(f.t.Context(), pg.InSchema(
		`SELECT idx_tup_read FROM pg_stat_user_indexes WHERE schemaname = $1 AND indexrelname = $2`, f.schema), f.schema, index).Scan(&n))
	return n
}
