-- +goose Up

-- As in 0003_bounded_reads.sql.
SELECT pg_catalog.set_config('lock_timeout', '100ms', true) WHERE pg_catalog.current_setting('lock_timeout') OPERATOR(pg_catalog.=) '0';

-- Whoever may create in the schema can make a function or an operator that fits the arguments
-- of a statement better than PostgreSQL's own. A session that looks for names in the schema
-- runs it with its own rights, and so did the functions with the owner's rights. From here on:
--
--   - Only the owner of the schema, and whom he names, may create in it.
--   - No table depends on a function that is not PostgreSQL's own.
--   - Functions look for names in pg_catalog and name all else with the schema. So do the blocks
--     of this file, which are run by the owner.
-- +goose StatementBegin
DO $migration$
DECLARE
    schema constant name := pg_catalog.current_schema();
    path   constant text := pg_catalog.current_setting('search_path');
    bound  text;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    IF EXISTS (SELECT FROM pg_namespace AS n, aclexplode(n.nspacl) AS a
                WHERE n.nspname = schema AND a.grantee = 0 AND a.privilege_type = 'CREATE') THEN
        IF (SELECT pg_has_role(nspowner, 'USAGE') FROM pg_namespace WHERE nspname = schema) THEN
            EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM PUBLIC', schema);
            RAISE NOTICE 'CREATE on schema % is revoked from PUBLIC: whoever may create there can act with the rights of those who use outbox', schema;
        ELSE
            RAISE WARNING 'everybody may create in schema %, and can act with the rights of those who use outbox; its owner should REVOKE CREATE ON SCHEMA % FROM PUBLIC',
                schema, quote_ident(schema);
        END IF;
    END IF;

    SELECT string_agg(DISTINCT format('%s depends on %s', pg_describe_object(d.classid, d.objid, 0), pg_describe_object(d.refclassid, d.refobjid, 0)), '; ')
      INTO bound
      FROM pg_class AS c
      JOIN LATERAL (SELECT 'pg_attrdef'::regclass::oid AS class, oid AS object FROM pg_attrdef WHERE adrelid = c.oid
                     UNION ALL
                    SELECT 'pg_constraint'::regclass::oid, oid FROM pg_constraint WHERE conrelid = c.oid
                     UNION ALL
                    SELECT 'pg_class'::regclass::oid, indexrelid FROM pg_index WHERE indrelid = c.oid) AS part ON true
      JOIN pg_depend AS d ON d.classid = part.class AND d.objid = part.object
      LEFT JOIN pg_proc AS p ON d.refclassid = 'pg_proc'::regclass AND p.oid = d.refobjid
      LEFT JOIN pg_operator AS o ON d.refclassid = 'pg_operator'::regclass AND o.oid = d.refobjid
     WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = schema)
       AND c.relname IN ('outbox', 'outbox_cursor', 'outbox_lease', 'outbox_failed', 'outbox_audit', 'outbox_partitioning',
                         'event_handled', 'consumer_start', 'consumer_pause')
       AND coalesce(p.proname, o.oprname) IN ('num_nonnulls', '=', '<>', '<', '>', '<=', '>=', 'nextval', 'now', 'pg_current_xact_id')
       AND coalesce(p.pronamespace, o.oprnamespace) <> 'pg_catalog'::regnamespace;
    IF bound IS NOT NULL THEN
        RAISE EXCEPTION 'somebody has put code in the place of PostgreSQL''s own before outbox was migrated: %', bound
            USING ERRCODE = 'invalid_object_definition';
    END IF;
    PERFORM set_config('search_path', path, true);
END $migration$;
-- +goose StatementEnd

-- outbox_audit.login: nobody but the owner may set it, the time and the id.
--
-- consumer_group_role: who may write what a group has handled and where it reads. The policies
-- find the groups of a role once in a statement. The owner of the tables needs no row, and
-- neither does who may write all data: what is restored into new tables finds them empty.
-- +goose StatementBegin
DO $migration$
DECLARE
    schema  constant name := pg_catalog.current_schema();
    path    constant text := pg_catalog.current_setting('search_path');
    target  text;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    EXECUTE format('ALTER TABLE %I.outbox_audit ADD COLUMN login name', schema);
    EXECUTE format('ALTER TABLE %I.outbox_audit ALTER COLUMN login SET DEFAULT session_user', schema);
    EXECUTE format($sql$
        COMMENT ON COLUMN %1$I.outbox_audit.login IS
            'The role that was logged in to PostgreSQL, which nobody else can write; NULL in older rows.';
        COMMENT ON COLUMN %1$I.outbox_audit.operator IS
            'Who did it, in the words of the application that was logged in; of a relay "relay" and its name.';
        COMMENT ON COLUMN %1$I.outbox_audit.action IS
            'retry, resolve, edit, hold, release or read; pause, resume or rewind of a consumer group.';
        COMMENT ON COLUMN %1$I.outbox_audit.consumer_group IS
            'The consumer group that was paused, resumed or rewound; NULL for all else.'
        $sql$, schema);

    EXECUTE format($sql$
        CREATE TABLE %1$I.consumer_group_role (
            consumer_group varchar(255) NOT NULL,
            role           name         NOT NULL,
            CONSTRAINT consumer_group_role_pkey PRIMARY KEY (consumer_group, role)
        );
        COMMENT ON TABLE %1$I.consumer_group_role IS
            'Which roles may write for which consumer groups in event_handled and consumer_start, beside the owner of the tables and members of pg_write_all_data.';
        COMMENT ON COLUMN %1$I.consumer_group_role.consumer_group IS 'As in event_handled; * stands for all groups.';
        COMMENT ON COLUMN %1$I.consumer_group_role.role IS 'A role, and with it its members; public stands for all.'
        $sql$, schema);

    FOREACH target IN ARRAY ARRAY['event_handled', 'consumer_start'] LOOP
        -- Who may write there now may go on doing so, for all groups.
        EXECUTE format($sql$
            INSERT INTO %1$I.consumer_group_role (consumer_group, role)
            SELECT DISTINCT '*', CASE a.grantee WHEN 0 THEN 'public' ELSE pg_get_userbyid(a.grantee) END
              FROM pg_class AS c
             CROSS JOIN LATERAL (SELECT c.relacl UNION ALL SELECT attacl FROM pg_attribute WHERE attrelid = c.oid) AS g (acl)
             CROSS JOIN LATERAL aclexplode(g.acl) AS a
             WHERE c.oid = %2$L::regclass AND a.privilege_type IN ('INSERT', 'UPDATE', 'DELETE') AND a.grantee <> c.relowner
                ON CONFLICT DO NOTHING
            $sql$, schema, format('%I.%I', schema, target));
        EXECUTE format($sql$
            CREATE POLICY %2$I ON %1$I.%3$I FOR SELECT USING (true);
            CREATE POLICY %4$I ON %1$I.%3$I USING (
                ARRAY(SELECT r.consumer_group FROM %1$I.consumer_group_role AS r
                       WHERE r.role = 'public' OR pg_has_role(to_regrole(quote_ident(r.role)), 'USAGE')
                      UNION ALL
                      SELECT '*' WHERE pg_has_role('pg_write_all_data', 'USAGE'))
                && ARRAY[consumer_group, '*'::varchar]);
            ALTER TABLE %1$I.%3$I ENABLE ROW LEVEL SECURITY
            $sql$, schema, target || '_read', target, target || '_write');
    END LOOP;
    PERFORM set_config('search_path', path, true);
END $migration$;
-- +goose StatementEnd

-- Functions of partitions, as in 0004_loud_states.sql, and with pg_catalog in search_path. The
-- rights to a partition are those to outbox: a partition has none of its own, neither those
-- that the plain table had nor those of ALTER DEFAULT PRIVILEGES.
-- +goose StatementBegin
DO $migration$
DECLARE
    schema constant name := pg_catalog.current_schema();
    path   constant text := pg_catalog.current_setting('search_path');
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    EXECUTE format($function$
        CREATE OR REPLACE FUNCTION %1$I.outbox_partitions()
        RETURNS TABLE (name name, first bigint, behind bigint, closed boolean, large boolean)
        LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
            SELECT b.name, b.first, b.behind, b.behind <= s.last_value, b.behind - greatest(b.first, 0) > 10 * p.rows
              FROM (SELECT c.relname AS name,
                           coalesce(substring(e.bound FROM 'FROM \(''?(-?\d+)')::bigint, -9223372036854775808) AS first,
                           coalesce(substring(e.bound FROM 'TO \(''?(-?\d+)')::bigint, 9223372036854775807) AS behind
                      FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
                     CROSS JOIN LATERAL pg_get_expr(c.relpartbound, c.oid) AS e (bound)
                     WHERE i.inhparent = %2$L::regclass AND e.bound <> 'DEFAULT') AS b,
                   %1$I.outbox_id_seq AS s, %1$I.outbox_partitioning AS p
             ORDER BY b.first
        $body$
        $function$, schema, format('%I.outbox', schema));

    EXECUTE format($function$
        CREATE OR REPLACE FUNCTION %1$I.outbox_relays() RETURNS text[]
        LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
            WITH RECURSIVE names AS (
               (SELECT relay FROM %1$I.outbox_cursor ORDER BY relay LIMIT 1)
                 UNION ALL
                SELECT (SELECT c.relay FROM %1$I.outbox_cursor AS c WHERE c.relay > names.relay ORDER BY c.relay LIMIT 1)
                  FROM names WHERE names.relay IS NOT NULL
            )
            SELECT coalesce(array_agg(relay::text ORDER BY relay), '{}') FROM names WHERE relay IS NOT NULL
        $body$
        $function$, schema);

    EXECUTE format($function$
        CREATE OR REPLACE FUNCTION %1$I.outbox_prepare_partitions(rows bigint) RETURNS void
        LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $body$
        DECLARE
            highest bigint;
            cut     bigint;
        BEGIN
            FOR look IN 1 .. 2 LOOP -- again under the lock: others may be at it
                IF (SELECT relkind = 'p' FROM pg_class WHERE oid = %2$L::regclass)
                   OR EXISTS (SELECT FROM pg_constraint WHERE conrelid = %2$L::regclass AND conname = 'outbox_before_partitions') THEN
                    RETURN;
                END IF;
                LOCK TABLE %1$I.outbox IN ACCESS EXCLUSIVE MODE;
            END LOOP;
            SELECT greatest(s.last_value, coalesce((SELECT max(id) FROM %1$I.outbox), 0)) INTO highest FROM %1$I.outbox_id_seq AS s;
            -- Until outbox_partition() is called, ids from cut on are refused: keep it far.
            cut := CASE WHEN highest <= 1 THEN rows ELSE (highest / rows + 11) * rows END;
            EXECUTE format('ALTER TABLE %%I.outbox ADD CONSTRAINT outbox_before_partitions CHECK (id < %%s) NOT VALID', %3$L, cut);
            INSERT INTO %1$I.outbox_partitioning AS p (rows, cut) VALUES ($1, cut)
                ON CONFLICT (only_row) DO UPDATE SET rows = excluded.rows, cut = excluded.cut;
        END $body$
        $function$, schema, format('%I.outbox', schema), schema);

    -- Leaves nobody but the owner a right to a table by its name.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_revoke_grants(relation name) RETURNS void
        LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            target constant text := format('%%I.%%I', %2$L, relation);
            granted record;
        BEGIN
            FOR granted IN
                SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee
                  FROM pg_class AS c
                 CROSS JOIN LATERAL (SELECT c.relacl UNION ALL SELECT attacl FROM pg_attribute WHERE attrelid = c.oid) AS g (acl)
                 CROSS JOIN LATERAL aclexplode(g.acl) AS a
                 WHERE c.oid = target::regclass AND a.grantee <> c.relowner
            LOOP
                EXECUTE format('REVOKE ALL ON TABLE %%s FROM %%s CASCADE', target, granted.grantee);
            END LOOP;
        END $body$
        $function$, schema, schema);

    -- The constraint is explained in 0004_loud_states.sql.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_guard_partition(partition name) RETURNS void
        LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            EXECUTE format('ALTER TABLE %%I.%%I ADD CONSTRAINT outbox_xid_is_of_this_transaction CHECK (xid = pg_current_xact_id() '
                           'OR current_setting(''outbox.keep_xid'', true) IS NOT DISTINCT FROM ''on'') NOT VALID', %2$L, partition);
            PERFORM %1$I.outbox_revoke_grants(partition);
        END $body$
        $function$, schema, schema);

    EXECUTE format($function$
        CREATE OR REPLACE FUNCTION %1$I.outbox_partition() RETURNS void
        LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $body$
        DECLARE
            schema  constant name := %3$L;
            plan    %1$I.outbox_partitioning;
            old     name;
            above   name;
            owner   name;
            granted record;
        BEGIN
            FOR look IN 1 .. 2 LOOP -- again under the lock: others may be at it
                IF (SELECT relkind = 'p' FROM pg_class WHERE oid = %2$L::regclass) THEN
                    RETURN;
                END IF;
                IF NOT EXISTS (SELECT FROM pg_constraint WHERE conrelid = %2$L::regclass AND conname = 'outbox_before_partitions' AND convalidated) THEN
                    RAISE EXCEPTION 'call outbox_prepare_partitions(rows), and ALTER TABLE outbox VALIDATE CONSTRAINT outbox_before_partitions, first'
                        USING ERRCODE = 'object_not_in_prerequisite_state';
                END IF;
                LOCK TABLE %1$I.outbox IN ACCESS EXCLUSIVE MODE;
            END LOOP;
            IF (SELECT relrowsecurity FROM pg_class WHERE oid = %2$L::regclass)
               OR EXISTS (SELECT FROM pg_trigger WHERE tgrelid = %2$L::regclass)
               OR EXISTS (SELECT FROM pg_publication_rel WHERE prrelid = %2$L::regclass) THEN
                RAISE EXCEPTION 'outbox has triggers, row level security or a publication of its own, which would not go with its name'
                    USING ERRCODE = 'feature_not_supported';
            END IF;
            SELECT * INTO STRICT plan FROM %1$I.outbox_partitioning;
            SELECT pg_get_userbyid(relowner) INTO owner FROM pg_class WHERE oid = %2$L::regclass;
            old := format('outbox_min_%%s', plan.cut);
            above := format('outbox_%%s_max', plan.cut);
            EXECUTE format('ALTER TABLE %%I.outbox RENAME TO %%I', schema, old);
            EXECUTE format('ALTER INDEX %%I.outbox_pkey RENAME TO %%I', schema, old || '_pkey');
            EXECUTE format('ALTER INDEX %%I.outbox_xid_id_idx RENAME TO %%I', schema, old || '_xid_id_idx');
            EXECUTE format('CREATE TABLE %%1$I.outbox (LIKE %%1$I.%%2$I INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING COMMENTS INCLUDING STORAGE) '
                           'PARTITION BY RANGE (id)', schema, old);
            EXECUTE format('ALTER TABLE %%I.outbox OWNER TO %%I', schema, owner);
            PERFORM %1$I.outbox_revoke_grants('outbox');
            EXECUTE format('COMMENT ON TABLE %%I.outbox IS %%L', schema, obj_description(format('%%I.%%I', schema, old)::regclass, 'pg_class'));
            ALTER TABLE %1$I.outbox DROP CONSTRAINT outbox_before_partitions, DROP CONSTRAINT IF EXISTS outbox_xid_is_of_this_transaction;
            ALTER TABLE %1$I.outbox ADD CONSTRAINT outbox_pkey PRIMARY KEY (id);
            CREATE INDEX outbox_xid_id_idx ON %1$I.outbox (xid, id);
            ALTER SEQUENCE %1$I.outbox_id_seq OWNED BY %1$I.outbox.id;
            FOR granted IN
                SELECT a.privilege_type || coalesce(' (' || quote_ident(g.attname) || ')', '') AS privilege,
                       CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee,
                       CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS option
                  FROM (SELECT relacl AS acl, NULL::name AS attname FROM pg_class WHERE oid = format('%%I.%%I', schema, old)::regclass
                         UNION ALL
                        SELECT attacl, attname FROM pg_attribute
                         WHERE attrelid = format('%%I.%%I', schema, old)::regclass AND attnum > 0 AND NOT attisdropped) AS g,
                       aclexplode(g.acl) AS a
                 WHERE a.grantee <> (SELECT relowner FROM pg_class WHERE oid = %2$L::regclass)
            LOOP
                EXECUTE format('GRANT %%s ON %%I.outbox TO %%s%%s', granted.privilege, schema, granted.grantee, granted.option);
            END LOOP;
            EXECUTE format('ALTER TABLE %%1$I.outbox ATTACH PARTITION %%1$I.%%2$I FOR VALUES FROM (MINVALUE) TO (%%3$s)', schema, old, plan.cut);
            EXECUTE format('ALTER TABLE %%I.%%I DROP CONSTRAINT outbox_before_partitions', schema, old);
            EXECUTE format('CREATE TABLE %%1$I.%%2$I PARTITION OF %%1$I.outbox FOR VALUES FROM (%%3$s) TO (MAXVALUE)', schema, above, plan.cut);
            CREATE TABLE %1$I.outbox_default PARTITION OF %1$I.outbox DEFAULT;
            PERFORM %1$I.outbox_revoke_grants(old), %1$I.outbox_guard_partition(above), %1$I.outbox_guard_partition('outbox_default');
        END $body$
        $function$, schema, format('%I.outbox', schema), schema);

    EXECUTE format($function$
        CREATE OR REPLACE FUNCTION %1$I.outbox_make_partitions() RETURNS int
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $body$
        DECLARE
            schema constant name := %2$L;
            n      bigint;
            drawn  bigint;
            whole  record;
            size   bigint;
            start  bigint;
            names  name[] := '{}';
            bounds text[] := '{}';
            filled boolean;
        BEGIN
            IF current_setting('transaction_isolation') <> 'read committed' THEN
                RAISE EXCEPTION 'partitions are made under READ COMMITTED only' USING ERRCODE = 'invalid_transaction_state';
            END IF;
            SELECT p.rows INTO n FROM %1$I.outbox_partitioning AS p FOR UPDATE; -- one at a time
            SELECT last_value INTO drawn FROM %1$I.outbox_id_seq;
            IF (SELECT count(*) FROM %1$I.outbox_partitions() AS p WHERE p.first > drawn AND p.behind - greatest(p.first, 0) <= n) >= 6 THEN
                RETURN 0;
            END IF;
            SELECT * INTO whole FROM %1$I.outbox_partitions() AS p
             WHERE p.first > drawn AND p.behind - greatest(p.first, 0) > n ORDER BY p.first LIMIT 1;
            IF NOT FOUND THEN
                RETURN 0;
            END IF;
            start := whole.first;
            FOREACH size IN ARRAY ARRAY[n, n, n, n, n, n, n, n, 10 * n, 1000 * n, 1000000 * n, 9223372036854775807] LOOP
                EXIT WHEN start >= whole.behind;
                size := least(size, whole.behind - start);
                names := names || format('outbox_%%s_%%s', start, CASE start + size WHEN 9223372036854775807 THEN 'max' ELSE (start + size)::text END)::name;
                bounds := bounds || format('FROM (%%s) TO (%%s)', start, CASE start + size WHEN 9223372036854775807 THEN 'MAXVALUE' ELSE (start + size)::text END);
                start := start + size;
                EXECUTE format('CREATE TABLE %%1$I.%%2$I (LIKE %%1$I.outbox INCLUDING CONSTRAINTS INCLUDING STORAGE INCLUDING INDEXES)',
                               schema, names[array_length(names, 1)]);
                PERFORM %1$I.outbox_guard_partition(names[array_length(names, 1)]);
            END LOOP;

            LOCK TABLE ONLY %1$I.outbox IN ACCESS EXCLUSIVE MODE;
            SELECT last_value INTO drawn FROM %1$I.outbox_id_seq;
            EXECUTE format('SELECT EXISTS (SELECT FROM %%I.%%I)', schema, whole.name) INTO filled;
            IF filled OR drawn >= whole.first THEN
                RAISE EXCEPTION 'ids have come to partition %% meanwhile', whole.name USING ERRCODE = 'lock_not_available';
            END IF;
            EXECUTE format('DROP TABLE %%I.%%I', schema, whole.name);
            FOR i IN 1 .. array_length(names, 1) LOOP
                EXECUTE format('ALTER TABLE %%1$I.outbox ATTACH PARTITION %%1$I.%%2$I FOR VALUES %%3$s', schema, names[i], bounds[i]);
            END LOOP;
            RETURN array_length(names, 1);
        END $body$
        $function$, schema, schema);

    EXECUTE format($function$
        CREATE OR REPLACE FUNCTION %1$I.outbox_drop_partition(partition name, whole boolean, seen pg_snapshot, server timestamptz, relays text[],
                                                              relay text, holder text, epoch bigint) RETURNS text
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
        SET lock_timeout = '50ms' SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
        DECLARE
            table_name constant text := format('%%I.%%I', %2$L, partition);
            added      boolean;
            filled     boolean;
        BEGIN
            IF current_setting('transaction_isolation') <> 'read committed' THEN
                RAISE EXCEPTION 'a partition is dropped under READ COMMITTED only' USING ERRCODE = 'invalid_transaction_state';
            END IF;
            PERFORM FROM %1$I.outbox_lease AS l WHERE l.name = $6 AND l.holder = $7 AND l.epoch = $8 FOR SHARE;
            IF NOT FOUND THEN
                RETURN 'lease';
            END IF;
            IF NOT EXISTS (SELECT FROM %1$I.outbox_partitions() AS p WHERE p.name = partition AND p.closed) THEN
                RETURN 'gone';
            END IF;
            EXECUTE format('LOCK TABLE %%s IN ACCESS EXCLUSIVE MODE', table_name);
            IF pg_postmaster_start_time() <> server THEN
                RETURN 'server';
            END IF;
            EXECUTE format('SELECT coalesce((SELECT xid FROM %%1$s ORDER BY xid DESC, id DESC LIMIT 1) >= pg_snapshot_xmax($1), false)
                                OR EXISTS (SELECT FROM pg_snapshot_xip($1) AS x
                                            CROSS JOIN LATERAL (SELECT FROM %%1$s WHERE xid >= x AND xid <= x ORDER BY xid, id LIMIT 1) AS late),
                                   EXISTS (SELECT FROM %%1$s ORDER BY id LIMIT 1)', table_name)
               INTO added, filled USING seen;
            IF added THEN
                RETURN 'rows';
            END IF;
            IF relays IS DISTINCT FROM %1$I.outbox_relays() THEN
                RETURN 'relays';
            END IF;
            IF filled THEN
                EXECUTE format('TRUNCATE %%s', table_name);
            END IF;
            IF NOT whole THEN
                RETURN 'emptied';
            END IF;
            BEGIN
                LOCK TABLE ONLY %1$I.outbox IN ACCESS EXCLUSIVE MODE;
            EXCEPTION WHEN lock_not_available THEN
                RETURN 'emptied';
            END;
            EXECUTE format('DROP TABLE %%s', table_name);
            RETURN 'dropped';
        EXCEPTION WHEN lock_not_available THEN
            RETURN 'busy';
        END $body$
        $function$, schema, schema);

    EXECUTE format('DROP FUNCTION %I.outbox_guard_xid(name)', schema);
    EXECUTE format('SELECT %I.outbox_revoke_grants(c.relname) FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid '
                   'WHERE i.inhparent = %L::regclass', schema, format('%I.outbox', schema));
    -- ALTER DEFAULT PRIVILEGES gives nobody the right to write down his own groups.
    EXECUTE format('SELECT %I.outbox_revoke_grants(''consumer_group_role'')', schema);
    PERFORM set_config('search_path', path, true);
END $migration$;
-- +goose StatementEnd

-- What operators do. Each function changes rows and says so in outbox_audit, in one
-- transaction, so who may call it needs no right to the tables. Rows are locked in the order
-- of their ids, as the relay locks them.
-- +goose StatementBegin
DO $migration$
DECLARE
    schema constant name := pg_catalog.current_schema();
    path   constant text := pg_catalog.current_setting('search_path');
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_check_audit(operator text, reason text) RETURNS void
        LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            IF coalesce(btrim(operator), '') = '' OR char_length(operator) > 100 THEN
                RAISE EXCEPTION 'operator has to be there, in at most 100 characters' USING ERRCODE = 'invalid_parameter_value';
            END IF;
            IF coalesce(btrim(reason), '') = '' OR char_length(reason) > 10000 THEN
                RAISE EXCEPTION 'reason has to be there, in at most 10000 characters' USING ERRCODE = 'invalid_parameter_value';
            END IF;
        END $body$
        $function$, schema);

    -- Makes heads due, and parks what is dead. The relay finds its place among the events of its
    -- key, because it may be sending one of them. Returns how many events it changed.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_retry_failed(ids bigint[], operator text, reason text) RETURNS bigint
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            done bigint;
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason);
            WITH chosen AS MATERIALIZED (
                SELECT f.id FROM %1$I.outbox_failed AS f
                 WHERE f.id = ANY (ids) AND (f.status IN ('waiting', 'failed') AND NOT f.held OR f.status = 'dead')
                   AND num_nonnulls(f.payload, f.payload_bytes) > 0
                 ORDER BY f.id FOR UPDATE
            ), changed AS (
                UPDATE %1$I.outbox_failed AS f
                   SET status = CASE f.status WHEN 'dead' THEN 'parked' ELSE f.status END,
                       retry_count = CASE f.status WHEN 'dead' THEN 0 ELSE f.retry_count END, held = false, next_retry_at = now()
                 WHERE f.id = ANY (ARRAY(SELECT c.id FROM chosen AS c))
             RETURNING f.relay, f.parking_key, f.id, f.outbox_id, f.event_id
            ), audited AS (
                INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id)
                SELECT $2, 'retry', $3, c.relay, c.parking_key, c.id, c.outbox_id, c.event_id FROM changed AS c
             RETURNING 1
            )
            SELECT count(*) INTO done FROM audited;
            RETURN done;
        END $body$
        $function$, schema);

    -- Closes events that are not to be sent. Returns how many events it changed.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_resolve_failed(ids bigint[], operator text, reason text) RETURNS bigint
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            done bigint;
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason);
            WITH chosen AS MATERIALIZED (
                SELECT f.id FROM %1$I.outbox_failed AS f WHERE f.id = ANY (ids) AND f.status <> 'resolved' ORDER BY f.id FOR UPDATE
            ), changed AS (
                UPDATE %1$I.outbox_failed AS f
                   SET status = 'resolved', held = false, resolved_at = now(), resolved_by = $2, resolution = $3
                 WHERE f.id = ANY (ARRAY(SELECT c.id FROM chosen AS c))
             RETURNING f.relay, f.parking_key, f.id, f.outbox_id, f.event_id
            ), audited AS (
                INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id)
                SELECT $2, 'resolve', $3, c.relay, c.parking_key, c.id, c.outbox_id, c.event_id FROM changed AS c
             RETURNING 1
            )
            SELECT count(*) INTO done FROM audited;
            RETURN done;
        END $body$
        $function$, schema);

    -- Gives a dead event another payload of its content type, and retries it. All else stays,
    -- but for headers that cannot be printed, which no relay could send. Those of an event that
    -- no relay could read are still in outbox. Returns false if the event is not dead.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_edit_failed(failed_id bigint, payload bytea, operator text, reason text) RETURNS boolean
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            most    constant int := 104857600; -- bytes of a payload, or of headers, in any configuration
            old     %1$I.outbox_failed;
            json    jsonb;
            bytes   bytea;
            kept    jsonb;
            printed int;
            octets  int;
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason);
            SELECT f.* INTO old FROM %1$I.outbox_failed AS f WHERE f.id = $1 AND f.status = 'dead' FOR UPDATE;
            IF NOT FOUND THEN
                RETURN false;
            END IF;
            IF old.content_type = 'application/json' THEN
                json := convert_from($2, 'UTF8')::jsonb;
                octets := octet_length(json::text);
            ELSE
                bytes := $2;
                octets := octet_length(bytes);
            END IF;
            IF octets IS NULL OR octets > most THEN
                RAISE EXCEPTION 'the payload has to be there, and to have at most %% bytes', most USING ERRCODE = 'invalid_parameter_value';
            END IF;

            kept := old.headers;
            IF kept IS NULL AND old.error_class = 'unreadable_row' THEN
                SELECT o.headers INTO kept FROM %1$I.outbox AS o WHERE o.id = old.outbox_id AND o.event_id = old.event_id;
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

            UPDATE %1$I.outbox_failed AS f
               SET payload = json, payload_bytes = bytes, headers = kept, size = octets + printed,
                   status = 'parked', retry_count = 0, held = false, next_retry_at = now(),
                   error_class = CASE f.error_class WHEN 'unreadable_row' THEN NULL ELSE f.error_class END
             WHERE f.id = $1;
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id, payload, payload_bytes)
            VALUES ($3, 'edit', $4, old.relay, old.parking_key, old.id, old.outbox_id, old.event_id, old.payload, old.payload_bytes);
            RETURN true;
        END $body$
        $function$, schema);

    -- Holds all events of a key back. Returns false if nothing of it has failed.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_hold_key(relay text, parking_key text, operator text, reason text) RETURNS boolean
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason);
            WITH chosen AS MATERIALIZED (
                SELECT f.id FROM %1$I.outbox_failed AS f
                 WHERE f.relay = $1 AND f.parking_key = $2 AND f.status IN ('waiting', 'failed', 'parked', 'dead')
                 ORDER BY f.id FOR UPDATE
            ), changed AS (
                UPDATE %1$I.outbox_failed AS f SET held = true WHERE f.id = ANY (ARRAY(SELECT c.id FROM chosen AS c)) RETURNING 1
            )
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key)
            SELECT $3, 'hold', $4, $1, $2 WHERE EXISTS (SELECT FROM changed);
            RETURN FOUND;
        END $body$
        $function$, schema);

    -- Lets the events of a key go on. Returns false if it is not held.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_release_key(relay text, parking_key text, operator text, reason text) RETURNS boolean
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason);
            WITH chosen AS MATERIALIZED (
                SELECT f.id FROM %1$I.outbox_failed AS f
                 WHERE f.relay = $1 AND f.parking_key = $2 AND f.status IN ('waiting', 'failed', 'parked', 'dead') AND f.held
                 ORDER BY f.id FOR UPDATE
            ), changed AS (
                UPDATE %1$I.outbox_failed AS f SET held = false WHERE f.id = ANY (ARRAY(SELECT c.id FROM chosen AS c)) RETURNING 1
            )
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key)
            SELECT $3, 'release', $4, $1, $2 WHERE EXISTS (SELECT FROM changed);
            RETURN FOUND;
        END $body$
        $function$, schema);

    -- Keeps who reads the payload of a failed event. Returns false if there is no such event.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_audit_read(failed_id bigint, operator text, reason text) RETURNS boolean
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason);
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id)
            SELECT $2, 'read', $3, f.relay, f.parking_key, f.id, f.outbox_id, f.event_id FROM %1$I.outbox_failed AS f WHERE f.id = $1;
            RETURN FOUND;
        END $body$
        $function$, schema);

    -- The same for an event in outbox. There is no relay: the event is of all of them.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_audit_read_recorded(outbox_id bigint, operator text, reason text) RETURNS boolean
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason);
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, outbox_id, event_id)
            SELECT $2, 'read', $3, '', coalesce(o.topic, '') || '/' || coalesce(o.partition_key, o.aggregate_id), o.id, o.event_id
              FROM %1$I.outbox AS o WHERE o.id = $1;
            RETURN FOUND;
        END $body$
        $function$, schema);

    -- Pauses a topic of a consumer group, with an empty name all topics. Returns false if that is
    -- paused already.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_pause_consumer(consumer_group text, topic text, operator text, reason text) RETURNS boolean
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason);
            WITH paused AS (
                INSERT INTO %1$I.consumer_pause (consumer_group, topic, operator, reason) VALUES ($1, $2, $3, $4)
                    ON CONFLICT DO NOTHING RETURNING 1
            )
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
            SELECT $3, 'pause', $4, '', $2 || '/', $1 WHERE EXISTS (SELECT FROM paused);
            RETURN FOUND;
        END $body$
        $function$, schema);

    -- Ends a pause. Returns false if there is none.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_resume_consumer(consumer_group text, topic text, operator text, reason text) RETURNS boolean
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason);
            WITH resumed AS (
                DELETE FROM %1$I.consumer_pause AS p WHERE p.consumer_group = $1 AND p.topic = $2 RETURNING 1
            )
            INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
            SELECT $3, 'resume', $4, '', $2 || '/', $1 WHERE EXISTS (SELECT FROM resumed);
            RETURN FOUND;
        END $body$
        $function$, schema);

    -- Sets positions of a consumer group back, never ahead, and only where it has begun. Returns
    -- how many positions there are. saved_at stays: a rewind to a time that is repeated, because
    -- Kafka did not take its offsets, goes by the positions that were saved before that time.
    EXECUTE format($function$
        CREATE FUNCTION %1$I.outbox_rewind_consumer(consumer_group text, topics text[], topic_ids uuid[], partitions int[], positions bigint[],
                                                    operator text, reason text) RETURNS bigint
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            done bigint;
        BEGIN
            PERFORM %1$I.outbox_check_audit(operator, reason);
            WITH wanted AS (
                SELECT w.* FROM unnest($2, $3, $4, $5) AS w (topic, id, number, at) WHERE w.at >= 0
            ), changed AS (
                UPDATE %1$I.consumer_start AS s SET position = least(s.position, w.at)
                  FROM wanted AS w
                 WHERE s.consumer_group = $1 AND s.topic = w.topic AND s.topic_id = w.id AND s.partition = w.number AND s.position IS NOT NULL
             RETURNING 1
            ), audited AS (
                INSERT INTO %1$I.outbox_audit (operator, action, reason, relay, parking_key, consumer_group)
                SELECT DISTINCT $6, 'rewind', $7, '', w.topic || '/', $1 FROM wanted AS w
            )
            SELECT count(*) INTO done FROM changed;
            RETURN done;
        END $body$
        $function$, schema);
    PERFORM set_config('search_path', path, true);
END $migration$;
-- +goose StatementEnd

-- Nobody may call a function whom nobody allows it. Who could do by statements what a function
-- does may call it, so that processes of both releases can work; outbox doctor names the rights
-- that are more than their part needs.
-- +goose StatementBegin
DO $migration$
DECLARE
    schema  constant name := pg_catalog.current_schema();
    path    constant text := pg_catalog.current_setting('search_path');
    f       record;
    granted record;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    FOR f IN
        SELECT p.oid::regprocedure AS signature, p.proowner, new.changes
          FROM (VALUES ('outbox_revoke_grants', NULL), ('outbox_guard_partition', NULL), ('outbox_check_audit', NULL),
                       ('outbox_retry_failed', 'outbox_failed'), ('outbox_resolve_failed', 'outbox_failed'), ('outbox_edit_failed', 'outbox_failed'),
                       ('outbox_audit_read', 'outbox_failed'), ('outbox_audit_read_recorded', 'outbox_failed'), ('outbox_hold_key', 'outbox_failed'), ('outbox_release_key', 'outbox_failed'), ('outbox_pause_consumer', 'consumer_pause'),
                       ('outbox_resume_consumer', 'consumer_pause'), ('outbox_rewind_consumer', 'consumer_start')) AS new (name, changes)
          JOIN pg_proc AS p ON p.proname = new.name AND p.pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = schema)
    LOOP
        FOR granted IN -- by ALTER DEFAULT PRIVILEGES
            SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee
              FROM pg_proc AS p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
             WHERE p.oid = f.signature::oid AND a.grantee <> p.proowner
        LOOP
            EXECUTE format('REVOKE ALL ON FUNCTION %s FROM %s CASCADE', f.signature, granted.grantee);
        END LOOP;
        CONTINUE WHEN f.changes IS NULL;
        FOR granted IN
            SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee,
                   CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS option
              FROM pg_class AS c, aclexplode(c.relacl) AS a
             WHERE c.oid = format('%I.%I', schema, f.changes)::regclass AND a.grantee <> c.relowner
               AND a.privilege_type = CASE f.changes WHEN 'consumer_pause' THEN 'INSERT' ELSE 'UPDATE' END
               AND EXISTS (SELECT FROM pg_class AS audit, aclexplode(audit.relacl) AS b
                            WHERE audit.oid = format('%I.outbox_audit', schema)::regclass AND b.grantee = a.grantee AND b.privilege_type = 'INSERT')
        LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s%s', f.signature, granted.grantee, granted.option);
        END LOOP;
    END LOOP;

    -- Whose statements are subject to the policies has to find its groups.
    FOR granted IN
        SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee
          FROM pg_class AS c
         CROSS JOIN LATERAL (SELECT c.relacl UNION ALL SELECT attacl FROM pg_attribute WHERE attrelid = c.oid) AS g (acl)
         CROSS JOIN LATERAL aclexplode(g.acl) AS a
         WHERE c.oid IN (format('%I.event_handled', schema)::regclass, format('%I.consumer_start', schema)::regclass) AND a.grantee <> c.relowner
    LOOP
        EXECUTE format('GRANT SELECT ON %I.consumer_group_role TO %s', schema, granted.grantee);
    END LOOP;
    PERFORM set_config('search_path', path, true);
END $migration$;
-- +goose StatementEnd
