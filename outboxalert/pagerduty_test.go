package outboxalert_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxalert"
)

const routingKey = "0123456789abcdef0123456789abcdef"

// pagerDuty takes events as PagerDuty does: it refuses what its Events API v2 would refuse, and
// keeps the open incidents by their keys.
type pagerDuty struct {
	t      *testing.T
	open   map[string]string // severity and summary
	last   map[string]any
	answer int // instead of 202
}

func (p *pagerDuty) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	require.Equal(p.t, "POST /v2/enqueue", r.Method+" "+r.URL.Path)
	require.Equal(p.t, "application/json", r.Header.Get("Content-Type"))
	var event struct {
		RoutingKey string `json:"routing_key"`
		Action     string `json:"event_action"`
		DedupKey   string `json:"dedup_key"`
		Payload    *struct {
			Summary, Source, Severity string
			Timestamp                 time.Time
			Details                   map[string]any `json:"custom_details"`
		}
		Links []struct{ Href, Text string }
	}
	p.last = map[string]any{}
	require.NoError(p.t, json.NewDecoder(r.Body).Decode(&p.last))
	body, err := json.Marshal(p.last)
	require.NoError(p.t, err)
	require.NoError(p.t, json.Unmarshal(body, &event))
	require.Equal(p.t, routingKey, event.RoutingKey)
	require.NotEmpty(p.t, event.DedupKey)
	require.LessOrEqual(p.t, len(event.DedupKey), 255)
	if p.answer != 0 {
		http.Error(w, `{"status": "throttle exceeded", "message": "too many requests for `+routingKey+`"}`, p.answer)
		return
	}
	switch event.Action {
	case "resolve":
		require.Nil(p.t, event.Payload)
		delete(p.open, event.DedupKey)
	case "trigger":
		require.NotEmpty(p.t, event.Payload.Source)
		require.NotEmpty(p.t, event.Payload.Summary)
		require.LessOrEqual(p.t, len([]rune(event.Payload.Summary)), 1024)
		require.Contains(p.t, []string{"critical", "error", "warning", "info"}, event.Payload.Severity)
		p.open[event.DedupKey] = event.Payload.Severity + ": " + event.Payload.Summary
	default:
		p.t.Errorf("event_action is %q", event.Action)
	}
	w.WriteHeader(http.StatusAccepted)
	_, err = w.Write([]byte(`{"status": "success", "message": "Event processed", "dedup_key": "x"}`))
	require.NoError(p.t, err)
}

func newPagerDuty(t *testing.T) (*pagerDuty, outbox.Alerter) {
	t.Helper()
	p := &pagerDuty{t: t, open: map[string]string{}}
	server := httptest.NewServer(p)
	t.Cleanup(server.Close)
	alerter, err := outboxalert.PagerDuty(routingKey, "orders", outboxalert.PagerDutyConfig{URL: server.URL + "/v2/enqueue", Page: "https://ops.example.com/outbox"})
	require.NoError(t, err)
	return p, alerter
}

// An incident is open from the first alert until what it is about is over, one for each relay,
// group and kind. A report makes none.
func TestPagerDuty(t *testing.T) {
	t.Parallel()
	p, alerter := newPagerDuty(t)
	stale := outbox.Alert{Kind: outbox.AlertStale, Group: "stats", At: time.Now(), Counts: []outbox.EventCount{
		{Group: "stats", Action: "COUNTED", Status: "parked", Type: "shop.order.created.v1", Events: 120, More: true, Oldest: time.Now().Add(-10 * time.Minute)},
	}}
	died := outbox.Alert{Kind: outbox.AlertDead, Relay: "default", Status: outbox.RelayStatus{Dead: 1}, Died: 1, Dead: []outbox.DeadEvent{
		{ID: 7, FailedEvent: outbox.FailedEvent{EventID: "e-1", Type: "shop.order.created.v1", AggregateType: "Order", AggregateID: "42", Class: "message_too_large", Err: errors.New("too large")}},
	}}
	require.NoError(t, alerter.Alert(t.Context(), stale))
	counts := p.last["payload"].(map[string]any)["custom_details"].(map[string]any)["counts"]
	require.Equal(t, true, counts.([]any)[0].(map[string]any)["more"])
	for _, a := range []outbox.Alert{stale, died, {Kind: outbox.AlertNoLeader, Relay: "default"}, {Kind: outbox.AlertReport}} {
		require.NoError(t, alerter.Alert(t.Context(), a))
	}
	require.Equal(t, map[string]string{
		"orders/stale_events//stats/":  "critical: orders: consumer group stats: 120 or more events are not handled, the oldest for 10m0s: 120 or more parked shop.order.created.v1 for stats COUNTED",
		"orders/dead_events/default//": "error: orders: relay default: 1 event died; 1 are dead",
		"orders/no_leader/default//":   "critical: orders: relay default: no process runs it, 0 events wait",
	}, p.open)

	require.NoError(t, alerter.Alert(t.Context(), died))
	payload := p.last["payload"].(map[string]any)
	require.Equal(t, "default", payload["component"])
	require.Equal(t, []any{map[string]any{"id": 7.0, "event_id": "e-1", "type": "shop.order.created.v1", "aggregate_type": "Order", "aggregate_id": "42",
		"class": "message_too_large", "error": "too large"}}, payload["custom_details"].(map[string]any)["dead"])
	require.Equal(t, []any{
		map[string]any{"href": "https://github.com/outboxgo/outbox/blob/main/docs/runbooks.md#outboxdeadevents", "text": "What to do"},
		map[string]any{"href": "https://ops.example.com/outbox", "text": "Operators' page"},
	}, p.last["links"])

	stale.Over = true
	require.NoError(t, alerter.Alert(t.Context(), stale))
	require.Len(t, p.open, 2)
}

// What a process has begun that led before is resolved, also behind other alerters, which do not hear of it.
func TestPagerDutyResolvesWhatOthersBegan(t *testing.T) {
	t.Parallel()
	p, before := newPagerDuty(t)
	open := outbox.Alert{Kind: outbox.AlertBreaker, Relay: "default", At: time.Now()}
	stale := outbox.Alert{Kind: outbox.AlertStale, Relay: "default", At: time.Now()}
	for _, a := range []outbox.Alert{open, stale} {
		require.NoError(t, before.Alert(t.Context(), a))
	}
	silent := &box{}
	after, ok := outboxalert.All(silent, outboxalert.Only(silent, outbox.AlertBreaker), outboxalert.Only(before, outbox.AlertBreaker)).(interface {
		Resolve(ctx context.Context, a outbox.Alert) error
	})
	require.True(t, ok)
	open.Over, stale.Over = true, true
	p.answer = http.StatusTooManyRequests
	require.Error(t, after.Resolve(t.Context(), open))
	p.answer = 0
	for _, a := range []outbox.Alert{open, stale, {Kind: outbox.AlertReport, Over: true}} {
		require.NoError(t, after.Resolve(t.Context(), a))
	}
	require.Empty(t, silent.alerts)
	require.Len(t, p.open, 1, "that of a kind that is left out")
	require.NoError(t, before.(interface {
		Resolve(ctx context.Context, a outbox.Alert) error
	}).Resolve(t.Context(), stale))
	require.Empty(t, p.open)
}

// What is too long for PagerDuty is cut.
func TestPagerDutyLimits(t *testing.T) {
	t.Parallel()
	p, alerter := newPagerDuty(t)
	long := outbox.Alert{Kind: outbox.AlertManyDead, Group: strings.Repeat("ü", 255), Counts: make([]outbox.EventCount, 10_000)}
	for i := range long.Counts {
		long.Counts[i].Type = strings.Repeat("ß", 100)
	}
	require.NoError(t, alerter.Alert(t.Context(), long))
	require.Len(t, p.open, 1)
	long.Over = true
	require.NoError(t, alerter.Alert(t.Context(), long))
	require.Empty(t, p.open)
}

// The alert comes again, and the routing key is in no error.
func TestPagerDutyFails(t *testing.T) {
	t.Parallel()
	p, alerter := newPagerDuty(t)
	p.answer = http.StatusTooManyRequests
	err := alerter.Alert(t.Context(), outbox.Alert{Kind: outbox.AlertBreaker, Relay: "default"})
	require.ErrorContains(t, err, "429 Too Many Requests")
	require.NotContains(t, err.Error(), routingKey)
	for _, bad := range [][3]string{{"", "orders", ""}, {routingKey, "", ""}, {routingKey, "orders", "http://events.pagerduty.com/v2/enqueue"}} {
		_, err := outboxalert.PagerDuty(bad[0], bad[1], outboxalert.PagerDutyConfig{URL: bad[2]})
		require.Error(t, err)
		require.NotContains(t, err.Error(), routingKey)
	}
	_, err = outboxalert.PagerDuty(routingKey, "orders", outboxalert.PagerDutyConfig{})
	require.NoError(t, err)
}
