package outboxops

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
)

const sqlTimelineFailed = `
SELECT id, event_type, relay, status, retry_count, coalesce(error_class, ''), coalesce(last_error, ''), failed_at, next_retry_at,
       coalesce(resolved_by, ''), coalesce(resolution, ''), resolved_at, pg_catalog.split_part(parking_key, '/', 1), coalesce(sent_partition, 0), coalesce(sent_offset, -1), sent_at
  FROM {schema}.outbox_failed
 WHERE outbox_id = coalesce(nullif($1::bigint, 0), outbox_id) AND event_id = coalesce($2::uuid, event_id) ORDER BY id LIMIT 1000`

// ids are the ids of the event as arguments: 0 and NULL if they are not known.
func (t *timeline) ids() (outboxID int64, eventID any) {
	if t.EventID != "" {
		eventID = t.EventID
	}
	return t.OutboxID, eventID
}

// failed adds what relays could not send, and what they sent at a retry.
func (t *timeline) failed(ctx context.Context) error {
	outboxID, eventID := t.ids()
	return t.search(ctx, "outbox_failed", t.i.sql.timeline.failed, func(rows pgx.Rows) error {
		var r struct {
			id, offset                                           int64
			relay, status, class, message, by, resolution, topic string
			retries                                              int
			partition                                            int32
			failed, next, resolved, sent                         time.Time
		}
		_, err := pgx.ForEachRow(rows, []any{&r.id, &t.Type, &r.relay, &r.status, &r.retries, &r.class, &r.message, pg.Time{At: &r.failed}, pg.Time{At: &r.next},
			&r.by, &r.resolution, pg.Time{At: &r.resolved}, &r.topic, &r.partition, &r.offset, pg.Time{At: &r.sent}}, func() error {
			add := func(at time.Time, reason, format string, args ...any) {
				t.add("outbox_failed", at, FailureID{KindEvent, r.id}, reason, "relay %s %s", r.relay, fmt.Sprintf(format, args...))
			}
			t.failures = append(t.failures, r.id)
			add(r.failed, "", "could not send it, or put it behind an earlier event of its key")
			switch {
			case !r.sent.IsZero():
				add(r.sent, "", "sent it to %s at a retry", placeOf(r.topic, r.partition, r.offset))
			case r.status == outbox.StatusResolved && r.by != "":
				add(r.resolved, "", "does not send it: %s resolved it: %s", r.by, r.resolution)
			case r.status == outbox.StatusResolved && r.resolution == "expired":
				add(r.resolved, "", "did not send it at a retry, because it had expired")
			case r.status == outbox.StatusResolved:
				add(r.resolved, "", "has it resolved: %s", r.resolution)
			case r.status == outbox.StatusDead:
				add(r.next, r.message, "has it dead after %d retries%s", r.retries, because(r.class))
			case r.status == outbox.StatusParked:
				add(time.Time{}, r.message, "has it parked behind an earlier event of its key")
			default:
				add(time.Time{}, r.message, "has it %s after %d retries%s", r.status, r.retries, because(r.class))
			}
			return nil
		})
		return err
	}, outboxID, eventID)
}

// because adds the class of an error, if there is one.
func because(class string) string {
	if class == "" {
		return ""
	}
	return ": " + class
}

const sqlTimelineDeliveries = `
SELECT id, event_type, consumer_group, action, status, attempt_count, max_attempts, coalesce(last_error_code, ''), coalesce(last_error_message, ''),
       created_at, failed_at, last_attempt_at, updated_at, processed_at, coalesce(resolved_by, ''), coalesce(note, ''), resolved_at,
       stream, record_partition, position, dead_letter_owed, coalesce(dead_letter, ''), coalesce(headers->>'ce_expirytime', '')
  FROM {schema}.event_delivery
 WHERE event_id = $2::uuid OR $2::uuid IS NULL AND position = $1::bigint AND record_partition IS NULL
 ORDER BY id LIMIT 1000`

// timelineDelivery is a row of sqlTimelineDeliveries.
type timelineDelivery struct {
	id, position                                                                int64
	group, action, status, class, message, resolvedBy, note, stream, deadLetter string
	attempts, most                                                              int
	created, failed, attempted, changed, processed, resolved                    time.Time
	partition                                                                   *int32
	owed                                                                        bool
	expires                                                                     string
}

// deliveries adds what workers do with it, and what consumers could not handle.
func (t *timeline) deliveries(ctx context.Context) error {
	outboxID, eventID := t.ids()
	return t.search(ctx, "event_delivery", t.i.sql.timeline.deliveries, func(rows pgx.Rows) error {
		var d timelineDelivery
		_, err := pgx.ForEachRow(rows, []any{&d.id, &t.Type, &d.group, &d.action, &d.status, &d.attempts, &d.most, &d.class, &d.message,
			pg.Time{At: &d.created}, pg.Time{At: &d.failed}, pg.Time{At: &d.attempted}, pg.Time{At: &d.changed}, pg.Time{At: &d.processed},
			&d.resolvedBy, &d.note, pg.Time{At: &d.resolved}, &d.stream, &d.partition, &d.position, &d.owed, &d.deadLetter, &d.expires}, func() error {
			if at, err := time.Parse(time.RFC3339, d.expires); err == nil {
				t.expires = at
			}
			t.addDelivery(d)
			return nil
		})
		return err
	}, outboxID, eventID)
}

func (t *timeline) addDelivery(d timelineDelivery) {
	add := func(at time.Time, reason, format string, args ...any) {
		t.add("event_delivery", at, FailureID{KindDelivery, d.id}, reason, "group %s, action %s: %s", d.group, d.action, fmt.Sprintf(format, args...))
	}
	t.delivery = append(t.delivery, d.id)
	if d.partition == nil {
		add(d.created, "", "has it from outbox")
	} else {
		add(d.created, "", "parked it from %s", placeOf(d.stream, *d.partition, d.position))
	}
	if !d.failed.IsZero() {
		add(d.failed, "", "failed first")
	}
	switch d.status {
	case DeliveryDone:
		t.handled = append(t.handled, FailureHandler{d.group, d.action})
		add(d.processed, "", "handled it at attempt %d%s", d.attempts, t.orDropped(d.processed))
	case DeliveryDead:
		deadLetter := ""
		if d.owed {
			deadLetter = ", its dead letter is not sent yet"
		}
		add(d.processed, d.message, "dead after %d attempts%s%s", d.attempts, deadLetter, because(d.class))
	case DeliveryProcessing:
		add(d.attempted, d.message, "attempt %d of %d began", d.attempts, d.most)
	case DeliveryParked:
		add(d.changed, d.message, "waits behind an earlier event of its key")
	default:
		add(d.changed, d.message, "waits after %d of %d attempts%s", d.attempts, d.most, because(d.class))
	}
	if d.deadLetter != "" {
		add(time.Time{}, "", "its dead letter is %s (topic-partition-offset)", d.deadLetter)
	}
	if !d.resolved.IsZero() {
		add(d.resolved, "", "%s resolved it: %s", d.resolvedBy, d.note)
	}
}

// orDropped says that a group may have dropped the event at a time, because no table keeps whether it did.
func (t *timeline) orDropped(at time.Time) string {
	if t.expires.IsZero() || at.Before(t.expires) {
		return ""
	}
	return ", or dropped it because it had expired"
}

// sqlTimelineHandled reads the notes of an event. It finds the beginnings of the keys one by one, because each group
// has very many notes. Notes of inboxes are of messages, and have none of the source.
const sqlTimelineHandled = `
WITH RECURSIVE kinds AS (
   (SELECT consumer_group, aggregate_type FROM {schema}.event_handled ORDER BY consumer_group, aggregate_type LIMIT 1)
     UNION ALL
    SELECT next.* FROM kinds AS k
     CROSS JOIN LATERAL (SELECT consumer_group, aggregate_type FROM {schema}.event_handled
                          WHERE (consumer_group, aggregate_type) > (k.consumer_group, k.aggregate_type)
                          ORDER BY consumer_group, aggregate_type LIMIT 1) AS next
)
SELECT h.consumer_group, h.action, h.handled_at FROM kinds AS k
  JOIN {schema}.event_handled AS h ON h.consumer_group = k.consumer_group AND h.aggregate_type = k.aggregate_type AND h.aggregate_id = $1::text
 WHERE NOT pg_catalog.starts_with(h.consumer_group, 'inbox:') AND ($2::text = '' OR coalesce(h.event_source, $2) = $2)
 ORDER BY h.id LIMIT 1000`

// notes adds what consumers have handled.
func (t *timeline) notes(ctx context.Context) error {
	if t.EventID == "" {
		return nil
	}
	return t.search(ctx, "event_handled", t.i.sql.timeline.handled, func(rows pgx.Rows) error {
		var h FailureHandler
		var at time.Time
		_, err := pgx.ForEachRow(rows, []any{&h.Group, &h.Action, pg.Time{At: &at}}, func() error {
			if !slices.Contains(t.handled, h) {
				t.add("event_handled", at, FailureID{}, "", "group %s, action %s: handled it%s", h.Group, h.Action, t.orDropped(at))
			}
			return nil
		})
		return err
	}, t.EventID, t.event.Source)
}

// sqlTimelineAudit reads what operators did to an event, to its failures and deliveries, and replays of its topic
// since.
const sqlTimelineAudit = sqlAuditColumns + `
 WHERE action <> 'read'
   AND (event_id = $2::uuid OR $2::uuid IS NULL AND outbox_id = $1::bigint OR failed_id = ANY ($3::bigint[]) OR delivery_id = ANY ($4::bigint[])
        OR action = 'replay' AND created_at >= $6::timestamptz AND pg_catalog.split_part(parking_key, '/', 1) IN ('', $5::text))
 ORDER BY id DESC LIMIT 1000`

func (t *timeline) audit(ctx context.Context) error {
	outboxID, eventID := t.ids()
	return t.search(ctx, "outbox_audit", t.i.sql.timeline.audit, func(rows pgx.Rows) error {
		all, err := pgx.CollectRows(rows, scanAudit)
		for _, a := range all {
			by := a.Operator
			if a.Login != "" {
				by += " (" + a.Login + ")"
			}
			t.add("outbox_audit", a.At, a.Failure, "", "%s by %s: %s", a.Action, by, a.Reason)
		}
		return err
	}, outboxID, eventID, t.failures, t.delivery, t.event.Topic, pg.OrNull(t.event.CreatedAt))
}
