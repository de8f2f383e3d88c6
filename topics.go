package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/kafka"
)

// TopicsConfig says how [EnsureTopics] makes topics. The zero value is for a cluster
// of three brokers or more, of which one may fail.
type TopicsConfig struct {
	// Partitions is how many a topic of events gets. They may grow later and never
	// shrink. Growing moves keys to other partitions: until consumers have read what
	// was there before, they may get a key's later events first. Zero means 3.
	Partitions int
	// PartitionsFor replaces Partitions for a topic where it is not zero. Nil means
	// Partitions for all.
	PartitionsFor func(topic string) int

	// ReplicationFactor is how many brokers have each partition, those of dead-letter
	// topics too. Zero means 3. Negative means what the cluster has as its default,
	// since Kafka 2.4.
	ReplicationFactor int
	// MinInSyncReplicas is how many of them must have a record before it counts as
	// sent, at most ReplicationFactor. Zero means 2, and 1 where ReplicationFactor is
	// less than 3; where that is negative, the default of the cluster.
	MinInSyncReplicas int

	// Retention is how long a topic keeps its records, at least 1 ms. Zero means 7
	// days.
	Retention time.Duration
	// MaxMessageBytes is the largest batch of records that a topic takes, after
	// compression. Zero means what the cluster has, 1,048,588 by default, which
	// suits RecorderConfig.MaxPayload at its default.
	MaxMessageBytes int

	// DeadLetterTopic names the topic for the dead letters of another, as that of
	// [ConsumerConfig] does. Nil means {topic}.dlq.
	DeadLetterTopic func(topic string) string
	// DeadLetterPartitions is how many a dead-letter topic gets. Zero means 1.
	DeadLetterPartitions int
	// DeadLetterRetention is how long dead letters are kept, at least 1 ms. Zero
	// means 30 days.
	DeadLetterRetention time.Duration
	// DeadLetterMaxMessageBytes is MaxMessageBytes of the dead-letter topics. Zero
	// means 16 KiB more than the topic of the events takes, for the headers of dead
	// letters.
	DeadLetterMaxMessageBytes int

	// DryRun lets Kafka check what would be made, and makes nothing.
	DryRun bool
}

// TopicState is what [EnsureTopics] found or made.
type TopicState struct {
	// Topic is its name.
	Topic string
	// Created is set if it was missing: now it is there, but for a dry run.
	Created bool
	// Differences are where an existing topic is not what the configuration says.
	Differences []TopicDifference
}

// TopicDifference is a setting of an existing topic that is not as configured.
type TopicDifference struct {
	// Setting is partitions, replication.factor, or Kafka's name for it, such as
	// retention.ms.
	Setting string
	// Want is what the configuration says, Have what the topic has. Replicas are
	// those of the partition that has the fewest.
	Want, Have string
}

// String returns for example "retention.ms is 3600000, want 604800000".
func (d TopicDifference) String() string {
	return fmt.Sprintf("%s is %s, want %s", d.Setting, d.Have, d.Want)
}

const (
	defaultPartitions          = 3
	maxPartitions              = 10_000 // that Kafka makes in one request
	defaultReplicationFactor   = 3
	defaultRetention           = 7 * 24 * time.Hour
	defaultDeadLetterRetention = 30 * 24 * time.Hour
	// deadLetterRoom is for the headers of a dead letter: names, 2,000 bytes of the
	// error, and names of group, action and topic of up to 2 KiB.
	deadLetterRoom = 16 << 10
	// kafkaMaxMessageBytes is the default of a broker's message.max.bytes.
	kafkaMaxMessageBytes = 1_048_588
)

func (c TopicsConfig) withDefaults() TopicsConfig {
	c.Partitions = cmp.Or(c.Partitions, defaultPartitions)
	c.ReplicationFactor = cmp.Or(c.ReplicationFactor, defaultReplicationFactor)
	if c.ReplicationFactor > 0 {
		c.MinInSyncReplicas = cmp.Or(c.MinInSyncReplicas, max(1, min(2, c.ReplicationFactor-1)))
	}
	c.Retention = cmp.Or(c.Retention, defaultRetention)
	c.DeadLetterPartitions = cmp.Or(c.DeadLetterPartitions, 1)
	c.DeadLetterRetention = cmp.Or(c.DeadLetterRetention, defaultDeadLetterRetention)
	if c.DeadLetterTopic == nil {
		c.DeadLetterTopic = DeadLetterTopic
	}
	return c
}

func (c TopicsConfig) validate() error {
	errs := []error{
		check.NotNegative("Partitions", c.Partitions),
		check.NotAbove("Partitions", c.Partitions, maxPartitions),
		check.NotAbove("ReplicationFactor", c.ReplicationFactor, math.MaxInt16),
		check.NotNegative("MinInSyncReplicas", c.MinInSyncReplicas),
		check.NotNegative("MaxMessageBytes", c.MaxMessageBytes),
		check.NotAbove("MaxMessageBytes", c.MaxMessageBytes, math.MaxInt32-deadLetterRoom),
		check.NotNegative("DeadLetterPartitions", c.DeadLetterPartitions),
		check.NotAbove("DeadLetterPartitions", c.DeadLetterPartitions, maxPartitions),
		check.NotNegative("DeadLetterMaxMessageBytes", c.DeadLetterMaxMessageBytes),
		check.NotAbove("DeadLetterMaxMessageBytes", c.DeadLetterMaxMessageBytes, math.MaxInt32),
		checkRetention("Retention", c.Retention),
		checkRetention("DeadLetterRetention", c.DeadLetterRetention),
	}
	if c.ReplicationFactor > 0 && c.MinInSyncReplicas > c.ReplicationFactor {
		errs = append(errs, fmt.Errorf("field MinInSyncReplicas is %d: must not be above ReplicationFactor, %d", c.MinInSyncReplicas, c.ReplicationFactor))
	}
	if c.DeadLetterMaxMessageBytes > 0 && c.DeadLetterMaxMessageBytes < c.MaxMessageBytes {
		errs = append(errs, fmt.Errorf("field DeadLetterMaxMessageBytes is %d: must not be below MaxMessageBytes, %d", c.DeadLetterMaxMessageBytes, c.MaxMessageBytes))
	}
	return errors.Join(errs...)
}

func checkRetention(field string, d time.Duration) error {
	if d < time.Millisecond {
		return fmt.Errorf("field %s is %v: at least 1ms", field, d)
	}
	return nil
}

// EnsureTopics makes the topics to which the events of a registry go, and a topic
// for the dead letters of each, where they are missing. It changes nothing about
// those that are there: what they have otherwise, it returns as differences. The
// states are sorted by topic.
//
// Several processes may call it at the same time. When it returns, the topics that
// it made have leaders. It makes one Kafka client from opts and closes it; options
// that are not for a relay are not for this either. The client needs the right to
// describe the topics and their configurations, and to create what is missing.
//
// The error names every bad field, and every topic that Kafka refuses; the states
// are then those of the others. Without its topic, no dead-letter topic is made.
func EnsureTopics(ctx context.Context, opts []kgo.Opt, events *Registry, cfg TopicsConfig) ([]TopicState, error) {
	if events == nil {
		err := errors.Join(cfg.withDefaults().validate(), kafka.CheckProducerOpts(opts), fmt.Errorf("registry %w", ErrNil))
		return nil, fmt.Errorf("outbox: topics config: %w", err)
	}
	var topics []string
	for _, def := range events.byName {
		topics = append(topics, def.destination())
	}
	return EnsureNamedTopics(ctx, opts, topics, cfg)
}

// EnsureNamedTopics is [EnsureTopics] for topics whose names are known and whose
// registry is not, as in a tool for operators. A name may be there more than once.
func EnsureNamedTopics(ctx context.Context, opts []kgo.Opt, topics []string, cfg TopicsConfig) ([]TopicState, error) {
	cfg = cfg.withDefaults()
	errs := []error{cfg.validate(), kafka.CheckProducerOpts(opts)}
	for _, topic := range topics {
		if err := check.Topic(topic); err != nil {
			errs = append(errs, fmt.Errorf("topic %w", err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("outbox: topics config: %w", err)
	}
	specs, err := cfg.eventTopics(topics)
	deadLetters, derr := cfg.deadLetterTopics(specs)
	if err := errors.Join(err, derr); err != nil {
		return nil, fmt.Errorf("outbox: topics config: %w", err)
	}
	client, err := kafka.NewClient(opts)
	if err != nil { // checkKafkaOpts has made one from these options
		return nil, fmt.Errorf("outbox: make Kafka client: %w", err)
	}
	defer client.Close()
	admin := &topicAdmin{client: client, dryRun: cfg.DryRun}
	states, err := admin.ensureBoth(ctx, cfg, specs, deadLetters)
	if err != nil {
		err = fmt.Errorf("outbox: topics: %w", err)
	}
	return states, err
}

// ensureBoth makes the topics of events before those of their dead letters, whose
// limits depend on theirs.
func (a *topicAdmin) ensureBoth(ctx context.Context, cfg TopicsConfig, specs []topicSpec, deadLetters map[string][]string) ([]TopicState, error) {
	states, found, err := a.ensure(ctx, specs)
	var more []topicSpec
	for _, name := range slices.Sorted(maps.Keys(deadLetters)) {
		if spec, ok := cfg.deadLetterSpec(name, deadLetters[name], found); ok {
			more = append(more, spec)
		}
	}
	others, _, derr := a.ensure(ctx, more)
	states = append(states, others...)
	slices.SortFunc(states, func(a, b TopicState) int { return strings.Compare(a.Topic, b.Topic) })
	return states, errors.Join(err, derr)
}

// topicSpec is what a topic should be.
type topicSpec struct {
	topic      string
	partitions int
	replicas   int // or clusterDefault
	settings   []topicSetting
}

// clusterDefault is what Kafka takes for a number of replicas.
const clusterDefault = -1

type topicSetting struct {
	name, value string
	atLeast     bool // more is no difference
}

// Kafka's names of what we set.
const (
	cleanupSetting    = "cleanup.policy"
	retentionSetting  = "retention.ms"
	minInSyncSetting  = "min.insync.replicas"
	maxMessageSetting = "max.message.bytes"
)

// spec returns what topics of events and of dead letters have in common.
func (c TopicsConfig) spec(topic string, partitions int, retention time.Duration) topicSpec {
	spec := topicSpec{topic: topic, partitions: partitions, replicas: max(c.ReplicationFactor, clusterDefault), settings: []topicSetting{
		// Where a cluster compacts by default, all but the last event of a key would go.
		{name: cleanupSetting, value: "delete"},
		{name: retentionSetting, value: strconv.FormatInt(retention.Milliseconds(), 10)},
	}}
	if c.MinInSyncReplicas > 0 {
		spec.settings = append(spec.settings, topicSetting{name: minInSyncSetting, value: strconv.Itoa(c.MinInSyncReplicas)})
	}
	return spec
}

// eventTopics returns what topics of events should be, sorted.
func (c TopicsConfig) eventTopics(topics []string) ([]topicSpec, error) {
	var specs []topicSpec
	var errs []error
	for _, topic := range slices.Compact(slices.Sorted(slices.Values(topics))) {
		partitions := c.Partitions
		if c.PartitionsFor != nil {
			partitions = cmp.Or(c.PartitionsFor(topic), partitions)
			field := "PartitionsFor " + topic
			errs = append(errs, check.NotNegative(field, partitions), check.NotAbove(field, partitions, maxPartitions))
		}
		spec := c.spec(topic, partitions, c.Retention)
		if c.MaxMessageBytes > 0 {
			spec.settings = append(spec.settings, topicSetting{name: maxMessageSetting, value: strconv.Itoa(c.MaxMessageBytes)})
		}
		specs = append(specs, spec)
	}
	return specs, errors.Join(errs...)
}

// deadLetterTopics returns the topics that share each dead-letter topic.
func (c TopicsConfig) deadLetterTopics(specs []topicSpec) (map[string][]string, error) {
	all := map[string][]string{}
	var errs []error
	for _, spec := range specs {
		name := c.DeadLetterTopic(spec.topic)
		err := check.Topic(name)
		if slices.ContainsFunc(specs, func(s topicSpec) bool { return s.topic == name }) {
			err = fmt.Errorf("%q: must not be a topic of events", name)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("field DeadLetterTopic for topic %s: %w", spec.topic, err))
			continue
		}
		all[name] = append(all[name], spec.topic)
	}
	return all, errors.Join(errs...)
}

// deadLetterSpec returns what a dead-letter topic should be: it has to take the
// largest record of any of its topics, with more headers. It reports false if one of
// them is not there.
func (c TopicsConfig) deadLetterSpec(name string, topics []string, found map[string]topicInfo) (topicSpec, bool) {
	limit := c.DeadLetterMaxMessageBytes
	for _, topic := range topics {
		info, ok := found[topic]
		if !ok {
			return topicSpec{}, false
		}
		if c.DeadLetterMaxMessageBytes == 0 {
			limit = max(limit, info.maxMessageBytes()+deadLetterRoom)
		}
	}
	spec := c.spec(name, c.DeadLetterPartitions, c.DeadLetterRetention)
	spec.settings = append(spec.settings, topicSetting{
		name: maxMessageSetting, value: strconv.Itoa(min(limit, math.MaxInt32)), atLeast: true,
	})
	return spec, true
}
