package outbox_test

import (
	"context"
	"log"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxalert"
	"github.com/outboxgo/outbox/outboxhttp"
)

var (
	mux     = http.NewServeMux()
	webhook = "https://hooks.example.com/services/secret"

	routingKey = "0123456789abcdef0123456789abcdef"
	password   = "secret"
)

// A relay with the options that production needs in addition to the defaults.
func ExampleNewRelay() {
	slack, err := outboxalert.Slack(webhook, nil)
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
	mux.Handle("GET /live", outboxhttp.Live(outboxhttp.Relay(relay)))
	mux.Handle("GET /ready", outboxhttp.Ready(outboxhttp.Relay(relay)))
}

// Slack and PagerDuty get every alert, and a mailbox the reports.
func ExampleAlertConfig() {
	slack, err := outboxalert.Slack(webhook, nil)
	if err != nil {
		log.Fatal(err)
	}
	pagerDuty, err := outboxalert.PagerDuty(routingKey, "orders, production", outboxalert.PagerDutyConfig{})
	if err != nil {
		log.Fatal(err)
	}
	mail, err := outboxalert.Mail(outboxalert.MailConfig{
		Server: "mail.example.com:587", From: "outbox@example.com", To: []string{"ops@example.com"}, Username: "outbox", Password: password,
	})
	if err != nil {
		log.Fatal(err)
	}
	alerts := outbox.AlertConfig{Alerter: outboxalert.All(slack, pagerDuty, outboxalert.Only(mail, outbox.AlertReport))}
	_ = outbox.RelayConfig{Alerts: alerts}
}

// archive keeps events for audits. It commits together with their removal from outbox.
func archive(ctx context.Context, tx pgx.Tx, rows []outbox.ArchivedEvent) error {
	_, err := tx.CopyFrom(ctx, pgx.Identifier{"event_archive"}, []string{"event_id", "type", "payload", "occurred_at"},
		pgx.CopyFromSlice(len(rows), func(i int) ([]any, error) {
			return []any{rows[i].EventID, rows[i].Type, rows[i].Payload, rows[i].OccurredAt}, nil
		}))
	return err
}
