package pauses

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
)

// Store is the table consumer_pause, for one group.
type Store struct {
	db         *pgxpool.Pool
	group, sql string
}

// NewStore returns the store of a group. It does no I/O.
func NewStore(db *pgxpool.Pool, schema, group string) *Store {
	return &Store{db: db, group: group, sql: pg.InSchema(sqlRead, schema)}
}

// sqlRead reads the pauses of a group, which are few.
const sqlRead = `
SELECT topic, operator, reason, paused_at, clock_timestamp()
  FROM {schema}.consumer_pause
 WHERE consumer_group = $1
 ORDER BY topic`

// Read returns what operators have paused, sorted by topic.
func (s *Store) Read(ctx context.Context) ([]Pause, error) {
	all, err := pg.Collect(ctx, s.db, scanPause, s.sql, s.group)
	if err != nil {
		return nil, fmt.Errorf("read what is paused: %w", err)
	}
	return all, nil
}

func scanPause(row pgx.CollectableRow) (p Pause, err error) {
	var now time.Time
	err = row.Scan(&p.Topic, &p.Operator, &p.Reason, &p.At, &now)
	p.Clock = pg.ClockAt(now)
	return p, err
}
