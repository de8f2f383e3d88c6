package main

import (
	"fmt"
	"strconv"
	"time"

	"github.com/outboxgo/outbox"
)

// LedgerEvent is what happens in the ledger. Consumers that treat all of it alike need no more.
type LedgerEvent interface {
	outbox.DomainEvent
	posted() Posting
}

// LedgerPostedEvent says that a transaction is in the ledger.
type LedgerPostedEvent struct {
	Posting
}

// LedgerReversedEvent says that a transaction is in the ledger that takes back another one.
type LedgerReversedEvent struct {
	Posting
	Reverses int64  `json:"reversedTransactionId"`
	Reason   string `json:"reason"`
}

// Posting is what all ledger events have: everything that their consumers need, so that none of them has to ask.
type Posting struct {
	TransactionID int64  `json:"transactionId"`
	AccountID     string `json:"accountId"`
	// Sequence counts the events of the account, from 1 and without gaps: with it anybody can tell whether an event
	// is missing, repeated or early, whatever carried it.
	Sequence int64          `json:"sequence"`
	Change   int64          `json:"change"`  // of the balance, in cents
	Balance  int64          `json:"balance"` // afterwards
	Entries  []JournalEntry `json:"entries"`
	At       time.Time      `json:"occurredAt"`
}

// OccurredAt makes the events outbox.DomainEvents.
func (p Posting) OccurredAt() time.Time { return p.At }

func (p Posting) posted() Posting     { return p }
func (p Posting) transaction() string { return strconv.FormatInt(p.TransactionID, 10) }
func (p Posting) account() string     { return p.AccountID }

// Event returns what is to be told of a transaction, after which the account has a balance.
func (t Transaction) Event(after Balance) LedgerEvent {
	p := Posting{t.ID, t.Account, after.Version, t.Change(), after.Amount, t.Entries, t.At}
	if t.Reverses != 0 {
		return LedgerReversedEvent{p, t.Reverses, t.Reason}
	}
	return LedgerPostedEvent{p}
}

const (
	ledgerPosted   = "LEDGER_POSTED"
	ledgerReversed = "LEDGER_REVERSED"
	aggregate      = "TRANSACTION"
)

// topics say where the events go.
//
// One topic for all events keeps the order of an account: its events have one key, hence one partition. Who wants
// only some types passes over the others, which outbox.SkipUnknown does.
//
// A topic for each type lets consumers subscribe to what they want. But nothing keeps order between topics, so who
// reads both sees a reversal before what it reverses, now and then: such a consumer has to look at Sequence.
type topics struct{ posted, reversed string }

var topicOptions = map[string]topics{
	"one": {"ledger-events", "ledger-events"},
	"two": {"ledger-posted-events", "ledger-reversed-events"},
}

// registry says how events travel. The key is the account, so that its events stay in order; the aggregate is the
// transaction, by which consumers know repeats.
func registry(source, option string) (*outbox.Registry, error) {
	to, ok := topicOptions[option]
	if !ok {
		return nil, fmt.Errorf("-topics is %q, and can be one or two", option)
	}
	return outbox.NewRegistry(source,
		outbox.Event(ledgerPosted, aggregate, LedgerPostedEvent.transaction).Topic(to.posted).Key(LedgerPostedEvent.account),
		outbox.Event(ledgerReversed, aggregate, LedgerReversedEvent.transaction).Topic(to.reversed).Key(LedgerReversedEvent.account),
	)
}
