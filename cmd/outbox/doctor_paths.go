package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/privileges"
	"github.com/outboxgo/outbox/internal/tables"
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
type path struct {
	role, schemas string
	named         bool // by --as, or it is the role of the session
}

// sqlOwnPath returns the search_path that the session began with. The session has another one now, unless a pooler is
// in between.
const sqlOwnPath = `
SELECT current_user::text, (SELECT p.reset_val FROM pg_settings AS p WHERE p.name = 'search_path'), current_database()::text`

// sqlPaths returns the search paths that sessions of some roles begin with: of the roles $1, and of those that may log
// in, have a schema of their name, and may use one of the tables $3 in the schema $2. A search path is the default of
// PostgreSQL where the configuration file of the server is not known to have another one.
const sqlPaths = `
SELECT r.rolname::text, r.rolname = ANY ($1::name[]), coalesce((
           SELECT substr(c.setting, 13) FROM pg_db_role_setting AS s CROSS JOIN LATERAL pg_catalog.unnest(s.setconfig) AS c (setting)
            WHERE (s.setrole = r.oid OR s.setrole = 0::oid) AND (s.setdatabase = d.oid OR s.setdatabase = 0::oid) AND starts_with(c.setting, 'search_path=')
            ORDER BY s.setrole = 0::oid, s.setdatabase = 0::oid LIMIT 1),
       (SELECT CASE p.source WHEN 'configuration file' THEN p.setting ELSE p.boot_val END FROM pg_settings AS p WHERE p.name = 'search_path'))
  FROM pg_roles AS r, pg_database AS d
 WHERE d.datname = current_database()
   AND (r.rolname = ANY ($1::name[]) OR r.rolcanlogin AND EXISTS (SELECT FROM pg_namespace AS n WHERE n.nspname = r.rolname)
        AND EXISTS (SELECT FROM pg_namespace AS n JOIN pg_class AS c ON c.relnamespace = n.oid
                     WHERE n.nspname = $2::name AND c.relname = ANY ($3::name[]) AND c.relkind IN ('r', 'p')
                       AND has_schema_privilege(r.oid, n.oid, 'USAGE')
                       AND (has_table_privilege(r.oid, c.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
                            OR has_any_column_privilege(r.oid, c.oid, 'SELECT, INSERT, UPDATE, REFERENCES'))))
 ORDER BY 1`

// paths returns the search paths of the session and of roles, and the name of the database. The transaction has
// [privileges.SafePath].
func (d *doctor) paths(ctx context.Context, tx pgx.Tx) (all []path, database string, err error) {
	own := path{named: true}
	if err := tx.QueryRow(ctx, sqlOwnPath).Scan(&own.role, &own.schemas, &database); err != nil {
		return nil, "", err
	}
	roles := []string{}
	for _, p := range d.parts {
		roles = append(roles, p.role)
	}
	rows, err := tx.Query(ctx, sqlPaths, roles, d.e.schemaName(), append([]string{"outbox_migration"}, tables.Names...))
	if err != nil {
		return nil, "", err
	}
	all = []path{own}
	var p path
	_, err = pgx.ForEachRow(rows, []any{&p.role, &p.named, &p.schemas}, func() error { all = append(all, p); return nil })
	return all, database, err
}

// openings looks into the schemas of search paths, except the schema of outbox. Of a role that is not named it looks
// into the schema of its name only. The transaction has [privileges.SafePath].
func (d *doctor) openings(ctx context.Context, tx pgx.Tx, paths []path, database string) (all []opening, err error) {
	for _, p := range paths {
		for _, schema := range p.names() {
			if schema == d.e.schemaName() || !p.named && schema != p.role {
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

// overshadows reports whether a schema of the path comes before PostgreSQL's own.
func (p path) overshadows() bool { return slices.Index(p.names(), "pg_catalog") > 0 }

// names returns the names of the schemas, as PostgreSQL reads them. $user is the role.
func (p path) names() (names []string) {
	const space, maxName = " \t\n\r\f\v", 63
	for rest := strings.TrimLeft(p.schemas, space); rest != ""; rest = strings.TrimLeft(rest, space+",") {
		var name string
		if rest[0] == '"' {
			name, rest = cutQuoted(rest[1:])
		} else {
			end := strings.IndexAny(rest+",", space+",")
			name, rest = strings.Map(lowerASCII, rest[:end]), rest[end:]
		}
		for len(name) > maxName { // PostgreSQL cuts no character
			_, last := utf8.DecodeLastRuneInString(name)
			name = name[:len(name)-last]
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

// cutQuoted returns the name in front of a closing quote, and what is behind it. Two quotes are one in the name.
func cutQuoted(text string) (name, rest string) {
	for {
		before, behind, _ := strings.Cut(text, `"`)
		name += before
		if !strings.HasPrefix(behind, `"`) {
			return name, behind
		}
		name, text = name+`"`, behind[1:]
	}
}

func lowerASCII(r rune) rune {
	if 'A' <= r && r <= 'Z' {
		return r + 'a' - 'A'
	}
	return r
}
