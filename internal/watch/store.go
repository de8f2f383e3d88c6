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
	// Relays are all relays of the schema, sorted by name.
	Relays(ctx context.Context) ([]tables.Relay, error)
	// Died returns events that have died since a time, those that died first at the
	// beginning. Relay is the name of one; empty means all. Known are the rows that it
	// leaves out.
	Died(ctx context.Context, since time.Time, relay string, known []int64, limit int) ([]tables.Failure, error)
	// Unresolved counts what needs a decision or is tried again, of a relay or of all.
	Unresolved(ctx context.Context, relay string) ([]tables.FailureCount, error)
	// Lost returns what consumer groups have found since a time to be removed unread.
	Lost(ctx context.Context, since time.Time) ([]LostRecords, error)
}

// LostRecords are records of a topic that Kafka had removed before a group read them: how
// many so far, and when the group last found some.
type LostRecords struct {
	Group, Topic string
	Records      int64
	At           time.Time
}

// store is the Store of a database.
type store struct {
	db                 *pgxpool.Pool
	relays, died, lost string
	failures           tables.FailureCounter
}

// NewStore returns the store of a schema.
func NewStore(db *pgxpool.Pool, schema string) Store {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return &store{
		db: db, relays: in(tables.SQLRelays), died: in(tables.SQLDeaths), lost: in(sqlLostSince),
		failures: tables.NewFailureCounter(db, schema),
	}
}

func (s *store) Now(ctx context.Context) (now time.Time, err error) {
	if err := s.db.QueryRow(ctx, `SELECT now()`).Scan(&now); err != nil {
		return now, fmt.Errorf("ask the time: %w", err)
	}
	return now, nil
}

func (s *store) Relays(ctx context.Context) ([]tables.Relay, error) {
	relays, err := tables.Relays(ctx, s.db, s.relays)
	if err != nil {
		return nil, fmt.Errorf("read relays: %w", err)
	}
	return relays, nil
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

func (s *store) Unresolved(ctx context.Context, relay string) ([]tables.FailureCount, error) {
	counts, err := s.failures.Count(ctx, tables.FailureFilter{Relay: relay, Statuses: []string{"waiting", "failed", "dead"}})
	if err != nil {
		return nil, fmt.Errorf("count failed events: %w", err)
	}
	return counts, nil
}

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
	rows, err := s.db.Query(ctx, s.lost, since)
	if err == nil {
		var lost []LostRecords
		if lost, err = pgx.CollectRows(rows, scanLost); err == nil {
			return lost, nil
		}
	}
	return nil, fmt.Errorf("read lost records: %w", err)
}

func scanLost(row pgx.CollectableRow) (l LostRecords, err error) {
	err = row.Scan(&l.Group, &l.Topic, &l.Records, pg.Time{At: &l.At})
	return l, err
}
