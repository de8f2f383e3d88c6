// Package oracle checks that the events that were recorded are the events that arrived.
//
// [Write] records versioned events with many writers, in transactions of every kind.
// Each transaction also inserts its events into the table oracle_history, which so has
// all events that were committed. [Result.Compare] compares them with the events that
// arrived in Kafka. Neither depends on how events get from one to the other.
package oracle

import (
	"encoding/json"
	"fmt"
	"time"
)

// Event is an event of a writer. Its version is one above that of the last event of its
// key; the writer increments it while it holds the row lock of the key.
type Event struct {
	ID      string `json:"id"`
	Key     string `json:"key"`
	Version int64  `json:"version"`
	// Filler makes the payload about as large as that of a real event.
	Filler string `json:"filler"`
}

// OccurredAt and Aggregate make Event a domain event. The time is derived from the
// version, so that a test can predict it.
func (e Event) OccurredAt() time.Time { return time.UnixMilli(1_700_000_000_000 + e.Version) }

// Aggregate returns the event's key.
func (e Event) Aggregate() string { return e.Key }

// Result counts the differences between the events that were committed and those that
// arrived.
type Result struct {
	Seed       uint64  `json:"seed"`
	Seconds    float64 `json:"seconds"`
	Events     int     `json:"events"`     // that were committed
	Lost       int     `json:"lost"`       // committed and never arrived
	Phantom    int     `json:"phantom"`    // arrived and never committed
	Duplicates int     `json:"duplicates"` // arrivals after the first
	Inversions int     `json:"inversions"` // first arrivals behind a later version of their key
}

// String returns the result as one line of JSON.
func (v Result) String() string {
	b, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// Err returns an error if there is any difference.
func (v Result) Err() error {
	if v.Lost+v.Phantom+v.Duplicates+v.Inversions > 0 {
		return fmt.Errorf("oracle: %s", v)
	}
	return nil
}

// Compare sets the counts. committed has the ids of the history, and arrived the events of
// the topic, in the order of their offsets within each key.
func (v *Result) Compare(committed map[string]struct{}, arrived []Event) {
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
