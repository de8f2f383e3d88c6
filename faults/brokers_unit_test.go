package faults

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A recovery is that of the first record made after a fault, in each partition. What was made
// before and is accepted late is none.
func TestMarks(t *testing.T) {
	t.Parallel()
	fault := time.Now().Add(-time.Minute)
	second := func(n int) time.Time { return fault.Add(time.Duration(n) * time.Second) }
	m := newMarks()
	for i, one := range []mark{
		{made: second(-9), accepted: second(-8), partition: 1},
		{made: second(-7), accepted: second(-6), partition: 2},
		{made: second(-5), accepted: second(2), partition: 3},
		{made: second(1), accepted: second(9), partition: 1},
		{made: second(2), accepted: second(8), partition: 1}, // overtakes
		{made: second(3), accepted: second(15), partition: 2},
		{made: second(4), certain: true},
		{made: second(5)}, // rolled back, as far as is known
	} {
		m.add(fmt.Sprint(i), &one)
	}
	require.Equal(t, []int32{1, 2}, m.partitions(fault))
	require.Equal(t, map[int32]time.Duration{1: 8 * time.Second, 2: 15 * time.Second}, m.first(fault))
	require.Equal(t, 2, m.acceptedBetween(fault, second(10)))
	longest, open := m.longest(fault, second(3))
	require.Equal(t, 12*time.Second, longest)
	require.Zero(t, open)
	longest, open = m.longest(fault, second(5))
	require.GreaterOrEqual(t, longest, 50*time.Second, "it waits still")
	require.Equal(t, 1, open)

	r := newRecovery("a fault", m.first(fault), map[int32]time.Duration{1: 14 * time.Second, 2: 16 * time.Second, 3: time.Hour})
	require.Equal(t, recovery{what: "a fault", plain: 15 * time.Second, relay: time.Hour, behind: 6 * time.Second, partition: 1}, r)
}

// A seed stands for the same faults each time. The short form has each kind once, the long form
// everything in each round, except for what cannot happen twice.
func TestBrokersPlan(t *testing.T) {
	t.Parallel()
	names := func(steps []brokersStep) (names []string) {
		for _, step := range steps {
			names = append(names, fmt.Sprint(step.what, step.lasts, step.chance))
		}
		return names
	}
	require.Equal(t, names(brokersPlan(7, 3)), names(brokersPlan(7, 3)))
	require.NotEqual(t, names(brokersPlan(7, 3)), names(brokersPlan(8, 3)))
	kinds := map[string]int{}
	for _, step := range brokersPlan(7, 0) {
		kinds[step.kind]++
	}
	for _, f := range brokersFaults() {
		require.Equal(t, 1, kinds[f.kind], f.kind)
	}
	all := len(brokersFaults())
	require.Len(t, brokersPlan(7, 3), all+3*(all-1))
}
