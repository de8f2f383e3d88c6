package itest

import (
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// slowPrint is how long PostgreSQL may need to find that it cannot print [testenv.Unprintable]:
// seconds, and many of them alongside other tests.
const slowPrint = 4 * testenv.Patience

// fail records events and moves them into outbox_failed: the first of each key waits, and
// the others are parked.
func (h *relayFixture) fail(t *testing.T, events ...oracle.Event) {
	t.Helper()
	h.commit(t, events...)
	_, err := h.db.Exec(background, h.sql(`
		WITH moved AS (DELETE FROM {s}.outbox RETURNING *)
		INSERT INTO {s}.outbox_failed (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type,
		       topic, headers, occurred_at, created_at, size, next_retry_at, status)
		SELECT id, topic || '/' || aggregate_id, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type,
		       topic, headers, occurred_at, created_at, size, now() + id * '1 us'::interval,
		       CASE row_number() OVER (PARTITION BY aggregate_id ORDER BY id) WHEN 1 THEN 'waiting' ELSE 'parked' END
		  FROM moved ORDER BY id`))
	require.NoError(t, err)
}

// spoil gives the failed events of a key and a version a payload that PostgreSQL cannot
// print.
func (h *relayFixture) spoil(t *testing.T, key string, version int) {
	t.Helper()
	tag, err := h.db.Exec(background, h.sql(`UPDATE {s}.outbox_failed SET payload = $3::text::jsonb
		WHERE aggregate_id = $1 AND payload->>'version' = $2::int::text`), key, version, testenv.Unprintable)
	require.NoError(t, err)
	require.EqualValues(t, 1, tag.RowsAffected())
}

// A failed event whose payload PostgreSQL cannot print is dead, and no other event waits
// for it: neither those of other keys, nor those of its own.
func TestUnreadableRowStopsNoRetries(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1)
	reader := h.follow(t)
	first, middle := numbered("first", 1, 3), numbered("middle", 1, 3)
	events := append(append(first, middle...), numbered("good", 1, 40)...)
	for _, key := range []string{"a", "b", "c", "d", "e", "f"} {
		events = append(events, numbered(key, 1, 1)...)
	}
	h.fail(t, events...)
	h.spoil(t, "first", 1)
	h.spoil(t, "middle", 2)

	var mu sync.Mutex
	var dead []outbox.FailedEvent
	log := new(testenv.Buffer)
	cfg := quick
	cfg.Lease = slowPrint
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	cfg.Hooks.Dead = func(e outbox.FailedEvent) {
		mu.Lock()
		defer mu.Unlock()
		dead = append(dead, e)
	}
	testenv.Run(t, h.relay(t, cfg).Run)
	readable := append(append([]oracle.Event{first[1], first[2], middle[0], middle[2]}, events[6:]...), numbered("first", 4, 1)...)
	h.commit(t, readable[len(readable)-1])
	require.Eventually(t, func() bool { return h.statuses(t)["dead"] == 2 }, slowPrint, 10*time.Millisecond)
	requireArrival(t, reader, readable...)
	requireInOrder(t, reader, []oracle.Event{first[1], first[2], readable[len(readable)-1]})
	requireInOrder(t, reader, []oracle.Event{middle[0], middle[2]})
	h.awaitStatuses(t, map[string]int{"dead": 2})
	mu.Lock()
	defer mu.Unlock()
	require.Len(t, dead, 2)
	require.ElementsMatch(t, []string{"first", "middle"}, []string{dead[0].Key, dead[1].Key})
	for _, e := range dead {
		require.Equal(t, "unreadable_row", e.Class)
		require.ErrorContains(t, e.Err, "outbox_failed")
		require.Equal(t, h.topic, e.Topic)
	}
	require.Equal(t, 2, strings.Count(log.String(), "event is dead"))
	require.NotContains(t, log.String(), "PostgreSQL fails")
}

// PostgreSQL needs seconds until it finds that it cannot print a payload, and a relay with a
// short lease does not wait so long. That counts as a retry, and the other events go on.
func TestSlowRowStopsNoRetries(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1)
	reader := h.follow(t)
	slow, others := numbered("slow", 1, 2), numbered("good", 1, 40)
	h.fail(t, append(slow, others...)...)
	h.spoil(t, "slow", 1)
	cfg := quick
	cfg.Retry.MaxRetries, cfg.Lease, cfg.DeliveryTimeout = 2, 1600*time.Millisecond, time.Second
	cfg.Logger = slog.New(slog.DiscardHandler)
	testenv.Run(t, h.relay(t, cfg).Run)
	requireArrival(t, reader, others...)
	requireArrival(t, reader, slow[1])
	h.awaitStatuses(t, map[string]int{"dead": 1})
	rows, err := h.failures(t).List(background, outboxops.FailureFilter{}, outboxops.FailurePage{})
	require.NoError(t, err)
	require.Equal(t, "unreadable_row", rows[0].Class)
	require.ErrorContains(t, rows[0].Err, "deadline exceeded")
	require.Equal(t, 2, rows[0].Retries)
}
