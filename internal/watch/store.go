package watch

import (
	"context"
	"fmt"
	"time"

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
}

// store is the Store of a database.
type store struct {
	db                       *pgxpool.Pool
	relays, died, unresolved string
}

// NewStore returns the store of a schema.
func NewStore(db *pgxpool.Pool, schema string) Store {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return &store{db: db, relays: in(tables.SQLRelays), died: in(sqlDeadSince), unresolved: in(tables.SQLFailureCount)}
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

// sqlDeadSince reads the events that have died since $1 and are not among $3.
const sqlDeadSince = `
SELECT ` + tables.FailureColumns + `
  FROM {schema}.outbox_failed
 WHERE status = 'dead' AND next_retry_at >= $1 AND ($2::text = '' OR relay = $2) AND id <> ALL ($3::bigint[])
 ORDER BY next_retry_at, id LIMIT $4`

func (s *store) Died(ctx context.Context, since time.Time, relay string, known []int64, limit int) ([]tables.Failure, error) {
	rows, err := s.db.Query(ctx, s.died, since, relay, known, limit)
	if err == nil {
		var died []tables.Failure
		if died, err = tables.CollectFailures(rows); err == nil {
			return died, nil
		}
	}
	return nil, fmt.Errorf("read dead events: %w", err)
}

func (s *store) Unresolved(ctx context.Context, relay string) ([]tables.FailureCount, error) {
	counts, err := tables.CountFailures(ctx, s.db, s.unresolved, tables.FailureFilter{Relay: relay, Statuses: []string{"waiting", "failed", "dead"}})
	if err != nil {
		return nil, fmt.Errorf("count failed events: %w", err)
	}
	return counts, nil
}
