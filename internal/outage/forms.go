package outage

import "time"

// The forms of states in JSON, in the API of the operators' page and in the output of the command line. Other packages
// make them of what rows say; a time that is not known is null, and a list is never null.

// Form is an outage.
type Form struct {
	What  string     `json:"what"`
	Class string     `json:"class"`
	Since *time.Time `json:"since"`
	Error string     `json:"error"`
}

// Forms returns the form of outages.
func Forms(all []Outage) []Form {
	list := make([]Form, 0, len(all))
	for _, o := range all {
		list = append(list, Form{o.What, o.Class, orNull(o.Since), o.Err})
	}
	return list
}

// BreakerForm is a breaker that is not closed.
type BreakerForm struct {
	Action string     `json:"action"`
	State  string     `json:"state"`
	Since  *time.Time `json:"since"`
}

// BreakerForms returns the form of breakers.
func BreakerForms(all []Breaker) []BreakerForm {
	list := make([]BreakerForm, 0, len(all))
	for _, b := range all {
		list = append(list, BreakerForm{b.Action, b.State, orNull(b.Since)})
	}
	return list
}

// RelayForm is what the leader of a relay has said of itself.
type RelayForm struct {
	At           time.Time  `json:"at"`
	KafkaAt      *time.Time `json:"kafka_at"`
	Works        bool       `json:"works"`
	Reasons      []string   `json:"reasons"`
	Breaker      string     `json:"breaker"`
	BreakerSince *time.Time `json:"breaker_since"`
	Outages      []Form     `json:"outages"`
}

// NewRelayForm returns the form of what a leader said at a time, with the state of its breaker, and when Kafka had
// answered it last.
func NewRelayForm(s *State, at, kafkaAt time.Time, breaker string, breakerSince time.Time) *RelayForm {
	return &RelayForm{at.UTC(), orNull(kafkaAt), s.Works, append([]string{}, s.Reasons...), breaker, orNull(breakerSince), Forms(s.Outages)}
}

func orNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC()
	return &t
}
