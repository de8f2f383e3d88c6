package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/outboxgo/outbox"
)

// decision says who decides, and why, as the flags say.
type decision struct{ operator, reason string }

func (d *decision) define(fs *flag.FlagSet) {
	fs.StringVar(&d.reason, "reason", "", "`TEXT` why; required, and kept in outbox_audit")
	fs.StringVar(&d.operator, "operator", "", "`NAME` who decides; else the user of the system")
}

func (d *decision) decide(e *env) (outbox.Decision, error) {
	if strings.TrimSpace(d.reason) == "" {
		return outbox.Decision{}, usagef("--reason is missing: it is kept with what was done")
	}
	who := cmp.Or(d.operator, e.user())
	if who == "" {
		return outbox.Decision{}, usagef("--operator is missing, and the system does not know who you are")
	}
	return outbox.Decision{Operator: who, Reason: d.reason}, nil
}

var failedRetryCommand = command{
	name: "failed retry", synopsis: "[ID]", max: 1,
	summary: "send them again: one, or all that flags pick",
	about: `
The relay sends one ID at its next look; dead events have all their tries again.
With flags that pick events, or --all, it only counts unless --yes is given.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		return prepareSettle(fs, settle{act: "retry", past: "retried", one: (*outbox.FailedEvents).Retry, all: (*outbox.FailedEvents).RetryAll})
	},
}

var failedResolveCommand = command{
	name: "failed resolve", synopsis: "[ID]", max: 1,
	summary: "settle them without sending, with a note",
	about: `
Consumers will never see the event; what waits behind it goes on.
With flags that pick events, or --all, it only counts unless --yes is given.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		return prepareSettle(fs, settle{act: "resolve", past: "resolved", one: (*outbox.FailedEvents).Resolve, all: (*outbox.FailedEvents).ResolveAll})
	},
}

// settle retries or resolves.
type settle struct {
	act, past string
	one       func(*outbox.FailedEvents, context.Context, int64, outbox.Decision) error
	all       func(*outbox.FailedEvents, context.Context, outbox.FailedFilter, outbox.BulkConfig, outbox.Decision) (int, error)

	pick           failedFlags
	why            decision
	any, yes, dryn bool
	rate           int
}

func prepareSettle(fs *flag.FlagSet, s settle) func(context.Context, *env) error {
	s.pick.define(fs)
	s.why.define(fs)
	fs.BoolVar(&s.any, "all", false, "all that is not resolved, where no flag picks")
	fs.BoolVar(&s.yes, "yes", false, "do it; without, events that flags pick are only counted")
	fs.BoolVar(&s.dryn, "dry-run", false, "only count, with an ID too")
	fs.IntVar(&s.rate, "rate", 0, "`NUMBER` events in a second at most (1000)")
	return s.run
}

func (s *settle) run(ctx context.Context, e *env) error {
	filter, picks, err := s.pick.filter(e.now())
	if err != nil {
		return err
	}
	switch {
	case len(e.args) == 1 && (picks || s.any):
		return usagef("an ID, or flags that pick events: not both")
	case len(e.args) == 0 && !picks && !s.any:
		return usagef("which? an ID, flags that pick events, or --all")
	case s.yes && s.dryn:
		return usagef("--yes and --dry-run contradict each other")
	case s.rate < 0:
		return usagef("--rate %d: must not be negative", s.rate)
	}
	s.dryn = s.dryn || len(e.args) == 0 && !s.yes
	why := outbox.Decision{Operator: "nobody", Reason: "to count"}
	if !s.dryn {
		if why, err = s.why.decide(e); err != nil {
			return err
		}
	}
	failed, err := e.failed(ctx)
	if err != nil {
		return err
	}
	if len(e.args) == 1 {
		return s.runOne(ctx, e, failed, why)
	}
	return s.runAll(ctx, e, failed, filter, why)
}

func (s *settle) runOne(ctx context.Context, e *env, failed *outbox.FailedEvents, why outbox.Decision) error {
	ctx, cancel := e.step(ctx)
	defer cancel()
	id, err := e.argID()
	if err != nil {
		return err
	}
	if !s.dryn {
		if err := s.one(failed, ctx, id, why); err != nil {
			return err
		}
		return s.report(e, 1, false)
	}
	row, err := failed.Get(ctx, id)
	if err != nil {
		return err
	}
	// Of a relay, an event fails once: this filter picks the row.
	n, err := s.all(failed, ctx, outbox.FailedFilter{Relay: row.Relay, OutboxID: row.OutboxID}, outbox.BulkConfig{DryRun: true}, why)
	if err != nil {
		return err
	}
	return s.report(e, n, true)
}

func (s *settle) runAll(ctx context.Context, e *env, failed *outbox.FailedEvents, filter outbox.FailedFilter, why outbox.Decision) error {
	n, err := s.all(failed, ctx, filter, outbox.BulkConfig{DryRun: true}, why)
	if err != nil {
		return err
	}
	if s.dryn {
		return s.report(e, n, true)
	}
	p := e.progress(s.past, n)
	n, err = s.all(failed, ctx, filter, outbox.BulkConfig{Rate: s.rate, Progress: p.show}, why)
	p.end()
	if err != nil {
		return errors.Join(err, s.report(e, n, false))
	}
	return s.report(e, n, false)
}

// report says what was done, or would be.
func (s *settle) report(e *env, n int, dryRun bool) error {
	if e.json {
		return e.writeJSON(map[string]any{"action": s.act, "events": n, "dry_run": dryRun})
	}
	things := plural(int64(n), "event", "events")
	if !dryRun {
		e.printf("%s %s\n", s.past, things)
		return nil
	}
	e.printf("would %s %s", s.act, things)
	if len(e.args) == 0 && n > 0 {
		e.printf("; --yes does it")
	}
	e.printf("\n")
	return nil
}

var failedEditCommand = command{
	name: "failed edit", synopsis: "ID", min: 1, max: 1,
	summary: "give a dead one another payload and send it",
	about: `
The payload is of the same content type; the old one stays in outbox_audit.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var why decision
		why.define(fs)
		file := fs.String("payload", "", "`FILE` the new payload; - is the standard input")
		return func(ctx context.Context, e *env) error { return failedEdit(ctx, e, why, *file) }
	},
}

func failedEdit(ctx context.Context, e *env, why decision, file string) error {
	id, err := e.argID()
	if err != nil {
		return err
	}
	decided, err := why.decide(e)
	if err != nil {
		return err
	}
	payload, err := readPayload(e, file)
	if err != nil {
		return err
	}
	failed, err := e.failed(ctx)
	if err != nil {
		return err
	}
	if err := failed.Edit(ctx, id, payload, decided); err != nil {
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
	summary: "send nothing more of a key of which something failed",
	about: `
Later events of the key wait behind those that have failed, until somebody
releases it or settles them.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		return prepareKey(fs, "hold", (*outbox.FailedEvents).Hold)
	},
}

var failedReleaseCommand = command{
	name: "failed release", synopsis: "TOPIC KEY", min: 2, max: 2,
	summary: "let a key go on that was held",
	about: `
What is dead of it stays dead.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		return prepareKey(fs, "release", (*outbox.FailedEvents).Release)
	},
}

const defaultRelay = "default"

type keyAction func(f *outbox.FailedEvents, ctx context.Context, relay, topic, key string, why outbox.Decision) error

func prepareKey(fs *flag.FlagSet, act string, do keyAction) func(context.Context, *env) error {
	var why decision
	why.define(fs)
	relay := fs.String("relay", defaultRelay, "`NAME` whose key (default)")
	return func(ctx context.Context, e *env) error {
		decided, err := why.decide(e)
		if err != nil {
			return err
		}
		failed, err := e.failed(ctx)
		if err != nil {
			return err
		}
		if err := do(failed, ctx, *relay, e.args[0], e.args[1], decided); err != nil {
			return err
		}
		if e.json {
			return e.writeJSON(map[string]any{"action": act, "relay": *relay, "topic": e.args[0], "key": e.args[1]})
		}
		e.printf("%s: key %s of topic %s\n", act, visible(e.args[1]), visible(e.args[0]))
		return nil
	}
}
