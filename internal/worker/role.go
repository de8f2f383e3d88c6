package worker

import (
	"context"
	"log/slog"
	"time"

	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/retention"
)

// outageCleaning is what it is named in the log that the lease of the group cannot be taken.
const outageCleaning = "the lease for retention"

// newWorkerRole returns what removes rows, and alerts, while this process has the lease of the group. No batch
// goes on once cut has ended.
func newWorkerRole(w *Worker, group *lease.GroupLease, backlog func() bool, cut context.Context) *lease.Role {
	store := retention.NewStore(w.db, w.processor.Rules.Schema, w.cfg.Retention)
	store.Callback = w.archive.Call
	cleaner := &groupCleaner{name: group.Name(), store: store, cfg: w.cfg, backlog: backlog, log: w.processor.Log}
	return &lease.Role{
		Lease: group, Name: outageCleaning, Cut: cut, Work: cleaner.run, Alert: w.alert, StopTimeout: w.processor.Rules.StopTimeout, Log: w.processor.Log,
		Report: func(began time.Time, err error) { w.outages.Report(outageCleaning, began, err) },
	}
}

// groupCleaner removes rows that are not kept any longer, unless a relay has a position: then rows are for
// relays to remove.
type groupCleaner struct {
	name    string // of the lease
	store   *retention.Store
	cfg     *Rules
	backlog func() bool // of events to hand over
	log     *slog.Logger
}

// run cleans until ctx is cancelled or the lease is lost.
func (g *groupCleaner) run(ctx context.Context, leads lease.Leadership) {
	retention.NewCleaner(leads, retention.CleanerConfig{
		Name: g.name, Rules: g.cfg.Retention, Poll: g.cfg.PollInterval, WithoutFailed: true, Removed: g.cfg.RowsRemoved,
		MayRun: func(ctx context.Context) (bool, error) {
			has, err := g.store.HasRelay(ctx)
			return !has, err
		},
	}, g.store, g.backlog, g.log).Run(ctx)
}
