package outboxadmin

import (
	"encoding/json"
	"net/http"
	"regexp"
	"testing"

	"github.com/outboxgo/outbox/outboxadmin/internal/seed"
	"github.com/stretchr/testify/require"
)

type audited struct{ operator, action, reason string }

// lastAudit returns the newest entry of the audit.
func (h *adminFixture) lastAudit() (a audited) {
	h.t.Helper()
	require.NoError(h.t, h.db.QueryRow(h.t.Context(), `SELECT operator, action, reason FROM "`+h.schema+`".outbox_audit ORDER BY id DESC LIMIT 1`).
		Scan(&a.operator, &a.action, &a.reason))
	return a
}

var actTests = []struct {
	action, more, status, text string
}{
	{"retry", "", "parked", "The relay sends it at its next poll."},
	{"resolve", "", "resolved", "It is resolved."},
	{"edit", `{"gift": false}`, "parked", "The payload is changed"},
	{"release", "", "dead", "The key is released"},
	{"hold", "", "dead and held", "The key is held"},
}

// Each action is done once, by name and reason, by form and by API.
func TestActs(t *testing.T) {
	t.Parallel()
	for _, tt := range actTests {
		t.Run(tt.action, func(t *testing.T) {
			h := newAdminFixture(t, nil)
			w := h.post("/failed/event-1/"+tt.action, "reason", "the <reason>", "payload", tt.more)
			require.Equal(t, http.StatusSeeOther, w.Code, w.Body)
			require.Equal(t, "../event-1?done="+tt.action, w.Header().Get("Location"))
			require.Contains(t, h.get("/failed/event-1?done="+tt.action), tt.text)
			require.Equal(t, tt.status, h.status(seed.Dead))
			require.Equal(t, audited{"o.operator", tt.action, "the <reason>"}, h.lastAudit())

			h = newAdminFixture(t, nil)
			body := map[string]any{"reason": "by API"}
			path := "/api/failed/event-1/" + tt.action
			if tt.more != "" {
				body["payload"] = json.RawMessage(tt.more)
			}
			w = h.call(path, body)
			require.Equal(t, http.StatusNoContent, w.Code, w.Body)
			require.Equal(t, tt.status, h.status(seed.Dead))
			require.Equal(t, audited{"o.operator", tt.action, "by API"}, h.lastAudit())
		})
	}
}

// A refused action changes nothing, says why, and keeps the text that the user wrote.
func TestRefusedActs(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	resolved := query1[int64](h, `SELECT min(id) FROM {s}.outbox_failed WHERE status = 'resolved'`)
	require.EqualValues(t, 7, resolved)
	before := query1[int](h, `SELECT count(*) FROM {s}.outbox_audit`)
	for _, tt := range []struct {
		name, path    string
		form          []string
		code          int
		text, keeping string
	}{
		{"no reason", "/failed/event-1/retry", []string{"reason", " \n"}, 422, "Reason is empty", ""},
		{"no form", "/failed/event-1/resolve", nil, 422, "Reason is empty", ""},
		{"not JSON", "/failed/event-1/edit", []string{"reason", "see OPS-1", "payload", `{"half":`}, 422, "payload", "see OPS-1"},
		{"resolved", "/failed/event-7/retry", []string{"reason", "again"}, 409, "it is resolved", ""},
		{"gone", "/failed/event-99999/retry", []string{"reason", "again"}, 404, "It is not here", ""},
		{"no such action", "/failed/event-1/delete", []string{"reason", "again"}, 404, "Nothing is here", ""},
		{"no kind", "/failed/1/retry", []string{"reason", "again"}, 404, "Nothing is here", ""},
		{"no id", "/failed/one/retry", []string{"reason", "again"}, 404, "Nothing is here", ""},
		{"a filter mistyped", "/failed/retry", []string{"reason", "again", "stauts", "dead"}, 400, "stauts", ""},
		{"all without a reason", "/failed/resolve", []string{"status", "dead"}, 422, "Reason is empty", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h.t = t
			w := h.post(tt.path, tt.form...)
			require.Equal(t, tt.code, w.Code, w.Body)
			require.Contains(t, w.Body.String(), tt.text)
			require.Contains(t, w.Body.String(), tt.keeping)
		})
	}
	h.t = t
	for body, code := range map[string]int{
		`{"filter": {"stauts": "dead"}, "reason": "x"}`: 400, `{"reason": "x"}`: 400, `{"filtre": {}, "reason": "x"}`: 400, `{"filter": {}}`: 422,
		`{"filter": {}, "reason": "x"} {}`: 400, `[]`: 400, ``: 400,
	} {
		require.Equal(t, code, h.send("operator", http.MethodPost, "/api/failed/retry", "application/json", body).Code, body)
	}
	require.Equal(t, 415, h.send("operator", http.MethodPost, "/api/failed/retry", "text/plain", `{"filter": {}, "reason": "x"}`).Code)
	require.Equal(t, 400, h.call("/api/failed/event-1/edit", map[string]any{"reason": "x"}).Code)
	require.Equal(t, 404, h.call("/api/failed/event-99999/hold", map[string]any{"reason": "x"}).Code)
	require.Equal(t, 404, h.call("/api/failed/delivery-1/hold", map[string]any{"reason": "x"}).Code)
	require.Equal(t, 400, h.call("/api/failed/retry", map[string]any{"filter": map[string]string{"status": "done"}, "reason": "x"}).Code)
	require.Equal(t, 400, h.call("/api/failed/retry", map[string]any{"filter": map[string]string{"relay": "default", "group": "stats"}, "reason": "x"}).Code)
	require.Equal(t, before, query1[int](h, `SELECT count(*) FROM {s}.outbox_audit`))
}

// The dry run shows a number. The confirmed action changes these failures and no more, even if more have
// failed meanwhile.
func TestBulk(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	page := h.get("/failed/retry?type=loopers.order.created.v1&status=dead")
	require.Contains(t, page, "Retry 14 failures?")
	require.Equal(t, 15, query1[int](h, `SELECT count(*) FROM {s}.outbox_failed WHERE status = 'dead'`), "a dry run changes nothing")
	form := []string{"reason", "the limit was raised"}
	for _, field := range regexp.MustCompile(`<input type="hidden" name="([^"]+)" value="([^"]+)">`).FindAllStringSubmatch(page, -1) {
		form = append(form, field[1], field[2])
	}
	require.Contains(t, form, "until")
	_, err := h.db.Exec(t.Context(), `UPDATE "`+h.schema+`".outbox_failed SET failed_at = now() + interval '1 s'
		WHERE id = (SELECT max(id) FROM "`+h.schema+`".outbox_failed WHERE status = 'dead')`)
	require.NoError(t, err)
	w := h.post("/failed/retry", form...)
	require.Equal(t, http.StatusSeeOther, w.Code, w.Body)
	require.Equal(t, "../failed?done=retry_all&n=13&status=dead&type=loopers.order.created.v1", w.Header().Get("Location"))
	require.Contains(t, h.get("/failed?done=retry_all&n=13&status=dead"), "13 failures are retried")
	require.Equal(t, audited{"o.operator", "retry", "the limit was raised"}, h.lastAudit())

	w = h.call("/api/failed/resolve", map[string]any{"filter": map[string]string{"status": "parked"}, "dry_run": true})
	parked := `, "topics": [{"topic": "like-events", "events": 29}, {"topic": "order-events", "events": 29}], "handlers": []}`
	require.JSONEq(t, `{"events": 58, "dry_run": true`+parked, w.Body.String())
	w = h.call("/api/failed/resolve", map[string]any{"filter": map[string]string{"status": "parked"}, "reason": "test data"})
	require.JSONEq(t, `{"events": 58, "dry_run": false`+parked, w.Body.String())
	require.Zero(t, query1[int](h, `SELECT count(*) FROM {s}.outbox_failed WHERE status = 'parked'`))
}

// Payloads that are not JSON are shown as text or hex, and edited in hex.
func TestEditBytes(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	_, err := h.db.Exec(t.Context(), `UPDATE "`+h.schema+`".outbox_failed SET payload = NULL, payload_bytes = '\x0a03c0ffee', content_type = 'application/protobuf' WHERE id = 1`)
	require.NoError(t, err)
	page := h.get("/failed/event-1")
	require.Contains(t, page, "0a 03 c0 ff ee")
	require.Contains(t, page, "required>0a03c0ffee</textarea>")
	require.Contains(t, h.get("/api/failed/event-1"), `"payload_base64":"CgPA/+4="`)
	require.Equal(t, 400, h.post("/failed/event-1/edit", "reason", "x", "payload", "0a0").Code)
	require.Equal(t, http.StatusSeeOther, h.post("/failed/event-1/edit", "reason", "x", "payload", "0a 03\r\nc0ffef").Code)
	require.Equal(t, []byte{0x0a, 0x03, 0xc0, 0xff, 0xef}, query1[[]byte](h, `SELECT payload_bytes FROM {s}.outbox_failed WHERE id = 1`))
}
