-- +goose Up

CREATE TABLE outbox_partitioning (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    rows     bigint  NOT NULL CHECK (rows BETWEEN 1 AND 1000000000),
    cut      bigint  NOT NULL
);

COMMENT ON TABLE outbox_partitioning IS 'How outbox is partitioned by ranges of id; empty where it is a plain table.';
COMMENT ON COLUMN outbox_partitioning.only_row IS 'There is one row at most.';
COMMENT ON COLUMN outbox_partitioning.rows IS 'Ids in a partition.';
COMMENT ON COLUMN outbox_partitioning.cut IS 'First id that is not in the first partition, which was the plain table.';

-- The partitions but the default one, which holds ids whose partition is gone:
-- first <= id < behind. closed: all its ids have been drawn. large: it is not to
-- wait until all of it is old.
-- +goose StatementBegin
CREATE FUNCTION outbox_partitions()
RETURNS TABLE (name name, first bigint, behind bigint, closed boolean, large boolean)
LANGUAGE sql STABLE SECURITY DEFINER AS $$
    SELECT b.name, b.first, b.behind, b.behind <= s.last_value, b.behind - greatest(b.first, 0) > 10 * p.rows
      FROM (SELECT c.relname AS name,
                   coalesce(substring(e.bound FROM 'FROM \(''?(-?\d+)')::bigint, -9223372036854775808) AS first,
                   coalesce(substring(e.bound FROM 'TO \(''?(-?\d+)')::bigint, 9223372036854775807) AS behind
              FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
             CROSS JOIN LATERAL pg_get_expr(c.relpartbound, c.oid) AS e (bound)
             WHERE i.inhparent = 'outbox'::regclass AND e.bound <> 'DEFAULT') AS b,
           outbox_id_seq AS s, outbox_partitioning AS p
     ORDER BY b.first
$$;
-- +goose StatementEnd

-- Before a plain table becomes the first partition, PostgreSQL must know that it
-- holds no higher ids, or it would read all rows under a lock. So: this, then
-- ALTER TABLE outbox VALIDATE CONSTRAINT outbox_before_partitions, which reads them
-- and holds up nobody, then outbox_partition().
-- +goose StatementBegin
CREATE FUNCTION outbox_prepare_partitions(rows bigint) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '50ms' AS $$
DECLARE
    highest bigint;
    cut     bigint;
BEGIN
    FOR look IN 1 .. 2 LOOP -- again under the lock: others may be at it
        IF (SELECT relkind = 'p' FROM pg_class WHERE oid = 'outbox'::regclass)
           OR EXISTS (SELECT FROM pg_constraint WHERE conrelid = 'outbox'::regclass AND conname = 'outbox_before_partitions') THEN
            RETURN;
        END IF;
        LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE;
    END LOOP;
    SELECT greatest(s.last_value, coalesce((SELECT max(id) FROM outbox), 0)) INTO highest FROM outbox_id_seq AS s;
    -- Until outbox_partition() is called, ids from cut on are refused: keep it far.
    cut := CASE WHEN highest <= 1 THEN rows ELSE (highest / rows + 11) * rows END;
    EXECUTE format('ALTER TABLE outbox ADD CONSTRAINT outbox_before_partitions CHECK (id < %s) NOT VALID', cut);
    INSERT INTO outbox_partitioning AS p (rows, cut) VALUES ($1, cut)
        ON CONFLICT (only_row) DO UPDATE SET rows = excluded.rows, cut = excluded.cut;
END $$;
-- +goose StatementEnd

-- Makes outbox a partitioned table, whose first partition is what was outbox. No
-- row is read or written. Rights go with the name.
-- +goose StatementBegin
CREATE FUNCTION outbox_partition() RETURNS void
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
    ALTER TABLE outbox DROP CONSTRAINT outbox_before_partitions;
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
END $$;
-- +goose StatementEnd

-- Makes eight partitions ahead of need when there are fewer than six, and returns
-- how many tables it made; it is the relay that calls it. Ids never run out of
-- partitions: behind those eight there are ever larger ones, up to the highest id.
-- Only an empty one, ahead of all ids, is cut into smaller ones, so no row is ever
-- looked at. If no relay comes for long, rows go to a larger one, which is published
-- and cleaned like the others.
-- +goose StatementBegin
CREATE FUNCTION outbox_make_partitions() RETURNS int
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

-- Removes all rows of a partition that the relay has found to be published and old,
-- and returns dropped, or emptied where it did not get the lock on outbox that
-- dropping takes (with whole false it does not ask for it), or what kept it from
-- both: lease, busy, rows, relays, server, gone. All that is visible in seen has been
-- looked at. It is judged again under a lock on the partition that lets nobody add a
-- row, by a snapshot that is newer than the lock. That lock waits for those who have
-- written to this partition; the one on outbox for every transaction that has
-- recorded something, which is why it comes last, and may be done without.
-- +goose StatementBegin
CREATE FUNCTION outbox_drop_partition(partition name, whole boolean, seen pg_snapshot, server timestamptz, relays text[],
                                      relay text, holder text, epoch bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET lock_timeout = '50ms' SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    added  boolean;
    filled boolean;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'a partition is dropped under READ COMMITTED only' USING ERRCODE = 'invalid_transaction_state';
    END IF;
    PERFORM FROM outbox_lease AS l WHERE l.name = $6 AND l.holder = $7 AND l.epoch = $8 FOR SHARE;
    IF NOT FOUND THEN
        RETURN 'lease';
    END IF;
    IF NOT EXISTS (SELECT FROM outbox_partitions() AS p WHERE p.name = partition AND p.closed) THEN
        RETURN 'gone';
    END IF;
    EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', partition);
    IF pg_postmaster_start_time() <> server THEN
        RETURN 'server';
    END IF;
    EXECUTE format('SELECT coalesce((SELECT xid FROM %1$I ORDER BY xid DESC, id DESC LIMIT 1) >= pg_snapshot_xmax($1), false)
                        OR EXISTS (SELECT FROM pg_snapshot_xip($1) AS x
                                    CROSS JOIN LATERAL (SELECT FROM %1$I WHERE xid >= x AND xid <= x ORDER BY xid, id LIMIT 1) AS late),
                           EXISTS (SELECT FROM %1$I ORDER BY id LIMIT 1)', partition)
       INTO added, filled USING seen;
    IF added THEN
        RETURN 'rows';
    END IF;
    IF relays IS DISTINCT FROM outbox_relays() THEN
        RETURN 'relays';
    END IF;
    IF filled THEN
        EXECUTE format('TRUNCATE %I', partition);
    END IF;
    IF NOT whole THEN
        RETURN 'emptied';
    END IF;
    BEGIN
        LOCK TABLE ONLY outbox IN ACCESS EXCLUSIVE MODE;
    EXCEPTION WHEN lock_not_available THEN
        RETURN 'emptied';
    END;
    EXECUTE format('DROP TABLE %I', partition);
    RETURN 'dropped';
EXCEPTION WHEN lock_not_available THEN
    RETURN 'busy';
END $$;
-- +goose StatementEnd

-- Names of the relays that have a cursor, found one by one: each has a long history.
-- +goose StatementBegin
CREATE FUNCTION outbox_relays() RETURNS text[]
LANGUAGE sql STABLE SECURITY DEFINER AS $$
    WITH RECURSIVE names AS (
       (SELECT relay FROM outbox_cursor ORDER BY relay LIMIT 1)
         UNION ALL
        SELECT (SELECT c.relay FROM outbox_cursor AS c WHERE c.relay > names.relay ORDER BY c.relay LIMIT 1)
          FROM names WHERE names.relay IS NOT NULL
    )
    SELECT coalesce(array_agg(relay::text ORDER BY relay), '{}') FROM names WHERE relay IS NOT NULL
$$;
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
                AND proname IN ('outbox_partitions', 'outbox_prepare_partitions', 'outbox_partition', 'outbox_make_partitions',
                                'outbox_drop_partition', 'outbox_relays')
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = %I, pg_temp', f, current_schema());
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
    END LOOP;
END $$;
-- +goose StatementEnd
