package outboxdlq

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/outboxops"
)

// Edit sends a dead letter back with another value. It first writes a copy of the dead letter with that value to the
// dead-letter topic, which says in [outbox.DeadLetterEditedFrom] where it comes from, because consumers handle only
// what is there. The dead letter itself stays. Then it sends the copy back as [Replay] does, for the group and the
// action that failed. So clients that may write to the topic, but not to its dead-letter topic, cannot edit events.
//
// Edit returns both dead letters, before with the value that it had, also if only the original record has that. A
// dry run makes all checks and sends nothing. Of cfg, From, Choose and Progress are ignored. With DB, outbox_audit
// gets the edit, with the value from before, and the replay.
//
// A group with a database has a row of event_delivery for the event, and outboxops.Failures.Edit edits that. If DB
// has such a row with a value, the error is [outboxops.ErrStatus]. Use Edit for a group without a database, and for
// a large value that only the dead letter has. If the tables of the group are elsewhere, its row is requeued with
// the new value. Members of a release without Edit would requeue it with the old one.
//
// The error is [outboxops.ErrNotFound] if there is no record at this offset, and a [*outbox.FieldError] if it is no
// dead letter, or if the value is not JSON but should be, or is that of another event. Others are those of Replay.
// If the copy was written and not sent back, a Replay of it does that.
func Edit(ctx context.Context, opts []kgo.Opt, cfg ReplayConfig, partition int32, offset int64, value []byte) (before, after DeadLetter, err error) {
	r, err := newRun(opts, cfg)
	if err != nil {
		return before, after, fmt.Errorf("outbox: edit config: %w", err)
	}
	defer r.client.Close()
	defer r.single.Close()
	if before, err = r.find(ctx, partition, offset); err == nil {
		after, err = r.edit(ctx, &before, value)
	}
	if err != nil {
		err = fmt.Errorf("outbox: edit of %s: %w", deadletter.Origin(cfg.Topic, partition, offset), err)
	}
	return before, after, err
}

// find returns a dead letter.
func (r *run) find(ctx context.Context, partition int32, offset int64) (DeadLetter, error) {
	span, err := r.reader.Span(ctx, kafka.Partition{Topic: r.cfg.Topic, Number: partition}, offset)
	if err != nil {
		return DeadLetter{}, err
	}
	if span.Next == offset && span.Next < span.End {
		records, err := r.reader.Read(ctx, &span)
		if err != nil {
			return DeadLetter{}, err
		}
		if len(records) > 0 && records[0].Offset == offset {
			return Decode(records[0])
		}
	}
	return DeadLetter{}, outboxops.ErrNotFound
}

// edit writes the copy of a dead letter with another value, and sends it back. It completes the value of the dead
// letter.
func (r *run) edit(ctx context.Context, d *DeadLetter, value []byte) (after DeadLetter, err error) {
	complete, err := r.recordOf(ctx, *d)
	if err != nil {
		return after, err
	}
	d.Record.Value = complete.Value
	if err := checkValue(complete, value); err != nil {
		return after, err
	}
	if err := r.checkRow(ctx, *d); err != nil {
		return after, err
	}
	if after, err = Decode(editedOf(*d, complete, value)); err != nil || r.cfg.DryRun {
		return after, err
	}
	if err := r.auditEdit(ctx, *d); err != nil {
		return after, err
	}
	written := []resend{{record: after.Record}}
	if r.send(ctx, written); written[0].err != nil {
		return after, written[0].err
	}
	back := []resend{{DeadLetter: after}}
	if back[0].record, err = r.recordOf(ctx, after); err != nil {
		return after, err
	}
	if err := r.audit(ctx, back); err != nil {
		return after, err
	}
	r.send(ctx, back)
	return after, back[0].err
}

// editedOf returns the copy of a dead letter with another value, and with all parts of the original.
func editedOf(d DeadLetter, complete *kgo.Record, value []byte) *kgo.Record {
	copied := &kgo.Record{Topic: d.Record.Topic, Key: complete.Key, Value: value}
	for _, h := range complete.Headers {
		if !deadletter.IsOwn(h.Key) {
			copied.Headers = append(copied.Headers, h)
		}
	}
	replaced := []string{deadletter.ValueOmitted, deadletter.KeyOmitted, deadletter.HeadersOmitted, deadletter.OriginalDigest, deadletter.EditedFrom}
	for _, h := range d.Record.Headers {
		if deadletter.IsOwn(h.Key) && !slices.Contains(replaced, h.Key) {
			copied.Headers = append(copied.Headers, h)
		}
	}
	copied.Headers = append(copied.Headers, header(deadletter.EditedFrom, deadletter.Origin(d.Record.Topic, d.Record.Partition, d.Record.Offset)))
	return copied
}

// checkValue checks the value that an operator wrote for a record.
func checkValue(r *kgo.Record, value []byte) error {
	contentType := ""
	for name, text := range kafka.Headers(r) {
		if strings.EqualFold(name, "content-type") {
			contentType = string(text)
		}
	}
	err := envelope.SameEvent(r.Value, value, kafka.Headers(r))
	if envelope.IsJSONType(contentType) && !json.Valid(value) {
		err = fmt.Errorf("%w: it is no JSON", outbox.ErrJSON)
	}
	if err != nil {
		return &outbox.FieldError{Index: -1, Field: "value", Err: err}
	}
	return nil
}

// sqlRowOf finds the row of a group and an action for the record at one of the places $4 that has its value. A row
// without an action is for all of them.
const sqlRowOf = `
SELECT id FROM {schema}.event_delivery
 WHERE consumer_group = $1 AND action IN ($2, '') AND stream = $3 AND status IN ('PENDING', 'PARKED', 'DEAD') AND resolved_at IS NULL
   AND dead_letter IS NULL AND pg_catalog.concat_ws('-', stream, record_partition, position) = ANY ($4::text[])
 UNION ALL
SELECT id FROM {schema}.event_delivery
 WHERE consumer_group = $1 AND action IN ($2, '') AND stream = $3 AND status = 'PROCESSING'
   AND pg_catalog.concat_ws('-', stream, record_partition, position) = ANY ($4)
 LIMIT 1`

// checkRow refuses a dead letter whose group has a row with the value, because the group would take that.
func (r *run) checkRow(ctx context.Context, d DeadLetter) error {
	if r.cfg.DB == nil {
		return nil
	}
	origin := deadletter.Origin(d.OriginalTopic, d.OriginalPartition, d.OriginalOffset)
	id := outboxops.FailureID{Kind: outboxops.KindDelivery}
	err := pg.QueryRow(ctx, r.cfg.DB, pg.InSchema(sqlRowOf, r.cfg.Schema), d.Group, d.Action, d.OriginalTopic, []string{origin, cmp.Or(d.ReplayOf, origin)}).Scan(&id.Number)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil
	case err != nil:
		return fmt.Errorf("look for the delivery: %w", notMigrated(err))
	}
	return fmt.Errorf("%w: the group has %v with the value, so edit that", outboxops.ErrStatus, id)
}

const sqlAuditEdit = `SELECT {schema}.outbox_audit_edit($1::text, $2::text, $3::text, $4::text, $5::bytea, $6::text, $7::text)`

// auditEdit writes who edits a dead letter, and why, with the value from before.
func (r *run) auditEdit(ctx context.Context, d DeadLetter) error {
	if r.cfg.DB == nil {
		return nil
	}
	a := r.cfg.Audit
	reason := a.Reason + " (dead letter " + deadletter.Origin(d.Record.Topic, d.Record.Partition, d.Record.Offset) + ")"
	_, err := pg.Exec(ctx, r.cfg.DB, pg.InSchema(sqlAuditEdit, r.cfg.Schema), d.OriginalTopic, short.Storable(string(d.Record.Key), maxGroup),
		short.Storable(d.Group, maxGroup), short.Storable(d.Action, 100), append([]byte{}, d.Record.Value...), a.Operator, reason)
	if err != nil {
		return fmt.Errorf("add row to outbox_audit: %w", notMigrated(err))
	}
	return nil
}
