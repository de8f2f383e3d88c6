// Package orders has an event type with the name of one elsewhere.
package orders

import "github.com/outboxgo/outbox/outboxtest/testdata/base"

// Base is what events of other packages embed.
type Base struct{ base.Base }

// ID is an aggregate's.
func (b Base) ID() string { return "id" }

// Paid is not the other one.
type Paid struct{ Base }
