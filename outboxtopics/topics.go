// Package outboxtopics creates the Kafka topics of a service: those of the events in
// its [outbox.Registry], and one for the dead letters of each.
//
// [Run] is for a service: it runs beside relay and consumer, and waits for Kafka. [Ensure] is
// for a deployment step. Both create the topics that are missing and change none that exists;
// they say where an existing topic differs from the [Config]. [EnsureNamed] and [Describe] are
// for tools that know the names of topics and have no registry.
package outboxtopics

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/kafka"
)

// State is what [Ensure] found or created.
type State struct {
	// Topic is its name.
	Topic string
	// Created is set if the topic was missing and Ensure created it, or would have
	// but for the dry run.
	Created bool
	// Differences are the settings of an existing topic that are not as configured. A topic, also one that was
	// created, has one if the cluster's default gives it fewer replicas than min.insync.replicas: it takes no records.
	Differences []Difference
}

// Difference is a setting of an existing topic that is not as configured.
type Difference struct {
	// Setting is partitions, replication.factor, or Kafka's name for it, such as
	// retention.ms.
	Setting string
	// Want is what the configuration says, Have what the topic has. Replicas are
	// those of the partition that has the fewest.
	Want, Have string
}

// String returns for example "retention.ms is 3600000, want 604800000".
func (d Difference) String() string {
	return fmt.Sprintf("%s is %s, want %s", d.Setting, d.Have, d.Want)
}

// Ensure creates the topics to which the events of a registry go, those of Config.Topics, and a topic for the
// dead letters of each, where they are missing. It does not change existing topics:
// where they are not as configured, it returns the differences. The states are sorted
// by topic.
//
// Several processes may call it at the same time. When it returns, the topics that
// it created have leaders. It makes one Kafka client from opts and closes it; it
// refuses the options that [outbox.NewRelay] refuses. The client needs the right to
// describe the topics and their configurations, and to create what is missing.
//
// The error names every bad field, and every topic for which Kafka returned an error;
// the states are then those of the other topics. If the topic of the events could not
// be created, its dead-letter topic is not created either.
func Ensure(ctx context.Context, opts []kgo.Opt, events *outbox.Registry, cfg Config) ([]State, error) {
	p, err := planFor(opts, events, cfg)
	if err != nil {
		return nil, err
	}
	return p.ensureOnce(ctx)
}

// EnsureNamed is [Ensure] for tools that know the names of topics and have no
// registry. A name may be there more than once.
func EnsureNamed(ctx context.Context, opts []kgo.Opt, topics []string, cfg Config) ([]State, error) {
	p, err := newPlan(opts, topics, cfg)
	if err != nil {
		return nil, err
	}
	return p.ensureOnce(ctx)
}

// plan is what has to exist.
type plan struct {
	opts        []kgo.Opt
	given, cfg  Config // without and with defaults
	specs       []spec // of the topics of events
	deadLetters map[string][]string
}

// planFor returns the plan for the topics of a registry.
func planFor(opts []kgo.Opt, events *outbox.Registry, cfg Config) (*plan, error) {
	if events == nil {
		err := errors.Join(cfg.withDefaults().validate(cfg), kafka.CheckProducerOpts(opts), fmt.Errorf("registry %w", outbox.ErrNilArgument))
		return nil, fmt.Errorf("outbox: topics config: %w", err)
	}
	var topics []string
	for _, registration := range events.Registrations() {
		topics = append(topics, registration.Topic)
	}
	return newPlan(opts, topics, cfg)
}

func newPlan(opts []kgo.Opt, topics []string, given Config) (*plan, error) {
	cfg := given.withDefaults()
	errs := []error{cfg.validate(given), kafka.CheckProducerOpts(opts)}
	for _, topic := range topics {
		if err := check.Topic(topic); err != nil {
			errs = append(errs, fmt.Errorf("topic %w", err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("outbox: topics config: %w", err)
	}
	specs, err := cfg.eventTopics(slices.Concat(topics, cfg.Topics))
	deadLetters, derr := cfg.deadLetterTopics(specs)
	if err := errors.Join(err, derr); err != nil {
		return nil, fmt.Errorf("outbox: topics config: %w", err)
	}
	return &plan{opts: opts, given: given, cfg: cfg, specs: specs, deadLetters: deadLetters}, nil
}

// newClient returns a client made from the options, which newPlan has checked.
func (p *plan) newClient() (*kgo.Client, error) {
	client, err := kafka.NewClient(p.opts)
	if err != nil {
		return nil, fmt.Errorf("outbox: make Kafka client: %w", err)
	}
	return client, nil
}

// ensureOnce creates what is missing with a client of its own.
func (p *plan) ensureOnce(ctx context.Context) ([]State, error) {
	client, err := p.newClient()
	if err != nil {
		return nil, err
	}
	defer client.Close()
	states, err := p.ensure(ctx, client)
	if err != nil {
		err = fmt.Errorf("outbox: topics: %w", err)
	}
	return states, err
}

// ensure creates what is missing.
func (p *plan) ensure(ctx context.Context, client *kgo.Client) ([]State, error) {
	a := &admin{client: client, dryRun: p.cfg.DryRun}
	states, err := a.ensureAll(ctx, p.cfg, p.specs, p.deadLetters)
	if a.tooFew {
		err = errors.Join(err, p.given.tooFewBrokers(a.brokers))
	}
	return states, err
}

// Info is what Kafka says about a topic.
type Info struct {
	// Topic is its name.
	Topic string
	// Partitions is how many it has.
	Partitions int
	// Replicas and InSync are those of the partition that has the fewest.
	Replicas, InSync int
	// Leaderless is how many partitions have no leader: nothing can be sent there.
	Leaderless int
	// Settings are those of the topic and the cluster's defaults for it, by Kafka's
	// names.
	Settings map[string]string
}

// Describe returns the topics that exist, sorted by name. It creates none. It makes one Kafka
// client from opts and closes it. The error names every topic that Kafka does not describe; the
// others are returned with the error.
func Describe(ctx context.Context, opts []kgo.Opt, topics ...string) ([]Info, error) {
	if len(topics) == 0 {
		return nil, nil
	}
	client, err := kafka.NewClient(opts)
	if err != nil {
		return nil, fmt.Errorf("outbox: make Kafka client: %w", err)
	}
	defer client.Close()
	found, failed, err := (&admin{client: client}).describe(ctx, topics)
	var infos []Info
	for _, name := range slices.Sorted(maps.Keys(found)) {
		t := found[name]
		infos = append(infos, Info{Topic: name, Partitions: t.partitions, Replicas: t.replicas,
			InSync: t.inSync, Leaderless: t.leaderless, Settings: t.settings})
	}
	if err := errors.Join(append(sortedErrors(failed), err)...); err != nil {
		return infos, fmt.Errorf("outbox: %w", err)
	}
	return infos, nil
}

// ensureAll creates the topics of events before those of their dead letters, whose
// limits depend on theirs.
func (a *admin) ensureAll(ctx context.Context, cfg Config, specs []spec, deadLetters map[string][]string) ([]State, error) {
	states, found, err := a.ensure(ctx, specs)
	var dlqSpecs []spec
	for _, name := range slices.Sorted(maps.Keys(deadLetters)) {
		if s, ok := cfg.deadLetterSpec(name, deadLetters[name], found); ok {
			dlqSpecs = append(dlqSpecs, s)
		}
	}
	dlqStates, _, derr := a.ensure(ctx, dlqSpecs)
	states = append(states, dlqStates...)
	slices.SortFunc(states, func(a, b State) int { return strings.Compare(a.Topic, b.Topic) })
	return states, errors.Join(err, derr)
}
