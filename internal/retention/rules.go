package retention

import (
	"context"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/envelope"
)

// forever keeps rows.
const forever time.Duration = math.MaxInt64

// Rules say how long rows are kept. RetentionConfig of the package outbox describes them.
type Rules struct {
	PublishedFor time.Duration
	CursorsFor   time.Duration
	ResolvedFor  time.Duration
	HandledFor   time.Duration
	AuditedFor   time.Duration
	DeliveredFor time.Duration

	BatchSize int // rows that a transaction reads, 1,000 if zero

	Archive func(ctx context.Context, tx pgx.Tx, rows []Row) error
}

const defaultBatchSize = 1000

// Row is a row of outbox.
type Row struct {
	OutboxID                                          int64
	EventID, Type, Source, AggregateType, AggregateID string
	Payload                                           []byte
	ContentType                                       string
	JSON                                              bool
	Topic, PartitionKey                               string
	Headers                                           []byte
	OccurredAt, CreatedAt                             time.Time
	Sent                                              []byte
}

// Envelope returns the event as a relay reads it.
func (r Row) Envelope() *envelope.Event {
	return &envelope.Event{
		ID:            r.OutboxID,
		EventID:       []byte(r.EventID),
		EventType:     []byte(r.Type),
		Source:        []byte(r.Source),
		AggregateType: []byte(r.AggregateType),
		AggregateID:   []byte(r.AggregateID),
		Payload:       r.Payload,
		IsJSON:        r.JSON,
		ContentType:   []byte(r.ContentType),
		Topic:         bytesOrNil(r.Topic),
		PartitionKey:  bytesOrNil(r.PartitionKey),
		Headers:       r.Headers,
		OccurredAt:    envelope.AppendTime(nil, r.OccurredAt),
	}
}

// bytesOrNil returns the bytes of a text, nil for an empty one.
func bytesOrNil(text string) []byte {
	if text == "" {
		return nil
	}
	return []byte(text)
}

// Result is how many rows a run removed.
type Result struct {
	Published, Cursors, Resolved, Handled, Audited, Delivered int64
}

func (c Result) total() int64 {
	return c.Published + c.Cursors + c.Resolved + c.Handled + c.Audited + c.Delivered
}

const (
	longestInterval  = 10 * time.Minute
	shortestInterval = 5 * time.Millisecond
	shortestPause    = 50 * time.Millisecond
	pauseInBatches   = 4 // how many times as long as a batch the pause after it is
)

// Interval returns the time between two runs, and before the first: a tenth of the shortest duration for which rows
// are kept, at most 10 minutes.
func (r Rules) Interval() time.Duration {
	interval := longestInterval
	for _, keep := range []time.Duration{r.PublishedFor, r.CursorsFor, r.ResolvedFor, r.HandledFor, r.AuditedFor, r.DeliveredFor} {
		if keep > 0 {
			interval = min(interval, keep/10)
		}
	}
	return max(interval, shortestInterval)
}

// PauseAfter returns how long to wait after a batch that took some time.
func (r Rules) PauseAfter(took time.Duration) time.Duration {
	return max(min(shortestPause, r.Interval()), pauseInBatches*took)
}
