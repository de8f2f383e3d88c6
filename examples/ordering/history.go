package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox/outboxops"
)

// history returns all events of an order, the oldest first, with their payloads, of all services
// and topics. The index that MigrateConfig.AggregateIndex makes finds them, however many other
// events there are. Events that retention has removed are not there any more.
func history(ctx context.Context, db *pgxpool.Pool, schema string, order uuid.UUID) ([]outboxops.RecordedEvent, error) {
	inspector, err := outboxops.NewInspector(db, outboxops.InspectorConfig{Schema: schema})
	if err != nil {
		return nil, err
	}
	events, err := inspector.Events(ctx, outboxops.EventFilter{AggregateType: aggregate, AggregateID: order.String()}, outboxops.EventPage{})
	if err != nil {
		return nil, err
	}
	slices.Reverse(events)
	for n, e := range events {
		if events[n], err = inspector.Event(ctx, e.OutboxID); err != nil {
			return nil, err
		}
	}
	return events, nil
}

// printHistory prints what happened to an order.
func printHistory(out io.Writer, events []outboxops.RecordedEvent) {
	for _, e := range events {
		where := "" // the progress of Debezium is not known
		switch {
		case len(e.Failures) > 0:
			where = e.Failures[0].Status
		case len(e.AttemptedBy) > 0:
			where = "sent"
		case len(e.PendingFor) > 0:
			where = "waits"
		}
		fmt.Fprintf(out, "  %s  %-5s  %-19s  %-39s  %s\n", e.OccurredAt.Format("15:04:05.000"), where, e.Topic, e.Type, said(e))
	}
}

// said returns the payload of an event, without what its line says already.
func said(e outboxops.RecordedEvent) []byte {
	members := map[string]json.RawMessage{}
	if json.Unmarshal(e.Payload, &members) != nil {
		return e.Payload
	}
	delete(members, "orderId")
	delete(members, "occurredAt")
	short, err := json.Marshal(members)
	if err != nil {
		return e.Payload
	}
	return short
}

// look prints the history of an order of a run.
func look(ctx context.Context, cfg config, out io.Writer) error {
	a, err := open(ctx, cfg)
	if err != nil {
		return err
	}
	defer a.db.Close()
	events, err := history(ctx, a.db, a.schema, cfg.order)
	if err != nil {
		return err
	}
	if len(events) == 0 {
		return fmt.Errorf("order %s: %w", cfg.order, errUnknown)
	}
	printHistory(out, events)
	return nil
}
