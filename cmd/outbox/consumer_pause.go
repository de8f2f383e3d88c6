package main

import (
	"context"
	"flag"
	"strconv"
	"time"

	"github.com/outboxgo/outbox/outboxops"
)

var consumerStatusCommand = command{
	name:    "consumer status",
	summary: "which consumer groups there are, and what is paused",
	about: `
Shows the groups that have begun to read, from the tables: for each topic in how
many partitions, when a member saved a position last, how many records Kafka had
removed unread, and who has paused it and why. Groups that run without a
database are not among them.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		group := fs.String("group", "", "`NAME` only this consumer group")
		return func(ctx context.Context, e *env) error { return consumerStatus(ctx, e, *group) }
	},
}

var consumerPauseCommand = command{
	name:    "consumer pause",
	summary: "have a consumer group handle nothing for a while",
	about: `
All members of the group look every two seconds for what is paused, and at each
start. Handlers finish what they are at, and partitions stay assigned. It lasts
until outbox consumer resume. Kafka goes on to remove old records meanwhile.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		return preparePause(fs, "pause", (*outboxops.Consumers).Pause)
	},
}

var consumerResumeCommand = command{
	name:    "consumer resume",
	summary: "end a pause of a consumer group",
	about: `
With --topic it ends the pause of this topic, without the pause of the whole
group; topics that were paused by themselves remain paused.`,
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

func (e *env) consumers(ctx context.Context) (*outboxops.Consumers, error) {
	db, err := e.connect(ctx)
	if err != nil {
		return nil, err
	}
	return outboxops.NewConsumers(db, outboxops.ConsumersConfig{Schema: e.schema})
}

// reportPause says what was done, and what may not be as expected. With more, a topic that is
// not among those of the group may have begun.
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

func consumerStatus(ctx context.Context, e *env, group string) error {
	consumers, err := e.consumers(ctx)
	if err != nil {
		return err
	}
	groups, more, err := consumers.List(ctx, outboxops.ConsumerFilter{Group: group})
	if err != nil {
		return err
	}
	if e.json {
		return e.writeJSON(map[string]any{"groups": groupsOf(groups), "more": more})
	}
	if len(groups) == 0 {
		e.printf("No consumer group has begun to read.\n")
		return nil
	}
	t := table{head: []string{"GROUP", "TOPIC", "PARTS", "SAVED", "LOST", "PAUSED", "BY", "REASON"}, flex: []int{0, 1, 6, 7}}
	for _, g := range groups {
		if g.Pause != nil || len(g.Topics) == 0 {
			t.add(append([]string{g.Group, "(all)", "", "", ""}, pauseCells(e, g.Pause)...)...)
		}
		for _, topic := range g.Topics {
			t.add(append([]string{g.Group, topic.Topic, strconv.Itoa(topic.Partitions), age(topic.SavedAt, e.now()), count(topic.Lost)}, pauseCells(e, topic.Pause)...)...)
		}
	}
	e.writeTable(t)
	if more {
		e.printf("There is more than is looked at: somebody notes very many topics.\n")
	}
	return nil
}

func pauseCells(e *env, p *outboxops.ConsumerPause) []string {
	if p == nil {
		return []string{"", "", ""}
	}
	return []string{age(p.At, e.now()), p.Operator, p.Reason}
}

// groupJSON is a consumer group in the output.
type groupJSON struct {
	Group  string           `json:"group"`
	Pause  *pauseJSON       `json:"pause"`
	Topics []groupTopicJSON `json:"topics"`
}

type pauseJSON struct {
	Operator string    `json:"operator"`
	Reason   string    `json:"reason"`
	At       time.Time `json:"at"`
}

type groupTopicJSON struct {
	Topic      string     `json:"topic"`
	Partitions int        `json:"partitions"`
	SavedAt    *time.Time `json:"saved_at"`
	Lost       int64      `json:"lost"`
	Pause      *pauseJSON `json:"pause"`
}

func groupsOf(groups []outboxops.ConsumerGroup) []groupJSON {
	pauseOf := func(p *outboxops.ConsumerPause) *pauseJSON {
		if p == nil {
			return nil
		}
		return &pauseJSON{p.Operator, p.Reason, p.At.UTC()}
	}
	all := make([]groupJSON, 0, len(groups))
	for _, g := range groups {
		one := groupJSON{Group: g.Group, Pause: pauseOf(g.Pause), Topics: []groupTopicJSON{}}
		for _, t := range g.Topics {
			one.Topics = append(one.Topics, groupTopicJSON{t.Topic, t.Partitions, optional(t.SavedAt), t.Lost, pauseOf(t.Pause)})
		}
		all = append(all, one)
	}
	return all
}
