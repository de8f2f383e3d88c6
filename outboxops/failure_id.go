package outboxops

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/outboxgo/outbox"
)

// Kind is a kind of failures. Each kind has its own table.
type Kind string

const (
	// KindEvent is an event that a relay could not send. It is in outbox_failed.
	KindEvent Kind = "event"
	// KindDelivery is an event that a handler of a consumer group could not handle. It is in
	// event_delivery.
	KindDelivery Kind = "delivery"
)

// kinds are all of them, in the order in which they are read and changed.
var kinds = []Kind{KindEvent, KindDelivery}

func (k Kind) check(field string) error {
	switch k {
	case KindEvent, KindDelivery:
		return nil
	case "":
		return fmt.Errorf("field %s %w", field, outbox.ErrEmpty)
	}
	return fmt.Errorf("field %s %w: %.100q is no kind of failures, want %s or %s", field, outbox.ErrMalformed, string(k), KindEvent, KindDelivery)
}

// FailureID names a failure: event-17 is row 17 of outbox_failed, and delivery-17 row 17 of
// event_delivery.
type FailureID struct {
	// Kind is the kind of the failure, which decides its table.
	Kind Kind
	// Number is the id of its row.
	Number int64
}

// ParseFailureID reads the text that [FailureID.String] returns. Its error names the
// part that is wrong.
func ParseFailureID(text string) (FailureID, error) {
	kind, digits, ok := strings.Cut(text, "-")
	if !ok {
		return FailureID{}, fmt.Errorf("outbox: failure id %.100q %w: want a kind and a number, event-17 for example", text, outbox.ErrMalformed)
	}
	number, err := strconv.ParseInt(digits, 10, 64)
	if err != nil {
		return FailureID{}, fmt.Errorf("outbox: failure id %.100q: field Number %w: %.100q is no number", text, outbox.ErrMalformed, digits)
	}
	id := FailureID{Kind(kind), number}
	if err := id.check(); err != nil {
		return FailureID{}, fmt.Errorf("outbox: failure id %.100q: %w", text, err)
	}
	return id, nil
}

// String returns the kind and the number, event-17 for example; for the zero value it
// returns "".
func (id FailureID) String() string {
	if id == (FailureID{}) {
		return ""
	}
	return string(id.Kind) + "-" + strconv.FormatInt(id.Number, 10)
}

// MarshalText implements [encoding.TextMarshaler] by [FailureID.String].
func (id FailureID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText implements [encoding.TextUnmarshaler] by [ParseFailureID]. An empty
// text is the zero value.
func (id *FailureID) UnmarshalText(text []byte) (err error) {
	if len(text) == 0 {
		*id = FailureID{}
		return nil
	}
	*id, err = ParseFailureID(string(text))
	return err
}

func (id FailureID) check() error {
	if err := id.Kind.check("Kind"); err != nil {
		return err
	}
	if id.Number < 1 {
		return fmt.Errorf("field Number is %d: must be above 0", id.Number)
	}
	return nil
}

// checkFor is check for an action.
func (id FailureID) checkFor(action string) error {
	if err := id.check(); err != nil {
		return fmt.Errorf("outbox: %s failure: %w", action, err)
	}
	return nil
}

// numberOf is the number of an id of a kind, and 0 for other kinds.
func (id FailureID) numberOf(kind Kind) int64 {
	if id.Kind != kind {
		return 0
	}
	return id.Number
}
