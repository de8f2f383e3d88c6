----------------------------- MODULE ExactlyOnce ------------------------------
(* A relay in the mode "exactly once": each batch is a Kafka transaction of    *)
(* one of two transactional ids in turn, with the events and one cursor record *)
(* that says how far the relay has come.                                       *)
(*                                                                             *)
(* What is abstracted. Module Window has how a window finds events: here they  *)
(* have places in pg.events, and a window is the first places. A batch has one *)
(* event, because the records of a batch become visible together; a batch of   *)
(* which a record is refused is aborted, which is as if it were never sent.    *)
(* Topic of events and cursor topic have one partition each, with transactions *)
(* in the same order, so the variable log is both. The lease can be taken at   *)
(* any time: that covers expiry, a process that stood still, and an early      *)
(* takeover. A failover goes to a standby that lags: to any state that         *)
(* PostgreSQL once had.                                                        *)
EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANTS
    Procs,      \* processes that have the relay
    Key,        \* record key of each event
    Known,      \* events 1..Known are recorded at the start, the others at any time
    MaxTxns, MaxSteals, MaxCrashes, MaxLost, MaxTimeouts, MaxRefusals, MaxFailovers,  \* bounds of the run
    Mistakes    \* seeded mistakes, {} for the design

Wrong(m) == m \in Mistakes

VARIABLES
    pg,       \* outbox_lease (epoch, holder), outbox (events), outbox_failed (failed), outbox_cursor (rows; base: events that
              \* it passes)
    standby,  \* a state that pg had
    log,      \* Kafka: transactions in the order of their records
    epochs,   \* Kafka: producer epoch of each transactional id
    relay,    \* processes
    used      \* what has been used up of the bounds, and the last token of a row
vars == <<pg, standby, log, epochs, relay, used>>

Ids == {1, 2}
NoOne == "none"
Max(S) == CHOOSE x \in S : \A y \in S : y <= x

\* A process: pc, and the step of its start; epoch of its lease, and of its two producers; the id whose turn it is; the
\* record that it has read; events that it has sent, and that its window has; the row that it knows; events of
\* outbox_failed (failed), those that a record must list (list), that Kafka has confirmed (done), that are removed without
\* a row or not parked yet by mistake (removed, late); transactions under way.
Idle == [pc |-> "idle", step |-> 0, epoch |-> 0, producers |-> <<0, 0>>, turn |-> 1, record |-> 0, sent |-> 0, window |-> 0, row |-> 0,
         failed |-> {}, list |-> {}, done |-> {}, removed |-> {}, late |-> {}, flight |-> <<>>]
Init ==
    /\ pg = [epoch |-> 0, holder |-> NoOne, events |-> [i \in 1..Known |-> i], failed |-> {}, rows |-> {}, base |-> 0]
    /\ standby = pg
    /\ log = <<>>
    /\ epochs = <<1, 1>>
    /\ relay = [p \in Procs |-> Idle]
    /\ used = [row |-> 0, events |-> Known, steals |-> 0, crashes |-> 0, lost |-> 0, timeouts |-> 0, refusals |-> 0, failovers |-> 0]

Use(what) == used' = [used EXCEPT ![what] = @ + 1]
Txns == 1..Len(log)
Places == 1..Len(pg.events)

-------------------------------------------------------------------------------
\* Kafka. A transaction has an id, an event (0: none) and the cursor record: how many events are passed, the row that it
\* names, the events that it lists.

Aborted == [id |-> 0, event |-> 0, passed |-> 0, row |-> 0, list |-> {}, st |-> "aborted", asked |-> FALSE]
AbortOpen(i) == [t \in Txns |-> IF log[t].id = i /\ log[t].st = "open" THEN Aborted ELSE log[t]]
\* A reader with read_committed sees the log up to the last stable offset.
Stable == {t \in Txns : \A u \in 1..t : log[u].st \in {"committed", "aborted"}}
Visible == {t \in Stable : log[t].st = "committed"}
Record(t) == IF t = 0 THEN [Aborted EXCEPT !.st = "committed"] ELSE log[t]

\* EndTxn arrives, perhaps late. The coordinator writes that the transaction is prepared, and answers.
PrepareCommit ==
    \E t \in Txns :
        /\ log[t].asked
        /\ log' = [log EXCEPT ![t].asked = FALSE, ![t].st = IF @ = "open" THEN "prepared" ELSE @]
        /\ UNCHANGED <<pg, standby, epochs, relay, used>>
\* The markers are in all partitions.
CompleteCommit ==
    \E t \in Txns :
        /\ log[t].st = "prepared"
        /\ log' = [log EXCEPT ![t].st = "committed"]
        /\ UNCHANGED <<pg, standby, epochs, relay, used>>
\* transaction.timeout.ms is over: the coordinator aborts.
TimeOut ==
    \E t \in Txns :
        /\ log[t].st = "open" /\ used.timeouts < MaxTimeouts /\ Use("timeouts")
        /\ log' = AbortOpen(log[t].id)
        /\ epochs' = [epochs EXCEPT ![log[t].id] = @ + 1]
        /\ UNCHANGED <<pg, standby, relay>>

-------------------------------------------------------------------------------
\* PostgreSQL.

HoldsLease(p) == pg.holder = p /\ pg.epoch = relay[p].epoch
HasRow(p) == relay[p].row = 0 \/ relay[p].row \in pg.rows
\* A token that is never given out twice.
NewRow == IF Wrong("rows are named by ids that come again") THEN (IF pg.rows = {} THEN 1 ELSE Max(pg.rows) + 1) ELSE used.row + 1

RecordEvent ==
    /\ used.events < Len(Key) /\ Use("events")
    /\ pg' = [pg EXCEPT !.events = Append(@, used.events + 1)]
    /\ UNCHANGED <<standby, log, epochs, relay>>
Replicate ==
    /\ used.failovers < MaxFailovers /\ standby # pg
    /\ standby' = pg
    /\ UNCHANGED <<pg, log, epochs, relay, used>>
FailOver ==
    /\ used.failovers < MaxFailovers /\ standby # pg /\ Use("failovers")
    /\ pg' = standby
    /\ UNCHANGED <<standby, log, epochs, relay>>

-------------------------------------------------------------------------------
\* The start: take the lease, fence both ids, read the cursor topic, renew the lease in the statement that reads outbox_failed.

Start == CASE Wrong("the record is read before the fence") -> <<"read", "fence1", "fence2", "renew">>
           [] Wrong("one id of two is fenced")             -> <<"fence1", "read", "renew">>
           [] OTHER                                        -> <<"fence1", "fence2", "read", "renew">>
IsAt(p, step) == relay[p].pc = "start" /\ Start[relay[p].step] = step
Ended(p) == relay' = [relay EXCEPT ![p] = Idle]

TakeLease(p) ==
    /\ relay[p].pc = "idle"
    /\ LET steals == pg.holder # NoOne /\ pg.holder # p /\ relay[pg.holder].pc # "idle"
       IN /\ steals => used.steals < MaxSteals
          /\ used' = IF steals THEN [used EXCEPT !.steals = @ + 1] ELSE used
    /\ pg' = [pg EXCEPT !.epoch = @ + 1, !.holder = p]
    /\ relay' = [relay EXCEPT ![p].pc = "start", ![p].step = 1, ![p].epoch = pg.epoch + 1]
    /\ UNCHANGED <<standby, log, epochs>>

\* InitProducerID aborts what is open, and answers once what was prepared is committed.
Initialized(p, i) ==
    /\ log' = AbortOpen(i)
    /\ epochs' = [epochs EXCEPT ![i] = @ + 1]
CanInitialize(i) == Wrong("the fence does not wait for a prepared transaction") \/ ~\E t \in Txns : log[t].id = i /\ log[t].st = "prepared"
Fence(p) ==
    \E i \in Ids :
        /\ IsAt(p, IF i = 1 THEN "fence1" ELSE "fence2") /\ CanInitialize(i)
        /\ Initialized(p, i)
        /\ relay' = [relay EXCEPT ![p].producers[i] = epochs[i] + 1, ![p].step = @ + 1]
        /\ UNCHANGED <<pg, standby, used>>

\* The newest record of the cursor topic, read to its end.
AtEnd == Stable = Txns \/ Wrong("the reader does not wait for the last stable offset") \/ Wrong("the record is read before the fence")
         \/ Wrong("one id of two is fenced")
ReadRecord(p) ==
    /\ IsAt(p, "read") /\ AtEnd
    /\ relay' = [relay EXCEPT ![p].record = IF Visible = {} THEN 0 ELSE Max(Visible), ![p].step = @ + 1]
    /\ UNCHANGED <<pg, standby, log, epochs, used>>

\* Events of outbox_failed that the record has not passed: their batch was aborted.
Above(passed) == {e \in pg.failed : \A i \in Places : pg.events[i] = e => i > passed}
Stays == Wrong("rows above the record stay") \/ Wrong("rows above the record stay, and wait")
\* One statement: it proves the lease and the row that the record names, removes rows of events that the record lists and
\* rows above the record, and writes a row.
Renew(p) ==
    /\ IsAt(p, "renew")
    /\ LET r == Record(relay[p].record)
           failed == (pg.failed \ r.list) \ (IF Stays THEN {} ELSE Above(r.passed))
           from == IF Wrong("the later of two positions counts") /\ pg.base > r.passed THEN pg.base ELSE r.passed
           lacks == r.row # 0 /\ r.row \notin pg.rows
           ready == [relay[p] EXCEPT !.pc = "run", !.sent = from, !.window = from, !.failed = failed]
       IN CASE Wrong("no renewal after the fence") /\ ~lacks ->
                   relay' = [relay EXCEPT ![p] = [ready EXCEPT !.row = r.row, !.list = r.list]] /\ UNCHANGED <<pg, used>>
            [] ~Wrong("no renewal after the fence") /\ ~HoldsLease(p) -> Ended(p) /\ UNCHANGED <<pg, used>>
            [] lacks /\ ~Wrong("the row is not looked for") ->
                   relay' = [relay EXCEPT ![p] = [Idle EXCEPT !.pc = "stopped"]] /\ UNCHANGED <<pg, used>>
            [] OTHER ->
                   /\ pg' = [pg EXCEPT !.failed = failed, !.rows = @ \cup {NewRow}]
                   /\ used' = [used EXCEPT !.row = NewRow]
                   /\ relay' = [relay EXCEPT ![p] = [ready EXCEPT !.row = NewRow]]
    /\ UNCHANGED <<standby, log, epochs>>

-------------------------------------------------------------------------------
\* A relay that runs. Each statement proves the lease and the row that the relay knows.

Runs(p) == relay[p].pc = "run"
Proves(p) == HoldsLease(p) /\ HasRow(p)
Next(p) == pg.events[relay[p].sent + 1]
HasNext(p) == relay[p].sent < relay[p].window /\ relay[p].sent < Len(pg.events)
Blocked(p, e) == \E f \in relay[p].failed : f # e /\ Key[f] = Key[e]
Passed(p, e) == \E i \in Places : pg.events[i] = e /\ i <= relay[p].sent

\* The row of a window is there before Kafka commits a record that names it.
OpenWindow(p) ==
    /\ Runs(p) /\ Proves(p)
    /\ (relay[p].sent = relay[p].window /\ relay[p].window < Len(pg.events)) \/ relay[p].removed # {}
    /\ pg' = [pg EXCEPT !.rows = @ \cup {NewRow}, !.base = IF relay[p].sent = relay[p].window THEN relay[p].window ELSE @]
    /\ used' = [used EXCEPT !.row = NewRow]
    /\ relay' = [relay EXCEPT ![p].row = NewRow, ![p].window = IF relay[p].sent = @ THEN Len(pg.events) ELSE @,
                              ![p].list = @ \ relay[p].removed, ![p].removed = {}]
    /\ UNCHANGED <<standby, log, epochs>>

\* The id whose turn it is has no transaction under way.
CanSend(p) ==
    LET i == relay[p].turn
    IN /\ Runs(p) /\ HasRow(p) /\ Len(relay[p].flight) < 2 /\ Len(log) < MaxTxns
       /\ relay[p].producers[i] = epochs[i]
       /\ \A t \in Txns : log[t].id = i => log[t].st \notin {"open", "prepared"}
Send(p, e, passed, list) ==
    LET i == relay[p].turn
    IN /\ log' = Append(log, [id |-> i, event |-> e, passed |-> passed, row |-> relay[p].row, st |-> "open", asked |-> FALSE,
                              list |-> IF Wrong("the list is not cumulative") THEN list \ relay[p].list ELSE list])
       /\ relay' = [relay EXCEPT ![p].turn = 3 - i, ![p].flight = Append(@, Len(log) + 1), ![p].sent = passed, ![p].list = list]
       /\ UNCHANGED <<pg, standby, epochs, used>>
\* An event that is parked already is passed without being sent.
SendNext(p) ==
    /\ CanSend(p) /\ HasNext(p) /\ (Next(p) \in relay[p].failed \/ ~Blocked(p, Next(p)))
    /\ Send(p, IF Next(p) \in relay[p].failed THEN 0 ELSE Next(p), relay[p].sent + 1, relay[p].list)

\* An event that Kafka refuses, or whose key is blocked, enters outbox_failed before a record passes it. The statement
\* writes a row, which that record names.
Park(p) ==
    /\ Runs(p) /\ HasNext(p) /\ HasRow(p) /\ Len(relay[p].flight) < 2 /\ Next(p) \notin relay[p].failed
    /\ Blocked(p, Next(p)) \/ used.refusals < MaxRefusals
    /\ LET e == Next(p)
           refusals == used.refusals + IF Blocked(p, e) THEN 0 ELSE 1
       IN IF Wrong("parked after the commit")
          THEN /\ relay' = [relay EXCEPT ![p].failed = @ \cup {e}, ![p].late = @ \cup {e}]
               /\ used' = [used EXCEPT !.refusals = refusals] /\ UNCHANGED pg
          ELSE /\ HoldsLease(p)
               /\ pg' = [pg EXCEPT !.failed = @ \cup {e}, !.rows = @ \cup {NewRow}]
               /\ used' = [used EXCEPT !.refusals = refusals, !.row = NewRow]
               /\ relay' = [relay EXCEPT ![p].failed = @ \cup {e},
                                         ![p].row = IF Wrong("the record names the window's row, not that of the parking") THEN @ ELSE NewRow]
    /\ UNCHANGED <<standby, log, epochs>>
ParkLate(p) ==
    /\ Runs(p) /\ relay[p].late # {} /\ relay[p].flight = <<>> /\ HoldsLease(p) /\ ~HasNext(p)
    /\ pg' = [pg EXCEPT !.failed = @ \cup relay[p].late]
    /\ relay' = [relay EXCEPT ![p].late = {}]
    /\ UNCHANGED <<standby, log, epochs, used>>

\* The first parked event of a key is sent again, and listed in the record.
Retry(p) ==
    /\ CanSend(p)
    /\ \E e \in relay[p].failed :
        /\ e \notin relay[p].list \cup relay[p].done \cup relay[p].late
        /\ \A f \in relay[p].failed : Key[f] = Key[e] => e <= f
        /\ Passed(p, e) \/ Wrong("rows above the record stay")
        /\ Send(p, e, relay[p].sent, relay[p].list \cup {e})
\* One statement removes rows of events that Kafka has confirmed, and writes a row. Records that name it list them no longer.
Remove(p) ==
    /\ Runs(p) /\ Proves(p)
    /\ LET gone == {e \in relay[p].done : Passed(p, e)}
           late == Wrong("a removal without a row")
           alone == late \/ Wrong("an event leaves the list before its removal has a row")
       IN /\ gone # {}
          /\ pg' = [pg EXCEPT !.failed = @ \ gone, !.rows = IF alone THEN @ ELSE @ \cup {NewRow}]
          /\ used' = IF alone THEN used ELSE [used EXCEPT !.row = NewRow]
          /\ relay' = [relay EXCEPT ![p].failed = @ \ gone, ![p].done = @ \ gone, ![p].removed = IF late THEN @ \cup gone ELSE @,
                                    ![p].list = IF late THEN @ ELSE @ \ gone, ![p].row = IF alone THEN @ ELSE NewRow]
    /\ UNCHANGED <<standby, log, epochs>>

\* The commit of batch n is asked for at once, that of n+1 once n is confirmed.
AskCommit(p) ==
    /\ Runs(p)
    /\ \E k \in 1..Len(relay[p].flight) :
        LET t == relay[p].flight[k]
        IN /\ k = 1 \/ Wrong("n+1 is committed before n is confirmed")
           /\ log[t].st = "open" /\ ~log[t].asked
           /\ log' = [log EXCEPT ![t].asked = TRUE]
    /\ UNCHANGED <<pg, standby, epochs, relay, used>>
Confirm(p) ==
    /\ Runs(p) /\ relay[p].flight # <<>>
    /\ LET t == Head(relay[p].flight)
       IN /\ log[t].st \in {"prepared", "committed"}
          /\ relay' = [relay EXCEPT ![p].flight = Tail(@), ![p].done = IF log[t].event \in relay[p].failed THEN @ \cup {log[t].event} ELSE @]
    /\ UNCHANGED <<pg, standby, log, epochs, used>>
\* Kafka denies a commit: the relay starts again, and n+1 is not committed after n.
Deny(p) ==
    /\ Runs(p) /\ \E k \in 1..Len(relay[p].flight) : log[relay[p].flight[k]].st = "aborted"
    /\ IF Wrong("n+1 is committed after n was aborted")
       THEN log[Head(relay[p].flight)].st = "aborted" /\ relay' = [relay EXCEPT ![p].flight = Tail(@)]
       ELSE Ended(p)
    /\ UNCHANGED <<pg, standby, log, epochs, used>>
\* EndTxn gets no answer: the relay starts again.
LoseAnswer(p) ==
    /\ Runs(p) /\ relay[p].flight # <<>> /\ used.lost < MaxLost /\ Use("lost")
    /\ LET t == Head(relay[p].flight)
       IN /\ log[t].asked \/ log[t].st # "open"
          /\ IF Wrong("an unknown outcome counts as aborted")
             THEN relay' = [relay EXCEPT ![p].flight = <<>>, ![p].sent = log[t].passed - 1]
             ELSE Ended(p)
    /\ UNCHANGED <<pg, standby, log, epochs>>
\* Another process has fenced a producer, the lease is lost, or PostgreSQL lacks the row: the relay starts again.
Doubt(p) ==
    /\ Runs(p)
    /\ ~Proves(p) \/ relay[p].producers[relay[p].turn] \notin {0, epochs[relay[p].turn]}
    /\ Ended(p)
    /\ UNCHANGED <<pg, standby, log, epochs, used>>
\* By mistake the second id is initialized when it is used first.
FenceLate(p) ==
    /\ Wrong("one id of two is fenced") /\ Runs(p) /\ relay[p].turn = 2 /\ relay[p].producers[2] = 0 /\ CanInitialize(2)
    /\ Initialized(p, 2)
    /\ relay' = [relay EXCEPT ![p].producers[2] = epochs[2] + 1]
    /\ UNCHANGED <<pg, standby, used>>
Crash(p) ==
    /\ relay[p].pc \notin {"idle", "stopped"} /\ used.crashes < MaxCrashes /\ Use("crashes")
    /\ Ended(p)
    /\ UNCHANGED <<pg, standby, log, epochs>>

Process(p) ==
    \/ TakeLease(p) \/ Fence(p) \/ ReadRecord(p) \/ Renew(p) \/ OpenWindow(p) \/ SendNext(p) \/ Park(p) \/ ParkLate(p) \/ Retry(p)
    \/ Remove(p) \/ AskCommit(p) \/ Confirm(p) \/ Deny(p) \/ Doubt(p) \/ FenceLate(p)
Spec ==
    Init /\ [][\/ PrepareCommit \/ CompleteCommit \/ TimeOut \/ RecordEvent \/ Replicate \/ FailOver
               \/ \E p \in Procs : Process(p) \/ LoseAnswer(p) \/ Crash(p)]_vars

-------------------------------------------------------------------------------
\* What must hold.

Committed == {t \in Txns : log[t].st \in {"prepared", "committed"}}
Newest == log[Max(Committed)]
\* A reader with read_committed sees an event at most once.
AtMostOnce == \A t, u \in Committed : log[t].event # 0 /\ log[t].event = log[u].event => t = u
\* What the newest record passes is in Kafka or in outbox_failed. If PostgreSQL lacks the row that the record names, a
\* failover has lost rows, and the next relay finds out.
NothingSkipped ==
    Committed # {} /\ Newest.row \in pg.rows =>
        \A i \in Places : i <= Newest.passed => pg.events[i] \in pg.failed \cup {log[t].event : t \in Committed}
\* No event comes before an earlier one of its key.
OrderPerKey ==
    \A t \in Committed : log[t].event # 0 /\ log[t].row \in pg.rows =>
        \A i \in Places : pg.events[i] < log[t].event /\ Key[pg.events[i]] = Key[log[t].event] =>
            \E u \in Committed : u < t /\ log[u].event = pg.events[i]
\* Records go forward.
Forward == \A t, u \in Committed : t < u => log[t].passed <= log[u].passed

\* While faults are finite, everything is sent.
Live ==
    /\ Spec /\ WF_vars(PrepareCommit) /\ WF_vars(CompleteCommit)
    /\ \A p \in Procs : WF_vars(TakeLease(p)) /\ WF_vars(Fence(p)) /\ WF_vars(ReadRecord(p)) /\ WF_vars(Renew(p)) /\ WF_vars(OpenWindow(p))
    /\ \A p \in Procs : WF_vars(SendNext(p)) /\ WF_vars(Park(p)) /\ WF_vars(Retry(p)) /\ WF_vars(Remove(p)) /\ WF_vars(AskCommit(p))
    /\ \A p \in Procs : WF_vars(Confirm(p)) /\ WF_vars(Deny(p)) /\ WF_vars(Doubt(p))
EverythingSent == <>[](\A e \in 1..Known : e \in {log[t].event : t \in Visible})

Alike == Permutations(Procs)
One == <<1>>
TwoOfOne == <<1, 1>>
OneTwo == <<1, 2>>
ThreeOfOne == <<1, 1, 1>>
===============================================================================
The words of a counterexample:
  PrepareCommit: EndTxn for transaction {log#} arrives, the coordinator has it as {log.st}
  CompleteCommit: transaction {log#} is committed
  TimeOut: transaction.timeout.ms is over: the coordinator aborts transaction {log#}
  RecordEvent: event {pg.events.} is committed in PostgreSQL
  Replicate: the standby has caught up
  FailOver: PostgreSQL fails over: it has the rows {pg.rows} of outbox_cursor, events {pg.failed} in outbox_failed
  TakeLease: {relay#} takes the lease with epoch {pg.epoch}
  Fence: {relay#} fences transactional id {epochs#}, its epoch is {epochs.}
  ReadRecord: {relay#} reads the cursor topic: its newest record is that of transaction {relay.record}
  Renew: {relay#} reads outbox_failed after the fence: events {relay.failed}; its row is {relay.row}; it {relay.pc} after {relay.sent} events
  OpenWindow: {relay#} opens a window up to event {relay.window}, row {relay.row}
  SendNext: {relay#} sends transaction {log#} on id {log.id} with event {log.event} (0: with none); the record: {log.passed} passed, row {log.row}, list {log.list}
  Park: {relay#} parks the next event, Kafka refuses it or its key is blocked; parked: {relay.failed}
  ParkLate: {relay#} writes events {pg.failed} into outbox_failed
  Retry: {relay#} sends transaction {log#} on id {log.id} with event {log.event} again; the record: {log.passed} passed, row {log.row}, list {log.list}
  Remove: {relay#} removes rows from outbox_failed, left are events {pg.failed}
  AskCommit: EndTxn for transaction {log#} is sent
  Confirm: a commit is confirmed to {relay#}; transactions under way: {relay.flight}
  Deny: {relay#} learns that a transaction was aborted
  LoseAnswer: {relay#} gets no answer to EndTxn
  Doubt: {relay#} finds that it is fenced, that its lease is lost or its row is gone, and starts again
  FenceLate: {relay#} initializes transactional id {epochs#}
  Crash: {relay#} is killed
  AtMostOnce: a reader with read_committed sees an event twice
  NothingSkipped: a record passes an event that is neither in Kafka nor in outbox_failed
  OrderPerKey: an event comes before an earlier one of its key
  Forward: a record goes back behind an earlier one
  EverythingSent: an event is never sent
  "run": goes on
  "idle": has lost its lease and starts again,
  "stopped": lacks the row that the record names and stops
