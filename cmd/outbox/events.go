package main

import (
	"context"
	"flag"
	"fmt"

	"github.com/outboxgo/outbox/outboxops"
)

var eventsCommand = command{
	name:    "events list",
	summary: "recorded events, the newest first",
	about: `
Shows events in outbox, sent or not, and which relays have not attempted them
yet. --aggregate is slow without the index of outbox migrate up
--aggregate-index.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var l eventList
		fs.Var(&l.of, "aggregate", "`TYPE[/ID]` of the aggregate, Order/42")
		fs.StringVar(&l.filter.Type, "type", "", "`TYPE` of the event, shop.order.created.v1")
		fs.StringVar(&l.filter.EventID, "id", "", "`UUID` of the event")
		fs.Int64Var(&l.page.Before, "before", 0, "`OUTBOX-ID` only older events")
		fs.IntVar(&l.page.Limit, "limit", 0, "`NUMBER` of events (100)")
		fs.BoolVar(&l.payload, "payload", false, "with payloads")
		return l.run
	},
}

type eventList struct {
	filter  outboxops.EventFilter
	of      aggregate
	page    outboxops.EventPage
	payload bool
}

func (l *eventList) run(ctx context.Context, e *env) error {
	inspector, err := e.inspector(ctx)
	if err != nil {
		return err
	}
	l.filter.AggregateType, l.filter.AggregateID = l.of.kind, l.of.id
	if err := l.hint(ctx, e, inspector); err != nil {
		return err
	}
	events, err := inspector.Events(ctx, l.filter, l.page)
	if err != nil {
		return err
	}
	listed := []listedJSON{}
	for _, event := range events {
		pending := event.PendingFor
		if l.payload {
			if event, err = inspector.Event(ctx, event.OutboxID); err != nil {
				return err
			}
		}
		if e.json {
			listed = append(listed, listedJSON{recordedOf(event), append([]string{}, pending...)})
			continue
		}
		if err := (&tailFlags{payload: l.payload}).show(e, event); err != nil {
			return err
		}
		if len(pending) > 0 {
			e.printf("  not attempted yet by %s\n", visible(fmt.Sprint(pending)))
		}
	}
	if e.json {
		return e.writeJSON(map[string]any{"events": listed})
	}
	return nil
}

// listedJSON is an event in the output.
type listedJSON struct {
	recordedJSON

	PendingFor []string `json:"pending_for"`
}

// hint says how to get the index that finds the events of an aggregate.
func (l *eventList) hint(ctx context.Context, e *env, inspector *outboxops.Inspector) error {
	if l.of.id == "" {
		return nil
	}
	has, err := inspector.HasAggregateIndex(ctx)
	if err == nil && !has {
		fmt.Fprintln(e.stderr, "There is no index on aggregates, so this may take long. outbox migrate up --aggregate-index makes it.")
	}
	return err
}
