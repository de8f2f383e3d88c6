package outboxadmin

import (
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox"
)

// sample is the number of waiting events at a moment.
type sample struct {
	at      time.Time
	pending int64 // not yet tried
	failed  int64 // in outbox_failed, and not dead
}

const (
	keepSamples  = 24 * time.Hour
	maxSamples   = 4000            // of a relay: a sample each 5 s for 5 hours and more
	sampleSpace  = 2 * time.Second // several views at the same time add only one sample
	maxSampled   = 100             // relays
	sampleBreath = time.Minute     // in a longer gap no page was viewed
)

// samples are kept while a page is open, because no table has the number of pending events of some minutes
// ago. It is safe for concurrent use.
type samples struct {
	mu    sync.Mutex
	relay map[string][]sample
}

// add adds the state of relays.
func (s *samples) add(now time.Time, relays []outbox.RelayStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.relay == nil {
		s.relay = map[string][]sample{}
	}
	for _, r := range relays {
		kept, known := s.relay[r.Name]
		if !known && len(s.relay) >= maxSampled {
			continue
		}
		if n := len(kept); n > 0 && now.Sub(kept[n-1].at) < sampleSpace {
			continue
		}
		first := max(0, len(kept)-maxSamples+1)
		for first < len(kept) && now.Sub(kept[first].at) > keepSamples {
			first++
		}
		s.relay[r.Name] = append(slices.Delete(kept, 0, first), sample{now, r.Pending, r.Waiting + r.Failed + r.Parked})
	}
}

// since returns the samples of a relay, oldest first.
func (s *samples) since(relay string, since time.Time) []sample {
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := s.relay[relay]
	first, _ := slices.BinarySearchFunc(kept, since, func(s sample, t time.Time) int { return s.at.Compare(t) })
	return slices.Clone(kept[first:])
}
