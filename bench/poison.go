package main

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/schedule"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	poisonRate = 1000 // transactions per second
	// A poison is larger than the topic takes, even if it is compressed, and
	// smaller than the client does. Full batches of other events are far below.
	poisonSize  = 360 << 10
	poisonLimit = 256 << 10
	poisonLook  = 20 * time.Millisecond
)

// quiet is the logger of relays that are to have trouble.
var quiet = slog.New(slog.DiscardHandler)

// poison compares the relay among whose events are some that Kafka refuses with
// the relay without.
func (b *bench) poison(ctx context.Context) (err error) {
	if err := b.limitTopic(ctx, kadm.SetConfig); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.limitTopic(context.WithoutCancel(ctx), kadm.DeleteConfig)) }()
	t, err := b.newTrack(ctx, "poison")
	if err != nil {
		return err
	}
	defer t.close()
	if err := t.warmUp(ctx); err != nil {
		return err
	}
	return b.race(ctx, race{
		name: "poison", rate: poisonRate, measured: schedule.Offset(b.cfg.poisons*b.cfg.poisonEvery, poisonRate), limit: 1.2, further: 99.9,
		base: side{"without", t.withRelay}, with: side{"among", t.amongPoisons},
	})
}

// limitTopic sets the size of batches that the topic takes, or forgets it.
func (b *bench) limitTopic(ctx context.Context, op kadm.IncrementalOp) error {
	limit := kadm.AlterConfig{Op: op, Name: "max.message.bytes", Value: kadm.StringPtr(fmt.Sprint(poisonLimit))}
	altered, err := b.Admin.AlterTopicConfigs(ctx, []kadm.AlterConfig{limit}, b.Topic)
	for _, topic := range altered {
		err = errors.Join(err, topic.Err)
	}
	if err != nil {
		return fmt.Errorf("limit topic: %w", err)
	}
	return nil
}

// amongPoisons is withRelay with poisons. Other events of their keys wait behind them, and are not
// measured. When all others have arrived, the poisons are resolved, and the waiting events have to
// arrive too, in order.
func (t *track) amongPoisons(ctx context.Context, rate int, measured time.Duration) (*laps.Lap, error) {
	l := t.newLap(rate, measured)
	poisons := poisonsOf(l, t.cfg.poisonEvery)
	large := largeNote()
	event := func(n int) orders.Placed {
		e := orders.New(n)
		if poisons[n-l.First] {
			e.Note = large
		}
		return e
	}
	if err := t.relayed(ctx, l, outbox.RelayConfig{Logger: quiet}, event); err != nil {
		return nil, err
	}
	if err := t.giveUp(ctx, l, poisons); err != nil {
		return nil, err
	}
	return l, l.InOrder(orders.New)
}

// poisonsOf returns which events of the lap are poisons, and sets aside all of their
// keys. One comes at once, so that the parking is in use from the beginning, and
// then one among every so many.
func poisonsOf(l *laps.Lap, every int) map[int]bool {
	poisons, keys := map[int]bool{0: true}, map[string]bool{}
	for n := l.Warm + every/2; n < l.Total(); n += every {
		poisons[n] = true
	}
	for n := range poisons {
		keys[orders.New(l.First+n).Order] = true
	}
	for n := range l.Total() {
		if keys[orders.New(l.First+n).Order] {
			l.SetAside(n)
		}
	}
	return poisons
}

// largeNote returns text of which compression makes no less than three quarters.
func largeNote() string {
	random := make([]byte, base64.StdEncoding.DecodedLen(poisonSize))
	_, _ = rand.NewChaCha8([32]byte{}).Read(random) // it never fails
	return base64.StdEncoding.EncodeToString(random)
}

// sqlGiveUp is what an operator does about events that Kafka will never take.
const sqlGiveUp = `
UPDATE {schema}.outbox_failed
   SET status = 'resolved', resolved_at = now(), resolution = 'too large'
 WHERE status = 'failed' AND error_class = 'message_too_large'`

// giveUp resolves the poisons, and waits for the events behind them.
func (t *track) giveUp(ctx context.Context, l *laps.Lap, poisons map[int]bool) error {
	relay, err := outbox.NewRelay(t.DB, []kgo.Opt{kgo.SeedBrokers(t.cfg.Brokers...)},
		outbox.RelayConfig{Schema: t.schema, RetryInterval: poisonLook, Logger: quiet})
	if err != nil {
		return err
	}
	patient, cancel := context.WithTimeout(ctx, laps.Patience)
	defer cancel()
	running, stop := runRelay(patient, relay)
	err = t.resolve(running, len(poisons))
	if err == nil {
		for n := range l.Aside {
			if !poisons[n] {
				l.Miss(n)
			}
		}
		err = t.reader.Collect(running, l)
	}
	if err = errors.Join(err, stop()); err != nil {
		return err
	}
	for n := range poisons {
		if l.Arrived[n] != 0 {
			return fmt.Errorf("event %d arrived, which is larger than its topic takes", l.First+n)
		}
	}
	return t.NothingFailed(ctx, t.schema)
}

// resolve does what the operator does, as soon as there is something to resolve.
func (t *track) resolve(ctx context.Context, poisons int) error {
	for left := poisons; left > 0; {
		gone, err := t.DB.Exec(ctx, services.InSchema(sqlGiveUp, t.schema))
		if err != nil {
			return fmt.Errorf("give up %d poisons: %w", left, err)
		}
		left -= int(gone.RowsAffected())
		if err := schedule.Sleep(ctx, poisonLook); err != nil {
			return err
		}
	}
	return nil
}
