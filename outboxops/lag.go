package outboxops

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/kafka"
)

// Lag returns the number of records that groups still have to read, by group and topic. It counts from
// their committed offsets to the ends of the partitions, without records that Kafka has removed. It asks
// Kafka about the topics in which a group has committed offsets or has begun. A group begins a partition
// without a committed offset at the first record. Records that are no events count too, and so do the marks
// of Kafka transactions. The error names the groups and topics that Kafka does not tell about; the lag of the others is
// returned with it.
func (c *Consumers) Lag(ctx context.Context, opts []kgo.Opt, groups []ConsumerGroup) (map[string]map[string]int64, error) {
	client, err := kafka.NewClient(opts)
	if err != nil {
		return nil, fmt.Errorf("outbox: lag of consumer groups: %w", err)
	}
	defer client.Close()
	all := map[string]map[string]int64{}
	var errs []error
	for _, g := range groups {
		begun := map[string]bool{}
		for _, t := range g.Topics {
			begun[t.Topic] = t.Partitions > 0
		}
		if all[g.Group], err = lagOf(ctx, client, g.Group, begun); err != nil {
			errs = append(errs, fmt.Errorf("outbox: lag of consumer group %s: %w", g.Group, err))
		}
		if err != nil && !kafka.IsAnswer(err) { // Kafka does not answer, and would not for other groups
			break
		}
	}
	return all, errors.Join(errs...)
}

// DeadLetterTopic is a topic with the dead letters of another one.
type DeadLetterTopic struct {
	// Topic is its name, and Of the topic whose dead letters it has.
	Topic, Of string
	// Records is the number of records that Kafka still has. Dead letters stay until the topic's retention
	// removes them, even if they were sent back. Marks of Kafka transactions count, too.
	Records int64
}

// DeadLetters returns the dead-letter topics of the topics that groups have begun with, sorted by
// name: those that Kafka has, under the names of [outbox.DeadLetterTopic]. It asks Kafka. The error names the
// topics that Kafka does not tell about; the others are returned with it.
func (c *Consumers) DeadLetters(ctx context.Context, opts []kgo.Opt, groups []ConsumerGroup) ([]DeadLetterTopic, error) {
	of := map[string]string{}
	for _, g := range groups {
		for _, t := range g.Topics {
			if t.Partitions > 0 {
				of[outbox.DeadLetterTopic(t.Topic)] = t.Topic
			}
		}
	}
	client, err := kafka.NewClient(opts)
	if err != nil {
		return nil, fmt.Errorf("outbox: dead-letter topics: %w", err)
	}
	defer client.Close()
	records, err := recordsOf(ctx, client, slices.Sorted(maps.Keys(of)))
	if err != nil {
		err = fmt.Errorf("outbox: dead-letter topics: %w", err)
	}
	var all []DeadLetterTopic
	for _, topic := range slices.Sorted(maps.Keys(records)) {
		all = append(all, DeadLetterTopic{topic, of[topic], records[topic]})
	}
	return all, err
}

// recordsOf returns the numbers of records in topics, without topics that do not exist. With an error come those of the
// topics that Kafka tells about.
func recordsOf(ctx context.Context, client *kgo.Client, topics []string) (map[string]int64, error) {
	partitions, err := kafka.PartitionsOf(ctx, client, topics)
	wanted := map[kafka.Partition]int64{}
	for _, p := range partitions {
		wanted[p] = kafka.FirstOffset
	}
	firsts, ferr := kafka.ListOffsets(ctx, client, kafka.Uncommitted, wanted)
	for p := range wanted {
		wanted[p] = kafka.EndOffset
	}
	ends, eerr := kafka.ListOffsets(ctx, client, kafka.Uncommitted, wanted)
	records := map[string]int64{}
	for p, end := range onlyWhole(ends, wanted, firsts) {
		records[p.Topic] += max(0, end-firsts[p])
	}
	return records, errors.Join(err, ferr, eerr)
}

// onlyWhole returns offsets without the topics that lack a wanted partition in one of the answers.
func onlyWhole(offsets, wanted map[kafka.Partition]int64, others ...map[kafka.Partition]int64) map[kafka.Partition]int64 {
	lacking := map[string]bool{}
	for p := range wanted {
		for _, answer := range append(others, offsets) {
			if _, known := answer[p]; !known {
				lacking[p.Topic] = true
			}
		}
	}
	whole := maps.Clone(offsets)
	maps.DeleteFunc(whole, func(p kafka.Partition, _ int64) bool { return lacking[p.Topic] })
	return whole
}

// lagOf returns the lag of a group by topic. Begun are topics in addition to those with committed
// offsets. With an error comes the lag in the topics that Kafka tells about.
func lagOf(ctx context.Context, client *kgo.Client, group string, begun map[string]bool) (map[string]int64, error) {
	committed, err := kafka.AllGroupOffsets(ctx, client, group)
	if err != nil {
		return nil, err
	}
	ends, err := endsOf(ctx, client, committed, begun)
	unread, uerr := unreadOf(ctx, client, committed, ends)
	lag := map[string]int64{}
	for p, n := range onlyWhole(unread, ends) {
		lag[p.Topic] += n
	}
	return lag, errors.Join(err, uerr)
}

// endsOf returns the ends of all partitions of the topics that a group reads: those in which it
// has committed offsets, and those that it has begun with. With an error come the ends of the topics that Kafka tells
// about.
func endsOf(ctx context.Context, client *kgo.Client, committed map[kafka.Partition]int64, begun map[string]bool) (map[kafka.Partition]int64, error) {
	topics := maps.Clone(begun)
	maps.DeleteFunc(topics, func(_ string, begun bool) bool { return !begun })
	for p := range committed {
		topics[p.Topic] = true
	}
	partitions, err := kafka.PartitionsOf(ctx, client, slices.Sorted(maps.Keys(topics)))
	wanted := map[kafka.Partition]int64{}
	for _, p := range partitions {
		wanted[p] = kafka.EndOffset
	}
	ends, eerr := kafka.ListOffsets(ctx, client, kafka.Uncommitted, wanted)
	return onlyWhole(ends, wanted), errors.Join(err, eerr)
}

// unreadOf returns the number of records that a group still has to read before the ends of partitions. A
// partition without a committed offset counts from its first record. A partition about which Kafka returns an error is
// not in the result.
func unreadOf(ctx context.Context, client *kgo.Client, committed, ends map[kafka.Partition]int64) (map[kafka.Partition]int64, error) {
	wanted, unread := map[kafka.Partition]int64{}, map[kafka.Partition]int64{}
	for p, end := range ends {
		unread[p] = 0
		if committed[p] < end {
			wanted[p] = kafka.FirstOffset
		}
	}
	firsts, err := kafka.ListOffsets(ctx, client, kafka.Uncommitted, wanted)
	for p := range wanted {
		first, known := firsts[p]
		if !known {
			delete(unread, p)
			continue
		}
		unread[p] = max(0, ends[p]-max(first, committed[p]))
	}
	return unread, err
}
