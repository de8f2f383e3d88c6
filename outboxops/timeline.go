package outboxops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
)

// Timeline is what the tables know of an event.
type Timeline struct {
	// OutboxID and EventID are its ids, and Type is its type, as far as they are known.
	OutboxID int64
	// EventID and Type are described at OutboxID.
	EventID, Type string
	// InOutbox is set if it is in outbox: it is not delayed, and retention has not removed it.
	InOutbox bool
	// Entries are in the order of time. Those whose time is not kept are the last.
	Entries []TimelineEntry
	// Searched are the tables that were searched. The search of those in NotSearched took too long, so what they
	// know is missing.
	Searched, NotSearched []string
}

// TimelineEntry is one thing that is known of an event.
type TimelineEntry struct {
	// At is when it was, by the clock that wrote it: of a host for a record's time, else of the database. It is zero
	// if the time is not kept.
	At time.Time
	// What says what happened.
	What string
	// Err is the error that belongs to it, or empty.
	Err string
	// Table is where it is read from.
	Table string
	// Failure names the failure or delivery that it is about, or is zero.
	Failure FailureID
}

// timelineSQL are the statements of [Inspector.Timeline], in their schema.
type timelineSQL struct{ recorded, ids, delayed, failed, deliveries, handled, audit string }

func newTimelineSQL(schema string) timelineSQL {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return timelineSQL{recorded: in(sqlTimelineRecorded), ids: in(sqlTimelineIDs), delayed: in(delayedColumns + ` WHERE event_id = $1::uuid ORDER BY id LIMIT 1000`),
		failed: in(sqlTimelineFailed), deliveries: in(sqlTimelineDeliveries), handled: in(sqlTimelineHandled), audit: in(sqlTimelineAudit)}
}

// searchFor bounds the search of a table that has no index by events.
const searchFor = 3 * time.Second

// timeline is a [Timeline] in the making.
type timeline struct {
	Timeline
	i        *Inspector
	event    RecordedEvent // if it is in outbox
	failures []int64       // of outbox_failed
	handled  []FailureHandler
	delivery []int64
	expires  time.Time // of the event; zero if it does not expire, or that is not known
}

func (t *timeline) add(table string, at time.Time, id FailureID, reason string, format string, args ...any) {
	t.Entries = append(t.Entries, TimelineEntry{At: at, What: fmt.Sprintf(format, args...), Err: reason, Table: table, Failure: id})
}

// search searches a table, but not for too long.
func (t *timeline) search(ctx context.Context, table, sql string, read func(pgx.Rows) error, args ...any) error {
	bounded, cancel := context.WithTimeout(ctx, t.i.searchFor)
	defer cancel()
	rows, err := t.i.db.Query(bounded, sql, append([]any{pg.PlanEachTime}, args...)...)
	if err == nil {
		err = read(rows)
	}
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		t.NotSearched = append(t.NotSearched, table)
		return nil
	}
	t.Searched = append(t.Searched, table)
	return err
}

// Timeline returns what the tables know of an event, by its outbox.id or its EventID: whether it is delayed, what
// relays, consumer groups and operators did with it, except for reads of its payload. It returns [ErrNotFound] if no
// table knows it.
//
// Some tables have no index by events, and are searched for at most 3 s each; see Timeline.NotSearched. By EventID,
// outbox is read from its newest event on, however long that takes: bound it by ctx. What is not in PostgreSQL is not
// found: records and dead letters in Kafka, and notes in event_handled under a key that a handler chose.
func (i *Inspector) Timeline(ctx context.Context, id string) (Timeline, error) {
	t := timeline{i: i}
	number, err := strconv.ParseInt(id, 10, 64)
	if err == nil && number > 0 {
		t.OutboxID = number
	} else {
		event, err := uuid.Parse(id)
		if err != nil {
			return Timeline{}, fmt.Errorf("outbox: timeline of an event: %w: %.40q is neither an outbox.id nor a UUID", outbox.ErrMalformed, id)
		}
		t.EventID = event.String()
	}
	if err := t.read(ctx); err != nil {
		return Timeline{}, fmt.Errorf("outbox: timeline of event %s: %w", id, orNotMigrated(err))
	}
	if len(t.Entries) == 0 {
		return Timeline{}, fmt.Errorf("outbox: event %s: %w, searched %v, and not to the end %v", id, ErrNotFound, t.Searched, t.NotSearched)
	}
	slices.SortStableFunc(t.Entries, func(a, b TimelineEntry) int {
		if a.At.IsZero() != b.At.IsZero() {
			return cmp.Compare(b.At.Unix(), a.At.Unix()) // the zero time comes last
		}
		return a.At.Compare(b.At)
	})
	return t.Timeline, nil
}

func (t *timeline) read(ctx context.Context) error {
	for _, step := range []func(context.Context) error{t.recorded, t.otherID, t.delayed, t.places, t.failed, t.deliveries, t.notes, t.audit} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

const sqlTimelineRecorded = `SELECT xid::text FROM {schema}.outbox WHERE id = $1`

// recorded looks for the event in outbox. A delayed event, which an index finds, is not there.
func (t *timeline) recorded(ctx context.Context) error {
	if t.OutboxID == 0 {
		var delayed bool
		err := pg.QueryRow(ctx, t.i.db, `SELECT EXISTS (`+t.i.sql.timeline.delayed+`)`, t.EventID).Scan(&delayed)
		if delayed || err != nil {
			return err
		}
		t.Searched = append(t.Searched, "outbox")
		events, err := t.i.Events(ctx, EventFilter{EventID: t.EventID}, EventPage{Limit: 1})
		if len(events) == 0 {
			return err
		}
		t.OutboxID = events[0].OutboxID
	} else {
		t.Searched = append(t.Searched, "outbox")
	}
	var xid string
	err := pg.QueryRow(ctx, t.i.db, t.i.sql.timeline.recorded, t.OutboxID).Scan(&xid)
	if err == nil {
		t.event, err = t.i.bare(ctx, t.OutboxID)
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	t.InOutbox, t.EventID, t.Type, t.expires = true, t.event.EventID, t.event.Type, t.event.ExpiresAt
	t.add("outbox", t.event.CreatedAt, FailureID{}, "", "transaction %s recorded it, or moved it to outbox if it was delayed", xid)
	return err
}

// sqlTimelineIDs reads the ids of an event that is not in outbox any more, of which one is known.
const sqlTimelineIDs = `
SELECT coalesce(outbox_id, 0), event_id::text
  FROM (SELECT outbox_id, event_id FROM {schema}.outbox_failed
         UNION ALL
        SELECT position, event_id FROM {schema}.event_delivery WHERE record_partition IS NULL
         UNION ALL
        SELECT outbox_id, event_id FROM {schema}.outbox_audit WHERE outbox_id IS NOT NULL AND event_id IS NOT NULL) AS known
 WHERE outbox_id = $1::bigint OR event_id = $2::uuid
 LIMIT 1`

// otherID finds the other id of an event that is not in outbox.
func (t *timeline) otherID(ctx context.Context) error {
	if t.InOutbox {
		return nil
	}
	bounded, cancel := context.WithTimeout(ctx, t.i.searchFor)
	defer cancel()
	outboxID, eventID := t.ids()
	err := pg.QueryRow(bounded, t.i.db, t.i.sql.timeline.ids, outboxID, eventID).Scan(&t.OutboxID, &t.EventID)
	if errors.Is(err, pgx.ErrNoRows) || bounded.Err() != nil && ctx.Err() == nil {
		return nil
	}
	return err
}

func (t *timeline) delayed(ctx context.Context) error {
	if t.EventID == "" {
		return nil
	}
	return t.search(ctx, "outbox_delayed", t.i.sql.timeline.delayed, func(rows pgx.Rows) error {
		all, err := pgx.CollectRows(rows, scanDelayed)
		for _, d := range all {
			t.Type = cmp.Or(t.Type, d.Type)
			t.add("outbox_delayed", d.RecordedAt, FailureID{}, "", "recorded with a due time, by a transaction whose id is not kept")
			t.add("outbox_delayed", d.DueAt, FailureID{}, "", "due, and not moved to outbox yet")
			if !d.RejectedAt.IsZero() {
				t.add("outbox_delayed", d.RejectedAt, FailureID{}, d.Rejection, "outbox has rejected it")
			}
		}
		return err
	}, t.EventID)
}

// places adds what relays have done with it, except for what outbox_failed has.
func (t *timeline) places(ctx context.Context) error {
	if t.OutboxID == 0 {
		return nil
	}
	sent := t.event.Sent
	if !t.InOutbox {
		var err error
		if sent, err = t.i.sentPlaces(ctx, t.OutboxID, nil); err != nil {
			return err
		}
	}
	t.Searched = append(t.Searched, "outbox_cursor")
	for _, s := range sent {
		switch place := placeOf(s.Topic, s.Partition, s.Offset); {
		case s.Retried: // outbox_failed has it
		case s.Expired:
			t.add("outbox_cursor", s.At, FailureID{}, "", "relay %s did not send it, because it had expired: batch %d", s.Relay, s.Batch)
		case s.Repeat:
			t.add("outbox_cursor", s.At, FailureID{}, "", "relay %s sent it to %s, a repeat: batch %d", s.Relay, place, s.Batch)
		default:
			t.add("outbox_cursor", s.At, FailureID{}, "", "relay %s sent it to %s: batch %d", s.Relay, place, s.Batch)
		}
	}
	for _, relay := range t.event.PendingFor {
		t.add("outbox_cursor", time.Time{}, FailureID{}, "", "relay %s has not attempted it yet", relay)
	}
	return t.withoutPlace(ctx)
}

// placeOf is where a record is.
func placeOf(topic string, partition int32, offset int64) string {
	if offset < 0 {
		return fmt.Sprintf("%s, partition %d", topic, partition)
	}
	return fmt.Sprintf("%s, partition %d, offset %d", topic, partition, offset)
}

// withoutPlace adds the relays that have attempted it, and of which nothing else is kept.
func (t *timeline) withoutPlace(ctx context.Context) error {
	var relays []outbox.RelayStatus
	for _, name := range t.event.AttemptedBy {
		if slices.ContainsFunc(t.event.Sent, func(s EventSent) bool { return s.Relay == name }) ||
			slices.ContainsFunc(t.event.Failures, func(f EventFailure) bool { return f.Relay == name }) {
			continue
		}
		if relays == nil {
			var err error
			if relays, err = t.i.Relays(ctx); err != nil {
				return err
			}
		}
		exactly := slices.ContainsFunc(relays, func(r outbox.RelayStatus) bool { return r.Name == name && r.CursorTopic != "" })
		what := "relay %s sent it, partition and offset unknown: a retry without KeepSent, the mode exactly once, or its rows of outbox_cursor are removed"
		switch {
		case exactly && !t.event.ExpiresAt.IsZero():
			what = "relay %s sent it, or it expired before: a relay that sends exactly once does not keep that"
		case exactly:
			what = "relay %s sent it, partition and offset unknown: a relay that sends exactly once does not store them"
		}
		t.add("outbox_cursor", time.Time{}, FailureID{}, "", what, name)
	}
	return nil
}
