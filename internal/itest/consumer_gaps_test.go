package itest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
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
	for until := time.Now().Add(40 * time.Second); time.Now().Before(until); {
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
