package outboxadmin

import (
	"iter"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox"
)

// sample is the number of waiting events at a moment.
type sample struct {
	at      time.Time
	pending int64  // not yet tried
	failed  int64  // in outbox_failed or event_delivery, and not dead
	lag     *int64 // of a group in Kafka; nil if it is not known
}

const (
	keepSamples  = 24 * time.Hour
	maxSamples   = 4000            // of a name: a sample each 5 s for 5 hours and more
	sampleSpace  = 2 * time.Second // several views at the same time add only one sample
	maxSampled   = 100             // names
	sampleBreath = time.Minute     // in a longer gap no page was viewed
)

// samples are kept while a page is open, because no table has the number of pending events of some minutes
// ago. It is safe for concurrent use.
type samples struct {
	mu sync.Mutex
	of map[string][]sample // by name of a relay or a consumer group
}

// addRelays adds the state of relays.
func (s *samples) addRelays(now time.Time, relays []outbox.RelayStatus) {
	s.add(now, func(yield func(string, sample) bool) {
		for _, r := range relays {
			if !yield(r.Name, sample{pending: r.Pending, failed: r.Waiting + r.Failed + r.Parked}) {
				return
			}
		}
	})
}

// add adds samples by name. It sets their time.
func (s *samples) add(now time.Time, all iter.Seq2[string, sample]) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of == nil {
		s.of = map[string][]sample{}
	}
	for name, one := range all {
		kept, known := s.of[name]
		if !known && len(s.of) >= maxSampled {
			continue
		}
		if n := len(kept); n > 0 && now.Sub(kept[n-1].at) < sampleSpace {
			continue
		}
		first := max(0, len(kept)-maxSamples+1)
		for first < len(kept) && now.Sub(kept[first].at) > keepSamples {
			first++
		}
		one.at = now
		s.of[name] = append(slices.Delete(kept, 0, first), one)
	}
}

// since returns the samples of a name, oldest first.
func (s *samples) since(name string, since time.Time) []sample {
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := s.of[name]
	first, _ := slices.BinarySearchFunc(kept, since, func(s sample, t time.Time) int { return s.at.Compare(t) })
	return slices.Clone(kept[first:])
}
