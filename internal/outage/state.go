package outage

import (
	"cmp"
	"encoding/json"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/short"
)

// State is what a process says of its work: in outbox_lease.state if it leads a relay, and in event_member.state if it
// is a member of a group. Its times are those of the clock of the process, until [State.ByClock].
type State struct {
	// At is when the process said so. It is zero in a row of an earlier release.
	At time.Time `json:"at,omitzero"`
	// Epoch is that of the lease under which a relay wrote the state. A state of another epoch is of an earlier leader.
	Epoch int64 `json:"epoch,omitempty"`
	// Works is false if the process does not do its part. Reasons say why, and name what else is worth knowing.
	Works   bool     `json:"works"`
	Reasons []string `json:"reasons,omitempty"`
	// Breakers are those that are not closed.
	Breakers []Breaker `json:"breakers,omitempty"`
	// Outages are those that have not ended, up to MaxOutages. More counts the others.
	Outages []Outage `json:"outages,omitempty"`
	More    int      `json:"more,omitempty"`
}

// UnmarshalJSON makes a state that cannot be read one that says nothing: a writer may store any JSON.
func (s *State) UnmarshalJSON(text []byte) error {
	type plain State
	var read plain
	if json.Unmarshal(text, &read) != nil {
		read = plain{}
	}
	*s = State(read).sane()
	return nil
}

// Breaker is a circuit breaker that is not closed.
type Breaker struct {
	Action string    `json:"action,omitempty"` // "" for the breaker of a relay
	State  string    `json:"state"`            // open or half-open
	Since  time.Time `json:"since"`            // when it was closed last
}

// Outage is an outage that has not ended.
type Outage struct {
	What  string    `json:"what"`  // what fails, as in the log: PostgreSQL, Kafka, topic orders
	Class string    `json:"class"` // of the last error, see kafka.ClassOf and pg.ClassOf
	Since time.Time `json:"since"` // when the first try failed
	Err   string    `json:"error"` // of the last try
}

// Bounds of a state.
const (
	MaxOutages  = 20
	maxBreakers = 100
	maxReasons  = 20
	maxReason   = 500 // bytes
	maxError    = 300 // bytes
)

// Outage describes a failure of a class.
func (n Named) Outage(class string) Outage {
	return Outage{What: n.Name, Class: class, Since: n.Since, Err: short.Storable(n.Err.Error(), maxError)}
}

// OutagesOf describes outages, the longest first. class returns the class of the error of one.
func OutagesOf(failures []Named, class func(Named) string) (all []Outage) {
	for _, f := range failures {
		all = append(all, f.Outage(class(f)))
	}
	slices.SortStableFunc(all, func(a, b Outage) int { return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.What, b.What)) })
	return all
}

// JSON returns the state as it is stored, within its bounds.
func (s State) JSON() string {
	if n := len(s.Outages); n > MaxOutages {
		s.Outages, s.More = s.Outages[:MaxOutages], s.More+n-MaxOutages
	}
	s.Outages = slices.Clone(s.Outages)
	for i := range s.Outages {
		o := &s.Outages[i]
		o.What, o.Err, o.Since = short.Storable(o.What, maxReason), short.Storable(o.Err, maxError), o.Since.UTC()
	}
	s.Breakers = slices.Clone(s.Breakers[:min(len(s.Breakers), maxBreakers)])
	for i := range s.Breakers {
		s.Breakers[i].Since = s.Breakers[i].Since.UTC()
	}
	s.At, s.Reasons = time.Now().UTC(), StorableReasons(s.Reasons)
	text, err := json.Marshal(s)
	if err != nil {
		return "{}" // a year after 9999: what is stored says nothing then
	}
	return string(text)
}

// StorableReasons returns reasons within the bounds of a state.
func StorableReasons(reasons []string) []string {
	storable := []string{}
	for _, r := range reasons[:min(len(reasons), maxReasons)] {
		storable = append(storable, short.Storable(r, maxReason))
	}
	return storable
}

// Differs reports whether a state says something else than one before. Texts and times do not count: reasons say how
// long something has lasted.
func (s State) Differs(before State) bool {
	same := s.Works == before.Works && s.More == before.More && len(s.Reasons) == len(before.Reasons) &&
		slices.EqualFunc(s.Breakers, before.Breakers, func(a, b Breaker) bool { return a.Action == b.Action && a.State == b.State }) &&
		slices.EqualFunc(s.Outages, before.Outages, func(a, b Outage) bool { return a.What == b.What && a.Class == b.Class && a.Since.Equal(b.Since) })
	return !same
}
