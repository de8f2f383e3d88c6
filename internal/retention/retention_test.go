package retention_test

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/retention"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A row goes when every relay has published it. Six rows are recorded, in order.
func TestPublishedRowsGo(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	for _, test := range []struct {
		name  string
		play  func(*testing.T, *fixture)
		stay  []int64
		stops string // relay that the log should name
	}{
		{"no relay has a cursor", func(t *testing.T, d *fixture) {}, []int64{1, 2, 3, 4, 5, 6}, ""},
		{"all of them", func(t *testing.T, d *fixture) { d.send(t, "default") }, nil, ""},
		{"up to where the open window is drained", func(t *testing.T, d *fixture) { d.sendUpTo(t, "default", 4) }, []int64{5, 6}, "default"},
		{"what two relays have sent", func(t *testing.T, d *fixture) {
			d.send(t, "default")
			d.sendUpTo(t, "audit", 2)
		}, []int64{3, 4, 5, 6}, "audit"},
		{"nothing while a relay has not begun", func(t *testing.T, d *fixture) {
			d.send(t, "default")
			d.arrive(t, "audit")
		}, []int64{1, 2, 3, 4, 5, 6}, "audit"},
		{"nothing that is too young", func(t *testing.T, d *fixture) {
			d.send(t, "default")
			d.Update(t, `UPDATE {schema}.outbox SET created_at = now() - '6 days'::interval WHERE id IN (3, 5)`)
		}, []int64{3, 5}, ""},
		{"nothing that was committed after it was passed", func(t *testing.T, d *fixture) {
			d.send(t, "default")
			d.Update(t, `UPDATE {schema}.outbox SET xid = pg_current_xact_id() WHERE id = 2`)
		}, []int64{2}, ""},
		{"nothing that one of two relays has not sent, wherever it stands", func(t *testing.T, d *fixture) {
			d.send(t, "default")
			d.send(t, "audit")
			d.Update(t, `UPDATE {schema}.outbox SET xid = pg_current_xact_id() WHERE id = 2`)
			d.send(t, "default")
		}, []int64{2}, ""},
		{"nothing by a cursor of another cluster", func(t *testing.T, d *fixture) {
			d.send(t, "default")
			d.sendUpTo(t, "audit", 6)
			d.Exec(t, `UPDATE {schema}.outbox_cursor SET system_identifier = system_identifier + 1 WHERE relay = 'audit'`)
		}, []int64{1, 2, 3, 4, 5, 6}, ""},
		{"nothing by a cursor from the future", func(t *testing.T, d *fixture) {
			d.send(t, "default")
			d.Exec(t, `UPDATE {schema}.outbox_cursor SET snapshot = '4000000000:4000000000:'`)
		}, []int64{1, 2, 3, 4, 5, 6}, ""},
		{"nothing beside an event from the future", func(t *testing.T, d *fixture) {
			d.send(t, "default")
			d.Update(t, `UPDATE {schema}.outbox SET xid = '4000000000' WHERE id = 6`)
		}, []int64{1, 2, 3, 4, 5, 6}, ""},
		{"what failed and is written down elsewhere", func(t *testing.T, d *fixture) {
			d.send(t, "default")
			d.Exec(t, `INSERT INTO {schema}.outbox_failed
			                  (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at, status)
			           SELECT id, 'k', event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at, 'failed'
			             FROM {schema}.outbox WHERE id = 3`)
		}, nil, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			d, ctx := newFixture(t), context.Background()
			for range 3 {
				d.Insert(t, 2)
			}
			d.age(t, "outbox", "created_at", "8 days")
			test.play(t, d)
			r, l := d.cleaning(t, keep)
			s, err := r.Published(ctx, l, 0)
			require.NoError(t, err)
			require.EqualValues(t, 6-len(test.stay), s.Removed)
			require.ElementsMatch(t, test.stay, d.IDs(t, "outbox"))
			require.Equal(t, test.stops, s.Lagging)
		})
	}
}

// A transaction that was prepared a week ago commits: its rows are old, and have
// the lowest ids, and no relay has seen them.
func TestPreparedTransactionIsNotRemoved(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	tx := d.BeginInsert(t, 2)
	_, err := tx.Exec(ctx, pg.InSchema(`UPDATE {schema}.outbox SET created_at = now() - '8 days'::interval`, d.Schema))
	require.NoError(t, err)
	_, err = tx.Exec(ctx, fmt.Sprintf(`PREPARE TRANSACTION '%s'`, d.Schema))
	require.NoError(t, err)
	t.Cleanup(func() { // fails where the test has committed it
		_, _ = d.DB.Exec(ctx, fmt.Sprintf(`ROLLBACK PREPARED '%s'`, d.Schema))
	})
	d.Insert(t, 3)
	d.age(t, "outbox", "created_at", "8 days")
	require.Equal(t, []int64{3, 4, 5}, d.send(t, "default"))
	r, l := d.cleaning(t, keep)
	_, err = d.DB.Exec(ctx, fmt.Sprintf(`COMMIT PREPARED '%s'`, d.Schema))
	require.NoError(t, err)

	s, err := r.Published(ctx, l, 0)
	require.NoError(t, err)
	require.EqualValues(t, 3, s.Removed)
	require.Equal(t, []int64{1, 2}, d.send(t, "default"))
	s, err = r.Published(ctx, l, 0)
	require.NoError(t, err)
	require.EqualValues(t, 2, s.Removed)
}

// A process that lost the lease removes nothing that only its holder may remove.
func TestLostLeaseRemovesNothing(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Insert(t, 2)
	d.age(t, "outbox", "created_at", "8 days")
	d.send(t, "default")
	d.send(t, "default")
	d.age(t, "outbox_cursor", "created_at", "8 days")
	r, l := d.cleaning(t, keep)
	l.Epoch--
	before := d.Count(t, "outbox_cursor")
	_, err := r.Published(ctx, l, 0)
	require.ErrorIs(t, err, lease.ErrLeaseLost)
	_, err = r.Cursors(ctx, l, 0)
	require.ErrorIs(t, err, lease.ErrLeaseLost)
	require.Equal(t, 2, d.Count(t, "outbox"))
	require.Equal(t, before, d.Count(t, "outbox_cursor"))
}

// Another relay of the schema is at the same rows: we wait for it no longer than
// for a blink, and leave them to it.
func TestLockedRowsAreLeft(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Insert(t, 2)
	d.age(t, "outbox", "created_at", "8 days")
	d.send(t, "default")
	tx, err := d.DB.Begin(ctx)
	require.NoError(t, err)
	defer tx.Rollback(ctx)
	_, err = tx.Exec(ctx, pg.InSchema(`SELECT FROM {schema}.outbox WHERE id = 2 FOR UPDATE`, d.Schema))
	require.NoError(t, err)
	r, l := d.cleaning(t, keep)
	_, err = r.Published(ctx, l, 0)
	require.ErrorIs(t, err, retention.ErrBusy)
	require.Equal(t, 2, d.Count(t, "outbox"))
}

// History keeps a row for each minute, until it is too old. The newest row of each
// relay stays, and the relay goes on from it.
func TestCursorHistory(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Insert(t, 3)
	d.send(t, "default")
	first := d.IDs(t, "outbox_cursor")
	d.Exec(t, `
		INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch, created_at)
		SELECT r, 0, '1:1:', 0, 1, 1, date_trunc('minute', now()) - ago * '1 minute'::interval + n * '1 second'::interval
		  FROM unnest(ARRAY['gone', 'default']) AS r, unnest(ARRAY[20000, 10100, 70, 65, 5]) WITH ORDINALITY AS a (ago, place), generate_series(1, 4) AS n
		 WHERE r = 'default' OR ago > 10100
		 ORDER BY r DESC, place, n`)
	d.Exec(t, `UPDATE {schema}.outbox_cursor SET created_at = now() - '20 days'::interval WHERE id = ANY ($1)`, first)
	d.Exec(t, `
		INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, window_snapshot, highest_id, system_identifier, epoch)
		SELECT relay, last_processed_id, snapshot, window_snapshot, highest_id, system_identifier, epoch FROM {schema}.outbox_cursor WHERE id = $1`,
		first[len(first)-1])
	newest := d.IDs(t, "outbox_cursor")
	r, l := d.cleaning(t, keep)
	s, err := r.Cursors(ctx, l, 0)
	require.NoError(t, err)
	require.False(t, s.More)

	rows, err := d.DB.Query(ctx, pg.InSchema(`
		SELECT relay || ' ' || CASE WHEN id = $1 THEN 'newest' ELSE round(extract(epoch FROM now() - created_at) / 60) || ' min' END
		  FROM {schema}.outbox_cursor ORDER BY id`, d.Schema), newest[len(newest)-1])
	require.NoError(t, err)
	stayed, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Len(t, stayed, 1+2+4+1, "%v", stayed) // gone's newest, one of each minute, all of the last hour, the newest
	require.Contains(t, stayed[0], "gone 2000")   // or a minute more
	require.Equal(t, "default newest", stayed[7])
	d.Insert(t, 1)
	require.Equal(t, []int64{4}, d.send(t, "default"))
}

// Resolved rows go by when they were resolved, and one without a time gets it.
func TestResolvedRowsGo(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Exec(t, `
		INSERT INTO {schema}.outbox_failed
		       (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at, failed_at, status, resolved_at)
		SELECT row_number() OVER (), 'k', gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', '{}', 'application/json', now(), now(), now() - '90 days'::interval, status, now() - ago
		  FROM (VALUES ('resolved', '31 days'::interval), ('resolved', '29 days'), ('resolved', NULL), ('dead', '90 days'), ('failed', NULL)) AS v (status, ago)`)
	r, l := d.cleaning(t, keep)
	s, err := r.Resolved(ctx, l)
	require.NoError(t, err)
	require.EqualValues(t, 1, s.Removed)
	require.Equal(t, []int64{2, 3, 4, 5}, d.IDs(t, "outbox_failed"))
	d.age(t, "outbox_failed", "resolved_at", "31 days")
	s, err = r.Resolved(ctx, l)
	require.NoError(t, err)
	require.EqualValues(t, 2, s.Removed)
	require.Equal(t, []int64{4, 5}, d.IDs(t, "outbox_failed"))
	l.Epoch--
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'resolved'`)
	d.age(t, "outbox_failed", "resolved_at", "31 days")
	_, err = r.Resolved(ctx, l)
	require.ErrorIs(t, err, lease.ErrLeaseLost)
	require.Equal(t, 2, d.Count(t, "outbox_failed"))
}

func TestCleanAudit(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Exec(t, `
		INSERT INTO {schema}.outbox_audit (operator, action, reason, relay, parking_key, created_at)
		SELECT 'kim', 'hold', 'x', 'default', 'k', now() - CASE WHEN n <= 250 THEN '366 days' ELSE '364 days' END::interval FROM generate_series(1, 500) AS n`)
	r, _ := d.cleaning(t, inBatches(100))
	w := retention.Scan{Batch: r.Audited, Pause: func(time.Duration) bool { return true }}
	removed, err := w.Run(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 250, removed)
	require.Equal(t, 250, d.Count(t, "outbox_audit"))
}

func TestCleanHandled(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Exec(t, `
		INSERT INTO {schema}.event_handled (consumer_group, aggregate_type, aggregate_id, action, handled_at)
		SELECT 'g', 'a', n::text, 'x', now() - CASE WHEN n <= 250 THEN '32 days' ELSE '30 days' END::interval FROM generate_series(1, 500) AS n`)
	removed, err := outbox.CleanHandled(ctx, d.DB, d.Schema, outbox.RetentionConfig{})
	require.NoError(t, err)
	require.EqualValues(t, 250, removed)
	require.Equal(t, 250, d.Count(t, "event_handled"))
	removed, err = outbox.CleanHandled(ctx, d.DB, d.Schema, outbox.RetentionConfig{HandledFor: outbox.Forever})
	require.NoError(t, err)
	require.Zero(t, removed)

	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	_, err = outbox.CleanHandled(cancelled, d.DB, d.Schema, outbox.RetentionConfig{})
	require.ErrorIs(t, err, context.Canceled)
	_, err = outbox.CleanHandled(ctx, nil, "$user", outbox.RetentionConfig{HandledFor: -1})
	require.ErrorIs(t, err, outbox.ErrNilArgument)
	require.ErrorIs(t, err, outbox.ErrMalformed)
	require.ErrorContains(t, err, "field HandledFor is -1ns")
}

// Each walk looks at the rows that have become old since the last one, and no other.
func TestWalk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const size = 10
		rows := make(map[int64]string) // o: old, h: held, y: young
		add := func(from int64, kinds string) {
			for i, k := range kinds {
				rows[from+int64(i)] = string(k)
			}
		}
		var looks []int64
		w := retention.Scan{Pause: func(time.Duration) bool { return true }}
		w.Batch = func(_ context.Context, after int64) (s retention.Step, err error) {
			n, young := 0, 0
			for id := after + 1; id <= 200 && n < size; id++ {
				kind, ok := rows[id]
				if !ok {
					continue
				}
				looks = append(looks, id)
				n, s.Last = n+1, id
				switch kind {
				case "o":
					delete(rows, id)
					s.Removed++
				case "y":
					young++
					if s.Young == 0 {
						s.Young = id
					}
				}
			}
			s.More = n == size && young < n
			return s, nil
		}
		run := func(removed int, want ...int64) {
			t.Helper()
			looks = nil
			n, err := w.Run(context.Background())
			require.NoError(t, err)
			require.EqualValues(t, removed, n)
			require.Equal(t, want, looks)
		}
		run(0)
		add(1, "ooh"+"oooyo"+"ooooo"+"yyyyyyyyyyyyyyyyy"+"o")
		run(11, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30)
		// From the young one on, which may be young by a clock that was ahead: what is
		// held is not looked at, and a batch of young ones ends it.
		run(0, 7, 14, 15, 16, 17, 18, 19, 20, 21, 22)
		add(7, "o")
		add(3, "o")
		add(14, "oooooooooooooooooo")
		run(19, 7, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31)
		run(0)
		time.Sleep(retention.RescanAfter + 1) // then from the start, for what could not go in its turn
		run(1, 3)
	})
}

// While there is a backlog no batch begins, and a relay that stops waits for none.
func TestCleanerGivesWay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var backlog atomic.Bool
		ctx, cancel := context.WithCancel(context.Background())
		cfg := retention.CleanerConfig{Rules: keep, Poll: time.Second}
		c := retention.NewCleaner(lease.Leadership{Held: context.Background()}, cfg, nil, backlog.Load, slog.New(slog.DiscardHandler), nil)
		start := time.Now()
		require.True(t, c.Pause(ctx, time.Second))
		require.Equal(t, 4*time.Second, time.Since(start))

		backlog.Store(true)
		time.AfterFunc(time.Hour, func() { backlog.Store(false) })
		require.True(t, c.Pause(ctx, 0))
		require.GreaterOrEqual(t, time.Since(start), time.Hour)

		backlog.Store(true)
		time.AfterFunc(time.Hour, cancel)
		require.False(t, c.Pause(ctx, 0))
	})
}

// Every constructor completes every statement.
func TestStatementsAreComplete(t *testing.T) {
	t.Parallel()
	r := retention.NewStore(nil, "s", keep)
	for _, sql := range []string{r.SQLPublished, r.SQLArchived, r.SQLCursors, r.SQLResolved, r.SQLProof} {
		require.Contains(t, sql, `"s".outbox`)
		require.NotContains(t, sql, "{schema}")
	}
}

// maxCleanBuffers is what a batch of a hundred may touch: for each row its page,
// to look at it, to lock it and to mark it, and some leaves of indexes. A plan that
// walks an index of these tables touches thousands.
const maxCleanBuffers = 100 + 5*100

// A batch costs what it does, whatever the tables hold, by every plan, also by one
// of the first day, when they were empty.
func TestCleaningOverManyRows(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it counts the buffers that PostgreSQL touches.
	testenv.Direct(t) // prepared statements
	d, ctx := newFixture(t), context.Background()
	for _, table := range []string{"outbox", "outbox_cursor", "outbox_failed", "event_handled"} {
		d.Exec(t, `ALTER TABLE {schema}.`+table+` SET (autovacuum_enabled = false)`)
		d.Exec(t, `ANALYZE {schema}.`+table)
	}
	const many, batch = 100_000, 100
	r, _ := d.cleaning(t, inBatches(batch))
	conn, err := d.DB.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	inTx := func(mode string, do func(pgx.Tx)) {
		tx, err := conn.Begin(ctx)
		require.NoError(t, err)
		defer tx.Rollback(ctx)
		_, err = tx.Exec(ctx, retention.SQLCleanSettings)
		require.NoError(t, err)
		_, err = tx.Exec(ctx, `SET LOCAL plan_cache_mode = `+mode)
		require.NoError(t, err)
		do(tx)
	}
	statements := []struct{ name, sql, args string }{
		{"published", "(bigint, bigint, interval, bigint, bigint[], bigint, int) AS " + r.SQLPublished, fmt.Sprintf(`(0, %d, '7 days', %d, '{}', 1000000000, 1000000)`, batch, math.MaxInt64)},
		{"archived", "(bigint, bigint, interval, bigint, bigint[], bigint, int) AS " + r.SQLArchived, fmt.Sprintf(`(0, %d, '7 days', %d, '{}', 1000000000, 1000000)`, batch, math.MaxInt64)},
		{"held back", "", fmt.Sprintf(`(%d, %d, '7 days', %d, '{}', 1000000000, 1000000)`, many, batch, math.MaxInt64)}, // of published
		{"cursors", "(bigint, bigint, interval, interval) AS " + r.SQLCursors, fmt.Sprintf(`(0, %d, '7 days', '1 hour')`, batch)},
		{"resolved", "(bigint, interval) AS " + r.SQLResolved, fmt.Sprintf(`(%d, '30 days')`, batch)},
		{"handled", "(bigint, bigint, interval) AS " + r.SQLHandled, fmt.Sprintf(`(0, %d, '31 days')`, batch)},
	}
	prepared := func(name string) string {
		if name == "held back" {
			return "published"
		}
		return name
	}
	inTx("force_generic_plan", func(tx pgx.Tx) {
		for _, s := range statements {
			if s.sql != "" {
				_, err := tx.Exec(ctx, "PREPARE "+s.name+" "+s.sql)
				require.NoError(t, err)
			}
			_, err := tx.Exec(ctx, "EXECUTE "+prepared(s.name)+s.args)
			require.NoError(t, err)
		}
	})

	// Then the tables grow.
	d.Insert(t, many)
	d.age(t, "outbox", "created_at", "8 days")
	d.Exec(t, `
		INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch, created_at)
		SELECT 'relay ' || n % 3, $1, pg_current_snapshot(), $1, system_identifier, 1, now() - '20 days'::interval
		  FROM pg_control_system(), generate_series(1, $1) AS n`, many)
	d.Insert(t, many)
	d.Update(t, `UPDATE {schema}.outbox SET created_at = now() - '8 days'::interval WHERE id > $1`, many)
	d.Exec(t, `
		INSERT INTO {schema}.event_handled (consumer_group, aggregate_type, aggregate_id, action, handled_at)
		SELECT 'g', 'a', n::text, 'x', now() - '40 days'::interval FROM generate_series(1, $1) AS n`, many)
	d.Exec(t, `
		INSERT INTO {schema}.outbox_failed
		       (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at, status, resolved_at)
		SELECT n, 'k', gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', '{}', 'application/json', now(), now(),
		       CASE WHEN n > $1 / 2 THEN 'resolved' ELSE 'dead' END, now() - '40 days'::interval
		  FROM generate_series(1, $1::bigint) AS n`, many)
	for _, analysed := range []string{"before ANALYZE", "after ANALYZE"} {
		for _, mode := range []string{"force_generic_plan", "force_custom_plan"} {
			for _, s := range statements {
				t.Run(analysed+", "+mode+", "+s.name, func(t *testing.T) {
					inTx(mode, func(tx pgx.Tx) {
						buffers, plan := testenv.Explain(t, tx, "EXECUTE "+prepared(s.name)+s.args)
						t.Logf("%d buffers", buffers)
						require.LessOrEqual(t, buffers, maxCleanBuffers, "%s", plan)
					})
				})
			}
		}
		for _, table := range []string{"outbox", "outbox_cursor", "outbox_failed", "event_handled"} {
			d.Exec(t, `ANALYZE {schema}.`+table)
		}
	}
}
