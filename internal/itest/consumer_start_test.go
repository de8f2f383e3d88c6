package itest

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/outboxgo/outbox"
	kafkaclient "github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/testenv"
)

// startFixture is a consumerFixture whose consumers have franz-go's default options,
// and whose topic changes under them.
type startFixture struct {
	*consumerFixture
	group string
	log   *testenv.Buffer
	admin *kgo.Client

	mu   sync.Mutex
	seen map[string]int // ids of events, and how often a handler without a transaction got them
}

func newStartFixture(t testing.TB, partitions int32) *startFixture {
	t.Helper()
	s := &startFixture{consumerFixture: newConsumerFixture(t, partitions), log: new(testenv.Buffer), seen: map[string]int{}}
	testenv.RealBrokers(t)
	s.group = "start-" + s.topic
	var err error
	s.admin, err = kgo.NewClient(kgo.SeedBrokers(s.brokers...))
	require.NoError(t, err)
	t.Cleanup(s.admin.Close)
	return s
}

// run runs a consumer of the group until the returned function is called.
func (s *startFixture) run(t testing.TB, cfg outbox.ConsumerConfig, opts ...kgo.Opt) (stop func()) {
	t.Helper()
	cfg.Schema, cfg.Logger = s.schema, slog.New(slog.NewTextHandler(s.log, nil))
	c, err := outbox.NewConsumer(s.db, append([]kgo.Opt{kgo.SeedBrokers(s.brokers...)}, opts...), s.events, s.group, cfg, outbox.HandleNoTx("SEEN",
		func(_ context.Context, _ sale, m outbox.Metadata) error { return s.see(m) }))
	require.NoError(t, err)
	return testenv.Run(t, c.Run)
}

// runPlain is run without a database.
func (s *startFixture) runPlain(t testing.TB, cfg outbox.ConsumerConfig, handle func(context.Context, sale, outbox.Metadata) error, opts ...kgo.Opt) (stop func()) {
	t.Helper()
	cfg.Logger = slog.New(slog.NewTextHandler(s.log, nil))
	c, err := outbox.NewConsumer(nil, append([]kgo.Opt{kgo.SeedBrokers(s.brokers...)}, opts...), s.events, s.group, cfg, outbox.HandleNoTx("SEEN", handle))
	require.NoError(t, err)
	return testenv.Run(t, c.Run)
}

func (s *startFixture) see(m outbox.Metadata) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen[m.ID]++
	return nil
}

// put sends n sales to a partition and returns their ids.
func (s *startFixture) put(t testing.TB, partition int32, n int) (ids []string) {
	t.Helper()
	records := make([]*kgo.Record, n)
	for i := range records {
		ids = append(ids, uuid.NewString())
		records[i] = s.saleRecord(ids[i], oneSale)
		records[i].Partition = partition
	}
	s.send(t, records...)
	return ids
}

// requireSeen waits until each of some events was handled.
func (s *startFixture) requireSeen(t testing.TB, ids ...string) {
	t.Helper()
	require.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return !slices.ContainsFunc(ids, func(id string) bool { return s.seen[id] == 0 })
	}, testenv.Patience, 10*time.Millisecond, "events were skipped; the log says: %s", s.log)
}

func (s *startFixture) requireLogged(t testing.TB, text string) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(s.log.String(), text) }, testenv.Patience, 10*time.Millisecond, "%q is not logged:\n%s", text, s.log)
}

func (s *startFixture) addPartitions(t testing.TB, count int32) {
	t.Helper()
	request := kmsg.NewPtrCreatePartitionsRequest()
	request.Topics = []kmsg.CreatePartitionsRequestTopic{{Topic: s.topic, Count: count}}
	response, err := request.RequestWith(background, s.admin)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Topics[0].ErrorCode))
	require.Eventually(t, func() bool {
		found, err := kafkaclient.Metadata(background, s.admin, s.topic)
		return err == nil && len(found.Topics[0].Partitions) == int(count)
	}, testenv.Patience, 10*time.Millisecond)
}

func (s *startFixture) deleteTopic(t testing.TB) { t.Helper(); s.delete(t, s.topic) }

func (s *startFixture) delete(t testing.TB, topic string) {
	t.Helper()
	request := kmsg.NewPtrDeleteTopicsRequest()
	request.TopicNames = []string{topic}
	one := kmsg.NewDeleteTopicsRequestTopic()
	one.Topic = &topic
	request.Topics = append(request.Topics, one)
	response, err := request.RequestWith(background, s.admin)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Topics[0].ErrorCode))
}

// deleteRecords removes the records of partition 0 before an offset, as retention does.
func (s *startFixture) deleteRecords(t testing.TB, before int64) {
	t.Helper()
	request := kmsg.NewPtrDeleteRecordsRequest()
	request.Topics = []kmsg.DeleteRecordsRequestTopic{{Topic: s.topic, Partitions: []kmsg.DeleteRecordsRequestTopicPartition{{Offset: before}}}}
	response, err := request.RequestWith(background, s.admin)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Topics[0].Partitions[0].ErrorCode))
}

// groupProtocols are the ways in which members of a group share partitions.
var groupProtocols = map[string][]kgo.Opt{
	"cooperative": nil,
	"eager":       {kgo.Balancers(kgo.RangeBalancer())},
	"KIP-848":     {kgo.ServerSideBalancer()},
}

// Partitions that are added to a topic while the group runs have no committed offset,
// like those of a new group, but what is in them must not be skipped.
func TestAddedPartitions(t *testing.T) {
	t.Parallel()
	for name, opts := range groupProtocols {
		t.Run(name, func(t *testing.T) { t.Parallel(); testAddedPartitions(t, opts) })
	}
}

func testAddedPartitions(t *testing.T, opts []kgo.Opt) {
	s := newStartFixture(t, 1)
	skipped := s.put(t, 0, 3)
	s.run(t, outbox.ConsumerConfig{}, opts...)
	s.run(t, outbox.ConsumerConfig{}, opts...)
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 3 }, testenv.Patience, 10*time.Millisecond)
	s.requireSeen(t, s.put(t, 0, 2)...)
	s.addPartitions(t, 3)
	s.requireSeen(t, append(s.put(t, 1, 5), s.put(t, 2, 5)...)...)
	s.requireLogged(t, "partition was added")
	for _, id := range skipped {
		require.Zero(t, s.seen[id], "a new group begins behind what was there before")
	}
}

// The same while no member of the group runs.
func TestPartitionsAddedBetweenRuns(t *testing.T) {
	t.Parallel()
	s := newStartFixture(t, 1)
	stop := s.run(t, outbox.ConsumerConfig{})
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 0 }, testenv.Patience, 10*time.Millisecond)
	stop()
	s.addPartitions(t, 2)
	ids := s.put(t, 1, 5)
	s.run(t, outbox.ConsumerConfig{})
	s.requireSeen(t, ids...)
}

// A topic that is deleted and created again is another topic: a consumer that runs
// reads it from its beginning, and so does one that is started later.
func TestTopicCreatedAgain(t *testing.T) {
	t.Parallel()
	for name, opts := range groupProtocols {
		t.Run(name, func(t *testing.T) { t.Parallel(); testTopicCreatedAgain(t, opts) })
	}
}

func testTopicCreatedAgain(t *testing.T, opts []kgo.Opt) {
	s := newStartFixture(t, 1)
	stopOther := s.run(t, outbox.ConsumerConfig{}, opts...)
	stop := s.run(t, outbox.ConsumerConfig{}, opts...)
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 0 }, testenv.Patience, 10*time.Millisecond)
	s.requireSeen(t, s.put(t, 0, 20)...)
	s.deleteTopic(t)
	testenv.CreateTopic(t, s.brokers, s.topic, 2)
	s.requireSeen(t, append(s.put(t, 0, 5), s.put(t, 1, 5)...)...)
	s.requireLogged(t, "topic was deleted and created again")
	stop()
	stopOther()

	s.deleteTopic(t)
	testenv.CreateTopic(t, s.brokers, s.topic, 1)
	ids := s.put(t, 0, 5)
	s.run(t, outbox.ConsumerConfig{}, opts...)
	s.requireSeen(t, ids...)
}

// A member that handles what it has fetched of a topic, and has seen that the topic is gone, commits nothing to the one
// that replaces it, also if the broker knows topics by name. Without a database the next member would begin there.
func TestNoOffsetOfReplacedTopic(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	for name, opts := range groupProtocols {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStartFixture(t, 1)
			s.put(t, 0, 300)
			versions := kversion.Stable()
			versions.SetMaxKeyVersion(kmsg.OffsetCommit.Int16(), 9)
			opts := append([]kgo.Opt{kgo.MaxVersions(versions)}, opts...)
			cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}
			seen := func() int {
				s.mu.Lock()
				defer s.mu.Unlock()
				return len(s.seen)
			}
			var fast atomic.Bool
			s.runPlain(t, cfg, func(_ context.Context, _ sale, m outbox.Metadata) error {
				if !fast.Load() {
					time.Sleep(20 * time.Millisecond)
				}
				return s.see(m)
			}, opts...)
			require.Eventually(t, func() bool { return seen() >= 100 }, testenv.Patience, time.Millisecond)
			s.deleteTopic(t)
			s.requireLogged(t, "fails, trying until it works") // Kafka has refused a commit
			testenv.CreateTopic(t, s.brokers, s.topic, 1)
			ids := s.put(t, 0, 1000)
			s.requireLogged(t, "a new client")
			fast.Store(true)
			s.requireSeen(t, ids...)
		})
	}
}

// A member that has not seen yet that its topic was replaced commits an offset of the old topic to the new one, if the
// broker knows topics by name. Without a database the next member would begin there.
func TestLateOffsetOfReplacedTopic(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	for name, opts := range groupProtocols {
		t.Run(name, func(t *testing.T) { t.Parallel(); testLateOffsetOfReplacedTopic(t, opts) })
	}
}

func testLateOffsetOfReplacedTopic(t *testing.T, opts []kgo.Opt) {
	s := newStartFixture(t, 1)
	s.put(t, 0, 4000) // more than the queue takes: a client that fetches nothing learns late what became of its topic
	versions := kversion.Stable()
	versions.SetMaxKeyVersion(kmsg.OffsetCommit.Int16(), 9)
	cfg := outbox.ConsumerConfig{MaxQueueBytes: 1 << 20, HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}
	gates := map[int]chan struct{}{100: make(chan struct{}), 200: make(chan struct{})}
	calls := 0
	s.runPlain(t, cfg, func(_ context.Context, _ sale, m outbox.Metadata) error {
		if calls++; gates[calls] != nil {
			<-gates[calls]
		}
		return s.see(m)
	}, append([]kgo.Opt{kgo.MaxVersions(versions)}, opts...)...)
	committed := func() int64 { return s.committed(t, s.group, 0) }
	require.Eventually(t, func() bool { return committed() == 99 }, testenv.Patience, 10*time.Millisecond)
	s.deleteTopic(t)
	require.Eventually(t, func() bool { return committed() <= 0 }, testenv.Patience, 10*time.Millisecond, "Kafka removes the offsets of the old topic")
	testenv.CreateTopic(t, s.brokers, s.topic, 1)
	close(gates[100])
	require.Eventually(t, func() bool { return committed() > 0 || strings.Contains(s.log.String(), "a new client") }, testenv.Patience, 10*time.Millisecond)
	ids := s.put(t, 0, 1000)
	close(gates[200])
	s.requireSeen(t, ids...)
}

// An offset counts only for the topic for which it was committed. One that names no topic of this cluster counts as it
// is: an earlier release or a tool has committed it, or it was copied from another cluster.
func TestOffsetNamesItsTopic(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		metadata func(before string) string // of the offset, from that of an offset of the deleted topic
		database bool
		skipped  int
	}{
		"deleted topic":                  {metadata: func(before string) string { return before }},
		"deleted topic, with a database": {metadata: func(before string) string { return before }, database: true},
		"no topic":                       {metadata: func(string) string { return "" }, skipped: 3},
		"earlier release":                {metadata: func(string) string { return "kgo-" + uuid.NewString() }, skipped: 3},
		"other cluster":                  {metadata: func(before string) string { return before + "x" }, skipped: 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStartFixture(t, 1)
			s.put(t, 0, 1)
			see := func(_ context.Context, _ sale, m outbox.Metadata) error { return s.see(m) }
			cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromEnd}} // the group is not new
			stop := s.runPlain(t, cfg, see)
			require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 1 }, testenv.Patience, 10*time.Millisecond)
			stop()
			before := s.committedMetadata(t)
			s.deleteTopic(t)
			testenv.CreateTopic(t, s.brokers, s.topic, 1)
			ids := s.put(t, 0, 5)
			s.commitWith(t, 3, tt.metadata(before))
			run := func() (stop func()) {
				if tt.database {
					return s.run(t, cfg)
				}
				return s.runPlain(t, cfg, see)
			}
			stop = run()
			s.requireSeen(t, ids[tt.skipped:]...)
			stop()
			more := s.put(t, 0, 1)
			run()
			s.requireSeen(t, more...)
			for i, id := range append(ids, more...) {
				require.Equal(t, i >= tt.skipped, s.seen[id] == 1, "event %d was seen %d times", i, s.seen[id])
			}
		})
	}
}

// committedMetadata returns what the group has committed with its offset of partition 0.
func (s *startFixture) committedMetadata(t testing.TB) string {
	t.Helper()
	request := kmsg.NewPtrOffsetFetchRequest()
	request.Group = s.group
	request.Topics = []kmsg.OffsetFetchRequestTopic{{Topic: s.topic, Partitions: []int32{0}}}
	old, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...), kgo.MaxVersions(kversion.V2_8_0()))
	require.NoError(t, err)
	defer old.Close()
	response, err := request.RequestWith(background, old)
	require.NoError(t, err)
	require.NotNil(t, response.Topics[0].Partitions[0].Metadata)
	return *response.Topics[0].Partitions[0].Metadata
}

// A topic that does not exist when its group first runs is read from its beginning.
func TestTopicCreatedLater(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := newStartFixture(t, 1)
	s.deleteTopic(t)
	s.run(t, outbox.ConsumerConfig{})
	requireLoggedOnce(t, s.log, "waiting for Kafka to answer and to have one of the topics; a new one is found within at_most", 100*time.Millisecond, "level=INFO", "at_most=1s")
	testenv.CreateTopic(t, s.brokers, s.topic, 1)
	s.requireSeen(t, s.put(t, 0, 5)...)
	require.NotContains(t, s.log.String(), "standing by")
}

// A consumer reads a topic within seconds of when the service makes it alongside the consumer. Both are no reason for
// a warning.
func TestTopicMadeBesideConsumer(t *testing.T) {
	t.Parallel()
	s := newStartFixture(t, 1)
	s.deleteTopic(t)
	s.run(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}})
	time.Sleep(time.Second) // the consumer has asked for the topic in vain
	testenv.CreateTopic(t, s.brokers, s.topic, 1)
	began := time.Now()
	ids := s.put(t, 0, 5)
	s.requireSeen(t, ids...)
	require.Less(t, time.Since(began), 3*time.Second)
	require.NotContains(t, s.log.String(), "level=WARN")
}

// Kafka forgets the offsets of a group that is away for long. The group goes on where
// it stood, and not at the end.
func TestExpiredOffsets(t *testing.T) {
	t.Parallel()
	s := newStartFixture(t, 1)
	stop := s.run(t, outbox.ConsumerConfig{})
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 0 }, testenv.Patience, 10*time.Millisecond)
	before := s.put(t, 0, 5)
	s.requireSeen(t, before...)
	stop()
	request := kmsg.NewPtrDeleteGroupsRequest()
	request.Groups = []string{s.group}
	response, err := request.RequestWith(background, s.admin)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Groups[0].ErrorCode))
	ids := s.put(t, 0, 5)
	s.run(t, outbox.ConsumerConfig{})
	s.requireSeen(t, ids...)
	for _, id := range before {
		require.Equal(t, 1, s.seen[id], "what was handled is not repeated")
	}
}

// lostRow returns what consumer_start says about lost records of the group.
func (s *startFixture) lostRow(t testing.TB) (lost int64) {
	t.Helper()
	require.NoError(t, s.db.QueryRow(background, s.sql(`SELECT sum(lost) FROM {s}.consumer_start WHERE consumer_group = $1`), s.group).Scan(&lost))
	return lost
}

// A group that was away for longer than its topic keeps records goes on with the first
// one that is left, and says how many are gone.
func TestOffsetsBehindRetention(t *testing.T) {
	t.Parallel()
	s := newStartFixture(t, 1)
	var lost atomic.Int64
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Hooks: outbox.ConsumerHooks{Lost: func(topic string, partition int32, records int64) {
		assert.Equal(t, s.topic, topic)
		assert.Zero(t, partition)
		lost.Add(records)
	}}}}
	stop := s.run(t, cfg)
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 0 }, testenv.Patience, 10*time.Millisecond)
	s.requireSeen(t, s.put(t, 0, 5)...)
	stop()
	ids := s.put(t, 0, 100)
	s.deleteRecords(t, 90)
	s.run(t, cfg)
	s.requireSeen(t, ids[85:]...)
	s.requireLogged(t, "Kafka has removed records that this group has not committed")
	s.requireLogged(t, "from=5 records=85")
	require.EqualValues(t, 85, lost.Load())
	require.EqualValues(t, 85, s.lostRow(t))
}

// The same happens to a member that runs, if it is cut off for long.
func TestRetentionPassesMember(t *testing.T) {
	t.Parallel()
	s := newStartFixture(t, 1)
	var lost atomic.Int64
	cable := &brokenDialer{}
	stop := s.run(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Hooks: outbox.ConsumerHooks{
		Lost: func(_ string, _ int32, records int64) { lost.Add(records) },
	}, From: outbox.FromStart}}, kgo.Dialer(cable.dial))
	s.requireSeen(t, s.put(t, 0, 5)...)
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 5 }, testenv.Patience, 10*time.Millisecond) // else they are lost, too
	cable.breakAll()
	ids := s.put(t, 0, 20)
	s.deleteRecords(t, 15)
	cable.broken.Store(false)
	s.requireSeen(t, ids[10:]...)
	require.EqualValues(t, 10, lost.Load())
	s.requireLogged(t, "from=5 records=10")
	stop()
	require.EqualValues(t, 10, s.lostRow(t))
}

// transaction sends n sales to partition 0 in a Kafka transaction, and returns how to
// commit it.
func (s *startFixture) transaction(t testing.TB, n int) (ids []string, commit func()) {
	t.Helper()
	ids, client := s.openTransaction(t, n)
	return ids, func() { require.NoError(t, client.EndTransaction(background, kgo.TryCommit)) }
}

func (s *startFixture) openTransaction(t testing.TB, n int) (ids []string, client *kgo.Client) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...), kgo.TransactionalID(uuid.NewString()), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	require.NoError(t, err)
	t.Cleanup(client.Close)
	require.NoError(t, client.BeginTransaction())
	for range n {
		ids = append(ids, uuid.NewString())
		require.NoError(t, client.ProduceSync(background, s.saleRecord(ids[len(ids)-1], oneSale)).FirstErr())
	}
	return ids, client
}

// The end of a transaction is a record, too, but not one that a group can lose.
func TestEndsOfTransactionsAreNotLost(t *testing.T) {
	t.Parallel()
	s := newStartFixture(t, 1)
	var lost atomic.Int64
	s.run(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Hooks: outbox.ConsumerHooks{
		Lost: func(_ string, _ int32, records int64) { lost.Add(records) },
	}, From: outbox.FromStart}})
	ids, commit := s.transaction(t, 3)
	commit()
	s.requireSeen(t, ids...)
	time.Sleep(time.Second) // the client has read the end of the transaction
	s.deleteRecords(t, 4)
	s.requireSeen(t, s.put(t, 0, 2)...)
	require.Zero(t, lost.Load())
}

// The same holds for a group that was stopped when they were removed, and for the records
// of a transaction that was aborted.
func TestAbortedRecordsAreNotLost(t *testing.T) {
	t.Parallel()
	s := newStartFixture(t, 1)
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}
	stop := s.run(t, cfg)
	ids, commit := s.transaction(t, 3)
	commit()
	s.requireSeen(t, ids...)
	aborted, client := s.openTransaction(t, 4)
	require.NoError(t, client.EndTransaction(background, kgo.TryAbort))
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 9 }, testenv.Patience, 10*time.Millisecond,
		"three records and four, and the ends of two transactions; committed is %d", s.committed(t, s.group, 0))
	stop()
	s.deleteRecords(t, 9)
	ids = s.put(t, 0, 2)
	s.run(t, cfg)
	s.requireSeen(t, ids...)
	require.NotContains(t, s.log.String(), "has removed records")
	require.Zero(t, s.lostRow(t))
	require.Zero(t, s.seen[aborted[0]])
}

// Records that wait behind an open transaction are not handled, and so they count.
func TestLagBehindOpenTransaction(t *testing.T) {
	t.Parallel()
	s := newStartFixture(t, 1)
	c := s.groupConsumer(t, s.group, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, outbox.Handle("COUNTED", s.count))
	testenv.Run(t, c.Run)
	lag := func() int64 {
		lags, err := c.Lag(background)
		require.NoError(t, err)
		if len(lags) == 0 {
			return -1
		}
		return lags[0].Records()
	}
	require.Eventually(t, func() bool { return lag() == 0 }, testenv.Patience, 10*time.Millisecond)
	_, commit := s.transaction(t, 2)
	s.put(t, 0, 3)
	require.Eventually(t, func() bool { return lag() == 5 }, testenv.Patience, 10*time.Millisecond)
	commit()
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 5 }, testenv.Patience, 10*time.Millisecond)
	require.Eventually(t, func() bool { return lag() <= 1 }, testenv.Patience, 10*time.Millisecond, "the end of the transaction has an offset")
}

// While a topic is gone its consumers wait, and the log says so once.
func TestTopicGoneForAWhile(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := newStartFixture(t, 1)
	s.run(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}})
	s.requireSeen(t, s.put(t, 0, 3)...)
	s.deleteTopic(t)
	s.requireLogged(t, "outbox: topic "+s.topic+" fails, trying until it works")
	testenv.CreateTopic(t, s.brokers, s.topic, 1)
	s.requireSeen(t, s.put(t, 0, 3)...)
	s.requireLogged(t, "outbox: topic "+s.topic+" works again")
	require.Equal(t, 1, strings.Count(s.log.String(), "outbox: topic "+s.topic+" fails, trying"), s.log)
}

// commitFor commits an offset of partition 0 for the group, as an earlier release did.
func (s *startFixture) commitFor(t testing.TB, offset int64) { t.Helper(); s.commitWith(t, offset, "") }

// commitWith commits an offset of partition 0 for the group, with metadata.
func (s *startFixture) commitWith(t testing.TB, offset int64, metadata string) {
	t.Helper()
	ids, err := kafkaclient.TopicIDs(background, s.admin, map[kafkaclient.Partition]int64{{Topic: s.topic}: offset})
	require.NoError(t, err)
	p := kmsg.NewOffsetCommitRequestTopicPartition()
	p.Offset, p.Metadata = offset, &metadata
	request := kmsg.NewPtrOffsetCommitRequest()
	request.Group = s.group
	request.Topics = []kmsg.OffsetCommitRequestTopic{{Topic: s.topic, TopicID: ids[s.topic], Partitions: []kmsg.OffsetCommitRequestTopicPartition{p}}}
	response, err := request.RequestWith(background, s.admin)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Topics[0].Partitions[0].ErrorCode))
}

// A group that has offsets, and of which nothing is written yet, is not new: it goes on
// where it is, and its other partitions are read from their beginning.
func TestGroupOfEarlierRelease(t *testing.T) {
	t.Parallel()
	s := newStartFixture(t, 2)
	before, after := s.put(t, 0, 3), append(s.put(t, 0, 3), s.put(t, 1, 3)...)
	s.commitFor(t, 3)
	s.run(t, outbox.ConsumerConfig{})
	s.requireSeen(t, after...)
	for _, id := range before {
		require.Zero(t, s.seen[id])
	}
}

// A topic that was created again is read from its beginning, also if an offset of the old
// one is committed for its name: a member that is late can do that.
func TestLateCommitForTopicCreatedAgain(t *testing.T) {
	t.Parallel()
	s := newStartFixture(t, 1)
	stop := s.run(t, outbox.ConsumerConfig{})
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 0 }, testenv.Patience, 10*time.Millisecond)
	stop()
	s.deleteTopic(t)
	testenv.CreateTopic(t, s.brokers, s.topic, 1)
	ids := s.put(t, 0, 5)
	s.commitFor(t, 4)
	s.run(t, outbox.ConsumerConfig{})
	s.requireSeen(t, ids...)
}

// Nor does such an offset count once the group has begun with the new topic.
func TestLateCommitBehindSavedPosition(t *testing.T) {
	t.Parallel()
	s := newStartFixture(t, 1)
	run := func(committed int64) {
		stop := s.run(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}})
		defer stop()
		require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == committed }, testenv.Patience, 10*time.Millisecond)
	}
	s.put(t, 0, 1)
	run(1)
	before := s.committedMetadata(t)
	s.deleteTopic(t)
	testenv.CreateTopic(t, s.brokers, s.topic, 1)
	ids := s.put(t, 0, 5)
	run(5)
	ids = append(ids, s.put(t, 0, 5)...)
	s.commitWith(t, 8, before)
	run(10)
	for _, id := range ids {
		require.Equal(t, 1, s.seen[id])
	}
}

// A member that does not get at PostgreSQL when the group begins reads nothing, because it
// does not know from where, and begins where it was to begin.
func TestStartWithoutDatabase(t *testing.T) {
	t.Parallel()
	s := newStartFixture(t, 1)
	first := s.put(t, 0, 3)
	stop := s.run(t, outbox.ConsumerConfig{})
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 3 }, testenv.Patience, 10*time.Millisecond)
	stop()
	rename := func(from, to string) {
		_, err := s.db.Exec(background, s.sql(`ALTER TABLE {s}.`+from+` RENAME TO `+to))
		require.NoError(t, err)
	}
	s.addPartitions(t, 2)
	c, err := outbox.NewConsumer(s.db, []kgo.Opt{kgo.SeedBrokers(s.brokers...)}, s.events, s.group, outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: slog.New(slog.NewTextHandler(s.log, nil))},
	}, outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	rename("consumer_start", "mislaid")
	require.ErrorIs(t, c.Run(background), outbox.ErrNotMigrated)
	_, err = s.db.Exec(background, s.sql(`CREATE VIEW {s}.consumer_start AS SELECT * FROM {s}.mislaid WHERE 1 / (SELECT 0) = 1`))
	require.NoError(t, err)
	testenv.Run(t, c.Run)
	s.requireLogged(t, "finding where reading begins fails")
	s.put(t, 1, 2)
	require.Empty(t, s.counts(t))
	_, err = s.db.Exec(background, s.sql(`DROP VIEW {s}.consumer_start`))
	require.NoError(t, err)
	rename("mislaid", "consumer_start")
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 2 }, testenv.Patience, 10*time.Millisecond)
	require.Zero(t, s.seen[first[0]])
	s.requireLogged(t, "finding where reading begins works again")
}

// Without a database FromEnd holds for each partition without an offset, and what it
// skips is logged.
func TestFromEndWithoutDatabase(t *testing.T) {
	t.Parallel()
	s := newStartFixture(t, 1)
	s.put(t, 0, 7)
	s.runPlain(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromEnd}}, func(context.Context, sale, outbox.Metadata) error { return nil })
	s.requireLogged(t, "reading begins at their ends")
	s.requireLogged(t, "partitions=1 records=7")
}

// A new group skips what is in its topics, unless FromStart says otherwise. That is logged, because a
// group whose name was changed by mistake is a new one, too.
func TestNewGroupSaysWhatItSkips(t *testing.T) {
	t.Parallel()
	s := newStartFixture(t, 2)
	s.put(t, 0, 7)
	s.put(t, 1, 3)
	stop := s.run(t, outbox.ConsumerConfig{})
	const said = "the group reads a topic for the first time"
	s.requireLogged(t, said)
	s.requireLogged(t, "records=10")
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 7 }, testenv.Patience, 10*time.Millisecond)
	stop()
	s.requireSeen(t)
	stop = s.run(t, outbox.ConsumerConfig{})
	s.requireSeen(t, s.put(t, 0, 1)...)
	stop()
	require.Equal(t, 1, strings.Count(s.log.String(), said), s.log)
}
