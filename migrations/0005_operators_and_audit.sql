-- +goose Up

-- What operators do. Each function changes rows and adds rows to outbox_audit that say so, in one transaction. They run
-- with the rights of the owner, so an operator needs no right to the tables.

CREATE TABLE outbox_audit (
    id             bigserial    PRIMARY KEY,
    created_at     timestamptz  NOT NULL DEFAULT now(),
    operator       text         NOT NULL,
    action         text         NOT NULL,
    reason         text         NOT NULL,
    relay          text         NOT NULL,
    parking_key    text         NOT NULL,
    failed_id      bigint,
    outbox_id      bigint,
    event_id       uuid,
    payload        jsonb,
    payload_bytes  bytea,
    consumer_group text,
    login          name         NOT NULL DEFAULT session_user,
    delivery_id    bigint,
    handler        text,
    CONSTRAINT outbox_audit_lengths CHECK (
        char_length(operator) <= 100 AND char_length(action) <= 20 AND char_length(relay) <= 100
        AND char_length(consumer_group) <= 255 AND char_length(handler) <= 100)
);

CREATE INDEX outbox_audit_failed_id_idx ON outbox_audit (failed_id, id);
CREATE INDEX outbox_audit_delivery_id_idx ON outbox_audit (delivery_id, id) WHERE delivery_id IS NOT NULL;

COMMENT ON TABLE outbox_audit IS 'What operators did about failed events, deliveries and consumer groups, and why.';
COMMENT ON COLUMN outbox_audit.id IS 'Order of the actions.';
COMMENT ON COLUMN outbox_audit.created_at IS 'When it was done.';
COMMENT ON COLUMN outbox_audit.operator IS
    'The operator, as the application that was logged in says; of a relay "relay" and its name.';
COMMENT ON COLUMN outbox_audit.action IS
    'retry, resolve, edit, hold, release or read; pause, resume or rewind of a consumer group; to-kafka, '
    'to-postgres, finish-cut or cancel-cut of groups that are moved; from-debezium, begin-relay or to-debezium of '
    'a relay; replay of events to Kafka; forget of what a group has handled of them, and forget-action of what it '
    'no longer handles; cancel of a delayed event; expire of a partition of outbox_archive; start-group of a new group; '
    'stop-archive of a relay or a group of workers that archived.';
COMMENT ON COLUMN outbox_audit.reason IS 'The operator''s note.';
COMMENT ON COLUMN outbox_audit.relay IS
    'The relay of the event or key, or at which groups are moved; empty for all other actions.';
COMMENT ON COLUMN outbox_audit.parking_key IS
    'Topic, a slash, and the record key. For a consumer group both may be empty. For a partition of outbox_archive its '
    'schema and name are behind the slash.';
COMMENT ON COLUMN outbox_audit.failed_id IS 'outbox_failed.id; NULL if the action was about a key.';
COMMENT ON COLUMN outbox_audit.outbox_id IS
    'outbox.id of the event; NULL if the action was about a key or a consumer group.';
COMMENT ON COLUMN outbox_audit.event_id IS 'As in outbox; NULL likewise.';
COMMENT ON COLUMN outbox_audit.payload IS
    'The payload before an edit, or of a cancelled event; NULL for all other actions, and if it could not be read.';
COMMENT ON COLUMN outbox_audit.payload_bytes IS 'The same, for payloads that are not JSON.';
COMMENT ON COLUMN outbox_audit.consumer_group IS
    'The consumer group of the delivery, or that was paused, resumed, rewound or moved, or for which alone events '
    'were replayed; NULL for all other actions.';
COMMENT ON COLUMN outbox_audit.login IS
    'The role that was logged in to PostgreSQL. Nobody but the owner can write another one.';
COMMENT ON COLUMN outbox_audit.delivery_id IS 'event_delivery.id; NULL for all other actions.';
COMMENT ON COLUMN outbox_audit.handler IS 'event_delivery.action; NULL for all other actions.';

-- Rows are locked in the order of their ids, as relays and workers lock them.
-- +goose StatementBegin
SELECT outbox_define(current_schema(), fragments => ARRAY[

-- Keeps cuts away until the end of the transaction, by the lock of outbox_lock_groups. A later statement sees the cuts
-- before, and a later cut sees what the transaction has parked.
'no_cut', $sql$
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'failed events are retried under READ COMMITTED only' USING ERRCODE = 'invalid_transaction_state';
    END IF;
    PERFORM pg_advisory_xact_lock_shared(hashtextextended('outbox.rebase.' || @schema_name@, 0));
$sql$,

-- Reads the payload $2 of an edit into json or bytes, and the size of what the row gets into octets and printed. kept are
-- the headers that the row has; those that cannot be printed, with which no event could be read, become NULL. So does the
-- payload of old if it cannot be copied into the audit.
'edited', $sql$
    unread := @schema@.outbox_unread(old.payload, old.payload_bytes);
    IF unread <> '' THEN
        old.payload := NULL;
        old.payload_bytes := NULL;
    END IF;
    IF as_json THEN
        json := convert_from($2, 'UTF8')::jsonb;
        octets := octet_length(json::text);
    ELSE
        bytes := $2;
        octets := octet_length(bytes);
    END IF;
    IF octets IS NULL OR octets > most THEN
        RAISE EXCEPTION 'the payload has to be there, and to have at most % bytes', most
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    BEGIN
        printed := coalesce(octet_length(kept::text), 0);
    EXCEPTION WHEN program_limit_exceeded OR data_exception OR internal_error THEN
        printed := NULL;
    END;
    IF printed IS NULL OR printed > most THEN
        kept := NULL;
        printed := 0;
    END IF;
$sql$

], definitions => ARRAY[

-- Refuses an action without an operator who can be read or a reason: both have a letter or a digit, and the operator no
-- characters that print nothing, as tabs, line breaks or zero-width spaces. The classes do not depend on the collation
-- of the database; internal/check has the same ones. Relays, workers and consumers leave out the rows that an action
-- has locked, or wait for them, so a transaction that is left open is ended after 10 s, or after the time that is set
-- if that is shorter.
$function$
CREATE FUNCTION @schema@.outbox_check_audit(operator text, reason text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    -- Controls, formats, separators but the space, private use, and what Unicode calls ignorable.
    hidden  constant text := '[\u0001-\u001f\u007f-\u00a0\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890-\u0891\u08e2'
        '\u115f-\u1160\u1680\u17b4-\u17b5\u180b-\u180f\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\u3164\ue000-\uf8ff'
        '\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3'
        '\U0001d173-\U0001d17a\U000e0000-\U000e0fff\U000f0000-\U000ffffd\U00100000-\U0010fffd]';
    -- The blocks that have letters or digits. Some have other signs, too.
    letters constant text := '[0-9A-Za-z\u00aa\u00b5\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02ff\u0370-\u1fff\u2071-\u209c'
        '\u2102-\u218b\u2c00-\u2dff\u2e2f\u3005-\u3006\u3031-\u303c\u3041-\ud7ff\uf900-\ufdff\ufe70-\ufefe\uff10-\uffdc'
        '\U00010000-\U0001cfff\U0001d400-\U0001efff\U0001fbf0-\U0001fbf9\U00020000-\U0003ffff]';
BEGIN
    IF operator IS NULL OR operator !~ letters OR operator ~ hidden OR char_length(operator) > 100 THEN
        RAISE EXCEPTION 'operator has to be there, in at most 100 characters that can be printed, with a letter or digit'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF reason IS NULL OR char_length(reason) > 10000 OR regexp_replace(reason, hidden, '', 'g') !~ letters THEN
        RAISE EXCEPTION 'reason has to be there, in at most 10000 characters, with a letter or digit'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF current_setting('idle_in_transaction_session_timeout')::interval NOT BETWEEN '1 ms' AND '10 s' THEN
        PERFORM set_config('idle_in_transaction_session_timeout', '10s', true);
    END IF;
END $body$
$function$,

-- Returns what a reason in the audit says of a payload that PostgreSQL can neither read nor copy, as after a loss of pages,
-- and nothing for any other one. All of the payload is read, and none of it printed.
$function$
CREATE FUNCTION @schema@.outbox_unread(payload jsonb, payload_bytes bytea) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM jsonb_typeof($1), sha256($2);
    RETURN '';
EXCEPTION WHEN internal_error THEN -- and all others of its class, as data_corrupted
    RETURN format(' (the payload from before cannot be read: %s %s)', SQLSTATE, SQLERRM);
END $body$
$function$,

-- Refuses names that a consumer group or a topic of Kafka cannot have, and more than 1,000 topics. NULL is no topic.
$function$
CREATE FUNCTION @schema@.outbox_check_names(consumer_group text, topics text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    IF coalesce(consumer_group, '') = '' OR char_length(consumer_group) > 255 THEN
        RAISE EXCEPTION 'consumer_group has to be there, in at most 255 characters'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF EXISTS (SELECT FROM unnest(topics) AS t WHERE t !~ '^[A-Za-z0-9._-]{1,249}$' OR btrim(t, '.') = '') THEN
        RAISE EXCEPTION 'a topic has at most 249 of a-z A-Z 0-9 . _ -' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (SELECT count(DISTINCT t) FROM unnest(topics) AS t) > 1000 THEN
        RAISE EXCEPTION 'more than 1000 topics: name fewer at a time' USING ERRCODE = 'invalid_parameter_value';
    END IF;
END $body$
$function$,

-- Fails if a relay has no position: no process sends its events. It has ended by a cut, or its rows were deleted. A relay
-- that runs writes its position before its first failed event, also if it sends exactly once.
$function$
CREATE FUNCTION @schema@.outbox_check_relay(relay text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    IF NOT EXISTS (SELECT FROM @schema@.outbox_cursor AS c WHERE c.relay = $1) THEN
        RAISE EXCEPTION 'relay % has %', $1, CASE WHEN EXISTS (SELECT FROM @schema@.outbox_lease AS l
                WHERE l.name = $1 AND l.holder IN ('outbox cut', 'outbox debezium') AND l.expires_at = 'infinity')
            THEN 'ended by a cut and sends nothing' ELSE 'no position, it sends nothing' END
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
END $body$
$function$,

-- Makes heads due, and parks dead events. The relay finds the place of an event among those of its key, because it
-- may be sending one of them. Returns how many events it changed.
$function$
CREATE FUNCTION @schema@.outbox_retry_failed(ids bigint[], operator text, reason text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    done bigint;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason);
    @no_cut@
    PERFORM @schema@.outbox_check_relay(f.relay)
       FROM (SELECT DISTINCT f.relay FROM @schema@.outbox_failed AS f WHERE f.id = ANY (ids) AND f.status <> 'resolved') AS f;
    WITH chosen AS MATERIALIZED (
        SELECT f.id FROM @schema@.outbox_failed AS f
         WHERE f.id = ANY (ids) AND (f.status IN ('waiting', 'failed') AND NOT f.held OR f.status = 'dead')
           AND (num_nonnulls(f.payload, f.payload_bytes) > 0 OR f.error_class IS DISTINCT FROM 'unreadable_row')
         ORDER BY f.id FOR UPDATE
    ), changed AS (
        UPDATE @schema@.outbox_failed AS f
           SET status = CASE f.status WHEN 'dead' THEN 'parked' ELSE f.status END,
               retry_count = CASE f.status WHEN 'dead' THEN 0 ELSE f.retry_count END,
               held = false, next_retry_at = now()
         WHERE f.id = ANY (ARRAY(SELECT c.id FROM chosen AS c))
     RETURNING f.relay, f.parking_key, f.id, f.outbox_id, f.event_id
    ), audited AS (
        INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id)
        SELECT $2, 'retry', $3, c.relay, c.parking_key, c.id, c.outbox_id, c.event_id FROM changed AS c
     RETURNING 1
    )
    SELECT count(*) INTO done FROM audited;
    RETURN done;
END $body$
$function$,

-- Closes events without sending them. Returns how many events it changed.
$function$
CREATE FUNCTION @schema@.outbox_resolve_failed(ids bigint[], operator text, reason text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    done bigint;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason);
    WITH chosen AS MATERIALIZED (
        SELECT f.id FROM @schema@.outbox_failed AS f
            WHERE f.id = ANY (ids) AND f.status <> 'resolved' ORDER BY f.id FOR UPDATE
    ), changed AS (
        UPDATE @schema@.outbox_failed AS f
           SET status = 'resolved', held = false, resolved_at = now(), resolved_by = $2, resolution = $3
         WHERE f.id = ANY (ARRAY(SELECT c.id FROM chosen AS c))
     RETURNING f.relay, f.parking_key, f.id, f.outbox_id, f.event_id
    ), audited AS (
        INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id)
        SELECT $2, 'resolve', $3, c.relay, c.parking_key, c.id, c.outbox_id, c.event_id FROM changed AS c
     RETURNING 1
    )
    SELECT count(*) INTO done FROM audited;
    RETURN done;
END $body$
$function$,

-- Gives a dead event another payload of the same content type, and retries it. Everything else stays, except for
-- headers that cannot be printed, which no relay could send. The headers of an event that no relay could read are
-- taken from outbox. Returns false if the event is not dead.
$function$
CREATE FUNCTION @schema@.outbox_edit_failed(failed_id bigint, payload bytea, operator text, reason text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    most    constant int := 104857600; -- bytes of a payload, or of headers, in any configuration
    as_json boolean;
    old     @schema@.outbox_failed;
    json    jsonb;
    bytes   bytea;
    kept    jsonb;
    unread  text;
    printed int;
    octets  int;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason);
    @no_cut@
    SELECT f.* INTO old FROM @schema@.outbox_failed AS f WHERE f.id = $1 AND f.status = 'dead' FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM @schema@.outbox_check_relay(old.relay);
    IF old.content_type = '' THEN
        RAISE EXCEPTION 'the event is a tombstone, which has no payload' USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    as_json := old.content_type = 'application/json';
    kept := old.headers;
    IF kept IS NULL AND old.error_class = 'unreadable_row' THEN
        SELECT o.headers INTO kept FROM @schema@.outbox AS o WHERE o.id = old.outbox_id AND o.event_id = old.event_id;
    END IF;
    @edited@
    UPDATE @schema@.outbox_failed AS f
       SET payload = json, payload_bytes = bytes, headers = kept, size = octets + printed,
           status = 'parked', retry_count = 0, held = false, next_retry_at = now(),
           error_class = CASE f.error_class WHEN 'unreadable_row' THEN NULL ELSE f.error_class END
     WHERE f.id = $1;
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id,
        payload, payload_bytes)
    VALUES ($3, 'edit', $4 || unread, old.relay, old.parking_key, old.id, old.outbox_id, old.event_id, old.payload,
        old.payload_bytes);
    RETURN true;
END $body$
$function$,

-- Holds all events of a key back. Returns false if no event of the key has failed.
$function$
CREATE FUNCTION @schema@.outbox_hold_key(relay text, parking_key text, operator text, reason text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason);
    WITH chosen AS MATERIALIZED (
        SELECT f.id FROM @schema@.outbox_failed AS f
         WHERE f.relay = $1 AND f.parking_key = $2 AND f.status IN ('waiting', 'failed', 'parked', 'dead')
         ORDER BY f.id FOR UPDATE
    ), changed AS (
        UPDATE @schema@.outbox_failed AS f SET held = true WHERE f.id = ANY (ARRAY(SELECT c.id FROM chosen AS c))
            RETURNING 1
    )
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key)
    SELECT $3, 'hold', $4, $1, $2 WHERE EXISTS (SELECT FROM changed);
    RETURN FOUND;
END $body$
$function$,

-- Lets the events of a key go on. Returns false if the key is not held.
$function$
CREATE FUNCTION @schema@.outbox_release_key(relay text, parking_key text, operator text, reason text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason);
    WITH chosen AS MATERIALIZED (
        SELECT f.id FROM @schema@.outbox_failed AS f
         WHERE f.relay = $1 AND f.parking_key = $2 AND f.status IN ('waiting', 'failed', 'parked', 'dead') AND f.held
         ORDER BY f.id FOR UPDATE
    ), changed AS (
        UPDATE @schema@.outbox_failed AS f SET held = false WHERE f.id = ANY (ARRAY(SELECT c.id FROM chosen AS c))
            RETURNING 1
    )
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key)
    SELECT $3, 'release', $4, $1, $2 WHERE EXISTS (SELECT FROM changed);
    RETURN FOUND;
END $body$
$function$,

-- Records that an operator has read the payload of a failed event. Returns false if there is no such event.
$function$
CREATE FUNCTION @schema@.outbox_audit_read(failed_id bigint, operator text, reason text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason);
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id)
    SELECT $2, 'read', $3, f.relay, f.parking_key, f.id, f.outbox_id, f.event_id FROM @schema@.outbox_failed AS f
        WHERE f.id = $1;
    RETURN FOUND;
END $body$
$function$,

-- The same for an event in outbox. The relay is empty: the event belongs to all of them.
$function$
CREATE FUNCTION @schema@.outbox_audit_read_recorded(outbox_id bigint, operator text, reason text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason);
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, outbox_id, event_id)
    SELECT $2, 'read', $3, '', coalesce(o.topic, '') || '/' || coalesce(o.partition_key, o.aggregate_id), o.id,
        o.event_id
      FROM @schema@.outbox AS o WHERE o.id = $1;
    RETURN FOUND;
END $body$
$function$,

-- Pauses a topic of a consumer group, or all topics if the name is empty. Returns false if it is paused already.
$function$
CREATE FUNCTION @schema@.outbox_pause_consumer(consumer_group text, topic text, operator text, reason text)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason), @schema@.outbox_check_names($1, ARRAY[nullif($2, '')]);
    WITH paused AS (
        INSERT INTO @schema@.consumer_pause (consumer_group, topic, operator, reason) VALUES ($1, $2, $3, $4)
            ON CONFLICT ON CONSTRAINT consumer_pause_pkey DO NOTHING RETURNING 1
    )
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
    SELECT $3, 'pause', $4, '', $2 || '/', $1 WHERE EXISTS (SELECT FROM paused);
    RETURN FOUND;
END $body$
$function$,

-- Ends a pause. Returns false if there is none.
$function$
CREATE FUNCTION @schema@.outbox_resume_consumer(consumer_group text, topic text, operator text, reason text)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason);
    WITH resumed AS (
        DELETE FROM @schema@.consumer_pause AS p WHERE p.consumer_group = $1 AND p.topic = $2 RETURNING 1
    )
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
    SELECT $3, 'resume', $4, '', $2 || '/', $1 WHERE EXISTS (SELECT FROM resumed);
    RETURN FOUND;
END $body$
$function$,

-- Sets positions of a consumer group back, never ahead, and only where the group has begun. The audit names the topics
-- that the group reads, also if only the offsets in Kafka are set back. Returns how many positions it found. saved_at
-- stays: if Kafka did not take the offsets, a rewind to a time is repeated, and goes by
-- the positions that were saved before that time.
$function$
CREATE FUNCTION @schema@.outbox_rewind_consumer(
    consumer_group text, topics text[], topic_ids uuid[], partitions int[], positions bigint[],
    operator text, reason text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    done bigint;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason), @schema@.outbox_check_names($1, $2);
    WITH wanted AS (
        SELECT w.* FROM unnest($2, $3, $4, $5) AS w (topic, id, number, at) WHERE w.at >= 0
    ), changed AS (
        UPDATE @schema@.consumer_start AS s SET position = least(s.position, w.at)
          FROM wanted AS w
         WHERE s.consumer_group = $1 AND s.topic = w.topic AND s.topic_id = w.id AND s.partition = w.number
             AND s.position IS NOT NULL
     RETURNING 1
    ), audited AS (
        INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
        SELECT DISTINCT $6, 'rewind', $7, '', w.topic || '/', $1 FROM wanted AS w
         WHERE EXISTS (SELECT FROM @schema@.consumer_start AS s WHERE s.consumer_group = $1 AND s.topic = w.topic)
    )
    SELECT count(*) INTO done FROM changed;
    RETURN done;
END $body$
$function$,

-- Locks the keys of rows until the end of the transaction, group after group. Decisions under the lock have to be
-- made by a later statement. Workers wait for the lock; see outbox_check_audit.
$function$
CREATE FUNCTION @schema@.outbox_lock_deliveries(ids bigint[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    keys record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'deliveries are changed under READ COMMITTED only' USING ERRCODE = 'invalid_transaction_state';
    END IF;
    FOR keys IN SELECT d.consumer_group, array_agg(d.order_key) AS list FROM @schema@.event_delivery AS d
                 WHERE d.id = ANY (ids) AND d.order_key IS NOT NULL GROUP BY d.consumer_group
                     ORDER BY d.consumer_group LOOP
        PERFORM @schema@.outbox_lock_keys(keys.consumer_group, keys.list);
    END LOOP;
END $body$
$function$,

-- Promotes the first row of each key of the rows, where all open rows are PARKED.
$function$
CREATE FUNCTION @schema@.outbox_promote_deliveries(ids bigint[]) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $body$
    SELECT @schema@.outbox_promote(keys.consumer_group, keys.list)
      FROM (SELECT d.consumer_group, array_agg(d.order_key) AS list FROM @schema@.event_delivery AS d
             WHERE d.id = ANY (ids) AND d.order_key IS NOT NULL GROUP BY d.consumer_group
                 ORDER BY d.consumer_group) AS keys
$body$
$function$,

-- Gives DEAD rows all their attempts again. A row goes before the later rows of its key that wait, unless one of them
-- is claimed or is being claimed at this moment. Returns how many rows it changed.
$function$
CREATE FUNCTION @schema@.outbox_requeue_deliveries(ids bigint[], operator text, reason text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
DECLARE
    done bigint;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason), @schema@.outbox_lock_deliveries(ids);
    WITH chosen AS MATERIALIZED (
        SELECT d.id FROM @schema@.event_delivery AS d
            WHERE d.id = ANY (ids) AND d.status = 'DEAD' ORDER BY d.id FOR UPDATE
    ), changed AS (
        UPDATE @schema@.event_delivery AS d
           SET status = CASE WHEN d.order_key IS NULL THEN 'PENDING' ELSE 'PARKED' END,
               held = false, put_back = true, dead_letter_owed = false, attempt_count = 0, failed_at = NULL,
               witness_after = NULL,
               next_retry_at = now(), updated_at = now(), processed_at = NULL,
               resolved_by = NULL, resolved_at = NULL, note = NULL
         WHERE d.id = ANY (ARRAY(SELECT c.id FROM chosen AS c))
     RETURNING d.id, d.consumer_group, d.action, d.stream, coalesce(d.partition_key, d.aggregate_id) AS key,
         CASE WHEN d.record IS NULL THEN d.position END AS position, d.event_id
    ), audited AS (
        INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group, handler,
            delivery_id, outbox_id, event_id)
        SELECT $2, 'retry', $3, '', c.stream || '/' || c.key, c.consumer_group, c.action, c.id, c.position, c.event_id
          FROM changed AS c
     RETURNING 1
    )
    SELECT count(*) INTO done FROM audited;
    -- A later row that is PENDING is parked again. One that is being claimed is locked, and is handled first.
    WITH keys AS MATERIALIZED (
        SELECT DISTINCT d.consumer_group, d.order_key FROM @schema@.event_delivery AS d
            WHERE d.id = ANY (ids) AND d.status = 'PARKED'
    ), heads AS MATERIALIZED (
        SELECT head.id FROM keys AS k
         CROSS JOIN LATERAL (
               SELECT o.id, o.status FROM @schema@.event_delivery AS o
                WHERE o.order_key >= k.order_key AND o.order_key <= k.order_key
                    AND (o.status IN ('PENDING', 'PROCESSING') OR o.held) AND o.consumer_group = k.consumer_group
                ORDER BY o.order_key, o.id LIMIT 1) AS head
         CROSS JOIN LATERAL (
               SELECT o.id FROM @schema@.event_delivery AS o
                WHERE o.order_key >= k.order_key AND o.order_key <= k.order_key AND o.status = 'PARKED'
                    AND o.consumer_group = k.consumer_group
                ORDER BY o.order_key, o.id LIMIT 1) AS first
         WHERE head.status = 'PENDING' AND first.id < head.id
    ), unclaimed AS MATERIALIZED (
        SELECT d.id FROM @schema@.event_delivery AS d
         WHERE d.id = ANY (ARRAY(SELECT h.id FROM heads AS h)) AND d.status = 'PENDING'
             ORDER BY d.id FOR UPDATE SKIP LOCKED
    )
    UPDATE @schema@.event_delivery AS d SET status = 'PARKED', updated_at = now()
        WHERE d.id = ANY (ARRAY(SELECT u.id FROM unclaimed AS u));
    PERFORM @schema@.outbox_promote_deliveries(ids);
    RETURN done;
END $body$
$function$,

-- Gives a DEAD row another payload of the same content type, and all its attempts again. Only this row has it: outbox,
-- the record in Kafka and the rows of other groups and actions stay. The value of a record is bytes, whatever its content
-- type. Returns false if the row is not DEAD, or is resolved.
$function$
CREATE FUNCTION @schema@.outbox_edit_delivery(delivery_id bigint, payload bytea, operator text, reason text)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    most    constant int := 104857600; -- as in outbox_edit_failed
    as_json boolean;
    old     @schema@.event_delivery;
    parts   jsonb; -- of the record
    json    jsonb;
    bytes   bytea;
    kept    jsonb;
    unread  text;
    printed int;
    octets  int;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason), @schema@.outbox_lock_deliveries(ARRAY[$1]);
    SELECT d.* INTO old FROM @schema@.event_delivery AS d
     WHERE d.id = $1 AND d.status = 'DEAD' AND d.resolved_at IS NULL FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF old.dead_letter IS NOT NULL THEN
        RAISE EXCEPTION 'only the dead letter % has the value of the record: outbox dlq edit edits that', old.dead_letter
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    IF @schema@.outbox_unread(NULL, old.record) = '' THEN
        parts := convert_from(old.record, 'UTF8')::jsonb;
    END IF;
    IF parts ? 'missing' OR parts IS NULL AND old.record IS NOT NULL THEN
        RAISE EXCEPTION 'the row does not have the whole record: parts were too long to be read, or are damaged'
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    IF old.record IS NULL AND old.content_type = '' THEN
        RAISE EXCEPTION 'the event is a tombstone, which has no payload' USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    as_json := old.record IS NULL AND old.content_type = 'application/json';
    kept := old.headers;
    @edited@
    UPDATE @schema@.event_delivery AS d
       SET payload = json, payload_bytes = bytes, headers = kept, size = octets + printed + coalesce(octet_length(old.record), 0),
           record = CASE WHEN parts ? 'no_value' THEN convert_to((parts - 'no_value')::text, 'UTF8') ELSE old.record END
     WHERE d.id = $1;
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group, handler, delivery_id,
        outbox_id, event_id, payload, payload_bytes)
    VALUES ($3, 'edit', $4 || unread, '', old.stream || '/' || coalesce(old.partition_key, old.aggregate_id), old.consumer_group,
        old.action, old.id, CASE WHEN old.record IS NULL THEN old.position END, old.event_id, old.payload, old.payload_bytes);
    PERFORM @schema@.outbox_requeue_deliveries(ARRAY[$1], $3, $4);
    RETURN true;
END $body$
$function$,

-- Closes rows without handling them, and lets the next rows of their keys go on. A row that is claimed, or is being
-- claimed, stays. Returns how many rows it changed.
$function$
CREATE FUNCTION @schema@.outbox_resolve_deliveries(ids bigint[], operator text, reason text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
DECLARE
    done bigint;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason), @schema@.outbox_lock_deliveries(ids);
    WITH chosen AS MATERIALIZED (
        SELECT d.id FROM @schema@.event_delivery AS d
         WHERE d.id = ANY (ids) AND d.status IN ('PENDING', 'PARKED', 'DEAD') AND d.resolved_at IS NULL
         ORDER BY d.id FOR UPDATE SKIP LOCKED
    ), changed AS (
        UPDATE @schema@.event_delivery AS d
           SET status = 'DEAD', held = false, updated_at = now(), processed_at = coalesce(d.processed_at, now()),
               resolved_by = $2, resolved_at = now(), note = $3
         WHERE d.id = ANY (ARRAY(SELECT c.id FROM chosen AS c))
     RETURNING d.id, d.consumer_group, d.action, d.stream, coalesce(d.partition_key, d.aggregate_id) AS key,
         CASE WHEN d.record IS NULL THEN d.position END AS position, d.event_id
    ), audited AS (
        INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group, handler,
            delivery_id, outbox_id, event_id)
        SELECT $2, 'resolve', $3, '', c.stream || '/' || c.key, c.consumer_group, c.action, c.id, c.position, c.event_id
          FROM changed AS c
     RETURNING 1
    )
    SELECT count(*) INTO done FROM audited;
    PERFORM @schema@.outbox_promote_deliveries(ids);
    RETURN done;
END $body$
$function$,

-- Has the keys of DEAD rows wait for an operator: later rows of the keys are not handled. A later row that is PENDING
-- is parked again; one that is claimed, or is being claimed, is handled. Returns how many rows hold their keys.
$function$
CREATE FUNCTION @schema@.outbox_hold_deliveries(ids bigint[], operator text, reason text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
DECLARE
    done bigint;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason), @schema@.outbox_lock_deliveries(ids);
    WITH chosen AS MATERIALIZED (
        SELECT d.id FROM @schema@.event_delivery AS d
         WHERE d.id = ANY (ids) AND d.status = 'DEAD' AND d.resolved_at IS NULL AND d.order_key IS NOT NULL
             ORDER BY d.id FOR UPDATE
    ), changed AS ( -- put_back, as later rows may have gone on
        UPDATE @schema@.event_delivery AS d SET held = true, put_back = true
         WHERE d.id = ANY (ARRAY(SELECT c.id FROM chosen AS c))
     RETURNING d.id, d.consumer_group, d.action, d.stream, coalesce(d.partition_key, d.aggregate_id) AS key,
         CASE WHEN d.record IS NULL THEN d.position END AS position, d.event_id
    ), audited AS (
        INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group, handler,
            delivery_id, outbox_id, event_id)
        SELECT $2, 'hold', $3, '', c.stream || '/' || c.key, c.consumer_group, c.action, c.id, c.position, c.event_id
          FROM changed AS c
     RETURNING 1
    )
    SELECT count(*) INTO done FROM audited;
    WITH keys AS MATERIALIZED (
        SELECT DISTINCT d.consumer_group, d.order_key FROM @schema@.event_delivery AS d
            WHERE d.id = ANY (ids) AND d.held
    ), heads AS MATERIALIZED (
        SELECT o.id FROM keys AS k CROSS JOIN LATERAL (
               SELECT o.id FROM @schema@.event_delivery AS o
                WHERE o.order_key >= k.order_key AND o.order_key <= k.order_key
                    AND (o.status IN ('PENDING', 'PROCESSING') OR o.held) AND o.status = 'PENDING'
                    AND o.consumer_group = k.consumer_group
                ORDER BY o.order_key, o.id) AS o
    ), unclaimed AS MATERIALIZED (
        SELECT d.id FROM @schema@.event_delivery AS d
         WHERE d.id = ANY (ARRAY(SELECT h.id FROM heads AS h)) AND d.status = 'PENDING'
             ORDER BY d.id FOR UPDATE SKIP LOCKED
    )
    UPDATE @schema@.event_delivery AS d SET status = 'PARKED', updated_at = now()
        WHERE d.id = ANY (ARRAY(SELECT u.id FROM unclaimed AS u));
    RETURN done;
END $body$
$function$,

-- Lets keys go on that are held by DEAD rows. These rows stay DEAD. Returns how many rows it changed.
$function$
CREATE FUNCTION @schema@.outbox_release_deliveries(ids bigint[], operator text, reason text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
DECLARE
    done bigint;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason), @schema@.outbox_lock_deliveries(ids);
    WITH keys AS MATERIALIZED (
        SELECT DISTINCT d.consumer_group, d.order_key FROM @schema@.event_delivery AS d
            WHERE d.id = ANY (ids) AND d.order_key IS NOT NULL
    ), found AS MATERIALIZED (
        SELECT o.id FROM keys AS k CROSS JOIN LATERAL (
               SELECT o.id FROM @schema@.event_delivery AS o
                WHERE o.order_key >= k.order_key AND o.order_key <= k.order_key
                    AND (o.status IN ('PENDING', 'PROCESSING') OR o.held) AND o.held
                    AND o.consumer_group = k.consumer_group
                ORDER BY o.order_key, o.id) AS o
    ), chosen AS MATERIALIZED (
        SELECT d.id FROM @schema@.event_delivery AS d
            WHERE d.id = ANY (ARRAY(SELECT f.id FROM found AS f)) AND d.held ORDER BY d.id FOR UPDATE
    ), changed AS (
        UPDATE @schema@.event_delivery AS d SET held = false
         WHERE d.id = ANY (ARRAY(SELECT c.id FROM chosen AS c))
     RETURNING d.id, d.consumer_group, d.action, d.stream, coalesce(d.partition_key, d.aggregate_id) AS key,
         CASE WHEN d.record IS NULL THEN d.position END AS position, d.event_id
    ), audited AS (
        INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group, handler,
            delivery_id, outbox_id, event_id)
        SELECT $2, 'release', $3, '', c.stream || '/' || c.key, c.consumer_group, c.action, c.id, c.position, c.event_id
          FROM changed AS c
     RETURNING 1
    )
    SELECT count(*) INTO done FROM audited;
    PERFORM @schema@.outbox_promote_deliveries(ids);
    RETURN done;
END $body$
$function$,

-- Deletes delayed events of these ids that were not moved to outbox yet. The audit keeps their payloads. Returns how
-- many it deleted.
$function$
CREATE FUNCTION @schema@.outbox_cancel_delayed(event_ids uuid[], operator text, reason text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
DECLARE
    done bigint;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason);
    WITH gone AS (
        DELETE FROM @schema@.outbox_delayed AS d WHERE d.event_id = ANY (event_ids) RETURNING d.*
    ), audited AS (
        INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, event_id, payload, payload_bytes)
        SELECT $2, 'cancel', $3 || unread, '',
               coalesce(g.topic, nullif(split_part(g.event_type, '.', 2), '') || '-events', '') || '/' || g.key,
               g.event_id, CASE unread WHEN '' THEN g.payload END, CASE unread WHEN '' THEN g.payload_bytes END
          FROM gone AS g CROSS JOIN LATERAL @schema@.outbox_unread(g.payload, g.payload_bytes) AS unread ORDER BY g.id
     RETURNING 1
    )
    SELECT count(*) INTO done FROM audited;
    RETURN done;
END $body$
$function$,

-- Records that an operator has read the payload of a delivery. Returns false if there is no such row.
$function$
CREATE FUNCTION @schema@.outbox_audit_read_delivery(delivery_id bigint, operator text, reason text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason);
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group, handler,
        delivery_id, outbox_id, event_id)
    SELECT $2, 'read', $3, '', d.stream || '/' || coalesce(d.partition_key, d.aggregate_id), d.consumer_group,
        d.action, d.id, CASE WHEN d.record IS NULL THEN d.position END, d.event_id
      FROM @schema@.event_delivery AS d WHERE d.id = $1;
    RETURN FOUND;
END $body$
$function$,

-- Records that an operator sends events to Kafka again: to a topic, or to their own topics if it is empty, and for
-- one consumer group, or for all if it is empty.
$function$
CREATE FUNCTION @schema@.outbox_audit_replay(topic text, consumer_group text, operator text, reason text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason),
        @schema@.outbox_check_names(coalesce(nullif($2, ''), 'all'), ARRAY[nullif($1, '')]);
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
    VALUES ($3, 'replay', $4, '', coalesce($1, '') || '/', nullif($2, ''));
END $body$
$function$,

-- Records that an operator edits a dead letter of a topic for a consumer group: value is that from before.
$function$
CREATE FUNCTION @schema@.outbox_audit_edit(
    topic text, key text, consumer_group text, handler text, value bytea, operator text, reason text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason), @schema@.outbox_check_names($3, ARRAY[$1]);
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group, handler,
        payload_bytes)
    VALUES ($6, 'edit', $7, '', $1 || '/' || $2, $3, $4, $5);
END $body$
$function$,

-- Has a consumer group handle events again: removes its rows of event_handled from before a time, under the key of the
-- event or under the key that includes the source. Returns how many rows it removed. A replay that goes on passes the
-- time at which it first began, so that what was handled again since stays noted. handled_at is the beginning of a
-- transaction, and a record that is sent again begins one only after that time: a row of that very time stays. A
-- transaction that began before it and commits later has handled an earlier record: its row is not seen, so the record
-- that is sent again is skipped; or a later call removes it, and the next such record is handled. Neither way handles
-- it twice again.
$function$
CREATE FUNCTION @schema@.outbox_forget_handled(
    consumer_group text, types text[], ids text[], sources text[], besides text[], before timestamptz,
    operator text, reason text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
DECLARE
    done bigint;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason), @schema@.outbox_check_names($1, '{}');
    WITH keys AS MATERIALIZED (
        SELECT k.type, k.id, k.source FROM unnest($2, $3, $4) AS k (type, id, source)
         UNION ALL
        SELECT k.type, k.beside, NULL FROM unnest($2, $5) AS k (type, beside)
    ), found AS MATERIALIZED (
        SELECT h.id FROM keys AS k
         CROSS JOIN LATERAL (SELECT n.id, n.event_source FROM @schema@.event_handled AS n
                              WHERE n.consumer_group = $1 AND n.aggregate_type = k.type AND n.aggregate_id = k.id) AS h
         WHERE k.source IS NULL OR h.event_source IS NULL OR h.event_source = k.source
    ), gone AS (
        DELETE FROM @schema@.event_handled AS n
         WHERE n.id = ANY (ARRAY(SELECT found.id FROM found)) AND n.handled_at < $6 RETURNING 1
    )
    SELECT count(*) INTO done FROM gone;
    IF done > 0 THEN
        INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
            VALUES ($7, 'forget', $8, '', '/', $1);
    END IF;
    RETURN done;
END $body$
$function$,

-- Ends an action of a consumer group for good: removes its handlers from consumer_handler, and what they have missed from
-- consumer_gap. A member with the action that starts later registers it as a new one. Returns how many handlers there
-- were.
$function$
CREATE FUNCTION @schema@.outbox_forget_action(consumer_group text, action text, operator text, reason text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    done bigint;
    gaps bigint;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason);
    WITH gone AS (
        DELETE FROM @schema@.consumer_handler AS h WHERE h.consumer_group = $1 AND h.action = $2 RETURNING 1
    ), closed AS (
        DELETE FROM @schema@.consumer_gap AS g WHERE g.consumer_group = $1 AND g.action = $2 RETURNING 1
    )
    SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM closed) INTO done, gaps;
    IF done + gaps > 0 THEN
        INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
            VALUES ($3, 'forget-action', $4, '', '/' || $2, $1);
    END IF;
    RETURN done;
END $body$
$function$,

-- Ends the archive: retention removes events without one from now on. It fails while a process with an archive leads,
-- which would go on. Returns how many relays and groups archived.
$function$
CREATE FUNCTION @schema@.outbox_stop_archive(operator text, reason text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    leads text;
    done  bigint;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason);
    SELECT a.name INTO leads
      FROM @schema@.outbox_archiver AS a JOIN @schema@.outbox_lease AS l ON l.name = a.name AND l.epoch = a.epoch
     WHERE l.expires_at > clock_timestamp() ORDER BY a.name LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'a process of % archives: start it without Retention.Archive first', leads
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    WITH gone AS (
        DELETE FROM @schema@.outbox_archiver AS a RETURNING a.name, starts_with(a.name, 'worker:') AS of_workers
    ), audited AS (
        INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
        SELECT $1, 'stop-archive', $2, CASE WHEN g.of_workers THEN '' ELSE left(g.name, 100) END, '',
               CASE WHEN g.of_workers THEN left(substr(g.name, 8), 255) END FROM gone AS g
     RETURNING 1
    )
    SELECT count(*) INTO done FROM audited;
    RETURN done;
END $body$
$function$
]);
-- +goose StatementEnd
