-- +goose Up

-- A constant default rewrites no row.
ALTER TABLE outbox ADD COLUMN size int NOT NULL DEFAULT 65536;

COMMENT ON COLUMN outbox.size IS
    'Bytes of payload and headers as they are read; the relay reads as many rows at once as its memory has room for. Whoever does not know leaves it to the default.';

ALTER TABLE outbox_failed
    ADD COLUMN size  int          NOT NULL DEFAULT 65536,
    ADD COLUMN place varchar(260) NOT NULL DEFAULT '',
    DROP CONSTRAINT outbox_failed_one_payload,
    ADD CONSTRAINT outbox_failed_one_payload CHECK (
        num_nonnulls(payload, payload_bytes) = 1
        OR num_nonnulls(payload, payload_bytes) = 0 AND coalesce(error_class, '') = 'unreadable_row'),
    DROP CONSTRAINT uk_outbox_failed,
    ADD CONSTRAINT uk_outbox_failed UNIQUE (relay, outbox_id, event_id);

COMMENT ON COLUMN outbox_failed.size IS 'As in outbox.';
COMMENT ON COLUMN outbox_failed.place IS
    'What it waits for: a topic, or a partition as topic/number. Empty: nothing in particular.';
COMMENT ON COLUMN outbox_failed.payload IS
    'As in outbox; neither this nor payload_bytes is set if PostgreSQL could not read the row, which then is in outbox only.';

DROP INDEX idx_outbox_failed_retry;
CREATE INDEX idx_outbox_failed_retry ON outbox_failed (relay, place, next_retry_at, outbox_id) WHERE status IN ('waiting', 'failed');
