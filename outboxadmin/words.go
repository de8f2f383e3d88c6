package outboxadmin

import (
	"fmt"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	bounded "github.com/outboxgo/outbox/internal/short"
)

// A time is shown as an age, and exactly in UTC in its title.

func clock(t time.Time) string { return t.UTC().Format("15:04:05") }

// exact is a time as it is in the title of a relative one.
func exact(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05.000 UTC") }

// short is a length of time in its largest unit.
func short(d time.Duration) string {
	switch {
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", int(d.Hours()))
	}
	return fmt.Sprintf("%d days", int(d.Hours()/24))
}

// relative is a time as seen from now.
func relative(now, t time.Time) string {
	switch d := now.Sub(t); {
	case t.IsZero():
		return "never"
	case d >= time.Second:
		return short(d) + " ago"
	case d <= -time.Second:
		return "in " + short(-d)
	}
	return "now"
}

// thousands writes a number with commas.
func thousands(n int64) string { return bounded.Thousands(n) }

func plural(n int64, one, many string) string { return bounded.Plural(n, one, many) }

// tally is how many there are, and whether there may be more.
type tally = bounded.Tally

// tallyOf is the tally of a count.
func tallyOf(n int, more bool) tally { return bounded.TallyOf(n, more) }

// upTo is the tally of failed events and keys of a relay, which are counted up to a limit.
func upTo(n int64) tally { return bounded.TallyOf(n, n == outbox.MaxCounted) }

// bytesText is a size.
func bytesText(n int) string {
	switch {
	case n < 1024:
		return plural(int64(n), "byte", "bytes")
	case n < 1024*1024:
		return trimZero(float64(n)/1024) + " KiB"
	}
	return trimZero(float64(n)/1024/1024) + " MiB"
}

// plain is an error class as words.
func plain(class string) string { return strings.ReplaceAll(class, "_", " ") }

// boundText is an end of a range of ids.
func boundText(id int64) string {
	if boundOf(id) == nil {
		return "open"
	}
	return thousands(id)
}
