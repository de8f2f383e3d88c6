package outboxalert_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxalert"
)

var slackTests = []struct {
	name   string
	alert  outbox.Alert
	text   string
	blocks []string // but for the link
	todo   string
}{
	{
		"events that died",
		outbox.Alert{
			Kind: outbox.AlertDead, Relay: "default", Status: outbox.RelayStatus{Dead: 12}, Died: 3,
			Dead: []outbox.DeadEvent{{FailedEvent: outbox.FailedEvent{
				EventID: "e-1", Type: "shop.order.created.v1", AggregateType: "Order", AggregateID: "<!channel> & `7`", Class: "message_too_large",
			}}},
		},
		"🚨 relay default: 3 events died; 12 are dead\n" +
			"• shop.order.created.v1 Order &lt;!channel&gt; &amp; ·7·, event e-1: message_too_large\n… and 2 more",
		[]string{
			"🚨 relay default: 3 events died; 12 are dead",
			"• shop.order.created.v1 Order &lt;!channel&gt; &amp; `7`, event e-1: message_too_large", "… and 2 more",
		},
		"outboxdeadevents",
	},
	{
		"deliveries that were given up",
		outbox.Alert{
			Kind: outbox.AlertDeadDeliveries, Group: "stats", Died: 1, Counts: []outbox.EventCount{{Group: "stats", Events: 7}},
			Dead: []outbox.DeadEvent{{Group: "stats", Action: "COUNTED", FailedEvent: outbox.FailedEvent{
				EventID: "e-1", Type: "shop.order.created.v1", AggregateType: "Order", AggregateID: "7", Class: "timeout",
			}}},
		},
		"🚨 consumer group stats: 1 delivery given up; 7 are dead\n• shop.order.created.v1 Order 7, event e-1: timeout, for COUNTED",
		[]string{"🚨 consumer group stats: 1 delivery given up; 7 are dead", "• shop.order.created.v1 Order 7, event e-1: timeout, for COUNTED"},
		"outboxdeaddeliveries",
	},
	{
		"too many dead ones",
		outbox.Alert{Kind: outbox.AlertManyDead, Counts: []outbox.EventCount{{Relay: "default", Status: "dead", Type: "shop.order.created.v1", Events: 10}}},
		"🚨 10 dead events and deliveries wait for a decision: 10 dead shop.order.created.v1",
		[]string{"🚨 10 dead events and deliveries wait for a decision: 10 dead shop.order.created.v1"},
		"outboxmanydead",
	},
	{
		"what is over",
		outbox.Alert{Kind: outbox.AlertStale, Relay: "default", Over: true},
		"✅ relay default: events no longer wait too long",
		[]string{"✅ relay default: events no longer wait too long"},
		"",
	},
	{
		"a report",
		outbox.Alert{Kind: outbox.AlertReport, Counts: []outbox.EventCount{
			{Relay: "default", Status: "dead", Type: "shop.order.created.v1", Class: "message_too_large", Events: 4, Oldest: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)},
			{Relay: "default", Status: "parked", Type: "shop.order.created.v1", Events: 2, Oldest: time.Date(2026, 3, 1, 13, 0, 0, 0, time.UTC)},
		}},
		"📋 unresolved failures: 4 dead shop.order.created.v1 message_too_large, 2 parked shop.order.created.v1; the oldest since 2026-03-01T12:00:00Z",
		[]string{"📋 unresolved failures: 4 dead shop.order.created.v1 message_too_large, 2 parked shop.order.created.v1; the oldest since 2026-03-01T12:00:00Z"},
		"report",
	},
}

func TestSlack(t *testing.T) {
	t.Parallel()
	var body slackMessage
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		require.Equal(t, "POST /services/T/B/secret", r.Method+" "+r.URL.Path)
		require.Equal(t, "application/json", r.Header.Get("Content-Type"))
		body = slackMessage{}
		require.NoError(t, json.NewDecoder(r.Body).Decode(&body))
		_, err := w.Write([]byte("ok"))
		require.NoError(t, err)
	}))
	defer server.Close()
	slack, err := outboxalert.Slack(server.URL+"/services/T/B/secret", nil)
	require.NoError(t, err)
	for _, test := range slackTests {
		t.Run(test.name, func(t *testing.T) {
			require.NoError(t, slack.Alert(t.Context(), test.alert))
			require.Equal(t, test.text, body.Text)
			var blocks []string
			for _, block := range body.Blocks {
				blocks = append(blocks, block.Text.Text)
			}
			want := test.blocks
			if test.todo != "" {
				want = append(want, "<https://github.com/outboxgo/outbox/blob/main/docs/runbooks.md#"+test.todo+"|What to do>")
			}
			require.Equal(t, want, blocks)
		})
	}
}

// Errors are returned without the secret in the URL.
func TestSlackFails(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "invalid_token", http.StatusForbidden)
	}))
	slack, err := outboxalert.Slack(server.URL+"/services/T/B/secret", server.Client())
	require.NoError(t, err)
	require.ErrorContains(t, slack.Alert(t.Context(), outbox.Alert{}), "403 Forbidden: invalid_token")
	server.Close()
	err = slack.Alert(t.Context(), outbox.Alert{})
	require.ErrorContains(t, err, "post alert")
	require.NotContains(t, err.Error(), "secret")
	for _, bad := range []string{"", "secret", "ftp://host/secret", "https:///secret", "http://ho st/secret", "http://hooks.slack.com/services/secret",
		"http://localhost.example.com/secret", "http://10.0.0.1/secret", "http://[fe80::1]/secret", "http://:80/secret"} {
		_, err := outboxalert.Slack(bad, nil)
		require.Error(t, err, bad)
		require.NotContains(t, err.Error(), "secret")
	}
}

// The secret is on the wire in clear text only where no wire is.
func TestSlackOfThisMachine(t *testing.T) {
	t.Parallel()
	for _, good := range []string{"https://hooks.slack.com/secret", "http://localhost:8080/x", "http://127.0.0.1/x", "http://127.1.2.3/x", "http://[::1]:80/x"} {
		_, err := outboxalert.Slack(good, nil)
		require.NoError(t, err, good)
	}
}

// A redirect would carry the alert elsewhere, perhaps in clear text.
func TestSlackFollowsNoRedirect(t *testing.T) {
	t.Parallel()
	var followed atomic.Bool
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { followed.Store(true) }))
	defer elsewhere.Close()
	server := httptest.NewTLSServer(http.RedirectHandler(elsewhere.URL+"/services/T/B/secret", http.StatusTemporaryRedirect))
	defer server.Close()
	slack, err := outboxalert.Slack(server.URL+"/services/T/B/secret", server.Client())
	require.NoError(t, err)
	err = slack.Alert(t.Context(), outbox.Alert{})
	require.ErrorContains(t, err, "307 Temporary Redirect")
	require.NotContains(t, err.Error(), "secret")
	require.False(t, followed.Load())
}

// transport answers as it likes.
type transport func(*http.Request) (*http.Response, error)

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) { return t(r) }

// Proxies and clients repeat the address and much more; an error of ours does not.
func TestSlackErrorsHaveNoAddress(t *testing.T) {
	t.Parallel()
	const webhook = "https://kim:passw0rd@hooks.example.com/services/T%20/B/secret?token=secret2"
	errOurs := errors.New("ours")
	for name, answer := range map[string]transport{
		"an answer that repeats the path": func(r *http.Request) (*http.Response, error) {
			return response("404 Not Found", "no route "+r.URL.Path+" or "+r.URL.EscapedPath()+" for "+r.URL.String()), nil
		},
		"a status that repeats it": func(r *http.Request) (*http.Response, error) {
			return response("404 no "+r.URL.RequestURI(), strings.Repeat("x", 1<<20)), nil
		},
		"an error that repeats it": func(r *http.Request) (*http.Response, error) {
			return nil, fmt.Errorf("proxy: %w: %w", errOurs, &url.Error{Op: "Get", URL: r.URL.String(), Err: errors.New(r.URL.Path + strings.Repeat("x", 1<<20))})
		},
	} {
		slack, err := outboxalert.Slack(webhook, &http.Client{Transport: answer})
		require.NoError(t, err)
		err = slack.Alert(t.Context(), outbox.Alert{})
		require.Error(t, err, name)
		for shown := err; shown != nil; shown = errors.Unwrap(shown) {
			require.NotContains(t, shown.Error(), "secret", name)
			require.NotContains(t, shown.Error(), "passw0rd", name)
			require.Less(t, len(shown.Error()), 500, name)
		}
		if name == "an error that repeats it" {
			require.ErrorIs(t, err, errOurs)
		}
	}
}

func response(status, body string) *http.Response {
	return &http.Response{Status: status, StatusCode: http.StatusNotFound, Body: io.NopCloser(strings.NewReader(body)), Header: http.Header{}}
}
