package outboxops

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// EventSent is one record of an event that a relay has sent, or says that the event had expired.
type EventSent struct {
	// Relay is the relay that has sent it.
	Relay string
	// Batch is the row of outbox_cursor that says so, which is one for each batch; zero if it was sent at a retry.
	Batch int64
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

// sentPlaces returns where an event was sent, by relay. Retried are its records from retries.
func (i *Inspector) sentPlaces(ctx context.Context, outboxID int64, retried []EventSent) (all []EventSent, err error) {
	rows, err := i.db.Query(ctx, i.sql.sent, pg.PlanEachTime, outboxID, outboxID, tables.MostSentBytes)
	if err != nil {
		return nil, err
	}
	places, err := tables.ReadSent(rows, func(id int64) bool { return id == outboxID })
	if err != nil {
		return nil, err
	}
	for _, p := range places[outboxID] {
		all = append(all, EventSent{Relay: p.Relay, Batch: p.Batch, Topic: p.Topic, Partition: p.Partition, Offset: p.Offset, At: p.At, Expired: p.Expired})
	}
	all = append(all, retried...)
	slices.SortStableFunc(all, func(a, b EventSent) int { return cmp.Compare(a.Relay, b.Relay) })
	for n := 1; n < len(all); n++ {
		all[n].Repeat = all[n].Relay == all[n-1].Relay && !all[n].Expired && !all[n-1].Expired
	}
	return all, nil
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
