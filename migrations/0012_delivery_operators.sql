-- +goose Up

-- As in 0003_bounded_reads.sql.
SELECT pg_catalog.set_config('lock_timeout', '100ms', true) WHERE pg_catalog.current_setting('lock_timeout') OPERATOR(pg_catalog.=) '0';

-- What waits, and what is DEAD and nobody has decided about: it is counted by kind, and listed
-- by id within a kind. A row that is claimed when it is made, and then DONE, is never in it.
CREATE INDEX idx_event_delivery_waiting ON event_delivery (consumer_group, action, stream, status, id)
 WHERE status IN ('PENDING', 'PARKED', 'DEAD') AND resolution IS NULL;

-- What became DEAD in the order of time, for alerts.
CREATE INDEX idx_event_delivery_deaths ON event_delivery (processed_at, id) WHERE status = 'DEAD' AND resolution IS NULL;

ALTER TABLE outbox_audit ADD COLUMN delivery_id bigint;
ALTER TABLE outbox_audit ADD COLUMN handler varchar(100);
CREATE INDEX outbox_audit_delivery_id_idx ON outbox_audit (delivery_id, id) WHERE delivery_id IS NOT NULL;

COMMENT ON TABLE outbox_audit IS 'What operators did about failed events, deliveries and consumer groups, and why.';
COMMENT ON COLUMN outbox_audit.action IS
    'retry, resolve, edit, hold, release or read; pause, resume or rewind of a consumer group.';
COMMENT ON COLUMN outbox_audit.relay IS 'The relay whose event or key it is; empty for deliveries and consumer groups.';
COMMENT ON COLUMN outbox_audit.outbox_id IS 'outbox.id of the event; NULL where it was done to a key or a consumer group.';
COMMENT ON COLUMN outbox_audit.consumer_group IS
    'The consumer group whose delivery it is, or that was paused, resumed or rewound; NULL for all else.';
COMMENT ON COLUMN outbox_audit.delivery_id IS 'event_delivery.id; NULL for all else.';
COMMENT ON COLUMN outbox_audit.handler IS 'event_delivery.action; NULL for all else.';

-- What operators do about deliveries. As in 0010_least_privilege.sql, each function changes rows
-- and says so in outbox_audit, in one transaction, so who may call it needs no right to the tables.
-- +goose StatementBegin
DO $migration$
DECLARE
    schema  constant name := pg_catalog.current_schema();
    path    constant text := pg_catalog.current_setting('search_path');
    f       record;
    granted record;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    -- Locks the keys of rows until the end of the transaction, group after group. What is decided
    -- under the lock has to be read by a later statement. Workers wait for the lock, so a
    -- transaction that somebody leaves open ends.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_lock_deliveries(ids bigint[]) RETURNS void
        LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            keys record;
        BEGIN
            IF current_setting('transaction_isolation') <> 'read committed' THEN
                RAISE EXCEPTION 'deliveries are changed under READ COMMITTED only' USING ERRCODE = 'invalid_transaction_state';
            END IF;
            PERFORM set_config('idle_in_transaction_session_timeout', '10s', true);
            FOR keys IN SELECT d.consumer_group, array_agg(d.order_key) AS list FROM %1$I.event_delivery AS d
                         WHERE d.id = ANY (ids) AND d.order_key IS NOT NULL GROUP BY d.consumer_group ORDER BY d.consumer_group LOOP
                PERFORM %1$I.outbox_lock_keys(keys.consumer_group, keys.list);
            END LOOP;
        END $body$
        $function$, schema);

    -- Promotes the first row of the keys of rows where all are PARKED.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_promote_deliveries(ids bigint[]) RETURNS void
        LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $body$
            SELECT %1$I.outbox_promote(keys.consumer_group, keys.list)
              FROM (SELECT d.consumer_group, array_agg(d.order_key) AS list FROM %1$I.event_delivery AS d
                     WHERE d.id = ANY (ids) AND d.order_key IS NOT NULL GROUP BY d.consumer_group ORDER BY d.consumer_group) AS keys
        $body$
        $function$, schema);

    -- Gives DEAD rows all their attempts again. A row goes before the later ones of its key that
    -- wait, unless one of them is with a worker, or is being claimed, at this moment. Returns how
    -- many rows it changed.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_requeue_deliveries(ids bigint[], operator text, reason text) RETURNS bigint
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
        SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
        DECLARE
            done bigint;
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason), %1$I.outbox_lock_deliveries(ids);
            WITH chosen AS MATERIALIZED (
                SELECT d.id FROM %1$I.event_delivery AS d WHERE d.id = ANY (ids) AND d.status = 'DEAD' ORDER BY d.id FOR UPDATE
            ), changed AS (
                UPDATE %1$I.event_delivery AS d
                   SET status = CASE WHEN d.order_key IS NULL THEN 'PENDING' ELSE 'PARKED' END, held = false, put_back = true, attempt_count = 0,
                       next_retry_at = now(), updated_at = now(), processed_at = NULL,
                       resolution = NULL, resolved_by = NULL, resolved_at = NULL, note = NULL
                 WHERE d.id = ANY (ARRAY(SELECT c.id FROM chosen AS c))
             RETURNING d.id, d.consumer_group, d.action, d.stream, coalesce(d.partition_key, d.aggregate_id) AS key, CASE WHEN d.record IS NULL THEN d.position END AS position, d.event_id
            ), audited AS (
                INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, consumer_group, handler, delivery_id, outbox_id, event_id)
                SELECT $2, 'retry', $3, '', c.stream || '/' || c.key, c.consumer_group, c.action, c.id, c.position, c.event_id
                  FROM changed AS c
             RETURNING 1
            )
            SELECT count(*) INTO done FROM audited;
            -- A later row that waits for its turn gives it up. One that is being claimed is locked, and keeps it.
            WITH keys AS MATERIALIZED (
                SELECT DISTINCT d.consumer_group, d.order_key FROM %1$I.event_delivery AS d WHERE d.id = ANY (ids) AND d.status = 'PARKED'
            ), heads AS MATERIALIZED (
                SELECT head.id FROM keys AS k
                 CROSS JOIN LATERAL (
                       SELECT o.id, o.status FROM %1$I.event_delivery AS o
                        WHERE o.order_key >= k.order_key AND o.order_key <= k.order_key AND (o.status IN ('PENDING', 'PROCESSING') OR o.held) AND o.consumer_group = k.consumer_group
                        ORDER BY o.order_key, o.id LIMIT 1) AS head
                 CROSS JOIN LATERAL (
                       SELECT o.id FROM %1$I.event_delivery AS o
                        WHERE o.order_key >= k.order_key AND o.order_key <= k.order_key AND o.status = 'PARKED' AND o.consumer_group = k.consumer_group
                        ORDER BY o.order_key, o.id LIMIT 1) AS first
                 WHERE head.status = 'PENDING' AND first.id < head.id
            ), unclaimed AS MATERIALIZED (
                SELECT d.id FROM %1$I.event_delivery AS d
                 WHERE d.id = ANY (ARRAY(SELECT h.id FROM heads AS h)) AND d.status = 'PENDING' ORDER BY d.id FOR UPDATE SKIP LOCKED
            )
            UPDATE %1$I.event_delivery AS d SET status = 'PARKED', updated_at = now() WHERE d.id = ANY (ARRAY(SELECT u.id FROM unclaimed AS u));
            PERFORM %1$I.outbox_promote_deliveries(ids);
            RETURN done;
        END $body$
        $function$, schema);

    -- Closes rows that are not to be handled, and lets the next of their keys go on. A row that is
    -- with a worker, or is being claimed, stays. Returns how many rows it changed.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_resolve_deliveries(ids bigint[], operator text, reason text) RETURNS bigint
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
        SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
        DECLARE
            done bigint;
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason), %1$I.outbox_lock_deliveries(ids);
            WITH chosen AS MATERIALIZED (
                SELECT d.id FROM %1$I.event_delivery AS d
                 WHERE d.id = ANY (ids) AND d.status IN ('PENDING', 'PARKED', 'DEAD') AND d.resolution IS NULL
                 ORDER BY d.id FOR UPDATE SKIP LOCKED
            ), changed AS (
                UPDATE %1$I.event_delivery AS d
                   SET status = 'DEAD', held = false, updated_at = now(), processed_at = coalesce(d.processed_at, now()),
                       resolution = 'resolved', resolved_by = $2, resolved_at = now(), note = $3
                 WHERE d.id = ANY (ARRAY(SELECT c.id FROM chosen AS c))
             RETURNING d.id, d.consumer_group, d.action, d.stream, coalesce(d.partition_key, d.aggregate_id) AS key, CASE WHEN d.record IS NULL THEN d.position END AS position, d.event_id
            ), audited AS (
                INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, consumer_group, handler, delivery_id, outbox_id, event_id)
                SELECT $2, 'resolve', $3, '', c.stream || '/' || c.key, c.consumer_group, c.action, c.id, c.position, c.event_id
                  FROM changed AS c
             RETURNING 1
            )
            SELECT count(*) INTO done FROM audited;
            PERFORM %1$I.outbox_promote_deliveries(ids);
            RETURN done;
        END $body$
        $function$, schema);

    -- Has the keys of DEAD rows wait for an operator: what is behind them is not handled. A later row
    -- that waits for its turn gives it up; one that is with a worker, or is being claimed, keeps it.
    -- Returns how many rows hold their keys.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_hold_deliveries(ids bigint[], operator text, reason text) RETURNS bigint
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
        SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
        DECLARE
            done bigint;
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason), %1$I.outbox_lock_deliveries(ids);
            WITH chosen AS MATERIALIZED (
                SELECT d.id FROM %1$I.event_delivery AS d
                 WHERE d.id = ANY (ids) AND d.status = 'DEAD' AND d.resolution IS NULL AND d.order_key IS NOT NULL ORDER BY d.id FOR UPDATE
            ), changed AS ( -- put_back, as later rows may have gone on
                UPDATE %1$I.event_delivery AS d SET held = true, put_back = true
                 WHERE d.id = ANY (ARRAY(SELECT c.id FROM chosen AS c))
             RETURNING d.id, d.consumer_group, d.action, d.stream, coalesce(d.partition_key, d.aggregate_id) AS key, CASE WHEN d.record IS NULL THEN d.position END AS position, d.event_id
            ), audited AS (
                INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, consumer_group, handler, delivery_id, outbox_id, event_id)
                SELECT $2, 'hold', $3, '', c.stream || '/' || c.key, c.consumer_group, c.action, c.id, c.position, c.event_id
                  FROM changed AS c
             RETURNING 1
            )
            SELECT count(*) INTO done FROM audited;
            WITH keys AS MATERIALIZED (
                SELECT DISTINCT d.consumer_group, d.order_key FROM %1$I.event_delivery AS d WHERE d.id = ANY (ids) AND d.held
            ), heads AS MATERIALIZED (
                SELECT o.id FROM keys AS k CROSS JOIN LATERAL (
                       SELECT o.id FROM %1$I.event_delivery AS o
                        WHERE o.order_key >= k.order_key AND o.order_key <= k.order_key AND (o.status IN ('PENDING', 'PROCESSING') OR o.held) AND o.status = 'PENDING' AND o.consumer_group = k.consumer_group
                        ORDER BY o.order_key, o.id) AS o
            ), unclaimed AS MATERIALIZED (
                SELECT d.id FROM %1$I.event_delivery AS d
                 WHERE d.id = ANY (ARRAY(SELECT h.id FROM heads AS h)) AND d.status = 'PENDING' ORDER BY d.id FOR UPDATE SKIP LOCKED
            )
            UPDATE %1$I.event_delivery AS d SET status = 'PARKED', updated_at = now() WHERE d.id = ANY (ARRAY(SELECT u.id FROM unclaimed AS u));
            RETURN done;
        END $body$
        $function$, schema);

    -- Lets the keys of rows go on that DEAD rows hold, which stay DEAD. Returns how many rows it changed.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_release_deliveries(ids bigint[], operator text, reason text) RETURNS bigint
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
        SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
        DECLARE
            done bigint;
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason), %1$I.outbox_lock_deliveries(ids);
            WITH keys AS MATERIALIZED (
                SELECT DISTINCT d.consumer_group, d.order_key FROM %1$I.event_delivery AS d WHERE d.id = ANY (ids) AND d.order_key IS NOT NULL
            ), found AS MATERIALIZED (
                SELECT o.id FROM keys AS k CROSS JOIN LATERAL (
                       SELECT o.id FROM %1$I.event_delivery AS o
                        WHERE o.order_key >= k.order_key AND o.order_key <= k.order_key AND (o.status IN ('PENDING', 'PROCESSING') OR o.held) AND o.held AND o.consumer_group = k.consumer_group
                        ORDER BY o.order_key, o.id) AS o
            ), chosen AS MATERIALIZED (
                SELECT d.id FROM %1$I.event_delivery AS d WHERE d.id = ANY (ARRAY(SELECT f.id FROM found AS f)) AND d.held ORDER BY d.id FOR UPDATE
            ), changed AS (
                UPDATE %1$I.event_delivery AS d SET held = false
                 WHERE d.id = ANY (ARRAY(SELECT c.id FROM chosen AS c))
             RETURNING d.id, d.consumer_group, d.action, d.stream, coalesce(d.partition_key, d.aggregate_id) AS key, CASE WHEN d.record IS NULL THEN d.position END AS position, d.event_id
            ), audited AS (
                INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, consumer_group, handler, delivery_id, outbox_id, event_id)
                SELECT $2, 'release', $3, '', c.stream || '/' || c.key, c.consumer_group, c.action, c.id, c.position, c.event_id
                  FROM changed AS c
             RETURNING 1
            )
            SELECT count(*) INTO done FROM audited;
            PERFORM %1$I.outbox_promote_deliveries(ids);
            RETURN done;
        END $body$
        $function$, schema);

    -- Keeps who reads the payload of a delivery. Returns false if there is no such row.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_audit_read_delivery(delivery_id bigint, operator text, reason text) RETURNS boolean
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason);
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, consumer_group, handler, delivery_id, outbox_id, event_id)
            SELECT $2, 'read', $3, '', d.stream || '/' || coalesce(d.partition_key, d.aggregate_id), d.consumer_group, d.action, d.id, CASE WHEN d.record IS NULL THEN d.position END, d.event_id
              FROM %1$I.event_delivery AS d WHERE d.id = $1;
            RETURN FOUND;
        END $body$
        $function$, schema);

    -- Nobody may call a function whom nobody allows it. Who may retry failed events may requeue
    -- deliveries, and who may read the ones may read the others.
    FOR f IN
        SELECT p.oid::regprocedure AS signature, p.proowner, old.proacl AS acl
          FROM (VALUES ('outbox_lock_deliveries', NULL), ('outbox_promote_deliveries', NULL), ('outbox_requeue_deliveries', 'outbox_retry_failed'),
                       ('outbox_resolve_deliveries', 'outbox_resolve_failed'), ('outbox_hold_deliveries', 'outbox_hold_key'),
                       ('outbox_release_deliveries', 'outbox_release_key'), ('outbox_audit_read_delivery', 'outbox_audit_read')) AS new (name, alike)
          JOIN pg_proc AS p ON p.proname = new.name AND p.pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = schema)
          LEFT JOIN pg_proc AS old ON old.proname = new.alike AND old.pronamespace = p.pronamespace
    LOOP
        FOR granted IN -- by ALTER DEFAULT PRIVILEGES
            SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee
              FROM pg_proc AS p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
             WHERE p.oid = f.signature::oid AND a.grantee <> p.proowner
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
    -- Nobody has a right to the tables by default. Who may read what failed may read them, and who
    -- removes what was published removes what is done.
    EXECUTE format('SELECT %1$I.outbox_revoke_grants(''event_delivery''), %1$I.outbox_revoke_grants(''event_subscription'')', schema);
    FOR granted IN
        SELECT a.privilege_type AS privilege, CASE a.privilege_type WHEN 'SELECT' THEN format('%1$I.event_delivery, %1$I.event_subscription', schema)
                                              ELSE format('%I.event_delivery', schema) END AS tables,
               CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee,
               CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS option
          FROM pg_class AS c, aclexplode(c.relacl) AS a
         WHERE (c.oid, a.privilege_type) IN ((format('%I.outbox_failed', schema)::regclass, 'SELECT'), (format('%I.outbox', schema)::regclass, 'DELETE'))
           AND a.grantee <> c.relowner
    LOOP
        EXECUTE format('GRANT %s ON %s TO %s%s', granted.privilege, granted.tables, granted.grantee, granted.option);
    END LOOP;
    -- Who notes what is handled parks what is not.
    FOR granted IN
        SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee
          FROM pg_class AS c
         CROSS JOIN LATERAL (SELECT c.relacl UNION ALL SELECT attacl FROM pg_attribute WHERE attrelid = c.oid) AS g (acl)
         CROSS JOIN LATERAL aclexplode(g.acl) AS a
         WHERE c.oid = format('%I.event_handled', schema)::regclass AND a.privilege_type = 'INSERT' AND a.grantee <> c.relowner
    LOOP
        EXECUTE format($sql$
            GRANT SELECT, DELETE ON %1$I.event_delivery TO %2$s;
            GRANT INSERT (consumer_group, action, stream, position, order_key, status, attempt_count, max_attempts, size, next_retry_at,
                          last_attempt_at, created_at, updated_at, last_error_code, last_error_message, event_id, event_type, source, aggregate_type,
                          aggregate_id, payload_bytes, content_type, partition_key, occurred_at, recorded_at, record_partition, record_id, record_digest, record)
                  ON %1$I.event_delivery TO %2$s;
            GRANT UPDATE (status, held, put_back, attempt_count, max_attempts, next_retry_at, last_attempt_at, locked_by, locked_until, updated_at,
                          processed_at, last_error_code, last_error_message) ON %1$I.event_delivery TO %2$s;
            GRANT EXECUTE ON FUNCTION %1$I.outbox_lock_keys(text, bigint[]), %1$I.outbox_lock_keys_shared(text, bigint[]),
                  %1$I.outbox_promote(text, bigint[], bigint[]), %1$I.outbox_finish_deliveries(text, text, bigint[], bigint[], bigint[]) TO %2$s;
            GRANT USAGE ON SEQUENCE %1$I.event_delivery_id_seq TO %2$s
            $sql$, schema, granted.grantee);
    END LOOP;
    PERFORM set_config('search_path', path, true);
END $migration$;
-- +goose StatementEnd
