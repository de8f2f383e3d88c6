package outbox

import (
	"context"
	"errors"
	"github.com/outboxgo/outbox/internal/lease"
	"log/slog"
	"math"
	"strings"
	"time"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
)

// cleaner removes rows that are not kept any longer. It works beside the session and
// shares with it only the leadership, and whether there is a backlog.
type cleaner struct {
	lease.Leadership
	cfg        cleanerConfig
	store      *retention
	hasBacklog func() bool // of events to send
	log        *slog.Logger
	outages    *outage.Logs

	published, handled, audited, delivered walk             // each continues where its last run ended
	partitions                             map[string]*walk // the same by partition, where rows are removed one by one
	review                                 *review          // of the next partition to drop; nil: not begun
	lagging                                laggingRelay
}

// cleanerConfig is what a cleaner is told by its relay or worker.
type cleanerConfig struct {
	name      string // of the lease
	rules rules
	poll      time.Duration         // how often it looks whether a backlog is gone
	removed   func(result) // nil for none

	// mayRun says whether to remove anything at all in this run. Nil means that it does.
	mayRun func(context.Context) (bool, error)
	// withoutFailed leaves outbox_failed alone.
	withoutFailed bool
}

// laggingRelay is a relay, or a consumer group of workers, that has not published events which are old enough to go.
type laggingRelay struct {
	name     string // "" for none
	reported bool
}

// errTold ends a batch that is not finished in time.
var errTold = errors.New("retention is told to stop")

func newCleaner(leads lease.Leadership, cfg cleanerConfig, store *retention, hasBacklog func() bool, log *slog.Logger) *cleaner {
	return &cleaner{Leadership: leads, cfg: cfg, store: store, hasBacklog: hasBacklog, log: log, outages: outage.NewLogs(log)}
}

const (
	// cleanGrace is how long a batch may take when the relay is told to stop. Batches are
	// short, and an archive may already have the rows; what is rolled back comes again.
	cleanGrace = time.Second
	// archiveGrace is how long an Archive may take that does not heed the end of its
	// context.
	archiveGrace = 500 * time.Millisecond
)

// run removes rows at intervals until ctx is cancelled; then it finishes the current
// batch, if that takes no longer than cleanGrace.
func (c *cleaner) run(ctx context.Context) {
	held, lose := context.WithCancelCause(c.Held)
	defer lose(nil)
	stopped := context.AfterFunc(ctx, func() {
		wait.Sleep(held, cleanGrace)
		lose(errTold)
	})
	defer stopped()
	c.Held = held
	pause := func(took time.Duration) bool { return c.pause(ctx, took) }
	c.published = walk{batch: c.removePublished, pause: pause}
	c.handled = walk{batch: c.removeHandled, pause: pause}
	c.audited = walk{batch: c.removeAudited, pause: pause}
	c.delivered = walk{batch: c.removeDelivered, pause: pause}
	for {
		wait.Await(ctx, c.Held, nil, c.cfg.rules.Interval)
		if !c.pause(ctx, 0) {
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

// mayRun reports whether rows are for this cleaner to remove.
func (c *cleaner) mayRun(ctx context.Context) bool {
	if c.cfg.mayRun == nil {
		return true
	}
	start := time.Now()
	bounded, cancel := c.WithStatementTimeout()
	defer cancel()
	ok, err := c.cfg.mayRun(bounded)
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

// runTasks removes rows from each table. A failure for one table holds up no other; the
// loss of the lease ends all.
func (c *cleaner) runTasks(ctx context.Context) (sum result, err error) {
	cursors := walk{batch: c.removeCursors, pause: c.published.pause}
	resolved := walk{batch: c.removeResolved, pause: c.published.pause}
	var made int64
	for _, task := range []cleanerTask{
		{"partitions of outbox", 0, c.makePartitions, &made},
		{"retention of outbox", c.cfg.rules.PublishedFor, c.cleanOutbox, &sum.Published},
		{"retention of outbox_cursor", c.cfg.rules.CursorsFor, cursors.run, &sum.Cursors},
		{"retention of outbox_failed", c.cfg.rules.ResolvedFor, resolved.run, &sum.Resolved},
		{"retention of event_handled", c.cfg.rules.HandledFor, c.handled.run, &sum.Handled},
		{"retention of outbox_audit", c.cfg.rules.AuditedFor, c.audited.run, &sum.Audited},
		{"retention of event_delivery", c.cfg.rules.DeliveredFor, c.delivered.run, &sum.Delivered},
	} {
		if task.keep == forever || task.sum == &sum.Resolved && c.cfg.withoutFailed || ctx.Err() != nil || c.Held.Err() != nil {
			continue
		}
		start := time.Now()
		*task.sum, err = task.run(ctx)
		switch {
		case errors.Is(err, lease.ErrLeaseLost):
			return sum, err
		case errors.Is(err, errBusy):
		case c.Held.Err() == nil:
			c.outages.Report(task.name, start, err)
		}
	}
	return sum, nil
}

// pause waits after a batch: longer after a batch that took long, and as long as there is
// a backlog to send. It reports whether to go on.
func (c *cleaner) pause(ctx context.Context, took time.Duration) bool {
	wait.Await(ctx, c.Held, nil, c.cfg.rules.pause(took))
	for c.hasBacklog() && ctx.Err() == nil && c.Held.Err() == nil {
		wait.Await(ctx, c.Held, nil, c.cfg.poll)
	}
	return ctx.Err() == nil && c.Held.Err() == nil
}

// Cancelling ctx does not end a batch; run ends it after cleanGrace.

func (c *cleaner) removePublished(_ context.Context, after int64) (step, error) {
	s, err := c.removeBatch(after, math.MaxInt64, func(ctx context.Context) (step, error) {
		return c.store.published(ctx, c.proof(), after)
	})
	if err == nil && !s.more {
		c.reportLagging(s.lagging)
	}
	return s, err
}

// removeBatch calls remove for rows of outbox above an id. If PostgreSQL cannot print one
// for the archive, that row stays, and remove is called again for the others.
func (c *cleaner) removeBatch(after, end int64, remove func(context.Context) (step, error)) (s step, err error) {
	for {
		ctx, cancel := c.WithStatementTimeout()
		s, err = remove(ctx)
		cancel()
		if c.cfg.rules.Archive == nil || !cannotPrint(err) || !c.keepUnprintable(after, end) {
			return s, err
		}
	}
}

// keepUnprintable finds the first row of a batch that PostgreSQL cannot print and keeps it
// from the archive. It returns false if there is none, or if it finds out nothing.
func (c *cleaner) keepUnprintable(after, end int64) bool {
	ctx, cancel := c.WithStatementTimeout()
	last, cause := c.store.lastPrintable(ctx, after, end)
	cancel()
	if !cannotPrint(cause) || c.Held.Err() != nil {
		return false
	}
	ctx, cancel = c.WithStatementTimeout()
	defer cancel()
	id, err := c.store.keepNext(ctx, last, end)
	if err != nil {
		return false
	}
	c.log.Error("outbox: an event cannot be archived, because PostgreSQL cannot print it, so its row of outbox stays; "+
		"it is tried again when another process leads", "id", id, "error", cause)
	return true
}

func (c *cleaner) removeCursors(_ context.Context, after int64) (step, error) {
	ctx, cancel := c.WithStatementTimeout()
	defer cancel()
	return c.store.cursors(ctx, c.proof(), after)
}

func (c *cleaner) removeResolved(context.Context, int64) (step, error) {
	ctx, cancel := c.WithStatementTimeout()
	defer cancel()
	return c.store.resolved(ctx, c.proof())
}

func (c *cleaner) removeHandled(_ context.Context, after int64) (step, error) {
	ctx, cancel := c.WithStatementTimeout()
	defer cancel()
	return c.store.handled(ctx, after)
}

func (c *cleaner) removeAudited(_ context.Context, after int64) (step, error) {
	ctx, cancel := c.WithStatementTimeout()
	defer cancel()
	return c.store.audited(ctx, after)
}

func (c *cleaner) removeDelivered(_ context.Context, after int64) (step, error) {
	ctx, cancel := c.WithStatementTimeout()
	defer cancel()
	return c.store.delivered(ctx, after)
}

func (c *cleaner) proof() *proof { return &proof{c.Lease, c.cfg.name} }

// reportLagging logs once which relay or group keeps back rows that are old enough to go. It takes
// two runs with the same relay, because an old row may have been committed just now.
func (c *cleaner) reportLagging(relay string) {
	if relay != c.lagging.name {
		c.lagging = laggingRelay{name: relay}
		return
	}
	if relay == "" || c.lagging.reported {
		return
	}
	c.lagging.reported = true
	if group, ok := strings.CutPrefix(relay, tables.WorkerPrefix); ok {
		c.log.Warn("outbox: the workers of a consumer group have not taken events that are old enough to go, so they stay; "+
			"if the group is gone for good, delete its rows of outbox_cursor and event_subscription", "lagging_group", group, "older_than", c.cfg.rules.PublishedFor)
		return
	}
	c.log.Warn("outbox: a relay has not published events that are old enough to go, so they stay; "+
		"if it is gone for good, delete its rows of outbox_cursor", "lagging_relay", relay, "older_than", c.cfg.rules.PublishedFor)
}

// notify logs how many rows were removed and calls the hook.
func (c *cleaner) notify(sum result, took time.Duration) {
	c.log.Debug("outbox: rows removed", "published", sum.Published, "cursors", sum.Cursors, "resolved", sum.Resolved,
		"handled", sum.Handled, "audited", sum.Audited, "delivered", sum.Delivered, "took", took.Round(time.Millisecond))
	if c.cfg.removed != nil && sum.total() > 0 {
		c.cfg.removed(sum)
	}
}
