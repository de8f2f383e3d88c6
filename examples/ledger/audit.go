package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

// sqlFeed makes the feed for the external auditors. Its columns are the contract with them: see the
// README. No role can change its rows.
const sqlFeed = `
CREATE TABLE audit_feed (
    position       bigserial   PRIMARY KEY,
    account_id     text        NOT NULL,
    sequence       bigint      NOT NULL,
    event_id       uuid        NOT NULL,
    event_type     text        NOT NULL,
    transaction_id bigint      NOT NULL,
    occurred_at    timestamptz NOT NULL,
    received_at    timestamptz NOT NULL DEFAULT now(),
    payload        jsonb       NOT NULL
);
CREATE INDEX audit_feed_account_idx ON audit_feed (account_id, sequence);
CREATE FUNCTION audit_feed_is_append_only() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'audit_feed is append-only'; END $$;
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_feed EXECUTE FUNCTION audit_feed_is_append_only()`

const (
	auditGroup  = "audit-feed"
	auditAction = "AUDIT_FEED_APPENDED"
)

// auditHandlers are those of the group audit-feed.
func auditHandlers() []outbox.Handler {
	return []outbox.Handler{audited[LedgerPostedEvent](), audited[LedgerReversedEvent]()}
}

// audited appends events to the feed, each transaction once: the row of the feed and the note that the transaction
// is in it commit together. So a record that Kafka has twice, after a crash of the relay for example, changes nothing.
func audited[E LedgerEvent]() outbox.Handler {
	appended := func(ctx context.Context, tx pgx.Tx, e E, m outbox.Metadata) error { return appendToFeed(ctx, tx, e, m) }
	return outbox.OncePer(outbox.Handle(auditAction, appended), func(e E, _ outbox.Metadata) (string, string) {
		return aggregate, e.posted().transaction()
	})
}

// errEarly means that an event has come before the one in front of it.
var errEarly = errors.New("the feed does not have the account's event before this one")

// sqlAppend appends an event if it is the next one of its account.
const sqlAppend = `
INSERT INTO audit_feed (account_id, sequence, event_id, event_type, transaction_id, occurred_at, payload)
SELECT $1, $2::bigint, $3, $4, $5, $6, $7
 WHERE $2::bigint = 1 + coalesce((SELECT max(sequence) FROM audit_feed WHERE account_id = $1), 0)`

// appendToFeed verifies the order itself. With one topic each event is the next of its account.
// With two, an early event waits until the event before it is in the feed. Others go on meanwhile.
func appendToFeed(ctx context.Context, tx pgx.Tx, e LedgerEvent, m outbox.Metadata) error {
	payload, err := json.Marshal(e)
	if err != nil {
		return err
	}
	p := e.posted()
	added, err := tx.Exec(ctx, sqlAppend, p.AccountID, p.Sequence, m.ID, m.Type, p.TransactionID, p.At, payload)
	if err != nil {
		return err
	}
	if added.RowsAffected() == 0 {
		return outbox.RetryAfter(fmt.Errorf("account %s, sequence %d: %w", p.AccountID, p.Sequence, errEarly), earlyWait)
	}
	return nil
}

const earlyWait = 50 * time.Millisecond

// retries says how often an event is tried again before operators have to look. One that is early waits for as long as
// the other takes.
func retries(err error) int {
	if errors.Is(err, errEarly) {
		return math.MaxInt
	}
	return 10
}
