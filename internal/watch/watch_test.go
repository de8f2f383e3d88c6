package watch_test

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/watch"
)

// fakeStore is a database without PostgreSQL. Its rows of outbox_failed are all dead.
type fakeStore struct {
	relays []tables.Relay
	rows   []tables.Failure
	counts []tables.FailureCount
	lost   []watch.LostRecords
	err    error
}

func (s *fakeStore) Lost(_ context.Context, since time.Time) (lost []watch.LostRecords, err error) {
	for _, l := range s.lost {
		if !l.At.Before(since) {
			lost = append(lost, l)
		}
	}
	return lost, s.err
}

func (s *fakeStore) Now(context.Context) (time.Time, error) { return time.Now(), s.err }

func (s *fakeStore) Relays(context.Context) ([]tables.Relay, error) { return s.relays, s.err }

func (s *fakeStore) Died(_ context.Context, since time.Time, relay string, known []int64, limit int) (died []tables.Failure, err error) {
	for _, f := range s.rows {
		if !f.NextRetryAt.Before(since) && (relay == "" || f.Relay == relay) && !slices.Contains(known, f.ID) && len(died) < limit {
			died = append(died, f)
		}
	}
	return died, s.err
}

func (s *fakeStore) Unresolved(_ context.Context, relay string) ([]tables.FailureCount, error) {
	return s.counts, s.err
}

func (s *fakeStore) die(n int) {
	for range n {
		s.rows = append(s.rows, tables.Failure{ID: int64(len(s.rows) + 1), Relay: "default", NextRetryAt: time.Now()})
	}
}

// watchFixture is a watch with a store and the alerts that it has delivered.
type watchFixture struct {
	*watch.Watch
	store         fakeStore
	breakerClosed bool
	alerts        []watch.Alert
	fail          error // what Deliver returns
	panics        bool
}

func newFixture(settings watch.Settings, relay string) *watchFixture {
	f := &watchFixture{breakerClosed: true, store: fakeStore{relays: []tables.Relay{{Name: "default", Holder: "here", MovedAt: time.Now()}}}}
	cfg := watch.Config{Settings: settings.WithDefaults(), Relay: relay, Deliver: f.deliver, Logger: slog.New(slog.DiscardHandler)}
	if relay != "" {
		cfg.BreakerClosed = func() bool { return f.breakerClosed }
	}
	f.Watch = watch.New(&f.store, cfg)
	return f
}

func (f *watchFixture) deliver(_ context.Context, a watch.Alert) error {
	if f.panics {
		panic("no mail today")
	}
	if f.fail == nil {
		f.alerts = append(f.alerts, a)
	}
	return f.fail
}

// check runs one check and returns the alerts that it delivered; ! is one that is over.
func (f *watchFixture) check(t *testing.T) string {
	t.Helper()
	f.alerts = nil
	require.NoError(t, f.Check(t.Context()))
	var kinds []string
	for _, a := range f.alerts {
		kinds = append(kinds, a.Relay+" "+a.Kind+map[bool]string{true: "!"}[a.Over])
	}
	return strings.Join(kinds, ", ")
}

// What holds is delivered once, again when it is worse, and when it is over.
func TestConditions(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{DeadThreshold: 3, StalePending: 5, StaleAfter: time.Minute, ReportInterval: math.MaxInt64}, "default")
		relay := &f.store.relays[0]
		for _, step := range []struct {
			name   string
			change func()
			want   string
		}{
			{"all is well", func() {}, ""},
			{"few are dead", func() { relay.Dead = 2 }, ""},
			{"many are", func() { relay.Dead = 3 }, "default many_dead_events"},
			{"as many as before", func() {}, ""},
			{"more", func() { relay.Dead = 4 }, "default many_dead_events"},
			{"fewer, but many", func() { relay.Dead = 3 }, ""},
			{"few", func() { relay.Dead = 1 }, "default many_dead_events!"},
			{"still few", func() {}, ""},
			{"few are old", func() { relay.Pending, relay.Oldest = 4, time.Now().Add(-time.Hour) }, ""},
			{"many are young", func() { relay.Pending, relay.Oldest = 5, time.Now().Add(-time.Minute) }, ""},
			{"many are old", func() { time.Sleep(time.Nanosecond) }, "default stale_events"},
			{"more of them", func() { relay.Pending = 50 }, ""},
			{"none", func() { relay.Pending = 0 }, "default stale_events!"},
			{"the breaker opens", func() { f.breakerClosed = false }, "default breaker_open"},
			{"it stays open", func() {}, ""},
			{"it closes", func() { f.breakerClosed = true }, "default breaker_open!"},
		} {
			step.change()
			require.Equal(t, step.want, f.check(t), step.name)
		}
	})
}

// Each loss of records is delivered once, by the first relay that has a leader, and one
// that was not delivered comes again.
func TestLostRecords(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{ReportInterval: math.MaxInt64}, "default")
		lose := func(topic string, n int64) {
			f.store.lost = append(f.store.lost, watch.LostRecords{Group: "stats", Topic: topic, Records: n, At: time.Now()})
		}
		lose("long-ago", 1)
		time.Sleep(time.Hour)
		require.Empty(t, f.check(t), "before this process watched")
		lose("orders", 85)
		f.fail = errors.New("no mail today")
		require.Empty(t, f.check(t))
		f.fail = nil
		require.Equal(t, " lost_records", f.check(t))
		require.Equal(t, []any{"stats", "orders", int64(85)}, []any{f.alerts[0].Group, f.alerts[0].Topic, f.alerts[0].Lost})
		require.Empty(t, f.check(t))
		time.Sleep(time.Minute)
		f.store.lost = nil
		lose("orders", 90)
		require.Equal(t, " lost_records", f.check(t))

		lose("items", 1)
		f.store.relays = append([]tables.Relay{{Name: "another", Holder: "there", MovedAt: time.Now()}}, f.store.relays...)
		require.Empty(t, f.check(t), "the other relay alerts")
	})
}

// A standby needs a moment to take over, so one check without a leader is no alert.
func TestLeader(t *testing.T) {
	t.Parallel()
	f := newFixture(watch.Settings{}, "")
	relay := &f.store.relays[0]
	relay.Holder = ""
	require.Empty(t, f.check(t))
	relay.Holder = "there"
	require.Empty(t, f.check(t))
	relay.Holder = ""
	require.Empty(t, f.check(t))
	require.Equal(t, "default no_leader", f.check(t))
	require.Empty(t, f.check(t))
	relay.Holder = "there"
	require.Equal(t, "default no_leader!", f.check(t))
	relay.Holder, relay.MovedAt = "", time.Time{}
	require.Empty(t, f.check(t))
	require.Empty(t, f.check(t), "it never ran")
}

// Of the relays that have a leader, the first watches those that have none, and each
// its own events.
func TestWhoWatches(t *testing.T) {
	t.Parallel()
	for relay, want := range map[string]string{
		"":  "a many_dead_events, b many_dead_events, c many_dead_events, c no_leader",
		"a": "a many_dead_events, c no_leader",
		"b": "b many_dead_events",
	} {
		f := newFixture(watch.Settings{DeadThreshold: 1}, relay)
		f.store.relays = []tables.Relay{{Name: "a", Holder: "x", Dead: 1}, {Name: "b", Holder: "y", Dead: 1}, {Name: "c", Dead: 1, MovedAt: time.Now()}}
		first := f.check(t)
		second := f.check(t)
		require.Equal(t, want, strings.TrimSuffix(first+", "+second, ", "), relay)
	}
}

// Each death is delivered once, those before the first check only if they are recent.
func TestDeaths(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{Interval: time.Minute, ReportInterval: math.MaxInt64}, "default")
		f.store.die(5)
		time.Sleep(time.Minute + time.Second)
		f.store.die(30)
		require.Equal(t, "default dead_events", f.check(t))
		require.Equal(t, 30, f.alerts[0].Died)
		require.Len(t, f.alerts[0].Dead, 20)
		for range 20 { // well past the overlap
			require.Empty(t, f.check(t))
			time.Sleep(time.Minute)
		}
		f.store.die(1)
		require.Equal(t, "default dead_events", f.check(t))
		require.EqualValues(t, 36, f.alerts[0].Dead[0].ID)

		// The time of death is the start of a transaction: it may come to light late.
		late := tables.Failure{ID: 37, Relay: "default", NextRetryAt: time.Now().Add(-4 * time.Minute)}
		f.store.rows = append(f.store.rows, late)
		require.Equal(t, "default dead_events", f.check(t))
		require.Empty(t, f.check(t))
	})
}

// An alert that is not delivered comes again, and nothing is lost.
func TestFailedDelivery(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{DeadThreshold: 1, ReportInterval: time.Minute}, "default")
		f.store.relays[0].Dead = 2
		f.store.die(2)
		f.store.counts = []tables.FailureCount{{Relay: "default", Status: "dead", Events: 2}}
		time.Sleep(time.Minute)
		f.fail = errors.New("no mail")
		require.Empty(t, f.check(t))
		f.fail, f.panics = nil, true
		require.Empty(t, f.check(t))
		f.panics = false
		require.Equal(t, "default many_dead_events, default dead_events, default report", f.check(t))
		require.Empty(t, f.check(t))
	})
}

// Reports come at intervals, and only if there is something to report.
func TestReports(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{ReportInterval: time.Hour}, "")
		f.store.relays = append(f.store.relays, tables.Relay{Name: "other", Holder: "x"})
		f.store.counts = []tables.FailureCount{{Relay: "default", Events: 2}}
		require.Empty(t, f.check(t))
		time.Sleep(10 * time.Minute)
		require.Equal(t, "default report", f.check(t), "the first one does not wait for long")
		require.Len(t, f.alerts[0].Unresolved, 1)
		time.Sleep(time.Hour - time.Second)
		require.Empty(t, f.check(t))
		time.Sleep(time.Second)
		require.Equal(t, "default report", f.check(t))
		f.store.counts = nil
		time.Sleep(time.Hour)
		require.Empty(t, f.check(t))

		never := newFixture(watch.Settings{ReportInterval: math.MaxInt64}, "")
		never.store.counts = []tables.FailureCount{{Relay: "default", Events: 2}}
		time.Sleep(24 * time.Hour)
		require.Empty(t, never.check(t))
	})
}

// What PostgreSQL refuses ends the check, and changes nothing.
func TestStoreFails(t *testing.T) {
	t.Parallel()
	f := newFixture(watch.Settings{DeadThreshold: 1}, "")
	f.store.relays[0].Dead, f.store.err = 1, errors.New("connection refused")
	require.ErrorIs(t, f.Check(t.Context()), f.store.err)
	require.Empty(t, f.alerts)
	f.store.err = nil
	require.Equal(t, "default many_dead_events", f.check(t))
}

func TestSettings(t *testing.T) {
	t.Parallel()
	require.NoError(t, watch.Settings{}.Validate())
	want := watch.Settings{Interval: time.Minute, ReportInterval: 10 * time.Minute, DeadThreshold: 10, StaleAfter: 5 * time.Minute, StalePending: 100}
	require.Equal(t, want, watch.Settings{}.WithDefaults())
	require.Equal(t, want, want.WithDefaults())
	err := watch.Settings{Interval: -1, ReportInterval: -1, DeadThreshold: -1, StaleAfter: -1, StalePending: 100_001}.Validate()
	for _, field := range []string{"Alerts.Interval", "Alerts.ReportInterval", "Alerts.DeadThreshold", "Alerts.StaleAfter", "Alerts.StalePending"} {
		require.ErrorContains(t, err, field)
	}
}

// An Alerter that does not return is not waited for much longer than its time, and a stop
// not even so long. Until it returns it gets no other alert; then what it missed comes.
func TestAlerterHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan chan struct{}, 1) // what the next call waits for
		var delivered atomic.Int32
		store := fakeStore{relays: []tables.Relay{{Name: "default", Holder: "here", Dead: 5}}}
		cfg := watch.Config{Settings: watch.Settings{DeadThreshold: 1}.WithDefaults(), Relay: "default", Logger: slog.New(slog.DiscardHandler)}
		cfg.Deliver = func(context.Context, watch.Alert) error {
			delivered.Add(1)
			select {
			case release := <-hang:
				<-release
			default:
			}
			return nil
		}
		w := watch.New(&store, cfg)
		check := func(ctx context.Context) time.Duration {
			start := time.Now()
			require.NoError(t, w.Check(ctx))
			return time.Since(start)
		}
		release := make(chan struct{})
		hang <- release
		require.Less(t, check(t.Context()), 11*time.Second)
		require.Zero(t, check(t.Context()))
		require.EqualValues(t, 1, delivered.Load())
		close(release)
		synctest.Wait()
		require.Zero(t, check(t.Context()))
		require.EqualValues(t, 2, delivered.Load())

		store.relays[0].Dead, release = 6, make(chan struct{})
		hang <- release
		stopping, stop := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, stop)
		require.Less(t, check(stopping), 2*time.Second)
		close(release)
	})
}
