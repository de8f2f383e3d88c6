package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/internal/tables"
)

// groupsState is what consumer groups still have to handle, and the processes that do so.
type groupsState struct {
	tables.GroupsState

	begun []tables.Begun // groups, also those without a process and without anything to handle
}

// lookAtGroups reads the state of the group, or of all groups for "".
func lookAtGroups(ctx context.Context, e *env, group string) (s groupsState, err error) {
	db, err := e.connect(ctx)
	if err != nil {
		return s, err
	}
	deliveries, err := e.deliveries(ctx)
	if err != nil {
		return s, err
	}
	waiting, err := deliveries.Waiting(ctx, group)
	if err != nil {
		return s, err
	}
	counts := make([]tables.EventCount, len(waiting))
	for i, c := range waiting {
		counts[i] = tables.EventCount(c)
	}
	reader := tables.NewGroupReader(db, e.schemaName())
	if s.GroupsState, err = reader.Look(ctx, group, counts); err != nil {
		return s, err
	}
	s.begun, err = reader.Begun(ctx, group)
	return s, err
}

// groupSum is what a group has to handle, by status.
type groupSum struct {
	group  string
	live   int // processes
	known  int // processes that have a row
	by     map[string]tally
	oldest time.Time // of what is not dead
}

// open returns how many events are not handled and not dead.
func (g groupSum) open() tally {
	return g.by[tables.StatusPending].Plus(g.by[outbox.StatusWaiting]).Plus(g.by[outbox.StatusFailed]).Plus(g.by[outbox.StatusParked])
}

// sums adds up by group, sorted by name.
func (s groupsState) sums() []groupSum {
	of := map[string]*groupSum{}
	get := func(group string) *groupSum {
		if of[group] == nil {
			of[group] = &groupSum{group: group, by: map[string]tally{}}
		}
		return of[group]
	}
	for _, b := range s.begun {
		get(b.Group)
	}
	for _, m := range s.Members {
		g := get(m.Group)
		g.known++
		if m.Live {
			g.live++
		}
	}
	for _, c := range s.Counts {
		g := get(c.Group)
		g.by[c.Status] = g.by[c.Status].Plus(short.TallyOf(c.Events, c.More))
		if c.Status != outbox.StatusDead && (g.oldest.IsZero() || c.Oldest.Before(g.oldest)) {
			g.oldest = c.Oldest
		}
	}
	sums := make([]groupSum, 0, len(of))
	for _, group := range slices.Sorted(maps.Keys(of)) {
		sums = append(sums, *of[group])
	}
	return sums
}

// findings returns the problems of the groups, except for dead deliveries.
func (s groupsState) findings(now time.Time, l limits, schema string) (all []finding) {
	all = append(all, s.leftBehind(schema)...)
	all = append(all, s.saidFindings()...)
	for _, m := range s.Members {
		all = append(all, s.memberFindings(m, l)...)
	}
	for _, g := range s.sums() {
		if open := g.open(); g.live == 0 && open.N > 0 {
			severity := severityError
			if now.Sub(g.oldest) <= l.maxAge { // a deployment may be under way
				severity = severityNote
			}
			all = append(all, finding{"delivery.members", severity,
				fmt.Sprintf("group %s: no process runs, and %s, the oldest for %s", g.group, open.Of("event waits", "events wait"), age(g.oldest, now)),
				"No process has renewed its row in event_member: none runs, or all are frozen or cut off from PostgreSQL. The events are not handled meanwhile.",
				"Start a process that calls Run of a consumer or worker with this group, or read its log."})
		} else if g.known == 0 && open.N == 0 && s.readsKafka(g.group) {
			all = append(all, finding{"delivery.members", severityNote, fmt.Sprintf("group %s: no process runs", g.group),
				"Its last process has ended cleanly, or more than a day ago. Whether records wait in Kafka is not known here: outbox consumers --kafka shows the lag.",
				"Start a process that calls Consumer.Run with this group. " + deleteGroup(schema, g.group)})
		}
	}
	for _, c := range s.Counts {
		switch c.Status {
		case outbox.StatusFailed:
			all = append(all, finding{"delivery.failed", severityWarning, "group " + c.Group + ": " + c.WaitText(now),
				"A handler has failed for them. They are tried again by themselves; the later events of their keys wait behind them.",
				"outbox failures list" + flagsOf(handlerOf{c.Group, c.Topic, c.Action}) + " --status failed shows why."})
		case tables.StatusMissed:
			all = append(all, s.gap(c, now, l, schema))
		}
	}
	return append(all, s.skipped()...)
}

// leftBehind reports groups that a cut to PostgreSQL has left behind.
func (s groupsState) leftBehind(schema string) (all []finding) {
	for _, g := range s.Left {
		all = append(all, finding{"relay.ended", severityWarning,
			fmt.Sprintf("group %s reads from Kafka, where no relay sends: relay %s has ended by a cut", g.Group, g.Relay),
			"It gets none of the events that are recorded.",
			"Start workers of the group, which begin as From says, or a relay. " + deleteGroup(schema, g.Group)})
	}
	return all
}

// readsKafka reports whether a group reads from Kafka, and a relay sends there: a cut has not left it behind.
func (s groupsState) readsKafka(group string) bool {
	return slices.Contains(s.begun, tables.Begun{Group: group, FromKafka: true}) &&
		!slices.ContainsFunc(s.Left, func(l tables.Left) bool { return l.Group == group })
}

// groupTables have rows of a group that stay when its processes are gone, besides those of its events.
var groupTables = []string{"consumer_start", "consumer_handler", "consumer_gap", "consumer_pause", "event_subscription", "event_member", "event_success"}

// deleteGroup says how to delete the rows of a group.
func deleteGroup(schema, group string) string {
	text := "If the group is given up, delete its rows:"
	for _, table := range groupTables {
		text += fmt.Sprintf(" DELETE FROM %s WHERE consumer_group = %s;", pgx.Identifier{schema, table}.Sanitize(), quoteText(group))
	}
	return text + fmt.Sprintf(" DELETE FROM %s WHERE relay = %s", pgx.Identifier{schema, "outbox_cursor"}.Sanitize(), quoteText(tables.WorkerPrefix+group))
}

// memberFindings reports what a process has said of itself besides outages and breakers, or that it has not renewed its
// row.
func (s groupsState) memberFindings(m tables.Member, l limits) (all []finding) {
	who := fmt.Sprintf("group %s: %s %s", m.Group, m.What(), m.Name)
	if !m.Live {
		f := finding{"delivery.member", severityWarning, fmt.Sprintf("%s has not renewed its row for %s", who, age(m.RenewedAt, m.Now)),
			"Its state is unknown since then: it is frozen, cut off from PostgreSQL, or gone. Other processes of its group take over what it had once its leases have ended.",
			"Look at the process. Its row is removed after a day."}
		if m.Now.Sub(m.RenewedAt) > l.maxAge && s.hasLive(m.Group, m.FromKafka) {
			f.Severity = severityNote
		}
		return []finding{f}
	}
	severity := severityWarning
	if !m.Works {
		severity = severityError
	}
	reasons := m.State.Other(m.Reasons)
	if !m.Works && len(m.Reasons)+len(m.State.Outages) == 0 {
		reasons = []string{"it does not work"}
	}
	for _, reason := range reasons {
		all = append(all, finding{"delivery.member", severity, fmt.Sprintf("%s: %s", who, reason),
			fmt.Sprintf("The process said so of itself %s ago.", age(m.RenewedAt, m.Now)), "Read the log of the process."})
	}
	return all
}

// hasLive reports whether a process of a group runs, of consumers or of workers.
func (s groupsState) hasLive(group string, fromKafka bool) bool {
	return slices.ContainsFunc(s.Members, func(m tables.Member) bool { return m.Live && m.Group == group && m.FromKafka == fromKafka })
}

// gap reports an action that lacks events. It is a note while a rollout may be under way.
func (s groupsState) gap(c tables.EventCount, now time.Time, l limits, schema string) finding {
	f := finding{"delivery.gap", severityWarning, fmt.Sprintf("group %s: action %s has lacked events of topic %s for %s", c.Group, c.Action, c.Topic, age(c.Oldest, now)),
		"Members without this action have read these events. The action gets them once a member that has it gets the partitions.",
		fmt.Sprintf("Finish the rollout: stop the members without the action. If it is gone for good: SELECT %s.outbox_forget_action(%s, %s, 'your name', 'why')",
			pgx.Identifier{schema}.Sanitize(), quoteText(c.Group), quoteText(c.Action))}
	if now.Sub(c.Oldest) <= l.maxAge {
		f.Severity = severityNote
	}
	return f
}

// skipped reports types without a handler, by group.
func (s groupsState) skipped() (all []finding) {
	const named = 5
	by := map[string]map[string]int64{}
	for _, m := range s.Members {
		for eventType, n := range m.Skipped {
			if m.Live {
				if by[m.Group] == nil {
					by[m.Group] = map[string]int64{}
				}
				by[m.Group][eventType] += n
			}
		}
	}
	for _, group := range slices.Sorted(maps.Keys(by)) {
		types := slices.SortedFunc(maps.Keys(by[group]), func(a, b string) int { return cmp.Or(cmp.Compare(by[group][b], by[group][a]), strings.Compare(a, b)) })
		var parts []string
		for _, t := range types[:min(len(types), named)] {
			parts = append(parts, fmt.Sprintf("%s of %s", count(by[group][t]), t))
		}
		if more := len(types) - named; more > 0 {
			parts = append(parts, plural(int64(more), "more type", "more types"))
		}
		all = append(all, finding{"delivery.skipped", severityNote, fmt.Sprintf("group %s: its processes have skipped events without a handler since they began: %s", group, strings.Join(parts, ", ")),
			"No handler of these processes takes the type. That is normal where groups share topics.",
			"If the group is to handle a type: deploy the handler. A type that the group had a handler for is delivery.gap or delivery.handler."})
	}
	return all
}

func groupTable(s groupsState, now time.Time) table {
	t := table{head: []string{"GROUP", "RUN", "STATE", "SINCE", "PENDING", "WAIT", "FAIL", "PARK", "MISSED", "DEAD", "OLDEST"}, flex: []int{0}}
	said := map[string]tables.MembersSaid{}
	for _, g := range s.Said() {
		said[g.Group] = g
	}
	for _, g := range s.sums() {
		word, since := "-", "-"
		if of, ok := said[g.group]; ok {
			word, since = groupWord(of), age(of.Since, now)
		}
		t.add(g.group, count(g.live), word, since, g.by[tables.StatusPending].String(), g.by[outbox.StatusWaiting].String(), g.by[outbox.StatusFailed].String(),
			g.by[outbox.StatusParked].String(), g.by[tables.StatusMissed].String(), g.by[outbox.StatusDead].String(), age(g.oldest, now))
	}
	return t
}

// memberJSON is a process of a group in the output.
type memberJSON struct {
	Member    string           `json:"member"`
	As        string           `json:"as"`
	StartedAt time.Time        `json:"started_at"`
	RenewedAt time.Time        `json:"renewed_at"`
	Live      bool             `json:"live"`
	Works     *bool            `json:"works"` // null: not known, because it has not renewed its row
	Reasons   []string         `json:"reasons"`
	Types     []string         `json:"types"`
	Actions   []string         `json:"actions"`
	Skipped   map[string]int64 `json:"skipped"`
	// Null: not known, as Works.
	Breakers *[]outage.BreakerForm `json:"breakers"`
	Outages  *[]outage.Form        `json:"outages"`
	KafkaAt  *time.Time            `json:"kafka_at"`
}

func memberOf(m tables.Member) memberJSON {
	types, actions := m.Handles()
	j := memberJSON{Member: m.Name, As: m.What(), StartedAt: m.StartedAt.UTC(), RenewedAt: m.RenewedAt.UTC(), Live: m.Live, Reasons: append([]string{}, m.Reasons...),
		Types: append([]string{}, types...), Actions: append([]string{}, actions...), Skipped: m.Skipped, KafkaAt: optional(m.KafkaAt)}
	if m.Live {
		breakers, outages := outage.BreakerForms(m.State.Breakers), outage.Forms(m.State.Outages)
		j.Works, j.Breakers, j.Outages = &m.Works, &breakers, &outages
	}
	return j
}

// waitingJSON is a number of events that a group still has to handle.
type waitingJSON struct {
	Action string    `json:"action"`
	Topic  string    `json:"topic"`
	Status string    `json:"status"`
	Events int       `json:"events"`
	More   bool      `json:"more"`
	Oldest time.Time `json:"oldest"`
}

// groupStateJSON is a group in the output.
type groupStateJSON struct {
	Group   string        `json:"group"`
	Members []memberJSON  `json:"members"`
	Waiting []waitingJSON `json:"waiting"`
}

func groupStatesOf(s groupsState) []groupStateJSON {
	all := []groupStateJSON{}
	for _, g := range s.sums() {
		one := groupStateJSON{Group: g.group, Members: []memberJSON{}, Waiting: []waitingJSON{}}
		for _, m := range s.Members {
			if m.Group == g.group {
				one.Members = append(one.Members, memberOf(m))
			}
		}
		for _, c := range s.Counts {
			if c.Group == g.group {
				one.Waiting = append(one.Waiting, waitingJSON{c.Action, c.Topic, c.Status, c.Events, c.More, c.Oldest.UTC()})
			}
		}
		all = append(all, one)
	}
	return all
}

// memberTable shows the processes of groups.
func memberTable(s groupsState) table {
	t := table{head: []string{"GROUP", "PROCESS", "AS", "RENEWED", "STATE", "TYPES", "SAYS"}, flex: []int{0, 1, 6}}
	for _, m := range s.Members {
		types, _ := m.Handles()
		state, says := outage.StateUnknown, ""
		if m.Live {
			state, _ = m.Said().Word()
			says = strings.Join(m.Said().Sentences(m.Now), "; ")
		}
		t.add(m.Group, m.Name, m.What(), age(m.RenewedAt, m.Now)+" ago", state, count(len(types)), says)
	}
	return t
}
