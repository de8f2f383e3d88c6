// This program writes the contract of a registry.
package main

import (
	"os"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxcontract"
)

type orderPlaced struct {
	ID string    `json:"id"`
	At time.Time `json:"at"`
}

func (e orderPlaced) OccurredAt() time.Time { return e.At }
func (e orderPlaced) order() string         { return e.ID }

func main() {
	events, err := outbox.NewRegistry("shop", outbox.Event("acme.order.placed.v1", "Order", orderPlaced.order))
	if err != nil {
		panic(err)
	}
	if err := outboxcontract.Export(os.Stdout, events); err != nil {
		panic(err)
	}
}
