// Package seed fills the tables of outbox with what a shop has after a quarter of an
// hour, so that the page has something to show. It is for tests and screenshots; no
// relay runs.
package seed

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Order is the id of an aggregate with events of every kind, and Dead the id of its
// failed event that is dead.
const (
	Order = "ord-20418"
	Dead  = 1
)

// Deliveries that [Deliver] makes, by what becomes of them.
const (
	DeadTimeouts = 4 // dead, of class timeout
	DeadBadData  = 2 // dead, of class bad_payload
	DeadInAll    = DeadTimeouts + DeadBadData
)

// Deliver adds a consumer group with workers, stats, whose deliveries of every status there are: of
// the dead ones the first have the ids from 1 on.
func Deliver(ctx context.Context, db *pgxpool.Pool, schema string) error {
	for _, sql := range []string{delivered, begun} {
		if _, err := db.Exec(ctx, strings.ReplaceAll(sql, "{s}", pgx.Identifier{schema}.Sanitize())); err != nil {
			return fmt.Errorf("deliver in %s: %w", schema, err)
		}
	}
	return nil
}

// Work gives the groups of [Deliver] processes that run: stats has workers, whose position moved for a quarter of
// an hour, and mail has a consumer.
func Work(ctx context.Context, db *pgxpool.Pool, schema string) error {
	if _, err := db.Exec(ctx, strings.ReplaceAll(worked, "{s}", pgx.Identifier{schema}.Sanitize()), pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("work in %s: %w", schema, err)
	}
	return nil
}

const worked = `
INSERT INTO {s}.event_subscription (consumer_group, created_at) VALUES ('stats', now() - interval '30 days');
INSERT INTO {s}.event_member (consumer_group, member, from_kafka, started_at, renewed_at, renewed_every, routes)
SELECT g, h, g = 'mail', now() - interval '2 days', now() - interval '3 s', '1 hour', ARRAY[E'loopers.order.created.v1\norder-events\n' || CASE g WHEN 'mail' THEN 'SEND' ELSE 'COUNT_SALES' END]
  FROM (VALUES ('stats', 'shop-6d9f7c5b84-xk2lp/1/51c0aa'), ('stats', 'shop-6d9f7c5b84-9vw4t/1/77d2f0'), ('mail', 'mail-7f5d9b4c66-q8r2m/1/0b91e4')) AS m (g, h);
INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch, created_at)
SELECT 'worker:stats', last_processed_id, snapshot, highest_id, 1, 1, created_at + interval '40 ms' * (1 + id % 5)
  FROM {s}.outbox_cursor WHERE relay = 'default' ORDER BY id`

const delivered = `
INSERT INTO {s}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, last_attempt_at, locked_until, locked_by, created_at, updated_at, processed_at,
       occurred_at, recorded_at, event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id,
       content_type, last_error_code, last_error_message, headers, payload)
SELECT 5000000 + i, hashtextextended('k' || i, 0), CASE WHEN status = 'DEAD' THEN 10 WHEN code IS NOT NULL THEN 3 ELSE 0 END, 10, now() + interval '30 s',
       CASE WHEN code IS NOT NULL THEN now() - interval '1 min' END, CASE WHEN status = 'PROCESSING' THEN now() + interval '1 min' END,
       CASE WHEN status = 'PROCESSING' THEN 'shop-6d9f7c5b84-xk2lp/1' END, now() - make_interval(mins => 3), now() - make_interval(mins => 1),
       CASE WHEN status = 'DONE' THEN now() - interval '1 min' END,
       now() - make_interval(mins => 4), now() - make_interval(mins => 4), gen_random_uuid(), status, 'stats', action, 'order-events',
       'loopers.order.created.v1', 'shop', 'Order', 'ord-' || (20500 + i), 'application/json', code,
       CASE code WHEN 'timeout' THEN 'context deadline exceeded after 5s' WHEN 'bad_payload' THEN 'quantity is -1' END,
       '{"correlationid": "req-5"}', jsonb_build_object('orderId', 20500 + i, 'customer', jsonb_build_object('name', 'Mina Park'))
  FROM (VALUES (1, 'DEAD', 'COUNT_SALES', 'timeout'), (2, 'DEAD', 'COUNT_SALES', 'timeout'), (3, 'DEAD', 'COUNT_SALES', 'timeout'), (4, 'DEAD', 'COUNT_SALES', 'timeout'),
               (5, 'DEAD', 'RESERVE', 'bad_payload'), (6, 'DEAD', 'RESERVE', 'bad_payload'), (7, 'PENDING', 'COUNT_SALES', 'timeout'),
               (8, 'PENDING', 'COUNT_SALES', NULL), (9, 'PROCESSING', 'COUNT_SALES', NULL), (10, 'DONE', 'COUNT_SALES', NULL)) AS d (i, status, action, code)
 ORDER BY i`

const begun = `
INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset, position, saved_at)
SELECT 'mail', 'order-events', '00000000-0000-0000-0000-000000000001', n, 0, 7, now() - interval '20 s' FROM generate_series(0, 2) AS n`

// Fill writes into empty, migrated tables of a schema.
func Fill(ctx context.Context, db *pgxpool.Pool, schema string) error {
	// The cursor's snapshot must see what is sent, and must not see what is pending.
	for _, sql := range []string{sent, cursor, failed, audit, pending} {
		sql = strings.NewReplacer("{s}", pgx.Identifier{schema}.Sanitize(), "{text}", "'"+strings.ReplaceAll(schema, "'", "''")+"'").Replace(sql)
		if err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
			return err
		}); err != nil {
			return fmt.Errorf("fill %s: %w", schema, err)
		}
	}
	return nil
}

// steps are 240 moves in a quarter of an hour: a wave, and an outage of a minute whose
// backlog comes at once. id is the highest of a move, early its age in seconds.
const steps = `
WITH step AS (
    SELECT i, (240 - i) * 3.75 AS early,
           CASE WHEN i BETWEEN 118 AND 133 THEN 0 WHEN i = 134 THEN 4100
                ELSE 240 + 130 * sin(i / 21.0) + 60 * sin(i / 3.7) + (i * 7919) % 53 END AS events
      FROM generate_series(1, 240) AS i
), move AS (
    SELECT i, early, events, 4100000 + (sum(events) OVER (ORDER BY i))::bigint AS id,
           CASE WHEN i = 134 THEN 0.31 ELSE 0.035 + 0.02 * (1 + sin(i / 9.0)) + (i * 104729 % 31) * 0.001 END AS took
      FROM step
)`

// event are columns of outbox for a number i.
const event = `gen_random_uuid(),
       (ARRAY['loopers.order.created.v1','loopers.payment.paid.v1','loopers.product.viewed.v1','loopers.like.created.v1'])[1 + i % 4], 'shop',
       (ARRAY['Order','Payment','Product','Like'])[1 + i % 4], (ARRAY['ord-','pay-','prd-','lik-'])[1 + i % 4] || (20300 + i * 37 % 211),
       jsonb_build_object('orderId', 20300 + i, 'customer', jsonb_build_object('id', 700 + i % 90, 'name', 'Mina Park'),
                          'items', jsonb_build_array(jsonb_build_object('sku', 'SKU-' || 1000 + i % 70, 'quantity', 1 + i % 3)), 'totalAmount', 12900 + i * 100),
       'application/json', jsonb_build_object('correlationid', 'req-' || md5(i::text), 'traceparent', '00-' || md5('t' || i) || '-' || left(md5('s' || i), 16) || '-01')`

const sent = steps + `
INSERT INTO {s}.outbox (id, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, headers, occurred_at, created_at)
SELECT id, ` + event + `, now() - make_interval(secs => early + took), now() - make_interval(secs => early + took) FROM move WHERE events > 0;
INSERT INTO {s}.outbox (id, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, headers, occurred_at, created_at)
SELECT 4099000 + i, gen_random_uuid(), (ARRAY['loopers.order.created.v1','loopers.order.paid.v1','loopers.order.packed.v1','loopers.order.shipped.v1'])[i], 'shop',
       'Order', '` + Order + `', jsonb_build_object('orderId', 20418, 'step', i), 'application/json', NULL,
       now() - make_interval(mins => 45 - 6 * i), now() - make_interval(mins => 45 - 6 * i)
  FROM generate_series(1, 4) AS i;
SELECT setval(format('%I.outbox_id_seq', {text})::regclass, (SELECT max(id) FROM {s}.outbox))`

const cursor = steps + `
INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch, created_at)
SELECT relay, id, pg_current_snapshot(), id, 1, 14, now() - make_interval(secs => early - late)
  FROM move, (VALUES ('default', 0), ('analytics', 0.12)) AS r (relay, late) WHERE events > 0
 ORDER BY i;
INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at, state, state_at, kafka_at) VALUES
    ('default', 'shop-6d9f7c5b84-xk2lp/1/8f3ac1', 14, now() + interval '24 s', '{"epoch": 14, "works": true}', now() - interval '6 s', now() - interval '6 s'),
    ('analytics', 'shop-6d9f7c5b84-9vw4t/1/20bd77', 3, now() + interval '19 s', '{"epoch": 3, "works": true}', now() - interval '11 s', now() - interval '11 s')`

// failed has a dead event of the order above and what is parked behind it, then many of
// an outage and of every status.
const failed = `
INSERT INTO {s}.outbox_failed (relay, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload,
       content_type, headers, occurred_at, created_at, retry_count, last_error, error_class, failed_at, next_retry_at, status, held)
SELECT 'default', id, 'order-events/' || aggregate_id, event_id, event_type, source, aggregate_type, aggregate_id,
       payload || '{"customer": {"id": 731, "name": "Mina Park", "email": "mina@example.com"}, "gift": true, "items": [{"sku": "SKU-1042", "quantity": 2, "price": 8900}, {"sku": "SKU-1007", "quantity": 1, "price": 12900}], "note": "Leave it with the neighbour on the second floor, please."}',
       content_type, '{"correlationid": "req-7c1e90", "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}', occurred_at, created_at,
       CASE id WHEN 4099003 THEN 10 ELSE 0 END,
       CASE id WHEN 4099003 THEN 'INVALID_RECORD: This record has failed the validation on the broker and hence be rejected.' END,
       CASE id WHEN 4099003 THEN 'invalid_record' END,
       created_at + interval '1 s', created_at + interval '17 min', CASE id WHEN 4099003 THEN 'dead' ELSE 'parked' END, id = 4099003
  FROM {s}.outbox WHERE aggregate_id = '` + Order + `' AND id >= 4099003 ORDER BY id;
INSERT INTO {s}.outbox_failed (relay, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload,
       content_type, headers, occurred_at, created_at, retry_count, last_error, error_class, failed_at, next_retry_at, status, resolved_at, resolved_by, resolution)
SELECT 'default', id, split_part(event_type, '.', 2) || '-events/' || aggregate_id, event_id, event_type, source, aggregate_type, aggregate_id, payload,
       content_type, headers, occurred_at, created_at, (ARRAY[10, 3, 0, 0, 10])[k], (ARRAY[
         'MESSAGE_TOO_LARGE: The request included a message larger than the max message size the server will accept.',
         'INVALID_RECORD: This record has failed the validation on the broker and hence be rejected.',
         'UNKNOWN_TOPIC_OR_PARTITION: This server does not host this topic-partition.', NULL,
         'POLICY_VIOLATION: Request parameters do not satisfy the configured policy.'])[k],
       (ARRAY['message_too_large', 'invalid_record', 'unknown_topic', NULL, 'policy_violation'])[k],
       created_at + interval '1 s', CASE k WHEN 1 THEN created_at + interval '2 min' ELSE now() + interval '90 s' END,
       (ARRAY['dead', 'failed', 'waiting', 'parked', 'resolved'])[k],
       CASE k WHEN 5 THEN now() - interval '4 min' END, CASE k WHEN 5 THEN 'jiwoo.han' END,
       CASE k WHEN 5 THEN 'A test order of the new policy, see OPS-1184.' END
  FROM (SELECT *, (ARRAY[1, 2, 3, 4, 4, 5, 3, 4])[1 + row_number() OVER (ORDER BY id) % 8] AS k
          FROM {s}.outbox WHERE aggregate_id <> '` + Order + `' ORDER BY id LIMIT 116) AS o ORDER BY id`

const audit = `
INSERT INTO {s}.outbox_audit (created_at, operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id, payload)
SELECT now() - make_interval(mins => a.ago), a.operator, a.action, a.reason, f.relay, f.parking_key,
       CASE WHEN a.action IN ('hold', 'release') THEN NULL ELSE f.id END, CASE WHEN a.action NOT IN ('hold', 'release') THEN f.outbox_id END,
       CASE WHEN a.action NOT IN ('hold', 'release') THEN f.event_id END, CASE a.action WHEN 'edit' THEN '{"orderId": 20418, "step": 3, "gift": "yes"}'::jsonb END
  FROM {s}.outbox_failed AS f, (VALUES
       (24, 'jiwoo.han', 'retry', 'The schema registry was restarted; the record should be valid now.'),
       (19, 'relay default', 'retry', 'revived: invalid_record'),
       (12, 'sora.lim', 'hold', 'Nothing of this order may go out before we know what the courier has.'),
       (8, 'sora.lim', 'edit', 'gift must be a boolean, see OPS-1190.')) AS a (ago, operator, action, reason)
 WHERE f.id = 1 ORDER BY a.ago DESC;
INSERT INTO {s}.outbox_audit (created_at, operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id)
SELECT resolved_at, resolved_by, 'resolve', resolution, relay, parking_key, id, outbox_id, event_id FROM {s}.outbox_failed WHERE status = 'resolved'`

const pending = `
INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, headers, occurred_at, created_at)
SELECT ` + event + `, now() - interval '200 ms', now() - interval '180 ms' FROM generate_series(1, 23) AS i`
