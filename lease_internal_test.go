package outbox

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pgsession"
	"github.com/outboxgo/outbox/internal/testenv"
)

// leaseFixture is a process that has a lease, and a lock.
type leaseFixture struct {
	*leases
	lease *lease
	claim *lockClaim
}

func newLeaseFixture(t *testing.T) *leaseFixture {
	t.Helper()
	testenv.Direct(t)
	d := newCursorFixture(t)
	ctx := context.Background()
	db := testenv.Pool(t, nil)
	f := &leaseFixture{leases: newLeases(db, d.schema, "default", time.Minute)}
	t.Cleanup(pgsession.Of(db).Use(slog.New(slog.DiscardHandler)))
	var err error
	f.lease, err = f.acquire(ctx)
	require.NoError(t, err)
	f.lock(t)
	return f
}

// lock takes the lock.
func (f *leaseFixture) lock(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		var err error
		f.claim, err = f.lockFor(context.Background(), f.lease)
		require.NoError(t, err)
		return f.claim != nil
	}, testenv.Patience, 10*time.Millisecond)
}

// claimed reports whether outbox_lease says that the lock goes with the lease.
func (f *leaseFixture) claimed(t *testing.T) (claimed bool) {
	t.Helper()
	require.NoError(t, f.db.QueryRow(context.Background(), `SELECT locked_epoch IS NOT DISTINCT FROM epoch FROM "`+f.schema+`".outbox_lease`).Scan(&claimed))
	return claimed
}

// A renewal says that the lock is lost once it is, and no statement that was under way brings the claim back.
func TestLostLockIsWithdrawn(t *testing.T) {
	t.Parallel()
	f := newLeaseFixture(t)
	ctx := context.Background()
	require.True(t, f.claimed(t))
	require.True(t, f.lease.sure())
	require.NoError(t, f.renew(ctx, f.lease))
	require.True(t, f.claimed(t), "it is kept")
	late := f.lease.expiry()

	f.claim.lock.Unlock(ctx)
	require.False(t, f.lease.sure())
	require.True(t, f.claimed(t))
	require.NoError(t, f.renew(ctx, f.lease))
	require.False(t, f.claimed(t))
	require.True(t, f.lease.sure())

	for _, late := range []time.Time{late, late.Add(time.Hour), {}} {
		tag, err := f.db.Exec(ctx, f.claimLock, f.relay, f.lease.holder, f.lease.epoch, late)
		require.NoError(t, err)
		require.Zero(t, tag.RowsAffected(), "a claim that comes late")
	}
	_, err := f.db.Exec(ctx, f.renewal, f.relay, f.lease.holder, f.lease.epoch, f.duration, true, late)
	require.NoError(t, err)
	require.False(t, f.claimed(t), "a renewal that comes late")
	require.NoError(t, f.renew(ctx, f.lease))
	f.lock(t)
	require.True(t, f.claimed(t))
	require.True(t, f.lease.sure())
	_, err = f.db.Exec(ctx, f.renewal, f.relay, f.lease.holder, f.lease.epoch, f.duration, false, late)
	require.NoError(t, err)
	require.True(t, f.claimed(t), "one that comes late and says that the lock before was lost")

	f.claim.lock.Unlock(ctx)
	require.NoError(t, f.renew(ctx, f.lease))
	require.True(t, f.claimed(t), "it does not know the lease as it is")
	require.False(t, f.lease.sure())
	require.NoError(t, f.renew(ctx, f.lease))
	require.False(t, f.claimed(t))
	require.True(t, f.lease.sure())
}

// A lock whose claim fails is given back.
func TestClaimThatFailsFreesLock(t *testing.T) {
	t.Parallel()
	f := newLeaseFixture(t)
	ctx := context.Background()
	f.claim.lock.Unlock(ctx)
	require.NoError(t, f.renew(ctx, f.lease))
	f.lease.renewed(time.Now().Add(time.Minute), time.Now()) // the answer to a renewal got lost
	c, err := f.lockFor(ctx, f.lease)
	require.ErrorIs(t, err, errHeld)
	require.True(t, c.wasLost())
	require.False(t, f.lease.sure())
	require.False(t, f.claimed(t))
}

// Only a standby that finds the lease as it was takes it over; it has the lock then, and knows when it is exclusive.
func TestTakeFromGone(t *testing.T) {
	t.Parallel()
	f := newLeaseFixture(t)
	ctx := context.Background()
	db := testenv.Pool(t, func(*pgxpool.Config) {})
	t.Cleanup(pgsession.Of(db).Use(slog.New(slog.DiscardHandler)))
	standby := newLeases(db, f.schema, "default", 10*time.Second)
	try := func() (*lease, error) {
		_, err := standby.acquire(ctx)
		require.ErrorIs(t, err, errHeld)
		require.True(t, standby.other.locked)
		return standby.acquireFromGone(ctx)
	}
	require.Eventually(t, func() bool { return pgsession.Of(db).State() == pgsession.Works }, testenv.Patience, time.Millisecond)
	_, err := try()
	require.ErrorIs(t, err, errHeld, "the lock is held")

	f.claim.lock.Unlock(ctx)
	ended, cancel := context.WithCancel(ctx)
	cancel()
	_, err = standby.acquireFromGone(ended)
	require.ErrorIs(t, err, errHeld)
	began := time.Now()
	l, err := try()
	require.NoError(t, err)
	require.GreaterOrEqual(t, time.Since(began), caution)
	require.Equal(t, f.lease.epoch+1, l.epoch)
	require.True(t, l.sure())
	require.False(t, l.exclusive())
	require.InDelta(t, time.Until(*f.lease.until.Load()), time.Until(l.exclusiveAt), float64(5*time.Second))
	require.True(t, f.claimed(t))
	require.ErrorIs(t, f.renew(ctx, f.lease), errLeaseLost)

	// A third one that takes the lease because it has expired is not exclusive earlier.
	third := newLeases(f.db, f.schema, "default", time.Second)
	_, err = f.db.Exec(ctx, `UPDATE "`+f.schema+`".outbox_lease SET expires_at = now()`)
	require.NoError(t, err)
	after, err := third.acquire(ctx)
	require.NoError(t, err)
	require.InDelta(t, time.Until(l.exclusiveAt), time.Until(after.exclusiveAt), float64(time.Second))
	require.False(t, f.claimed(t))
}

// Nobody hands anything to Kafka while the lock is lost and outbox_lease says that it is held.
func TestNothingIsSentWithoutLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lost := make(chan struct{})
		close(lost)
		claim := func() *lockClaim { return &lockClaim{lost: lost, withdrawn: make(chan struct{})} }
		l := &lease{}
		l.renewed(time.Now().Add(time.Hour), time.Time{})
		c := claim()
		l.claim.Store(c)
		require.False(t, l.sure())
		sure := make(chan struct{})
		go func() {
			l.awaitSure(t.Context(), t.Context())
			close(sure)
		}()
		synctest.Wait()
		select {
		case <-sure:
			t.Fatal("not yet")
		default:
		}
		l.withdrawn(c)
		<-sure
		for _, end := range []func(stopped context.Context){
			func(stopped context.Context) { l.awaitSure(stopped, t.Context()) },
			func(stopped context.Context) { l.awaitSure(t.Context(), stopped) },
		} {
			l.claim.Store(claim())
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(time.Second, func() { cancel(errors.New("the end")) })
			end(ctx)
			require.False(t, l.sure())
		}
	})
}
