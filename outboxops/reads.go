package outboxops

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
)

const sqlAuditRead = `SELECT {schema}.outbox_audit_read($1, $2, $3)`

// AuditRead writes into outbox_audit that somebody reads the payload of a failure. Call it
// before [Failures.Get], and show nothing if it fails: what is read is known then, also if
// the process ends in between.
//
// It returns [ErrNotFound] if there is no such failure.
func (f *Failures) AuditRead(ctx context.Context, id FailureID, why AuditInfo) error {
	if err := errors.Join(why.check(), id.checkFor("read")); err != nil {
		return err
	}
	return auditRead(ctx, f.db, fmt.Sprintf("failure %v", id), f.sql.auditRead, id.Number, why)
}

const sqlAuditReadRecorded = `SELECT {schema}.outbox_audit_read_recorded($1, $2, $3)`

// AuditReadRecorded is [Failures.AuditRead] for an event in outbox, which
// [Inspector.Event] reads. The entry has no relay, and a topic only if the event names one.
func (f *Failures) AuditReadRecorded(ctx context.Context, outboxID int64, why AuditInfo) error {
	if err := why.check(); err != nil {
		return err
	}
	return auditRead(ctx, f.db, fmt.Sprintf("event %d", outboxID), f.sql.auditReadRecorded, outboxID, why)
}

func auditRead(ctx context.Context, db *pgxpool.Pool, what, sql string, id int64, why AuditInfo) error {
	var done bool
	err := db.QueryRow(ctx, sql, id, why.Operator, why.Reason).Scan(&done)
	if err == nil && !done {
		err = ErrNotFound
	}
	if err != nil {
		return fmt.Errorf("outbox: audit that %s is read: %w", what, orNotMigrated(err))
	}
	return nil
}
