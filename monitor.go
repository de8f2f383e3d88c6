package outbox

import (
	"context"
	breakers "github.com/outboxgo/outbox/internal/breaker"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/internal/watch"
)

// newWatch returns what alerts beside a relay that leads. breaker is the relay's; staleEvents gets
// after each check what waits for too long.
func newWatch(db *pgxpool.Pool, cfg RelayConfig, breaker *breakers.Breaker, staleEvents func([]tables.EventCount)) *watch.Watch {
	return watch.New(watch.NewStore(db, cfg.Schema), watch.Config{
		Settings:      cfg.Alerts.settings().WithDefaults(),
		Relay:         cfg.Name,
		BreakerClosed: func() bool { return breaker.State() == breakers.Closed },
		StaleEvents:   staleEvents,
		Deliver:       cfg.Alerts.deliver,
		Logger:        cfg.Logger,
	})
}

// groupWatch says for whom a group monitor is.
type groupWatch struct {
	store    watch.Store
	group    string
	consumes bool          // it is a group of consumers, not of workers
	lease    time.Duration // of the group
}

// newGroupMonitor returns what alerts beside a worker, or a consumer, that has the lease of its group. A lease
// expires, and then another process looks for it, each of which takes as long as the lease.
func newGroupMonitor(of groupWatch, alerts AlertConfig, log *slog.Logger) *monitor {
	return &monitor{outage: outage.NewLog(log, "PostgreSQL, for alerts,"), watch: watch.New(of.store, watch.Config{
		Settings: alerts.settings().WithDefaults(),
		Group:    of.group,
		Consumes: of.consumes,
		Takeover: 2 * of.lease,
		Deliver:  alerts.deliver,
		Logger:   log,
	})}
}

func (c AlertConfig) deliver(ctx context.Context, a watch.Alert) error {
	return c.Alerter.Alert(ctx, alertOf(a))
}

func alertOf(a watch.Alert) Alert {
	alert := Alert{Kind: AlertKind(a.Kind), Relay: a.Relay, Group: a.Group, Over: a.Over, At: a.At, Status: RelayStatus(a.Status), Died: a.Died,
		Topic: a.Topic, Lost: a.Lost}
	for _, d := range a.Dead {
		alert.Dead = append(alert.Dead, DeadEvent{FailedEvent: FailedEvent(d.Event), ID: d.ID, Group: d.Group, Action: d.Action, FailedAt: d.FailedAt})
	}
	alert.Counts = countsOf(a.Counts)
	return alert
}

func countsOf(all []tables.EventCount) (counts []EventCount) {
	for _, c := range all {
		counts = append(counts, EventCount(c))
	}
	return counts
}

// monitor sends the alerts of a relay, a worker or a consumer, beside its work. Its outage may last
// longer than a lease, so there is one monitor for all leases of each.
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
