package outboxotel

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/outboxops"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
)

// WatchDatabase adds metrics from a schema of the database: about relays, consumer groups and their processes,
// deliveries, and events that wait for too long. Every process gets the same numbers, so it is enough if one process
// watches. An empty schema means public. The role needs the rights of outbox_reader in docs/roles.md.
//
// The database is queried when metrics are collected, but at most once in Config.Interval. An error is passed to
// [otel.Handle] and sets outbox.watch.up to 0; the metrics that could not be queried are then missing.
//
// A Telemetry watches one schema: a second call returns [outbox.ErrDuplicate]. A nil db is [outbox.ErrNilArgument], and
// after Close the error is [ErrClosed].
func (t *Telemetry) WatchDatabase(db *pgxpool.Pool, schema string) error {
	schema = cmp.Or(schema, pg.DefaultSchema)
	errs := []error{check.Schema(schema)}
	if db == nil {
		errs = append(errs, fmt.Errorf("argument db %w", outbox.ErrNilArgument))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.database {
		errs = append(errs, fmt.Errorf("argument db %w: a Telemetry watches one schema", outbox.ErrDuplicate))
	}
	err := errors.Join(append(errs, t.open())...)
	if err != nil {
		return fmt.Errorf("outboxotel: WatchDatabase: %w", err)
	}
	inspector, err1 := outboxops.NewInspector(db, outboxops.InspectorConfig{Schema: schema})
	deliveries, err2 := outboxops.NewDeliveries(db, outboxops.DeliveriesConfig{Schema: schema})
	delayed, err3 := outboxops.NewDelayed(db, outboxops.DelayedConfig{Schema: schema})
	if err := errors.Join(err1, err2, err3); err != nil {
		return fmt.Errorf("outboxotel: WatchDatabase: %w", err)
	}
	t.database = true
	relays := &relaysWatch{Telemetry: t, db: db, inspector: inspector, delayed: delayed, seen: newSeen[staleOwner](), outages: newSeen[outageKind]()}
	t.watch(attribute.NewSet(t.attributes(watchedKey.String("relays"))...), relays.look)
	workers := &workersWatch{Telemetry: t, db: db, deliveries: deliveries, seen: newSeen[deliveryKind](), waited: newSeen[waitingKind](),
		said: newMembersSaid(tables.NewGroupReader(db, schema))}
	t.watch(attribute.NewSet(t.attributes(watchedKey.String("workers"))...), workers.look)
	return nil
}

// WatchConsumers adds the lag of consumers of this process, from Kafka. They are queried as the database is, see
// [Telemetry.WatchDatabase].
//
// A nil consumer is [outbox.ErrNilArgument], one that is watched already [outbox.ErrDuplicate], and after Close the
// error is [ErrClosed]. After an error, none of these consumers has been added.
func (t *Telemetry) WatchConsumers(consumers ...*outbox.Consumer) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	errs := []error{t.open()}
	for i, c := range consumers {
		switch {
		case c == nil:
			errs = append(errs, fmt.Errorf("argument consumers[%d] %w", i, outbox.ErrNilArgument))
		case t.consumers[c] || slices.Contains(consumers[:i], c):
			errs = append(errs, fmt.Errorf("argument consumers[%d], of group %s, %w", i, short.Line(c.Group(), maxText), outbox.ErrDuplicate))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("outboxotel: WatchConsumers: %w", err)
	}
	for _, c := range consumers {
		t.consumers[c] = true
		group := semconv.MessagingConsumerGroupName(c.Group())
		t.watch(attribute.NewSet(t.attributes(watchedKey.String("consumer"), group)...), func(ctx context.Context) (observation, error) {
			lags, err := c.Lag(ctx)
			return func(o metric.Observer) { t.observeLag(o, group, lags) }, err
		})
	}
	return nil
}

// maxText is how much of a text an attribute or an error repeats, in bytes.
const maxText = 300

// newSeen returns the set of what a query has found lately, up to a bound. A number that becomes 0 is to be reported as
// such for a while.
func newSeen[K comparable]() *short.Labels[K] {
	const most = 1_000
	return short.NewLabels(most, func(K) {})
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

// watch adds a query. The caller holds mu.
func (t *Telemetry) watch(what attribute.Set, query query) {
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

// relaysWatch reads the state of relays, what waits for too long, and what is not due yet.
type relaysWatch struct {
	*Telemetry
	db        *pgxpool.Pool
	inspector *outboxops.Inspector
	delayed   *outboxops.Delayed
	seen      *short.Labels[staleOwner]
	outages   *short.Labels[outageKind]
}

// staleOwner is the relay or the consumer group of events that wait.
type staleOwner struct{ relay, group string }

func (o staleOwner) attribute() attribute.KeyValue {
	if o.group != "" {
		return semconv.MessagingConsumerGroupName(o.group)
	}
	return relayKey.String(o.relay)
}

// other stands for the owners that are not named.
func (o staleOwner) other() staleOwner {
	if o.group != "" {
		return staleOwner{group: short.Other}
	}
	return staleOwner{relay: short.Other}
}

// staleEvents is what of an owner waits for too long.
type staleEvents struct {
	events int64
	oldest time.Time
}

func (w *relaysWatch) look(ctx context.Context) (observation, error) {
	clock, err0 := pg.ReadClock(ctx, w.db)
	relays, err1 := w.inspector.Relays(ctx)
	counts, err2 := w.inspector.Stale(ctx, w.cfg.StaleAfter)
	delayed, err3 := w.delayed.Status(ctx)
	if err := errors.Join(err0, err1, err2, err3); err != nil {
		return nil, err
	}
	for _, r := range relays {
		w.seen.Use(staleOwner{relay: r.Name})
	}
	outages := outagesOf{w.outages, map[outageKind]time.Time{}}
	for _, r := range relays {
		if r.Said != nil {
			outages.add(staleOwner{relay: r.Name}, r.Said.Outages)
		}
	}
	stale := map[staleOwner]staleEvents{}
	for _, k := range w.seen.Lately() {
		stale[k] = staleEvents{}
	}
	for _, c := range counts {
		k := staleOwner{c.Relay, c.Group}
		if !w.seen.Use(k) {
			k = k.other()
		}
		s := stale[k]
		s.events += int64(c.Events)
		if s.oldest.IsZero() || c.Oldest.Before(s.oldest) {
			s.oldest = c.Oldest
		}
		stale[k] = s
	}
	return func(o metric.Observer) {
		w.observeRelays(o, relays, clock)
		w.observeOutages(o, outages.since, clock)
		o.ObserveInt64(w.instruments.delayed, int64(delayed.Waiting), w.set(statusKey.String("waiting")))
		o.ObserveInt64(w.instruments.delayed, int64(delayed.Rejected), w.set(statusKey.String("rejected")))
		o.ObserveFloat64(w.delayedAge, delayed.Late.Seconds(), w.set())
		for k, s := range stale {
			of := w.set(k.attribute())
			o.ObserveInt64(w.stale, s.events, of)
			o.ObserveFloat64(w.staleAge, clock.Since(s.oldest).Seconds(), of)
		}
	}, nil
}

func (t *Telemetry) observeRelays(o metric.Observer, relays []outbox.RelayStatus, clock pg.Clock) {
	for _, r := range relays {
		name := relayKey.String(r.Name)
		o.ObserveInt64(t.pending, r.Pending, t.set(name))
		o.ObserveFloat64(t.age, clock.Since(r.Oldest).Seconds(), t.set(name))
		o.ObserveInt64(t.led, oneIf(r.Holder != ""), t.set(name))
		if r.CursorTopic != "" {
			o.ObserveInt64(t.transaction, r.Transaction, t.set(name))
		}
		t.observeSaid(o, r, name)
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
