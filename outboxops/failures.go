package outboxops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
)

// Failures lists failures, and lets operators decide about them. Failures are events that a relay could not
// send, and deliveries that a handler could not handle. Failures only changes rows. The relay, which polls
// these rows every RetryInterval, sends events; a member of the consumer group handles deliveries. Any
// process may have one. It is safe for concurrent use.
type Failures struct {
	db     *pgxpool.Pool
	stores map[Kind]failureStore
	audits auditReader

	maxPayload        int
	sqlReadOfRecorded string
	sqlActed, sqlMine string
}

// failureStore has the failures of a kind.
type failureStore interface {
	// list returns failures with an id below before, or any for 0, the newest first.
	list(ctx context.Context, f FailureFilter, before int64, limit int) ([]Failure, error)
	count(ctx context.Context, f FailureFilter) ([]FailureCount, error)
	// get returns one without payload and headers, or [pgx.ErrNoRows].
	get(ctx context.Context, number int64) (Failure, error)
	// stored reads payloads and headers.
	stored() reader
	// pick returns failures above an id that an action is possible with, the oldest first. It leaves out those that
	// have changed since a snapshot, unless that is empty.
	pick(ctx context.Context, action string, f FailureFilter, snapshot string, above int64, limit int) ([]picked, error)
	// statement does an action: it takes numbers, operator and reason, and returns the number of changed
	// rows. That of an edit takes a number, the payload, operator and reason, and returns whether it has
	// changed the row.
	statement(action string) string
}

// picked is a failure that an action is possible with.
type picked struct {
	number  int64
	topic   string
	handler FailureHandler // the zero value for an event
}

// FailuresConfig names the schema of the failures, and limits payloads.
type FailuresConfig struct {
	// Schema holds the tables of outbox. Empty means public.
	Schema string
	// MaxPayload is the largest edited payload, in bytes, at most 104,857,600 (100 MiB). Use the value of
	// RecorderConfig. Zero means 983,040 (960 KiB).
	MaxPayload int
	// MaxRead bounds, in bytes, each read of a payload, of headers, and of all payloads before edits together. A larger
	// one is [ErrUnreadable]. Zero means 104,857,600 (100 MiB).
	MaxRead int
}

// NewFailures returns a view of the failures in db. It does no I/O; closing db stays
// with the caller.
func NewFailures(db *pgxpool.Pool, cfg FailuresConfig) (*Failures, error) {
	if cfg.Schema == "" {
		cfg.Schema = pg.DefaultSchema
	}
	cfg.MaxPayload = cmp.Or(cfg.MaxPayload, check.DefaultMaxPayload)
	cfg.MaxRead = cmp.Or(cfg.MaxRead, maxRead)
	errs := []error{check.Schema(cfg.Schema), check.NotNegative("MaxRead", cfg.MaxRead), check.NotNegative("MaxPayload", cfg.MaxPayload),
		check.NotAbove("MaxPayload", cfg.MaxPayload, check.MaxMaxPayload)}
	if db == nil {
		errs = append(errs, fmt.Errorf("pool %w", outbox.ErrNilArgument))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("outbox: failures config: %w", err)
	}
	return &Failures{
		db: db, stores: map[Kind]failureStore{KindEvent: newEventStore(db, cfg.Schema, cfg.MaxRead), KindDelivery: newDeliveryStore(db, cfg.Schema, cfg.MaxRead)},
		audits: newAuditReader(db, cfg.Schema, cfg.MaxRead), maxPayload: cfg.MaxPayload,
		sqlReadOfRecorded: pg.InSchema(sqlReadOfRecorded, cfg.Schema), sqlActed: pg.InSchema(sqlActed, cfg.Schema), sqlMine: pg.InSchema(sqlMine, cfg.Schema),
	}, nil
}

// StatusDone is the Status of a delivery that was handled. Methods return such deliveries only if the
// filter asks for this status.
const StatusDone = "done"

// Failure is an event that did not reach Kafka or a handler. Its [outbox.FailedEvent] has OutboxID,
// EventID, Type, AggregateType, AggregateID, Topic, Key, Retries, Class and Err. For a delivery, Topic is
// the topic that the event has in Kafka.
type Failure struct {
	outbox.FailedEvent

	// ID names it. Its number is the id of its row.
	ID FailureID
	// Relay is the name of the relay that could not send an event; empty for deliveries.
	Relay string
	// Group is the consumer group of a delivery, and Action its handler, empty where the group
	// has none for the type; both are empty for events.
	Group, Action string
	// Status is one of the constants, for example [outbox.StatusDead]. For a delivery, these mean:
	//
	//   - [outbox.StatusFailed]: it waits for another attempt, or the attempt runs
	//   - [outbox.StatusWaiting]: it has not been tried yet
	//   - [outbox.StatusParked]: it is behind another delivery of its key
	//   - [StatusDone]: it is handled
	Status string
	// Held is set while its key waits for an operator.
	Held bool
	// Source is the source of the event.
	Source string
	// OccurredAt is when the event happened, CreatedAt when its transaction began.
	OccurredAt, CreatedAt time.Time
	// FailedAt is the time of an event's first failure. For a delivery it is the time at which it was made:
	// with Kafka at its first failure, by a worker when the worker took the event from outbox.
	FailedAt time.Time
	// NextRetryAt is when it is tried again at the earliest; of a dead event, when it died.
	NextRetryAt time.Time
	// ResolvedAt is the time of its resolution; zero if it is not resolved.
	ResolvedAt time.Time
	// ResolvedBy and Resolution are the operator and the note of the resolution.
	ResolvedBy, Resolution string

	// Attempts is the number of attempts of a delivery. MaxAttempts is the number of attempts after which
	// it is dead. Both are zero for events.
	Attempts, MaxAttempts int
	// LastAttemptAt is the time of the last attempt of a delivery. It is zero without an attempt, and for
	// events.
	LastAttemptAt time.Time
	// LockedBy is the worker that has a delivery, until LockedUntil unless it renews that. They
	// are zero if none has it, and for events.
	LockedBy string
	// LockedUntil is described at LockedBy.
	LockedUntil time.Time
	// Kafka is the record that brought a delivery. It is nil for events, and for deliveries from outbox:
	// then OutboxID is the event's outbox.id.
	Kafka *outbox.KafkaMetadata
	// ChangedAt is when the status of a delivery changed last; zero for events.
	ChangedAt time.Time

	// ContentType is the content type of Payload.
	ContentType string
	// Payload is the event; nil in lists, see [Failures.Get].
	Payload []byte
	// PayloadErr says why Payload could not be read; nil if it could, and in lists. It is
	// [ErrUnreadable].
	PayloadErr error
	// Headers are the extra Kafka headers; nil in lists.
	Headers map[string]string
	// Seen is a snapshot from before the failure was read; empty in lists. See AuditInfo.Seen.
	Seen string
}

// FailureFilter picks failures. Empty fields pick all. The zero value picks unresolved failures: events
// that failed or wait behind such events, and deliveries that are dead or have failed an attempt.
type FailureFilter struct {
	// Kind is one of the constants. Empty means all kinds.
	Kind Kind
	// Statuses are the statuses to pick. Empty means all except [outbox.StatusResolved]. For deliveries,
	// empty means only [outbox.StatusFailed] and [outbox.StatusDead]: a delivery that waits for its turn
	// has not failed.
	Statuses []string
	// Relay is the name of one. It picks events only.
	Relay string
	// Group is a consumer group, and Action a handler. They pick deliveries only.
	Group, Action string
	// Type is the CloudEvents type.
	Type string
	// Topic and Key are the topic and the key of the event's record. For a delivery, they are the topic and
	// the key that it comes from.
	Topic, Key string
	// AggregateType and AggregateID name the aggregate of the event.
	AggregateType, AggregateID string
	// OutboxID is the id of one event. It picks events only.
	OutboxID int64
	// EventID is the CloudEvents id of one event, a UUID.
	EventID string
	// Class is the kind of the last error, message_too_large for example.
	Class string
	// Since and Until bound Failure.FailedAt: from Since on, before Until.
	Since, Until time.Time
}

// Filter returns the filter that picks an event that is not resolved, as a change of many does. As a dry run, such a
// change says whether a relay would send the event, which its row does not. For a delivery, the filter picks those of
// its event to its handler.
func (f Failure) Filter() FailureFilter {
	filter := FailureFilter{Kind: f.ID.Kind, Relay: f.Relay, Group: f.Group, Action: f.Action, EventID: f.EventID}
	if filter.Kind == KindEvent {
		filter.OutboxID = f.OutboxID
	}
	return filter
}

var (
	// unresolved are the statuses of failures that are tried again or need a decision.
	unresolved = []string{outbox.StatusWaiting, outbox.StatusFailed, outbox.StatusParked, outbox.StatusDead}
	statuses   = append(slices.Clone(unresolved), outbox.StatusResolved, StatusDone)
)

// kinds returns the kinds of failures that a filter may pick.
func (f FailureFilter) kinds() ([]Kind, error) {
	if f.Kind != "" {
		if err := f.Kind.check("Kind"); err != nil {
			return nil, err
		}
	}
	for _, s := range f.Statuses {
		if !slices.Contains(statuses, s) {
			return nil, fmt.Errorf("field Statuses %w: %.20q is none: want %s", outbox.ErrMalformed, s, strings.Join(statuses, ", "))
		}
	}
	ofEvents, ofDeliveries := f.Relay != "" || f.OutboxID != 0, f.Group != "" || f.Action != ""
	return slices.DeleteFunc(slices.Clone(kinds), func(k Kind) bool {
		return f.Kind != "" && k != f.Kind || ofEvents && k != KindEvent || ofDeliveries && k != KindDelivery
	}), nil
}

// FailurePage chooses a part of a list. The zero value is the first part.
type FailurePage struct {
	// After are the last failures of the page before, at most one of each kind; zero values are ignored.
	// Empty means from the beginning.
	After []FailureID
	// Limit is the largest number of failures to return, up to 1,000. Zero means 100.
	Limit int
}

// Next returns the page behind listed failures: rows are the result of List for p, or the first rows of it.
func (p FailurePage) Next(rows []Failure) FailurePage {
	last := map[Kind]FailureID{}
	for _, id := range p.After {
		last[id.Kind] = id
	}
	for _, r := range rows {
		last[r.ID.Kind] = r.ID
	}
	p.After = nil
	for _, k := range kinds {
		if id, ok := last[k]; ok {
			p.After = append(p.After, id)
		}
	}
	return p
}

// after returns the numbers of the last failures that are known.
func (p FailurePage) after() (map[Kind]int64, error) {
	after := map[Kind]int64{}
	for _, id := range p.After {
		if id == (FailureID{}) {
			continue
		}
		if err := id.check(); err != nil {
			return nil, fmt.Errorf("field After: %w", err)
		}
		if after[id.Kind] != 0 {
			return nil, fmt.Errorf("field After %w: two of kind %s", outbox.ErrMalformed, id.Kind)
		}
		after[id.Kind] = id.Number
	}
	return after, nil
}

// List returns failures without their payloads, the latest first. Several kinds are in the order of
// FailedAt. A single kind is in the order of the ids, which differs only for failures of the same time. An
// empty slice means that there are no more.
//
// Done deliveries cost nothing unless Statuses asks for them. Then List scans the table from its newest row
// on, which takes long if few rows match and many are kept. Bound it by ctx.
func (f *Failures) List(ctx context.Context, filter FailureFilter, page FailurePage) ([]Failure, error) {
	chosen, filterErr := filter.kinds()
	after, afterErr := page.after()
	limit, limitErr := limitOf(page.Limit)
	if err := errors.Join(filterErr, afterErr, limitErr); err != nil {
		return nil, fmt.Errorf("outbox: list failures: %w", err)
	}
	var all []Failure
	for _, k := range chosen {
		rows, err := f.stores[k].list(ctx, filter, after[k], limit)
		if err != nil {
			return nil, fmt.Errorf("outbox: list failures: %w", orNotMigrated(err))
		}
		all = mergeNewest(all, rows, limit)
	}
	return all, nil
}

// mergeNewest returns the first of two lists by FailedAt, and leaves the order of each as it is.
func mergeNewest(a, b []Failure, limit int) (all []Failure) {
	for len(all) < limit && len(a)+len(b) > 0 {
		from := &a
		if len(a) == 0 || len(b) > 0 && b[0].FailedAt.After(a[0].FailedAt) {
			from = &b
		}
		all, *from = append(all, (*from)[0]), (*from)[1:]
	}
	return all
}

// FailureCount is the number of failures that share the fields Kind to Class.
type FailureCount struct {
	// Kind, Relay, Group, Action, Status, Type and Class are shared by the counted failures, as in
	// [Failure]. Class is empty for failures that are parked or were not tried.
	Kind Kind
	// Relay is the name of the relay, Status a constant, Type the CloudEvents type.
	Relay, Group, Action, Status, Type, Class string
	// Events is the number of failures. If More is set, there are more.
	Events int
	// More is described at Events.
	More bool
	// Oldest is FailedAt of the first of them.
	Oldest time.Time
}

// Count returns the numbers of failures by kind, relay or group and action, status, type and class, the
// largest number first. Done deliveries are not counted.
//
// A filter by Kind, Statuses, Relay, Group, Action, Type and Class is quick, however many failures exist.
// It counts up to [outbox.MaxCounted] equal events, and as many deliveries of each group, action, topic and
// status. With any other field, PostgreSQL searches all failed events, and counts all.
func (f *Failures) Count(ctx context.Context, filter FailureFilter) (counts []FailureCount, err error) {
	chosen, err := filter.kinds()
	if err == nil && slices.Contains(filter.Statuses, StatusDone) {
		err = errors.New("field Statuses: what is done is not counted")
	}
	for _, k := range chosen {
		if err != nil {
			break
		}
		var some []FailureCount
		some, err = f.stores[k].count(ctx, filter)
		counts = append(counts, some...)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: count failures: %w", orNotMigrated(err))
	}
	slices.SortStableFunc(counts, func(a, b FailureCount) int { return cmp.Compare(b.Events, a.Events) })
	return counts, nil
}

// Unresolved is the number of unresolved failures of a type: events that are not resolved, and dead
// deliveries.
type Unresolved struct {
	// Kind is one of the constants.
	Kind Kind
	// Type is the CloudEvents type.
	Type string
	// Failures is the number of failures. If More is set, there are more.
	Failures int
	// More is described at Failures.
	More bool
	// Oldest is Failure.FailedAt of the first of them.
	Oldest time.Time
}

// IsUnresolved reports whether it counts for [Failures.Unresolved].
func (c FailureCount) IsUnresolved() bool {
	return c.Status == outbox.StatusDead || c.Kind == KindEvent && c.Status != outbox.StatusResolved
}

// Unresolved returns the numbers of failures that no operator has resolved and no handler has handled
// since, by kind and type, the largest number first. It is as quick as [Failures.Count].
func (f *Failures) Unresolved(ctx context.Context) (all []Unresolved, err error) {
	counts, err := f.Count(ctx, FailureFilter{})
	if err != nil {
		return nil, err
	}
	for _, c := range counts {
		if !c.IsUnresolved() {
			continue
		}
		i := slices.IndexFunc(all, func(u Unresolved) bool { return u.Kind == c.Kind && u.Type == c.Type })
		if i < 0 {
			i, all = len(all), append(all, Unresolved{Kind: c.Kind, Type: c.Type, Oldest: c.Oldest})
		}
		u := &all[i]
		u.Failures, u.More = u.Failures+c.Events, u.More || c.More
		if c.Oldest.Before(u.Oldest) {
			u.Oldest = c.Oldest
		}
	}
	slices.SortStableFunc(all, func(a, b Unresolved) int { return cmp.Compare(b.Failures, a.Failures) })
	return all, nil
}

// Get returns a failure, with its payload. It returns [ErrNotFound] if there is none:
// the event may have been sent meanwhile, or retention has removed the row.
func (f *Failures) Get(ctx context.Context, id FailureID) (Failure, error) {
	seen := ""
	if err := f.see(ctx, &seen); err != nil {
		return Failure{}, readError(id, err)
	}
	failure, err := f.get(ctx, id)
	if err != nil {
		return failure, err
	}
	failure.Seen = seen
	stored := f.stores[id.Kind].stored()
	headers, err := stored.readHeaders(ctx, id.Number)
	if err == nil {
		failure.Headers = headersOf(headers)
		if failure.Kafka != nil {
			failure.Headers = headersOfRecord(headers)
		}
		failure.Payload, failure.PayloadErr, err = readPayload(ctx, stored, failure)
	}
	if err != nil {
		return Failure{}, readError(id, err)
	}
	return failure, nil
}

// unreadableRow is the class of events that PostgreSQL could not read for a relay.
const unreadableRow = "unreadable_row"

// readPayload does not read a payload that a relay could not read: that would take seconds and a gigabyte
// of PostgreSQL's memory.
func readPayload(ctx context.Context, stored reader, failure Failure) (payload []byte, reason, err error) {
	if failure.Class == unreadableRow {
		return nil, fmt.Errorf("%w: %w", ErrUnreadable, failure.Err), nil
	}
	return stored.readPayload(ctx, failure.ID.Number)
}

// get returns a failure without its payload and headers.
func (f *Failures) get(ctx context.Context, id FailureID) (Failure, error) {
	if err := id.check(); err != nil {
		return Failure{}, fmt.Errorf("outbox: read failure: %w", err)
	}
	failure, err := f.stores[id.Kind].get(ctx, id.Number)
	if err != nil {
		return Failure{}, readError(id, err)
	}
	return failure, nil
}

func readError(id FailureID, err error) error {
	if errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("outbox: failure %v: %w", id, ErrNotFound)
	}
	return fmt.Errorf("outbox: read failure %v: %w", id, orNotMigrated(err))
}
