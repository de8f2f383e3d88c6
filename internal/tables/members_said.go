package tables

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/outboxgo/outbox/internal/outage"
)

// MembersSaid is what the members of a group say of themselves, all.
type MembersSaid struct {
	Group string
	// Known counts all members, Live those that have renewed their rows, and Work those of Live that say they work.
	Known, Live, Work int
	// Says has what is wrong, as live members say: outages, then breakers, then other reasons.
	Says []Saying
	More int // that are not in Says
	// Word is the state of the group in a word, see [outage.State.Word]; of all live members all. Affected counts
	// those that it is about.
	Word     string
	Since    time.Time
	Affected int
}

// Saying is something that members of a group say alike.
type Saying struct {
	Text    string // a sentence without its end
	Members int    // that say so
	Works   bool   // all of them work nevertheless
	Outage  bool   // it is about an outage or a breaker
	Last    Member // who of them has renewed its row last
}

// Said returns what the members of each group say, sorted by group.
func (s GroupsState) Said() (all []MembersSaid) {
	of := map[string][]Member{}
	for _, m := range s.Members {
		of[m.Group] = append(of[m.Group], m)
	}
	for _, group := range slices.Sorted(maps.Keys(of)) {
		all = append(all, saidBy(group, of[group]))
	}
	return all
}

func saidBy(group string, members []Member) MembersSaid {
	s := MembersSaid{Group: group, Known: len(members), Word: outage.StateUnknown}
	live := slices.DeleteFunc(slices.Clone(members), func(m Member) bool { return !m.Live })
	s.Live = len(live)
	if s.Live == 0 {
		for _, m := range members {
			if m.RenewedAt.After(s.Since) {
				s.Since = m.RenewedAt
			}
		}
		return s
	}
	all, says := outage.State{Works: true}, sayings{of: s.Live, by: map[string]*saying{}}
	for _, m := range live {
		if m.Works {
			s.Work++
		}
		all.Works = all.Works && m.Works
		all.Outages, all.Breakers = append(all.Outages, m.State.Outages...), append(all.Breakers, m.State.Breakers...)
		says.add(m)
	}
	s.Says, s.More = says.all()
	s.Word, s.Since = all.Word()
	for _, m := range live {
		if word, _ := m.Said().Word(); word == s.Word {
			s.Affected++
		}
	}
	return s
}

// maxSayings bounds what is said of a group, because each member may say anything.
const maxSayings = 20

// sayings collects what members say, of of them, by what it is about.
type sayings struct {
	of int
	by map[string]*saying
}

// The order in which sayings are shown.
const (
	rankOutage = iota
	rankBreaker
	rankFails
	rankReason
)

type saying struct {
	Saying
	rank    int
	since   time.Time
	text    func(now time.Time) string
	reasons []string
	seen    string // the member that was noted last
}

// note adds that a member says what a key names, and returns it. The text of those is kept that has the first since.
func (s *sayings) note(rank int, key string, since time.Time, text func(time.Time) string, m Member) *saying {
	x := s.by[fmt.Sprint(rank, key)]
	switch {
	case x == nil:
		x = &saying{Saying: Saying{Works: true}, rank: rank, since: since, text: text}
		s.by[fmt.Sprint(rank, key)] = x
	case x.seen == m.Name: // a row may have it twice
		return x
	case since.Before(x.since):
		x.since, x.text = since, text
	}
	x.seen, x.Members, x.Works = m.Name, x.Members+1, x.Works && m.Works
	if x.Members == 1 || !m.RenewedAt.Before(x.Last.RenewedAt) {
		x.Last = m
	}
	return x
}

func (s *sayings) add(m Member) {
	for _, o := range m.State.Outages {
		s.note(rankOutage, o.Class+" "+o.What, o.Since, o.Text, m)
	}
	for _, b := range m.State.Breakers {
		s.note(rankBreaker, b.State+" "+b.Action, b.Since, b.Text, m)
	}
	other := m.State.Other(m.Reasons)
	if m.Works {
		for _, r := range other {
			s.note(rankReason, r, time.Time{}, func(time.Time) string { return r }, m)
		}
	} else if len(m.State.Outages) == 0 || len(other) > 0 {
		x := s.note(rankFails, "", time.Time{}, nil, m)
		for _, r := range other {
			if len(x.reasons) < maxSayings && !slices.Contains(x.reasons, r) {
				x.reasons = append(x.reasons, r)
			}
		}
	}
}

// all returns the sayings in their order, and how many more there are.
func (s *sayings) all() (all []Saying, more int) {
	sorted := slices.SortedFunc(maps.Keys(s.by), func(a, b string) int {
		return cmp.Or(cmp.Compare(s.by[a].rank, s.by[b].rank), cmp.Compare(s.by[b].Members, s.by[a].Members), cmp.Compare(a, b))
	})
	for _, key := range sorted[:min(len(sorted), maxSayings)] {
		x := s.by[key]
		if x.rank == rankFails {
			x.Text = s.failing(x)
		} else if x.Text = x.text(x.Last.Now); s.of > 1 {
			x.Text += fmt.Sprintf(" at %d of %d members", x.Members, s.of)
		}
		x.Outage = x.rank <= rankBreaker
		all = append(all, x.Saying)
	}
	return all, len(sorted) - len(all)
}

// failing says how many members do not work, and why.
func (s *sayings) failing(x *saying) string {
	const named = 3
	text := fmt.Sprintf("%d of %d members do not work", x.Members, s.of)
	if s.of == 1 {
		text = "its only member does not work"
	} else if x.Members == 1 {
		text = fmt.Sprintf("1 of %d members does not work", s.of)
	}
	if len(x.reasons) == 0 {
		return text
	}
	reasons := x.reasons
	if more := len(reasons) - named; more > 0 {
		reasons = append(reasons[:named:named], fmt.Sprintf("and %d more", more))
	}
	return text + ": " + strings.Join(reasons, "; ")
}
