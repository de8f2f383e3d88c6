package outboxadmin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/outboxgo/outbox/outboxops"
)

const rowsPerPage = 50

// failedList is the page of failures.
type failedList struct {
	Filter   outboxops.FailureFilter
	Picks    []pick
	Query    template.URL // the filter as parameters
	Values   url.Values   // the same, for fields of a form
	Filtered bool         // anything is picked
	Wide     bool         // one of the less usual fields is picked
	Rows     []failedRow
	Counted  bool // Total is known
	Total    int64
	More     bool         // than Total
	Next     template.URL // link to older failures, or empty
	Later    bool         // newer failures are left out
	Done     string       // the action that was done before
}

// pick is a field of the filter with its values to choose from.
type pick struct {
	Name, Label, Any, Value string
	Choices                 []string
}

func (a *admin) failedList(r *request) (answer, error) {
	q := &r.query
	filter, after, limit, done := q.failedFilter(), q.failures("after"), q.limit(rowsPerPage), q.doneText("done", "n")
	if err := q.done(); err != nil {
		return answer{}, err
	}
	known := outboxops.FailurePage{After: after, Limit: limit}
	rows, err := a.failed.List(r.Context(), filter, known)
	if err != nil {
		return answer{}, err
	}
	values := failedValues(filter)
	page := failedList{Filter: filter, Query: encode(values), Values: failedValues(filter), Rows: each(rows, a.failedRowOf), Later: len(after) > 0, Done: done, Filtered: len(values) > 0,
		Counted: !slices.Contains(filter.Statuses, outboxops.StatusDone)}
	for name := range values {
		page.Wide = page.Wide || slices.Contains([]string{"key", "aggregate_type", "event_id", "outbox_id", "since", "until"}, name)
	}
	if err := a.countFailed(r.Context(), filter, &page); err != nil {
		return answer{}, err
	}
	if page.Picks, err = a.picks(r.Context(), filter, values.Get("status")); err != nil {
		return answer{}, err
	}
	if len(rows) == limit {
		values.Set("after", failuresText(known.Next(rows).After))
		page.Next = encode(values)
	}
	return a.page(r.Request, http.StatusOK, "failed", "Failures", page), nil
}

// countFailed adds up all failures that a list has.
func (a *admin) countFailed(ctx context.Context, f outboxops.FailureFilter, page *failedList) error {
	if !page.Counted {
		return nil
	}
	counts, err := a.failed.Count(ctx, f)
	for _, c := range counts {
		page.Total += int64(c.Events)
		page.More = page.More || c.More
	}
	return err
}

// picks returns the values to which a filter may be narrowed: the values of failures with the same
// statuses.
func (a *admin) picks(ctx context.Context, f outboxops.FailureFilter, status string) ([]pick, error) {
	counted := slices.DeleteFunc(slices.Clone(f.Statuses), func(s string) bool { return s == outboxops.StatusDone })
	counts, err := a.failed.Count(ctx, outboxops.FailureFilter{Statuses: counted})
	if err != nil {
		return nil, err
	}
	of := func(value func(outboxops.FailureCount) string, picked string) []string {
		return choices(each(counts, value), picked)
	}
	return []pick{
		{"kind", "Kind", "any", string(f.Kind), kinds},
		{"status", "Status", "unresolved", status, withPicked(append(slices.Clone(statuses), outboxops.StatusDone, statusAny), status)},
		{"group", "Consumer group", "any", f.Group, of(func(c outboxops.FailureCount) string { return c.Group }, f.Group)},
		{"action", "Action", "any", f.Action, of(func(c outboxops.FailureCount) string { return c.Action }, f.Action)},
		{"relay", "Relay", "any", f.Relay, of(func(c outboxops.FailureCount) string { return c.Relay }, f.Relay)},
		{"class", "Error class", "any", f.Class, of(func(c outboxops.FailureCount) string { return c.Class }, f.Class)},
		{"type", "Event type", "any", f.Type, of(func(c outboxops.FailureCount) string { return c.Type }, f.Type)},
	}, nil
}

// choices returns the distinct values, sorted. The picked value is always among them.
func choices(all []string, picked string) []string {
	slices.Sort(all)
	all = slices.DeleteFunc(slices.Compact(all), func(s string) bool { return s == "" })
	return withPicked(all[:min(len(all), maxKinds)], picked)
}

// withPicked returns all values, and the picked value if it is missing. A form without it would pick
// another value.
func withPicked(all []string, picked string) []string {
	if picked != "" && !slices.Contains(all, picked) {
		all = append(all, picked)
	}
	return all
}

// failedPage is the page of one failure.
type failedPage struct {
	Row     failedRow
	Payload payload
	History []outboxops.AuditEntry
	Before  map[int64]payload // payloads from before an edit, by the id of the entry
	Done    string
	Wrong   string // why an action was refused
	Action  string // which one
	Reason  string // as the user wrote it
	Edit    string // as the user wrote it
	List    string // the filter of the list from which the user came, as parameters; or empty
}

// listName is the parameter with the filter of the list to go back to.
const listName = "list"

// list reads the filter of the list to go back to. Another text than a filter is no error, and leads to the whole list.
func (q *query) list() string {
	values, err := url.ParseQuery(q.text(listName))
	if err != nil || checkValues(values, route{names: filterNames}) != nil {
		return ""
	}
	of := query{values: values}
	filter := of.failedFilter()
	if of.done() != nil {
		return ""
	}
	return failedValues(filter).Encode()
}

// BackTo is the link to the list of a failure.
func (p failedPage) BackTo() template.URL {
	if p.List == "" {
		return "failed"
	}
	return template.URL("failed?" + p.List)
}

func (a *admin) failedOne(r *request) (answer, error) {
	q := &r.query
	done := q.doneText("done", "n")
	if err := q.done(); err != nil {
		return answer{}, err
	}
	return a.showFailed(r, http.StatusOK, failedPage{Done: done, List: q.list()})
}

// showFailed completes a page of the failure in the path, and writes it.
func (a *admin) showFailed(r *request, status int, page failedPage) (answer, error) {
	id, err := pathFailure(r)
	if err != nil {
		return answer{}, err
	}
	row, history, err := a.failedWhole(r, id)
	if errors.Is(err, outboxops.ErrNotFound) {
		return a.showGone(r, id, page.Done, err)
	}
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

// failedWhole audits the read of a failure, and then returns the failure with its history.
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

// action is an operator's action on one failure or its key.
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

// failedAct does the action in the last element of the path. If the action is refused, it shows the
// failure, with the text that the operator wrote.
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
	why := auditInfo(r, reason)
	if why.Seen = r.query.seenIfAny(); r.query.done() != nil {
		return answer{}, r.query.done()
	}
	err = do(r.Context(), a.failed, row, payload, why)
	if err == nil {
		back := url.Values{"done": {doneOf(id.Kind, action)}}
		if list := r.query.list(); list != "" {
			back.Set(listName, list)
		}
		return redirectTo("../" + id.String() + "?" + back.Encode()), nil
	}
	p, ours := shown(err)
	if !ours {
		return answer{}, err
	}
	return a.showFailed(r, p.status, failedPage{Wrong: p.text, Action: action, Reason: reason, Edit: payload, List: r.query.list()})
}

// auditInfo names who sends a request. A reason of nothing but spaces is none.
func auditInfo(r *request, reason string) outboxops.AuditInfo {
	return outboxops.AuditInfo{Operator: accessOf(r.Request).Operator, Reason: strings.TrimSpace(reason)}
}

// bulkPage shows the effect of an action on many events.
type bulkPage struct {
	Action string
	Values url.Values   // the filter, to be sent again
	Query  template.URL // to go back
	Seen   string       // what the dry run has seen, to be sent again
	Count  int
	Topics []topicCount // where they go
	Others int          // topics that are not among them
	Groups []groupCount // whose deliveries they are
	More   int          // groups and actions that are not among them
	Sample []failedRow
	Wrong  string
}

// topicCount is the number of events of an action for a topic.
type topicCount struct {
	Topic  string // empty if their type has no topic
	Events int
	Only   template.URL // the filter, for that topic alone; empty without one
}

// maxTopics bounds the topics that are shown: events can name any.
const maxTopics = 100

// topicsOf sorts topics by their number of events, the largest first. It returns the number of topics that
// it leaves out.
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

// groupCount is the number of deliveries of an action for a consumer group and an action of its handlers.
type groupCount struct {
	Group, Action string // no action for events that no handler of the group could get
	Deliveries    int
	Only          template.URL // the filter, for that group and action alone; empty without an action
}

// groupsOf sorts consumer groups and actions by name. It returns the number of those that it leaves out.
func groupsOf(counts map[outboxops.FailureHandler]int, filter outboxops.FailureFilter) (shown []groupCount, others int) {
	for of, deliveries := range counts {
		one := groupCount{Group: of.Group, Action: of.Action, Deliveries: deliveries}
		if filter.Group, filter.Action = of.Group, of.Action; of.Action != "" {
			one.Only = encode(failedValues(filter))
		}
		shown = append(shown, one)
	}
	slices.SortFunc(shown, func(a, b groupCount) int {
		return cmp.Or(strings.Compare(a.Group, b.Group), strings.Compare(a.Action, b.Action))
	})
	return shown[:min(len(shown), maxTopics)], max(0, len(shown)-maxTopics)
}

// bulkRate is the number of events that are changed in a second.
const bulkRate = 5000

// bulkCounts are the failures of an action, by what they are for.
type bulkCounts struct {
	all      int
	topics   map[string]int
	handlers map[outboxops.FailureHandler]int
}

// bulk runs retry or resolve for all that a filter picks, and counts them.
// Between its parts, other requests have their connection.
func (a *admin) bulk(r *request, action string, filter outboxops.FailureFilter, dryRun bool, seen *string, reason string) (n bulkCounts, err error) {
	n.topics, n.handlers = map[string]int{}, map[outboxops.FailureHandler]int{}
	cfg := outboxops.BulkConfig{DryRun: dryRun, Rate: bulkRate, Topics: n.topics, Handlers: n.handlers, Seen: seen}
	if r.Method == http.MethodPost {
		cfg.Progress = func(int) { r.work.pause() }
	}
	if action == "retry" {
		n.all, err = a.failed.RetryAll(r.Context(), filter, cfg, auditInfo(r, reason))
	} else {
		n.all, err = a.failed.ResolveAll(r.Context(), filter, cfg, auditInfo(r, reason))
	}
	if dryRun {
		return n, err
	}
	return n, inTheMiddle(err, action, n.all)
}

// bulkReview is the dry run. The form has what it has seen, so the confirmed action changes the failures that were
// shown, or fewer: it leaves out those that come, or change, after it.
func bulkReview(action string) func(*admin, *request) (answer, error) {
	return func(a *admin, r *request) (answer, error) {
		q := &r.query
		filter := q.bulkFilter(action)
		if err := q.done(); err != nil {
			return answer{}, err
		}
		return a.showBulk(r, http.StatusOK, action, filter, "")
	}
}

func (a *admin) showBulk(r *request, status int, action string, filter outboxops.FailureFilter, wrong string) (answer, error) {
	values := failedValues(filter)
	page := bulkPage{Action: action, Query: encode(values), Values: values, Wrong: wrong}
	if len(filter.Statuses) > 0 {
		values.Set("status", strings.Join(filter.Statuses, ",")) // not any, which is other statuses here
	}
	n, err := a.bulk(r, action, filter, true, &page.Seen, "dry run")
	if err != nil {
		return answer{}, err
	}
	page.Count = n.all
	page.Topics, page.Others = topicsOf(n.topics, filter)
	page.Groups, page.More = groupsOf(n.handlers, filter)
	sample, err := a.failed.List(r.Context(), filter, outboxops.FailurePage{Limit: 5})
	if err != nil {
		return answer{}, err
	}
	page.Sample = each(sample, a.failedRowOf)
	return a.page(r.Request, status, "bulk", bulkTitles[action], page), nil
}

var bulkTitles = map[string]string{"retry": "Retry many failures", "resolve": "Resolve many failures"}

func bulkAct(action string) func(*admin, *request) (answer, error) {
	return func(a *admin, r *request) (answer, error) {
		q := &r.query
		filter, seen, reason := q.actFilter(action), q.seen(), q.text("reason")
		if err := q.done(); err != nil {
			return answer{}, err
		}
		n, err := a.bulk(r, action, filter, false, &seen, reason)
		if err == nil {
			back := failedValues(filter)
			back.Set("done", action+"_all")
			back.Set("n", strconv.Itoa(n.all))
			return redirectTo("../failed?" + back.Encode()), nil
		}
		var some *partly
		p, ours := shown(err)
		if !ours || errors.As(err, &some) {
			return answer{}, err
		}
		return a.showBulk(r, p.status, action, filter, p.text)
	}
}

// doneTexts describe the action that was done, after a redirect.
var doneTexts = map[string]string{
	"retry":       "The relay sends it at its next poll. It leaves this list once Kafka has it.",
	"resolve":     "It is resolved. The events behind it continue.",
	"edit":        "The payload is changed, and the relay sends it at its next poll.",
	"hold":        "The key is held: none of its events is sent until it is released.",
	"release":     "The key is released. Its events continue.",
	"edit_group":  "The payload is changed for this group and action, and a process of the group handles it again. This page shows the outcome.",
	"requeue":     "A worker of the group handles it again, with all its attempts. This page shows the outcome.",
	"hold_group":  "The key is held: the group handles none of its events with this action until it is released.",
	"retry_all":   "%s retried: relays send events at their next poll, and workers handle deliveries.",
	"resolve_all": "%s resolved. The events behind them continue.",
	"edit_all":    "%s changed, and will be sent or handled again.",
	"pause":       "The pause is stored. Processes of the group read it every few seconds.",
	"resume":      "The pause has ended. Processes of the group read that every few seconds.",
}

// doneOf returns the key of [doneTexts] for an action on a failure of a kind.
func doneOf(kind outboxops.Kind, action string) string {
	if of, ok := map[string]string{"retry": "requeue", "hold": "hold_group", "edit": "edit_group"}[action]; ok && kind == outboxops.KindDelivery {
		return of
	}
	return action
}

// doneText returns the action that was done as a sentence.
func (q *query) doneText(name, number string) string {
	text, n := doneTexts[q.text(name)], q.number(number)
	switch q.values.Get(name) {
	case "retry_all", "resolve_all", "edit_all":
		return fmt.Sprintf(text, plural(n, "failure is", "failures are"))
	}
	return text
}
