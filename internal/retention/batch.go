package retention

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/pg"
)

// removeBatch calls remove for rows of outbox above an id. If PostgreSQL cannot print a row for the archive, that row
// stays, and remove is called again for the others. After a batch that took too long the next one is smaller, and
// the step says that there is more to do: the same batch would take too long each time. A row that takes too long
// alone is named in the error.
func (c *Cleaner) removeBatch(after, end int64, remove func(context.Context) (Step, error)) (Step, error) {
	for {
		began := time.Now()
		ctx, cancel := c.WithStatementTimeout()
		s, err := remove(ctx)
		cancel()
		if err == nil {
			c.store.grow(s.Removed, time.Since(began), c.StatementTimeout)
			return s, nil
		}
		kept, err := c.keepUnprintable(after, end, err)
		switch {
		case kept:
		case !tookTooLong(err) || c.Held.Err() != nil:
			return s, err
		case c.store.shrink():
			c.log.Warn("outbox: a batch of rows of outbox took too long to remove, so the next ones are smaller", "rows", c.store.batch, "error", err)
			return Step{More: true}, nil
		default:
			return s, c.nameRow(after, end, err)
		}
	}
}

// grow lets the next batch be larger after one that removed many rows, and was quick.
func (r *Store) grow(removed int64, took, most time.Duration) {
	if 2*removed > int64(r.batch) && took < most/4 {
		r.batch = min(2*r.batch, r.Cfg.BatchSize)
	}
}

// shrink halves the next batch. It returns false if the last one had one row.
func (r *Store) shrink() bool {
	if r.batch == 1 {
		return false
	}
	r.batch /= 2
	return true
}

// nameRow adds to an error the row of a batch of one.
func (c *Cleaner) nameRow(after, end int64, cause error) error {
	ctx, cancel := c.WithStatementTimeout()
	defer cancel()
	id, err := c.store.rowAfter(ctx, after, end, []int64{}, math.MaxInt32)
	if err != nil {
		return cause
	}
	return fmt.Errorf("row %d of outbox takes too long alone: %w", id, cause)
}

// keepUnprintable finds the first row of a batch that PostgreSQL cannot print and excludes it from the archive. The
// error is that of the batch, or says that the search took too long.
func (c *Cleaner) keepUnprintable(after, end int64, failed error) (kept bool, err error) {
	if c.cfg.Rules.Archive == nil || !c.cannotPrint(failed) {
		return false, failed
	}
	ctx, cancel := c.WithStatementTimeout()
	last, cause := c.store.lastPrintable(ctx, after, end)
	cancel()
	switch {
	case c.Held.Err() != nil:
		return false, failed
	case !c.cannotPrint(cause) && tookTooLong(cause):
		return false, cause
	case !c.cannotPrint(cause):
		return false, failed
	}
	ctx, cancel = c.WithStatementTimeout()
	defer cancel()
	id, err := c.store.keepNext(ctx, last, end)
	if err != nil {
		return false, failed
	}
	c.log.Error("outbox: an event cannot be archived, because PostgreSQL cannot print it, so its row of outbox stays; "+
		"it is tried again when another process leads", "id", id, "error", cause)
	return true, nil
}

// cannotPrint reports whether PostgreSQL could not print a row. Of several rows that take too long, none is to blame.
func (c *Cleaner) cannotPrint(err error) bool {
	return pg.IsUnreadable(err) || c.store.batch == 1 && tookTooLong(err)
}

// tookTooLong reports whether PostgreSQL or the archive has not ended a batch in time.
func tookTooLong(err error) bool {
	return pg.IsCancelled(err) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, contain.ErrAbandoned)
}
