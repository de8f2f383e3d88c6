package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// numbered are the tables whose ids come from a sequence, with what happens if a sequence is behind ids of rows.
// Their order is that of the findings.
var numbered = []struct{ table, behind string }{
	{"outbox", "New events would get the ids of events that were sent or handled, so relays and workers stop when they begin."},
	{"outbox_delayed", "Delayed events cannot be recorded until the ids that are taken have passed, and come before earlier ones that are due at the same time."},
	{"outbox_cursor", "The newest row is the position of a relay or a group: a new position would be older than the last one, and events are sent again and again."},
	{"outbox_failed", "An event that Kafka does not take cannot be stored, and its relay stands still."},
	{"outbox_audit", "The actions of operators fail, because they cannot be noted."},
	{"event_handled", "Handlers wait until consumers and workers have passed over the ids that are taken, and retention takes new notes for the oldest ones."},
	{"event_delivery", "Events that fail wait until consumers and workers have passed over the ids that are taken: a new delivery must come after the earlier ones of its key."},
}

const sqlSequences = `
SELECT t.name, s.seqcache, s.seqincrement, coalesce(pg_catalog.has_sequence_privilege(s.seqrelid, 'SELECT'), false)
  FROM pg_catalog.unnest($2::text[]) WITH ORDINALITY AS t (name, n)
  LEFT JOIN pg_sequence AS s ON s.seqrelid =
       CASE WHEN to_regclass(pg_catalog.format('%I.%I', $1::text, t.name)) IS NOT NULL THEN pg_get_serial_sequence(pg_catalog.format('%I.%I', $1::text, t.name), 'id')::regclass::oid END
 WHERE to_regclass(pg_catalog.format('%I.%I', $1::text, t.name)) IS NOT NULL ORDER BY t.n`

// sequence is the sequence of a table's ids. Cache is NULL if the table has none.
type sequence struct {
	table       string
	cache, step pgtype.Int8
	mayRead     bool
}

// sequences checks the sequence of each table.
func (d *doctor) sequences(ctx context.Context) error {
	var names []string
	for _, n := range numbered {
		names = append(names, n.table)
	}
	var all []sequence
	rows, err := d.e.db.Query(ctx, sqlSequences, d.e.schemaName(), names)
	if err == nil {
		var s sequence
		_, err = pgx.ForEachRow(rows, []any{&s.table, &s.cache, &s.step, &s.mayRead}, func() error { all = append(all, s); return nil })
	}
	if err != nil {
		return err
	}
	for _, s := range all {
		if err := d.sequence(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

func (d *doctor) sequence(ctx context.Context, s sequence) error {
	if !s.cache.Valid {
		d.add("sequence.missing", severityError, s.table+".id has no sequence of its own", "ids may repeat, and order is by id.",
			"ALTER SEQUENCE … OWNED BY "+s.table+".id for the sequence that is its default.")
		return nil
	}
	name := pgx.Identifier{d.e.schemaName()}.Sanitize() + "." + s.table + "_id_seq"
	if s.cache.Int64 != 1 || s.step.Int64 != 1 {
		means := "Sessions take ids in advance: a later event can have a lower id than an earlier one of its aggregate, and overtake it."
		if s.table != "outbox" {
			means = "Sessions take ids in advance: a later row can have a lower id than an earlier one, and order is by id."
		}
		d.add("sequence.cache", severityError, fmt.Sprintf("the sequence of %s.id has CACHE %d and INCREMENT %d", s.table, s.cache.Int64, s.step.Int64), means,
			"ALTER SEQUENCE "+name+" INCREMENT BY 1 CACHE 1")
	}
	if !s.mayRead {
		return nil
	}
	return d.sequenceBehind(ctx, s.table, name)
}

// sqlBehind reads the last id that the sequence of a table has drawn, and the highest id above it that a row has.
// {table} is the name of the table. See [tables.SQLSequence].
const sqlBehind = `
WITH drawn AS MATERIALIZED (
    SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS id FROM {schema}.{table}_id_seq
)
SELECT drawn.id, (SELECT id FROM {schema}.{table} WHERE id > drawn.id ORDER BY id DESC LIMIT 1) FROM drawn`

// sequenceBehind looks for ids that the sequence of a table will draw although they are in use. Of outbox it makes the
// check of a relay that begins to lead.
func (d *doctor) sequenceBehind(ctx context.Context, table, name string) error {
	sql, args := strings.ReplaceAll(sqlBehind, "{table}", table), []any(nil)
	if table == "outbox" {
		sql, args = tables.SQLSequence, []any{nil} // the positions of all groups
	}
	var drawn, highest int64
	err := pg.Query(ctx, d.e.db, pg.PlannerSettings, func(rows pgx.Rows) (err error) {
		drawn, highest, err = tables.ReadSequence(rows)
		return err
	}, pg.InSchema(sql, d.e.schemaName()), args...)
	if err != nil || highest == 0 {
		return err
	}
	for _, n := range numbered {
		if n.table == table {
			d.add("sequence.behind", severityError, fmt.Sprintf("the sequence of %s.id is at %d, behind id %d", table, drawn, highest),
				n.behind+" It comes of a restore without its sequences, of logical replication, or of TRUNCATE … RESTART IDENTITY.",
				fmt.Sprintf("SELECT setval(%s, %d)", quoteText(name), highest))
		}
	}
	return nil
}

// quoteText writes a text as SQL does.
func quoteText(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }
