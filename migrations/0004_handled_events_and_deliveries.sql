-- +goose Up

-- What consumer groups have handled, where they read, and what they still have to handle.

CREATE TABLE event_handled (
    id             bigserial    PRIMARY KEY,
    consumer_group text         NOT NULL,
    aggregate_type text         NOT NULL,
    aggregate_id   text         NOT NULL,
    action         text         NOT NULL,
    handled_at     timestamptz  NOT NULL DEFAULT now(),
    event_source   text,
    answer         bytea,
    CONSTRAINT event_handled_lengths CHECK (
        char_length(consumer_group) <= 255 AND char_length(aggregate_type) <= 100
        AND char_length(aggregate_id) <= 255 AND char_length(action) <= 100 AND char_length(event_source) <= 255
        AND octet_length(answer) BETWEEN 32 AND 65568),
    CONSTRAINT uk_event_handled UNIQUE (consumer_group, aggregate_type, aggregate_id, action)
);

COMMENT ON TABLE event_handled IS
    'What a consumer group has handled already, committed together with the effect, so that a repeated event is '
    'skipped. Also messages that an inbox has handled, which do not come through Kafka.';
COMMENT ON COLUMN event_handled.id IS 'Order of handling.';
COMMENT ON COLUMN event_handled.consumer_group IS
    'The group that has handled it. Groups in one database do not share these rows. inbox: and a name: an inbox.';
COMMENT ON COLUMN event_handled.aggregate_type IS
    'First part of the idempotency key: the event type, or what the handler chose, for example Order. The source of a '
    'message of an inbox.';
COMMENT ON COLUMN event_handled.aggregate_id IS
    'Second part: the id of the event, or what the handler chose, for example the order''s id or '
    '{productId}_{eventId}.';
COMMENT ON COLUMN event_handled.action IS 'Third part: the action, for example SALES_COUNT_INCREASED.';
COMMENT ON COLUMN event_handled.handled_at IS
    'When it was handled; or when an event of another source with the same id was: that has a row of its own, '
    'which this one must outlive.';
COMMENT ON COLUMN event_handled.event_source IS
    'Source of the event: two events with the same id from two sources are two events. The digest of a longer '
    'source. NULL: a handler chose the key, which stands for events of all sources; or it is a message of an inbox.';
COMMENT ON COLUMN event_handled.answer IS
    'What an inbox answered to the message: 32 bytes, the SHA-256 digest of the request or zeros, and the answer. NULL '
    'without both. It has to be the eighth column at most: nine would make each row of an event 8 bytes larger.';

CREATE TABLE consumer_start (
    consumer_group text         NOT NULL,
    topic          text         NOT NULL,
    topic_id       uuid         NOT NULL,
    partition      int          NOT NULL,
    start_offset   bigint,
    position       bigint,
    saved_at       timestamptz  NOT NULL DEFAULT now(),
    lost           bigint       NOT NULL DEFAULT 0,
    lost_at        timestamptz,
    handlers       bigint       NOT NULL DEFAULT 0,
    assigned_to    uuid,
    assigned_at    timestamptz,
    read_from      bigint,
    unclean_ends   int          NOT NULL DEFAULT 0,
    suspect_offset bigint,
    suspect_ends   int          NOT NULL DEFAULT 0,
    starting       boolean      NOT NULL DEFAULT false,
    CONSTRAINT consumer_start_lengths CHECK (char_length(consumer_group) <= 255 AND char_length(topic) <= 249),
    CONSTRAINT consumer_start_pkey PRIMARY KEY (consumer_group, topic, topic_id, partition),
    CONSTRAINT consumer_start_partition CHECK (partition >= -1 AND (partition = -1) = (start_offset IS NULL))
);

COMMENT ON TABLE consumer_start IS
    'Where consumer groups begin to read, because Kafka cannot say whether a group is new. A partition that is not '
    'listed was added later, and is read from its beginning.';
COMMENT ON COLUMN consumer_start.consumer_group IS 'As in event_handled.';
COMMENT ON COLUMN consumer_start.topic IS 'Name of the topic.';
COMMENT ON COLUMN consumer_start.topic_id IS
    'Kafka''s id of the topic: a topic that is deleted and created again has another id. Zero if the topic did not '
    'exist when the group first looked for it.';
COMMENT ON COLUMN consumer_start.partition IS 'Number of the partition; -1 says only that the topic is listed.';
COMMENT ON COLUMN consumer_start.start_offset IS 'Offset with which the group begins.';
COMMENT ON COLUMN consumer_start.position IS
    'Offset of the next record to handle, saved once a minute; NULL until the group has begun with the partition. '
    'Used only if Kafka has no committed offset.';
COMMENT ON COLUMN consumer_start.saved_at IS 'When position was saved.';
COMMENT ON COLUMN consumer_start.lost IS 'Number of offsets that Kafka had removed before the group came to them.';
COMMENT ON COLUMN consumer_start.lost_at IS 'When the group last found removed offsets.';
COMMENT ON COLUMN consumer_start.handlers IS
    'How often members have registered handlers of the topic, in the row with partition -1.';
COMMENT ON COLUMN consumer_start.assigned_to IS
    'The membership that the partition was assigned to last. NULL once it has ended cleanly: it was stopped, or has lost '
    'the partition in a rebalance.';
COMMENT ON COLUMN consumer_start.assigned_at IS 'When the partition was assigned last.';
COMMENT ON COLUMN consumer_start.read_from IS 'Offset at which reading began then.';
COMMENT ON COLUMN consumer_start.unclean_ends IS
    'How often memberships that began to read at read_from have ended uncleanly. After three, the next records are '
    'handled alone.';
COMMENT ON COLUMN consumer_start.suspect_offset IS 'Offset of the record that is handled alone, or was last.';
COMMENT ON COLUMN consumer_start.suspect_ends IS
    'How often processes have ended at suspect_offset. After three, that record is not decoded and gets a dead letter.';
COMMENT ON COLUMN consumer_start.starting IS
    'The group gets the events of an archive first: no member begins to read the topic. In the row with partition -1.';

CREATE TABLE consumer_handler (
    consumer_group text         NOT NULL,
    topic          text         NOT NULL,
    action         text         NOT NULL,
    event_type     text         NOT NULL,
    registered_at  timestamptz  NOT NULL DEFAULT now(),
    CONSTRAINT consumer_handler_lengths CHECK (
        char_length(consumer_group) <= 255 AND char_length(topic) <= 249 AND char_length(action) <= 100
        AND char_length(event_type) <= 100),
    CONSTRAINT consumer_handler_pkey PRIMARY KEY (consumer_group, topic, action, event_type)
);

COMMENT ON TABLE consumer_handler IS
    'The handlers of consumer groups, until an operator removes them. A member that does not have one of them notes in '
    'consumer_gap where it begins to read.';
COMMENT ON COLUMN consumer_handler.consumer_group IS 'As in event_handled.';
COMMENT ON COLUMN consumer_handler.topic IS 'The topic from which the handler gets events.';
COMMENT ON COLUMN consumer_handler.action IS 'As in event_handled.';
COMMENT ON COLUMN consumer_handler.event_type IS 'The type of the events, as they are received.';
COMMENT ON COLUMN consumer_handler.registered_at IS 'When the first member with this handler ran.';

CREATE TABLE consumer_gap (
    consumer_group text         NOT NULL,
    topic          text         NOT NULL,
    topic_id       uuid         NOT NULL,
    partition      int          NOT NULL,
    action         text         NOT NULL,
    event_type     text         NOT NULL,
    from_offset    bigint       NOT NULL,
    version        bigint       NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
    opened_at      timestamptz  NOT NULL DEFAULT now(),
    CONSTRAINT consumer_gap_lengths CHECK (
        char_length(consumer_group) <= 255 AND char_length(topic) <= 249 AND char_length(action) <= 100
        AND char_length(event_type) <= 100),
    CONSTRAINT consumer_gap_pkey PRIMARY KEY (consumer_group, topic, topic_id, partition, action, event_type)
);

COMMENT ON TABLE consumer_gap IS
    'Handlers that may have missed events of a partition, because members without them have committed offsets. The next '
    'member with the handler that gets the partition reads from from_offset to the committed offset, for this handler.';
COMMENT ON COLUMN consumer_gap.consumer_group IS 'As in event_handled.';
COMMENT ON COLUMN consumer_gap.topic IS 'Name of the topic.';
COMMENT ON COLUMN consumer_gap.topic_id IS 'As in consumer_start.';
COMMENT ON COLUMN consumer_gap.partition IS 'Number of the partition.';
COMMENT ON COLUMN consumer_gap.action IS 'As in consumer_handler.';
COMMENT ON COLUMN consumer_gap.event_type IS 'As in consumer_handler.';
COMMENT ON COLUMN consumer_gap.from_offset IS 'The handler has handled all its events before this offset.';
COMMENT ON COLUMN consumer_gap.version IS
    'Grows when a member without the handler gets the partition. A member that has read the gap removes the row only if '
    'the version is still the same.';
COMMENT ON COLUMN consumer_gap.opened_at IS 'When the first member without the handler began to read.';

CREATE TABLE consumer_pause (
    consumer_group text         NOT NULL,
    topic          text         NOT NULL,
    operator       text         NOT NULL,
    reason         text         NOT NULL,
    paused_at      timestamptz  NOT NULL DEFAULT now(),
    CONSTRAINT consumer_pause_lengths CHECK (
        char_length(consumer_group) <= 255 AND char_length(topic) <= 249 AND char_length(operator) <= 100),
    CONSTRAINT consumer_pause_pkey PRIMARY KEY (consumer_group, topic)
);

COMMENT ON TABLE consumer_pause IS
    'Topics that operators have paused. All members of a group read it every few seconds, and handle nothing of a '
    'topic until its row is gone.';
COMMENT ON COLUMN consumer_pause.consumer_group IS 'As in event_handled.';
COMMENT ON COLUMN consumer_pause.topic IS 'The topic that is paused; empty: all topics of the group.';
COMMENT ON COLUMN consumer_pause.operator IS 'The operator who paused it.';
COMMENT ON COLUMN consumer_pause.reason IS 'The operator''s note.';
COMMENT ON COLUMN consumer_pause.paused_at IS 'When it was paused.';

CREATE TABLE event_subscription (
    consumer_group text         NOT NULL,
    created_at     timestamptz  NOT NULL DEFAULT now(),
    state          text         NOT NULL DEFAULT 'active',
    relay          text,
    changed_at     timestamptz  NOT NULL DEFAULT now(),
    routes         jsonb        NOT NULL DEFAULT '{}',
    routes_version bigint       NOT NULL DEFAULT 0,
    unordered      boolean      NOT NULL DEFAULT false,
    started        bigint,
    CONSTRAINT event_subscription_lengths CHECK (char_length(consumer_group) <= 255 AND char_length(relay) <= 100),
    CONSTRAINT event_subscription_pkey PRIMARY KEY (consumer_group),
    CONSTRAINT event_subscription_state CHECK (state IN ('active', 'leaving', 'left', 'returning', 'starting')),
    CONSTRAINT event_subscription_relay CHECK ((state IN ('active', 'starting')) = (relay IS NULL)),
    CONSTRAINT event_subscription_started CHECK ((state = 'starting') = (started IS NOT NULL))
);

COMMENT ON TABLE event_subscription IS
    'Consumer groups whose workers get events from outbox. Their positions are in outbox_cursor.';
COMMENT ON COLUMN event_subscription.consumer_group IS 'As in event_handled.';
COMMENT ON COLUMN event_subscription.created_at IS 'When the first worker of the group ran.';
COMMENT ON COLUMN event_subscription.state IS
    'active: its workers get every event; leaving: those before the cutover; left: none, it reads from Kafka; '
    'returning: those behind its cursor, once it has read the rest from Kafka; starting: those behind its cursor, once '
    'it has deliveries of all events in front of it, of the archive too.';
COMMENT ON COLUMN event_subscription.relay IS
    'The relay that sends the events of the group to Kafka; NULL if the group is active. While the group is '
    'leaving, the position of the relay is the cutover.';
COMMENT ON COLUMN event_subscription.changed_at IS 'When state changed.';
COMMENT ON COLUMN event_subscription.routes IS
    'The handlers of its workers: event type, stream and action, with line breaks between them, and when a worker '
    'last had that handler, in seconds since 1970.';
COMMENT ON COLUMN event_subscription.routes_version IS 'Digest of the handlers in routes.';
COMMENT ON COLUMN event_subscription.unordered IS
    'Its workers handle the events of a key in any order, as the last one says that has confirmed its handlers. Such a '
    'group is not moved to Kafka or back, because consumers keep the order.';
COMMENT ON COLUMN event_subscription.started IS
    'outbox.id up to which a group that is starting has deliveries; NULL in all other states.';

CREATE TABLE event_member (
    consumer_group text         NOT NULL,
    member         text         NOT NULL,
    from_kafka     boolean      NOT NULL,
    started_at     timestamptz  NOT NULL DEFAULT now(),
    renewed_at     timestamptz  NOT NULL,
    renewed_every  interval     NOT NULL,
    routes         text[]       NOT NULL,
    works          boolean      NOT NULL DEFAULT true,
    reasons        text[]       NOT NULL DEFAULT '{}',
    skipped        jsonb        NOT NULL DEFAULT '{}',
    state          jsonb        NOT NULL DEFAULT '{}',
    kafka_at       timestamptz,
    CONSTRAINT event_member_lengths CHECK (char_length(consumer_group) <= 255 AND char_length(member) <= 255 AND char_length(state::text) <= 100000
                                           AND char_length(skipped::text) <= 1000000 AND pg_column_size(reasons) <= 100000),
    CONSTRAINT event_member_renewed_every CHECK (renewed_every BETWEEN '0' AND '100 years'),
    CONSTRAINT event_member_pkey PRIMARY KEY (consumer_group, member)
);

COMMENT ON TABLE event_member IS
    'The running processes of each consumer group, and which deliveries they can handle. A process is live if its row '
    'was renewed within three intervals.';
COMMENT ON COLUMN event_member.consumer_group IS 'As in event_handled.';
COMMENT ON COLUMN event_member.member IS 'Host, process id and a random part, as in event_delivery.locked_by.';
COMMENT ON COLUMN event_member.from_kafka IS
    'The process is a consumer, which handles parked events from Kafka. Otherwise it is a worker.';
COMMENT ON COLUMN event_member.started_at IS 'When the process began.';
COMMENT ON COLUMN event_member.renewed_at IS 'When the process last renewed the row.';
COMMENT ON COLUMN event_member.renewed_every IS 'How often the process renews the row.';
COMMENT ON COLUMN event_member.routes IS
    'Its handlers: event type, stream and action, with line breaks between them.';
COMMENT ON COLUMN event_member.works IS 'Whether the process handled events when it renewed the row.';
COMMENT ON COLUMN event_member.reasons IS
    'What its Health said then about itself: why it did not work, breakers that are not closed, pauses.';
COMMENT ON COLUMN event_member.skipped IS
    'How many events it has skipped since it began because it has no handler for their type, by type.';
COMMENT ON COLUMN event_member.state IS
    'What the process said then about breakers and outages, with their classes and since when.';
COMMENT ON COLUMN event_member.kafka_at IS 'When Kafka last answered the process. A worker asks no Kafka.';

CREATE TABLE event_success (
    consumer_group text         NOT NULL,
    action         text         NOT NULL,
    succeeded_at   timestamptz  NOT NULL,
    CONSTRAINT event_success_lengths CHECK (char_length(consumer_group) <= 255 AND char_length(action) <= 100),
    CONSTRAINT event_success_pkey PRIMARY KEY (consumer_group, action)
);

COMMENT ON TABLE event_success IS
    'When actions of consumer groups have last succeeded, saved every few seconds: an event that fails is a bad one only '
    'if others succeed meanwhile.';
COMMENT ON COLUMN event_success.consumer_group IS 'As in event_handled.';
COMMENT ON COLUMN event_success.action IS 'As in event_handled.';
COMMENT ON COLUMN event_success.succeeded_at IS 'When the last call of the handler began that has succeeded.';

CREATE TABLE event_delivery (
    -- The order within a key, and the state of the row.
    id                 bigserial    PRIMARY KEY,
    position           bigint       NOT NULL,
    order_key          bigint,
    attempt_count      int          NOT NULL,
    max_attempts       int          NOT NULL,
    size               int          NOT NULL DEFAULT 65536,
    held               boolean      NOT NULL DEFAULT false,
    put_back           boolean      NOT NULL DEFAULT false,
    dead_letter_owed   boolean      NOT NULL DEFAULT false,
    next_retry_at      timestamptz  NOT NULL,
    last_attempt_at    timestamptz,
    locked_until       timestamptz,
    created_at         timestamptz  NOT NULL,
    updated_at         timestamptz  NOT NULL,
    processed_at       timestamptz,
    failed_at          timestamptz,
    witness_after      timestamptz,
    -- The event and its handler. Columns of a fixed size come first, so that rows need no padding.
    occurred_at        timestamptz  NOT NULL,
    recorded_at        timestamptz  NOT NULL,
    event_id           uuid         NOT NULL,
    status             text         NOT NULL,
    consumer_group     text         NOT NULL,
    action             text         NOT NULL,
    stream             text         NOT NULL,
    event_type         text         NOT NULL,
    source             text         NOT NULL,
    aggregate_type     text         NOT NULL,
    aggregate_id       text         NOT NULL,
    content_type       text         NOT NULL,
    partition_key      text,
    -- The worker and the last error.
    locked_by          text,
    last_error_code    text,
    last_error_message text,
    -- The resolution of a DEAD row: all three are set, or none.
    resolved_by        text,
    resolved_at        timestamptz,
    note               text,
    -- The rest of the event.
    headers            jsonb,
    payload            jsonb,
    payload_bytes      bytea,
    -- The record from Kafka, of a row that a consumer has parked.
    record_partition   int,
    record_id          text,
    record_digest      bytea,
    record             bytea,
    dead_letter        text,
    CONSTRAINT event_delivery_lengths CHECK (
        char_length(consumer_group) <= 255 AND char_length(action) <= 100 AND char_length(stream) <= 249
        AND char_length(event_type) <= 100 AND char_length(source) <= 100 AND char_length(aggregate_type) <= 100
        AND char_length(aggregate_id) <= 255 AND char_length(content_type) <= 100
        AND char_length(partition_key) <= 255 AND char_length(locked_by) <= 255
        AND char_length(last_error_code) <= 100 AND char_length(resolved_by) <= 100),
    CONSTRAINT event_delivery_status CHECK (status IN ('PENDING', 'PARKED', 'PROCESSING', 'DONE', 'DEAD')),
    CONSTRAINT event_delivery_locked CHECK (
        (status = 'PROCESSING') = (locked_by IS NOT NULL) AND (locked_by IS NULL) = (locked_until IS NULL)),
    CONSTRAINT event_delivery_held CHECK (NOT (held OR dead_letter_owed) OR status = 'DEAD'),
    CONSTRAINT event_delivery_one_payload CHECK (
        num_nonnulls(payload, payload_bytes) = (content_type <> '' OR record IS NOT NULL)::int),
    CONSTRAINT event_delivery_record CHECK (
        num_nulls(record_partition, record_digest, record) IN (0, 3) AND (record IS NOT NULL OR record_id IS NULL))
);

-- Rows that are due, by action, stream and type: a process reads no entry of actions that are paused, or of types for
-- which it has no handler. Workers and consumers claim the rows of each other, because a group may have moved since they
-- were made. Rows without an action are for all processes of the stream. Rows whose worker was gone are claimed by
-- themselves.
CREATE INDEX idx_event_delivery_due ON event_delivery
       (consumer_group, action, stream, (CASE WHEN action = '' THEN '' ELSE event_type END),
        (coalesce(last_error_code, '') = 'stale'), next_retry_at, id)
 WHERE status = 'PENDING';
-- An event from Kafka that waits for an action, or is DEAD for it, is neither handled by a consumer nor parked again.
CREATE UNIQUE INDEX idx_event_delivery_record ON event_delivery (consumer_group, action, record_digest)
 WHERE status <> 'DONE' AND record_digest IS NOT NULL;
-- The open rows of a key, in their order: those that others wait for, and those that wait. PostgreSQL removes no entry
-- of a row that has changed since while any transaction is open. So they are read from an id on below which no row of
-- the key is open. Only a row that was put back may be below it.
CREATE INDEX idx_event_delivery_head ON event_delivery (order_key, id)
 WHERE (status IN ('PENDING', 'PROCESSING') OR held) AND order_key IS NOT NULL;
CREATE INDEX idx_event_delivery_parked ON event_delivery (order_key, id)
 WHERE status = 'PARKED' AND order_key IS NOT NULL;
CREATE INDEX idx_event_delivery_put_back ON event_delivery (order_key, (status = 'PARKED'), id)
 WHERE put_back AND (status IN ('PENDING', 'PARKED', 'PROCESSING') OR held) AND order_key IS NOT NULL;
-- Rows that were parked or put back, and are DONE, by time. A consumer looks for those since its transaction began.
CREATE INDEX idx_event_delivery_done_again ON event_delivery (order_key, processed_at)
 WHERE status = 'DONE' AND (put_back OR record_digest IS NOT NULL) AND order_key IS NOT NULL;
-- Leases that have expired.
CREATE INDEX idx_event_delivery_locked ON event_delivery (consumer_group, locked_until) WHERE status = 'PROCESSING';
-- DEAD rows for operators; and in the order of time, for alerts.
CREATE INDEX idx_event_delivery_dead ON event_delivery (consumer_group, id) WHERE status = 'DEAD';
CREATE INDEX idx_event_delivery_deaths ON event_delivery (processed_at, id)
 WHERE status = 'DEAD' AND resolved_at IS NULL;
-- Dead letters that a consumer has to send.
CREATE INDEX idx_event_delivery_dead_letter ON event_delivery (consumer_group, next_retry_at)
 WHERE dead_letter_owed AND resolved_at IS NULL;
-- Rows that wait, and DEAD rows that nobody has resolved: they are counted by kind, and listed by id within a kind. A
-- row that is claimed when it is made, and then DONE, is never in this index.
CREATE INDEX idx_event_delivery_waiting ON event_delivery (consumer_group, action, stream, status, id)
 WHERE status IN ('PENDING', 'PARKED', 'DEAD') AND resolved_at IS NULL;

COMMENT ON TABLE event_delivery IS
    'Events that handlers have to handle. Workers have a row for each event, consumer group and action, with the '
    'whole event; consumers have one for each event that an action could not handle, and for those behind it.';
COMMENT ON COLUMN event_delivery.id IS 'Order in which the rows were made: the order within a key.';
COMMENT ON COLUMN event_delivery.position IS 'outbox.id of the event, or the offset of the record that brought it.';
COMMENT ON COLUMN event_delivery.order_key IS
    'Digest of group, action, stream and record key: rows with the same key are handled one after the other. NULL: '
    'the order does not matter.';
COMMENT ON COLUMN event_delivery.attempt_count IS
    'Attempts, counted at the claim. One whose worker is gone is taken back, unless last_attempt_at is later than '
    'updated_at.';
COMMENT ON COLUMN event_delivery.max_attempts IS
    'After so many attempts the row is DEAD. It is stored because the retry policy belongs to the worker that made it.';
COMMENT ON COLUMN event_delivery.size IS
    'As in outbox: workers and consumers claim as many rows as their memory has room for, without reading their '
    'payloads.';
COMMENT ON COLUMN event_delivery.held IS 'The key of this DEAD row waits for an operator.';
COMMENT ON COLUMN event_delivery.put_back IS
    'The row is open again although later rows of its key may be handled: its worker was gone, or an operator has '
    'requeued it. Such rows are looked for below the first open row of a key.';
COMMENT ON COLUMN event_delivery.dead_letter_owed IS
    'The dead letter of this DEAD row from Kafka is not sent yet, because the process that made it DEAD was a worker. The '
    'next consumer of the group sends it.';
COMMENT ON COLUMN event_delivery.next_retry_at IS
    'A PENDING row is not claimed before, and the dead letter of a DEAD one is not sent before.';
COMMENT ON COLUMN event_delivery.last_attempt_at IS
    'When the row was claimed last. Later than updated_at: when the handler of a PROCESSING row began.';
COMMENT ON COLUMN event_delivery.locked_until IS
    'End of the lease of a PROCESSING row. Its worker renews it; afterwards another worker may take the row over.';
COMMENT ON COLUMN event_delivery.created_at IS 'When the row was made.';
COMMENT ON COLUMN event_delivery.updated_at IS 'When the status changed last.';
COMMENT ON COLUMN event_delivery.processed_at IS 'When the row became DONE or DEAD: retention and alerts go by it.';
COMMENT ON COLUMN event_delivery.failed_at IS
    'When the handler failed first.';
COMMENT ON COLUMN event_delivery.witness_after IS
    'When a failure counted last; NULL means failed_at. The next one counts only if another event of the action has succeeded since.';
COMMENT ON COLUMN event_delivery.occurred_at IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.recorded_at IS
    'outbox.created_at of the event, or the time of the record that brought it.';
COMMENT ON COLUMN event_delivery.event_id IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.status IS
    'PENDING: due at next_retry_at; PARKED: behind an open row of its key; PROCESSING: claimed by a worker; DONE: '
    'handled; DEAD: not tried again until an operator acts.';
COMMENT ON COLUMN event_delivery.consumer_group IS 'As in event_handled.';
COMMENT ON COLUMN event_delivery.action IS
    'The handler of the event, as in event_handled; empty if the group has none for its type.';
COMMENT ON COLUMN event_delivery.stream IS 'The topic that the event has in Kafka, or came from.';
COMMENT ON COLUMN event_delivery.event_type IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.source IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.aggregate_type IS 'As in outbox; of an event from Kafka its attribute aggregatetype, or empty.';
COMMENT ON COLUMN event_delivery.aggregate_id IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.content_type IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.partition_key IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.locked_by IS
    'The claim of a PROCESSING row: host, process id and a random part of the worker, and the number of the claim. '
    'A worker whose claim was lost changes no row.';
COMMENT ON COLUMN event_delivery.last_error_code IS
    'Class of the last error, for example timeout. stale: its worker was gone, and the row is claimed by itself.';
COMMENT ON COLUMN event_delivery.last_error_message IS 'Text of the last error.';
COMMENT ON COLUMN event_delivery.resolved_by IS 'The operator who has resolved the DEAD row.';
COMMENT ON COLUMN event_delivery.resolved_at IS 'When the operator resolved it; NULL: nobody has.';
COMMENT ON COLUMN event_delivery.note IS 'The operator''s note.';
COMMENT ON COLUMN event_delivery.headers IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.payload IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.payload_bytes IS 'As in outbox, or the value of the record that brought the event.';
COMMENT ON COLUMN event_delivery.record_partition IS
    'The partition of the record that brought the event; NULL if it came from outbox.';
COMMENT ON COLUMN event_delivery.record_id IS
    'The id of an event from Kafka if it is not a UUID; event_id is derived from it then.';
COMMENT ON COLUMN event_delivery.record_digest IS
    'Digest of source, id and received type of an event from Kafka, which are longer than an index entry may be: it '
    'finds the row of an event that is received again.';
COMMENT ON COLUMN event_delivery.record IS
    'Key, headers and time of the record that brought the event, as JSON: together with payload_bytes it is the '
    'record.';
COMMENT ON COLUMN event_delivery.dead_letter IS
    'The dead letter of a large record that is DEAD: topic-partition-offset. It alone has the value, payload_bytes is '
    'empty. A replay of the dead letter writes the value back. NULL: the row has the value.';

-- Functions over the keys of event_delivery, for workers, consumers and operators. They run with the rights of their
-- caller. A transaction that inserts, ends or requeues rows of a key locks the key first, and decides in a later
-- statement, which sees everything that was committed before it had the lock.
-- +goose StatementBegin
SELECT outbox_define(current_schema(), fragments => ARRAY[

-- The locks of order_keys. A group has 64 locks, which are taken in this order.
'locks', $sql$
        SELECT DISTINCT base | (k & 63)
          FROM unnest(order_keys) AS k,
               (SELECT ('x' || encode(substr(sha256(
                            convert_to('outbox.event_delivery.' || @schema_name@ || '.' || $1, 'UTF8')
                        ), 1, 8), 'hex'))::bit(64)::bigint & ~63::bigint AS base OFFSET 0) AS b
         WHERE k IS NOT NULL
         ORDER BY 1
$sql$,

-- Makes the first row of each of order_keys PENDING if all open rows of the key are PARKED. floors has an id for each
-- key: no row of the key is open below it, except for rows that were put back. skipped says whether a row is open below
-- the ids. Unless promotes is true, it only says that. Keys are compared as ranges: with "=" the primary key, of which
-- every entry would be read, would look as good as the index of keys while the table is empty.
'promote', $sql$
    WITH looked AS MATERIALIZED (
        SELECT head.id AS head, back.status AS back, least(waiting.id, back.id) AS next,
               least(CASE WHEN NOT head.put_back THEN head.id END,
                     CASE WHEN NOT waiting.put_back THEN waiting.id END) < each.id AS before
          FROM (SELECT e.k, coalesce(min(e.f), 0) AS f, min(e.i) AS id
                  FROM unnest(order_keys, floors, ids) AS e (k, f, i)
                 WHERE e.k IS NOT NULL GROUP BY e.k) AS each
          LEFT JOIN LATERAL (
               SELECT o.id, o.put_back FROM @schema@.event_delivery AS o
                WHERE (o.order_key, o.id) >= (each.k, each.f) AND o.order_key <= each.k
                  AND (o.status IN ('PENDING', 'PROCESSING') OR o.held) AND o.consumer_group = $1
                ORDER BY o.order_key, o.id LIMIT 1) AS head ON true
          LEFT JOIN LATERAL (
               SELECT o.id, o.status FROM @schema@.event_delivery AS o
                WHERE o.order_key = each.k AND o.put_back
                  AND (o.status IN ('PENDING', 'PARKED', 'PROCESSING') OR o.held) AND o.consumer_group = $1
                ORDER BY o.order_key, (o.status = 'PARKED'), o.id LIMIT 1) AS back ON true
          LEFT JOIN LATERAL (
               SELECT o.id, o.put_back FROM @schema@.event_delivery AS o
                WHERE (o.order_key, o.id) >= (each.k, each.f) AND o.order_key <= each.k
                  AND o.status = 'PARKED' AND o.consumer_group = $1
                ORDER BY o.order_key, o.id LIMIT 1) AS waiting ON true
    ), promoted AS (
        UPDATE @schema@.event_delivery AS d
           SET status = 'PENDING', next_retry_at = clock_timestamp(), updated_at = clock_timestamp()
         WHERE d.status = 'PARKED'
           AND d.id = ANY (ARRAY(SELECT next FROM looked WHERE promotes AND head IS NULL AND coalesce(back, 'PARKED') = 'PARKED'))
     RETURNING 1
    )
    SELECT (SELECT count(*) FROM promoted), coalesce((SELECT bool_or(before) FROM looked), false) INTO done, skipped;
$sql$

], definitions => ARRAY[

-- Locks keys until the end of the transaction.
$function$
CREATE FUNCTION @schema@.outbox_lock_keys(consumer_group text, order_keys bigint[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    lock bigint;
BEGIN
    FOR lock IN @locks@ LOOP
        PERFORM pg_advisory_xact_lock(lock);
    END LOOP;
END $body$
$function$,

-- Locks keys against transactions that insert, promote or requeue rows of them, but not against those that end rows
-- or that only read. Returns whether a later statement of the transaction sees what others have committed before it.
$function$
CREATE FUNCTION @schema@.outbox_lock_keys_shared(consumer_group text, order_keys bigint[]) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    lock bigint;
BEGIN
    FOR lock IN @locks@ LOOP
        PERFORM pg_advisory_xact_lock_shared(lock);
    END LOOP;
    RETURN current_setting('transaction_isolation') = 'read committed';
END $body$
$function$,

-- Returns the numbers, from 1, of the events from Kafka that must not be handled directly: a row of their key is open;
-- or a row of their key was parked or put back, and is DONE since done_since, or NULL for since the transaction has begun; or the
-- event itself has a row that is not DONE. An event without order has no key. Mostly there are none, which four looks
-- show: three at all keys together, and one at each event, because two arrays would be looked up as each with each.
$function$
CREATE FUNCTION @schema@.outbox_blocked(
    consumer_group text, actions text[], order_keys bigint[], digests bytea[], done_since timestamptz) RETURNS int[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $body$
DECLARE
    since constant timestamptz := coalesce(done_since, now());
BEGIN
    -- No EXISTS: it has no ORDER BY, and would read the rows of a key that are done before it finds an open one.
    IF coalesce(
       (SELECT true FROM @schema@.event_delivery AS d
         WHERE d.order_key = ANY (order_keys) AND (d.status IN ('PENDING', 'PROCESSING') OR d.held)
           AND d.consumer_group = $1 ORDER BY d.order_key DESC, d.id DESC LIMIT 1),
       (SELECT true FROM @schema@.event_delivery AS d
         WHERE d.order_key = ANY (order_keys) AND d.status = 'PARKED'
           AND d.consumer_group = $1 ORDER BY d.order_key DESC, d.id DESC LIMIT 1),
       (SELECT true FROM @schema@.event_delivery AS d
         WHERE d.order_key = ANY (order_keys) AND d.status = 'DONE' AND (d.put_back OR d.record_digest IS NOT NULL)
           AND d.processed_at >= since AND d.consumer_group = $1 LIMIT 1),
       (SELECT true FROM unnest(actions, digests) AS e (action, digest)
         WHERE (SELECT true FROM @schema@.event_delivery AS d
                 WHERE d.consumer_group = $1 AND d.action = e.action AND d.record_digest = e.digest
                   AND d.status <> 'DONE' LIMIT 1) LIMIT 1)) IS NULL THEN
        RETURN '{}';
    END IF;
    RETURN ARRAY(
        SELECT e.n::int FROM unnest(actions, order_keys, digests) WITH ORDINALITY AS e (action, key, digest, n)
         WHERE coalesce(
               (SELECT true FROM @schema@.event_delivery AS d
                 WHERE d.order_key >= e.key AND d.order_key <= e.key AND (d.status IN ('PENDING', 'PROCESSING') OR d.held)
                   AND d.consumer_group = $1 ORDER BY d.order_key DESC, d.id DESC LIMIT 1),
               (SELECT true FROM @schema@.event_delivery AS d
                 WHERE d.order_key >= e.key AND d.order_key <= e.key AND d.status = 'PARKED'
                   AND d.consumer_group = $1 ORDER BY d.order_key DESC, d.id DESC LIMIT 1),
               (SELECT true FROM @schema@.event_delivery AS d
                 WHERE d.order_key >= e.key AND d.order_key <= e.key AND d.status = 'DONE'
                   AND (d.put_back OR d.record_digest IS NOT NULL) AND d.processed_at >= since
                   AND d.consumer_group = $1 ORDER BY d.order_key DESC, d.processed_at DESC LIMIT 1),
               (SELECT true FROM @schema@.event_delivery AS d
                 WHERE d.consumer_group = $1 AND d.action = e.action AND d.record_digest = e.digest
                   AND d.status <> 'DONE' LIMIT 1))
         ORDER BY e.n);
END $body$
$function$,

-- Locks keys, and makes the first row of each PENDING if all open rows of the key are PARKED. floors has an id for
-- each key below which no row is open, except for rows that were put back; without floors all rows are read. Returns
-- how many rows it changed. Under another isolation level than READ COMMITTED it would not see what others have
-- committed: then it changes nothing, and returns -1.
$function$
CREATE FUNCTION @schema@.outbox_promote(consumer_group text, order_keys bigint[], floors bigint[] DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $body$
DECLARE
    ids      constant bigint[] := NULL;
    promotes constant boolean := true;
    done     bigint;
    skipped  boolean;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN -1;
    END IF;
    PERFORM @schema@.outbox_lock_keys($1, $2);
    @promote@
    RETURN done;
END $body$
$function$,

-- Ends rows that a worker has handled, and promotes the next rows of their keys. order_keys and floors are those of
-- the rows; a row without order has no key. Either all rows are still claimed by this worker, and no row before them
-- in their keys is open, or nothing is changed and it is an error: after a crash PostgreSQL may have forgotten that
-- an earlier row was ended. Returns what outbox_promote returns.
--
-- Its locks are shared, because transactions that end rows need not wait for each other: no two of them have rows of
-- the same key. They wait for transactions that insert, promote or requeue rows of their keys, and those wait for
-- them.
$function$
CREATE FUNCTION @schema@.outbox_finish_deliveries(
    consumer_group text, worker text, ids bigint[], order_keys bigint[], floors bigint[]) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $body$
DECLARE
    promotes constant boolean := current_setting('transaction_isolation') = 'read committed';
    lock     bigint;
    done     bigint;
    skipped  boolean;
BEGIN
    -- Only rows that are PROCESSING are with a worker.
    UPDATE @schema@.event_delivery AS d
       SET status = 'DONE', locked_by = NULL, locked_until = NULL, processed_at = clock_timestamp(),
           updated_at = clock_timestamp()
     WHERE d.id = ANY ($3) AND d.consumer_group = $1 AND d.locked_by = $2;
    GET DIAGNOSTICS done = ROW_COUNT;
    IF done <> cardinality($3) THEN
        RAISE EXCEPTION '% of % deliveries are not with this worker any more', cardinality($3) - done, cardinality($3)
              USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    IF cardinality(array_remove($4, NULL)) = 0 THEN
        RETURN 0;
    END IF;
    IF promotes THEN
        FOR lock IN @locks@ LOOP
            PERFORM pg_advisory_xact_lock_shared(lock);
        END LOOP;
    END IF;
    @promote@
    IF skipped THEN
        RAISE EXCEPTION 'a delivery before these is open'
              USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    RETURN CASE WHEN promotes THEN done ELSE -1 END;
END $body$
$function$
]);
-- +goose StatementEnd
