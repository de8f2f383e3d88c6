package main

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// lap is one turn at one rate: when its transactions began and committed and
// when their events arrived, counted from its start. Only commits behind the
// first warm ones are measured.
type lap struct {
	first, warm int // number of the first event; how many are not measured
	rate        int
	start       time.Time
	began       []time.Duration // each written by the worker that commits
	committed   []time.Duration
	arrived     []time.Duration // written by the reader; 0: not yet
	order       []int           // in which they arrived, first times only
	missing     int             // known to the reader alone
	aside       map[int]bool    // not measured, and missed only if true
}

func newLap(first, rate int, warm, measured time.Duration) *lap {
	n := func(d time.Duration) int { return int(d.Seconds() * float64(rate)) }
	total := n(warm) + n(measured)
	return &lap{
		first: first, warm: n(warm), rate: rate, missing: total,
		began: make([]time.Duration, total), committed: make([]time.Duration, total), arrived: make([]time.Duration, total),
		order: make([]int, 0, total), aside: map[int]bool{},
	}
}

func (l *lap) total() int { return len(l.committed) }

// setAside excludes event n of the lap from what is measured and missed.
func (l *lap) setAside(n int) {
	if _, aside := l.aside[n]; !aside {
		l.aside[n] = false
		l.missing--
	}
}

// miss waits for event n after all, which was set aside.
func (l *lap) miss(n int) {
	if !l.aside[n] && l.arrived[n] == 0 {
		l.aside[n] = true
		l.missing++
	}
}

// begin notes that transaction n of the lap begins.
func (l *lap) begin(n int) { l.began[n] = time.Since(l.start) }

// commit notes that Commit has returned for transaction n of the lap.
func (l *lap) commit(n int) { l.committed[n] = time.Since(l.start) }

// arrive notes the arrival of event number. Those of other laps are none of ours.
func (l *lap) arrive(number int, at time.Duration) {
	n := number - l.first
	if n < 0 || n >= l.total() || l.arrived[n] != 0 {
		return
	}
	l.arrived[n] = at
	l.order = append(l.order, n)
	if missed, aside := l.aside[n]; missed || !aside {
		l.missing--
	}
}

// latencies returns the time from commit to arrival, in milliseconds.
func (l *lap) latencies() series {
	s := make(series, 0, l.total()-l.warm)
	for n := l.warm; n < l.total(); n++ {
		if _, aside := l.aside[n]; !aside {
			s = append(s, (l.arrived[n]-l.committed[n]).Seconds()*1000)
		}
	}
	return s
}

// longest returns the duration of the longest measured transaction, in milliseconds.
func (l *lap) longest() (ms float64) {
	for n := l.warm; n < l.total(); n++ {
		ms = max(ms, (l.committed[n]-l.began[n]).Seconds()*1000)
	}
	return ms
}

// achieved returns the rate of the measured commits.
func (l *lap) achieved() float64 {
	committed := l.committed[l.warm:]
	var last time.Duration
	for _, at := range committed {
		last = max(last, at)
	}
	due := offset(len(committed), l.rate)
	return float64(len(committed)) / max(due, last-offset(l.warm, l.rate)).Seconds()
}

// inOrder returns an error unless the events of each key arrived in order.
func (l *lap) inOrder(event func(n int) orderPlaced) error {
	j := orderCheck{}
	for _, n := range l.order {
		if err := j.see(event(l.first+n).Order, int64(l.began[n]), int64(l.committed[n])); err != nil {
			return err
		}
	}
	return nil
}

// orderCheck finds events that arrive before earlier ones of their key: by key, it
// knows the latest beginning of a transaction whose event has arrived.
type orderCheck map[string]int64

// see takes the first arrival of an event, and when its transaction began and
// committed. Of two that overlap, neither is the earlier one.
func (j orderCheck) see(key string, began, committed int64) error {
	latest, known := j[key]
	if known && committed < latest {
		return fmt.Errorf("an event of %s arrived after one that was recorded later", key)
	}
	if !known || began > latest {
		j[key] = began
	}
	return nil
}

// reader reads the topic.
type reader struct{ client *kgo.Client }

// newReader returns one that starts at the topic's end, which it knows before it
// returns: whatever is produced afterwards will arrive.
func (b *bench) newReader(ctx context.Context) (*reader, error) {
	ends, err := b.ends(ctx)
	if err != nil {
		return nil, err
	}
	return b.readFrom(ends)
}

// readFrom returns a reader that starts where the topic once ended.
func (b *bench) readFrom(ends kadm.ListedOffsets) (*reader, error) {
	from := map[int32]kgo.Offset{}
	ends.Each(func(o kadm.ListedOffset) { from[o.Partition] = kgo.NewOffset().At(o.Offset) })
	client, err := kgo.NewClient(kgo.SeedBrokers(b.cfg.brokers...),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{b.topic: from}))
	if err != nil {
		return nil, fmt.Errorf("make Kafka client: %w", err)
	}
	return &reader{client}, nil
}

// collect reads until all events of the lap have arrived.
func (r *reader) collect(ctx context.Context, l *lap) error {
	for l.missing > 0 {
		fetches := r.client.PollFetches(ctx)
		at := time.Since(l.start)
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("read topic with %d events missing: %w", l.missing, err)
		}
		for record := range fetches.RecordsAll() {
			n, err := eventNumber(record.Value)
			if err != nil {
				return err
			}
			l.arrive(n, at)
		}
	}
	return nil
}

// eventNumber returns the member n of a payload, which comes first, as
// PostgreSQL or encoding/json wrote it. Decoding all of it would take time from
// what is measured.
func eventNumber(payload []byte) (int, error) {
	rest, ok := bytes.CutPrefix(payload, []byte(`{"n":`))
	digits, _, _ := bytes.Cut(rest, []byte(","))
	n, err := strconv.Atoi(string(bytes.TrimSpace(digits)))
	if !ok || err != nil {
		return 0, fmt.Errorf("%.20q is not the payload of an event", payload)
	}
	return n, nil
}
