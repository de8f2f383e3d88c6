// Package outboxdlq reads dead-letter topics and sends dead letters back.
//
// An [outbox.Consumer] sends a record that a handler cannot handle to a dead-letter topic. Headers name the
// position of the record, the group and action that failed, and the error. [Read] returns the dead letters
// of a topic. [Replay] sends them back to the topics that they came from. Only the group and the action
// that failed handle them again, and a group that has handled a dead letter before skips it.
package outboxdlq

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
)

// ErrOriginalGone means that [Replay] cannot send a dead letter without a value, a key or all headers: the
// original record, which has them, is no longer at its offset, or could not be recognized there, because nothing of it
// was read.
var ErrOriginalGone = errors.New("the original record is gone")

// unreadError is the [ErrOriginalGone] of a dead letter with nothing of its original, and says why.
type unreadError string

func (e unreadError) Error() string {
	return "the dead letter has nothing of the original record: " + string(e)
}

func (unreadError) Is(target error) bool { return target == ErrOriginalGone }

// ErrCompacted means that [Replay] does not send a dead letter, because its original topic is compacted. The record
// that is sent back is for one group. Kafka would keep it as the last one of its key, and forget the one for all.
var ErrCompacted = errors.New("the dead letter is one of a compacted topic, where it would replace the last record of its key for every group")

// ErrOtherTopic means that [Replay] does not send a dead letter, because its original topic is not in
// [ReplayConfig.To].
var ErrOtherTopic = errors.New("the dead letter is one of another topic")

// DeadLetter is a record of a dead-letter topic with its decoded headers.
type DeadLetter struct {
	// OriginalTopic is the topic of the record that could not be handled.
	OriginalTopic string
	// OriginalPartition is the partition of that record.
	OriginalPartition int32
	// OriginalOffset is the offset of that record.
	OriginalOffset int64
	// OriginalTimestamp is the timestamp of that record, to the millisecond.
	OriginalTimestamp time.Time
	// ReplayOf is set if that record was sent back from a dead-letter topic. It is the first position of
	// the event, as topic-partition-offset.
	ReplayOf string
	// EditedFrom is set if an operator has written the value, see [Edit]. It is the place of the dead letter with
	// the value from before, as topic-partition-offset.
	EditedFrom string
	// Group and Action are the consumer group and the action that failed. Action is empty if the record did
	// not reach a handler.
	Group, Action string
	// Error is the text of the error, and Class its class.
	Error, Class string
	// Attempts is the number of attempts of the handler.
	Attempts int
	// FailedAt is the time at which the record was sent to the dead-letter topic.
	FailedAt time.Time
	// ValueOmitted and KeyOmitted are the sizes, in bytes, of a value and a key that only the original
	// record has. They are zero if Record has the value and the key.
	ValueOmitted, KeyOmitted int
	// HeadersOmitted is the number of headers that only the original record has.
	HeadersOmitted int
	// Record is the record in the dead-letter topic: key, value and headers of the original, and the
	// headers of the dead letter. A decoder for the original record can also decode Record.
	Record *kgo.Record

	digest string // of the original record, if parts of it are omitted
	unread string // why nothing of it is here, "" if something is
}

// Decode reads a record of a dead-letter topic. The original topic, partition and offset and the group are
// required. Its error is a [*outbox.FieldError] that names the bad header.
func Decode(r *kgo.Record) (DeadLetter, error) {
	h := headers{values: map[string]string{}}
	for _, header := range r.Headers { // the last header of a name wins, because it is the newest
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
		EditedFrom:        h.values[outbox.DeadLetterEditedFrom],
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
	d.unread = h.values[deadletter.Unread]
	if d.unread == "" && d.Class == classUndecodable && isEmpty(r) && d.ValueOmitted == 0 && d.KeyOmitted == 0 && d.HeadersOmitted == 0 {
		d.unread = cmp.Or(d.Error, d.Class) // earlier releases wrote no header
	}
	return d, nil
}

// ofReplay reports whether outboxreplay has written the dead letter.
func (d DeadLetter) ofReplay() bool {
	return d.Class == deadletter.ClassReplay && d.OriginalPartition == deadletter.NoPartition
}

// classUndecodable is the class of a record that no handler got, because it could not be decoded.
const classUndecodable = "undecodable"

// isEmpty reports whether a dead letter has no key, no value and no header of its original.
func isEmpty(r *kgo.Record) bool {
	return len(r.Key) == 0 && len(r.Value) == 0 && !slices.ContainsFunc(r.Headers, func(h kgo.RecordHeader) bool { return !deadletter.IsOwn(h.Key) })
}

// headers are the headers of a dead letter, and the error of the first bad header.
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

// number reads a number that is not negative. Without the header it returns zero.
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

// time reads a time. Without the header it returns the zero time.
func (h *headers) time(name string) time.Time {
	text, ok := h.values[name]
	if !ok {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		err = fmt.Errorf("%w: %w", outbox.ErrTime, err)
	} else {
		err = check.Time(t) // JSON has no other times
	}
	if err != nil {
		h.reject(name, err)
	}
	return t
}
