package outboxops_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// The statement of an action leaves out a row that a worker is about to claim. The numbers are of the rows that it has
// changed.
func TestBulkCountsWhatItHasChanged(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a transaction that is left open
	h := newFixture(t)
	f := h.operator(t)
	ids := append(h.deliver(t, "", "DD"), h.deliverTo(t, "mail", "SENT", "", "D")...)
	tx, err := h.db.Begin(background)
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(background)) }()
	_, err = tx.Exec(background, h.sql(`SELECT FROM {schema}.event_delivery WHERE id = ANY ($1) FOR UPDATE`), []int64{ids[0], ids[2]})
	require.NoError(t, err)
	topics, handlers := map[string]int{}, map[outboxops.FailureHandler]int{}
	n, err := f.ResolveAll(background, outboxops.FailureFilter{Kind: outboxops.KindDelivery}, outboxops.BulkConfig{Topics: topics, Handlers: handlers}, kim)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(t, map[string]int{"order-events": 1}, topics)
	require.Equal(t, map[outboxops.FailureHandler]int{{Group: "stats", Action: "COUNTED"}: 1}, handlers)
	require.Equal(t, "DRD", h.played(t, ids))
}
