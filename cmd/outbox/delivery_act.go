package main

import (
	"context"
	"errors"
	"flag"
	"slices"

	"github.com/outboxgo/outbox/outboxops"
)

var deliveryRequeueCommand = command{
	name: "delivery requeue", synopsis: "[ID…]", max: maxDeliveryIDs,
	summary: "give dead ones all their attempts again",
	about: `
Each goes before the later ones of its key that wait. With flags that pick, or
--all, it only counts, unless --yes is given. Resolved ones want their IDs.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		c := &deliveryChange{action: "requeue", past: "requeued", possible: []string{outboxops.DeliveryDead},
			one: (*outboxops.Deliveries).Requeue, all: (*outboxops.Deliveries).RequeueAll}
		return c.prepare(fs)
	},
}

var deliveryResolveCommand = command{
	name: "delivery resolve", synopsis: "[ID…]", max: maxDeliveryIDs,
	summary: "close them without handling, with a note",
	about: `
The next of the key goes on. With flags that pick, or --all, it only counts,
unless --yes is given.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		c := &deliveryChange{action: "resolve", past: "resolved", possible: []string{outboxops.DeliveryPending, outboxops.DeliveryParked, outboxops.DeliveryDead},
			one: (*outboxops.Deliveries).Resolve, all: (*outboxops.Deliveries).ResolveAll}
		c.pick.defineStatus(fs, "PENDING,PARKED,DEAD (all three)")
		return c.prepare(fs)
	},
}

const maxDeliveryIDs = 1000

// deliveryChange requeues or resolves deliveries.
type deliveryChange struct {
	action, past string
	possible     []string // statuses
	one          func(*outboxops.Deliveries, context.Context, int64, outboxops.AuditInfo) error
	all          func(*outboxops.Deliveries, context.Context, outboxops.DeliveryFilter, outboxops.BulkConfig, outboxops.AuditInfo) (int, error)

	pick           deliveryFlags
	why            auditFlags
	any, yes, dryn bool
	rate           int
	streams        map[string]int // of what would be changed
}

func (c *deliveryChange) prepare(fs *flag.FlagSet) func(context.Context, *env) error {
	c.pick.define(fs)
	c.why.define(fs)
	fs.BoolVar(&c.any, "all", false, "all that can be, if no other flag picks")
	fs.BoolVar(&c.yes, "yes", false, "do it; without, what flags pick is only counted")
	fs.BoolVar(&c.dryn, "dry-run", false, "only count, with IDs too")
	fs.IntVar(&c.rate, "rate", 0, "`NUMBER` deliveries in a second at most (1000)")
	return c.run
}

func (c *deliveryChange) run(ctx context.Context, e *env) error {
	filter, err := c.check(e)
	if err != nil {
		return err
	}
	ids, err := e.deliveryIDs()
	if err != nil {
		return err
	}
	why := outboxops.AuditInfo{Operator: "none", Reason: "to count"}
	if !c.dryn {
		if why, err = c.why.info(e); err != nil {
			return err
		}
	}
	deliveries, err := e.deliveries(ctx)
	if err != nil {
		return err
	}
	switch {
	case len(ids) == 0:
		return c.runAll(ctx, e, deliveries, filter, why)
	case c.dryn:
		return c.countThese(ctx, e, deliveries, ids)
	}
	return c.runThese(ctx, e, deliveries, ids, why)
}

// check refuses flags that do not go together.
func (c *deliveryChange) check(e *env) (outboxops.DeliveryFilter, error) {
	filter, picks, err := c.pick.filter(e.now())
	if err != nil {
		return filter, err
	}
	switch {
	case len(e.args) > 0 && (picks || c.any):
		return filter, usagef("IDs, or flags that pick deliveries: not both")
	case len(e.args) == 0 && !picks && !c.any:
		return filter, usagef("name an ID, flags that pick deliveries, or --all")
	case c.yes && c.dryn:
		return filter, usagef("--yes and --dry-run contradict each other")
	case c.rate < 0:
		return filter, usagef("--rate %d: must not be negative", c.rate)
	}
	for _, s := range filter.Statuses {
		if err := oneOf("--status", s, c.possible); err != nil {
			return filter, err
		}
	}
	c.dryn = c.dryn || len(e.args) == 0 && !c.yes
	c.streams = map[string]int{}
	return filter, nil
}

// countThese counts those of some deliveries that can be changed.
func (c *deliveryChange) countThese(ctx context.Context, e *env, deliveries *outboxops.Deliveries, ids []int64) error {
	n := 0
	for _, id := range ids {
		step, cancel := e.step(ctx)
		d, err := deliveries.Get(step, id)
		cancel()
		if err != nil {
			return err
		}
		if slices.Contains(c.possible, d.Status) && (c.action == "requeue" || d.Resolution == "") {
			n++
			c.streams[d.Stream]++
		}
	}
	return c.report(e, n, true)
}

// runThese changes deliveries one by one, in the order of their ids.
func (c *deliveryChange) runThese(ctx context.Context, e *env, deliveries *outboxops.Deliveries, ids []int64, why outboxops.AuditInfo) error {
	for n, id := range ids {
		step, cancel := e.step(ctx)
		err := c.one(deliveries, step, id, why)
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

func (c *deliveryChange) runAll(ctx context.Context, e *env, deliveries *outboxops.Deliveries, filter outboxops.DeliveryFilter, why outboxops.AuditInfo) error {
	n, err := c.all(deliveries, ctx, filter, outboxops.BulkConfig{DryRun: true, Topics: c.streams}, why)
	if err != nil {
		return err
	}
	if c.dryn {
		return c.report(e, n, true)
	}
	p := e.progress(c.past, n)
	n, err = c.all(deliveries, ctx, filter, outboxops.BulkConfig{Rate: c.rate, Progress: p.show}, why)
	p.end()
	return errors.Join(err, c.report(e, n, false))
}

// report says what was done, or would be.
func (c *deliveryChange) report(e *env, n int, dryRun bool) error {
	if e.json {
		doc := map[string]any{"action": c.action, "deliveries": n, "dry_run": dryRun}
		if dryRun {
			doc["streams"] = c.streams
		}
		return e.writeJSON(doc)
	}
	things := plural(int64(n), "delivery", "deliveries")
	if !dryRun {
		e.printf("%s %s\n", c.past, things)
		return nil
	}
	for _, stream := range byCount(c.streams) {
		e.printf("stream %s: %s\n", visible(stream), count(c.streams[stream]))
	}
	e.printf("would %s %s", c.action, things)
	if len(e.args) == 0 && n > 0 {
		e.printf("; --yes does it")
	}
	e.printf("\n")
	return nil
}
