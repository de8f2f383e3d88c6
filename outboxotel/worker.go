package outboxotel

import (
	"context"
	"errors"
	"time"

	"github.com/outboxgo/outbox"
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
	deliveries *outboxops.Deliveries
	seen       map[deliveryKind]bool // only look: a number that becomes 0 is to be reported as such
}

type deliveryKind struct{ group, stream, action string }

// deliveryState is what there is of a kind.
type deliveryState struct {
	pending, processing, dead int64
	oldest                    time.Time
}

func (w *workersWatch) look(ctx context.Context) (observation, error) {
	counts, err1 := w.deliveries.Count(ctx, outboxops.DeliveryFilter{})
	groups, err2 := w.deliveries.Groups(ctx)
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	states := map[deliveryKind]deliveryState{}
	for k := range w.seen {
		states[k] = deliveryState{}
	}
	for _, c := range counts {
		k := deliveryKind{c.Group, c.Stream, c.Action}
		w.seen[k] = true
		states[k] = states[k].with(c)
	}
	return func(o metric.Observer) { w.observe(o, states, groups) }, nil
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

func (w *workersWatch) observe(o metric.Observer, states map[deliveryKind]deliveryState, groups []outboxops.DeliveryGroup) {
	for k, s := range states {
		about := []attribute.KeyValue{semconv.MessagingConsumerGroupName(k.group), semconv.MessagingDestinationName(k.stream)}
		if k.action != "" {
			about = append(about, actionKey.String(k.action))
		}
		of := w.set(about...)
		o.ObserveInt64(w.owed, s.pending, of)
		o.ObserveInt64(w.atWork, s.processing, of)
		o.ObserveInt64(w.givenUp, s.dead, of)
		o.ObserveFloat64(w.owedAge, ageOf(s.oldest), of)
	}
	for _, g := range groups {
		if g.State == outboxops.SubscriptionLeft { // the rest is in Kafka
			continue
		}
		of := w.set(semconv.MessagingConsumerGroupName(g.Group))
		o.ObserveInt64(w.backlog, g.Pending, of)
		o.ObserveFloat64(w.backlogAge, ageOf(g.Oldest), of)
	}
}
