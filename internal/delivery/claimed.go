package delivery

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
)

// hands are the deliveries that a worker has: those that wait for a lane, and those that one handles.
// Their leases are renewed as long as they are here. It is safe for concurrent use.
type hands struct {
	mu    sync.Mutex
	rows  map[Ref]*hold
	bytes int64 // of the batches, by what their rows say
}

// hold is a batch of deliveries.
type hold struct {
	ctx     context.Context
	lose    context.CancelFunc
	batch   []Delivery
	left    int       // deliveries that are here
	bytes   int64     // that came with it
	renewed time.Time // when its lease was renewed last
	suspect bool
	locked  bool // rows are locked by the transaction under way: nobody takes them
}

func newHands() *hands { return &hands{rows: map[Ref]*hold{}} }

// maxHeldBytes bounds payloads and headers that wait for lanes, by what their rows say. What does not fit is read
// when it is handled.
const maxHeldBytes = 32 << 20

// Budget returns how many bytes fit in.
func (h *hands) Budget() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return max(0, maxHeldBytes-h.bytes)
}

// add adds a batch that was claimed after some time.
func (h *hands) add(cut context.Context, batch []Delivery, claimed time.Time) {
	one := &hold{batch: batch, left: len(batch), renewed: claimed, suspect: batch[0].Suspect}
	one.ctx, one.lose = context.WithCancel(cut)
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, d := range batch {
		h.rows[d.Ref] = one
		if !d.Bare {
			one.bytes += int64(d.Size)
		}
	}
	h.bytes += one.bytes
}

// contextOf returns a context that ends when a batch is lost.
func (h *hands) contextOf(batch []Delivery, cut context.Context) context.Context {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, d := range batch {
		if one := h.rows[d.Ref]; one != nil {
			return one.ctx
		}
	}
	ended, cancel := context.WithCancel(cut)
	cancel()
	return ended
}

// drop notes that a delivery is not with this worker any more.
func (h *hands) drop(r Ref) {
	h.mu.Lock()
	defer h.mu.Unlock()
	one := h.rows[r]
	if one == nil {
		return
	}
	delete(h.rows, r)
	if one.left--; one.left == 0 {
		one.lose()
		h.bytes -= one.bytes
	}
}

// lose ends the work on the batch of a delivery.
func (h *hands) lose(r Ref) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if one := h.rows[r]; one != nil {
		one.lose()
	}
}

// loseAll ends the work on the batches of those that are called id. There may be two, if PostgreSQL has given it out
// again.
func (h *hands) loseAll(id int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for r, one := range h.rows {
		if r.ID == id {
			one.lose()
		}
	}
}

// beside returns the deliveries that came with the one of a call which is given up, and are still here: those that
// wait behind it, and those whose handlers were called before it in its transaction, which is rolled back. They are not
// to blame. If the call has several deliveries, any of them may be, and it returns none.
func (h *hands) beside(call handling.Call) (rest []Delivery) {
	if call.Events > 1 {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for r, one := range h.rows {
		if r.ID != call.Place.DeliveryID {
			continue
		}
		for _, d := range one.batch {
			if d.Ref != r && h.rows[d.Ref] == one {
				rest = append(rest, d)
			}
		}
	}
	return rest
}

// all returns the deliveries, but for those of batches that are lost.
func (h *hands) all() (rows []Ref) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for r, one := range h.rows {
		if one.ctx.Err() == nil {
			rows = append(rows, r)
		}
	}
	return rows
}

// of returns the deliveries of the batch with a context.
func (h *hands) of(batch context.Context) (rows []Ref) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for r, one := range h.rows {
		if one.ctx == batch {
			rows = append(rows, r)
		}
	}
	return rows
}

// renewedAt notes that deliveries were renewed after some time, and ends the work on those that were not
// for longer than their lease lasts. It returns how many batches these are.
func (h *hands) renewedAt(rows []Ref, at time.Time, lease time.Duration) (lost int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range rows {
		if one := h.rows[r]; one != nil {
			one.renewed = at
		}
	}
	for _, one := range h.rows {
		if one.ctx.Err() == nil && !one.locked && time.Since(one.renewed) > lease {
			one.lose()
			lost++
		}
	}
	return lost
}

// lock notes that the transaction under way has locked rows of the batch with a context.
func (h *hands) lock(batch context.Context) { h.setLocked(batch, true) }

// unlock notes that it has ended.
func (h *hands) unlock(batch context.Context) { h.setLocked(batch, false) }

func (h *hands) setLocked(batch context.Context, locked bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, one := range h.rows {
		if one.ctx == batch && one.locked != locked {
			one.locked, one.renewed = locked, time.Now()
			return
		}
	}
}

// hasSuspect reports whether a delivery is here that may end the process. One that is lost counts no
// more: its handler may hang for ever.
func (h *hands) hasSuspect() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, one := range h.rows {
		if one.suspect && one.ctx.Err() == nil {
			return true
		}
	}
	return false
}

func (h *hands) Len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.rows)
}

// strays returns those of some deliveries that are not here.
func (h *hands) strays(rows []Delivery) (strays []Delivery) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, d := range rows {
		if h.rows[d.Ref] == nil {
			strays = append(strays, d)
		}
	}
	return strays
}

// progress is how far a lane has come with a batch whose handlers have no transaction. The keeper looks after
// it while a call takes long. It is safe for concurrent use.
type progress struct {
	writing sync.Mutex // held while what is done is written down, in its order

	mu    sync.Mutex
	ahead []Delivery // not begun
	done  []Delivery // handled, and not written down
	since time.Time  // when the first of done was
}

// start begins with a batch.
func (p *progress) start(batch []Delivery) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ahead, p.done = slices.Clone(batch), nil
}

// begin reports whether a delivery is still with the lane, which begins it.
func (p *progress) begin(r Ref) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := slices.IndexFunc(p.ahead, func(d Delivery) bool { return d.Ref == r })
	if n < 0 {
		return false
	}
	p.ahead = p.ahead[n+1:] // those before it are paused, and go back
	return true
}

// end notes that a delivery is handled. It returns for how long the first one waits to be written down.
func (p *progress) end(d Delivery) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.done) == 0 {
		p.since = time.Now()
	}
	p.done = append(p.done, d)
	return time.Since(p.since)
}

// takeDone returns what is to be written down.
func (p *progress) takeDone() (done []Delivery) {
	p.mu.Lock()
	defer p.mu.Unlock()
	done, p.done = p.done, nil
	return done
}

// putBack takes back what could not be written down.
func (p *progress) putBack(done []Delivery) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done = append(done, p.done...)
}

// takeAhead returns what is not begun, and will not be.
func (p *progress) takeAhead() (ahead []Delivery) {
	p.mu.Lock()
	defer p.mu.Unlock()
	ahead, p.ahead = p.ahead, nil
	return ahead
}
