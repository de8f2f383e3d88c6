package relay

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/envelope"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/trace"
	"github.com/outboxgo/outbox/internal/wait"
)

// Sender sends events to Kafka. [Producer] is the sender of a relay.
type Sender interface {
	// produce sends the events of batch whose indexes are in which. It takes events from
	// the start of which: fewer than all if not all may go together or if stop ends
	// meanwhile, none if the breaker permits no call. An event that it took and did not
	// send has errStopping if stop has ended, and errExpired if it has expired meanwhile;
	// then it takes no event behind it. When produce returns, no record is on its way any
	// more. An error ends the delivery: the lease is lost, the time to stop is over, or no
	// client can be made.
	produce(stop, held context.Context, batch []envelope.Event, which []int) (sendResult, error)
	// prepare asks Kafka about topics, so that partition knows them.
	prepare(ctx context.Context, topics []string)
	// partition returns the partition to which an event goes, or its topic as a whole if
	// the partition is not known.
	partition(e *envelope.Event) kafka.Partition
	// topic returns the topic of an event.
	topic(e *envelope.Event) (string, error)
	// works asks Kafka whether it works as a whole.
	works(ctx context.Context, topic string) bool
}

// sendResult is what became of the events that a sender took.
type sendResult struct {
	records []kgo.Record
	errs    []error // of each record
	works   bool    // Kafka as a whole; the failures are those of topics and partitions
}

// DeliveryParts is what deliveries use.
type DeliveryParts struct {
	Sender         Sender
	Breaker        *breaker.Breaker
	Bad            *BadPartitions
	Unanswered     *Unanswered
	Log            *slog.Logger
	KafkaOutage    *outage.Log       // Kafka as a whole
	Heard          func(error)       // is told what is reported to KafkaOutage; may be nil
	Local          func()            // called after a send without an answer, if Kafka has not failed; may be nil
	PassFailedKeys bool              // RelayConfig.PassFailedKeys
	Exclusive      func() bool       // reports whether no process can send any more that led before; nil means yes
	OnSend         func()            // called before each send
	OnSent         func(b SentBatch) // called after each delivery; may be nil
	OnRecovered    func()            // called when a bad partition has accepted an event
}

// Deliverer sends batches and decides about each event. It belongs to one goroutine.
type Deliverer struct{ Parts DeliveryParts }

// Topic returns the topic of an event.
func (p *Deliverer) Topic(e *envelope.Event) (string, error) { return p.Parts.Sender.topic(e) }

// Deliver sends a batch and returns the outcome of each event:
//
//   - An event that has expired is not sent, whatever its key waits for. As long as the process that led before may
//     still send it, it waits like one of a bad partition.
//   - An event of a parked key, or behind an event that failed, is not sent.
//   - While Kafka as a whole is unavailable, Deliver sends the failed events again, after a backoff.
//   - While Kafka works, a failure is that of a topic or partition, and its event is unavailable. Once another
//     partition has accepted an event, later events for the bad one are unavailable without a try.
//   - An event stays pending only if stop was cancelled, which is no error, or if sending ended with an error.
//     After a stop no event is pending in front of one that was sent.
func (p *Deliverer) Deliver(stop, held context.Context, batch []envelope.Event, parked *Parking) ([]Outcome, error) {
	d := p.begin(stop, held, batch, true)
	for i := range batch {
		if batch[i].HasExpired() && d.exclusive() && d.skipExpired(i) { // few have, so the lease is asked last
			continue
		}
		if parked.busy.Load() && !d.PassFailedKeys && parked.MustWait(d.key(i)) {
			d.outcomes[i].Kind = OutcomeParked
		} else {
			d.pending = append(d.pending, i)
		}
	}
	return d.finish()
}

// attempt sends a batch of events that have failed before. Unlike Deliver, it does not wait: what Kafka as a whole
// or the breaker does not let through stays pending, and an event for a bad partition is unavailable.
func (p *Deliverer) attempt(stop, held context.Context, batch []envelope.Event) ([]Outcome, error) {
	return p.begin(stop, held, batch, false).sendAll()
}

// probe is attempt for events of bad partitions: it tries them.
func (p *Deliverer) probe(stop, held context.Context, batch []envelope.Event) ([]Outcome, error) {
	d := p.begin(stop, held, batch, false)
	d.probing = true
	return d.sendAll()
}

func (p *Deliverer) begin(stop, held context.Context, batch []envelope.Event, patient bool) *delivery {
	d := &delivery{
		DeliveryParts: p.Parts, stop: stop, held: held, batch: batch, patient: patient, began: time.Now(),
		outcomes: make([]Outcome, len(batch)), pending: make([]int, 0, len(batch)),
	}
	if trace.On {
		d.step = trace.Begin("deliver", "patient", patient, "ids", idsOf(len(batch), func(i int) *envelope.Event { return &batch[i] }))
	}
	return d
}

// delivery is one batch while it is sent.
type delivery struct {
	DeliveryParts
	stop, held context.Context
	step       trace.Step
	batch      []envelope.Event
	outcomes   []Outcome
	pending    []int // events without an outcome, by their index in batch
	patient    bool  // wait for Kafka and for the breaker
	probing    bool  // try events of bad partitions, too

	began     time.Time // of the delivery
	sendBegan time.Time // of the last send
	mode      sendMode
	obstacle  obstacle
	blocked   map[string]bool // keys of events that did not get through
	avoiding  bool            // events of bad partitions are not tried
	wasDown   bool            // Kafka did not work in the last send that failed

	// Partitions that have accepted an event in this send, and those that have not,
	// collected while a partition is bad.
	accepted, failed map[kafka.Partition]bool
	silent           map[kafka.Partition]bool // that have not answered in this delivery, although Kafka works
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

// finish runs the delivery, and passes the outcomes to the hook.
func (d *delivery) finish() ([]Outcome, error) {
	err := d.run()
	if err == nil && d.patient {
		d.parkOvertaken()
	}
	if trace.On {
		d.step.End("outcomes", d.outcomeWords())
	}
	d.notifySent()
	return d.outcomes, err
}

// parkOvertaken parks the events that are pending in front of a sent event because the relay stops. The cursor can
// then pass the sent events; otherwise they would be sent again. An event that is not answered yet may have been sent.
func (d *delivery) parkOvertaken() {
	last := len(d.batch) - 1
	for last >= 0 && d.outcomes[last].Kind != OutcomeSent && !errors.Is(d.outcomes[last].Err, errUnanswered) {
		last--
	}
	for len(d.pending) > 0 && d.pending[0] < last {
		i := d.pending[0]
		d.pending = d.pending[1:]
		if !d.skipExpired(i) && !d.skipBlocked(i) {
			d.outcomes[i] = Outcome{Kind: OutcomeUnavailable, Class: kafka.UnavailableClass(errStopping), Err: errStopping}
			d.block(i)
		}
	}
}

// sendAll sends every event of the batch.
func (d *delivery) sendAll() ([]Outcome, error) {
	for i := range d.batch {
		d.pending = append(d.pending, i)
	}
	return d.finish()
}

func (d *delivery) run() error {
	for len(d.pending) > 0 && d.stop.Err() == nil {
		d.OnSend()
		if d.obstacle == kafkaUnavailable {
			wait.Await(d.stop, d.held, nil, d.KafkaOutage.Backoff())
		}
		d.beginSend()
		send := d.sendBatch
		if d.mode == sendOneByOne {
			send = d.sendEach
		}
		err := send()
		d.reportPartitions()
		switch {
		case err != nil:
			return err
		case d.obstacle != noObstacle && !d.patient:
			return nil
		case d.obstacle == breakerOpen:
			d.awaitBreaker()
		}
	}
	return nil
}

// beginSend decides whether events of bad partitions are tried. While the breaker is open, a session does not park
// them: what looks like a bad partition may be an outage of Kafka. While the breaker is half-open they are not tried
// either: a failure would open it again.
func (d *delivery) beginSend() {
	if d.obstacle != noObstacle {
		d.silent = nil
	}
	d.obstacle, d.sendBegan = noObstacle, time.Now()
	d.accepted, d.failed = nil, nil
	d.avoiding = !d.probing && d.Bad.Failing() && (!d.patient || d.Breaker.State() != breaker.Open)
	if d.avoiding {
		d.Sender.prepare(d.stop, d.topicsToAvoid())
	}
}

// topicsToAvoid returns the topics that may have partitions to avoid.
func (d *delivery) topicsToAvoid() []string {
	topics := d.Bad.Topics()
	if !d.Bad.Spreads() {
		return topics
	}
	for _, i := range d.pending {
		if topic, err := d.Sender.topic(&d.batch[i]); err == nil && !slices.Contains(topics, topic) {
			topics = append(topics, topic)
		}
	}
	return topics
}

// produce sends pending events.
func (d *delivery) produce(which []int) (sendResult, error) {
	sent, err := d.Sender.produce(d.stop, d.held, d.batch, which)
	d.Bad.Sent(sent.records, sent.errs)
	return sent, err
}

// reportPartitions tells the registry which partitions have accepted events. A partition for which another event
// failed in the same send stays bad.
func (d *delivery) reportPartitions() {
	for at := range d.accepted {
		if !d.failed[at] && !d.failed[at.WholeTopic()] && d.Bad.Accept(at, d.sendBegan) {
			d.OnRecovered()
		}
	}
}

// awaitBreaker waits until an open breaker becomes half-open, or for a moment while another goroutine uses the trial
// calls. An open breaker need not stay so for all of its time: it becomes half-open once Kafka has said twice that it
// works.
func (d *delivery) awaitBreaker() {
	const shortest, often = 50 * time.Millisecond, time.Second
	if d.Breaker.State() != breaker.Open {
		wait.Await(d.stop, d.held, nil, shortest)
		return
	}
	e := &d.batch[d.pending[0]]
	d.Log.Warn("outbox: breaker is open, batch stops", "id", e.ID, "event_id", string(e.EventID), "wait", d.Breaker.Wait())
	topic, _ := d.Sender.topic(e)
	for works := 0; works < 2; {
		wait.Await(d.stop, d.held, nil, min(d.Breaker.Wait(), often))
		if d.stop.Err() != nil || d.held.Err() != nil || d.Breaker.State() != breaker.Open {
			return
		}
		if works++; !d.Sender.works(d.stop, topic) {
			works = 0
		}
	}
	d.Breaker.TryNow()
}

// sendBatch sends all pending events at once. If Kafka rejects a request, its error names every record in it, good
// ones too. So what Kafka rejects here, sendEach sends alone.
func (d *delivery) sendBatch() error {
	d.pending = slices.DeleteFunc(d.pending, d.skip)
	which, later := d.othersFirst()
	sent, err := d.produce(which)
	if err != nil {
		return err
	}
	if len(sent.errs) == 0 {
		if len(d.pending) > 0 {
			d.obstacle = breakerOpen
		}
		return nil
	}
	tried := which[:len(sent.errs)]
	var again, failed []int // failed: indexes in tried
	for n, i := range tried {
		err := sent.errs[n]
		switch class := RejectionClass(err); {
		case err == nil:
			d.markSent(i, &sent.records[n])
		case errors.Is(err, errBlocked):
			d.outcomes[i].Kind = OutcomeBlocked
		case errors.Is(err, errStopping), errors.Is(err, errExpired):
			again = append(again, i)
		case foundByUs(err): // whatever else was sent
			d.markRejected(i, class, err)
		case class != "" || errors.Is(err, errSendAlone):
			d.mode = sendOneByOne
			again = append(again, i)
		case kafka.IsTopicOutage(err), errors.Is(err, errUnanswered):
			d.parkUnavailable(i, &sent.records[n], err)
		default:
			failed = append(failed, n)
		}
	}
	local := len(failed) > 0 && d.isLocal(sent.works)
	for _, n := range failed {
		if i := tried[n]; local {
			d.parkUnavailable(i, &sent.records[n], sent.errs[n])
		} else {
			d.reportKafkaOutage(i, sent.errs[n])
			again = append(again, i)
		}
	}
	if len(d.failed) > 0 { // before, it was not known that accepted events matter
		for n, err := range sent.errs {
			if err == nil {
				d.accepted = with(d.accepted, kafka.PartitionOf(&sent.records[n]))
			}
		}
	}
	d.pending = slices.Concat(again, which[len(sent.errs):], later)
	slices.Sort(d.pending)
	if len(failed) > 0 && !local {
		d.obstacle = kafkaUnavailable
	} else {
		d.reportAnswers(sent.errs)
	}
	return nil
}

// othersFirst splits the pending events into those to send now and those that come later. A bad partition whose
// events have to be tried, because no other partition has accepted an event since a takeover, must not delay the
// other events for the time of a try. Once one of these is accepted, the events of the bad partition need no try.
// The partition may recover meanwhile, so a key with an event that comes later has no event now.
func (d *delivery) othersFirst() (now, later []int) {
	if !d.avoiding {
		return d.pending, nil
	}
	keys := map[string]bool{} // of later
	for _, i := range d.pending {
		if _, bad := d.Bad.Avoid(d.Sender.partition(&d.batch[i])); bad || len(keys) > 0 && keys[d.key(i)] {
			later = append(later, i)
			keys[d.key(i)] = true
		} else {
			now = append(now, i)
		}
	}
	if len(now) == 0 {
		return later, nil
	}
	return now, later
}

// sendEach sends the pending events one by one in their order, up to the first that fails because Kafka is
// unavailable. An event that is rejected alone is rejected. Of a partition that does not answer only one is tried.
func (d *delivery) sendEach() error {
	for len(d.pending) > 0 && d.stop.Err() == nil {
		i := d.pending[0]
		if d.skip(i) {
			d.pending = d.pending[1:]
			continue
		}
		d.OnSend() // a batch may need thousands of sends
		sent, err := d.produce(d.pending[:1])
		if err != nil {
			return err
		}
		if len(sent.errs) == 0 {
			d.obstacle = breakerOpen
			return nil
		}
		err, r := sent.errs[0], &sent.records[0]
		if errors.Is(err, errStopping) {
			return nil
		}
		if errors.Is(err, errExpired) {
			continue
		}
		d.pending = d.pending[1:]
		switch class := RejectionClass(err); {
		case err == nil:
			d.markSent(i, r)
		case class != "":
			d.markRejected(i, class, err)
		case kafka.IsTopicOutage(err), errors.Is(err, errUnanswered):
			d.parkUnavailable(i, r, err)
			d.prepareSilent()
		case d.isLocal(sent.works):
			d.parkTopic(i, r, err)
		default:
			d.reportKafkaOutage(i, err)
			d.pending = append([]int{i}, d.pending...)
			d.obstacle = kafkaUnavailable
			return nil
		}
		d.reportAnswers(sent.errs)
	}
	d.mode = sendInBatch
	return nil
}

// isLocal reports whether failed events are parked because their topics and partitions failed, and not Kafka. That
// is so if Kafka works. If Kafka did not work after the send before, it has come back during this one, and the
// events are sent once more: parking them would park thousands of keys, and every later event of these keys would go
// through outbox_failed.
func (d *delivery) isLocal(works bool) bool {
	before := d.wasDown
	d.wasDown = !works
	return works && !before
}

// key returns the parking key of an event.
func (d *delivery) key(i int) string {
	e := &d.batch[i]
	topic, _ := d.Sender.topic(e) // an event without a topic cannot be sent; the key then has no topic either
	return tables.ParkingKey(topic, e.Key())
}
