package outboxops

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// Statuses of rows of event_delivery, which [Deliveries.Count] counts.
const (
	// DeliveryPending: it is due at NextRetryAt.
	DeliveryPending = "PENDING"
	// DeliveryParked: it waits behind another delivery of its key.
	DeliveryParked = "PARKED"
	// DeliveryProcessing: a worker has it.
	DeliveryProcessing = "PROCESSING"
	// DeliveryDone: it was handled.
	DeliveryDone = "DONE"
	// DeliveryDead: it is not tried again unless an operator requeues it.
	DeliveryDead = "DEAD"
)

// unfinished are the statuses of what has yet to be handled or needs a decision.
var unfinished = []string{DeliveryPending, DeliveryParked, DeliveryProcessing, DeliveryDead}

// Deliveries counts what is owed to the handlers of consumer groups, and shows the groups of
// workers, which get their events from PostgreSQL. Each delivery is a [Failure] of kind
// [KindDelivery], whether an attempt has failed or not. It is safe for concurrent use.
type Deliveries struct {
	db                    *pgxpool.Pool
	rows                  tables.DeliveryReader
	sqlGroups, sqlCursors string
}

// DeliveriesConfig says where the deliveries are. It may be zero.
type DeliveriesConfig struct {
	// Schema of the tables. Empty means public.
	Schema string
}

// NewDeliveries returns a view of the deliveries in db. It does no I/O; closing db stays with
// the caller.
func NewDeliveries(db *pgxpool.Pool, cfg DeliveriesConfig) (*Deliveries, error) {
	if err := checkDB(db, &cfg.Schema); err != nil {
		return nil, fmt.Errorf("outbox: deliveries config: %w", err)
	}
	return &Deliveries{db: db, rows: tables.NewDeliveryReader(db, cfg.Schema),
		sqlGroups: pg.InSchema(sqlDeliveryGroups, cfg.Schema), sqlCursors: pg.InSchema(tables.SQLPositions, cfg.Schema)}, nil
}

// DeliveryFilter picks the deliveries to count. Empty fields pick all.
type DeliveryFilter struct {
	// Group, Stream and Action are those of the delivery.
	Group, Stream, Action string
	// Statuses are those that count. Empty means all but [DeliveryDone], which is not counted.
	Statuses []string
}

func (f DeliveryFilter) rows() (tables.DeliveryFilter, error) {
	for _, s := range f.Statuses {
		if !slices.Contains(unfinished, s) {
			return tables.DeliveryFilter{}, fmt.Errorf("field Statuses: %.20q is not counted: want %s", s, strings.Join(unfinished, ", "))
		}
	}
	picked := f.Statuses
	if len(picked) == 0 {
		picked = unfinished
	}
	return tables.DeliveryFilter{Group: f.Group, Stream: f.Stream, Action: f.Action, Statuses: picked}, nil
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
// and however many wait.
func (d *Deliveries) Count(ctx context.Context, filter DeliveryFilter) ([]DeliveryCount, error) {
	picked, err := filter.rows()
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
	// Relay is the relay of the cut; empty for an active group.
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
	rows, err := d.db.Query(ctx, d.sqlGroups)
	if err == nil {
		all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (g DeliveryGroup, err error) {
			return g, row.Scan(&g.Group, pg.Time{At: &g.CreatedAt}, &g.State, &g.Relay, pg.Time{At: &g.ChangedAt})
		})
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: list groups of workers: %w", orNotMigrated(err))
	}
	cursors, err := tables.Groups(ctx, d.db, d.sqlCursors)
	if err != nil {
		return nil, fmt.Errorf("outbox: list groups of workers: %w", orNotMigrated(err))
	}
	for i := range all {
		c := cursors[all[i].Group]
		all[i].Pending, all[i].PendingMore, all[i].Oldest, all[i].ProgressAt = c.Pending, c.PendingMore, c.Oldest, c.MovedAt
	}
	return all, nil
}
