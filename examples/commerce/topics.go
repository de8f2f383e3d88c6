package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// What topics are made with. Replication is the broker's: three copies, of which two
// must be written, is what to set there.
const (
	partitions       = 3 // they can become more, never fewer
	retention        = 7 * 24 * time.Hour
	brokersChoice    = -1
	letterPartitions = 1
	letterRetention  = 30 * 24 * time.Hour
)

// makeTopics makes the topics of the registry, and those for the dead letters of the
// ones that are read, unless they are there.
func makeTopics(ctx context.Context, kafka []kgo.Opt, events *outbox.Registry, read []string) error {
	client, err := kgo.NewClient(kafka...)
	if err != nil {
		return fmt.Errorf("make Kafka client: %w", err)
	}
	defer client.Close()
	var topics, letters []string
	for _, eventType := range events.Types() {
		topic, err := events.Topic(eventType)
		if err != nil {
			return err
		}
		if !slices.Contains(topics, topic) {
			topics = append(topics, topic)
		}
	}
	for _, topic := range read {
		letters = append(letters, outbox.DeadLetterTopic(topic))
	}
	admin := kadm.NewClient(client)
	return errors.Join(
		makeEach(ctx, admin, partitions, retention, topics),
		makeEach(ctx, admin, letterPartitions, letterRetention, letters),
	)
}

func makeEach(ctx context.Context, admin *kadm.Client, partitions int32, retention time.Duration, topics []string) error {
	ms := strconv.FormatInt(retention.Milliseconds(), 10)
	made, err := admin.CreateTopics(ctx, partitions, brokersChoice, map[string]*string{"retention.ms": &ms}, topics...)
	if err != nil {
		return fmt.Errorf("make topics: %w", err)
	}
	for _, topic := range made.Sorted() {
		if topic.Err != nil && !errors.Is(topic.Err, kerr.TopicAlreadyExists) {
			return fmt.Errorf("make topic %s: %w", topic.Topic, topic.Err)
		}
	}
	return nil
}
