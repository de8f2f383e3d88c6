package main

import (
	"context"
	"errors"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/trading/simulator"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// states returns those of all attempts, in their order.
func (f *fixture) states(t *testing.T) string {
	t.Helper()
	rows, err := f.db.Query(t.Context(), `SELECT state FROM order_attempt ORDER BY attempt_no`)
	require.NoError(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return strings.Join(got, " ")
}

// Whatever the exchange does with the first attempt, the order is there once or not at all,
// and the attempts say which.
var executorTests = []struct {
	name      string
	behaviour simulator.Behaviour
	first     string // states after the command has come once
	firstErr  error
	last      string // when no error asks for more
	orders    int
}{
	{"accepted", simulator.Accept, "ACKED", nil, "ACKED", 1},
	{"4xx", simulator.Reject, "REJECTED", errRejected, "REJECTED", 0},
	{"429", simulator.Throttle, "THROTTLED", errThrottled, "THROTTLED ACKED", 1},
	{"5xx", simulator.Fail, "UNKNOWN", errUnknown, "NOT_PLACED", 0},
	{"5xx, and yet taken", simulator.FailTaken, "UNKNOWN", errUnknown, "ACKED", 1},
	{"time-out", simulator.Hang, "UNKNOWN", errUnknown, "NOT_PLACED", 0},
	{"time-out, and yet taken", simulator.HangTaken, "UNKNOWN", errUnknown, "ACKED", 1},
	{"time-out, taken later", simulator.TakeLate, "UNKNOWN", errUnknown, "ACKED", 1},
}

func TestExecutor(t *testing.T) {
	t.Parallel()
	for _, tt := range executorTests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, onFirst(tt.behaviour))
			command := f.decide(t)
			err := f.deliver(t, orderExecutor, command)
			require.ErrorIs(t, err, tt.firstErr)
			require.Equal(t, tt.first, f.states(t))

			// The worker delivers it again until there is no error, or a permanent one.
			for began := time.Now(); err != nil && !errors.Is(err, errRejected) && time.Since(began) < testenv.Patience; {
				time.Sleep(20 * time.Millisecond)
				err = f.deliver(t, orderExecutor, command)
			}
			require.Equal(t, tt.last, f.states(t))
			require.Equal(t, err, f.deliver(t, orderExecutor, command), "a repeat")
			require.Equal(t, tt.last, f.states(t))
			require.Len(t, f.outside.Orders(), tt.orders)
			require.Len(t, recorded[OrderAccepted](t, f), tt.orders)
			_, again := f.outside.Asked()
			require.Zero(t, again, "ordered twice")
			var overdue, inTime int // nothing moves delayed events here, so each answer is in time
			require.NoError(t, f.db.QueryRow(t.Context(), `
SELECT (SELECT count(*) FROM outbox_delayed), (SELECT count(*) FROM order_attempt WHERE answered_in_time)`).Scan(&overdue, &inTime))
			require.Zero(t, overdue)
			require.Equal(t, len(strings.Fields(tt.last)), inTime)
		})
	}
}

// onFirst does something with the first attempt of each intent, and accepts the others.
func onFirst(b simulator.Behaviour) func(string) simulator.Behaviour {
	return func(identifier string) simulator.Behaviour {
		if strings.HasSuffix(identifier, "-1") {
			return b
		}
		return simulator.Accept
	}
}

// A command that comes to several processes at the same time is ordered by one of them.
func TestCommandAtTheSameTime(t *testing.T) {
	t.Parallel()
	f := newFixture(t, onFirst(simulator.Accept))
	command := f.decide(t)
	var g errgroup.Group
	for range 8 {
		g.Go(func() error {
			_ = f.groups[orderExecutor].Deliver(t.Context(), command) // those that come late see an error, and look again
			return nil
		})
	}
	require.NoError(t, g.Wait())
	require.NoError(t, f.deliver(t, orderExecutor, command))
	require.Equal(t, "ACKED", f.states(t))
	require.Len(t, f.outside.Orders(), 1)
	require.Len(t, recorded[OrderAccepted](t, f), 1)
}

// A process that is killed before it has sent an order leaves PREPARED behind. The order is sent.
func TestKilledBeforeSending(t *testing.T) {
	t.Parallel()
	f := newFixture(t, onFirst(simulator.Accept))
	command := f.decide(t)
	x := executor{f.db, f.bus, exchange{f.exchange, newHTTP(exchangeTimeout)}, f.wake}
	_, err := x.prepare(t.Context(), recorded[CreateOrderAttempt](t, f)[0].OrderIntent)
	require.NoError(t, err)
	require.Equal(t, "PREPARED", f.states(t))
	require.NoError(t, f.deliver(t, orderExecutor, command))
	require.Equal(t, "ACKED", f.states(t))
}

// A process that is killed after it has sent an order leaves SENT behind. Whether the exchange
// has got the order is asked, and nothing is sent.
func TestKilledWhileSending(t *testing.T) {
	t.Parallel()
	f := newFixture(t, onFirst(simulator.Accept))
	command := f.decide(t)
	intent := recorded[CreateOrderAttempt](t, f)[0].OrderIntent
	x := executor{f.db, f.bus, exchange{f.exchange, newHTTP(exchangeTimeout)}, f.wake}
	a, err := x.prepare(t.Context(), intent)
	require.NoError(t, err)
	_, err = f.db.Exec(t.Context(), sqlSend, a.Identifier, before[Sent], Sent, time.Now())
	require.NoError(t, err)
	require.Eventually(t, func() bool { return f.deliver(t, orderExecutor, command) == nil }, testenv.Patience, 20*time.Millisecond)
	require.Equal(t, "NOT_PLACED", f.states(t))
	asked, _ := f.outside.Asked()
	require.Zero(t, asked)
}

// A process that was slow hears from the exchange what another one has found out meanwhile.
func TestAnswerAfterReconciliation(t *testing.T) {
	t.Parallel()
	f := newFixture(t, onFirst(simulator.FailTaken))
	command := f.decide(t)
	intent := recorded[CreateOrderAttempt](t, f)[0].OrderIntent
	x := executor{f.db, f.bus, exchange{f.exchange, newHTTP(exchangeTimeout)}, f.wake}
	require.ErrorIs(t, f.deliver(t, orderExecutor, command), errUnknown)
	require.Eventually(t, func() bool { return f.deliver(t, orderExecutor, command) == nil }, testenv.Patience, 20*time.Millisecond)
	a, err := x.prepare(t.Context(), intent)
	require.NoError(t, err)
	for _, late := range []Answer{{State: Acked, OrderID: "order-1"}, {State: Unknown}} {
		_ = x.conclude(t.Context(), intent, a, late)
		require.Equal(t, "ACKED", f.states(t))
		require.Len(t, recorded[OrderAccepted](t, f), 1)
	}
}

// late returns the command that was recorded, as if the deadline of its signal had passed.
func (f *fixture) late(t *testing.T) CreateOrderAttempt {
	t.Helper()
	c := recorded[CreateOrderAttempt](t, f)[0]
	var expires time.Time
	require.NoError(t, f.db.QueryRow(t.Context(), `SELECT expires_at FROM outbox WHERE event_type = 'CreateOrderAttempt.v1'`).Scan(&expires))
	require.WithinDuration(t, expires, c.Deadline, time.Microsecond, "the deadline of the intent is that of its command")
	c.Deadline = time.Now()
	return c
}

// A command that the exchange has throttled until its signal is worth nothing ends, without another request. It has
// begun in time, so it does not expire by itself.
func TestThrottledUntilTheDeadline(t *testing.T) {
	t.Parallel()
	f := newFixture(t, onFirst(simulator.Throttle))
	require.ErrorIs(t, f.deliver(t, orderExecutor, f.decide(t)), errThrottled)
	x := executor{f.db, f.bus, exchange{f.exchange, newHTTP(exchangeTimeout)}, f.wake}
	for range 2 {
		require.NoError(t, x.createOrderAttempt(t.Context(), f.late(t), outbox.Metadata{Attempt: 2}))
		require.Equal(t, "THROTTLED EXPIRED", f.states(t))
	}
	asked, again := f.outside.Asked()
	require.Equal(t, []int{1, 0}, []int{asked, again})
	require.Empty(t, f.outside.Orders())
	require.Contains(t, f.print(t), "1 THROTTLED and made again, 0 NOT_PLACED, 1 EXPIRED")
}

// An attempt that a killed process has prepared is not sent behind the deadline either. One that another process has
// sent meanwhile stays as it is.
func TestPreparedUntilTheDeadline(t *testing.T) {
	t.Parallel()
	f := newFixture(t, onFirst(simulator.Accept))
	f.decide(t)
	command := f.late(t)
	x := executor{f.db, f.bus, exchange{f.exchange, newHTTP(exchangeTimeout)}, f.wake}
	a, err := x.prepare(t.Context(), command.OrderIntent)
	require.NoError(t, err)
	require.NoError(t, x.createOrderAttempt(t.Context(), command, outbox.Metadata{Attempt: 2}))
	require.Equal(t, "EXPIRED", f.states(t))
	_, err = f.db.Exec(t.Context(), `UPDATE order_attempt SET state = 'SENT'`)
	require.NoError(t, err)
	require.ErrorIs(t, x.place(t.Context(), command.OrderIntent, a), errSending)
	require.Equal(t, "SENT", f.states(t))
	asked, _ := f.outside.Asked()
	require.Zero(t, asked)
}

// A time-out that the exchange reports leaves open whether it has the order, as one of the client does.
func TestTimeOutOfTheExchange(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]State{
		http.StatusRequestTimeout: Unknown, http.StatusConflict: Unknown, http.StatusBadRequest: Rejected, http.StatusUnprocessableEntity: Rejected,
	} {
		address, closeServer, err := serve(t.Context(), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
		require.NoError(t, err)
		got := exchange{address, newHTTP(exchangeTimeout)}.place(t.Context(), anIntent, Attempt{Identifier: "1"})
		closeServer()
		require.Equal(t, want, got.State, status)
	}
}

// failingBus is an event bus that cannot record the event OrderAccepted.
type failingBus struct{ EventBus }

func (b failingBus) Record(ctx context.Context, tx pgx.Tx, events ...outbox.DomainEvent) error {
	if _, is := events[0].(OrderAccepted); is {
		return errBus
	}
	return b.EventBus.Record(ctx, tx, events...)
}

var errBus = errors.New("an event cannot be recorded")

// An answer that cannot be written down leaves an order that may be at the exchange. However often the command was
// tried before, it is not DEAD, and the exchange is asked.
func TestAnswerThatCannotBeWrittenDown(t *testing.T) {
	t.Parallel()
	f := newFixture(t, onFirst(simulator.Accept))
	command := f.decide(t)
	x := executor{f.db, failingBus{f.bus}, exchange{f.exchange, newHTTP(exchangeTimeout)}, f.wake}
	err := x.createOrderAttempt(t.Context(), recorded[CreateOrderAttempt](t, f)[0], outbox.Metadata{})
	require.ErrorIs(t, err, errBus)
	require.Equal(t, math.MaxInt, retries(err))
	require.Equal(t, "SENT", f.states(t))
	require.Eventually(t, func() bool { return f.deliver(t, orderExecutor, command) == nil }, testenv.Patience, 20*time.Millisecond)
	require.Equal(t, "ACKED", f.states(t))
	_, again := f.outside.Asked()
	require.Zero(t, again, "ordered twice")
}
