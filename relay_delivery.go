package outbox

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
)

// sender hands events to Kafka. [producer] is the sender of a relay.
type sender interface {
	// produce sends the events of batch whose indexes are in which, and returns the
	// record and the error of each event that it took. It takes events from the start
	// of which: fewer than all if not all may go together or if stop ends meanwhile, none
	// if the breaker permits no call. An event that it took and did not send because stop
	// has ended has errStopping. When produce returns, no record is on its way any more.
	// The last error ends the delivery: the lease is lost, the time to stop is over, or
	// no client can be made.
	produce(stop, held context.Context, batch []envelope, which []int) ([]kgo.Record, []error, error)
	// answers reports whether any broker answers.
	answers(ctx context.Context) bool
	// topic returns the topic of an event.
	topic(e *envelope) (string, error)
}

// deliveryParts is what deliveries use.
type deliveryParts struct {
	sender       sender
	breaker      *breaker
	log          *slog.Logger
	kafkaOutage  *outage.Log       // Kafka as a whole
	topicOutages *outage.Logs      // topics and partitions
	onSend       func()            // called before each send
	onSent       func(b SentBatch) // called after each delivery; may be nil
}

// deliverer sends batches and decides about each event. It belongs to one goroutine.
type deliverer struct{ parts deliveryParts }

// topic returns the topic of an event.
func (p *deliverer) topic(e *envelope) (string, error) { return p.parts.sender.topic(e) }

// deliver hands a batch to Kafka and returns the outcome of each event. Events of
// parked keys are not sent, and neither are events behind one that did not get
// through. If no event of the batch was accepted because Kafka is unavailable, deliver
// retries the whole batch. As soon as one event is accepted, the remaining failures are
// local to a topic or a partition, and their outcome is unavailable, unless Kafka has
// stopped answering since. Events stay pending only if stop was cancelled (no error) or
// sending ended with an error. After a stop no event is pending in front of one that was
// sent.
func (p *deliverer) deliver(stop, held context.Context, batch []envelope, parked *parking) ([]outcome, error) {
	d := p.begin(stop, held, batch)
	d.patient = true
	for i := range batch {
		if parked.busy.Load() && parked.mustWait(d.key(i)) {
			d.outcomes[i].kind = outcomeParked
		} else {
			d.pending = append(d.pending, i)
		}
	}
	return d.finish()
}

// attempt sends a batch of events that have failed before. It differs from deliver in
// that it waits for nothing: an event that fails is unavailable, and an event that the
// breaker does not permit stays pending.
func (p *deliverer) attempt(stop, held context.Context, batch []envelope) ([]outcome, error) {
	d := p.begin(stop, held, batch)
	for i := range batch {
		d.pending = append(d.pending, i)
	}
	return d.finish()
}

func (p *deliverer) begin(stop, held context.Context, batch []envelope) *delivery {
	return &delivery{
		deliveryParts: p.parts, stop: stop, held: held, batch: batch, began: time.Now(),
		outcomes: make([]outcome, len(batch)), pending: make([]int, 0, len(batch)),
	}
}

// delivery is one batch on its way.
type delivery struct {
	deliveryParts
	stop, held context.Context
	batch      []envelope
	outcomes   []outcome
	pending    []int // events without an outcome, by their index in batch
	patient    bool  // wait for Kafka and for the breaker

	began      time.Time // of the delivery
	sendBegan  time.Time // of the last send
	mode       sendMode
	obstacle   obstacle
	blocked    map[string]bool // keys of events that did not get through
	accepted   bool            // Kafka has accepted an event of the batch
	unanswered bool            // Kafka did not answer when it was last asked
}

// sendMode is how the pending events are sent next.
type sendMode uint8

const (
	sendInBatch  sendMode = iota
	sendOneByOne          // Kafka rejected a record of the batch, perhaps with others
)

// obstacle is what the next send has to wait for.
type obstacle uint8

const (
	noObstacle       obstacle = iota
	kafkaUnavailable          // wait before the next send, longer each time
	breakerOpen               // the breaker permitted no call
)

// finish runs the delivery, and passes what was sent to the hook.
func (d *delivery) finish() ([]outcome, error) {
	err := d.run()
	if err == nil && d.patient {
		d.parkOvertaken()
	}
	d.notifySent()
	return d.outcomes, err
}

// parkOvertaken parks the events that are pending in front of one that was sent, because
// the relay stops: they were to be sent alone, say. The cursor can pass the events that
// were sent, which otherwise would be sent again.
func (d *delivery) parkOvertaken() {
	last := len(d.batch) - 1
	for last >= 0 && d.outcomes[last].kind != outcomeSent {
		last--
	}
	for len(d.pending) > 0 && d.pending[0] < last {
		i := d.pending[0]
		d.pending = d.pending[1:]
		if !d.skipBlocked(i) {
			d.outcomes[i] = outcome{kind: outcomeUnavailable, class: kafka.UnavailableClass(errStopping), err: errStopping}
			d.block(i)
		}
	}
}

func (d *delivery) run() error {
	for len(d.pending) > 0 && d.stop.Err() == nil {
		d.onSend()
		if d.obstacle == kafkaUnavailable {
			wait.Await(d.stop, d.held, nil, d.kafkaOutage.Backoff())
		}
		d.obstacle, d.sendBegan = noObstacle, time.Now()
		send := d.sendBatch
		if d.mode == sendOneByOne {
			send = d.sendEach
		}
		if err := send(); err != nil {
			return err
		}
		if d.obstacle == breakerOpen {
			if !d.patient {
				return nil
			}
			d.awaitBreaker()
		}
	}
	return nil
}

// awaitBreaker waits until an open breaker becomes half-open, or for a moment where
// another goroutine uses the trial calls.
func (d *delivery) awaitBreaker() {
	const shortest = 50 * time.Millisecond
	if d.breaker.state() == BreakerOpen {
		e := &d.batch[d.pending[0]]
		d.log.Warn("outbox: breaker is open, batch stops", "id", e.id, "event_id", string(e.eventID), "wait", d.breaker.wait())
	}
	wait.Await(d.stop, d.held, nil, max(d.breaker.wait(), shortest))
}

// sendBatch sends all pending events at once. If Kafka rejects a request, it names all
// records in it, good ones too. So what Kafka rejects here, sendEach sends alone.
func (d *delivery) sendBatch() error {
	d.pending = slices.DeleteFunc(d.pending, d.skipBlocked)
	records, errs, err := d.sender.produce(d.stop, d.held, d.batch, d.pending)
	if err != nil {
		return err
	}
	if len(errs) == 0 {
		if len(d.pending) > 0 {
			d.obstacle = breakerOpen
		}
		return nil
	}
	tried := d.pending[:len(errs)]
	var again, failed []int // failed: indexes in tried
	for n, i := range tried {
		switch class := rejectionClass(errs[n]); {
		case errs[n] == nil:
			d.markSent(i, &records[n])
		case errors.Is(errs[n], errBlocked):
			d.outcomes[i].kind = outcomeBlocked
		case errors.Is(errs[n], errStopping):
			again = append(again, i)
		case class == invalidEvent || class == unreadableRow: // found by us, whatever else was sent
			d.markRejected(i, class, errs[n])
		case class != "" || errors.Is(errs[n], errSendAlone):
			d.mode = sendOneByOne
			again = append(again, i)
		case isLocal(errs[n]):
			d.parkUnavailable(i, &records[n], errs[n])
		default:
			failed = append(failed, n)
		}
	}
	// The rest failed because Kafka or their partitions are unavailable. If Kafka works
	// for others, park them. Otherwise they stay pending; run sends them again.
	park := len(failed) > 0 && d.shouldParkRest()
	for _, n := range failed {
		if i := tried[n]; park {
			d.parkUnavailable(i, &records[n], errs[n])
		} else {
			d.reportKafkaOutage(i, errs[n])
			again = append(again, i)
		}
	}
	slices.Sort(again)
	d.pending = append(again, d.pending[len(errs):]...)
	if len(failed) > 0 && !park {
		d.obstacle = kafkaUnavailable
	} else {
		d.kafkaOutage.Report(nil)
	}
	return nil
}

// sendEach sends the pending events one by one in their order, up to the first that
// fails because Kafka is unavailable. What is rejected alone is rejected.
func (d *delivery) sendEach() error {
	for len(d.pending) > 0 && d.stop.Err() == nil {
		i := d.pending[0]
		if d.skipBlocked(i) {
			d.pending = d.pending[1:]
			continue
		}
		records, errs, err := d.sender.produce(d.stop, d.held, d.batch, d.pending[:1])
		if err != nil {
			return err
		}
		if len(errs) == 0 {
			d.obstacle = breakerOpen
			return nil
		}
		if errors.Is(errs[0], errStopping) {
			return nil
		}
		d.pending = d.pending[1:]
		switch class := rejectionClass(errs[0]); {
		case errs[0] == nil:
			d.markSent(i, &records[0])
		case class != "":
			d.markRejected(i, class, errs[0])
		case isLocal(errs[0]):
			d.parkUnavailable(i, &records[0], errs[0])
		case d.shouldParkRest():
			d.parkTopic(i, &records[0], errs[0])
		default:
			d.reportKafkaOutage(i, errs[0])
			d.pending = append([]int{i}, d.pending...)
			d.obstacle = kafkaUnavailable
			return nil
		}
		d.kafkaOutage.Report(nil)
	}
	d.mode = sendInBatch
	return nil
}

// isLocal reports whether an error is known to be that of one topic or partition.
func isLocal(err error) bool { return kafka.IsTopicOutage(err) || errors.Is(err, kafka.ErrNoLeader) }

// shouldParkRest reports whether events that failed are parked, so that they hold up no
// others. They are if Kafka accepted other events of the batch, because then the failure
// is that of a partition. But Kafka may have become unavailable in the middle of the
// batch. So if Kafka does not answer now, or did not when it was asked before, the events
// are sent again: parking them would park thousands of keys, and every later event of
// these keys would have to go through outbox_failed.
func (d *delivery) shouldParkRest() bool {
	if !d.patient || !d.accepted {
		return !d.patient
	}
	before := d.unanswered
	d.unanswered = !d.sender.answers(d.held)
	return !before && !d.unanswered
}

// key returns the parking key of an event.
func (d *delivery) key(i int) string {
	e := &d.batch[i]
	topic, _ := d.sender.topic(e) // an event without a topic cannot be sent; the key then has no topic either
	return tables.ParkingKey(topic, e.key())
}

func (d *delivery) markSent(i int, r *kgo.Record) {
	d.outcomes[i], d.accepted = outcome{kind: outcomeSent}, true
	if d.topicOutages.Failing() {
		d.topicOutages.Report("topic "+r.Topic, d.sendBegan, nil)
		d.topicOutages.Report(kafka.PartitionOf(r).String(), d.sendBegan, nil)
	}
}

func (d *delivery) markRejected(i int, class string, err error) {
	d.outcomes[i] = outcome{kind: outcomeRejected, class: class, err: err}
	d.block(i)
}

// parkUnavailable gives up an event for now, because its topic or partition is
// unavailable.
func (d *delivery) parkUnavailable(i int, r *kgo.Record, err error) {
	switch {
	case kafka.IsReplaced(err): // only the next client knows whether the topic exists
	case kafka.IsTopicOutage(err) || r.Partition == kafka.Unassigned:
		d.topicOutages.Report("topic "+r.Topic, d.sendBegan, err)
	default:
		d.topicOutages.Report(kafka.PartitionOf(r).String(), d.sendBegan, err)
	}
	kind := outcomeUnavailable
	if d.blocked[d.key(i)] {
		kind = outcomeBlocked
	}
	d.outcomes[i] = outcome{kind: kind, class: kafka.UnavailableClass(err), err: err}
	d.block(i)
}

// parkTopic gives up an event and all pending events of its topic: trying each of them
// alone would take a timeout each.
func (d *delivery) parkTopic(i int, r *kgo.Record, err error) {
	d.parkUnavailable(i, r, err)
	d.pending = slices.DeleteFunc(d.pending, func(j int) bool {
		topic, _ := d.sender.topic(&d.batch[j])
		if topic == r.Topic {
			d.parkUnavailable(j, r, err)
		}
		return topic == r.Topic
	})
}

// block makes the later events of an event's key wait.
func (d *delivery) block(i int) {
	if d.blocked == nil {
		d.blocked = map[string]bool{}
	}
	d.blocked[d.key(i)] = true
}

// skipBlocked reports whether the key of an event is blocked. Such an event is not sent.
func (d *delivery) skipBlocked(i int) bool {
	if len(d.blocked) == 0 || !d.blocked[d.key(i)] {
		return false
	}
	d.outcomes[i] = outcome{kind: outcomeBlocked}
	return true
}

func (d *delivery) reportKafkaOutage(i int, err error) {
	e := &d.batch[i]
	topic, _ := d.sender.topic(e)
	d.kafkaOutage.Report(err, "topic", topic, "id", e.id, "event_id", string(e.eventID))
}

// notifySent passes the events with an outcome to the hook, if there are any.
func (d *delivery) notifySent() {
	if d.onSent == nil {
		return
	}
	b := SentBatch{Retried: !d.patient, Began: d.began, Took: time.Since(d.began)}
	for i, o := range d.outcomes {
		switch o.kind {
		case outcomeSent:
			if b.sent == nil {
				b.sent = make([]SentEvent, 0, len(d.batch))
			}
			b.sent = append(b.sent, d.sentEvent(i))
		case outcomeRejected, outcomeUnavailable:
			b.notTaken = append(b.notTaken, notTaken{d.sentEvent(i), o.class})
		case outcomeBlocked, outcomeParked:
			b.Waiting++
		case outcomePending:
		}
	}
	b.Events, b.Failed = len(b.sent), len(b.notTaken)
	if b.Events+b.Failed+b.Waiting > 0 {
		d.onSent(b)
	}
}

func (d *delivery) sentEvent(i int) SentEvent {
	e := &d.batch[i]
	topic, _ := d.sender.topic(e) // "" for an event that was rejected because it has none
	return SentEvent{e, topic}
}
