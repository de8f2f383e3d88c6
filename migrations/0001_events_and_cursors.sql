-- +goose Up

-- Events, those that are not due yet, and how far each relay has come with them.

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
    expires_at     timestamptz,
    CONSTRAINT outbox_lengths CHECK (
        char_length(event_type) <= 100 AND char_length(source) <= 100 AND char_length(aggregate_type) <= 100
        AND char_length(aggregate_id) <= 255 AND char_length(content_type) <= 100 AND char_length(topic) <= 249
        AND char_length(partition_key) <= 255),
    CONSTRAINT outbox_one_payload CHECK (num_nonnulls(payload, payload_bytes) = (content_type <> '')::int),
    CONSTRAINT outbox_size CHECK (size <= 209715200),
    CONSTRAINT outbox_expires CHECK (
        expires_at >= '0001-01-01 00:00:00+00'::timestamptz AND expires_at < '10000-01-01 00:00:00+00'::timestamptz)
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
COMMENT ON COLUMN outbox.payload IS
    'The event as JSON. Exactly one of payload and payload_bytes is set, and none of a tombstone.';
COMMENT ON COLUMN outbox.payload_bytes IS 'The event byte for byte, in the encoding that content_type names.';
COMMENT ON COLUMN outbox.content_type IS
    'Media type of the payload; empty for a tombstone, whose record has a null value.';
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
COMMENT ON COLUMN outbox.expires_at IS
    'From then on, by the clock of the database, the event is neither sent nor handled. CloudEvents expirytime; NULL '
    'means never.';

CREATE TABLE outbox_delayed (
    id             bigserial    PRIMARY KEY,
    due_at         timestamptz  NOT NULL,
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
    recorded_at    timestamptz  NOT NULL DEFAULT now(),
    rejected_at    timestamptz,
    rejection      text,
    key            text         NOT NULL GENERATED ALWAYS AS (coalesce(partition_key, aggregate_id)) STORED,
    size           int          NOT NULL GENERATED ALWAYS AS (
        coalesce(octet_length(payload::text), 0) + coalesce(octet_length(payload_bytes), 0)
        + coalesce(octet_length(headers::text), 0)) STORED,
    expires_at     timestamptz,
    CONSTRAINT outbox_delayed_lengths CHECK (
        char_length(event_type) <= 100 AND char_length(source) <= 100 AND char_length(aggregate_type) <= 100
        AND char_length(aggregate_id) <= 255 AND char_length(content_type) <= 100 AND char_length(topic) <= 249
        AND char_length(partition_key) <= 255),
    CONSTRAINT outbox_delayed_one_payload CHECK (num_nonnulls(payload, payload_bytes) = (content_type <> '')::int),
    CONSTRAINT outbox_delayed_size CHECK (size <= 209715200),
    CONSTRAINT outbox_delayed_due CHECK (
        due_at >= '0001-01-01 00:00:00+00'::timestamptz AND due_at < '10000-01-01 00:00:00+00'::timestamptz),
    CONSTRAINT outbox_delayed_expires CHECK (
        expires_at > due_at AND expires_at < '10000-01-01 00:00:00+00'::timestamptz)
);

CREATE INDEX outbox_delayed_due_idx ON outbox_delayed (due_at, id) WHERE rejected_at IS NULL;
-- Finds events of a key that were committed late, after the look at their due time.
CREATE INDEX outbox_delayed_key_idx ON outbox_delayed (key, due_at, id) WHERE rejected_at IS NULL;
CREATE INDEX outbox_delayed_rejected_idx ON outbox_delayed (due_at, id) WHERE rejected_at IS NOT NULL;
CREATE INDEX outbox_delayed_event_id_idx ON outbox_delayed (event_id);

COMMENT ON TABLE outbox_delayed IS
    'Events that are not to be sent before a time. When an event is due, it is moved to outbox, where it gets its id, '
    'xid and created_at.';
COMMENT ON COLUMN outbox_delayed.id IS 'Order of the events of a key that are due at the same time.';
COMMENT ON COLUMN outbox_delayed.due_at IS
    'When the event is moved to outbox, by the clock of the database; it may be past.';
COMMENT ON COLUMN outbox_delayed.event_id IS 'As in outbox.';
COMMENT ON COLUMN outbox_delayed.event_type IS 'As in outbox.';
COMMENT ON COLUMN outbox_delayed.source IS 'As in outbox.';
COMMENT ON COLUMN outbox_delayed.aggregate_type IS 'As in outbox.';
COMMENT ON COLUMN outbox_delayed.aggregate_id IS 'As in outbox.';
COMMENT ON COLUMN outbox_delayed.payload IS 'As in outbox.';
COMMENT ON COLUMN outbox_delayed.payload_bytes IS 'As in outbox.';
COMMENT ON COLUMN outbox_delayed.content_type IS 'As in outbox.';
COMMENT ON COLUMN outbox_delayed.topic IS 'As in outbox.';
COMMENT ON COLUMN outbox_delayed.partition_key IS 'As in outbox.';
COMMENT ON COLUMN outbox_delayed.headers IS 'As in outbox.';
COMMENT ON COLUMN outbox_delayed.occurred_at IS 'As in outbox.';
COMMENT ON COLUMN outbox_delayed.recorded_at IS 'Start of the transaction that recorded the event.';
COMMENT ON COLUMN outbox_delayed.rejected_at IS
    'When outbox rejected the event, a second one of its id for example. It is not tried again until this is NULL.';
COMMENT ON COLUMN outbox_delayed.rejection IS 'The error with which outbox rejected the event.';
COMMENT ON COLUMN outbox_delayed.key IS 'The record key. Events of a key are moved in the order of due_at and id.';
COMMENT ON COLUMN outbox_delayed.size IS 'As in outbox.';
COMMENT ON COLUMN outbox_delayed.expires_at IS 'As in outbox; later than due_at.';

-- Its lock is one that only the owner can take, unlike an advisory one.
CREATE TABLE outbox_mover (unused boolean NOT NULL);

COMMENT ON TABLE outbox_mover IS
    'Has no rows. Whoever moves delayed events locks it: two at a time would change the order of a key.';
COMMENT ON COLUMN outbox_mover.unused IS 'Never written.';

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
-- Finds where an event was sent. It costs a move nothing; see docs/watch.md for what a look-up costs.
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
    'Exactly once: the newest transaction that Kafka had confirmed. NULL: none since the mode was turned on. -n: '
    'none, and the newest record in the topic was that of transaction n then.';
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

CREATE TABLE outbox_archiver (
    name   text         PRIMARY KEY,
    epoch  bigint       NOT NULL,
    since  timestamptz  NOT NULL DEFAULT now(),
    CONSTRAINT outbox_archiver_lengths CHECK (char_length(name) <= 264)
);

COMMENT ON TABLE outbox_archiver IS
    'Relays and groups of workers whose processes archive events before they are removed. While it has a row, '
    'retention without an archive removes no events. outbox_stop_archive removes all rows.';
COMMENT ON COLUMN outbox_archiver.name IS 'As in outbox_lease.';
COMMENT ON COLUMN outbox_archiver.epoch IS 'The newest lease of this name whose holder archives.';
COMMENT ON COLUMN outbox_archiver.since IS 'When a process of this name archived for the first time.';

-- +goose StatementBegin
SELECT outbox_define(current_schema(), fragments => ARRAY[

-- What outbox_delayed and outbox have in common.
'columns', $sql$event_id, event_type, source, aggregate_type, aggregate_id, payload, payload_bytes, content_type,
                     topic, partition_key, headers, occurred_at, expires_at$sql$

], definitions => ARRAY[

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
$function$,

-- Moves up to 1,000 delayed events that are due to outbox, and says what a mover has to know for its next call (internal/mover).
-- Start and passed restrict the look: start to events that are due at this time or later, and to earlier ones of the
-- same keys; passed are keys that were blocked in the looks before. Without due events it reads one row, and writes
-- nothing. The results are:
--
--   moved, rejected   how many events were moved, and how many outbox has rejected for what they are
--   blocked           keys with an event that another transaction has locked, a cancellation for example, or that has a
--                     problem: neither it nor later events of the key were moved; blocked_at is the first due time of
--                     these
--   more              another call would find more
--   lowest            the look has left no event that is due before this time, except for the keys in passed; NULL:
--                     another mover is at work
--   next_in           seconds until the next event is due; NULL: there is none
--   late              for how many seconds the oldest event has been due that was not moved
--   took              seconds of the look at what is due, without the move
--   problem           an error that is not one of the event itself
--
-- Events of a key are moved in the order of due_at and id. So an event is moved only if this transaction has locked all
-- earlier ones of its key, and the look follows the lock of outbox_mover. Lowest is at least 5 s ago, so that events
-- that are committed a little late, or are due when they are recorded, are not below it.
$function$
CREATE FUNCTION @schema@.outbox_move_due(
    start timestamptz, passed text[],
    OUT moved int, OUT rejected int, OUT blocked text[], OUT blocked_at timestamptz, OUT more boolean,
    OUT lowest timestamptz, OUT next_in double precision, OUT late double precision, OUT took double precision,
    OUT problem text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms'
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
DECLARE
    began           constant timestamptz := clock_timestamp();
    most            constant int := 1000;
    recent          constant timestamptz := now() - interval '5 s';
    first           timestamptz;
    left_at         timestamptz;
    ids             bigint[];
    keys            text[];
    dues            timestamptz[];
    free            bigint[];
    until           timestamptz;
    constraint_name text;
    one             record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'delayed events are moved under READ COMMITTED only'
            USING ERRCODE = 'invalid_transaction_state';
    END IF;
    moved := 0;
    rejected := 0;
    blocked := '{}';
    more := false;
    late := 0;
    start := coalesce(start, '-infinity');
    SELECT d.due_at INTO first FROM @schema@.outbox_delayed AS d
     WHERE d.rejected_at IS NULL AND d.due_at >= start ORDER BY d.due_at, d.id LIMIT 1;
    took := extract(epoch FROM clock_timestamp() - began);
    IF first IS NULL OR first > now() THEN
        lowest := recent;
        next_in := extract(epoch FROM first - clock_timestamp());
        RETURN;
    END IF;
    BEGIN
        LOCK TABLE @schema@.outbox_mover IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        late := extract(epoch FROM now() - first);
        RETURN;
    END;
    IF current_setting('idle_in_transaction_session_timeout')::interval NOT BETWEEN '1 ms' AND '10 s' THEN
        PERFORM set_config('idle_in_transaction_session_timeout', '10s', true);
    END IF;

    -- A key with events before start gets these only, and the others with the next call.
    WITH due AS MATERIALIZED (
        SELECT d.id, d.key, d.due_at, d.size FROM @schema@.outbox_delayed AS d
         WHERE d.rejected_at IS NULL AND d.due_at >= start AND d.due_at <= now()
           AND d.key NOT IN (SELECT unnest(passed))
         ORDER BY d.due_at, d.id LIMIT most
    ), early AS MATERIALIZED (
        SELECT e.* FROM (SELECT DISTINCT d.key FROM due AS d WHERE start > '-infinity') AS k
         CROSS JOIN LATERAL (
               SELECT e.id, e.key, e.due_at, e.size FROM @schema@.outbox_delayed AS e
                WHERE e.rejected_at IS NULL AND e.key = k.key AND e.due_at < start
                ORDER BY e.key, e.due_at, e.id LIMIT 10) AS e
    ), chosen AS (
        SELECT e.* FROM early AS e
         UNION ALL
        SELECT d.* FROM due AS d WHERE d.key NOT IN (SELECT e.key FROM early AS e)
    ), numbered AS (
        SELECT c.*, row_number() OVER o <= most AND sum(c.size::bigint) OVER o - c.size < 16777216 AS fits
          FROM chosen AS c
        WINDOW o AS (ORDER BY c.due_at, c.id)
    )
    SELECT array_agg(n.id ORDER BY n.due_at, n.id) FILTER (WHERE n.fits),
           array_agg(n.key ORDER BY n.due_at, n.id) FILTER (WHERE n.fits),
           array_agg(n.due_at ORDER BY n.due_at, n.id) FILTER (WHERE n.fits),
           least(min(n.due_at) FILTER (WHERE NOT n.fits),
                 (SELECT min(d.due_at) FROM due AS d WHERE d.key IN (SELECT e.key FROM early AS e)),
                 (SELECT max(d.due_at) FROM due AS d HAVING count(*) >= most))
      INTO ids, keys, dues, left_at FROM numbered AS n;
    more := left_at IS NOT NULL;
    took := extract(epoch FROM clock_timestamp() - began);

    WITH locked AS MATERIALIZED (
        SELECT d.id FROM @schema@.outbox_delayed AS d WHERE d.id = ANY (ids) FOR UPDATE SKIP LOCKED
    ), seen AS MATERIALIZED (
        SELECT w.*, l.id IS NOT NULL AS locked
          FROM unnest(ids, keys, dues) WITH ORDINALITY AS w (id, key, due_at, n) LEFT JOIN locked AS l ON l.id = w.id
    ), ends AS MATERIALIZED (
        SELECT s.key, min(s.n) AS n FROM seen AS s WHERE NOT s.locked GROUP BY s.key
    )
    SELECT coalesce(array_agg(s.id ORDER BY s.n) FILTER (WHERE e.n IS NULL OR s.n < e.n), '{}'),
           coalesce(array_agg(DISTINCT e.key) FILTER (WHERE e.n IS NOT NULL), '{}'),
           min(s.due_at) FILTER (WHERE s.n >= e.n)
      INTO free, blocked, blocked_at FROM seen AS s LEFT JOIN ends AS e ON e.key = s.key;

    BEGIN
        WITH gone AS (
            DELETE FROM @schema@.outbox_delayed AS d WHERE d.id = ANY (free) RETURNING d.*
        )
        INSERT INTO @schema@.outbox (@columns@) SELECT @columns@ FROM gone ORDER BY due_at, id;
        GET DIAGNOSTICS moved = ROW_COUNT;
        free := '{}';
    EXCEPTION WHEN OTHERS THEN
        NULL; -- one by one
    END;
    PERFORM set_config('lock_timeout', '1ms', true); -- the first try has waited
    until := clock_timestamp() + interval '1 s';
    FOR one IN SELECT w.id, w.key, w.due_at FROM unnest(ids, keys, dues) WITH ORDINALITY AS w (id, key, due_at, n)
                WHERE w.id = ANY (free) ORDER BY w.n LOOP
        CONTINUE WHEN one.key = ANY (blocked);
        IF clock_timestamp() > until THEN
            more := true;
            left_at := least(left_at, one.due_at);
            EXIT;
        END IF;
        BEGIN
            WITH gone AS (
                DELETE FROM @schema@.outbox_delayed AS d WHERE d.id = one.id RETURNING d.*
            )
            INSERT INTO @schema@.outbox (@columns@) SELECT @columns@ FROM gone;
            moved := moved + 1;
        EXCEPTION WHEN OTHERS THEN
            GET STACKED DIAGNOSTICS constraint_name = CONSTRAINT_NAME;
            IF (SQLSTATE ~ '^(22|23|54)' OR SQLSTATE IN ('XX000', 'XX001', 'XX002'))
               AND constraint_name !~ '_pkey$|_before_partitions$' THEN -- these are about the id that it would have got
                UPDATE @schema@.outbox_delayed AS d
                   SET rejected_at = now(), rejection = left(SQLSTATE || ': ' || SQLERRM, 1000) WHERE d.id = one.id;
                rejected := rejected + 1;
            ELSIF SQLSTATE ~ '^(08|40|53|57|58)' THEN
                RAISE;
            ELSE
                IF SQLSTATE <> '55P03' THEN
                    problem := left(SQLSTATE || ': ' || SQLERRM, 1000);
                END IF;
                blocked := blocked || one.key;
                blocked_at := least(blocked_at, one.due_at);
            END IF;
        END;
    END LOOP;

    lowest := least(recent, left_at, blocked_at);
    late := coalesce(extract(epoch FROM now() - least(left_at, blocked_at)), 0);
    IF NOT more THEN
        SELECT extract(epoch FROM d.due_at - clock_timestamp()) INTO next_in FROM @schema@.outbox_delayed AS d
         WHERE d.rejected_at IS NULL AND d.due_at > now() ORDER BY d.due_at, d.id LIMIT 1;
    END IF;
END $body$
$function$,

-- Deletes a delayed event that was not moved yet, in the transaction of the caller. Returns false if it was moved, and
-- if there has never been one of this id.
$function$
CREATE FUNCTION @schema@.outbox_cancel(event_id uuid) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
BEGIN
    DELETE FROM @schema@.outbox_delayed AS d WHERE d.event_id = $1;
    RETURN FOUND;
END $body$
$function$
]);
-- +goose StatementEnd
