package consumer

import (
	"math"
	"time"

	"github.com/outboxgo/outbox/internal/delivery"

	"github.com/outboxgo/outbox/internal/handling"

	"github.com/google/uuid"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/short"
)

// owed returns the row of a task, without an attempt.
func (w *partitionWorker) owed(it *recordItem, t handling.Task) delivery.Received {
	m := &it.Meta
	row := delivery.Received{
		Subject: w.parking.subjectOf(t), Stream: it.record.Topic, Partition: it.record.Partition, Offset: it.record.Offset,
		Type: storable(m.Type, envelope.MaxEventType), Source: storable(m.Source, envelope.MaxSource), AggregateID: storable(m.Subject, envelope.MaxAggregateID),
		ContentType: storable(m.ContentType, envelope.MaxContentType), PartitionKey: storable(string(it.record.Key), envelope.MaxPartitionKey),
		Payload: it.record.Value, Record: parkedRecordOf(it.record, m.Origin.TopicID), OccurredAt: storableTime(m.Time, it.record.Timestamp), RecordedAt: storableTime(it.record.Timestamp, time.Unix(0, 0)),
		MaxAttempts: delivery.Attempts(t.Retry.Over(w.cfg.Retry).MaxRetries),
	}
	id := m.ID
	if t.Action == "" && id == "" { // it could not be read: it goes by its place
		id = deadletter.Origin(it.record.Topic, it.record.Partition, it.record.Offset)
		row.Digest = w.placeOf(it)
	}
	if known, err := uuid.Parse(id); err == nil && known.String() == id {
		row.EventID = known
	} else {
		row.EventID, row.RecordID = row.Digest, short.Storable(id, short.MaxText)
	}
	if t.Kind != handling.NoTx {
		row.Note = noteOf(t)
	}
	return row
}

// noteOf returns what event_handled has of a task that is done. Of one whose key the host cannot say, it has nothing.
func noteOf(t handling.Task) (note delivery.Note) {
	_ = handling.Guard(func() error { // an error is one of the task, and was reported when it was tried
		k, err := handling.KeyOf(&t)
		if err == nil {
			note = delivery.Note{AggregateType: k.AggregateType, AggregateID: k.AggregateID, Source: k.Source}
			if k.Source != "" {
				note.WithSource = k.OfSource().AggregateID
			}
		}
		return err
	})
	return note
}

// storable returns a text as a column of so many characters takes it.
func storable(text string, characters int) string {
	text = short.Storable(text, math.MaxInt)
	if check.Text(text, characters) == nil {
		return text
	}
	if runes := []rune(text); len(runes) > characters {
		return string(runes[:characters])
	}
	return text
}

// storableTime returns a time, or another one if PostgreSQL could not hold it.
func storableTime(t, otherwise time.Time) time.Time {
	if t.IsZero() || t.Year() < 1 || t.Year() > 9999 {
		if otherwise.Year() < 1 || otherwise.Year() > 9999 {
			return time.Unix(0, 0)
		}
		return otherwise
	}
	return t
}

// PlaceOf returns the digest of an event that goes by where its record was first.
func (w *partitionWorker) placeOf(it *recordItem) [16]byte {
	place := deadletter.Origin(it.record.Topic, it.record.Partition, it.record.Offset)
	for _, h := range it.record.Headers {
		if h.Key == deadletter.ReplayOf {
			place = string(h.Value)
		}
	}
	return digestOf(string(it.Meta.Origin.TopicID[:]), place)
}

// noTask is the task of a record that no handler gets.
func noTask(it *recordItem) handling.Task {
	return handling.Task{Handler: &handling.Handler{Kind: handling.NoTx}, Arrival: handling.Arrival{Meta: it.Meta}}
}
