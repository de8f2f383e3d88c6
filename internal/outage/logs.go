package outage

import (
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/wait"
)

// Logs logs the outages of many things by name. Others may choose the names, such as topics. So the lines of a minute
// name at most [maxNamed] things that begin to fail, and one line says how many others fail. Logs is safe for
// concurrent use.
type Logs struct {
	log     *slog.Logger
	failing atomic.Int64 // how many things fail; read without the lock

	mu     sync.Mutex
	known  map[string]*named // what fails, and what has failed lately
	minute time.Time         // when the current minute began
	names  map[string]bool   // that lines of this minute have
	quiet  int               // how many things fail without a line
	said   int               // quiet, as a line has said last
}

type named struct {
	*Log
	succeeded time.Time // last, if it has failed before
}

const (
	maxNamed  = 20
	remembers = time.Hour      // after the last success a thing is forgotten
	abandoned = 24 * time.Hour // after the last try a thing that fails is forgotten
)

// NewLogs returns the logs of things that have not failed yet.
func NewLogs(log *slog.Logger) *Logs { return &Logs{log: log, known: map[string]*named{}} }

// Failing reports whether anything fails. While it does not, a success need not be
// reported.
func (l *Logs) Failing() bool { return l.failing.Load() > 0 }

// Fails reports whether the last try of name has failed.
func (l *Logs) Fails(name string) bool {
	if !l.Failing() {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	one := l.known[name]
	return one != nil && one.Current() != nil
}

// Report takes the result of a try that began at a time. A failure that began
// before the last success is out of date and ignored, because two clients need not
// notice the end of an outage at the same time.
func (l *Logs) Report(name string, began time.Time, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.newMinute(time.Now(), name)
	one := l.known[name]
	switch {
	case one == nil && err == nil, err != nil && one != nil && began.Before(one.succeeded):
		return
	case one == nil:
		one = &named{Log: NewLog(l.log, name)}
		l.known[name] = one
	}
	if err != nil && one.Current() == nil {
		one.quiet = !l.mayName(name)
		l.count(one, 1)
	}
	if err == nil {
		one.succeeded = time.Now()
		if one.Current() != nil {
			l.count(one, -1)
		}
	}
	one.Report(err)
	if !l.Failing() { // no other success is reported
		l.sayMore()
	}
}

// Abandon is [Log.Abandon] of a thing, if it fails.
func (l *Logs) Abandon(name, why string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if one := l.known[name]; one != nil && one.Current() != nil {
		l.count(one, -1)
		one.Abandon(why)
	}
}

// newMinute begins another minute if the current one is over: it logs how many things fail without a name, and forgets
// what need not be known, but for the thing that is reported.
func (l *Logs) newMinute(now time.Time, reported string) {
	if now.Sub(l.minute) < time.Minute {
		return
	}
	for name, one := range l.known {
		switch o := one.Current(); {
		case name == reported:
		case o == nil && now.Sub(one.succeeded) > remembers:
			delete(l.known, name)
		case o != nil && now.Sub(o.Last) > abandoned:
			l.count(one, -1)
			delete(l.known, name)
		}
	}
	l.sayMore()
	l.minute, l.names = now, nil
}

// count counts a thing that begins to fail or ceases to.
func (l *Logs) count(one *named, n int) {
	l.failing.Add(int64(n))
	if one.quiet {
		l.quiet += n
	}
}

// mayName reports whether a line of this minute may have a name.
func (l *Logs) mayName(name string) bool {
	if l.names == nil {
		l.names = map[string]bool{}
	}
	if len(l.names) < maxNamed {
		l.names[name] = true
	}
	return l.names[name]
}

// sayMore logs how many things fail without a line, if the last line about it says another number.
func (l *Logs) sayMore() {
	switch {
	case l.quiet == l.said:
		return
	case l.quiet > 0:
		l.log.Warn("outbox: … and " + strconv.Itoa(l.quiet) + " more fail, trying until they work")
	default:
		l.log.Warn("outbox: … and no others are known to fail")
	}
	l.said = l.quiet
}

// Named is an outage with the name under which it was reported.
type Named struct {
	Name string
	Failure
}

// Current returns the outages that have not ended, sorted by name.
func (l *Logs) Current() (current []Named) {
	if !l.Failing() {
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
