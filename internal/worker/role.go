package worker

import (
	"context"
	"log/slog"
	"time"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/mover"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/retention"
)

// outageCleaning is the name of an outage in the log: the lease of the group cannot be taken.
const outageCleaning = "the lease for retention"

// newRole returns the role of the process that holds the lease of the group: it removes rows, moves delayed
// events, and sends alerts. The end of cut aborts a batch of the cleaner and a look of the mover.
func newRole(w *Worker, group *lease.GroupLease, backlog func() bool, cut context.Context) *lease.Role {
	store := retention.NewStore(w.db, w.processor.Rules.Schema, w.cfg.Retention)
	store.Callback, store.Most = w.archive.Call, check.MaxEventBytes
	log := w.processor.Log
	cleaner := &groupCleaner{name: group.Name(), store: store, cfg: w.cfg, backlog: backlog, log: log, outages: outage.NewLogs(log)}
	moves := mover.NewOutages(log)
	work := func(ctx context.Context, leads lease.Leadership) {
		parts := leads.NewGroup()
		parts.Go(func() { w.moveDelayed(ctx, leads, moves) })
		parts.Go(func() { cleaner.run(ctx, leads) })
		parts.Wait()
	}
	return &lease.Role{
		Lease: group, Name: outageCleaning, Cut: cut, Work: work, Alert: w.alert,
		StopTimeout: w.processor.Rules.StopTimeout, Log: log,
		Report: func(began time.Time, err error) { w.outages.Report(outageCleaning, began, err) },
	}
}

// moveDelayed moves delayed events that are due until ctx is cancelled or the lease is lost. Health reads moves.
func (w *Worker) moveDelayed(ctx context.Context, leads lease.Leadership, moves mover.Outages) {
	w.moves.Store(moves.Move)
	defer w.moves.Store(nil)
	mover.New(mover.Config{
		DB: w.db, Schema: w.processor.Rules.Schema, Poll: w.cfg.PollInterval, Timeout: leads.StatementTimeout, Moved: w.hub.Wake,
		Log: w.processor.Log, Outages: moves,
	}).Run(ctx, leads.Held)
}

// groupCleaner removes rows by the rules of retention. If the schema has a relay, it removes none: the
// relay does it.
type groupCleaner struct {
	name    string // of the lease
	store   *retention.Store
	cfg     *Rules
	backlog func() bool // reports whether more events wait than the lanes can take
	log     *slog.Logger
	outages *outage.Logs
}

// run cleans until ctx is cancelled or the lease is lost.
func (g *groupCleaner) run(ctx context.Context, leads lease.Leadership) {
	retention.NewCleaner(leads, retention.CleanerConfig{
		Name: g.name, Rules: g.cfg.Retention, Poll: g.cfg.PollInterval, WithoutFailed: true, Removed: g.cfg.RowsRemoved,
		MayRun: func(ctx context.Context) (bool, error) {
			has, err := g.store.HasRelay(ctx)
			return !has, err
		},
	}, g.store, g.backlog, g.log, g.outages).Run(ctx)
}
