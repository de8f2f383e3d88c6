package outboxadmin

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// sent is a request. Its target is appended to the prefix unchanged.
type sent struct{ method, target, contentType, body string }

// ask sends a request as an operator.
func (h *adminFixture) ask(s sent) *httptest.ResponseRecorder {
	h.t.Helper()
	r := httptest.NewRequest(s.method, "http://ops.example"+prefix+"/", strings.NewReader(s.body))
	rawPath, query, _ := strings.Cut(s.target, "?")
	path, err := url.PathUnescape(rawPath)
	require.NoError(h.t, err)
	r.URL.Path, r.URL.RawPath, r.URL.RawQuery = prefix+path, prefix+rawPath, query
	r.RequestURI = prefix + s.target
	r.Header.Set("X-User", "operator")
	if s.contentType != "" {
		r.Header.Set("Content-Type", s.contentType)
	}
	w := httptest.NewRecorder()
	h.handler.ServeHTTP(w, r)
	return w
}

// fingerprint changes when anything does that an action could change.
func (h *adminFixture) fingerprint() string {
	h.t.Helper()
	return query1[string](h, `SELECT md5(string_agg(f::text, ',' ORDER BY id)) FROM {s}.outbox_failed AS f`) +
		query1[string](h, `SELECT (SELECT count(*) FROM {s}.outbox_audit) || ' ' || (SELECT count(*) FROM {s}.consumer_pause)`)
}

// A query is either read completely or refused: no part of it is dropped or ignored. The same holds for
// forms and JSON.
func TestHostileRequests(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	before := h.fingerprint()
	var requests []sent
	for _, rt := range everything(t) {
		if rt.path == "/nowhere" || rt.path == "/api/nowhere" || strings.Contains(rt.path, "//") || strings.Contains(rt.path, "..") || rt.method == http.MethodDelete {
			continue
		}
		bodyOf := func(query string) sent {
			s := sent{method: rt.method, target: rt.path + query}
			if rt.method == http.MethodPost {
				s.contentType, s.body = formType, "reason=because&payload={}"
				if isAPI(httptest.NewRequest(http.MethodPost, rt.path, nil)) {
					s.contentType, s.body = jsonType, `{"reason": "because", "filter": {"status": "dead"}}`
				}
			}
			return s
		}
		for _, query := range []string{
			"?type=%zz", "?%zz=1", "?status=dead;type=x", "?type=%00", "?type=%ff", "?x%00=1", "?x%ff=1", "?stauts=dead", "?status=dead&status=failed", "?limit=1&limit=2",
			"?span=1h&span=6h", "?filter=dead", "?dry_run=true", "?=x",
		} {
			requests = append(requests, bodyOf(query))
		}
		for _, tail := range []string{"%00", "%ff", "%00/retry", "%ff/retry"} {
			s := bodyOf("")
			s.target = strings.TrimSuffix(s.target, "event-1") + tail
			requests = append(requests, s)
		}
	}
	requests = append(requests,
		sent{"GET", "/api/relays/%00/progress", "", ""}, sent{"GET", "/api/relays/%ff/progress", "", ""}, sent{"GET", "/api/relays/a%00b/backlog", "", ""},
	)
	form := func(target, body string) { requests = append(requests, sent{"POST", target, formType, body}) }
	for _, action := range []string{"retry", "resolve"} {
		bulk := "/failed/" + action
		form(bulk, "seen=1:1:&reason=x&type=%zz")
		form(bulk, "seen=1:1:&reason=x;type=a")
		form(bulk, "seen=1:1:&reason=x&type=%00")
		form(bulk, "seen=1:1:&reason=x&type=%ff")
		form(bulk, "seen=1:1:&reason=x&typ=a")
		form(bulk, "seen=1:1:&reason=x&type=a&type=b")
		form(bulk, "seen=1:1:&reason=%00&status=dead")
		form(bulk, "seen=1:1:&reason=x%ff&status=dead")
		form(bulk, "seen=1:1:&reason=x&reason=y&status=dead")
		form(bulk, "seen=1:1:&reason=x&until=9999-12-31T23:59:59-23:59")
		form(bulk+"?status=resolved", "seen=1:1:&reason=x")
		for _, seen := range []string{"", "&seen=", "&seen=1", "&seen=2:1:", "&seen=1:1:1", "&seen=now", "&seen=1:1:&seen=1:1:"} {
			form(bulk, "reason=x"+seen)
		}
		for _, name := range filterNames { // a variable that is not set must not pick everything
			form(bulk, "seen=1:1:&reason=x&"+name+"=")
			requests = append(requests, sent{"POST", "/api/failed/" + action, jsonType, `{"reason": "x", "filter": {"` + name + `": ""}}`},
				sent{"POST", "/api/failed/" + action, jsonType, `{"dry_run": true, "filter": {"` + name + `": ""}}`})
		}
		for name, zero := range map[string]string{"outbox_id": "0", "until": "0001-01-01"} {
			form(bulk, "seen=1:1:&reason=x&"+name+"="+zero)
			requests = append(requests, sent{"POST", "/api/failed/" + action, jsonType, `{"reason": "x", "filter": {"` + name + `": "` + zero + `"}}`})
		}
		form("/failed/event-1/"+action, "reason=x%00")
		form("/failed/event-1/"+action, "reason=x%ff")
		form("/failed/event-1/"+action, "reason=x&dry_run=true")
		form("/failed/event-1/"+action, "reason=x&%zz=1")
		form("/failed/event-1/edit", "reason=x&payload=%22%00%22")
		form("/failed/event-1/edit", "reason=x&payload=%22%ff%22")
		form("/failed/event-1/edit", "reason=x&payload={}&payload=[]")
		api := "/api/failed/" + action
		for _, body := range []string{
			`{"reason": "x", "filter": {"status": "dead"}, "filter": {}}`, `{"reason": "x", "filter": {"type": "a", "type": ""}}`,
			`{"reason": "x", "filter": {}, "dry_run": true, "dry_run": false}`, `{"reason": "x", "filter": {}, "Dry_Run": true, "dry_run": false}`,
			`{"reason": "x", "filter": {"Status": "dead"}}`, `{"reason": "x", "filter": {"status": "dead"}, "FILTER": {}}`,
			"{\"reason\": \"x\", \"filter\": {\"type\": \"\xff\"}}", `{"reason": "x", "filter": {"type": "\u0000"}}`, `{"reason": "\u0000", "filter": {}}`,
			`{"reason": "x", "filter": {"type": "\ud800"}}`, `{"reason": "\ud800\ufffd", "filter": {}}`, `{"reason": "x", "filter": {"type": null}}`, `{"reason": "x", "filter": null}`, `{"reason": "x", "filter": []}`,
			`{"reason": "x", "filter": {"type": ["a"]}}`, `{"reason": "x", "filter": {}, "ſource": ""}`, `{"reaſon": "x", "filter": {}}`,
			`null`, `"x"`, `{"reason": "x", "filter": {}}{}`, strings.Repeat("[", 200_000), strings.Repeat(`{"filter":`, 20_000),
		} {
			requests = append(requests, sent{"POST", api, jsonType, body})
		}
		requests = append(requests, sent{"POST", api + "?dry_run=true", jsonType, `{"reason": "x", "filter": {}}`},
			sent{"POST", "/api/failed/event-1/" + action, jsonType, `{"reason": "\u0000"}`}, sent{"POST", "/api/failed/event-1/" + action, jsonType, "{\"reason\": \"\xff\"}"},
			sent{"POST", "/api/failed/event-1/" + action, jsonType, `null`}, sent{"POST", "/api/failed/event-1/" + action, jsonType, `{"reason": "x", "reason": "y"}`})
	}
	for _, action := range []string{"hold", "release"} {
		for _, body := range []string{`{"reason": "\u0000"}`, "{\"reason\": \"\xff\"}", `{"reason": "\udfff"}`, `null`, `{"reason": "x", "reason": "y"}`, `{"reason": "x", "key": "k"}`} {
			requests = append(requests, sent{"POST", "/api/failed/event-1/" + action, jsonType, body})
		}
	}
	for _, action := range []string{"pause", "resume"} {
		for _, body := range []string{
			`{"reason": "x", "group": "\u0000"}`, `{"reason": "x", "group": "g", "topic": "\u0000"}`, `{"reason": "\u0000", "group": "g"}`,
			"{\"reason\": \"x\", \"group\": \"\xff\"}", `{"reason": "x", "group": "g", "topic": "\ud800"}`, `{"reason": "x", "group": "g", "topic": null}`,
			`{"reason": "x", "group": "g", "group": "h"}`, `{"reason": "x", "group": "g", "topics": "t"}`, `{"reason": "x", "group": "g", "Topic": "t"}`,
			`{"reason": "x", "group": ["g"]}`, `{"reason": "x", "group": "g"}{}`, `null`,
		} {
			requests = append(requests, sent{"POST", "/api/consumers/" + action, jsonType, body})
		}
		requests = append(requests, sent{"POST", "/api/consumers/" + action + "?topic=t", jsonType, `{"reason": "x", "group": "g"}`})
	}
	for _, body := range []string{
		"{\"reason\": \"x\", \"payload\": \"\xff\"}", `{"reason": "x", "payload": {}, "payload": []}`, `{"reason": "x", "payload": {}, "payload_baſe64": "e30="}`,
		`{"reason": "\u0000", "payload": {}}`, `{"reason": "x"}`, `{"reason": "x", "payload": {}, "payload_base64": "e30="}`,
	} {
		requests = append(requests, sent{"POST", "/api/failed/event-1/edit", jsonType, body})
	}
	for _, s := range requests {
		w := h.ask(s)
		if w.Code != http.StatusBadRequest {
			t.Errorf("%s %.100s %.200q: %d %.200s", s.method, s.target, s.body, w.Code, w.Body)
		}
	}
	require.Greater(t, len(requests), 600)
	require.Equal(t, before, h.fingerprint(), "nothing was done")
	require.NotContains(t, h.log.String(), "request failed", "PostgreSQL saw nothing of it")
}
