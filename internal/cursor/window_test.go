package cursor_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/relay"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// insertLarge adds n events of so many bytes in one transaction.
func (d *fixture) insertLarge(t *testing.T, n, size int) {
	t.Helper()
	d.Exec(t, `
		INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload_bytes, content_type, occurred_at)
		SELECT gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', convert_to(repeat('x', $2), 'UTF8'), 'text/plain', now()
		  FROM generate_series(1, $1)`, n, size)
}

// statements bounds no statement.
func statements() (context.Context, context.CancelFunc) {
	return context.WithCancel(context.Background())
}

// loaded takes the lease and loads the position.
func (d *fixture) loaded(t *testing.T) (*lease.Lease, cursor.Position) {
	t.Helper()
	l, err := d.leases.Acquire(context.Background())
	require.NoError(t, err)
	p, err := d.cursors.Load(context.Background(), l)
	require.NoError(t, err)
	return l, p
}

// announced opens a window without reading it.
func (d *fixture) announced(t *testing.T) (*lease.Lease, cursor.Position) {
	t.Helper()
	l, p := d.loaded(t)
	p, events, large, err := d.cursors.Open(context.Background(), l, p, 0)
	require.NoError(t, err)
	require.True(t, large)
	require.Empty(t, events)
	return l, p
}

// The statement that announces a window holds the lock of the lease while it reads, so it
// reads no more than a megabyte.
func TestOpenReadsLittle(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		events, size, limit int
		reads               int
	}{
		"one that fits":                 {events: 1, size: 300_000, limit: 10, reads: 1},
		"one that fits not":             {events: 1, size: 1<<20 + 1, limit: 10},
		"several that fit not together": {events: 3, size: 400_000, limit: 10},
		"more than asked for":           {events: 3, size: 1, limit: 2},
		"none is asked for":             {events: 1, size: 1},
	} {
		t.Run(name, func(t *testing.T) {
			d, ctx := newFixture(t), context.Background()
			l, p := d.loaded(t)
			d.insertLarge(t, test.events, test.size)
			next, events, large, err := d.cursors.Open(ctx, l, p, test.limit)
			require.NoError(t, err)
			require.Len(t, events, test.reads)
			require.Equal(t, test.reads == 0, large)
			require.NotEmpty(t, next.Window)
			require.Len(t, remaining(t, d.cursors, next), test.events)
		})
	}
}

// A row that was copied here may have a transaction id that this cluster has not reached.
// It is in no window, so it must announce none: the relay would announce windows without
// end.
func TestUnreachedTransactionAnnouncesNothing(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, p := d.loaded(t)
	d.Insert(t, 2)
	d.Update(t, `UPDATE {schema}.outbox SET xid = '4611686018427387904' WHERE id = 1`)
	next, events, large, err := d.cursors.Open(ctx, l, p, 10)
	require.NoError(t, err)
	require.False(t, large)
	require.Equal(t, []int64{2}, ids(events), "it holds up nothing else")
	next, events, large, err = d.cursors.Open(ctx, l, next, 10)
	require.NoError(t, err)
	require.False(t, large)
	require.Empty(t, events)
	for range 3 {
		again, _, _, err := d.cursors.Open(ctx, l, next, 10)
		require.NoError(t, err)
		require.Equal(t, next, again)
	}
}

// What is read of a window are the transactions that ended in it, whatever was in progress at its beginning and its
// end.
func TestUnpagedIsTheWindow(t *testing.T) {
	t.Parallel()
	const all = 30
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		ended := make([]bool, all+1)
		snapshot := func(from int) (text string, xmax int) {
			xmax = from + random.IntN(all-from)
			var open []string
			for xid := 3; xid < xmax; xid++ {
				if ended[xid] = ended[xid] || random.IntN(3) > 0; !ended[xid] {
					open = append(open, strconv.Itoa(xid))
				}
			}
			first := strconv.Itoa(xmax)
			if len(open) > 0 {
				first = open[0]
			}
			return fmt.Sprintf("%s:%d:%s", first, xmax, strings.Join(open, ",")), xmax
		}
		base, from := snapshot(3)
		before := slices.Clone(ended)
		window, _ := snapshot(from)
		u, err := cursor.UnpagedOf(cursor.Position{Base: base, Window: window})
		require.NoError(t, err)
		next := uint64(0)
		read := make([]bool, all+1)
		for _, r := range u.Ranges {
			require.LessOrEqual(t, r.First, r.Last)
			require.GreaterOrEqual(t, r.First, next, "they ascend")
			for next = r.First; next <= r.Last; next++ {
				read[next] = true
			}
		}
		for xid := range ended {
			require.Equal(t, ended[xid] && !before[xid], read[xid], "transaction %d, from %s to %s: %v", xid, base, window, u.Ranges)
		}
	}
}

// Pages read a window whole and nothing else: many transactions, some of which were in
// progress in the base, some of which still are, and some of which have many rows.
func TestPagesReadTheWindow(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, p := d.loaded(t)
	var late []pgx.Tx
	for range 4 {
		late = append(late, d.BeginInsert(t, 5))
	}
	d.Insert(t, 3)
	p, events, _, err := d.cursors.Open(ctx, l, p, 100)
	require.NoError(t, err)
	require.Len(t, events, 3)
	var want []int64
	for _, e := range events {
		p.Last = e.ID
	}
	p.Highest = p.Last
	require.NoError(t, late[1].Commit(ctx))
	require.NoError(t, late[2].Commit(ctx))
	require.NoError(t, late[3].Rollback(ctx))
	d.BeginInsert(t, 4)
	for range 5 {
		d.Insert(t, 4)
	}
	p, _, large, err := d.cursors.Open(ctx, l, p, 0)
	require.NoError(t, err)
	require.True(t, large)
	require.GreaterOrEqual(t, len(tables.SnapshotInProgress(p.Base)), 4)
	require.NoError(t, late[0].Commit(ctx)) // too late for this window
	rows, err := d.DB.Query(ctx, pg.InSchema(`SELECT id FROM {schema}.outbox WHERE id BETWEEN 6 AND 15 OR id > 27 ORDER BY id`, d.Schema))
	require.NoError(t, err)
	want, err = pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(t, err)
	require.Len(t, want, 30)
	require.Equal(t, want, remaining(t, d.cursors, p))
	p.Last = want[7]
	require.Equal(t, want[8:], remaining(t, d.cursors, p))
}

// Ids of rows that were written with ids may be below 1. Pages of a new window have them too, also of a transaction
// that was in progress in the base.
func TestPagesReadIDsBelowOne(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, p := d.loaded(t)
	late := d.BeginInsert(t, 2)
	d.Insert(t, 3)
	p, events, _, err := d.cursors.Open(ctx, l, p, 100)
	require.NoError(t, err)
	p.Last = events[len(events)-1].ID
	p.Highest = p.Last
	require.NoError(t, late.Commit(ctx))
	d.Insert(t, 4)
	d.Update(t, `UPDATE {schema}.outbox SET id = id - 7 WHERE id NOT IN (3, 4, 5)`)
	p, _, large, err := d.cursors.Open(ctx, l, p, 0)
	require.NoError(t, err)
	require.True(t, large)
	want := []int64{-6, -5, -1, 0, 1, 2}
	require.Equal(t, want, remaining(t, d.cursors, p))
	p.Last = -1
	require.Equal(t, want[3:], remaining(t, d.cursors, p))
}

// A batch is as large as the memory has room for, whatever BatchSize is, and every event
// comes, in order.
func TestFetchIsBounded(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.insertLarge(t, 20, 1<<20)
	d.Exec(t, `DELETE FROM {schema}.outbox WHERE id = 4`)
	d.Exec(t, `SELECT nextval('{schema}.outbox_id_seq')`)
	d.insertLarge(t, 18, 1<<20)
	_, p := d.announced(t)
	left := remaining(t, d.cursors, p)
	require.Len(t, left, 37)
	var got, batches []int64
	for len(left) > 0 {
		events, through, err := d.cursors.Fetch(ctx, p, left)
		require.NoError(t, err)
		got, batches = append(got, ids(events)...), append(batches, int64(len(events)))
		left = slices.DeleteFunc(left, func(id int64) bool { return id <= through })
	}
	require.Equal(t, []int64{16, 16, 5}, batches)
	require.Equal(t, remaining(t, d.cursors, p), got)
	events, through, err := d.cursors.Fetch(ctx, p, []int64{4})
	require.NoError(t, err)
	require.Empty(t, events, "it was deleted")
	require.EqualValues(t, 4, through)
}

// An event that is larger than any record stays in PostgreSQL, with its true size, in each format of the protocol.
func TestHugeRowIsRejectedUnread(t *testing.T) {
	t.Parallel()
	const most = 64 << 10
	d := newFixture(t)
	d.Insert(t, 6)
	large := strings.Repeat("x", most)
	d.Update(t, `UPDATE {schema}.outbox SET payload = $1::text::jsonb WHERE id = 2`, `"`+large+`"`)
	d.Update(t, `UPDATE {schema}.outbox SET payload = NULL, payload_bytes = $1 WHERE id = 3`, []byte(large+"x"))
	d.Update(t, `UPDATE {schema}.outbox SET headers = $1::text::jsonb WHERE id = 4`, `{"a": "`+large+`"}`)
	d.Update(t, `UPDATE {schema}.outbox SET payload = NULL, payload_bytes = '' WHERE id = 5`)
	var sizes []int
	require.NoError(t, d.DB.QueryRow(t.Context(), pg.InSchema(`SELECT array_agg(size ORDER BY id) FROM {schema}.outbox`, d.Schema)).Scan(&sizes))
	_, p := d.announced(t)
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		c := cursor.NewStore(testenv.PoolIn(t, mode), d.Schema, "default")
		c.Most = most
		events, through, err := c.Fetch(t.Context(), p, []int64{1, 2, 3, 4, 5, 6})
		require.NoError(t, err)
		require.EqualValues(t, 6, through)
		require.Equal(t, []int64{1, 2, 3, 4, 5, 6}, ids(events))
		for i, e := range events {
			huge := i >= 1 && i <= 3
			require.Equal(t, huge, e.Payload == nil, "%v: %d", mode, e.ID)
			require.Equal(t, sizes[i], e.Size)
			if !huge {
				require.NoError(t, e.Unreadable)
				continue
			}
			require.Nil(t, e.Headers)
			require.Equal(t, &envelope.TooLargeError{ID: e.ID, EventID: string(e.EventID), Size: sizes[i], Most: most}, e.Unreadable)
			_, err = e.Record(envelope.RecordForm{}, nil)
			require.Equal(t, "message_too_large", relay.RejectionClass(err))
			require.ErrorContains(t, err, fmt.Sprintf("row %d of outbox, event %s: %d bytes as printed, at most %d are sent", e.ID, e.EventID, sizes[i], most))
		}
	}
	require.Equal(t, []int{16 << 20, 24_000_000, 200 << 20}, []int{cursor.LargestEvent(1_000_012), cursor.LargestEvent(4_000_000), cursor.LargestEvent(100 << 20)})
}

// A relay that parks an event copies what PostgreSQL stores of it. So an event that is larger than any record takes as
// much room as it is stored in.
func TestHugeRowsTakeRoomAsStored(t *testing.T) {
	t.Parallel()
	const most = 64 << 10
	d := newFixture(t)
	d.Insert(t, 3)
	random := make([]byte, 20<<20)
	_, err := rand.NewChaCha8([32]byte{}).Read(random)
	require.NoError(t, err)
	d.Update(t, `UPDATE {schema}.outbox SET payload = NULL, payload_bytes = $1`, random)
	d.insertLarge(t, 200, 2*most)
	_, p := d.announced(t)
	d.cursors.Most = most
	left := remaining(t, d.cursors, p)
	require.Len(t, left, 203)
	var batches []int
	for len(left) > 0 {
		events, through, err := d.cursors.Fetch(t.Context(), p, left)
		require.NoError(t, err)
		for _, e := range events {
			require.IsType(t, &envelope.TooLargeError{}, e.Unreadable)
		}
		batches = append(batches, len(events))
		left = slices.DeleteFunc(left, func(id int64) bool { return id <= through })
	}
	require.Equal(t, []int{1, 1, 1, 200}, batches)
}

// Nothing that reads events sorts them: PostgreSQL would write them to temporary files.
func TestReadsSortNoPayloads(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // prepared statements
	d, ctx := newFixture(t), context.Background()
	d.insertLarge(t, 20, 1<<20)
	l, p := d.announced(t)
	tx, err := d.DB.Begin(ctx)
	require.NoError(t, err)
	defer tx.Rollback(ctx)
	for _, sql := range []string{
		cursor.SQLSettings, "SET LOCAL work_mem = '64kB'",
		"PREPARE rows (bigint, text, bigint, timestamptz, bigint[], bigint[], bigint, int) AS " + d.cursors.SQLFetch,
		"PREPARE poll (text, text, bigint, bigint, pg_snapshot, xid8, bigint, bool, bigint, bigint, bigint, timestamptz, bigint, bigint, bigint, bigint, bytea) AS " + d.cursors.SQLOpen,
	} {
		_, err := tx.Exec(ctx, sql)
		require.NoError(t, err)
	}
	server := p.Server.Format(time.RFC3339Nano)
	for name, execute := range map[string]string{
		"fetch": fmt.Sprintf(`EXECUTE rows(%d, 'default', %d, '%s', '{1,15}', '{9,20}', 100000000, 16777216)`, p.CursorID, p.Epoch, server),
		"open": fmt.Sprintf(`EXECUTE poll('default', '%s', %d, %d, '%s', '%s', 1000, false, %d, %d, %d, '%s', 100000000, %d, NULL, NULL, NULL)`,
			l.Holder, l.Epoch, p.CursorID, p.Base, tables.SnapshotMax(p.Base), p.Last, p.Highest, p.SystemID, server, p.Epoch),
	} {
		var plan []byte
		require.NoError(t, tx.QueryRow(ctx, "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "+execute, pgx.QueryExecModeSimpleProtocol).Scan(&plan))
		var explained []struct {
			Plan struct {
				Rows    float64 `json:"Actual Rows"`
				Written int     `json:"Temp Written Blocks"`
			}
		}
		require.NoError(t, json.NewDecoder(bytes.NewReader(plan)).Decode(&explained))
		require.GreaterOrEqual(t, explained[0].Plan.Rows, 15., name)
		require.Zero(t, explained[0].Plan.Written, "%s: %s", name, plan)
	}
}

// A payload that has no text of less than 1 GB fails the statement that reads it, and the
// rows in front of it have come by then. Without it the row can be read.
func TestFetchUpToAnUnreadableRow(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Insert(t, 5)
	testenv.AllowUnprintable(t, d.DB, d.Schema)
	d.Update(t, `UPDATE {schema}.outbox SET payload = $1::text::jsonb WHERE id = 3`, testenv.Unprintable)
	d.Update(t, `UPDATE {schema}.outbox SET headers = $1::text::jsonb WHERE id = 5`, testenv.Unprintable)
	l, p := d.loaded(t)
	p, _, _, err := d.cursors.Open(ctx, l, p, 0)
	require.NoError(t, err)

	events, through, err := d.cursors.Fetch(ctx, p, []int64{1, 2, 3, 4, 5})
	require.True(t, pg.IsUnreadable(err), "%v", err)
	require.Equal(t, []int64{1, 2}, ids(events))
	require.EqualValues(t, 2, through)
	for id, column := range map[int64]string{3: "payload", 5: "headers"} {
		got := relay.Fetch(statements, d.cursors, p, []int64{id}, relay.ReadLimits{Events: relay.ReadLimit{Now: 1, Most: 10, All: 10}})
		require.NoError(t, got.Err)
		require.Equal(t, []int64{id}, ids(got.Events))
		require.Equal(t, id, got.Through)
		e := got.Events[0]
		require.Equal(t, "k", string(e.AggregateID))
		require.Nil(t, e.Payload)
		_, err = e.Record(envelope.RecordForm{}, nil)
		require.ErrorContains(t, err, fmt.Sprintf("row %d of outbox, event %s: column %s cannot be read: ", id, e.EventID, column))
		require.ErrorContains(t, err, "54000")
		require.Equal(t, cursor.UnreadableRow, relay.RejectionClass(err))
	}
}

// A role may have a statement_timeout that is much shorter than a backlog is long, and
// each statement is one of its own.
func TestBacklogUnderStatementTimeout(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	testenv.Direct(t) // a setting of the session
	d, ctx := newFixture(t), context.Background()
	const backlog, timeout = 150_000, "100ms"
	d.Insert(t, backlog)
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["statement_timeout"] = timeout })
	d.cursors = cursor.NewStore(db, d.Schema, "default")
	_, p := d.announced(t)
	w := relay.NewWindowReader(d.cursors, 1000)
	require.NoError(t, w.Begin(p))
	for pages := 0; !w.Paged(); pages++ {
		require.NoError(t, w.Page(ctx, p))
		require.Less(t, pages, 1000)
	}
	require.Equal(t, backlog, w.IDs.Len())
	var got []envelope.Event
	for len(got) == 0 {
		var err error
		got, err = w.Take(p, statements)
		require.NoError(t, err)
	}
	require.EqualValues(t, 1, got[0].ID)
	_, err := db.Exec(ctx, `SELECT pg_sleep(10)`)
	require.True(t, pg.IsCancelled(err), "the timeout holds: %v", err)
}
