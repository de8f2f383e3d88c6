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

// headersOf yields the headers of a record.
func headersOf(r *kgo.Record) iter.Seq2[string, []byte] {
	return func(yield func(string, []byte) bool) {
		for _, h := range r.Headers {
			if !yield(h.Key, h.Value) {
				return
			}
		}
	}
}

// replay says for whom a record was sent back from a dead-letter topic.
type replay struct{ group, action string } // "" for any

// reader makes tasks of the records of a consumer, whose workers share it.
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
	blocked map[*handling.Handler]bool // they are not called here; false until the task is parked
}

// isBlocked reports whether a task is not to be handled here.
func (it *recordItem) isBlocked(t handling.Task) bool {
	_, blocked := it.blocked[t.Handler]
	return blocked
}

// block notes that a task is not to be handled here.
func (it *recordItem) block(t handling.Task) {
	if it.blocked == nil {
		it.blocked = map[*handling.Handler]bool{}
	}
	it.blocked[t.Handler] = false
}

// noteParked notes that a task is parked.
func (it *recordItem) noteParked(t handling.Task) {
	it.block(t)
	it.blocked[t.Handler] = true
}

// takeBlocked returns the tasks that are still to be parked.
func (it *recordItem) takeBlocked() (tasks []handling.Task) {
	for _, t := range it.Tasks {
		if parked, blocked := it.blocked[t.Handler]; blocked && !parked {
			tasks = append(tasks, t)
			it.noteParked(t)
		}
	}
	return tasks
}

// originOf says where a record came from.
func originOf(r *kgo.Record, topicID kafka.TopicID) envelope.Origin {
	return envelope.Origin{Key: r.Key, Record: envelope.Place{Topic: r.Topic, Partition: r.Partition, Offset: r.Offset, Key: r.Key}, TopicID: topicID}
}

// newRecordItem returns a record without tasks.
func newRecordItem(r *kgo.Record, to replay, from *envelope.Origin) recordItem {
	return recordItem{record: r, replay: to, Item: handling.Item{Meta: envelope.Received{Headers: envelope.PlainHeaders(headersOf(r)), Kafka: &from.Record, Attempt: 1, Origin: from}}}
}

// read decodes a record and finds its handlers: all of them, or those for which it was
// sent back.
func (r *reader) read(ctx context.Context, record *kgo.Record, to replay, from *envelope.Origin) recordItem {
	it := newRecordItem(record, to, from)
	if record.Attrs.IsControl() { // nobody's, but it has an offset
		return it
	}
	if to.group != "" && to.group != r.processor.Rules.Group {
		return it
	}
	var m *envelope.Message
	err := handling.Guard(func() (err error) {
		m, err = r.decode(record)
		return err
	})
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

// isSkipped reports whether no handler gets an event, and nobody wants it: its type has no
// handler here, because topics are shared. A replay for this group is never skipped.
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

// isReplay reports whether a record says that it was sent back from a dead-letter topic.
func isReplay(r *kgo.Record) bool {
	return slices.ContainsFunc(r.Headers, func(h kgo.RecordHeader) bool { return deadletter.IsReplay(h.Key) })
}

// replayOf returns for whom a record was sent back from a dead-letter topic, by its own
// word.
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
