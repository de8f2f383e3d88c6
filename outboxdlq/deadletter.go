// Package outboxdlq reads dead-letter topics and sends dead letters back.
//
// An [outbox.Consumer] sends a record that a handler cannot handle to a dead-letter
// topic, with headers that say where the record was, which group and action failed,
// and why. [Read] returns the dead letters of a topic. [Replay] sends them back to the
// topics that they came from; only the group and the action that failed handle them
// again, and a group that has handled one before skips it.
package outboxdlq

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
)

// ErrOriginalGone is why [Replay] cannot send a dead letter without a value, a key or all
// headers: the original record, which has them, is not at its offset any more.
var ErrOriginalGone = errors.New("outbox: the original record is gone")

// ErrOtherTopic is why [Replay] does not send a dead letter: its headers say that it is one
// of a topic that is not in [ReplayConfig.To].
var ErrOtherTopic = errors.New("outbox: the dead letter is one of another topic")

// DeadLetter is a record of a dead-letter topic and what its headers say.
type DeadLetter struct {
	// OriginalTopic is the topic of the record that could not be handled.
	OriginalTopic string
	// OriginalPartition is the partition of that record.
	OriginalPartition int32
	// OriginalOffset is the offset of that record.
	OriginalOffset int64
	// OriginalTimestamp is the timestamp of that record, to the millisecond.
	OriginalTimestamp time.Time
	// ReplayOf is set if that record had been sent back before: it is where the event
	// was first, as topic-partition-offset.
	ReplayOf string
	// Group is the consumer group, and Action the action of the handler, that could
	// not handle it. Action is empty if the record did not reach a handler.
	Group, Action string
	// Error is the text of the error, and Class its kind.
	Error, Class string
	// Attempts is how often the handler was tried.
	Attempts int
	// FailedAt is when the record was sent to the dead-letter topic.
	FailedAt time.Time
	// ValueOmitted is the size in bytes of a value that only the original record has, and
	// KeyOmitted that of a key. They are zero if Record has them.
	ValueOmitted, KeyOmitted int
	// HeadersOmitted is how many headers only the original record has.
	HeadersOmitted int
	// Record is the record in the dead-letter topic: key, value and headers of the
	// original, and the headers of the dead letter. A decoder for the original record
	// can decode it too.
	Record *kgo.Record

	digest string // of the original, where something of it is omitted
}

// Decode reads a record of a dead-letter topic. Its error is a [*outbox.FieldError]
// that names the header: the original topic, partition and offset and the group are
// required.
func Decode(r *kgo.Record) (DeadLetter, error) {
	h := headers{values: map[string]string{}}
	for _, header := range r.Headers { // the last of equal names, which is the newest
		if header.Key == outbox.ReplayOf || strings.HasPrefix(header.Key, deadletter.Prefix) {
			h.values[header.Key] = string(header.Value)
		}
	}
	h.require(outbox.DeadLetterOriginalTopic, outbox.DeadLetterOriginalPartition, outbox.DeadLetterOriginalOffset, outbox.DeadLetterGroup)
	d := DeadLetter{
		OriginalTopic:     h.topic(outbox.DeadLetterOriginalTopic),
		OriginalPartition: int32(h.number(outbox.DeadLetterOriginalPartition, 31)),
		OriginalOffset:    h.number(outbox.DeadLetterOriginalOffset, 63),
		OriginalTimestamp: h.time(outbox.DeadLetterOriginalTimestamp),
		ReplayOf:          h.values[outbox.ReplayOf],
		Group:             h.values[outbox.DeadLetterGroup],
		Action:            h.values[outbox.DeadLetterAction],
		Error:             h.values[outbox.DeadLetterError],
		Class:             h.values[outbox.DeadLetterClass],
		Attempts:          int(h.number(outbox.DeadLetterAttempts, 31)),
		FailedAt:          h.time(outbox.DeadLetterFailedAt),
		ValueOmitted:      int(h.number(outbox.DeadLetterValueOmitted, 31)),
		KeyOmitted:        int(h.number(outbox.DeadLetterKeyOmitted, 31)),
		HeadersOmitted:    int(h.number(outbox.DeadLetterHeadersOmitted, 31)),
		Record:            r,
		digest:            h.values[outbox.DeadLetterDigest],
	}
	if h.err != nil {
		return DeadLetter{Record: r}, h.err
	}
	return d, nil
}

// headers are the headers of a dead letter, and the error about the first bad one.
type headers struct {
	values map[string]string
	err    error
}

// reject keeps the first error.
func (h *headers) reject(name string, err error) {
	if h.err == nil {
		h.err = &outbox.FieldError{Index: -1, Field: name, Err: err}
	}
}

// require rejects headers that are missing or empty.
func (h *headers) require(names ...string) {
	for _, name := range names {
		if h.values[name] == "" {
			h.reject(name, outbox.ErrEmpty)
		}
	}
}

// topic reads the name of a topic.
func (h *headers) topic(name string) string {
	if err := check.Topic(h.values[name]); err != nil {
		h.reject(name, err)
	}
	return h.values[name]
}

// number reads a number that is not negative. It is zero without the header.
func (h *headers) number(name string, bits int) int64 {
	text, ok := h.values[name]
	if !ok {
		return 0
	}
	n, err := strconv.ParseUint(text, 10, bits)
	if err != nil {
		h.reject(name, fmt.Errorf("%.100q %w: want a number", text, outbox.ErrMalformed))
	}
	return int64(n)
}

// time reads a time. It is zero without the header.
func (h *headers) time(name string) time.Time {
	text, ok := h.values[name]
	if !ok {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		h.reject(name, fmt.Errorf("%w: %w", outbox.ErrTime, err))
	}
	return t
}
