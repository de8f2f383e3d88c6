package lease

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/wait"
)

// GroupLease is the lease of a consumer group, for what one of its processes does for all of them. Handling events
// needs no lease. It is safe for concurrent use.
type GroupLease struct {
	mu    sync.Mutex // of Acquire
	store *Store
}

// NewGroupLease returns the lease of this name.
func NewGroupLease(db *pgxpool.Pool, schema, name string, duration time.Duration) *GroupLease {
	return &GroupLease{store: NewStore(db, schema, name, duration)}
}

// Name returns the name of the lease.
func (g *GroupLease) Name() string { return g.store.Relay }

// Acquire takes the lease, or returns [ErrHeld]. If this process has it already, the work under the old lease loses it.
func (g *GroupLease) Acquire(ctx context.Context) (*Lease, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, g.store.Duration)
	defer cancel()
	return g.store.Acquire(ctx)
}

// GiveUp releases the lease. If that fails, it expires.
func (g *GroupLease) GiveUp(l *Lease, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), min(patience, ReleaseTimeout))
	defer cancel()
	return g.store.GiveUp(ctx, l)
}

// Role is what one process of a consumer group does for all of them, while it has the lease of the group: it sends
// alerts, and works.
type Role struct {
	Lease       *GroupLease
	Name        string                            // of the lease, in the log
	Cut         context.Context                   // ended when no work is to go on
	Work        func(context.Context, Leadership) // until the context ends or the lease is lost
	Alert       func(context.Context)             // sends alerts until the context ends
	Report      func(began time.Time, err error)  // is told of each try to take the lease, before the work under it
	StopTimeout time.Duration
	Log         *slog.Logger
}

type epochKey struct{}

// EpochOf returns the epoch of the lease from the context of [Role.Alert].
func EpochOf(ctx context.Context) int64 {
	epoch, _ := ctx.Value(epochKey{}).(int64)
	return epoch
}

// Run takes the lease and works whenever this process can have it, until ctx is cancelled.
func (r *Role) Run(ctx context.Context) {
	for ctx.Err() == nil {
		began := time.Now()
		l, err := r.Lease.Acquire(ctx)
		pause := r.Lease.store.Duration
		if errors.Is(err, ErrHeld) {
			err = nil
		}
		if ctx.Err() == nil {
			r.Report(began, err) // before lead, which may not return for as long as the process runs
		}
		switch {
		case l != nil:
			r.lead(ctx, l)
		case err != nil:
			pause /= 3 // the outage may be over soon, and a worker is not ready before the lease answers
		}
		wait.Sleep(ctx, pause)
	}
}

// lead works, and sends alerts, until ctx is cancelled or the lease is lost.
func (r *Role) lead(ctx context.Context, l *Lease) {
	held, lose := context.WithCancelCause(r.Cut)
	leads := Leadership{Lease: l, Held: held, Lose: lose, StatementTimeout: r.Lease.store.Duration}
	renewing := contain.NewGroup(func(p *contain.Panic) { lose(p) })
	renewing.Go(func() { r.renew(leads) })
	alerting, stopAlerts := context.WithCancel(ctx)
	defer context.AfterFunc(held, stopAlerts)()
	renewing.Go(func() { r.Alert(context.WithValue(alerting, epochKey{}, l.Epoch)) })
	r.Work(ctx, leads)
	lost := errors.Is(context.Cause(held), ErrLeaseLost)
	lose(nil)
	renewing.Wait()
	if lost {
		return
	}
	const share = 4 // of the time that a stop has
	if err := r.Lease.GiveUp(l, r.StopTimeout/share); err != nil {
		r.Log.Warn("outbox: "+r.Name+" is not released, another process waits until it expires", "error", err)
	}
}

// renew renews the lease until held ends, and ends held when the lease is lost.
func (r *Role) renew(leads Leadership) {
	third := r.Lease.store.Duration / 3
	for {
		wait.Sleep(leads.Held, third)
		if leads.Held.Err() != nil {
			return
		}
		ctx, cancel := context.WithTimeout(leads.Held, third)
		err := r.Lease.store.Renew(ctx, leads.Lease)
		cancel()
		if errors.Is(err, ErrLeaseLost) || !leads.Lease.Held() {
			leads.Lose(ErrLeaseLost)
			return
		}
	}
}
