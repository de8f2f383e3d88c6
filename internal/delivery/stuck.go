package delivery

import (
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
)

// ReportHealth says why a lane does not get on. It returns false if only a restart helps.
func (l *lane) ReportHealth(notReady func(reason string, args ...any)) (live bool) {
	if since, ok := l.activity.AwaitsTx(); ok && time.Since(since) > l.cfg.SlowHandler {
		notReady("a transaction has not begun for %v: the pool has no connection left, or event_handled is locked", time.Since(since).Round(time.Second))
	}
	return handling.ReportCall(&l.activity, l.cfg.Rules, notReady)
}

// cutOff gives up a lane whose handler does not return although its context has ended. It returns what the lane has
// beside that.
func (l *lane) cutOff() (rest []Delivery) {
	call, ok := l.activity.Current()
	if !ok || l.hasEnded() {
		return nil
	}
	l.activity.CutOff()
	l.log.ErrorContext(call.Context, "outbox: "+call.What()+" does not return although its context has ended; its event is given up", call.Attrs()...)
	return append(slices.Concat(l.in.takeAll()...), l.hands.beside(call)...)
}

func (l *lane) hasEnded() bool {
	select {
	case <-l.ended:
		return true
	default:
		return false
	}
}

// reportLeft says that a lane has not ended, unless that was said for its handler.
func (l *lane) reportLeft() {
	if _, calls := l.activity.Current(); !calls && !l.hasEnded() {
		l.activity.CutOff()
		l.log.Error("outbox: a worker does not end in time; what it has is handled again when its lease expires")
	}
}
