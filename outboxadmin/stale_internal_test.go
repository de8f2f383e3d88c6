package outboxadmin

import (
	"encoding/json"
	"net/http"
	"net/url"
	"testing"

	"github.com/outboxgo/outbox/outboxops"
	"github.com/stretchr/testify/require"
)

// other does something to a failure as another operator does, who then leaves it dead again.
func (h *adminFixture) other(t *testing.T, id outboxops.FailureID) {
	t.Helper()
	ops, err := outboxops.NewFailures(h.db, outboxops.FailuresConfig{Schema: h.schema})
	require.NoError(t, err)
	require.NoError(t, ops.Edit(t.Context(), id, []byte(`{"repaired": true}`), outboxops.AuditInfo{Operator: "o.other", Reason: "repaired"}))
	h.exec(`UPDATE {s}.event_delivery SET status = 'DEAD', attempt_count = 10 WHERE status IN ('PENDING', 'PARKED') AND payload = '{"repaired": true}'`)
	h.exec(`UPDATE {s}.outbox_failed SET status = 'dead' WHERE payload = '{"repaired": true}'`)
}

// repaired counts the failures that the other operator has edited and that are as this operator left them.
func (h *adminFixture) repaired() int {
	return query1[int](h, `SELECT (SELECT count(*) FROM {s}.outbox_failed WHERE status = 'dead' AND payload = '{"repaired": true}')::int +
		(SELECT count(*) FROM {s}.event_delivery WHERE status = 'DEAD' AND resolved_at IS NULL AND payload = '{"repaired": true}')::int`)
}

// fieldsOf returns the fields of the forms of a page, with their repetitions.
func fieldsOf(page, reason string) url.Values {
	form, pairs := url.Values{}, confirmed(page, reason)
	for i := 0; i+1 < len(pairs); i += 2 {
		form.Add(pairs[i], pairs[i+1])
	}
	return form
}

// A page that is open shows a failure from before another operator has edited it. What its user does then is rejected:
// it would drop, or replace, what is repaired. The page that says so shows the failure as it is now.
func TestStalePage(t *testing.T) {
	t.Parallel()
	for _, action := range []string{"resolve", "retry", "edit", "hold"} {
		t.Run(action, func(t *testing.T) {
			t.Parallel()
			h := newBusyFixture(t, nil)
			for n, id := range []outboxops.FailureID{{Kind: outboxops.KindEvent, Number: 1}, {Kind: outboxops.KindDelivery, Number: 1}} {
				h.exec(`UPDATE {s}.outbox_failed SET held = false`)
				page := h.get("/failed/" + id.String())
				form := []string{"reason", "lost", "payload", `{"mine": true}`, "seen", fieldsOf(page, "").Get("seen")}
				require.NotEmpty(t, form[5])
				var read struct{ Seen string }
				require.NoError(t, json.Unmarshal([]byte(h.get("/api/failed/"+id.String())), &read))
				h.other(t, id)
				w := h.post("/failed/"+id.String()+"/"+action, form...)
				require.Equal(t, http.StatusConflict, w.Code, w.Body)
				require.Contains(t, w.Body.String(), "after it was read, o.other did this: ")
				require.Equal(t, n+1, h.repaired())

				body := map[string]any{"reason": "lost", "seen": read.Seen}
				if action == "edit" {
					body["payload"] = map[string]bool{"mine": true}
				}
				require.Equal(t, http.StatusConflict, h.call("/api/failed/"+id.String()+"/"+action, body).Code)
				require.Equal(t, n+1, h.repaired())
			}
			form := []string{"reason", "lost", "payload", `{"mine": true}`, "seen", fieldsOf(h.get("/failed/event-1"), "").Get("seen")}
			require.Equal(t, http.StatusSeeOther, h.post("/failed/event-1/"+action, form...).Code, "the page is fresh")
		})
	}
	h := newAdminFixture(t, nil)
	require.Equal(t, http.StatusBadRequest, h.post("/failed/event-1/retry", "reason", "x", "seen", "yesterday").Code)
	require.Equal(t, http.StatusUnprocessableEntity, h.call("/api/failed/event-1/retry", map[string]any{"reason": "x", "seen": "yesterday"}).Code)
}

// The same for selected failures: the other ones are done.
func TestStaleSelection(t *testing.T) {
	t.Parallel()
	for _, action := range []string{"resolve", "retry"} {
		t.Run(action, func(t *testing.T) {
			t.Parallel()
			h := newBusyFixture(t, nil)
			form := fieldsOf(h.get("/failed/selected/"+action+"?id=delivery-1&id=event-1&id=delivery-2"), "lost")
			require.NotEmpty(t, form.Get("seen"))
			h.other(t, outboxops.FailureID{Kind: outboxops.KindDelivery, Number: 1})
			h.other(t, outboxops.FailureID{Kind: outboxops.KindEvent, Number: 1})
			code, _, body := h.submit("/failed/selected/"+action, form)
			require.Equal(t, http.StatusConflict, code, body)
			require.Contains(t, body, "1 failure is")
			require.Contains(t, body, "after it was read, o.other did this: ")
			require.Equal(t, 2, h.repaired())
			code, _, body = h.submit("/failed/selected/"+action, fieldsOf(body, "seen now"))
			require.Equal(t, http.StatusSeeOther, code, body)
		})
	}
}

// The same for a change of many payloads, which was shown in a dry run.
func TestStaleDryRunOfAnEdit(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, nil)
	h.other(t, outboxops.FailureID{Kind: outboxops.KindDelivery, Number: 2}) // before the dry run
	form := fieldsOf(h.get("/failed/selected/edit?id=delivery-1&id=delivery-2"), "")
	form.Del("reason")
	form["change"], form["step"] = []string{`{"gift": true}`}, []string{"try"}
	code, _, body := h.submit("/failed/selected/edit", form)
	require.Equal(t, http.StatusOK, code, body)
	h.other(t, outboxops.FailureID{Kind: outboxops.KindDelivery, Number: 1})
	form = fieldsOf(body, "gifts")
	form["change"], form["step"] = []string{`{"gift": true}`}, []string{"save"}
	code, _, body = h.submit("/failed/selected/edit", form)
	require.Equal(t, http.StatusConflict, code, body)
	require.Contains(t, body, "1 failure is edited")
	require.Equal(t, 1, h.repaired())
}
