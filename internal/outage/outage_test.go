package outage_test

import (
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/outage"
)

var errDown = errors.New("down")

// What fails is current, since its first failure, until it works again.
func TestCurrent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		logs := outage.NewLogs(slog.New(slog.DiscardHandler))
		require.Empty(t, logs.Current())
		first := time.Now()
		logs.Report("b", first, errDown)
		time.Sleep(time.Second)
		logs.Report("a", time.Now(), errDown)
		logs.Report("b", time.Now(), errDown)
		require.Equal(t, []outage.Named{
			{Name: "a", Outage: outage.Outage{Err: errDown, Since: time.Now(), Last: time.Now()}},
			{Name: "b", Outage: outage.Outage{Err: errDown, Since: first, Last: time.Now()}},
		}, logs.Current())
		logs.Report("b", time.Now(), nil)
		require.Len(t, logs.Current(), 1)
		logs.Report("a", time.Now(), nil)
		require.Empty(t, logs.Current())
		require.False(t, logs.Failing())
	})
}

// A failure that began before the last success is out of date.
func TestLateFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		logs := outage.NewLogs(slog.New(slog.DiscardHandler))
		logs.Report("a", time.Now(), errDown)
		began := time.Now()
		time.Sleep(time.Second)
		logs.Report("a", time.Now(), nil)
		logs.Report("a", began, errDown)
		require.Empty(t, logs.Current())
	})
}

// A line a minute says how often it happened.
func TestSeldom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s outage.Seldom
		var lines []int
		for range 150 {
			if times, now := s.Next(); now {
				lines = append(lines, times)
			}
			time.Sleep(time.Second)
		}
		require.Equal(t, []int{1, 60, 60}, lines)
	})
}
