package outboxops

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/jsonb"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// The actions of operators on failures, as outbox_audit has them.
const (
	actionRetry   = "retry"
	actionResolve = "resolve"
	actionHold    = "hold"
	actionRelease = "release"
	actionRead    = "read"
	actionEdit    = "edit"
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
	done := 0
	err := pgx.BeginTxFunc(ctx, f.db, readCommitted, func(tx pgx.Tx) (err error) {
		if done, err = f.change(ctx, tx, action, id.Kind, []int64{id.Number}, why); err != nil || done == 0 {
			return err
		}
		return f.checkSeen(ctx, tx, id, why.Seen)
	})
	if err != nil {
		return fmt.Errorf("outbox: %s failure %v: %w", action, id, orNotMigrated(statusError(err)))
	}
	if done == 0 {
		return f.whyNot(ctx, action, id)
	}
	return nil
}

// readCommitted is the only level at which actions are possible.
var readCommitted = pgx.TxOptions{IsoLevel: pgx.ReadCommitted}

// change runs the statement of an action, and returns the number of changed failures.
func (f *Failures) change(ctx context.Context, db pg.BatchSender, action string, kind Kind, numbers []int64, why AuditInfo) (done int, err error) {
	err = pg.QueryRow(ctx, db, f.stores[kind].statement(action), numbers, why.Operator, why.Reason).Scan(&done)
	return done, err
}

// sqlActed finds the last action on event $1 or delivery $2, or on the key of the event, that snapshot $3 does not show
// and that is not of this transaction. Actions on keys have no index: they are looked for among the last 1,000 actions.
const sqlActed = `
SELECT a.action, a.operator
  FROM (SELECT id, action, operator, xmin AS writer, ` + tables.WrittenBy + ` AS written_by FROM {schema}.outbox_audit WHERE failed_id = $1
         UNION ALL
        SELECT id, action, operator, xmin, ` + tables.WrittenBy + ` FROM {schema}.outbox_audit WHERE delivery_id = $2
         UNION ALL
        SELECT l.id, l.action, l.operator, l.writer, l.written_by
          FROM (SELECT id, action, operator, relay, parking_key, failed_id, xmin AS writer, ` + tables.WrittenBy + ` AS written_by
                  FROM {schema}.outbox_audit ORDER BY id DESC LIMIT 1000) AS l
          JOIN {schema}.outbox_failed AS f ON f.id = $1 AND f.relay = l.relay AND f.parking_key = l.parking_key
         WHERE l.failed_id IS NULL) AS a
 WHERE a.action <> 'read' AND a.writer IS DISTINCT FROM pg_catalog.pg_current_xact_id_if_assigned()::xid
   AND NOT pg_catalog.pg_visible_in_snapshot(a.written_by, $3::text::pg_snapshot)
 ORDER BY a.id DESC LIMIT 1`

// checkSeen returns [ErrStatus] if the audit has an action on a failure that a snapshot does not show. It runs behind
// the statement of an action, which has locked the row: an action that is not committed yet waits for this one.
func (f *Failures) checkSeen(ctx context.Context, tx pgx.Tx, id FailureID, seen string) error {
	if seen == "" {
		return nil
	}
	var action, operator string
	err := pg.QueryRow(ctx, tx, f.sqlActed, id.numberOf(KindEvent), id.numberOf(KindDelivery), seen).Scan(&action, &operator)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("%w: after it was read, %s did this: %s", ErrStatus, operator, action)
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

// Edit gives a dead failure another payload, of the same content type, and retries it. The failure keeps its id and all
// other attributes, except headers that PostgreSQL cannot print. The old payload stays in outbox_audit, unless
// PostgreSQL cannot read it: then the reason there says so.
//
// Edit of a delivery is for one group and one action: others get the event as it was recorded, also if they are dead.
// Neither outbox nor Kafka has the new payload. A delivery that Kafka has brought gets another value of its record. It
// has to be of the same event if the value names it, as in the structured mode of CloudEvents. If only the dead letter
// of a delivery has its payload, outboxdlq.Edit edits that.
//
// The error may be [ErrNotFound]. It is [ErrStatus] for a failure that is not dead, for an event of a relay that has
// ended or was removed, and for a delivery of which the row does not have the whole record. It is a
// [*outbox.FieldError] for JSON that PostgreSQL rejects, for a value of another event, and for a payload that exceeds
// FailuresConfig.MaxPayload as PostgreSQL would print it.
func (f *Failures) Edit(ctx context.Context, id FailureID, payload []byte, why AuditInfo) error {
	return f.edit(ctx, id, payload, why, false)
}

// CheckEdit is a dry run of [Failures.Edit]: it does the same in a transaction, and rolls that back.
func (f *Failures) CheckEdit(ctx context.Context, id FailureID, payload []byte, why AuditInfo) error {
	return f.edit(ctx, id, payload, why, true)
}

func (f *Failures) edit(ctx context.Context, id FailureID, payload []byte, why AuditInfo, dryRun bool) error {
	if err := why.check(); err != nil {
		return err
	}
	row, err := f.get(ctx, id)
	if err != nil {
		return err
	}
	if err := f.checkPayload(row, payload); err != nil {
		return &outbox.FieldError{EventType: row.Type, Index: -1, Field: "payload", Err: err}
	}
	if err := f.checkEvent(ctx, row, payload); err != nil {
		return err
	}
	if payload == nil {
		payload = []byte{} // empty is not NULL
	}
	done, err := f.runEdit(ctx, dryRun, id, payload, why)
	if err != nil {
		return fmt.Errorf("outbox: edit failure %v: %w", id, orNotMigrated(statusError(err)))
	}
	if !done {
		return f.whyNot(ctx, actionEdit, id)
	}
	return nil
}

// runEdit runs the statement of an edit, and reports whether it has changed the row. In a dry run it is rolled back.
func (f *Failures) runEdit(ctx context.Context, dryRun bool, id FailureID, payload []byte, why AuditInfo) (done bool, err error) {
	tx, err := f.db.BeginTx(ctx, readCommitted)
	if err != nil {
		return false, err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	if err := tx.QueryRow(ctx, f.stores[id.Kind].statement(actionEdit), id.Number, payload, why.Operator, why.Reason).Scan(&done); err != nil || !done {
		return done, err
	}
	if err := f.checkSeen(ctx, tx, id, why.Seen); err != nil || dryRun {
		return done, err
	}
	return done, tx.Commit(ctx)
}

// jsonContentType is the content type whose payloads are stored as jsonb, except for values of records.
const jsonContentType = "application/json"

// checkPayload checks a payload that an operator wrote for a failure.
func (f *Failures) checkPayload(row Failure, payload []byte) (err error) {
	size := len(payload)
	if row.ContentType == jsonContentType {
		if !json.Valid(payload) {
			return fmt.Errorf("%w: it is no JSON", outbox.ErrJSON)
		}
		if row.Kafka == nil {
			if size, err = jsonb.Check(payload); err != nil {
				return err
			}
		}
	}
	if size > f.maxPayload {
		return fmt.Errorf("%w: %d bytes as PostgreSQL prints it, at most %d", outbox.ErrTooLarge, size, f.maxPayload)
	}
	return nil
}

// checkEvent refuses the value of a record if it makes the record one of another event. The group would have that event
// as handled, and the one of the record not.
func (f *Failures) checkEvent(ctx context.Context, row Failure, value []byte) error {
	if row.Kafka == nil {
		return nil
	}
	whole, err := f.Get(ctx, row.ID)
	if err != nil {
		return err
	}
	headers := func(yield func(string, []byte) bool) {
		for name, text := range whole.Headers {
			if !yield(name, []byte(text)) {
				return
			}
		}
	}
	if err := envelope.SameEvent(whole.Payload, value, headers); err != nil {
		return &outbox.FieldError{EventType: row.Type, Index: -1, Field: "payload", Err: err}
	}
	return nil
}
