package main

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
)

// sqlView makes the read model that the customers' app asks (CQRS): it may be a moment behind, and whatever it is
// asked costs the ledger nothing.
const sqlView = `
CREATE TABLE portfolio_view (
    account_id text   PRIMARY KEY,
    balance    bigint NOT NULL,
    sequence   bigint NOT NULL
)`

const (
	viewGroup  = "portfolio-view"
	viewAction = "PORTFOLIO_UPDATED"
)

// view keeps the read model.
type view struct{ db *pgxpool.Pool }

// handlers are those of the group portfolio-view. An event says what the balance is, and its
// sequence number says whether that is news. So an event that comes twice or late changes nothing,
// and handled events need no note.
func (v view) handlers() []outbox.Handler {
	return []outbox.Handler{viewed[LedgerPostedEvent](v), viewed[LedgerReversedEvent](v)}
}

func viewed[E LedgerEvent](v view) outbox.Handler {
	return outbox.HandleNoTx(viewAction, func(ctx context.Context, e E, _ outbox.Metadata) error { return v.show(ctx, e.posted()) })
}

const sqlShow = `
INSERT INTO portfolio_view AS v (account_id, balance, sequence)
VALUES ($1, $2, $3)
    ON CONFLICT (account_id) DO UPDATE SET balance = excluded.balance, sequence = excluded.sequence
 WHERE excluded.sequence > v.sequence`

func (v view) show(ctx context.Context, p Posting) error {
	_, err := v.db.Exec(ctx, sqlShow, p.AccountID, p.Balance, p.Sequence)
	return err
}
