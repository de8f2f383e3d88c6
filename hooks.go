package outbox

import (
	"context"
	"iter"
	"time"

	"github.com/outboxgo/outbox/internal/handling"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/relay"
	"github.com/outboxgo/outbox/internal/retention"
	"github.com/outboxgo/outbox/internal/tables"
)

// Hooks serve metrics and traces; the module outboxotel has hooks for OpenTelemetry. Several goroutines call them.
// Hooks must return quickly. Nil hooks are not called.

// RecorderHooks are called by [Recorder.Record], [Recorder.Queue] and [Recorder.Statement].
type RecorderHooks struct {
	// Recording is called before events are encoded. RecorderConfig.TraceParent, Headers and PostgreSQL get the
	// context that it returns. Done is called at the end, with an error if that is a panic. Record passes its error to
	// Done. Queue and Statement call Done once the events are on the batch or in the statement; they do not know the
	// answer of PostgreSQL.
	Recording func(ctx context.Context, events []DomainEvent) (recording context.Context, done func(error))
}

// RelayHooks are called while a relay works.
//
//   - If a hook panics, the panic is logged with its stack, and the relay goes on.
//   - If a hook has not returned after ten seconds, the log says so, and the relay goes on. The hook is not called
//     again until it has returned.
//   - A relay that stops waits a quarter of a second for a hook.
type RelayHooks struct {
	// Leading is called when this process takes the lease, and when it no longer holds the lease.
	Leading func(leading bool)
	// Sent is called after a batch was sent, with the outcomes of its events.
	Sent func(SentBatch)
	// Breaker is called after each change of the breaker's state. When a closed breaker opens, failureRate is the share
	// of failures that was measured, from BreakerConfig.FailureRate to 1. Else it is 0. The relay does not wait for it.
	Breaker func(from, to BreakerState, failureRate float64)
	// Rejected is called for an event that Kafka rejected and that will be retried.
	Rejected func(FailedEvent)
	// Dead is called for an event that Kafka rejected after its last retry.
	Dead func(FailedEvent)
	// RowsRemoved is called after each run of retention that removed rows.
	RowsRemoved func(RetentionResult)
}

// SentBatch holds the outcomes of events that were sent together. It is valid only
// during the call of the hook.
type SentBatch struct {
	// Events is how many events Kafka has accepted. Failed is how many events Kafka rejected, or did not accept because
	// it was unavailable. Waiting is how many events were not sent, because an earlier event of their key waits.
	Events, Failed, Waiting int
	// Expired is how many events were not sent because they had expired, see EventOptions.Expires.
	Expired int
	// Retried is set if the events come from outbox_failed.
	Retried bool
	// Began is when the sending began.
	Began time.Time
	// Took is the time until the last outcome was known.
	Took time.Duration

	outcomes relay.SentBatch
}

// All yields the events that Kafka has accepted, in the order in which they were sent.
func (b SentBatch) All() iter.Seq[SentEvent] {
	return func(yield func(SentEvent) bool) {
		for _, s := range b.outcomes.Sent {
			if !yield(SentEvent{s.Event, s.Topic, s.Sent}) {
				return
			}
		}
	}
}

// NotTaken yields the events that count as Failed, each with its error class, as in outbox_failed.error_class.
func (b SentBatch) NotTaken() iter.Seq2[SentEvent, string] {
	return func(yield func(SentEvent, string) bool) {
		for _, n := range b.outcomes.NotTaken {
			if !yield(SentEvent{n.Event, n.Topic, n.Sent}, n.Class) {
				return
			}
		}
	}
}

// SentEvent is an event of a [SentBatch].
type SentEvent struct {
	e     *envelope.Event
	topic string
	sent  relay.SentTo
}

// OutboxID returns outbox.id.
func (s SentEvent) OutboxID() int64 { return s.e.ID }

// ID returns the CloudEvents id.
func (s SentEvent) ID() string { return string(s.e.EventID) }

// Type returns the CloudEvents type.
func (s SentEvent) Type() string { return string(s.e.EventType) }

// Topic returns the topic, or "" if none follows from the event type.
func (s SentEvent) Topic() string { return s.topic }

// Partition returns the partition of the record. It is meaningful only for an event of [SentBatch.All], like Offset and
// SentAt.
func (s SentEvent) Partition() int32 { return s.sent.Partition.Number }

// Offset returns the offset of the record in its partition, or -1 if Kafka has not told it.
func (s SentEvent) Offset() int64 { return s.sent.Offset }

// SentAt returns the timestamp of the record: when the Kafka client got it, by the clock of this process. On a topic
// with message.timestamp.type=LogAppendTime, consumers see the broker's time instead.
func (s SentEvent) SentAt() time.Time { return s.sent.Time }

// Key returns the record key.
func (s SentEvent) Key() string { return string(s.e.Key()) }

// Size returns the length of the payload, in bytes.
func (s SentEvent) Size() int { return len(s.e.Payload) }

// Tombstone reports whether the value of the record is null, see [EventOptions].
func (s SentEvent) Tombstone() bool { return s.e.IsTombstone() }

// RecordedAt returns when the transaction that recorded the event began.
func (s SentEvent) RecordedAt() time.Time { return s.e.CreatedAt }

// TraceParent returns the W3C traceparent that the event was recorded with, or "".
func (s SentEvent) TraceParent() string { return s.e.TraceParent() }

// ConsumerHooks are called while a [Consumer] or a [Worker] works, in the goroutine that handles the partition or the
// delivery. Code that is to run around handlers is a [Middleware].
//
//   - A hook that does not return stops its partition or delivery. A WARN and Health name the hook, as they name a
//     handler.
//   - Lost is called for all partitions from one goroutine. It is waited for ten seconds at most, and is not called
//     again until it has returned.
//   - If a hook panics or ends its goroutine, that is logged, a panic with its stack, and the work goes on.
type ConsumerHooks struct {
	// Breaker is called after the breaker of an action has changed its state, see HandlerConfig.Retry.
	Breaker func(action string, from, to BreakerState)
	// Handled is called for an action that is done and committed. Took is the time of the handler and its middleware;
	// for an event of a batch, its share of that time.
	Handled func(m Metadata, action string, took time.Duration)
	// Repeated is called for an action that was done before, or whose event is parked or dead already, or has expired:
	// see Metadata.Expired.
	Repeated func(m Metadata, action string)
	// Conflicted is called for an attempt that PostgreSQL has rolled back for a deadlock or a serialization failure.
	// The attempt is repeated and does not count.
	Conflicted func(m Metadata, action string, err error)
	// Failed is called for an attempt that failed and counts. Retry says whether there is to be another attempt.
	Failed func(m Metadata, action string, err error, retry bool)
	// DeadLettered is called for an event that was sent to a dead-letter topic, and for a delivery of a worker that is
	// DEAD.
	//
	//   - Action is empty if no handler got the event. It is set if the event was for a certain action, as the
	//     deliveries of a worker are.
	//   - Topic is empty for a delivery of a worker.
	//   - If the delivery is DEAD because processes ended, or for a type without a handler, the metadata has only what
	//     the row of the event says.
	DeadLettered func(m Metadata, action, topic string, err error)
	// Unknown is called for an event of a type without a handler, skipped or not.
	Unknown func(m Metadata)
	// Lost is called when Kafka removed records of a partition after the group's committed offset, because of the
	// topic's retention. Records is the number of offsets that are gone, which is not below the number of records.
	// Events that were handled, but whose offset was not committed, are among them. It is also called when Kafka has
	// lost records with a broker: then records is 1, because it is not known how many they are.
	Lost func(topic string, partition int32, records int64)
	// RowsRemoved is called after each run of retention of a worker that removed rows. Consumers remove none. A worker
	// that stops waits a quarter of a second for it.
	RowsRemoved func(RetentionResult)
}

// engine returns the hooks as the engine calls them. RowsRemoved is called by retention.
func (h ConsumerHooks) engine() (hooks handling.Hooks) {
	hooks.Lost = h.Lost
	if hook := h.Conflicted; hook != nil {
		hooks.Conflicted = func(m *envelope.Received, action string, err error) { hook(metadataOf(m), action, public(err)) }
	}
	if hook := h.Failed; hook != nil {
		hooks.Failed = func(m *envelope.Received, action string, err error, retry bool) {
			hook(metadataOf(m), action, public(err), retry)
		}
	}
	if hook := h.Breaker; hook != nil {
		hooks.Breaker = func(action string, from, to breaker.State) { hook(action, BreakerState(from), BreakerState(to)) }
	}
	if hook := h.Handled; hook != nil {
		hooks.Handled = func(m *envelope.Received, action string, took time.Duration) { hook(metadataOf(m), action, took) }
	}
	if hook := h.Repeated; hook != nil {
		hooks.Repeated = func(m *envelope.Received, action string) { hook(metadataOf(m), action) }
	}
	if hook := h.DeadLettered; hook != nil {
		hooks.DeadLettered = func(m *envelope.Received, action, topic string, err error) {
			hook(metadataOf(m), action, topic, public(err))
		}
	}
	if hook := h.Unknown; hook != nil {
		hooks.Unknown = func(m *envelope.Received) { hook(metadataOf(m)) }
	}
	return hooks
}

// engine returns the hooks as the relay calls them.
func (h RelayHooks) engine() relay.Hooks {
	e := relay.Hooks{Leading: h.Leading, Rejected: failedHook(h.Rejected), Dead: failedHook(h.Dead), RowsRemoved: removedHook(h.RowsRemoved)}
	if hook := h.Sent; hook != nil {
		e.Sent = func(b relay.SentBatch) {
			hook(SentBatch{Events: b.Events, Failed: b.Failed, Waiting: b.Waiting, Expired: b.Expired, Retried: b.Retried, Began: b.Began, Took: b.Took, outcomes: b})
		}
	}
	if hook := h.Breaker; hook != nil {
		e.Breaker = func(from, to breaker.State, failureRate float64) {
			hook(BreakerState(from), BreakerState(to), failureRate)
		}
	}
	return e
}

func failedHook(hook func(FailedEvent)) func(tables.Event) {
	if hook == nil {
		return nil
	}
	return func(e tables.Event) {
		e.Err = public(e.Err)
		hook(FailedEvent(e))
	}
}

func removedHook(hook func(RetentionResult)) func(retention.Result) {
	if hook == nil {
		return nil
	}
	return func(r retention.Result) { hook(RetentionResult(r)) }
}
