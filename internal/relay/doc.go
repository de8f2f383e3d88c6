// Package relay sends the events of an outbox to Kafka, while its process has the lease.
//
// A [Relay] stands by until it has the lease, then it leads. A leading relay has five parts, each in its own
// goroutine with what it needs passed in: the [Session] polls PostgreSQL, sends batches and moves the cursor; a
// retrier sends the events of outbox_failed again; two others probe bad partitions and suspects; and the cleaner of
// package retention removes old rows. The parts share the lease, the [Parking] and the [BadPartitions].
//
// It promises:
//
//   - An event is sent at least once, and the cursor moves only past events with an outcome.
//   - Events of one key are first sent in their order. While an event of a key waits, the later ones are parked
//     behind it.
//   - An outage of Kafka as a whole makes no event fail. A bad topic or partition delays no other one.
//   - Nothing is sent to Kafka without the lease. Each send checks the lease by the monotonic clock, and losing
//     it closes the Kafka client.
//   - Cancelling Run finishes the batch in flight, releases the lease and sends nothing again.
//
// # What becomes of an event
//
// A [Deliverer] gives each event of a batch an outcome. The cursor moves past the first events that have one. Those of
// them that were not sent enter outbox_failed in the statement that moves the cursor. Each case says what failed, how
// the relay knows, and what happens to the event, to its key and to the rest of the batch:
//
//   - An earlier event of the key failed. The key is parked, or blocked in this batch. The event is not sent, and
//     enters outbox_failed as parked. Its key stays blocked, the rest of the batch is sent.
//   - The event cannot become a record: [envelope.FieldError], before anything is sent. It enters outbox_failed as
//     failed, and its retries are counted. Its key is blocked, the rest of the batch is sent.
//   - Kafka rejects its request: an error of the list in [kafka.RejectionClass], which names the good records of the
//     request, too. The events of the request stay pending and are sent one by one. An event that is rejected alone
//     counts as the case before.
//   - Its topic is missing, was replaced, or the client may not write to it: [kafka.IsTopicOutage]. The producer asks
//     before it first sends to a topic ([kafka.Topics.Learn]), because franz-go would wait. The event is
//     unavailable: it enters outbox_failed as waiting, with its topic, and retries are not counted. Its key is
//     blocked, the rest of the batch is sent.
//   - Its partition accepts nothing: any other error while Kafka works, which means that all brokers are asked at once,
//     and one answers and gives a producer id ([kafka.Explain]). The event is unavailable, as in the case before.
//   - Its partition does not answer for 100 ms after others have, or for 300 ms, and Kafka works. The event is
//     unavailable, and [Unanswered] has it: it is not sent again before its answer, which a goroutine waits for.
//     Nothing else of the batch is tried there.
//   - Its topic or partition is known to be bad: [BadPartitions], once another partition has accepted an event, and
//     while the breaker is closed. The client's own partitioner says where the event would go. The event is
//     unavailable without a try. So is an event for a suspect, until a probe has tried it: a partition that has
//     accepted nothing since another one of its topic became bad, or under this lease while one of another topic has
//     just become bad. There are none until the retriers may send.
//   - Kafka as a whole is unavailable: any other error while Kafka does not work. All events of the batch that were not
//     sent stay pending, and are sent again after a backoff. The cursor stays. Parking them would make the drain
//     after the outage several times slower.
//   - Nothing failed, but the breaker is open, the lease is lost or the relay stops. The events stay pending, for a
//     later send or for the next holder. At a stop, an event in front of a sent one enters outbox_failed as waiting.
//
// A retrier sends with attempt or probe, which wait for nothing: an event that Kafka neither accepts nor rejects is
// unavailable at once. A rejected event is dead after the retries that [Rules] allow. Then its key is unblocked, or
// held until an operator decides.
//
// A retrier waits for no row of outbox_failed that another transaction has locked, an operator's for example. It sends
// no head that is locked. If it cannot save the result of an event because the row was locked meanwhile, it keeps the
// result and tries again, and sends no event of the key until then. A relay that stops first gives the result up, says
// so, and the next leader sends that event again.
//
// # Sending
//
//   - A record that may be larger than its topic allows is sent alone, and the later events of its key after it. The
//     limit is one of compressed batches, so only the broker can reject.
//   - No more records go out together than fit into one batch of the topic. Otherwise that batch could be rejected and
//     a smaller one behind it accepted.
//   - When Kafka rejects a request, the client fails all records that it has of the partition, and would send records
//     that come later. So the client sends nothing before it has all records of a send, and gets more records only
//     when every outcome is known.
//   - A send that waits for silent partitions only is detached: a goroutine waits for its answers, with its client, and
//     the next send makes another client. At most 16 sends are detached at a time.
//   - franz-go with idempotence neither fails nor times out a record whose request got no answer. Hence the producer
//     sets a delivery timeout and permits canceling such records, and closes the client after SendTimeout.
//   - A client with a final error ([kafka.IsFinal]) asks for no producer id and for no replaced topic any more. The
//     next send makes another client.
//   - An invalid timestamp is no rejection. The clock of the host stamps records, and a wrong clock would reject the
//     whole backlog.
//   - After a stop no more records are sent. After a grace time the client drops records that it has not written,
//     and is closed when no request is in flight.
//   - A rejection or a missing topic is a success for the breaker, because Kafka answered. Other failures count only
//     if Kafka does not work. Probes do not count.
//
// # A leader that was stopped past its lease
//
// A process that was stopped, for example by a debugger or a suspended machine, may go on after its lease has expired.
// It can still send the batch in flight and those that are detached, and no other: produce checks the lease before it
// passes records to the client. The cursor stands before the batch in flight, and the events of the others have rows in
// outbox_failed. The successor sends the same events first, so the first arrivals keep their order. The bound is on
// events, not on time: records that Kafka or the network already has cannot be called back. On a suspended machine the
// monotonic clock may stand still; it learns of the loss from its next statement.
package relay
