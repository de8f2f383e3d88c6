package main

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
)

var eventsShowCommand = command{
	name: "events show", synopsis: "ID", min: 1, max: 1,
	summary: "where and when relays sent an event, or why not",
	about: `
Shows a recorded event: the topic, partition and offset of each record that
relays sent of it, which of them are repeats, whether it waits or has failed,
and who resolved it unsent. ID is its outbox.id or its UUID; by UUID the table
is read from its newest event on. --payload shows payload and headers too.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		payload := fs.Bool("payload", false, "payload and headers too")
		return func(ctx context.Context, e *env) error { return eventsShow(ctx, e, *payload) }
	},
}

func eventsShow(ctx context.Context, e *env, payload bool) error {
	inspector, err := e.inspector(ctx)
	if err != nil {
		return err
	}
	id, err := strconv.ParseInt(e.args[0], 10, 64)
	if err != nil {
		if id, err = outboxIDOf(ctx, inspector, e.args[0]); err != nil {
			return err
		}
	}
	event, err := inspector.Event(ctx, id)
	if err != nil {
		return err
	}
	if !payload {
		event.Payload, event.PayloadErr, event.Headers = nil, nil, nil
	}
	if e.json {
		return e.writeJSON(eventHistoryOf(event))
	}
	exactly, err := exactlyRelays(ctx, e)
	if err != nil {
		return err
	}
	e.writeFields(append([][2]string{
		{"outbox id", strconv.FormatInt(event.OutboxID, 10)}, {"event id", event.EventID}, {"type", event.Type},
		{"aggregate", event.AggregateType + "/" + event.AggregateID}, {"topic", event.Topic}, {"key", event.Key},
		{"recorded", clock(event.CreatedAt)},
	}, historyOf(event, exactly)...))
	for _, a := range event.Audit {
		e.printf("%s  %s by %s: %s\n", clock(a.At), a.Action, who(a), visible(a.Reason))
	}
	if payload {
		e.writeHeaders(event.Headers)
		e.printf("\n")
		e.writePayload(event.ContentType, event.Payload, event.PayloadErr)
	}
	return nil
}

// outboxIDOf returns the id in outbox of the event with a UUID.
func outboxIDOf(ctx context.Context, inspector *outboxops.Inspector, eventID string) (int64, error) {
	if _, err := uuid.Parse(eventID); err != nil {
		return 0, usagef("%q is neither an outbox.id nor a UUID", eventID)
	}
	events, err := inspector.Events(ctx, outboxops.EventFilter{EventID: eventID}, outboxops.EventPage{Limit: 1})
	if err != nil {
		return 0, err
	}
	if len(events) == 0 {
		return 0, fmt.Errorf("outbox: event %s: %w", eventID, outboxops.ErrNotFound)
	}
	return events[0].OutboxID, nil
}

// historyOf says what each relay has done with an event. Exactly are the relays that send exactly once.
func historyOf(event outboxops.RecordedEvent, exactly []outbox.RelayStatus) (fields [][2]string) {
	relays := slices.Concat(event.AttemptedBy, event.PendingFor)
	for _, s := range event.Sent {
		relays = append(relays, s.Relay)
	}
	slices.Sort(relays)
	for _, relay := range slices.Compact(relays) {
		name := "relay"
		for _, text := range historyAt(event, relay, slices.ContainsFunc(exactly, func(r outbox.RelayStatus) bool { return r.Name == relay })) {
			fields = append(fields, [2]string{name, relay + ": " + text})
			name = ""
		}
	}
	if len(fields) == 0 {
		fields = [][2]string{{"relay", "none has run"}}
	}
	return fields
}

// historyAt says what a relay, which may send exactly once, has done with an event.
func historyAt(event outboxops.RecordedEvent, relay string, exactly bool) (texts []string) {
	for _, s := range event.Sent {
		if s.Relay != relay {
			continue
		}
		text := fmt.Sprintf("sent to %s, partition %d, offset %d, at %s", s.Topic, s.Partition, s.Offset, clock(s.At))
		if s.Offset < 0 {
			text = fmt.Sprintf("sent to %s, partition %d, at %s", s.Topic, s.Partition, clock(s.At))
		}
		if s.Expired {
			text = "not sent, because it had expired, at " + clock(s.At)
		}
		if s.Retried {
			text += ", at a retry"
		}
		if s.Repeat {
			text += ", a repeat"
		}
		texts = append(texts, text)
	}
	for _, f := range event.Failures {
		switch {
		case f.Relay != relay || len(texts) > 0 && f.Status == outbox.StatusResolved && f.ResolvedBy == "":
		case f.Status == outbox.StatusResolved && f.ResolvedBy != "":
			texts = append(texts, fmt.Sprintf("not sent, %s resolved by %s at %s: %s", f.ID, f.ResolvedBy, clock(f.ResolvedAt), f.Resolution))
		default:
			texts = append(texts, fmt.Sprintf("%s, see %s", f.Status, f.ID))
		}
	}
	switch {
	case len(texts) > 0:
	case slices.Contains(event.PendingFor, relay):
		texts = append(texts, "not attempted yet")
	case exactly && !event.ExpiresAt.IsZero():
		texts = append(texts, "sent, or expired before: a relay that sends exactly once does not keep that")
	case exactly:
		texts = append(texts, "sent, and where is not known: a relay that sends exactly once does not keep that")
	default:
		texts = append(texts, "sent, and where is not known: at a retry (KeepSent keeps that), in the mode exactly once, or before its cursor was removed")
	}
	return texts
}

// eventHistoryJSON is an event with its history in the output.
type eventHistoryJSON struct {
	recordedJSON
	AttemptedBy []string         `json:"attempted_by"`
	PendingFor  []string         `json:"pending_for"`
	Sent        []eventSentJSON  `json:"sent"`
	Failures    []eventFailsJSON `json:"failures"`
	Audit       []auditJSON      `json:"audit"`
}

type eventSentJSON struct {
	Relay     string    `json:"relay"`
	Topic     string    `json:"topic"`
	Partition int32     `json:"partition"`
	Offset    int64     `json:"offset"`
	At        time.Time `json:"at"`
	Retried   bool      `json:"retried"`
	Repeat    bool      `json:"repeat"`
	Expired   bool      `json:"expired"`
}

type eventFailsJSON struct {
	ID         string     `json:"id"`
	Relay      string     `json:"relay"`
	Status     string     `json:"status"`
	ResolvedAt *time.Time `json:"resolved_at,omitempty"`
	ResolvedBy string     `json:"resolved_by,omitempty"`
	Resolution string     `json:"resolution,omitempty"`
}

func eventHistoryOf(event outboxops.RecordedEvent) eventHistoryJSON {
	h := eventHistoryJSON{
		recordedJSON: recordedOf(event), AttemptedBy: append([]string{}, event.AttemptedBy...), PendingFor: append([]string{}, event.PendingFor...),
		Sent: []eventSentJSON{}, Failures: []eventFailsJSON{}, Audit: []auditJSON{},
	}
	for _, s := range event.Sent {
		h.Sent = append(h.Sent, eventSentJSON{s.Relay, s.Topic, s.Partition, s.Offset, s.At.UTC(), s.Retried, s.Repeat, s.Expired})
	}
	for _, f := range event.Failures {
		h.Failures = append(h.Failures, eventFailsJSON{f.ID.String(), f.Relay, f.Status, optional(f.ResolvedAt), f.ResolvedBy, f.Resolution})
	}
	for _, a := range event.Audit {
		h.Audit = append(h.Audit, auditOf(a))
	}
	return h
}
