package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/tools/pgserver"
	"github.com/stretchr/testify/require"
)

const (
	busWorkers = 3
	busFailing = "billing" // whose handlers fail for a while, and which has poison events
)

var busGroups = []string{"stock", busFailing}

// The effects of handlers in PostgreSQL happen once and in the order of each key, while the
// processes of two groups of workers are killed, stopped, frozen past their leases and cut off from
// PostgreSQL, which crashes too. Handlers without a transaction see everything, for the first time
// in order. An event that ends its process is dead after its attempts, and no other one is. No
// delivery is stuck at any time.
func TestKilledWorkers(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	v := busResult{Seed: seedOf(t), Mishaps: map[string]int{}}
	b := newBus(t, v.Seed)
	mishaps := busPlan(v.Seed, *groupKills)
	// A fifth of the events are there before the workers, more of them than these take at once.
	each := *groupRecords * 4 / 5 / len(mishaps)
	b.awaitRecorded(t, b.sell(*groupRecords/5))
	b.replace(t)
	for _, m := range mishaps {
		b.run(t, m, each)
		v.Mishaps[m.kind]++
	}
	b.awaitRecorded(t, b.sell(max(0, *groupRecords-b.events(t))))
	b.awaitHandled(t)
	b.stop(t, slices.Clone(b.members)...)
	b.compare(t, &v)
	t.Logf("%s", v)
	require.NoError(t, v.Err())
	require.NoError(t, v.missing())
	require.GreaterOrEqual(t, v.Kills, *groupKills)
}

// busResult is what TestKilledWorkers prints in the end.
type busResult struct {
	Seed        uint64         `json:"seed"`
	Seconds     float64        `json:"seconds"`
	Mishaps     map[string]int `json:"mishaps"`    // how often each kind happened, see mishapKinds
	Kills       int            `json:"kills"`      // processes that got SIGKILL
	SelfKills   int            `json:"self_kills"` // that an event has ended
	Stops       int            `json:"stops"`      // that were stopped cleanly
	Freezes     int            `json:"freezes"`
	LongestStop int64          `json:"longest_stop_ms"`
	Events      int            `json:"events"`     // committed, without those that have no handler
	Deliveries  int            `json:"deliveries"` // of these
	Poisons     int            `json:"poisons"`    // events that end their process
	Retried     int            `json:"retried"`    // deliveries of more than one attempt
	RepeatsSeen int            `json:"repeats_seen"`

	WrongCounts     int `json:"wrong_counts"`     // of shelves and effects
	WrongNotes      int `json:"wrong_notes"`      // actions too many or too few in event_handled
	WrongDeliveries int `json:"wrong_deliveries"` // missing, doubled, or not DONE in the end
	WrongDead       int `json:"wrong_dead"`       // dead without being poison, or poison that is not
	Unseen          int `json:"unseen"`           // changes that the handler without a transaction never saw
	Disorder        int `json:"disorder"`         // effects and first sights out of order
	Stuck           int `json:"stuck"`            // deliveries of workers that are gone which no worker took over
	Headless        int `json:"headless"`         // keys whose deliveries all waited
	LateStops       int `json:"late_stops"`       // workers whose Run did not return within StopTimeout

	Delayed delayedResult `json:"delayed"`
	Expired expiredResult `json:"expired"` // deliveries of events that expire soon

	// LongestGap is the longest time without an effect of a group that had something to do and a worker
	// which ran, and LongestDue the longest time that a delivery was due.
	LongestGap int64 `json:"longest_gap_ms"`
	LongestDue int64 `json:"longest_due_ms"`
}

// String returns the result as one line of JSON.
func (v busResult) String() string { return lineOf(v) }

// Err says what is wrong, or returns nil.
func (v busResult) Err() error {
	if v.WrongCounts+v.WrongNotes+v.WrongDeliveries+v.WrongDead+v.Unseen+v.Disorder+v.Stuck+v.Headless+v.LateStops+v.Delayed.wrong()+v.Expired.wrong() > 0 {
		return fmt.Errorf("faults: %s", v)
	}
	return nil
}

// missing says what did not happen though it was to, or returns nil.
func (v busResult) missing() error {
	for _, m := range mishapKinds() {
		if v.Mishaps[m.kind] == 0 {
			return fmt.Errorf("faults: %q did not happen: %s", m.kind, v)
		}
	}
	if min(v.Poisons, v.SelfKills, v.Retried, v.Deliveries, v.Delayed.Events, v.Expired.InTime, v.Expired.Expired) == 0 {
		return fmt.Errorf("faults: no event has ended its process, or nothing was tried again, was delayed or expired: %s", v)
	}
	return nil
}

// bus is groups of workers that are processes of their own, and what they work on.
type bus struct {
	*crew
	start   time.Time
	server  *pgserver.Server
	url     string
	db      *pgxpool.Pool
	shop    *busShop
	signs   string // a folder, see busSpec
	members []*busWorker
	watch   busWatch

	selfKills, stops, freezes, late int
	longestStop                     time.Duration
}

// busWorker is a process with a worker of a group.
type busWorker struct {
	*worker
	group string
}

// newBus returns groups without workers.
func newBus(t *testing.T, seed uint64) *bus {
	t.Helper()
	b := &bus{crew: newCrew(t), start: time.Now(), signs: t.TempDir(), server: startServer(t, nil)}
	b.url = b.server.URL() + "&deadlock_timeout=20ms"
	cfg, err := pgxpool.ParseConfig(b.url)
	require.NoError(t, err)
	cfg.MaxConns = 10
	b.db = openPool(t, cfg)
	// Rows of deliveries change often.
	for _, sql := range []string{`ALTER SYSTEM SET autovacuum = on`, `ALTER SYSTEM SET autovacuum_naptime = '5s'`, `SELECT pg_reload_conf()`} {
		_, err := b.db.Exec(b.ctx, sql)
		require.NoError(t, err)
	}
	require.NoError(t, outbox.Migrate(b.ctx, b.db, outbox.MigrateConfig{}))
	b.shop, err = newBusShop(b.ctx, b.db, seed)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(b.signs, signPoisoned+busFailing), nil, 0o600))
	b.watch = newBusWatch()
	return b
}

// of returns the workers of a group.
func (b *bus) of(group string) (all []*busWorker) {
	for _, w := range b.members {
		if w.group == group {
			all = append(all, w)
		}
	}
	return all
}

func (b *bus) forget(w *busWorker) {
	b.members = slices.DeleteFunc(b.members, func(m *busWorker) bool { return m == w })
	b.workers = slices.DeleteFunc(b.workers, func(m *worker) bool { return m == w.worker })
}

// replace starts workers for those that are gone, and waits until they run.
func (b *bus) replace(t *testing.T) {
	t.Helper()
	for _, group := range busGroups {
		for len(b.of(group)) < busWorkers {
			b.launchOne(t, group)
		}
	}
}

func (b *bus) launchOne(t *testing.T, group string) {
	t.Helper()
	b.started++
	ready := filepath.Join(b.signs, fmt.Sprintf("ready-%d", b.started))
	b.launch(t, busVar, busSpec{Postgres: b.url + "&synchronous_commit=off&application_name=" + group, Group: group, Signs: b.signs, Ready: ready})
	w := &busWorker{b.workers[len(b.workers)-1], group}
	w.mortal = group == busFailing
	b.members = append(b.members, w)
	begun := func() bool { _, err := os.Stat(ready); return err == nil }
	require.True(t, b.crew.await(t, testenv.Patience, begun), "a worker does not come up")
}

// reap replaces workers that an event has ended.
func (b *bus) reap(t *testing.T) {
	t.Helper()
	for _, w := range slices.Clone(b.members) {
		if w.mortal && w.isOver() {
			b.selfKills++
			b.forget(w)
			b.launchOne(t, w.group)
		}
	}
}

// isOver reports whether a process has ended.
func (w *worker) isOver() bool {
	select {
	case <-w.done:
		return true
	default:
		return false
	}
}

// killedItself reports whether a process that has ended got SIGKILL.
func (w *worker) killedItself() bool {
	status, ok := w.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}

// sleep is crew.sleep, and looks after the groups meanwhile.
func (b *bus) sleep(t *testing.T, d time.Duration) {
	t.Helper()
	for end := time.Now().Add(d); ; {
		b.look(t)
		if !time.Now().Before(end) {
			return
		}
		b.crew.sleep(t, min(time.Until(end), 20*time.Millisecond))
	}
}

// await is crew.await, and looks after the groups meanwhile.
func (b *bus) await(t *testing.T, limit time.Duration, so func() bool) bool {
	t.Helper()
	for end := time.Now().Add(limit); !so(); {
		if time.Now().After(end) {
			return false
		}
		b.sleep(t, 50*time.Millisecond)
	}
	return true
}

// sell records n events meanwhile.
func (b *bus) sell(n int) <-chan error {
	recorded := make(chan error, 1)
	go func() { recorded <- b.shop.sell(b.ctx, n) }()
	return recorded
}

func (b *bus) awaitRecorded(t *testing.T, recorded <-chan error) {
	t.Helper()
	var err error
	done := func() bool {
		select {
		case err = <-recorded:
			return true
		default:
			return false
		}
	}
	require.True(t, b.await(t, 2*stall, done), "events are not recorded")
	require.NoError(t, err)
}

// sqlCounted counts the deliveries that have been counted, and those that will not be: the event has expired, or ends
// its process.
const sqlCounted = `SELECT count(*) FROM event_delivery WHERE action LIKE '%COUNTED' AND status IN ('DONE', 'DEAD')`

// awaitHandled waits until everything is handled.
func (b *bus) awaitHandled(t *testing.T) {
	t.Helper()
	began := time.Now()
	// It may be much: as long as something is done it goes on.
	for last, lastAt := -1, time.Now(); ; {
		all := b.events(t) * len(busGroups)
		done := b.count(t, sqlCounted)
		open := b.count(t, `SELECT count(*) FROM event_delivery WHERE status IN ('PENDING', 'PARKED', 'PROCESSING')`)
		if done >= all && open == 0 {
			t.Logf("%5.1f s: all %d handled after %v", time.Since(b.start).Seconds(), all, time.Since(began).Round(time.Millisecond))
			return
		}
		if done+open != last {
			last, lastAt = done+open, time.Now()
		}
		if time.Since(lastAt) > stall {
			t.Errorf("%d of %d are done and %d deliveries open, and nothing happens for %v", done, all, open, stall)
			b.show(t, `status IN ('PENDING', 'PARKED', 'PROCESSING')`)
			return
		}
		b.sleep(t, 100*time.Millisecond)
	}
}

// events returns how many events are committed that have handlers.
func (b *bus) events(t *testing.T) int {
	t.Helper()
	return b.count(t, `SELECT sum(version)::bigint FROM item`)
}

func (b *bus) count(t *testing.T, sql string, args ...any) (n int) {
	t.Helper()
	var found *int
	require.NoError(t, b.db.QueryRow(b.ctx, sql, args...).Scan(&found), sql)
	if found == nil {
		return 0
	}
	return *found
}
