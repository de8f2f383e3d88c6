package wakeup_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/wakeup"
)

// A reader polls often while other processes are active, at once where much comes, and seldom otherwise.
func TestPollSchedule(t *testing.T) {
	t.Parallel()
	const idle, often, record = time.Second, 2 * time.Millisecond, 100 * time.Millisecond
	now := time.Now()
	later := func(d time.Duration) time.Time { now = now.Add(d); return now }
	r := wakeup.PollSchedule{Idle: idle}
	r.Polled(now, 0)
	require.Equal(t, idle, r.Wait(now))

	r.Woken() // by this process: the next one announces itself
	r.Polled(later(time.Second), 1)
	require.Equal(t, record, r.Wait(now), "to note that it is done")
	r.Polled(later(record), 0)
	require.Equal(t, idle, r.Wait(now))

	r.Notified(later(time.Second))
	require.Equal(t, often, r.Wait(now))
	r.Polled(later(time.Millisecond), 0)
	require.Equal(t, often, r.Wait(later(wakeup.Interval)), "for longer than until the next notification")
	require.Equal(t, idle, r.Wait(later(wakeup.Interval)))

	r.Polled(later(time.Second), 1) // without a notification
	require.Equal(t, often, r.Wait(now))
	r.Polled(later(10*time.Millisecond), 20)
	require.Equal(t, often, r.Wait(now), "nothing can have come yet")
	require.Zero(t, r.Wait(later(time.Millisecond)), "two have come, by the last poll")
	r.Polled(later(time.Millisecond), 0)
	require.Equal(t, often, r.Wait(later(time.Millisecond)))

	fast := wakeup.PollSchedule{Idle: time.Millisecond}
	fast.Notified(now)
	require.Equal(t, time.Millisecond, fast.Wait(now), "never longer than idle")
}

// While others are active, a reader that can probe does so at each tick, and polls where much comes; what was done
// with events is noted in time.
func TestPollScheduleProbes(t *testing.T) {
	t.Parallel()
	const idle, tick, record = time.Second, time.Millisecond, 100 * time.Millisecond
	now := time.Now()
	later := func(d time.Duration) time.Time { now = now.Add(d); return now }
	r := wakeup.PollSchedule{Idle: idle, Ticks: new(wakeup.Ticks)}
	r.Polled(now, 0)
	require.False(t, r.Probing(now), "nobody is active")
	require.Equal(t, idle, r.Wait(now))

	r.Notified(later(time.Second))
	r.Polled(now, 0)
	require.Equal(t, tick, r.Wait(now))
	require.True(t, r.Probing(later(tick)))
	require.Equal(t, tick, r.Wait(now))
	require.Equal(t, tick/4, r.Wait(later(tick-tick/4)), "for all the same")

	r.Polled(later(tick), 1)
	require.True(t, r.Probing(later(tick)))
	require.True(t, r.Probing(later(record-2*tick)))
	require.False(t, r.Probing(later(tick)), "the event was sent, and that has to be noted")
	r.Polled(now, 0)
	require.True(t, r.Probing(later(tick)))
	require.False(t, r.Probing(later(wakeup.Interval+100*time.Millisecond)), "nobody is active any more")
	require.Equal(t, idle, r.Wait(now))

	r.Polled(later(time.Second), 1)
	r.Polled(later(2*tick), 1)
	require.Equal(t, tick, r.Wait(now))
	require.Zero(t, r.Wait(later(2*tick)), "one has come, by the last poll")
	r.Polled(now, 0)
	r.Polled(later(10*tick), 1)
	r.Polled(now, 0)
	require.NotZero(t, r.Wait(later(14*tick)), "what comes so seldom is found by a probe")

	r.Polled(now, 0)
	r.Notified(now)
	require.True(t, r.Probing(later(record-tick)))
	require.False(t, r.Probing(later(tick)), "probes may be wrong")
}
