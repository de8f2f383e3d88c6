package outbox

import (
	"errors"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/pg"
)

// activity is what a worker does at the moment: which handler it has called, and on
// which connection its transaction is. The worker's goroutine changes it; others read it,
// to report handlers that run for long, and end it with cutOff.
type activity struct {
	mu   sync.Mutex
	call handlerCall  // zero while no handler runs
	conn *pg.Borrowed // of the transaction under way; nil for none
	cut  bool         // there will be no other transaction
}

// handlerCall is a handler at work.
type handlerCall struct {
	action string
	first  *Metadata // of its first event
	events int       // more than one for a handler of HandleBatch
	began  time.Time
}

// begin notes that a handler is called.
func (a *activity) begin(action string, arrivals []arrival) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.call = handlerCall{action: action, first: &arrivals[0].meta, events: len(arrivals), began: time.Now()}
}

// end notes that the handler has returned, and says how long it took.
func (a *activity) end() (took time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	took = time.Since(a.call.began)
	a.call = handlerCall{}
	return took
}

// current returns the handler at work, if there is one.
func (a *activity) current() (call handlerCall, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.call, a.call.first != nil
}

// errCutOff says that a worker was cut off: its partition is given up.
var errCutOff = errors.New("the worker was cut off")

// use notes the connection of a transaction that begins.
func (a *activity) use(conn *pg.Borrowed) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cut {
		return errCutOff
	}
	a.conn = conn
	return nil
}

// release notes that the transaction has ended.
func (a *activity) release() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.conn = nil
}

// cutOff closes the connection of the transaction under way, if there is one, so that
// PostgreSQL rolls it back, and lets no other begin. A handler that ignores its context
// cannot be ended; this way what it does later in its transaction has no effect.
func (a *activity) cutOff() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.cut = true
	if a.conn != nil {
		a.conn.Cut()
	}
}
