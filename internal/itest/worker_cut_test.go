package itest

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/outboxops"
)

var cutMoves = flag.Int("cut.turns", 2, "how often groups move to Kafka and back")

// moveFixture is a group that is moved between workers and Kafka.
type moveFixture struct {
	*workerFixture
	opts    []kgo.Opt
	brokers []string
	topic   string
	cuts    *outboxops.Cuts
	handler outbox.Handler
	pool    *pgxpool.Pool // of workers, consumers and relays
	rules   outbox.HandlerConfig
	pause   time.Duration // between two steps, at most

	retention outbox.RetentionConfig
	n, m      int // steps of each of ten accounts, and of the backlog
}

var cutWhy = outboxops.AuditInfo{Operator: "kim", Reason: "test"}

func newMoveFixture(t *testing.T) *moveFixture {
	t.Helper()
	f := &moveFixture{workerFixture: newWorkerFixture(t)}
	topic := "account-" + uuid.NewString()
	f.events = must(outbox.NewRegistry("bank", outbox.Event("bank.account.stepped.v1", "Account", step.account).Topic(topic),
		outbox.Event("bank.noise.made.v1", "Noise", noise.source).Topic("noise-"+topic)))
	f.rec = must(outbox.NewRecorder(f.events, outbox.RecorderConfig{Schema: f.schema}))
	brokers := testenv.Brokers(t)
	testenv.CreateTopic(t, brokers, topic, 3)
	testenv.CreateTopic(t, brokers, "noise-"+topic, 1)
	f.brokers, f.topic = brokers, topic
	f.opts, f.handler, f.pool = testenv.KafkaOpts(brokers), f.effects("COUNTED", nil), f.db
	f.pause = 3 * time.Millisecond
	f.rules = outbox.HandlerConfig{Schema: f.schema, Logger: slog.New(slog.DiscardHandler), From: outbox.FromStart}
	f.cuts = must(outboxops.NewCuts(f.db, outboxops.CutsConfig{Schema: f.schema}))
	return f
}

// noise is an event that no handler of the group takes.
type noise struct{ Source string }

func (n noise) source() string        { return n.Source }
func (n noise) OccurredAt() time.Time { return time.Now() }

func (f *moveFixture) startWorker() (stop func()) {
	cfg := outbox.WorkerConfig{HandlerConfig: f.rules, PollInterval: 20 * time.Millisecond, Retention: f.retention}
	stop = testenv.Run(f.t, f.worker(f.pool, "bank", cfg, f.handler).Run)
	require.Eventually(f.t, func() bool { return f.count(`SELECT count(*) FROM {schema}.event_subscription`) == 1 }, testenv.Patience, 10*time.Millisecond)
	return stop
}

func (f *moveFixture) startConsumer() (stop func()) {
	f.t.Helper()
	c, err := outbox.NewConsumer(f.pool, f.opts, f.events, "bank", outbox.ConsumerConfig{HandlerConfig: f.rules}, f.handler)
	require.NoError(f.t, err)
	return testenv.Run(f.t, c.Run)
}

func (f *moveFixture) startRelay(name string) (stop func()) {
	f.t.Helper()
	cfg := quick
	cfg.Schema, cfg.Name, cfg.Logger, cfg.BatchSize, cfg.Retention = f.schema, name, slog.New(slog.DiscardHandler), 100, f.retention
	r, err := outbox.NewRelay(f.pool, f.opts, cfg)
	require.NoError(f.t, err)
	return testenv.Run(f.t, r.Run)
}

// step records the next step of each account.
func (f *moveFixture) step() {
	f.n++
	var all []step
	for a := range 10 {
		all = append(all, step{fmt.Sprint("a", a), f.n})
	}
	f.commit(all...)
}

// record records steps until stop is called, which waits for it.
func (f *moveFixture) record() (stop func()) {
	end, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-end:
				return
			default:
				f.step()
				time.Sleep(rand.N(f.pause))
			}
		}
	}()
	return func() { close(end); <-done }
}

// backlog records many events in one transaction, of which few are steps.
func (f *moveFixture) backlog(n int) {
	f.t.Helper()
	events := make([]outbox.DomainEvent, n)
	for i := range events {
		events[i] = noise{"n"}
		if i%(n/10) == 0 {
			f.m++
			events[i] = step{"backlog", f.m}
		}
	}
	tx, err := f.db.Begin(f.t.Context())
	require.NoError(f.t, err)
	require.NoError(f.t, f.rec.Record(f.t.Context(), tx, events...))
	require.NoError(f.t, tx.Commit(f.t.Context()))
}

func (f *moveFixture) toKafka(relay string) {
	f.t.Helper()
	require.NoError(f.t, f.cuts.ToKafka(f.t.Context(), []string{"bank"}, relay, cutWhy))
}

func (f *moveFixture) toPostgres(relay string) {
	f.t.Helper()
	require.NoError(f.t, f.cuts.ToPostgres(f.t.Context(), []string{"bank"}, relay, nil, cutWhy))
}

// finish waits for what is in front of the cut, and finishes it.
func (f *moveFixture) finish(relay string) {
	f.t.Helper()
	began := time.Now()
	var last outboxops.CutProgress
	for { // a look may meet a connection that breaks
		ctx, cancel := context.WithTimeout(f.t.Context(), testenv.Patience)
		err := f.cuts.Await(ctx, f.opts, relay, func(p outboxops.CutProgress) { last = p })
		if err == nil {
			err = f.cuts.Finish(ctx, f.opts, relay, cutWhy)
		}
		cancel()
		if err == nil {
			break
		}
		require.Less(f.t, time.Since(began), testenv.Patience, "%v: %+v\n%s", err, last, f.openRows())
	}
	f.t.Logf("cut at %s finished after %v", relay, time.Since(began).Round(time.Millisecond))
}

// openRows describes the deliveries that are not done.
func (f *moveFixture) openRows() (all string) {
	_ = f.db.QueryRow(context.Background(), pg.InSchema(`SELECT string_agg(row_to_json(d)::text, E'\n') FROM (
		SELECT id, action, stream, status, order_key, attempt_count, max_attempts, record IS NOT NULL AS from_kafka, held, put_back, locked_by, locked_until, next_retry_at, clock_timestamp() AS now,
		       last_error_code, left(last_error_message, 200), failed_at, witness_after, event_type, partition_key, position, dead_letter_owed
		  FROM {schema}.event_delivery WHERE status <> 'DONE' ORDER BY id LIMIT 30) AS d`, f.schema)).Scan(&all)
	return all
}

// waitForWindow waits until a relay, or the worker, is in the middle of a large window.
func (f *moveFixture) waitForWindow(name string) {
	f.t.Helper()
	require.Eventually(f.t, func() bool {
		return f.count(`SELECT count(*) FROM (SELECT * FROM {schema}.outbox_cursor WHERE relay = $1 ORDER BY id DESC LIMIT 1) AS c
			WHERE window_snapshot IS NOT NULL AND last_processed_id > 0`, name) > 0
	}, testenv.Patience, time.Millisecond)
}

// requireExact checks that each step has one effect, in order.
func (f *moveFixture) requireExact() {
	f.t.Helper()
	steps := 10*f.n + f.m
	require.Eventually(f.t, func() bool { return f.count(`SELECT count(*) FROM {schema}.effect`) >= steps }, testenv.Patience, 10*time.Millisecond)
	f.await(steps)
	f.requireOrder()
	f.t.Logf("%d events, each handled once, in order", steps)
}

// Groups move from workers to Kafka and back while events are recorded: each is handled once, and those of
// a key in order.
func TestMovesWhileEventsAreRecorded(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	f := newMoveFixture(t)
	f.move()
	f.requireExact()
}

// The same while events fail on both sides: some twice, and some until an operator retries them. Their keys wait.
func TestMovesWhileEventsFail(t *testing.T) {
	t.Parallel()
	f := newMoveFixture(t)
	testenv.CreateTopic(t, f.brokers, f.topic+".dlq", 1)
	f.pause = 60 * time.Millisecond // failed events wait, so that a key takes longer than without
	f.rules.HoldDead, f.rules.Retry = true, outbox.RetryPolicy{MaxRetries: 20, RetryWait: 20 * time.Millisecond, MaxRetryWait: 100 * time.Millisecond}
	var mu sync.Mutex
	failed := map[step]int{}
	f.handler = f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case s.N%50 == 7 && failed[s] < 2: // in a batch, and alone
			failed[s]++
			return outbox.Permanent(errPlay)
		case s.N%13 == 0 && failed[s] < 2:
			failed[s]++
			return errPlay
		}
		return nil
	})
	failures := must(outboxops.NewFailures(f.db, outboxops.FailuresConfig{Schema: f.schema}))
	retried := 0
	stopRetrying := testenv.Run(t, func(ctx context.Context) error {
		for ctx.Err() == nil {
			n, err := failures.RetryAll(ctx, outboxops.FailureFilter{Kind: outboxops.KindDelivery, Statuses: []string{outbox.StatusDead}}, bulk, cutWhy)
			if err != nil && ctx.Err() == nil {
				return err
			}
			retried += n
			wait.Sleep(ctx, 100*time.Millisecond)
		}
		return nil
	})
	f.move()
	f.requireExact()
	stopRetrying()
	require.Positive(t, retried)
	t.Logf("%d events failed, %d retries of dead ones", len(failed), retried)
}

// move moves the group to Kafka and back, in turns, while events are recorded.
func (f *moveFixture) move() {
	t := f.t
	t.Helper()
	stopWorker := f.startWorker()
	stopRecording := f.record()
	require.Eventually(t, func() bool { return f.count(`SELECT count(*) FROM {schema}.effect`) > 100 }, testenv.Patience, 10*time.Millisecond)
	for move := range *cutMoves {
		relay := fmt.Sprint("relay", move%2) // names are used again
		stopConsumer := f.startConsumer()
		f.toKafka(relay)
		stopRelay := f.startRelay(relay)
		f.finish(relay)
		stopWorker()
		time.Sleep(500 * time.Millisecond)

		stopWorker = f.startWorker()
		f.toPostgres(relay) // it runs, and has a batch in flight
		f.finish(relay)
		stopConsumer()
		stopRelay()
		time.Sleep(500 * time.Millisecond)
	}
	stopRecording()
}

// Workers, consumers and relays lose their connections all the time.
func TestMovesWhileConnectionsBreak(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	f := newMoveFixture(t)
	name := "victims-" + uuid.NewString()
	f.pool = testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.Database = f.db.Config().ConnConfig.Database
		cfg.ConnConfig.RuntimeParams["application_name"] = name
	})
	stopWorkers := []func(){f.startWorker(), f.startWorker()}
	stopRecording := f.record()
	var broken atomic.Int64
	stopBreaking := testenv.Run(t, func(ctx context.Context) error {
		for ctx.Err() == nil {
			var n int64
			err := f.db.QueryRow(context.WithoutCancel(ctx), `SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity WHERE application_name = $1 ORDER BY random() LIMIT 1) AS a`, name).Scan(&n)
			if err != nil {
				return err
			}
			broken.Add(n)
			time.Sleep(200 * time.Millisecond)
		}
		return nil
	})
	stopConsumer := f.startConsumer()
	require.Eventually(t, func() bool { return f.count(`SELECT count(*) FROM {schema}.effect`) > 100 }, testenv.Patience, 10*time.Millisecond)
	f.toKafka("q")
	f.startRelay("q")
	f.finish("q")
	for _, stop := range stopWorkers {
		stop()
	}
	time.Sleep(300 * time.Millisecond)
	f.startWorker()
	f.toPostgres("q")
	stopRecording()
	f.finish("q")
	stopBreaking()
	stopConsumer()
	require.NotZero(t, broken.Load())
	t.Logf("%d connections were broken", broken.Load())
	f.requireExact()
}

// A cut comes while the worker, and then the relay, is in the middle of a window of many events, of which
// rows are removed as soon as they may be.
func TestMovesInTheMiddleOfAWindow(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	f := newMoveFixture(t)
	f.retention = outbox.RetentionConfig{PublishedFor: time.Millisecond}
	f.backlog(40_000)
	stopWorker := f.startWorker()
	f.waitForWindow("worker:bank")
	f.toKafka("r")
	require.Equal(t, 1, f.count(`SELECT count(*) FROM (SELECT * FROM {schema}.outbox_cursor WHERE relay = 'worker:bank' ORDER BY id DESC LIMIT 1) AS c WHERE window_snapshot IS NOT NULL`))
	f.step()
	f.startConsumer()
	f.startRelay("r")
	f.finish("r")
	stopWorker()
	f.step()
	f.backlog(20_000)
	f.waitForWindow("r")
	f.toPostgres("r")
	require.Equal(t, 1, f.count(`SELECT count(*) FROM {schema}.outbox_cursor WHERE relay = 'worker:bank' AND window_snapshot IS NOT NULL`))
	f.startWorker()
	f.step()
	f.finish("r")
	f.step()
	f.requireExact()
}

// The database is restored in another cluster between a cut and its end: what was before the cut
// is still for the worker, and the rest for the relay.
func TestRestoreDuringCut(t *testing.T) {
	t.Parallel()
	f := newMoveFixture(t)
	stopWorker := f.startWorker()
	stopWorker()
	f.step()
	f.toKafka("r")
	f.step()
	f.exec(`UPDATE {schema}.outbox_cursor SET system_identifier = system_identifier + 1`)
	f.step()
	stopRelay := f.startRelay("r")
	stopConsumer := f.startConsumer()
	stopWorker = f.startWorker()
	require.Eventually(t, func() bool { return f.count(`SELECT count(*) FROM {schema}.effect`) == 10 }, testenv.Patience, 10*time.Millisecond)
	f.finish("r")
	require.Equal(t, 10, f.count(`SELECT count(*) FROM {schema}.event_delivery`))
	stopWorker()
	f.requireExact()

	stopRelay() // it has nothing in flight then
	f.toPostgres("r")
	f.step()
	f.exec(`UPDATE {schema}.outbox_cursor SET system_identifier = system_identifier + 1`)
	f.startWorker()
	f.finish("r")
	stopConsumer()
	f.requireExact()
	require.Equal(t, 20, f.count(`SELECT count(*) FROM {schema}.event_delivery`))
}

// Each part moves in its role of docs/roles.md.
func TestMoveInRoles(t *testing.T) {
	t.Parallel()
	f := newMoveFixture(t)
	r := newRoles(t, &relayFixture{db: f.db, schema: f.schema})
	for _, role := range []string{"worker", "consumer"} {
		f.exec(`GRANT SELECT, INSERT ON {schema}.effect TO outbox_` + role + r.suffix)
		f.exec(`GRANT USAGE ON SEQUENCE {schema}.effect_id_seq TO outbox_` + role + r.suffix)
		r.giveGroup(t, role, "bank")
	}
	f.cuts = must(outboxops.NewCuts(r.as(t, "operator"), outboxops.CutsConfig{Schema: f.schema}))
	in := func(role string, start func() func()) func() {
		f.pool = r.as(t, role)
		return start()
	}
	f.step()
	stopWorker := in("worker", f.startWorker)
	in("consumer", f.startConsumer)
	stopRelay := in("relay", func() func() { return f.startRelay("r") })
	require.Eventually(t, func() bool { return f.count(`SELECT count(*) FROM {schema}.effect`) == 10 }, testenv.Patience, 10*time.Millisecond)
	// The relay has begun by itself and sends everything: it is not the one of a cut.
	require.Eventually(t, func() bool { return f.count(`SELECT count(*) FROM {schema}.outbox_cursor WHERE relay = 'r'`) > 0 }, testenv.Patience, 10*time.Millisecond)
	require.ErrorIs(t, f.cuts.ToKafka(t.Context(), []string{"bank"}, "r", cutWhy), outboxops.ErrCutRefused)
	stopRelay()
	f.toKafka("q")
	require.NoError(t, f.cuts.Cancel(t.Context(), "q", cutWhy))
	f.step()
	f.toKafka("q")
	in("relay", func() func() { return f.startRelay("q") })
	f.finish("q")
	stopWorker()
	f.step()
	f.toPostgres("q")
	require.NoError(t, f.cuts.Cancel(t.Context(), "q", cutWhy))
	f.step()
	f.toPostgres("q")
	in("worker", f.startWorker)
	f.finish("q")
	f.step()
	f.requireExact()
	require.Equal(t, 8, f.count(`SELECT count(*) FROM {schema}.outbox_audit WHERE login = $1`, r.login("operator")))
	require.True(t, slices.Contains(r.parts, "operator"))
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
