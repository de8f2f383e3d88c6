package outbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

var (
	// errHeld means that another process holds the lease.
	errHeld = errors.New("lease is held by another relay")
	// errLeaseLost means that holder and epoch no longer stand in outbox_lease.
	errLeaseLost = errors.New("lease is lost")
)

// lease is the right to relay. Holder and epoch prove it.
type lease struct {
	holder string
	epoch  int64
	// until is when the lease expires by the monotonic clock of this process. It
	// counts from before the statement that took or renewed the lease, so by the clock
	// of the database the lease expires later. Written by the goroutine that renews,
	// read by the one that sends.
	until atomic.Pointer[time.Time]
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
}

// leases takes, renews and releases the lease of a relay name.
type leases struct {
	db       *pgxpool.Pool
	relay    string
	holder   string
	duration time.Duration

	// other is the lease of another process, as acquire has seen it last. Only acquire and
	// its caller use it.
	other otherLease

	peek, take, renewal, release string
}

func newLeases(db *pgxpool.Pool, schema, relay string, duration time.Duration) *leases {
	return &leases{
		db: db, relay: relay, holder: newHolder(), duration: duration,
		peek:    pg.InSchema(sqlLeasePeek, schema),
		take:    pg.InSchema(sqlLeaseTake, schema),
		renewal: pg.InSchema(sqlLeaseRenew, schema),
		release: pg.InSchema(sqlLeaseRelease, schema),
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
SELECT count(*) > 0, coalesce(max(holder), ''),
       coalesce(max(CASE WHEN isfinite(expires_at) THEN greatest(lasts, expires_at - clock_timestamp()) END), '0'),
       coalesce(max(CASE WHEN isfinite(expires_at) THEN expires_at - clock_timestamp() - lasts END), '0')
  FROM {schema}.outbox_lease
 WHERE name = $1::text AND holder <> $2::text AND expires_at > clock_timestamp()`

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
       expires_at = clock_timestamp() + $3::interval, lasts = excluded.lasts
 WHERE l.expires_at <= clock_timestamp() OR l.holder = excluded.holder
RETURNING epoch`

// takeGrace is how long a relay that is told to stop waits for the statement that takes
// the lease.
const takeGrace = time.Second

// acquire takes the lease, or returns errHeld.
func (s *leases) acquire(ctx context.Context) (*lease, error) {
	var taken bool
	if err := s.db.QueryRow(ctx, s.peek, s.relay, s.holder).Scan(&taken, &s.other.holder, &s.other.lasts, &s.other.setBack); err != nil {
		return nil, fmt.Errorf("look at lease: %w", err)
	}
	if taken {
		return nil, errHeld
	}
	// If the relay is told to stop now, it waits for the answer: PostgreSQL may have given
	// it the lease, and a standby would have to wait until that expires.
	taking, cancel := wait.Grace(ctx, takeGrace)
	defer cancel()
	l := &lease{holder: s.holder}
	until := time.Now().Add(s.duration)
	// If a crash could forget an epoch, it would be given out twice.
	err := pg.Query(taking, s.db, pg.Durable, func(rows pgx.Rows) (err error) {
		l.epoch, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[int64])
		return err
	}, s.take, s.relay, s.holder, s.duration)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, errHeld
	}
	if err != nil {
		return nil, fmt.Errorf("take lease: %w", err)
	}
	l.until.Store(&until)
	return l, nil
}

// sqlLeaseRenew also renews a lease that has expired, if no other process took it.
const sqlLeaseRenew = `
UPDATE {schema}.outbox_lease
   SET expires_at = clock_timestamp() + $4::interval, lasts = $4::interval
 WHERE name = $1::text AND holder = $2::text AND epoch = $3`

// renew extends the lease, or returns errLeaseLost.
func (s *leases) renew(ctx context.Context, l *lease) error {
	until := time.Now().Add(s.duration)
	renewed := false
	// If a crash could forget that, a standby could take a lease that its holder believes to have.
	err := pg.Query(ctx, s.db, pg.Durable, func(rows pgx.Rows) error {
		rows.Close()
		renewed = rows.CommandTag().RowsAffected() > 0
		return rows.Err()
	}, s.renewal, s.relay, l.holder, l.epoch, s.duration)
	if err != nil {
		return fmt.Errorf("renew lease: %w", err)
	}
	if !renewed {
		return errLeaseLost
	}
	l.until.Store(&until)
	return nil
}

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
