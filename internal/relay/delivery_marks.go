package relay

import (
	"errors"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
)

func (d *delivery) markSent(i int, r *kgo.Record) {
	d.outcomes[i] = Outcome{Kind: OutcomeSent, Sent: sentTo(r)}
	if d.probing {
		d.outcomes[i].place = kafka.PartitionOf(r).Name()
	}
	if d.Bad.Failing() {
		d.accepted = with(d.accepted, kafka.PartitionOf(r))
	}
}

// with adds a partition to a set, which may be nil.
func with(set map[kafka.Partition]bool, at kafka.Partition) map[kafka.Partition]bool {
	if set == nil {
		set = map[kafka.Partition]bool{}
	}
	set[at] = true
	return set
}

func (d *delivery) markRejected(i int, class string, err error) {
	d.outcomes[i] = Outcome{Kind: OutcomeRejected, Class: class, Err: err}
	d.block(i)
}

// maxPlace is the longest outbox_failed.place, in bytes.
const maxPlace = 260

// parkUnavailable parks an event whose topic or partition is unavailable.
func (d *delivery) parkUnavailable(i int, r *kgo.Record, err error) {
	o := Outcome{Kind: OutcomeUnavailable, Class: kafka.UnavailableClass(err), Err: err}
	if !kafka.IsReplaced(err) { // only the next client knows whether the topic exists
		at := kafka.PartitionOf(r)
		if kafka.IsTopicOutage(err) {
			at = at.WholeTopic()
		}
		d.failed = with(d.failed, at)
		if errors.Is(err, errUnanswered) {
			d.silent = with(d.silent, at)
		}
		switch o.place = at.Name(); {
		case len(o.place) > maxPlace: // Kafka has no such topic
			o.place = ""
		case errors.Is(err, errUnanswered) && !kafka.IsTopicOutage(err) && at.Number == kafka.Unassigned:
			o.place = "" // see silentPlace
		default:
			d.Bad.Fail(at, d.sendBegan, o.Class, err)
		}
	}
	d.markUnavailable(i, o)
}

// markUnavailable gives an event an outcome. A later event of a key that has failed already is blocked.
func (d *delivery) markUnavailable(i int, o Outcome) {
	if len(d.blocked) > 0 && d.blocked[d.key(i)] {
		o.Kind = OutcomeBlocked
	}
	d.outcomes[i] = o
	d.block(i)
}

// parkTopic makes an event and all pending events of its topic unavailable: trying each of them
// alone would take a timeout each.
func (d *delivery) parkTopic(i int, r *kgo.Record, err error) {
	d.parkUnavailable(i, r, err)
	d.pending = slices.DeleteFunc(d.pending, func(j int) bool {
		topic, _ := d.Sender.topic(&d.batch[j])
		if topic == r.Topic {
			d.markUnavailable(j, Outcome{Kind: OutcomeUnavailable, Class: kafka.UnavailableClass(err), Err: err})
		}
		return topic == r.Topic
	})
}

// block makes the later events of an event's key wait.
func (d *delivery) block(i int) {
	if d.PassFailedKeys {
		return
	}
	if d.blocked == nil {
		d.blocked = map[string]bool{}
	}
	d.blocked[d.key(i)] = true
}

// skip gives an event that is not to be sent its outcome, and reports whether it has: it has expired, its key is
// blocked, it was sent and is not answered yet, or its topic or partition is bad or does not answer.
func (d *delivery) skip(i int) bool {
	return d.skipExpired(i) || d.skipBlocked(i) || d.skipUnanswered(i) || d.avoiding && d.skipBad(i) || d.skipSilent(i)
}

// skipExpired skips an event that has expired. One that was sent and is not answered yet waits for its answer, because
// later events of its key must not overtake it. So does one that the process which led before may still send.
func (d *delivery) skipExpired(i int) bool {
	e := &d.batch[i]
	if !e.HasExpired() {
		return false
	}
	if d.Unanswered != nil {
		if _, is := d.Unanswered.find(e); is {
			return false
		}
	}
	if !d.exclusive() {
		d.markUnavailable(i, Outcome{Kind: OutcomeUnavailable, Class: kafka.UnavailableClass(errMaySend), Err: errMaySend})
		return true
	}
	d.outcomes[i] = Outcome{Kind: OutcomeExpired, Sent: SentTo{Time: time.Now()}}
	return true
}

// errMaySend is the error of an event that has expired before the lease is exclusive.
var errMaySend = errors.New("has expired, and the process that led before may still send it")

func (d *delivery) exclusive() bool { return d.Exclusive == nil || d.Exclusive() }

func (d *delivery) skipBlocked(i int) bool {
	if len(d.blocked) == 0 || !d.blocked[d.key(i)] {
		return false
	}
	d.outcomes[i] = Outcome{Kind: OutcomeBlocked}
	return true
}

// skipUnanswered skips an event without an answer, and the later events of its key: an operator may have removed the
// row by which they would wait.
func (d *delivery) skipUnanswered(i int) bool {
	if at, is := d.Unanswered.find(&d.batch[i]); is {
		d.markUnavailable(i, Outcome{Kind: OutcomeUnavailable, Class: kafka.UnavailableClass(errUnanswered), Err: errUnanswered, place: silentPlace(at)})
		return true
	}
	if d.PassFailedKeys || !d.Unanswered.busy.Load() || !d.Unanswered.holds(d.key(i)) {
		return false
	}
	d.outcomes[i] = Outcome{Kind: OutcomeBlocked}
	d.block(i)
	return true
}

// silentPlace returns the place of an event whose partition does not answer: none if that partition is not known,
// because the rest of the topic may be good.
func silentPlace(at kafka.Partition) string {
	if at.Number == kafka.Unassigned {
		return ""
	}
	return at.Name()
}

func (d *delivery) skipBad(i int) bool {
	bad, is := d.Bad.Avoid(d.Sender.partition(&d.batch[i]))
	if !is || d.patient && !bad.elsewhere {
		return false
	}
	d.markUnavailable(i, Outcome{Kind: OutcomeUnavailable, Class: bad.Class, Err: bad.Err, place: bad.Name})
	return true
}

// prepareSilent lets the next client learn the topics of partitions that have not answered.
func (d *delivery) prepareSilent() {
	if len(d.silent) == 0 || len(d.pending) == 0 {
		return
	}
	var topics []string
	for at := range d.silent {
		topics = append(topics, at.Topic)
	}
	d.Sender.prepare(d.stop, topics)
}

// skipSilent skips an event whose partition has not answered to another one of the batch. A batch may need very many
// sends, because of its size or because its events have to be sent alone.
func (d *delivery) skipSilent(i int) bool {
	if len(d.silent) == 0 {
		return false
	}
	at := d.Sender.partition(&d.batch[i])
	if !d.silent[at] {
		return false
	}
	d.markUnavailable(i, Outcome{Kind: OutcomeUnavailable, Class: kafka.UnavailableClass(errNotTried), Err: errNotTried, place: silentPlace(at)})
	return true
}

// errNotTried is the error of an event whose partition has not answered to another one.
var errNotTried = errors.New("not tried, because its partition does not answer to another event")

func (d *delivery) reportKafkaOutage(i int, err error) {
	e := &d.batch[i]
	topic, _ := d.Sender.topic(e)
	d.hear(err)
	d.KafkaOutage.Report(err, "topic", topic, "id", e.ID, "event_id", string(e.EventID))
}

// reportAnswers ends an outage of Kafka after a send in which it did not fail, if it has accepted or rejected an event.
// Otherwise another answer has to end it.
func (d *delivery) reportAnswers(errs []error) {
	switch {
	case slices.ContainsFunc(errs, isAnswer):
		d.hear(nil)
		d.KafkaOutage.Report(nil)
	case concernKafka(errs) && d.Local != nil:
		d.Local()
	}
}

func (d *delivery) hear(err error) {
	if d.Heard != nil {
		d.Heard(err)
	}
}

// notifySent passes the events with an outcome to the hook, if there are any, and logs those that had expired.
func (d *delivery) notifySent() {
	expired := expiredIn(d.outcomes)
	if expired > 0 {
		d.Log.Info("outbox: events have expired and are not sent", "events", expired, "retried", !d.patient)
	}
	if d.OnSent == nil {
		return
	}
	b := SentBatch{Expired: expired, Retried: !d.patient, Began: d.began, Took: time.Since(d.began)}
	for i, o := range d.outcomes {
		switch o.Kind {
		case OutcomeSent:
			if b.Sent == nil {
				b.Sent = make([]sentEvent, 0, len(d.batch))
			}
			b.Sent = append(b.Sent, d.sentEvent(i))
		case OutcomeRejected, OutcomeUnavailable:
			b.NotTaken = append(b.NotTaken, notTaken{d.sentEvent(i), o.Class})
		case OutcomeBlocked, OutcomeParked:
			b.Waiting++
		case OutcomeExpired, OutcomePending:
		}
	}
	b.Events, b.Failed = len(b.Sent), len(b.NotTaken)
	if b.Events+b.Failed+b.Waiting+b.Expired > 0 {
		d.OnSent(b)
	}
}

func expiredIn(outcomes []Outcome) (n int) {
	for i := range outcomes {
		if outcomes[i].Kind == OutcomeExpired {
			n++
		}
	}
	return n
}

func (d *delivery) sentEvent(i int) sentEvent {
	e := &d.batch[i]
	topic, _ := d.Sender.topic(e) // "" for an event that was rejected because it has none
	return sentEvent{e, topic, d.outcomes[i].Sent}
}
