-- +goose Up

CREATE TABLE outbox (
    id             bigserial    PRIMARY KEY,
    event_id       uuid         NOT NULL,
    event_type     varchar(100) NOT NULL,
    source         varchar(100) NOT NULL,
    aggregate_type varchar(100) NOT NULL,
    aggregate_id   varchar(255) NOT NULL,
    payload        jsonb,
    payload_bytes  bytea,
    content_type   varchar(100) NOT NULL,
    topic          varchar(249),
    partition_key  varchar(255),
    headers        jsonb,
    occurred_at    timestamptz  NOT NULL,
    created_at     timestamptz  NOT NULL DEFAULT now(),
    xid            xid8         NOT NULL DEFAULT pg_current_xact_id(),
    CONSTRAINT outbox_one_payload CHECK (num_nonnulls(payload, payload_bytes) = 1)
);

CREATE INDEX outbox_xid_id_idx ON outbox (xid, id);

COMMENT ON TABLE outbox IS
    'Domain events, written by the transactions that caused them. Rows are not updated, but for xid after a restore into another cluster; retention removes what is published.';
COMMENT ON COLUMN outbox.id IS
    'Order of the events of one aggregate. Taken at INSERT and visible at COMMIT, so "id > last" alone would skip events.';
COMMENT ON COLUMN outbox.event_id IS 'CloudEvents id; UUIDv7 unless the service brings its own generator.';
COMMENT ON COLUMN outbox.event_type IS 'CloudEvents type, {company}.{domain}.{action}.v{n}.';
COMMENT ON COLUMN outbox.source IS 'CloudEvents source: the name of the recording service.';
COMMENT ON COLUMN outbox.aggregate_type IS 'What the event happened to, for example Order.';
COMMENT ON COLUMN outbox.aggregate_id IS 'Which one it happened to. CloudEvents subject, and the partition key unless overridden.';
COMMENT ON COLUMN outbox.payload IS 'The event as JSON. Exactly one of payload and payload_bytes is set.';
COMMENT ON COLUMN outbox.payload_bytes IS 'The event byte for byte, in the encoding that content_type names.';
COMMENT ON COLUMN outbox.content_type IS 'Media type of the payload.';
COMMENT ON COLUMN outbox.topic IS 'Kafka topic; NULL means second segment of event_type + "-events".';
COMMENT ON COLUMN outbox.partition_key IS 'Kafka record key; NULL means aggregate_id.';
COMMENT ON COLUMN outbox.headers IS 'Further Kafka headers as an object of strings, correlationid and traceparent among them; NULL means none.';
COMMENT ON COLUMN outbox.occurred_at IS 'When it happened, by the event''s own account. CloudEvents time.';
COMMENT ON COLUMN outbox.created_at IS 'Start of the transaction that recorded it.';
COMMENT ON COLUMN outbox.xid IS 'The transaction that recorded it. The relay compares it with snapshots to find what has committed since.';

CREATE TABLE outbox_cursor (
    id                bigserial    PRIMARY KEY,
    relay             varchar(100) NOT NULL DEFAULT 'default',
    last_processed_id bigint       NOT NULL,
    snapshot          pg_snapshot  NOT NULL,
    window_snapshot   pg_snapshot,
    highest_id        bigint       NOT NULL,
    system_identifier bigint       NOT NULL,
    epoch             bigint       NOT NULL,
    created_at        timestamptz  NOT NULL DEFAULT now()
);

CREATE INDEX outbox_cursor_relay_idx ON outbox_cursor (relay, id);
CREATE INDEX idx_outbox_cursor_created_at ON outbox_cursor (created_at DESC);

COMMENT ON TABLE outbox_cursor IS
    'Where each relay stands: rows are only inserted, the newest by id rules, older ones are history.';
COMMENT ON COLUMN outbox_cursor.id IS 'Order of the moves of a relay.';
COMMENT ON COLUMN outbox_cursor.relay IS 'Name of the relay. Each name publishes every event.';
COMMENT ON COLUMN outbox_cursor.last_processed_id IS
    'Highest outbox.id attempted of the open window (0: none yet); with no open window, of the one before.';
COMMENT ON COLUMN outbox_cursor.snapshot IS 'Every event whose transaction is visible in this snapshot has been attempted.';
COMMENT ON COLUMN outbox_cursor.window_snapshot IS
    'End of the open window: of the events visible here and not in snapshot, those up to last_processed_id have been attempted. NULL: no window is open.';
COMMENT ON COLUMN outbox_cursor.highest_id IS 'Highest outbox.id ever attempted; finds the place again after a restore into another cluster.';
COMMENT ON COLUMN outbox_cursor.system_identifier IS 'The cluster whose transaction ids the snapshots speak of.';
COMMENT ON COLUMN outbox_cursor.epoch IS 'Lease under which the row was written.';
COMMENT ON COLUMN outbox_cursor.created_at IS 'When the cursor moved.';

CREATE TABLE outbox_lease (
    name       varchar(100) PRIMARY KEY,
    holder     varchar(255) NOT NULL,
    epoch      bigint       NOT NULL,
    expires_at timestamptz  NOT NULL
);

COMMENT ON TABLE outbox_lease IS 'Which process relays: one row for each relay name.';
COMMENT ON COLUMN outbox_lease.name IS 'Name of the relay.';
COMMENT ON COLUMN outbox_lease.holder IS 'Host, process id and a random part: who relays.';
COMMENT ON COLUMN outbox_lease.epoch IS 'Grows with every change of holder. Every write of a relay proves holder and epoch.';
COMMENT ON COLUMN outbox_lease.expires_at IS 'By the clock of the database; a later time means that the lease is held.';

CREATE TABLE outbox_failed (
    id             bigserial    PRIMARY KEY,
    relay          varchar(100) NOT NULL DEFAULT 'default',
    outbox_id      bigint       NOT NULL,
    parking_key    text         NOT NULL,
    event_id       uuid         NOT NULL,
    event_type     varchar(100) NOT NULL,
    source         varchar(100) NOT NULL,
    aggregate_type varchar(100) NOT NULL,
    aggregate_id   varchar(255) NOT NULL,
    payload        jsonb,
    payload_bytes  bytea,
    content_type   varchar(100) NOT NULL,
    topic          varchar(249),
    partition_key  varchar(255),
    headers        jsonb,
    occurred_at    timestamptz  NOT NULL,
    created_at     timestamptz  NOT NULL,
    retry_count    int          NOT NULL DEFAULT 0,
    last_error     text,
    error_class    varchar(40),
    failed_at      timestamptz  NOT NULL DEFAULT now(),
    next_retry_at  timestamptz  NOT NULL DEFAULT now(),
    status         varchar(10)  NOT NULL,
    held           boolean      NOT NULL DEFAULT false,
    resolved_at    timestamptz,
    resolved_by    varchar(100),
    resolution     text,
    CONSTRAINT outbox_failed_status CHECK (status IN ('waiting', 'failed', 'parked', 'dead', 'resolved')),
    CONSTRAINT outbox_failed_one_payload CHECK (num_nonnulls(payload, payload_bytes) = 1),
    CONSTRAINT uk_outbox_failed UNIQUE (relay, outbox_id)
);

CREATE INDEX idx_outbox_failed_retry ON outbox_failed (relay, next_retry_at, outbox_id) WHERE status IN ('waiting', 'failed');
CREATE INDEX idx_outbox_failed_parking ON outbox_failed (relay, parking_key, outbox_id)
 WHERE status IN ('waiting', 'failed', 'parked', 'dead');
CREATE INDEX idx_outbox_failed_resolved ON outbox_failed (resolved_at) WHERE status = 'resolved';

CREATE INDEX idx_outbox_failed_dead ON outbox_failed (id) WHERE status = 'dead';

COMMENT ON TABLE outbox_failed IS
    'Events that did not reach Kafka at the first attempt, with their whole envelope: a retry never reads outbox.';
COMMENT ON COLUMN outbox_failed.id IS 'Order of the failures.';
COMMENT ON COLUMN outbox_failed.relay IS 'The relay whose event it is.';
COMMENT ON COLUMN outbox_failed.outbox_id IS 'outbox.id of the event; the order in which a key is sent again.';
COMMENT ON COLUMN outbox_failed.parking_key IS 'Topic, a slash, and the record key: later events of both wait behind this one.';
COMMENT ON COLUMN outbox_failed.event_id IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.event_type IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.source IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.aggregate_type IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.aggregate_id IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.payload IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.payload_bytes IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.content_type IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.topic IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.partition_key IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.headers IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.occurred_at IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.created_at IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.retry_count IS 'Retries that Kafka refused. Outages do not count.';
COMMENT ON COLUMN outbox_failed.last_error IS 'What Kafka or the client said at the last attempt.';
COMMENT ON COLUMN outbox_failed.error_class IS 'Kind of the last error, for example message_too_large.';
COMMENT ON COLUMN outbox_failed.failed_at IS 'First failure.';
COMMENT ON COLUMN outbox_failed.next_retry_at IS 'Not sent again before this time; of a dead one, when it died.';
COMMENT ON COLUMN outbox_failed.status IS
    'waiting: for infrastructure, uncounted; failed: refused, tried again; parked: behind another of its key; dead: given up; resolved: an operator has decided, or it was sent and is kept.';
COMMENT ON COLUMN outbox_failed.held IS
    'Its key waits for an operator: nothing of it is sent, and later events join it here.';
COMMENT ON COLUMN outbox_failed.resolved_at IS 'When it was resolved.';
COMMENT ON COLUMN outbox_failed.resolved_by IS 'The operator who resolved it.';
COMMENT ON COLUMN outbox_failed.resolution IS 'The operator''s note; sent, if the relay keeps what it sent.';

CREATE TABLE outbox_audit (
    id            bigserial    PRIMARY KEY,
    created_at    timestamptz  NOT NULL DEFAULT now(),
    operator      varchar(100) NOT NULL,
    action        varchar(20)  NOT NULL,
    reason        text         NOT NULL,
    relay         varchar(100) NOT NULL,
    parking_key   text         NOT NULL,
    failed_id     bigint,
    outbox_id     bigint,
    event_id      uuid,
    payload       jsonb,
    payload_bytes bytea
);

CREATE INDEX outbox_audit_failed_id_idx ON outbox_audit (failed_id, id);

COMMENT ON TABLE outbox_audit IS 'What operators did about failed events, and why.';
COMMENT ON COLUMN outbox_audit.id IS 'Order of the actions.';
COMMENT ON COLUMN outbox_audit.created_at IS 'When it was done.';
COMMENT ON COLUMN outbox_audit.operator IS 'Who did it; of a relay "relay" and its name.';
COMMENT ON COLUMN outbox_audit.action IS 'retry, resolve, edit, hold or release.';
COMMENT ON COLUMN outbox_audit.reason IS 'The operator''s note.';
COMMENT ON COLUMN outbox_audit.relay IS 'The relay whose event or key it is.';
COMMENT ON COLUMN outbox_audit.parking_key IS 'Topic, a slash, and the record key.';
COMMENT ON COLUMN outbox_audit.failed_id IS 'outbox_failed.id; NULL where it was done to the key.';
COMMENT ON COLUMN outbox_audit.outbox_id IS 'outbox.id of the event; NULL likewise.';
COMMENT ON COLUMN outbox_audit.event_id IS 'As in outbox; NULL likewise.';
COMMENT ON COLUMN outbox_audit.payload IS 'What the payload was before an edit; NULL for all else.';
COMMENT ON COLUMN outbox_audit.payload_bytes IS 'The same, for payloads that are not JSON.';

CREATE TABLE event_handled (
    id             bigserial    PRIMARY KEY,
    consumer_group varchar(255) NOT NULL,
    aggregate_type varchar(100) NOT NULL,
    aggregate_id   varchar(255) NOT NULL,
    action         varchar(100) NOT NULL,
    handled_at     timestamptz  NOT NULL DEFAULT now(),
    CONSTRAINT uk_event_handled UNIQUE (consumer_group, aggregate_type, aggregate_id, action)
);

COMMENT ON TABLE event_handled IS
    'What a consumer has done already, committed together with the effect, so that a repeated event is skipped.';
COMMENT ON COLUMN event_handled.id IS 'Order of handling.';
COMMENT ON COLUMN event_handled.consumer_group IS 'Two groups in one database do not take each other''s work for done.';
COMMENT ON COLUMN event_handled.aggregate_type IS 'First part of the idempotency key, for example Order.';
COMMENT ON COLUMN event_handled.aggregate_id IS 'Second part, for example the order''s id or {productId}_{eventId}.';
COMMENT ON COLUMN event_handled.action IS 'Third part: what was done, for example SALES_COUNT_INCREASED.';
COMMENT ON COLUMN event_handled.handled_at IS 'When it was done.';
