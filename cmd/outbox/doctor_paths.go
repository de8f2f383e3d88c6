package main

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/privileges"
)

// opening is a way for a stranger into a schema in search_path of roles.
type opening struct {
	privileges.PathCreator
	schema, database string
	roles            []string
}

func (o opening) what() string {
	of := "role " + o.roles[0]
	if len(o.roles) > 1 {
		of = "roles " + strings.Join(o.roles, ", ")
	}
	return fmt.Sprintf("%s %s schema %s, which is in search_path of %s", o.Name(), o.May, o.schema, of)
}

// do returns the statements that close it.
func (o opening) do() string {
	switch o.May {
	case "owns": // what the owner has made stays
		var all []string
		for _, role := range o.roles {
			all = append(all, fmt.Sprintf("ALTER ROLE %s IN DATABASE %s SET search_path = pg_catalog, pg_temp", pgx.Identifier{role}.Sanitize(), pgx.Identifier{o.database}.Sanitize()))
		}
		return strings.Join(all, "; ")
	case "may make":
		return fmt.Sprintf("REVOKE CREATE ON DATABASE %s FROM %s", pgx.Identifier{o.database}.Sanitize(), o.Quoted())
	}
	return fmt.Sprintf("REVOKE CREATE ON SCHEMA %s FROM %s", pgx.Identifier{o.schema}.Sanitize(), o.Quoted())
}

// path is the search_path of a role.
type path struct{ role, schemas string }

// sqlOwnPath returns the search_path of the session.
const sqlOwnPath = `SELECT current_user::text, pg_catalog.current_setting('search_path'), pg_catalog.current_database()::text`

// sqlPaths returns the search paths that sessions of the roles $1 begin with: the default of PostgreSQL where the
// configuration file of the server is not known to have another one.
const sqlPaths = `
SELECT r.rolname::text, coalesce((
           SELECT substr(c.setting, 13) FROM pg_db_role_setting AS s CROSS JOIN LATERAL pg_catalog.unnest(s.setconfig) AS c (setting)
            WHERE (s.setrole = r.oid OR s.setrole = 0::oid) AND (s.setdatabase = d.oid OR s.setdatabase = 0::oid) AND starts_with(c.setting, 'search_path=')
            ORDER BY s.setrole = 0::oid, s.setdatabase = 0::oid LIMIT 1),
       (SELECT CASE p.source WHEN 'configuration file' THEN p.setting ELSE p.boot_val END FROM pg_settings AS p WHERE p.name = 'search_path'))
  FROM pg_roles AS r, pg_database AS d WHERE r.rolname = ANY ($1::name[]) AND d.datname = current_database() ORDER BY 1`

// openings looks into the schemas in search_path of the session and of the roles that are named, except the schema of
// outbox. It leaves the transaction with [privileges.SafePath].
func (d *doctor) openings(ctx context.Context, tx pgx.Tx) (all []opening, err error) {
	var own path
	var database string
	if err := tx.QueryRow(ctx, sqlOwnPath).Scan(&own.role, &own.schemas, &database); err != nil {
		return nil, err
	}
	if _, err = tx.Exec(ctx, privileges.SafePath); err != nil {
		return nil, err
	}
	roles := []string{}
	for _, p := range d.parts {
		roles = append(roles, p.role)
	}
	rows, err := tx.Query(ctx, sqlPaths, roles)
	if err != nil {
		return nil, err
	}
	paths := []path{own}
	var p path
	if _, err := pgx.ForEachRow(rows, []any{&p.role, &p.schemas}, func() error { paths = append(paths, p); return nil }); err != nil {
		return nil, err
	}
	for _, p := range paths {
		for _, schema := range p.names() {
			if schema == d.e.schemaName() {
				continue
			}
			creators, err := privileges.PathCreators(ctx, tx, schema, p.role, d.e.schemaName())
			if err != nil {
				return nil, err
			}
			for _, c := range creators {
				i := slices.IndexFunc(all, func(o opening) bool { return o.PathCreator == c && o.schema == schema })
				switch {
				case i < 0:
					all = append(all, opening{c, schema, database, []string{p.role}})
				case !slices.Contains(all[i].roles, p.role):
					all[i].roles = append(all[i].roles, p.role)
				}
			}
		}
	}
	return all, nil
}

var pathName = regexp.MustCompile(`"(?:[^"]|"")*"|[^\s,"]+`)

// names returns the names of the schemas. $user is the role.
func (p path) names() (names []string) {
	for _, name := range pathName.FindAllString(p.schemas, -1) {
		if strings.HasPrefix(name, `"`) {
			name = strings.ReplaceAll(name[1:len(name)-1], `""`, `"`)
		} else {
			name = strings.ToLower(name)
		}
		if name == "$user" {
			name = p.role
		}
		if name != "" && name != "pg_temp" {
			names = append(names, name)
		}
	}
	return names
}
