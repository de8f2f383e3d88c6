------------------------------- MODULE Handling -------------------------------
(* The handling half for one action of a group: rows of event_delivery, one    *)
(* head per key, claims with leases, parking from Kafka, fan-out by workers,   *)
(* notes, dead letters, and a move of the group between Kafka and PostgreSQL.  *)
(*                                                                             *)
(* What is abstracted. A transaction of a handler is open (pc "call"), then    *)
(* has locked its key and written its row (pc "checked"), then is committed.   *)
(* A statement behind an exclusive lock of its key is one step. A member that  *)
(* makes no step is frozen, so every interleaving covers that; a lease may     *)
(* expire at any time. There are no clocks: a row that is PENDING is due.      *)
(* Rows of a key are inserted in the order of their events, so an event is     *)
(* also the id of its row.                                                     *)
EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANTS
    Members,      \* processes of the group
    Consumers,    \* those that read Kafka and can send dead letters; the others are workers
    Old,          \* those of the old release, which knows only type 1
    Key, Type, Id,  \* of each event: record key, type, id; two events may have the id in common
    Log,          \* events that come through Kafka: a sequence, with repeats where the relay has sent twice
    Outbox,       \* events that come through the workers' fan-out
    From,         \* the side at the start, "kafka" or "postgres"; the group moves when that side has passed all
    Together,     \* both sides claim all the time; otherwise only the side that has the group
    Bad,          \* events that fail always
    HoldDead,     \* a dead row holds its key
    SeqBehind,    \* the sequence of event_delivery gives out an id that is taken
    MaxAttempts, Follow,  \* attempts of an event; rows that a claim takes behind a head
    MaxFails, MaxCrashes, MaxExpels, MaxFreezes, MaxTakeovers, MaxRequeues, MaxMoves,  \* bounds of the run
    Mistakes      \* seeded mistakes, {} for the design

Wrong(m) == m \in Mistakes

VARIABLES
    row,    \* event_delivery
    note,   \* event_handled
    eff,    \* what the handlers' transactions have done, how often
    dlq,    \* events with a dead letter in Kafka
    mem,    \* members: step, job (events), where it is from, offset of the next record (0: no partition)
    kafka,  \* committed offset, and the member that may commit
    fan,    \* position of the fan-out, and the side that has the group
    seq,    \* the sequence is behind
    used,   \* what has been used up of the bounds
    ghost   \* began: calls of each event since it had all attempts; passed: events that were DEAD once; wrong: see below
vars == <<row, note, eff, dlq, mem, kafka, fan, seq, used, ghost>>

Events == 1..Len(Key)
None == "none"
Range(s) == {s[i] : i \in 1..Len(s)}
Min(S) == CHOOSE x \in S : \A y \in S : x <= y
FromRecord(e) == e \in Range(Log)
IsConsumer(m) == m \in Consumers
Knows(m, t) == t = 1 \/ m \notin Old
Sides == {"kafka", "postgres"}
SideOf(m) == IF IsConsumer(m) THEN "kafka" ELSE "postgres"
Active(m) == Together \/ SideOf(m) = fan.side

NoRow == [st |-> "none", by |-> None, att |-> 0, begun |-> FALSE, suspect |-> FALSE, owed |-> FALSE, back |-> FALSE, why |-> ""]
NoJob == [pc |-> "idle", job |-> <<>>, src |-> "", why |-> "", pos |-> 0, frozen |-> FALSE, unseen |-> ""]

Init ==
    /\ row = [e \in Events |-> NoRow]
    /\ note = {} /\ dlq = {}
    /\ eff = [e \in Events |-> 0]
    /\ mem = [m \in Members |-> NoJob]
    /\ kafka = [off |-> 1, owner |-> None]
    /\ fan = [at |-> 1, side |-> From]
    /\ seq = SeqBehind
    /\ used = [fails |-> 0, crashes |-> 0, expels |-> 0, freezes |-> 0, takeovers |-> 0, requeues |-> 0, moves |-> 0]
    /\ ghost = [began |-> [e \in Events |-> 0], passed |-> {}, wrong |-> {}]

Use(what) == used' = [used EXCEPT ![what] = @ + 1]

-------------------------------------------------------------------------------
\* Rows of a key.

Held(r) == r.st = "dead" /\ HoldDead
IsHead(r) == r.st \in {"pending", "processing"} \/ Held(r)
IsOpen(r) == IsHead(r) \/ r.st = "parked"
OfKey(k) == {e \in Events : Key[e] = k}
Parked(R, k) == {e \in OfKey(k) : R[e].st = "parked"}

\* outbox_promote: the first parked row of a key without a head becomes PENDING.
Promote(R, k) ==
    IF Parked(R, k) = {} \/ \E e \in OfKey(k) : IsHead(R[e]) THEN R
    ELSE [R EXCEPT ![Min(Parked(R, k))].st = "pending"]

\* Rows S go back untried.
Release(R, S) == [e \in Events |-> IF e \in S THEN [R[e] EXCEPT !.st = "parked", !.by = None, !.att = @ - 1] ELSE R[e]]

\* Another transaction has a shared lock of the key.
Locked(k) == \E n \in Members : mem[n].pc = "checked" /\ Key[Head(mem[n].job)] = k

\* sqlBlocked: an event of a record must not be handled directly.
Blocked(e) == (\E f \in OfKey(Key[e]) : IsOpen(row[f])) \/ row[e].st \notin {"none", "done"}

-------------------------------------------------------------------------------
\* Steps of members.

E(m) == Head(mem[m].job)
May(m) == ~mem[m].frozen
IsFree(m) == May(m) /\ mem[m].pc = "idle" /\ mem[m].job = <<>>
Go(m, pc) == mem' = [mem EXCEPT ![m].pc = pc]
Without(m) == [mem EXCEPT ![m] = [NoJob EXCEPT !.pos = mem[m].pos]]
OwnRows(m) == {e \in Range(mem[m].job) : row[e].by = m /\ row[e].st = "processing"}

CanClaim(m, e) ==
    /\ Active(m)
    /\ Knows(m, Type[e]) \/ Wrong("claims of types that the member lacks")
    /\ Wrong("only the old side claims") => FromRecord(e) = IsConsumer(m)

\* The rows behind a head that was never tried, up to the first that was tried or that the member cannot handle.
Behind(m, e) ==
    LET ok(f) == row[f].st = "parked" /\ row[f].att = 0 /\ ~row[f].suspect /\ CanClaim(m, f)
        next == {f \in OfKey(Key[e]) : f > e}
        open == {f \in next : row[f].st = "parked"}
    IN {f \in open : Cardinality({g \in open : g < f}) < Follow /\ \A g \in open : g <= f => ok(g)}

RECURSIVE Sorted(_)
Sorted(S) == IF S = {} THEN <<>> ELSE <<Min(S)>> \o Sorted(S \ {Min(S)})

Claim(m, e) ==
    /\ IsFree(m) /\ row[e].st = "pending" /\ CanClaim(m, e)
    /\ LET S == {e} \cup IF row[e].att = 0 /\ ~row[e].suspect THEN Behind(m, e) ELSE {}
       IN /\ row' = [f \in Events |-> IF f \in S THEN [row[f] EXCEPT !.st = "processing", !.by = m, !.att = @ + 1, !.begun = FALSE] ELSE row[f]]
          /\ mem' = [mem EXCEPT ![m].job = Sorted(S), ![m].src = IF row[e].suspect THEN "suspect" ELSE "row",
                 ![m].pc = IF ~Knows(m, Type[e]) \/ row[e].att >= MaxAttempts THEN "bury" ELSE "idle"]
    /\ UNCHANGED <<note, eff, dlq, kafka, fan, seq, used, ghost>>

\* A consumer takes the next record of its partition.
ReadRecord(m) ==
    /\ IsFree(m) /\ mem[m].pos \in 1..Len(Log) /\ Knows(m, Type[Log[mem[m].pos]])
    /\ mem' = [mem EXCEPT ![m].job = <<Log[mem[m].pos]>>, ![m].src = "record"]
    /\ UNCHANGED <<row, note, eff, dlq, kafka, fan, seq, used, ghost>>

\* A worker reads the next event of outbox, in the transaction that inserts its row.
ReadEvent(m) ==
    /\ IsFree(m) /\ ~IsConsumer(m) /\ fan.side = "postgres" /\ fan.at <= Len(Outbox)
    /\ ~\E n \in Members : mem[n].src = "event"
    /\ mem' = [mem EXCEPT ![m].job = <<Outbox[fan.at]>>, ![m].src = "event", ![m].pc = "park", ![m].why = "new"]
    /\ UNCHANGED <<row, note, eff, dlq, kafka, fan, seq, used, ghost>>

\* The transaction of the handler begins with the note; a transaction with the same note waits for the one that has it.
\* A member notes in the row of a suspect that its handler begins.
NoteIsFree(m, e) == ~\E n \in Members \ {m} : mem[n].pc \in {"call", "checked"} /\ E(n) = e
\* No handler is called for a record whose key is blocked when the transaction begins.
Begin(m) ==
    /\ May(m) /\ mem[m].pc = "idle" /\ mem[m].job # <<>>
    /\ NoteIsFree(m, E(m)) \/ Wrong("the note is written after the transaction")
    /\ LET e == E(m)
           suspect == mem[m].src = "suspect"
           mine == row[e].by = m /\ row[e].st = "processing"
           blocked == mem[m].src = "record" /\ e \notin note /\ Blocked(e) /\ ~Wrong("no look at the beginning of the transaction")
       IN IF suspect /\ ~mine THEN Go(m, "release") /\ UNCHANGED <<row, ghost>>
          ELSE IF blocked THEN mem' = [mem EXCEPT ![m].pc = "park", ![m].why = "blocked"] /\ UNCHANGED <<row, ghost>>
          ELSE /\ mem' = [mem EXCEPT ![m].pc = "call", ![m].unseen = ""]
               /\ row' = IF suspect THEN [row EXCEPT ![e].begun = TRUE] ELSE row
               /\ ghost' = IF e \in note \/ ghost.began[e] >= MaxAttempts THEN ghost ELSE [ghost EXCEPT !.began[e] = @ + 1]
    /\ UNCHANGED <<note, eff, dlq, kafka, fan, seq, used>>

\* The handler fails, and its transaction is rolled back.
Fail(m) ==
    /\ May(m) /\ mem[m].pc = "call" /\ E(m) \notin note
    /\ E(m) \in Bad \/ used.fails < MaxFails
    /\ used' = IF E(m) \in Bad THEN used ELSE [used EXCEPT !.fails = @ + 1]
    /\ mem' = [mem EXCEPT ![m].pc = IF mem[m].src = "record" THEN "park" ELSE "failed", ![m].why = "failed"]
    /\ UNCHANGED <<row, note, eff, dlq, kafka, fan, seq, ghost>>

\* The end of the transaction: it locks the key (shared). Then it ends its row, if it still has it and no earlier row of
\* the key is open; or it looks whether the key of its record is blocked, or was by a row that was put back meanwhile.
Check(m) ==
    /\ May(m) /\ mem[m].pc = "call" /\ (E(m) \notin Bad \/ E(m) \in note)
    /\ LET e == E(m)
           mine == row[e].by = m /\ row[e].st = "processing"
           skips == \E f \in OfKey(Key[e]) : f < e /\ IsOpen(row[f])
           blocked == e \notin note /\ ~Wrong("no look at the end of the transaction")
                      /\ (Blocked(e) \/ (mem[m].unseen = "back" /\ ~Wrong("no look for rows that were done meanwhile")))
       IN IF mem[m].src = "record"
          THEN mem' = [mem EXCEPT ![m].pc = IF blocked THEN "park" ELSE "checked", ![m].why = "blocked"]
          ELSE Go(m, IF (mine /\ ~skips) \/ Wrong("finishing without checking the holder") THEN "checked" ELSE "release")
    /\ UNCHANGED <<row, note, eff, dlq, kafka, fan, seq, used, ghost>>

\* What is wrong about an effect of e at this moment.
Faults(e) ==
    LET before == {f \in OfKey(Key[e]) : f < e}
    IN (IF \E f \in before : eff[f] = 0 /\ f \notin ghost.passed THEN {"order"} ELSE {})
       \cup (IF \E f \in before : Held(row[f]) THEN {"held"} ELSE {})
       \cup (IF row[e].st = "dead" THEN {"dead"} ELSE {})

\* Members whose handlers have begun, for a later event of the key of e.
Later(e) == {m \in Members : mem[m].pc \in {"call", "checked"} /\ Key[E(m)] = Key[e] /\ E(m) > e}

Commit(m) ==
    /\ May(m) /\ mem[m].pc = "checked"
    /\ LET e == E(m)
           repeat == e \in note
           record == mem[m].src = "record"
       IN /\ eff' = IF repeat THEN eff ELSE [eff EXCEPT ![e] = @ + 1]
          /\ ghost' = IF repeat THEN ghost ELSE [ghost EXCEPT !.wrong = @ \cup Faults(e) \cup (IF mem[m].unseen # "" THEN {"unseen"} ELSE {})]
          /\ note' = IF Wrong("the note is written after the transaction") THEN note ELSE note \cup {e}
          /\ row' = IF record THEN row ELSE Promote([row EXCEPT ![e] = [NoRow EXCEPT !.st = "done"]], Key[e])
          /\ mem' = [[n \in Members |-> IF n \in Later(e) /\ ~repeat
                                        THEN [mem[n] EXCEPT !.unseen = IF row[e].back /\ @ # "open" THEN "back" ELSE "open"] ELSE mem[n]]
                        EXCEPT ![m].unseen = "", ![m].job = Tail(@), ![m].src = IF Len(mem[m].job) = 1 THEN "" ELSE @, ![m].why = "",
                                ![m].pos = IF record THEN @ + 1 ELSE @,
                                ![m].pc = IF Wrong("the note is written after the transaction") THEN "note" \o ToString(e) ELSE "idle"]
    /\ UNCHANGED <<dlq, kafka, fan, seq, used>>
NoteLate(m) == \E e \in Events :
    /\ mem[m].pc = "note" \o ToString(e)
    /\ note' = note \cup {e} /\ Go(m, "idle")
    /\ UNCHANGED <<row, eff, dlq, kafka, fan, seq, used, ghost>>

\* Store.Fail: the row goes back with its error, and those behind it untried. The last attempt makes it DEAD.
FailRow(m) ==
    /\ May(m) /\ mem[m].pc = "failed" /\ ~Locked(Key[E(m)])
    /\ LET e == E(m)
       IN IF e \notin OwnRows(m) THEN Go(m, "release") /\ UNCHANGED row
          ELSE IF row[e].att >= MaxAttempts THEN Go(m, "bury") /\ UNCHANGED row
          ELSE /\ row' = Release([row EXCEPT ![e].st = "pending", ![e].by = None, ![e].suspect = FALSE], OwnRows(m) \ {e})
               /\ mem' = Without(m)
    /\ UNCHANGED <<note, eff, dlq, kafka, fan, seq, used, ghost>>

\* A row becomes DEAD. A consumer sends its dead letter before, a worker owes it.
Bury(m) ==
    /\ May(m) /\ mem[m].pc = "bury" /\ ~Locked(Key[E(m)])
    /\ LET e == E(m)
           dead == [row[e] EXCEPT !.st = "dead", !.by = None, !.why = IF Knows(m, Type[e]) THEN "attempts" ELSE "type",
                                  !.owed = FromRecord(e) /\ ~IsConsumer(m) /\ ~Wrong("a worker's dead letter is never sent")]
       IN IF e \notin OwnRows(m) THEN Go(m, "release") /\ UNCHANGED <<row, dlq, ghost>>
          ELSE /\ row' = Promote(Release([row EXCEPT ![e] = dead], OwnRows(m) \ {e}), Key[e])
               /\ dlq' = IF IsConsumer(m) THEN dlq \cup {e} ELSE dlq
               /\ ghost' = IF HoldDead THEN ghost ELSE [ghost EXCEPT !.passed = @ \cup {e}]
               /\ mem' = Without(m)
    /\ UNCHANGED <<note, eff, kafka, fan, seq, used>>

\* A member that has lost a row gives the others of its job back.
GiveBack(m) ==
    /\ May(m) /\ mem[m].pc = "release" /\ ~Locked(Key[E(m)])
    /\ row' = Promote(Release(row, OwnRows(m)), Key[E(m)])
    /\ mem' = Without(m)
    /\ UNCHANGED <<note, eff, dlq, kafka, fan, seq, used, ghost>>

\* The process that has a row may send the dead letter that a worker owes.
SendOwed(m, e) ==
    /\ May(m) /\ IsConsumer(m) /\ Active(m) /\ row[e].owed
    /\ dlq' = dlq \cup {e}
    /\ row' = [row EXCEPT ![e].owed = FALSE]
    /\ UNCHANGED <<note, eff, mem, kafka, fan, seq, used, ghost>>

-------------------------------------------------------------------------------
\* Inserting rows: the keys are locked, and a later statement decides.

Digest(e) == IF Wrong("identity without the type") THEN <<Id[e]>> ELSE <<Id[e], Type[e]>>
HasAlready(e) == e \in note \/ \E f \in Events : row[f].st \notin {"none", "done"} /\ Digest(f) = Digest(e)
NewStatus(e) == IF \E f \in OfKey(Key[e]) : IsOpen(row[f]) THEN "parked" ELSE "pending"

PassOn(m) ==
    /\ mem' = [Without(m) EXCEPT ![m].pos = IF mem[m].src = "record" THEN @ + 1 ELSE @]
    /\ fan' = IF mem[m].src = "event" THEN [fan EXCEPT !.at = @ + 1] ELSE fan
Insert(m, st) ==
    LET e == E(m)
    IN IF mem[m].src = "record" /\ HasAlready(e) THEN PassOn(m) /\ UNCHANGED <<row, seq>>
       ELSE IF seq
       THEN \* the id is taken: an error, after which the sequence is moved
            /\ seq' = FALSE /\ UNCHANGED row
            /\ IF Wrong("ON CONFLICT DO NOTHING without a target") THEN PassOn(m) ELSE UNCHANGED <<mem, fan>>
       ELSE /\ row' = [row EXCEPT ![e] = [NoRow EXCEPT !.st = st, !.att = IF mem[m].why = "failed" THEN 1 ELSE 0]]
            /\ PassOn(m) /\ UNCHANGED seq
InOneStatement == Wrong("head decided in the statement of the insert")
Park(m) ==
    /\ May(m) /\ mem[m].pc = "park" /\ ~InOneStatement /\ ~Locked(Key[E(m)])
    /\ Insert(m, NewStatus(E(m)))
    /\ UNCHANGED <<note, eff, dlq, kafka, used, ghost>>
\* The snapshot of the statement is older than its lock.
ParkDecides(m) ==
    /\ May(m) /\ mem[m].pc = "park" /\ InOneStatement
    /\ Go(m, NewStatus(E(m)))
    /\ UNCHANGED <<row, note, eff, dlq, kafka, fan, seq, used, ghost>>
ParkInserts(m) ==
    /\ May(m) /\ mem[m].pc \in {"parked", "pending"} /\ ~Locked(Key[E(m)])
    /\ Insert(m, mem[m].pc)
    /\ UNCHANGED <<note, eff, dlq, kafka, used, ghost>>

-------------------------------------------------------------------------------
\* Kafka, leases, operators, faults.

Assign(m) ==
    /\ IsFree(m) /\ IsConsumer(m) /\ Active(m) /\ kafka.owner # m /\ kafka.off <= Len(Log)
    /\ fan.side = "kafka" /\ \A e \in Range(Log) : Knows(m, Type[e])
    /\ kafka.owner # None => used.moves < MaxMoves
    /\ used' = IF kafka.owner # None THEN [used EXCEPT !.moves = @ + 1] ELSE used
    /\ kafka' = [kafka EXCEPT !.owner = m]
    /\ mem' = [mem EXCEPT ![m].pos = kafka.off]
    /\ UNCHANGED <<row, note, eff, dlq, fan, seq, ghost>>
CommitOffset(m) ==
    /\ May(m) /\ kafka.owner = m
    /\ LET next == mem[m].pos + IF Wrong("offset before the row") /\ mem[m].src = "record" THEN 1 ELSE 0
       IN /\ next > kafka.off
          /\ kafka' = [kafka EXCEPT !.off = next]
    /\ UNCHANGED <<row, note, eff, dlq, mem, fan, seq, used, ghost>>

\* The cut: the old side has passed everything, then the other one begins.
Move ==
    /\ fan.side = From
    /\ IF From = "kafka" THEN kafka.off > Len(Log) /\ Outbox # <<>> ELSE fan.at > Len(Outbox) /\ Log # <<>>
    /\ fan' = [fan EXCEPT !.side = CHOOSE s \in Sides : s # From]
    /\ UNCHANGED <<row, note, eff, dlq, mem, kafka, seq, used, ghost>>

\* A lease has expired. The row of a transaction that is about to be committed is locked.
Forgotten(e) == row[e].st = "processing" /\ e \notin Range(mem[row[e].by].job)
Hopeless(e) == row[e].st = "processing" /\ (Forgotten(e) \/ mem[row[e].by].frozen)
TakeOver(e) ==
    /\ row[e].st = "processing" /\ ~Locked(Key[e])
    /\ Hopeless(e) \/ used.takeovers < MaxTakeovers
    /\ used' = IF Hopeless(e) THEN used ELSE [used EXCEPT !.takeovers = @ + 1]
    /\ LET S == {f \in OfKey(Key[e]) : row[f].st = "processing" /\ row[f].by = row[e].by}
           counted(f) == row[f].begun \/ Wrong("attempts counted at the claim")
           dies(f) == row[f].att >= MaxAttempts /\ ~FromRecord(f) /\ counted(f)
           back(f) == [row[f] EXCEPT !.st = IF dies(f) THEN "dead" ELSE "parked", !.by = None, !.suspect = TRUE, !.begun = FALSE, !.back = TRUE,
                                     !.att = IF counted(f) THEN @ ELSE @ - 1, !.why = IF dies(f) THEN "attempts" ELSE ""]
       IN /\ row' = Promote([f \in Events |-> IF f \in S THEN back(f) ELSE row[f]], Key[e])
          /\ ghost' = IF HoldDead THEN ghost ELSE [ghost EXCEPT !.passed = @ \cup {f \in S : dies(f)}]
    /\ UNCHANGED <<note, eff, dlq, mem, kafka, fan, seq>>

\* outbox_requeue_deliveries: a later row that is PENDING is parked again.
Requeue(e) ==
    /\ used.requeues < MaxRequeues /\ row[e].st = "dead" /\ ~Locked(Key[e])
    /\ Use("requeues")
    /\ row' = Promote([f \in Events |->
           IF f = e THEN [NoRow EXCEPT !.st = "parked", !.back = TRUE]
           ELSE IF Key[f] = Key[e] /\ f > e /\ row[f].st = "pending" THEN [row[f] EXCEPT !.st = "parked"] ELSE row[f]], Key[e])
    /\ ghost' = [ghost EXCEPT !.began[e] = 0, !.passed = @ \cup {e}]
    /\ UNCHANGED <<note, eff, dlq, mem, kafka, fan, seq>>

Crash(m) ==
    /\ mem[m].job # <<>> \/ mem[m].pos # 0
    /\ used.crashes < MaxCrashes /\ Use("crashes")
    /\ mem' = [mem EXCEPT ![m] = NoJob]
    /\ kafka' = [kafka EXCEPT !.owner = IF @ = m THEN None ELSE @]
    /\ UNCHANGED <<row, note, eff, dlq, fan, seq, ghost>>
\* PostgreSQL ends the session of a member inside its transaction. The member finds out when it comes back, and has its
\* job still.
Expel(m) ==
    /\ mem[m].pc \in {"call", "checked"}
    /\ mem[m].frozen \/ used.expels < MaxExpels
    /\ used' = IF mem[m].frozen THEN used ELSE [used EXCEPT !.expels = @ + 1]
    /\ Go(m, "gone")
    /\ UNCHANGED <<row, note, eff, dlq, kafka, fan, seq, ghost>>
ComeBack(m) ==
    /\ May(m) /\ mem[m].pc = "gone" /\ Go(m, "idle")
    /\ UNCHANGED <<row, note, eff, dlq, kafka, fan, seq, used, ghost>>
\* For ever, or until it thaws. Its partition goes to another member, its lease expires.
Freeze(m) ==
    /\ mem[m].pc \in {"call", "checked"} /\ ~mem[m].frozen /\ used.freezes < MaxFreezes /\ Use("freezes")
    /\ mem' = [mem EXCEPT ![m].frozen = TRUE]
    /\ kafka' = [kafka EXCEPT !.owner = IF @ = m THEN None ELSE @]
    /\ UNCHANGED <<row, note, eff, dlq, fan, seq, ghost>>
Thaw(m) ==
    /\ mem[m].frozen /\ mem' = [mem EXCEPT ![m].frozen = FALSE]
    /\ UNCHANGED <<row, note, eff, dlq, kafka, fan, seq, used, ghost>>

Member(m) ==
    \/ ReadRecord(m) \/ ReadEvent(m) \/ Begin(m) \/ Fail(m) \/ Check(m) \/ Commit(m) \/ NoteLate(m) \/ FailRow(m) \/ Bury(m)
    \/ GiveBack(m) \/ Park(m) \/ ParkDecides(m) \/ ParkInserts(m) \/ ComeBack(m) \/ CommitOffset(m)
    \/ \E e \in Events : Claim(m, e) \/ SendOwed(m, e)
Others == Move \/ \E e \in Events : TakeOver(e) \/ Requeue(e)
Spec == Init /\ [][Others \/ \E m \in Members : Member(m) \/ Assign(m) \/ Crash(m) \/ Expel(m) \/ Freeze(m) \/ Thaw(m)]_vars

-------------------------------------------------------------------------------
\* What must hold.

\* The effect of an event once.
AtMostOnce == \A e \in Events : eff[e] <= 1
\* No effect before that of an earlier event of the key, unless that one was DEAD; and none of an event that is DEAD.
OrderPerKey == ghost.wrong \cap {"order", "dead"} = {}
\* A handler has seen the effects of all earlier events of the key that were done before its transaction ends.
SeesEarlier == "unseen" \notin ghost.wrong
\* Nothing of a key behind a dead row that holds it.
HoldDeadHolds == "held" \notin ghost.wrong
\* A key with open rows has one head: one PENDING, or rows with one member.
OneHead ==
    \A k \in {Key[e] : e \in Events} :
        LET heads == {e \in OfKey(k) : IsHead(row[e])}
        IN /\ Parked(row, k) # {} => heads # {}
           /\ \A e, f \in heads : e # f => row[e].st = "processing" /\ row[f].st = "processing" /\ row[e].by = row[f].by
\* What is passed has a row or a note.
Kept(e) == e \in note \/ row[e].st # "none" \/ (eff[e] > 0 /\ Wrong("the note is written after the transaction"))
NothingDropped ==
    /\ \A i \in 1..(kafka.off - 1) : Kept(Log[i])
    /\ \A i \in 1..(fan.at - 1) : Kept(Outbox[i])
\* Nothing is DEAD for its type while a member knows it.
NoneDeadForType == \A e \in Events : row[e].st = "dead" /\ row[e].why = "type" => ~\E m \in Members : Knows(m, Type[e])
\* Nothing is DEAD whose handler was not called as often as it may be.
NoneDeadUntried == \A e \in Events : row[e].st = "dead" /\ row[e].why = "attempts" => ghost.began[e] >= MaxAttempts
\* A dead row of a record has its dead letter, or owes it.
DeadLetterKnown == \A e \in Events : row[e].st = "dead" /\ FromRecord(e) => e \in dlq \/ row[e].owed
\* Some member claims what is due.
SomeoneClaims == \A e \in Events : row[e].st = "pending" => \E m \in Members : CanClaim(m, e)

\* While steps that are no faults are taken, and faults are finite, everything is handled or DEAD, also beside a member that is
\* frozen for ever.
Progress ==
    \/ Move
    \/ \E m \in Members : Member(m) \/ (mem[m].frozen /\ Expel(m)) \/ (kafka.owner = None /\ Assign(m))
    \/ \E e \in Events : Hopeless(e) /\ TakeOver(e)
Live == Spec /\ WF_vars(Progress)
EverythingEnds == <>[](\A e \in Events : eff[e] = 1 \/ row[e].st = "dead")

-------------------------------------------------------------------------------
\* Values for configurations.
One == <<1>>
Two == <<1, 2>>
TwoOfOne == <<1, 1>>
Three == <<1, 2, 3>>
ThreeOfOne == <<1, 1, 1>>
OneTwoOne == <<1, 2, 1>>
OneOneTwo == <<1, 1, 2>>
SentTwice == <<1, 2, 1>>
TwoAndThree == <<2, 3>>
OnlyTwo == <<2>>
OnlyThree == <<3>>
Nothing == <<>>
===============================================================================
The words of a counterexample:
  Claim: {mem#} claims events {mem.job}
  ReadRecord: {mem#} reads the record of event {mem.job}
  ReadEvent: {mem#} takes event {mem.job} from outbox
  Begin: {mem#} begins: {mem.pc}
  Fail: the handler of {mem#} fails
  Check: {mem#} comes to the end of its transaction: {mem.pc}
  Commit: {mem#} commits; effects of each event: {eff}
  NoteLate: {mem#} writes the note
  FailRow: {mem#} gives its row back with an error: {row#} is {row.st}
  Bury: {mem#} ends its row: {row#} is {row.st}
  GiveBack: {mem#} gives rows back
  SendOwed: a dead letter of event {row#} is sent
  Park: {mem#} inserts a row: {row#} is {row.st}
  ParkDecides: {mem#} decides that its row will be {mem.pc}
  ParkInserts: {mem#} inserts the row: {row#} is {row.st}
  Assign: {kafka.owner} gets the partition, at offset {kafka.off}
  CommitOffset: {kafka.owner} commits offset {kafka.off}
  Move: the group moves to {fan.side}
  TakeOver: a lease expires: {row#} is {row.st}
  Requeue: an operator requeues event {row#}
  Crash: {mem#} is killed
  Expel: PostgreSQL ends the session of {mem#}
  ComeBack: {mem#} comes back, with its job
  Freeze: {mem#} stands still
  Thaw: {mem#} goes on
  AtMostOnce: an event has its effect twice
  OrderPerKey: an event has its effect before an earlier one of its key, or although it is DEAD
  SeesEarlier: a handler has not seen the effect of an earlier event of its key
  HoldDeadHolds: an event has its effect behind a dead one that holds the key
  OneHead: a key has two heads, or parked rows without a head
  NothingDropped: an event is passed that has neither row nor note
  NoneDeadForType: an event is DEAD for its type, which a member knows
  NoneDeadUntried: an event is DEAD whose handler was not called as often as it may be
  DeadLetterKnown: an event is DEAD, and its dead letter is neither sent nor owed
  SomeoneClaims: no member claims a row that is due
  EverythingEnds: an event is neither handled nor DEAD
  "call": the handler is called in a transaction
  "park": the event will be parked
  "release": the rows will be given back
  "checked": the key is locked, nothing blocks it
