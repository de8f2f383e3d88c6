package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// The search_path of a role is "$user", public unless it is set: the schema of its own name comes first. A stranger
// who has that schema, may create in it or may make it acts with the rights of the role.
func TestDoctorOnStrangersInThePath(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	db := testenv.OtherDatabase(t)
	name := db.Config().ConnConfig.Database
	d := commandFixtureAt(t, db, "outbox")
	d.exec(t, "CREATE SCHEMA {s}; REVOKE CREATE ON SCHEMA public FROM PUBLIC", pgx.QueryExecModeSimpleProtocol)
	d.migrate(t)
	d.vars["DATABASE_URL"] = d.url("&search_path=pg_catalog")
	suffix := uuid.NewString()[:8]
	relay, stranger, friend := "relay_"+suffix, "stranger_"+suffix, "friend_"+suffix
	d.exec(t, strings.NewReplacer("{relay}", relay, "{stranger}", stranger, "{friend}", friend).Replace(
		`CREATE ROLE {relay} LOGIN PASSWORD 'secret'; CREATE ROLE {stranger}; CREATE ROLE {friend}; GRANT USAGE ON SCHEMA {s} TO {relay}; GRANT SELECT ON ALL TABLES IN SCHEMA {s} TO {relay}; GRANT {relay} TO {friend}`),
		pgx.QueryExecModeSimpleProtocol)
	t.Cleanup(func() {
		d.exec(t, fmt.Sprintf("DROP OWNED BY %s, %s, %s CASCADE", relay, stranger, friend))
		d.exec(t, fmt.Sprintf("DROP ROLE %s, %s, %s", relay, stranger, friend))
	})
	find := func() []finding { return d.findings(t, "--only", "privileges.schema,doctor", "--as", "relay="+relay) }
	require.Empty(t, find())
	of := ", which is in search_path of role " + relay
	for _, tt := range []struct{ do, what, undo string }{
		{"GRANT CREATE ON DATABASE " + name + " TO " + stranger, "role " + stranger + " may make schema " + relay + of, ""},
		{"GRANT CREATE ON DATABASE " + name + " TO PUBLIC", "everybody may make schema " + relay + of, ""},
		{"CREATE SCHEMA " + relay + " AUTHORIZATION " + stranger, "role " + stranger + " owns schema " + relay + of, "DROP SCHEMA " + relay},
		{"CREATE SCHEMA " + relay + "; GRANT CREATE ON SCHEMA " + relay + " TO " + stranger, "role " + stranger + " may create in schema " + relay + of, "DROP SCHEMA " + relay},
		{"GRANT CREATE ON SCHEMA public TO " + stranger, "role " + stranger + " may create in schema public" + of, ""},
		{"ALTER ROLE " + relay + ` IN DATABASE ` + name + ` SET search_path = pg_catalog, "of a ""stranger"""; CREATE SCHEMA "of a ""stranger""" AUTHORIZATION ` + stranger,
			"role " + stranger + ` owns schema of a "stranger"` + of, `DROP SCHEMA "of a ""stranger"""`},
	} {
		d.exec(t, tt.do, pgx.QueryExecModeSimpleProtocol)
		found := find()
		require.Len(t, found, 1, tt.do)
		require.Equal(t, severityError, found[0].Severity)
		require.Equal(t, tt.what, found[0].What, tt.do)
		d.exec(t, found[0].Do, pgx.QueryExecModeSimpleProtocol)
		require.Empty(t, find(), "after %s", found[0].Do)
		d.exec(t, "ALTER ROLE "+relay+" IN DATABASE "+name+" RESET search_path; "+tt.undo, pgx.QueryExecModeSimpleProtocol)
	}
	// The session's own role is looked at, too.
	d.exec(t, "GRANT CREATE ON DATABASE "+name+" TO "+stranger)
	d.vars["DATABASE_URL"] = strings.Replace(d.url(""), d.db.Config().ConnConfig.User+":"+d.db.Config().ConnConfig.Password+"@", relay+":secret@", 1)
	require.Contains(t, fmt.Sprint(d.findings(t, "--only", "privileges.schema")), "role "+stranger+" may make schema "+relay+of)
	d.vars["DATABASE_URL"] = d.url("&search_path=pg_catalog")
	d.exec(t, "REVOKE CREATE ON DATABASE "+name+" FROM "+stranger)
	for _, trusted := range []string{relay, friend} {
		d.exec(t, "GRANT CREATE ON DATABASE "+name+" TO "+trusted)
		require.Empty(t, find(), "%s has the rights of the relay", trusted)
	}
	// A role that may log in is looked at without being named, if there is a schema of its name.
	d.exec(t, "CREATE SCHEMA "+relay+" AUTHORIZATION "+stranger)
	found := d.findings(t, "--only", "privileges.schema")
	require.Len(t, found, 1)
	require.Equal(t, "role "+stranger+" owns schema "+relay+of, found[0].What)
	d.exec(t, found[0].Do)
	require.Empty(t, d.findings(t, "--only", "privileges.schema"))
	// Schemas before pg_catalog are found, and who may make schemas.
	d.exec(t, "ALTER ROLE "+relay+" IN DATABASE "+name+" SET search_path = public, pg_catalog")
	found = d.findings(t, "--only", "privileges.path", "--as", "relay="+relay)
	require.Len(t, found, 1)
	require.Contains(t, found[0].What, "search_path of role "+relay+" has schemas before pg_catalog: public, pg_catalog")
	d.exec(t, found[0].Do)
	require.Empty(t, d.findings(t, "--only", "privileges.path", "--as", "relay="+relay))
	d.exec(t, "REVOKE CREATE ON DATABASE "+name+" FROM "+relay+", "+friend)
	require.Empty(t, d.findings(t, "--only", "privileges.database"))
	for _, creator := range []string{"PUBLIC", stranger} {
		d.exec(t, "GRANT CREATE ON DATABASE "+name+" TO "+creator)
		found = d.findings(t, "--only", "privileges.database")
		require.Len(t, found, 1)
		require.Equal(t, severityWarning, found[0].Severity)
		d.exec(t, found[0].Do)
		require.Empty(t, d.findings(t, "--only", "privileges.database"))
	}
}

// A database has logins of others, some with a schema of their own name. The doctor looks at the schema of a login only
// if the login may use a table of outbox.
func TestDoctorOnLoginsOfOthers(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	for _, schema := range []string{"outbox", "public"} { // in public, everybody has USAGE
		db := testenv.OtherDatabase(t)
		d := commandFixtureAt(t, db, schema)
		suffix := uuid.NewString()[:8]
		login, owner, group := "login_"+suffix, "owner_"+suffix, "group_"+suffix
		in := strings.NewReplacer("{login}", login, "{owner}", owner, "{group}", group).Replace
		d.exec(t, "CREATE SCHEMA IF NOT EXISTS {s}; REVOKE CREATE ON SCHEMA public FROM PUBLIC", pgx.QueryExecModeSimpleProtocol)
		d.migrate(t)
		d.vars["DATABASE_URL"] = d.url("&search_path=pg_catalog")
		d.exec(t, in(`CREATE ROLE {login} LOGIN; CREATE ROLE {owner}; CREATE ROLE {group}; GRANT USAGE ON SCHEMA {s} TO {group};
			CREATE SCHEMA {login} AUTHORIZATION {owner}; CREATE TABLE {s}.mine (); GRANT SELECT ON {s}.mine TO {login}`), pgx.QueryExecModeSimpleProtocol)
		t.Cleanup(func() {
			d.exec(t, in("DROP OWNED BY {login}, {owner}, {group} CASCADE"))
			d.exec(t, in("DROP ROLE {login}, {owner}, {group}"))
		})
		want := in("role {owner} owns schema {login}, which is in search_path of role {login}")
		requireFound := func(found bool, why string) {
			all := d.findings(t, "--only", "privileges.schema,doctor")
			if !found {
				require.Empty(t, all, "%s: %s", schema, why)
				return
			}
			require.Len(t, all, 1, "%s: %s", schema, why)
			require.Equal(t, want, all[0].What)
		}
		requireFound(false, "it has rights in a table that is not of outbox only")
		d.exec(t, in("GRANT INSERT (event_id) ON {s}.outbox TO {group}; GRANT {group} TO {login}"), pgx.QueryExecModeSimpleProtocol)
		requireFound(true, "a member of a role that may write a column")
		d.exec(t, in("REVOKE {group} FROM {login}"))
		d.exec(t, in("REVOKE USAGE ON SCHEMA {s} FROM PUBLIC"))
		d.exec(t, in("GRANT SELECT ON {s}.outbox TO {login}"))
		requireFound(false, "it may not use the schema")
		d.exec(t, in("GRANT USAGE ON SCHEMA {s} TO {login}"))
		requireFound(true, "it may use schema and table")
	}
}
