package outboxadmin

import (
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/google/uuid"

	"github.com/outboxgo/outbox/outboxops"
)

// delayedPage is the page of events that are not due yet.
type delayedPage struct {
	Status   outboxops.DelayedStatus
	Rejected bool // these are the events that outbox has rejected
	Rows     []outboxops.DelayedEvent
	Later    template.URL // parameters, or empty
	More     bool         // earlier ones are left out
	EventID  string       // to be cancelled
	Reason   string
	Done     string // what was done before
	Wrong    string // why it was not
}

// late reports delayed events that are overdue for too long, and those that outbox has rejected.
func (s *situation) late() (all []notice) {
	if s.delayed.Late > s.staleAfter {
		all = append(all, notice{levelBad, fmt.Sprintf("Delayed events: the oldest has been due for %s, and was not moved to outbox.", short(s.delayed.Late)), "delayed", "Show"})
	}
	if n := int64(s.delayed.Rejected); n > 0 {
		all = append(all, notice{levelBad, fmt.Sprintf("Delayed events: outbox has rejected %s, which will not be sent.", upTo(n).Of("event", "events")), "delayed?rejected=1", "Show"})
	}
	return all
}

// delayedNames are the parameters of the list.
var delayedNames = []string{"rejected", "after", "after_id", "limit", "event_id", "done", "n"}

func (a *admin) delayedList(r *request) (answer, error) {
	page := delayedPage{EventID: r.query.word("event_id")}
	if n := r.query.number("n"); r.query.text("done") != "" {
		page.Done = plural(n, "event is", "events are") + " deleted, and will not be sent. What was due was moved to outbox before, and is sent."
	}
	return a.showDelayed(r, http.StatusOK, page)
}

func (a *admin) showDelayed(r *request, status int, page delayedPage) (answer, error) {
	q := &r.query
	list := outboxops.DelayedPage{Rejected: q.text("rejected") != "", AfterID: q.number("after_id"), Limit: q.limit(rowsPerPage)}
	if text := q.word("after"); text != "" {
		at, err := time.Parse(time.RFC3339Nano, text)
		if err != nil {
			q.fail("after", "is no time")
		}
		list.After = at
	}
	if err := q.done(); err != nil {
		return answer{}, err
	}
	var err error
	if page.Status, err = a.delayed.Status(r.Context()); err != nil {
		return answer{}, err
	}
	if page.Rows, err = a.delayed.List(r.Context(), list); err != nil {
		return answer{}, err
	}
	page.Rejected, page.More = list.Rejected, list.AfterID != 0
	if n := len(page.Rows); n == list.Limit {
		last := page.Rows[n-1]
		values := url.Values{"after": {last.DueAt.UTC().Format(time.RFC3339Nano)}, "after_id": {strconv.FormatInt(last.ID, 10)}, "limit": {strconv.Itoa(list.Limit)}}
		if list.Rejected {
			values.Set("rejected", "1")
		}
		page.Later = encode(values)
	}
	for i := range page.Rows {
		e := &page.Rows[i]
		e.Key, e.AggregateID = a.masked(TextKey, e.Type, "", e.Key), a.masked(TextKey, e.Type, "", e.AggregateID)
		e.Rejection = a.masked(TextError, e.Type, "", e.Rejection)
	}
	return a.page(r.Request, status, "delayed", "Delayed events", page), nil
}

// delayedCancel deletes a delayed event. If that is refused, it shows the list, with what the operator wrote.
func (a *admin) delayedCancel(r *request) (answer, error) {
	text, reason := r.query.word("event_id"), r.query.text("reason")
	id, err := uuid.Parse(text)
	if err != nil {
		return a.showDelayed(r, http.StatusUnprocessableEntity, delayedPage{EventID: text, Reason: reason, Wrong: "This is no id of an event."})
	}
	n, err := a.delayed.Cancel(r.Context(), []uuid.UUID{id}, auditInfo(r, reason))
	if err == nil {
		return redirectTo("../delayed?done=cancel&n=" + strconv.Itoa(n)), nil
	}
	p, ours := shown(err)
	if !ours {
		return answer{}, err
	}
	return a.showDelayed(r, p.status, delayedPage{EventID: text, Reason: reason, Wrong: p.text})
}
