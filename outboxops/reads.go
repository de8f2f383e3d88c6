package outboxops

import (
	"context"
	"errors"
	"fmt"

	"github.com/outboxgo/outbox/internal/pg"
)

// AuditRead writes into outbox_audit that an operator reads the payload of a failure. Call it before
// [Failures.Get], and show nothing if it fails. Then the read is audited even if the process ends in
// between.
//
// It returns [ErrNotFound] if there is no such failure.
func (f *Failures) AuditRead(ctx context.Context, id FailureID, why AuditInfo) error {
	if err := errors.Join(why.check(), id.checkFor(actionRead)); err != nil {
		return err
	}
	done, err := f.change(ctx, f.db, actionRead, id.Kind, []int64{id.Number}, why)
	return notAudited(fmt.Sprintf("failure %v", id), done > 0, err)
}

const sqlReadOfRecorded = `SELECT {schema}.outbox_audit_read_recorded($1::bigint, $2::text, $3::text)`

// AuditReadRecorded is [Failures.AuditRead] for an event in outbox, which
// [Inspector.Event] reads. The entry has no relay, and a topic only if the event names one.
func (f *Failures) AuditReadRecorded(ctx context.Context, outboxID int64, why AuditInfo) error {
	if err := why.check(); err != nil {
		return err
	}
	var done bool
	err := pg.QueryRow(ctx, f.db, f.sqlReadOfRecorded, outboxID, why.Operator, why.Reason).Scan(&done)
	return notAudited(fmt.Sprintf("event %d", outboxID), done, err)
}

// notAudited says why it is not written down that something is read.
func notAudited(what string, done bool, err error) error {
	if err == nil && !done {
		err = ErrNotFound
	}
	if err != nil {
		return fmt.Errorf("outbox: audit that %s is read: %w", what, orNotMigrated(err))
	}
	return nil
}
