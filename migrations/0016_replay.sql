-- +goose Up

-- As in 0003_bounded_reads.sql.
SELECT pg_catalog.set_config('lock_timeout', '100ms', true) WHERE pg_catalog.current_setting('lock_timeout') OPERATOR(pg_catalog.=) '0';

COMMENT ON COLUMN outbox_audit.action IS
    'retry, resolve, edit, hold, release or read; pause, resume or rewind of a consumer group; to-kafka, to-postgres, finish-cut or cancel-cut of groups that are moved; from-debezium, begin-relay or to-debezium of a relay; replay of events to Kafka, and forget of what a group has handled of them.';
COMMENT ON COLUMN outbox_audit.consumer_group IS
    'The consumer group whose delivery it is, or that was paused, resumed, rewound or moved, or for which alone events were replayed; NULL for all else.';

-- +goose StatementBegin
DO $migration$
DECLARE
    schema  constant name := pg_catalog.current_schema();
    path    constant text := pg_catalog.current_setting('search_path');
    f       record;
    granted record;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    -- Keeps who sends events to Kafka again: to a topic, which is empty for their own, and for one
    -- consumer group alone, which is empty for all.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_audit_replay(topic text, consumer_group text, operator text, reason text) RETURNS void
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason);
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
            VALUES ($3, 'replay', $4, '', coalesce($1, '') || '/', nullif($2, ''));
        END $body$
        $function$, schema);

    -- Has a consumer group handle events again: removes what it has noted of them, under their own key, or
    -- under the one that has the source in it. Returns how many notes it removed.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_forget_handled(consumer_group text, types text[], ids text[], sources text[], besides text[], operator text, reason text) RETURNS bigint
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
        SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
        DECLARE
            done bigint;
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason);
            IF coalesce($1, '') = '' THEN
                RAISE EXCEPTION 'consumer_group has to be there' USING ERRCODE = 'invalid_parameter_value';
            END IF;
            WITH keys AS MATERIALIZED (
                SELECT k.type, k.id, k.source FROM unnest($2, $3, $4) AS k (type, id, source)
                 UNION ALL
                SELECT k.type, k.beside, NULL FROM unnest($2, $5) AS k (type, beside)
            ), found AS MATERIALIZED (
                SELECT h.id FROM keys AS k
                 CROSS JOIN LATERAL (SELECT n.id, n.event_source FROM %1$I.event_handled AS n
                                      WHERE n.consumer_group = $1 AND n.aggregate_type = k.type AND n.aggregate_id = k.id) AS h
                 WHERE k.source IS NULL OR h.event_source IS NULL OR h.event_source = k.source
            ), gone AS (
                DELETE FROM %1$I.event_handled AS n WHERE n.id = ANY (ARRAY(SELECT found.id FROM found)) RETURNING 1
            )
            SELECT count(*) INTO done FROM gone;
            IF done > 0 THEN
                INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, consumer_group) VALUES ($6, 'forget', $7, '', '/', $1);
            END IF;
            RETURN done;
        END $body$
        $function$, schema);

    -- As in 0012_delivery_operators.sql: who may rewind a group may have it handle events again.
    FOR f IN
        SELECT p.oid::regprocedure AS signature, p.oid, p.proowner, old.proacl AS acl
          FROM (VALUES ('outbox_audit_replay'), ('outbox_forget_handled')) AS new (name)
          JOIN pg_proc AS p ON p.proname = new.name AND p.pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = schema)
          LEFT JOIN pg_proc AS old ON old.proname = 'outbox_rewind_consumer' AND old.pronamespace = p.pronamespace
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
