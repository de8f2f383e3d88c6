package outage

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
)

// classWord is what a class of errors looks like.
var classWord = regexp.MustCompile(`^[a-z_]{1,40}$`)

// sane returns a state that was read from a row, with values that every view can show.
func (s State) sane() State {
	for i := range s.Outages {
		o := &s.Outages[i]
		if o.Since = writable(o.Since); !classWord.MatchString(o.Class) {
			o.Class = "failing"
		}
	}
	for i := range s.Breakers {
		b := &s.Breakers[i]
		if b.Since = writable(b.Since); b.State != "half-open" {
			b.State = "open"
		}
	}
	s.More = max(0, s.More)
	return s
}

// ByClock returns a state with the times of the clock that showed now when the process said so, the clock of the
// database. Clocks that differ by less than a second are taken for one: the statement that stores a state takes time.
func (s State) ByClock(now time.Time) State {
	ahead := s.At.Sub(now)
	if s.At.IsZero() || now.IsZero() || ahead.Abs() < time.Second {
		s.At = time.Time{}
		return s
	}
	s.At, s.Outages, s.Breakers = time.Time{}, slices.Clone(s.Outages), slices.Clone(s.Breakers)
	shift := func(t time.Time) time.Time {
		if t.IsZero() {
			return t
		}
		return t.Add(-ahead)
	}
	for i := range s.Outages {
		s.Outages[i].Since = shift(s.Outages[i].Since)
	}
	for i := range s.Breakers {
		s.Breakers[i].Since = shift(s.Breakers[i].Since)
	}
	return s.sane()
}

// writable returns a time in UTC, or zero if RFC 3339 cannot write it.
func writable(t time.Time) time.Time {
	if t = t.UTC(); t.Year() < 1 || t.Year() > 9999 {
		return time.Time{}
	}
	return t
}

// Text says what has failed since when, with the last error.
func (o Outage) Text(now time.Time) string {
	verb := "has been failing"
	if o.What == "Kafka" && (o.Class == "unreachable" || o.Class == "no_answer") {
		verb = "has not answered"
	}
	text := o.What + " " + verb + SinceText(o.Since, now) + " (" + strings.ReplaceAll(o.Class, "_", " ")
	if o.Err != "" {
		text += ": " + o.Err
	}
	return text + ")"
}

// Text says which breaker is not closed, and since when.
func (b Breaker) Text(now time.Time) string {
	name := "the circuit breaker"
	if b.Action != "" {
		name = "the breaker of action " + b.Action
	}
	text := name + " is " + b.State
	if since := SinceText(b.Since, now); since != "" {
		text += "," + since
	}
	return text
}

// SinceText returns " since" and a time, without the date if it is that of now; or nothing for a zero time.
func SinceText(t, now time.Time) string {
	t, now = t.UTC(), now.UTC()
	switch {
	case t.IsZero():
		return ""
	case t.YearDay() == now.YearDay() && t.Year() == now.Year():
		return t.Format(" since 15:04:05 UTC")
	}
	return t.Format(" since 2006-01-02 15:04:05 UTC")
}

// Other returns the reasons that are about no breaker and no outage of the state.
func (s State) Other(reasons []string) []string {
	return slices.DeleteFunc(slices.Clone(reasons), func(r string) bool {
		if slices.ContainsFunc(s.Outages, func(o Outage) bool {
			return strings.HasPrefix(strings.TrimPrefix(r, "parked events: "), o.What+" has been failing for ")
		}) {
			return true
		}
		return slices.ContainsFunc(s.Breakers, func(b Breaker) bool {
			return b.Action == "" && r == "the circuit breaker is open" || strings.HasPrefix(r, "the breaker of action "+b.Action+" is ")
		})
	})
}

// Sentences say what is wrong, without their ends: outages, breakers, then other reasons. There are none if nothing is.
func (s State) Sentences(now time.Time) (all []string) {
	const named = 5
	for _, o := range s.Outages[:min(len(s.Outages), named)] {
		all = append(all, o.Text(now))
	}
	if more := len(s.Outages) - len(all) + s.More; more > 0 {
		all = append(all, fmt.Sprintf("%d more outages", more))
	}
	for _, b := range s.Breakers[:min(len(s.Breakers), named)] {
		all = append(all, b.Text(now))
	}
	all = append(all, s.Other(s.Reasons)...)
	if len(all) == 0 && !s.Works {
		all = append(all, "it does not work")
	}
	return all
}

// The states of a process, of a relay or of a group in a word. That of an outage is its class.
const (
	StateUnknown  = "unknown"
	StateWorks    = "works"
	StateNotWorks = "does not work"
)

// Word returns the state in a word, and since when if it is known: that of the longest outage, else of the first
// breaker that is not closed.
func (s State) Word() (word string, since time.Time) {
	switch {
	case len(s.Outages) > 0:
		first := slices.MinFunc(s.Outages, func(a, b Outage) int { return a.Since.Compare(b.Since) })
		return first.Class, first.Since
	case len(s.Breakers) > 0:
		first := slices.MinFunc(s.Breakers, func(a, b Breaker) int { return a.Since.Compare(b.Since) })
		return "breaker " + first.State, first.Since
	case !s.Works:
		return StateNotWorks, time.Time{}
	}
	return StateWorks, time.Time{}
}
