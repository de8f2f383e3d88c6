package itest

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// insertUnprintable adds an event that the relay cannot read.
func (h *relayFixture) insertUnprintable(t *testing.T, key string) (id int64, eventID string) {
	t.Helper()
	testenv.AllowUnprintable(t, h.db, h.schema)
	require.NoError(t, h.db.QueryRow(background, h.sql(`
		INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at)
		VALUES (gen_random_uuid(), 'test.oracle.happened.v1', 's', 'Key', $1, $2::text::jsonb, 'application/json', $3, now())
		RETURNING id, event_id::text`), key, testenv.Unprintable, h.topic).Scan(&id, &eventID))
	return id, eventID
}

// A row that PostgreSQL cannot print is dead at once, with an error that names it. It
// stops nothing, whether the window is large or not. The later events of its key wait if
// dead events hold their keys.
func TestUnreadableRow(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	for name, cfg := range map[string]outbox.RelayConfig{
		"in a small window, holding its key": {BatchSize: 100, HoldDead: true},
		"in a large window":                  {BatchSize: 3},
	} {
		t.Run(name, func(t *testing.T) { // not parallel: it keeps a processor busy for seconds
			h := newRelayFixture(t)
			reader := h.follow(t)
			before, other, after := numbered("a", 1, 2), numbered("b", 1, 5), numbered("a", 3, 2)
			h.commit(t, slices.Concat(before, other[:2])...)
			id, eventID := h.insertUnprintable(t, "a")
			h.commit(t, slices.Concat(other[2:], after)...)
			cfg.PollInterval, cfg.RetryInterval = 20*time.Millisecond, 50*time.Millisecond
			log := new(testenv.Buffer)
			cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
			testenv.Run(t, h.relay(t, cfg).Run)

			require.Eventually(t, func() bool { return h.statuses(t)["dead"] == 1 }, slowPrint, 10*time.Millisecond)
			requireArrival(t, reader, other...)
			arriving := before
			if !cfg.HoldDead {
				arriving = slices.Concat(before, after)
			}
			requireArrival(t, reader, arriving...)
			row, err := h.db.Query(background, h.sql(`
				SELECT status, held, error_class, last_error, payload IS NULL AND payload_bytes IS NULL AS bare, parking_key
				  FROM {s}.outbox_failed WHERE outbox_id = $1`), id)
			require.NoError(t, err)
			failed, err := pgx.CollectExactlyOneRow(row, pgx.RowToMap)
			require.NoError(t, err)
			require.Contains(t, failed["last_error"], fmt.Sprintf("row %d of outbox, event %s: column payload cannot be read: ", id, eventID))
			delete(failed, "last_error")
			require.Equal(t, map[string]any{"status": "dead", "held": cfg.HoldDead, "error_class": "unreadable_row", "bare": true, "parking_key": h.topic + "/a"}, failed)
			require.Contains(t, log.String(), "event is dead")
			if cfg.HoldDead {
				h.awaitStatuses(t, map[string]int{"dead": 1, "parked": 2})
			}
			requireInOrder(t, reader, other)
			requireInOrder(t, reader, arriving)
		})
	}
}

// A row that is larger than any record stops nothing. The relay does not read it, and counts its retries, also those of
// operators. The row that says so has its payload and its size.
func TestHugeRowStopsNoRelay(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]outbox.RelayConfig{
		"in a small window, holding its key": {BatchSize: 100, HoldDead: true},
		"in a large window":                  {BatchSize: 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newRelayFixture(t)
			testenv.CreateTopic(t, h.brokers, h.topic, 1)
			reader := h.follow(t)
			before, other, after := numbered("a", 1, 2), numbered("b", 1, 5), numbered("a", 3, 2)
			h.commit(t, slices.Concat(before, other[:2])...)
			const size = 17 << 20
			h.exec(t, `
				INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, topic, payload_bytes, content_type, occurred_at)
				VALUES (gen_random_uuid(), 'test.oracle.happened.v1', 'test', 'Key', 'a', $1, $2, 'application/octet-stream', now())`,
				h.topic, []byte(strings.Repeat("x", size)))
			h.commit(t, slices.Concat(other[2:], after)...)
			cfg.PollInterval, cfg.RetryInterval, cfg.Retry = 10*time.Millisecond, 20*time.Millisecond, outbox.RetryPolicy{MaxRetries: 1, RetryWait: time.Millisecond}
			cfg.Logger = slog.New(slog.DiscardHandler)
			var dead atomic.Int32
			cfg.Hooks.Dead = func(outbox.FailedEvent) { dead.Add(1) }
			testenv.Run(t, h.relay(t, cfg).Run)

			arriving := before
			if !cfg.HoldDead {
				arriving = slices.Concat(before, after)
			}
			requireArrival(t, reader, slices.Concat(other, arriving)...)
			h.awaitDead(t, 1, &dead)
			rows, err := h.failures(t).List(background, outboxops.FailureFilter{Statuses: []string{"dead"}}, outboxops.FailurePage{})
			require.NoError(t, err)
			require.Len(t, rows, 1)
			require.Equal(t, "message_too_large", rows[0].Class)
			require.ErrorContains(t, rows[0].Err, fmt.Sprintf("%d bytes as printed, at most %d are sent", size, 16<<20))
			require.Equal(t, 1, h.countWhere(t, fmt.Sprintf(`SELECT count(*) FROM {s}.outbox_failed WHERE octet_length(payload_bytes) = %d AND size = %[1]d`, size)))
			require.NoError(t, h.failures(t).Retry(background, rows[0].ID, outboxops.AuditInfo{Operator: "kim", Reason: "the topic takes more now"}))
			h.awaitDead(t, 2, &dead)
			if cfg.HoldDead {
				h.awaitStatuses(t, map[string]int{"dead": 1, "parked": 2})
			}
			requireInOrder(t, reader, other)
			requireInOrder(t, reader, arriving)
		})
	}
}

// awaitDead waits until events have died so often, and one is dead.
func (h *relayFixture) awaitDead(t *testing.T, times int32, died *atomic.Int32) {
	t.Helper()
	require.Eventually(t, func() bool { return died.Load() == times && h.statuses(t)["dead"] == 1 }, testenv.Patience, 10*time.Millisecond)
}
