// Package privileges finds the roles that can act in a schema with the rights of others: those that
// may create functions and operators in it.
//
// PostgreSQL chooses a function or an operator by the types of its arguments, among those of all
// schemas in search_path. It prefers an exact match to a function of its own that needs a
// conversion. So a role that may create =(varchar, varchar) in such a schema has it run by each
// session that compares two columns of this type.
package privileges

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/tables"
)

// SafePath keeps the rest of a transaction from finding objects that another role has made in a
// schema of the session's search_path.
const SafePath = `SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true)`

// Querier is a connection or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

const sqlPublicMayCreate = `
SELECT EXISTS (SELECT FROM aclexplode(n.nspacl) AS a WHERE a.grantee = 0 AND a.privilege_type = 'CREATE'), pg_has_role(n.nspowner, 'USAGE')
  FROM pg_namespace AS n WHERE n.nspname = $1`

// PublicMayCreate reports whether every role may create in a schema, and whether the role of the
// session may change that. The transaction has [SafePath]. In a schema that does not exist, no role
// may create.
func PublicMayCreate(ctx context.Context, q Querier, schema string) (may, revocable bool, err error) {
	rows, err := q.Query(ctx, sqlPublicMayCreate, schema)
	if err != nil {
		return false, false, err
	}
	_, err = pgx.ForEachRow(rows, []any{&may, &revocable}, func() error { return nil })
	return may, revocable, err
}

// sqlTrusted finds the roles that can act in the schema $1 with the rights of its owner, or
// of the role of the session, anyway: superusers, members of both, and who was granted CREATE
// by name. If $2 is set, so can members of the owner of table outbox. It is not run where the
// owner of the schema owns all that is looked at.
const sqlTrusted = `
WITH place AS MATERIALIZED (SELECT n.oid, n.nspowner, n.nspacl FROM pg_namespace AS n WHERE n.nspname = $1),
trusted AS MATERIALIZED (
    SELECT r.oid
      FROM pg_roles AS r, place AS n
     WHERE pg_has_role(r.oid, n.nspowner, 'MEMBER') OR pg_has_role(r.oid, current_user, 'MEMBER')
        OR EXISTS (SELECT FROM aclexplode(n.nspacl) AS a WHERE a.grantee <> 0 AND a.privilege_type = 'CREATE' AND pg_has_role(r.oid, a.grantee, 'MEMBER'))
        OR $2 AND EXISTS (SELECT FROM pg_class AS c WHERE c.relnamespace = n.oid AND c.relname = 'outbox' AND pg_has_role(r.oid, c.relowner, 'MEMBER'))
)`

// SQLStranger finds the owner of table outbox_migration in the schema $1 if that owner is not
// trusted with the schema. It is for a role with the rights of the schema's owner; $2 is false.
// Other roles cannot know whom the owner of the schema had trusted. The transaction has [SafePath].
const SQLStranger = sqlTrusted + `
SELECT pg_get_userbyid(c.relowner)
  FROM pg_class AS c
 WHERE c.relnamespace = (SELECT oid FROM place) AND c.relname = 'outbox_migration' AND pg_has_role((SELECT nspowner FROM place), 'USAGE')
   AND c.relowner <> (SELECT nspowner FROM place) AND c.relowner NOT IN (SELECT oid FROM trusted)`

// sqlForeign finds what other roles have made in the schema that statements take for PostgreSQL's own
// or for outbox's own: functions and operators of the same name as one of PostgreSQL, and functions that
// are named like those of outbox, which may fit the arguments of a call better. Those of an archive belong
// to another role. If $2 is not set, it also finds relations of the names in $3.
const sqlForeign = sqlTrusted + `
SELECT format('%s of role %s', pg_describe_object('pg_proc'::regclass, p.oid, 0), pg_get_userbyid(p.proowner))
  FROM pg_proc AS p
 WHERE p.pronamespace = (SELECT oid FROM place)
   AND p.proowner <> (SELECT nspowner FROM place) AND p.proowner NOT IN (SELECT oid FROM trusted)
   AND (p.proname LIKE 'outbox\_%' AND p.proname NOT LIKE 'outbox\_archive\_%'
        OR EXISTS (SELECT FROM pg_proc AS own WHERE own.pronamespace = 'pg_catalog'::regnamespace AND own.proname = p.proname))
 UNION ALL
SELECT format('%s of role %s', pg_describe_object('pg_operator'::regclass, o.oid, 0), pg_get_userbyid(o.oprowner))
  FROM pg_operator AS o
 WHERE o.oprnamespace = (SELECT oid FROM place)
   AND o.oprowner <> (SELECT nspowner FROM place) AND o.oprowner NOT IN (SELECT oid FROM trusted)
   AND EXISTS (SELECT FROM pg_operator AS own WHERE own.oprnamespace = 'pg_catalog'::regnamespace AND own.oprname = o.oprname)
 UNION ALL
SELECT format('%s of role %s', pg_describe_object('pg_class'::regclass, c.oid, 0), pg_get_userbyid(c.relowner))
  FROM pg_class AS c
 WHERE c.relnamespace = (SELECT oid FROM place) AND NOT $2 AND c.relname = ANY ($3)
   AND c.relowner <> (SELECT nspowner FROM place) AND c.relowner NOT IN (SELECT oid FROM trusted)
 ORDER BY 1 LIMIT 20`

// Foreign returns what roles that are not trusted with a schema have made in it, and
// statements of others run: 20 descriptions at most, "function now() of role mallory". With
// migrated, the owner of table outbox is trusted; else relations of the names that outbox uses
// are looked for too. The transaction has [SafePath].
func Foreign(ctx context.Context, q Querier, schema string, migrated bool) ([]string, error) {
	rows, err := q.Query(ctx, sqlForeign, schema, migrated, relations())
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// relations returns the names of the tables and the view of outbox. For sequences and primary keys PostgreSQL
// chooses another name if theirs is taken, and then statements would read what has this name.
func relations() []string {
	all := []string{"outbox_migration", "outbox_migration_pkey", "outbox_default", "outbox_pending"}
	for _, table := range tables.Names {
		all = append(all, table, table+"_id_seq", table+"_pkey")
	}
	return all
}

// sqlCreators finds the roles that may create in a schema. It omits the owners of the schema and of
// table outbox, and members of these.
const sqlCreators = `
SELECT DISTINCT CASE a.grantee WHEN 0 THEN '' ELSE pg_get_userbyid(a.grantee) END
  FROM pg_namespace AS n, aclexplode(n.nspacl) AS a
 WHERE n.nspname = $1 AND a.privilege_type = 'CREATE'
   AND (a.grantee = 0 OR NOT pg_has_role(a.grantee, n.nspowner, 'MEMBER')
        AND NOT EXISTS (SELECT FROM pg_class AS c WHERE c.relnamespace = n.oid AND c.relname = 'outbox' AND pg_has_role(a.grantee, c.relowner, 'MEMBER')))
 ORDER BY 1`

// Creator is a role that may create in a schema, or "" for PUBLIC.
type Creator string

// Name says who it is.
func (c Creator) Name() string {
	if c == "" {
		return "everybody"
	}
	return "role " + string(c)
}

// Quoted is its name as statements have it.
func (c Creator) Quoted() string {
	if c == "" {
		return "PUBLIC"
	}
	return pgx.Identifier{string(c)}.Sanitize()
}

// Creators returns the roles that may create in a schema, except the owners of the schema and of
// table outbox. The transaction has [SafePath].
func Creators(ctx context.Context, q Querier, schema string) ([]Creator, error) {
	rows, err := q.Query(ctx, sqlCreators, schema)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[Creator])
}

// sqlDatabaseCreators finds who may make schemas, except who can act with the rights of the owner of the database, of
// the owner of table outbox in the schema $1, or of the session's role.
const sqlDatabaseCreators = `
SELECT DISTINCT CASE a.grantee WHEN 0 THEN '' ELSE pg_get_userbyid(a.grantee) END
  FROM pg_database AS d, aclexplode(d.datacl) AS a
 WHERE d.datname = current_database() AND a.privilege_type = 'CREATE'
   AND (a.grantee = 0 OR NOT pg_has_role(a.grantee, d.datdba, 'MEMBER') AND NOT pg_has_role(a.grantee, current_user, 'MEMBER')
        AND NOT EXISTS (SELECT FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
                         WHERE n.nspname = $1 AND c.relname = 'outbox' AND pg_has_role(a.grantee, c.relowner, 'MEMBER')))
 ORDER BY 1`

// DatabaseCreators returns the roles that may make schemas in the database, except the owners of the database and of
// table outbox in the schema outbox. The transaction has [SafePath].
func DatabaseCreators(ctx context.Context, q Querier, outbox string) ([]Creator, error) {
	rows, err := q.Query(ctx, sqlDatabaseCreators, outbox)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[Creator])
}

// sqlPathCreators finds who may put functions into the schema $1, or make it if it does not exist. It omits who can act
// with the rights of the role $2 anyway: members of it, of the owner of the database and of the owner of table outbox
// in the schema $3, and superusers.
const sqlPathCreators = `
WITH here AS MATERIALIZED (SELECT d.datdba, d.datacl FROM pg_database AS d WHERE d.datname = current_database()),
place AS MATERIALIZED (SELECT n.nspowner, n.nspacl FROM pg_namespace AS n WHERE n.nspname = $1),
creators AS (
    SELECT n.nspowner AS role, 'owns' AS may FROM place AS n
     UNION
    SELECT a.grantee, 'may create in' FROM place AS n, aclexplode(n.nspacl) AS a WHERE a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner
     UNION
    SELECT a.grantee, 'may make' FROM here, aclexplode(here.datacl) AS a WHERE a.privilege_type = 'CREATE' AND NOT EXISTS (SELECT FROM place)
), trusted AS MATERIALIZED (
    SELECT r.oid FROM pg_roles AS r, here
     WHERE r.rolname = 'pg_database_owner' OR pg_has_role(r.oid, here.datdba, 'MEMBER')
        OR EXISTS (SELECT FROM pg_roles AS own WHERE own.rolname = $2 AND pg_has_role(r.oid, own.oid, 'MEMBER'))
        OR EXISTS (SELECT FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
                    WHERE n.nspname = $3 AND c.relname = 'outbox' AND pg_has_role(r.oid, c.relowner, 'MEMBER'))
)
SELECT CASE c.role WHEN 0 THEN '' ELSE pg_get_userbyid(c.role) END, c.may FROM creators AS c WHERE c.role = 0 OR c.role NOT IN (SELECT oid FROM trusted) ORDER BY 1, 2`

// PathCreator is a role that can put functions into a schema.
type PathCreator struct {
	Creator
	May string // "owns", "may create in", or "may make"
}

// PathCreators returns who can put functions into a schema of a role's search_path, except those who have the rights
// of the role, of the owner of the database or of the owner of table outbox in the schema outbox. The transaction has
// [SafePath].
func PathCreators(ctx context.Context, q Querier, schema, role, outbox string) ([]PathCreator, error) {
	rows, err := q.Query(ctx, sqlPathCreators, schema, role, outbox)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[PathCreator])
}
