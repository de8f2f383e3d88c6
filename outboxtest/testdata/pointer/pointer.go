// Package pointer has event types with pointer receivers.
package pointer

import "time"

// Counted cannot be registered as it is.
type Counted struct{ n int }

// OccurredAt counts.
func (c *Counted) OccurredAt() time.Time { c.n++; return time.Time{} }
