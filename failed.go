package outbox

import (
	"time"

	"github.com/outboxgo/outbox/internal/tables"
)

// Values of outbox_failed.status.
const (
	StatusWaiting  = "waiting"  // for Kafka, its topic or its partition; tries are not counted
	StatusFailed   = "failed"   // rejected, and tried again
	StatusParked   = "parked"   // behind another event of its key
	StatusDead     = "dead"     // rejected, and not tried again
	StatusResolved = "resolved" // by an operator, or sent and kept
)

// MaxCounted is the highest count of failed events and keys: it stands for itself or any larger
// number. So a count over a million rows takes no longer.
const MaxCounted = tables.MaxCounted

// FailedEvent is an event that failed, with the error.
type FailedEvent struct {
	// OutboxID is outbox.id, and outbox_failed.outbox_id.
	OutboxID int64
	// EventID, Type, AggregateType and AggregateID are the event's, as in outbox.
	EventID, Type, AggregateType, AggregateID string
	// Topic and Key say where it would go. Topic is empty if none follows from the
	// type.
	Topic, Key string
	// Retries is how many retries Kafka rejected.
	Retries int
	// Class is the class of the error, as in outbox_failed.error_class.
	Class string
	// Err is the error of Kafka or of the client.
	Err error
}

// DeadEvent is a dead event or a dead delivery, as an alert shows it. Of a delivery, Retries and
// Class are those of its attempts, and Topic is its stream.
type DeadEvent struct {
	FailedEvent

	// ID is outbox_failed.id, or of a delivery event_delivery.id. The package outboxops and the
	// command outbox name it with the kind: event-17, delivery-17.
	ID int64
	// Group and Action say whose delivery it is; empty for an event of a relay.
	Group, Action string
	// FailedAt is when an event failed first, or when a delivery became dead.
	FailedAt time.Time
}

// EventCount is how many events or deliveries are alike, as an alert shows it.
type EventCount struct {
	// Relay is the relay whose events they are; empty for those of a consumer group.
	Relay string
	// Group and Action say for whom deliveries are; empty for events of a relay. Action is also
	// empty for what the group's workers have not looked at yet.
	Group, Action string
	// Topic is the topic of the events, or the stream of the deliveries. It is empty in alerts.
	Topic string
	// Status is one of the constants, [StatusDead] for example, or pending for events in outbox
	// that were not attempted. A delivery is [StatusFailed] once an attempt has failed, and
	// [StatusWaiting] until then. An event is missed if members of the group without Action have read it.
	Status string
	// Type is the CloudEvents type, and Class the class of the last error; empty without one.
	Type, Class string
	// Events is how many there are. Rows of a kind are read up to a limit, [MaxCounted] if nothing else is said. If a
	// read has met it, More is set: there may be more. Events is less than the limit if the rows differ in type or
	// status.
	Events int
	// More is described at Events.
	More bool
	// Oldest is when the first of them failed. For deliveries it is when the first row was made.
	// For events that wait for too long it is when the first was recorded. For missed events it is since when they are.
	Oldest time.Time
}
