// Package progress tells people that something is still going on.
package progress

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// beat is the time between two lines of [Heartbeat].
const beat = 5 * time.Second

// Heartbeat writes a line "what: 5 s" to w every 5 s until stop is called.
func Heartbeat(w io.Writer, what func() string) (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	start := time.Now()
	go func() {
		defer close(done)
		tick := time.NewTicker(beat)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
				fmt.Fprintf(w, "%s: %.0f s\n", what(), time.Since(start).Seconds())
			}
		}
	}()
	return func() { close(quit); <-done }
}

// Shared returns a writer to w for several goroutines, which write one at a time. What they
// write after end was called is dropped: by then w is its owner's again.
func Shared(w io.Writer) (shared io.Writer, end func()) {
	s := &sharedWriter{w: w}
	return s, s.end
}

type sharedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (s *sharedWriter) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.w.Write(b)
}

func (s *sharedWriter) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.w = io.Discard
}
