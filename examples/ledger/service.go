package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

// sqlLedger makes the tables of the ledger.
const sqlLedger = `
CREATE TABLE balance (
    account_id text   PRIMARY KEY,
    amount     bigint NOT NULL DEFAULT 0,
    version    bigint NOT NULL DEFAULT 0
);
CREATE TABLE ledger_transaction (
    id         bigserial   PRIMARY KEY,
    request_id uuid        NOT NULL UNIQUE,
    account_id text        NOT NULL REFERENCES balance,
    reverses   bigint      UNIQUE REFERENCES ledger_transaction,
    reason     text        NOT NULL,
    attempt    int         NOT NULL,
    posted_at  timestamptz NOT NULL
);
CREATE TABLE journal_entry (
    transaction_id bigint NOT NULL REFERENCES ledger_transaction,
    account_id     text   NOT NULL,
    amount         bigint NOT NULL
);
CREATE INDEX journal_entry_transaction_idx ON journal_entry (transaction_id);
CREATE INDEX journal_entry_account_idx ON journal_entry (account_id)`

// recorder is all that the ledger knows of how events travel: there is no Kafka in it.
type recorder interface {
	Record(ctx context.Context, tx pgx.Tx, events ...outbox.DomainEvent) error
}

// inTx runs a function in a transaction and commits it, as outbox.Waker.InTx does.
type inTx func(ctx context.Context, f func(tx pgx.Tx) error) error

// ledger is the service: deposits and reversals. It is safe for concurrent use, in any number of processes.
type ledger struct {
	inTx   inTx
	events recorder
}

// deposit puts money into an account and returns the transaction's id. The request id is the customer's: who does not
// know whether he was heard asks again under the same one, and the deposit is posted once.
func (l ledger) deposit(ctx context.Context, request uuid.UUID, account string, amount int64) (id int64, err error) {
	return l.post(ctx, request, func(pgx.Tx) (Transaction, error) { return Deposit(account, amount, time.Now()) })
}

// reverse takes back a transaction, and returns the id of the one that does.
func (l ledger) reverse(ctx context.Context, request uuid.UUID, id int64, reason string) (int64, error) {
	return l.post(ctx, request, func(tx pgx.Tx) (Transaction, error) {
		t, err := find(ctx, tx, id)
		if err != nil {
			return t, err
		}
		return t.Reversal(reason, time.Now())
	})
}

const (
	maxAttempts = 100
	longestWait = 20 * time.Millisecond // before another attempt
)

// errConflict means that another transaction has changed the balance meanwhile.
var errConflict = errors.New("the balance was changed meanwhile")

// post tries to post what a business method plans, again and again while others are faster. Each attempt is a
// transaction of its own, which takes its event along when it is rolled back: so however many there are,
// one event is left.
func (l ledger) post(ctx context.Context, request uuid.UUID, plan func(pgx.Tx) (Transaction, error)) (id int64, err error) {
	for attempt := 1; ; attempt++ {
		err = l.inTx(ctx, func(tx pgx.Tx) (err error) {
			id, err = l.attempt(ctx, tx, request, attempt, plan)
			return err
		})
		if !errors.Is(err, errConflict) || attempt == maxAttempts {
			return id, err
		}
		select {
		case <-time.After(rand.N(longestWait)):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// attempt writes the transaction, its entries, the balance and the event: all of it commits, or nothing.
func (l ledger) attempt(ctx context.Context, tx pgx.Tx, request uuid.UUID, attempt int, plan func(pgx.Tx) (Transaction, error)) (int64, error) {
	t, err := plan(tx)
	if err != nil {
		return 0, err
	}
	before, err := balanceOf(ctx, tx, t.Account)
	if err != nil {
		return 0, err
	}
	var isNew bool
	if t.ID, isNew, err = insert(ctx, tx, request, attempt, t); err != nil || !isNew {
		return t.ID, err
	}
	after := before.After(t)
	if err := update(ctx, tx, t.Account, before, after); err != nil {
		return 0, err
	}
	// The row of the balance is locked now, until the commit. So the events of an account are recorded in
	// the order of their sequence numbers.
	return t.ID, l.events.Record(ctx, tx, t.Event(after))
}

const sqlBalance = `SELECT amount, version FROM balance WHERE account_id = $1`

func balanceOf(ctx context.Context, tx pgx.Tx, account string) (b Balance, err error) {
	err = tx.QueryRow(ctx, sqlBalance, account).Scan(&b.Amount, &b.Version)
	if errors.Is(err, pgx.ErrNoRows) {
		err = fmt.Errorf("account %q: %w", account, errAccount)
	}
	return b, err
}

const (
	sqlInsert = `
WITH posted AS (
    INSERT INTO ledger_transaction (request_id, account_id, reverses, reason, attempt, posted_at)
    VALUES ($1, $2, nullif($3, 0), $4, $5, $6)
        ON CONFLICT DO NOTHING
    RETURNING id),
     journal AS (
    INSERT INTO journal_entry (transaction_id, account_id, amount)
    SELECT id, e.* FROM posted, unnest($7::text[], $8::bigint[]) AS e)
SELECT id FROM posted`

	sqlPosted = `SELECT id FROM ledger_transaction WHERE request_id = $1`
)

// insert writes a transaction with its entries, and returns its id. It is not new if the request was posted before.
func insert(ctx context.Context, tx pgx.Tx, request uuid.UUID, attempt int, t Transaction) (id int64, isNew bool, err error) {
	accounts, amounts := make([]string, len(t.Entries)), make([]int64, len(t.Entries))
	for i, e := range t.Entries {
		accounts[i], amounts[i] = e.Account, e.Amount
	}
	err = tx.QueryRow(ctx, sqlInsert, request, t.Account, t.Reverses, t.Reason, attempt, t.At, accounts, amounts).Scan(&id)
	if err == nil || !errors.Is(err, pgx.ErrNoRows) {
		return id, err == nil, err
	}
	err = tx.QueryRow(ctx, sqlPosted, request).Scan(&id)
	if errors.Is(err, pgx.ErrNoRows) { // another request has reversed the transaction
		err = fmt.Errorf("transaction %d: %w", t.Reverses, errReversed)
	}
	return id, false, err
}

// sqlUpdate is optimistic locking: it changes nothing if the balance is not the one that was read.
const sqlUpdate = `UPDATE balance SET amount = $3, version = $4 WHERE account_id = $1 AND version = $2`

func update(ctx context.Context, tx pgx.Tx, account string, before, after Balance) error {
	changed, err := tx.Exec(ctx, sqlUpdate, account, before.Version, after.Amount, after.Version)
	if err == nil && changed.RowsAffected() == 0 {
		err = fmt.Errorf("account %s: %w", account, errConflict)
	}
	return err
}

const (
	sqlFind    = `SELECT id, account_id, coalesce(reverses, 0), reason, posted_at FROM ledger_transaction WHERE id = $1`
	sqlEntries = `SELECT account_id, amount FROM journal_entry WHERE transaction_id = $1`
)

func find(ctx context.Context, tx pgx.Tx, id int64) (t Transaction, err error) {
	err = tx.QueryRow(ctx, sqlFind, id).Scan(&t.ID, &t.Account, &t.Reverses, &t.Reason, &t.At)
	if errors.Is(err, pgx.ErrNoRows) {
		return t, fmt.Errorf("transaction %d: %w", id, errUnposted)
	}
	if err != nil {
		return t, err
	}
	rows, _ := tx.Query(ctx, sqlEntries, id) // its error is that of CollectRows
	t.Entries, err = pgx.CollectRows(rows, pgx.RowToStructByPos[JournalEntry])
	return t, err
}
