package outboxops

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/jsonb"
	"github.com/outboxgo/outbox/internal/tables"
)

// The functions of 0010_least_privilege.sql change the events and write the audit rows, with
// the rights of the owner of the tables: an operator needs no right to change them in any
// other way.

const sqlRetry = `SELECT {schema}.outbox_retry_failed($1, $2, $3)`

// Retry has the relay send an event at its next look, whatever its NextRetryAt. A dead
// event has all its tries again, and goes before the later events of its key that
// wait. Events of its key that were sent since it died stay before it.
//
// It returns [ErrNotFound], or [ErrStatus] for an event that is parked (retry the
// one in front of it), resolved, or held (release the key).
func (f *Failures) Retry(ctx context.Context, id FailureID, why AuditInfo) error {
	return f.changeOne(ctx, "retry", f.sql.retry, id, why)
}

const sqlResolve = `SELECT {schema}.outbox_resolve_failed($1, $2, $3)`

// Resolve closes an event without sending it: consumers will never see it, unless the
// relay is sending it at this moment. What waits behind it goes on. The row stays,
// with the operator and the reason.
//
// It returns [ErrNotFound], or [ErrStatus] for an event that is resolved.
func (f *Failures) Resolve(ctx context.Context, id FailureID, why AuditInfo) error {
	return f.changeOne(ctx, "resolve", f.sql.resolve, id, why)
}

// changeOne runs an action on one event, or says why it is not possible.
func (f *Failures) changeOne(ctx context.Context, action, sql string, id FailureID, why AuditInfo) error {
	if err := errors.Join(why.check(), id.checkFor(action)); err != nil {
		return err
	}
	done, err := f.change(ctx, sql, []int64{id.Number}, why)
	if err != nil {
		return fmt.Errorf("outbox: %s failure %v: %w", action, id, orNotMigrated(err))
	}
	if done == 0 {
		return f.whyNot(ctx, action, id)
	}
	return nil
}

// change runs an action on events, and returns how many it has changed.
func (f *Failures) change(ctx context.Context, sql string, ids []int64, why AuditInfo) (done int, err error) {
	err = f.db.QueryRow(ctx, sql, ids, why.Operator, why.Reason).Scan(&done)
	return done, err
}

// whyNot says why an action was not possible.
func (f *Failures) whyNot(ctx context.Context, action string, id FailureID) error {
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

const sqlEdit = `SELECT {schema}.outbox_edit_failed($1, $2, $3, $4)`

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
	if err := f.checkPayload(row.ContentType, payload); err != nil {
		return &outbox.FieldError{EventType: row.Type, Index: -1, Field: "payload", Err: err}
	}
	if payload == nil {
		payload = []byte{} // empty is not NULL
	}
	var done bool
	if err := f.db.QueryRow(ctx, f.sql.edit, id.Number, payload, why.Operator, why.Reason).Scan(&done); err != nil {
		return fmt.Errorf("outbox: edit failure %v: %w", id, orNotMigrated(err))
	}
	if !done {
		return f.whyNot(ctx, "edit", id)
	}
	return nil
}

// jsonContentType is the content type whose payloads are stored as jsonb.
const jsonContentType = "application/json"

// checkPayload checks what an operator wrote.
func (f *Failures) checkPayload(contentType string, payload []byte) (err error) {
	size := len(payload)
	if contentType == jsonContentType {
		if !json.Valid(payload) {
			return fmt.Errorf("%w: it is no JSON", outbox.ErrJSON)
		}
		if size, err = jsonb.Check(payload); err != nil {
			return err
		}
	}
	if size > f.maxPayload {
		return fmt.Errorf("%w: %d bytes as PostgreSQL prints it, at most %d", outbox.ErrTooLarge, size, f.maxPayload)
	}
	return nil
}

const sqlHold = `SELECT {schema}.outbox_hold_key($1, $2, $3, $4)`

// Hold stops a relay from sending anything more of a key, until the key is released
// or every event of it that waits now is sent or resolved. Later events of the key
// wait behind them. A dead event of the key, which later events had passed, holds it
// too.
//
// It returns [ErrNotFound] if nothing of the key has failed.
func (f *Failures) Hold(ctx context.Context, relay, topic, key string, why AuditInfo) error {
	return f.changeKey(ctx, "hold", f.sql.hold, "the key has no unresolved failures", relay, topic, key, why)
}

const sqlRelease = `SELECT {schema}.outbox_release_key($1, $2, $3, $4)`

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
	var done bool
	err := f.db.QueryRow(ctx, sql, relay, tables.ParkingKey(topic, []byte(key)), why.Operator, why.Reason).Scan(&done)
	if err == nil && !done {
		err = fmt.Errorf("%s (%w)", none, ErrNotFound)
	}
	if err != nil {
		return fmt.Errorf("outbox: %s key %q of topic %s, relay %s: %w", action, key, topic, relay, orNotMigrated(err))
	}
	return nil
}
