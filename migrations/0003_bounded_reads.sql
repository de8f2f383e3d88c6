-- +goose Up

-- Nobody waits for long behind a migration that does not get its lock: it fails instead,
-- and can be repeated. A lock_timeout that was set before stays.
SELECT set_config('lock_timeout', '100ms', true) WHERE current_setting('lock_timeout') = '0';

-- Writers do not use this table: the relay and operators wait while its indexes are built.
-- Rows that are there meet the new constraint, because they met the stricter one before;
-- 0005_unreadable_rows.sql validates it, which locks nobody out.
ALTER TABLE outbox_failed
    ADD COLUMN size  int          NOT NULL DEFAULT 65536,
    ADD COLUMN place varchar(260) NOT NULL DEFAULT '',
    DROP CONSTRAINT outbox_failed_one_payload,
    ADD CONSTRAINT outbox_failed_one_payload CHECK (
        num_nonnulls(payload, payload_bytes) = 1
        OR num_nonnulls(payload, payload_bytes) = 0 AND coalesce(error_class, '') = 'unreadable_row') NOT VALID,
    DROP CONSTRAINT uk_outbox_failed,
    ADD CONSTRAINT uk_outbox_failed UNIQUE (relay, outbox_id, event_id);

COMMENT ON COLUMN outbox_failed.size IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.place IS
    'What it waits for: a topic, or a partition as topic/number. Empty: nothing in particular.';
COMMENT ON COLUMN outbox_failed.payload IS
    'As in outbox; neither this nor payload_bytes is set if PostgreSQL could not read the row, which then is in outbox only.';

DROP INDEX idx_outbox_failed_retry;
CREATE INDEX idx_outbox_failed_retry ON outbox_failed (relay, place, next_retry_at, outbox_id) WHERE status IN ('waiting', 'failed');
