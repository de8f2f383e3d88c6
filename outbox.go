// Package outbox publishes domain events to Kafka from the PostgreSQL
// transaction that changes the data, so that neither happens without the other.
//
// [Recorder.Record] stores events in your transaction. A [Relay], running as a
// goroutine of any process, hands committed events to Kafka in batches and
// remembers in PostgreSQL how far it has come.
//
// What it promises:
//
//   - Atomic. An event exists if and only if the transaction that recorded it
//     committed.
//   - Nothing skipped. Every committed event is handed to Kafka, whatever the
//     order in which transactions commit, however long they run, at every
//     isolation level, through crashes of the service, PostgreSQL and Kafka.
//   - Ordered per key. Events of one partition key first arrive in the order in
//     which they were recorded; so far, an event that the broker refuses is
//     overtaken, and so may be those that shared its request.
//   - At least once. A crash may repeat the batch in flight and never loses it.
//   - No stall. No open transaction, in any database of the cluster, delays the
//     events of another one.
//   - An outage is not a failure. While Kafka is away, events wait.
package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// RecorderConfig tunes a [Recorder]. The zero value is ready for production.
type RecorderConfig struct {
	// Schema holds the tables of outbox. Empty means public.
	Schema string

	// NewID makes the ids of events. They must be unique. Nil means UUIDv7,
	// whose order is about that of time.
	NewID func() (uuid.UUID, error)

	// MaxPayload bounds an encoded payload, in bytes; a JSON payload counts as
	// jsonb prints it, with numbers in full. At most 104,857,600 (100 MiB, what
	// Kafka takes in one request). Zero means 983,040 (960 KiB), which fits with
	// its headers into the record that Kafka takes by default.
	MaxPayload int

	// TraceParent reads the W3C traceparent of the caller's span from the
	// context. Nil means the one that [WithTraceParent] put there.
	TraceParent func(ctx context.Context) string

	// Headers returns further Kafka headers for an event, at most 8 KiB as JSON.
	// Names that begin with ce_, and content-type, correlationid and traceparent,
	// are taken. Nil means none.
	Headers func(ctx context.Context, event DomainEvent) map[string]string
}

func (c RecorderConfig) withDefaults() RecorderConfig {
	c.Schema = cmp.Or(c.Schema, defaultSchema)
	c.MaxPayload = cmp.Or(c.MaxPayload, defaultMaxPayload)
	if c.NewID == nil {
		c.NewID = uuid.NewV7
	}
	if c.TraceParent == nil {
		c.TraceParent = TraceParent
	}
	if c.Headers == nil {
		c.Headers = func(context.Context, DomainEvent) map[string]string { return nil }
	}
	return c
}

func (c RecorderConfig) validate() error {
	return errors.Join(
		checkSchema(c.Schema),
		notNegative("MaxPayload", c.MaxPayload),
		notAbove("MaxPayload", c.MaxPayload, maxMaxPayload),
	)
}

// Recorder stores events in transactions of its callers. It is safe for
// concurrent use and holds nothing that must be closed.
type Recorder struct {
	events *Registry
	cfg    RecorderConfig
	insert string
}

// NewRecorder returns a recorder for the events of a registry. Its error names
// every bad field of cfg.
func NewRecorder(events *Registry, cfg RecorderConfig) (*Recorder, error) {
	cfg = cfg.withDefaults()
	err := cfg.validate()
	if events == nil {
		err = errors.Join(fmt.Errorf("registry %w", ErrNil), err)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: recorder config: %w", err)
	}
	return &Recorder{events: events, cfg: cfg, insert: inSchema(sqlInsert, cfg.Schema)}, nil
}

// Record stores events in tx, in their order, with one INSERT and one round
// trip however many they are; with no events it does nothing. The relay sees
// them once tx has committed, and nobody does if it rolls back.
//
// An event that cannot be stored is refused before anything is sent to
// PostgreSQL: the error is a [*FieldError], none of the events is stored, and tx
// remains usable. Any other error is PostgreSQL's and means that tx is aborted:
// roll it back.
func (r *Recorder) Record(ctx context.Context, tx pgx.Tx, events ...DomainEvent) error {
	if isNil(tx) {
		return &FieldError{Index: -1, Field: "tx", Err: ErrNil}
	}
	rows, err := r.rows(ctx, events)
	if err != nil || len(events) == 0 {
		return err
	}
	if _, err := tx.Exec(ctx, r.insert, rows.args()...); err != nil {
		return fmt.Errorf("outbox: record %d events: %w", len(events), err)
	}
	return nil
}

// Queue is [Recorder.Record] on a batch that the caller sends in a transaction
// of its own: no round trip is added. A call adds one statement, hence one
// result to [pgx.BatchResults], however many events it has; a call without
// events adds none. Refused events leave the batch as it was.
func (r *Recorder) Queue(ctx context.Context, batch *pgx.Batch, events ...DomainEvent) error {
	if batch == nil {
		return &FieldError{Index: -1, Field: "batch", Err: ErrNil}
	}
	rows, err := r.rows(ctx, events)
	if err != nil || len(events) == 0 {
		return err
	}
	batch.Queue(r.insert, rows.args()...)
	return nil
}

// sqlInsert stores any number of events. unnest keeps the order of its arrays
// and the sequence is asked row by row, so ids follow the order of the events.
const sqlInsert = `
INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id,
       payload, payload_bytes, content_type, topic, partition_key, headers, occurred_at)
SELECT e.event_id, e.event_type, $1::text, e.aggregate_type, e.aggregate_id,
       e.payload::jsonb, e.payload_bytes, e.content_type, e.topic, e.partition_key, e.headers::jsonb, e.occurred_at
  FROM unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bytea[],
              $8::text[], $9::text[], $10::text[], $11::text[], $12::timestamptz[])
       AS e (event_id, event_type, aggregate_type, aggregate_id, payload, payload_bytes,
             content_type, topic, partition_key, headers, occurred_at)`

// columns are events turned on their side, in the order of sqlInsert.
type columns struct {
	source        string
	eventID       []pgtype.UUID
	eventType     []string
	aggregateType []string
	aggregateID   []string
	payload       []pgtype.Text
	payloadBytes  [][]byte
	contentType   []string
	topic         []pgtype.Text
	partitionKey  []pgtype.Text
	headers       []pgtype.Text
	occurredAt    []time.Time
}

func (c *columns) args() []any {
	return []any{
		c.source, c.eventID, c.eventType, c.aggregateType, c.aggregateID, c.payload, c.payloadBytes,
		c.contentType, c.topic, c.partitionKey, c.headers, c.occurredAt,
	}
}

// rows encodes events, or says which field of which one cannot be stored.
func (r *Recorder) rows(ctx context.Context, events []DomainEvent) (*columns, error) {
	n := len(events)
	c := &columns{
		source:        r.events.source,
		eventID:       make([]pgtype.UUID, 0, n),
		eventType:     make([]string, 0, n),
		aggregateType: make([]string, 0, n),
		aggregateID:   make([]string, 0, n),
		payload:       make([]pgtype.Text, n),
		payloadBytes:  make([][]byte, n),
		contentType:   make([]string, 0, n),
		topic:         make([]pgtype.Text, 0, n),
		partitionKey:  make([]pgtype.Text, n),
		headers:       make([]pgtype.Text, n),
		occurredAt:    make([]time.Time, 0, n),
	}
	correlation, trace := CorrelationID(ctx), r.cfg.TraceParent(ctx)
	for i, e := range events {
		def, e, err := r.events.lookup(e)
		if err != nil {
			return nil, atIndex(i, "", err)
		}
		headers, refused := encodeHeaders(r.cfg.Headers(ctx, e), correlation, trace)
		if refused != nil {
			return nil, atIndex(i, def.eventType, refused)
		}
		if headers != nil {
			c.headers[i] = pgtype.Text{String: string(headers), Valid: true}
		}
		if err := r.add(c, i, def, e); err != nil {
			return nil, atIndex(i, def.eventType, err)
		}
	}
	return c, nil
}

// add encodes one event into row i.
func (r *Recorder) add(c *columns, i int, def *definition, e DomainEvent) error {
	aggregateID := def.aggregateID(e)
	if err := checkAttribute(aggregateID, maxAggregateID); err != nil {
		return &FieldError{Field: "aggregate_id", Err: err}
	}
	if def.key != nil {
		key := def.key(e)
		if err := checkText(key, maxPartitionKey); err != nil {
			return &FieldError{Field: "partition_key", Err: err}
		}
		c.partitionKey[i] = pgtype.Text{String: key, Valid: true}
	}
	occurredAt := e.OccurredAt()
	if err := checkTime(occurredAt); err != nil {
		return &FieldError{Field: "occurred_at", Err: err}
	}
	payload, err := r.encode(def, e)
	if err != nil {
		return &FieldError{Field: "payload", Err: err}
	}
	if def.codec.ContentType == jsonType {
		c.payload[i] = pgtype.Text{String: string(payload), Valid: true}
	} else {
		c.payloadBytes[i] = append([]byte{}, payload...) // the codec may use its buffer again; empty is not NULL
	}
	id, err := r.cfg.NewID()
	if err != nil {
		return &FieldError{Field: "event_id", Err: err}
	}
	c.eventID = append(c.eventID, pgtype.UUID{Bytes: id, Valid: true})
	c.eventType = append(c.eventType, def.eventType)
	c.aggregateType = append(c.aggregateType, def.aggregateType)
	c.aggregateID = append(c.aggregateID, aggregateID)
	c.contentType = append(c.contentType, def.codec.ContentType)
	c.topic = append(c.topic, pgtype.Text{String: def.topic, Valid: def.topic != ""})
	c.occurredAt = append(c.occurredAt, occurredAt)
	return nil
}

// encode returns a payload that its column takes.
func (r *Recorder) encode(def *definition, e DomainEvent) ([]byte, error) {
	payload, err := def.codec.Encode(e)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrEncode, err)
	}
	size := len(payload)
	if def.codec.ContentType == jsonType {
		if size, err = checkJSONB(payload); err != nil {
			return nil, err
		}
	}
	if size > r.cfg.MaxPayload {
		return nil, fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, size, r.cfg.MaxPayload)
	}
	return payload, nil
}

// atIndex completes an error about one event with its place and type.
func atIndex(i int, eventType string, err error) error {
	var refused *FieldError
	if errors.As(err, &refused) {
		refused.Index = i
		refused.EventType = cmp.Or(refused.EventType, eventType)
	}
	return err
}
