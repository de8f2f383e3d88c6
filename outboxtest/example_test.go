package outboxtest_test

import (
	"context"
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxsql"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
)

// TicketSold is the event of the examples.
type TicketSold struct {
	Seat string
	At   time.Time
}

func (e TicketSold) OccurredAt() time.Time { return e.At }
func (e TicketSold) seat() string          { return e.Seat }

// What a test of yours has: its *testing.T, a migrated database, and the service's events.
var (
	t       *testing.T
	db      *pgxpool.Pool
	sqlDB   *sql.DB
	tickets *outbox.Registry
)

// sell is the code under test.
func sell(ctx context.Context, tx pgx.Tx, rec *outbox.Recorder, seat string, at time.Time) error {
	return rec.Record(ctx, tx, TicketSold{seat, at})
}

// sellSQL is code under test that has a transaction of database/sql.
func sellSQL(ctx context.Context, tx *sql.Tx, rec *outbox.Recorder, seat string, at time.Time) error {
	return outboxsql.Record(ctx, tx, rec, TicketSold{seat, at})
}

// What a transaction recorded can be compared before it commits, so the test rolls back.
func ExampleRequireRecorded() {
	rec, err := outbox.NewRecorder(tickets, outbox.RecorderConfig{})
	require.NoError(t, err)
	tx, err := db.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(t.Context())

	noon := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	require.NoError(t, sell(t.Context(), tx, rec, "A-1", noon))
	outboxtest.RequireRecorded(t.Context(), t, tx, tickets, TicketSold{"A-1", noon})
}

// SQL does the same for transactions of database/sql, and so of GORM, ent, Bun, sqlx and sqlc.
func ExampleSQL() {
	rec, err := outbox.NewRecorder(tickets, outbox.RecorderConfig{})
	require.NoError(t, err)
	tx, err := sqlDB.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	defer tx.Rollback()

	noon := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	require.NoError(t, sellSQL(t.Context(), tx, rec, "A-4", noon))
	outboxtest.RequireRecorded(t.Context(), t, outboxtest.SQL(tx), tickets, TicketSold{"A-4", noon})
}

// Play needs a transaction of pgx. Code that takes one of database/sql gets it inside that one.
func ExamplePlay() {
	rec, err := outbox.NewRecorder(tickets, outbox.RecorderConfig{})
	require.NoError(t, err)
	worker, err := outbox.NewWorker(db, tickets, "played", outbox.WorkerConfig{},
		outboxsql.Handle("SEAT_TAKEN", func(ctx context.Context, tx *sql.Tx, e TicketSold, _ outbox.Metadata) error {
			_, err := tx.ExecContext(ctx, `INSERT INTO seats_taken VALUES ($1)`, e.Seat)
			return err
		}))
	require.NoError(t, err)

	tx, err := db.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(t.Context())
	require.NoError(t, outboxsql.Within(t.Context(), tx, func(tx *sql.Tx) error {
		return sellSQL(t.Context(), tx, rec, "A-5", time.Now())
	}))
	attempts := outboxtest.Play(t.Context(), t, tx, worker)
	require.Equal(t, outboxtest.Done, attempts[0].Outcome)
}

// Deliver calls the handlers of a consumer with an event, without Kafka; DeliverTwice
// shows that a repeated event has no second effect.
func ExampleDeliverTwice() {
	consumer, err := outbox.NewConsumer(db, nil, tickets, "seats", outbox.ConsumerConfig{},
		outbox.Handle("SEAT_TAKEN", func(ctx context.Context, tx pgx.Tx, e TicketSold, _ outbox.Metadata) error {
			_, err := tx.Exec(ctx, `INSERT INTO seats_taken VALUES ($1)`, e.Seat)
			return err
		}))
	require.NoError(t, err)
	require.NoError(t, outboxtest.DeliverTwice(t.Context(), t, consumer, tickets, TicketSold{"A-2", time.Now()}))

	var taken int
	require.NoError(t, db.QueryRow(t.Context(), `SELECT count(*) FROM seats_taken`).Scan(&taken))
	require.Equal(t, 1, taken)
}

// Drain relays what is committed to a broker inside the test.
func ExampleDrain() {
	rec, err := outbox.NewRecorder(tickets, outbox.RecorderConfig{})
	require.NoError(t, err)
	kafka := outboxtest.Kafka(t, "ticket-events")
	require.NoError(t, pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
		return sell(t.Context(), tx, rec, "A-3", time.Now())
	}))
	outboxtest.Drain(t.Context(), t, db, kafka, outbox.RelayConfig{})
	records := outboxtest.Records(t.Context(), t, kafka, "ticket-events", 1)
	fmt.Println(string(records[0].Key))
}

// The examples need a test that runs them.
func TestExamples(running *testing.T) {
	// Not parallel: it sets the variables that the examples share.
	t, db = running, testenv.OtherDatabase(running)
	require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{}))
	sqlDB = stdlib.OpenDBFromPool(db)
	defer sqlDB.Close()
	_, err := db.Exec(t.Context(), `CREATE TABLE seats_taken (seat text NOT NULL)`)
	require.NoError(t, err)
	tickets, err = outbox.NewRegistry("theatre", outbox.Event("acme.ticket.sold.v1", "Ticket", TicketSold.seat))
	require.NoError(t, err)
	ExampleRequireRecorded()
	ExampleSQL()
	ExamplePlay()
	ExampleDeliverTwice()
	ExampleDrain()
}
