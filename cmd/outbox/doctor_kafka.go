package main

import (
	"context"
	"fmt"
	"slices"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/outboxtopics"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// The checks of Kafka. kafka completes those that need a client.
var (
	kafkaCheck      = check{name: "kafka.connect", ids: []string{"kafka.connect"}}
	autoCreateCheck = check{name: "kafka.settings", ids: []string{"kafka.auto_create"}}
	topicsCheck     = check{name: "kafka.topics", ids: []string{"kafka.topic.missing", "kafka.topic.leader", "kafka.topic.min_insync",
		"kafka.topic.in_sync", "kafka.topic.max_message_bytes", "kafka.topic.compacted"}}
)

// kafka checks the brokers and the topics of events.
func (d *doctor) kafka(ctx context.Context) {
	d.checks++
	opts, err := d.e.kafkaOpts()
	if err != nil {
		d.unreachable(err)
		return
	}
	brokers, auto, ok := d.brokers(ctx, opts)
	if !ok {
		return
	}
	d.about = append(d.about, [2]string{"kafka", fmt.Sprintf("%s, %s, as seen from here", d.e.brokers(), plural(int64(brokers), "broker", "brokers"))})
	if d.hasTables {
		c := topicsCheck
		c.make = func(d *doctor, ctx context.Context) error { return d.topics(ctx, opts, auto) }
		d.try(ctx, c)
		c = gapsCheck
		c.make = func(d *doctor, ctx context.Context) error { return d.gapsInKafka(ctx, opts) }
		d.try(ctx, c)
		c = exactlyCheck
		c.make = func(d *doctor, ctx context.Context) error { return d.exactlyOnce(ctx, opts, brokers) }
		d.try(ctx, c)
	}
}

func (d *doctor) unreachable(err error) {
	d.add("kafka.connect", severityError, fmt.Sprintf("Kafka does not answer at %s: %s", d.e.brokers(), errorText(err)),
		"Nothing can be sent from here; relays elsewhere may see another network. Events wait in the outbox and are not lost."+d.said,
		"Check --kafka, the brokers' advertised.listeners, TLS (--kafka-tls, --kafka-ca) and the login (--kafka-user, $KAFKA_PASSWORD).")
}

// brokers returns the number of brokers, and whether they create topics automatically. ok is false if Kafka
// does not answer.
func (d *doctor) brokers(ctx context.Context, opts []kgo.Opt) (brokers int, auto, ok bool) {
	ctx, cancel := d.e.step(ctx)
	defer cancel()
	client, err := kgo.NewClient(opts...)
	if err != nil {
		d.unreachable(err)
		return 0, false, false
	}
	defer client.Close()
	request := kmsg.NewPtrMetadataRequest()
	request.Topics = []kmsg.MetadataRequestTopic{}
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		d.unreachable(err)
		return 0, false, false
	}
	c := autoCreateCheck
	c.make = func(_ *doctor, ctx context.Context) (err error) {
		auto, err = autoCreatesTopics(ctx, client, response.Brokers)
		return err
	}
	if d.wants(autoCreateCheck, topicsCheck) { // the setting decides what a missing topic means
		d.perform(ctx, c)
	}
	if auto {
		d.add("kafka.auto_create", severityNote, "brokers create topics that clients ask for (auto.create.topics.enable)",
			"A topic that is missing or mistyped is created with the defaults of the cluster, often 1 partition and 1 replica.",
			"Create topics with outboxtopics.Ensure or outbox topics --create, and turn auto.create.topics.enable off.")
	}
	return len(response.Brokers), auto, true
}

// autoCreatesTopics asks the brokers for auto.create.topics.enable.
func autoCreatesTopics(ctx context.Context, client *kgo.Client, brokers []kmsg.MetadataResponseBroker) (bool, error) {
	for _, broker := range brokers {
		request := kmsg.NewPtrDescribeConfigsRequest()
		resource := kmsg.NewDescribeConfigsRequestResource()
		resource.ResourceType, resource.ResourceName = kmsg.ConfigResourceTypeBroker, fmt.Sprint(broker.NodeID)
		resource.ConfigNames = []string{"auto.create.topics.enable"}
		request.Resources = append(request.Resources, resource)
		response, err := request.RequestWith(ctx, client)
		if err != nil {
			return false, err
		}
		for _, r := range response.Resources {
			if err := kerr.ErrorForCode(r.ErrorCode); err != nil {
				return false, fmt.Errorf("settings of broker %d: %w", broker.NodeID, err)
			}
			for _, c := range r.Configs {
				if c.Value != nil && *c.Value == "true" {
					return true, nil
				}
			}
		}
	}
	return false, nil
}

// eventTopics returns the topics of recorded events, without impossible names, which are found as events.topic.
func (d *doctor) eventTopics(ctx context.Context) (names []string, err error) {
	recorded, err := d.recorded(ctx)
	for _, r := range recorded {
		if err, _ := topicNameErrors(r.Topic); err == nil {
			names = append(names, r.Topic)
		}
	}
	return names, err
}

// topics checks the topics of recorded events.
func (d *doctor) topics(ctx context.Context, opts []kgo.Opt, auto bool) error {
	names, err := d.eventTopics(ctx)
	if err != nil {
		return err
	}
	infos, err := outboxtopics.Describe(ctx, opts, names...)
	exists := map[string]bool{}
	for _, info := range infos {
		exists[info.Topic] = true
		d.findings = append(d.findings, topicFindings(info)...)
	}
	names = slices.DeleteFunc(names, func(name string) bool { return exists[name] })
	for _, name := range missingTopics(ctx, opts, names, err) {
		do := "Create it with outbox topics --create, or with outboxtopics.Ensure at the start of the service."
		if _, dlqErr := topicNameErrors(name); dlqErr != nil {
			do = "Create it with outboxtopics.Ensure and Config.DeadLetterTopic: no dead-letter topic can have the name " + outbox.DeadLetterTopic(name) + "."
		}
		d.add("kafka.topic.missing", severityError, "topic "+name+" is missing", missingMeans(auto), do)
	}
	return err
}

// maxAlone is how many topics are described one by one.
const maxAlone = 20

// missingTopics returns the topics that are missing of those that Kafka did not describe. err is the error of that
// description: it is about some of these topics, which may exist. So Kafka describes each topic once more, alone.
func missingTopics(ctx context.Context, opts []kgo.Opt, names []string, err error) (missing []string) {
	if err == nil {
		return names
	}
	for _, name := range names[:min(len(names), maxAlone)] {
		if !kafka.IsAnswer(err) { // Kafka does not answer
			break
		}
		infos, alone := outboxtopics.Describe(ctx, opts, name)
		if alone != nil {
			err = alone
		} else if len(infos) == 0 {
			missing = append(missing, name)
		}
	}
	return missing
}

func missingMeans(auto bool) string {
	if auto {
		return "Events wait, unless the relay's client creates topics (kgo.AllowAutoTopicCreation): then it gets the defaults of the cluster."
	}
	return "Its events wait in outbox_failed until the topic exists; that uses up no try."
}

// neededMaxBytes is the max.message.bytes that a topic needs for an event whose payload
// has the Recorder's default limit of 983,040 bytes, with its headers.
const neededMaxBytes = 983_040 + 16<<10

// topicFindings checks the settings of a topic.
func topicFindings(t outboxtopics.Info) (all []finding) {
	add := func(id, severity, what, means, do string) {
		all = append(all, finding{"kafka.topic." + id, severity, "topic " + t.Topic + ": " + what, means, do})
	}
	minInSync, limit := setting(t, "min.insync.replicas"), setting(t, "max.message.bytes")
	if t.Leaderless > 0 {
		add("leader", severityError, fmt.Sprintf("%d of %d partitions have no leader", t.Leaderless, t.Partitions),
			"Events of their keys wait in outbox_failed; that uses up no try.", "Start the brokers that have these partitions.")
	}
	switch {
	case minInSync > int64(t.Replicas):
		add("min_insync", severityError, fmt.Sprintf("min.insync.replicas is %d, and there are %d replicas", minInSync, t.Replicas),
			"No record can ever be acknowledged: its events wait for ever.", "Add replicas (kafka-reassign-partitions), or lower min.insync.replicas.")
	case minInSync > int64(t.InSync):
		add("in_sync", severityError, fmt.Sprintf("a partition has %d replicas in sync, and min.insync.replicas is %d", t.InSync, minInSync),
			"It takes no records until more replicas have caught up: its events wait.", "Start the brokers that are down.")
	}
	if limit > 0 && limit < neededMaxBytes {
		add("max_message_bytes", severityWarning, fmt.Sprintf("max.message.bytes is %s", count(limit)),
			fmt.Sprintf("Recorder takes payloads of up to %s bytes by default. Kafka rejects an event that is larger than the limit of its topic, after compression, and it becomes dead.", count(983_040)),
			"Raise max.message.bytes of the topic to 1048588, or lower RecorderConfig.MaxPayload.")
	}
	if kafka.Compacts(t.Settings) {
		add("compacted", severityWarning, "cleanup.policy is "+t.Settings[kafka.CleanupPolicy],
			"Kafka deletes all but the last event of each key, whether it was read or not. An event that is retried after a later one of its key was sent is the last one: Kafka then keeps the older value, and forgets the newer one. That happens with PassFailedKeys, and to dead events without HoldDead.",
			"Set cleanup.policy to delete, unless consumers need only the last event. Then set RelayConfig.HoldDead (outbox relay --hold-dead), and not PassFailedKeys.")
	}
	return all
}
