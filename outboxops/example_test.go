package outboxops_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

var (
	ctx context.Context
	db  *pgxpool.Pool
)

// Retry events that were too large before the topic's limit was raised. The audit keeps the operator and
// the reason.
func ExampleFailures_RetryAll() {
	failures, err := outboxops.NewFailures(db, outboxops.FailuresConfig{})
	if err != nil {
		log.Fatal(err)
	}
	tooLarge := outboxops.FailureFilter{Class: "message_too_large", Statuses: []string{outbox.StatusDead}}
	why := outboxops.AuditInfo{Operator: "kim", Reason: "max.message.bytes of order-events is 4 MiB now"}
	n, err := failures.RetryAll(ctx, tooLarge, outboxops.BulkConfig{Rate: 100}, why)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("retried:", n)
}

// List failures, the latest first. Get returns one failure with its payload.
func ExampleFailures_List() {
	failures, err := outboxops.NewFailures(db, outboxops.FailuresConfig{})
	if err != nil {
		log.Fatal(err)
	}
	dead, err := failures.List(ctx, outboxops.FailureFilter{Statuses: []string{outbox.StatusDead}}, outboxops.FailurePage{Limit: 50})
	if err != nil {
		log.Fatal(err)
	}
	for _, f := range dead {
		fmt.Println(f.ID, f.Group, f.Action, f.Topic, f.Key, f.Class, f.Retries, f.Err)
	}
}

// An id is made of a kind and a number, and has a text form for pages and command lines.
func ExampleParseFailureID() {
	id, err := outboxops.ParseFailureID("event-17")
	if err != nil {
		panic(err)
	}
	fmt.Println(id.Kind, id.Number, id)
	// Output: event 17 event-17
}

// Resolve settles a failure without sending it.
func ExampleFailures_Resolve() {
	failures, err := outboxops.NewFailures(db, outboxops.FailuresConfig{})
	if err != nil {
		log.Fatal(err)
	}
	id := outboxops.FailureID{Kind: outboxops.KindEvent, Number: 17}
	err = failures.Resolve(ctx, id, outboxops.AuditInfo{Operator: "kim", Reason: "a test order"})
	if errors.Is(err, outboxops.ErrNotFound) {
		fmt.Println("it was sent meanwhile")
	} else if err != nil {
		log.Fatal(err)
	}
}

// Edit gives a dead delivery another payload. Its group and action handle it; all others get the event as it was
// recorded. CheckEdit makes the same checks, and changes nothing.
func ExampleFailures_Edit() {
	failures, err := outboxops.NewFailures(db, outboxops.FailuresConfig{})
	if err != nil {
		log.Fatal(err)
	}
	id := outboxops.FailureID{Kind: outboxops.KindDelivery, Number: 17}
	payload := []byte(`{"order": 4711, "currency": "EUR"}`)
	why := outboxops.AuditInfo{Operator: "kim", Reason: "the currency was missing, ticket 4711"}
	if err := failures.CheckEdit(ctx, id, payload, why); err != nil {
		log.Fatal(err)
	}
	if err := failures.Edit(ctx, id, payload, why); err != nil {
		log.Fatal(err)
	}
}

// Retry the deliveries that died while the exchange was unavailable.
func ExampleFailures_RetryAll_deliveries() {
	failures, err := outboxops.NewFailures(db, outboxops.FailuresConfig{})
	if err != nil {
		log.Fatal(err)
	}
	timeouts := outboxops.FailureFilter{Group: "trading", Action: "ORDER_PLACED", Class: "timeout"}
	why := outboxops.AuditInfo{Operator: "kim", Reason: "the exchange is back"}
	n, err := failures.RetryAll(ctx, timeouts, outboxops.BulkConfig{Rate: 100}, why)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("retried:", n)
}

// Count the failures that are not resolved yet, by type.
func ExampleFailures_Unresolved() {
	failures, err := outboxops.NewFailures(db, outboxops.FailuresConfig{})
	if err != nil {
		log.Fatal(err)
	}
	unresolved, err := failures.Unresolved(ctx)
	if err != nil {
		log.Fatal(err)
	}
	for _, u := range unresolved {
		fmt.Println(u.Kind, u.Type, u.Failures, "oldest", time.Since(u.Oldest))
	}
}

// Count the deliveries of handlers, with the time of the oldest.
func ExampleDeliveries_Count() {
	deliveries, err := outboxops.NewDeliveries(db, outboxops.DeliveriesConfig{})
	if err != nil {
		log.Fatal(err)
	}
	counts, err := deliveries.Count(ctx, outboxops.DeliveryFilter{})
	if err != nil {
		log.Fatal(err)
	}
	for _, c := range counts {
		fmt.Println(c.Group, c.Stream, c.Action, c.Status, c.Deliveries, "oldest", time.Since(c.Oldest))
	}
}

// The state of each relay comes from the database, so any process can show it.
func ExampleInspector_Relays() {
	inspector, err := outboxops.NewInspector(db, outboxops.InspectorConfig{})
	if err != nil {
		log.Fatal(err)
	}
	relays, err := inspector.Relays(ctx)
	if err != nil {
		log.Fatal(err)
	}
	for _, r := range relays {
		fmt.Println(r.Name, "led by", r.Holder, "pending", r.Pending, "dead", r.Dead)
	}
}

// Timeline tells what became of an event, by its outbox.id or its event id.
func ExampleInspector_Timeline() {
	inspector, err := outboxops.NewInspector(db, outboxops.InspectorConfig{})
	if err != nil {
		log.Fatal(err)
	}
	timeline, err := inspector.Timeline(ctx, "0193a0f2-1c5e-7b7a-8a55-0d6c3a0e5b11")
	if errors.Is(err, outboxops.ErrNotFound) {
		fmt.Println("no table knows it")
	} else if err != nil {
		log.Fatal(err)
	}
	for _, e := range timeline.Entries {
		fmt.Println(e.At, e.What, e.Err, e.Table, e.Failure)
	}
}

// Tail yields events as they are committed, until ctx ends.
func ExampleInspector_Tail() {
	inspector, err := outboxops.NewInspector(db, outboxops.InspectorConfig{})
	if err != nil {
		log.Fatal(err)
	}
	for event, err := range inspector.Tail(ctx, outboxops.EventFilter{}) {
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(event.Type, event.EventID)
	}
}

// A process without a relay alerts, too, which also reports that no relay runs.
func ExampleMonitor_Run() {
	monitor, err := outboxops.NewMonitor(db, outboxops.MonitorConfig{Alerts: outbox.AlertConfig{StaleAfter: time.Minute}})
	if err != nil {
		log.Fatal(err)
	}
	if err := monitor.Run(ctx); err != nil {
		log.Fatal(err)
	}
}

func TestExamples(t *testing.T) {
	// Not parallel: it sets the variables that the examples share.
	ctx, db = t.Context(), testenv.OtherDatabase(t)
	require.NoError(t, outbox.Migrate(ctx, db, outbox.MigrateConfig{}))
	ExampleFailures_List()
	ExampleFailures_RetryAll()
	ExampleFailures_Resolve()
	ExampleFailures_RetryAll_deliveries()
	ExampleFailures_Unresolved()
	ExampleDeliveries_Count()
	ExampleInspector_Relays()
	ExampleInspector_Timeline()

	stopped, stop := context.WithCancel(t.Context())
	stop() // those that run until they are stopped return at once
	ctx = stopped
	ExampleInspector_Tail()
	ExampleMonitor_Run()
}
