-- +goose Up

-- As in 0003_bounded_reads.sql.
SELECT pg_catalog.set_config('lock_timeout', '100ms', true) WHERE pg_catalog.current_setting('lock_timeout') OPERATOR(pg_catalog.=) '0';

-- A group of workers has a cursor and a lease of its own, under the name worker: and the group's.
ALTER TABLE outbox_cursor ALTER COLUMN relay TYPE varchar(262);
ALTER TABLE outbox_lease ALTER COLUMN name TYPE varchar(262);
COMMENT ON COLUMN outbox_cursor.relay IS
    'Name of the relay, or worker: and a consumer group. Each name gets every event.';
COMMENT ON COLUMN outbox_lease.name IS 'As in outbox_cursor.';

CREATE TABLE event_subscription (
    consumer_group varchar(255) NOT NULL,
    created_at     timestamptz  NOT NULL DEFAULT now(),
    state          varchar(10)  NOT NULL DEFAULT 'active',
    relay          varchar(100),
    changed_at     timestamptz  NOT NULL DEFAULT now(),
    routes         jsonb        NOT NULL DEFAULT '{}',
    routes_version bigint       NOT NULL DEFAULT 0,
    CONSTRAINT event_subscription_pkey PRIMARY KEY (consumer_group),
    CONSTRAINT event_subscription_state CHECK (state IN ('active', 'leaving', 'left', 'returning')),
    CONSTRAINT event_subscription_relay CHECK ((state = 'active') = (relay IS NULL))
);

COMMENT ON TABLE event_subscription IS
    'Consumer groups whose workers get events from outbox. How far they have come is in outbox_cursor.';
COMMENT ON COLUMN event_subscription.consumer_group IS 'As in event_handled.';
COMMENT ON COLUMN event_subscription.created_at IS 'When the first worker of the group ran.';
COMMENT ON COLUMN event_subscription.state IS
    'active: its workers get every event; leaving: those that its relay''s position calls sent; left: none, it reads from Kafka; returning: those behind its cursor, once it has read what is in Kafka.';
COMMENT ON COLUMN event_subscription.relay IS
    'The relay whose events it gets from Kafka, or got until now. As long as a group is leaving, the relay''s position is the cut.';
COMMENT ON COLUMN event_subscription.changed_at IS 'When state changed.';
COMMENT ON COLUMN event_subscription.routes IS
    'What its workers have handlers for, and when one of them has said so last, in seconds since 1970: event type, stream and action, with line breaks between them.';
COMMENT ON COLUMN event_subscription.routes_version IS 'Grows when there are others.';

CREATE TABLE event_delivery (
    id                 bigserial    PRIMARY KEY,
    position           bigint       NOT NULL,
    order_key          bigint,
    attempt_count      int          NOT NULL,
    max_attempts       int          NOT NULL,
    size               int          NOT NULL DEFAULT 65536,
    held               boolean      NOT NULL DEFAULT false,
    put_back           boolean      NOT NULL DEFAULT false,
    next_retry_at      timestamptz  NOT NULL,
    last_attempt_at    timestamptz,
    locked_until       timestamptz,
    created_at         timestamptz  NOT NULL,
    updated_at         timestamptz  NOT NULL,
    processed_at       timestamptz,
    occurred_at        timestamptz  NOT NULL,
    recorded_at        timestamptz  NOT NULL,
    event_id           uuid         NOT NULL,
    status             varchar(10)  NOT NULL,
    consumer_group     varchar(255) NOT NULL,
    action             varchar(100) NOT NULL,
    stream             varchar(249) NOT NULL,
    event_type         varchar(100) NOT NULL,
    source             varchar(100) NOT NULL,
    aggregate_type     varchar(100) NOT NULL,
    aggregate_id       varchar(255) NOT NULL,
    content_type       varchar(100) NOT NULL,
    partition_key      varchar(255),
    locked_by          varchar(255),
    last_error_code    varchar(100),
    last_error_message text,
    resolution         varchar(20),
    resolved_by        varchar(100),
    resolved_at        timestamptz,
    note               text,
    headers            jsonb,
    payload            jsonb,
    payload_bytes      bytea,
    record_partition   int,
    record_id          text,
    record_digest      bytea,
    record             bytea,
    CONSTRAINT event_delivery_status CHECK (status IN ('PENDING', 'PARKED', 'PROCESSING', 'DONE', 'DEAD')),
    CONSTRAINT event_delivery_locked CHECK ((status = 'PROCESSING') = (locked_by IS NOT NULL) AND (locked_by IS NULL) = (locked_until IS NULL)),
    CONSTRAINT event_delivery_held CHECK (NOT held OR status = 'DEAD'),
    CONSTRAINT event_delivery_one_payload CHECK (num_nonnulls(payload, payload_bytes) = 1),
    CONSTRAINT event_delivery_record CHECK (num_nulls(record_partition, record_digest, record) IN (0, 3) AND (record IS NOT NULL OR record_id IS NULL))
);

-- What is due, by action and stream: of those that are paused, or unknown to a process, it reads
-- nothing, and workers nothing of what came from Kafka, nor consumers of the rest. Rows whose
-- worker was gone are claimed by themselves.
CREATE INDEX idx_event_delivery_due ON event_delivery
       (consumer_group, action, stream, (record IS NOT NULL), (coalesce(last_error_code, '') = 'stale'), next_retry_at, id)
 WHERE status = 'PENDING';
-- An event from Kafka that an action is owed, or has given up, is not handled otherwise, nor owed twice.
CREATE UNIQUE INDEX idx_event_delivery_record ON event_delivery (consumer_group, action, record_digest)
 WHERE status <> 'DONE' AND record_digest IS NOT NULL;
-- The open rows of a key: those that others wait for, and those that wait, in their order. While a
-- transaction is open somewhere, no entry of a row that has gone on is removed, so they are read from
-- an id on below which no row of the key is open. Only a row that was put back may be there.
CREATE INDEX idx_event_delivery_head ON event_delivery (order_key, id)
 WHERE (status IN ('PENDING', 'PROCESSING') OR held) AND order_key IS NOT NULL;
CREATE INDEX idx_event_delivery_parked ON event_delivery (order_key, id) WHERE status = 'PARKED' AND order_key IS NOT NULL;
CREATE INDEX idx_event_delivery_put_back ON event_delivery (order_key, (status = 'PARKED'), id)
 WHERE put_back AND (status IN ('PENDING', 'PARKED', 'PROCESSING') OR held) AND order_key IS NOT NULL;
CREATE INDEX idx_event_delivery_locked ON event_delivery (consumer_group, locked_until) WHERE status = 'PROCESSING';
CREATE INDEX idx_event_delivery_dead ON event_delivery (consumer_group, id) WHERE status = 'DEAD';

COMMENT ON TABLE event_delivery IS
    'What is owed to handlers: of workers a row for each event, consumer group and action, with the whole event; of consumers one for each event that an action could not handle, and for those behind it.';
COMMENT ON COLUMN event_delivery.id IS 'Order in which the rows were made: the order within a key.';
COMMENT ON COLUMN event_delivery.position IS 'outbox.id of the event, or the offset of the record that brought it.';
COMMENT ON COLUMN event_delivery.order_key IS
    'Digest of group, action, stream and record key: of the same key one row after the other is handled. NULL: the order does not matter.';
COMMENT ON COLUMN event_delivery.attempt_count IS 'How often it was claimed, so that an event which ends its process counts too.';
COMMENT ON COLUMN event_delivery.max_attempts IS 'After so many attempts it is DEAD.';
COMMENT ON COLUMN event_delivery.size IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.held IS 'A DEAD row whose key waits for an operator.';
COMMENT ON COLUMN event_delivery.put_back IS
    'It is tried again although later rows of its key may have gone on: its worker was gone, or an operator wanted it.';
COMMENT ON COLUMN event_delivery.next_retry_at IS 'A PENDING row is not claimed before.';
COMMENT ON COLUMN event_delivery.last_attempt_at IS 'When it was claimed last.';
COMMENT ON COLUMN event_delivery.locked_until IS 'Its worker renews this; afterwards another one may take the row.';
COMMENT ON COLUMN event_delivery.created_at IS 'When the row was made.';
COMMENT ON COLUMN event_delivery.updated_at IS 'When its status changed last.';
COMMENT ON COLUMN event_delivery.processed_at IS 'When it became DONE or DEAD.';
COMMENT ON COLUMN event_delivery.occurred_at IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.recorded_at IS 'As outbox.created_at.';
COMMENT ON COLUMN event_delivery.event_id IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.status IS
    'PENDING: due at next_retry_at; PARKED: behind an open row of its key; PROCESSING: with a worker; DONE; DEAD: given up until an operator acts.';
COMMENT ON COLUMN event_delivery.consumer_group IS 'As in event_handled.';
COMMENT ON COLUMN event_delivery.action IS 'The handler that gets it, as in event_handled; empty if the group has none for its type.';
COMMENT ON COLUMN event_delivery.stream IS 'The topic that the event has in Kafka, or came from.';
COMMENT ON COLUMN event_delivery.event_type IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.source IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.aggregate_type IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.aggregate_id IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.content_type IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.partition_key IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.locked_by IS 'Host, process id and a random part of the worker that has it, and the number of the claim.';
COMMENT ON COLUMN event_delivery.last_error_code IS 'Kind of the last error, for example timeout; stale: its worker was gone.';
COMMENT ON COLUMN event_delivery.last_error_message IS 'The last error.';
COMMENT ON COLUMN event_delivery.resolution IS 'What an operator has decided about a DEAD row; NULL: nothing.';
COMMENT ON COLUMN event_delivery.resolved_by IS 'The operator.';
COMMENT ON COLUMN event_delivery.resolved_at IS 'When it was decided.';
COMMENT ON COLUMN event_delivery.note IS 'The operator''s note.';
COMMENT ON COLUMN event_delivery.headers IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.payload IS 'As in outbox.';
COMMENT ON COLUMN event_delivery.payload_bytes IS 'As in outbox; the value of the record that brought the event.';
COMMENT ON COLUMN event_delivery.record_partition IS 'The partition of the record that brought the event; NULL if it came from outbox.';
COMMENT ON COLUMN event_delivery.record_id IS 'The id of an event from Kafka that is no UUID; event_id is made from it then.';
COMMENT ON COLUMN event_delivery.record_digest IS 'Digest of source and id of an event from Kafka.';
COMMENT ON COLUMN event_delivery.record IS 'Key, headers and time of the record that brought the event, as JSON; with payload_bytes it is the record.';

-- Functions for what workers and operators do alike. They act with the rights of their caller.
-- Whoever inserts, finishes or requeues rows of a key locks it first, and decides in a later
-- statement, which sees what others have committed before.
-- +goose StatementBegin
DO $migration$
DECLARE
    schema  constant name := pg_catalog.current_schema();
    path    constant text := pg_catalog.current_setting('search_path');
    -- Locks the keys of %1$s, a list, by calling %2$s. A group has 64 locks, which are taken in
    -- their order.
    locking constant text := $sql$
            FOR lock IN
                SELECT DISTINCT base | (k & 63)
                  FROM unnest(%1$s) AS k,
                       (SELECT ('x' || encode(substr(sha256(convert_to('outbox.event_delivery.' || %3$L || '.' || $1, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint
                               & ~63::bigint AS base OFFSET 0) AS b
                 WHERE k IS NOT NULL
                 ORDER BY 1
            LOOP
                PERFORM %2$s(lock);
            END LOOP;
            $sql$;
    -- Makes the first row of each of the keys of %1$s PENDING if all of its rows are PARKED. Of
    -- rows that were not put back, none is open below the id that %2$s has for the key. It also says
    -- whether one is open below the ids of %4$s. Keys are ranges: an equation would let the primary key, of which all
    -- would be read, look as good as their index while the table is empty.
    promoting constant text := $sql$
            WITH looked AS MATERIALIZED (
                SELECT head.id AS head, back.status AS back, least(waiting.id, back.id) AS next,
                       least(CASE WHEN NOT head.put_back THEN head.id END, CASE WHEN NOT waiting.put_back THEN waiting.id END) < each.id AS before
                  FROM (SELECT e.k, coalesce(min(e.f), 0) AS f, min(e.i) AS id FROM unnest(%1$s, %2$s, %4$s) AS e (k, f, i) WHERE e.k IS NOT NULL GROUP BY e.k) AS each
                  LEFT JOIN LATERAL (
                       SELECT o.id, o.put_back FROM %3$I.event_delivery AS o
                        WHERE (o.order_key, o.id) >= (each.k, each.f) AND o.order_key <= each.k AND (o.status IN ('PENDING', 'PROCESSING') OR o.held) AND o.consumer_group = $1
                        ORDER BY o.order_key, o.id LIMIT 1) AS head ON true
                  LEFT JOIN LATERAL (
                       SELECT o.id, o.status FROM %3$I.event_delivery AS o
                        WHERE o.order_key = each.k AND o.put_back AND (o.status IN ('PENDING', 'PARKED', 'PROCESSING') OR o.held) AND o.consumer_group = $1
                        ORDER BY o.order_key, (o.status = 'PARKED'), o.id LIMIT 1) AS back ON true
                  LEFT JOIN LATERAL (
                       SELECT o.id, o.put_back FROM %3$I.event_delivery AS o
                        WHERE (o.order_key, o.id) >= (each.k, each.f) AND o.order_key <= each.k AND o.status = 'PARKED' AND o.consumer_group = $1
                        ORDER BY o.order_key, o.id LIMIT 1) AS waiting ON true
            ), promoted AS (
                UPDATE %3$I.event_delivery AS d
                   SET status = 'PENDING', next_retry_at = clock_timestamp(), updated_at = clock_timestamp()
                 WHERE d.status = 'PARKED' AND d.id = ANY (ARRAY(SELECT next FROM looked WHERE head IS NULL AND coalesce(back, 'PARKED') = 'PARKED'))
             RETURNING 1
            )
            SELECT (SELECT count(*) FROM promoted), coalesce((SELECT bool_or(before) FROM looked), false) INTO done, skipped;
            $sql$;
    target  text;
    granted record;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    -- Locks keys until the end of the transaction.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_lock_keys(consumer_group text, order_keys bigint[]) RETURNS void
        LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            lock bigint;
        BEGIN
            %2$s
        END $body$
        $function$, schema, format(locking, '$2', 'pg_advisory_xact_lock', schema));

    -- Locks keys against those who insert, promote or requeue rows of them, but not against those who
    -- end rows, nor against others who only look. Returns whether a later statement of the transaction
    -- sees what others have committed before it.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_lock_keys_shared(consumer_group text, order_keys bigint[]) RETURNS boolean
        LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            lock bigint;
        BEGIN
            %2$s
            RETURN current_setting('transaction_isolation') = 'read committed';
        END $body$
        $function$, schema, format(locking, '$2', 'pg_advisory_xact_lock_shared', schema));

    -- Locks keys, and makes the first row of each PENDING if all of them are PARKED. A floor is an id
    -- below which no row of the key is open, unless it was put back; without one it looks at all
    -- rows. Returns how many rows it has changed. Under another isolation level than READ COMMITTED it would not
    -- see what others have committed: then it changes nothing, and returns -1.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_promote(consumer_group text, order_keys bigint[], floors bigint[] DEFAULT NULL) RETURNS bigint
        LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
        SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $body$
        DECLARE
            done    bigint;
            skipped boolean;
        BEGIN
            IF current_setting('transaction_isolation') <> 'read committed' THEN
                RETURN -1;
            END IF;
            PERFORM %1$I.outbox_lock_keys($1, $2);
            %2$s
            RETURN done;
        END $body$
        $function$, schema, format(promoting, '$2', '$3', schema, 'NULL::bigint[]'));

    -- Ends rows that a worker has handled, and promotes the next of their keys, which have floors as
    -- for outbox_promote. Keys and floors are those of the rows; a row without order has no key. All rows must
    -- still be its own, and none before them in their keys be open, or nothing is done: a crash may have forgotten
    -- that one was ended. Returns what outbox_promote does.
    --
    -- Its locks are shared, because those who end rows need not wait for each other: no two of
    -- them have rows of the same key. They wait for whoever inserts, promotes or requeues rows
    -- of their keys, and the other way round.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_finish_deliveries(consumer_group text, worker text, ids bigint[], order_keys bigint[], floors bigint[]) RETURNS bigint
        LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
        SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $body$
        DECLARE
            lock    bigint;
            done    bigint;
            skipped boolean;
        BEGIN
            -- Only rows that are PROCESSING are with a worker.
            UPDATE %1$I.event_delivery AS d
               SET status = 'DONE', locked_by = NULL, locked_until = NULL, processed_at = clock_timestamp(), updated_at = clock_timestamp()
             WHERE d.id = ANY ($3) AND d.consumer_group = $1 AND d.locked_by = $2;
            GET DIAGNOSTICS done = ROW_COUNT;
            IF done <> cardinality($3) THEN
                RAISE EXCEPTION '%% of %% deliveries are not with this worker any more', cardinality($3) - done, cardinality($3)
                      USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            IF cardinality(array_remove($4, NULL)) = 0 THEN
                RETURN 0;
            ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
                RETURN -1;
            END IF;
            %2$s
            %3$s
            IF skipped THEN
                RAISE EXCEPTION 'a delivery before these is open'
                      USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            RETURN done;
        END $body$
        $function$, schema, format(locking, '$4', 'pg_advisory_xact_lock_shared', schema), format(promoting, '$4', '$5', schema, '$3'));

    -- Positions and leases of relays are for who may work for all groups. Who may write there now may go on doing so.
    FOREACH target IN ARRAY ARRAY['outbox_cursor', 'outbox_lease'] LOOP
        EXECUTE format($sql$
            INSERT INTO %1$I.consumer_group_role (consumer_group, role)
            SELECT DISTINCT '*', CASE a.grantee WHEN 0 THEN 'public' ELSE pg_get_userbyid(a.grantee) END
              FROM pg_class AS c
             CROSS JOIN LATERAL (SELECT c.relacl UNION ALL SELECT attacl FROM pg_attribute WHERE attrelid = c.oid) AS g (acl)
             CROSS JOIN LATERAL aclexplode(g.acl) AS a
             WHERE c.oid = %2$L::regclass AND a.privilege_type IN ('INSERT', 'UPDATE', 'DELETE') AND a.grantee <> c.relowner
                ON CONFLICT DO NOTHING
            $sql$, schema, format('%I.%I', schema, target));
    END LOOP;
    -- The policies of event_handled: consumer_group_role says who may work for which group. A row is for the group that
    -- its column names, with worker: before it in the tables of relays.
    FOR granted IN
        SELECT * FROM (VALUES ('event_delivery', 'consumer_group', ''), ('event_subscription', 'consumer_group', ''),
                              ('outbox_cursor', 'relay', 'worker:'), ('outbox_lease', 'name', 'worker:')) AS t (name, owner, prefix)
    LOOP
        EXECUTE format($sql$
            CREATE POLICY %2$I ON %1$I.%3$I FOR SELECT USING (true);
            CREATE POLICY %4$I ON %1$I.%3$I USING (
                ARRAY(SELECT r.consumer_group FROM %1$I.consumer_group_role AS r
                       WHERE r.role = 'public' OR pg_has_role(to_regrole(quote_ident(r.role)), 'USAGE')
                      UNION ALL
                      SELECT '*' WHERE pg_has_role('pg_write_all_data', 'USAGE'))
                && ARRAY[%5$s, '*']::varchar[]);
            ALTER TABLE %1$I.%3$I ENABLE ROW LEVEL SECURITY
            $sql$, schema, granted.name || '_read', granted.name, granted.name || '_write',
            CASE granted.prefix WHEN '' THEN quote_ident(granted.owner)
                 ELSE format('CASE WHEN starts_with(%1$I, %2$L) THEN substr(%1$I, %3$s) END', granted.owner, granted.prefix, length(granted.prefix) + 1) END);
    END LOOP;
    FOR granted IN -- whose statements are subject to the policies has to find its groups
        SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee
          FROM pg_class AS c
         CROSS JOIN LATERAL (SELECT c.relacl UNION ALL SELECT attacl FROM pg_attribute WHERE attrelid = c.oid) AS g (acl)
         CROSS JOIN LATERAL aclexplode(g.acl) AS a
         WHERE c.oid IN (format('%I.outbox_cursor', schema)::regclass, format('%I.outbox_lease', schema)::regclass) AND a.grantee <> c.relowner
    LOOP
        EXECUTE format('GRANT SELECT ON %I.consumer_group_role TO %s', schema, granted.grantee);
    END LOOP;
    EXECUTE format('COMMENT ON TABLE %I.consumer_group_role IS %L', schema,
        'Which roles may write for which consumer groups, beside the owner of the tables and members of pg_write_all_data.');
    EXECUTE format('COMMENT ON COLUMN %I.consumer_group_role.consumer_group IS %L', schema, 'As in event_handled; * stands for all groups, and for relays.');
    FOR granted IN
        SELECT p.oid::regprocedure AS signature FROM pg_proc AS p
         WHERE p.pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = schema)
           AND p.proname IN ('outbox_lock_keys', 'outbox_lock_keys_shared', 'outbox_promote', 'outbox_finish_deliveries')
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', granted.signature);
    END LOOP;
    PERFORM set_config('search_path', path, true);
END $migration$;
-- +goose StatementEnd
