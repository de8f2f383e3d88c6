package outbox

import (
	"context"

	"github.com/outboxgo/outbox/internal/wait"
)

// keepWatch alerts to what is wrong until ctx is cancelled. It only reads, so it may
// go on for a moment after the lease is lost. While PostgreSQL fails it asks again
// soon, also what failed under an earlier lease.
func (r *Relay) keepWatch(ctx context.Context) {
	for {
		pause := r.cfg.Alerts.Interval
		if r.alertOutage.Current() != nil {
			pause = min(pause, r.alertOutage.Backoff())
		}
		wait.Await(ctx, ctx, r.checkNow, pause)
		if ctx.Err() != nil {
			return
		}
		err := r.watch.check(ctx)
		if ctx.Err() == nil {
			r.alertOutage.Report(err)
		}
	}
}
