package sqltx_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/sqltx"
	"github.com/outboxgo/outbox/internal/testenv"
)

var background = context.Background()

var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// within calls f with a transaction of database/sql in one of pgx, which is rolled back.
func within(t testing.TB, mode pgx.QueryExecMode, f func(tx *sql.Tx)) {
	t.Helper()
	tx, err := testenv.PoolIn(t, mode).Begin(background)
	require.NoError(t, err)
	defer tx.Rollback(background)
	require.NoError(t, sqltx.Within(background, tx, func(tx *sql.Tx) error { f(tx); return nil }))
}

const values = `
SELECT true AS bool, 7::int2 AS int2, -7::int4 AS int4, 1234567890123::int8 AS int8, 1.5::float4 AS float4, 'NaN'::float8 AS float8,
       1234567890.123456789::numeric(30, 12) AS numeric, 'NaN'::numeric AS nan, 'text'::text AS text, 'v'::varchar(20) AS varchar, 'c'::bpchar(3) AS bpchar,
       '\x00ff'::bytea AS bytea, '{"a": [1, null]}'::json AS json, '{"b": "é"}'::jsonb AS jsonb, 'null'::jsonb AS json_null, '<a/>'::xml AS xml,
       '2026-02-03'::date AS date, 'infinity'::date AS forever, '2026-02-03 04:05:06.123456'::timestamp AS timestamp,
       '2026-02-03 04:05:06.123456+05:45'::timestamptz AS timestamptz, '-infinity'::timestamptz AS never, '04:05:06.7'::time AS time, '04:05:06+02'::timetz AS timetz,
       '1 year 2 days 3 hours'::interval AS interval, '6ba7b810-9dad-11d1-80b4-00c04fd430c8'::uuid AS uuid, '{1,NULL,3}'::int[] AS ints, '{"a b",NULL}'::text[] AS texts,
       '192.168.0.0/16'::inet AS inet, '1'::bit(1) AS bit, '101'::varbit(9) AS varbit, '[1,5)'::int4range AS range, '(1,2)'::point AS point, 7::oid AS oid, '9'::xid AS xid,
       '8'::cid AS cid, 'a'::"char" AS char, 'n'::name AS name, ROW(1, 'x') AS composite, 'low'::pg_temp.level AS enum, 5::pg_temp.positive AS domain,
       NULL::int AS null_int, NULL::text AS null_text, NULL::bytea AS null_bytea, NULL::timestamptz AS null_time, NULL::jsonb AS null_json, '' AS empty, 'pg_class'::regclass AS regclass`

const types = `
CREATE TYPE pg_temp.level AS ENUM ('low', 'high'); CREATE DOMAIN pg_temp.positive AS int CHECK (VALUE > 0)`

// row is what database/sql makes of a row.
type row struct {
	Columns []string
	Types   []string
	Values  []string
}

func readRow(t *testing.T, tx *sql.Tx) row {
	t.Helper()
	_, err := tx.Exec(types)
	require.NoError(t, err)
	rows, err := tx.QueryContext(background, values)
	require.NoError(t, err)
	defer rows.Close()
	var r row
	r.Columns, err = rows.Columns()
	require.NoError(t, err)
	columnTypes, err := rows.ColumnTypes()
	require.NoError(t, err)
	for _, c := range columnTypes {
		length, hasLength := c.Length()
		precision, scale, hasScale := c.DecimalSize()
		name := c.DatabaseTypeName()
		if strings.Trim(name, "0123456789") == "" {
			name = "a type of this transaction"
		}
		r.Types = append(r.Types, fmt.Sprint(c.Name(), name, c.ScanType(), length, hasLength, precision, scale, hasScale))
	}
	require.True(t, rows.Next())
	scanned := make([]any, len(r.Columns))
	pointers := make([]any, len(scanned))
	for i := range scanned {
		pointers[i] = &scanned[i]
	}
	require.NoError(t, rows.Scan(pointers...))
	for i, v := range scanned {
		if at, ok := v.(time.Time); ok {
			v = at.UTC()
		}
		r.Values = append(r.Values, fmt.Sprintf("%s: %T %#v", r.Columns[i], v, v))
	}
	require.False(t, rows.Next())
	require.False(t, rows.NextResultSet())
	require.NoError(t, rows.Err())
	return r
}

// Rows are those of pgx/stdlib, value by value and type by type.
func TestRowsAreThoseOfStdlib(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			db := stdlib.OpenDBFromPool(testenv.PoolIn(t, mode))
			defer db.Close()
			tx, err := db.BeginTx(background, nil)
			require.NoError(t, err)
			defer tx.Rollback()
			want := readRow(t, tx)
			require.NoError(t, tx.Rollback())
			within(t, mode, func(tx *sql.Tx) { require.Equal(t, want, readRow(t, tx)) })
		})
	}
}

// Values are their own: a row that follows does not change them.
func TestValuesAreCopies(t *testing.T) {
	t.Parallel()
	within(t, pgx.QueryExecModeCacheDescribe, func(tx *sql.Tx) {
		rows, err := tx.Query(`SELECT convert_to(repeat(n::text, 20), 'UTF8'), repeat(n::text, 20), to_jsonb(n) FROM generate_series(1, 9) AS n`)
		require.NoError(t, err)
		defer rows.Close()
		var all []string
		var raws [][]byte
		for rows.Next() {
			var b sql.RawBytes
			var s string
			var j []byte
			require.NoError(t, rows.Scan(&b, &s, &j))
			raws, all = append(raws, b, j), append(all, s, string(j))
		}
		require.NoError(t, rows.Err())
		for i, b := range raws {
			require.Equal(t, all[i], string(b))
		}
	})
}

// Arguments are pgx's: any type, or refused with a reason.
func TestArguments(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			within(t, mode, func(tx *sql.Tx) {
				var text string
				require.NoError(t, tx.QueryRow(`SELECT concat_ws('|', $1::int, $2::text[], $3::timestamptz AT TIME ZONE 'UTC', $4::bytea, $5::text IS NULL, $6::uuid)`,
					7, []string{"a", "b c"}, time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC), []byte{0, 255}, sql.NullString{}, "6ba7b810-9dad-11d1-80b4-00c04fd430c8").Scan(&text))
				require.Equal(t, `7|{a,"b c"}|2026-02-03 04:05:06|\x00ff|t|6ba7b810-9dad-11d1-80b4-00c04fd430c8`, text)
				_, err := tx.Exec(`SELECT $1::int`, sql.Named("n", 1))
				require.ErrorContains(t, err, `argument "n" has a name`)
				_, err = tx.Exec(`SELECT $1::int`, sql.Out{Dest: new(int)})
				require.ErrorContains(t, err, "RETURNING")
				statement, err := tx.Prepare(`SELECT $1::int`)
				require.NoError(t, err)
				_, err = statement.Exec(sql.Named("n", 1))
				require.ErrorContains(t, err, `argument "n" has a name`)
				require.NoError(t, tx.QueryRow(`SELECT $1::int`, 1).Err(), "nothing of that was sent")
			})
		})
	}
}

// restless is an argument whose error would have database/sql try again.
type restless struct{ calls *int }

func (r restless) Value() (driver.Value, error) {
	*r.calls++
	return nil, fmt.Errorf("restless: %w", driver.ErrBadConn)
}

func TestNothingIsTriedAgain(t *testing.T) {
	t.Parallel()
	calls := 0
	_, err := testenv.PoolIn(t, pgx.QueryExecModeCacheDescribe).Exec(background, `SELECT $1::int`, restless{&calls})
	require.ErrorIs(t, err, driver.ErrBadConn)
	once := calls // which may be twice: it is up to pgx
	within(t, pgx.QueryExecModeCacheDescribe, func(tx *sql.Tx) {
		calls = 0
		statement, err := tx.Prepare(`SELECT $1::int`)
		require.NoError(t, err)
		_, err = statement.Exec(restless{&calls})
		require.ErrorContains(t, err, "restless")
		require.NotErrorIs(t, err, driver.ErrBadConn)
		require.Equal(t, once, calls)
	})
}

// A lost connection is an error of its own kind at once.
func TestLostConnection(t *testing.T) {
	t.Parallel()
	tx, err := testenv.Pool(t, nil).Begin(background)
	require.NoError(t, err)
	defer tx.Rollback(background)
	require.NoError(t, sqltx.Within(background, tx, func(within *sql.Tx) error {
		require.NoError(t, tx.Conn().Close(background))
		_, err := within.Exec(`SELECT 1`)
		require.Error(t, err)
		require.NotErrorIs(t, err, driver.ErrBadConn)
		var one int
		err = within.QueryRow(`SELECT 1`).Scan(&one)
		require.Error(t, err)
		require.NotErrorIs(t, err, driver.ErrBadConn)
		return nil
	}))
}

func TestResults(t *testing.T) {
	t.Parallel()
	within(t, pgx.QueryExecModeCacheDescribe, func(tx *sql.Tx) {
		result, err := tx.Exec(`CREATE TEMPORARY TABLE n AS SELECT generate_series(1, 5)`)
		require.NoError(t, err)
		affected, err := result.RowsAffected()
		require.NoError(t, err)
		require.EqualValues(t, 5, affected)
		_, err = result.LastInsertId()
		require.Error(t, err)
		_, err = tx.Exec(`SELECT 1; SELECT 2`) // several, without arguments
		require.NoError(t, err)
		var n int
		require.ErrorIs(t, tx.QueryRow(`SELECT 1 WHERE false`).Scan(&n), sql.ErrNoRows)
		rows, err := tx.Query(`SELECT 1/(3-n) FROM generate_series(1, 5) AS n`)
		require.NoError(t, err)
		for rows.Next() {
			n++
		}
		require.ErrorContains(t, rows.Err(), "division by zero", "an error behind some rows")
		require.Equal(t, 2, n)
	})
}

// Rows are read as they come, and not kept.
func TestRowsAreStreamed(t *testing.T) {
	t.Parallel()
	within(t, pgx.QueryExecModeCacheDescribe, func(tx *sql.Tx) {
		rows, err := tx.Query(`SELECT repeat('x', 1000000), clock_timestamp() FROM generate_series(1, 100)`)
		require.NoError(t, err)
		defer rows.Close()
		var first, last time.Time
		for rows.Next() {
			var text string
			if first.IsZero() {
				require.NoError(t, rows.Scan(&text, &first))
				time.Sleep(50 * time.Millisecond) // PostgreSQL has nowhere to put 100 MB
				continue
			}
			require.NoError(t, rows.Scan(&text, &last))
		}
		require.NoError(t, rows.Err())
		require.GreaterOrEqual(t, last.Sub(first), 50*time.Millisecond)
	})
}

// The end waits for a statement that is under way, and what comes later does not reach the connection.
func TestEndWaits(t *testing.T) {
	t.Parallel()
	db := testenv.Pool(t, nil)
	tx, err := db.Begin(background)
	require.NoError(t, err)
	defer tx.Rollback(background)
	var pid int
	require.NoError(t, tx.QueryRow(background, `SELECT pg_backend_pid()`).Scan(&pid))
	within, end, err := sqltx.Begin(background, tx)
	require.NoError(t, err)
	result := make(chan error)
	go func() {
		_, err := within.Exec(`SELECT pg_sleep(1)`)
		result <- err
	}()
	require.Eventually(t, func() bool {
		var sleeps bool
		require.NoError(t, db.QueryRow(background, `SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = $1 AND state = 'active'
		                                             UNION ALL SELECT false LIMIT 1`, pid).Scan(&sleeps))
		return sleeps
	}, testenv.Patience, time.Millisecond)
	end()
	require.NoError(t, <-result)
	require.False(t, tx.Conn().PgConn().IsBusy())
	_, err = within.Exec(`SELECT 1`)
	require.ErrorIs(t, err, sql.ErrTxDone)
	_, err = tx.Exec(background, `SELECT 1`)
	require.NoError(t, err, "the transaction goes on")
}

// Commit and Rollback are those of the transaction.
func TestEnds(t *testing.T) {
	t.Parallel()
	db := testenv.Pool(t, nil)
	tx, err := db.Begin(background)
	require.NoError(t, err)
	defer tx.Rollback(background)
	require.NoError(t, sqltx.Within(background, tx, func(within *sql.Tx) error { return within.Commit() }))
	require.ErrorIs(t, tx.Commit(background), pgx.ErrTxClosed)
	tx, err = db.Begin(background)
	require.NoError(t, err)
	require.NoError(t, sqltx.Within(background, tx, func(within *sql.Tx) error { return within.Rollback() }))
	require.ErrorIs(t, tx.Rollback(background), pgx.ErrTxClosed)
	err = sqltx.Within(background, tx, func(within *sql.Tx) error { _, err := within.Exec(`SELECT 1`); return err })
	require.ErrorIs(t, err, pgx.ErrTxClosed)
}

type (
	embedded struct{ *sql.Tx }
	deep     struct{ *embedded }
	hidden   struct{ embedded }
	inside   struct{ driver.Tx }
	named    struct{ Other *sql.Tx }
	circle   struct{ *circle }
)

func TestFind(t *testing.T) {
	t.Parallel()
	tx := new(sql.Tx)
	round := &circle{}
	round.circle = round
	for _, tt := range []struct {
		value any
		want  *sql.Tx
		found bool
	}{
		{tx, tx, true},
		{embedded{tx}, tx, true},
		{&embedded{tx}, tx, true},
		{deep{&embedded{tx}}, tx, true},
		{&hidden{embedded{tx}}, tx, true},
		{inside{embedded{tx}}, tx, true},
		{embedded{}, nil, true},
		{(*sql.Tx)(nil), nil, true},
		{deep{}, nil, false},
		{(*embedded)(nil), nil, false},
		{named{tx}, nil, false},
		{round, nil, false},
		{nil, nil, false},
		{7, nil, false},
		{errors.New("x"), nil, false},
	} {
		got, found := sqltx.Find(tt.value)
		require.Equal(t, tt.found, found, "%T", tt.value)
		require.Same(t, tt.want, got, "%T", tt.value)
	}
	require.Equal(t, "Tx", reflect.TypeFor[embedded]().Field(0).Name)
}

// The cost of Begin and its end, compared with a statement.
func BenchmarkWithin(b *testing.B) {
	tx, err := testenv.Pool(b, nil).Begin(background)
	require.NoError(b, err)
	defer tx.Rollback(background)
	b.Run("nothing", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_ = sqltx.Within(background, tx, func(*sql.Tx) error { return nil })
		}
	})
	b.Run("a statement", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_ = sqltx.Within(background, tx, func(tx *sql.Tx) error { _, err := tx.Exec(`SELECT $1::int`, 1); return err })
		}
	})
	b.Run("a statement of pgx", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, _ = tx.Exec(background, `SELECT $1::int`, 1)
		}
	})
}
