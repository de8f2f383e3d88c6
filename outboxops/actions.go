package outboxops

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/jsonb"
	"github.com/outboxgo/outbox/internal/pg"
)

// The actions of operators on failures, as outbox_audit has them.
const (
	actionRetry   = "retry"
	actionResolve = "resolve"
	actionHold    = "hold"
	actionRelease = "release"
	actionRead    = "read"
)

// Retry makes a failure be tried again. The relay of an event sends it at its next poll, whatever its
// NextRetryAt is. A dead event or delivery gets all its attempts again, and comes before the waiting later
// ones of its key. If a worker has a later one at this moment, the retried delivery waits behind it. Events
// that were sent or handled since it died stay before it. Retry also reverts the resolution of a delivery.
//
// The error may be [ErrNotFound]. It is [ErrStatus] for an event that is parked (retry the event in front
// of it), resolved, or held (release the key), and for a delivery that is not dead.
func (f *Failures) Retry(ctx context.Context, id FailureID, why AuditInfo) error {
	return f.changeOne(ctx, actionRetry, id, why)
}

// Resolve closes a failure without sending or handling it, unless that happens at this moment. Events
// behind it in its key go on. The row stays, with the operator and the reason.
//
// The error may be [ErrNotFound]. It is [ErrStatus] for a failure that is resolved, and for a delivery that
// is done or with a worker.
func (f *Failures) Resolve(ctx context.Context, id FailureID, why AuditInfo) error {
	return f.changeOne(ctx, actionResolve, id, why)
}

// Hold stops the key of a failure: no more events of the key are sent, or handled by this group and action,
// until the key is released. The hold also ends when all present failures of the key are resolved, sent or
// handled. Later events of the key wait behind them, even if they could pass a dead one before. A relay or
// a worker finishes the events that it has at this moment; a worker makes all attempts of its delivery.
//
// The error may be [ErrNotFound]. It is [ErrStatus] for an event that is resolved, and for a delivery that
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
		return fmt.Errorf("outbox: %s failure %v: %w", action, id, orNotMigrated(statusError(err)))
	}
	if done == 0 {
		return f.whyNot(ctx, action, id)
	}
	return nil
}

// change runs the statement of an action, and returns the number of changed failures.
func (f *Failures) change(ctx context.Context, sql string, numbers []int64, why AuditInfo) (done int, err error) {
	err = pg.QueryRow(ctx, f.db, sql, numbers, why.Operator, why.Reason).Scan(&done)
	return done, err
}

// statusError gives errors of the functions about the state of a failure the name [ErrStatus].
func statusError(err error) error {
	if pg.Code(err) == notInPrerequisiteState {
		return fmt.Errorf("%w: %w", ErrStatus, err)
	}
	return err
}

// whyNot returns the reason why an action was not possible.
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

// Edit gives a dead event another payload, of the same content type, and retries the event. The event keeps
// its id and all other attributes, except headers that PostgreSQL cannot print. The old payload stays in
// outbox_audit. It also stays in outbox until retention removes it.
//
// The error may be [ErrNotFound]. It is [ErrStatus] for an event that is not dead, or of a relay that has ended by a
// cut, and for a delivery. It is
// a [*outbox.FieldError] for JSON that PostgreSQL rejects, and for a payload that exceeds
// FailuresConfig.MaxPayload as PostgreSQL would print it.
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
	if err := pg.QueryRow(ctx, f.db, f.sqlEdit, id.Number, payload, why.Operator, why.Reason).Scan(&done); err != nil {
		return fmt.Errorf("outbox: edit failure %v: %w", id, orNotMigrated(statusError(err)))
	}
	if !done {
		return f.whyNot(ctx, "edit", id)
	}
	return nil
}

// jsonContentType is the content type whose payloads are stored as jsonb.
const jsonContentType = "application/json"

// checkPayload checks a payload that an operator wrote.
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
