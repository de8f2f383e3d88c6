package main

import (
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/trading/simulator"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// fixture is the program on a schema of the test's own, with its four groups.
type fixture struct {
	*app
	outside *simulator.Simulator
	groups  map[string]*outbox.Consumer
}

// newFixture returns a fixture whose exchange does with orders what choose says. Its groups are
// consumers: the handlers are the same, and a delivery by the test needs neither Kafka nor a
// worker.
func newFixture(t *testing.T, choose func(identifier string) simulator.Behaviour) *fixture {
	t.Helper()
	testenv.Direct(t) // a setting of sessions
	_, schema := testenv.Schema(t)
	f := &fixture{outside: simulator.New(1, choose), groups: map[string]*outbox.Consumer{}}
	address, closeServer, err := serve(t.Context(), f.outside)
	require.NoError(t, err)
	t.Cleanup(closeServer)
	f.app = &app{schema: schema, exchange: address, lease: time.Second, bar: time.Millisecond, log: slog.New(slog.DiscardHandler)}
	f.db = testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
	})
	require.NoError(t, f.wire())
	require.NoError(t, f.migrate(t.Context()))
	consumers, err := f.consumers([]kgo.Opt{kgo.SeedBrokers("127.0.0.1:1")})
	require.NoError(t, err)
	for i, name := range []string{orderExecutor, notifications, backtesting, systemGroup} {
		f.groups[name] = consumers[i]
	}
	return f
}

// decide has a bot decide something, and returns the command that it recorded, as it arrives.
func (f *fixture) decide(t *testing.T) *kgo.Record {
	t.Helper()
	b := bot{f.db, f.bus, time.Minute}
	signal := Signal{ID: 1, Scope: Scope{"ann", "grid", "KRW-BTC"}, Side: "BUY", Quantity: 2}
	require.NoError(t, b.decide(t.Context(), signal, uuid.New()))
	return outboxtest.NewRecord(t.Context(), t, f.events, recorded[CreateOrderAttempt](t, f)[0])
}

// recorded returns the events of a type that were recorded.
func recorded[E outbox.DomainEvent](t *testing.T, f *fixture) []E {
	t.Helper()
	return outboxtest.Recorded[E](t.Context(), t, outboxtest.InSchema(f.db, f.schema), f.events)
}

// deliver delivers a record to a group, and returns the error of its handler.
func (f *fixture) deliver(t *testing.T, group string, record *kgo.Record) error {
	t.Helper()
	require.Contains(t, f.groups[group].Topics(), record.Topic)
	return f.groups[group].Deliver(t.Context(), record)
}
