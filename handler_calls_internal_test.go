package outbox

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/testenv"
)

// callsFixture notes which handlers get which events, in handlerCalls of its own.
type callsFixture struct {
	tasks []task
	calls [][]int // by the index of their tasks
	names []string
}

func (f *callsFixture) handler(action string, kind handlerKind) *handler {
	call := func(_ context.Context, _ pgx.Tx, arrivals []arrival) error {
		var got []int
		name := action
		for _, a := range arrivals {
			got = append(got, a.event.(int))
			name += " " + a.meta.ID
		}
		f.calls, f.names = append(f.calls, got), append(f.names, name)
		return nil
	}
	h := &handler{action: action, kind: kind, many: call}
	h.one = func(ctx context.Context, tx pgx.Tx, a arrival) error { return call(ctx, tx, []arrival{a}) }
	return h
}

// add adds an event of a type and a key, with a task for each of some handlers.
func (f *callsFixture) add(eventType, key string, handlers ...*handler) {
	from := &origin{key: []byte(key)}
	for _, h := range handlers {
		f.tasks = append(f.tasks, task{h, arrival{len(f.tasks), Metadata{ID: eventType + key, Type: eventType, origin: from}}})
	}
}

func (f *callsFixture) run(t *testing.T) {
	t.Helper()
	c := &handlerCalls{
		tasks: f.tasks, keys: make([]handledKey, len(f.tasks)), fresh: map[handledKey]bool{}, tx: &playedTx{fixture: &partitionFixture{}},
		enough: func(time.Duration) bool { return false }, keepApart: func(...*handler) {},
		callOne: func(ctx context.Context, h *handler, tx pgx.Tx, arrivals []arrival) (time.Duration, error) {
			return 0, h.call(ctx, tx, arrivals)
		},
	}
	for i := range f.tasks {
		c.keys[i].action = fmt.Sprint(i)
		c.fresh[c.keys[i]] = true
	}
	require.NoError(t, c.run(t.Context()))
	require.Empty(t, c.fresh)
	require.Len(t, c.results, len(f.tasks))
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
		handlers := map[byte][]*handler{
			'a': {f.handler("A", inBatch)}, 'b': {f.handler("B", inTx)}, 'c': {f.handler("C", inBatch)}, 'd': {f.handler("E", inBatch), f.handler("D", inTx)},
		}
		for _, e := range tt.events {
			f.add(e[:1], e[1:], handlers[e[0]]...)
		}
		f.run(t)
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
		all := []*handler{f.handler("A", inTx), f.handler("B", inBatch), f.handler("C", inBatch), f.handler("D", inTx), f.handler("E", inBatch)}
		of := [][]*handler{{all[0], all[1]}, {all[2]}, {all[3]}, {all[4], all[2]}} // C gets events of two types
		for range 1 + random.IntN(30) {
			n := random.IntN(len(of))
			f.add(fmt.Sprint("t", n), fmt.Sprint(random.IntN(4)), of[n]...)
		}
		f.run(t)
		called := make([]int, len(f.tasks)) // by task, in which call
		for n, call := range f.calls {
			for _, i := range call {
				called[i] = n + 1
			}
		}
		for i, a := range f.tasks {
			require.Positive(t, called[i], "seed %d", seed)
			for j, b := range f.tasks[:i] {
				sameKey := string(a.meta.origin.key) == string(b.meta.origin.key)
				if sameKey && a.meta.Type != b.meta.Type && a.handler != b.handler {
					require.Less(t, called[j], called[i], "seed %d: %v", seed, f.names)
				}
				if a.handler == b.handler {
					require.LessOrEqual(t, called[j], called[i], "seed %d: %v", seed, f.names)
				}
			}
		}
	}
}

// Functions of the host that end their goroutine do not end the worker: handlers, codecs and
// hooks. What they leave undone is the event's failure, or nothing.
func TestPartitionWorkerOutlivesGoexit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log := new(testenv.Buffer)
		exit := func() { runtime.Goexit() }
		hooks := ConsumerHooks{
			Handled:      func(Metadata, string, time.Duration) { exit() },
			Repeated:     func(Metadata, string) { exit() },
			Failed:       func(Metadata, string, error) { exit() },
			Conflicted:   func(Metadata, string, error) { exit() },
			DeadLettered: func(Metadata, string, string, error) { exit() },
			Unknown:      func(Metadata) { exit() },
		}
		cfg := ConsumerConfig{HandlerConfig: HandlerConfig{
			MaxRetries: 1, Hooks: hooks, Logger: slog.New(slog.NewTextHandler(log, nil)), RetriesFor: func(error) int { exit(); return 9 },
		}}
		s := newPartitionFixture(t, cfg)
		s.handlers["a"], s.handlers["b"], s.handlers["d"] = "-", "xx", "4"
		decode := s.worker.reader.decode
		s.worker.reader.decode = func(r *kgo.Record) (*Message, error) {
			if r.Offset == 2 {
				exit()
			}
			return decode(r)
		}
		s.worker.handle(s.arrive("a", "b", "c", "d"))
		require.Equal(t, []string{"a1: rolled back", "a2: committed", "b1: rolled back", "b2: rolled back", "dead letter b after 2: goexit",
			"dead letter c after 0: undecodable", "d1: rolled back", "d1: committed"}, s.log)
		for _, hook := range []string{"Handled", "Failed", "Conflicted", "DeadLettered"} {
			require.Contains(t, log.String(), "Hooks."+hook)
		}
	})
}
