package outbox

import (
	"errors"
	"fmt"
	"time"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/migrator"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/record"
	"github.com/outboxgo/outbox/internal/relay"
)

// Reasons why [NewRegistry] and the methods of [Recorder] reject an event.
// They are wrapped in a [*FieldError], which names the event and the field.
var (
	// ErrUnregistered means that the registry does not have the Go type of an event, or has no
	// [AllowRaw] for a [RawEvent].
	ErrUnregistered = check.ErrUnregistered
	// ErrMalformed means that a name does not have the form it must have, such as
	// {company}.{domain}.{action}.v{n} for an event type.
	ErrMalformed = check.ErrMalformed
	// ErrDuplicate means that an event type or a Go type was registered twice.
	ErrDuplicate = check.ErrDuplicate
	// ErrEmpty means that a required value is missing.
	ErrEmpty = check.ErrEmpty
	// ErrTooLong means that a text has more characters than its column.
	ErrTooLong = check.ErrTooLong
	// ErrTooLarge means that a payload, the headers, all events of a statement, or the answer to a
	// message exceed their limit in bytes.
	ErrTooLarge = record.ErrTooLarge
	// ErrNUL means that a text holds U+0000, which PostgreSQL cannot store.
	ErrNUL = check.ErrNUL
	// ErrUTF8 means that a text is not valid UTF-8.
	ErrUTF8 = check.ErrUTF8
	// ErrJSON means JSON that PostgreSQL's jsonb rejects although some encoders
	// write it: half a surrogate pair, a number out of range, nesting too deep.
	ErrJSON = check.ErrJSON
	// ErrEncode means that the event's codec failed; its error is wrapped as well.
	ErrEncode = record.ErrEncode
	// ErrTime means a zero time, or one outside the years 1 to 9999.
	ErrTime = check.ErrTime
	// ErrNilArgument means that a required argument is nil: an event, transaction,
	// batch, pool, registry, handler or function, or a nil pointer in place of one.
	ErrNilArgument = check.ErrNilArgument
)

var (
	// ErrRunning is returned by [Relay.Run] while another call of it is running.
	ErrRunning = check.ErrRunning
	// ErrHangs is returned by [Relay.Run] when it was told to stop and its work does not
	// end: a function of the host that it calls does not return, a hook of franz-go for
	// example. Run returns [ErrRunning] until the work has ended after all.
	ErrHangs = relay.ErrHangs
	// ErrNotMigrated is returned by [Relay.Run], [Consumer.Run] and [Recorder.Record], and
	// by what package outboxops reads and writes, when the tables of outbox are not there or
	// are those of an earlier release: call [Migrate] first, or check the Schema of the
	// configuration.
	ErrNotMigrated = pg.ErrNotMigrated
	// ErrEncoding is returned by [Migrate], [Relay.Run], [Worker.Run] and [Consumer.Run] when the
	// database has another encoding than UTF8, or when its sessions have, which client_encoding of
	// the role decides. PostgreSQL would change or refuse what events contain. The text names the
	// database and the encoding.
	ErrEncoding = pg.ErrEncoding
	// ErrDatabaseAhead is returned by [Migrate] when the database was migrated by
	// a newer release than this one, on whose tables this one cannot run.
	ErrDatabaseAhead = migrator.ErrDatabaseAhead
	// ErrForeignObjects is returned by [Migrate] when a role that is not trusted with the schema
	// has made functions, operators or relations there that Migrate would run or take for its own.
	// The error names them.
	ErrForeignObjects = migrator.ErrForeignObjects
	// ErrDuplicateEvent is returned by [Recorder.Record] where [MigrateConfig].UniqueEventIDs has
	// made ids of events unique, and an event of this id is in outbox already. The
	// transaction is aborted, as after any error of PostgreSQL. [Migrate] returns it where
	// there are such events before.
	ErrDuplicateEvent = record.ErrDuplicateEvent
	// ErrInProgress is returned by [Inbox.Once] if another transaction handles the same message and
	// has not ended within the lock_timeout of this one. Try again later; in HTTP, that is a 409.
	ErrInProgress = handling.ErrInProgress
	// ErrOtherRequest is returned by [Inbox.Once] for a message with the source, id and action of one
	// that was handled, and another Request. In HTTP, that is a 422.
	ErrOtherRequest = handling.ErrOtherRequest
	// ErrPartitioned is returned by [Migrate] for unique ids of events in an outbox that has
	// partitions, or is to get some.
	ErrPartitioned = errors.New("ids of events cannot be unique in an outbox with partitions")
	// ErrSequenceBehind is returned by [Relay.Run] when it begins to lead, before it sends
	// anything, if the sequence of outbox.id, or of outbox_cursor.id, is behind ids that are in
	// use. That happens if the database was restored without its sequences, or if a sequence was
	// set back, as TRUNCATE outbox RESTART IDENTITY does. New events would get the ids of older
	// ones, and ids are what orders events; a new position would be older than the last one. The
	// error contains the statements that set the sequences. After a restore into another cluster,
	// if it is the sequence of outbox.id, then give new ids to the events that were recorded
	// since, or they would be taken for sent: UPDATE outbox SET id = DEFAULT, xid = DEFAULT WHERE
	// created_at >= the time of the restore.
	ErrSequenceBehind = cursor.ErrSequenceBehind
	// ErrOtherMode is returned by [Relay.Run] if the relay sends exactly once, as its row in
	// outbox_cursor says, and RelayConfig.ExactlyOnce is empty or names another topic.
	ErrOtherMode = cursor.ErrMode
	// ErrCursorTopic is returned by [Relay.Run] if the topic in RelayConfig.ExactlyOnce and PostgreSQL
	// do not belong together: the topic was deleted, a failover or a restore has lost commits, or a relay of the
	// same names in another cluster uses it. The error says which; docs/exactly-once.md says what to do.
	ErrCursorTopic = cursor.ErrDisagree
)

// FieldError says which field of which event was rejected, and wraps the reason.
type FieldError struct {
	// EventType is the CloudEvents type, or the Go type if the former is not known.
	EventType string
	// Index is the index of the event among those of the call, or -1 if the error is
	// not about one of several.
	Index int
	// Field is the rejected field, by its name in the table outbox, for example
	// "aggregate_id"; "payload" is either payload column, "correlation_id" and "trace_id" are
	// those in the context, "attributes" are extension attributes, and "event", "events", "tx" and
	// "batch" are arguments. [Inbox.Once] says which fields its message has. If a received
	// record was rejected, it is an attribute of CloudEvents, "content-type", "data",
	// "value", or the name of a header or of a JSON member.
	Field string
	// Err is one of the Err values of this package, with details.
	Err error
}

// Error implements error: "outbox: event 2 (shop.order.created.v1): aggregate_id is empty".
// Whatever was received, the text has at most 2,000 bytes.
func (e *FieldError) Error() string { return (*envelope.FieldError)(e).Error() }

// Unwrap returns Err.
func (e *FieldError) Unwrap() error { return e.Err }

// PanicError is what a panic in a handler, a decoder or an upcaster becomes, or in the
// methods of the error that it returns.
type PanicError struct {
	// Value is what was panicked with.
	Value any
	// Stack is that of the goroutine at the panic.
	Stack []byte
}

// Error implements error, without the stack.
func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// Permanent marks an error that no retry would change: the event becomes a dead letter
// at once. It returns nil for nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return handling.Permanent(err)
}

// Unavailable marks an error of a handler, or of Decode of a [Codec], that says that something is away that this event
// needs, for example the server of one tenant, or a schema registry. It uses up no attempt for as long as MaxOutage of
// [RetryPolicy] says, counted from the first failure of the event; later it counts as any other error. The wait until
// the next attempt is as long as the event has been failing, up to MaxRetryWait and at most 30 s. [RetryAfter] around
// it, or within it, sets another wait.
//
// The breaker of the action counts the error as a failure of the event. So the breaker opens if all events meet such
// errors, and the events of the other tenants go on otherwise. It returns nil for nil.
func Unavailable(err error) error {
	if err == nil {
		return nil
	}
	return handling.Unavailable(err)
}

// RetryAfter marks an error of a handler after which the event is tried again when d has passed, for example because
// another server asks for that. D takes the place of the wait that RetryWait of [HandlerConfig] says, and has no
// upper bound: until then the later events of its key wait, or, where it is tried again in place, those of its
// partition. A d that is not positive means at once. If an event waits in place, and d has not passed when the
// consumer stops, it is tried when it arrives again.
//
// It does not change how often the event is tried: MaxRetries, RetriesFor and [Permanent] say
// that. An error for which PostgreSQL would have the transaction repeated counts as any other
// then, and in an outage of PostgreSQL, which does not count, the event waits for d at least. The breaker of the
// action does not count it, see Retry of [HandlerConfig].
//
// It returns nil for nil. Of several in one error the outermost counts.
func RetryAfter(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return handling.RetryAfter(err, d)
}

// runError is the error of a Run, with the part that has ended: the errors of the engines have no prefix.
func runError(part string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("outbox: %s: %w", part, err)
}

// public returns an error of the engines as users see it: a field error of theirs is a [*FieldError].
func public(err error) error {
	if e, is := err.(*envelope.FieldError); is { //nolint:errorlint // what wraps one keeps its text; errors.As finds it there
		return (*FieldError)(e)
	}
	if e, is := err.(*handling.PanicError); is { //nolint:errorlint // as above
		return (*PanicError)(e)
	}
	return err
}
