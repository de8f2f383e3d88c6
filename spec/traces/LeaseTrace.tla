------------------------------ MODULE LeaseTrace ------------------------------
(* A fault run as the relays have written it, walked through Lease.tla:        *)
(* `make spec-traces`. TLC finds an order of the steps in which each of them   *)
(* is one that the model allows.                                               *)
(*                                                                              *)
(* A step has the times between which it was done. Two steps whose times        *)
(* overlap may have come in any order. A step of a process that was killed, or  *)
(* that got no answer, may have been done later, or never (Maybe).              *)
(*                                                                              *)
(* What nothing writes. A lease expires only where a step needs that, and only  *)
(* if its duration has passed since the step began that renewed it. Kafka       *)
(* accepts events only where a process has learned so, and only in the order in *)
(* which they are in the topic. What a process has sent whose answer it does    *)
(* not wait for is forgotten: if it arrives, it is in front of what is sent     *)
(* next, or repeats an event. The session of a process that knows that its lock *)
(* is lost has ended once another one gets the lock.                            *)
EXTENDS Lease, LeaseTraceData

CONSTANT Recheck  \* us that a standby waits before it takes over from a process that is gone

VARIABLES
    place,   \* of each chain of steps, the next one
    left,    \* those in Maybe that were not done
    until    \* when the lease of an epoch may expire
trace == <<place, left, until>>

TraceMay(p) == TRUE                                 \* what a frozen process has asked for may be done
TraceLeads(p) == mem[p].pc \in {"load", "lead"}     \* renewals begin before the cursor is loaded

Chains == {c \in DOMAIN Chain : place[c] <= Len(Chain[c])}
Front(c) == Chain[c][place[c]]
\* A step may be next if it began before any that is left has ended.
Bound == IF Chains = {} THEN End + 1 ELSE Min({Front(c).e : c \in Chains})

Same == UNCHANGED vars
Mine(s) == {f \in net : f.epoch = mem[s.p].epoch /\ f.part = s.part /\ f.answered}

TakeStep(s) ==
    LET p == s.p IN
    /\ s.epoch = pg.epoch + 1
    /\ IF mem[p].seen # 0 THEN TakeFromGone(p) /\ s.e - s.locked >= Recheck
       ELSE \/ Take(p)
            \/ /\ mem[p].pc = "standby" /\ pg.holder = p  \* its own, after a try without an answer or a loss of its own
               /\ Taken(p, FALSE, pg.waits) /\ UNCHANGED <<lock, over, net, kafka, ghost, used>>
LoadStep(s) ==
    LET p == s.p IN
    /\ mem[p].epoch = s.epoch /\ pg.at = s.at
    /\ \/ mem[p].pc = "load" /\ pg.by = s.by /\ Load(p)
       \/ /\ mem[p].pc = "load" /\ pg.by = 0  \* makes the first row
          /\ pg' = [pg EXCEPT !.by = s.by]
          /\ mem' = [mem EXCEPT ![p].pc = "lead", ![p].by = s.by]
          /\ UNCHANGED <<lock, over, net, kafka, ghost, used>>
       \/ /\ mem[p].pc = "lead" /\ pg.by = s.by /\ mem[p].session # "sent"
          /\ mem' = [mem EXCEPT ![p].session = "idle", ![p].batch = <<>>, ![p].rejected = 0, ![p].at = pg.at, ![p].by = pg.by, ![p].parked = pg.parked]
          /\ UNCHANGED <<pg, lock, over, net, kafka, ghost, used>>

LockStep(s) ==
    LET p == s.p IN
    IF TraceLeads(p) THEN TakeLock(p)
    ELSE /\ mem[p].seen = 0 /\ lock = NoOne
         /\ lock' = p
         /\ mem' = [mem EXCEPT ![p].seen = IF pg.locked THEN pg.epoch ELSE -1]
         /\ UNCHANGED <<pg, over, net, kafka, ghost, used>>
UnlockStep(s) ==
    /\ mem[s.p].seen # 0
    /\ lock' = IF lock = s.p THEN NoOne ELSE lock
    /\ mem' = [mem EXCEPT ![s.p].seen = 0]
    /\ UNCHANGED <<pg, over, net, kafka, ghost, used>>
BreakStep(p) ==
    /\ lock' = IF lock = p THEN NoOne ELSE lock
    /\ mem' = [mem EXCEPT ![p].claiming = ""]
    /\ UNCHANGED <<pg, over, net, kafka, ghost, used>>
ClaimStep(s) == ClaimLock(s.p) /\ pg'.locked = s.ok
RenewStep(s) ==
    LET p == s.p IN
    /\ mem[p].epoch = s.epoch
    /\ IF s.keep THEN ~mem[p].lost /\ Renewal(p)
       ELSE IF mem[p].lost /\ ~s.claimed THEN Withdraw(p)
       ELSE (s.claimed \/ ~pg.locked) /\ Renewal(p)

\* A delivery sends what it has not sent yet as often as it needs to, and checks the lease each time.
CheckStep(s) ==
    LET p == s.p IN
    IF s.again THEN Held(p) /\ Sure(p) /\ Same
    ELSE mem[p].pc = "lead" /\ IF s.part = "session" THEN Check(p) ELSE CheckRetry(p)
SendStep(s) ==
    LET p == s.p IN
    IF s.part = "session"
    THEN (\A i \in 1..Len(s.ids) : s.ids[i] = mem[p].at + i) /\ SendBatch(p, s.ids)
    ELSE {e \in mem[p].parked : e <= s.ids[Len(s.ids)]} = Range(s.ids) /\ Resend(p, s.ids)
AcceptStep(s) ==
    \E f \in Mine(s) :
        /\ s.n <= Len(f.events)
        /\ AcceptFirst(f, s.n)
        /\ \A i \in Len(kafka) + 1..Len(kafka') : i <= Len(Arrived) /\ kafka'[i] = Arrived[i]
RejectStep(s) == \E f \in Mine(s) : Head(f.events) = s.id /\ RejectFirst(f)
\* The partition does not answer. What was sent is parked, and its answer is waited for.
SuspectStep(s) ==
    \E f \in Mine(s) :
        /\ net' = (net \ {f}) \cup {[f EXCEPT !.events = s.ids, !.answered = FALSE]}
        /\ Answer(f, TRUE)
        /\ UNCHANGED <<pg, lock, over, kafka, ghost, used>>
LateStep(s) ==
    \E f \in {f \in net : f.epoch = mem[s.p].epoch /\ ~f.answered /\ Head(f.events) = s.id} :
        IF s.ok
        THEN /\ AcceptFirst(f, 1)
             /\ Len(kafka') = Len(kafka) \/ kafka'[Len(kafka')] = Arrived[Len(kafka')]
        ELSE /\ net' = (net \ {f}) \cup (IF Len(f.events) = 1 THEN {} ELSE {[f EXCEPT !.events = Tail(@)]})
             /\ UNCHANGED <<pg, lock, over, kafka, mem, ghost, used>>
\* No answer: the client is closed.
CloseStep(s) ==
    /\ net' = net \ Mine(s)
    /\ mem' = IF s.part = "session" THEN [mem EXCEPT ![s.p].session = "idle", ![s.p].batch = <<>>] ELSE [mem EXCEPT ![s.p].retrier = "idle"]
    /\ UNCHANGED <<pg, lock, over, kafka, ghost, used>>
BlockStep(s) == mem[s.p].pc = "lead" /\ (\A i \in 1..Len(s.ids) : s.ids[i] = mem[s.p].at + i) /\ BlockBatch(s.p, s.ids)

\* A row of the cursor: the position behind a batch, or a new window.
MoveStep(s) ==
    /\ mem[s.p].epoch = s.epoch /\ mem[s.p].session \in {"idle", "answered"}
    /\ MoveBehind(s.p)
    /\ pg'.at = s.at /\ pg'.parked = pg.parked \cup s.failed /\ pg.parked \cap s.failed = {}
SaveStep(s) ==
    LET p == s.p IN
    /\ mem[p].epoch = s.epoch
    /\ s.sent \subseteq Range(kafka)
    /\ s.dead # {} => mem[p].retrier = "rejected"
    /\ SaveResults(p, s.sent, s.dead)

\* Each may come after the other.
ReleaseStep(s) == IF ~TraceLeads(s.p) THEN Same ELSE mem[s.p].epoch = s.epoch /\ IF HasLease(s.p) THEN Release(s.p) ELSE Stop(s.p)
StopStep(s) == IF ~TraceLeads(s.p) THEN Same ELSE Stop(s.p)
\* A process was killed, or has ended.
EndStep(s) ==
    /\ mem' = Ended(s.p)
    /\ lock' = IF lock = s.p THEN NoOne ELSE lock
    /\ net' = {f \in net : f.epoch # mem[s.p].epoch}
    /\ UNCHANGED <<pg, over, kafka, ghost, used>>

Step(s) ==
    CASE s.do = "take" -> TakeStep(s)
      [] s.do = "load" -> LoadStep(s)
      [] s.do = "lock" -> LockStep(s)
      [] s.do = "unlock" -> UnlockStep(s)
      [] s.do = "break" -> BreakStep(s.p)
      [] s.do = "claim" -> ClaimStep(s)
      [] s.do = "renew" -> RenewStep(s)
      [] s.do = "notice" -> mem[s.p].epoch = s.epoch /\ Notice(s.p)
      [] s.do = "check" -> CheckStep(s)
      [] s.do = "send" -> SendStep(s)
      [] s.do = "accept" -> AcceptStep(s)
      [] s.do = "reject" -> RejectStep(s)
      [] s.do = "suspect" -> SuspectStep(s)
      [] s.do = "late" -> LateStep(s)
      [] s.do = "close" -> CloseStep(s)
      [] s.do = "block" -> BlockStep(s)
      [] s.do = "move" -> MoveStep(s)
      [] s.do = "save" -> SaveStep(s)
      [] s.do = "release" -> ReleaseStep(s)
      [] s.do = "stop" -> StopStep(s)
      [] s.do = "end" -> EndStep(s)
      [] s.do = "freeze" -> IF TraceLeads(s.p) THEN Freeze(s.p) ELSE Same
      [] s.do = "thaw" -> IF mem[s.p].frozen THEN Thaw(s.p) ELSE Same

\* A statement without an answer changes PostgreSQL, and its process does not know.
MaybeStep(s) ==
    LET holds == pg.epoch = s.epoch IN
    CASE s.do = "take" ->
            /\ pg.epoch \in over \/ pg.locked \/ pg.holder = s.p
            /\ pg' = [pg EXCEPT !.epoch = @ + 1, !.holder = s.p, !.locked = FALSE, !.waits = IF pg.epoch \in over THEN @ ELSE @ \cup {pg.epoch}]
            /\ UNCHANGED <<lock, over, net, kafka, mem, ghost, used>>
      [] s.do = "renew" ->
            /\ holds
            /\ pg' = [pg EXCEPT !.locked = @ /\ s.keep]
            /\ over' = over \ {pg.epoch}
            /\ mem' = Renewed(pg.holder)
            /\ UNCHANGED <<lock, net, kafka, ghost, used>>
      [] s.do = "release" -> holds /\ over' = over \cup {s.epoch} /\ UNCHANGED <<pg, lock, net, kafka, mem, ghost, used>>
      [] s.do = "claim" -> holds /\ lock = s.p /\ pg' = [pg EXCEPT !.locked = TRUE] /\ UNCHANGED <<lock, over, net, kafka, mem, ghost, used>>
      [] s.do = "move" ->
            /\ holds /\ pg.at <= s.at
            /\ pg' = [pg EXCEPT !.at = s.at, !.by = s.epoch, !.parked = @ \cup s.failed]
            /\ UNCHANGED <<lock, over, net, kafka, mem, ghost, used>>
      [] s.do = "save" ->
            /\ holds
            /\ pg' = [pg EXCEPT !.parked = @ \ (s.sent \cup s.dead), !.dead = @ \cup (s.dead \cap pg.parked)]
            /\ UNCHANGED <<lock, over, net, kafka, mem, ghost, used>>

\* From when on the lease may expire, behind a step.
Renews(s) == IF s.do \in {"take", "renew"} THEN until' = [until EXCEPT ![pg'.epoch] = s.b + Lasts] ELSE UNCHANGED until

\* What nothing writes.
Expires(s) ==
    \/ s.do = "take" /\ pg.epoch # 0 /\ s.e >= until[pg.epoch] /\ Expire
    \/ s.do = "stop" /\ pg.epoch = mem[s.p].epoch /\ pg.epoch # 0 /\ s.e >= until[pg.epoch] /\ Expire
    \/ s.do = "check" /\ s.part = "retrier" /\ \E e \in mem[s.p].waits : s.e >= until[e] /\ ExpireTaken(e)
Frees(s) == s.do = "lock" /\ \E p \in Procs : TraceLeads(p) /\ lock = p /\ (mem[p].lost \/ ~mem[p].claim) /\ BreakStep(p)
Hidden(s) == Expires(s) \/ Frees(s)

\* A statement that proves an earlier lease does nothing.
StillMaybe(some) == {m \in some : Maybe[m].do = "take" \/ Maybe[m].epoch >= pg'.epoch}

TraceInit == Init /\ place = [c \in DOMAIN Chain |-> 1] /\ left = DOMAIN Maybe /\ until = [e \in 0..MaxEpochs |-> 0]
TraceNext == LET bound == Bound IN
    \/ \E c \in Chains :
        LET s == Front(c) IN
        /\ s.b < bound
        /\ \/ Step(s) /\ Renews(s) /\ place' = [place EXCEPT ![c] = @ + 1] /\ left' = StillMaybe(left)
           \/ Hidden(s) /\ UNCHANGED trace
    \/ \E m \in left :
        LET s == Maybe[m] IN
        /\ s.b < bound
        /\ \/ MaybeStep(s) /\ Renews(s) /\ left' = StillMaybe(left \ {m}) /\ UNCHANGED place
           \/ Hidden(s) /\ UNCHANGED trace
TraceSpec == TraceInit /\ [][TraceNext]_<<vars, trace>>

-------------------------------------------------------------------------------
\* Tells how far the longest walk has come. One that has come to the end ends TLC.
RECURSIVE Walked(_)
Walked(c) == IF c = 0 THEN 0 ELSE place[c] - 1 + Walked(c - 1)
Told ==
    LET n == Walked(Len(Chain)) IN
    /\ IF n <= TLCGet(1) THEN TRUE ELSE TLCSet(1, n) /\ PrintT(<<"walked", n, place, pg, lock, over>>)
    /\ IF Chains = {} /\ kafka = Arrived THEN PrintT("walked to the end") /\ TLCSet("exit", TRUE) ELSE TRUE
ASSUME TLCSet(1, -1)
===============================================================================
