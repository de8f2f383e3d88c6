package main

import (
	"context"
	"fmt"
	"net/http"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
)

// sqlNotifications makes the table that keeps a message from being pushed twice.
const sqlNotifications = `
CREATE TABLE notification_log (
    event_id   uuid        NOT NULL UNIQUE,
    owner_id   text        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    pushed_at  timestamptz
)`

// notification is the group notification: it tells owners by push that their order is at the
// exchange, or that the exchange has not answered yet.
type notification struct {
	db   *pgxpool.Pool
	url  string
	http *http.Client
}

func (n notification) handlers() []outbox.Handler {
	return []outbox.Handler{
		outbox.HandleNoTx("OWNER_NOTIFIED", n.orderAccepted),
		outbox.HandleNoTx("OWNER_WARNED", n.orderOverdue),
	}
}

const (
	sqlNotify = `INSERT INTO notification_log (event_id, owner_id) VALUES ($1, $2) ON CONFLICT DO NOTHING`
	sqlPushed = `UPDATE notification_log SET pushed_at = now() WHERE event_id = $1`
)

func (n notification) orderAccepted(ctx context.Context, e OrderAccepted, m outbox.Metadata) error {
	return n.push(ctx, m.ID, e.OrderIntent, "order "+e.OrderID)
}

func (n notification) orderOverdue(ctx context.Context, e OrderOverdue, m outbox.Metadata) error {
	return n.push(ctx, m.ID, e.OrderIntent, "the exchange has not answered yet")
}

// push sends a message, at most once: an owner who is told twice of one order believes that
// there are two. The event is logged before the message is sent, so an event that comes again sends
// nothing. If the process ends in between, or the push fails, the message is missing, and the
// log has no pushed_at.
func (n notification) push(ctx context.Context, eventID string, i OrderIntent, news string) error {
	logged, err := n.db.Exec(ctx, sqlNotify, eventID, i.OwnerID)
	if err != nil || logged.RowsAffected() == 0 {
		return err
	}
	text := fmt.Sprintf("%s %d %s: %s", i.Side, i.Quantity, i.Market, news)
	status, body, err := call(ctx, n.http, http.MethodPost, n.url+"/push", map[string]any{"eventId": eventID, "owner": i.OwnerID, "text": text})
	if err == nil && status != http.StatusNoContent {
		err = fmt.Errorf("status %d: %s", status, body.Error)
	}
	if err != nil {
		return outbox.Permanent(fmt.Errorf("push: %w", err)) // for an operator to see; nothing is pushed again
	}
	_, err = n.db.Exec(ctx, sqlPushed, eventID)
	return err
}
