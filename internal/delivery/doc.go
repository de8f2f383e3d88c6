// Package delivery keeps the rows of the table event_delivery, and handles them: it claims rows, deals them
// to lanes, renews their leases, and writes down their outcomes. Each row is a delivery: one event for one
// action of a group.
//
// A worker inserts a row for each event of its database and each action. A consumer inserts a row only for
// an event that it parks: the event has failed, or is behind a failed event in its key. Both handle the rows
// of each other, because their group may have moved since. [Store] has the statements, [Run] handles the rows
// of a group in one process.
//
// # What it needs
//
// PostgreSQL with the tables of this release, a [handling.Processor] that runs the handlers, and code that
// inserts rows: [Store.Queue] for workers, [Store.Park] for consumers. Both run their handlers with the
// same rules.
//
// # What it promises
//
//   - Rows of a key are handled one after the other, in the order of their insertion. Rows of different
//     keys are handled at the same time.
//   - A handler with a transaction and the end of its row are committed together. Other handlers run at
//     least once.
//   - An attempt counts when its handler has begun and ends. A row that was released untried, or postponed
//     because of an outage of PostgreSQL or of what its handler needs, has no attempt counted. Neither has a row
//     whose process is gone, see Claims and leases.
//   - A row uses up its last attempt only if another row of its action has succeeded since, in any process. Each
//     process saves in event_success when its actions have last succeeded.
//   - If a process is gone, other processes take over its rows when the leases have expired.
//   - A stop ends within StopTimeout, even if a handler hangs. It releases all rows whose handlers have not begun, also
//     those whose claim got no answer.
//   - While the calls of an action take long, another action with due rows has half of the lanes. A lane whose handler
//     hangs has a spare lane as its replacement, for parked events after a moment, and for workers when the call is
//     given up.
//   - A batch that takes longer than a transaction may take gives back its rest, so that other processes have it.
//   - A trial of a breaker belongs to the claim of its row, and the slots of a call to its lane. They are released when
//     the row or the call ends, at the latest when it is given up.
//
// # One head per key
//
// Of the open rows of a key, one is PENDING, or the first ones are PROCESSING with one process. All others
// are PARKED. So a claim reads one row of each key, however many rows wait behind it. The alternative is a
// claim that looks for earlier open rows of each key. It takes seconds behind a long queue, and lets two
// rows of a key run at once when an operator requeues a row.
//
// A statement that inserts, ends or requeues rows promotes the next head. It first locks the keys, and
// decides in a later statement. A statement that waits for a lock goes on reading what was committed before
// it began to wait, and would leave a key without a head. [Store.RepairHeads] finds such keys all the same,
// for example after a change of the table from outside.
//
// # Floors
//
// While a transaction is open anywhere, PostgreSQL cannot remove index entries of finished rows, and a scan
// for open rows of a key becomes slow. Therefore scans begin at a floor: an id below which no row of the
// key was open when the key was found free, or its first row was claimed. A floor holds for good, because
// later rows have higher ids. Rows that an operator or a take-over puts back may be open below it. They are
// in an index of their own. A process that has just started knows no floors, and reads all entries of each
// key once.
//
// # Claims and leases
//
// Each claim has its own name, which is locked_by in its rows. A crash of PostgreSQL may forget the latest
// commits and assign ids again, so the id alone does not identify a claimed row. A statement that ends a
// row checks the name, and that no earlier row of the key is open. If another process has the row, the
// statement fails with [ErrLost], and the transaction of the handler is rolled back.
//
// The process renews its leases at a third of their duration. A claim that could not be renewed in time is
// lost, and the contexts of its handlers end. A row that was taken over is a suspect: it may have ended its
// process, so it is claimed alone, and the next one begins when it has ended or takes long (suspects.go).
//
// A claim counts an attempt in advance, and a takeover takes it back: most rows of a process that is gone were
// waiting. The attempt stays counted if the process has noted in the row that a handler begins ([Store.Begin]). It
// notes that for suspects, before it decodes them, and for rows whose handlers do not return. So an event that ends
// its processes, or hangs, uses up its attempts.
//
// # Processes of two releases
//
// Each process has a row in event_member, which says which event types of which streams it handles for which actions.
// A claim names them, and takes the rows behind a head up to the first of another type. So an old release does not
// touch rows that only the new one handles. They wait, and the log and the doctor name them. A process that makes such
// a row due notifies the others. A process gives back a row that it decodes as a type without a handler, see
// lane.yield.
//
// # Parts of a Run
//
// The [Dispatcher] claims rows and deals them to lanes, all rows of a key to the same lane. A lane runs
// handlers with a transaction together, and repeats them one by one if one fails. The claimedSet knows what
// the process has claimed, and the leaseKeeper renews it, takes over expired rows, and watches for handlers
// that hang.
package delivery
