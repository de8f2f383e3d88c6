package relay

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The waits before retries double, up to the longest, less up to a fifth: 1, 2, 4 … 300 s
// by default.
func TestRetryWait(t *testing.T) {
	t.Parallel()
	rules := rulesWith(5000)
	for i, seconds := range []int{1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300} {
		most := time.Duration(seconds) * time.Second
		for range 100 {
			wait := rules.WaitBefore(i + 1)
			require.LessOrEqual(t, wait, most)
			require.GreaterOrEqual(t, wait, most*4/5)
		}
	}
	require.LessOrEqual(t, rules.WaitBefore(1000), 300*time.Second)

	rules.RetryWait, rules.MaxRetryWait = 10*time.Millisecond, time.Hour
	require.InDelta(t, 9*time.Millisecond, rules.WaitBefore(1), float64(time.Millisecond))
	require.GreaterOrEqual(t, rules.WaitBefore(30), time.Hour*4/5, "small steps lead there, too")
	rules.MaxRetryWait = math.MaxInt64
	require.Positive(t, rules.WaitBefore(1_000_000))
	rules.RetryWait, rules.MaxRetryWait = 1, 1
	require.LessOrEqual(t, rules.WaitBefore(3), time.Duration(1))
}

// A bad partition is forgotten if a query has shown that no event waits for it. The query skips a
// partition that another retrier has claimed.
func TestForgetEmptyPlaces(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := NewRetrier(RetrierParts{Bad: NewBadPartitions(outage.NewLogs(slog.New(slog.DiscardHandler)))})
		r.Bad.Load([]cursor.BadPartition{{Name: "claimed"}, {Name: "empty"}, {Name: "waiting"}})
		looked, waiting := []string{"empty", "waiting"}, []cursor.FailedRow{{Place: "waiting"}}
		names := func() (names []string) {
			for _, bad := range r.Bad.All() {
				names = append(names, bad.Name)
			}
			return names
		}
		r.ForgetEmpty(looked, waiting)
		require.Len(t, names(), 3, "the session may be about to write a row")
		time.Sleep(EmptyAfter + 1)
		r.ForgetEmpty(looked, waiting)
		require.Equal(t, []string{"claimed", "waiting"}, names())
	})
}

// Bad partitions are probed often at first, because most are back soon.
func TestBadPartitionsAreProbedOftenAtFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := NewRetrier(RetrierParts{
			Rules: Rules{RetryInterval: 5 * time.Second}, Bad: NewBadPartitions(outage.NewLogs(slog.New(slog.DiscardHandler))),
		})
		require.Equal(t, 5*time.Second, r.probeEvery())
		r.Bad.Load([]cursor.BadPartition{{Name: "topic/1"}})
		require.Equal(t, oftenInterval, r.probeEvery())
		time.Sleep(oftenAtFirst)
		require.Equal(t, 5*time.Second, r.probeEvery())
		r.Bad.Load([]cursor.BadPartition{{Name: "topic/2"}})
		require.Equal(t, oftenInterval, r.probeEvery())
		r.Rules.RetryInterval = time.Second
		require.Equal(t, time.Second, r.probeEvery())
	})
}

// An operator retries a dead event, and it is sent before the parking has counted its row.
// Later events of the key still wait behind the one that failed meanwhile.
func TestRetriedDeadEventFreesNoKey(t *testing.T) {
	t.Parallel()
	for _, parkedBehind := range []bool{false, true} {
		t.Run(fmt.Sprint("a row is parked behind: ", parkedBehind), func(t *testing.T) {
			t.Parallel()
			d, ctx := testenv.NewTables(t), context.Background()
			failed := cursor.NewFailed(d.DB, d.Schema, "default", false)
			l, err := lease.NewStore(d.DB, d.Schema, "default", time.Minute).Acquire(ctx)
			require.NoError(t, err)
			held, lose := context.WithCancelCause(ctx)
			defer lose(nil)
			leads := lease.Leadership{Lease: l, Held: held, Lose: lose, StatementTimeout: time.Minute}
			const key = "b-events/key-0"
			d.InsertParked(t, 3, 1)
			d.Exec(t, `UPDATE {schema}.outbox_failed SET status = CASE outbox_id WHEN 1 THEN 'dead' WHEN 2 THEN 'waiting' ELSE 'parked' END`)
			if !parkedBehind {
				d.Exec(t, `DELETE FROM {schema}.outbox_failed WHERE outbox_id = 3`)
			}
			parked := NewParking(false)
			require.NoError(t, parked.Recount(failed.Keys(leads.WithStatementTimeout, nil)))
			d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'parked' WHERE outbox_id = 1`) // the operator

			r := NewRetrier(RetrierParts{Leadership: leads, Store: failed, Parked: parked})
			result := func(row int64, status string) cursor.RetryResult {
				return cursor.RetryResult{Event: sentRow(row, key).Event, Row: row, Status: status, Err: errDown}
			}
			if parkedBehind {
				require.NoError(t, r.Save([]cursor.RetryResult{result(2, statusResolved)}))
				require.NoError(t, r.Save([]cursor.RetryResult{result(1, statusResolved)}))
			} else {
				require.NoError(t, r.Save([]cursor.RetryResult{result(1, statusResolved), result(2, statusFailed)}))
			}
			require.True(t, parked.MustWait(key), "a later event would overtake the row that is left")
		})
	}
}

// The clock of the database is set back: what waits for nothing is due within the longest wait all the same.
func TestRetryAfterTheClockWasSetBack(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	d.InsertParked(t, 3, 3)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'failed', next_retry_at = now() + CASE outbox_id WHEN 1 THEN '1 min' ELSE '1 h' END::interval`)
	r, to, _ := newAnsweredFixture(t, d)
	r.Rules.MaxRetryWait = 5 * time.Minute
	require.NoError(t, r.retryAll(t.Context()))
	require.Equal(t, []int64{2, 3}, to.sent)
}

// A statement that took too long once says nothing about the event: it is read again, and Kafka has rejected nothing.
func TestTimeoutIsNoRejection(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	d.InsertParked(t, 1, 1)
	r, _, _ := newAnsweredFixture(t, d)
	events, err := r.readUnreadable([]cursor.FailedRow{*sentRow(1, "b-events/key-0").Event}, context.DeadlineExceeded)
	require.NoError(t, err)
	require.Len(t, events, 1)
	require.NoError(t, events[0].Unreadable)
	require.NotEmpty(t, events[0].Payload)
}
