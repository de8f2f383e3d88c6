package outbox

import (
	"context"
)

// keepWatch alerts to what is wrong until ctx is cancelled. It only reads, so it may
// go on for a moment after the lease is lost.
func (r *Relay) keepWatch(ctx context.Context) {
	postgres := trouble{log: r.log, what: "PostgreSQL, for alerts,"}
	for {
		await(ctx, ctx, r.alarm, r.cfg.Alerts.Interval)
		if ctx.Err() != nil {
			return
		}
		err := r.watch.check(ctx)
		if ctx.Err() == nil {
			postgres.report(err)
		}
	}
}
