package outboxotel

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/outboxops"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
)

// Worker returns the configuration of a worker of a group with metrics and traces.
func (t *Telemetry) Worker(group string, cfg outbox.WorkerConfig) outbox.WorkerConfig {
	h := t.handlersOf(group, cfg.HandlerConfig, postgres, t.workerOutcomes, results{handled: "done", givenUp: "dead", retried: "retried"})
	cfg.HandlerConfig = h.added(cfg.HandlerConfig)
	cfg.Hooks.RowsRemoved = both(h.rowsRemoved, cfg.Hooks.RowsRemoved)
	return cfg
}

func (h *handlers) rowsRemoved(c outbox.RetentionResult) {
	h.countRemoved(h.removedByWorkers, h.group, c)
}

// workersWatch reads what is owed to handlers.
type workersWatch struct {
	*Telemetry
	db         *pgxpool.Pool
	deliveries *outboxops.Deliveries
	seen       *short.Labels[deliveryKind]
	waited     *short.Labels[waitingKind]
	said       membersSaid
}

// waitingKind is where events of a group wait.
type waitingKind struct{ group, stream, action, status string }

type deliveryKind struct{ group, stream, action string }

// deliveryState is what there is of a kind.
type deliveryState struct {
	pending, processing, dead int64
	oldest                    time.Time
}

func (w *workersWatch) look(ctx context.Context) (observation, error) {
	clock, err0 := pg.ReadClock(ctx, w.db)
	counts, err1 := w.deliveries.Count(ctx, outboxops.DeliveryFilter{})
	groups, err2 := w.deliveries.Groups(ctx)
	waiting, err3 := w.deliveries.Waiting(ctx, "")
	said, err4 := w.said.look(ctx)
	if err := errors.Join(err0, err1, err2, err3, err4); err != nil {
		return nil, err
	}
	waits, states := w.waits(waiting), w.states(counts)
	return func(o metric.Observer) {
		w.observe(o, states, groups, clock)
		w.observeWaiting(o, waits, clock)
		w.observeMembers(o, said, clock)
	}, nil
}

// waits returns what waits by kind. Of very many kinds, some are those of one other stream: writers choose streams.
func (w *workersWatch) waits(waiting []outbox.EventCount) map[waitingKind]outbox.EventCount {
	waits := map[waitingKind]outbox.EventCount{}
	for _, k := range w.waited.Lately() {
		waits[k] = outbox.EventCount{}
	}
	for _, c := range waiting {
		k := waitingKind{c.Group, c.Topic, c.Action, c.Status}
		if !w.waited.Use(k) {
			k.stream = short.Other
		}
		sum := waits[k]
		sum.Events += c.Events
		if sum.Oldest.IsZero() || !c.Oldest.IsZero() && c.Oldest.Before(sum.Oldest) {
			sum.Oldest = c.Oldest
		}
		waits[k] = sum
	}
	return waits
}

// states returns what is owed by kind. Of very many kinds, some are those of one other stream.
func (w *workersWatch) states(counts []outboxops.DeliveryCount) map[deliveryKind]deliveryState {
	states := map[deliveryKind]deliveryState{}
	for _, k := range w.seen.Lately() {
		states[k] = deliveryState{}
	}
	for _, c := range counts {
		k := deliveryKind{c.Group, c.Stream, c.Action}
		if !w.seen.Use(k) {
			k.stream = short.Other
		}
		states[k] = states[k].with(c)
	}
	return states
}

func (w *workersWatch) observeWaiting(o metric.Observer, waits map[waitingKind]outbox.EventCount, clock pg.Clock) {
	for k, c := range waits {
		about := []attribute.KeyValue{semconv.MessagingConsumerGroupName(k.group), statusKey.String(k.status)}
		if k.stream != "" {
			about = append(about, semconv.MessagingDestinationName(k.stream))
		}
		if k.action != "" {
			about = append(about, actionKey.String(k.action))
		}
		of := w.set(about...)
		o.ObserveInt64(w.waiting, int64(c.Events), of)
		o.ObserveFloat64(w.waitingAge, clock.Since(c.Oldest).Seconds(), of)
	}
}

// with adds a count.
func (s deliveryState) with(c outboxops.DeliveryCount) deliveryState {
	switch c.Status {
	case outboxops.DeliveryPending, outboxops.DeliveryParked:
		s.pending += int64(c.Deliveries)
		if s.oldest.IsZero() || c.Oldest.Before(s.oldest) {
			s.oldest = c.Oldest
		}
	case outboxops.DeliveryProcessing:
		s.processing += int64(c.Deliveries)
	case outboxops.DeliveryDead:
		s.dead += int64(c.Deliveries)
	}
	return s
}

func (w *workersWatch) observe(o metric.Observer, states map[deliveryKind]deliveryState, groups []outboxops.DeliveryGroup, clock pg.Clock) {
	for k, s := range states {
		about := []attribute.KeyValue{semconv.MessagingConsumerGroupName(k.group), semconv.MessagingDestinationName(k.stream)}
		if k.action != "" {
			about = append(about, actionKey.String(k.action))
		}
		of := w.set(about...)
		o.ObserveInt64(w.owed, s.pending, of)
		o.ObserveInt64(w.atWork, s.processing, of)
		o.ObserveInt64(w.givenUp, s.dead, of)
		o.ObserveFloat64(w.owedAge, clock.Since(s.oldest).Seconds(), of)
	}
	for _, g := range groups {
		if g.State == outboxops.SubscriptionLeft { // the rest is in Kafka
			continue
		}
		of := w.set(semconv.MessagingConsumerGroupName(g.Group))
		o.ObserveInt64(w.backlog, g.Pending, of)
		o.ObserveFloat64(w.backlogAge, clock.Since(g.Oldest).Seconds(), of)
	}
}
