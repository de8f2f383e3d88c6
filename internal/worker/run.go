package worker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/pgsession"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// run is one run of a worker, from the call of Run to its return.
type run struct {
	worker    *Worker
	engine    *delivery.Run
	admission *admission
	lease     *lease.GroupLease
}

func newRun(w *Worker) *run {
	rules, routes := w.processor.Rules, w.processor.Routes
	r := &run{worker: w, lease: lease.NewGroupLease(w.db, rules.Schema, tables.WorkerPrefix+w.Group(), w.cfg.Lease)}
	r.engine = delivery.NewRun(delivery.Parts{
		Rules: w.delivery, Db: w.db, Processor: w.processor, Slots: handling.CallSlots{Transactions: w.slots},
		Breakers: w.breakers, Pauses: w.pauses, Outages: w.outages, Wake: w.wake, Heard: w.heard,
		Read: delivery.ReadOutboxDelivery, Pairs: delivery.PairsOf(routes), Report: w.report, Others: r.backlog,
	})
	r.admission = &admission{
		cfg: w.cfg, delivery: w.delivery, dispatcher: r.engine.Dispatcher, processor: w.processor, log: w.processor.Log,
		lease: r.lease, hooks: r.engine.Hooks, starting: true,
	}
	r.admission.fanOut = newFanOut(w.db, rules.Schema, w.Group(), routesOf(routes), r.engine.Store, w.delivery.StopGrace(), w.processor.Log, r.admission.plan)
	r.admission.fanOut.unordered = w.cfg.Unordered
	r.engine.Dispatcher.TakeNew = r.admission.takeNew
	r.engine.Confirm = r.admission.fanOut.confirm
	return r
}

// backlog counts the events of the group that have no delivery yet.
func (r *run) backlog(ctx context.Context) (counts []tables.EventCount, reasons []string, err error) {
	const most = 1000
	if r.admission.getsNoEvents() {
		return nil, nil, nil
	}
	w := r.worker
	g, err := tables.Group(ctx, w.db, pg.InSchema(tables.SQLPositions, w.processor.Rules.Schema), w.Group(), most)
	if err != nil || g.Pending == 0 {
		return nil, nil, err
	}
	return []tables.EventCount{{Group: w.Group(), Status: tables.StatusPending, Events: int(g.Pending), More: g.PendingMore, Oldest: g.Oldest}}, nil, nil
}

// prepare waits for PostgreSQL, checks that the tables belong to this release, and reads the pauses of
// operators, before any event is handled.
func (r *run) prepare(ctx context.Context) error {
	return r.engine.Prepare(ctx, func(ctx context.Context) error {
		return errors.Join(r.worker.notes.Check(ctx), r.readPauses(ctx))
	})
}

// run works until ctx is cancelled.
func (r *run) run(ctx context.Context) error {
	w := r.worker
	defer context.AfterFunc(ctx, w.state.Stop)()
	background, end := context.WithCancel(context.WithoutCancel(ctx))
	var others sync.WaitGroup
	member := w.hub.Join(w.wake, w.heard, w.processor.Log)
	defer member.Close()
	others.Go(func() { r.listen(background, member) })
	others.Go(func() { r.watchPauses(background) })
	others.Go(func() { newRole(w, r.lease, r.admission.hasBacklog, r.engine.Cut).Run(r.engine.Stopping) })
	r.admission.beginFirst(ctx)
	err := r.engine.Run(ctx)
	end()
	others.Wait()
	return err
}

// listen listens for notifications while this process has the lock of its group, and then polls often for
// events. The other processes of the group poll at their interval, and take the events that this process
// has not taken. Behind a pooler PostgreSQL gives no session to listen in, so every process polls at its
// interval. The session is examined again later, as a machine that stood still looks like a pooler.
func (r *run) listen(ctx context.Context, member *wakeup.Member) {
	log, s := r.worker.processor.Log, pgsession.Of(r.worker.db)
	defer s.Use(log)()
	const unavailable, held = 100 * time.Millisecond, time.Second // waits before the next try
	for ctx.Err() == nil {
		if s.State() == pgsession.Pooled {
			wait.Sleep(ctx, held)
			continue
		}
		lock, err := s.TryLock(ctx, r.worker.delivery.Schema, tables.WorkerPrefix+r.worker.Group())
		switch {
		case err != nil:
			if !errors.Is(err, pgsession.ErrUnavailable) && ctx.Err() == nil {
				log.Debug("outbox: the lock of the group cannot be taken, new events wait for the next poll", "error", err)
			}
			wait.Sleep(ctx, unavailable)
			continue
		case lock == nil:
			wait.Sleep(ctx, held)
			continue
		}
		r.engine.Dispatcher.Listens.Store(true)
		member.Lead(true)
		select {
		case <-lock.Lost():
		case <-ctx.Done():
		}
		member.Lead(false)
		r.engine.Dispatcher.Listens.Store(false)
		lock.Unlock(ctx)
	}
}

// watchPauses reads the pauses of operators until ctx is cancelled. In an outage of PostgreSQL the pauses
// that were read last stay in force.
func (r *run) watchPauses(ctx context.Context) {
	for ctx.Err() == nil {
		wait.Sleep(ctx, handling.PausesInterval)
		began := time.Now()
		err := r.readPauses(ctx)
		if err != nil {
			err = fmt.Errorf("the pauses that were read last stay in force: %w", err)
		}
		if ctx.Err() == nil {
			r.worker.outages.Report(handling.OutagePauses, began, err)
		}
	}
}

func (r *run) readPauses(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, handling.PausesTimeout)
	defer cancel()
	now, err := r.worker.operators.Read(ctx)
	if err != nil {
		return err
	}
	before := r.worker.pauses.SetStored(now)
	handling.LogPauses(r.worker.processor.Log, "worker", before, now)
	if len(now) < len(before) {
		r.engine.Dispatcher.SignalDue()
	}
	return nil
}
