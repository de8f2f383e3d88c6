package outbox

import (
	"context"
)

// keepWatch alerts to what is wrong until ctx is cancelled. It only reads, so it may
// go on for a moment after the lease is lost. While PostgreSQL fails it asks again
// soon, also what failed under an earlier lease.
func (r *Relay) keepWatch(ctx context.Context) {
	for {
		wait := r.cfg.Alerts.Interval
		if r.alertsPostgres.failing() {
			wait = min(wait, r.alertsPostgres.backoff())
		}
		await(ctx, ctx, r.alarm, wait)
		if ctx.Err() != nil {
			return
		}
		err := r.watch.check(ctx)
		if ctx.Err() == nil {
			r.alertsPostgres.report(err)
		}
	}
}
