package outboxadmin

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/tables"
)

// membersView is what consumer groups have to handle, and the processes that do so.
type membersView struct{ tables.GroupsState }

func (a *admin) membersView(ctx context.Context) (v membersView, err error) {
	counts, err := a.deliveries.Waiting(ctx, "")
	if err != nil {
		return v, err
	}
	v.GroupsState, err = a.groups.Look(ctx, "", each(counts, func(c outbox.EventCount) tables.EventCount { return tables.EventCount(c) }))
	return v, err
}

// kinds names the actions and topics of a group that have events with a status, with their numbers.
func (v membersView) kinds(group, status string) string {
	const named = 5
	var kinds []string
	for _, c := range v.Counts {
		if c.Group == group && c.Status == status {
			kinds = append(kinds, fmt.Sprintf("%s of action %s, topic %s", tallyOf(c.Events, c.More), orNone(c.Action), c.Topic))
		}
	}
	if more := len(kinds) - named; more > 0 {
		kinds = append(kinds[:named:named], plural(int64(more), "more kind", "more kinds"))
	}
	if len(kinds) == 0 {
		return ""
	}
	return ": " + strings.Join(kinds, "; ")
}

func orNone(action string) string {
	if action == "" {
		return "(none)"
	}
	return action
}

// hasLive reports whether a process of a group runs.
func (v membersView) hasLive(group string) bool {
	return slices.ContainsFunc(v.Members, func(m tables.Member) bool { return m.Live && m.Group == group })
}

// isOwn reports whether a row is that of this process.
func isOwn(m tables.Member) bool {
	host, err := os.Hostname()
	return err == nil && strings.HasPrefix(m.Name, fmt.Sprintf("%.150s/%d/", host, os.Getpid()))
}

// ownRowSaysSo reports whether a row of this process says that something is wrong with a group.
func (s *situation) ownRowSaysSo(what, group string) bool {
	return slices.ContainsFunc(s.groups.Members, func(m tables.Member) bool {
		return m.Live && m.Group == group && m.What() == what && isOwn(m) && len(m.Said().Sentences(s.now)) > 0
	})
}

// members returns notices about processes of groups that have not renewed their rows, and about groups without any.
func (s *situation) members() (all []notice) {
	v := s.groups.membersView
	for _, m := range v.Members {
		if !m.Live && (m.Now.Sub(m.RenewedAt) <= s.staleAfter || !v.hasLive(m.Group)) {
			all = append(all, notice{levelBad, fmt.Sprintf("Consumer group %s, %s %s: unknown whether it works. It has not renewed its row for %s. It is frozen, cut off from PostgreSQL, or gone.",
				m.Group, m.What(), m.Name, short(m.Now.Sub(m.RenewedAt))), "consumers", "Show"})
		}
	}
	return append(all, s.withoutMembers()...)
}

// withoutMembers returns notices about groups that have events to handle and no process.
func (s *situation) withoutMembers() (all []notice) {
	v := s.groups.membersView
	for _, g := range s.groups.all() {
		if n := g.Waiting(); n.N > 0 && !v.hasLive(g.Group) {
			level := levelBad
			if s.now.Sub(g.Oldest) <= s.staleAfter { // a deployment may be under way
				level = levelWarn
			}
			all = append(all, notice{level, fmt.Sprintf("Consumer group %s: no process runs, and %s.", g.Group, n.Of("event waits", "events wait")), "consumers", "Show"})
		}
	}
	return all
}

// missed returns notices about actions that lack events, and about groups that a cut has left behind.
func (s *situation) missed() (all []notice) {
	for _, c := range s.groups.Counts {
		if c.Status == tables.StatusMissed {
			all = append(all, notice{levelWarn, fmt.Sprintf("Consumer group %s: action %s has lacked events of topic %s for %s, because members without it have read them.",
				c.Group, c.Action, c.Topic, short(s.now.Sub(c.Oldest))), "consumers", "Show"})
		}
	}
	for _, l := range s.groups.Left {
		all = append(all, notice{levelBad, fmt.Sprintf("Consumer group %s reads from Kafka, where no relay sends: relay %s has ended by a cut.", l.Group, l.Relay), "consumers", "Show"})
	}
	return all
}

// memberRow is a process of a group on the page.
type memberRow struct {
	tables.Member

	Types int
	Says  []string
}

func memberRows(members []tables.Member) (rows []memberRow) {
	for _, m := range members {
		types, _ := m.Handles()
		rows = append(rows, memberRow{m, len(types), m.Said().Sentences(m.Now)})
	}
	return rows
}

type apiMember struct {
	Group     string           `json:"group"`
	Member    string           `json:"member"`
	Kind      string           `json:"kind"`
	StartedAt time.Time        `json:"started_at"`
	RenewedAt time.Time        `json:"renewed_at"`
	Live      bool             `json:"live"`
	Works     *bool            `json:"works"`
	Reasons   []string         `json:"reasons"`
	Types     []string         `json:"types"`
	Actions   []string         `json:"actions"`
	Skipped   map[string]int64 `json:"skipped"`
	// Null if it has not renewed its row.
	Breakers *[]outage.BreakerForm `json:"breakers"`
	Outages  *[]outage.Form        `json:"outages"`
	KafkaAt  *time.Time            `json:"kafka_at"`
}

func memberOf(m tables.Member) apiMember {
	types, actions := m.Handles()
	one := apiMember{Group: m.Group, Member: m.Name, Kind: m.What(), StartedAt: m.StartedAt.UTC(), RenewedAt: m.RenewedAt.UTC(), Live: m.Live,
		Reasons: each(m.Reasons, same), Types: each(types, same), Actions: each(actions, same), Skipped: m.Skipped, KafkaAt: orNull(m.KafkaAt)}
	if m.Live {
		breakers, outages := outage.BreakerForms(m.State.Breakers), outage.Forms(m.State.Outages)
		one.Works, one.Breakers, one.Outages = &m.Works, &breakers, &outages
	}
	return one
}

type apiWaiting struct {
	Group  string    `json:"group"`
	Action string    `json:"action"`
	Topic  string    `json:"topic"`
	Status string    `json:"status"`
	Events int       `json:"events"`
	More   bool      `json:"more"`
	Oldest time.Time `json:"oldest"`
}

func waitingOf(c tables.EventCount) apiWaiting {
	return apiWaiting{c.Group, c.Action, c.Topic, c.Status, c.Events, c.More, c.Oldest.UTC()}
}
