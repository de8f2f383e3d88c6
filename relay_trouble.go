package outbox

import (
	"log/slog"
	"math/rand/v2"
	"time"
)

// trouble tells the log when something the relay depends on fails and when it
// works again, once each, and says how long to wait between tries. It belongs
// to one goroutine.
type trouble struct {
	log   *slog.Logger
	what  string
	since time.Time // zero: no trouble
	tries int
}

// report takes the outcome of a try, and what else the log should say of it.
func (t *trouble) report(err error, attrs ...any) {
	switch {
	case err == nil && !t.since.IsZero():
		t.log.Warn("outbox: "+t.what+" works again", "after", time.Since(t.since).Round(time.Millisecond))
		t.since, t.tries = time.Time{}, 0
	case err != nil && t.since.IsZero():
		t.log.Warn("outbox: "+t.what+" fails, trying until it works", append(attrs, "error", err)...)
		t.since = time.Now()
	}
}

const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 5 * time.Second
)

// backoff returns the wait before the next try: it doubles from 100 ms to 5 s,
// less up to a half so that many processes do not come back as one.
func (t *trouble) backoff() time.Duration {
	d := min(minBackoff<<min(t.tries, 10), maxBackoff)
	t.tries++
	return d - rand.N(d/2)
}
