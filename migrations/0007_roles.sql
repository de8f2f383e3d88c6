-- +goose Up

-- Which roles may write for which consumer groups, and a check that nobody has put code into the tables.

-- Nobody waits for long behind a migration that does not get its lock: it fails instead, and can be repeated. A
-- lock_timeout that was set before stays.
SELECT pg_catalog.set_config('lock_timeout', '100ms', true)
 WHERE pg_catalog.current_setting('lock_timeout') OPERATOR(pg_catalog.=) '0';

CREATE TABLE consumer_group_role (
    consumer_group varchar(255) NOT NULL,
    role           name         NOT NULL,
    CONSTRAINT consumer_group_role_pkey PRIMARY KEY (consumer_group, role)
);

COMMENT ON TABLE consumer_group_role IS
    'Which roles may write for which consumer groups, in addition to the owner of the tables and members of '
    'pg_write_all_data.';
COMMENT ON COLUMN consumer_group_role.consumer_group IS 'As in event_handled; * stands for all groups, and for relays.';
COMMENT ON COLUMN consumer_group_role.role IS 'A role, and with it its members; public stands for all roles.';

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
CREATE POLICY event_handled_write ON @schema@.event_handled USING (@groups@ && ARRAY[consumer_group, '*']::varchar[]);
ALTER TABLE @schema@.event_handled ENABLE ROW LEVEL SECURITY
$policy$,
$policy$
CREATE POLICY consumer_start_read ON @schema@.consumer_start FOR SELECT USING (true);
CREATE POLICY consumer_start_write ON @schema@.consumer_start USING (@groups@ && ARRAY[consumer_group, '*']::varchar[]);
ALTER TABLE @schema@.consumer_start ENABLE ROW LEVEL SECURITY
$policy$,
$policy$
CREATE POLICY consumer_handler_read ON @schema@.consumer_handler FOR SELECT USING (true);
CREATE POLICY consumer_handler_write ON @schema@.consumer_handler
    USING (@groups@ && ARRAY[consumer_group, '*']::varchar[]);
ALTER TABLE @schema@.consumer_handler ENABLE ROW LEVEL SECURITY
$policy$,
$policy$
CREATE POLICY consumer_gap_read ON @schema@.consumer_gap FOR SELECT USING (true);
CREATE POLICY consumer_gap_write ON @schema@.consumer_gap USING (@groups@ && ARRAY[consumer_group, '*']::varchar[]);
ALTER TABLE @schema@.consumer_gap ENABLE ROW LEVEL SECURITY
$policy$,
$policy$
CREATE POLICY event_delivery_read ON @schema@.event_delivery FOR SELECT USING (true);
CREATE POLICY event_delivery_write ON @schema@.event_delivery USING (@groups@ && ARRAY[consumer_group, '*']::varchar[]);
ALTER TABLE @schema@.event_delivery ENABLE ROW LEVEL SECURITY
$policy$,
$policy$
CREATE POLICY event_success_read ON @schema@.event_success FOR SELECT USING (true);
CREATE POLICY event_success_write ON @schema@.event_success USING (@groups@ && ARRAY[consumer_group, '*']::varchar[]);
ALTER TABLE @schema@.event_success ENABLE ROW LEVEL SECURITY
$policy$,
$policy$
CREATE POLICY event_subscription_read ON @schema@.event_subscription FOR SELECT USING (true);
CREATE POLICY event_subscription_write ON @schema@.event_subscription
    USING (@groups@ && ARRAY[consumer_group, '*']::varchar[]);
ALTER TABLE @schema@.event_subscription ENABLE ROW LEVEL SECURITY
$policy$,
$policy$
CREATE POLICY event_member_read ON @schema@.event_member FOR SELECT USING (true);
CREATE POLICY event_member_write ON @schema@.event_member USING (@groups@ && ARRAY[consumer_group, '*']::varchar[]);
ALTER TABLE @schema@.event_member ENABLE ROW LEVEL SECURITY
$policy$,

-- In the tables of relays, worker: or consumer: precedes the name of the group. Other rows are for roles of all groups.
$policy$
CREATE POLICY outbox_cursor_read ON @schema@.outbox_cursor FOR SELECT USING (true);
CREATE POLICY outbox_cursor_write ON @schema@.outbox_cursor USING (
    @groups@ && ARRAY[CASE WHEN starts_with(relay, 'worker:') THEN substr(relay, 8) END, '*']::varchar[]);
ALTER TABLE @schema@.outbox_cursor ENABLE ROW LEVEL SECURITY
$policy$,
$policy$
CREATE POLICY outbox_lease_read ON @schema@.outbox_lease FOR SELECT USING (true);
CREATE POLICY outbox_lease_write ON @schema@.outbox_lease USING (
    @groups@ && ARRAY[CASE WHEN starts_with(name, 'worker:') THEN substr(name, 8)
                           WHEN starts_with(name, 'consumer:') THEN substr(name, 10) END, '*']::varchar[]);
ALTER TABLE @schema@.outbox_lease ENABLE ROW LEVEL SECURITY
$policy$,

-- Roles that ALTER DEFAULT PRIVILEGES gives the tables, as in a database where one role migrates and another one works,
-- write for all groups. They may not change for which groups they may write, and call no functions of operators.
$block$
DO $$
DECLARE
    granted record;
BEGIN
    PERFORM @schema@.outbox_revoke_grants('consumer_group_role');
    FOR granted IN
        SELECT a.grantee, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role
          FROM pg_class AS c, aclexplode(c.relacl) AS a
         WHERE c.oid = format('%I.event_delivery', @schema_name@)::regclass
           AND a.privilege_type = 'INSERT' AND a.grantee <> c.relowner
    LOOP
        INSERT INTO @schema@.consumer_group_role (consumer_group, role)
        VALUES ('*', CASE granted.grantee WHEN 0 THEN 'public' ELSE pg_get_userbyid(granted.grantee) END);
        EXECUTE format('GRANT SELECT ON %I.consumer_group_role TO %s', @schema_name@, granted.role);
        EXECUTE format('GRANT EXECUTE ON FUNCTION %1$I.outbox_lock_keys, %1$I.outbox_lock_keys_shared, '
                       '%1$I.outbox_promote, %1$I.outbox_finish_deliveries TO %2$s', @schema_name@, granted.role);
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
       AND c.relname IN ('outbox', 'outbox_cursor', 'outbox_lease', 'outbox_partitioning', 'outbox_failed',
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
