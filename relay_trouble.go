package outbox

import (
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
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

// troubles tells the log of many things at once, by name. It may be used by any
// number of goroutines.
type troubles struct {
	log  *slog.Logger
	what string
	busy atomic.Bool // something fails; saves the lock where nothing does

	mu      sync.Mutex
	failing map[string]*trouble
}

func (t *troubles) report(name string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	one := t.failing[name]
	if one == nil {
		if err == nil {
			return
		}
		if t.failing == nil {
			t.failing = map[string]*trouble{}
		}
		one = &trouble{log: t.log, what: t.what + " " + name}
		t.failing[name] = one
	}
	one.report(err)
	if err == nil {
		delete(t.failing, name)
	}
	t.busy.Store(len(t.failing) > 0)
}

const (
	minRetryWait = time.Second
	maxRetryWait = 300 * time.Second
)

// retryWait returns the wait before the n-th retry of a refused event, from 1:
// it doubles from 1 s to 300 s, less up to a fifth.
func retryWait(n int) time.Duration {
	d := min(minRetryWait<<min(n-1, 10), maxRetryWait)
	return d - rand.N(d/5)
}
