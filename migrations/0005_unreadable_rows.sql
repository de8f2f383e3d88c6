-- +goose Up

-- As in 0003_bounded_reads.sql.
SELECT set_config('lock_timeout', '100ms', true) WHERE current_setting('lock_timeout') = '0';

-- Looks at each row, and nobody waits for it.
ALTER TABLE outbox_failed VALIDATE CONSTRAINT outbox_failed_one_payload;

-- Retention keeps the rows of outbox whose events no relay could read, until an operator
-- has decided about them. While the index is built, the relay cannot add failed events.
CREATE INDEX idx_outbox_failed_unreadable ON outbox_failed (outbox_id)
 WHERE error_class = 'unreadable_row' AND status <> 'resolved';

-- A recorder says how large an event is, so who may fill the other columns may fill this
-- one.
-- +goose StatementBegin
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee,
               CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS option
          FROM pg_attribute AS c, aclexplode(c.attacl) AS a
         WHERE c.attrelid = 'outbox'::regclass AND c.attname = 'payload' AND a.privilege_type = 'INSERT'
    LOOP
        EXECUTE format('GRANT INSERT (size) ON outbox TO %s%s', granted.grantee, granted.option);
    END LOOP;
END $$;
-- +goose StatementEnd
