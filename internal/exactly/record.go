// Package exactly sends events in Kafka transactions, for a relay in the mode "exactly once". Each transaction has
// the events of a batch and one [Record] in a compacted topic of the relay, which says how far the relay has come.
// So the events of a batch and the position behind them become visible together, or not at all.
//
// The relay uses two transactional ids in turn, because a broker lets the next transaction of an id wait until the
// markers of the one before are written. It keeps these rules, which spec/ExactlyOnce.tla checks:
//
//   - A transaction is committed only after Kafka has confirmed the commit of the one before. If that fails, it is
//     not committed.
//   - A start initializes both ids, which ends what a predecessor has left open, and reads the topic to its end only
//     then. The topic has ended when nothing in it is open.
//   - After any error that is no refusal of a record, the clients are closed, and the relay starts again: only the
//     topic knows whether a transaction was committed.
package exactly

import (
	"encoding/json"
	"errors"
	"fmt"
)

// Record is the value of a cursor record: how far the relay has come once its transaction is committed.
type Record struct {
	// Number of the transaction; each has a higher one than those before.
	Number int64 `json:"number"`
	// System is the identifier of the PostgreSQL cluster whose relay wrote the record. Databases of one name in two
	// clusters have the same key. It is 0 in records of releases that do not write it.
	System int64 `json:"system,omitempty"`
	// Row and Token name a row of outbox_cursor, whose window the relay has opened. Ids alone do not: after a
	// failover to a server that lagged, they are given out again.
	Row   int64  `json:"row"`
	Token string `json:"token"`
	// Last is the highest outbox.id of that window that has an outcome.
	Last int64 `json:"last"`
	// Again are the ids of rows of outbox_failed whose events were sent, by this transaction or by earlier ones, and
	// that were there when the row was written.
	Again []int64 `json:"again,omitempty"`
}

// MaxAgain bounds Record.Again.
const MaxAgain = 10_000

func parseRecord(value []byte) (r Record, err error) {
	if err = json.Unmarshal(value, &r); err == nil && (r.Number <= 0 || r.Row <= 0 || r.Token == "") {
		err = errors.New("number, row or token is missing")
	}
	if err != nil {
		return Record{}, fmt.Errorf("cursor record %.200q: %w", value, err)
	}
	return r, nil
}
