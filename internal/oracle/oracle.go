// Package oracle decides from history whether events were delivered rightly.
//
// [Write] lets many writers record versioned events under transactions of every
// kind, and leaves in the table oracle_history what has committed: history rows
// are written by the same transactions as the events. [Verdict.Judge] compares them with
// what arrived in Kafka. Neither knows how events travel in between.
package oracle

import (
	"encoding/json"
	"fmt"
	"time"
)

// Event is what a writer asks to be recorded. Its version grows by one with
// each event of its key, and was drawn while the writer held the key's row lock.
type Event struct {
	ID      string `json:"id"`
	Key     string `json:"key"`
	Version int64  `json:"version"`
	// Filler makes the payload about as large as a real one.
	Filler string `json:"filler"`
}

// OccurredAt and Aggregate let an Event be recorded as the domain event it is.
// The time follows from the version, so that a test can foretell it.
func (e Event) OccurredAt() time.Time { return time.UnixMilli(1_700_000_000_000 + e.Version) }

// Aggregate is the event's key.
func (e Event) Aggregate() string { return e.Key }

// Verdict compares what committed with what arrived.
type Verdict struct {
	Seed       uint64  `json:"seed"`
	Seconds    float64 `json:"seconds"`
	Events     int     `json:"events"`     // that committed
	Lost       int     `json:"lost"`       // committed and never arrived
	Phantom    int     `json:"phantom"`    // arrived and never committed
	Duplicates int     `json:"duplicates"` // arrivals after the first
	Inversions int     `json:"inversions"` // first arrivals behind a later version of their key
}

// String returns the verdict as one line of JSON.
func (v Verdict) String() string {
	b, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// Err says what is wrong, or returns nil.
func (v Verdict) Err() error {
	if v.Lost+v.Phantom+v.Duplicates+v.Inversions > 0 {
		return fmt.Errorf("oracle: %s", v)
	}
	return nil
}

// Judge fills in the counts: committed is the history, arrived what the topic
// holds, in its order for each key.
func (v *Verdict) Judge(committed map[string]struct{}, arrived []Event) {
	v.Events = len(committed)
	seen := make(map[string]struct{}, len(arrived))
	newest := make(map[string]int64)
	for _, e := range arrived {
		if _, again := seen[e.ID]; again {
			v.Duplicates++
			continue
		}
		seen[e.ID] = struct{}{}
		if _, ok := committed[e.ID]; !ok {
			v.Phantom++
			continue
		}
		if e.Version < newest[e.Key] {
			v.Inversions++
		}
		newest[e.Key] = max(newest[e.Key], e.Version)
	}
	for id := range committed {
		if _, ok := seen[id]; !ok {
			v.Lost++
		}
	}
}
