package faults

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// brokersFault is something that befalls a cluster of brokers, or PostgreSQL beside it.
type brokersFault struct {
	what     string
	kind     string // the short form has one of each
	min, max time.Duration
	first    bool // only in the first round: it cannot happen twice
	do       func(*brokersSite, *testing.T, brokersStep)
}

// brokersStep is a fault with what chance has decided.
type brokersStep struct {
	brokersFault
	brief  bool // as the short form has it
	lasts  time.Duration
	chance uint64
}

func brokersFaults() []brokersFault {
	return []brokersFault{
		{what: "restart brokers one after the other", kind: "restart", do: (*brokersSite).restartAll},
		{what: "kill the leader of most partitions", kind: "kill", do: (*brokersSite).killLeading},
		{what: "kill the controller", kind: "kill", do: (*brokersSite).killController},
		{what: "kill a coordinator", kind: "kill", do: (*brokersSite).killCoordinator},
		{what: "kill two of three brokers", kind: "two", min: 5 * time.Second, max: 40 * time.Second, do: (*brokersSite).killTwo},
		{what: "freeze a broker", kind: "freeze", min: 15 * time.Second, max: 40 * time.Second, do: (*brokersSite).freezeOne},
		{what: "reassign partitions", kind: "reassign", do: (*brokersSite).reassign},
		{what: "elect the preferred leaders", kind: "elect", do: (*brokersSite).electPreferred},
		{what: "add partitions", kind: "add", do: (*brokersSite).addPartitions},
		{what: "promote the standby of PostgreSQL", kind: "promote", first: true, do: (*brokersSite).promote},
	}
}

// brokersPlan returns the steps that a seed stands for: one of each kind, as brief as they can
// be, if minutes is zero; else more than there is time for, in rounds that have everything.
func brokersPlan(seed uint64, minutes float64) (steps []brokersStep) {
	rng := rand.New(rand.NewPCG(seed, 1<<35))
	kinds := map[string]bool{}
	for round := range 1 + int(minutes) {
		all := slices.DeleteFunc(brokersFaults(), func(f brokersFault) bool { return f.first && round > 0 })
		rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		for _, f := range all {
			step := brokersStep{brokersFault: f, brief: minutes == 0, lasts: f.max, chance: rng.Uint64()}
			if step.brief {
				step.lasts = f.min
			}
			if !step.brief || !kinds[f.kind] {
				steps = append(steps, step)
			}
			kinds[f.kind] = true
		}
	}
	return steps
}

func (p brokersStep) rng() *rand.Rand { return rand.New(rand.NewPCG(p.chance, 0)) }

// restartAll restarts each broker cleanly, once the one before is in sync again. The brief form
// is over after one broker.
func (s *brokersSite) restartAll(t *testing.T, p brokersStep) {
	t.Helper()
	ids := s.kafka.IDs()
	p.rng().Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	if p.brief {
		ids = ids[:1]
	}
	for i, id := range ids {
		since := time.Now()
		require.NoError(t, s.kafka.Node(id).ShutDown(s.ctx))
		s.measure(t, since, fmt.Sprintf("%s: stop broker %d", p.what, id))
		since = time.Now()
		require.NoError(t, s.kafka.Node(id).Restart(s.ctx))
		s.measure(t, since, fmt.Sprintf("%s: start broker %d", p.what, id))
		if i < len(ids)-1 {
			s.heal(t)
		}
	}
}

func (s *brokersSite) killLeading(t *testing.T, p brokersStep) {
	t.Helper()
	s.killOne(t, p.what, s.leading(t))
}

func (s *brokersSite) killController(t *testing.T, p brokersStep) {
	t.Helper()
	s.killOne(t, p.what, s.controller(t))
}

// killCoordinator kills the coordinator of a group or of a transactional id.
func (s *brokersSite) killCoordinator(t *testing.T, p brokersStep) {
	t.Helper()
	of := []string{"a group", "a transactional id"}[p.chance%2]
	s.killOne(t, p.what+" of "+of, s.coordinator(t, int8(p.chance%2)))
}

// killOne kills a broker, and starts it again once both senders do without it.
func (s *brokersSite) killOne(t *testing.T, what string, id int32) {
	t.Helper()
	require.NoError(t, s.kafka.Node(id).Kill())
	s.measure(t, time.Now(), fmt.Sprintf("%s, broker %d", what, id))
	since := time.Now()
	require.NoError(t, s.kafka.Node(id).Restart(s.ctx))
	s.measure(t, since, fmt.Sprintf("start broker %d again", id))
}

// killTwo kills two of three brokers. The third can accept nothing then, because the others are in
// its list of replicas in sync, and no controller can change that.
func (s *brokersSite) killTwo(t *testing.T, p brokersStep) {
	t.Helper()
	victims := s.kafka.IDs()
	p.rng().Shuffle(len(victims), func(i, j int) { victims[i], victims[j] = victims[j], victims[i] })
	victims = victims[:2]
	for _, id := range victims {
		require.NoError(t, s.kafka.Node(id).Kill())
	}
	since := time.Now()
	s.logf(t, "%s for %v, brokers %v", p.what, p.lasts, victims)
	s.sleep(t, p.lasts)
	if n := s.plain.acceptedBetween(since, time.Now()); n > 0 {
		t.Errorf("one broker of three has accepted %d records of the plain producer", n)
	}
	if n := s.events.acceptedBetween(since, time.Now()); n > 0 {
		t.Errorf("one broker of three has accepted %d events", n)
	}
	restarted := make(chan error, len(victims))
	for _, id := range victims {
		go func() { restarted <- s.kafka.Node(id).Restart(s.ctx) }()
	}
	require.NoError(t, errors.Join(<-restarted, <-restarted))
	s.measure(t, since, fmt.Sprintf("%s for %v, brokers %v", p.what, p.lasts, victims))
}

// freezeOne freezes a broker: the controller, or the leader of most partitions.
func (s *brokersSite) freezeOne(t *testing.T, p brokersStep) {
	t.Helper()
	of, choose := "the leader of most partitions", s.leading
	if p.chance%2 == 1 {
		of, choose = "the controller", s.controller
	}
	id := choose(t)
	node := s.kafka.Node(id)
	require.NoError(t, node.Freeze())
	since := time.Now()
	thawed := make(chan error, 1)
	timer := time.AfterFunc(p.lasts, func() { thawed <- node.Thaw() })
	t.Cleanup(func() { timer.Stop() })
	s.measure(t, since, fmt.Sprintf("%s for %v, %s, broker %d", p.what, p.lasts, of, id))
	require.NoError(t, <-thawed)
	s.measure(t, since.Add(p.lasts), fmt.Sprintf("broker %d goes on", id))
}

// reassign moves all partitions to two of three brokers each, and then to all.
func (s *brokersSite) reassign(t *testing.T, p brokersStep) {
	t.Helper()
	rng := p.rng()
	for _, replicas := range []int{2, 3} {
		since := time.Now()
		s.alterAssignments(t, rng, replicas)
		s.measure(t, since, fmt.Sprintf("%s to %d replicas", p.what, replicas))
	}
}

func (s *brokersSite) electPreferred(t *testing.T, p brokersStep) {
	t.Helper()
	since := time.Now()
	s.electLeaders(t)
	s.measure(t, since, p.what)
}

func (s *brokersSite) addPartitions(t *testing.T, p brokersStep) {
	t.Helper()
	since := time.Now()
	n := s.createPartitions(t, p.rng(), 3)
	s.measure(t, since, fmt.Sprintf("%s, to %d", p.what, n))
}

// promote kills the primary. Until the standby is promoted nothing can be recorded.
func (s *brokersSite) promote(t *testing.T, p brokersStep) {
	t.Helper()
	s.failOver(t)
	s.measure(t, time.Now(), p.what)
}
