package delivery

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
)

// yieldWait is how long a process does not claim a delivery that it has yielded. Other processes may claim it at once.
const yieldWait = 30 * time.Second

// maxYielded bounds the cost of claims. A delivery that is yielded above it waits for all processes.
const maxYielded = 1000

// yielded has the deliveries that this process has yielded, and until when it does not claim them. The zero value is
// ready, and safe for concurrent use.
type yielded struct {
	mu     sync.Mutex
	until  map[int64]time.Time
	again  map[int64]bool     // deliveries that were yielded before; at most maxYielded
	warned map[[3]string]bool // action, type and stream of those that were logged
}

// comesAgain notes that a delivery is yielded, and reports whether it was before, once for each kind.
func (y *yielded) comesAgain(d *Delivery) bool {
	y.mu.Lock()
	defer y.mu.Unlock()
	if y.again == nil || len(y.again) >= maxYielded {
		y.again = map[int64]bool{}
	}
	if y.warned == nil {
		y.warned = map[[3]string]bool{}
	}
	kind := [3]string{d.Action, d.Type, d.Stream}
	if y.again[d.ID] && !y.warned[kind] && len(y.warned) < maxYielded {
		y.warned[kind] = true
		return true
	}
	y.again[d.ID] = true
	return false
}

// current returns the ids of the deliveries that this process does not claim at the moment.
func (y *yielded) current() []int64 {
	y.mu.Lock()
	defer y.mu.Unlock()
	ids := make([]int64, 0, len(y.until))
	for id, until := range y.until {
		if time.Now().After(until) {
			delete(y.until, id)
			continue
		}
		ids = append(ids, id)
	}
	return ids
}

// add adds a delivery, and reports whether there was room for it.
func (y *yielded) add(id int64) bool {
	y.mu.Lock()
	defer y.mu.Unlock()
	if y.until == nil {
		y.until = map[int64]time.Time{}
	}
	if len(y.until) >= maxYielded {
		return false
	}
	y.until[id] = time.Now().Add(yieldWait)
	return true
}

// yield gives back a delivery that would be dead because this process does not know its type, if another process may.
// It reports whether it did. No attempt counts.
//
//   - A delivery with an action was decoded by the process that made it, as a type for which this process has a
//     handler. A decoder of another release has returned another type here. The delivery waits for a process that
//     decodes it as before.
//   - A delivery without an action waits as long as a live process has a handler for its type, or may have one that it
//     could not confirm in an outage.
//   - A delivery from Kafka that a worker cannot decode waits for a consumer, which may have another decoder.
func (l *lane) yield(it *laneItem, o handling.Outcome) bool {
	forOthers, err := l.isForOthers(it, o)
	if err != nil { // in a stop, the delivery is released
		return true
	}
	if !forOthers {
		return false
	}
	f := l.failureOf(it, o)
	f.Uncounted, f.Postponed, f.MaxAttempts = true, true, max(it.MaxAttempts, it.Attempt)
	if o.Class == handling.ClassUndecodable && it.LastCode != "" { // for this process only, so the error of the handler stays
		f.Code, f.Message = it.LastCode, it.LastMessage
	}
	if !l.store.yielded.add(it.ID) {
		f.Wait = yieldWait
	}
	if _, err := l.writeFailure(it, f); err != nil { // lost: the process that has it now decides
		return true
	}
	l.log.Debug("outbox: a delivery waits for another process of the group, this one has no handler for its type",
		handling.EventAttrs(&it.Meta, "action", it.Action, "error", o.Err)...)
	if l.store.yielded.comesAgain(&it.Delivery) {
		l.log.Warn("outbox: deliveries come back to this process, which decodes their events as a type without a handler; "+
			"they and the later ones of their keys wait for a process that decodes them as the one that made them",
			handling.EventAttrs(&it.Meta, "action", it.Action, "stream", it.Stream, "error", o.Err)...)
	}
	l.signalDue()
	l.retryAt(time.Now().Add(yieldWait))
	return true
}

// codeBlocked is the last_error_code of a row that waits for rows of another key.
const codeBlocked = "blocked"

// blockedWait is how long such a row waits before its keys are checked again.
const blockedWait = 2 * time.Second

var errBlocked = errors.New("an earlier event of the key waits for the same action")

// otherKeys returns the keys of an item's actions, if its row has the key of no action.
func (l *lane) otherKeys(it *laneItem) (keys []int64) {
	if !it.FromKafka || !it.Key.Ordered {
		return nil
	}
	for _, t := range it.Tasks {
		if key := KeyOf(l.store.group, t.Action, it.Stream, string(it.Meta.Origin.Key)); key != it.Key {
			keys = append(keys, key.Digest)
		}
	}
	return keys
}

// postponeBehind has a delivery with the key of no action wait for earlier deliveries with the keys of its actions. No
// attempt counts. It reports whether the delivery waits or is lost.
func (l *lane) postponeBehind(it *laneItem) bool {
	keys := l.otherKeys(it)
	if len(keys) == 0 {
		return false
	}
	waits := false
	err := l.write(func(ctx context.Context) (err error) {
		waits, err = l.store.waitsFor(ctx, keys, it.ID)
		return err
	})
	if err != nil { // in a stop, the delivery is released
		return true
	}
	if !waits {
		return false
	}
	l.holdBack(it, handling.Outcome{Class: codeBlocked, Err: errBlocked}, blockedWait)
	return true
}

// holdBack has a delivery wait that was not tried. No attempt counts.
func (l *lane) holdBack(it *laneItem, o handling.Outcome, wait time.Duration) {
	f := l.failureOf(it, o)
	f.Uncounted, f.Postponed, f.MaxAttempts, f.Wait = true, true, max(it.MaxAttempts, it.Attempt), wait
	if _, err := l.writeFailure(it, f); err == nil {
		l.retryAt(time.Now().Add(wait))
	}
}

// isForOthers reports whether another process may handle a delivery that this one does not know. It fails only in a
// stop.
func (l *lane) isForOthers(it *laneItem, o handling.Outcome) (forOthers bool, err error) {
	if it.ValueIn != "" {
		return false, nil
	}
	if it.FromKafka && l.deadLetter == nil && o.Class == handling.ClassUndecodable {
		return !it.hasNoAttemptLeft(), nil
	}
	unknownType := o.Class == handling.ClassUnknownType
	if it.Action != "" {
		return !it.hasNoAttemptLeft() && (unknownType || o.Class == handling.ClassUnknownAction), nil
	}
	if !unknownType {
		return false, nil
	}
	err = l.write(func(ctx context.Context) (err error) {
		forOthers, err = l.store.handledElsewhere(ctx, it.Meta.Type, it.Stream)
		return err
	})
	return forOthers, err
}

// knowsTypeNow reports whether a delivery without an attempt left, which was dead because no handler had its type, has
// a handler in this process. A process of another release has received its event.
func (l *lane) knowsTypeNow(it *laneItem, eventType string) bool {
	return it.Action == "" && it.LastCode == handling.ClassUnknownType && l.processor.Routes.ByName[eventType] != nil
}
