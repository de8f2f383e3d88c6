package outboxadmin

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxadmin/internal/seed"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/stretchr/testify/require"
)

// submit sends a form whose fields may be repeated.
func (h *adminFixture) submit(path string, form url.Values) (code int, location, body string) {
	h.t.Helper()
	w := h.send("operator", http.MethodPost, path, formType, form.Encode())
	return w.Code, w.Header().Get("Location"), w.Body.String()
}

// Selected failures of both kinds are retried or resolved together, after a page that says for which of them this is
// possible. The way back keeps the filter.
func TestSelectedFailures(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, nil)
	list := h.get("/failed?status=dead")
	require.Contains(t, list, `<input type="checkbox" name="id" value="event-1"`)
	require.Contains(t, list, `<input type="hidden" name="status" value="dead">`)
	require.NotContains(t, h.send("reader", http.MethodGet, "/failed?status=dead", "", "").Body.String(), "checkbox")

	page := h.get("/failed/selected/retry?status=dead&id=event-1&id=event-2&id=delivery-1&id=delivery-9&id=event-99999&id=event-1")
	for _, words := range []string{"Retry 5 selected failures?", "This is a dry run", "2 failures of 5 can be retried", "It is parked behind another event of its key", "A worker has it now.",
		"There is no such failure or event now", "Retry 2 failures", `href="../../failed?status=dead"`} {
		require.Contains(t, strings.ReplaceAll(page, "./../../", "../../"), words)
	}
	require.Equal(t, "dead and held", h.status(seed.Dead), "a dry run changes nothing")

	form := url.Values{"status": {"dead"}, "reason": {"the schema is fixed"}, "id": {"event-1", "delivery-1", "delivery-2"}}
	code, location, body := h.submit("/failed/selected/retry", form)
	require.Equal(t, http.StatusSeeOther, code, body)
	require.Equal(t, "../../failed?done=retry_all&n=3&status=dead", location)
	require.Contains(t, h.get("/failed?done=retry_all&n=3&status=dead"), "3 failures are retried")
	require.Equal(t, 3, query1[int](h, `SELECT count(*)::int FROM {s}.outbox_audit WHERE operator = 'o.operator' AND action = 'retry' AND reason = 'the schema is fixed'`))
	require.Equal(t, 2, query1[int](h, `SELECT count(*)::int FROM {s}.event_delivery WHERE id IN (1, 2) AND status = 'PENDING' AND attempt_count = 0`))

	form["id"] = []string{"delivery-3", "delivery-9", "event-99999"}
	code, _, body = h.submit("/failed/selected/resolve", form)
	require.Equal(t, http.StatusConflict, code)
	require.Contains(t, body, "1 failure is resolved. The other ones are below, with the reason.")
	require.Contains(t, body, "with a worker")
	require.NotContains(t, body, `value="delivery-3"`, "it is done")
	form["reason"] = []string{" "}
	form["id"] = []string{"delivery-4"}
	code, _, body = h.submit("/failed/selected/resolve", form)
	require.Equal(t, http.StatusUnprocessableEntity, code)
	require.Contains(t, body, "Reason is empty")
	require.Contains(t, body, `value="delivery-4"`, "it can be sent again")
}

// A selection is refused if it is empty, too large, or of no failures.
func TestSelectionIsChecked(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	many := strings.Builder{}
	for n := range maxSelected + 1 {
		fmt.Fprintf(&many, "&id=event-%d", n+1)
	}
	for query, text := range map[string]string{"": "no failure is selected", "id=": "not an id", "id=17": "not an id", many.String()[1:]: "more than 100", "id=event-1&status=dead&status=dead": "more than once", "id=%00": "no text"} {
		w := h.send("operator", http.MethodGet, "/failed/selected/retry?"+query, "", "")
		require.Equal(t, http.StatusBadRequest, w.Code, query)
		require.Contains(t, w.Body.String(), text)
	}
	require.Equal(t, http.StatusNotFound, h.send("operator", http.MethodGet, "/failed/selected/hold?id=event-1", "", "").Code)
	require.Equal(t, http.StatusBadRequest, h.send("operator", http.MethodGet, "/failed?status=dead&status=failed", "", "").Code, "elsewhere nothing is repeated")
}

// One change is made to many payloads, after a dry run that shows each payload with the change and audits that it
// is read.
func TestEditSelected(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, func(c *Config) { c.AuditReads = true })
	form := url.Values{"id": {"event-1", "delivery-1", "delivery-2", "delivery-8"}, "change": {`{"customer": {"name": null, "vip": true}, "orderId": 20000000000000001}`}, "step": {"try"}}
	require.Contains(t, h.get("/failed/selected/edit?id=event-1"), "Dry run")
	code, _, body := h.submit("/failed/selected/edit", form)
	require.Equal(t, http.StatusOK, code, body)
	for _, words := range []string{"This was a dry run", "3 failures of 4 can be edited", "only a dead one is edited", "20000000000000001", "&#34;vip&#34;: true", "Save and retry 3 failures", " readonly"} {
		require.Contains(t, body, words)
	}
	require.NotContains(t, body, "Mina Park", "the member is removed")
	require.Equal(t, 3, query1[int](h, `SELECT count(*)::int FROM {s}.outbox_audit WHERE operator = 'o.operator' AND action = 'read'`))
	require.Zero(t, query1[int](h, `SELECT count(*)::int FROM {s}.outbox_audit WHERE operator = 'o.operator' AND action = 'edit'`))

	form.Set("step", "save")
	form.Set("reason", "names go, see OPS-7")
	form["id"] = form["id"][:3]
	code, location, body := h.submit("/failed/selected/edit", form)
	require.Equal(t, http.StatusSeeOther, code, body)
	require.Equal(t, "../../failed?done=edit_all&n=3", location)
	require.Contains(t, h.get("/failed?done=edit_all&n=3"), "3 failures are changed")
	require.Equal(t, 3, query1[int](h, `SELECT count(*)::int FROM {s}.outbox_audit WHERE action = 'edit' AND reason = 'names go, see OPS-7'`))
	require.Equal(t, 2, query1[int](h, `SELECT count(*)::int FROM {s}.event_delivery WHERE status = 'PENDING' AND payload->'customer' = '{"vip": true}' AND payload->>'orderId' = '20000000000000001'`))

	for _, change := range []string{"", "[1]", "{}", "null", `{"a": 1`, `{"a": 1} {}`} {
		code, _, body = h.submit("/failed/selected/edit", url.Values{"id": {"delivery-3"}, "change": {change}, "step": {"save"}, "reason": {"x"}})
		require.Equal(t, http.StatusUnprocessableEntity, code, change)
		require.Contains(t, body, "null removes a member")
	}
	_, _, body = h.submit("/failed/selected/edit", url.Values{"id": {"delivery-3"}, "change": {`{"orderId": 20503}`}, "step": {"try"}})
	require.Contains(t, body, "Its payload has this already.")
}

// A page holds the payloads with a change up to a limit. It says of which it does not show them.
func TestEditSelectedIsBounded(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, nil)
	_, err := h.db.Exec(t.Context(), `UPDATE "`+h.schema+`".event_delivery SET payload = jsonb_build_object('filler', repeat('x', 400000)) WHERE id <= 4`)
	require.NoError(t, err)
	code, _, body := h.submit("/failed/selected/edit", url.Values{"id": {"delivery-1", "delivery-2", "delivery-3", "delivery-4"}, "change": {`{"gift": true}`}, "step": {"try"}})
	require.Equal(t, http.StatusOK, code)
	require.Less(t, len(body), 1<<20)
	require.Equal(t, 2, strings.Count(body, "too large to show this one too"))
	require.Contains(t, body, "Save and retry 4 failures")
}

// A mask also hides payloads with a change.
func TestEditSelectedIsMasked(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, func(c *Config) {
		c.Mask = func(text Text) []byte {
			if text.Kind == TextPayload {
				return []byte(`"hidden"`)
			}
			return text.Value
		}
	})
	_, _, body := h.submit("/failed/selected/edit", url.Values{"id": {"delivery-1"}, "change": {`{"gift": true}`}, "step": {"try"}})
	require.Contains(t, body, "hidden")
	require.Contains(t, body, ", masked")
	require.NotContains(t, body, "Mina Park")
}

// An edit says nothing of a payload before its reason is checked and the read is audited. It does not say of a masked
// payload that it has a change already: a user could guess what the mask hides.
func TestEditSelectedTellsNoPayload(t *testing.T) {
	t.Parallel()
	reads := func(h *adminFixture) int {
		return query1[int](h, `SELECT count(*)::int FROM {s}.outbox_audit WHERE operator = 'o.operator' AND action = 'read'`)
	}
	h := newBusyFixture(t, func(c *Config) { c.AuditReads = true })
	const has, hasNot = `{"orderId": 20501}`, `{"orderId": 20599}`
	for _, reason := range []string{"", " ", strings.Repeat("x", 10_001)} {
		for _, change := range []string{has, hasNot} {
			code, _, body := h.submit("/failed/selected/edit", url.Values{"id": {"delivery-1"}, "change": {change}, "step": {"save"}, "reason": {reason}})
			require.Equal(t, http.StatusUnprocessableEntity, code)
			require.Contains(t, body, "Reason ")
			require.NotContains(t, body, "has this already")
		}
	}
	require.Zero(t, reads(h), "nothing was read")
	code, _, body := h.submit("/failed/selected/edit", url.Values{"id": {"delivery-1"}, "change": {has}, "step": {"save"}, "reason": {"x"}})
	require.Equal(t, http.StatusConflict, code)
	require.Contains(t, body, "has this already")
	require.Equal(t, 1, reads(h))

	h = newBusyFixture(t, func(c *Config) {
		c.Mask = func(text Text) []byte { return []byte(`"hidden"`) }
	})
	for _, change := range []string{has, hasNot} {
		_, _, body := h.submit("/failed/selected/edit", url.Values{"id": {"delivery-1"}, "change": {change}, "step": {"try"}})
		require.NotContains(t, body, "has this already")
		code, location, body := h.submit("/failed/selected/edit", url.Values{"id": {"delivery-1"}, "change": {change}, "step": {"save"}, "reason": {"x"}})
		require.Equal(t, http.StatusSeeOther, code, body)
		require.Equal(t, "../../failed?done=edit_all&n=1", location)
		h.exec(`UPDATE {s}.event_delivery SET status = 'DEAD', attempt_count = 10 WHERE id = 1`)
	}
}

// What the page says of an action is what the library does.
func TestNotPossible(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, nil)
	ids := []outboxops.FailureID{}
	for n := range 10 {
		ids = append(ids, outboxops.FailureID{Kind: outboxops.KindEvent, Number: int64(n + 1)}, outboxops.FailureID{Kind: outboxops.KindDelivery, Number: int64(n + 1)})
	}
	_, err := h.db.Exec(t.Context(), `INSERT INTO "`+h.schema+`".outbox_lease (name, holder, epoch, expires_at) VALUES ('gone', 'outbox cut', 1, 'infinity')`)
	require.NoError(t, err)
	for n, columns := range []string{`'gone', 'e', '1', 'application/json'`, `'removed', 'e', '1', 'application/json'`,
		`'default', 'unreadable_row', NULL, 'application/json'`, `'default', 'unreadable_row', NULL, ''`, `'default', 'unreadable_row', '1', 'application/json'`} {
		id := query1[int64](h, `INSERT INTO {s}.outbox_failed (relay, error_class, payload, content_type, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, topic,
				occurred_at, created_at, retry_count, last_error, status)
			SELECT `+columns+`, $1::bigint, 'orders/' || $1::bigint, gen_random_uuid(), 't.t.t.v1', 's', 'A', 'k', 'orders', now(), now(), 1, 'e', 'dead' RETURNING id`, 1000+n)
		ids = append(ids, outboxops.FailureID{Kind: outboxops.KindEvent, Number: id})
	}
	ops, err := outboxops.NewFailures(h.db, outboxops.FailuresConfig{Schema: h.schema})
	require.NoError(t, err)
	a := &admin{failed: ops}
	seen := map[string]bool{}
	for _, action := range []string{"edit", "retry", "resolve"} {
		for _, id := range ids {
			row, err := a.selectedRow(t.Context(), id, action)
			require.NoError(t, err)
			f, payload := row.Failure, `{"n": 1}`
			if action == "edit" { // only a dry run, so the rest still has something to do
				err = ops.CheckEdit(t.Context(), id, []byte(payload), outboxops.AuditInfo{Operator: "o", Reason: "r"})
			} else {
				err = actions[action](t.Context(), ops, f, payload, outboxops.AuditInfo{Operator: "o", Reason: "r"})
			}
			require.Equal(t, row.Why == "", err == nil, "%s %v, %s: %v", action, id, f.Status, err)
			seen[action+" "+f.Status+fmt.Sprint(err == nil)] = true
		}
	}
	require.True(t, seen["retry "+outbox.StatusDead+"true"] && seen["retry "+outbox.StatusDead+"false"] && seen["retry "+outbox.StatusParked+"false"] && seen["resolve "+outbox.StatusResolved+"false"], seen)
}

// A change is one JSON object that comes out as it was written, and so must be the payload: encoding/json would replace
// half of a character, also in members that the change does not name.
func TestChangesKeepWhatTheyDoNotName(t *testing.T) {
	t.Parallel()
	for _, change := range []string{``, `{}`, `[1]`, `"x"`, `{"a":1}}`, `{"a":1}]`, `{"a":1} {"b":2}`, `{"a":"\ud83d"}`, `{"a":"\u0000"}`} {
		require.NotNil(t, checkChange(change), change)
	}
	require.Nil(t, checkChange(` {"a":{"b":null}, "c":1e300} `))
	f := outboxops.Failure{Payload: []byte(`{"x":"\ud83d\ude00","n":12345678901234567890.10,"a":1}`)}
	after, err := patched(f, `{"a":2}`)
	require.NoError(t, err)
	require.Equal(t, `{"a":2,"n":12345678901234567890.10,"x":"😀"}`, string(after))
	for _, payload := range []string{`{"x":"\ud83d","a":1}`, `{"x":"\u0000","a":1}`, `{"a":1}}`, `no`} {
		f.Payload = []byte(payload)
		_, err = patched(f, `{"a":2}`)
		require.Error(t, err, payload)
	}
}
