-- +goose Up

-- Which roles may write for which consumer groups, functions that remove rows for them, and a check that nobody has put
-- code into the tables.

-- Nobody waits for long behind a migration that does not get its lock: it fails instead, and can be repeated. A
-- lock_timeout that was set before stays.
SELECT pg_catalog.set_config('lock_timeout', '100ms', true)
 WHERE pg_catalog.current_setting('lock_timeout') OPERATOR(pg_catalog.=) '0';

CREATE TABLE consumer_group_role (
    consumer_group text         NOT NULL,
    role           name         NOT NULL,
    CONSTRAINT consumer_group_role_lengths CHECK (char_length(consumer_group) <= 255),
    CONSTRAINT consumer_group_role_pkey PRIMARY KEY (consumer_group, role)
);

COMMENT ON TABLE consumer_group_role IS
    'Which roles may write for which consumer groups, in addition to the owner of the tables and members of '
    'pg_write_all_data.';
COMMENT ON COLUMN consumer_group_role.consumer_group IS 'As in event_handled; * stands for all groups, and for relays.';
COMMENT ON COLUMN consumer_group_role.role IS 'A role, and with it its members; public stands for all roles.';

-- Functions that remove rows for relays, consumers and workers. A role with DELETE on a table may also lock the table
-- against all others. The functions run with the rights of the owner, whom policies do not restrict. So each removes
-- only rows of groups for which the role of the session may write, and ignores the others, as policies do. The role of
-- the session is that of SET ROLE, or the login: current_user is the owner here. A place is a ctid that the calling
-- statement has read. A row that was updated since has another one.
-- +goose StatementBegin
SELECT outbox_define(current_schema(), fragments => ARRAY[

'remove', $sql$
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
DECLARE
    caller constant name := coalesce(nullif(current_setting('role'), 'none'), session_user);
    -- As in the policies below. Owners and roles with BYPASSRLS, whom these do not restrict, have all groups.
    groups constant text[] := ARRAY(
        SELECT r.consumer_group FROM @schema@.consumer_group_role AS r
         WHERE r.role = 'public' OR pg_has_role(caller, to_regrole(quote_ident(r.role)), 'USAGE')
        UNION ALL
        SELECT '*' FROM pg_roles AS r
         WHERE r.rolname = caller
           AND (r.rolbypassrls OR pg_has_role(caller, 'pg_write_all_data', 'USAGE')
                OR pg_has_role(caller, current_user, 'USAGE')));
    done   bigint;
BEGIN
$sql$,
'removed', $sql$
    GET DIAGNOSTICS done = ROW_COUNT;
    RETURN done;
END $body$
$sql$

], definitions => ARRAY[

-- Removes notes that are older than a time.
$function$
CREATE FUNCTION @schema@.outbox_remove_handled(places tid[], older timestamptz)
@remove@
    DELETE FROM @schema@.event_handled AS h
     WHERE h.ctid = ANY ($1) AND h.handled_at < $2 AND groups && ARRAY[h.consumer_group, '*']::text[];
@removed@
$function$,

-- Removes deliveries that were done or resolved before a time.
$function$
CREATE FUNCTION @schema@.outbox_remove_deliveries(places tid[], older timestamptz)
@remove@
    DELETE FROM @schema@.event_delivery AS d
     WHERE d.ctid = ANY ($1) AND greatest(d.processed_at, d.resolved_at) < $2
       AND (d.status = 'DONE' OR d.status = 'DEAD' AND d.resolved_at IS NOT NULL)
       AND groups && ARRAY[d.consumer_group, '*']::text[];
@removed@
$function$,

-- Removes positions. Nothing updates them.
$function$
CREATE FUNCTION @schema@.outbox_remove_cursors(places tid[])
@remove@
    DELETE FROM @schema@.outbox_cursor AS c
     WHERE c.ctid = ANY ($1)
       AND groups && ARRAY[CASE WHEN starts_with(c.relay, 'worker:') THEN substr(c.relay, 8) END, '*']::text[];
@removed@
$function$,

-- Removes the row of a process; without its name, those of processes that have not renewed theirs for a day.
$function$
CREATE FUNCTION @schema@.outbox_remove_member(consumer_group text, member text)
@remove@
    DELETE FROM @schema@.event_member AS m
     WHERE m.consumer_group = $1
       AND (m.member = $2 OR $2 IS NULL AND m.renewed_at < clock_timestamp() - interval '1 day')
       AND groups && ARRAY[m.consumer_group, '*']::text[];
@removed@
$function$,

-- Removes what a group has noted about topics that had these names and other ids: gaps at once, positions after 30
-- days. Returns the number of positions.
$function$
CREATE FUNCTION @schema@.outbox_remove_topics(consumer_group text, topics text[], topic_ids uuid[])
@remove@
    DELETE FROM @schema@.consumer_gap AS g USING unnest($2, $3) AS t (topic, id)
     WHERE g.consumer_group = $1 AND g.topic = t.topic AND g.topic_id <> t.id
       AND groups && ARRAY[g.consumer_group, '*']::text[];
    DELETE FROM @schema@.consumer_start AS s USING unnest($2, $3) AS t (topic, id)
     WHERE s.consumer_group = $1 AND s.topic = t.topic AND s.topic_id <> t.id
       AND s.saved_at < now() - interval '30 days' AND groups && ARRAY[s.consumer_group, '*']::text[];
@removed@
$function$,

-- Removes gaps that are read to their end, unless their versions have changed.
$function$
CREATE FUNCTION @schema@.outbox_remove_gaps(
    consumer_group text, topics text[], topic_ids uuid[], partitions int[], actions text[], types text[],
    versions bigint[])
@remove@
    DELETE FROM @schema@.consumer_gap AS g
     USING unnest($2, $3, $4, $5, $6, $7) AS p (topic, id, number, action, event_type, version)
     WHERE g.consumer_group = $1 AND g.topic = p.topic AND g.topic_id = p.id AND g.partition = p.number
       AND g.action = p.action AND g.event_type = p.event_type AND g.version = p.version
       AND groups && ARRAY[g.consumer_group, '*']::text[];
@removed@
$function$

]);
-- +goose StatementEnd

-- Policies: everybody who has the right to read a table reads all rows, and writes those of the groups that
-- consumer_group_role names. A statement finds the groups of its role once. The owner of the tables needs no row, and
-- neither does a role that may write all data: a restore finds the tables empty.
-- +goose StatementBegin
SELECT outbox_define(current_schema(), fragments => ARRAY[

-- The groups for which the role of the session may write.
'groups', $sql$
    ARRAY(SELECT r.consumer_group FROM @schema@.consumer_group_role AS r
           WHERE r.role = 'public' OR pg_has_role(to_regrole(quote_ident(r.role)), 'USAGE')
          UNION ALL
          SELECT '*' WHERE pg_has_role('pg_write_all_data', 'USAGE'))
$sql$

], definitions => ARRAY[

$policy$
CREATE POLICY event_handled_read ON @schema@.event_handled FOR SELECT USING (true);
CREATE POLICY event_handled_write ON @schema@.event_handled USING (@groups@ && ARRAY[consumer_group, '*']::text[]);
ALTER TABLE @schema@.event_handled ENABLE ROW LEVEL SECURITY
$policy$,
$policy$
CREATE POLICY consumer_start_read ON @schema@.consumer_start FOR SELECT USING (true);
CREATE POLICY consumer_start_write ON @schema@.consumer_start USING (@groups@ && ARRAY[consumer_group, '*']::text[]);
ALTER TABLE @schema@.consumer_start ENABLE ROW LEVEL SECURITY
$policy$,
$policy$
CREATE POLICY consumer_handler_read ON @schema@.consumer_handler FOR SELECT USING (true);
CREATE POLICY consumer_handler_write ON @schema@.consumer_handler
    USING (@groups@ && ARRAY[consumer_group, '*']::text[]);
ALTER TABLE @schema@.consumer_handler ENABLE ROW LEVEL SECURITY
$policy$,
$policy$
CREATE POLICY consumer_gap_read ON @schema@.consumer_gap FOR SELECT USING (true);
CREATE POLICY consumer_gap_write ON @schema@.consumer_gap USING (@groups@ && ARRAY[consumer_group, '*']::text[]);
ALTER TABLE @schema@.consumer_gap ENABLE ROW LEVEL SECURITY
$policy$,
$policy$
CREATE POLICY event_delivery_read ON @schema@.event_delivery FOR SELECT USING (true);
CREATE POLICY event_delivery_write ON @schema@.event_delivery USING (@groups@ && ARRAY[consumer_group, '*']::text[]);
ALTER TABLE @schema@.event_delivery ENABLE ROW LEVEL SECURITY
$policy$,
$policy$
CREATE POLICY event_success_read ON @schema@.event_success FOR SELECT USING (true);
CREATE POLICY event_success_write ON @schema@.event_success USING (@groups@ && ARRAY[consumer_group, '*']::text[]);
ALTER TABLE @schema@.event_success ENABLE ROW LEVEL SECURITY
$policy$,
$policy$
CREATE POLICY event_subscription_read ON @schema@.event_subscription FOR SELECT USING (true);
CREATE POLICY event_subscription_write ON @schema@.event_subscription
    USING (@groups@ && ARRAY[consumer_group, '*']::text[]);
ALTER TABLE @schema@.event_subscription ENABLE ROW LEVEL SECURITY
$policy$,
$policy$
CREATE POLICY event_member_read ON @schema@.event_member FOR SELECT USING (true);
CREATE POLICY event_member_write ON @schema@.event_member USING (@groups@ && ARRAY[consumer_group, '*']::text[]);
ALTER TABLE @schema@.event_member ENABLE ROW LEVEL SECURITY
$policy$,

-- In the tables of relays, worker: or consumer: precedes the name of the group. Other rows are for roles of all groups.
$policy$
CREATE POLICY outbox_cursor_read ON @schema@.outbox_cursor FOR SELECT USING (true);
CREATE POLICY outbox_cursor_write ON @schema@.outbox_cursor USING (
    @groups@ && ARRAY[CASE WHEN starts_with(relay, 'worker:') THEN substr(relay, 8) END, '*']::text[]);
ALTER TABLE @schema@.outbox_cursor ENABLE ROW LEVEL SECURITY
$policy$,
$policy$
CREATE POLICY outbox_lease_read ON @schema@.outbox_lease FOR SELECT USING (true);
CREATE POLICY outbox_lease_write ON @schema@.outbox_lease USING (
    @groups@ && ARRAY[CASE WHEN starts_with(name, 'worker:') THEN substr(name, 8)
                           WHEN starts_with(name, 'consumer:') THEN substr(name, 10) END, '*']::text[]);
ALTER TABLE @schema@.outbox_lease ENABLE ROW LEVEL SECURITY
$policy$,

-- Roles that ALTER DEFAULT PRIVILEGES gives the tables, as in a database where one role migrates and another one works,
-- write for all groups. They may not change for which groups they may write, and call no functions of operators.
$block$
DO $$
DECLARE
    granted record;
BEGIN
    PERFORM @schema@.outbox_revoke_grants('consumer_group_role'), @schema@.outbox_revoke_grants('outbox_mover');
    FOR granted IN
        SELECT a.grantee, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role
          FROM pg_class AS c, aclexplode(c.relacl) AS a
         WHERE c.oid = format('%I.event_delivery', @schema_name@)::regclass
           AND a.privilege_type = 'INSERT' AND a.grantee <> c.relowner
    LOOP
        INSERT INTO @schema@.consumer_group_role (consumer_group, role)
        VALUES ('*', CASE granted.grantee WHEN 0 THEN 'public' ELSE pg_get_userbyid(granted.grantee) END);
        EXECUTE format('GRANT SELECT ON %I.consumer_group_role TO %s', @schema_name@, granted.role);
        EXECUTE format('GRANT EXECUTE ON FUNCTION %1$I.outbox_lock_keys, %1$I.outbox_lock_keys_shared, %1$I.outbox_blocked, '
                       '%1$I.outbox_promote, %1$I.outbox_finish_deliveries, %1$I.outbox_remove_handled, '
                       '%1$I.outbox_remove_deliveries, %1$I.outbox_remove_cursors, %1$I.outbox_remove_member, '
                       '%1$I.outbox_remove_topics, %1$I.outbox_remove_gaps, %1$I.outbox_move_due, %1$I.outbox_cancel TO %2$s', @schema_name@, granted.role);
    END LOOP;
END $$
$block$,

-- Refuses tables that depend on a function or an operator that is not PostgreSQL's own: another role has created it in
-- the schema before these files were applied, and it would run with the rights of every session that writes to them.
$block$
DO $$
DECLARE
    bound text;
BEGIN
    SELECT string_agg(DISTINCT format('%s depends on %s', pg_describe_object(d.classid, d.objid, 0),
                                      pg_describe_object(d.refclassid, d.refobjid, 0)), '; ')
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
     WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = @schema_name@)
       AND c.relname IN ('outbox', 'outbox_delayed', 'outbox_mover', 'outbox_cursor', 'outbox_lease', 'outbox_archiver',
                         'outbox_partitioning', 'outbox_failed',
                         'event_handled', 'consumer_start', 'consumer_handler', 'consumer_gap', 'consumer_pause',
                         'event_subscription', 'event_member', 'event_success', 'event_delivery',
                         'outbox_audit', 'consumer_group_role')
       AND coalesce(p.pronamespace, o.oprnamespace) <> 'pg_catalog'::regnamespace;
    IF bound IS NOT NULL THEN
        RAISE EXCEPTION 'somebody has put code in the place of PostgreSQL''s own before outbox was migrated: %', bound
            USING ERRCODE = 'invalid_object_definition';
    END IF;
END $$
$block$

]);
-- +goose StatementEnd
