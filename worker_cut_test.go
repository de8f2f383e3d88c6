package outbox_test

import (
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

var cutTurns = flag.Int("cut.turns", 2, "how often groups move to Kafka and back")

// Groups move from workers to Kafka and back while events are recorded: each is handled once, and those of
// a key in order.
func TestMovesWhileEventsAreRecorded(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	draw := rand.New(rand.NewPCG(seed, 1))
	topic := "account-" + uuid.NewString()
	f.events = must(outbox.NewRegistry("bank", outbox.Event("bank.account.stepped.v1", "Account", step.account).Topic(topic)))
	f.rec = must(outbox.NewRecorder(f.events, outbox.RecorderConfig{Schema: f.schema}))
	brokers := testenv.Brokers(t)
	testenv.CreateTopic(t, brokers, topic, 3)
	opts := testenv.KafkaOpts(brokers)
	log := slog.New(slog.DiscardHandler)
	handler := f.effects("COUNTED", nil)
	cuts := must(outboxops.NewCuts(f.db, outboxops.CutsConfig{Schema: f.schema}))
	why := outboxops.AuditInfo{Operator: "kim", Reason: "test"}

	stopWorker := func() {}
	startWorker := func() {
		cfg := outbox.WorkerConfig{FromStart: true, PollInterval: 20 * time.Millisecond}
		_, stopWorker = f.start(cfg, handler)
	}
	startWorker()
	recorded, stopRecording := 0, make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := 1; ; n++ {
			select {
			case <-stopRecording:
				return
			default:
			}
			var all []step
			for a := range 10 {
				all = append(all, step{fmt.Sprint("a", a), n})
			}
			f.commit(all...)
			recorded += len(all)
			time.Sleep(time.Duration(draw.IntN(3000)) * time.Microsecond)
		}
	}()

	require.Eventually(t, func() bool { return f.count(`SELECT count(*) FROM {schema}.effect`) > 100 }, 10*time.Second, 10*time.Millisecond)
	for round := range *cutTurns {
		relayName := fmt.Sprint("relay", round)
		consumer := must(outbox.NewConsumer(f.db, opts, f.events, outbox.ConsumerConfig{
			HandlerConfig: outbox.HandlerConfig{Group: "bank", Schema: f.schema, Logger: log}, FromStart: true}, handler))
		stopConsumer := testenv.Run(t, consumer.Run)
		cfg := quick
		cfg.Schema, cfg.Name, cfg.Logger = f.schema, relayName, log
		require.NoError(t, cuts.ToKafka(t.Context(), []string{"bank"}, relayName, why))
		relay := must(outbox.NewRelay(f.db, opts, cfg))
		stopRelay := testenv.Run(t, relay.Run)
		require.NoError(t, cuts.Await(t.Context(), opts, relayName, func(p outboxops.CutProgress) { t.Logf("%+v", p) }))
		require.NoError(t, cuts.Finish(t.Context(), opts, relayName, why))
		stopWorker()
		time.Sleep(500 * time.Millisecond)

		startWorker()
		require.NoError(t, cuts.ToPostgres(t.Context(), []string{"bank"}, relayName, why))
		require.NoError(t, cuts.Await(t.Context(), opts, relayName, func(p outboxops.CutProgress) { t.Logf("%+v", p) }))
		require.NoError(t, cuts.Finish(t.Context(), opts, relayName, why))
		stopConsumer()
		stopRelay()
		time.Sleep(500 * time.Millisecond)
	}
	close(stopRecording)
	<-done
	f.await(recorded)
	f.requireOrder()
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
