package relay

import (
	"errors"
	"fmt"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
)

// What a trace says of events. Only a build with the tag outbox_trace calls these functions.

// idsOf returns the ids of n events.
func idsOf(n int, event func(i int) *envelope.Event) []int64 {
	ids := make([]int64, n)
	for i := range ids {
		ids[i] = event(i).ID
	}
	return ids
}

// outcomeWords returns a word for the outcome of each event.
func (d *delivery) outcomeWords() []string {
	words := make([]string, len(d.outcomes))
	for i, o := range d.outcomes {
		switch o.Kind {
		case OutcomePending:
			words[i] = "pending"
		case OutcomeSent:
			words[i] = "sent"
		case OutcomeRejected:
			words[i] = "rejected"
		case OutcomeUnavailable:
			words[i] = "unavailable"
		case OutcomeBlocked, OutcomeParked:
			words[i] = "blocked"
		case OutcomeExpired:
			words[i] = "expired"
		}
		if errors.Is(o.Err, errUnanswered) {
			words[i] = "unanswered"
		}
	}
	return words
}

// resultWords returns an id and a status for each result of a retry.
func resultWords(results []cursor.RetryResult) []string {
	words := make([]string, len(results))
	for i, r := range results {
		words[i] = fmt.Sprintf("%d %s", r.Event.ID, r.Status)
	}
	return words
}
