-- +goose Up

-- outbox as a partitioned table, by ranges of ids. These functions do nothing until MigrateConfig.PartitionRows is set,
-- or outbox_prepare_partitions is called.

CREATE TABLE outbox_partitioning (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    rows     bigint  NOT NULL CHECK (rows BETWEEN 1 AND 1000000000),
    cut      bigint  NOT NULL
);

COMMENT ON TABLE outbox_partitioning IS 'How outbox is partitioned by ranges of id; empty if it is a plain table.';
COMMENT ON COLUMN outbox_partitioning.only_row IS 'There is one row at most.';
COMMENT ON COLUMN outbox_partitioning.rows IS 'Ids in a partition.';
COMMENT ON COLUMN outbox_partitioning.cut IS 'First id behind the first partition, which was the plain table.';

-- +goose StatementBegin
SELECT outbox_define(current_schema(), ARRAY[

-- The partitions, except for the default one, which takes ids whose partition is gone. A partition has the ids first
-- <= id < behind. closed: all of them have been drawn. large: retention need not wait until all of its events are
-- old.
$function$
CREATE FUNCTION @schema@.outbox_partitions()
RETURNS TABLE (name name, first bigint, behind bigint, closed boolean, large boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
    SELECT b.name, b.first, b.behind, b.behind <= s.last_value, b.behind - greatest(b.first, 0) > 10 * p.rows
      FROM (SELECT c.relname AS name,
                   coalesce(substring(e.bound FROM 'FROM \(''?(-?\d+)')::bigint, -9223372036854775808) AS first,
                   coalesce(substring(e.bound FROM 'TO \(''?(-?\d+)')::bigint, 9223372036854775807) AS behind
              FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
             CROSS JOIN LATERAL pg_get_expr(c.relpartbound, c.oid) AS e (bound)
             WHERE i.inhparent = @outbox@::regclass AND e.bound <> 'DEFAULT') AS b,
           @schema@.outbox_id_seq AS s, @schema@.outbox_partitioning AS p
     ORDER BY b.first
$body$
$function$,

-- The first of three steps that make the plain table the first partition. PostgreSQL must know that the table holds
-- no higher ids, or it would read all rows under a lock. The second step, ALTER TABLE outbox VALIDATE CONSTRAINT
-- outbox_before_partitions, reads them and blocks nobody. The third step is outbox_partition().
$function$
CREATE FUNCTION @schema@.outbox_prepare_partitions(rows bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $body$
DECLARE
    highest bigint;
    cut     bigint;
BEGIN
    FOR look IN 1 .. 2 LOOP -- again under the lock: others may be at it
        IF (SELECT relkind = 'p' FROM pg_class WHERE oid = @outbox@::regclass)
           OR EXISTS (SELECT FROM pg_constraint
               WHERE conrelid = @outbox@::regclass AND conname = 'outbox_before_partitions') THEN
            RETURN;
        END IF;
        LOCK TABLE @schema@.outbox IN ACCESS EXCLUSIVE MODE;
    END LOOP;
    IF EXISTS (SELECT FROM pg_index WHERE indrelid = @outbox@::regclass AND indisunique AND NOT indisprimary) THEN
        RAISE EXCEPTION 'outbox has a unique index, which would not go with its name, drop it first'
            USING ERRCODE = 'feature_not_supported';
    END IF;
    SELECT greatest(s.last_value, coalesce((SELECT max(id) FROM @schema@.outbox), 0)) INTO highest
        FROM @schema@.outbox_id_seq AS s;
    -- Until outbox_partition() is called, ids from cut on are refused. So cut is far ahead.
    cut := (highest / rows + 11) * rows;
    EXECUTE format('ALTER TABLE %I.outbox ADD CONSTRAINT outbox_before_partitions CHECK (id < %s) NOT VALID',
        @schema_name@, cut);
    INSERT INTO @schema@.outbox_partitioning AS p (rows, cut) VALUES ($1, cut)
        ON CONFLICT (only_row) DO UPDATE SET rows = excluded.rows, cut = excluded.cut;
END $body$
$function$,

-- Revokes all rights to a table from everybody but its owner. The rights to a partition are those to outbox: it has
-- none of its own, neither those of the plain table nor those of ALTER DEFAULT PRIVILEGES.
$function$
CREATE FUNCTION @schema@.outbox_revoke_grants(relation name) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    target constant text := format('%I.%I', @schema_name@, relation);
    granted record;
BEGIN
    FOR granted IN
        SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee
          FROM pg_class AS c
         CROSS JOIN LATERAL (SELECT c.relacl UNION ALL
                             SELECT attacl FROM pg_attribute WHERE attrelid = c.oid) AS g (acl)
         CROSS JOIN LATERAL aclexplode(g.acl) AS a
         WHERE c.oid = target::regclass AND a.grantee <> c.relowner
    LOOP
        EXECUTE format('REVOKE ALL ON TABLE %s FROM %s CASCADE', target, granted.grantee);
    END LOOP;
END $body$
$function$,

-- Gives a new partition the constraint on xid that 0001_events_and_cursors.sql explains, and revokes the rights to
-- it.
$function$
CREATE FUNCTION @schema@.outbox_guard_partition(partition name) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    EXECUTE format('ALTER TABLE %I.%I ADD CONSTRAINT outbox_xid_is_of_this_transaction CHECK ('
                   'xid = pg_current_xact_id() '
                   'OR current_setting(''outbox.keep_xid'', true) IS NOT DISTINCT FROM ''on'') NOT VALID',
                   @schema_name@, partition);
    PERFORM @schema@.outbox_revoke_grants(partition);
END $body$
$function$,

-- Makes outbox a partitioned table. The plain table becomes its first partition. It reads and writes no row. The
-- rights to the plain table become rights to the partitioned one.
$function$
CREATE FUNCTION @schema@.outbox_partition() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $body$
DECLARE
    schema  constant name := @schema_name@;
    plan    @schema@.outbox_partitioning;
    old     name;
    above   name;
    owner   name;
    granted record;
BEGIN
    FOR look IN 1 .. 2 LOOP -- again under the lock: others may be at it
        IF (SELECT relkind = 'p' FROM pg_class WHERE oid = @outbox@::regclass) THEN
            RETURN;
        END IF;
        IF NOT EXISTS (SELECT FROM pg_constraint
            WHERE conrelid = @outbox@::regclass AND conname = 'outbox_before_partitions' AND convalidated) THEN
            RAISE EXCEPTION 'call outbox_prepare_partitions(rows), and '
                'ALTER TABLE outbox VALIDATE CONSTRAINT outbox_before_partitions, first'
                USING ERRCODE = 'object_not_in_prerequisite_state';
        END IF;
        LOCK TABLE @schema@.outbox IN ACCESS EXCLUSIVE MODE;
    END LOOP;
    IF (SELECT relrowsecurity FROM pg_class WHERE oid = @outbox@::regclass)
       OR EXISTS (SELECT FROM pg_trigger WHERE tgrelid = @outbox@::regclass)
       OR EXISTS (SELECT FROM pg_index WHERE indrelid = @outbox@::regclass AND indisunique AND NOT indisprimary)
       OR EXISTS (SELECT FROM pg_publication_rel WHERE prrelid = @outbox@::regclass) THEN
        RAISE EXCEPTION 'outbox has triggers, row level security, a unique index or a publication of its own, '
            'which would not go with its name' USING ERRCODE = 'feature_not_supported';
    END IF;
    -- Without rows, and under the lock, the first partition needs no room.
    UPDATE @schema@.outbox_partitioning
       SET cut = ((SELECT last_value FROM @schema@.outbox_id_seq) / rows + 1) * rows
     WHERE NOT EXISTS (SELECT FROM @schema@.outbox);
    SELECT * INTO STRICT plan FROM @schema@.outbox_partitioning;
    SELECT pg_get_userbyid(relowner) INTO owner FROM pg_class WHERE oid = @outbox@::regclass;
    old := format('outbox_min_%s', plan.cut);
    above := format('outbox_%s_max', plan.cut);
    EXECUTE format('ALTER TABLE %I.outbox RENAME TO %I', schema, old);
    EXECUTE format('ALTER INDEX %I.outbox_pkey RENAME TO %I', schema, old || '_pkey');
    EXECUTE format('ALTER INDEX %I.outbox_xid_id_idx RENAME TO %I', schema, old || '_xid_id_idx');
    EXECUTE format('CREATE TABLE %1$I.outbox (LIKE %1$I.%2$I INCLUDING DEFAULTS INCLUDING GENERATED INCLUDING CONSTRAINTS '
                   'INCLUDING COMMENTS INCLUDING STORAGE) PARTITION BY RANGE (id)', schema, old);
    EXECUTE format('ALTER TABLE %I.outbox OWNER TO %I', schema, owner);
    PERFORM @schema@.outbox_revoke_grants('outbox');
    EXECUTE format('COMMENT ON TABLE %I.outbox IS %L', schema,
        obj_description(format('%I.%I', schema, old)::regclass, 'pg_class'));
    ALTER TABLE @schema@.outbox DROP CONSTRAINT outbox_before_partitions,
        DROP CONSTRAINT IF EXISTS outbox_xid_is_of_this_transaction;
    ALTER TABLE @schema@.outbox ADD CONSTRAINT outbox_pkey PRIMARY KEY (id);
    CREATE INDEX outbox_xid_id_idx ON @schema@.outbox (xid, id);
    ALTER SEQUENCE @schema@.outbox_id_seq OWNED BY @schema@.outbox.id;
    FOR granted IN
        SELECT a.privilege_type || coalesce(' (' || quote_ident(g.attname) || ')', '') AS privilege,
               CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee,
               CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS option
          FROM (SELECT relacl AS acl, NULL::name AS attname FROM pg_class
              WHERE oid = format('%I.%I', schema, old)::regclass
                 UNION ALL
                SELECT attacl, attname FROM pg_attribute
                 WHERE attrelid = format('%I.%I', schema, old)::regclass AND attnum > 0 AND NOT attisdropped) AS g,
               aclexplode(g.acl) AS a
         WHERE a.grantee <> (SELECT relowner FROM pg_class WHERE oid = @outbox@::regclass)
    LOOP
        EXECUTE format('GRANT %s ON %I.outbox TO %s%s', granted.privilege, schema, granted.grantee, granted.option);
    END LOOP;
    EXECUTE format('ALTER TABLE %1$I.outbox ATTACH PARTITION %1$I.%2$I FOR VALUES FROM (MINVALUE) TO (%3$s)',
                   schema, old, plan.cut);
    EXECUTE format('ALTER TABLE %I.%I DROP CONSTRAINT outbox_before_partitions', schema, old);
    EXECUTE format('CREATE TABLE %1$I.%2$I PARTITION OF %1$I.outbox FOR VALUES FROM (%3$s) TO (MAXVALUE)',
                   schema, above, plan.cut);
    CREATE TABLE @schema@.outbox_default PARTITION OF @schema@.outbox DEFAULT;
    PERFORM @schema@.outbox_revoke_grants(old), @schema@.outbox_guard_partition(above),
        @schema@.outbox_guard_partition('outbox_default');
END $body$
$function$,

-- Makes eight partitions ahead of need when there are fewer than six, and returns how many tables it made. Relays
-- call it. Every id has a partition: behind those eight come ever larger ones, up to the highest id. Only an empty
-- partition ahead of all ids is split into smaller ones, so no row is read. If no relay runs for long, rows go to a
-- larger partition, which is published and removed like the others.
$function$
CREATE FUNCTION @schema@.outbox_make_partitions() RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $body$
DECLARE
    schema constant name := @schema_name@;
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
    SELECT p.rows INTO n FROM @schema@.outbox_partitioning AS p FOR UPDATE; -- one at a time
    SELECT last_value INTO drawn FROM @schema@.outbox_id_seq;
    IF (SELECT count(*) FROM @schema@.outbox_partitions() AS p
        WHERE p.first > drawn AND p.behind - greatest(p.first, 0) <= n) >= 6 THEN
        RETURN 0;
    END IF;
    SELECT * INTO whole FROM @schema@.outbox_partitions() AS p
     WHERE p.first > drawn AND p.behind - greatest(p.first, 0) > n ORDER BY p.first LIMIT 1;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    start := whole.first;
    FOREACH size IN ARRAY ARRAY[n, n, n, n, n, n, n, n, 10 * n, 1000 * n, 1000000 * n, 9223372036854775807] LOOP
        EXIT WHEN start >= whole.behind;
        size := least(size, whole.behind - start);
        names := names || format('outbox_%s_%s', start,
            CASE start + size WHEN 9223372036854775807 THEN 'max' ELSE (start + size)::text END)::name;
        bounds := bounds || format('FROM (%s) TO (%s)', start,
            CASE start + size WHEN 9223372036854775807 THEN 'MAXVALUE' ELSE (start + size)::text END);
        start := start + size;
        EXECUTE format('CREATE TABLE %1$I.%2$I '
                       '(LIKE %1$I.outbox INCLUDING GENERATED INCLUDING CONSTRAINTS INCLUDING STORAGE INCLUDING INDEXES)',
                       schema, names[array_length(names, 1)]);
        PERFORM @schema@.outbox_guard_partition(names[array_length(names, 1)]);
    END LOOP;

    LOCK TABLE ONLY @schema@.outbox IN ACCESS EXCLUSIVE MODE;
    SELECT last_value INTO drawn FROM @schema@.outbox_id_seq;
    EXECUTE format('SELECT EXISTS (SELECT FROM %I.%I)', schema, whole.name) INTO filled;
    IF filled OR drawn >= whole.first THEN
        RAISE EXCEPTION 'ids have come to partition % meanwhile', whole.name USING ERRCODE = 'lock_not_available';
    END IF;
    EXECUTE format('DROP TABLE %I.%I', schema, whole.name);
    FOR i IN 1 .. array_length(names, 1) LOOP
        EXECUTE format('ALTER TABLE %1$I.outbox ATTACH PARTITION %1$I.%2$I FOR VALUES %3$s',
                       schema, names[i], bounds[i]);
    END LOOP;
    RETURN array_length(names, 1);
END $body$
$function$,

-- Removes all rows of a partition that the relay has found to be published and old. Returns dropped; or emptied, if
-- it did not get the lock on outbox that dropping takes, or if whole is false; or the reason why it did neither:
-- lease, busy, rows, relays, server, gone; or archive, if rows must be archived and the holder has no archive.
--
-- The relay has examined every row that is visible in seen. The partition is checked again under a lock that lets
-- nobody add a row, by a snapshot that is newer than the lock. That lock waits for transactions that have written to
-- this partition. The lock on outbox waits for every transaction that has recorded an event, so it comes last, and is
-- not needed to empty the partition.
$function$
CREATE FUNCTION @schema@.outbox_drop_partition(
    partition name, whole boolean, seen pg_snapshot, server timestamptz, relays text[],
    relay text, holder text, epoch bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET lock_timeout = '50ms' SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
DECLARE
    table_name constant text := format('%I.%I', @schema_name@, partition);
    added      boolean;
    filled     boolean;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'a partition is dropped under READ COMMITTED only' USING ERRCODE = 'invalid_transaction_state';
    END IF;
    PERFORM FROM @schema@.outbox_lease AS l WHERE l.name = $6 AND l.holder = $7 AND l.epoch = $8 FOR SHARE;
    IF NOT FOUND THEN
        RETURN 'lease';
    END IF;
    IF NOT EXISTS (SELECT FROM @schema@.outbox_partitions() AS p WHERE p.name = partition AND p.closed) THEN
        RETURN 'gone';
    END IF;
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', table_name);
    IF pg_postmaster_start_time() <> server THEN
        RETURN 'server';
    END IF;
    EXECUTE format('SELECT coalesce((SELECT xid FROM %1$s ORDER BY xid DESC, id DESC LIMIT 1) >= pg_snapshot_xmax($1),
                                    false)
                        OR EXISTS (SELECT FROM pg_snapshot_xip($1) AS x
                                    CROSS JOIN LATERAL (SELECT FROM %1$s
                                        WHERE xid >= x AND xid <= x ORDER BY xid, id LIMIT 1) AS late),
                           EXISTS (SELECT FROM %1$s ORDER BY id LIMIT 1)', table_name)
       INTO added, filled USING seen;
    IF added THEN
        RETURN 'rows';
    END IF;
    IF relays IS DISTINCT FROM @schema@.outbox_relays() THEN
        RETURN 'relays';
    END IF;
    IF EXISTS (SELECT FROM @schema@.outbox_archiver)
       AND NOT EXISTS (SELECT FROM @schema@.outbox_archiver AS a WHERE a.name = $6 AND a.epoch = $8) THEN
        RETURN 'archive';
    END IF;
    IF filled THEN
        EXECUTE format('TRUNCATE %s', table_name);
    END IF;
    IF NOT whole THEN
        RETURN 'emptied';
    END IF;
    BEGIN
        LOCK TABLE ONLY @schema@.outbox IN ACCESS EXCLUSIVE MODE;
    EXCEPTION WHEN lock_not_available THEN
        RETURN 'emptied';
    END;
    EXECUTE format('DROP TABLE %s', table_name);
    RETURN 'dropped';
EXCEPTION WHEN lock_not_available THEN
    RETURN 'busy';
END $body$
$function$
]);
-- +goose StatementEnd
