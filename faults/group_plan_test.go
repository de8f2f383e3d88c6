package faults

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/outboxgo/outbox/faults/internal/proxy"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// incident is something that happens to members while events arrive.
type incident struct {
	what  string
	kind  string // under which it is counted; the short form has one of each
	times int    // how often in a round
	kills int    // how many members get SIGKILL
	min   time.Duration
	max   time.Duration // until those that are gone are replaced, chosen at random
	begin func(*group, *testing.T, incident)
	end   func(*group, *testing.T, incident) // nil: it is over when it has begun

	// What chance has decided, all of it drawn ahead, so that the same seed gives
	// the same incidents however they go.
	lasts time.Duration
	delay time.Duration // from the arrival of events
	first int           // the member it is about
	wait  bool          // until all is handled or parked, before the next begins
}

// busy is how many incidents of the long form pass before a wait for the events
// that were there from the start.
const busy = 10

// groupPlan returns the incidents that a seed stands for: one of each kind if there are
// to be no kills, else rounds that have everything, until there are enough.
func groupPlan(seed uint64, kills int) (incidents []incident) {
	rng := rand.New(rand.NewPCG(seed, 1<<34))
	if kills == 0 {
		seen := map[string]bool{}
		for _, p := range groupRound(rng) {
			if !seen[p.kind] {
				p.lasts, p.wait = p.min, true
				incidents = append(incidents, p)
			}
			seen[p.kind] = true
		}
		return incidents
	}
	for planned := 0; planned < kills; {
		for _, p := range groupRound(rng) {
			planned += p.kills
			incidents = append(incidents, p)
		}
	}
	for i := range busy {
		incidents[i].wait = false
	}
	return incidents
}

func groupRound(rng *rand.Rand) (incidents []incident) {
	for _, p := range incidentKinds() {
		for range p.times {
			p.lasts = p.min + time.Duration(rng.Int64N(int64(p.max-p.min)+1))
			p.delay = time.Duration(rng.Int64N(int64(300 * time.Millisecond)))
			p.first = rng.IntN(members)
			p.wait = rng.IntN(2) == 0
			incidents = append(incidents, p)
		}
	}
	rng.Shuffle(len(incidents), func(i, j int) { incidents[i], incidents[j] = incidents[j], incidents[i] })
	return incidents
}

func incidentKinds() []incident {
	const zombie, dead = 3 * session / 2, 5 * session / 2
	return []incident{
		{what: "kill a member", kind: "kills", times: 6, kills: 1, max: session, begin: (*group).killSome},
		{what: "kill two members", kind: "kills", times: 1, kills: 2, max: session, begin: (*group).killSome},
		{what: "kill all members", kind: "kills_of_all", times: 1, kills: members, max: session, begin: (*group).killSome},
		{what: "stop a member", kind: "stops", times: 2, max: session, begin: (*group).stopOne},
		{what: "stop all members", kind: "stops", times: 1, max: session, begin: (*group).stopAll},
		{what: "stop all members while handlers are slow", kind: "slow_stops", times: 1, max: session, begin: (*group).stopAllSlow},
		{what: "stop all members while they join", kind: "joining_stops", times: 1, max: session, begin: (*group).stopJoining},
		{what: "freeze a member until its session is over", kind: "freezes", times: 3, min: zombie, max: dead, begin: (*group).freeze, end: (*group).thaw},
		{what: "freeze a member briefly", kind: "short_freezes", times: 1, min: session / 10, max: session / 2, begin: (*group).freeze, end: (*group).thaw},
		{what: "kill a member that is frozen", kind: "kills_of_frozen", times: 1, kills: 1, min: zombie, max: dead, begin: (*group).freeze, end: (*group).killFrozen},
		{what: "cut the way to Kafka", kind: "cuts", times: 2, min: session / 2, max: dead, begin: (*group).cut, end: (*group).mend},
		{what: "add partitions to the topic", kind: "partitions_added", times: 1, begin: (*group).addPartitions},
		{what: "delete the topic and create it again", kind: "topics_recreated", times: 1, max: session, begin: (*group).createTopic},
		{what: "delete the topic and create it again while no member runs", kind: "topics_recreated_unseen", times: 1, max: session, begin: (*group).createTopicUnseen},
		{what: "have PostgreSQL lose what it committed last, and rewind", kind: "rewinds", times: 1, max: session, begin: (*group).loseCommits},
		{what: "hold what goes to Kafka", kind: "holds", times: 1, min: zombie, max: dead, begin: (*group).hold, end: (*group).mend},
	}
}

// run runs an incident while n events arrive.
func (g *group) run(t *testing.T, p incident, n int) {
	t.Helper()
	parked, open := g.parked(t)
	t.Logf("%5.1f s: %s for %v (%d events, %d kills, %d parked so far, %d of them open)", time.Since(g.start).Seconds(), p.what, p.lasts.Round(time.Millisecond),
		g.shop.events, g.kills, parked, open)
	g.shop.sell(t, n/2)
	g.sleep(t, p.delay)
	p.begin(g, t, p)
	g.shop.sell(t, n-n/2)
	g.sleep(t, p.lasts)
	if p.end != nil {
		p.end(g, t, p)
	}
	g.replace(t)
	if p.wait {
		g.awaitHandled(t)
	}
}

func (g *group) killSome(_ *testing.T, p incident) {
	victims := make([]*worker, p.kills)
	for i := range victims {
		victims[i] = g.workers[(p.first+i)%len(g.workers)]
	}
	for _, w := range victims {
		g.kill(w)
	}
}

// addPartitions adds two partitions when all is handled or parked, because events of a key go to
// another partition then. They are new to a group that runs, and what is in them must not
// be skipped.
func (g *group) addPartitions(t *testing.T, _ incident) {
	t.Helper()
	g.awaitHandled(t)
	count := len(g.ends(t, g.spec.Topic)) + 2
	request := kmsg.NewPtrCreatePartitionsRequest()
	request.Topics = []kmsg.CreatePartitionsRequestTopic{{Topic: g.spec.Topic, Count: int32(count)}}
	response, err := request.RequestWith(g.ctx, g.client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Topics[0].ErrorCode))
	require.True(t, g.await(t, testenv.Patience, func() bool {
		g.client.ForceMetadataRefresh()
		leader, _, err := g.client.PartitionLeader(g.spec.Topic, int32(count-1))
		return err == nil && leader >= 0
	}), "the shop does not see the new partitions")
}

func (g *group) stopOne(t *testing.T, p incident) {
	t.Helper()
	g.stop(t, g.workers[p.first])
}

func (g *group) stopAll(t *testing.T, _ incident) {
	t.Helper()
	g.stop(t, g.workers...)
}

// stopJoining stops all members, and those that take their places too, as soon as they
// join.
func (g *group) stopJoining(t *testing.T, p incident) {
	t.Helper()
	g.stop(t, g.workers...)
	g.replace(t)
	g.sleep(t, p.delay)
	g.stop(t, g.workers...)
}

// stop stops members cleanly.
func (g *group) stop(t *testing.T, leaving ...*worker) {
	t.Helper()
	began := time.Now()
	for _, w := range leaving {
		w.ask()
	}
	for _, w := range leaving {
		w.stop(t)
	}
	g.longestStop = max(g.longestStop, time.Since(began))
	g.stops += len(leaving)
	leaving = slices.Clone(leaving)
	g.workers = slices.DeleteFunc(g.workers, func(w *worker) bool { return slices.Contains(leaving, w) })
}

func (g *group) freeze(t *testing.T, p incident) {
	t.Helper()
	g.workers[p.first].freeze(t)
	g.freezes++
}

func (g *group) thaw(t *testing.T, p incident) {
	t.Helper()
	g.workers[p.first].thaw(t)
}

func (g *group) cut(_ *testing.T, _ incident)  { g.toKafka.Set(proxy.Fault{Cut: true}) }
func (g *group) hold(_ *testing.T, _ incident) { g.toKafka.Set(proxy.Fault{HoldUp: true}) }
func (g *group) mend(_ *testing.T, _ incident) { g.toKafka.Set(proxy.Fault{}) }

func (g *group) killFrozen(_ *testing.T, p incident) { g.kill(g.workers[p.first]) }
