package outboxhttp_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxhttp"
	"github.com/stretchr/testify/require"
)

type fakeRelay outbox.RelayHealth

func (r fakeRelay) Health() outbox.RelayHealth { return outbox.RelayHealth(r) }

type fakeConsumer outbox.ConsumerHealth

func (c fakeConsumer) Health() outbox.ConsumerHealth { return outbox.ConsumerHealth(c) }

// probe asks for the health of parts, and returns both status codes and the body of
// Ready.
func probe(t *testing.T, parts ...outboxhttp.Part) (live, ready int, body string) {
	t.Helper()
	l, r := httptest.NewRecorder(), httptest.NewRecorder()
	outboxhttp.Live(parts...).ServeHTTP(l, httptest.NewRequest(http.MethodGet, "/", nil))
	outboxhttp.Ready(parts...).ServeHTTP(r, httptest.NewRequest(http.MethodGet, "/", nil))
	require.Equal(t, "application/json", r.Header().Get("Content-Type"))
	return l.Code, r.Code, r.Body.String()
}

type fakeWorker outbox.WorkerHealth

func (w fakeWorker) Health() outbox.WorkerHealth { return outbox.WorkerHealth(w) }

// A worker that does not handle events is not ready, and its deliveries are told.
func TestProbesOfWorkers(t *testing.T) {
	t.Parallel()
	well := fakeWorker{Group: "mails", Live: true, Ready: true, Deliveries: 12}
	ill := fakeWorker{Group: "orders", Live: false, Reasons: []string{"a handler does not return"}}
	live, ready, _ := probe(t, outboxhttp.Worker(well))
	require.Equal(t, []int{200, 200}, []int{live, ready})
	live, ready, body := probe(t, outboxhttp.Worker(well), outboxhttp.Worker(ill))
	require.Equal(t, []int{503, 503}, []int{live, ready})
	require.JSONEq(t, `{"ok": false, "relays": [], "workers": [{"group": "mails", "live": true, "ready": true, "works": false, "answered": false, "deliveries": 12, "reasons": []},
		{"group": "orders", "live": false, "ready": false, "works": false, "answered": false, "deliveries": 0, "reasons": ["a handler does not return"]}]}`, body)
}

// A probe fails if one of the relays does, and the body says why.
func TestProbes(t *testing.T) {
	t.Parallel()
	well := fakeRelay{Relay: "a", Live: true, Ready: true, Leading: true}
	ill := fakeRelay{Relay: "b", Live: true, Breaker: outbox.BreakerOpen, Reasons: []string{"the circuit breaker is open"}}
	live, ready, body := probe(t)
	require.Equal(t, []int{200, 200}, []int{live, ready})
	require.JSONEq(t, `{"ok": true, "relays": []}`, body)
	live, ready, _ = probe(t, outboxhttp.Relay(well))
	require.Equal(t, []int{200, 200}, []int{live, ready})
	live, ready, body = probe(t, outboxhttp.Relay(well), outboxhttp.Relay(ill))
	require.Equal(t, []int{200, 503}, []int{live, ready})
	require.JSONEq(t, `{"ok": false, "relays": [
		{"relay": "a", "live": true, "ready": true, "works": false, "answered": false, "leading": true, "breaker": "closed", "reasons": []},
		{"relay": "b", "live": true, "ready": false, "works": false, "answered": false, "leading": false, "breaker": "open", "reasons": ["the circuit breaker is open"]}]}`, body)
	ill.Live = false
	live, _, _ = probe(t, outboxhttp.Relay(ill))
	require.Equal(t, 503, live)
}

// Consumers count like relays.
func TestProbesOfConsumers(t *testing.T) {
	t.Parallel()
	relay := fakeRelay{Relay: "a", Live: true, Ready: true}
	well := fakeConsumer{Group: "sales", Live: true, Ready: true, Partitions: 4}
	live, ready, body := probe(t, outboxhttp.Relay(relay), outboxhttp.Consumer(well))
	require.Equal(t, []int{200, 200}, []int{live, ready})
	require.JSONEq(t, `{"ok": true, "relays": [
		{"relay": "a", "live": true, "ready": true, "works": false, "answered": false, "leading": false, "breaker": "closed", "reasons": []}],
		"consumers": [{"group": "sales", "live": true, "ready": true, "works": false, "answered": false, "partitions": 4, "reasons": []}]}`, body)
	ill := fakeConsumer{Group: "cache", Live: true, Reasons: []string{"PostgreSQL has been failing for 3s: no route"}}
	live, ready, body = probe(t, outboxhttp.Consumer(ill), outboxhttp.Relay(relay), outboxhttp.Consumer(well))
	require.Equal(t, []int{200, 503}, []int{live, ready})
	require.Contains(t, body, `{"group":"cache","live":true,"ready":false,"works":false,"answered":false,"partitions":0,"reasons":["PostgreSQL has been failing for 3s: no route"]}`)
	ill.Live = false
	live, _, _ = probe(t, outboxhttp.Consumer(ill))
	require.Equal(t, 503, live)
}

// A part that does not work is ready, unless that is asked of it. Health shows what does not work, with 200.
func TestStrictOwnAndHealth(t *testing.T) {
	t.Parallel()
	since := time.Date(2026, 11, 27, 12, 3, 0, 0, time.UTC)
	unreached := []outbox.Outage{{What: "Kafka", Class: "unreachable", Since: since, Err: "dial tcp"}}
	relay := outboxhttp.Relay(fakeRelay{Relay: "a", Live: true, Ready: true, Answered: true, Outages: unreached})
	fresh := outboxhttp.Consumer(fakeConsumer{Group: "b", Live: true, Ready: true, Outages: unreached})
	worker := outboxhttp.Worker(fakeWorker{Group: "c", Live: true, Ready: true, Works: true, Answered: true})
	for _, test := range []struct {
		part  outboxhttp.Part
		ready int
	}{
		{relay, 200},
		{outboxhttp.Own(relay), 200},
		{outboxhttp.Strict(relay), 503},
		{fresh, 200},
		{outboxhttp.Own(fresh), 503},
		{outboxhttp.Strict(fresh), 503},
		{outboxhttp.Strict(outboxhttp.Own(worker)), 200},
	} {
		live, ready, body := probe(t, test.part)
		require.Equal(t, []int{200, test.ready}, []int{live, ready}, body)
		require.Equal(t, test.ready == 200, strings.Contains(body, `"ready":true`), body)
	}
	r := httptest.NewRecorder()
	outboxhttp.Health(relay, worker).ServeHTTP(r, httptest.NewRequest(http.MethodGet, "/", nil))
	require.Equal(t, 200, r.Code)
	require.JSONEq(t, `{"ok": false, "relays": [{"relay": "a", "live": true, "ready": true, "works": false, "answered": true, "leading": false,
		"breaker": "closed", "reasons": [], "outages": [{"what": "Kafka", "class": "unreachable", "since": "2026-11-27T12:03:00Z", "error": "dial tcp"}]}],
		"workers": [{"group": "c", "live": true, "ready": true, "works": true, "answered": true, "deliveries": 0, "reasons": []}]}`, r.Body.String())
	r = httptest.NewRecorder()
	outboxhttp.Health(worker).ServeHTTP(r, httptest.NewRequest(http.MethodGet, "/", nil))
	require.Contains(t, r.Body.String(), `"ok":true`)
}
