package outboxadmin

import (
	"cmp"
	"context"
	"html/template"
	"net/http"
	"net/url"
	"slices"
	"strconv"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/outboxops"
)

// maxSelected bounds the failures of one selection, because each is changed by a statement of its own. A filter has
// no such bound.
const maxSelected = 100

// selectedName is the parameter with the id of a selected failure. It is repeated.
const selectedName = "id"

// selectedNames are the filter of the list, to go back to, and the selected failures.
var selectedNames = with(filterNames, selectedName)

// selectedPage asks for the reason of an action on selected failures.
type selectedPage struct {
	Action string
	Values url.Values   // the filter and the ids, to be sent again
	Query  template.URL // the filter, to go back
	Rows   []selectedRow
	Able   int // rows on which the action is possible
	Reason string
	Change string // the merge patch of an edit, as the user wrote it
	Tried  bool   // the rows show what Change does
	Seen   string // the snapshot from before the first row was read, to be sent again
	Wrong  string
}

// selectedRow is a selected failure.
type selectedRow struct {
	failedRow

	Why   string   // why the action is not possible; empty if it is
	After *payload // the payload after an edit; nil if it is not known
}

// selection is what a request selects.
type selection struct {
	action string
	filter outboxops.FailureFilter
	ids    []outboxops.FailureID
	seen   string // of the page that has shown them; empty if the request does not say
}

// selection reads the action, the filter and the selected failures.
func (r *request) selection() (s selection, err error) {
	q := &r.query
	s.action, s.filter, s.seen = r.PathValue("action"), q.failedFilter(), q.seenIfAny()
	for _, text := range q.values[selectedName] {
		id, err := outboxops.ParseFailureID(text)
		if err != nil {
			q.fail(selectedName, "is not an id such as event-17")
		}
		if !slices.Contains(s.ids, id) {
			s.ids = append(s.ids, id)
		}
	}
	switch {
	case len(s.ids) == 0:
		q.fail(selectedName, "no failure is selected")
	case len(s.ids) > maxSelected:
		q.fail(selectedName, "more than "+strconv.Itoa(maxSelected)+" failures are selected: act on all that a filter picks instead")
	}
	if selectedTitles[s.action] == "" {
		return s, errNowhere
	}
	return s, q.done()
}

var selectedTitles = map[string]string{"retry": "Retry selected failures", "resolve": "Resolve selected failures", "edit": "Edit selected failures"}

// selectedReview is the dry run of an action on selected failures.
func (a *admin) selectedReview(r *request) (answer, error) {
	s, err := r.selection()
	if err != nil {
		return answer{}, err
	}
	return a.showSelected(r, http.StatusOK, s, selectedPage{})
}

// showSelected completes a page with its rows, unless it has them, and writes it.
func (a *admin) showSelected(r *request, status int, s selection, page selectedPage) (answer, error) {
	values := failedValues(s.filter)
	page.Action, page.Query, page.Values = s.action, encode(values), values
	if page.Rows == nil {
		for _, id := range s.ids {
			row, err := a.selectedRow(r.Context(), id, s.action)
			if err != nil {
				return answer{}, err
			}
			row.Payload = nil
			page.Rows = append(page.Rows, row)
		}
	}
	page.Values[selectedName] = each(page.Rows, func(row selectedRow) string { return row.ID.String() })
	for _, row := range page.Rows {
		if row.Why == "" {
			page.Able++
		}
		page.Seen = cmp.Or(page.Seen, row.Seen)
	}
	return a.page(r.Request, status, "selected", selectedTitles[s.action], page), nil
}

// selectedRow reads a failure, without its payload on the page. A failure that is gone is a row that says so.
func (a *admin) selectedRow(ctx context.Context, id outboxops.FailureID, action string) (selectedRow, error) {
	f, err := a.failed.Get(ctx, id)
	if p, ours := shown(err); err != nil && ours {
		return selectedRow{failedRow: failedRow{Failure: outboxops.Failure{ID: id}}, Why: p.text}, nil
	}
	row := selectedRow{failedRow: a.failedRowOf(f), Why: notPossible(f, action)}
	if err == nil && row.Why == "" {
		row.Why, err = a.neverSent(ctx, f, action)
	}
	return row, err
}

// neverSent returns why no relay would send an event after a retry or an edit, which its row does not say. It picks the
// event as a retry of many does.
func (a *admin) neverSent(ctx context.Context, f outboxops.Failure, action string) (why string, err error) {
	if f.ID.Kind != outboxops.KindEvent || action == "resolve" || action == "edit" && isUnreadable(f) {
		return "", nil
	}
	n, err := a.failed.RetryAll(ctx, f.Filter(), outboxops.BulkConfig{DryRun: true}, outboxops.AuditInfo{Operator: "none", Reason: "dry run"})
	switch {
	case n > 0 || err != nil:
		return "", err
	case isUnreadable(f):
		return "It has no payload that can be read, or its relay has ended.", nil
	}
	return "Its relay has ended, or it has changed just now.", nil
}

// isUnreadable reports whether the payload of a failure could not be read, which is shown in its place.
func isUnreadable(f outboxops.Failure) bool { return f.PayloadErr != nil }

// notPossible returns why an action on a failure will be refused, as far as its row says so. It follows the rules of
// [outboxops.Failures].
func notPossible(f outboxops.Failure, action string) string {
	ofEvent := f.ID.Kind == outboxops.KindEvent
	switch {
	case f.Status == outboxops.StatusDone:
		return "It is handled."
	case f.LockedBy != "":
		return "A worker has it now."
	case action == "retry" && !ofEvent && (f.Status == outbox.StatusDead || f.Status == outbox.StatusResolved):
		return ""
	case f.Status == outbox.StatusResolved:
		return "It is resolved."
	case action == "retry" && !ofEvent:
		return "It is " + f.Status + ": only a dead or resolved delivery is retried."
	case action == "retry" && f.Status == outbox.StatusParked:
		return "It is parked behind another event of its key: retry that."
	case action == "retry" && f.Held && f.Status != outbox.StatusDead:
		return "Its key is held: release the key."
	case action == "edit" && f.Status != outbox.StatusDead:
		return "It is " + f.Status + ": only a dead one is edited."
	case action == "edit" && f.ContentType != jsonType:
		return notJSON
	}
	return ""
}

// notJSON says why a merge patch cannot change a payload.
const notJSON = "Its payload is no JSON that jsonb can hold: edit it alone."

// selectedAct acts on each selected failure, or tries an edit. If some actions are refused, it shows those failures
// with the reasons.
func (a *admin) selectedAct(r *request) (answer, error) {
	s, err := r.selection()
	if err != nil {
		return answer{}, err
	}
	q := &r.query
	page := selectedPage{Reason: q.text("reason"), Change: q.text("change")}
	if s.action == "edit" {
		if err := checkChange(page.Change); err != nil {
			page.Wrong = err.text
			return a.showSelected(r, err.status, s, page)
		}
		if q.text("step") != "save" {
			return a.tryEdits(r, s, page)
		}
	}
	// Before a payload is read: what an edit is refused for says something of it.
	if err := checkReason(auditInfo(r, page.Reason)); err != nil {
		page.Wrong = trimmed(err) + "."
		return a.showSelected(r, http.StatusUnprocessableEntity, s, page)
	}
	done := 0
	for _, id := range s.ids {
		err := a.actOnSelected(r, s, id, page)
		r.work.pause()
		if p, ours := shown(err); err != nil && ours {
			row, rerr := a.selectedRow(r.Context(), id, s.action)
			if rerr != nil {
				return answer{}, &partly{rerr, s.action, done}
			}
			row.Why, row.Payload = p.text, nil
			page.Rows = append(page.Rows, row)
			continue
		}
		if err != nil {
			return answer{}, &partly{err, s.action, done}
		}
		done++
	}
	if len(page.Rows) > 0 {
		page.Wrong = plural(int64(done), "failure is", "failures are") + " " + pastActions[s.action] + ". The other ones are below, with the reason."
		return a.showSelected(r, http.StatusConflict, s, page)
	}
	back := failedValues(s.filter)
	back.Set("done", s.action+"_all")
	back.Set("n", strconv.Itoa(done))
	return redirectTo("../../failed?" + back.Encode()), nil
}

// checkReason does the check of [outboxops.Failures] in advance.
func checkReason(why outboxops.AuditInfo) error {
	return check.Audit("", why.Operator, why.Reason, check.MaxReason)
}

// actOnSelected runs an action on one of the selected failures. An edit reads the payload, which is audited first.
func (a *admin) actOnSelected(r *request, s selection, id outboxops.FailureID, page selectedPage) error {
	action, why := s.action, auditInfo(r, page.Reason)
	why.Seen = s.seen
	if action == "edit" && a.cfg.AuditReads {
		if err := a.failed.AuditRead(r.Context(), id, auditInfo(r, readReason(r))); err != nil {
			return err
		}
	}
	row, err := a.failed.Get(r.Context(), id)
	if err != nil {
		return err
	}
	changed := ""
	if action == "edit" {
		if not := notPossible(row, action); not != "" {
			return &problem{http.StatusConflict, "Not possible any more", not}
		}
		data, err := a.patched(row, page.Change)
		if err != nil {
			return err
		}
		changed = string(data)
	}
	return actions[action](r.Context(), a.failed, row, changed, why)
}
