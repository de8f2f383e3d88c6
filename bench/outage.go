package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/schedule"
	"github.com/outboxgo/outbox/bench/internal/stats"
	"github.com/twmb/franz-go/pkg/kadm"
	"golang.org/x/sync/errgroup"
)

const (
	minOutage   = 3   // seconds that it takes a breaker to open, and to try again
	outageRate  = 200 // transactions per second of the writer that goes on
	outageFirst = 100 // events that arrive before Kafka leaves
	outageLook  = 20 * time.Millisecond
)

// outage is an absence of Kafka during which events pile up.
type outage struct {
	*bench
	stock *stock
	rec   *outbox.Recorder
	small int // events of the writer that goes on; those of the other one come behind
	ends  kadm.ListedOffsets
}

// outage compares the drain of what has piled up with the bare pipe, and with a
// relay that drains the same without an outage.
func (b *bench) outage(ctx context.Context) error {
	s, err := b.stock(ctx, b.cfg.events)
	if err != nil {
		return err
	}
	batch, err := b.bestBatch(ctx, s)
	if err != nil {
		return err
	}
	runs := map[string][]used{}
	for n := range b.cfg.runs {
		o, err := b.newOutage(ctx, n)
		if err != nil {
			return err
		}
		u, err := o.survive(ctx)
		if err != nil {
			return fmt.Errorf("relay through an outage: %w", err)
		}
		b.say("%d/%d outage/relay: %s events/s, %.1f µs CPU/event, the first after %.1f s; the breaker opened %d times, %d events came again",
			n+1, b.cfg.runs, report.Number(u.rate()), u.cpu(), u.Notice.Seconds(), u.Opened, u.Repeats)
		runs["outage/relay"] = append(runs["outage/relay"], u)
		for _, c := range []contestant{
			{"outage/pipe", o.stock, job{Work: "pipe", Batch: batch}},
			{"outage/without", o.stock, job{Work: "relay"}},
		} {
			u, err := b.compete(ctx, round{n, b.cfg.runs}, c)
			if err != nil {
				return err
			}
			runs[c.name] = append(runs[c.name], u)
		}
		if err := b.DropSchema(ctx, o.stock.schema); err != nil {
			return err
		}
	}
	b.reportOutage(runs)
	return nil
}

func (b *bench) reportOutage(runs map[string][]used) {
	rates := func(name string) stats.Series { return each(runs[name], used.rate) }
	cpu := func(name string) stats.Series { return each(runs[name], used.cpu) }
	pipe, without, relay := rates("outage/pipe"), rates("outage/without"), rates("outage/relay")
	opened, repeats := 0, 0
	for _, u := range runs["outage/relay"] {
		opened, repeats = max(opened, u.Opened), max(repeats, u.Repeats)
	}
	b.report.Note("outage: %g s, the breaker opened up to %d times, up to %d events came again", b.cfg.outage, opened, repeats)
	b.report.Add(report.Measured("outage/pipe", "events/s", pipe),
		report.Compared("outage/without", "events/s", without, "outage/pipe", pipe),
		report.Compared("outage/relay", "events/s", relay, "outage/pipe", pipe).RatioAtLeast(0.8),
		report.Compared("outage/relay", "events/s", relay, "outage/without", without),
		report.Measured("outage/without-cpu", "µs/event", cpu("outage/without")),
		report.Compared("outage/relay-cpu", "µs/event", cpu("outage/relay"), "outage/without-cpu", cpu("outage/without")),
		report.Measured("outage/notice", "ms", each(runs["outage/relay"], used.notice)))
}

// newOutage makes a place for one.
func (b *bench) newOutage(ctx context.Context, round int) (o *outage, err error) {
	o = &outage{bench: b, small: outageFirst + int(b.cfg.outage*outageRate)}
	o.stock = &stock{events: o.small + b.cfg.events}
	if o.stock.schema, err = b.NewSchema(ctx, fmt.Sprintf("outage%d", round)); err != nil {
		return nil, err
	}
	if o.rec, err = b.Recorder(o.stock.schema); err != nil {
		return nil, err
	}
	o.ends, err = b.Ends(ctx)
	return o, err
}

// survive lets a relay live through the outage, and returns what the drain cost,
// if all events came, and in order.
func (o *outage) survive(ctx context.Context) (u used, err error) {
	j := o.prepare(job{Work: "outage", Outage: seconds(o.cfg.outage), Relay: o.stock.relayName()}, o.stock)
	err = spawn(ctx, j, o.stderr, &u, func(send func(order) error) error { return o.happen(ctx, send) })
	if err != nil {
		return u, err
	}
	if u.Opened == 0 {
		return u, errors.New("the breaker never opened: -outage is too short")
	}
	if u.Repeats, err = o.verify(ctx); err != nil {
		return u, err
	}
	return u, errors.Join(o.NothingFailed(ctx, o.stock.schema), o.EmptyTopic(ctx))
}

// happen lets Kafka leave and return. One writer goes on throughout; another one
// makes the backlog.
func (o *outage) happen(ctx context.Context, send func(order) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		return schedule.Pace(ctx, outageRate, o.small, 1, func(ctx context.Context, n int) error {
			return recordEvents(ctx, o.bench, o.rec, orders.NewMany(n, 1))
		})
	})
	g.Go(func() error {
		if err := o.awaitFirst(ctx); err != nil {
			return err
		}
		if err := send(kafkaStops); err != nil {
			return err
		}
		over := time.Now().Add(seconds(o.cfg.outage))
		if err := o.load(ctx, o.stock.schema, o.small, o.cfg.events, smallEvents); err != nil {
			return err
		}
		return schedule.Sleep(ctx, time.Until(over))
	})
	if err := g.Wait(); err != nil {
		return err
	}
	return send(kafkaReturns)
}

// awaitFirst waits until the relay relays.
func (o *outage) awaitFirst(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, laps.Patience)
	defer cancel()
	for {
		n, err := o.producedSince(ctx)
		if err != nil || n >= outageFirst {
			return err
		}
		if err := schedule.Sleep(ctx, outageLook); err != nil {
			return fmt.Errorf("relay has sent %d events: %w", n, err)
		}
	}
}

// producedSince returns how many records the topic has received since the
// beginning of the outage's round.
func (o *outage) producedSince(ctx context.Context) (int, error) {
	n, err := o.Produced(ctx)
	o.ends.Each(func(end kadm.ListedOffset) { n -= end.Offset })
	return int(n), err
}

// verify reads all that was produced, and returns how many events came again.
func (o *outage) verify(ctx context.Context) (repeats int, err error) {
	left, err := o.producedSince(ctx)
	if err != nil {
		return 0, err
	}
	r, err := o.readFrom(o.ends)
	if err != nil {
		return 0, err
	}
	defer r.Client.Close()
	t := newTally(o.stock.events, o.small)
	for left > 0 {
		fetches := r.Client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return 0, fmt.Errorf("read topic with %d records left: %w", left, err)
		}
		for record := range fetches.RecordsAll() {
			left--
			n, err := orders.Number(record.Value)
			if err == nil {
				err = t.see(n, string(record.Key))
			}
			if err != nil {
				return 0, err
			}
		}
	}
	return t.repeats, t.complete()
}

// tally checks that all events of two writers arrive, those of a key in the order
// in which each of them wrote. Which writer came first is not known.
type tally struct {
	small   int // events of the first writer
	seen    []bool
	writers [2]laps.OrderCheck
	repeats int
}

func newTally(events, small int) *tally {
	return &tally{small: small, seen: make([]bool, events), writers: [2]laps.OrderCheck{{}, {}}}
}

// see takes the arrival of event n.
func (t *tally) see(n int, key string) error {
	if n < 0 || n >= len(t.seen) {
		return fmt.Errorf("event %d arrived, and was never recorded", n)
	}
	if t.seen[n] {
		t.repeats++
		return nil
	}
	t.seen[n] = true
	writer := t.writers[0]
	if n >= t.small {
		writer = t.writers[1]
	}
	return writer.See(key, int64(n), int64(n))
}

// complete returns an error if an event has not arrived.
func (t *tally) complete() error {
	if n := slices.Index(t.seen, false); n >= 0 {
		return fmt.Errorf("event %d did not arrive", n)
	}
	return nil
}
