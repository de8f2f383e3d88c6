package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"
)

// line is a line of the journal: an event that has committed.
type line struct {
	id  eventID
	key string
}

// summary is what the demo says in the end.
type summary struct {
	orders, declined int
	took             time.Duration // to place the orders
	heldOpen         time.Duration

	result
	perSecond float64         // arrivals, from the first to the last
	latencies []time.Duration // sorted; nil if the load was not paced
}

// sumUp compares what the database says has committed with what has arrived.
func sumUp(ctx context.Context, s *shop, r *reader) (*summary, error) {
	orders, err := s.ordersCommitted(ctx)
	if err != nil {
		return nil, err
	}
	journal, err := s.journal(ctx)
	if err != nil {
		return nil, err
	}
	arrivals := r.received()
	return &summary{
		orders: orders, declined: s.declined, took: s.took, heldOpen: s.heldOpen,
		result:    compare(journal, arrivals),
		perSecond: rate(arrivals),
		latencies: latencies(s.commits, arrivals),
	}, nil
}

// result counts the events and their differences.
type result struct {
	committed  int // events in the journal
	received   int // of these, those that arrived
	missing    int // of these, those that did not
	phantom    int // arrived and never committed
	repeated   int // arrivals after the first
	outOfOrder int // first arrivals behind a later event of their type and key
}

// right reports whether the promises were kept. A repeat breaks none: delivery
// is at least once.
func (v result) right() bool { return v.missing+v.phantom+v.outOfOrder == 0 }

// compare takes the journal in its order and arrivals in theirs. Events of one type
// share a topic, so those with the same key have an order in Kafka as well.
func compare(journal []line, arrivals []arrival) result {
	type stream struct{ eventType, key string }
	place := make(map[eventID]int, len(journal))
	for i, l := range journal {
		place[l.id] = i
	}
	v := result{committed: len(journal)}
	seen := make(map[eventID]bool, len(journal))
	newest := map[stream]int{}
	for _, a := range arrivals {
		i, committed := place[a.id]
		switch {
		case seen[a.id]:
			v.repeated++
			continue
		case !committed:
			v.phantom++
		default:
			v.received++
			key := stream{a.id.eventType, journal[i].key}
			if i < newest[key] {
				v.outOfOrder++
			}
			newest[key] = max(newest[key], i)
		}
		seen[a.id] = true
	}
	v.missing = v.committed - v.received
	return v
}

// rate returns arrivals per second from the first to the last one.
func rate(arrivals []arrival) float64 {
	if len(arrivals) < 2 {
		return 0
	}
	first, last := arrivals[0].at, arrivals[len(arrivals)-1].at
	if last.Equal(first) {
		return 0
	}
	return float64(len(arrivals)-1) / last.Sub(first).Seconds()
}

// latencies returns, sorted, how long after the return of Commit events arrived
// first. An event can overtake the return of its own Commit; then it took no
// time. Orders without a time of commit do not count: the one whose transaction
// was held open, and all of them when the load was not paced, because they would
// measure the length of the queue.
func latencies(commits map[int64]time.Time, arrivals []arrival) []time.Duration {
	var all []time.Duration
	seen := make(map[eventID]bool, len(arrivals))
	for _, a := range arrivals {
		commit, known := commits[a.id.order]
		if known && !seen[a.id] {
			all = append(all, max(0, a.at.Sub(commit)))
		}
		seen[a.id] = true
	}
	slices.Sort(all)
	return all
}

// quantile returns the smallest of the sorted values that a share q of them does
// not exceed.
func quantile(sorted []time.Duration, q float64) time.Duration {
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}

func (s *summary) print(out *console) {
	out.title("Summary")
	out.row("orders", "%s committed, %s rolled back, placed in %.1f s, %s",
		thousands(s.orders), thousands(s.declined), s.took.Seconds(), perSecond(float64(s.orders+s.declined)/s.took.Seconds()))
	out.row("events", "%s committed, %s received, %s from the first to the last",
		thousands(s.committed), thousands(s.received), perSecond(s.perSecond))
	out.count("missing", s.missing, true)
	out.count("never committed", s.phantom, true)
	out.count("out of order", s.outOfOrder, true)
	out.count("repeated", s.repeated, false)
	s.printLatency(out)
	out.row("open meanwhile", "one writing transaction, for %.1f s", s.heldOpen.Seconds())
	if s.right() {
		out.good("Every committed event arrived, in order per key, and no other.")
	} else {
		out.bad("What arrived is not what committed.")
	}
}

func (s *summary) printLatency(out *console) {
	if len(s.latencies) == 0 {
		out.row("latency", "not measured: no order of a paced load has committed")
		return
	}
	out.row("latency", "p50 %s, p99 %s, max %s: from the return of Commit to the return",
		millis(quantile(s.latencies, 0.50)), millis(quantile(s.latencies, 0.99)), millis(quantile(s.latencies, 1)))
	out.row("", "of the reader's poll, on one clock, for the %s events of the paced orders", thousands(len(s.latencies)))
}

func perSecond(rate float64) string { return thousands(int(math.Round(rate))) + "/s" }

func millis(d time.Duration) string { return fmt.Sprintf("%.1f ms", d.Seconds()*1000) }
