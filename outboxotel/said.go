package outboxotel

import (
	"context"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/internal/tables"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
)

// What a process says of itself, for outbox.state.
const (
	stateWorks      = "works"
	stateNotWorking = "not_working"
	stateUnknown    = "unknown" // also of a breaker
)

func stateOf(known, works bool) string {
	switch {
	case !known:
		return stateUnknown
	case works:
		return stateWorks
	}
	return stateNotWorking
}

// observeSaid reports what the leader of a relay says of itself.
func (t *Telemetry) observeSaid(o metric.Observer, r outbox.RelayStatus, name attribute.KeyValue) {
	is := func(gauge metric.Int64ObservableGauge, now string, all ...string) {
		for _, s := range all {
			o.ObserveInt64(gauge, oneIf(s == now), t.set(name, stateKey.String(s)))
		}
	}
	breaker := stateUnknown
	if r.Said != nil {
		breaker = r.Said.Breaker.String()
	}
	is(t.state, stateOf(r.Said != nil, r.Said != nil && r.Said.Works), stateWorks, stateNotWorking, stateUnknown)
	is(t.breaker, breaker, outbox.BreakerClosed.String(), outbox.BreakerHalfOpen.String(), outbox.BreakerOpen.String(), stateUnknown)
}

// outageKind is an outage of a relay or a group, as its series names it.
type outageKind struct {
	owner       staleOwner
	what, class string
}

// outagesOf says since when outages last, by their kind. Of the same kind the longest counts.
type outagesOf struct {
	seen  *short.Labels[outageKind]
	since map[outageKind]time.Time
}

func (a outagesOf) add(owner staleOwner, outages []outbox.Outage) {
	for _, one := range outages {
		// Names in the log may end with a comma, because a sentence goes on behind them.
		k := outageKind{owner, short.Line(strings.TrimRight(one.What, ","), maxText), short.Line(one.Class, maxText)}
		if !a.seen.Use(k) {
			k = outageKind{owner.other(), short.Other, short.Other}
		}
		if since, known := a.since[k]; !known || one.Since.Before(since) {
			a.since[k] = one.Since
		}
	}
}

func (t *Telemetry) observeOutages(o metric.Observer, since map[outageKind]time.Time, clock pg.Clock) {
	for k, at := range since {
		o.ObserveFloat64(t.outageAge, clock.Since(at).Seconds(), t.set(k.owner.attribute(), outageKey.String(k.what), semconv.ErrorTypeKey.String(k.class)))
	}
}

// membersSaid reads what the processes of groups say of themselves.
type membersSaid struct {
	reader  tables.GroupReader
	outages *short.Labels[outageKind]
	groups  *short.Labels[string]
	actions *short.Labels[groupAction] // with a breaker that is or was not closed
}

type groupAction struct{ group, action string }

func newMembersSaid(reader tables.GroupReader) membersSaid {
	return membersSaid{reader, newSeen[outageKind](), newSeen[string](), newSeen[groupAction]()}
}

// saidOfGroups counts members by group and state, and breakers that are not closed by group, action and state.
type saidOfGroups struct {
	members  map[string]map[string]int64
	breakers map[groupAction]map[string]int64
	outages  outagesOf
}

func (w membersSaid) look(ctx context.Context) (saidOfGroups, error) {
	members, err := w.reader.Members(ctx, "")
	if err != nil {
		return saidOfGroups{}, err
	}
	return w.count(members), nil
}

// count counts members. Of very many groups or actions, some are one other. Breakers and outages of members that have
// not renewed their row in time are unknown.
func (w membersSaid) count(members []tables.Member) saidOfGroups {
	said := saidOfGroups{map[string]map[string]int64{}, map[groupAction]map[string]int64{}, outagesOf{w.outages, map[outageKind]time.Time{}}}
	for _, group := range w.groups.Lately() {
		said.members[group] = map[string]int64{}
	}
	for _, of := range w.actions.Lately() {
		said.breakers[of] = map[string]int64{}
	}
	for _, m := range members {
		group := m.Group
		if !w.groups.Use(group) {
			group = short.Other
		}
		add(said.members, group, stateOf(m.Live, m.Works))
		if !m.Live {
			continue
		}
		for _, b := range m.State.Breakers {
			of := groupAction{m.Group, short.Line(b.Action, maxText)}
			if !w.actions.Use(of) {
				of = groupAction{short.Other, short.Other}
			}
			state := outbox.BreakerOpen.String()
			if b.State == outbox.BreakerHalfOpen.String() {
				state = b.State
			}
			add(said.breakers, of, state)
		}
		said.outages.add(staleOwner{group: m.Group}, outagesOfMember(m.State.Outages))
	}
	return said
}

func add[K comparable](counts map[K]map[string]int64, of K, state string) {
	if counts[of] == nil {
		counts[of] = map[string]int64{}
	}
	counts[of][state]++
}

func outagesOfMember(all []outage.Outage) []outbox.Outage {
	outages := make([]outbox.Outage, len(all))
	for i, o := range all {
		outages[i] = outbox.Outage(o)
	}
	return outages
}

func (t *Telemetry) observeMembers(o metric.Observer, said saidOfGroups, clock pg.Clock) {
	for group, counts := range said.members {
		for _, state := range []string{stateWorks, stateNotWorking, stateUnknown} {
			o.ObserveInt64(t.members, counts[state], t.set(semconv.MessagingConsumerGroupName(group), stateKey.String(state)))
		}
	}
	for of, counts := range said.breakers {
		for _, state := range []string{outbox.BreakerHalfOpen.String(), outbox.BreakerOpen.String()} {
			o.ObserveInt64(t.groupBreakers, counts[state], t.set(semconv.MessagingConsumerGroupName(of.group), actionKey.String(of.action), stateKey.String(state)))
		}
	}
	t.observeOutages(o, said.outages.since, clock)
}
