package guardtx

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestChangesSettings(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{
		"SET LOCAL app.tenant = 'a'", "set role shop", " \n\tSeT x TO 1", "/* by */ SET x TO 1", "-- by\nSET x TO 1", "RESET ALL", "DISCARD ALL",
		"SELECT 1; SET LOCAL x = 1", "SET CONSTRAINTS ALL DEFERRED", "SELECT pg_catalog.set_config($1, $2, true)", "select SET_CONFIG('a', 'b', true)",
		"DO $$ BEGIN SET LOCAL x = 1; END $$", "DO $body$ BEGIN UPDATE t SET n = 1; RESET x; END $body$", "DO $$ BEGIN EXECUTE 'SET LOCAL x = 1'; END $$",
		"DO 'BEGIN PERFORM set_config(''a'', ''b'', true); END'",
		"EXECUTE prepared('a')", "SELECT 1; execute prepared", "DO $$ BEGIN EXECUTE format('SET LOCAL x = %L', 1); END $$", "prepared", "pre-pared",
	} {
		require.True(t, changesSettings(sql), sql)
	}
	for _, sql := range []string{
		"", "SELECT 1", "UPDATE t SET n = $1 WHERE s = 'set x'", "INSERT INTO t VALUES ($1) ON CONFLICT (n) DO UPDATE SET n = excluded.n",
		"UPDATE t -- the set\n SET n = 1", "UPDATE reset SET discard = 1", `UPDATE "set" SET "reset" = 1`, "WITH x AS (UPDATE t SET n = 1 RETURNING n) SELECT * FROM x",
		"SELECT settings, setting FROM t; UPDATE t SET n = 1;", "MERGE INTO t USING s ON true WHEN MATCHED THEN UPDATE SET n = 1",
		"GRANT EXECUTE ON FUNCTION f TO r", "DO $$ BEGIN EXECUTE 'UPDATE t SET n = 1'; END $$",
		"SELECT 'unfinished", "SELECT 1 /* unfinished", "SELECT 1 -- unfinished", "SELECT $1, $2",
	} {
		require.False(t, changesSettings(sql), sql)
	}
}

func BenchmarkChangesSettings(b *testing.B) {
	for b.Loop() {
		changesSettings(`INSERT INTO "shop".counts (product, n) VALUES ($1, $2) ON CONFLICT (product) DO UPDATE SET n = counts.n + excluded.n`)
	}
}

// A statement that ends the transaction is found at the beginning of each statement of a text, and nowhere else.
func TestEndsTransaction(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{
		"COMMIT", "commit work", "END", "ROLLBACK", "rollback;", "ROLLBACK; BEGIN", "SELECT 1; COMMIT", "/* x */ ROLLBACK AND CHAIN", "-- x\nABORT",
		"PREPARE TRANSACTION 'x'", "ROLLBACK WORK", "rollback transaction ;", "DO $$ BEGIN NULL; END $$; COMMIT",
	} {
		require.True(t, endsTransaction(beginnings(sql)), sql)
	}
	for _, sql := range []string{
		"", "SELECT 'COMMIT'", "SAVEPOINT a", "ROLLBACK TO a", "rollback work to savepoint a", "ROLLBACK TRANSACTION TO a", "RELEASE a", "BEGIN", "SELECT 1 -- ; COMMIT",
		"DO $$ BEGIN NULL; END $$", "DO $x$ BEGIN PERFORM '$$'; END; $x$", "INSERT INTO a VALUES ($1, $2) -- ; END", "SELECT CASE WHEN a THEN 1 END", "PREPARE q AS SELECT 1",
		"SELECT \"end\"; SELECT 1", "SELECT $1; SELECT $2",
	} {
		require.False(t, endsTransaction(beginnings(sql)), sql)
	}
}

// Savepoints have their names as PostgreSQL has them.
func TestSavepointOf(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string][]string{
		"SAVEPOINT A":                              {"a"},
		`savepoint "A b"`:                          {"A b"},
		"RELEASE a; release savepoint b":           {"a", "b"},
		"ROLLBACK TO a":                            {"a"},
		"/* x */ rollback work to savepoint a":     {"a"},
		"Rollback Transaction To Savepoint \"é\";": {"é"},
		"ROLLBACK TO savepoint":                    {""},
		"SAVEPOINT":                                {""},
		"ROLLBACK; COMMIT; SELECT 'x; SAVEPOINT a'; DO $$ BEGIN; SAVEPOINT a; END $$; SELECT 1 AS savepoint": nil,
		";;": nil,
	} {
		var got []string
		for _, words := range beginnings(sql) {
			if name, ok := savepointOf(words); ok {
				got = append(got, name)
			}
		}
		require.Equal(t, want, got, sql)
	}
}

// A library may write all values of many rows into the text: to look at it takes a time that grows as its length does.
func TestLongTextIsLookedAtInTime(t *testing.T) {
	t.Parallel()
	text := "INSERT INTO t VALUES " + strings.Repeat("(1, 'x', 2), ", 300_000) + "(1, 'x', 2)"
	began := time.Now()
	require.Len(t, beginnings(text), 1)
	require.False(t, changesSettings(text))
	require.Less(t, time.Since(began), 5*time.Second, "%d bytes", len(text))
}
