// Package lease decides which process of a relay, or of a group, works: the one that has the row of outbox_lease.
//
// Holder and epoch prove a lease. Each statement that moves a cursor locks the row with this holder and epoch FOR
// SHARE, which waits for a takeover's UPDATE; so a relay that has lost its lease cannot move the cursor. A new epoch
// is above every epoch in outbox_cursor, even after an operator has emptied the table. The cursor is read in a later
// statement than the one that took the lease, because a statement that waits for a lock reads what was committed
// before it began.
//
// The holder checks its lease by its own monotonic clock, counted from before the statement that renewed it, and
// before each send. A process that was stopped for long finds out before it sends. The lease is renewed after a third
// of its duration, only while the holder makes progress. A send is bounded by one and a half DeliveryTimeout, which
// is shorter than Lease, so a send ends before the lease does. A clean stop releases the lease, and a standby takes
// over at once.
//
// If the process is gone, a standby takes over within about a second: the holder also has a session advisory lock,
// which PostgreSQL frees, and outbox_lease.locked_epoch says that it has the lock. A standby that gets the lock
// waits [RecheckFor], and takes the lease if the row has not changed. A free lock alone proves nothing. A holder
// whose connection breaks makes its next renewal withdraw the claim, and sends nothing until that has succeeded.
// Until the lease of the predecessor would have expired ([Lease.Exclusive]) nothing is retried, nothing dies and no
// decision of an operator frees a key, so the last records of the predecessor arrive in order.
//
// A process that was stopped past its lease can still send only the batch in flight. The cursor stands before
// that batch, and the successor sends the same events first, so first arrivals keep their order.
package lease

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/pgsession"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/trace"
	"github.com/outboxgo/outbox/internal/wait"
)

var (
	// ErrHeld means that another process holds the lease.
	ErrHeld = errors.New("lease is held by another relay")
	// ErrLeaseLost means that holder and epoch no longer stand in outbox_lease.
	ErrLeaseLost = errors.New("lease is lost")
)

// Lease is the right to work. Holder and Epoch prove it.
//
// A session advisory lock, which PostgreSQL frees when this process is gone, makes a takeover quick. PostgreSQL also
// frees the lock when only the connection is gone. So outbox_lease says that the lock goes with the lease, and the
// holder sends nothing while outbox_lease says so and the lock is lost.
type Lease struct {
	Holder string
	Epoch  int64
	// ExclusiveAt is when no earlier holder of the lease can send any more, by the monotonic clock
	// of this process. The lease of a holder that was taken for gone may not have expired yet.
	// Until then, this process only sends and parks. An earlier holder could still send an event
	// that this process marks dead or that an operator resolves, behind later events of its key.
	ExclusiveAt time.Time
	// Until is when the lease expires by the monotonic clock of this process. It
	// counts from before the statement that took or renewed the lease, so by the clock
	// of the database the lease expires later. Written by the goroutine that renews,
	// read by the one that sends.
	Until atomic.Pointer[time.Time]
	// Claim is the lock that outbox_lease names, or may name; nil if there is none.
	Claim atomic.Pointer[LockClaim]

	mu        sync.Mutex
	expiresAt time.Time // as outbox_lease has it, if the last renewal was answered
}

// LockClaim says that the lock of a lease is held, or was.
type LockClaim struct {
	Lock      *pgsession.Lock
	Lost      <-chan struct{} // closed once the lock is
	Withdrawn chan struct{}   // closed once outbox_lease says so no longer
}

func newLockClaim(lock *pgsession.Lock) *LockClaim {
	return &LockClaim{Lock: lock, Lost: lock.Lost(), Withdrawn: make(chan struct{})}
}

// WasLost reports whether the lock is free: PostgreSQL gives the lease to the first process that takes the lock.
func (c *LockClaim) WasLost() bool {
	select {
	case <-c.Lost:
		return true
	default:
		return false
	}
}

// Exclusive reports whether no process can send any more that had the lease before.
func (l *Lease) Exclusive() bool { return !time.Now().Before(l.ExclusiveAt) }

// AwaitExclusive waits until Exclusive, or until ctx ends.
func (l *Lease) AwaitExclusive(ctx context.Context) { wait.Sleep(ctx, time.Until(l.ExclusiveAt)) }

// Withdrawn records that outbox_lease no longer says that a lock goes with the lease.
func (l *Lease) Withdrawn(c *LockClaim) {
	if l.Claim.CompareAndSwap(c, nil) {
		close(c.Withdrawn)
	}
}

// Sure reports whether no process can have taken the lease because it took this one for gone.
func (l *Lease) Sure() bool {
	c := l.Claim.Load()
	return c == nil || !c.WasLost()
}

// AwaitSure waits until Sure. It returns early when stop or held ends.
func (l *Lease) AwaitSure(stop, held context.Context) {
	for c := l.Claim.Load(); c != nil && c.WasLost(); c = l.Claim.Load() {
		select {
		case <-c.Withdrawn:
		case <-stop.Done():
			return
		case <-held.Done():
			return
		}
	}
}

// Renewed records a renewal: until by the clock of this process, expiresAt by that of the database.
func (l *Lease) Renewed(until, expiresAt time.Time) {
	l.mu.Lock()
	l.expiresAt = expiresAt
	l.mu.Unlock()
	l.Until.Store(&until)
}

// Expiry returns the time in outbox_lease, as of the last renewal that was answered.
func (l *Lease) Expiry() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.expiresAt
}

// Held reports whether the lease has certainly not expired. A process that was stopped for long finds out here,
// before any timer has fired.
func (l *Lease) Held() bool { return time.Now().Before(*l.Until.Load()) }

// Expire makes Held false after the lease was released.
func (l *Lease) Expire() {
	var past time.Time
	l.Until.Store(&past)
}

// Leadership is what the parts of a relay share while the relay leads.
type Leadership struct {
	Lease *Lease
	// Held ends when the lease is lost, when a relay that was told to stop takes too
	// long to finish its batch, and at the end of a clean stop. The cause says which.
	Held context.Context
	Lose context.CancelCauseFunc // ends held
	// StatementTimeout is the duration of the lease.
	StatementTimeout time.Duration
}

// NewGroup returns a group for goroutines that work under the lease. If one panics, the work under the lease ends.
func (l *Leadership) NewGroup() *contain.Group {
	return contain.NewGroup(func(p *contain.Panic) { l.Lose(p) })
}

// StatementContext returns a context for one statement.
type StatementContext func() (context.Context, context.CancelFunc)

// WithStatementTimeout returns a context for one statement. Only a rebase has no time limit. A connection can go
// dead without notice, and TCP needs a quarter of an hour to find out. Meanwhile a leader would do nothing with the
// lease that is renewed on another connection.
func (l *Leadership) WithStatementTimeout() (context.Context, context.CancelFunc) {
	return context.WithTimeout(l.Held, l.StatementTimeout)
}

// otherLease is the lease of another process.
type otherLease struct {
	Holder string
	// Lasts is how long the lease lasts at most if its holder is gone; 0 if it does not expire.
	Lasts time.Duration
	// SetBack is by how much the clock of the database was set back since the holder
	// renewed the lease, if that delays a takeover.
	SetBack time.Duration

	epoch     int64
	expiresAt time.Time // as outbox_lease has it
	Locked    bool      // its holder has the lock, or had it

	Kafka     time.Time // when Kafka last answered the holder, by the clock of this process; zero if it did not
	Unreached bool      // Kafka does not answer the holder, as it says
}

// Ended reports whether a cutover has ended the relay, and to what the holder has handed over: nothing sends as this
// relay any more.
func (o *otherLease) Ended() (to string, ended bool) {
	if o.Lasts != 0 {
		return "", false
	}
	return tables.HandedOver(o.Holder)
}

// Store takes, renews and releases the lease of a name.
type Store struct {
	DB       *pgxpool.Pool
	Schema   string
	Relay    string
	holder   string
	Duration time.Duration

	// Other is the lease of another process, as of the last Acquire. Only Acquire and its caller use it.
	Other otherLease

	// Blocked is called with a session that keeps the row of an expired lease locked, or with the error of looking for
	// it. By default it does nothing.
	Blocked func(h pg.Holder, err error)

	// Says returns the state that a renewal writes, and when Kafka last answered, or zero. Nil says nothing.
	Says func() (outage.State, time.Time)
	// HeardElsewhere is called with the time at which Kafka last answered a process that stands by, by the clock of
	// this process, if a renewal finds one. Nil ignores it.
	HeardElsewhere func(time.Time)

	said atomic.Pointer[outage.State] // as the last renewal has written it

	Peek, Take, takeFromGone, Renewal, ClaimLock, Release, elsewhere string
}

// NewStore returns the store of a name in a schema. It does no I/O.
func NewStore(db *pgxpool.Pool, schema, relay string, duration time.Duration) *Store {
	return &Store{
		DB: db, Schema: schema, Relay: relay, holder: NewHolder(), Duration: duration, Blocked: func(pg.Holder, error) {},
		Peek:         pg.InSchema(sqlLeasePeek, schema),
		Take:         pg.InSchema(sqlLeaseTake, schema),
		takeFromGone: pg.InSchema(sqlLeaseTakeFromGone, schema),
		Renewal:      pg.InSchema(sqlLeaseRenew, schema),
		ClaimLock:    pg.InSchema(sqlLeaseClaimLock, schema),
		Release:      pg.InSchema(sqlLeaseRelease, schema),
		elsewhere:    pg.InSchema(sqlLeaseElsewhere, schema),
	}
}

// NewHolder returns a name of this process for operators. Its random part makes the name a proof.
func NewHolder() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%.150s/%d/%s", host, os.Getpid(), uuid.NewString())
}

// sqlLeasePeek reads the lease of another process. It locks nothing: a standby runs it every poll interval, and must
// neither write nor wait. A lease that expires later than its duration from now was taken or renewed before the
// clock of the database was set back.
const sqlLeasePeek = `
SELECT holder, epoch,
       coalesce(CASE WHEN isfinite(expires_at) THEN greatest(lasts, expires_at - clock_timestamp()) END, '0'),
       coalesce(CASE WHEN isfinite(expires_at) THEN expires_at - clock_timestamp() - lasts END, '0'),
       CASE WHEN isfinite(expires_at) THEN expires_at END, coalesce(isfinite(expires_at) AND locked_epoch = epoch, false),
       clock_timestamp() - kafka_at, coalesce(state ->> 'epoch' = epoch::text AND state @> '{"outages": [{"what": "Kafka"}]}'::jsonb, false)
  FROM {schema}.outbox_lease
 WHERE name = $1::text AND holder <> $2::text AND expires_at > clock_timestamp()`

// leaseTaken returns what the process learns of the lease that it has taken. exclusive_at counts for an hour at
// most: a longer wait means that the clock of the database was set back.
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

// Acquire takes the lease, or returns ErrHeld.
func (s *Store) Acquire(ctx context.Context) (*Lease, error) {
	if err := s.peekAt(ctx); err != nil {
		return nil, err
	}
	if s.Other.Holder != "" {
		return nil, ErrHeld
	}
	// If the relay is told to stop now, it waits for the answer: PostgreSQL may have given
	// it the lease, and a standby would have to wait until that expires.
	taking, cancel := wait.Grace(ctx, takeGrace)
	defer cancel()
	defer s.endBlocking(taking)()
	return s.taken(func(read func(pgx.Rows) error) error {
		return pg.Query(taking, s.DB, pg.Durable, read, s.Take, s.Relay, s.holder, s.Duration)
	})
}

// endBlocking ends the session that the statement which takes the lease waits for, until stop is called. A process that
// was frozen, or cut off, while PostgreSQL sent it events or waited for its COMMIT, has the row of its lease locked for
// as long as the session lives. Its lease has expired, so whatever it is at would fail.
func (s *Store) endBlocking(ctx context.Context) (stop func()) {
	waits := pg.WaitsOf(s.DB)
	end := waits.Begin()
	ctx, cancel := context.WithCancel(ctx)
	var looking sync.WaitGroup
	looking.Go(func() {
		for wait.Sleep(ctx, lookEvery); ctx.Err() == nil; wait.Sleep(ctx, lookEvery) {
			// Not under ctx: the statement has its lock once the other session has ended, which is to be logged.
			holders, _, err := waits.Look(context.WithoutCancel(ctx), s.DB, s.Schema, s.Duration/2)
			if err != nil {
				s.Blocked(pg.Holder{}, err)
			}
			for _, h := range holders {
				s.Blocked(h, nil)
			}
		}
	})
	return func() {
		cancel()
		looking.Wait()
		_ = end(nil)
	}
}

// lookEvery is how often the session is looked for that keeps the lease, once the statement has waited for a second.
const lookEvery = time.Second / 4

// peekAt reads the lease of another process into Other.
func (s *Store) peekAt(ctx context.Context) error {
	s.Other = otherLease{}
	var expiresAt pgtype.Timestamptz
	var sinceKafka *time.Duration
	err := pg.QueryRow(ctx, s.DB, s.Peek, s.Relay, s.holder).
		Scan(&s.Other.Holder, &s.Other.epoch, &s.Other.Lasts, &s.Other.SetBack, &expiresAt, &s.Other.Locked, &sinceKafka, &s.Other.Unreached)
	s.Other.expiresAt = expiresAt.Time
	if sinceKafka != nil {
		s.Other.Kafka = time.Now().Add(-*sinceKafka)
	}
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("read lease: %w", err)
	}
	return nil
}

// taken runs a statement that takes the lease, and returns the lease. The statement is durable: if a crash could
// forget an epoch, it would be given out twice.
func (s *Store) taken(query func(read func(pgx.Rows) error) error) (*Lease, error) {
	l := &Lease{Holder: s.holder}
	until := time.Now().Add(s.Duration)
	var expiresAt time.Time
	var shared time.Duration
	var step trace.Step
	if trace.On {
		step = trace.Begin("take")
	}
	err := query(func(rows pgx.Rows) error {
		_, err := pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (struct{}, error) {
			return struct{}{}, row.Scan(&l.Epoch, &expiresAt, &shared)
		})
		return err
	})
	if trace.On {
		step.End("ok", err == nil, "no", errors.Is(err, pgx.ErrNoRows), "epoch", l.Epoch)
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrHeld
	}
	if err != nil {
		return nil, fmt.Errorf("take lease: %w", err)
	}
	l.ExclusiveAt = time.Now().Add(shared)
	s.said.Store(&outage.State{More: -1}) // nothing under this epoch yet
	l.Renewed(until, expiresAt)
	return l, nil
}

// sqlLeaseRenew renews a lease, even an expired one that no other process has taken. If $5 is false, the lock of the
// holder is lost, and outbox_lease says so from now on; but not if the lease was renewed since $6, because this
// statement may come late and the lock be another one.
const sqlLeaseRenew = `
UPDATE {schema}.outbox_lease
   SET expires_at = clock_timestamp() + $4::interval, lasts = $4::interval,
       locked_epoch = CASE WHEN $5::bool OR expires_at <> $6::timestamptz THEN locked_epoch END,
       state = $7::text::jsonb, state_at = clock_timestamp(), kafka_at = clock_timestamp() - $8::interval
 WHERE name = $1::text AND holder = $2::text AND epoch = $3
RETURNING expires_at, locked_epoch IS NOT NULL, clock_timestamp() - elsewhere_at`

// Renew extends the lease, or returns ErrLeaseLost. If the lock is lost, outbox_lease may say so afterwards.
func (s *Store) Renew(ctx context.Context, l *Lease) error {
	until := time.Now().Add(s.Duration)
	c := l.Claim.Load()
	keep := c == nil || !c.WasLost()
	var expiresAt time.Time
	var claimed bool
	var sinceElsewhere *time.Duration
	says, state, sinceKafka := s.says(l)
	var step trace.Step
	if trace.On {
		step = trace.Begin("renew", "epoch", l.Epoch, "keep", keep)
	}
	// If a crash could forget that, a standby could take a lease that its holder believes to have.
	err := pg.Query(ctx, s.DB, pg.Durable, func(rows pgx.Rows) error {
		_, err := pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (struct{}, error) {
			return struct{}{}, row.Scan(&expiresAt, &claimed, &sinceElsewhere)
		})
		return err
	}, s.Renewal, s.Relay, l.Holder, l.Epoch, s.Duration, keep, l.Expiry(), state, sinceKafka)
	if trace.On {
		step.End("ok", err == nil, "no", errors.Is(err, pgx.ErrNoRows), "claimed", claimed)
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return ErrLeaseLost
	}
	if err != nil {
		return fmt.Errorf("renew lease: %w", err)
	}
	l.Renewed(until, expiresAt)
	s.said.Store(&says)
	if sinceElsewhere != nil && s.HeardElsewhere != nil {
		s.HeardElsewhere(time.Now().Add(-*sinceElsewhere))
	}
	if !keep && !claimed {
		l.Withdrawn(c)
	}
	return nil
}

// ReleaseTimeout bounds the statement that lets a standby take over at once.
const ReleaseTimeout = 2 * time.Second

// sqlLeaseRelease ends the lease and keeps the row, because its epoch must grow.
const sqlLeaseRelease = `
UPDATE {schema}.outbox_lease
   SET expires_at = '-infinity'
 WHERE name = $1::text AND holder = $2::text AND epoch = $3`

// GiveUp releases the lease, so a standby takes over at once.
func (s *Store) GiveUp(ctx context.Context, l *Lease) error {
	var step trace.Step
	if trace.On {
		step = trace.Begin("release", "epoch", l.Epoch)
	}
	_, err := pg.Exec(ctx, s.DB, s.Release, s.Relay, l.Holder, l.Epoch)
	if trace.On {
		step.End("ok", err == nil)
	}
	if err != nil {
		return fmt.Errorf("release lease: %w", err)
	}
	return nil
}
