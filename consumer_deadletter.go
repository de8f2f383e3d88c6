package outbox

import (
	"errors"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/twmb/franz-go/pkg/kgo"

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

// Permanent marks an error that no retry mends: the event goes to the dead-letter
// topic at once. It returns nil for nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

func isPermanent(err error) bool {
	var p *permanentError
	return errors.As(err, &p)
}

// letter says why a record is buried.
type letter struct {
	action, class string
	attempts      int
	err           error
}

// bury sends a record to the dead-letter topic. It returns when Kafka has it, or
// when the worker is to end: until then the partition waits.
func (w *worker) bury(it *item, l letter) error {
	record := w.deadLetter(it.record, l)
	for w.stopping.Err() == nil {
		began := time.Now()
		err := w.client.ProduceSync(w.held, record).FirstErr()
		if err == nil {
			w.outages.Report("dead-letter topic "+record.Topic, began, nil)
			w.log.WarnContext(handlerContext(w.held, it.meta), "outbox: sent to the dead-letter topic", "topic", record.Topic, "type", it.meta.Type, "event_id", it.meta.ID,
				"partition", w.at.String(), "offset", it.record.Offset, "action", l.action, "attempts", l.attempts, "class", l.class, "error", l.err)
			if w.cfg.Hooks.DeadLettered != nil {
				w.cfg.Hooks.DeadLettered(it.meta, l.action, record.Topic, l.err)
			}
			return nil
		}
		if kafka.RejectionClass(err) != "" && record.Value != nil {
			record.Headers = append(record.Headers, header(DeadLetterValueOmitted, strconv.Itoa(len(record.Value))))
			record.Value = nil
			continue
		}
		if w.held.Err() == nil {
			w.outages.Report("dead-letter topic "+record.Topic, began, err)
			w.pause(w.outages.Backoff("dead-letter topic " + record.Topic))
		}
	}
	return errStopped
}

// deadLetter returns the record for the dead-letter topic.
func (c *Consumer) deadLetter(r *kgo.Record, l letter) *kgo.Record {
	now := time.Now().UTC()
	own := []kgo.RecordHeader{
		header(DeadLetterOriginalTopic, r.Topic),
		header(DeadLetterOriginalPartition, strconv.Itoa(int(r.Partition))),
		header(DeadLetterOriginalOffset, strconv.FormatInt(r.Offset, 10)),
		header(DeadLetterOriginalTimestamp, r.Timestamp.UTC().Format(timestampForm)),
		header(DeadLetterGroup, c.cfg.Group),
		header(DeadLetterAction, l.action),
		header(DeadLetterError, cutText(l.err.Error(), maxErrorText)),
		header(DeadLetterClass, l.class),
		header(DeadLetterAttempts, strconv.Itoa(l.attempts)),
		header(DeadLetterFailedAt, now.Format(timestampForm)),
	}
	headers := make([]kgo.RecordHeader, 0, len(r.Headers)+len(own))
	for _, h := range r.Headers {
		if !isReplayHeader(h.Key) && !strings.HasPrefix(h.Key, deadletter.Prefix) {
			headers = append(headers, h)
		}
	}
	return &kgo.Record{Topic: c.cfg.DeadLetterTopic(r.Topic), Key: r.Key, Value: r.Value, Headers: append(headers, own...)}
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
