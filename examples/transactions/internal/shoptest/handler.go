package shoptest

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/transactions/internal/shop"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Handler runs functions as handlers of an event, without Kafka.
type Handler struct {
	*fixture
	t *testing.T
}

// NewHandler returns a Handler of an example, and its store.
func NewHandler(t *testing.T, open Open) (*Handler, shop.Store) {
	t.Helper()
	f := newFixture(t, config(t), open)
	return &Handler{f, t}, f.store
}

// Handle passes a new event to a handler, and returns its error.
func (h *Handler) Handle(handler func(ctx context.Context, tx *sql.Tx) error) error {
	h.t.Helper()
	consumer, err := h.Consumer(outbox.HandlerConfig{}, func(ctx context.Context, tx *sql.Tx, _ shop.OrderPlaced, _ outbox.Metadata) error {
		return handler(ctx, tx)
	})
	require.NoError(h.t, err)
	record, err := h.Recorder.KafkaRecord(h.t.Context(), order("order-0", "tea"))
	require.NoError(h.t, err)
	record.Timestamp = time.Now()
	ctx, cancel := context.WithTimeout(h.t.Context(), testenv.Patience)
	defer cancel()
	return consumer.Deliver(ctx, record)
}

// RequireOrders requires that these are the orders that were committed.
func (h *Handler) RequireOrders(ids ...string) {
	h.t.Helper()
	found := []string{}
	rows, err := h.Pool.Query(h.t.Context(), `SELECT id FROM orders ORDER BY id`)
	require.NoError(h.t, err)
	for rows.Next() {
		var id string
		require.NoError(h.t, rows.Scan(&id))
		found = append(found, id)
	}
	require.NoError(h.t, rows.Err())
	require.ElementsMatch(h.t, ids, found)
}
