package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/outboxgo/outbox/outboxtopics"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// kafka looks at the brokers and at the topics of events.
func (d *doctor) kafka(ctx context.Context) {
	opts, err := d.e.kafkaOpts()
	if err != nil {
		d.unreachable(err)
		return
	}
	brokers, auto, ok := d.brokers(ctx, opts)
	if !ok {
		return
	}
	d.about = append(d.about, [2]string{"kafka", fmt.Sprintf("%s, %s", d.e.brokers(), plural(int64(brokers), "broker", "brokers"))})
	if d.hasTables {
		d.try(ctx, check{"kafka.topics", func(d *doctor, ctx context.Context) error { return d.topics(ctx, opts, auto) }})
	}
}

func (d *doctor) unreachable(err error) {
	d.checks++
	d.add("kafka.connect", severityError, fmt.Sprintf("Kafka does not answer at %s: %s", d.e.brokers(), errorText(err)),
		"Nothing can be sent from here; relays elsewhere may see another network. Events wait in the outbox and are not lost.",
		"Check --kafka, the brokers' advertised.listeners, TLS (--kafka-tls, --kafka-ca) and the login (--kafka-user, $KAFKA_PASSWORD).")
}

// brokers asks how many there are and whether they make topics by themselves. It
// reports false if Kafka does not answer.
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
	d.try(ctx, check{"kafka.settings", func(d *doctor, ctx context.Context) (err error) {
		auto, err = makesTopics(ctx, client, response.Brokers)
		return err
	}})
	if auto {
		d.add("kafka.auto_create", severityNote, "brokers make topics that are asked for (auto.create.topics.enable)",
			"A topic that is missing or mistyped comes into being with the defaults of the cluster, often 1 partition and 1 replica.",
			"Make topics with outboxtopics.Ensure or outbox topics --create, and turn auto.create.topics.enable off.")
	}
	return len(response.Brokers), auto, true
}

// makesTopics asks the brokers for auto.create.topics.enable.
func makesTopics(ctx context.Context, client *kgo.Client, brokers []kmsg.MetadataResponseBroker) (bool, error) {
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

// topics judges those of recorded events.
func (d *doctor) topics(ctx context.Context, opts []kgo.Opt, auto bool) error {
	recorded, err := d.recorded(ctx)
	if err != nil {
		return err
	}
	var names []string
	for _, r := range recorded {
		if r.Topic != "" {
			names = append(names, r.Topic)
		}
	}
	infos, err := outboxtopics.Describe(ctx, opts, names...)
	if err != nil {
		return err
	}
	there := map[string]bool{}
	for _, info := range infos {
		there[info.Topic] = true
		d.findings = append(d.findings, topicFindings(info)...)
	}
	for _, name := range names {
		if !there[name] {
			d.add("kafka.topic.missing", severityError, "topic "+name+" is missing", missingMeans(auto),
				"outbox topics --create makes what is missing; outboxtopics.Ensure does so at the start of a service.")
		}
	}
	return nil
}

func missingMeans(auto bool) string {
	if auto {
		return "Events wait, unless the relay's client may have it made (kgo.AllowAutoTopicCreation): then it gets the defaults of the cluster."
	}
	return "Its events wait in outbox_failed until it is there; they use up no try."
}

// roomNeeded is what a topic must take so that an event with a payload of the
// Recorder's default limit, 983,040 bytes, gets through with its headers.
const roomNeeded = 983_040 + 16<<10

// topicFindings judges a topic.
func topicFindings(t outboxtopics.Info) (all []finding) {
	add := func(id, severity, what, means, do string) {
		all = append(all, finding{"kafka.topic." + id, severity, "topic " + t.Topic + ": " + what, means, do})
	}
	minInSync, limit := setting(t, "min.insync.replicas"), setting(t, "max.message.bytes")
	if t.Leaderless > 0 {
		add("leader", severityError, fmt.Sprintf("%d of %d partitions have no leader", t.Leaderless, t.Partitions),
			"Events of their keys wait in outbox_failed; they use up no try.", "Start the brokers that have these partitions.")
	}
	switch {
	case minInSync > int64(t.Replicas):
		add("min_insync", severityError, fmt.Sprintf("min.insync.replicas is %d, and there are %d replicas", minInSync, t.Replicas),
			"No record can ever be acknowledged: its events wait for ever.", "Add replicas (kafka-reassign-partitions), or lower min.insync.replicas.")
	case minInSync > int64(t.InSync):
		add("in_sync", severityError, fmt.Sprintf("a partition has %d replicas in sync, and min.insync.replicas is %d", t.InSync, minInSync),
			"It takes no records until more replicas have caught up: its events wait.", "Start the brokers that are down.")
	}
	if limit > 0 && limit < roomNeeded {
		add("max_message_bytes", severityWarning, fmt.Sprintf("max.message.bytes is %s", count(limit)),
			fmt.Sprintf("Recorder takes payloads of up to %s bytes by default. Larger ones than the topic takes, after compression, are refused and die.", count(983_040)),
			"Raise max.message.bytes of the topic to 1048588, or lower RecorderConfig.MaxPayload.")
	}
	if strings.Contains(t.Settings["cleanup.policy"], "compact") {
		add("compacted", severityWarning, "cleanup.policy is "+t.Settings["cleanup.policy"],
			"Kafka removes all but the last event of a key, read or not.", "Set cleanup.policy to delete, unless consumers need the last event only.")
	}
	return all
}
