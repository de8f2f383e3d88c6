// Package outboxarchive keeps events when retention removes them from outbox, and reads them again.
//
//   - [Table] is a table in the same database, with a partition for each month. Its rows arrive in the
//     transaction that removes them from outbox.
//   - [Files] are compressed files for cold storage, in a folder or in another [Store]. They are stored
//     before the transaction commits.
//
// Both have a method Archive for RetentionConfig.Archive, which relays and workers call. A [Source] reads
// either of them. The package outboxreplay sends the events of a Source to Kafka again.
package outboxarchive

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
)

// Source has events: a [Table], a [Folder], or [Recorded].
type Source interface {
	// Events returns the events that a filter chooses, each once, in the order of OutboxID. The events of a
	// key were recorded in this order. If an event cannot be read, the error is a [*ReadError], and more
	// events may follow. Any other error is the last.
	Events(ctx context.Context, filter Filter) iter.Seq2[outbox.ArchivedEvent, error]
}

// Filter chooses events. The zero value chooses all.
type Filter struct {
	// After leaves out the events whose OutboxID is not above it. Use it to continue a run that was
	// stopped.
	After int64
	// Since and Until bound ArchivedEvent.CreatedAt, the time of recording: from Since on, and
	// before Until. Zero means no bound.
	Since, Until time.Time
	// Types are the types of events. Empty means all.
	Types []string
	// Topics are the topics to which relays sent the events. Empty means all.
	Topics []string
	// Keys are the keys of the records. Empty means all.
	Keys []string
	// AggregateType and AggregateID choose the events of an aggregate. Empty means all. An AggregateID
	// needs an AggregateType.
	AggregateType, AggregateID string
	// EventIDs are the ids of events. Empty means all.
	EventIDs []string
}

// ReadError names the event, or the line of a file, that cannot be read.
type ReadError struct {
	// File is the name of the file; empty for a row of a table.
	File string
	// Line is the line in the file, counted from 1. It is 0 if the whole file cannot be read.
	Line int
	// OutboxID is the event's id in outbox, or 0 if it is unknown.
	OutboxID int64
	// Err is the reason.
	Err error
}

// Error returns the position of the error, and the reason.
func (e *ReadError) Error() string {
	switch {
	case e.File == "":
		return fmt.Sprintf("event of outbox id %d: %v", e.OutboxID, e.Err)
	case e.Line == 0:
		return fmt.Sprintf("file %s: %v", e.File, e.Err)
	}
	return fmt.Sprintf("file %s, line %d: %v", e.File, e.Line, e.Err)
}

// Unwrap returns the reason.
func (e *ReadError) Unwrap() error { return e.Err }

func (f Filter) validate() error {
	errs := []error{check.NotNegative("Filter.After", f.After)}
	if !f.Since.IsZero() && !f.Until.IsZero() && !f.Since.Before(f.Until) {
		errs = append(errs, errors.New("fields Filter.Since and Filter.Until: Since must be earlier"))
	}
	if f.AggregateID != "" && f.AggregateType == "" {
		errs = append(errs, fmt.Errorf("field Filter.AggregateType %w: AggregateID needs it", outbox.ErrEmpty))
	}
	for _, id := range f.EventIDs {
		if _, err := uuid.Parse(id); err != nil {
			errs = append(errs, fmt.Errorf("field Filter.EventIDs: %.100q %w: want a UUID", id, outbox.ErrMalformed))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("outbox: %w", err)
	}
	return nil
}

// matcher is a filter for events that are read one by one.
type matcher struct {
	Filter
	ids map[uuid.UUID]bool
}

func (f Filter) matcher() matcher {
	m := matcher{f, map[uuid.UUID]bool{}}
	for _, id := range f.EventIDs {
		m.ids[uuid.MustParse(id)] = true // validate has parsed them
	}
	return m
}

func (m matcher) matches(e *outbox.ArchivedEvent) bool {
	among := func(list []string, value string) bool { return len(list) == 0 || slices.Contains(list, value) }
	if e.OutboxID <= m.After || !m.inTime(e.CreatedAt) || !among(m.Types, e.Type) || !among(m.Topics, topicOf(e)) || !among(m.Keys, keyOf(e)) {
		return false
	}
	if m.AggregateType != "" && m.AggregateType != e.AggregateType || m.AggregateID != "" && m.AggregateID != e.AggregateID {
		return false
	}
	if len(m.ids) == 0 {
		return true
	}
	id, err := uuid.Parse(e.EventID)
	return err == nil && m.ids[id]
}

func (f Filter) inTime(t time.Time) bool {
	return !t.Before(f.Since) && (f.Until.IsZero() || t.Before(f.Until))
}

// topicOf returns the topic of an event's record, or "" if its type has no topic.
func topicOf(e *outbox.ArchivedEvent) string {
	switch {
	case e.Topic != "":
		return e.Topic
	case check.HasTopic(e.Type):
		return check.TopicOf(e.Type)
	}
	return ""
}

// keyOf returns the key of an event's record.
func keyOf(e *outbox.ArchivedEvent) string {
	if e.PartitionKey != "" {
		return e.PartitionKey
	}
	return e.AggregateID
}

// nothing yields an error.
func nothing(err error) iter.Seq2[outbox.ArchivedEvent, error] {
	return func(yield func(outbox.ArchivedEvent, error) bool) { yield(outbox.ArchivedEvent{}, err) }
}
