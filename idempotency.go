package outbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
)

// handledStore is the table event_handled, for one group, and the transactions that
// write to it.
type handledStore struct {
	db     *pgxpool.Pool
	group  string
	mark   string // sqlMark
	unmark string // sqlUnmark
	look   string // sqlLookHandled
}

func newHandledStore(db *pgxpool.Pool, schema, group string) *handledStore {
	return &handledStore{
		db: db, group: group,
		mark: pg.InSchema(sqlMark, schema), unmark: pg.InSchema(sqlUnmark, schema), look: pg.InSchema(sqlLookHandled, schema),
	}
}

// handledKey marks an action that is done.
type handledKey struct{ aggregateType, aggregateID, action string }

// sqlMark notes what is being done, and returns what was not done before. It waits
// where another transaction is about to do the same. Sorted keys keep two partitions
// from waiting for each other here; it cannot prevent that in what handlers lock.
const sqlMark = `
INSERT INTO {schema}.event_handled (consumer_group, aggregate_type, aggregate_id, action)
SELECT $1, t, i, a
  FROM unnest($2::varchar[], $3::varchar[], $4::varchar[]) AS k (t, i, a)
 ORDER BY t, i, a
    ON CONFLICT DO NOTHING
RETURNING aggregate_type, aggregate_id, action`

// markHandled implements transactor.
func (s *handledStore) markHandled(ctx context.Context, tx pgx.Tx, keys []handledKey) (map[handledKey]bool, error) {
	types, ids, actions := columnsOf(keys)
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

// sqlUnmark takes notes back, of the transaction that has made them.
const sqlUnmark = `
DELETE FROM {schema}.event_handled AS h
 USING unnest($2::varchar[], $3::varchar[], $4::varchar[]) AS k (t, i, a)
 WHERE h.consumer_group = $1 AND h.aggregate_type = k.t AND h.aggregate_id = k.i AND h.action = k.a`

// unmarkHandled implements transactor.
func (s *handledStore) unmarkHandled(ctx context.Context, tx pgx.Tx, keys []handledKey) error {
	types, ids, actions := columnsOf(keys)
	if _, err := tx.Exec(ctx, s.unmark, s.group, types, ids, actions); err != nil {
		return fmt.Errorf("take back notes of what is not handled: %w", err)
	}
	return nil
}

// columnsOf returns keys as the columns of a table.
func columnsOf(keys []handledKey) (types, ids, actions []string) {
	types, ids, actions = make([]string, len(keys)), make([]string, len(keys)), make([]string, len(keys))
	for i, k := range keys {
		types[i], ids[i], actions[i] = k.aggregateType, k.aggregateID, k.action
	}
	return types, ids, actions
}

// sqlLookHandled fails if the table does not exist, or lacks a column.
const sqlLookHandled = `SELECT consumer_group, aggregate_type, aggregate_id, action FROM {schema}.event_handled LIMIT 0`

// check reports why the table cannot be used.
func (s *handledStore) check(ctx context.Context) error {
	_, err := s.db.Exec(ctx, s.look)
	return err
}

// ping implements transactor.
func (s *handledStore) ping(ctx context.Context) error { return s.db.Ping(ctx) }

// connectionError is an error with which the connection to PostgreSQL was lost.
type connectionError struct {
	err         error
	unavailable bool // there was no connection to be had in the first place
}

func (e *connectionError) Error() string { return e.err.Error() }
func (e *connectionError) Unwrap() error { return e.err }

// inTx implements transactor.
func (s *handledStore) inTx(ctx context.Context, work *activity, f func(pgx.Tx) error) error {
	conn, err := pg.Borrow(ctx, s.db)
	if err != nil {
		return &connectionError{err: fmt.Errorf("begin: %w", err), unavailable: true}
	}
	defer conn.Return()
	if err := work.use(conn); err != nil {
		return err
	}
	defer work.release()
	tx, err := conn.Begin(ctx)
	if err != nil {
		return &connectionError{err: fmt.Errorf("begin: %w", err), unavailable: true}
	}
	if err = f(tx); err == nil {
		if err = tx.Commit(ctx); err != nil {
			err = fmt.Errorf("commit: %w", err)
		}
	}
	if err != nil && conn.IsClosed() {
		err = &connectionError{err: err}
	}
	if err != nil {
		// A rollback that fails closes the connection, and that rolls back.
		_ = tx.Rollback(ctx)
	}
	return err
}

// keyOf returns the key by which a repeat of a task is known.
func keyOf(t task) (handledKey, error) {
	k := handledKey{t.meta.Type, eventKey(t.meta), t.action}
	if t.key != nil {
		k.aggregateType, k.aggregateID = t.key(t.event, t.meta)
	}
	for _, part := range []struct {
		field, text string
		limit       int
	}{{"aggregate_type", k.aggregateType, maxAggregateType}, {"aggregate_id", k.aggregateID, maxAggregateID}} {
		if err := check.Text(part.text, part.limit); err != nil {
			return k, Permanent(&FieldError{EventType: t.meta.Type, Index: -1, Field: part.field, Err: fmt.Errorf("of the key of %s %w", t.action, err)})
		}
	}
	return k, nil
}

// eventKey names an event in a column of limited length. A UUID is unique by itself,
// another id together with its source.
func eventKey(m Metadata) string {
	if _, err := uuid.Parse(m.ID); err == nil {
		return m.ID
	}
	key := m.Source + " " + m.ID
	if utf8.RuneCountInString(key) <= maxAggregateID && check.Text(key, math.MaxInt) == nil {
		return key
	}
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}
