package itest

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

// exactlyFixture is a relay that sends exactly once to a topic that refuses large events.
type exactlyFixture struct {
	*relayFixture
	cfg outbox.RelayConfig
}

func newExactlyFixture(t *testing.T) *exactlyFixture {
	t.Helper()
	testenv.Long(t)
	testenv.RealBrokers(t)
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 3, "max.message.bytes", "3000")
	cfg := quick
	cfg.ExactlyOnce, cfg.BatchSize, cfg.Lease = h.topic+"-cursor", 50, 4*time.Second
	cfg.DeliveryTimeout = 2 * time.Second
	cfg.Retry = outbox.RetryPolicy{MaxRetries: 3, RetryWait: 50 * time.Millisecond, MaxRetryWait: 200 * time.Millisecond}
	return &exactlyFixture{h, cfg}
}

// cuttable are the options of a process that can be killed: its connections to Kafka are cut.
func (f *exactlyFixture) process(t *testing.T, cfg outbox.RelayConfig) (kill func()) {
	t.Helper()
	dialer, ctx := &brokenDialer{}, context.Background()
	cfg.Schema, cfg.Logger = f.schema, logTo(t, slog.LevelError)
	relay, err := outbox.NewRelay(f.db, append(testenv.KafkaOpts(f.brokers), kgo.Dialer(dialer.dial)), cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	return sync.OnceFunc(func() {
		dialer.breakAll()
		cancel()
		require.NoError(t, <-ended)
	})
}

// A reader of committed records sees each event once, in the order of its key, although processes are killed in the
// middle of transactions, and Kafka refuses some events, whose retries are under way then, too.
func TestExactlyOnce(t *testing.T) {
	t.Parallel()
	f := newExactlyFixture(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	reader := f.follow(t)
	var all, refused []oracle.Event
	version := map[string]int64{}
	kill := f.process(t, f.cfg)
	defer func() { kill() }()
	for round := range 15 {
		for range 20 {
			var events []oracle.Event
			for range 1 + rng.IntN(10) {
				key := fmt.Sprintf("key-%d", rng.IntN(20))
				version[key]++
				e := oracle.Event{ID: uuid.NewString(), Key: key, Version: version[key]}
				if rng.IntN(100) == 0 {
					e.Filler = random(5000)
					refused = append(refused, e)
				} else {
					all = append(all, e)
				}
				events = append(events, e)
			}
			f.commit(t, events...)
			time.Sleep(time.Duration(rng.IntN(5)) * time.Millisecond)
		}
		if round%3 == 2 {
			kill()
			kill = f.process(t, f.cfg)
		}
	}
	require.NotEmpty(t, refused)
	requireArrival(t, reader, all...)
	f.requireOnce(t, reader, all)
}

// requireOnce requires that exactly these events have arrived, once and in the order of their keys.
func (f *exactlyFixture) requireOnce(t *testing.T, reader *oracle.Reader, want []oracle.Event) {
	t.Helper()
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	got := map[string][]string{}
	for _, e := range arrived {
		got[e.Key] = append(got[e.Key], fmt.Sprintf("%d %s", e.Version, e.ID))
	}
	expected := map[string][]string{}
	for _, e := range want {
		expected[e.Key] = append(expected[e.Key], fmt.Sprintf("%d %s", e.Version, e.ID))
	}
	require.Equal(t, expected, got)
}

// A relay that is told to stop leaves nothing open, and the next one goes on behind it. Its position is confirmed.
func TestExactlyOnceRestarts(t *testing.T) {
	t.Parallel()
	f := newExactlyFixture(t)
	reader := f.follow(t)
	var all []oracle.Event
	for i := range 5 {
		stop := testenv.Run(t, f.relay(t, f.cfg).Run)
		events := numbered("key", 1+i*100, 100)
		f.commit(t, events...)
		all = append(all, events...)
		requireArrival(t, reader, all...)
		require.Eventually(t, func() bool { return f.relayStatus(t, "default").Pending == 0 }, testenv.Patience, 5*time.Millisecond)
		stop()
		var confirmed bool
		sql := strings.ReplaceAll(`SELECT confirmed IS NULL AND batch > 0 FROM {schema}.outbox_cursor ORDER BY id DESC LIMIT 1`, "{schema}", `"`+f.schema+`"`)
		require.NoError(t, f.db.QueryRow(background, sql).Scan(&confirmed))
		require.True(t, confirmed)
	}
	f.requireOnce(t, reader, all)
}
