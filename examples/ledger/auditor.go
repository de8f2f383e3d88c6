package main

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// auditor is the auditors' side: it reads the feed from the first row to the last, and knows nothing of the ledger but
// the contract. The sequence numbers of an account must be 1, 2, 3 and so on, each of its balances must follow from
// the one before, and the entries of each transaction must have the sum zero.
type auditor struct {
	rows, repeats, late, wrongBalance, unbalanced int

	accounts map[string]*history
}

// history is what the auditor has seen of an account.
type history struct {
	last    int64 // the highest sequence number
	balance int64 // after it
	missing map[int64]bool
}

const sqlReadFeed = `SELECT payload FROM audit_feed ORDER BY position`

// read reads the feed.
func (a *auditor) read(ctx context.Context, db *pgxpool.Pool) error {
	rows, _ := db.Query(ctx, sqlReadFeed) // its error is that of ForEachRow
	var payload []byte
	_, err := pgx.ForEachRow(rows, []any{&payload}, func() error {
		var p Posting
		if err := json.Unmarshal(payload, &p); err != nil {
			return fmt.Errorf("payload %d: %w", a.rows+1, err)
		}
		a.next(p)
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the feed: %w", err)
	}
	return nil
}

// next looks at a row.
func (a *auditor) next(p Posting) {
	a.rows++
	if (Transaction{Entries: p.Entries}).check() != nil {
		a.unbalanced++
	}
	h, known := a.accounts[p.AccountID]
	if !known {
		h = &history{missing: map[int64]bool{}}
		if a.accounts == nil {
			a.accounts = map[string]*history{}
		}
		a.accounts[p.AccountID] = h
	}
	switch {
	case h.missing[p.Sequence]:
		a.late++
		delete(h.missing, p.Sequence)
		return
	case p.Sequence <= h.last:
		a.repeats++
		return
	case p.Sequence == h.last+1 && p.Balance != h.balance+p.Change:
		a.wrongBalance++
	}
	for ; h.last+1 < p.Sequence; h.last++ {
		h.missing[h.last+1] = true
	}
	h.last, h.balance = p.Sequence, p.Balance
}

// gaps is how many events are missing.
func (a *auditor) gaps() (n int) {
	for _, h := range a.accounts {
		n += len(h.missing)
	}
	return n
}
