package faults

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/faults/internal/proxy"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/tools/kafkaserver"
	"github.com/outboxgo/outbox/tools/pgserver"
	"github.com/stretchr/testify/require"
)

var (
	faultMinutes = flag.Float64("faults.minutes", 0, "how long TestFaults, TestFaultsThroughPgBouncer, TestClusterFaults, TestHandlingFaults and TestViews disturb; 0 means each kind of disturbance once, briefly")
	faultPoison  = flag.Bool("faults.poison", true, "whether one in a thousand events of these tests is one that Kafka refuses")
	faultExactly = flag.Bool("faults.exactly", false, "whether the relays of TestFaults send exactly once")
)

// The promises hold while everything fails that can: relays are killed and
// frozen, PostgreSQL and Kafka crash, and the network between them is cut, slow
// or silent, for all relays or only for the one that leads, all of it while many writers
// commit, some events are large, a topic comes
// and goes, and some relays have a second for each statement. Behind each disturbance the
// events must flow again before the next begins, so that no kill hides that a
// relay hangs. Beside all that a third of all partitions accept nothing, operators leave
// transactions open, and others record very much in one transaction: the healthy events of a relay with
// default options must take no longer because of that.
func TestFaults(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	all := disturbances()
	if *faultExactly {
		all = exactlyDisturbances()
	}
	newSuite(t, false).requirePromises(t, all)
}

// The promises hold as well if relays reach PostgreSQL through a PgBouncer in transaction mode,
// which is killed, too. There a relay keeps no session that could have a lock, so no standby takes
// over before the lease has expired.
func TestFaultsThroughPgBouncer(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := newSuite(t, true)
	s.requirePromises(t, pooledDisturbances())
	s.requireNoLock(t)
}

// requirePromises disturbs the relays, and compares what has arrived in the end with what was
// committed.
func (s *suite) requirePromises(t *testing.T, all []disturbance) {
	t.Helper()
	v := result{Seed: seedOf(t)}
	stopWriting := s.write(t, v.Seed)
	stopSteady := s.steady.write(t, v.Seed)
	s.site.awaitArrivals(t, 1) // before, writers make their tables, and no outage may meet them
	start := time.Now()
	s.sleep(t, undisturbed)
	for _, step := range plan(v.Seed, *faultMinutes, all) {
		if *faultMinutes > 0 && time.Since(start).Minutes() > *faultMinutes || t.Failed() {
			break
		}
		s.run(t, step)
	}
	s.endAll(t)
	v.LongestGap = s.watch.stop().Milliseconds()
	stopWriting()
	stopSteady()
	v.Seconds, v.Kills, v.KafkaKills, v.CutWrites = time.Since(start).Seconds(), s.kills, s.kafkaKills, s.cutWrites.Load()
	s.compare(t, &v)
	s.steady.compareHistory(t, s, &v)
	v.Delayed = delayedOf(s.ctx, t, s.db)
	t.Logf("%s", v)
	require.NoError(t, v.Err())
	if len(s.steady.beside) > 0 {
		require.NoError(t, v.Healthy.Err())
	}
	require.GreaterOrEqual(t, v.Kills, int(*faultMinutes*50/15), "relays killed")
	require.NotZero(t, v.Delayed.Events)
	require.NotZero(t, min(v.Expired.InTime, v.Expired.Expired), "events that are delivered in time, and such that expire")
	s.requireEpochsInOrder(t)
	s.requireOneLeader(t)
}

// result is what requirePromises prints in the end.
type result struct {
	Seed       uint64  `json:"seed"`
	Seconds    float64 `json:"seconds"`
	Kills      int     `json:"kills"` // relays that got SIGKILL
	KafkaKills int     `json:"kafka_kills"`
	Events     int     `json:"events"`     // that committed
	Lost       int     `json:"lost"`       // committed, and neither arrived nor in outbox_failed
	Phantom    int     `json:"phantom"`    // arrived and never committed
	Duplicates int     `json:"duplicates"` // arrivals after the first
	Inversions int     `json:"inversions"` // first arrivals behind a later version of their key
	// LongestGap is the longest time without a first arrival while writers wrote
	// and servers and network were whole, counted from when they became so. Relays
	// may have been killed or frozen meanwhile.
	LongestGap int64         `json:"longest_gap_ms"`
	CutWrites  int64         `json:"cut_writes"` // statements at which the way to PostgreSQL was cut
	Delayed    delayedResult `json:"delayed"`
	Expired    expiredResult `json:"expired"` // those that expire soon
	// Healthy has the events for partitions that always accept everything, of the relay with default options.
	Healthy healthyResult `json:"healthy"`
}

// String returns the result as one line of JSON.
func (v result) String() string { return lineOf(v) }

// lineOf returns a result as one line of JSON.
func lineOf(result any) string {
	b, err := json.Marshal(result)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// Err says what is wrong, or returns nil. To send twice is allowed, unless relays send exactly once.
func (v result) Err() error {
	if v.Lost+v.Phantom+v.Inversions+v.Delayed.wrong()+v.Expired.wrong() > 0 || *faultExactly && v.Duplicates+v.Expired.Behind > 0 {
		return fmt.Errorf("faults: %s", v)
	}
	return nil
}

// seedOf returns the seed that was asked for, or a new one.
func seedOf(t *testing.T) uint64 {
	t.Helper()
	seed := *faultSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d (repeat with -faults.seed)", seed)
	return seed
}

// suite is a site with a broker of its own. Relays reach the servers through
// proxies, writers and the reader directly.
type suite struct {
	*site
	*crew
	start               time.Time
	kafka               *kafkaserver.Server
	bouncer             *pgserver.Bouncer // between relays and PostgreSQL, if the relays are to use one
	address             *url.URL          // of PostgreSQL or PgBouncer
	toPostgres, toKafka *proxy.Proxy      // that all relays share
	ways                map[*worker]ways
	apart               ways   // of the relay that a step is about
	releaseCommit       func() // see killAtEnd
	kafkaKills          int
	topics              *oracle.Topics
	rec                 *outbox.Recorder
	watch               *watch // of the topic that stays
	steady              *steady
	traced              bool         // it is one of TestTraces
	lasting             []lasting    // disturbances that have begun, and not ended
	cutWrites           atomic.Int64 // see cutAtWrites
}

// fleetingEvent is an event of the topic that comes and goes.
type fleetingEvent struct{ oracle.Event }

const (
	workers            = 3
	stayingPartitions  = 12 // of the topics that stay
	fleetingPartitions = 6  // of the one that comes and goes
	// undisturbed is how long events flow before the first disturbance.
	undisturbed = 5 * time.Second
)

// newSuite returns a suite with relays. If it is pooled, they reach PostgreSQL through PgBouncer.
func newSuite(t *testing.T, pooled bool) *suite {
	t.Helper()
	s := &suite{crew: newCrew(t), start: time.Now(), ways: map[*worker]ways{}}
	s.kafka = s.startKafka(t, nil)
	server := startServer(t, nil)
	address := server.URL()
	if pooled {
		s.startBouncer(t, server)
		address = s.bouncer.URL()
	}
	var err error
	s.address, err = url.Parse(address)
	require.NoError(t, err)
	s.toPostgres = through(t, s.address.Host)
	s.toKafka = through(t, s.kafka.Brokers()[0])
	s.site = newSiteBeside(t, server, server.URL(), s.kafka.Brokers())
	s.auditLease(t)
	testenv.CreateTopic(t, s.brokers, s.topic, stayingPartitions, refusing...)
	s.topics, err = oracle.NewTopics(s.ctx, oracle.TopicsConfig{Brokers: s.brokers, Topic: s.topic, Partitions: fleetingPartitions, Settings: refusing})
	require.NoError(t, err)
	t.Cleanup(s.topics.Close)
	events, err := outbox.NewRegistry("faults",
		outbox.Event("test.fault.happened.v1", "Key", oracle.Event.Aggregate).Topic(s.topic),
		outbox.Event("test.fleeting.happened.v1", "Key", fleetingEvent.Aggregate).Topic(s.topics.Fleeting()))
	require.NoError(t, err)
	s.rec, err = outbox.NewRecorder(events, outbox.RecorderConfig{})
	require.NoError(t, err)

	s.replace(t)
	s.watch = newWatch(t, s.reader)
	s.steady = newSteady(t, s)
	return s
}

func through(t *testing.T, target string) *proxy.Proxy {
	t.Helper()
	p, err := proxy.Listen(target)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

// write lets writers commit until stop is called, through all outages.
func (s *suite) write(t *testing.T, seed uint64) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	stopped, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- oracle.Write(ctx, oracle.Writers{
			DB: s.db, Schema: "public", Seed: seed, Record: s.record,
			Events: 1 << 30, Stop: stopped, Outages: true,
			Writers: 8, Keys: 1000, Pause: 200 * time.Millisecond, Open: 3,
			Large: 500, LargeBytes: maxMessageBytes * 9 / 10,
		})
		close(done)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return func() {
		close(stopped)
		select {
		case err := <-done:
			require.NoError(t, err)
		case <-time.After(2 * testenv.Patience):
			require.Fail(t, "writers do not end")
		}
	}
}

// record is an oracle.Record.
func (s *suite) record(ctx context.Context, tx pgx.Tx, events ...oracle.Event) error {
	all := make([]outbox.DomainEvent, len(events))
	for i, e := range events {
		if *faultPoison {
			e = poison(e)
		}
		all[i] = e
		if oracle.GoesToFleeting(e) {
			all[i] = fleetingEvent{e}
		}
		if s.traced {
			continue
		}
		from := time.Now()
		if isDelayed(e) {
			from = dueTime()
			all[i] = delay(all[i], from)
		}
		all[i] = expire(all[i], e.ID, from)
	}
	if *faultExactly && len(events) > 0 {
		if err := commitAsync(ctx, tx, events[0]); err != nil {
			return err
		}
	}
	return s.rec.Record(ctx, tx, all...)
}
