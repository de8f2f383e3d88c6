package outboxhttp_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

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
	require.JSONEq(t, `{"ok": false, "relays": [], "workers": [{"group": "mails", "live": true, "ready": true, "deliveries": 12, "reasons": []},
		{"group": "orders", "live": false, "ready": false, "deliveries": 0, "reasons": ["a handler does not return"]}]}`, body)
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
		{"relay": "a", "live": true, "ready": true, "leading": true, "breaker": "closed", "reasons": []},
		{"relay": "b", "live": true, "ready": false, "leading": false, "breaker": "open", "reasons": ["the circuit breaker is open"]}]}`, body)
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
		{"relay": "a", "live": true, "ready": true, "leading": false, "breaker": "closed", "reasons": []}],
		"consumers": [{"group": "sales", "live": true, "ready": true, "partitions": 4, "reasons": []}]}`, body)
	ill := fakeConsumer{Group: "cache", Live: true, Reasons: []string{"PostgreSQL has been failing for 3s: no route"}}
	live, ready, body = probe(t, outboxhttp.Consumer(ill), outboxhttp.Relay(relay), outboxhttp.Consumer(well))
	require.Equal(t, []int{200, 503}, []int{live, ready})
	require.Contains(t, body, `{"group":"cache","live":true,"ready":false,"partitions":0,"reasons":["PostgreSQL has been failing for 3s: no route"]}`)
	ill.Live = false
	live, _, _ = probe(t, outboxhttp.Consumer(ill))
	require.Equal(t, 503, live)
}
