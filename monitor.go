package outbox

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/internal/watch"
)

// newWatch returns what alerts beside a relay that leads. breaker is the relay's.
func newWatch(db *pgxpool.Pool, cfg RelayConfig, breaker *breaker) *watch.Watch {
	return watch.New(watch.NewStore(db, cfg.Schema), watch.Config{
		Settings:      cfg.Alerts.settings().WithDefaults(),
		Relay:         cfg.Name,
		BreakerClosed: func() bool { return breaker.state() == BreakerClosed },
		Deliver:       func(ctx context.Context, a watch.Alert) error { return cfg.Alerts.Alerter.Alert(ctx, alertOf(a)) },
		Logger:        cfg.Logger,
	})
}

func alertOf(a watch.Alert) Alert {
	alert := Alert{Kind: AlertKind(a.Kind), Relay: a.Relay, Over: a.Over, At: a.At, Status: RelayStatus(a.Status), Died: a.Died,
		Group: a.Group, Topic: a.Topic, Lost: a.Lost}
	for _, f := range a.Dead {
		alert.Dead = append(alert.Dead, DeadEvent{FailedEvent: FailedEvent(f.Event), ID: f.ID, FailedAt: f.FailedAt})
	}
	for _, c := range a.Unresolved {
		alert.Unresolved = append(alert.Unresolved, FailedCount(c))
	}
	return alert
}

// monitor sends the alerts of a relay. It works beside the session. Its outage may last
// longer than a lease, so there is one monitor for all leases of a relay.
type monitor struct {
	watch    *watch.Watch
	outage   *outage.Log     // PostgreSQL
	checkNow <-chan struct{} // wake requests
}

// run checks at intervals until ctx is cancelled. It only reads, so it may go on for a
// moment after the lease is lost. While PostgreSQL fails it backs off, also from a
// failure under an earlier lease.
func (m *monitor) run(ctx context.Context) {
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
