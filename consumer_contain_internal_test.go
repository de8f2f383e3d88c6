package outbox

import (
	"log/slog"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/testenv"
)

// Every function of the host that a worker calls may hang. It is named while it does, not only
// a handler: by a WARN, by Health, and when its partition has to be given up.
func TestHostFunctionHangs(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]func(cfg *ConsumerConfig, s *workerFixture, hang func()){
		"hook Handled or Repeated": func(cfg *ConsumerConfig, _ *workerFixture, hang func()) {
			cfg.Hooks.Handled = func(Metadata, string, time.Duration) { hang() }
		},
		"hook Failed": func(cfg *ConsumerConfig, s *workerFixture, hang func()) {
			s.handlers["a"], cfg.Hooks.Failed = "p", func(Metadata, string, error) { hang() }
		},
		"hook Conflicted": func(cfg *ConsumerConfig, s *workerFixture, hang func()) {
			s.handlers["a"], cfg.Hooks.Conflicted = "44444", func(Metadata, string, error) { hang() }
		},
		"hook DeadLettered": func(cfg *ConsumerConfig, s *workerFixture, hang func()) {
			s.handlers["a"], cfg.Hooks.DeadLettered = "p", func(Metadata, string, string, error) { hang() }
		},
		"hook Unknown": func(cfg *ConsumerConfig, _ *workerFixture, hang func()) {
			cfg.Decode = func(r *kgo.Record) (*Message, error) {
				m, err := DecodeCloudEvent(r)
				m.Type = "test.unknown.v1"
				return m, err
			}
			cfg.Hooks.Unknown = func(Metadata) { hang() }
		},
		"RetriesFor": func(cfg *ConsumerConfig, s *workerFixture, hang func()) {
			s.handlers["a"], cfg.RetriesFor = "-", func(error) int { hang(); return 0 }
		},
		"decoder, codec or upcaster": func(cfg *ConsumerConfig, _ *workerFixture, hang func()) {
			cfg.Decode = func(r *kgo.Record) (*Message, error) { hang(); return DecodeCloudEvent(r) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { testHostFunctionHangs(t, name, set) })
		})
	}
}

func testHostFunctionHangs(t *testing.T, name string, set func(*ConsumerConfig, *workerFixture, func())) {
	log, goOn := new(testenv.Buffer), make(chan struct{})
	cfg, script := ConsumerConfig{}, &workerFixture{handlers: map[string]string{}}
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	set(&cfg, script, func() { <-goOn })
	s := newWorkerFixture(t, cfg)
	s.handlers = script.handlers
	go s.worker.run()
	s.worker.add(s.arrive("a"))
	synctest.Wait()
	s.worker.reportSlow()
	require.NotContains(t, log.String(), "runs for long")
	time.Sleep(defaultSlowHandler)
	s.worker.reportSlow()
	require.Contains(t, log.String(), name+" runs for long")
	var reasons []string
	health := func() bool {
		return s.worker.reportHealth(func(reason string, args ...any) { reasons = append(reasons, reason) })
	}
	s.worker.begin(0)
	require.True(t, health())
	require.Empty(t, reasons, "it may be slow")
	time.Sleep(s.worker.cfg.HandlerTimeout)
	require.True(t, health())
	require.NotEmpty(t, reasons)
	time.Sleep(s.worker.cfg.HandlerTimeout)
	require.False(t, health(), "only a restart helps")
	s.worker.abandon()
	s.worker.cutOff()
	<-s.worker.ended
	require.Contains(t, log.String(), name+" does not return")
	require.Equal(t, 1, strings.Count(log.String(), "level=ERROR"))
	close(goOn)
	synctest.Wait()
}

// A record that is handled leaves the memory at once, and not when the queue grows.
func TestQueueKeepsNothingHandled(t *testing.T) {
	t.Parallel()
	s := newWorkerFixture(t, ConsumerConfig{MaxPoll: 1})
	s.worker.add([]*kgo.Record{{Value: make([]byte, 1<<20)}, {}})
	first := weak.Make(s.worker.queue[0])
	s.worker.drop(sizeOf(s.worker.take()))
	runtime.GC()
	require.Nil(t, first.Value())
	runtime.KeepAlive(s)
}

// Once there is as much as MaxQueueBytes, only a partition that has nothing gets more.
func TestMostQueueBytes(t *testing.T) {
	t.Parallel()
	const partitions = 100
	s := newWorkerFixture(t, ConsumerConfig{})
	workers, budget := []*worker{s.worker}, s.worker.limits.budget
	for len(workers) < partitions {
		workers = append(workers, newWorker(s.worker.partition, s.worker.processor, s, s.worker.cfg, s.worker.limits, s.worker.outages))
	}
	piece := []*kgo.Record{{Value: make([]byte, budget.Share()*9/10)}}
	for !s.worker.isPaused() {
		s.worker.add(piece)
	}
	for range 3 {
		for _, w := range workers {
			if !w.isPaused() {
				w.add(piece)
			}
			if budget.IsOver() { // as it is looked at after each poll
				for _, w := range workers {
					w.recheckQueue()
				}
			}
		}
	}
	require.Less(t, budget.Used(), defaultMaxQueueBytes+sizeOf(piece))
	last := workers[partitions-1]
	for last.bytes > 0 {
		last.drop(sizeOf(last.take()))
	}
	require.False(t, last.isPaused(), "it goes on, although others wait for something")
	last.add(piece)
	require.True(t, last.isPaused())
}
