package exactly

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/wait"
)

var (
	// ErrNoTopic means that the cursor topic does not exist.
	ErrNoTopic = errors.New("the cursor topic does not exist")
	// ErrTopic means that the cursor topic cannot be used as it is.
	ErrTopic = errors.New("the cursor topic is not usable")
	// ErrVersion means that the brokers lack what the mode needs.
	ErrVersion = errors.New("the brokers do not have transaction.version 2")
	// ErrOpen means that a transaction of another producer has stayed open in the cursor topic.
	ErrOpen = errors.New("a transaction of another producer stays open in the cursor topic, and hides what is behind it")
)

// CheckVersion returns [ErrVersion] unless the cluster has transaction.version 2. Before, a request that is late can
// reach the next transaction of its producer.
func CheckVersion(ctx context.Context, client *kgo.Client) error {
	request := kmsg.NewPtrApiVersionsRequest()
	request.ClientSoftwareName, request.ClientSoftwareVersion = "outbox", "1"
	answer, err := request.RequestWith(ctx, client)
	if err != nil {
		return fmt.Errorf("read the features of the brokers: %w", err)
	}
	for _, f := range answer.FinalizedFeatures {
		if f.Name == "transaction.version" && f.MaxVersionLevel >= 2 {
			return nil
		}
	}
	return fmt.Errorf("%w, which needs Kafka 4.0: kafka-features.sh upgrade --feature transaction.version=2", ErrVersion)
}

// topicSettings keep the topic short: a start reads its end, and each batch writes into it.
var topicSettings = map[string]string{
	"cleanup.policy": "compact", "segment.bytes": "16777216", "min.cleanable.dirty.ratio": "0.1", "max.message.bytes": "1048588",
}

const (
	// missingFor is how long the topic must have been missing: a broker that has just started may not know of it yet.
	missingFor  = 3 * time.Second
	missingPoll = 200 * time.Millisecond
)

// ensureTopic checks the topic, and creates it if it may.
func (s *Sender) ensureTopic(ctx context.Context, create bool) error {
	err := CheckTopic(ctx, s.clients[0], s.cfg.Topic)
	if create && errors.Is(err, ErrNoTopic) {
		if err = s.createTopic(ctx); err != nil {
			return err
		}
		err = CheckTopic(ctx, s.clients[0], s.cfg.Topic)
	}
	for began := time.Now(); errors.Is(err, ErrNoTopic) && time.Since(began) < missingFor && ctx.Err() == nil; {
		wait.Sleep(ctx, missingPoll)
		err = CheckTopic(ctx, s.clients[0], s.cfg.Topic)
	}
	return err
}

// CheckTopic returns [ErrNoTopic] or [ErrTopic] unless a topic can be a cursor topic. Other errors are Kafka's.
func CheckTopic(ctx context.Context, client *kgo.Client, topic string) error {
	answer, err := kafka.Metadata(ctx, client, topic)
	if err != nil {
		return fmt.Errorf("describe the cursor topic: %w", err)
	}
	for _, t := range answer.Topics {
		switch err := kerr.ErrorForCode(t.ErrorCode); {
		case errors.Is(err, kerr.UnknownTopicOrPartition):
			return fmt.Errorf("%w: %s", ErrNoTopic, topic)
		case err != nil:
			return fmt.Errorf("cursor topic %s: %w", topic, err)
		case len(t.Partitions) != 1:
			return fmt.Errorf("%w: %s has %d partitions, and must have one", ErrTopic, topic, len(t.Partitions))
		case t.Partitions[0].Leader < 0:
			return fmt.Errorf("cursor topic %s: %w", topic, kafka.ErrNoLeader)
		}
	}
	return checkPolicy(ctx, client, topic)
}

// checkPolicy checks that Kafka keeps the newest record for ever. A client without the right to read settings cannot
// check that.
func checkPolicy(ctx context.Context, client *kgo.Client, topic string) error {
	answer, err := kafka.SettingsRequest([]string{topic}, kafka.CleanupPolicy).RequestWith(ctx, client)
	if err != nil {
		return fmt.Errorf("read the settings of the cursor topic: %w", err)
	}
	for _, r := range answer.Resources {
		if policy, known := kafka.SettingsOf(r)[kafka.CleanupPolicy]; known && policy != "compact" {
			return fmt.Errorf("%w: cleanup.policy of %s is %s, and must be compact: with another policy Kafka removes the newest record after a time",
				ErrTopic, topic, policy)
		}
	}
	return nil
}

func (s *Sender) createTopic(ctx context.Context) error {
	topic := kmsg.NewCreateTopicsRequestTopic()
	topic.Topic, topic.NumPartitions, topic.ReplicationFactor = s.cfg.Topic, 1, -1
	for name, value := range topicSettings {
		topic.Configs = append(topic.Configs, kmsg.CreateTopicsRequestTopicConfig{Name: name, Value: &value})
	}
	request := kmsg.NewPtrCreateTopicsRequest()
	request.Topics = append(request.Topics, topic)
	answer, err := request.RequestWith(ctx, s.clients[0])
	if err == nil && len(answer.Topics) > 0 {
		err = kerr.ErrorForCode(answer.Topics[0].ErrorCode)
	}
	if err != nil && !errors.Is(err, kerr.TopicAlreadyExists) {
		return fmt.Errorf("create the cursor topic %s; without the right to do so, create it with one partition and cleanup.policy=compact: %w", s.cfg.Topic, err)
	}
	return nil
}

// firstLook is how many records are read from the end at first.
const firstLook = 100

// read returns the newest committed record of the relay. It reads a few records at the end, and more if none of them
// is one.
func (s *Sender) read(ctx context.Context) (newest Record, found bool, err error) {
	at := kafka.Partition{Topic: s.cfg.Topic}
	wanted := map[kafka.Partition]int64{at: kafka.EndOffset}
	ends, err := kafka.ListOffsets(ctx, s.clients[0], kafka.Uncommitted, wanted)
	if err != nil {
		return Record{}, false, fmt.Errorf("read the cursor topic: %w", err)
	}
	reader := kafka.NewReader(s.clients[0])
	for look := int64(firstLook); ; look *= 10 {
		from := max(0, ends[at]-look)
		span, err := s.awaitSpan(ctx, reader, from, ends[at])
		if err != nil {
			return Record{}, false, err
		}
		first := span.Next
		for span.Next < span.End {
			records, err := reader.Read(ctx, &span)
			if err != nil {
				return Record{}, false, err
			}
			for _, r := range records {
				if string(r.Key) != s.cfg.Key {
					continue
				}
				if newest, err = parseRecord(r.Value); err != nil {
					return Record{}, false, fmt.Errorf("%w: %w", ErrTopic, err)
				}
				found = true
			}
		}
		if found || first > from || from == 0 {
			return newest, found, nil
		}
	}
}

const openPoll = 50 * time.Millisecond

// awaitSpan returns the span from an offset on, once the transactions below end have ended. Those that other relays
// have begun since then are behind it, and are not waited for.
func (s *Sender) awaitSpan(ctx context.Context, reader *kafka.Reader, from, end int64) (kafka.Span, error) {
	var open error
	for {
		spans, err := reader.Spans(ctx, s.cfg.Topic, map[int32]int64{0: from})
		switch {
		case err != nil && open != nil && ctx.Err() != nil:
			return kafka.Span{}, open
		case err != nil:
			return kafka.Span{}, fmt.Errorf("read the cursor topic: %w", err)
		case spans[0].End >= end:
			return spans[0], nil
		}
		open = fmt.Errorf("%w: %s, from offset %d", ErrOpen, s.cfg.Topic, spans[0].End)
		if wait.Sleep(ctx, openPoll); ctx.Err() != nil {
			return kafka.Span{}, open
		}
	}
}
