package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/pgsession"
	"github.com/outboxgo/outbox/internal/wait"
)

var (
	// errHeld means that another process holds the lease.
	errHeld = errors.New("lease is held by another relay")
	// errLeaseLost means that holder and epoch no longer stand in outbox_lease.
	errLeaseLost = errors.New("lease is lost")
)

// lease is the right to relay. Holder and epoch prove it.
//
// A session advisory lock, which PostgreSQL frees when this process is gone, makes a takeover quick. The lock proves nothing by
// itself: PostgreSQL frees it also when only the connection is gone. So outbox_lease says that the lock goes with the lease,
// and the holder sends nothing while it says so and the lock is lost.
type lease struct {
	holder string
	epoch  int64
	// exclusiveAt is when no process can send any more that had the lease before, by the monotonic clock of this process. If one was
	// taken for gone, its lease may not have expired yet. Until then, this one sends and parks only: what it gave up, or what
	// an operator decided about, could still be sent by the other one, behind later events of its key.
	exclusiveAt time.Time
	// until is when the lease expires by the monotonic clock of this process. It
	// counts from before the statement that took or renewed the lease, so by the clock
	// of the database the lease expires later. Written by the goroutine that renews,
	// read by the one that sends.
	until atomic.Pointer[time.Time]
	// claim is the lock that outbox_lease speaks of, or may; nil if there is none.
	claim atomic.Pointer[lockClaim]

	mu        sync.Mutex
	expiresAt time.Time // as outbox_lease has it, if the last renewal was answered
}

// lockClaim says that the lock of a lease is held, or was.
type lockClaim struct {
	lock      *pgsession.Lock
	lost      <-chan struct{} // closed once the lock is
	withdrawn chan struct{}   // closed once outbox_lease says so no longer
}

func newLockClaim(lock *pgsession.Lock) *lockClaim {
	return &lockClaim{lock: lock, lost: lock.Lost(), withdrawn: make(chan struct{})}
}

// wasLost reports whether the lock is free, and PostgreSQL gives the lease to whoever gets it.
func (c *lockClaim) wasLost() bool {
	select {
	case <-c.lost:
		return true
	default:
		return false
	}
}

// exclusive reports whether no process can send any more that had the lease before.
func (l *lease) exclusive() bool { return !time.Now().Before(l.exclusiveAt) }

// awaitExclusive waits until exclusive, or until ctx ends.
func (l *lease) awaitExclusive(ctx context.Context) { wait.Sleep(ctx, time.Until(l.exclusiveAt)) }

// withdrawn notes that outbox_lease says no longer that a lock goes with the lease.
func (l *lease) withdrawn(c *lockClaim) {
	if l.claim.CompareAndSwap(c, nil) {
		close(c.withdrawn)
	}
}

// sure reports whether nobody can have taken the lease for that of a process that is gone.
func (l *lease) sure() bool {
	c := l.claim.Load()
	return c == nil || !c.wasLost()
}

// awaitSure waits until sure. It returns early when stop or held ends.
func (l *lease) awaitSure(stop, held context.Context) {
	for c := l.claim.Load(); c != nil && c.wasLost(); c = l.claim.Load() {
		select {
		case <-c.withdrawn:
		case <-stop.Done():
			return
		case <-held.Done():
			return
		}
	}
}

func (l *lease) renewed(until, expiresAt time.Time) {
	l.mu.Lock()
	l.expiresAt = expiresAt
	l.mu.Unlock()
	l.until.Store(&until)
}

func (l *lease) expiry() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.expiresAt
}

// held reports whether the lease has certainly not expired. A process that was
// stopped for long finds out here, before any timer has fired.
func (l *lease) held() bool { return time.Now().Before(*l.until.Load()) }

// expire makes held false. The lease was given up.
func (l *lease) expire() {
	var past time.Time
	l.until.Store(&past)
}

// leadership is what the parts of a relay share while the relay leads.
type leadership struct {
	lease *lease
	// held ends when the lease is lost, when a relay that was told to stop takes too
	// long to finish its batch, and at the end of a clean stop. The cause says which.
	held context.Context
	lose context.CancelCauseFunc // ends held
	// statementTimeout is RelayConfig.Lease.
	statementTimeout time.Duration
}

// newGroup returns a group for goroutines that work under the lease. If one panics, the
// work under the lease ends.
func (l *leadership) newGroup() *contain.Group {
	return contain.NewGroup(func(p *contain.Panic) { l.lose(p) })
}

// statementContext returns a context for one statement.
type statementContext func() (context.Context, context.CancelFunc)

// withStatementTimeout returns a context for one statement. Only a rebase does without:
// it takes as long as it takes. A connection can go dead without any notice, and TCP
// needs a quarter of an hour to find out. Meanwhile a leader would do nothing with the
// lease that keepLease, on another connection, renews for it.
func (l *leadership) withStatementTimeout() (context.Context, context.CancelFunc) {
	return context.WithTimeout(l.held, l.statementTimeout)
}

// otherLease is the lease of another process.
type otherLease struct {
	holder string
	// lasts is how long the lease lasts at most if its holder is gone; 0 if it does not expire.
	lasts time.Duration
	// setBack is by how much the clock of the database was set back since the holder
	// renewed the lease, if that delays a takeover.
	setBack time.Duration

	epoch     int64
	expiresAt time.Time // as outbox_lease has it
	locked    bool      // its holder has the lock, or had it
}

// leases takes, renews and releases the lease of a relay name.
type leases struct {
	db       *pgxpool.Pool
	schema   string
	relay    string
	holder   string
	duration time.Duration

	// other is the lease of another process, as acquire has seen it last. Only acquire and
	// its caller use it.
	other otherLease

	peek, take, takeFromGone, renewal, claimLock, release string
}

func newLeases(db *pgxpool.Pool, schema, relay string, duration time.Duration) *leases {
	return &leases{
		db: db, schema: schema, relay: relay, holder: newHolder(), duration: duration,
		peek:         pg.InSchema(sqlLeasePeek, schema),
		take:         pg.InSchema(sqlLeaseTake, schema),
		takeFromGone: pg.InSchema(sqlLeaseTakeFromGone, schema),
		renewal:      pg.InSchema(sqlLeaseRenew, schema),
		claimLock:    pg.InSchema(sqlLeaseClaimLock, schema),
		release:      pg.InSchema(sqlLeaseRelease, schema),
	}
}

// newHolder names the process for operators. The random part makes the name a proof.
func newHolder() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%.150s/%d/%s", host, os.Getpid(), uuid.NewString())
}

// sqlLeasePeek locks nothing: a standby runs it every poll interval, and must
// neither write nor wait. A lease that expires later than it lasts from now on was taken or
// renewed before the clock of the database was set back.
const sqlLeasePeek = `
SELECT holder, epoch,
       coalesce(CASE WHEN isfinite(expires_at) THEN greatest(lasts, expires_at - clock_timestamp()) END, '0'),
       coalesce(CASE WHEN isfinite(expires_at) THEN expires_at - clock_timestamp() - lasts END, '0'),
       CASE WHEN isfinite(expires_at) THEN expires_at END, coalesce(isfinite(expires_at) AND locked_epoch = epoch, false)
  FROM {schema}.outbox_lease
 WHERE name = $1::text AND holder <> $2::text AND expires_at > clock_timestamp()`

// leaseTaken is what a process gets to know of the lease that it has taken. Longer than an hour it waits for nobody: the clock of the
// database was set back.
const leaseTaken = `
RETURNING l.epoch, l.expires_at, least(greatest(coalesce(l.exclusive_at - clock_timestamp(), '0'), '0'), '1 hour')`

// sqlLeaseTake takes a lease that is free, has expired, or became ours by a try
// whose answer got lost. The new epoch is above every epoch in outbox_cursor.
// Otherwise, if an operator empties the lease table, a relay from before that could
// have the same epoch as the new one. The row that the statement reads of
// outbox_cursor may be older than the row of outbox_lease; then greatest takes the
// epoch of the latter.
const sqlLeaseTake = `
INSERT INTO {schema}.outbox_lease AS l (name, holder, epoch, expires_at, lasts)
SELECT $1::text, $2::text, 1 + coalesce((SELECT c.epoch FROM {schema}.outbox_cursor c
                              WHERE c.relay = $1::text ORDER BY c.id DESC LIMIT 1), 0),
       clock_timestamp() + $3::interval, $3::interval
    ON CONFLICT (name) DO UPDATE
   SET holder = excluded.holder, epoch = greatest(l.epoch + 1, excluded.epoch),
       expires_at = clock_timestamp() + $3::interval, lasts = excluded.lasts, locked_epoch = NULL
 WHERE l.expires_at <= clock_timestamp() OR l.holder = excluded.holder` + leaseTaken

// takeGrace is how long a relay that is told to stop waits for the statement that takes
// the lease.
const takeGrace = time.Second

// acquire takes the lease, or returns errHeld.
func (s *leases) acquire(ctx context.Context) (*lease, error) {
	if err := s.peekAt(ctx); err != nil {
		return nil, err
	}
	if s.other.holder != "" {
		return nil, errHeld
	}
	// If the relay is told to stop now, it waits for the answer: PostgreSQL may have given
	// it the lease, and a standby would have to wait until that expires.
	taking, cancel := wait.Grace(ctx, takeGrace)
	defer cancel()
	return s.taken(func(read func(pgx.Rows) error) error {
		return pg.Query(taking, s.db, pg.Durable, read, s.take, s.relay, s.holder, s.duration)
	})
}

// peekAt looks at the lease that another process has, if one has.
func (s *leases) peekAt(ctx context.Context) error {
	s.other = otherLease{}
	var expiresAt pgtype.Timestamptz
	err := s.db.QueryRow(ctx, s.peek, s.relay, s.holder).
		Scan(&s.other.holder, &s.other.epoch, &s.other.lasts, &s.other.setBack, &expiresAt, &s.other.locked)
	s.other.expiresAt = expiresAt.Time
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("look at lease: %w", err)
	}
	return nil
}

// taken returns the lease that a statement has taken, whose rows are to be read. If a crash could forget an
// epoch, it would be given out twice.
func (s *leases) taken(query func(read func(pgx.Rows) error) error) (*lease, error) {
	l := &lease{holder: s.holder}
	until := time.Now().Add(s.duration)
	var expiresAt time.Time
	var shared time.Duration
	err := query(func(rows pgx.Rows) error {
		_, err := pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (struct{}, error) {
			return struct{}{}, row.Scan(&l.epoch, &expiresAt, &shared)
		})
		return err
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, errHeld
	}
	if err != nil {
		return nil, fmt.Errorf("take lease: %w", err)
	}
	l.exclusiveAt = time.Now().Add(shared)
	l.renewed(until, expiresAt)
	return l, nil
}

// caution is how long a standby waits that has got the lock of a lease. The process that had it may live, and then says that
// it has lost the lock, once it has noticed; if it is gone, what it has written to Kafka most likely arrives meanwhile.
const caution = time.Second

// sqlLeaseTakeFromGone takes a lease that has not changed since it was looked at.
const sqlLeaseTakeFromGone = `
UPDATE {schema}.outbox_lease AS l
   SET holder = $2::text, epoch = epoch + 1, locked_epoch = epoch + 1,
       exclusive_at = greatest(exclusive_at, least(expires_at, clock_timestamp() + lasts)), expires_at = clock_timestamp() + $3::interval, lasts = $3::interval
 WHERE name = $1::text AND holder = $4::text AND epoch = $5 AND locked_epoch = epoch AND expires_at = $6::timestamptz` + leaseTaken

// acquireFromGone takes the lease that acquire has seen, if its holder is gone, with its lock. Otherwise it returns errHeld.
func (s *leases) acquireFromGone(ctx context.Context) (*lease, error) {
	if !s.other.locked {
		return nil, errHeld
	}
	seen := s.other
	lock, err := s.tryLock(ctx)
	if err != nil || lock == nil {
		return nil, cmp.Or(err, errHeld)
	}
	l, err := s.takeWithLock(ctx, lock, seen)
	if err != nil {
		s.unlock(ctx, lock)
	}
	return l, err
}

// takeWithLock waits, and takes a lease if it is as it was seen.
func (s *leases) takeWithLock(ctx context.Context, lock *pgsession.Lock, seen otherLease) (*lease, error) {
	const look = 4 // times meanwhile: then a process that lives can lock its lease again, and one that has stopped is not waited for
	for range look {
		select {
		case <-time.After(caution / look):
		case <-lock.Lost():
			return nil, errHeld
		case <-ctx.Done():
			return nil, errHeld
		}
		if err := s.peekAt(ctx); err != nil {
			return nil, err
		}
		if s.other.holder != seen.holder || s.other.epoch != seen.epoch || !s.other.locked || !s.other.expiresAt.Equal(seen.expiresAt) {
			return nil, errHeld
		}
	}
	// As in acquire, a relay that is told to stop waits for the answer.
	taking, cancel := wait.Grace(ctx, takeGrace)
	defer cancel()
	taken := make(chan *lease, 1)
	var over atomic.Bool // for one of the two, the statement and who waits for it; the other one comes second
	err := lock.Do(taking, func(ctx context.Context, conn *pgx.Conn) error {
		l, err := s.taken(func(read func(pgx.Rows) error) error {
			return pg.Query(ctx, conn, pg.Durable, read, s.takeFromGone, s.relay, s.holder, s.duration, seen.holder, seen.epoch, seen.expiresAt)
		})
		if err != nil {
			return err
		}
		taken <- l
		if over.Swap(true) { // nobody wants it any more
			_, err = conn.Exec(ctx, s.release, s.relay, l.holder, l.epoch)
		}
		return err
	})
	if err != nil && !over.Swap(true) {
		return nil, withoutSession(err)
	}
	l := <-taken
	l.claim.Store(newLockClaim(lock))
	return l, nil
}

// tryLock returns nil if another process has the lock of the lease, or nobody can tell.
func (s *leases) tryLock(ctx context.Context) (*pgsession.Lock, error) {
	lock, err := pgsession.Of(s.db).TryLock(ctx, s.schema, "relay:"+s.relay)
	if err = withoutSession(err); errors.Is(err, errHeld) {
		err = nil
	}
	return lock, err
}

// withoutSession returns errHeld for an error that says only that there is no session to tell whether a lock is free, which the
// session itself reports, or that the lease is in use.
func withoutSession(err error) error {
	answer, answered := errors.AsType[*pgconn.PgError](err)
	const conflict, locked = "40001", "55P03"
	if err == nil || answered && answer.Code != conflict && answer.Code != locked {
		return err
	}
	return errHeld
}

// unlockTimeout is how long a stop waits for an answer that changes nothing: the lock goes with the session.
const unlockTimeout = releaseTimeout / 4

// unlock gives a lock back, though ctx may have ended.
func (s *leases) unlock(ctx context.Context, lock *pgsession.Lock) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), unlockTimeout)
	defer cancel()
	lock.Unlock(ctx)
}

// claimSettings let a claim wait neither for the disk nor for a synchronous standby: one that a crash forgets costs a standby its quick
// takeover.
const claimSettings = `SELECT set_config('synchronous_commit', 'off', true)`

// sqlLeaseClaimLock changes nothing if the lease was renewed since: by a renewal that says that the lock is lost, for example, when
// this statement comes late.
const sqlLeaseClaimLock = `
UPDATE {schema}.outbox_lease SET locked_epoch = epoch
 WHERE name = $1::text AND holder = $2::text AND epoch = $3 AND expires_at = $4::timestamptz`

// lockFor takes the lock of a lease and says so in outbox_lease. It returns nil if that is not
// possible now. If the claim fails, for whatever reason, the lock is lost.
func (s *leases) lockFor(ctx context.Context, l *lease) (*lockClaim, error) {
	lock, err := s.tryLock(ctx)
	if err != nil || lock == nil {
		return nil, err
	}
	c := newLockClaim(lock)
	l.claim.Store(c) // the answer may get lost
	err = lock.Do(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return pg.Query(ctx, conn, claimSettings, func(rows pgx.Rows) error {
			rows.Close()
			if err := rows.Err(); err != nil || rows.CommandTag().RowsAffected() > 0 {
				return err
			}
			return errHeld
		}, s.claimLock, s.relay, l.holder, l.epoch, l.expiry())
	})
	if err != nil {
		s.unlock(ctx, lock)
	}
	return c, withoutSession(err)
}

// sqlLeaseRenew also renews a lease that has expired, if no other process took it. If $5 is not set, the lock of its
// holder is lost, and outbox_lease says so then; but not if the lease was renewed since $6, because this statement may come late and the
// lock be another one.
const sqlLeaseRenew = `
UPDATE {schema}.outbox_lease
   SET expires_at = clock_timestamp() + $4::interval, lasts = $4::interval,
       locked_epoch = CASE WHEN $5::bool OR expires_at <> $6::timestamptz THEN locked_epoch END
 WHERE name = $1::text AND holder = $2::text AND epoch = $3
RETURNING expires_at, locked_epoch IS NOT NULL`

// renew extends the lease, or returns errLeaseLost. If the lock is lost, outbox_lease may say so then.
func (s *leases) renew(ctx context.Context, l *lease) error {
	until := time.Now().Add(s.duration)
	c := l.claim.Load()
	keep := c == nil || !c.wasLost()
	var expiresAt time.Time
	var claimed bool
	// If a crash could forget that, a standby could take a lease that its holder believes to have.
	err := pg.Query(ctx, s.db, pg.Durable, func(rows pgx.Rows) error {
		_, err := pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (struct{}, error) {
			return struct{}{}, row.Scan(&expiresAt, &claimed)
		})
		return err
	}, s.renewal, s.relay, l.holder, l.epoch, s.duration, keep, l.expiry())
	if errors.Is(err, pgx.ErrNoRows) {
		return errLeaseLost
	}
	if err != nil {
		return fmt.Errorf("renew lease: %w", err)
	}
	l.renewed(until, expiresAt)
	if !keep && !claimed {
		l.withdrawn(c)
	}
	return nil
}

// releaseTimeout bounds the statement that lets a standby take over at once.
const releaseTimeout = 2 * time.Second

// sqlLeaseRelease ends the lease and keeps the row, because its epoch must grow.
const sqlLeaseRelease = `
UPDATE {schema}.outbox_lease
   SET expires_at = '-infinity'
 WHERE name = $1::text AND holder = $2::text AND epoch = $3`

// giveUp releases the lease, so that a standby takes over at once.
func (s *leases) giveUp(ctx context.Context, l *lease) error {
	if _, err := s.db.Exec(ctx, s.release, s.relay, l.holder, l.epoch); err != nil {
		return fmt.Errorf("release lease: %w", err)
	}
	return nil
}
