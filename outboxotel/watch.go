package outboxotel

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
)

// Watch adds what the database knows about the relays of a schema, and how far
// consumers of this process are behind in Kafka. It is asked for when metrics are
// collected, but no more than once in Config.Interval. An error goes to [otel.Handle]
// and sets outbox.watch.up to 0; what could not be learned is left out then, and not
// repeated from before.
//
// The inspector may be nil. It sees the same from every process: one that watches is
// enough, and with several the same numbers come from each. Call Watch once for each
// inspector and each consumer.
func (t *Telemetry) Watch(inspector *outboxops.Inspector, consumers ...*outbox.Consumer) {
	if inspector != nil {
		t.watch(attribute.NewSet(t.attributes(watchedKey.String("relays"))...), func(ctx context.Context) (observation, error) {
			relays, err := inspector.Relays(ctx)
			return func(o metric.Observer) { t.observeRelays(o, relays) }, err
		})
	}
	for _, c := range consumers {
		group := semconv.MessagingConsumerGroupName(c.Group())
		t.watch(attribute.NewSet(t.attributes(watchedKey.String("consumer"), group)...), func(ctx context.Context) (observation, error) {
			lags, err := c.Lag(ctx)
			return func(o metric.Observer) { t.observeLag(o, group, lags) }, err
		})
	}
}

// observation reports what was seen.
type observation = func(metric.Observer)

// look finds out what there is to report.
type look = func(context.Context) (observation, error)

// watched is something that is looked at now and then.
type watched struct {
	what attribute.Set
	look look

	mu   sync.Mutex // held during a look, so that two collections at a time do not look twice
	next time.Time  // not before
	last observation
	err  error
}

func (t *Telemetry) watch(what attribute.Set, look look) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.watched = append(t.watched, &watched{what: what, look: look})
}

// refresh looks, if it is time to, and returns what went wrong, once.
func (w *watched) refresh(ctx context.Context, cfg Config) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Now().Before(w.next) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	w.last, w.err = w.look(ctx)
	w.next = time.Now().Add(cfg.Interval)
	if w.err != nil {
		return fmt.Errorf("outboxotel: watch %s: %w", w.what.Encoded(attribute.DefaultEncoder()), w.err)
	}
	return nil
}

// report reports what was seen last.
func (w *watched) report(o metric.Observer, isUp metric.Int64ObservableGauge) {
	w.mu.Lock()
	defer w.mu.Unlock()
	up := metric.WithAttributeSet(w.what)
	if w.err != nil {
		o.ObserveInt64(isUp, 0, up)
		return
	}
	o.ObserveInt64(isUp, 1, up)
	w.last(o)
}

// observe is called when metrics are collected. Its error would spoil what else is
// collected, so it has none.
func (t *Telemetry) observe(ctx context.Context, o metric.Observer) error {
	t.mu.Lock()
	all := t.watched[:len(t.watched):len(t.watched)]
	for name, state := range t.relays {
		t.observeState(o, relayKey.String(name), state)
	}
	t.mu.Unlock()
	var looking sync.WaitGroup
	errs := make([]error, len(all))
	for i, w := range all {
		looking.Go(func() { errs[i] = w.refresh(ctx, t.cfg) })
	}
	looking.Wait()
	for i, w := range all {
		if errs[i] != nil {
			otel.Handle(errs[i])
		}
		w.report(o, t.isUp)
	}
	return nil
}

func (t *Telemetry) observeState(o metric.Observer, name attribute.KeyValue, state *relayState) {
	o.ObserveInt64(t.leader, min(state.leading.Load(), 1), t.set(name))
	now := outbox.BreakerState(state.breaker.Load())
	for _, s := range []outbox.BreakerState{outbox.BreakerClosed, outbox.BreakerHalfOpen, outbox.BreakerOpen} {
		o.ObserveInt64(t.breaker, oneIf(s == now), t.set(name, stateKey.String(s.String())))
	}
}

func (t *Telemetry) observeRelays(o metric.Observer, relays []outbox.RelayStatus) {
	for _, r := range relays {
		name := relayKey.String(r.Name)
		age := 0.0
		if !r.Oldest.IsZero() {
			age = max(0, time.Since(r.Oldest).Seconds())
		}
		o.ObserveInt64(t.pending, r.Pending, t.set(name))
		o.ObserveFloat64(t.age, age, t.set(name))
		o.ObserveInt64(t.led, oneIf(r.Holder != ""), t.set(name))
		for status, n := range map[string]int64{"waiting": r.Waiting, "failed": r.Failed, "parked": r.Parked, "dead": r.Dead} {
			o.ObserveInt64(t.stored, n, t.set(name, statusKey.String(status)))
		}
		for state, n := range map[string]int64{"parked": r.ParkedKeys, "held": r.HeldKeys} {
			o.ObserveInt64(t.keys, n, t.set(name, stateKey.String(state)))
		}
	}
}

func (t *Telemetry) observeLag(o metric.Observer, group attribute.KeyValue, lags []outbox.PartitionLag) {
	for _, l := range lags {
		o.ObserveInt64(t.lag, l.Records(), t.set(group, semconv.MessagingDestinationName(l.Topic),
			semconv.MessagingDestinationPartitionID(partitionID(l.Partition))))
	}
}

func oneIf(yes bool) int64 {
	if yes {
		return 1
	}
	return 0
}

func partitionID(number int32) string { return strconv.Itoa(int(number)) }
