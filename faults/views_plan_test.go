package faults

import (
	"math/rand/v2"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/outboxgo/outbox/faults/internal/proxy"
)

// The kinds of outages of [TestViews].
const (
	kafkaCut    = "Kafka away"
	kafkaFrozen = "Kafka frozen"
	kafkaLogin  = "Kafka rejects the login"
	oneTopic    = "one topic may not be written"
	onePart     = "one partition accepts nothing"

	postgresCut      = "PostgreSQL away"
	postgresFrozen   = "PostgreSQL silent"
	postgresReadOnly = "PostgreSQL read-only"
	postgresFull     = "PostgreSQL without space"

	dependencyGone = "what a handler needs is away"
	leaderKilled   = "the leader is killed"
)

// viewsKind is a kind of outage.
type viewsKind struct {
	name string
	of   string // two outages of the same thing never overlap
	// begin begins it, and end ends it.
	begin, end func(*viewsSite, *testing.T)
	effects    []effect
}

var (
	ofKafka     = regexp.MustCompile(`^(Kafka|fetching|committing offsets.*|topic .*|dead-letter topic .*|partition .*)$`)
	ofTopic     = regexp.MustCompile(`^topic .*-rights$`)
	ofPartition = regexp.MustCompile(`^(partition .*-parts.*|topic .*-parts)$`)
	ofPostgres  = regexp.MustCompile(`^(PostgreSQL.*|the lease for .*|the lock of the lease.*|the move of delayed events|.* deliveries|getting a lock .*|looking for sessions .*|reading what is paused|retention.*|a session with PostgreSQL.*|saving positions|finding where reading begins|renewing the row of this process)$`)
)

// ofRelays returns the effect on the leader, and the one on standbys, which see it later or sooner.
func ofRelays(e effect, standbySees, standbyHeals time.Duration) []effect {
	leads, stands := e, e
	leads.role, stands.role = roleLeader, roleStandby
	stands.sees, stands.heals = standbySees, standbyHeals
	return []effect{leads, stands}
}

// kafkaEffects are those of an outage of Kafka as a whole.
func kafkaEffects(rejected bool, classes ...string) []effect {
	relays := effect{what: ofKafka, classes: classes, stops: true, rejected: rejected, breaker: roleLeader, sees: sendFails + viewsTrickle, heals: breakerCloses}
	return append(ofRelays(relays, contactEvery+contactAnswer, contactRetry+contactAnswer),
		effect{role: roleConsumer, what: ofKafka, classes: classes, stops: true, rejected: rejected,
			sees: contactEvery + contactAnswer, heals: contactRetry + contactAnswer + rejoined})
}

// postgresEffects are those of an outage of PostgreSQL, in which a statement of a relay, the consumer and the worker
// takes as long as is given here. A relay also waits until the lease of the last leader has expired.
func postgresEffects(relay, standby, consumer, worker time.Duration, classes ...string) []effect {
	relays := effect{what: ofPostgres, classes: classes, stops: true, sees: relay + viewsPoll + viewsTrickle, heals: outageTried + relay + viewsLease + takenOver}
	return append(ofRelays(relays, standby+viewsPoll, outageTried+standby+viewsLease+takenOver),
		effect{role: roleConsumer, what: ofPostgres, classes: classes, stops: true, sees: memberRenewed + consumer, heals: outageTried + consumer + rejoined},
		effect{role: roleWorker, what: ofPostgres, classes: classes, stops: true, sees: worker + viewsPoll, heals: outageTried + worker + viewsPoll})
}

// viewsKinds returns all kinds. A full disk is a trigger that raises its SQLSTATE, 53100, because a file system that
// is really full needs the rights to mount one.
func viewsKinds() []viewsKind {
	topicEffect := func(what *regexp.Regexp, classes ...string) []effect {
		return []effect{{role: roleLeader, what: what, classes: classes, sees: sendFails + viewsTrickle, heals: topicTried + sendFails}}
	}
	return []viewsKind{
		{kafkaCut, "Kafka", func(s *viewsSite, _ *testing.T) { s.toKafka.Set(proxy.Fault{Cut: true}) }, (*viewsSite).letKafka,
			kafkaEffects(false, "unreachable", "closed", "no_answer")},
		{kafkaFrozen, "Kafka", (*viewsSite).freezeKafka, (*viewsSite).thawKafka, kafkaEffects(false, "no_answer", "unreachable")},
		{kafkaLogin, "Kafka", (*viewsSite).rejectLogin, (*viewsSite).acceptLogin, kafkaEffects(true, "refused_login")},
		{oneTopic, "topic", (*viewsSite).denyTopic, (*viewsSite).allowTopic, topicEffect(ofTopic, "refused_rights")},
		{onePart, "partition", (*viewsSite).blockPartition, (*viewsSite).unblockPartition, topicEffect(ofPartition, "unavailable", "no_answer", "no_leader")},
		{postgresCut, "PostgreSQL", func(s *viewsSite, _ *testing.T) { s.toPostgres.Set(proxy.Fault{Cut: true}) }, (*viewsSite).letPostgres,
			postgresEffects(0, 0, 0, 0, "unreachable")},
		{postgresFrozen, "PostgreSQL", func(s *viewsSite, _ *testing.T) { s.toPostgres.Set(proxy.Fault{HoldUp: true, HoldDown: true}) }, (*viewsSite).letPostgres,
			postgresEffects(relayStatement, relayStatement, consumerStatement, workerStatement, "no_answer", "unreachable")},
		{postgresReadOnly, "PostgreSQL", (*viewsSite).forbidWrites, (*viewsSite).permitWrites,
			postgresEffects(0, viewsLease, 0, 0, "read_only")}, // a standby only reads until the lease has expired
		{postgresFull, "PostgreSQL", (*viewsSite).fillDisk, (*viewsSite).freeDisk, postgresEffects(0, viewsLease, 0, 0, "disk_full")},
		{dependencyGone, "dependency", (*viewsSite).takeDependency, (*viewsSite).giveDependency,
			[]effect{{role: roleWorker, breaker: notifyAction, sees: actionOpens, heals: actionCloses}}},
		{leaderKilled, "process", (*viewsSite).killLeader, (*viewsSite).restartRelay,
			[]effect{{role: roleLeader, perhaps: true, heals: takenOver + contactAnswer}, {role: roleStandby, perhaps: true, heals: takenOver + contactAnswer}}},
	}
}

// viewsStep is an outage of the plan.
type viewsStep struct {
	viewsKind
	at, lasts time.Duration
	chance    uint64

	fact  *fact
	until time.Time
}

// The times of a plan: those of a long run, and those of a short one.
type viewsTimes struct{ shortest, longest, pause, morePause time.Duration }

var (
	longViews  = viewsTimes{5 * time.Second, time.Minute, 5 * time.Second, 15 * time.Second}
	shortViews = viewsTimes{5 * time.Second, 10 * time.Second, 3 * time.Second, 3 * time.Second}
	// briefKinds are those of the short form: views can show them within the shortest outage.
	briefKinds = []string{kafkaCut, oneTopic, postgresCut, postgresFull, dependencyGone, leaderKilled}
)

const (
	// viewsCalm is how long nothing fails in the beginning, and viewsEnd in the end.
	viewsCalm = 6 * time.Second
	viewsEnd  = 8 * time.Second
)

// mayOverlap reports whether two outages may overlap: they are not of the same thing, and both can be begun and ended
// while the other one lasts.
func (k viewsKind) mayOverlap(other viewsKind) bool {
	asksKafka := func(k viewsKind) bool { return k.of == "topic" || k.of == "partition" }
	frozen := k.name == kafkaFrozen && asksKafka(other) || other.name == kafkaFrozen && asksKafka(k)
	return k.of != other.of && !frozen
}

// viewsPlan returns the outages of a run, in rounds that have each kind. A third of them gets another beside it.
func viewsPlan(seed uint64, lasts time.Duration, times viewsTimes, kinds []viewsKind) (steps []viewsStep) {
	rng := rand.New(rand.NewPCG(seed, 1<<51))
	length := func() time.Duration { return times.shortest + random(rng, times.longest-times.shortest+1) }
	var round []viewsKind
	next := func() viewsKind {
		if len(round) == 0 {
			round = slices.Clone(kinds)
			rng.Shuffle(len(round), func(i, j int) { round[i], round[j] = round[j], round[i] })
		}
		kind := round[0]
		round = round[1:]
		return kind
	}
	for at := viewsCalm; at < lasts-viewsEnd; {
		first := viewsStep{viewsKind: next(), at: at, lasts: length(), chance: rng.Uint64()}
		over := first.at + first.lasts
		if first.at+times.shortest > lasts-viewsEnd {
			break
		}
		steps = append(steps, first)
		if beside := kinds[rng.IntN(len(kinds))]; rng.IntN(3) == 0 && beside.mayOverlap(first.viewsKind) {
			second := viewsStep{viewsKind: beside, at: first.at + random(rng, first.lasts/2), lasts: length(), chance: rng.Uint64()}
			steps = append(steps, second)
			over = max(over, second.at+second.lasts)
		}
		at = over + times.pause + random(rng, times.morePause+1)
	}
	return steps
}
