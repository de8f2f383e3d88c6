package delivery

import (
	"slices"
	"sync"
	"time"
)

// progress is the progress of a lane without a transaction in its batch. The leaseKeeper uses it
// during a long call: it finishes the handled deliveries, and releases those that have not begun.
// It is safe for concurrent use.
type progress struct {
	writing sync.Mutex // held while handled deliveries are finished, so that this happens in their order

	mu      sync.Mutex
	ahead   []Delivery // not begun
	handled []Delivery // handled, but not finished in the table
	since   time.Time  // when the first of handled was added
}

// start begins with a batch.
func (p *progress) start(batch []Delivery) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ahead, p.handled = slices.Clone(batch), nil
}

// begin begins a delivery. It returns false if the delivery was released before.
func (p *progress) begin(r Ref) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := slices.IndexFunc(p.ahead, func(d Delivery) bool { return d.Ref == r })
	if n < 0 {
		return false
	}
	p.ahead = p.ahead[n+1:] // the lane has skipped those before it and releases them itself
	return true
}

// end notes that a delivery is handled. It returns how long the first handled delivery has waited to be
// finished.
func (p *progress) end(d Delivery) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.handled) == 0 {
		p.since = time.Now()
	}
	p.handled = append(p.handled, d)
	return time.Since(p.since)
}

// takeHandled removes and returns the handled deliveries, so that the caller finishes them.
func (p *progress) takeHandled() (handled []Delivery) {
	p.mu.Lock()
	defer p.mu.Unlock()
	handled, p.handled = p.handled, nil
	return handled
}

// putBack returns deliveries that could not be finished. They come before the deliveries that were handled
// meanwhile.
func (p *progress) putBack(handled []Delivery) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.handled = append(handled, p.handled...)
}

// takeAhead removes and returns the deliveries that have not begun. The lane will not begin them.
func (p *progress) takeAhead() (ahead []Delivery) {
	p.mu.Lock()
	defer p.mu.Unlock()
	ahead, p.ahead = p.ahead, nil
	return ahead
}
