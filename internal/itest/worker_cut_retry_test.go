package itest

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// failing makes the handler of the group fail for good at the second step of three accounts, while broken is set.
func (f *moveFixture) failing() (broken *atomic.Bool) {
	broken = new(atomic.Bool)
	broken.Store(true)
	f.handler = f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
		if s.N == 2 && s.Account < "a3" && broken.Load() {
			return outbox.Permanent(errTest)
		}
		return nil
	})
	return broken
}

// awaitDead waits until three deliveries are DEAD, and all others are done.
func (f *moveFixture) awaitDead() {
	f.t.Helper()
	require.Eventually(f.t, func() bool {
		return f.count(`SELECT count(*) FROM {schema}.effect`) == 10*f.n-3 && f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD'`) == 3
	}, testenv.Patience, 10*time.Millisecond)
}

// retryDead retries all deliveries that are DEAD, as an operator does.
func (f *moveFixture) retryDead() {
	f.t.Helper()
	require.Equal(f.t, 3, f.count(`SELECT {schema}.outbox_requeue_deliveries(ARRAY(SELECT id FROM {schema}.event_delivery WHERE status = 'DEAD'), 'kim', 'repaired')`))
}

// requireNoneOpen checks that all steps have their effect and their note, in order, and that no delivery is open.
func (f *moveFixture) requireNoneOpen() {
	f.t.Helper()
	const open = `SELECT count(*) FROM {schema}.event_delivery WHERE status <> 'DONE'`
	for began := time.Now(); f.count(`SELECT count(*) FROM {schema}.effect`) < 10*f.n || f.count(open) > 0; time.Sleep(10 * time.Millisecond) {
		require.Less(f.t, time.Since(began), testenv.Patience/2, "%d of %d effects; open deliveries: %s", f.count(`SELECT count(*) FROM {schema}.effect`), 10*f.n,
			f.text(`SELECT coalesce(string_agg(DISTINCT status || CASE WHEN record IS NULL THEN '' ELSE ' from Kafka' END, ', '), 'none') FROM {schema}.event_delivery WHERE status <> 'DONE'`))
	}
	f.requireExact()
	require.Equal(f.t, 10*f.n, f.count(`SELECT count(*) FROM {schema}.event_handled`))
}

// A delivery of workers is DEAD when its group moves to Kafka. When an operator retries it, the consumers handle it,
// and then the later events of its key.
func TestRetryAfterAMoveToKafka(t *testing.T) {
	t.Parallel()
	f := newMoveFixture(t)
	broken := f.failing()
	stopWorker := f.startWorker()
	f.step()
	f.step()
	f.awaitDead()
	f.startConsumer()
	f.toKafka("r")
	f.startRelay("r")
	f.finish("r")
	stopWorker()
	broken.Store(false)
	f.retryDead()
	f.step()
	f.step()
	f.requireNoneOpen()
}

// An event of a consumer is DEAD when its group moves to its workers. When an operator retries it, they handle it.
func TestRetryAfterAMoveToPostgres(t *testing.T) {
	t.Parallel()
	f := newMoveFixture(t)
	broken := f.failing()
	f.createDeadLetters()
	stopRelay, stopConsumer := f.startRelay("r"), f.startConsumer()
	f.step()
	f.step()
	f.awaitDead()
	stopWorker := f.moveBack("r", stopRelay, stopConsumer)
	defer stopWorker()
	broken.Store(false)
	f.retryDead()
	f.step()
	f.step()
	f.requireNoneOpen()
}

// The dead letter of an event that has failed again, where no process sends to Kafka, is sent by the next consumer.
// The later events of its key do not wait for it.
func TestDeadLetterAfterAMoveToPostgres(t *testing.T) {
	t.Parallel()
	f := newMoveFixture(t)
	f.failing()
	topic := f.createDeadLetters()
	stopRelay, stopConsumer := f.startRelay("r"), f.startConsumer()
	f.step()
	f.step()
	f.awaitDead()
	stopWorker := f.moveBack("r", stopRelay, stopConsumer)
	f.retryDead()
	f.step()
	f.awaitDead()
	stopWorker()
	readAll(t, f.brokers, topic, 3) // one for each death before the move
	f.startConsumer()
	deadLetters := readAll(t, f.brokers, topic, 6)
	of := map[string]int{}
	for _, r := range deadLetters {
		of[string(r.Key)]++
	}
	require.Equal(t, map[string]int{"a0": 2, "a1": 2, "a2": 2}, of)
	require.Eventually(t, func() bool {
		return f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE dead_letter_owed`) == 0
	}, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, 3, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD'`))
}

// createDeadLetters creates the dead-letter topic of the steps, and returns its name.
func (f *moveFixture) createDeadLetters() (topic string) {
	f.t.Helper()
	topic = outbox.DeadLetterTopic(f.topic)
	testenv.CreateTopic(f.t, f.brokers, topic, 1)
	return topic
}

// moveBack moves the group from a relay to a worker, which it starts, and stops the others.
func (f *moveFixture) moveBack(relay string, stopRelay, stopConsumer func()) (stopWorker func()) {
	f.t.Helper()
	f.toPostgres(relay)
	stopWorker = f.startWorker()
	f.finish(relay)
	stopConsumer()
	stopRelay()
	return stopWorker
}

// Workers that keep no order neither hand their events over to consumers nor take those of consumers.
func TestUnorderedWorkersDoNotMove(t *testing.T) {
	t.Parallel()
	f := newMoveFixture(t)
	start := func(unordered bool) (stop func()) {
		return testenv.Run(t, f.worker(f.pool, "bank", outbox.WorkerConfig{Unordered: unordered,
			HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 20 * time.Millisecond}, f.handler).Run)
	}
	registered := func(unordered bool) func() bool {
		return func() bool {
			return f.count(`SELECT count(*) FROM {schema}.event_subscription WHERE unordered = $1`, unordered) == 1
		}
	}
	stop := start(true)
	require.Eventually(t, registered(true), testenv.Patience, 10*time.Millisecond)
	err := f.cuts.ToKafka(t.Context(), []string{"bank"}, "r", cutWhy)
	require.ErrorIs(t, err, outboxops.ErrCutRefused)
	require.ErrorContains(t, err, "Unordered")
	stop()
	stop = start(false)
	require.Eventually(t, registered(false), testenv.Patience, 10*time.Millisecond)
	f.startConsumer()
	f.toKafka("r")
	f.startRelay("r")
	f.step()
	f.finish("r")
	stop()

	f.toPostgres("r")
	stop = start(true)
	require.Eventually(t, registered(true), testenv.Patience, 10*time.Millisecond)
	require.NoError(t, f.cuts.Await(t.Context(), f.opts, "r", func(outboxops.CutProgress) {}))
	err = f.cuts.Finish(t.Context(), f.opts, "r", cutWhy)
	require.ErrorIs(t, err, outboxops.ErrCutRefused)
	require.ErrorContains(t, err, "Unordered")
	stop()
	start(false)
	require.Eventually(t, registered(false), testenv.Patience, 10*time.Millisecond)
	f.finish("r")
	f.requireExact()
}
