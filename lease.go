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

	"github.com/outboxgo/outbox/internal/pg"
)

var (
	// errHeld means that another process holds the lease.
	errHeld = errors.New("lease is held by another relay")
	// errLeaseLost means that holder and epoch no longer stand in outbox_lease.
	errLeaseLost = errors.New("lease is lost")
)

// lease is the right to relay, and its proof: holder and epoch.
type lease struct {
	holder string
	epoch  int64
	// until is a time of this process's monotonic clock at which the lease is
	// still ours by the clock of the database: it counts from before the
	// statement that took or renewed it. Written by the renewing goroutine,
	// read by the sending one.
	until atomic.Pointer[time.Time]
}

// held reports whether the lease surely has not expired. A process that was
// stopped for long finds out here, before a timer had the chance to fire.
func (l *lease) held() bool { return time.Now().Before(*l.until.Load()) }

// leases takes, renews and releases the lease of a relay name.
type leases struct {
	db       *pgxpool.Pool
	relay    string
	holder   string
	duration time.Duration

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

// newHolder tells an operator where to look; the random part makes it a proof.
func newHolder() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%.150s/%d/%s", host, os.Getpid(), uuid.NewString())
}

// sqlLeasePeek looks before anything is locked: a standby asks every poll
// interval, and must neither write nor wait.
const sqlLeasePeek = `
SELECT EXISTS (SELECT FROM {schema}.outbox_lease
                WHERE name = $1::text AND holder <> $2::text AND expires_at > clock_timestamp())`

// sqlLeaseTake takes a lease that is free, has expired, or became ours by a try
// whose answer got lost. The new epoch is above every epoch in outbox_cursor, so
// that a relay from before somebody emptied the lease table does not pass for
// the new one. What it reads of outbox_cursor may be as old as the statement;
// then the row of outbox_lease is the newer.
const sqlLeaseTake = `
INSERT INTO {schema}.outbox_lease AS l (name, holder, epoch, expires_at)
SELECT $1::text, $2::text, 1 + coalesce((SELECT c.epoch FROM {schema}.outbox_cursor c
                              WHERE c.relay = $1::text ORDER BY c.id DESC LIMIT 1), 0),
       clock_timestamp() + $3::interval
    ON CONFLICT (name) DO UPDATE
   SET holder = excluded.holder, epoch = greatest(l.epoch + 1, excluded.epoch),
       expires_at = clock_timestamp() + $3::interval
 WHERE l.expires_at <= clock_timestamp() OR l.holder = excluded.holder
RETURNING epoch`

// acquire takes the lease, or returns errHeld.
func (s *leases) acquire(ctx context.Context) (*lease, error) {
	var taken bool
	if err := s.db.QueryRow(ctx, s.peek, s.relay, s.holder).Scan(&taken); err != nil {
		return nil, fmt.Errorf("look at lease: %w", err)
	}
	if taken {
		return nil, errHeld
	}
	l := &lease{holder: s.holder}
	until := time.Now().Add(s.duration)
	err := s.db.QueryRow(ctx, s.take, s.relay, s.holder, s.duration).Scan(&l.epoch)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, errHeld
	}
	if err != nil {
		return nil, fmt.Errorf("take lease: %w", err)
	}
	l.until.Store(&until)
	return l, nil
}

// sqlLeaseRenew also revives a lease that has expired and that nobody took.
const sqlLeaseRenew = `
UPDATE {schema}.outbox_lease
   SET expires_at = clock_timestamp() + $4::interval
 WHERE name = $1::text AND holder = $2::text AND epoch = $3`

// renew extends the lease, or returns errLeaseLost.
func (s *leases) renew(ctx context.Context, l *lease) error {
	until := time.Now().Add(s.duration)
	tag, err := s.db.Exec(ctx, s.renewal, s.relay, l.holder, l.epoch, s.duration)
	if err != nil {
		return fmt.Errorf("renew lease: %w", err)
	}
	if tag.RowsAffected() == 0 {
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

// giveUp lets a standby take over at once.
func (s *leases) giveUp(ctx context.Context, l *lease) error {
	if _, err := s.db.Exec(ctx, s.release, s.relay, l.holder, l.epoch); err != nil {
		return fmt.Errorf("release lease: %w", err)
	}
	return nil
}
