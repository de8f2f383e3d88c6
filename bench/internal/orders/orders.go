// Package orders makes the events of all scenarios. They are the same in each run.
package orders

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
)

// Keys is how many partition keys the events have.
const Keys = 10_000

// Placed is the event of all scenarios: payload and metadata are about 260
// bytes in its row. N is unique within a run.
type Placed struct {
	N        int       `json:"n" avro:"n"`
	Order    string    `json:"order" avro:"order"`
	Customer string    `json:"customer" avro:"customer"`
	Total    int       `json:"total" avro:"total"`
	Note     string    `json:"note" avro:"note"`
	At       time.Time `json:"-" avro:"-"`
}

// OccurredAt implements [outbox.DomainEvent].
func (e Placed) OccurredAt() time.Time { return e.At }

// Key returns the key of its partition: that of the aggregate.
func (e Placed) Key() string { return e.Order }

// New returns event n. Events look random, so that compression and caches
// are not flattered, and are the same in each run.
func New(n int) Placed {
	r := rand.New(rand.NewPCG(2026, uint64(n)))
	return Placed{
		N:        n,
		Order:    fmt.Sprintf("order-%05d", r.IntN(Keys)),
		Customer: fmt.Sprintf("%016x%08x", r.Uint64(), r.Uint32()),
		Total:    r.IntN(1_000_000),
		Note:     note(r, 11),
		At:       time.Now(),
	}
}

// NewMany returns n events from number first on.
func NewMany(first, n int) []outbox.DomainEvent {
	events := make([]outbox.DomainEvent, n)
	for i := range events {
		events[i] = New(first + i)
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

// Source is the CloudEvents source of the events.
const Source = "bench"

// Aggregate is the CloudEvents aggregate type of the events.
const Aggregate = "Order"

// protobufN begins a payload that is a Protobuf message whose first field is n.
const protobufN = 1 << 3

// Number returns the member n of a payload, which comes first, as PostgreSQL or encoding/json wrote it, or as a message
// of orderspb has it. Decoding all of it would take time from what is measured.
func Number(payload []byte) (int, error) {
	if len(payload) > 0 && payload[0] == protobufN {
		if n, size := binary.Uvarint(payload[1:]); size > 0 {
			return int(n), nil
		}
	}
	rest, ok := bytes.CutPrefix(payload, []byte(`{"n":`))
	digits, _, _ := bytes.Cut(rest, []byte(","))
	n, err := strconv.Atoi(string(bytes.TrimSpace(digits)))
	if !ok || err != nil {
		return 0, fmt.Errorf("%.20q is not the payload of an event", payload)
	}
	return n, nil
}
