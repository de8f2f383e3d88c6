package delivery_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

const (
	group  = "trading"
	action = "ORDER_SENT"
	stream = "orders"
)

// tableFixture is a schema with the tables of outbox.
type tableFixture struct {
	t      *testing.T
	db     *pgxpool.Pool
	schema string
}

func newTable(t *testing.T) *tableFixture {
	db, schema := testenv.Migrated(t)
	return &tableFixture{t, db, schema}
}

func (f *tableFixture) store(worker string, lease time.Duration) *delivery.Store {
	return delivery.NewStore(f.db, f.schema, group, worker, lease)
}

// record inserts events of the keys into outbox, and returns their ids.
func (f *tableFixture) record(keys ...string) (ids []int64) {
	for _, key := range keys {
		var id int64
		require.NoError(f.t, f.db.QueryRow(f.t.Context(), pg.InSchema(`
			INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, headers, occurred_at)
			VALUES ($1, 'a.order.sent.v1', '/test', 'Order', $2, '{"n": 1}', 'application/json', $3, '{"a":"b"}', now()) RETURNING id`, f.schema),
			uuid.New(), key, stream).Scan(&id))
		ids = append(ids, id)
	}
	return ids
}

// insert inserts deliveries of events, and returns the deliveries that the worker has claimed.
func (f *tableFixture) insert(s *delivery.Store, status delivery.Status, ids []int64, keys ...string) (claimed []delivery.Delivery) {
	rows := make([]delivery.New, len(ids))
	for i, id := range ids {
		rows[i] = delivery.New{OutboxID: id, Action: action, Stream: stream, Key: delivery.KeyOf(group, action, stream, keys[i]), Status: status, MaxAttempts: 3}
	}
	require.NoError(f.t, delivery.Transact(f.t.Context(), f.db, func(b *pgx.Batch) {
		s.Queue(b, rows, room, func(d []delivery.Delivery) error { claimed = d; return nil })
	}))
	return claimed
}

// rows returns the status of all rows, as "position-in-ids:status attempts", in their order.
func (f *tableFixture) rows() (all []string) {
	rows, err := f.db.Query(f.t.Context(), pg.InSchema(`SELECT aggregate_id || ' ' || status || ' ' || attempt_count FROM {schema}.event_delivery ORDER BY position`, f.schema))
	require.NoError(f.t, err)
	all, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(f.t, err)
	return all
}

// room is a budget that exceeds the payloads of all tests.
const room = 1 << 30

// eventType is the type of the events of all tests.
const eventType = "a.order.sent.v1"

var pairs = []delivery.Claimable{{Pair: delivery.Pair{Action: action, Stream: stream}, Types: []string{eventType}}}

func ids(all []delivery.Delivery) (ids []int64) {
	for _, d := range all {
		ids = append(ids, d.ID)
	}
	return ids
}

func refs(all []delivery.Delivery) (refs []delivery.Ref) {
	for _, d := range all {
		refs = append(refs, d.Ref)
	}
	return refs
}

func keys(all []delivery.Delivery) (keys []delivery.Key) {
	for _, d := range all {
		keys = append(keys, d.Key)
	}
	return keys
}

func TestLifeOfDeliveries(t *testing.T) {
	t.Parallel()
	f, ctx := newTable(t), t.Context()
	a, b := f.store("a", time.Minute), f.store("b", time.Minute)
	require.NoError(t, a.Check(ctx))

	run := f.insert(a, delivery.Processing, f.record("k", "k", "other"), "k", "k", "other")
	require.Len(t, run, 3, "a free key is with the worker that inserts, with all that follows")
	require.JSONEq(t, `{"n": 1}`, string(run[0].Payload))
	require.JSONEq(t, `{"a": "b"}`, string(run[0].Headers))
	require.Empty(t, f.insert(b, delivery.Processing, f.record("k", "k"), "k", "k"), "its key is with a")
	require.Equal(t, []string{"k PROCESSING 1", "k PROCESSING 1", "other PROCESSING 1", "k PARKED 0", "k PARKED 0"}, f.rows())

	promoted, err := a.Fail(ctx, delivery.Failure{Of: run[0], Code: "handler", Message: "no", Wait: time.Hour}, run[1:2])
	require.NoError(t, err)
	require.Zero(t, promoted)
	require.Equal(t, []string{"k PENDING 1", "k PARKED 0", "other PROCESSING 1", "k PARKED 0", "k PARKED 0"}, f.rows())
	claimed, err := b.Claim(ctx, pairs, 10, 10, false, room)
	require.NoError(t, err)
	require.Empty(t, claimed, "not due")
	f.exec(`UPDATE {schema}.event_delivery SET next_retry_at = now() WHERE status = 'PENDING'`)
	claimed, err = b.Claim(ctx, pairs, 10, 10, false, room)
	require.NoError(t, err)
	require.Len(t, claimed, 1, "what has failed is tried alone")
	require.Equal(t, 2, claimed[0].Attempt)
	var set, before bool
	require.NoError(t, f.db.QueryRow(ctx, pg.InSchema(`
		SELECT starts_with(locked_by, 'b/') AND locked_until > now() + interval '50 s' AND last_attempt_at > created_at AND updated_at >= last_attempt_at,
		       last_error_code = 'handler' AND last_error_message = 'no' AND processed_at IS NULL
		  FROM {schema}.event_delivery WHERE id = $1`, f.schema), run[0].ID).Scan(&set, &before))
	require.True(t, set, "by the claim")
	require.True(t, before, "by the attempt before")

	promoted, err = b.Finish(ctx, claimed)
	require.NoError(t, err)
	require.EqualValues(t, 1, promoted)
	claimed, err = b.Claim(ctx, pairs, 10, 1, false, room)
	require.NoError(t, err)
	require.Len(t, claimed, 2, "the promoted row, and one behind it")
	_, err = a.Finish(ctx, run[1:2])
	require.ErrorIs(t, err, delivery.ErrLost)
	require.NoError(t, b.Release(ctx, claimed))
	require.Equal(t, []string{"k DONE 2", "k PENDING 0", "other PROCESSING 1", "k PARKED 0", "k PARKED 0"}, f.rows())
}

func TestWorkerIsGone(t *testing.T) {
	t.Parallel()
	f, ctx := newTable(t), t.Context()
	a, b := f.store("a", time.Millisecond), f.store("b", 24*365*time.Hour)
	run := f.insert(a, delivery.Processing, f.record("k", "k"), "k", "k")
	expired, err := b.TakeOver(ctx, 10, false)
	require.NoError(t, err)
	require.Empty(t, expired, "PostgreSQL has not run for long enough to know")
	b = f.store("b", time.Millisecond)
	expired, err = b.TakeOver(ctx, 10, false)
	require.NoError(t, err)
	require.Len(t, expired, 2)
	require.Equal(t, []string{"k PENDING 0", "k PARKED 0"}, f.rows(), "no handler is known to have begun")
	claimed, err := b.Claim(ctx, pairs, 10, 10, false, room)
	require.NoError(t, err)
	require.Empty(t, claimed, "a suspect is claimed by itself")
	for _, begins := range []bool{false, true, true, false, true} { // of three attempts
		claimed, err = b.Claim(ctx, pairs, 10, 10, true, room)
		require.NoError(t, err)
		require.Len(t, claimed, 1)
		require.Equal(t, run[0].ID, claimed[0].ID)
		_, err = a.Finish(ctx, run)
		require.ErrorIs(t, err, delivery.ErrLost)
		require.ErrorIs(t, a.Begin(ctx, run[:1]), delivery.ErrLost)
		if begins {
			require.NoError(t, b.Begin(ctx, claimed))
		}
		expired, err = b.TakeOver(ctx, 10, false)
		require.NoError(t, err)
		require.Len(t, expired, 1)
		require.Equal(t, claimed[0].Attempt, expired[0].Attempt)
	}
	require.True(t, expired[0].Dead)
	require.Equal(t, []string{"k DEAD 3", "k PENDING 0"}, f.rows())
	renewed, err := b.Renew(ctx, refs(claimed))
	require.NoError(t, err)
	require.Empty(t, renewed)
	f.exec(`UPDATE {schema}.event_delivery SET status = 'PARKED' WHERE status = 'PENDING'`)
	_, repaired, err := b.RepairHeads(ctx, -1<<63, 10)
	require.NoError(t, err)
	require.EqualValues(t, 1, repaired)
}

func (f *tableFixture) exec(sql string, args ...any) {
	_, err := f.db.Exec(context.Background(), pg.InSchema(sql, f.schema), args...)
	require.NoError(f.t, err, fmt.Sprint(sql))
}
