package main

import (
	"context"
	"fmt"
	"slices"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
)

// cutHolder is who has the lease of a relay that waits for a cut, or has ended by one.
const cutHolder = "outbox cut"

// cutState is the state on which a cut depends.
type cutState struct {
	names     []string // groups to be moved
	relay     string
	behind    []string                          // groups that may get nothing more
	groups    map[string]outboxops.Subscription // all
	relays    []outbox.RelayStatus
	consumers []string // groups that read from Kafka
}

func (e *env) cutState(ctx context.Context, names []string, relay string) (cutState, error) {
	slices.Sort(names)
	s := cutState{names: slices.Compact(names), relay: relay, groups: map[string]outboxops.Subscription{}}
	cuts, err := e.cuts(ctx)
	if err != nil {
		return s, err
	}
	all, err := cuts.List(ctx)
	if err != nil {
		return s, err
	}
	for _, g := range all {
		s.groups[g.Group] = g
	}
	inspector, err := e.inspector(ctx)
	if err != nil {
		return s, err
	}
	if s.relays, err = inspector.Relays(ctx); err != nil {
		return s, err
	}
	consumers, err := e.consumers(ctx)
	if err != nil {
		return s, err
	}
	reading, _, err := consumers.List(ctx, outboxops.ConsumerFilter{})
	for _, g := range reading {
		s.consumers = append(s.consumers, g.Group)
	}
	return s, err
}

// chosen returns the groups to be moved that are known.
func (s cutState) chosen() (known []outboxops.Subscription) {
	for _, name := range s.names {
		if g, ok := s.groups[name]; ok {
			known = append(known, g)
		}
	}
	return known
}

// others returns the names of known groups that are not moved, sorted.
func (s cutState) others(where func(outboxops.Subscription) bool) (names []string) {
	for name, g := range s.groups {
		if !slices.Contains(s.names, name) && where(g) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// position returns the relay if it has a position.
func (s cutState) position(name string) (outbox.RelayStatus, bool) {
	for _, r := range s.relays {
		if r.Name == name && !r.MovedAt.IsZero() {
			return r, true
		}
	}
	return outbox.RelayStatus{}, false
}

// anotherRelay returns the name of another relay that runs, which sends all events, or "".
func (s cutState) anotherRelay() string {
	for _, r := range s.relays {
		if r.Name != s.relay && !r.MovedAt.IsZero() && r.Holder != "" && r.Holder != cutHolder {
			return r.Name
		}
	}
	return ""
}

// cutPlan is the effect of a cut.
type cutPlan struct {
	Steps    []string
	NotReady []string // it would be refused
	Notes    []string // to be known before
}

func (p *cutPlan) notReady(format string, args ...any) {
	p.NotReady = append(p.NotReady, fmt.Sprintf(format, args...))
}

func (p *cutPlan) note(format string, args ...any) {
	p.Notes = append(p.Notes, fmt.Sprintf(format, args...))
}

// say prints the notes.
func (p *cutPlan) say(e *env) {
	for _, line := range p.Notes {
		e.say("note: " + visible(line))
	}
}

func planToKafka(s cutState) cutPlan {
	p := cutPlan{NotReady: []string{}, Notes: []string{}, Steps: []string{
		"the workers handle what was committed before this moment, and take nothing more",
		fmt.Sprintf("relay %s waits for them, and then sends what comes after", s.relay),
		"the consumers handle what it sends"}}
	for _, name := range s.names {
		switch g, ok := s.groups[name]; {
		case !ok:
			p.notReady("no worker has run for group %s", name)
		case g.State != outboxops.SubscriptionActive:
			p.notReady("group %s is %s already, at relay %s", name, g.State, g.Relay)
		case g.Dead > 0:
			p.note("group %s has %s: if they are requeued, only workers handle them", name, upTo(g.Dead).Of("dead delivery", "dead deliveries"))
		}
		if g := s.groups[name]; g.Group != "" && !g.HasConsumer {
			p.note("consumers of group %s have not begun to read each of its topics: the cut is not finished before", name)
		}
	}
	for _, r := range s.relays {
		switch {
		case r.Name == s.relay && (!r.MovedAt.IsZero() || r.Holder != "" && r.Holder != cutHolder):
			p.notReady("relay %s has begun already: it takes another name", r.Name)
		case !r.MovedAt.IsZero() && r.Name != s.relay:
			p.note("relay %s sends all events, too: consumers get each twice, and handle it once", r.Name)
		}
	}
	if len(s.others(func(g outboxops.Subscription) bool {
		return g.Relay == s.relay && g.State == outboxops.SubscriptionReturning
	})) > 0 {
		p.notReady("a cut at relay %s is not finished", s.relay)
	}
	for _, name := range s.others(func(g outboxops.Subscription) bool { return g.State == outboxops.SubscriptionActive }) {
		p.note("group %s goes on to get its events from its workers, and cannot follow alone", name)
	}
	return p
}

func planToPostgres(s cutState) cutPlan {
	p := cutPlan{NotReady: []string{}, Notes: []string{}, Steps: []string{
		fmt.Sprintf("relay %s ends: it sends nothing more", s.relay),
		"the consumers handle what it has sent",
		"the workers wait for them, and then handle what it has not sent"}}
	for _, name := range s.names {
		switch g, ok := s.groups[name]; {
		case !ok:
			p.note("no worker has run for group %s: start none before the cut, it would take events by itself", name)
		case g.State != outboxops.SubscriptionLeft:
			p.notReady("group %s does not get its events from Kafka, it is %s", name, g.State)
		case g.Relay != s.relay:
			p.notReady("group %s gets its events from relay %s", name, g.Relay)
		}
	}
	for _, name := range s.others(func(g outboxops.Subscription) bool { return g.Relay == s.relay }) {
		p.notReady("group %s gets its events from relay %s, too, and would get none any more", name, s.relay)
	}
	for _, name := range s.consumers {
		g, known := s.groups[name]
		if known && g.State != outboxops.SubscriptionStarting || slices.Contains(s.names, name) {
			continue
		}
		switch another := s.anotherRelay(); {
		case another != "":
			p.note("group %s reads from Kafka, too: it goes on with what relay %s sends", name, another)
		case slices.Contains(s.behind, name):
			p.note("group %s reads from Kafka, too, and gets nothing more from here", name)
		default:
			p.notReady("group %s reads from Kafka, too, and would get nothing more: move it too, or name it with --leave-behind", name)
		}
	}
	p.note("groups that keep their state in other databases are not known here, and get nothing more from relay %s", s.relay)
	r, ok := s.position(s.relay)
	switch {
	case !ok:
		p.notReady("there is no relay %s that sends", s.relay)
	case r.Holder == cutHolder:
		p.notReady("a cut at relay %s is not finished", s.relay)
	case r.Holder != "":
		p.note("relay %s runs (%s): what it has in its hands, handlers without a transaction get twice, unless it is stopped before", s.relay, r.Holder)
	}
	if n := upTo(r.Waiting).Plus(upTo(r.Failed)).Plus(upTo(r.Parked)); n.N > 0 {
		p.notReady("relay %s has %s that it still has to send: outbox failures list --kind event", s.relay, n.Of("failed event", "failed events"))
	}
	if r.Dead > 0 {
		p.note("relay %s has %s: nobody gets them unless they are retried before: outbox failures list --kind event", s.relay, upTo(r.Dead).Of("dead event", "dead events"))
	}
	return p
}
