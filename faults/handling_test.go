package faults

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/faults/internal/proxy"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	// shortMarket is how long the short form of TestHandlingFaults disturbs.
	shortMarket = 36 * time.Second
	// marketLimit is how long after the last fault everything must be done.
	marketLimit = 2 * time.Minute
)

// A group of consumers and a group of workers handle the same events, in processes of two releases that come, go and
// are rolled back. The second release has an action more, an event type more, and another name for a topic. Members
// are killed, stopped, and frozen or cut off from PostgreSQL inside a transaction of a handler. Sequences are set back.
// What handlers need is away for longer than all attempts take: for all events, for a tenant, for an action with few
// events, for an action with one key. Some events are bad for ever.
//
// What was committed is compared with the effects of handlers and with the dead letters. An action of the second
// release owes what was committed after its first member had begun.
//
// Outages follow each other: an event that fails in one of them may be tried next in the following one.
//
// The order of a key holds within a type: the new type of an old action has keys of its own, because a consumer of the
// first release passes over its events. The sequences of outbox and outbox_cursor are not set back, because relays
// and workers then stop with ErrSequenceBehind until an operator acts.
func TestHandlingFaults(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	v := marketResult{Seed: seedOf(t)}
	lasts := shortMarket
	if *faultMinutes > 0 {
		lasts = time.Duration(*faultMinutes * float64(time.Minute))
	}
	m := newMarket(t, v.Seed)
	stopWriting := m.write(t, lasts)
	m.run(t, marketPlan(v.Seed, lasts), lasts)
	m.awaitDone(t, stopWriting)
	m.compare(t, &v)
	m.stopAll(t)
	t.Logf("%s", v)
	require.NoError(t, v.Err())
	require.NoError(t, v.missing())
}

// marketResult is what TestHandlingFaults prints in the end.
type marketResult struct {
	Seed     uint64  `json:"seed"`
	Seconds  float64 `json:"seconds"`
	Events   int     `json:"events"`
	Bad      int     `json:"bad"` // of these
	Effects  int     `json:"effects"`
	Dead     int     `json:"dead"`
	Kills    int     `json:"kills"`
	Freezes  int     `json:"freezes"`
	Cuts     int     `json:"cuts"`
	Inside   int     `json:"inside"` // kills, freezes and cuts inside a transaction of a handler
	Stops    int     `json:"stops"`
	Releases int     `json:"releases"` // rollouts and rollbacks
	Outages  int     `json:"outages"`
	SetBack  int     `json:"set_back"` // times that sequences were set back
	// DoneAfter is how long after the last fault everything was done.
	DoneAfter int64 `json:"done_after_ms"`

	WrongCounts int `json:"wrong_counts"` // effects made twice or of no committed event, and wrong totals
	WrongNotes  int `json:"wrong_notes"`  // actions on which event_handled and effects disagree
	Unseen      int `json:"unseen"`       // committed events without effect, death or open row, by action
	Disorder    int `json:"disorder"`     // effects behind one of a later event of the key
	Overtaken   int `json:"overtaken"`    // such effects of parked events, and effects in front of the death of an earlier event
	WrongDead   int `json:"wrong_dead"`   // healthy and dead, or bad and not dead, and wrong dead letters
	Stuck       int `json:"stuck"`        // rows that are open in the end
}

// String returns the result as one line of JSON.
func (v marketResult) String() string { return lineOf(v) }

// Err says what is wrong, or returns nil.
func (v marketResult) Err() error {
	if v.WrongCounts+v.WrongNotes+v.Unseen+v.Disorder+v.Overtaken+v.WrongDead+v.Stuck > 0 {
		return fmt.Errorf("faults: %s", v)
	}
	return nil
}

// missing says what did not happen though it was to, or returns nil.
func (v marketResult) missing() error {
	if min(v.Events, v.Bad, v.Effects, v.Dead, v.Kills, v.Freezes, v.Cuts, v.Inside, v.Stops, v.Releases, v.Outages, v.SetBack) == 0 {
		return fmt.Errorf("faults: something that the plan has did not happen: %s", v)
	}
	return nil
}

// market is the groups and what they work on. Its steps run in one goroutine.
type market struct {
	*crew
	start   time.Time
	db      *pgxpool.Pool
	brokers []string
	address string // of PostgreSQL
	topics  marketTopics
	shop    *marketShop
	signs   string // a folder
	logs    string // a folder
	slots   []*marketSlot

	freezes, cuts, inside, stops, releases, outages, setBack int
	doneAfter                                                time.Duration
	gone                                                     []string // actions with an outage of their own, and "" for another outage
}

// marketSlot is the place of a member, which other processes take after it.
type marketSlot struct {
	group   string
	release int          // that a process shall have
	proxy   *proxy.Proxy // to PostgreSQL

	process *worker // nil: to be started at
	at      time.Time
	number  int  // of the process
	has     int  // its release
	hurt    bool // it is frozen or cut off
	leaving bool // it was told to stop
}

// newMarket returns a market whose groups have members of the first release.
func newMarket(t *testing.T, seed uint64) *market {
	t.Helper()
	m := &market{crew: newCrew(t), start: time.Now(), signs: t.TempDir(), logs: t.TempDir(), gone: []string{}}
	server := startServer(t, nil)
	m.address = server.URL()
	settings := shortSessions()
	settings["group.initial.rebalance.delay.ms"] = "0"
	settings["broker.session.timeout.ms"] = "30000"
	m.brokers = m.startKafka(t, settings).Brokers()
	cfg, err := pgxpool.ParseConfig(m.address)
	require.NoError(t, err)
	cfg.MaxConns = 12
	m.db = openPool(t, cfg)
	for _, sql := range []string{`ALTER SYSTEM SET autovacuum = on`, `ALTER SYSTEM SET autovacuum_naptime = '5s'`, `SELECT pg_reload_conf()`} {
		_, err := m.db.Exec(m.ctx, sql)
		require.NoError(t, err)
	}
	require.NoError(t, outbox.Migrate(m.ctx, m.db, outbox.MigrateConfig{}))
	id := uuid.NewString()
	m.topics = marketTopics{Orders: "orders-" + id, Prices: "prices-" + id, Tariffs: "tariffs-" + id, Audits: "audits-" + id, Gates: "gates-" + id}
	for _, topic := range m.topics.all() {
		testenv.CreateTopic(t, m.brokers, topic, 3)
		testenv.CreateTopic(t, m.brokers, outbox.DeadLetterTopic(topic), 1)
	}
	m.shop, err = newMarketShop(m.ctx, m.db, m.topics, seed)
	require.NoError(t, err)
	at, err := url.Parse(m.address)
	require.NoError(t, err)
	for _, group := range marketGroups {
		for range marketSlots {
			m.slots = append(m.slots, &marketSlot{group: group, release: 1, proxy: through(t, at.Host)})
		}
	}
	return m
}

// write starts the relay and those who record events. Stop has no more events recorded.
func (m *market) write(t *testing.T, lasts time.Duration) (stop func()) {
	t.Helper()
	relay, err := outbox.NewRelay(m.db, []kgo.Opt{kgo.SeedBrokers(m.brokers...)}, outbox.RelayConfig{PollInterval: 20 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, marketClerk+1)
	for clerk := range uint64(marketClerk) {
		go func() { done <- m.shop.work(ctx, clerk) }()
	}
	go func() { done <- m.shop.trickle(ctx, trickleOf(lasts)) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		for range marketClerk + 1 {
			if err := <-done; err != nil {
				t.Errorf("events are not recorded: %v", err)
			}
		}
	}
	t.Cleanup(stop)
	return stop
}

// launchOne starts a process for a slot.
func (m *market) launchOne(t *testing.T, s *marketSlot) {
	t.Helper()
	m.started++
	at, err := url.Parse(m.address)
	require.NoError(t, err)
	at.Host = s.proxy.Addr()
	spec := marketSpec{
		Postgres: at.String() + "&deadlock_timeout=20ms&application_name=" + s.group, Group: s.group, Release: s.release, Topics: m.topics,
		Number: m.started, Signs: m.signs, Log: filepath.Join(m.logs, fmt.Sprintf("%s-%d.log", s.group, m.started)),
	}
	if s.group == feedGroup {
		spec.Brokers = m.brokers
	}
	s.process, s.number, s.has, s.leaving = m.launch(t, marketVar, spec), m.started, s.release, false
}

// isReady reports whether the process of a slot runs, is well, and stops cleanly if it is told to.
func (m *market) isReady(s *marketSlot) bool {
	if s.process == nil || s.hurt || s.leaving {
		return false
	}
	_, err := os.Stat(filepath.Join(m.signs, fmt.Sprint(signReady, s.number)))
	return err == nil
}

// look starts the processes that are due, replaces those that have stopped, and rolls releases out, one member of a
// group at a time.
func (m *market) look(t *testing.T) {
	t.Helper()
	for _, s := range m.slots {
		if s.process != nil && s.leaving && s.process.isOver() {
			if s.process.err != nil {
				t.Errorf("a process of %s that was told to stop ended with: %v", s.group, s.process.err)
			}
			m.vacate(s)
		}
		if s.process == nil && !time.Now().Before(s.at) {
			m.launchOne(t, s)
		}
	}
	for _, s := range m.slots {
		if s.has != s.release && m.isReady(s) && !slices.ContainsFunc(m.slots, func(o *marketSlot) bool { return o.group == s.group && o.leaving }) {
			m.ask(s)
		}
	}
	m.lookForRelease(t)
}

// vacate forgets the process of a slot.
func (m *market) vacate(s *marketSlot) {
	m.workers = slices.DeleteFunc(m.workers, func(w *worker) bool { return w == s.process })
	s.process, s.leaving, s.hurt = nil, false, false
}

// ask tells the process of a slot to stop.
func (m *market) ask(s *marketSlot) {
	s.process.ask()
	s.leaving = true
	m.stops++
}

const (
	sqlFeedHasRelease = `
SELECT count(*) = 3 FROM consumer_handler WHERE consumer_group = '` + feedGroup + `'
   AND ((action = 'LISTED' AND topic = $1 AND event_type = '` + placedType + `') OR (topic = $1 AND event_type = '` + parcelType + `') OR (topic = $2 AND event_type = '` + pricedType + `'))`
	sqlPackingHasRelease = `
SELECT coalesce(bool_or(routes ?& ARRAY['` + placedType + `' || E'\n' || $1::text || E'\nLISTED', '` + parcelType + `' || E'\n' || $1::text || E'\nCOUNTED', '` + pricedType + `' || E'\n' || $2::text || E'\nPRICED']), false)
  FROM event_subscription WHERE consumer_group = '` + packingGroup + `'`
)

// lookForRelease notices when the first member of the second release has begun in a group: its handlers are registered.
func (m *market) lookForRelease(t *testing.T) {
	t.Helper()
	if !m.shop.owedFeed.Load() {
		var has bool
		require.NoError(t, m.db.QueryRow(m.ctx, sqlFeedHasRelease, m.topics.Orders, m.topics.Tariffs).Scan(&has))
		m.shop.owedFeed.Store(has)
	}
	if !m.shop.owedPacking.Load() {
		var has bool
		require.NoError(t, m.db.QueryRow(m.ctx, sqlPackingHasRelease, m.topics.Orders, m.topics.Tariffs).Scan(&has))
		m.shop.owedPacking.Store(has)
	}
}

// stopAll stops all members cleanly.
func (m *market) stopAll(t *testing.T) {
	t.Helper()
	for _, s := range m.slots {
		if s.process != nil {
			s.process.ask()
		}
	}
	for _, s := range m.slots {
		if s.process != nil {
			s.process.stop(t)
		}
	}
	m.workers = nil
}

// logLines returns lines of the logs of members that have a text, at most some.
func (m *market) logLines(text string, most int) (lines []string) {
	names, _ := filepath.Glob(filepath.Join(m.logs, "*")) // the pattern is right
	for _, name := range names {
		file, err := os.ReadFile(name)
		if err != nil {
			continue // the rows say enough
		}
		for line := range strings.Lines(string(file)) {
			if len(lines) < most && strings.Contains(line, text) {
				lines = append(lines, filepath.Base(name)+": "+strings.TrimSpace(line))
			}
		}
	}
	return lines
}
