package outboxtest

import (
	"context"
	"fmt"

	"github.com/outboxgo/outbox"
)

// DrainWorker runs a worker until all that is committed has been handled, also what handlers record
// meanwhile, and stops it. It decides by the tables, so another worker of the group may do the work.
// [Play] needs no commit and does not wait.
//
// The test fails if that takes longer than the deadline of ctx, or 30 s if it has none, and at once if a delivery is
// dead; the failure names what is left and why. Retries are waited for, so give the worker a short RetryWait and
// PollInterval, and a negative MaxOutage where an event is to be dead. A [*sql.DB] is looked at by [SQL]. Tables in
// another schema than public are those of InSchema(db, schema), which must be that of the worker.
func DrainWorker(ctx context.Context, t T, db DB, worker *outbox.Worker) {
	t.Helper()
	ctx, cancel := patiently(ctx)
	defer cancel()
	if err := drainWorker(ctx, newTable(db), worker); err != nil {
		t.Fatalf("outboxtest: %v", err)
	}
}

// sqlUnhandled reads what a group has not come to yet, and what is open of its deliveries.
const sqlUnhandled = `
WITH at AS MATERIALIZED (
    SELECT c.* FROM pg_control_system() AS s,
           (SELECT * FROM {schema}.outbox_cursor WHERE relay = 'worker:' || $1::text ORDER BY id DESC LIMIT 1) AS c
     WHERE c.system_identifier = s.system_identifier
), pending AS (
    SELECT o.id, o.event_type, o.aggregate_id, '' AS status, 0 AS retries, '' AS problem
      FROM {schema}.outbox AS o
     WHERE coalesce(o.topic, split_part(o.event_type, '.', 2) || '-events') = ANY ($3::text[])
       AND NOT EXISTS (SELECT FROM at
                        WHERE pg_visible_in_snapshot(o.xid, at.snapshot)
                           OR pg_visible_in_snapshot(o.xid, at.window_snapshot) AND o.id <= at.last_processed_id)
     UNION ALL
    SELECT d.position, d.event_type, d.aggregate_id, lower(d.status), greatest(d.attempt_count - 1, 0),
           pg_catalog.concat_ws(': ', d.action, d.last_error_code, d.last_error_message)
      FROM {schema}.event_delivery AS d
     WHERE d.consumer_group = $1::text AND d.status <> 'DONE' AND d.resolved_at IS NULL
)
SELECT * FROM pending ORDER BY status = 'dead' DESC, id LIMIT $2::bigint`

func drainWorker(ctx context.Context, tab table, worker *outbox.Worker) error {
	if tab.own {
		return fmt.Errorf("%s is a transaction: a worker sees what is committed", tab.kind())
	}
	return runUntilNone(ctx, "worker", worker.Run, func(ctx context.Context, limit *int) ([]pending, error) {
		return readPending(ctx, tab.db, completed(sqlUnhandled, tab.schema), worker.Group(), limit, worker.Topics())
	}, nil)
}
