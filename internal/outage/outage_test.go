package outage_test

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
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
			{Name: "a", Failure: outage.Failure{Err: errDown, Since: time.Now(), Last: time.Now()}},
			{Name: "b", Failure: outage.Failure{Err: errDown, Since: first, Last: time.Now()}},
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

// lines counts the lines of a log, and keeps the last ones.
type lines struct {
	n    int
	last []string
}

// Write implements [io.Writer].
func (l *lines) Write(line []byte) (int, error) {
	l.n++
	l.last = append(l.last, string(line))
	return len(line), nil
}

// next returns the messages since the last call.
func (l *lines) next() (messages []string) {
	for _, line := range l.last {
		_, rest, _ := strings.Cut(line, `msg="outbox: `)
		message, _, _ := strings.Cut(rest, `"`)
		messages = append(messages, message)
	}
	l.last = nil
	return messages
}

// Of thousands of things that fail, a minute names twenty; a line says how many there are, and another one that they
// work again. What has worked for an hour is forgotten, and its next outage is logged.
func TestThousandsFail(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log lines
		logs := outage.NewLogs(slog.New(slog.NewTextHandler(&log, nil)))
		report := func(from, to int, err error) {
			for i := from; i < to; i++ {
				logs.Report(fmt.Sprint("topic ", i), time.Now(), err)
			}
		}
		report(0, 3_000, errDown)
		require.Len(t, log.next(), 20)
		time.Sleep(time.Minute)
		report(0, 3_000, errDown)
		require.Equal(t, []string{"… and 2980 more fail, trying until they work"}, log.next())
		report(3_000, 3_030, errDown)
		require.Len(t, log.next(), 20)
		report(2_000, 3_000, nil)
		require.Empty(t, log.next(), "what failed without a line")
		time.Sleep(time.Minute)
		report(0, 1, nil)
		require.Equal(t, []string{"… and 1990 more fail, trying until they work", "topic 0 works again"}, log.next())
		report(0, 3_030, nil)
		messages := log.next()
		require.Len(t, messages, 19+20+1)
		require.Equal(t, "… and no others are known to fail", messages[len(messages)-1])
		require.False(t, logs.Failing())
		require.Empty(t, logs.Current())

		began := time.Now().Add(-time.Minute)
		logs.Report("topic 7", began, errDown)
		require.False(t, logs.Failing(), "it has worked since")
		time.Sleep(time.Hour + time.Minute)
		logs.Report("PostgreSQL", time.Now(), errDown)
		logs.Report("topic 7", began, errDown)
		require.Equal(t, []string{"PostgreSQL fails, trying until it works", "topic 7 fails, trying until it works"}, log.next(), "it is forgotten")
		for range 30 { // a name costs a minute one name, however often it fails
			logs.Report("PostgreSQL", time.Now(), nil)
			logs.Report("PostgreSQL", time.Now(), errDown)
		}
		require.Len(t, log.next(), 60)
		time.Sleep(25 * time.Hour)
		logs.Report("PostgreSQL", time.Now(), nil)
		require.False(t, logs.Failing(), "the topic was not tried for a day")
	})
}

// What is not tried any more says so, and its next outage begins anew.
func TestAbandon(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var lines strings.Builder
		log := outage.NewLog(slog.New(slog.NewTextHandler(&lines, nil)), "PostgreSQL")
		log.Abandon("why")
		require.Empty(t, lines.String())
		log.Report(errDown)
		log.Abandon("this process does not lead")
		require.Nil(t, log.Current())
		require.Contains(t, lines.String(), "is not tried any more: this process does not lead")
		time.Sleep(24 * time.Hour)
		before := lines.Len()
		log.Report(nil)
		require.Equal(t, before, lines.Len())
	})
}
