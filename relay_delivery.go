package outbox

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/wait"
)

// delivery is one batch on its way.
type delivery struct {
	*producer
	stop, held context.Context
	batch      []envelope
	outcomes   []outcome
	left       []int     // undecided events, by their index in batch
	began      time.Time // of the last send
	patient    bool      // wait for Kafka as long as it takes

	blocked     map[string]bool // keys of events that did not get through
	through     bool            // Kafka has taken something of the batch
	silent      bool            // Kafka did not answer when last asked
	suspicious  bool            // Kafka refused something among left, and may not mean all of it
	down        bool            // the last send failed for want of Kafka
	unpermitted bool            // the breaker let nothing through
}

// deliver hands a batch to Kafka and returns what became of each event. Events of
// parked keys are not sent, nor are those behind one that does not get through.
// While nothing of the batch gets through for want of Kafka, it is repeated; once
// something does, the rest is left behind as away. Events are undecided only if
// stop was cancelled meanwhile (no error) or the lease was lost.
func (p *producer) deliver(stop, held context.Context, batch []envelope, parked *parking) ([]outcome, error) {
	d := p.delivery(stop, held, batch)
	d.patient = true
	for i := range batch {
		if parked.busy.Load() && parked.takes(d.key(i)) {
			d.outcomes[i].kind = outcomeParked
		} else {
			d.left = append(d.left, i)
		}
	}
	err := d.run()
	return d.outcomes, err
}

// attempt is deliver without patience: what does not get through is away, and
// what the breaker does not let through is undecided.
func (p *producer) attempt(stop, held context.Context, batch []envelope) ([]outcome, error) {
	d := p.delivery(stop, held, batch)
	for i := range batch {
		d.left = append(d.left, i)
	}
	err := d.run()
	return d.outcomes, err
}

// tellSent tells the hook what became of a batch.
func (p *producer) tellSent(batch []envelope, outcomes []outcome, began time.Time, retried bool) {
	if p.cfg.Hooks.Sent == nil {
		return
	}
	if sent, ok := newSentBatch(batch, outcomes, began, retried, p.topic); ok {
		p.cfg.Hooks.Sent(sent)
	}
}

func (p *producer) delivery(stop, held context.Context, batch []envelope) *delivery {
	return &delivery{
		producer: p, stop: stop, held: held, batch: batch,
		outcomes: make([]outcome, len(batch)), left: make([]int, 0, len(batch)),
	}
}

func (d *delivery) run() error {
	for first := true; len(d.left) > 0 && (first || d.stop.Err() == nil); first = false {
		if d.turn != nil {
			d.turn()
		}
		if d.down {
			wait.Await(d.stop, d.held, nil, d.kafkaOutage.Backoff())
		}
		d.down, d.unpermitted, d.began = false, false, time.Now()
		send := d.sendTogether
		if d.suspicious {
			send = d.sendAlone
		}
		if err := send(); err != nil {
			return err
		}
		if d.unpermitted {
			if !d.patient {
				return nil
			}
			d.awaitPermission()
		}
	}
	return nil
}

// awaitPermission waits for an open breaker to become half-open, or for the trial
// calls of somebody else.
func (d *delivery) awaitPermission() {
	const look = 50 * time.Millisecond
	if d.breaker.state() == BreakerOpen {
		e := &d.batch[d.left[0]]
		d.log.Warn("outbox: breaker is open, batch stops", "id", e.id, "event_id", string(e.eventID), "wait", d.breaker.wait())
	}
	wait.Await(d.stop, d.held, nil, max(d.breaker.wait(), look))
}

// sendTogether sends all undecided events at once. A refusal names whatever the
// client had put into the same request, good events too, so that nothing but
// what is refused alone is blamed.
func (d *delivery) sendTogether() error {
	d.left = slices.DeleteFunc(d.left, d.leaveBehind)
	records, errs, err := d.produce(d.held, d.batch, d.left)
	if err != nil {
		return err
	}
	d.unpermitted = len(errs) == 0 && len(d.left) > 0
	tried := d.left[:len(errs)]
	var left, away []int // away: by their index in tried
	for n, i := range tried {
		switch class := rejectionClass(errs[n]); {
		case errs[n] == nil:
			d.arrived(i, &records[n])
		case errors.Is(errs[n], errBehind):
			d.outcomes[i].kind = outcomeBlocked
		case class == invalidEvent: // ours to know, whatever else was sent
			d.refuse(i, class, errs[n])
		case class != "" || errors.Is(errs[n], errAlone):
			d.suspicious = true
			left = append(left, i)
		case kafka.IsTopicOutage(errs[n]), errors.Is(errs[n], kafka.ErrNoLeader):
			d.leave(i, &records[n], errs[n])
		default:
			away = append(away, n)
		}
	}
	leave := len(away) > 0 && d.leaves()
	for _, n := range away {
		if i := tried[n]; leave {
			d.leave(i, &records[n], errs[n])
		} else {
			d.complain(i, errs[n])
			left = append(left, i)
		}
	}
	slices.Sort(left)
	d.left = append(left, d.left[len(errs):]...)
	d.down = len(away) > 0 && !leave
	if len(errs) > 0 && !d.down {
		d.kafkaOutage.Report(nil)
	}
	return nil
}

// sendAlone sends the undecided events one by one in their order, up to the
// first that fails for want of Kafka.
func (d *delivery) sendAlone() error {
	for len(d.left) > 0 {
		i := d.left[0]
		if d.leaveBehind(i) {
			d.left = d.left[1:]
			continue
		}
		records, errs, err := d.produce(d.held, d.batch, d.left[:1])
		if err != nil {
			return err
		}
		if len(errs) == 0 {
			d.unpermitted = true
			return nil
		}
		d.left = d.left[1:]
		switch class := rejectionClass(errs[0]); {
		case errs[0] == nil:
			d.arrived(i, &records[0])
		case class != "":
			d.refuse(i, class, errs[0])
		case kafka.IsTopicOutage(errs[0]), errors.Is(errs[0], kafka.ErrNoLeader):
			d.leave(i, &records[0], errs[0])
		case d.leaves():
			d.leaveTopic(i, &records[0], errs[0])
		default:
			d.complain(i, errs[0])
			d.left = append([]int{i}, d.left...)
			d.down = true
			return nil
		}
		d.kafkaOutage.Report(nil)
	}
	d.suspicious = false
	return nil
}

// leaves reports whether events that failed are left behind. If some of the batch
// got through they are, because then a partition is to blame and not Kafka. But
// Kafka may have gone in the middle of the batch: then they are repeated until it
// answers, and once more. Left behind, they would park thousands of keys, and
// whatever else comes for those has to go through outbox_failed.
func (d *delivery) leaves() bool {
	if !d.patient || !d.through {
		return !d.patient
	}
	silent := d.silent
	d.silent = !d.answers(d.held)
	return !silent && !d.silent
}

// key returns an event's parking key.
func (d *delivery) key(i int) string {
	e := &d.batch[i]
	topic, _ := d.topic(e) // one without cannot be sent, and parks what has no topic either
	return parkingKey(topic, e.key())
}

func (d *delivery) arrived(i int, r *kgo.Record) {
	d.outcomes[i], d.through = outcome{kind: outcomeSent}, true
	if d.outages.Failing() {
		d.outages.Report("topic "+r.Topic, d.began, nil)
		d.outages.Report(kafka.PartitionOf(r).String(), d.began, nil)
	}
}

func (d *delivery) refuse(i int, class string, err error) {
	d.outcomes[i] = outcome{kind: outcomeRejected, class: class, err: err}
	d.block(i)
}

// leave gives an event up for now, for want of its topic or its partition.
func (d *delivery) leave(i int, r *kgo.Record, err error) {
	switch {
	case kafka.IsReplaced(err): // whether it is there, only the next client knows
	case kafka.IsTopicOutage(err) || r.Partition == kafka.Unassigned:
		d.outages.Report("topic "+r.Topic, d.began, err)
	default:
		d.outages.Report(kafka.PartitionOf(r).String(), d.began, err)
	}
	kind := outcomeUnavailable
	if d.blocked[d.key(i)] {
		kind = outcomeBlocked
	}
	d.outcomes[i] = outcome{kind: kind, class: kafka.UnavailableClass(err), err: err}
	d.block(i)
}

// leaveTopic gives up an event and whatever is undecided for its topic: trying
// each of them alone would take a timeout each.
func (d *delivery) leaveTopic(i int, r *kgo.Record, err error) {
	d.leave(i, r, err)
	d.left = slices.DeleteFunc(d.left, func(j int) bool {
		topic, _ := d.topic(&d.batch[j])
		if topic == r.Topic {
			d.leave(j, r, err)
		}
		return topic == r.Topic
	})
}

func (d *delivery) block(i int) {
	if d.blocked == nil {
		d.blocked = map[string]bool{}
	}
	d.blocked[d.key(i)] = true
}

// leaveBehind decides about an event whose key is blocked, and reports whether it
// is.
func (d *delivery) leaveBehind(i int) bool {
	if len(d.blocked) == 0 || !d.blocked[d.key(i)] {
		return false
	}
	d.outcomes[i] = outcome{kind: outcomeBlocked}
	return true
}

// complain notes that an event failed for want of Kafka.
func (d *delivery) complain(i int, err error) {
	e := &d.batch[i]
	topic, _ := d.topic(e)
	d.kafkaOutage.Report(err, "topic", topic, "id", e.id, "event_id", string(e.eventID))
}
