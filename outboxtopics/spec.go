package outboxtopics

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/check"
)

// spec is what the configuration says about a topic.
type spec struct {
	topic      string
	partitions int
	replicas   int // or clusterDefault
	settings   []setting
}

// clusterDefault as a number of replicas lets Kafka choose it.
const clusterDefault = -1

type setting struct {
	name, value string
	atLeast     bool // a higher value is no difference
}

// Kafka's names of the settings.
const (
	cleanupSetting         = "cleanup.policy"
	retentionSetting       = "retention.ms"
	deleteRetentionSetting = "delete.retention.ms"
	minInSyncSetting       = "min.insync.replicas"
	maxMessageSetting      = "max.message.bytes"
)

func millis(name string, d time.Duration) setting {
	return setting{name: name, value: strconv.FormatInt(d.Milliseconds(), 10)}
}

// deleted returns the settings of a topic that is not compacted. If the cluster compacts by default, only the last
// event of a key would remain.
func deleted(retention time.Duration) []setting {
	return []setting{{name: cleanupSetting, value: "delete"}, millis(retentionSetting, retention)}
}

// kept returns the settings that say how long a topic of events keeps its records.
func (c Config) kept(topic string) []setting {
	if c.Compacted == nil || !c.Compacted(topic) {
		return deleted(c.Retention)
	}
	return []setting{{name: cleanupSetting, value: "compact"}, millis(deleteRetentionSetting, c.DeleteRetention)}
}

// baseSpec returns what topics of events and of dead letters have in common.
func (c Config) baseSpec(topic string, partitions int, kept []setting) spec {
	s := spec{topic: topic, partitions: partitions, replicas: max(c.ReplicationFactor, clusterDefault), settings: kept}
	if c.MinInSyncReplicas > 0 {
		s.settings = append(s.settings, setting{name: minInSyncSetting, value: strconv.Itoa(c.MinInSyncReplicas)})
	}
	return s
}

// eventTopics returns the specs of topics of events, sorted by topic.
func (c Config) eventTopics(topics []string) ([]spec, error) {
	var specs []spec
	var errs []error
	for _, topic := range slices.Compact(slices.Sorted(slices.Values(topics))) {
		partitions := c.Partitions
		if c.PartitionsFor != nil {
			partitions = cmp.Or(c.PartitionsFor(topic), partitions)
			field := "PartitionsFor " + topic
			errs = append(errs, check.NotNegative(field, partitions), check.NotAbove(field, partitions, maxPartitions))
		}
		s := c.baseSpec(topic, partitions, c.kept(topic))
		if c.MaxMessageBytes > 0 {
			s.settings = append(s.settings, setting{name: maxMessageSetting, value: strconv.Itoa(c.MaxMessageBytes)})
		}
		specs = append(specs, s)
	}
	return specs, errors.Join(errs...)
}

// deadLetterTopics returns the dead-letter topics, each with the topics whose dead
// letters it takes.
func (c Config) deadLetterTopics(specs []spec) (map[string][]string, error) {
	all := map[string][]string{}
	var errs []error
	for _, s := range specs {
		name := c.DeadLetterTopic(s.topic)
		err := check.Topic(name)
		if slices.Contains(topicNames(specs), name) {
			err = fmt.Errorf("%q: must not be a topic of events", name)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("field DeadLetterTopic for topic %s: %w", s.topic, err))
			continue
		}
		all[name] = append(all[name], s.topic)
	}
	return all, errors.Join(errs...)
}

// deadLetterSpec returns the spec of a dead-letter topic: it has to take the largest
// record of any of its topics, with more headers. It reports false if one of those
// topics does not exist.
func (c Config) deadLetterSpec(name string, topics []string, found map[string]description) (spec, bool) {
	limit := c.DeadLetterMaxMessageBytes
	for _, topic := range topics {
		d, ok := found[topic]
		if !ok {
			return spec{}, false
		}
		if c.DeadLetterMaxMessageBytes == 0 {
			limit = max(limit, d.maxMessageBytes()+headerRoom)
		}
	}
	s := c.baseSpec(name, c.DeadLetterPartitions, deleted(c.DeadLetterRetention))
	s.settings = append(s.settings, setting{
		name: maxMessageSetting, value: strconv.Itoa(min(limit, math.MaxInt32)), atLeast: true,
	})
	return s, true
}

// differences compares a topic with its spec.
func (s spec) differences(d description) (all []Difference) {
	compare := func(setting, want, have string) {
		if want != have {
			all = append(all, Difference{Setting: setting, Want: want, Have: have})
		}
	}
	compare("partitions", strconv.Itoa(s.partitions), strconv.Itoa(d.partitions))
	if s.replicas != clusterDefault {
		compare("replication.factor", strconv.Itoa(s.replicas), strconv.Itoa(d.replicas))
	}
	for _, setting := range s.settings {
		have := d.settings[setting.name]
		if setting.atLeast && isAtLeast(have, setting.value) {
			continue
		}
		compare(setting.name, setting.value, have)
	}
	return all
}

// tooFewReplicas adds a difference for a topic that takes no records, because the cluster has chosen fewer replicas
// than have to be in sync.
func (s spec) tooFewReplicas(d description, all []Difference) []Difference {
	least, err := strconv.Atoi(d.settings[minInSyncSetting])
	isKnown := slices.ContainsFunc(all, func(d Difference) bool { return d.Setting == minInSyncSetting })
	if err != nil || isKnown || s.replicas != clusterDefault || d.replicas == 0 || d.replicas >= least {
		return all
	}
	return append(all, Difference{Setting: "replication.factor", Want: fmt.Sprintf("%d or more (%s)", least, minInSyncSetting), Have: strconv.Itoa(d.replicas)})
}

// isAtLeast compares two settings that are numbers.
func isAtLeast(have, want string) bool {
	h, herr := strconv.Atoi(have)
	w, werr := strconv.Atoi(want)
	return herr == nil && werr == nil && h >= w
}

// request returns the part of a request that creates the topic.
func (s spec) request() kmsg.CreateTopicsRequestTopic {
	topic := kmsg.NewCreateTopicsRequestTopic()
	topic.Topic, topic.NumPartitions, topic.ReplicationFactor = s.topic, int32(s.partitions), int16(s.replicas)
	for _, setting := range s.settings {
		config := kmsg.NewCreateTopicsRequestTopicConfig()
		config.Name, config.Value = setting.name, &setting.value
		topic.Configs = append(topic.Configs, config)
	}
	return topic
}

func topicNames(specs []spec) []string {
	names := make([]string, len(specs))
	for i, s := range specs {
		names[i] = s.topic
	}
	return names
}
