package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/outboxgo/outbox/outboxops"
)

// auditFlags say who acts, and why.
type auditFlags struct{ operator, reason string }

func (a *auditFlags) define(fs *flag.FlagSet) {
	fs.StringVar(&a.reason, "reason", "", "`TEXT` why; required, and kept in outbox_audit")
	fs.StringVar(&a.operator, "operator", "", "`NAME` who does it; else the user of the system")
}

func (a *auditFlags) info(e *env) (outboxops.AuditInfo, error) {
	if strings.TrimSpace(a.reason) == "" {
		return outboxops.AuditInfo{}, usagef("--reason is missing: it is kept with what was done")
	}
	who := cmp.Or(a.operator, e.user())
	if who == "" {
		return outboxops.AuditInfo{}, usagef("--operator is missing, and the system does not know who you are")
	}
	return outboxops.AuditInfo{Operator: who, Reason: a.reason}, nil
}

var failedRetryCommand = command{
	name: "failed retry", synopsis: "[ID]", max: 1,
	summary: "send them again: one, or all that flags pick",
	about: `
The relay sends the event at its next poll. A dead event has all its retries
again. With flags that pick events, or --all, it only counts, unless --yes is
given.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		return prepareChange(fs, change{action: "retry", past: "retried", one: (*outboxops.Failures).Retry, all: (*outboxops.Failures).RetryAll})
	},
}

var failedResolveCommand = command{
	name: "failed resolve", synopsis: "[ID]", max: 1,
	summary: "close them without sending, with a note",
	about: `
Consumers will never see the event; what waits behind it goes on.
With flags that pick events, or --all, it only counts unless --yes is given.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		return prepareChange(fs, change{action: "resolve", past: "resolved", one: (*outboxops.Failures).Resolve, all: (*outboxops.Failures).ResolveAll})
	},
}

// change retries or resolves.
type change struct {
	action, past string
	one          func(*outboxops.Failures, context.Context, outboxops.FailureID, outboxops.AuditInfo) error
	all          func(*outboxops.Failures, context.Context, outboxops.FailureFilter, outboxops.BulkConfig, outboxops.AuditInfo) (int, error)

	pick           failedFlags
	why            auditFlags
	any, yes, dryn bool
	rate           int
	topics         map[string]int // where the events go that would be retried, or would have gone
}

func prepareChange(fs *flag.FlagSet, c change) func(context.Context, *env) error {
	c.pick.define(fs)
	c.why.define(fs)
	fs.BoolVar(&c.any, "all", false, "all unresolved events, if no other flag picks")
	fs.BoolVar(&c.yes, "yes", false, "do it; without, events that flags pick are only counted")
	fs.BoolVar(&c.dryn, "dry-run", false, "only count, with an ID too")
	fs.IntVar(&c.rate, "rate", 0, "`NUMBER` events in a second at most (1000)")
	return c.run
}

func (c *change) run(ctx context.Context, e *env) error {
	filter, picks, err := c.pick.filter(e.now())
	if err != nil {
		return err
	}
	switch {
	case len(e.args) == 1 && (picks || c.any):
		return usagef("an ID, or flags that pick events: not both")
	case len(e.args) == 0 && !picks && !c.any:
		return usagef("name an ID, flags that pick events, or --all")
	case c.yes && c.dryn:
		return usagef("--yes and --dry-run contradict each other")
	case c.rate < 0:
		return usagef("--rate %d: must not be negative", c.rate)
	}
	c.dryn = c.dryn || len(e.args) == 0 && !c.yes
	c.topics = map[string]int{}
	why := outboxops.AuditInfo{Operator: "none", Reason: "to count"}
	if !c.dryn {
		if why, err = c.why.info(e); err != nil {
			return err
		}
	}
	failed, err := e.failed(ctx)
	if err != nil {
		return err
	}
	if len(e.args) == 1 {
		return c.runOne(ctx, e, failed, why)
	}
	return c.runAll(ctx, e, failed, filter, why)
}

func (c *change) runOne(ctx context.Context, e *env, failed *outboxops.Failures, why outboxops.AuditInfo) error {
	ctx, cancel := e.step(ctx)
	defer cancel()
	id, err := e.argID()
	if err != nil {
		return err
	}
	if !c.dryn {
		if err := c.one(failed, ctx, id, why); err != nil {
			return err
		}
		return c.report(e, 1, false)
	}
	row, err := failed.Get(ctx, id)
	if err != nil {
		return err
	}
	// Of a relay, an event fails once: this filter picks the row.
	n, err := c.all(failed, ctx, outboxops.FailureFilter{Relay: row.Relay, OutboxID: row.OutboxID}, outboxops.BulkConfig{DryRun: true, Topics: c.topics}, why)
	if err != nil {
		return err
	}
	return c.report(e, n, true)
}

func (c *change) runAll(ctx context.Context, e *env, failed *outboxops.Failures, filter outboxops.FailureFilter, why outboxops.AuditInfo) error {
	n, err := c.all(failed, ctx, filter, outboxops.BulkConfig{DryRun: true, Topics: c.topics}, why)
	if err != nil {
		return err
	}
	if c.dryn {
		return c.report(e, n, true)
	}
	p := e.progress(c.past, n)
	n, err = c.all(failed, ctx, filter, outboxops.BulkConfig{Rate: c.rate, Progress: p.show}, why)
	p.end()
	if err != nil {
		return errors.Join(err, c.report(e, n, false))
	}
	return c.report(e, n, false)
}

// report says what was done, or would be.
func (c *change) report(e *env, n int, dryRun bool) error {
	if e.json {
		doc := map[string]any{"action": c.action, "events": n, "dry_run": dryRun}
		if dryRun {
			doc["topics"] = c.topics
		}
		return e.writeJSON(doc)
	}
	things := plural(int64(n), "event", "events")
	if !dryRun {
		e.printf("%s %s\n", c.past, things)
		return nil
	}
	e.showTopics(c.topics)
	e.printf("would %s %s", c.action, things)
	if len(e.args) == 0 && n > 0 {
		e.printf("; --yes does it")
	}
	e.printf("\n")
	return nil
}

// showTopics writes how many events or dead letters go to which topic, the most first.
func (e *env) showTopics(topics map[string]int) {
	for _, name := range byCount(topics) {
		e.printf("topic %s: %s\n", visible(cmp.Or(name, "(none)")), count(topics[name]))
	}
}

// byCount returns names, those with the largest numbers first.
func byCount(counts map[string]int) []string {
	return slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), strings.Compare(a, b))
	})
}

var failedEditCommand = command{
	name: "failed edit", synopsis: "ID", min: 1, max: 1,
	summary: "give a dead one another payload and send it",
	about: `
The payload is of the same content type; the old one stays in outbox_audit.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var why auditFlags
		why.define(fs)
		file := fs.String("payload", "", "`FILE` the new payload; - is the standard input")
		limit := fs.Int("max-payload", 0, "`BYTES` at most, as recorders have it (983040)")
		return func(ctx context.Context, e *env) error { return failedEdit(ctx, e, why, *file, *limit) }
	},
}

func failedEdit(ctx context.Context, e *env, why auditFlags, file string, limit int) error {
	id, err := e.argID()
	if err != nil {
		return err
	}
	info, err := why.info(e)
	if err != nil {
		return err
	}
	payload, err := readPayload(e, file)
	if err != nil {
		return err
	}
	failed, err := e.failedUpTo(ctx, limit)
	if err != nil {
		return err
	}
	if err := failed.Edit(ctx, id, payload, info); err != nil {
		return err
	}
	if e.json {
		return e.writeJSON(map[string]any{"action": "edit", "events": 1, "dry_run": false})
	}
	e.printf("edited, and will be sent: %s\n", plural(int64(len(payload)), "byte", "bytes"))
	return nil
}

func readPayload(e *env, file string) (payload []byte, err error) {
	switch file {
	case "":
		return nil, usagef("--payload is missing")
	case "-":
		payload, err = io.ReadAll(e.stdin)
	default:
		payload, err = os.ReadFile(file)
	}
	if err != nil {
		return nil, fmt.Errorf("--payload: %w", err)
	}
	return payload, nil
}

var failedHoldCommand = command{
	name: "failed hold", synopsis: "TOPIC KEY", min: 2, max: 2,
	summary: "stop sending a key of which an event has failed",
	about: `
Later events of the key wait behind those that have failed, until it is
released, or those are sent or resolved.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		return prepareKey(fs, "hold", (*outboxops.Failures).Hold)
	},
}

var failedReleaseCommand = command{
	name: "failed release", synopsis: "TOPIC KEY", min: 2, max: 2,
	summary: "send the events of a held key again",
	about: `
Dead events of the key stay dead. To send one, use outbox failed retry or edit.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		return prepareKey(fs, "release", (*outboxops.Failures).Release)
	},
}

const defaultRelay = "default"

type keyAction func(f *outboxops.Failures, ctx context.Context, relay, topic, key string, why outboxops.AuditInfo) error

func prepareKey(fs *flag.FlagSet, action string, do keyAction) func(context.Context, *env) error {
	var why auditFlags
	why.define(fs)
	relay := fs.String("relay", defaultRelay, "`NAME` whose key (default)")
	return func(ctx context.Context, e *env) error {
		info, err := why.info(e)
		if err != nil {
			return err
		}
		failed, err := e.failed(ctx)
		if err != nil {
			return err
		}
		if err := do(failed, ctx, *relay, e.args[0], e.args[1], info); err != nil {
			return err
		}
		if e.json {
			return e.writeJSON(map[string]any{"action": action, "relay": *relay, "topic": e.args[0], "key": e.args[1]})
		}
		e.printf("%s: key %s of topic %s\n", action, visible(e.args[1]), visible(e.args[0]))
		return nil
	}
}
