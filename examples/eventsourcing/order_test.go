package main

import (
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
)

var (
	noon = time.Date(2026, 2, 3, 12, 0, 0, 0, time.UTC)
	anID = uuid.MustParse("0196b0c5-6a00-7000-8000-000000000001")
	bag  = NewOrder{UserID: 7, DiscountAmount: 500, UsedCouponID: new(int64(3)), Items: []Item{{ProductID: 1, Quantity: 2, Price: 1000}, {ProductID: 2, Quantity: 1, Price: 250}}}
)

func after(d time.Duration) time.Time { return noon.Add(d) }

// play plays commands on a new order, which are to be possible.
func play(t *testing.T, commands ...func(*Order) error) *Order {
	t.Helper()
	o, err := Create(anID, bag, noon)
	require.NoError(t, err)
	for _, command := range commands {
		require.NoError(t, command(o))
	}
	return o
}

func confirm(o *Order) error  { return o.Confirm(new(int64(9)), after(time.Minute)) }
func complete(o *Order) error { return o.Complete(after(time.Hour)) }
func cancel(o *Order) error   { return o.Cancel("too late", "customer", after(2*time.Minute)) }
func fail(o *Order) error     { return o.Fail("card declined", after(2*time.Minute)) }

// What is decided is a list of events, which need neither a database nor Kafka.
func TestCreate(t *testing.T) {
	t.Parallel()
	o := play(t)
	require.Equal(t, []OrderEvent{OrderCreated{
		Fact: Fact{anID, 1, noon}, OrderNumber: o.OrderNumber, UserID: 7, TotalAmount: 2250, DiscountAmount: 500, FinalAmount: 1750,
		UsedCouponID: new(int64(3)), Items: bag.Items,
	}}, o.uncommitted)
	require.Equal(t, Pending, o.Status)
	require.Equal(t, 1, o.Version)

	empty, err := Rebuild(nil) // before its first event
	require.NoError(t, err)
	require.Equal(t, State{Status: Pending, Version: 0}, empty.State)
}

var invalidTests = map[string]func(*NewOrder){
	"no items":                        func(n *NewOrder) { n.Items = nil },
	"a product twice":                 func(n *NewOrder) { n.Items = append(slices.Clip(n.Items), n.Items[0]) },
	"none of a product":               func(n *NewOrder) { n.Items = []Item{{ProductID: 1, Price: 1}} },
	"a price below nothing":           func(n *NewOrder) { n.Items = []Item{{ProductID: 1, Quantity: 1, Price: -1}} },
	"a discount above the total":      func(n *NewOrder) { n.DiscountAmount = 2251 },
	"a discount that is an extra fee": func(n *NewOrder) { n.DiscountAmount = -1 },
}

func TestInvalidOrders(t *testing.T) {
	t.Parallel()
	for name, change := range invalidTests {
		t.Run(name, func(t *testing.T) {
			n := bag
			change(&n)
			_, err := Create(anID, n, noon)
			require.ErrorIs(t, err, ErrInvalid)
		})
	}
}

var transitionTests = []struct {
	name     string
	commands []func(*Order) error
	status   Status
	possible []Status // from there
}{
	{"created", nil, Pending, []Status{Confirmed, Cancelled, Failed}},
	{"paid", []func(*Order) error{confirm}, Confirmed, []Status{Completed, Cancelled}},
	{"delivered", []func(*Order) error{confirm, complete}, Completed, nil},
	{"cancelled", []func(*Order) error{cancel}, Cancelled, nil},
	{"paid and cancelled", []func(*Order) error{confirm, cancel}, Cancelled, nil},
	{"failed", []func(*Order) error{fail}, Failed, nil},
}

func TestTransitions(t *testing.T) {
	t.Parallel()
	commands := map[Status]func(*Order) error{Confirmed: confirm, Completed: complete, Cancelled: cancel, Failed: fail}
	for _, tt := range transitionTests {
		t.Run(tt.name, func(t *testing.T) {
			require.Equal(t, tt.status, play(t, tt.commands...).Status)
			for to, command := range commands {
				o := play(t, tt.commands...)
				events := len(o.uncommitted)
				if err := command(o); slices.Contains(tt.possible, to) {
					require.NoError(t, err, to)
					require.Equal(t, to, o.Status)
					require.Len(t, o.uncommitted, events+1)
				} else {
					require.ErrorIs(t, err, ErrTransition, to)
					require.Equal(t, tt.status, o.Status, "a refused command changes nothing")
					require.Len(t, o.uncommitted, events)
				}
			}
		})
	}
}

// Who cancels what is paid gets the money back.
func TestRefund(t *testing.T) {
	t.Parallel()
	require.Nil(t, play(t, cancel).RefundAmount)
	require.Equal(t, new(int64(1750)), play(t, confirm, cancel).RefundAmount)
}

// An order is what its events say, whether all are played or those after a snapshot, at every
// version.
func TestRebuildAndFromSnapshot(t *testing.T) {
	t.Parallel()
	for _, tt := range transitionTests {
		t.Run(tt.name, func(t *testing.T) {
			o := play(t, tt.commands...)
			rebuilt, err := Rebuild(o.uncommitted)
			require.NoError(t, err)
			require.Equal(t, o.State, rebuilt.State)
			require.Empty(t, rebuilt.uncommitted)
			for n := range o.uncommitted {
				early, err := Rebuild(o.uncommitted[:n])
				require.NoError(t, err)
				late, err := FromSnapshot(early.State, o.uncommitted[n:])
				require.NoError(t, err)
				require.Equal(t, o.State, late.State)
			}
		})
	}
}

// A history with a gap is none.
func TestRebuildWithAGap(t *testing.T) {
	t.Parallel()
	o := play(t, confirm, complete)
	for _, events := range [][]OrderEvent{o.uncommitted[1:], {o.uncommitted[0], o.uncommitted[2]}, {o.uncommitted[0], o.uncommitted[0]}} {
		_, err := Rebuild(events)
		require.ErrorIs(t, err, ErrHistory)
	}
}

// Events of an order are one after the other also where the clock of a machine is behind, or
// where two happen in the same microsecond.
func TestEventsAreInOrderOfTime(t *testing.T) {
	t.Parallel()
	o := play(t)
	require.NoError(t, o.Confirm(nil, after(-time.Hour)))
	require.NoError(t, o.Complete(after(0)))
	require.Equal(t, noon.Add(time.Microsecond), o.uncommitted[1].OccurredAt())
	require.Equal(t, noon.Add(2*time.Microsecond), o.uncommitted[2].OccurredAt())
}

// Every event has a name, and is the same after it was stored.
func TestEventsAreStoredAsTheyAre(t *testing.T) {
	t.Parallel()
	events, err := registry("/order-service")
	require.NoError(t, err)
	seen := map[string]bool{}
	for _, tt := range transitionTests {
		for _, e := range play(t, tt.commands...).uncommitted {
			name, err := nameOf(e)
			require.NoError(t, err)
			seen[name] = true
			payload, err := json.Marshal(e)
			require.NoError(t, err)
			stored, err := decode(name, payload)
			require.NoError(t, err)
			require.Equal(t, e, stored)
			topic, err := events.Topic(name)
			require.NoError(t, err)
			require.Equal(t, orderTopic, topic)
		}
	}
	require.Len(t, seen, len(events.Types()))
	_, err = decode("order.lost", nil)
	require.ErrorContains(t, err, "order.lost")
}
