package delivery

import (
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
)

// endLanes ends the lanes within StopTimeout, in three steps: it waits until they have finished their
// attempts, then it cuts the attempts off, then it abandons handlers that do not return.
func (r *Run) endLanes(clock handling.StopClock) {
	defer r.cutOff()
	for _, l := range r.Lanes {
		l.queue.close()
	}
	if r.lanesEnd(clock, handling.FinishBy) {
		return
	}
	r.cutOff()
	if r.lanesEnd(clock, handling.AbandonBy) {
		return
	}
	r.abandonLanes(clock)
	if r.lanesEnd(clock, handling.LeftBy) {
		return
	}
	for _, l := range r.Lanes {
		l.reportLeft()
	}
}

// lanesEnd waits for the end of all lanes. It returns false if they have not ended by a step of the stop.
func (r *Run) lanesEnd(clock handling.StopClock, percent int) bool {
	ctx, cancel := clock.By(percent)
	defer cancel()
	for _, l := range r.Lanes {
		select {
		case <-l.ended:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// releaseLast releases claims that no lane knows, so that they do not wait until their leases expire: the answers to
// them were lost, or a lane could not release them.
func (r *Run) releaseLast(clock handling.StopClock) {
	ctx, cancel := clock.By(handling.CloseBy)
	defer cancel()
	r.Dispatcher.releaseLast(ctx)
}

// abandonLanes abandons lanes whose handlers ignore the end of their contexts, and releases their other
// deliveries.
func (r *Run) abandonLanes(clock handling.StopClock) {
	ctx, cancel := clock.By(handling.LeftBy)
	defer cancel()
	var others []Delivery
	var calls []handling.Call
	for _, l := range r.Lanes {
		if call, released, ok := l.abandon(); ok {
			others, calls = append(others, released...), append(calls, call)
		}
	}
	for _, call := range calls {
		r.Dispatcher.noteBegun(ctx, call)
	}
	r.Dispatcher.release(ctx, others)
}

// abandon abandons a lane whose handler does not return although its context has ended. It returns the call and the
// other deliveries of the lane, which the handler has not blocked, or false if there is no such call.
func (l *lane) abandon() (call handling.Call, others []Delivery, ok bool) {
	call, ok = l.activity.Current()
	if !ok || l.hasEnded() {
		return call, nil, false
	}
	l.activity.CutOff()
	l.held.Release()
	l.log.ErrorContext(call.Context, "outbox: "+call.FunctionName()+" does not return although its context has ended; "+
		"its event is retried when its lease expires", call.Attrs()...)
	return call, append(slices.Concat(l.queue.takeAll()...), l.claimed.othersOf(call)...), true
}

func (l *lane) hasEnded() bool {
	select {
	case <-l.ended:
		return true
	default:
		return false
	}
}

// reportLeft logs that a lane has not ended, unless abandon has logged its handler.
func (l *lane) reportLeft() {
	if _, calls := l.activity.Current(); !calls && !l.hasEnded() {
		l.activity.CutOff()
		l.held.Release()
		l.log.Error("outbox: a lane does not end in time; its deliveries are retried when their leases expire")
	}
}

// ReportHealth calls notReady if the lane makes no progress, with the reason. It returns false if only a
// restart helps.
func (l *lane) ReportHealth(notReady func(reason string, args ...any)) (live bool) {
	if since, ok := l.activity.AwaitsTx(); ok && time.Since(since) > l.cfg.SlowHandler {
		notReady("a transaction has not begun for %v: the pool has no connection left, or event_handled is locked",
			time.Since(since).Round(time.Second))
	}
	handling.ReportCommit(&l.activity, l.cfg.SlowHandler, "", notReady)
	return handling.ReportCall(&l.activity, l.cfg.Rules, notReady)
}
