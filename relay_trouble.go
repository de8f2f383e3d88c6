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
	tries int

	ails atomic.Pointer[ailment] // nil: no trouble; others may look
}

// ailment is the last failure of what fails.
type ailment struct {
	err   error
	since time.Time // of the first one
}

// report takes the outcome of a try, and what else the log should say of it.
func (t *trouble) report(err error, attrs ...any) {
	before := t.ails.Load()
	switch {
	case err == nil && before != nil:
		t.log.Warn("outbox: "+t.what+" works again", "after", time.Since(before.since).Round(time.Millisecond))
		t.ails.Store(nil)
		t.tries = 0
	case err != nil && before == nil:
		t.log.Warn("outbox: "+t.what+" fails, trying until it works", append(attrs, "error", err)...)
		t.ails.Store(&ailment{err, time.Now()})
	case err != nil:
		t.ails.Store(&ailment{err, before.since})
	}
}

func (t *trouble) failing() bool { return t.ails.Load() != nil }

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
	busy atomic.Bool // something fails; saves the lock where nothing does

	mu    sync.Mutex
	known map[string]*namedTrouble // what has ever failed
}

type namedTrouble struct {
	trouble
	worked time.Time // last, if it has failed before
}

// report takes the outcome of a try that began at a time. A failure that began
// before the last success is old news: two clients need not hear at once.
func (t *troubles) report(name string, began time.Time, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	one := t.known[name]
	switch {
	case one == nil && err == nil, err != nil && one != nil && began.Before(one.worked):
		return
	case one == nil:
		if t.known == nil {
			t.known = map[string]*namedTrouble{}
		}
		one = &namedTrouble{trouble: trouble{log: t.log, what: name}}
		t.known[name] = one
	}
	one.report(err)
	if err == nil {
		one.worked = time.Now()
	}
	failing := false
	for _, one := range t.known {
		failing = failing || one.failing()
	}
	t.busy.Store(failing)
}

// backoff returns the wait before the next try of what fails.
func (t *troubles) backoff(name string) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if one := t.known[name]; one != nil {
		return one.backoff()
	}
	return minBackoff // another try has worked meanwhile
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
