package outbox

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/eventheader"
	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/handling"
)

// The tasks of a batch run in the order of their records, those of batch handlers
// after them, and those without a transaction not at all.
func TestProcessBatchOrder(t *testing.T) {
	t.Parallel()
	var s *partitionFixture
	call := func(action string) func(context.Context, pgx.Tx, played, Metadata) error {
		return func(_ context.Context, _ pgx.Tx, e played, _ Metadata) error {
			s.current = append(s.current, action+e.Name)
			return nil
		}
	}
	s = newPartitionFixture(t, ConsumerConfig{},
		HandleNoTx("N", func(ctx context.Context, e played, m Metadata) error { return call("n")(ctx, nil, e, m) }),
		HandleBatch("B", func(_ context.Context, _ pgx.Tx, events []Received[played]) error {
			for _, e := range events {
				s.current = append(s.current, fmt.Sprint("b", len(events), e.Event.Name))
			}
			return nil
		}),
		Handle("H", call("h")), Handle("I", call("i")),
		OncePer(Handle("ONCE", call("o")), func(played, Metadata) (string, string) { return "Play", "all" }))
	var items []recordItem
	for _, r := range s.arrive("x", "y") {
		items = append(items, s.worker.reader.read(t.Context(), r, replay{}, new(origin)))
	}
	all := func(time.Duration) bool { return false }
	next, err := s.worker.processor.processBatch(t.Context(), tasksInTx(items), all)
	require.NoError(t, err)
	require.Nil(t, next)
	require.Equal(t, []string{"hx ix ox hy iy b2x b2y: committed"}, s.log)
	next, err = s.worker.processor.processBatch(t.Context(), tasksInTx(items), all)
	require.NoError(t, err)
	require.Nil(t, next)
	require.Equal(t, ": committed", s.log[1], "all are repeats")
}

// Events that no record brought are handled as others are, and log lines about their handlers say
// which delivery it was.
func TestProcessorWithoutKafka(t *testing.T) {
	t.Parallel()
	var s *partitionFixture
	var places []string
	note := func(m Metadata) {
		call, _ := s.worker.activity.Current()
		places = append(places, call.Place.String())
		require.Nil(t, m.Kafka)
	}
	s = newPartitionFixture(t, ConsumerConfig{HandlerConfig: HandlerConfig{Hooks: ConsumerHooks{Handled: func(m Metadata, _ string, _ time.Duration) { note(m) }}}},
		Handle("A", func(_ context.Context, _ pgx.Tx, _ played, m Metadata) error { note(m); return nil }),
		HandleNoTx("B", func(_ context.Context, _ played, m Metadata) error { note(m); return nil }))
	p := s.worker.processor
	var tasks []task
	for id := range int64(2) {
		it := item{meta: Metadata{Attempt: 1, origin: &origin{key: []byte("k"), delivery: deliveryOrigin{id: id, stream: "plays"}}}}
		m := Message{ID: fmt.Sprint(id), Type: "test.play.acted.v1", Source: "s", ByPosition: true, Data: []byte(`{"Name":"a"}`)}
		p.resolve(t.Context(), &it, &m, "A")
		require.NoError(t, it.err)
		tasks = it.appendInTx(tasks)
		p.resolve(t.Context(), &it, &m, "B")
		require.NoError(t, p.processOne(t.Context(), it.tasks[0]))
		p.resolve(t.Context(), &it, &m, "C")
		require.Equal(t, classUnknownAction, it.class)
		require.ErrorContains(t, it.err, `action "C" is not registered`)
	}
	one := 0
	next, err := p.processBatch(t.Context(), tasks, func(time.Duration) bool { one++; return true })
	require.NoError(t, err)
	require.Same(t, tasks[1].meta.origin, next)
	require.Equal(t, 1, one)
	require.Equal(t, []string{"delivery 0 of plays", "delivery 0 of plays", "delivery 1 of plays", "delivery 1 of plays", "delivery 0 of plays", "delivery 0 of plays"}, places)
}

// What is completed with the tasks is so in their transaction, behind the handlers. If that fails,
// nothing is committed, and no handler is blamed.
func TestProcessorCompletes(t *testing.T) {
	t.Parallel()
	handled := 0
	s := newPartitionFixture(t, ConsumerConfig{HandlerConfig: HandlerConfig{Hooks: ConsumerHooks{Handled: func(Metadata, string, time.Duration) { handled++ }}}})
	p, failure := s.worker.processor, error(nil)
	p.complete = func(_ context.Context, _ handlerTx, results []taskResult) error {
		for _, r := range results {
			s.current = append(s.current, fmt.Sprint("done ", r.meta.Subject, " ", r.repeat))
		}
		return failure
	}
	var items []recordItem
	for _, r := range s.arrive("a", "b") {
		items = append(items, s.worker.reader.read(t.Context(), r, replay{}, new(origin)))
	}
	all := func(time.Duration) bool { return false }
	for _, failure = range []error{errPlayed, guardtx.ErrSettings} {
		_, err := p.processBatch(t.Context(), tasksInTx(items), all)
		for _, err := range []error{err, p.processOne(t.Context(), items[0].tasks[0]), &connectionError{err}} {
			require.ErrorIs(t, err, failure)
			var failed *taskError
			require.False(t, errors.As(err, &failed))
			require.True(t, p.isOutage(t.Context(), err, inTx, false))
		}
	}
	require.True(t, p.sharing(tasksInTx(items)))
	require.Zero(t, handled)
	require.Equal(t, []string{"a1 b1 done a false done b false: rolled back", "a1 done a false: rolled back"}, s.log[:2])

	s.log, failure = nil, nil
	require.NoError(t, p.processOne(t.Context(), items[0].tasks[0]))
	_, err := p.processBatch(t.Context(), tasksInTx(items), all)
	require.NoError(t, err)
	require.Equal(t, []string{"a1 done a false: committed", "b1 done a true done b false: committed"}, s.log)
	require.Equal(t, 2, handled)
}

// Hooks hear of what is committed, and of nothing else.
func TestProcessorNotifies(t *testing.T) {
	t.Parallel()
	var heard []string
	hooks := ConsumerHooks{
		Handled:  func(m Metadata, action string, _ time.Duration) { heard = append(heard, "handled "+m.Subject) },
		Repeated: func(m Metadata, action string) { heard = append(heard, "repeated "+m.Subject) },
	}
	called := func(ctx context.Context, call HandlerCall, next func(context.Context) error) error {
		err := next(ctx)
		heard = append(heard, fmt.Sprint("called ", call.Events[0].Metadata.Subject, " ", err))
		return err
	}
	s := newPartitionFixture(t, ConsumerConfig{HandlerConfig: HandlerConfig{Hooks: hooks, Middleware: []Middleware{called}}})
	records := s.arrive("a", "b")
	one := func(r *kgo.Record) error {
		it := s.worker.reader.read(t.Context(), r, replay{}, new(origin))
		return s.worker.processor.processOne(t.Context(), it.tasks[0])
	}
	require.NoError(t, one(records[0]))
	require.NoError(t, one(records[0]))
	s.handlers["b"] = "-"
	require.ErrorIs(t, one(records[1]), errPlayed)
	s.transactions = "d"
	require.Error(t, one(records[1]))
	require.Equal(t, []string{"called a <nil>", "handled a", "repeated a", "called b played", "called b <nil>"}, heard)
}

// Whose fault an error is.
func TestIsOutage(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name        string
		err         error
		kind        handlerKind
		unavailable bool // there is no connection to be had
		want        bool
	}{
		{"a handler's error", errPlayed, inTx, true, false},
		{"that of a handler without a transaction", errPlayed, noTx, false, false},
		{"that of a handler without a transaction, perhaps for want of PostgreSQL", errPlayed, noTx, true, true},
		{"bad SQL", &pgconn.PgError{Code: "42601"}, inTx, true, false},
		{"a shutdown", &pgconn.PgError{Code: "57P01"}, inTx, true, true},
		{"a shutdown of another server", &pgconn.PgError{Code: "57P01"}, inTx, false, false},
		{"too many connections elsewhere", &pgconn.PgError{Code: "53300"}, noTx, false, false},
		{"a limit of PostgreSQL's configuration", &pgconn.PgError{Code: "53400"}, inTx, false, false},
		{"another server that is a replica", fmt.Errorf("insert: %w", &pgconn.PgError{Code: "25006"}), inBatch, false, false},
		{"no connection to another server", &pgconn.ConnectError{}, inTx, false, false},
		{"a cancelled statement", &pgconn.PgError{Code: "57014"}, inTx, true, false},
		{"no connection for the notes", &storeError{errPlayed}, inTx, false, true},
		{"the notes are locked", &storeError{&pgconn.PgError{Code: "57014"}}, inTx, false, true},
		{"a lost connection", &connectionError{errPlayed}, inTx, false, false},
		{"a lost connection and no other", &connectionError{errPlayed}, inTx, true, true},
	} {
		s := newPartitionFixture(t, ConsumerConfig{})
		if tt.unavailable {
			s.transactions = "o"
		}
		require.Equal(t, tt.want, s.worker.processor.isOutage(t.Context(), tt.err, tt.kind, false), tt.name)
		var own *storeError
		require.Equal(t, errors.As(tt.err, &own), s.worker.processor.isOutage(t.Context(), tt.err, tt.kind, true), "%s, late", tt.name)
		s.worker.processor.store = nil
		if tt.kind == noTx && tt.unavailable {
			require.False(t, s.worker.processor.isOutage(t.Context(), tt.err, tt.kind, false), "%s: there is no PostgreSQL", tt.name)
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
		"transaction_ended": fmt.Errorf("handler A: %w: %w", ErrHandlerTx, &pgconn.PgError{Code: "42704"}),
		"timeout":           fmt.Errorf("query: %w", context.DeadlineExceeded),
		"postgres_23505":    Permanent(&pgconn.PgError{Code: "23505"}),
	} {
		require.Equal(t, want, errorClass(err))
	}
}

// A policy takes what it does not say from the configuration, and its waits are those of [TestWorkerRetryWait].
func TestRetryPolicy(t *testing.T) {
	t.Parallel()
	cfg := HandlerConfig{}.withDefaults()
	require.Equal(t, RetryPolicy{MaxRetries: 3, RetryWait: time.Second, MaxRetryWait: time.Minute}, RetryPolicy{}.over(cfg.policy()))
	own := RetryPolicy{MaxRetries: -1, RetryWait: time.Hour, MaxRetryWait: 2 * time.Hour}
	require.Equal(t, own, own.over(cfg.policy()))
	for attempt, want := range map[int]time.Duration{1: time.Hour, 2: 2 * time.Hour, 3: 2 * time.Hour} {
		d, exact := own.wait(attempt, errPlayed)
		require.Equal(t, want, d)
		require.False(t, exact)
	}
	d, exact := own.wait(1, RetryAfter(errPlayed, time.Millisecond))
	require.Equal(t, time.Millisecond, d)
	require.True(t, exact)
	require.Equal(t, time.Millisecond, own.next(1, RetryAfter(errPlayed, time.Millisecond)), "nothing is random about it")
}

// The context of a handler carries what the event came with, and falls back on its own.
func TestHandlerContext(t *testing.T) {
	t.Parallel()
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	outer := WithCorrelationID(t.Context(), "outer")
	require.Equal(t, outer, handlerContext(outer, Metadata{}))
	ctx := handlerContext(outer, Metadata{Extensions: map[string]string{eventheader.TraceParent: trace}})
	require.Equal(t, []string{"outer", trace}, []string{CorrelationID(ctx), TraceParent(ctx)})
	ctx, cancel := context.WithCancel(handlerContext(outer, Metadata{Extensions: map[string]string{eventheader.Correlation: "event's"}}))
	require.Equal(t, []string{"event's", ""}, []string{CorrelationID(ctx), TraceParent(ctx)})
	require.Equal(t, "handler's", CorrelationID(WithCorrelationID(ctx, "handler's")))
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
	for name, tt := range map[string]struct {
		handler    Handler
		middleware []Middleware
		want       string
	}{
		"handler":                       {handler: Handle("BROKEN", func(context.Context, pgx.Tx, played, Metadata) error { return broken() })},
		"handler of a batch":            {handler: HandleBatch("BROKEN", func(context.Context, pgx.Tx, []Received[played]) error { return broken() })},
		"handler without a transaction": {handler: HandleNoTx("BROKEN", func(context.Context, played, Metadata) error { return broken() })},
		"middleware": {handler: HandleNoTx("FINE", func(context.Context, played, Metadata) error { return nil }),
			middleware: []Middleware{func(context.Context, HandlerCall, func(context.Context) error) error { return broken() }}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newPartitionFixture(t, ConsumerConfig{HandlerConfig: HandlerConfig{MaxRetries: 1, Middleware: tt.middleware}}, tt.handler)
				s.worker.handle(s.arrive("a", "b"))
				require.Len(t, s.records, 2)
				for _, r := range s.records {
					require.Equal(t, []string{"panic", "2"}, []string{headerOf(r, DeadLetterClass), headerOf(r, DeadLetterAttempts)})
					require.Contains(t, headerOf(r, DeadLetterError), "error of type *outbox.brokenError, which may be a nil pointer: panic: ")
				}
			})
		})
	}

	s := newPartitionFixture(t, ConsumerConfig{})
	s.worker.reader.decode = func(*kgo.Record) (*Message, error) { return nil, broken() }
	s.worker.handle(s.arrive("a"))
	require.Equal(t, []string{"dead letter a after 0: undecodable"}, s.log)
}

// Permanent holds for what PostgreSQL would have repeated, too: the handler knows better.
func TestPermanentConflict(t *testing.T) {
	t.Parallel()
	calls := map[string]int{}
	s := newPartitionFixture(t, ConsumerConfig{}, Handle("ONCE", func(_ context.Context, _ pgx.Tx, e played, _ Metadata) error {
		calls[e.Name]++
		return Permanent(fmt.Errorf("insert: %w", &pgconn.PgError{Code: "40001"}))
	}))
	s.worker.handle(s.arrive("a"))
	require.Equal(t, map[string]int{"a": 1}, calls)
	s.worker.handle(s.arrive("b", "c"))
	require.Equal(t, map[string]int{"a": 1, "b": 1, "c": 1}, calls)
	require.Len(t, s.records, 3)
}

// Records that need no transaction say nothing about PostgreSQL: an outage that others have
// found goes on, in the log and for probes.
func TestRecordsWithoutTransaction(t *testing.T) {
	t.Parallel()
	s := newPartitionFixture(t, ConsumerConfig{}, HandleNoTx("SEEN", func(context.Context, played, Metadata) error { return nil }))
	s.worker.limits.slots.transactions = handling.NewSlots(1)
	require.True(t, s.worker.limits.slots.transactions.Take(t.Context()), "transactions of others have all slots")
	s.worker.outages.Report(outagePostgres, time.Now(), errPlayed)
	s.worker.handle(s.arrive("a"))
	require.True(t, s.worker.outages.Failing())
	next, _ := s.worker.uncommitted()
	require.EqualValues(t, 1, next.Offset)
}

func headerOf(r *kgo.Record, name string) string {
	for _, h := range r.Headers {
		if h.Key == name {
			return string(h.Value)
		}
	}
	return ""
}
