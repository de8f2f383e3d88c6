package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/internal/show"
)

// sqlNotifications makes the table of what customers are told, for them to read in the shop. Nothing but
// event_handled keeps a row from being there twice.
const sqlNotifications = `
CREATE TABLE notification (
    order_id    uuid NOT NULL,
    customer_id text NOT NULL,
    state       text NOT NULL,
    text        text NOT NULL
)`

const notificationGroup = "notification"

// notifications tells customers about their orders: once for each state.
type notifications struct {
	http *http.Client
	url  string // of the mail provider
}

// handlers are those of the group notification: a row in the transaction that notes that it is there, and a mail,
// which no transaction can contain.
func (n notifications) handlers() []outbox.Handler {
	return []outbox.Handler{
		outbox.OncePer(outbox.Handle("CUSTOMER_NOTIFIED", notify),
			func(e NotificationRequired, _ outbox.Metadata) (string, string) { return "Notification", e.key() }),
		outbox.HandleNoTx("MAIL_SENT", n.mail),
	}
}

// key is the same for all events that ask for the same message.
func (e NotificationRequired) key() string { return e.order() + "/" + string(e.State) }

const sqlNotify = `INSERT INTO notification (order_id, customer_id, state, text) VALUES ($1, $2, $3, $4)`

func notify(ctx context.Context, tx pgx.Tx, e NotificationRequired, _ outbox.Metadata) error {
	_, err := tx.Exec(ctx, sqlNotify, e.OrderID, e.CustomerID, e.State, e.Text)
	return err
}

const (
	mailAttempts = 3
	mailPause    = 50 * time.Millisecond
	mailWait     = 5 * time.Second
	mailTimeout  = 10 * time.Second
)

// mail sends a mail. It may be called again for the same event: the process was killed behind the request, or no
// answer came. The key says so to the provider, who then sends nothing. It asks again at once, and leaves it to the
// consumer to try later, so that an outage of the provider does not hold up what others do.
func (n notifications) mail(ctx context.Context, e NotificationRequired, _ outbox.Metadata) error {
	body, err := json.Marshal(mail{To: e.CustomerID, Text: e.Text})
	if err != nil {
		return outbox.Permanent(err)
	}
	for attempt := 1; ; attempt++ {
		status, err := n.post(ctx, e.key(), body)
		switch {
		case err == nil && status == http.StatusAccepted:
			return nil
		case err == nil && status < 500 && status != http.StatusTooManyRequests:
			return outbox.Permanent(fmt.Errorf("mail provider: status %d", status))
		case err == nil:
			err = fmt.Errorf("mail provider: status %d", status)
		}
		if attempt == mailAttempts || !show.Pause(ctx, mailPause) {
			return outbox.RetryAfter(err, mailWait)
		}
	}
}

// post returns the status of the answer.
func (n notifications) post(ctx context.Context, key string, body []byte) (int, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, n.url, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	request.Header.Set(idempotencyKey, key)
	answer, err := n.http.Do(request)
	if err != nil {
		return 0, fmt.Errorf("mail provider: %w", err)
	}
	defer func() { _ = answer.Body.Close() }() // it was read
	_, _ = io.Copy(io.Discard, answer.Body)    // for the next request by the connection
	return answer.StatusCode, nil
}
