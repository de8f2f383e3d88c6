package outboxops

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// EventSent is one record of an event that a relay has sent, or says that the event had expired.
type EventSent struct {
	// Relay is the relay that has sent it.
	Relay string
	// Topic and Partition are where its record is.
	Topic string
	// Partition is described at Topic.
	Partition int32
	// Offset is its offset there, or -1 if Kafka has not told it.
	Offset int64
	// At is when it was sent: the timestamp of its record, or of the first record of its batch.
	At time.Time
	// Retried is set if the relay had failed to send it before, Repeat if the relay had sent it before.
	Retried, Repeat bool
	// Expired is set if the relay has not sent it, because it had expired. At is when; there is no record.
	Expired bool
}

// EventFailure is the failure of a recorded event: the part of a [Failure] that [RecordedEvent] shows.
type EventFailure struct {
	// ID names the failure.
	ID FailureID
	// Relay is the relay that could not send the event.
	Relay string
	// Status is one of the constants, [outbox.StatusDead] for example.
	Status string
	// ResolvedAt, ResolvedBy and Resolution are as in [Failure].
	ResolvedAt time.Time
	// ResolvedBy is described at ResolvedAt.
	ResolvedBy string
	// Resolution is described at ResolvedAt.
	Resolution string
}

// sqlEventAudit reads what operators did to the failures $1 of an event, and replays of its topic $2 since $3.
const sqlEventAudit = sqlAuditColumns + `
 WHERE failed_id = ANY ($1::bigint[])
    OR action = 'replay' AND created_at >= $3::timestamptz AND pg_catalog.split_part(parking_key, '/', 1) IN ('', $2::text)
 ORDER BY id DESC LIMIT 1000`

// withHistory adds where an event was sent, and what operators did to it. Retried are its records from retries.
func (i *Inspector) withHistory(ctx context.Context, e RecordedEvent, retried []EventSent) (RecordedEvent, error) {
	rows, err := i.db.Query(ctx, i.sql.sent, pg.PlanEachTime, e.OutboxID, e.OutboxID, tables.MostSentBytes)
	if err != nil {
		return e, err
	}
	places, err := tables.ReadSent(rows, func(id int64) bool { return id == e.OutboxID })
	if err != nil {
		return e, err
	}
	for _, p := range places[e.OutboxID] {
		e.Sent = append(e.Sent, EventSent{Relay: p.Relay, Topic: p.Topic, Partition: p.Partition, Offset: p.Offset, At: p.At, Expired: p.Expired})
	}
	e.Sent = append(e.Sent, retried...)
	slices.SortStableFunc(e.Sent, func(a, b EventSent) int { return cmp.Compare(a.Relay, b.Relay) })
	for n := 1; n < len(e.Sent); n++ {
		e.Sent[n].Repeat = e.Sent[n].Relay == e.Sent[n-1].Relay && !e.Sent[n].Expired && !e.Sent[n-1].Expired
	}
	failed := []int64{}
	for _, f := range e.Failures {
		failed = append(failed, f.ID.Number)
	}
	rows, err = i.db.Query(ctx, i.sql.audit, pg.PlanEachTime, failed, e.Topic, e.CreatedAt)
	if err == nil {
		e.Audit, err = pgx.CollectRows(rows, scanAudit)
	}
	return e, err
}

// sent returns the records from retries, which go to the topic of the event, and the retries at which it had expired.
func (r *eventRelays) sent(topic string) (all []EventSent) {
	for _, f := range r.failures {
		if f.Status == outbox.StatusResolved && f.ResolvedBy == "" && f.Resolution == "expired" {
			all = append(all, EventSent{Relay: f.Relay, Offset: -1, At: f.ResolvedAt, Retried: true, Expired: true})
		}
		if f.SentAt.IsZero() {
			continue
		}
		s := EventSent{Relay: f.Relay, Topic: topic, Partition: f.Partition, Offset: -1, At: f.SentAt, Retried: true}
		if f.Offset != nil {
			s.Offset = *f.Offset
		}
		all = append(all, s)
	}
	return all
}
