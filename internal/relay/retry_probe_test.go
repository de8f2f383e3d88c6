package relay

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/testenv"
)

// hangingKafka is a [Sender] that does not answer.
type hangingKafka struct {
	*acceptingKafka
	begun chan struct{} // closed at the first send
}

func (k hangingKafka) produce(stop, _ context.Context, _ []envelope.Event, _ []int) (sendResult, error) {
	close(k.begun)
	<-stop.Done()
	return sendResult{}, lease.ErrLeaseLost
}

// A suspect is probed while the probe of a bad partition has no answer.
func TestSuspectsWaitForNoProbe(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	d.InsertParked(t, 2, 2)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'waiting', place = 'b-events/' || outbox_id`)
	suspects, to, _ := newAnsweredFixture(t, d)
	suspects.Breaker, suspects.ProbeNow = suspects.Deliverer.Parts.Breaker, make(chan struct{})
	suspects.Bad.Load([]cursor.BadPartition{{Name: "b-events/1", Err: errDown}, {Name: "b-events/2", Err: errSuspect}})
	bad, hanging := NewRetrier(suspects.RetrierParts), hangingKafka{to, make(chan struct{})}
	parts := suspects.Deliverer.Parts
	parts.Sender = hanging
	bad.Deliverer = &Deliverer{parts}
	ctx, stop := context.WithCancel(t.Context())
	var probes sync.WaitGroup
	probes.Go(func() { bad.RunProbes(ctx) })
	<-hanging.begun
	probes.Go(func() { suspects.RunSuspects(ctx) })
	require.Eventually(t, func() bool { return slices.Equal(d.IDs(t, "outbox_failed"), []int64{1}) }, testenv.Patience, 10*time.Millisecond)
	stop()
	probes.Wait()
}

// An event that has expired tells nothing about its partition. The next one is tried at once, and not with the next
// probe: what is behind many of them would wait for as many probes after the partition has recovered.
func TestProbePassesExpired(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	d.InsertParked(t, 50, 50)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'waiting', place = 'b-events/' || outbox_id % 2, expires_at = CASE WHEN outbox_id < 49 THEN now() END`)
	r, to, _ := newAnsweredFixture(t, d)
	r.Bad.Load([]cursor.BadPartition{{Name: "b-events/0", Err: errDown}, {Name: "b-events/1", Err: errDown}})
	require.NoError(t, r.probe(t.Context(), []string{"b-events/0", "b-events/1"}))
	slices.Sort(to.sent)
	require.Equal(t, []int64{49, 50}, to.sent)
}

// tooLargeKafka is a [Sender] that rejects the events before one.
type tooLargeKafka struct {
	*acceptingKafka
	before int64
}

func (k tooLargeKafka) produce(stop, held context.Context, batch []envelope.Event, which []int) (sendResult, error) {
	sent, err := k.acceptingKafka.produce(stop, held, batch, which)
	for n, i := range which {
		if batch[i].ID < k.before {
			sent.errs[n] = kerr.MessageTooLarge
		}
	}
	return sent, err
}

// Nor does an event that is rejected tell whether its partition accepts others: the next one is tried at once.
func TestProbePassesRejected(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	d.InsertParked(t, 10, 10)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'waiting', place = 'b-events/' || outbox_id % 2, next_retry_at = now() + outbox_id * interval '1 s'`)
	r, to, _ := newAnsweredFixture(t, d)
	r.Deliverer.Parts.Sender = tooLargeKafka{to, 9}
	r.Bad.Load([]cursor.BadPartition{{Name: "b-events/0", Err: errDown}, {Name: "b-events/1", Err: errDown}})
	require.NoError(t, r.probe(t.Context(), []string{"b-events/0", "b-events/1"}))
	require.Contains(t, to.sent, int64(9))
	require.Contains(t, to.sent, int64(10))
}

// While the breaker is open no round runs. The next look is waited for, although the last probe was long ago.
func TestProbesPauseWhileTheBreakerIsOpen(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
		defer stop()
		b := breaker.New(breaker.Rules{Window: 1, FailureRate: 0.5, OpenFor: time.Hour, Trials: 1}, func(_, _ breaker.State, _ float64) {})
		failed := b.Allow(1)
		failed.Report(breaker.Failed)
		failed.Release()
		require.Equal(t, breaker.Open, b.State())
		r := NewRetrier(RetrierParts{
			Leadership: lease.Leadership{Held: context.WithoutCancel(ctx)}, Rules: Rules{RetryInterval: 5 * time.Second}, Breaker: b,
			Bad: NewBadPartitions(outage.NewLogs(slog.New(slog.DiscardHandler))),
		})
		looks := 0
		left := func() time.Duration {
			if looks++; looks > 20 {
				stop() // otherwise it takes a processor for ever
			}
			return -time.Second
		}
		r.repeat(ctx, nil, left, func(context.Context) error {
			t.Error("a round ran")
			return nil
		})
		require.LessOrEqual(t, looks, 20)
	})
}

// oneBadKafka is a [Sender] that accepts everything but for one event, whose partition accepts nothing.
type oneBadKafka struct {
	*acceptingKafka
	bad int64 // the event
}

func (k oneBadKafka) produce(stop, held context.Context, batch []envelope.Event, which []int) (sendResult, error) {
	sent, err := k.acceptingKafka.produce(stop, held, batch, which)
	for n, i := range which {
		sent.records[n].Topic = "b-events"
		if batch[i].ID == k.bad {
			sent.records[n].Partition, sent.errs[n] = 3, kgo.ErrRecordTimeout
		}
	}
	return sent, err
}

// In an outage of Kafka a whole topic may seem to accept nothing. Once the probe of it goes to one of its partitions,
// the other ones wait no longer, also if that one accepts nothing.
func TestProbeThatReachesAPartitionSaysThatItsTopicIsThere(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	d.InsertParked(t, 2, 2)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'waiting', place = 'b-events', next_retry_at = now() - (3 - outbox_id) * interval '1 min'`)
	r, to, _ := newAnsweredFixture(t, d)
	r.Deliverer.Parts.Sender = oneBadKafka{to, 1}
	r.Bad.Load([]cursor.BadPartition{{Name: "b-events", Err: errDown}})
	require.NoError(t, r.probe(t.Context(), []string{"b-events"}))
	require.Equal(t, []int64{1}, to.sent)
	require.NoError(t, r.retryAll(t.Context()))
	require.Equal(t, []int64{1}, d.IDs(t, "outbox_failed"))
	_, bad := r.Bad.Avoid(kafka.Partition{Topic: "b-events", Number: 5})
	require.False(t, bad)
}
