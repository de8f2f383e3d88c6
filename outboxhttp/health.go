package outboxhttp

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/outboxgo/outbox"
)

// Part is a part of this process whose health a probe reports: a [Relay], a [Consumer] or a [Worker].
type Part struct{ health func() state }

// state is the health of a part. Add adds it to a report.
type state struct {
	live, ready, works, answered bool
	add                          func(r *healthReport, ready bool)
}

// Relay returns the part for an [outbox.Relay].
func Relay(relay interface{ Health() outbox.RelayHealth }) Part {
	return Part{func() state {
		h := relay.Health()
		return state{h.Live, h.Ready, h.Works, h.Answered, func(r *healthReport, ready bool) {
			r.Relays = append(r.Relays, relayReport{
				Relay: h.Relay, Live: h.Live, Ready: ready, Works: h.Works, Answered: h.Answered, Leading: h.Leading, Breaker: h.Breaker.String(),
				Outages: outagesOf(h.Outages), Reasons: append([]string{}, h.Reasons...),
			})
		}}
	}}
}

// Consumer returns the part for an [outbox.Consumer].
func Consumer(consumer interface{ Health() outbox.ConsumerHealth }) Part {
	return Part{func() state {
		h := consumer.Health()
		return state{h.Live, h.Ready, h.Works, h.Answered, func(r *healthReport, ready bool) {
			r.Consumers = append(r.Consumers, consumerReport{
				Group: h.Group, Live: h.Live, Ready: ready, Works: h.Works, Answered: h.Answered, Partitions: h.Partitions,
				Outages: outagesOf(h.Outages), Reasons: append([]string{}, h.Reasons...),
			})
		}}
	}}
}

// Worker returns the part for an [outbox.Worker].
func Worker(worker interface{ Health() outbox.WorkerHealth }) Part {
	return Part{func() state {
		h := worker.Health()
		return state{h.Live, h.Ready, h.Works, h.Answered, func(r *healthReport, ready bool) {
			r.Workers = append(r.Workers, workerReport{
				Group: h.Group, Live: h.Live, Ready: ready, Works: h.Works, Answered: h.Answered, Deliveries: h.Deliveries,
				Outages: outagesOf(h.Outages), Reasons: append([]string{}, h.Reasons...),
			})
		}}
	}}
}

// Own returns a part that is not ready before PostgreSQL and Kafka have answered once since Run began. Use it for a
// process that does nothing else. A rollout then stops at a process with a wrong address or password; it also stops
// during an outage of Kafka.
func Own(part Part) Part {
	return part.readyIf(func(s state) bool { return s.answered })
}

// Strict returns a part that is ready only while it works: in an outage of Kafka or PostgreSQL it is not ready. Then
// no process of a service is, and the service gets no requests.
func Strict(part Part) Part {
	return part.readyIf(func(s state) bool { return s.works })
}

func (p Part) readyIf(holds func(state) bool) Part {
	return Part{func() state {
		s := p.health()
		s.ready = s.ready && holds(s)
		return s
	}}
}

// Live answers a liveness probe: 200 if all parts are live, else 503. A part that is not
// live needs a restart; an outage of Kafka or PostgreSQL does not count. The body is that
// of [Ready].
func Live(parts ...Part) http.Handler {
	return health(parts, func(s state) bool { return s.live }, http.StatusServiceUnavailable)
}

// Ready answers a readiness probe: 200 if all parts are ready, else 503. The body gives
// the reasons, as JSON; without consumers or workers, it has no list of them:
//
//	{"ok": true, "relays": [{"relay": "default", "live": true, "ready": true, "works": false, "answered": true,
//	 "leading": true, "breaker": "open", "reasons": ["the circuit breaker is open"],
//	 "outages": [{"what": "Kafka", "class": "unreachable", "since": "2026-11-27T12:03:00Z", "error": "dial tcp …"}]}],
//	 "consumers": [{"group": "sales", "live": true, "ready": true, "works": true, "answered": true, "partitions": 4,
//	 "reasons": []}],
//	 "workers": [{"group": "mails", "live": true, "ready": true, "works": true, "answered": true, "deliveries": 12,
//	 "reasons": []}]}
//
// A service stays ready while Kafka is away: it records events, and they wait. It is not ready before PostgreSQL has
// answered, while Kafka does not serve it, and while Kafka answers other processes of the relay or the group, but not
// this one. [Own] and [Strict] ask for more, [Health] shows what does not work.
func Ready(parts ...Part) http.Handler {
	return health(parts, func(s state) bool { return s.ready }, http.StatusServiceUnavailable)
}

// Health answers with the health of the parts as JSON, for people, dashboards and alerts. Its status is always 200. Its
// body is that of [Ready], but ok says whether all parts work.
func Health(parts ...Part) http.Handler {
	return health(parts, func(s state) bool { return s.live && s.works }, http.StatusOK)
}

type healthReport struct {
	OK        bool             `json:"ok"`
	Relays    []relayReport    `json:"relays"`
	Consumers []consumerReport `json:"consumers,omitempty"`
	Workers   []workerReport   `json:"workers,omitempty"`
}

type relayReport struct {
	Relay    string         `json:"relay"`
	Live     bool           `json:"live"`
	Ready    bool           `json:"ready"`
	Works    bool           `json:"works"`
	Answered bool           `json:"answered"`
	Leading  bool           `json:"leading"`
	Breaker  string         `json:"breaker"`
	Outages  []outageReport `json:"outages,omitempty"`
	Reasons  []string       `json:"reasons"`
}

type consumerReport struct {
	Group      string         `json:"group"`
	Live       bool           `json:"live"`
	Ready      bool           `json:"ready"`
	Works      bool           `json:"works"`
	Answered   bool           `json:"answered"`
	Partitions int            `json:"partitions"`
	Outages    []outageReport `json:"outages,omitempty"`
	Reasons    []string       `json:"reasons"`
}

type workerReport struct {
	Group      string         `json:"group"`
	Live       bool           `json:"live"`
	Ready      bool           `json:"ready"`
	Works      bool           `json:"works"`
	Answered   bool           `json:"answered"`
	Deliveries int            `json:"deliveries"`
	Outages    []outageReport `json:"outages,omitempty"`
	Reasons    []string       `json:"reasons"`
}

type outageReport struct {
	What  string    `json:"what"`
	Class string    `json:"class"`
	Since time.Time `json:"since"`
	Err   string    `json:"error"`
}

func outagesOf(outages []outbox.Outage) (all []outageReport) {
	for _, o := range outages {
		all = append(all, outageReport{o.What, o.Class, o.Since.UTC(), o.Err})
	}
	return all
}

func health(parts []Part, ok func(state) bool, otherwise int) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		report := healthReport{OK: true, Relays: []relayReport{}}
		for _, part := range parts {
			s := part.health()
			s.add(&report, s.ready)
			report.OK = ok(s) && report.OK
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		if !report.OK {
			w.WriteHeader(otherwise)
		}
		_ = json.NewEncoder(w).Encode(report) // the client has gone
	})
}
