package outbox

import (
	"context"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"
)

// acks collects the outcomes of records, and tells the breaker. The client calls
// promise from its own goroutine, one record after another.
//
// The breaker is to stop the sending when Kafka is away, not when one partition
// is: its records fail together, and a few of them would open it for all others.
// So the failures of a partition are told as one if another partition works.
type acks struct {
	held    context.Context
	permit  *permit
	records []kgo.Record
	errs    []error
	sparing bool          // tell the failures of a partition as one in any case
	all     chan struct{} // closed when every outcome is in

	mu     sync.Mutex
	failed map[*kgo.Record]error
	works  bool // a record has arrived
	open   int  // outcomes to come, and one until all records are on their way
}

// newAcks expects one outcome for each record without an error.
func newAcks(held context.Context, p *permit, records []kgo.Record, errs []error, sparing bool) *acks {
	a := &acks{held: held, permit: p, records: records, errs: errs, sparing: sparing, all: make(chan struct{}), open: 1}
	for _, err := range errs {
		if err == nil {
			a.open++
		}
	}
	return a
}

// sent tells that all records are on their way but the last, for which no
// outcome will come.
func (a *acks) sent(unsent []error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, err := range unsent {
		if err == nil {
			a.open--
		}
	}
	a.done()
}

func (a *acks) promise(r *kgo.Record, err error) {
	if err == nil {
		a.permit.report(callSucceeded)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err != nil {
		if a.failed == nil {
			a.failed = make(map[*kgo.Record]error)
		}
		a.failed[r] = err
	} else {
		a.works = true
	}
	a.done()
}

// done counts one down, under mu.
func (a *acks) done() {
	if a.open--; a.open > 0 {
		return
	}
	if len(a.failed) > 0 {
		a.fail()
	}
	close(a.all)
}

type partition struct {
	topic  string
	number int32
}

// fail hands out the errors, in the order of the records.
func (a *acks) fail() {
	told := map[partition]bool{}
	for i := range a.records {
		r := &a.records[i]
		err := a.failed[r]
		if err == nil {
			continue
		}
		a.errs[i] = err
		o := a.outcome(err)
		if at := (partition{r.Topic, r.Partition}); o == callFailed {
			if told[at] && (a.works || a.sparing) {
				o = callCancelled
			}
			told[at] = true
		}
		a.permit.report(o)
	}
}

// outcome is what the breaker learns. A refusal or a missing topic is no failure:
// Kafka was there.
func (a *acks) outcome(err error) outcome {
	switch {
	case refusalClass(err) != "", isTopicTrouble(err):
		return callSucceeded
	case a.held.Err() != nil: // ended by us, which says nothing about Kafka
		return callCancelled
	}
	return callFailed
}
