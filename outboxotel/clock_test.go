package outboxotel_test

import (
	"testing"
	"time"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdk "go.opentelemetry.io/otel/sdk/trace"
)

// Ages are those by the clock of the database, also on a host whose clock is ahead.
func TestAgesByAnotherClock(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	s.db = testenv.OtherClock(t, -time.Hour)
	s.watch(t)
	s.exec(t, `INSERT INTO {schema}.event_subscription (consumer_group) VALUES ('stats')`)
	s.exec(t, `INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, window_snapshot, highest_id, system_identifier, epoch)
		SELECT r, 0, pg_current_snapshot(), pg_current_snapshot(), 0, (SELECT system_identifier FROM pg_control_system()), 7 FROM unnest('{default,worker:stats}'::text[]) AS r`)
	s.exec(t, `INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at)
		VALUES (gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', '{}', 'application/json', now(), now() - interval '1 min')`)
	s.exec(t, `INSERT INTO {schema}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, created_at, updated_at, occurred_at, recorded_at,
		       event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload)
		SELECT 1, 1, 0, 3, at, at, at, at, at, gen_random_uuid(), 'PENDING', 'stats', 'a', 's', 't', '/s', 't', 'k', 'application/json', '{}'
		  FROM (SELECT now() - interval '1 min') AS n (at)`)
	outage := `{"epoch": 7, "outages": [{"what": "Kafka", "class": "unreachable", "since": "` + time.Now().Add(-time.Hour-time.Minute).UTC().Format(time.RFC3339Nano) + `"}]}`
	s.lead(t, "default", "1 hour", outage)
	m, wrong := s.collect(t), map[string]float64{}
	for _, name := range []string{
		"outbox.relay.pending.age", "outbox.stale.age", "outbox.worker.pending.age", "outbox.worker.backlog.age", "outbox.group.waiting.age", "outbox.outage.age",
	} {
		oldest := 0.0
		for _, p := range m[name].Data.(metricdata.Gauge[float64]).DataPoints {
			oldest = max(oldest, p.Value)
		}
		if oldest < time.Minute.Seconds() || oldest > (time.Minute+testenv.Patience).Seconds() {
			wrong[name] = oldest
		}
	}
	require.Empty(t, wrong)
}
