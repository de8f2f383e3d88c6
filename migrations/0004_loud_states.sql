-- +goose Up

-- As in 0003_bounded_reads.sql.
SELECT set_config('lock_timeout', '100ms', true) WHERE current_setting('lock_timeout') = '0';

-- A row that is copied with its xid, by COPY or by logical replication, would be passed
-- over or sent again and again, because a transaction id means nothing elsewhere. The
-- constraint is not of the partitioned table but of each partition, and never validated:
-- so pg_dump restores it after the rows, and partitions are attached without reading them.
-- +goose StatementBegin
CREATE FUNCTION outbox_guard_xid(leaf name) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('ALTER TABLE %I ADD CONSTRAINT outbox_xid_is_of_this_transaction CHECK (xid = pg_current_xact_id() '
                   'OR current_setting(''outbox.keep_xid'', true) IS NOT DISTINCT FROM ''on'') NOT VALID', leaf);
END $$;
-- +goose StatementEnd

-- As in 0002_partitions.sql, but for outbox_guard_xid.
-- Makes outbox a partitioned table, whose first partition is what was outbox. No
-- row is read or written. Rights go with the name.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION outbox_partition() RETURNS void
LANGUAGE plpgsql SET lock_timeout = '50ms' AS $$
DECLARE
    plan    outbox_partitioning;
    old     text;
    owner   text;
    granted record;
BEGIN
    FOR look IN 1 .. 2 LOOP -- again under the lock: others may be at it
        IF (SELECT relkind = 'p' FROM pg_class WHERE oid = 'outbox'::regclass) THEN
            RETURN;
        END IF;
        IF NOT EXISTS (SELECT FROM pg_constraint WHERE conrelid = 'outbox'::regclass AND conname = 'outbox_before_partitions' AND convalidated) THEN
            RAISE EXCEPTION 'call outbox_prepare_partitions(rows), and ALTER TABLE outbox VALIDATE CONSTRAINT outbox_before_partitions, first'
                USING ERRCODE = 'object_not_in_prerequisite_state';
        END IF;
        LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE;
    END LOOP;
    IF (SELECT relrowsecurity FROM pg_class WHERE oid = 'outbox'::regclass)
       OR EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'outbox'::regclass)
       OR EXISTS (SELECT FROM pg_publication_rel WHERE prrelid = 'outbox'::regclass) THEN
        RAISE EXCEPTION 'outbox has triggers, row level security or a publication of its own, which would not go with its name'
            USING ERRCODE = 'feature_not_supported';
    END IF;
    SELECT * INTO STRICT plan FROM outbox_partitioning;
    SELECT pg_get_userbyid(relowner) INTO owner FROM pg_class WHERE oid = 'outbox'::regclass;
    old := format('outbox_min_%s', plan.cut);
    EXECUTE format('ALTER TABLE outbox RENAME TO %I', old);
    EXECUTE format('ALTER INDEX outbox_pkey RENAME TO %I', old || '_pkey');
    EXECUTE format('ALTER INDEX outbox_xid_id_idx RENAME TO %I', old || '_xid_id_idx');
    EXECUTE format('CREATE TABLE outbox (LIKE %I INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING COMMENTS INCLUDING STORAGE) PARTITION BY RANGE (id)', old);
    EXECUTE format('ALTER TABLE outbox OWNER TO %I', owner);
    EXECUTE format('COMMENT ON TABLE outbox IS %L', obj_description(old::regclass, 'pg_class'));
    ALTER TABLE outbox DROP CONSTRAINT outbox_before_partitions, DROP CONSTRAINT IF EXISTS outbox_xid_is_of_this_transaction;
    ALTER TABLE outbox ADD CONSTRAINT outbox_pkey PRIMARY KEY (id);
    CREATE INDEX outbox_xid_id_idx ON outbox (xid, id);
    ALTER SEQUENCE outbox_id_seq OWNED BY outbox.id;
    FOR granted IN
        SELECT a.privilege_type || coalesce(' (' || quote_ident(g.attname) || ')', '') AS privilege,
               CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee,
               CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS option
          FROM (SELECT relacl AS acl, NULL::name AS attname FROM pg_class WHERE oid = old::regclass
                 UNION ALL
                SELECT attacl, attname FROM pg_attribute WHERE attrelid = old::regclass AND attnum > 0 AND NOT attisdropped) AS g,
               aclexplode(g.acl) AS a
         WHERE a.grantee <> (SELECT relowner FROM pg_class WHERE oid = 'outbox'::regclass)
    LOOP
        EXECUTE format('GRANT %s ON outbox TO %s%s', granted.privilege, granted.grantee, granted.option);
    END LOOP;
    EXECUTE format('ALTER TABLE outbox ATTACH PARTITION %I FOR VALUES FROM (MINVALUE) TO (%s)', old, plan.cut);
    EXECUTE format('ALTER TABLE %I DROP CONSTRAINT outbox_before_partitions', old);
    EXECUTE format('CREATE TABLE %I PARTITION OF outbox FOR VALUES FROM (%s) TO (MAXVALUE)', format('outbox_%s_max', plan.cut), plan.cut);
    CREATE TABLE outbox_default PARTITION OF outbox DEFAULT;
    PERFORM outbox_guard_xid(format('outbox_%s_max', plan.cut)), outbox_guard_xid('outbox_default');
END $$;
-- +goose StatementEnd

-- As in 0002_partitions.sql, but for outbox_guard_xid.
-- Makes eight partitions ahead of need when there are fewer than six, and returns
-- how many tables it made; it is the relay that calls it. Ids never run out of
-- partitions: behind those eight there are ever larger ones, up to the highest id.
-- Only an empty one, ahead of all ids, is cut into smaller ones, so no row is ever
-- looked at. If no relay comes for long, rows go to a larger one, which is published
-- and cleaned like the others.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION outbox_make_partitions() RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET lock_timeout = '50ms' AS $$
DECLARE
    n      bigint;
    drawn  bigint;
    whole  record;
    size   bigint;
    start  bigint;
    names  text[] := '{}';
    bounds text[] := '{}';
    filled boolean;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'partitions are made under READ COMMITTED only' USING ERRCODE = 'invalid_transaction_state';
    END IF;
    SELECT p.rows INTO n FROM outbox_partitioning AS p FOR UPDATE; -- one at a time
    SELECT last_value INTO drawn FROM outbox_id_seq;
    IF (SELECT count(*) FROM outbox_partitions() AS p WHERE p.first > drawn AND p.behind - greatest(p.first, 0) <= n) >= 6 THEN
        RETURN 0;
    END IF;
    SELECT * INTO whole FROM outbox_partitions() AS p WHERE p.first > drawn AND p.behind - greatest(p.first, 0) > n ORDER BY p.first LIMIT 1;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    start := whole.first;
    FOREACH size IN ARRAY ARRAY[n, n, n, n, n, n, n, n, 10 * n, 1000 * n, 1000000 * n, 9223372036854775807] LOOP
        EXIT WHEN start >= whole.behind;
        size := least(size, whole.behind - start);
        names := names || format('outbox_%s_%s', start, CASE start + size WHEN 9223372036854775807 THEN 'max' ELSE (start + size)::text END);
        bounds := bounds || format('FROM (%s) TO (%s)', start, CASE start + size WHEN 9223372036854775807 THEN 'MAXVALUE' ELSE (start + size)::text END);
        start := start + size;
        EXECUTE format('CREATE TABLE %I (LIKE outbox INCLUDING CONSTRAINTS INCLUDING STORAGE INCLUDING INDEXES)', names[array_length(names, 1)]);
        PERFORM outbox_guard_xid(names[array_length(names, 1)]);
    END LOOP;

    LOCK TABLE ONLY outbox IN ACCESS EXCLUSIVE MODE;
    SELECT last_value INTO drawn FROM outbox_id_seq;
    EXECUTE format('SELECT EXISTS (SELECT FROM %I)', whole.name) INTO filled;
    IF filled OR drawn >= whole.first THEN
        RAISE EXCEPTION 'ids have come to partition % meanwhile', whole.name USING ERRCODE = 'lock_not_available';
    END IF;
    EXECUTE format('DROP TABLE %I', whole.name);
    FOR i IN 1 .. array_length(names, 1) LOOP
        EXECUTE format('ALTER TABLE outbox ATTACH PARTITION %I FOR VALUES %s', names[i], bounds[i]);
    END LOOP;
    RETURN array_length(names, 1);
END $$;
-- +goose StatementEnd

-- Names in the functions mean this schema, whoever calls them, and nobody may whom
-- nobody allows it.
-- +goose StatementBegin
DO $$
DECLARE
    f regprocedure;
BEGIN
    FOR f IN SELECT oid::regprocedure FROM pg_proc
              WHERE pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema())
                AND proname IN ('outbox_guard_xid', 'outbox_partition', 'outbox_make_partitions')
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = %I, pg_temp', f, current_schema());
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
    END LOOP;
END $$;
-- +goose StatementEnd

ALTER TABLE outbox_lease ADD COLUMN lasts interval;

COMMENT ON COLUMN outbox_lease.lasts IS
    'How long the holder renews it for. If expires_at is further ahead, the clock of the database was set back.';

-- outbox comes last, because all writers wait for it, and whoever reads it: what is done
-- here changes the catalogue only, and looks at no row. The parent of partitions is locked
-- first. Whoever came by it is gone then, and for somebody who uses a partition by its name
-- nobody waits.
--
-- size: the relay reads as many rows at once as its memory has room for. A constant default
-- rewrites no row.
--
-- xid: a transaction with synchronous_commit = off would make its events visible before they
-- are durable: after a crash Kafka has events that the database does not have. So
-- recording an event makes its transaction wait for its own disk; not for a standby,
-- because who chose off does not want to depend on one. A rollback to a savepoint undoes
-- both, the row and the setting. outbox.allow_async_commit = 'on' leaves it off.
-- +goose StatementBegin
DO $$
BEGIN
    IF current_setting('lock_timeout') = '0' THEN -- where each statement is a transaction
        PERFORM set_config('lock_timeout', '100ms', true);
    END IF;
    LOCK TABLE ONLY outbox IN ACCESS EXCLUSIVE MODE;
    LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE NOWAIT;

    ALTER TABLE outbox
        ADD COLUMN size int NOT NULL DEFAULT 65536,
        ALTER COLUMN xid SET DEFAULT
            CASE WHEN current_setting('synchronous_commit') = 'off'
                  AND current_setting('outbox.allow_async_commit', true) IS DISTINCT FROM 'on'
                  AND set_config('synchronous_commit', 'local', true) IS NULL THEN NULL
                 ELSE pg_current_xact_id() END;
    COMMENT ON COLUMN outbox.size IS
        'Bytes of payload and headers as they are read; the relay reads as many rows at once as its memory has room for. Whoever does not know leaves it to the default.';

    IF (SELECT relkind = 'p' FROM pg_class WHERE oid = 'outbox'::regclass) THEN
        PERFORM outbox_guard_xid(c.relname) FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
          WHERE i.inhparent = 'outbox'::regclass ORDER BY c.relname;
    ELSE
        PERFORM outbox_guard_xid('outbox');
    END IF;
END $$;
-- +goose StatementEnd
