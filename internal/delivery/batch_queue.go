package delivery

import (
	"sync"

	"github.com/outboxgo/outbox/internal/wait"
)

// batchQueue has the batches that wait for a lane. Adding never blocks, because the lane may hang.
type batchQueue struct {
	mu      sync.Mutex
	batches [][]Delivery
	closed  bool
	more    chan struct{} // holds at most one signal
}

func (q *batchQueue) add(batch []Delivery) {
	q.mu.Lock()
	q.batches = append(q.batches, batch)
	q.mu.Unlock()
	wait.Signal(q.more)
}

// close makes next return false once the queue is empty.
func (q *batchQueue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	wait.Signal(q.more)
}

// next waits for a batch. It returns false if the queue is closed and empty.
func (q *batchQueue) next() (batch []Delivery, ok bool) {
	for {
		q.mu.Lock()
		if len(q.batches) > 0 {
			batch, q.batches = q.batches[0], q.batches[1:]
			q.mu.Unlock()
			return batch, true
		}
		closed := q.closed
		q.mu.Unlock()
		if closed {
			return nil, false
		}
		<-q.more
	}
}

// takeAll removes and returns all batches.
func (q *batchQueue) takeAll() [][]Delivery {
	q.mu.Lock()
	defer q.mu.Unlock()
	all := q.batches
	q.batches = nil
	return all
}
