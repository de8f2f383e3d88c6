package main

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Commands say how old rows are, and choose them by age, by the clock of the database, also on a host whose clock is
// ahead.
func TestCommandsByAnotherClock(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.vars["KAFKA_BROKERS"] = strings.Join(testenv.Brokers(t), ",")
	d.record(t, "a")
	d.fail(t, "dead", "k")
	d.exec(t, `INSERT INTO {s}.event_subscription (consumer_group) VALUES ('stats')`)
	d.exec(t, `INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset, position, saved_at) VALUES ('stats', 'orders', gen_random_uuid(), 0, 0, 7, now())`)
	d.exec(t, `INSERT INTO {s}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, created_at, updated_at, occurred_at, recorded_at,
		       event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload)
		VALUES (1, 1, 0, 3, now(), now(), now(), now(), now(), gen_random_uuid(), 'PENDING', 'stats', 'a', 's', 't', '/s', 't', 'k', 'application/json', '{}')`)
	d.exec(t, `INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, window_snapshot, highest_id, system_identifier, epoch, created_at)
		SELECT 'default', n, pg_current_snapshot(), pg_current_snapshot(), n, (SELECT system_identifier FROM pg_control_system()), 7, now() - (2 - n) * interval '30 s'
		  FROM generate_series(0, 1) AS n`)
	d.ok(t, "consumer", "pause", "--group", "stats", "--topic", "orders", "--reason", "stock")
	d.change = func(e *env) { e.now = func() time.Time { return time.Now().Add(time.Hour) } }
	wrong := map[string]string{}
	for command, want := range map[string]string{
		"status": "in the last minute about 1 events", "consumers": `(?m)^stats +orders`, "cut status": `(?m)^stats`, "failures list": "dead", "failures count": "dead",
		"failures list --since 5m": "dead", "failures count --since 5m": "dead", "failures retry --since 5m": "1 failure", "audit --since 5m": "pause",
		"replay --since 5m": `(?m)^.*test.thing.happened.v1 +1\b`,
	} {
		a := d.call(t, strings.Fields(command)...)
		if a.code != exitOK || !regexp.MustCompile(want).MatchString(a.out) || regexp.MustCompile(`\b(59m|60m|1h)`).MatchString(a.out) {
			wrong[command] = a.out + a.err
		}
	}
	require.Empty(t, wrong)
}

// The metrics of a relay process age rows by the clock of the database.
func TestRelayMetricsByAnotherClock(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	db := testenv.OtherClock(t, -time.Hour)
	d.db = db
	d.exec(t, `INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, window_snapshot, highest_id, system_identifier, epoch)
		SELECT 'default', 0, pg_current_snapshot(), pg_current_snapshot(), 0, (SELECT system_identifier FROM pg_control_system()), 7`)
	d.exec(t, `INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at)
		VALUES (gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', '{}', 'application/json', now(), now() - interval '10 min')`)
	d.exec(t, `INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at, state, state_at) VALUES ('default', 'there/1/x', 7, now() + interval '1 hour', $1::text::jsonb, now())`,
		`{"epoch": 7, "outages": [{"what": "Kafka", "class": "unreachable", "since": "`+time.Now().Add(-time.Hour-10*time.Minute).UTC().Format(time.RFC3339Nano)+`"}]}`)
	m := newRelayMetrics("")
	cfg := outbox.RelayConfig{Schema: d.schema}
	relay, err := outbox.NewRelay(db, testenv.KafkaOpts([]string{"127.0.0.1:1"}), cfg)
	require.NoError(t, err)
	require.NoError(t, m.watch(relay, db, cfg))
	m.refresh(t.Context())
	require.NoError(t, m.lookErr)
	var x exposition
	m.write(&x, outbox.RelayHealth{})
	for _, name := range []string{"outbox_relay_pending_age_seconds", "outbox_stale_age_seconds", "outbox_outage_age_seconds"} {
		require.Regexp(t, `(?m)^`+name+`\{.*\} 6[0-5]\d(\.\d+)?$`, x.String())
	}
}
