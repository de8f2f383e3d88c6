package itest

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

const traceParent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// The process that leads calls the hook once for each event that was sent, with what
// metrics and traces need.
func TestRelayHooks(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	before := time.Now().Add(-time.Second)
	ctx := outbox.WithTraceParent(background, traceParent)
	events := numbered("a", 1, 3)
	require.NoError(t, pgx.BeginFunc(ctx, h.db, func(tx pgx.Tx) error { return h.record(ctx, tx, events...) }))
	plain := numbered("b", 1, 1)
	h.commit(t, plain...)

	var mu sync.Mutex
	var leading []bool
	var sent []string
	cfg := quick
	cfg.Hooks = outbox.RelayHooks{
		Leading: func(l bool) {
			mu.Lock()
			defer mu.Unlock()
			leading = append(leading, l)
		},
		Sent: func(b outbox.SentBatch) {
			mu.Lock()
			defer mu.Unlock()
			require.False(t, b.Retried)
			require.Zero(t, b.Failed+b.Waiting)
			require.Positive(t, b.Took)
			n := 0
			for e := range b.All() {
				n++
				sent = append(sent, e.Key()+" "+e.TraceParent())
				require.Equal(t, []string{"test.oracle.happened.v1", h.topic}, []string{e.Type(), e.Topic()})
				require.True(t, e.RecordedAt().After(before) && e.RecordedAt().Before(time.Now().Add(time.Second)), e.RecordedAt())
				require.Positive(t, e.OutboxID())
				require.Len(t, e.ID(), 36)
				require.Positive(t, e.Size())
			}
			require.Equal(t, b.Events, n)
		},
	}
	stop := testenv.Run(t, h.relay(t, cfg).Run)
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(sent) == 4
	}, testenv.Patience, 5*time.Millisecond)
	stop()
	require.Equal(t, []string{"a " + traceParent, "a " + traceParent, "a " + traceParent, "b "}, sent)
	require.Equal(t, []bool{true, false}, leading)
}

// Events that Kafka rejects count as failed, those behind them as waiting, and those that
// are sent in the end as retried.
func TestSentHookOfFailures(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	testenv.RealBrokers(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1, "max.message.bytes", "2000")
	big := oracle.Event{ID: numbered("x", 1, 1)[0].ID, Key: "a", Version: 1, Filler: random(4000)}
	h.commit(t, append([]oracle.Event{big}, numbered("a", 2, 2)...)...)
	h.commit(t, numbered("b", 1, 2)...)
	var mu sync.Mutex
	var sum, retried outbox.SentBatch
	cfg := quick
	cfg.Hooks.Sent = func(b outbox.SentBatch) {
		mu.Lock()
		defer mu.Unlock()
		to := &sum
		if b.Retried {
			to = &retried
		}
		to.Events, to.Failed, to.Waiting = to.Events+b.Events, to.Failed+b.Failed, to.Waiting+b.Waiting
		n := 0
		for e, class := range b.NotTaken() {
			n++
			require.Equal(t, []string{h.topic, "a", "message_too_large"}, []string{e.Topic(), e.Key(), class})
		}
		require.Equal(t, b.Failed, n)
	}
	testenv.Run(t, h.relay(t, cfg).Run)
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return sum.Events == 2 && retried.Failed > 0
	}, testenv.Patience, 5*time.Millisecond)
	h.setTopic(t, "max.message.bytes", "100000")
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return retried.Events == 3
	}, testenv.Patience, 5*time.Millisecond)
	require.Equal(t, []int{2, 1, 2}, []int{sum.Events, sum.Failed, sum.Waiting})
}

// The context of Recording is what TraceParent reads, and its end hears the error.
func TestRecordingHook(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	var ends []error
	hooks := outbox.RecorderHooks{Recording: func(ctx context.Context, events []outbox.DomainEvent) (context.Context, func(error)) {
		require.Len(t, events, 1)
		return outbox.WithTraceParent(ctx, traceParent), func(err error) { ends = append(ends, err) }
	}}
	events, err := outbox.NewRegistry("test", outbox.Event("test.oracle.happened.v1", "Key", oracle.Event.Aggregate))
	require.NoError(t, err)
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{Schema: h.schema, Hooks: hooks})
	require.NoError(t, err)
	e := numbered("a", 1, 1)[0]
	require.NoError(t, pgx.BeginFunc(background, h.db, func(tx pgx.Tx) error { return rec.Record(background, tx, e) }))
	require.NoError(t, rec.Queue(background, &pgx.Batch{}, e))
	require.ErrorIs(t, rec.Queue(background, &pgx.Batch{}, nil), outbox.ErrNilArgument)
	require.Len(t, ends, 3)
	require.NoError(t, errors.Join(ends[:2]...))
	require.ErrorIs(t, ends[2], outbox.ErrNilArgument)
	var stored string
	require.NoError(t, h.db.QueryRow(background, `SELECT headers->>'traceparent' FROM `+pgx.Identifier{h.schema, "outbox"}.Sanitize()).Scan(&stored))
	require.Equal(t, traceParent, stored)
}

// The end of Recording is called however the recording ends, and a panic goes on.
func TestRecordingHookEnds(t *testing.T) {
	t.Parallel()
	var ends []error
	hooks := outbox.RecorderHooks{Recording: func(ctx context.Context, _ []outbox.DomainEvent) (context.Context, func(error)) {
		return ctx, func(err error) { ends = append(ends, err) }
	}}
	for name, end := range map[string]func(){"panic": func() { panic("headers") }, "Goexit": runtime.Goexit} {
		events, err := outbox.NewRegistry("test", outbox.Event("test.oracle.happened.v1", "Key", oracle.Event.Aggregate))
		require.NoError(t, err)
		rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{Hooks: hooks, Headers: func(context.Context, outbox.DomainEvent) map[string]string {
			end()
			return nil
		}})
		require.NoError(t, err)
		ends = nil
		recovered := make(chan any, 1)
		go func() {
			defer func() { recovered <- recover() }()
			_ = rec.Queue(background, &pgx.Batch{}, numbered("a", 1, 1)[0])
		}()
		if got := <-recovered; name == "panic" {
			require.Equal(t, "headers", got)
		} else {
			require.Nil(t, got)
		}
		require.Len(t, ends, 1, name)
		require.Error(t, ends[0], name)
	}
}

// Lag counts what is not handled, and knows a partition in which nothing ever was.
func TestConsumerLag(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 2)
	release := make(chan struct{})
	c := s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, outbox.HandleNoTx("WAIT", func(ctx context.Context, e sale, m outbox.Metadata) error {
		<-release
		return nil
	}))
	lag := func() (records []int64) {
		lags, err := c.Lag(background)
		require.NoError(t, err)
		for i, l := range lags {
			require.Equal(t, []any{s.topic, int32(i)}, []any{l.Topic, l.Partition})
			records = append(records, l.Records())
		}
		return records
	}
	require.Empty(t, lag(), "before it runs")
	s.send(t, s.saleRecord("1", oneSale), s.saleRecord("2", oneSale), s.saleRecord("3", oneSale)) // to partition 0
	stop := testenv.Run(t, c.Run)
	require.Eventually(t, func() bool { return slices.Equal([]int64{3, 0}, lag()) }, testenv.Patience, 10*time.Millisecond)
	close(release)
	require.Eventually(t, func() bool { return slices.Equal([]int64{0, 0}, lag()) }, testenv.Patience, 10*time.Millisecond)
	stop()
	require.Empty(t, lag(), "after it ran")
}
