package main

import (
	"errors"
	"fmt"
	"time"
)

// The domain: what a transaction of the ledger is. Nothing here knows PostgreSQL or Kafka.

// The accounts of the house. They have no balance of their own, which each deposit would wait for: theirs is the
// sum of their entries.
const (
	bank = "house:bank"
	fees = "house:fees"
)

const (
	feeDivisor = 100           // a deposit costs one percent, rounded down
	maxDeposit = 10_000_000_00 // cents
)

// The reasons why the ledger refuses something. No retry would help.
var (
	errAmount   = errors.New("the amount is not between 1 cent and the limit")
	errBalanced = errors.New("the entries do not balance")
	errAccount  = errors.New("there is no such account")
	errReversed = errors.New("it is reversed already, or is a reversal")
	errUnposted = errors.New("there is no such transaction")
)

// JournalEntry is one side of a transaction. What goes into an account is positive.
type JournalEntry struct {
	Account string `json:"account"`
	Amount  int64  `json:"amount"` // cents
}

// Transaction moves money between accounts, of which one is a customer's.
type Transaction struct {
	ID       int64 // 0 until it is posted
	Account  string
	Entries  []JournalEntry
	Reverses int64 // another transaction, or 0
	Reason   string
	At       time.Time
}

// Deposit returns a transaction that puts money into an account, less the fee.
func Deposit(account string, amount int64, at time.Time) (Transaction, error) {
	if amount < 1 || amount > maxDeposit {
		return Transaction{}, fmt.Errorf("deposit of %d: %w", amount, errAmount)
	}
	fee := amount / feeDivisor
	t := Transaction{Account: account, At: at, Entries: []JournalEntry{{bank, -amount}, {account, amount - fee}}}
	if fee > 0 {
		t.Entries = append(t.Entries, JournalEntry{fees, fee})
	}
	return t, t.check()
}

// Reversal returns a transaction that takes back another one. The other one stays as it is: nothing is ever
// removed from a ledger.
func (t Transaction) Reversal(reason string, at time.Time) (Transaction, error) {
	if t.Reverses != 0 {
		return Transaction{}, fmt.Errorf("transaction %d: %w", t.ID, errReversed)
	}
	r := Transaction{Account: t.Account, Reverses: t.ID, Reason: reason, At: at}
	for _, e := range t.Entries {
		r.Entries = append(r.Entries, JournalEntry{e.Account, -e.Amount})
	}
	return r, r.check()
}

// check requires two entries or more whose sum is zero.
func (t Transaction) check() error {
	var sum int64
	for _, e := range t.Entries {
		sum += e.Amount
	}
	if len(t.Entries) < 2 || sum != 0 {
		return fmt.Errorf("%d entries with the sum %d: %w", len(t.Entries), sum, errBalanced)
	}
	return nil
}

// Change is what the transaction adds to the customer's balance.
func (t Transaction) Change() (cents int64) {
	for _, e := range t.Entries {
		if e.Account == t.Account {
			cents += e.Amount
		}
	}
	return cents
}

// Balance is that of a customer's account.
type Balance struct {
	Amount int64 // cents
	// Version grows by one with each transaction of the account. It is what optimistic locking compares, and
	// the sequence number of the account's events.
	Version int64
}

// After returns the balance after a transaction.
func (b Balance) After(t Transaction) Balance {
	return Balance{b.Amount + t.Change(), b.Version + 1}
}
