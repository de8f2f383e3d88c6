package outboxotel

import (
	"context"
	"errors"
	"fmt"
	"slices"
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

// Watch adds metrics about the relays of a schema, and about events that wait for too long, from the
// database, and about the lag of consumers of this process, from Kafka. They are queried when metrics are collected,
// but at most once in Config.Interval. An error is passed to [otel.Handle] and sets
// outbox.watch.up to 0; the metrics that could not be queried are then missing.
//
// The inspector may be nil. Every process gets the same numbers from it, so it is enough
// if one process watches. Call Watch once for each inspector and each consumer.
func (t *Telemetry) Watch(inspector *outboxops.Inspector, consumers ...*outbox.Consumer) {
	if inspector != nil {
		w := &relaysWatch{Telemetry: t, inspector: inspector, seen: map[staleOwner]bool{}}
		t.watch(attribute.NewSet(t.attributes(watchedKey.String("relays"))...), w.look)
	}
	for _, c := range consumers {
		group := semconv.MessagingConsumerGroupName(c.Group())
		t.watch(attribute.NewSet(t.attributes(watchedKey.String("consumer"), group)...), func(ctx context.Context) (observation, error) {
			lags, err := c.Lag(ctx)
			return func(o metric.Observer) { t.observeLag(o, group, lags) }, err
		})
	}
}

// WatchWorkers adds metrics about what is owed to the handlers of workers, and what consumers have parked, from the
// database, as Watch does about relays. It is enough if one process watches.
func (t *Telemetry) WatchWorkers(deliveries *outboxops.Deliveries) {
	w := &workersWatch{Telemetry: t, deliveries: deliveries, seen: map[deliveryKind]bool{}}
	t.watch(attribute.NewSet(t.attributes(watchedKey.String("workers"))...), w.look)
}

// observation reports the result of a query.
type observation = func(metric.Observer)

// query queries the database or Kafka.
type query = func(context.Context) (observation, error)

// watched is queried from time to time.
type watched struct {
	what  attribute.Set
	query query

	mu   sync.Mutex // held during a query, so that two collections at the same time query once
	next time.Time  // earliest time of the next query
	last observation
	err  error
}

func (t *Telemetry) watch(what attribute.Set, query query) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.watched = append(t.watched, &watched{what: what, query: query})
}

// refresh queries, if it is time to, and returns an error only once.
func (w *watched) refresh(ctx context.Context, cfg Config) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Now().Before(w.next) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	w.last, w.err = w.query(ctx)
	w.next = time.Now().Add(cfg.Interval)
	if w.err != nil {
		return fmt.Errorf("outboxotel: watch %s: %w", w.what.Encoded(attribute.DefaultEncoder()), w.err)
	}
	return nil
}

// report reports the last result.
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

// observe is called when metrics are collected. It always returns nil, because its error
// would end the collection of all metrics.
func (t *Telemetry) observe(ctx context.Context, o metric.Observer) error {
	t.mu.Lock()
	all := t.watched[:len(t.watched):len(t.watched)]
	for name, state := range t.relays {
		t.observeState(o, relayKey.String(name), state)
	}
	t.observeActions(o)
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
	t.observeBreaker(o, t.breaker, outbox.BreakerState(state.breaker.Load()), name)
}

// observeBreaker reports the state that a breaker is in, and those that it is not in.
func (t *Telemetry) observeBreaker(o metric.Observer, gauge metric.Int64ObservableGauge, now outbox.BreakerState, of ...attribute.KeyValue) {
	for _, s := range []outbox.BreakerState{outbox.BreakerClosed, outbox.BreakerHalfOpen, outbox.BreakerOpen} {
		o.ObserveInt64(gauge, oneIf(s == now), t.set(append(slices.Clone(of), stateKey.String(s.String()))...))
	}
}

// actionBreaker is the breaker of an action in what runs handlers.
type actionBreaker struct {
	gauge  metric.Int64ObservableGauge
	group  string
	action string
}

// observeActions reports the breakers of actions. Where consumers of this process share a group, that is the one
// which lets the least through.
func (t *Telemetry) observeActions(o metric.Observer) {
	states := map[actionBreaker]outbox.BreakerState{}
	for _, h := range t.handlers {
		for action, state := range h.breakers.all() {
			b := actionBreaker{h.breaker, h.group.Value.AsString(), action}
			states[b] = max(states[b], outbox.BreakerState(state.Load()))
		}
	}
	for b, state := range states {
		t.observeBreaker(o, b.gauge, state, semconv.MessagingConsumerGroupName(b.group), actionKey.String(b.action))
	}
}

// ageOf returns how many seconds ago something was, 0 for the zero time.
func ageOf(at time.Time) float64 {
	if at.IsZero() {
		return 0
	}
	return max(0, time.Since(at).Seconds())
}

// relaysWatch reads the state of relays, and what waits for too long.
type relaysWatch struct {
	*Telemetry
	inspector *outboxops.Inspector
	seen      map[staleOwner]bool // only look: a number that becomes 0 is to be reported as such
}

// staleOwner is the relay or the consumer group of events that wait.
type staleOwner struct{ relay, group string }

func (o staleOwner) attribute() attribute.KeyValue {
	if o.group != "" {
		return semconv.MessagingConsumerGroupName(o.group)
	}
	return relayKey.String(o.relay)
}

// staleEvents is what of an owner waits for too long.
type staleEvents struct {
	events int64
	oldest time.Time
}

func (w *relaysWatch) look(ctx context.Context) (observation, error) {
	relays, err1 := w.inspector.Relays(ctx)
	counts, err2 := w.inspector.Stale(ctx, w.cfg.StaleAfter)
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	for _, r := range relays {
		w.seen[staleOwner{relay: r.Name}] = true
	}
	stale := map[staleOwner]staleEvents{}
	for k := range w.seen {
		stale[k] = staleEvents{}
	}
	for _, c := range counts {
		k := staleOwner{c.Relay, c.Group}
		s := stale[k]
		s.events += int64(c.Events)
		if s.oldest.IsZero() || c.Oldest.Before(s.oldest) {
			s.oldest = c.Oldest
		}
		stale[k], w.seen[k] = s, true
	}
	return func(o metric.Observer) {
		w.observeRelays(o, relays)
		for k, s := range stale {
			of := w.set(k.attribute())
			o.ObserveInt64(w.stale, s.events, of)
			o.ObserveFloat64(w.staleAge, ageOf(s.oldest), of)
		}
	}, nil
}

func (t *Telemetry) observeRelays(o metric.Observer, relays []outbox.RelayStatus) {
	for _, r := range relays {
		name := relayKey.String(r.Name)
		o.ObserveInt64(t.pending, r.Pending, t.set(name))
		o.ObserveFloat64(t.age, ageOf(r.Oldest), t.set(name))
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
