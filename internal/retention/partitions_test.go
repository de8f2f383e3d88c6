package retention_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/retention"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

func TestPartitionGoes(t *testing.T) {
	t.Parallel()
	d, ctx := full(t), context.Background()
	r, l := d.cleaning(t, inBatches(4))
	v := d.first(t, r, l)
	require.False(t, v.Done, "nobody has published it")
	require.Len(t, d.send(t, "default"), 25)
	d.reviewOn(t, r, l, v)
	require.True(t, v.Done)
	require.ErrorIs(t, dropWhole(r, ctx, l, v), retention.ErrReview, "the relay was not known when it began")

	v = d.first(t, r, l)
	require.NoError(t, dropWhole(r, ctx, l, v))
	require.EqualValues(t, 9, v.Rows)
	require.False(t, d.has(t, "min_10"))
	require.EqualValues(t, 10, d.IDs(t, "outbox")[0])
	v = d.first(t, r, l)
	require.NoError(t, dropWhole(r, ctx, l, v))
	require.EqualValues(t, 10, v.Rows)
	require.Equal(t, []int64{20, 21, 22, 23, 24, 25}, d.IDs(t, "outbox"))
}

func TestPartitionStays(t *testing.T) {
	t.Parallel()
	for name, play := range map[string]func(*testing.T, *fixture){
		"one row is not published": func(t *testing.T, d *fixture) {
			d.Update(t, `UPDATE {schema}.outbox SET xid = pg_current_xact_id() WHERE id = 3`)
		},
		"one row is young": func(t *testing.T, d *fixture) {
			d.Update(t, `UPDATE {schema}.outbox SET created_at = now() WHERE id = 3`)
		},
		"another relay has not published it": func(t *testing.T, d *fixture) { d.sendUpTo(t, "audit", 5) },
		"a cursor is of another cluster": func(t *testing.T, d *fixture) {
			d.Exec(t, `UPDATE {schema}.outbox_cursor SET system_identifier = system_identifier + 1`)
		},
		"there is no cursor": func(t *testing.T, d *fixture) { d.Exec(t, `DELETE FROM {schema}.outbox_cursor`) },
	} {
		t.Run(name, func(t *testing.T) {
			d := full(t)
			d.send(t, "default")
			play(t, d)
			r, l := d.cleaning(t, keep)
			require.False(t, d.first(t, r, l).Done)
			r.Cfg.Archive = func(context.Context, pgx.Tx, []retention.Row) error { return errors.New("nothing is to be archived") }
			require.False(t, d.first(t, r, l).Done)
		})
	}
	t.Run("the last row is young", func(t *testing.T) {
		d := full(t)
		d.send(t, "default")
		d.Update(t, `UPDATE {schema}.outbox SET created_at = now() WHERE id = 9`)
		r, l := d.cleaning(t, keep)
		require.Nil(t, d.first(t, r, l))
	})
}

// What happens between the review and the lock is seen under the lock.
func TestPartitionIsReviewedUnderItsLock(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		play func(*testing.T, *fixture, *retention.Review)
		want error
	}{
		{"a row came in, by its id", func(t *testing.T, d *fixture, _ *retention.Review) {
			d.Update(t, `UPDATE {schema}.outbox SET id = 4 WHERE id = 24`)
			d.Update(t, `UPDATE {schema}.outbox SET xid = pg_current_xact_id() WHERE id = 4`)
		}, retention.ErrReview},
		{"a relay began", func(t *testing.T, d *fixture, _ *retention.Review) { d.sendUpTo(t, "audit", 1) }, retention.ErrReview},
		{"the server started again", func(_ *testing.T, _ *fixture, v *retention.Review) { v.Server = v.Server.Add(-time.Second) }, retention.ErrReview},
		{"the lease was lost", func(t *testing.T, d *fixture, _ *retention.Review) {
			d.Exec(t, `UPDATE {schema}.outbox_lease SET epoch = epoch + 1 WHERE name = 'cleaner'`)
		}, lease.ErrLeaseLost},
		{"somebody else dropped it", func(t *testing.T, d *fixture, _ *retention.Review) {
			d.Exec(t, `DROP TABLE {schema}.outbox_min_10`)
		}, retention.ErrReview},
		{"nothing", func(*testing.T, *fixture, *retention.Review) {}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := full(t)
			d.Exec(t, `DELETE FROM {schema}.outbox WHERE id = 4`)
			d.send(t, "default")
			r, l := d.cleaning(t, keep)
			v := d.first(t, r, l)
			require.True(t, v.Done)
			test.play(t, d, v)
			require.ErrorIs(t, dropWhole(r, context.Background(), l, v), test.want)
		})
	}
}

// insertAt records an event under an id that was drawn before.
const insertAt = `
INSERT INTO {schema}.outbox (id, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at)
VALUES ($1, gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', '{}', 'application/json', now(), now() - '8 days'::interval)`

// A transaction that was prepared holds its partition until it ends. Then its rows
// are new, and have to be published.
func TestPreparedTransactionKeepsItsPartition(t *testing.T) {
	// Not parallel: it measures how long the relay waits.
	d, ctx := newPartitionsFixture(t, 10), context.Background()
	tx := d.BeginInsert(t, 2)
	_, err := tx.Exec(ctx, pg.InSchema(`UPDATE {schema}.outbox SET created_at = now() - '8 days'::interval`, d.Schema))
	require.NoError(t, err)
	_, err = tx.Exec(ctx, fmt.Sprintf(`PREPARE TRANSACTION '%s'`, d.Schema))
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = d.DB.Exec(ctx, fmt.Sprintf(`ROLLBACK PREPARED '%s'`, d.Schema)) }) // fails where the test has committed it
	d.Insert(t, 20)
	d.age(t, "outbox", "created_at", "8 days")
	require.Len(t, d.send(t, "default"), 20)
	r, l := d.cleaning(t, keep)
	v := d.first(t, r, l)
	require.True(t, v.Done, "it is not to be seen")
	start := time.Now()
	require.ErrorIs(t, dropWhole(r, ctx, l, v), retention.ErrBusy)
	require.Less(t, time.Since(start), time.Second)

	_, err = d.DB.Exec(ctx, fmt.Sprintf(`COMMIT PREPARED '%s'`, d.Schema))
	require.NoError(t, err)
	require.ErrorIs(t, dropWhole(r, ctx, l, v), retention.ErrReview)
	v = d.first(t, r, l)
	require.False(t, v.Done)
	require.Equal(t, []int64{1, 2}, d.send(t, "default"))
	d.reviewOn(t, r, l, v)
	require.True(t, v.Done)
	require.NoError(t, dropWhole(r, ctx, l, v))
}

// Who began before the partition was full, sees nothing of all this, and records
// afterwards, draws a new id.
func TestRepeatableReadWriterBehindTheCut(t *testing.T) {
	t.Parallel()
	d, ctx := newPartitionsFixture(t, 10), context.Background()
	tx, err := d.DB.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer tx.Rollback(ctx)
	_, err = tx.Exec(ctx, `SELECT pg_current_xact_id()`) // its snapshot and its transaction id are old
	require.NoError(t, err)
	d.Insert(t, 25)
	d.age(t, "outbox", "created_at", "8 days")
	require.Len(t, d.send(t, "default"), 25)
	r, l := d.cleaning(t, keep)
	require.NoError(t, dropWhole(r, ctx, l, d.first(t, r, l)))
	d.InsertIn(t, tx, 2)
	require.NoError(t, tx.Commit(ctx))
	require.Equal(t, []int64{26, 27}, d.send(t, "default"))
	require.Subset(t, d.IDs(t, "outbox"), []int64{26, 27})
}

// An id that was drawn long ago has no partition any more. Its event is recorded, published and
// removed all the same, and does not delay the removal of other partitions.
func TestIDDrawnBeforeItsPartitionWent(t *testing.T) {
	t.Parallel()
	d, ctx := newPartitionsFixture(t, 10), context.Background()
	d.Insert(t, 2)
	var drawn int64
	require.NoError(t, d.DB.QueryRow(ctx, pg.InSchema(`SELECT nextval('{schema}.outbox_id_seq')`, d.Schema)).Scan(&drawn))
	d.Insert(t, 45)
	d.age(t, "outbox", "created_at", "8 days")
	d.send(t, "default")
	r, l := d.cleaning(t, keep)
	require.NoError(t, dropWhole(r, ctx, l, d.first(t, r, l)))
	d.Exec(t, insertAt, drawn)
	n, err := r.MakePartitions(ctx)
	require.NoError(t, err)
	require.Positive(t, n)
	require.Equal(t, []int64{drawn}, d.send(t, "default"))
	all, err := r.List(ctx)
	require.NoError(t, err)
	s, err := r.PublishedIn(ctx, l, 0, all[0].First)
	require.NoError(t, err)
	require.EqualValues(t, 1, s.Removed)
	require.NotContains(t, d.IDs(t, "outbox"), drawn)
	require.Contains(t, d.IDs(t, "outbox"), int64(10))
}

// Rows of one partition go, and none that is in the same place of another one.
func TestPartRemovesItsOwnRows(t *testing.T) {
	t.Parallel()
	d, ctx := full(t), context.Background()
	d.send(t, "default")
	r, l := d.cleaning(t, inBatches(3))
	s, err := r.PublishedIn(ctx, l, 9, 20)
	require.NoError(t, err)
	require.EqualValues(t, 3, s.Removed)
	ids := d.IDs(t, "outbox")
	require.Len(t, ids, 22)
	for _, id := range []int64{10, 11, 12} {
		require.NotContains(t, ids, id)
	}
}

// No relay comes, for long: everybody records on, and the first relay to come makes
// partitions again.
func TestNobodyMakesPartitions(t *testing.T) {
	t.Parallel()
	d, ctx := newPartitionsFixture(t, 10), context.Background()
	d.Insert(t, 400) // the eight, the first larger one, of 100 ids, and the second
	require.Len(t, d.IDs(t, "outbox"), 400)
	d.age(t, "outbox", "created_at", "8 days")
	l, err := lease.NewStore(d.DB, d.Schema, "default", time.Minute).Acquire(ctx)
	require.NoError(t, err)
	d.Exec(t, `INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch)
	           SELECT 400, pg_current_snapshot(), 400, system_identifier, $1 FROM pg_control_system()`, l.Epoch)
	r, p := d.cleaning(t, keep)
	_, err = r.MakePartitions(ctx)
	require.NoError(t, err)
	require.True(t, d.has(t, "10190_10200"), "behind the larger one: %s", d.parts(t))
	dropped := 0
	for {
		all, err := r.List(ctx)
		require.NoError(t, err)
		if !all[0].Closed {
			require.True(t, all[0].Large)
			s, err := r.PublishedIn(ctx, p, all[0].First-1, all[0].End)
			require.NoError(t, err)
			require.EqualValues(t, 211, s.Removed)
			break
		}
		require.NoError(t, dropWhole(r, ctx, p, d.first(t, r, p)))
		dropped++
	}
	require.Equal(t, 10, dropped)
	require.Empty(t, d.IDs(t, "outbox"))
	d.Exec(t, `SELECT setval('{schema}.outbox_id_seq', 10195)`)
	d.Insert(t, 1)
	_, err = r.MakePartitions(ctx)
	require.NoError(t, err)
}

// Who waits for a transaction that writes waits for 50 ms, and so do writers behind
// him.
func TestNobodyWaitsLongForPartitions(t *testing.T) {
	// Not parallel: it measures how long a writer waits.
	d, ctx := full(t), context.Background()
	d.send(t, "default")
	r, l := d.cleaning(t, keep)
	v := d.first(t, r, l)
	writer := d.BeginInsert(t, 10)
	stop, longest := make(chan struct{}), make(chan time.Duration)
	go func() {
		var most time.Duration
		for {
			select {
			case <-stop:
				longest <- most
				return
			default:
			}
			start := time.Now()
			d.Insert(t, 1)
			most = max(most, time.Since(start))
		}
	}()
	for range 10 {
		require.ErrorIs(t, dropWhole(r, ctx, l, v), errEmptied)
		require.EqualValues(t, 10, d.IDs(t, "outbox")[0])
		_, err := r.MakePartitions(ctx)
		if err != nil {
			require.ErrorIs(t, err, retention.ErrBusy)
		}
	}
	close(stop)
	most := <-longest
	t.Logf("a writer waited %v", most)
	require.Greater(t, most, 30*time.Millisecond, "somebody asked for the lock")
	require.Less(t, most, 500*time.Millisecond, "the limit is 100 ms; the machine may be busy")
	require.NoError(t, writer.Commit(ctx))
	require.Eventually(t, func() bool { return dropWhole(r, ctx, l, v) == nil }, testenv.Patience, time.Millisecond)
	require.False(t, d.has(t, "min_10"))
}

func TestPartitionsAreArchived(t *testing.T) {
	t.Parallel()
	d, ctx := full(t), context.Background()
	d.send(t, "default")
	var got []int64
	broken := errors.New("no room")
	fail := true
	r, l := d.cleaning(t, archiving(4, func(_ context.Context, _ pgx.Tx, rows []retention.Row) error {
		for _, e := range rows {
			if e.OutboxID == 6 && fail {
				fail = false
				return broken
			}
			got = append(got, e.OutboxID)
		}
		return nil
	}))
	all, err := r.List(ctx)
	require.NoError(t, err)
	v, err := r.BeginReview(ctx, all[0])
	require.NoError(t, err)
	_, err = r.ReviewBatch(ctx, l, v)
	require.NoError(t, err)
	_, err = r.ReviewBatch(ctx, l, v)
	require.ErrorIs(t, err, broken)
	require.False(t, v.Done)
	d.reviewOn(t, r, l, v)
	require.True(t, v.Done)
	require.Equal(t, []int64{1, 2, 3, 4, 5, 5, 6, 7, 8, 9}, got, "5 came with the batch that failed")
	require.NoError(t, dropWhole(r, ctx, l, v))
}

// Many processes make partitions of a table that has rows and rights, while others
// write.
func TestPlainTableBecomesFirstPartition(t *testing.T) {
	// Not parallel: it measures how long a writer waits.
	d, ctx := newFixture(t), context.Background()
	role := "part_" + strings.ReplaceAll(strings.ToLower(d.Schema), " ", "_")
	d.Exec(t, `CREATE ROLE `+role)
	t.Cleanup(func() { d.Exec(t, `DROP OWNED BY `+role); d.Exec(t, `DROP ROLE `+role) })
	d.Exec(t, `GRANT SELECT ON {schema}.outbox TO `+role)
	d.Exec(t, `GRANT INSERT (event_id, source) ON {schema}.outbox TO `+role)
	d.Insert(t, 100)
	file := func(table string) (n int64) {
		require.NoError(t, d.DB.QueryRow(ctx, pg.InSchema(`SELECT pg_relation_filenode('{schema}.`+table+`')::bigint`, d.Schema)).Scan(&n))
		return n
	}
	before := file("outbox")
	writer := d.BeginInsert(t, 1)
	done := make(chan error, 4)
	for range cap(done) {
		go func() { done <- outbox.Migrate(ctx, d.DB, outbox.MigrateConfig{Schema: d.Schema, PartitionRows: 20}) }()
	}
	var most time.Duration
	for range 20 {
		start := time.Now()
		d.Insert(t, 1)
		most = max(most, time.Since(start))
	}
	require.Less(t, most, 500*time.Millisecond, "the limit is 50 ms; the machine may be busy")
	require.NoError(t, writer.Commit(ctx))
	for range cap(done) {
		require.NoError(t, <-done)
	}
	require.NoError(t, outbox.Migrate(ctx, d.DB, outbox.MigrateConfig{Schema: d.Schema, PartitionRows: 20}), "once more")
	require.NoError(t, outbox.Migrate(ctx, d.DB, outbox.MigrateConfig{Schema: d.Schema}))
	first := d.parts(t)[slices.IndexFunc(d.parts(t), func(name string) bool { return strings.HasPrefix(name, "outbox_min_") })]
	require.Equal(t, before, file(first), "no row was written anew")
	require.Len(t, d.IDs(t, "outbox"), 121)
	d.Insert(t, 1)
	for _, right := range []string{`has_table_privilege($1, $2, 'SELECT')`, `has_column_privilege($1, $2, 'event_id', 'INSERT')`,
		`has_column_privilege($1, $2, 'source', 'INSERT')`, `NOT has_column_privilege($1, $2, 'xid', 'INSERT')`, `NOT has_table_privilege($1, $2, 'DELETE')`} {
		var has bool
		require.NoError(t, d.DB.QueryRow(ctx, `SELECT `+right, role, pgx.Identifier{d.Schema, "outbox"}.Sanitize()).Scan(&has))
		require.True(t, has, right)
	}
	var comment string
	require.NoError(t, d.DB.QueryRow(ctx, `SELECT obj_description($1::regclass)`, pgx.Identifier{d.Schema, "outbox"}.Sanitize()).Scan(&comment))
	require.Contains(t, comment, "Domain events")
	require.Len(t, d.send(t, "default"), 122)
}

// Pools may have any isolation by default.
func TestPartitionsUnderSerializable(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a setting of sessions
	d, ctx := newFixture(t), context.Background()
	d.DB = testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
	})
	require.NoError(t, outbox.Migrate(ctx, d.DB, outbox.MigrateConfig{Schema: d.Schema, PartitionRows: 10}))
	d.Insert(t, 95)
	d.age(t, "outbox", "created_at", "8 days")
	require.Len(t, d.send(t, "default"), 95)
	r, l := d.cleaning(t, keep)
	n, err := r.MakePartitions(ctx)
	require.NoError(t, err)
	require.Positive(t, n)
	require.NoError(t, dropWhole(r, ctx, l, d.first(t, r, l)))
}

// What is planned over empty tables on the first day runs when one of the larger
// partitions has grown: no index of it is walked as a whole.
func TestCleaningOverPartitions(t *testing.T) {
	// Not parallel: it counts the buffers that PostgreSQL touches.
	testenv.Direct(t) // prepared statements
	d, ctx := newPartitionsFixture(t, 100), context.Background()
	const batch, ids = 100, 50_000
	r, _ := d.cleaning(t, inBatches(batch))
	conn, err := d.DB.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	inTx := func(mode string, do func(pgx.Tx)) {
		tx, err := conn.Begin(ctx)
		require.NoError(t, err)
		defer tx.Rollback(ctx)
		for _, sql := range []string{retention.SQLCleanSettings, `SET LOCAL plan_cache_mode = ` + mode} {
			_, err = tx.Exec(ctx, sql)
			require.NoError(t, err)
		}
		do(tx)
	}
	statements := map[string]string{"part": r.SQLPart, "part_archived": r.SQLPartArchived, "review": r.SQLReview, "review_archived": r.SQLReviewArchived}
	args := fmt.Sprintf(`(%d, %d, '7 days', %d, '{}', 1000000000, 1000000)`, ids/2, batch, ids)
	inTx("force_generic_plan", func(tx pgx.Tx) {
		for name, sql := range statements {
			_, err := tx.Exec(ctx, "PREPARE "+name+" (bigint, bigint, interval, bigint, bigint[], bigint, int) AS "+sql)
			require.NoError(t, err)
			_, err = tx.Exec(ctx, "EXECUTE "+name+args)
			require.NoError(t, err)
		}
	})
	for range 10 {
		d.Insert(t, ids/10)
	}
	d.age(t, "outbox", "created_at", "8 days")
	d.Exec(t, `INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch)
	           SELECT $1, pg_current_snapshot(), $1, system_identifier, 1 FROM pg_control_system()`, ids)
	most := maxCleanBuffers + 3*len(d.parts(t))
	for _, analysed := range []string{"before ANALYZE", "after ANALYZE"} {
		for _, mode := range []string{"force_generic_plan", "force_custom_plan"} {
			for name := range statements {
				t.Run(analysed+", "+mode+", "+name, func(t *testing.T) {
					inTx(mode, func(tx pgx.Tx) {
						_, err := tx.Exec(ctx, "SAVEPOINT before")
						require.NoError(t, err)
						testenv.Explain(t, tx, "EXECUTE "+name+args) // reads the catalog
						_, err = tx.Exec(ctx, "ROLLBACK TO before")
						require.NoError(t, err)
						buffers, plan := testenv.Explain(t, tx, "EXECUTE "+name+args)
						t.Logf("%d buffers", buffers)
						require.LessOrEqual(t, buffers, most, "%s", plan)
					})
				})
			}
		}
		d.Exec(t, `ANALYZE {schema}.outbox`)
	}
}
