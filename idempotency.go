package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
)

// handledStore is the table event_handled, for one group.
type handledStore struct {
	db    *pgxpool.Pool
	group string
	mark  string
	look  string
}

func newHandledStore(db *pgxpool.Pool, schema, group string) *handledStore {
	return &handledStore{db: db, group: group, mark: pg.InSchema(sqlMark, schema), look: pg.InSchema(sqlLookHandled, schema)}
}

// handledKey marks an action that is done.
type handledKey struct{ aggregateType, aggregateID, action string }

// sqlMark notes what is being done, and returns what nobody has done before. It
// waits where another transaction is about to do the same. Sorted keys keep two
// partitions from waiting for each other here; what handlers lock is theirs.
const sqlMark = `
INSERT INTO {schema}.event_handled (consumer_group, aggregate_type, aggregate_id, action)
SELECT $1, t, i, a
  FROM unnest($2::varchar[], $3::varchar[], $4::varchar[]) AS k (t, i, a)
 ORDER BY t, i, a
    ON CONFLICT DO NOTHING
RETURNING aggregate_type, aggregate_id, action`

// begin notes keys as done in tx, which the caller commits with the effect. It
// returns those that are new, without repeats.
func (s *handledStore) begin(ctx context.Context, tx pgx.Tx, keys []handledKey) (map[handledKey]bool, error) {
	types, ids, actions := make([]string, len(keys)), make([]string, len(keys)), make([]string, len(keys))
	for i, k := range keys {
		types[i], ids[i], actions[i] = k.aggregateType, k.aggregateID, k.action
	}
	rows, err := tx.Query(ctx, s.mark, s.group, types, ids, actions)
	if err != nil {
		return nil, fmt.Errorf("note what is handled: %w", err)
	}
	fresh := make(map[handledKey]bool, len(keys))
	var k handledKey
	_, err = pgx.ForEachRow(rows, []any{&k.aggregateType, &k.aggregateID, &k.action}, func() error {
		fresh[k] = true
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("note what is handled: %w", err)
	}
	return fresh, nil
}

// sqlLookHandled fails where the table is not there.
const sqlLookHandled = `SELECT FROM {schema}.event_handled LIMIT 0`

func (s *handledStore) check(ctx context.Context) error {
	_, err := s.db.Exec(ctx, s.look)
	return err
}
