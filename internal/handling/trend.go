package handling

import (
	"slices"
	"sync"
	"time"
)

// Trend decides whether a lag grows. The zero value is ready.
type Trend struct {
	mu      sync.Mutex
	samples []int64 // of the last five minutes, oldest first
}

// SampleInterval is how often the lag is added to a Trend.
const SampleInterval = 30 * time.Second

const (
	trendSamples = 11    // five minutes
	least        = 1_000 // records; a lag below is no backlog
)

// Add adds the present lag, in records.
func (t *Trend) Add(lag int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.samples = append(t.samples, lag)
	if n := len(t.samples); n > trendSamples {
		t.samples = slices.Delete(t.samples, 0, n-trendSamples)
	}
}

// Growing returns the lag of five minutes ago and the present one, and whether the lag has never become shorter since.
func (t *Trend) Growing() (before, now int64, growing bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.samples) < trendSamples {
		return 0, 0, false
	}
	before, now = t.samples[0], t.samples[trendSamples-1]
	return before, now, now >= least && before < now && slices.IsSorted(t.samples)
}
