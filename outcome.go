package outbox

import (
	"errors"

	"github.com/outboxgo/outbox/internal/kafka"
)

// outcome is what happened to an event of a batch.
type outcome struct {
	kind  outcomeKind
	class string // of the error, as in outbox_failed.error_class
	err   error
	place string // what an unavailable event waits for, as in outbox_failed.place; of a probe that was sent, its partition
}

type outcomeKind uint8

const (
	outcomePending     outcomeKind = iota // not decided: the event will be sent again
	outcomeSent                           // Kafka has acknowledged the event
	outcomeRejected                       // Kafka rejected the event for what it is
	outcomeUnavailable                    // Kafka, the topic or the partition was unavailable
	outcomeBlocked                        // not sent: an earlier event of the key did not get through
	outcomeParked                         // not sent: the key is parked, and the parking has counted the event
)

// invalidEvent is the error class of rows from which no record can be made.
const invalidEvent = "invalid_event"

// rejectionClass returns the class of an error with which an event was rejected for
// what it is: invalidEvent, unreadableRow, or a class of [kafka.RejectionClass]. It
// returns "" for every other error.
func rejectionClass(err error) string {
	if _, ok := errors.AsType[*FieldError](err); ok { // without the allocation of errors.As: this is called for every event
		return invalidEvent
	}
	if _, ok := errors.AsType[*unreadableError](err); ok {
		return unreadableRow
	}
	return kafka.RejectionClass(err)
}
