package outboxtest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

// table is outbox, as far as a test is to look at it.
type table struct {
	db     DB
	schema string
	own    bool // only what this transaction recorded
}

func newTable(db DB) table {
	tab := table{db: db, schema: "public"}
	if s, ok := db.(inSchema); ok {
		tab.db, tab.schema = s.DB, s.schema
	}
	switch db := tab.db.(type) {
	case nil:
		tab.db = noDB{}
	case pgx.Tx:
		tab.own = true
	case sqlDB:
		tab.own = db.tx
	}
	return tab
}

// noDB is instead of nil.
type noDB struct{}

// Query implements [DB].
func (noDB) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return nil, fmt.Errorf("db %w", outbox.ErrNilArgument)
}

// kind names what was given, for a failure message.
func (tab table) kind() string {
	if s, ok := tab.db.(sqlDB); ok {
		return fmt.Sprintf("%T", s.db)
	}
	return fmt.Sprintf("%T", tab.db)
}

// place says in a failure message what was looked at.
func (tab table) place() string {
	if tab.own {
		return "in this transaction"
	}
	return "in schema " + tab.schema
}

func (tab table) query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return tab.db.Query(ctx, completed(sql, tab.schema), args...)
}

// completed puts a schema into a statement.
func completed(sql, schema string) string {
	return strings.ReplaceAll(sql, "{schema}", pgx.Identifier{schema}.Sanitize())
}

// sqlRecorded reads the events of some types, or those of all others: first those in outbox, and then delayed ones.
// recorded_at is the start of the transaction, which says whose a delayed event is.
const sqlRecorded = `
SELECT event_type, content_type, payload::text, payload_bytes, occurred_at,
       event_id::text, coalesce(topic, ''), coalesce(partition_key, ''), aggregate_id, coalesce(headers, '{}')::text, due_at, expires_at
  FROM (SELECT id, NULL::timestamptz AS due_at, expires_at, event_type, content_type, payload, payload_bytes, occurred_at,
               event_id, topic, partition_key, aggregate_id, headers
          FROM {schema}.outbox WHERE NOT $1::bool OR xid = pg_current_xact_id_if_assigned()
         UNION ALL
        SELECT id, due_at, expires_at, event_type, content_type, payload, payload_bytes, occurred_at,
               event_id, topic, partition_key, aggregate_id, headers
          FROM {schema}.outbox_delayed WHERE NOT $1::bool OR recorded_at = now()) AS e
 WHERE (event_type = ANY($2::text[])) = $3::bool
 ORDER BY due_at IS NOT NULL, id LIMIT $4::bigint`

// read returns the events of these types, in the order in which they were recorded.
func (tab table) read(ctx context.Context, types map[string]*outbox.Registration) ([]entry, error) {
	return tab.collect(ctx, types, true, nil)
}

// others returns events of other types, for a failure message.
func (tab table) others(ctx context.Context, types map[string]*outbox.Registration) ([]entry, error) {
	limit := maxLines
	return tab.collect(ctx, types, false, &limit)
}

func (tab table) collect(ctx context.Context, types map[string]*outbox.Registration, these bool, limit *int) (entries []entry, err error) {
	names := make([]string, 0, len(types))
	for name := range types {
		names = append(names, name)
	}
	rows, err := tab.query(ctx, sqlRecorded, tab.own, names, these, limit)
	if err != nil {
		return nil, fmt.Errorf("read outbox: %w", err)
	}
	var e entry
	var text *string
	var id, topic, key, aggregateID, headers string
	var due, expires *time.Time
	_, err = pgx.ForEachRow(rows, []any{&e.eventType, &e.contentType, &text, &e.payload, &e.at, &id, &topic, &key, &aggregateID, &headers, &due, &expires}, func() (err error) {
		if text != nil {
			e.payload = []byte(*text)
		}
		e.registered = types[e.eventType]
		e.options, err = optionsOf(id, topic, key, headers)
		if due != nil {
			e.options.NotBefore = *due
		}
		if expires != nil {
			e.options.Expires = *expires
		}
		entries = append(entries, e.withDefaults(aggregateID))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read outbox: %w", err)
	}
	return entries, nil
}

// withDefaults returns a row with what its empty columns mean.
func (e entry) withDefaults(aggregateID string) entry {
	e.options.Key = cmp.Or(e.options.Key, aggregateID)
	if e.registered != nil {
		e.options.Topic = cmp.Or(e.options.Topic, e.registered.Topic)
	}
	return e
}

// optionsOf returns the options of an event from its row.
func optionsOf(id, topic, key, headers string) (o outbox.EventOptions, err error) {
	stored := map[string]string{}
	if err := json.Unmarshal([]byte(headers), &stored); err != nil {
		return o, fmt.Errorf("headers of event %s: %w", id, err)
	}
	o = outbox.EventOptions{Topic: topic, Key: key, Attributes: map[string]string{}, Headers: map[string]string{}}
	for name, value := range stored {
		if attribute, is := strings.CutPrefix(name, "ce_"); is {
			o.Attributes[attribute] = value
		} else {
			o.Headers[name] = value
		}
	}
	o.ID, err = uuid.Parse(id)
	return o, err
}

// readType returns the events of a Go type.
func (tab table) readType(ctx context.Context, events *outbox.Registry, goType reflect.Type) ([]entry, error) {
	reg, err := registered(events, goType)
	if err != nil {
		return nil, err
	}
	return tab.read(ctx, map[string]*outbox.Registration{reg.EventType: reg})
}

// registrationOf finds the type of a wanted event in the registry. That of a raw event is made from its record.
func registrationOf(ctx context.Context, events *outbox.Registry, options outbox.EventOptions, v reflect.Value) (*outbox.Registration, error) {
	raw, is := v.Interface().(outbox.RawEvent)
	if !is {
		return registered(events, v.Type())
	}
	if raw.Time.IsZero() { // any time
		raw.Time = time.Unix(0, 0)
	}
	record, err := newRecord(ctx, events, outbox.With(raw, options))
	if err != nil {
		return nil, fmt.Errorf("wanted event of type %s: %w", raw.EventType, err)
	}
	reg := outbox.Registration{EventType: raw.EventType, Topic: record.Topic} // without a Go type
	for _, h := range record.Headers {
		if h.Key == "content-type" {
			reg.Codec.ContentType = string(h.Value)
		}
	}
	reg.Codec.Encode = func(context.Context, any) ([]byte, error) { return raw.Payload, nil }
	return &reg, nil
}

// registered finds a type in the registry.
func registered(events *outbox.Registry, goType reflect.Type) (*outbox.Registration, error) {
	for _, reg := range events.Registrations() {
		if reg.GoType == goType {
			return &reg, nil
		}
	}
	return nil, fmt.Errorf("event of Go type %v %w", goType, outbox.ErrUnregistered)
}

func typesOf(entries []entry) map[string]*outbox.Registration {
	types := map[string]*outbox.Registration{}
	for _, e := range entries {
		types[e.eventType] = e.registered
	}
	return types
}

// encode turns wanted events into what their rows would be.
func (tab table) encode(ctx context.Context, events *outbox.Registry, want []outbox.DomainEvent) ([]entry, error) {
	entries := make([]entry, len(want))
	for i, event := range want {
		event, options := outbox.Unwrap(event)
		v := reflect.Indirect(reflect.ValueOf(event))
		if !v.IsValid() {
			return nil, fmt.Errorf("wanted event %d %w", i, outbox.ErrNilArgument)
		}
		reg, err := registrationOf(ctx, events, options, v)
		if err != nil {
			return nil, err
		}
		var payload []byte
		var contentType string
		if !options.Tombstone {
			contentType = reg.Codec.ContentType
			if payload, err = reg.Codec.Encode(ctx, v.Interface()); err != nil {
				return nil, fmt.Errorf("encode wanted event %d, %s: %w", i, reg.EventType, err)
			}
		}
		entries[i] = entry{
			eventType: reg.EventType, contentType: contentType, payload: bytes.Clone(payload),
			at: event.OccurredAt().Truncate(time.Microsecond), registered: reg, options: options,
			hasOptions: options.ID != uuid.UUID{} || !options.NotBefore.IsZero() || !options.Expires.IsZero() || options.Topic != "" || options.Key != "" || len(options.Attributes) > 0 || len(options.Headers) > 0,
		}
	}
	return entries, tab.throughJSONB(ctx, entries)
}

// sqlJSONB returns JSON as jsonb prints it.
const sqlJSONB = `SELECT j::jsonb::text FROM unnest($1::text[]) WITH ORDINALITY AS w (j, n) ORDER BY n`

// throughJSONB makes of JSON payloads what their column makes of them.
func (tab table) throughJSONB(ctx context.Context, entries []entry) error {
	var which []int
	var texts []string
	for i, e := range entries {
		if e.contentType == jsonType {
			which, texts = append(which, i), append(texts, string(e.payload))
		}
	}
	if len(which) == 0 {
		return nil
	}
	rows, err := tab.query(ctx, sqlJSONB, texts)
	if err != nil {
		return fmt.Errorf("wanted events as jsonb: %w", err)
	}
	printed, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("wanted events as jsonb: %w", err)
	}
	for n, i := range which {
		entries[i].payload = []byte(printed[n])
	}
	return nil
}
