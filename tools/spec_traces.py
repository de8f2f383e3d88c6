#!/usr/bin/env python3
"""Makes a module of TLA+ from what a fault run has written, and says how far TLC has walked it:

    tools/spec_traces.py module DIRECTORY >LeaseTraceData.tla
    tools/spec_traces.py rejected DIRECTORY [STEP] <TLC's output

With a STEP, such a one must be among those at which TLC has stopped.

DIRECTORY has a file PID.jsonl of each process (package internal/trace), also of the test that disturbs them.
spec/traces/LeaseTrace.tla says what the steps mean.
"""
import glob
import json
import os
import re
import sys


def read(directory):
    """Returns the steps of each process, in their order. A step that was not ended has no end."""
    processes = {}
    for name in glob.glob(os.path.join(directory, "*.jsonl")):
        steps = {}
        for text in open(name):
            if not text.endswith("\n"):
                continue  # killed while it wrote
            line = json.loads(text)
            if "do" in line:
                steps[line["step"]] = {"do": line["do"], "goroutine": line["goroutine"], "b": line["at"], "e": None, "end": {}, **line["values"]}
            else:
                steps[line["step"]].update(e=line["at"], end=line["values"])
        processes[int(os.path.basename(name)[:-6])] = [steps[n] for n in sorted(steps)]
    return processes


ENDING = 500_000_000  # ns after which a session has ended that PostgreSQL was asked to end


class Run:
    """The units of a run: steps of the model that belong together, with the times between which they were done."""

    def __init__(self, processes):
        self.units, self.maybe = [], []  # of (b, e, chain that is preferred, steps)
        self.start = min(s["b"] for steps in processes.values() for s in steps)
        test = next(steps for steps in processes.values() if any(s["do"] == "end" for s in steps))
        self.end = next(s for s in test if s["do"] == "end")
        others = [pid for pid, steps in processes.items() if steps is not test]
        others.sort(key=lambda pid: processes[pid][0]["b"])
        self.names = {pid: f"p{i}" for i, pid in enumerate(others, 1)}
        self.last = {}  # when each process has written last
        for pid in others:
            self.process(pid, processes[pid])
        self.disturbances(test)

    def us(self, ns, up=False):
        return (ns - self.start + (999 if up else 0)) // 1000

    def add(self, at, b, e, *steps):
        b, e = self.us(b), self.us(e, True)
        self.units.append((b, max(e, b + 1), at, steps))

    def perhaps(self, b, **step):
        self.maybe.append({**step, "b": self.us(b), "e": 2**31 - 1})

    def process(self, pid, steps):
        p, locked, delivering = self.names[pid], 0, {}
        for s in steps:
            self.last[pid] = max(self.last.get(pid, 0), s["b"], s["e"] or 0)
            at, end, ok, no = (pid, s["goroutine"]), s["end"], s["end"].get("ok"), s["end"].get("no")
            unknown = s["e"] is None or ok is False and not no
            known = {k: s[k] for k in ("epoch", "keep", "at") if k in s}
            if s["do"] == "lock":
                if ok:
                    locked = self.us(s["b"])
                    self.add(at, s["b"], s["e"], dict(do="lock", p=p))
            elif s["do"] == "take":
                if ok:
                    self.add(at, s["b"], s["e"], dict(do="take", p=p, epoch=end["epoch"], locked=locked))
                elif unknown:
                    self.perhaps(s["b"], do="take", p=p)
            elif s["do"] == "load":
                if ok:
                    self.add(at, s["b"], s["e"], dict(do="load", p=p, epoch=s["epoch"], at=end["at"], by=end["by"]))
            elif s["do"] in ("unlock", "notice", "stop", "late"):
                if s["e"] is not None:
                    b = s["b"] if s["do"] != "notice" else self.sure(steps, s)
                    self.add(at, b, s["e"], dict(do=s["do"], p=p, epoch=s.get("epoch", 0), id=s.get("id", 0), ok=s.get("accepted", False)))
            elif s["do"] == "claim":
                if unknown:
                    self.perhaps(s["b"], do="claim", p=p, **known)
                else:
                    self.add(at, s["b"], s["e"], dict(do="claim", p=p, ok=ok))
            elif s["do"] in ("renew", "release"):
                if ok:
                    self.add(at, s["b"], s["e"], dict(do=s["do"], p=p, claimed=end.get("claimed", False), **known))
                elif unknown:
                    self.perhaps(s["b"], do=s["do"], p=p, **known)
            elif s["do"] in ("move", "open"):
                move = dict(do="move", p=p, failed=set(s.get("failed", [])), **known)
                if ok and end.get("wrote", True):
                    self.add(at, s["b"], s["e"], move)
                elif unknown:
                    self.perhaps(s["b"], **move)
            elif s["do"] == "save":
                words = [r.split() for r in s["results"]]
                save = dict(do="save", p=p, sent={int(i) for i, w in words if w == "resolved"}, dead={int(i) for i, w in words if w == "dead"}, **known)
                if ok:
                    self.add(at, s["b"], s["e"], save)
                elif unknown:
                    self.perhaps(s["b"], **save)
            elif s["do"] == "deliver":
                delivering[s["goroutine"]] = s
                s["sends"] = []
            elif s["do"] == "send":
                if end.get("ids"):
                    delivering[s["goroutine"]]["sends"].append(s)
        for s in steps:
            if s["do"] == "deliver":
                self.delivery(p, (pid, s["goroutine"]), s)

    def sure(self, steps, notice):
        """Returns when a process last had a lock that it has lost: it looks before it renews its lease, and before it sends."""
        had = [s["b"] for s in steps if s["e"] and s["e"] < notice["e"] and (s["do"] == "renew" and s["keep"] or s["do"] == "send" and s["end"].get("ids"))]
        return max([notice["b"], *had])

    def delivery(self, p, at, s):
        """A delivery sends its events, in one send or several, and learns what has become of them."""
        ids, sends = s["ids"], s["sends"]
        outcomes = s["end"].get("outcomes", ["pending"] * len(ids))
        decided = (outcomes + ["pending"]).index("pending")
        part = "session" if s["patient"] else "retrier"
        if not sends:
            if decided and part == "session":
                self.add(at, s["b"], s["e"], dict(do="block", p=p, ids=ids[:decided]))
            return
        for i, send in enumerate(sends):
            check = dict(do="check", p=p, part=part, again=i > 0)
            self.add(at, send["b"], send["e"], check, *[dict(do="send", p=p, part=part, ids=ids[:decided] or ids)] * (i == 0))
        if s["e"] is None:
            return
        steps = []
        n = next((i for i, o in enumerate(outcomes) if o != "sent"), len(ids))
        if n:
            steps.append(dict(do="accept", p=p, part=part, n=n))
        if n < decided:
            if outcomes[n] == "unanswered":
                steps.append(dict(do="suspect", p=p, part=part, ids=[i for i in sends[-1]["end"]["ids"] if i in ids[n:decided]]))
            else:
                steps.append(dict(do="reject", p=p, part=part, id=ids[n]))
        if not decided:
            steps.append(dict(do="close", p=p, part=part))
        self.add(at, sends[-1]["e"], s["e"], *steps)

    def disturbances(self, test):
        for s in test:
            if s["do"] in ("kill", "exit"):
                b = max(s["b"], self.last.get(s["pid"], 0) + 1000)
                if s["pid"] in self.names:
                    self.add("test", b, max(b, s["e"]), dict(do="end", p=self.names[s["pid"]]))
            elif s["do"] in ("freeze", "thaw"):
                if s["pid"] in self.names:
                    self.add("test", s["b"], s["e"], dict(do=s["do"], p=self.names[s["pid"]]))
            elif s["do"] == "break":
                for pid in s["end"]["pids"]:
                    self.add("break", s["b"], s["e"] + ENDING, dict(do="break", p=self.names[pid]))

    def chains(self):
        """Returns chains of steps, each of which ends before the next one begins."""
        chains, ends, prefers, after = [], [], {}, {}
        for b, e, at, steps in sorted(self.units, key=lambda u: (u[0], u[1])):
            b = max(b, after.get(at, 0))  # of a goroutine, in its order
            e = max(e, b + 1)
            after[at] = e
            c = prefers.get(at)
            if c is None or ends[c] > b:
                c = next((i for i, end in enumerate(ends) if end <= b), None)
            if c is None:
                chains.append([])
                ends.append(0)
                c = len(chains) - 1
            prefers[at], ends[c] = c, e
            chains[c] += [{**s, "b": b, "e": e} for s in steps]
        return chains


def tla(v):
    if isinstance(v, bool):
        return "TRUE" if v else "FALSE"
    if isinstance(v, dict):
        return "[" + ", ".join(f"{k} |-> {tla(x)}" for k, x in v.items()) + "]"
    if isinstance(v, list):
        return "<<" + ", ".join(map(tla, v)) + ">>"
    if isinstance(v, set):
        return "{" + ", ".join(map(tla, sorted(v))) + "}"
    return f'"{v}"' if isinstance(v, str) else str(v)


def module(run):
    chains = run.chains()
    steps = [s for c in chains for s in c]
    epochs = max(s.get("epoch", 0) for s in steps) + sum(s["do"] == "take" for s in run.maybe)
    print("---- MODULE LeaseTraceData ----\nEXTENDS Integers")
    print("Chain == <<\n " + ",\n ".join("<<\n  " + ",\n  ".join(map(tla, c)) + ">>" for c in chains) + ">>")
    print("Maybe == <<\n  " + ",\n  ".join(map(tla, run.maybe)) + ">>")
    print("Arrived ==", tla(run.end["arrived"]))
    print("Lasts ==", run.end["lease"])
    print("End ==", max(s["e"] for s in steps))
    print("TraceProcs ==", tla(set(run.names.values())))
    print("TraceEvents ==", run.end["events"])
    print("TraceEpochs ==", epochs + 1)
    print("====")
    print(f"{len(steps)} steps and {len(run.maybe)} without an answer, {len(run.names)} processes, {run.end['events']} events, "
          f"{max(s.get('epoch', 0) for s in steps)} epochs", file=sys.stderr)


WORDS = {
    "take": "takes the lease with epoch {epoch}", "load": "loads the cursor: {at} events are passed", "lock": "gets the session lock",
    "unlock": "gives the session lock back", "break": "loses the session that has the lock", "renew": "renews epoch {epoch}; it has its lock: {keep}",
    "notice": "notices that it has lost its lock", "check": "checks its lease ({part})", "send": "sends {ids} ({part})",
    "accept": "learns that Kafka has accepted the first {n} ({part})", "reject": "learns that event {id} did not get through ({part})",
    "suspect": "gets no answer to {ids}, and parks them ({part})", "late": "gets the late answer to event {id}; it was accepted: {ok}",
    "close": "gets no answer, and closes its client ({part})", "block": "does not send {ids}, which are behind a parked event",
    "move": "moves the cursor behind event {at}, under epoch {epoch}; failed: {failed}",
    "save": "saves results under epoch {epoch}; sent: {sent}, dead: {dead}",
    "claim": "says in outbox_lease that it has the lock; it does so: {ok}", "release": "releases epoch {epoch}",
    "stop": "finds that it has lost its lease", "end": "ends, or is killed", "freeze": "stands still", "thaw": "goes on",
}


def told(run, s):
    pids = {p: pid for pid, p in run.names.items()}
    text = re.sub(r"\{(\w+)\}", lambda m: str(s[m[1]]).replace("set()", "none"), WORDS[s["do"]])
    return f"{s['b'] / 1e6:10.6f} to {s['e'] / 1e6:10.6f} s: process {pids[s['p']]} {text}"


def rejected(run, output):
    """Prints how far the longest walk has come. Returns what could not be done next."""
    n, place, rest = re.findall(r'^<<\s*"walked",\s*(\d+),\s*<<([\d,\s]*)>>(.*?)>>$', output, re.M | re.S)[-1]
    chains, place = run.chains(), [int(i) for i in place.split(",")]
    walked = sorted((s for c, i in zip(chains, place) for s in c[:i - 1]), key=lambda s: s["e"])
    fronts = [c[i - 1] for c, i in zip(chains, place) if i <= len(c)]
    print(f"The longest walk has {n} of {sum(map(len, chains))} steps. Its last ones:")
    for s in walked[-10:]:
        print("  " + told(run, s))
    print("The model allows none of these next:" if fronts else "The topic has other first arrivals than Kafka in the model.")
    bound = min((s["e"] for s in fronts), default=0)
    fronts = [s for s in sorted(fronts, key=lambda s: s["b"]) if s["b"] < bound]
    for s in fronts:
        print("  " + told(run, s))
    print("Lease, cursor, lock and expired epochs there:", re.sub(r"\s+", " ", rest.strip(", \n")))
    return [s["do"] for s in fronts]


if __name__ == "__main__":
    recorded = Run(read(sys.argv[2]))
    if sys.argv[1] == "module":
        module(recorded)
    else:
        stuck = rejected(recorded, sys.stdin.read())
        sys.exit(0 if len(sys.argv) < 4 or sys.argv[3] in stuck else f"expected: {sys.argv[3]}")
