package outboxops

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/jsonb"
)

// What operators do about failures.
const (
	actionRetry   = "retry"
	actionResolve = "resolve"
	actionHold    = "hold"
	actionRelease = "release"
	actionRead    = "read"
)

// Retry has a failure tried again. An event is sent by its relay at the next look, whatever its
// NextRetryAt. A dead event or delivery has all its tries again, and goes before the later ones
// of its key that wait; if a worker has one of them at this moment, it waits behind that. What
// was sent or handled since it died stays before it. The resolution of a delivery is taken back.
//
// It returns [ErrNotFound], or [ErrStatus] for an event that is parked (retry the
// one in front of it), resolved, or held (release the key), and for a delivery that is not dead.
func (f *Failures) Retry(ctx context.Context, id FailureID, why AuditInfo) error {
	return f.changeOne(ctx, actionRetry, id, why)
}

// Resolve closes a failure without sending or handling it, unless that happens at this moment.
// What waits behind it goes on. The row stays, with the operator and the reason.
//
// It returns [ErrNotFound], or [ErrStatus] for what is resolved, and for a delivery that is done
// or with a worker.
func (f *Failures) Resolve(ctx context.Context, id FailureID, why AuditInfo) error {
	return f.changeOne(ctx, actionResolve, id, why)
}

// Hold stops the key of a failure: nothing more of it is sent, or handled by this group and
// action, until the key is released. It also ends when every failure of the key that there is
// now is resolved, or has got through. Later events of the key wait behind them, also where
// they had passed a dead one. What a relay or a worker has at this moment it goes on with: a
// delivery with all its attempts.
//
// It returns [ErrNotFound], or [ErrStatus] for an event that is resolved, and for a delivery that
// is not dead, or has no key.
func (f *Failures) Hold(ctx context.Context, id FailureID, why AuditInfo) error {
	return f.changeOne(ctx, actionHold, id, why)
}

// Release lets the key of a failure go on that Hold, or a dead failure under HoldDead, held back.
// Dead events and deliveries stay dead.
//
// It returns [ErrNotFound], or [ErrStatus] if the key is not held.
func (f *Failures) Release(ctx context.Context, id FailureID, why AuditInfo) error {
	return f.changeOne(ctx, actionRelease, id, why)
}

// changeOne runs an action on one failure, or says why it is not possible.
func (f *Failures) changeOne(ctx context.Context, action string, id FailureID, why AuditInfo) error {
	if err := errors.Join(why.check(), id.checkFor(action)); err != nil {
		return err
	}
	done, err := f.change(ctx, f.stores[id.Kind].statement(action), []int64{id.Number}, why)
	if err != nil {
		return fmt.Errorf("outbox: %s failure %v: %w", action, id, orNotMigrated(err))
	}
	if done == 0 {
		return f.whyNot(ctx, action, id)
	}
	return nil
}

// change runs the statement of an action, and returns how many failures it has changed.
func (f *Failures) change(ctx context.Context, sql string, numbers []int64, why AuditInfo) (done int, err error) {
	err = f.db.QueryRow(ctx, sql, numbers, why.Operator, why.Reason).Scan(&done)
	return done, err
}

// whyNot says why an action was not possible.
func (f *Failures) whyNot(ctx context.Context, action string, id FailureID) error {
	row, err := f.get(ctx, id)
	if err != nil {
		return err
	}
	state := "it is " + row.Status
	if row.Held {
		state += " and held"
	}
	switch {
	case row.Class == unreadableRow:
		state += ", and without a payload that can be read"
	case row.LockedBy != "":
		state += ", and with a worker"
	case action == actionRelease:
		state = "its key is not held"
	}
	return fmt.Errorf("outbox: %s failure %v: %w: %s", action, id, ErrStatus, state)
}

const sqlEdit = `SELECT {schema}.outbox_edit_failed($1, $2, $3, $4)`

// Edit gives a dead event another payload, of the same content type, and retries
// it. Its id stays, and so do all its other attributes, except for headers that
// PostgreSQL cannot print. The payload from before stays in outbox_audit, and in outbox
// until retention removes it.
//
// It returns [ErrNotFound], [ErrStatus] for an event that is not dead and for a delivery, and a
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
	if id.Kind != KindEvent {
		return fmt.Errorf("outbox: edit failure %v: %w: only the payload of a dead event of a relay can be changed", id, ErrStatus)
	}
	if err := f.checkPayload(row.ContentType, payload); err != nil {
		return &outbox.FieldError{EventType: row.Type, Index: -1, Field: "payload", Err: err}
	}
	if payload == nil {
		payload = []byte{} // empty is not NULL
	}
	var done bool
	if err := f.db.QueryRow(ctx, f.sqlEdit, id.Number, payload, why.Operator, why.Reason).Scan(&done); err != nil {
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
