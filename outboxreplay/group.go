package outboxreplay

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/handled"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
)

// A record for one group has the headers of a dead letter that was sent back. Clients that may write to the
// topic can set any headers. So every consumer looks for the dead letter that the headers name. It believes
// them only if that dead letter exists and the record is its copy. So a replay for one group begins with a
// dead letter, in a topic to which only consumers and operators may write. It hides no other record from a
// group, and other groups repeat nothing.

// Class is the class of the dead letters that [Run] writes for records to one group
// (outboxdlq.DeadLetter.Class). They have no value, and outboxdlq does not send them back.
const Class = deadletter.ClassReplay

const timestampForm = "2006-01-02T15:04:05.000Z07:00"

// deadLetterOf returns the dead letter that names the group of a record.
func deadLetterOf(r *kgo.Record, outboxID int64, group, reason string) *kgo.Record {
	now := time.Now().UTC().Format(timestampForm)
	return &kgo.Record{Topic: outbox.DeadLetterTopic(r.Topic), Key: r.Key, Headers: append(append([]kgo.RecordHeader{}, r.Headers...),
		header(outbox.DeadLetterOriginalTopic, r.Topic),
		header(outbox.DeadLetterOriginalPartition, strconv.Itoa(deadletter.NoPartition)),
		header(outbox.DeadLetterOriginalOffset, strconv.FormatInt(outboxID, 10)),
		header(outbox.DeadLetterOriginalTimestamp, now),
		header(outbox.DeadLetterGroup, group),
		header(outbox.DeadLetterError, short.Text("sent again for this group: "+reason, maxText)),
		header(outbox.DeadLetterClass, Class),
		header(outbox.DeadLetterAttempts, "0"),
		header(outbox.DeadLetterFailedAt, now),
		header(outbox.DeadLetterDigest, deadletter.Digest(r)),
		header(outbox.DeadLetterValueOmitted, strconv.Itoa(len(r.Value))))}
}

const maxText = 500

func header(name, value string) kgo.RecordHeader {
	return kgo.RecordHeader{Key: name, Value: []byte(value)}
}

// addressed returns a record with the headers that name its group. Kafka must have its dead letter already.
func addressed(r, dead *kgo.Record, outboxID int64, group string) *kgo.Record {
	own := *r
	own.Headers = append(append([]kgo.RecordHeader{}, r.Headers...),
		header(outbox.ReplayOf, deadletter.Origin(r.Topic, deadletter.NoPartition, outboxID)),
		header(outbox.ReplayFrom, deadletter.Origin(dead.Topic, dead.Partition, dead.Offset)),
		header(outbox.ReplayGroup, group))
	return &own
}

const sqlForgetHandled = `SELECT {schema}.outbox_forget_handled($1::text, $2::text[], $3::text[], $4::text[], $5::text[], $6::timestamptz, $7::text, $8::text)`

// startAgain sets before which time notes are removed. A time ahead of the clock of PostgreSQL would be later than the
// notes of what this run sends again.
func (r *run) startAgain(ctx context.Context) error {
	var now time.Time
	if err := pg.QueryRow(ctx, r.db, pg.SQLNow).Scan(&now); err != nil {
		return fmt.Errorf("read the clock of PostgreSQL: %w", err)
	}
	if r.cfg.AgainBefore.IsZero() {
		r.cfg.AgainBefore = now
	}
	if r.cfg.AgainBefore.After(now) {
		return fmt.Errorf("field AgainBefore is %v: by the clock of PostgreSQL that is in the future", r.cfg.AgainBefore)
	}
	r.report.AgainBefore = r.cfg.AgainBefore
	return nil
}

// forget removes the group's notes of the events of a chunk from event_handled.
func (r *run) forget(ctx context.Context, chunk []resend) error {
	var types, ids, sources, besides []string
	for i := range chunk {
		e := handled.Event(chunk[i].event.Type, chunk[i].event.Source, chunk[i].event.EventID)
		types, ids, sources = append(types, e.Type), append(ids, e.ID), append(sources, e.Source)
		besides = append(besides, e.Beside())
	}
	var forgotten int64
	err := pg.ExecRow(ctx, r.db, pg.InSchema(sqlForgetHandled, r.cfg.Schema), r.cfg.Group, types, ids, sources, besides,
		r.cfg.AgainBefore, r.cfg.Audit.Operator, fmt.Sprintf("%s (outbox ids %d to %d)", r.cfg.Audit.Reason, chunk[0].event.OutboxID, chunk[len(chunk)-1].event.OutboxID)).Scan(&forgotten)
	if err != nil {
		return fmt.Errorf("forget what group %s has handled: %w", r.cfg.Group, orNotMigrated(err))
	}
	r.report.Forgotten += forgotten
	return nil
}
