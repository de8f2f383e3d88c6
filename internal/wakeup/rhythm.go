package wakeup

import "time"

// Rhythm says how long one that looks for events waits before it looks again. After a notification, and after an event that
// nobody in this process has announced, it looks often for a while: then other processes need not notify it of each
// commit. A glance, which costs less than a look, says whether there may be anything new.
type Rhythm struct {
	Idle  time.Duration // between looks while nothing happens
	Ticks *Ticks        // when it glances; nil if it cannot

	active    time.Time // of the last sign of another process
	announced bool      // by this process, since the last look
	looked    time.Time // the last look
	events    int       // that it has found
	found     time.Time // the last look that has found events
	rate      float64   // of events in a second, as of the last look
}

const (
	often = 2 * time.Millisecond // between looks of one that cannot glance
	// activeFor is longer than Interval by what a notification may take longer than the one before.
	activeFor = Interval + 100*time.Millisecond
	// fewTicks is for how many ticks one that can glance relies on the rate of events in place of it.
	fewTicks = 4
)

// Woken notes a wake-up by this process.
func (r *Rhythm) Woken() { r.announced = true }

// Notified notes a notification of another process.
func (r *Rhythm) Notified(now time.Time) { r.active = now }

// Looked notes how many events a look has found that began at a time.
func (r *Rhythm) Looked(began time.Time, events int) {
	if events > 0 && !r.announced {
		r.active = began
	}
	r.rate = 0
	if events > 0 {
		if !r.found.IsZero() {
			r.rate = float64(events) / max(began.Sub(r.found), time.Microsecond).Seconds()
		}
		r.found = began
	}
	r.announced, r.looked, r.events = false, began, events
}

// Wait returns how long to wait before the next look or glance, unless a wake-up comes: not at all if, as far as the last look
// says, something has come meanwhile.
func (r *Rhythm) Wait(now time.Time) time.Duration {
	active := now.Sub(r.active) < activeFor
	since := now.Sub(r.looked)
	if r.Ticks == nil || !active {
		switch {
		case r.comeSince(since):
			return 0
		case active:
			return min(often, r.Idle)
		case r.events > 0:
			return min(r.record(), r.Idle)
		}
		return r.Idle
	}
	next, every := r.Ticks.wait(now)
	if since < fewTicks*every && r.comeSince(since) {
		return 0
	}
	return min(next, r.Idle)
}

// comeSince reports whether, as far as the last look says, something has come since.
func (r *Rhythm) comeSince(d time.Duration) bool { return r.rate*d.Seconds() >= 1 }

// Glances reports whether a glance comes before the next look. What was done with events must be noted, though, and a glance may
// be wrong, or of a server that takes no writes.
func (r *Rhythm) Glances(now time.Time) bool {
	return r.Ticks != nil && now.Sub(r.active) < activeFor && now.Sub(r.looked) < min(r.Idle, r.record())
}

func (r *Rhythm) record() time.Duration {
	if r.Ticks == nil {
		return recordWithin
	}
	return r.Ticks.record()
}
