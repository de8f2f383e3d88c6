package outboxadmin

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
)

// An operator pauses and resumes a group, or one of its topics, on the page, with a reason that the audit has. A
// reader sees the pause and no form.
func TestPauseOnThePage(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, nil)
	require.Contains(t, h.get("/consumers"), `href="./consumers/pause?group=mail&amp;topic=order-events">Pause…`)
	require.NotContains(t, h.send("reader", http.MethodGet, "/consumers", "", "").Body.String(), "Pause…")
	page := h.get("/consumers/pause?group=mail&topic=order-events")
	require.Contains(t, page, "Pause topic order-events of group mail?")
	require.Contains(t, page, "loses records")

	w := h.post("/consumers/pause", "group", "mail", "topic", "order-events", "reason", "the printer <burns>")
	require.Equal(t, http.StatusSeeOther, w.Code, w.Body)
	require.Equal(t, "../consumers?done=pause", w.Header().Get("Location"))
	require.Equal(t, audited{"o.operator", "pause", "the printer <burns>"}, h.lastAudit())
	page = h.get("/consumers?done=pause")
	require.Contains(t, page, "The pause is stored.")
	require.Contains(t, page, "1 topic paused")
	require.Contains(t, page, `href="./consumers/resume?group=mail&amp;topic=order-events">Resume…`)
	require.Contains(t, h.get("/consumers/pause?group=mail&topic=order-events"), "it is paused already")
	require.Contains(t, h.get("/consumers/resume?group=mail"), "it is not paused")

	w = h.post("/consumers/resume", "group", "mail", "topic", "order-events", "reason", "  ")
	require.Equal(t, http.StatusUnprocessableEntity, w.Code)
	require.Contains(t, w.Body.String(), "Reason is empty")
	require.Equal(t, http.StatusConflict, h.post("/consumers/resume", "group", "mail", "reason", "x").Code)
	require.Equal(t, http.StatusSeeOther, h.post("/consumers/resume", "group", "mail", "topic", "order-events", "reason", "it is out").Code)
	require.Equal(t, audited{"o.operator", "resume", "it is out"}, h.lastAudit())

	require.Equal(t, http.StatusSeeOther, h.post("/consumers/pause", "group", "stats", "topic", "", "reason", "a migration").Code)
	require.Contains(t, h.get("/consumers"), "Resume all topics…")
	for _, bad := range []string{"/consumers/pause", "/consumers/pause?topic=x", "/consumers/pause?group=a&group=b"} {
		require.Equal(t, http.StatusBadRequest, h.send("operator", http.MethodGet, bad, "", "").Code, bad)
	}
	require.Equal(t, http.StatusNotFound, h.send("operator", http.MethodGet, "/consumers/rewind?group=mail", "", "").Code)
	require.Equal(t, http.StatusNotFound, h.post("/consumers/rewind", "group", "mail", "reason", "x").Code)
}
