-- +goose Up

-- As in 0003_bounded_reads.sql.
SELECT set_config('lock_timeout', '100ms', true) WHERE current_setting('lock_timeout') = '0';

-- Alerts, metrics and operators count what has failed, which may be a million rows. They
-- find out which kinds there are and stop counting each at 10,000, so all that they need
-- is in the index. While the indexes are built, the relay cannot change failed events.
CREATE INDEX idx_outbox_failed_kinds ON outbox_failed (relay, status, event_type, error_class, failed_at);
CREATE INDEX idx_outbox_failed_held ON outbox_failed (relay, parking_key, status)
 WHERE held AND status IN ('waiting', 'failed', 'parked', 'dead');

-- The heads of a key, among all that is parked behind one.
CREATE INDEX idx_outbox_failed_heads ON outbox_failed (relay, parking_key, outbox_id) WHERE status IN ('waiting', 'failed');

-- Deaths in the order of time, for alerts; and those of a class, for RetryDeadAfter.
CREATE INDEX idx_outbox_failed_deaths ON outbox_failed (next_retry_at, id) WHERE status = 'dead';
CREATE INDEX idx_outbox_failed_dead_class ON outbox_failed (relay, error_class, next_retry_at) WHERE status = 'dead';
