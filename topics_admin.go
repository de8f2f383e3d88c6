package outbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/wait"
)

// TopicInfo is what Kafka tells of a topic.
type TopicInfo struct {
	// Topic is its name.
	Topic string
	// Partitions is how many it has.
	Partitions int
	// Replicas and InSync are those of the partition that has the fewest.
	Replicas, InSync int
	// Leaderless is how many partitions have no leader: nothing can be sent there.
	Leaderless int
	// Settings are its own and the cluster's, by Kafka's names.
	Settings map[string]string
}

// DescribeTopics returns the topics that are there, sorted by name. It makes none. It
// makes one Kafka client from opts and closes it. The error names every topic that
// Kafka refuses to describe; the rest is returned beside it.
func DescribeTopics(ctx context.Context, opts []kgo.Opt, topics ...string) ([]TopicInfo, error) {
	if len(topics) == 0 {
		return nil, nil
	}
	client, err := kafka.NewClient(opts)
	if err != nil {
		return nil, fmt.Errorf("outbox: make Kafka client: %w", err)
	}
	defer client.Close()
	found, refused, err := (&topicAdmin{client: client}).describe(ctx, topics)
	var infos []TopicInfo
	for _, name := range slices.Sorted(maps.Keys(found)) {
		info := found[name]
		infos = append(infos, TopicInfo{Topic: name, Partitions: info.partitions, Replicas: info.replicas,
			InSync: info.inSync, Leaderless: info.leaderless, Settings: info.settings})
	}
	if err := errors.Join(append(sortedErrors(refused), err)...); err != nil {
		return infos, fmt.Errorf("outbox: %w", err)
	}
	return infos, nil
}

// topicAdmin asks Kafka about topics and makes them.
type topicAdmin struct {
	client *kgo.Client
	dryRun bool
}

// topicInfo is what Kafka tells of a topic.
type topicInfo struct {
	partitions, replicas, inSync int
	leaderless                   int
	led                          bool // every partition has a leader
	settings                     map[string]string
}

// maxMessageBytes returns the topic's limit, or Kafka's default where a broker does
// not tell what a topic would have.
func (t topicInfo) maxMessageBytes() int {
	if n, err := strconv.Atoi(t.settings[maxMessageSetting]); err == nil {
		return n
	}
	return kafkaMaxMessageBytes
}

const (
	// topicsPatience is how long new topics may take until all brokers know them.
	topicsPatience = 30 * time.Second
	topicsPause    = 50 * time.Millisecond
)

// ensure makes what is missing and compares the rest. It returns the topics that
// are there now; those that Kafka refuses are in the error instead.
func (a *topicAdmin) ensure(ctx context.Context, specs []topicSpec) ([]TopicState, map[string]topicInfo, error) {
	if len(specs) == 0 {
		return nil, nil, nil
	}
	found, refused, err := a.describe(ctx, topicNames(specs))
	if err != nil {
		return nil, nil, err
	}
	missing := slices.DeleteFunc(slices.Clone(specs), func(s topicSpec) bool {
		_, there := found[s.topic]
		return there || refused[s.topic] != nil
	})
	created, err := a.create(ctx, missing, refused)
	maps.Copy(found, created.would)
	if err == nil {
		err = a.await(ctx, missing, found, refused)
	}
	var states []TopicState
	for _, s := range specs {
		if info, there := found[s.topic]; there {
			state := TopicState{Topic: s.topic, Created: created.names[s.topic]}
			if !state.Created {
				state.Differences = s.differences(info)
			}
			states = append(states, state)
		}
	}
	return states, found, errors.Join(append(sortedErrors(refused), err)...)
}

func topicNames(specs []topicSpec) []string {
	names := make([]string, len(specs))
	for i, s := range specs {
		names[i] = s.topic
	}
	return names
}

func sortedErrors(byTopic map[string]error) (errs []error) {
	for _, topic := range slices.Sorted(maps.Keys(byTopic)) {
		errs = append(errs, byTopic[topic])
	}
	return errs
}

// differences compares a topic with what it should be.
func (s topicSpec) differences(info topicInfo) (all []TopicDifference) {
	compare := func(setting, want, have string) {
		if want != have {
			all = append(all, TopicDifference{Setting: setting, Want: want, Have: have})
		}
	}
	compare("partitions", strconv.Itoa(s.partitions), strconv.Itoa(info.partitions))
	if s.replicas != clusterDefault {
		compare("replication.factor", strconv.Itoa(s.replicas), strconv.Itoa(info.replicas))
	}
	for _, setting := range s.settings {
		have := info.settings[setting.name]
		if setting.atLeast && isAtLeast(have, setting.value) {
			continue
		}
		compare(setting.name, setting.value, have)
	}
	return all
}

func isAtLeast(have, want string) bool {
	h, herr := strconv.Atoi(have)
	w, werr := strconv.Atoi(want)
	return herr == nil && werr == nil && h >= w
}

// created is what was made, or would be in a dry run.
type created struct {
	names map[string]bool
	would map[string]topicInfo // in a dry run: what they would be
}

// create makes topics. What somebody else has made meanwhile is not an error; the
// rest of what Kafka refuses is added to refused.
func (a *topicAdmin) create(ctx context.Context, specs []topicSpec, refused map[string]error) (created, error) {
	made := created{names: map[string]bool{}, would: map[string]topicInfo{}}
	if len(specs) == 0 {
		return made, nil
	}
	request := kmsg.NewPtrCreateTopicsRequest()
	request.ValidateOnly = a.dryRun
	for _, s := range specs {
		request.Topics = append(request.Topics, s.request())
	}
	response, err := request.RequestWith(ctx, a.client)
	if err != nil {
		return made, fmt.Errorf("create topics: %w", err)
	}
	for _, t := range response.Topics {
		err := kerr.ErrorForCode(t.ErrorCode)
		switch {
		case err == nil:
			made.names[t.Topic] = true
			if a.dryRun {
				made.would[t.Topic] = topicInfo{led: true, settings: createdSettings(t)}
			}
		case !errors.Is(err, kerr.TopicAlreadyExists):
			refused[t.Topic] = topicError("create", t.Topic, err, t.ErrorMessage)
		}
	}
	return made, nil
}

func (s topicSpec) request() kmsg.CreateTopicsRequestTopic {
	topic := kmsg.NewCreateTopicsRequestTopic()
	topic.Topic, topic.NumPartitions, topic.ReplicationFactor = s.topic, int32(s.partitions), int16(s.replicas)
	for _, setting := range s.settings {
		config := kmsg.NewCreateTopicsRequestTopicConfig()
		config.Name, config.Value = setting.name, &setting.value
		topic.Configs = append(topic.Configs, config)
	}
	return topic
}

// createdSettings returns what a topic would have. Old brokers do not tell.
func createdSettings(t kmsg.CreateTopicsResponseTopic) map[string]string {
	settings := map[string]string{}
	for _, c := range t.Configs {
		if c.Value != nil {
			settings[c.Name] = *c.Value
		}
	}
	return settings
}

// topicError names the topic, and adds what the broker says beyond the code.
func topicError(act, topic string, err error, message *string) error {
	if message != nil && *message != "" {
		err = fmt.Errorf("%w: %s", err, *message)
	}
	return fmt.Errorf("%s topic %s: %w", act, topic, err)
}

// await adds new topics to found once they have leaders. A broker hears of a topic
// a moment after the controller has made it, also of one that somebody else made.
func (a *topicAdmin) await(ctx context.Context, specs []topicSpec, found map[string]topicInfo, refused map[string]error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, topicsPatience, errors.New("a new topic has no leader yet"))
	defer cancel()
	waiting := func(name string) bool { return !found[name].led && refused[name] == nil }
	for names := topicNames(specs); ; {
		names = slices.DeleteFunc(names, func(name string) bool { return !waiting(name) })
		if len(names) == 0 {
			return nil
		}
		now, refusedNow, err := a.describe(ctx, names)
		if err != nil {
			return err
		}
		maps.Copy(found, now)
		maps.Copy(refused, refusedNow)
		if !slices.ContainsFunc(names, waiting) {
			return nil
		}
		if wait.Sleep(ctx, topicsPause); ctx.Err() != nil {
			return fmt.Errorf("await topics %v: %w", names, context.Cause(ctx))
		}
	}
}

// describe returns the topics that are there, and why others must not be asked for.
func (a *topicAdmin) describe(ctx context.Context, names []string) (found map[string]topicInfo, refused map[string]error, err error) {
	found, refused = map[string]topicInfo{}, map[string]error{}
	response, err := askTopics(ctx, a.client, names...)
	if err != nil {
		return nil, nil, fmt.Errorf("describe topics: %w", err)
	}
	for _, t := range response.Topics {
		if t.Topic == nil {
			continue
		}
		switch err := kerr.ErrorForCode(t.ErrorCode); {
		case err == nil:
			found[*t.Topic] = describedTopic(t)
		case !kerr.IsRetriable(err): // one that is missing may come, so that is retriable
			refused[*t.Topic] = topicError("describe", *t.Topic, err, nil)
		}
	}
	return found, refused, a.describeSettings(ctx, found, refused)
}

// askTopics asks for the partitions of topics, without making any.
func askTopics(ctx context.Context, client *kgo.Client, names ...string) (*kmsg.MetadataResponse, error) {
	request := kmsg.NewPtrMetadataRequest()
	for _, name := range names {
		topic := kmsg.NewMetadataRequestTopic()
		topic.Topic = &name
		request.Topics = append(request.Topics, topic)
	}
	return request.RequestWith(ctx, client)
}

func describedTopic(t kmsg.MetadataResponseTopic) topicInfo {
	info := topicInfo{partitions: len(t.Partitions), led: len(t.Partitions) > 0}
	for i, p := range t.Partitions {
		if p.Leader < 0 {
			info.led = false
			info.leaderless++
		}
		if i == 0 || len(p.Replicas) < info.replicas {
			info.replicas = len(p.Replicas)
		}
		if i == 0 || len(p.ISR) < info.inSync {
			info.inSync = len(p.ISR)
		}
	}
	return info
}

// describeSettings completes found. A topic that the broker which answers has not
// heard of yet is taken out again.
func (a *topicAdmin) describeSettings(ctx context.Context, found map[string]topicInfo, refused map[string]error) error {
	if len(found) == 0 {
		return nil
	}
	request := kmsg.NewPtrDescribeConfigsRequest()
	for name := range found {
		resource := kmsg.NewDescribeConfigsRequestResource()
		resource.ResourceType, resource.ResourceName = kmsg.ConfigResourceTypeTopic, name
		resource.ConfigNames = []string{cleanupSetting, retentionSetting, minInSyncSetting, maxMessageSetting}
		request.Resources = append(request.Resources, resource)
	}
	response, err := request.RequestWith(ctx, a.client)
	if err != nil {
		return fmt.Errorf("describe configurations of topics: %w", err)
	}
	for _, r := range response.Resources {
		info := found[r.ResourceName]
		switch err := kerr.ErrorForCode(r.ErrorCode); {
		case err == nil:
			info.settings = describedSettings(r)
			found[r.ResourceName] = info
		case kerr.IsRetriable(err):
			delete(found, r.ResourceName)
		default:
			delete(found, r.ResourceName)
			refused[r.ResourceName] = topicError("describe configuration of", r.ResourceName, err, r.ErrorMessage)
		}
	}
	return nil
}

func describedSettings(r kmsg.DescribeConfigsResponseResource) map[string]string {
	settings := map[string]string{}
	for _, c := range r.Configs {
		if c.Value != nil {
			settings[c.Name] = *c.Value
		}
	}
	return settings
}
