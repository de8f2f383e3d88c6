-- +goose Up

-- As in 0003_bounded_reads.sql.
SELECT set_config('lock_timeout', '100ms', true) WHERE current_setting('lock_timeout') = '0';

-- Columns without a default rewrite no row. Processes of the release before leave them as they are: a lock that they know nothing
-- of is that of an epoch that is over.
ALTER TABLE outbox_lease
    ADD COLUMN locked_epoch bigint,
    ADD COLUMN exclusive_at   timestamptz;

COMMENT ON COLUMN outbox_lease.locked_epoch IS
    'The epoch whose holder has an advisory lock, too. If it is that of the lease and the lock is free, the process is gone, or its connection.';
COMMENT ON COLUMN outbox_lease.exclusive_at IS
    'Who had the lease before was taken for gone before it had expired, and may send until then, if it is not. Nothing is given up until then.';
