// Package retention removes rows that are kept no longer: of outbox, outbox_cursor, outbox_failed, event_handled,
// outbox_audit and event_delivery, and whole partitions of outbox.
//
// The process that has the lease of a relay, or of a group of workers, runs a [Cleaner]. It works in small
// transactions, reads by the primary key where the last run ended, pauses four times as long as a slow batch took,
// and begins no batch while there is a backlog to send. However old, a row of outbox goes only when every relay with
// a cursor in the schema has published it and the workers of every group have taken it. An Archive of the host gets
// the rows in the transaction that removes them.
//
// A batch proves the lease at the end of its transaction, because an Archive may take long and the renewal of the
// lease must not wait for it.
//
// Partitions of outbox are ranges of ids. Functions of 0002_partitions.sql make and drop them with the
// rights of the owner. There are always some ahead of the highest id, and larger ones behind these, so that
// each id has a partition, even if no relay works for long. Only empty partitions are divided. A partition
// is dropped after a review of its rows.
package retention

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math"
	"time"

	"github.com/outboxgo/outbox/internal/lease"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
)

// Cleaner removes rows that are kept no longer, alongside the work of the process. It shares with that work only the
// leadership, and whether there is a backlog.
type Cleaner struct {
	lease.Leadership
	cfg        CleanerConfig
	store      *Store
	hasBacklog func() bool // of events to send
	log        *slog.Logger
	outages    *outage.Logs

	Published, cursors, handled, audited, delivered Scan               // each continues where its last run ended
	partitions                                      map[string]*Scan   // the same by partition, where rows are removed one by one
	reviews                                         map[string]*Review // of partitions to drop, as far as they have come
	young                                           map[string]bool    // partitions with a young row that have been reported
	lagging                                         laggingRelay
	archiverReported                                bool     // the log says that published rows stay for the archive of another process
	huge                                            hugeRows // that this run has found
}

// CleanerConfig is what a relay or a worker tells its cleaner.
type CleanerConfig struct {
	Name    string // of the lease
	Rules   Rules
	Poll    time.Duration // between two checks whether a backlog is gone
	Removed func(Result)  // nil for none

	// MayRun says whether to remove anything in this run. Nil means always.
	MayRun func(context.Context) (bool, error)
	// WithoutFailed leaves outbox_failed alone.
	WithoutFailed bool
}

// laggingRelay is a relay, or a group of workers, that has not published or taken events that are old enough to be
// removed.
type laggingRelay struct {
	name     string // "" for none
	foreign  bool   // its position was not written in this cluster
	reported bool
}

// errStopping ends a batch that is not finished in time.
var errStopping = errors.New("retention is told to stop")

// NewCleaner returns a cleaner. It does no I/O. The outages last longer than a cleaner: one that costs a process its
// lease ends under the next one.
func NewCleaner(leads lease.Leadership, cfg CleanerConfig, store *Store, hasBacklog func() bool, log *slog.Logger, outages *outage.Logs) *Cleaner {
	return &Cleaner{Leadership: leads, cfg: cfg, store: store, hasBacklog: hasBacklog, log: log, outages: outages}
}

// cursorsAgain is how many runs there are between two scans of all of outbox_cursor.
const cursorsAgain = 6

const (
	// cleanGrace is how long a batch may take when the relay is told to stop. Batches are short,
	// and an archive may already have the rows. Rows of a transaction that is rolled back come to
	// the archive again.
	cleanGrace = time.Second
	// ArchiveGrace is how long an Archive may take that does not heed the end of its
	// context.
	ArchiveGrace = 500 * time.Millisecond
)

// Run removes rows at intervals until ctx is cancelled; then it finishes the current batch, if that takes no longer
// than cleanGrace.
func (c *Cleaner) Run(ctx context.Context) {
	held, lose := context.WithCancelCause(c.Held)
	defer lose(nil)
	stopped := context.AfterFunc(ctx, func() {
		wait.Sleep(held, cleanGrace)
		lose(errStopping)
	})
	defer stopped()
	c.Held = held
	pause := func(took time.Duration) bool { return c.Pause(ctx, took) }
	c.Published = Scan{Batch: c.RemovePublished, Pause: pause}
	// Rows that say where events are stay as long as the events, so a scan from the start is not short.
	c.cursors = Scan{Batch: c.bounded(c.removeCursors), Pause: pause, Again: cursorsAgain * c.cfg.Rules.Interval()}
	c.handled = Scan{Batch: c.bounded(c.store.handled), Pause: pause}
	c.audited = Scan{Batch: c.bounded(c.store.Audited), Pause: pause}
	c.delivered = Scan{Batch: c.bounded(c.store.delivered), Pause: pause}
	if c.cfg.Rules.Archive != nil && c.mayRun(ctx) {
		_, _ = c.mayRemovePublished() // the first run tries again and reports an error
	}
	for {
		wait.Await(ctx, c.Held, nil, c.cfg.Rules.Interval())
		if !c.Pause(ctx, 0) {
			return
		}
		start := time.Now()
		if !c.mayRun(ctx) {
			continue
		}
		result, err := c.runTasks(ctx)
		if errors.Is(err, lease.ErrLeaseLost) {
			return
		}
		c.notify(result, time.Since(start))
	}
}

// mayRun reports whether this cleaner is to remove rows in this run.
func (c *Cleaner) mayRun(ctx context.Context) bool {
	if c.cfg.MayRun == nil {
		return true
	}
	start := time.Now()
	bounded, cancel := c.WithStatementTimeout()
	defer cancel()
	ok, err := c.cfg.MayRun(bounded)
	if ctx.Err() == nil && c.Held.Err() == nil {
		c.outages.Report("retention", start, err)
	}
	return ok && err == nil
}

// cleanerTask removes rows of one table.
type cleanerTask struct {
	name string // in the log of outages
	keep time.Duration
	run  func(context.Context) (removed int64, err error)
	sum  *int64
}

// runTasks removes rows from each table. A failure for one table delays no other; the loss of the
// lease ends all.
func (c *Cleaner) runTasks(ctx context.Context) (sum Result, err error) {
	resolved := Scan{Batch: c.bounded(c.removeResolved), Pause: c.Published.Pause}
	var made int64
	for _, task := range []cleanerTask{
		{"partitions of outbox", 0, c.makePartitions, &made},
		{"retention of outbox", c.cfg.Rules.PublishedFor, c.CleanOutbox, &sum.Published},
		{"retention of outbox_cursor", c.cfg.Rules.CursorsFor, c.cursors.Run, &sum.Cursors},
		{"retention of outbox_failed", c.cfg.Rules.ResolvedFor, resolved.Run, &sum.Resolved},
		{"retention of event_handled", c.cfg.Rules.HandledFor, c.handled.Run, &sum.Handled},
		{"retention of outbox_audit", c.cfg.Rules.AuditedFor, c.audited.Run, &sum.Audited},
		{"retention of event_delivery", c.cfg.Rules.DeliveredFor, c.delivered.Run, &sum.Delivered},
	} {
		if task.keep == forever || task.sum == &sum.Resolved && c.cfg.WithoutFailed || ctx.Err() != nil || c.Held.Err() != nil {
			continue
		}
		start := time.Now()
		*task.sum, err = task.run(ctx)
		switch {
		case errors.Is(err, lease.ErrLeaseLost):
			return sum, err
		case errors.Is(err, ErrBusy):
		case c.Held.Err() == nil:
			c.outages.Report(task.name, start, err)
		}
	}
	return sum, nil
}

// Pause waits after a batch: longer after a slow batch, and as long as there is a backlog to send. It reports
// whether to go on.
func (c *Cleaner) Pause(ctx context.Context, took time.Duration) bool {
	wait.Await(ctx, c.Held, nil, c.cfg.Rules.PauseAfter(took))
	for c.hasBacklog() && ctx.Err() == nil && c.Held.Err() == nil {
		wait.Await(ctx, c.Held, nil, c.cfg.Poll)
	}
	return ctx.Err() == nil && c.Held.Err() == nil
}

// RemovePublished removes a batch of published events. Cancelling ctx does not end a batch; Run ends it after
// cleanGrace.
func (c *Cleaner) RemovePublished(_ context.Context, after int64) (Step, error) {
	s, err := c.removeBatch(after, math.MaxInt64, func(ctx context.Context) (Step, error) {
		return c.store.Published(ctx, c.proof(), after)
	})
	c.huge.add(s.huge)
	if err == nil && !s.More {
		c.reportLagging(s)
	}
	return s, err
}

// reportHuge logs how many events that were found in a run are too large for the archive.
func (c *Cleaner) reportHuge() {
	if c.huge.n > 0 {
		c.log.Warn("outbox: events are too large for the archive, so their rows of outbox stay until you remove them",
			"count", c.huge.n, "first_id", c.huge.first, "at_most", c.store.Most)
	}
}

// bounded returns remove as a batch of a [Scan], which ends after the timeout of a statement. Cancelling the context
// of a batch does not end it; Run ends it after cleanGrace.
func (c *Cleaner) bounded(remove func(ctx context.Context, after int64) (Step, error)) func(context.Context, int64) (Step, error) {
	return func(_ context.Context, after int64) (Step, error) {
		ctx, cancel := c.WithStatementTimeout()
		defer cancel()
		return remove(ctx, after)
	}
}

func (c *Cleaner) removeCursors(ctx context.Context, after int64) (Step, error) {
	return c.store.Cursors(ctx, c.proof(), after)
}

func (c *Cleaner) removeResolved(ctx context.Context, _ int64) (Step, error) {
	return c.store.Resolved(ctx, c.proof())
}

func (c *Cleaner) proof() *Proof { return &Proof{c.Lease, c.cfg.Name} }

// reportLagging logs once which relay or group keeps rows that are old enough to be removed. It logs after two runs
// with the same relay, because an old row may have been committed just now.
func (c *Cleaner) reportLagging(s Step) {
	now := laggingRelay{name: cmp.Or(s.Foreign, s.Lagging), foreign: s.Foreign != ""}
	if now.name != c.lagging.name || now.foreign != c.lagging.foreign {
		c.lagging = now
		return
	}
	if now.name == "" || c.lagging.reported {
		return
	}
	c.lagging.reported = true
	switch {
	case now.foreign:
		c.log.Warn("outbox: the newest position of a relay or a group was not written in this database cluster, so no published event is removed; "+
			"a process of the relay or group moves the position here when it starts; if there is none any more, delete its rows of outbox_cursor",
			attrOf("foreign", now.name)...)
	case tables.IsGroup(now.name):
		c.log.Warn("outbox: the workers of a consumer group have not taken events that are old enough to go, so they stay; "+
			"if the group is gone for good, delete its rows of outbox_cursor and event_subscription", append(attrOf("lagging", now.name), "older_than", c.cfg.Rules.PublishedFor)...)
	default:
		c.log.Warn("outbox: a relay has not published events that are old enough to go, so they stay; "+
			"if it is gone for good, delete its rows of outbox_cursor", append(attrOf("lagging", now.name), "older_than", c.cfg.Rules.PublishedFor)...)
	}
}

// notify logs how many rows were removed and calls the hook.
func (c *Cleaner) notify(sum Result, took time.Duration) {
	c.log.Debug("outbox: rows removed", "published", sum.Published, "cursors", sum.Cursors, "resolved", sum.Resolved,
		"handled", sum.Handled, "audited", sum.Audited, "delivered", sum.Delivered, "took", took.Round(time.Millisecond))
	if c.cfg.Removed != nil && sum.total() > 0 {
		c.cfg.Removed(sum)
	}
}
