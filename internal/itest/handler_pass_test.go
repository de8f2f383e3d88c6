package itest

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// calls notes how often a handler was called for each event.
type calls struct {
	mu sync.Mutex
	of map[string]int
}

func (c *calls) add(event string) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.of[event]++
	return c.of[event]
}

// Events fail whose handler has not used its transaction. Others that share it are committed, and handled only
// once; later events of a failed one's key wait for it. Nothing is handled or noted for an event that has failed.
// The same holds for handlers that fail after their statement, but that others may be handled again.
func TestFailuresBesideOthers(t *testing.T) {
	t.Parallel()
	const keys, of = 40, 10
	cfg := func(f *workerFixture) outbox.HandlerConfig {
		return outbox.HandlerConfig{
			Schema: f.schema, From: outbox.FromStart, Logger: slog.New(slog.DiscardHandler),
			// Longer than it takes to get to all events: a key that becomes free beside a transaction has that
			// repeated.
			Retry: outbox.RetryPolicy{RetryWait: 500 * time.Millisecond, MaxRetryWait: 500 * time.Millisecond},
		}
	}
	for name, start := range map[string]func(*testing.T, *workerFixture, []step, outbox.Handler){
		"worker": func(_ *testing.T, f *workerFixture, steps []step, h outbox.Handler) {
			f.commit(steps...)
			f.start(outbox.WorkerConfig{PollInterval: 20 * time.Millisecond, HandlerConfig: cfg(f)}, h)
		},
		"consumer": func(t *testing.T, f *workerFixture, steps []step, h outbox.Handler) {
			brokers, topic := testenv.Brokers(t), "passed-"+uuid.NewString()
			testenv.CreateTopic(t, brokers, topic, 1)
			testenv.CreateTopic(t, brokers, topic+".dlq", 1)
			var err error
			f.events, err = outbox.NewRegistry("bank", outbox.Event("bank.account.stepped.v1", "Account", step.account).Topic(topic))
			require.NoError(t, err)
			f.rec, err = outbox.NewRecorder(f.events, outbox.RecorderConfig{Schema: f.schema})
			require.NoError(t, err)
			f.commit(steps...)
			relay, err := outbox.NewRelay(f.db, testenv.KafkaOpts(brokers), outbox.RelayConfig{Schema: f.schema})
			require.NoError(t, err)
			testenv.Run(t, relay.Run)
			require.Eventually(t, func() bool { return relay.Health().Works && f.count(`SELECT count(*) FROM {schema}.outbox_cursor`) > 1 }, testenv.Patience, time.Millisecond)
			c, err := outbox.NewConsumer(f.db, testenv.KafkaOpts(brokers), f.events, "readers-"+f.schema, outbox.ConsumerConfig{HandlerConfig: cfg(f)}, h)
			require.NoError(t, err)
			testenv.Run(t, c.Run)
		},
	} {
		for _, after := range []bool{false, true} {
			t.Run(fmt.Sprint(name, after), func(t *testing.T) {
				t.Parallel()
				seed := rand.Uint64()
				t.Logf("seed %d", seed)
				random := rand.New(rand.NewPCG(seed, 0))
				fails := map[string]int{} // how often
				var steps []step
				for n := 1; n <= of; n++ {
					for k := range keys {
						s := step{fmt.Sprint("k", k), n}
						if steps = append(steps, s); random.IntN(12) == 0 {
							fails[fmt.Sprint(s)] = 1 + random.IntN(3)
						}
					}
				}
				f, called := newWorkerFixture(t), &calls{of: map[string]int{}}
				start(t, f, steps, outbox.Handle("DONE", func(ctx context.Context, tx pgx.Tx, s step, _ outbox.Metadata) error {
					fail := called.add(fmt.Sprint(s)) <= fails[fmt.Sprint(s)]
					if fail && !after {
						return errTest
					}
					_, err := tx.Exec(ctx, f.sql(`INSERT INTO {schema}.effect (action, account, n) VALUES ('DONE', $1, $2)`), s.Account, s.N)
					if fail && err == nil {
						err = errTest
					}
					return err
				}))
				f.await(len(steps))
				f.requireOrder()
				require.Equal(t, len(steps), f.count(`SELECT count(*) FROM {schema}.event_handled`))
				for _, s := range steps {
					if !after {
						require.Equal(t, 1+fails[fmt.Sprint(s)], called.of[fmt.Sprint(s)], s)
					}
				}
			})
		}
	}
}
