package delivery

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
)

// claimedSet is the set of deliveries that this process has claimed: those that wait for a lane and those
// that a lane handles. Their leases are renewed as long as they are in the set. It is safe for concurrent
// use.
type claimedSet struct {
	mu    sync.Mutex
	rows  map[Ref]*claim
	bytes int64 // payloads and headers in memory, by the sizes in the rows
}

// claim is a batch of deliveries whose leases were taken together. They are renewed and lost together.
type claim struct {
	ctx       context.Context // ends when the claim is lost
	lose      context.CancelFunc
	batch     []Delivery
	remaining int             // deliveries of the batch that are still in the set
	bytes     int64           // payloads and headers that were read with the claim
	renewed   time.Time       // when the leases were renewed last
	suspect   bool            // the delivery may have ended its last process
	begun     time.Time       // when its row has said that the attempt on the suspect begins, or zero
	hung      handling.Call   // the call that was given up; without events if none was
	trial     *handling.Trial // in which the delivery is tried, or nil
	locked    bool            // a transaction has locked the rows, so no other process can take them over
}

func newClaimedSet() *claimedSet { return &claimedSet{rows: map[Ref]*claim{}} }

// maxClaimedBytes bounds the payloads and headers of claimed deliveries. A lane reads the others when it
// handles the delivery.
const maxClaimedBytes = 32 << 20

// Budget returns the bytes of payloads and headers that the set can still take.
func (s *claimedSet) Budget() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(0, maxClaimedBytes-s.bytes)
}

// add adds a batch, the time of its claim, and its trial, or nil. It returns the context of the batch. The context ends
// with the claim, however that ends, and with cut.
func (s *claimedSet) add(cut context.Context, batch []Delivery, claimedAt time.Time, trial *handling.Trial) context.Context {
	c := &claim{batch: batch, remaining: len(batch), renewed: claimedAt, suspect: batch[0].Suspect, trial: trial}
	c.ctx, c.lose = context.WithCancel(cut)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range batch {
		s.rows[d.Ref] = c
		if !d.Bare {
			c.bytes += int64(d.Size)
		}
	}
	s.bytes += c.bytes
	return c.ctx
}

// claimOf returns the context of a batch, which ends when its claim is lost, and its trial, or nil. The context has
// ended already if no delivery of the batch is in the set.
func (s *claimedSet) claimOf(batch []Delivery, cut context.Context) (context.Context, *handling.Trial) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range batch {
		if c := s.rows[d.Ref]; c != nil {
			return c.ctx, c.trial
		}
	}
	ended, cancel := context.WithCancel(cut)
	cancel()
	return ended, nil
}

// remove removes a delivery that has ended or was released.
func (s *claimedSet) remove(r Ref) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.rows[r]
	if c == nil {
		return
	}
	delete(s.rows, r)
	if c.remaining--; c.remaining == 0 {
		c.lose()
		s.bytes -= c.bytes
	}
}

// lose ends the context of the claim that a delivery belongs to.
func (s *claimedSet) lose(r Ref) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.rows[r]; c != nil {
		c.lose()
	}
}

// giveUp ends the contexts of the claims of an abandoned call's delivery. There may be two, because a crash of
// PostgreSQL can forget a row and assign its id again. It reports whether a context had not ended before, and notes the
// call in its claim.
func (s *claimedSet) giveUp(call handling.Call) (lost bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for r, c := range s.rows {
		if r.ID != call.Place.DeliveryID {
			continue
		}
		if c.ctx.Err() == nil {
			c.hung, lost = call, true
		}
		c.lose()
	}
	return lost
}

// mayHang reports whether a delivery of a call's claim may have caused the hang of the call: it is that of the call, or
// the call has several events of its action.
func mayHang(d *Delivery, call handling.Call) bool {
	return d.ID == call.Place.DeliveryID || call.Events > 1 && d.Action == call.Action
}

// hungIn reports whether a delivery may have caused the hang of a call that was given up, and returns the action of the
// call.
func (s *claimedSet) hungIn(d *Delivery) (action string, hung bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.rows[d.Ref]
	if c == nil || c.hung.Events == 0 {
		return "", false
	}
	return c.hung.Action, mayHang(d, c.hung)
}

// begunBy returns the deliveries that may have caused the hang of an abandoned call, by their claims.
func (s *claimedSet) begunBy(call handling.Call) (claims [][]Delivery) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for r, c := range s.rows {
		if r.ID != call.Place.DeliveryID {
			continue
		}
		var begun []Delivery
		for _, d := range c.batch {
			if mayHang(&d, call) && s.rows[d.Ref] == c {
				begun = append(begun, d)
			}
		}
		claims = append(claims, begun)
	}
	return claims
}

// othersOf returns the other deliveries of an abandoned call's claim. They wait behind the call, or their
// handlers were called before it in the transaction that is rolled back now. They have not caused the hang,
// so they can be released.
func (s *claimedSet) othersOf(call handling.Call) (others []Delivery) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for r, c := range s.rows {
		if r.ID != call.Place.DeliveryID {
			continue
		}
		for _, d := range c.batch {
			if !mayHang(&d, call) && s.rows[d.Ref] == c {
				others = append(others, d)
			}
		}
	}
	return others
}

// renewable returns all deliveries whose claims are not lost.
func (s *claimedSet) renewable() (rows []Ref) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for r, c := range s.rows {
		if c.ctx.Err() == nil {
			rows = append(rows, r)
		}
	}
	return rows
}

// withContext returns the deliveries of the claim that has a context.
func (s *claimedSet) withContext(ctx context.Context) (rows []Ref) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for r, c := range s.rows {
		if c.ctx == ctx {
			rows = append(rows, r)
		}
	}
	return rows
}

// noteRenewed notes that deliveries were renewed at a time. It loses the claims that were not renewed for
// longer than the lease, and returns their number.
func (s *claimedSet) noteRenewed(rows []Ref, at time.Time, lease time.Duration) (lost int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range rows {
		if c := s.rows[r]; c != nil {
			c.renewed = at
		}
	}
	for _, c := range s.rows {
		if c.ctx.Err() == nil && !c.locked && time.Since(c.renewed) > lease {
			c.lose()
			lost++
		}
	}
	return lost
}

// setLocked notes whether a transaction has locked rows of the claim with a context. Locked rows cannot be
// renewed, and no other process can take them over.
func (s *claimedSet) setLocked(ctx context.Context, locked bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.rows {
		if c.ctx == ctx && c.locked != locked {
			c.locked, c.renewed = locked, time.Now()
			return
		}
	}
}

// Len returns the number of claimed deliveries.
func (s *claimedSet) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.rows)
}

// missing returns the rows that are not in the set.
func (s *claimedSet) missing(rows []Delivery) []Delivery {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(rows), func(d Delivery) bool { return s.rows[d.Ref] != nil })
}
