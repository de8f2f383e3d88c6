package wakeup

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/perpool"
)

// Probes are the probes of all relays on a pool: short statements that show whether a poll may find something.
// Relays that probe at the same time share one statement. It is safe for concurrent use.
type Probes struct {
	Ticks

	db      func() *pgxpool.Pool // nil once the pool is no longer used
	running chan struct{}        // whose statement runs

	mu   sync.Mutex
	next *probe // that other goroutines may join; nil if there is none
}

// probe is one statement.
type probe struct {
	sequences []string
	done      chan struct{} // closed once the rest is known
	snapshot  string
	drawn     []int64 // of each sequence
	err       error
}

// errUnanswered means that the goroutine that had to run a statement stopped, or panicked in a function of the host.
var errUnanswered = errors.New("the goroutine that asked for all has ended")

var allProbes perpool.Registry[*Probes]

// ProbesOf returns the probes of a pool.
func ProbesOf(db *pgxpool.Pool) *Probes {
	return allProbes.Get(db, "", func(db func() *pgxpool.Pool) *Probes {
		return &Probes{db: db, running: make(chan struct{}, 1)}
	})
}

// sqlProbe costs a fifth of a poll that finds nothing, and two microseconds for each sequence. It takes its snapshot
// before it reads the sequences.
const sqlProbe = `
SELECT pg_current_snapshot()::text,
       ARRAY(SELECT coalesce(pg_catalog.pg_sequence_last_value(s.name::regclass), 0) FROM pg_catalog.unnest($1::text[]) WITH ORDINALITY AS s(name, n) ORDER BY s.n)`

// Probe returns the present snapshot, and then the last id that a sequence has drawn.
func (g *Probes) Probe(ctx context.Context, sequence string) (snapshot string, drawn int64, err error) {
	g.probed()
	mine, n, first := g.join(sequence)
	if first {
		g.run(ctx, mine)
	}
	select {
	case <-mine.done:
	case <-ctx.Done():
		return "", 0, ctx.Err()
	}
	if mine.err != nil {
		return "", 0, fmt.Errorf("probe: %w", mine.err)
	}
	return mine.snapshot, mine.drawn[n], nil
}

// join returns the next statement, and the index of a sequence in it. The first goroutine to join has to run the
// statement.
func (g *Probes) join(sequence string) (next *probe, n int, first bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if first = g.next == nil; first {
		g.next = &probe{done: make(chan struct{}), err: errUnanswered}
	}
	g.next.sequences = append(g.next.sequences, sequence)
	return g.next, len(g.next.sequences) - 1, first
}

// run runs a statement when the one before has ended. Until then other goroutines may join it.
func (g *Probes) run(ctx context.Context, mine *probe) {
	defer close(mine.done)
	select {
	case g.running <- struct{}{}:
		defer func() { <-g.running }()
	case <-ctx.Done():
	}
	g.mu.Lock()
	g.next = nil
	g.mu.Unlock()
	db := g.db()
	if ctx.Err() != nil || db == nil {
		return
	}
	mine.err = db.QueryRow(ctx, sqlProbe, mine.sequences).Scan(&mine.snapshot, &mine.drawn)
}

// Ticks are the moments at which relays on a pool probe, the same for all of them. The more relays have probed
// lately, the longer the ticks: together, the relays use only a small part of a processor. The zero value is ready
// to use, and safe for concurrent use.
type Ticks struct {
	mu     sync.Mutex
	next   time.Time
	every  time.Duration
	asked  int // since the last tick
	relays int
}

const (
	probeWait = time.Millisecond      // from tick to tick, at least
	relayWait = 50 * time.Microsecond // for each relay that probes
	// recordWithin is how long it may take to save the position when no event follows: at least,
	// and recordEachWait for each relay. Until then a crash repeats the events. The poll that finds
	// the next event saves the position too, so an event within that time saves a poll.
	recordWithin   = 100 * time.Millisecond
	recordEachWait = time.Millisecond
)

// Join counts a relay that polls for events, until done is called.
func (t *Ticks) Join() (done func()) {
	add := func(n int) {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.relays += n
	}
	add(1)
	return sync.OnceFunc(func() { add(-1) })
}

// probed counts a relay that probes.
func (t *Ticks) probed() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.asked++
}

// wait returns how long it is until the next tick, and how long it is from tick to tick.
func (t *Ticks) wait(now time.Time) (next, every time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !now.Before(t.next) {
		t.every = max(probeWait, time.Duration(t.asked)*relayWait)
		t.next, t.asked = now.Add(t.every), 0
	}
	return t.next.Sub(now), t.every
}

// record returns how long it may take to save the position.
func (t *Ticks) record() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return max(recordWithin, time.Duration(t.relays)*recordEachWait)
}
