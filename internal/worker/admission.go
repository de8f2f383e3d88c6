package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/delivery"

	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/contain"
)

// admission decides what a round of fan-out does: how many events it reads, which deliveries they need, and
// which of these this worker claims at once. It belongs to the goroutine of the dispatcher, but for noEvents,
// backlog and stored.
type admission struct {
	cfg        *Rules
	delivery   *delivery.Rules
	fanOut     *fanOut
	dispatcher *delivery.Dispatcher
	processor  *handling.Processor // logs events of unknown types
	log        *slog.Logger
	lease      *lease.GroupLease
	hooks      *contain.Callback // calls hooks for events that reach no lane

	backlog   atomic.Bool                   // the last round left events behind; any goroutine may read it
	noEvents  atomic.Pointer[noEventsError] // why the group gets no events from outbox, or nil; any goroutine may read it
	stored    atomic.Bool                   // the routes of this process are stored; any goroutine may read it
	round     roundPlan
	recheckAt time.Time // when a group without events from outbox is checked again
	starting  bool      // the group may have no position yet
}

// hasBacklog reports whether the last round left events behind.
func (a *admission) hasBacklog() bool { return a.backlog.Load() }

// getsNoEvents reports whether the group gets no events from outbox.
func (a *admission) getsNoEvents() bool { return a.noEvents.Load() != nil }

// roundPlan is the plan of the round of fan-out under way.
type roundPlan struct {
	left    map[*delivery.LaneKind]int       // deliveries that the lanes of a kind can still take
	status  map[delivery.Key]delivery.Status // of the later deliveries of a key
	unknown []eventHead                      // events of types without a handler
	foreign bool                             // a delivery is for other workers
}

// takeNew runs one round of fan-out if a lane has room. It reports whether more events wait, and whether
// PostgreSQL has answered. The dispatcher calls it.
func (a *admission) takeNew(ctx context.Context) (more, answered bool, err error) {
	if a.getsNoEvents() && time.Now().Before(a.recheckAt) {
		return false, false, nil
	}
	a.round = roundPlan{left: map[*delivery.LaneKind]int{}, status: map[delivery.Key]delivery.Status{}}
	limit := 0
	for _, k := range a.dispatcher.Kinds {
		a.round.left[k] = k.Room() * k.Batch()
		limit = max(limit, a.round.left[k])
	}
	a.dispatcher.Full = limit == 0
	begins := a.starting || a.getsNoEvents() && !a.dispatcher.Full
	if begins {
		if err := a.begin(ctx); err != nil {
			answered, err := a.noteNoEvents(err)
			return false, answered, err
		}
	}
	if a.dispatcher.Full {
		return false, begins, nil
	}
	began := time.Now()
	events, more, err := a.fanOut.round(ctx, limit, a.dispatcher.Claimed.Budget(), func(rows []delivery.Delivery) error {
		a.deal(rows, began)
		return nil
	})
	a.dispatcher.PollSchedule.Polled(began, events)
	if err == nil && a.round.foreign {
		a.dispatcher.SignalHeads()
	}
	if err == nil && len(a.round.unknown) > 0 {
		a.reportUnknown(ctx, a.round.unknown)
	}
	a.backlog.Store(more)
	if errors.Is(err, pgx.ErrNoRows) || errors.Is(err, cursor.ErrOtherCluster) || errors.Is(err, errRoutesLost) {
		// The position of the group was deleted, or comes from another server, or handlers of the group were lost.
		a.starting = true
		return true, false, nil
	}
	answered, err = a.noteNoEvents(err)
	return more, answered, err
}

// deal passes new deliveries to the lanes of their kind.
func (a *admission) deal(rows []delivery.Delivery, made time.Time) {
	for _, k := range a.dispatcher.Kinds {
		own := make([]delivery.Delivery, 0, len(rows))
		for i := range rows {
			if r := &rows[i]; k.Handles(delivery.Pair{Action: r.Action, Stream: r.Stream}, r.Type) {
				own = append(own, *r)
			}
		}
		a.dispatcher.Deal(k, own, made)
	}
}

// beginFirst is begin before anything is claimed. Until the routes of this process are stored, other processes of the
// group make no deliveries for its new handlers, and it is not ready. It must not wait for a free lane for that. After
// an error, takeNew tries again and returns the error.
func (a *admission) beginFirst(ctx context.Context) {
	if err := a.begin(ctx); err != nil {
		_, _ = a.noteNoEvents(err)
	}
}

// begin stores the routes of this process, and reads the position of the group. It creates the position of a new group.
// It rebases a position of another cluster.
func (a *admission) begin(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, delivery.DispatchTimeout)
	err := a.fanOut.cursors.CheckSequence(bounded)
	cancel()
	if err != nil {
		return err
	}
	err = a.fanOut.begin(ctx, a.cfg.FromStart)
	if _, none := errors.AsType[*noEventsError](err); err == nil || none {
		a.stored.Store(true)
	}
	if err != nil {
		return err
	}
	err = a.fanOut.load(ctx, a.fanOut.db)
	if errors.Is(err, cursor.ErrOtherCluster) {
		if err = a.rebase(ctx); err == nil {
			err = a.fanOut.load(ctx, a.fanOut.db)
		}
	}
	if err != nil {
		return err
	}
	a.starting = false
	a.noEvents.Store(nil)
	return nil
}

// rebase translates all positions after a restore from another cluster. Only one process does this: the
// process that gets the lease of the group.
func (a *admission) rebase(ctx context.Context) error {
	began := time.Now()
	l, err := a.lease.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("rebase cursor: %w", err)
	}
	defer func() {
		if err := a.lease.GiveUp(l, a.delivery.StopTimeout); err != nil {
			a.log.Warn("outbox: the lease for a rebase is not released, it expires", "error", err)
		}
	}()
	if err := a.fanOut.load(ctx, a.fanOut.db); !errors.Is(err, cursor.ErrOtherCluster) { // another process has done it
		return err
	}
	unsent, err := a.fanOut.cursors.Rebase(ctx, l)
	if err == nil {
		a.log.Warn("outbox: database was restored from another cluster, the cursor is moved to this one",
			"unsent", unsent, "took", time.Since(began).Round(time.Millisecond))
	}
	return err
}

// noteNoEvents returns err, or nil if err says that the group gets no events from outbox. Then PostgreSQL has answered,
// and the group is checked again after PollInterval.
func (a *admission) noteNoEvents(err error) (answered bool, _ error) {
	none, is := errors.AsType[*noEventsError](err)
	if !is {
		return err == nil, err
	}
	a.recheckAt = time.Now().Add(a.cfg.PollInterval)
	a.noEvents.Store(none)
	return true, nil
}

// reportUnknown logs events of types without a handler, and calls the hooks Unknown and DeadLettered.
func (a *admission) reportUnknown(ctx context.Context, events []eventHead) {
	all := make([]envelope.Received, len(events))
	for i, e := range events {
		stream, _ := e.destination() // without error, plan has called it
		all[i] = envelope.Received{
			ID: e.eventID, Type: e.eventType, Subject: e.aggregate, Origin: &envelope.Origin{Key: []byte(e.recordKey()), Stream: stream},
			Extensions: map[string]string{"aggregatetype": e.aggregateType},
		}
		if a.delivery.DeadLetterUnknown {
			a.log.Error("outbox: event is dead, the group has no handler for its type",
				handling.EventAttrs(&all[i], "action", "", "outbox_id", e.id)...)
		} else {
			a.processor.LogSkipped(&all[i])
		}
	}
	h := a.delivery.Hooks
	if h.Unknown == nil && h.DeadLettered == nil {
		return
	}
	a.hooks.Notify(ctx, func() {
		for i := range all {
			m := &all[i]
			if h.Unknown != nil {
				h.Unknown(m)
			}
			if a.delivery.DeadLetterUnknown && h.DeadLettered != nil {
				h.DeadLettered(m, "", "", handling.UnknownType(m.Type))
			}
		}
	})
}

// plan appends the deliveries that an event needs: one for each action of the group that takes its type and
// topic.
func (a *admission) plan(planned []delivery.New, e eventHead) []delivery.New {
	stream, err := e.destination()
	if err != nil || !a.fanOut.routes.streams[stream] {
		return planned
	}
	before := len(planned)
	attempts := delivery.Attempts(a.delivery.Of(stream).MaxRetries)
	for _, p := range a.fanOut.routes.byType[e.eventType] {
		if p.Stream == stream {
			key := a.keyOf(e, p.Action, stream)
			planned = append(planned, delivery.New{
				OutboxID: e.id, Action: p.Action, Stream: stream, Key: key, MaxAttempts: attempts, Status: a.statusOf(key, p, e.eventType),
			})
		}
	}
	if len(planned) > before {
		return planned
	}
	a.round.unknown = append(a.round.unknown, e)
	if a.delivery.DeadLetterUnknown {
		planned = append(planned, delivery.New{
			OutboxID: e.id, Stream: stream, Key: a.keyOf(e, "", stream), Status: delivery.Dead, MaxAttempts: attempts,
		})
	}
	return planned
}

// statusOf returns the status of a new delivery whose key is free. It is Processing, claimed by this
// worker, while the lanes of its kind can take more, and Pending otherwise. Later deliveries of its key in
// this round go with it, up to the first whose type this worker does not handle.
func (a *admission) statusOf(key delivery.Key, pair delivery.Pair, eventType string) delivery.Status {
	kind := a.kindOf(pair, eventType)
	a.round.foreign = a.round.foreign || kind == nil
	if s, ok := a.round.status[key]; ok && key.Ordered {
		if kind == nil {
			s = delivery.Parked
			a.round.status[key] = s
		}
		return s
	}
	status, later := delivery.Pending, delivery.Parked
	if kind != nil && a.round.left[kind] > 0 && a.isOpen(pair) && !kind.IsSlow(pair.Action) {
		a.round.left[kind]--
		status, later = delivery.Processing, delivery.Processing
	}
	a.round.status[key] = later
	if status == delivery.Pending && (kind == nil || !kind.AwaitsShare(pair.Action)) {
		a.dispatcher.SignalDue()
	}
	return status
}

// kindOf returns the lanes of this worker that handle the deliveries of a pair with an event type, or nil.
func (a *admission) kindOf(pair delivery.Pair, eventType string) *delivery.LaneKind {
	for _, k := range a.dispatcher.Kinds {
		if k.Handles(pair, eventType) {
			return k
		}
	}
	return nil
}

// isOpen reports whether the pair is neither paused nor kept back by the breaker of its action.
func (a *admission) isOpen(pair delivery.Pair) bool {
	return !a.dispatcher.Pauses.IsPaused(pair.Stream) && a.dispatcher.Breakers.IsClosed(pair.Action)
}

// keyOf returns the key of a delivery, or the zero key if events have no order.
func (a *admission) keyOf(e eventHead, action, stream string) delivery.Key {
	if a.cfg.Unordered {
		return delivery.Key{}
	}
	return delivery.KeyOf(a.delivery.Group, action, stream, e.recordKey())
}
