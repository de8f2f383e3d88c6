package consumer

import (
	"log/slog"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Every function of the host that a worker calls may hang. While it hangs, a WARN and Health name
// it. It is also named when its partition is dropped.
func TestHostFunctionHangs(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]func(cfg *Rules, s *partitionFixture, hang func()){
		"hook Handled or Repeated": func(cfg *Rules, _ *partitionFixture, hang func()) {
			cfg.Hooks.Handled = func(*envelope.Received, string, time.Duration) { hang() }
		},
		"hook Failed": func(cfg *Rules, s *partitionFixture, hang func()) {
			s.handlers["a"], cfg.Hooks.Failed = "p", func(*envelope.Received, string, error, bool) { hang() }
		},
		"hook Conflicted": func(cfg *Rules, s *partitionFixture, hang func()) {
			s.handlers["a"], cfg.Hooks.Conflicted = "44444", func(*envelope.Received, string, error) { hang() }
		},
		"hook DeadLettered": func(cfg *Rules, s *partitionFixture, hang func()) {
			s.handlers["a"], cfg.Hooks.DeadLettered = "p", func(*envelope.Received, string, string, error) { hang() }
		},
		"hook Unknown": func(cfg *Rules, _ *partitionFixture, hang func()) {
			cfg.Decode = func(r *kgo.Record) (*envelope.Message, error) {
				m, err := DecodeCloudEvent(r)
				m.Type = "test.unknown.v1"
				return m, err
			}
			cfg.Hooks.Unknown = func(*envelope.Received) { hang() }
		},
		"RetriesFor": func(cfg *Rules, s *partitionFixture, hang func()) {
			s.handlers["a"], cfg.Retry.RetriesFor = "-", func(error) int { hang(); return 0 }
		},
		"decoder, codec or upcaster": func(cfg *Rules, _ *partitionFixture, hang func()) {
			cfg.Decode = func(r *kgo.Record) (*envelope.Message, error) { hang(); return DecodeCloudEvent(r) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { testHostFunctionHangs(t, name, set) })
		})
	}
}

func testHostFunctionHangs(t *testing.T, name string, set func(*Rules, *partitionFixture, func())) {
	log, goOn := new(testenv.Buffer), make(chan struct{})
	cfg, script := Rules{Rules: &handling.Rules{}}, &partitionFixture{handlers: map[string]string{}}
	cfg.Log = slog.New(slog.NewTextHandler(log, nil))
	set(&cfg, script, func() { <-goOn })
	s := newPartitionFixture(t, cfg)
	s.handlers = script.handlers
	go s.worker.run()
	s.worker.add(s.arrive("a"))
	synctest.Wait()
	s.worker.slow.Report(&s.worker.activity, s.worker.cfg.SlowHandler, s.worker.log, "partition", s.worker.partition.Name())
	require.NotContains(t, log.String(), "runs for long")
	time.Sleep(defaultSlowHandler)
	s.worker.slow.Report(&s.worker.activity, s.worker.cfg.SlowHandler, s.worker.log, "partition", s.worker.partition.Name())
	require.Contains(t, log.String(), name+" runs for long")
	var reasons []string
	health := func() bool {
		return s.worker.reportHealth(func(reason string, args ...any) { reasons = append(reasons, reason) })
	}
	s.worker.begin(starts.Beginning{})
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
	require.Equal(t, 1, strings.Count(log.String(), "level=ERROR")-strings.Count(log.String(), "outbox: event is dead"))
	close(goOn)
	synctest.Wait()
}

// A record that is handled leaves the memory at once, and not when the queue grows.
func TestQueueKeepsNothingHandled(t *testing.T) {
	t.Parallel()
	s := newPartitionFixture(t, Rules{MaxPoll: 1})
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
	s := newPartitionFixture(t, Rules{})
	workers, budget := []*partitionWorker{s.worker}, s.worker.limits.budget
	for len(workers) < partitions {
		workers = append(workers, newPartitionWorker(s.worker.partition, s.worker.reader, s, s.worker.cfg, s.worker.limits, s.worker.outages))
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

// pausedPartitions is a group that notes which partitions are paused.
type pausedPartitions struct {
	*partitionFixture
	paused map[kafka.Partition]bool
}

func (p *pausedPartitions) pauseFetching(at kafka.Partition)  { p.paused[at] = true }
func (p *pausedPartitions) resumeFetching(at kafka.Partition) { delete(p.paused, at) }

// Whatever arrives and is handled, and in whatever order, no partition that has nothing is
// paused, so none starves; and none that gets on is while there is room.
func TestQueuesNeverStall(t *testing.T) {
	t.Parallel()
	const seeds, steps, partitions = 10, 500, 12
	for seed := range uint64(seeds) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		s := newPartitionFixture(t, Rules{MaxPoll: 1 + rnd.IntN(20), MaxQueueBytes: 1 << (10 + rnd.IntN(15))})
		group := &pausedPartitions{s, map[kafka.Partition]bool{}}
		budget := s.worker.limits.budget
		budget.Close(0) // the worker of the fixture has nothing to do
		var workers []*partitionWorker
		taken := map[*partitionWorker]int{}
		assign := func(number int32) *partitionWorker {
			return newPartitionWorker(kafka.Partition{Topic: "t", Number: number}, s.worker.reader, group, s.worker.cfg, s.worker.limits, s.worker.outages)
		}
		for number := range int32(partitions) {
			workers = append(workers, assign(number))
		}
		for range steps {
			i := rnd.IntN(partitions)
			w := workers[i]
			switch rnd.IntN(5) {
			case 0, 1: // what a poll brings
				for range 1 + rnd.IntN(3) {
					if fetched := workers[rnd.IntN(partitions)]; !group.paused[fetched.partition] {
						fetched.add([]*kgo.Record{{Value: make([]byte, rnd.IntN(2*budget.Share()+1))}, {}})
					}
				}
				if budget.IsOver() {
					for _, w := range workers {
						w.recheckQueue()
					}
				}
			case 2, 3: // the worker begins with records, or is done with them
				if taken[w] == 0 {
					taken[w] = sizeOf(w.take())
					break
				}
				w.drop(taken[w])
				delete(taken, w)
				if budget.Used() < s.worker.cfg.MaxQueueBytes/4 {
					require.False(t, group.paused[w.partition], "seed %d: there is room", seed)
				}
			case 4: // seldom, it goes to another member, and comes back
				if rnd.IntN(20) == 0 {
					w.close()
					delete(taken, w)
					delete(group.paused, w.partition)
					workers[i] = assign(int32(i))
				}
			}
			used := 0
			for _, w := range workers {
				used += w.bytes
				require.Equal(t, w.isPaused(), group.paused[w.partition])
				require.False(t, w.isPaused() && w.bytes == 0, "seed %d: a partition that has nothing is paused", seed)
			}
			require.Equal(t, used, budget.Used())
		}
		for _, w := range workers {
			w.drop(taken[w])
			for w.bytes > 0 {
				w.drop(sizeOf(w.take()))
			}
			require.False(t, group.paused[w.partition])
		}
		require.Zero(t, budget.Used())
	}
}
