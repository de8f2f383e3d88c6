package itest

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// After a restore without sequences no event that fails is lost: neither one that is tried again, nor one with a
// permanent error, nor one that cannot be read. The log has the statement that sets the sequence.
func TestFailedEventsWhileSequenceIsBehind(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	s.exec(t, `INSERT INTO {s}.event_delivery (id, position, attempt_count, max_attempts, next_retry_at, created_at, updated_at, processed_at, occurred_at, recorded_at,
		       event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload)
		SELECT n, n, 1, 1, now(), now(), now(), now(), now(), now(), gen_random_uuid(), 'DONE', 'restored', 'COUNTED', 'orders', 'a.b.c.v1', 'shop', 'T', '1', 'application/json', '{}'
		  FROM generate_series(1, 60) AS n`)
	const again, permanent, unreadable = 20, 10, 10
	var log testenv.Buffer
	cfg := s.config(t)
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, m outbox.Metadata) error {
		switch {
		case e.Product == "again" && m.Attempt == 1:
			return errPlay
		case e.Product == "permanent":
			return outbox.Permanent(errPlay)
		}
		return nil
	})).Run)
	for n := range again {
		s.send(t, s.sale("again", n+1))
	}
	for n := range permanent {
		s.send(t, s.sale("permanent", n+1))
	}
	for range unreadable {
		r := s.saleRecord(uuid.NewString(), []byte(`{`))
		r.Key = []byte("unreadable")
		s.send(t, r)
	}
	s.awaitJournal(t, "COUNTED", "again", again)
	s.awaitStatuses(t, "", fmt.Sprint("DEAD ", unreadable))
	require.Equal(t, permanent, s.number(t, `SELECT count(*)::int FROM {s}.event_delivery WHERE status = 'DEAD' AND action = 'COUNTED'`))
	s.deadLetters(t, permanent+unreadable)
	require.Contains(t, log.String(), "event_delivery_id_seq")
	require.Contains(t, log.String(), "SELECT setval(")
}
