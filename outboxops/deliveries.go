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

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// Statuses of a [Delivery].
const (
	// DeliveryPending: it is due at NextRetryAt.
	DeliveryPending = "PENDING"
	// DeliveryParked: it waits behind another delivery of its key.
	DeliveryParked = "PARKED"
	// DeliveryProcessing: a worker has it.
	DeliveryProcessing = "PROCESSING"
	// DeliveryDone: it was handled.
	DeliveryDone = "DONE"
	// DeliveryDead: it was given up, or an operator has resolved it.
	DeliveryDead = "DEAD"
)

// unfinished are the statuses of what has yet to be handled or needs a decision.
var unfinished = []string{DeliveryPending, DeliveryParked, DeliveryProcessing, DeliveryDead}

// Deliveries lists what is owed to the handlers of workers, which get their events from
// PostgreSQL, and lets operators decide about it. It only changes rows; a worker of the group
// handles what is requeued. Any process may have one. It is safe for concurrent use.
type Deliveries struct {
	db     *pgxpool.Pool
	rows   tables.DeliveryReader
	stored reader // of event_delivery
	audits auditReader
	sql    deliveriesSQL
}

// deliveriesSQL are the statements of [Deliveries], in their schema.
type deliveriesSQL struct{ get, groups, cursors, requeue, resolve, auditRead string }

// DeliveriesConfig says where the deliveries are. It may be zero.
type DeliveriesConfig struct {
	// Schema of the tables. Empty means public.
	Schema string
	// MaxRead bounds in bytes what is read of a payload, and of headers; a larger payload is
	// [ErrUnreadable]. Zero means 104,857,600 (100 MiB).
	MaxRead int
}

// NewDeliveries returns a view of the deliveries in db. It does no I/O; closing db stays with
// the caller.
func NewDeliveries(db *pgxpool.Pool, cfg DeliveriesConfig) (*Deliveries, error) {
	cfg.MaxRead = cmp.Or(cfg.MaxRead, maxRead)
	if err := errors.Join(checkDB(db, &cfg.Schema), check.NotNegative("MaxRead", cfg.MaxRead)); err != nil {
		return nil, fmt.Errorf("outbox: deliveries config: %w", err)
	}
	in := func(sql string) string { return pg.InSchema(sql, cfg.Schema) }
	return &Deliveries{
		db: db, rows: tables.NewDeliveryReader(db, cfg.Schema), stored: newReader(db, cfg.Schema, "event_delivery", cfg.MaxRead),
		audits: newAuditReader(db, cfg.Schema, cfg.MaxRead),
		sql:    deliveriesSQL{get: in(sqlDeliveryGet), groups: in(sqlDeliveryGroups), cursors: in(tables.SQLRelays), requeue: in(sqlRequeue), resolve: in(sqlResolveDeliveries), auditRead: in(sqlAuditReadDelivery)},
	}, nil
}

// Delivery is an event that is owed to a handler of a consumer group, or was.
type Delivery struct {
	// ID is the id of its row of event_delivery, the order within a key.
	ID int64
	// Group is the consumer group, and Action the handler that gets the event; Action is
	// empty where the group has no handler for the type.
	Group, Action string
	// Stream is the topic that the event has in Kafka, and Key its record key.
	Stream, Key string
	// Status is one of the constants, [DeliveryDead] for example.
	Status string
	// Held is set for a dead one whose key waits for an operator.
	Held bool
	// Attempts is how often a worker has taken it, and MaxAttempts after how many attempts it
	// is dead.
	Attempts, MaxAttempts int
	// NextRetryAt is when a pending one is due.
	NextRetryAt time.Time
	// LastAttemptAt is when a worker took it last; zero if none has.
	LastAttemptAt time.Time
	// LockedBy is the worker that has it, and LockedUntil the time until which it has it
	// unless it renews that. They are zero unless the status is [DeliveryProcessing].
	LockedBy string
	// LockedUntil is described at LockedBy.
	LockedUntil time.Time
	// ErrorCode is the kind of the last error, timeout for example, and Err its text.
	ErrorCode string
	// Err is described at ErrorCode; nil if no attempt has failed.
	Err error
	// CreatedAt is when the row was made, UpdatedAt when its status changed last, and
	// ProcessedAt when it became done or dead; that is zero until then.
	CreatedAt, UpdatedAt, ProcessedAt time.Time
	// Resolution is resolved where an operator has closed it, else empty. ResolvedBy and Note
	// say who and why, and ResolvedAt when.
	Resolution, ResolvedBy, Note string
	// ResolvedAt is described at Resolution.
	ResolvedAt time.Time

	// OutboxID is outbox.id of the event.
	OutboxID int64
	// EventID, Type, Source, AggregateType and AggregateID are the event's.
	EventID, Type, Source, AggregateType, AggregateID string
	// OccurredAt is when the event happened, RecordedAt when the transaction began that
	// recorded it.
	OccurredAt, RecordedAt time.Time
	// ContentType is that of Payload.
	ContentType string
	// Payload is the event; nil in lists, see [Deliveries.Get].
	Payload []byte
	// PayloadErr says why Payload could not be read; nil if it could, and in lists. It is
	// [ErrUnreadable].
	PayloadErr error
	// Headers are the further headers; nil in lists.
	Headers map[string]string
}

func deliveryOf(r tables.Delivery) Delivery {
	return Delivery{
		ID: r.ID, Group: r.Group, Action: r.Action, Stream: r.Stream, Key: r.Key, Status: r.Status, Held: r.Held,
		Attempts: r.Attempts, MaxAttempts: r.MaxAttempts, NextRetryAt: r.NextRetryAt, LastAttemptAt: r.LastAttemptAt,
		LockedBy: r.LockedBy, LockedUntil: r.LockedUntil, ErrorCode: r.ErrorCode, Err: r.Err,
		CreatedAt: r.CreatedAt, UpdatedAt: r.UpdatedAt, ProcessedAt: r.ProcessedAt,
		Resolution: r.Resolution, ResolvedBy: r.ResolvedBy, Note: r.Note, ResolvedAt: r.ResolvedAt,
		OutboxID: r.OutboxID, EventID: r.EventID, Type: r.Type, Source: r.Source, AggregateType: r.AggregateType, AggregateID: r.AggregateID,
		OccurredAt: r.OccurredAt, RecordedAt: r.RecordedAt, ContentType: r.ContentType,
	}
}

// DeliveryFilter picks deliveries. Empty fields pick all; the zero value picks what is
// neither done nor resolved.
type DeliveryFilter struct {
	// Group, Stream and Action are those of the delivery.
	Group, Stream, Action string
	// Statuses are those that count. Empty means all but [DeliveryDone].
	Statuses []string
	// Resolved picks what an operator has resolved instead of what nobody has.
	Resolved bool
	// Type is the CloudEvents type.
	Type string
	// ErrorCode is the kind of the last error.
	ErrorCode string
	// Key is the record key.
	Key string
	// EventID is the CloudEvents id of one event, a UUID.
	EventID string
	// Since and Until bound when the status changed last: from Since on, before Until.
	Since, Until time.Time
}

func (f DeliveryFilter) rows() (tables.DeliveryFilter, error) {
	for _, s := range f.Statuses {
		if s != DeliveryDone && !slices.Contains(unfinished, s) {
			return tables.DeliveryFilter{}, fmt.Errorf("field Statuses: %.20q is none: want %s or %s", s, strings.Join(unfinished, ", "), DeliveryDone)
		}
	}
	statuses := f.Statuses
	if len(statuses) == 0 {
		statuses = unfinished
	}
	return tables.DeliveryFilter{
		Group: f.Group, Stream: f.Stream, Action: f.Action, Statuses: statuses, Resolved: f.Resolved,
		Type: f.Type, ErrorCode: f.ErrorCode, Key: f.Key, EventID: f.EventID, Since: f.Since, Until: f.Until,
	}, nil
}

// DeliveryPage says which part of a list is wanted. The zero value is the first part.
type DeliveryPage struct {
	// After is the ID of the last delivery that is known. Zero means from the beginning.
	After int64
	// Limit is how many deliveries are returned at most, up to 1,000. Zero means 100.
	Limit int
}

// List returns deliveries without their payloads, those that were made last first. An empty
// slice means that there are no more.
//
// What is done costs nothing unless it is asked for by Statuses: then the table is walked from
// its newest row on, which takes long where few rows match and many are kept. Bound it by ctx.
func (d *Deliveries) List(ctx context.Context, filter DeliveryFilter, page DeliveryPage) ([]Delivery, error) {
	picked, filterErr := filter.rows()
	limit, pageErr := limitOf(page.Limit)
	if err := errors.Join(filterErr, check.NotNegative("After", page.After), pageErr); err != nil {
		return nil, fmt.Errorf("outbox: list deliveries: %w", err)
	}
	rows, err := d.rows.List(ctx, picked, page.After, limit)
	if err != nil {
		return nil, fmt.Errorf("outbox: list deliveries: %w", orNotMigrated(err))
	}
	all := make([]Delivery, len(rows))
	for i, r := range rows {
		all[i] = deliveryOf(r)
	}
	return all, nil
}

const sqlDeliveryGet = `
SELECT ` + tables.DeliveryColumns + `
  FROM {schema}.event_delivery AS d WHERE d.id = $1`

// Get returns a delivery, with its payload. It returns [ErrNotFound] if there is none:
// retention may have removed it.
func (d *Deliveries) Get(ctx context.Context, id int64) (Delivery, error) {
	delivery, err := d.get(ctx, id)
	if err != nil {
		return delivery, err
	}
	headers, err := d.stored.readHeaders(ctx, id)
	if err == nil {
		delivery.Headers = headersOf(headers)
		delivery.Payload, delivery.PayloadErr, err = d.stored.readPayload(ctx, id)
	}
	if err != nil {
		return Delivery{}, deliveryError("read", id, err)
	}
	return delivery, nil
}

// get returns a delivery without its payload and headers.
func (d *Deliveries) get(ctx context.Context, id int64) (Delivery, error) {
	rows, err := d.db.Query(ctx, d.sql.get, id)
	if err == nil {
		var row tables.Delivery
		if row, err = pgx.CollectExactlyOneRow(rows, tables.ScanDelivery); err == nil {
			return deliveryOf(row), nil
		}
	}
	return Delivery{}, deliveryError("read", id, err)
}

func deliveryError(action string, id int64, err error) error {
	if errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("outbox: delivery %d: %w", id, ErrNotFound)
	}
	return fmt.Errorf("outbox: %s delivery %d: %w", action, id, orNotMigrated(err))
}

// DeliveryCount is how many deliveries are alike.
type DeliveryCount struct {
	// Group, Stream, Action and Status are what they have in common.
	Group, Stream, Action, Status string
	// Deliveries is how many there are; [outbox.MaxCounted] stands for more, too. Of what is
	// with workers all are counted, up to 100,000.
	Deliveries int
	// Held is how many of them hold their keys.
	Held int
	// Oldest is when the first of them was made.
	Oldest time.Time
	// Due is when the first pending one was or is due, and when the first one that is with a
	// worker can be taken by another; zero for other statuses.
	Due time.Time
}

// Count returns how many deliveries there are, by group, stream, action and status, and sorted
// by these. What is done or resolved is not counted. It is quick however many rows are kept,
// and however many wait, unless the filter has Type, ErrorCode, Key, EventID, Since or Until:
// then PostgreSQL searches all that wait.
func (d *Deliveries) Count(ctx context.Context, filter DeliveryFilter) ([]DeliveryCount, error) {
	picked, err := filter.rows()
	if err == nil && (filter.Resolved || slices.Contains(filter.Statuses, DeliveryDone)) {
		err = errors.New("what is done or resolved is not counted")
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: count deliveries: %w", err)
	}
	rows, err := d.rows.Count(ctx, picked)
	if err != nil {
		return nil, fmt.Errorf("outbox: count deliveries: %w", orNotMigrated(err))
	}
	counts := make([]DeliveryCount, len(rows))
	for i, r := range rows {
		counts[i] = DeliveryCount(r)
	}
	return counts, nil
}

// DeliveryGroup is a consumer group that workers have run for, and how far it has come.
type DeliveryGroup struct {
	// Group is its name.
	Group string
	// CreatedAt is when the first worker of it ran.
	CreatedAt time.Time
	// State says from where it gets its events, and ChangedAt since when.
	State SubscriptionState
	// Relay is that of the cut; empty for an active group.
	Relay string
	// ChangedAt is described at State.
	ChangedAt time.Time
	// Pending is how many committed events are behind its position: there are no deliveries of
	// them yet, because workers take no more than they have room for. They are counted up to
	// 100,000; PendingMore is set if there are more.
	Pending int64
	// PendingMore is described at Pending.
	PendingMore bool
	// Oldest is when the transaction of the first of them began; zero if there is none.
	Oldest time.Time
	// ProgressAt is when its position moved last.
	ProgressAt time.Time
}

const sqlDeliveryGroups = `
SELECT consumer_group, created_at, state, coalesce(relay, ''), changed_at FROM {schema}.event_subscription ORDER BY consumer_group`

// Groups returns the groups that workers have run for, sorted by name.
func (d *Deliveries) Groups(ctx context.Context) ([]DeliveryGroup, error) {
	var all []DeliveryGroup
	rows, err := d.db.Query(ctx, d.sql.groups)
	if err == nil {
		all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (g DeliveryGroup, err error) {
			return g, row.Scan(&g.Group, pg.Time{At: &g.CreatedAt}, &g.State, &g.Relay, pg.Time{At: &g.ChangedAt})
		})
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: list groups of workers: %w", orNotMigrated(err))
	}
	cursors, err := tables.Groups(ctx, d.db, d.sql.cursors)
	if err != nil {
		return nil, fmt.Errorf("outbox: list groups of workers: %w", orNotMigrated(err))
	}
	for i := range all {
		c := cursors[all[i].Group]
		all[i].Pending, all[i].PendingMore, all[i].Oldest, all[i].ProgressAt = c.Pending, c.PendingMore, c.Oldest, c.MovedAt
	}
	return all, nil
}
