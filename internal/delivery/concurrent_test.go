package delivery_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Several workers insert, claim, finish, fail, release and lose rows at the same time. Leases are short,
// connections are killed, transactions are rolled back, and operators requeue and resolve rows. In every
// snapshot, each key has at most one worker, and its rows are in order. At the end each row was handled
// once.
func TestConcurrentHistories(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	seeds := 3
	if testing.Short() {
		seeds = 1
	}
	for seed := range seeds {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			c := newCrowd(t)
			var busy sync.WaitGroup
			for n := range crowdWorkers {
				busy.Go(func() { newCrowdWorker(c, n, rand.New(rand.NewPCG(uint64(seed), uint64(n)))).run() })
			}
			ended := make(chan struct{})
			go func() { defer close(ended); busy.Wait() }()
			c.watch(ended, rand.New(rand.NewPCG(uint64(seed), 1<<32)))
			c.drain()
			c.requireHandledOnce()
		})
	}
}

const (
	crowdWorkers = 6
	crowdSteps   = 120
	crowdEvents  = crowdWorkers * crowdSteps * 4
	crowdKeys    = 9
	crowdLease   = 250 * time.Millisecond
)

// crowd is several workers and the table that they share.
type crowd struct {
	*tableFixture
	pool *pgxpool.Pool // its connections are killed
	name string        // of the pool
	next atomic.Int64  // outbox.id
}

func newCrowd(t *testing.T) *crowd {
	testenv.Direct(t) // application_name
	c := &crowd{tableFixture: newTable(t)}
	c.name = c.schema
	c.pool = testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.MaxConns = 3 * crowdWorkers
		cfg.ConnConfig.RuntimeParams["application_name"] = c.name
		cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = "repeatable read"
	})
	c.exec(`CREATE TABLE {schema}.effects (n bigserial PRIMARY KEY, delivery_id bigint NOT NULL)`)
	c.exec(`
		INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at)
		SELECT gen_random_uuid(), 'a.order.sent.v1', '/test', 'Order', 'k', '{}', 'application/json', $1, now() FROM generate_series(1, $2::int)`, stream, crowdEvents)
	return c
}

// sqlDisorder returns the keys that break a rule in one snapshot. There are two exceptions:
//   - A requeued row may have been overtaken.
//   - A row whose lease has expired may be parked before other rows of its run whose leases were renewed at
//     the same time. Their worker cannot finish them without that row.
const sqlDisorder = `
SELECT d.order_key, string_agg(d.id || ' ' || d.status || ' ' || coalesce(d.locked_by, ''), ', ' ORDER BY d.id)
  FROM {schema}.event_delivery AS d
 WHERE d.order_key IS NOT NULL AND (d.status IN ('PENDING', 'PARKED', 'PROCESSING') OR d.held)
 GROUP BY d.order_key
HAVING count(DISTINCT d.locked_by) > 1
    OR count(*) FILTER (WHERE d.status = 'PENDING') > 1
    OR bool_or(d.status = 'PENDING') AND bool_or(d.status = 'PROCESSING')
    OR bool_and(d.status = 'PARKED')
    OR min(d.id) FILTER (WHERE d.status = 'PARKED' AND d.last_error_code IS DISTINCT FROM 'stale' AND NOT EXISTS (SELECT FROM {schema}.outbox_audit AS a WHERE a.delivery_id = d.id AND a.action = 'retry'))
       < max(d.id) FILTER (WHERE d.status IN ('PENDING', 'PROCESSING'))`

// watch checks the table and kills connections until all workers have ended.
func (c *crowd) watch(ended <-chan struct{}, rng *rand.Rand) {
	for looks := 1; ; looks++ {
		var key int64
		var rows string
		err := c.db.QueryRow(context.Background(), pg.InSchema(sqlDisorder, c.schema)).Scan(&key, &rows)
		if !errors.Is(err, pgx.ErrNoRows) {
			assert.NoError(c.t, err)
			assert.Fail(c.t, "disorder", "key %d: %s", key, rows)
			<-ended
			c.t.FailNow()
		}
		if rng.IntN(20) == 0 {
			_, err := c.db.Exec(context.Background(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1 ORDER BY random() LIMIT 1`, c.name)
			assert.NoError(c.t, err)
		}
		select {
		case <-ended:
			c.t.Logf("looked %d times", looks)
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// drain handles the remaining rows one by one.
func (c *crowd) drain() {
	ctx, s := c.t.Context(), delivery.NewStore(c.db, c.schema, group, "last", crowdLease)
	const left = `SELECT count(*) FROM {schema}.event_delivery WHERE status IN ('PENDING', 'PARKED', 'PROCESSING')`
	for start := time.Now(); ; {
		c.exec(`SELECT {schema}.outbox_resolve_deliveries(ARRAY(SELECT id FROM {schema}.event_delivery WHERE held), 'me', 'why')`)
		c.exec(`UPDATE {schema}.event_delivery SET next_retry_at = now() WHERE status = 'PENDING' AND next_retry_at > now()`)
		_, err := s.TakeOver(ctx, 100, false)
		require.NoError(c.t, err)
		for _, suspects := range []bool{true, false} {
			claimed, err := s.Claim(ctx, pairs, 100, 100, suspects, room)
			require.NoError(c.t, err)
			if len(claimed) > 0 {
				require.NoError(c.t, c.handle(ctx, c.db, s, claimed, 0, false))
			}
		}
		var n int
		require.NoError(c.t, c.db.QueryRow(ctx, pg.InSchema(left, c.schema)).Scan(&n))
		if n == 0 {
			return
		}
		require.Less(c.t, time.Since(start), testenv.Patience, "%d rows are left: %v", n, c.rows())
	}
}

// requireHandledOnce checks the effects of all rows. Each DONE row has one effect, other rows have none.
// The effects of a key are in its order.
func (c *crowd) requireHandledOnce() {
	var total, wrong, disorder int
	require.NoError(c.t, c.db.QueryRow(c.t.Context(), pg.InSchema(`
		WITH handled AS (
		    SELECT d.id, d.order_key, e.n, max(d.id) OVER (PARTITION BY d.order_key ORDER BY e.n) AS highest
		      FROM {schema}.event_delivery AS d JOIN {schema}.effects AS e ON e.delivery_id = d.id
		     WHERE d.order_key IS NOT NULL AND NOT EXISTS (SELECT FROM {schema}.outbox_audit AS a WHERE a.delivery_id = d.id AND a.action = 'retry'))
		SELECT (SELECT count(*) FROM {schema}.event_delivery),
		       (SELECT count(*) FROM {schema}.event_delivery AS d
		         WHERE (SELECT count(*) FROM {schema}.effects AS e WHERE e.delivery_id = d.id) <> CASE d.status WHEN 'DONE' THEN 1 ELSE 0 END),
		       (SELECT count(*) FROM handled WHERE id < highest)`, c.schema)).Scan(&total, &wrong, &disorder))
	require.Greater(c.t, total, crowdWorkers*crowdSteps/8)
	require.Zero(c.t, wrong, "rows that were not handled, more than once, or while they were dead")
	require.Zero(c.t, disorder)
	c.t.Logf("%d rows", total)
}

// handle finishes rows in a transaction with their effects.
func (c *crowd) handle(ctx context.Context, db *pgxpool.Pool, s *delivery.Store, rows []delivery.Delivery, slow time.Duration, abort bool) error {
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	if _, err := tx.Exec(ctx, pg.InSchema(`INSERT INTO {schema}.effects (delivery_id) SELECT id FROM unnest($1::bigint[]) AS id`, c.schema), ids(rows)); err != nil {
		return err
	}
	time.Sleep(slow)
	if _, err := s.FinishIn(ctx, tx, rows); err != nil {
		return err
	}
	time.Sleep(slow / 4)
	if abort {
		return nil
	}
	return tx.Commit(ctx)
}

// crowdWorker is a worker of the crowd.
type crowdWorker struct {
	*crowd
	rng   *rand.Rand
	n     int
	life  int
	store *delivery.Store
	mine  []delivery.Delivery
}

func newCrowdWorker(c *crowd, n int, rng *rand.Rand) *crowdWorker {
	w := &crowdWorker{crowd: c, n: n, rng: rng}
	w.begin()
	return w
}

// begin restarts the worker under a new name. It forgets its claimed rows.
func (w *crowdWorker) begin() {
	w.life++
	w.mine = nil
	w.store = delivery.NewStore(w.pool, w.schema, group, fmt.Sprintf("%d-%d", w.n, w.life), crowdLease)
}

func (w *crowdWorker) run() {
	ctx := context.Background()
	steps := []func(context.Context) error{
		w.insert, w.insert, w.claim, w.claim, w.claim, w.handleSome, w.handleSome, w.handleSome, w.handleSome, w.fail, w.fail, w.giveBack, w.renew, w.renew, w.expire, w.operate,
	}
	for range crowdSteps {
		if w.rng.IntN(40) == 0 {
			w.begin()
		}
		if err := steps[w.rng.IntN(len(steps))](ctx); !w.expected(err) {
			assert.NoError(w.t, err)
			return
		}
	}
}

// expected reports whether err means a lost row or a killed connection.
func (w *crowdWorker) expected(err error) bool {
	const adminShutdown = "57P01"
	failed, ok := errors.AsType[*pgconn.PgError](err)
	return err == nil || !ok || failed.Code == adminShutdown || errors.Is(err, delivery.ErrLost)
}

func (w *crowdWorker) insert(ctx context.Context) error {
	n := 1 + w.rng.IntN(4)
	rows, status := make([]delivery.New, n), delivery.Processing
	if w.rng.IntN(3) == 0 {
		status = delivery.Pending
	}
	seen := map[delivery.Key]bool{}
	for i := range rows {
		key := delivery.KeyOf(group, action, stream, fmt.Sprint(w.rng.IntN(crowdKeys)))
		rows[i] = delivery.New{OutboxID: w.next.Add(1), Action: action, Stream: stream, Key: key, Status: status, MaxAttempts: 5}
		if status == delivery.Pending && seen[key] {
			rows[i].Status = delivery.Parked
		}
		seen[key] = true
	}
	var claimed []delivery.Delivery
	err := delivery.Transact(ctx, w.pool, func(b *pgx.Batch) {
		w.store.Queue(b, rows, room, func(d []delivery.Delivery) error { claimed = d; return nil })
	})
	if err == nil {
		w.mine = append(w.mine, claimed...)
	}
	return err
}

func (w *crowdWorker) claim(ctx context.Context) error {
	claimed, err := w.store.Claim(ctx, pairs, 1+w.rng.IntN(5), w.rng.IntN(4), w.rng.IntN(2) == 0, room)
	w.forget(claimed)
	w.mine = append(w.mine, claimed...)
	return err
}

func (w *crowdWorker) forget(rows []delivery.Delivery) {
	w.mine = slices.DeleteFunc(w.mine, func(d delivery.Delivery) bool { return slices.Contains(ids(rows), d.ID) })
}

// some returns the first rows of some keys.
func (w *crowdWorker) some() (rows []delivery.Delivery) {
	skipped := map[delivery.Key]bool{}
	for _, d := range w.mine {
		if len(rows) > 0 && d.Holder != rows[0].Holder {
			continue
		}
		if skipped[d.Key] = skipped[d.Key] || w.rng.IntN(3) == 0; !skipped[d.Key] {
			rows = append(rows, d)
		}
	}
	return rows
}

// behind returns the claimed rows that have the key of a given row and do not come before it.
func (w *crowdWorker) behind(rows []delivery.Delivery) (all []delivery.Delivery) {
	for _, d := range w.mine {
		if slices.ContainsFunc(rows, func(first delivery.Delivery) bool { return first.Key == d.Key && first.ID <= d.ID }) {
			all = append(all, d)
		}
	}
	return all
}

func (w *crowdWorker) handleSome(ctx context.Context) error {
	rows := w.some()
	if len(rows) == 0 {
		return nil
	}
	slow, abort := time.Duration(w.rng.IntN(20))*time.Millisecond, w.rng.IntN(8) == 0
	if w.rng.IntN(15) == 0 {
		slow = 2 * crowdLease
	}
	err := w.handle(ctx, w.pool, w.store, rows, slow, abort)
	switch {
	case errors.Is(err, delivery.ErrLost):
		return w.returned(ctx, w.behind(rows))
	case err != nil: // the outcome of the commit is unknown
		w.forget(w.behind(rows))
	case !abort:
		w.forget(rows)
	}
	return err
}

func (w *crowdWorker) returned(ctx context.Context, rows []delivery.Delivery) error {
	w.forget(rows)
	return w.store.Release(ctx, rows)
}

func (w *crowdWorker) giveBack(ctx context.Context) error {
	return w.returned(ctx, w.behind(w.some()))
}

func (w *crowdWorker) fail(ctx context.Context) error {
	if len(w.mine) == 0 {
		return nil
	}
	run := w.behind(w.mine[:1])
	d := run[0]
	f := delivery.Failure{Of: d, Code: "handler", Message: "no", Wait: time.Duration(w.rng.IntN(30)) * time.Millisecond, Dead: d.Attempt >= d.MaxAttempts || w.rng.IntN(3) == 0}
	f.Held = f.Dead && w.rng.IntN(4) == 0
	w.forget(run)
	_, err := w.store.Fail(ctx, f, run[1:])
	return err
}

func (w *crowdWorker) renew(ctx context.Context) error {
	_, err := w.store.Renew(ctx, refs(w.mine))
	return err
}

func (w *crowdWorker) expire(ctx context.Context) error {
	_, err := w.store.TakeOver(ctx, 1+w.rng.IntN(5), w.rng.IntN(4) == 0)
	return err
}

// operate requeues and resolves rows at random, as operators do.
func (w *crowdWorker) operate(ctx context.Context) error {
	function := []string{"requeue", "requeue", "resolve"}[w.rng.IntN(3)]
	return delivery.Transact(ctx, w.pool, func(b *pgx.Batch) {
		b.Queue(pg.InSchema(`SELECT {schema}.outbox_`+function+`_deliveries(ARRAY(SELECT id FROM {schema}.event_delivery WHERE status = 'DEAD' OR status = 'PENDING' AND $1 ORDER BY random() LIMIT 3), 'me', 'why')`, w.schema),
			function == "resolve")
	})
}

// Statements work in all modes of pgx, behind a pooler, and if another isolation level is the default.
func TestDeliveriesInAllModes(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f := newTable(t)
			f.exec(`CREATE TABLE {schema}.effects (delivery_id bigint NOT NULL)`)
			s := delivery.NewStore(testenv.PoolIn(t, mode), f.schema, group, "a", 50*time.Millisecond)
			f.day(s, 0)
			claimed := f.insert(s, delivery.Processing, f.record("l", "l"), "l", "l")
			require.NoError(t, (&crowd{tableFixture: f}).handle(t.Context(), testenv.PoolIn(t, mode), s, claimed, 0, false))
			claimed = f.insert(s, delivery.Processing, f.record("l", "l"), "l", "l")
			require.NoError(t, s.Release(t.Context(), claimed))
			_, repaired, err := s.RepairHeads(t.Context(), -1<<63, 10)
			require.NoError(t, err)
			require.Zero(t, repaired)
		})
	}
}
