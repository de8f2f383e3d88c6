package watch_test

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/watch"
)

// fakeStore is a database without PostgreSQL. Its rows of outbox_failed and event_delivery are
// all dead.
type fakeStore struct {
	at         tables.Positions
	rows       []tables.Failure
	deliveries []tables.Delivery
	dead       []tables.EventCount
	unresolved []tables.EventCount
	stale      []tables.EventCount // Oldest says whether they are
	lost       []watch.LostRecords
	err        error
	behind     time.Duration // the clock of this host
}

func (s *fakeStore) Lost(_ context.Context, since time.Time) (lost []watch.LostRecords, err error) {
	for _, l := range s.lost {
		if !l.At.Before(since) {
			lost = append(lost, l)
		}
	}
	return lost, s.err
}

func (s *fakeStore) Now(context.Context) (time.Time, error) { return time.Now().Add(-s.behind), s.err }

func (s *fakeStore) Positions(context.Context) (tables.Positions, error) { return s.at, s.err }

func (s *fakeStore) Died(_ context.Context, since time.Time, relay string, known []int64, limit int) (died []tables.Failure, err error) {
	for _, f := range s.rows {
		if !f.NextRetryAt.Before(since) && (relay == "" || f.Relay == relay) && !slices.Contains(known, f.ID) && len(died) < limit {
			died = append(died, f)
		}
	}
	return died, s.err
}

func (s *fakeStore) DiedDeliveries(_ context.Context, since time.Time, known []int64, limit int) (died []tables.Delivery, err error) {
	for _, d := range s.deliveries {
		if !d.ProcessedAt.Before(since) && !slices.Contains(known, d.ID) && len(died) < limit {
			died = append(died, d)
		}
	}
	return died, s.err
}

func (s *fakeStore) Dead(context.Context) ([]tables.EventCount, error) { return s.dead, s.err }

func (s *fakeStore) Unresolved(context.Context) ([]tables.EventCount, error) {
	return s.unresolved, s.err
}

func (s *fakeStore) Stale(_ context.Context, before time.Time, of tables.Owners, _ int) (stale []tables.EventCount, err error) {
	for _, c := range s.stale {
		isOf := of.Deliveries && c.Group != "" || slices.ContainsFunc(of.Relays, func(r tables.Relay) bool { return r.Name == c.Relay })
		if isOf && c.Oldest.Before(before) {
			stale = append(stale, c)
		}
	}
	return stale, s.err
}

func (s *fakeStore) die(n int) {
	for range n {
		s.rows = append(s.rows, tables.Failure{ID: int64(len(s.rows) + 1), Relay: "default", NextRetryAt: time.Now()})
	}
}

func (s *fakeStore) giveUp(group string, n int) {
	for range n {
		s.deliveries = append(s.deliveries, tables.Delivery{ID: int64(len(s.deliveries) + 1), Group: group, ProcessedAt: time.Now()})
	}
}

// watchFixture is a watch with a store and the alerts that it has delivered.
type watchFixture struct {
	*watch.Watch
	store         fakeStore
	breakerClosed bool
	alerts        []watch.Alert
	cfg           watch.Config
	ends          []string // of what another process may have begun
	unready       int      // how much is stale, as the relay was told
	fail          error    // what Deliver returns
	panics        bool
	epoch         int64 // of the last term
}

func newFixture(settings watch.Settings, relay string) *watchFixture {
	return newFixtureOf(settings, relay, "")
}

// newFixtureOf is the watch of a relay, of a group, which is one of consumers if its name begins so, or of neither.
func newFixtureOf(settings watch.Settings, relay, group string) *watchFixture {
	f := &watchFixture{breakerClosed: true, store: fakeStore{at: tables.Positions{Relays: []tables.Relay{{Name: "default", Holder: "here", MovedAt: time.Now()}}}}}
	group, consumes := strings.CutPrefix(group, "consumer:")
	cfg := watch.Config{Settings: settings.WithDefaults(), Relay: relay, Group: group, Consumes: consumes, Deliver: f.deliver, Logger: slog.New(slog.DiscardHandler)}
	if relay != "" {
		cfg.BreakerClosed = func() bool { return f.breakerClosed }
		cfg.StaleEvents = func(counts []tables.EventCount, _ pg.Clock) { f.unready = len(counts) }
	}
	f.cfg, f.Watch = cfg, watch.New(&f.store, cfg)
	return f
}

// resolving lets the Alerter of a new fixture get the ends of what another process may have begun.
func (f *watchFixture) resolving() *watchFixture {
	f.cfg.Resolve = func(_ context.Context, a watch.Alert) error {
		if f.fail == nil {
			f.ends = append(f.ends, strings.TrimSpace(a.Relay+a.Group+" "+a.Kind)+map[bool]string{true: "!"}[a.Over])
		}
		return f.fail
	}
	f.Watch = watch.New(&f.store, f.cfg)
	return f
}

// resolved runs one check that delivers nothing else, and returns those ends.
func (f *watchFixture) resolved(t *testing.T) string {
	t.Helper()
	f.ends = nil
	require.Empty(t, f.check(t))
	return strings.Join(f.ends, ", ")
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
		kinds = append(kinds, strings.TrimSpace(a.Relay+a.Group+" "+a.Kind)+map[bool]string{true: "!"}[a.Over])
	}
	return strings.Join(kinds, ", ")
}

// What holds is delivered once, again when it is worse, and when it is over.
func TestConditions(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{DeadThreshold: 3, StalePending: 5, StaleAfter: time.Minute, ReportInterval: math.MaxInt64}, "default")
		s := &f.store
		dead := func(events, deliveries int) func() {
			return func() {
				s.dead = []tables.EventCount{{Relay: "default", Status: "dead", Events: events}, {Group: "stats", Status: "dead", Events: deliveries}}
			}
		}
		wait := func(relay, group string, n int, age time.Duration) func() {
			return func() {
				s.stale = append(s.stale, tables.EventCount{Relay: relay, Group: group, Events: n, Oldest: time.Now().Add(-age)})
			}
		}
		for _, step := range []struct {
			name   string
			change func()
			want   string
		}{
			{"all is well", func() {}, ""},
			{"few are dead", dead(1, 1), ""},
			{"many are, of both kinds", dead(1, 2), "many_dead"},
			{"as many as before", dead(2, 1), ""},
			{"more", dead(2, 2), "many_dead"},
			{"fewer, but many", dead(0, 3), ""},
			{"few", dead(0, 1), "many_dead!"},
			{"still few", func() {}, ""},
			{"few are old", wait("default", "", 4, time.Hour), ""},
			{"many are young", wait("default", "", 5, time.Minute), ""},
			{"many are old", func() { time.Sleep(time.Nanosecond) }, "default stale_events"},
			{"more of them", wait("default", "", 50, time.Hour), ""},
			{"none", func() { s.stale = nil }, "default stale_events!"},
			{"of a group few", wait("", "stats", 4, time.Hour), ""},
			{"many elsewhere", wait("default", "", 5, time.Hour), "default stale_events"},
			{"many of a group", wait("", "stats", 1, time.Hour), "stats stale_events"},
			{"none of them", func() { s.stale = nil }, "default stale_events!, stats stale_events!"},
			{"the breaker opens", func() { f.breakerClosed = false }, "default breaker_open"},
			{"it stays open", func() {}, ""},
			{"it closes", func() { f.breakerClosed = true }, "default breaker_open!"},
		} {
			step.change()
			require.Equal(t, step.want, f.check(t), step.name)
		}
	})
}

// A monitor knows breakers from the rows of leaders. It does not say that one is closed while nothing is known, nor
// while a new leader has not reached Kafka.
func TestBreakerOfRows(t *testing.T) {
	t.Parallel()
	f := newFixture(watch.Settings{}, "")
	relay, now := &f.store.at.Relays[0], time.Date(2026, 11, 27, 12, 3, 0, 0, time.UTC)
	says := func(state string, outages ...outage.Outage) *tables.Said {
		said := &tables.Said{KafkaAt: now, State: outage.State{Works: state == "", Outages: outages}}
		if state != "" {
			said.Breakers = []outage.Breaker{{State: state, Since: now}}
		}
		return said
	}
	unreachable := outage.Outage{What: "Kafka", Class: "unreachable", Since: now.Add(-10 * time.Second), Err: "dial tcp: refused"}
	fresh := says("")
	fresh.KafkaAt = time.Time{}
	for _, step := range []struct {
		name string
		said *tables.Said
		want string
	}{
		{"nothing is known", nil, ""},
		{"it is closed", says(""), ""},
		{"it opens", says("open", unreachable), "default breaker_open"},
		{"it is half-open", says("half-open", unreachable), ""},
		{"nothing is known any more", nil, ""},
		{"a new leader has not reached Kafka", fresh, ""},
		{"it has not either", says("", unreachable), ""},
		{"it has", says(""), "default breaker_open!"},
		{"it opens again", says("half-open"), "default breaker_open"},
	} {
		relay.Said = step.said
		require.Equal(t, step.want, f.check(t), step.name)
	}
}

// The text of an open breaker names what fails, the class of its error, and since when.
func TestBreakerText(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 27, 12, 3, 0, 0, time.UTC)
	open := []outage.Breaker{{Action: "A", State: "half-open", Since: at}, {State: "open", Since: at}}
	alert := func(s outage.State) string {
		return watch.Alert{Kind: watch.Breaker, Relay: "a", Status: tables.Relay{Said: &tables.Said{State: s}}}.String()
	}
	kafka := outage.Outage{What: "Kafka", Class: "no_answer", Since: at.Add(-time.Minute), Err: "no answer"}
	topic := func(name string) outage.Outage {
		return outage.Outage{What: "topic " + name, Class: "unknown_topic", Since: at}
	}
	require.Equal(t, "relay a: the circuit breaker is open, not closed since 2026-11-27T12:03:00Z: Kafka has been failing since 2026-11-27T12:02:00Z (no_answer)",
		alert(outage.State{Breakers: open, Outages: []outage.Outage{kafka}}))
	require.Equal(t, "relay a: the circuit breaker is half-open, not closed since 2026-11-27T12:03:00Z: PostgreSQL, for retries, has been failing since 2026-11-27T12:03:00Z (locked), "+
		"topic x·y has been failing since 2026-11-27T12:03:00Z (unknown_topic), topic z has been failing since 2026-11-27T12:03:00Z (unknown_topic), 3 more outages",
		alert(outage.State{Breakers: []outage.Breaker{{State: "half-open", Since: at}}, More: 2,
			Outages: []outage.Outage{{What: "PostgreSQL, for retries,", Class: "locked", Since: at}, topic("x\ny"), topic("z"), topic("more")}}))
	require.Equal(t, "relay a: the circuit breaker is open, Kafka fails", alert(outage.State{}), "the row is older than the breaker")
	require.Equal(t, "relay a: the circuit breaker is open, Kafka fails", watch.Alert{Kind: watch.Breaker, Relay: "a"}.String())
	require.Equal(t, "relay a: the circuit breaker is closed", watch.Alert{Kind: watch.Breaker, Relay: "a", Over: true, Status: tables.Relay{Name: "a"}}.String())
}

// An alert says how old events are by the clock of the database, although that of this host is ahead.
func TestAgeInAlertByAnotherClock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{StalePending: 1}, "default")
		f.store.behind = 6 * time.Minute
		began := time.Now()
		f.store.stale = []tables.EventCount{{Relay: "default", Status: "pending", Type: "a", Events: 1, Oldest: began.Add(-16 * time.Minute)}}
		f.fail = errors.New("no mail today")
		require.Empty(t, f.check(t))
		time.Sleep(time.Minute)
		f.fail = nil
		require.Equal(t, "default stale_events", f.check(t))
		require.Equal(t, "relay default: 1 events are not published, the oldest for 11m0s: 1 pending a", f.alerts[0].String())
		require.Equal(t, began.Add(-5*time.Minute).UTC(), f.alerts[0].At.UTC())
	})
}

// What waits for too long makes the relay unready, whether the alert is delivered or not.
func TestStaleEventsReachTheRelay(t *testing.T) {
	t.Parallel()
	f := newFixture(watch.Settings{StalePending: 5}, "default")
	f.fail = errors.New("no mail today")
	for _, step := range []struct{ events, unready int }{{4, 0}, {5, 1}, {0, 0}} {
		f.store.stale = []tables.EventCount{{Relay: "default", Events: step.events, Oldest: time.Now().Add(-time.Hour)}}
		require.Empty(t, f.check(t))
		require.Equal(t, step.unready, f.unready)
	}
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
		require.Equal(t, "stats lost_records", f.check(t))
		require.Equal(t, []any{"stats", "orders", int64(85)}, []any{f.alerts[0].Group, f.alerts[0].Topic, f.alerts[0].Lost})
		require.Empty(t, f.check(t))
		time.Sleep(time.Minute)
		f.store.lost = nil
		lose("orders", 90)
		require.Equal(t, "stats lost_records", f.check(t))

		lose("items", 1)
		f.store.at.Relays = append([]tables.Relay{{Name: "another", Holder: "there", MovedAt: time.Now()}}, f.store.at.Relays...)
		require.Empty(t, f.check(t), "the other relay alerts")
	})
}

// A standby needs a moment to take over, so one check without a leader is no alert.
func TestLeader(t *testing.T) {
	t.Parallel()
	f := newFixture(watch.Settings{}, "")
	relay := &f.store.at.Relays[0]
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

// All alerts about a relay are over when it is removed, also if it is removed while another process takes over. One
// of that name begins anew.
func TestRelayIsRemoved(t *testing.T) {
	t.Parallel()
	f := newFixture(watch.Settings{StalePending: 1, ReportInterval: math.MaxInt64}, "")
	relays := []tables.Relay{{Name: "default", MovedAt: time.Now(), Said: &tables.Said{State: outage.State{Breakers: []outage.Breaker{{State: "open"}}}}}}
	stale := []tables.EventCount{{Relay: "default", Events: 1, Oldest: time.Now().Add(-time.Hour)}}
	f.store.at.Relays, f.store.stale = relays, stale
	require.Equal(t, "default stale_events, default breaker_open", f.check(t))
	require.Equal(t, "default no_leader", f.check(t))
	f.store.at.Relays, f.store.stale = nil, nil
	f.fail = errors.New("no mail today")
	require.Empty(t, f.check(t))
	f.fail = nil
	require.Equal(t, "default breaker_open!, default stale_events!, default no_leader!", f.check(t))
	require.Equal(t, "relay default: it is removed", f.alerts[0].String())
	require.Equal(t, "relay default: events no longer wait too long", f.alerts[1].String())
	require.Equal(t, "relay default: it is removed", f.alerts[2].String())
	require.Empty(t, f.check(t))
	f.store.at.Relays, f.store.stale = relays, stale
	require.Equal(t, "default stale_events, default breaker_open", f.check(t))
	require.Equal(t, "default no_leader", f.check(t), "not at the first check")

	g := newFixtureOf(watch.Settings{}, "", "stats")
	g.store.at = tables.Positions{Relays: []tables.Relay{{Name: "default", MovedAt: time.Now()}}, Workers: []tables.Relay{{Name: "stats", Holder: "here"}}}
	require.Empty(t, g.check(t))
	require.Equal(t, "default no_leader", g.check(t))
	g.store.at.Relays = []tables.Relay{{Name: "another", Holder: "there"}}
	require.Equal(t, "default no_leader!", g.check(t))
	require.Empty(t, g.check(t))
}

// A relay that gets a leader takes the common alerts from the process that said that it has none. That process says
// that it has one before it falls silent, as often as it takes to be heard.
func TestLeaderTakesAlertsOver(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ relay, group string }{{"", "stats"}, {"", "consumer:mails"}, {"b", ""}} {
		f := newFixtureOf(watch.Settings{DeadThreshold: 1}, test.relay, test.group)
		f.store.at.Relays = []tables.Relay{{Name: "a", MovedAt: time.Now()}, {Name: "b", MovedAt: time.Now()}, {Name: "c", MovedAt: time.Now()}}
		if test.relay != "" {
			f.store.at.Relays[1].Holder = "here"
		}
		groups := []tables.Relay{{Name: strings.TrimPrefix(test.group, "consumer:"), Holder: "here"}}
		if f.store.at.Workers = groups; strings.HasPrefix(test.group, "consumer:") {
			f.store.at.Workers, f.store.at.Consumers = nil, groups
		}
		require.Empty(t, f.check(t))
		require.Contains(t, f.check(t), "a no_leader", "%+v", test)
		f.store.dead = []tables.EventCount{{Group: "stats", Events: 1}}
		f.store.at.Relays[0].Holder = "there"
		f.fail = errors.New("no mail today")
		require.Empty(t, f.check(t))
		f.fail = nil
		require.Equal(t, "a no_leader!", f.check(t), "%+v", test)
		require.Equal(t, "relay a: there leads", f.alerts[0].String())
		require.Empty(t, f.check(t))
		f.store.at.Relays[0].Holder = ""
		require.Equal(t, "many_dead", f.check(t), "it is the first again")
		require.Contains(t, f.check(t), "a no_leader")
		f.store.at.Relays[0].Holder = "outbox cut"
		require.Equal(t, "a no_leader!", f.check(t), "it stays the first")
		require.Equal(t, "relay a: it has ended by a cut", f.alerts[0].String())
	}
}

// A new leader does not know what the old one has begun, so it ends all that does not hold, once, for an Alerter that
// wants that.
func TestNewLeaderEndsWhatTheOldOneBegan(t *testing.T) {
	t.Parallel()
	settings := watch.Settings{StalePending: 1, DeadThreshold: 1, ReportInterval: math.MaxInt64}
	a := newFixture(settings, "default")
	a.breakerClosed = false
	a.store.stale = []tables.EventCount{{Relay: "default", Events: 1, Oldest: time.Now().Add(-time.Hour)}}
	a.store.dead = []tables.EventCount{{Relay: "default", Events: 1}}
	require.Equal(t, "default stale_events, default breaker_open, many_dead", a.check(t))

	b := newFixture(settings, "default").resolving()
	b.store = a.store
	b.store.at.Relays = append(b.store.at.Relays, tables.Relay{Name: "other", MovedAt: time.Now()})
	b.store.at.Workers = []tables.Relay{{Name: "stats", Holder: "there"}}
	b.store.stale, b.store.dead = nil, nil
	b.fail = errors.New("no incidents today")
	require.Empty(t, b.resolved(t))
	b.fail = nil
	b.store.at.Relays[1].Holder = "there"
	require.Equal(t, "default no_leader!, default stale_events!, other no_leader!, stats stale_events!, many_dead!", b.resolved(t), "it has not reached Kafka")
	b.store.at.Relays[0].Said = &tables.Said{KafkaAt: time.Now()}
	require.Equal(t, "default breaker_open!", b.resolved(t))
	require.Empty(t, b.resolved(t))

	b.fail, b.breakerClosed = errors.New("one of two alerters fails"), false
	require.Empty(t, b.resolved(t))
	b.fail, b.breakerClosed = nil, true
	require.Equal(t, "default breaker_open!", b.resolved(t), "what may have begun")
	b.breakerClosed = false
	require.Equal(t, "default breaker_open", b.check(t))
	b.breakerClosed = true
	require.Equal(t, "default breaker_open!", b.check(t))
	require.Empty(t, b.resolved(t))
}

// No relay is known to have a leader at the first check without one. A worker does not know how many events are dead.
func TestEndsOnlyWhatIsKnown(t *testing.T) {
	t.Parallel()
	f := newFixtureOf(watch.Settings{StalePending: 1}, "", "stats").resolving()
	f.store.at = tables.Positions{Relays: []tables.Relay{{Name: "default", MovedAt: time.Now()}}, Workers: []tables.Relay{{Name: "stats", Holder: "here"}}}
	f.store.stale = []tables.EventCount{{Group: "stats", Events: 1, Oldest: time.Now().Add(-time.Hour)}}
	require.Equal(t, "stats stale_events", f.check(t))
	require.Equal(t, "default no_leader", f.check(t))
	require.Empty(t, f.ends)
}

// However many groups there are, a check has time for what holds: their ends come at later checks.
func TestManyEnds(t *testing.T) {
	t.Parallel()
	f := newFixture(watch.Settings{DeadThreshold: 1}, "default").resolving()
	for i := range 50 {
		f.store.at.Workers = append(f.store.at.Workers, tables.Relay{Name: strconv.Itoa(i), Holder: "there"})
	}
	f.store.dead = []tables.EventCount{{Relay: "default", Events: 1}}
	require.Equal(t, "many_dead", f.check(t))
	require.Len(t, f.ends, 20)
	for range 3 {
		require.Empty(t, f.check(t))
	}
	require.Len(t, f.ends, 52)
}

// Each term of a leader is a new one: another process may have led in between.
func TestEndsOfEachTerm(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{Interval: time.Minute, ReportInterval: math.MaxInt64}, "default").resolving()
		m := watch.NewMonitor(&f.store, f.cfg, slog.New(slog.DiscardHandler), nil)
		for range 2 {
			f.ends = nil
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			m.Run(ctx)
			cancel()
			require.Equal(t, []string{"default no_leader!", "default stale_events!", "many_dead!"}, f.ends)
		}
	})
}

// Each relay watches its own events. What concerns all is for the first relay that has a leader,
// without any for the first group of workers, then for the first of consumers, and for a monitor in any case.
func TestWhoWatches(t *testing.T) {
	t.Parallel()
	const all, ledA, ledB = "many_dead, stats dead_deliveries, c no_leader", "a stale_events", "b stale_events"
	for _, test := range []struct{ relay, group, led, want string }{
		{"", "", "a b stats", ledA + ", " + ledB + ", stats stale_events, " + all},
		{"a", "", "a b stats", ledA + ", stats stale_events, " + all},
		{"b", "", "a b stats", ledB},
		{"b", "", "b stats", ledB + ", stats stale_events, many_dead, stats dead_deliveries, a no_leader, c no_leader"},
		{"", "stats", "a b stats", ""},
		{"", "stats", "stats", "stats stale_events, many_dead, stats dead_deliveries, a no_leader, b no_leader, c no_leader"},
		{"", "stats", "mails stats", ""},
		{"", "mails", "mails stats", "stats stale_events, many_dead, stats dead_deliveries, a no_leader, b no_leader, c no_leader"},
		{"", "mails", "mails consumer:audit", "stats stale_events, many_dead, stats dead_deliveries, a no_leader, b no_leader, c no_leader"},
		{"", "stats", "stats consumer:stats", "stats stale_events, many_dead, stats dead_deliveries, a no_leader, b no_leader, c no_leader"},
		{"", "consumer:stats", "stats consumer:stats", ""},
		{"", "consumer:stats", "a consumer:stats", ""},
		{"", "consumer:stats", "consumer:audit consumer:stats", ""},
		{"", "consumer:audit", "consumer:audit consumer:stats", "stats stale_events, many_dead, stats dead_deliveries, a no_leader, b no_leader, c no_leader"},
	} {
		f := newFixtureOf(watch.Settings{DeadThreshold: 1, StalePending: 1}, test.relay, test.group)
		of := func(name string) tables.Relay {
			led := slices.Contains(strings.Fields(test.led), name)
			return tables.Relay{Name: name, Holder: map[bool]string{true: "somewhere"}[led], MovedAt: time.Now()}
		}
		f.store.at = tables.Positions{Relays: []tables.Relay{of("a"), of("b"), of("c")}, Workers: []tables.Relay{of("mails"), of("stats")}}
		for _, name := range []string{"audit", "stats"} {
			consumers := of("consumer:" + name)
			consumers.Name = name
			f.store.at.Consumers = append(f.store.at.Consumers, consumers)
		}
		f.store.dead = []tables.EventCount{{Relay: "a", Events: 1}}
		for _, c := range []tables.EventCount{{Relay: "a"}, {Relay: "b"}, {Group: "stats"}} {
			c.Events, c.Oldest = 1, time.Now().Add(-time.Hour)
			f.store.stale = append(f.store.stale, c)
		}
		f.store.giveUp("stats", 1)
		first := f.check(t)
		second := f.check(t)
		require.Equal(t, test.want, strings.Trim(first+", "+second, ", "), "%+v", test)
	}
}

// A cutover that has the lease of a relay alerts to nothing, so it keeps no process from that.
func TestCutRelayWatchesNothing(t *testing.T) {
	t.Parallel()
	for _, holder := range []string{"outbox cut", "outbox debezium"} {
		for _, test := range []struct {
			relay, group, living, want string
		}{
			{"", "stats", "", "many_dead, b no_leader"},
			{"", "consumer:stats", "", ""},
			{"", "stats", "b", ""},
			{"b", "", "b", "many_dead"},
		} {
			f := newFixtureOf(watch.Settings{DeadThreshold: 1}, test.relay, test.group)
			f.store.at = tables.Positions{
				Relays:    []tables.Relay{{Name: "a", Holder: holder, MovedAt: time.Now()}, {Name: "b", MovedAt: time.Now()}},
				Workers:   []tables.Relay{{Name: "stats", Holder: "x"}},
				Consumers: []tables.Relay{{Name: "stats", Holder: "x"}},
			}
			if test.living != "" {
				f.store.at.Relays[1].Holder = "there"
			}
			f.store.dead = []tables.EventCount{{Group: "stats", Events: 1}}
			first := f.check(t)
			second := f.check(t)
			require.Equal(t, test.want, strings.Trim(first+", "+second, ", "), "%s %+v", holder, test)
		}
	}
}

// Who begins to watch what concerns all begins anew: one interval back.
func TestFirstChanges(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{DeadThreshold: 1, ReportInterval: math.MaxInt64}, "default")
		f.store.dead = []tables.EventCount{{Group: "stats", Events: 2}}
		f.store.giveUp("stats", 2)
		require.Equal(t, "many_dead, stats dead_deliveries", f.check(t))
		f.store.at.Relays = append([]tables.Relay{{Name: "another", Holder: "there", MovedAt: time.Now()}}, f.store.at.Relays...)
		time.Sleep(time.Hour)
		f.store.giveUp("stats", 3)
		require.Empty(t, f.check(t), "the other relay alerts")
		f.store.at.Relays[0].Holder = ""
		require.Equal(t, "many_dead, stats dead_deliveries", f.check(t))
		require.Equal(t, 3, f.alerts[1].Died)
	})
}

// A process that takes over looks back over the time in which no process may have checked.
func TestTakeover(t *testing.T) {
	t.Parallel()
	for takeover, want := range map[time.Duration]string{0: "", time.Minute: "stats dead_deliveries"} {
		synctest.Test(t, func(t *testing.T) {
			f := &watchFixture{}
			f.store.at.Workers = []tables.Relay{{Name: "stats", Holder: "here"}}
			f.Watch = watch.New(&f.store, watch.Config{Settings: watch.Settings{Interval: time.Second}.WithDefaults(), Group: "stats", Takeover: takeover,
				Deliver: f.deliver, Logger: slog.New(slog.DiscardHandler)})
			f.store.giveUp("stats", 1)
			time.Sleep(time.Minute)
			require.Equal(t, want, f.check(t), takeover)
		})
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

// The same holds for deliveries, with an alert for each group.
func TestDeadDeliveries(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{Interval: time.Minute, ReportInterval: math.MaxInt64, DeadThreshold: 100}, "default")
		f.store.dead = []tables.EventCount{{Group: "mails", Events: 1}, {Group: "stats", Events: 35}}
		f.store.giveUp("stats", 5)
		time.Sleep(time.Minute + time.Second)
		f.store.giveUp("stats", 30)
		f.store.giveUp("mails", 1)
		f.store.deliveries[5].Action, f.store.deliveries[5].Attempts = "COUNTED", 4
		require.Equal(t, "mails dead_deliveries, stats dead_deliveries", f.check(t))
		stats := f.alerts[1]
		require.Equal(t, 30, stats.Died)
		require.Len(t, stats.Dead, 20)
		require.Equal(t, f.store.dead[1:], stats.Counts)
		require.Equal(t, []any{int64(6), "stats", "COUNTED", 3}, []any{stats.Dead[0].ID, stats.Dead[0].Group, stats.Dead[0].Action, stats.Dead[0].Retries})
		for range 20 { // well past the overlap
			require.Empty(t, f.check(t))
			time.Sleep(time.Minute)
		}
		f.store.giveUp("stats", 1)
		f.fail = errors.New("no mail today")
		require.Empty(t, f.check(t))
		f.fail = nil
		require.Equal(t, "stats dead_deliveries", f.check(t))
		require.Empty(t, f.check(t))
	})
}

// An alert that is not delivered comes again, and nothing is lost.
func TestFailedDelivery(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{DeadThreshold: 1, ReportInterval: time.Minute}, "default")
		f.store.dead = []tables.EventCount{{Relay: "default", Status: "dead", Events: 2}}
		f.store.die(2)
		f.store.unresolved = f.store.dead
		time.Sleep(time.Minute)
		f.fail = errors.New("no mail")
		require.Empty(t, f.check(t))
		f.fail, f.panics = nil, true
		require.Empty(t, f.check(t))
		f.panics = false
		require.Equal(t, "many_dead, report, default dead_events", f.check(t))
		require.Empty(t, f.check(t))
	})
}

// Reports come at intervals, and only if there is something to report.
func TestReports(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{ReportInterval: time.Hour}, "")
		f.store.unresolved = []tables.EventCount{{Relay: "default", Events: 2}, {Group: "stats", Events: 1}}
		require.Empty(t, f.check(t))
		time.Sleep(10 * time.Minute)
		require.Equal(t, "report", f.check(t), "the first one does not wait for long")
		require.Len(t, f.alerts[0].Counts, 2)
		time.Sleep(time.Hour - time.Second)
		require.Empty(t, f.check(t))
		time.Sleep(time.Second)
		require.Equal(t, "report", f.check(t))
		f.store.unresolved = nil
		time.Sleep(time.Hour)
		require.Empty(t, f.check(t))

		never := newFixture(watch.Settings{ReportInterval: math.MaxInt64}, "")
		never.store.unresolved = []tables.EventCount{{Relay: "default", Events: 2}}
		time.Sleep(24 * time.Hour)
		require.Empty(t, never.check(t))
	})
}

// strictStore is a store whose statements fail when their time is over.
type strictStore struct{ *fakeStore }

func (s strictStore) DiedDeliveries(ctx context.Context, since time.Time, known []int64, limit int) ([]tables.Delivery, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return s.fakeStore.DiedDeliveries(ctx, since, known, limit)
}

func (s strictStore) Dead(ctx context.Context) ([]tables.EventCount, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return s.fakeStore.Dead(ctx)
}

// One receiver that swallows what it gets takes neither the time of statements nor that of other receivers. Which
// alerts come first changes, so that a receiver that only takes some time gets all of it at some check.
func TestSlowReceiver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{DeadThreshold: 1, StalePending: 1, ReportInterval: math.MaxInt64}, "default")
		swallows := func(a watch.Alert) bool { return a.Kind == watch.Stale || a.Kind == watch.Breaker }
		takes := map[string]time.Duration{watch.ManyDead: 5 * time.Second}
		f.cfg.Deliver = func(ctx context.Context, a watch.Alert) error {
			took := time.Hour
			if !swallows(a) {
				took = takes[a.Kind]
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(took):
				return f.deliver(ctx, a)
			}
		}
		f.Watch = watch.New(strictStore{&f.store}, f.cfg)
		f.breakerClosed = false
		f.store.dead = []tables.EventCount{{Relay: "default", Events: 2}}
		for _, group := range []string{"", "mails", "stats"} {
			c := tables.EventCount{Group: group, Events: 5, Oldest: time.Now().Add(-time.Hour)}
			if group == "" {
				c.Relay = "default"
			}
			f.store.stale = append(f.store.stale, c)
		}
		f.store.die(1)
		f.store.giveUp("stats", 1)
		delivered := map[string]bool{}
		for range 6 {
			start := time.Now()
			for _, kind := range strings.Split(f.check(t), ", ") {
				delivered[kind] = true
			}
			require.LessOrEqual(t, time.Since(start), 31*time.Second)
			require.True(t, delivered["default dead_events"] && delivered["stats dead_deliveries"], "%v", delivered)
		}
		require.True(t, delivered["many_dead"], "%v", delivered)

		// Then no more is lost than time: what was swallowed comes when the receiver works.
		swallows = func(watch.Alert) bool { return false }
		require.Equal(t, 4, len(strings.Split(f.check(t), ", ")))
		require.Empty(t, f.check(t))
	})
}

// However many alerts a receiver swallows, the others are delivered after some checks.
func TestManySwallowedAlerts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{DeadThreshold: 1, StalePending: 1, ReportInterval: math.MaxInt64}, "default")
		f.cfg.Deliver = func(ctx context.Context, a watch.Alert) error {
			if a.Kind == watch.Stale {
				<-ctx.Done()
				return ctx.Err()
			}
			return f.deliver(ctx, a)
		}
		f.Watch = watch.New(strictStore{&f.store}, f.cfg)
		for i := range 50 {
			f.store.stale = append(f.store.stale, tables.EventCount{Group: strconv.Itoa(i), Events: 5, Oldest: time.Now().Add(-time.Hour)})
		}
		f.store.die(1)
		f.store.giveUp("stats", 1)
		delivered := ""
		for range 6 {
			delivered += f.check(t)
			time.Sleep(30 * time.Second)
		}
		require.Contains(t, delivered, "default dead_events")
		require.Contains(t, delivered, "stats dead_deliveries")
	})
}

// What PostgreSQL does not answer about the whole database does not keep a relay from alerts to its own events.
func TestCommonReadFails(t *testing.T) {
	t.Parallel()
	f := newFixture(watch.Settings{DeadThreshold: 1}, "default")
	f.store.at.Relays = append(f.store.at.Relays, tables.Relay{Name: "gone", MovedAt: time.Now()})
	failing := &failingStore{&f.store}
	f.Watch = watch.New(failing, f.cfg)
	f.store.die(1)
	require.ErrorIs(t, f.Check(t.Context()), errTooSlow)
	require.Len(t, f.alerts, 1)
	require.Equal(t, watch.Dead, f.alerts[0].Kind)
	require.ErrorIs(t, f.Check(t.Context()), errTooSlow)
	require.Len(t, f.alerts, 2)
	require.Equal(t, watch.NoLeader, f.alerts[1].Kind)
}

var errTooSlow = errors.New("statement timeout")

type failingStore struct{ *fakeStore }

func (*failingStore) DiedDeliveries(context.Context, time.Time, []int64, int) ([]tables.Delivery, error) {
	return nil, errTooSlow
}

// When the clock of the database is set back, what dies afterwards is alerted to, and so are lost records.
func TestClockIsSetBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(watch.Settings{Interval: time.Minute, ReportInterval: math.MaxInt64, DeadThreshold: 100}, "default")
		f.store.at.Relays = append(f.store.at.Relays, tables.Relay{Name: "other", Holder: "there", MovedAt: time.Now()})
		f.store.lost = []watch.LostRecords{{Group: "stats", Topic: "t", Records: 1, At: time.Now()}}
		f.store.die(1)
		require.Equal(t, "stats lost_records, default dead_events", f.check(t))
		f.store.behind = time.Hour
		time.Sleep(time.Minute)
		require.Empty(t, f.check(t), "what is known stays known")
		time.Sleep(time.Minute)
		f.store.die(1)
		f.store.giveUp("stats", 1)
		at := time.Now().Add(-time.Hour)
		f.store.rows[1].NextRetryAt, f.store.deliveries[0].ProcessedAt = at, at
		f.store.lost[0] = watch.LostRecords{Group: "stats", Topic: "t", Records: 3, At: at}
		require.Equal(t, "stats dead_deliveries, stats lost_records, default dead_events", f.check(t))
		require.Empty(t, f.check(t))
	})
}

// What PostgreSQL refuses ends the check, and changes nothing.
func TestStoreFails(t *testing.T) {
	t.Parallel()
	f := newFixture(watch.Settings{DeadThreshold: 1}, "")
	f.store.dead, f.store.err = []tables.EventCount{{Relay: "default", Events: 1}}, errors.New("connection refused")
	require.ErrorIs(t, f.Check(t.Context()), f.store.err)
	require.Empty(t, f.alerts)
	f.store.err = nil
	require.Equal(t, "many_dead", f.check(t))
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
		store := fakeStore{at: tables.Positions{Relays: []tables.Relay{{Name: "default", Holder: "here"}}}, dead: []tables.EventCount{{Relay: "default", Events: 5}}}
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

		store.dead[0].Events, release = 6, make(chan struct{})
		hang <- release
		stopping, stop := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, stop)
		require.Less(t, check(stopping), 2*time.Second)
		close(release)
	})
}

// Counts of a read that has met its limit are no exact numbers, also where they are less than the limit.
func TestSentencesSayThatThereIsMore(t *testing.T) {
	t.Parallel()
	at := time.Now()
	counts := []tables.EventCount{
		{Group: "stats", Action: "COUNT", Status: "waiting", Type: "a", Events: 5000, More: true, Oldest: at.Add(-time.Hour)},
		{Group: "stats", Action: "COUNT", Status: "waiting", Type: "b", Events: 3, Oldest: at.Add(-time.Minute)},
	}
	for want, a := range map[string]watch.Alert{
		"consumer group stats: 5003 or more events are not handled, the oldest for 1h0m0s: 5000 or more waiting a for stats COUNT, 3 waiting b for stats COUNT": {
			Kind: watch.Stale, Group: "stats", At: at, Counts: counts},
		"5003 or more dead events and deliveries wait for a decision: 5000 or more waiting a for stats COUNT, 3 waiting b for stats COUNT": {Kind: watch.ManyDead, Counts: counts},
		"5003 or more dead events and deliveries are left":                   {Kind: watch.ManyDead, Counts: counts, Over: true},
		"3 dead events and deliveries are left":                              {Kind: watch.ManyDead, Counts: counts[1:], Over: true},
		"consumer group stats: 2 deliveries given up; 5003 or more are dead": {Kind: watch.DeadDeliveries, Group: "stats", Died: 2, Counts: counts},
		"relay default: 1 event died; 10000 or more are dead":                {Kind: watch.Dead, Relay: "default", Died: 1, Status: tables.Relay{Dead: tables.MaxCounted}},
		"relay default: no process runs it, 100000 or more events wait":      {Kind: watch.NoLeader, Relay: "default", Status: tables.Relay{Pending: 100_000, PendingMore: true}},
		"relay default: no process runs it, 7 events wait":                   {Kind: watch.NoLeader, Relay: "default", Status: tables.Relay{Pending: 7}},
	} {
		require.Equal(t, want, a.String())
	}
}
