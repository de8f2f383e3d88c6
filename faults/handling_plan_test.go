package faults

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// marketStep is something that happens to the market at a time of its plan. All that chance decides is drawn ahead, so
// that a seed always gives the same plan.
type marketStep struct {
	kind  string
	at    time.Duration
	lasts time.Duration
	group string
	slot  int  // the member that the step begins to look from
	count int  // members of the second release
	reset bool // the connections end with a reset, and do not go on
	hangs bool // calls do not fail at once
	about string

	end   func()    // set when the step has begun
	until time.Time // when it ends
}

const (
	stepKill     = "kill"
	stepFreeze   = "freeze"
	stepCut      = "cut"
	stepStop     = "stop"
	stepRelease  = "release"
	stepOutage   = "outage"
	stepSequence = "sequence"
)

const (
	feedGroup    = "feed"    // reads from Kafka
	packingGroup = "packing" // has workers
	marketSlots  = 3         // members of each group
	// calmBefore is how long events flow before the first step, and calmAfter how long before the end of the run no
	// step begins.
	calmBefore = 4 * time.Second
	calmAfter  = 8 * time.Second
)

var marketGroups = []string{feedGroup, packingGroup}

// trickleOf returns how often the action gets an event that gets few: once a minute in a run of a quarter of an hour.
func trickleOf(lasts time.Duration) time.Duration { return max(lasts/15, 2*time.Second) }

// marketPlan returns the steps of a run, in their order. A member is frozen or cut off every 20 s, and workers are
// stopped 40 times in a quarter of an hour; a short run has each kind of step.
func marketPlan(seed uint64, lasts time.Duration) (steps []marketStep) {
	rng := rand.New(rand.NewPCG(seed, 1<<52))
	last := lasts - calmAfter
	every := func(interval time.Duration, step func(n int) marketStep) {
		interval = min(interval, lasts/4)
		for at, n := calmBefore+random(rng, interval/2), 0; at < last; at, n = at+interval, n+1 {
			s := step(n)
			s.at = at
			if s.group == "" {
				s.group = marketGroups[rng.IntN(len(marketGroups))]
			}
			s.slot = rng.IntN(marketSlots)
			steps = append(steps, s)
		}
	}
	first := rng.IntN(2)
	every(20*time.Second, func(n int) marketStep {
		kind := []string{stepFreeze, stepCut}[(first+n)%2]
		return marketStep{kind: kind, lasts: 3*time.Second + random(rng, 11*time.Second), reset: rng.IntN(2) == 0}
	})
	every(30*time.Second, func(int) marketStep { return marketStep{kind: stepKill, lasts: random(rng, marketSession)} })
	every(15*time.Minute/40, func(int) marketStep { return marketStep{kind: stepStop, group: packingGroup} })
	every(45*time.Second, func(int) marketStep { return marketStep{kind: stepStop, group: feedGroup} })
	every(time.Minute, func(int) marketStep { return marketStep{kind: stepSequence} })
	for _, group := range marketGroups {
		counts := []int{1 + rng.IntN(marketSlots), 0} // it comes, and is rolled back
		every(35*time.Second, func(n int) marketStep {
			if n == len(counts) {
				counts = append(counts, (counts[n-1]+1+rng.IntN(marketSlots))%(marketSlots+1)) // another one
			}
			return marketStep{kind: stepRelease, group: group, count: counts[n]}
		})
	}
	steps = append(steps, marketOutages(rng, lasts)...)
	slices.SortStableFunc(steps, func(a, b marketStep) int { return cmp.Compare(a.at, b.at) })
	return steps
}

// marketOutages returns outages of what handlers need. Each lasts longer than all attempts of an event take. Those for
// all events and for a tenant come one after the other, with time for what has waited, and so do those for the actions
// with few events and with one key.
func marketOutages(rng *rand.Rand, lasts time.Duration) (steps []marketStep) {
	next := func(about string, at, long time.Duration) (end time.Duration) {
		s := marketStep{kind: stepOutage, about: about, at: at, lasts: long, hangs: rng.IntN(2) == 0}
		if at+long < lasts-calmAfter {
			steps = append(steps, s)
		}
		return at + long + long/2 + random(rng, 5*time.Second)
	}
	long := func() time.Duration { return 5*time.Second + random(rng, min(12*time.Second, lasts/20)) }
	for at, n := calmBefore+random(rng, 2*time.Second), rng.IntN(2); at < lasts; n++ {
		at = next([]string{signGoneAll, fmt.Sprint(signGoneTenant, rng.IntN(tenants))}[n%2], at, long())
	}
	for at, n := calmBefore+random(rng, 2*time.Second), rng.IntN(2); at < lasts; n++ {
		if n%2 == 0 {
			at = next(signGone+passedAction, at, long())
		} else {
			at = next(signGone+notedAction, at, max(5*time.Second, trickleOf(lasts)*5/2))
		}
	}
	return steps
}

// random returns a random time shorter than d.
func random(rng *rand.Rand, d time.Duration) time.Duration {
	return time.Duration(rng.Int64N(int64(d)))
}

// The same seed gives the same plan. A plan has every kind of step, in the short form too, and as many stops of workers
// as it is to have.
func TestMarketPlan(t *testing.T) {
	t.Parallel()
	for seed := range uint64(50) {
		for _, lasts := range []time.Duration{shortMarket, 2 * time.Minute, 15 * time.Minute} {
			plan, times := marketPlan(seed, lasts), map[string]int{}
			require.Equal(t, plan, marketPlan(seed, lasts))
			for _, s := range plan {
				times[s.kind]++
				if s.kind == stepStop {
					times[s.kind+s.group]++
				}
				require.Less(t, s.at, lasts)
			}
			for _, kind := range []string{stepKill, stepFreeze, stepCut, stepStop, stepRelease, stepOutage, stepSequence} {
				require.Positive(t, times[kind], "%s in %v with seed %d", kind, lasts, seed)
			}
			if lasts == 15*time.Minute {
				require.GreaterOrEqual(t, times[stepStop+packingGroup], 39)
				require.GreaterOrEqual(t, times[stepFreeze]+times[stepCut], 43)
			}
		}
	}
}
