package outboxadmin

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/jsonb"
	"github.com/outboxgo/outbox/outboxops"
)

// A request is either read as a whole, into texts and times that PostgreSQL takes, or answered with what is wrong with
// it: no parameter is dropped, and no text changed.
func FuzzRequest(f *testing.F) {
	f.Add("kind=event&status=dead,any&since=2026-01-31T12:30&outbox_id=17", `{"reason":"why","filter":{"type":"shop.order.created.v1"}}`)
	f.Add("key=%ff&key=%00&after=event-17,delivery-4&limit=1000", `{"reason":"\ud800\ufffd"}`)
	f.Add("since=9999-12-31T23:59:59-23:59&until=0001-01-01&failure=event--1&action=%20", `{"filter":{"kind":"event","kind":"delivery"}} {}`)
	f.Add("a;b&%zz", `{"Reason":"x","dry_run":true,"max_failures":1e9,"filter":null}`)
	f.Fuzz(func(t *testing.T, raw, body string) {
		target := &url.URL{Scheme: "http", Host: "ops.example", Path: "/failed", RawQuery: raw}
		names := slices.Concat(filterNames, auditNames, searchNames, []string{"after"})
		slices.Sort(names)
		rt := route{names: slices.Compact(names)}
		req, err := read(rt, httptest.NewRecorder(), &http.Request{Method: http.MethodGet, URL: target, Header: http.Header{}}, 0)
		if err != nil {
			requireProblem(t, err)
		} else {
			requireReadQuery(t, raw, &req.query)
		}
		r := httptest.NewRequest(http.MethodPost, "http://ops.example/api/failed/retry", strings.NewReader(body))
		r.Header.Set("Content-Type", jsonType)
		req, err = read(route{body: document}, httptest.NewRecorder(), r, 0)
		if err != nil {
			requireProblem(t, err)
			return
		}
		requireReadBody(t, req)
	})
}

// requireProblem requires an answer that is short, and text.
func requireProblem(t *testing.T, err error) {
	t.Helper()
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		return
	}
	var p *problem
	require.ErrorAs(t, err, &p)
	require.GreaterOrEqual(t, p.status, 400)
	require.Less(t, p.status, 500)
	require.Less(t, len(p.Error()), 2_000)
}

// requireReadQuery requires that no parameter was dropped, and that filters have what the parameters say.
func requireReadQuery(t *testing.T, raw string, q *query) {
	t.Helper()
	pairs := slices.DeleteFunc(strings.Split(raw, "&"), func(pair string) bool { return pair == "" })
	require.Len(t, q.values, len(pairs))
	failed := q.failedFilter()
	id, page := q.auditFilter(100)
	found := q.eventFilter()
	after := q.failures("after")
	if q.done() != nil {
		requireProblem(t, q.done())
		return
	}
	for _, text := range []string{failed.Relay, failed.Group, failed.Action, failed.Type, failed.Topic, failed.Key, failed.AggregateType, failed.AggregateID,
		failed.EventID, failed.Class, page.Operator, page.Action, page.Group, found.EventID, found.Type} {
		require.True(t, utf8.ValidString(text) && !strings.Contains(text, "\x00"), "%q", text)
	}
	for _, at := range []time.Time{failed.Since, failed.Until, page.Since, page.Until, found.Since, found.Until} {
		require.True(t, at.IsZero() || check.Time(at) == nil, "%v", at)
	}
	require.True(t, page.Limit >= 1 && page.Limit <= 1000 && page.Before >= 0 && failed.OutboxID >= 0)
	require.LessOrEqual(t, len(after), 2)
	for _, id := range append(after, id) {
		if id == (outboxops.FailureID{}) {
			continue
		}
		again, err := outboxops.ParseFailureID(id.String())
		require.NoError(t, err)
		require.Equal(t, id, again)
	}
	again := query{values: failedValues(failed)} // as a link to the next page has them
	require.NoError(t, checkValues(again.values, route{names: filterNames}))
	same := again.failedFilter()
	require.NoError(t, again.done())
	require.True(t, failed.Since.Equal(same.Since) && failed.Until.Equal(same.Until))
	same.Since, same.Until = failed.Since, failed.Until
	require.Equal(t, failed, same)
}

// requireReadBody requires that JSON was read as it is, member by member.
func requireReadBody(t *testing.T, req *request) {
	t.Helper()
	var got struct {
		Reason jsonText   `json:"reason"`
		DryRun jsonBool   `json:"dry_run"`
		Filter jsonFilter `json:"filter"`
	}
	if err := req.decode(&got); err != nil {
		requireProblem(t, err)
		return
	}
	var want map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(req.body, &want))
	_, err := jsonb.Check(req.body)
	require.NoError(t, err, "PostgreSQL would refuse a text in it")
	for name := range want {
		require.Contains(t, []string{"reason", "dry_run", "filter"}, name)
	}
	if text, ok := want["reason"]; ok {
		var reason string
		require.NoError(t, json.Unmarshal(text, &reason))
		require.Equal(t, reason, string(got.Reason))
	}
	require.Equal(t, string(want["dry_run"]) == "true", bool(got.DryRun))
	for name, values := range got.Filter {
		require.True(t, isText(name))
		require.Len(t, values, 1)
		require.True(t, isText(values[0]))
	}
	if text, ok := want["filter"]; ok {
		var filter map[string]string
		require.NoError(t, json.Unmarshal(text, &filter))
		require.Len(t, got.Filter, len(filter))
	}
}
