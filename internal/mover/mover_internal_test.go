package mover

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/internal/migrator"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(testenv.Main(m)) }

var background = context.Background()

// tables are migrated tables with a mover.
type tables struct {
	db     *pgxpool.Pool
	schema string
	mover  *Mover
	wakes  int
}

func newTables(t testing.TB) *tables {
	t.Helper()
	db, schema := testenv.Migrated(t)
	return tablesIn(db, schema)
}

// migrate makes the tables in a schema that no other test gets.
func migrate(t testing.TB, db *pgxpool.Pool, schema string) {
	t.Helper()
	m := &migrator.Migrator{DB: db, Schema: schema, LockTimeout: time.Second, Logger: slog.New(slog.DiscardHandler)}
	require.NoError(t, m.Run(background))
}

func tablesIn(db *pgxpool.Pool, schema string) *tables {
	s := &tables{db: db, schema: schema}
	s.mover = s.newMover(db)
	return s
}

func (s *tables) newMover(db *pgxpool.Pool) *Mover {
	return New(Config{
		DB: db, Schema: s.schema, Poll: time.Second, Timeout: testenv.Patience, Moved: func() { s.wakes++ }, Log: slog.New(slog.DiscardHandler),
	})
}

func (s *tables) sql(sql string) string { return pg.InSchema(sql, s.schema) }

func (s *tables) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := s.db.Exec(background, s.sql(sql), args...)
	require.NoError(t, err)
}

// sqlDelay records $1 events of key $2, which are due $3 seconds from now and then each $4 seconds. Their payloads are
// $2 and a number.
const sqlDelay = `
INSERT INTO {schema}.outbox_delayed (due_at, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
SELECT now() + make_interval(secs => $3) + make_interval(secs => $4) * n, gen_random_uuid(), 'acme.order.due.v1', 'shop', 'Order', $2,
       to_jsonb($2 || ' ' || n), 'application/json', now()
  FROM generate_series(1, $1) AS n ORDER BY n`

func (s *tables) delay(t testing.TB, n int, key string, due, step float64) {
	t.Helper()
	s.exec(t, sqlDelay, n, key, due, step)
}

// delayIn is delay in a transaction.
func (s *tables) delayIn(t testing.TB, tx pgx.Tx, n int, key string, due, step float64) {
	t.Helper()
	_, err := tx.Exec(background, s.sql(sqlDelay), n, key, due, step)
	require.NoError(t, err)
}

func (s *tables) begin(t testing.TB) pgx.Tx {
	t.Helper()
	tx, err := s.db.Begin(background)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(background) })
	return tx
}

// cancel cancels the event of a payload in a transaction that stays open.
func (s *tables) cancel(t testing.TB, payload string) pgx.Tx {
	t.Helper()
	tx := s.begin(t)
	var cancelled bool
	require.NoError(t, tx.QueryRow(background, s.sql(`SELECT {schema}.outbox_cancel(event_id) FROM {schema}.outbox_delayed WHERE payload = to_jsonb($1::text)`), payload).Scan(&cancelled))
	require.True(t, cancelled)
	return tx
}

// moved returns the payloads in outbox in their order.
func (s *tables) moved(t testing.TB) (all []string) {
	t.Helper()
	rows, err := s.db.Query(background, s.sql(`SELECT payload #>> '{}' FROM {schema}.outbox ORDER BY id`))
	require.NoError(t, err)
	all, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// round runs a round that begins with a full look.
func (s *tables) round(t testing.TB) Result {
	t.Helper()
	s.mover.nextFull = time.Time{}
	return s.anyRound(t)
}

// floored runs a round from the floor.
func (s *tables) floored(t testing.TB) Result {
	t.Helper()
	require.False(t, s.mover.floor.IsZero())
	s.mover.nextFull = time.Now().Add(time.Hour)
	return s.anyRound(t)
}

func (s *tables) anyRound(t testing.TB) Result {
	t.Helper()
	r, err := s.mover.Round(background, background)
	require.NoError(t, err)
	return r
}

// numbered returns payloads of a key.
func numbered(key string, from, to int) (all []string) {
	for n := from; n <= to; n++ {
		all = append(all, fmt.Sprint(key, " ", n))
	}
	return all
}

// Events are moved when they are due, in the order of their due times and then of their ids.
func TestRound(t *testing.T) {
	t.Parallel()
	s := newTables(t)
	r := s.round(t)
	require.Equal(t, Result{Next: time.Second, looking: r.looking}, r, "there are none")
	s.delay(t, 3, "b", -5, 1)
	s.delay(t, 3, "a", -8, 1)
	s.delay(t, 2, "c", -9, 0)
	s.delay(t, 1, "later", 3600, 0)
	s.delay(t, 1, "soon", 0.3, 0)
	r = s.round(t)
	require.Equal(t, 8, r.Moved)
	require.Less(t, r.Next, 300*time.Millisecond)
	require.Equal(t, []string{"c 1", "c 2", "a 1", "a 2", "a 3", "b 1", "b 2", "b 3"}, s.moved(t))
	require.Equal(t, 1, s.wakes)
	for r.Moved = 0; r.Moved == 0; r = s.round(t) {
		time.Sleep(r.Next)
	}
	require.Equal(t, "soon 1", s.moved(t)[8])
	var early int
	require.NoError(t, s.db.QueryRow(background, s.sql(`SELECT count(*) FROM {schema}.outbox WHERE xid::text::bigint = 0 OR created_at > clock_timestamp()`)).Scan(&early))
	require.Zero(t, early)
	require.Equal(t, time.Second, s.round(t).Next, "the next one is due in an hour")
}

// A round moves all that is due, however much that is, with at most 1,000 events and about 16 MiB in a transaction.
func TestRoundOfMany(t *testing.T) {
	t.Parallel()
	s := newTables(t)
	s.delay(t, 2500, "a", -10, 0.001)
	r := s.round(t)
	require.Equal(t, 2500, r.Moved)
	require.Equal(t, numbered("a", 1, 2500), s.moved(t))
	var largest, transactions int
	require.NoError(t, s.db.QueryRow(background, s.sql(`SELECT max(n), count(*) FROM (SELECT count(*) AS n FROM {schema}.outbox GROUP BY xid) AS x`)).Scan(&largest, &transactions))
	require.Equal(t, []int{1000, 3}, []int{largest, transactions})

	s.exec(t, `INSERT INTO {schema}.outbox_delayed (due_at, event_id, event_type, source, aggregate_type, aggregate_id, payload_bytes, content_type, occurred_at)
		SELECT now(), gen_random_uuid(), 'acme.order.due.v1', 'shop', 'Order', 'large', convert_to(repeat('x', 9 << 20), 'UTF8'), 'text/plain', now() FROM generate_series(1, 4)`)
	require.Equal(t, 4, s.round(t).Moved)
	require.NoError(t, s.db.QueryRow(background, s.sql(`SELECT count(DISTINCT xid) FROM {schema}.outbox WHERE aggregate_id = 'large'`)).Scan(&transactions))
	require.Equal(t, 2, transactions)
}

// A cancellation whose transaction is open holds up the events behind it that have its key, and no others, also if
// there are more of them than a look reads.
func TestOpenCancellation(t *testing.T) {
	t.Parallel()
	s := newTables(t)
	s.delay(t, 2500, "blocked", -100, 0.001)
	s.delay(t, 3, "other", -10, 0.001)
	tx := s.cancel(t, "blocked 2")
	r := s.round(t)
	require.Equal(t, 1, r.Blocked)
	require.Equal(t, append([]string{"blocked 1"}, numbered("other", 1, 3)...), s.moved(t))
	require.Greater(t, r.Late, 90*time.Second)
	s.delay(t, 1, "late", -50, 0)
	require.Equal(t, 1, s.round(t).Moved)
	require.NoError(t, tx.Rollback(background))
	require.Equal(t, 2499, s.round(t).Moved)
	require.Equal(t, numbered("blocked", 2, 2500), s.moved(t)[5:])

	s.delay(t, 3, "gone", -100, 0.001)
	tx = s.cancel(t, "gone 2")
	require.Equal(t, 1, s.round(t).Moved)
	require.NoError(t, tx.Commit(background))
	require.Equal(t, 1, s.round(t).Moved)
	require.Equal(t, []string{"gone 1", "gone 3"}, s.moved(t)[2504:])
}

// From the floor, a look moves earlier events of the same keys first. Others that are due below the floor were
// committed late, and the next full look finds them.
func TestFloor(t *testing.T) {
	t.Parallel()
	s := newTables(t)
	late := s.begin(t)
	s.delayIn(t, late, 25, "a", -60, 1)
	s.delayIn(t, late, 2, "b", -60, 1)
	s.delay(t, 1, "first", -20, 0)
	require.Equal(t, 1, s.round(t).Moved)
	require.NoError(t, late.Commit(background))
	require.Zero(t, s.floored(t).Moved)
	s.exec(t, `UPDATE {schema}.outbox_delayed SET payload = payload`) // their places change
	s.delay(t, 2, "a", -2, 0)
	s.delay(t, 2, "c", -2, 0)
	require.Equal(t, 25+2+2, s.floored(t).Moved)
	moved := s.moved(t)
	var ofA []string
	for _, payload := range moved {
		if payload[0] == 'a' {
			ofA = append(ofA, payload)
		}
	}
	require.Equal(t, append(numbered("a", 1, 25), numbered("a", 1, 2)...), ofA)
	require.Equal(t, 2, s.round(t).Moved)
	require.Equal(t, numbered("b", 1, 2), s.moved(t)[len(moved):])
}

// A full look may take longer than it is given, over the index entries that an old snapshot keeps. The next looks begin
// at the floor, so what has become due since is moved all the same.
func TestFullLookTakesTooLong(t *testing.T) {
	t.Parallel()
	s := newTables(t)
	s.delay(t, 1, "a", -20, 0)
	require.Equal(t, 1, s.round(t).Moved)
	for n := range 3 {
		s.mover.nextFull, s.mover.cfg.Timeout = time.Time{}, 20*time.Millisecond
		old := s.begin(t)
		_, err := old.Exec(background, s.sql(`LOCK TABLE {schema}.outbox_delayed`))
		require.NoError(t, err)
		_, err = s.mover.Round(background, background)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NoError(t, old.Rollback(background))
		require.Greater(t, time.Until(s.mover.nextFull), 100*time.Millisecond)
		s.mover.nextFull, s.mover.cfg.Timeout = s.mover.nextFull.Add(time.Hour), testenv.Patience
		s.delay(t, 2, "a", -1, 0)
		// The look that was given up may be at work on the server for a moment more, and another mover waits for it.
		require.Eventually(t, func() bool { s.anyRound(t); return len(s.moved(t)) == 1+2*(n+1) }, testenv.Patience, 5*time.Millisecond)
	}
}

// The floor stays below events of blocked keys.
func TestFloorOfBlockedKey(t *testing.T) {
	t.Parallel()
	s := newTables(t)
	s.delay(t, 3, "blocked", -60, 1)
	s.delay(t, 1100, "other", -40, 0.001)
	tx := s.cancel(t, "blocked 1")
	require.Equal(t, 1100, s.round(t).Moved)
	require.NoError(t, tx.Rollback(background))
	require.Equal(t, 3, s.floored(t).Moved)
}

// An event that outbox refuses stays in outbox_delayed, with the reason, and delays no other.
func TestRejected(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	migrate(t, db, schema)
	s := tablesIn(db, schema)
	s.exec(t, `CREATE UNIQUE INDEX outbox_event_id_key ON {schema}.outbox (event_id)`)
	s.delay(t, 5, "a", -10, 1)
	s.exec(t, `INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		SELECT event_id, event_type, source, aggregate_type, aggregate_id, '"before"', content_type, occurred_at FROM {schema}.outbox_delayed WHERE payload = '"a 2"'`)
	r := s.round(t)
	require.Equal(t, []int{4, 1}, []int{r.Moved, r.Rejected})
	require.Equal(t, []string{"before", "a 1", "a 3", "a 4", "a 5"}, s.moved(t))
	var rejection string
	require.NoError(t, s.db.QueryRow(background, s.sql(`SELECT rejection FROM {schema}.outbox_delayed WHERE rejected_at IS NOT NULL`)).Scan(&rejection))
	require.Contains(t, rejection, "23505: ")
	require.Contains(t, rejection, "outbox_event_id_key")
	require.Equal(t, Result{Next: time.Second}, withoutTimes(s.round(t)), "it is not tried again")

	// A transaction with an event of the same id may roll back, so its key waits, and no other.
	s.delay(t, 2, "b", -10, 1)
	s.delay(t, 2, "c", -9, 1)
	tx := s.begin(t)
	_, err := tx.Exec(background, s.sql(`INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		SELECT event_id, event_type, source, aggregate_type, aggregate_id, '"open"', content_type, occurred_at FROM {schema}.outbox_delayed WHERE payload = '"b 1"'`))
	require.NoError(t, err)
	r = s.round(t)
	require.Equal(t, []int{2, 0, 1}, []int{r.Moved, r.Rejected, r.Blocked})
	require.NoError(t, tx.Rollback(background))
	require.Equal(t, 2, s.round(t).Moved)
	require.Equal(t, []string{"c 1", "c 2", "b 1", "b 2"}, s.moved(t)[5:])

	// An id of outbox that was taken says nothing about the event.
	s.delay(t, 1, "d", -10, 1)
	s.exec(t, `SELECT setval(pg_get_serial_sequence('{schema}.outbox', 'id'), max(id) - 1, false) FROM {schema}.outbox`)
	s.mover.nextFull = time.Time{}
	_, err = s.mover.Round(background, background)
	require.ErrorIs(t, err, errProblem)
	s.exec(t, `SELECT setval(pg_get_serial_sequence('{schema}.outbox', 'id'), 100)`)
	require.Equal(t, 1, s.round(t).Moved)
}

// Events that outbox does not take now, of more keys than one, delay none of other keys: neither those that a trigger
// rejects, which is an outage, nor those whose ids other transactions record at the same time.
func TestProblemsOfManyKeys(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	migrate(t, db, schema)
	s := tablesIn(db, schema)
	s.exec(t, `CREATE UNIQUE INDEX outbox_event_id_key ON {schema}.outbox (event_id)`)
	s.exec(t, `CREATE FUNCTION {schema}.rejects() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.aggregate_id LIKE 'trigger%' THEN RAISE EXCEPTION 'no'; END IF; RETURN NEW; END $$`)
	s.exec(t, `CREATE TRIGGER rejects BEFORE INSERT ON {schema}.outbox FOR EACH ROW EXECUTE FUNCTION {schema}.rejects()`)
	for n := range 10 {
		open, ofTrigger := fmt.Sprint("open ", n), fmt.Sprint("trigger ", n)
		s.delay(t, 2, open, -20, 1)
		tx := s.begin(t)
		_, err := tx.Exec(background, s.sql(`INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
			SELECT event_id, event_type, source, aggregate_type, aggregate_id, '"open"', content_type, occurred_at FROM {schema}.outbox_delayed WHERE payload = to_jsonb($1::text)`), open+" 1")
		require.NoError(t, err)
		s.delay(t, 2, fmt.Sprint("good ", n), -10, 1)
		r := s.round(t)
		require.Equal(t, []int{2, n + 1}, []int{r.Moved, r.Blocked}, "beside %d", n)
		s.delay(t, 2, ofTrigger, -20, 1)
		s.mover.nextFull = time.Time{}
		r, err = s.mover.Round(background, background)
		require.ErrorIs(t, err, errProblem)
		require.ErrorContains(t, err, "P0001: no")
		require.LessOrEqual(t, r.Next, time.Second)
		s.exec(t, `DELETE FROM {schema}.outbox_delayed WHERE aggregate_id = $1`, ofTrigger)
	}
	for n := range 10 {
		s.delay(t, 2, fmt.Sprint("trigger ", n), -20, 1)
	}
	s.delay(t, 2, "good at last", -10, 1)
	s.mover.nextFull = time.Time{}
	r, err := s.mover.Round(background, background)
	require.ErrorIs(t, err, errProblem)
	require.Equal(t, []int{2, 20}, []int{r.Moved, r.Blocked})
}

// What is due in the year 9999 costs no more polls than what is due tomorrow, and what has been due since the year 1 is
// late.
func TestDueAtLimits(t *testing.T) {
	t.Parallel()
	s := newTables(t)
	s.delay(t, 1, "last", 0, 0)
	s.exec(t, `UPDATE {schema}.outbox_delayed SET due_at = '9999-12-31'`)
	require.Equal(t, Result{Next: time.Second}, withoutTimes(s.round(t)))
	s.delay(t, 1, "first", 0, 0)
	s.exec(t, `UPDATE {schema}.outbox_delayed SET due_at = '0001-01-01T00:00:00Z' WHERE aggregate_id = 'first'`)
	tx := s.cancel(t, "first 1")
	require.Equal(t, time.Duration(math.MaxInt64), s.round(t).Late)
	require.NoError(t, tx.Rollback(background))
	require.Equal(t, 1, s.round(t).Moved)
}

func withoutTimes(r Result) Result {
	r.looking = 0
	return r
}

// A role or a database may get another level of isolation while a mover runs. Then one round fails.
func TestRoundUnderAnotherLevel(t *testing.T) {
	t.Parallel()
	s := newTables(t)
	s.delay(t, 3, "a", -10, 1)
	m := s.newMover(testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
	}))
	_, err := m.Round(background, background)
	require.ErrorContains(t, err, "READ COMMITTED")
	r, err := m.Round(background, background)
	require.NoError(t, err)
	require.Equal(t, 3, r.Moved)
}

// While another mover is at work, a round does nothing.
func TestOneMoverAtATime(t *testing.T) {
	t.Parallel()
	s := newTables(t)
	s.delay(t, 1, "a", -10, 1)
	tx := s.begin(t)
	_, err := tx.Exec(background, s.sql(`LOCK TABLE {schema}.outbox_mover IN SHARE UPDATE EXCLUSIVE MODE`))
	require.NoError(t, err)
	r := s.round(t)
	require.True(t, r.Busy)
	require.True(t, r.More)
	require.Zero(t, r.Moved)
	require.Greater(t, r.Late, 8*time.Second)
	require.NoError(t, tx.Commit(background))
	require.Equal(t, 1, s.round(t).Moved)
}
