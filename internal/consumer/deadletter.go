package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outboxgo/outbox/internal/handling"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/wait"
)

// fixedDeadLetterTopics calls host once for each consumed topic and returns the results as a function,
// so that host cannot panic or change its mind later. It refuses a dead-letter topic that the
// consumer reads: dead letters would be handled and sent again without end.
func fixedDeadLetterTopics(host func(string) string, topics []string) (func(string) string, error) {
	fixed := make(map[string]string, len(topics))
	var errs []error
	for _, topic := range topics {
		err := handling.Guard(func() error { fixed[topic] = host(topic); return check.Topic(fixed[topic]) })
		if err == nil && slices.Contains(topics, fixed[topic]) {
			err = fmt.Errorf("dead letters of %s would go to %s, which this consumer reads", topic, fixed[topic])
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("field DeadLetterTopic: of %s: %w", topic, err))
		}
	}
	return func(topic string) string { return fixed[topic] }, errors.Join(errs...)
}

// admit checks the replay headers of the records of items. If they are genuine, it notes the group and
// action that the record was replayed for. If they are forged, it removes them: the record is for all
// handlers.
func (w *partitionWorker) admit(items []recordItem) {
	var claims []*kgo.Record
	var of []*recordItem
	for i := range items {
		if r := items[i].record; isReplay(r) {
			claims, of = append(claims, r), append(of, &items[i])
			items[i].record = withoutReplay(r) // stays so if the worker is stopped, which handles no record then
		}
	}
	outageName := "reading dead letters of " + w.partition.Topic
	for failed := false; len(claims) > 0 && w.stopping.Err() == nil; failed = true {
		began := time.Now()
		answers, err := w.group.checkReplays(w.stopping, claims)
		if err == nil {
			if failed { // otherwise Kafka may not have been asked: most forged claims name no dead letter
				w.outages.Report(outageName, began, nil)
			}
			for i, answer := range answers {
				if answer.Err == nil {
					of[i].record, of[i].replay = claims[i], replayOf(claims[i])
					of[i].replay.edited = answer.Edited
				} else {
					w.logNoReplay(claims[i], answer.Err)
				}
			}
			return
		}
		if w.stopping.Err() == nil {
			w.outages.Report(outageName, began, err)
			w.pause(w.outages.Backoff(outageName))
		}
	}
}

// logNoReplay logs a record with forged replay headers.
func (w *partitionWorker) logNoReplay(r *kgo.Record, err error) {
	if times, now := w.reader.noReplay.Next(); now {
		w.log.Warn("outbox: a record has the headers of a replay and is none; it is handled like any other", "partition", w.partition.Name(),
			"offset", r.Offset, "records", times, "error", err)
	}
}

// checkReplays implements partitionGroup.
func (m *membership) checkReplays(ctx context.Context, records []*kgo.Record) ([]deadletter.Answer, error) {
	topic := records[0].Topic
	return m.replays.Check(ctx, records, m.cfg.DeadLetterTopic(topic), deadletter.Topic(topic))
}

// checkDeadLetterTopics warns of dead-letter topics that do not exist, before the first dead letter. A topic that the
// first dead letter creates is not missing.
func (m *membership) checkDeadLetterTopics(ctx context.Context) {
	var topics []string
	for _, topic := range m.reader.processor.Routes.Topics {
		topics = append(topics, m.cfg.DeadLetterTopic(topic))
	}
	slices.Sort(topics)
	topics = slices.Compact(topics)
	creates, _ := m.client.OptValue(kgo.AllowAutoTopicCreation).(bool)
	for backoff, patient := new(wait.Backoff), true; ctx.Err() == nil; wait.Sleep(ctx, backoff.Next()) {
		bad, err := kafka.CheckTopics(ctx, m.client, topics)
		maps.DeleteFunc(bad, func(_ string, err error) bool { return creates && errors.Is(err, kerr.UnknownTopicOrPartition) })
		if len(bad) > 0 && patient {
			patient = false
			wait.Sleep(ctx, starts.MissingPatience)
			continue
		}
		for topic, err := range bad {
			m.log.Warn("outbox: a dead-letter topic cannot be used; dead letters block their keys until it exists. "+
				"Create it with outboxtopics.Run, with outbox topics --create, or with kafka-topics.sh --create", "topic", topic, "error", err)
		}
		if err == nil {
			return
		}
	}
}

// deadLetterDelivery is how long Kafka has to acknowledge a dead letter before it is sent again.
const deadLetterDelivery = 10 * time.Second

// deadLetters sends dead letters.
type deadLetters struct {
	cfg     *Rules
	produce func(context.Context, *kgo.Record) error // waits for the answer
}

// topicOf returns the dead-letter topic of a record.
func (d deadLetters) topicOf(r *kgo.Record) string { return d.cfg.DeadLetterTopic(r.Topic) }

// send sends the dead letter of a record and waits for Kafka. If Kafka refuses it, send tries the
// shorter forms, so that no record is too large for its dead-letter topic. It returns the place of the dead letter, or
// "" if parts of the record are missing in it.
func (d deadLetters) send(ctx context.Context, r *kgo.Record, o handling.Outcome) (place string, err error) {
	for form := completeForm; form <= shortForm; form++ {
		dead := d.record(r, o, form)
		if err = d.produce(ctx, dead); kafka.RejectionClass(err) != "" {
			continue
		}
		if err == nil && form == completeForm && omissionOf(r) == nil && dead.Offset >= 0 {
			place = deadletter.Origin(dead.Topic, dead.Partition, dead.Offset)
		}
		return place, err
	}
	return "", err
}

// sendToDLQ sends the dead letter of a record until Kafka has it. Meanwhile the partition waits. The
// only error is ErrStopped.
func (w *partitionWorker) sendToDLQ(it *recordItem, o handling.Outcome) error {
	sender := deadLetters{w.cfg, w.group.produce}
	topic := sender.topicOf(it.record)
	for w.stopping.Err() == nil {
		began := time.Now()
		_, err := sender.send(w.held, it.record, o)
		if err == nil {
			w.outages.Report(outageDeadLetters+topic, began, nil)
			w.attempts.ReportDead(it.Meta, topic, o)
			return nil
		}
		if w.held.Err() == nil {
			w.outages.Report(outageDeadLetters+topic, began, err)
			w.pause(w.outages.Backoff(outageDeadLetters + topic))
		}
	}
	return handling.ErrStopped
}

// outageDeadLetters and the name of a topic are the name of the topic's outage in the log.
const outageDeadLetters = "dead-letter topic "

// deadLetterForm is how much of the original a dead letter holds. All forms name its position.
type deadLetterForm int

const (
	completeForm deadLetterForm = iota
	noValueForm                 // without the value
	shortForm                   // without a large key and large headers either
)

// Limits of shortForm for parts of the original, in bytes. With its own headers such a dead letter is
// smaller than 16 KiB, which every topic for events accepts.
const (
	maxShortKey     = 1 << 10
	maxShortHeaders = 8 << 10
)

// record returns the dead letter of r in a form.
func (d deadLetters) record(r *kgo.Record, o handling.Outcome, form deadLetterForm) *kgo.Record {
	dead := &kgo.Record{Topic: d.topicOf(r), Key: r.Key, Value: r.Value}
	own := d.headers(r, o)
	var missing omission
	if known := omissionOf(r); known != nil {
		missing = *known
	}
	if form >= noValueForm && len(r.Value) > 0 {
		dead.Value, missing.Value = nil, len(r.Value)
	}
	if form >= shortForm && len(r.Key) > maxShortKey {
		dead.Key, missing.Key = nil, len(r.Key)
	}
	left := math.MaxInt
	if form >= shortForm {
		left = maxShortHeaders
	}
	dead.Headers = make([]kgo.RecordHeader, 0, len(r.Headers)+len(own))
	for _, h := range r.Headers {
		switch size := len(h.Key) + len(h.Value); {
		case deadletter.IsOwn(h.Key) && !strings.EqualFold(h.Key, deadletter.ReplayOf):
		case size > left:
			missing.Headers++
		default:
			left -= size
			dead.Headers = append(dead.Headers, h)
		}
	}
	if missing.Digest == "" && missing.Cause == "" && form > completeForm {
		missing.Digest = deadletter.Digest(r)
	}
	dead.Headers = append(append(dead.Headers, own...), missing.headers()...)
	return dead
}

// headers returns the headers that describe the original and the error.
func (d deadLetters) headers(r *kgo.Record, o handling.Outcome) []kgo.RecordHeader {
	headers := []kgo.RecordHeader{
		header(deadletter.OriginalTopic, r.Topic),
		header(deadletter.OriginalPartition, strconv.Itoa(int(r.Partition))),
		header(deadletter.OriginalOffset, strconv.FormatInt(r.Offset, 10)),
	}
	if !r.Timestamp.IsZero() { // else it was not read
		headers = append(headers, header(deadletter.OriginalTimestamp, r.Timestamp.UTC().Format(timestampForm)))
	}
	return append(headers,
		header(deadletter.Group, d.cfg.Group),
		header(deadletter.Action, o.Action),
		header(deadletter.Error, short.Text(o.Err.Error(), maxErrorText)),
		header(deadletter.ErrorClass, o.Class),
		header(deadletter.Attempts, strconv.Itoa(o.Attempt)),
		header(deadletter.FailedAt, time.Now().UTC().Format(timestampForm)),
	)
}

const (
	maxErrorText  = 2_000
	timestampForm = "2006-01-02T15:04:05.000Z07:00"
)

func header(name, value string) kgo.RecordHeader {
	return kgo.RecordHeader{Key: name, Value: []byte(value)}
}
