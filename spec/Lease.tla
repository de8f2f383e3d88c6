--------------------------------- MODULE Lease ---------------------------------
(* The lease of a relay: epoch, session lock, early takeover, and a leader that *)
(* crashes, stands still, loses its connection to PostgreSQL, or is cut off     *)
(* from Kafka, so that what it has sent arrives late.                           *)
(*                                                                              *)
(* What is abstracted. All events are committed, have one key, and are sent in  *)
(* batches. There are no clocks: an epoch is over when its lease has expired by *)
(* every clock. What a process has sent arrives before that, or never, because  *)
(* the loss of the lease closes the client. Only where Late is TRUE a process   *)
(* may have stood still with records in flight, which arrive at any time; then  *)
(* no event dies. A live process notices the loss of its lock while a standby   *)
(* waits (RecheckFor). A statement that proves the lease is one step, because   *)
(* it locks the row of the lease.                                               *)
EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANTS
    Procs, Events, Batch,  \* processes; events 1..Events; events of a batch
    Late,                  \* records of a process may arrive after its lease has expired
    Dies,                  \* an event that is rejected again is dead
    MaxEpochs, MaxRejects, MaxCrashes, MaxBreaks, MaxFreezes, MaxCuts,  \* bounds of the run
    Mistakes               \* seeded mistakes, {} for the design

Wrong(m) == m \in Mistakes

VARIABLES
    pg,     \* outbox_lease (epoch, holder, locked: says that the lock goes with the lease, waits: epochs for which the
            \* lease is not exclusive), outbox_cursor (at: events passed, by: epoch), outbox_failed (parked, dead)
    lock,   \* the process whose session has the advisory lock
    over,   \* epochs whose lease has expired
    net,    \* sends under way: epoch, part of the relay, events; answered: the process waits for the answer
    kafka,  \* events in the order of their first arrival
    mem,    \* processes
    ghost,  \* intruder: a process without the lease has written; two: one without the lease has begun to send
    used    \* what has been used up of the bounds
vars == <<pg, lock, over, net, kafka, mem, ghost, used>>

NoOne == "none"
Range(s) == {s[i] : i \in 1..Len(s)}
Min(S) == CHOOSE x \in S : \A y \in S : x <= y

\* A process: pc; epoch of its lease, and the one that it has seen as a standby; whether it has a lock (claim), whether the
\* statement that says so is under way (claiming), whether it knows that the lock is lost; the cursor and the parked events
\* that it knows; epochs for which its lease is not exclusive (waits); what its session and its retrier are at; whether it
\* stands still, or has done so since its last statement (slept).
Standby == [pc |-> "standby", epoch |-> 0, seen |-> 0, claim |-> FALSE, claiming |-> "", lost |-> FALSE, at |-> 0, by |-> 0, parked |-> {}, waits |-> {},
            session |-> "idle", batch |-> <<>>, rejected |-> 0, retrier |-> "idle", frozen |-> FALSE, slept |-> FALSE]
Init ==
    /\ pg = [epoch |-> 0, holder |-> NoOne, locked |-> FALSE, waits |-> {}, at |-> 0, by |-> 0, parked |-> {}, dead |-> {}]
    /\ lock = NoOne
    /\ over = {0}
    /\ net = {}
    /\ kafka = <<>>
    /\ mem = [p \in Procs |-> Standby]
    /\ ghost = [intruder |-> FALSE, two |-> FALSE]
    /\ used = [rejects |-> 0, crashes |-> 0, breaks |-> 0, freezes |-> 0, cuts |-> 0]

Use(what) == used' = [used EXCEPT ![what] = @ + 1]
May(p) == ~mem[p].frozen
Leads(p) == May(p) /\ mem[p].pc = "lead"
HasLease(p) == pg.epoch = mem[p].epoch
\* By the clock of the process, and by its session.
Held(p) == mem[p].epoch \notin over \/ Wrong("the lease is counted from its answer")
Sure(p) == ~(mem[p].claim /\ mem[p].lost) \/ Wrong("sends before the lock is withdrawn")
Exclusive(p) == mem[p].waits \subseteq over

-------------------------------------------------------------------------------
\* Lease and lock.

\* A standby that has read the cursor already, by mistake.
ReadsFirst == Wrong("the cursor is read before the lease is taken")
ReadEarly(p) ==
    /\ ReadsFirst /\ May(p) /\ mem[p].pc = "standby" /\ mem[p].seen = 0
    /\ mem' = [mem EXCEPT ![p].pc = "read", ![p].at = pg.at, ![p].by = pg.by, ![p].parked = pg.parked]
    /\ UNCHANGED <<pg, lock, over, net, kafka, ghost, used>>

Taken(p, locked, waits) ==
    /\ pg' = [pg EXCEPT !.epoch = @ + 1, !.holder = p, !.locked = locked, !.waits = waits]
    /\ mem' = [mem EXCEPT ![p].pc = IF ReadsFirst THEN "lead" ELSE "load", ![p].epoch = pg.epoch + 1, ![p].seen = 0, ![p].claim = locked,
                          ![p].waits = waits]
Take(p) ==
    /\ May(p) /\ mem[p].pc = (IF ReadsFirst THEN "read" ELSE "standby") /\ mem[p].seen = 0
    /\ pg.epoch \in over /\ pg.epoch < MaxEpochs
    /\ Taken(p, FALSE, pg.waits)
    /\ UNCHANGED <<lock, over, net, kafka, ghost, used>>
\* In a later statement.
Load(p) ==
    /\ May(p) /\ mem[p].pc = "load"
    /\ mem' = [mem EXCEPT ![p].pc = "lead", ![p].at = pg.at, ![p].by = pg.by, ![p].parked = pg.parked]
    /\ UNCHANGED <<pg, lock, over, net, kafka, ghost, used>>

\* A leader takes the lock, which proves no lease. Another statement of that session makes outbox_lease say so, if it is the
\* holder and the lease was not renewed since.
TakeLock(p) ==
    /\ Leads(p) /\ ~mem[p].claim /\ lock = NoOne
    /\ lock' = p
    /\ mem' = [mem EXCEPT ![p].claim = TRUE, ![p].claiming = "sent"]
    /\ UNCHANGED <<pg, over, net, kafka, ghost, used>>
ClaimLock(p) ==
    /\ mem[p].claiming # "" /\ lock = p
    /\ IF HasLease(p) /\ (mem[p].claiming = "sent" \/ Wrong("a late claim counts"))
       THEN pg' = [pg EXCEPT !.locked = TRUE] /\ UNCHANGED lock
       ELSE lock' = NoOne /\ UNCHANGED pg
    /\ mem' = [mem EXCEPT ![p].claiming = ""]
    /\ UNCHANGED <<over, net, kafka, ghost, used>>
\* A renewal changes the lease: a standby that has seen it sees that, and a claim that is under way is late.
Renewed(p) ==
    [q \in Procs |-> CASE q = p -> [mem[q] EXCEPT !.slept = FALSE, !.claiming = IF @ = "sent" THEN "late" ELSE @]
                       [] mem[q].seen # 0 -> [mem[q] EXCEPT !.seen = -1]
                       [] OTHER -> mem[q]]
Renewal(p) ==
    /\ Leads(p) /\ HasLease(p)
    /\ over' = over \ {pg.epoch}
    /\ mem' = Renewed(p)
    /\ UNCHANGED <<pg, lock, net, kafka, ghost, used>>
Renew(p) ==
    /\ ~mem[p].lost
    /\ pg.epoch \in over \/ \E q \in Procs : mem[q].seen > 0
    /\ Renewal(p)
\* The session of a process ends, and PostgreSQL frees its lock. The process may find out first.
Break(p) ==
    /\ lock = p /\ mem[p].seen = 0
    /\ IF mem[p].claim /\ ~mem[p].lost THEN used.breaks < MaxBreaks /\ Use("breaks") ELSE UNCHANGED used
    /\ lock' = NoOne
    /\ mem' = [mem EXCEPT ![p].claiming = ""]
    /\ UNCHANGED <<pg, over, net, kafka, ghost>>
Notice(p) ==
    /\ May(p) /\ mem[p].claim /\ ~mem[p].lost
    /\ IF lock = p THEN used.breaks < MaxBreaks /\ Use("breaks") ELSE UNCHANGED used
    /\ mem' = [mem EXCEPT ![p].lost = TRUE]
    /\ UNCHANGED <<pg, lock, over, net, kafka, ghost>>
\* A renewal says that no lock goes with the lease.
Withdraw(p) ==
    /\ Leads(p) /\ mem[p].lost /\ HasLease(p)
    /\ pg' = [pg EXCEPT !.locked = FALSE]
    /\ over' = over \ {pg.epoch}
    /\ mem' = [Renewed(p) EXCEPT ![p].claim = FALSE, ![p].lost = FALSE]
    /\ UNCHANGED <<lock, net, kafka, ghost, used>>

\* A standby gets the lock, waits, and takes the lease if it has not changed.
GetLock(p) ==
    /\ May(p) /\ mem[p].pc = "standby" /\ mem[p].seen = 0
    /\ pg.locked /\ pg.epoch \notin over /\ lock = NoOne /\ pg.epoch < MaxEpochs
    /\ lock' = p
    /\ mem' = [mem EXCEPT ![p].seen = pg.epoch]
    /\ UNCHANGED <<pg, over, net, kafka, ghost, used>>
HasNoticed == \A q \in Procs : mem[q].pc = "lead" /\ HasLease(q) /\ ~mem[q].frozen /\ mem[q].claim => mem[q].lost
TakeFromGone(p) ==
    /\ May(p) /\ mem[p].seen = pg.epoch /\ pg.epoch # 0 /\ pg.locked /\ lock = p
    /\ HasNoticed \/ Wrong("no wait before an early takeover")
    /\ Taken(p, TRUE, IF Wrong("an earlier predecessor is forgotten") THEN {pg.epoch} ELSE pg.waits \cup {pg.epoch})
    /\ UNCHANGED <<lock, over, net, kafka, ghost, used>>
ReleaseLock(p) ==
    /\ May(p) /\ mem[p].seen # 0 /\ (mem[p].seen # pg.epoch \/ ~pg.locked \/ lock # p)
    /\ lock' = IF lock = p THEN NoOne ELSE lock
    /\ mem' = [mem EXCEPT ![p].seen = 0]
    /\ UNCHANGED <<pg, over, net, kafka, ghost, used>>

\* The lease expires. What was sent under it has arrived, or never will.
Expire ==
    /\ pg.epoch \notin over /\ pg.epoch # 0
    /\ over' = over \cup {pg.epoch}
    /\ net' = IF Late THEN net ELSE {f \in net : f.epoch # pg.epoch}
    /\ UNCHANGED <<pg, lock, kafka, mem, ghost, used>>
\* So does one that was taken over early.
ExpireTaken(e) ==
    /\ e \notin over /\ e < pg.epoch
    /\ over' = over \cup {e}
    /\ net' = IF Late THEN net ELSE {f \in net : f.epoch # e}
    /\ UNCHANGED <<pg, lock, kafka, mem, ghost, used>>

Ended(p) == [mem EXCEPT ![p] = Standby]
\* A leader finds out that its lease has expired, or is with another process.
Stop(p) ==
    /\ Leads(p) /\ (mem[p].epoch \in over \/ ~HasLease(p))
    /\ mem' = Ended(p)
    /\ lock' = IF lock = p THEN NoOne ELSE lock
    /\ UNCHANGED <<pg, over, net, kafka, ghost, used>>
\* A clean stop.
Release(p) ==
    /\ Leads(p) /\ HasLease(p) /\ pg.epoch < MaxEpochs
    /\ \/ mem[p].session = "idle" /\ mem[p].retrier = "idle" /\ {f \in net : f.epoch = mem[p].epoch} = {}
       \/ Wrong("released before the batch in flight has ended")
    /\ over' = over \cup {pg.epoch}
    /\ mem' = Ended(p)
    /\ lock' = IF lock = p THEN NoOne ELSE lock
    /\ UNCHANGED <<pg, net, kafka, ghost, used>>

-------------------------------------------------------------------------------
\* The session of a leader sends batches and moves the cursor.

Next(p) == [i \in 1..(IF Events - mem[p].at < Batch THEN Events - mem[p].at ELSE Batch) |-> mem[p].at + i]
Watched(p) == [ghost EXCEPT !.two = @ \/ (~HasLease(p) /\ ~mem[p].slept)]
Check(p) ==
    /\ Leads(p) /\ mem[p].session = "idle" /\ mem[p].at < Events /\ mem[p].parked = {}
    /\ Held(p) /\ Sure(p)
    /\ mem' = [mem EXCEPT ![p].session = "checked"]
    /\ ghost' = Watched(p)
    /\ UNCHANGED <<pg, lock, over, net, kafka, used>>
MaySend(p) == mem[p].epoch \notin over \/ Late \/ Wrong("the lease is counted from its answer")
SendBatch(p, batch) ==
    /\ Leads(p) /\ mem[p].session = "checked" /\ MaySend(p)
    /\ net' = net \cup {[epoch |-> mem[p].epoch, part |-> "session", events |-> batch, answered |-> TRUE]}
    /\ mem' = [mem EXCEPT ![p].session = "sent", ![p].batch = batch]
    /\ UNCHANGED <<pg, lock, over, kafka, ghost, used>>
Send(p) == SendBatch(p, Next(p))
\* Events behind a parked one of their key are not sent.
BlockBatch(p, batch) ==
    /\ Leads(p) /\ mem[p].session = "idle" /\ mem[p].parked # {}
    /\ mem' = [mem EXCEPT ![p].session = "answered", ![p].batch = batch, ![p].rejected = mem[p].at + 1]
    /\ UNCHANGED <<pg, lock, over, net, kafka, ghost, used>>
Block(p) == mem[p].at < Events /\ BlockBatch(p, Next(p))
\* One statement proves the lease and the cursor's row, moves the cursor and parks what was not sent.
MoveBehind(p) ==
    /\ Leads(p)
    /\ \/ HasLease(p) /\ pg.at = mem[p].at /\ pg.by = mem[p].by
       \/ Wrong("the lease is not proven at the move")
    /\ LET at == mem[p].at + Len(mem[p].batch)
           failed == IF mem[p].rejected = 0 THEN {} ELSE {e \in Range(mem[p].batch) : e >= mem[p].rejected}
       IN /\ pg' = [pg EXCEPT !.at = at, !.by = mem[p].epoch, !.parked = @ \cup failed]
          /\ mem' = [mem EXCEPT ![p].session = "idle", ![p].batch = <<>>, ![p].rejected = 0, ![p].at = at, ![p].by = mem[p].epoch,
                                ![p].parked = @ \cup failed, ![p].slept = FALSE]
    /\ ghost' = [ghost EXCEPT !.intruder = @ \/ ~HasLease(p)]
    /\ UNCHANGED <<lock, over, net, kafka, used>>
Move(p) == mem[p].session = "answered" /\ MoveBehind(p)
\* Another process has moved the cursor: load it again, once the lease is proven.
Stale(p) ==
    /\ Leads(p) /\ mem[p].session = "answered" /\ HasLease(p) /\ (pg.at # mem[p].at \/ pg.by # mem[p].by)
    /\ mem' = [mem EXCEPT ![p].session = "idle", ![p].batch = <<>>, ![p].rejected = 0, ![p].at = pg.at, ![p].by = pg.by, ![p].parked = pg.parked]
    /\ UNCHANGED <<pg, lock, over, net, kafka, ghost, used>>

\* The retrier sends the first parked event again.
First(p) == Min(mem[p].parked)
Unanswered(p) == {f \in net : f.epoch = mem[p].epoch /\ First(p) \in Range(f.events)}
CheckRetry(p) ==
    /\ Leads(p) /\ mem[p].retrier = "idle" /\ mem[p].parked # {}
    /\ Exclusive(p) \/ Wrong("retries before the lease is exclusive")
    /\ Unanswered(p) = {} \/ Wrong("retries before the first answer")
    /\ Held(p) /\ Sure(p)
    /\ mem' = [mem EXCEPT ![p].retrier = "checked"]
    /\ ghost' = Watched(p)
    /\ UNCHANGED <<pg, lock, over, net, kafka, used>>
Resend(p, batch) ==
    /\ Leads(p) /\ mem[p].retrier = "checked" /\ MaySend(p)
    /\ net' = net \cup {[epoch |-> mem[p].epoch, part |-> "retrier", events |-> batch, answered |-> TRUE]}
    /\ mem' = [mem EXCEPT ![p].retrier = "sent"]
    /\ UNCHANGED <<pg, lock, over, kafka, ghost, used>>
SendRetry(p) == Resend(p, <<First(p)>>)
\* One statement proves the lease, removes the rows of events that were sent, and marks others dead.
SaveResults(p, sent, dead) ==
    /\ Leads(p) /\ HasLease(p)
    /\ pg' = [pg EXCEPT !.parked = @ \ (sent \cup dead), !.dead = @ \cup dead]
    /\ mem' = [mem EXCEPT ![p].retrier = "idle", ![p].parked = @ \ (sent \cup dead), ![p].slept = FALSE]
    /\ UNCHANGED <<lock, over, net, kafka, ghost, used>>
Remove(p) == mem[p].retrier = "accepted" /\ SaveResults(p, {First(p)}, {})
Die(p) == mem[p].retrier = "rejected" /\ SaveResults(p, {}, IF Dies THEN {First(p)} ELSE {})

-------------------------------------------------------------------------------
\* Kafka.

\* What a process learns from the answer to a send.
Answer(f, rejected) ==
    mem' = [p \in Procs |->
        IF ~f.answered \/ mem[p].pc # "lead" \/ mem[p].epoch # f.epoch THEN mem[p]
        ELSE IF f.part = "session" THEN [mem[p] EXCEPT !.session = "answered", !.rejected = IF rejected THEN Head(f.events) ELSE 0]
        ELSE [mem[p] EXCEPT !.retrier = IF rejected THEN "rejected" ELSE "accepted"]]
AcceptFirst(f, n) ==
    /\ LET known == Range(kafka)
       IN kafka' = kafka \o SelectSeq(SubSeq(f.events, 1, n), LAMBDA e : e \notin known)
    /\ LET rest == SubSeq(f.events, n + 1, Len(f.events))
       IN IF rest = <<>> THEN net' = net \ {f} /\ Answer(f, FALSE)
          ELSE net' = (net \ {f}) \cup {[f EXCEPT !.events = rest]} /\ UNCHANGED mem
    /\ UNCHANGED <<pg, lock, over, ghost, used>>
Accept == \E f \in net : AcceptFirst(f, 1)
\* A batch ends at the first record that is rejected.
RejectFirst(f) ==
    /\ used.rejects < MaxRejects /\ Use("rejects")
    /\ net' = net \ {f}
    /\ Answer(f, TRUE)
    /\ UNCHANGED <<pg, lock, over, kafka, ghost>>
Reject == \E f \in net : RejectFirst(f)
\* What was sent will never arrive, and is sent again.
Waits(p, part) == \E f \in net : f.epoch = mem[p].epoch /\ f.part = part /\ f.answered
NoAnswer(p) ==
    /\ Leads(p)
    /\ \/ mem[p].session = "sent" /\ ~Waits(p, "session") /\ mem' = [mem EXCEPT ![p].session = "idle", ![p].batch = <<>>]
       \/ mem[p].retrier = "sent" /\ ~Waits(p, "retrier") /\ mem' = [mem EXCEPT ![p].retrier = "idle"]
    /\ UNCHANGED <<pg, lock, over, net, kafka, ghost, used>>
\* The process is cut off from Kafka and sends again. What it has sent may arrive still.
CutOff(p) ==
    /\ Leads(p) /\ mem[p].session = "sent" /\ Waits(p, "session") /\ used.cuts < MaxCuts /\ Use("cuts")
    /\ mem' = [mem EXCEPT ![p].session = "idle", ![p].batch = <<>>]
    /\ net' = {IF f.epoch = mem[p].epoch /\ f.part = "session" THEN [f EXCEPT !.answered = FALSE] ELSE f : f \in net}
    /\ UNCHANGED <<pg, lock, over, kafka, ghost>>
\* Nothing waits for the answer, and the records are lost.
Drop ==
    \E f \in net :
        /\ ~f.answered \/ \A p \in Procs : mem[p].epoch # f.epoch
        /\ net' = net \ {f}
        /\ UNCHANGED <<pg, lock, over, kafka, mem, ghost, used>>

\* A process is killed. PostgreSQL frees its lock.
Crash(p) ==
    /\ mem[p] # Standby /\ used.crashes < MaxCrashes /\ Use("crashes")
    /\ mem' = Ended(p)
    /\ lock' = IF lock = p THEN NoOne ELSE lock
    /\ UNCHANGED <<pg, over, net, kafka, ghost>>
\* A process stands still, for ever or for a while.
Freeze(p) ==
    /\ Leads(p) /\ used.freezes < MaxFreezes /\ Use("freezes")
    /\ mem' = [mem EXCEPT ![p].frozen = TRUE]
    /\ UNCHANGED <<pg, lock, over, net, kafka, ghost>>
Thaw(p) ==
    /\ mem[p].frozen
    /\ mem' = [mem EXCEPT ![p].frozen = FALSE, ![p].slept = TRUE]
    /\ UNCHANGED <<pg, lock, over, net, kafka, ghost, used>>

Process(p) ==
    \/ ReadEarly(p) \/ Take(p) \/ Load(p) \/ TakeLock(p) \/ ClaimLock(p) \/ Notice(p) \/ Withdraw(p) \/ GetLock(p) \/ TakeFromGone(p) \/ ReleaseLock(p)
    \/ Stop(p) \/ Check(p) \/ Send(p) \/ Block(p) \/ Move(p) \/ Stale(p) \/ CheckRetry(p) \/ SendRetry(p) \/ Remove(p) \/ Die(p) \/ NoAnswer(p)
Spec == Init /\ [][Accept \/ Reject \/ Drop \/ Expire \/ (\E e \in 1..MaxEpochs : ExpireTaken(e))
                   \/ \E p \in Procs : Process(p) \/ Renew(p) \/ Release(p) \/ Break(p) \/ CutOff(p) \/ Crash(p) \/ Freeze(p) \/ Thaw(p)]_vars

-------------------------------------------------------------------------------
\* What must hold.

\* What the cursor has passed is in Kafka, parked, or dead.
NothingSkipped == 1..pg.at \subseteq Range(kafka) \cup pg.parked \cup pg.dead
\* First arrivals are in order.
OrderPerKey == \A i \in 2..Len(kafka) : kafka[i - 1] < kafka[i]
\* Only the holder of the lease writes.
OnlyHolderWrites == ~ghost.intruder
\* No process begins to send under a lease that another one has, unless it stood still.
OneSends == ~ghost.two

\* While a live leader renews its lease and faults are finite, everything arrives or dies, also beside a process that stands
\* still for ever.
ExpireOfGone == (\A p \in Procs : mem[p].pc \in {"load", "lead"} /\ May(p) => ~HasLease(p)) /\ Expire
Live ==
    /\ Init /\ [][Accept \/ Reject \/ ExpireOfGone \/ (\E e \in 1..MaxEpochs : ExpireTaken(e))
                  \/ \E p \in Procs : Process(p) \/ Renew(p) \/ Break(p) \/ CutOff(p) \/ Crash(p) \/ Freeze(p) \/ Thaw(p)]_vars
    /\ WF_vars(Accept) /\ WF_vars(ExpireOfGone) /\ WF_vars(\E e \in 1..MaxEpochs : ExpireTaken(e))
    /\ \A p \in Procs : WF_vars(Process(p)) /\ WF_vars(Renew(p)) /\ WF_vars(mem[p].lost /\ Break(p))
EverythingEnds == <>[](\A e \in 1..Events : e \in Range(kafka) \cup pg.dead)

Alike == Permutations(Procs)
===============================================================================
The words of a counterexample:
  ReadEarly: {mem#} reads the cursor: {mem.at} events are passed, parked: {mem.parked}
  Take: {mem#} takes the lease with epoch {pg.epoch}
  Load: {mem#} reads the cursor: {mem.at} events are passed, parked: {mem.parked}
  TakeLock: {lock} takes the session lock
  ClaimLock: the claim of {mem#} arrives; outbox_lease says that a lock goes with the lease: {pg.locked}
  Renew: {pg.holder} renews its lease
  Break: the session that has the lock of {-lock} ends, PostgreSQL frees its lock
  Notice: {mem#} notices that it has lost its lock
  Withdraw: {pg.holder} withdraws: outbox_lease says that no lock goes with the lease
  GetLock: {lock} stands by and gets the session lock of epoch {mem.seen}
  TakeFromGone: {pg.holder} takes the lease early, with epoch {pg.epoch}
  ReleaseLock: {mem#} gives the session lock back
  Expire: the lease of epoch {over.} expires
  ExpireOfGone: the lease of epoch {over.} expires
  ExpireTaken: the lease of epoch {over.} expires, which was taken over early
  Stop: {mem#} finds that it has no lease, and stops
  Release: {mem#} stops and releases its lease
  Check: {mem#} checks its lease before it sends a batch
  SendBatch: {mem#} sends events {net.events} under epoch {net.epoch}
  Block: {mem#} does not send events {mem.batch}, which are behind a parked one
  Move: {mem#} moves the cursor behind event {pg.at}; parked: {pg.parked}
  Stale: {mem#} loads the cursor again
  CheckRetry: {mem#} checks its lease before it sends a parked event again
  Resend: {mem#} sends event {net.events} again under epoch {net.epoch}
  Remove: {mem#} removes the row of the event that was sent again
  Die: {mem#} saves that the event was rejected again; parked: {pg.parked}, dead: {pg.dead}
  Accept: Kafka accepts a record; it has events {kafka}
  Reject: Kafka rejects events {net.events} under epoch {net.epoch}
  NoAnswer: {mem#} gets no answer
  CutOff: {mem#} gets no answer, and closes its client
  Drop: events {net.events} under epoch {net.epoch} never arrive
  Crash: {mem#} is killed
  Freeze: {mem#} stands still
  Thaw: {mem#} goes on
  NothingSkipped: the cursor has passed an event that is neither in Kafka nor parked nor dead
  OrderPerKey: an event arrives before an earlier one of its key
  OnlyHolderWrites: a process without the lease has moved the cursor
  EverythingEnds: an event is never sent
  OneSends: a process begins to send under a lease that another one has
  "TRUE": yes
  "FALSE": no
