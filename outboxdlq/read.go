package outboxdlq

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
)

// Read reads a dead-letter topic, or any other topic, up to its end at the time of the call, each partition
// in order. It begins each partition at its offset in from, or at the first offset if from has none. It
// joins no consumer group and commits no offsets. It does not return records of transactions that are
// aborted or not committed yet.
//
// An error has one of two forms. If the DeadLetter has only its Record, the record is no dead letter for
// the reason in the error, and reading continues. If the DeadLetter has no Record, reading has ended.
func Read(ctx context.Context, opts []kgo.Opt, topic string, from map[int32]int64) iter.Seq2[DeadLetter, error] {
	return func(yield func(DeadLetter, error) bool) {
		err := read(ctx, opts, topic, from, yield)
		if err != nil {
			yield(DeadLetter{}, fmt.Errorf("outbox: dead letters of %s: %w", topic, err))
		}
	}
}

// read is [Read], but returns the error that ends it.
func read(ctx context.Context, opts []kgo.Opt, topic string, from map[int32]int64, yield func(DeadLetter, error) bool) error {
	if err := errors.Join(kafka.CheckOffsets(from), kafka.CheckProducerOpts(opts)); err != nil {
		return err
	}
	client, err := kafka.NewClient(kafka.Bounded(opts))
	if err != nil { // CheckProducerOpts has made a client from the same options
		return fmt.Errorf("make Kafka client: %w", err)
	}
	defer client.Close()
	reader := kafka.NewReader(client)
	spans, err := reader.Spans(ctx, topic, from)
	if err != nil {
		return err
	}
	for _, s := range spans {
		for s.Next < s.End {
			records, err := reader.Read(ctx, &s)
			if err != nil {
				return err
			}
			for _, r := range records {
				if !yield(Decode(r)) {
					return nil
				}
			}
		}
	}
	return nil
}
