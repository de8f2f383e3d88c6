package outboxadmin

import (
	"fmt"
	"html/template"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/outboxops"
)

// query reads the parameters of a request, which [checkValues] has seen, and keeps the
// first error.
type query struct {
	values url.Values
	err    error
}

// text returns a parameter unchanged: blanks may be part of a key.
func (q *query) text(name string) string { return q.values.Get(name) }

// word returns a parameter without the blanks around it, or empty if it was not given.
func (q *query) word(name string) string {
	text := q.text(name)
	word := strings.TrimSpace(text)
	if text != "" && word == "" {
		q.fail(name, "is blank")
	}
	return word
}

func (q *query) fail(name, text string) {
	if q.err == nil {
		q.err = wrong(name, text)
	}
}

func (q *query) number(name string) int64 {
	text := q.word(name)
	if text == "" {
		return 0
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		q.fail(name, fmt.Sprintf("%.100q is not a number from 0 on", text))
	}
	return n
}

// failures reads ids of failures with commas between them: where a list goes on, the last one of
// each kind.
func (q *query) failures(name string) (ids []outboxops.FailureID) {
	text := q.word(name)
	if text == "" {
		return nil
	}
	for one := range strings.SplitSeq(text, ",") {
		id, err := outboxops.ParseFailureID(one)
		if err != nil || slices.ContainsFunc(ids, func(other outboxops.FailureID) bool { return other.Kind == id.Kind }) {
			q.fail(name, fmt.Sprintf("%.100q is not an id such as event-17, or one of each kind", text))
		}
		ids = append(ids, id)
	}
	return ids
}

// failuresText writes ids as [query.failures] reads them.
func failuresText(ids []outboxops.FailureID) string {
	return strings.Join(each(ids, outboxops.FailureID.String), ",")
}

// timeForms are how a time may be written: with its zone, or as browsers send it, in UTC.
var timeForms = []string{time.RFC3339Nano, "2006-01-02T15:04", "2006-01-02T15:04:05", time.DateOnly}

func (q *query) time(name string) time.Time {
	text := q.word(name)
	if text == "" {
		return time.Time{}
	}
	for _, form := range timeForms {
		if t, err := time.Parse(form, text); err == nil && check.Time(t) == nil {
			return t
		}
	}
	q.fail(name, fmt.Sprintf("%.100q is not a time such as 2026-01-31T12:30 (UTC) or 2026-01-31T12:30:00+01:00", text))
	return time.Time{}
}

// done returns the first error.
func (q *query) done() error { return q.err }

// statusAny is the value of the parameter status that picks all failures except done deliveries. Without
// the parameter, unresolved failures are picked.
const statusAny = "any"

// kinds are the kinds of failures.
var kinds = []string{string(outboxops.KindEvent), string(outboxops.KindDelivery)}

var statuses = []string{outbox.StatusWaiting, outbox.StatusFailed, outbox.StatusParked, outbox.StatusDead, outbox.StatusResolved}

func (q *query) statuses() []string {
	var picked []string
	text := q.text("status")
	if text == "" {
		return nil
	}
	for one := range strings.SplitSeq(text, ",") {
		switch {
		case one == statusAny:
			picked = append(picked, statuses...)
		case isStatus(one):
			picked = append(picked, one)
		default:
			q.fail("status", fmt.Sprintf("%.100q is none of %s, %s and any", one, strings.Join(statuses, ", "), outboxops.StatusDone))
		}
	}
	slices.Sort(picked)
	return slices.Compact(picked)
}

// isStatus reports whether a failure may have a status.
func isStatus(text string) bool {
	return slices.Contains(statuses, text) || text == outboxops.StatusDone
}

// filterNames are the parameters of failedFilter.
var filterNames = []string{"kind", "status", "relay", "group", "action", "type", "topic", "key", "aggregate_type", "aggregate_id", "event_id", "outbox_id", "class", "since", "until"}

// failedFilter reads the filter for failures.
func (q *query) failedFilter() outboxops.FailureFilter {
	f := outboxops.FailureFilter{
		Kind: outboxops.Kind(q.text("kind")), Statuses: q.statuses(), Relay: q.text("relay"), Group: q.text("group"), Action: q.text("action"), Type: q.text("type"), Topic: q.text("topic"), Key: q.text("key"),
		AggregateType: q.text("aggregate_type"), AggregateID: q.text("aggregate_id"), EventID: q.word("event_id"),
		OutboxID: q.number("outbox_id"), Class: q.text("class"), Since: q.time("since"), Until: q.time("until"),
	}
	if f.Kind != "" && !slices.Contains(kinds, string(f.Kind)) {
		q.fail("kind", fmt.Sprintf("%.100q is neither event nor delivery", string(f.Kind)))
	}
	if f.OutboxID == 0 && q.text("outbox_id") != "" {
		q.fail("outbox_id", "no event has 0")
	}
	ofEvents, ofDeliveries := f.Relay != "" || f.OutboxID != 0 || f.Kind == outboxops.KindEvent, f.Group != "" || f.Action != "" || f.Kind == outboxops.KindDelivery
	if ofEvents && ofDeliveries {
		q.fail("filter", "a relay and a place in outbox are those of events, a group and an action those of deliveries: nothing has both")
	}
	return f
}

// bulkFilter reads the filter for an action on many failures. A retry with any status leaves resolutions as they are:
// to revert them, it has to name their status.
func (q *query) bulkFilter(action string) outboxops.FailureFilter {
	f := q.failedFilter()
	if action == "retry" && !slices.Contains(strings.Split(q.text("status"), ","), outbox.StatusResolved) {
		f.Statuses = slices.DeleteFunc(f.Statuses, func(s string) bool { return s == outbox.StatusResolved })
	}
	if slices.Contains(f.Statuses, outboxops.StatusDone) {
		q.fail("status", "what is done is neither retried nor resolved")
	}
	return f
}

// actFilter reads the filter of an action. A value that is given has to pick something: an empty one, such as a
// variable that is not set, would pick everything.
func (q *query) actFilter(action string) outboxops.FailureFilter {
	for _, name := range filterNames {
		if q.values.Has(name) && q.text(name) == "" {
			q.fail(name, "is empty: leave it out")
		}
	}
	return q.bulkFilter(action)
}

// seenName is the parameter with the snapshot of a dry run, or of a page that has shown failures.
const seenName = "seen"

// seen reads what a dry run has seen. Without it, an action would change failures that were not shown.
func (q *query) seen() string {
	text := q.text(seenName)
	if !tables.IsSnapshot(text) {
		q.fail(seenName, "is not what a dry run has seen: look at the failures first")
	}
	return text
}

// seenIfAny reads the snapshot of a page that has shown failures, or empty if a form has none.
func (q *query) seenIfAny() string {
	if q.text(seenName) == "" {
		return ""
	}
	return q.seen()
}

// auditNames are the parameters of auditFilter and of its pages.
var auditNames = []string{"failure", "operator", "action", "group", "since", "until", "before", "limit"}

// auditFilter reads the filter for entries of the audit.
func (q *query) auditFilter(limit int) (id outboxops.FailureID, page outboxops.AuditPage) {
	if ids := q.failures("failure"); len(ids) > 1 {
		q.fail("failure", "is more than one id")
	} else if len(ids) == 1 {
		id = ids[0]
	}
	return id, outboxops.AuditPage{Before: q.number("before"), Limit: q.limit(limit), Operator: q.text("operator"), Action: q.text("action"),
		Group: q.text("group"), Since: q.time("since"), Until: q.time("until")}
}

// searchNames are the parameters of eventFilter.
var searchNames = []string{"event_id", "type", "aggregate_type", "aggregate_id", "since", "until"}

// eventFilter reads the filter for recorded events.
func (q *query) eventFilter() outboxops.EventFilter {
	return outboxops.EventFilter{
		EventID: q.word("event_id"), Type: q.text("type"), AggregateType: q.text("aggregate_type"), AggregateID: q.text("aggregate_id"),
		Since: q.time("since"), Until: q.time("until"),
	}
}

// failedValues writes a filter as parameters.
func failedValues(f outboxops.FailureFilter) url.Values {
	v := url.Values{}
	set := func(name, value string) {
		if value != "" {
			v.Set(name, value)
		}
	}
	status := strings.Join(f.Statuses, ",")
	if picked := slices.Sorted(slices.Values(f.Statuses)); slices.Equal(picked, slices.Sorted(slices.Values(statuses))) {
		status = statusAny
	}
	set("kind", string(f.Kind))
	set("status", status)
	set("relay", f.Relay)
	set("group", f.Group)
	set("action", f.Action)
	set("type", f.Type)
	set("topic", f.Topic)
	set("key", f.Key)
	set("aggregate_type", f.AggregateType)
	set("aggregate_id", f.AggregateID)
	set("event_id", f.EventID)
	set("class", f.Class)
	if f.OutboxID != 0 {
		set("outbox_id", strconv.FormatInt(f.OutboxID, 10))
	}
	set("since", stamp(f.Since))
	set("until", stamp(f.Until))
	return v
}

// eventValues writes a filter as parameters.
func eventValues(f outboxops.EventFilter) url.Values {
	return failedValues(outboxops.FailureFilter{EventID: f.EventID, Type: f.Type, AggregateType: f.AggregateType, AggregateID: f.AggregateID,
		Since: f.Since, Until: f.Until})
}

// encode writes parameters as they come behind a question mark.
func encode(v url.Values) template.URL {
	return template.URL(v.Encode())
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}

// pathFailure is the id of a failure in the path of a request.
func pathFailure(r *request) (outboxops.FailureID, error) {
	id, err := outboxops.ParseFailureID(r.PathValue("id"))
	if err != nil {
		return id, errNowhere
	}
	return id, nil
}

// pathID is the id of a recorded event in the path of a request.
func pathID(r *request) (int64, error) {
	id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil {
		return 0, errNowhere
	}
	return id, nil
}

// limit reads the wanted number of rows, at most 1,000.
func (q *query) limit(otherwise int) int {
	n := q.number("limit")
	switch {
	case n == 0:
		return otherwise
	case n > 1000:
		q.fail("limit", "is above 1000")
	}
	return int(n)
}
