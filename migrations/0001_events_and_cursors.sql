-- +goose Up

-- Events, and how far each relay has come with them.

-- Only the owner of the schema, and roles that the owner names, may create in it. Another role could create a function
-- or an operator there that fits the arguments of a statement better than PostgreSQL's own. Every session whose
-- search_path has the schema would then run it, with the rights of that session.
-- +goose StatementBegin
DO $migration$
DECLARE
    schema constant name := pg_catalog.current_schema();
    path   constant text := pg_catalog.current_setting('search_path');
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    IF EXISTS (SELECT FROM pg_namespace AS n, aclexplode(n.nspacl) AS a
                WHERE n.nspname = schema AND a.grantee = 0 AND a.privilege_type = 'CREATE') THEN
        IF (SELECT pg_has_role(nspowner, 'USAGE') FROM pg_namespace WHERE nspname = schema) THEN
            EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM PUBLIC', schema);
            RAISE NOTICE 'CREATE on schema % is revoked from PUBLIC: '
                'whoever may create there can act with the rights of those who use outbox', schema;
        ELSE
            RAISE WARNING 'everybody may create in schema %, and can act with the rights of those who use outbox; '
                'its owner should REVOKE CREATE ON SCHEMA % FROM PUBLIC', schema, quote_ident(schema);
        END IF;
    END IF;
    PERFORM set_config('search_path', path, true);
END $migration$;
-- +goose StatementEnd

-- outbox_define runs definitions of functions and policies. Functions of outbox look for names in pg_catalog only, so
-- they name everything else with the schema. These files do not know the name of the schema, and write
--
--   @schema@       for the schema as an identifier,
--   @schema_name@  for the name of the schema as a text,
--   @outbox@       for the name of the table outbox as a text, which can be cast to regclass,
--   @name@         for a text that several definitions share: fragments lists its name, and then the text.
--
-- Only the owner may call it, or a function that it creates, whatever ALTER DEFAULT PRIVILEGES says. The grants are in
-- docs/roles.md.
-- +goose StatementBegin
CREATE FUNCTION outbox_define(schema name, definitions text[], fragments text[] DEFAULT '{}') RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    space      constant oid := (SELECT n.oid FROM pg_namespace AS n WHERE n.nspname = schema);
    before     constant oid[] := ARRAY(
        SELECT p.oid FROM pg_proc AS p WHERE p.pronamespace = space AND p.proname <> 'outbox_define');
    definition text;
    granted    record;
BEGIN
    FOREACH definition IN ARRAY definitions LOOP
        FOR i IN 1 .. cardinality(fragments) / 2 LOOP
            definition := replace(definition, '@' || fragments[2 * i - 1] || '@', fragments[2 * i]);
        END LOOP;
        definition := replace(definition, '%', '%%');
        definition := replace(definition, '@schema@', '%1$I');
        definition := replace(definition, '@schema_name@', '%1$L');
        definition := replace(definition, '@outbox@', '%2$L');
        EXECUTE format(definition, schema, format('%I.outbox', schema));
    END LOOP;
    FOR granted IN
        SELECT DISTINCT p.oid::regprocedure AS function,
               CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee
          FROM pg_proc AS p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
         WHERE p.pronamespace = space AND p.oid <> ALL (before) AND a.grantee <> p.proowner
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM %s CASCADE', granted.function, granted.grantee);
    END LOOP;
END $body$;
-- +goose StatementEnd

CREATE TABLE outbox (
    id             bigserial    PRIMARY KEY,
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
    created_at     timestamptz  NOT NULL DEFAULT now(),
    -- A transaction with synchronous_commit = off would show its events before they are durable: after a crash Kafka
    -- would have events that the database does not have. So recording an event makes its transaction wait for its own
    -- disk. It does not wait for a standby, because a service that chose off does not want to depend on one. A rollback
    -- to a savepoint undoes the row and the setting. outbox.allow_async_commit = 'on' keeps the commit asynchronous.
    xid            xid8         NOT NULL DEFAULT
        CASE WHEN current_setting('synchronous_commit') = 'off'
              AND current_setting('outbox.allow_async_commit', true) IS DISTINCT FROM 'on'
              AND set_config('synchronous_commit', 'local', true) IS NULL THEN NULL
             ELSE pg_current_xact_id() END,
    -- No writer can say something else. JSON may print a million times the bytes that it is stored in, and a row whose
    -- size is not known would have to be printed to be measured.
    size           int          NOT NULL GENERATED ALWAYS AS (
        coalesce(octet_length(payload::text), 0) + coalesce(octet_length(payload_bytes), 0)
        + coalesce(octet_length(headers::text), 0)) STORED,
    CONSTRAINT outbox_lengths CHECK (
        char_length(event_type) <= 100 AND char_length(source) <= 100 AND char_length(aggregate_type) <= 100
        AND char_length(aggregate_id) <= 255 AND char_length(content_type) <= 100 AND char_length(topic) <= 249
        AND char_length(partition_key) <= 255),
    CONSTRAINT outbox_one_payload CHECK (num_nonnulls(payload, payload_bytes) = 1),
    CONSTRAINT outbox_size CHECK (size <= 209715200)
);

-- A row that is copied with its xid, by COPY or by logical replication, would be skipped or sent again and again: a
-- transaction id means nothing in another cluster. The constraint belongs to each partition and not to the partitioned
-- table, and is never validated. So pg_dump restores it after the rows, and a partition is attached without reading it.
ALTER TABLE outbox ADD CONSTRAINT outbox_xid_is_of_this_transaction CHECK (
    xid = pg_current_xact_id() OR current_setting('outbox.keep_xid', true) IS NOT DISTINCT FROM 'on') NOT VALID;

-- A relay reads the events of transactions that have committed since its last poll.
CREATE INDEX outbox_xid_id_idx ON outbox (xid, id);

COMMENT ON TABLE outbox IS
    'Domain events, written by the transactions that caused them. Rows are not updated, except for xid after a '
    'restore into another cluster; retention removes published rows.';
COMMENT ON COLUMN outbox.id IS
    'Order of the events of one aggregate. Taken at INSERT and visible at COMMIT, so "id > last" alone would skip '
    'events.';
COMMENT ON COLUMN outbox.event_id IS 'CloudEvents id; UUIDv7 unless the service brings its own generator.';
COMMENT ON COLUMN outbox.event_type IS 'CloudEvents type, {company}.{domain}.{action}.v{n}.';
COMMENT ON COLUMN outbox.source IS 'CloudEvents source: the name of the recording service.';
COMMENT ON COLUMN outbox.aggregate_type IS 'Type of the aggregate, for example Order.';
COMMENT ON COLUMN outbox.aggregate_id IS
    'Id of the aggregate. CloudEvents subject, and the partition key unless partition_key is set.';
COMMENT ON COLUMN outbox.payload IS 'The event as JSON. Exactly one of payload and payload_bytes is set.';
COMMENT ON COLUMN outbox.payload_bytes IS 'The event byte for byte, in the encoding that content_type names.';
COMMENT ON COLUMN outbox.content_type IS 'Media type of the payload.';
COMMENT ON COLUMN outbox.topic IS 'Kafka topic; NULL means second segment of event_type + "-events".';
COMMENT ON COLUMN outbox.partition_key IS 'Kafka record key; NULL means aggregate_id.';
COMMENT ON COLUMN outbox.headers IS
    'Extra Kafka headers as an object of strings, for example correlationid and traceparent; NULL means none.';
COMMENT ON COLUMN outbox.occurred_at IS 'When it happened, as the event says. CloudEvents time.';
COMMENT ON COLUMN outbox.created_at IS 'Start of the transaction that recorded it.';
COMMENT ON COLUMN outbox.xid IS
    'The transaction that recorded it. A relay compares it with snapshots to find the transactions that have '
    'committed since.';
COMMENT ON COLUMN outbox.size IS
    'Bytes of payload and headers as they are read, at most 200 MiB; a relay reads as many rows at once as its memory '
    'has room for.';

CREATE TABLE outbox_cursor (
    id                bigserial    PRIMARY KEY,
    relay             text         NOT NULL DEFAULT 'default',
    last_processed_id bigint       NOT NULL,
    snapshot          pg_snapshot  NOT NULL,
    window_snapshot   pg_snapshot,
    highest_id        bigint       NOT NULL,
    system_identifier bigint       NOT NULL,
    epoch             bigint       NOT NULL,
    created_at        timestamptz  NOT NULL DEFAULT now(),
    sent_from         bigint,
    sent_to           bigint,
    sent              bytea,
    cursor_topic      text         DEFAULT nullif(current_setting('outbox.cursor_topic', true), ''),
    token             text         DEFAULT nullif(current_setting('outbox.token', true), ''),
    batch             bigint       DEFAULT nullif(current_setting('outbox.confirmed_batch', true), '')::bigint,
    confirmed         bigint       DEFAULT nullif(current_setting('outbox.confirmed_row', true), '')::bigint,
    CONSTRAINT outbox_cursor_lengths CHECK (
        char_length(relay) <= 262 AND char_length(cursor_topic) <= 249 AND char_length(token) <= 32)
);

CREATE INDEX outbox_cursor_relay_idx ON outbox_cursor (relay, id);
CREATE INDEX idx_outbox_cursor_created_at ON outbox_cursor (created_at DESC);
-- Finds where an event was sent. It costs a move nothing; see docs/operations.md for what a look-up costs.
CREATE INDEX outbox_cursor_sent_idx ON outbox_cursor USING brin (sent_from, sent_to);

COMMENT ON TABLE outbox_cursor IS
    'Position of each relay and of each group of workers. Rows are only inserted: the newest by id is the '
    'position, older ones are history.';
COMMENT ON COLUMN outbox_cursor.id IS 'Order of the moves of a relay.';
COMMENT ON COLUMN outbox_cursor.relay IS
    'Name of the relay, or worker: and a consumer group. Each name gets every event.';
COMMENT ON COLUMN outbox_cursor.last_processed_id IS
    'Highest outbox.id attempted of the open window (0: none yet); with no open window, of the one before.';
COMMENT ON COLUMN outbox_cursor.snapshot IS
    'Every event whose transaction is visible in this snapshot has been attempted.';
COMMENT ON COLUMN outbox_cursor.window_snapshot IS
    'End of the open window: of the events visible here and not in snapshot, those up to last_processed_id have '
    'been attempted. NULL: no window is open.';
COMMENT ON COLUMN outbox_cursor.highest_id IS
    'Highest outbox.id ever attempted; finds the position again after a restore into another cluster.';
COMMENT ON COLUMN outbox_cursor.system_identifier IS
    'The cluster to which the transaction ids of the snapshots belong.';
COMMENT ON COLUMN outbox_cursor.epoch IS 'Lease under which the row was written.';
COMMENT ON COLUMN outbox_cursor.created_at IS 'When the cursor moved.';
COMMENT ON COLUMN outbox_cursor.sent_from IS
    'Lowest outbox.id of the events attempted since the row before; NULL if none was sent, or by workers. The row '
    'stays as long as an event from sent_from to sent_to is in outbox.';
COMMENT ON COLUMN outbox_cursor.sent_to IS 'Highest outbox.id of these events.';
COMMENT ON COLUMN outbox_cursor.sent IS
    'Topic, partition and offset of each of these events, in a form that outbox events show reads.';
COMMENT ON COLUMN outbox_cursor.cursor_topic IS
    'Exactly once: the topic whose newest record of the relay is its position. NULL: this row is the position. The '
    'relay sets this column and the next ones as settings, outbox.cursor_topic for example.';
COMMENT ON COLUMN outbox_cursor.token IS
    'Exactly once: random. Records in the topic name id and token, because a failover may give an id out again.';
COMMENT ON COLUMN outbox_cursor.batch IS
    'Exactly once: the newest transaction that Kafka had confirmed. NULL: none since the relay began to use the topic.';
COMMENT ON COLUMN outbox_cursor.confirmed IS
    'Exactly once: id of the newest row up to whose position Kafka had confirmed everything. NULL: of this row.';

CREATE TABLE outbox_lease (
    name         text         PRIMARY KEY,
    holder       text         NOT NULL,
    epoch        bigint       NOT NULL,
    expires_at   timestamptz  NOT NULL,
    lasts        interval,
    locked_epoch bigint,
    exclusive_at timestamptz,
    state        jsonb        NOT NULL DEFAULT '{}',
    state_at     timestamptz,
    kafka_at     timestamptz,
    elsewhere_at timestamptz,
    CONSTRAINT outbox_lease_lengths CHECK (char_length(name) <= 264 AND char_length(holder) <= 255 AND char_length(state::text) <= 100000)
);

COMMENT ON TABLE outbox_lease IS
    'Which process leads: one row for each relay, each group of workers, and each group of consumers that alerts.';
COMMENT ON COLUMN outbox_lease.name IS 'Name of the relay, or worker: or consumer: and a consumer group.';
COMMENT ON COLUMN outbox_lease.holder IS 'The process that leads: host, process id and a random part.';
COMMENT ON COLUMN outbox_lease.epoch IS
    'Grows with every change of holder. Every write of a relay proves holder and epoch.';
COMMENT ON COLUMN outbox_lease.expires_at IS 'By the clock of the database; a later time means that the lease is held.';
COMMENT ON COLUMN outbox_lease.lasts IS
    'How long the holder renews it for. If expires_at is further ahead, the clock of the database was set back.';
COMMENT ON COLUMN outbox_lease.locked_epoch IS
    'The epoch whose holder has an advisory lock, too. If it is the epoch of the lease and the lock is free, the '
    'process or its connection is gone.';
COMMENT ON COLUMN outbox_lease.exclusive_at IS
    'Until then the holder before, which was taken for gone before its lease had expired, may still send. No event '
    'is marked dead until then.';
COMMENT ON COLUMN outbox_lease.state IS
    'What the holder of a relay says of its work: whether it works, breakers, outages. It holds for the lease if it '
    'names the epoch of the lease, and the lease has not expired. A group has none.';
COMMENT ON COLUMN outbox_lease.state_at IS 'When the holder wrote state.';
COMMENT ON COLUMN outbox_lease.kafka_at IS 'When Kafka last answered the holder.';
COMMENT ON COLUMN outbox_lease.elsewhere_at IS
    'When Kafka last answered a process that stands by, if it did not answer the holder.';

-- +goose StatementBegin
SELECT outbox_define(current_schema(), ARRAY[

-- Names of the relays and groups of workers that have a cursor. It finds them one by one, because each has a long
-- history.
$function$
CREATE FUNCTION @schema@.outbox_relays() RETURNS text[]
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
    WITH RECURSIVE names AS (
       (SELECT relay FROM @schema@.outbox_cursor ORDER BY relay LIMIT 1)
         UNION ALL
        SELECT (SELECT c.relay FROM @schema@.outbox_cursor AS c WHERE c.relay > names.relay ORDER BY c.relay LIMIT 1)
          FROM names WHERE names.relay IS NOT NULL
    )
    SELECT coalesce(array_agg(relay::text ORDER BY relay), '{}') FROM names WHERE relay IS NOT NULL
$body$
$function$
]);
-- +goose StatementEnd
