package outboxops

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/indexes"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
)

// RecordedEvent is a row of outbox.
type RecordedEvent struct {
	// OutboxID is outbox.id.
	OutboxID int64
	// EventID, Type, Source, AggregateType and AggregateID are the event's.
	EventID, Type, Source, AggregateType, AggregateID string
	// Topic and Key are the topic and the key of its record. Topic is empty if its type has no topic.
	Topic, Key string
	// ContentType is the content type of Payload.
	ContentType string
	// OccurredAt is the event's own time, CreatedAt the start of the transaction that
	// recorded it.
	OccurredAt, CreatedAt time.Time
	// ExpiresAt is when the event expires, see outbox.EventOptions.Expires; zero if never.
	ExpiresAt time.Time
	// Size is the length of payload and headers in bytes, as stated by the program that recorded
	// the event. Programs that do not know it leave it at 65,536.
	Size int

	// Payload is the event; nil in lists, see [Inspector.Event].
	Payload []byte
	// PayloadErr says why Payload could not be read; nil if it could, and in lists. It is
	// [ErrUnreadable].
	PayloadErr error
	// Headers are the extra Kafka headers; nil in lists.
	Headers map[string]string
	// AttemptedBy are the relays that have sent it or written it into outbox_failed,
	// PendingFor those that have not attempted it yet; nil in [Inspector.Tail].
	AttemptedBy, PendingFor []string
	// Failures are its rows of outbox_failed, sorted by relay; nil in [Inspector.Tail]. If a relay has
	// attempted the event and has no row here, it has sent the event.
	Failures []EventFailure
	// Sent is where relays have sent it, and which of them have not because it had expired, sorted by relay, the
	// first time first; nil in lists and in [Inspector.Tail]. A relay that has attempted it and is neither here nor
	// in Failures has sent it at a retry, and has not kept the row (RelayConfig.KeepSent).
	Sent []EventSent
}

// EventFilter picks recorded events. Empty fields pick all.
type EventFilter struct {
	// EventID is the CloudEvents id, a UUID.
	EventID string
	// Type is the CloudEvents type.
	Type string
	// AggregateType and AggregateID name the aggregate of the event.
	AggregateType, AggregateID string
	// Since and Until bound the start of the recording transaction: from Since on,
	// before Until.
	Since, Until time.Time
}

// args are the parameters of eventWhere.
func (f EventFilter) args() []any {
	return []any{f.EventID, f.Type, f.AggregateType, f.AggregateID, pg.OrNull(f.Since), pg.OrNull(f.Until)}
}

// eventWhere is an [EventFilter].
const eventWhere = `
       ($1::text = '' OR event_id::text = lower($1))
   AND ($2::text = '' OR event_type = $2)
   AND ($3::text = '' OR aggregate_type = $3)
   AND ($4::text = '' OR aggregate_id = $4)
   AND created_at >= coalesce($5::timestamptz, '-infinity') AND created_at < coalesce($6::timestamptz, 'infinity')`

// EventPage chooses a part of a list. The zero value is the newest events.
type EventPage struct {
	// Before is the OutboxID of the last event that is known. Zero means from the
	// newest on.
	Before int64
	// Limit is the largest number of events to return, up to 1,000. Zero means 100.
	Limit int
}

// recordedColumns are the columns of a list of events, in the order of scanRecorded.
const recordedColumns = `o.id, event_id::text, event_type, source, aggregate_type, aggregate_id, topic, partition_key, content_type,
       occurred_at, created_at, expires_at, size`

// relayColumns have the relays that have attempted an event, by the condition of retention, and the relays
// that have failed. They are in the order of eventRelays.
const relayColumns = `
       ARRAY(SELECT relay::text FROM positions AS s WHERE ` + tables.Attempted + notOfWorkers + ` ORDER BY 1),
       ARRAY(SELECT relay::text FROM positions AS s WHERE NOT ` + tables.Attempted + notOfWorkers + ` ORDER BY 1),
       (SELECT pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object('ID', f.id, 'Relay', f.relay, 'Status', f.status,
               'ResolvedAt', f.resolved_at, 'ResolvedBy', f.resolved_by, 'Resolution', f.resolution,
               'Partition', f.sent_partition, 'Offset', f.sent_offset, 'SentAt', f.sent_at) ORDER BY f.relay)
          FROM positions AS s JOIN {schema}.outbox_failed AS f ON f.relay = s.relay AND f.outbox_id = o.id AND f.event_id = o.event_id)`

const notOfWorkers = ` AND NOT pg_catalog.starts_with(relay, '` + tables.WorkerPrefix + `')`

const sqlEvents = tables.NewestCursors + `
SELECT ` + recordedColumns + `, ` + relayColumns + `
  FROM {schema}.outbox AS o WHERE` + eventWhere + `
   AND ($7::bigint = 0 OR id < $7)
 ORDER BY id DESC LIMIT $8`

// Events returns recorded events without their payloads, the newest first. These are the events that are
// committed and not yet removed by retention. An empty slice means that there are no more.
//
// It scans the table from its newest event on. This takes long if few events match and many are kept: bound
// it by ctx. A filter by type and id of an aggregate uses an index instead, if
// outbox.MigrateConfig.AggregateIndex has made it: see [Inspector.HasAggregateIndex].
func (i *Inspector) Events(ctx context.Context, filter EventFilter, page EventPage) ([]RecordedEvent, error) {
	limit, err := limitOf(page.Limit)
	if err != nil {
		return nil, fmt.Errorf("outbox: inspect events: %w", orNotMigrated(err))
	}
	rows, err := i.db.Query(ctx, i.sql.events, append([]any{pg.PlanEachTime}, append(filter.args(), page.Before, limit)...)...)
	if err == nil {
		var all []RecordedEvent
		if all, err = pgx.CollectRows(rows, scanListed); err == nil {
			return all, nil
		}
	}
	return nil, fmt.Errorf("outbox: inspect events: %w", orNotMigrated(err))
}

// HasAggregateIndex reports whether there is an index that finds the events of an aggregate.
// [outbox.Migrate] makes it if MigrateConfig.AggregateIndex is set, as does outbox migrate
// up --aggregate-index.
func (i *Inspector) HasAggregateIndex(ctx context.Context) (bool, error) {
	has, err := indexes.IsThere(ctx, i.db, i.schema, indexes.Aggregate)
	if err != nil {
		return false, fmt.Errorf("outbox: look for the index on aggregates: %w", orNotMigrated(err))
	}
	return has, nil
}

const sqlEvent = tables.NewestCursors + `
SELECT ` + recordedColumns + `, ` + relayColumns + `
  FROM {schema}.outbox AS o WHERE id = $1`

// Event returns a recorded event with its payload. It returns [ErrNotFound] if there
// is none: retention may have removed it.
func (i *Inspector) Event(ctx context.Context, outboxID int64) (RecordedEvent, error) {
	e, err := i.bare(ctx, outboxID)
	if err == nil {
		e, err = i.whole(ctx, e)
	}
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return RecordedEvent{}, fmt.Errorf("outbox: event %d: %w", outboxID, ErrNotFound)
	case err != nil:
		return RecordedEvent{}, fmt.Errorf("outbox: inspect event %d: %w", outboxID, orNotMigrated(err))
	}
	return e, nil
}

// bare returns an event without payload and headers, or [pgx.ErrNoRows].
func (i *Inspector) bare(ctx context.Context, outboxID int64) (RecordedEvent, error) {
	var relays eventRelays
	e, err := scanRecorded(pg.QueryRow(ctx, i.db, i.sql.event, outboxID), relays.columns()...)
	if err == nil {
		e = relays.addTo(e)
		e.Sent, err = i.sentPlaces(ctx, outboxID, relays.sent(e.Topic))
	}
	return e, err
}

// whole adds payload and headers to an event.
func (i *Inspector) whole(ctx context.Context, e RecordedEvent) (RecordedEvent, error) {
	headers, err := i.recorded.readHeaders(ctx, e.OutboxID)
	if err != nil {
		return e, err
	}
	e.Headers = headersOf(headers)
	e.Payload, e.PayloadErr, err = i.recorded.readPayload(ctx, e.OutboxID)
	return e, err
}

// eventRelays is read from relayColumns.
type eventRelays struct {
	attempted, pending []string
	failures           []struct {
		ID            int64
		Relay, Status string

		ResolvedAt             time.Time
		ResolvedBy, Resolution string

		Partition int32
		Offset    *int64
		SentAt    time.Time
	}
}

func (r *eventRelays) columns() []any { return []any{&r.attempted, &r.pending, &r.failures} }

func (r *eventRelays) addTo(e RecordedEvent) RecordedEvent {
	e.AttemptedBy, e.PendingFor = r.attempted, r.pending
	for _, f := range r.failures {
		e.Failures = append(e.Failures, EventFailure{FailureID{KindEvent, f.ID}, f.Relay, f.Status, f.ResolvedAt, f.ResolvedBy, f.Resolution})
	}
	return e
}

// scanListed reads recordedColumns and relayColumns.
func scanListed(row pgx.CollectableRow) (RecordedEvent, error) {
	var relays eventRelays
	e, err := scanRecorded(row, relays.columns()...)
	return relays.addTo(e), err
}

// scanRecorded reads recordedColumns, and more behind them.
func scanRecorded(row pgx.Row, more ...any) (RecordedEvent, error) {
	var r RecordedEvent
	var topic, key pgtype.Text
	err := row.Scan(append([]any{&r.OutboxID, &r.EventID, &r.Type, &r.Source, &r.AggregateType, &r.AggregateID, &topic, &key,
		&r.ContentType, pg.Time{At: &r.OccurredAt}, pg.Time{At: &r.CreatedAt}, pg.Time{At: &r.ExpiresAt}, &r.Size}, more...)...)
	r.Topic, r.Key = destinationOf(r.Type, topic), key.String
	if !key.Valid {
		r.Key = r.AggregateID
	}
	return r, err
}

// RecordedTopic is a topic to which recorded events go.
type RecordedTopic struct {
	// Topic is its name.
	Topic string
	// Types are the event types that go there, sorted.
	Types []string
	// Events is the number of events for this topic among those that were read, including failed events. An
	// event that is in outbox and has failed, even for several relays, counts once.
	Events int64
	// Newest is when the transaction of the newest of them began.
	Newest time.Time
}

// Limits of the events that [Inspector.Topics] reads, in outbox and in outbox_failed.
const (
	newestForTopics = 100_000
	failedForTopics = 10_000
)

// sqlRecordedTopics reads the newest rows. It also reads an event for each topic or partition that events
// wait for, however old: the topic may be missing. For a failed event, the row in outbox counts if it is
// among the newest.
const sqlRecordedTopics = `
WITH RECURSIVE places AS (
   (SELECT relay, place FROM {schema}.outbox_failed WHERE status IN ('waiting', 'failed') ORDER BY relay, place LIMIT 1)
     UNION ALL
    SELECT next.* FROM places AS p
     CROSS JOIN LATERAL (SELECT relay, place FROM {schema}.outbox_failed
                          WHERE status IN ('waiting', 'failed') AND (relay, place) > (p.relay, p.place) ORDER BY relay, place LIMIT 1) AS next
), recorded AS MATERIALIZED (
    SELECT id, topic, event_type, created_at FROM {schema}.outbox ORDER BY id DESC LIMIT $1
), newest AS MATERIALIZED (
    SELECT outbox_id, event_id, parking_key, event_type, created_at, status FROM {schema}.outbox_failed ORDER BY id DESC LIMIT $2
), failed AS (
    SELECT outbox_id, event_id, parking_key, event_type, created_at FROM newest WHERE status <> 'resolved'
     UNION
    SELECT first.* FROM places AS p
     CROSS JOIN LATERAL (SELECT outbox_id, event_id, parking_key, event_type, created_at FROM {schema}.outbox_failed
                          WHERE relay = p.relay AND place = p.place AND status IN ('waiting', 'failed')
                          ORDER BY next_retry_at, outbox_id LIMIT 1) AS first
)
SELECT topic, event_type, count(*), max(created_at)
  FROM (SELECT topic, event_type, created_at FROM recorded
         UNION ALL
        SELECT pg_catalog.split_part(parking_key, '/', 1), event_type, created_at
          FROM failed AS f
         WHERE outbox_id < (SELECT min(id) FROM recorded)
            OR NOT EXISTS (SELECT FROM {schema}.outbox AS o WHERE o.id = f.outbox_id AND o.event_id = f.event_id)) AS e
 GROUP BY topic, event_type
 ORDER BY event_type, topic`

// Topics returns topics, sorted by name. They are the topics of the newest 100,000 events in outbox and of
// the newest 10,000 failed events that are not resolved. Topics of older failed events are included if
// their topic or partition takes no records. Types without a topic are under the name "".
func (i *Inspector) Topics(ctx context.Context) ([]RecordedTopic, error) {
	topics := map[string]*RecordedTopic{}
	err := pg.Query(ctx, i.db, pg.PlannerSettings, func(rows pgx.Rows) error {
		var topic pgtype.Text
		var eventType string
		var events int64
		var newest time.Time
		_, err := pgx.ForEachRow(rows, []any{&topic, &eventType, &events, &newest}, func() error {
			name := destinationOf(eventType, topic)
			if topics[name] == nil {
				topics[name] = &RecordedTopic{Topic: name}
			}
			topics[name].add(eventType, events, newest)
			return nil
		})
		return err
	}, i.sql.topics, newestForTopics, failedForTopics)
	if err != nil {
		return nil, fmt.Errorf("outbox: inspect topics: %w", orNotMigrated(err))
	}
	var all []RecordedTopic
	for _, name := range slices.Sorted(maps.Keys(topics)) {
		all = append(all, *topics[name])
	}
	return all, nil
}

// add counts events of a type; types come sorted.
func (r *RecordedTopic) add(eventType string, events int64, newest time.Time) {
	if n := len(r.Types); n == 0 || r.Types[n-1] != eventType {
		r.Types = append(r.Types, eventType)
	}
	r.Events += events
	if newest.After(r.Newest) {
		r.Newest = newest
	}
}

// destinationOf returns where an event of a type goes, with the topic of its row.
func destinationOf(eventType string, topic pgtype.Text) string {
	if !topic.Valid && check.HasTopic(eventType) {
		return check.TopicOf(eventType)
	}
	return topic.String
}

// sqlTail finds events that were committed since snapshot $7; its xmax is $8. The row without an event has
// the present snapshot. Transactions in progress are looked up one by one, so that the index finds them.
const sqlTail = `
WITH ids AS MATERIALIZED (
    SELECT new.id, new.xid FROM (SELECT $8::xid8 AS bound, pg_current_snapshot() AS snapshot) AS b
     CROSS JOIN LATERAL (` + tables.Gaps + `) AS g
     CROSS JOIN LATERAL (SELECT id, xid FROM {schema}.outbox WHERE ` + tables.InGap + ` ORDER BY xid, id OFFSET 0) AS new
     UNION ALL
    SELECT late.id, late.xid FROM pg_snapshot_xip($7::pg_snapshot) AS x
     CROSS JOIN LATERAL (SELECT id, xid FROM {schema}.outbox WHERE xid >= x AND xid <= x ORDER BY xid, id OFFSET 0) AS late
     WHERE ` + tables.Ended + `
)
SELECT e.id, e.size, pg_current_snapshot()::text
  FROM (SELECT) AS always
  LEFT JOIN (SELECT o.id, o.size
               FROM ids CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox WHERE xid = ids.xid AND id = ids.id OFFSET 0) AS o
              WHERE` + eventWhere + `) AS e ON true
 ORDER BY e.id`

// sqlTailRead reads events in the order of their ids; $2 is the most bytes of a payload.
const sqlTailRead = `
SELECT ` + recordedColumns + `, CASE WHEN octet_length(p.bytes) <= $2 THEN p.bytes END, coalesce(octet_length(p.bytes), 0), pg_catalog.convert_to(o.headers::text, 'UTF8')
  FROM pg_catalog.unnest($1::bigint[]) AS r (id)
 CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox WHERE id BETWEEN r.id AND r.id ORDER BY id OFFSET 0) AS o
 CROSS JOIN LATERAL (SELECT coalesce(o.payload_bytes, pg_catalog.convert_to(o.payload::text, 'UTF8')) AS bytes OFFSET 0) AS p`

// sqlTailBare reads an event without payload and headers.
const sqlTailBare = `SELECT ` + recordedColumns + ` FROM {schema}.outbox AS o WHERE id = $1`

const (
	// tailInterval is the time between two polls of [Inspector.Tail].
	tailInterval = 500 * time.Millisecond
	// tailBytes bounds the size that a statement reads, by the column size.
	tailBytes = 4 << 20
)

// errStopped ends a tail whose loop has ended.
var errStopped = errors.New("stopped")

// Tail yields events as they are committed, with their payloads, from the start of the loop until ctx ends.
// An error of PostgreSQL comes without an event, as the last. Tail sends nothing and moves no cursor.
// Unlike a relay, it may miss events in a crash of PostgreSQL.
//
// The loop keeps a connection while it handles some of the events of a poll, so it should not take long for
// each.
func (i *Inspector) Tail(ctx context.Context, filter EventFilter) iter.Seq2[RecordedEvent, error] {
	return func(yield func(RecordedEvent, error) bool) {
		err := i.tail(ctx, filter, yield)
		if ctx.Err() == nil && !errors.Is(err, errStopped) {
			yield(RecordedEvent{}, fmt.Errorf("outbox: tail events: %w", orNotMigrated(err)))
		}
	}
}

// tail polls for events until ctx ends or an error comes.
func (i *Inspector) tail(ctx context.Context, filter EventFilter, yield func(RecordedEvent, error) bool) error {
	var since string
	err := i.db.QueryRow(ctx, `SELECT pg_current_snapshot()::text`).Scan(&since)
	for err == nil && ctx.Err() == nil {
		wait.Sleep(ctx, tailInterval)
		var found []tailed
		args := append(filter.args(), since, tables.SnapshotMax(since))
		err = pg.Query(ctx, i.db, pg.PlannerSettings, func(rows pgx.Rows) (err error) {
			found, since, err = readTail(rows)
			return err
		}, i.sql.tail, args...)
		for err == nil && len(found) > 0 {
			found, err = i.yieldSome(ctx, found, yield)
		}
	}
	return err
}

// tailed is an event that was committed since the last poll.
type tailed struct {
	id   int64
	size int
}

// readTail returns the events of rows and their snapshot.
func readTail(rows pgx.Rows) (found []tailed, snapshot string, err error) {
	var id pgtype.Int8
	var size pgtype.Int4
	_, err = pgx.ForEachRow(rows, []any{&id, &size, &snapshot}, func() error {
		if id.Valid {
			found = append(found, tailed{id.Int64, int(size.Int32)})
		}
		return nil
	})
	return found, snapshot, err
}

// yieldSome reads and yields the first events and returns the rest. If PostgreSQL cannot print an event,
// yieldSome first yields the events in front of it, and then the event without its payload.
func (i *Inspector) yieldSome(ctx context.Context, found []tailed, yield func(RecordedEvent, error) bool) ([]tailed, error) {
	n, ids := 0, []int64(nil)
	for bytes := 0; n < len(found) && (n == 0 || bytes+found[n].size <= tailBytes); n++ {
		bytes += found[n].size
		ids = append(ids, found[n].id)
	}
	done := 0
	err := pg.Query(ctx, i.db, pg.PlannerSettings, func(rows pgx.Rows) error {
		defer rows.Close()
		for rows.Next() {
			e, err := scanTailed(rows, i.recorded.most)
			if err != nil {
				return err
			}
			done = slices.Index(ids, e.OutboxID) + 1
			if !yield(e, nil) {
				return errStopped
			}
		}
		return rows.Err()
	}, i.sql.tailRead, ids, i.recorded.most)
	if !isUnreadable(ctx, err) {
		return found[n:], err
	}
	return i.yieldUnreadable(ctx, found[done:], yield)
}

// yieldUnreadable yields the first event, which retention may have removed meanwhile.
func (i *Inspector) yieldUnreadable(ctx context.Context, found []tailed, yield func(RecordedEvent, error) bool) ([]tailed, error) {
	e, err := scanRecorded(pg.QueryRow(ctx, i.db, i.sql.tailBare, found[0].id))
	if err == nil {
		e, err = i.whole(ctx, e)
	}
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return found[1:], nil
	case err != nil:
		return nil, err
	case !yield(e, nil):
		return nil, errStopped
	}
	return found[1:], nil
}

// scanTailed reads a row of sqlTailRead.
func scanTailed(rows pgx.Rows, most int) (RecordedEvent, error) {
	var payload, headers []byte
	var printed int64
	e, err := scanRecorded(rows, &payload, &printed, &headers)
	e.Payload, e.Headers = payload, headersOf(headers)
	if printed > int64(most) {
		e.PayloadErr = fmt.Errorf("%w: %w", ErrUnreadable, tooLarge{printed, most})
	}
	return e, err
}
