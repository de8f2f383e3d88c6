package itest

import (
	"context"
	"flag"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

var (
	oracleEvents = flag.Int("oracle.events", 0, "how many events TestOracle commits; 0 means 20,000, and 5,000 for make test")
	oracleSeed   = flag.Uint64("oracle.seed", 0, "seed of TestOracle; 0 draws one")
)

// oracleSize returns the number of events that TestOracle commits.
func oracleSize(t *testing.T) int {
	t.Helper()
	switch {
	case *oracleEvents != 0:
		return *oracleEvents
	case testenv.Quick(t):
		return 5_000
	}
	return 20_000
}

// The promises hold for what really happens: many writers under transactions of
// every kind, some of them open all the time, with large events, while the relay is
// stopped and another takes over again and again, one that has a second for each
// statement. A topic comes and goes. None of that excuses a duplicate.
func TestOracle(t *testing.T) {
	t.Parallel()
	testOracle(t, newRelayFixture(t), outbox.RetentionConfig{})
}

// And over partitions whose rows go all the while.
func TestOracleOverPartitions(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	h := newPartitionedFixture(t, 500)
	retention := outbox.RetentionConfig{PublishedFor: 2 * time.Second, CursorsFor: time.Second}
	testOracle(t, h, retention)
	t.Logf("%d rows are left", h.count(t, "outbox")) // all, where writers leave the relay no time for others
	testenv.Run(t, h.relay(t, outbox.RelayConfig{Retention: retention}).Run)
	half := oracleSize(t) / 2
	require.Eventually(t, func() bool { return h.count(t, "outbox") < half }, testenv.Patience, 10*time.Millisecond, "many go")
}

func testOracle(t *testing.T, h *relayFixture, retention outbox.RetentionConfig) {
	testenv.RealBrokers(t)
	v := oracle.Result{Seed: *oracleSeed}
	if v.Seed == 0 {
		v.Seed = rand.Uint64()
	}
	t.Logf("seed %d (repeat with -oracle.seed)", v.Seed)
	f := newOracleFixture(t, h)
	stopRelays := testenv.Run(t, func(ctx context.Context) error {
		f.takeTurns(ctx, t, retention, rand.New(rand.NewPCG(v.Seed, 1<<32)))
		return nil
	})
	stopTopic := testenv.Run(t, func(ctx context.Context) error {
		return f.topics.ComeAndGo(ctx, rand.New(rand.NewPCG(v.Seed, 1<<33)), 10*time.Second, 3*time.Second)
	})
	start := time.Now()
	require.NoError(t, oracle.Write(context.Background(), oracle.Writers{
		DB: h.db, Schema: h.schema, Record: f.record, Seed: v.Seed,
		Events: oracleSize(t), Writers: 24, Keys: 200, Pause: 5 * time.Millisecond, Open: 4,
		Large: 1500, LargeBytes: 900_000,
	}))
	stopTopic()
	f.compare(t, &v, stopRelays)
	v.Seconds = time.Since(start).Seconds()
	t.Logf("a topic came %d times", f.topics.Comings())
	t.Log(v)
	require.NoError(t, v.Err())
	require.Zero(t, h.count(t, "outbox_failed"))
}

// oracleFixture is a relayFixture with one more topic, which comes and goes.
type oracleFixture struct {
	*relayFixture
	topics  *oracle.Topics
	rec     *outbox.Recorder
	hurried *pgxpool.Pool // whose statements may take a second
}

// fleetingEvent is an event of the topic that comes and goes.
type fleetingEvent struct{ oracle.Event }

func newOracleFixture(t *testing.T, h *relayFixture) *oracleFixture {
	t.Helper()
	testenv.CreateTopic(t, h.brokers, h.topic, 3)
	topics, err := oracle.NewTopics(t.Context(), oracle.TopicsConfig{Brokers: h.brokers, Topic: h.topic, Partitions: 3})
	require.NoError(t, err)
	t.Cleanup(topics.Close)
	events, err := outbox.NewRegistry("test",
		outbox.Event("test.oracle.happened.v1", "Key", oracle.Event.Aggregate).Topic(h.topic),
		outbox.Event("test.fleeting.happened.v1", "Key", fleetingEvent.Aggregate).Topic(topics.Fleeting()))
	require.NoError(t, err)
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{Schema: h.schema})
	require.NoError(t, err)
	testenv.Direct(t) // a pooler would not pass the setting on
	hurried := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["statement_timeout"] = "1s" })
	return &oracleFixture{relayFixture: h, topics: topics, rec: rec, hurried: hurried}
}

// record is an oracle.Record.
func (f *oracleFixture) record(ctx context.Context, tx pgx.Tx, events ...oracle.Event) error {
	all := make([]outbox.DomainEvent, len(events))
	for i, e := range events {
		all[i] = e
		if oracle.GoesToFleeting(e) {
			all[i] = fleetingEvent{e}
		}
	}
	return f.rec.Record(ctx, tx, all...)
}

// takeTurns runs two relays and stops one of them every now and then.
func (f *oracleFixture) takeTurns(ctx context.Context, t *testing.T, retention outbox.RetentionConfig, rng *rand.Rand) {
	cfg := outbox.RelayConfig{
		Schema: f.schema, BatchSize: 1 + rng.IntN(200), PollInterval: 20 * time.Millisecond, RetryInterval: 500 * time.Millisecond,
		Retention: retention, Logger: logTo(t, slog.LevelError),
	}
	var relays [2]*outbox.Relay
	var stops [2]func()
	for i, db := range []*pgxpool.Pool{f.db, f.hurried} {
		var err error
		relays[i], err = outbox.NewRelay(db, []kgo.Opt{kgo.SeedBrokers(f.brokers...)}, cfg)
		require.NoError(t, err)
		stops[i] = testenv.Run(t, relays[i].Run)
	}
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration(rng.IntN(1000)) * time.Millisecond):
			i := rng.IntN(2)
			stops[i]()
			stops[i] = testenv.Run(t, relays[i].Run)
		}
	}
	stops[0]()
	stops[1]()
}

// compare waits until no committed event is missing, or no more arrive, and compares.
func (f *oracleFixture) compare(t *testing.T, v *oracle.Result, stopRelays func()) {
	t.Helper()
	ctx := context.Background()
	committed, err := oracle.Committed(ctx, f.db, f.schema)
	require.NoError(t, err)
	missing, progress := len(committed)+1, time.Now()
	for missing > 0 && time.Since(progress) < testenv.Patience/2 {
		if now := f.topics.Missing(committed); now < missing {
			missing, progress = now, time.Now()
		}
		time.Sleep(20 * time.Millisecond)
	}
	stopRelays()
	require.Eventually(t, func() bool {
		caughtUp, err := f.topics.CaughtUp(ctx)
		require.NoError(t, err)
		return caughtUp
	}, testenv.Patience, 10*time.Millisecond)
	arrived, err := f.topics.Arrived()
	require.NoError(t, err)
	v.Compare(committed, arrived)
}
