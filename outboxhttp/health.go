package outboxhttp

import (
	"encoding/json"
	"net/http"

	"github.com/outboxgo/outbox"
)

// Part is a part of this process whose health a probe reports: a [Relay], a [Consumer] or a [Worker].
type Part struct {
	report func(*healthReport) (live, ready bool)
}

// Relay returns the part for an [outbox.Relay].
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

// Consumer returns the part for an [outbox.Consumer].
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

// Worker returns the part for an [outbox.Worker].
func Worker(worker interface{ Health() outbox.WorkerHealth }) Part {
	return Part{func(r *healthReport) (live, ready bool) {
		h := worker.Health()
		r.Workers = append(r.Workers, workerReport{
			Group: h.Group, Live: h.Live, Ready: h.Ready, Deliveries: h.Deliveries,
			Reasons: append([]string{}, h.Reasons...),
		})
		return h.Live, h.Ready
	}}
}

// Live answers a liveness probe: 200 if all parts are live, else 503. A part that is not
// live needs a restart; an outage of Kafka or PostgreSQL does not count. The body is that
// of [Ready].
func Live(parts ...Part) http.Handler {
	return health(parts, func(live, _ bool) bool { return live })
}

// Ready answers a readiness probe: 200 if all parts are ready, else 503. The body gives
// the reasons, as JSON; without consumers or workers, it has no list of them:
//
//	{"ok": false, "relays": [{"relay": "default", "live": true, "ready": false, "leading": true,
//	 "breaker": "open", "reasons": ["the circuit breaker is open"]}],
//	 "consumers": [{"group": "sales", "live": true, "ready": true, "partitions": 4, "reasons": []}],
//	 "workers": [{"group": "mails", "live": true, "ready": true, "deliveries": 12, "reasons": []}]}
//
// A process whose relay is not ready can still serve requests, because recording needs
// no relay. Use this probe if the relay runs in a process of its own, or for monitoring.
func Ready(parts ...Part) http.Handler {
	return health(parts, func(_, ready bool) bool { return ready })
}

type healthReport struct {
	OK        bool             `json:"ok"`
	Relays    []relayReport    `json:"relays"`
	Consumers []consumerReport `json:"consumers,omitempty"`
	Workers   []workerReport   `json:"workers,omitempty"`
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

type workerReport struct {
	Group      string   `json:"group"`
	Live       bool     `json:"live"`
	Ready      bool     `json:"ready"`
	Deliveries int      `json:"deliveries"`
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
		w.Header().Set("X-Content-Type-Options", "nosniff")
		if !report.OK {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_ = json.NewEncoder(w).Encode(report) // the client has gone
	})
}
