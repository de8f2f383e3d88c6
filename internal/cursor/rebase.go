package cursor

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/outboxgo/outbox/internal/lease"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// A dump that is restored into another cluster brings transaction ids and snapshots that
// have no meaning there. Compared with each other they still show which events were sent,
// because rows and cursor are of the same moment; and an id above the highest one that was
// sent is new in any case. So a relay that finds a cursor of another cluster rebases it
// once. Events that were sent get a transaction id that every snapshot of this cluster
// calls visible. The others get one that the new cursor calls unfinished, so they are its
// next window.

// ErrOtherCluster means that the newest cursor was written in another cluster.
var ErrOtherCluster = errors.New("cursor belongs to another database cluster")

// sqlRebaseLock lets one relay of a schema rebase at a time, and lets its transaction
// write other transaction ids into rows than its own. It takes no transaction id: see
// sqlRebase.
const sqlRebaseLock = `
SELECT pg_advisory_xact_lock(hashtextextended('outbox.rebase.' || $1, 0::bigint)), set_config('outbox.keep_xid', 'on', true)`

// sqlRebaseIdle ends the rebase of a process that does not go on: it would keep that lock, and a lock of its lease.
const sqlRebaseIdle = `SELECT set_config('idle_in_transaction_session_timeout', '10s', true)`

// sqlRebase finds the events that each relay has not attempted, and writes that as
// transaction ids and snapshots of this cluster. It moves all relays at once, because they
// share the rows: the events that the same relays have not attempted get one label, a
// transaction id from 3 upwards. These ids were used by initdb, before there was any
// table. The new snapshot of a relay is the present one, with its labels in progress.
// Events that all relays have attempted lose the labels of an earlier rebase.
//
// The present snapshot must not call our own transaction visible. It could if the
// transaction already had an id and later transactions had finished. So no statement
// before this one may take an id.
const sqlRebase = tables.NewestCursors + `, unsent AS MATERIALIZED (
    SELECT o.id, pg_catalog.array_agg(s.relay ORDER BY s.relay) AS relays
      FROM {schema}.outbox AS o
      JOIN positions AS s
        ON o.id > s.highest_id
        OR NOT ` + tables.Attempted + `
     GROUP BY o.id
), labels AS MATERIALIZED (
    SELECT relays, 2 + row_number() OVER (ORDER BY relays) AS label FROM unsent GROUP BY relays
), relabelled AS (
    UPDATE {schema}.outbox AS o SET xid = coalesce(l.label, 2)::text::xid8
      FROM {schema}.outbox AS was
      LEFT JOIN unsent AS u ON u.id = was.id
      LEFT JOIN labels AS l ON l.relays OPERATOR(pg_catalog.=) u.relays
     WHERE o.id = was.id AND (l.label IS NOT NULL OR was.xid >= pg_snapshot_xmin(pg_current_snapshot())
                              OR was.xid >= '3'::xid8 AND was.xid <= (SELECT 2 + count(*) FROM labels)::text::xid8)
), moved AS (
    INSERT INTO {schema}.outbox_cursor (relay, snapshot, last_processed_id, highest_id, system_identifier, epoch, cursor_topic, token, batch)
    SELECT s.relay, pg_catalog.format('%s:%s:%s', coalesce(min(open.xid), pg_snapshot_xmin(pg_current_snapshot())::text::bigint),
                           pg_snapshot_xmax(pg_current_snapshot()),
                           string_agg(open.xid::text, ',' ORDER BY open.xid))::pg_snapshot,
           s.last_processed_id, s.highest_id, c.system_identifier, CASE s.relay WHEN $1 THEN $2 ELSE s.epoch END,
           s.cursor_topic, s.token, s.batch
      FROM pg_control_system() AS c, positions AS s
      LEFT JOIN LATERAL (SELECT label AS xid FROM labels WHERE s.relay = ANY(relays)
                          UNION ALL
                         SELECT x::text::bigint FROM pg_snapshot_xip(pg_current_snapshot()) AS x) AS open ON true
     GROUP BY s.relay, s.last_processed_id, s.highest_id, s.epoch, c.system_identifier, s.cursor_topic, s.token, s.batch
)
SELECT count(*) FILTER (WHERE $1 = ANY(relays)) FROM unsent`

// SQLRebaseProof locks the row of the lease. It comes last, because renewing the lease
// must not have to wait while many rows are relabelled.
const SQLRebaseProof = `SELECT FROM {schema}.outbox_lease WHERE name = $1::text AND holder = $2::text AND epoch = $3 FOR SHARE`

// Rebase moves the cursors of all relays from another cluster to this one, and returns how
// many events our relay has not sent. The caller loads the position afterwards.
func (c *Store) Rebase(ctx context.Context, l *lease.Lease) (unsent int64, err error) {
	err = pgx.BeginTxFunc(ctx, c.db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, pg.Unbounded); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, sqlRebaseIdle); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, sqlRebaseLock, c.schema); err != nil {
			return err
		}
		if _, err := c.Newest(ctx, tx); !errors.Is(err, ErrOtherCluster) {
			return err // another relay has rebased the cursors
		}
		if err := tx.QueryRow(ctx, c.SQLRebase, c.Relay, l.Epoch).Scan(&unsent); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, c.SQLRebaseProof, c.Relay, l.Holder, l.Epoch)
		if err == nil && tag.RowsAffected() == 0 {
			err = lease.ErrLeaseLost
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("rebase cursor: %w", err)
	}
	return unsent, nil
}

// sqlCursorSequence reads the last id that the sequence of outbox_cursor has drawn, and the highest id above it that a
// row has: a row of a relay, or of the name $1. Rows of other groups count if one of the next 500 ids is theirs: the id
// of a new position must be free. PostgreSQL does not tell the last id of a sequence that was restarted: then it draws
// one.
const sqlCursorSequence = tables.NewestCursors + `, drawn AS MATERIALIZED (
    SELECT coalesce(pg_catalog.pg_sequence_last_value({cursor_ids}), CASE WHEN EXISTS (SELECT FROM {schema}.outbox_cursor) THEN pg_catalog.nextval({cursor_ids}) - 1 ELSE 0 END) AS id
)
SELECT drawn.id, greatest((
       SELECT max(newest.id) FROM names
        CROSS JOIN LATERAL (SELECT id FROM {schema}.outbox_cursor
                             WHERE relay >= names.relay AND relay <= names.relay ORDER BY relay DESC, id DESC LIMIT 1) AS newest
        WHERE newest.id > drawn.id AND (NOT pg_catalog.starts_with(names.relay, '` + tables.WorkerPrefix + `') OR names.relay = $1::text)), (
       SELECT id FROM {schema}.outbox_cursor
        WHERE id > drawn.id AND id <= ` + tables.MaxGroupID + ` AND EXISTS (SELECT FROM {schema}.outbox_cursor WHERE id > drawn.id AND id <= drawn.id + 500)
        ORDER BY id DESC LIMIT 1))
  FROM drawn`

// CheckSequence returns [ErrSequenceBehind] if a new event could get the id of an older
// one, or if a new position would be older than the last one. The error has the statements for all sequences. Positions
// of other groups of workers do not count, but for ids that are about to be drawn.
func (c *Store) CheckSequence(ctx context.Context) error {
	var behind, remedy []string
	for _, of := range []struct{ table, sql string }{{"outbox", c.SQLSequence}, {"outbox_cursor", c.sqlCursorSequence}} {
		var drawn, highest int64
		err := c.query(ctx, func(rows pgx.Rows) (err error) {
			drawn, highest, err = tables.ReadSequence(rows)
			return err
		}, of.sql, c.Relay)
		if err != nil {
			return fmt.Errorf("read sequence of %s: %w", of.table, err)
		}
		if highest > 0 {
			behind = append(behind, fmt.Sprintf("the last id of %s drawn is %d, and %d is in use already", of.table, drawn, highest))
			remedy = append(remedy, pg.SetSequence(c.schema, of.table, highest))
		}
	}
	if len(behind) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s; see the comment at outbox.ErrSequenceBehind, then: %s",
		ErrSequenceBehind, strings.Join(behind, "; "), strings.Join(remedy, "; "))
}

// ErrSequenceBehind is described in the package outbox.
var ErrSequenceBehind = errors.New("a sequence is behind ids that are in use")
