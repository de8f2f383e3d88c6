package main

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
)

// keys is how many partition keys the events have.
const keys = 10_000

// orderPlaced is the event of all scenarios: payload and metadata are about 260
// bytes in its row. N is unique within a run.
type orderPlaced struct {
	N        int       `json:"n"`
	Order    string    `json:"order"`
	Customer string    `json:"customer"`
	Total    int       `json:"total"`
	Note     string    `json:"note"`
	At       time.Time `json:"-"`
}

// OccurredAt implements [outbox.DomainEvent].
func (e orderPlaced) OccurredAt() time.Time { return e.At }

func (e orderPlaced) order() string { return e.Order }

// newEvent returns event n. Events look random, so that compression and caches
// are not flattered, and are the same in each run.
func newEvent(n int) orderPlaced {
	r := rand.New(rand.NewPCG(2026, uint64(n)))
	return orderPlaced{
		N:        n,
		Order:    fmt.Sprintf("order-%05d", r.IntN(keys)),
		Customer: fmt.Sprintf("%016x%08x", r.Uint64(), r.Uint32()),
		Total:    r.IntN(1_000_000),
		Note:     note(r, 11),
		At:       time.Now(),
	}
}

func newEvents(first, n int) []outbox.DomainEvent {
	events := make([]outbox.DomainEvent, n)
	for i := range events {
		events[i] = newEvent(first + i)
	}
	return events
}

var words = strings.Fields(`amber basil cedar dunes ember fjord grove haven inlet jetty kiosk larch maple north
	ocean pearl quartz ridge slate thorn upland vale willow xenon yarrow zinc anchor beacon canyon delta`)

func note(r *rand.Rand, n int) string {
	chosen := make([]string, n)
	for i := range chosen {
		chosen[i] = words[r.IntN(len(words))]
	}
	return strings.Join(chosen, " ")
}

// source is the CloudEvents source of the events.
const source = "bench"

// aggregate is the CloudEvents aggregate type of the events.
const aggregate = "Order"

// eventType goes by convention to the run's topic.
func (s *services) eventType() string { return "acme.bench-" + s.id + ".placed.v1" }

// recorder returns one that records into schema.
func (s *services) recorder(schema string) (*outbox.Recorder, error) {
	events, err := outbox.NewRegistry(source, outbox.Event(s.eventType(), aggregate, orderPlaced.order))
	if err != nil {
		return nil, err
	}
	return outbox.NewRecorder(events, outbox.RecorderConfig{Schema: schema})
}
