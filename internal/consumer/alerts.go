package consumer

import (
	"context"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/tables"
)

// leaseForAlerts is the name of the lease in the log.
const leaseForAlerts = "the lease for alerts"

// startAlerts sends the alerts of the group while this process has the group's lease for alerts. It
// ends when stop is called, which waits for it, or when ctx is cancelled. Workers have another lease:
// a group that moves from workers to Kafka has both, and workers delete rows under theirs.
//
// An outage of the lease does not make the consumer unready, because events are handled without it.
func (c *Consumer) startAlerts(ctx context.Context) (stop func()) {
	if c.Alert == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	role := &lease.Role{
		Lease: lease.NewGroupLease(c.db, c.Rules.Schema, tables.ConsumerPrefix+c.Rules.Group, c.Rules.SessionTimeout), Name: leaseForAlerts,
		Cut: context.WithoutCancel(ctx), Work: awaitEnd, Alert: c.Alert, StopTimeout: c.Rules.StopTimeout, Log: c.Rules.Log,
		Report: func(_ time.Time, err error) { c.alerting.Report(err) },
	}
	var alerting sync.WaitGroup
	alerting.Go(func() { role.Run(ctx) })
	return func() {
		cancel()
		alerting.Wait()
	}
}

// awaitEnd waits until ctx or the lease ends. Alerts are all that the lease is for.
func awaitEnd(ctx context.Context, leads lease.Leadership) {
	select {
	case <-ctx.Done():
	case <-leads.Held.Done():
	}
}
