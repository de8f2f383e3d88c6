package relay

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
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
	name       string
	events     int
	opened     int64 // if above 0, all events are in an open window, which is drained up to here
	faults     []string
	pages      int // ids of a page; 0: as many as there are
	unreadable []int64
	plays      []string // outcomes of each batch, where not all is sent; stop: the session is told to
	sent       string
	at         string // where the cursor is at the end: last id, of the window up to
	failed     string // ids with their status, as they were written
	err        error
	log        string // has to contain
	waits      bool   // it takes some time
}{
	{name: "nothing to send", at: "0"},
	{name: "a window that another process has opened", events: 5, opened: 1, sent: "23 45", at: "5"},
	{name: "a window of less than a batch", events: 1, sent: "1", at: "1"},
	{name: "a window that is read in batches", events: 5, sent: "12 34 5", at: "5"},

	// What the cursor says is another.
	{name: "the cursor is stale when a window opens: it is loaded again", events: 3, faults: []string{"open: stale"}, sent: "12 3", at: "3"},
	{name: "the cursor is stale when it moves: from where it is, all is sent again", events: 3, faults: []string{"move: stale"}, sent: "12 12 3", at: "3"},
	{name: "the cursor is stale three times in a row: it is loaded each time", events: 3, faults: []string{"open: stale", "open: stale", "open: stale"}, sent: "12 3", at: "3"},
	{name: "the cursor is stale again and again: that is an outage", events: 3, faults: []string{"open: stale", "open: stale", "open: stale", "open: stale", "open: stale", "open: stale"},
		sent: "12 3", at: "3", log: "perhaps a pooler sends the statement that loads it to a standby", waits: true},
	{name: "the cursor was moved by another process", events: 5, faults: []string{"move: moved"}, sent: "12 5", at: "5", log: "cursor is not where it was left"},
	{name: "the newest rows of the cursor were lost", events: 3, faults: []string{"move: rolled back"}, sent: "12 12 3", at: "3",
		log: "lost the newest rows of the cursor, but no event"},
	{name: "and events with them", events: 3, faults: []string{"move: rolled back", "count: one less"}, sent: "12 12 3", at: "3",
		log: "and transactions whose events were sent"},
	{name: "an outage when it is looked which events were lost", events: 3, faults: []string{"move: rolled back", "count: down"}, sent: "12 12 3", at: "3",
		log: "sent_since=2 missing=0", waits: true},
	{name: "whoever finds the cursor stale proves the lease first", events: 3, faults: []string{"move: stale", "renew: lost"}, sent: "12", err: lease.ErrLeaseLost, at: "0/3"},
	{name: "the cursor is one of another cluster: it is rebased", events: 3, faults: []string{"load: other cluster"}, sent: "12 3", at: "3", log: "restored from another cluster"},
	{name: "the sequence is behind: an operator has to decide", events: 3, faults: []string{"load: sequence behind"}, err: cursor.ErrSequenceBehind, at: "0"},

	// PostgreSQL fails.
	{name: "an outage when the cursor is loaded", events: 3, faults: []string{"load: down", "load: down", "keys: down"}, sent: "12 3", at: "3", log: "PostgreSQL works again", waits: true},
	{name: "an outage when a window opens", events: 3, faults: []string{"open: down"}, sent: "12 3", at: "3", log: "PostgreSQL works again", waits: true},
	{name: "an outage when the cursor moves: nothing is sent again", events: 5, faults: []string{"move: down", "move: down"}, sent: "12 34 5", at: "5", waits: true},
	{name: "a move of unknown outcome that was done: it turns out to be stale, and nothing is sent again", events: 5, faults: []string{"move: unsure"}, sent: "12 34 5", at: "5", waits: true},
	{name: "an opening of unknown outcome that was done", events: 3, faults: []string{"open: unsure"}, sent: "12 3", at: "3", waits: true},
	{name: "a prefetch fails: the batch is fetched when it is needed", events: 5, faults: []string{"fetch: works", "fetch: down"}, sent: "12 34 5", at: "5"},
	{name: "a fetch fails", events: 5, faults: []string{"fetch: down"}, sent: "12 34 5", at: "5", waits: true},
	{name: "the rest of the window cannot be read", events: 5, faults: []string{"page: down"}, sent: "12 34 5", at: "5", waits: true},

	// A window is read in parts that are small enough.
	{name: "a window that is read in many pages", events: 7, pages: 2, sent: "12 34 56 7", at: "7"},
	{name: "a window that ends with a full page", events: 6, pages: 3, sent: "12 34 56", at: "6"},
	{name: "a page takes too long: the next is smaller", events: 5, faults: []string{"page: cancelled"}, sent: "12 34 5", at: "5"},
	{name: "a fetch takes too long: from then on less is fetched", events: 5, faults: []string{"fetch: cancelled"}, sent: "1 2 3 4 5", at: "5"},
	{name: "the opening takes too long: it only announces", events: 2, faults: []string{"open: cancelled"}, sent: "1 2", at: "2"},
	{name: "the cursor is stale when a page is read", events: 5, faults: []string{"page: stale"}, sent: "12 34 5", at: "5"},
	{name: "the cursor is stale when events are fetched", events: 5, faults: []string{"fetch: stale"}, sent: "12 34 5", at: "5"},
	{name: "a row is unreadable: it is dead, the others are sent", events: 5, unreadable: []int64{4}, sent: "12 3 4 5", at: "5", failed: "4 dead", log: "event is dead"},
	{name: "the first row of a window is unreadable", events: 5, unreadable: []int64{1}, sent: "1 2 34 5", at: "5", failed: "1 dead", log: "event is dead"},
	{name: "the only row of a window is unreadable", events: 1, unreadable: []int64{1}, sent: "1", at: "1", failed: "1 dead", log: "event is dead"},
	{name: "several rows are unreadable", events: 5, unreadable: []int64{2, 3, 5}, sent: "1 2 3 4 5", at: "5", failed: "2 dead, 3 dead, 5 dead", log: "event is dead"},
	{name: "an outage when an unreadable row is read without its payload", events: 1, unreadable: []int64{1}, faults: []string{"bare: down"}, sent: "1", at: "1", failed: "1 dead", waits: true},
	{name: "a row always takes too long: it is unreadable", events: 1, faults: []string{"open: cancelled", "fetch: cancelled", "fetch: cancelled", "fetch: cancelled", "fetch: cancelled"},
		sent: "1", at: "1", failed: "1 dead", log: "column payload cannot be read", waits: true},
	{name: "a row takes longer than a short lease: it is unreadable", events: 1, faults: []string{"open: late", "fetch: late", "fetch: late", "fetch: late", "fetch: late"},
		sent: "1", at: "1", failed: "1 dead", waits: true},
	{name: "a connection dies when a page is read", events: 5, faults: []string{"page: late"}, sent: "12 34 5", at: "5", waits: true},
	{name: "a connection dies when events are fetched: later batches are whole again", events: 7, faults: []string{"fetch: late"}, sent: "1 23 45 67", at: "7", waits: true},
	{name: "everything took too long for a while", events: 1, faults: []string{"open: cancelled", "fetch: cancelled", "fetch: cancelled", "fetch: cancelled"}, sent: "1", at: "1", waits: true},
	{name: "PostgreSQL has an internal error for a moment: no event dies", events: 1, faults: []string{"open: internal error", "fetch: internal error"}, sent: "1", at: "1"},
	{name: "and then is gone for a moment", events: 1, faults: []string{"open: internal error", "fetch: internal error", "fetch: down"}, sent: "1", at: "1", waits: true},
	{name: "the tables are gone", events: 3, faults: []string{"open: undefined"}, err: pg.ErrNotMigrated, at: "0"},

	// The lease is lost.
	{name: "the lease is lost when the cursor is loaded", events: 3, faults: []string{"load: lost"}, err: lease.ErrLeaseLost, at: "0"},
	{name: "the lease is lost when a window opens", events: 3, faults: []string{"open: lost"}, err: lease.ErrLeaseLost, at: "0"},
	{name: "the lease is lost when a batch is sent: what has no outcome is not passed", events: 5, plays: []string{"", "+.lost"}, sent: "12 34", err: lease.ErrLeaseLost, at: "2/5"},
	{name: "the lease ends while PostgreSQL does not answer", events: 3, faults: []string{"move: down and lease over"}, sent: "12", err: lease.ErrLeaseLost, at: "0/3", waits: true},

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
				f.plays, f.pages, f.unreadable = test.plays, test.pages, test.unreadable
				if test.opened > 0 {
					f.pos.Window, f.pos.Last = seeing(test.events), test.opened
				}
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
				require.Equal(t, test.waits, time.Since(start) >= time.Millisecond, "%v", time.Since(start))
			})
		})
	}
}

// Transactions of a relay that sends exactly once fail again and again, while a window is open. PostgreSQL works, and
// the log does not say otherwise.
func TestSessionWhoseTransactionsFail(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFakeStore(t, 5, nil)
		f.pos.Window, f.plays = seeing(5), slices.Repeat([]string{"..doubt"}, 10)
		require.NoError(t, f.run())
		require.Equal(t, strings.Repeat("12 ", 10)+"12 34 5", strings.Join(f.sent, " "))
		require.Empty(t, f.log.String())
	})
}

// Another transaction has locked rows that have to be changed before a relay goes on that sends exactly once. That is
// no outage of PostgreSQL, and the log names the holder once.
func TestSessionBehindALock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFakeStore(t, 3, slices.Repeat([]string{"load: locked"}, 10))
		require.NoError(t, f.run())
		require.Equal(t, "12 3", strings.Join(f.sent, " "))
		require.NotContains(t, f.log.String(), "PostgreSQL")
		require.Equal(t, 1, strings.Count(f.log.String(), "session 7"))
	})
}

// A transaction that fails says nothing about PostgreSQL: an outage does not end by it.
func TestTransactionThatFailsEndsNoOutage(t *testing.T) {
	t.Parallel()
	f := newFakeStore(t, 5, nil)
	s := f.session(context.Background(), rulesWith(2))
	s.Outage.Report(errDown)
	require.ErrorIs(t, s.try(func(context.Context) error { return errDoubt(errDown) }), cursor.ErrStale)
	require.NotNil(t, s.Outage.Current())
}

// What the parking holds are the rows of outbox_failed, and the events on their way there.
func TestSessionParks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFakeStore(t, 4, []string{"move: stale"})
		f.plays, f.rows = []string{"xu"}, map[string]int{"orders/9": 2}
		require.NoError(t, f.run())
		require.Len(t, f.parked.Keys, 1, "what was not written down is forgotten")

		f = newFakeStore(t, 4, nil)
		f.plays, f.rows = []string{"xu"}, map[string]int{"orders/9": 2}
		require.NoError(t, f.run())
		require.Len(t, f.parked.Keys, 3)
		require.Equal(t, ParkedKey{Rows: 1}, f.parked.Keys[f.parked.Hash("orders/1")])
	})
}

// The answer to an event may come before its row is written. Then the retrier hears of it once more.
func TestSessionTellsOfAnswersBeforeRows(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFakeStore(t, 4, nil)
		f.plays = []string{"+a"}
		require.NoError(t, f.run())
		require.Equal(t, 2, f.answered)
		require.Equal(t, f.unanswered.Accepted(), f.unanswered.areRecorded(f.unanswered.Accepted()))
	})
}

// A session that is told to stop while it pages through a window does not send it first.
func TestSessionStopsBetweenPages(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFakeStore(t, 7, []string{"page: works", "page: stop"})
		f.pages = 2
		require.NoError(t, f.run())
		require.Empty(t, f.sent)
		require.Equal(t, "0/7", f.at())
	})
}

// What a session opens first it only announces: the last one may have lost its lease
// because it read for too long.
func TestSessionAnnouncesFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFakeStore(t, 2, nil)
		s := f.session(t.Context(), rulesWith(2))
		s.Opened = false
		require.NoError(t, s.Load())
		batch, large, err := s.Open()
		require.NoError(t, err)
		require.True(t, large)
		require.Empty(t, batch)
		batch, err = s.Next(t.Context())
		require.NoError(t, err)
		require.Equal(t, []int64{1, 2}, ids(batch))
	})
}

// The other parts of the relay run alongside a session once it knows the cursor, and end before it
// returns.
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
		require.ErrorIs(t, f.run(func(context.Context) { require.Fail(t, "there is no cursor") }), lease.ErrLeaseLost)
	})
}

// A panic of a part that runs alongside a session ends the session and the other parts, and reaches
// the caller. So does a panic of the session.
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
	t          *testing.T
	events     int
	mu         sync.Mutex      // of faults: a prefetch may run
	faults     []string        // in the order in which they come, by operation
	pos        cursor.Position // the newest row of outbox_cursor
	rows       map[string]int
	pages      int
	unreadable []int64
	plays      []string
	sent       []string // ids of the batches
	failed     []string
	parked     *Parking
	unanswered *Unanswered
	answered   int // how often a row could be removed
	log        bytes.Buffer

	lease *lease.Lease
	stop  func() // tells the session to stop
	held  context.Context
	lose  func(error) // ends the lease
}

func newFakeStore(t *testing.T, events int, faults []string) *fakeStore {
	until := time.Now().Add(time.Hour)
	f := &fakeStore{t: t, events: events, faults: slices.Clone(faults), pos: cursor.Position{CursorID: 1, Base: seeing(0), Epoch: 6}, parked: NewParking(false), lease: &lease.Lease{Epoch: 7}}
	f.lease.Until.Store(&until)
	return f
}

// run runs a session over the store.
func (f *fakeStore) run(others ...func(context.Context)) error {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	held, lose := context.WithCancelCause(context.Background())
	defer lose(nil)
	f.stop, f.held, f.lose = stop, held, lose
	return f.session(held, rulesWith(2)).Run(ctx, others...)
}

// rulesWith returns the defaults with another size of batches and with a short poll interval.
func rulesWith(batch int) Rules {
	return Rules{
		Name: "default", BatchSize: batch, PollInterval: time.Microsecond, SendTimeout: 15 * time.Second, Lease: 30 * time.Second,
		RetryInterval: 5 * time.Second, MaxRetries: 10, RetryWait: time.Second, MaxRetryWait: 300 * time.Second, Breaker: someRules,
	}
}

func (f *fakeStore) session(held context.Context, rules Rules) *Session {
	log := slog.New(slog.NewTextHandler(&f.log, nil))
	bad := NewBadPartitions(outage.NewLogs(log))
	f.unanswered = NewUnanswered(bad, func() { f.answered++ })
	s := NewSession(SessionParts{
		Leadership: lease.Leadership{Lease: f.lease, Held: held, Lose: f.lose, StatementTimeout: rules.Lease},
		Rules:      rules, Cursors: f, Leases: f, Failed: f, Deliverer: f, Parked: f.parked, Log: log, Bad: bad, Unanswered: f.unanswered,
		Health: newHealthState(rules, breaker.New(rules.Breaker, func(_, _ breaker.State, _ float64) {})),
		Outage: outage.NewLog(log, "PostgreSQL"), Wake: make(chan struct{}),
		EventDied: func() {}, Waits: func() {},
	})
	s.Window.Limits.IDs = LimitTo(cmp.Or(f.pages, cursor.MaxPageIDs))
	s.Opened = true
	return s
}

// at says where the cursor is.
func (f *fakeStore) at() string {
	if f.pos.Window == "" {
		return strconv.FormatInt(number(f.pos.Base), 10)
	}
	return fmt.Sprintf("%d/%d", f.pos.Last, number(f.pos.Window))
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
	case "works", "one less":
		return true, nil
	case "unsure":
		return true, errDown
	case "internal error":
		return false, &pgconn.PgError{Code: "XX000"}
	case "down":
		return false, errDown
	case "panic":
		panic(errDown)
	case "stop":
		f.stop()
		return true, nil
	case "down and lease over":
		time.AfterFunc(time.Millisecond, func() { f.lose(lease.ErrLeaseLost) })
		return false, errDown
	case "moved": // by another process, which has come to 4
		f.pos = cursor.Position{CursorID: f.pos.CursorID + 1, Base: seeing(0), Window: seeing(f.events), Last: 4, Highest: 4}
		return false, cursor.ErrStale
	case "rolled back": // to the row before the newest one
		f.pos = cursor.Position{CursorID: f.pos.CursorID - 1, Base: seeing(0)}
		return false, cursor.ErrStale
	}
	err = map[string]error{
		"stale": cursor.ErrStale, "lost": lease.ErrLeaseLost, "late": context.DeadlineExceeded, "cancelled": &pgconn.PgError{Code: "57014"}, "other cluster": cursor.ErrOtherCluster,
		"locked": &pg.LockError{Holders: []pg.Holder{{PID: 7}}, Err: errDown}, "sequence behind": cursor.ErrSequenceBehind, "undefined": &pgconn.PgError{Code: "42P01"},
	}[what]
	require.Error(f.t, err, what)
	return false, err
}

func (f *fakeStore) Load(context.Context, *lease.Lease) (cursor.Position, error) {
	_, err := f.fault("load")
	return f.pos, err
}

// Count finds all events, unless one less.
func (f *fakeStore) Count(_ context.Context, ids []int64, _ []time.Time) (int, error) {
	oneLess := slices.Contains(f.faults, "count: one less")
	if _, err := f.fault("count"); err != nil {
		return 0, err
	}
	if oneLess {
		return len(ids) - 1, nil
	}
	return len(ids), nil
}

func (f *fakeStore) Rebase(context.Context, *lease.Lease) (int64, error) {
	_, err := f.fault("rebase")
	return 0, err
}

func (f *fakeStore) Renew(context.Context, *lease.Lease) error {
	_, err := f.fault("renew")
	return err
}

func (f *fakeStore) Probe(context.Context) (bool, error) {
	_, err := f.fault("probe")
	return true, err
}

func (f *fakeStore) Freed(lease.StatementContext, time.Duration) func() ([]cursor.KeyRows, error) {
	f.t.Error("its lease is exclusive")
	return nil
}

func (f *fakeStore) Keys(lease.StatementContext, *[]string) func(after string) ([]cursor.KeyRows, error) {
	return func(after string) (keys []cursor.KeyRows, err error) {
		if after != "" {
			return nil, nil
		}
		_, err = f.fault("keys")
		for key, n := range f.rows {
			keys = append(keys, cursor.KeyRows{Key: key, Rows: n})
		}
		return keys, err
	}
}

func (f *fakeStore) BadPartitions(context.Context) ([]cursor.BadPartition, error) { return nil, nil }

func (f *fakeStore) Open(_ context.Context, l *lease.Lease, p cursor.Position, limit int) (next cursor.Position, events []envelope.Event, large bool, err error) {
	done, err := f.fault("open")
	if !done {
		return p, nil, false, err
	}
	if p.CursorID != f.pos.CursorID || p.Epoch != f.pos.Epoch {
		return p, nil, false, cursor.ErrStale
	}
	next = cursor.Position{CursorID: p.CursorID, Base: p.Base, Last: p.Last, Highest: p.Highest}
	if p.Window != "" {
		next.Base = p.Window
	}
	var ids []int64
	for id := number(next.Base) + 1; id <= int64(f.events); id++ {
		ids = append(ids, id)
	}
	if len(ids) <= limit {
		var unreadable error
		if events, unreadable = f.read(ids); unreadable != nil {
			return p, nil, false, unreadable
		}
	}
	if len(ids) > 0 {
		next.Window, next.Last = seeing(f.events), 0
	}
	next.Epoch = p.Epoch
	if len(ids) > 0 || p.Window != "" {
		next.CursorID, next.Epoch = next.CursorID+1, l.Epoch
		f.pos = next
	}
	if err != nil {
		return p, nil, false, err
	}
	if len(ids) == 0 {
		f.stop()
	}
	return next, events, len(ids) > limit, nil
}

func (f *fakeStore) Page(_ context.Context, p cursor.Position, u cursor.Unpaged, limit int) (ids []int64, rest cursor.Unpaged, err error) {
	if done, err := f.fault("page"); !done {
		return nil, u, err
	}
	id := int64(u.Ranges[0].First)
	if u.ID > 0 {
		id++
	}
	for ; id <= number(p.Window) && len(ids) < limit; id++ {
		if id > p.Last {
			ids = append(ids, id)
		}
	}
	if id <= number(p.Window) || len(ids) == limit {
		rest, err = u.After(uint64(id-1), id-1)
	}
	return ids, rest, err
}

func (f *fakeStore) Fetch(_ context.Context, _ cursor.Position, ids []int64) (events []envelope.Event, through int64, err error) {
	if done, err := f.fault("fetch"); !done {
		return nil, 0, err
	}
	events, unreadable := f.read(ids)
	if len(events) > 0 {
		through = events[len(events)-1].ID
	}
	return events, through, unreadable
}

func (f *fakeStore) FetchBare(_ context.Context, _ cursor.Position, id int64, _ bool) (envelope.Event, error) {
	_, err := f.fault("bare")
	return envelope.Event{ID: id}, err
}

func (f *fakeStore) Move(ctx context.Context, l *lease.Lease, p cursor.Position, failures []cursor.Failure) (int64, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	done, err := f.fault("move")
	if !done {
		return 0, err
	}
	if p.CursorID != f.pos.CursorID || p.Epoch != f.pos.Epoch {
		return 0, cursor.ErrStale
	}
	for _, failure := range failures {
		f.failed = append(f.failed, fmt.Sprintf("%d %s", failure.Event.ID, failure.Status))
	}
	p.CursorID, p.Epoch = p.CursorID+1, l.Epoch
	f.pos = p
	return p.CursorID, err
}

// deliver plays Kafka: see [outcomeSymbols].
func (f *fakeStore) Deliver(_, _ context.Context, batch []envelope.Event, _ *Parking) (outcomes []Outcome, err error) {
	var ids []byte
	play := strings.Repeat("+", len(batch))
	for _, e := range batch {
		ids = strconv.AppendInt(ids, e.ID, 10)
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
	play, doubtful := strings.CutSuffix(play, "doubt")
	if doubtful {
		err = errDoubt(errDown)
	}
	play, lost := strings.CutSuffix(play, "lost")
	if lost {
		f.lose(lease.ErrLeaseLost)
		err = lease.ErrLeaseLost
	}
	kinds := map[rune]OutcomeKind{
		'.': OutcomePending, '+': OutcomeSent, 'x': OutcomeRejected, 'u': OutcomeUnavailable, 'a': OutcomeUnavailable, 'b': OutcomeBlocked, 'p': OutcomeParked,
	}
	for _, symbol := range play {
		o := Outcome{Kind: kinds[symbol]}
		if e := &batch[len(outcomes)]; e.Unreadable != nil {
			o = Outcome{Kind: OutcomeRejected, Class: RejectionClass(e.Unreadable), Err: e.Unreadable}
		}
		if symbol == 'a' { // the answer has come late, and before the row is written
			e := &batch[len(outcomes)]
			f.unanswered.add(e, kafka.Partition{Topic: "orders"})
			f.unanswered.accept(e, SentTo{})
		}
		if symbol == 'x' || symbol == 'u' || symbol == 'a' {
			o.Class, o.Err = "class", errDown
		}
		outcomes = append(outcomes, o)
	}
	require.Len(f.t, outcomes, len(batch))
	return outcomes, err
}

func (f *fakeStore) Topic(*envelope.Event) (string, error) { return "orders", nil }

// read returns events, each with a key of its own, up to an unreadable one.
func (f *fakeStore) read(ids []int64) (events []envelope.Event, err error) {
	for _, id := range ids {
		if slices.Contains(f.unreadable, id) {
			return events, &pgconn.PgError{Code: "54000"}
		}
		events = append(events, envelope.Event{ID: id, PartitionKey: []byte(strconv.FormatInt(id, 10))})
	}
	return events, nil
}

// seeing is a snapshot that sees n events. Each is of a transaction of its own, which has
// its number.
func seeing(n int) string { return fmt.Sprintf("%[1]d:%[1]d:", n+1) }

// number returns how many events a snapshot sees.
func number(snapshot string) int64 {
	n, err := strconv.ParseInt(tables.SnapshotMax(snapshot), 10, 64)
	if err != nil {
		panic(err)
	}
	return n - 1
}

// Until the process cannot send any more that led before, an event that cannot be read is tried again, and does not
// die.
func TestSessionGivesUpNothingBeforeLeaseIsExclusive(t *testing.T) {
	f := newFakeStore(t, 0, nil)
	s := f.session(context.Background(), rulesWith(5000))
	unreadable := []Outcome{{Kind: OutcomeRejected, Class: cursor.UnreadableRow, Err: errDown}}
	statusOf := func() string {
		t.Helper()
		decided, failures := s.Failures([]envelope.Event{{}}, unreadable)
		require.Equal(t, 1, decided)
		require.Len(t, failures, 1)
		return failures[0].Status
	}
	require.Equal(t, statusDead, statusOf())
	f.lease.ExclusiveAt = time.Now().Add(time.Hour)
	require.Equal(t, statusFailed, statusOf())
}

// Whatever an event waits for, nothing of it is copied that PostgreSQL may be unable to read. A damaged row behind a
// parked key would otherwise fail every move of the cursor.
func TestUnreadableEventIsParkedWithoutContent(t *testing.T) {
	t.Parallel()
	f := newFakeStore(t, 0, nil)
	s := f.session(context.Background(), rulesWith(5000))
	damaged, large := &envelope.UnreadableError{ID: 1, Err: errDown}, &envelope.TooLargeError{ID: 1}
	for kind, want := range map[OutcomeKind]string{OutcomeParked: statusParked, OutcomeBlocked: statusParked, OutcomeUnavailable: statusWaiting, OutcomeRejected: statusDead} {
		_, failures := s.Failures([]envelope.Event{{Unreadable: damaged}}, []Outcome{{Kind: kind, Class: "outage", Err: errMaySend, place: "orders/1"}})
		require.Len(t, failures, 1)
		require.Equal(t, cursor.UnreadableRow, failures[0].Class, kind)
		require.Equal(t, damaged, failures[0].Err, kind)
		require.Equal(t, []string{want, "orders/1"}, []string{failures[0].Status, failures[0].Place}, kind)
	}
	_, failures := s.Failures([]envelope.Event{{Unreadable: large}}, []Outcome{{Kind: OutcomeParked}})
	require.Empty(t, failures[0].Class, "it can be copied")
}

func ids(events []envelope.Event) (ids []int64) {
	for _, e := range events {
		ids = append(ids, e.ID)
	}
	return ids
}
