package outbox

import (
	"cmp"
	"context"
	"errors"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/retention"
)

// Forever as a duration of [RetentionConfig] keeps the rows.
const Forever time.Duration = math.MaxInt64

// RetentionConfig says how long rows are kept. The leading relay, or a worker if no relay has a position, removes them
// every 10 minutes, or more often if the shortest duration is below 100 minutes: every tenth of it. Removal pauses
// during a backlog. [Forever] keeps rows.
type RetentionConfig struct {
	// PublishedFor is how long rows stay in outbox after their transaction began. Rows that a relay with a cursor has
	// not published, or the workers of a group have not taken, stay longer. Danger: a relay or a group that no longer
	// runs keeps all rows; the log names it. Zero means 7 days.
	PublishedFor time.Duration
	// CursorsFor is how long old positions stay in outbox_cursor. Of those older than an hour, one per relay and minute
	// stays. Zero means 7 days.
	CursorsFor time.Duration
	// ResolvedFor is how long resolved rows stay in outbox_failed. Zero means 30 days.
	ResolvedFor time.Duration
	// HandledFor is how long rows stay in event_handled. Danger: a record that is read again later is handled again.
	// HandledFor must not be shorter than the retention of any consumed topic or dead-letter topic (commonly 30 days).
	// Zero means 31 days.
	HandledFor time.Duration
	// AuditedFor is how long actions of operators stay in outbox_audit. Zero means 365 days.
	AuditedFor time.Duration
	// DeliveredFor is how long handled and resolved rows stay in event_delivery. Zero means 7 days.
	DeliveredFor time.Duration

	// Archive gets at most 1,000 rows of outbox in the transaction that removes them. What it writes with tx commits
	// with the removal. If it writes elsewhere, or outbox is partitioned, it may get rows again. After an error or
	// panic, the rows stay until the next run. A partition's rows come in several transactions before it is dropped.
	// Its ctx ends after RelayConfig.Lease, or a second after the relay is told to stop. Once a process with an Archive
	// has led, others remove no event. Nil archives nothing.
	Archive func(ctx context.Context, tx pgx.Tx, rows []ArchivedEvent) error
}

// ArchivedEvent is a row of outbox.
type ArchivedEvent struct {
	// OutboxID is outbox.id.
	OutboxID int64
	// EventID, Type, Source, AggregateType and AggregateID are the event's.
	EventID, Type, Source, AggregateType, AggregateID string
	// Payload is in the encoding that ContentType names. It is nil for a tombstone.
	Payload []byte
	// ContentType is the media type of Payload. It is empty for a tombstone.
	ContentType string
	// JSON is set if Payload is from the column payload, as jsonb prints it, and not from
	// payload_bytes.
	JSON bool
	// Topic and PartitionKey are empty where they follow from Type and AggregateID.
	Topic, PartitionKey string
	// Headers is a JSON object of strings, or nil.
	Headers []byte
	// OccurredAt is the event's own time, in the years 1 to 9999 whatever the row has, CreatedAt the start of the
	// transaction that recorded it.
	OccurredAt, CreatedAt time.Time
	// Sent is where relays sent it at the first try, as a JSON array of objects with relay, topic, partition, offset
	// (-1 if Kafka has not told it) and at; nil if that is not known. Several of one relay are repeats.
	Sent []byte
}

// KafkaRecord returns the Kafka record that a [Relay] with this mode sent for the event, or would send: the same
// topic, key, value and headers, byte by byte, without partition, offset and timestamp, and without the headers of
// RelayConfig.IDHeader and TraceHeader. Its error is a [*FieldError] that names the column of which no record can be
// made.
func (e ArchivedEvent) KafkaRecord(mode Mode) (*kgo.Record, error) {
	return kafkaRecord(retention.Row(e).Envelope(), mode)
}

// RetentionResult is how many rows a run of retention removed.
type RetentionResult struct {
	// Published rows of outbox, Cursors of outbox_cursor, Resolved of outbox_failed,
	// Handled of event_handled, Audited of outbox_audit, Delivered of event_delivery.
	Published, Cursors, Resolved, Handled, Audited, Delivered int64
}

const (
	day              = 24 * time.Hour
	defaultPublished = 7 * day
	defaultCursors   = 7 * day
	defaultResolved  = 30 * day
	defaultHandled   = 31 * day
	defaultAudited   = 365 * day
	defaultDelivered = 7 * day
)

func (c RetentionConfig) withDefaults() RetentionConfig {
	c.PublishedFor = cmp.Or(c.PublishedFor, defaultPublished)
	c.CursorsFor = cmp.Or(c.CursorsFor, defaultCursors)
	c.ResolvedFor = cmp.Or(c.ResolvedFor, defaultResolved)
	c.HandledFor = cmp.Or(c.HandledFor, defaultHandled)
	c.AuditedFor = cmp.Or(c.AuditedFor, defaultAudited)
	c.DeliveredFor = cmp.Or(c.DeliveredFor, defaultDelivered)
	return c
}

func (c RetentionConfig) validate() error {
	errs := []error{
		check.NotNegative("Retention.PublishedFor", c.PublishedFor),
		check.NotNegative("Retention.CursorsFor", c.CursorsFor),
		check.NotNegative("Retention.ResolvedFor", c.ResolvedFor),
		check.NotNegative("Retention.HandledFor", c.HandledFor),
		check.NotNegative("Retention.AuditedFor", c.AuditedFor),
		check.NotNegative("Retention.DeliveredFor", c.DeliveredFor),
	}
	if c.Archive != nil && c.PublishedFor == Forever {
		errs = append(errs, errors.New("field Retention.Archive is set: nothing is archived while PublishedFor is Forever"))
	}
	return errors.Join(errs...)
}

// Rules returns the configuration as the engine takes it.
func (c RetentionConfig) rules() retention.Rules {
	r := retention.Rules{
		PublishedFor: c.PublishedFor, CursorsFor: c.CursorsFor, ResolvedFor: c.ResolvedFor, HandledFor: c.HandledFor, AuditedFor: c.AuditedFor,
		DeliveredFor: c.DeliveredFor,
	}
	if c.Archive != nil {
		r.Archive = func(ctx context.Context, tx pgx.Tx, rows []retention.Row) error {
			events := make([]ArchivedEvent, len(rows))
			for i, row := range rows {
				events[i] = ArchivedEvent(row)
			}
			return c.Archive(ctx, tx, events)
		}
	}
	return r
}
