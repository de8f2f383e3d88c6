package delivery

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/migrations"
)

const (
	doneRows   = 1_000_000
	parkedRows = 200_000 // behind one row
	dueRows    = 20_000  // of keys of their own
)

// plansFixture is a table with rows of one stream.
type plansFixture struct {
	*testing.T
	db     *pgxpool.Pool
	schema string
	conn   *pgxpool.Conn
}

func newPlans(t *testing.T) *plansFixture {
	testenv.Direct(t) // prepared statements
	db, schema := testenv.Schema(t)
	f := &plansFixture{T: t, db: db, schema: schema}
	ctx := context.Background()
	require.NoError(t, pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error { return migrate(ctx, tx, schema) }))
	f.exec(`ALTER TABLE {schema}.event_delivery SET (autovacuum_enabled = false)`)
	conn, err := db.Acquire(ctx)
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	f.conn = conn
	return f
}

// migrate runs all migrations.
func migrate(ctx context.Context, tx pgx.Tx, schema string) error {
	if _, err := tx.Exec(ctx, "SET LOCAL search_path = "+pgx.Identifier{schema}.Sanitize()); err != nil {
		return err
	}
	names, err := migrations.FS.ReadDir(".")
	if err != nil {
		return err
	}
	for _, name := range names {
		text, err := migrations.FS.ReadFile(name.Name())
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, string(text), pgx.QueryExecModeSimpleProtocol); err != nil {
			return fmt.Errorf("%s: %w", name.Name(), err)
		}
	}
	return nil
}

func (f *plansFixture) exec(sql string, args ...any) {
	f.Helper()
	_, err := f.db.Exec(context.Background(), pg.InSchema(sql, f.schema), args...)
	require.NoError(f, err)
}

// fill inserts done rows of all keys, parked rows behind a row that is due, and other due rows.
func (f *plansFixture) fill() {
	const sql = `
		INSERT INTO {schema}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, created_at, updated_at, occurred_at, recorded_at,
		       event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload)
		SELECT n, CASE WHEN $4 THEN 7 ELSE n END, 0, 3, now(), now(), now(), now(), now(), gen_random_uuid(), $3, 'g', 'a', 's', 't', '/s', 't', 'k', 'application/json', '{}'
		  FROM generate_series($1::bigint, $2) AS n`
	f.exec(sql, 1_000_000, 1_000_000+doneRows, "DONE", false)
	f.exec(sql, 1, 1, "PENDING", true)
	f.exec(sql, 1, parkedRows, "PARKED", true)
	f.exec(sql, 5_000_000, 5_000_000+dueRows, "PENDING", false)
	f.exec(`INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at)
		SELECT gen_random_uuid(), 't', '/s', 't', 'k', '{}', 'application/json', 's', now() FROM generate_series(1, 100)`)
}

// statements are the statements of a Store, with the types of their arguments. With the given arguments,
// each touches few rows.
var statements = []struct {
	name, types, sql string
	first, args      string // on the first day, and over many rows
	most             int    // buffers
}{
	{"claim", "text, text, interval, text[], text[], bigint, bigint, bool, timestamptz[], bigint, text[], bigint[], bool", sqlClaim,
		`'g', 'w', '1 min', '{a}', '{s}', 10, 10, false, '{2000-01-01}', 1000000000, E'{"\nt"}', '{}', false`, `'g', 'w', '1 min', '{a}', '{s}', 10, 10, false, '{2000-01-01}', 1000000000, E'{"\nt"}', '{}', false`, 900},
	{"claim suspects", "text, text, interval, text[], text[], bigint, bigint, bool, timestamptz[], bigint, text[], bigint[], bool", sqlClaim,
		`'g', 'w', '1 min', '{a}', '{s}', 10, 0, true, '{2000-01-01}', 1000000000, E'{"\nt"}', '{}', false`, `'g', 'w', '1 min', '{a}', '{s}', 10, 0, true, '{2000-01-01}', 1000000000, E'{"\nt"}', '{}', false`, 30},
	{"claim fresh suspects", "text, text, interval, text[], text[], bigint, bigint, bool, timestamptz[], bigint, text[], bigint[], bool", sqlClaim,
		`'g', 'w', '1 min', '{a}', '{s}', 10, 0, true, '{2000-01-01}', 1000000000, E'{"\nt"}', '{}', true`, `'g', 'w', '1 min', '{a}', '{s}', 10, 0, true, '{2000-01-01}', 1000000000, E'{"\nt"}', '{}', true`, 30},
	{"left", "text, text[], text[], timestamptz[], bool, text[], bigint[]", sqlRemaining, `'g', '{a}', '{s}', '{2000-01-01}', false, E'{"\nt"}', '{}'`, `'g', '{a}', '{s}', '{2000-01-01}', false, E'{"\nt"}', '{}'`, 60},
	{"insert", "text, text, interval, bigint[], text[], text[], bigint[], text[], int[], bigint[], timestamptz, timestamptz, bigint", sqlInsert,
		`'g', 'w', '1 min', '{}', '{}', '{}', '{}', '{}', '{}', '{}', now(), now(), 1000000000`,
		`'g', 'w', '1 min', '{1,2,3}', '{a,a,a}', '{s,s,s}', '{7,1000001,9}', '{PROCESSING,PROCESSING,PROCESSING}', '{3,3,3}', '{1,1,1}', '2100-01-01', pg_postmaster_start_time(), 1000000000`, 200},
	{"finish", "text, text, bigint[], bigint[], bigint[]", sqlFinish, `'g', 'w', '{}', '{}', '{}'`, `'g', 'w', {claimed}, {keys}, {floors}`, 600},
	{"renew", "bigint[], text, interval, text", sqlRenew, `'{}', 'w', '1 min', 'g'`, `{claimed}, 'w', '1 min', 'g'`, 600},
	{"return", "bigint[], text, text, bool", sqlRelease, `'{}', 'w', 'g', true`, `{claimed}, 'w', 'g', true`, 900},
	{"return free", "bigint[], text, text, bool", sqlReleaseFree, `'{}', 'w', 'g', true`, `{claimed}, 'w', 'g', true`, 900},
	{"fail", "bigint, text, text, text, interval, bool, bool, text, int, bool, bool, bool, bool", sqlFail, `1, 'w', 'c', 'm', '1 s', false, false, 'g', 3, false, false, false, false`, `{one}, 'w', 'c', 'm', '1 s', false, false, 'g', 3, false, false, false, false`, 60},
	{"promote", "text, bigint[], bigint[]", sqlPromote, `'g', '{7}', '{1}'`, `'g', '{7,8,1000001}', '{1,1,NULL}'`, 60},
	{"expire", "text, bigint, interval, bool, timestamptz", sqlTakeOver, `'g', 10, '0', false, '2000-01-01'`, `'g', 10, '0', false, '2000-01-01'`, 900},
	{"stale", "text, timestamptz, interval", sqlExpired, `'g', '2000-01-01', '1 min'`, `'g', '2000-01-01', '1 min'`, 60},
	{"due again", "text, bigint", sqlDueAgain, `'g', 500`, `'g', 500`, 900},
	{"owed", "text, text[], bigint[], bytea[], timestamptz", sqlBlocked, `'g', '{}', '{}', '{}', NULL`, `'g', '{a,a,a}', '{7,1000001,NULL}', '{a,b,c}', NULL`, 70}, // two looks of four indexes
	{"followers", "text, bigint, bigint", sqlFollowers, `'g', 7, 1000`, `'g', 7, 1000`, 900},
	{"park", "text, text[], text[], bigint[], bytea[], int[], bigint[], uuid[], text[], text[], text[], text[], text[], text[], bytea[], bytea[], timestamptz[], timestamptz[], int[], " +
		"text[], text[], text[], text[], int[], text[], text[], bigint[], text[], bool[]", sqlPark,
		`'g', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}'`,
		`'g', '{a,a}', '{s,s}', '{7,1000001}', '{x,y}', '{1,1}', '{1,2}', '{00000000-0000-0000-0000-000000000001,00000000-0000-0000-0000-000000000002}', '{"",""}', '{t,t}', '{/s,/s}', '{k,k}', '{c,c}', '{k,k}', '{p,p}', '{r,r}', '{now,now}', '{now,now}', '{3,3}', '{t,t}', '{i,j}', '{x,y}', '{"",""}', '{0,1}', '{"",c}', '{"",m}', '{0,5}', '{T,T}', '{f,t}'`, 200},
	{"others", "text, text, interval, bigint", sqlOthers, `'g', 'w', '30 s', 10000`, `'g', 'w', '30 s', 10000`, 60},
	{"headless", "bigint, bigint, text", sqlHeadless, `-9223372036854775808, 100, 'g'`, `-9223372036854775808, 100, 'g'`, 700},
}

// A statement touches only the rows that it needs, however many other rows are parked, done or due. A plan
// made over an empty table is used until the table is analyzed: on the first day, and after retention has
// removed all rows. In the second case PostgreSQL still has the old statistics, which can make other
// indexes look cheap.
func TestPlansOverManyDeliveries(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it counts the buffers that PostgreSQL touches.
	t.Run("first rows", func(t *testing.T) { testPlans(t, newPlans(t)) })
	t.Run("after others were removed", func(t *testing.T) {
		f := newPlans(t)
		f.fillAndEmpty()
		testPlans(t, f)
	})
}

// A consumer looks up each of its events with its own action only, also with a plan that was made over an empty table.
func TestBlockedLooksUpPairs(t *testing.T) {
	testenv.Long(t)
	const events, rows = 200, 20_000
	f := newPlans(t)
	question := pg.InSchema(`SELECT {schema}.outbox_blocked('g', array_agg('a' || n % 10), array_agg(n + 10::bigint), array_agg(decode(md5(n::text), 'hex')), 'infinity')
		FROM generate_series(1, $1::bigint) AS n`, f.schema)
	ask := func(sql string) (answer string) {
		require.NoError(t, f.conn.QueryRow(context.Background(), sql, pgx.QueryExecModeSimpleProtocol, events).Scan(&answer))
		return answer
	}
	require.Equal(t, "{}", ask(question))
	f.exec(`
		INSERT INTO {schema}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, created_at, updated_at, occurred_at, recorded_at, processed_at,
		       event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload_bytes, record_partition, record_digest, record)
		SELECT n, -n, 1, 3, now(), now(), now(), now(), now(), now(), gen_random_uuid(), 'DEAD', 'g', 'a' || n % 10, 's', 't', '/s', 't', 'k', 'application/json', '', 0,
		       decode(md5((-n)::text), 'hex'), '' FROM generate_series(1, $1::bigint) AS n`, rows)
	for _, when := range []string{"planned on the first day", "after ANALYZE"} {
		buffers := buffersIn(t, ask("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "+question))
		t.Logf("%s: %d buffers for %d events", when, buffers, events)
		require.Less(t, buffers, 12*events, "four looks at three pages")
		f.exec(`ANALYZE {schema}.event_delivery`)
	}
}

// fillAndEmpty leaves statistics, but no rows.
func (f *plansFixture) fillAndEmpty() {
	f.exec(`
		INSERT INTO {schema}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, created_at, updated_at, occurred_at, recorded_at, locked_by, locked_until,
		       event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload)
		SELECT n, hashint8(n % 10000), 1, 3, now(), now(), now(), now(), now(), CASE WHEN n % 20 = 0 THEN 'w' END, CASE WHEN n % 20 = 0 THEN now() END,
		       gen_random_uuid(), CASE WHEN n % 20 = 0 THEN 'PROCESSING' ELSE 'DONE' END, 'g', 'a', 's', 't', '/s', 't', 'k', 'application/json', '{}'
		  FROM generate_series(1, 100000) AS n`)
	f.exec(`ANALYZE {schema}.event_delivery`)
	f.exec(`DELETE FROM {schema}.event_delivery`)
	require.Eventually(f, func() bool { // other transactions may have to end first
		f.exec(`VACUUM {schema}.event_delivery`)
		size := 0
		require.NoError(f, f.db.QueryRow(context.Background(), `SELECT pg_relation_size(format('%I.event_delivery', $1::text))`, f.schema).Scan(&size))
		return size == 0
	}, testenv.Patience, 100*time.Millisecond)
}

func testPlans(t *testing.T, f *plansFixture) {
	f.exec(`ANALYZE {schema}.event_delivery`)
	for _, st := range statements {
		f.prepare(st.name, st.types, st.sql)
	}
	f.inTx(func(tx pgx.Tx) {
		for _, st := range statements {
			for range 8 { // PostgreSQL decides after five whether to keep the plan
				_, err := tx.Exec(context.Background(), `EXECUTE "`+st.name+`"(`+st.first+`)`)
				require.NoError(t, err, st.name)
			}
		}
	})
	f.fill()
	for _, when := range []string{"planned on the first day", "after ANALYZE"} {
		if when == "after ANALYZE" {
			f.exec(`ANALYZE {schema}.event_delivery`)
			f.exec(`ANALYZE {schema}.outbox`)
		}
		for _, st := range statements {
			f.inTx(func(tx pgx.Tx) {
				buffers, plan := f.explain(tx, st.name, st.args)
				t.Logf("%s, %s: %d buffers", st.name, when, buffers)
				if buffers > st.most {
					t.Errorf("%s, %s: %d buffers, more than %d: %s", st.name, when, buffers, st.most, plan)
				}
			})
		}
	}
}

func (f *plansFixture) prepare(name, types, sql string) {
	_, err := f.conn.Exec(context.Background(), `PREPARE "`+name+`"(`+types+`) AS `+pg.InSchema(sql, f.schema))
	require.NoError(f, err, name)
}

// inTx runs something in a transaction that is rolled back.
func (f *plansFixture) inTx(do func(pgx.Tx)) {
	ctx := context.Background()
	tx, err := f.conn.Begin(ctx)
	require.NoError(f, err)
	defer func() { _ = tx.Rollback(ctx) }()
	_, err = tx.Exec(ctx, settings)
	require.NoError(f, err)
	do(tx)
}

// explain returns the number of buffers that a statement touches. It first claims the rows that the
// statement takes over, finishes or renews.
func (f *plansFixture) explain(tx pgx.Tx, name, args string) (buffers int, plan string) {
	ctx := context.Background()
	var ids []int64
	keys := "" // keys of the claimed rows
	if strings.Contains(args, "{claimed}") || strings.Contains(args, "{one}") || name == "expire" {
		rows, err := tx.Query(ctx, `EXECUTE claim('g', 'w', '`+map[bool]string{true: "-1", false: "1"}[name == "expire"]+` min', '{a}', '{s}', 10, 10, false, '{2000-01-01}', 1000000000, E'{"\nt"}', '{}', false)`, pgx.QueryExecModeSimpleProtocol)
		require.NoError(f, err)
		ids, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (id int64, err error) {
			values, err := row.Values()
			if err != nil {
				return 0, err
			}
			keys = strings.TrimPrefix(fmt.Sprintf("%s,%d", keys, values[3]), ",")
			return values[0].(int64), nil
		})
		require.NoError(f, err)
		require.Len(f, ids, 20, "ten are due, and of one key as many are behind")
	}
	list := strings.ReplaceAll(strings.Trim(fmt.Sprint(ids), "[]"), " ", ",")
	one := ""
	if len(ids) > 0 {
		one = fmt.Sprint(ids[0])
	}
	args = strings.NewReplacer("{claimed}", "'{"+list+"}'", "{one}", one, "{keys}", "'{"+keys+"}'", "{floors}", "'{"+list+"}'").Replace(args)
	return f.buffersOf(tx, name, args)
}

// buffersOf runs a prepared statement. It returns the number of buffers that the statement touches, and its plan.
func (f *plansFixture) buffersOf(tx pgx.Tx, name, args string) (buffers int, plan string) {
	require.NoError(f, tx.QueryRow(context.Background(), `EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE "`+name+`"(`+args+`)`, pgx.QueryExecModeSimpleProtocol).Scan(&plan))
	return buffersIn(f.T, plan), plan
}

// buffersIn returns the buffers of a plan that was printed as JSON.
func buffersIn(t *testing.T, plan string) int {
	t.Helper()
	var explained []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	require.NoError(t, json.Unmarshal([]byte(plan), &explained))
	return explained[0].Plan.Hit + explained[0].Plan.Read
}
