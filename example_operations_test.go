package outbox_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxhttp"
)

var (
	mux     = http.NewServeMux()
	webhook = "https://hooks.example.com/services/secret"
)

// A relay with what production needs beside the defaults.
func ExampleNewRelay() {
	slack, err := outboxhttp.Slack(webhook, nil)
	if err != nil {
		log.Fatal(err)
	}
	relay, err := outbox.NewRelay(db, kafka, outbox.RelayConfig{
		HoldDead:       true, // a dead event holds its key until an operator decides
		RetryDeadAfter: map[string]time.Duration{"message_too_large": time.Hour},
		Alerts:         outbox.AlertConfig{Alerter: slack},
		Retention: outbox.RetentionConfig{
			PublishedFor: 3 * 24 * time.Hour,
			HandledFor:   60 * 24 * time.Hour, // above the retention of every topic that is consumed
			Archive:      archive,
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	mux.Handle("GET /live", outboxhttp.Live(relay))
	mux.Handle("GET /ready", outboxhttp.Ready(relay))
}

// archive keeps events for audits. It commits together with their removal from outbox.
func archive(ctx context.Context, tx pgx.Tx, rows []outbox.ArchivedEvent) error {
	_, err := tx.CopyFrom(ctx, pgx.Identifier{"event_archive"}, []string{"event_id", "type", "payload", "occurred_at"},
		pgx.CopyFromSlice(len(rows), func(i int) ([]any, error) {
			return []any{rows[i].EventID, rows[i].Type, rows[i].Payload, rows[i].OccurredAt}, nil
		}))
	return err
}

// Retry what was too large, after its topic takes larger records.
func ExampleFailedEvents() {
	failed, err := outbox.NewFailedEvents(db, outbox.FailedEventsConfig{})
	if err != nil {
		log.Fatal(err)
	}
	tooLarge := outbox.FailedFilter{Statuses: []string{outbox.StatusDead}, Class: "message_too_large"}
	why := outbox.Decision{Operator: "ada", Reason: "limit raised, ticket 4711"}
	retried, err := failed.RetryAll(ctx, tooLarge, outbox.BulkConfig{Rate: 100}, why)
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("%d events will be sent again", retried)
}

// A process without a relay, which alerts even when no relay runs any more.
func ExampleMonitor() {
	slack, err := outboxhttp.Slack(webhook, nil)
	if err != nil {
		log.Fatal(err)
	}
	monitor, err := outbox.NewMonitor(db, outbox.MonitorConfig{Alerts: outbox.AlertConfig{Alerter: slack, StaleAfter: time.Minute}})
	if err != nil {
		log.Fatal(err)
	}
	if err := monitor.Run(ctx); err != nil {
		log.Fatal(err)
	}
}

func ExampleInspector_Relays() {
	inspector, err := outbox.NewInspector(db, outbox.InspectorConfig{})
	if err != nil {
		log.Fatal(err)
	}
	relays, err := inspector.Relays(ctx)
	if err != nil {
		log.Fatal(err)
	}
	for _, r := range relays {
		fmt.Printf("%s: led by %q, %d events pending, %d dead\n", r.Name, r.Holder, r.Pending, r.Dead)
	}
}
