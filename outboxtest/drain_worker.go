package outboxtest

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

// DrainWorker runs a worker until all that is committed, and due if it is delayed, has been handled, also what handlers
// record meanwhile, and stops it. It decides by the tables, so another worker of the group may do the work.
// [Play] needs no commit and does not wait.
//
// The test fails if that takes longer than the deadline of ctx, or 30 s if it has none, and at once if a delivery is
// dead; the failure names what is left and why. It fails too if the group is new and, without FromStart, has skipped
// events. Retries are waited for, so give the worker a short RetryWait and PollInterval, and a negative MaxOutage where
// an event is to be dead. A [*sql.DB] is looked at by [SQL]. Tables in another schema than public are those of
// InSchema(db, schema), which must be that of the worker.
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
     UNION ALL
` + sqlDue + `
     WHERE d.due_at <= clock_timestamp()
       AND coalesce(d.topic, split_part(d.event_type, '.', 2) || '-events') = ANY ($3::text[])
)
SELECT * FROM pending ORDER BY status = 'dead' DESC, id LIMIT $2::bigint`

func drainWorker(ctx context.Context, tab table, worker *outbox.Worker) error {
	if tab.own {
		return fmt.Errorf("%s is a transaction: a worker sees what is committed", tab.kind())
	}
	before, err := beforeGroup(ctx, tab, worker)
	if err != nil {
		return err
	}
	err = runUntilNone(ctx, "worker", worker.Run, func(ctx context.Context, limit *int) ([]pending, error) {
		return readPending(ctx, tab.db, completed(sqlUnhandled, tab.schema), worker.Group(), limit, worker.Topics())
	}, nil)
	if err != nil || len(before) == 0 {
		return err
	}
	skipped, err := readPending(ctx, tab.db, completed(sqlSkipped, tab.schema), worker.Group(), before)
	if err != nil || len(skipped) == 0 {
		return err
	}
	return fmt.Errorf("the new group %s has skipped events, as it does without From: outbox.FromStart in its configuration:\n%s",
		worker.Group(), list(skipped))
}

// sqlBeforeGroup reads the events that there are before a group has a position. A delayed one may enter outbox before
// the group has one.
const sqlBeforeGroup = `
SELECT event_id::text, event_type
  FROM (SELECT event_id, event_type, topic FROM {schema}.outbox
         UNION ALL
        SELECT event_id, event_type, topic FROM {schema}.outbox_delayed WHERE due_at <= now()) AS e
 WHERE coalesce(topic, split_part(event_type, '.', 2) || '-events') = ANY ($2::text[])
   AND NOT EXISTS (SELECT FROM {schema}.outbox_cursor WHERE relay = 'worker:' || $1::text)`

// sqlSkipped reads the events that have no delivery to a group, of those that it has a handler for.
const sqlSkipped = `
SELECT o.id, o.event_type, o.aggregate_id, 'skipped', 0, ''
  FROM {schema}.outbox AS o
 WHERE o.event_id = ANY ($2::text[]::uuid[])
   AND NOT EXISTS (SELECT FROM {schema}.event_delivery AS d WHERE d.consumer_group = $1::text AND d.event_id = o.event_id)
 ORDER BY o.id`

// beforeGroup returns the ids of the events that are there before a group, and that the worker has a handler for.
func beforeGroup(ctx context.Context, tab table, worker *outbox.Worker) (ids []string, err error) {
	rows, err := tab.query(ctx, sqlBeforeGroup, worker.Group(), worker.Topics())
	if err != nil {
		return nil, fmt.Errorf("look at what is committed: %w", err)
	}
	var id, eventType string
	_, err = pgx.ForEachRow(rows, []any{&id, &eventType}, func() error {
		if len(worker.Actions(eventType)) > 0 {
			ids = append(ids, id)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look at what is committed: %w", err)
	}
	return ids, nil
}
