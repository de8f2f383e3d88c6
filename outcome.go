package outbox

// outcome is what happened to an event of a batch.
type outcome struct {
	kind  outcomeKind
	class string // of the error, as in outbox_failed.error_class
	err   error
}

type outcomeKind uint8

const (
	outcomePending     outcomeKind = iota // not decided: it will be sent again
	outcomeSent                           // Kafka has acknowledged it
	outcomeRejected                       // Kafka refused it for what it is
	outcomeUnavailable                    // Kafka, its topic or its partition was unavailable
	outcomeBlocked                        // not sent: an earlier event of its key did not get through
	outcomeParked                         // not sent: its key is parked, and the parking has counted it
)
