package outboxtopics

import (
	"context"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/wait"
)

// tryTimeout bounds one try to create topics.
const tryTimeout = 10 * time.Second

// Run creates topics as [Ensure] does, and tries until all of them exist. Then it waits until ctx
// is cancelled, and returns nil. It runs beside [outbox.Relay.Run], so that a service starts, and
// takes its first events, while Kafka is unavailable. It logs the beginning and the end of an
// outage, the topics that it has created, and existing topics that are not as configured.
//
// An error is one of the configuration, and is returned at once. A right that is missing and a
// cluster of too few brokers are logged and tried again, as Kafka's administrator may change them.
func Run(ctx context.Context, opts []kgo.Opt, events *outbox.Registry, cfg Config) error {
	p, err := planFor(opts, events, cfg)
	if err != nil {
		return err
	}
	if cfg.DryRun {
		return fmt.Errorf("outbox: topics config: field DryRun is %t: that is for Ensure", cfg.DryRun)
	}
	client, err := p.newClient()
	if err != nil {
		return err
	}
	p.ensureUntilDone(ctx, client)
	client.Close()
	<-ctx.Done()
	return nil
}

// ensureUntilDone tries until all topics exist or ctx ends.
func (p *plan) ensureUntilDone(ctx context.Context, client *kgo.Client) {
	contact, making := outage.NewLog(p.cfg.Logger, "Kafka, to make topics,"), outage.NewLog(p.cfg.Logger, "making topics")
	brokers, _ := client.OptValue(kgo.SeedBrokers).([]string)
	for logged := map[string]bool{}; ; {
		answered, states, err := p.try(ctx, client)
		if ctx.Err() != nil {
			return
		}
		failed := making
		if answered {
			contact.Report(nil)
			p.logStates(states, logged)
			making.Report(err)
		} else {
			failed = contact
			contact.Report(err, "brokers", brokers)
		}
		if err == nil {
			return
		}
		wait.Sleep(ctx, failed.Backoff())
	}
}

// try creates what is missing. The first question is about the topics of events, to all brokers at
// once: its error is that of a broker, where a client would ask one broker after the other.
func (p *plan) try(ctx context.Context, client *kgo.Client) (answered bool, states []State, err error) {
	if len(p.specs) == 0 {
		return true, nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	if _, err := kafka.CheckTopics(ctx, client, topicNames(p.specs)); err != nil {
		return false, nil, err
	}
	states, err = p.ensure(ctx, client)
	return true, states, err
}

// logStates logs what was created and what differs, of each topic once.
func (p *plan) logStates(states []State, logged map[string]bool) {
	var created []string
	for _, s := range states {
		if logged[s.Topic] {
			continue
		}
		logged[s.Topic] = true
		if s.Created {
			created = append(created, s.Topic)
		}
		if len(s.Differences) > 0 {
			p.cfg.Logger.Warn("outbox: a topic is not as configured", "topic", s.Topic, "differences", fmt.Sprint(s.Differences))
		}
	}
	if len(created) > 0 {
		p.cfg.Logger.Info("outbox: topics created", "topics", created)
	}
}
