package outboxops

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/jsonb"
	"github.com/outboxgo/outbox/internal/tables"
)

// Every action writes its audit rows in the statement that changes the events.
// Rows are locked in the order of their ids, as the relay locks them.

// sqlRetry makes heads due, and parks what is dead. The relay finds its place among
// the events of its key, because it may be sending one of them.
const sqlRetry = `
WITH chosen AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_failed
     WHERE id = ANY ($3::bigint[]) AND (status IN ('waiting', 'failed') AND NOT held OR status = 'dead')
       AND num_nonnulls(payload, payload_bytes) > 0
     ORDER BY id FOR UPDATE
), changed AS (
    UPDATE {schema}.outbox_failed AS f
       SET status = CASE status WHEN 'dead' THEN 'parked' ELSE status END,
           retry_count = CASE status WHEN 'dead' THEN 0 ELSE retry_count END, held = false, next_retry_at = now()
     WHERE id = ANY (ARRAY(SELECT id FROM chosen))
 RETURNING f.*
)
INSERT INTO {schema}.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id)
SELECT $1, 'retry', $2, relay, parking_key, id, outbox_id, event_id FROM changed`

// Retry has the relay send an event at its next look, whatever its NextRetryAt. A dead
// event has all its tries again, and goes before the later events of its key that
// wait. Events of its key that were sent since it died stay before it.
//
// It returns [ErrNotFound], or [ErrStatus] for an event that is parked (retry the
// one in front of it), resolved, or held (release the key).
func (f *Failures) Retry(ctx context.Context, id FailureID, why AuditInfo) error {
	return f.changeOne(ctx, "retry", f.sql.retry, id, why)
}

const sqlResolve = `
WITH chosen AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_failed WHERE id = ANY ($3::bigint[]) AND status <> 'resolved' ORDER BY id FOR UPDATE
), changed AS (
    UPDATE {schema}.outbox_failed AS f
       SET status = 'resolved', held = false, resolved_at = now(), resolved_by = $1, resolution = $2
     WHERE id = ANY (ARRAY(SELECT id FROM chosen))
 RETURNING f.*
)
INSERT INTO {schema}.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id)
SELECT $1, 'resolve', $2, relay, parking_key, id, outbox_id, event_id FROM changed`

// Resolve closes an event without sending it: consumers will never see it, unless the
// relay is sending it at this moment. What waits behind it goes on. The row stays,
// with the operator and the reason.
//
// It returns [ErrNotFound], or [ErrStatus] for an event that is resolved.
func (f *Failures) Resolve(ctx context.Context, id FailureID, why AuditInfo) error {
	return f.changeOne(ctx, "resolve", f.sql.resolve, id, why)
}

// changeOne runs an action on one event, or says why it is not possible.
func (f *Failures) changeOne(ctx context.Context, action, sql string, id FailureID, why AuditInfo, more ...any) error {
	if err := errors.Join(why.check(), id.checkFor(action)); err != nil {
		return err
	}
	tag, err := f.db.Exec(ctx, sql, append([]any{why.Operator, why.Reason, []int64{id.Number}}, more...)...)
	if err != nil {
		return fmt.Errorf("outbox: %s failure %v: %w", action, id, orNotMigrated(err))
	}
	if tag.RowsAffected() > 0 {
		return nil
	}
	row, err := f.get(ctx, id)
	if err != nil {
		return err
	}
	status := row.Status
	if row.Held {
		status += " and held"
	}
	if row.Class == unreadableRow {
		status += ", and without a payload that can be read"
	}
	return fmt.Errorf("outbox: %s failure %v: %w: it is %s", action, id, ErrStatus, status)
}

const sqlEdit = `
WITH chosen AS MATERIALIZED (
    SELECT * FROM {schema}.outbox_failed WHERE id = ANY ($3::bigint[]) AND status = 'dead' ORDER BY id FOR UPDATE
), changed AS (
    UPDATE {schema}.outbox_failed
       SET payload = $4::text::jsonb, payload_bytes = $5, headers = $6::text::jsonb, size = $7,
           status = 'parked', retry_count = 0, held = false, next_retry_at = now(),
           error_class = CASE error_class WHEN 'unreadable_row' THEN NULL ELSE error_class END
     WHERE id = ANY (ARRAY(SELECT id FROM chosen))
 RETURNING id
)
INSERT INTO {schema}.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id, payload, payload_bytes)
SELECT $1, 'edit', $2, relay, parking_key, id, outbox_id, event_id, payload, payload_bytes FROM chosen`

// Edit gives a dead event another payload, of the same content type, and retries
// it. Its id stays, and so do all its other attributes, except for headers that
// PostgreSQL cannot print. The payload from before stays in outbox_audit, and in outbox
// until retention removes it.
//
// It returns [ErrNotFound], [ErrStatus] for an event that is not dead, and a
// [*outbox.FieldError] for JSON that PostgreSQL does not take and for a payload above
// FailuresConfig.MaxPayload, as PostgreSQL would print it.
func (f *Failures) Edit(ctx context.Context, id FailureID, payload []byte, why AuditInfo) error {
	if err := why.check(); err != nil {
		return err
	}
	row, err := f.get(ctx, id)
	if err != nil {
		return err
	}
	size, err := f.checkPayload(row.ContentType, payload)
	if err != nil {
		return &outbox.FieldError{EventType: row.Type, Index: -1, Field: "payload", Err: err}
	}
	headers, err := f.headersToKeep(ctx, row)
	if err != nil {
		return fmt.Errorf("outbox: edit failure %v: read headers: %w", id, orNotMigrated(err))
	}
	var text pgtype.Text
	if row.ContentType == jsonContentType {
		text, payload = pgtype.Text{String: string(payload), Valid: true}, nil
	} else if payload == nil {
		payload = []byte{} // empty is not NULL
	}
	return f.changeOne(ctx, "edit", f.sql.edit, id, why, text, payload, pgtype.Text{String: string(headers), Valid: headers != nil}, size+len(headers))
}

// jsonContentType is the content type whose payloads are stored as jsonb.
const jsonContentType = "application/json"

// checkPayload checks what an operator wrote, and returns its size as PostgreSQL prints it.
func (f *Failures) checkPayload(contentType string, payload []byte) (size int, err error) {
	size = len(payload)
	if contentType == jsonContentType {
		if !json.Valid(payload) {
			return 0, fmt.Errorf("%w: it is no JSON", outbox.ErrJSON)
		}
		if size, err = jsonb.Check(payload); err != nil {
			return 0, err
		}
	}
	if size > f.maxPayload {
		return 0, fmt.Errorf("%w: %d bytes as PostgreSQL prints it, at most %d", outbox.ErrTooLarge, size, f.maxPayload)
	}
	return size, nil
}

// headersToKeep returns the headers of a failed event, as JSON. The row of an unreadable
// event has none, but the one in outbox may have.
func (f *Failures) headersToKeep(ctx context.Context, row Failure) ([]byte, error) {
	headers, err := f.rows.readHeaders(ctx, row.ID.Number)
	if err != nil || headers != nil || row.Class != unreadableRow {
		return headers, err
	}
	headers, err = f.recorded.readHeaders(ctx, row.OutboxID)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return headers, err
}

const sqlHold = `
WITH chosen AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_failed
     WHERE relay = $3 AND parking_key = $4 AND status IN ('waiting', 'failed', 'parked', 'dead')
     ORDER BY id FOR UPDATE
), changed AS (
    UPDATE {schema}.outbox_failed SET held = true WHERE id = ANY (ARRAY(SELECT id FROM chosen)) RETURNING id
)
INSERT INTO {schema}.outbox_audit (operator, action, reason, relay, parking_key)
SELECT $1, 'hold', $2, $3, $4 WHERE EXISTS (SELECT FROM changed)`

// Hold stops a relay from sending anything more of a key, until the key is released
// or every event of it that waits now is sent or resolved. Later events of the key
// wait behind them. A dead event of the key, which later events had passed, holds it
// too.
//
// It returns [ErrNotFound] if nothing of the key has failed.
func (f *Failures) Hold(ctx context.Context, relay, topic, key string, why AuditInfo) error {
	return f.changeKey(ctx, "hold", f.sql.hold, "the key has no unresolved failures", relay, topic, key, why)
}

const sqlRelease = `
WITH chosen AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_failed
     WHERE relay = $3 AND parking_key = $4 AND status IN ('waiting', 'failed', 'parked', 'dead') AND held
     ORDER BY id FOR UPDATE
), changed AS (
    UPDATE {schema}.outbox_failed SET held = false WHERE id = ANY (ARRAY(SELECT id FROM chosen)) RETURNING id
)
INSERT INTO {schema}.outbox_audit (operator, action, reason, relay, parking_key)
SELECT $1, 'release', $2, $3, $4 WHERE EXISTS (SELECT FROM changed)`

// Release lets a relay send again what Hold, or a dead event under HoldDead, held
// back. The dead event stays dead.
//
// It returns [ErrNotFound] if the key is not held.
func (f *Failures) Release(ctx context.Context, relay, topic, key string, why AuditInfo) error {
	return f.changeKey(ctx, "release", f.sql.release, "the key is not held", relay, topic, key, why)
}

// changeKey runs the statement of an action. None says what it means if that changes
// nothing.
func (f *Failures) changeKey(ctx context.Context, action, sql, none, relay, topic, key string, why AuditInfo) error {
	if err := why.check(); err != nil {
		return err
	}
	tag, err := f.db.Exec(ctx, sql, why.Operator, why.Reason, relay, tables.ParkingKey(topic, []byte(key)))
	if err == nil && tag.RowsAffected() == 0 {
		err = fmt.Errorf("%s (%w)", none, ErrNotFound)
	}
	if err != nil {
		return fmt.Errorf("outbox: %s key %q of topic %s, relay %s: %w", action, key, topic, relay, orNotMigrated(err))
	}
	return nil
}
