package outboxadmin

import (
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/outboxops"
)

// notice is something that an operator should know.
type notice struct {
	Level  string // bad or warn
	Text   string
	Link   string // to the page where the operator can act, from the root; or empty
	Action string // the words of the link
}

const (
	levelBad  = "bad"
	levelWarn = "warn"
)

// situation is the data from which notices are made.
type situation struct {
	now        time.Time
	staleAfter time.Duration

	relays    []outbox.RelayStatus
	health    map[string]*outbox.RelayHealth // of this process
	consumers []outbox.ConsumerHealth        // of this process
	workers   []outbox.WorkerHealth          // of this process
	counts    []outboxops.FailureCount
	stale     []outbox.EventCount
	delayed   outboxops.DelayedStatus
	groups    groupsView
	open      []outboxops.OpenTransaction
}

// notices returns the problems; those that need an operator come first.
func (s *situation) notices() []notice {
	var all []notice
	for _, part := range []func() []notice{s.leaders, s.processes, s.groupsSay, s.members, s.missed, s.dead, s.waiting, s.late, s.held, s.paused, s.retried, s.transactions} {
		all = append(all, part()...)
	}
	slices.SortStableFunc(all, func(a, b notice) int { return strings.Compare(a.Level, b.Level) })
	return all
}

// failedLink leads to failures, from the root.
func failedLink(f outboxops.FailureFilter) string { return "failed?" + failedValues(f).Encode() }

// processes returns notices about the relays, consumers and workers of this process, unless their rows say that
// something is wrong: notices are about these then.
func (s *situation) processes() (all []notice) {
	add := func(what string, state outage.State) {
		level := map[bool]string{true: levelWarn, false: levelBad}[state.Works && len(state.Outages)+len(state.Breakers) == 0]
		for _, sentence := range state.Sentences(s.now) {
			all = append(all, notice{level, fmt.Sprintf("%s, in this process: %s.", what, sentence), "", ""})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.health)) {
		if h := s.health[name]; !s.saysSo(h) {
			add("Relay "+name, ownState(h))
		}
	}
	for _, h := range s.consumers {
		if !s.ownRowSaysSo("consumer", h.Group) {
			add("Consumer group "+h.Group, outage.State{Works: h.Live && h.Works, Reasons: s.ownReasons(h.Reasons, h.Waiting), Outages: outagesOf(h.Outages)})
		}
	}
	for _, h := range s.workers {
		if !s.ownRowSaysSo("worker", h.Group) {
			add("Workers of group "+h.Group, outage.State{Works: h.Live && h.Works, Reasons: s.ownReasons(h.Reasons, h.Waiting), Outages: outagesOf(h.Outages)})
		}
	}
	return all
}

// ownReasons leaves out the reasons that are about what a group has to handle, which other notices are about.
func (s *situation) ownReasons(reasons []string, waiting []outbox.EventCount) []string {
	counts := make([]tables.EventCount, len(waiting))
	for i, c := range waiting {
		counts[i] = tables.EventCount(c)
	}
	about := tables.WaitReasons(counts, s.now)
	return slices.DeleteFunc(slices.Clone(reasons), func(r string) bool { return slices.Contains(about, r) })
}

// dead reports dead events and deliveries that wait for a decision.
func (s *situation) dead() (all []notice) {
	for _, r := range s.relays {
		if r.Dead > 0 {
			all = append(all, notice{levelBad, fmt.Sprintf("Relay %s: %s, refused by Kafka too often.", r.Name, upTo(r.Dead).Of("event is dead", "events are dead")),
				failedLink(outboxops.FailureFilter{Kind: outboxops.KindEvent, Relay: r.Name, Statuses: []string{outbox.StatusDead}}), "Show"})
		}
	}
	for _, g := range sumByGroup(s.counts, outbox.StatusDead) {
		all = append(all, notice{levelBad, fmt.Sprintf("Consumer group %s: %s, no attempts left%s.", g.group, g.Of("delivery is dead", "deliveries are dead"),
			s.groups.kinds(g.group, outbox.StatusDead)),
			failedLink(outboxops.FailureFilter{Kind: outboxops.KindDelivery, Group: g.group, Statuses: []string{outbox.StatusDead}}), "Show"})
	}
	return all
}

// groupSum is the number of deliveries of a group.
type groupSum struct {
	tally

	group string
}

// sumByGroup adds up the deliveries with a status, by group.
func sumByGroup(counts []outboxops.FailureCount, status string) (sums []groupSum) {
	for _, c := range counts {
		if c.Kind != outboxops.KindDelivery || c.Status != status {
			continue
		}
		i := slices.IndexFunc(sums, func(g groupSum) bool { return g.group == c.Group })
		if i < 0 {
			i, sums = len(sums), append(sums, groupSum{group: c.Group})
		}
		sums[i].tally = sums[i].Plus(tallyOf(c.Events, c.More))
	}
	slices.SortFunc(sums, func(a, b groupSum) int { return strings.Compare(a.group, b.group) })
	return sums
}

// waiting reports events and deliveries that wait for too long.
func (s *situation) waiting() (all []notice) {
	for _, w := range staleSums(s.stale) {
		f := outboxops.FailureFilter{Relay: w.relay, Group: w.group, Statuses: []string{outbox.StatusWaiting, outbox.StatusFailed, outbox.StatusParked}}
		n := notice{levelBad, w.text(s.now, s.staleAfter), failedLink(f), "Show"}
		if w.onlyPending() {
			n.Link, n.Action = "", ""
		}
		if w.onlyPending() && w.group != "" {
			n.Link, n.Action = "consumers", "Show"
		}
		all = append(all, n)
	}
	return all
}

// staleSum counts the events of a relay or a consumer group that wait for too long.
type staleSum struct {
	relay, group string
	events       tally
	oldest       time.Time
	statuses     map[string]tally
}

// staleSums adds up the events that wait for too long, by relay and group.
func staleSums(counts []outbox.EventCount) (sums []staleSum) {
	for _, c := range counts {
		i := slices.IndexFunc(sums, func(s staleSum) bool { return s.relay == c.Relay && s.group == c.Group })
		if i < 0 {
			i, sums = len(sums), append(sums, staleSum{relay: c.Relay, group: c.Group, oldest: c.Oldest, statuses: map[string]tally{}})
		}
		s, n := &sums[i], tallyOf(c.Events, c.More)
		s.events, s.statuses[c.Status] = s.events.Plus(n), s.statuses[c.Status].Plus(n)
		if c.Oldest.Before(s.oldest) {
			s.oldest = c.Oldest
		}
	}
	slices.SortFunc(sums, func(a, b staleSum) int { return strings.Compare(a.relay+" "+a.group, b.relay+" "+b.group) })
	return sums
}

func (w staleSum) onlyPending() bool { return w.statuses[statePending].N == w.events.N }

// text is a sentence.
func (w staleSum) text(now time.Time, after time.Duration) string {
	whose := "Relay " + w.relay
	if w.group != "" {
		whose = "Consumer group " + w.group
	}
	var parts []string
	for _, status := range []string{statePending, outbox.StatusWaiting, outbox.StatusFailed, outbox.StatusParked} {
		if n := w.statuses[status]; n.N > 0 {
			parts = append(parts, n.String()+" "+status)
		}
	}
	return fmt.Sprintf("%s: %s for longer than %s, the oldest for %s: %s.", whose, w.events.Of("event has waited", "events have waited"), short(after),
		short(now.Sub(w.oldest)), strings.Join(parts, ", "))
}

func (s *situation) held() (all []notice) {
	for _, r := range s.relays {
		if r.HeldKeys > 0 {
			all = append(all, notice{levelWarn, fmt.Sprintf("Relay %s: %s for an operator.", r.Name, upTo(r.HeldKeys).Of("key waits", "keys wait")),
				"failed?" + url.Values{"relay": {r.Name}, "status": {statusAny}}.Encode(), "Show"})
		}
	}
	for _, g := range s.groups.all() {
		if g.Held.N > 0 {
			all = append(all, notice{levelWarn, fmt.Sprintf("Consumer group %s: %s for an operator.", g.Group, g.Held.Of("key waits", "keys wait")),
				failedLink(outboxops.FailureFilter{Kind: outboxops.KindDelivery, Group: g.Group, Statuses: []string{outbox.StatusDead}}), "Show"})
		}
	}
	return all
}

func (s *situation) paused() (all []notice) {
	for _, g := range groupRows(s.groups.groups) {
		if g.Pause != nil {
			all = append(all, notice{levelWarn, fmt.Sprintf("Consumer group %s: %s paused by %s %s: %s", g.Group, g.What(), g.Pause.Operator, relative(s.now, g.Pause.At), g.Pause.Reason),
				"consumers", "Show"})
		}
	}
	return all
}

// retried reports events and deliveries that are unresolved, and need no operator yet.
func (s *situation) retried() (all []notice) {
	for _, r := range s.relays {
		if n := min(r.Failed+r.Waiting, outbox.MaxCounted); n > 0 {
			all = append(all, notice{levelWarn, fmt.Sprintf("Relay %s: %s.", r.Name, upTo(n).Of("event will be retried", "events will be retried")),
				failedLink(outboxops.FailureFilter{Kind: outboxops.KindEvent, Relay: r.Name, Statuses: []string{outbox.StatusFailed, outbox.StatusWaiting}}), "Show"})
		} else if r.Parked > 0 && r.Dead == 0 && r.HeldKeys == 0 {
			all = append(all, notice{levelWarn, fmt.Sprintf("Relay %s: %s behind others of their keys.", r.Name, upTo(r.Parked).Of("event waits", "events wait")),
				failedLink(outboxops.FailureFilter{Kind: outboxops.KindEvent, Relay: r.Name, Statuses: []string{outbox.StatusParked}}), "Show"})
		}
	}
	for _, g := range sumByGroup(s.counts, outbox.StatusFailed) {
		all = append(all, notice{levelWarn, fmt.Sprintf("Consumer group %s: %s%s.", g.group, g.Of("delivery will be retried", "deliveries will be retried"),
			s.groups.kinds(g.group, outbox.StatusFailed)),
			failedLink(outboxops.FailureFilter{Kind: outboxops.KindDelivery, Group: g.group, Statuses: []string{outbox.StatusFailed}}), "Show"})
	}
	return all
}

// longOpen is how long a transaction is open before there is a notice, as in outbox status.
const longOpen = time.Minute

func (s *situation) transactions() (all []notice) {
	for _, t := range s.open {
		if s.now.Sub(t.Since) < longOpen {
			continue
		}
		text := fmt.Sprintf("Process %d (%s) has had a transaction open for %s.", t.PID, strings.TrimSpace(t.User+" "+t.Application), short(s.now.Sub(t.Since)))
		if t.Prepared != "" {
			text = fmt.Sprintf("Transaction %s (%s) has been prepared for %s.", t.Prepared, t.User, short(s.now.Sub(t.Since)))
		}
		all = append(all, notice{levelWarn, text, "#open", "Show"})
	}
	return all
}
