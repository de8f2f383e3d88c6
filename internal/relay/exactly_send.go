package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/exactly"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/lease"
)

func recordsOf(r kgo.Record) []kgo.Record { return []kgo.Record{r} }

// Lock keeps the retrier away, from the events of a transaction to its commit. It returns false if it is not ready.
func (x *Exactly) Lock() bool {
	x.mu.Lock()
	if !x.ready {
		x.mu.Unlock()
		return false
	}
	x.held = true
	return true
}

// Unlock ends what Lock has begun. A transaction that is open is given up.
func (x *Exactly) Unlock() {
	if x.open != nil {
		x.ready = false
	}
	x.held = false
	x.mu.Unlock()
}

// Topic returns the topic of an event.
func (x *Exactly) Topic(e *envelope.Event) (string, error) { return x.producer.topic(e) }

// Deliver sends the first events of a batch in a transaction, which stays open: Commit ends it. It returns the
// outcomes of these events; the others are pending. The caller has called Lock. It is the step SendNext.
func (x *Exactly) Deliver(stop, held context.Context, batch []envelope.Event, parked *Parking) ([]Outcome, error) {
	d := x.deliverer.begin(stop, held, batch, true)
	permit, err := x.permit(d)
	if permit == nil || err != nil {
		return pending(batch), err
	}
	r := request{parked: parked, most: &x.most, atMost: permit.Granted, again: func([]int) []int64 { return x.again }}
	n, err := x.some(d, r)
	x.report(permit, err)
	clear(d.outcomes[n:])
	return d.outcomes, err
}

// request says which events may be sent together.
type request struct {
	parked  *Parking                  // nil for retries
	blocked map[string]bool           // keys of events that have failed before
	most    *int                      // events of a transaction; fewer after a refusal
	atMost  int                       // events of a transaction, in any case
	again   func(which []int) []int64 // Record.Again
	sent    func(i int) bool          // a retry whose row is not removed yet; nil for none
}

// tried is what became of a transaction that was tried.
type tried uint8

const (
	triedSent     tried = iota // it is open
	triedRefused               // Kafka has refused a record, and it is aborted
	triedBadTopic              // a topic accepts nothing: its events are unavailable, and it is aborted
	triedTooLate               // an event has expired before it was sent, and it is aborted
)

// some sends the first events of a delivery in a transaction, which stays open, and returns how many have an
// outcome. If Kafka refuses a record, the transaction is aborted, and half of the events are tried. An event that
// is refused alone is rejected. Retries without an event to send leave no transaction open. After an error it is
// not ready.
func (x *Exactly) some(d *delivery, r request) (n int, err error) {
	for d.stop.Err() == nil {
		d.OnSend()
		d.sendBegan, d.accepted, d.failed = time.Now(), nil, nil
		t := x.choose(d, min(*r.most, r.atMost, len(d.batch)), r)
		if r.parked == nil && len(t.which) == 0 {
			return t.n, nil
		}
		result, err := x.try(d, t, r)
		switch {
		case err != nil:
			return 0, err
		case result == triedBadTopic, result == triedTooLate:
		case result == triedSent:
			*r.most = min(2**r.most, x.Rules.BatchSize)
			return t.n, nil
		case len(t.which) == 1:
			d.markRejected(t.which[0], RejectionClass(t.errs[0]), t.errs[0])
			*r.most = min(2**r.most, x.Rules.BatchSize)
		default:
			*r.most = max(1, t.n/2)
		}
	}
	return 0, nil
}

func pending(batch []envelope.Event) []Outcome { return make([]Outcome, len(batch)) }

// permit waits until the lease is sure and the breaker lets events through. It returns nil if the relay stops first.
func (x *Exactly) permit(d *delivery) (*breaker.Permit, error) {
	for d.stop.Err() == nil {
		if err := x.mayProduce(d.stop, d.held); err != nil {
			return nil, err
		}
		if permit := d.Breaker.Allow(len(d.batch)); permit.Granted > 0 {
			return permit, nil
		}
		d.OnSend()
		d.pending = []int{0} // which the log names
		d.awaitBreaker()
	}
	return nil, nil
}

func (x *Exactly) mayProduce(stop, held context.Context) error {
	x.Lease.AwaitSure(stop, held)
	if !x.Lease.Held() {
		return lease.ErrLeaseLost
	}
	return nil
}

// report tells the breaker how a transaction has ended. That Kafka has ended it says nothing about the next one.
func (x *Exactly) report(permit *breaker.Permit, err error) {
	defer permit.Release()
	if exactly.IsEnded(err) {
		return
	}
	outcome := breaker.Succeeded
	if err != nil {
		outcome = breaker.Failed
	}
	for range permit.Granted {
		permit.Report(outcome)
	}
}

// attemptOf is a transaction that is tried.
type attemptOf struct {
	n       int   // events of the batch that have an outcome if it succeeds, or are sent
	which   []int // those to send
	records []kgo.Record
	errs    []error // of the records
}

// choose makes the records of the first n events, or of fewer that fit. Events whose keys are blocked, and those that
// cannot be sent, get their outcomes. Events that were rejected, or whose topics accept nothing, keep them.
func (x *Exactly) choose(d *delivery, n int, r request) (t attemptOf) {
	d.blocked = maps.Clone(r.blocked)
	for i := range n {
		if kind := d.outcomes[i].Kind; kind == OutcomeRejected || kind == OutcomeUnavailable {
			d.block(i)
		} else if d.outcomes[i] = (Outcome{}); r.sent != nil && r.sent(i) {
			d.outcomes[i].Kind = OutcomeBlocked
			d.block(i)
		} else if !d.skipExpired(i) && !x.skip(d, i, r.parked) {
			t.which = append(t.which, i)
		}
	}
	t.n, t.errs = n, make([]error, len(t.which))
	t.records = x.producer.records(d.batch, t.which, t.errs)
	for k := range t.records {
		if t.errs[k] == nil && t.records[k].Topic == x.Rules.ExactlyOnce {
			t.errs[k] = &envelope.FieldError{EventType: string(d.batch[t.which[k]].EventType), Index: -1, Field: "topic", Err: errCursorTopic}
		} else if t.errs[k] == nil && x.producer.buffer.TooLarge(&t.records[k]) {
			t.errs[k] = errBuffer
		}
	}
	x.producer.checkTopics(d.held, t.records, t.errs)
	if fit := x.producer.buffer.Fitting(t.records, t.errs); fit < len(t.which) {
		t.n = t.which[fit]
		t.which, t.records, t.errs = t.which[:fit], t.records[:fit], t.errs[:fit]
	}
	x.dropUnsent(d, &t)
	return t
}

// errCursorTopic is that of an event that would be lost: Kafka keeps only the newest record of each key.
var errCursorTopic = errors.New("is the cursor topic of the relay, which is for it alone")

// errBuffer is that of an event which the client would refuse without the room of the cursor record.
var errBuffer = fmt.Errorf("%w: it has more bytes than the Kafka option MaxBufferedBytes allows", kerr.MessageTooLarge)

// skip blocks an event whose key is blocked. The caller of Deliver holds mu, so no row of the key is removed
// meanwhile.
func (x *Exactly) skip(d *delivery, i int, parked *Parking) bool {
	if d.skipBlocked(i) || parked != nil && x.skipBadTopic(d, i) {
		return true
	}
	if parked == nil || d.PassFailedKeys || !parked.busy.Load() || !parked.waits(d.key(i)) {
		return false
	}
	d.outcomes[i] = Outcome{Kind: OutcomeBlocked}
	d.block(i)
	return true
}

// skipBadTopic skips an event of a topic that has accepted nothing. A retrier probes it.
func (x *Exactly) skipBadTopic(d *delivery, i int) bool {
	if !d.Bad.Failing() {
		return false
	}
	topic, _ := x.Topic(&d.batch[i])
	bad, is := d.Bad.Avoid(kafka.Partition{Topic: topic, Number: kafka.Unassigned})
	if is {
		d.markUnavailable(i, Outcome{Kind: OutcomeUnavailable, Class: bad.Class, Err: bad.Err, place: bad.Name})
	}
	return is
}

// dropUnsent gives the events that cannot be sent their outcomes, and the later ones of their keys.
func (x *Exactly) dropUnsent(d *delivery, t *attemptOf) {
	if !slices.ContainsFunc(t.errs, func(err error) bool { return err != nil }) {
		return
	}
	var which []int
	var records []kgo.Record
	for k, i := range t.which {
		err := t.errs[k]
		switch {
		case d.skipBlocked(i), errors.Is(err, errBlocked):
			d.outcomes[i] = Outcome{Kind: OutcomeBlocked}
		case err == nil:
			which, records = append(which, i), append(records, t.records[k])
		case kafka.IsTopicOutage(err):
			d.parkUnavailable(i, &t.records[k], err)
		default:
			d.markRejected(i, RejectionClass(err), err)
		}
	}
	t.which, t.records, t.errs = which, records, make([]error, len(which))
}

// try sends the events of a transaction and leaves it open. If nothing has to be parked, the cursor record goes
// along. After an error it is not ready.
func (x *Exactly) try(d *delivery, t attemptOf, r request) (tried, error) {
	var err error
	ctx, cancel := context.WithTimeout(d.held, x.Rules.SendTimeout)
	defer cancel()
	if x.open, err = x.sender.Begin(ctx); err != nil { // the end of the transaction before has failed
		return 0, x.doubt(x.outage(err, byCommit))
	}
	if slices.ContainsFunc(t.which, func(i int) bool { return d.batch[i].HasExpired() }) {
		return triedTooLate, x.abort(ctx)
	}
	last, records := x.pos.Last, t.records
	if r.parked != nil {
		last = d.batch[t.n-1].ID
	}
	x.recorded = r.parked == nil || len(t.which)+expiredIn(d.outcomes[:t.n]) == t.n
	if x.recorded {
		own, err := x.sender.CursorRecord(x.record(last, r.again(t.which)))
		if err != nil {
			return 0, x.doubt(err)
		}
		records = append(slices.Clip(records), own)
	}
	errs, err := x.open.Send(ctx, records)
	if err != nil {
		return 0, x.doubt(x.outage(err, byRecord))
	}
	copy(t.records, records) // with their partitions
	copy(t.errs, errs)
	return x.classify(ctx, d, t, errs)
}

// classify gives the events that were sent their outcome, or aborts their transaction.
func (x *Exactly) classify(ctx context.Context, d *delivery, t attemptOf, errs []error) (result tried, err error) {
	for k, err := range errs {
		switch ours := k == len(t.which); {
		case err == nil:
		case kafka.IsTopicOutage(err) && !kafka.IsReplaced(err) && !ours:
			result = triedBadTopic
			d.parkUnavailable(t.which[k], &t.records[k], err)
		case RejectionClass(err) != "" && (!ours || result != triedSent):
			result = max(result, triedRefused)
		default:
			return 0, x.doubt(x.outage(err, byRecord))
		}
	}
	if x.mayEnd(byRecord) {
		d.reportAnswers(errs)
	}
	if result != triedSent {
		return result, x.abort(ctx)
	}
	for k, i := range t.which {
		d.markSent(i, &t.records[k])
	}
	d.reportPartitions()
	return triedSent, nil
}

// abort ends the open transaction without its events. After an error it is not ready.
func (x *Exactly) abort(ctx context.Context) error {
	if err := x.open.Abort(ctx); err != nil {
		return x.doubt(x.outage(err, byRecord))
	}
	x.open = nil
	return nil
}

// Commit passes the first events of a batch, whose outcomes Deliver has returned and whose failures have rows. It
// sends the cursor record, if Deliver has not, and commits without waiting. The caller has called Lock. It is the
// steps SendNext and AskCommit.
func (x *Exactly) Commit(batch []envelope.Event, outcomes []Outcome) error {
	last := batch[len(batch)-1].ID
	x.pos.Last, x.pos.Highest = last, max(x.pos.Highest, last)
	if !x.recorded {
		ctx, cancel := context.WithTimeout(x.Held, x.Rules.SendTimeout)
		defer cancel()
		if err := x.sendRecord(ctx); err != nil {
			return x.doubt(x.outage(err, byRecord))
		}
	}
	d := x.deliverer.begin(x.Held, x.Held, batch, true)
	d.outcomes = outcomes
	x.endOpen(d.notifySent)
	return nil
}

// retry sends events of outbox_failed again, in transactions of as many as Kafka takes, and waits until they are
// confirmed. Events are pending that were read before the last start, or if a transaction fails. It is the step
// Retry.
func (x *Exactly) retry(stop, held context.Context, generation int64, events []cursor.FailedRow) ([]Outcome, error) {
	batch := eventsOf(events)
	d := x.deliverer.begin(stop, held, batch, false)
	commits, err := x.retryAll(d, generation, events)
	for _, c := range commits {
		if err == nil {
			err = c.Wait(held)
		}
	}
	if errors.Is(err, lease.ErrLeaseLost) {
		return nil, err
	}
	if err != nil {
		return pending(batch), nil //nolint:nilerr // the session finds out, and starts again
	}
	d.notifySent()
	return d.outcomes, nil
}

func (x *Exactly) retryAll(all *delivery, generation int64, events []cursor.FailedRow) (commits []*exactly.Commit, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.ready || x.generation.Load() != generation || len(x.again)+len(events) > exactly.MaxAgain {
		return nil, nil
	}
	r := request{most: new(int), atMost: len(events), blocked: map[string]bool{}}
	*r.most = len(events)
	for from := 0; from < len(events) && all.stop.Err() == nil; {
		if err := x.mayProduce(all.stop, all.held); err != nil {
			return commits, err
		}
		d := x.deliverer.begin(all.stop, all.held, all.batch[from:], false)
		d.probing = true // tells of the partitions that have accepted events
		var again []int64
		r.sent = func(i int) bool { return slices.Contains(x.again, events[from+i].Row) }
		r.again = func(which []int) []int64 {
			again = slices.Clone(x.again)
			for _, i := range which {
				again = append(again, events[from+i].Row)
			}
			return again
		}
		n, err := x.some(d, r)
		if err != nil {
			return commits, err
		}
		if x.open != nil {
			x.again = again
			commits = append(commits, x.endOpen(nil))
		}
		copy(all.outcomes[from:from+n], d.outcomes)
		from, r.blocked = from+n, d.blocked
		if n == 0 {
			break
		}
	}
	return commits, nil
}

// forget removes events from Record.Again: a row was written after their rows were removed. The caller holds mu.
func (x *Exactly) forget(results []cursor.RetryResult, locked []int64) {
	x.again = slices.DeleteFunc(slices.Clone(x.again), func(row int64) bool {
		return !slices.Contains(locked, row) && slices.ContainsFunc(results, func(r cursor.RetryResult) bool { return r.Row == row })
	})
}
