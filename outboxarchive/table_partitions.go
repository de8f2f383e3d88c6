package outboxarchive

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/outboxops"
)

// Partition is a partition of outbox_archive.
type Partition struct {
	// Schema and Name are the schema and the name of its table. The schema is the schema of the archive,
	// unless an operator has attached a table of another schema, or has moved the table there.
	Schema, Name string
	// From and Until bound the time of recording of its events. They are zero if the partition has other
	// bounds.
	From, Until time.Time
	// Events is PostgreSQL's estimate of the number of events. It is negative if PostgreSQL has no
	// estimate.
	Events int64
	// Bytes is its size on disk, with indexes.
	Bytes int64
	// Expired is set if all its events are older than TableConfig.KeepMonths.
	Expired bool
}

// sqlPartitions lists the partitions. The server prints their bounds in UTC.
const sqlPartitions = `
WITH utc AS MATERIALIZED (SELECT set_config('TimeZone', 'UTC', true), set_config('DateStyle', 'ISO', true)),
parts AS MATERIALIZED (
    SELECT c.oid, n.nspname::text AS schema, c.relname::text AS name, c.reltuples::bigint AS events,
           regexp_match(pg_get_expr(c.relpartbound, c.oid), '^FOR VALUES FROM \(''([^'']*)''\) TO \(''([^'']*)''\)$') AS bounds
      FROM utc CROSS JOIN pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid JOIN pg_namespace AS n ON n.oid = c.relnamespace
     WHERE i.inhparent = (SELECT {archive}::regclass::oid)
)
SELECT schema, name, bounds[1]::timestamptz, bounds[2]::timestamptz, events, (SELECT sum(pg_catalog.pg_total_relation_size(t.relid)) FROM pg_catalog.pg_partition_tree(oid) AS t)::bigint,
       coalesce($1::int >= 0 AND bounds[2]::timestamptz <= now() - make_interval(months => $1), false)
  FROM parts ORDER BY 3 NULLS FIRST, 2, 1`

// Partitions returns the partitions, the oldest first.
func (t *Table) Partitions(ctx context.Context) ([]Partition, error) {
	var partitions []Partition
	err := pgx.BeginTxFunc(ctx, t.db, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
		partitions, err = t.partitionsIn(ctx, tx)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("outbox: partitions of outbox_archive: %w", orNoTable(err))
	}
	return partitions, nil
}

func (t *Table) partitionsIn(ctx context.Context, tx pgx.Tx) ([]Partition, error) {
	rows, err := tx.Query(ctx, t.sqlPartitions, t.cfg.KeepMonths)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (p Partition, err error) {
		var from, until pgtype.Timestamptz
		err = row.Scan(&p.Schema, &p.Name, &from, &until, &p.Events, &p.Bytes, &p.Expired)
		p.From, p.Until = from.Time, until.Time
		return p, err
	})
}

// dropSettings bound how long readers of the archive wait behind the drop of a partition.
const dropSettings = `SELECT set_config('lock_timeout', '1s', true), set_config('statement_timeout', '0', true), ` + pg.NoTransactionTimeout

// sqlAuditExpire writes who drops a partition, and why. It runs in the transaction of the drop.
const sqlAuditExpire = `
INSERT INTO {schema}.outbox_audit (operator, action, reason, relay, parking_key) VALUES ($1, 'expire', $2, '', '/' || $3::text)`

// Expire drops the partitions that are [Partition.Expired], the oldest first, and returns them. Each drop
// adds a row to outbox_audit of TableConfig.OutboxSchema. Retention does not call Expire: a relay has no
// right to remove archived events. Call it as the owner of the table and of outbox_audit, once a day or a
// month, or use outbox archive expire. If the error says that a lock is not available, another session
// reads the archive: call Expire again. It is [outboxops.ErrStatus] while a group in
// TableConfig.OutboxSchema that is starting, see outboxreplay.StartGroup, has still to get events of the
// partition.
func (t *Table) Expire(ctx context.Context, why outboxops.AuditInfo) (dropped []Partition, err error) {
	if err := check.Audit("", why.Operator, why.Reason, check.MaxReason); err != nil {
		return nil, fmt.Errorf("outbox: expire partitions of outbox_archive: %w", err)
	}
	all, err := t.Partitions(ctx)
	if err != nil {
		return nil, err
	}
	for _, p := range all {
		if !p.Expired {
			continue
		}
		if err := t.drop(ctx, p, why); err != nil {
			return dropped, notDropped(p, err)
		}
		dropped = append(dropped, p)
	}
	return dropped, nil
}

// Expiring returns the partitions that [Table.Expire] would drop now, and its error if a group that is starting keeps
// others. It changes nothing.
func (t *Table) Expiring(ctx context.Context) (partitions []Partition, err error) {
	err = pgx.BeginTxFunc(ctx, t.db, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		all, err := t.partitionsIn(ctx, tx)
		if err != nil {
			return fmt.Errorf("outbox: partitions of outbox_archive: %w", orNoTable(err))
		}
		for _, p := range all {
			if !p.Expired {
				continue
			}
			if err := t.mayDrop(ctx, tx, p); err != nil {
				return notDropped(p, err)
			}
			partitions = append(partitions, p)
		}
		return nil
	})
	return partitions, err
}

func notDropped(p Partition, err error) error {
	return fmt.Errorf("outbox: drop partition %s of outbox_archive: %w", p.Name, err)
}

// drop drops a partition if it is still attached and all its events are old.
func (t *Table) drop(ctx context.Context, old Partition, why outboxops.AuditInfo) error {
	return pgx.BeginTxFunc(ctx, t.db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, dropSettings); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, pg.InSchema(`LOCK TABLE ONLY {schema}.outbox_archive IN ACCESS EXCLUSIVE MODE`, t.cfg.Schema)); err != nil {
			return err
		}
		partitions, err := t.partitionsIn(ctx, tx)
		if err != nil {
			return err
		}
		for _, p := range partitions {
			if p.Schema == old.Schema && p.Name == old.Name && p.Expired {
				return t.dropIn(ctx, tx, p, why)
			}
		}
		return nil
	})
}

// sqlStarting reads a group that has still to get events of a partition. The lock of the archive precedes it, and
// StartGroup of outboxreplay reads the archive again after it has begun a group. So no group begins unseen.
const sqlStarting = `
SELECT s.consumer_group, s.started, p.last
  FROM (SELECT max(id) AS last FROM {table}) AS p, {schema}.event_subscription AS s
 WHERE s.state = 'starting' AND s.started < p.last ORDER BY s.consumer_group LIMIT 1`

// mayDrop returns an error if a group that is starting has still to get events of a partition.
func (t *Table) mayDrop(ctx context.Context, tx pgx.Tx, p Partition) error {
	var group string
	var started, last int64
	sql := strings.ReplaceAll(pg.InSchema(sqlStarting, t.cfg.OutboxSchema), "{table}", p.table())
	err := tx.QueryRow(ctx, sql).Scan(&group, &started, &last)
	switch {
	case err == nil:
		return fmt.Errorf("%w: group %s is starting, and has got its events up to outbox id %d of %d", outboxops.ErrStatus, group, started, last)
	case !errors.Is(err, pgx.ErrNoRows):
		return orNotMigrated(err)
	}
	return nil
}

// table returns the quoted name of the partition's table.
func (p Partition) table() string { return pgx.Identifier{p.Schema, p.Name}.Sanitize() }

// dropIn drops a partition, which is locked, unless a group that is starting has still to get its events.
func (t *Table) dropIn(ctx context.Context, tx pgx.Tx, p Partition, why outboxops.AuditInfo) error {
	if err := t.mayDrop(ctx, tx, p); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, pg.InSchema(sqlAuditExpire, t.cfg.OutboxSchema), why.Operator, why.Reason, p.Schema+"."+p.Name); err != nil {
		return orNotMigrated(err)
	}
	_, err := tx.Exec(ctx, "DROP TABLE "+p.table())
	return err
}

// orNotMigrated adds [outbox.ErrNotMigrated] to errors that mean a missing table of outbox.
func orNotMigrated(err error) error {
	if pg.IsUndefined(err) {
		return fmt.Errorf("%w: %w", outbox.ErrNotMigrated, err)
	}
	return err
}
