package outbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/jsonb"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// Decision says who decides about failed events, and why. It goes into
// outbox_audit.
type Decision struct {
	// Operator is who decides, at most 100 characters. Required.
	Operator string
	// Reason is why. Required.
	Reason string
}

const (
	maxOperator = 100
	maxReason   = 10_000
)

func (d Decision) check() error {
	var errs []error
	for _, field := range []struct {
		name, text string
		limit      int
	}{{"Operator", d.Operator, maxOperator}, {"Reason", d.Reason, maxReason}} {
		err := check.Text(field.text, field.limit)
		if err == nil && strings.TrimSpace(field.text) == "" {
			err = ErrEmpty
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("field %s %w", field.name, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("outbox: decision: %w", err)
	}
	return nil
}

// Every action writes its audit rows in the statement that changes the events.
// Rows are locked in the order of their ids, as the relay locks them.

// sqlFailedRetry makes heads due, and parks what is dead: where it belongs among
// the events of its key is the relay's to say, which may have one of them in its
// hands.
const sqlFailedRetry = `
WITH chosen AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_failed
     WHERE id = ANY ($3::bigint[]) AND (status IN ('waiting', 'failed') AND NOT held OR status = 'dead')
     ORDER BY id FOR UPDATE
), changed AS (
    UPDATE {schema}.outbox_failed AS f
       SET status = CASE status WHEN 'dead' THEN 'parked' ELSE status END,
           retry_count = CASE status WHEN 'dead' THEN 0 ELSE retry_count END, held = false, next_retry_at = now()
     WHERE id = ANY (ARRAY(SELECT id FROM chosen))
 RETURNING f.*
)
INSERT INTO {schema}.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id)
SELECT $1, 'retry', $2, relay, parking_key, id, outbox_id, event_id FROM changed`

// Retry has the relay send an event at its next look, whatever its time. One that
// is dead has all its tries again, and goes before the later events of its key that
// wait with it; what was sent since it died, it cannot overtake any more.
//
// It returns [ErrNotFound], or [ErrStatus] for an event that is parked (retry the
// one in front of it), resolved, or held (release the key).
func (f *FailedEvents) Retry(ctx context.Context, id int64, why Decision) error {
	return f.settleOne(ctx, "retry", f.sql.retry, id, why)
}

const sqlFailedResolve = `
WITH chosen AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_failed WHERE id = ANY ($3::bigint[]) AND status <> 'resolved' ORDER BY id FOR UPDATE
), changed AS (
    UPDATE {schema}.outbox_failed AS f
       SET status = 'resolved', held = false, resolved_at = now(), resolved_by = $1, resolution = $2
     WHERE id = ANY (ARRAY(SELECT id FROM chosen))
 RETURNING f.*
)
INSERT INTO {schema}.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id)
SELECT $1, 'resolve', $2, relay, parking_key, id, outbox_id, event_id FROM changed`

// Resolve settles an event without sending it: consumers will never see it, unless
// it is on its way at this moment. What waits behind it goes on. The row stays,
// with the operator and the reason.
//
// It returns [ErrNotFound], or [ErrStatus] for an event that is resolved.
func (f *FailedEvents) Resolve(ctx context.Context, id int64, why Decision) error {
	return f.settleOne(ctx, "resolve", f.sql.resolve, id, why)
}

// settleOne does something about a single event, or says why it cannot be done.
func (f *FailedEvents) settleOne(ctx context.Context, act, sql string, id int64, why Decision, more ...any) error {
	if err := why.check(); err != nil {
		return err
	}
	tag, err := f.db.Exec(ctx, sql, append([]any{why.Operator, why.Reason, []int64{id}}, more...)...)
	if err != nil {
		return fmt.Errorf("outbox: %s failed event %d: %w", act, id, err)
	}
	if tag.RowsAffected() > 0 {
		return nil
	}
	row, err := f.Get(ctx, id)
	if err != nil {
		return err
	}
	status := row.Status
	if row.Held {
		status += " and held"
	}
	return fmt.Errorf("outbox: %s failed event %d: %w: it is %s", act, id, ErrStatus, status)
}

const sqlFailedEdit = `
WITH chosen AS MATERIALIZED (
    SELECT * FROM {schema}.outbox_failed WHERE id = ANY ($3::bigint[]) AND status = 'dead' ORDER BY id FOR UPDATE
), changed AS (
    UPDATE {schema}.outbox_failed
       SET payload = $4::text::jsonb, payload_bytes = $5, status = 'parked', retry_count = 0, held = false, next_retry_at = now()
     WHERE id = ANY (ARRAY(SELECT id FROM chosen))
 RETURNING id
)
INSERT INTO {schema}.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id, payload, payload_bytes)
SELECT $1, 'edit', $2, relay, parking_key, id, outbox_id, event_id, payload, payload_bytes FROM chosen`

// Edit gives a dead event another payload, of the same content type, and retries
// it. Its id stays, and so do all its other attributes. The payload from before
// stays in outbox_audit, and in outbox until retention removes it.
//
// It returns [ErrNotFound], [ErrStatus] for an event that is not dead, and a
// [*FieldError] for JSON that PostgreSQL does not take.
func (f *FailedEvents) Edit(ctx context.Context, id int64, payload []byte, why Decision) error {
	if err := why.check(); err != nil {
		return err
	}
	row, err := f.Get(ctx, id)
	if err != nil {
		return err
	}
	var text pgtype.Text
	if row.ContentType == jsonType {
		if err := checkPayload(payload); err != nil {
			return &FieldError{EventType: row.Type, Index: -1, Field: "payload", Err: err}
		}
		text, payload = pgtype.Text{String: string(payload), Valid: true}, nil
	} else if payload == nil {
		payload = []byte{} // empty is not NULL
	}
	return f.settleOne(ctx, "edit", f.sql.edit, id, why, text, payload)
}

// checkPayload holds what an operator wrote against what jsonb takes.
func checkPayload(payload []byte) error {
	if !json.Valid(payload) {
		return fmt.Errorf("%w: it is no JSON", ErrJSON)
	}
	_, err := jsonb.Check(payload)
	return err
}

const sqlFailedHold = `
WITH chosen AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_failed
     WHERE relay = $3 AND parking_key = $4 AND status IN ('waiting', 'failed', 'parked', 'dead')
     ORDER BY id FOR UPDATE
), changed AS (
    UPDATE {schema}.outbox_failed SET held = true WHERE id = ANY (ARRAY(SELECT id FROM chosen)) RETURNING id
)
INSERT INTO {schema}.outbox_audit (operator, action, reason, relay, parking_key)
SELECT $1, 'hold', $2, $3, $4 WHERE EXISTS (SELECT FROM changed)`

// Hold keeps a relay from sending anything more of a key, until it is released or
// every event that waits now is settled. Later events of the key wait behind them.
// A dead event of the key, which it had passed, holds it too.
//
// It returns [ErrNotFound] if nothing of the key has failed.
func (f *FailedEvents) Hold(ctx context.Context, relay, topic, key string, why Decision) error {
	return f.settleKey(ctx, "hold", f.sql.hold, relay, topic, key, why)
}

const sqlFailedRelease = `
WITH chosen AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_failed
     WHERE relay = $3 AND parking_key = $4 AND status IN ('waiting', 'failed', 'parked', 'dead') AND held
     ORDER BY id FOR UPDATE
), changed AS (
    UPDATE {schema}.outbox_failed SET held = false WHERE id = ANY (ARRAY(SELECT id FROM chosen)) RETURNING id
)
INSERT INTO {schema}.outbox_audit (operator, action, reason, relay, parking_key)
SELECT $1, 'release', $2, $3, $4 WHERE EXISTS (SELECT FROM changed)`

// Release lets a key go on that an operator held, or a dead event under HoldDead.
// The dead event stays dead.
//
// It returns [ErrNotFound] if the key is not held.
func (f *FailedEvents) Release(ctx context.Context, relay, topic, key string, why Decision) error {
	return f.settleKey(ctx, "release", f.sql.release, relay, topic, key, why)
}

func (f *FailedEvents) settleKey(ctx context.Context, act, sql, relay, topic, key string, why Decision) error {
	if err := why.check(); err != nil {
		return err
	}
	tag, err := f.db.Exec(ctx, sql, why.Operator, why.Reason, relay, parkingKey(topic, []byte(key)))
	if err == nil && tag.RowsAffected() == 0 {
		err = ErrNotFound
	}
	if err != nil {
		return fmt.Errorf("outbox: %s key %q of topic %s, relay %s: %w", act, key, topic, relay, err)
	}
	return nil
}

// BulkConfig tunes [FailedEvents.RetryAll] and [FailedEvents.ResolveAll]. It may be
// zero.
type BulkConfig struct {
	// DryRun counts and changes nothing.
	DryRun bool
	// Rate is how many events are changed in a second at most. Zero means 1,000.
	Rate int
	// Progress is told how many are done, after each part. Nil is not called.
	Progress func(done int)
}

const (
	defaultBulkRate = 1000
	bulkPart        = 100    // events in a statement
	dryRunPart      = 10_000 // the same, where they are only counted
)

const sqlFailedIDs = `
SELECT id FROM {schema}.outbox_failed` + failedWhere + `
   AND id > $13 AND ($14::bool OR NOT held OR status = 'dead')
 ORDER BY id LIMIT $15`

// RetryAll is [FailedEvents.Retry] for all events that a filter picks and that can
// be retried: waiting, failed or dead. It returns how many that were, also beside an
// error. They are changed in parts, each in a transaction of its own; what fails
// again meanwhile is not picked twice.
func (f *FailedEvents) RetryAll(ctx context.Context, filter FailedFilter, cfg BulkConfig, why Decision) (int, error) {
	return f.settleAll(ctx, "retry", f.sql.retry, filter.only(StatusWaiting, StatusFailed, StatusDead), false, cfg, why)
}

// ResolveAll is [FailedEvents.Resolve] for all events that a filter picks.
func (f *FailedEvents) ResolveAll(ctx context.Context, filter FailedFilter, cfg BulkConfig, why Decision) (int, error) {
	return f.settleAll(ctx, "resolve", f.sql.resolve, filter.only(unresolved...), true, cfg, why)
}

// only leaves those of the filter's statuses that are possible.
func (f FailedFilter) only(possible ...string) FailedFilter {
	if len(f.Statuses) == 0 {
		f.Statuses = possible
		return f
	}
	statuses := []string{""} // matches nothing, where an empty list matches all
	for _, s := range possible {
		for _, wanted := range f.Statuses {
			if s == wanted {
				statuses = append(statuses, s)
			}
		}
	}
	f.Statuses = statuses
	return f
}

func (f *FailedEvents) settleAll(ctx context.Context, act, sql string, filter FailedFilter, heldToo bool, cfg BulkConfig, why Decision) (done int, err error) {
	if cfg.Rate == 0 {
		cfg.Rate = defaultBulkRate
	}
	if err := errors.Join(check.NotNegative("Rate", cfg.Rate), why.check()); err != nil {
		return 0, fmt.Errorf("outbox: %s failed events: %w", act, err)
	}
	part := min(cfg.Rate, bulkPart)
	pause := time.Duration(part) * time.Second / time.Duration(cfg.Rate)
	if cfg.DryRun {
		part = dryRunPart
	}
	for last := int64(0); ; {
		ids, err := f.ids(ctx, filter, last, heldToo, part)
		if err != nil || len(ids) == 0 {
			return done, err
		}
		n := len(ids)
		if !cfg.DryRun {
			tag, err := f.db.Exec(ctx, sql, why.Operator, why.Reason, ids)
			if err != nil {
				return done, fmt.Errorf("outbox: %s failed events: %w", act, err)
			}
			n = int(tag.RowsAffected())
		}
		last, done = ids[len(ids)-1], done+n
		if cfg.Progress != nil {
			cfg.Progress(done)
		}
		if len(ids) < part {
			return done, nil
		}
		if !cfg.DryRun {
			wait.Sleep(ctx, pause)
		}
		if err := ctx.Err(); err != nil {
			return done, fmt.Errorf("outbox: %s failed events: %w", act, err)
		}
	}
}

// ids returns the next events that a filter picks.
func (f *FailedEvents) ids(ctx context.Context, filter FailedFilter, last int64, heldToo bool, limit int) ([]int64, error) {
	rows, err := f.db.Query(ctx, f.sql.ids, append([]any{pg.PlanEachTime}, append(filter.args(), last, heldToo, limit)...)...)
	if err == nil {
		var ids []int64
		if ids, err = pgx.CollectRows(rows, pgx.RowTo[int64]); err == nil {
			return ids, nil
		}
	}
	return nil, fmt.Errorf("outbox: find failed events: %w", err)
}

// AuditEntry is a row of outbox_audit: something that was done about a failed event
// or a key.
type AuditEntry struct {
	// ID orders the entries.
	ID int64
	// At is when it was done.
	At time.Time
	// Operator is who did it, and Reason why. What a relay revives, it does as
	// "relay" and its name.
	Operator, Reason string
	// Action is retry, resolve, edit, hold or release.
	Action string
	// Relay, Topic and Key are where the event belongs.
	Relay, Topic, Key string
	// FailedID, OutboxID and EventID are the event's. They are zero for what was done
	// to a key.
	FailedID, OutboxID int64
	// EventID is the CloudEvents id.
	EventID string
	// Payload is that from before an edit, nil for all else.
	Payload []byte
}

const sqlFailedAudit = `
SELECT id, created_at, operator, reason, action, relay, split_part(parking_key, '/', 1), substr(parking_key, strpos(parking_key, '/') + 1),
       coalesce(failed_id, 0), coalesce(outbox_id, 0), coalesce(event_id::text, ''),
       coalesce(payload_bytes, convert_to(payload::text, 'UTF8'))
  FROM {schema}.outbox_audit
 WHERE ($1::bigint = 0 OR failed_id = $1) AND ($2::bigint = 0 OR id < $2)
 ORDER BY id DESC LIMIT $3`

// Audit returns what was done, the last first: about the failed event with an ID, or
// about all for 0.
func (f *FailedEvents) Audit(ctx context.Context, id int64, page FailedPage) ([]AuditEntry, error) {
	limit, err := page.limit()
	if err != nil {
		return nil, fmt.Errorf("outbox: read audit: %w", err)
	}
	rows, err := f.db.Query(ctx, f.sql.audit, pg.PlanEachTime, id, page.After, limit)
	if err == nil {
		var entries []AuditEntry
		if entries, err = pgx.CollectRows(rows, pgx.RowToStructByPos[AuditEntry]); err == nil {
			return entries, nil
		}
	}
	return nil, fmt.Errorf("outbox: read audit: %w", err)
}
