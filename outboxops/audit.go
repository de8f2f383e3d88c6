package outboxops

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
)

// AuditInfo is the operator and the reason of an action. It goes into outbox_audit.
type AuditInfo struct {
	// Operator names the user who acts, in at most 100 characters that can be printed, with a letter or a
	// digit. The application chooses the name, and a user who may act can write any name. AuditEntry.Login is
	// the name that PostgreSQL knows. Required.
	Operator string
	// Reason is why, with a letter or a digit. Required.
	Reason string
}

func (a AuditInfo) check() error {
	if err := check.Audit("", a.Operator, a.Reason, check.MaxReason); err != nil {
		return fmt.Errorf("outbox: audit info: %w", err)
	}
	return nil
}

// AuditEntry is a row of outbox_audit: an action on a failure, a key, a delivery or a consumer
// group.
type AuditEntry struct {
	// ID orders the entries.
	ID int64
	// At is the time of the action.
	At time.Time
	// Operator and Reason are the fields of [AuditInfo]. For retries by RetryDeadAfter, Operator is "relay"
	// and the relay's name.
	Operator, Reason string
	// Login is the role that was logged in. PostgreSQL itself writes it.
	Login string
	// Action is one of these:
	//
	//   - on failures: retry, resolve, edit, hold or release, and read for a payload that was shown
	//   - on a consumer group: pause, resume or rewind
	//   - on groups that move: to-kafka, to-postgres, finish-cut or cancel-cut
	//   - start-group for a new group that began with an archive
	//   - on a relay: from-debezium, begin-relay or to-debezium
	//   - replay for events that were sent to Kafka again, forget for removed notes of a group, and forget-action
	//     for an action that a group no longer has
	//   - cancel for a delayed event that was deleted before it was due
	//   - expire for a dropped partition of an archive, and stop-archive for a relay or a group that archived
	Action string
	// Relay, Topic and Key are where the event belongs; of a delivery without Relay. Of a
	// consumer group there is only Topic, empty for all of them. Of a dropped partition, Key is its schema
	// and name.
	Relay, Topic, Key string
	// Group is the consumer group of the delivery. It is also a group that was paused, resumed, rewound or
	// moved, or the only group for which events were sent again. Otherwise it is empty. Handler is
	// Failure.Action of the delivery.
	Group, Handler string
	// Failure names the failure. OutboxID and EventID are the ids of its event. They are zero for an action
	// on the key of an event or on a group.
	Failure FailureID
	// OutboxID is outbox.id.
	OutboxID int64
	// EventID is the CloudEvents id.
	EventID string
	// Payload is that from before an edit, nil for all else, and in the audit of all
	// failures. The payload of a cancelled event is in outbox_audit alone.
	Payload []byte
	// PayloadErr says why Payload could not be read; nil if it could. It is
	// [ErrUnreadable].
	PayloadErr error

	edited bool // it has a payload
}

// AuditPage chooses a part of the audit. The zero value is the newest part.
type AuditPage struct {
	// Before is the ID of the last entry that is known. Zero means from the newest on.
	Before int64
	// Limit is the largest number of entries to return, up to 1,000. Zero means 100.
	Limit int
	// WithoutReads leaves out reads of payloads, see [Failures.AuditRead].
	WithoutReads bool
	// Operator, Action and Group leave out entries with other values. Since leaves out entries before that
	// time, and Until entries at or after it. Empty fields leave out nothing.
	Operator, Action, Group string
	// Since is described at Operator.
	Since, Until time.Time
}

// sqlAuditColumns begins a statement whose rows scanAudit reads.
const sqlAuditColumns = `
SELECT id, created_at, operator, login, reason, action, relay, pg_catalog.split_part(parking_key, '/', 1), substr(parking_key, strpos(parking_key, '/') + 1),
       coalesce(failed_id, 0), coalesce(outbox_id, 0), coalesce(event_id::text, ''),
       coalesce(consumer_group, ''), coalesce(delivery_id, 0), coalesce(handler, ''), pg_catalog.num_nonnulls(payload, payload_bytes) > 0
  FROM {schema}.outbox_audit`

const sqlAudit = sqlAuditColumns + `
 WHERE ($1::bigint = 0 OR failed_id = $1) AND ($2::bigint = 0 OR delivery_id = $2) AND ($3::bigint = 0 OR id < $3)
   AND ($5::bool OR action <> 'read')
   AND ($6::text = '' OR operator = $6) AND ($7::text = '' OR action = $7) AND ($8::text = '' OR consumer_group = $8)
   AND created_at >= coalesce($9::timestamptz, '-infinity') AND created_at < coalesce($10::timestamptz, 'infinity')
 ORDER BY id DESC LIMIT $4`

// Audit returns the actions on a failure, or for the zero FailureID all actions, also those
// on consumer groups, the last first.
func (f *Failures) Audit(ctx context.Context, id FailureID, page AuditPage) ([]AuditEntry, error) {
	if id != (FailureID{}) {
		if err := id.check(); err != nil {
			return nil, fmt.Errorf("outbox: read audit: %w", err)
		}
	}
	return f.audits.list(ctx, id, page)
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

// list returns the entries of a failure, or all for the zero id.
func (a auditReader) list(ctx context.Context, id FailureID, page AuditPage) ([]AuditEntry, error) {
	limit, err := limitOf(page.Limit)
	if err != nil {
		return nil, fmt.Errorf("outbox: read audit: %w", err)
	}
	rows, err := a.db.Query(ctx, a.sql, pg.PlanEachTime, id.numberOf(KindEvent), id.numberOf(KindDelivery), page.Before, limit, !page.WithoutReads,
		page.Operator, page.Action, page.Group, pg.OrNull(page.Since), pg.OrNull(page.Until))
	if err == nil {
		var entries []AuditEntry
		if entries, err = pgx.CollectRows(rows, scanAudit); err == nil && id != (FailureID{}) {
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
	var event, delivery int64
	err = row.Scan(&e.ID, &e.At, &e.Operator, &e.Login, &e.Reason, &e.Action, &e.Relay, &e.Topic, &e.Key, &event, &e.OutboxID, &e.EventID,
		&e.Group, &delivery, &e.Handler, &e.edited)
	switch {
	case event != 0:
		e.Failure = FailureID{KindEvent, event}
	case delivery != 0:
		e.Failure = FailureID{KindDelivery, delivery}
	}
	return e, err
}
