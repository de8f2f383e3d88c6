package relay

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/trace"
)

// flight is one send until all its outcomes are known. The producer waits for the outcomes, but not for those of
// partitions that do not answer while Kafka works: it then detaches the flight, with its client, whose answers a
// goroutine waits for, and sends with a new client. A detached client gets no more records, so the order of a
// partition stays.
type flight struct {
	*acks
	step           trace.Step
	client         *kgo.Client
	inFlight       *kafka.InFlight
	bounded, grace context.Context // the time of the send; the time that a stop leaves
	stop, end      func()          // end grace; end both
	detached       bool            // finish ends it, and no longer produce
	fresh          []string        // topics whose partitions the client may not have
	flushed        func()          // waits for the flush
	began          time.Time
}

// newFlight returns a flight that has no records yet. It ends with held, or stopGrace after stop.
func newFlight(stop, held context.Context) *flight {
	f := &flight{}
	f.grace, f.stop = withGrace(stop, held)
	f.end = f.stop
	return f
}

// await waits until the outcome of every record is known, and reports whether it is. It
// waits no longer if the promise of one has panicked.
func (f *flight) await() bool {
	select {
	case <-f.all:
		return true
	case <-f.crashed:
		return false
	case <-f.bounded.Done():
		return false
	case <-f.grace.Done():
	}
	const poll = 50 * time.Millisecond
	ticker := time.NewTicker(poll)
	defer ticker.Stop()
	for quiet := time.Duration(0); quiet < stopQuiet; quiet += poll {
		select {
		case <-f.all:
			return true
		case <-f.crashed:
			return false
		case <-f.bounded.Done():
			return false
		case <-ticker.C:
		}
		if f.inFlight.Any() {
			quiet = 0
		}
	}
	return false
}

// abandon ends a flight without waiting for Kafka. Once the client is closed no record
// can leave any more, and the client calls back for each record.
func (f *flight) abandon() {
	f.client.Close()
	select {
	case <-f.all:
	case <-f.crashed:
	}
}

// How long no outcome may come before the partitions that have not answered are suspected: patience once another one
// has accepted a record, alonePatience if none has, because Kafka as a whole may be slow, and freshPatience as long as
// the client, which is new then, has written no record: it may have to find out first that a broker is silent. It is
// never shorter than the time that the last outcome took, and than usualTimes of what sends have taken lately. It is
// counted in ticks, so that a process that was stopped meanwhile suspects nothing.
const (
	patience      = 100 * time.Millisecond
	alonePatience = 300 * time.Millisecond
	freshPatience = kafka.RequestTimeout + 200*time.Millisecond
	usualTimes    = 10
	firstUsual    = 50 * time.Millisecond // what sends take, before any has been seen
	patienceTick  = 25 * time.Millisecond
)

// electing is the patience behind an outage of Kafka, when partitions need a while to elect their leaders. It passes
// twice before a silent one is suspected: with Kafka working at the end of each. Every event for a partition that is
// suspected too early goes through outbox_failed. Within electingOnce behind a suspicion there is no such patience:
// otherwise each send of few events could find another silent partition.
const (
	electing     = 1500 * time.Millisecond
	electingOnce = 30 * time.Second
)

// awaitAnswers waits until every outcome is known, and reports whether it is. It waits no longer, and sets silent, if
// some partitions do not answer while Kafka works; causes has what Kafka says of them. Others and alone are how long it
// waits without an outcome if a record was accepted, and if none was; elect is how long if Kafka has not worked in
// between. Down is set if Kafka has not worked lately.
func (f *flight) awaitAnswers(others, alone, elect time.Duration, down bool) (known, silent bool, causes map[kafka.Partition]error) {
	outage := down // Kafka has not worked in this flight, so that an outcome may have taken any time
	ticker := time.NewTicker(patienceTick)
	defer ticker.Stop()
	open, accepted := f.progress()
	written := f.inFlight.HasWritten()
	// last: when the last outcome came; from: when it did, or when the first record was written
	for last, from, took := time.Duration(0), time.Duration(0), patienceTick; ; took += patienceTick {
		select {
		case <-f.all:
			return true, false, nil
		case <-f.crashed:
			return false, false, nil
		case <-f.bounded.Done():
			return false, false, nil
		case <-f.grace.Done():
			return f.await(), false, nil
		case <-ticker.C:
		}
		if !written && f.inFlight.HasWritten() {
			written, from = true, took
		}
		quiet := max(others, last)
		switch {
		case !written:
			quiet = max(alone, last, freshPatience)
		case outage:
			quiet = max(others, elect)
		case accepted == 0:
			quiet = max(alone, last)
		}
		before := open
		if took-from >= quiet {
			var fails error
			causes, fails = kafka.Explain(f.grace, f.client, f.silentTopics())
			from, silent, down, outage = took, fails == nil && !down, fails != nil, outage || fails != nil
		}
		switch open, accepted = f.progress(); {
		case open < before:
			last, from, silent = took, took, false
		case silent:
			return false, true, causes
		}
	}
}

// detach ends a send whose partitions have not all answered: the records of these fail with errUnanswered. No event of
// them is sent again before its outcome is known.
func (p *Producer) detach(f *flight, batch []envelope.Event, which []int, causes map[kafka.Partition]error) (*acks, sendResult) {
	f.detached = true
	topics := p.topics // of the detached client
	p.client = nil
	p.detached = append(slices.DeleteFunc(p.detached, (*flight).ended), f)
	sent := sendResult{records: make([]kgo.Record, f.handed), errs: slices.Clone(f.errs[:f.handed]), works: true}
	answers := &lateAnswers{to: p.cfg.Unanswered, flight: f, events: map[int]*envelope.Event{}, within: p.cfg.SendTimeout}
	silent := func(i int) {
		e := batch[which[i]]
		answers.events[i] = &e
		at := topics.Partition(f.records[i].Topic, f.records[i].Key)
		sent.records[i] = kgo.Record{Topic: at.Topic, Partition: at.Number}
		sent.errs[i] = errUnanswered
		if cause := cmp.Or(causes[at.WholeTopic()], causes[at]); cause != nil {
			sent.errs[i] = fmt.Errorf("%w: %w", cause, errUnanswered)
		}
		p.cfg.Unanswered.add(&e, at)
	}
	known := f.split(silent, answers.take)
	for i := range sent.records {
		if sent.records[i].Topic == "" {
			r := &f.records[i]
			sent.records[i] = kgo.Record{Topic: r.Topic, Partition: r.Partition, Offset: r.Offset, Timestamp: r.Timestamp}
		}
	}
	p.group.Go(func() { p.finish(f, answers) })
	return known, sent
}

// finish waits for the outcomes of a detached flight.
func (p *Producer) finish(f *flight, answers *lateAnswers) {
	defer f.end()
	defer f.client.Close()
	if !f.await() {
		f.abandon()
	}
	f.flushed()
	f.raise()
	answers.notify(p.cfg.OnSent)
}

// ended reports whether the flight, which is detached, has ended.
func (f *flight) ended() bool { return f.bounded.Err() != nil }
