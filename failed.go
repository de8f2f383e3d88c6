package outbox

// refusal is an event that Kafka will not take, and why.
type refusal struct {
	id    int64 // outbox.id
	class string
	err   error
}

// sqlMoveRefused is sqlMove with refused events: they enter outbox_failed if
// and only if the cursor passes them. A batch that is repeated after a crash
// finds them there already.
const sqlMoveRefused = `
WITH newest AS MATERIALIZED (
    SELECT max(id) AS id FROM {schema}.outbox_cursor WHERE relay = $1::text AND pg_postmaster_start_time() = $10
), lease AS MATERIALIZED (
    SELECT epoch FROM {schema}.outbox_lease WHERE name = $1::text AND holder = $2::text AND epoch = $3 FOR SHARE
), refused AS (
    INSERT INTO {schema}.outbox_failed
           (relay, outbox_id, event_id, event_type, source, aggregate_type, aggregate_id, payload, payload_bytes,
            content_type, topic, partition_key, headers, occurred_at, created_at, status, error_class, last_error)
    SELECT $1::text, o.id, o.event_id, o.event_type, o.source, o.aggregate_type, o.aggregate_id, o.payload, o.payload_bytes,
           o.content_type, o.topic, o.partition_key, o.headers, o.occurred_at, o.created_at, 'failed', r.class, r.error
      FROM newest, lease, unnest($11::bigint[], $12::text[], $13::text[]) AS r (id, class, error)
     CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox WHERE id BETWEEN r.id AND r.id ORDER BY id OFFSET 0) AS o
     WHERE newest.id = $4
     ORDER BY o.id
        ON CONFLICT (relay, outbox_id) DO NOTHING
)
INSERT INTO {schema}.outbox_cursor
       (relay, snapshot, window_snapshot, last_processed_id, highest_id, system_identifier, epoch)
SELECT $1::text, $5::pg_snapshot, $6::pg_snapshot, $7::bigint, $8::bigint, $9::bigint, lease.epoch
  FROM newest, lease
 WHERE newest.id = $4
RETURNING id`

// refusalArgs are the last parameters of sqlMoveRefused.
func refusalArgs(refused []refusal) []any {
	ids := make([]int64, len(refused))
	classes := make([]string, len(refused))
	errs := make([]string, len(refused))
	for i, r := range refused {
		ids[i], classes[i], errs[i] = r.id, r.class, r.err.Error()
	}
	return []any{ids, classes, errs}
}
