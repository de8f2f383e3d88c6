package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/delivery"

	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/pgsession"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// intake makes deliveries of new events of the database, for the lanes of a worker. But for moved
// and backlog it belongs to the goroutine of the dispatcher.
type intake struct {
	cfg        *Rules
	delivery   *delivery.Rules
	fanOut     *fanOut
	dispatcher *delivery.Dispatcher
	processor  *handling.Processor // for its log
	log        *slog.Logger
	lease      *lease.GroupLease
	hooks      *contain.Callback // calls the hooks of what no lane has

	backlog   atomic.Bool // there were more events than could be taken
	moved     atomic.Bool // the group gets no new events
	round     fanOutRound
	lookAgain time.Time // whether the group still gets its events from Kafka
	starting  bool      // the group may have no position yet
}

// hasBacklog reports whether there were more events than could be taken when it looked last.
func (in *intake) hasBacklog() bool { return in.backlog.Load() }

// isMoved reports whether the group gets its events from Kafka now.
func (in *intake) isMoved() bool { return in.moved.Load() }

// fanOutRound is what has been planned in the round of fan-out under way.
type fanOutRound struct {
	left    map[*delivery.LaneKind]int // deliveries that its lanes can take
	status  map[delivery.Key]delivery.Status
	unknown []eventHead // no handler takes their types
}

// takeNew is dispatcher.takeNew.
func (in *intake) takeNew(ctx context.Context) (more, answered bool, err error) {
	if in.isMoved() && time.Now().Before(in.lookAgain) {
		return false, false, nil
	}
	in.round = fanOutRound{left: map[*delivery.LaneKind]int{}, status: map[delivery.Key]delivery.Status{}}
	limit := 0
	for _, k := range in.dispatcher.Kinds {
		in.round.left[k] = k.Room() * k.Batch()
		limit = max(limit, in.round.left[k])
	}
	if in.dispatcher.Full = limit == 0; in.dispatcher.Full {
		return false, false, nil
	}
	if in.starting || in.isMoved() {
		if err := in.begin(ctx); err != nil {
			return false, false, in.ifNotMoved(err)
		}
	}
	began := time.Now()
	events, more, err := in.fanOut.round(ctx, limit, in.dispatcher.Claimed.Budget(), func(rows []delivery.Delivery) error {
		in.deal(rows, began)
		return nil
	})
	in.dispatcher.PollSchedule.Polled(began, events)
	if err == nil && len(in.round.unknown) > 0 {
		in.reportUnknown(ctx, in.round.unknown)
	}
	in.backlog.Store(more)
	if errors.Is(err, pgx.ErrNoRows) || errors.Is(err, cursor.ErrOtherCluster) { // its position was deleted, or is another server's
		in.starting = true
		return true, false, nil
	}
	return more, err == nil, in.ifNotMoved(err)
}

// deal deals new rows to the lanes that take them.
func (in *intake) deal(rows []delivery.Delivery, made time.Time) {
	for _, k := range in.dispatcher.Kinds {
		var own []delivery.Delivery
		for _, r := range rows {
			if slices.Contains(k.Pairs, delivery.Pair{Action: r.Action, Stream: r.Stream}) {
				own = append(own, r)
			}
		}
		in.dispatcher.Deal(k, own, made)
	}
}

// begin makes sure that the group has a position here.
func (in *intake) begin(ctx context.Context) error {
	if err := in.fanOut.cursors.CheckSequence(ctx); err != nil {
		return err
	}
	if err := in.fanOut.begin(ctx, in.cfg.FromStart); err != nil {
		return err
	}
	err := in.fanOut.load(ctx, in.fanOut.db)
	if errors.Is(err, cursor.ErrOtherCluster) {
		if err = in.rebase(ctx); err == nil {
			err = in.fanOut.load(ctx, in.fanOut.db)
		}
	}
	if err != nil {
		return err
	}
	in.starting = false
	in.moved.Store(false)
	return nil
}

// rebase moves all positions here from the cluster that the database came from. One process of
// the group does that; for the others the lease is held meanwhile.
func (in *intake) rebase(ctx context.Context) error {
	began := time.Now()
	l, err := in.lease.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("rebase cursor: %w", err)
	}
	defer func() {
		if err := in.lease.GiveUp(l, in.delivery.StopTimeout); err != nil {
			in.log.Warn("outbox: the lease for a rebase is not released, it expires", "error", err)
		}
	}()
	if err := in.fanOut.load(ctx, in.fanOut.db); !errors.Is(err, cursor.ErrOtherCluster) { // another process was faster
		return err
	}
	unsent, err := in.fanOut.cursors.Rebase(ctx, l)
	if err == nil {
		in.log.Warn("outbox: database was restored from another cluster, the cursor is moved to this one",
			"unsent", unsent, "took", time.Since(began).Round(time.Millisecond))
	}
	return err
}

// ifNotMoved returns an error, unless it says that the group gets its events from Kafka. This is looked at
// again after PollInterval.
func (in *intake) ifNotMoved(err error) error {
	if !errors.Is(err, errMoved) {
		return err
	}
	in.lookAgain = time.Now().Add(in.cfg.PollInterval)
	in.moved.Store(true)
	return nil
}

// reportUnknown logs events of types without a handler, and calls hooks for them.
func (in *intake) reportUnknown(ctx context.Context, events []eventHead) {
	all := make([]envelope.Received, len(events))
	for i, e := range events {
		stream, _ := e.destination() // plan has had it
		all[i] = envelope.Received{Type: e.eventType, Subject: e.aggregate, Origin: &envelope.Origin{Key: []byte(e.recordKey()), Stream: stream}}
		if in.delivery.DeadLetterUnknown {
			in.log.Error("outbox: event is dead, the group has no handler for its type", "stream", stream, "type", e.eventType, "outbox_id", e.id)
		} else {
			in.processor.LogSkipped(&all[i])
		}
	}
	h := in.delivery.Hooks
	if h.Unknown == nil && h.DeadLettered == nil {
		return
	}
	in.hooks.Notify(ctx, func() {
		for i := range all {
			m := &all[i]
			if h.Unknown != nil {
				h.Unknown(m)
			}
			if in.delivery.DeadLetterUnknown && h.DeadLettered != nil {
				h.DeadLettered(m, "", "", handling.UnknownType(m.Type))
			}
		}
	})
}

// plan says what is owed for an event: a delivery for each of its handlers.
func (in *intake) plan(e eventHead) (owed []delivery.New) {
	stream, err := e.destination()
	if err != nil || !in.fanOut.routes.streams[stream] {
		return nil
	}
	most := delivery.Attempts(in.delivery.Of(stream).MaxRetries)
	pairs := in.fanOut.routes.byType[e.eventType]
	for _, p := range pairs {
		if p.Stream == stream {
			key := in.keyOf(e, p.Action, stream)
			owed = append(owed, delivery.New{OutboxID: e.id, Action: p.Action, Stream: stream, Key: key, MaxAttempts: most, Status: in.statusOf(key, p)})
		}
	}
	if len(owed) > 0 {
		return owed
	}
	in.round.unknown = append(in.round.unknown, e)
	if in.delivery.DeadLetterUnknown {
		owed = append(owed, delivery.New{OutboxID: e.id, Stream: stream, Key: in.keyOf(e, "", stream), Status: delivery.Dead, MaxAttempts: most})
	}
	return owed
}

// statusOf returns what a new delivery becomes if its key is free: it is for this worker as long as its
// lanes can take more. What follows in the same key is with it.
func (in *intake) statusOf(key delivery.Key, pair delivery.Pair) delivery.Status {
	if s, ok := in.round.status[key]; ok && key.Ordered {
		return s
	}
	status, rest := delivery.Pending, delivery.Parked
	for k, left := range in.round.left {
		if left > 0 && slices.Contains(k.Pairs, pair) && !in.dispatcher.Pauses.IsPaused(pair.Stream) && in.dispatcher.Breakers.IsClosed(pair.Action) {
			in.round.left[k]--
			status, rest = delivery.Processing, delivery.Processing
		}
	}
	in.round.status[key] = rest
	if status == delivery.Pending {
		in.dispatcher.SignalDue()
	}
	return status
}

func (in *intake) keyOf(e eventHead, action, stream string) delivery.Key {
	if in.cfg.Unordered {
		return delivery.Key{}
	}
	return delivery.KeyOf(in.delivery.Group, action, stream, e.recordKey())
}

// Which deliveries an event is owed is said by all workers of a group together: while a release is
// rolled out, processes that do not know its new handlers make deliveries too. So each worker
// writes down in event_subscription what its handlers take, and what a process has no handler for
// it makes deliveries of that wait for one which has. What no worker has confirmed for
// routeLife is no longer owed.
const routeLife = time.Hour

// sqlSubscribe adds the routes $2 of a worker to those of its group, and drops what nobody confirms. Their
// version says whether there are others than before.
const sqlSubscribe = `
INSERT INTO {schema}.event_subscription AS s (consumer_group, routes, routes_version)
SELECT $1::text, jsonb_object_agg(route, extract(epoch FROM now())::bigint), 1 FROM unnest($2::text[]) AS route
    ON CONFLICT (consumer_group) DO UPDATE
   SET (routes, routes_version) = (
       SELECT m.routes, s.routes_version + CASE WHEN ARRAY(SELECT k FROM jsonb_object_keys(m.routes) AS k ORDER BY k)
                                                   = ARRAY(SELECT k FROM jsonb_object_keys(s.routes) AS k ORDER BY k) THEN 0 ELSE 1 END
         FROM (SELECT jsonb_object_agg(key, value) AS routes FROM jsonb_each(s.routes || excluded.routes)
                WHERE value::bigint > extract(epoch FROM now() - $3::interval)) AS m)`

// sqlRoutes reads the routes of a group if they are others than those of version $2.
const sqlRoutes = `
SELECT routes_version, CASE WHEN routes_version <> $2 THEN routes::text END FROM {schema}.event_subscription WHERE consumer_group = $1::text`

// groupRoutes say which pairs of action and stream get an event type, in a group.
type groupRoutes struct {
	version int64
	streams map[string]bool
	byType  map[string][]delivery.Pair
}

// read takes over routes of a version.
func (g *groupRoutes) read(version int64, text string) error {
	var stored map[string]int64
	if err := json.Unmarshal([]byte(text), &stored); err != nil {
		return fmt.Errorf("read event_subscription.routes: %w", err)
	}
	*g = groupRoutes{version: version, streams: map[string]bool{}, byType: map[string][]delivery.Pair{}}
	for _, route := range slices.Sorted(maps.Keys(stored)) {
		parts := strings.SplitN(route, "\n", 3)
		if len(parts) < 3 {
			return fmt.Errorf("read event_subscription.routes: %w: %q", check.ErrMalformed, route)
		}
		eventType, stream, action := parts[0], parts[1], parts[2]
		g.streams[stream] = true
		g.byType[eventType] = append(g.byType[eventType], delivery.Pair{Action: action, Stream: stream})
	}
	return nil
}

// routesOf returns what the handlers of a process take, as event_subscription has it: event type, stream
// and action, with line breaks between them.
func routesOf(r handling.Routes) (all []string) {
	for eventType, route := range r.ByName {
		for _, topic := range r.TopicsOf(route) {
			for h := range route.Handlers() {
				all = append(all, eventType+"\n"+topic+"\n"+h.Action)
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// listen has the process that has the lock of its group hear notifications, and look often for events after one. The
// other processes of the group look at each poll, and take what it does not get to. Where PostgreSQL gives no session,
// behind a pooler for example, all of them do.
func (r *workerRun) listen(ctx context.Context, member *wakeup.Member) {
	s := pgsession.Of(r.db)
	defer s.Use(r.processor.Log)()
	const unavailable, held = 100 * time.Millisecond, time.Second // how long to wait then
	for ctx.Err() == nil && s.State() != pgsession.Pooled {
		lock, err := s.TryLock(ctx, r.delivery.Schema, tables.WorkerPrefix+r.Group())
		switch {
		case err != nil:
			if !errors.Is(err, pgsession.ErrUnavailable) && ctx.Err() == nil {
				r.processor.Log.Debug("outbox: the lock of the group cannot be taken, and new events are seen at the next poll", "error", err)
			}
			wait.Sleep(ctx, unavailable)
			continue
		case lock == nil:
			wait.Sleep(ctx, held)
			continue
		}
		r.Dispatcher.Listens.Store(true)
		member.Lead(true)
		select {
		case <-lock.Lost():
		case <-ctx.Done():
		}
		member.Lead(false)
		r.Dispatcher.Listens.Store(false)
		lock.Unlock(ctx)
	}
}
