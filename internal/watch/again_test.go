package watch_test

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/watch"
)

var errNoMail = errors.New("no mail today")

// A condition that holds again after an end that was not delivered is delivered: one of several receivers may have got
// the end.
func TestHoldsAgainAfterAnUndeliveredEnd(t *testing.T) {
	t.Parallel()
	f := newFixture(watch.Settings{StalePending: 1, ReportInterval: math.MaxInt64}, "default")
	stale := []tables.EventCount{{Relay: "default", Events: 1, Oldest: time.Now().Add(-time.Hour)}}
	for _, step := range []struct {
		name   string
		closed bool
		stale  []tables.EventCount
		fail   error
		want   string
	}{
		{"both begin", false, stale, nil, "default stale_events, default breaker_open"},
		{"one of two receivers gets the ends", true, nil, errNoMail, ""},
		{"both hold again", false, stale, nil, "default stale_events, default breaker_open"},
		{"they still hold", false, stale, nil, ""},
		{"again no end", true, nil, errNoMail, ""},
		{"no begin either", false, stale, errNoMail, ""},
		{"it comes", false, stale, nil, "default stale_events, default breaker_open"},
		{"no end", true, nil, errNoMail, ""},
		{"it comes too", true, nil, nil, "default stale_events!, default breaker_open!"},
		{"all is well", true, nil, nil, ""},
	} {
		f.breakerClosed, f.store.stale, f.fail = step.closed, step.stale, step.fail
		require.Equal(t, step.want, f.check(t), step.name)
	}
}

// Many dead events are alerted to again when they become more, also after they became fewer.
func TestManyDeadRisesAgain(t *testing.T) {
	t.Parallel()
	f := newFixture(watch.Settings{DeadThreshold: 10, ReportInterval: math.MaxInt64}, "default")
	for _, step := range []struct {
		dead int
		fail error
		want string
	}{
		{500, nil, "many_dead"}, {15, nil, ""}, {15, nil, ""}, {415, nil, "many_dead"}, {415, nil, ""},
		{20, nil, ""}, {30, errNoMail, ""}, {20, nil, ""}, {30, nil, "many_dead"}, {9, nil, "many_dead!"},
	} {
		f.store.dead, f.fail = []tables.EventCount{{Relay: "default", Events: step.dead}}, step.fail
		require.Equal(t, step.want, f.check(t), step.dead)
	}
}

// A worker or a consumer does not see failed events. Where a relay may lead it does not say that few are dead; a leader
// does. After a cut it ends what it has begun itself.
func TestManyDeadIsEndedByWhoSeesAll(t *testing.T) {
	t.Parallel()
	for _, group := range []string{"stats", "consumer:stats"} {
		f := newFixtureOf(watch.Settings{DeadThreshold: 3, ReportInterval: math.MaxInt64}, "", group).resolving()
		lease := []tables.Relay{{Name: "stats", Holder: "here"}}
		if f.store.at = (tables.Positions{Consumers: lease}); group == "stats" {
			f.store.at = tables.Positions{Workers: lease}
		}
		relay := []tables.Relay{{Name: "default"}} // it never ran
		cut := []tables.Relay{{Name: "default", Holder: "outbox cut"}}
		for _, step := range []struct {
			name   string
			relays []tables.Relay
			dead   int
			want   string
		}{
			{"few deliveries", relay, 2, ""},
			{"many deliveries", relay, 5, "many_dead"},
			{"few deliveries again", relay, 1, ""},
			{"some more", relay, 2, ""},
			{"many again", relay, 3, "many_dead"},
			{"few", relay, 0, ""},
			{"few after a cut", cut, 0, "many_dead!"},
			{"many after a cut", cut, 3, "many_dead"},
			{"few without a relay", nil, 0, "many_dead!"},
		} {
			f.store.at.Relays, f.store.dead = step.relays, []tables.EventCount{{Group: "stats", Events: step.dead}}
			require.Equal(t, step.want, f.check(t), "%s: %s", group, step.name)
		}
		require.NotContains(t, strings.Join(f.ends, ", "), "many_dead")
	}

	f := newFixtureOf(watch.Settings{}, "", "stats").resolving()
	f.store.at = tables.Positions{Workers: []tables.Relay{{Name: "stats", Holder: "here"}}}
	require.Equal(t, "stats stale_events!, many_dead!", f.resolved(t), "there is no relay")
}

// The end of an alert that was only tried is passed on when its relay is removed, or its group.
func TestRelayIsRemovedBeforeItsAlertIsDelivered(t *testing.T) {
	t.Parallel()
	f := newFixture(watch.Settings{StalePending: 1, ReportInterval: math.MaxInt64}, "").resolving()
	f.store.at.Relays = append(f.store.at.Relays, tables.Relay{Name: "other", Holder: "there"})
	f.store.stale = []tables.EventCount{
		{Relay: "default", Events: 1, Oldest: time.Now().Add(-time.Hour)}, {Group: "stats", Events: 1, Oldest: time.Now().Add(-time.Hour)},
	}
	f.fail = errNoMail
	require.Empty(t, f.check(t))
	f.store.at.Relays, f.store.stale, f.fail = f.store.at.Relays[1:], nil, nil
	ends := strings.Split(f.resolved(t), ", ")
	require.Contains(t, ends, "default stale_events!")
	require.Contains(t, ends, "stats stale_events!")
	require.Empty(t, f.resolved(t))
}

// tries keeps the FirstAt of each try of a kind.
type tries map[string][]time.Time

// An alert that comes again has the FirstAt of its first try, unless it is worse. A new occurrence has another, and so
// has each report.
func TestFirstAt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{DeadThreshold: 10, ReportInterval: 3 * time.Minute}, "default")
		all, began := tries{}, time.Now()
		f.cfg.Deliver = func(_ context.Context, a watch.Alert) error {
			kind := a.Kind + map[bool]string{true: "!"}[a.Over]
			all[kind] = append(all[kind], a.FirstAt)
			return f.fail
		}
		f.cfg.Resolve = func(context.Context, watch.Alert) error { return nil }
		f.Watch = watch.New(&f.store, f.cfg)
		minutes := func(kind string) (n []int) {
			for _, at := range all[kind] {
				n = append(n, int(at.Sub(began)/time.Minute))
			}
			return n
		}
		f.fail = errNoMail
		f.store.unresolved = []tables.EventCount{{Relay: "default", Events: 1}}
		for minute, dead := range []int{0, 10, 10, 500, 15, 15, 415, 9, 10, 10} {
			time.Sleep(time.Until(began.Add(time.Duration(minute) * time.Minute)))
			f.store.dead, f.breakerClosed = []tables.EventCount{{Relay: "default", Events: dead}}, dead != 15
			f.store.at.Relays[0].Said = &tables.Said{KafkaAt: time.Now()}
			if minute == 8 {
				f.fail = nil
			}
			require.Empty(t, f.check(t))
		}
		require.Equal(t, []int{1, 1, 3, 3, 3, 6, 8}, minutes(watch.ManyDead), "at 10, 10, 500, 15, 15, 415, and after an end 10")
		require.Equal(t, []int{4, 4}, minutes(watch.Breaker))
		require.Empty(t, all[watch.ManyDead+"!"])
		require.Equal(t, []int{3, 3, 3, 6, 6, 6}, minutes(watch.Report), "the first is due after three minutes")
	})
}

// term runs a monitor for a time, as under one lease.
func term(t *testing.T, m *watch.Monitor, f *watchFixture, lasts time.Duration) string {
	t.Helper()
	f.epoch++ // another process may have led
	return termAgain(t, m, f, lasts)
}

// termAgain runs a monitor under the next lease, with no other process between.
func termAgain(t *testing.T, m *watch.Monitor, f *watchFixture, lasts time.Duration) string {
	t.Helper()
	f.alerts = nil
	ctx, cancel := context.WithTimeout(t.Context(), lasts)
	defer cancel()
	f.epoch++
	m.Lead(f.epoch)
	m.Run(ctx)
	var kinds []string
	for _, a := range f.alerts {
		kinds = append(kinds, strings.TrimSpace(a.Relay+a.Group+" "+a.Kind)+map[bool]string{true: "!"}[a.Over])
	}
	return strings.Join(kinds, ", ")
}

// A process that leads again tells its receivers anew what holds, because another leader may have ended it. What
// died, and was lost, while another process led is that one's.
func TestTermBeginsAnew(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{Interval: time.Minute, DeadThreshold: 1, StalePending: 1, ReportInterval: math.MaxInt64}, "default")
		m := watch.NewMonitor(&f.store, f.cfg, slog.New(slog.DiscardHandler), nil)
		lose := func(n int64) {
			f.store.lost = []watch.LostRecords{{Group: "stats", Topic: "orders", Records: n, At: time.Now()}}
		}
		f.store.at.Relays = append(f.store.at.Relays, tables.Relay{Name: "other", MovedAt: time.Now()})
		f.breakerClosed = false
		f.store.dead = []tables.EventCount{{Relay: "default", Events: 1}}
		f.store.die(1)
		f.store.giveUp("stats", 1)
		lose(1)
		require.Equal(t, "default breaker_open, many_dead, stats dead_deliveries, stats lost_records, default dead_events, other no_leader", term(t, m, f, 5*time.Minute+time.Second))

		time.Sleep(time.Hour) // another process leads
		f.store.die(2)
		f.store.giveUp("stats", 2)
		lose(2)
		time.Sleep(time.Hour)
		require.Equal(t, "default breaker_open, many_dead, other no_leader", term(t, m, f, 5*time.Minute+time.Second))

		time.Sleep(time.Hour)
		f.breakerClosed, f.store.dead = true, nil
		f.store.die(1)
		f.store.giveUp("stats", 1)
		require.Equal(t, "default breaker_open!, many_dead!, stats dead_deliveries, default dead_events, other no_leader", term(t, m, f, 5*time.Minute+time.Second))
	})
}

// What was not delivered under one lease is delivered under the next one.
func TestUndeliveredSurvivesATerm(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{Interval: time.Minute, ReportInterval: math.MaxInt64}, "default")
		m := watch.NewMonitor(&f.store, f.cfg, slog.New(slog.DiscardHandler), nil)
		require.Empty(t, term(t, m, f, 20*time.Minute))
		f.store.die(1)
		f.store.giveUp("stats", 1)
		f.store.lost = []watch.LostRecords{{Group: "stats", Topic: "orders", Records: 1, At: time.Now()}}
		f.fail = errNoMail
		require.Empty(t, term(t, m, f, 20*time.Minute))
		time.Sleep(time.Hour)
		f.fail = nil
		require.ElementsMatch(t, []string{"stats dead_deliveries", "stats lost_records", "default dead_events"}, strings.Split(term(t, m, f, 20*time.Minute), ", "))

		f.store.lost = []watch.LostRecords{{Group: "stats", Topic: "orders", Records: 2, At: time.Now()}}
		f.fail = errNoMail
		require.Empty(t, term(t, m, f, 20*time.Minute))
		time.Sleep(time.Hour)
		f.fail = nil
		require.Equal(t, "stats lost_records", term(t, m, f, 5*time.Minute))
	})
}

// A process that leads again, and no other one has led in between, alerts to what died and was lost since its last
// check, however long ago that is: an outage of PostgreSQL ended its lease. A term without a check changes nothing.
func TestTermOfTheSameProcessForgetsNothing(t *testing.T) {
	t.Parallel()
	for name, others := range map[string]bool{"no other": false, "another": true, "another before a term without a check": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(watch.Settings{Interval: time.Minute, ReportInterval: math.MaxInt64}, "default")
				m := watch.NewMonitor(&f.store, f.cfg, slog.New(slog.DiscardHandler), nil)
				require.Empty(t, term(t, m, f, 20*time.Minute+time.Second))
				time.Sleep(20 * time.Second)
				f.store.die(1)
				f.store.giveUp("stats", 1)
				f.store.lost = []watch.LostRecords{{Group: "stats", Topic: "orders", Records: 1, At: time.Now()}}
				time.Sleep(time.Hour)
				if others {
					f.epoch++
				}
				if name != "another" {
					m.Lead(f.epoch + 1)
					f.epoch++
				}
				got := termAgain(t, m, f, 5*time.Minute)
				if others {
					require.Empty(t, got)
					return
				}
				require.ElementsMatch(t, []string{"stats dead_deliveries", "stats lost_records", "default dead_events"}, strings.Split(got, ", "))
			})
		})
	}
}

// A death that was not delivered under a short first lease is delivered under the next one.
func TestUndeliveredSurvivesAShortTerm(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{Interval: time.Minute, ReportInterval: math.MaxInt64}, "default")
		m := watch.NewMonitor(&f.store, f.cfg, slog.New(slog.DiscardHandler), nil)
		f.fail = errNoMail
		died := time.Now().Add(30 * time.Second)
		f.store.rows = []tables.Failure{{ID: 1, Relay: "default", NextRetryAt: died}}
		f.store.deliveries = []tables.Delivery{{ID: 1, Group: "stats", ProcessedAt: died}}
		require.Empty(t, term(t, m, f, 3*time.Minute+time.Second))
		time.Sleep(time.Hour)
		f.fail = nil
		require.Equal(t, "stats dead_deliveries, default dead_events", term(t, m, f, 5*time.Minute))
	})
}

// While a receiver fails, an event that was retried and dies again is a new alert, so that the other receivers get it.
func TestNextDeathOfTheSameEvent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{ReportInterval: math.MaxInt64}, "default")
		all, began := tries{}, time.Now()
		f.cfg.Deliver = func(_ context.Context, a watch.Alert) error {
			all[a.Kind] = append(all[a.Kind], a.FirstAt)
			return errNoMail
		}
		f.Watch = watch.New(&f.store, f.cfg)
		require.Empty(t, f.check(t))
		for minute := range 6 {
			time.Sleep(time.Until(began.Add(time.Duration(minute) * time.Minute)))
			switch minute {
			case 0, 4:
				f.store.die(1)
				f.store.giveUp("stats", 1)
			case 2: // they are retried
				f.store.rows, f.store.deliveries = nil, nil
			}
			require.Empty(t, f.check(t))
		}
		for _, kind := range []string{watch.Dead, watch.DeadDeliveries} {
			var minutes []int
			for _, at := range all[kind] {
				minutes = append(minutes, int(at.Sub(began)/time.Minute))
			}
			require.Equal(t, []int{0, 0, 4, 4}, minutes, kind)
		}
	})
}

// The first check of a term looks back from the begin of the term, not from itself.
func TestTermLooksBackFromItsBegin(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{Interval: time.Minute, ReportInterval: math.MaxInt64}, "default")
		m := watch.NewMonitor(&f.store, f.cfg, slog.New(slog.DiscardHandler), nil)
		f.store.die(1)
		time.Sleep(2 * time.Minute)
		f.store.die(1)
		f.store.giveUp("stats", 1)
		time.Sleep(30 * time.Second)
		require.Equal(t, "stats dead_deliveries, default dead_events", term(t, m, f, 5*time.Minute))
		require.EqualValues(t, 2, f.alerts[1].Dead[0].ID)

		// So does the first check of a process that finds itself the first of all.
		f.store.at.Relays = append([]tables.Relay{{Name: "another", Holder: "there"}}, f.store.at.Relays...)
		require.Empty(t, f.check(t))
		f.store.giveUp("stats", 1) // its process ends before it alerts
		time.Sleep(90 * time.Second)
		f.store.at.Relays[0].Holder = ""
		require.Equal(t, "stats dead_deliveries", f.check(t))
	})
}

// An Alerter that has hung once, and then takes its time, gets each alert once.
func TestAlerterIsSlowAfterItHung(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{DeadThreshold: 1, ReportInterval: math.MaxInt64}, "default")
		hangs := make(chan struct{})
		f.cfg.Deliver = func(ctx context.Context, a watch.Alert) error {
			<-hangs
			time.Sleep(300 * time.Millisecond)
			if ctx.Err() != nil { // it came too late
				return ctx.Err()
			}
			return f.deliver(ctx, a)
		}
		f.Watch = watch.New(&f.store, f.cfg)
		f.breakerClosed, f.store.dead = false, []tables.EventCount{{Relay: "default", Events: 1}}
		require.Empty(t, f.check(t))
		close(hangs)
		time.Sleep(time.Minute)
		require.Equal(t, "many_dead, default breaker_open", f.check(t), "the one that hung is the last")
		time.Sleep(time.Minute)
		require.Empty(t, f.check(t))
	})
}
