package faults

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Bounds of the latency of healthy events beside disturbances that must not delay them, on top of what was seen
// without these. A relay waits at most 300 ms for partitions that do not answer, then asks all brokers whether Kafka
// works, and does so once for each topic whose first partition turns bad; a statement of a bulk writer, which
// keeps one of the processors busy, may come on top. A relay that waits for a DeliveryTimeout, for a breaker, or that
// walks uncommitted rows at each poll, is late by seconds in most events.
const (
	slackP99   = time.Second
	slackWorst = 3 * time.Second
	// fewSamples is how many events at least are needed for a p99.
	fewSamples = 100
	// slow is what no event takes if nothing is the matter.
	slow = time.Second
)

// healthyResult compares the latency of healthy events beside disturbances that must not delay them with that in the
// rest of the run. Times when a server was down, or a backlog was being sent, are left out.
type healthyResult struct {
	Without latency `json:"without"`
	Beside  latency `json:"beside"`
	Bound   int64   `json:"bound_ms"`   // of the worst one beside
	Over    int     `json:"over_bound"` // events beside that took longer
	Slow    int     `json:"over_1s"`    // events beside that took more than a second
}

// latency is from the begin of the event's transaction to its acknowledgment by Kafka.
type latency struct {
	Events int   `json:"events"`
	P99    int64 `json:"p99_ms"`
	Worst  int64 `json:"worst_ms"`
}

// measure sets the result from events in the order in which they were made.
func (v *healthyResult) measure(events []mark, excused, beside []span) {
	excused = untilRecovered(events, excused)
	var without, with []time.Duration
	for _, e := range events {
		during := func(s span) bool { return s.overlaps(e.made, e.accepted) }
		switch {
		case slices.ContainsFunc(excused, during):
		case slices.ContainsFunc(beside, during):
			with = append(with, e.accepted.Sub(e.made))
		default:
			without = append(without, e.accepted.Sub(e.made))
		}
	}
	v.Without, v.Beside = newLatency(without), newLatency(with)
	bound := time.Duration(v.Without.Worst)*time.Millisecond + slackWorst
	v.Bound = bound.Milliseconds()
	for _, took := range with {
		if took > bound {
			v.Over++
		}
		if took > slow {
			v.Slow++
		}
	}
}

// untilRecovered extends each time up to the moment at which the relay is no longer late because of it: no event is
// open that has taken more than a second. That takes two minutes at most.
func untilRecovered(events []mark, excused []span) []span {
	excused = slices.Clone(excused)
	for i := range excused {
		one := &excused[i]
		if one.to.IsZero() {
			continue
		}
		limit := one.to.Add(stall)
		for _, e := range events {
			if e.made.Before(one.to) && e.accepted.After(one.to) && e.accepted.Sub(e.made) > slow {
				one.to = e.accepted
			}
		}
		if one.to.After(limit) {
			one.to = limit
		}
	}
	return excused
}

func newLatency(all []time.Duration) (l latency) {
	if l.Events = len(all); l.Events == 0 {
		return l
	}
	slices.Sort(all)
	l.P99, l.Worst = all[len(all)*99/100].Milliseconds(), all[len(all)-1].Milliseconds()
	return l
}

// Err says whether healthy events were too late, or returns nil.
func (v healthyResult) Err() error {
	bound := 2*v.Without.P99 + slackP99.Milliseconds()
	switch {
	case v.Without.Events < fewSamples || v.Beside.Events < fewSamples:
		return fmt.Errorf("faults: too few healthy events are measured: %+v", v)
	case v.Beside.P99 > bound:
		return fmt.Errorf("faults: healthy events had a p99 above %d ms: %+v", bound, v)
	case v.Over > 0:
		return fmt.Errorf("faults: %d healthy events took longer than %d ms: %+v", v.Over, v.Bound, v)
	}
	return nil
}

// An event counts where it was open. It does not while a server is down, nor until the relay has recovered from that.
func TestHealthyResult(t *testing.T) {
	t.Parallel()
	start := time.Now()
	at := func(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }
	event := func(made, accepted float64) mark { return mark{made: at(made), accepted: at(accepted)} }
	events := []mark{
		event(0, 0.1), event(1, 1.2),
		event(9.5, 21), event(15, 29), // a server is down from 10 to 20
		event(21, 28), event(28.5, 32), event(31, 33), event(33.5, 33.6), // and the relay has recovered at 33
		event(40, 45), event(50, 50.5), event(51, 51.1), // beside a disturbance from 44 to 51
	}
	var v healthyResult
	v.measure(events, []span{{at(10), at(20), "a crash"}}, []span{{at(44), at(51), "a disturbance"}})
	require.Equal(t, healthyResult{
		Without: latency{3, 200, 200}, Beside: latency{3, 5000, 5000}, Bound: 3200, Over: 1, Slow: 1,
	}, v)
	require.ErrorContains(t, v.Err(), "too few")
	v.Without.Events, v.Beside.Events = fewSamples, fewSamples
	require.ErrorContains(t, v.Err(), "p99 above 1400 ms")
	v.Beside.P99 = 1400
	require.ErrorContains(t, v.Err(), "1 healthy events took longer than 3200 ms")
	v.Over = 0
	require.NoError(t, v.Err())
}
