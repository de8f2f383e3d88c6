package cursor_test

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/relay"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/internal/wakeup"
	"github.com/outboxgo/outbox/internal/watch"
)

// The oracle is worth its name: it finds what is wrong with the cursors that
// others use, under the same writers.
func TestOracleBites(t *testing.T) {
	testenv.Long(t)
	// Not parallel but for its parts: the wrong cursors go wrong only if the writers are fast.
	for name, wrong := range map[string]func(oracle.Result) int{
		"id":                       func(v oracle.Result) int { return v.Lost },
		"id guarded by xmin":       func(v oracle.Result) int { return v.Lost },
		"(xid, id) below xmin":     func(v oracle.Result) int { return v.Inversions },
		"window up to xmin, by id": func(v oracle.Result) int { return v.Inversions },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newBittenFixture(t)
			engine := f.engine(t)
			i := slices.IndexFunc(otherCursors, func(c otherCursor) bool { return c.name == name })
			otherCursors[i].replace(t, engine.Cursors())
			stop := testenv.Run(t, engine.Run)
			v := oracle.Result{Seed: rand.Uint64()}
			require.NoError(t, oracle.Write(context.Background(), oracle.Writers{
				DB: f.db, Schema: f.schema, Record: f.record, Seed: v.Seed,
				Events: 3000, Writers: 24, Keys: 50, Pause: 5 * time.Millisecond,
			}))
			f.compare(t, &v, stop)
			t.Logf("%s", v)
			require.Positive(t, wrong(v), "%s", v)
		})
	}
}

// bittenFixture has events that are recorded, and a topic in which they arrive.
type bittenFixture struct {
	db            *pgxpool.Pool
	schema, topic string
	brokers       []string
	rec           *outbox.Recorder
	reader        *oracle.Reader
}

func newBittenFixture(t *testing.T) *bittenFixture {
	t.Helper()
	f := &bittenFixture{topic: "test-" + uuid.NewString(), brokers: testenv.Brokers(t)}
	f.db, f.schema = testenv.Migrated(t)
	events, err := outbox.NewRegistry("test", outbox.Event("test.oracle.happened.v1", "Key", oracle.Event.Aggregate).Topic(f.topic))
	require.NoError(t, err)
	f.rec, err = outbox.NewRecorder(events, outbox.RecorderConfig{Schema: f.schema})
	require.NoError(t, err)
	f.reader, err = oracle.Follow(f.brokers, f.topic, nil)
	require.NoError(t, err)
	t.Cleanup(f.reader.Close)
	return f
}

// engine returns a relay that polls often. Its retention begins after 10 minutes, when the test has ended.
func (f *bittenFixture) engine(t *testing.T) *relay.Relay {
	t.Helper()
	const deliveryTimeout = 10 * time.Second
	producer, err := relay.ProducerOpts(testenv.KafkaOpts(f.brokers), deliveryTimeout)
	require.NoError(t, err)
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	return relay.New(relay.Config{
		DB: f.db, Kafka: producer, Hub: wakeup.Of(f.db, f.schema), Logger: log,
		Alerts: watch.Config{Settings: watch.Settings{}.WithDefaults(), Deliver: func(context.Context, watch.Alert) error { return nil }},
		Rules: relay.Rules{
			Schema: f.schema, Name: "default", PollInterval: 10 * time.Millisecond, SendTimeout: 15 * time.Second, Lease: 30 * time.Second,
			BatchSize:     10_000, // larger than any window: the rest of a window is read by a statement of ours
			RetryInterval: time.Second, RetryWait: time.Second, MaxRetryWait: time.Minute,
			Breaker: breaker.Rules{Window: 100, FailureRate: 0.5, OpenFor: time.Second, Trials: 1},
		},
	})
}

// record is an oracle.Record.
func (f *bittenFixture) record(ctx context.Context, tx pgx.Tx, events ...oracle.Event) error {
	all := make([]outbox.DomainEvent, len(events))
	for i, e := range events {
		all[i] = e
	}
	return f.rec.Record(ctx, tx, all...)
}

// compare waits until no committed event is missing, or none has arrived for a second, and the reader has read to
// the end of the topic; then it compares.
func (f *bittenFixture) compare(t *testing.T, v *oracle.Result, stop func()) {
	t.Helper()
	ctx := context.Background()
	committed, err := oracle.Committed(ctx, f.db, f.schema)
	require.NoError(t, err)
	missing, progress := len(committed)+1, time.Now()
	for missing > 0 && time.Since(progress) < time.Second {
		if now := f.reader.Missing(committed); now < missing {
			missing, progress = now, time.Now()
		}
		time.Sleep(20 * time.Millisecond)
	}
	stop()
	ends, err := oracle.Ends(ctx, f.brokers, f.topic)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return f.reader.CaughtUp(ends) }, testenv.Patience, 10*time.Millisecond)
	arrived, err := f.reader.Arrived()
	require.NoError(t, err)
	v.Compare(committed, arrived)
}
