package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/twmb/franz-go/pkg/kgo"
)

// order is sent to a child while it works.
type order string

// The orders of an outage, in this sequence.
const (
	kafkaStops   order = "Kafka stops"
	kafkaReturns order = "Kafka returns"
)

// survivor is a relay that lives through an outage.
type survivor struct {
	job
	gate   gate
	acked  *acked
	next   nextAck
	opened atomic.Int64 // times that the breaker has
}

// relayThroughOutage relays all events, and has to do without Kafka for a while.
// Its events and their time are those that were left when Kafka returned.
func relayThroughOutage(ctx context.Context, j job) (u used, err error) {
	db, err := services.NewPool(ctx, j.Postgres, 4)
	if err != nil {
		return u, err
	}
	defer db.Close()
	s := &survivor{job: j, acked: &acked{j.Topic, newCountdown(j.Events)}}
	relay, err := outbox.NewRelay(db, []kgo.Opt{kgo.SeedBrokers(j.Brokers...), kgo.Dialer(s.gate.dial), kgo.WithHooks(&s.next, s.acked)}, s.config())
	if err != nil {
		return u, err
	}
	running, stop := runRelay(ctx, relay)
	u, err = s.live(running)
	return u, errors.Join(err, stop())
}

// config is the default one with what has to do with outages shortened, by as
// much as this outage is shorter than ten minutes.
func (s *survivor) config() outbox.RelayConfig {
	const whole = 10 * time.Minute
	short := func(d time.Duration) time.Duration {
		return time.Duration(float64(d) * min(1, s.Outage.Seconds()/whole.Seconds()))
	}
	delivery := max(short(10*time.Second), time.Second) // a relay takes no less
	return outbox.RelayConfig{
		Schema: s.Schema, Name: s.Relay, Logger: quiet,
		DeliveryTimeout: delivery, RetryInterval: short(5 * time.Second),
		Breaker: outbox.BreakerConfig{OpenFor: short(30 * time.Second)},
		Hooks:   outbox.RelayHooks{Breaker: s.breakerChanged},
	}
}

func (s *survivor) breakerChanged(_, to outbox.BreakerState, _ float64) {
	if to == outbox.BreakerOpen {
		s.opened.Add(1)
	}
}

// severalRecords are more than the writer that goes on makes at a time.
const severalRecords = 20

// live does as it is ordered. Kafka leaves when it has taken the first part of a
// large batch. The time counts from the first acknowledgement after its return,
// all else from the return.
func (s *survivor) live(running context.Context) (u used, err error) {
	if err := s.await(running, kafkaStops); err != nil {
		return u, err
	}
	s.next.set(severalRecords, s.gate.shut)
	if err := s.await(running, kafkaReturns); err != nil {
		return u, err
	}
	m, err := startMeter(s.Profile)
	if err != nil {
		return u, err
	}
	left := int(s.acked.left.Load())
	var first time.Time
	s.next.set(1, func() { first = time.Now() })
	s.gate.open()
	select {
	case <-s.acked.all:
		u, err = m.stop(left)
	case <-running.Done():
		return u, context.Cause(running)
	}
	u.Notice = first.Sub(m.start)
	u.Elapsed -= u.Notice
	u.Opened = int(s.opened.Load())
	return u, err
}

// await waits for an order.
func (j job) await(running context.Context, want order) error {
	select {
	case got := <-j.orders:
		if got != want {
			return fmt.Errorf("order is %q and not %q", got, want)
		}
		return nil
	case <-running.Done():
		return context.Cause(running)
	}
}

// nextAck is a hook that does something at the next acknowledgement.
type nextAck struct{ waiting atomic.Pointer[onAck] }

type onAck struct {
	least int // records that are acknowledged together
	do    func()
}

func (a *nextAck) set(least int, do func()) { a.waiting.Store(&onAck{least, do}) }

// OnProduceBatchWritten implements [kgo.HookProduceBatchWritten].
func (a *nextAck) OnProduceBatchWritten(_ kgo.BrokerMetadata, _ string, _ int32, m kgo.ProduceBatchMetrics) {
	w := a.waiting.Load()
	if w != nil && m.NumRecords >= w.least && a.waiting.CompareAndSwap(w, nil) {
		w.do()
	}
}
