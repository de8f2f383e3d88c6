package outbox

// Values of outbox_failed.status.
const (
	StatusWaiting  = "waiting"  // for Kafka, its topic or its partition; tries are not counted
	StatusFailed   = "failed"   // rejected, and tried again
	StatusParked   = "parked"   // behind another event of its key
	StatusDead     = "dead"     // given up
	StatusResolved = "resolved" // by an operator, or sent and kept
)

// unresolved are the statuses that somebody or something has yet to deal with.
var unresolved = []string{StatusWaiting, StatusFailed, StatusParked, StatusDead}
