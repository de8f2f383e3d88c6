package faults

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/internal/verify"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

var faultStops = flag.Int("faults.stops", 0, "how often TestStops stops a relay; 0 means a few times")

const (
	fewStops  = 10
	stopLimit = 2 * time.Second // from the cancellation to the return of Run, while Kafka answers
)

// A relay is stopped at random moments: in the middle of a backlog or of large events, while other
// topics accept nothing, while it retries events that Kafka rejects, and while operators leave transactions
// open. Each Run is soon back. In the end everything has arrived once: a clean stop repeats nothing while Kafka
// answers, except for an event whose row an operator has locked.
func TestStops(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	stops := *faultStops
	if stops == 0 {
		stops = fewStops
	}
	v := stopsResult{Seed: seedOf(t), Stops: stops}
	s := newStopsSite(t)
	stopWriting := s.write(t, v.Seed)
	stopOperators := s.operators.keepOpen(t, v.Seed)
	start := time.Now()
	for n, step := range stopsPlan(v.Seed, stops) {
		if step.topic {
			s.create(t, s.late)
		}
		s.burst(t, step.burst)
		took := s.stopOnce(t, step)
		v.Slowest = max(v.Slowest, took.Milliseconds())
		t.Logf("%5.1f s: stop %d of %d after %s: %d ms", time.Since(start).Seconds(), n+1, stops, step, took.Milliseconds())
	}
	stopWriting()
	stopOperators()
	v.Operators, v.Beside = s.operators.opened, s.besideOpen
	s.lift(t)
	s.drain(t, &v)
	t.Logf("%s", v)
	require.NoError(t, v.Err())
}

// stopsResult is what TestStops prints in the end.
type stopsResult struct {
	Seed       uint64 `json:"seed"`
	Stops      int    `json:"stops"`
	Slowest    int64  `json:"slowest_stop_ms"` // from the cancellation to the return of Run
	Events     int    `json:"events"`          // that committed
	Lost       int    `json:"lost"`            // committed and never arrived
	Phantom    int    `json:"phantom"`         // arrived and never committed
	Inversions int    `json:"inversions"`      // first arrivals behind a later version of their key
	Repeats    int    `json:"repeats"`         // arrivals after the first, without the next ones
	// LockedRepeats counts those of events whose rows operators had locked at a stop, at most one for each stop.
	LockedRepeats int `json:"locked_repeats"`
	Operators     int `json:"operators"`    // transactions that operators have left open
	Beside        int `json:"stops_beside"` // stops beside such a transaction
}

// String returns the result as one line of JSON.
func (v stopsResult) String() string { return lineOf(v) }

// Err says what is wrong, or returns nil.
func (v stopsResult) Err() error {
	if v.Lost+v.Phantom+v.Inversions+v.Repeats > 0 || v.Beside == 0 {
		return fmt.Errorf("faults: %s", v)
	}
	return nil
}

// stopStep is one stop. All of it is drawn ahead, so that the same seed gives the
// same steps however they go.
type stopStep struct {
	lasts time.Duration // from the start of Run, or the lease, to its cancellation
	leads bool          // it is first given the lease, however long that takes
	batch int           // the relay's BatchSize; small ones let it prefetch for long
	retry time.Duration // the relay's RetryInterval
	burst int           // events that are recorded before it starts
	topic bool          // the topic that is late appears before it starts
}

// String tells what is stopped.
func (p stopStep) String() string {
	from := "its start"
	if p.leads {
		from = "its lease"
	}
	return fmt.Sprintf("%v from %s with batches of %d, retries every %v and %d events more", p.lasts, from, p.batch, p.retry, p.burst)
}

func stopsPlan(seed uint64, stops int) []stopStep {
	rng := rand.New(rand.NewPCG(seed, 1<<34))
	batches := []int{10, 100, 1000, 5000}
	steps := make([]stopStep, stops)
	for n := range steps {
		p := stopStep{
			lasts: time.Duration(rng.IntN(1000)) * time.Millisecond,
			batch: batches[rng.IntN(len(batches))],
			retry: time.Duration(50+rng.IntN(500)) * time.Millisecond,
			leads: n%2 == 1,
			topic: n == stops/3,
		}
		if rng.IntN(10) == 0 && stops > fewStops {
			p.lasts *= 4
		}
		if n%10 == 0 {
			p.burst = 3000
		}
		steps[n] = p
	}
	return steps
}

// stopOnce runs a relay, stops it, and returns how long Run took to return.
func (s *stopsSite) stopOnce(t *testing.T, p stopStep) time.Duration {
	t.Helper()
	relay := s.stoppable(t, outbox.RelayConfig{BatchSize: p.batch, RetryInterval: p.retry})
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- relay.Run(ctx) }()
	if p.leads {
		require.Eventually(t, func() bool { return relay.Health().Leading }, testenv.Patience, time.Millisecond)
	}
	s.sleep(t, p.lasts)
	s.noteLocked()
	cancel()
	cancelled := time.Now()
	defer time.AfterFunc(stopLimit, func() { s.logActivity(t) }).Stop()
	select {
	case err := <-done:
		require.NoError(t, err)
	case <-time.After(testenv.Patience):
		require.Fail(t, "Run does not return")
	}
	took := time.Since(cancelled)
	s.requireReleased(t)
	if took > stopLimit {
		t.Errorf("Run was back after %v, stopped after %s", took, p)
	}
	return took
}

// requireReleased requires that no relay has to wait until a lease expires.
func (s *stopsSite) requireReleased(t *testing.T) {
	t.Helper()
	var held bool
	require.NoError(t, s.db.QueryRow(s.ctx, `SELECT EXISTS (SELECT FROM outbox_lease WHERE expires_at > clock_timestamp())`).Scan(&held))
	require.False(t, held, "a relay has stopped, and its lease is held")
}

// stoppable returns a relay whose client has the options of franz-go's own.
func (s *stopsSite) stoppable(t *testing.T, cfg outbox.RelayConfig) *outbox.Relay {
	t.Helper()
	cfg.Retry.MaxRetries = 1000 // what Kafka rejects is to be sent in the end
	cfg.Logger = slog.New(slog.NewTextHandler(s.log, nil))
	relay, err := outbox.NewRelay(s.relays, []kgo.Opt{kgo.SeedBrokers(s.brokers...)}, cfg)
	require.NoError(t, err)
	return relay
}

// drain lets a relay send all that is left, and compares what arrived with what
// was committed.
func (s *stopsSite) drain(t *testing.T, v *stopsResult) {
	t.Helper()
	committed, err := oracle.Committed(s.ctx, s.db, "public")
	require.NoError(t, err)
	stop := testenv.Run(t, s.stoppable(t, outbox.RelayConfig{RetryInterval: 100 * time.Millisecond}).Run)
	missing, progress := len(committed)+1, time.Now()
	for missing > 0 && time.Since(progress) < testenv.Patience {
		if now := s.missing(committed); now < missing {
			missing, progress = now, time.Now()
			t.Logf("%d of %d events are missing", missing, len(committed))
		}
		s.sleep(t, 200*time.Millisecond)
	}
	stop()
	var o oracle.Result
	arrived, places := s.arrived(t)
	o.Compare(committed, arrived)
	h := newHistory(t)
	h.add(t, committed, arrived, places, func(string) string { return "" }, func(e oracle.Event) string { return e.Key })
	require.Equal(t, map[verify.Kind]int64{verify.Lost: int64(o.Lost), verify.Phantom: int64(o.Phantom), verify.Repeated: int64(o.Duplicates), verify.Inverted: int64(o.Inversions)},
		countsOf(h.classify(t)), "%s", o)
	v.LockedRepeats = s.lockedRepeats(arrived)
	v.Events, v.Lost, v.Phantom, v.Inversions, v.Repeats = o.Events, o.Lost, o.Phantom, o.Inversions, o.Duplicates-v.LockedRepeats
}

// logActivity logs what PostgreSQL does while a stop takes too long, and what the relay has said.
func (s *stopsSite) logActivity(t *testing.T) {
	rows, err := s.db.Query(s.ctx, `
		SELECT format('%s blocked by %s, %s, %s: %s', pid, pg_blocking_pids(pid), state, wait_event, regexp_replace(left(query, 200), '\s+', ' ', 'g'))
		  FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'`)
	if err != nil {
		t.Error(err)
		return
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	t.Logf("a stop takes long; PostgreSQL: %q, %v", all, err)
	t.Logf("the relay: %s", s.log)
}

// noteLocked notes the events whose rows operators have locked at a stop.
func (s *stopsSite) noteLocked() {
	s.operators.mu.Lock()
	defer s.operators.mu.Unlock()
	if len(s.operators.locked) > 0 {
		s.besideOpen++
	}
	for id := range s.operators.locked {
		s.lockedAt[id]++
	}
}

// lockedRepeats counts the repeats of events that were locked at a stop.
func (s *stopsSite) lockedRepeats(arrived []oracle.Event) (n int) {
	times := map[string]int{}
	for _, e := range arrived {
		times[e.ID]++
	}
	for id, stops := range s.lockedAt {
		n += min(max(0, times[id]-1), stops)
	}
	return n
}
