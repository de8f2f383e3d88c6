package outbox

import (
	"context"
	"errors"
	"time"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/wait"
)

// cleaner removes what is kept no longer. It works beside the session and shares
// nothing with it but the lease, and the knowledge of a backlog.
type cleaner struct {
	*Relay
	lease *lease
	held  context.Context
	store *retention
	waits func() bool // there is a backlog to send
	fails *outage.Logs

	published, handled walk             // from where they stood in the last run
	parts              map[string]*walk // the same by partition, where rows go one by one
	review             *review          // of the partition that goes next; nil: not begun
	standing           string           // relay that held rows back in the last run; "" if none
	told               bool             // the log has its name
}

func newCleaner(s *session) *cleaner {
	c := &cleaner{Relay: s.Relay, lease: s.lease, held: s.held, store: s.retention, waits: s.behind.Load, fails: outage.NewLogs(s.log)}
	return c
}

// run cleans now and then until ctx is cancelled; then it finishes the batch in
// its hands.
func (c *cleaner) run(ctx context.Context) {
	rest := func(took time.Duration) bool { return c.rest(ctx, took) }
	c.published = walk{batch: c.cleanPublished, rest: rest}
	c.handled = walk{batch: c.cleanHandled, rest: rest}
	for {
		wait.Await(ctx, c.held, nil, c.cfg.Retention.Interval)
		if !c.rest(ctx, 0) {
			return
		}
		start := time.Now()
		done, err := c.round(ctx)
		if errors.Is(err, errLeaseLost) {
			return
		}
		c.tell(done, time.Since(start))
	}
}

// round removes from each table what may go. Trouble with one holds up no other;
// the loss of the lease ends it.
func (c *cleaner) round(ctx context.Context) (done RetentionResult, err error) {
	rest := c.published.rest
	cursors := walk{batch: c.cleanCursors, rest: rest}
	resolved := walk{batch: c.cleanResolved, rest: rest}
	var made int64
	for _, task := range []struct {
		name string
		keep time.Duration
		run  func(context.Context) (int64, error)
		gone *int64
	}{
		{"partitions of outbox", 0, c.makePartitions, &made},
		{"retention of outbox", c.cfg.Retention.PublishedFor, c.cleanOutbox, &done.Published},
		{"retention of outbox_cursor", c.cfg.Retention.CursorsFor, cursors.run, &done.Cursors},
		{"retention of outbox_failed", c.cfg.Retention.ResolvedFor, resolved.run, &done.Resolved},
		{"retention of event_handled", c.cfg.Retention.HandledFor, c.handled.run, &done.Handled},
	} {
		if task.keep == Forever || ctx.Err() != nil || c.held.Err() != nil {
			continue
		}
		start := time.Now()
		*task.gone, err = task.run(ctx)
		switch {
		case errors.Is(err, errLeaseLost), errors.Is(err, errBusy):
		case c.held.Err() == nil:
			c.fails.Report(task.name, start, err)
		}
		if errors.Is(err, errLeaseLost) {
			return done, err
		}
	}
	return done, nil
}

// rest gives way: for longer after a batch that took long, and while there is a
// backlog. It reports whether to go on.
func (c *cleaner) rest(ctx context.Context, took time.Duration) bool {
	wait.Await(ctx, c.held, nil, c.cfg.Retention.pause(took))
	for c.waits() && ctx.Err() == nil && c.held.Err() == nil {
		wait.Await(ctx, c.held, nil, c.cfg.PollInterval)
	}
	return ctx.Err() == nil && c.held.Err() == nil
}

// The batches are not torn by ctx: they are short, and an archive may have what it
// was given.

func (c *cleaner) cleanPublished(_ context.Context, after int64) (step, error) {
	ctx, cancel := c.soon(c.held)
	defer cancel()
	s, err := c.store.published(ctx, c.proof(), after)
	if err == nil && !s.more {
		c.reportStanding(s.standing)
	}
	return s, err
}

func (c *cleaner) cleanCursors(_ context.Context, after int64) (step, error) {
	ctx, cancel := c.soon(c.held)
	defer cancel()
	return c.store.cursors(ctx, c.proof(), after)
}

func (c *cleaner) cleanResolved(context.Context, int64) (step, error) {
	ctx, cancel := c.soon(c.held)
	defer cancel()
	return c.store.resolved(ctx, c.proof())
}

func (c *cleaner) cleanHandled(_ context.Context, after int64) (step, error) {
	ctx, cancel := c.soon(c.held)
	defer cancel()
	return c.store.handled(ctx, after)
}

func (c *cleaner) proof() *proof { return &proof{c.lease, c.cfg.Name} }

// reportStanding says once which relay holds back rows that are old enough. In two
// runs, because an old row may have been committed just now.
func (c *cleaner) reportStanding(relay string) {
	if relay != c.standing {
		c.standing, c.told = relay, false
		return
	}
	if relay == "" || c.told {
		return
	}
	c.told = true
	c.log.Warn("outbox: a relay has not published events that are old enough to go, so they stay; "+
		"if it is gone for good, delete its rows of outbox_cursor", "standing", relay, "older_than", c.cfg.Retention.PublishedFor)
}

func (c *cleaner) tell(done RetentionResult, took time.Duration) {
	c.log.Debug("outbox: cleaned", "published", done.Published, "cursors", done.Cursors, "resolved", done.Resolved, "handled", done.Handled,
		"took", took.Round(time.Millisecond))
	if c.cfg.Hooks.RowsRemoved != nil && done.total() > 0 {
		c.cfg.Hooks.RowsRemoved(done)
	}
}
