package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"strconv"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
)

var eventsShowCommand = command{
	name: "events show", synopsis: "ID", min: 1, max: 1,
	summary: "the history of an event",
	about: `
Shows when it was recorded, where relays sent it, and what groups and operators
did. ID is its outbox.id, or its UUID, which is slower.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		payload := fs.Bool("payload", false, "with payload and headers")
		return func(ctx context.Context, e *env) error { return eventsShow(ctx, e, *payload) }
	},
}

func eventsShow(ctx context.Context, e *env, payload bool) error {
	inspector, err := e.inspector(ctx)
	if err != nil {
		return err
	}
	t, err := inspector.Timeline(ctx, e.args[0])
	if errors.Is(err, outbox.ErrMalformed) {
		return usagef("%q is neither an outbox.id nor a UUID", e.args[0])
	}
	if err != nil {
		return err
	}
	var event *outboxops.RecordedEvent
	if t.InOutbox {
		found, err := inspector.Event(ctx, t.OutboxID)
		if err != nil {
			return err
		}
		if !payload {
			found.Payload, found.PayloadErr, found.Headers = nil, nil, nil
		}
		event = &found
	}
	if e.json {
		return e.writeJSON(eventHistoryOf(t, event))
	}
	showTimeline(e, t, event)
	if payload && event != nil {
		e.writeHeaders(event.Headers)
		e.printf("\n")
		e.writePayload(event.ContentType, event.Payload, event.PayloadErr)
	}
	return nil
}

// showTimeline shows an event, which is nil if it is not in outbox.
func showTimeline(e *env, t outboxops.Timeline, event *outboxops.RecordedEvent) {
	outboxID := "-"
	if t.OutboxID != 0 {
		outboxID = strconv.FormatInt(t.OutboxID, 10)
	}
	e.writeFields([][2]string{{"outbox id", outboxID}, {"event id", cmp.Or(t.EventID, "-")}})
	if event != nil {
		e.writeFields([][2]string{
			{"type", event.Type}, {"aggregate", event.AggregateType + "/" + event.AggregateID}, {"topic", event.Topic}, {"key", event.Key},
		})
	}
	for _, entry := range t.Entries {
		at := "time not kept      "
		if !entry.At.IsZero() {
			at = clock(entry.At)
		}
		e.printf("%s  %s%s\n", at, visible(withError(entry)), e.paint(dim, " ["+cmp.Or(entry.Failure.String(), entry.Table)+"]"))
	}
	if event == nil {
		e.printf("It is not in outbox. Searched: %s.\n", strings.Join(t.Searched, ", "))
	}
	if len(t.NotSearched) > 0 {
		e.printf("Not searched to the end, because it takes too long: %s.\n", strings.Join(t.NotSearched, ", "))
	}
}

// withError says what happened, and the error.
func withError(entry outboxops.TimelineEntry) string {
	if entry.Err == "" {
		return entry.What
	}
	return entry.What + ": " + entry.Err
}

// eventHistoryJSON is an event with its timeline in the output. If it is not in outbox, there are only its ids and the
// timeline.
type eventHistoryJSON struct {
	*recordedJSON
	OutboxID    int64              `json:"outbox_id"`
	EventID     string             `json:"event_id"`
	InOutbox    bool               `json:"in_outbox"`
	AttemptedBy []string           `json:"attempted_by"`
	PendingFor  []string           `json:"pending_for"`
	Sent        []eventSentJSON    `json:"sent"`
	Timeline    []timelineItemJSON `json:"timeline"`
	Searched    []string           `json:"searched"`
	NotSearched []string           `json:"not_searched"`
}

type timelineItemJSON struct {
	At        *time.Time `json:"at"`
	What      string     `json:"what"`
	Error     string     `json:"error,omitempty"`
	Table     string     `json:"table"`
	FailureID string     `json:"failure_id,omitempty"`
}

type eventSentJSON struct {
	Relay     string    `json:"relay"`
	Batch     int64     `json:"batch"`
	Topic     string    `json:"topic"`
	Partition int32     `json:"partition"`
	Offset    int64     `json:"offset"`
	At        time.Time `json:"at"`
	Retried   bool      `json:"retried"`
	Repeat    bool      `json:"repeat"`
	Expired   bool      `json:"expired"`
}

func eventHistoryOf(t outboxops.Timeline, event *outboxops.RecordedEvent) eventHistoryJSON {
	h := eventHistoryJSON{OutboxID: t.OutboxID, EventID: t.EventID, InOutbox: t.InOutbox, AttemptedBy: []string{}, PendingFor: []string{}, Sent: []eventSentJSON{},
		Timeline: []timelineItemJSON{}, Searched: append([]string{}, t.Searched...), NotSearched: append([]string{}, t.NotSearched...)}
	for _, entry := range t.Entries {
		h.Timeline = append(h.Timeline, timelineItemJSON{optional(entry.At), entry.What, entry.Err, entry.Table, entry.Failure.String()})
	}
	if event == nil {
		return h
	}
	recorded := recordedOf(*event)
	h.recordedJSON, h.AttemptedBy, h.PendingFor = &recorded, append(h.AttemptedBy, event.AttemptedBy...), append(h.PendingFor, event.PendingFor...)
	for _, s := range event.Sent {
		h.Sent = append(h.Sent, eventSentJSON{s.Relay, s.Batch, s.Topic, s.Partition, s.Offset, s.At.UTC(), s.Retried, s.Repeat, s.Expired})
	}
	return h
}
