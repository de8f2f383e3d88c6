package main

import (
	"context"
	"fmt"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// sent is what Kafka has of this run.
type sent struct {
	records, events int // an event that was sent twice is one event
}

// readKafka reads the topics to their ends.
func (a *app) readKafka(ctx context.Context) (s sent, err error) {
	topics := []string{}
	for _, r := range a.events.Registrations() {
		topics = append(topics, r.Topic)
	}
	client, err := kgo.NewClient(append(a.kafka, kgo.ConsumeTopics(topics...), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	if err != nil {
		return s, err
	}
	defer client.Close()
	unread, err := unreadOf(ctx, kadm.NewClient(client), topics)
	if err != nil {
		return s, err
	}
	mine, ids := onlyFrom(a.source), map[string]bool{}
	for left(unread) > 0 {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return s, fmt.Errorf("read topics: %w", err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			if last, ok := unread[r.Topic][r.Partition]; ok && r.Offset >= last {
				delete(unread[r.Topic], r.Partition)
			}
			if m, err := mine(r); err == nil && m != nil {
				s.records++
				ids[m.ID] = true
			}
		})
	}
	s.events = len(ids)
	return s, nil
}

// unreadOf returns the offset of the last record of each partition that has any, by topic.
func unreadOf(ctx context.Context, admin *kadm.Client, topics []string) (map[string]map[int32]int64, error) {
	starts, err := admin.ListStartOffsets(ctx, topics...)
	if err != nil {
		return nil, fmt.Errorf("ask for the starts of topics: %w", err)
	}
	ends, err := admin.ListEndOffsets(ctx, topics...)
	if err != nil {
		return nil, fmt.Errorf("ask for the ends of topics: %w", err)
	}
	unread := map[string]map[int32]int64{}
	ends.Each(func(end kadm.ListedOffset) {
		if unread[end.Topic] == nil {
			unread[end.Topic] = map[int32]int64{}
		}
		if start, ok := starts.Lookup(end.Topic, end.Partition); ok && start.Offset < end.Offset {
			unread[end.Topic][end.Partition] = end.Offset - 1
		}
	})
	return unread, nil
}

// left is how many partitions are not read to their end.
func left(unread map[string]map[int32]int64) (n int) {
	for _, partitions := range unread {
		n += len(partitions)
	}
	return n
}
