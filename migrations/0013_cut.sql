-- +goose Up

-- As in 0003_bounded_reads.sql.
SELECT pg_catalog.set_config('lock_timeout', '100ms', true) WHERE pg_catalog.current_setting('lock_timeout') OPERATOR(pg_catalog.=) '0';

-- What moves consumer groups from their workers to Kafka and back while all are running. A cut is
-- a snapshot: on one side of it are the events that workers handle, on the other those that a
-- relay sends. Nothing is on both sides, and nothing on none.
-- +goose StatementBegin
DO $migration$
DECLARE
    schema  constant name := pg_catalog.current_schema();
    path    constant text := pg_catalog.current_setting('search_path');
    f       record;
    granted record;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    -- Keeps the workers of groups from taking events until the end of the transaction.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_lock_groups(groups text[]) RETURNS void
        LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            one text;
        BEGIN
            IF current_setting('transaction_isolation') <> 'read committed' THEN
                RAISE EXCEPTION 'groups are moved under READ COMMITTED only' USING ERRCODE = 'invalid_transaction_state';
            END IF;
            PERFORM set_config('idle_in_transaction_session_timeout', '10s', true);
            FOR one IN SELECT DISTINCT g FROM unnest(groups) AS g ORDER BY g LOOP
                PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(convert_to('outbox.event_subscription.' || %2$L || '.' || one, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint);
            END LOOP;
        END $body$
        $function$, schema, schema);

    -- Has groups leave at this moment: their workers take the events up to it, and the relay, which
    -- must be a new one, sends the others. The relay stands by until outbox_finish_cut. Returns
    -- the snapshot. It is read before the transaction takes an id, so that a crash gives no id
    -- out again that the snapshot calls finished.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_cut_to_kafka(groups text[], relay text, operator text, reason text) RETURNS pg_snapshot
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            cut   pg_snapshot;
            moved bigint;
            term  bigint;
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason), %1$I.outbox_lock_groups(groups);
            IF EXISTS (SELECT FROM %1$I.outbox_cursor AS c WHERE c.relay = $2)
               OR EXISTS (SELECT FROM %1$I.outbox_lease AS l WHERE l.name = $2 AND l.holder <> 'outbox cut' AND l.expires_at > clock_timestamp()) THEN
                RAISE EXCEPTION 'relay %% has begun already: it would send events that the workers handle', $2 USING ERRCODE = 'object_in_use';
            END IF;
            cut := pg_current_snapshot();
            UPDATE %1$I.event_subscription AS s SET state = 'leaving', relay = $2, cut_snapshot = cut, changed_at = now()
             WHERE s.consumer_group = ANY ($1) AND s.state = 'active';
            GET DIAGNOSTICS moved = ROW_COUNT;
            IF moved = 0 OR moved <> (SELECT count(DISTINCT g) FROM unnest($1) AS g) THEN
                RAISE EXCEPTION 'not all of these groups get their events from workers' USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            INSERT INTO %1$I.outbox_lease AS l (name, holder, epoch, expires_at, lasts) VALUES ($2, 'outbox cut', 1, 'infinity', '0')
                ON CONFLICT (name) DO UPDATE SET holder = 'outbox cut', epoch = l.epoch + 1, expires_at = 'infinity', lasts = '0'
            RETURNING l.epoch INTO term;
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
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason), %1$I.outbox_lock_groups(groups);
            IF coalesce(cardinality($1), 0) = 0 OR EXISTS (SELECT FROM %1$I.event_subscription AS s WHERE s.consumer_group = ANY ($1) AND s.state <> 'left') THEN
                RAISE EXCEPTION 'not all of these groups get their events from Kafka' USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            INSERT INTO %1$I.outbox_lease AS l (name, holder, epoch, expires_at, lasts) VALUES ($2, 'outbox cut', 1, 'infinity', '0')
                ON CONFLICT (name) DO UPDATE SET holder = 'outbox cut', epoch = l.epoch + 1, expires_at = 'infinity', lasts = '0';
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

    -- Ends the cut at a relay. Its groups have finished what was before the cut, as the caller
    -- makes sure: then what comes after it can begin. Returns how many groups there are.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_finish_cut(relay text, operator text, reason text) RETURNS bigint
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            returned bigint;
            released bigint;
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason);
            PERFORM %1$I.outbox_lock_groups(ARRAY(SELECT s.consumer_group::text FROM %1$I.event_subscription AS s WHERE s.relay = $1));
            IF EXISTS (SELECT FROM %1$I.event_subscription AS s WHERE s.relay = $1 AND s.state = 'leaving') THEN
                RAISE EXCEPTION 'workers have not taken all events in front of the cut yet' USING ERRCODE = 'object_in_use';
            END IF;
            UPDATE %1$I.event_subscription AS s SET state = 'active', relay = NULL, changed_at = now() WHERE s.relay = $1 AND s.state = 'returning';
            GET DIAGNOSTICS returned = ROW_COUNT;
            IF returned = 0 THEN
                UPDATE %1$I.outbox_lease AS l SET expires_at = clock_timestamp() WHERE l.name = $1 AND l.holder = 'outbox cut';
                GET DIAGNOSTICS released = ROW_COUNT;
                IF released = 0 THEN
                    RAISE EXCEPTION 'there is no cut at relay %%', $1 USING ERRCODE = 'undefined_object';
                END IF;
                SELECT count(*) INTO returned FROM %1$I.event_subscription AS s WHERE s.relay = $1 AND s.state = 'left';
            END IF;
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key) VALUES ($2, 'finish-cut', $3, $1, '');
            RETURN returned;
        END $body$
        $function$, schema);

    -- As in 0010_least_privilege.sql: nobody may call them whom nobody allows it.
    FOR f IN
        SELECT p.oid::regprocedure AS signature, p.oid, p.proowner FROM pg_proc AS p
         WHERE p.pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = schema)
           AND p.proname IN ('outbox_lock_groups', 'outbox_cut_to_kafka', 'outbox_cut_to_postgres', 'outbox_finish_cut')
    LOOP
        FOR granted IN
            SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee
              FROM pg_proc AS p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
             WHERE p.oid = f.oid AND a.grantee <> p.proowner
        LOOP
            EXECUTE format('REVOKE ALL ON FUNCTION %s FROM %s CASCADE', f.signature, granted.grantee);
        END LOOP;
    END LOOP;
    PERFORM set_config('search_path', path, true);
END $migration$;
-- +goose StatementEnd
