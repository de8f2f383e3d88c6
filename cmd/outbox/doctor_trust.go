package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/privileges"
	"github.com/outboxgo/outbox/internal/tables"
)

// firstCheck is made before others, because their statements could run what a stranger has made. It needs no tables.
var firstCheck = check{"privileges.schemas", []string{"privileges.schema", "privileges.path", "privileges.database", "privileges.foreign"}, (*doctor).trust}

// trust looks for roles that can act with the rights of other roles.
func (d *doctor) trust(ctx context.Context) error {
	return pgx.BeginTxFunc(ctx, d.e.db, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, privileges.SafePath); err != nil {
			return err
		}
		paths, database, err := d.paths(ctx, tx)
		if err != nil {
			return err
		}
		for _, p := range paths {
			if p.named && p.overshadows() {
				d.add("privileges.path", severityError, fmt.Sprintf("search_path of role %s has schemas before pg_catalog: %s", p.role, p.schemas),
					"Functions and operators that are made there are run instead of those of PostgreSQL.",
					fmt.Sprintf("ALTER ROLE %s IN DATABASE %s SET search_path = pg_catalog, pg_temp", pgx.Identifier{p.role}.Sanitize(), pgx.Identifier{database}.Sanitize()))
			}
		}
		return errors.Join(d.schemaCreators(ctx, tx), d.pathCreators(ctx, tx, paths, database), d.databaseCreators(ctx, tx, database), d.foreign(ctx, tx))
	})
}

func (d *doctor) schemaCreators(ctx context.Context, tx pgx.Tx) error {
	creators, err := privileges.Creators(ctx, tx, d.e.schemaName())
	for _, c := range creators {
		d.add("privileges.schema", severityError, fmt.Sprintf("%s may create in schema %s", c.Name(), d.e.schemaName()),
			"Functions and operators that are made there are run by all who use outbox, with their rights.",
			fmt.Sprintf("REVOKE CREATE ON SCHEMA %s FROM %s", pgx.Identifier{d.e.schemaName()}.Sanitize(), c.Quoted()))
	}
	return err
}

func (d *doctor) pathCreators(ctx context.Context, tx pgx.Tx, paths []path, database string) error {
	open, err := d.openings(ctx, tx, paths, database)
	for _, o := range open {
		d.add("privileges.schema", severityError, o.what(),
			"Statements of outbox look for functions and operators there, too, and run what is made there, with the rights of whoever sends them. "+
				"They name the schemas of outbox: a role that sends no others may have search_path = pg_catalog, pg_temp.", o.do())
	}
	return err
}

func (d *doctor) databaseCreators(ctx context.Context, tx pgx.Tx, database string) error {
	creators, err := privileges.DatabaseCreators(ctx, tx, d.e.schemaName())
	for _, c := range creators {
		d.add("privileges.database", severityWarning, fmt.Sprintf("%s may make schemas in database %s", c.Name(), database),
			"A schema with the name of a role comes first in search_path of this role, unless search_path is set.",
			fmt.Sprintf("REVOKE CREATE ON DATABASE %s FROM %s", pgx.Identifier{database}.Sanitize(), c.Quoted()))
	}
	return err
}

// sqlHasOutbox reports whether the schema $1 has table outbox.
const sqlHasOutbox = `
SELECT EXISTS (SELECT FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = 'outbox')`

func (d *doctor) foreign(ctx context.Context, tx pgx.Tx) error {
	var migrated bool
	if err := tx.QueryRow(ctx, sqlHasOutbox, d.e.schemaName()).Scan(&migrated); err != nil || !migrated {
		return err
	}
	foreign, err := privileges.Foreign(ctx, tx, d.e.schemaName(), true)
	for _, what := range foreign {
		d.add("privileges.foreign", severityError, fmt.Sprintf("schema %s has %s", d.e.schemaName(), what),
			"Statements of outbox may run it instead of what PostgreSQL has under this name, with the rights of whoever sends them.",
			"Ask who made it and what it has done meanwhile, and drop it.")
	}
	return err
}

const sqlPartitionGrants = `
SELECT c.relname, CASE a.grantee WHEN 0::oid THEN 'PUBLIC' ELSE pg_catalog.quote_ident(pg_get_userbyid(a.grantee)) END, string_agg(DISTINCT a.privilege_type, ', ')
  FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
 CROSS JOIN LATERAL (SELECT c.relacl UNION ALL SELECT attacl FROM pg_attribute WHERE attrelid = c.oid) AS g (acl)
 CROSS JOIN LATERAL aclexplode(g.acl) AS a
 WHERE i.inhparent = to_regclass(pg_catalog.format('%I.outbox', $1::text))::oid AND a.grantee <> c.relowner
 GROUP BY 1, 2 ORDER BY 1, 2`

// partitionGrants checks all partitions: a right on a partition stays when it is revoked on outbox.
func (d *doctor) partitionGrants(ctx context.Context) error {
	rows, err := d.e.db.Query(ctx, sqlPartitionGrants, d.e.schemaName())
	if err != nil {
		return err
	}
	var partition, grantee, granted string
	_, err = pgx.ForEachRow(rows, []any{&partition, &grantee, &granted}, func() error {
		d.add("privileges.partitions", severityWarning, fmt.Sprintf("%s has %s on partition %s itself", grantee, granted, partition),
			"It keeps this right when it loses that to outbox.",
			fmt.Sprintf("REVOKE ALL ON %s FROM %s", pgx.Identifier{d.e.schemaName(), partition}.Sanitize(), grantee))
		return nil
	})
	return err
}

// sqlRights returns the privileges of a role on tables, and its privileges to set a sequence. If the role
// has a privilege only on some columns, it also returns the columns.
const sqlRights = `
WITH named AS (
    SELECT c.oid, c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
     WHERE n.nspname = $2 AND c.relkind IN ('r', 'p') AND c.relname = ANY ($3::text[])
)
SELECT t.relname, false, p.privilege, '{}'::name[]
  FROM named AS t, pg_catalog.unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) AS p (privilege)
 WHERE pg_catalog.has_table_privilege($1::name, t.oid, p.privilege)
 UNION ALL
SELECT t.relname, false, p.privilege, pg_catalog.array_agg(a.attname ORDER BY a.attnum)
  FROM named AS t, pg_catalog.unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'REFERENCES']) AS p (privilege), pg_attribute AS a
 WHERE NOT pg_catalog.has_table_privilege($1::name, t.oid, p.privilege) AND a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
   AND pg_catalog.has_column_privilege($1::name, t.oid, a.attnum, p.privilege)
 GROUP BY 1, 3
 UNION ALL
SELECT s.relname, true, 'UPDATE', '{}'
  FROM named AS t JOIN pg_depend AS d ON d.refobjid = t.oid AND d.refclassid = 'pg_class'::regclass::oid AND d.classid = 'pg_class'::regclass::oid
  JOIN pg_class AS s ON s.oid = d.objid
 WHERE CASE WHEN s.relkind = 'S' THEN pg_catalog.has_sequence_privilege($1::name, s.oid, 'UPDATE') END
 ORDER BY 1, 3`

// sqlIsOwner reports whether a role may do everything: it is a superuser, or the owner of the
// tables or a member of that.
const sqlIsOwner = `
SELECT coalesce(bool_or(pg_catalog.pg_has_role($1::name, c.relowner, 'USAGE')), false)
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE n.nspname = $2 AND c.relname = 'outbox'`

// excess looks for rights that a role has, but that its named parts do not need. A connected role
// may have parts that were not named.
func (d *doctor) excess(ctx context.Context, named []part) error {
	byRole := map[string][]need{}
	for _, p := range named {
		byRole[p.role] = append(byRole[p.role], partNeeds[p.name]...)
	}
	for role, needs := range byRole {
		if err := d.excessOf(ctx, role, needs); err != nil {
			return err
		}
	}
	return nil
}

func (d *doctor) excessOf(ctx context.Context, role string, needs []need) error {
	if unlimited, err := d.has(ctx, sqlIsOwner, role, d.e.schemaName()); err != nil || unlimited {
		return err
	}
	rows, err := d.e.db.Query(ctx, sqlRights, role, d.e.schemaName(), tables.Names)
	if err != nil {
		return err
	}
	var more []need
	var name, privilege string
	var columns []string
	var sequence bool
	_, err = pgx.ForEachRow(rows, []any{&name, &sequence, &privilege, &columns}, func() error {
		n := need{privilege: privilege, table: name}
		if sequence {
			n.table, n.sequence = "", name
		}
		if n.columns = notNeeded(n, columns, needs); n.columns != nil {
			more = append(more, n)
		}
		return nil
	})
	functions, functionsErr := d.functionsBeside(ctx, role, needs)
	err = errors.Join(err, functionsErr)
	for _, n := range append(more, functions...) {
		do, doErr := d.withdrawal(ctx, role, n, needs)
		err = errors.Join(err, doErr)
		d.add("privileges.excess", severityWarning, fmt.Sprintf("role %s has %s on %s", role, n.privilege, n.on()),
			"Its part does not need it. Whoever gets hold of the role can use it, without a trace in outbox_audit.", do)
	}
	return err
}

// functionsBeside returns the functions that a role may call and does not need.
func (d *doctor) functionsBeside(ctx context.Context, role string, needs []need) (more []need, err error) {
	seen := map[string]bool{}
	for _, n := range needs {
		seen[n.function] = true
	}
	for _, part := range slices.Sorted(maps.Keys(partNeeds)) {
		for _, n := range partNeeds[part] {
			if seen[n.function] { // also "", of what is no function
				continue
			}
			seen[n.function] = true
			may, err := d.has(ctx, `SELECT coalesce(pg_catalog.has_function_privilege($1::name, to_regprocedure($2)::oid, 'EXECUTE'), false)`, role, d.inSchema(n.function))
			if err != nil {
				return nil, err
			}
			if may {
				more = append(more, n)
			}
		}
	}
	return more, nil
}

// inSchema is a function with its schema.
func (d *doctor) inSchema(function string) string {
	return pgx.Identifier{d.e.schemaName()}.Sanitize() + "." + function
}

// sqlGrantees returns the grantees through which a role has a privilege: the role itself, roles that it is
// a member of, or PUBLIC. $2 is a relation, and $4 its columns; no columns means the whole relation. $5 is
// a function instead.
const sqlGrantees = `
SELECT DISTINCT CASE a.grantee WHEN 0::oid THEN 'PUBLIC' ELSE pg_catalog.quote_ident(pg_get_userbyid(a.grantee)) END
  FROM (SELECT relacl FROM pg_class WHERE oid = to_regclass($2::text)::oid AND coalesce(pg_catalog.cardinality($4::name[]), 0) = 0
         UNION ALL
        SELECT attacl FROM pg_attribute WHERE attrelid = to_regclass($2::text)::oid AND attname = ANY ($4::name[])
         UNION ALL
        SELECT proacl FROM pg_proc WHERE oid = to_regprocedure($5::text)::oid) AS g (acl)
 CROSS JOIN LATERAL aclexplode(g.acl) AS a
 WHERE a.privilege_type = $3 AND CASE a.grantee WHEN 0::oid THEN true ELSE pg_catalog.pg_has_role($1::name, a.grantee, 'USAGE') END
 ORDER BY 1`

// withdrawal returns the statements that take a privilege from a role. When PostgreSQL revokes a privilege
// on a table, it also revokes it on the columns. So the statements grant necessary column privileges again.
func (d *doctor) withdrawal(ctx context.Context, role string, n need, needs []need) (string, error) {
	var relation, function any // nil is NULL; before version 16, PostgreSQL refuses an invalid name
	if n.function != "" {
		function = d.inSchema(n.function)
	} else {
		relation = pgx.Identifier{d.e.schemaName(), n.table + n.sequence}.Sanitize()
	}
	rows, err := d.e.db.Query(ctx, sqlGrantees, role, relation, n.privilege, n.columns, function)
	if err != nil {
		return "", err
	}
	from, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return "", err
	}
	if len(from) == 0 {
		return fmt.Sprintf("Take %s out of pg_read_all_data and pg_write_all_data.", role), nil
	}
	own := pgx.Identifier{role}.Sanitize()
	revoke, _, _ := strings.Cut(strings.Replace(n.grant(d.e.schemaName(), role), "GRANT", "REVOKE", 1), " TO "+own)
	do := revoke + " FROM " + strings.Join(from, ", ")
	named := strings.Join(slices.DeleteFunc(from, func(grantee string) bool { return grantee == "PUBLIC" }), ", ")
	for _, needed := range needs {
		if len(n.columns) == 0 && needed.table == n.table && needed.sequence == n.sequence && needed.function == n.function && needed.privilege == n.privilege {
			grant, _, _ := strings.Cut(needed.grant(d.e.schemaName(), role), " TO "+own)
			do += "; " + grant + " TO " + cmp.Or(named, own)
		}
	}
	return do, nil
}

// notNeeded returns the columns of a privilege that are not needed, none for all of them, or
// nil if it is needed.
func notNeeded(have need, columns []string, needs []need) []string {
	excess := columns
	for _, n := range needs {
		if n.table != have.table || n.sequence != have.sequence || n.privilege != have.privilege {
			continue
		}
		if len(n.columns) == 0 {
			return nil
		}
		if len(columns) > 0 {
			excess = slices.DeleteFunc(slices.Clone(excess), func(c string) bool { return slices.Contains(n.columns, c) })
			if len(excess) == 0 {
				return nil
			}
		}
	}
	if excess == nil {
		return []string{}
	}
	return excess
}

// sqlGroupsOf returns for which groups a role may write, in four columns:
//
//  1. all groups, because the policies do not apply to the role
//  2. all groups, because it may write all data
//  3. some groups, by a row
//  4. all groups, by *
const sqlGroupsOf = `
SELECT pg_catalog.pg_has_role(r.oid, c.relowner, 'USAGE') OR r.rolbypassrls OR NOT c.relrowsecurity,
       pg_catalog.pg_has_role(r.oid, 'pg_write_all_data', 'USAGE'),
       EXISTS (SELECT FROM {schema}.consumer_group_role AS g WHERE g.role = 'public' OR pg_catalog.pg_has_role(r.oid, to_regrole(pg_catalog.quote_ident(g.role)), 'USAGE')),
       EXISTS (SELECT FROM {schema}.consumer_group_role AS g
                WHERE g.consumer_group = '*' AND (g.role = 'public' OR pg_catalog.pg_has_role(r.oid, to_regrole(pg_catalog.quote_ident(g.role)), 'USAGE')))
  FROM pg_roles AS r, pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE r.rolname = $1 AND n.nspname = $2 AND c.relname = 'event_handled'`

// groupsOf checks that a consumer may write only for its groups, and a relay for all groups, because its
// retention removes old rows.
func (d *doctor) groupsOf(ctx context.Context, p part) error {
	if !slices.Contains([]string{"consumer", "worker", "inbox", "relay"}, p.name) {
		return nil
	}
	var unlimited, allData, some, all bool
	schema := pgx.Identifier{d.e.schemaName()}.Sanitize()
	err := d.e.db.QueryRow(ctx, strings.ReplaceAll(sqlGroupsOf, "{schema}", schema), p.role, d.e.schemaName()).Scan(&unlimited, &allData, &some, &all)
	if errors.Is(err, pgx.ErrNoRows) || pg.IsUndefinedTable(err) {
		return nil // the tables are looked at elsewhere
	}
	if err != nil || unlimited {
		return err
	}
	role, group := quoteText(p.role), "the name of its group"
	if p.name == "inbox" {
		group = "inbox: and the name of the inbox"
	}
	switch {
	case p.name == "relay" && !allData && !all:
		d.add("privileges.groups", severityError, fmt.Sprintf("role %s may not work for all consumer groups", p.role),
			"It can neither take a lease nor move a position, and its retention finds nothing to remove in event_handled and event_delivery.",
			fmt.Sprintf("INSERT INTO %s.consumer_group_role (consumer_group, role) VALUES ('*', %s)", schema, role))
	case p.name != "relay" && allData:
		d.add("privileges.groups", severityWarning, fmt.Sprintf("role %s may write for all consumer groups, as it may write all data", p.role),
			"It can take back what other groups have handled, or have them skip events.",
			fmt.Sprintf("Give it rows of its groups in %s.consumer_group_role, and take pg_write_all_data from it.", schema))
	case p.name != "relay" && !some:
		d.add("privileges.groups", severityError, fmt.Sprintf("role %s may write for no consumer group", p.role),
			"It cannot note what it has handled: statements are refused.",
			fmt.Sprintf("INSERT INTO %s.consumer_group_role (consumer_group, role) VALUES (%s, %s)", schema, quoteText(group), role))
	case p.name != "relay" && all:
		d.add("privileges.groups", severityWarning, fmt.Sprintf("role %s may write for all consumer groups", p.role),
			"It can take back what other groups have handled, have them skip events, and end their deliveries.",
			fmt.Sprintf("Give it rows of its groups in %s.consumer_group_role, and delete that of *.", schema))
	}
	return nil
}

const sqlGroupsOfNobody = `
SELECT DISTINCT role::text FROM {schema}.consumer_group_role WHERE role <> 'public' AND to_regrole(pg_catalog.quote_ident(role)) IS NULL ORDER BY 1`

// groups looks for rows that name no role.
func (d *doctor) groups(ctx context.Context) error {
	schema := pgx.Identifier{d.e.schemaName()}.Sanitize()
	rows, err := d.e.db.Query(ctx, strings.ReplaceAll(sqlGroupsOfNobody, "{schema}", schema))
	if err != nil {
		return err
	}
	var role string
	_, err = pgx.ForEachRow(rows, []any{&role}, func() error {
		d.add("privileges.groups", severityNote, fmt.Sprintf("consumer_group_role names role %s, which does not exist", role),
			"A role that is made under this name later gets its groups.", fmt.Sprintf("DELETE FROM %s.consumer_group_role WHERE role = %s", schema, quoteText(role)))
		return nil
	})
	if pg.IsUndefinedTable(err) {
		return nil // as above
	}
	return err
}
