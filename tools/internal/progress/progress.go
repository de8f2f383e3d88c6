// Package progress tells people that something is still going on.
package progress

import (
	"fmt"
	"io"
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
