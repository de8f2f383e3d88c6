package handling

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/pg"
)

// hasExpired reports whether the event of a task without a transaction has expired. What an earlier attempt has begun
// outside of PostgreSQL, its handler finishes. Without PostgreSQL the clock of this host counts.
func (p *Processor) hasExpired(ctx context.Context, t *Task) (bool, error) {
	if t.Meta.Expires.IsZero() || t.Begun || t.Meta.Attempt > 1 || !t.FirstFailed.IsZero() {
		return false, nil
	}
	now := time.Now()
	if p.Store != nil {
		var err error
		if now, err = p.Store.Now(ctx); err != nil {
			return false, &NoteError{fmt.Errorf("read the time of PostgreSQL: %w", err)}
		}
	}
	return !now.Add(p.Ahead).Before(t.Meta.Expires), nil
}

// clock is the time of PostgreSQL. The zero value is not known, and nothing is past then.
type clock struct{ pg.Clock }

// queue adds a statement that reads the clock to a batch, if an event of the tasks may expire. The clock is set ahead.
func (c *clock) queue(b *pgx.Batch, tasks []Task, ahead time.Duration) {
	if slices.ContainsFunc(tasks, func(t Task) bool { return !t.Meta.Expires.IsZero() }) {
		b.Queue(pg.SQLNow).QueryRow(func(row pgx.Row) error {
			var now time.Time
			err := row.Scan(&now)
			c.Clock = pg.ClockAt(now.Add(ahead))
			return err
		})
	}
}

// isPast reports whether a time is past; zero never is.
func (c *clock) isPast(at time.Time) bool {
	return !at.IsZero() && c.IsRead() && !c.Now().Before(at)
}
