package outbox_test

import (
	"context"
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

var (
	oracleEvents = flag.Int("oracle.events", 20000, "how many events TestOracle commits")
	oracleSeed   = flag.Uint64("oracle.seed", 0, "seed of TestOracle; 0 draws one")
)

// The promises hold for what really happens: many writers under transactions of
// every kind, some of them open all the time, while the relay is stopped and
// another takes over again and again. None of that excuses a duplicate.
func TestOracle(t *testing.T) {
	t.Parallel()
	testOracle(t, newRelayFixture(t), outbox.RetentionConfig{})
}

// And over partitions whose rows go all the while.
func TestOracleOverPartitions(t *testing.T) {
	t.Parallel()
	h := newPartitionedFixture(t, 500)
	testOracle(t, h, outbox.RetentionConfig{PublishedFor: 2 * time.Second, Interval: 100 * time.Millisecond, Pause: time.Millisecond})
	require.Less(t, h.count(t, "outbox"), *oracleEvents, "many went")
}

func testOracle(t *testing.T, h *relayFixture, retention outbox.RetentionConfig) {
	testenv.RealBrokers(t)
	v := oracle.Result{Seed: *oracleSeed}
	if v.Seed == 0 {
		v.Seed = rand.Uint64()
	}
	t.Logf("seed %d (repeat with -oracle.seed)", v.Seed)
	reader := h.follow(t)
	stopped := make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		defer close(stopped)
		h.takeTurns(ctx, t, retention, rand.New(rand.NewPCG(v.Seed, 1<<32)))
	}()
	start := time.Now()
	require.NoError(t, oracle.Write(context.Background(), oracle.Writers{
		DB: h.db, Schema: h.schema, Record: h.record, Seed: v.Seed,
		Events: *oracleEvents, Writers: 24, Keys: 200, Pause: 5 * time.Millisecond, Open: 4,
	}))
	v = h.compare(t, reader, v, func() { cancel(); <-stopped })
	v.Seconds = time.Since(start).Seconds()
	t.Logf("%s", v)
	require.NoError(t, v.Err())
	require.Zero(t, h.count(t, "outbox_failed"))
}

// takeTurns runs two relays and stops one of them every now and then.
func (h *relayFixture) takeTurns(ctx context.Context, t *testing.T, retention outbox.RetentionConfig, rng *rand.Rand) {
	cfg := outbox.RelayConfig{BatchSize: 1 + rng.IntN(200), PollInterval: 20 * time.Millisecond, Retention: retention}
	relays := []*outbox.Relay{h.relay(t, cfg), h.relay(t, cfg)}
	stops := []func(){testenv.Run(t, relays[0].Run), testenv.Run(t, relays[1].Run)}
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

// The oracle is worth its name: it finds what is wrong with the cursors that
// others use, under the same writers.
func TestOracleBites(t *testing.T) {
	// Not parallel but for its parts: the wrong cursors go wrong only if the writers are fast.
	for cursor, wrong := range map[string]func(oracle.Result) int{
		"id":                       func(v oracle.Result) int { return v.Lost },
		"id guarded by xmin":       func(v oracle.Result) int { return v.Lost },
		"(xid, id) below xmin":     func(v oracle.Result) int { return v.Inversions },
		"window up to xmin, by id": func(v oracle.Result) int { return v.Inversions },
	} {
		t.Run(cursor, func(t *testing.T) {
			t.Parallel()
			h := newRelayFixture(t)
			reader := h.follow(t)
			cfg := quick
			cfg.BatchSize = 10_000 // larger than any window, whose rest is read by our own statement
			relay := h.relay(t, cfg)
			relay.ReadLike(t, cursor)
			stop := testenv.Run(t, relay.Run)
			v := oracle.Result{Seed: rand.Uint64()}
			require.NoError(t, oracle.Write(context.Background(), oracle.Writers{
				DB: h.db, Schema: h.schema, Record: h.record, Seed: v.Seed,
				Events: 3000, Writers: 24, Keys: 50, Pause: 5 * time.Millisecond,
			}))
			v = h.compareWithin(t, reader, v, stop, time.Second)
			t.Logf("%s", v)
			require.Positive(t, wrong(v), "%s", v)
		})
	}
}
