// Package handling runs the handlers of consumers and workers: it finds the handlers of an event, calls them in
// transactions, and tries failed events again. It knows neither Kafka nor the table event_delivery.
//
// It needs handlers and event types ([Sources]), the configuration ([Rules]), a [Transactor] for PostgreSQL, and a
// [Scheduler] that says when a handler may be called. Both can be fakes, so the package is tested without services.
//
// The parts, in the order of an event:
//
//   - [Routes] are the handlers that an event type reaches, by itself or after upcasting.
//   - [Processor.Resolve] decodes an event and makes a [Task] for each of its handlers. [Item] has both.
//   - [Processor.ProcessBatch] runs the tasks of several events in one transaction, [Processor.ProcessOne] runs one
//     task.
//   - [Notes] is the table event_handled. It notes each task in the transaction of its handler, and finds repeats.
//   - [Inbox] is the same table for messages that do not come through Kafka.
//   - [Attempts] tries one task and decides about its outcome: done, tried again, or dead. [RetryPolicy] and
//     [ActionBreakers] are part of that.
//   - [Activity] knows which handler is running, on which connection. It cuts off a handler that ignores its context.
//
// A worker takes up to MaxPoll events and runs their tasks in one transaction: the consumer for the events of a
// partition, a lane for claimed deliveries. If a handler fails, the transaction is rolled back, and nothing has
// happened. The events before the failed one run again in one transaction. The failed event runs alone, by [Attempts].
// So one bad event of a hundred costs three transactions. If the failure cannot be attributed to one event, half of the
// events run again. Handlers without a transaction run last.
//
// A transaction commits when its handlers have taken [TransactionTime], so that little is lost with a failure. A
// handler that changes settings of its transaction, such as a search_path, runs separately from then on, because the
// handlers after it would see the settings.
//
// The package promises:
//
//   - A task is noted in the transaction of its handler: both are committed, or neither. A repeat calls no handler.
//     Handlers without a transaction ([NoTx]) are not noted, and run at least once.
//   - Two events are the same if their source, id and received type are the same ([IdentityOf]), or their key of
//     OncePer. The first source with an id has the plain key in event_handled; for others, a second statement notes a
//     key that contains the source.
//   - An outage of PostgreSQL uses up no attempt, nor do [MostConflicts] conflicts of transactions.
//   - An outage of what a handler needs makes no event dead. While the breaker of the action is not closed, failed
//     trials use up no attempt. The last attempt of an event counts only if another event has succeeded since the
//     first one.
//   - The handlers of an event type get its events in the order of arrival. Handlers of different types get the events
//     of a key in the order of arrival.
//   - A panic, or an end of the goroutine, in a function of the host is an error of the event, or a line in the log.
//   - A handler that ignores its context is reported, and its transaction is cut off, so that it commits nothing late.
package handling
