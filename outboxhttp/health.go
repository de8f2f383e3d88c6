package outboxhttp

import (
	"encoding/json"
	"net/http"

	"github.com/outboxgo/outbox"
)

// Part is a part of this process whose health is asked for: a [Relay] or a [Consumer].
type Part struct {
	report func(*healthReport) (live, ready bool)
}

// Relay makes a part of a [outbox.Relay].
func Relay(relay interface{ Health() outbox.RelayHealth }) Part {
	return Part{func(r *healthReport) (live, ready bool) {
		h := relay.Health()
		r.Relays = append(r.Relays, relayReport{
			Relay: h.Relay, Live: h.Live, Ready: h.Ready, Leading: h.Leading, Breaker: h.Breaker.String(),
			Reasons: append([]string{}, h.Reasons...),
		})
		return h.Live, h.Ready
	}}
}

// Consumer makes a part of a [outbox.Consumer].
func Consumer(consumer interface{ Health() outbox.ConsumerHealth }) Part {
	return Part{func(r *healthReport) (live, ready bool) {
		h := consumer.Health()
		r.Consumers = append(r.Consumers, consumerReport{
			Group: h.Group, Live: h.Live, Ready: h.Ready, Partitions: h.Partitions,
			Reasons: append([]string{}, h.Reasons...),
		})
		return h.Live, h.Ready
	}}
}

// Live answers a liveness probe: 200 while all parts are live, else 503. Only a restart
// helps one that is not, so an outage of Kafka or PostgreSQL does not show here. The
// body is that of [Ready].
func Live(parts ...Part) http.Handler {
	return health(parts, func(live, _ bool) bool { return live })
}

// Ready answers a readiness probe: 200 while all parts are ready, else 503. The body
// says why, as JSON; without consumers, they are left out:
//
//	{"ok": false, "relays": [{"relay": "default", "live": true, "ready": false, "leading": true,
//	 "breaker": "open", "reasons": ["the circuit breaker is open"]}],
//	 "consumers": [{"group": "sales", "live": true, "ready": true, "partitions": 4, "reasons": []}]}
//
// A process whose relay is not ready may well serve requests, because recording needs
// no relay; use this for a process of its own, or to be told.
func Ready(parts ...Part) http.Handler {
	return health(parts, func(_, ready bool) bool { return ready })
}

type healthReport struct {
	OK        bool             `json:"ok"`
	Relays    []relayReport    `json:"relays"`
	Consumers []consumerReport `json:"consumers,omitempty"`
}

type relayReport struct {
	Relay   string   `json:"relay"`
	Live    bool     `json:"live"`
	Ready   bool     `json:"ready"`
	Leading bool     `json:"leading"`
	Breaker string   `json:"breaker"`
	Reasons []string `json:"reasons"`
}

type consumerReport struct {
	Group      string   `json:"group"`
	Live       bool     `json:"live"`
	Ready      bool     `json:"ready"`
	Partitions int      `json:"partitions"`
	Reasons    []string `json:"reasons"`
}

func health(parts []Part, ok func(live, ready bool) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		report := healthReport{OK: true, Relays: []relayReport{}}
		for _, part := range parts {
			report.OK = ok(part.report(&report)) && report.OK
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		if !report.OK {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_ = json.NewEncoder(w).Encode(report) // the client has gone
	})
}
