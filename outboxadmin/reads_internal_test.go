package outboxadmin

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// reads returns the audit's entries for reads of payloads.
func (h *adminFixture) reads() []string {
	h.t.Helper()
	return query1[[]string](h, `SELECT coalesce(array_agg(concat_ws(' ', operator, reason, failed_id, outbox_id) ORDER BY id), '{}') FROM {s}.outbox_audit WHERE action = 'read'`)
}

// The audit has the reader of a payload before the payload is shown, on all pages. Lists show no payloads.
func TestReadsAreAudited(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, func(c *Config) { c.AuditReads = true })
	for _, path := range []string{"/", "/failed", "/events", "/audit", "/api/failed", "/api/events", "/api/audit", "/failed/retry?status=dead"} {
		h.get(path)
	}
	require.Empty(t, h.reads())
	for _, path := range []string{"/failed/event-1", "/api/failed/event-1", "/events/4099001", "/api/events/4099001"} {
		require.Equal(t, http.StatusOK, h.send("reader", http.MethodGet, path, "", "").Code, path)
	}
	want := []string{"r.reader shown on the page 1 4099003", "r.reader shown by the API 1 4099003", "r.reader shown on the page 4099001", "r.reader shown by the API 4099001"}
	require.Equal(t, want, h.reads())
	for _, path := range []string{"/failed/event-99999", "/api/events/1"} {
		require.Equal(t, http.StatusNotFound, h.send("reader", http.MethodGet, path, "", "").Code, path)
	}
	require.Equal(t, http.StatusUnprocessableEntity, h.post("/failed/event-1/retry", "reason", " ").Code)
	require.Len(t, h.reads(), 5, "what is refused shows the event again")
	require.Contains(t, h.get("/audit"), "r.reader")
	require.Contains(t, h.get("/audit"), `href="events/4099001"`)
	require.NotContains(t, h.get("/failed/event-1"), "r.reader", "the history is what was done")
	require.Contains(t, h.get("/api/audit"), `"action":"read"`)
	quiet := newAdminFixture(t, nil)
	quiet.get("/failed/event-1")
	require.Empty(t, quiet.reads())
}

// A read that cannot be written down shows nothing.
func TestUnauditedReadsShowNothing(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, func(c *Config) { c.AuditReads = true })
	_, err := h.db.Exec(t.Context(), `ALTER TABLE "`+h.schema+`".outbox_audit ADD CONSTRAINT no_more CHECK (action <> 'read')`)
	require.NoError(t, err)
	for _, path := range []string{"/failed/event-1", "/api/failed/event-1", "/events/4099001", "/api/events/4099001"} {
		w := h.send("operator", http.MethodGet, path, "", "")
		require.Equal(t, http.StatusServiceUnavailable, w.Code, path)
		require.NotContains(t, w.Body.String(), "neighbour")
		require.NotContains(t, w.Body.String(), "orderId")
	}
	require.Equal(t, 4, strings.Count(h.log.String(), "is read"))
	long := newAdminFixture(t, func(c *Config) {
		c.AuditReads = true
		c.Authorize = func(*http.Request) (Access, error) {
			return Access{Operator: strings.Repeat("x", 101), Role: Reader}, nil
		}
	})
	require.Equal(t, http.StatusForbidden, long.send("reader", http.MethodGet, "/failed/event-1", "", "").Code, "a name that cannot be kept")
}
