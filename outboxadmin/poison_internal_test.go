package outboxadmin

import (
	"encoding/json"
	"fmt"
	"html"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/outboxadmin/internal/seed"
	"github.com/stretchr/testify/require"
)

// hostileText is a text that a writer may store in any text column. It has every character with a special
// meaning in HTML, in a URL, in JavaScript, in a header, and in a terminal.
const hostileText = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>javascript:alert(1)\r\nSet-Cookie: x=1\u202e\u2066\u2028{{.}}%00%0d&amp;/../?a=b#c"

// poison are columns of an event that a role with INSERT on outbox can write.
type poison struct{ name, columns, values string }

var poisons = []poison{
	{"an endless time", "occurred_at", "'infinity'"},
	{"an endless time before all", "occurred_at", "'-infinity'"},
	{"a time that JSON does not have", "occurred_at", "'20000-01-01'"},
	{"a time before the era", "occurred_at", "'4713-01-01 BC'"},
	{"hostile words", "event_type, source, aggregate_type, aggregate_id, topic, partition_key, content_type, headers, payload", hostileColumns},
	{"deep JSON", "payload", deepJSON(3000, 20_000)},
	{"deep JSON that jsonb would not take", "payload_bytes", "convert_to(repeat('[', 9999) || repeat(']', 9999), 'UTF8')"},
	{"10 MB", "payload", `jsonb_build_object('a', repeat('<', 10000000))`},
	{"1 MB of what grows", "payload", `jsonb_build_object('a', repeat('<', 1000000))`},
	{"many members", "payload", `(SELECT jsonb_object_agg(i::text, i) FROM generate_series(1, 100000) AS i)`},
	{"many headers", "headers", `(SELECT jsonb_object_agg(i::text, repeat('<', 50)) FROM generate_series(1, 15000) AS i)`},
	{"headers that are none", "headers", `'[1, 2, {"a": null}]'`},
	{"headers within headers", "headers", `'{"a": {"b": ["<b>"]}, "": "", "null": null}'`},
	{"numbers", "payload", `'{"n": 1e300, "z": -0.0, "i": 123456789012345678901234567890}'`},
	{"bytes that are no text", "payload_bytes", `'\xff00fe'`},
	{"JSON that is none", "payload_bytes", `'\x7b22'`},
	{"no text but a content type", "event_type, aggregate_type, aggregate_id, topic, partition_key, source", "'', '', '', '', '', ''"},
	{"no text at all", "event_type, aggregate_type, aggregate_id, topic, partition_key, content_type, source, payload", "'', '', '', '', '', '', '', NULL"},
}

const hostileColumns = `left(@text, 100), left(@text, 100), left(@text, 100), left(@text, 255), left(@text, 249), left(@text, 255), left(@text, 100),
	jsonb_build_object(@text::text, @text::text), jsonb_build_object(@text::text, @text::text)`

func deepJSON(depth, elements int) string {
	return fmt.Sprintf(`(repeat('[', %d) || '1' || repeat(',1', %d) || repeat(']', %d))::jsonb`, depth, elements, depth)
}

// insert records an event as a writer can with plain SQL, and has it die at a relay. It
// returns the ids of both rows.
func (h *adminFixture) insert(p poison) (outboxID, failedID int64) {
	h.t.Helper()
	columns, values := p.columns, p.values
	for _, d := range [][2]string{{"event_id", "gen_random_uuid()"}, {"event_type", "'shop.order.paid.v1'"}, {"source", "'shop'"}, {"aggregate_type", "'Order'"}, {"aggregate_id", "'poison'"},
		{"content_type", "'application/json'"}, {"occurred_at", "now()"}} {
		if !strings.Contains(columns, d[0]) {
			columns, values = columns+", "+d[0], values+", "+d[1]
		}
	}
	if !strings.Contains(columns, "payload") {
		columns, values = columns+", payload", values+", '{}'"
	}
	schema := pgx.Identifier{h.schema}.Sanitize()
	text := strings.NewReplacer("'", "''").Replace(hostileText)
	sql := "INSERT INTO " + schema + ".outbox (" + columns + ") SELECT " + strings.ReplaceAll(values, "@text", "'"+text+"'::text") + " RETURNING id"
	require.NoError(h.t, h.db.QueryRow(h.t.Context(), sql, pgx.QueryExecModeSimpleProtocol).Scan(&outboxID), p.name)
	require.NoError(h.t, h.db.QueryRow(h.t.Context(), `INSERT INTO `+schema+`.outbox_failed (outbox_id, parking_key, event_id, event_type, source, aggregate_type,
		aggregate_id, payload, payload_bytes, content_type, topic, partition_key, headers, occurred_at, created_at, status, last_error, error_class)
		SELECT id, coalesce(topic, 'order-events') || '/' || coalesce(partition_key, aggregate_id), event_id, event_type, source, aggregate_type, aggregate_id,
		payload, payload_bytes, content_type, topic, partition_key, headers, occurred_at, created_at, 'dead', $2, left($2, 40)
		FROM `+schema+`.outbox WHERE id = $1 RETURNING id`, outboxID, hostileText).Scan(&failedID), p.name)
	return outboxID, failedID
}

// A writer records arbitrary values by plain SQL. Each page and answer is still complete, bounded, quick,
// and text, and shows the other events.
func TestPoisonedRows(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	file := readOpenAPI(t)
	for _, p := range poisons {
		outboxID, failedID := h.insert(p)
		event, failure := fmt.Sprintf("/events/%d", outboxID), fmt.Sprintf("/failed/event-%d", failedID)
		t.Run(p.name, func(t *testing.T) {
			h.t = t
			h.checkPage(event)
			h.checkPage(failure)
			h.checkAnswer(file, "/events/{id}", event)
			h.checkAnswer(file, "/failed/{id}", failure)
			w := h.post(failure+"/hold", "reason", hostileText)
			require.Equal(t, http.StatusSeeOther, w.Code, w.Body)
			require.Equal(t, fmt.Sprintf("../event-%d?done=hold", failedID), w.Header().Get("Location"))
		})
		h.t = t
	}
	for _, path := range []string{"/", "/failed", "/failed?status=dead&limit=1000", "/events", "/audit", "/failed/retry?status=dead", "/failed/resolve", "/events?aggregate_id=poison"} {
		h.checkPage(path)
	}
	for _, path := range []string{"/failed", "/failed/counts", "/events", "/audit", "/relays", "/transactions"} {
		h.checkAnswer(file, path, path)
	}
	require.NotContains(t, h.log.String(), "request failed")
}

// within gets a page that must be complete, small and quick.
func (h *adminFixture) within(path string) *httptest.ResponseRecorder {
	h.t.Helper()
	began := time.Now()
	w := h.send("operator", http.MethodGet, path, "", "")
	require.Equal(h.t, http.StatusOK, w.Code, "%s: %.500s", path, w.Body)
	require.Less(h.t, time.Since(began), 30*time.Second, path)
	require.Less(h.t, w.Body.Len(), 12<<20, path)
	require.Empty(h.t, w.Header().Get("Set-Cookie"), path)
	return w
}

// checkPage checks that nothing of a writer is part of a page.
func (h *adminFixture) checkPage(path string) {
	h.t.Helper()
	page := h.within(path).Body.String()
	require.True(h.t, strings.HasSuffix(strings.TrimSpace(page), "</html>"), path)
	require.NotRegexp(h.t, `(?i)<script>|<img|<b>|(href|src)="\s*javascript`, page, path)
	require.NotContains(h.t, page, "ZgotmplZ", path)
}

// checkAnswer checks that an answer of the API matches its description in the file.
func (h *adminFixture) checkAnswer(file openAPI, template, path string) {
	h.t.Helper()
	w := h.within("/api" + path)
	var answer any
	require.NoError(h.t, json.Unmarshal(w.Body.Bytes(), &answer), path)
	require.NoError(h.t, file.check(path, file.Paths[template]["get"].Responses["200"].Content["application/json"].Schema, answer))
	require.NotContains(h.t, w.Body.String(), "<script", path)
}

// A payload that is too large for a page is not read, and its length is shown.
func TestLargePayloads(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	outboxID, failedID := h.insert(poison{"", "payload", `jsonb_build_object('a', repeat('x', 10000000))`})
	for _, path := range []string{fmt.Sprintf("/events/%d", outboxID), fmt.Sprintf("/failed/event-%d", failedID)} {
		require.Contains(t, h.get(path), "PostgreSQL would print 10000009 bytes, more than 1048576")
		require.Contains(t, h.get("/api"+path), "PostgreSQL would print 10000009 bytes, more than 1048576")
	}
	larger := newAdminFixture(t, func(c *Config) { c.MaxPayload = 20 << 20 })
	outboxID, _ = larger.insert(poison{"", "payload", `jsonb_build_object('a', repeat('x', 10000000))`})
	require.Contains(t, larger.get(fmt.Sprintf("/api/events/%d", outboxID)), strings.Repeat("x", 10_000_000))
}

func TestShapeOfJSON(t *testing.T) {
	t.Parallel()
	for _, text := range []string{`{}`, `[]`, `{"a": [1, {"b": "}]\"{["}], "c": {}}`, `"\\"`, strings.Repeat("[", 100) + "1" + strings.Repeat("]", 100), `[1,2,3]`} {
		var b strings.Builder
		p := payload{Data: []byte(text)}
		b.WriteString(p.Text())
		depth, printed := shapeOf([]byte(text))
		require.GreaterOrEqual(t, printed, b.Len(), text)
		require.Equal(t, strings.Count(strings.NewReplacer(`"}]\"{["`, "").Replace(text), "[") > 0, depth > 0 && text != "{}", text)
	}
	bomb := strings.Repeat("[", 9000) + "1" + strings.Repeat(",1", 400_000) + strings.Repeat("]", 9000)
	require.Equal(t, bomb, payload{Data: []byte(bomb)}.Text())
}

// Each kind of text can be masked on all pages, and no link contains a masked text.
func TestMaskOfEveryKind(t *testing.T) {
	t.Parallel()
	secrets := map[TextKind]string{TextPayload: "s3cret-payload", TextHeader: "s3cret-header", TextKey: "s3cret-key", TextError: "s3cret-error", TextStatement: "s3cret-statement"}
	var texts []Text
	h := newAdminFixture(t, func(c *Config) {
		c.Mask = func(text Text) []byte {
			texts = append(texts, text)
			return []byte(strings.ReplaceAll(string(text.Value), secrets[text.Kind], "(masked)"))
		}
	})
	s := pgx.Identifier{h.schema}.Sanitize()
	_, err := h.db.Exec(t.Context(), `
		SET LOCAL outbox.keep_xid = on;
		UPDATE `+s+`.outbox SET aggregate_id = 's3cret-key', partition_key = 's3cret-key', headers = '{"token": "s3cret-header"}', payload = '{"a": "s3cret-payload"}' WHERE id IN (4099001, 4099003, 4099004);
		UPDATE `+s+`.outbox_failed SET aggregate_id = 's3cret-key', partition_key = 's3cret-key', parking_key = 'order-events/s3cret-key', headers = '{"token": "s3cret-header"}',
		       payload = '{"a": "s3cret-payload"}', last_error = 's3cret-error', error_class = 'invalid_record' WHERE outbox_id IN (4099003, 4099004);
		UPDATE `+s+`.outbox_audit SET parking_key = 'order-events/s3cret-key', payload = CASE WHEN payload IS NOT NULL THEN '{"a": "s3cret-payload"}'::jsonb END WHERE failed_id = 1 OR failed_id IS NULL`,
		pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	require.NoError(t, seed.Deliver(t.Context(), h.db, h.schema))
	_, err = h.db.Exec(t.Context(), `UPDATE `+s+`.event_delivery SET aggregate_id = 's3cret-key', partition_key = 's3cret-key', headers = '{"token": "s3cret-header"}',
		payload = '{"a": "s3cret-payload"}', last_error_message = 's3cret-error'`)
	require.NoError(t, err)
	require.Equal(t, http.StatusSeeOther, h.post("/failed/delivery-1/hold", "reason", "because").Code)
	tx, err := h.db.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(background) }()
	_, err = tx.Exec(t.Context(), `SELECT 's3cret-statement', pg_current_xact_id()`)
	require.NoError(t, err)
	time.Sleep(1100 * time.Millisecond)
	pages := h.crawl("/failed/event-1")
	for _, path := range []string{"/api/failed?status=any", "/api/failed/event-1", "/api/failed/event-2", "/api/events?limit=1000", "/api/events/4099001", "/api/audit", "/api/transactions?open_seconds=1",
		"/failed/delivery-1", "/api/failed/delivery-1", "/api/failed?kind=delivery", "/failed?kind=delivery&status=any", "/consumers", "/api/overview", "/api/consumers",
		"/failed/event-1", "/failed/event-2", "/events/4099001", "/failed?status=dead&limit=1000", "/failed/retry?status=dead", "/audit", "/events?aggregate_id=" + "s3cret-key"[:1]} {
		pages[path] = h.get(path)
	}
	for path, page := range pages {
		for kind, secret := range secrets {
			require.NotContains(t, html.UnescapeString(page), secret, "%s shows a %s", path, kind)
		}
	}
	require.Contains(t, pages["/api/transactions?open_seconds=1"], "(masked)")
	require.Contains(t, pages["/api/failed/event-1"], `"key":"(masked)"`)
	require.Contains(t, pages["/api/failed/event-1"], `"token":"(masked)"`)
	require.Contains(t, pages["/api/failed/event-1"], `"error":"(masked)"`)
	for _, text := range texts {
		require.Equal(t, text.Kind == TextHeader, text.Name != "", "%+v", text)
	}
	w := h.post("/failed/event-1/hold", "reason", "because")
	require.Equal(t, http.StatusSeeOther, w.Code, "the action is about the key that is masked: %s", w.Body)
	require.Contains(t, h.get("/api/failed?key=s3cret-key"), `"id":"event-1"`, "a filter finds what it names")
}
