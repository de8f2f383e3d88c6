package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A journal and arrivals are written as events with spaces between them: a letter
// for the key, a digit for the order.
var compareTests = []struct {
	name, journal, arrived string
	want                   result
}{
	{"nothing happened", "", "", result{}},
	{"all arrived", "a1 a2 b3", "a1 a2 b3", result{committed: 3, received: 3}},
	{"keys may overtake each other", "a1 b2 a3 b4", "b2 b4 a1 a3", result{committed: 4, received: 4}},
	{"one is missing", "a1 a2 b3", "a1 b3", result{committed: 3, received: 2, missing: 1}},
	{"all are missing", "a1 a2", "", result{committed: 2, missing: 2}},
	{"one never committed", "a1", "a1 a2", result{committed: 1, received: 1, phantom: 1}},
	{"a phantom does not stand in for a missing one", "a1 a2", "a1 a3", result{committed: 2, received: 1, missing: 1, phantom: 1}},
	{"two changed places", "a1 a2 a3", "a2 a1 a3", result{committed: 3, received: 3, outOfOrder: 1}},
	{"one came last", "a1 a2 a3", "a2 a3 a1", result{committed: 3, received: 3, outOfOrder: 1}},
	{"the first came before two others", "a1 a2 a3", "a3 a1 a2", result{committed: 3, received: 3, outOfOrder: 2}},
	{"a repeat is not out of order", "a1 a2 a3", "a1 a2 a1 a2 a3", result{committed: 3, received: 3, repeated: 2}},
	{"a phantom that repeats", "", "a1 b2 a1", result{phantom: 2, repeated: 1}},
	{"order of the journal, not of numbers", "a9 a1", "a9 a1", result{committed: 2, received: 2}},
}

func TestCompare(t *testing.T) {
	t.Parallel()
	for _, tt := range compareTests {
		t.Run(tt.name, func(t *testing.T) {
			var journal []line
			for _, e := range strings.Fields(tt.journal) {
				journal = append(journal, line{eventID{int64(e[1] - '0'), "type"}, e[:1]})
			}
			var arrivals []arrival
			for _, e := range strings.Fields(tt.arrived) {
				arrivals = append(arrivals, arrival{id: eventID{int64(e[1] - '0'), "type"}})
			}
			got := compare(journal, arrivals)
			require.Equal(t, tt.want, got)
			require.Equal(t, got.missing+got.phantom+got.outOfOrder == 0, got.right())
		})
	}
}

// Types have topics of their own, and topics know no order among each other.
func TestCompareKeepsTypesApart(t *testing.T) {
	t.Parallel()
	liked, viewed := eventID{1, likeCreated}, eventID{2, productViewed}
	v := compare([]line{{liked, "7"}, {viewed, "7"}}, []arrival{{id: viewed}, {id: liked}})
	require.Equal(t, result{committed: 2, received: 2}, v)
}

func TestOrderOf(t *testing.T) {
	t.Parallel()
	order, ours := orderOf(correlationID("demo_1", 42), "demo_1")
	require.True(t, ours)
	require.EqualValues(t, 42, order)
	for _, other := range []string{"", "demo_1", "demo_10/42", correlationID("demo_2", 42)} {
		_, ours = orderOf(other, "demo_1")
		require.False(t, ours, other)
	}
	order, ours = orderOf("demo_1/scribble", "demo_1")
	require.True(t, ours, "what cannot be read is ours to complain about")
	require.Zero(t, order)
}

func TestLatencies(t *testing.T) {
	t.Parallel()
	start := time.Now()
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	commits := map[int64]time.Time{1: at(0), 2: at(10)}
	got := latencies(commits, []arrival{
		{eventID{2, "a"}, at(9)},  // before its Commit returned
		{eventID{1, "a"}, at(20)}, // two events of one order
		{eventID{1, "b"}, at(5)},
		{eventID{1, "b"}, at(99)}, // a repeat does not count
		{eventID{3, "a"}, at(30)}, // nor what was not paced
	})
	require.Equal(t, []time.Duration{0, 5 * time.Millisecond, 20 * time.Millisecond}, got)
}

func TestQuantile(t *testing.T) {
	t.Parallel()
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(i + 1)
	}
	require.EqualValues(t, 50, quantile(hundred, 0.50))
	require.EqualValues(t, 99, quantile(hundred, 0.99))
	require.EqualValues(t, 100, quantile(hundred, 1))
	require.EqualValues(t, 1, quantile(hundred, 0))
	require.EqualValues(t, 1, quantile(hundred[:1], 0.99))
}

func TestThousands(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567"} {
		require.Equal(t, want, thousands(n))
	}
}

// What a shopper does is what the journal says, and one to three events.
func TestDraw(t *testing.T) {
	t.Parallel()
	registered, err := registry()
	require.NoError(t, err)
	declined := 0
	for range 1000 {
		o := draw()
		o.id = 5
		events, types, keys := o.events(time.Now())
		require.Len(t, types, len(events))
		require.Len(t, keys, len(events))
		require.Subset(t, registered.Types(), types)
		require.Contains(t, []int{1, 2, 3}, len(events))
		require.Equal(t, orderCreated, types[0])
		if o.declined {
			declined++
		}
	}
	require.NotZero(t, declined)
}
