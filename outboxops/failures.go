package outboxops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// Failures lists what did not get through, and lets operators decide about it. It
// only changes rows; the relay, which looks at them every RetryInterval, sends. Any
// process may have one. It is safe for concurrent use.
type Failures struct {
	db         *pgxpool.Pool
	maxPayload int
	sql        failuresSQL

	counter tables.FailureCounter
	rows    reader // of outbox_failed
	audits  auditReader
}

// failuresSQL are the statements of [Failures], in their schema.
type failuresSQL struct {
	list, get, ids                      string
	retry, resolve, edit, hold, release string
	auditRead, auditReadRecorded        string
}

// FailuresConfig says where the failures are. It may be zero.
type FailuresConfig struct {
	// Schema of the tables. Empty means public.
	Schema string
	// MaxPayload bounds an edited payload in bytes, as RecorderConfig.MaxPayload does for
	// recorded ones: give it the same. At most 104,857,600 (100 MiB). Zero means 983,040
	// (960 KiB).
	MaxPayload int
	// MaxRead bounds in bytes what is read of a payload, of headers, and of the payloads from
	// before edits together; a payload beyond it is [ErrUnreadable]. Zero means 104,857,600
	// (100 MiB).
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
	in := func(sql string) string { return pg.InSchema(sql, cfg.Schema) }
	return &Failures{db: db, maxPayload: cfg.MaxPayload, counter: tables.NewFailureCounter(db, cfg.Schema), rows: newReader(db, cfg.Schema, "outbox_failed", cfg.MaxRead),
		audits: newAuditReader(db, cfg.Schema, cfg.MaxRead), sql: failuresSQL{
			list: in(sqlFailureList), get: in(sqlFailureGet), ids: in(sqlFailureIDs),
			retry: in(sqlRetry), resolve: in(sqlResolve), edit: in(sqlEdit), hold: in(sqlHold), release: in(sqlRelease),
			auditRead: in(sqlAuditRead), auditReadRecorded: in(sqlAuditReadRecorded),
		}}, nil
}

// Failure is an event that did not get through. Its [outbox.FailedEvent] has OutboxID,
// EventID, Type, AggregateType, AggregateID, Topic, Key, Retries, Class and Err.
type Failure struct {
	outbox.FailedEvent

	// ID names it. Its number is the id of its row.
	ID FailureID
	// Relay is the name of the relay that could not send it.
	Relay string
	// Status is one of the constants, [outbox.StatusDead] for example.
	Status string
	// Held is set while its key waits for an operator.
	Held bool
	// Source is that of the event.
	Source string
	// OccurredAt is when the event happened, CreatedAt when its transaction began.
	OccurredAt, CreatedAt time.Time
	// FailedAt is when it failed first.
	FailedAt time.Time
	// NextRetryAt is when it is sent again at the earliest; of a dead one, when it died.
	NextRetryAt time.Time
	// ResolvedAt is when it was resolved; zero until then.
	ResolvedAt time.Time
	// ResolvedBy and Resolution say who resolved it, and with which note.
	ResolvedBy, Resolution string

	// ContentType is that of Payload.
	ContentType string
	// Payload is the event; nil in lists, see [Failures.Get].
	Payload []byte
	// PayloadErr says why Payload could not be read; nil if it could, and in lists. It is
	// [ErrUnreadable].
	PayloadErr error
	// Headers are the further Kafka headers; nil in lists.
	Headers map[string]string
}

func failureOf(r tables.Failure) Failure {
	return Failure{
		FailedEvent: outbox.FailedEvent(r.Event), ID: relayID(r.ID), Relay: r.Relay, Status: r.Status, Held: r.Held, Source: r.Source,
		OccurredAt: r.OccurredAt, CreatedAt: r.CreatedAt, FailedAt: r.FailedAt, NextRetryAt: r.NextRetryAt,
		ResolvedAt: r.ResolvedAt, ResolvedBy: r.ResolvedBy, Resolution: r.Resolution, ContentType: r.ContentType,
	}
}

// FailureFilter picks failures. Empty fields pick all; the zero value picks what is
// not resolved.
type FailureFilter struct {
	// Kind is [KindRelay]. Empty means all kinds.
	Kind Kind
	// Statuses are those that count. Empty means all but [outbox.StatusResolved].
	Statuses []string
	// Relay is the name of one.
	Relay string
	// Type is the CloudEvents type.
	Type string
	// Topic and Key say where the event would go.
	Topic, Key string
	// AggregateType and AggregateID say what it happened to.
	AggregateType, AggregateID string
	// OutboxID is that of one event.
	OutboxID int64
	// EventID is the CloudEvents id of one event, a UUID.
	EventID string
	// Class is the kind of the last error, message_too_large for example.
	Class string
	// Since and Until bound the time of the first failure: from Since on, before Until.
	Since, Until time.Time
}

// unresolved are the statuses of what is tried again or needs a decision.
var unresolved = []string{outbox.StatusWaiting, outbox.StatusFailed, outbox.StatusParked, outbox.StatusDead}

// args are the first twelve parameters of statements with [tables.FailureWhere].
func (f FailureFilter) args() ([]any, error) {
	rows, err := f.rows()
	return rows.Args(), err
}

func (f FailureFilter) rows() (tables.FailureFilter, error) {
	if f.Kind != "" {
		if err := f.Kind.check("Kind"); err != nil {
			return tables.FailureFilter{}, err
		}
	}
	statuses := f.Statuses
	if len(statuses) == 0 {
		statuses = unresolved
	}
	return tables.FailureFilter{
		Statuses: statuses, Relay: f.Relay, Type: f.Type, Topic: f.Topic, Key: f.Key, AggregateType: f.AggregateType, AggregateID: f.AggregateID,
		OutboxID: f.OutboxID, EventID: f.EventID, Class: f.Class, Since: f.Since, Until: f.Until,
	}, nil
}

// FailurePage says which part of a list is wanted. The zero value is the first part.
type FailurePage struct {
	// After is the ID of the last failure that is known. Zero means from the beginning.
	After FailureID
	// Limit is how many failures are returned at most, up to 1,000. Zero means 100.
	Limit int
}

func (p FailurePage) args() ([]any, error) {
	if p.After != (FailureID{}) {
		if err := p.After.check(); err != nil {
			return nil, fmt.Errorf("field After: %w", err)
		}
	}
	limit, err := limitOf(p.Limit)
	return []any{p.After.Number, limit}, err
}

const sqlFailureList = `
SELECT ` + tables.FailureColumns + `
  FROM {schema}.outbox_failed` + tables.FailureWhere + `
   AND ($13::bigint = 0 OR id < $13)
 ORDER BY id DESC LIMIT $14`

// List returns failures without their payloads, those that failed last first. An
// empty slice means that there are no more.
func (f *Failures) List(ctx context.Context, filter FailureFilter, page FailurePage) ([]Failure, error) {
	picked, filterErr := filter.args()
	part, pageErr := page.args()
	if err := errors.Join(filterErr, pageErr); err != nil {
		return nil, fmt.Errorf("outbox: list failures: %w", orNotMigrated(err))
	}
	rows, err := f.db.Query(ctx, f.sql.list, append(append([]any{pg.PlanEachTime}, picked...), part...)...)
	if err == nil {
		var all []Failure
		if all, err = pgx.CollectRows(rows, scanListedFailure); err == nil {
			return all, nil
		}
	}
	return nil, fmt.Errorf("outbox: list failures: %w", orNotMigrated(err))
}

func scanListedFailure(row pgx.CollectableRow) (Failure, error) {
	r, err := tables.ScanFailure(row)
	return failureOf(r), err
}

// FailureCount is how many events have failed alike.
type FailureCount struct {
	// Kind, Relay, Status, Type and Class are what they have in common. Class is empty
	// for what is parked.
	Kind Kind
	// Relay is the name of the relay, Status a constant, Type the CloudEvents type.
	Relay, Status, Type, Class string
	// Events is how many there are; [outbox.MaxCounted] stands for more, too.
	Events int
	// Oldest is when the first of them failed.
	Oldest time.Time
}

// Count returns how many events have failed, by kind, relay, status, type and class,
// the largest number first. A filter by Kind, Statuses, Relay, Type and Class is quick
// however many have failed, because it counts up to [outbox.MaxCounted] events that are
// alike. Any other field makes PostgreSQL search all failures, and count all.
func (f *Failures) Count(ctx context.Context, filter FailureFilter) ([]FailureCount, error) {
	picked, err := filter.rows()
	if err != nil {
		return nil, fmt.Errorf("outbox: count failures: %w", orNotMigrated(err))
	}
	rows, err := f.counter.Count(ctx, picked)
	if err != nil {
		return nil, fmt.Errorf("outbox: count failures: %w", orNotMigrated(err))
	}
	counts := make([]FailureCount, len(rows))
	for i, r := range rows {
		counts[i] = FailureCount{Kind: KindRelay, Relay: r.Relay, Status: r.Status, Type: r.Type, Class: r.Class, Events: r.Events, Oldest: r.Oldest}
	}
	return counts, nil
}

const sqlFailureGet = `
SELECT ` + tables.FailureColumns + `
  FROM {schema}.outbox_failed WHERE id = $1`

// Get returns a failure, with its payload. It returns [ErrNotFound] if there is none:
// the event may have been sent meanwhile.
func (f *Failures) Get(ctx context.Context, id FailureID) (Failure, error) {
	failure, err := f.get(ctx, id)
	if err != nil {
		return failure, err
	}
	headers, err := f.rows.readHeaders(ctx, id.Number)
	if err == nil {
		failure.Headers = headersOf(headers)
		failure.Payload, failure.PayloadErr, err = f.readPayload(ctx, failure)
	}
	if err != nil {
		return Failure{}, readError(id, err)
	}
	return failure, nil
}

// unreadableRow is the class of events that PostgreSQL could not read for a relay.
const unreadableRow = "unreadable_row"

// readPayload does not try what a relay could not read: it takes seconds and a gigabyte of
// PostgreSQL's memory.
func (f *Failures) readPayload(ctx context.Context, failure Failure) (payload []byte, reason, err error) {
	if failure.Class == unreadableRow {
		return nil, fmt.Errorf("%w: %w", ErrUnreadable, failure.Err), nil
	}
	return f.rows.readPayload(ctx, failure.ID.Number)
}

// get returns a failure without its payload and headers.
func (f *Failures) get(ctx context.Context, id FailureID) (Failure, error) {
	if err := id.check(); err != nil {
		return Failure{}, fmt.Errorf("outbox: read failure: %w", orNotMigrated(err))
	}
	row, err := tables.ScanFailure(f.db.QueryRow(ctx, f.sql.get, id.Number))
	if err != nil {
		return Failure{}, readError(id, err)
	}
	return failureOf(row), nil
}

func readError(id FailureID, err error) error {
	if errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("outbox: failure %v: %w", id, ErrNotFound)
	}
	return fmt.Errorf("outbox: read failure %v: %w", id, orNotMigrated(err))
}
