package record

import (
	"cmp"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/jsonb"
)

// JSONType is the content type whose payloads are stored as jsonb.
const JSONType = "application/json"

// Rows are the rows of events, column by column, in the order of sqlInsert.
type Rows struct {
	maxPayload    int  // bytes
	canCopy       bool // COPY has no bound
	size          int  // bytes of all values
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
	expiresAt     []pgtype.Timestamptz
	dueAt         []pgtype.Timestamptz
	delayed       int // how many have a due time
}

// NewRows returns rows with room for n events of a source. A payload may have maxPayload bytes. canCopy says that
// the rows are for [Store.Insert], which has no bound in bytes unless an event is delayed.
func NewRows(source string, n, maxPayload int, canCopy bool) *Rows {
	return &Rows{
		maxPayload:    maxPayload,
		canCopy:       canCopy,
		source:        source,
		eventID:       make([]pgtype.UUID, 0, n),
		eventType:     make([]string, 0, n),
		aggregateType: make([]string, 0, n),
		aggregateID:   make([]string, 0, n),
		payload:       make([]pgtype.Text, 0, n),
		payloadBytes:  make([][]byte, 0, n),
		contentType:   make([]string, 0, n),
		topic:         make([]pgtype.Text, 0, n),
		partitionKey:  make([]pgtype.Text, 0, n),
		headers:       make([]pgtype.Text, 0, n),
		occurredAt:    make([]time.Time, 0, n),
		expiresAt:     make([]pgtype.Timestamptz, 0, n),
		dueAt:         make([]pgtype.Timestamptz, 0, n),
	}
}

// Len returns the number of rows.
func (r *Rows) Len() int { return len(r.eventID) }

// Type has the properties that all events of a type share.
type Type struct {
	Name, AggregateType string
	ContentType         string // empty: the event is a tombstone, and not encoded
	Topic               string // empty: derived from Name
}

// Event is an event of the host. The methods call functions of the host, each at most once.
type Event interface {
	// Topic is the topic of this event if it differs from the topic of its type. Otherwise it is empty.
	Topic() string
	AggregateID() string
	// Key is the partition key. If has is false, the key is the aggregate id.
	Key() (key string, has bool)
	OccurredAt() time.Time
	// NotBefore is the time at which the event is due. It is zero for an event without delay.
	NotBefore() time.Time
	// Expires is the time from which on the event is worth nothing. It is zero for an event that does not expire.
	Expires() time.Time
	Encode() ([]byte, error)
	// DataSchema is the address of the schema of what Encode has returned. It is empty for none, and for a tombstone.
	DataSchema() string
	NewID() (uuid.UUID, error)
}

// Add adds one event. Its error names the field that cannot be stored, or has the index -1 if all events together are
// too large; after an error, the rows must not be used. Add calls Encode once the other fields except the headers are
// valid, then DataSchema, and NewID last.
func (r *Rows) Add(t Type, x *Extras, e Event) *envelope.FieldError {
	aggregateID := e.AggregateID()
	if err := check.Attribute(aggregateID, envelope.MaxAggregateID); err != nil {
		return &envelope.FieldError{Field: "aggregate_id", Err: err}
	}
	own := e.Topic()
	if own != "" {
		if err := check.Topic(own); err != nil {
			return &envelope.FieldError{Field: "topic", Err: err}
		}
	}
	var partitionKey pgtype.Text
	if key, has := e.Key(); has {
		if err := check.Text(key, envelope.MaxPartitionKey); err != nil {
			return &envelope.FieldError{Field: "partition_key", Err: err}
		}
		partitionKey = pgtype.Text{String: key, Valid: true}
	}
	at, rejected := timesOf(e)
	if rejected != nil {
		return rejected
	}
	payload, err := r.encode(t, e)
	if err != nil {
		return &envelope.FieldError{Field: "payload", Err: err}
	}
	headers, rejected := x.encode(e.DataSchema())
	if rejected != nil {
		return rejected
	}
	id, err := e.NewID()
	if err != nil {
		return &envelope.FieldError{Field: "event_id", Err: err}
	}
	topic := cmp.Or(own, t.Topic)
	const others = 100 // values of a fixed size, and what pgx sends beside each value
	r.size += others + len(t.Name) + len(t.AggregateType) + len(aggregateID) + len(payload) + len(t.ContentType) +
		len(topic) + len(partitionKey.String) + len(headers)
	if at.due.Valid {
		r.delayed++
	}
	if r.size > maxStatement && r.Len() > 0 && (!r.canCopy || r.delayed > 0) {
		return tooLarge()
	}
	r.addPayload(t.ContentType, payload)
	r.eventID = append(r.eventID, pgtype.UUID{Bytes: id, Valid: true})
	r.eventType = append(r.eventType, t.Name)
	r.aggregateType = append(r.aggregateType, t.AggregateType)
	r.aggregateID = append(r.aggregateID, aggregateID)
	r.contentType = append(r.contentType, t.ContentType)
	r.topic = append(r.topic, pgtype.Text{String: topic, Valid: topic != ""})
	r.partitionKey = append(r.partitionKey, partitionKey)
	r.headers = append(r.headers, pgtype.Text{String: string(headers), Valid: headers != nil})
	r.occurredAt = append(r.occurredAt, at.occurred)
	r.expiresAt = append(r.expiresAt, at.expires)
	r.dueAt = append(r.dueAt, at.due)
	return nil
}

// addPayload adds an encoded event to the column of its content type.
func (r *Rows) addPayload(contentType string, payload []byte) {
	switch contentType {
	case "":
		r.payload, r.payloadBytes = append(r.payload, pgtype.Text{}), append(r.payloadBytes, nil)
	case JSONType:
		r.payload, r.payloadBytes = append(r.payload, pgtype.Text{String: string(payload), Valid: true}), append(r.payloadBytes, nil)
	default: // a copy, because the codec may reuse its buffer; an empty one is not NULL
		r.payload, r.payloadBytes = append(r.payload, pgtype.Text{}), append(r.payloadBytes, append([]byte{}, payload...))
	}
}

// tooLarge is the error of events that do not fit one statement.
func tooLarge() *envelope.FieldError {
	return &envelope.FieldError{Index: -1, Field: "events", Err: fmt.Errorf("%w: more than %d bytes for one statement", ErrTooLarge, maxStatement)}
}

// times are those of an event, for their columns. Due and expires are NULL if they are zero.
type times struct {
	occurred     time.Time
	due, expires pgtype.Timestamptz
}

// timesOf returns the times of an event, or which of them cannot be stored. The columns have microseconds: an event is
// not early, and does not expire late.
func timesOf(e Event) (t times, rejected *envelope.FieldError) {
	t.occurred = e.OccurredAt()
	if err := check.Time(t.occurred); err != nil {
		return t, &envelope.FieldError{Field: "occurred_at", Err: err}
	}
	if at := e.NotBefore(); !at.IsZero() {
		t.due = pgtype.Timestamptz{Time: at.Add(time.Microsecond - 1).Truncate(time.Microsecond), Valid: true}
		if err := check.Time(t.due.Time); err != nil {
			return t, &envelope.FieldError{Field: "not_before", Err: err}
		}
	}
	if at := e.Expires(); !at.IsZero() {
		t.expires = pgtype.Timestamptz{Time: at.Truncate(time.Microsecond), Valid: true}
		err := check.Time(t.expires.Time)
		if err == nil && t.due.Valid && !t.expires.Time.After(t.due.Time) {
			err = fmt.Errorf("%w: not after NotBefore, so that it would never be sent", check.ErrTime)
		}
		if err != nil {
			return t, &envelope.FieldError{Field: "expires", Err: err}
		}
	}
	return t, nil
}

// encode returns the payload of an event, checked for its column.
func (r *Rows) encode(t Type, e Event) (payload []byte, err error) {
	if t.ContentType == "" {
		return nil, nil
	}
	payload, err = e.Encode()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrEncode, err)
	}
	printed := len(payload)
	if t.ContentType == JSONType {
		if printed, err = jsonb.Check(payload); err != nil {
			return nil, err
		}
	}
	if printed > r.maxPayload {
		return nil, fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, printed, r.maxPayload)
	}
	return payload, nil
}

// args returns the arguments of sqlInsert.
func (r *Rows) args() []any {
	return []any{
		r.source, r.eventID, r.eventType, r.aggregateType, r.aggregateID, r.payload, r.payloadBytes,
		r.contentType, r.topic, r.partitionKey, r.headers, r.occurredAt, r.expiresAt,
	}
}

// delayedArgs returns the arguments of sqlInsertDelayed.
func (r *Rows) delayedArgs() []any { return append(r.args(), r.dueAt) }

// row returns an event in the order of rowColumns. Its error is always nil, but [pgx.CopyFromSlice]
// requires this signature.
func (r *Rows) row(i int) ([]any, error) {
	return []any{
		r.eventID[i], r.eventType[i], r.source, r.aggregateType[i], r.aggregateID[i],
		jsonText(r.payload[i]), r.payloadBytes[i], r.contentType[i], r.topic[i], r.partitionKey[i], jsonText(r.headers[i]), r.occurredAt[i],
		r.expiresAt[i],
	}, nil
}

// jsonText returns an argument for a jsonb column: a string. pgx sends a string unchanged, but would encode
// any other value as JSON first.
func jsonText(t pgtype.Text) any {
	if !t.Valid {
		return nil
	}
	return t.String
}

// Envelope returns an event as a relay reads it, with one difference: its JSON has the form that the codec
// wrote, not the form that jsonb prints.
func (r *Rows) Envelope(i int) *envelope.Event {
	e := &envelope.Event{
		EventID:       []byte(r.eventID[i].String()),
		EventType:     []byte(r.eventType[i]),
		Source:        []byte(r.source),
		AggregateType: []byte(r.aggregateType[i]),
		AggregateID:   []byte(r.aggregateID[i]),
		Payload:       r.payloadBytes[i],
		IsJSON:        r.payload[i].Valid,
		ContentType:   []byte(r.contentType[i]),
		Topic:         textBytes(r.topic[i]),
		PartitionKey:  textBytes(r.partitionKey[i]),
		Headers:       textBytes(r.headers[i]),
		OccurredAt:    envelope.AppendTime(nil, r.occurredAt[i]),
	}
	if at := r.expiresAt[i]; at.Valid {
		e.Expiry = &envelope.Expiry{At: at.Time}
	}
	if e.IsJSON {
		e.Payload = textBytes(r.payload[i])
	}
	return e
}

// textBytes returns the bytes of a text, nil for NULL.
func textBytes(t pgtype.Text) []byte {
	if !t.Valid {
		return nil
	}
	return []byte(t.String)
}
