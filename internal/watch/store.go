package watch

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// Store is what a [Watch] reads.
type Store interface {
	// Now is the time of the database.
	Now(ctx context.Context) (time.Time, error)
	// Positions are all relays of the schema and all groups, sorted by name.
	Positions(ctx context.Context) (tables.Positions, error)
	// Died returns events that have died since a time, those that died first at the
	// beginning. Relay is the name of one; empty means all. Known are the rows that it
	// leaves out.
	Died(ctx context.Context, since time.Time, relay string, known []int64, limit int) ([]tables.Failure, error)
	// DiedDeliveries does the same for the deliveries of all groups.
	DiedDeliveries(ctx context.Context, since time.Time, known []int64, limit int) ([]tables.Delivery, error)
	// Dead counts by type what needs a decision, of all relays and groups.
	Dead(ctx context.Context) ([]tables.EventCount, error)
	// Unresolved counts also events and deliveries that are retried.
	Unresolved(ctx context.Context) ([]tables.EventCount, error)
	// Stale counts by type the events that were recorded before a time and wait, up to limit of a
	// kind.
	Stale(ctx context.Context, before time.Time, of tables.Owners, limit int) ([]tables.EventCount, error)
	// Lost returns what consumer groups have found since a time to be removed unread.
	Lost(ctx context.Context, since time.Time) ([]LostRecords, error)
}

// LostRecords are records of a topic that Kafka had removed before a group read them, or has lost: how
// many so far, and when the group last found some.
type LostRecords struct {
	Group, Topic string
	Records      int64
	At           time.Time
}

// store is the Store of a database.
type store struct {
	db                                    *pgxpool.Pool
	positions, died, diedDeliveries, lost string
	types                                 tables.TypeCounter
}

// NewStore returns the store of a schema.
func NewStore(db *pgxpool.Pool, schema string) Store {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return &store{
		db: db, positions: in(tables.SQLRelays), died: in(tables.SQLDeaths), diedDeliveries: in(tables.SQLDeliveryDeaths), lost: in(sqlLostSince),
		types: tables.NewTypeCounter(db, schema),
	}
}

func (s *store) Now(ctx context.Context) (now time.Time, err error) {
	if err := pg.QueryRow(ctx, s.db, pg.SQLNow).Scan(&now); err != nil {
		return now, fmt.Errorf("ask the time: %w", err)
	}
	return now, nil
}

func (s *store) Positions(ctx context.Context) (tables.Positions, error) {
	positions, err := tables.ReadPositions(ctx, s.db, s.positions)
	if err != nil {
		return tables.Positions{}, fmt.Errorf("read relays: %w", err)
	}
	return positions, nil
}

func (s *store) Died(ctx context.Context, since time.Time, relay string, known []int64, limit int) (died []tables.Failure, err error) {
	err = pg.Query(ctx, s.db, pg.PlannerSettings, func(rows pgx.Rows) (err error) {
		died, err = tables.CollectFailures(rows)
		return err
	}, s.died, since, relay, known, limit)
	if err != nil {
		return nil, fmt.Errorf("read dead events: %w", err)
	}
	return died, nil
}

func (s *store) DiedDeliveries(ctx context.Context, since time.Time, known []int64, limit int) (died []tables.Delivery, err error) {
	err = pg.Query(ctx, s.db, pg.PlannerSettings, func(rows pgx.Rows) (err error) {
		died, err = pgx.CollectRows(rows, tables.ScanDelivery)
		return err
	}, s.diedDeliveries, since, known, limit)
	if err != nil {
		return nil, fmt.Errorf("read dead deliveries: %w", err)
	}
	return died, nil
}

func (s *store) Dead(ctx context.Context) ([]tables.EventCount, error) { return s.failed(ctx, "dead") }

func (s *store) Unresolved(ctx context.Context) ([]tables.EventCount, error) {
	return s.failed(ctx, "waiting", "failed", "parked", "dead")
}

// failed counts failed events with some statuses, and dead deliveries.
func (s *store) failed(ctx context.Context, statuses ...string) (events []tables.EventCount, err error) {
	if len(statuses) > 0 {
		if events, err = s.types.FailedEvents(ctx, statuses...); err != nil {
			return nil, fmt.Errorf("count failed events: %w", err)
		}
	}
	deliveries, err := s.types.DeadDeliveries(ctx)
	if err != nil {
		return nil, fmt.Errorf("count dead deliveries: %w", err)
	}
	return append(events, deliveries...), nil
}

func (s *store) Stale(ctx context.Context, before time.Time, of tables.Owners, limit int) ([]tables.EventCount, error) {
	counts, err := s.types.Stale(ctx, before, of, limit)
	if err != nil {
		return nil, fmt.Errorf("count what waits for too long: %w", err)
	}
	return counts, nil
}

// consumerStore is the Store of a process that works for consumer groups: it reads nothing about
// failed events of relays, to which it has no right.
type consumerStore struct{ *store }

// NewConsumerStore returns the store of a schema for a consumer that has the lease of its group.
func NewConsumerStore(db *pgxpool.Pool, schema string) Store { return newConsumerStore(db, schema) }

func newConsumerStore(db *pgxpool.Pool, schema string) consumerStore {
	s := NewStore(db, schema).(*store)
	s.positions = pg.InSchema(tables.SQLPositions, schema)
	return consumerStore{s}
}

// workerStore does not read where groups read in Kafka either: a worker has no right to that.
type workerStore struct{ consumerStore }

// NewWorkerStore returns the store of a schema for a worker that has the lease of its group.
func NewWorkerStore(db *pgxpool.Pool, schema string) Store {
	return workerStore{newConsumerStore(db, schema)}
}

// Dead counts deliveries only.
func (s consumerStore) Dead(ctx context.Context) ([]tables.EventCount, error) { return s.failed(ctx) }

// Unresolved counts deliveries only.
func (s consumerStore) Unresolved(ctx context.Context) ([]tables.EventCount, error) {
	return s.Dead(ctx)
}

// Lost returns nothing.
func (workerStore) Lost(context.Context, time.Time) ([]LostRecords, error) { return nil, nil }

// sqlLostSince reads which groups have found since $1 that records are lost. The table has
// a row for each group and partition.
const sqlLostSince = `
SELECT consumer_group, topic, least(sum(lost), 9223372036854775807)::bigint, max(lost_at)
  FROM {schema}.consumer_start
 WHERE lost > 0
 GROUP BY consumer_group, topic
HAVING max(lost_at) >= $1
 ORDER BY 1, 2`

func (s *store) Lost(ctx context.Context, since time.Time) ([]LostRecords, error) {
	lost, err := pg.Collect(ctx, s.db, scanLost, s.lost, since)
	if err != nil {
		return nil, fmt.Errorf("read lost records: %w", err)
	}
	return lost, nil
}

func scanLost(row pgx.CollectableRow) (l LostRecords, err error) {
	err = row.Scan(&l.Group, &l.Topic, &l.Records, pg.Time{At: &l.At})
	return l, err
}
