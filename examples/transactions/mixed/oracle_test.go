// Package mixed_test checks what arrives when several database libraries record events at the
// same time.
package mixed_test

import (
	"context"
	"database/sql"
	"flag"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq" // the driver postgres
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/transactions/internal/shoptest"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

var (
	oracleEvents = flag.Int("oracle.events", 5000, "how many events TestOracleOfMixedWriters commits")
	oracleSeed   = flag.Uint64("oracle.seed", 0, "seed of TestOracleOfMixedWriters; 0 draws one")
)

// TestMain fails if a goroutine is left, but for the one that GORM starts for a cache of prepared
// statements and never ends.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("gorm.io/gorm/internal/lru.NewLRU[...].func1"))
}

// The promises hold whatever library a transaction belongs to, and if several write events of the
// same key in turn: pgx, database/sql with pgx and with lib/pq, GORM, and ent's driver. The writers are those
// of TestOracle, and relays are stopped again and again.
func TestOracleOfMixedWriters(t *testing.T) {
	v := oracle.Result{Seed: *oracleSeed}
	if v.Seed == 0 {
		v.Seed = rand.Uint64()
	}
	t.Logf("seed %d (repeat with -oracle.seed)", v.Seed)
	f := newFixture(t)
	reader, err := oracle.Follow(f.brokers, f.topic, nil)
	require.NoError(t, err)
	t.Cleanup(reader.Close)
	stopRelays := testenv.Run(t, func(ctx context.Context) error { return f.alternate(ctx, t, rand.New(rand.NewPCG(v.Seed, 1<<32))) })
	libraries := f.libraries(t)
	start := time.Now()
	require.NoError(t, oracle.Write(context.Background(), oracle.Writers{
		DB: f.db, Schema: f.schema, Libraries: libraries, Seed: v.Seed,
		Events: *oracleEvents, Writers: 5 * len(libraries), Keys: 200, Pause: 5 * time.Millisecond, Open: len(libraries),
		Large: 1500, LargeBytes: 900_000,
	}))
	committed, err := oracle.Committed(t.Context(), f.db, f.schema)
	require.NoError(t, err)
	f.await(t, reader, committed)
	stopRelays()
	ends, err := oracle.Ends(t.Context(), f.brokers, f.topic)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return reader.CaughtUp(ends) }, testenv.Patience, 10*time.Millisecond)
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	v.Compare(committed, arrived)
	v.Seconds = time.Since(start).Seconds()
	t.Log(v)
	require.NoError(t, v.Err())
}

// fixture is a migrated schema, a topic of its own, and a recorder for events that go there.
type fixture struct {
	db      *pgxpool.Pool
	schema  string
	topic   string
	brokers []string
	rec     *outbox.Recorder
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{Schema: schema}))
	f := &fixture{db: db, schema: schema, topic: "mixed-" + uuid.NewString(), brokers: testenv.RealBrokers(t)}
	testenv.CreateTopic(t, f.brokers, f.topic, 3)
	events, err := outbox.NewRegistry("test", outbox.Event("test.oracle.happened.v1", "Key", oracle.Event.Aggregate).Topic(f.topic))
	require.NoError(t, err)
	f.rec, err = outbox.NewRecorder(events, outbox.RecorderConfig{Schema: schema})
	require.NoError(t, err)
	return f
}

// libraries returns each library with connections of its own.
func (f *fixture) libraries(t *testing.T) []oracle.Library {
	t.Helper()
	pgxDB := stdlib.OpenDBFromPool(testenv.Pool(t, nil))
	pqDB, err := sql.Open("postgres", shoptest.ForPQ(t, f.db.Config().ConnString()))
	require.NoError(t, err)
	gormSQL, entSQL := stdlib.OpenDBFromPool(testenv.Pool(t, nil)), stdlib.OpenDBFromPool(testenv.Pool(t, nil))
	for _, db := range []*sql.DB{pgxDB, pqDB, gormSQL, entSQL} {
		t.Cleanup(func() { require.NoError(t, db.Close()) })
	}
	gormDB, err := gorm.Open(postgres.New(postgres.Config{Conn: gormSQL}), &gorm.Config{Logger: logger.Discard})
	require.NoError(t, err)
	return []oracle.Library{
		oracle.Pgx(f.db, func(ctx context.Context, tx pgx.Tx, events ...oracle.Event) error {
			return f.rec.Record(ctx, tx, domainEvents(events)...)
		}),
		sqlLibrary{pgxDB, f.rec},
		sqlLibrary{pqDB, f.rec},
		gormLibrary{gormDB, f.rec},
		entLibrary{entsql.OpenDB(dialect.Postgres, entSQL), f.rec},
	}
}

func domainEvents(events []oracle.Event) []outbox.DomainEvent {
	all := make([]outbox.DomainEvent, len(events))
	for i, e := range events {
		all[i] = e
	}
	return all
}

// alternate runs two relays and stops one of them every now and then.
func (f *fixture) alternate(ctx context.Context, t *testing.T, rng *rand.Rand) error {
	cfg := outbox.RelayConfig{
		Schema: f.schema, BatchSize: 1 + rng.IntN(200), PollInterval: 20 * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
	}
	var stops [2]func()
	for ctx.Err() == nil {
		i := rng.IntN(2)
		if stops[i] != nil {
			stops[i]()
		}
		relay, err := outbox.NewRelay(f.db, testenv.KafkaOpts(f.brokers), cfg)
		if err != nil {
			return err
		}
		stops[i] = testenv.Run(t, relay.Run)
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration(rng.IntN(1000)) * time.Millisecond):
		}
	}
	for _, stop := range stops {
		if stop != nil {
			stop()
		}
	}
	return nil
}

// await waits until no committed event is missing, or no more arrive.
func (f *fixture) await(t *testing.T, reader *oracle.Reader, committed map[string]struct{}) {
	t.Helper()
	missing, progress := len(committed)+1, time.Now()
	for missing > 0 && time.Since(progress) < testenv.Patience/2 {
		if now := reader.Missing(committed); now < missing {
			missing, progress = now, time.Now()
		}
		time.Sleep(20 * time.Millisecond)
	}
}
