package consumer

import (
	"context"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/starts"
)

// handlersOf returns the handlers that a consumer registers for its group.
func handlersOf(routes handling.Routes) (all []starts.Handler) {
	for name, route := range routes.ByName {
		for _, topic := range routes.TopicsOf(route) {
			for h := range route.Handlers() {
				all = append(all, starts.Handler{Topic: topic, Action: h.Action, EventType: name})
			}
		}
	}
	return all
}

// missedEvents are the events of a partition that members without some handlers have passed. The client fetches them
// before the records that follow the committed offset. Only the handlers that have missed them get them, and no
// offset is committed meanwhile. So the partition waits, and these handlers get the events of a key in their order.
//
// A failed event of a gap is parked, as any other. If the member stops before the end of the gap, the next one with
// the handlers goes on there. After a crash events of the last second arrive again; notes make that harmless.
//
// If Kafka has lost records before the committed offset, it has given their offsets to new ones, which no handler has
// seen. The gap ends at the first of these, and this offset is committed.
type missedEvents struct {
	gaps    []starts.Gap
	until   kgo.EpochOffset // the committed offset, with the epoch of the record before it, or -1
	next    int64           // all records before it are handled
	saved   int64           // next when it was saved
	savedAt time.Time       // when it was tried to save next
}

// gapSave is how often the position in a gap is saved.
const gapSave = time.Second

// provePause is the pause after a commit that Kafka has not taken.
const provePause = 100 * time.Millisecond

// openGap returns what handlers have missed before the committed offset, or nil. Only run calls it.
func (w *partitionWorker) openGap() *missedEvents {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gap != nil && w.cut != nil && w.cut.Offset < w.gap.until.Offset {
		w.gap.until = *w.cut
	}
	return w.gap
}

// isBehind reports whether a record is none that other handlers of the group have had: it is at the committed offset or
// behind it, or newer than the record before that offset. Epochs never decrease in a log.
func (m *missedEvents) isBehind(r *kgo.Record) bool {
	return r.Offset >= m.until.Offset || m.until.Epoch >= 0 && r.LeaderEpoch > m.until.Epoch
}

// writtenAnew notes an offset from which on Kafka has written records in place of lost ones. The caller holds mu.
func (w *partitionWorker) writtenAnew(from int64) {
	if w.anew == starts.None || from < w.anew {
		w.anew = from
	}
}

// openGaps has the handlers that this member lacks get the records that Kafka has written in place of lost ones: their
// gaps begin where the member has begun, and these records may be before that. It must return before one of these is
// handled, and its offset committed. It returns false if the worker is stopped.
func (w *partitionWorker) openGaps() bool {
	w.mu.Lock()
	from := w.anew
	w.mu.Unlock()
	if from == starts.None {
		return true
	}
	if w.write(func(ctx context.Context) error { return w.group.openGaps(ctx, w.partition, from) }) != nil {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.anew == from { // otherwise the poll loop has found another one since, before it has got records from there
		w.anew = starts.None
	}
	return true
}

// cutGap ends a gap at a record that Kafka has written in place of a lost one.
func (w *partitionWorker) cutGap(gap *missedEvents, at *kgo.Record) {
	w.mu.Lock()
	w.writtenAnew(at.Offset)
	w.mu.Unlock()
	w.group.truncated(&kgo.ErrDataLoss{
		Topic: w.partition.Topic, Partition: w.partition.Number,
		ConsumedTo: gap.until.Offset, ConsumedToEpoch: gap.until.Epoch, ResetTo: at.Offset, ResetToEpoch: at.LeaderEpoch,
	})
	gap.until = kgo.EpochOffset{Epoch: at.LeaderEpoch, Offset: at.Offset}
}

// handleMissed handles the records before the committed offset, for the handlers that have missed them. It returns the
// other records, or none if the worker is stopped.
func (w *partitionWorker) handleMissed(records []*kgo.Record) (others []*kgo.Record) {
	gap := w.openGap()
	if gap == nil {
		return records
	}
	n := slices.IndexFunc(records, gap.isBehind)
	if n < 0 {
		n = len(records)
	}
	if n > 0 {
		w.missed = gap
		w.handle(records[:n])
		w.missed = nil
		if gap.next <= records[n-1].Offset { // stopped
			return nil
		}
	}
	if n < len(records) && records[n].Offset < gap.until.Offset {
		if w.cutGap(gap, records[n]); !w.openGaps() {
			return nil
		}
	}
	if n < len(records) || gap.next >= gap.until.Offset {
		gap.next = gap.until.Offset
		if !w.saveGap(gap) {
			return nil
		}
		w.closeGap()
	} else if time.Since(gap.savedAt) > gapSave {
		w.saveGap(gap)
	}
	return records[n:]
}

// saveGap saves the position in a gap, or removes the gap if it is read to its end. It returns false if the worker is
// stopped. A stopped worker tries it once.
func (w *partitionWorker) saveGap(gap *missedEvents) (saved bool) {
	for i := range gap.gaps {
		gap.gaps[i].From = max(gap.gaps[i].From, gap.next)
	}
	gap.savedAt = time.Now()
	if gap.next >= gap.until.Offset && !w.proveHeld(gap) {
		return false
	}
	pass := func(ctx context.Context) error { return w.group.passGaps(ctx, gap.gaps, gap.until.Offset) }
	if w.stopping.Err() == nil {
		if w.write(pass) != nil {
			return false
		}
		gap.saved = gap.next
		return true
	}
	ctx, cancel := context.WithTimeout(w.held, delivery.WriteTimeout)
	defer cancel()
	if err := pass(ctx); err != nil {
		w.log.Debug("outbox: the position in missed events is not saved; they are read again", "partition", w.partition.Name(), "error", err)
	}
	return false
}

// proveHeld waits until Kafka has taken a commit of this member. Only then a gap that is read to its end may be
// removed: the member has held the partition since the gap was read, so no member without the handler has passed events
// since. It returns false if the worker is stopped.
func (w *partitionWorker) proveHeld(gap *missedEvents) bool {
	for w.stopping.Err() == nil {
		err := w.group.proveHeld(w.held, w.partition, gap.until)
		if err == nil {
			return true
		}
		w.log.Debug("outbox: Kafka has taken no commit, so missed events are not noted as handled yet", "partition", w.partition.Name(), "error", err)
		w.pause(provePause)
	}
	return false
}

// saveUnread saves the position in a gap that is not read to its end. The worker calls it when it ends.
func (w *partitionWorker) saveUnread() {
	if gap := w.openGap(); gap != nil && gap.saved < gap.next {
		w.saveGap(gap)
	}
}

// closeGap notes that the gap is read to its end.
func (w *partitionWorker) closeGap() {
	w.mu.Lock()
	until := w.gap.until.Offset
	w.gap, w.cut, w.saved = nil, nil, until
	w.mu.Unlock()
	w.log.Info("outbox: handlers have handled what they had missed of a partition", "partition", w.partition.Name(), "until", until)
}

// pick removes the tasks of handlers that have not missed the event. A nil receiver removes none.
//
// An event that cannot be decoded becomes a dead letter if one of these handlers may be for it. If a member has made it
// a dead letter before, it has a row in event_delivery already.
func (m *missedEvents) pick(items []recordItem) {
	if m == nil {
		return
	}
	for i := range items {
		it := &items[i]
		missed := func(action string) bool {
			return slices.ContainsFunc(m.gaps, func(g starts.Gap) bool {
				return g.From <= it.record.Offset && g.EventType == it.Meta.Type && (g.Action == action || action == "")
			})
		}
		it.Tasks = slices.DeleteFunc(it.Tasks, func(t handling.Task) bool { return !missed(t.Action) })
		if it.Class != handling.ClassUndecodable || it.Meta.Type != "" && !missed("") {
			it.Class, it.Err = "", nil
		}
	}
}
