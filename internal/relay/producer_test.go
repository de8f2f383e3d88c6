package relay

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The client calls back from a goroutine of its own, where a panic would end the process
// without releasing the lease. It reaches the goroutine that sends, and the client is closed.
func TestPromisePanics(t *testing.T) {
	t.Parallel()
	brokers, bug := testenv.Brokers(t), errors.New("a bug")
	topic := "promise-panics-" + uuid.NewString()
	testenv.CreateTopic(t, brokers, topic, 1)
	for _, records := range []int{1, 3, 20_000} { // more than the client buffers
		cfg := ProducerConfig{Opts: []kgo.Opt{kgo.SeedBrokers(brokers...)}, SendTimeout: time.Minute}
		p := NewProducer(cfg, lease.Leadership{Lease: &lease.Lease{}}, nil)
		require.NoError(t, p.connect())
		crashing := &breaker.Permit{Breaker: &breaker.Breaker{}, Granted: records, Done: func(error) { panic(bug) }}
		crashing.Unreported.Store(int64(records))
		ctx, start := context.Background(), time.Now()
		func() {
			defer func() {
				crash, ok := recover().(contain.Crash)
				require.True(t, ok)
				require.ErrorIs(t, crash, bug)
				require.Contains(t, crash.Error(), "promise", "the stack")
			}()
			f := newFlight(ctx, ctx)
			defer func() { f.end() }()
			f.acks = newAcks(crashing, produced(topic, records), make([]error, records))
			which := make([]int, records)
			_, err := p.send(ctx, ctx, f, make([]envelope.Event, 1), which)
			require.NoError(t, err)
		}()
		require.Less(t, time.Since(start), 30*time.Second, "it waits for no outcome")
		require.Nil(t, p.client)
	}
}

func produced(topic string, n int) []kgo.Record {
	records := make([]kgo.Record, n)
	for i := range records {
		records[i] = kgo.Record{Topic: topic, Value: []byte("{}")}
	}
	return records
}
