// Package tables reads what several packages need to know about the tables of
// outbox: the positions of relays, and the rows of outbox_failed and event_delivery. pg.InSchema
// completes its statements.
package tables

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/pg"
)

// Names are the tables that Migrate makes, but for the one in which it keeps what it has done.
var Names = []string{"outbox", "outbox_delayed", "outbox_mover", "outbox_cursor", "outbox_lease", "outbox_archiver", "outbox_failed", "outbox_audit", "outbox_partitioning",
	"event_handled", "consumer_start", "consumer_handler", "consumer_gap", "consumer_pause", "consumer_group_role", "event_subscription", "event_member", "event_success", "event_delivery"}

// NewestCursors begins a statement that needs the position of each relay: positions has
// the newest row of outbox_cursor for each, or the row that it names as confirmed. Under pg.PlannerSettings it uses the
// index on (relay, id) and nothing else.
const NewestCursors = `
WITH RECURSIVE names AS (
   (SELECT relay FROM {schema}.outbox_cursor ORDER BY relay LIMIT 1)
     UNION ALL
    SELECT (SELECT c.relay FROM {schema}.outbox_cursor AS c WHERE c.relay > names.relay ORDER BY c.relay LIMIT 1)
      FROM names WHERE names.relay IS NOT NULL
), positions AS MATERIALIZED (
    SELECT c.*, n.cursor_topic AS newest_topic, n.batch AS newest_batch FROM names
     CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox_cursor
                          WHERE relay >= names.relay AND relay <= names.relay ORDER BY relay DESC, id DESC LIMIT 1) AS n
     CROSS JOIN LATERAL (SELECT n.* WHERE n.confirmed IS NULL
                          UNION ALL
                         SELECT r.* FROM {schema}.outbox_cursor AS r
                          WHERE r.relay >= names.relay AND r.relay <= names.relay AND r.id >= n.confirmed AND r.id <= n.confirmed) AS c
)`

// SQLSequence reads the last id that the sequence has drawn, and the highest id above it
// that a row has: a row of outbox, of outbox_failed, or the position of a relay. There is
// none unless rows were copied without the sequence, or the sequence was set back, as
// TRUNCATE … RESTART IDENTITY does. The sequence is read after the rows, because it
// is read in a statement that sees the rows of its beginning. Each look-up goes backward
// from the end of an index and touches no row there, so it costs nothing that the newest
// rows have been removed.
//
// The login of a group of workers may write any position of the group, and must stop nothing else. So of positions of
// groups it reads that of the name $1 alone, or all if $1 is NULL, and none above an id that no sequence gets to.
const SQLSequence = NewestCursors + `, drawn AS MATERIALIZED (
    SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS id FROM {schema}.outbox_id_seq
)
SELECT drawn.id, greatest(
       (SELECT max(highest_id) FROM positions WHERE highest_id > drawn.id
           AND (NOT pg_catalog.starts_with(relay, '` + WorkerPrefix + `') OR coalesce(relay = $1::text, true) AND highest_id <= ` + MaxGroupID + `)),
       (SELECT id FROM {schema}.outbox WHERE id > drawn.id ORDER BY id DESC LIMIT 1),
       (SELECT max(f.outbox_id) FROM positions AS p
         CROSS JOIN LATERAL (SELECT outbox_id FROM {schema}.outbox_failed
                              WHERE relay = p.relay AND outbox_id > drawn.id ORDER BY outbox_id DESC LIMIT 1) AS f))
  FROM drawn`

// MaxGroupID is 2^48. A sequence that draws 10,000 ids a second gets there after 890 years.
const MaxGroupID = `281474976710656::bigint`

// ReadSequence reads what SQLSequence returns; highest is 0 if there is no such row.
func ReadSequence(rows pgx.Rows) (drawn, highest int64, err error) {
	var above pgtype.Int8
	_, err = pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (struct{}, error) {
		return struct{}{}, row.Scan(&drawn, &above)
	})
	return drawn, above.Int64, err
}

// nextXid is a transaction id that PostgreSQL had not drawn when the statement began, or one that was drawn by a
// transaction that began after that of the statement. Function age counts from the next transaction id, or from that of
// its transaction; it keeps what it has read until its transaction ends.
const nextXid = `(pg_snapshot_xmax(pg_current_snapshot())::text::bigint
        + greatest(age(pg_snapshot_xmax(pg_current_snapshot())::xid), 0))::text::xid8`

// Unreached is the least transaction id of a row that PostgreSQL has not reached, or NULL. Such a row was copied here.
// It looks only above the transactions that are open, because it would have to pass all of their rows.
const Unreached = `(SELECT xid FROM {schema}.outbox WHERE xid >= ` + nextXid + ` ORDER BY xid, id LIMIT 1)`

// Gaps is a query for the gaps between the transactions that were in progress in b.snapshot: transactions with ids
// between after and before had ended. An index has uncommitted rows, too, and a condition on each row does not keep
// PostgreSQL from reading them. So a statement over outbox reads by these ranges, under the condition [InGap]: a large
// transaction that stays open costs it nothing. It is to be a LATERAL subquery g beside b, which has a column bound as
// well. If one of the two is NULL, nothing is in a gap. PostgreSQL has the transactions of a snapshot in order.
const Gaps = `
       SELECT '0'::xid8 AS after, pg_snapshot_xmin(b.snapshot) AS before
        UNION ALL
       SELECT x, pg_catalog.lead(x, 1, pg_snapshot_xmax(b.snapshot)) OVER () FROM pg_snapshot_xip(b.snapshot) AS x`

// InGap is the condition that xid is in gap g, and not below b.bound.
const InGap = `xid > g.after AND xid < g.before AND xid >= b.bound`

// NotRolledBack is the condition that transaction x, which has ended, may have rows. Those of a transaction that was
// rolled back stay in the indexes until they are vacuumed, so a statement that looks up the transactions of an older
// snapshot leaves it out. PostgreSQL refuses the question about a transaction id that it has not reached.
const NotRolledBack = `pg_xact_status(x) IS DISTINCT FROM 'aborted'::text`

// Ended is the condition that transaction x, which was in progress in an older snapshot, has ended and may have rows.
const Ended = `CASE WHEN pg_visible_in_snapshot(x, pg_current_snapshot()) THEN ` + NotRolledBack + ` END`

// GapsAndUnreached is [Gaps] if b.snapshot is the present one, with the ids that PostgreSQL has not reached.
const GapsAndUnreached = Gaps + `
        UNION ALL
       SELECT (` + nextXid + `::text::bigint - 1)::text::xid8, '18446744073709551615'::xid8`

// Attempted is the condition that the relay at position s has attempted event o: the
// event was sent, or has entered outbox_failed.
const Attempted = `(pg_visible_in_snapshot(o.xid, s.snapshot)
       OR coalesce(o.id <= s.last_processed_id AND pg_visible_in_snapshot(o.xid, s.window_snapshot), false))`

// Headers is the expression of the headers of a row o of outbox as they are copied to other tables: with the attribute
// expirytime of an event that expires. Other writers may store headers that are no object, and a JSON null for none.
const Headers = `CASE WHEN o.expires_at IS NULL OR jsonb_typeof(o.headers) NOT IN ('object', 'null') THEN o.headers
            ELSE coalesce(nullif(o.headers, 'null'::jsonb), '{}'::jsonb) || pg_catalog.jsonb_build_object('ce_expirytime', (pg_catalog.to_jsonb(o.expires_at AT TIME ZONE 'UTC') #>> '{}') || 'Z') END`

// ParkingKey identifies the events that must stay in order: those of one topic and record
// key. The name of a topic has no slash.
func ParkingKey(topic string, key []byte) string {
	var b strings.Builder
	b.Grow(len(topic) + 1 + len(key))
	b.WriteString(topic)
	b.WriteByte('/')
	b.Write(key)
	return b.String()
}

// sqlIdentity reads what the transactional ids of relays are made of.
const sqlIdentity = `SELECT system_identifier, pg_catalog.current_database()::text FROM pg_control_system()`

// Identity returns the identifier of the cluster, and the name of the database.
func Identity(ctx context.Context, db pg.BatchSender) (systemID int64, database string, err error) {
	if err := pg.QueryRow(ctx, db, sqlIdentity).Scan(&systemID, &database); err != nil {
		return 0, "", fmt.Errorf("read the identity of the database: %w", err)
	}
	return systemID, database, nil
}
