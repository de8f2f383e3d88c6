-------------------------------- MODULE Outage --------------------------------
(* An outage of what the handlers of an action need, or a bad event? The first *)
(* failure of an event counts. Each further one counts only if another event   *)
(* of the action has succeeded, by a call that began after the last failure    *)
(* that counts, and if its process knew that before this call began.           *)
(*                                                                             *)
(* What is abstracted. A process knows a success at once (its own), later (it  *)
(* is saved), or never (a crash). There are no waits, no breaker, and no end   *)
(* of the patience (MaxOutage). A call takes any time. It may fail if there is *)
(* an outage at some moment of it, and succeed if there is none at some moment *)
(* of it.                                                                      *)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
    Events,
    Bad,          \* events that fail always
    Stream,       \* another healthy event follows each that has succeeded
    MaxAttempts, MaxOutages,
    MaxBlips,     \* failures of healthy events for another reason
    Mistakes      \* seeded mistakes, {} for the design

Wrong(m) == m \in Mistakes

VARIABLES
    down,     \* what the handlers need is away
    st,       \* events: open, calling, done, dead
    att,      \* attempts that count
    witness,  \* events of which another one has succeeded since their last failure that counts
    call,     \* calls under way: seen (a witness was known when it began), hurt (an outage at some moment), fine (none
              \* at some moment), after (events whose last failure was before it), beside (calls that were under way),
              \* late (one of these has succeeded)
    outages, blips
vars == <<down, st, att, witness, call, outages, blips>>

NoCall == [seen |-> FALSE, hurt |-> FALSE, fine |-> FALSE, after |-> {}, beside |-> {}, late |-> FALSE]
Init ==
    /\ down = FALSE
    /\ st = [e \in Events |-> "open"]
    /\ att = [e \in Events |-> 0]
    /\ witness = {}
    /\ call = [e \in Events |-> NoCall]
    /\ outages = 0
    /\ blips = [e \in Events |-> 0]

Calling == {e \in Events : st[e] = "calling"}
RECURSIVE Sum(_)
Sum(S) == IF S = {} THEN 0 ELSE LET x == CHOOSE x \in S : TRUE IN blips[x] + Sum(S \ {x})

Breaks ==
    /\ ~down /\ outages < MaxOutages
    /\ down' = TRUE /\ outages' = outages + 1
    /\ call' = [e \in Events |-> IF e \in Calling THEN [call[e] EXCEPT !.hurt = TRUE] ELSE call[e]]
    /\ UNCHANGED <<st, att, witness, blips>>
Works ==
    /\ down /\ down' = FALSE
    /\ call' = [e \in Events |-> IF e \in Calling THEN [call[e] EXCEPT !.fine = TRUE] ELSE call[e]]
    /\ UNCHANGED <<st, att, witness, outages, blips>>

Begin(e) ==
    /\ st[e] = "open"
    /\ st' = [st EXCEPT ![e] = "calling"]
    /\ \E known \in {FALSE, (e \in witness)} :
           call' = [call EXCEPT ![e] = [seen |-> known, hurt |-> down, fine |-> ~down,
                                        after |-> Events, beside |-> Calling, late |-> FALSE]]
    /\ UNCHANGED <<down, att, witness, outages, blips>>

Succeed(e) ==
    /\ st[e] = "calling" /\ e \notin Bad /\ call[e].fine
    /\ st' = [st EXCEPT ![e] = IF Stream THEN "open" ELSE "done"]
    /\ att' = IF Stream THEN [att EXCEPT ![e] = 0] ELSE att
    /\ LET others == (IF Wrong("a success that began before the failure") THEN Events ELSE call[e].after) \ {e}
       IN /\ witness' = (witness \cup others) \ {e}
          /\ call' = [f \in Events |-> IF f = e THEN NoCall
                                       ELSE IF f \in others /\ e \in call[f].beside THEN [call[f] EXCEPT !.late = TRUE] ELSE call[f]]
    /\ UNCHANGED <<down, outages, blips>>

Counts(e) ==
    \/ att[e] = 0
    \/ call[e].seen
    \/ Wrong("no witness")
    \/ Wrong("a witness for the last attempt only") /\ att[e] + 1 < MaxAttempts
    \/ Wrong("a success that ends during the call") /\ call[e].late
Forgets(e) == ~(Wrong("a witness for the last attempt only") /\ att[e] > 0)

Fail(e) ==
    /\ st[e] = "calling"
    /\ e \in Bad \/ call[e].hurt \/ Sum(Events) < MaxBlips
    /\ blips' = IF e \in Bad \/ call[e].hurt THEN blips ELSE [blips EXCEPT ![e] = @ + 1]
    /\ IF Counts(e)
       THEN /\ att' = [att EXCEPT ![e] = @ + 1]
            /\ st' = [st EXCEPT ![e] = IF att[e] + 1 >= MaxAttempts THEN "dead" ELSE "open"]
            /\ witness' = IF Forgets(e) THEN witness \ {e} ELSE witness
            /\ call' = [f \in Events |-> IF f = e THEN NoCall ELSE IF Forgets(e) THEN [call[f] EXCEPT !.after = @ \ {e}] ELSE call[f]]
       ELSE /\ st' = [st EXCEPT ![e] = "open"]
            /\ witness' = IF Wrong("a failure that does not count forgets the witness") THEN witness \ {e} ELSE witness
            /\ call' = [call EXCEPT ![e] = NoCall]
            /\ UNCHANGED att
    /\ UNCHANGED <<down, outages>>

Next == Breaks \/ Works \/ \E e \in Events : Begin(e) \/ Succeed(e) \/ Fail(e)
Spec == Init /\ [][Next]_vars

\* An outage costs an event at most one attempt.
OneAttemptEach == \A e \in Events \ Bad : att[e] <= blips[e] + outages
\* So nothing healthy is DEAD through outages that are fewer than its attempts.
NoneDeadThroughOutage == \A e \in Events \ Bad : st[e] = "dead" => blips[e] + outages >= MaxAttempts

\* A bad event becomes DEAD while others succeed: outages end, calls end, and a success is known after a while.
Live ==
    /\ Spec /\ WF_vars(Works)
    /\ \A e \in Events : WF_vars(Begin(e)) /\ WF_vars(Succeed(e) \/ Fail(e)) /\ SF_vars(Begin(e) /\ call'[e].seen)
BadEnds == \A e \in Bad : <>(st[e] = "dead")

\* Healthy events are alike. This holds for invariants only.
Alike == Permutations(Events \ Bad)
===============================================================================
The words of a counterexample:
  Breaks: an outage begins
  Works: the outage ends
  Begin: the handler is called for {st#}; another success is known: {call.seen}
  Succeed: the call for {st#} succeeds
  Fail: the call for {st#} fails; attempts that count: {att}
  OneAttemptEach: an outage costs an event two attempts
  NoneDeadThroughOutage: a healthy event is DEAD through outages alone
  BadEnds: a bad event never becomes DEAD
  "TRUE": yes
  "FALSE": no
