package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/schedule"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/outboxgo/outbox/internal/absent"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"
)

const (
	badRate     = 10               // events per second for the bad topic
	badPatience = 30 * time.Second // until what was recorded for it waits
	badLook     = 50 * time.Millisecond
	strayEvent  = -1 // number of a good event that no lap measures
)

// badTopics compares the relay that also has events for a topic that takes nothing
// with the relay that has none. Its Kafka client has franz-go's defaults.
func (t *track) badTopics(ctx context.Context) error {
	for _, prepare := range []func(*bench, context.Context) (name, topic string, err error){
		(*bench).missingTopic, (*bench).shortTopic, (*bench).deniedTopic,
	} {
		name, topic, err := prepare(t.bench, ctx)
		if errors.Is(err, kerr.SecurityDisabled) {
			t.report.Add(report.Failed("bad-topics/"+name, "the broker has no authorizer"))
			continue
		}
		if err == nil {
			err = t.raceBeside(ctx, t, name, topic)
		}
		if err != nil {
			return fmt.Errorf("%s topic: %w", name, err)
		}
	}
	return nil
}

func (b *bench) missingTopic(context.Context) (name, topic string, err error) {
	return "missing", b.TopicName("missing"), nil
}

// shortTopic makes a topic that wants one replica more than there is.
func (b *bench) shortTopic(ctx context.Context) (name, topic string, err error) {
	topic = b.TopicName("short")
	err = absent.CreateTopic(ctx, b.cfg.Brokers, topic, int32(b.cfg.partitions), map[string]string{"min.insync.replicas": "2"})
	if err == nil {
		b.Topics = append(b.Topics, topic)
	}
	return "short-of-replicas", topic, err
}

// deniedTopic makes a topic that every client may describe, and none may write to.
func (b *bench) deniedTopic(ctx context.Context) (name, topic string, err error) {
	topic, err = b.NewTopic(ctx, "denied", b.cfg.partitions)
	if err == nil {
		err = b.Deny(ctx, topic)
	}
	return "denied", topic, err
}

// badPlaced is an event for the bad topic.
type badPlaced struct{ orders.Placed }

func (e badPlaced) order() string { return e.Order }

// badTrack is a track whose relay also has events for a bad topic.
type badTrack struct {
	*track
	topic string
	bad   *outbox.Recorder
	made  int // events for the bad topic
}

func (b *bench) newBadTrack(ctx context.Context, name, topic string) (*badTrack, error) {
	events, err := outbox.NewRegistry(orders.Source, outbox.Event("acme.bench-"+b.ID+"-bad.placed.v1", orders.Aggregate, badPlaced.order).Topic(topic))
	if err != nil {
		return nil, err
	}
	t := &badTrack{topic: topic}
	if t.track, err = b.newTrack(ctx, "bad_"+name); err != nil {
		return nil, err
	}
	t.bad, err = outbox.NewRecorder(events, outbox.RecorderConfig{Schema: t.schema})
	if err != nil {
		t.close()
		return nil, err
	}
	return t, nil
}

// raceBeside compares laps with the bad topic and laps without it.
func (b *bench) raceBeside(ctx context.Context, without *track, name, topic string) error {
	t, err := b.newBadTrack(ctx, name, topic)
	if err != nil {
		return err
	}
	defer t.close()
	if err := t.park(ctx); errors.Is(err, errLate) {
		b.report.Add(report.Failed("bad-topics/"+name, fmt.Sprintf("%d events for the topic do not wait aside within %v", b.cfg.parked, badPatience)))
		return nil
	} else if err != nil {
		return err
	}
	err = b.race(ctx, race{
		name: "bad-topics/" + name, rate: openRate, measured: seconds(b.cfg.beside), limit: 1.2,
		base: side{"without", without.withRelay}, with: side{"beside", t.beside},
	})
	return errors.Join(err, t.onlyWaiting(ctx))
}

// sqlWaits counts the events for the bad topic that wait in outbox_failed, and
// those that a failure was counted for.
const (
	sqlWaits   = `SELECT count(*) FROM {schema}.outbox_failed WHERE topic = $1 AND status IN ('waiting', 'parked')`
	sqlCounted = `SELECT count(*) FROM {schema}.outbox_failed WHERE status NOT IN ('waiting', 'parked') OR retry_count > 0 OR topic <> $1`
)

// park records events for the bad topic and lets a relay find out that they have
// to wait. A topic is bad only where another one takes events, so some come for the
// good one too.
func (t *badTrack) park(ctx context.Context) error {
	if err := t.recordBad(ctx, t.cfg.parked); err != nil {
		return err
	}
	relay, err := outbox.NewRelay(t.DB, []kgo.Opt{kgo.SeedBrokers(t.cfg.Brokers...)}, outbox.RelayConfig{Schema: t.schema, Logger: quiet})
	if err != nil {
		return err
	}
	patient, cancel := context.WithTimeout(ctx, badPatience)
	defer cancel()
	running, stop := runRelay(patient, relay)
	err = t.awaitParked(running)
	if patient.Err() != nil && ctx.Err() == nil {
		err = errLate
	}
	return errors.Join(err, stop())
}

// awaitParked waits until all events for the bad topic wait in outbox_failed.
func (t *badTrack) awaitParked(running context.Context) error {
	for waits := 0; waits < t.cfg.parked; {
		if err := recordEvents(running, t.bench, t.rec, []outbox.DomainEvent{orders.New(strayEvent)}); err != nil {
			return err
		}
		if err := t.DB.QueryRow(running, services.InSchema(sqlWaits, t.schema), t.topic).Scan(&waits); err != nil {
			return fmt.Errorf("count events that wait: %w", err)
		}
		if err := schedule.Sleep(running, badLook); err != nil {
			return err
		}
	}
	return nil
}

// beside is withRelay while more events come for the bad topic.
func (t *badTrack) beside(ctx context.Context, rate int, measured time.Duration) (l *laps.Lap, err error) {
	l = t.newLap(rate, measured)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		n := int(schedule.Offset(l.Total(), l.Rate).Seconds() * badRate)
		return schedule.Pace(ctx, badRate, n, 1, func(ctx context.Context, _ int) error { return t.recordBad(ctx, 1) })
	})
	g.Go(func() error { return t.relayed(ctx, l, outbox.RelayConfig{Logger: quiet}, orders.New) })
	return l, g.Wait()
}

// recordBad records events for the bad topic in one transaction.
func (t *badTrack) recordBad(ctx context.Context, n int) error {
	events := make([]outbox.DomainEvent, n)
	for i := range events {
		events[i] = badPlaced{orders.New(t.made)}
		t.made++
	}
	return pgx.BeginFunc(ctx, t.DB, func(tx pgx.Tx) error { return t.bad.Record(ctx, tx, events...) })
}

// onlyWaiting returns an error if any event was blamed, or one of the good topic
// did not get through.
func (t *badTrack) onlyWaiting(ctx context.Context) error {
	var n int
	if err := t.DB.QueryRow(ctx, services.InSchema(sqlCounted, t.schema), t.topic).Scan(&n); err != nil {
		return fmt.Errorf("look for failed events: %w", err)
	}
	if n > 0 {
		return fmt.Errorf("%d events in outbox_failed do more than wait for the topic", n)
	}
	return nil
}
