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
// exchange.
type notification struct {
	db   *pgxpool.Pool
	url  string
	http *http.Client
}

func (n notification) handlers() []outbox.Handler {
	return []outbox.Handler{outbox.HandleNoTx("OWNER_NOTIFIED", n.orderAccepted)}
}

const (
	sqlNotify = `INSERT INTO notification_log (event_id, owner_id) VALUES ($1, $2) ON CONFLICT DO NOTHING`
	sqlPushed = `UPDATE notification_log SET pushed_at = now() WHERE event_id = $1`
)

// orderAccepted pushes a message, at most once: who is told twice of one order believes that
// there are two. The event is logged before it is pushed, so one that comes again is not
// pushed. If the process ends in between, or the push fails, the message is missing, and the
// log has no pushed_at.
func (n notification) orderAccepted(ctx context.Context, e OrderAccepted, m outbox.Metadata) error {
	logged, err := n.db.Exec(ctx, sqlNotify, m.ID, e.OwnerID)
	if err != nil || logged.RowsAffected() == 0 {
		return err
	}
	text := fmt.Sprintf("%s %d %s: order %s", e.Side, e.Quantity, e.Market, e.OrderID)
	status, body, err := call(ctx, n.http, http.MethodPost, n.url+"/push", map[string]any{"eventId": m.ID, "owner": e.OwnerID, "text": text})
	if err == nil && status != http.StatusNoContent {
		err = fmt.Errorf("status %d: %s", status, body.Error)
	}
	if err != nil {
		return outbox.Permanent(fmt.Errorf("push: %w", err)) // for an operator to see; nothing is pushed again
	}
	_, err = n.db.Exec(ctx, sqlPushed, m.ID)
	return err
}
