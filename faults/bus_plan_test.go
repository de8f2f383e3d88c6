package faults

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// mishap is something that happens to workers or to PostgreSQL while events are recorded.
type mishap struct {
	what  string
	kind  string // under which it is counted; the short form has one of each
	times int    // how often in a round
	kills int    // how many processes get SIGKILL
	min   time.Duration
	max   time.Duration // until those that are gone are replaced, chosen at random
	group string        // "": chosen at random
	begin func(*bus, *testing.T, mishap)
	end   func(*bus, *testing.T, mishap) // nil: it is over when it has begun

	// What chance has decided, see incident.
	lasts time.Duration
	delay time.Duration
	first int // the worker of the group that it is about
	wait  bool
}

func mishapKinds() []mishap {
	const over, dead = 3 * busLease / 2, 3 * busLease
	return []mishap{
		{what: "kill a worker", kind: "kills", times: 6, kills: 1, max: busLease, begin: (*bus).killSome},
		{what: "kill two workers", kind: "kills", times: 1, kills: 2, max: busLease, begin: (*bus).killSome},
		{what: "kill all workers of a group", kind: "kills_of_all", times: 1, kills: busWorkers, max: busLease, begin: (*bus).killSome},
		{what: "stop a worker", kind: "stops", times: 2, max: busLease, begin: (*bus).stopOne},
		{what: "stop all workers of a group", kind: "stops", times: 1, max: busLease, begin: (*bus).stopAll},
		{what: "stop all workers of a group while handlers are slow", kind: "slow_stops", times: 1, max: busLease, begin: (*bus).stopAllSlow},
		{what: "freeze a worker until its leases are over", kind: "freezes", times: 3, min: over, max: dead, begin: (*bus).freeze, end: (*bus).thaw},
		{what: "freeze a worker briefly", kind: "short_freezes", times: 1, min: busLease / 10, max: busLease / 2, begin: (*bus).freeze, end: (*bus).thaw},
		{what: "kill a worker that is frozen", kind: "kills_of_frozen", times: 1, kills: 1, min: over, max: dead, begin: (*bus).freeze, end: (*bus).killSome},
		{what: "end the sessions of all workers of a group", kind: "terminations", times: 2, begin: (*bus).terminate},
		{what: "kill PostgreSQL, and start it again", kind: "crashes", times: 1, max: busLease, begin: (*bus).crash},
		{what: "kill a backend of PostgreSQL", kind: "backend_kills", times: 1, max: busLease, begin: (*bus).killBackend},
		{what: "have handlers fail", kind: "failures", times: 2, min: busLease / 2, max: dead, group: busFailing, begin: (*bus).failHandlers, end: (*bus).mendHandlers},
		{what: "record an event that ends its process", kind: "poisons", times: 1, group: busFailing, begin: (*bus).poison},
	}
}

// busPlan is groupPlan for workers.
func busPlan(seed uint64, kills int) (mishaps []mishap) {
	rng := rand.New(rand.NewPCG(seed, 1<<35))
	if kills == 0 {
		seen := map[string]bool{}
		for _, m := range busRound(rng) {
			if !seen[m.kind] {
				m.lasts = m.min
				mishaps = append(mishaps, m)
			}
			seen[m.kind] = true
		}
		return mishaps
	}
	for planned := 0; planned < kills; {
		for _, m := range busRound(rng) {
			planned += m.kills
			mishaps = append(mishaps, m)
		}
	}
	return mishaps
}

func busRound(rng *rand.Rand) (mishaps []mishap) {
	for _, m := range mishapKinds() {
		for range m.times {
			m.lasts = m.min + time.Duration(rng.Int64N(int64(m.max-m.min)+1))
			m.delay = time.Duration(rng.Int64N(int64(300 * time.Millisecond)))
			m.first = rng.IntN(busWorkers)
			m.wait = rng.IntN(4) == 0
			if group := busGroups[rng.IntN(len(busGroups))]; m.group == "" {
				m.group = group
			}
			mishaps = append(mishaps, m)
		}
	}
	rng.Shuffle(len(mishaps), func(i, j int) { mishaps[i], mishaps[j] = mishaps[j], mishaps[i] })
	return mishaps
}

// run has a mishap happen while n events are recorded.
func (b *bus) run(t *testing.T, m mishap, n int) {
	t.Helper()
	t.Logf("%5.1f s: %s, %s, for %v (%d kills so far)", time.Since(b.start).Seconds(), m.group, m.what, m.lasts.Round(time.Millisecond), b.kills)
	recorded := b.sell(n)
	b.sleep(t, m.delay)
	m.begin(b, t, m)
	b.sleep(t, m.lasts)
	if m.end != nil {
		m.end(b, t, m)
	}
	b.replace(t)
	b.awaitRecorded(t, recorded)
	if m.wait {
		b.awaitHandled(t)
	}
}

func (b *bus) killSome(_ *testing.T, m mishap) {
	all := b.of(m.group)
	for i := range m.kills {
		victim := all[(m.first+i)%len(all)]
		b.kill(victim.worker)
		b.forget(victim)
	}
}

func (b *bus) stopOne(t *testing.T, m mishap) {
	t.Helper()
	b.stop(t, b.of(m.group)[m.first])
}

func (b *bus) stopAll(t *testing.T, m mishap) {
	t.Helper()
	b.stop(t, b.of(m.group)...)
}

// stopAllSlow stops all workers when each has more slow events than it can handle until it has to
// be back.
func (b *bus) stopAllSlow(t *testing.T, m mishap) {
	t.Helper()
	b.shop.pause.Store(int64(pause))
	recorded := b.sell(40)
	b.awaitRecorded(t, recorded)
	b.shop.pause.Store(0)
	b.sleep(t, pause/2)
	b.stop(t, b.of(m.group)...)
}

func (b *bus) stop(t *testing.T, leaving ...*busWorker) {
	t.Helper()
	began := time.Now()
	for _, w := range leaving {
		w.ask()
	}
	for _, w := range leaving {
		w.stop(t)
		if took := time.Since(began); took > maxStop {
			b.late++
			t.Logf("a worker of %s stopped in %v", w.group, took)
		}
		b.forget(w)
	}
	b.longestStop = max(b.longestStop, time.Since(began))
	b.stops += len(leaving)
}

func (b *bus) freeze(t *testing.T, m mishap) {
	t.Helper()
	b.of(m.group)[m.first].freeze(t)
	b.freezes++
}

func (b *bus) thaw(t *testing.T, m mishap) {
	t.Helper()
	b.of(m.group)[m.first].thaw(t)
}

func (b *bus) terminate(t *testing.T, m mishap) {
	t.Helper()
	_, err := b.db.Exec(b.ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1`, m.group)
	require.NoError(t, err)
}

// crash kills PostgreSQL, which may lose transactions that were committed last.
func (b *bus) crash(t *testing.T, _ mishap) {
	t.Helper()
	require.NoError(t, b.server.Kill())
	require.NoError(t, b.server.Restart(b.ctx))
	b.awaitPostgres(t)
}

// killBackend has PostgreSQL end all sessions and recover; its start time stays.
func (b *bus) killBackend(t *testing.T, m mishap) {
	t.Helper()
	var pid int
	require.NoError(t, b.db.QueryRow(b.ctx, `SELECT coalesce(min(pid), pg_backend_pid()) FROM pg_stat_activity WHERE application_name = $1`, m.group).Scan(&pid))
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	b.awaitPostgres(t)
}

func (b *bus) awaitPostgres(t *testing.T) {
	t.Helper()
	b.db.Reset()
	require.True(t, b.await(t, testenv.Patience, func() bool { return b.db.Ping(b.ctx) == nil }), "PostgreSQL does not come back")
}

func (b *bus) failHandlers(t *testing.T, m mishap) {
	t.Helper()
	require.NoError(t, os.WriteFile(filepath.Join(b.signs, signFailing+m.group), nil, 0o600))
}

func (b *bus) mendHandlers(t *testing.T, m mishap) {
	t.Helper()
	require.NoError(t, os.Remove(filepath.Join(b.signs, signFailing+m.group)))
}

// poison records an event that ends each process which handles it, and waits until it is dead.
// Processes that end are replaced meanwhile.
func (b *bus) poison(t *testing.T, _ mishap) {
	t.Helper()
	poisons := func() int { return b.count(t, `SELECT count(*) FROM poison`) }
	for before := poisons(); poisons() == before; {
		b.shop.poison.Store(1)
		b.awaitRecorded(t, b.sell(20))
	}
	b.shop.poison.Store(0)
	dead := func() bool {
		return b.count(t, `SELECT count(*) FROM event_delivery WHERE consumer_group = $1 AND status = 'DEAD'`, busFailing) >= poisons()
	}
	if !b.await(t, stall, dead) {
		t.Errorf("an event that ends its process is not given up within %v", stall)
	}
}

// Each kind of mishap is in the short form once, and the long one kills as many as it must.
func TestBusPlan(t *testing.T) {
	t.Parallel()
	kinds := map[string]int{}
	for _, m := range busPlan(1, 0) {
		kinds[m.kind]++
	}
	for _, m := range mishapKinds() {
		require.Equal(t, 1, kinds[m.kind], m.kind)
	}
	kills := 0
	for _, m := range busPlan(1, 50) {
		kills += m.kills
	}
	require.GreaterOrEqual(t, kills, 50)
	require.True(t, slices.EqualFunc(busPlan(7, 50), busPlan(7, 50), func(a, b mishap) bool { return a.what == b.what && a.delay == b.delay }))
}
