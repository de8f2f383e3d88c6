--------------------------------- MODULE Gaps ---------------------------------
(* A new action in a group that reads Kafka, while members of two releases     *)
(* come and go: registered handlers, committed offsets, and the gaps           *)
(* (consumer_gap) of what members without the action have passed.              *)
(*                                                                             *)
(* What is abstracted. One partition, one action b beside the old one a. What  *)
(* is handled has a note, so repeats are harmless. A member whose partition    *)
(* has gone to another one may not notice it: it goes on, but Kafka does not   *)
(* take its offsets.                                                           *)
EXTENDS Integers, FiniteSets

CONSTANTS
    Members,
    New,         \* those of the release that has action b
    Records,     \* offsets 1..Records
    MaxMoves, MaxCrashes,
    Mistakes     \* seeded mistakes, {} for the design

Wrong(m) == m \in Mistakes

VARIABLES
    kafka,   \* committed offset (the next one to read), and the member that may commit
    reg,     \* action b is registered
    gap,     \* its gap: where it begins (0: there is none), and its version
    due,     \* the committed offset when b was registered: from there on it misses nothing
    done,    \* notes: pairs of an offset and an action
    mem,     \* members: step, committed offset at the start, next offset, position and version of the gap that is read
    used
vars == <<kafka, reg, gap, due, done, mem, used>>

None == "none"
NoMember == [pc |-> "out", at |-> 0, lacks |-> FALSE, pos |-> 0, gap |-> 0, version |-> 0, proof |-> FALSE]
Init ==
    /\ kafka = [off |-> 1, owner |-> None]
    /\ reg = FALSE /\ due = 0 /\ done = {}
    /\ gap = [from |-> 0, version |-> 0]
    /\ mem = [m \in Members |-> NoMember]
    /\ used = [moves |-> 0, crashes |-> 0]

HasB(m) == m \in New
Min(x, y) == IF x < y THEN x ELSE y

\* A new member reads the committed offset, and registers its action with a gap from there.
Prepare(m) ==
    /\ mem[m].pc = "out" /\ HasB(m) /\ ~reg
    /\ mem' = [mem EXCEPT ![m].pc = "prepared", ![m].at = kafka.off]
    /\ UNCHANGED <<kafka, reg, gap, due, done, used>>
Register(m) ==
    /\ mem[m].pc = "prepared"
    /\ mem' = [mem EXCEPT ![m] = NoMember]
    /\ reg' = TRUE
    /\ IF reg THEN UNCHANGED <<gap, due>> ELSE gap' = [gap EXCEPT !.from = mem[m].at, !.version = @ + 1] /\ due' = mem[m].at
    /\ UNCHANGED <<kafka, done, used>>

\* A member gets the partition: committed offset, then the registered handlers, then the gaps.
Assign(m) ==
    /\ mem[m].pc = "out" /\ (HasB(m) => reg) /\ kafka.owner # m
    /\ kafka.owner # None => used.moves < MaxMoves
    /\ used' = IF kafka.owner # None THEN [used EXCEPT !.moves = @ + 1] ELSE used
    /\ kafka' = [kafka EXCEPT !.owner = m]
    /\ mem' = [mem EXCEPT ![m] = [NoMember EXCEPT !.pc = "assigned", !.at = kafka.off]]
    /\ UNCHANGED <<reg, gap, due, done>>
Learn(m) ==
    /\ mem[m].pc = "assigned"
    /\ mem' = [mem EXCEPT ![m].pc = "learned", ![m].lacks = reg /\ ~HasB(m)]
    /\ UNCHANGED <<kafka, reg, gap, due, done, used>>
FindGaps(m) ==
    /\ mem[m].pc = "learned"
    /\ LET at == mem[m].at
           mine == HasB(m) /\ gap.from # 0
       IN /\ gap' = CASE mem[m].lacks /\ ~Wrong("offsets passed without a gap") ->
                             [from |-> IF gap.from = 0 THEN at ELSE Min(gap.from, at), version |-> gap.version + 1]
                      [] OTHER -> gap
          /\ mem' = [mem EXCEPT ![m].pc = "reading", ![m].pos = at, ![m].gap = IF mine THEN gap.from ELSE 0,
                                ![m].version = gap.version]
    /\ UNCHANGED <<kafka, reg, due, done, used>>

\* What others have passed is read first, for b alone.
ReadGap(m) ==
    /\ mem[m].pc = "reading" /\ mem[m].gap # 0 /\ mem[m].gap < mem[m].at
    /\ done' = done \cup {<<mem[m].gap, "b">>}
    /\ mem' = [mem EXCEPT ![m].gap = @ + 1]
    /\ UNCHANGED <<kafka, reg, gap, due, used>>
\* Kafka takes an offset of this member after it has read the version: the partition was with it then. Members that have
\* had the partition before commit nothing any more, and those that get it later change the version.
Prove(m) ==
    /\ mem[m].pc = "reading" /\ mem[m].gap # 0 /\ ~mem[m].proof /\ kafka.owner = m
    /\ mem' = [mem EXCEPT ![m].proof = TRUE]
    /\ UNCHANGED <<kafka, reg, gap, due, done, used>>
SameGap(m) == gap.from # 0 /\ (gap.version = mem[m].version \/ Wrong("a gap is passed without its version"))
SaveGap(m) ==
    /\ mem[m].pc = "reading" /\ mem[m].gap # 0
    /\ mem[m].gap >= mem[m].at => mem[m].proof \/ Wrong("a gap is removed without a proof of the partition")
    /\ gap' = IF ~SameGap(m) THEN gap
              ELSE [gap EXCEPT !.from = IF mem[m].gap < mem[m].at THEN mem[m].gap ELSE IF Wrong("a gap is never removed") THEN @ ELSE 0]
    /\ mem' = [mem EXCEPT ![m].gap = IF @ >= mem[m].at THEN 0 ELSE @]
    /\ UNCHANGED <<kafka, reg, due, done, used>>

Read(m) ==
    /\ mem[m].pc = "reading" /\ mem[m].gap = 0 /\ mem[m].pos <= Records
    /\ done' = done \cup {<<mem[m].pos, x>> : x \in IF HasB(m) THEN {"a", "b"} ELSE {"a"}}
    /\ mem' = [mem EXCEPT ![m].pos = @ + 1]
    /\ UNCHANGED <<kafka, reg, gap, due, used>>
Commit(m) ==
    /\ mem[m].pc = "reading" /\ mem[m].gap = 0 /\ kafka.owner = m /\ mem[m].pos > kafka.off
    /\ kafka' = [kafka EXCEPT !.off = mem[m].pos]
    /\ UNCHANGED <<reg, gap, due, done, mem, used>>

\* A member notices that its partition is gone.
Revoked(m) ==
    /\ mem[m].pc \in {"assigned", "learned", "reading"} /\ kafka.owner # m
    /\ mem' = [mem EXCEPT ![m] = NoMember]
    /\ UNCHANGED <<kafka, reg, gap, due, done, used>>
Crash(m) ==
    /\ mem[m].pc # "out" /\ used.crashes < MaxCrashes
    /\ used' = [used EXCEPT !.crashes = @ + 1]
    /\ mem' = [mem EXCEPT ![m] = NoMember]
    /\ kafka' = [kafka EXCEPT !.owner = IF @ = m THEN None ELSE @]
    /\ UNCHANGED <<reg, gap, due, done>>

\* What a member does while it works.
Member(m) == Prepare(m) \/ Register(m) \/ Learn(m) \/ FindGaps(m) \/ ReadGap(m) \/ Prove(m) \/ SaveGap(m) \/ Read(m) \/ Commit(m) \/ Revoked(m)
Spec == Init /\ [][\E m \in Members : Member(m) \/ Assign(m) \/ Crash(m)]_vars

\* What is passed is handled by the old action, and by the new one or in its gap.
NothingMissed ==
    \A o \in 1..(kafka.off - 1) :
        /\ <<o, "a">> \in done
        /\ reg /\ o >= due => <<o, "b">> \in done \/ (gap.from # 0 /\ gap.from <= o)

\* A member of the new release that keeps the partition handles everything for b, and removes the gap. A gap that an old
\* member extends after it has lost the partition stays until the partition is assigned again.
Live == Spec /\ \A m \in Members : WF_vars(Member(m))
Settled(m) ==
    /\ \A o \in due..Records : <<o, "b">> \in done
    /\ kafka.off = Records + 1
    /\ gap.from = 0 \/ gap.version # mem[m].version
GapCloses == \A m \in New : <>[](kafka.owner = m) => <>[]Settled(m)
===============================================================================
The words of a counterexample:
  Prepare: {mem#} reads the committed offset {mem.at}, to register action b
  Register: {mem#} registers action b; its gap begins at {gap.from}, version {gap.version}
  Assign: {mem#} gets the partition, at the committed offset {mem.at}
  Learn: {mem#} reads the registered handlers; it lacks one: {mem.lacks}
  FindGaps: {mem#} reads the gaps; now the gap begins at {gap.from}, version {gap.version}
  ReadGap: {mem#} handles an offset of the gap for b: {done.}
  Prove: Kafka takes an offset of {mem#}
  SaveGap: {mem#} saves how far it has read the gap: now it begins at {gap.from} (0: removed)
  Read: {mem#} handles a record: {done.}
  Commit: {kafka.owner} commits offset {kafka.off}
  Revoked: {mem#} notices that its partition is gone
  Crash: {mem#} is killed
  NothingMissed: the committed offset has passed a record that action b has not handled and no gap has
  GapCloses: a member keeps the partition, and a gap stays or a record is not handled
  "TRUE": yes
  "FALSE": no
