package lease_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outboxgo/outbox/internal/lease"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pgsession"
	"github.com/outboxgo/outbox/internal/testenv"
)

// leaseFixture is a process that has a lease, and a lock.
type leaseFixture struct {
	*lease.Store
	lease *lease.Lease
	claim *lease.LockClaim
}

func newLeaseFixture(t *testing.T) *leaseFixture {
	t.Helper()
	testenv.Direct(t)
	ctx := context.Background()
	_, schema := testenv.Migrated(t)
	db := testenv.Pool(t, nil)
	f := &leaseFixture{Store: lease.NewStore(db, schema, "default", time.Minute)}
	t.Cleanup(pgsession.Of(db).Use(slog.New(slog.DiscardHandler)))
	var err error
	f.lease, err = f.Acquire(ctx)
	require.NoError(t, err)
	f.lock(t)
	return f
}

// lock takes the lock.
func (f *leaseFixture) lock(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		var err error
		f.claim, err = f.LockFor(context.Background(), f.lease)
		require.NoError(t, err)
		return f.claim != nil
	}, testenv.Patience, 10*time.Millisecond)
}

// claimed reports whether outbox_lease says that the lock goes with the lease.
func (f *leaseFixture) claimed(t *testing.T) (claimed bool) {
	t.Helper()
	require.NoError(t, f.DB.QueryRow(context.Background(), `SELECT locked_epoch IS NOT DISTINCT FROM epoch FROM "`+f.Schema+`".outbox_lease`).Scan(&claimed))
	return claimed
}

// A renewal says that the lock is lost once it is, and no statement that was under way brings the claim back.
func TestLostLockIsWithdrawn(t *testing.T) {
	t.Parallel()
	f := newLeaseFixture(t)
	ctx := context.Background()
	require.True(t, f.claimed(t))
	require.True(t, f.lease.Sure())
	require.NoError(t, f.Renew(ctx, f.lease))
	require.True(t, f.claimed(t), "it is kept")
	late := f.lease.Expiry()

	f.claim.Lock.Unlock(ctx)
	require.False(t, f.lease.Sure())
	require.True(t, f.claimed(t))
	require.NoError(t, f.Renew(ctx, f.lease))
	require.False(t, f.claimed(t))
	require.True(t, f.lease.Sure())

	for _, late := range []time.Time{late, late.Add(time.Hour), {}} {
		tag, err := f.DB.Exec(ctx, f.ClaimLock, f.Relay, f.lease.Holder, f.lease.Epoch, late)
		require.NoError(t, err)
		require.Zero(t, tag.RowsAffected(), "a claim that comes late")
	}
	_, err := f.DB.Exec(ctx, f.Renewal, f.Relay, f.lease.Holder, f.lease.Epoch, f.Duration, true, late, "{}", nil)
	require.NoError(t, err)
	require.False(t, f.claimed(t), "a renewal that comes late")
	require.NoError(t, f.Renew(ctx, f.lease))
	f.lock(t)
	require.True(t, f.claimed(t))
	require.True(t, f.lease.Sure())
	_, err = f.DB.Exec(ctx, f.Renewal, f.Relay, f.lease.Holder, f.lease.Epoch, f.Duration, false, late, "{}", nil)
	require.NoError(t, err)
	require.True(t, f.claimed(t), "one that comes late and says that the lock before was lost")

	f.claim.Lock.Unlock(ctx)
	require.NoError(t, f.Renew(ctx, f.lease))
	require.True(t, f.claimed(t), "it does not know the lease as it is")
	require.False(t, f.lease.Sure())
	require.NoError(t, f.Renew(ctx, f.lease))
	require.False(t, f.claimed(t))
	require.True(t, f.lease.Sure())
}

// A lock whose claim fails is given back.
func TestClaimThatFailsFreesLock(t *testing.T) {
	t.Parallel()
	f := newLeaseFixture(t)
	ctx := context.Background()
	f.claim.Lock.Unlock(ctx)
	require.NoError(t, f.Renew(ctx, f.lease))
	f.lease.Renewed(time.Now().Add(time.Minute), time.Now()) // the answer to a renewal got lost
	c, err := f.LockFor(ctx, f.lease)
	require.ErrorIs(t, err, lease.ErrHeld)
	require.True(t, c.WasLost())
	require.False(t, f.lease.Sure())
	require.False(t, f.claimed(t))
}

// Only a standby that finds the lease as it was takes it over; it has the lock then, and knows when it is exclusive.
func TestTakeFromGone(t *testing.T) {
	t.Parallel()
	f := newLeaseFixture(t)
	ctx := context.Background()
	db := testenv.Pool(t, func(*pgxpool.Config) {})
	t.Cleanup(pgsession.Of(db).Use(slog.New(slog.DiscardHandler)))
	standby := lease.NewStore(db, f.Schema, "default", 10*time.Second)
	try := func() (*lease.Lease, error) {
		_, err := standby.Acquire(ctx)
		require.ErrorIs(t, err, lease.ErrHeld)
		require.True(t, standby.Other.Locked)
		return standby.AcquireFromGone(ctx)
	}
	require.Eventually(t, func() bool { return pgsession.Of(db).State() == pgsession.Works }, testenv.Patience, time.Millisecond)
	_, err := try()
	require.ErrorIs(t, err, lease.ErrHeld, "the lock is held")

	f.claim.Lock.Unlock(ctx)
	ended, cancel := context.WithCancel(ctx)
	cancel()
	_, err = standby.AcquireFromGone(ended)
	require.ErrorIs(t, err, lease.ErrHeld)
	began := time.Now()
	l, err := try()
	require.NoError(t, err)
	require.GreaterOrEqual(t, time.Since(began), lease.RecheckFor)
	require.Equal(t, f.lease.Epoch+1, l.Epoch)
	require.True(t, l.Sure())
	require.False(t, l.Exclusive())
	require.InDelta(t, time.Until(*f.lease.Until.Load()), time.Until(l.ExclusiveAt), float64(5*time.Second))
	require.True(t, f.claimed(t))
	require.ErrorIs(t, f.Renew(ctx, f.lease), lease.ErrLeaseLost)

	// A third one that takes the lease because it has expired is not exclusive earlier.
	third := lease.NewStore(f.DB, f.Schema, "default", time.Second)
	_, err = f.DB.Exec(ctx, `UPDATE "`+f.Schema+`".outbox_lease SET expires_at = now()`)
	require.NoError(t, err)
	after, err := third.Acquire(ctx)
	require.NoError(t, err)
	require.InDelta(t, time.Until(l.ExclusiveAt), time.Until(after.ExclusiveAt), float64(time.Second))
	require.False(t, f.claimed(t))
}

// Every constructor completes every statement.
func TestStatementsAreComplete(t *testing.T) {
	t.Parallel()
	s := lease.NewStore(nil, "s", "r", 1)
	for _, sql := range []string{s.Peek, s.Take, s.Renewal, s.ClaimLock, s.Release} {
		require.Contains(t, sql, `"s".outbox`)
		require.NotContains(t, sql, "{schema}")
	}
}

// No process sends to Kafka while the lock is lost and outbox_lease says that it is held.
func TestNothingIsSentWithoutLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lost := make(chan struct{})
		close(lost)
		claim := func() *lease.LockClaim { return &lease.LockClaim{Lost: lost, Withdrawn: make(chan struct{})} }
		l := &lease.Lease{}
		l.Renewed(time.Now().Add(time.Hour), time.Time{})
		c := claim()
		l.Claim.Store(c)
		require.False(t, l.Sure())
		sure := make(chan struct{})
		go func() {
			l.AwaitSure(t.Context(), t.Context())
			close(sure)
		}()
		synctest.Wait()
		select {
		case <-sure:
			t.Fatal("not yet")
		default:
		}
		l.Withdrawn(c)
		<-sure
		for _, end := range []func(stopped context.Context){
			func(stopped context.Context) { l.AwaitSure(stopped, t.Context()) },
			func(stopped context.Context) { l.AwaitSure(t.Context(), stopped) },
		} {
			l.Claim.Store(claim())
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(time.Second, func() { cancel(errors.New("the end")) })
			end(ctx)
			require.False(t, l.Sure())
		}
	})
}
