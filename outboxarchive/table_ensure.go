package outboxarchive

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/privileges"
)

// aheadMonths is the number of future months for which Ensure makes partitions. Archive makes the
// partitions of its rows itself.
const aheadMonths = 3

// maxBackMonths bounds the number of past months for which Ensure makes partitions.
const maxBackMonths = 120

// The statements of [Table.Ensure]. Only one process at a time runs them.
const (
	sqlLockEnsure = `SELECT pg_advisory_xact_lock(hashtextextended('outbox.archive.' || $1, 0::bigint))`

	// sqlArchiveOwner reports whether the schema, the table and its function exist, and whether another role owns the
	// table.
	sqlArchiveOwner = `
SELECT n.oid IS NOT NULL, c.oid IS NOT NULL,
       EXISTS (SELECT FROM pg_proc AS p WHERE p.pronamespace = n.oid AND p.proname = 'outbox_archive_prepare'
                  AND pg_catalog.oidvectortypes(p.proargtypes) = 'timestamp with time zone[]'),
       coalesce(NOT pg_has_role(c.relowner, 'USAGE'), false), coalesce(pg_get_userbyid(c.relowner), '')
  FROM (VALUES (1)) AS one
  LEFT JOIN pg_namespace AS n ON n.nspname = $1
  LEFT JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = 'outbox_archive'`

	createSchema = `CREATE SCHEMA {schema}`

	// createArchive has the columns of outbox. The key begins with the id, because events are read in that
	// order. The key also has the event id, for the reason that sqlInsert gives.
	createArchive = `
CREATE TABLE {schema}.outbox_archive (
    id             bigint       NOT NULL,
    event_id       uuid         NOT NULL,
    event_type     text         NOT NULL,
    source         text         NOT NULL,
    aggregate_type text         NOT NULL,
    aggregate_id   text         NOT NULL,
    payload        jsonb,
    payload_bytes  bytea,
    content_type   text         NOT NULL,
    topic          text,
    partition_key  text,
    headers        jsonb,
    occurred_at    timestamptz  NOT NULL,
    created_at     timestamptz  NOT NULL,
    size           bigint       NOT NULL,
    sent           jsonb,
    archived_at    timestamptz  NOT NULL DEFAULT now(),
    CONSTRAINT outbox_archive_lengths CHECK (
        char_length(event_type) <= 100 AND char_length(source) <= 100 AND char_length(aggregate_type) <= 100
        AND char_length(aggregate_id) <= 255 AND char_length(content_type) <= 100 AND char_length(topic) <= 249
        AND char_length(partition_key) <= 255),
    CONSTRAINT outbox_archive_pkey PRIMARY KEY (id, event_id, created_at),
    CONSTRAINT outbox_archive_one_payload CHECK (num_nonnulls(payload, payload_bytes) = (content_type <> '')::int)
) PARTITION BY RANGE (created_at);

CREATE INDEX outbox_archive_aggregate_idx ON {schema}.outbox_archive (aggregate_type, aggregate_id, id);
CREATE INDEX outbox_archive_event_id_idx ON {schema}.outbox_archive (event_id);

COMMENT ON TABLE {schema}.outbox_archive IS
    'Events that retention has removed from outbox: rows come in the transaction that removes them there. A partition for each month of created_at, in UTC.';
COMMENT ON COLUMN {schema}.outbox_archive.id IS 'As outbox.id: the order of the events of one key.';
COMMENT ON COLUMN {schema}.outbox_archive.created_at IS 'Start of the transaction that recorded it; says in which partition it is.';
COMMENT ON COLUMN {schema}.outbox_archive.size IS 'Bytes of payload and headers, for reading in batches.';
COMMENT ON COLUMN {schema}.outbox_archive.sent IS 'Where relays sent it: objects with relay, topic, partition, offset and at. NULL: not known.';
COMMENT ON COLUMN {schema}.outbox_archive.archived_at IS 'Start of the transaction that moved it here.'`

	// createPrepare makes partitions of months. It runs with the rights of the owner. It creates a
	// partition as a table and attaches it, because attaching does not block readers or writers. It revokes
	// the rights that ALTER DEFAULT PRIVILEGES gives on a partition: the rights on outbox_archive are
	// sufficient.
	createPrepare = `
CREATE OR REPLACE FUNCTION {schema}.outbox_archive_prepare(times timestamptz[]) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET TimeZone = 'UTC' AS $body$
DECLARE
    parent  constant regclass := {archive}::regclass;
    schema  constant name := (SELECT n.nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = {archive}::regclass);
    month   timestamptz;
    part    name;
    granted record;
    locked  boolean := false;
    made    int := 0;
BEGIN
    FOR month IN SELECT DISTINCT date_trunc('month', t) FROM unnest(times) AS t ORDER BY 1 LOOP
        IF month IS NULL OR NOT isfinite(month) OR month < '0001-01-01' OR month > now() + interval '400 days' THEN
            RAISE EXCEPTION 'there is no partition for %, which is no time, or more than 400 days ahead', month USING ERRCODE = 'invalid_parameter_value';
        END IF;
        part := 'outbox_archive_' || to_char(month, 'YYYY_MM');
        FOR look IN 1 .. 2 LOOP -- again under the lock: others may be at it
            EXIT WHEN EXISTS (SELECT FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid WHERE i.inhparent = parent AND c.relname = part);
            IF NOT locked THEN
                EXECUTE format('LOCK TABLE ONLY %s IN SHARE UPDATE EXCLUSIVE MODE', parent);
                locked := true;
                CONTINUE;
            END IF;
            EXECUTE format('CREATE TABLE %I.%I (LIKE %s INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE INCLUDING COMPRESSION)', schema, part, parent);
            FOR granted IN
                SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee
                  FROM pg_class AS c, aclexplode(c.relacl) AS a
                 WHERE c.oid = format('%I.%I', schema, part)::regclass AND a.grantee <> c.relowner
            LOOP
                EXECUTE format('REVOKE ALL ON TABLE %I.%I FROM %s CASCADE', schema, part, granted.grantee);
            END LOOP;
            EXECUTE format('ALTER TABLE %s ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)', parent, schema, part, month, month + interval '1 month');
            made := made + 1;
            EXIT;
        END LOOP;
    END LOOP;
    RETURN made;
END $body$;

COMMENT ON FUNCTION {schema}.outbox_archive_prepare(timestamptz[]) IS 'Makes the partitions of outbox_archive for the months of some times, and returns how many were missing.'`

	// revokeTable and revokePrepare revoke the rights that ALTER DEFAULT PRIVILEGES has given on the new table, and
	// those on the new function, which PUBLIC has too.
	revokeTable   = revoke + `'TABLE ' || c.oid::regclass AS what, c.relacl AS acl, c.relowner AS owner FROM pg_class AS c WHERE c.oid = {archive}::regclass` + revokeEnd
	revokePrepare = revoke + `'FUNCTION ' || p.oid::regprocedure AS what, coalesce(p.proacl, acldefault('f', p.proowner)) AS acl, p.proowner AS owner FROM pg_proc AS p
                 WHERE p.oid = {prepare}::regprocedure` + revokeEnd

	revoke = `
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee, g.what
          FROM (SELECT `
	revokeEnd = `) AS g,
               aclexplode(g.acl) AS a
         WHERE a.grantee <> g.owner
    LOOP
        EXECUTE format('REVOKE ALL ON %s FROM %s CASCADE', granted.what, granted.grantee);
    END LOOP;
END $$`
)

// Ensure makes outbox_archive, its function, and partitions. The partitions begin with the month of the
// oldest event in outbox, or with this month if outbox is empty, and end three months from now. Many
// processes may call it at the same time, at every start. Call it as the role that owns the table. The role
// needs CREATE on the schema, or on the database if the schema does not exist. Ensure returns
// [outbox.ErrForeignObjects] if the table belongs to a role whose rights this role does not have.
func (t *Table) Ensure(ctx context.Context) error {
	err := pgx.BeginTxFunc(ctx, t.db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error { return t.ensure(ctx, tx) })
	if err != nil {
		return fmt.Errorf("outbox: ensure outbox_archive in schema %s: %w", t.cfg.Schema, err)
	}
	return nil
}

func (t *Table) ensure(ctx context.Context, tx pgx.Tx) error {
	for _, sql := range []string{privileges.SafePath, pg.Unbounded, pg.Durable, pg.TextSettings} {
		if _, err := tx.Exec(ctx, sql); err != nil {
			return err
		}
	}
	if _, err := tx.Exec(ctx, sqlLockEnsure, t.cfg.Schema); err != nil {
		return err
	}
	var hasSchema, hasTable, hasPrepare, strange bool
	var owner string
	if err := tx.QueryRow(ctx, sqlArchiveOwner, t.cfg.Schema).Scan(&hasSchema, &hasTable, &hasPrepare, &strange, &owner); err != nil {
		return err
	}
	if strange {
		return fmt.Errorf("%w: table outbox_archive of role %s", outbox.ErrForeignObjects, owner)
	}
	if err := t.create(ctx, tx, hasSchema, hasTable, hasPrepare); err != nil {
		return err
	}
	months, err := t.usualMonths(ctx, tx)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, t.sqlPrepare, months)
	return orNoTable(err)
}

// create makes the schema and the table if they are missing. It always replaces the function by the
// function of this release.
func (t *Table) create(ctx context.Context, tx pgx.Tx, hasSchema, hasTable, hasPrepare bool) error {
	var statements []string
	if !hasSchema {
		statements = append(statements, createSchema)
	}
	if !hasTable {
		statements = append(statements, createArchive)
	}
	statements = append(statements, createPrepare)
	if !hasTable {
		statements = append(statements, revokeTable)
	}
	if !hasTable || !hasPrepare {
		statements = append(statements, revokePrepare)
	}
	for _, sql := range statements {
		if _, err := tx.Exec(ctx, inSchema(sql, t.cfg.Schema)); err != nil {
			return err
		}
	}
	return nil
}

const (
	sqlHasOutbox   = `SELECT EXISTS (SELECT FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = 'outbox')`
	sqlOldestEvent = `SELECT coalesce((SELECT created_at FROM {schema}.outbox ORDER BY id LIMIT 1), now()), now()`
)

// usualMonths returns the months for which Ensure makes partitions.
func (t *Table) usualMonths(ctx context.Context, tx pgx.Tx) (months []time.Time, err error) {
	var has bool
	if err := tx.QueryRow(ctx, sqlHasOutbox, t.cfg.OutboxSchema).Scan(&has); err != nil {
		return nil, err
	}
	var oldest, now time.Time
	sql := `SELECT now(), now()`
	if has {
		sql = pg.InSchema(sqlOldestEvent, t.cfg.OutboxSchema)
	}
	if err := tx.QueryRow(ctx, sql).Scan(pg.Time{At: &oldest}, &now); err != nil {
		return nil, err
	}
	first := monthOf(now).AddDate(0, -maxBackMonths, 0)
	if oldest.After(first) {
		first = monthOf(oldest)
	}
	for m := first; !m.After(monthOf(now).AddDate(0, aheadMonths, 0)); m = m.AddDate(0, 1, 0) {
		months = append(months, m)
	}
	return months, nil
}
