package lease

import (
	"cmp"
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/pgsession"
	"github.com/outboxgo/outbox/internal/trace"
	"github.com/outboxgo/outbox/internal/wait"
)

// RecheckFor is how long a standby waits after it has got the lock of a lease. If the process that
// had the lock is alive, it withdraws its claim within this time. If it is gone, its last records
// most likely arrive in Kafka meanwhile.
const RecheckFor = time.Second

// sqlLeaseTakeFromGone takes a lease that has not changed since it was read.
const sqlLeaseTakeFromGone = `
UPDATE {schema}.outbox_lease AS l
   SET holder = $2::text, epoch = epoch + 1, locked_epoch = epoch + 1,
       exclusive_at = greatest(exclusive_at, least(expires_at, clock_timestamp() + lasts)), expires_at = clock_timestamp() + $3::interval, lasts = $3::interval
 WHERE name = $1::text AND holder = $4::text AND epoch = $5 AND locked_epoch = epoch AND expires_at = $6::timestamptz` + leaseTaken

// AcquireFromGone takes the lease that Acquire has seen, and its lock, if its holder is gone. Otherwise it returns
// ErrHeld.
func (s *Store) AcquireFromGone(ctx context.Context) (*Lease, error) {
	if !s.Other.Locked {
		return nil, ErrHeld
	}
	seen := s.Other
	lock, err := s.tryLock(ctx)
	if err != nil || lock == nil {
		return nil, cmp.Or(err, ErrHeld)
	}
	l, err := s.takeWithLock(ctx, lock, seen)
	if err != nil {
		var step trace.Step
		if trace.On {
			step = trace.Begin("unlock")
		}
		s.Unlock(ctx, lock)
		if trace.On {
			step.End()
		}
	}
	return l, err
}

// takeWithLock waits for RecheckFor, and takes the lease if it has not changed.
func (s *Store) takeWithLock(ctx context.Context, lock *pgsession.Lock, seen otherLease) (*Lease, error) {
	const rechecks = 4 // in between, so that a process that is alive can take its lock again
	for range rechecks {
		select {
		case <-time.After(RecheckFor / rechecks):
		case <-lock.Lost():
			return nil, ErrHeld
		case <-ctx.Done():
			return nil, ErrHeld
		}
		if err := s.peekAt(ctx); err != nil {
			return nil, err
		}
		if s.Other.Holder != seen.Holder || s.Other.epoch != seen.epoch || !s.Other.Locked || !s.Other.expiresAt.Equal(seen.expiresAt) {
			return nil, ErrHeld
		}
	}
	// As in acquire, a relay that is told to stop waits for the answer.
	taking, cancel := wait.Grace(ctx, takeGrace)
	defer cancel()
	taken := make(chan *Lease, 1)
	var over atomic.Bool // set by the first of the two, the statement and its waiting caller
	err := lock.Do(taking, func(ctx context.Context, conn *pgx.Conn) error {
		l, err := s.taken(func(read func(pgx.Rows) error) error {
			return pg.Query(ctx, conn, pg.Durable, read, s.takeFromGone, s.Relay, s.holder, s.Duration, seen.Holder, seen.epoch, seen.expiresAt)
		})
		if err != nil {
			return err
		}
		taken <- l
		if over.Swap(true) { // the caller has returned
			_, err = conn.Exec(ctx, s.Release, s.Relay, l.Holder, l.Epoch)
		}
		return err
	})
	if err != nil && !over.Swap(true) {
		return nil, withoutSession(err)
	}
	l := <-taken
	l.Claim.Store(newLockClaim(lock))
	return l, nil
}

// tryLock returns nil if another process has the lock of the lease, or if that is not known.
func (s *Store) tryLock(ctx context.Context) (*pgsession.Lock, error) {
	var step trace.Step
	if trace.On {
		step = trace.Begin("lock")
	}
	lock, err := pgsession.Of(s.DB).TryLock(ctx, s.Schema, "relay:"+s.Relay)
	if trace.On {
		step.End("ok", lock != nil)
	}
	if err = withoutSession(err); errors.Is(err, ErrHeld) {
		err = nil
	}
	return lock, err
}

// withoutSession returns ErrHeld for an error that only says that the lease is in use, or that there is no session
// on which to take the lock, which the session itself reports.
func withoutSession(err error) error {
	answer, answered := errors.AsType[*pgconn.PgError](err)
	const conflict, locked = "40001", "55P03"
	if err == nil || answered && answer.Code != conflict && answer.Code != locked {
		return err
	}
	return ErrHeld
}

// unlockTimeout is how long a stop waits for an answer that changes nothing: the lock ends with the session.
const unlockTimeout = ReleaseTimeout / 4

// Unlock gives a lock back, even if ctx has ended.
func (s *Store) Unlock(ctx context.Context, lock *pgsession.Lock) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), unlockTimeout)
	defer cancel()
	lock.Unlock(ctx)
}

// claimSettings let a claim wait neither for the disk nor for a synchronous standby: a claim that a crash forgets
// only makes a takeover slower.
const claimSettings = `SELECT set_config('synchronous_commit', 'off', true)`

// sqlLeaseClaimLock says that the holder has the lock. It changes nothing if the lease was renewed since: the
// statement may come late, after a renewal that says that the lock is lost.
const sqlLeaseClaimLock = `
UPDATE {schema}.outbox_lease SET locked_epoch = epoch
 WHERE name = $1::text AND holder = $2::text AND epoch = $3 AND expires_at = $4::timestamptz`

// LockFor takes the lock of a lease and says so in outbox_lease. It returns nil if that is not possible now. If the
// claim fails, the lock is lost.
func (s *Store) LockFor(ctx context.Context, l *Lease) (*LockClaim, error) {
	lock, err := s.tryLock(ctx)
	if err != nil || lock == nil {
		return nil, err
	}
	c := newLockClaim(lock)
	l.Claim.Store(c) // the answer may get lost
	var step trace.Step
	if trace.On {
		step = trace.Begin("claim", "epoch", l.Epoch)
	}
	err = lock.Do(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return pg.Query(ctx, conn, claimSettings, func(rows pgx.Rows) error {
			rows.Close()
			if err := rows.Err(); err != nil || rows.CommandTag().RowsAffected() > 0 {
				return err
			}
			return ErrHeld
		}, s.ClaimLock, s.Relay, l.Holder, l.Epoch, l.Expiry())
	})
	if trace.On {
		step.End("ok", err == nil, "no", errors.Is(err, ErrHeld))
	}
	if err != nil {
		s.Unlock(ctx, lock)
	}
	return c, withoutSession(err)
}
