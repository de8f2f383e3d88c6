// Package outbox publishes domain events to Kafka from the PostgreSQL
// transaction that changes the data, so that neither happens without the other.
//
// [Recorder.Record] stores events in your transaction. A [Relay], running as a
// goroutine of any process, sends committed events to Kafka in batches and stores its
// position in PostgreSQL. A [Consumer] passes them to handlers and skips those that it
// has handled before.
//
// What it promises:
//
//   - Atomic. An event exists if and only if the transaction that recorded it
//     committed.
//   - Nothing skipped. Every committed event is sent to Kafka, in whatever order
//     transactions commit and however long they run, at every isolation level,
//     through crashes of the service, of PostgreSQL and of Kafka.
//   - Ordered per key. Events of one partition key first arrive in the order in
//     which they were recorded. Two transactions have an order if one began after the
//     other had committed, or if both locked the same row, such as the aggregate's,
//     before they recorded. Otherwise the order is undefined. An event that fails
//     blocks the later events of its key and of no other key. There are two
//     exceptions: events in flight together with one that only the broker can reject,
//     and dead events.
//   - At least once. A crash may repeat the batch in flight and never loses it.
//   - Handled once. The changes of a handler in PostgreSQL and the row that marks the
//     event as handled commit together: see [Handle].
//   - No stall. No open transaction, in any database of the cluster, delays the
//     events of another one.
//   - An outage is not a failure. While Kafka is unavailable, events wait.
package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/record"
)

// RecorderConfig tunes a [Recorder]. The zero value is ready for production.
type RecorderConfig struct {
	// Schema holds the tables of outbox. Empty means public.
	Schema string

	// NewID generates the ids of events, which must be unique. Nil means UUIDv7.
	NewID func() (uuid.UUID, error)

	// MaxPayload is the largest encoded payload, in bytes, at most 104,857,600 (100 MiB). JSON is measured as
	// PostgreSQL's jsonb prints it. Zero means 983,040 (960 KiB), which fits Kafka's default limit of a record.
	MaxPayload int

	// TraceParent reads the W3C traceparent of the caller's span. Nil means the one of [WithTraceParent].
	TraceParent func(ctx context.Context) string

	// Headers returns extra Kafka headers for an event. Together with its extension attributes, they have at most 8 KiB
	// as JSON. Reserved are content-type, correlationid, traceparent, replay_of, replay_group, replay_action,
	// replay_from, and names that begin with ce_ or dlq_. Nil means none.
	Headers func(ctx context.Context, event DomainEvent) map[string]string

	// Hooks are called when events are recorded.
	Hooks RecorderHooks
}

func (c RecorderConfig) withDefaults() RecorderConfig {
	c.Schema = cmp.Or(c.Schema, pg.DefaultSchema)
	c.MaxPayload = cmp.Or(c.MaxPayload, check.DefaultMaxPayload)
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
		check.Schema(c.Schema),
		check.NotNegative("MaxPayload", c.MaxPayload),
		check.NotAbove("MaxPayload", c.MaxPayload, check.MaxMaxPayload),
	)
}

// Recorder stores events in transactions of its callers. It is safe for
// concurrent use and holds nothing that must be closed.
type Recorder struct {
	events *Registry
	cfg    RecorderConfig
	store  *record.Store
}

// NewRecorder returns a recorder for the events of a registry. Its error names
// every bad field of cfg.
func NewRecorder(events *Registry, cfg RecorderConfig) (*Recorder, error) {
	cfg = cfg.withDefaults()
	err := cfg.validate()
	if events == nil {
		err = errors.Join(fmt.Errorf("registry %w", ErrNilArgument), err)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: recorder config: %w", err)
	}
	return &Recorder{events: events, cfg: cfg, store: record.NewStore(cfg.Schema)}, nil
}

// Record stores events in tx, in their order, with one INSERT and one round
// trip, or with COPY if there are 500 or more, or if they take more than 256 MiB
// together; without events it does nothing. The relay sees the events after tx has
// committed. If tx rolls back, they do not exist.
// Events with EventOptions.NotBefore are stored by the same INSERT, and COPY is not used
// then: more than 256 MiB are rejected ([ErrTooLarge]). The relay sees them when they are due.
//
// Record rejects an event that cannot be stored before it sends anything to
// PostgreSQL: the error is a [*FieldError], none of the events is stored, and tx
// remains usable. Any other error is PostgreSQL's and means that tx is aborted:
// roll it back. It is [ErrNotMigrated] too if the tables are not those of this release, and
// [ErrDuplicateEvent] where ids of events are unique and this one's is not.
func (r *Recorder) Record(ctx context.Context, tx pgx.Tx, events ...DomainEvent) error {
	if check.IsNil(tx) {
		return &FieldError{Index: -1, Field: "tx", Err: ErrNilArgument}
	}
	return r.withHooks(ctx, events, func(ctx context.Context) error { return r.record(ctx, tx, events) })
}

// withHooks calls the hooks around record, which records or queues events.
func (r *Recorder) withHooks(ctx context.Context, events []DomainEvent, record func(context.Context) error) error {
	if r.cfg.Hooks.Recording == nil || len(events) == 0 {
		return record(ctx)
	}
	ctx, done := r.cfg.Hooks.Recording(ctx, events)
	err := errNotReturned
	defer func() { done(err) }()
	err = record(ctx)
	return err
}

// errNotReturned is what the hook hears of a recording that panics, or ends its goroutine.
var errNotReturned = errors.New("recording has panicked, or has ended its goroutine")

func (r *Recorder) record(ctx context.Context, tx pgx.Tx, events []DomainEvent) error {
	rows, err := r.rows(ctx, events, true)
	if err != nil || len(events) == 0 {
		return err
	}
	return r.store.Insert(ctx, tx, rows)
}

// Queue is [Recorder.Record] on a batch that the caller sends in a transaction
// of its own: no round trip is added. A call adds one statement, hence one
// result to [pgx.BatchResults], however many events it has; a call without
// events adds none. It also rejects events that take more than 256 MiB together
// ([ErrTooLarge]). If it rejects an event, it does not change the batch. If the
// tables are not those of this release, the batch fails with PostgreSQL's error about the
// table or column that is missing: the caller sends it, so nothing adds [ErrNotMigrated], nor
// [ErrDuplicateEvent] to the error 23505 of the index outbox_event_id_key.
func (r *Recorder) Queue(ctx context.Context, batch *pgx.Batch, events ...DomainEvent) error {
	if batch == nil {
		return &FieldError{Index: -1, Field: "batch", Err: ErrNilArgument}
	}
	return r.withHooks(ctx, events, func(ctx context.Context) error {
		rows, err := r.rows(ctx, events, false)
		if err != nil || len(events) == 0 {
			return err
		}
		sql, args := r.store.Statement(rows)
		batch.Queue(sql, args...)
		return nil
	})
}

// Statement is [Recorder.Record] for transactions that are not pgx's: it returns the one
// statement that stores the events, in their order, with its arguments, and sends nothing. The
// caller runs it in his transaction, once. An argument is a text, which every driver for PostgreSQL takes, in every
// mode; placeholders are PostgreSQL's, as $1. Package outboxsql does all that for a [database/sql.Tx].
//
// Statement rejects what Record rejects, with the same [*FieldError]. It also rejects a call without events, which
// has no statement ([ErrEmpty]), and events that take more than 256 MiB together ([ErrTooLarge]). If the tables are
// not those of this release, the statement fails with PostgreSQL's error about the table or column that is missing.
func (r *Recorder) Statement(ctx context.Context, events ...DomainEvent) (sql string, args []any, err error) {
	if len(events) == 0 {
		return "", nil, &FieldError{Index: -1, Field: "events", Err: ErrEmpty}
	}
	err = r.withHooks(ctx, events, func(ctx context.Context) error {
		rows, err := r.rows(ctx, events, false)
		if err != nil {
			return err
		}
		sql, args, err = r.store.DocumentStatement(rows)
		return public(err)
	})
	if err != nil {
		return "", nil, err
	}
	return sql, args, nil
}

// Cancel deletes an event with EventOptions.NotBefore in tx, and reports whether it was in time: if tx commits, the
// event is not sent. It returns false if the event was moved to the table outbox already, which happens when it is
// due, and also if no event of this id was recorded with NotBefore.
//
// While tx is open, the later delayed events of the same key wait for it, and those of other keys do not. An error is
// PostgreSQL's, and means that tx is aborted. It is 40001 (serialization_failure) if the event was moved since the
// snapshot of tx, under REPEATABLE READ or SERIALIZABLE.
func (r *Recorder) Cancel(ctx context.Context, tx pgx.Tx, eventID uuid.UUID) (bool, error) {
	if check.IsNil(tx) {
		return false, &FieldError{Index: -1, Field: "tx", Err: ErrNilArgument}
	}
	return r.store.Cancel(ctx, tx, eventID)
}

// CancelStatement is [Recorder.Cancel] for transactions that are not pgx's: it returns the statement, and sends
// nothing. The statement affects one row if it was in time, and none otherwise. Package outboxsql runs it in a
// [database/sql.Tx].
func (r *Recorder) CancelStatement(eventID uuid.UUID) (sql string, args []any) {
	return r.store.CancelStatement(eventID)
}

// rows encodes events, for COPY if that is possible. Its error says which field of which event cannot be stored.
func (r *Recorder) rows(ctx context.Context, events []DomainEvent, canCopy bool) (*record.Rows, error) {
	rows := record.NewRows(r.events.source, len(events), r.cfg.MaxPayload, canCopy)
	carried := record.Extras{CorrelationID: CorrelationID(ctx), TraceID: TraceID(ctx), TraceParent: r.cfg.TraceParent(ctx)}
	one := recording{ctx: ctx, recorder: r}
	for i, e := range events {
		e, own := unwrap(e)
		def, e, err := r.events.lookup(e, own)
		if err != nil {
			return nil, atIndex(i, "", err)
		}
		carried.Headers, carried.Attributes = r.cfg.Headers(ctx, e), def.attributesOf(e)
		carried.OwnHeaders, carried.OwnAttributes = own.Headers, own.Attributes
		t := record.Type{Name: def.eventType, AggregateType: def.aggregateType, Topic: def.topic}
		if !own.Tombstone {
			t.ContentType = def.codec.ContentType
		}
		one.event, one.def, one.own = e, def, own
		if rejected := rows.Add(t, &carried, &one); rejected != nil {
			return nil, atIndex(i, def.eventType, (*FieldError)(rejected))
		}
	}
	return rows, nil
}

// atIndex adds to an error about one event its index in the call and its type. One about all events has the index -1.
func atIndex(i int, eventType string, err error) error {
	var rejected *FieldError
	if errors.As(err, &rejected) && rejected.Index >= 0 {
		rejected.Index = i
		rejected.EventType = cmp.Or(rejected.EventType, eventType)
	}
	return err
}

// recording is the event that is being recorded, as [record.Event].
type recording struct {
	ctx      context.Context
	recorder *Recorder
	event    DomainEvent
	def      *definition
	own      *EventOptions
}

func (e *recording) Topic() string           { return e.own.Topic }
func (e *recording) AggregateID() string     { return e.def.aggregateID(e.event) }
func (e *recording) Key() (string, bool)     { return e.def.keyOf(e.event, e.own) }
func (e *recording) OccurredAt() time.Time   { return e.event.OccurredAt() }
func (e *recording) NotBefore() time.Time    { return e.own.NotBefore }
func (e *recording) Expires() time.Time      { return e.own.Expires }
func (e *recording) Encode() ([]byte, error) { return e.def.codec.Encode(e.ctx, e.event) }

func (e *recording) DataSchema() string {
	if e.def.codec.DataSchema == nil || e.own.Tombstone {
		return ""
	}
	return e.def.codec.DataSchema(e.ctx)
}

func (e *recording) NewID() (uuid.UUID, error) {
	if e.own.ID != (uuid.UUID{}) {
		return e.own.ID, nil
	}
	return e.recorder.cfg.NewID()
}

// KafkaRecord returns the Kafka record that a [Relay] would send for an event, with a
// new event id, and stores nothing: it is for tests of consumers. It reads the same
// values from ctx as [Recorder.Record] and rejects the same events.
//
// The record is in [Binary] mode and has no partition, offset or timestamp, nor the headers of
// RelayConfig.IDHeader and TraceHeader. A JSON
// payload is as the codec wrote it, whereas a relay sends it as jsonb prints it, with
// other spaces, order of keys and form of numbers.
func (r *Recorder) KafkaRecord(ctx context.Context, event DomainEvent) (*kgo.Record, error) {
	rows, err := r.rows(ctx, []DomainEvent{event}, false)
	if err != nil {
		return nil, atIndex(-1, "", err)
	}
	return kafkaRecord(rows.Envelope(0), Binary)
}

func kafkaRecord(e *envelope.Event, mode Mode) (*kgo.Record, error) {
	r, err := record.KafkaRecord(e, mode == Structured)
	return r, public(err)
}
