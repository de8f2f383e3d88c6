package main

import (
	"context"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// plantedOfWriter are operators, functions and aggregates that fit statements better than PostgreSQL's own. Each one
// tries to make the writer a superuser, and counts its calls.
const plantedOfWriter = `
CREATE SCHEMA {owner};
CREATE SEQUENCE {owner}.calls;
GRANT USAGE ON SCHEMA {owner} TO PUBLIC;
CREATE FUNCTION {owner}.act() RETURNS void LANGUAGE plpgsql AS $f$ BEGIN
    BEGIN PERFORM pg_catalog.nextval('{owner}.calls'); EXCEPTION WHEN OTHERS THEN NULL; END;
    BEGIN EXECUTE 'ALTER ROLE {writer} SUPERUSER'; EXCEPTION WHEN OTHERS THEN NULL; END;
END $f$;
DO $do$ DECLARE l text; r text; o text; BEGIN
FOR l, r IN VALUES ('varchar', 'text'), ('text', 'varchar'), ('varchar', 'varchar'), ('name', 'varchar') LOOP
    FOREACH o IN ARRAY ARRAY['=', '<>', '<', '>'] LOOP
        EXECUTE pg_catalog.format('CREATE FUNCTION {owner}.%I(a %s, b %s) RETURNS boolean LANGUAGE plpgsql AS
            $f$ BEGIN PERFORM {owner}.act(); RETURN a::text OPERATOR(pg_catalog.%s) b::text; END $f$', o, l, r, o);
        EXECUTE pg_catalog.format('CREATE OPERATOR {owner}.%s (FUNCTION = {owner}.%I, LEFTARG = %s, RIGHTARG = %s)', o, o, l, r);
    END LOOP;
END LOOP;
FOREACH l IN ARRAY ARRAY['bigint', 'text', 'varchar', 'name'] LOOP
    EXECUTE pg_catalog.format('CREATE FUNCTION {owner}.collect(s %s[], v %1$s) RETURNS %1$s[] LANGUAGE plpgsql AS
        $f$ BEGIN PERFORM {owner}.act(); RETURN pg_catalog.array_append(s, v); END $f$', l);
    EXECUTE pg_catalog.format('CREATE AGGREGATE {owner}.array_agg(%s) (SFUNC = {owner}.collect, STYPE = %1$s[])', l);
    EXECUTE pg_catalog.format('CREATE FUNCTION {owner}.add(s bigint, v %s) RETURNS bigint LANGUAGE plpgsql AS
        $f$ BEGIN PERFORM {owner}.act(); RETURN coalesce(s, 0) OPERATOR(pg_catalog.+) 1; END $f$', l);
    EXECUTE pg_catalog.format('CREATE AGGREGATE {owner}.count(%s) (SFUNC = {owner}.add, STYPE = bigint)', l);
END LOOP;
END $do$`

// onceOnEach are arguments for each command. The Kafka topics do not exist.
var onceOnEach = map[string]string{
	"relay": "--listen 127.0.0.1:0", "serve": "--listen 127.0.0.1:0 --page {users}", "status": "", "doctor": "", "tail": "", "events list": "--type test.thing.happened.v1", "events show": "1", "events delayed": "",
	"events cancel": "00000000-0000-4000-8000-000000000000 --reason test", "events move": "--once", "verify": "", "topics": "",
	"failures list": "", "failures show": "event-1", "failures count": "", "failures retry": "--all --yes --reason test",
	"failures resolve": "event-1 --reason test", "failures edit": "event-1 --reason test --payload -", "failures hold": "event-2 --reason test",
	"failures release": "event-2 --reason test", "consumers": "", "consumer pause": "--group g --topic t --reason test",
	"consumer resume": "--group g --topic t --reason test", "consumer rewind": "--group g --to 2020-01-02",
	"group start": "new --from archive --incomplete",
	"cut status":  "", "cut to-kafka": "--group g --relay r", "cut to-postgres": "--group g --relay r", "cut finish": "--relay r --no-wait --reason test", "cut cancel": "--relay r --reason test",
	"cut from-debezium": "--relay r --publication p --slot s", "cut to-debezium": "--relay r --publication p --slot s",
	"dlq list": "t", "dlq replay": "t", "dlq edit": "t 0:0 --reason test --payload -", "replay": "--since 2020-01-02",
	"archive status": "", "archive create": "", "archive expire": "--yes --reason why", "audit": "",
	"contract export": "none Events", "contract check": "none.json none Events", "contract diff": "none.json none.json",
	"migrate up": "", "migrate status": "", "migrate print": "", "completion": "bash", "version": "",
}

// A writer that may create in the database owns the schema that comes first in search_path of the owner of outbox.
// The owner runs each command, and nothing of the writer.
func TestOwnerInAHostileDatabase(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	db := testenv.OtherDatabase(t)
	d := commandFixtureAt(t, db, "outbox")
	suffix := uuid.NewString()[:8]
	owner, writer := "owner_"+suffix, "writer_"+suffix
	name := strings.NewReplacer("{owner}", owner, "{writer}", writer, "{database}", db.Config().ConnConfig.Database)
	d.exec(t, name.Replace("CREATE ROLE {owner} SUPERUSER LOGIN PASSWORD 'secret'; CREATE ROLE {writer}; GRANT ALL ON DATABASE {database} TO {writer}"),
		pgx.QueryExecModeSimpleProtocol)
	t.Cleanup(func() {
		d.exec(t, name.Replace("REASSIGN OWNED BY {owner} TO CURRENT_USER; DROP OWNED BY {writer}, {owner} CASCADE; DROP ROLE {writer}, {owner}"),
			pgx.QueryExecModeSimpleProtocol)
	})
	d.exec(t, "SET ROLE "+owner+"; CREATE SCHEMA outbox; RESET ROLE", pgx.QueryExecModeSimpleProtocol)
	d.migrate(t)
	d.record(t, "a", "b")
	d.fail(t, "dead", "c", "d")
	d.exec(t, "SET ROLE "+writer+";"+name.Replace(plantedOfWriter)+"; RESET ROLE", pgx.QueryExecModeSimpleProtocol)
	u, err := url.Parse(d.url(""))
	require.NoError(t, err)
	u.User = url.UserPassword(owner, "secret")
	d.vars["DATABASE_URL"] = u.String()
	d.vars["KAFKA_BROKERS"] = strings.Join(d.brokers, ",")
	d.stdin = `{"key": 2}`
	users := writeFile(t, "operator kim a-secret-that-is-long")

	for _, c := range commands() {
		args, has := onceOnEach[c.name]
		require.True(t, has, "no arguments for %s", c.name)
		call := append(strings.Fields(c.name), strings.Fields(strings.ReplaceAll(args, "{users}", users))...)
		within := 30 * time.Second
		if c.name == "relay" || c.name == "serve" || c.name == "tail" {
			within = 3 * time.Second
		}
		ctx, cancel := context.WithTimeout(background, within)
		a := d.callWithin(t, ctx, call...)
		cancel()
		require.NotEqual(t, exitUsage, a.code, "%v: %s", call, a.err)
		var called, super bool
		require.NoError(t, db.QueryRow(background, name.Replace(`SELECT (SELECT is_called FROM {owner}.calls), (SELECT rolsuper FROM pg_roles WHERE rolname = '{writer}')`)).
			Scan(&called, &super))
		if called || super {
			t.Errorf("outbox %v runs what the writer has planted, who is superuser: %v", call, super)
			d.exec(t, name.Replace("ALTER SEQUENCE {owner}.calls RESTART; ALTER ROLE {writer} NOSUPERUSER"), pgx.QueryExecModeSimpleProtocol)
		}
		if c.name == "doctor" {
			require.Equal(t, exitProblems, a.code)
			require.Contains(t, strings.Join(strings.Fields(a.out), " "), name.Replace("role {writer} owns schema {owner}, which is in search_path of role {owner}"))
		}
	}
}
