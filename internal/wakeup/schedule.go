package wakeup

import "time"

// PollSchedule says how long a relay or a worker waits before it polls for events again. After a notification, and
// after an event that this process has not announced, it polls often for a while: then other processes need not
// notify for each commit. A probe costs less than a poll and shows whether there may be new events.
type PollSchedule struct {
	Idle  time.Duration // between polls while nothing happens
	Ticks *Ticks        // when it probes; nil if it cannot

	active    time.Time // of the last sign of another process
	announced bool      // by this process, since the last poll
	polled    time.Time // the last poll
	events    int       // that it has found
	found     time.Time // the last poll that has found events
	rate      float64   // of events in a second, as of the last poll
}

const (
	often = 2 * time.Millisecond // between polls where there are no probes
	// activeFor is longer than Interval, because a notification may take longer than the one before.
	activeFor = Interval + 100*time.Millisecond
	// fewTicks is for how many ticks the rate of events takes the place of probes.
	fewTicks = 4
)

// Woken records a wake-up by this process.
func (r *PollSchedule) Woken() { r.announced = true }

// Notified records a notification of another process.
func (r *PollSchedule) Notified(now time.Time) { r.active = now }

// Polled records how many events a poll has found that began at a time.
func (r *PollSchedule) Polled(began time.Time, events int) {
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
	r.announced, r.polled, r.events = false, began, events
}

// Wait returns how long to wait before the next poll or probe, unless a wake-up comes. It returns 0 if, at the rate
// of the last poll, an event has come meanwhile.
func (r *PollSchedule) Wait(now time.Time) time.Duration {
	active := now.Sub(r.active) < activeFor
	since := now.Sub(r.polled)
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

// comeSince reports whether, at the rate of the last poll, an event has come since.
func (r *PollSchedule) comeSince(d time.Duration) bool { return r.rate*d.Seconds() >= 1 }

// Probing reports whether a probe comes before the next poll. Polls still come after a while: the
// position must be saved, and a probe may be wrong, or of a server that takes no writes.
func (r *PollSchedule) Probing(now time.Time) bool {
	return r.Ticks != nil && now.Sub(r.active) < activeFor && now.Sub(r.polled) < min(r.Idle, r.record())
}

func (r *PollSchedule) record() time.Duration {
	if r.Ticks == nil {
		return recordWithin
	}
	return r.Ticks.record()
}
