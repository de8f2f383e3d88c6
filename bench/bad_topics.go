package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
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

// badCase is what is wrong beside the measured topic.
type badCase struct {
	name   string
	topics []string
	rate   int           // events per second for them
	parked bool          // events wait for them before a relay begins; otherwise it has to find out
	lap    time.Duration // measured in each turn
}

// badTopics compares the relay that also has events for topics that take nothing
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
			err = t.raceBeside(ctx, t, badCase{name: name, topics: []string{topic}, rate: badRate, parked: true, lap: seconds(t.cfg.beside)})
		}
		if err != nil {
			return fmt.Errorf("%s topic: %w", name, err)
		}
	}
	return t.newlyBad(ctx)
}

// newlyBad is badTopics for partitions of which a relay does not know yet that they take nothing: half as many as take
// something, 40 of which each event hits another one, and those of eight topics.
func (t *track) newlyBad(ctx context.Context) error {
	for _, c := range []struct {
		name               string
		topics, partitions int
		rate               int
	}{
		{"third", 1, max(t.cfg.partitions/2, 1), openRate / 2},
		{"40-partitions", 1, 40, 1},
		{"8-topics", 8, t.cfg.partitions, 8},
	} {
		one := badCase{name: c.name, rate: c.rate, lap: seconds(t.cfg.newlyBad)}
		for i := range c.topics {
			topic, err := t.shortOf(ctx, fmt.Sprintf("short-%s-%d", c.name, i), c.partitions)
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			one.topics = append(one.topics, topic)
		}
		if err := t.raceBeside(ctx, t, one); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

func (b *bench) missingTopic(context.Context) (name, topic string, err error) {
	return "missing", b.TopicName("missing"), nil
}

func (b *bench) shortTopic(ctx context.Context) (name, topic string, err error) {
	topic, err = b.shortOf(ctx, "short", b.cfg.partitions)
	return "short-of-replicas", topic, err
}

// shortOf makes a topic that wants one replica more than there is.
func (b *bench) shortOf(ctx context.Context, name string, partitions int) (topic string, err error) {
	topic = b.TopicName(name)
	err = absent.CreateTopic(ctx, b.cfg.Brokers, topic, int32(partitions), map[string]string{"min.insync.replicas": "2"})
	if err == nil {
		b.Topics = append(b.Topics, topic)
	}
	return topic, err
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

// badTrack is a track whose relay also has events for bad topics.
type badTrack struct {
	*track
	badCase
	bad  []*outbox.Recorder // one for each topic
	made int                // events for the bad topics
}

func (b *bench) newBadTrack(ctx context.Context, c badCase) (t *badTrack, err error) {
	t = &badTrack{badCase: c}
	if t.track, err = b.newTrack(ctx, "bad_"+strings.ReplaceAll(c.name, "-", "_")); err != nil {
		return nil, err
	}
	for _, topic := range c.topics {
		name := "acme.bench-" + b.ID + "-bad.placed.v1"
		events, err := outbox.NewRegistry(orders.Source, outbox.Event(name, orders.Aggregate, badPlaced.order).Topic(topic))
		var bad *outbox.Recorder
		if err == nil {
			bad, err = outbox.NewRecorder(events, outbox.RecorderConfig{Schema: t.schema})
		}
		if err != nil {
			t.close()
			return nil, err
		}
		t.bad = append(t.bad, bad)
	}
	return t, nil
}

// raceBeside compares laps with the bad topics and laps without them.
func (b *bench) raceBeside(ctx context.Context, without *track, c badCase) error {
	t, err := b.newBadTrack(ctx, c)
	if err != nil {
		return err
	}
	defer t.close()
	if c.parked {
		if err := t.park(ctx); errors.Is(err, errLate) {
			b.report.Add(report.Failed("bad-topics/"+c.name, fmt.Sprintf("%d events for the topic do not wait aside within %v", b.cfg.parked, badPatience)))
			return nil
		} else if err != nil {
			return err
		}
	}
	err = b.race(ctx, race{
		name: "bad-topics/" + c.name, rate: openRate, measured: c.lap, limit: 1.2,
		base: side{"without", without.withRelay}, with: side{"beside", t.beside},
	})
	return errors.Join(err, t.onlyWaiting(ctx))
}

// sqlWaits counts the events for the bad topic that wait in outbox_failed, and
// those that a failure was counted for.
const (
	sqlWaits   = `SELECT count(*) FROM {schema}.outbox_failed WHERE topic = ANY ($1) AND status IN ('waiting', 'parked')`
	sqlCounted = `SELECT count(*) FROM {schema}.outbox_failed WHERE status NOT IN ('waiting', 'parked') OR retry_count > 0 OR topic <> ALL ($1)`
	sqlForget  = `DELETE FROM {schema}.outbox_failed`
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
		if err := t.DB.QueryRow(running, services.InSchema(sqlWaits, t.schema), t.topics).Scan(&waits); err != nil {
			return fmt.Errorf("count events that wait: %w", err)
		}
		if err := schedule.Sleep(running, badLook); err != nil {
			return err
		}
	}
	return nil
}

// beside is withRelay while more events come for the bad topics. A relay that has to find out that these are bad does
// so while it is measured, after it has sent good events for a while.
func (t *badTrack) beside(ctx context.Context, rate int, measured time.Duration) (l *laps.Lap, err error) {
	if !t.parked { // what an earlier lap has found out
		if _, err := t.DB.Exec(ctx, services.InSchema(sqlForget, t.schema)); err != nil {
			return nil, fmt.Errorf("delete failed events: %w", err)
		}
	}
	l = t.newLap(rate, measured)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		delay := schedule.Offset(1, l.Rate) / 2 // no transaction of a good event begins at the same moment
		if !t.parked {
			delay += schedule.Offset(l.Warm, l.Rate)
		}
		if err := schedule.Sleep(ctx, delay); err != nil {
			return err
		}
		n := int((schedule.Offset(l.Total(), l.Rate) - delay).Seconds() * float64(t.rate))
		return schedule.Pace(ctx, t.rate, n, 1, func(ctx context.Context, _ int) error { return t.recordBad(ctx, 1) })
	})
	g.Go(func() error { return t.relayed(ctx, l, outbox.RelayConfig{Logger: quiet}, orders.New) })
	return l, g.Wait()
}

// recordBad records events for one of the bad topics, in turn, in one transaction.
func (t *badTrack) recordBad(ctx context.Context, n int) error {
	bad, events := t.bad[t.made%len(t.bad)], make([]outbox.DomainEvent, n)
	for i := range events {
		events[i] = badPlaced{orders.New(t.made)}
		t.made++
	}
	return pgx.BeginFunc(ctx, t.DB, func(tx pgx.Tx) error { return bad.Record(ctx, tx, events...) })
}

// onlyWaiting returns an error if any event was blamed, or one of the good topic
// did not get through.
func (t *badTrack) onlyWaiting(ctx context.Context) error {
	var n int
	if err := t.DB.QueryRow(ctx, services.InSchema(sqlCounted, t.schema), t.topics).Scan(&n); err != nil {
		return fmt.Errorf("look for failed events: %w", err)
	}
	if n > 0 {
		return fmt.Errorf("%d events in outbox_failed do more than wait for the topic", n)
	}
	return nil
}
