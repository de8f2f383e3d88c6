#!/usr/bin/env python3
"""Prints the counterexample that TLC has found, in words:

    tools/spec_words.py MODULE.tla CONFIGURATION.cfg <TLC's output

The words are below the end of the module: a line "  Name: text" for each step and each property. In a text, {var} stands
for a variable after the step, {var.field} for a field of it, {-var.field} for the field before. Of a function, sequence
or set only those entries count that the step has changed: {var#} are their keys (a process, a transaction), {var.} the
entries, {var.field} their fields. A line '  "value": text' names a value.
"""
import re
import sys

VALUES = {}
TOKEN = re.compile(r'<<|>>|\|->|:>|@@|"[^"]*"|[\w\-]+|[\[\]{}(),]')


class Parser:
    """Reads a value as TLC prints it: records and functions become dicts, sequences lists, sets tuples."""

    def __init__(self, text):
        self.tokens, self.at = TOKEN.findall(text), 0

    def next(self):
        self.at += 1
        return self.tokens[self.at - 1]

    def list(self, end, item):
        items = []
        while self.tokens[self.at] != end:
            items.append(item())
            if self.tokens[self.at] in (",", "@@"):
                self.at += 1
        self.at += 1
        return items

    def entry(self):
        key = self.value()
        self.at += 1
        return key, self.value()

    def value(self):
        token = self.next()
        if token in "[(":
            return dict(self.list("]" if token == "[" else ")", self.entry))
        if token == "{":
            return tuple(self.list("}", self.value))
        if token == "<<":
            return self.list(">>", self.value)
        return token.strip('"')


def read(text):
    """Returns the steps of a counterexample: the name of each, and the variables after it."""
    steps = []
    for head, body in re.findall(r"^(State \d+: .*|Back to state.*)\n((?:.*\S.*\n)*)", text, re.M):
        name = re.sub(r"^State \d+: <?|^Back.*", "", head).split(" ")[0].rstrip(">")
        back = re.match(r"Back to state:? ?(\d+)?", head)
        parts = re.split(r"^(?:/\\ )?(\w+) = ", body, flags=re.M)[1:]
        steps.append((f"back {back[1]}" if back else name, {v: Parser(t).value() for v, t in zip(parts[::2], parts[1::2])}))
    return steps


def changed(was, now):
    """Returns the entries of a function, sequence or set that differ: key, before, after."""
    if isinstance(now, tuple):
        return [(e, None, e) for e in now if e not in was] or [(e, e, None) for e in was if e not in now]
    was, now = (v if isinstance(v, dict) else dict(enumerate(v, 1)) for v in (was, now))
    return [(k, was.get(k), now.get(k)) for k in {**was, **now} if was.get(k) != now.get(k)]


def shown(value):
    if isinstance(value, dict):
        return ", ".join(f"{k} {shown(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value)) or "none"
    return VALUES.get(value, value)


def fill(text, old, new):
    """Fills in what a step has changed."""

    def one(match):
        pairs = [(old, new)]
        for field in match[2].split("."):
            if field and all(isinstance(n, dict) and field in n for _, n in pairs):
                pairs = [(w and w.get(field), n[field]) for w, n in pairs]
                continue
            pairs = [(w, n) for pair in pairs for _, w, n in changed(*pair)]
            if field:
                pairs = [(w and w[field], n and n[field]) for w, n in pairs]
        if match[3]:
            return shown([str(key) for pair in pairs for key, _, _ in changed(*pair)])
        return ", ".join(shown(w if match[1] or n is None else n) for w, n in pairs)

    return re.sub(r"\{(-?)([\w.]+)(#?)\}", one, text)


def main():
    module = open(sys.argv[1]).read()
    table = re.split(r"^={10,}$", module, flags=re.M)[1]
    words = dict(re.findall(r"^  (\w+): (.*)$", table, re.M))
    VALUES.update(re.findall(r'^  "(\w+)": (.*)$', table, re.M))
    output = sys.stdin.read()
    found = re.search(r"Invariant (\w+) is violated", output)
    if not found:
        found = re.search(r"^PROPERTY (\w+)", open(sys.argv[2]).read(), re.M)
    print(f"        {words[found[1]]}:")
    steps = read(output)
    for i, (name, state) in enumerate(steps[1:], 1):
        if name == "Stuttering":
            text = "and nothing happens any more"
        elif name.startswith("back"):
            text = f"and again from step {name[5:]} on"
        else:
            text = fill(words[name], steps[i - 1][1], state)
        print(f"      {i:3} {text}")


main()
