package outbox

import "time"

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
}
