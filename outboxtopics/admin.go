package outboxtopics

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

// admin describes and creates topics.
type admin struct {
	client  *kgo.Client
	dryRun  bool
	brokers int  // of the cluster, when topics were described last
	tooFew  bool // there are fewer brokers than a topic was to have replicas
}

// description is what Kafka says about a topic.
type description struct {
	partitions, replicas, inSync int
	leaderless                   int
	led                          bool // every partition has a leader
	settings                     map[string]string
}

// maxMessageBytes returns the topic's limit. Brokers before Kafka 2.4 do not say which
// limit a new topic would have; it is Kafka's default then.
func (d description) maxMessageBytes() int {
	if n, err := strconv.Atoi(d.settings[maxMessageSetting]); err == nil {
		return n
	}
	return kafkaMaxMessageBytes
}

const (
	// leaderTimeout bounds the wait until new topics have leaders.
	leaderTimeout      = 30 * time.Second
	leaderPollInterval = 50 * time.Millisecond
)

// ensure creates the missing topics and compares the others with their specs. It
// returns the topics that exist now. The topics for which Kafka returned an error are
// in the error instead.
func (a *admin) ensure(ctx context.Context, specs []spec) ([]State, map[string]description, error) {
	if len(specs) == 0 {
		return nil, nil, nil
	}
	found, failed, err := a.describe(ctx, topicNames(specs))
	if err != nil {
		return nil, nil, err
	}
	missing := slices.DeleteFunc(slices.Clone(specs), func(s spec) bool {
		_, ok := found[s.topic]
		return ok || failed[s.topic] != nil
	})
	created, err := a.create(ctx, missing, failed)
	maps.Copy(found, created.dryRun)
	if err == nil {
		err = a.awaitLeaders(ctx, missing, found, failed)
	}
	var states []State
	for _, s := range specs {
		if d, ok := found[s.topic]; ok {
			state := State{Topic: s.topic, Created: created.names[s.topic]}
			if !state.Created {
				state.Differences = s.differences(d)
			}
			state.Differences = s.tooFewReplicas(d, state.Differences)
			states = append(states, state)
		}
	}
	return states, found, errors.Join(append(sortedErrors(failed), err)...)
}

// sortedErrors returns errors in the order of their topics.
func sortedErrors(byTopic map[string]error) (errs []error) {
	for _, topic := range slices.Sorted(maps.Keys(byTopic)) {
		errs = append(errs, byTopic[topic])
	}
	return errs
}

// created are the topics that create created, or would create in a dry run.
type created struct {
	names  map[string]bool
	dryRun map[string]description // only in a dry run: what the topics would be
}

// create creates topics. A topic that another process has created meanwhile is not an
// error. Kafka's other errors about single topics are added to failed.
func (a *admin) create(ctx context.Context, specs []spec, failed map[string]error) (created, error) {
	result := created{names: map[string]bool{}, dryRun: map[string]description{}}
	if len(specs) == 0 {
		return result, nil
	}
	request := kmsg.NewPtrCreateTopicsRequest()
	request.ValidateOnly = a.dryRun
	for _, s := range specs {
		request.Topics = append(request.Topics, s.request())
	}
	response, err := request.RequestWith(ctx, a.client)
	if err != nil {
		return result, fmt.Errorf("create topics: %w", err)
	}
	for _, t := range response.Topics {
		err := kerr.ErrorForCode(t.ErrorCode)
		switch {
		case err == nil:
			result.names[t.Topic] = true
			if a.dryRun {
				result.dryRun[t.Topic] = description{led: true, replicas: max(0, int(t.ReplicationFactor)), settings: createdSettings(t)}
			}
		case !errors.Is(err, kerr.TopicAlreadyExists):
			a.tooFew = a.tooFew || errors.Is(err, kerr.InvalidReplicationFactor)
			failed[t.Topic] = topicError("create", t.Topic, err, t.ErrorMessage)
		}
	}
	return result, nil
}

// createdSettings returns the settings of a created topic. Brokers before Kafka 2.4 do
// not return them.
func createdSettings(t kmsg.CreateTopicsResponseTopic) map[string]string {
	settings := map[string]string{}
	for _, c := range t.Configs {
		if c.Value != nil {
			settings[c.Name] = *c.Value
		}
	}
	return settings
}

// topicError adds the topic and the broker's message to an error.
func topicError(operation, topic string, err error, message *string) error {
	if message != nil && *message != "" {
		err = fmt.Errorf("%w: %s", err, *message)
	}
	return fmt.Errorf("%s topic %s: %w", operation, topic, err)
}

// awaitLeaders waits until new topics have leaders and adds them to found. A broker learns of a
// topic shortly after the controller has created it, whichever broker was asked.
func (a *admin) awaitLeaders(ctx context.Context, specs []spec, found map[string]description, failed map[string]error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, leaderTimeout, errors.New("a new topic has no leader yet"))
	defer cancel()
	waiting := func(name string) bool { return !found[name].led && failed[name] == nil }
	for names := topicNames(specs); ; {
		names = slices.DeleteFunc(names, func(name string) bool { return !waiting(name) })
		if len(names) == 0 {
			return nil
		}
		now, failedNow, err := a.describe(ctx, names)
		if err != nil {
			return err
		}
		maps.Copy(found, now)
		maps.Copy(failed, failedNow)
		if !slices.ContainsFunc(names, waiting) {
			return nil
		}
		if wait.Sleep(ctx, leaderPollInterval); ctx.Err() != nil {
			return fmt.Errorf("await topics %v: %w", names, context.Cause(ctx))
		}
	}
}

// describe returns the topics that exist, and the errors that Kafka returned for
// others. A topic that is missing is in neither.
func (a *admin) describe(ctx context.Context, names []string) (found map[string]description, failed map[string]error, err error) {
	found, failed = map[string]description{}, map[string]error{}
	response, err := kafka.Metadata(ctx, a.client, names...)
	if err != nil {
		return nil, nil, fmt.Errorf("describe topics: %w", err)
	}
	a.brokers = len(response.Brokers)
	for _, t := range response.Topics {
		if t.Topic == nil {
			continue
		}
		switch err := kerr.ErrorForCode(t.ErrorCode); {
		case err == nil:
			found[*t.Topic] = newDescription(t)
		case !kerr.IsRetriable(err): // Kafka calls the error of a missing topic retriable
			failed[*t.Topic] = topicError("describe", *t.Topic, err, nil)
		}
	}
	return found, failed, a.describeSettings(ctx, found, failed)
}

// newDescription describes a topic by its partitions, without settings.
func newDescription(t kmsg.MetadataResponseTopic) description {
	d := description{partitions: len(t.Partitions), led: len(t.Partitions) > 0}
	for i, p := range t.Partitions {
		if p.Leader < 0 {
			d.led = false
			d.leaderless++
		}
		if i == 0 || len(p.Replicas) < d.replicas {
			d.replicas = len(p.Replicas)
		}
		if i == 0 || len(p.ISR) < d.inSync {
			d.inSync = len(p.ISR)
		}
	}
	return d
}

// describeSettings adds the settings to found. It removes a topic from found if the
// broker that answers does not know it yet.
func (a *admin) describeSettings(ctx context.Context, found map[string]description, failed map[string]error) error {
	if len(found) == 0 {
		return nil
	}
	request := kafka.SettingsRequest(slices.Collect(maps.Keys(found)), cleanupSetting, retentionSetting, deleteRetentionSetting,
		minInSyncSetting, maxMessageSetting)
	response, err := request.RequestWith(ctx, a.client)
	if err != nil {
		return fmt.Errorf("describe configurations of topics: %w", err)
	}
	for _, r := range response.Resources {
		d := found[r.ResourceName]
		switch err := kerr.ErrorForCode(r.ErrorCode); {
		case err == nil:
			d.settings = kafka.SettingsOf(r)
			found[r.ResourceName] = d
		case kerr.IsRetriable(err):
			delete(found, r.ResourceName)
		default:
			delete(found, r.ResourceName)
			failed[r.ResourceName] = topicError("describe configuration of", r.ResourceName, err, r.ErrorMessage)
		}
	}
	return nil
}
