package handling

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/breaker"
)

// guideRows says which play a row of the table has, by how the row begins.
var guideRows = []struct{ begins, play string }{
	{"an error", "-"},
	{"a panic", "!"},
	{"`ErrHandlerTx`", "h"},
	{"a deadlock", strings.Repeat("4", MostConflicts+1)},
	{"`Permanent(", "p"},
	{"`RetryAfter(err", "r"},
	{"`Unavailable(", "u"},
	{"`RetryAfter(Unavailable(", "U"},
}

// failure is a failed attempt, and how long after the first one it was made.
type failure struct {
	Outcome
	failing time.Duration
}

// The table of docs/retries.md is right about what becomes of an event, by what its handler returns.
func TestTableOfTheGuide(t *testing.T) {
	t.Parallel()
	guide, err := os.ReadFile("../../docs/retries.md")
	require.NoError(t, err)
	_, section, _ := strings.Cut(string(guide), "\n## What a handler returns\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var rows [][]string
	for line := range strings.Lines(section) {
		if cells := strings.Split(line, " | "); len(cells) == 5 {
			cells[0], cells[4] = strings.TrimPrefix(cells[0], "| "), strings.TrimSuffix(strings.TrimSpace(cells[4]), " |")
			rows = append(rows, cells)
		}
	}
	require.Len(t, rows, 1+len(guideRows))
	for i, row := range guideRows {
		cells := rows[i+1]
		require.True(t, strings.HasPrefix(cells[0], row.begins), cells[0])
		t.Run(row.begins, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				failures := failUntilDead(t, row.play)
				require.Equal(t, cells[1], countsOf(row.play, failures[0]))
				require.Equal(t, cells[2], waitsOf(failures))
				require.Equal(t, cells[3], opensBreaker(t, row.play))
				require.Equal(t, cells[4], deathOf(failures))
			})
		})
	}
}

// outageOfTheTable is MaxOutage in the tests of the table.
const outageOfTheTable = 10 * time.Minute

// failUntilDead has an event fail until it is dead, and returns the failures.
func failUntilDead(t *testing.T, play string) (failures []failure) {
	t.Helper()
	f := newFixture(t, Rules{Retry: RetryPolicy{MaxOutage: outageOfTheTable}})
	f.handlers["a"] = strings.Repeat(play, 1000)
	task := &f.arrive("a")[0].Tasks[0]
	for began := time.Now(); ; {
		o := f.attempts.Try(task, f.processor.Rules.Retry, nil)
		failures = append(failures, failure{o, time.Since(began)})
		if o.Result != Again {
			require.Equal(t, Dead, o.Result)
			return failures
		}
		task.NoteFailure(o)
		time.Sleep(o.Wait)
	}
}

func countsOf(play string, first failure) string {
	switch {
	case first.Uncounted:
		return "does not count"
	case len(play) > 1:
		return fmt.Sprintf("counts after %s repeats", map[int]string{10: "ten"}[MostConflicts])
	}
	return "counts"
}

func waitsOf(failures []failure) string {
	about := func(wait, want time.Duration) bool { return wait >= want*4/5 && wait <= want*6/5 }
	doubled, constant, asLong := true, true, true
	for i, f := range failures[:len(failures)-1] {
		doubled = doubled && about(f.Wait, time.Second<<i)
		constant = constant && f.Wait == 7*time.Second // that of the play
		if f.Uncounted {
			asLong = asLong && about(f.Wait, min(max(f.failing, time.Second), 30*time.Second))
		}
	}
	switch {
	case len(failures) == 1:
		return "none"
	case constant:
		return "d"
	case doubled:
		return "`RetryWait`, doubled each time"
	case asLong:
		return "the time it has been failing, at most 30 s"
	}
	return fmt.Sprint(failures)
}

// opensBreaker has different events fail, over more than a second.
func opensBreaker(t *testing.T, play string) string {
	t.Helper()
	f := newFixture(t, Rules{Breaker: BreakerRules{Events: 4}})
	for n := range 8 {
		name := fmt.Sprint(n)
		f.handlers[name] = play
		f.attempts.Try(&f.arrive(name)[0].Tasks[0], f.processor.Rules.Retry, nil)
		time.Sleep(300 * time.Millisecond)
		if stateOf(f.attempts.Breakers, "ACTED") == breaker.Open {
			return "yes"
		}
	}
	return "no"
}

func deathOf(failures []failure) string {
	last := failures[len(failures)-1]
	switch {
	case len(failures) == 1:
		return "at once"
	case last.Attempt != 4: // three retries
	case last.failing >= outageOfTheTable:
		return "after `MaxOutage` and the last retry"
	case len(failures) == 4:
		return "after the last retry"
	}
	return fmt.Sprint(last)
}
