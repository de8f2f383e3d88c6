package faults

import (
	"sync"
	"testing"
	"time"

	"github.com/outboxgo/outbox/internal/oracle"
)

// watch sees events arrive for the first time, and how long none does.
type watch struct {
	reader *oracle.Reader
	quit   chan struct{}
	done   chan struct{}

	mu      sync.Mutex
	seen    map[string]struct{}
	next    int           // the first arrival that it has not looked at
	paused  bool          // servers or network are not whole
	last    time.Time     // when one arrived last, or the pause ended
	longest time.Duration // without one, outside pauses
}

func newWatch(t *testing.T, reader *oracle.Reader) *watch {
	t.Helper()
	w := &watch{
		reader: reader, quit: make(chan struct{}), done: make(chan struct{}),
		seen: map[string]struct{}{}, last: time.Now(),
	}
	go w.run()
	t.Cleanup(func() { w.stop() })
	return w
}

func (w *watch) run() {
	defer close(w.done)
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			w.look()
		case <-w.quit:
			return
		}
	}
}

// stop ends it and returns the longest time without an arrival.
func (w *watch) stop() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case <-w.quit:
	default:
		close(w.quit)
	}
	return w.longest
}

func (w *watch) look() {
	arrived, _ := w.reader.Arrived() // its error counts in the end
	w.mu.Lock()
	defer w.mu.Unlock()
	before := len(w.seen)
	for _, e := range arrived[w.next:] {
		w.seen[e.ID] = struct{}{}
	}
	w.next = len(arrived)
	if !w.paused {
		w.longest = max(w.longest, time.Since(w.last))
	}
	if len(w.seen) > before {
		w.last = time.Now()
	}
}

// arrived returns how many events have, repeats not counted.
func (w *watch) arrived() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.seen)
}

// pause says that nothing need arrive until resume.
func (w *watch) pause() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.paused = true
}

func (w *watch) resume() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.paused, w.last = false, time.Now()
}
