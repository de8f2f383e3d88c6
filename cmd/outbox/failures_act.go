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
	"time"

	"github.com/outboxgo/outbox"
	rules "github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/outboxops"
)

// auditFlags are the operator and the reason.
type auditFlags struct{ operator, reason string }

func (a *auditFlags) define(fs *flag.FlagSet) {
	fs.StringVar(&a.reason, "reason", "", "`TEXT` why, for outbox_audit; required to change anything")
	fs.StringVar(&a.operator, "operator", "", "`NAME` your name, for outbox_audit (your login name)")
}

// yesUsage describes --yes of commands that change nothing without it.
const yesUsage = "do it; else only show what would be done"

func (a *auditFlags) info(e *env) (outboxops.AuditInfo, error) {
	if !rules.IsReadable(a.reason) {
		return outboxops.AuditInfo{}, usagef("--reason is missing: it is kept with what was done")
	}
	who := cmp.Or(a.operator, e.user())
	if who == "" {
		return outboxops.AuditInfo{}, usagef("--operator is missing, and the system does not know who you are")
	}
	if err := rules.Operator(who); err != nil {
		return outboxops.AuditInfo{}, usagef("--operator %q %v", who, err)
	}
	return outboxops.AuditInfo{Operator: who, Reason: a.reason}, nil
}

// maxIDs bounds the failures that are named one by one.
const maxIDs = 1000

var failuresRetryCommand = command{
	name: "failures retry", synopsis: "[ID…]", max: maxIDs,
	summary: "retry failures: those named, or all that flags pick",
	about: `
They are sent or handled again, before later events of their keys. Dead failures
have all attempts again. --status resolved undoes outbox failures resolve.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		return prepareChange(fs, change{action: "retry", past: "retried", one: (*outboxops.Failures).Retry, all: (*outboxops.Failures).RetryAll, isPossible: isRetryable})
	},
}

// isRetryable reports whether a delivery can be retried.
func isRetryable(f outboxops.Failure) bool {
	return f.Status == outbox.StatusDead || f.Status == outbox.StatusResolved
}

var failuresResolveCommand = command{
	name: "failures resolve", synopsis: "[ID…]", max: maxIDs,
	summary: "close failures: those named, or all that flags pick",
	about: `
They are not sent or handled. Later events of their keys continue.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		return prepareChange(fs, change{action: "resolve", past: "resolved", one: (*outboxops.Failures).Resolve, all: (*outboxops.Failures).ResolveAll, isPossible: isResolvable})
	},
}

// isResolvable reports whether a delivery can be resolved.
func isResolvable(f outboxops.Failure) bool {
	return f.Status != outbox.StatusResolved && f.Status != outboxops.StatusDone && f.LockedBy == ""
}

// change retries or resolves.
type change struct {
	action, past string
	one          func(*outboxops.Failures, context.Context, outboxops.FailureID, outboxops.AuditInfo) error
	all          func(*outboxops.Failures, context.Context, outboxops.FailureFilter, outboxops.BulkConfig, outboxops.AuditInfo) (int, error)
	isPossible   func(outboxops.Failure) bool // of a delivery

	pick             failureFlags
	times            times
	why              auditFlags
	any, yes, dryRun bool
	rate             int
	topics           map[string]int                   // of the failures that would be changed
	handlers         map[outboxops.FailureHandler]int // of the deliveries among them
}

func prepareChange(fs *flag.FlagSet, c change) func(context.Context, *env) error {
	c.pick.define(fs)
	c.why.define(fs)
	fs.BoolVar(&c.any, "all", false, "all unresolved failures")
	fs.BoolVar(&c.yes, "yes", false, "do it; else only count what flags or --all pick")
	fs.BoolVar(&c.dryRun, "dry-run", false, "only count, also with IDs")
	fs.IntVar(&c.rate, "rate", 0, "`NUMBER` of failures a second (1000)")
	return c.run
}

func (c *change) run(ctx context.Context, e *env) error {
	now, err := e.nowFor(ctx, c.pick.since, c.pick.until)
	if err != nil {
		return err
	}
	filter, err := c.check(e, now)
	if err != nil {
		return err
	}
	ids, err := e.ids()
	if err != nil {
		return err
	}
	why := outboxops.AuditInfo{Operator: "none", Reason: "to count"}
	if !c.dryRun {
		if why, err = c.why.info(e); err != nil {
			return err
		}
	}
	failures, err := e.failures(ctx)
	if err != nil {
		return err
	}
	switch {
	case len(ids) == 0:
		return c.runAll(ctx, e, failures, filter, why)
	case c.dryRun:
		return c.countThese(ctx, e, failures, ids, why)
	}
	return c.runThese(ctx, e, failures, ids, why)
}

// check refuses flags that do not go together.
func (c *change) check(e *env, now time.Time) (outboxops.FailureFilter, error) {
	c.times = timesOf(c.pick.since, c.pick.until, now)
	filter, picks, err := c.pick.filter(now)
	if err != nil {
		return filter, err
	}
	switch {
	case len(e.args) > 0 && (picks || c.any):
		return filter, usagef("IDs, or flags that pick failures: not both")
	case len(e.args) == 0 && !picks && !c.any:
		return filter, usagef("name an ID, flags that pick failures, or --all")
	case c.yes && c.dryRun:
		return filter, usagef("--yes and --dry-run contradict each other")
	case c.rate < 0:
		return filter, usagef("--rate %d: must not be negative", c.rate)
	}
	c.dryRun = c.dryRun || len(e.args) == 0 && !c.yes
	c.topics, c.handlers = map[string]int{}, map[outboxops.FailureHandler]int{}
	return filter, nil
}

// countThese counts the given failures that can be changed.
func (c *change) countThese(ctx context.Context, e *env, failures *outboxops.Failures, ids failureIDs, why outboxops.AuditInfo) error {
	n := 0
	for _, id := range ids {
		step, cancel := e.step(ctx)
		one, err := c.countThis(step, failures, id, why)
		cancel()
		if err != nil {
			return err
		}
		n += one
	}
	return c.report(e, n, true)
}

// countThis counts a failure if it can be changed. The row of an event does not say so: its relay may have ended by a
// cut. So the event is picked as by flags.
func (c *change) countThis(ctx context.Context, failures *outboxops.Failures, id outboxops.FailureID, why outboxops.AuditInfo) (int, error) {
	f, err := failures.Get(ctx, id)
	switch {
	case err != nil:
		return 0, err
	case id.Kind == outboxops.KindEvent:
		return c.all(failures, ctx, f.Filter(), outboxops.BulkConfig{DryRun: true, Topics: c.topics}, why)
	case !c.isPossible(f):
		return 0, nil
	}
	c.topics[f.Topic]++
	c.handlers[outboxops.FailureHandler{Group: f.Group, Action: f.Action}]++
	return 1, nil
}

// runThese changes failures one by one.
func (c *change) runThese(ctx context.Context, e *env, failures *outboxops.Failures, ids failureIDs, why outboxops.AuditInfo) error {
	for n, id := range ids {
		step, cancel := e.step(ctx)
		err := c.one(failures, step, id, why)
		cancel()
		if err != nil && n > 0 {
			return errors.Join(err, c.report(e, n, false))
		}
		if err != nil {
			return err
		}
	}
	return c.report(e, len(ids), false)
}

func (c *change) runAll(ctx context.Context, e *env, failures *outboxops.Failures, filter outboxops.FailureFilter, why outboxops.AuditInfo) error {
	n, err := c.all(failures, ctx, filter, outboxops.BulkConfig{DryRun: true, Topics: c.topics, Handlers: c.handlers}, why)
	if err != nil {
		return err
	}
	if c.dryRun {
		return c.report(e, n, true)
	}
	if !e.json {
		e.showHandlers(c.handlers)
	}
	p := e.progress(c.past, n)
	n, err = c.all(failures, ctx, filter, outboxops.BulkConfig{Rate: c.rate, Progress: p.show}, why)
	p.end()
	return errors.Join(err, c.report(e, n, false))
}

// report prints the number of changed failures, or in a dry run, of failures that would be changed.
func (c *change) report(e *env, n int, dryRun bool) error {
	if e.json {
		doc := map[string]any{"action": c.action, "failures": n, "dry_run": dryRun}
		if dryRun {
			doc["topics"], doc["handlers"] = c.topics, handlersJSON(c.handlers)
			c.times.addTo(doc)
		}
		return e.writeJSON(doc)
	}
	things := plural(int64(n), "failure", "failures")
	if !dryRun {
		e.printf("%s %s\n", c.past, things)
		return nil
	}
	e.showTopics(c.topics)
	e.showHandlers(c.handlers)
	e.printf("would %s %s", c.action, things)
	if len(e.args) == 0 && n > 0 {
		e.printf("; --yes does it")
	}
	e.printf("\n")
	e.showTimes(c.times)
	return nil
}

// showTopics writes the number of failures or dead letters for each topic, the largest first.
func (e *env) showTopics(topics map[string]int) {
	for _, name := range byCount(topics) {
		e.printf("topic %s: %s\n", visible(cmp.Or(name, "(none)")), count(topics[name]))
	}
}

// showHandlers writes the number of deliveries for each consumer group and action.
func (e *env) showHandlers(handlers map[outboxops.FailureHandler]int) {
	for _, h := range sortedHandlers(handlers) {
		e.printf("group %s, action %s: %s\n", visible(h.Group), visible(cmp.Or(h.Action, "(none)")), count(handlers[h]))
	}
}

// sortedHandlers returns handlers by group and action.
func sortedHandlers(handlers map[outboxops.FailureHandler]int) []outboxops.FailureHandler {
	return slices.SortedFunc(maps.Keys(handlers), func(a, b outboxops.FailureHandler) int {
		return cmp.Or(strings.Compare(a.Group, b.Group), strings.Compare(a.Action, b.Action))
	})
}

// handlerJSON is the number of deliveries for a consumer group and action.
type handlerJSON struct {
	Group      string `json:"group"`
	Action     string `json:"action"`
	Deliveries int    `json:"deliveries"`
}

func handlersJSON(handlers map[outboxops.FailureHandler]int) []handlerJSON {
	all := []handlerJSON{}
	for _, h := range sortedHandlers(handlers) {
		all = append(all, handlerJSON{h.Group, h.Action, handlers[h]})
	}
	return all
}

// byCount returns names, those with the largest numbers first.
func byCount(counts map[string]int) []string {
	return slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), strings.Compare(a, b))
	})
}

var failuresEditCommand = command{
	name: "failures edit", synopsis: "ID", min: 1, max: 1,
	summary: "give a dead failure another payload, and retry it",
	about: `
A relay sends the event with the new payload. Of a delivery, only its group and
action get it. The content type stays. outbox_audit keeps the old payload.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var why auditFlags
		why.define(fs)
		file := fs.String("payload", "", "`FILE` new payload; - is standard input")
		limit := fs.Int("max-payload", 0, "`BYTES` MaxPayload of the recorders (983040)")
		dryRun := fs.Bool("dry-run", false, "check, show both payloads, change nothing")
		return func(ctx context.Context, e *env) error { return failuresEdit(ctx, e, why, *file, *limit, *dryRun) }
	},
}

func failuresEdit(ctx context.Context, e *env, why auditFlags, file string, limit int, dryRun bool) error {
	ids, err := e.ids()
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
	failures, err := e.failuresUpTo(ctx, limit)
	if err != nil {
		return err
	}
	if dryRun {
		return failuresEditDryRun(ctx, e, failures, ids[0], payload, info)
	}
	if err := failures.Edit(ctx, ids[0], payload, info); err != nil {
		return err
	}
	if e.json {
		return e.writeJSON(map[string]any{"action": "edit", "failures": 1, "dry_run": false})
	}
	e.printf("edited, and will be %s: %s\n", map[outboxops.Kind]string{outboxops.KindEvent: "sent", outboxops.KindDelivery: "handled"}[ids[0].Kind],
		plural(int64(len(payload)), "byte", "bytes"))
	return nil
}

// failuresEditDryRun shows the payloads before and after an edit that would be possible.
func failuresEditDryRun(ctx context.Context, e *env, failures *outboxops.Failures, id outboxops.FailureID, payload []byte, why outboxops.AuditInfo) error {
	before, err := failures.Get(ctx, id)
	if err != nil {
		return err
	}
	if err := failures.CheckEdit(ctx, id, payload, why); err != nil {
		return err
	}
	return e.showEdit(before.ContentType, before.Payload, before.PayloadErr, payload, map[string]any{"action": "edit", "failures": 1, "dry_run": true})
}

// showEdit shows the payloads before and after an edit, or adds them to its JSON document.
func (e *env) showEdit(contentType string, before []byte, reason error, after []byte, doc map[string]any) error {
	if e.json {
		for name, payload := range map[string][]byte{"before": before, "after": after} {
			asJSON, bytes := body(payload)
			doc[name] = map[string]any{"payload": asJSON, "payload_base64": bytes}
		}
		return e.writeJSON(doc)
	}
	e.printf("before:\n")
	e.writePayload(contentType, before, reason)
	e.printf("after:\n")
	e.writePayload(contentType, after, nil)
	e.printf("would edit: %s instead of %s\n", plural(int64(len(after)), "byte", "bytes"), count(len(before)))
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

var failuresHoldCommand = command{
	name: "failures hold", synopsis: "ID", min: 1, max: 1,
	summary: "block the key of a failure",
	about: `
Later events of the key are not sent, or not handled by this group and action,
until the key is released, or all its failures are resolved, sent or handled. A
delivery can hold its key only if it is dead.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		return prepareKey(fs, "hold", (*outboxops.Failures).Hold)
	},
}

var failuresReleaseCommand = command{
	name: "failures release", synopsis: "ID", min: 1, max: 1,
	summary: "unblock the key of a failure",
	about: `
Later events of the key continue. A dead failure stays dead.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		return prepareKey(fs, "release", (*outboxops.Failures).Release)
	},
}

type keyAction func(f *outboxops.Failures, ctx context.Context, id outboxops.FailureID, why outboxops.AuditInfo) error

func prepareKey(fs *flag.FlagSet, action string, do keyAction) func(context.Context, *env) error {
	var why auditFlags
	why.define(fs)
	return func(ctx context.Context, e *env) error {
		ids, err := e.ids()
		if err != nil {
			return err
		}
		info, err := why.info(e)
		if err != nil {
			return err
		}
		failures, err := e.failures(ctx)
		if err != nil {
			return err
		}
		if err := do(failures, ctx, ids[0], info); err != nil {
			return err
		}
		if e.json {
			return e.writeJSON(map[string]any{"action": action, "id": ids[0]})
		}
		e.printf("%s: the key of %v\n", action, ids[0])
		return nil
	}
}
