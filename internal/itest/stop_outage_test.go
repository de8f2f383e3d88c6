package itest

import (
	"context"
	"log/slog"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// cabledService is a relay, a consumer and a worker that reach Kafka and PostgreSQL by cables.
type cabledService struct {
	*consumerFixture
	kafka, postgres brokenDialer
	relay           *outbox.Relay
	consumer        *outbox.Consumer
	worker          *outbox.Worker
	logs            map[string]*testenv.Buffer
	stop            map[string]func()
}

func newCabledService(t *testing.T) *cabledService {
	s := &cabledService{consumerFixture: newConsumerFixture(t, 2), logs: map[string]*testenv.Buffer{}, stop: map[string]func(){}}
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.DialFunc, cfg.MaxConns = s.postgres.dial, 20 })
	opts := append(testenv.KafkaOpts(s.brokers), kgo.Dialer(s.kafka.dial))
	handler := func(part string) outbox.HandlerConfig {
		return outbox.HandlerConfig{Schema: s.schema, Logger: s.logger(part), From: outbox.FromStart}
	}
	var err error
	s.relay, err = outbox.NewRelay(db, opts, outbox.RelayConfig{
		Schema: s.schema, PollInterval: 20 * time.Millisecond, DeliveryTimeout: time.Second, Lease: 3 * time.Second, RetryInterval: 100 * time.Millisecond,
		Breaker: outbox.BreakerConfig{Window: 10_000}, Logger: s.logger("relay"),
	})
	require.NoError(t, err)
	s.consumer, err = outbox.NewConsumer(db, opts, s.events, "c-"+s.topic, outbox.ConsumerConfig{HandlerConfig: handler("consumer")}, outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	s.worker, err = outbox.NewWorker(db, s.events, "w-"+s.topic, outbox.WorkerConfig{Lease: 3 * time.Second, HandlerConfig: handler("worker")}, outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	s.stop["relay"], s.stop["consumer"], s.stop["worker"] = testenv.Run(t, s.relay.Run), testenv.Run(t, s.consumer.Run), testenv.Run(t, s.worker.Run)
	require.Eventually(t, func() bool {
		r, c, w := s.relay.Health(), s.consumer.Health(), s.worker.Health()
		return r.Works && r.Answered && r.Leading && c.Works && c.Answered && c.Partitions > 0 && w.Works && w.Answered
	}, testenv.Patience, 5*time.Millisecond)
	return s
}

func (s *cabledService) logger(part string) *slog.Logger {
	s.logs[part] = new(testenv.Buffer)
	return slog.New(slog.NewTextHandler(s.logs[part], nil))
}

// A stop in an outage has tried nothing that has worked: the log says once what fails, and never that it works again.
func TestStopEndsNoOutage(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name  string
		cable func(*cabledService) *brokenDialer
		fails map[string]string // by part
	}{
		{"Kafka", func(s *cabledService) *brokenDialer { return &s.kafka }, map[string]string{"relay": "Kafka", "consumer": "Kafka"}},
		{"PostgreSQL", func(s *cabledService) *brokenDialer { return &s.postgres }, map[string]string{"relay": "PostgreSQL", "consumer": "PostgreSQL", "worker": "PostgreSQL"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := newCabledService(t)
			sales := make([]sale, 200)
			for i := range sales {
				sales[i] = sale{Product: string(rune('a' + i%20)), Amount: 1}
			}
			s.sell(t, sales...)
			before := map[string]int{} // what a busy machine had made late is no outage of this test
			for part, log := range s.logs {
				before[part] = len(log.String())
			}
			test.cable(s).breakAll()
			s.sell(t, sales...)
			for part, what := range test.fails {
				require.Eventually(t, func() bool { return s.says(part, what+" fails") > 0 }, testenv.Patience, 5*time.Millisecond, "%s: %s", part, s.logs[part])
			}
			tried := test.cable(s).rejected.Load()
			require.Eventually(t, func() bool { return test.cable(s).rejected.Load() > tried+2 }, testenv.Patience, time.Millisecond) // a send or a statement is under way
			for part, stop := range s.stop {
				stop()
				log := s.logs[part].String()[before[part]:]
				require.NotContains(t, log, "works again", part)
				said := map[string]bool{} // what handles parked events has outages of its own
				for _, line := range regexp.MustCompile(`msg="outbox: ([^"]* fails), trying[^"]*"(?: relay=\S+| group=\S+)?( of="[^"]*")?`).FindAllStringSubmatch(log, -1) {
					require.False(t, said[line[1]+line[2]], "%s: %s", part, log)
					said[line[1]+line[2]] = true
				}
			}
		})
	}
}

// says returns how many lines of a part begin with a text.
func (s *cabledService) says(part, text string) int {
	return len(regexp.MustCompile(`msg="outbox: `+regexp.QuoteMeta(text)).FindAllString(s.logs[part].String(), -1))
}

// A worker is stopped in an outage of PostgreSQL, in a transaction of several events. Its lane does not try them again
// until the stop cuts it off, and calls no handler if PostgreSQL comes back.
func TestStopInAnOutageBeginsNothing(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	for _, comesBack := range []bool{false, true} {
		t.Run(map[bool]string{false: "away", true: "back"}[comesBack], func(t *testing.T) {
			t.Parallel()
			f, cable := newWorkerFixture(t), new(brokenDialer)
			db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.DialFunc = cable.dial })
			for _, account := range strings.Split("abcdefghijklmnopqrst", "") { // enough for a transaction of several
				f.commit(step{account, 1})
			}
			var calls atomic.Int32
			called, release := make(chan struct{}), make(chan struct{})
			const stopTimeout = 20 * time.Second
			cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Concurrency: 1, StopTimeout: stopTimeout}}
			w := f.worker(db, "bank", cfg, outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, _ step, _ outbox.Metadata) error {
				if calls.Add(1) > 1 {
					return nil
				}
				close(called)
				<-release
				_, err := tx.Exec(ctx, "SELECT 1")
				return err
			}))
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- w.Run(ctx) }()
			<-called
			cable.breakAll()
			cancel()
			began := time.Now()
			require.Eventually(t, func() bool { return !w.Health().Works }, testenv.Patience, time.Millisecond)
			close(release)
			if comesBack {
				time.Sleep(time.Second)
				cable.broken.Store(false)
			}
			require.NoError(t, <-ended)
			require.EqualValues(t, 1, calls.Load())
			require.Less(t, time.Since(began), stopTimeout/2)
			require.Less(t, cable.rejected.Load(), int64(150), "a lane tries again and again")
		})
	}
}
