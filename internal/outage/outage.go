// Package outage logs outages: once when something begins to fail, and once when it
// works again.
package outage

import (
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/wait"
)

// Log logs the outages of one thing that is tried until it works. It belongs to one
// goroutine, except for [Log.Current], which any goroutine may call.
type Log struct {
	log     *slog.Logger
	what    string
	backoff wait.Backoff
	current atomic.Pointer[Outage] // nil: it works
}

// Outage is a failure that has not ended.
type Outage struct {
	Err   error     // of the last try
	Since time.Time // when the first try failed
	Last  time.Time // when the last try failed
}

// NewLog returns the log of what, which begins the sentences that are logged:
// "PostgreSQL fails, trying until it works".
func NewLog(log *slog.Logger, what string) *Log { return &Log{log: log, what: what} }

// What returns the name that was given to [NewLog].
func (l *Log) What() string { return l.what }

// Report takes the result of a try. It logs the first failure, with attrs, and the
// first success after it.
func (l *Log) Report(err error, attrs ...any) {
	before := l.current.Load()
	switch {
	case err == nil && before != nil:
		l.log.Warn("outbox: "+l.what+" works again", "after", time.Since(before.Since).Round(time.Millisecond))
		l.current.Store(nil)
		l.backoff.Reset()
	case err != nil && before == nil:
		l.log.Warn("outbox: "+l.what+" fails, trying until it works", append(attrs, "error", err)...)
		now := time.Now()
		l.current.Store(&Outage{Err: err, Since: now, Last: now})
	case err != nil:
		l.current.Store(&Outage{Err: err, Since: before.Since, Last: time.Now()})
	}
}

// Current returns the outage, or nil if the last try succeeded.
func (l *Log) Current() *Outage { return l.current.Load() }

// Backoff returns the wait before the next try, see [wait.Backoff].
func (l *Log) Backoff() time.Duration { return l.backoff.Next() }

// Logs logs the outages of many things by name. It is safe for concurrent use.
type Logs struct {
	log     *slog.Logger
	failing atomic.Bool // something fails; read without the lock

	mu    sync.Mutex
	known map[string]*named // everything that has ever failed
}

type named struct {
	*Log
	succeeded time.Time // last, if it has failed before
}

// NewLogs returns the logs of things that have not failed yet.
func NewLogs(log *slog.Logger) *Logs { return &Logs{log: log, known: map[string]*named{}} }

// Failing reports whether anything fails. While it does not, a success need not be
// reported.
func (l *Logs) Failing() bool { return l.failing.Load() }

// Report takes the result of a try that began at a time. A failure that began
// before the last success is out of date and ignored, because two clients need not
// notice the end of an outage at the same time.
func (l *Logs) Report(name string, began time.Time, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	one := l.known[name]
	switch {
	case one == nil && err == nil, err != nil && one != nil && began.Before(one.succeeded):
		return
	case one == nil:
		one = &named{Log: NewLog(l.log, name)}
		l.known[name] = one
	}
	one.Report(err)
	if err == nil {
		one.succeeded = time.Now()
	}
	failing := false
	for _, one := range l.known {
		failing = failing || one.Current() != nil
	}
	l.failing.Store(failing)
}

// Named is an outage with the name under which it was reported.
type Named struct {
	Name string
	Outage
}

// Current returns the outages that have not ended, sorted by name.
func (l *Logs) Current() (current []Named) {
	if !l.failing.Load() {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(l.known)) {
		if o := l.known[name].Current(); o != nil {
			current = append(current, Named{name, *o})
		}
	}
	return current
}

// Backoff returns the wait before the next try of what fails.
func (l *Logs) Backoff(name string) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if one := l.known[name]; one != nil {
		return one.Backoff()
	}
	return wait.MinBackoff // another try has succeeded meanwhile
}
