package outboxops

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
)

// BulkConfig tunes [Failures.RetryAll], [Failures.ResolveAll], [Deliveries.RequeueAll] and
// [Deliveries.ResolveAll]. It may be zero.
type BulkConfig struct {
	// DryRun counts and changes nothing.
	DryRun bool
	// Rate is how many events or deliveries are changed in a second at most. Zero means 1,000.
	Rate int
	// Progress is called with how many are done, after each part. Nil is not called.
	Progress func(done int)
	// Topics, unless it is nil, gets how many of the events go to which topic, or of which
	// stream the deliveries are, counted when they are picked. The topic is "" where none follows from the event's type.
	Topics map[string]int
}

const (
	defaultBulkRate = 1000
	bulkPart        = 100    // events in a statement
	dryRunPart      = 10_000 // the same, where they are only counted
)

const sqlFailureIDs = `
SELECT id, ` + tables.FailureTopic + ` FROM {schema}.outbox_failed` + tables.FailureWhere + `
   AND id > $13 AND ($14::bool OR (NOT held OR status = 'dead') AND num_nonnulls(payload, payload_bytes) > 0)
 ORDER BY id LIMIT $15`

// RetryAll is [Failures.Retry] for all events that a filter picks and that can
// be retried: waiting, failed or dead. It returns how many that were, also beside an
// error. They are changed in parts, each in a transaction of its own; what fails
// again meanwhile is not picked twice.
func (f *Failures) RetryAll(ctx context.Context, filter FailureFilter, cfg BulkConfig, why AuditInfo) (int, error) {
	return f.changeAll(ctx, "retry", f.sql.retry, filter.only(outbox.StatusWaiting, outbox.StatusFailed, outbox.StatusDead), false, cfg, why)
}

// ResolveAll is [Failures.Resolve] for all events that a filter picks.
func (f *Failures) ResolveAll(ctx context.Context, filter FailureFilter, cfg BulkConfig, why AuditInfo) (int, error) {
	return f.changeAll(ctx, "resolve", f.sql.resolve, filter.only(unresolved...), true, cfg, why)
}

// only leaves those of the filter's statuses that are possible.
func (f FailureFilter) only(possible ...string) FailureFilter {
	f.Statuses = onlyPossible(f.Statuses, possible)
	return f
}

// onlyPossible returns those of the wanted statuses that are possible, or all that are.
func onlyPossible(wanted, possible []string) []string {
	if len(wanted) == 0 {
		return possible
	}
	statuses := []string{""} // matches nothing, where an empty list matches all
	for _, s := range possible {
		if slices.Contains(wanted, s) {
			statuses = append(statuses, s)
		}
	}
	return statuses
}

func (f *Failures) changeAll(ctx context.Context, action, sql string, filter FailureFilter, heldToo bool, cfg BulkConfig, why AuditInfo) (int, error) {
	picked, err := filter.args()
	if err != nil {
		return 0, fmt.Errorf("outbox: %s failures: %w", action, err)
	}
	return bulk{
		what: action + " failures",
		next: func(ctx context.Context, last int64, limit int) ([]int64, []string, error) {
			return f.ids(ctx, picked, last, heldToo, limit)
		},
		change: func(ctx context.Context, ids []int64) (int, error) { return f.change(ctx, sql, ids, why) },
	}.run(ctx, cfg, why)
}

// bulk changes all that a filter picks, part by part.
type bulk struct {
	what   string                                                                                     // for errors
	next   func(ctx context.Context, last int64, limit int) (ids []int64, topics []string, err error) // above an id, in their order
	change func(ctx context.Context, ids []int64) (done int, err error)
}

func (b bulk) run(ctx context.Context, cfg BulkConfig, why AuditInfo) (done int, err error) {
	if cfg.Rate == 0 {
		cfg.Rate = defaultBulkRate
	}
	if err := errors.Join(check.NotNegative("Rate", cfg.Rate), why.check()); err != nil {
		return 0, b.failed(err)
	}
	part := min(cfg.Rate, bulkPart)
	pause := time.Duration(part) * time.Second / time.Duration(cfg.Rate)
	if cfg.DryRun {
		part = dryRunPart
	}
	for last := int64(0); ; {
		ids, topics, err := b.next(ctx, last, part)
		if err != nil {
			return done, b.failed(err)
		}
		if len(ids) == 0 {
			return done, nil
		}
		n := len(ids)
		if !cfg.DryRun {
			if n, err = b.change(ctx, ids); err != nil {
				return done, b.failed(err)
			}
		}
		last, done = ids[len(ids)-1], done+n
		cfg.report(done, topics)
		if len(ids) < part {
			return done, nil
		}
		if !cfg.DryRun {
			wait.Sleep(ctx, pause)
		}
		if err := ctx.Err(); err != nil {
			return done, b.failed(err)
		}
	}
}

func (b bulk) failed(err error) error {
	return fmt.Errorf("outbox: %s: %w", b.what, orNotMigrated(err))
}

// report passes on how many are done, and the topics of the last part.
func (c BulkConfig) report(done int, topics []string) {
	for _, topic := range topics {
		if c.Topics != nil {
			c.Topics[topic]++
		}
	}
	if c.Progress != nil {
		c.Progress(done)
	}
}

// ids returns the next rows that a filter picks, and their topics.
func (f *Failures) ids(ctx context.Context, filter []any, last int64, heldToo bool, limit int) (ids []int64, topics []string, err error) {
	rows, err := f.db.Query(ctx, f.sql.ids, slices.Concat([]any{pg.PlanEachTime}, filter, []any{last, heldToo, limit})...)
	if err != nil {
		return nil, nil, err
	}
	var id int64
	var topic string
	_, err = pgx.ForEachRow(rows, []any{&id, &topic}, func() error {
		ids, topics = append(ids, id), append(topics, topic)
		return nil
	})
	return ids, topics, err
}
