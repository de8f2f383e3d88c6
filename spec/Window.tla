-------------------------------- MODULE Window --------------------------------
(* The cursor of a relay over PostgreSQL: windows between two snapshots, while *)
(* transactions draw transaction ids and ids of outbox in any order, are       *)
(* prepared, rolled back or stay open, and PostgreSQL crashes.                 *)
(*                                                                             *)
(* What is abstracted. A transaction records one event, of one key. Two events *)
(* have a defined order if one was committed before the other drew its id:     *)
(* their transactions changed the same aggregate. A statement that announces a *)
(* window takes its snapshot in one step, and commits the row of outbox_cursor *)
(* in another. A window is fetched at once and sent event by event.            *)
(*                                                                             *)
(* disk is the state of PostgreSQL at the end of the flushed WAL. A crash goes *)
(* back there. The next transaction id is then the one after the last that has *)
(* a record in the WAL; drawing a transaction id writes none.                  *)
EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANTS
    Txs,           \* transactions, each with one event
    MaxCrashes,    \* of PostgreSQL
    MaxRestarts,   \* of the relay
    MaxPrepared,   \* transactions that are prepared
    Async,         \* commits may return before their WAL is flushed
    Mistakes       \* seeded mistakes, {} for the design

Wrong(m) == m \in Mistakes

VARIABLES
    pg,      \* next and last finished transaction id, last one in the WAL, next id, transactions, newest row of outbox_cursor
    disk,    \* what a crash keeps of pg
    relay,   \* step, position, snapshot of the statement under way, fetched events
    kafka,   \* events in the order of their first arrival
    ghost,   \* before: events that were committed before an event drew its id; committed: events that ever were
    used     \* what has been used up of the bounds
vars == <<pg, disk, relay, kafka, ghost, used>>

Min(S) == CHOOSE x \in S : \A y \in S : x <= y
Range(s) == {s[i] : i \in 1..Len(s)}

-------------------------------------------------------------------------------
\* Snapshots of PostgreSQL: transaction ids from max on have not ended, nor have those that run.

None == [max |-> 0, run |-> {}]
InProgress(t) == t.st \in {"open", "prepared"} /\ t.xid # 0
Snapshot == [max |-> pg.done + 1, run |-> {pg.tx[t].xid : t \in {u \in Txs : InProgress(pg.tx[u]) /\ pg.tx[u].xid <= pg.done}}]
Xmin(s) == Min(s.run \cup {s.max})
Ended(x, s) == x < s.max /\ (x \notin s.run \/ Wrong("running transactions count as ended"))

Init ==
    /\ pg = [next |-> 1, done |-> 0, logged |-> 0, id |-> 1, tx |-> [t \in Txs |-> [st |-> "new", xid |-> 0, id |-> 0]],
             row |-> [n |-> 0, base |-> [max |-> 1, run |-> {}], window |-> None, last |-> 0, highest |-> 0]]
    /\ disk = pg
    /\ relay = [pc |-> "load", pos |-> pg.row, snap |-> None, batch |-> <<>>]
    /\ kafka = <<>>
    /\ ghost = [before |-> [t \in Txs |-> {}], committed |-> {}]
    /\ used = [crashes |-> 0, restarts |-> 0, prepared |-> 0]

-------------------------------------------------------------------------------
\* Transactions that record events.

TakeXid(t) ==
    /\ pg.tx[t].st \in {"new", "open"} /\ pg.tx[t].xid = 0
    /\ pg' = [pg EXCEPT !.next = @ + 1, !.tx[t].st = "open", !.tx[t].xid = pg.next]
    /\ UNCHANGED <<disk, relay, kafka, ghost, used>>
\* The transaction may have changed its aggregate just before: it sees what is committed by now.
DrawId(t) ==
    /\ pg.tx[t].st \in {"new", "open"} /\ pg.tx[t].id = 0
    /\ pg' = [pg EXCEPT !.id = @ + 1, !.tx[t].st = "open", !.tx[t].id = pg.id]
    /\ ghost' = [ghost EXCEPT !.before[t] = {u \in Txs : pg.tx[u].st = "committed"}]
    /\ UNCHANGED <<disk, relay, kafka, used>>

HasRow(t) == pg.tx[t].xid # 0 /\ pg.tx[t].id # 0
Max(x, y) == IF x > y THEN x ELSE y
Finish(t, st) == [pg EXCEPT !.tx[t].st = st, !.done = Max(@, pg.tx[t].xid), !.logged = Max(@, pg.tx[t].xid)]
\* PREPARE TRANSACTION flushes the WAL.
Prepare(t) ==
    /\ pg.tx[t].st = "open" /\ HasRow(t) /\ used.prepared < MaxPrepared
    /\ used' = [used EXCEPT !.prepared = @ + 1]
    /\ pg' = [pg EXCEPT !.tx[t].st = "prepared", !.logged = Max(@, pg.tx[t].xid)]
    /\ disk' = pg'
    /\ UNCHANGED <<relay, kafka, ghost>>
CommitAs(t, flushed) ==
    /\ pg.tx[t].st \in {"open", "prepared"} /\ HasRow(t)
    /\ pg' = Finish(t, "committed")
    /\ disk' = IF flushed THEN pg' ELSE disk
    /\ ghost' = [ghost EXCEPT !.committed = @ \cup {t}]
    /\ UNCHANGED <<relay, kafka, used>>
Commit(t) == HasRow(t) /\ CommitAs(t, TRUE)
CommitAsync(t) == Async /\ CommitAs(t, FALSE)
RollBack(t) ==
    /\ pg.tx[t].st \in {"open", "prepared"}
    /\ pg' = IF pg.tx[t].xid = 0 THEN [pg EXCEPT !.tx[t].st = "rolled back"] ELSE Finish(t, "rolled back")
    /\ UNCHANGED <<disk, relay, kafka, ghost, used>>

\* PostgreSQL flushes its WAL at any time.
Flush ==
    /\ used.crashes < MaxCrashes /\ disk # pg
    /\ disk' = pg
    /\ UNCHANGED <<pg, relay, kafka, ghost, used>>
\* The statement of the relay that was under way gets no answer. The row may be kept elsewhere by mistake.
Crash ==
    /\ used.crashes < MaxCrashes
    /\ used' = [used EXCEPT !.crashes = @ + 1]
    /\ LET kept(t) == IF disk.tx[t].st \in {"committed", "rolled back", "prepared"} THEN disk.tx[t]
                      ELSE IF pg.tx[t].st = "new" THEN pg.tx[t] ELSE [st |-> "lost", xid |-> 0, id |-> 0]
       IN pg' = [disk EXCEPT !.next = disk.logged + 1, !.done = disk.logged, !.tx = [t \in Txs |-> kept(t)],
                             !.row = IF Wrong("the position is kept outside of PostgreSQL") THEN pg.row ELSE @]
    /\ disk' = pg'
    /\ relay' = [relay EXCEPT !.pc = IF @ = "announce" THEN "run" ELSE @, !.snap = None]
    /\ UNCHANGED <<kafka, ghost>>

-------------------------------------------------------------------------------
\* Cursors. Those of others read other events, in another order.

IdCursor == Wrong("cursor: id") \/ Wrong("cursor: id, below xmin")
XidCursor == Wrong("cursor: (xid, id), below xmin")
ByXmin == Wrong("cursor: window up to xmin")
Rank(t) == IF XidCursor THEN 100 * pg.tx[t].xid + pg.tx[t].id ELSE pg.tx[t].id
Readable(t) == pg.tx[t].st = "committed" \/ (pg.tx[t].st = "prepared" /\ Wrong("prepared rows are read"))
\* The event is in the window of a position, and has not been attempted.
InWindow(t, p) ==
    LET x == pg.tx[t].xid
    IN /\ Readable(t)
       /\ CASE Wrong("cursor: id") -> Ended(x, p.window) /\ Rank(t) > p.highest
            [] Wrong("cursor: id, below xmin") \/ XidCursor -> x < Xmin(p.window) /\ Rank(t) > p.highest
            [] ByXmin -> x >= Xmin(p.base) /\ x < Xmin(p.window) /\ Rank(t) > p.last
            [] OTHER -> (Ended(x, p.window) \/ Wrong("prepared rows are read")) /\ ~Ended(x, p.base) /\ Rank(t) > p.last
\* The position will never come to the event again.
Passed(t, p) ==
    LET x == pg.tx[t].xid
    IN CASE IdCursor \/ XidCursor -> Rank(t) <= p.highest
         [] ByXmin -> x < Xmin(p.base) \/ (p.window # None /\ x < Xmin(p.window) /\ Rank(t) <= p.last)
         [] OTHER -> Ended(x, p.base) \/ (p.window # None /\ Ended(x, p.window) /\ Rank(t) <= p.last)
RECURSIVE Sorted(_)
Sorted(S) == IF S = {} THEN <<>> ELSE LET t == CHOOSE u \in S : \A v \in S : Rank(u) <= Rank(v) IN <<t>> \o Sorted(S \ {t})

-------------------------------------------------------------------------------
\* The relay.

\* The newest row of outbox_cursor is the one that the relay knows.
Proven == pg.row.n = relay.pos.n \/ Wrong("no proof of the row")
Drained == relay.batch = <<>> /\ (relay.pos.window = None \/ {t \in Txs : InWindow(t, relay.pos)} = {})
\* A row is written by a transaction with an id of its own, without a flush.
Write(p) == pg' = [pg EXCEPT !.next = @ + 1, !.done = pg.next, !.logged = pg.next, !.row = [p EXCEPT !.n = pg.row.n + 1]]

Load ==
    /\ relay.pc = "load"
    /\ relay' = [relay EXCEPT !.pc = "run", !.pos = pg.row]
    /\ UNCHANGED <<pg, disk, kafka, ghost, used>>
\* The statement that announces the next window: what its snapshot finds.
Next == [relay.pos EXCEPT !.base = IF relay.pos.window = None THEN @ ELSE relay.pos.window, !.window = Snapshot, !.last = 0]
Poll ==
    /\ relay.pc = "run" /\ Proven /\ Drained
    /\ LET found == {t \in Txs : InWindow(t, Next)} # {}
       IN CASE found /\ Wrong("a window in memory alone") -> relay' = [relay EXCEPT !.pos = Next]
            [] found \/ relay.pos.window # None ->
                   relay' = [relay EXCEPT !.pc = "announce", !.snap = IF found THEN Snapshot ELSE None]
            [] OTHER -> Wrong("a position in memory alone") /\ relay' = [relay EXCEPT !.pos.base = Snapshot]
    /\ UNCHANGED <<pg, disk, kafka, ghost, used>>
\* Its row is committed. The window is used from now on.
Announce ==
    /\ relay.pc = "announce"
    /\ LET p == [Next EXCEPT !.window = relay.snap, !.last = IF relay.snap = None THEN relay.pos.last ELSE 0]
       IN Write(p) /\ relay' = [relay EXCEPT !.pc = "run", !.pos = [p EXCEPT !.n = pg.row.n + 1], !.snap = None]
    /\ UNCHANGED <<disk, kafka, ghost, used>>
Fetch ==
    /\ relay.pc = "run" /\ Proven /\ relay.batch = <<>> /\ ~Drained
    /\ relay' = [relay EXCEPT !.batch = Sorted({t \in Txs : InWindow(t, relay.pos)})]
    /\ UNCHANGED <<pg, disk, kafka, ghost, used>>
\* What was fetched is sent without another look at PostgreSQL, also after it has crashed.
Send ==
    /\ relay.pc = "run" /\ relay.batch # <<>>
    /\ LET t == Head(relay.batch)
           r == IF pg.tx[t].id = 0 THEN relay.pos.last ELSE Rank(t)
       IN /\ kafka' = IF t \in Range(kafka) THEN kafka ELSE Append(kafka, t)
          /\ relay' = [relay EXCEPT !.batch = Tail(@), !.pos.last = r, !.pos.highest = Max(@, r)]
    /\ UNCHANGED <<pg, disk, ghost, used>>
Move ==
    /\ relay.pc = "run" /\ Proven /\ relay.pos # pg.row /\ relay.pos.last # pg.row.last /\ relay.pos.window # None
    /\ Write(relay.pos)
    /\ relay' = [relay EXCEPT !.pos.n = pg.row.n + 1]
    /\ UNCHANGED <<disk, kafka, ghost, used>>
Stale ==
    /\ relay.pc = "run" /\ ~Proven
    /\ relay' = [relay EXCEPT !.pc = "load", !.batch = <<>>]
    /\ UNCHANGED <<pg, disk, kafka, ghost, used>>
\* The relay is killed, and another process goes on.
Restart ==
    /\ relay.pc # "load" /\ used.restarts < MaxRestarts
    /\ used' = [used EXCEPT !.restarts = @ + 1]
    /\ relay' = [pc |-> "load", pos |-> pg.row, snap |-> None, batch |-> <<>>]
    /\ UNCHANGED <<pg, disk, kafka, ghost>>

Relay == Load \/ Poll \/ Announce \/ Fetch \/ Send \/ Move \/ Stale
Others == \E t \in Txs : TakeXid(t) \/ DrawId(t) \/ Prepare(t) \/ Commit(t) \/ CommitAsync(t) \/ RollBack(t)
Spec == Init /\ [][Relay \/ Others \/ Flush \/ Crash \/ Restart]_vars

-------------------------------------------------------------------------------
\* What must hold.

\* What the newest row passes has been sent.
NothingSkipped == \A t \in Txs : pg.tx[t].st = "committed" /\ Passed(t, pg.row) => t \in Range(kafka)
\* What was sent was committed.
NoPhantom == Range(kafka) \subseteq ghost.committed
\* An event arrives after those that were committed before it drew its id.
OrderPerKey == \A i \in 1..Len(kafka) : ghost.before[kafka[i]] \subseteq {kafka[j] : j \in 1..(i - 1)}

\* While faults are finite, what is committed is sent, also beside a transaction that stays open or prepared for ever.
Live == Spec /\ WF_vars(Relay)
EverythingSent == <>[](\A t \in Txs : pg.tx[t].st = "committed" => t \in Range(kafka))

Alike == Permutations(Txs)
===============================================================================
The words of a counterexample:
  TakeXid: transaction {pg.tx#} takes transaction id {pg.tx.xid}
  DrawId: transaction {pg.tx#} inserts its event, with id {pg.tx.id}
  Prepare: {pg.tx#} is prepared
  Commit: {pg.tx#} commits
  CommitAsync: {pg.tx#} commits, its WAL is not flushed
  RollBack: {pg.tx#} is rolled back
  Flush: PostgreSQL flushes its WAL
  Crash: PostgreSQL crashes, the next transaction id is {pg.next} again, the next id {pg.id}
  Load: the relay loads row {relay.pos.n} of outbox_cursor
  Poll: the relay polls under the present snapshot
  Announce: row {pg.row.n} of outbox_cursor is committed, with transaction id {pg.done}: base up to {pg.row.base.max}, window up to {pg.row.window.max} (0: none)
  Fetch: the relay fetches the events of {relay.batch}
  Send: the relay sends one event; it is at {relay.pos.last}
  Move: the relay moves the cursor to {pg.row.last}, row {pg.row.n}
  Stale: the relay finds that its row of outbox_cursor is gone
  Restart: the relay is killed, and another process goes on
  NothingSkipped: an event is committed, was never sent, and the cursor has passed it
  NoPhantom: an event is sent whose transaction has not committed
  OrderPerKey: an event is sent before an earlier one of its key
  EverythingSent: an event is committed and never sent
