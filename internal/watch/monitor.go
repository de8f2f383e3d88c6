package watch

import (
	"context"
	"log/slog"
	"time"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/wait"
)

// Monitor checks at intervals what a [Watch] watches, alongside the work of a relay, a worker or a consumer. An outage
// may last longer than a lease, so a process has one monitor for all its leases.
type Monitor struct {
	watch    *Watch
	outage   *outage.Log     // PostgreSQL
	checkNow <-chan struct{} // wake requests
}

// NewMonitor returns a monitor that also checks at each wake request. checkNow may be nil.
func NewMonitor(store Store, cfg Config, log *slog.Logger, checkNow <-chan struct{}) *Monitor {
	return &Monitor{watch: New(store, cfg), outage: outage.NewLog(log, "PostgreSQL, for alerts,"), checkNow: checkNow}
}

// Lead notes the epoch of the lease under which the next Run checks. A process that has the lease again, and no other
// process has had it in between, alerts to all deaths since its last check.
func (m *Monitor) Lead(epoch int64) { m.watch.lead(epoch) }

// Run checks until ctx is cancelled. It only reads, so it may go on for a moment after the lease is lost. While
// PostgreSQL fails, it backs off, also from a failure under an earlier lease. Another process may have alerted between
// two leases, so under a new one it tells receivers anew what holds, and what does not.
func (m *Monitor) Run(ctx context.Context) {
	m.watch.beginTerm()
	for {
		pause := m.watch.Interval()
		if m.outage.Current() != nil {
			pause = min(pause, m.outage.Backoff())
		}
		wait.Await(ctx, ctx, m.checkNow, pause)
		if ctx.Err() != nil {
			return
		}
		err := m.watch.Check(ctx)
		if ctx.Err() == nil {
			m.outage.Report(err)
		}
	}
}

// Takeover returns the [Config.Takeover] of a group with a lease: the lease expires, and then another process looks
// for it, and each takes as long as the lease.
func Takeover(lease time.Duration) time.Duration { return 2 * lease }
