package cursor_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// An outage of one topic parks very many events in a table that was empty. A plan that was made for
// the empty table would scan all rows to find a few. When the topic is back, the table may not have
// been analysed yet.
func TestRetriesOverManyParkedRows(t *testing.T) {
	// Not parallel: it counts the buffers that PostgreSQL touches.
	testenv.Direct(t) // prepared statements
	const parked, keys, heads = 60_000, 2000, 50
	d, ctx := newFixture(t), context.Background()
	failed := cursor.NewFailed(d.DB, d.Schema, "default", false)
	d.Exec(t, `ALTER TABLE {schema}.outbox_failed SET (autovacuum_enabled = false)`)
	d.Exec(t, `ANALYZE {schema}.outbox_failed`)
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	conn, err := d.DB.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	ids, eventIDs := parkedIDs(heads)
	saved := func(status string) string { return savedArgs(l, status, heads) }
	type statement struct {
		name, sql, args, settings string
		most                      int // buffers
	}
	statements := []statement{
		{"keys", "(text, text, bigint, bigint, bigint) AS " + failed.SQLKeys, "('default', 'b-events/key-1000', 0, 0, 300)", pg.PlannerSettings, 5 * 10 * parked / keys},
		{"places", "(text) AS " + failed.SQLBadPartitions, "('default')", pg.PlannerSettings, 40},
		{"due", "(text, text, bool, int, text[], timestamptz) AS " + failed.SQLDue, fmt.Sprintf("('default', '', false, %d, '{x}', '-infinity')", heads), pg.PlannerSettings, 2 * heads},
		{"ahead", "(text, interval, int, text[]) AS " + failed.SQLAhead, fmt.Sprintf("('default', '1 h', %d, '{x}')", heads), pg.PlannerSettings, 40},
		{"first", "(text, text[], text[]) AS " + failed.SQLFirst, "('default', '{\"\", b-events, b-events/1}', '{x}')", pg.PlannerSettings, 20},
		{"rows_of", "(text, bigint[], uuid[]) AS " + failed.SQLRowsOf,
			fmt.Sprintf("('default', '{%s}', array_fill(gen_random_uuid(), '{%d}'))", ids, heads),
			pg.PlannerSettings, 10 * heads},
		{"parked", "(text, text[], int, int) AS " + failed.SQLParked, "('default', '{b-events/key-7}', 500, 500)", pg.PlannerSettings, 2 * parked / keys},
		{"parked_of_many", "(text, text[], int, int) AS " + failed.SQLParked,
			"('default', '{b-events/key-" + strings.ReplaceAll(ids, ",", ",b-events/key-") + "}', 11, 500)",
			pg.PlannerSettings, 20 * heads},
		{"read", "(bigint[], bool, text, bigint[], uuid[]) AS " + failed.SQLRead,
			fmt.Sprintf("('{%[1]s}', true, 'default', '{%[1]s}', '{%[2]s}')", ids, eventIDs),
			pg.PlannerSettings, 4 * heads},
		{"save_sent", saveArgs + failed.SQLSave, saved("resolved"), pg.PlannerSettings, 40 * heads},
		{"save_rejected", saveArgs + failed.SQLSave, saved("failed"), pg.PlannerSettings, 40 * heads},
	}
	// These are measured when a key has a third of the rows.
	promotions := []statement{
		{"promote", "(text, text, bigint, text[], int) AS " + failed.SQLPromote,
			fmt.Sprintf("('default', '%s', %d, '{b-events/key-7,b-events/key-8}', 500)", l.Holder, l.Epoch), pg.PlannerSettings, 100},
		{"promote_all", "(text, text, bigint, int) AS " + failed.SQLPromoteAll, fmt.Sprintf("('default', '%s', %d, 50)", l.Holder, l.Epoch), pg.PlannerSettings, 2000},
		{"dead_due", "(text, text[], interval[], bool) AS " + failed.SQLDeadDue, "('default', '{a,b}', '{1 h,1 h}', false)", pg.PlannerSettings, 10},
	}
	inTx := func(settings string, do func(pgx.Tx)) {
		tx, err := conn.Begin(ctx)
		require.NoError(t, err)
		defer tx.Rollback(ctx)
		_, err = tx.Exec(ctx, settings)
		require.NoError(t, err)
		do(tx)
	}
	prepare := func(s statement) {
		_, err := conn.Exec(ctx, "PREPARE "+s.name+" "+s.sql)
		require.NoError(t, err)
	}
	for _, s := range slices.Concat(statements, promotions) {
		prepare(s)
		for range 6 { // then the planner keeps a plan
			inTx(s.settings, func(tx pgx.Tx) {
				_, err := tx.Exec(ctx, "EXECUTE "+s.name+s.args)
				require.NoError(t, err)
			})
		}
	}
	d.InsertParked(t, parked, keys)
	measure := func(statements []statement, times int) {
		for _, s := range statements {
			inTx(s.settings, func(tx pgx.Tx) {
				_, plan := testenv.Explain(t, tx, "EXECUTE "+s.name+s.args)
				buffers := testenv.Busiest(t, plan)
				t.Logf("%s: %d buffers", s.name, buffers)
				require.LessOrEqual(t, buffers, times*s.most, "%s\n%s", s.name, plan)
			})
		}
	}
	measure(statements, 1)
	for _, s := range statements { // plans for the table as it is, without statistics
		_, err := conn.Exec(ctx, "DEALLOCATE "+s.name)
		require.NoError(t, err)
		prepare(s)
	}
	measure(statements, 2)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET parking_key = 'b-events/key-7' WHERE outbox_id BETWEEN 20000 AND 40000`)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'parked' WHERE outbox_id = 7`)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'dead', error_class = 'a', next_retry_at = now() WHERE outbox_id > 50000`)
	measure(promotions, 1)
}

// parkedIDs returns the ids of the first n parked rows, and those of their events.
func parkedIDs(n int) (ids, eventIDs string) {
	rows, events := make([]string, n), make([]string, n)
	for i := range n {
		rows[i], events[i] = strconv.Itoa(i+1), testenv.ParkedID(int64(i+1))
	}
	return strings.Join(rows, ","), strings.Join(events, ",")
}

const saveArgs = "(text, text, bigint, bigint[], text[], text[], text[], int[], interval[], bool, bool, text[], int[], bigint[], timestamptz[], bigint[], uuid[]) AS "

// savedArgs are the arguments for the results of the first n parked rows.
func savedArgs(l *lease.Lease, status string, n int) string {
	ids, eventIDs := parkedIDs(n)
	return fmt.Sprintf(`('default', '%s', %d, '{%s}', array_fill('%s'::text, '{%[5]d}'), array_fill('x'::text, '{%[5]d}'),
		array_fill('x'::text, '{%[5]d}'), array_fill(1, '{%[5]d}'), array_fill('1 s'::interval, '{%[5]d}'), false, false, array_fill(''::text, '{%[5]d}'),
		array_fill(0, '{%[5]d}'), array_fill(0::bigint, '{%[5]d}'), array_fill(now(), '{%[5]d}'), '{%[3]s}', '{%[6]s}')`,
		l.Holder, l.Epoch, ids, status, n, eventIDs)
}

// The results of thousands of rows are saved without a comparison of each with each: that took seconds, in which the
// relay did not stop.
func TestManyResultsAreSaved(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // prepared statements
	const rows = 1000
	d, ctx := newFixture(t), context.Background()
	d.Exec(t, `ALTER TABLE {schema}.outbox_failed SET (autovacuum_enabled = false)`)
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	d.InsertParked(t, rows, rows)
	sql := cursor.NewFailed(d.DB, d.Schema, "default", false).SQLSave
	for _, status := range []string{"failed", "resolved"} {
		tx, err := d.DB.Begin(ctx)
		require.NoError(t, err)
		defer tx.Rollback(ctx)
		for _, statement := range []string{pg.PlannerSettings, "PREPARE save_" + status + saveArgs + sql} {
			_, err = tx.Exec(ctx, statement)
			require.NoError(t, err)
		}
		_, plan := testenv.Explain(t, tx, "EXECUTE save_"+status+savedArgs(l, status, rows))
		removed := 0
		for _, match := range regexp.MustCompile(`"Rows Removed by [A-Za-z ]*Filter": (\d+)`).FindAllStringSubmatch(plan, -1) {
			n, err := strconv.Atoi(match[1])
			require.NoError(t, err)
			removed += n
		}
		t.Log(status, "compared in vain:", removed)
		require.LessOrEqual(t, removed, 10*rows, plan)
		require.NoError(t, tx.Rollback(ctx))
	}
}

// A failed event has the size of its row in outbox. Of an unreadable one nothing is copied
// that might be unreadable, so that it can be listed.
func TestMovePastAnUnreadableRow(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, p := d.opened(t)
	d.Update(t, `UPDATE {schema}.outbox SET headers = '{"a": "b"}' WHERE id = 1`)
	testenv.AllowUnprintable(t, d.DB, d.Schema)
	d.Update(t, `UPDATE {schema}.outbox SET payload = $1::text::jsonb, headers = '{"a": "b"}' WHERE id = 2`, testenv.Unprintable)
	p.Last, p.Highest = 2, 2
	failures := append(slices.Clone(someFailure), cursor.Failure{
		Event: &envelope.Event{ID: 2}, Key: "b-events/k", Status: statusDead, Class: cursor.UnreadableRow, Err: errors.New("out of memory"), Held: true,
	})
	_, err := d.cursors.Move(ctx, l, p, failures)
	require.NoError(t, err)
	rows, err := d.DB.Query(ctx, pg.InSchema(`
		SELECT format('%s %s %s %s %s %s', outbox_id, status, held, size, payload IS NULL AND payload_bytes IS NULL, headers IS NULL)
		  FROM {schema}.outbox_failed ORDER BY id`, d.Schema))
	require.NoError(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, []string{"1 failed f 12 f f", "2 dead t 0 t t"}, got)
}

// Events that are too large are not read, so a damaged one is found only when it is copied. The cursor passes it.
func TestMovePastDamagedRows(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Insert(t, 5)
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	p, err := d.cursors.Load(ctx, l)
	require.NoError(t, err)
	p, _, _, err = d.cursors.Open(ctx, l, p, 100)
	require.NoError(t, err)
	random := `(SELECT string_agg(gen_random_uuid()::text, '') FROM generate_series(1, 300) AS n WHERE n <> -o.id)`
	d.Update(t, `UPDATE {schema}.outbox AS o SET payload = NULL, payload_bytes = convert_to(`+random+`, 'UTF8') WHERE id = 2`)
	d.Update(t, `UPDATE {schema}.outbox AS o SET headers = jsonb_build_object('h', `+random+`) WHERE id = 4`)
	require.NoError(t, pgx.BeginFunc(ctx, d.DB, func(tx pgx.Tx) error {
		testenv.Damage(t, tx, d.Schema, "outbox")
		return nil
	}))
	var failures []cursor.Failure
	for id := range int64(5) {
		e := &envelope.Event{ID: id + 1}
		failures = append(failures, cursor.Failure{Event: e, Key: "b-events/k", Status: statusFailed, Class: "message_too_large", Err: check.ErrEmpty})
	}
	p.Last, p.Highest = 5, 5
	_, err = d.cursors.Move(ctx, l, p, failures)
	require.NoError(t, err)
	require.Equal(t, []int64{1, 2, 3, 4, 5}, idsOf(t, d, `true`))
	require.Equal(t, []int64{2, 4}, idsOf(t, d, `error_class = 'unreadable_row' AND num_nonnulls(payload, payload_bytes, headers) = 0`))
	require.Equal(t, []int64{1, 3, 5}, idsOf(t, d, `error_class = 'message_too_large' AND payload IS NOT NULL`))
	require.Equal(t, cursor.UnreadableRow, failures[1].Class)
	require.ErrorContains(t, failures[1].Err, "row 2 of outbox")
}

// idsOf returns the ids in outbox of some rows of outbox_failed.
func idsOf(t *testing.T, d *fixture, where string) []int64 {
	t.Helper()
	rows, err := d.DB.Query(context.Background(), pg.InSchema(`SELECT outbox_id FROM {schema}.outbox_failed WHERE `+where+` ORDER BY 1`, d.Schema))
	require.NoError(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(t, err)
	return ids
}

// What is read to be retried is bounded in bytes.
func TestRetriesAreReadInParts(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	failed := cursor.NewFailed(d.DB, d.Schema, "default", false)
	d.InsertParked(t, 40, 40)
	large := `"` + strings.Repeat("x", 1<<20) + `"`
	d.Exec(t, `UPDATE {schema}.outbox_failed SET payload = $1::text::jsonb, size = 1048578`, large)
	found, err := failed.Due(ctx, "", false, pgtype.Timestamptz{}, nil)
	require.NoError(t, err)
	require.Len(t, found, 40)
	require.Equal(t, 3, cursor.Fitting(found), "of 4 MiB")
	require.Equal(t, 1, cursor.Fitting(found[:1]))
	require.Equal(t, 1, cursor.Fitting([]cursor.FailedRow{{Size: cursor.MaxRetryBytes + 1}, {Size: 1}}))
	events, err := failed.ReadRows(ctx, found[:3], true)
	require.NoError(t, err)
	require.Len(t, events, 3)
	for i, e := range events {
		require.Equal(t, found[i].Row, e.Row)
		require.Len(t, e.Payload, len(large))
	}

	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'resolved' WHERE id = $1`, found[0].Row)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET payload = NULL, error_class = 'unreadable_row' WHERE id = $1`, found[2].Row)
	events, err = failed.ReadRows(ctx, found[:3], true)
	require.ErrorIs(t, err, cursor.ErrNoPayload)
	require.Len(t, events, 1)
	require.Equal(t, found[1].Row, events[0].Row)
	events, err = failed.ReadRows(ctx, found[2:3], false)
	require.NoError(t, err)
	require.Len(t, events, 1)
	require.Nil(t, events[0].Payload)
	require.Equal(t, "key-3", string(events[0].AggregateID))

	// A tombstone never has a payload, and one that could not be read has lost its headers.
	d.Exec(t, `UPDATE {schema}.outbox_failed SET payload = NULL, content_type = '' WHERE id = $1`, found[3].Row)
	events, err = failed.ReadRows(ctx, found[3:4], true)
	require.NoError(t, err)
	require.Len(t, events, 1)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET error_class = 'unreadable_row' WHERE id = $1`, found[3].Row)
	events, err = failed.ReadRows(ctx, found[3:4], true)
	require.ErrorIs(t, err, cursor.ErrNoPayload)
	require.Empty(t, events)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET headers = '{"a": "b"}' WHERE id = $1`, found[3].Row) // it took too long once
	events, err = failed.ReadRows(ctx, found[3:4], true)
	require.NoError(t, err)
	require.Len(t, events, 1)
}

// Very many parked keys are read in pages, however the rows of a key lie on them, and are
// found to have a wrong head whether it is on the page of the first row or not.
func TestKeysInPages(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	testenv.Direct(t) // a setting of the session
	d := newFixture(t)
	l, err := d.leases.Acquire(context.Background())
	require.NoError(t, err)
	const rows, keys = 3*cursor.MaxKeyRows + 5, 4
	d.InsertParked(t, rows, keys)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'parked' WHERE parking_key = 'b-events/key-1'`)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'failed' WHERE outbox_id = (SELECT max(outbox_id) FROM {schema}.outbox_failed WHERE parking_key = 'b-events/key-2')`)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'dead', held = true WHERE outbox_id = (SELECT min(outbox_id) FROM {schema}.outbox_failed WHERE parking_key = 'b-events/key-3')`)
	want, got := map[string]int{}, map[string]int{}
	all, err := d.DB.Query(context.Background(), pg.InSchema(`SELECT parking_key, count(*) FROM {schema}.outbox_failed GROUP BY 1`, d.Schema))
	require.NoError(t, err)
	var key string
	var n int
	_, err = pgx.ForEachRow(all, []any{&key, &n}, func() error { want[key] = n; return nil })
	require.NoError(t, err)
	require.Len(t, want, keys)

	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["statement_timeout"] = "1s" })
	failed := cursor.NewFailed(db, d.Schema, "default", false)
	read := func() (wrong []string) {
		clear(got)
		page := failed.Keys(statements, &wrong)
		for {
			keys, err := page("")
			require.NoError(t, err)
			if len(keys) == 0 {
				return wrong
			}
			for _, k := range keys {
				got[k.Key] += k.Rows
			}
		}
	}
	promote := func(keys []string) {
		left, err := failed.Promote(context.Background(), statements, l, keys)
		require.NoError(t, err)
		require.Zero(t, left)
	}
	wrong := read()
	require.Equal(t, want, got)
	require.ElementsMatch(t, []string{"b-events/key-1", "b-events/key-2"}, wrong)
	promote(wrong)
	require.Empty(t, read())
	require.Equal(t, want, got)

	require.NoError(t, failed.PromoteAll(context.Background(), statements, l), "PassFailedKeys is set")
	require.Len(t, read(), keys-1, "a dead row holds one")
	promote(read()) // and no longer
	require.Empty(t, read())
	require.Equal(t, want, got)
}

// What an operator resolves while it is on its way stays resolved, whatever Kafka
// says of it.
func TestFinishSkipsWhatIsResolved(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	failed := cursor.NewFailed(d.DB, d.Schema, "default", false)
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	d.InsertParked(t, 3, 3)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'resolved', resolution = 'kim'`)
	results := []cursor.RetryResult{
		{Event: parkedRow(1), Row: 1, Status: statusFailed, Count: 1, Class: "c", Err: check.ErrEmpty},
		{Event: parkedRow(2), Row: 2, Status: statusDead, Count: 1, Class: "c", Err: check.ErrEmpty},
		{Event: parkedRow(3), Row: 3, Status: statusResolved},
	}
	for _, keep := range []bool{true, false} {
		_, err := failed.SaveResults(ctx, l, results, keep)
		require.NoError(t, err)
		var n int
		sql := pg.InSchema(`SELECT count(*) FROM {schema}.outbox_failed WHERE status = 'resolved' AND resolution = 'kim' AND retry_count = 0`, d.Schema)
		require.NoError(t, d.DB.QueryRow(ctx, sql).Scan(&n))
		require.Equal(t, 3, n)
	}
}
