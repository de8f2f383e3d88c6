package main

import (
	"context"
	_ "embed"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/indexes"
	"github.com/outboxgo/outbox/internal/tables"
)

// tableChecks check the tables that Migrate has made.
var tableChecks = []check{
	{"tables", []string{"tables.table", "tables.column", "tables.index", "tables.constraint", "tables.trigger", "tables.policy", "tables.security"}, (*doctor).tables},
	{"sequence", []string{"sequence.missing", "sequence.cache", "sequence.behind"}, (*doctor).sequences},
	{"tables.vacuum", []string{"tables.autovacuum", "tables.bloat"}, (*doctor).vacuum},
	{"tables.partitions", []string{"tables.partitions"}, (*doctor).partitions},
	{"tables.published", []string{"tables.published"}, (*doctor).published},
	{"archive", []string{"archive.none"}, (*doctor).archive},
	{"privileges", []string{"privileges.role", "privileges.relay", "privileges.writer", "privileges.consumer", "privileges.worker", "privileges.inbox", "privileges.reader",
		"privileges.operator", "privileges.excess", "privileges.groups"}, (*doctor).privileges},
	{"privileges.partitions", []string{"privileges.partitions"}, (*doctor).partitionGrants},
	{"relay", []string{"relay.none", "relay.leader", "relay.outage", "relay.unknown", "relay.ended", "relay.backlog", "delivery.stale", "delivery.outage", "delivery.member", "delivery.members",
		"delivery.failed", "delivery.gap", "delivery.skipped", "failed.dead", "failed.held", "failed.parked",
		"transaction.open", "transaction.prepared"}, (*doctor).relays},
	{"delivery", []string{"delivery.dead", "delivery.held", "delivery.stuck", "delivery.worker", "delivery.unhandled", "delivery.handler", "delivery.backlog", "delivery.headless"},
		(*doctor).deliveries},
	{"events", []string{"events.topic"}, (*doctor).routes},
}

// migrationsCheck is made before all of tableChecks.
var migrationsCheck = check{"migrations", []string{"migrations.none", "migrations.ahead", "migrations.pending"}, func(d *doctor, ctx context.Context) (err error) {
	d.hasTables, err = d.migrations(ctx)
	return err
}}

// migrated reports whether the tables exist and belong to this release. Otherwise the other checks are
// omitted.
func (d *doctor) migrated(ctx context.Context) bool {
	d.perform(ctx, migrationsCheck)
	return d.hasTables
}

func (d *doctor) migrations(ctx context.Context) (bool, error) {
	var there int
	err := d.e.db.QueryRow(ctx, `SELECT count(*) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relkind IN ('r', 'p') AND c.relname = ANY ($2::text[])`, d.e.schemaName(), tables.Names).Scan(&there)
	if err != nil {
		return false, err
	}
	if there == 0 {
		d.add("migrations.none", severityError, fmt.Sprintf("schema %s has no tables of outbox", d.e.schemaName()),
			"Nothing can be recorded or sent.", "outbox migrate up, or outbox.Migrate at the start of your service. If they are in another schema: --schema.")
		return false, nil
	}
	all, err := outbox.MigrationStatus(ctx, d.e.db, outbox.MigrateConfig{Schema: d.e.schema})
	if err != nil {
		return false, err
	}
	return d.checkMigrations(all), nil
}

// checkMigrations reports whether the tables belong to this release.
func (d *doctor) checkMigrations(all []outbox.Migration) bool {
	var pending, unknown []string
	for _, m := range all {
		switch {
		case m.Unknown:
			unknown = append(unknown, m.Name)
		case m.AppliedAt.IsZero():
			pending = append(pending, m.Name)
		}
	}
	if len(unknown) > 0 {
		d.add("migrations.ahead", severityError, "the database has migrations that this release does not know: "+strings.Join(unknown, ", "),
			"A newer release of outbox has migrated it. Migrate of this one refuses to start services.", "Use the newer release of this tool and in your services.")
		return false
	}
	if len(pending) == len(all) { // another tool has applied the files, and the tables show whether all
		return true
	}
	if len(pending) > 0 {
		d.add("migrations.pending", severityError, "pending: "+strings.Join(pending, ", "),
			"This release expects tables, columns or indexes that are not there yet.", "outbox migrate up, before the services of this release start.")
	}
	return len(pending) == 0
}

// expectedText is the result of Migrate: the rows of sqlThings as lines of kind, table, name and
// definition, separated by tabs. A test keeps it correct.
//
//go:embed expected.txt
var expectedText string

// thing is a table, or a column, index, constraint, trigger or policy of one, or that it has
// row level security.
type thing struct{ kind, table, name, definition string }

func (t thing) key() string { return t.kind + " " + t.table + " " + t.name }

func expected() (all []thing) {
	for line := range strings.Lines(expectedText) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), "\t", 4)
		all = append(all, thing{f[0], f[1], f[2], f[3]})
	}
	return all
}

// sqlThings returns definitions as PostgreSQL prints them with the schema in the search path. They are the
// same whether outbox has partitions or not. NOT NULL constraints, which PostgreSQL 18 has, are part of
// their columns.
const sqlThings = `
WITH tables AS MATERIALIZED (
    SELECT c.oid, c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
     WHERE n.nspname = $1 AND c.relkind IN ('r', 'p') AND c.relname = ANY ($2::text[])
)
SELECT 'table', relname, relname, '' FROM tables
 UNION ALL
SELECT 'security', t.relname, 'row level security', CASE WHEN c.relforcerowsecurity THEN 'forced' ELSE 'enabled' END
  FROM tables AS t JOIN pg_class AS c ON c.oid = t.oid WHERE c.relrowsecurity
 UNION ALL
SELECT 'policy', t.relname, p.polname, pg_catalog.concat_ws(' ', CASE WHEN p.polpermissive THEN 'PERMISSIVE' ELSE 'RESTRICTIVE' END,
       'FOR ' || CASE p.polcmd WHEN 'r' THEN 'SELECT' WHEN 'a' THEN 'INSERT' WHEN 'w' THEN 'UPDATE' WHEN 'd' THEN 'DELETE' ELSE 'ALL' END,
       CASE WHEN p.polroles <> '{0}' THEN 'TO SOME' END,
       'USING ' || regexp_replace(pg_get_expr(p.polqual, p.polrelid, true), '\s+', ' ', 'g'), 'CHECK ' || regexp_replace(pg_get_expr(p.polwithcheck, p.polrelid, true), '\s+', ' ', 'g'))
  FROM tables AS t JOIN pg_policy AS p ON p.polrelid = t.oid
 UNION ALL
SELECT 'column', t.relname, a.attname,
       pg_catalog.concat_ws(' ', format_type(a.atttypid, a.atttypmod), CASE WHEN a.attnotnull THEN 'NOT NULL' END, 'DEFAULT ' || ltrim(regexp_replace(pg_get_expr(d.adbin, d.adrelid, true), '\s+', ' ', 'g')))
  FROM tables AS t JOIN pg_attribute AS a ON a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
  LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
 UNION ALL
SELECT 'index', t.relname, c.relname, regexp_replace(replace(pg_get_indexdef(i.indexrelid, 0, true), ' ON ONLY ', ' ON '), '\s+', ' ', 'g') || CASE WHEN i.indisvalid THEN '' ELSE ' INVALID' END
  FROM tables AS t JOIN pg_index AS i ON i.indrelid = t.oid JOIN pg_class AS c ON c.oid = i.indexrelid
 UNION ALL
SELECT 'constraint', t.relname, c.conname, pg_get_constraintdef(c.oid, true)
  FROM tables AS t JOIN pg_constraint AS c ON c.conrelid = t.oid AND c.contype IN ('p', 'u', 'c', 'f', 'x')
 UNION ALL
SELECT 'constraint', t.relname, c.conname, min(pg_get_constraintdef(c.oid, true)) -- of every partition, and not of the table
  FROM tables AS t JOIN pg_inherits AS i ON i.inhparent = t.oid JOIN pg_constraint AS c ON c.conrelid = i.inhrelid AND c.contype = 'c' AND c.coninhcount = 0
 GROUP BY t.oid, t.relname, c.conname HAVING count(*) = (SELECT count(*) FROM pg_inherits WHERE inhparent = t.oid)
 UNION ALL
SELECT 'trigger', t.relname, g.tgname, pg_get_triggerdef(g.oid, true)
  FROM tables AS t JOIN pg_trigger AS g ON g.tgrelid = t.oid AND NOT g.tgisinternal`

// things returns the existing tables and their parts.
func things(ctx context.Context, e *env) (all []thing, err error) {
	err = pgx.BeginTxFunc(ctx, e.db, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT set_config('search_path', $1, true)`, pgx.Identifier{e.schemaName()}.Sanitize()); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, sqlThings, e.schemaName(), tables.Names)
		if err != nil {
			return err
		}
		all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (t thing, err error) {
			return t, row.Scan(&t.kind, &t.table, &t.name, &t.definition)
		})
		return err
	})
	return all, err
}

// tables compares the existing tables with the result of Migrate.
func (d *doctor) tables(ctx context.Context) error {
	have, err := things(ctx, d.e)
	if err == nil {
		d.findings = append(d.findings, compare(expected(), have)...)
	}
	return err
}

func compare(want, have []thing) (all []finding) {
	byKey := map[string]thing{}
	tables := map[string]bool{}
	for _, t := range have {
		byKey[t.key()] = t
		tables[t.table] = true
	}
	for _, w := range want {
		h, there := byKey[w.key()]
		delete(byKey, w.key())
		switch {
		case !there && (w.kind == "table" || tables[w.table]): // of a missing table it is enough to name that
			all = append(all, missing(w))
		case there && h.definition != w.definition:
			all = append(all, altered(w, h))
		}
	}
	for _, t := range have {
		if _, extra := byKey[t.key()]; extra && matters(t) {
			all = append(all, finding{"tables." + t.kind, severityWarning, fmt.Sprintf("%s %s of %s is not of outbox: %s", t.kind, t.name, t.table, t.definition),
				"It can refuse or change events, or make every record dearer.", "If nothing needs it, drop it."})
		}
	}
	return all
}

// matters reports whether something additional can do harm. An additional index only costs time, unless it
// was left unfinished. Migrate makes the index for unique ids of events only on request.
func matters(t thing) bool {
	if t.kind == "index" && strings.HasSuffix(t.definition, " INVALID") {
		return true
	}
	if t.key() == "index outbox "+indexes.EventID.Name() {
		return false
	}
	const completesRows = "outbox_complete_row" // MigrateConfig.Publication makes it
	return t.kind == "trigger" && t.name != completesRows || t.kind == "policy" || t.kind == "security" || t.kind == "constraint" && !strings.HasPrefix(t.definition, "PRIMARY KEY") ||
		t.kind == "index" && strings.HasPrefix(t.definition, "CREATE UNIQUE") ||
		t.kind == "column" && strings.Contains(t.definition, "NOT NULL") && !strings.Contains(t.definition, "DEFAULT")
}

func missing(t thing) finding {
	f := finding{"tables." + t.kind, severityError, fmt.Sprintf("%s %s of %s is missing", t.kind, t.name, t.table), "", ""}
	switch t.kind {
	case "index":
		f.Means, f.Do = "Statements that go by it read the whole table instead, or are refused.", t.definition
	case "constraint":
		f.Means, f.Do = "What it keeps out gets in.", fmt.Sprintf("ALTER TABLE %s ADD CONSTRAINT %s %s", t.table, t.name, t.definition)
	case "policy":
		f.Means, f.Do = "Roles that are not the owner cannot write there what they have to, or consumers can write for groups that are not theirs.",
			fmt.Sprintf("Make it again, as in 0007_roles.sql (outbox migrate print --from 7): %s", t.definition)
	case "security":
		f.What = "table " + t.table + " has no row level security"
		f.Means, f.Do = "A consumer can write and remove what other groups have handled, and where they read.", fmt.Sprintf("ALTER TABLE %s ENABLE ROW LEVEL SECURITY", t.table)
	case "column":
		f.Means, f.Do = "Statements of outbox fail.", fmt.Sprintf("ALTER TABLE %s ADD COLUMN %s %s", t.table, t.name, t.definition)
	default:
		f.What = "table " + t.name + " is missing"
		f.Means, f.Do = "Statements of outbox fail.", "Restore it from a backup, or take its statements from outbox migrate print."
	}
	return f
}

func altered(want, have thing) finding {
	if strings.HasSuffix(have.definition, " INVALID") {
		return finding{"tables.index", severityError, fmt.Sprintf("index %s of %s is invalid", have.name, have.table),
			"Its making was interrupted: it costs and serves nothing.", fmt.Sprintf("REINDEX INDEX CONCURRENTLY %s", have.name)}
	}
	return finding{"tables." + want.kind, severityWarning, fmt.Sprintf("%s %s of %s is altered: %s", want.kind, want.name, want.table, have.definition),
		"outbox is tested with: " + want.definition, "Change it back, unless you know better."}
}

const sqlLocks = `
SELECT (SELECT count(*) FROM pg_inherits WHERE inhparent = to_regclass(pg_catalog.format('%I.outbox', $1::text))::oid),
       current_setting('max_locks_per_transaction')::int, current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int`

// partitions checks that the server can lock them all.
func (d *doctor) partitions(ctx context.Context) error {
	var partitions, perTransaction, transactions int
	err := d.e.db.QueryRow(ctx, sqlLocks, d.e.schemaName()).Scan(&partitions, &perTransaction, &transactions)
	d.findings = append(d.findings, partitionFindings(partitions, perTransaction, transactions)...)
	return err
}

// The publications with outbox_delayed. The view pg_publication_tables fails while another table is dropped. Since
// version 15 a publication can have a schema.
const (
	sqlPublished = `
SELECT p.pubname::text FROM pg_publication AS p
 WHERE p.puballtables OR EXISTS (SELECT FROM pg_publication_rel AS r WHERE r.prpubid = p.oid
           AND r.prrelid = to_regclass(pg_catalog.format('%I.outbox_delayed', $1::text))::oid)`
	sqlPublishedSchemas = `
 UNION
SELECT p.pubname::text FROM pg_publication AS p JOIN pg_publication_namespace AS s ON s.pnpubid = p.oid
 WHERE s.pnnspid = (SELECT oid FROM pg_namespace WHERE nspname = $1::text)`
)

// published checks that no publication has delayed events: their place is in that of outbox, once they are due.
func (d *doctor) published(ctx context.Context) error {
	var schemas bool
	if err := d.e.db.QueryRow(ctx, `SELECT to_regclass('pg_catalog.pg_publication_namespace') IS NOT NULL`).Scan(&schemas); err != nil {
		return err
	}
	sql := sqlPublished
	if schemas {
		sql += sqlPublishedSchemas
	}
	rows, err := d.e.db.Query(ctx, sql+` ORDER BY 1`, d.e.schemaName())
	if err != nil {
		return err
	}
	publications, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if len(publications) > 0 {
		d.add("tables.published", severityWarning, "delayed events are published by "+strings.Join(publications, ", "),
			"Subscribers and connectors without a list of tables read outbox_delayed: events before they are due, and again when they are.",
			"List the tables in the publication, without outbox_delayed, instead of FOR ALL TABLES or FOR TABLES IN SCHEMA.")
	}
	return err
}

// locksPerPartition is the number of entries that a partition needs in the server's lock table. A statement
// over outbox locks each partition and its two indexes. A relay runs six statements at once, and the table
// takes two holders of each lock: six times three halves.
const locksPerPartition = 9

func partitionFindings(partitions, perTransaction, transactions int) []finding {
	need := locksPerPartition * partitions
	if need <= perTransaction*transactions {
		return nil
	}
	return []finding{{"tables.partitions", severityWarning, fmt.Sprintf("outbox has %s partitions, and the server is made for %s",
		count(int64(partitions)), count(int64(perTransaction*transactions/locksPerPartition))),
		"Each statement of a relay locks all partitions and their indexes. When the lock table is full, statements of all clients fail: out of shared memory.",
		fmt.Sprintf("Raise max_locks_per_transaction to %d or more, and restart PostgreSQL. See why partitions do not go: a relay that does not run keeps them (outbox status).",
			(need+transactions-1)/transactions)}}
}

// A table is bloated if it has more dead rows than this, and more than twice as many dead rows as live
// rows.
const bloatedRows = 100_000

const sqlVacuum = `
SELECT c.relname, coalesce(s.n_live_tup, 0), coalesce(s.n_dead_tup, 0),
       coalesce((SELECT option_value FROM pg_options_to_table(c.reloptions) WHERE option_name = 'autovacuum_enabled'), 'true')::bool
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
  LEFT JOIN pg_stat_user_tables AS s ON s.relid = c.oid
 WHERE n.nspname = $1 AND c.relkind = 'r' AND (c.relname = ANY ($2::text[])
       OR EXISTS (SELECT FROM pg_inherits AS i WHERE i.inhrelid = c.oid AND i.inhparent = to_regclass(pg_catalog.format('%I.outbox', $1::text))::oid))
 ORDER BY 1`

// vacuum checks that PostgreSQL cleans up the rows that retention removes.
func (d *doctor) vacuum(ctx context.Context) error {
	rows, err := d.e.db.Query(ctx, sqlVacuum, d.e.schemaName(), tables.Names)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		var live, dead int64
		var auto bool
		if err := rows.Scan(&name, &live, &dead, &auto); err != nil {
			return err
		}
		if !auto {
			d.add("tables.autovacuum", severityWarning, "autovacuum is off for "+name,
				"Rows that are removed leave their space behind: the table grows, and statements become slower.",
				fmt.Sprintf("ALTER TABLE %s RESET (autovacuum_enabled)", name))
		}
		if dead > bloatedRows && dead > 2*live {
			d.add("tables.bloat", severityWarning, fmt.Sprintf("%s has %s dead rows beside %s live ones", name, count(dead), count(live)),
				"They are not cleaned up: autovacuum does not come to it, or an old transaction keeps them.",
				"End old transactions (outbox status), then VACUUM "+name+". ALTER TABLE "+name+" SET (autovacuum_vacuum_scale_factor = 0.02) has it done earlier.")
		}
	}
	return rows.Err()
}
