package outboxhttp

import (
	"encoding/json"
	"net/http"

	"github.com/outboxgo/outbox"
)

// Healthy is a [outbox.Relay], or whatever else knows its health.
type Healthy interface {
	Health() outbox.RelayHealth
}

// Live answers a liveness probe: 200 while all relays are live, else 503. Only a new
// start helps one that is not, so an outage of Kafka or PostgreSQL does not show here.
// The body is that of [Ready].
func Live(relays ...Healthy) http.Handler {
	return health(relays, func(h outbox.RelayHealth) bool { return h.Live })
}

// Ready answers a readiness probe: 200 while all relays are ready, else 503. The body
// says why, as JSON:
//
//	{"ok": false, "relays": [{"relay": "default", "live": true, "ready": false, "leading": true,
//	 "breaker": "open", "reasons": ["the circuit breaker is open"]}]}
//
// A process whose relay is not ready may well serve requests, because recording needs
// no relay; use this for a process of its own, or to be told.
func Ready(relays ...Healthy) http.Handler {
	return health(relays, func(h outbox.RelayHealth) bool { return h.Ready })
}

type healthReport struct {
	OK     bool          `json:"ok"`
	Relays []relayReport `json:"relays"`
}

type relayReport struct {
	Relay   string   `json:"relay"`
	Live    bool     `json:"live"`
	Ready   bool     `json:"ready"`
	Leading bool     `json:"leading"`
	Breaker string   `json:"breaker"`
	Reasons []string `json:"reasons"`
}

func health(relays []Healthy, ok func(outbox.RelayHealth) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		report := healthReport{OK: true, Relays: []relayReport{}}
		for _, r := range relays {
			h := r.Health()
			report.OK = report.OK && ok(h)
			report.Relays = append(report.Relays, relayReport{
				Relay: h.Relay, Live: h.Live, Ready: h.Ready, Leading: h.Leading, Breaker: h.Breaker.String(),
				Reasons: append([]string{}, h.Reasons...),
			})
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		if !report.OK {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_ = json.NewEncoder(w).Encode(report) // the client has gone
	})
}
