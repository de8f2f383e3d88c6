package main

import (
	"strings"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/short"
)

// What the leader of a relay says of itself, for outbox_state, as in outboxotel.
const (
	saidWorks      = "works"
	saidNotWorking = "not_working"
	saidUnknown    = "unknown" // also of a breaker
)

// maxSaid is how much of a text a label repeats, in bytes.
const maxSaid = 300

// ageOutages notes how long outages that leaders report have lasted. Of very many, some are one other. The caller holds
// mu.
func (m *relayMetrics) ageOutages() {
	m.outageAge = map[labels]float64{}
	for _, r := range m.relays {
		if r.Said == nil {
			continue
		}
		for _, o := range r.Said.Outages {
			// Names in the log may end with a comma, because a sentence goes on behind them.
			l := labelsOf(relayLabel, r.Name, outageLabel, short.Line(strings.TrimRight(o.What, ","), maxSaid), errorLabel, short.Line(o.Class, maxSaid))
			if !m.outages.Use(l) {
				l = labelsOf(relayLabel, short.Other, outageLabel, short.Other, errorLabel, short.Other)
			}
			m.outageAge[l] = max(m.outageAge[l], m.clock.Since(o.Since).Seconds())
		}
	}
}

// writeSaid writes what leaders have said of themselves.
func (m *relayMetrics) writeSaid(x *exposition) {
	states, breakers := map[labels]float64{}, map[labels]float64{}
	for _, r := range m.relays {
		l := labelsOf(relayLabel, r.Name)
		state, breaker := saidUnknown, saidUnknown
		if r.Said != nil {
			state, breaker = saidNotWorking, r.Said.Breaker.String()
			if r.Said.Works {
				state = saidWorks
			}
		}
		for _, s := range []string{saidWorks, saidNotWorking, saidUnknown} {
			states[l.with(stateLabel, s)] = oneIf(s == state)
		}
		for _, s := range []string{outbox.BreakerClosed.String(), outbox.BreakerHalfOpen.String(), outbox.BreakerOpen.String(), saidUnknown} {
			breakers[l.with(stateLabel, s)] = oneIf(s == breaker)
		}
	}
	x.values("outbox_relay_state", typeGauge, "1 for what the leader says of itself: works, not_working, or unknown.", states)
	x.values("outbox_relay_breaker_state", typeGauge, "1 for the state of the leader's breaker, or for unknown.", breakers)
	x.values("outbox_outage_age_seconds", typeGauge, "How long an outage has lasted that a leader has reported.", m.outageAge)
}
