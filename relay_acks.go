package outbox

import (
	"errors"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
)

// acks collects the outcomes of records, and tells the breaker. The client calls
// promise from its own goroutine, one record after another.
//
// The breaker is to stop the sending when Kafka is away, not when one partition
// is: its records fail together, and a few of them would open it for all others.
// So the failures of a partition are told as one if another partition works.
type acks struct {
	permit  *permit
	records []kgo.Record
	sparing bool          // tell the failures of a partition as one in any case
	all     chan struct{} // closed when every outcome is in

	mu     sync.Mutex
	failed map[*kgo.Record]error
	works  bool // a record has arrived
	open   int  // outcomes to come, and one until all records are on their way
}

// newAcks expects one outcome for each record without an error.
func newAcks(p *permit, records []kgo.Record, errs []error, sparing bool) *acks {
	a := &acks{permit: p, records: records, sparing: sparing, all: make(chan struct{}), open: 1}
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
	if a.open--; a.open == 0 {
		close(a.all)
	}
}

// collect adds the errors to those of records that were not sent. All outcomes
// must be in.
func (a *acks) collect(errs []error) {
	for i := range errs {
		if err := a.failed[&a.records[i]]; err != nil {
			errs[i] = err
		}
	}
}

// tell tells the breaker of the failures, in the order of the records.
func (a *acks) tell(errs []error) {
	told := map[kafka.Partition]bool{}
	for i, err := range errs {
		r := &a.records[i]
		if a.failed[r] == nil {
			continue
		}
		o := callResultOf(err)
		if at := kafka.PartitionOf(r); o == callFailed {
			if told[at] && (a.works || a.sparing || errors.Is(err, kafka.ErrNoLeader)) {
				o = callCancelled
			}
			told[at] = true
		}
		a.permit.report(o)
	}
}

// callResultOf is what the breaker learns. A refusal or a missing topic is no
// failure: Kafka was there.
func callResultOf(err error) callResult {
	if rejectionClass(err) != "" || kafka.IsTopicOutage(err) {
		return callSucceeded
	}
	return callFailed
}
