package pg

import (
	"context"
	"time"
)

// Clock is the clock of the database, as it was read once. From then on the monotonic clock of this process counts, so
// the time of this host does not matter: what PostgreSQL has stored is as old as the database says. The zero value was
// not read, and shows the time of this host.
type Clock struct{ now, read time.Time }

// ClockAt returns the clock of a database that shows now.
func ClockAt(now time.Time) Clock { return Clock{now, time.Now()} }

// ReadClock reads the clock of the database.
func ReadClock(ctx context.Context, db BatchSender) (Clock, error) {
	var now time.Time
	err := QueryRow(ctx, db, SQLNow).Scan(&now)
	return ClockAt(now), err
}

// IsRead reports whether the clock was read.
func (c Clock) IsRead() bool { return !c.read.IsZero() }

// Now returns the time of the database.
func (c Clock) Now() time.Time { return c.At(time.Now()) }

// At returns the time of the database at a time of this process, or zero for the zero time.
func (c Clock) At(own time.Time) time.Time {
	if !c.IsRead() || own.IsZero() {
		return own
	}
	return c.now.Add(own.Sub(c.read))
}

// Since returns how long ago something was, by the clock of the database: never less than 0, and 0 for the zero time.
func (c Clock) Since(at time.Time) time.Duration {
	if at.IsZero() {
		return 0
	}
	return max(0, c.Now().Sub(at))
}
