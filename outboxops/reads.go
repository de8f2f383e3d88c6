package outboxops

import (
	"context"
	"errors"
	"fmt"
)

const sqlAuditRead = `
INSERT INTO {schema}.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id)
SELECT $1, 'read', $2, relay, parking_key, id, outbox_id, event_id FROM {schema}.outbox_failed WHERE id = $3`

// AuditRead writes into outbox_audit that somebody reads the payload of a failure. Call it
// before [Failures.Get], and show nothing if it fails: what is read is known then, also if
// the process ends in between.
//
// It returns [ErrNotFound] if there is no such failure.
func (f *Failures) AuditRead(ctx context.Context, id FailureID, why AuditInfo) error {
	if err := errors.Join(why.check(), id.checkFor("read")); err != nil {
		return err
	}
	return f.auditRead(ctx, fmt.Sprintf("failure %v", id), f.sql.auditRead, id.Number, why)
}

// sqlAuditReadRecorded has no relay: the event is of all of them.
const sqlAuditReadRecorded = `
INSERT INTO {schema}.outbox_audit (operator, action, reason, relay, parking_key, outbox_id, event_id)
SELECT $1, 'read', $2, '', coalesce(topic, '') || '/' || coalesce(partition_key, aggregate_id), id, event_id FROM {schema}.outbox WHERE id = $3`

// AuditReadRecorded is [Failures.AuditRead] for an event in outbox, which
// [Inspector.Event] reads. The entry has no relay, and a topic only if the event names one.
func (f *Failures) AuditReadRecorded(ctx context.Context, outboxID int64, why AuditInfo) error {
	if err := why.check(); err != nil {
		return err
	}
	return f.auditRead(ctx, fmt.Sprintf("event %d", outboxID), f.sql.auditReadRecorded, outboxID, why)
}

func (f *Failures) auditRead(ctx context.Context, what, sql string, id int64, why AuditInfo) error {
	tag, err := f.db.Exec(ctx, sql, why.Operator, why.Reason, id)
	if err == nil && tag.RowsAffected() == 0 {
		err = ErrNotFound
	}
	if err != nil {
		return fmt.Errorf("outbox: audit that %s is read: %w", what, orNotMigrated(err))
	}
	return nil
}
