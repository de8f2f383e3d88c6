package outboxtopics

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
)

// Config says how [Run] and [Ensure] create topics. The zero value is for a cluster of three
// brokers or more, of which one may fail.
type Config struct {
	// Topics are names in addition to the topics of the types: those of [outbox.With]. Nil means none.
	Topics []string
	// Partitions is how many partitions a topic of events gets. Danger: adding partitions later moves keys to other
	// partitions. Consumers that have not read the older records may then get later events of a key first. Zero means
	// 3.
	Partitions int
	// PartitionsFor replaces Partitions for a topic, unless it returns zero. Nil means Partitions for all.
	PartitionsFor func(topic string) int

	// ReplicationFactor is how many brokers have a copy of each partition, also of dead-letter topics. Negative means
	// the cluster's default. Zero means 3.
	ReplicationFactor int
	// MinInSyncReplicas is how many replicas must have a record before it counts as sent, at most ReplicationFactor.
	// Zero means 2, or 1 if ReplicationFactor is less than 3, or the cluster's default if it is negative.
	MinInSyncReplicas int

	// Compacted reports whether a topic is compacted (cleanup.policy=compact): Kafka then removes all records of a key
	// but the last. Nil means none.
	Compacted func(topic string) bool
	// DeleteRetention is how long a compacted topic keeps a tombstone (delete.retention.ms), at least 1 ms. A consumer
	// must read the topic from its beginning in this time to see it. Zero means 24 h.
	DeleteRetention time.Duration

	// Retention is how long a topic keeps its records, at least 1 ms. A compacted topic has none. Zero means 7 days.
	Retention time.Duration
	// MaxMessageBytes is the largest batch of records that a topic takes, in bytes after compression. Zero means the
	// cluster's default, usually 1,048,588, which suits RecorderConfig.MaxPayload at its default.
	MaxMessageBytes int

	// DeadLetterTopic returns the dead-letter topic of a topic, as in [outbox.ConsumerConfig]. Nil means {topic}.dlq.
	DeadLetterTopic func(topic string) string
	// DeadLetterPartitions is how many partitions a dead-letter topic gets. Zero means 1.
	DeadLetterPartitions int
	// DeadLetterRetention is how long dead letters are kept, at least 1 ms. Zero
	// means 30 days.
	DeadLetterRetention time.Duration
	// DeadLetterMaxMessageBytes is MaxMessageBytes of the dead-letter topics. Zero means 16 KiB more than the topic of
	// the events takes.
	DeadLetterMaxMessageBytes int

	// DryRun lets Kafka check what would be created, and creates nothing.
	DryRun bool

	// Logger receives what [Run] logs. Nil means slog.Default().
	Logger *slog.Logger
}

const (
	defaultPartitions          = 3
	maxPartitions              = 10_000 // that Kafka creates in one request
	defaultReplicationFactor   = 3
	defaultRetention           = 7 * 24 * time.Hour
	defaultDeleteRetention     = 24 * time.Hour
	defaultDeadLetterRetention = 30 * 24 * time.Hour
	// headerRoom is for the headers of a dead letter: their names, 2,000 bytes of the
	// error, and the names of group, action and topic of up to 2 KiB.
	headerRoom = 16 << 10
	// kafkaMaxMessageBytes is the default of a broker's message.max.bytes.
	kafkaMaxMessageBytes = 1_048_588
)

func (c Config) withDefaults() Config {
	c.Partitions = cmp.Or(c.Partitions, defaultPartitions)
	c.ReplicationFactor = cmp.Or(c.ReplicationFactor, defaultReplicationFactor)
	if c.ReplicationFactor > 0 {
		c.MinInSyncReplicas = cmp.Or(c.MinInSyncReplicas, max(1, min(2, c.ReplicationFactor-1)))
	}
	c.Retention = cmp.Or(c.Retention, defaultRetention)
	c.DeleteRetention = cmp.Or(c.DeleteRetention, defaultDeleteRetention)
	c.DeadLetterPartitions = cmp.Or(c.DeadLetterPartitions, 1)
	c.DeadLetterRetention = cmp.Or(c.DeadLetterRetention, defaultDeadLetterRetention)
	if c.DeadLetterTopic == nil {
		c.DeadLetterTopic = outbox.DeadLetterTopic
	}
	c.Logger = cmp.Or(c.Logger, slog.Default())
	return c
}

// validate checks a configuration with its defaults. given is without them.
func (c Config) validate(given Config) error {
	errs := []error{
		check.NotNegative("Partitions", c.Partitions),
		check.NotAbove("Partitions", c.Partitions, maxPartitions),
		check.NotAbove("ReplicationFactor", c.ReplicationFactor, math.MaxInt16),
		check.NotNegative("MinInSyncReplicas", c.MinInSyncReplicas),
		check.NotNegative("MaxMessageBytes", c.MaxMessageBytes),
		check.NotAbove("MaxMessageBytes", c.MaxMessageBytes, math.MaxInt32-headerRoom),
		check.NotNegative("DeadLetterPartitions", c.DeadLetterPartitions),
		check.NotAbove("DeadLetterPartitions", c.DeadLetterPartitions, maxPartitions),
		check.NotNegative("DeadLetterMaxMessageBytes", c.DeadLetterMaxMessageBytes),
		check.NotAbove("DeadLetterMaxMessageBytes", c.DeadLetterMaxMessageBytes, math.MaxInt32),
		checkRetention("Retention", c.Retention),
		checkRetention("DeleteRetention", c.DeleteRetention),
		checkRetention("DeadLetterRetention", c.DeadLetterRetention),
	}
	for _, topic := range c.Topics {
		if err := check.Topic(topic); err != nil {
			errs = append(errs, fmt.Errorf("field Topics: topic %w", err))
		}
	}
	if c.ReplicationFactor > 0 {
		errs = append(errs, check.InOrder(
			check.Field[int]{Name: "MinInSyncReplicas", Value: c.MinInSyncReplicas, Given: given.MinInSyncReplicas},
			check.Field[int]{Name: "ReplicationFactor", Value: c.ReplicationFactor, Given: given.ReplicationFactor}))
	}
	if c.DeadLetterMaxMessageBytes > 0 && c.DeadLetterMaxMessageBytes < c.MaxMessageBytes {
		errs = append(errs, fmt.Errorf("field DeadLetterMaxMessageBytes is %d: must not be below MaxMessageBytes, %d", c.DeadLetterMaxMessageBytes, c.MaxMessageBytes))
	}
	return errors.Join(errs...)
}

// tooFewBrokers says what to set where a topic cannot have as many replicas as it was to have.
// It is said once, because it is the same for all topics. c is without defaults.
func (c Config) tooFewBrokers(brokers int) error {
	have := fmt.Sprintf("the cluster has %d brokers: set it to at most %[1]d", brokers)
	if brokers == 1 {
		have = "the cluster has 1 broker: set it to 1"
	}
	switch {
	case c.ReplicationFactor < 0:
		return fmt.Errorf("field ReplicationFactor is %d, which means the cluster's default, and %s", c.ReplicationFactor, have)
	case c.ReplicationFactor == 0:
		return fmt.Errorf("field ReplicationFactor is %d by default, and %s, or to -1 for the cluster's default", defaultReplicationFactor, have)
	}
	return fmt.Errorf("field ReplicationFactor is %d, and %s, or to -1 for the cluster's default", c.ReplicationFactor, have)
}

func checkRetention(field string, d time.Duration) error {
	if d < time.Millisecond {
		return fmt.Errorf("field %s is %v: at least 1ms", field, d)
	}
	return nil
}
