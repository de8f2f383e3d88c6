package delivery

import (
	"context"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
)

// endLanes ends the lanes within StopTimeout, in three steps: it waits until they have finished their
// attempts, then it cuts the attempts off, then it abandons handlers that do not return. Leases are renewed
// until the lanes have ended.
func (r *Run) endLanes(endBackground context.CancelFunc) {
	clock := handling.StopClock{Began: time.Now(), Timeout: r.parts.Rules.StopTimeout}
	defer endBackground()
	defer r.cutOff()
	for _, l := range r.Lanes {
		l.queue.close()
	}
	if r.lanesEnd(clock.Part(handling.FinishBy)) {
		return
	}
	r.cutOff()
	if r.lanesEnd(clock.Part(handling.AbandonBy - handling.FinishBy)) {
		return
	}
	r.abandonLanes(clock)
	if r.lanesEnd(clock.Part(handling.LeftBy - handling.AbandonBy)) {
		return
	}
	for _, l := range r.Lanes {
		l.reportLeft()
	}
}

// lanesEnd waits for the end of all lanes. It returns false if that takes too long.
func (r *Run) lanesEnd(timeout time.Duration) bool {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for _, l := range r.Lanes {
		select {
		case <-l.ended:
		case <-timer.C:
			return false
		}
	}
	return true
}

// abandonLanes abandons lanes whose handlers ignore the end of their contexts, and releases their other
// deliveries.
func (r *Run) abandonLanes(clock handling.StopClock) {
	var others []Delivery
	for _, l := range r.Lanes {
		others = append(others, l.abandon()...)
	}
	ctx, cancel := clock.By(handling.LeftBy)
	defer cancel()
	r.Dispatcher.release(ctx, others)
}

// abandon abandons a lane whose handler does not return although its context has ended. It returns the other
// deliveries of the lane, which the handler has not blocked.
func (l *lane) abandon() (others []Delivery) {
	call, ok := l.activity.Current()
	if !ok || l.hasEnded() {
		return nil
	}
	l.activity.CutOff()
	l.log.ErrorContext(call.Context, "outbox: "+call.FunctionName()+" does not return although its context has ended; "+
		"its event is retried when its lease expires", call.Attrs()...)
	return append(slices.Concat(l.queue.takeAll()...), l.claimed.othersOf(call)...)
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
	return handling.ReportCall(&l.activity, l.cfg.Rules, notReady)
}
