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
	"github.com/outboxgo/outbox/internal/handled"
	"github.com/outboxgo/outbox/internal/short"
)

// owed returns the row of event_delivery for a task that was not tried.
func (w *partitionWorker) owed(it *recordItem, t handling.Task) delivery.Received {
	m := &it.Meta
	row := delivery.Received{
		Subject: w.parking.subjectOf(t), Stream: it.record.Topic, Partition: it.record.Partition, Offset: it.record.Offset,
		Type: storable(m.Type, envelope.MaxEventType), Source: storable(m.Source, envelope.MaxSource), AggregateType: storable(m.AggregateType(), envelope.MaxAggregateType), AggregateID: storable(m.Subject, envelope.MaxAggregateID),
		ContentType: storable(m.ContentType, envelope.MaxContentType), PartitionKey: storable(string(it.record.Key), envelope.MaxPartitionKey),
		Payload: it.record.Value, Record: parkedRecordOf(it.record, m.Origin.TopicID), OccurredAt: storableTime(m.Time, it.record.Timestamp), RecordedAt: storableTime(it.record.Timestamp, time.Unix(0, 0)),
		MaxAttempts: delivery.Attempts(t.Retry.Over(w.cfg.Retry).MaxRetries),
	}
	id := m.ID
	if t.Action == "" && id == "" { // the event could not be read: its position identifies it
		id = deadletter.Origin(it.record.Topic, it.record.Partition, it.record.Offset)
		row.Digest = w.placeOf(it)
	}
	if known, err := uuid.Parse(id); err == nil && known.String() == id {
		row.EventID = known
	} else {
		row.EventID, row.RecordID = row.Digest, short.Storable(id, short.MaxText)
	}
	if t.Kind != handling.NoTx {
		row.Note = w.noteOf(t)
	}
	return row
}

// noteOf returns the row that event_handled has once a task is done. It is empty if the host's key
// function fails.
func (w *partitionWorker) noteOf(t handling.Task) (note delivery.Note) {
	k, err := w.processor.KeyOf(w.held, &t)
	if err != nil {
		return note // the error is that of an attempt: it was reported when the task was tried, or is when it is claimed
	}
	note = delivery.Note{AggregateType: k.AggregateType, AggregateID: k.AggregateID, Source: k.Source}
	if k.Source != "" {
		note.WithSource = k.WithSource().AggregateID
	}
	return note
}

// storable returns a text cut and cleaned for a column of at most the given number of characters.
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

// storableTime returns t, or otherwise if PostgreSQL cannot store t.
func storableTime(t, otherwise time.Time) time.Time {
	if t.IsZero() || t.Year() < 1 || t.Year() > 9999 {
		if otherwise.Year() < 1 || otherwise.Year() > 9999 {
			return time.Unix(0, 0)
		}
		return otherwise
	}
	return t
}

// placeOf returns the digest of an event that is identified by the position of its original record.
func (w *partitionWorker) placeOf(it *recordItem) [16]byte {
	place := deadletter.Origin(it.record.Topic, it.record.Partition, it.record.Offset)
	for _, h := range it.record.Headers {
		if h.Key == deadletter.ReplayOf {
			place = string(h.Value)
		}
	}
	return handled.PlaceDigest(it.Meta.Origin.TopicID, place)
}

// noTask returns a task without an action, for a record that no handler gets.
func noTask(it *recordItem) handling.Task {
	return handling.Task{Handler: &handling.Handler{Kind: handling.NoTx}, Arrival: handling.Arrival{Meta: it.Meta}}
}
