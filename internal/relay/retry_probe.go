package relay

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/cursor"
)

// ProbedKeys has the keys of events that are being probed. Their heads must not change.
type ProbedKeys struct {
	mu   sync.Mutex // held while heads are chosen to be probed, and while heads change
	keys map[string]bool
}

// end is called when events have been probed.
func (p *ProbedKeys) end(probed []cursor.FailedRow) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range probed {
		delete(p.keys, probed[i].Key)
	}
}

// RunProbes probes bad partitions, but for suspects, until ctx is cancelled. A wake request only has it find out anew
// how often that is.
func (r *retrier) RunProbes(ctx context.Context) {
	var probed time.Time
	left := func() time.Duration { return time.Until(probed.Add(r.probeEvery())) }
	r.repeat(ctx, r.ProbeNow, left, func(ctx context.Context) error {
		if left() > 0 {
			return nil
		}
		probed = time.Now()
		return r.probe(ctx, r.Bad.Names(false))
	})
}

// RunSuspects probes suspects until ctx is cancelled, when asked to. Most are good, and do not wait for those that
// RunProbes tries.
func (r *retrier) RunSuspects(ctx context.Context) {
	r.Bad.Probe()
	r.repeat(ctx, r.ProbeNow, r.probeEvery, func(ctx context.Context) error { return r.probe(ctx, r.Bad.Names(true)) })
}

// Most partitions that turn bad are back when another broker leads them, after some seconds. A record that is under way
// often does not notice: its client waits for the broker that has gone, or its time ends just before. So a partition is
// probed every oftenInterval at first. That is so long that the clients of Producer suffice, each of which may wait for
// a DeliveryTimeout and a half.
const (
	oftenInterval = 1500 * time.Millisecond
	oftenAtFirst  = 10 * time.Minute
)

// probeEvery returns how often bad partitions are probed.
func (r *retrier) probeEvery() time.Duration {
	if r.Bad.HaveTurnedBad(oftenAtFirst) {
		return min(oftenInterval, r.Rules.RetryInterval)
	}
	return r.Rules.RetryInterval
}

// probe tries one event of each of some bad partitions. The keys that lose their heads get others from Run, which also
// sends what waits for the partitions that have recovered.
func (r *retrier) probe(ctx context.Context, names []string) error {
	names = slices.DeleteFunc(names, func(name string) bool { return !r.Bad.Claim(name, true) })
	if len(names) == 0 {
		return nil
	}
	recovered := false
	defer func() {
		for _, name := range names {
			r.Bad.Release(name)
		}
		if recovered || len(r.Unanswered.Accepted()) > 0 { // an answer that came meanwhile was left to the next round
			r.Deliverer.Parts.OnRecovered()
		}
	}()
	until := time.Now().Add(oftenInterval) // other partitions wait meanwhile
	for left := names; len(left) > 0 && ctx.Err() == nil && time.Now().Before(until); {
		sent, unknown, err := r.probeOnce(ctx, left)
		if recovered = recovered || len(sent) > 0; errors.Is(err, errNotPermitted) {
			return nil
		}
		if err != nil {
			return err
		}
		left = unknown
	}
	return nil
}

// probeOnce tries one event of each bad partition. It returns the keys of those that were sent or have expired, and the
// partitions of those that have expired or were rejected: whether they accept others is not known.
func (r *retrier) probeOnce(ctx context.Context, names []string) (sent, unknown []string, err error) {
	var outcomes []Outcome
	send := r.sendBy(r.Deliverer.probe)
	try := func(stop, held context.Context, events []cursor.FailedRow) ([]Outcome, error) {
		outcomes, err = send(stop, held, events)
		return outcomes, err
	}
	waiting, events, err := r.choose(names)
	if err != nil {
		return nil, nil, err
	}
	defer r.Probed.end(events)
	r.ForgetEmpty(names, waiting)
	sent, err = r.retry(ctx, events, try)
	for i, o := range outcomes {
		if o.Kind == OutcomeExpired || o.Kind == OutcomeRejected {
			unknown = append(unknown, events[i].Place)
		}
	}
	return sent, unknown, err
}

// choose returns one waiting event for each bad partition, and those of them that are to be probed now. No head of
// their keys changes until the probes have ended.
func (r *retrier) choose(names []string) (waiting, events []cursor.FailedRow, err error) {
	r.Probed.mu.Lock()
	defer r.Probed.mu.Unlock()
	for _, unsaved := range r.Parked.Unsaved() {
		waiting = append(waiting, *unsaved.Event)
	}
	_, unanswered := r.Unanswered.waiting()
	waiting = append(waiting, unanswered...)
	events, err = r.find(func(ctx context.Context, skip []string) ([]cursor.FailedRow, error) {
		first, err := r.Store.First(ctx, names, skip)
		waiting = append(waiting, first...)
		return first, err
	})
	if r.Probed.keys == nil {
		r.Probed.keys = map[string]bool{}
	}
	for i := range events {
		r.Probed.keys[events[i].Key] = true
	}
	return waiting, events, err
}

// EmptyAfter is how long a bad partition is kept for which no row waits. The session writes the rows only after it
// has found that the partition is bad.
const EmptyAfter = 5 * time.Second

// ForgetEmpty forgets the bad partitions, of those named, for which no event waits.
func (r *retrier) ForgetEmpty(names []string, events []cursor.FailedRow) {
	empty := make(map[string]bool, len(names))
	for _, name := range names {
		empty[name] = true
	}
	for i := range events {
		delete(empty, events[i].Place)
	}
	for _, bad := range r.Bad.All() {
		if empty[bad.Name] && time.Since(bad.since) > EmptyAfter {
			r.Bad.Forget(bad.Name)
		}
	}
}

// forgetMoved forgets the partitions whose probes have gone to another partition, because the number of partitions
// has changed, and the topics whose probes have gone to a partition that accepts nothing. The events that wait for them
// are tried; those that still go to a bad partition wait for it again.
func (r *retrier) forgetMoved(events []cursor.FailedRow, outcomes []Outcome) {
	for i, o := range outcomes {
		waited := events[i].Place
		forget := false
		switch {
		case waited == "" || o.place == "" || o.place == waited:
		case strings.Contains(waited, "/"):
			forget = o.Kind == OutcomeSent
		default:
			forget = o.Kind == OutcomeUnavailable && strings.HasPrefix(o.place, waited+"/")
		}
		if forget {
			r.Bad.Forget(waited)
			r.Deliverer.Parts.OnRecovered()
		}
	}
}
