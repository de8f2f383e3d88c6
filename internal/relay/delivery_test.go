package relay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
)

// An event is a letter, and the letter is its key: A is a later event of key a. Keys up
// to m go to the topic orders, the others to payments; each key has a partition of its
// own, but for z, which shares that of y.
//
// A play is a list of sends, each with the events that were sent, and Kafka's
// answer to each of them:
//
//   - accepted             - unavailable           t its topic is missing
//     x rejected             n no leader             i it cannot be made into a record
//     a has to be sent alone b behind such an event  s not written when the relay stops
//     ? does not answer
//
// Fewer answers than events mean that fewer were taken, no answer that the breaker is
// open, stop that the relay is told to stop meanwhile, lost that the lease is lost. down
// means that Kafka as a whole does not work.
//
// The outcomes are one for each event: + sent, x rejected, u unavailable, b blocked,
// p parked, . pending.
type deliveryTest struct {
	name, batch, play, want string
	fails                   string        // what the log says has failed, in this order
	waits                   time.Duration // the shortest time that it takes; 0: no time at all
}

const (
	aBackoff = 50 * time.Millisecond // at least
	aPoll    = 50 * time.Millisecond // at the breaker
)

var deliverTests = []deliveryTest{
	{"all is accepted", "abA", "abA:+++", "+++", "", 0},
	{"nothing is to be sent", "", "", "", "", 0},

	// Kafka is unavailable.
	{"the whole batch is unavailable: it is sent again, and nothing is parked", "abc", "abc:---down abc:---down abc:+++", "+++", "Kafka", 2 * aBackoff},
	{"Kafka was gone for one send", "ab", "ab:--down ab:++", "++", "Kafka", aBackoff},
	{"the relay is told to stop while Kafka is unavailable", "abc", "abc:---downstop", "...", "Kafka", 0},
	{"the lease is lost", "abc", "abc:lost", "...", "", 0},
	{"the lease is lost while the batch is sent again", "abc", "abc:---down abc:lost", "...", "Kafka", aBackoff},
	{"Kafka goes in the middle of the batch: the rest is sent again", "abc", "abc:+--down bc:--down bc:++", "+++", "Kafka", 2 * aBackoff},
	{"Kafka is back, a partition is not: it has one more try", "abc", "abc:+--down bc:-- bc:+-", "++u", "Kafka, partition orders/2", 2 * aBackoff},
	{"the relay is told to stop in the middle", "abc", "abc:+--downstop", "+..", "Kafka", 0},

	// Nothing that was sent is behind an event that is pending after a stop.
	{"the relay stops before a batch is all handed over", "abcd", "abcd:++stop", "++..", "", 0},
	{"the relay stops, and Kafka has had only some of a batch", "abcd", "abcd:s+s+stop", "u+u+", "", 0},
	{"an event that is to be sent alone is in front of others", "abc", "abc:a++stop", "u++", "", 0},
	{"so are later events of its key", "aAbA", "aAbA:aa+astop", "ub+.", "", 0},
	{"the relay stops between events that are sent alone", "abcd", "abcd:xxx+ a:+ b:+stop", "++u+", "", 0},
	{"and one of them was not written", "abcd", "abcd:xxxx a:+ b:sstop", "+...", "", 0},
	{"what is rejected is no reason to park", "abc", "abc:sixstop", ".x.", "", 0},

	// Some of it is.
	{"one partition does not answer: its events are not sent again meanwhile", "abBc", "abBc:+??+", "+ub+", "partition orders/1", 0},
	{"alone, one does not answer", "abc", "abc:xxx a:+ b:? c:+", "+u+", "partition orders/1", 0},
	{"nor is the rest of its partition tried, if not all goes together", "yz", "yz:?", "uu", "partition payments/24", 0},
	{"nor is another event of its partition tried alone", "yzab", "yzab:aaaa y:? a:+ b:+", "uu++", "partition payments/24", 0},
	{"one partition fails while others work", "abc", "abc:+-+", "+u+", "partition orders/1", 0},
	{"one partition fails, alone", "b", "b:-", "u", "partition orders/1", 0},
	{"all partitions fail, and Kafka works", "ab", "ab:--", "uu", "partition orders/0, partition orders/1", 0},
	{"later events of an unavailable one are blocked", "abBc", "abBc:+--+", "+ub+", "partition orders/1", 0},
	{"one topic is missing: only its events are unavailable", "anbo", "anbo:+t+t", "+u+u", "topic payments", 0},
	{"all topics are missing: Kafka is there", "an", "an:tt", "uu", "topic orders, topic payments", 0},
	{"later events of a missing topic's key are blocked", "nNa", "nNa:tt+", "ub+", "topic payments", 0},
	{"a partition has no leader", "abA", "abA:n+n", "u+b", "partition orders/0", 0},

	// Something is rejected.
	{"a rejection names all: each is sent alone, and only the one that is rejected alone is blamed", "abc", "abc:xxx a:+ b:x c:+", "+x+", "", 0},
	{"what was rejected with others gets through alone", "ab", "ab:x+ a:+", "++", "", 0},
	{"later events of a rejected one are not sent", "abAB", "abAB:xxxx a:+ b:x A:+", "+x+b", "", 0},
	{"too large: sent alone after the others, and before what is behind it", "abAc", "abAc:a+a+ a:+ A:+", "++++", "", 0},
	{"too large, and rejected alone", "abA", "abA:a+a a:x", "x+b", "", 0},
	{"an event that cannot be sent is rejected at once, and its key waits", "abA", "abA:i+b", "x+b", "", 0},
	{"Kafka goes between events that are sent alone", "abc", "abc:xxx a:+ b:-down b:+ c:+", "+++", "Kafka", aBackoff},
	{"Kafka goes while something is rejected: the order stays", "abc", "abc:-x+down a:+ b:x", "+x+", "Kafka", aBackoff},
	{"alone, a topic fails: all that is left of it is unavailable", "abnc", "abnc:xxxx a:+ b:- n:+", "+u+u", "partition orders/1", 0},
	{"alone, a topic is missing", "an", "an:xx a:t n:+", "u+", "topic orders", 0},
	{"alone, Kafka is waited for", "ab", "ab:xx a:-down a:+ b:+", "++", "Kafka", aBackoff},
	{"the relay is told to stop between events that are sent alone", "ab", "ab:xx a:-downstop", "..", "Kafka", 0},

	// Not all goes together.
	{"fewer are taken: the others follow", "abc", "abc:++ c:+", "+++", "", 0},
	{"a rejection among those that were taken", "abc", "abc:xx a:+ b:x c:+", "+x+", "", 0},
	{"the breaker is open: the batch waits until it is half-open", "ab", "ab: ab:+ b:+", "++", "", 30 * time.Second},
	{"the breaker opens in the middle", "abc", "abc:+ bc: bc:++", "+++", "", 30 * time.Second},
	{"the breaker opens between events that are sent alone", "ab", "ab:xx a: a:+ b:+", "++", "", 30 * time.Second},
	{"the relay is told to stop while the breaker is open", "ab", "ab:stop", "..", "", 0},
}

func TestDeliver(t *testing.T) {
	t.Parallel()
	for _, test := range deliverTests {
		t.Run(test.name, func(t *testing.T) {
			testDelivery(t, test, func(d *Deliverer, stop context.Context, batch []envelope.Event) ([]Outcome, error) {
				return d.Deliver(stop, context.Background(), batch, NewParking(false))
			})
		})
	}
}

// What has failed before is tried once.
func TestAttempt(t *testing.T) {
	t.Parallel()
	for _, test := range []deliveryTest{
		{"all is accepted", "ab", "ab:++", "++", "", 0},
		{"an event that fails is unavailable at once", "ab", "ab:--", "uu", "partition orders/0, partition orders/1", 0},
		{"Kafka does not work", "ab", "ab:--down", "..", "Kafka", 0},
		{"whatever the others do", "ab", "ab:+-", "+u", "partition orders/1", 0},
		{"the breaker lets nothing through", "ab", "ab:", "..", "", 0},
		{"the breaker lets one through", "ab", "ab:+ b:", "+.", "", 0},
		{"a rejection names all: each is sent alone", "abA", "abA:xxx a:x b:+", "x+b", "", 0},
		{"alone, a topic fails: all that is left of it is unavailable", "abn", "abn:xxx a:- n:+", "uu+", "partition orders/0", 0},
		{"the breaker opens between events that are sent alone", "ab", "ab:xx a:+ b:", "+.", "", 0},
		{"the lease is lost", "ab", "ab:lost", "..", "", 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			testDelivery(t, test, func(d *Deliverer, stop context.Context, batch []envelope.Event) ([]Outcome, error) {
				return d.attempt(stop, context.Background(), batch)
			})
		})
	}
}

// What happens when a place is known to be bad. Each word of the batches is a delivery, and
// so is each of the outcomes.
func TestDeliverAvoidsBadPlaces(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, batches, play, want string
		recovered                 int
	}{
		{"its events are parked without being tried once another place has accepted one", "abn bnB", "abn:+-+ n:+", "+u+ u+b", 0},
		{"what has accepted one is tried, another place of the topic is a suspect", "ab bacB", "ab:+- a:+", "+u u+ub", 0},
		{"in other topics, what has never accepted one is a suspect for a while", "abn ano o n", "abn:+-+ an:++ n:+", "+u+ ++u u +", 0},
		{"but not for long", "ab a a a a a n", "ab:+- a:+ a:+ a:+ a:+ a:+ n:+", "+u + + + + + +", 0},
		{"a topic that is missing makes no suspects", "an b", "an:+t b:+", "+u +", 0},
		{"until then they are tried: it may be Kafka that fails", "b bB a b", "b:- bB:-- a:+", "u ub + u", 0},
		{"then others in the same batch are tried before them, so as not to wait for them", "b baB", "b:- a:+", "u u+b", 0},
		{"and they are tried when the others have failed, too", "b ab", "b:- a:- b:-", "u uu", 0},
		{"what the place has accepted itself does not count", "bB B", "bB:+- B:-", "+u u", 0},
		{"a topic that is missing", "an no an", "an:+t a:+", "+u uu +u", 0},
		{"a topic that is missing, and nothing else to send", "n no n", "n:t no:tt n:t", "u uu u", 0},
		{"it recovers when somebody has sent an event to it", "ab b b b", "ab:+- b:+ b:+", "+u u + +", 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newFakeSender(t, test.play)
				var got []string
				for n, batch := range strings.Fields(test.batches) {
					time.Sleep(time.Second)
					if test.recovered > 0 && n == 2 { // a probe has got through
						require.True(t, s.bad.Accept(kafka.Partition{Topic: "orders", Number: 1}, time.Now()))
					}
					outcomes, err := s.deliverer(nil).Deliver(t.Context(), t.Context(), envelopesOf(batch), NewParking(false))
					require.NoError(t, err)
					got = append(got, outcomeSymbols(outcomes))
				}
				require.Equal(t, test.want, strings.Join(got, " "))
				require.Empty(t, s.play)
			})
		})
	}
}

// deliver delivers a batch, and returns the outcomes.
func (s *fakeSender) deliver(t *testing.T, batch string) string {
	t.Helper()
	outcomes, err := s.deliverer(nil).Deliver(t.Context(), t.Context(), envelopesOf(batch), NewParking(false))
	require.NoError(t, err)
	return outcomeSymbols(outcomes)
}

// deliverLater is deliver after a second.
func (s *fakeSender) deliverLater(t *testing.T, batch string) string {
	t.Helper()
	time.Sleep(time.Second)
	return s.deliver(t, batch)
}

// An event may expire while Kafka is away, and need not wait for it then. One behind it is sent, also if an event of
// its key has failed. One without an answer waits for the answer.
func TestDeliverSkipsExpired(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFakeSender(t, "abc:---down c:+ a:x a:x")
		batch := envelopesOf("abc")
		batch[0].Expiry = envelope.NewExpiry(time.Now(), time.Now().Add(-time.Millisecond))
		batch[1].Expiry = envelope.NewExpiry(time.Now().Add(-24*time.Hour), time.Now().Add(-24*time.Hour-time.Millisecond)) // by another clock
		d := s.deliverer(nil)
		outcomes, err := d.Deliver(t.Context(), t.Context(), batch, NewParking(false))
		require.NoError(t, err)
		require.Equal(t, []OutcomeKind{OutcomeExpired, OutcomeExpired, OutcomeSent}, kindsOf(outcomes))
		batch = envelopesOf("aA")
		batch[1].Expiry = envelope.NewExpiry(time.Now(), time.Now())
		outcomes, err = d.Deliver(t.Context(), t.Context(), batch, NewParking(false))
		require.NoError(t, err)
		require.Equal(t, []OutcomeKind{OutcomeRejected, OutcomeExpired}, kindsOf(outcomes))
		// All of a batch: nothing is sent, and an outage does not matter.
		outcomes, err = d.Deliver(t.Context(), t.Context(), batch[1:], NewParking(false))
		require.NoError(t, err)
		require.Equal(t, []OutcomeKind{OutcomeExpired}, kindsOf(outcomes))
	})
}

// As long as the process that led before may still send an event, it does not expire: a later event of its key would be
// in front of it in Kafka. Neither is sent, and events of other keys are.
func TestNothingExpiresBeforeLeaseIsExclusive(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFakeSender(t, "b:+ Ab:++")
		exclusive := time.Now().Add(time.Second)
		d := s.deliverer(nil)
		d.Parts.Exclusive = func() bool { return !time.Now().Before(exclusive) }
		for _, want := range [][]OutcomeKind{{OutcomeUnavailable, OutcomeBlocked, OutcomeSent}, {OutcomeExpired, OutcomeSent, OutcomeSent}} {
			batch := envelopesOf("aAb")
			batch[0].Expiry = envelope.NewExpiry(time.Now(), time.Now())
			outcomes, err := d.Deliver(t.Context(), t.Context(), batch, NewParking(false))
			require.NoError(t, err)
			require.Equal(t, want, kindsOf(outcomes))
			time.Sleep(time.Second)
		}
		require.Empty(t, s.play)
	})
}

func kindsOf(outcomes []Outcome) (kinds []OutcomeKind) {
	for _, o := range outcomes {
		kinds = append(kinds, o.Kind)
	}
	return kinds
}

// As long as nothing is probed there are no suspects, also not those that another process has left.
func TestNoSuspectsWithoutProbes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFakeSender(t, "a:+ acno:++++ a:+")
		s.bad = NewBadPartitions(outage.NewLogs(s.logger()))
		s.bad.Load([]cursor.BadPartition{
			{Name: "orders/1", Class: "unavailable", Err: kgo.ErrRecordTimeout}, {Name: "orders/2", Class: "unavailable", Err: errors.New(errSuspect.Error())},
			{Name: "payments/13", Class: "unavailable", Err: errors.New(errSuspect.Error())},
		})
		require.Equal(t, "+", s.deliverLater(t, "a"))
		require.Equal(t, "++u++", s.deliverLater(t, "acbno"))
		s.bad.Probe()
		require.Equal(t, "+uu", s.deliverLater(t, "abd"))
	})
}

// A topic that another process has left as bad is tried as long as nothing is probed: Kafka may have been unavailable.
func TestLoadedTopicIsTriedWithoutProbes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFakeSender(t, "a:+ n:+ an:+t a:+")
		s.bad = NewBadPartitions(outage.NewLogs(s.logger()))
		s.bad.Load([]cursor.BadPartition{{Name: "payments", Class: "unavailable", Err: kgo.ErrRecordTimeout}})
		require.Equal(t, "+", s.deliverLater(t, "a"))
		require.Equal(t, "+", s.deliverLater(t, "n"))
		require.Equal(t, "+u", s.deliverLater(t, "an"))
		require.Equal(t, "+u", s.deliverLater(t, "an"))
	})
}

// An open breaker is half-open as soon as Kafka says that it works, twice.
func TestBreakerEndsWithTheOutage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFakeSender(t, "ab: ab:+ b:+")
		time.AfterFunc(10500*time.Millisecond, func() { s.working.Store(true) })
		began := time.Now()
		outcomes, err := s.deliverer(nil).Deliver(t.Context(), t.Context(), envelopesOf("ab"), NewParking(false))
		require.NoError(t, err)
		require.Equal(t, "++", outcomeSymbols(outcomes))
		require.Equal(t, 12*time.Second, time.Since(began))
	})
}

// An event that never reached Kafka says nothing about Kafka: an outage does not end with it.
func TestOutageOutlastsEventsThatAreNotSent(t *testing.T) {
	t.Parallel()
	for name, ours := range map[string]error{
		"a wrong field": &envelope.FieldError{Field: "Type", Err: check.ErrEmpty},
		"unreadable":    &envelope.UnreadableError{Err: errors.New("invalid memory alloc request size")},
		"too large":     &envelope.TooLargeError{Size: 2, Most: 1},
	} {
		for _, test := range []deliveryTest{
			{batch: "a", play: "a:i", want: "x"},
			{batch: "aAb", play: "aAb:ibi", want: "xbx"},
			{batch: "ab", play: "ab:aa a:i b:i", want: "xx"},
		} {
			t.Run(name+", "+test.batch, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newFakeSender(t, test.play+" a:+")
					s.errs['i'] = ours
					d := s.deliverer(nil)
					d.Parts.KafkaOutage.Report(kgo.ErrRecordTimeout)
					for _, batch := range []deliveryTest{test, {batch: "a", want: "+"}} {
						require.NotNil(t, d.Parts.KafkaOutage.Current())
						outcomes, err := d.Deliver(t.Context(), t.Context(), envelopesOf(batch.batch), NewParking(false))
						require.NoError(t, err)
						require.Equal(t, batch.want, outcomeSymbols(outcomes))
					}
					require.Nil(t, d.Parts.KafkaOutage.Current())
					require.Equal(t, 1, strings.Count(s.log.String(), "Kafka works again"))
				})
			})
		}
	}
}

// An event without an answer says nothing about Kafka, also if Kafka answers other questions: an outage does not end
// with it. It ends with the next answer, to a send or to a question of the contact, which learns that no send fails.
func TestOutageOutlastsEventsWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	byClient := fmt.Errorf("%w: %w", errByClient, kerr.MessageTooLarge)
	for _, test := range []struct {
		name string
		deliveryTest
	}{
		{"no answer yet", deliveryTest{batch: "a", play: "a:?", want: "u"}},
		{"from several partitions", deliveryTest{batch: "aAb", play: "aAb:???", want: "ubu"}},
		{"alone", deliveryTest{batch: "ab", play: "ab:aa a:? b:?", want: "uu"}},
		{"no answer in time", deliveryTest{batch: "ab", play: "ab:--", want: "uu"}},
		{"nor alone", deliveryTest{batch: "ab", play: "ab:aa a:-", want: "uu"}},
		{"beside what we reject", deliveryTest{batch: "ab", play: "ab:?i", want: "ux"}},
		{"the client rejects it", deliveryTest{batch: "a", play: "a:x a:x", want: "x"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newFakeSender(t, test.play+" n:+")
				s.errs['x'] = byClient
				d, heard, local := s.deliverer(nil), 0, 0
				d.Parts.Heard = func(error) { heard++ }
				d.Parts.Local = func() { local++ }
				d.Parts.KafkaOutage.Report(kgo.ErrRecordTimeout)
				outcomes, err := d.Deliver(t.Context(), t.Context(), envelopesOf(test.batch), NewParking(false))
				require.NoError(t, err)
				require.Equal(t, test.want, outcomeSymbols(outcomes))
				require.NotNil(t, d.Parts.KafkaOutage.Current())
				require.NotContains(t, s.log.String(), "Kafka works again")
				require.Zero(t, heard)
				require.Equal(t, strings.Contains(test.want, "u"), local > 0)
				outcomes, err = d.Deliver(t.Context(), t.Context(), envelopesOf("n"), NewParking(false))
				require.NoError(t, err)
				require.Equal(t, "+", outcomeSymbols(outcomes))
				require.Nil(t, d.Parts.KafkaOutage.Current())
				require.Equal(t, 1, heard)
			})
		})
	}
}

// Kafka has failed, and is back but for one place. The trials of the breaker would be spent
// on its events, and no other event would get through as long as it is bad.
func TestTrialsAreNotSpentOnBadPlaces(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFakeSender(t, "ab:-+ b:+")
		s.openBreaker()
		time.Sleep(31 * time.Second)
		require.Equal(t, breaker.HalfOpen, s.breaker.State())
		require.Equal(t, "u+", s.deliver(t, "ab"))
		require.Equal(t, breaker.HalfOpen, s.breaker.State())
		require.Equal(t, "ub+", s.deliver(t, "aAb"))
		require.Empty(t, s.play)
	})
}

// Who retries leaves bad places alone, and who probes does not.
func TestAttemptAvoidsBadPlaces(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFakeSender(t, "a:+ ab:-- ab:++")
		s.bad.Load([]cursor.BadPartition{{Name: "orders/1", Class: "unavailable", Err: kgo.ErrRecordTimeout}})
		try := func(send func(stop, held context.Context, batch []envelope.Event) ([]Outcome, error), want string) []Outcome {
			time.Sleep(time.Second)
			outcomes, err := send(t.Context(), t.Context(), envelopesOf("ab"))
			require.NoError(t, err)
			require.Equal(t, want, outcomeSymbols(outcomes))
			return outcomes
		}
		d := s.deliverer(nil)
		outcomes := try(d.attempt, "+u")
		require.Equal(t, Outcome{Kind: OutcomeUnavailable, Class: "unavailable", Err: kgo.ErrRecordTimeout, place: "orders/1"}, outcomes[1])
		require.Equal(t, []string{"orders"}, s.prepared)
		require.Equal(t, "orders/0", try(d.probe, "uu")[0].place)
		try(d.probe, "++")
		require.Equal(t, 2, s.recovered)
		require.Empty(t, s.bad.All())
	})
}

// With PassFailedKeys, later events of a key do not wait for those that failed.
func TestDeliverPassesFailedKeys(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		parked := parkingOf(t, map[string]int{"orders/a": 1})
		s := newFakeSender(t, "abBAc:+x+++ b:x")
		d := s.deliverer(nil)
		d.Parts.PassFailedKeys = true
		outcomes, err := d.Deliver(t.Context(), t.Context(), envelopesOf("abBAc"), parked)
		require.NoError(t, err)
		require.Equal(t, "+x+++", outcomeSymbols(outcomes))
	})
}

// Events of keys that have rows in outbox_failed are not sent, and count as pending.
func TestDeliverParks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		parked := parkingOf(t, map[string]int{"orders/a": 1, "payments/b": 1})
		s := newFakeSender(t, "bc:++")
		outcomes, err := s.deliverer(nil).Deliver(t.Context(), t.Context(), envelopesOf("abAc"), parked)
		require.NoError(t, err)
		require.Equal(t, "p+p+", outcomeSymbols(outcomes))
		require.Equal(t, 2, int(parked.Keys[parked.Hash("orders/a")].pending))
	})
}

// The hook gets what has an outcome, and is not called where nothing has one.
func TestDeliverNotifies(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ name, batch, play, want string }{
		{"all is accepted", "ab", "ab:++", "2 sent [a b], 0 failed [], 0 waiting"},
		{"one is rejected, one is unavailable, and one waits", "abBcn", "abBcn:+ib+t", "2 sent [a c], 2 failed [b:invalid_event n:unknown_topic], 1 waiting"},
		{"the relay is told to stop", "ab", "ab:--downstop", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var got string
				s := newFakeSender(t, test.play)
				stop, cancel := context.WithCancel(t.Context())
				s.stop = cancel
				d := s.deliverer(func(b SentBatch) {
					var sent, failed []string
					for _, e := range b.Sent {
						sent = append(sent, string(e.Key()))
					}
					for _, e := range b.NotTaken {
						failed = append(failed, string(e.Key())+":"+e.Class)
					}
					require.False(t, b.Retried)
					got = fmt.Sprintf("%d sent %v, %d failed %v, %d waiting", b.Events, sent, b.Failed, failed, b.Waiting)
				})
				_, err := d.Deliver(stop, t.Context(), envelopesOf(test.batch), NewParking(false))
				require.NoError(t, err)
				require.Equal(t, test.want, got)
			})
		})
	}
}

// An event without a key is not answered. Which partition is silent is not known, so no event waits for the whole
// topic, which may be good: neither that one, nor those of the same batch, nor when the first one is found in a later
// batch.
func TestSilentPartitionOfKeylessEvents(t *testing.T) {
	t.Parallel()
	for name, play := range map[string]string{"not all goes together": "yz:?", "alone": "yz:aa y:?"} {
		t.Run(name, func(t *testing.T) {
			s := newFakeSender(t, play)
			s.keyless = true
			batch := envelopesOf("yz")
			outcomes, err := s.deliverer(nil).Deliver(t.Context(), t.Context(), batch, NewParking(false))
			require.NoError(t, err)
			require.Equal(t, "uu", outcomeSymbols(outcomes))
			s.unanswered.add(&batch[0], s.partition(&batch[0]))
			again, err := s.deliverer(nil).Deliver(t.Context(), t.Context(), batch[:1], NewParking(false))
			require.NoError(t, err)
			require.Equal(t, "u", outcomeSymbols(again))
			for _, o := range append(outcomes, again...) {
				require.Empty(t, o.place)
			}
			require.Empty(t, s.bad.All())
		})
	}
}

func testDelivery(t *testing.T, test deliveryTest, run func(*Deliverer, context.Context, []envelope.Event) ([]Outcome, error)) {
	synctest.Test(t, func(t *testing.T) {
		s := newFakeSender(t, test.play)
		stop, cancel := context.WithCancel(t.Context())
		defer cancel()
		s.stop = cancel
		start := time.Now()
		outcomes, err := run(s.deliverer(nil), stop, envelopesOf(test.batch))
		if strings.Contains(test.play, "lost") {
			require.ErrorIs(t, err, lease.ErrLeaseLost)
		} else {
			require.NoError(t, err)
		}
		require.Empty(t, s.play, "the delivery ended too early")
		require.Equal(t, test.want, outcomeSymbols(outcomes))
		require.Equal(t, test.fails, s.failures())
		if test.waits == 0 {
			require.Zero(t, time.Since(start))
		}
		require.GreaterOrEqual(t, time.Since(start), test.waits)
	})
}

// fakeSender is a sender that knows what it will be asked, and what it answers.
type fakeSender struct {
	t          *testing.T
	play       []string // sends that have not come yet
	stop       func()
	breaker    *breaker.Breaker
	bad        *BadPartitions
	unanswered *Unanswered
	log        bytes.Buffer
	errs       map[rune]error

	keyless   bool // it is not known to which partitions events go
	working   atomic.Bool
	recovered int // places
	prepared  []string
}

func newFakeSender(t *testing.T, play string) *fakeSender {
	s := &fakeSender{
		t: t, play: strings.Fields(play), breaker: breaker.New(someRules, func(_, _ breaker.State, _ float64) {}),
		errs: map[rune]error{
			'+': nil, '-': kgo.ErrRecordTimeout, 't': kerr.UnknownTopicOrPartition, 'n': fmt.Errorf("%w: %w", kafka.ErrNoLeader, kgo.ErrRecordTimeout),
			'x': kerr.MessageTooLarge, 'a': errSendAlone, 'i': &envelope.FieldError{Field: "Type", Err: check.ErrEmpty}, 'b': errBlocked,
			's': errStopping, '?': errUnanswered,
		},
	}
	s.bad = NewBadPartitions(outage.NewLogs(s.logger()))
	s.bad.Probe()
	s.unanswered = NewUnanswered(s.bad, func() {})
	return s
}

func (s *fakeSender) logger() *slog.Logger { return slog.New(slog.NewTextHandler(&s.log, nil)) }

func (s *fakeSender) deliverer(onSent func(SentBatch)) *Deliverer {
	return &Deliverer{DeliveryParts{
		Sender: s, Breaker: s.breaker, Bad: s.bad, Unanswered: s.unanswered, Log: s.logger(), KafkaOutage: outage.NewLog(s.logger(), "Kafka"),
		OnSend: func() {}, OnSent: onSent, OnRecovered: func() { s.recovered++ },
	}}
}

// failures returns what the log says has failed, in this order.
func (s *fakeSender) failures() string {
	var names []string
	for _, match := range regexp.MustCompile(`outbox: ([^"]*) fails, trying`).FindAllStringSubmatch(s.log.String(), -1) {
		names = append(names, match[1])
	}
	return strings.Join(names, ", ")
}

// next returns what comes next in the play, which begins as it has to.
func (s *fakeSender) next(begins string) string {
	s.t.Helper()
	require.NotEmpty(s.t, s.play, "after the play: %s", begins)
	line := s.play[0]
	s.play = s.play[1:]
	rest, ok := strings.CutPrefix(line, begins)
	require.True(s.t, ok, "%s instead of %s", begins, line)
	return rest
}

func (s *fakeSender) prepare(_ context.Context, topics []string) { s.prepared = topics }

func (s *fakeSender) works(context.Context, string) bool { return s.working.Load() }

func (s *fakeSender) partition(e *envelope.Event) kafka.Partition {
	topic, _ := s.topic(e)
	if s.keyless {
		return kafka.Partition{Topic: topic, Number: kafka.Unassigned}
	}
	return kafka.Partition{Topic: topic, Number: int32(min(e.Key()[0], 'y') - 'a')}
}

func (s *fakeSender) topic(e *envelope.Event) (string, error) {
	if string(e.Key()) <= "m" {
		return "orders", nil
	}
	return "payments", nil
}

func (s *fakeSender) produce(_, _ context.Context, batch []envelope.Event, which []int) (sent sendResult, err error) {
	events := ""
	for _, i := range which {
		events += string(batch[i].EventID)
	}
	if events == "" {
		return sent, nil
	}
	answers := s.next(events + ":")
	if answers == "lost" {
		return sent, lease.ErrLeaseLost
	}
	if before, ok := strings.CutSuffix(answers, "stop"); ok {
		s.stop()
		answers = before
	}
	answers, down := strings.CutSuffix(answers, "down")
	sent.works = !down
	if answers == "" {
		s.openBreaker()
	}
	for n, symbol := range answers {
		e := &batch[which[n]]
		at := s.partition(e)
		sent.records = append(sent.records, kgo.Record{Topic: at.Topic, Partition: at.Number})
		sent.errs = append(sent.errs, s.errs[symbol])
	}
	return sent, nil
}

// openBreaker opens the breaker, if it has been closed until now.
func (s *fakeSender) openBreaker() {
	p := s.breaker.Allow(10)
	for range p.Granted {
		p.Report(breaker.Failed)
	}
}

func envelopesOf(events string) (batch []envelope.Event) {
	for i, event := range events {
		batch = append(batch, envelope.Event{ID: int64(i + 1), EventID: []byte(string(event)), PartitionKey: []byte(strings.ToLower(string(event)))})
	}
	return batch
}

func outcomeSymbols(outcomes []Outcome) (symbols string) {
	for _, o := range outcomes {
		symbols += map[OutcomeKind]string{
			OutcomePending: ".", OutcomeSent: "+", OutcomeRejected: "x", OutcomeUnavailable: "u", OutcomeBlocked: "b", OutcomeParked: "p",
		}[o.Kind]
	}
	return symbols
}

// someRules are the defaults of a breaker.
var someRules = breaker.Rules{Window: 10, FailureRate: 0.5, OpenFor: 30 * time.Second, Trials: 3}
