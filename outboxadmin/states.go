package outboxadmin

import (
	"fmt"
	"slices"
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
	s := outage.State{Works: r.Said.Works, Reasons: r.Said.Reasons, Outages: outagesOf(r.Said.Outages)}
	if r.Said.Breaker != outbox.BreakerClosed {
		s.Breakers = []outage.Breaker{{State: r.Said.Breaker.String(), Since: r.Said.BreakerSince}}
	}
	return &s
}

func outagesOf(all []outbox.Outage) []outage.Outage {
	return each(all, func(o outbox.Outage) outage.Outage { return outage.Outage(o) })
}

// ownState is what a relay of this process says of itself.
func ownState(h *outbox.RelayHealth) outage.State {
	s := outage.State{Works: h.Live && h.Works, Reasons: h.Reasons, Outages: outagesOf(h.Outages)}
	if h.Breaker != outbox.BreakerClosed {
		s.Breakers = []outage.Breaker{{State: h.Breaker.String()}}
	}
	return s
}

// ended reports whether a cutover has ended a relay, so that no process leads it.
func ended(r outbox.RelayStatus) bool {
	_, yes := tables.HandedOver(r.Holder)
	return yes
}

// leaders returns notices about relays, as their rows say: those without a leader, and what leaders have said.
func (s *situation) leaders() (all []notice) {
	for _, r := range s.relays {
		state := stateOf(r)
		switch {
		case r.Holder == "":
			all = append(all, notice{levelBad, fmt.Sprintf("Relay %s: no process leads%s. Nothing of it is sent until a process takes the lease.", r.Name, s.leaseEnded(r)), "", ""})
		case ended(r):
		case state == nil && r.Pending > 0:
			all = append(all, notice{levelWarn, fmt.Sprintf("Relay %s: unknown whether it works: %s leads, and has not said yet.", r.Name, r.Holder), "", ""})
		case state != nil:
			level := levelWarn
			if !state.Works {
				level = levelBad
			}
			for _, sentence := range state.Sentences(s.now) {
				all = append(all, notice{level, fmt.Sprintf("Relay %s: %s, said %s by %s.", r.Name, sentence, relative(s.now, r.Said.At), r.Holder), "", ""})
			}
		}
	}
	return all
}

func (s *situation) leaseEnded(r outbox.RelayStatus) string {
	if r.LeaseUntil.IsZero() {
		return ""
	}
	return ", its state is unknown" + outage.SinceText(r.LeaseUntil, s.now)
}

// relayState is what the page shows of the state of a relay.
type relayState struct {
	Word, Badge string
	Since       time.Time
	Kafka       string // what is said of Kafka next to the pending events; or empty
	Says        []string
}

func relayStateOf(r outbox.RelayStatus, now time.Time) relayState {
	state := stateOf(r)
	if state == nil {
		return relayState{Word: outage.StateUnknown, Badge: outbox.StatusDead}
	}
	s := relayState{Badge: badgeSent, Says: state.Sentences(now)}
	if s.Word, s.Since = state.Word(); s.Word != outage.StateWorks {
		s.Badge = outbox.StatusDead
	}
	s.Word = plain(s.Word)
	for _, o := range state.Outages {
		if o.What == "Kafka" {
			text, _, _ := strings.Cut(o.Text(now), " (")
			s.Kafka = text
		}
	}
	return s
}

const badgeSent = "sent" // green

// saysSo reports whether the row of the leader, which is this process, says that something is wrong.
func (s *situation) saysSo(h *outbox.RelayHealth) bool {
	return h.Leading && slices.ContainsFunc(s.relays, func(r outbox.RelayStatus) bool {
		state := stateOf(r)
		return r.Name == h.Relay && state != nil && len(state.Sentences(s.now)) > 0
	})
}

// groupsSay returns notices about groups, as the rows of their members say.
func (s *situation) groupsSay() (all []notice) {
	for _, g := range s.groups.Said() {
		for _, saying := range g.Says {
			level := levelBad
			if saying.Works {
				level = levelWarn
			}
			all = append(all, notice{level, fmt.Sprintf("Consumer group %s: %s, said %s by %s %s.", g.Group, saying.Text,
				relative(saying.Last.Now, saying.Last.RenewedAt), saying.Last.What(), saying.Last.Name), "consumers", "Show"})
		}
		if g.More > 0 {
			all = append(all, notice{levelBad, fmt.Sprintf("Consumer group %s: its members say %s.", g.Group, plural(int64(g.More), "more thing", "more things")), "consumers", "Show"})
		}
	}
	return all
}

// apiStateOf returns what the leader of a relay has said of itself. It is nil if that is not known.
func apiStateOf(r outbox.RelayStatus) *outage.RelayForm {
	state := stateOf(r)
	if state == nil {
		return nil
	}
	return outage.NewRelayForm(state, r.Said.At, r.Said.KafkaAt, r.Said.Breaker.String(), r.Said.BreakerSince)
}
