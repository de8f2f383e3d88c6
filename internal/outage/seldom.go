package outage

import (
	"sync"
	"time"
)

// Seldom is for a line in the log about what may be true of every record: it is logged at
// most once a minute. The zero value is ready, and safe for concurrent use.
type Seldom struct {
	mu    sync.Mutex
	times int
	at    time.Time // of the last line
}

// Next counts a time. It reports whether there is to be a line about it now, and how many
// times that line is about.
func (s *Seldom) Next() (times int, now bool) {
	const pause = time.Minute
	s.mu.Lock()
	defer s.mu.Unlock()
	s.times++
	if !s.at.IsZero() && time.Since(s.at) < pause {
		return 0, false
	}
	times, s.times, s.at = s.times, 0, time.Now()
	return times, true
}
