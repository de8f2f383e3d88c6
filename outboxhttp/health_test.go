package outboxhttp_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxhttp"
	"github.com/stretchr/testify/require"
)

type patient outbox.RelayHealth

func (p patient) Health() outbox.RelayHealth { return outbox.RelayHealth(p) }

// A probe fails if one of the relays does, and the body says why.
func TestProbes(t *testing.T) {
	well := patient{Relay: "a", Live: true, Ready: true, Leading: true}
	ill := patient{Relay: "b", Live: true, Breaker: outbox.BreakerOpen, Reasons: []string{"the circuit breaker is open"}}
	ask := func(relays ...outboxhttp.Healthy) (live, ready int, body string) {
		l, r := httptest.NewRecorder(), httptest.NewRecorder()
		outboxhttp.Live(relays...).ServeHTTP(l, httptest.NewRequest(http.MethodGet, "/", nil))
		outboxhttp.Ready(relays...).ServeHTTP(r, httptest.NewRequest(http.MethodGet, "/", nil))
		require.Equal(t, "application/json", r.Header().Get("Content-Type"))
		return l.Code, r.Code, r.Body.String()
	}
	live, ready, body := ask()
	require.Equal(t, []int{200, 200}, []int{live, ready})
	require.JSONEq(t, `{"ok": true, "relays": []}`, body)
	live, ready, _ = ask(well)
	require.Equal(t, []int{200, 200}, []int{live, ready})
	live, ready, body = ask(well, ill)
	require.Equal(t, []int{200, 503}, []int{live, ready})
	require.JSONEq(t, `{"ok": false, "relays": [
		{"relay": "a", "live": true, "ready": true, "leading": true, "breaker": "closed", "reasons": []},
		{"relay": "b", "live": true, "ready": false, "leading": false, "breaker": "open", "reasons": ["the circuit breaker is open"]}]}`, body)
	ill.Live = false
	live, _, _ = ask(ill)
	require.Equal(t, 503, live)
}
