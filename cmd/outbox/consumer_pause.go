package main

import (
	"context"
	"flag"

	"github.com/outboxgo/outbox/outboxops"
)

var consumerPauseCommand = command{
	name:    "consumer pause",
	summary: "pause the handlers of a consumer group, or of one topic",
	about: `
Its processes finish their current events, and after two seconds begin no
others. Restarts do not end the pause. Danger: Kafka removes old records
meanwhile.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		return preparePause(fs, "pause", (*outboxops.Consumers).Pause)
	},
}

var consumerResumeCommand = command{
	name:    "consumer resume",
	summary: "end a pause of a consumer group",
	about: `
Without --topic it ends the pause of the whole group: topics that were paused
with --topic stay paused.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		return preparePause(fs, "resume", (*outboxops.Consumers).Resume)
	},
}

type pauseAction func(c *outboxops.Consumers, ctx context.Context, group, topic string, why outboxops.AuditInfo) error

func preparePause(fs *flag.FlagSet, action string, do pauseAction) func(context.Context, *env) error {
	var why auditFlags
	why.define(fs)
	group := fs.String("group", "", "`NAME` consumer group; required")
	topic := fs.String("topic", "", "`NAME` only this topic")
	return func(ctx context.Context, e *env) error {
		if *group == "" {
			return usagef("--group is missing")
		}
		info, err := why.info(e)
		if err != nil {
			return err
		}
		consumers, err := e.consumers(ctx)
		if err != nil {
			return err
		}
		if err := do(consumers, ctx, *group, *topic, info); err != nil {
			return err
		}
		groups, more, err := consumers.List(ctx, outboxops.ConsumerFilter{Group: *group})
		if err != nil {
			return err
		}
		return reportPause(e, action, *group, *topic, groups, more)
	}
}

// reportPause reports the action, and warns about unexpected states. If more is set, not all groups were
// read, so a topic that is missing in groups may still have begun.
func reportPause(e *env, action, group, topic string, groups []outboxops.ConsumerGroup, more bool) error {
	begun, paused := more, []string{}
	for _, g := range groups {
		if g.Pause != nil {
			paused = append(paused, "")
		}
		for _, t := range g.Topics {
			begun = begun || t.Partitions > 0 && (topic == "" || t.Topic == topic)
			if t.Pause != nil {
				paused = append(paused, t.Topic)
			}
		}
	}
	if e.json {
		return e.writeJSON(map[string]any{"action": action, "group": group, "topic": topic, "begun": begun, "paused": paused})
	}
	e.printf("%s: %s of group %s\n", action, topicText(topic), visible(group))
	if action == "pause" && !begun {
		e.printf("No member of this group has begun with it here: are the names right?\n")
	}
	for _, t := range paused {
		if action == "resume" {
			e.printf("Still paused: %s\n", topicText(t))
		}
	}
	return nil
}

func topicText(topic string) string {
	if topic == "" {
		return "all topics"
	}
	return "topic " + visible(topic)
}
