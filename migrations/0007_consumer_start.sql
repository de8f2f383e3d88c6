-- +goose Up

CREATE TABLE consumer_start (
    consumer_group varchar(255) NOT NULL,
    topic          varchar(249) NOT NULL,
    topic_id       uuid         NOT NULL,
    partition      int          NOT NULL,
    start_offset   bigint,
    position       bigint,
    saved_at       timestamptz  NOT NULL DEFAULT now(),
    lost           bigint       NOT NULL DEFAULT 0,
    lost_at        timestamptz,
    CONSTRAINT consumer_start_pkey PRIMARY KEY (consumer_group, topic, topic_id, partition),
    CONSTRAINT consumer_start_partition CHECK (partition >= -1 AND (partition = -1) = (start_offset IS NULL))
);

COMMENT ON TABLE consumer_start IS
    'Where consumer groups begin to read, because Kafka cannot say whether a group is new. A partition that is not listed was added later, and is read from its beginning.';
COMMENT ON COLUMN consumer_start.consumer_group IS 'As in event_handled.';
COMMENT ON COLUMN consumer_start.topic IS 'Name of the topic.';
COMMENT ON COLUMN consumer_start.topic_id IS
    'Kafka''s id of the topic: one that is deleted and created again has another. Zero if the topic did not exist when the group first looked for it.';
COMMENT ON COLUMN consumer_start.partition IS 'Number of the partition; -1 says only that the topic is listed.';
COMMENT ON COLUMN consumer_start.start_offset IS 'Offset with which the group begins.';
COMMENT ON COLUMN consumer_start.position IS
    'Offset of the next record to handle, saved once a minute; NULL until the group has begun with the partition. It counts only if Kafka has no committed offset.';
COMMENT ON COLUMN consumer_start.saved_at IS 'When position was saved.';
COMMENT ON COLUMN consumer_start.lost IS 'Offsets that Kafka had removed before the group came to them.';
COMMENT ON COLUMN consumer_start.lost_at IS 'When the group last found that some were.';

-- Who may note what a group has handled may also note where it reads.
-- +goose StatementBegin
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT a.privilege_type AS privilege,
               CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee,
               CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS option
          FROM pg_class AS c, aclexplode(c.relacl) AS a
         WHERE c.oid = 'event_handled'::regclass AND a.privilege_type IN ('SELECT', 'INSERT') AND a.grantee <> c.relowner
    LOOP
        EXECUTE format('GRANT %s ON consumer_start TO %s%s',
                       CASE granted.privilege WHEN 'INSERT' THEN 'INSERT, UPDATE, DELETE' ELSE 'SELECT' END, granted.grantee, granted.option);
    END LOOP;
END $$;
-- +goose StatementEnd
