-- +goose Up

-- As in 0003_bounded_reads.sql.
SELECT set_config('lock_timeout', '100ms', true) WHERE current_setting('lock_timeout') = '0';

-- The same id from two sources is two events. A column without a default rewrites no row.
ALTER TABLE event_handled ADD COLUMN event_source varchar(255);

COMMENT ON COLUMN event_handled.event_source IS
    'Where the event is from, which together with its id says which event it is; of a longer source its digest. NULL: the key stands for events of all sources, because a handler chose it, or the row is older than the column.';
COMMENT ON COLUMN event_handled.handled_at IS
    'When it was done; or when another source''s event with the same id was, which is noted beside it and must not outlive it.';

-- Who may note what a group has handled may also renew a note.
-- +goose StatementBegin
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee,
               CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS option
          FROM pg_class AS c, aclexplode(c.relacl) AS a
         WHERE c.oid = 'event_handled'::regclass AND a.privilege_type = 'INSERT' AND a.grantee <> c.relowner
    LOOP
        EXECUTE format('GRANT UPDATE (handled_at) ON event_handled TO %s%s', granted.grantee, granted.option);
    END LOOP;
END $$;
-- +goose StatementEnd
