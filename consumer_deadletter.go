package outbox

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/kafka"
)

// The headers of a dead letter, beside those of the record itself, whose key and
// value it has as well.
const (
	// DeadLetterOriginalTopic, …Partition, …Offset and …Timestamp say where the
	// record was: the numbers in decimal, the timestamp in RFC 3339, UTC, to the
	// millisecond.
	DeadLetterOriginalTopic     = "dlq_original_topic"
	DeadLetterOriginalPartition = "dlq_original_partition"
	DeadLetterOriginalOffset    = "dlq_original_offset"
	DeadLetterOriginalTimestamp = "dlq_original_timestamp"
	// DeadLetterGroup and DeadLetterAction say who could not handle it. The action is
	// empty where the record was not fit for any.
	DeadLetterGroup  = "dlq_group"
	DeadLetterAction = "dlq_action"
	// DeadLetterError, DeadLetterClass and DeadLetterAttempts say why: the text of
	// the error, at most 2,000 bytes, its kind, and how often it was tried.
	DeadLetterError    = "dlq_error"
	DeadLetterClass    = "dlq_error_class"
	DeadLetterAttempts = "dlq_attempts"
	// DeadLetterFailedAt is when it was given up, in RFC 3339, UTC.
	DeadLetterFailedAt = "dlq_failed_at"
	// DeadLetterValueOmitted is there if the dead-letter topic took the record only
	// without its value, which is in the original record still: its size in bytes.
	DeadLetterValueOmitted = "dlq_value_omitted"
)

// The headers of a record that was sent back from a dead-letter topic: only this
// group handles it, and only this action if one is named.
const (
	ReplayGroup  = "replay_group"
	ReplayAction = "replay_action"
)

// ReplayOf is a header of such a record too: where it was first, as
// topic-partition-offset. It stands for the id of an event that has none, see
// [PlainRecords].
const ReplayOf = "replay_of"

// DeadLetterTopic returns the name of the topic for the dead letters of another:
// {topic}.dlq.
func DeadLetterTopic(topic string) string { return topic + ".dlq" }

// fixedDeadLetterTopics calls host for each of the consumed topics and returns what it said
// as a function, so that it cannot panic or say something else while records wait. A
// consumer that read a topic of its own dead letters would send them on and on.
func fixedDeadLetterTopics(host func(string) string, topics []string) (func(string) string, error) {
	fixed := make(map[string]string, len(topics))
	var errs []error
	for _, topic := range topics {
		err := guard(func() error { fixed[topic] = host(topic); return check.Topic(fixed[topic]) })
		if err == nil && slices.Contains(topics, fixed[topic]) {
			err = fmt.Errorf("dead letters of %s would go to %s, which this consumer reads", topic, fixed[topic])
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("field DeadLetterTopic: of %s: %w", topic, err))
		}
	}
	return func(topic string) string { return fixed[topic] }, errors.Join(errs...)
}

// deadLetter says why a record is given up.
type deadLetter struct {
	action, class string
	attempts      int
	err           error
}

// sendToDLQ sends a record to the dead-letter topic. It returns when Kafka has it, or
// with errStopped when the worker is to end: until then the partition waits.
func (w *worker) sendToDLQ(it *item, why deadLetter) error {
	record := why.record(it.record, w.cfg)
	outageName := "dead-letter topic " + record.Topic
	for w.stopping.Err() == nil {
		began := time.Now()
		err := w.group.produce(w.held, record)
		if err == nil {
			w.outages.Report(outageName, began, nil)
			w.reportDeadLetter(it, record.Topic, why)
			return nil
		}
		if kafka.RejectionClass(err) != "" && record.Value != nil {
			record.Headers = append(record.Headers, header(DeadLetterValueOmitted, strconv.Itoa(len(record.Value))))
			record.Value = nil
			continue
		}
		if w.held.Err() == nil {
			w.outages.Report(outageName, began, err)
			w.pause(w.outages.Backoff(outageName))
		}
	}
	return errStopped
}

// reportDeadLetter logs that a dead letter was sent and calls its hook.
func (w *worker) reportDeadLetter(it *item, topic string, why deadLetter) {
	w.log.WarnContext(handlerContext(w.held, it.meta), "outbox: sent to the dead-letter topic", "topic", topic, "type", it.meta.Type, "event_id", it.meta.ID,
		"partition", w.partition.Name(), "offset", it.record.Offset, "action", why.action, "attempts", why.attempts, "class", why.class, "error", why.err)
	if w.cfg.Hooks.DeadLettered != nil {
		w.cfg.Hooks.DeadLettered(it.meta, why.action, topic, why.err)
	}
}

// record returns the record for the dead-letter topic of r's.
func (d deadLetter) record(r *kgo.Record, cfg *ConsumerConfig) *kgo.Record {
	now := time.Now().UTC()
	own := []kgo.RecordHeader{
		header(DeadLetterOriginalTopic, r.Topic),
		header(DeadLetterOriginalPartition, strconv.Itoa(int(r.Partition))),
		header(DeadLetterOriginalOffset, strconv.FormatInt(r.Offset, 10)),
		header(DeadLetterOriginalTimestamp, r.Timestamp.UTC().Format(timestampForm)),
		header(DeadLetterGroup, cfg.Group),
		header(DeadLetterAction, d.action),
		header(DeadLetterError, cutText(d.err.Error(), maxErrorText)),
		header(DeadLetterClass, d.class),
		header(DeadLetterAttempts, strconv.Itoa(d.attempts)),
		header(DeadLetterFailedAt, now.Format(timestampForm)),
	}
	headers := make([]kgo.RecordHeader, 0, len(r.Headers)+len(own))
	for _, h := range r.Headers {
		if !isReplayHeader(h.Key) && !strings.HasPrefix(h.Key, deadletter.Prefix) {
			headers = append(headers, h)
		}
	}
	return &kgo.Record{Topic: cfg.DeadLetterTopic(r.Topic), Key: r.Key, Value: r.Value, Headers: append(headers, own...)}
}

// cutText shortens a text to at most n bytes, without cutting a character in two.
func cutText(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

const (
	maxErrorText  = 2_000
	timestampForm = "2006-01-02T15:04:05.000Z07:00"
)

func header(name, value string) kgo.RecordHeader {
	return kgo.RecordHeader{Key: name, Value: []byte(value)}
}

func isReplayHeader(name string) bool { return name == ReplayGroup || name == ReplayAction }
