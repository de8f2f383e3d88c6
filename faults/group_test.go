package faults

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/faults/internal/proxy"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/tools/pgserver"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
)

var (
	groupKills     = flag.Int("faults.kills", 0, "how many processes TestKilledConsumers and TestKilledWorkers kill at least; 0 means each kind of incident once, briefly")
	groupRecords   = flag.Int("faults.events", 5000, "how many events TestKilledConsumers and TestKilledWorkers have handled")
	groupJoinDelay = flag.Duration("faults.joindelay", 0, "group.initial.rebalance.delay.ms of the Kafka of TestKilledConsumers, whose default is 3s")
	groupBalancer  = flag.String("faults.balancer", "cooperative", "how its partitions are given out: cooperative, eager or kip848")
)

const (
	members    = 3
	partitions = 6
	heartbeat  = 400 * time.Millisecond
	session    = 2 * time.Second
	// calmSession is one that does not end because the machine is busy.
	calmSession = 20 * time.Second
	// maxLagTime is how long committed offsets may lag behind handled records.
	maxLagTime = 15 * time.Second
)

// The effects of handlers in PostgreSQL, by pgx or by database/sql, happen once, while members of
// the group are killed, stopped and started, and frozen past their session so that two have the
// same partition for a while; while the topic gets partitions, or is deleted and created again; and
// while PostgreSQL loses its last commits, after which an operator rewinds the group. Handlers
// without a transaction see everything, in order, and repeats only if a member did not end cleanly.
// Some events fail again and again, and are parked: they and the events behind them are handled in
// their order, or become dead.
func TestKilledConsumers(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	v := groupResult{Seed: seedOf(t), Balancer: *groupBalancer, JoinDelay: groupJoinDelay.String(), Incidents: map[string]int{}}
	g := newGroup(t, v.Seed, *groupJoinDelay, shortSessions())
	incidents := groupPlan(v.Seed, *groupKills)
	// Half of the events are there before the members that are killed, more of them
	// than a member takes into its queues.
	each := *groupRecords / 2 / (len(incidents) + 3)

	g.setSession(t, calmSession)
	g.replace(t)
	g.awaitStart(t)
	for _, calm := range []incident{
		{what: "start", begin: func(*group, *testing.T, incident) {}},
		{what: "stop a member", begin: (*group).stopOne, lasts: time.Second / 2},
		{what: "stop all members while handlers are slow", begin: (*group).stopAllSlow},
	} {
		calm.delay, calm.wait = 100*time.Millisecond, true
		g.run(t, calm, each)
	}
	g.stop(t, g.workers...)
	require.Zero(t, g.readDiaries(t).repeats, "seen again, though every member ended cleanly")

	g.shop.sell(t, *groupRecords/2)
	g.setSession(t, session)
	g.replace(t)
	for _, p := range incidents {
		g.run(t, p, each)
		v.Incidents[p.kind]++
	}
	g.shop.sell(t, *groupRecords-g.shop.events)
	g.awaitHandled(t)
	g.awaitRetried(t)
	g.stop(t, g.workers...)
	g.compare(t, &v)
	t.Logf("%s", v)
	require.NoError(t, v.Err())
	require.NoError(t, v.missing())
	require.GreaterOrEqual(t, v.Kills, *groupKills)
	if *groupKills > 0 {
		require.Positive(t, v.Dead, "events whose handler fails for ever")
	}
}

// shortSessions returns the settings of a broker that soon notices that a member is gone.
func shortSessions() map[string]string {
	shortest, beat := fmt.Sprint(session.Milliseconds()), fmt.Sprint(heartbeat.Milliseconds())
	return map[string]string{
		"group.min.session.timeout.ms": shortest, "group.consumer.min.session.timeout.ms": shortest,
		"group.consumer.min.heartbeat.interval.ms": beat, "group.consumer.heartbeat.interval.ms": beat,
	}
}

// groupResult is what TestKilledConsumers prints in the end.
type groupResult struct {
	Seed     uint64  `json:"seed"`
	Seconds  float64 `json:"seconds"`
	Balancer string  `json:"balancer"`
	// JoinDelay is how long Kafka waits for more members of a group that has none.
	JoinDelay string `json:"join_delay"`
	// Incidents says how often each kind of incident happened, see incidentKinds.
	Incidents   map[string]int `json:"incidents"`
	Kills       int            `json:"kills"`   // members that got SIGKILL
	Stops       int            `json:"stops"`   // that were stopped cleanly
	Freezes     int            `json:"freezes"` // that were frozen
	LongestStop int64          `json:"longest_stop_ms"`
	CommitsLost int            `json:"commits_lost"` // actions that PostgreSQL had committed, and lost
	Rewound     int            `json:"rewound"`      // records to which the group went back
	Conflicts   int            `json:"conflicts"`    // that PostgreSQL rolled back with 40001, without those in batches
	Rebalances  int            `json:"rebalances"`   // times that a member was given partitions
	Records     int            `json:"records"`      // on the topic
	Events      int            `json:"events"`       // of these, different ones
	Handled     int            `json:"handled"`      // actions in event_handled
	// RepeatsSkipped are actions that members found done already, and RepeatsSeen
	// records that the handler without a transaction saw again.
	RepeatsSkipped int `json:"repeats_skipped"`
	RepeatsSeen    int `json:"repeats_seen"`
	// Parked are the rows of event_delivery: events that a handler could not handle, and those behind them. Dead is how
	// many of the events are such that the handler fails for ever, and DeadLetters how many were sent.
	Parked      int `json:"parked"`
	Dead        int `json:"dead"`
	DeadLetters int `json:"dead_letters"`

	WrongCounts int `json:"wrong_counts"` // of product_statistic
	WrongNotes  int `json:"wrong_notes"`  // actions too many or too few in event_handled
	Unseen      int `json:"unseen"`       // records that the handler without a transaction never saw
	Disorder    int `json:"disorder"`     // that it saw out of order
	Overtaken   int `json:"overtaken"`    // effects that were committed behind one of a later event of the same key and action
	Open        int `json:"open"`         // parked events that are neither DONE nor DEAD in the end
	WrongDead   int `json:"wrong_dead"`   // DEAD or with a dead letter and not meant to be, or the other way round
	FailedTries int `json:"failed_tries"` // for which no handler was to blame
	Lag         int `json:"lag"`          // records that the committed offsets do not cover
	LateStops   int `json:"late_stops"`   // members whose Run did not return within StopTimeout
}

// String returns the result as one line of JSON.
func (v groupResult) String() string { return lineOf(v) }

// missing says what did not happen though it was to, or returns nil: a run without it has
// shown less than it seems.
func (v groupResult) missing() error {
	for _, p := range incidentKinds() {
		if v.Incidents[p.kind] == 0 {
			return fmt.Errorf("faults: %q did not happen: %s", p.kind, v)
		}
	}
	if min(v.CommitsLost, v.Rewound, v.Conflicts, v.RepeatsSkipped, v.Parked) == 0 {
		return fmt.Errorf("faults: no commit was lost, no record repeated, no transaction in conflict, or no event parked: %s", v)
	}
	return nil
}

// Err says what is wrong, or returns nil.
func (v groupResult) Err() error {
	if v.WrongCounts+v.WrongNotes+v.Unseen+v.Disorder+v.Overtaken+v.Open+v.WrongDead+v.FailedTries+v.Lag+v.LateStops > 0 {
		return fmt.Errorf("faults: %s", v)
	}
	return nil
}

// group is a consumer group whose members are processes of their own.
type group struct {
	*crew
	start   time.Time
	server  *pgserver.Server
	db      *pgxpool.Pool
	client  *kgo.Client
	shop    *shop
	spec    memberSpec
	toKafka *proxy.Proxy
	diaries string // the folder

	stops, freezes int
	longestStop    time.Duration
	lost           int               // actions that PostgreSQL has lost
	rewound        int               // records to which the group went back
	gone           []map[int32]int64 // the ends of the topics that were deleted
	repeated       []eventRange      // events that PostgreSQL may have lost
}

// newGroup returns a group without members. Kafka waits for joinDelay for more of them when the
// first has come, see group.initial.rebalance.delay.ms, and has extra settings.
func newGroup(t *testing.T, seed uint64, joinDelay time.Duration, settings map[string]string) *group {
	t.Helper()
	require.Contains(t, []string{"cooperative", "eager", kip848}, *groupBalancer, "-faults.balancer")
	g := &group{crew: newCrew(t), start: time.Now(), diaries: t.TempDir(), server: startServer(t, nil)}
	settings["group.initial.rebalance.delay.ms"] = fmt.Sprint(joinDelay.Milliseconds())
	// This broker does not crash. On a busy machine it must not be taken for dead: it would make no
	// topics and partitions meanwhile.
	settings["broker.session.timeout.ms"] = "30000"
	kafka := g.startKafka(t, settings)
	g.toKafka = through(t, kafka.Brokers()[0])
	cfg, err := pgxpool.ParseConfig(g.server.URL())
	require.NoError(t, err)
	g.db = openPool(t, cfg)
	require.NoError(t, outbox.Migrate(g.ctx, g.db, outbox.MigrateConfig{}))
	// The trigger lets a crash forget what handlers have committed, as a failover to a standby that lags would.
	_, err = g.db.Exec(g.ctx, `CREATE TABLE product_statistic (
		product_id text PRIMARY KEY, sales_count bigint NOT NULL DEFAULT 0, view_count bigint NOT NULL DEFAULT 0,
		like_count bigint NOT NULL DEFAULT 0, actions bigint NOT NULL);
		CREATE TABLE effect (n bigserial PRIMARY KEY, action text NOT NULL, product_id text NOT NULL, sequence bigint NOT NULL);
		CREATE FUNCTION commit_asynchronously() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			PERFORM set_config('synchronous_commit', 'off', true);
			RETURN NULL;
		END $$;
		CREATE TRIGGER asynchronous AFTER INSERT OR UPDATE ON product_statistic EXECUTE FUNCTION commit_asynchronously()`)
	require.NoError(t, err)

	g.spec = memberSpec{
		Postgres: g.server.URL() + "&deadlock_timeout=20ms&synchronous_commit=off", Brokers: kafka.Brokers(),
		KafkaVia: g.toKafka.Addr(), Topic: "shop-" + uuid.NewString(), Group: "product-statistics", Balancer: *groupBalancer,
		Retry: likeRetry(),
	}
	testenv.CreateTopic(t, kafka.Brokers(), g.spec.Topic, partitions)
	testenv.CreateTopic(t, kafka.Brokers(), outbox.DeadLetterTopic(g.spec.Topic), 1)
	g.shop = newShop(g.spec.Topic, seed)
	g.connect(t)
	return g
}

// connect makes another client for the shop and for administration. One that knows a topic
// cannot send to one that is created again under its name.
func (g *group) connect(t *testing.T) {
	t.Helper()
	// Later versions of the protocol know topics by ids alone.
	client, err := kgo.NewClient(kgo.SeedBrokers(g.spec.Brokers...), kgo.MaxVersions(kversion.V3_9_0()))
	require.NoError(t, err)
	t.Cleanup(client.Close)
	g.client, g.shop.client = client, client
}

// setSession sets the session timeout of members that are started from now on. With
// KIP-848 it is one of the group, and Kafka's.
func (g *group) setSession(t *testing.T, d time.Duration) {
	t.Helper()
	g.spec.Session = d
	if g.spec.Balancer != kip848 {
		return
	}
	value := fmt.Sprint(d.Milliseconds())
	request := kmsg.NewPtrIncrementalAlterConfigsRequest()
	request.Resources = []kmsg.IncrementalAlterConfigsRequestResource{{
		ResourceType: kmsg.ConfigResourceTypeGroupConfig, ResourceName: g.spec.Group,
		Configs: []kmsg.IncrementalAlterConfigsRequestResourceConfig{{Name: "consumer.session.timeout.ms", Op: kmsg.IncrementalAlterConfigOpSet, Value: &value}},
	}}
	response, err := request.RequestWith(g.ctx, g.client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Resources[0].ErrorCode))
}

// replace starts members for those that are gone, and waits until they have begun
// their diaries: until then they would not end cleanly.
func (g *group) replace(t *testing.T) {
	t.Helper()
	for len(g.workers) < members {
		g.started++
		spec := g.spec
		spec.Diary = filepath.Join(g.diaries, fmt.Sprintf("member-%d", g.started))
		g.launch(t, memberVar, spec)
		begun := func() bool { _, err := os.Stat(spec.Diary); return err == nil }
		require.True(t, g.await(t, testenv.Patience, begun), "a member does not come up")
	}
}

// awaitStart waits until it is written down that the group begins at the end of the topic,
// which is still empty. What is sent from now on must not be skipped.
func (g *group) awaitStart(t *testing.T) {
	t.Helper()
	written := func() (is bool) {
		require.NoError(t, g.db.QueryRow(g.ctx, `SELECT EXISTS (SELECT FROM consumer_start WHERE topic = $1)`, g.spec.Topic).Scan(&is))
		return is
	}
	require.True(t, g.await(t, testenv.Patience, written), "the group does not begin")
}

// awaitHandled waits until everything is handled or parked and the offsets are committed.
func (g *group) awaitHandled(t *testing.T) {
	t.Helper()
	began, done := time.Now(), 0
	handled := func() bool {
		done = g.doneOrParked(t)
		return done >= g.shop.actions
	}
	if !g.await(t, stall, handled) {
		t.Errorf("%d of %d actions are done or parked after %v", done, g.shop.actions, stall)
	}
	handledAfter := time.Since(began)
	if !g.await(t, maxLagTime, func() bool { return g.lag(t) == 0 }) {
		t.Errorf("all is handled, and the offsets lag %d behind after %v", g.lag(t), maxLagTime)
	}
	t.Logf("%5.1f s: all handled after %v, and committed after %v", time.Since(g.start).Seconds(), handledAfter.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
}

// done returns how many actions are done in PostgreSQL.
func (g *group) done(t *testing.T) (done int) {
	t.Helper()
	require.NoError(t, g.db.QueryRow(g.ctx, `SELECT coalesce(sum(actions), 0) FROM product_statistic`).Scan(&done))
	return done
}
