package outbox

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/outboxgo/outbox/internal/envelope"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/jsonb"
)

// rowColumns are the columns of outbox that a recorder fills; the others have
// defaults.
var rowColumns = []string{
	"event_id", "event_type", "source", "aggregate_type", "aggregate_id",
	"payload", "payload_bytes", "content_type", "topic", "partition_key", "headers", "occurred_at", "size",
}

// sqlInsertOne stores one event: most transactions record only one.
const sqlInsertOne = `
INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id,
       payload, payload_bytes, content_type, topic, partition_key, headers, occurred_at, size)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)`

// sqlInsert stores any number of events. unnest keeps the order of its arrays, and the
// sequence is called row by row, so ids are in the order of the events.
const sqlInsert = `
INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id,
       payload, payload_bytes, content_type, topic, partition_key, headers, occurred_at, size)
SELECT e.event_id, e.event_type, $1::text, e.aggregate_type, e.aggregate_id,
       e.payload::jsonb, e.payload_bytes, e.content_type, e.topic, e.partition_key, e.headers::jsonb, e.occurred_at, e.size
  FROM unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bytea[],
              $8::text[], $9::text[], $10::text[], $11::text[], $12::timestamptz[], $13::int[])
       AS e (event_id, event_type, aggregate_type, aggregate_id, payload, payload_bytes,
             content_type, topic, partition_key, headers, occurred_at, size)`

// sqlInsertDocument stores the events of a JSON document, see [columns.document]. A text is an
// argument that every driver takes, in every mode; arrays are pgx's. JSON is a text in the
// document, because its null would become NULL otherwise. json_to_recordset keeps the order
// of the document, as unnest does.
const sqlInsertDocument = `
INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id,
       payload, payload_bytes, content_type, topic, partition_key, headers, occurred_at, size)
SELECT e.event_id, e.event_type, e.source, e.aggregate_type, e.aggregate_id,
       e.payload::jsonb, decode(e.payload_bytes, 'base64'), e.content_type, e.topic, e.partition_key, e.headers::jsonb, e.occurred_at, e.size
  FROM json_to_recordset($1::text::json)
       AS e (event_id uuid, event_type text, source text, aggregate_type text, aggregate_id text, payload text, payload_bytes text,
             content_type text, topic text, partition_key text, headers text, occurred_at timestamptz, size int)`

// columns holds the rows of events column by column, in the order of sqlInsert.
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
	size          []int32 // bytes of payload and headers as PostgreSQL prints them, or a few more
}

func (c *columns) len() int { return len(c.eventID) }

// args returns the arguments of sqlInsert.
func (c *columns) args() []any {
	return []any{
		c.source, c.eventID, c.eventType, c.aggregateType, c.aggregateID, c.payload, c.payloadBytes,
		c.contentType, c.topic, c.partitionKey, c.headers, c.occurredAt, c.size,
	}
}

// row returns an event in the order of rowColumns. Its error is always nil; the
// signature is the one that [pgx.CopyFromSlice] takes.
func (c *columns) row(i int) ([]any, error) {
	return []any{
		c.eventID[i], c.eventType[i], c.source, c.aggregateType[i], c.aggregateID[i],
		jsonText(c.payload[i]), c.payloadBytes[i], c.contentType[i], c.topic[i], c.partitionKey[i], jsonText(c.headers[i]), c.occurredAt[i], c.size[i],
	}, nil
}

// jsonText returns an argument for a jsonb column: pgx sends a string as it is, and
// would encode any other value as JSON first.
func jsonText(t pgtype.Text) any {
	if !t.Valid {
		return nil
	}
	return t.String
}

// maxDocument bounds the document of a statement, in bytes. PostgreSQL takes 1 GiB, but keeps
// several copies of it; a single event of the largest payload always fits.
const maxDocument = 256 << 20

// document returns all rows as a JSON array of objects, whose members are rowColumns.
func (c *columns) document() (string, error) {
	b := append(make([]byte, 0, min(c.documentSize(), maxDocument)), '[')
	for i := range c.len() {
		if i > 0 {
			b = append(b, ',')
		}
		b = c.appendObject(b, i)
		if len(b) > maxDocument {
			return "", &FieldError{Index: -1, Field: "events", Err: fmt.Errorf("%w: more than %d bytes for one statement", ErrTooLarge, maxDocument)}
		}
	}
	return string(append(b, ']')), nil
}

// documentSize guesses how long the document becomes.
func (c *columns) documentSize() (n int) {
	const others = 500 // names of members, and short values
	for i := range c.len() {
		n += others + len(c.payload[i].String)*9/8 + len(c.headers[i].String)*9/8 + base64.StdEncoding.EncodedLen(len(c.payloadBytes[i]))
	}
	return n
}

// appendObject appends a row.
func (c *columns) appendObject(b []byte, i int) []byte {
	values, _ := c.row(i) // its error is always nil
	for k, value := range values {
		separator := byte(',')
		if k == 0 {
			separator = '{'
		}
		b = append(append(append(b, separator, '"'), rowColumns[k]...), '"', ':')
		b = appendValue(b, value)
	}
	return append(b, '}')
}

// appendValue appends a value of a row as the input function of its column reads it.
func appendValue(b []byte, value any) []byte {
	switch v := value.(type) {
	case string:
		return jsonb.AppendString(b, v)
	case pgtype.Text:
		if v.Valid {
			return jsonb.AppendString(b, v.String)
		}
	case pgtype.UUID:
		return append(append(append(b, '"'), uuid.UUID(v.Bytes).String()...), '"')
	case time.Time:
		return append(envelope.AppendTime(append(b, '"'), v), '"')
	case int32:
		return strconv.AppendInt(b, int64(v), 10)
	case []byte:
		if v != nil {
			return append(base64.StdEncoding.AppendEncode(append(b, '"'), v), '"')
		}
	}
	return append(b, "null"...)
}

// rows encodes events. Its error says which field of which event cannot be stored.
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
		size:          make([]int32, n),
	}
	carried := extras{correlationID: CorrelationID(ctx), traceID: TraceID(ctx), traceParent: r.cfg.TraceParent(ctx)}
	for i, e := range events {
		e, own := unwrap(e)
		def, e, err := r.events.lookup(e)
		if err != nil {
			return nil, atIndex(i, "", err)
		}
		carried.headers, carried.attributes, carried.own = r.cfg.Headers(ctx, e), def.attributesOf(e), own
		headers, printed, rejected := carried.encode()
		if rejected != nil {
			return nil, atIndex(i, def.eventType, rejected)
		}
		if headers != nil {
			c.headers[i] = pgtype.Text{String: string(headers), Valid: true}
			c.size[i] = int32(printed)
		}
		if err := r.add(ctx, c, i, def, e, own); err != nil {
			return nil, atIndex(i, def.eventType, err)
		}
	}
	return c, nil
}

// add encodes one event into row i.
func (r *Recorder) add(ctx context.Context, c *columns, i int, def *definition, e DomainEvent, own *EventOptions) error {
	aggregateID := def.aggregateID(e)
	if err := check.Attribute(aggregateID, maxAggregateID); err != nil {
		return &FieldError{Field: "aggregate_id", Err: err}
	}
	topic := cmp.Or(own.Topic, def.topic)
	if own.Topic != "" {
		if err := check.Topic(topic); err != nil {
			return &FieldError{Field: "topic", Err: err}
		}
	}
	if key, has := def.keyOf(e, own); has {
		if err := check.Text(key, maxPartitionKey); err != nil {
			return &FieldError{Field: "partition_key", Err: err}
		}
		c.partitionKey[i] = pgtype.Text{String: key, Valid: true}
	}
	occurredAt := e.OccurredAt()
	if err := check.Time(occurredAt); err != nil {
		return &FieldError{Field: "occurred_at", Err: err}
	}
	payload, printed, err := r.encode(ctx, def, e)
	if err != nil {
		return &FieldError{Field: "payload", Err: err}
	}
	c.size[i] += int32(printed) // at most MaxPayload, which is at most 100 MiB
	if def.codec.ContentType == jsonType {
		c.payload[i] = pgtype.Text{String: string(payload), Valid: true}
	} else {
		c.payloadBytes[i] = append([]byte{}, payload...) // a copy, because the codec may reuse its buffer; empty is not NULL
	}
	id := own.ID
	if id == (uuid.UUID{}) {
		if id, err = r.cfg.NewID(); err != nil {
			return &FieldError{Field: "event_id", Err: err}
		}
	}
	c.eventID = append(c.eventID, pgtype.UUID{Bytes: id, Valid: true})
	c.eventType = append(c.eventType, def.eventType)
	c.aggregateType = append(c.aggregateType, def.aggregateType)
	c.aggregateID = append(c.aggregateID, aggregateID)
	c.contentType = append(c.contentType, def.codec.ContentType)
	c.topic = append(c.topic, pgtype.Text{String: topic, Valid: topic != ""})
	c.occurredAt = append(c.occurredAt, occurredAt)
	return nil
}

// encode returns the payload of an event, checked for its column, and its size as
// PostgreSQL prints it.
func (r *Recorder) encode(ctx context.Context, def *definition, e DomainEvent) (payload []byte, printed int, err error) {
	payload, err = def.codec.Encode(ctx, e)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %w", ErrEncode, err)
	}
	printed = len(payload)
	if def.codec.ContentType == jsonType {
		if printed, err = jsonb.Check(payload); err != nil {
			return nil, 0, err
		}
	}
	if printed > r.cfg.MaxPayload {
		return nil, 0, fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, printed, r.cfg.MaxPayload)
	}
	return payload, printed, nil
}

// atIndex adds to an error about one event its index in the call and its type.
func atIndex(i int, eventType string, err error) error {
	var rejected *FieldError
	if errors.As(err, &rejected) {
		rejected.Index = i
		rejected.EventType = cmp.Or(rejected.EventType, eventType)
	}
	return err
}
