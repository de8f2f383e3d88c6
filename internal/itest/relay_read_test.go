package itest

import (
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
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
