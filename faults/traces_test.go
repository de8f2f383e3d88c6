//go:build outbox_trace

package faults

import (
	"context"
	"flag"
	"math/rand/v2"
	"net/url"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/faults/internal/proxy"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/internal/trace"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kmsg"
)

var (
	traceFor    = flag.Duration("faults.traced", 15*time.Second, "how long TestTraces disturbs")
	traceRefuse = flag.Int("faults.refused", 25, "one in how many events of TestTraces Kafka refuses")
	traceStory  = flag.String("faults.story", "", "the only disturbance of TestTraces; empty means all")
)

// Relays are killed, frozen, cut off from Kafka and stopped while one writer records events of one key, of which Kafka
// refuses some. Relays and test write what they do into the directory $OUTBOX_TRACE, where `make spec-traces` reads it.
func TestTraces(t *testing.T) {
	require.NotEmpty(t, os.Getenv(trace.DirVar), "the directory for the traces")
	seed := seedOf(t)
	s := newTraced(t)
	stopWriting := s.writeOneKey(t, seed)
	s.site.awaitArrivals(t, 1)
	rng := rand.New(rand.NewPCG(seed, 1<<35))
	for start := time.Now(); time.Since(start) < *traceFor; {
		all := tracedSteps()
		step := all[rng.IntN(len(all))]
		if *traceStory != "" {
			step = all[slices.IndexFunc(all, func(p tracedStep) bool { return p.what == *traceStory })]
		}
		t.Logf("%5.1f s: %s", time.Since(s.start).Seconds(), step.what)
		step.do(s, t, rng)
		s.replace(t)
		s.sleep(t, time.Duration(rng.IntN(1500))*time.Millisecond)
	}
	events := stopWriting()
	s.drainTraced(t, events)
	for len(s.workers) > 0 {
		s.stopTraced(t, s.workers[0])
	}
	arrived, err := s.reader.Arrived()
	require.NoError(t, err)
	var first []int64
	seen := map[int64]bool{}
	for _, e := range arrived {
		if !seen[e.Version] {
			first, seen[e.Version] = append(first, e.Version), true
		}
	}
	trace.Begin("end", "events", events, "arrived", first, "lease", lease.Microseconds()).End()
	t.Logf("%d events, %d of them arrived, %d kills", events, len(first), s.kills)
}

// newTraced returns a suite with relays that write what they do.
func newTraced(t *testing.T) *suite {
	t.Helper()
	s := &suite{crew: newCrew(t), start: time.Now(), ways: map[*worker]ways{}, traced: true}
	brokers := testenv.Brokers(t)
	server := startServer(t, nil)
	var err error
	s.address, err = url.Parse(server.URL())
	require.NoError(t, err)
	s.toPostgres, s.toKafka = through(t, s.address.Host), through(t, brokers[0])
	s.site = newSiteBeside(t, server, server.URL(), brokers)
	testenv.CreateTopic(t, s.brokers, s.topic, 1, refusing...)
	s.replace(t)
	return s
}

// writeOneKey records events of one key, one transaction after the other, until stop is called. Stop returns how many.
// An event has its number, which is its id in outbox, as its version.
func (s *suite) writeOneKey(t *testing.T, seed uint64) (stop func() int) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var n int
	done := make(chan error, 1)
	go func() {
		rng := rand.New(rand.NewPCG(seed, 1<<36))
		for ctx.Err() == nil {
			var events []oracle.Event
			for range 1 + rng.IntN(4) {
				n++
				e := oracle.Event{ID: uuid.NewString(), Key: "key", Version: int64(n)}
				if rng.IntN(*traceRefuse) == 0 {
					e.Filler = keyless
				}
				events = append(events, e)
			}
			err := pgx.BeginFunc(context.Background(), s.db, func(tx pgx.Tx) error { return s.site.record(context.Background(), tx, events...) })
			if err != nil {
				done <- err
				return
			}
			select {
			case <-ctx.Done():
			case <-time.After(time.Duration(rng.Int64N(int64(600 * time.Millisecond)))):
			}
		}
		done <- nil
	}()
	t.Cleanup(cancel)
	return func() int {
		cancel()
		require.NoError(t, <-done)
		return n
	}
}

// drainTraced waits until each event has arrived or is dead.
func (s *suite) drainTraced(t *testing.T, events int) {
	t.Helper()
	var last, left int
	require.NoError(t, s.db.QueryRow(s.ctx, `SELECT max(id) FROM outbox`).Scan(&last))
	require.Equal(t, events, last, "the id of an event is its number")
	ended := func() bool {
		require.NoError(t, s.db.QueryRow(s.ctx, `
			SELECT $1 - (SELECT highest_id FROM outbox_cursor ORDER BY id DESC LIMIT 1) + count(*) FROM outbox_failed WHERE status NOT IN ('dead', 'resolved')`,
			events).Scan(&left))
		return left == 0
	}
	require.True(t, s.await(t, testenv.Patience, ended), "%d events are left", left)
	ends, err := oracle.Ends(s.ctx, s.brokers, s.topic)
	require.NoError(t, err)
	require.True(t, s.await(t, testenv.Patience, func() bool { return s.reader.CaughtUp(ends) }))
}

// tracedStep is something that befalls a relay.
type tracedStep struct {
	what string
	do   func(*suite, *testing.T, *rand.Rand)
}

func tracedSteps() []tracedStep {
	return []tracedStep{
		{"kill", func(s *suite, t *testing.T, _ *rand.Rand) { s.killTraced(t, s.leading(t)) }},
		{"kill any", func(s *suite, t *testing.T, rng *rand.Rand) { s.killTraced(t, s.workers[rng.IntN(len(s.workers))]) }},
		{"unlock", func(s *suite, t *testing.T, _ *rand.Rand) { s.unlockTraced(t) }},
		{"freeze briefly", func(s *suite, t *testing.T, rng *rand.Rand) {
			thaw := s.freezeTraced(t, s.leading(t))
			s.sleep(t, time.Duration(rng.Int64N(int64(lease))))
			thaw()
		}},
		{"freeze", func(s *suite, t *testing.T, rng *rand.Rand) {
			thaw := s.freezeTraced(t, s.leading(t))
			s.sleep(t, lease+time.Duration(rng.Int64N(int64(lease))))
			thaw()
		}},
		{"freeze unlocked", func(s *suite, t *testing.T, rng *rand.Rand) {
			thaw := s.freezeTraced(t, s.leading(t))
			s.unlockTraced(t)
			s.sleep(t, time.Duration(rng.Int64N(int64(2*lease))))
			thaw()
		}},
		{"stop", func(s *suite, t *testing.T, _ *rand.Rand) { s.stopTraced(t, s.leading(t)) }},
		{"stop in flight", func(s *suite, t *testing.T, _ *rand.Rand) {
			w := s.leading(t)
			way, sent, goOn := s.ways[w].toKafka, make(chan struct{}, 1), make(chan struct{})
			way.Set(proxy.Fault{Requests: &proxy.Requests{Cut: func(key int16) bool {
				if key == kmsg.NewPtrProduceRequest().Key() {
					wait.Signal(sent)
					<-goOn
				}
				return false
			}}})
			select {
			case <-sent: // now a batch waits for its answer
			case <-time.After(10 * time.Second):
				t.Error("the leader sent nothing within 10 s")
			}
			time.AfterFunc(300*time.Millisecond, func() { way.Set(proxy.Fault{}); close(goOn) })
			s.stopTraced(t, w)
		}},
		{"apart", func(s *suite, t *testing.T, rng *rand.Rand) { s.apartTraced(t, rng, func(*worker) {}) }},
		{"apart, unlock", func(s *suite, t *testing.T, rng *rand.Rand) {
			s.apartTraced(t, rng, func(*worker) { s.unlockTraced(t) })
		}},
		{"apart, freeze", func(s *suite, t *testing.T, rng *rand.Rand) {
			s.apartTraced(t, rng, func(w *worker) {
				thaw := s.freezeTraced(t, w)
				s.sleep(t, lease+time.Duration(rng.Int64N(int64(lease))))
				thaw()
			})
		}},
		{"apart, kill", func(s *suite, t *testing.T, rng *rand.Rand) {
			s.apartTraced(t, rng, func(w *worker) { s.killTraced(t, w) })
		}},
	}
}

// apartTraced cuts the leader alone off from Kafka for a while, and does something more in the middle.
func (s *suite) apartTraced(t *testing.T, rng *rand.Rand, also func(*worker)) {
	t.Helper()
	w := s.leading(t)
	way := s.ways[w].toKafka
	way.Set([]proxy.Fault{{Cut: true}, {HoldUp: true}, {HoldDown: true}, {HoldUp: true, HoldDown: true}}[rng.IntN(4)])
	s.sleep(t, time.Duration(rng.Int64N(int64(lease))))
	also(w)
	s.sleep(t, time.Duration(rng.Int64N(int64(lease))))
	way.Set(proxy.Fault{})
}

// leading waits until a relay has the lease, and returns it.
func (s *suite) leading(t *testing.T) (w *worker) {
	t.Helper()
	held := func() (is bool) {
		require.NoError(t, s.db.QueryRow(s.ctx, `SELECT EXISTS (SELECT FROM outbox_lease WHERE expires_at > clock_timestamp())`).Scan(&is))
		return is
	}
	require.True(t, s.await(t, testenv.Patience, func() bool {
		w = s.leader(step{})
		return held()
	}), "no relay leads")
	return w
}

// tracedPid begins a step that befalls a relay.
func tracedPid(do string, w *worker) trace.Step { return trace.Begin(do, "pid", w.cmd.Process.Pid) }

func (s *suite) killTraced(t *testing.T, w *worker) {
	t.Helper()
	step := tracedPid("kill", w)
	s.kill(w)
	step.End()
}

func (s *suite) stopTraced(t *testing.T, w *worker) {
	t.Helper()
	step := tracedPid("exit", w)
	w.stop(t)
	step.End()
	s.workers = slices.DeleteFunc(s.workers, func(other *worker) bool { return other == w })
}

func (s *suite) freezeTraced(t *testing.T, w *worker) (thaw func()) {
	t.Helper()
	step := tracedPid("freeze", w)
	w.freeze(t)
	step.End()
	return func() {
		step := tracedPid("thaw", w)
		w.thaw(t)
		step.End()
	}
}

// unlockTraced ends the sessions that have the lock of a lease.
func (s *suite) unlockTraced(t *testing.T) {
	t.Helper()
	step := trace.Begin("break")
	rows, err := s.db.Query(s.ctx, `
		SELECT application_name FROM (SELECT application_name, pg_terminate_backend(pid) FROM pg_stat_activity JOIN `+leaderLocks+` USING (pid) OFFSET 0) AS ended`)
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	pids := []int{}
	for w, own := range s.ways {
		if slices.Contains(names, own.name) {
			pids = append(pids, w.cmd.Process.Pid)
		}
	}
	step.End("pids", pids)
}
