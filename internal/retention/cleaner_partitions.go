package retention

import (
	"cmp"
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
	if may, err := c.mayRemovePublished(); err != nil || !may {
		return 0, err
	}
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
		c.reportLagging(s)
	}
	return s, err
}

// dropOld drops partitions in the order of ids, up to the first whose rows are young, or are not sent. Others that must
// stay delay none. The rows of one with a row that must be kept, or is younger than later partitions, are removed one
// by one. One that another transaction has locked waits, with its review, for the next run; the error is ErrBusy then.
// If the lock on outbox is not available, the other partitions are emptied only, and the next run drops them.
func (c *Cleaner) dropOld(ctx context.Context, partitions []idRange) (removed int64, err error) {
	c.forgetPartitions(partitions)
	table := true
	var busy error
	for i, p := range partitions {
		if stopped := ctx.Err() != nil || c.Held.Err() != nil; stopped || !p.Closed {
			break
		}
		if p.kept {
			continue
		}
		reviewed, kept, err := c.reviewed(partitions[i:])
		if kept && err == nil {
			delete(c.reviews, p.name)
			partitions[i].kept = true
			continue
		}
		if err != nil || !reviewed {
			return removed, cmp.Or(err, busy)
		}
		start := time.Now()
		v := c.reviews[p.name]
		dropped, err := c.drop(v, table)
		if errors.Is(err, ErrBusy) { // who reads outbox has waited behind our try to lock it
			busy = err
			c.Published.Pause(time.Since(start))
			continue
		}
		if err != nil {
			return removed, err
		}
		table, removed = dropped, removed+v.Rows
		delete(c.reviews, p.name)
	}
	return removed, busy
}

// forgetPartitions forgets what is known of partitions that are not there any more.
func (c *Cleaner) forgetPartitions(partitions []idRange) {
	reviews, young := map[string]*Review{}, map[string]bool{}
	for _, p := range partitions {
		if v := c.reviews[p.name]; v != nil {
			reviews[p.name] = v
		}
		if c.young[p.name] {
			young[p.name] = true
		}
	}
	c.reviews, c.young = reviews, young
}

// reviewed reports whether all rows of the first of these partitions have been reviewed and may be removed, or whether
// the partition is kept for a row that stays. A review that has to stop continues in the next run.
func (c *Cleaner) reviewed(partitions []idRange) (done, kept bool, err error) {
	done, young, err := c.finishReview(partitions[0])
	if _, huge := c.store.hugeIn[partitions[0].name]; huge || err != nil || !young {
		return done, huge, err
	}
	ctx, cancel := c.WithStatementTimeout()
	defer cancel()
	if kept, err = c.store.haveOld(ctx, partitions[1:]); kept && !c.young[partitions[0].name] {
		c.young[partitions[0].name] = true
		c.log.Warn("outbox: an event in a partition of outbox is younger than later events, as if a clock had been set; "+
			"it stays until it is old, and the rows of its partition are removed one by one", "partition", partitions[0].name)
	}
	return false, kept, err
}

// finishReview reviews the rows of a partition that have not been reviewed. It reports whether all of them may be
// removed, and if not, whether that is for a young one.
func (c *Cleaner) finishReview(p idRange) (done, young bool, err error) {
	v := c.reviews[p.name]
	if v == nil {
		ctx, cancel := c.WithStatementTimeout()
		defer cancel()
		if v, err = c.store.BeginReview(ctx, p); err != nil || v == nil {
			return false, v == nil, err
		}
		c.reviews[p.name] = v
	}
	for !v.Done {
		start := time.Now()
		ok, err := c.reviewBatch(v)
		if err != nil || !ok {
			return false, v.young, err
		}
		if !v.Done && !c.Published.Pause(time.Since(start)) {
			return false, false, nil
		}
	}
	return true, false, nil
}

func (c *Cleaner) reviewBatch(v *Review) (ok bool, err error) {
	s, err := c.removeBatch(v.after, v.End, func(ctx context.Context) (_ Step, err error) {
		before := v.Rows
		ok, err = c.store.ReviewBatch(ctx, c.proof(), v)
		return Step{Removed: v.Rows - before}, err
	})
	return ok || s.More, err
}

// drop removes the partition of a review, or only its rows unless table is set; or
// it returns ErrBusy.
func (c *Cleaner) drop(v *Review, table bool) (dropped bool, err error) {
	ctx, cancel := c.WithStatementTimeout()
	defer cancel()
	dropped, err = c.store.Drop(ctx, c.proof(), v, table)
	switch {
	case errors.Is(err, ErrReview): // the next run reviews it again
		c.log.Debug("outbox: partition stays", "partition", v.name, "why", err)
		delete(c.reviews, v.name)
		err = ErrBusy
	case errors.Is(err, ErrBusy):
		if v.busy++; v.busy == busyRuns {
			c.reportLocked(ctx, v)
		}
	case err == nil && (dropped || v.Rows > 0):
		c.log.Debug("outbox: partition removed", "partition", v.name, "rows", v.Rows, "dropped", dropped)
	}
	return dropped, err
}

// busyRuns is after how many runs in which a partition was locked the log says so.
const busyRuns = 3

// reportLocked logs that the partition of a review is locked, and by which transaction, if that is known.
func (c *Cleaner) reportLocked(ctx context.Context, v *Review) {
	attrs := []any{"partition", v.name, "runs", busyRuns}
	holder, prepared, err := c.store.holderOf(ctx, v.name)
	switch {
	case err != nil:
	case prepared != "":
		attrs = append(attrs, "prepared_transaction", prepared)
	default:
		attrs = append(attrs, holder.Attrs()...)
	}
	c.log.Warn("outbox: a transaction has locked a partition of outbox whose events are old enough to go, so it stays", attrs...)
}
