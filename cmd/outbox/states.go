package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/tables"
)

// stateOf is what the leader of a relay has said of itself. It is nil if that is not known.
func stateOf(r outbox.RelayStatus) *outage.State {
	if r.Said == nil {
		return nil
	}
	s := outage.State{Works: r.Said.Works, Reasons: r.Said.Reasons}
	for _, o := range r.Said.Outages {
		s.Outages = append(s.Outages, outage.Outage(o))
	}
	if r.Said.Breaker != outbox.BreakerClosed {
		s.Breakers = []outage.Breaker{{State: r.Said.Breaker.String(), Since: r.Said.BreakerSince}}
	}
	return &s
}

// relayWord is the state of a relay in a word, and since when if that is known.
func relayWord(r outbox.RelayStatus) (word string, since time.Time) {
	switch state := stateOf(r); {
	case state != nil:
		return state.Word()
	case r.Holder == "":
		return outage.StateUnknown, r.LeaseUntil
	}
	return outage.StateUnknown, time.Time{}
}

// groupWord is the state of a group in a word, with the number of members that it is about if it is not about all.
func groupWord(g tables.MembersSaid) string {
	if g.Affected < g.Live {
		return fmt.Sprintf("%s %d/%d", g.Word, g.Affected, g.Live)
	}
	return g.Word
}

// ended reports whether a cutover has ended a relay, so that no process leads it.
func ended(r outbox.RelayStatus) bool {
	_, yes := tables.HandedOver(r.Holder)
	return yes
}

// saidFindings returns what the leader of a relay has said that is wrong, or that it has said nothing.
func saidFindings(r outbox.RelayStatus, now time.Time, l limits) (all []finding) {
	state := stateOf(r)
	if state == nil {
		if r.Holder == "" || ended(r) || r.Pending == 0 {
			return nil
		}
		f := finding{"relay.unknown", severityNote, fmt.Sprintf("relay %s: events are pending, and it is unknown whether it works: %s leads, and has not said yet", r.Name, r.Holder),
			"A leader says what it sees about a second after it took the lease, and each time it renews it.", "Look again; then look at the log of the process."}
		if now.Sub(r.Oldest) > l.maxAge { // else it may have taken the lease just now
			f.Severity = severityWarning
		}
		return []finding{f}
	}
	severity := severityError
	if state.Works {
		severity = severityWarning
	}
	for _, sentence := range state.Sentences(now) {
		all = append(all, finding{"relay.outage", severity, fmt.Sprintf("relay %s: %s", r.Name, sentence),
			fmt.Sprintf("%s, which leads, said so %s ago. %s Events wait in the outbox and are not lost.", r.Holder, age(r.Said.At, now), kafkaText(r.Said.KafkaAt, now)),
			"Mend what it names; the log of the leader has the errors. It goes on by itself."})
	}
	return all
}

// saidText says when Kafka last answered leaders, as they have said.
func saidText(relays []outbox.RelayStatus, now time.Time) string {
	const named = 3
	var parts []string
	for _, r := range relays {
		if r.Said != nil && len(parts) < named {
			parts = append(parts, fmt.Sprintf("relay %s said %s ago: %s", r.Name, age(r.Said.At, now), strings.TrimSuffix(kafkaText(r.Said.KafkaAt, now), ".")))
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return " By the rows, " + strings.Join(parts, "; ") + "."
}

func kafkaText(at, now time.Time) string {
	if at.IsZero() {
		return "Kafka has not answered it since it began."
	}
	return fmt.Sprintf("Kafka last answered it %s ago.", age(at, now))
}

// saidFindings returns the outages and the open breakers of groups, as their live members have said.
func (s groupsState) saidFindings() (all []finding) {
	for _, g := range s.Said() {
		for _, saying := range g.Says {
			if !saying.Outage {
				continue // memberFindings has it
			}
			severity := severityError
			if saying.Works {
				severity = severityWarning
			}
			all = append(all, finding{"delivery.outage", severity, fmt.Sprintf("group %s: %s", g.Group, saying.Text),
				fmt.Sprintf("%s %s said so %s ago. Events wait meanwhile.", saying.Last.What(), saying.Last.Name, age(saying.Last.RenewedAt, saying.Last.Now)),
				"Mend what it names; the logs of the members have the errors. They go on by themselves."})
		}
	}
	return all
}

// relayStateOf returns what the leader of a relay has said of itself. It is nil if that is not known.
func relayStateOf(r outbox.RelayStatus) *outage.RelayForm {
	state := stateOf(r)
	if state == nil {
		return nil
	}
	return outage.NewRelayForm(state, r.Said.At, r.Said.KafkaAt, r.Said.Breaker.String(), r.Said.BreakerSince)
}
