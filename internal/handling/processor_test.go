package handling

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/eventheader"
	"github.com/outboxgo/outbox/internal/guardtx"
)

// The tasks of a batch run in the order of their records, those of batch handlers
// after them, and those without a transaction not at all.
func TestProcessBatchOrder(t *testing.T) {
	t.Parallel()
	var f *fixture
	call := func(action string) func(context.Context, played, *envelope.Received) error {
		return func(_ context.Context, e played, _ *envelope.Received) error {
			f.current = append(f.current, action+e.Name)
			return nil
		}
	}
	once := actionOf("ONCE", call("o"))
	once.Key, once.KeyType = func(any, *envelope.Received) (string, string) { return "Play", "all" }, once.GoType
	f = newFixture(t, Rules{},
		noTxOf("N", call("n")),
		batchOf("B", func(_ context.Context, arrivals []Arrival) error {
			for _, a := range arrivals {
				f.current = append(f.current, fmt.Sprint("b", len(arrivals), a.Event.(played).Name))
			}
			return nil
		}),
		actionOf("H", call("h")), actionOf("I", call("i")), once)
	items := f.arrive("x", "y")
	all := func(time.Duration) bool { return false }
	done, err := f.processor.ProcessBatch(t.Context(), inTx(items), all)
	require.NoError(t, err)
	require.Nil(t, done.Next)
	require.Equal(t, []string{"hx ix ox hy iy b2x b2y: committed"}, f.log)
	done, err = f.processor.ProcessBatch(t.Context(), inTx(items), all)
	require.NoError(t, err)
	require.Nil(t, done.Next)
	require.Equal(t, ": committed", f.log[1], "all are repeats")
}

// Events that no record brought are handled as others are, and log lines about their handlers say
// which delivery it was.
func TestProcessorWithoutKafka(t *testing.T) {
	t.Parallel()
	var f *fixture
	var places []string
	note := func(m *envelope.Received) {
		call, _ := f.activity.Current()
		places = append(places, call.Place.String())
		require.Nil(t, m.Kafka)
	}
	f = newFixture(t, Rules{Hooks: Hooks{Handled: func(m *envelope.Received, _ string, _ time.Duration) { note(m) }}},
		actionOf("A", func(_ context.Context, _ played, m *envelope.Received) error { note(m); return nil }),
		noTxOf("B", func(_ context.Context, _ played, m *envelope.Received) error { note(m); return nil }))
	p := f.processor
	var tasks []Task
	for id := range int64(2) {
		it := Item{Meta: envelope.Received{Attempt: 1, Origin: &envelope.Origin{Key: []byte("k"), DeliveryID: id, Stream: "plays"}}}
		m := envelope.Message{ID: fmt.Sprint(id), Type: playedType, Source: "s", ByPosition: true, Data: []byte(`{"Name":"a"}`)}
		p.Resolve(t.Context(), &it, &m, "A")
		require.NoError(t, it.Err)
		tasks = it.AppendInTx(tasks)
		p.Resolve(t.Context(), &it, &m, "B")
		require.NoError(t, attemptOf(p)(t.Context(), it.Tasks[0]))
		p.Resolve(t.Context(), &it, &m, "C")
		require.Equal(t, ClassUnknownAction, it.Class)
		require.ErrorContains(t, it.Err, `action "C" is not registered`)
	}
	one := 0
	done, err := p.ProcessBatch(t.Context(), tasks, func(time.Duration) bool { one++; return true })
	require.NoError(t, err)
	require.Same(t, tasks[1].Meta.Origin, done.Next)
	require.Equal(t, 1, one)
	require.Equal(t, []string{"delivery 0 of plays", "delivery 0 of plays", "delivery 1 of plays", "delivery 1 of plays", "delivery 0 of plays", "delivery 0 of plays"}, places)
}

// What is completed with the tasks is so in their transaction, behind the handlers. If that fails,
// nothing is committed, and no handler is blamed.
func TestProcessorCompletes(t *testing.T) {
	t.Parallel()
	handled := 0
	f := newFixture(t, Rules{Hooks: Hooks{Handled: func(*envelope.Received, string, time.Duration) { handled++ }}})
	p, failure := f.processor, error(nil)
	p.Complete = func(_ context.Context, _ Tx, results []TaskResult) error {
		for _, r := range results {
			f.current = append(f.current, fmt.Sprint("done ", r.Meta.Subject, " ", r.Repeat))
		}
		return failure
	}
	items := f.arrive("a", "b")
	all := func(time.Duration) bool { return false }
	for _, failure = range []error{errPlayed, guardtx.ErrSettings} {
		_, err := p.ProcessBatch(t.Context(), inTx(items), all)
		for _, err := range []error{err, attemptOf(p)(t.Context(), items[0].Tasks[0]), &ConnectionError{err}} {
			require.ErrorIs(t, err, failure)
			var failed *TaskError
			require.False(t, errors.As(err, &failed))
			require.True(t, p.IsOutage(t.Context(), err, InTx, false))
		}
	}
	require.True(t, p.Sharing(inTx(items)))
	require.Zero(t, handled)
	require.Equal(t, []string{"a1 b1 done a false done b false: rolled back", "a1 done a false: rolled back"}, f.log[:2])

	f.log, failure = nil, nil
	require.NoError(t, attemptOf(p)(t.Context(), items[0].Tasks[0]))
	_, err := p.ProcessBatch(t.Context(), inTx(items), all)
	require.NoError(t, err)
	require.Equal(t, []string{"a1 done a false: committed", "b1 done a true done b false: committed"}, f.log)
	require.Equal(t, 2, handled)
}

// Hooks hear of what is committed, and of nothing else.
func TestProcessorNotifies(t *testing.T) {
	t.Parallel()
	var heard []string
	hooks := Hooks{
		Handled:  func(m *envelope.Received, _ string, _ time.Duration) { heard = append(heard, "handled "+m.Subject) },
		Repeated: func(m *envelope.Received, _ string) { heard = append(heard, "repeated "+m.Subject) },
	}
	called := func(ctx context.Context, call HandlerCall, next func(context.Context) error) error {
		err := next(ctx)
		heard = append(heard, fmt.Sprint("called ", call.Arrivals[0].Meta.Subject, " ", err))
		return err
	}
	f := newFixture(t, Rules{Hooks: hooks, Middleware: []Middleware{called}})
	items := f.arrive("a", "b")
	one := func(it *Item) error { return attemptOf(f.processor)(t.Context(), it.Tasks[0]) }
	require.NoError(t, one(items[0]))
	require.NoError(t, one(items[0]))
	f.handlers["b"] = "-"
	require.ErrorIs(t, one(items[1]), errPlayed)
	f.postgres = "d"
	require.Error(t, one(items[1]))
	require.Equal(t, []string{"called a <nil>", "handled a", "repeated a", "called b played", "called b <nil>"}, heard)
}

// Whose fault an error is.
func TestIsOutage(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name        string
		err         error
		kind        HandlerKind
		unavailable bool // there is no connection to be had
		want        bool
	}{
		{"a handler's error", errPlayed, InTx, true, false},
		{"that of a handler without a transaction", errPlayed, NoTx, false, false},
		{"that of a handler without a transaction, perhaps for want of PostgreSQL", errPlayed, NoTx, true, true},
		{"bad SQL", &pgconn.PgError{Code: "42601"}, InTx, true, false},
		{"a shutdown", &pgconn.PgError{Code: "57P01"}, InTx, true, true},
		{"a shutdown of another server", &pgconn.PgError{Code: "57P01"}, InTx, false, false},
		{"too many connections elsewhere", &pgconn.PgError{Code: "53300"}, NoTx, false, false},
		{"a limit of PostgreSQL's configuration", &pgconn.PgError{Code: "53400"}, InTx, false, false},
		{"another server that is a replica", fmt.Errorf("insert: %w", &pgconn.PgError{Code: "25006"}), InBatch, false, false},
		{"no connection to another server", &pgconn.ConnectError{}, InTx, false, false},
		{"a cancelled statement", &pgconn.PgError{Code: "57014"}, InTx, true, false},
		{"no connection for the notes", &NoteError{errPlayed}, InTx, false, true},
		{"the notes are locked", &NoteError{&pgconn.PgError{Code: "57014"}}, InTx, false, true},
		{"a lost connection", &ConnectionError{errPlayed}, InTx, false, false},
		{"a lost connection and no other", &ConnectionError{errPlayed}, InTx, true, true},
	} {
		f := newFixture(t, Rules{})
		if tt.unavailable {
			f.postgres = "o"
		}
		require.Equal(t, tt.want, f.processor.IsOutage(t.Context(), tt.err, tt.kind, false), tt.name)
		var own *NoteError
		require.Equal(t, errors.As(tt.err, &own), f.processor.IsOutage(t.Context(), tt.err, tt.kind, true), "%s, late", tt.name)
		f.processor.Store = nil
		if tt.kind == NoTx && tt.unavailable {
			require.False(t, f.processor.IsOutage(t.Context(), tt.err, tt.kind, false), "%s: there is no PostgreSQL", tt.name)
		}
	}
}

func TestErrorClass(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]error{
		"handler":           errPlayed,
		"permanent":         fmt.Errorf("no: %w", Permanent(errPlayed)),
		"panic":             &PanicError{Value: 1},
		"goexit":            fmt.Errorf("handler A: %w", contain.ErrGoexit),
		"transaction_ended": fmt.Errorf("handler A: %w: %w", guardtx.ErrEnded, &pgconn.PgError{Code: "42704"}),
		"timeout":           fmt.Errorf("query: %w", context.DeadlineExceeded),
		"postgres_23505":    Permanent(&pgconn.PgError{Code: "23505"}),
	} {
		require.Equal(t, want, ErrorClass(err))
	}
}

// A policy takes what it does not say from the one below it.
func TestRetryPolicy(t *testing.T) {
	t.Parallel()
	base := RetryPolicy{MaxRetries: 3, RetryWait: time.Second, MaxRetryWait: time.Minute}
	require.Equal(t, base, RetryPolicy{}.Over(base))
	own := RetryPolicy{MaxRetries: -1, RetryWait: time.Hour, MaxRetryWait: 2 * time.Hour}
	require.Equal(t, own, own.Over(base))
	for attempt, want := range map[int]time.Duration{1: time.Hour, 2: 2 * time.Hour, 3: 2 * time.Hour} {
		d, exact := own.Wait(attempt, errPlayed)
		require.Equal(t, want, d)
		require.False(t, exact)
	}
	d, exact := own.Wait(1, RetryAfter(errPlayed, time.Millisecond))
	require.Equal(t, time.Millisecond, d)
	require.True(t, exact)
	require.Equal(t, time.Millisecond, own.Next(1, RetryAfter(errPlayed, time.Millisecond)), "nothing is random about it")
}

// The context of a handler carries what the event came with, and falls back on its own.
func TestHandlerContext(t *testing.T) {
	t.Parallel()
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	ids := func(ctx context.Context) []string {
		return []string{envelope.Carried(ctx, envelope.CorrelationKey), envelope.Carried(ctx, envelope.TraceKey)}
	}
	outer := envelope.WithCarried(t.Context(), envelope.CorrelationKey, "outer")
	require.Equal(t, outer, EventContext(outer, &envelope.Received{}))
	ctx := EventContext(outer, &envelope.Received{Extensions: map[string]string{eventheader.TraceParent: trace}})
	require.Equal(t, []string{"outer", trace}, ids(ctx))
	ctx, cancel := context.WithCancel(EventContext(outer, &envelope.Received{Extensions: map[string]string{eventheader.Correlation: "event's"}}))
	require.Equal(t, []string{"event's", ""}, ids(ctx))
	require.Equal(t, "handler's", ids(envelope.WithCarried(ctx, envelope.CorrelationKey, "handler's"))[0])
	cancel()
	require.ErrorIs(t, ctx.Err(), context.Canceled)
}

// brokenError panics in its methods where it is a nil pointer.
type brokenError struct{ err error }

func (e *brokenError) Error() string { return e.err.Error() }
func (e *brokenError) Unwrap() error { return e.err }

// A nil pointer is no nil error, and its methods panic. That is an error of the host which
// returned it, and does not end the process.
func TestErrorsPanic(t *testing.T) {
	t.Parallel()
	broken := func() error { var err *brokenError; return err }
	fails := func(context.Context, played, *envelope.Received) error { return broken() }
	for name, tt := range map[string]struct {
		handler    *Handler
		middleware []Middleware
	}{
		"handler":                       {handler: actionOf("BROKEN", fails)},
		"handler of a batch":            {handler: batchOf("BROKEN", func(context.Context, []Arrival) error { return broken() })},
		"handler without a transaction": {handler: noTxOf("BROKEN", fails)},
		"middleware": {
			handler:    noTxOf("FINE", func(context.Context, played, *envelope.Received) error { return nil }),
			middleware: []Middleware{func(context.Context, HandlerCall, func(context.Context) error) error { return broken() }},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, Rules{Retry: RetryPolicy{MaxRetries: 1}, Middleware: tt.middleware}, tt.handler)
				for _, it := range f.arrive("a", "b") {
					o, _ := f.play(&it.Tasks[0])
					require.Equal(t, []any{Dead, "panic", 2}, []any{o.Result, o.Class, o.Attempt})
					require.ErrorContains(t, o.Err, "error of type *handling.brokenError, which may be a nil pointer: panic: ")
				}
			})
		})
	}

	codec := Codec{ContentType: "application/json", Decode: func(context.Context, []byte, any) error { return broken() }}
	routes, err := NewRoutes(Sources{Kinds: []EventType{{Name: playedType, GoType: reflect.TypeFor[played](), Codec: codec}}, Handlers: []*Handler{actionOf("A", fails)}})
	require.NoError(t, err)
	it := Item{Meta: envelope.Received{Origin: new(envelope.Origin)}}
	NewProcessor(testRules(Rules{}), routes, nil).Resolve(t.Context(), &it, messageOf(t, "a"), "")
	require.Equal(t, ClassUndecodable, it.Class)
	require.Empty(t, it.Tasks)
}

// Permanent holds for what PostgreSQL would have repeated, too: the handler knows better.
func TestPermanentConflict(t *testing.T) {
	t.Parallel()
	calls := map[string]int{}
	f := newFixture(t, Rules{}, actionOf("ONCE", func(_ context.Context, e played, _ *envelope.Received) error {
		calls[e.Name]++
		return Permanent(fmt.Errorf("insert: %w", &pgconn.PgError{Code: "40001"}))
	}))
	for _, it := range f.arrive("a") {
		o, _ := f.play(&it.Tasks[0])
		require.Equal(t, Dead, o.Result)
	}
	require.Equal(t, map[string]int{"a": 1}, calls)
	items := f.arrive("b", "c")
	_, err := f.processor.ProcessBatch(t.Context(), inTx(items), func(time.Duration) bool { return false })
	require.False(t, IsConflict(err), "the transaction of several is not repeated")
	require.Equal(t, map[string]int{"a": 1, "b": 1}, calls)
	failed, _ := errors.AsType[*TaskError](err)
	for _, it := range items {
		before := failed.Of(it.Tasks[0])
		o := f.attempts.Try(&it.Tasks[0], f.processor.Rules.Retry, before)
		require.Equal(t, Dead, o.Result)
	}
	require.Equal(t, map[string]int{"a": 1, "b": 1, "c": 1}, calls)
}

// A call without middleware costs no allocation more than the handler itself.
func TestNoMiddlewareNoAllocation(t *testing.T) {
	h := &Handler{Action: "ACTED", One: func(context.Context, pgx.Tx, *Arrival) error { return nil }}
	p, arrivals, ctx := &Processor{Rules: &Rules{}}, []Arrival{{Event: played{"a"}}}, t.Context()
	require.Zero(t, testing.AllocsPerRun(100, func() { require.NoError(t, p.callInMiddleware(ctx, h, nil, arrivals)) }))
}

// attemptOf returns ProcessOne without what it says about repeats.
func attemptOf(p *Processor) func(context.Context, Task) error {
	return func(ctx context.Context, t Task) error {
		_, err := p.ProcessOne(ctx, t)
		return err
	}
}

// A transaction goes on behind an event whose handler has failed without using it. It leaves out that event, and
// later ones of its key and action. It ends if many fail, and is rolled back if all do.
func TestPassFailed(t *testing.T) {
	t.Parallel()
	never := func(time.Duration) bool { return false }
	newOne := func(fails ...string) *fixture {
		f := newFixture(t, Rules{})
		f.processor.PassFailed, f.unused = true, true
		for _, name := range fails {
			f.handlers[name] = "-"
		}
		return f
	}
	names := func(l Excluded) (names []string) {
		for _, one := range l {
			names = append(names, fmt.Sprint(one.task.Event.(played).Name, one.Err != nil))
		}
		return names
	}

	f := newOne("b")
	items := f.arrive("a", "b", "c", "d", "e")
	items[2].Meta.Origin.Key = []byte("b")
	items[3].Meta.Origin.Key, items[4].Meta.Origin.Key = nil, nil // without order
	tasks := inTx(items)
	done, err := f.processor.ProcessBatch(t.Context(), tasks, never)
	require.NoError(t, err)
	require.Equal(t, []string{"a1 b1 d1 e1: committed"}, f.log)
	require.Equal(t, []string{"btrue", "cfalse"}, names(done.Excluded))
	require.ErrorIs(t, ErrorOf(tasks[1], done.Excluded.Errors()), errPlayed)
	require.NoError(t, ErrorOf(tasks[0], done.Excluded.Errors()))
	require.Len(t, f.noted, 3)
	require.Nil(t, done.Next)
	for _, task := range tasks[1:3] { // they are no repeats
		_, err := f.processor.ProcessOne(t.Context(), task)
		require.NoError(t, err)
	}
	require.Equal(t, []string{"b1: committed", "c1: committed"}, f.log[1:])

	f = newOne("b")
	f.unused = false
	_, err = f.processor.ProcessBatch(t.Context(), inTx(f.arrive("a", "b", "c")), never)
	require.ErrorIs(t, err, errPlayed, "what it has done must be undone")
	require.Equal(t, []string{"a1 b1: rolled back"}, f.log)

	for _, sign := range []string{"h", "4", "f"} {
		f = newOne()
		f.handlers["b"] = sign
		_, err = f.processor.ProcessBatch(t.Context(), inTx(f.arrive("a", "b", "c")), never)
		require.Error(t, err, sign)
		require.Equal(t, []string{"a1 b1: rolled back"}, f.log, sign)
	}

	f = newOne("a", "b", "c", "d", "e")
	done, err = f.processor.ProcessBatch(t.Context(), inTx(f.arrive("a", "b", "c", "d", "e")), never)
	require.NoError(t, err)
	require.Equal(t, []string{"a1 b1 c1 d1: rolled back"}, f.log)
	require.Len(t, done.Excluded.Errors(), 4)
	require.EqualValues(t, 4, done.Next.Record.Offset)
	require.Empty(t, f.noted)

	f = newOne("a", "b", "c", "d", "e")
	tasks = inTx(f.arrive("a", "b", "c", "d", "e"))
	for i := range tasks {
		tasks[i].Works = true
	}
	done, err = f.processor.ProcessBatch(t.Context(), tasks, never)
	require.NoError(t, err)
	require.Equal(t, []string{"a1 b1 c1 d1 e1: rolled back"}, f.log, "their action works")
	require.Nil(t, done.Next)

	f = newOne("b")
	_, err = f.processor.ProcessBatch(t.Context(), inTx(f.arrive("b")), never)
	require.ErrorIs(t, err, errPlayed)
	require.Equal(t, []string{"b1: rolled back"}, f.log)
	tasks = inTx(f.arrive("b", "c"))
	tasks[0].InPlace = true
	f.handlers["b"] = "-"
	_, err = f.processor.ProcessBatch(t.Context(), tasks, never)
	require.ErrorIs(t, err, errPlayed, "its partition waits for it")
}

// A later event that was taken for a repeat of one that fails would get lost.
func TestPassFailedBehindRepeat(t *testing.T) {
	t.Parallel()
	fails := true
	h := batchOf("B", func(context.Context, []Arrival) error {
		if fails {
			return errPlayed
		}
		return nil
	})
	h.Key, h.KeyType = func(any, *envelope.Received) (string, string) { return "Play", "all" }, h.GoType
	f := newFixture(t, Rules{}, h)
	f.processor.PassFailed, f.unused = true, true
	tasks := inTx(f.arrive("a", "b"))
	never := func(time.Duration) bool { return false }
	_, err := f.processor.ProcessBatch(t.Context(), tasks, never)
	require.ErrorIs(t, err, errPlayed)
	require.Empty(t, f.noted)
	fails = false
	done, err := f.processor.ProcessBatch(t.Context(), tasks, never)
	require.NoError(t, err)
	require.Len(t, done.Repeats, 1)
}

// A transaction in which nothing was done says nothing about PostgreSQL if its connection was lost.
func TestNothingDoneInOutage(t *testing.T) {
	t.Parallel()
	f := newFixture(t, Rules{})
	f.processor.PassFailed, f.unused, f.postgres = true, true, "co"
	f.handlers["a"], f.handlers["b"] = "-", "-"
	_, err := f.processor.ProcessBatch(t.Context(), inTx(f.arrive("a", "b")), func(time.Duration) bool { return false })
	require.Error(t, err)
	require.True(t, f.processor.IsOutage(t.Context(), err, InTx, false))
}

// Failures that take long end the transaction: it must not hold its locks for the sum of them.
func TestSlowFailuresDoNotAddUp(t *testing.T) {
	t.Parallel()
	var f *fixture
	call := func(ctx context.Context, e played, m *envelope.Received) error { return f.handle(ctx, e, m) }
	f = newFixture(t, Rules{}, actionOf("H", call), actionOf("I", call))
	f.processor.PassFailed, f.unused = true, true
	f.handlers["a"] = "--"
	items := f.arrive("a", "b")
	_, err := f.processor.ProcessBatch(t.Context(), inTx(items), func(time.Duration) bool { return true })
	require.ErrorIs(t, err, errPlayed)
	require.Equal(t, []string{"a1: rolled back"}, f.log)
}

// An event that fails behind others of its transaction may have missed what they had not committed yet. So it is tried
// alone before it is dead.
func TestFailedBesideOthersIsTriedAlone(t *testing.T) {
	t.Parallel()
	never := func(time.Duration) bool { return false }
	for sign, want := range map[string]Result{"-": Again, "p": Done} {
		f := newFixture(t, Rules{})
		f.processor.PassFailed, f.unused = true, true
		f.handlers["b"] = sign
		tasks := inTx(f.arrive("a", "b"))
		done, err := f.processor.ProcessBatch(t.Context(), tasks, never)
		require.NoError(t, err)
		o := f.attempts.Try(&tasks[1], f.processor.Rules.Retry, ErrorOf(tasks[1], done.Excluded.Errors()))
		require.Equal(t, want, o.Result, sign)
		if want == Again {
			require.Equal(t, errPlayed, o.Err, "as the handler has returned it")
			require.Len(t, f.log, 1, "it is not called again")
			tasks[1].Meta.Attempt, f.handlers["b"] = 4, "-"
			done, err = f.processor.ProcessBatch(t.Context(), append(inTx(f.arrive("c")), tasks[1]), never)
			require.NoError(t, err)
			o = f.attempts.Try(&tasks[1], f.processor.Rules.Retry, ErrorOf(tasks[1], done.Excluded.Errors()))
			require.Equal(t, Done, o.Result, "the last attempt")
		}
	}
}
