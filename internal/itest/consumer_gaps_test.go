package itest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	kafkaclient "github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/testenv"
)

// release starts a member of the group that has these actions. Its cable to Kafka can be broken.
func (s *parkingFixture) release(t testing.TB, forms map[string]string, actions ...string) (stop func(), cable *brokenDialer) {
	t.Helper()
	cable = new(brokenDialer)
	cfg := s.config(t)
	cfg.StopTimeout, cfg.MaxPoll = 2*time.Second, 20
	var handlers []outbox.Handler
	for _, action := range actions {
		handlers = append(handlers, s.handler(forms[action], action, nil))
	}
	opts := append(testenv.KafkaOpts(s.brokers), kgo.SessionTimeout(6*time.Second), kgo.HeartbeatInterval(200*time.Millisecond), kgo.Dialer(cable.dial))
	c, err := outbox.NewConsumer(s.db, opts, s.events, s.group, cfg, handlers...)
	require.NoError(t, err)
	return testenv.Run(t, c.Run), cable
}

// sellUpTo sends the next sales of products, each to a partition of its own, up to these numbers.
func (s *parkingFixture) sellUpTo(t testing.TB, partitions, products, first, last int) {
	t.Helper()
	var records []*kgo.Record
	for n := first; n <= last; n++ {
		for p := range products {
			r := s.sale(fmt.Sprint("p-", p), n)
			r.Partition = int32(p % partitions)
			records = append(records, r)
		}
	}
	s.send(t, records...)
}

func (s *parkingFixture) awaitAll(t testing.TB, action string, products, upTo int) {
	t.Helper()
	for p := range products {
		s.awaitJournal(t, action, fmt.Sprint("p-", p), upTo)
	}
}

// awaitMembers waits until the group has so many members and each has the same number of partitions.
func (s *parkingFixture) awaitMembers(t testing.TB, members, partitions int) {
	t.Helper()
	require.Eventually(t, func() bool {
		shares := s.shares(t, s.group)
		return len(shares) == members && !slices.ContainsFunc(shares, func(n int) bool { return n != partitions/members })
	}, testenv.Patience, 50*time.Millisecond)
}

// shares returns how many partitions of the topic each member has. It is empty while the group is in motion.
func (s *consumerFixture) shares(t testing.TB, group string) (shares []int) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...))
	require.NoError(t, err)
	defer client.Close()
	describe := kmsg.NewPtrDescribeGroupsRequest()
	describe.Groups = []string{group}
	described, err := describe.RequestWith(background, client)
	require.NoError(t, err)
	if described.Groups[0].State != "Stable" {
		return nil
	}
	for _, m := range described.Groups[0].Members {
		var a kmsg.ConsumerMemberAssignment
		if a.ReadFrom(m.MemberAssignment) != nil {
			return nil
		}
		n := 0
		for _, topic := range a.Topics {
			n += len(topic.Partitions)
		}
		shares = append(shares, n)
	}
	return shares
}

// Two releases are side by side, and the new one has another action. The old one commits the offsets of events that the
// new action has not seen.
func TestNewHandlerMissesNothingInARollout(t *testing.T) {
	t.Parallel()
	for _, form := range []string{"Handle", "HandleBatch", "HandleNoTx"} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			testNewHandlerInARollout(t, form)
		})
	}
}

func testNewHandlerInARollout(t *testing.T, form string) {
	const partitions, products = 4, 8
	s := newParkingFixture(t, partitions)
	forms := map[string]string{"COUNTED": "Handle", "SUMMED": form}
	stopOld, _ := s.release(t, forms, "COUNTED")
	s.sellUpTo(t, partitions, products, 1, 5)
	s.awaitAll(t, "COUNTED", products, 5)
	for number := range partitions {
		s.awaitOffset(t, int32(number), 10)
	}
	s.release(t, forms, "COUNTED", "SUMMED")
	s.awaitMembers(t, 2, partitions)
	s.sellUpTo(t, partitions, products, 6, 20)
	s.awaitAll(t, "COUNTED", products, 20)
	stopAnother, _ := s.release(t, forms, "COUNTED")
	stopOld()
	s.awaitMembers(t, 2, partitions)
	s.sellUpTo(t, partitions, products, 21, 30)
	s.awaitAll(t, "COUNTED", products, 30)
	t.Logf("counted %s, summed %s of 200 that were sent since the new release runs", s.since(t, "COUNTED"), s.since(t, "SUMMED"))
	stopAnother()
	for p := range products { // the first five were handled before there was a SUMMED
		product := fmt.Sprint("p-", p)
		assert.Eventually(t, func() bool { return len(s.journal(t, "SUMMED", product)) >= 25 }, testenv.Patience, 20*time.Millisecond)
		require.Equal(t, upToN(30)[5:], s.journal(t, "SUMMED", product), product)
		require.Equal(t, upToN(30), s.journal(t, "COUNTED", product), product)
	}
	s.awaitNoGap(t)
}

func (s *parkingFixture) since(t testing.TB, action string) string {
	return s.text(t, `SELECT count(*)::text FROM {s}.journal WHERE action = $1 AND n > 5`, action)
}

// awaitNoGap waits until each action has read what it had missed.
func (s *parkingFixture) awaitNoGap(t testing.TB) {
	t.Helper()
	assert.Eventually(t, func() bool { return s.gaps(t) == "" }, testenv.Patience, 10*time.Millisecond)
	require.Empty(t, s.gaps(t))
}

func (s *parkingFixture) gaps(t testing.TB) string {
	t.Helper()
	return s.text(t, `SELECT coalesce(string_agg(concat_ws(' ', action, partition, from_offset), '; ' ORDER BY action, partition), '') FROM {s}.consumer_gap`)
}

// A release with a new action is taken back, and rolled out again. The action has not seen what was handled meanwhile.
func TestRollbackLeavesNoHole(t *testing.T) {
	t.Parallel()
	const partitions, products = 2, 4
	s := newParkingFixture(t, partitions)
	forms := map[string]string{"COUNTED": "Handle", "SUMMED": "HandleNoTx"}
	for n, actions := range [][]string{{"COUNTED", "SUMMED"}, {"COUNTED"}, {"COUNTED"}, {"COUNTED", "SUMMED"}, {"SUMMED"}, {"COUNTED", "SUMMED"}} {
		stop, _ := s.release(t, forms, actions...)
		s.sellUpTo(t, partitions, products, 10*n+1, 10*n+10)
		for _, action := range actions {
			s.awaitAll(t, action, products, 10*n+10)
		}
		stop()
	}
	s.awaitNoGap(t)
}

// Members of three releases start and stop while events are sent. Others are cut off from Kafka: they commit nothing
// more, and the group expels them or gets them back. In the end each action has handled each event that was sent since
// the group knows it, once and in the order of its key.
func TestReleasesComeAndGo(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	const partitions, products = 4, 12
	s := newParkingFixture(t, partitions)
	forms := map[string]string{"A": "Handle", "B": "HandleBatch", "C": "Handle"}
	releases := [][]string{{"A"}, {"A", "B"}, {"A", "B", "C"}}
	known := map[string]int{} // the last number that was sent before the first member with the action was there
	sent := 0
	type member struct {
		stop  func()
		cable *brokenDialer
	}
	var members []member
	var ended sync.WaitGroup
	start := func(release []string) {
		stop, cable := s.release(t, forms, release...)
		members = append(members, member{stop, cable})
		for _, action := range release {
			if _, before := known[action]; before {
				continue
			}
			// What is sent from now on counts: the group knows the action.
			require.Eventually(t, func() bool {
				return s.text(t, `SELECT count(*)::text FROM {s}.consumer_handler WHERE action = $1`, action) == "1"
			}, testenv.Patience, 10*time.Millisecond)
			known[action] = sent
		}
	}
	start(releases[0])
	for until := time.Now().Add(30 * time.Second); time.Now().Before(until); {
		s.sellUpTo(t, partitions, products, sent+1, sent+5)
		sent += 5
		time.Sleep(time.Duration(random.IntN(300)) * time.Millisecond) // the members work meanwhile
		switch n := random.IntN(8); {
		case n < 2 && len(members) < 4:
			start(releases[random.IntN(len(releases))])
		case n == 2 && len(members) > 0:
			ended.Go(members[0].stop)
			members = members[1:]
		case n == 3 && len(members) > 0:
			m, cutOff := members[0], time.Duration(random.IntN(10))*time.Second // a session lasts 6 s
			ended.Go(func() {
				m.cable.breakAll()
				time.Sleep(cutOff)
				m.cable.broken.Store(false)
				m.stop()
			})
			members = members[1:]
		}
	}
	for _, m := range members {
		ended.Go(m.stop)
	}
	ended.Wait()
	start(releases[2])
	for action, before := range known {
		for p := range products {
			product := fmt.Sprint("p-", p)
			handled := func() []int {
				return slices.DeleteFunc(s.journal(t, action, product), func(n int) bool { return n <= before })
			}
			assert.Eventually(t, func() bool { return len(handled()) >= sent-before }, testenv.Patience, 50*time.Millisecond)
			require.Equal(t, upToN(sent)[before:], handled(), "%s %s of seed %d", action, product, seed)
		}
	}
	t.Logf("%d events of each of %d products, known since %v", sent, products, known)
	s.awaitNoGap(t)
}

// What fails in a gap is parked, and later events of its key wait behind it, those after the gap too. What cannot be
// decoded is no second dead letter.
func TestFailuresInAGap(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	forms := map[string]string{"COUNTED": "Handle", "SUMMED": "Handle"}
	stop, _ := s.release(t, forms, "COUNTED", "SUMMED")
	s.awaitOffset(t, 0, 0)
	stop()
	stop, _ = s.release(t, forms, "COUNTED")
	s.send(t, s.sale("a", 1), s.sale("b", 1), s.saleRecord(uuid.NewString(), []byte("{")), s.saleRecord("", oneSale), s.sale("a", 2), s.sale("b", 2))
	s.awaitOffset(t, 0, 6)
	s.deadLetters(t, 2)
	s.awaitStatuses(t, "", "DEAD 2")
	stop()

	var open atomic.Bool
	fails := func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		if sold(e) == "a 1" && !open.Load() {
			return errPlay
		}
		return nil
	}
	testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), s.handler("Handle", "COUNTED", nil), s.handler("Handle", "SUMMED", fails)).Run)
	s.send(t, s.sale("a", 3), s.sale("b", 3), s.saleRecord("", oneSale))
	s.awaitOffset(t, 0, 9)
	s.awaitJournal(t, "SUMMED", "b", 3)
	s.awaitJournal(t, "COUNTED", "a", 3)
	require.Empty(t, s.journal(t, "SUMMED", "a"))
	require.Equal(t, "3", s.text(t, `SELECT count(*)::text FROM {s}.event_delivery WHERE action = 'SUMMED'`), s.rowStates(t))
	open.Store(true)
	s.awaitJournal(t, "SUMMED", "a", 3)
	s.awaitNoGap(t)
	s.awaitStatuses(t, "", "DEAD 3")
	require.Len(t, s.deadLetters(t, 3), 3)
	require.EqualValues(t, 3, s.endOf(t, s.topic+".dlq"))
}

// endOf returns the end of partition 0 of a topic.
func (s *consumerFixture) endOf(t testing.TB, topic string) int64 {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...))
	require.NoError(t, err)
	defer client.Close()
	at := kafkaclient.Partition{Topic: topic}
	ends, err := kafkaclient.ListOffsets(background, client, kafkaclient.Uncommitted, map[kafkaclient.Partition]int64{at: kafkaclient.EndOffset})
	require.NoError(t, err)
	return ends[at]
}

// A member stops in the middle of a gap. The next one goes on where it has stopped. While a member without the handler
// has the partition, the gap stays.
func TestStopWithinAGap(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	forms := map[string]string{"COUNTED": "Handle", "SUMMED": "HandleNoTx"}
	stop, _ := s.release(t, forms, "COUNTED", "SUMMED")
	s.awaitOffset(t, 0, 0)
	stop()
	stop, _ = s.release(t, forms, "COUNTED")
	s.sellUpTo(t, 1, 1, 1, 100)
	s.awaitOffset(t, 0, 100)
	stop()
	require.Equal(t, "SUMMED 0 0", s.gaps(t))

	reached, goOn := make(chan struct{}), make(chan struct{})
	cfg := s.config(t)
	cfg.MaxPoll = 1
	stop = testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", nil), s.handler("HandleNoTx", "SUMMED",
		func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
			if e.Amount == 40 {
				close(reached)
				<-goOn
			}
			return nil
		})).Run)
	<-reached
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		stop()
	}()
	time.AfterFunc(300*time.Millisecond, func() { close(goOn) }) // the stop waits for the handler
	<-stopped
	require.Equal(t, "SUMMED 0 40", s.gaps(t))
	require.EqualValues(t, 100, s.committed(t, s.group, 0), "nothing is committed within a gap")

	stop, _ = s.release(t, forms, "COUNTED")
	s.sellUpTo(t, 1, 1, 101, 110)
	s.awaitOffset(t, 0, 110)
	stop()
	require.Equal(t, "SUMMED 0 40", s.gaps(t))
	s.release(t, forms, "COUNTED", "SUMMED")
	s.awaitAll(t, "SUMMED", 1, 110)
	s.awaitAll(t, "COUNTED", 1, 110)
	s.awaitNoGap(t)
}

// Retention has removed a part of a gap. The rest is read, and the loss is counted.
func TestRetentionPassesAGap(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	forms := map[string]string{"COUNTED": "Handle", "SUMMED": "Handle"}
	stop, _ := s.release(t, forms, "COUNTED", "SUMMED")
	s.awaitOffset(t, 0, 0)
	stop()
	stop, _ = s.release(t, forms, "COUNTED")
	s.sellUpTo(t, 1, 1, 1, 10)
	s.awaitOffset(t, 0, 10)
	stop()
	s.removeBefore(t, 4)
	var lost atomic.Int64
	cfg := s.config(t)
	cfg.Hooks.Lost = func(_ string, _ int32, records int64) { lost.Add(records) }
	stop = testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", nil), s.handler("Handle", "SUMMED", nil)).Run)
	require.Eventually(t, func() bool { return len(s.journal(t, "SUMMED", "p-0")) == 6 }, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, upToN(10)[4:], s.journal(t, "SUMMED", "p-0"))
	s.awaitNoGap(t)
	stop() // which saves what is lost
	require.EqualValues(t, 4, lost.Load())
	require.Equal(t, "4", s.text(t, `SELECT sum(lost)::text FROM {s}.consumer_start`))
	require.Equal(t, upToN(10), s.journal(t, "COUNTED", "p-0"))
}

// removeBefore removes the records of partition 0 before an offset.
func (s *consumerFixture) removeBefore(t testing.TB, offset int64) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...))
	require.NoError(t, err)
	defer client.Close()
	request := kmsg.NewPtrDeleteRecordsRequest()
	request.Topics = []kmsg.DeleteRecordsRequestTopic{{Topic: s.topic, Partitions: []kmsg.DeleteRecordsRequestTopicPartition{{Offset: offset}}}}
	response, err := request.RequestWith(background, client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Topics[0].Partitions[0].ErrorCode))
}

// While all members have the same handlers, nothing is written but the handlers themselves, once.
func TestEqualMembersWriteNoGaps(t *testing.T) {
	t.Parallel()
	const partitions, products = 4, 4
	s := newParkingFixture(t, partitions)
	forms := map[string]string{"COUNTED": "Handle", "SUMMED": "HandleNoTx"}
	s.exec(t, `CREATE TABLE {s}.writes (what text);
		CREATE FUNCTION {s}.note_write() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO writes VALUES (TG_TABLE_NAME || ' ' || TG_OP); RETURN NULL; END $$;
		ALTER FUNCTION {s}.note_write() SET search_path = {s};
		CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON {s}.consumer_gap FOR EACH ROW EXECUTE FUNCTION {s}.note_write();
		CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON {s}.consumer_handler FOR EACH ROW EXECUTE FUNCTION {s}.note_write()`)
	for n := range 3 {
		stop, _ := s.release(t, forms, "COUNTED", "SUMMED")
		another, _ := s.release(t, forms, "COUNTED", "SUMMED")
		s.awaitMembers(t, 2, partitions)
		s.sellUpTo(t, partitions, products, 5*n+1, 5*n+5)
		s.awaitAll(t, "SUMMED", products, 5*n+5)
		stop()
		another()
	}
	require.Equal(t, "consumer_handler INSERT 2", s.text(t, `SELECT string_agg(what || ' ' || n, ', ') FROM (SELECT what, count(*) AS n FROM {s}.writes GROUP BY what) AS w`))
}
