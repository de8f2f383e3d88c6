package consumer

import (
	"context"
	"iter"
	"slices"

	"github.com/outboxgo/outbox/internal/handling"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
)

// replay is the group and the action that a record was replayed for. Both are "" for any other record.
type replay struct {
	group, action string
	edited        bool // an operator has edited the dead letter
}

// reader decodes records and finds their handlers. All workers of a consumer share it.
type reader struct {
	processor *handling.Processor
	decode    func(*kgo.Record) (*envelope.Message, error)
	noReplay  outage.Seldom
}

// recordItem is a record and its tasks.
type recordItem struct {
	handling.Item
	record  *kgo.Record
	replay  replay
	blocked map[*handling.Handler]bool // handlers that are not called here; true once their task is parked
	whole   bool                       // the marked tasks are parked behind a row without an action, see blockAll
	noted   []*handling.Handler        // whose breakers know that they have succeeded
	done    bool                       // the tasks with a transaction are committed
}

// isBlocked reports whether a task is not to be called any more: it is parked or to be parked, or it is done.
func (it *recordItem) isBlocked(t handling.Task) bool {
	_, blocked := it.blocked[t.Handler]
	return blocked || it.done && t.Kind != handling.NoTx
}

// noteDone marks the tasks with a transaction that are committed: all but those that it has left out. Of these, those
// whose keys were blocked when it began are to be parked.
func (it *recordItem) noteDone(excluded handling.Excluded) {
	if len(it.blocked) == 0 && !excluded.HasEvent(it.Meta.Origin) {
		it.done = true
		return
	}
	for _, t := range it.Tasks {
		switch out := excluded.Of(&t); {
		case t.Kind == handling.NoTx || it.isBlocked(t):
		case out == nil:
			it.noteParked(t)
		case out.AtBegin:
			it.block(t)
		}
	}
}

// block marks a task that is to be parked.
func (it *recordItem) block(t handling.Task) {
	if it.blocked == nil {
		it.blocked = map[*handling.Handler]bool{}
	}
	it.blocked[t.Handler] = false
}

// blockAll marks all tasks: an earlier record of the key has a row without an action, and the key waits for it. They
// are parked with the key of that row.
func (it *recordItem) blockAll() {
	it.whole = true
	for _, t := range it.Tasks {
		if !it.isBlocked(t) {
			it.block(t)
		}
	}
}

// keyAction returns the action of the key with which a marked task is parked.
func (it *recordItem) keyAction(t handling.Task) string {
	if it.whole {
		return ""
	}
	return t.Action
}

// noteParked marks a task that is parked.
func (it *recordItem) noteParked(t handling.Task) {
	it.block(t)
	it.blocked[t.Handler] = true
}

// toPark returns the tasks that are marked as blocked and not parked.
func (it *recordItem) toPark() iter.Seq[handling.Task] {
	return func(yield func(handling.Task) bool) {
		for _, t := range it.Tasks {
			if parked, blocked := it.blocked[t.Handler]; blocked && !parked && !yield(t) {
				return
			}
		}
	}
}

// takeBlocked returns the tasks that are to be parked, and marks them as parked.
func (it *recordItem) takeBlocked() (tasks []handling.Task) {
	for t := range it.toPark() {
		tasks = append(tasks, t)
		it.noteParked(t)
	}
	return tasks
}

// originOf returns the origin of a record's event.
func originOf(r *kgo.Record, topicID kafka.TopicID) envelope.Origin {
	return envelope.Origin{Key: r.Key, Record: envelope.Place{Topic: r.Topic, Partition: r.Partition, Offset: r.Offset, Key: r.Key}, TopicID: topicID}
}

// newRecordItem returns the item of a record that was not decoded. It has no tasks.
func newRecordItem(r *kgo.Record, to replay, from *envelope.Origin) recordItem {
	return recordItem{record: r, replay: to, Item: handling.Item{Meta: envelope.Received{Headers: envelope.PlainHeaders(kafka.Headers(r)), Kafka: &from.Record, Attempt: 1, Origin: from}}}
}

// read decodes a record and finds its handlers: all, or for a replay only those it is for.
func (r *reader) read(ctx context.Context, record *kgo.Record, to replay, from *envelope.Origin) recordItem {
	it := newRecordItem(record, to, from)
	if record.Attrs.IsControl() { // it has an offset, but no event
		return it
	}
	if to.group != "" && to.group != r.processor.Rules.Group {
		return it
	}
	m, err := r.decodeRecord(record, &it.Meta)
	switch {
	case err != nil:
		it.Class, it.Err = handling.ClassUndecodable, err
	case m != nil:
		r.processor.Resolve(ctx, &it.Item, m, to.action)
	}
	if it.Class == handling.ClassUnknownAction {
		it.Err = handling.UnknownAction(it.Meta.Type, deadletter.ReplayAction, to.action)
	}
	return it
}

// decodeRecord decodes a record, and says in the metadata whether it is a tombstone. A record of which something is
// missing cannot be decoded.
func (r *reader) decodeRecord(record *kgo.Record, about *envelope.Received) (m *envelope.Message, err error) {
	if missing := omissionOf(record); missing != nil {
		return nil, missing
	}
	err = handling.Guard(func() (err error) {
		m, err = r.decode(record)
		return err
	})
	about.Tombstone = record.Value == nil && m.IsTombstone()
	return m, err
}

// isSkipped reports whether an event is skipped because no handler has its type: topics are shared. A
// replay for this group is never skipped.
func (it *recordItem) isSkipped(deadLetterUnknown bool) bool {
	return it.Class == handling.ClassUnknownType && !deadLetterUnknown && it.replay.group == ""
}

// tasksInTx returns the tasks of items that need a transaction and are not parked.
func tasksInTx(items []recordItem) []handling.Task {
	tasks := make([]handling.Task, 0, len(items))
	for i := range items {
		for _, t := range items[i].Tasks {
			if t.Kind != handling.NoTx && !items[i].isBlocked(t) {
				tasks = append(tasks, t)
			}
		}
	}
	return tasks
}

// isReplay reports whether a record has headers of a replay, genuine or forged.
func isReplay(r *kgo.Record) bool {
	return slices.ContainsFunc(r.Headers, func(h kgo.RecordHeader) bool { return deadletter.IsReplay(h.Key) })
}

// replayOf returns the group and action of a record's replay headers. It does not verify them.
func replayOf(r *kgo.Record) (to replay) {
	for _, h := range r.Headers {
		switch h.Key {
		case deadletter.ReplayGroup:
			to.group = string(h.Value)
		case deadletter.ReplayAction:
			to.action = string(h.Value)
		}
	}
	return to
}

// withoutReplay returns a record without the headers of a replay.
func withoutReplay(r *kgo.Record) *kgo.Record {
	plain := *r
	plain.Headers = slices.DeleteFunc(slices.Clone(r.Headers), func(h kgo.RecordHeader) bool { return deadletter.IsReplay(h.Key) })
	return &plain
}
