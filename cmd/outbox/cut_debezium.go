package main

import (
	"context"
	"flag"
	"fmt"

	"github.com/outboxgo/outbox/outboxops"
)

var cutFromDebeziumCommand = command{
	name:    "cut from-debezium",
	summary: "move from Debezium to a relay",
	about: `
Makes a cut: Debezium sends the events before it, a new relay later ones. The
command waits for open transactions that have recorded events. Stop the
connector when the command says so; then the relay can begin. The cut cannot be
cancelled; docs/move.md has the steps.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		c := &cutDebezium{action: "from-debezium"}
		fs.BoolVar(&c.resume, "resume", false, "continue after an interruption")
		return c.prepare(fs)
	},
}

var cutToDebeziumCommand = command{
	name:    "cut to-debezium",
	summary: "move from a relay to Debezium",
	about: `
Makes a cut: the relay sends the events before it, Debezium later ones. Start
the connector first. The command waits for the relay, and for open transactions
that have recorded events. Then the relay ends.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		return (&cutDebezium{action: "to-debezium"}).prepare(fs)
	},
}

// cutDebezium moves between Debezium and a relay.
type cutDebezium struct {
	action      string
	cut         outboxops.DebeziumCut
	yes, resume bool
	why         auditFlags
}

func (c *cutDebezium) prepare(fs *flag.FlagSet) func(context.Context, *env) error {
	fs.StringVar(&c.cut.Relay, "relay", "", "`NAME` of the relay; required")
	fs.StringVar(&c.cut.Publication, "publication", "", "`NAME` of the publication; required")
	fs.StringVar(&c.cut.Slot, "slot", "", "`NAME` of the connector's slot; required")
	fs.BoolVar(&c.yes, "yes", false, yesUsage)
	c.why.define(fs)
	return c.run
}

func (c *cutDebezium) run(ctx context.Context, e *env) error {
	for name, value := range map[string]string{"relay": c.cut.Relay, "publication": c.cut.Publication, "slot": c.cut.Slot} {
		if value == "" {
			return usagef("--%s is missing", name)
		}
	}
	var why outboxops.AuditInfo
	var err error
	if c.yes {
		if why, err = c.why.info(e); err != nil {
			return err
		}
	}
	cuts, err := e.cuts(ctx)
	if err != nil {
		return err
	}
	if !c.yes {
		return c.show(ctx, e, cuts)
	}
	if c.action == "to-debezium" {
		err = cuts.ToDebezium(ctx, c.cut, why)
	} else {
		err = c.fromDebezium(ctx, e, cuts, why)
	}
	if err != nil {
		return err
	}
	if e.json {
		return e.writeJSON(map[string]any{"action": c.action, "relay": c.cut.Relay, "dry_run": false, "finished": true})
	}
	if c.action == "to-debezium" {
		e.printf("Debezium sends the events; the processes of relay %s can be stopped\n", visible(c.cut.Relay))
	} else {
		e.printf("relay %s may begin: start it\n", visible(c.cut.Relay))
	}
	return nil
}

// show describes the progress of the connector, and the move.
func (c *cutDebezium) show(ctx context.Context, e *env, cuts *outboxops.Cuts) error {
	ctx, cancel := e.step(ctx)
	defer cancel()
	p, err := cuts.DebeziumProgress(ctx, c.cut)
	if err != nil {
		return err
	}
	if e.json {
		return e.writeJSON(map[string]any{"action": c.action, "relay": c.cut.Relay, "dry_run": true, "active": p.Active, "unconfirmed": p.Unconfirmed})
	}
	state := "stopped"
	if p.Active {
		state = "running"
	}
	e.printf("connector %s, %s not confirmed\n", state, plural(p.Unconfirmed, "event", "events"))
	if c.action == "to-debezium" {
		e.say("- relay " + visible(c.cut.Relay) + " sends what is recorded before this moment, and ends")
		e.say("- Debezium sends what comes after")
	} else {
		e.say("- Debezium sends what is recorded before this moment")
		e.say("- relay " + visible(c.cut.Relay) + " waits until it is done and stopped, and then sends what comes after")
	}
	e.printf("Nothing is changed yet; --yes does it.\n")
	return nil
}

func (c *cutDebezium) fromDebezium(ctx context.Context, e *env, cuts *outboxops.Cuts, why outboxops.AuditInfo) error {
	if !c.resume {
		if err := cuts.FromDebezium(ctx, c.cut, why); err != nil {
			return err
		}
	}
	last := ""
	err := cuts.AwaitDebezium(ctx, c.cut, func(p outboxops.DebeziumProgress) {
		text := ""
		switch {
		case p.Active && p.Unconfirmed == 0:
			text = "Debezium has sent everything: stop the connector now"
		case p.Active:
			text = "waiting for Debezium to confirm what it has still to send"
		case p.Unconfirmed > 0:
			text = fmt.Sprintf("the connector is stopped and has not confirmed %s: start it again", plural(p.Unconfirmed, "event", "events"))
		}
		if text != "" && text != last {
			fmt.Fprintln(e.stderr, text)
		}
		last = text
	})
	if err == nil {
		err = cuts.BeginRelay(ctx, c.cut, why)
	}
	if err != nil {
		fmt.Fprintln(e.stderr, "The cut is made, and the relay has not begun: the same command with --resume goes on to wait.")
	}
	return err
}
