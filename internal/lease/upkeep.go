package lease

import (
	"context"
	"errors"
	"time"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/trace"
	"github.com/outboxgo/outbox/internal/wait"
)

// Upkeep keeps a lease that was taken: it renews the lease and holds its lock. Each of its two methods runs in a
// goroutine of its own.
type Upkeep struct {
	store      *Store
	leads      Leadership
	lockOutage *outage.Log // only the goroutine of HoldLock
}

// NewUpkeep returns the upkeep of a lease. It reports to lockOutage whether the lock can be taken.
func NewUpkeep(store *Store, leads Leadership, lockOutage *outage.Log) *Upkeep {
	return &Upkeep{store: store, leads: leads, lockOutage: lockOutage}
}

// Renew renews the lease until Held ends. It ends Held with ErrLeaseLost when the lease is lost, or could not be
// renewed before it expired. If hangs reports that the holder makes no progress, Renew returns true: the caller gives
// the lease up.
func (u *Upkeep) Renew(hangs func() bool) (hanging bool) {
	l, pause := u.leads.Lease, u.store.Duration/3
	for {
		u.pause(min(pause, time.Until(*l.Until.Load())))
		if u.leads.Held.Err() != nil {
			return false
		}
		if hangs() {
			return true
		}
		// Half of the time that is left, so that there is time for a try on another connection.
		ctx, cancel := context.WithTimeout(u.leads.Held, time.Until(*l.Until.Load())/2)
		err := u.store.Renew(ctx, l)
		cancel()
		if errors.Is(err, ErrLeaseLost) || !l.Held() {
			u.leads.Lose(ErrLeaseLost)
			return false
		}
		pause = u.store.Duration / 3
		if err != nil { // the session reports outages of PostgreSQL
			pause = u.store.Duration / 30
		}
	}
}

// newsInterval is the shortest time between two renewals because the process has something to say.
const newsInterval = time.Second

// pause waits until the next renewal: for a time, or until this process has something new to say.
func (u *Upkeep) pause(longest time.Duration) {
	for end := time.Now().Add(longest); u.leads.Held.Err() == nil; {
		left := time.Until(end)
		wait.Sleep(u.leads.Held, min(left, newsInterval))
		if left <= newsInterval || u.store.HasNews() {
			return
		}
	}
}

// lockRetry is how long HoldLock waits before it tries again to take the lock.
const lockRetry = 250 * time.Millisecond

// HoldLock holds the lock of the lease until Held ends, so that a standby finds out quickly if this process is gone.
// When the lock is lost, the relay sends nothing until outbox_lease says that no lock goes with the lease.
func (u *Upkeep) HoldLock() {
	held := u.leads.Held
	for held.Err() == nil {
		claim := u.leads.Lease.Claim.Load()
		if claim == nil {
			claim = u.takeLock()
		}
		if claim == nil {
			wait.Sleep(held, lockRetry)
			continue
		}
		var step trace.Step
		if trace.On {
			step = trace.Begin("notice", "epoch", u.leads.Lease.Epoch)
		}
		select {
		case <-claim.Lost:
			if trace.On {
				step.End()
			}
			u.withdraw(claim)
			wait.Sleep(held, lockRetry)
		case <-held.Done():
		}
	}
}

// takeLock returns nil if the lock cannot be taken now.
func (u *Upkeep) takeLock() *LockClaim {
	ctx, cancel := context.WithTimeout(u.leads.Held, u.store.Duration)
	defer cancel()
	claim, err := u.store.LockFor(ctx, u.leads.Lease)
	if err == nil && claim != nil || err != nil && !errors.Is(err, ErrHeld) { // the session reports its own errors
		u.lockOutage.Report(err)
	}
	return claim
}

// withdraw makes outbox_lease say that the lock is lost.
func (u *Upkeep) withdraw(claim *LockClaim) {
	held, pause := u.leads.Held, 50*time.Millisecond
	for held.Err() == nil && u.leads.Lease.Claim.Load() == claim {
		ctx, cancel := context.WithTimeout(held, u.store.Duration/3)
		err := u.store.Renew(ctx, u.leads.Lease)
		cancel()
		if errors.Is(err, ErrLeaseLost) {
			u.leads.Lose(ErrLeaseLost)
			return
		}
		if err != nil { // the session reports outages of PostgreSQL
			wait.Sleep(held, pause)
			pause = min(2*pause, lockRetry)
		}
	}
}
