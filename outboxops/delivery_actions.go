package outboxops

import (
	"context"
	"errors"
	"fmt"
)

// The functions of 0012_delivery_operators.sql change the rows and write the audit rows, with
// the rights of the owner of the tables.

const sqlRequeue = `SELECT {schema}.outbox_requeue_deliveries($1, $2, $3)`

// Requeue gives a dead delivery all its attempts again: a worker of the group takes it at its
// next look. It goes before the later ones of its key that wait, also those that wait for a
// retry. If a worker has one of them at this moment, it waits behind that. What was handled
// since it died stays before it. A resolution is taken back.
//
// It returns [ErrNotFound], or [ErrStatus] for a delivery that is not dead.
func (d *Deliveries) Requeue(ctx context.Context, id int64, why AuditInfo) error {
	return d.changeOne(ctx, "requeue", d.sql.requeue, id, why)
}

// RequeueAll is [Deliveries.Requeue] for all that a filter picks and that is dead and not
// resolved. It returns how many that were, also beside an error. They are changed in parts,
// the oldest first, each in a transaction of its own; what dies again meanwhile is not picked
// twice. BulkConfig.Topics gets the streams.
func (d *Deliveries) RequeueAll(ctx context.Context, filter DeliveryFilter, cfg BulkConfig, why AuditInfo) (int, error) {
	return d.changeAll(ctx, "requeue", d.sql.requeue, filter, []string{DeliveryDead}, cfg, why)
}

const sqlResolveDeliveries = `SELECT {schema}.outbox_resolve_deliveries($1, $2, $3)`

// Resolve closes a delivery without handling it: its status is [DeliveryDead], with the
// operator and the reason. The next of its key goes on.
//
// It returns [ErrNotFound], or [ErrStatus] for a delivery that is done, resolved, or with a
// worker at this moment.
func (d *Deliveries) Resolve(ctx context.Context, id int64, why AuditInfo) error {
	return d.changeOne(ctx, "resolve", d.sql.resolve, id, why)
}

// ResolveAll is [Deliveries.Resolve] for all that a filter picks and that is pending, parked
// or dead, as [Deliveries.RequeueAll] works.
func (d *Deliveries) ResolveAll(ctx context.Context, filter DeliveryFilter, cfg BulkConfig, why AuditInfo) (int, error) {
	return d.changeAll(ctx, "resolve", d.sql.resolve, filter, []string{DeliveryPending, DeliveryParked, DeliveryDead}, cfg, why)
}

const sqlAuditReadDelivery = `SELECT {schema}.outbox_audit_read_delivery($1, $2, $3)`

// AuditRead writes into outbox_audit that somebody reads the payload of a delivery, as
// [Failures.AuditRead] does.
//
// It returns [ErrNotFound] if there is no such delivery.
func (d *Deliveries) AuditRead(ctx context.Context, id int64, why AuditInfo) error {
	if err := why.check(); err != nil {
		return err
	}
	return auditRead(ctx, d.db, fmt.Sprintf("delivery %d", id), d.sql.auditRead, id, why)
}

// Audit returns the actions on a delivery, the last first.
func (d *Deliveries) Audit(ctx context.Context, id int64, page AuditPage) ([]AuditEntry, error) {
	if id < 1 {
		return nil, fmt.Errorf("outbox: read audit: delivery id %d: must be above 0", id)
	}
	return d.audits.list(ctx, 0, id, page)
}

// changeOne runs an action on one delivery, or says why it is not possible.
func (d *Deliveries) changeOne(ctx context.Context, action, sql string, id int64, why AuditInfo) error {
	if err := why.check(); err != nil {
		return err
	}
	done, err := d.change(ctx, sql, []int64{id}, why)
	if err != nil {
		return deliveryError(action, id, err)
	}
	if done == 0 {
		return d.whyNot(ctx, action, id)
	}
	return nil
}

// change runs an action on deliveries, and returns how many it has changed.
func (d *Deliveries) change(ctx context.Context, sql string, ids []int64, why AuditInfo) (done int, err error) {
	err = d.db.QueryRow(ctx, sql, ids, why.Operator, why.Reason).Scan(&done)
	return done, err
}

// whyNot says why an action was not possible.
func (d *Deliveries) whyNot(ctx context.Context, action string, id int64) error {
	row, err := d.get(ctx, id)
	if err != nil {
		return err
	}
	status := row.Status
	if row.Resolution != "" {
		status += " and " + row.Resolution
	}
	return fmt.Errorf("outbox: %s delivery %d: %w: it is %s", action, id, ErrStatus, status)
}

func (d *Deliveries) changeAll(ctx context.Context, action, sql string, filter DeliveryFilter, possible []string, cfg BulkConfig, why AuditInfo) (int, error) {
	picked, err := filter.rows()
	if err == nil && filter.Resolved {
		err = errors.New("what is resolved is changed one by one only")
	}
	if err != nil {
		return 0, fmt.Errorf("outbox: %s deliveries: %w", action, err)
	}
	picked.Statuses = onlyPossible(filter.Statuses, possible)
	return bulk{
		what: action + " deliveries",
		next: func(ctx context.Context, last int64, limit int) ([]int64, []string, error) {
			return d.rows.IDs(ctx, picked, last, limit)
		},
		change: func(ctx context.Context, ids []int64) (int, error) { return d.change(ctx, sql, ids, why) },
	}.run(ctx, cfg, why)
}
