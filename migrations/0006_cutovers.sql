-- +goose Up

-- How consumer groups are moved from their workers to Kafka and back, and outbox from a relay to Debezium and back,
-- while everything is running. A cutover is a snapshot: the events on one side of it are handled by workers, the others
-- are sent by a relay. No event is on both sides, and none is on neither. Between Debezium and a relay a cutover is the
-- publication without or with outbox, from one commit on. Rows are completed and published only once outbox_publish was
-- called.
-- +goose StatementBegin
SELECT outbox_define(current_schema(), fragments => ARRAY[

-- What the comment of a publication begins with that cuts may change. The library looks for it, too.
'mark', $sql$'outbox: its cuts add and drop the table'$sql$,

-- The deliveries of outbox_start_events. n is the place of the event. Keys are those of internal/delivery.KeyOf.
'planned', $sql$
        SELECT e.*, r.action, r.stream, CASE WHEN NOT no_order THEN ('x' || encode(substr(sha256(
                   convert_to($1, 'UTF8') || '\x00'::bytea || convert_to(r.action, 'UTF8') || '\x00'::bytea
                   || convert_to(r.stream, 'UTF8') || '\x00'::bytea || convert_to(coalesce(nullif(e.key, ''), e.aggregate_id), 'UTF8')
               ), 1, 8), 'hex'))::bit(64)::bigint END AS order_key
          FROM unnest($4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17) WITH ORDINALITY
               AS e (id, event_id, type, source, aggregate_type, aggregate_id, payload, payload_bytes, content_type, topic,
                     key, headers, occurred_at, recorded_at, n)
          JOIN (SELECT split_part(route, E'\n', 1) AS type, split_part(route, E'\n', 2) AS stream,
                       split_part(route, E'\n', 3) AS action FROM unnest(routes) AS route) AS r
            ON r.type = e.type AND r.stream = e.topic
         WHERE NOT EXISTS (SELECT FROM @schema@.outbox AS o
             WHERE o.id = e.id AND o.event_id = e.event_id AND NOT pg_visible_in_snapshot(o.xid, cut))
$sql$,
'deliveries', $sql$quote_ident(@schema_name@) || '.event_delivery'$sql$

], definitions => ARRAY[

-- Keeps the workers of groups from taking events, and positions from being moved to another cluster, until the end of
-- the transaction. It must come first in the transaction: the snapshot of a cutover is read before the transaction
-- has an id. Then no transaction that is finished in the snapshot has a higher id, and no id of such a transaction is
-- given out again after a crash.
$function$
CREATE FUNCTION @schema@.outbox_lock_groups(groups text[], relay text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    one text;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'groups are moved under READ COMMITTED only' USING ERRCODE = 'invalid_transaction_state';
    END IF;
    IF pg_current_xact_id_if_assigned() IS NOT NULL THEN
        RAISE EXCEPTION 'groups are moved in a transaction that has written nothing before'
            USING ERRCODE = 'invalid_transaction_state';
    END IF;
    IF coalesce(relay, '') = '' OR char_length(relay) > 100 OR starts_with(relay, 'worker:')
        OR starts_with(relay, 'consumer:') THEN
        RAISE EXCEPTION 'relay has to be there, in at most 100 characters, '
            'and worker: and consumer: are what names of groups begin with' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended('outbox.rebase.' || @schema_name@, 0));
    IF (SELECT c.cursor_topic FROM @schema@.outbox_cursor AS c WHERE c.relay = $2 ORDER BY c.id DESC LIMIT 1) IS NOT NULL THEN
        RAISE EXCEPTION 'relay % sends exactly once, so its position is in Kafka: end that mode first '
            '(outbox relay --exactly-once TOPIC --end-mode kafka) and try again', $2 USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    FOR one IN SELECT DISTINCT g FROM unnest(groups) AS g ORDER BY g LOOP
        IF coalesce(one, '') = '' OR char_length(one) > 255 THEN
            RAISE EXCEPTION 'groups have names of at most 255 characters' USING ERRCODE = 'invalid_parameter_value';
        END IF;
        PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(
            convert_to('outbox.event_subscription.' || @schema_name@ || '.' || one, 'UTF8')
        ), 1, 8), 'hex'))::bit(64)::bigint);
    END LOOP;
END $body$
$function$,

-- Locks the lease of a relay, and returns whether there is a cutover at it. During a cutover no process leads. A
-- relay that waits for Debezium is in no cutover that can be finished, cancelled or made here.
$function$
CREATE FUNCTION @schema@.outbox_lock_cut(relay text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    who text;
    has boolean;
BEGIN
    SELECT l.holder INTO who FROM @schema@.outbox_lease AS l
        WHERE l.name = $1 AND l.holder IN ('outbox cut', 'outbox debezium') AND l.expires_at = 'infinity' FOR UPDATE;
    has := EXISTS (SELECT FROM @schema@.outbox_cursor AS c WHERE c.relay = $1);
    IF who = 'outbox debezium' AND has THEN
        RAISE EXCEPTION 'relay % takes the events from Debezium: let it begin first', $1
            USING ERRCODE = 'object_in_use';
    END IF;
    -- A relay whose groups are back has no position. Its lease stays as it is.
    RETURN coalesce(who = 'outbox cut', false)
        AND (has OR EXISTS (SELECT FROM @schema@.event_subscription AS s WHERE s.relay = $1 AND s.state = 'returning'));
END $body$
$function$,

-- Has groups leave at this moment: their workers take the events before it, and the relay, which must be a new one,
-- sends the others. The position of the relay is the cutover. It stays until outbox_finish_cut, because the relay
-- cannot get its lease.
$function$
CREATE FUNCTION @schema@.outbox_cut_to_kafka(groups text[], relay text, operator text, reason text) RETURNS pg_snapshot
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    cut   pg_snapshot;
    wrong text;
    term  bigint;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason), @schema@.outbox_lock_groups(groups, relay);
    SELECT g.name INTO wrong FROM (SELECT DISTINCT g AS name FROM unnest($1) AS g) AS g
      LEFT JOIN @schema@.event_subscription AS s ON s.consumer_group = g.name
     WHERE s.state IS DISTINCT FROM 'active' ORDER BY g.name LIMIT 1;
    IF FOUND OR coalesce(cardinality($1), 0) = 0 THEN
        RAISE EXCEPTION 'group % does not get its events from workers', coalesce(wrong, '(none)')
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    SELECT g.name INTO wrong FROM (SELECT DISTINCT g AS name FROM unnest($1) AS g) AS g
        CROSS JOIN pg_control_system() AS here
      LEFT JOIN LATERAL (SELECT * FROM @schema@.outbox_cursor AS c
          WHERE c.relay = 'worker:' || g.name ORDER BY c.id DESC LIMIT 1) AS c ON true
     WHERE c.system_identifier IS DISTINCT FROM here.system_identifier
        OR pg_snapshot_xmax(coalesce(c.window_snapshot, c.snapshot)) > pg_snapshot_xmax(pg_current_snapshot())
            ORDER BY g.name LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'group % has no position in this database cluster: its worker has to run first', wrong
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    SELECT s.consumer_group INTO wrong FROM @schema@.event_subscription AS s
     WHERE s.consumer_group = ANY ($1) AND s.unordered ORDER BY s.consumer_group LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'workers of group % handle events in any order, and consumers keep the order: run workers without '
            'Unordered first', wrong USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    cut := pg_current_snapshot();
    INSERT INTO @schema@.outbox_lease AS l (name, holder, epoch, expires_at, lasts)
        VALUES ($2, 'outbox cut', 1, 'infinity', '0')
        ON CONFLICT (name) DO UPDATE
            SET holder = 'outbox cut', epoch = l.epoch + 1, expires_at = 'infinity', lasts = '0'
        WHERE l.holder = 'outbox cut' OR l.expires_at <= clock_timestamp()
    RETURNING l.epoch INTO term;
    -- The lease is locked: from here on no relay can insert a position.
    IF term IS NULL OR EXISTS (SELECT FROM @schema@.outbox_cursor AS c WHERE c.relay = $2) THEN
        RAISE EXCEPTION 'relay % has begun already: it would send events that the workers handle', $2
            USING ERRCODE = 'object_in_use';
    END IF;
    -- Nor has a relay that is ending a position.
    IF EXISTS (SELECT FROM @schema@.event_subscription AS s WHERE s.relay = $2 AND s.state = 'returning') THEN
        RAISE EXCEPTION 'a cut at relay % is not finished', $2 USING ERRCODE = 'object_in_use';
    END IF;
    UPDATE @schema@.event_subscription AS s SET state = 'leaving', relay = $2, changed_at = now()
        WHERE s.consumer_group = ANY ($1);
    INSERT INTO @schema@.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
    SELECT $2, 0, cut, coalesce((SELECT last_value FROM @schema@.outbox_id_seq WHERE is_called), 0),
        s.system_identifier, term
      FROM pg_control_system() AS s;
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
    SELECT DISTINCT $3, 'to-kafka', $4, $2, '', g FROM unnest($1) AS g;
    RETURN cut;
END $body$
$function$,

-- Replaces a relay: the groups get from Kafka what the relay has sent, and their workers take the rest, after
-- outbox_finish_cut. The relay may have no event left to send again. Other groups that have begun to read in Kafka, or
-- will once they have the events of an archive, get nothing any more unless another relay sends too, so each of them
-- must be in leave_behind.
$function$
CREATE FUNCTION @schema@.outbox_cut_to_postgres(
    groups text[], relay text, leave_behind text[], operator text, reason text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    wrong text;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason), @schema@.outbox_lock_groups(groups, relay);
    SELECT s.consumer_group INTO wrong FROM @schema@.event_subscription AS s
     WHERE s.consumer_group = ANY ($1) AND (s.state <> 'left' OR s.relay <> $2) ORDER BY s.consumer_group LIMIT 1;
    IF FOUND OR coalesce(cardinality($1), 0) = 0 THEN
        RAISE EXCEPTION 'group % does not get its events from relay %', coalesce(wrong, '(none)'), $2
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    SELECT s.consumer_group INTO wrong FROM @schema@.event_subscription AS s
     WHERE s.relay = $2 AND s.consumer_group <> ALL ($1) ORDER BY s.consumer_group LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'group % gets its events from relay %, too, and would get none any more', wrong, $2
            USING ERRCODE = 'object_in_use';
    END IF;
    SELECT c.consumer_group INTO wrong FROM @schema@.consumer_start AS c
     WHERE c.consumer_group <> ALL ($1) AND c.consumer_group <> ALL (coalesce($3, '{}'))
       AND NOT EXISTS (SELECT FROM @schema@.event_subscription AS s WHERE s.consumer_group = c.consumer_group AND s.state <> 'starting')
       AND NOT EXISTS (SELECT FROM @schema@.outbox_lease AS l WHERE l.name <> $2 AND NOT starts_with(l.name, 'worker:')
           AND NOT starts_with(l.name, 'consumer:') AND l.holder NOT IN ('outbox cut', 'outbox debezium')
           AND l.expires_at > clock_timestamp()
           AND EXISTS (SELECT FROM @schema@.outbox_cursor AS o WHERE o.relay = l.name))
     ORDER BY c.consumer_group LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'group % reads from Kafka, and would get nothing any more from relay %: move it too, '
            'or leave it behind', wrong, $2 USING ERRCODE = 'object_in_use';
    END IF;
    SELECT g.action INTO wrong FROM @schema@.consumer_gap AS g WHERE g.consumer_group = ANY ($1) ORDER BY g.action LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'action % has missed events that no consumer has read for it yet: outbox doctor says which', wrong
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    IF @schema@.outbox_lock_cut($2) THEN
        RAISE EXCEPTION 'there is a cut at relay % already: finish or cancel it first', $2
            USING ERRCODE = 'object_in_use';
    END IF;
    INSERT INTO @schema@.outbox_lease AS l (name, holder, epoch, expires_at, lasts)
        VALUES ($2, 'outbox cut', 1, 'infinity', '0')
        ON CONFLICT (name) DO UPDATE
            SET holder = 'outbox cut', epoch = l.epoch + 1, expires_at = 'infinity', lasts = '0';
    -- The lease is lost: from here on the relay can neither move its position nor insert failed events.
    IF EXISTS (SELECT FROM @schema@.outbox_failed AS f
        WHERE f.relay = $2 AND f.status IN ('waiting', 'failed', 'parked')) THEN
        RAISE EXCEPTION 'relay % has events in outbox_failed that it still has to send: wait, or resolve them', $2
            USING ERRCODE = 'object_in_use';
    END IF;
    INSERT INTO @schema@.outbox_cursor (relay, last_processed_id, snapshot, window_snapshot, highest_id,
        system_identifier, epoch)
    SELECT 'worker:' || g.name, c.last_processed_id, c.snapshot, c.window_snapshot, c.highest_id, c.system_identifier,
        1 + (random() * 4e18)::bigint
      FROM (SELECT DISTINCT g AS name FROM unnest($1) AS g) AS g,
           (SELECT * FROM @schema@.outbox_cursor AS c WHERE c.relay = $2 ORDER BY c.id DESC LIMIT 1) AS c;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no relay %', $2 USING ERRCODE = 'undefined_object';
    END IF;
    DELETE FROM @schema@.outbox_cursor AS c WHERE c.relay = $2;
    -- By its times outbox_cancel_cut knows a row that is inserted here: created_at is changed_at.
    INSERT INTO @schema@.event_subscription (consumer_group, state, relay) SELECT DISTINCT g, 'returning', $2
        FROM unnest($1) AS g
        ON CONFLICT (consumer_group) DO UPDATE SET state = 'returning', relay = $2, changed_at = now();
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
    SELECT DISTINCT $4, 'to-postgres', $5, $2, '', g FROM unnest($1) AS g;
END $body$
$function$,

-- Begins a new group with the events of an archive. The cutover is this moment: the events before it come from the
-- archive and from outbox, by outbox_start_events, and the others from outbox, or from Kafka for a group of consumers.
-- Such a group has topics, with the offset of each partition that the caller has read before. What the archive gets
-- meanwhile is in front of the cutover, because the position of the group keeps all other rows in outbox. Until
-- outbox_finish_start workers of the group take nothing from outbox, and members read nothing from Kafka.
$function$
CREATE FUNCTION @schema@.outbox_start_group(
    consumer_group text, topics text[], topic_ids uuid[], partitions int[], offsets bigint[], operator text, reason text)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    cut pg_snapshot;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason),
            @schema@.outbox_lock_groups(ARRAY[$1], ' '::text); -- no relay has this name
    IF EXISTS (SELECT FROM @schema@.event_subscription AS s WHERE s.consumer_group = $1)
       OR EXISTS (SELECT FROM @schema@.outbox_cursor AS c WHERE c.relay = 'worker:' || $1)
       OR EXISTS (SELECT FROM @schema@.consumer_start AS c WHERE c.consumer_group = $1)
       OR EXISTS (SELECT FROM @schema@.event_handled AS h WHERE h.consumer_group = $1) THEN
        RAISE EXCEPTION 'group % has begun already', $1 USING ERRCODE = 'object_in_use';
    END IF;
    cut := pg_current_snapshot();
    INSERT INTO @schema@.event_subscription (consumer_group, state, started) VALUES ($1, 'starting', 0);
    INSERT INTO @schema@.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
    SELECT 'worker:' || $1, 0, cut, coalesce((SELECT last_value FROM @schema@.outbox_id_seq WHERE is_called), 0),
        s.system_identifier, 1 + (random() * 4e18)::bigint
      FROM pg_control_system() AS s;
    INSERT INTO @schema@.consumer_start (consumer_group, topic, topic_id, partition, starting)
    SELECT DISTINCT $1, t.topic, t.id, -1, true FROM unnest($2, $3) AS t (topic, id);
    INSERT INTO @schema@.consumer_start (consumer_group, topic, topic_id, partition, start_offset)
    SELECT $1, t.topic, t.id, t.number, t.at FROM unnest($2, $3, $4, $5) AS t (topic, id, number, at);
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
        VALUES ($6, 'start-group', $7, '', '', $1);
END $body$
$function$,

-- Makes the deliveries of events for a group that is starting: of those up to through, behind the ones up to behind,
-- in the order of their ids. It leaves out events behind the cutover, and those for which the group has no handler. The
-- handlers are those of its workers, or of its running consumers, which are noted.
$function$
CREATE FUNCTION @schema@.outbox_start_events(
    consumer_group text, behind bigint, through bigint, ids bigint[], event_ids uuid[], types text[], sources text[],
    aggregate_types text[], aggregate_ids text[], payloads text[], payloads_bytes bytea[], content_types text[],
    topics text[], keys text[], headers text[], occurred timestamptz[], recorded timestamptz[])
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $body$
DECLARE
    cut      pg_snapshot;
    routes   text[];
    no_order boolean;
    kafka    constant boolean := EXISTS (SELECT FROM @schema@.consumer_start AS c WHERE c.consumer_group = $1 AND c.starting);
    wrong    text;
    made     bigint;
BEGIN
    UPDATE @schema@.event_subscription AS s SET started = $3
     WHERE s.consumer_group = $1 AND s.state = 'starting' AND s.started = $2 AND $3 > $2
 RETURNING ARRAY(SELECT jsonb_object_keys(s.routes)), s.unordered INTO routes, no_order;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'group % is not starting, or another process has gone on with it', $1
            USING ERRCODE = 'object_in_use';
    END IF;
    IF kafka THEN
        UPDATE @schema@.event_subscription AS s
           SET routes = s.routes || coalesce((SELECT jsonb_object_agg(r, 0) FROM @schema@.event_member AS m, unnest(m.routes) AS r
                WHERE m.consumer_group = $1 AND m.renewed_at > clock_timestamp() - 3::float8 * m.renewed_every), '{}')
         WHERE s.consumer_group = $1
     RETURNING ARRAY(SELECT jsonb_object_keys(s.routes)) INTO routes;
        SELECT split_part(r, E'\n', 2) INTO wrong FROM unnest(routes) AS r
         WHERE NOT EXISTS (SELECT FROM @schema@.consumer_start AS c
             WHERE c.consumer_group = $1 AND c.starting AND c.topic = split_part(r, E'\n', 2)) ORDER BY 1 LIMIT 1;
        IF FOUND THEN
            RAISE EXCEPTION 'group % has handlers for topic %, which was not named when it was started', $1, wrong
                USING ERRCODE = 'object_not_in_prerequisite_state';
        END IF;
    END IF;
    IF cardinality(routes) = 0 THEN
        RAISE EXCEPTION 'no process of group % runs, so its handlers are not known', $1
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    SELECT c.snapshot INTO cut FROM @schema@.outbox_cursor AS c WHERE c.relay = 'worker:' || $1 ORDER BY c.id DESC LIMIT 1;
    IF cut IS NULL THEN
        RAISE EXCEPTION 'group % has lost its position', $1 USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    PERFORM @schema@.outbox_lock_keys($1, ARRAY(SELECT p.order_key FROM (@planned@) AS p));
    IF EXISTS (SELECT FROM @schema@.event_delivery AS d WHERE d.id > (SELECT coalesce(
        pg_sequence_last_value(pg_get_serial_sequence(@deliveries@, 'id')::regclass), 0))) THEN
        RAISE EXCEPTION 'the sequence of event_delivery.id is behind ids that are in use: outbox doctor says how to set it'
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    WITH planned AS MATERIALIZED (@planned@
    ), free AS MATERIALIZED (
        SELECT k.order_key, k.first FROM (SELECT p.order_key, min(p.n) AS first FROM planned AS p GROUP BY p.order_key) AS k
         WHERE k.order_key IS NOT NULL
           AND NOT EXISTS (SELECT FROM @schema@.event_delivery AS d
               WHERE d.order_key >= k.order_key AND d.order_key <= k.order_key AND d.consumer_group = $1
                 AND (d.status IN ('PENDING', 'PROCESSING') OR d.held))
           AND NOT EXISTS (SELECT FROM @schema@.event_delivery AS d
               WHERE d.order_key >= k.order_key AND d.order_key <= k.order_key AND d.consumer_group = $1
                 AND d.status = 'PARKED')
    )
    INSERT INTO @schema@.event_delivery (consumer_group, action, stream, position, order_key, status, attempt_count, max_attempts,
        next_retry_at, created_at, updated_at, event_id, event_type, source, aggregate_type, aggregate_id, payload,
        payload_bytes, content_type, partition_key, headers, size, occurred_at, recorded_at)
    SELECT $1, p.action, p.stream, p.id, p.order_key,
        CASE WHEN p.order_key IS NULL OR (p.order_key, p.n) IN (SELECT f.order_key, f.first FROM free AS f)
             THEN 'PENDING' ELSE 'PARKED' END,
        0, 4, t.at, t.at, t.at, p.event_id, p.type, p.source, p.aggregate_type, p.aggregate_id, p.payload::jsonb,
        p.payload_bytes, p.content_type, nullif(p.key, ''), p.headers::jsonb,
        octet_length(coalesce(p.payload, '')) + octet_length(coalesce(p.payload_bytes, '')) + octet_length(coalesce(p.headers, '')),
        p.occurred_at, p.recorded_at
      FROM planned AS p CROSS JOIN (SELECT clock_timestamp() AS at) AS t
     ORDER BY p.n, p.action, p.stream;
    GET DIAGNOSTICS made = ROW_COUNT;
    RETURN made;
END $body$
$function$,

-- Lets a group that is starting go on by itself, once it has deliveries of all events in front of the cutover: its
-- workers from outbox, its consumers from Kafka.
$function$
CREATE FUNCTION @schema@.outbox_finish_start(consumer_group text, through bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    UPDATE @schema@.event_subscription AS s SET state = 'active', started = NULL, changed_at = now()
     WHERE s.consumer_group = $1 AND s.state = 'starting' AND s.started = $2;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'group % is not starting, or another process has gone on with it', $1
            USING ERRCODE = 'object_in_use';
    END IF;
    UPDATE @schema@.consumer_start AS c SET starting = false WHERE c.consumer_group = $1 AND c.starting;
    IF FOUND THEN
        DELETE FROM @schema@.event_subscription AS s WHERE s.consumer_group = $1;
        DELETE FROM @schema@.outbox_cursor AS c WHERE c.relay = 'worker:' || $1;
    END IF;
END $body$
$function$,

-- Ends the cutover at a relay: the other side begins. Unless early is set, it checks that the workers of leaving
-- groups have finished the events before the cutover, and that their consumers have noted where they begin to read
-- each topic of the routes that the workers had, and have each handler of these. Routes that no worker has confirmed
-- for an hour before do not count. Workers of returning groups owe events to all handlers that the consumers have.
-- The caller has to know how far returning groups have read in Kafka. Returns how many groups there are.
$function$
CREATE FUNCTION @schema@.outbox_finish_cut(relay text, early boolean, operator text, reason text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    wrong    text;
    unbegun  text;
    act      text;
    finished bigint;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason),
            @schema@.outbox_lock_groups(ARRAY(SELECT s.consumer_group::text FROM @schema@.event_subscription AS s
                WHERE s.relay = $1), $1);
    IF NOT @schema@.outbox_lock_cut($1) THEN
        RAISE EXCEPTION 'there is no cut at relay %', $1 USING ERRCODE = 'undefined_object';
    END IF;
    SELECT s.consumer_group INTO wrong FROM @schema@.event_subscription AS s
        WHERE s.relay = $1 AND s.state = 'leaving' ORDER BY s.consumer_group LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the workers of group % have not taken all events in front of the cut', wrong
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    SELECT s.consumer_group INTO wrong FROM @schema@.event_subscription AS s
     WHERE s.relay = $1 AND s.state = 'returning' AND s.unordered ORDER BY s.consumer_group LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'workers of group % handle events in any order, and consumers keep the order: run workers without '
            'Unordered first', wrong USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    SELECT s.consumer_group INTO wrong FROM @schema@.event_subscription AS s
     WHERE s.relay = $1 AND s.state = 'left' AND NOT early
       AND (EXISTS (SELECT FROM @schema@.event_delivery AS d
           WHERE d.consumer_group = s.consumer_group AND d.status IN ('PENDING', 'PARKED') AND d.resolved_at IS NULL)
            OR EXISTS (SELECT FROM @schema@.event_delivery AS d
                WHERE d.consumer_group = s.consumer_group AND d.status = 'PROCESSING'))
     ORDER BY s.consumer_group LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the workers of group % have open deliveries from before the cut', wrong
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    SELECT s.consumer_group INTO wrong FROM @schema@.event_subscription AS s
     WHERE s.relay = $1 AND s.state = 'left' AND NOT early
       AND NOT EXISTS (SELECT FROM @schema@.consumer_start AS c WHERE c.consumer_group = s.consumer_group)
     ORDER BY s.consumer_group LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'no consumer of group % has begun to read: it might begin behind what the relay sends', wrong
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    SELECT s.consumer_group, split_part(r.route, E'\n', 2), split_part(r.route, E'\n', 3) INTO wrong, unbegun, act
      FROM @schema@.event_subscription AS s CROSS JOIN LATERAL jsonb_each(s.routes) AS r (route, confirmed)
     WHERE s.relay = $1 AND s.state = 'left' AND NOT early
       AND r.confirmed::numeric > extract(epoch FROM s.changed_at - interval '1 hour')
       AND NOT (EXISTS (SELECT FROM @schema@.consumer_start AS c
               WHERE c.consumer_group = s.consumer_group AND c.topic = split_part(r.route, E'\n', 2))
           AND EXISTS (SELECT FROM @schema@.consumer_handler AS h
               WHERE h.consumer_group = s.consumer_group AND h.event_type = split_part(r.route, E'\n', 1)
                 AND h.topic = split_part(r.route, E'\n', 2) AND h.action = split_part(r.route, E'\n', 3)))
     ORDER BY s.consumer_group, split_part(r.route, E'\n', 2), split_part(r.route, E'\n', 3) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'no consumer of group % has begun to read topic % for action %: '
            'it might begin behind what the relay sends', wrong, unbegun, act USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    -- The consumers of a group handle what they have parked, before its workers get later events.
    SELECT s.consumer_group INTO wrong FROM @schema@.event_subscription AS s
     WHERE s.relay = $1 AND s.state = 'returning' AND NOT early
       AND EXISTS (SELECT FROM @schema@.event_delivery AS d
           WHERE d.consumer_group = s.consumer_group AND d.record IS NOT NULL
           AND d.status IN ('PENDING', 'PARKED', 'PROCESSING'))
     ORDER BY s.consumer_group LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the consumers of group % have parked events that are not handled yet', wrong
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    SELECT s.consumer_group, g.topic, g.action INTO wrong, unbegun, act
      FROM @schema@.event_subscription AS s JOIN @schema@.consumer_gap AS g ON g.consumer_group = s.consumer_group
     WHERE s.relay = $1 AND s.state = 'returning' AND NOT early
     ORDER BY s.consumer_group, g.topic, g.action LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'action % of group % has missed events of topic % that no consumer has read for it yet',
            act, wrong, unbegun USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    DELETE FROM @schema@.consumer_gap AS g USING @schema@.event_subscription AS s
        WHERE s.relay = $1 AND s.state = 'returning' AND g.consumer_group = s.consumer_group;
    UPDATE @schema@.event_subscription AS s SET state = 'active', relay = NULL, changed_at = now(),
            routes = s.routes || coalesce((
                SELECT jsonb_object_agg(concat_ws(E'\n', h.event_type, h.topic, h.action), extract(epoch FROM now())::bigint)
                  FROM @schema@.consumer_handler AS h WHERE h.consumer_group = s.consumer_group), '{}'),
            routes_version = s.routes_version # 1
        WHERE s.relay = $1 AND s.state = 'returning';
    GET DIAGNOSTICS finished = ROW_COUNT;
    IF finished = 0 THEN
        UPDATE @schema@.outbox_lease AS l SET expires_at = '-infinity' WHERE l.name = $1;
        SELECT count(*) INTO finished FROM @schema@.event_subscription AS s WHERE s.relay = $1;
    END IF;
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key)
        VALUES ($3, 'finish-cut', $4, $1, '');
    RETURN finished;
END $body$
$function$,

-- Takes the cutover at a relay back, before anything has begun behind it. Groups that have left get the position of
-- the relay, which is the cutover; a relay gets the position of its returning groups back. Returning groups that had no
-- row before the cut get rid of it, unless a worker has begun meanwhile: without the row it would take all events. Returns
-- how many groups there are.
$function$
CREATE FUNCTION @schema@.outbox_cancel_cut(relay text, operator text, reason text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    groups text[];
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason),
            @schema@.outbox_lock_groups(ARRAY(SELECT s.consumer_group::text FROM @schema@.event_subscription AS s
                WHERE s.relay = $1), $1);
    IF NOT @schema@.outbox_lock_cut($1) THEN
        RAISE EXCEPTION 'there is no cut at relay %', $1 USING ERRCODE = 'undefined_object';
    END IF;
    groups := ARRAY(SELECT s.consumer_group::text FROM @schema@.event_subscription AS s
        WHERE s.relay = $1 AND s.state = 'returning' ORDER BY s.consumer_group);
    IF cardinality(groups) > 0 THEN
        INSERT INTO @schema@.outbox_cursor (relay, last_processed_id, snapshot, window_snapshot, highest_id,
            system_identifier, epoch)
        SELECT $1, c.last_processed_id, c.snapshot, c.window_snapshot, c.highest_id, c.system_identifier, l.epoch
          FROM @schema@.outbox_cursor AS c, @schema@.outbox_lease AS l
              WHERE c.relay = 'worker:' || groups[1] AND l.name = $1 ORDER BY c.id DESC LIMIT 1;
        DELETE FROM @schema@.outbox_cursor AS c
            WHERE c.relay = ANY (ARRAY(SELECT 'worker:' || g FROM unnest(groups) AS g));
        DELETE FROM @schema@.event_subscription AS s
            WHERE s.consumer_group = ANY (groups) AND s.created_at = s.changed_at AND s.routes = '{}';
        UPDATE @schema@.event_subscription AS s SET state = 'left', changed_at = now()
            WHERE s.consumer_group = ANY (groups);
        UPDATE @schema@.outbox_lease AS l SET expires_at = '-infinity' WHERE l.name = $1;
    ELSE
        groups := ARRAY(SELECT s.consumer_group::text FROM @schema@.event_subscription AS s WHERE s.relay = $1);
        INSERT INTO @schema@.outbox_cursor (relay, last_processed_id, snapshot, window_snapshot, highest_id,
            system_identifier, epoch)
        SELECT 'worker:' || s.consumer_group, c.last_processed_id, c.snapshot, c.window_snapshot, c.highest_id,
            c.system_identifier, 1 + (random() * 4e18)::bigint
          FROM @schema@.event_subscription AS s,
               (SELECT * FROM @schema@.outbox_cursor AS c WHERE c.relay = $1 ORDER BY c.id DESC LIMIT 1) AS c
         WHERE s.relay = $1 AND s.state = 'left';
        UPDATE @schema@.event_subscription AS s SET state = 'active', relay = NULL, changed_at = now()
            WHERE s.relay = $1;
        DELETE FROM @schema@.outbox_cursor AS c WHERE c.relay = $1;
    END IF;
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
    SELECT $2, 'cancel-cut', $3, $1, '', g FROM unnest(groups) AS g;
    RETURN cardinality(groups);
END $body$
$function$,

-- Does what a Recorder and a relay do: derives the topic from the event type, and takes the id of the aggregate as
-- the key. A row without a topic, or with one that Kafka does not allow, would stop the connector: its transaction is
-- refused.
$function$
CREATE FUNCTION @schema@.outbox_complete_row() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    IF NEW.topic IS NULL THEN
        IF NEW.event_type !~ '^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+$' THEN
            RAISE EXCEPTION 'column topic is NULL, and no topic can be derived from event_type %',
                quote_literal(NEW.event_type) USING ERRCODE = 'check_violation';
        END IF;
        NEW.topic := split_part(NEW.event_type, '.', 2) || '-events';
    ELSIF NEW.topic !~ '^[A-Za-z0-9._-]+$' OR NEW.topic IN ('.', '..') THEN
        RAISE EXCEPTION 'column topic is %, which is no name of a Kafka topic', quote_literal(NEW.topic)
            USING ERRCODE = 'check_violation';
    END IF;
    NEW.partition_key := coalesce(NEW.partition_key, NEW.aggregate_id);
    RETURN NEW;
END $body$
$function$,

-- Completes each row at its INSERT from now on, and makes the publication if there is none with this name. outbox is
-- in it, unless a relay sends the events. A publication that exists keeps its tables. Its comment says that cuts may
-- change it, which only its owner can write. The locks wait for transactions that have recorded an event.
$function$
CREATE FUNCTION @schema@.outbox_publish(publication text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms' AS $body$
DECLARE
    there pg_publication;
    note  text;
BEGIN
    IF coalesce(publication, '') = '' OR octet_length(publication) > 63 THEN
        RAISE EXCEPTION 'a publication has a name of at most 63 bytes' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended('outbox.publish.' || @schema_name@, 0));
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = @outbox@::regclass AND tgname = 'outbox_complete_row') THEN
        CREATE TRIGGER outbox_complete_row BEFORE INSERT ON @schema@.outbox FOR EACH ROW
            WHEN (NEW.topic IS NULL OR NEW.partition_key IS NULL OR NEW.topic !~ '^[A-Za-z0-9._-]+$'
                OR NEW.topic IN ('.', '..'))
            EXECUTE FUNCTION @schema@.outbox_complete_row();
    END IF;
    IF NOT EXISTS (SELECT FROM pg_publication WHERE pubname = publication) THEN
        EXECUTE format('CREATE PUBLICATION %I %s WITH (publish = ''insert'', publish_via_partition_root = true)',
            publication,
            CASE WHEN EXISTS (SELECT FROM @schema@.outbox_cursor AS c WHERE NOT starts_with(c.relay, 'worker:'))
                 THEN '' ELSE 'FOR TABLE ' || @outbox@ END);
    ELSIF NOT EXISTS (SELECT FROM pg_publication WHERE pubname = publication AND pubinsert AND pubviaroot
                         AND NOT (puballtables OR pubupdate OR pubdelete OR pubtruncate)) THEN
        RAISE EXCEPTION 'publication % is there with other options: it has to have publish = ''insert'' '
            'and publish_via_partition_root = true, and not all tables', quote_ident(publication)
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    SELECT p.* INTO there FROM pg_publication AS p WHERE p.pubname = publication;
    note := obj_description(there.oid, 'pg_publication');
    IF starts_with(note, @mark@) THEN
        RETURN;
    END IF;
    IF NOT pg_has_role(there.pubowner, 'USAGE') THEN
        RAISE EXCEPTION 'publication % belongs to role %, which has to run COMMENT ON PUBLICATION % IS %: '
            'a cut changes no other', quote_ident(publication), quote_ident(pg_get_userbyid(there.pubowner)),
            quote_ident(publication), quote_literal(@mark@) USING ERRCODE = 'insufficient_privilege';
    END IF;
    EXECUTE format('COMMENT ON PUBLICATION %I IS %L', publication, concat_ws('; ', @mark@, note));
END $body$
$function$,

-- Returns whether a publication has outbox in it. It is an error if there is no such publication, or if it has outbox
-- in a way that ALTER PUBLICATION DROP TABLE does not end: Debezium would go on sending in addition to the relay. It is
-- an error too if the publication does not have the mark of outbox_publish: it is there for something else.
$function$
CREATE FUNCTION @schema@.outbox_is_published(publication text) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    found_oid oid := (SELECT p.oid FROM pg_publication AS p WHERE p.pubname = publication);
    whole     boolean;
BEGIN
    IF found_oid IS NULL THEN
        RAISE EXCEPTION 'there is no publication %', coalesce(quote_ident(publication), '(none)')
            USING ERRCODE = 'undefined_object';
    END IF;
    whole := (SELECT p.puballtables FROM pg_publication AS p WHERE p.oid = found_oid);
    IF current_setting('server_version_num')::int >= 150000 AND NOT whole THEN -- earlier ones have no such catalog
        EXECUTE 'SELECT EXISTS (SELECT FROM pg_publication_namespace AS n '
                'JOIN pg_class AS c ON c.relnamespace = n.pnnspid WHERE n.pnpubid = $1 AND c.oid = $2)'
           INTO whole USING found_oid, @outbox@::regclass::oid;
    END IF;
    IF whole THEN
        RAISE EXCEPTION 'publication % has outbox in it as a table of its schema, or of all: '
            'a cut cannot take it out; name its tables', quote_ident(publication)
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    IF NOT coalesce(starts_with(obj_description(found_oid, 'pg_publication'), @mark@), false) THEN
        RAISE EXCEPTION 'publication % is not one of outbox, so a cut does not change it: if it is for the events, '
            'outbox migrate up --publication % makes it one', quote_ident(publication), quote_ident(publication)
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    RETURN EXISTS (SELECT FROM pg_publication_rel AS r WHERE r.prpubid = found_oid AND r.prrelid = @outbox@::regclass);
END $body$
$function$,

-- Takes outbox out of the publication from the commit of the caller on, and gives all later events to the relay,
-- which must be a new one. At this moment no open transaction has recorded an event. The relay waits until
-- outbox_begin_relay. As in outbox_lock_groups, the snapshot is read before the transaction has an id.
$function$
CREATE FUNCTION @schema@.outbox_cut_from_debezium(publication text, relay text, operator text, reason text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms' AS $body$
DECLARE
    cut  pg_snapshot;
    term bigint;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason), @schema@.outbox_lock_groups('{}'::text[], $2);
    IF NOT @schema@.outbox_is_published(publication) THEN
        RAISE EXCEPTION 'publication % does not have the events: Debezium does not send them', quote_ident(publication)
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    LOCK TABLE @schema@.outbox IN SHARE ROW EXCLUSIVE MODE;
    cut := pg_current_snapshot();
    PERFORM set_config('synchronous_commit', 'on', true);
    INSERT INTO @schema@.outbox_lease AS l (name, holder, epoch, expires_at, lasts)
        VALUES ($2, 'outbox debezium', 1, 'infinity', '0')
        ON CONFLICT (name) DO UPDATE
            SET holder = 'outbox debezium', epoch = l.epoch + 1, expires_at = 'infinity', lasts = '0'
        WHERE l.holder IN ('outbox debezium', 'outbox cut') OR l.expires_at <= clock_timestamp()
    RETURNING l.epoch INTO term;
    IF term IS NULL OR EXISTS (SELECT FROM @schema@.outbox_cursor AS c WHERE c.relay = $2)
        OR EXISTS (SELECT FROM @schema@.event_subscription AS s WHERE s.relay = $2 AND s.state <> 'left') THEN
        RAISE EXCEPTION 'relay % has begun already: it would send events that Debezium sends', $2
            USING ERRCODE = 'object_in_use';
    END IF;
    INSERT INTO @schema@.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
    SELECT $2, 0, cut, coalesce((SELECT last_value FROM @schema@.outbox_id_seq WHERE is_called), 0),
        s.system_identifier, term
      FROM pg_control_system() AS s;
    EXECUTE format('ALTER PUBLICATION %I DROP TABLE %s', publication, @outbox@);
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key)
        VALUES ($3, 'from-debezium', $4, $2, '');
END $body$
$function$,

-- Lets the relay begin. It checks that the connector has stopped. The caller has to know that Debezium has sent
-- everything before the cutover.
$function$
CREATE FUNCTION @schema@.outbox_begin_relay(slot text, relay text, operator text, reason text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason), @schema@.outbox_lock_groups('{}'::text[], $2);
    UPDATE @schema@.outbox_lease AS l SET expires_at = '-infinity'
        WHERE l.name = $2 AND l.holder = 'outbox debezium' AND l.expires_at = 'infinity'
       AND EXISTS (SELECT FROM @schema@.outbox_cursor AS c WHERE c.relay = $2);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no cut at relay %', $2 USING ERRCODE = 'undefined_object';
    END IF;
    IF EXISTS (SELECT FROM pg_replication_slots AS s WHERE s.slot_name = slot AND s.active) THEN
        RAISE EXCEPTION 'replication slot % is in use: stop the connector first', quote_ident(slot)
            USING ERRCODE = 'object_in_use';
    END IF;
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key)
        VALUES ($3, 'begin-relay', $4, $2, '');
END $body$
$function$,

-- Ends a relay that has sent all events, and adds outbox to the publication from the commit of the caller on. No open
-- transaction may have recorded an event, and none records one meanwhile. Returns false, and changes nothing, if the
-- relay does not come to the end within 300 ms, for which writers wait.
$function$
CREATE FUNCTION @schema@.outbox_cut_to_debezium(publication text, slot text, relay text, operator text, reason text)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms'
    SET enable_seqscan = off SET jit = off AS $body$
DECLARE
    began   timestamptz;
    pending bigint;
BEGIN
    PERFORM @schema@.outbox_check_audit(operator, reason), @schema@.outbox_lock_groups('{}'::text[], $3);
    IF @schema@.outbox_is_published(publication) THEN
        RAISE EXCEPTION 'publication % has the events already', quote_ident(publication)
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    IF NOT EXISTS (SELECT FROM pg_replication_slots AS s
        WHERE s.slot_name = slot AND s.database = current_database() AND s.plugin = 'pgoutput'
        AND s.wal_status <> 'lost') THEN
        RAISE EXCEPTION 'there is no replication slot % with pgoutput: what is recorded before the connector makes it '
            'would be sent by nobody', coalesce(quote_ident(slot), '(none)')
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    IF NOT EXISTS (SELECT FROM @schema@.outbox_cursor AS c WHERE c.relay = $3) THEN
        RAISE EXCEPTION 'there is no relay %', $3 USING ERRCODE = 'undefined_object';
    END IF;
    IF EXISTS (SELECT FROM @schema@.event_subscription AS s WHERE s.relay = $3 AND s.state <> 'left')
       OR EXISTS (SELECT FROM @schema@.outbox_lease AS l WHERE l.name = $3 AND l.expires_at = 'infinity') THEN
        RAISE EXCEPTION 'a cut at relay % is not finished', $3 USING ERRCODE = 'object_in_use';
    END IF;
    IF @schema@.outbox_pending($3, 1000::bigint) >= 1000 THEN
        RETURN false;
    END IF;
    LOCK TABLE @schema@.outbox IN SHARE ROW EXCLUSIVE MODE;
    began := clock_timestamp();
    LOOP
        pending := @schema@.outbox_pending($3, 1::bigint);
        EXIT WHEN pending = 0;
        IF clock_timestamp() > began + interval '300 ms' THEN
            RETURN false;
        END IF;
        PERFORM pg_sleep(0.002);
    END LOOP;
    PERFORM set_config('synchronous_commit', 'on', true);
    INSERT INTO @schema@.outbox_lease AS l (name, holder, epoch, expires_at, lasts)
        VALUES ($3, 'outbox debezium', 1, 'infinity', '0')
        ON CONFLICT (name) DO UPDATE
            SET holder = 'outbox debezium', epoch = l.epoch + 1, expires_at = 'infinity', lasts = '0';
    -- The lease is lost: from here on the relay can neither move its position nor insert failed events.
    IF EXISTS (SELECT FROM @schema@.outbox_failed AS f
        WHERE f.relay = $3 AND f.status IN ('waiting', 'failed', 'parked')) THEN
        RAISE EXCEPTION 'relay % has events in outbox_failed that it still has to send: wait, or resolve them', $3
            USING ERRCODE = 'object_in_use';
    END IF;
    DELETE FROM @schema@.outbox_cursor AS c WHERE c.relay = $3;
    EXECUTE format('ALTER PUBLICATION %I ADD TABLE %s', publication, @outbox@);
    INSERT INTO @schema@.outbox_audit (operator, action, reason, relay, parking_key)
        VALUES ($4, 'to-debezium', $5, $3, '');
    RETURN true;
END $body$
$function$,

-- Counts the committed events that a relay has still to attempt, up to a number. It reads neither the rows of the
-- transactions between those that the position saw in progress, which were attempted, nor the uncommitted rows of open
-- transactions: see tables.Gaps. Nor does it read what the position saw in progress and was rolled back. The newest come
-- first, because a window is drained in the order of ids. What was copied here with a transaction id that PostgreSQL
-- has not reached counts.
$function$
CREATE FUNCTION @schema@.outbox_pending(relay text, most bigint) RETURNS bigint
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $body$
    WITH reached AS MATERIALIZED (
        SELECT c.snapshot, c.window_snapshot, c.last_processed_id, pg_snapshot_xmax(c.snapshot) AS bound,
            pg_current_snapshot() AS present
          FROM @schema@.outbox_cursor AS c WHERE c.relay = $1 ORDER BY c.id DESC LIMIT 1
    ), ranges AS MATERIALIZED (
        SELECT x AS first, x AS last FROM reached AS p, pg_snapshot_xip(p.snapshot) AS x
         WHERE CASE WHEN pg_visible_in_snapshot(x, p.present) THEN pg_xact_status(x) IS DISTINCT FROM 'aborted'::text END
         UNION ALL
        SELECT g.first, g.last
          FROM (SELECT (lag(e.x) OVER (ORDER BY e.x) + 1)::text::xid8 AS first, (e.x - 1)::text::xid8 AS last
                  FROM (SELECT p.bound::text::bigint - 1 AS x FROM reached AS p
                         UNION ALL
                        SELECT x::text::bigint FROM reached AS p, pg_snapshot_xip(p.present) AS x WHERE x >= p.bound
                         UNION ALL
                        SELECT pg_snapshot_xmax(p.present)::text::bigint FROM reached AS p
                         WHERE pg_snapshot_xmax(p.present) >= p.bound) AS e) AS g
         WHERE g.first <= g.last
         UNION ALL
        SELECT greatest((pg_snapshot_xmax(p.present)::text::bigint
                         + greatest(age(pg_snapshot_xmax(p.present)::xid), 0))::text::xid8, p.bound),
            '18446744073709551615'::xid8
          FROM reached AS p
    )
    SELECT count(*) FROM (
        SELECT FROM ranges AS r CROSS JOIN reached AS p
         CROSS JOIN LATERAL (
            SELECT FROM @schema@.outbox AS o
             WHERE (o.xid, o.id) > (r.first, CASE WHEN r.first = r.last AND pg_visible_in_snapshot(r.first, p.window_snapshot)
                       THEN p.last_processed_id ELSE '-9223372036854775808' END)
               AND o.xid <= r.last
               AND NOT coalesce(o.id <= p.last_processed_id AND pg_visible_in_snapshot(o.xid, p.window_snapshot), false)
             ORDER BY o.xid DESC, o.id DESC LIMIT $2) AS o
         LIMIT $2) AS pending
$body$
$function$
]);
-- +goose StatementEnd
