-- +goose Up

-- As in 0003_bounded_reads.sql.
SELECT pg_catalog.set_config('lock_timeout', '100ms', true) WHERE pg_catalog.current_setting('lock_timeout') OPERATOR(pg_catalog.=) '0';

-- What has Debezium, or another reader of logical replication, send the events: rows that say
-- their topic and key, in a publication. Nothing of that is on before outbox_publish is called. A move
-- between Debezium and a relay is the publication without or with outbox, from one commit on.
COMMENT ON COLUMN outbox_audit.action IS
    'retry, resolve, edit, hold, release or read; pause, resume or rewind of a consumer group; to-kafka, to-postgres, finish-cut or cancel-cut of groups that are moved; from-debezium, begin-relay or to-debezium of a relay.';

-- +goose StatementBegin
DO $migration$
DECLARE
    schema  constant name := pg_catalog.current_schema();
    path    constant text := pg_catalog.current_setting('search_path');
    f       record;
    granted record;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    -- What a Recorder and a relay do: the topic is derived from the type, the key is the aggregate's id. A row without
    -- a topic would stop the connector, and so would one that Kafka cannot have: the transaction is refused.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_complete_row() RETURNS trigger
        LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            IF NEW.topic IS NULL THEN
                IF NEW.event_type !~ '^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+$' THEN
                    RAISE EXCEPTION 'column topic is NULL, and no topic can be derived from event_type %%', quote_literal(NEW.event_type) USING ERRCODE = 'check_violation';
                END IF;
                NEW.topic := split_part(NEW.event_type, '.', 2) || '-events';
            ELSIF NEW.topic !~ '^[A-Za-z0-9._-]+$' OR NEW.topic IN ('.', '..') THEN
                RAISE EXCEPTION 'column topic is %%, which is no name of a Kafka topic', quote_literal(NEW.topic) USING ERRCODE = 'check_violation';
            END IF;
            NEW.partition_key := coalesce(NEW.partition_key, NEW.aggregate_id);
            RETURN NEW;
        END $body$
        $function$, schema);

    -- Completes each row at its INSERT from now on, and makes the publication if there is none of this name: with outbox in it, unless
    -- a relay sends the events. One that is there keeps its tables. The locks wait for those who have recorded something.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_publish(publication text) RETURNS void
        LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms' AS $body$
        BEGIN
            IF coalesce(publication, '') = '' OR octet_length(publication) > 63 THEN
                RAISE EXCEPTION 'a publication has a name of at most 63 bytes' USING ERRCODE = 'invalid_parameter_value';
            END IF;
            PERFORM pg_advisory_xact_lock(hashtextextended('outbox.publish.' || %2$L, 0));
            IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = %3$L::regclass AND tgname = 'outbox_complete_row') THEN
                CREATE TRIGGER outbox_complete_row BEFORE INSERT ON %1$I.outbox FOR EACH ROW
                    WHEN (NEW.topic IS NULL OR NEW.partition_key IS NULL OR NEW.topic !~ '^[A-Za-z0-9._-]+$' OR NEW.topic IN ('.', '..'))
                    EXECUTE FUNCTION %1$I.outbox_complete_row();
            END IF;
            IF NOT EXISTS (SELECT FROM pg_publication WHERE pubname = publication) THEN
                EXECUTE format('CREATE PUBLICATION %%I %%s WITH (publish = ''insert'', publish_via_partition_root = true)', publication,
                    CASE WHEN EXISTS (SELECT FROM %1$I.outbox_cursor AS c WHERE NOT starts_with(c.relay, 'worker:')) THEN '' ELSE %4$L END);
            ELSIF NOT EXISTS (SELECT FROM pg_publication WHERE pubname = publication AND pubinsert AND pubviaroot
                                 AND NOT (puballtables OR pubupdate OR pubdelete OR pubtruncate)) THEN
                RAISE EXCEPTION 'publication %% is there with other options: it has to have publish = ''insert'' and publish_via_partition_root = true, and not all tables', quote_ident(publication)
                    USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
        END $body$
        $function$, schema, schema, format('%I.outbox', schema), format('FOR TABLE %I.outbox', schema));

    -- Whether a publication has outbox in it. It is an error if there is no such publication, or if it has outbox in a way
    -- that ALTER PUBLICATION DROP TABLE does not end: Debezium would go on beside the relay.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_is_published(publication text) RETURNS boolean
        LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            found_oid oid := (SELECT p.oid FROM pg_publication AS p WHERE p.pubname = publication);
            whole     boolean;
        BEGIN
            IF found_oid IS NULL THEN
                RAISE EXCEPTION 'there is no publication %%', coalesce(quote_ident(publication), '(none)') USING ERRCODE = 'undefined_object';
            END IF;
            whole := (SELECT p.puballtables FROM pg_publication AS p WHERE p.oid = found_oid);
            IF current_setting('server_version_num')::int >= 150000 AND NOT whole THEN -- earlier ones have no such catalog
                EXECUTE 'SELECT EXISTS (SELECT FROM pg_publication_namespace AS n JOIN pg_class AS c ON c.relnamespace = n.pnnspid WHERE n.pnpubid = $1 AND c.oid = $2)'
                   INTO whole USING found_oid, %2$L::regclass::oid;
            END IF;
            IF whole THEN
                RAISE EXCEPTION 'publication %% has outbox in it as a table of its schema, or of all: a cut cannot take it out; name its tables', quote_ident(publication)
                    USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            RETURN EXISTS (SELECT FROM pg_publication_rel AS r WHERE r.prpubid = found_oid AND r.prrelid = %2$L::regclass);
        END $body$
        $function$, schema, format('%I.outbox', schema));

    -- From the commit of the caller on, the publication has no more events, and the relay, which must be a new one, has all of
    -- them: nobody has one recorded in an open transaction at this moment. The relay waits until outbox_begin_relay.
    -- As in 0013_cut.sql, the snapshot is read before the transaction has an id.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_cut_from_debezium(publication text, relay text, operator text, reason text) RETURNS void
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms' AS $body$
        DECLARE
            cut  pg_snapshot;
            term bigint;
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason), %1$I.outbox_lock_groups('{}', $2);
            IF NOT %1$I.outbox_is_published(publication) THEN
                RAISE EXCEPTION 'publication %% does not have the events: Debezium does not send them', quote_ident(publication) USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            LOCK TABLE %1$I.outbox IN SHARE ROW EXCLUSIVE MODE;
            cut := pg_current_snapshot();
            PERFORM set_config('synchronous_commit', 'on', true);
            INSERT INTO %1$I.outbox_lease AS l (name, holder, epoch, expires_at, lasts) VALUES ($2, 'outbox debezium', 1, 'infinity', '0')
                ON CONFLICT (name) DO UPDATE SET holder = 'outbox debezium', epoch = l.epoch + 1, expires_at = 'infinity', lasts = '0'
                WHERE l.holder IN ('outbox debezium', 'outbox cut') OR l.expires_at <= clock_timestamp()
            RETURNING l.epoch INTO term;
            IF term IS NULL OR EXISTS (SELECT FROM %1$I.outbox_cursor AS c WHERE c.relay = $2) OR EXISTS (SELECT FROM %1$I.event_subscription AS s WHERE s.relay = $2 AND s.state <> 'left') THEN
                RAISE EXCEPTION 'relay %% has begun already: it would send events that Debezium sends', $2 USING ERRCODE = 'object_in_use';
            END IF;
            INSERT INTO %1$I.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
            SELECT $2, 0, cut, coalesce((SELECT o.id FROM %1$I.outbox AS o ORDER BY o.id DESC LIMIT 1), 0), s.system_identifier, term
              FROM pg_control_system() AS s;
            EXECUTE format('ALTER PUBLICATION %%I DROP TABLE %%s', publication, %2$L);
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key) VALUES ($3, 'from-debezium', $4, $2, '');
        END $body$
        $function$, schema, format('%I.outbox', schema));

    -- As in 0013_cut.sql. A relay that waits for Debezium is in no cut that can be finished, cancelled or made there.
    EXECUTE format($function$
        CREATE OR REPLACE FUNCTION %1$I.outbox_lock_cut(relay text) RETURNS boolean
        LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            who text;
            has boolean;
        BEGIN
            SELECT l.holder INTO who FROM %1$I.outbox_lease AS l WHERE l.name = $1 AND l.holder IN ('outbox cut', 'outbox debezium') AND l.expires_at = 'infinity' FOR UPDATE;
            has := EXISTS (SELECT FROM %1$I.outbox_cursor AS c WHERE c.relay = $1);
            IF who = 'outbox debezium' AND has THEN
                RAISE EXCEPTION 'relay %% takes the events from Debezium: let it begin first', $1 USING ERRCODE = 'object_in_use';
            END IF;
            -- A relay whose groups are back has no position any more, and its lease stays as it is.
            RETURN coalesce(who = 'outbox cut', false) AND (has OR EXISTS (SELECT FROM %1$I.event_subscription AS s WHERE s.relay = $1 AND s.state = 'returning'));
        END $body$
        $function$, schema);

    -- Lets the relay begin. Whether Debezium has sent what was in front of the cut, the caller has to know; here it is
    -- made sure that its connector has stopped.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_begin_relay(slot text, relay text, operator text, reason text) RETURNS void
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason), %1$I.outbox_lock_groups('{}', $2);
            UPDATE %1$I.outbox_lease AS l SET expires_at = '-infinity' WHERE l.name = $2 AND l.holder = 'outbox debezium' AND l.expires_at = 'infinity'
               AND EXISTS (SELECT FROM %1$I.outbox_cursor AS c WHERE c.relay = $2);
            IF NOT FOUND THEN
                RAISE EXCEPTION 'there is no cut at relay %%', $2 USING ERRCODE = 'undefined_object';
            END IF;
            IF EXISTS (SELECT FROM pg_replication_slots AS s WHERE s.slot_name = slot AND s.active) THEN
                RAISE EXCEPTION 'replication slot %% is in use: stop the connector first', quote_ident(slot) USING ERRCODE = 'object_in_use';
            END IF;
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key) VALUES ($3, 'begin-relay', $4, $2, '');
        END $body$
        $function$, schema);

    -- Ends a relay that has sent all there is, and has the publication have all events from the commit of the caller on. For that
    -- nobody may have one recorded in an open transaction, and nobody records one meanwhile. Returns false, having changed nothing, if the
    -- relay does not come to the end within 300 ms, for which writers wait.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_cut_to_debezium(publication text, slot text, relay text, operator text, reason text) RETURNS boolean
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms' SET enable_seqscan = off SET jit = off AS $body$
        DECLARE
            began   timestamptz;
            pending bigint;
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason), %1$I.outbox_lock_groups('{}', $3);
            IF %1$I.outbox_is_published(publication) THEN
                RAISE EXCEPTION 'publication %% has the events already', quote_ident(publication) USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            IF NOT EXISTS (SELECT FROM pg_replication_slots AS s WHERE s.slot_name = slot AND s.database = current_database() AND s.plugin = 'pgoutput' AND s.wal_status <> 'lost') THEN
                RAISE EXCEPTION 'there is no replication slot %% with pgoutput: what is recorded before the connector makes it would be sent by nobody', coalesce(quote_ident(slot), '(none)')
                    USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            IF NOT EXISTS (SELECT FROM %1$I.outbox_cursor AS c WHERE c.relay = $3) THEN
                RAISE EXCEPTION 'there is no relay %%', $3 USING ERRCODE = 'undefined_object';
            END IF;
            IF EXISTS (SELECT FROM %1$I.event_subscription AS s WHERE s.relay = $3 AND s.state <> 'left')
               OR EXISTS (SELECT FROM %1$I.outbox_lease AS l WHERE l.name = $3 AND l.expires_at = 'infinity') THEN
                RAISE EXCEPTION 'a cut at relay %% is not finished', $3 USING ERRCODE = 'object_in_use';
            END IF;
            IF %1$I.outbox_pending($3, 1000) >= 1000 THEN
                RETURN false;
            END IF;
            LOCK TABLE %1$I.outbox IN SHARE ROW EXCLUSIVE MODE;
            began := clock_timestamp();
            LOOP
                pending := %1$I.outbox_pending($3, 1);
                EXIT WHEN pending = 0;
                IF clock_timestamp() > began + interval '300 ms' THEN
                    RETURN false;
                END IF;
                PERFORM pg_sleep(0.002);
            END LOOP;
            PERFORM set_config('synchronous_commit', 'on', true);
            INSERT INTO %1$I.outbox_lease AS l (name, holder, epoch, expires_at, lasts) VALUES ($3, 'outbox debezium', 1, 'infinity', '0')
                ON CONFLICT (name) DO UPDATE SET holder = 'outbox debezium', epoch = l.epoch + 1, expires_at = 'infinity', lasts = '0';
            -- The lease is lost: from here on the relay can neither move its position nor note failures.
            IF EXISTS (SELECT FROM %1$I.outbox_failed AS f WHERE f.relay = $3 AND f.status IN ('waiting', 'failed', 'parked')) THEN
                RAISE EXCEPTION 'relay %% has events in outbox_failed that it still has to send: wait, or resolve them', $3 USING ERRCODE = 'object_in_use';
            END IF;
            DELETE FROM %1$I.outbox_cursor AS c WHERE c.relay = $3;
            EXECUTE format('ALTER PUBLICATION %%I ADD TABLE %%s', publication, %2$L);
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key) VALUES ($4, 'to-debezium', $5, $3, '');
            RETURN true;
        END $body$
        $function$, schema, format('%I.outbox', schema));

    -- How many committed events a relay has still to attempt, counted up to a number.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_pending(relay text, most bigint) RETURNS bigint
        LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
            SELECT count(*) FROM (
                SELECT FROM (SELECT * FROM %1$I.outbox_cursor AS c WHERE c.relay = $1 ORDER BY c.id DESC LIMIT 1) AS c, %1$I.outbox AS o
                 WHERE o.xid >= pg_snapshot_xmin(c.snapshot) AND NOT pg_visible_in_snapshot(o.xid, c.snapshot)
                   AND NOT (o.id <= c.last_processed_id AND c.window_snapshot IS NOT NULL AND pg_visible_in_snapshot(o.xid, c.window_snapshot))
                 LIMIT $2) AS pending
        $body$
        $function$, schema);

    -- As in 0013_cut.sql: who may retry failed events may move a relay. The other functions are the owner's.
    FOR f IN
        SELECT p.oid::regprocedure AS signature, p.oid, p.proowner, old.proacl AS acl
          FROM (VALUES ('outbox_complete_row', NULL), ('outbox_publish', NULL), ('outbox_is_published', NULL), ('outbox_pending', NULL),
                       ('outbox_cut_from_debezium', 'outbox_retry_failed'), ('outbox_begin_relay', 'outbox_retry_failed'),
                       ('outbox_cut_to_debezium', 'outbox_retry_failed')) AS new (name, alike)
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
    PERFORM set_config('search_path', path, true);
END $migration$;
-- +goose StatementEnd
