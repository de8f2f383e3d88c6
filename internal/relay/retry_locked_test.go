package relay

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// newLockedFixture returns a retrier with a lease, whose parking knows the rows of outbox_failed.
func newLockedFixture(t *testing.T, d *testenv.Tables, log *testenv.Buffer) *retrier {
	t.Helper()
	failed := cursor.NewFailed(d.DB, d.Schema, "default", false)
	l, err := lease.NewStore(d.DB, d.Schema, "default", time.Minute).Acquire(t.Context())
	require.NoError(t, err)
	held, lose := context.WithCancelCause(context.Background())
	t.Cleanup(func() { lose(nil) })
	leads := lease.Leadership{Lease: l, Held: held, Lose: lose, StatementTimeout: time.Minute}
	parked := NewParking(false)
	require.NoError(t, parked.Recount(failed.Keys(leads.WithStatementTimeout, nil)))
	logger := slog.New(slog.NewTextHandler(log, nil))
	bad := NewBadPartitions(outage.NewLogs(logger))
	return NewRetrier(RetrierParts{
		Bad: bad, Unanswered: NewUnanswered(bad, func() {}), Waits: func() {}, Leadership: leads, Store: failed, Parked: parked, Probed: new(ProbedKeys), Log: logger, Outage: outage.NewLog(logger, "PostgreSQL"),
		Rules: Rules{RetryInterval: time.Minute, MaxRetries: 3},
	})
}

// sentRow is the result of a retry that Kafka has accepted.
func sentRow(row int64, key string) cursor.RetryResult {
	event := envelope.Event{ID: row, EventID: []byte(testenv.ParkedID(row)), Payload: []byte("{}")}
	return cursor.RetryResult{Event: &cursor.FailedRow{Event: event, Row: row, Key: key}, Row: row, Status: statusResolved}
}

// lockRow resolves a row in a transaction that stays open, as an operator does.
func lockRow(t *testing.T, d *testenv.Tables, row int64) pgx.Tx {
	t.Helper()
	tx, err := d.DB.Begin(context.Background())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	_, err = tx.Exec(context.Background(), pg.InSchema(`SELECT {schema}.outbox_resolve_failed(ARRAY[$1::bigint], 'kim', 'why')`, d.Schema), row)
	require.NoError(t, err)
	return tx
}

// requireReturn requires that a function returns, which an open transaction could keep from it.
func requireReturn(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(15 * time.Second):
		require.FailNow(t, what+" waits for a row that another transaction has locked")
	}
}

// The results of other rows are saved while an operator's transaction is open, and the lock of the parking, for which
// the session waits before it sends, is free.
func TestSaveWaitsForNoRow(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	d.InsertParked(t, 4, 4)
	r := newLockedFixture(t, d, new(testenv.Buffer))
	lockRow(t, d, 2)
	requireReturn(t, "Save", func() {
		_ = r.Save([]cursor.RetryResult{sentRow(1, "b-events/key-1"), sentRow(2, "b-events/key-2"), sentRow(3, "b-events/key-3")})
	})
	require.Equal(t, []int64{2, 4}, d.IDs(t, "outbox_failed"))
	require.True(t, r.Parked.mu.TryLock())
	r.Parked.mu.Unlock()
	require.False(t, r.Parked.MustWait("b-events/key-1"))
	require.True(t, r.Parked.MustWait("b-events/key-2"))
}

// The event of a locked row is not sent again, nor a later one of its key, until its result is saved. Then the next
// event of the key is the head.
func TestKeyOfLockedRowWaits(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(pgx.Tx, context.Context) error{"commit": pgx.Tx.Commit, "rollback": pgx.Tx.Rollback} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var log testenv.Buffer
			d := testenv.NewTables(t)
			d.InsertParked(t, 8, 4)
			r := newLockedFixture(t, d, &log)
			found := func() (rows []int64) {
				events, err := r.find(func(ctx context.Context, skip []string) ([]cursor.FailedRow, error) {
					return r.Store.Due(ctx, "", false, pgtype.Timestamptz{}, skip)
				})
				require.NoError(t, err)
				for _, e := range events {
					rows = append(rows, e.Row)
				}
				return rows
			}
			require.Equal(t, []int64{1, 2, 3, 4}, found())
			operator := lockRow(t, d, 2)
			require.NoError(t, r.Save([]cursor.RetryResult{sentRow(1, "b-events/key-1"), sentRow(2, "b-events/key-2")}))
			require.NoError(t, r.saveUnsaved())
			require.NoError(t, r.promote(t.Context(), r.Parked.takeHeadless()))
			require.Equal(t, []int64{3, 4, 5}, found())
			require.Equal(t, 1, strings.Count(log.String(), "has locked a row"), "it says so once")
			require.Len(t, r.Parked.Unsaved(), 1)
			require.Empty(t, r.Parked.Unsaved()[0].Event.Payload, "it takes no memory")
			require.Equal(t, time.Second, r.pause(), "it is tried again soon")

			require.NoError(t, end(operator, t.Context()))
			require.NoError(t, r.saveUnsaved())
			require.NoError(t, r.reconcile(t.Context()))
			require.NoError(t, r.promote(t.Context(), r.Parked.takeHeadless()))
			require.Equal(t, []int64{3, 4, 5, 6}, found())
			require.Empty(t, r.Parked.Unsaved())
			require.Equal(t, time.Minute, r.pause())
			require.True(t, r.Parked.MustWait("b-events/key-2"), "row 6 is left")
			require.EqualValues(t, 1, r.Parked.Keys[r.Parked.Hash("b-events/key-2")].Rows)
		})
	}
}

// At a stop the result of a locked row is given up soon, and the log says which event will be sent again.
func TestResultOfLockedRowIsGivenUp(t *testing.T) {
	t.Parallel()
	var log testenv.Buffer
	d := testenv.NewTables(t)
	d.InsertParked(t, 2, 2)
	r := newLockedFixture(t, d, &log)
	lockRow(t, d, 2)
	require.NoError(t, r.Save([]cursor.RetryResult{sentRow(1, "b-events/key-1"), sentRow(2, "b-events/key-0")}))
	requireReturn(t, "Finish", r.Finish)
	require.Equal(t, 1, strings.Count(log.String(), "will be sent again"))
	require.Contains(t, log.String(), `row=2 id=2 event_id=`+testenv.ParkedID(2))

	d2 := testenv.NewTables(t)
	d2.InsertParked(t, 2, 2)
	var quiet testenv.Buffer
	r = newLockedFixture(t, d2, &quiet)
	operator := lockRow(t, d2, 2)
	require.NoError(t, r.Save([]cursor.RetryResult{sentRow(2, "b-events/key-0")}))
	require.NoError(t, operator.Rollback(t.Context()))
	r.Finish()
	require.Equal(t, []int64{1}, d2.IDs(t, "outbox_failed"))
	require.NotContains(t, quiet.String(), "will be sent again")
}

// Nothing knows where an event was sent whose row was locked when a relay that sends exactly once has started. Its row
// is removed like one that was not locked, also where the rows of sent events are kept.
func TestLockedRowOfASentEventGoes(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	d.InsertParked(t, 2, 2)
	r := newLockedFixture(t, d, new(testenv.Buffer))
	r.Rules.KeepSent = true
	x := &Exactly{locked: []cursor.FailedRow{*sentRow(1, "b-events/key-1").Event}}
	x.keepLocked(r.Parked)
	require.NoError(t, r.saveUnsaved())
	require.Equal(t, []int64{2}, d.IDs(t, "outbox_failed"))
	require.Empty(t, r.Parked.Unsaved())

	require.NoError(t, r.Save([]cursor.RetryResult{sentRow(2, "b-events/key-0")}))
	require.Equal(t, 1, d.Count(t, `outbox_failed WHERE status = 'resolved'`), "it is kept, because its place is known")
}

// A save whose outcome is unknown is repeated. It may have been done, and a retry counts once.
func TestRetryCountsOnce(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	d.InsertParked(t, 1, 1)
	r := newLockedFixture(t, d, new(testenv.Buffer))
	count := func(retries int) {
		t.Helper()
		require.Equal(t, 1, d.Count(t, fmt.Sprintf("outbox_failed WHERE retry_count = %d", retries)))
	}
	for retries := range 2 {
		event := cursor.FailedRow{Event: envelope.Event{ID: 1, EventID: []byte(testenv.ParkedID(1))}, Row: 1, Key: "b-events/key-0", Retries: retries}
		result, _ := r.resultOf(&event, Outcome{Kind: OutcomeRejected, Class: invalidEvent, Err: errMaySend})
		require.NoError(t, r.Save([]cursor.RetryResult{result}))
		require.NoError(t, r.Save([]cursor.RetryResult{result}))
		count(retries + 1)
	}
	d.Exec(t, `UPDATE {schema}.outbox_failed SET retry_count = 0`) // an operator has given it all its attempts again
	event := cursor.FailedRow{Event: envelope.Event{ID: 1, EventID: []byte(testenv.ParkedID(1))}, Row: 1, Key: "b-events/key-0", Retries: 2}
	result, _ := r.resultOf(&event, Outcome{Kind: OutcomeRejected, Class: invalidEvent, Err: errMaySend})
	require.NoError(t, r.Save([]cursor.RetryResult{result}))
	count(1)
}

// An unsaved result of a row overrules no result of another event that has got the id of the row after a crash.
func TestUnsavedResultOfAnotherEvent(t *testing.T) {
	t.Parallel()
	p := NewParking(false)
	before, now := sentRow(1, "b-events/key-1"), sentRow(1, "b-events/key-2")
	now.Event.ID, now.Event.EventID, now.Status = 7, []byte(testenv.ParkedID(7)), statusFailed
	require.True(t, p.keep(before))
	require.False(t, p.overrules(now))
	require.True(t, p.keep(now))
	require.Len(t, p.Unsaved(), 1)
	require.Equal(t, "b-events/key-2", p.Unsaved()[0].Event.Key)
}

// A transaction of Kafka whose outcome is not known, or a cursor that another process has moved, is no outage of
// PostgreSQL: the save is repeated once the session has started again.
func TestSaveInDoubtIsNoOutage(t *testing.T) {
	t.Parallel()
	var log testenv.Buffer
	d := testenv.NewTables(t)
	d.Exec(t, `SELECT pg_catalog.setval('{schema}.outbox_id_seq', 200)`)
	d.InsertParked(t, 2, 2)
	r := newLockedFixture(t, d, &log)
	cursors := cursor.NewStore(d.DB, d.Schema, "default")
	cursors.UseTopic("cursors")
	now, err := cursors.Continue(t.Context(), r.Lease, cursor.InKafka{})
	require.NoError(t, err)
	x := NewExactly(ExactlyParts{Leadership: r.Leadership, Rules: r.Rules, Cursors: cursors, Failed: r.Store, Log: r.Log})
	start := func(p cursor.Position) {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.pos, x.ready = p, true
	}
	stale := now.Position
	stale.CursorID--
	start(stale)
	r.Exactly = x
	saved := make(chan error, 1)
	go func() { saved <- r.Save([]cursor.RetryResult{sentRow(1, "b-events/key-1")}) }()
	require.Eventually(t, func() bool { return !x.IsReady() }, 10*time.Second, time.Millisecond)
	start(now.Position)
	require.NoError(t, <-saved)
	require.Equal(t, []int64{2}, d.IDs(t, "outbox_failed"))
	require.Empty(t, log.String())
}
