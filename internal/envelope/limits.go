package envelope

// Limits of the columns of outbox, in characters.
const (
	MaxSource        = 100
	MaxEventType     = 100
	MaxAggregateType = 100
	MaxAggregateID   = 255
	MaxPartitionKey  = 255
	MaxContentType   = 100
	MaxCorrelationID = 255
	MaxTraceID       = 255
)
