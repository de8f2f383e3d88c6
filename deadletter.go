package outbox

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/kafka"
)

// DeadLetter is a record of a dead-letter topic and what its headers say.
type DeadLetter struct {
	// OriginalTopic is where the record was when it failed.
	OriginalTopic string
	// OriginalPartition is that of the topic.
	OriginalPartition int32
	// OriginalOffset is that of the partition.
	OriginalOffset int64
	// OriginalTimestamp is that of the record, to the millisecond.
	OriginalTimestamp time.Time
	// ReplayOf is where it was first, as topic-partition-offset, if that was a record
	// that had been sent back before.
	ReplayOf string
	// Group and Action say who could not handle it. Action is empty where it was not
	// fit for any.
	Group, Action string
	// Error and Class say why.
	Error, Class string
	// Attempts is how often it was tried.
	Attempts int
	// FailedAt is when it was given up.
	FailedAt time.Time
	// ValueOmitted is the size in bytes of a value that only the original record has.
	// It is zero where Record has the value.
	ValueOmitted int
	// Record is the record in the dead-letter topic: key and value of the original,
	// and its headers beside those of the dead letter. What decodes the original
	// decodes it too.
	Record *kgo.Record
}

// DecodeDeadLetter reads a record of a dead-letter topic. Its error is a
// [*FieldError] that names the header: topic, partition and offset of the original
// and the group must be there.
func DecodeDeadLetter(r *kgo.Record) (DeadLetter, error) {
	h := dlqHeaders{values: map[string]string{}}
	for _, header := range r.Headers { // of two the last, which is the newer one
		if header.Key == ReplayOf || strings.HasPrefix(header.Key, deadLetterPrefix) {
			h.values[header.Key] = string(header.Value)
		}
	}
	h.need(DeadLetterOriginalTopic, DeadLetterOriginalPartition, DeadLetterOriginalOffset, DeadLetterGroup)
	d := DeadLetter{
		OriginalTopic:     h.topic(DeadLetterOriginalTopic),
		OriginalPartition: int32(h.number(DeadLetterOriginalPartition, 31)),
		OriginalOffset:    h.number(DeadLetterOriginalOffset, 63),
		OriginalTimestamp: h.time(DeadLetterOriginalTimestamp),
		ReplayOf:          h.values[ReplayOf],
		Group:             h.values[DeadLetterGroup],
		Action:            h.values[DeadLetterAction],
		Error:             h.values[DeadLetterError],
		Class:             h.values[DeadLetterClass],
		Attempts:          int(h.number(DeadLetterAttempts, 31)),
		FailedAt:          h.time(DeadLetterFailedAt),
		ValueOmitted:      int(h.number(DeadLetterValueOmitted, 31)),
		Record:            r,
	}
	if h.err != nil {
		return DeadLetter{Record: r}, h.err
	}
	return d, nil
}

// dlqHeaders are the headers of a dead letter, and what is wrong with the first bad
// one.
type dlqHeaders struct {
	values map[string]string
	err    error
}

func (h *dlqHeaders) refuse(name string, err error) {
	if h.err == nil {
		h.err = unreadable("", name, err)
	}
}

func (h *dlqHeaders) need(names ...string) {
	for _, name := range names {
		if h.values[name] == "" {
			h.refuse(name, ErrEmpty)
		}
	}
}

func (h *dlqHeaders) topic(name string) string {
	if err := check.Topic(h.values[name]); err != nil {
		h.refuse(name, err)
	}
	return h.values[name]
}

// number reads a number from 0 on; without the header it is 0.
func (h *dlqHeaders) number(name string, bits int) int64 {
	text, ok := h.values[name]
	if !ok {
		return 0
	}
	n, err := strconv.ParseUint(text, 10, bits)
	if err != nil {
		h.refuse(name, fmt.Errorf("%.100q %w: want a number", text, ErrMalformed))
	}
	return int64(n)
}

// time reads a time; without the header it is zero.
func (h *dlqHeaders) time(name string) time.Time {
	text, ok := h.values[name]
	if !ok {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		h.refuse(name, fmt.Errorf("%w: %w", ErrTime, err))
	}
	return t
}

// DeadLetters reads a dead-letter topic, or any other, to its end as it is when the
// reading begins, each partition in order. It begins with the offsets that from has
// for partitions, and with the first ones for the rest. It belongs to no group and
// commits nothing. Records of transactions that are aborted or open are not there.
//
// Beside an error stands either a DeadLetter that has only its Record, which is none
// for the reason that the error says; or one without a Record, and reading ends.
func DeadLetters(ctx context.Context, opts []kgo.Opt, topic string, from map[int32]int64) iter.Seq2[DeadLetter, error] {
	return func(yield func(DeadLetter, error) bool) {
		err := eachDeadLetter(ctx, opts, topic, from, yield)
		if err != nil {
			yield(DeadLetter{}, fmt.Errorf("outbox: dead letters of %s: %w", topic, err))
		}
	}
}

func eachDeadLetter(ctx context.Context, opts []kgo.Opt, topic string, from map[int32]int64, yield func(DeadLetter, error) bool) error {
	if err := errors.Join(checkFrom(from), kafka.CheckProducerOpts(opts)); err != nil {
		return err
	}
	client, err := kafka.NewClient(opts)
	if err != nil { // checkKafkaOpts has made one from these options
		return fmt.Errorf("make Kafka client: %w", err)
	}
	defer client.Close()
	reader := &offsetReader{client: client}
	spans, err := reader.spans(ctx, topic, from)
	if err != nil {
		return err
	}
	for _, s := range spans {
		for s.next < s.end {
			records, err := reader.read(ctx, &s)
			if err != nil {
				return err
			}
			for _, r := range records {
				if !yield(DecodeDeadLetter(r)) {
					return nil
				}
			}
		}
	}
	return nil
}
