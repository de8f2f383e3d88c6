package outbox

import (
	"context"
	"errors"
	"time"
)

// makePartitions makes partitions ahead of need, if outbox has any.
func (c *cleaner) makePartitions(context.Context) (int64, error) {
	ctx, cancel := c.soon(c.held)
	defer cancel()
	is, err := c.store.isPartitioned(ctx)
	if err != nil || !is {
		return 0, err
	}
	n, err := c.store.makePartitions(ctx)
	if n > 0 {
		c.log.Debug("outbox: partitions made", "n", n)
	}
	return int64(n), err
}

// cleanOutbox removes published rows: one by one from a plain table, and with their
// partition from a partitioned one. There they go one by one where that cannot be:
// from the default partition, which never goes, and from large ones.
func (c *cleaner) cleanOutbox(ctx context.Context) (gone int64, err error) {
	parts, err := c.listParts()
	if err != nil {
		return 0, err
	}
	if len(parts) == 0 {
		return c.published.run(ctx)
	}
	if gone, err = c.dropOld(ctx, parts); err != nil && !errors.Is(err, errBusy) {
		return gone, err
	}
	for _, w := range c.walks(parts) {
		n, walkErr := w.run(ctx)
		gone += n
		if walkErr != nil {
			return gone, walkErr
		}
	}
	return gone, err
}

// listParts returns the partitions, none for a plain table.
func (c *cleaner) listParts() ([]idRange, error) {
	ctx, cancel := c.soon(c.held)
	defer cancel()
	is, err := c.store.isPartitioned(ctx)
	if err != nil || !is {
		return nil, err
	}
	return c.store.list(ctx)
}

// walks returns those over the partitions whose rows go one by one, each from where
// it stood. The default partition holds the ids below all others.
func (c *cleaner) walks(parts []idRange) []*walk {
	kept, all := map[string]*walk{}, []*walk{}
	add := func(p idRange) {
		w := c.parts[p.name]
		if w == nil {
			w = &walk{rest: c.published.rest}
		}
		w.batch = func(_ context.Context, after int64) (step, error) { return c.cleanPart(p, after) }
		kept[p.name], all = w, append(all, w)
	}
	add(idRange{behind: parts[0].first})
	for _, p := range parts {
		if p.large {
			add(p)
		}
	}
	c.parts = kept
	return all
}

func (c *cleaner) cleanPart(p idRange, after int64) (step, error) {
	ctx, cancel := c.soon(c.held)
	defer cancel()
	s, err := c.store.part(ctx, c.proof(), max(after, p.first-1), p.behind)
	if err == nil && !s.more && p.name == "" {
		c.reportStanding(s.standing)
	}
	return s, err
}

// dropOld drops partitions in the order of ids, up to the first that must stay. Where
// the lock on outbox was not had, the others are emptied, and the next run asks again.
func (c *cleaner) dropOld(ctx context.Context, parts []idRange) (int64, error) {
	gone, whole := int64(0), true
	for _, p := range parts {
		if stopped := ctx.Err() != nil || c.held.Err() != nil; stopped || !p.closed {
			break
		}
		reviewed, err := c.reviewed(p)
		if err != nil || !reviewed {
			return gone, err
		}
		if whole, err = c.drop(whole); err != nil {
			return gone, err
		}
		gone, c.review = gone+c.review.rows, nil
	}
	return gone, nil
}

// reviewed reports whether all rows of the partition have been looked at and may go.
// A review that has to stop goes on in the next run.
func (c *cleaner) reviewed(p idRange) (bool, error) {
	if c.review == nil || c.review.name != p.name {
		ctx, cancel := c.soon(c.held)
		defer cancel()
		v, err := c.store.begin(ctx, p)
		if err != nil || v == nil {
			return false, err
		}
		c.review = v
	}
	for !c.review.done {
		start := time.Now()
		ok, err := c.look()
		if err != nil || !ok {
			return false, err
		}
		if !c.review.done && !c.published.rest(time.Since(start)) {
			return false, nil
		}
	}
	return true, nil
}

func (c *cleaner) look() (bool, error) {
	ctx, cancel := c.soon(c.held)
	defer cancel()
	return c.store.look(ctx, c.proof(), c.review)
}

// drop removes the partition that was reviewed, or its rows only, or returns errBusy.
func (c *cleaner) drop(whole bool) (dropped bool, err error) {
	ctx, cancel := c.soon(c.held)
	defer cancel()
	dropped, err = c.store.drop(ctx, c.proof(), c.review, whole)
	switch {
	case errors.Is(err, errReview): // the next run looks once more
		c.log.Debug("outbox: partition stays", "partition", c.review.name, "why", err)
		c.review, err = nil, errBusy
	case err == nil && (dropped || c.review.rows > 0):
		c.log.Debug("outbox: partition removed", "partition", c.review.name, "rows", c.review.rows, "dropped", dropped)
	}
	return dropped, err
}
