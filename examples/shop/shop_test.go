package shop

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
)

// The functions between here and the helpers are those of docs/testing.md, letter by
// letter.

var noon = time.Date(2026, 2, 3, 12, 0, 0, 0, time.UTC)

func TestPlaceRecords(t *testing.T) {
	db, rec, events := open(t)
	tx, err := db.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(t.Context())
	require.NoError(t, Place(t.Context(), tx, rec, "order-1", 42_00, noon))
	outboxtest.RequireRecorded(t.Context(), t, tx, events, OrderPlaced{"order-1", 42_00, noon})
	outboxtest.RequireNotRecorded[OrderCanceled](t.Context(), t, tx, events)
}

func TestOrderArrives(t *testing.T) {
	db, rec, _ := open(t)
	kafka := outboxtest.Kafka(t, "order-events") // a broker inside the test
	require.NoError(t, pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
		return Place(t.Context(), tx, rec, "order-1", 42_00, noon)
	}))
	outboxtest.Drain(t.Context(), t, db, kafka, outbox.RelayConfig{})
	records := outboxtest.Records(t.Context(), t, kafka, "order-events", 1)
	require.Equal(t, "order-1", string(records[0].Key))
}

func TestSaleIsCountedOnce(t *testing.T) {
	db, _, events := open(t)
	sales, err := Sales(db, nil, events)
	require.NoError(t, err)
	require.NoError(t, outboxtest.DeliverTwice(t.Context(), t, sales, events, OrderPlaced{"order-1", 42_00, noon}))
	var cents int64
	require.NoError(t, db.QueryRow(t.Context(), `SELECT cents FROM sales WHERE day = $1`, noon).Scan(&cents))
	require.EqualValues(t, 42_00, cents)
}

func TestAllEventsAreRegistered(t *testing.T) {
	_, _, events := open(t)
	outboxtest.RequireAllRegistered(t, events, "./...")
}

// open returns a database with all tables, which ends with the test.
func open(t *testing.T) (*pgxpool.Pool, *outbox.Recorder, *outbox.Registry) {
	t.Helper()
	db := testenv.OtherDatabase(t)
	require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{}))
	_, err := db.Exec(t.Context(), Tables)
	require.NoError(t, err)
	events, err := Events()
	require.NoError(t, err)
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	require.NoError(t, err)
	return db, rec, events
}
