package itest

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

// exactlyFixture is a relay that sends exactly once to a topic that refuses large events.
type exactlyFixture struct {
	*relayFixture
	cfg outbox.RelayConfig
}

func newExactlyFixture(t *testing.T) *exactlyFixture {
	t.Helper()
	testenv.Long(t)
	testenv.RealBrokers(t)
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 3, "max.message.bytes", "3000")
	cfg := quick
	cfg.ExactlyOnce, cfg.BatchSize, cfg.Lease = h.topic+"-cursor", 50, 4*time.Second
	cfg.DeliveryTimeout = 2 * time.Second
	cfg.Retry = outbox.RetryPolicy{MaxRetries: 3, RetryWait: 50 * time.Millisecond, MaxRetryWait: 200 * time.Millisecond}
	return &exactlyFixture{h, cfg}
}

// cuttable are the options of a process that can be killed: its connections to Kafka are cut.
func (f *exactlyFixture) process(t *testing.T, cfg outbox.RelayConfig) (kill func()) {
	t.Helper()
	dialer, ctx := &brokenDialer{}, context.Background()
	cfg.Schema, cfg.Logger = f.schema, logTo(t, slog.LevelError)
	relay, err := outbox.NewRelay(f.db, append(testenv.KafkaOpts(f.brokers), kgo.Dialer(dialer.dial)), cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	return sync.OnceFunc(func() {
		dialer.breakAll()
		cancel()
		require.NoError(t, <-ended)
	})
}

// A reader of committed records sees each event once, in the order of its key, although processes are killed in the
// middle of transactions, and Kafka refuses some events, whose retries are under way then, too.
func TestExactlyOnce(t *testing.T) {
	t.Parallel()
	f := newExactlyFixture(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	reader := f.follow(t)
	var all, rejected []oracle.Event
	version := map[string]int64{}
	kill := f.process(t, f.cfg)
	defer func() { kill() }()
	for round := range 15 {
		for range 20 {
			var events []oracle.Event
			for range 1 + rng.IntN(10) {
				key := fmt.Sprintf("key-%d", rng.IntN(20))
				version[key]++
				e := oracle.Event{ID: uuid.NewString(), Key: key, Version: version[key]}
				if rng.IntN(100) == 0 {
					e.Filler = random(5000)
					rejected = append(rejected, e)
				} else {
					all = append(all, e)
				}
				events = append(events, e)
			}
			f.commit(t, events...)
			time.Sleep(time.Duration(rng.IntN(5)) * time.Millisecond)
		}
		if round%3 == 2 {
			kill()
			kill = f.process(t, f.cfg)
		}
	}
	require.NotEmpty(t, rejected)
	requireArrival(t, reader, all...)
	f.requireOnce(t, reader, all)
}

// requireOnce requires that exactly these events have arrived, once and in the order of their keys.
func (f *exactlyFixture) requireOnce(t *testing.T, reader *oracle.Reader, want []oracle.Event) {
	t.Helper()
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	got := map[string][]string{}
	for _, e := range arrived {
		got[e.Key] = append(got[e.Key], fmt.Sprintf("%d %s", e.Version, e.ID))
	}
	expected := map[string][]string{}
	for _, e := range want {
		expected[e.Key] = append(expected[e.Key], fmt.Sprintf("%d %s", e.Version, e.ID))
	}
	require.Equal(t, expected, got)
}

// A relay that is told to stop leaves nothing open, and the next one goes on behind it. Its position is confirmed.
func TestExactlyOnceRestarts(t *testing.T) {
	t.Parallel()
	f := newExactlyFixture(t)
	reader := f.follow(t)
	confirmed := func() (is bool) {
		t.Helper()
		err := f.db.QueryRow(background, f.sql(`SELECT confirmed IS NULL AND batch > 0 FROM {s}.outbox_cursor ORDER BY id DESC LIMIT 1`)).Scan(&is)
		return err == nil && is
	}
	stop := testenv.Run(t, f.relay(t, f.cfg).Run)
	require.Eventually(t, confirmed, testenv.Patience, 5*time.Millisecond, "of its first record, without an event")
	stop()
	var all []oracle.Event
	for i := range 5 {
		stop := testenv.Run(t, f.relay(t, f.cfg).Run)
		events := numbered("key", 1+i*100, 100)
		f.commit(t, events...)
		all = append(all, events...)
		requireArrival(t, reader, all...)
		require.Eventually(t, func() bool { return f.relayStatus(t, "default").Pending == 0 }, testenv.Patience, 5*time.Millisecond)
		stop()
		require.True(t, confirmed())
	}
	f.requireOnce(t, reader, all)
}

// runUntil runs a relay until events have arrived, and stops it.
func (f *exactlyFixture) runUntil(t *testing.T, cfg outbox.RelayConfig, reader *oracle.Reader, events ...oracle.Event) {
	t.Helper()
	stop := testenv.Run(t, f.relay(t, cfg).Run)
	f.commit(t, events...)
	requireArrival(t, reader, events...)
	stop()
}

// A relay changes to the mode and back, and to another topic, with nothing lost and nothing sent again, whether it was
// stopped or killed before. Without the mode, and with another topic, it does not lead until the mode was ended.
func TestExactlyOnceOnAndOff(t *testing.T) {
	t.Parallel()
	f := newExactlyFixture(t)
	reader := f.follow(t)
	plain, other := f.cfg, f.cfg
	plain.ExactlyOnce, other.ExactlyOnce = "", f.cfg.ExactlyOnce+"-2"
	var all []oracle.Event
	next := func() []oracle.Event {
		events := numbered("key", 1+len(all), 120)
		all = append(all, events...)
		return events
	}
	f.runUntil(t, plain, reader, next()...)
	f.runUntil(t, f.cfg, reader, next()...)
	for _, rejected := range []outbox.RelayConfig{plain, other} {
		require.ErrorIs(t, f.relay(t, rejected).Run(background), outbox.ErrOtherMode)
	}
	kill := f.process(t, f.cfg)
	events := next()
	f.commit(t, events...)
	requireArrival(t, reader, events[0])
	kill()
	require.NoError(t, f.relay(t, f.cfg).EndExactlyOnce(background, true))
	f.runUntil(t, plain, reader, next()...)
	f.runUntil(t, other, reader, next()...)
	require.NoError(t, f.relay(t, other).EndExactlyOnce(background, true))
	f.runUntil(t, f.cfg, reader, next()...)
	f.requireOnce(t, reader, all)
}

// A relay whose cursor topic was deleted, or deleted and created again, does not go on, and says what to do.
func TestExactlyOnceWithoutItsTopic(t *testing.T) {
	t.Parallel()
	f := newExactlyFixture(t)
	reader := f.follow(t)
	f.runUntil(t, f.cfg, reader, numbered("key", 1, 100)...)
	client, err := kgo.NewClient(kgo.SeedBrokers(f.brokers...))
	require.NoError(t, err)
	defer client.Close()
	deletion := kmsg.NewPtrDeleteTopicsRequest()
	deletion.TopicNames, deletion.TimeoutMillis = []string{f.cfg.ExactlyOnce}, 10_000
	deletion.Topics = []kmsg.DeleteTopicsRequestTopic{{Topic: &f.cfg.ExactlyOnce}}
	_, err = deletion.RequestWith(background, client)
	require.NoError(t, err)
	err = f.relay(t, f.cfg).Run(background)
	require.ErrorIs(t, err, outbox.ErrCursorTopic)
	require.ErrorContains(t, err, "does not exist")
	testenv.CreateTopic(t, f.brokers, f.cfg.ExactlyOnce, 1, "cleanup.policy", "compact")
	err = f.relay(t, f.cfg).Run(background)
	require.ErrorIs(t, err, outbox.ErrCursorTopic)
	require.ErrorContains(t, err, "created again")

	require.ErrorIs(t, f.relay(t, f.cfg).EndExactlyOnce(background, true), outbox.ErrCursorTopic)
	require.NoError(t, f.relay(t, f.cfg).EndExactlyOnce(background, false))
	more := numbered("key", 101, 100)
	f.runUntil(t, f.cfg, reader, more...)
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	require.Len(t, arrived, 200, "everything had been confirmed before")
}

// A relay does not replace the position of a relay of the same names in another cluster.
func TestExactlyOnceBesideAnotherCluster(t *testing.T) {
	t.Parallel()
	f := newExactlyFixture(t)
	testenv.CreateTopic(t, f.brokers, f.cfg.ExactlyOnce, 1, "cleanup.policy", "compact")
	client, err := kgo.NewClient(testenv.KafkaOpts(f.brokers)...)
	require.NoError(t, err)
	defer client.Close()
	var database string
	require.NoError(t, f.db.QueryRow(background, `SELECT current_database()`).Scan(&database))
	mustNot := func() { // beside a record of the other relay
		t.Helper()
		record := kgo.KeyStringRecord(database+"."+f.schema+".default", `{"number": 3, "system": 1, "row": 1, "token": "theirs", "last": 1}`)
		record.Topic = f.cfg.ExactlyOnce
		require.NoError(t, client.ProduceSync(background, record).FirstErr())
		err := f.relay(t, f.cfg).Run(background)
		require.ErrorIs(t, err, outbox.ErrCursorTopic)
		require.ErrorContains(t, err, "written from cluster 1")
	}
	reader := f.follow(t)
	mustNot()
	f.cfg.ExactlyOnce += "-2"
	events := numbered("key", 1, 10)
	f.runUntil(t, f.cfg, reader, events...)
	f.runUntil(t, f.cfg, reader)
	f.requireOnce(t, reader, events)
	mustNot()
}

// Before Kafka has answered a new relay for the first time, retention keeps what it has to send, also if another relay
// has sent it.
func TestExactlyOnceKeepsEventsFromItsStart(t *testing.T) {
	t.Parallel()
	f := newExactlyFixture(t)
	first := quick
	first.Name = "first"
	f.runUntil(t, first, f.follow(t), numbered("key", 1, 10)...)
	log, cfg := &testenv.Buffer{}, f.cfg
	cfg.Logger = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	cfg.Schema, cfg.Retention.PublishedFor = f.schema, time.Millisecond
	relay, err := outbox.NewRelay(f.db, []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1")}, cfg)
	require.NoError(t, err)
	stop := testenv.Run(t, relay.Run)
	require.Eventually(t, func() bool { return strings.Count(log.String(), "rows removed") >= 3 }, testenv.Patience, 10*time.Millisecond)
	stop()
	var left int
	require.NoError(t, f.db.QueryRow(background, `SELECT count(*) FROM `+pgx.Identifier{f.schema, "outbox"}.Sanitize()).Scan(&left))
	require.Equal(t, 10, left)
}

// A relay waits, and says for what, while its brokers lack what the mode needs.
func TestExactlyOnceNeedsTransactionVersion(t *testing.T) {
	t.Parallel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	h := newRelayFixture(t)
	h.brokers = cluster.ListenAddrs()
	client, err := kgo.NewClient(kgo.SeedBrokers(h.brokers...))
	require.NoError(t, err)
	defer client.Close()
	downgrade := kmsg.NewPtrUpdateFeaturesRequest()
	downgrade.FeatureUpdates = []kmsg.UpdateFeaturesRequestFeatureUpdate{{Feature: "transaction.version", MaxVersionLevel: 1, UpgradeType: 2}}
	answer, err := downgrade.RequestWith(background, client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(answer.ErrorCode))
	cfg := quick
	cfg.ExactlyOnce, cfg.Logger = "cursor", slog.New(slog.DiscardHandler)
	relay := h.relay(t, cfg)
	testenv.Run(t, relay.Run)
	require.Eventually(t, func() bool {
		for _, o := range relay.Health().Outages {
			if strings.Contains(o.Err, "transaction.version") {
				return true
			}
		}
		return false
	}, testenv.Patience, 10*time.Millisecond)
}

// A relay whose position is in Kafka cannot be cut: its row in PostgreSQL is no position.
func TestExactlyOnceIsNotCut(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	sql := func(text string) string { return strings.ReplaceAll(text, "{schema}", `"`+h.schema+`"`) }
	_, err := h.db.Exec(background, sql(`INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch, cursor_topic)
		VALUES ('default', 0, '1:1:', 0, 1, 1, 'cursors')`))
	require.NoError(t, err)
	_, err = h.db.Exec(background, sql(`SELECT {schema}.outbox_cut_to_postgres('{g}', 'default', '{}', 'kim', 'why')`))
	require.ErrorContains(t, err, "end that mode first")
}

// Operators resolve, retry and remove rows of events while these are sent again, and processes are killed. No event
// arrives twice or is lost, but for those that were resolved or removed: these arrive once or not at all.
func TestExactlyOnceBesideOperators(t *testing.T) {
	t.Parallel()
	f := newExactlyFixture(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	reader := f.follow(t)
	f.cfg.Retry.MaxRetries = 1000
	kill := f.process(t, f.cfg)
	defer func() { kill() }()
	gone := map[string]bool{} // resolved or removed
	var all []oracle.Event
	actions := []string{ // only the first one leaves the event to the relay
		`SELECT {s}.outbox_retry_failed($1, 'kim', 'why')`, `SELECT {s}.outbox_resolve_failed($1, 'kim', 'why')`, `DELETE FROM {s}.outbox_failed WHERE id = ANY ($1)`,
	}
	for range 6 {
		f.setTopic(t, "max.message.bytes", "3000")
		for key := range 20 {
			events := numbered(fmt.Sprint("key-", key), 1+len(all), 4)
			events[1].Filler = random(5000)
			f.commit(t, events...)
			all = append(all, events...)
		}
		require.Eventually(t, func() bool { return f.statuses(t)["failed"] > 10 }, testenv.Patience, 5*time.Millisecond)
		f.setTopic(t, "max.message.bytes", "1000000") // now they are accepted
		for range 10 {
			does := rng.IntN(len(actions))
			for _, id := range f.operate(t, actions[does]) {
				gone[id] = gone[id] || does > 0
			}
			time.Sleep(time.Duration(rng.IntN(20)) * time.Millisecond)
		}
		if rng.IntN(2) == 0 {
			kill()
			kill = f.process(t, f.cfg)
		}
	}
	var want []oracle.Event
	for _, e := range all {
		if !gone[e.ID] {
			want = append(want, e)
		}
	}
	require.Less(t, len(want), len(all))
	requireArrival(t, reader, want...)
	require.Eventually(t, func() bool { return f.statuses(t)["failed"]+f.statuses(t)["parked"]+f.statuses(t)["waiting"] == 0 }, testenv.Patience, 10*time.Millisecond)
	for _, e := range all {
		if gone[e.ID] && reader.Has(e.ID) {
			want = append(want, e)
		}
	}
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	ids := func(events []oracle.Event) (ids []string) {
		for _, e := range events {
			ids = append(ids, e.ID)
		}
		return ids
	}
	require.ElementsMatch(t, ids(want), ids(arrived))
	t.Logf("%d events, of which %d have arrived", len(all), len(want))
}

// operate does something with a few rows, and returns the ids of their events.
func (f *exactlyFixture) operate(t *testing.T, sql string) (events []string) {
	t.Helper()
	var rows []int64
	require.NoError(t, f.db.QueryRow(background, f.sql(`
		SELECT array_agg(id), array_agg(payload->>'id')
		  FROM (SELECT id, payload FROM {s}.outbox_failed WHERE status <> 'resolved' ORDER BY random() LIMIT 3) AS few`)).Scan(&rows, &events))
	_, err := f.db.Exec(background, f.sql(sql), rows)
	require.NoError(t, err)
	return events
}

// Relays of two names, and of two schemas, share a cursor topic: each reads its own position there.
func TestExactlyOnceSharedTopic(t *testing.T) {
	t.Parallel()
	f := newExactlyFixture(t)
	other := &exactlyFixture{newRelayFixture(t), f.cfg}
	audit := f.cfg
	audit.Name = "audit"
	reader, there := f.follow(t), other.follow(t)
	var ours, theirs []oracle.Event
	for range 3 {
		next := numbered("key", 1+len(ours), 100)
		ours = append(ours, next...)
		f.runUntil(t, f.cfg, reader, next...)
		next = numbered("key", 1+len(theirs), 30)
		theirs = append(theirs, next...)
		other.runUntil(t, f.cfg, there, next...)
	}
	f.requireOnce(t, reader, ours)
	other.requireOnce(t, there, theirs)
	testenv.Run(t, f.relay(t, audit).Run)
	require.Eventually(t, func() bool {
		arrived, err := reader.Arrived()
		require.NoError(t, err)
		return len(arrived) == 2*len(ours) // this relay sends all events, too
	}, testenv.Patience, 10*time.Millisecond)
}

// An event whose topic is the cursor topic is not sent: Kafka would remove it when a later one of its key comes.
func TestExactlyOnceEventForCursorTopic(t *testing.T) {
	t.Parallel()
	f := newExactlyFixture(t)
	f.relayFixture = newRelayFixture(t) // whose topic is not there
	f.cfg.ExactlyOnce = f.topic
	f.commit(t, numbered("key", 1, 1)...)
	testenv.Run(t, f.relay(t, f.cfg).Run)
	require.Eventually(t, func() bool { return f.statuses(t)["dead"] == 1 }, testenv.Patience, 10*time.Millisecond)
	var says string
	require.NoError(t, f.db.QueryRow(background, f.sql(`SELECT last_error FROM {s}.outbox_failed`)).Scan(&says))
	require.Contains(t, says, "is the cursor topic of the relay")
}

// Kafka accepts no records, while it answers each start: that is one outage of Kafka, until a record is accepted, and
// none of PostgreSQL.
func TestExactlyOnceWithoutLeader(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]bool{"while a window is open": false, "when the mode is turned on": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newRelayFixture(t)
			cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, h.topic))
			require.NoError(t, err)
			t.Cleanup(cluster.Close)
			h.brokers = cluster.ListenAddrs()
			leaderless, starts := new(atomic.Bool), new(atomic.Int64)
			withoutLeader(cluster, leaderless, starts)
			log, cfg := &testenv.Buffer{}, quick
			t.Cleanup(func() { t.Logf("the relay: %s", log) })
			cfg.ExactlyOnce, cfg.BatchSize, cfg.DeliveryTimeout = "cursor", 2, time.Second
			cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
			relay := h.relay(t, cfg)
			leaderless.Store(first)
			testenv.Run(t, relay.Run)
			sent := func() bool { return h.relayStatus(t, "default").Pending == 0 }
			if !first {
				require.Eventually(t, func() bool { return h.relayStatus(t, "default").Transaction > 0 }, testenv.Patience, 5*time.Millisecond)
			}
			leaderless.Store(true)
			before := starts.Load()
			h.commit(t, numbered("key", 1, 10)...)
			require.Eventually(t, func() bool { return starts.Load() >= before+7 }, testenv.Patience, 5*time.Millisecond)
			require.NotContains(t, log.String(), "works again")
			require.NotContains(t, log.String(), "PostgreSQL")
			leaderless.Store(false)
			require.Eventually(t, sent, testenv.Patience, 5*time.Millisecond)
			require.Equal(t, 1, strings.Count(log.String(), "Kafka fails"))
			require.Equal(t, 1, strings.Count(log.String(), "Kafka works again"))
			require.Empty(t, relay.Health().Outages)
		})
	}
}

// withoutLeader lets a cluster accept no records while leaderless is set, and counts the starts of relays.
func withoutLeader(cluster *kfake.Cluster, leaderless *atomic.Bool, starts *atomic.Int64) {
	cluster.ControlKey(int16(kmsg.Produce), func(r kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		return testenv.NotLeader(r.(*kmsg.ProduceRequest)), nil, leaderless.Load()
	})
	cluster.ControlKey(int16(kmsg.InitProducerID), func(r kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		if id := r.(*kmsg.InitProducerIDRequest).TransactionalID; id != nil && strings.HasSuffix(*id, ".1") {
			starts.Add(1)
		}
		return nil, nil, false
	})
}
