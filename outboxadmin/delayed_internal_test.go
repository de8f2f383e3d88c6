package outboxadmin

import (
	"net/http"
	"net/url"
	"testing"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"
)

// Rejected and overdue delayed events are problems on the overview.
func TestDelayedNotices(t *testing.T) {
	t.Parallel()
	h := calmFixture(t)
	insert := func(due, rejected string) {
		h.exec(`INSERT INTO {s}.outbox_delayed (due_at, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, rejected_at, rejection)
			SELECT now() + $1::interval, gen_random_uuid(), 'acme.order.due.v1', 'shop', 'Order', '1', '1', 'application/json', now(), now() + $2::interval, '23505: taken' || $2`, due, pgtype.Text{String: rejected, Valid: rejected != ""})
	}
	insert("1 hour", "")
	insert("-1 minute", "")
	require.Empty(t, h.notices(), "one is not due yet, and one is late, but not for too long")
	insert("-3 hours", "")
	insert("-2 hours", "-1 hour")
	require.Equal(t, []string{
		"bad Delayed events: the oldest has been due for 3 h, and was not moved to outbox.",
		"bad Delayed events: outbox has rejected 1 event, which will not be sent.",
	}, h.notices())
	page := h.get("/")
	require.NotContains(t, page, "All is well")
	require.Contains(t, page, `href="./delayed?rejected=1"`)
	require.Contains(t, page, `href="./delayed"`)
}

// Delayed events are listed page by page, and an operator cancels one with a reason.
func TestDelayedPage(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	require.Contains(t, h.get("/delayed"), "None is recorded with a due time")
	h.exec(`INSERT INTO {s}.outbox_delayed
		(due_at, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, rejected_at, rejection)
		SELECT now() + make_interval(hours => n), ('00000000-0000-4000-8000-00000000000' || n)::uuid, 'acme.order.due.v1', 'shop', 'Order', 'O-' || n, '1', 'application/json', now(),
		       CASE n WHEN 3 THEN now() END, CASE n WHEN 3 THEN '23505: <taken>' END
		  FROM generate_series(1, 4) AS n`)
	page := h.get("/delayed?limit=2")
	require.Contains(t, page, "O-1")
	require.Contains(t, page, "O-2")
	require.NotContains(t, page, "O-4")
	require.Contains(t, page, "3 waiting, 1 rejected")
	require.Contains(t, page, "Cancel an event")
	found := h.crawl("/delayed?limit=2")
	later := 0
	for path, page := range found {
		if u, err := url.Parse(path); err == nil && u.Path == "/delayed" && u.Query().Get("after_id") == "2" {
			later++
			require.Contains(t, page, "O-4")
		}
	}
	require.Equal(t, 1, later)
	require.Contains(t, h.get("/delayed?rejected=1"), "23505: &lt;taken&gt;")
	require.NotContains(t, h.send("reader", http.MethodGet, "/delayed", "", "").Body.String(), "Cancel an event")

	cancel := func(id, reason string) (code int, text string) {
		w := h.send("operator", http.MethodPost, "/delayed/cancel", formType, url.Values{"event_id": {id}, "reason": {reason}}.Encode())
		return w.Code, w.Body.String() + w.Header().Get("Location")
	}
	const first = "00000000-0000-4000-8000-000000000001"
	code, text := cancel(first, " ")
	require.Equal(t, http.StatusUnprocessableEntity, code)
	require.Contains(t, text, "Not done")
	code, text = cancel("what", "paid")
	require.Equal(t, http.StatusUnprocessableEntity, code)
	require.Contains(t, text, "This is no id of an event.")
	code, text = cancel(first, "paid")
	require.Equal(t, http.StatusSeeOther, code)
	require.Contains(t, text, "delayed?done=cancel&n=1")
	require.Contains(t, h.get("/delayed?done=cancel&n=1"), "1 event is deleted")
	require.NotContains(t, h.get("/delayed"), "O-1")
	require.Contains(t, h.get("/audit"), "cancelled a delayed event of")
	require.Equal(t, http.StatusBadRequest, h.send("reader", http.MethodGet, "/delayed?after=x", "", "").Code)
}
