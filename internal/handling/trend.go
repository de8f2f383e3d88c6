package handling

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

// Trend decides whether a lag grows. The zero value is ready.
type Trend struct {
	mu      sync.Mutex
	samples []lagSample // oldest first, none older than trendTime and one interval
}

type lagSample struct {
	at  time.Time
	lag int64
}

// SampleInterval is how often the lag is added to a Trend.
const SampleInterval = 30 * time.Second

const (
	trendTime = 5 * time.Minute
	staleTime = 3 * SampleInterval // after which the last sample does not say the present lag
	least     = 1_000              // records; a lag below is no backlog
)

// Add adds the present lag, in records.
func (t *Trend) Add(lag int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	t.samples = slices.DeleteFunc(t.samples, func(s lagSample) bool { return now.Sub(s.at) > trendTime+SampleInterval })
	t.samples = append(t.samples, lagSample{now, lag})
}

// Growing returns the lag of five minutes ago and the present one, and whether the lag has never become shorter since.
func (t *Trend) Growing() (before, now int64, growing bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.samples) == 0 {
		return 0, 0, false
	}
	first, last := t.samples[0], t.samples[len(t.samples)-1]
	if last.at.Sub(first.at) < trendTime || time.Since(last.at) > staleTime {
		return 0, 0, false
	}
	isSorted := slices.IsSortedFunc(t.samples, func(a, b lagSample) int { return cmp.Compare(a.lag, b.lag) })
	return first.lag, last.lag, last.lag >= least && first.lag < last.lag && isSorted
}
