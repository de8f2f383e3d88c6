-- +goose Up

-- As in 0003_bounded_reads.sql.
SELECT pg_catalog.set_config('lock_timeout', '100ms', true) WHERE pg_catalog.current_setting('lock_timeout') OPERATOR(pg_catalog.=) '0';

-- What moves consumer groups from their workers to Kafka and back while all are running. A cut is
-- a snapshot: on one side of it are the events that workers handle, on the other those that a
-- relay sends. Nothing is on both sides, and nothing on none.
COMMENT ON COLUMN outbox_audit.action IS
    'retry, resolve, edit, hold, release or read; pause, resume or rewind of a consumer group; to-kafka, to-postgres, finish-cut or cancel-cut of groups that are moved.';
COMMENT ON COLUMN outbox_audit.relay IS 'The relay whose event or key it is, or at which groups are moved; empty for all else.';
COMMENT ON COLUMN outbox_audit.consumer_group IS
    'The consumer group whose delivery it is, or that was paused, resumed, rewound or moved; NULL for all else.';

-- +goose StatementBegin
DO $migration$
DECLARE
    schema  constant name := pg_catalog.current_schema();
    path    constant text := pg_catalog.current_setting('search_path');
    f       record;
    granted record;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    -- Keeps the workers of groups from taking events, and positions from being moved to another
    -- cluster, until the end of the transaction. It must be the first of the transaction, as the
    -- snapshot of a cut is to be read before the transaction has an id: then no transaction that it calls
    -- finished has a higher one, and a crash gives no such id out again.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_lock_groups(groups text[], relay text) RETURNS void
        LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            one text;
        BEGIN
            IF current_setting('transaction_isolation') <> 'read committed' THEN
                RAISE EXCEPTION 'groups are moved under READ COMMITTED only' USING ERRCODE = 'invalid_transaction_state';
            END IF;
            IF pg_current_xact_id_if_assigned() IS NOT NULL THEN
                RAISE EXCEPTION 'groups are moved in a transaction that has written nothing before' USING ERRCODE = 'invalid_transaction_state';
            END IF;
            IF coalesce(relay, '') = '' OR char_length(relay) > 100 OR starts_with(relay, 'worker:') OR starts_with(relay, 'consumer:') THEN
                RAISE EXCEPTION 'relay has to be there, in at most 100 characters, and worker: and consumer: are what names of groups begin with' USING ERRCODE = 'invalid_parameter_value';
            END IF;
            PERFORM set_config('idle_in_transaction_session_timeout', '10s', true);
            PERFORM pg_advisory_xact_lock(hashtextextended('outbox.rebase.' || %2$L, 0));
            FOR one IN SELECT DISTINCT g FROM unnest(groups) AS g ORDER BY g LOOP
                IF coalesce(one, '') = '' OR char_length(one) > 255 THEN
                    RAISE EXCEPTION 'groups have names of at most 255 characters' USING ERRCODE = 'invalid_parameter_value';
                END IF;
                PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(convert_to('outbox.event_subscription.' || %2$L || '.' || one, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint);
            END LOOP;
        END $body$
        $function$, schema, schema);

    -- Locks the lease of a relay, and returns whether there is a cut at it. While there is one, nobody leads.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_lock_cut(relay text) RETURNS boolean
        LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            PERFORM FROM %1$I.outbox_lease AS l WHERE l.name = $1 AND l.holder = 'outbox cut' AND l.expires_at = 'infinity' FOR UPDATE;
            -- A relay whose groups are back has no position any more, and its lease stays as it is.
            RETURN FOUND AND (EXISTS (SELECT FROM %1$I.outbox_cursor AS c WHERE c.relay = $1)
                              OR EXISTS (SELECT FROM %1$I.event_subscription AS s WHERE s.relay = $1 AND s.state = 'returning'));
        END $body$
        $function$, schema);

    -- Has groups leave at this moment: their workers take the events up to it, and the relay, which
    -- must be a new one, sends the others. Its position is the cut, and stays where it is until
    -- outbox_finish_cut, because it cannot get its lease.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_cut_to_kafka(groups text[], relay text, operator text, reason text) RETURNS pg_snapshot
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            cut   pg_snapshot;
            wrong text;
            term  bigint;
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason), %1$I.outbox_lock_groups(groups, relay);
            SELECT g.name INTO wrong FROM (SELECT DISTINCT g AS name FROM unnest($1) AS g) AS g
              LEFT JOIN %1$I.event_subscription AS s ON s.consumer_group = g.name
             WHERE s.state IS DISTINCT FROM 'active' ORDER BY g.name LIMIT 1;
            IF FOUND OR coalesce(cardinality($1), 0) = 0 THEN
                RAISE EXCEPTION 'group %% does not get its events from workers', coalesce(wrong, '(none)') USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            SELECT g.name INTO wrong FROM (SELECT DISTINCT g AS name FROM unnest($1) AS g) AS g CROSS JOIN pg_control_system() AS here
              LEFT JOIN LATERAL (SELECT * FROM %1$I.outbox_cursor AS c WHERE c.relay = 'worker:' || g.name ORDER BY c.id DESC LIMIT 1) AS c ON true
             WHERE c.system_identifier IS DISTINCT FROM here.system_identifier
                OR pg_snapshot_xmax(coalesce(c.window_snapshot, c.snapshot)) > pg_snapshot_xmax(pg_current_snapshot()) ORDER BY g.name LIMIT 1;
            IF FOUND THEN
                RAISE EXCEPTION 'group %% has no position in this database cluster: its worker has to run first', wrong USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            cut := pg_current_snapshot();
            INSERT INTO %1$I.outbox_lease AS l (name, holder, epoch, expires_at, lasts) VALUES ($2, 'outbox cut', 1, 'infinity', '0')
                ON CONFLICT (name) DO UPDATE SET holder = 'outbox cut', epoch = l.epoch + 1, expires_at = 'infinity', lasts = '0'
                WHERE l.holder = 'outbox cut' OR l.expires_at <= clock_timestamp()
            RETURNING l.epoch INTO term;
            -- The lease is locked: from here on no relay can make itself a position.
            IF term IS NULL OR EXISTS (SELECT FROM %1$I.outbox_cursor AS c WHERE c.relay = $2) THEN
                RAISE EXCEPTION 'relay %% has begun already: it would send events that the workers handle', $2 USING ERRCODE = 'object_in_use';
            END IF;
            UPDATE %1$I.event_subscription AS s SET state = 'leaving', relay = $2, changed_at = now() WHERE s.consumer_group = ANY ($1);
            INSERT INTO %1$I.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
            SELECT $2, 0, cut, coalesce((SELECT o.id FROM %1$I.outbox AS o ORDER BY o.id DESC LIMIT 1), 0), s.system_identifier, term
              FROM pg_control_system() AS s;
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
            SELECT DISTINCT $3, 'to-kafka', $4, $2, '', g FROM unnest($1) AS g;
            RETURN cut;
        END $body$
        $function$, schema);

    -- Takes the place of a relay: what it has sent, groups get from Kafka, and their workers
    -- take the rest, after outbox_finish_cut. Nothing that the relay has to send again may be left.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_cut_to_postgres(groups text[], relay text, operator text, reason text) RETURNS void
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            wrong text;
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason), %1$I.outbox_lock_groups(groups, relay);
            SELECT s.consumer_group INTO wrong FROM %1$I.event_subscription AS s
             WHERE s.consumer_group = ANY ($1) AND (s.state <> 'left' OR s.relay <> $2) ORDER BY s.consumer_group LIMIT 1;
            IF FOUND OR coalesce(cardinality($1), 0) = 0 THEN
                RAISE EXCEPTION 'group %% does not get its events from relay %%', coalesce(wrong, '(none)'), $2 USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            SELECT s.consumer_group INTO wrong FROM %1$I.event_subscription AS s
             WHERE s.relay = $2 AND s.consumer_group <> ALL ($1) ORDER BY s.consumer_group LIMIT 1;
            IF FOUND THEN
                RAISE EXCEPTION 'group %% gets its events from relay %%, too, and would get none any more', wrong, $2 USING ERRCODE = 'object_in_use';
            END IF;
            IF %1$I.outbox_lock_cut($2) THEN
                RAISE EXCEPTION 'there is a cut at relay %% already: finish or cancel it first', $2 USING ERRCODE = 'object_in_use';
            END IF;
            INSERT INTO %1$I.outbox_lease AS l (name, holder, epoch, expires_at, lasts) VALUES ($2, 'outbox cut', 1, 'infinity', '0')
                ON CONFLICT (name) DO UPDATE SET holder = 'outbox cut', epoch = l.epoch + 1, expires_at = 'infinity', lasts = '0';
            -- The lease is lost: from here on the relay cannot move its position, nor note failures.
            IF EXISTS (SELECT FROM %1$I.outbox_failed AS f WHERE f.relay = $2 AND f.status IN ('waiting', 'failed', 'parked')) THEN
                RAISE EXCEPTION 'relay %% has events in outbox_failed that it still has to send: wait, or resolve them', $2 USING ERRCODE = 'object_in_use';
            END IF;
            INSERT INTO %1$I.outbox_cursor (relay, last_processed_id, snapshot, window_snapshot, highest_id, system_identifier, epoch)
            SELECT 'worker:' || g.name, c.last_processed_id, c.snapshot, c.window_snapshot, c.highest_id, c.system_identifier, 1 + (random() * 4e18)::bigint
              FROM (SELECT DISTINCT g AS name FROM unnest($1) AS g) AS g,
                   (SELECT * FROM %1$I.outbox_cursor AS c WHERE c.relay = $2 ORDER BY c.id DESC LIMIT 1) AS c;
            IF NOT FOUND THEN
                RAISE EXCEPTION 'there is no relay %%', $2 USING ERRCODE = 'undefined_object';
            END IF;
            DELETE FROM %1$I.outbox_cursor AS c WHERE c.relay = $2;
            INSERT INTO %1$I.event_subscription (consumer_group, state, relay) SELECT DISTINCT g, 'returning', $2 FROM unnest($1) AS g
                ON CONFLICT (consumer_group) DO UPDATE SET state = 'returning', relay = $2, changed_at = now();
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
            SELECT DISTINCT $3, 'to-postgres', $4, $2, '', g FROM unnest($1) AS g;
        END $body$
        $function$, schema);

    -- Ends the cut at a relay: what comes after it begins. Of groups that leave it makes sure that
    -- their workers have finished what was before the cut, unless early is set, and that their
    -- consumers have noted where they begin to read. What returning groups have read in Kafka, the
    -- caller has to know. Returns how many groups there are.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_finish_cut(relay text, early boolean, operator text, reason text) RETURNS bigint
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            wrong    text;
            finished bigint;
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason),
                    %1$I.outbox_lock_groups(ARRAY(SELECT s.consumer_group::text FROM %1$I.event_subscription AS s WHERE s.relay = $1), $1);
            IF NOT %1$I.outbox_lock_cut($1) THEN
                RAISE EXCEPTION 'there is no cut at relay %%', $1 USING ERRCODE = 'undefined_object';
            END IF;
            SELECT s.consumer_group INTO wrong FROM %1$I.event_subscription AS s WHERE s.relay = $1 AND s.state = 'leaving' ORDER BY s.consumer_group LIMIT 1;
            IF FOUND THEN
                RAISE EXCEPTION 'the workers of group %% have not taken all events in front of the cut', wrong USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            SELECT s.consumer_group INTO wrong FROM %1$I.event_subscription AS s
             WHERE s.relay = $1 AND s.state = 'left' AND NOT early
               AND (EXISTS (SELECT FROM %1$I.event_delivery AS d WHERE d.consumer_group = s.consumer_group AND d.status IN ('PENDING', 'PARKED') AND d.resolution IS NULL)
                    OR EXISTS (SELECT FROM %1$I.event_delivery AS d WHERE d.consumer_group = s.consumer_group AND d.status = 'PROCESSING'))
             ORDER BY s.consumer_group LIMIT 1;
            IF FOUND THEN
                RAISE EXCEPTION 'the workers of group %% have open deliveries from before the cut', wrong USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            SELECT s.consumer_group INTO wrong FROM %1$I.event_subscription AS s
             WHERE s.relay = $1 AND s.state = 'left' AND NOT early
               AND NOT EXISTS (SELECT FROM %1$I.consumer_start AS c WHERE c.consumer_group = s.consumer_group)
             ORDER BY s.consumer_group LIMIT 1;
            IF FOUND THEN
                RAISE EXCEPTION 'no consumer of group %% has begun to read: it might begin behind what the relay sends', wrong USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            -- What the consumers of a group have parked is for them to handle, and before what its workers get.
            SELECT s.consumer_group INTO wrong FROM %1$I.event_subscription AS s
             WHERE s.relay = $1 AND s.state = 'returning' AND NOT early
               AND EXISTS (SELECT FROM %1$I.event_delivery AS d WHERE d.consumer_group = s.consumer_group AND d.record IS NOT NULL AND d.status IN ('PENDING', 'PARKED', 'PROCESSING'))
             ORDER BY s.consumer_group LIMIT 1;
            IF FOUND THEN
                RAISE EXCEPTION 'the consumers of group %% have parked events that are not handled yet', wrong USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            UPDATE %1$I.event_subscription AS s SET state = 'active', relay = NULL, changed_at = now() WHERE s.relay = $1 AND s.state = 'returning';
            GET DIAGNOSTICS finished = ROW_COUNT;
            IF finished = 0 THEN
                UPDATE %1$I.outbox_lease AS l SET expires_at = '-infinity' WHERE l.name = $1;
                SELECT count(*) INTO finished FROM %1$I.event_subscription AS s WHERE s.relay = $1;
            END IF;
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key) VALUES ($3, 'finish-cut', $4, $1, '');
            RETURN finished;
        END $body$
        $function$, schema);

    -- Takes the cut at a relay back: nothing has begun behind it. Groups that have left get the
    -- position of the relay, which is the cut; a relay gets back that of groups that return. Returns
    -- how many groups there are.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_cancel_cut(relay text, operator text, reason text) RETURNS bigint
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            groups text[];
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason),
                    %1$I.outbox_lock_groups(ARRAY(SELECT s.consumer_group::text FROM %1$I.event_subscription AS s WHERE s.relay = $1), $1);
            IF NOT %1$I.outbox_lock_cut($1) THEN
                RAISE EXCEPTION 'there is no cut at relay %%', $1 USING ERRCODE = 'undefined_object';
            END IF;
            groups := ARRAY(SELECT s.consumer_group::text FROM %1$I.event_subscription AS s WHERE s.relay = $1 AND s.state = 'returning' ORDER BY s.consumer_group);
            IF cardinality(groups) > 0 THEN
                INSERT INTO %1$I.outbox_cursor (relay, last_processed_id, snapshot, window_snapshot, highest_id, system_identifier, epoch)
                SELECT $1, c.last_processed_id, c.snapshot, c.window_snapshot, c.highest_id, c.system_identifier, l.epoch
                  FROM %1$I.outbox_cursor AS c, %1$I.outbox_lease AS l WHERE c.relay = 'worker:' || groups[1] AND l.name = $1 ORDER BY c.id DESC LIMIT 1;
                DELETE FROM %1$I.outbox_cursor AS c WHERE c.relay = ANY (ARRAY(SELECT 'worker:' || g FROM unnest(groups) AS g));
                UPDATE %1$I.event_subscription AS s SET state = 'left', changed_at = now() WHERE s.consumer_group = ANY (groups);
                UPDATE %1$I.outbox_lease AS l SET expires_at = '-infinity' WHERE l.name = $1;
            ELSE
                groups := ARRAY(SELECT s.consumer_group::text FROM %1$I.event_subscription AS s WHERE s.relay = $1);
                INSERT INTO %1$I.outbox_cursor (relay, last_processed_id, snapshot, window_snapshot, highest_id, system_identifier, epoch)
                SELECT 'worker:' || s.consumer_group, c.last_processed_id, c.snapshot, c.window_snapshot, c.highest_id, c.system_identifier, 1 + (random() * 4e18)::bigint
                  FROM %1$I.event_subscription AS s,
                       (SELECT * FROM %1$I.outbox_cursor AS c WHERE c.relay = $1 ORDER BY c.id DESC LIMIT 1) AS c
                 WHERE s.relay = $1 AND s.state = 'left';
                UPDATE %1$I.event_subscription AS s SET state = 'active', relay = NULL, changed_at = now() WHERE s.relay = $1;
                DELETE FROM %1$I.outbox_cursor AS c WHERE c.relay = $1;
            END IF;
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
            SELECT $2, 'cancel-cut', $3, $1, '', g FROM unnest(groups) AS g;
            RETURN cardinality(groups);
        END $body$
        $function$, schema);

    -- As in 0012_delivery_operators.sql: who may retry failed events may move groups.
    FOR f IN
        SELECT p.oid::regprocedure AS signature, p.oid, p.proowner, old.proacl AS acl
          FROM (VALUES ('outbox_lock_groups', NULL), ('outbox_lock_cut', NULL), ('outbox_cut_to_kafka', 'outbox_retry_failed'), ('outbox_cut_to_postgres', 'outbox_retry_failed'),
                       ('outbox_finish_cut', 'outbox_retry_failed'), ('outbox_cancel_cut', 'outbox_retry_failed')) AS new (name, alike)
          JOIN pg_proc AS p ON p.proname = new.name AND p.pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = schema)
          LEFT JOIN pg_proc AS old ON old.proname = new.alike AND old.pronamespace = p.pronamespace
    LOOP
        FOR granted IN -- by ALTER DEFAULT PRIVILEGES
            SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee
              FROM pg_proc AS p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
             WHERE p.oid = f.oid AND a.grantee <> p.proowner
        LOOP
            EXECUTE format('REVOKE ALL ON FUNCTION %s FROM %s CASCADE', f.signature, granted.grantee);
        END LOOP;
        FOR granted IN
            SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee,
                   CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS option
              FROM aclexplode(f.acl) AS a WHERE a.grantee <> f.proowner
        LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s%s', f.signature, granted.grantee, granted.option);
        END LOOP;
    END LOOP;

    -- A group of consumers has a lease, too: one of its members alerts. Its name is consumer: and the group's, and who may
    -- write for the group may write it, as that of its workers. The type of a column in a policy cannot be changed.
    EXECUTE format($sql$
        DROP POLICY outbox_lease_write ON %1$I.outbox_lease;
        ALTER TABLE %1$I.outbox_lease ALTER COLUMN name TYPE varchar(264);
        CREATE POLICY outbox_lease_write ON %1$I.outbox_lease USING (
            ARRAY(SELECT r.consumer_group FROM %1$I.consumer_group_role AS r
                   WHERE r.role = 'public' OR pg_has_role(to_regrole(quote_ident(r.role)), 'USAGE')
                  UNION ALL
                  SELECT '*' WHERE pg_has_role('pg_write_all_data', 'USAGE'))
            && ARRAY[CASE WHEN starts_with(name, 'worker:') THEN substr(name, 8) WHEN starts_with(name, 'consumer:') THEN substr(name, 10) END, '*']::varchar[]);
        COMMENT ON COLUMN %1$I.outbox_lease.name IS 'Name of the relay, or worker: or consumer: and a consumer group.'
        $sql$, schema);
    PERFORM set_config('search_path', path, true);
END $migration$;
-- +goose StatementEnd
