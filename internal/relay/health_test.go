package relay

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"

	"github.com/stretchr/testify/require"
)

// A Run that hangs is not live, one that does what takes long is.
func TestHealthOfAHangingRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		rules := rulesWith(5000)
		rules.PollInterval = 500 * time.Millisecond
		s := newHealthState(rules, breaker.New(rules.Breaker, func(breaker.State, breaker.State, float64) {}))
		r := &Relay{health: s}
		s.runBegan()
		s.setLeading(true)
		require.True(t, r.Health().Ready)
		time.Sleep(s.hangsAfter())
		require.Equal(t, Health{Live: true, Ready: true, Answered: true, Leading: true,
			Reasons: []string{"nothing has moved for 1m46s, although there are events to send"}}, r.Health())
		s.BeginLongTask("the cursor is moved")
		time.Sleep(time.Hour)
		require.Equal(t, []string{"the cursor is moved, since 1h0m0s"}, r.Health().Reasons)
		require.True(t, r.Health().Live && r.Health().Ready)
		s.EndLongTask()
		time.Sleep(s.hangsAfter() + time.Second)
		require.False(t, r.Health().Live || r.Health().Ready)
		require.Contains(t, r.Health().Reasons, "Run has not gone on for 1m47s")
	})
}

// With the mode exactly once, a start of its own length and the wait before the next one are no hang, whatever the
// timeouts are.
func TestStartOfExactlyOnceIsNoHang(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		rules := rulesWith(5000)
		rules.SendTimeout, rules.Lease, rules.PollInterval, rules.Breaker.OpenFor = time.Second, 2*time.Second, 10*time.Millisecond, time.Second
		for topic, hangs := range map[string]bool{"": true, "cursor": false} {
			rules.ExactlyOnce = topic
			s := newHealthState(rules, breaker.New(rules.Breaker, func(breaker.State, breaker.State, float64) {}))
			s.runBegan()
			time.Sleep(minStart + wait.MaxBackoff)
			require.Equal(t, hangs, s.hangs())
		}
	})
}

// Health says how old events are by the clock of the database, although that of this host is ahead.
func TestHealthAgesEventsByTheDatabase(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		rules := rulesWith(5000)
		s := newHealthState(rules, breaker.New(rules.Breaker, func(breaker.State, breaker.State, float64) {}))
		s.runBegan()
		s.setLeading(true)
		database := time.Now().Add(-6 * time.Minute)
		s.setStale([]tables.EventCount{{Events: 100, Oldest: database.Add(-10 * time.Minute)}}, pg.ClockAt(database))
		time.Sleep(time.Second)
		require.Equal(t, []string{"100 events are not published, the oldest for 10m1s"}, s.report().Reasons)
	})
}

// What a standby has heard of Kafka does not make the leader that it becomes one that works.
func TestHealthOfANewLeader(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		rules := rulesWith(5000)
		s := newHealthState(rules, breaker.New(rules.Breaker, func(breaker.State, breaker.State, float64) {}))
		s.contact = kafka.NewContact(nil, true, func(time.Time, error, ...any) {})
		s.runBegan()
		s.contact.Heard(nil)
		s.sawLease(time.Minute, "")
		require.Empty(t, s.report().Reasons)
		time.Sleep(time.Second)
		s.setLeading(true)
		require.Equal(t, []string{"Kafka has not answered since this process leads"}, s.report().Reasons)
		require.True(t, s.report().Ready)
		s.contact.Heard(nil)
		require.True(t, s.report().Works)
	})
}

// A hook of the breaker may ask for the health: a look at the health is what moves an open
// breaker to half-open, and so calls the hook.
func TestHealthInTheHookOfTheBreaker(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		rules := rulesWith(5000)
		rules.PollInterval = 500 * time.Millisecond
		var s *healthState
		var seen []breaker.State
		s = newHealthState(rules, breaker.New(rules.Breaker, func(breaker.State, breaker.State, float64) {
			seen = append(seen, s.report().Breaker)
		}))
		for range rules.Breaker.Window / 2 {
			p := s.breaker.Allow(1)
			p.Report(breaker.Failed)
			p.Release()
		}
		time.Sleep(rules.Breaker.OpenFor)
		require.Equal(t, breaker.HalfOpen, s.report().Breaker)
		require.Equal(t, []breaker.State{breaker.Open, breaker.HalfOpen}, seen)
	})
}

// The health names no topic for which nothing waits any more, nor one that has failed only while this process led
// before.
func TestHealthForgetsTopics(t *testing.T) {
	t.Parallel()
	rules := rulesWith(5000)
	s := newHealthState(rules, breaker.New(rules.Breaker, func(breaker.State, breaker.State, float64) {}))
	topics := outage.NewLogs(slog.New(slog.DiscardHandler))
	lead := func() *BadPartitions {
		bad := NewBadPartitions(topics)
		s.setBad(bad)
		s.setLeading(true)
		return bad
	}
	named := func() (names []string) {
		for _, o := range s.report().Outages {
			names = append(names, o.What)
		}
		return names
	}
	s.runBegan()
	bad := lead()
	gone, failing := kafka.Partition{Topic: "gone", Number: kafka.Unassigned}, kafka.Partition{Topic: "orders", Number: 3}
	bad.Fail(gone, time.Now(), "missing", errDown)
	bad.Fail(failing, time.Now(), "no_leader", errDown)
	require.ElementsMatch(t, []string{"partition orders/3", "topic gone"}, named())
	bad.Forget(gone.Name())
	require.Equal(t, []string{"partition orders/3"}, named())

	s.setLeading(false)
	require.Empty(t, named())
	bad = lead()
	require.Empty(t, named(), "another process may have sent its events")
	bad.Load([]cursor.BadPartition{{Name: failing.Name(), Class: "no_leader", Err: errDown}})
	require.Equal(t, []string{"partition orders/3"}, named(), "events still wait for it")
}
