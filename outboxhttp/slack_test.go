package outboxhttp_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxhttp"
	"github.com/stretchr/testify/require"
)

var slackTests = []struct {
	name  string
	alert outbox.Alert
	want  string
}{
	{
		"events that died",
		outbox.Alert{
			Kind: outbox.AlertDead, Relay: "default", Status: outbox.RelayStatus{Dead: 12}, Died: 3,
			Dead: []outbox.DeadEvent{{FailedEvent: outbox.FailedEvent{
				EventID: "e-1", Type: "shop.order.created.v1", AggregateType: "Order", AggregateID: "<!channel> & `7`", Class: "message_too_large",
			}}},
		},
		":rotating_light: relay default: 3 events died; 12 are dead\n" +
			"• `shop.order.created.v1` Order &lt;!channel&gt; &amp; '7', event `e-1`: message_too_large\n… and 2 more",
	},
	{
		"too many dead ones",
		outbox.Alert{Kind: outbox.AlertManyDead, Relay: "default", Status: outbox.RelayStatus{Dead: 10}},
		":rotating_light: relay default: 10 dead events wait for a decision",
	},
	{
		"what is over",
		outbox.Alert{Kind: outbox.AlertStale, Relay: "default", Over: true},
		":white_check_mark: relay default: events no longer wait too long",
	},
	{
		"a report",
		outbox.Alert{Kind: outbox.AlertReport, Relay: "default", Unresolved: []outbox.FailedCount{
			{Status: "dead", Type: "shop.order.created.v1", Class: "message_too_large", Events: 4, Oldest: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)},
			{Status: "parked", Type: "shop.order.created.v1", Events: 2, Oldest: time.Date(2026, 3, 1, 13, 0, 0, 0, time.UTC)},
		}},
		":clipboard: relay default: failed events: 4 dead shop.order.created.v1 message_too_large, 2 parked shop.order.created.v1; " +
			"the oldest since 2026-03-01T12:00:00Z",
	},
}

func TestSlack(t *testing.T) {
	t.Parallel()
	var body map[string]string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		require.Equal(t, "POST /services/T/B/secret", r.Method+" "+r.URL.Path)
		require.Equal(t, "application/json", r.Header.Get("Content-Type"))
		body = nil
		require.NoError(t, json.NewDecoder(r.Body).Decode(&body))
		_, err := w.Write([]byte("ok"))
		require.NoError(t, err)
	}))
	defer server.Close()
	slack, err := outboxhttp.Slack(server.URL+"/services/T/B/secret", nil)
	require.NoError(t, err)
	for _, test := range slackTests {
		t.Run(test.name, func(t *testing.T) {
			require.NoError(t, slack.Alert(t.Context(), test.alert))
			require.Equal(t, map[string]string{"text": test.want}, body)
		})
	}
}

// Errors are returned without the secret in the URL.
func TestSlackFails(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "invalid_token", http.StatusForbidden)
	}))
	slack, err := outboxhttp.Slack(server.URL+"/services/T/B/secret", server.Client())
	require.NoError(t, err)
	require.ErrorContains(t, slack.Alert(t.Context(), outbox.Alert{}), "403 Forbidden: invalid_token")
	server.Close()
	err = slack.Alert(t.Context(), outbox.Alert{})
	require.ErrorContains(t, err, "post alert")
	require.NotContains(t, err.Error(), "secret")
	for _, bad := range []string{"", "secret", "ftp://host/secret", "https:///secret", "http://ho st/secret"} {
		_, err := outboxhttp.Slack(bad, nil)
		require.Error(t, err, bad)
		require.NotContains(t, err.Error(), "secret")
	}
}
