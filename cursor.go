package outbox

import (
	"time"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/tables"
)

// RelayStatus is the state of a relay, by the database.
type RelayStatus struct {
	// Name of the relay.
	Name string
	// Holder is who leads: host, process id and a random part. Empty means that no
	// process does.
	Holder string
	// Epoch grows with every change of holder.
	Epoch int64
	// LeaseUntil is when the lease expires unless it is renewed, or when it did;
	// zero if it was given back, or never taken.
	LeaseUntil time.Time
	// MovedAt is when the cursor moved last; zero if it has no cursor yet.
	MovedAt time.Time
	// CursorTopic is the topic in which the relay keeps its position; empty unless it sends exactly once.
	CursorTopic string
	// Transaction is the number of the newest Kafka transaction that was confirmed when the cursor moved last. It is 0
	// before the first one, and for a relay that sends at least once.
	Transaction int64

	// Pending is how many committed events it has not tried to send, counted up to
	// 100,000.
	Pending int64
	// PendingMore is set if there may be more than Pending. Pending is then 100,000, or less
	// in the middle of a very large transaction.
	PendingMore bool
	// Oldest is when the transaction of the first pending event began; zero if none is
	// pending. A transaction that was open for long makes it old at its commit.
	Oldest time.Time

	// Waiting, Failed, Parked and Dead are how many rows of outbox_failed have the
	// status, each counted up to [MaxCounted].
	Waiting, Failed, Parked, Dead int64
	// ParkedKeys is how many keys have an event that is tried again, or wait for an
	// operator, and HeldKeys how many wait for an operator; each up to [MaxCounted].
	ParkedKeys, HeldKeys int64

	// Said is what the leader has said of itself. It is nil if nothing is known: no process leads, or its lease has
	// expired, or it is new and has not said anything yet.
	Said *RelayState
}

// RelayState is what the leader of a relay says of itself when it renews its lease, each third of Lease, and within
// about a second after a change.
type RelayState struct {
	// At is when it said that, and KafkaAt is when Kafka last answered it, zero if it did not; by the clock of the
	// database.
	At, KafkaAt time.Time
	// Works is that of its [RelayHealth].
	Works bool
	// Reasons are those of its [RelayHealth].
	Reasons []string
	// Breaker is that of its [RelayHealth].
	Breaker BreakerState
	// BreakerSince is since when the breaker is not closed, by the clock of the database.
	BreakerSince time.Time
	// Outages are those of its [RelayHealth], at most 20, by the clock of the database.
	Outages []Outage
}

func relayStatusOf(r tables.Relay) RelayStatus {
	s := RelayStatus{
		Name: r.Name, Holder: r.Holder, Epoch: r.Epoch, LeaseUntil: r.LeaseUntil, MovedAt: r.MovedAt, CursorTopic: r.CursorTopic, Transaction: r.Transaction,
		Pending: r.Pending, PendingMore: r.PendingMore, Oldest: r.Oldest,
		Waiting: r.Waiting, Failed: r.Failed, Parked: r.Parked, Dead: r.Dead, ParkedKeys: r.ParkedKeys, HeldKeys: r.HeldKeys,
	}
	if said := r.Said; said != nil {
		b, since := said.RelayBreaker()
		s.Said = &RelayState{At: said.At, KafkaAt: said.KafkaAt, Works: said.Works, Reasons: said.Reasons,
			Breaker: BreakerState(b), BreakerSince: since, Outages: outagesOf(said.Outages)}
	}
	return s
}

// engine returns the status as the engine has it.
func (s RelayStatus) engine() tables.Relay {
	r := tables.Relay{
		Name: s.Name, Holder: s.Holder, Epoch: s.Epoch, LeaseUntil: s.LeaseUntil, MovedAt: s.MovedAt, CursorTopic: s.CursorTopic, Transaction: s.Transaction,
		Pending: s.Pending, PendingMore: s.PendingMore, Oldest: s.Oldest,
		Waiting: s.Waiting, Failed: s.Failed, Parked: s.Parked, Dead: s.Dead, ParkedKeys: s.ParkedKeys, HeldKeys: s.HeldKeys,
	}
	if said := s.Said; said != nil {
		r.Said = &tables.Said{At: said.At, KafkaAt: said.KafkaAt, State: outage.State{Epoch: s.Epoch, Works: said.Works, Reasons: said.Reasons}}
		if said.Breaker != BreakerClosed {
			r.Said.Breakers = []outage.Breaker{{State: said.Breaker.String(), Since: said.BreakerSince}}
		}
		for _, o := range said.Outages {
			r.Said.Outages = append(r.Said.Outages, outage.Outage(o))
		}
	}
	return r
}
