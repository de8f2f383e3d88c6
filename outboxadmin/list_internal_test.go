package outboxadmin

import (
	"net/http"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"
)

// The page of a failure leads back to the list with its filter, also after an act, and when the failure is gone.
func TestBackToTheList(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	const list = "class=invalid_record&status=dead"
	asked := url.QueryEscape(list)
	require.Contains(t, h.get("/failed?status=dead&class=invalid_record"), `href="failed/event-1?list=class%3dinvalid_record%26status%3ddead"`)
	require.Contains(t, h.get("/failed"), `href="failed/event-118"`)
	back := `<a href="./../failed?class=invalid_record&amp;status=dead">Failures</a>`
	page := h.get("/failed/event-1?list=" + asked)
	require.Contains(t, page, back)
	require.Contains(t, page, `<input type="hidden" name="list" value="class=invalid_record&amp;status=dead">`)
	w := h.post("/failed/event-1/resolve", "reason", " ", "list", list)
	require.Equal(t, http.StatusUnprocessableEntity, w.Code)
	require.Contains(t, w.Body.String(), `<a href="./../../failed?class=invalid_record&amp;status=dead">Failures</a>`)
	w = h.post("/failed/event-1/resolve", "reason", "because", "list", list)
	require.Equal(t, "../event-1?done=resolve&list="+asked, w.Header().Get("Location"))
	_, err := h.db.Exec(t.Context(), `DELETE FROM "`+h.schema+`".outbox_failed WHERE id = 1`)
	require.NoError(t, err)
	require.Contains(t, h.get("/failed/event-1?list="+asked), back)
	for _, bad := range []string{"javascript:alert(1)", "status=gone", "a=b", "%%", "status=dead&status=failed", "after=event-1"} {
		require.Contains(t, h.get("/failed/event-2?list="+url.QueryEscape(bad)), `<a href="./../failed">Failures</a>`, bad)
	}
}
