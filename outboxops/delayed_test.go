package outboxops_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
)

// Delayed events are listed in the order in which they are due, page by page. A cancelled one is gone and audited.
func TestDelayed(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	delayed, err := outboxops.NewDelayed(f.db, outboxops.DelayedConfig{Schema: f.schema})
	require.NoError(t, err)
	status, err := delayed.Status(background)
	require.NoError(t, err)
	require.Zero(t, status)
	f.exec(t, `INSERT INTO {schema}.outbox_delayed (due_at, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		SELECT now() + make_interval(hours => (10 - n) / 2), gen_random_uuid(), 'acme.order.due.v1', 'shop', 'Order', n::text, to_jsonb(n), 'application/json', now()
		  FROM generate_series(1, 10) AS n ORDER BY n`)
	f.exec(t, `UPDATE {schema}.outbox_delayed SET due_at = now() - interval '1 minute' WHERE aggregate_id = '10'`)
	f.exec(t, `UPDATE {schema}.outbox_delayed SET rejected_at = now(), rejection = '23505: taken' WHERE aggregate_id = '5'`)
	status, err = delayed.Status(background)
	require.NoError(t, err)
	require.Equal(t, []int{9, 1}, []int{status.Waiting, status.Rejected})
	require.InDelta(t, time.Minute, status.Late, float64(30*time.Second))

	var ids []string
	var page outboxops.DelayedPage
	var all []outboxops.DelayedEvent
	for page.Limit = 4; ; {
		events, err := delayed.List(background, page)
		require.NoError(t, err)
		if len(events) == 0 {
			break
		}
		for _, e := range events {
			ids = append(ids, e.AggregateID)
		}
		all = append(all, events...)
		last := events[len(events)-1]
		page.After, page.AfterID = last.DueAt, last.ID
	}
	require.Equal(t, []string{"10", "9", "7", "8", "6", "3", "4", "1", "2"}, ids)
	require.Equal(t, []string{"order-events", "10", "application/json", "acme.order.due.v1"}, []string{all[0].Topic, all[0].Key, all[0].ContentType, all[0].Type})
	rejected, err := delayed.List(background, outboxops.DelayedPage{Rejected: true})
	require.NoError(t, err)
	require.Len(t, rejected, 1)
	require.Equal(t, "23505: taken", rejected[0].Rejection)
	require.False(t, rejected[0].RejectedAt.IsZero())

	why := outboxops.AuditInfo{Operator: "kim", Reason: "the order was paid"}
	n, err := delayed.Cancel(background, []uuid.UUID{uuid.MustParse(all[0].EventID), uuid.New()}, why)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	failures, err := outboxops.NewFailures(f.db, outboxops.FailuresConfig{Schema: f.schema})
	require.NoError(t, err)
	audit, err := failures.Audit(background, outboxops.FailureID{}, outboxops.AuditPage{})
	require.NoError(t, err)
	require.Len(t, audit, 1)
	require.Equal(t, []string{"cancel", "kim", "order-events", "10", all[0].EventID}, []string{audit[0].Action, audit[0].Operator, audit[0].Topic, audit[0].Key, audit[0].EventID})
	var payload string
	require.NoError(t, f.db.QueryRow(background, fmt.Sprintf(`SELECT payload::text FROM %q.outbox_audit`, f.schema)).Scan(&payload))
	require.Equal(t, "10", payload)

	_, err = delayed.Cancel(background, nil, outboxops.AuditInfo{Operator: "kim"})
	require.Error(t, err)
	_, err = delayed.Cancel(background, make([]uuid.UUID, 1001), why)
	require.ErrorContains(t, err, "too many ids")
	_, err = delayed.List(background, outboxops.DelayedPage{Limit: 1001})
	require.Error(t, err)
	_, err = outboxops.NewDelayed(nil, outboxops.DelayedConfig{})
	require.ErrorIs(t, err, outbox.ErrNilArgument)
}
