package outboxadmin

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox/internal/testenv"
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
		{"all without a review", "/failed/resolve", []string{"reason", "again", "status", "dead"}, 400, "look at the failures first", ""},
		{"all without a reason", "/failed/resolve", []string{"status", "dead", "seen", "1:1:"}, 422, "Reason is empty", ""},
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
	form := confirmed(page, "the limit was raised")
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

// confirmed returns the fields with which a user confirms what a page has shown.
func confirmed(page, reason string) (form []string) {
	for _, field := range regexp.MustCompile(`<input type="hidden" name="([^"]+)" value="([^"]+)">`).FindAllStringSubmatch(page, -1) {
		form = append(form, field[1], field[2])
	}
	return append(form, "reason", reason)
}

// A confirmed action leaves alone what came under its filter after the dry run, although it was made before: a delivery
// whose first attempt has failed, an event that has died, and one whose error has changed.
func TestBulkLeavesWhatWasNotShown(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, query, count, later, untouched string
		begun                                bool
	}{
		{"a delivery fails for the first time", "kind=delivery", "Resolve 7 failures?",
			`UPDATE {s}.event_delivery SET status = 'PENDING', locked_by = NULL, locked_until = NULL, last_error_code = 'timeout', updated_at = clock_timestamp() WHERE id IN (8, 9)`,
			`SELECT count(*)::int FROM {s}.event_delivery WHERE id IN (8, 9) AND resolved_at IS NULL`, false},
		{"an event dies", "kind=event&status=dead", "Resolve 15 failures?",
			`UPDATE {s}.outbox_failed SET status = 'dead', next_retry_at = clock_timestamp() WHERE id IN (SELECT id FROM {s}.outbox_failed WHERE status = 'failed' ORDER BY id LIMIT 2)`,
			`SELECT count(*)::int FROM {s}.outbox_failed WHERE status = 'dead'`, false},
		{"a transaction in which an event dies is open", "kind=event&status=dead", "Resolve 15 failures?",
			`UPDATE {s}.outbox_failed SET status = 'dead', next_retry_at = now() WHERE id IN (SELECT id FROM {s}.outbox_failed WHERE status = 'failed' ORDER BY id LIMIT 2)`,
			`SELECT count(*)::int FROM {s}.outbox_failed WHERE status = 'dead'`, true},
		{"the error of an event changes", "kind=event&class=message_too_large", "Resolve ",
			`UPDATE {s}.outbox_failed SET error_class = 'message_too_large' WHERE id IN (SELECT id FROM {s}.outbox_failed WHERE error_class <> 'message_too_large' AND status = 'failed' ORDER BY id LIMIT 2)`,
			`SELECT count(*)::int FROM {s}.outbox_failed WHERE error_class = 'message_too_large' AND status <> 'resolved'`, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := newBusyFixture(t, nil)
			tx, err := h.db.Begin(t.Context())
			require.NoError(t, err)
			later := strings.ReplaceAll(tt.later, "{s}", `"`+h.schema+`"`)
			if tt.begun { // before the review: its times are those of its beginning
				_, err = tx.Exec(t.Context(), later)
				require.NoError(t, err)
			}
			page := h.get("/failed/resolve?" + tt.query)
			require.Contains(t, page, tt.count)
			if !tt.begun {
				_, err = tx.Exec(t.Context(), later)
				require.NoError(t, err)
			}
			require.NoError(t, tx.Commit(t.Context()))
			w := h.post("/failed/resolve", confirmed(page, "lost")...)
			require.Equal(t, http.StatusSeeOther, w.Code, w.Body)
			require.Equal(t, 2, query1[int](h, tt.untouched))
		})
	}
}

// A confirmed action changes all that was shown, also a row of a later part that it has changed itself before: an
// event that was parked behind those of the first part.
func TestBulkChangesAllThatWasShown(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	_, err := h.db.Exec(t.Context(), strings.ReplaceAll(`
		INSERT INTO {s}.outbox_failed (relay, payload, content_type, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, occurred_at, created_at, status, error_class)
		SELECT 'default', '{}', 'application/json', 9000000 + i, 'like-events/one', gen_random_uuid(), 'loopers.like.created.v1', 's', 'Like', 'one', now(), now(),
		       CASE i WHEN 1 THEN 'failed' ELSE 'parked' END, CASE i WHEN 1 THEN 'timeout' END FROM generate_series(1, 250) AS i`, "{s}", `"`+h.schema+`"`))
	require.NoError(t, err)
	w := h.post("/failed/resolve", confirmed(h.get("/failed/resolve?key=one"), "test data")...)
	require.Equal(t, "../failed?done=resolve_all&key=one&n=250", w.Header().Get("Location"), w.Body)
}

// An action that ends in the middle says how many failures it has changed, and that the audit has the rest. An action
// on one failure, whose end is not known, does not say that nothing was done.
func TestActsThatEndInTheMiddle(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a session with a setting
	h := newAdminFixture(t, nil)
	handler, err := New(testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["lock_timeout"] = "200ms" }),
		Config{Authorize: authorize, Schema: h.schema, Logger: slog.New(slog.NewTextHandler(&h.log, nil))})
	require.NoError(t, err)
	h.handler = http.StripPrefix(prefix, handler)
	h.exec(`INSERT INTO {s}.outbox_failed (relay, payload, content_type, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, occurred_at, created_at, status, error_class)
		SELECT 'default', '{}', 'application/json', 9000000 + i, 'many/' || i, gen_random_uuid(), 'loopers.many.created.v1', 's', 'Many', i::text, now(), now(), 'failed', 'timeout'
		  FROM generate_series(1, 500) AS i`)
	tx, err := h.db.Begin(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(background)) }()
	var locked int64
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT id FROM "`+h.schema+`".outbox_failed WHERE outbox_id = 9000240 FOR UPDATE`).Scan(&locked))

	w := h.post("/failed/resolve", confirmed(h.get("/failed/resolve?aggregate_type=Many"), "test data")...)
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Contains(t, w.Body.String(), "200 failures are resolved")
	require.Contains(t, w.Body.String(), "check the audit")
	require.NotContains(t, w.Body.String(), "not affected")
	require.Contains(t, h.log.String(), "lock timeout", "the log has the reason")

	w = h.call("/api/failed/retry", map[string]any{"filter": map[string]any{"aggregate_type": "Many"}, "reason": "x"})
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Contains(t, w.Body.String(), `"events":0`)

	ids := []string{fmt.Sprintf("event-%d", locked+1), fmt.Sprintf("event-%d", locked), fmt.Sprintf("event-%d", locked+2)}
	code, _, body := h.submit("/failed/selected/resolve", url.Values{"id": ids, "reason": {"x"}})
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Contains(t, body, "1 failure is resolved")
	require.Contains(t, body, "check the audit")

	w = h.post("/failed/"+ids[1]+"/resolve", "reason", "x")
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Contains(t, w.Body.String(), "may have been done: check the audit")
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
