package relay

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/kafka"
)

// acks collects the outcomes of the records of one send and reports them to the
// breaker. The client calls promise from its own goroutine, one record after another.
type acks struct {
	permit  *breaker.Permit
	records []kgo.Record
	errs    []error                // of records that are not to be sent
	all     chan struct{}          // closed when every outcome is known
	crashed chan struct{}          // closed when promise has panicked
	exceeds func(*kgo.Record) bool // the client does not send such a record; nil for none

	crash *contain.Panic // the first of promise; written under mu, before crashed is closed

	mu       sync.Mutex
	known    []bool // the outcome of each record is
	next     int    // in known: where the next outcome probably belongs
	accepted int
	failed   map[*kgo.Record]error
	open     int                    // outcomes that are not known, and one until the client has all records
	handed   int                    // records that the client has
	late     func(i int, err error) // takes the outcomes that come after split; called under mu
}

// newAcks expects one outcome for each record without an error.
func newAcks(p *breaker.Permit, records []kgo.Record, errs []error) *acks {
	a := &acks{
		permit: p, records: records, errs: errs, known: make([]bool, len(records)),
		all: make(chan struct{}), crashed: make(chan struct{}), open: 1,
	}
	for _, err := range errs {
		if err == nil {
			a.open++
		}
	}
	return a
}

// handedOver is called once, when the client has the first n records. No outcome will come for the others.
func (a *acks) handedOver(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.handed = n
	for _, err := range a.errs[n:] {
		if err == nil {
			a.open--
		}
	}
	a.done()
}

// reject gives a record an error that the client does not get.
func (a *acks) reject(i int, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.errs[i] = err
	a.open--
}

// promise takes the outcome of one record. It contains its own panics: in a goroutine of the client they would end
// the process, and the lease would have to expire.
func (a *acks) promise(r *kgo.Record, err error) {
	if a.hasCrashed() {
		return
	}
	defer func() {
		if v := recover(); v != nil {
			a.keepCrash(contain.NewPanic(v))
		}
	}()
	if err == nil {
		a.permit.Report(breaker.Succeeded)
	} else if a.exceeds != nil && RejectionClass(err) == tooLarge && a.exceeds(r) {
		err = fmt.Errorf("%w: %w", errByClient, err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	i := a.indexOf(r)
	a.known[i] = true
	switch {
	case err == nil:
		a.accepted++
	case a.failed == nil:
		a.failed = map[*kgo.Record]error{r: err}
	default:
		a.failed[r] = err
	}
	if a.late != nil {
		a.late(i, err)
	}
	a.done()
}

// indexOf returns the index of a record. The outcomes of a partition come in the order of its records, so the search
// begins behind the last one. The caller holds mu.
func (a *acks) indexOf(r *kgo.Record) int {
	for range a.records {
		i := a.next
		if a.next++; a.next == len(a.records) {
			a.next = 0
		}
		if &a.records[i] == r {
			return i
		}
	}
	panic("outbox: outcome of a record that was not sent")
}

// progress returns how many outcomes are missing, and how many records were accepted.
func (a *acks) progress() (open, accepted int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.open, a.accepted
}

// silentTopics returns the topics of records without an outcome.
func (a *acks) silentTopics() (topics []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range a.unknown() {
		if topic := a.records[i].Topic; !slices.Contains(topics, topic) {
			topics = append(topics, topic)
		}
	}
	return topics
}

// unknown returns the indexes of the records without an outcome. The caller holds mu.
func (a *acks) unknown() iter.Seq[int] {
	return func(yield func(int) bool) {
		for i := range a.records[:a.handed] {
			if a.errs[i] == nil && !a.known[i] && !yield(i) {
				return
			}
		}
	}
}

// split calls silent for the index of each record without an outcome; their outcomes are passed to late when they
// come. It returns the outcomes that are known. The records of these, with which the client has finished, are emptied:
// the client keeps all records of the send in memory as long as one has no outcome.
func (a *acks) split(silent func(i int), late func(i int, err error)) *acks {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range a.unknown() {
		silent(i)
	}
	a.late = late
	for i, known := range a.known {
		if r := &a.records[i]; known {
			clear(r.Headers)
			r.Key, r.Value, r.Headers = nil, nil, nil
		}
	}
	return &acks{permit: a.permit, records: a.records, failed: maps.Clone(a.failed)}
}

// keepCrash keeps the first panic of promise, whose outcome is then missing.
func (a *acks) keepCrash(p *contain.Panic) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.crash == nil {
		a.crash = p
		close(a.crashed)
	}
}

func (a *acks) hasCrashed() bool {
	select {
	case <-a.crashed:
		return true
	default:
		return false
	}
}

// raise panics in the goroutine that sends if promise has panicked.
func (a *acks) raise() {
	if a.hasCrashed() {
		panic(contain.Crash{Panic: a.crash})
	}
}

// done counts one outcome. The caller holds mu.
func (a *acks) done() {
	if a.open--; a.open == 0 {
		close(a.all)
	}
}

// timedOut says of records that were dropped with their client what they were waited for.
func (a *acks) timedOut(after time.Duration) {
	for r, err := range a.failed {
		a.failed[r] = timedOut(err, after)
	}
}

// timedOut returns the error of a record, which may have been dropped with its client after a time.
func timedOut(err error, after time.Duration) error {
	if errors.Is(err, kgo.ErrClientClosed) {
		return fmt.Errorf("no answer within %v: %w", after, kgo.ErrRecordTimeout)
	}
	return err
}

// dropped gives errStopping to records that the client has dropped because of a stop.
func (a *acks) dropped() {
	for r, err := range a.failed {
		if kafka.IsOutage(err) {
			a.failed[r] = errStopping
		}
	}
}

// collect adds the errors of the client to errs. Every outcome must be known.
func (a *acks) collect(errs []error) {
	for i := range errs {
		if err := a.failed[&a.records[i]]; err != nil {
			errs[i] = err
		}
	}
}

// outages returns the topics of records that failed because their partitions or Kafka as a
// whole are unavailable.
func (a *acks) outages() (topics []string) {
	for r, err := range a.failed {
		if kafka.IsOutage(err) && !slices.Contains(topics, r.Topic) {
			topics = append(topics, r.Topic)
		}
	}
	return topics
}

// explain adds causes to the errors of records that failed for them. Fails is the error of Kafka as a whole, or nil.
func (a *acks) explain(causes map[kafka.Partition]error, fails error) {
	for r, err := range a.failed {
		at := kafka.PartitionOf(r)
		if cause := cmp.Or(fails, causes[at.WholeTopic()], causes[at]); cause != nil && kafka.IsOutage(err) {
			a.failed[r] = fmt.Errorf("%w: %w", cause, err)
		}
	}
}

// reportFailures reports the failures to the breaker. While Kafka works they are those of topics and partitions, and
// say nothing about Kafka.
func (a *acks) reportFailures(works bool) {
	for _, err := range a.failed {
		result := callResultOf(err)
		if result == breaker.Failed && works {
			result = breaker.Cancelled
		}
		a.permit.Report(result)
	}
}

// callResultOf returns what the breaker learns about an error. A rejected record and a missing topic count as
// success, because Kafka answered.
func callResultOf(err error) breaker.Outcome {
	switch {
	case kafka.IsOutage(err):
		return breaker.Failed
	case errors.Is(err, errByClient):
		return breaker.Cancelled
	}
	return breaker.Succeeded
}

// errByClient is the error of an event that the Kafka client rejects, so that it never reaches Kafka.
var errByClient = errors.New("above kgo.ProducerBatchMaxBytes of the client")

// Outcome is what happened to an event of a batch.
type Outcome struct {
	Kind  OutcomeKind
	Class string // of the error, as in outbox_failed.error_class
	Err   error
	Sent  SentTo // of a sent event; of one that had expired, only the time
	place string // outbox_failed.place: the topic or partition that an unavailable event waits for, or to which a probe was sent
}

// SentTo is the answer of Kafka for an event that it has accepted.
type SentTo struct {
	Partition kafka.Partition
	Offset    int64     // -1 if Kafka does not tell, as for a record that it has had before
	Time      time.Time // of the record
}

func sentTo(r *kgo.Record) SentTo { return SentTo{kafka.PartitionOf(r), r.Offset, r.Timestamp} }

// OutcomeKind says what happened to an event.
type OutcomeKind uint8

// Outcomes of an event of a batch.
const (
	OutcomePending     OutcomeKind = iota // not decided: the event will be sent again
	OutcomeSent                           // Kafka has acknowledged the event
	OutcomeRejected                       // Kafka rejected the event for what it is
	OutcomeUnavailable                    // Kafka, the topic or the partition was unavailable
	OutcomeBlocked                        // not sent: an earlier event of the key did not get through
	OutcomeParked                         // not sent: the key is parked, and the parking has counted the event
	OutcomeExpired                        // not sent: the event had expired
)

// invalidEvent is the error class of rows from which no record can be made.
const invalidEvent = "invalid_event"

// tooLarge is the error class of events that are larger than a record may be, whether Kafka, its client or we found so.
const tooLarge = "message_too_large"

// isTooLarge reports whether we have found that an event is too large, without reading it.
func isTooLarge(err error) bool {
	_, ok := errors.AsType[*envelope.TooLargeError](err)
	return ok
}

// RejectionClass returns the class of an error with which an event was rejected for what it is: invalidEvent,
// UnreadableRow, tooLarge, or a class of [kafka.RejectionClass]. It returns "" for every other error.
func RejectionClass(err error) string {
	if _, ok := errors.AsType[*envelope.FieldError](err); ok { // without the allocation of errors.As: this is called for every event
		return invalidEvent
	}
	if _, ok := errors.AsType[*envelope.UnreadableError](err); ok {
		return cursor.UnreadableRow
	}
	if isTooLarge(err) {
		return tooLarge
	}
	return kafka.RejectionClass(err)
}

// foundByUs reports whether an event was rejected for what it is without being sent.
func foundByUs(err error) bool {
	class := RejectionClass(err)
	return class == invalidEvent || class == cursor.UnreadableRow || isTooLarge(err)
}

// isAnswer reports whether Kafka has accepted an event, rejected it, or answered about its topic. The result of an
// event that has no answer in time is none, also if Kafka answers other questions.
func isAnswer(err error) bool {
	return err == nil || kafka.IsAnswer(err) && !errors.Is(err, errByClient)
}

// concernKafka reports whether the results of a send say something about Kafka: that of an event that was sent does, or
// of one whose topic Kafka was asked about.
func concernKafka(errs []error) bool {
	return slices.ContainsFunc(errs, func(err error) bool {
		return !foundByUs(err) && !errors.Is(err, errBlocked) && !errors.Is(err, errSendAlone) && !errors.Is(err, errStopping) && !errors.Is(err, errExpired) &&
			!errors.Is(err, errByClient)
	})
}
