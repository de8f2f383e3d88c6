package consumer

import (
	"context"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/tables"
)

// leaseForAlerts is what the lease is named in the log.
const leaseForAlerts = "the lease for alerts"

// startAlerts sends the alerts of the group while this process has the lease for them, which is one for all members
// of the group, until stop is called, which waits for it, or ctx is cancelled. It is not the lease of the group's
// workers: while a group moves to Kafka it has both, and workers remove rows under theirs.
//
// Nothing here makes a consumer unready: it handles events all the same.
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

// awaitEnd is the work of a process that only alerts.
func awaitEnd(ctx context.Context, leads lease.Leadership) {
	select {
	case <-ctx.Done():
	case <-leads.Held.Done():
	}
}
