package outboxops

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
)

// AuditInfo says who acts, and why. It goes into outbox_audit.
type AuditInfo struct {
	// Operator is who acts, at most 100 characters, in the words of the application: whoever
	// may act can write any name. AuditEntry.Login is what PostgreSQL knows. Required.
	Operator string
	// Reason is why. Required.
	Reason string
}

const (
	maxOperator = 100
	maxReason   = 10_000
)

func (a AuditInfo) check() error {
	var errs []error
	for _, field := range []struct {
		name, text string
		limit      int
	}{{"Operator", a.Operator, maxOperator}, {"Reason", a.Reason, maxReason}} {
		err := check.Text(field.text, field.limit)
		if err == nil && strings.TrimSpace(field.text) == "" {
			err = outbox.ErrEmpty
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("field %s %w", field.name, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("outbox: audit info: %w", err)
	}
	return nil
}

// AuditEntry is a row of outbox_audit: an action on a failure, a key, a delivery or a consumer
// group.
type AuditEntry struct {
	// ID orders the entries.
	ID int64
	// At is when it was done.
	At time.Time
	// Operator is who did it, as [AuditInfo] said, and Reason why. What a relay retries by
	// RetryDeadAfter, it retries as "relay" and its name.
	Operator, Reason string
	// Login is the role that was logged in to PostgreSQL, which writes it down itself; empty
	// in entries of before.
	Login string
	// Action is retry, resolve, edit, hold or release, or read for a payload that was shown; of
	// a delivery requeue, resolve or read; of a consumer group pause, resume or rewind.
	Action string
	// Relay, Topic and Key are where the event belongs; of a delivery without Relay. Of a
	// consumer group there is only Topic, empty for all of them.
	Relay, Topic, Key string
	// Group is the consumer group of the delivery, or that was paused, resumed or rewound;
	// empty for all else.
	Group string
	// Delivery is the ID of the delivery, and Handler its Action; zero for all else.
	Delivery int64
	// Handler is described at Delivery.
	Handler string
	// Failure names what failed at a relay, OutboxID and EventID are the event's. They are zero
	// for an action on a key or a group.
	Failure FailureID
	// OutboxID is outbox.id.
	OutboxID int64
	// EventID is the CloudEvents id.
	EventID string
	// Payload is that from before an edit, nil for all else, and in the audit of all
	// failures.
	Payload []byte
	// PayloadErr says why Payload could not be read; nil if it could. It is
	// [ErrUnreadable].
	PayloadErr error

	edited bool // it has a payload
}

// AuditPage says which part of the audit is wanted. The zero value is the newest part.
type AuditPage struct {
	// Before is the ID of the last entry that is known. Zero means from the newest on.
	Before int64
	// Limit is how many entries are returned at most, up to 1,000. Zero means 100.
	Limit int
	// WithoutReads leaves out that payloads were read, see [Failures.AuditRead].
	WithoutReads bool
}

const sqlAudit = `
SELECT id, created_at, operator, coalesce(login, ''), reason, action, relay, split_part(parking_key, '/', 1), substr(parking_key, strpos(parking_key, '/') + 1),
       coalesce(failed_id, 0), coalesce(outbox_id, 0), coalesce(event_id::text, ''),
       coalesce(consumer_group, ''), coalesce(delivery_id, 0), coalesce(handler, ''), num_nonnulls(payload, payload_bytes) > 0
  FROM {schema}.outbox_audit
 WHERE ($1::bigint = 0 OR failed_id = $1) AND ($2::bigint = 0 OR delivery_id = $2) AND ($3::bigint = 0 OR id < $3)
   AND ($5::bool OR action <> 'read')
 ORDER BY id DESC LIMIT $4`

// Audit returns the actions on a failure, or for the zero FailureID all actions, also those
// on deliveries and consumer groups, the last first.
func (f *Failures) Audit(ctx context.Context, id FailureID, page AuditPage) ([]AuditEntry, error) {
	if id != (FailureID{}) {
		if err := id.check(); err != nil {
			return nil, fmt.Errorf("outbox: read audit: %w", err)
		}
	}
	return f.audits.list(ctx, id.Number, 0, page)
}

// auditReader reads outbox_audit.
type auditReader struct {
	db   *pgxpool.Pool
	sql  string
	rows reader
}

func newAuditReader(db *pgxpool.Pool, schema string, most int) auditReader {
	return auditReader{db, pg.InSchema(sqlAudit, schema), newReader(db, schema, "outbox_audit", most)}
}

// list returns the entries of a failure or a delivery, or all if both are 0.
func (a auditReader) list(ctx context.Context, failure, delivery int64, page AuditPage) ([]AuditEntry, error) {
	limit, err := limitOf(page.Limit)
	if err != nil {
		return nil, fmt.Errorf("outbox: read audit: %w", err)
	}
	rows, err := a.db.Query(ctx, a.sql, pg.PlanEachTime, failure, delivery, page.Before, limit, !page.WithoutReads)
	if err == nil {
		var entries []AuditEntry
		if entries, err = pgx.CollectRows(rows, scanAudit); err == nil && failure != 0 {
			err = a.readEdited(ctx, entries)
		}
		if err == nil {
			return entries, nil
		}
	}
	return nil, fmt.Errorf("outbox: read audit: %w", orNotMigrated(err))
}

// readEdited reads the payloads from before edits, the newest first, up to MaxRead bytes.
func (a auditReader) readEdited(ctx context.Context, entries []AuditEntry) (err error) {
	left := a.rows.most
	for i := range entries {
		e := &entries[i]
		switch {
		case !e.edited:
		case left <= 0:
			e.PayloadErr = fmt.Errorf("%w: the newer ones have more than %d bytes", ErrUnreadable, a.rows.most)
		default:
			if e.Payload, e.PayloadErr, err = a.rows.readPayload(ctx, e.ID); err != nil {
				return err
			}
			left -= len(e.Payload)
		}
	}
	return nil
}

func scanAudit(row pgx.CollectableRow) (e AuditEntry, err error) {
	var failure int64
	err = row.Scan(&e.ID, &e.At, &e.Operator, &e.Login, &e.Reason, &e.Action, &e.Relay, &e.Topic, &e.Key, &failure, &e.OutboxID, &e.EventID,
		&e.Group, &e.Delivery, &e.Handler, &e.edited)
	e.Failure = relayID(failure)
	return e, err
}
