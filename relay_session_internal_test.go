package outbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/outage"
)

// The tests have n events with the ids from 1 on, in batches of two. Sent are the ids of
// each batch. Faults of the store are "operation: fault", each for one call of the
// operation, in this order:
//
//	down   PostgreSQL does not answer
//	stale  the newest row of the cursor is another one
//	lost   the lease is
//	unsure PostgreSQL has done it, but the answer gets lost
//
// and some that only one operation has. The session is told to stop when it finds nothing
// to send.
var sessionTests = []struct {
	name   string
	events int
	faults []string
	plays  []string // outcomes of each batch, where not all is sent; stop: the session is told to
	sent   string
	at     string // where the cursor is at the end: last id, of the window up to
	failed string // ids with their status, as they were written
	err    error
	log    string // has to contain
	waits  bool   // it takes some time
}{
	{name: "nothing to send", at: "0"},
	{name: "a window of less than a batch", events: 1, sent: "1", at: "1"},
	{name: "a window that is read in batches", events: 5, sent: "12 34 5", at: "5"},

	// What the cursor says is another.
	{name: "the cursor is stale when a window opens: it is loaded again", events: 3, faults: []string{"open: stale"}, sent: "12 3", at: "3"},
	{name: "the cursor is stale when it moves: from where it is, all is sent again", events: 3, faults: []string{"move: stale"}, sent: "12 12 3", at: "3"},
	{name: "the cursor was moved by another process", events: 5, faults: []string{"move: moved"}, sent: "12 5", at: "5", log: "cursor is not where it was left"},
	{name: "the newest rows of the cursor were lost", events: 3, faults: []string{"move: rolled back"}, sent: "12 12 3", at: "3", log: "PostgreSQL has lost the newest rows"},
	{name: "whoever finds the cursor stale proves the lease first", events: 3, faults: []string{"move: stale", "renew: lost"}, sent: "12", err: errLeaseLost, at: "0/3"},
	{name: "the cursor is one of another cluster: it is rebased", events: 3, faults: []string{"load: other cluster"}, sent: "12 3", at: "3", log: "restored from another cluster"},
	{name: "the sequence is behind: an operator has to decide", events: 3, faults: []string{"load: sequence behind"}, err: ErrSequenceBehind, at: "0"},

	// PostgreSQL fails.
	{name: "an outage when the cursor is loaded", events: 3, faults: []string{"load: down", "load: down", "keys: down"}, sent: "12 3", at: "3", log: "PostgreSQL works again", waits: true},
	{name: "an outage when a window opens", events: 3, faults: []string{"open: down"}, sent: "12 3", at: "3", log: "PostgreSQL works again", waits: true},
	{name: "an outage when the cursor moves: nothing is sent again", events: 5, faults: []string{"move: down", "move: down"}, sent: "12 34 5", at: "5", waits: true},
	{name: "a move of unknown outcome that was done: it turns out to be stale, and nothing is sent again", events: 5, faults: []string{"move: unsure"}, sent: "12 34 5", at: "5", waits: true},
	{name: "an opening of unknown outcome that was done", events: 3, faults: []string{"open: unsure"}, sent: "12 3", at: "3", waits: true},
	{name: "a prefetch fails: the batch is fetched when it is needed", events: 5, faults: []string{"fetch: works", "fetch: down"}, sent: "12 34 5", at: "5"},
	{name: "a fetch fails", events: 5, faults: []string{"fetch: down"}, sent: "12 34 5", at: "5", waits: true},
	{name: "the rest of the window cannot be read", events: 5, faults: []string{"remaining: down"}, sent: "12 34 5", at: "5", waits: true},
	{name: "a batch is too large: half of it is fetched", events: 5, faults: []string{"fetch: too large"}, sent: "1 2 34 5", at: "5"},
	{name: "the tables are gone", events: 3, faults: []string{"open: undefined"}, err: ErrNotMigrated, at: "0"},

	// The lease is lost.
	{name: "the lease is lost when the cursor is loaded", events: 3, faults: []string{"load: lost"}, err: errLeaseLost, at: "0"},
	{name: "the lease is lost when a window opens", events: 3, faults: []string{"open: lost"}, err: errLeaseLost, at: "0"},
	{name: "the lease is lost when a batch is sent: what has no outcome is not passed", events: 5, plays: []string{"", "+.lost"}, sent: "12 34", err: errLeaseLost, at: "2/5"},
	{name: "the lease ends while PostgreSQL does not answer", events: 3, faults: []string{"move: down and lease over"}, sent: "12", err: errLeaseLost, at: "0/3", waits: true},

	// Not all gets through.
	{name: "told to stop in the middle of a batch: the cursor moves behind what was sent", events: 5, plays: []string{"", "+.stop"}, sent: "12 34", at: "3/5"},
	{name: "told to stop before anything of a batch was sent", events: 5, plays: []string{"", "..stop"}, sent: "12 34", at: "2/5"},
	{name: "told to stop when all of a window was sent: the cursor moves all the same", events: 2, plays: []string{"++stop"}, sent: "12", at: "2/2"},
	{name: "a rejected event is written down, and its key waits", events: 5, plays: []string{"x+", "u+"}, sent: "12 34 5", at: "5", failed: "1 failed, 3 waiting", log: "event rejected"},
	{name: "of one key the first is the head", events: 4, plays: []string{"ub", "p+"}, sent: "12 34", at: "4", failed: "1 waiting, 2 waiting, 3 waiting"},
	{name: "failures behind an event without an outcome are sent again", events: 3, plays: []string{".xstop"}, sent: "12", at: "0/3"},
	{name: "the last batch of a window has failures", events: 2, plays: []string{"+x"}, sent: "12", at: "2", failed: "2 failed", log: "event rejected"},
	{name: "an outage when failures are written down: they are, once", events: 2, faults: []string{"move: down"}, plays: []string{"+x"}, sent: "12", at: "2", failed: "2 failed", waits: true},
	{name: "what was rejected while the cursor was stale is sent again", events: 2, faults: []string{"move: stale"}, plays: []string{"+x"}, sent: "12 12", at: "2"},
}

func TestSession(t *testing.T) {
	t.Parallel()
	for _, test := range sessionTests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFakeStore(t, test.events, test.faults)
				f.plays = test.plays
				start := time.Now()
				err := f.run()
				if test.err == nil {
					require.NoError(t, err)
				} else {
					require.ErrorIs(t, err, test.err)
				}
				require.Empty(t, f.faults, "faults that did not come about")
				require.Equal(t, test.sent, strings.Join(f.sent, " "))
				require.Equal(t, test.at, f.at())
				require.Equal(t, test.failed, strings.Join(f.failed, ", "))
				require.Contains(t, f.log.String(), test.log)
				require.Equal(t, test.waits, time.Since(start) > 0, "%v", time.Since(start))
			})
		})
	}
}

// What the parking holds are the rows of outbox_failed, and the events on their way there.
func TestSessionParks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFakeStore(t, 4, []string{"move: stale"})
		f.plays, f.rows = []string{"xu"}, map[string]int{"orders/9": 2}
		require.NoError(t, f.run())
		require.Len(t, f.parked.keys, 1, "what was not written down is forgotten")

		f = newFakeStore(t, 4, nil)
		f.plays, f.rows = []string{"xu"}, map[string]int{"orders/9": 2}
		require.NoError(t, f.run())
		require.Len(t, f.parked.keys, 3)
		require.Equal(t, parkedKey{rows: 1}, *f.parked.keys["orders/1"])
	})
}

// Of a very large window not all ids are read at once, and a prefetch reads those behind
// the batch in flight.
func TestPrefetchReadsFurtherIDs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFakeStore(t, 6, nil)
		s := f.session(t.Context(), RelayConfig{BatchSize: 2}.withDefaults())
		s.pos, s.more = position{base: "0", window: "6"}, true
		s.prefetch(3)
		batch, err := s.next()
		require.NoError(t, err)
		require.Equal(t, []int64{4, 5}, []int64{batch[0].id, batch[1].id})
		require.Equal(t, []int64{6}, s.ids)
	})
}

// The other parts of the relay run beside a session once it knows the cursor, and end
// before it returns.
func TestSessionRunsOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFakeStore(t, 3, []string{"load: down"})
		ended := 0
		other := func(ctx context.Context) {
			f.mu.Lock()
			require.Empty(t, f.faults)
			f.mu.Unlock()
			<-ctx.Done()
			ended++
		}
		require.NoError(t, f.run(other))
		require.Equal(t, 1, ended)

		f = newFakeStore(t, 3, []string{"load: lost"})
		require.ErrorIs(t, f.run(func(context.Context) { require.Fail(t, "there is no cursor") }), errLeaseLost)
	})
}

// A panic beside a session ends it, and the other parts with it, and reaches its caller. So
// does a panic of the session.
func TestSessionPanics(t *testing.T) {
	t.Parallel()
	for name, play := range map[string]func(f *fakeStore) (other func(context.Context)){
		"beside the session": func(*fakeStore) func(context.Context) {
			return func(context.Context) { panic(errDown) }
		},
		"in the session": func(f *fakeStore) func(context.Context) {
			f.faults = []string{"open: panic"}
			return func(context.Context) {}
		},
		"in a prefetch": func(f *fakeStore) func(context.Context) {
			f.faults = []string{"fetch: works", "fetch: panic"}
			return func(context.Context) {}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFakeStore(t, 7, nil)
				panics, ended := play(f), false
				lost := func(context.Context) {
					<-f.held.Done()
					ended = true
				}
				defer func() {
					err, ok := recover().(error)
					require.True(t, ok)
					require.ErrorIs(t, err, errDown)
					require.True(t, ended, "what works beside ends first")
				}()
				_ = f.run(panics, lost)
			})
		})
	}
}

// fakeStore is outbox, outbox_cursor and Kafka for one session. A snapshot is the number
// of events that it sees.
type fakeStore struct {
	t      *testing.T
	events int
	mu     sync.Mutex // of faults: a prefetch may run
	faults []string   // in the order in which they come, by operation
	pos    position   // the newest row of outbox_cursor
	rows   map[string]int
	plays  []string
	sent   []string // ids of the batches
	failed []string
	parked parking
	log    bytes.Buffer

	lease *lease
	stop  func() // tells the session to stop
	held  context.Context
	lose  func(error) // ends the lease
}

var errDown = errors.New("connection refused")

func newFakeStore(t *testing.T, events int, faults []string) *fakeStore {
	until := time.Now().Add(time.Hour)
	f := &fakeStore{t: t, events: events, faults: slices.Clone(faults), pos: position{cursorID: 1, base: "0"}, lease: &lease{}}
	f.lease.until.Store(&until)
	return f
}

// run runs a session over the store.
func (f *fakeStore) run(others ...func(context.Context)) error {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	held, lose := context.WithCancelCause(context.Background())
	defer lose(nil)
	f.stop, f.held, f.lose = stop, held, lose
	return f.session(held, RelayConfig{BatchSize: 2}.withDefaults()).run(ctx, others...)
}

func (f *fakeStore) session(held context.Context, cfg RelayConfig) *session {
	log := slog.New(slog.NewTextHandler(&f.log, nil))
	return newSession(sessionParts{
		leadership: leadership{lease: f.lease, held: held, lose: f.lose, statementTimeout: cfg.Lease},
		cfg:        cfg, cursors: f, leases: f, failed: f, deliverer: f, parked: &f.parked, log: log,
		health: newHealthState(cfg, newBreaker(cfg.Breaker, func(_, _ BreakerState) {})),
		outage: outage.NewLog(log, "PostgreSQL"), wake: make(chan struct{}),
	})
}

// at says where the cursor is.
func (f *fakeStore) at() string {
	if f.pos.window == "" {
		return f.pos.base
	}
	return fmt.Sprintf("%d/%s", f.pos.last, f.pos.window)
}

// fault returns the error of an operation, and whether it is done all the same.
func (f *fakeStore) fault(operation string) (done bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := slices.IndexFunc(f.faults, func(s string) bool { return strings.HasPrefix(s, operation+": ") })
	if i < 0 {
		return true, nil
	}
	what := strings.TrimPrefix(f.faults[i], operation+": ")
	f.faults = slices.Delete(f.faults, i, i+1)
	switch what {
	case "works":
		return true, nil
	case "unsure":
		return true, errDown
	case "down":
		return false, errDown
	case "panic":
		panic(errDown)
	case "down and lease over":
		time.AfterFunc(time.Millisecond, func() { f.lose(errLeaseLost) })
		return false, errDown
	case "moved": // by another process, which has come to 4
		f.pos = position{cursorID: f.pos.cursorID + 1, base: "0", window: strconv.Itoa(f.events), last: 4, highest: 4}
		return false, errStale
	case "rolled back": // to the row before the newest one
		f.pos = position{cursorID: f.pos.cursorID - 1, base: "0"}
		return false, errStale
	}
	err = map[string]error{
		"stale": errStale, "lost": errLeaseLost, "too large": errBatchTooLarge, "other cluster": errOtherCluster,
		"sequence behind": ErrSequenceBehind, "undefined": &pgconn.PgError{Code: "42P01"},
	}[what]
	require.Error(f.t, err, what)
	return false, err
}

func (f *fakeStore) load(context.Context, *lease) (position, error) {
	_, err := f.fault("load")
	return f.pos, err
}

func (f *fakeStore) rebase(context.Context, *lease) (int64, error) {
	_, err := f.fault("rebase")
	return 0, err
}

func (f *fakeStore) renew(context.Context, *lease) error {
	_, err := f.fault("renew")
	return err
}

func (f *fakeStore) keys(context.Context) (map[string]int, bool, error) {
	_, err := f.fault("keys")
	return f.rows, false, err
}

func (f *fakeStore) open(_ context.Context, _ *lease, p position, limit int) (next position, events []envelope, large bool, err error) {
	done, err := f.fault("open")
	if !done {
		return p, nil, false, err
	}
	if p.cursorID != f.pos.cursorID {
		return p, nil, false, errStale
	}
	next = position{cursorID: p.cursorID, base: p.base, last: p.last, highest: p.highest}
	if p.window != "" {
		next.base = p.window
	}
	var ids []int64
	for id := number(next.base) + 1; id <= int64(f.events); id++ {
		ids = append(ids, id)
	}
	if len(ids) > 0 {
		next.window, next.last = strconv.Itoa(f.events), 0
	}
	if len(ids) > 0 || p.window != "" {
		next.cursorID++
		f.pos = next
	}
	if err != nil {
		return p, nil, false, err
	}
	if len(ids) == 0 {
		f.stop()
	}
	if len(ids) > limit {
		return next, nil, true, nil
	}
	return next, f.read(ids), false, nil
}

func (f *fakeStore) remaining(_ context.Context, p position, limit int) (ids []int64, err error) {
	if done, err := f.fault("remaining"); !done {
		return nil, err
	}
	for id := max(number(p.base), p.last) + 1; id <= number(p.window) && len(ids) < limit; id++ {
		ids = append(ids, id)
	}
	return ids, nil
}

func (f *fakeStore) fetch(_ context.Context, _ position, ids []int64) ([]envelope, error) {
	if done, err := f.fault("fetch"); !done {
		return nil, err
	}
	return f.read(ids), nil
}

func (f *fakeStore) move(ctx context.Context, _ *lease, p position, failures []failure) (int64, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	done, err := f.fault("move")
	if !done {
		return 0, err
	}
	if p.cursorID != f.pos.cursorID {
		return 0, errStale
	}
	for _, failure := range failures {
		f.failed = append(f.failed, fmt.Sprintf("%d %s", failure.event.id, failure.status))
	}
	p.cursorID++
	f.pos = p
	return p.cursorID, err
}

// deliver plays Kafka: see [outcomeSymbols].
func (f *fakeStore) deliver(_, _ context.Context, batch []envelope, _ *parking) (outcomes []outcome, err error) {
	var ids []byte
	play := strings.Repeat("+", len(batch))
	for _, e := range batch {
		ids = strconv.AppendInt(ids, e.id, 10)
	}
	f.sent = append(f.sent, string(ids))
	if len(f.plays) > 0 {
		if f.plays[0] != "" {
			play = f.plays[0]
		}
		f.plays = f.plays[1:]
	}
	play, stopped := strings.CutSuffix(play, "stop")
	if stopped {
		f.stop()
	}
	play, lost := strings.CutSuffix(play, "lost")
	if lost {
		f.lose(errLeaseLost)
		err = errLeaseLost
	}
	kinds := map[rune]outcomeKind{
		'.': outcomePending, '+': outcomeSent, 'x': outcomeRejected, 'u': outcomeUnavailable, 'b': outcomeBlocked, 'p': outcomeParked,
	}
	for _, symbol := range play {
		o := outcome{kind: kinds[symbol]}
		if symbol == 'x' || symbol == 'u' {
			o.class, o.err = "class", errDown
		}
		outcomes = append(outcomes, o)
	}
	require.Len(f.t, outcomes, len(batch))
	return outcomes, err
}

func (f *fakeStore) topic(*envelope) (string, error) { return "orders", nil }

// read returns events, each with a key of its own.
func (f *fakeStore) read(ids []int64) (events []envelope) {
	for _, id := range ids {
		events = append(events, envelope{id: id, partitionKey: []byte(strconv.FormatInt(id, 10))})
	}
	return events
}

func number(snapshot string) int64 {
	n, err := strconv.ParseInt(snapshot, 10, 64)
	if err != nil {
		panic(err)
	}
	return n
}
