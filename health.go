package outbox

import (
	"fmt"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/outage"
)

// RelayHealth is how a relay of this process is.
type RelayHealth struct {
	// Relay is its name.
	Relay string
	// Live is false when only a new start of the process may help: Run has returned an
	// error, or hangs.
	Live bool
	// Ready is false when this process does not do its part: see Reasons.
	Ready bool
	// Leading is set while this process holds the lease.
	Leading bool
	// Breaker is the state of the circuit breaker.
	Breaker BreakerState
	// Reasons say why it is not live or not ready.
	Reasons []string
}

// Health says how the relay is, without asking anybody. It is live, but not ready,
// before Run is called and after a clean stop; and while PostgreSQL or Kafka is away,
// because no new start brings them back. A standby is ready while it sees that
// somebody holds the lease.
//
// A leader whose cursor has not moved for longer than the lease lasts, although it has
// events to send, is not ready, whatever the cause. The package outboxhttp serves
// this to probes.
func (r *Relay) Health() RelayHealth { return r.vitals.health(r) }

// vitals are what the goroutine of Run leaves for others to see.
type vitals struct {
	mu       sync.Mutex
	running  bool
	ended    error     // of the last Run
	leading  bool      // by the lease
	turned   time.Time // a loop of Run went round
	saw      time.Time // a lease, our own or somebody else's
	advanced time.Time // the cursor moved, or there was nothing to send
	lengthy  string    // what takes as long as it takes; "" for nothing
}

// note changes what others see. It is a turn of the loop, too.
func (v *vitals) note(change func(v *vitals, now time.Time)) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.turned = time.Now()
	if change != nil {
		change(v, v.turned)
	}
}

func sawLease(v *vitals, now time.Time)    { v.saw = now }
func hasAdvanced(v *vitals, now time.Time) { v.advanced = now }

func (v *vitals) begin() {
	v.note(func(v *vitals, now time.Time) { v.running, v.ended, v.saw = true, nil, now })
}

func (v *vitals) end(err error) {
	v.note(func(v *vitals, _ time.Time) { v.running, v.ended, v.leading = false, err, false })
}

func (v *vitals) lead(leading bool) {
	v.note(func(v *vitals, now time.Time) { v.leading, v.saw, v.advanced = leading, now, now })
}

func (v *vitals) takesLong(what string) {
	v.note(func(v *vitals, _ time.Time) { v.lengthy = what })
}

func (v *vitals) health(r *Relay) RelayHealth {
	v.mu.Lock()
	defer v.mu.Unlock()
	h := RelayHealth{Relay: r.cfg.Name, Live: true, Ready: true, Leading: v.leading, Breaker: r.breaker.state()}
	ill := func(reason string, args ...any) {
		h.Ready, h.Reasons = false, append(h.Reasons, fmt.Sprintf(reason, args...))
	}
	since := func(t time.Time) time.Duration { return time.Since(t).Round(time.Second) }
	switch {
	case v.ended != nil:
		h.Live = false
		ill("Run has ended: %v", v.ended)
		return h
	case !v.running:
		ill("it does not run")
		return h
	case v.lengthy != "":
		ill("%s, since %v", v.lengthy, since(v.turned))
		return h
	case time.Since(v.turned) > r.hangsAfter():
		h.Live = false
		ill("Run has not gone on for %v", since(v.turned))
	}
	if !v.leading && time.Since(v.saw) > r.cfg.Lease+r.cfg.PollInterval {
		ill("nobody is seen to hold the lease, for %v", since(v.saw))
	}
	if v.leading && time.Since(v.advanced) > r.cfg.Lease+r.cfg.PollInterval {
		ill("nothing has moved for %v, although there are events to send", since(v.advanced))
	}
	if h.Breaker == BreakerOpen {
		ill("the circuit breaker is open")
	}
	for _, t := range []*outage.Log{r.postgresOutage, r.kafkaOutage} {
		if a := t.Current(); a != nil && !h.Ready {
			h.Reasons = append(h.Reasons, fmt.Sprintf("%s fails since %v: %v", t.What(), since(a.Since), a.Err))
		}
	}
	return h
}

// hangsAfter is how long a turn of a loop of Run may take: a send, a statement, and a
// wait.
func (r *Relay) hangsAfter() time.Duration {
	return r.cfg.SendTimeout + 2*r.cfg.Lease + r.cfg.PollInterval + r.cfg.Breaker.OpenFor
}
