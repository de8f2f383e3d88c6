package outboxops

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox"
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
	// DeliveryDone means that the delivery was handled.
	DeliveryDone = "DONE"
	// DeliveryDead: it is not tried again unless an operator requeues it.
	DeliveryDead = "DEAD"
)

// unfinished are the statuses of deliveries that must still be handled or need a decision.
var unfinished = []string{DeliveryPending, DeliveryParked, DeliveryProcessing, DeliveryDead}

// Deliveries counts the deliveries of consumer groups, and shows the groups of workers, which get their
// events from PostgreSQL. Each delivery is a [Failure] of kind [KindDelivery], whether an attempt has
// failed or not. It is safe for concurrent use.
type Deliveries struct {
	db                    *pgxpool.Pool
	rows                  tables.DeliveryReader
	groups                tables.GroupReader
	sqlGroups, sqlCursors string
}

// DeliveriesConfig names the schema of the tables. It may be zero.
type DeliveriesConfig struct {
	// Schema holds the tables of outbox. Empty means public.
	Schema string
}

// NewDeliveries returns a view of the deliveries in db. It does no I/O; closing db stays with
// the caller.
func NewDeliveries(db *pgxpool.Pool, cfg DeliveriesConfig) (*Deliveries, error) {
	if err := checkDB(db, &cfg.Schema); err != nil {
		return nil, fmt.Errorf("outbox: deliveries config: %w", err)
	}
	return &Deliveries{db: db, rows: tables.NewDeliveryReader(db, cfg.Schema), groups: tables.NewGroupReader(db, cfg.Schema),
		sqlGroups: pg.InSchema(sqlDeliveryGroups, cfg.Schema), sqlCursors: pg.InSchema(tables.SQLPositions, cfg.Schema)}, nil
}

// DeliveryFilter picks the deliveries to count. Empty fields pick all.
type DeliveryFilter struct {
	// Group, Stream and Action are the group, the stream and the action of the delivery.
	Group, Stream, Action string
	// Statuses are the statuses to count. Empty means all except [DeliveryDone], which is not counted.
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

// DeliveryCount is the number of deliveries with the same group, stream, action and status.
type DeliveryCount struct {
	// Group, Stream, Action and Status are shared by the counted deliveries.
	Group, Stream, Action, Status string
	// Deliveries is the number of deliveries, up to [outbox.MaxCounted]. Deliveries that are with workers, of all
	// groups, are read up to 100,000. If More is set, there may be more.
	Deliveries int
	// More is described at Deliveries.
	More bool
	// Held is the number of the counted ones that hold their keys. Only dead deliveries do.
	Held int
	// Oldest is the time at which the oldest of them was made.
	Oldest time.Time
	// Due is, for pending deliveries, the earliest due time. For deliveries with a worker, it is the
	// earliest time at which another worker can take one. It is zero for other statuses.
	Due time.Time
}

// Count returns the numbers of deliveries by group, stream, action and status, sorted by these. Done and
// resolved deliveries are not counted. Count is quick, however many rows are kept or wait.
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

// DeliveryGroup is a consumer group that workers have run for, with its position.
type DeliveryGroup struct {
	// Group is its name.
	Group string
	// CreatedAt is the time at which the first worker of the group ran.
	CreatedAt time.Time
	// State is the source of its events, and ChangedAt the time since when.
	State SubscriptionState
	// Relay is the relay of the cut; empty for an active group.
	Relay string
	// ChangedAt is described at State.
	ChangedAt time.Time
	// Pending is the number of committed events behind the position of the group. They have no deliveries
	// yet, because workers take no more than they have room for. They are counted up to 100,000;
	// PendingMore is set if there are more.
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
	all, err := pg.Collect(ctx, d.db, func(row pgx.CollectableRow) (g DeliveryGroup, err error) {
		return g, row.Scan(&g.Group, pg.Time{At: &g.CreatedAt}, &g.State, &g.Relay, pg.Time{At: &g.ChangedAt})
	}, d.sqlGroups)
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

// Waiting counts what a group still has to handle, or each group for "", by action, topic and status, wherever it
// waits:
//
//   - pending: committed events that no worker has looked at, up to 100,000; without an action and a topic
//   - waiting, failed, parked and dead: deliveries, of which up to [outbox.MaxCounted] of each action, topic and status
//     are read
//   - missed: offsets that an action lacks, because members of the group without it have read them, up to the position
//     that the group has saved last
//
// Records that the group has not read are the lag, see [Consumers.Lag].
func (d *Deliveries) Waiting(ctx context.Context, group string) ([]outbox.EventCount, error) {
	counts, err := d.groups.Waiting(ctx, group, outbox.MaxCounted)
	if err == nil {
		var missed []tables.EventCount
		missed, err = d.groups.Missed(ctx, group)
		counts = append(counts, missed...)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: count what waits: %w", orNotMigrated(err))
	}
	workers, err := d.Groups(ctx)
	if err != nil {
		return nil, err
	}
	var all []outbox.EventCount
	for _, c := range counts {
		all = append(all, outbox.EventCount(c))
	}
	for _, g := range workers {
		if g.Pending > 0 && g.State != SubscriptionLeft && (group == "" || g.Group == group) {
			all = append(all, outbox.EventCount{Group: g.Group, Status: tables.StatusPending, Events: int(g.Pending), More: g.PendingMore, Oldest: g.Oldest})
		}
	}
	return all, nil
}
