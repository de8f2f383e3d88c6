package relay

import (
	"time"

	"github.com/outboxgo/outbox/internal/envelope"
)

// maxRecent is how many sent events a session remembers. PostgreSQL forgets the rows of the cursor of less than a
// second in a crash, and as many as a standby lags behind in a failover.
const maxRecent = 10_000

// recentEvents are the last events that a session has sent, with the row of the cursor that was the newest then.
type recentEvents struct {
	events []recentEvent // a ring, once it is full
	next   int
}

type recentEvent struct {
	id      int64     // of outbox
	created time.Time // an id that is given out again has another time
	row     int64     // of outbox_cursor
}

func (r *recentEvents) add(e *envelope.Event, row int64) {
	sent := recentEvent{e.ID, e.CreatedAt, row}
	if len(r.events) < maxRecent {
		r.events = append(r.events, sent)
		return
	}
	r.events[r.next] = sent
	r.next = (r.next + 1) % maxRecent
}

// since returns the events that were sent after a row of the cursor had become the newest.
func (r *recentEvents) since(row int64) (ids []int64, created []time.Time) {
	for _, e := range r.events {
		if e.row >= row {
			ids, created = append(ids, e.id), append(created, e.created)
		}
	}
	return ids, created
}
