package faults

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/tools/pgserver"
	"github.com/stretchr/testify/require"
)

// The primary dies and its standby takes its place. Clients know both addresses
// and take the one that can be written.
func TestPromotedStandby(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	t.Run("synchronous", testSynchronousStandby)
	for name, story := range map[string]func(*testing.T, *pair) []oracle.Event{
		// The relay has sent events that the standby never received, under
		// transaction ids and ids that it gives out again.
		"lagging, after windows": func(t *testing.T, p *pair) (lost []oracle.Event) {
			for range 10 {
				p.burnIDs(t, 5)
				events := p.commit(t, "on", 10)
				p.requireArrival(t, events)
				lost = append(lost, events...)
			}
			return lost
		},
		// The relay has only seen transaction ids that are given out again.
		"lagging, after idle polls": func(t *testing.T, p *pair) []oracle.Event {
			p.burnIDs(t, 50)
			p.awaitPolls(t)
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) { testLaggingStandby(t, story) })
	}
}

// Nothing that was confirmed is lost, and nothing is sent that is not there.
func testSynchronousStandby(t *testing.T) {
	t.Parallel()
	p := newPair(t, "read-write")
	p.waitForStandby(t)
	p.relay(t, slog.DiscardHandler)
	p.relay(t, slog.DiscardHandler)
	stop := p.stream(t)
	p.awaitArrivals(t, 300)
	p.failOver(t)
	p.awaitArrivals(t, 300)
	p.requireRight(t, stop())
	p.requireEpochsInOrder(t)
}

// What the standby never received is lost with its business data. What it holds
// arrives, whatever ids it was given.
func testLaggingStandby(t *testing.T, story func(*testing.T, *pair) []oracle.Event) {
	t.Parallel()
	p := newPair(t, "read-write")
	log := &warnings{}
	p.relay(t, log)
	p.requireArrival(t, p.commit(t, "on", 3))
	p.cutOff(t)
	lost := story(t, p)
	nextID, lastEvent := p.nextID(t), p.lastEvent(t)
	reunite := p.keepApart(t) // or the relay would see the ids before they are given out again
	p.failOver(t)
	require.Less(t, p.nextID(t), nextID, "the failover was meant to reuse transaction ids")
	events := p.commit(t, "on", 1)
	if len(lost) > 0 {
		require.LessOrEqual(t, p.lastEvent(t), lastEvent, "the failover was meant to reuse ids of events")
	}
	for p.nextID(t) <= nextID || p.lastEvent(t) <= lastEvent { // each is given to a new event
		events = append(events, p.commit(t, "on", 1)...)
	}
	reunite()
	p.requireArrival(t, events)
	there := p.recorded(t)
	for _, e := range lost {
		_, kept := there[e.ID]
		require.False(t, kept, "the failover was meant to lose it")
	}
	p.requireAll(t)
	p.requireEpochsInOrder(t)
	if len(lost) > 0 {
		require.True(t, log.mention("cursor"), "the relay did not notice: %s", log)
	}
}

// pair is a site whose server has a standby.
type pair struct {
	*site
	standby *pgserver.Server
	onOther *pgxpool.Pool // connects to the standby only
}

// newPair returns a pair whose clients connect to a server of which something is
// so, or to any.
func newPair(t *testing.T, sessions string) *pair {
	t.Helper()
	return newPairBeside(t, sessions, testenv.Brokers(t))
}

// newPairBeside is newPair with brokers of the test's own.
func newPairBeside(t *testing.T, sessions string, brokers []string) *pair {
	t.Helper()
	primary := startServer(t, nil)
	standby := startServer(t, primary)
	p := &pair{standby: standby}
	p.site = newSiteBeside(t, primary, fmt.Sprintf("postgres://%s:%s@127.0.0.1:%d,127.0.0.1:%d/postgres?sslmode=disable&target_session_attrs=%s",
		pgserver.User, pgserver.Password, primary.Port(), standby.Port(), sessions), brokers)
	var err error
	p.onOther, err = pgxpool.New(context.Background(), standby.URL())
	require.NoError(t, err)
	t.Cleanup(p.onOther.Close)
	p.awaitReplay(t)
	return p
}

// awaitReplay waits until the standby has all that was written so far.
func (p *pair) awaitReplay(t *testing.T) {
	t.Helper()
	var written string
	require.NoError(t, p.db.QueryRow(context.Background(), `SELECT pg_current_wal_flush_lsn()::text`).Scan(&written))
	p.awaitStandby(t, `SELECT pg_last_wal_replay_lsn() >= $1::pg_lsn`, written)
}

// awaitStandby waits until a query on the standby returns true.
func (p *pair) awaitStandby(t *testing.T, sql string, args ...any) {
	t.Helper()
	require.Eventually(t, func() (yes bool) {
		require.NoError(t, p.onOther.QueryRow(context.Background(), sql, args...).Scan(&yes))
		return yes
	}, testenv.Patience, 10*time.Millisecond)
}

// waitForStandby makes every commit wait until the standby has it.
func (p *pair) waitForStandby(t *testing.T) {
	t.Helper()
	alterSystem(t, p.db, `SET synchronous_standby_names = '*'`)
	require.Eventually(t, func() (yes bool) {
		require.NoError(t, p.db.QueryRow(context.Background(), `SELECT bool_or(sync_state = 'sync') FROM pg_stat_replication`).Scan(&yes))
		return yes
	}, testenv.Patience, 10*time.Millisecond)
}

// cutOff ends the replication, after the standby has received all so far.
func (p *pair) cutOff(t *testing.T) {
	t.Helper()
	p.flush(t)
	p.awaitReplay(t)
	alterSystem(t, p.onOther, `SET primary_conninfo = ''`)
	p.awaitStandby(t, `SELECT NOT EXISTS (SELECT FROM pg_stat_wal_receiver)`)
}

// alterSystem changes a setting of a server, for sessions that run as well.
func alterSystem(t *testing.T, db *pgxpool.Pool, setting string) {
	t.Helper()
	for _, sql := range []string{`ALTER SYSTEM ` + setting, `SELECT pg_reload_conf()`} {
		_, err := db.Exec(context.Background(), sql)
		require.NoError(t, err)
	}
}

// failOver kills the primary and promotes the standby.
func (p *pair) failOver(t *testing.T) {
	t.Helper()
	require.NoError(t, p.server.Kill())
	p.awaitStandby(t, `SELECT pg_promote()`)
}

// lastEvent returns the highest id in outbox.
func (p *pair) lastEvent(t *testing.T) (id int64) {
	t.Helper()
	require.Eventually(t, func() bool {
		return p.db.QueryRow(context.Background(), `SELECT max(id) FROM outbox`).Scan(&id) == nil
	}, testenv.Patience, 10*time.Millisecond)
	return id
}

// warnings is a log that keeps what is said at WARN and above.
type warnings struct {
	mu   sync.Mutex
	said []string
}

func (w *warnings) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelWarn }

func (w *warnings) Handle(_ context.Context, r slog.Record) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.said = append(w.said, r.Message)
	return nil
}

func (w *warnings) WithAttrs([]slog.Attr) slog.Handler { return w }

func (w *warnings) WithGroup(string) slog.Handler { return w }

// String returns all that was said.
func (w *warnings) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Join(w.said, "; ")
}

// mention reports whether a warning contains a text.
func (w *warnings) mention(what string) bool { return strings.Contains(w.String(), what) }
