// Package laps measures the time from the commit of transactions, at a fixed rate, to the
// arrival of their events at a reader of the topic.
package laps

import (
	"fmt"
	"time"

	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/processors"
	"github.com/outboxgo/outbox/bench/internal/schedule"
	"github.com/outboxgo/outbox/bench/internal/stats"
)

// Lap is one turn at one rate: when its transactions began and committed and
// when their events arrived, counted from its start. Only commits behind the
// first warm ones are measured.
type Lap struct {
	First, Warm int // number of the first event; how many are not measured
	Rate        int
	Start       time.Time
	processors  processors.Time // that the lap took, its warm-up too
	began       []time.Duration // each written by the worker that commits
	Committed   []time.Duration
	Arrived     []time.Duration // written by the reader; 0: not yet
	Order       []int           // in which they arrived, first times only
	Missing     int             // known to the reader alone
	Aside       map[int]bool    // not measured, and missed only if true
}

// New returns a lap at rate transactions per second, whose first event has that number.
func New(first, rate int, warm, measured time.Duration) *Lap {
	n := func(d time.Duration) int { return int(d.Seconds() * float64(rate)) }
	total := n(warm) + n(measured)
	return &Lap{
		First: first, Warm: n(warm), Rate: rate, Missing: total,
		began: make([]time.Duration, total), Committed: make([]time.Duration, total), Arrived: make([]time.Duration, total),
		Order: make([]int, 0, total), Aside: map[int]bool{},
	}
}

// Total returns how many transactions the lap has, warm-up included.
func (l *Lap) Total() int { return len(l.Committed) }

// SetAside excludes event n of the lap from what is measured and missed.
func (l *Lap) SetAside(n int) {
	if _, aside := l.Aside[n]; !aside {
		l.Aside[n] = false
		l.Missing--
	}
}

// Miss waits for event n after all, which was set aside.
func (l *Lap) Miss(n int) {
	if !l.Aside[n] && l.Arrived[n] == 0 {
		l.Aside[n] = true
		l.Missing++
	}
}

// Begin notes that transaction n of the lap begins.
func (l *Lap) Begin(n int) { l.began[n] = time.Since(l.Start) }

// Commit notes that Commit has returned for transaction n of the lap.
func (l *Lap) Commit(n int) { l.Committed[n] = time.Since(l.Start) }

// Arrive notes the arrival of event number. Those of other laps are none of ours.
func (l *Lap) Arrive(number int, at time.Duration) {
	n := number - l.First
	if n < 0 || n >= l.Total() || l.Arrived[n] != 0 {
		return
	}
	l.Arrived[n] = at
	l.Order = append(l.Order, n)
	if missed, aside := l.Aside[n]; missed || !aside {
		l.Missing--
	}
}

// MachineCPU returns what a transaction took of the processors with all that runs on the machine, in microseconds.
func (l *Lap) MachineCPU() float64 { return l.perEvent(l.processors.Machine) }

// ProcessCPU returns what it took with this process, which has the writers, the reader and perhaps the relay.
func (l *Lap) ProcessCPU() float64 { return l.perEvent(l.processors.Process) }

func (l *Lap) perEvent(d time.Duration) float64 {
	return float64(d.Nanoseconds()) / 1000 / float64(l.Total())
}

// Latencies returns the time from commit to arrival, in milliseconds.
func (l *Lap) Latencies() stats.Series {
	s := make(stats.Series, 0, l.Total()-l.Warm)
	for n := l.Warm; n < l.Total(); n++ {
		if _, aside := l.Aside[n]; !aside {
			s = append(s, (l.Arrived[n]-l.Committed[n]).Seconds()*1000)
		}
	}
	return s
}

// Transactions returns how long the measured transactions took, in milliseconds.
func (l *Lap) Transactions() stats.Series {
	s := make(stats.Series, 0, l.Total()-l.Warm)
	for n := l.Warm; n < l.Total(); n++ {
		s = append(s, (l.Committed[n]-l.began[n]).Seconds()*1000)
	}
	return s
}

// Longest returns the duration of the longest measured transaction, in milliseconds.
func (l *Lap) Longest() (ms float64) {
	for n := l.Warm; n < l.Total(); n++ {
		ms = max(ms, (l.Committed[n]-l.began[n]).Seconds()*1000)
	}
	return ms
}

// Achieved returns the rate of the measured commits.
func (l *Lap) Achieved() float64 {
	committed := l.Committed[l.Warm:]
	var last time.Duration
	for _, at := range committed {
		last = max(last, at)
	}
	due := schedule.Offset(len(committed), l.Rate)
	return float64(len(committed)) / max(due, last-schedule.Offset(l.Warm, l.Rate)).Seconds()
}

// InOrder returns an error unless the events of each key arrived in order.
func (l *Lap) InOrder(event func(n int) orders.Placed) error {
	j := OrderCheck{}
	for _, n := range l.Order {
		if err := j.See(event(l.First+n).Order, int64(l.began[n]), int64(l.Committed[n])); err != nil {
			return err
		}
	}
	return nil
}

// OrderCheck finds events that arrive before earlier ones of their key: by key, it
// knows the latest beginning of a transaction whose event has arrived.
type OrderCheck map[string]int64

// See takes the first arrival of an event, and when its transaction began and
// committed. Of two that overlap, neither is the earlier one.
func (j OrderCheck) See(key string, began, committed int64) error {
	latest, known := j[key]
	if known && committed < latest {
		return fmt.Errorf("an event of %s arrived after one that was recorded later", key)
	}
	if !known || began > latest {
		j[key] = began
	}
	return nil
}
