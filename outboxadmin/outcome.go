package outboxadmin

import (
	"cmp"
	"fmt"
	"html/template"
	"net/http"
	"slices"

	"github.com/outboxgo/outbox/outboxops"
)

// gonePage shows the outcome of a failure whose row no longer exists.
type gonePage struct {
	ID      outboxops.FailureID
	BackTo  template.URL // the list from which the user came
	Done    string       // the action that was done before
	Outcome string
	Events  []eventRow // of its event, as far as they are recorded here
	History []outboxops.AuditEntry
}

// showGone shows the outcome of a failure that operators have acted on. For other failures it returns the
// error missing.
func (a *admin) showGone(r *request, id outboxops.FailureID, done string, missing error) (answer, error) {
	history, err := a.failed.Audit(r.Context(), id, outboxops.AuditPage{Limit: 1000, WithoutReads: true})
	if err != nil {
		return answer{}, err
	}
	if len(history) == 0 {
		return answer{}, missing
	}
	page := gonePage{ID: id, Done: done, History: history, BackTo: failedPage{List: r.query.list()}.BackTo()}
	if event := history[0].EventID; event != "" {
		if page.Events, _, err = a.events(r.Context(), outboxops.EventFilter{EventID: event}, 0, 10); err != nil {
			return answer{}, err
		}
	}
	page.Outcome = outcomeOf(id.Kind, history, page.Events)
	return a.page(r.Request, http.StatusOK, "failed_gone", "What became of "+id.String(), page), nil
}

// outcomeOf returns how a failure ended. A failed event leaves its table once it is sent. A delivery leaves
// it some time after it was handled. Both leave it some time after they were resolved, or had expired.
func outcomeOf(kind outboxops.Kind, history []outboxops.AuditEntry, events []eventRow) string {
	last := slices.IndexFunc(history, func(e outboxops.AuditEntry) bool {
		return slices.Contains([]string{"retry", "edit", "resolve"}, e.Action)
	})
	recorded := func(is func(eventRow) bool) bool {
		return slices.ContainsFunc(events, func(e eventRow) bool { return !e.Removed && is(e) })
	}
	orExpired := ", or it had expired before"
	if recorded(func(e eventRow) bool { return e.ExpiresAt.IsZero() }) {
		orExpired = ""
	}
	relay := cmp.Or(history[0].Relay, "default")
	switch {
	case last >= 0 && history[last].Action == "resolve":
		return fmt.Sprintf("It was resolved by %s, and retention has removed the row.", history[last].Operator)
	case kind == outboxops.KindDelivery:
		return fmt.Sprintf("Group %s has handled it%s. Retention has removed the row.", history[0].Group, orExpired)
	case recorded(func(e eventRow) bool { return slices.Contains(e.AttemptedBy, history[0].Relay) }) && orExpired == "":
		return fmt.Sprintf("Relay %s has sent it: it is in Kafka.", relay)
	case recorded(func(eventRow) bool { return true }):
		return fmt.Sprintf("Relay %s has sent it%s.", relay, orExpired)
	}
	return fmt.Sprintf("Relay %s has sent it%s. The event itself is not recorded here any more: retention has removed it.", relay, orExpired)
}
