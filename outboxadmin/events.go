package outboxadmin

import (
	"cmp"
	"context"
	"errors"
	"html/template"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
)

// eventList is the page that finds recorded events.
type eventList struct {
	Filter   outboxops.EventFilter
	Query    template.URL // the filter as parameters
	Filtered bool
	InOrder  bool // of one aggregate: the first event on top
	Rows     []eventRow
	Older    template.URL // parameters, or empty
	Newer    bool         // newer events are left out
}

// eventRow is a recorded event. After retention has removed the event, it is the copy in outbox_failed.
type eventRow struct {
	outboxops.RecordedEvent
	Removed   bool
	KeyMasked bool // the key or the id of the aggregate, so no link leads to their events
	States    []eventState
}

// eventState is the state of an event at a relay.
type eventState struct {
	Relay, Status string
	Failure       outboxops.FailureID // zero if it has not failed
}

// The states of an event besides the statuses of outbox_failed.
const (
	stateSent      = "sent"
	stateExpired   = "expired"
	stateAttempted = "attempted" // sent, or not sent because it had expired
	statePending   = "pending"
)

// statesOf returns the states of an event by relay.
func statesOf(e outboxops.RecordedEvent) (states []eventState) {
	failed := func(relay string) bool {
		return slices.ContainsFunc(e.Failures, func(f outboxops.EventFailure) bool { return f.Relay == relay })
	}
	for _, f := range e.Failures {
		states = append(states, eventState{f.Relay, f.Status, f.ID})
	}
	for _, relay := range e.AttemptedBy {
		if !failed(relay) {
			states = append(states, eventState{Relay: relay, Status: attemptedState(e, relay)})
		}
	}
	for _, relay := range e.PendingFor {
		if !failed(relay) {
			states = append(states, eventState{Relay: relay, Status: statePending})
		}
	}
	slices.SortFunc(states, func(a, b eventState) int { return cmp.Compare(a.Relay, b.Relay) })
	return states
}

// attemptedState returns what became of an event that a relay has attempted and that has not failed there. Lists do not
// read where an event was sent, so for one that may have expired they cannot tell.
func attemptedState(e outboxops.RecordedEvent, relay string) string {
	state := stateAttempted
	for _, s := range e.Sent {
		switch {
		case s.Relay == relay && !s.Expired:
			return stateSent
		case s.Relay == relay:
			state = stateExpired
		}
	}
	if e.ExpiresAt.IsZero() {
		return stateSent
	}
	return state
}

func (a *admin) eventList(r *request) (answer, error) {
	q := &r.query
	filter, before, limit := q.eventFilter(), q.number("before"), q.limit(rowsPerPage)
	if err := q.done(); err != nil {
		return answer{}, err
	}
	rows, last, err := a.events(r.Context(), filter, before, limit)
	if err != nil {
		return answer{}, err
	}
	values := eventValues(filter)
	page := eventList{Filter: filter, Query: encode(values), Filtered: len(values) > 0, InOrder: filter.AggregateID != "", Rows: rows, Newer: before != 0}
	if last != 0 {
		values.Set("before", strconv.FormatInt(last, 10))
		page.Older = encode(values)
	}
	if page.InOrder {
		slices.Reverse(page.Rows)
	}
	return a.page(r.Request, http.StatusOK, "events", "Events", page), nil
}

// events returns recorded events, the newest first, and the id before which there may be
// more, or 0. For a search by aggregate or id, the failed events whose
// originals retention has removed are among them.
func (a *admin) events(ctx context.Context, filter outboxops.EventFilter, before int64, limit int) (rows []eventRow, last int64, err error) {
	found, err := a.inspect.Events(ctx, filter, outboxops.EventPage{Before: before, Limit: limit})
	if err != nil {
		return nil, 0, err
	}
	for _, e := range found {
		rows = append(rows, eventRow{RecordedEvent: e, States: statesOf(e)})
	}
	if len(found) == limit {
		last = found[limit-1].OutboxID
	}
	if filter.AggregateID == "" && filter.EventID == "" {
		return a.maskEvents(rows), last, nil
	}
	left, err := a.failed.List(ctx, outboxops.FailureFilter{Kind: outboxops.KindEvent, Statuses: statuses, Type: filter.Type, AggregateType: filter.AggregateType,
		AggregateID: filter.AggregateID, EventID: filter.EventID}, outboxops.FailurePage{Limit: 1000})
	if err != nil {
		return nil, 0, err
	}
	return a.maskEvents(withRemoved(rows, left, last, cmp.Or(before, math.MaxInt64), filter)), last, nil
}

// withRemoved adds the failed events between two ids that are not recorded events any more.
func withRemoved(rows []eventRow, failed []outboxops.Failure, from, before int64, filter outboxops.EventFilter) []eventRow {
	recorded := len(rows)
	for _, f := range failed {
		inTime := !f.CreatedAt.Before(filter.Since) && (filter.Until.IsZero() || f.CreatedAt.Before(filter.Until))
		if !inTime || f.OutboxID < from || f.OutboxID >= before {
			continue
		}
		i := slices.IndexFunc(rows, func(r eventRow) bool { return r.OutboxID == f.OutboxID })
		if i >= 0 && i < recorded {
			continue
		}
		state := eventState{f.Relay, f.Status, f.ID}
		if i >= 0 { // of another relay
			rows[i].States = append(rows[i].States, state)
			continue
		}
		rows = append(rows, eventRow{Removed: true, States: []eventState{state}, RecordedEvent: outboxops.RecordedEvent{
			OutboxID: f.OutboxID, EventID: f.EventID, Type: f.Type, Source: f.Source, AggregateType: f.AggregateType, AggregateID: f.AggregateID,
			Topic: f.Topic, Key: f.Key, ContentType: f.ContentType, OccurredAt: f.OccurredAt, CreatedAt: f.CreatedAt}})
	}
	slices.SortStableFunc(rows, func(a, b eventRow) int { return cmp.Compare(b.OutboxID, a.OutboxID) })
	return rows
}

// eventPage is the page of one event.
type eventPage struct {
	Timeline outboxops.Timeline
	Row      eventRow // if it is in outbox, as is Payload
	Payload  payload
}

func (a *admin) eventOne(r *request) (answer, error) {
	t, err := a.timeline(r)
	if err != nil {
		return answer{}, err
	}
	page, title := eventPage{Timeline: t}, "Event"
	if t.InOutbox {
		e, err := a.recordedWhole(r, t.OutboxID)
		if err != nil {
			return answer{}, err
		}
		page.Row, page.Payload, title = a.eventRowOf(e), a.payloadOf(e.Type, e.ContentType, e.Payload, e.PayloadErr), e.Type
	}
	return a.page(r.Request, http.StatusOK, "event_one", title, page), nil
}

// timeline returns the timeline of an event, with its errors masked.
func (a *admin) timeline(r *request) (outboxops.Timeline, error) {
	t, err := a.inspect.Timeline(r.Context(), r.PathValue("id"))
	if errors.Is(err, outbox.ErrMalformed) {
		return t, errNowhere
	}
	for n := range t.Entries {
		t.Entries[n].Err = a.masked(TextError, t.Type, "", t.Entries[n].Err)
	}
	return t, err
}

// recordedWhole audits the read of a recorded event, and then returns the event with its payload.
func (a *admin) recordedWhole(r *request, id int64) (outboxops.RecordedEvent, error) {
	if a.cfg.AuditReads {
		if err := a.failed.AuditReadRecorded(r.Context(), id, auditInfo(r, readReason(r))); err != nil {
			return outboxops.RecordedEvent{}, err
		}
	}
	return a.inspect.Event(r.Context(), id)
}

// eventRowOf is one recorded event as it is shown.
func (a *admin) eventRowOf(e outboxops.RecordedEvent) eventRow {
	return a.maskEvents([]eventRow{{RecordedEvent: e, States: statesOf(e)}})[0]
}

// aggregateLink leads to all events of an aggregate.
func aggregateLink(aggregateType, aggregateID string) string {
	return "events?" + url.Values{"aggregate_type": {aggregateType}, "aggregate_id": {aggregateID}}.Encode()
}

// keyLink leads to the failures of a key: of a relay, or of a group and its action.
func keyLink(relay, group, action, topic, key string) string {
	f := outboxops.FailureFilter{Relay: relay, Group: group, Action: action, Topic: topic, Key: key, Statuses: statuses}
	return "failed?" + failedValues(f).Encode()
}

// fieldTime is a time as a field of a form has it, in UTC.
func fieldTime(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02T15:04")
}
