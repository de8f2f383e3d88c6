package outboxadmin

import (
	"cmp"
	"context"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
)

const rowsPerPage = 50

// failedList is the page of failed events.
type failedList struct {
	Filter   outboxops.FailureFilter
	Status   string // as it was asked for
	Statuses []string
	Query    template.URL // the filter as parameters
	Filtered bool         // anything but the status is picked
	Wide     bool         // one of the less usual fields is picked
	Rows     []failedRow
	Total    int64
	More     bool     // than Total
	Types    []string // to choose from
	Classes  []string
	Relays   []string
	Next     template.URL // those of older ones, or empty
	Later    bool         // newer ones are left out
	Done     string       // what was done before
}

func (a *admin) failedList(r *request) (answer, error) {
	q := &r.query
	filter, after, limit, done := q.failedFilter(), q.failure("after"), q.limit(rowsPerPage), q.doneText("done", "n")
	if err := q.done(); err != nil {
		return answer{}, err
	}
	rows, err := a.failed.List(r.Context(), filter, outboxops.FailurePage{After: []outboxops.FailureID{after}, Limit: limit})
	if err != nil {
		return answer{}, err
	}
	counts, err := a.failed.Count(r.Context(), filter)
	if err != nil {
		return answer{}, err
	}
	values := failedValues(filter)
	page := failedList{Filter: filter, Status: values.Get("status"), Statuses: statuses, Query: encode(values), Rows: each(rows, a.failedRowOf), Later: after != (outboxops.FailureID{}), Done: done}
	for name := range values {
		page.Filtered = page.Filtered || name != "status"
		page.Wide = page.Wide || slices.Contains([]string{"key", "aggregate_type", "event_id", "outbox_id", "relay", "since", "until"}, name)
	}
	for _, c := range counts {
		page.Total += int64(c.Events)
		page.More = page.More || c.Events == outbox.MaxCounted
	}
	if page.Types, page.Classes, page.Relays, err = a.choices(r.Context(), filter); err != nil {
		return answer{}, err
	}
	if len(rows) == limit {
		values.Set("after", rows[limit-1].ID.String())
		page.Next = encode(values)
	}
	return a.page(r.Request, http.StatusOK, "failed", "Failed events", page), nil
}

// choices returns the types, classes and relays that a filter may be narrowed to.
func (a *admin) choices(ctx context.Context, f outboxops.FailureFilter) (types, classes, relays []string, err error) {
	counts, err := a.failed.Count(ctx, outboxops.FailureFilter{Kind: outboxops.KindEvent, Statuses: f.Statuses})
	for _, c := range counts {
		types, classes, relays = append(types, c.Type), append(classes, c.Class), append(relays, c.Relay)
	}
	return choice(types), choice(classes), choice(relays), err
}

func choice(all []string) []string {
	slices.Sort(all)
	all = slices.DeleteFunc(slices.Compact(all), func(s string) bool { return s == "" })
	return all[:min(len(all), maxKinds)]
}

// failedPage is the page of one failed event.
type failedPage struct {
	Row     failedRow
	Payload payload
	History []outboxops.AuditEntry
	Before  map[int64]payload // payloads from before an edit, by the id of the entry
	Done    string
	Wrong   string // why an action was refused
	Action  string // which one
	Reason  string // as it was written
	Edit    string // likewise
}

func (a *admin) failedOne(r *request) (answer, error) {
	q := &r.query
	done := q.doneText("done", "n")
	if err := q.done(); err != nil {
		return answer{}, err
	}
	return a.showFailed(r, http.StatusOK, failedPage{Done: done})
}

// showFailed completes a page of the event in the path, and writes it.
func (a *admin) showFailed(r *request, status int, page failedPage) (answer, error) {
	id, err := pathFailure(r)
	if err != nil {
		return answer{}, err
	}
	row, history, err := a.failedWhole(r, id)
	if err != nil {
		return answer{}, err
	}
	page.Row, page.History = a.failedRowOf(row), history
	page.Payload = a.payloadOf(row.Type, row.ContentType, row.Payload, row.PayloadErr)
	page.Before = map[int64]payload{}
	for _, h := range page.History {
		if h.Payload != nil || h.PayloadErr != nil {
			page.Before[h.ID] = a.payloadOf(row.Type, row.ContentType, h.Payload, h.PayloadErr)
		}
	}
	if page.Edit == "" {
		page.Edit = page.Payload.Original()
	}
	return a.page(r.Request, status, "failed_one", row.Type, page), nil
}

// failedWhole returns a failed event with its history, once it is audited that somebody
// reads it.
func (a *admin) failedWhole(r *request, id outboxops.FailureID) (outboxops.Failure, []outboxops.AuditEntry, error) {
	ctx := r.Context()
	if a.cfg.AuditReads {
		if err := a.failed.AuditRead(ctx, id, auditInfo(r, readReason(r))); err != nil {
			return outboxops.Failure{}, nil, err
		}
	}
	row, err := a.failed.Get(ctx, id)
	if err != nil {
		return row, nil, err
	}
	history, err := a.failed.Audit(ctx, id, outboxops.AuditPage{Limit: 1000, WithoutReads: true})
	return row, history, err
}

// readReason is the reason of who reads a payload.
func readReason(r *request) string {
	if isAPI(r.Request) {
		return "shown by the API"
	}
	return "shown on the page"
}

// action is what an operator does about one event or its key.
type action func(ctx context.Context, f *outboxops.Failures, row outboxops.Failure, payload string, why outboxops.AuditInfo) error

var actions = map[string]action{
	"retry": func(ctx context.Context, f *outboxops.Failures, row outboxops.Failure, _ string, why outboxops.AuditInfo) error {
		return f.Retry(ctx, row.ID, why)
	},
	"resolve": func(ctx context.Context, f *outboxops.Failures, row outboxops.Failure, _ string, why outboxops.AuditInfo) error {
		return f.Resolve(ctx, row.ID, why)
	},
	"edit": func(ctx context.Context, f *outboxops.Failures, row outboxops.Failure, payload string, why outboxops.AuditInfo) error {
		data, err := edited(row.ContentType == jsonType, payload)
		if err != nil {
			return err
		}
		return f.Edit(ctx, row.ID, data, why)
	},
	"hold": func(ctx context.Context, f *outboxops.Failures, row outboxops.Failure, _ string, why outboxops.AuditInfo) error {
		return f.Hold(ctx, row.ID, why)
	},
	"release": func(ctx context.Context, f *outboxops.Failures, row outboxops.Failure, _ string, why outboxops.AuditInfo) error {
		return f.Release(ctx, row.ID, why)
	},
}

// failedAct does what the last element of the path says. If that is refused, it shows
// the event as it is, with what the operator wrote.
func (a *admin) failedAct(r *request) (answer, error) {
	id, err := pathFailure(r)
	if err != nil {
		return answer{}, err
	}
	action := r.PathValue("action")
	do, ok := actions[action]
	if !ok {
		return answer{}, errNowhere
	}
	row, err := a.failed.Get(r.Context(), id)
	if err != nil {
		return answer{}, err
	}
	reason, payload := r.query.text("reason"), r.query.text("payload")
	err = do(r.Context(), a.failed, row, payload, auditInfo(r, reason))
	if err == nil {
		return redirectTo("../" + id.String() + "?done=" + action), nil
	}
	p, ours := shown(err)
	if !ours {
		return answer{}, err
	}
	return a.showFailed(r, p.status, failedPage{Wrong: p.text, Action: action, Reason: reason, Edit: payload})
}

// auditInfo names who sends a request. A reason of nothing but spaces is none.
func auditInfo(r *request, reason string) outboxops.AuditInfo {
	return outboxops.AuditInfo{Operator: accessOf(r.Request).Operator, Reason: strings.TrimSpace(reason)}
}

// bulkPage shows what would be done to many events.
type bulkPage struct {
	Action string
	Filter outboxops.FailureFilter
	Values url.Values   // the filter, to be sent again
	Query  template.URL // to go back
	Count  int
	Topics []topicCount // where they go
	Others int          // topics that are not among them
	Sample []failedRow
	Wrong  string
}

// topicCount is how many of the events of an action go to a topic.
type topicCount struct {
	Topic  string // empty where none follows from their type
	Events int
	Only   template.URL // the filter, for that topic alone; empty without one
}

// maxTopics bounds the topics that are shown: events can name any.
const maxTopics = 100

// topicsOf sorts topics by their events, the most first, and returns how many it leaves out.
func topicsOf(counts map[string]int, filter outboxops.FailureFilter) (shown []topicCount, others int) {
	for topic, events := range counts {
		one := topicCount{Topic: topic, Events: events}
		if filter.Topic = topic; topic != "" {
			one.Only = encode(failedValues(filter))
		}
		shown = append(shown, one)
	}
	slices.SortFunc(shown, func(a, b topicCount) int {
		return cmp.Or(cmp.Compare(b.Events, a.Events), strings.Compare(a.Topic, b.Topic))
	})
	return shown[:min(len(shown), maxTopics)], max(0, len(shown)-maxTopics)
}

// bulkRate is how many events are changed in a second.
const bulkRate = 5000

// bulk runs retry or resolve for all that a filter picks, and counts them by their topic.
// Between its parts, other requests have their connection.
func (a *admin) bulk(r *request, action string, filter outboxops.FailureFilter, dryRun bool, reason string) (n int, topics map[string]int, err error) {
	topics = map[string]int{}
	cfg := outboxops.BulkConfig{DryRun: dryRun, Rate: bulkRate, Topics: topics}
	if r.Method == http.MethodPost {
		cfg.Progress = func(int) { r.work.pause() }
	}
	if action == "retry" {
		n, err = a.failed.RetryAll(r.Context(), filter, cfg, auditInfo(r, reason))
	} else {
		n, err = a.failed.ResolveAll(r.Context(), filter, cfg, auditInfo(r, reason))
	}
	return n, topics, err
}

// bulkReview is the dry run. What fails after it is not picked any more, so that what is
// confirmed is what was shown, or less.
func bulkReview(action string) func(*admin, *request) (answer, error) {
	return func(a *admin, r *request) (answer, error) {
		q := &r.query
		filter := q.failedFilter()
		if err := q.done(); err != nil {
			return answer{}, err
		}
		return a.showBulk(r, http.StatusOK, action, filter, "")
	}
}

func (a *admin) showBulk(r *request, status int, action string, filter outboxops.FailureFilter, wrong string) (answer, error) {
	page := bulkPage{Action: action, Query: encode(failedValues(filter)), Wrong: wrong}
	if now := time.Now(); filter.Until.IsZero() || filter.Until.After(now) {
		filter.Until = now
	}
	page.Filter, page.Values = filter, failedValues(filter)
	n, topics, err := a.bulk(r, action, filter, true, "dry run")
	if err != nil {
		return answer{}, err
	}
	page.Count = n
	page.Topics, page.Others = topicsOf(topics, filter)
	sample, err := a.failed.List(r.Context(), filter, outboxops.FailurePage{Limit: 5})
	if err != nil {
		return answer{}, err
	}
	page.Sample = each(sample, a.failedRowOf)
	return a.page(r.Request, status, "bulk", bulkTitles[action], page), nil
}

var bulkTitles = map[string]string{"retry": "Retry many events", "resolve": "Resolve many events"}

func bulkAct(action string) func(*admin, *request) (answer, error) {
	return func(a *admin, r *request) (answer, error) {
		q := &r.query
		filter, reason := q.failedFilter(), q.text("reason")
		if err := q.done(); err != nil {
			return answer{}, err
		}
		n, _, err := a.bulk(r, action, filter, false, reason)
		if err == nil {
			back := failedValues(filter)
			back.Del("until")
			back.Set("done", action+"_all")
			back.Set("n", strconv.Itoa(n))
			return redirectTo("../failed?" + back.Encode()), nil
		}
		p, ours := shown(err)
		if !ours {
			return answer{}, err
		}
		return a.showBulk(r, p.status, action, filter, p.text)
	}
}

// doneTexts say what was done, behind a redirect.
var doneTexts = map[string]string{
	"retry":       "The relay sends it at its next look. It leaves this list once Kafka has it.",
	"resolve":     "It is resolved. What waited behind it goes on.",
	"edit":        "The payload is changed, and the relay sends it at its next look.",
	"hold":        "The key is held: nothing more of it is sent until it is released.",
	"release":     "The key is released and goes on.",
	"retry_all":   "The relay sends %s at its next look.",
	"resolve_all": "%s resolved. What waited behind goes on.",
}

// doneText reads what was done, as a sentence.
func (q *query) doneText(name, number string) string {
	text, n := doneTexts[q.text(name)], q.number(number)
	switch q.values.Get(name) {
	case "retry_all":
		return fmt.Sprintf(text, plural(n, "event", "events"))
	case "resolve_all":
		return fmt.Sprintf(text, plural(n, "event is", "events are"))
	}
	return text
}
