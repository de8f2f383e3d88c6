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
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
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

// A bad partition is probed soon after a try has failed, because no record is under way that would notice its recovery.
func TestBadPartitionIsProbedSoon(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		bad, at := NewBadPartitions(outage.NewLogs(slog.New(slog.DiscardHandler))), kafka.Partition{Topic: "topic", Number: 1}
		due := func(all bool) []string {
			_, names := bad.Due(all)
			return names
		}
		bad.Fail(at, time.Now(), "unavailable", errUnanswered)
		time.Sleep(time.Hour)
		require.Empty(t, due(false), "its answer is waited for")
		for _, after := range []time.Duration{firstProbe, 2 * firstProbe, 4 * firstProbe} {
			for range 3 { // events of one try
				bad.Fail(at, time.Now(), "unavailable", kgo.ErrRecordTimeout)
			}
			time.Sleep(after - 1)
			require.Empty(t, due(false))
			time.Sleep(1)
			require.Equal(t, []string{at.Name()}, due(false))
			require.Empty(t, due(false))
			require.Equal(t, []string{at.Name()}, due(true))
		}
		bad.Accept(at, time.Now())
		bad.Fail(at, time.Now(), "unavailable", kgo.ErrRecordTimeout)
		time.Sleep(firstProbe)
		require.Equal(t, []string{at.Name()}, due(false), "it was good meanwhile")
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
				return cursor.RetryResult{Event: &cursor.FailedRow{Row: row, Key: key}, Row: row, Status: status, Err: errDown}
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
