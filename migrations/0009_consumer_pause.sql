-- +goose Up

-- As in 0003_bounded_reads.sql.
SELECT set_config('lock_timeout', '100ms', true) WHERE current_setting('lock_timeout') = '0';

CREATE TABLE consumer_pause (
    consumer_group varchar(255) NOT NULL,
    topic          varchar(249) NOT NULL,
    operator       varchar(100) NOT NULL,
    reason         text         NOT NULL,
    paused_at      timestamptz  NOT NULL DEFAULT now(),
    CONSTRAINT consumer_pause_pkey PRIMARY KEY (consumer_group, topic)
);

COMMENT ON TABLE consumer_pause IS
    'What operators have paused. All members of a group read it every few seconds, and handle nothing of it until the row is gone.';
COMMENT ON COLUMN consumer_pause.consumer_group IS 'As in event_handled.';
COMMENT ON COLUMN consumer_pause.topic IS 'The topic that is paused; empty: all that the group reads.';
COMMENT ON COLUMN consumer_pause.operator IS 'Who paused it.';
COMMENT ON COLUMN consumer_pause.reason IS 'The operator''s note.';
COMMENT ON COLUMN consumer_pause.paused_at IS 'When it was done.';

ALTER TABLE outbox_audit ADD COLUMN consumer_group varchar(255);

COMMENT ON TABLE outbox_audit IS 'What operators did about failed events and consumer groups, and why.';
COMMENT ON COLUMN outbox_audit.action IS 'retry, resolve, edit, hold or release; pause or resume of a consumer group.';
COMMENT ON COLUMN outbox_audit.relay IS 'The relay whose event or key it is; empty for a consumer group.';
COMMENT ON COLUMN outbox_audit.parking_key IS 'Topic, a slash, and the record key. For a consumer group both may be empty.';
COMMENT ON COLUMN outbox_audit.consumer_group IS 'The consumer group that was paused or resumed; NULL for all else.';

-- Who may read what a group has handled may also read what is paused: consumers have to.
-- +goose StatementBegin
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee,
               CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS option
          FROM pg_class AS c, aclexplode(c.relacl) AS a
         WHERE c.oid = 'event_handled'::regclass AND a.privilege_type = 'SELECT' AND a.grantee <> c.relowner
    LOOP
        EXECUTE format('GRANT SELECT ON consumer_pause TO %s%s', granted.grantee, granted.option);
    END LOOP;
END $$;
-- +goose StatementEnd
