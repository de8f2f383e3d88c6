package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	rules "github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/outboxgo/outbox/outboxtopics"
	"github.com/twmb/franz-go/pkg/kgo"
)

var topicsCommand = command{
	name: "topics", synopsis: "[TOPIC…]", max: 100,
	summary: "compare topics in Kafka with the flags, create missing ones",
	about: `
Prints how topics and their {topic}.dlq differ from the flags. Without TOPIC it
takes the topics of the newest 100,000 recorded events and of failed events. It
never changes existing topics.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		t := topicsFlags{retention: span(7 * 24 * time.Hour)}
		fs.BoolVar(&t.create, "create", false, "create what is missing")
		fs.BoolVar(&t.check, "check", false, "exit with 3 if one is missing or different")
		fs.IntVar(&t.partitions, "partitions", 3, "`NUMBER` per topic (3; dead letters: 1)")
		fs.IntVar(&t.replicas, "replication", 0, "`NUMBER` of replicas (the cluster's)")
		fs.IntVar(&t.minInSync, "min-insync", 0, "`NUMBER` of in-sync replicas (the cluster's)")
		fs.Var(&t.retention, "retention", "`TIME` to keep records, 12h (7d; dead letters 30d)")
		fs.IntVar(&t.maxBytes, "max-message-bytes", 0, "`BYTES` largest batch (the cluster's)")
		return t.run
	},
}

type topicsFlags struct {
	create, check                             bool
	partitions, replicas, minInSync, maxBytes int
	retention                                 span
}

// config returns the flags as a configuration.
func (t *topicsFlags) config() outboxtopics.Config {
	return outboxtopics.Config{Partitions: t.partitions, ReplicationFactor: cmp.Or(t.replicas, -1), MinInSyncReplicas: t.minInSync,
		Retention: time.Duration(t.retention), MaxMessageBytes: t.maxBytes, DryRun: !t.create}
}

// topicJSON is a topic in the output.
type topicJSON struct {
	Topic       string           `json:"topic"`
	State       string           `json:"state"` // there, missing, created, invalid: no name for Kafka, or with .dlq, or unknown: Kafka returned an error
	Types       []string         `json:"types,omitempty"`
	Events      int64            `json:"events"`
	Partitions  int              `json:"partitions"`
	Replicas    int              `json:"replicas"`
	InSync      int              `json:"in_sync"`
	Leaderless  int              `json:"leaderless"`
	MinInSync   int64            `json:"min_insync_replicas"`
	RetentionMS int64            `json:"retention_ms"`
	MaxBytes    int64            `json:"max_message_bytes"`
	Differences []differenceJSON `json:"differences"`
}

// isKnown reports whether Kafka has said anything about the topic.
func (t topicJSON) isKnown() bool { return t.State != stateUnknown && t.State != stateInvalid }

const (
	stateMissing = "missing"
	stateUnknown = "unknown"
	stateInvalid = "invalid"
)

type differenceJSON struct {
	Setting string `json:"setting"`
	Want    string `json:"want"`
	Have    string `json:"have"`
}

func (t *topicsFlags) run(ctx context.Context, e *env) error {
	if t.partitions < 1 || t.replicas < 0 || t.minInSync < 0 || t.maxBytes < 0 {
		return usagef("--partitions, --replication, --min-insync and --max-message-bytes must be positive")
	}
	kafka, err := e.kafkaOpts()
	if err != nil {
		return err
	}
	recorded, err := recordedTopics(ctx, e)
	if err != nil {
		return err
	}
	all, err := t.ensure(ctx, kafka, recorded, len(e.args) > 0)
	if err != nil && !slices.ContainsFunc(all, topicJSON.isKnown) {
		return err // there is nothing to show
	}
	if serr := showTopics(e, all, recorded); err == nil {
		err = serr
	}
	if err == nil && t.check && slices.ContainsFunc(all, func(t topicJSON) bool {
		return t.State == stateMissing || t.State == stateInvalid || len(t.Differences) > 0
	}) {
		return errProblems
	}
	return err
}

// recordedTopics returns the topics in the arguments, or the topics of recorded events if there are no
// arguments.
func recordedTopics(ctx context.Context, e *env) ([]outboxops.RecordedTopic, error) {
	var named []outboxops.RecordedTopic
	for _, name := range e.args {
		named = append(named, outboxops.RecordedTopic{Topic: name})
	}
	if len(named) > 0 {
		return named, nil
	}
	inspector, err := e.inspector(ctx)
	if err != nil {
		return nil, err
	}
	return inspector.Topics(ctx)
}

// topicNameErrors says why Kafka takes no topic of a name, and why it takes no dead-letter topic of it. Each is nil if
// Kafka takes it.
func topicNameErrors(name string) (topic, deadLetters error) {
	return rules.Topic(name), rules.Topic(outbox.DeadLetterTopic(name))
}

// topicNames returns the topics that Kafka can have with their dead letters, and the others. Who named them gets the
// error of Kafka's rules instead. A topic of dead letters of another topic is looked at with that topic.
func topicNames(recorded []outboxops.RecordedTopic, named bool) (names, invalid []string) {
	deadLetters := map[string]bool{}
	for _, r := range recorded {
		deadLetters[outbox.DeadLetterTopic(r.Topic)] = true
	}
	for _, r := range recorded {
		switch topic, dlq := topicNameErrors(r.Topic); {
		case named:
			names = append(names, r.Topic)
		case r.Topic == "" || deadLetters[r.Topic]:
		case topic != nil || dlq != nil:
			invalid = append(invalid, r.Topic)
		default:
			names = append(names, r.Topic)
		}
	}
	return names, invalid
}

// ensure compares or creates the topics, and then reads their settings. If some topics have an error, it
// returns the others.
func (t *topicsFlags) ensure(ctx context.Context, kafka []kgo.Opt, recorded []outboxops.RecordedTopic, named bool) ([]topicJSON, error) {
	names, invalid := topicNames(recorded, named)
	out := []topicJSON{}
	for _, r := range recorded {
		if slices.Contains(invalid, r.Topic) {
			out = append(out, topicJSON{Topic: r.Topic, State: stateInvalid, Types: r.Types, Events: r.Events, Differences: []differenceJSON{}})
		}
	}
	if len(names) == 0 {
		return out, nil
	}
	states, ensureErr := outboxtopics.EnsureNamed(ctx, kafka, names, t.config())
	all := map[string]*topicJSON{}
	var order []string
	for _, name := range names {
		for _, n := range []string{name, outbox.DeadLetterTopic(name)} {
			all[n] = &topicJSON{Topic: n, State: stateMissing, Differences: []differenceJSON{}}
			order = append(order, n)
		}
	}
	infos, err := outboxtopics.Describe(ctx, kafka, order...)
	if err != nil { // the topics of the error are unknown
		for _, name := range order {
			all[name].State = stateUnknown
		}
	}
	for _, info := range infos {
		all[info.Topic].describe(info)
	}
	for _, s := range states {
		switch {
		case s.Created && t.create:
			all[s.Topic].State = "created"
		case s.Created:
			all[s.Topic].State = stateMissing
		}
		for _, d := range s.Differences {
			all[s.Topic].Differences = append(all[s.Topic].Differences, differenceJSON{d.Setting, d.Want, d.Have})
		}
	}
	for _, r := range recorded {
		if at := all[r.Topic]; at != nil {
			at.Types, at.Events = r.Types, r.Events
		}
	}
	slices.Sort(order)
	for _, name := range slices.Compact(order) {
		out = append(out, *all[name])
	}
	return out, cmp.Or(ensureErr, err)
}

// describe sets Kafka's description of the topic.
func (t *topicJSON) describe(info outboxtopics.Info) {
	t.State = "there"
	t.Partitions, t.Replicas, t.InSync, t.Leaderless = info.Partitions, info.Replicas, info.InSync, info.Leaderless
	t.MinInSync, t.RetentionMS, t.MaxBytes = setting(info, "min.insync.replicas"), setting(info, "retention.ms"), setting(info, "max.message.bytes")
}

// setting returns a number, or 0 if the broker does not return it.
func setting(info outboxtopics.Info, name string) int64 {
	n, err := strconv.ParseInt(info.Settings[name], 10, 64)
	if err != nil {
		return 0
	}
	return n
}

func showTopics(e *env, all []topicJSON, recorded []outboxops.RecordedTopic) error {
	var withoutTopic []string
	for _, r := range recorded {
		if r.Topic == "" {
			withoutTopic = r.Types
		}
	}
	if e.json {
		return e.writeJSON(map[string]any{"topics": all, "types_without_topic": append([]string{}, withoutTopic...)})
	}
	if len(all) == 0 {
		e.printf("No events are recorded: name the topics that you mean.\n")
	} else {
		e.writeTable(topicTable(all))
	}
	for _, t := range all {
		for _, d := range t.Differences {
			e.say(fmt.Sprintf("%s: %s is %s, want %s", visible(t.Topic), d.Setting, visible(d.Have), d.Want))
		}
	}
	if len(withoutTopic) > 0 {
		e.say("No topic follows from " + visible(strings.Join(withoutTopic, ", ")))
	}
	return nil
}

func topicTable(all []topicJSON) table {
	t := table{head: []string{"TOPIC", "STATE", "EVENTS", "PARTS", "REPL", "IN-SYNC", "RETENTION", "MAX-BYTES"}, flex: []int{0}}
	for _, topic := range all {
		if topic.State == stateMissing || !topic.isKnown() {
			t.add(topic.Topic, topic.State, count(topic.Events), "", "", "", "", "")
			continue
		}
		inSync := count(topic.InSync) + "/" + count(topic.MinInSync)
		t.add(topic.Topic, topic.State, count(topic.Events), count(topic.Partitions), count(topic.Replicas), inSync,
			retention(topic.RetentionMS), count(topic.MaxBytes))
	}
	return t
}

func retention(ms int64) string {
	if ms < 0 {
		return "for ever"
	}
	return length(time.Duration(ms) * time.Millisecond)
}
