// Package base has what the events of several packages embed.
package base

import "time"

// Base brings OccurredAt.
type Base struct{ At time.Time }

// OccurredAt makes events of those that embed it.
func (b Base) OccurredAt() time.Time { return b.At }
