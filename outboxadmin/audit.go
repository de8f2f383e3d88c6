package outboxadmin

import (
	"context"
	"html/template"
	"net/http"
	"slices"
	"strconv"

	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/outboxops"
)

// auditList is the page of the audit.
type auditList struct {
	Filter   outboxops.AuditPage
	Failure  string // the id of the only one; or empty
	Actions  []string
	Filtered bool
	Rows     []auditRow
	Query    template.URL // the filter as parameters
	Older    template.URL // parameters, or empty
	Newer    bool         // newer entries are left out
}

func (a *admin) auditList(r *request) (answer, error) {
	q := &r.query
	id, filter := q.auditFilter(rowsPerPage)
	if err := q.done(); err != nil {
		return answer{}, err
	}
	rows, err := a.auditEntries(r.Context(), id, filter)
	if err != nil {
		return answer{}, err
	}
	values := r.URL.Query()
	values.Del("before")
	page := auditList{Filter: filter, Failure: id.String(), Actions: withPicked(slices.Clone(tables.AuditActions), filter.Action), Rows: each(rows, a.auditRowOf), Newer: filter.Before != 0,
		Query: encode(values)}
	for name := range values {
		page.Filtered = page.Filtered || name != "limit" && values.Get(name) != ""
	}
	if len(rows) == filter.Limit {
		values.Set("before", strconv.FormatInt(rows[filter.Limit-1].ID, 10))
		page.Older = encode(values)
	}
	return a.page(r.Request, http.StatusOK, "audit", "Audit", page), nil
}

// auditEntries returns entries without the payloads from before edits. Those are on the page of the
// failure, where reading them is audited.
func (a *admin) auditEntries(ctx context.Context, id outboxops.FailureID, page outboxops.AuditPage) ([]outboxops.AuditEntry, error) {
	entries, err := a.failed.Audit(ctx, id, page)
	for i := range entries {
		entries[i].Payload, entries[i].PayloadErr = nil, nil
	}
	return entries, err
}
