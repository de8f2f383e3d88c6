// Package consumer passes the events of Kafka topics to handlers, as a member of a consumer group.
//
// It needs a Kafka client's options, [Rules] and routes, and PostgreSQL unless all handlers run
// without a transaction. Package handling calls the handlers and notes what is handled; package
// delivery handles parked events.
//
// The package promises:
//   - The events of a partition are handled in offset order, partitions in parallel.
//   - An offset is committed only after all events before it are handled, parked or dead letters.
//   - After a crash or a rebalance events arrive again; package handling skips those that are noted.
//   - A handler that is new in its group gets all events from the committed offsets on, whatever members without it do.
//   - An event whose handler fails delays only the later events of its key, for this action.
//     Without PostgreSQL, or with RetryInPlace, it delays its partition.
//   - A stop takes at most StopTimeout, whatever handlers, PostgreSQL and Kafka do.
//
// # Poll loop
//
// A [Consumer] that runs has a membership: a Kafka client, and a partitionWorker for each partition
// that the group has assigned. The poll loop moves fetched records into the queues of the workers. A
// full queue pauses fetching of its partition. Each worker has a goroutine that takes a batch from
// its queue, decodes the records and runs their tasks in one transaction. If a handler fails, the
// transaction is rolled back, the records before the failed one are handled again, and the failed
// one gets a transaction of its own: one bad event of a hundred costs three transactions.
//
// # Offsets
//
// Workers request commits; one goroutine commits the offsets of all workers, at most ten times a
// second. When Kafka revokes a partition, its worker completes the transaction in flight and its
// offset is committed before another member gets the partition. A commit is refused here if the group
// has expelled the member meanwhile, because it could set back the offset of the new owner. A member that
// was frozen past its session can still commit a transaction. Its notes keep the new owner from repeating it.
//
// A member of another release may lack a handler of the group, and commits the offsets of events that the handler
// has not seen. The next member with the handler that gets the partition reads these events first, for this handler.
//
// Package starts decides where reading begins. Kafka cannot say whether a group is new: it forgets
// old offsets and those of deleted topics. So the start of each partition is stored in PostgreSQL.
//
// # Parking and dead letters
//
// A failed event becomes a row of event_delivery, and later events of its key are parked behind it.
// Any member may claim the row. A worker checks at the end of each transaction that no key of it is
// blocked, so that no event overtakes a parked one, not even one that another member has parked. It takes a
// shared lock of the key for that, which excludes a member that parks. It also checks when the transaction
// begins, which leaves out events of blocked keys; and before that, while most events are blocked, and for handlers
// without a transaction. These have only that check.
//
// While the events of an action fail one after the other, its breaker is open: no more events are parked, and the
// partition waits. Where it has another action, events are parked untried after passAfter, so that the other one goes
// on.
// A row is parked before the offset moves; after a crash the repeated event finds its row or its note.
//
// An event without attempts left is sent to the dead-letter topic of its topic. A dead letter carries
// the original record, its position and the error in headers. If Kafka refuses it as too large, it is
// sent without its value, and then without a large key and large headers. While the dead-letter topic
// does not accept it, its key waits; without PostgreSQL its partition waits. The row of a parked event is
// DEAD only after the dead letter is in its topic, so a crash loses none. Headers of a replayed event come from
// any client that may write to the topic. They count only if the dead letter that they name exists.
//
// # Stop
//
// A stop has steps, each with a part of StopTimeout: handlers finish their events, their contexts
// end, handlers that still run are cut off, offsets are committed, the group is left, the client is
// closed. A step that the Kafka client does not complete in time is done without it: while the group
// rebalances, the client holds back commits and does not leave the group.
package consumer
