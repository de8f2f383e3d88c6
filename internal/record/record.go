// Package record stores events in the tables outbox and outbox_delayed, in transactions of its callers.
//
// [Rows] holds the events of one call, column by column. It checks each value against the limits of its
// column before anything is sent to PostgreSQL, so a rejected event leaves the transaction usable. [Store]
// has the statements:
//
//   - an INSERT of a single row
//   - an INSERT of any number of rows
//   - COPY
//   - an INSERT whose only argument is a JSON document, which every driver for PostgreSQL can send
//   - two statements like the second and the last one, for calls with events that are not to be sent before a time
//
// All statements store the events in their order, with ascending ids.
package record

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/indexes"
	"github.com/outboxgo/outbox/internal/pg"
)

var (
	// ErrTooLarge means that a payload, the headers, or all events of a statement exceed their limit in
	// bytes.
	ErrTooLarge = errors.New("is too large")
	// ErrEncode means that the event's codec failed; its error is wrapped as well.
	ErrEncode = errors.New("cannot be encoded")
	// ErrDuplicateEvent means that ids of events are unique, and an event of this id is in outbox already.
	ErrDuplicateEvent = errors.New("an event of this id was recorded before")
)

// Store has the statements for the tables of a schema. It has no other state.
type Store struct {
	schema, one, many, document, delayed, delayedDocument, cancel string
}

// NewStore returns the store of a schema.
func NewStore(schema string) *Store {
	return &Store{
		schema: schema, one: pg.InSchema(sqlInsertOne, schema), many: pg.InSchema(sqlInsert, schema),
		document: pg.InSchema(sqlInsertDocument, schema), delayed: pg.InSchema(sqlInsertDelayed, schema),
		delayedDocument: pg.InSchema(sqlInsertDelayedDocument, schema), cancel: pg.InSchema(sqlCancel, schema),
	}
}

// minCopyRows is the smallest number of events for which COPY is faster, as measured. COPY takes a second
// round trip, which costs more than it saves for fewer events.
const minCopyRows = 500

// Insert stores rows in tx: by COPY also what is too large for a statement. It translates errors of PostgreSQL to
// pg.ErrNotMigrated and [ErrDuplicateEvent].
func (s *Store) Insert(ctx context.Context, tx pgx.Tx, rows *Rows) (err error) {
	if rows.delayed > 0 || rows.Len() < minCopyRows && rows.size <= maxStatement {
		sql, args := s.Statement(rows)
		_, err = tx.Exec(ctx, sql, args...)
	} else {
		_, err = tx.CopyFrom(ctx, pgx.Identifier{s.schema, "outbox"}, rowColumns, pgx.CopyFromSlice(rows.Len(), rows.row))
	}
	switch {
	case pg.IsUndefined(err):
		err = pg.NotMigrated(s.schema, err)
	case pg.IsDuplicateIn(err, indexes.EventID.Name()):
		err = fmt.Errorf("%w: %w", ErrDuplicateEvent, pg.WithDetail(err))
	}
	if err != nil {
		return fmt.Errorf("outbox: record %d events: %w", rows.Len(), err)
	}
	return nil
}

// Statement returns the one statement of pgx that stores rows, and its arguments.
func (s *Store) Statement(rows *Rows) (sql string, args []any) {
	if rows.delayed > 0 {
		return s.delayed, rows.delayedArgs()
	}
	if rows.Len() == 1 {
		args, _ := rows.row(0) // its error is always nil
		return s.one, args
	}
	return s.many, rows.args()
}

// DocumentStatement returns the one statement that stores rows in any driver, and its argument, a text. Its
// error is [ErrTooLarge] for more than 256 MiB.
func (s *Store) DocumentStatement(rows *Rows) (sql string, args []any, err error) {
	document, err := rows.document()
	if rows.delayed > 0 {
		return s.delayedDocument, []any{document}, err
	}
	return s.document, []any{document}, err
}

// Cancel deletes a delayed event that was not moved to outbox yet. It returns false if there is none.
func (s *Store) Cancel(ctx context.Context, tx pgx.Tx, id uuid.UUID) (bool, error) {
	sql, args := s.CancelStatement(id)
	tag, err := tx.Exec(ctx, sql, args...)
	if pg.IsUndefined(err) {
		err = pg.NotMigrated(s.schema, err)
	}
	if err != nil {
		return false, fmt.Errorf("outbox: cancel event %s: %w", id, err)
	}
	return tag.RowsAffected() > 0, nil
}

// CancelStatement returns the statement of [Store.Cancel], which affects one row if there was such an event.
func (s *Store) CancelStatement(id uuid.UUID) (sql string, args []any) {
	return s.cancel, []any{id.String()}
}

// rowColumns are the columns of outbox that a recorder fills. The other columns have defaults.
var rowColumns = []string{
	"event_id", "event_type", "source", "aggregate_type", "aggregate_id",
	"payload", "payload_bytes", "content_type", "topic", "partition_key", "headers", "occurred_at", "expires_at",
}

// columns is rowColumns in SQL.
const columns = `event_id, event_type, source, aggregate_type, aggregate_id,
       payload, payload_bytes, content_type, topic, partition_key, headers, occurred_at, expires_at`

// sqlInsertOne stores one event. Most transactions record only one event.
const sqlInsertOne = `
INSERT INTO {schema}.outbox (` + columns + `)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)`

// sqlInsert stores any number of events. unnest keeps the order of its arrays, and the
// sequence is called row by row, so ids are in the order of the events.
const sqlInsert = `
INSERT INTO {schema}.outbox (` + columns + `)
SELECT e.event_id, e.event_type, $1::text, e.aggregate_type, e.aggregate_id,
       e.payload::jsonb, e.payload_bytes, e.content_type, e.topic, e.partition_key, e.headers::jsonb, e.occurred_at, e.expires_at
  FROM unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bytea[],
              $8::text[], $9::text[], $10::text[], $11::text[], $12::timestamptz[], $13::timestamptz[])
       AS e (event_id, event_type, aggregate_type, aggregate_id, payload, payload_bytes,
             content_type, topic, partition_key, headers, occurred_at, expires_at)`

// sqlInsertDocument stores the events of a JSON document. Its argument is a text, which every driver can
// send in every mode. Arrays would need the encoding of pgx. JSON values are texts in the document, because
// a JSON null would become NULL otherwise. json_to_recordset keeps the order of the document, as unnest
// does.
const sqlInsertDocument = `
INSERT INTO {schema}.outbox (` + columns + `)
SELECT e.event_id, e.event_type, e.source, e.aggregate_type, e.aggregate_id,
       e.payload::jsonb, decode(e.payload_bytes, 'base64'), e.content_type, e.topic, e.partition_key, e.headers::jsonb, e.occurred_at, e.expires_at
  FROM json_to_recordset($1::text::json)
       AS e (event_id uuid, event_type text, source text, aggregate_type text, aggregate_id text, payload text, payload_bytes text,
             content_type text, topic text, partition_key text, headers text, occurred_at timestamptz, expires_at timestamptz)`

// sqlInsertDelayed is sqlInsert for calls in which some events have a due time. Both tables keep the order of the
// events. They draw their ids from two sequences.
const sqlInsertDelayed = `
WITH e AS MATERIALIZED (
    SELECT e.event_id, e.event_type, $1::text AS source, e.aggregate_type, e.aggregate_id,
           e.payload::jsonb AS payload, e.payload_bytes, e.content_type, e.topic, e.partition_key, e.headers::jsonb AS headers, e.occurred_at, e.expires_at, e.due_at
      FROM unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bytea[],
                  $8::text[], $9::text[], $10::text[], $11::text[], $12::timestamptz[], $13::timestamptz[], $14::timestamptz[])
           AS e (event_id, event_type, aggregate_type, aggregate_id, payload, payload_bytes,
                 content_type, topic, partition_key, headers, occurred_at, expires_at, due_at)
)` + intoBoth

// sqlInsertDelayedDocument is the same for sqlInsertDocument.
const sqlInsertDelayedDocument = `
WITH e AS MATERIALIZED (
    SELECT e.event_id, e.event_type, e.source, e.aggregate_type, e.aggregate_id,
           e.payload::jsonb AS payload, decode(e.payload_bytes, 'base64') AS payload_bytes, e.content_type, e.topic, e.partition_key,
           e.headers::jsonb AS headers, e.occurred_at, e.expires_at, e.due_at
      FROM json_to_recordset($1::text::json)
           AS e (event_id uuid, event_type text, source text, aggregate_type text, aggregate_id text, payload text, payload_bytes text,
                 content_type text, topic text, partition_key text, headers text, occurred_at timestamptz, expires_at timestamptz, due_at timestamptz)
)` + intoBoth

// intoBoth ends these statements.
const intoBoth = `, delayed AS (
    INSERT INTO {schema}.outbox_delayed (` + columns + `, due_at)
    SELECT ` + columns + `, due_at FROM e WHERE due_at IS NOT NULL
)
INSERT INTO {schema}.outbox (` + columns + `)
SELECT ` + columns + ` FROM e WHERE due_at IS NULL`

// sqlCancel returns a row if the event was cancelled, because not every driver has a way to read a result here.
const sqlCancel = `SELECT FROM {schema}.outbox_cancel($1::text::uuid) AS c (cancelled) WHERE c.cancelled`
