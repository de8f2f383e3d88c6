-- +goose Up

-- Events that a relay could not send at the first attempt.

CREATE TABLE outbox_failed (
    id             bigserial    PRIMARY KEY,
    relay          text         NOT NULL DEFAULT 'default',
    outbox_id      bigint       NOT NULL,
    parking_key    text         NOT NULL,
    event_id       uuid         NOT NULL,
    event_type     text         NOT NULL,
    source         text         NOT NULL,
    aggregate_type text         NOT NULL,
    aggregate_id   text         NOT NULL,
    payload        jsonb,
    payload_bytes  bytea,
    content_type   text         NOT NULL,
    topic          text,
    partition_key  text,
    headers        jsonb,
    occurred_at    timestamptz  NOT NULL,
    created_at     timestamptz  NOT NULL,
    retry_count    int          NOT NULL DEFAULT 0,
    last_error     text,
    error_class    text,
    failed_at      timestamptz  NOT NULL DEFAULT now(),
    next_retry_at  timestamptz  NOT NULL DEFAULT now(),
    status         text         NOT NULL,
    held           boolean      NOT NULL DEFAULT false,
    resolved_at    timestamptz,
    resolved_by    text,
    resolution     text,
    size           int          NOT NULL DEFAULT 65536,
    place          text         NOT NULL DEFAULT '',
    sent_partition int,
    sent_offset    bigint,
    sent_at        timestamptz,
    batch          bigint       DEFAULT nullif(current_setting('outbox.batch', true), '')::bigint,
    expires_at     timestamptz,
    CONSTRAINT outbox_failed_lengths CHECK (
        char_length(relay) <= 100 AND char_length(event_type) <= 100 AND char_length(source) <= 100
        AND char_length(aggregate_type) <= 100 AND char_length(aggregate_id) <= 255
        AND char_length(content_type) <= 100 AND char_length(topic) <= 249 AND char_length(partition_key) <= 255
        AND char_length(error_class) <= 40 AND char_length(resolved_by) <= 100 AND char_length(place) <= 260),
    CONSTRAINT outbox_failed_status CHECK (status IN ('waiting', 'failed', 'parked', 'dead', 'resolved')),
    CONSTRAINT outbox_failed_one_payload CHECK (
        num_nonnulls(payload, payload_bytes) = (content_type <> '')::int
        OR num_nonnulls(payload, payload_bytes) = 0 AND coalesce(error_class, '') = 'unreadable_row'),
    CONSTRAINT uk_outbox_failed UNIQUE (relay, outbox_id, event_id)
);

-- Events that are due, by the topic or partition that they wait for.
CREATE INDEX idx_outbox_failed_retry ON outbox_failed (relay, place, next_retry_at, outbox_id)
 WHERE status IN ('waiting', 'failed');
-- The open events of a key, and the heads among them: all others are parked behind a head.
CREATE INDEX idx_outbox_failed_parking ON outbox_failed (relay, parking_key, outbox_id)
 WHERE status IN ('waiting', 'failed', 'parked', 'dead');
CREATE INDEX idx_outbox_failed_heads ON outbox_failed (relay, parking_key, outbox_id)
 WHERE status IN ('waiting', 'failed');
-- Retention removes resolved events, and keeps the rows of outbox whose events no relay could read until an operator
-- has resolved them.
CREATE INDEX idx_outbox_failed_resolved ON outbox_failed (resolved_at) WHERE status = 'resolved';
CREATE INDEX idx_outbox_failed_unreadable ON outbox_failed (outbox_id)
 WHERE error_class = 'unreadable_row' AND status <> 'resolved';
-- Dead events for operators; in the order of time, for alerts; and by class, for RetryDeadAfter.
CREATE INDEX idx_outbox_failed_dead ON outbox_failed (id) WHERE status = 'dead';
CREATE INDEX idx_outbox_failed_deaths ON outbox_failed (next_retry_at, id) WHERE status = 'dead';
CREATE INDEX idx_outbox_failed_dead_class ON outbox_failed (relay, error_class, next_retry_at) WHERE status = 'dead';
-- Alerts, metrics and operators count failed events, which may be a million rows. They find the kinds that there are,
-- and stop counting each at 10,000, so everything that they read is in the index.
CREATE INDEX idx_outbox_failed_kinds ON outbox_failed (relay, status, event_type, error_class, failed_at);
-- A relay that sends exactly once removes the rows of transactions that were aborted.
CREATE INDEX idx_outbox_failed_batch ON outbox_failed (relay, batch) WHERE batch IS NOT NULL;
CREATE INDEX idx_outbox_failed_held ON outbox_failed (relay, parking_key, status)
 WHERE held AND status IN ('waiting', 'failed', 'parked', 'dead');

COMMENT ON TABLE outbox_failed IS
    'Events that did not reach Kafka at the first attempt, with their whole envelope: a retry never reads outbox.';
COMMENT ON COLUMN outbox_failed.id IS 'Order of the failures.';
COMMENT ON COLUMN outbox_failed.relay IS 'The relay that sends the event.';
COMMENT ON COLUMN outbox_failed.outbox_id IS 'outbox.id of the event; the order in which a key is sent again.';
COMMENT ON COLUMN outbox_failed.parking_key IS
    'Topic, a slash, and the record key: later events with the same topic and key wait behind this one.';
COMMENT ON COLUMN outbox_failed.event_id IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.event_type IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.source IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.aggregate_type IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.aggregate_id IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.payload IS
    'As in outbox; neither this nor payload_bytes is set if PostgreSQL could not read the row, which then is in '
    'outbox only.';
COMMENT ON COLUMN outbox_failed.payload_bytes IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.content_type IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.topic IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.partition_key IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.headers IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.occurred_at IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.created_at IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.retry_count IS 'Retries that Kafka refused. Outages do not count.';
COMMENT ON COLUMN outbox_failed.last_error IS 'Error of Kafka or of the client at the last attempt.';
COMMENT ON COLUMN outbox_failed.error_class IS 'Class of the last error, for example message_too_large.';
COMMENT ON COLUMN outbox_failed.failed_at IS 'First failure.';
COMMENT ON COLUMN outbox_failed.next_retry_at IS 'Not sent again before this time; of a dead event, when it died.';
COMMENT ON COLUMN outbox_failed.status IS
    'waiting: for infrastructure, uncounted; failed: refused, tried again; parked: behind another event of its '
    'key; dead: not tried again until an operator acts; resolved: closed by an operator, expired, or sent and kept.';
COMMENT ON COLUMN outbox_failed.held IS
    'Its key waits for an operator: no event of the key is sent, and later ones are parked here.';
COMMENT ON COLUMN outbox_failed.resolved_at IS 'When it was resolved.';
COMMENT ON COLUMN outbox_failed.resolved_by IS 'The operator who resolved it.';
COMMENT ON COLUMN outbox_failed.resolution IS 'The operator''s note; expired; or sent, if the relay keeps events that it has sent.';
COMMENT ON COLUMN outbox_failed.size IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.place IS
    'What it waits for: a topic, or a partition as topic/number. Empty: nothing in particular.';
COMMENT ON COLUMN outbox_failed.batch IS
    'Exactly once: the Kafka transaction whose cursor record passes the event. If it is aborted, the row is removed.';
COMMENT ON COLUMN outbox_failed.sent_partition IS
    'Partition to which a retry has sent it; NULL if none has. Rows stay then only if the relay keeps them.';
COMMENT ON COLUMN outbox_failed.sent_offset IS 'Its offset there; NULL if Kafka has not told it.';
COMMENT ON COLUMN outbox_failed.sent_at IS 'Time of its record.';
COMMENT ON COLUMN outbox_failed.expires_at IS 'As in outbox. A dead event does not expire.';

-- +goose StatementBegin
SELECT outbox_define(current_schema(), ARRAY[

-- What the view outbox_pending shows. It is a function because outbox_partition replaces the table outbox, which a view
-- would not notice, and because a view cannot keep the planner from reading all published rows: an event that a relay
-- has not attempted is not below the transactions that its position saw in progress.
$function$
CREATE FUNCTION @schema@.outbox_pending_events() RETURNS TABLE (
    relay text, outbox_id bigint, event_id uuid, event_type text, topic text, key text, status text, error_class text,
    created_at timestamptz, since timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $body$
    SELECT s.relay, o.id, o.event_id, o.event_type, coalesce(o.topic, split_part(o.event_type, '.', 2) || '-events'),
        coalesce(o.partition_key, o.aggregate_id), 'pending', NULL::text, o.created_at, o.created_at
      FROM unnest(@schema@.outbox_relays()) AS names (relay)
     CROSS JOIN LATERAL (SELECT c.relay, c.snapshot, c.window_snapshot, c.last_processed_id FROM @schema@.outbox_cursor AS c
                          WHERE c.relay >= names.relay AND c.relay <= names.relay
                            AND c.id <= (SELECT coalesce(n.confirmed, n.id) FROM @schema@.outbox_cursor AS n
                                          WHERE n.relay >= names.relay AND n.relay <= names.relay ORDER BY n.relay DESC, n.id DESC LIMIT 1)
                          ORDER BY c.relay DESC, c.id DESC LIMIT 1) AS s
     CROSS JOIN LATERAL (SELECT e.* FROM @schema@.outbox AS e
                          WHERE e.xid >= pg_snapshot_xmin(s.snapshot) ORDER BY e.xid, e.id OFFSET 0) AS o
     WHERE NOT starts_with(s.relay, 'worker:') AND NOT pg_visible_in_snapshot(o.xid, s.snapshot)
       AND NOT coalesce(o.id <= s.last_processed_id AND pg_visible_in_snapshot(o.xid, s.window_snapshot), false)
     UNION ALL
    SELECT f.relay, f.outbox_id, f.event_id, f.event_type, split_part(f.parking_key, '/', 1),
        substr(f.parking_key, strpos(f.parking_key, '/') + 1), f.status, f.error_class, f.created_at, f.failed_at
      FROM @schema@.outbox_failed AS f WHERE f.status <> 'resolved'
$body$
$function$,

$view$
CREATE VIEW @schema@.outbox_pending AS SELECT p.* FROM @schema@.outbox_pending_events() AS p
$view$
], '{}'::text[]);
-- +goose StatementEnd

COMMENT ON VIEW outbox_pending IS
    'What each relay has not sent yet: a row for each relay and event. A relay that has never led has no rows.';
COMMENT ON COLUMN outbox_pending.relay IS 'The relay that has not sent it.';
COMMENT ON COLUMN outbox_pending.outbox_id IS 'outbox.id.';
COMMENT ON COLUMN outbox_pending.event_id IS 'Id of the event.';
COMMENT ON COLUMN outbox_pending.event_type IS 'Type of the event.';
COMMENT ON COLUMN outbox_pending.topic IS 'Topic to which it is to go.';
COMMENT ON COLUMN outbox_pending.key IS 'Key of its record.';
COMMENT ON COLUMN outbox_pending.error_class IS 'As in outbox_failed; NULL if it was not attempted.';
COMMENT ON COLUMN outbox_pending.created_at IS 'When its transaction began.';
COMMENT ON COLUMN outbox_pending.status IS
    'pending: not attempted; else as in outbox_failed: waiting, failed, parked or dead.';
COMMENT ON COLUMN outbox_pending.since IS
    'Since when it waits: when its transaction began or, if it is in outbox_failed, when it first failed.';
