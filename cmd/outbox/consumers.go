package main

import (
	"context"
	"errors"
	"flag"
	"slices"
	"strconv"
	"time"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/outboxops"
)

var consumersCommand = command{
	name:    "consumers",
	summary: "consumer groups: lag, pauses, processes, deliveries",
	about: `
Shows for each topic of a group: partitions, records to read (LAG, with
--kafka), age of the last saved position (SAVED), records that Kafka removed
unread (LOST), and pauses. Then processes, deliveries that are not done, events
for which workers have no deliveries yet, and dead-letter topics (with --kafka).
Groups without a database are not shown.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		group := fs.String("group", "", "`NAME` only this consumer group")
		return func(ctx context.Context, e *env) error { return consumers(ctx, e, *group) }
	},
}

// groupsView is the data about consumer groups.
type groupsView struct {
	groups     []outboxops.ConsumerGroup
	more       bool
	lag        map[string]map[string]int64 // by group and topic; nil without Kafka
	dead       []outboxops.DeadLetterTopic // nil without Kafka
	deliveries []outboxops.DeliveryCount
	workers    []outboxops.DeliveryGroup
	states     groupsState
	unknown    error // what Kafka does not tell
}

func consumers(ctx context.Context, e *env, group string) error {
	v, err := readGroups(ctx, e, group)
	if err != nil {
		return err
	}
	if e.json {
		err := e.writeJSON(map[string]any{"groups": groupsOf(v), "more": v.more, "deliveries": deliveriesOf(v.deliveries), "workers": workersOf(v.workers), "states": groupStatesOf(v.states), "dead_letters": deadLettersOf(v.dead)})
		return errors.Join(err, v.unknown)
	}
	showGroups(e, v)
	showStates(e, v.states)
	showDeliveries(e, v.deliveries)
	showWorkers(e, v.workers)
	showDeadLetters(e, v.dead)
	return v.unknown
}

func readGroups(ctx context.Context, e *env, group string) (v groupsView, err error) {
	consumers, err := e.consumers(ctx)
	if err != nil {
		return v, err
	}
	deliveries, err := e.deliveries(ctx)
	if err != nil {
		return v, err
	}
	v.groups, v.more, err = consumers.List(ctx, outboxops.ConsumerFilter{Group: group})
	if err != nil {
		return v, err
	}
	if v.deliveries, err = deliveries.Count(ctx, outboxops.DeliveryFilter{Group: group}); err != nil {
		return v, err
	}
	if v.workers, err = deliveries.Groups(ctx); err != nil {
		return v, err
	}
	v.workers = slices.DeleteFunc(v.workers, func(g outboxops.DeliveryGroup) bool { return group != "" && g.Group != group })
	if v.states, err = lookAtGroups(ctx, e, group); err != nil || e.brokers() == "" {
		return v, err
	}
	opts, err := e.kafkaOpts()
	if err != nil {
		return v, err
	}
	if v.lag, v.unknown = consumers.Lag(ctx, opts, v.groups); v.unknown != nil && !kafka.IsAnswer(v.unknown) {
		return v, nil // nor does Kafka answer about dead letters
	}
	v.dead, err = consumers.DeadLetters(ctx, opts, v.groups)
	v.unknown = errors.Join(v.unknown, err)
	return v, nil
}

func (e *env) consumers(ctx context.Context) (*outboxops.Consumers, error) {
	db, err := e.connect(ctx)
	if err != nil {
		return nil, err
	}
	return outboxops.NewConsumers(db, outboxops.ConsumersConfig{Schema: e.schema})
}

func (e *env) deliveries(ctx context.Context) (*outboxops.Deliveries, error) {
	db, err := e.connect(ctx)
	if err != nil {
		return nil, err
	}
	return outboxops.NewDeliveries(db, outboxops.DeliveriesConfig{Schema: e.schema})
}

func showGroups(e *env, v groupsView) {
	switch {
	case len(v.groups) > 0:
	case len(v.states.Members)+len(v.states.Counts)+len(v.deliveries)+len(v.workers) == 0:
		e.printf("No consumer group has begun to read.\n")
		return
	default: // what there is follows
		e.printf("No consumer group has saved a position in Kafka.\n")
		return
	}
	t := table{head: []string{"GROUP", "TOPIC", "PARTS", "LAG", "SAVED", "LOST", "PAUSED", "BY", "REASON"}, flex: []int{0, 1, 7, 8}}
	for _, g := range v.groups {
		if g.Pause != nil || len(g.Topics) == 0 {
			t.add(append([]string{g.Group, "(all)", "", "", "", ""}, pauseCells(e, g.Pause)...)...)
		}
		for _, topic := range g.Topics {
			lag := "-"
			if n := v.lagOf(g.Group, topic.Topic); n != nil {
				lag = count(*n)
			}
			t.add(append([]string{g.Group, topic.Topic, strconv.Itoa(topic.Partitions), lag, age(topic.SavedAt, e.dbNow()), count(topic.Lost)}, pauseCells(e, topic.Pause)...)...)
		}
	}
	e.writeTable(t)
	if v.more {
		e.printf("There is more than is looked at: somebody notes very many topics.\n")
	}
}

// lagOf returns the number of records of a topic that a group still has to read, or nil if it is unknown.
func (v groupsView) lagOf(group, topic string) *int64 {
	n, ok := v.lag[group][topic]
	if !ok {
		return nil
	}
	return &n
}

func pauseCells(e *env, p *outboxops.ConsumerPause) []string {
	if p == nil {
		return []string{"", "", ""}
	}
	return []string{age(p.At, e.dbNow()), p.Operator, p.Reason}
}

// showStates shows what groups have to handle, and their processes.
func showStates(e *env, s groupsState) {
	for _, t := range []table{groupTable(s, e.dbNow()), memberTable(s)} {
		if len(t.rows) > 0 {
			e.printf("\n")
			e.writeTable(t)
		}
	}
}

func showDeliveries(e *env, counts []outboxops.DeliveryCount) {
	if len(counts) == 0 {
		return
	}
	t := table{head: []string{"OWED", "STATUS", "HELD", "OLDEST", "DUE", "GROUP", "ACTION", "TOPIC"}, flex: []int{5, 6, 7}}
	for _, c := range counts {
		t.add(short.TallyOf(c.Deliveries, c.More).String(), c.Status, heldOf(c).String(), age(c.Oldest, e.dbNow()), due(c.Due, e.dbNow()), c.Group, c.Action, c.Stream)
	}
	e.printf("\n")
	e.writeTable(t)
}

// heldOf returns how many of the deliveries hold their keys, which only dead ones do.
func heldOf(c outboxops.DeliveryCount) tally {
	return short.TallyOf(c.Held, c.More && c.Status == outboxops.DeliveryDead)
}

// due writes when something is due, or for how long it has been.
func due(t, now time.Time) string {
	switch {
	case t.IsZero():
		return "-"
	case t.After(now):
		return "in " + length(t.Sub(now))
	}
	return length(now.Sub(t)) + " ago"
}

func showWorkers(e *env, groups []outboxops.DeliveryGroup) {
	space := "\n"
	for _, g := range groups {
		switch {
		case g.State == outboxops.SubscriptionStarting:
			e.printf("%sgroup %s: starting since %s, with the events of the archive\n", space, visible(g.Group), clock(g.ChangedAt))
		case g.State != outboxops.SubscriptionActive:
			e.printf("%sgroup %s: %s since %s, with relay %s\n", space, visible(g.Group), visible(string(g.State)), clock(g.ChangedAt), visible(g.Relay))
		case g.Pending > 0:
			e.printf("%sgroup %s: %s no deliveries yet, the oldest is %s old\n", space, visible(g.Group), eventsHave(g), age(g.Oldest, e.dbNow()))
		default:
			continue
		}
		space = ""
	}
}

func showDeadLetters(e *env, topics []outboxops.DeadLetterTopic) {
	if len(topics) == 0 {
		return
	}
	t := table{head: []string{"RECORDS", "DEAD-LETTER TOPIC", "OF"}, flex: []int{1, 2}}
	for _, d := range topics {
		t.add(count(d.Records), d.Topic, d.Of)
	}
	e.printf("\n")
	e.writeTable(t)
}

// deadLettersJSON is a dead-letter topic in the output.
type deadLettersJSON struct {
	Topic   string `json:"topic"`
	Of      string `json:"of"`
	Records int64  `json:"records"`
}

func deadLettersOf(topics []outboxops.DeadLetterTopic) []deadLettersJSON {
	all := make([]deadLettersJSON, 0, len(topics))
	for _, d := range topics {
		all = append(all, deadLettersJSON{d.Topic, d.Of, d.Records})
	}
	return all
}

// eventsHave describes the number of events behind the position of a group.
func eventsHave(g outboxops.DeliveryGroup) string {
	if g.PendingMore {
		return "more than " + count(g.Pending) + " events have"
	}
	return plural(g.Pending, "event has", "events have")
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
	Lag        *int64     `json:"lag"`
	SavedAt    *time.Time `json:"saved_at"`
	Lost       int64      `json:"lost"`
	Pause      *pauseJSON `json:"pause"`
}

func groupsOf(v groupsView) []groupJSON {
	pauseOf := func(p *outboxops.ConsumerPause) *pauseJSON {
		if p == nil {
			return nil
		}
		return &pauseJSON{p.Operator, p.Reason, p.At.UTC()}
	}
	all := make([]groupJSON, 0, len(v.groups))
	for _, g := range v.groups {
		one := groupJSON{Group: g.Group, Pause: pauseOf(g.Pause), Topics: []groupTopicJSON{}}
		for _, t := range g.Topics {
			one.Topics = append(one.Topics, groupTopicJSON{t.Topic, t.Partitions, v.lagOf(g.Group, t.Topic), optional(t.SavedAt), t.Lost, pauseOf(t.Pause)})
		}
		all = append(all, one)
	}
	return all
}

// deliveriesJSON is a number of equal deliveries in the output.
type deliveriesJSON struct {
	Group      string     `json:"group"`
	Topic      string     `json:"topic"`
	Action     string     `json:"action"`
	Status     string     `json:"status"`
	Deliveries int        `json:"deliveries"`
	More       bool       `json:"more"`
	Held       int        `json:"held"`
	Oldest     time.Time  `json:"oldest"`
	Due        *time.Time `json:"due"`
}

func deliveriesOf(counts []outboxops.DeliveryCount) []deliveriesJSON {
	all := make([]deliveriesJSON, 0, len(counts))
	for _, c := range counts {
		all = append(all, deliveriesJSON{c.Group, c.Stream, c.Action, c.Status, c.Deliveries, c.More, c.Held, c.Oldest.UTC(), optional(c.Due)})
	}
	return all
}

// workersJSON is a group of workers in the output.
type workersJSON struct {
	Group       string     `json:"group"`
	CreatedAt   time.Time  `json:"created_at"`
	State       string     `json:"state"`
	Relay       string     `json:"relay"`
	ChangedAt   time.Time  `json:"changed_at"`
	Pending     int64      `json:"pending"`
	PendingMore bool       `json:"pending_more"`
	Oldest      *time.Time `json:"oldest"`
	ProgressAt  *time.Time `json:"progress_at"`
}

func workersOf(groups []outboxops.DeliveryGroup) []workersJSON {
	all := make([]workersJSON, 0, len(groups))
	for _, g := range groups {
		all = append(all, workersJSON{g.Group, g.CreatedAt.UTC(), string(g.State), g.Relay, g.ChangedAt.UTC(), g.Pending, g.PendingMore, optional(g.Oldest), optional(g.ProgressAt)})
	}
	return all
}
