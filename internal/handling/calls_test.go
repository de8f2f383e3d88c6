package handling

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/pg"
)

// callsFixture notes which handlers get which events, in handlerCalls of its own.
type callsFixture struct {
	tasks  []Task
	calls  [][]int // by the index of their tasks
	names  []string
	noteOf []string // of the tasks, if not each has its own
}

func (f *callsFixture) handler(action string, kind HandlerKind) *Handler {
	call := func(_ context.Context, _ pgx.Tx, arrivals []Arrival) error {
		var got []int
		name := action
		for _, a := range arrivals {
			got = append(got, a.Event.(int))
			name += " " + a.Meta.ID
		}
		f.calls, f.names = append(f.calls, got), append(f.names, name)
		return nil
	}
	h := &Handler{Action: action, Kind: kind, Many: call}
	h.One = func(ctx context.Context, tx pgx.Tx, a *Arrival) error { return call(ctx, tx, []Arrival{*a}) }
	return h
}

// add adds an event of a type and a key, with a task for each of some handlers.
func (f *callsFixture) add(eventType, key string, handlers ...*Handler) {
	from := &envelope.Origin{Key: []byte(key)}
	for _, h := range handlers {
		f.tasks = append(f.tasks, Task{Handler: h, Arrival: Arrival{len(f.tasks), envelope.Received{ID: eventType + key, Type: eventType, Origin: from}}})
	}
}

func (f *callsFixture) run(t *testing.T) *handlerCalls {
	t.Helper()
	c := f.newCalls()
	require.NoError(t, c.run(t.Context()))
	require.Len(t, c.results, len(f.tasks))
	return c
}

func (f *callsFixture) newCalls() *handlerCalls {
	c := &handlerCalls{
		clock: clock{pg.ClockAt(time.Now())},
		tasks: f.tasks, keys: make([]NoteKey, len(f.tasks)), fresh: map[NoteKey]bool{}, tx: &playedTx{fixture: &fixture{}},
		enough: func(time.Duration) bool { return false }, runSeparately: func(...*Handler) {},
		callOne: func(ctx context.Context, h *Handler, tx pgx.Tx, arrivals []Arrival) (time.Duration, error) {
			return 0, h.call(ctx, tx, arrivals)
		},
	}
	for i := range f.tasks {
		c.keys[i].Action = fmt.Sprint(i)
		if f.noteOf != nil {
			c.keys[i].Action = f.noteOf[i]
		}
		c.fresh[c.keys[i]] = true
	}
	return c
}

// A later task of the action and key of a failed one was called, or will be: the transaction must not go on. A call
// of batches comes late.
func TestFailedBatchInFrontOfItsKey(t *testing.T) {
	t.Parallel()
	for _, kind := range []HandlerKind{InTx, InBatch} {
		f := &callsFixture{}
		first := f.handler("P", InBatch)
		first.Many = func(context.Context, pgx.Tx, []Arrival) error { return errPlayed }
		f.add("x", "k", first)
		f.add("y", "k", f.handler("P", kind))
		c := f.newCalls()
		c.passes, c.tx = true, &playedTx{fixture: &fixture{unused: true}}
		require.ErrorIs(t, c.run(t.Context()), errPlayed)
		require.Empty(t, f.calls)
	}
}

// An event may have two tasks of an action, for two versions of its type. The second one is a repeat of the first,
// so it is not called if that fails.
func TestFailedTaskOfTwoVersions(t *testing.T) {
	t.Parallel()
	f := &callsFixture{noteOf: []string{"same", "same", "other"}}
	first := f.handler("P", InTx)
	first.One = func(context.Context, pgx.Tx, *Arrival) error { return errPlayed }
	f.add("x", "", first, f.handler("P", InTx))
	f.add("x", "", f.handler("P", InTx))
	c := f.newCalls()
	c.passes, c.tx = true, &playedTx{fixture: &fixture{unused: true}}
	require.NoError(t, c.run(t.Context()))
	require.Equal(t, [][]int{{2}}, f.calls)
	require.Len(t, c.excluded, 2)
	require.True(t, c.fresh[NoteKey{Action: "same"}])
}

// An event of a handler of batches may expire while other handlers run in front of its call. Its note of OncePer is
// left to later events, unless one of them was taken for a repeat.
func TestExpiredInFrontOfACall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &callsFixture{}
		slow := f.handler("SLOW", InTx)
		slow.One = func(context.Context, pgx.Tx, *Arrival) error {
			time.Sleep(2 * time.Second)
			return nil
		}
		batch, once := f.handler("BATCH", InBatch), f.handler("ONCE", InBatch)
		once.Key = func(any, *envelope.Received) (string, string) { return "", "" }
		for _, e := range []struct {
			key     string
			handler *Handler
			expires time.Duration
			noteOf  string
		}{
			{"1", batch, time.Second, "1"}, {"2", batch, time.Hour, "2"}, {"3", once, time.Second, "3"},
			{"4", once, time.Second, "same"}, {"5", once, time.Hour, "same"}, {"6", slow, time.Second, "6"},
		} {
			f.add("a", e.key, e.handler)
			f.tasks[len(f.tasks)-1].Meta.Expires = time.Now().Add(e.expires)
			f.noteOf = append(f.noteOf, e.noteOf)
		}
		c := f.run(t)
		require.Equal(t, []string{"BATCH a2", "ONCE a4"}, f.names)
		var expired, repeats []bool
		for _, r := range c.results {
			expired, repeats = append(expired, r.expired), append(repeats, r.Repeat)
		}
		require.Equal(t, []bool{true, false, true, false, false, false}, expired)
		require.Equal(t, []bool{true, false, true, false, true, false}, repeats)
		require.Equal(t, map[NoteKey]bool{{Action: "3"}: true}, c.fresh, "whose notes are taken back")
	})
}

// A handler of HandleBatch gets its events late, and many at once; but before another handler
// gets a later event of the same key.
func TestHandlerCalls(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		events []string // type, key
		want   []string
	}{
		{"different keys", []string{"a1", "b2", "a3", "b4"}, []string{"B b2", "B b4", "A a1 a3"}},
		{"the same key", []string{"a1", "b1", "a1", "b1"}, []string{"A a1", "B b1", "A a1", "B b1"}},
		{"one of several keys", []string{"a1", "a2", "b2", "a1", "a3"}, []string{"A a1 a2", "B b2", "A a1 a3"}},
		{"the other order", []string{"b1", "a1", "b2", "a2"}, []string{"B b1", "B b2", "A a1 a2"}},
		{"two handlers of batches", []string{"a1", "c1", "a2", "c2"}, []string{"A a1 a2", "C c1 c2"}},
		{"two handlers of batches in turns", []string{"a1", "c1", "a1", "c2"}, []string{"A a1", "C c1 c2", "A a1"}},
		{"three handlers of one key", []string{"a1", "c1", "b1", "a2"}, []string{"A a1", "C c1", "B b1", "A a2"}},
		{"no key, so no order", []string{"a", "b", "a"}, []string{"B b", "A a a"}},
		{"one type in two forms", []string{"d1", "d1"}, []string{"D d1", "D d1", "E d1 d1"}},
	} {
		f := &callsFixture{}
		handlers := map[byte][]*Handler{
			'a': {f.handler("A", InBatch)}, 'b': {f.handler("B", InTx)}, 'c': {f.handler("C", InBatch)}, 'd': {f.handler("E", InBatch), f.handler("D", InTx)},
		}
		for _, e := range tt.events {
			f.add(e[:1], e[1:], handlers[e[0]]...)
		}
		require.Empty(t, f.run(t).fresh)
		require.Equal(t, tt.want, f.names, tt.name)
	}
}

// At random: each handler gets its events in order, and no event of a key is passed by one of
// another type.
func TestHandlerCallsAtRandom(t *testing.T) {
	t.Parallel()
	for seed := range uint64(2_000) {
		random := rand.New(rand.NewPCG(seed, 14))
		f := &callsFixture{}
		all := []*Handler{f.handler("A", InTx), f.handler("B", InBatch), f.handler("C", InBatch), f.handler("D", InTx), f.handler("E", InBatch)}
		of := [][]*Handler{{all[0], all[1]}, {all[2]}, {all[3]}, {all[4], all[2]}} // C gets events of two types
		for range 1 + random.IntN(30) {
			n := random.IntN(len(of))
			f.add(fmt.Sprint("t", n), fmt.Sprint(random.IntN(4)), of[n]...)
		}
		require.Empty(t, f.run(t).fresh)
		called := make([]int, len(f.tasks)) // by task, in which call
		for n, call := range f.calls {
			for _, i := range call {
				called[i] = n + 1
			}
		}
		for i, a := range f.tasks {
			require.Positive(t, called[i], "seed %d", seed)
			for j, b := range f.tasks[:i] {
				sameKey := string(a.Meta.Origin.Key) == string(b.Meta.Origin.Key)
				if sameKey && a.Meta.Type != b.Meta.Type && a.Handler != b.Handler {
					require.Less(t, called[j], called[i], "seed %d: %v", seed, f.names)
				}
				if a.Handler == b.Handler {
					require.LessOrEqual(t, called[j], called[i], "seed %d: %v", seed, f.names)
				}
			}
		}
	}
}
