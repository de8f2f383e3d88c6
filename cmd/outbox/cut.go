package main

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outboxgo/outbox/outboxops"
	"github.com/twmb/franz-go/pkg/kgo"
)

var cutStatusCommand = command{
	name:    "cut status",
	summary: "which groups get events from workers, which from Kafka",
	about: `
STATE is one of:

  active     workers handle all events
  leaving    workers handle the events before a cut to Kafka
  left       consumers handle all events after the cut
  returning  consumers handle the events before a cut to workers
  starting   the group gets the events of an archive: outbox group start

OPEN deliveries are neither done nor dead. CONSUMER says whether consumers have
stored where they begin.`,
	prepare: func(*flag.FlagSet) func(context.Context, *env) error { return cutStatus },
}

var cutToKafkaCommand = command{
	name:    "cut to-kafka",
	summary: "move groups from workers to Kafka",
	about: `
Makes a cut: workers handle the events before it, consumers later ones, which
the new relay sends. The command waits for the workers and finishes the cut.
Start the consumers before the command, and the relay while it waits. Danger: a
new relay that starts before the cut sends all events, and the cut is rejected.
After an interruption, outbox cut finish continues, and outbox cut cancel undoes
the cut. docs/move.md has the steps.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		c := &cutMove{action: "to-kafka", plan: planToKafka}
		return c.prepare(fs)
	},
}

var cutToPostgresCommand = command{
	name:    "cut to-postgres",
	summary: "move groups from Kafka back to workers",
	about: `
Makes a cut: consumers handle the events that the relay has sent, workers later
ones. Stop the relay first, so that nothing is in flight, and start the workers
after the cut. The command waits for the consumers and finishes the cut, and the
relay ends. If it was the last relay, other groups on Kafka get no more events:
name them in --leave-behind.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		c := &cutMove{action: toPostgres, plan: planToPostgres}
		fs.StringVar(&c.behind, "leave-behind", "", "`LIST` groups that get no more events")
		return c.prepare(fs)
	},
}

var cutFinishCommand = command{
	name:    "cut finish",
	summary: "wait until a cut is ready, and finish it",
	about: `
For outbox cut to-kafka and to-postgres: waits until the side before the cut is
done; then the other side begins. Danger: --early does not wait, so events of a
key may be handled out of order.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var f cutFinish
		fs.StringVar(&f.relay, "relay", "", "`NAME` of the relay; required")
		fs.BoolVar(&f.noWait, "no-wait", false, "fail if not ready")
		fs.BoolVar(&f.early, "early", false, "do not wait")
		f.why.define(fs)
		return f.run
	},
}

var cutCancelCommand = command{
	name:    "cut cancel",
	summary: "undo a cut that is not finished",
	about: `
The groups continue as before the cut; no event is lost. After a cut to Kafka,
the relay stands by until another cut names it.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var why auditFlags
		relay := fs.String("relay", "", "`NAME` of the relay; required")
		why.define(fs)
		return func(ctx context.Context, e *env) error {
			if *relay == "" {
				return usagef("--relay is missing")
			}
			info, err := why.info(e)
			if err != nil {
				return err
			}
			cuts, err := e.cuts(ctx)
			if err == nil {
				err = cuts.Cancel(ctx, *relay, info)
			}
			if err != nil {
				return err
			}
			if e.json {
				return e.writeJSON(map[string]any{"action": "cancel", "relay": *relay})
			}
			e.printf("canceled: the groups of relay %s go on as before\n", visible(*relay))
			return nil
		}
	},
}

func (e *env) cuts(ctx context.Context) (*outboxops.Cuts, error) {
	db, err := e.connect(ctx)
	if err != nil {
		return nil, err
	}
	return outboxops.NewCuts(db, outboxops.CutsConfig{Schema: e.schema})
}

// subscriptionJSON is a group in the output.
type subscriptionJSON struct {
	Group       string    `json:"group"`
	State       string    `json:"state"`
	ChangedAt   time.Time `json:"changed_at"`
	Relay       string    `json:"relay"`
	Open        int64     `json:"open"`
	Dead        int64     `json:"dead"`
	HasConsumer bool      `json:"has_consumer"`
}

func subscriptionsOf(all []outboxops.Subscription) []subscriptionJSON {
	out := make([]subscriptionJSON, 0, len(all))
	for _, s := range all {
		out = append(out, subscriptionJSON{s.Group, string(s.State), s.ChangedAt.UTC(), s.Relay, s.Open, s.Dead, s.HasConsumer})
	}
	return out
}

func cutStatus(ctx context.Context, e *env) error {
	cuts, err := e.cuts(ctx)
	if err != nil {
		return err
	}
	all, err := cuts.List(ctx)
	if err != nil {
		return err
	}
	if e.json {
		return e.writeJSON(map[string]any{"groups": subscriptionsOf(all)})
	}
	if len(all) == 0 {
		e.printf("No worker has run for any group.\n")
		return nil
	}
	e.writeSubscriptions(all)
	return nil
}

func (e *env) writeSubscriptions(all []outboxops.Subscription) {
	t := table{head: []string{"GROUP", "STATE", "SINCE", "OPEN", "DEAD", "CONSUMER", "RELAY"}, flex: []int{0, 6}}
	for _, s := range all {
		consumer := "no"
		if s.HasConsumer {
			consumer = "yes"
		}
		t.add(s.Group, string(s.State), age(s.ChangedAt, e.dbNow()), upTo(s.Open).String(), upTo(s.Dead).String(), consumer, s.Relay)
	}
	e.writeTable(t)
}

// cutMove makes a cut.
type cutMove struct {
	action        string
	relay, groups string
	behind        string // only to PostgreSQL
	yes, noWait   bool
	why           auditFlags
	plan          func(cutState) cutPlan
}

// toPostgres is the action of a cut to PostgreSQL.
const toPostgres = "to-postgres"

func (c *cutMove) prepare(fs *flag.FlagSet) func(context.Context, *env) error {
	fs.StringVar(&c.groups, "group", "", "`LIST` consumer groups; required")
	fs.StringVar(&c.relay, "relay", "", "`NAME` of the relay; required")
	fs.BoolVar(&c.yes, "yes", false, yesUsage)
	fs.BoolVar(&c.noWait, "no-wait", false, "only make the cut: outbox cut finish continues")
	c.why.define(fs)
	return c.run
}

func (c *cutMove) run(ctx context.Context, e *env) error {
	switch {
	case c.groups == "":
		return usagef("--group is missing")
	case c.relay == "":
		return usagef("--relay is missing")
	}
	var why outboxops.AuditInfo
	var err error
	if c.yes {
		if why, err = c.why.info(e); err != nil {
			return err
		}
	}
	wait := cutWait{relay: c.relay, why: why}
	if c.yes && !c.noWait && c.action == toPostgres { // Kafka has the offsets of the groups
		if wait.kafka, err = e.kafkaOpts(); err != nil {
			return err
		}
	}
	step, cancel := e.step(ctx)
	defer cancel()
	state, err := e.cutState(step, strings.Split(c.groups, ","), c.relay)
	if err != nil {
		return err
	}
	if c.behind != "" {
		state.behind = strings.Split(c.behind, ",")
	}
	plan := c.plan(state)
	if !c.yes || len(plan.NotReady) > 0 {
		return c.show(e, state, plan)
	}
	if !e.json {
		plan.say(e)
	}
	if wait.cuts, err = e.cuts(step); err != nil {
		return err
	}
	if c.action == toPostgres {
		err = wait.cuts.ToPostgres(step, state.names, c.relay, state.behind, why)
	} else {
		err = wait.cuts.ToKafka(step, state.names, c.relay, why)
	}
	if err != nil {
		return err
	}
	if c.noWait {
		return c.report(e, state.names, plan, false)
	}
	if err := wait.run(ctx, e); err != nil {
		fmt.Fprintf(e.stderr, "The cut is made, and not finished: outbox cut finish --relay %s --reason TEXT goes on to wait, outbox cut cancel takes it back.\n", visible(c.relay))
		return err
	}
	return c.report(e, state.names, plan, true)
}

// show describes the cut, and the reasons against it.
func (c *cutMove) show(e *env, state cutState, plan cutPlan) error {
	if e.json {
		err := e.writeJSON(map[string]any{"action": c.action, "relay": c.relay, "dry_run": true, "groups": subscriptionsOf(state.chosen()),
			"not_ready": plan.NotReady, "notes": plan.Notes})
		if err == nil && len(plan.NotReady) > 0 {
			err = errProblems
		}
		return err
	}
	if known := state.chosen(); len(known) > 0 {
		e.writeSubscriptions(known)
	}
	for _, line := range plan.Steps {
		e.say("- " + visible(line))
	}
	plan.say(e)
	for _, line := range plan.NotReady {
		e.say("not ready: " + visible(line))
	}
	if len(plan.NotReady) > 0 {
		e.printf("Nothing is changed.\n")
		return errProblems
	}
	e.printf("Nothing is changed yet; --yes does it.\n")
	return nil
}

func (c *cutMove) report(e *env, groups []string, plan cutPlan, finished bool) error {
	if e.json {
		return e.writeJSON(map[string]any{"action": c.action, "relay": c.relay, "dry_run": false, "groups": groups, "finished": finished,
			"notes": plan.Notes})
	}
	if !finished {
		e.printf("The cut is made. outbox cut finish --relay %s --reason TEXT waits for what is in front of it.\n", visible(c.relay))
		return nil
	}
	after := "the workers can be stopped"
	if c.action == toPostgres {
		after = "the consumers can be stopped"
	}
	e.printf("%s: done for %s; %s\n", c.action, visible(strings.Join(groups, ", ")), after)
	return nil
}

// cutFinish finishes a cut.
type cutFinish struct {
	relay         string
	noWait, early bool
	why           auditFlags
}

func (f *cutFinish) run(ctx context.Context, e *env) error {
	switch {
	case f.relay == "":
		return usagef("--relay is missing")
	case f.noWait && f.early:
		return usagef("--no-wait and --early do not go together")
	}
	why, err := f.why.info(e)
	if err != nil {
		return err
	}
	cuts, err := e.cuts(ctx)
	if err != nil {
		return err
	}
	step, cancel := e.step(ctx)
	defer cancel()
	wait := cutWait{cuts: cuts, relay: f.relay, why: why}
	if f.early {
		err = cuts.FinishEarly(step, f.relay, why)
	} else if wait.kafka, err = e.kafkaOf(step, cuts, f.relay); err == nil && f.noWait {
		err = cuts.Finish(step, wait.kafka, f.relay, why)
	} else if err == nil {
		err = wait.run(ctx, e)
	}
	if err != nil {
		return err
	}
	if e.json {
		return e.writeJSON(map[string]any{"action": "finish", "relay": f.relay, "finished": true})
	}
	e.printf("finished: the cut at relay %s\n", visible(f.relay))
	return nil
}

// kafkaOf returns the options of the Kafka client if groups return from there.
func (e *env) kafkaOf(ctx context.Context, cuts *outboxops.Cuts, relay string) (opts []kgo.Opt, err error) {
	all, err := cuts.List(ctx)
	if err != nil || !slices.ContainsFunc(all, func(s outboxops.Subscription) bool {
		return s.Relay == relay && s.State == outboxops.SubscriptionReturning
	}) {
		return nil, err
	}
	return e.kafkaOpts()
}

// cutWait waits until the events in front of a cut are handled, and finishes the cut.
type cutWait struct {
	cuts  *outboxops.Cuts
	kafka []kgo.Opt
	relay string
	why   outboxops.AuditInfo
}

// run waits without a limit; --timeout bounds each poll.
func (w *cutWait) run(ctx context.Context, e *env) error {
	looking, watchdog := e.watchdog(ctx)
	defer watchdog.stop()
	p := &cutProgress{e: e}
	err := w.cuts.Await(looking, w.kafka, w.relay, func(now outboxops.CutProgress) {
		watchdog.reset()
		p.show(now)
	})
	p.end()
	if err != nil {
		return withCause(looking, err)
	}
	step, done := e.step(ctx)
	defer done()
	return w.cuts.Finish(step, w.kafka, w.relay, w.why)
}

// cutProgress shows the progress of a cut. On a terminal it uses one line. Otherwise it writes a line when
// the progress has changed and some time has passed.
type cutProgress struct {
	e     *env
	last  string
	shown time.Time
}

func (p *cutProgress) show(now outboxops.CutProgress) {
	text := visible(waitingFor(now))
	if p.e.json || text == "" {
		return
	}
	if p.e.errTTY {
		fmt.Fprintf(p.e.stderr, "\r\x1b[K%s", cut(text, p.e.width-1))
		return
	}
	if text != p.last && p.e.now().Sub(p.shown) >= lineEvery {
		p.last, p.shown = text, p.e.now()
		fmt.Fprintln(p.e.stderr, text)
	}
}

func (p *cutProgress) end() {
	if p.e.errTTY && !p.e.json {
		fmt.Fprint(p.e.stderr, "\r\x1b[K")
	}
}

// waitingFor describes the events that are still in front of a cut.
func waitingFor(now outboxops.CutProgress) string {
	var parts []string
	for _, g := range now.Groups {
		name := visible(g.Group)
		switch {
		case g.State == outboxops.SubscriptionLeaving:
			parts = append(parts, name+": its workers have not taken all events")
		case g.State == outboxops.SubscriptionLeft && g.Open > 0:
			parts = append(parts, fmt.Sprintf("%s: %s", name, upTo(g.Open).Of("open delivery", "open deliveries")))
		case g.State == outboxops.SubscriptionLeft && !g.HasConsumer:
			parts = append(parts, name+": consumers have not begun with each topic")
		case g.Unread > 0:
			parts = append(parts, fmt.Sprintf("%s: %s", name, plural(g.Unread, "unread record", "unread records")))
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return "waiting for " + strings.Join(parts, "; ")
}
