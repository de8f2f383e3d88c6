package faults

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/outboxgo/outbox/faults/internal/proxy"
)

// disturbance is something that befalls relays, servers or the network.
type disturbance struct {
	what  string
	kind  string        // the short form has one of each; "" keeps it to the long one
	times int           // how often in a round
	min   time.Duration // how long it lasts,
	max   time.Duration // chosen at random
	begin func(*suite, *testing.T, step)
	end   func(*suite, *testing.T, step) // nil: it is over when it has begun
	// lasting begins a disturbance beside which the others go on. It lasts for min in the short form, and for max
	// in a run of 15 minutes; shorter runs have the same share of that.
	lasting func(*suite, *testing.T, step) ongoing
	// outage says that a server or the network is not whole meanwhile. Half the
	// time the leader is then killed in the middle of it.
	outage bool
	// slowAnswers says that PostgreSQL's answers are under way for long, and with them what relays know of its clock.
	slowAnswers bool
	// others says that another relay takes over meanwhile, and that events flow again
	// before it is over. It is also so if the one that it is about is killed.
	others bool
}

// step is a disturbance with what chance has decided. All of it is drawn ahead,
// so that the same seed gives the same steps however they go.
type step struct {
	disturbance
	lasts  time.Duration
	calm   time.Duration // behind it, once events flow
	kill   bool          // the leader, in the middle
	reset  bool          // held connections are reset in the end, instead of going on
	delay  time.Duration // of what is slow, or between two things that befall a relay
	relay  int           // the one it is about, where that is not the leader
	chance uint64        // for what is decided when it happens
}

// plan returns the steps that a seed stands for: one of each kind if minutes is
// zero, else more than there is time for, in rounds that have everything.
func plan(seed uint64, minutes float64, all []disturbance) (steps []step) {
	rng := rand.New(rand.NewPCG(seed, 1<<33))
	if minutes == 0 {
		seen := map[string]bool{"": true}
		for _, p := range round(rng, all) {
			if !seen[p.kind] {
				p.lasts, p.calm = p.min, 0
				steps = append(steps, p)
			}
			seen[p.kind] = true
		}
		return steps
	}
	for range 1 + int(minutes) {
		steps = append(steps, round(rng, all)...)
	}
	for i, p := range steps {
		if p.lasting != nil {
			steps[i].lasts = max(p.min, time.Duration(min(minutes/15, 1)*float64(p.max)))
		}
	}
	return steps
}

func round(rng *rand.Rand, all []disturbance) (steps []step) {
	between := func(from, to time.Duration) time.Duration { return from + time.Duration(rng.Int64N(int64(to-from)+1)) }
	for _, d := range all {
		for range d.times {
			steps = append(steps, step{
				disturbance: d,
				lasts:       between(d.min, d.max),
				calm:        between(0, 2*time.Second),
				delay:       between(20*time.Millisecond, 200*time.Millisecond),
				kill:        rng.IntN(2) == 0 && d.outage,
				reset:       rng.IntN(2) == 0,
				relay:       rng.IntN(workers),
				chance:      rng.Uint64(),
			})
		}
	}
	rng.Shuffle(len(steps), func(i, j int) { steps[i], steps[j] = steps[j], steps[i] })
	return steps
}

func disturbances() []disturbance {
	return slices.Concat(
		[]disturbance{
			{what: "break the connection with the leader's lock", kind: "unlock", times: 2, begin: (*suite).unlockLeader},
			{what: "break all connections of the leader", kind: "unlock all", times: 2, begin: (*suite).disconnectLeader},
			{
				what: "freeze the leader and break the connection with its lock", kind: "freeze unlocked", times: 2,
				min: time.Second, max: 2 * lease, begin: (*suite).freezeUnlocked, end: (*suite).thaw,
			},
			{
				what: "hold what goes to Kafka and break the connection with the leader's lock", kind: "unlock without Kafka", times: 1,
				min: time.Second, max: 2 * lease, begin: (*suite).unlockWithoutKafka, outage: true,
				end: func(s *suite, _ *testing.T, _ step) { s.toKafka.Set(proxy.Fault{}) },
			},
			{
				what: "kill PostgreSQL", kind: "crash PostgreSQL", times: 2, max: 3 * time.Second,
				begin: (*suite).killPostgres, end: (*suite).restartPostgres, outage: true,
			},
			{
				what: "kill Kafka", kind: "crash Kafka", times: 1, max: 5 * time.Second,
				begin: (*suite).killKafka, end: (*suite).restartKafka, outage: true,
			},
			{
				what: "delete a topic", kind: "topic", times: 3, min: time.Second, max: 2 * lease,
				begin: (*suite).deleteTopic, end: (*suite).createTopic,
			},
		},
		processes(),
		network("PostgreSQL", toPostgres),
		writes("PostgreSQL"),
		network("Kafka", toKafka),
		besides(),
		apart(
			companion{kind: "apart", do: func(*suite, *testing.T, step, *worker) {}},
			companion{what: ", and break the connection with its lock", kind: "apart, unlock", do: func(s *suite, t *testing.T, p step, _ *worker) { s.unlockLeader(t, p) }},
			companion{what: ", and break all its connections with PostgreSQL", kind: "apart, unlock all", do: (*suite).disconnect},
			companion{what: ", freeze it, and break the connection with its lock", kind: "apart, freeze unlocked", do: (*suite).freezeAndUnlock, others: true},
			companion{what: ", and cut its way to PostgreSQL", kind: "apart from both", do: (*suite).cutFromPostgres, others: true},
		),
	)
}

func toPostgres(s *suite) *proxy.Proxy { return s.toPostgres }
func toKafka(s *suite) *proxy.Proxy    { return s.toKafka }

// processes are the disturbances of relays whose servers and network are whole.
func processes() []disturbance {
	return []disturbance{
		{what: "kill the leader", kind: "kill", times: 12, begin: (*suite).killLeader},
		{what: "kill a relay", kind: "kill", times: 1, begin: (*suite).killAny},
		{what: "kill all relays", kind: "kill", times: 1, begin: (*suite).killAll},
		{
			what: "freeze the leader until it has lost its lease", kind: "freeze", times: 2,
			min: lease + time.Second, max: 2 * lease, begin: (*suite).freezeLeader, end: (*suite).thaw,
		},
		{
			what: "freeze a relay", kind: "freeze briefly", times: 1,
			min: lease / 10, max: lease, begin: (*suite).freezeAny, end: (*suite).thaw,
		},
	}
}

// network are the disturbances of the way from the relays to a server.
func network(server string, way func(*suite) *proxy.Proxy) []disturbance {
	fails := func(what, kind string, longest time.Duration, fault func(step) proxy.Fault) disturbance {
		return disturbance{
			what: what + server, kind: kind, times: 1, min: time.Second, max: longest, outage: true, slowAnswers: server == "PostgreSQL",
			begin: func(s *suite, _ *testing.T, p step) { way(s).Set(fault(p)) },
			end: func(s *suite, _ *testing.T, p step) {
				if p.reset {
					way(s).Reset()
				}
				way(s).Set(proxy.Fault{})
			},
		}
	}
	const longest = 3 * lease // far longer than a relay can wait for an answer
	return []disturbance{
		fails("cut the way to ", "cut", longest, func(step) proxy.Fault { return proxy.Fault{Cut: true} }),
		fails("slow down the way to ", "delay", longest, func(p step) proxy.Fault { return proxy.Fault{Delay: p.delay} }),
		fails("hold what goes to and comes from ", "silence", longest, func(step) proxy.Fault { return proxy.Fault{HoldUp: true, HoldDown: true} }),
		fails("hold what goes to ", "one way", longest, func(step) proxy.Fault { return proxy.Fault{HoldUp: true} }),
		fails("hold what comes from ", "one way", longest, func(step) proxy.Fault { return proxy.Fault{HoldDown: true} }),
		{
			what: "forget the open connections to " + server, kind: "strand", times: 1, outage: true,
			begin: func(s *suite, _ *testing.T, _ step) { way(s).Strand(func() bool { return true }) },
		},
		{
			what: "forget some of the open connections to " + server, kind: "strand some", times: 1, outage: true,
			begin: func(s *suite, _ *testing.T, p step) {
				rng := rand.New(rand.NewPCG(p.chance, 0))
				way(s).Strand(func() bool { return rng.IntN(2) == 0 })
			},
		},
	}
}
