package outboxsql_test

import (
	"context"
	"database/sql"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

var (
	background = context.Background()
	noon       = time.Date(2026, 2, 3, 12, 0, 0, 0, time.UTC)
)

// placed is an event.
type placed struct{ Order string }

func (placed) OccurredAt() time.Time { return noon }
func (p placed) order() string       { return p.Order }

// shop is a migrated schema with a table of orders, as a service has it that uses database/sql.
type shop struct {
	pool   *pgxpool.Pool
	db     *sql.DB // of pool
	schema string
	events *outbox.Registry
	rec    *outbox.Recorder
}

func newShop(t testing.TB) *shop {
	t.Helper()
	pool, schema := testenv.Migrated(t)
	s := &shop{pool: pool, db: stdlib.OpenDBFromPool(pool), schema: schema, events: registry(t)}
	t.Cleanup(func() { require.NoError(t, s.db.Close()) })
	s.rec = s.recorder(t, outbox.RecorderConfig{})
	_, err := pool.Exec(background, s.sql(`CREATE TABLE {s}.orders (id text PRIMARY KEY, quantity int)`))
	require.NoError(t, err)
	return s
}

func registry(t testing.TB) *outbox.Registry {
	t.Helper()
	events, err := outbox.NewRegistry("shop", outbox.Event("acme.order.placed.v1", "Order", placed.order).Topic("orders"), outbox.AllowRaw())
	require.NoError(t, err)
	return events
}

func (s *shop) recorder(t testing.TB, cfg outbox.RecorderConfig) *outbox.Recorder {
	t.Helper()
	cfg.Schema = s.schema
	rec, err := outbox.NewRecorder(s.events, cfg)
	require.NoError(t, err)
	return rec
}

// sql puts the schema into a statement.
func (s *shop) sql(query string) string {
	return strings.ReplaceAll(query, "{s}", pgx.Identifier{s.schema}.Sanitize())
}

// begin opens a transaction that rolls back when the test ends.
func (s *shop) begin(t testing.TB) *sql.Tx {
	t.Helper()
	tx, err := s.db.BeginTx(background, nil)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback() })
	return tx
}

// column returns the texts of a query.
func (s *shop) column(t testing.TB, query string) []string {
	t.Helper()
	rows, err := s.pool.Query(background, s.sql(query))
	require.NoError(t, err)
	texts, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return texts
}

// recorded returns the aggregate ids of the events that are committed.
func (s *shop) recorded(t testing.TB) []string {
	t.Helper()
	return s.column(t, `SELECT aggregate_id FROM {s}.outbox ORDER BY id`)
}

// orders returns the orders that are committed.
func (s *shop) orders(t testing.TB) []string {
	t.Helper()
	return s.column(t, `SELECT id FROM {s}.orders ORDER BY id`)
}

// handled returns the actions that are noted as done.
func (s *shop) handled(t testing.TB) []string {
	t.Helper()
	return s.column(t, `SELECT action FROM {s}.event_handled ORDER BY id`)
}
