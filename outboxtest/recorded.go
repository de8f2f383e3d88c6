package outboxtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

// DB is where recorded events are looked for: a transaction, a pool or a connection of pgx, or by [SQL] one of
// database/sql. In a [pgx.Tx], only what that transaction itself has recorded counts, so that tests which share a
// database and roll back do not see each other; in a pool or a connection, all that is committed.
type DB interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// InSchema looks for the tables of outbox in another schema than public.
func InSchema(db DB, schema string) DB { return inSchema{db, schema} }

type inSchema struct {
	DB
	schema string
}

// RequireRecorded requires that each event of want was recorded, as often as it is
// in want. Others may have been recorded as well, and the order does not matter:
// see [Recorded] for more than that.
//
// Events are equal if their payloads are, JSON as jsonb, and others byte for byte
// or by what the codec of the registry makes of them. OccurredAt counts as well, to
// the microsecond. If it is the zero time in want, it may be any time, and so may each
// time in the payload that is zero in want, or that omitzero leaves out. Of an event with options of its own,
// see [outbox.With], they count too: those that want does not have may be anything. Delayed events count before they
// are due, too. What was recorded must be readable again. Of an
// [outbox.RawEvent] its type, content type, payload and time count; Recorded and RequireNotRecorded do not take it.
// A tombstone has no payload: its type and time count, and its options.
func RequireRecorded(ctx context.Context, t T, db DB, events *outbox.Registry, want ...outbox.DomainEvent) {
	t.Helper()
	if err := requireRecorded(ctx, newTable(db), events, want); err != nil {
		t.Fatalf("outboxtest: %v", err)
	}
}

// RequireNotRecorded requires that no event of type E was recorded.
func RequireNotRecorded[E outbox.DomainEvent](ctx context.Context, t T, db DB, events *outbox.Registry) {
	t.Helper()
	if err := requireNotRecorded(ctx, newTable(db), events, reflect.TypeFor[E]()); err != nil {
		t.Fatalf("outboxtest: %v", err)
	}
}

// Recorded returns the events of type E that were recorded, in their order, and then the delayed ones, as the
// codec of the registry decodes them: what does not travel in the payload, such as
// an unexported field, is missing.
func Recorded[E outbox.DomainEvent](ctx context.Context, t T, db DB, events *outbox.Registry) []E {
	t.Helper()
	decoded, err := recorded[E](ctx, newTable(db), events)
	if err != nil {
		t.Fatalf("outboxtest: %v", err)
	}
	return decoded
}

func requireRecorded(ctx context.Context, tab table, events *outbox.Registry, want []outbox.DomainEvent) error {
	if len(want) == 0 {
		return errors.New("no events are wanted: name at least one")
	}
	wanted, err := tab.encode(ctx, events, want)
	if err != nil {
		return err
	}
	rows, err := tab.read(ctx, typesOf(wanted))
	if err != nil {
		return err
	}
	missing, err := match(ctx, wanted, rows)
	if err != nil || len(missing) == 0 {
		return err
	}
	others, err := tab.others(ctx, typesOf(wanted))
	if err != nil {
		return err
	}
	for i := range rows { // it matters what they have
		rows[i].hasOptions = slices.ContainsFunc(missing, func(w entry) bool { return w.hasOptions && w.eventType == rows[i].eventType })
	}
	return fmt.Errorf("not recorded %s:\n%sthese were:\n%s", tab.place(), listEntries(ctx, missing), listEntries(ctx, append(rows, others...)))
}

func requireNotRecorded(ctx context.Context, tab table, events *outbox.Registry, goType reflect.Type) error {
	rows, err := tab.readType(ctx, events, goType)
	if err != nil || len(rows) == 0 {
		return err
	}
	return fmt.Errorf("recorded %s, and should not be:\n%s", tab.place(), listEntries(ctx, rows))
}

func recorded[E outbox.DomainEvent](ctx context.Context, tab table, events *outbox.Registry) ([]E, error) {
	rows, err := tab.readType(ctx, events, reflect.TypeFor[E]())
	if err != nil {
		return nil, err
	}
	decoded := make([]E, len(rows))
	for i := range rows {
		event, err := rows[i].decode(ctx)
		if err != nil {
			return nil, err
		}
		decoded[i] = event.(E)
	}
	return decoded, nil
}

// match finds a row for each wanted event and returns those without.
func match(ctx context.Context, wanted, rows []entry) (missing []entry, err error) {
	m := matching{wanted: wanted, rows: rows, taken: make([]int, len(rows))}
	rejected := make([]bool, len(rows)) // a search that has failed leads nowhere later, either
	for i, w := range wanted {
		if seen := slices.Clone(rejected); !m.place(ctx, i, seen) {
			missing, rejected = append(missing, w), seen
		}
	}
	for row, taken := range m.taken {
		if taken == 0 {
			continue
		}
		if _, err := rows[row].decode(ctx); err != nil {
			return nil, err
		}
	}
	return missing, nil
}

// matching gives rows to wanted events, each to one at most.
type matching struct {
	wanted, rows []entry
	taken        []int // by row: the index of the wanted event that has it, and 1; 0 if it is free
}

// place gives a row to the wanted event i: a free one, or that of another which then finds another one. No row is
// tried that was seen.
func (m *matching) place(ctx context.Context, i int, seen []bool) bool {
	for _, free := range []bool{true, false} {
		for row, taken := range m.taken {
			if seen[row] || (taken == 0) != free || !m.wanted[i].equals(ctx, m.rows[row]) {
				continue
			}
			seen[row] = true
			if free || m.place(ctx, taken-1, seen) {
				m.taken[row] = i + 1
				return true
			}
		}
	}
	return false
}

// entry is an event in its encoded form: a row of outbox, or a wanted one.
type entry struct {
	eventType, contentType string
	payload                []byte
	at                     time.Time
	options                outbox.EventOptions // of a row, what it has; of a wanted one, what it asks for
	hasOptions             bool                // they matter

	registered *outbox.Registration // nil for types that were not asked for
}

const jsonType = "application/json" // what is stored as jsonb

// asksFor reports whether a row has the options that the wanted event e asks for.
func (e entry) asksFor(row entry) bool {
	is := func(want, got string) bool { return want == "" || want == got }
	within := func(want, got map[string]string) bool {
		for name, value := range want {
			if got[name] != value {
				return false
			}
		}
		return true
	}
	return (e.options.ID == uuid.UUID{} || e.options.ID == row.options.ID) && is(e.options.Topic, row.options.Topic) && is(e.options.Key, row.options.Key) &&
		(e.options.NotBefore.IsZero() || e.options.NotBefore.Add(time.Microsecond-1).Truncate(time.Microsecond).Equal(row.options.NotBefore)) &&
		(e.options.Expires.IsZero() || e.options.Expires.Truncate(time.Microsecond).Equal(row.options.Expires)) &&
		within(e.options.Attributes, row.options.Attributes) && within(e.options.Headers, row.options.Headers)
}

// equals reports whether a row holds the wanted event e.
func (e entry) equals(ctx context.Context, row entry) bool {
	if e.eventType != row.eventType || !e.at.IsZero() && !e.at.Equal(row.at) || e.hasOptions && !e.asksFor(row) {
		return false
	}
	if e.contentType != row.contentType {
		return false
	}
	anyTime := e.at.IsZero()
	if same := bytes.Equal(e.payload, row.payload); same || e.contentType == jsonType {
		return same || anyTime && equalButTimes(e.payload, row.payload, row.at)
	}
	// Not every codec writes the same bytes for the same event.
	want, werr := e.decode(ctx)
	got, gerr := row.decode(ctx)
	return werr == nil && gerr == nil && (reflect.DeepEqual(want, got) || anyTime && equalButZeroTimes(want, got))
}

// isRaw reports whether an event is of a type that was asked for by a raw event.
func (e entry) isRaw() bool { return e.registered.GoType == nil }

// decode returns the event, of its registered Go type.
func (e entry) decode(ctx context.Context) (any, error) {
	if e.isRaw() {
		return outbox.RawEvent{Payload: e.payload}, nil
	}
	if e.contentType == "" { // a tombstone
		return reflect.Zero(e.registered.GoType).Interface(), nil
	}
	codec := e.registered.Codec
	if e.contentType != codec.ContentType {
		return nil, fmt.Errorf("%s was recorded as %s, and the registry's codec is for %s", e.eventType, e.contentType, codec.ContentType)
	}
	event := reflect.New(e.registered.GoType)
	if err := codec.Decode(ctx, bytes.Clone(e.payload), event.Interface()); err != nil {
		return nil, fmt.Errorf("%s was recorded, and the registry's codec cannot decode it: %w", e.eventType, err)
	}
	return event.Elem().Interface(), nil
}

// line returns a line of a failure message.
func (e entry) line(ctx context.Context) string {
	var at string
	if !e.at.IsZero() {
		at = " at " + e.at.UTC().Format(time.RFC3339Nano)
	}
	return e.eventType + at + e.with() + ": " + cut(e.text(ctx))
}

// with returns the options of an event, where they matter.
func (e entry) with() string {
	var parts []string
	add := func(name string, value any, is bool) {
		if is {
			parts = append(parts, fmt.Sprintf("%s %v", name, value))
		}
	}
	o := e.options
	add("id", o.ID, o.ID != uuid.UUID{})
	add("topic", o.Topic, o.Topic != "")
	add("key", o.Key, o.Key != "")
	add("attributes", o.Attributes, len(o.Attributes) > 0)
	add("headers", o.Headers, len(o.Headers) > 0)
	add("due at", o.NotBefore.UTC().Format(time.RFC3339Nano), !o.NotBefore.IsZero())
	add("expires at", o.Expires.UTC().Format(time.RFC3339Nano), !o.Expires.IsZero())
	if !e.hasOptions || len(parts) == 0 {
		return ""
	}
	return " with " + strings.Join(parts, ", ")
}

func (e entry) text(ctx context.Context) string {
	switch e.contentType {
	case jsonType:
		return string(e.payload)
	case "":
		return "a tombstone"
	}
	if e.registered != nil && !e.isRaw() {
		if event, err := e.decode(ctx); err == nil {
			return fmt.Sprintf("%+v", event)
		}
	}
	return fmt.Sprintf("%d bytes of %s: %q", len(e.payload), e.contentType, e.payload)
}

// What a failure message shows at most.
const (
	maxLines = 20
	maxLine  = 1000 // bytes
)

func cut(s string) string {
	if len(s) <= maxLine {
		return s
	}
	return strings.ToValidUTF8(s[:maxLine], "") + fmt.Sprintf("… (%d bytes)", len(s))
}

// listEntries prints events as lines.
func listEntries(ctx context.Context, entries []entry) string {
	lines := make([]string, len(entries))
	for i, e := range entries[:min(len(entries), maxLines)] {
		lines[i] = e.line(ctx)
	}
	return list(lines)
}

// list prints entries as lines.
func list[E any](entries []E) string {
	var b strings.Builder
	for _, e := range entries[:min(len(entries), maxLines)] {
		fmt.Fprintf(&b, "  %v\n", e)
	}
	switch {
	case len(entries) == 0:
		b.WriteString("  none\n")
	case len(entries) > maxLines:
		fmt.Fprintf(&b, "  and %d more\n", len(entries)-maxLines)
	}
	return b.String()
}
