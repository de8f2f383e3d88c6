package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/tables"
)

// The command tells of an event that a relay has sent twice, as its cursor was lost in between, of one that an operator
// has resolved unsent, of one whose place is not known, and of one that was not attempted yet.
func TestEventsShow(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.record(t, "1", "2", "3")
	require.Contains(t, d.ok(t, "events", "show", "1"), "recorded it, or moved it to outbox if it was delayed [outbox]")
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for epoch, offset := range []int64{7, 9} {
		var e tables.SentEncoder
		e.Add(tables.Sent{OutboxID: 1, Topic: "thing-events", Partition: 3, Offset: offset}, at)
		e.Add(tables.Sent{OutboxID: 2}, time.Time{})
		row := e.Row()
		d.exec(t, `INSERT INTO {s}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch, sent_from, sent_to, sent)
			SELECT 2, pg_current_snapshot(), 3, system_identifier, $1, $2, $3, $4 FROM pg_control_system()`, epoch+1, row.From, row.To, row.Bytes)
	}
	d.exec(t, `INSERT INTO {s}.outbox_failed (relay, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type,
			occurred_at, created_at, status, error_class)
		SELECT 'default', id, 'thing-events/2', event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type,
			occurred_at, created_at, 'dead', 'message_too_large' FROM {s}.outbox WHERE id = 2`)
	require.Contains(t, d.ok(t, "events", "show", "2"), "relay default has it dead after 0 retries: message_too_large [event-1]")
	d.ok(t, "failures", "resolve", "event-1", "--operator", "ann", "--reason", "no longer wanted")
	d.record(t, "4")

	show := func(id string) string { return strings.Join(strings.Fields(d.ok(t, "events", "show", id)), " ") } // long lines are wrapped
	sent := show("1")
	require.Contains(t, sent, clock(at)+" relay default sent it to thing-events, partition 3, offset 7: batch 1 [outbox_cursor]")
	require.Contains(t, sent, clock(at)+" relay default sent it to thing-events, partition 3, offset 9, a repeat: batch 2 [outbox_cursor]")
	require.NotContains(t, sent, `"Key"`)
	require.Contains(t, d.ok(t, "events", "show", "1", "--payload"), `"Key"`)
	unsent := show("2")
	require.Contains(t, unsent, "relay default does not send it: ann resolved it: no longer wanted [event-1]")
	require.Contains(t, unsent, "resolve by ann")
	require.Contains(t, show("3"), "time not kept relay default sent it, partition and offset unknown: a retry")
	require.Contains(t, show("4"), "time not kept relay default has not attempted it yet [outbox_cursor]")
	d.sendExactly(t, "cursors", 7)
	require.Contains(t, show("3"), "relay default sent it, partition and offset unknown: a relay that sends exactly once does not store them")
	require.Equal(t, sent, show("1"))

	shown := eventHistoryJSON{recordedJSON: &recordedJSON{}}
	d.json(t, &shown, exitOK, "events", "show", "1")
	require.Equal(t, []eventSentJSON{{"default", 1, "thing-events", 3, 7, at, false, false, false}, {"default", 2, "thing-events", 3, 9, at, false, true, false}}, shown.Sent)
	require.Equal(t, []string{"default"}, shown.AttemptedBy)
	d.json(t, &shown, exitOK, "events", "show", shown.EventID)
	require.EqualValues(t, 1, shown.OutboxID)
	d.json(t, &shown, exitOK, "events", "show", "2")
	require.Equal(t, "event-1", shown.Timeline[len(shown.Timeline)-1].FailureID)

	d.exec(t, `DELETE FROM {s}.outbox WHERE id = 2`)
	d.json(t, &shown, exitOK, "events", "show", "2")
	require.False(t, shown.InOutbox)
	removed := show("2")
	require.Contains(t, removed, "It is not in outbox. Searched: outbox, outbox_delayed, outbox_cursor, outbox_failed, event_delivery, event_handled, outbox_audit.")
	require.Contains(t, removed, "ann resolved it: no longer wanted")
	require.Equal(t, exitError, d.call(t, "events", "show", "99").code)
	require.Equal(t, exitError, d.call(t, "events", "show", "00000000-0000-4000-8000-000000000000").code)
	require.Equal(t, exitUsage, d.call(t, "events", "show", "what").code)
}
