package retention

import (
	"context"
	"errors"
	"time"
)

// makePartitions makes partitions ahead of need, if outbox is partitioned.
func (c *Cleaner) makePartitions(context.Context) (int64, error) {
	ctx, cancel := c.WithStatementTimeout()
	defer cancel()
	is, err := c.store.isPartitioned(ctx)
	if err != nil || !is {
		return 0, err
	}
	n, err := c.store.MakePartitions(ctx)
	if n > 0 {
		c.log.Debug("outbox: partitions made", "n", n)
	}
	return int64(n), err
}

// CleanOutbox removes published rows: one by one from a plain table, and with their
// partition from a partitioned one. The default partition is never dropped, and of large
// ones the rows are many; from these, too, rows are removed one by one.
func (c *Cleaner) CleanOutbox(ctx context.Context) (removed int64, err error) {
	c.huge = hugeRows{}
	defer c.reportHuge()
	partitions, err := c.listPartitions()
	if err != nil {
		return 0, err
	}
	if len(partitions) == 0 {
		return c.Published.Run(ctx)
	}
	if removed, err = c.dropOld(ctx, partitions); err != nil && !errors.Is(err, ErrBusy) {
		return removed, err
	}
	for _, w := range c.scans(partitions) {
		n, scanErr := w.Run(ctx)
		removed += n
		if scanErr != nil {
			return removed, scanErr
		}
	}
	return removed, err
}

// listPartitions returns the partitions, none for a plain table.
func (c *Cleaner) listPartitions() ([]idRange, error) {
	ctx, cancel := c.WithStatementTimeout()
	defer cancel()
	is, err := c.store.isPartitioned(ctx)
	if err != nil || !is {
		return nil, err
	}
	return c.store.List(ctx)
}

// scans returns the scans over the partitions whose rows are removed one by one. Each
// continues where it ended before. The default partition holds the ids below all others.
func (c *Cleaner) scans(partitions []idRange) []*Scan {
	kept, all := map[string]*Scan{}, []*Scan{}
	add := func(p idRange) {
		w := c.partitions[p.name]
		if w == nil {
			w = &Scan{Pause: c.Published.Pause}
		}
		w.Batch = func(_ context.Context, after int64) (Step, error) { return c.removeFrom(p, after) }
		kept[p.name], all = w, append(all, w)
	}
	add(idRange{End: partitions[0].First})
	for _, p := range partitions {
		if p.Large || p.kept {
			add(p)
		}
	}
	c.partitions = kept
	return all
}

// removeFrom removes a batch of published rows of one partition.
func (c *Cleaner) removeFrom(p idRange, after int64) (Step, error) {
	after = max(after, max(p.First, 1)-1) // the first partition has no lower bound
	s, err := c.removeBatch(after, p.End, func(ctx context.Context) (Step, error) {
		return c.store.PublishedIn(ctx, c.proof(), after, p.End)
	})
	c.huge.add(s.huge)
	if err == nil && !s.More && p.name == "" {
		c.reportLagging(s.Lagging)
	}
	return s, err
}

// dropOld drops partitions in the order of ids, up to the first that must stay because it is young.
// A partition with a row that must be kept stays, and delays no others; its rows are removed one by one.
// If the lock on outbox is not available, the other partitions are emptied only, and the next run drops them.
func (c *Cleaner) dropOld(ctx context.Context, partitions []idRange) (int64, error) {
	removed, table := int64(0), true
	for i, p := range partitions {
		if stopped := ctx.Err() != nil || c.Held.Err() != nil; stopped || !p.Closed {
			break
		}
		if p.kept {
			continue
		}
		reviewed, err := c.reviewed(p)
		if _, huge := c.store.hugeIn[p.name]; huge && err == nil {
			c.review, partitions[i].kept = nil, true
			continue
		}
		if err != nil || !reviewed {
			return removed, err
		}
		if table, err = c.drop(table); err != nil {
			return removed, err
		}
		removed, c.review = removed+c.review.Rows, nil
	}
	return removed, nil
}

// reviewed reports whether all rows of the partition have been reviewed and may be
// removed. A review that has to stop continues in the next run.
func (c *Cleaner) reviewed(p idRange) (bool, error) {
	if c.review == nil || c.review.name != p.name {
		ctx, cancel := c.WithStatementTimeout()
		defer cancel()
		v, err := c.store.BeginReview(ctx, p)
		if err != nil || v == nil {
			return false, err
		}
		c.review = v
	}
	for !c.review.Done {
		start := time.Now()
		ok, err := c.reviewBatch()
		if err != nil || !ok {
			return false, err
		}
		if !c.review.Done && !c.Published.Pause(time.Since(start)) {
			return false, nil
		}
	}
	return true, nil
}

func (c *Cleaner) reviewBatch() (ok bool, err error) {
	s, err := c.removeBatch(c.review.after, c.review.End, func(ctx context.Context) (_ Step, err error) {
		before := c.review.Rows
		ok, err = c.store.ReviewBatch(ctx, c.proof(), c.review)
		return Step{Removed: c.review.Rows - before}, err
	})
	return ok || s.More, err
}

// drop removes the partition that was reviewed, or only its rows unless table is set; or
// it returns ErrBusy.
func (c *Cleaner) drop(table bool) (dropped bool, err error) {
	ctx, cancel := c.WithStatementTimeout()
	defer cancel()
	dropped, err = c.store.Drop(ctx, c.proof(), c.review, table)
	switch {
	case errors.Is(err, ErrReview): // the next run reviews it again
		c.log.Debug("outbox: partition stays", "partition", c.review.name, "why", err)
		c.review, err = nil, ErrBusy
	case err == nil && (dropped || c.review.Rows > 0):
		c.log.Debug("outbox: partition removed", "partition", c.review.name, "rows", c.review.Rows, "dropped", dropped)
	}
	return dropped, err
}
